//! The library's worker side: every verb, what it answers, and what a refusal leaves behind.

use fencepost::rules::{Code, FencingToken};
use fencepost::sqlite::{
    self, Content, Enqueued, Fenced, Held, NewCommand, WorkerError, acquire, enqueue, fence, new_holder, release,
    renew, seal,
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

#[test]
fn a_repeat_inserts_nothing_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let held = Held::new("s", token(4));
    let by_key = NewCommand::webhook("billing", "{}").key("paid-17").headers("{}");
    let by_id = NewCommand::new("webhook", "billing", Content::Bytes(b"{}")).id("c-1").lane("other");
    let (first, _) = new(once(&mut db, |tx| enqueue(tx, &held, &by_key)).unwrap());
    assert_eq!(new(once(&mut db, |tx| enqueue(tx, &held, &by_id)).unwrap()), ("c-1".to_owned(), 2));
    let known = |id: &str| Enqueued::Duplicate { id: id.to_owned(), state: "pending".to_owned() };
    // The fence and the watermark act all the same.
    let newer = Held::new("s", token(5));
    once(&mut db, |tx| {
        tx.execute("INSERT INTO orders VALUES ('a row of another table, with a rowid of its own')", []).unwrap();
        assert_eq!(enqueue(tx, &newer, &by_key)?, known(&first));
        assert_eq!(enqueue(tx, &newer, &by_id)?, known("c-1"));
        // Another key for a known id is refused, and everything before it is undone.
        enqueue(tx, &newer, &by_id.key("never given")).map(drop)
    })
    .unwrap_err();
    once(&mut db, |tx| enqueue(tx, &newer, &by_key)).unwrap();
    assert_eq!(number(&db, "SELECT token FROM outbox_lease"), 5);
    for (command, code) in [
        (NewCommand::webhook("billing", "other").key("paid-17"), Code::KeyExists),
        (NewCommand::webhook("billing", "other").id("c-1"), Code::IdExists),
    ] {
        let refused = once(&mut db, |tx| enqueue(tx, &newer, &command)).unwrap_err();
        assert_eq!(refused.code(), Some(code), "{refused}");
    }
    assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 2);
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 0);
}

#[test]
fn the_guard_keeps_both_or_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let held = Held::new("s", token(1)).holder("h");
    let command = NewCommand::webhook("billing", "{}");
    let business =
        |fenced: &Fenced<'_>| fenced.sql().unwrap().execute("INSERT INTO orders VALUES ('paid')", []).unwrap();

    let mut fenced = Fenced::begin(&mut db, &held).unwrap();
    business(&fenced);
    assert_eq!(new(fenced.enqueue(&command).unwrap()).1, 1);
    fenced.commit().unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 1);

    let mut dropped = Fenced::begin(&mut db, &held).unwrap();
    business(&dropped);
    dropped.enqueue(&command).unwrap();
    drop(dropped);
    let rolled_back = Fenced::begin(&mut db, &held).unwrap();
    business(&rolled_back);
    rolled_back.rollback().unwrap();

    // A refusal that was passed over by hand, and a transaction of one's own in its place.
    let replaced = Fenced::begin(&mut db, &held).unwrap();
    let kept = replaced.sql().unwrap();
    kept.execute_batch("ROLLBACK; BEGIN; INSERT INTO orders VALUES ('after')").unwrap();
    assert!(matches!(replaced.commit(), Err(WorkerError::Left)));
    let ended = Fenced::begin(&mut db, &held).unwrap();
    ended.sql().unwrap().execute_batch("ROLLBACK").unwrap();
    assert!(matches!(ended.sql(), Err(WorkerError::Left)));
    ended.rollback().unwrap();

    let stale = Fenced::begin(&mut db, &Held::new("s", token(1)).holder("other")).unwrap_err();
    assert_eq!(
        stale.to_string(),
        "FP002 token belongs to another holder: 1 for scope s, the watermark is 1, the holder is h"
    );
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 1);
    assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 1);
}

#[test]
fn refusals_are_counted_in_one_row_a_scope() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let good = Held::new("s", token(5)).holder("h").source("etcd-a");
    once(&mut db, |tx| fence(tx, &good)).unwrap();
    once(&mut db, |tx| acquire(tx, "l", "h", TTL)).unwrap();
    for (held, code, counted) in [
        (Held::new("s", token(4)), Code::StaleToken, 1),
        (Held::new("s", token(5)).holder("other"), Code::OtherHolder, 2),
        (Held::new("s", token(1 << 50)), Code::JumpsTooFar, 3),
        (Held::new("s", token(6)).source("zk-b"), Code::OtherSource, 4),
        (Held::new("s", token(6)).source("lease"), Code::Held, 4),
        (Held::new("s", token(6)).source(""), Code::IllegalValue, 4),
        (Held::new("l", token(2)), Code::NeverSealed, 1),
    ] {
        let refused = once(&mut db, |tx| fence(tx, &held)).unwrap_err();
        assert_eq!(refused.code(), Some(code), "{refused}");
        let count: i64 =
            db.query_row("SELECT count FROM outbox_refusal WHERE scope = ?1", [held.scope], |row| row.get(0)).unwrap();
        assert_eq!(count, counted, "{refused}");
    }
    let row = "SELECT token || ' ' || watermark FROM outbox_refusal WHERE scope = 'l'";
    assert_eq!(db.query_row(row, [], |row| row.get::<_, String>(0)).unwrap(), "2 1");

    // A count that can't be written doesn't hide the refusal.
    db.execute_batch("DROP TABLE outbox_refusal").unwrap();
    let refused = once(&mut db, |tx| fence(tx, &Held::new("s", token(4)))).unwrap_err();
    assert_eq!(refused.code(), Some(Code::StaleToken));
}

