//! A worker in one page: a business write and a command in one transaction, under a lease.
//!
//! `cargo run --example worker -- app.db` works on that database; without a path on a fresh one that
//! is removed at the end. Nothing is sent here: the command waits for `fencepost run`.
#![expect(clippy::print_stdout, reason = "the example talks to its reader")]

use fencepost::rules::Code;
use fencepost::sqlite::{self, Fenced, Lease, NewCommand, WorkerError};
use rusqlite::{Connection, TransactionBehavior};
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let fresh = tempfile::tempdir()?;
    let path = std::env::args_os().nth(1).map_or_else(|| fresh.path().join("app.db"), Into::into);
    let mut db = Connection::open(&path)?;
    set_up(&mut db)?;

    let lease = take(&mut db, "order/17")?;
    println!("acquired order/17 with token {}, {} commands inherited", lease.token, lease.backlog.len());
    pay(&mut db, &lease)?;
    println!("paid, and the webhook is queued in the same transaction");

    // Somebody else takes over while we are paused. When we wake up, the database refuses us, and our
    // business write with us.
    give_back(&mut db, &lease)?;
    let newer = take(&mut db, "order/17")?;
    match pay(&mut db, &lease) {
        Err(error) if error.code() == Some(Code::StaleToken) => println!("refused: {error}"),
        other => return Err(format!("a stale worker got {other:?}").into()),
    }
    give_back(&mut db, &newer)?;
    let payments: i64 = db.query_row("SELECT count(*) FROM payments", [], |row| row.get(0))?;
    println!("{payments} payment(s) in {}", path.display());
    Ok(())
}

/// Once for each connection, and once for each database.
fn set_up(db: &mut Connection) -> Result<(), Box<dyn Error>> {
    sqlite::prepare(db)?;
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    sqlite::migrate(&tx)?;
    tx.execute_batch("CREATE TABLE IF NOT EXISTS payments(account TEXT NOT NULL, cents INTEGER NOT NULL) STRICT")?;
    tx.commit()?;
    Ok(())
}

/// A holder is one acquisition, so each gets a new one.
fn take(db: &mut Connection, scope: &str) -> Result<Lease, Box<dyn Error>> {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let lease = sqlite::acquire(&tx, scope, &sqlite::new_holder(), Duration::from_secs(30))?;
    tx.commit()?;
    Ok(lease)
}

/// Fence first, business writes next, the command last.
fn pay(db: &mut Connection, lease: &Lease) -> Result<(), WorkerError> {
    let held = lease.held();
    let mut fenced = Fenced::begin(db, &held)?;
    fenced
        .sql()?
        .execute("INSERT INTO payments(account, cents) VALUES (?1, ?2)", ("acct-7", 4200))
        .map_err(WorkerError::Database)?;
    fenced.enqueue(&NewCommand::webhook("billing", r#"{"paid":true}"#))?;
    fenced.commit()
}

fn give_back(db: &mut Connection, lease: &Lease) -> Result<(), Box<dyn Error>> {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    sqlite::release(&tx, &lease.scope, lease.token, &lease.holder)?;
    tx.commit()?;
    Ok(())
}
