//! The library's worker side: every verb, what it answers, and what a refusal leaves behind.

use fencepost::rules::{Code, FencingToken};
use fencepost::sqlite::{
    self, Enqueued, Held, NewCommand, WorkerError, acquire, enqueue, fence, new_holder, release, renew, seal,
};
use rusqlite::{Connection, TransactionBehavior};
use std::path::Path;
use std::time::Duration;

const TTL: Duration = Duration::from_secs(30);

/// A database file with the contract and a business table.
fn database(directory: &Path) -> Connection {
    let mut connection = Connection::open(directory.join("app.db")).unwrap();
    sqlite::prepare(&connection).unwrap();
    let tx = connection.transaction().unwrap();
    sqlite::migrate(&tx).unwrap();
    tx.execute_batch("CREATE TABLE IF NOT EXISTS orders(note TEXT)").unwrap();
    tx.commit().unwrap();
    connection
}

fn token(number: i64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn immediate(connection: &mut Connection) -> rusqlite::Transaction<'_> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap()
}

/// Runs one verb in a transaction of its own and commits it if it was accepted.
fn once<T>(
    connection: &mut Connection,
    verb: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, WorkerError>,
) -> Result<T, WorkerError> {
    let tx = immediate(connection);
    let answer = verb(&tx)?;
    tx.commit().unwrap();
    Ok(answer)
}

fn number(connection: &Connection, sql: &str) -> i64 {
    connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

fn new(id_and_seq: Enqueued) -> (String, i64) {
    match id_and_seq {
        Enqueued::New { id, seq } => (id, seq),
        Enqueued::Duplicate { .. } => panic!("{id_and_seq:?}"),
    }
}

#[test]
fn a_lease_from_acquire_to_release() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let (first, second) = (new_holder(), new_holder());
    assert_ne!(first, second);
    let lease = once(&mut db, |tx| acquire(tx, "order/17", &first, TTL)).unwrap();
    assert_eq!((lease.token.get(), lease.holder.as_str(), lease.backlog.len()), (1, first.as_str(), 0));
    let (id, seq) = new(once(&mut db, |tx| {
        fence(tx, &lease.held())?;
        enqueue(tx, &lease.held(), &NewCommand::webhook("billing", "{}").key("k").lane("l"))
    })
    .unwrap());
    assert_eq!((id.len(), seq), (32, 1));

    let refused = once(&mut db, |tx| acquire(tx, "order/17", &second, TTL)).unwrap_err();
    assert_eq!(refused.code(), Some(Code::Held));
    assert!(refused.to_string().contains(&first), "{refused}");
    let until_ms = once(&mut db, |tx| renew(tx, "order/17", lease.token, &first, 2 * TTL)).unwrap();
    assert!(until_ms >= lease.until_ms + 29_000);
    once(&mut db, |tx| release(tx, "order/17", lease.token, &first)).unwrap();

    let newer = once(&mut db, |tx| acquire(tx, "order/17", &second, TTL)).unwrap();
    assert_eq!(newer.token.get(), 2);
    let [inherited] = &newer.backlog[..] else { panic!("{:?}", newer.backlog) };
    assert_eq!((inherited.id.as_str(), inherited.seq, inherited.token), (id.as_str(), 1, 1));
    assert_eq!((inherited.lane.as_str(), inherited.key.as_deref()), ("l", Some("k")));
    assert_eq!((inherited.state.as_str(), inherited.effect.as_str()), ("pending", "none"));
    for stale in [
        once(&mut db, |tx| renew(tx, "order/17", lease.token, &first, TTL)).unwrap_err(),
        once(&mut db, |tx| release(tx, "order/17", lease.token, &first)).unwrap_err(),
        once(&mut db, |tx| fence(tx, &lease.held())).unwrap_err(),
        once(&mut db, |tx| enqueue(tx, &lease.held(), &NewCommand::webhook("billing", "{}"))).unwrap_err(),
    ] {
        assert_eq!(stale.to_string(), "FP001 stale token: 1 for scope order/17, the watermark is 2");
    }
}

#[test]
fn seal_returns_the_backlog_and_locks_the_older_holder_out() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let old = Held::new("s", token(7)).holder("h7").source("etcd-a");
    once(&mut db, |tx| enqueue(tx, &old, &NewCommand::email("main", "{}").id("c-7"))).unwrap();
    let backlog = once(&mut db, |tx| seal(tx, "s", token(8), Some("h8"), Some("etcd-a"))).unwrap();
    assert_eq!(backlog.iter().map(|waiting| waiting.id.as_str()).collect::<Vec<_>>(), ["c-7"]);
    let stale = once(&mut db, |tx| fence(tx, &old)).unwrap_err();
    assert_eq!(stale.code(), Some(Code::StaleToken));
    let other = once(&mut db, |tx| seal(tx, "s", token(9), None, Some("zk-b"))).unwrap_err();
    assert_eq!(other.to_string(), "FP014 other source: 9 for scope s, the watermark is 8, its source is etcd-a");
}