#[test]
fn an_illegal_value_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    db.execute_batch("UPDATE outbox_policy SET max_payload = 10").unwrap();
    let held = Held::new("s", token(1));
    let command = NewCommand::webhook("billing", "{}");
    let long = "x".repeat(256);
    for (command, right) in [
        (NewCommand::new("", "billing", "{}"), "kind: it is empty"),
        (NewCommand::webhook("a\0b", "{}"), "destination: it has a character that is not allowed"),
        (command.lane("a\nb"), "lane: it has a character that is not allowed"),
        (command.key(&long), "key: it is too long"),
        (command.id("a.b"), "id: it has a character that is not allowed"),
        (command.not_before_ms(1_796_205_600), "not_before_ms: it must be milliseconds since 1970, 10^11 to 10^13"),
        (command.expires_at_ms(0), "expires_at_ms: it must be milliseconds since 1970, 10^11 to 10^13"),
        (NewCommand::webhook("billing", "12345678901"), "payload: 11 bytes, and max_payload is 10"),
        (command.headers("{\"a\":\"bcd\"}"), "headers: 11 bytes, and max_payload is 10"),
        (command.traceparent(&long), "traceparent: it is too long"),
    ] {
        let refused = once(&mut db, |tx| enqueue(tx, &held, &command)).unwrap_err();
        assert_eq!(refused.to_string(), format!("FP003 illegal value: {right}"));
    }
    for (refused, right) in [
        (once(&mut db, |tx| fence(tx, &Held::new("", token(1)))).unwrap_err(), "scope: it is empty"),
        (
            once(&mut db, |tx| fence(tx, &held.holder("\t"))).unwrap_err(),
            "holder: it has a character that is not allowed",
        ),
        (
            once(&mut db, |tx| acquire(tx, "s", "h", Duration::ZERO)).unwrap_err(),
            "ttl: it must be 1 to 2678400000 milliseconds",
        ),
        (
            once(&mut db, |tx| acquire(tx, "s", "h", Duration::MAX)).unwrap_err(),
            "ttl: it must be 1 to 2678400000 milliseconds",
        ),
    ] {
        assert_eq!(refused.to_string(), format!("FP003 illegal value: {right}"));
    }
    let lease = once(&mut db, |tx| acquire(tx, "s", "h", TTL)).unwrap();
    once(&mut db, |tx| release(tx, "s", lease.token, "h")).unwrap();
    let again = once(&mut db, |tx| acquire(tx, "s", "h", TTL)).unwrap_err();
    assert!(again.to_string().starts_with("FP003 illegal value: holder: it has acquired this scope before"), "{again}");
}

#[test]
fn a_verb_wants_an_open_transaction_and_the_write_lock() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = database(directory.path());
    let mut other = Connection::open(directory.path().join("app.db")).unwrap();
    other.busy_timeout(Duration::ZERO).unwrap();
    let held = Held::new("s", token(1));
    let command = NewCommand::webhook("billing", "{}");

    let tx = db.transaction().unwrap();
    tx.execute_batch("COMMIT").unwrap();
    assert!(matches!(enqueue(&tx, &held, &command), Err(WorkerError::NotInTransaction)));
    assert!(matches!(acquire(&tx, "s", "h", TTL), Err(WorkerError::NotInTransaction)));
    drop(tx);

    // Somebody else has the write lock.
    let writer = immediate(&mut db);
    fence(&writer, &held).unwrap();
    let deferred = other.transaction().unwrap();
    assert!(matches!(fence(&deferred, &held), Err(WorkerError::Locked)));
    drop(deferred);
    assert!(matches!(Fenced::begin(&mut other, &held), Err(WorkerError::Locked)));
    writer.commit().unwrap();

    // This transaction read an older state than the one that is there now.
    let old = other.transaction().unwrap();
    assert_eq!(number(&old, "SELECT count(*) FROM outbox"), 0);
    once(&mut db, |tx| enqueue(tx, &held, &command)).unwrap();
    assert!(matches!(enqueue(&old, &held, &command), Err(WorkerError::Locked)));
    drop(old);
    once(&mut other, |tx| enqueue(tx, &held, &command)).unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 2);
}

/// Goal: two workers that take a scope from each other never leave a stale command or a gap. Method: two
/// connections acquire, write and release as fast as they can; afterwards seq, tokens and business rows
/// must fit together.
#[test]
fn two_connections_contend_for_one_scope() {
    let directory = tempfile::tempdir().unwrap();
    let db = database(directory.path());
    let worker = |name: &'static str| {
        let mut db = Connection::open(directory.path().join("app.db")).unwrap();
        sqlite::prepare(&db).unwrap();
        move || {
            let mut written = 0;
            while written < 25 {
                let holder = new_holder();
                let Ok(lease) = once(&mut db, |tx| acquire(tx, "s", &holder, TTL)) else { continue };
                let mut fenced = Fenced::begin(&mut db, &lease.held()).unwrap();
                fenced.sql().unwrap().execute("INSERT INTO orders VALUES (?1)", [name]).unwrap();
                fenced.enqueue(&NewCommand::webhook("billing", name)).unwrap();
                fenced.commit().unwrap();
                once(&mut db, |tx| release(tx, "s", lease.token, &holder)).unwrap();
                written += 1;
            }
        }
    };
    let (one, two) = (worker("one"), worker("two"));
    std::thread::scope(|scope| {
        scope.spawn(one);
        scope.spawn(two);
    });
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 50);
    let mut statement = db.prepare("SELECT seq, token FROM outbox_status ORDER BY seq").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    let rows: Vec<(i64, i64)> = rows.map(Result::unwrap).collect();
    assert_eq!(rows, (1..=50).map(|at| (at, at)).collect::<Vec<_>>());
}
