//! A worker of the demo, in a process of its own: lease, booking, commands, and its own account of it.
//!
//! It does what any application does with the library, and reports each step on standard output as it
//! happens, so that its own words can be held against the database. It never checks its lease again
//! before it writes: that is the mistake which the fence is there for.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use fencepost::clock;
use fencepost::rules::Code;
use fencepost::sqlite::{Lease, NewCommand, WorkerError, acquire, enqueue, new_holder, prepare, release};
use rusqlite::{Connection, TransactionBehavior};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::business;
use super::script::{Ask, Lane, PARTS, Part, SCOPE};

/// Exit status of a worker that was refused, by sysexits.
const REFUSED: u8 = 65;

/// How long a worker asks for a lease that somebody else holds.
const PATIENCE_MS: i64 = 10_000;

/// Options of `fencepost demo-worker`, which `fencepost demo` starts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The demo's database
    database: PathBuf,
    /// Which part it plays
    worker: String,
    /// For how long it takes the lease
    #[arg(long)]
    ttl_ms: u64,
    /// Wait for a line on standard input between the acquisition and BEGIN
    #[arg(long)]
    wait: bool,
}

/// What a worker says, one line of JSON each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Said {
    /// It has the lease, until then.
    Acquired { token: i64, until_ms: i64 },
    /// Its transaction has begun.
    Begun,
    /// Its booking is written inside the transaction.
    Booked { rows: usize },
    /// Booking and commands are durable.
    Committed,
    /// The database said no; so many of its bookings are left.
    Refused { text: String, rows_left: usize },
}

/// Plays one part and returns the exit status.
pub(crate) fn run(args: &Args) -> anyhow::Result<u8> {
    let part = PARTS.iter().find(|part| part.worker == args.worker).context("there is no such worker")?;
    let mut connection = open(&args.database)?;
    let lease = take(&mut connection, Duration::from_millis(args.ttl_ms))?;
    say(&Said::Acquired { token: lease.token.get(), until_ms: lease.until_ms })?;
    if args.wait {
        std::io::stdin().read_line(&mut String::new()).context("can't wait for a line")?;
    }
    match work(&mut connection, &lease, part) {
        Ok(()) => say(&Said::Committed)?,
        Err(error) => return refused(&connection, part, error),
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    release(&transaction, SCOPE, lease.token, &lease.holder)?;
    transaction.commit()?;
    Ok(0)
}

fn open(database: &Path) -> anyhow::Result<Connection> {
    let connection = Connection::open(database).with_context(|| format!("can't open {}", database.display()))?;
    prepare(&connection)?;
    Ok(connection)
}

/// Asks until the lease is free: the one who holds it may be gone for good.
fn take(connection: &mut Connection, ttl: Duration) -> anyhow::Result<Lease> {
    let begun_ms = clock::now().boot_ms;
    loop {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        match acquire(&transaction, SCOPE, &new_holder(), ttl) {
            Ok(lease) => {
                transaction.commit()?;
                return Ok(lease);
            }
            Err(error) if error.code() == Some(Code::Held) && clock::now().boot_ms - begun_ms < PATIENCE_MS => {}
            Err(error) => return Err(error.into()),
        }
        drop(transaction);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The booking comes first and without a look at the token, so that the refusal of the command must
/// undo it.
fn work(connection: &mut Connection, lease: &Lease, part: &Part) -> anyhow::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    say(&Said::Begun)?;
    say(&Said::Booked { rows: business::book(&transaction, part.worker, part.books)? })?;
    for ask in part.asks {
        let payload = payload(ask);
        let command = match ask.lane {
            Lane::Hooks => NewCommand::webhook("billing", payload.as_str()),
            Lane::Mails => NewCommand::email("main", payload.as_str()),
        };
        enqueue(&transaction, &lease.held(), &command.id(ask.id).lane(ask.lane.as_str()))?;
    }
    transaction.commit()?;
    Ok(())
}

fn payload(ask: &Ask) -> String {
    let payload = match ask.lane {
        Lane::Hooks => json!({ "order": 17, "event": ask.says }),
        Lane::Mails => json!({
            "from": "Shop <shop@example.com>",
            "to": "Ann <ann@example.org>",
            "subject": ask.says,
            "text": format!("{}.\n", ask.says),
        }),
    };
    payload.to_string()
}

fn refused(connection: &Connection, part: &Part, error: anyhow::Error) -> anyhow::Result<u8> {
    let is_refusal = error.downcast_ref::<WorkerError>().is_some_and(|error| error.code().is_some());
    if !is_refusal {
        return Err(error);
    }
    let rows_left = business::bookings(connection)?.iter().filter(|(worker, _)| worker == part.worker).count();
    say(&Said::Refused { text: error.to_string(), rows_left })?;
    Ok(REFUSED)
}

/// Flushed, because the demo waits for it.
fn say(said: &Said) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(said)?)?;
    out.flush().context("nobody listens")
}
