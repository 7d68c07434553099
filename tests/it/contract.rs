//! The contract by itself: admission, lease, lane rows and plans, in plain SQL against `rules`.
//!
//! Tables of cases run against the database, and random sequences run against `rules::admission` and
//! the database at once: after each step both must give the same answer and know the same of the scope.

use fencepost::rules::{self, Code, FencingToken, ScopeFacts, ScopePolicy, TOKEN_MAX};
use fencepost::sqlite::{
    self, CONTRACT, Drift, Fenced, Held, NewCommand, SchemaError, WorkerError, contract_objects, enqueue, fence,
};
use proptest::prelude::*;
use rusqlite::{Connection, TransactionBehavior, params};

const INSERT: &str = "INSERT INTO outbox(scope, token, holder, source, kind, destination, payload)
    VALUES (?1, ?2, ?3, ?4, 'webhook', 'billing', '{}')";

/// A database in memory with the contract and a business table.
pub fn memory() -> Connection {
    let db = Connection::open_in_memory().unwrap();
    db.execute_batch(CONTRACT).unwrap();
    db.execute_batch("CREATE TABLE orders(note TEXT)").unwrap();
    db
}

/// What a statement answers: `ok`, a code, or `refused` for an error of SQLite itself.
pub fn said(answer: rusqlite::Result<usize>) -> String {
    match answer {
        Ok(_) => "ok".to_owned(),
        Err(error) => Code::find(&error.to_string()).map_or("refused", Code::as_str).to_owned(),
    }
}

pub fn say(db: &Connection, sql: &str) -> String {
    said(db.execute(sql, []))
}

pub fn insert(db: &Connection, scope: &str, token: i64, holder: Option<&str>, source: Option<&str>) -> String {
    said(db.execute(INSERT, params![scope, token, holder, source]))
}

pub fn number(db: &Connection, sql: &str) -> i64 {
    db.query_row(sql, [], |row| row.get(0)).unwrap_or_else(|error| panic!("{error}: {sql}"))
}

pub fn text(db: &Connection, sql: &str) -> Option<String> {
    db.query_row(sql, [], |row| row.get(0)).unwrap_or_else(|error| panic!("{error}: {sql}"))
}

pub fn now_ms(db: &Connection) -> i64 {
    number(db, "SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)")
}

pub fn token(number: i64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

/// Runs lines of `statement -- answer`, one after the other.
pub fn run_lines(db: &Connection, lines: &str) {
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (sql, right) = line.rsplit_once(" -- ").unwrap();
        assert_eq!(say(db, sql), right, "{sql}");
    }
}

#[test]
fn h01_a_stale_worker_is_refused_with_its_whole_transaction() {
    let directory = tempfile::tempdir().unwrap();
    let mut db = Connection::open(directory.path().join("app.db")).unwrap();
    sqlite::prepare(&db).unwrap();
    db.execute_batch(CONTRACT).unwrap();
    db.execute_batch("CREATE TABLE orders(note TEXT)").unwrap();
    for (number, source) in [(7, "etcd-a"), (8, "etcd-a")] {
        assert_eq!(insert(&db, "acct-7", number, None, Some(source)), "ok");
    }
    assert_eq!(insert(&db, "other", 7, None, None), "ok");

    let stale = Held::new("acct-7", token(7)).source("etcd-a");
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    tx.execute("INSERT INTO orders VALUES ('stale')", []).unwrap();
    let refused = enqueue(&tx, &stale, &NewCommand::email("main", "{}")).unwrap_err();
    assert_eq!(refused.to_string(), "FP001 stale token: 7 for scope acct-7, the watermark is 8");
    drop(tx);

    db.execute_batch("BEGIN IMMEDIATE; INSERT INTO orders VALUES ('stale')").unwrap();
    let refused = db.execute(INSERT, params!["acct-7", 7, None::<&str>, "etcd-a"]).unwrap_err();
    assert_eq!(refused.sqlite_error().unwrap().extended_code, 1811);
    assert_eq!(refused.to_string(), "FP001 stale token");
    assert!(db.is_autocommit(), "the refusal ended the transaction");

    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 0);
    assert_eq!(number(&db, "SELECT count(*) FROM outbox WHERE scope = 'acct-7'"), 2);
    assert_eq!(number(&db, "SELECT token FROM outbox_lease WHERE scope = 'acct-7'"), 8);
    // The library's refusal was counted; plain SQL can't count its own.
    assert_eq!(
        number(&db, "SELECT count FROM outbox_refusal WHERE scope = 'acct-7' AND token = 7 AND watermark = 8"),
        1
    );
    assert_eq!(insert(&db, "acct-7", 8, None, Some("etcd-a")), "ok");
    assert_eq!(insert(&db, "acct-7", 9, None, Some("etcd-a")), "ok");
    assert_eq!(insert(&db, "other", 7, None, None), "ok");
}

#[test]
fn h02_two_holders_with_an_equal_token() {
    let db = memory();
    for (holder, right) in [("W1", "ok"), ("W2", "FP002"), ("W1", "ok"), ("W2", "FP002")] {
        db.execute_batch("BEGIN IMMEDIATE; INSERT INTO orders VALUES ('before')").unwrap();
        assert_eq!(insert(&db, "a", 6, Some(holder), None), right);
        if right == "ok" {
            db.execute_batch("COMMIT").unwrap();
        }
    }
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 2);
    for _ in 0..4 {
        assert_eq!(insert(&db, "b", 6, None, None), "ok");
    }
    assert_eq!(text(&db, "SELECT group_concat(seq) FROM outbox_status WHERE scope = 'a'").unwrap(), "1,2");
    assert_eq!(text(&db, "SELECT group_concat(seq) FROM outbox_status WHERE scope = 'b'").unwrap(), "1,2,3,4");
}

#[test]
fn h06_an_absurdly_high_token_does_not_freeze_a_scope() {
    let db = memory();
    for scope in ["s", "t"] {
        assert_eq!(insert(&db, scope, 12, None, None), "ok");
    }
    let now_s = 1_796_205_600;
    for (number, right) in [
        (i64::MAX, "FP003"),
        (TOKEN_MAX + 1, "FP003"),
        (TOKEN_MAX, "FP012"),
        (now_s * 1_000_000_000, "FP012"),
        (now_s * 1_000_000, "FP012"),
        (now_s * 1_000, "FP012"),
        (-1, "FP003"),
        (0, "FP003"),
        (i64::MIN, "FP003"),
    ] {
        assert_eq!(insert(&db, "s", number, None, None), right, "{number}");
        assert_eq!(self::number(&db, "SELECT token FROM outbox_lease WHERE scope = 's'"), 12);
    }
    assert_eq!(
        say(&db, "INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',NULL,'webhook','billing','{}')"),
        "FP003"
    );
    assert_eq!(insert(&db, "s", 13, None, None), "ok");
    db.execute_batch("UPDATE outbox_scope SET max_jump = 1000 WHERE scope = 's'").unwrap();
    assert_eq!(insert(&db, "s", now_s, None, None), "FP012");
    db.execute_batch("UPDATE outbox_scope SET max_jump = NULL WHERE scope = 's'").unwrap();
    assert_eq!(insert(&db, "s", now_s, None, None), "ok");
    assert_eq!(insert(&db, "s", 14, None, None), "FP001");
    // What an operator's rebase writes: a new era, in which a named source begins again.
    db.execute_batch(
        "UPDATE outbox_scope SET era = era + 1, watermark = 0, holder = NULL, source = 'zk-b' WHERE scope = 's'",
    )
    .unwrap();
    assert_eq!(insert(&db, "s", 14, None, Some("zk-b")), "ok");
    assert_eq!(insert(&db, "s", now_s, None, None), "FP014");
    assert_eq!(insert(&db, "t", 13, None, None), "ok");
}

#[test]
fn h07_a_token_is_the_exact_integer_or_refused() {
    let db = memory();
    let into = |token: &str| {
        format!(
            "INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',{token},'webhook','billing','{{}}')"
        )
    };
    for (token, right, stored) in [
        ("'10'", "ok", 10),
        ("'9'", "FP001", 10),
        ("' 11'", "ok", 11),
        ("'11abc'", "refused", 11),
        ("11.0", "ok", 11),
        ("11.5", "refused", 11),
        ("X'0B'", "refused", 11),
        ("1e3", "ok", 1000),
        ("TRUE", "FP001", 1000),
        ("9223372036854775808", "refused", 1000),
    ] {
        for or in ["", "OR IGNORE"] {
            let answer = say(&db, &into(token).replacen("INSERT", &format!("INSERT {or}"), 1));
            assert_eq!(answer, right, "{or} {token}");
            assert_eq!(number(&db, "SELECT token FROM outbox_lease WHERE scope = 's'"), stored);
        }
    }
    assert_eq!(number(&db, "SELECT count(*) FROM outbox WHERE typeof(token) <> 'integer'"), 0);
}

#[test]
fn h23_only_integer_milliseconds_are_stored() {
    let db = memory();
    for (scope, value, right) in [
        ("t1", "strftime('%Y-%m-%dT%H:%M:%SZ','now','-60 seconds')", "refused"),
        ("t2", "datetime('now','-60 seconds')", "refused"),
        ("t3", "strftime('%Y-%m-%dT%H:%M:%f','now','-60 seconds')", "refused"),
        ("t4", "strftime('%Y-%m-%d %H:%M:%S','now','-60 seconds')||'+00:00'", "refused"),
        ("t5", "CAST(strftime('%s','now','-60 seconds') AS INTEGER)", "FP003"),
        ("t6", "CAST(strftime('%s','now','-60 seconds') AS INTEGER)*1000", "ok"),
        ("t7", "strftime('%s','now','-60 seconds')", "FP003"),
        ("t8", "julianday('now','-60 seconds')", "refused"),
        ("t9", "NULL", "ok"),
        ("t10", "CAST(CAST(strftime('%s','now','-60 seconds') AS INTEGER)*1000 AS TEXT)", "ok"),
    ] {
        let sql = format!(
            "INSERT INTO outbox(scope,token,kind,destination,payload,not_before_ms) VALUES('{scope}',1,'webhook','billing','{{}}',{value})"
        );
        assert_eq!(say(&db, &sql), right, "{scope}");
    }
    let now = now_ms(&db);
    for scope in ["t6", "t9", "t10"] {
        let due = number(&db, &format!("SELECT due_ms FROM outbox_lane WHERE scope = '{scope}'"));
        assert!(due <= now && due > now - 120_000, "{scope}: {due}");
    }
}

/// Prune is not part of the contract yet. What it will leave is made by hand, with the guards dropped:
/// no command at all, so that the next one gets the old `n` again.
#[test]
fn h24_a_row_number_that_comes_again_is_not_the_identity() {
    let db = memory();
    for _ in 0..500 {
        assert_eq!(insert(&db, "s", 1, None, None), "ok");
    }
    let old: Vec<String> = ids(&db);
    db.execute_batch(
        "DROP TRIGGER outbox_keep; DROP TRIGGER outbox_state_keep; UPDATE outbox_state SET state = 'delivered', effect = 'done';
         DELETE FROM outbox; DELETE FROM outbox_state; VACUUM",
    )
    .unwrap();
    assert_eq!(insert(&db, "s", 1, None, None), "ok");
    assert_eq!(number(&db, "SELECT n FROM outbox"), 501, "not even the number comes again");
    assert_eq!(number(&db, "SELECT seq FROM outbox_status"), 501);
    let new = ids(&db);
    assert!(new.iter().all(|id| !old.contains(id)));
    assert_eq!(number(&db, "SELECT head_n FROM outbox_lane"), 501);
}

fn ids(db: &Connection) -> Vec<String> {
    let mut statement = db.prepare("SELECT id FROM outbox_status").unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn h59_a_swallowed_refusal_in_plain_sql() {
    for savepoint in [false, true] {
        let db = memory();
        assert_eq!(insert(&db, "s", 42, None, None), "ok");
        db.execute_batch("BEGIN IMMEDIATE; INSERT INTO orders VALUES ('before')").unwrap();
        if savepoint {
            db.execute_batch("SAVEPOINT p").unwrap();
        }
        assert_eq!(insert(&db, "s", 41, None, None), "FP001");
        if savepoint {
            assert!(db.execute_batch("ROLLBACK TO p").unwrap_err().to_string().contains("no such savepoint"));
        }
        db.execute_batch("INSERT INTO orders VALUES ('after')").unwrap();
        assert!(db.execute_batch("COMMIT").unwrap_err().to_string().contains("no transaction is active"));
        assert_eq!(text(&db, "SELECT group_concat(note) FROM orders").unwrap(), "after");
        assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 1);
    }
}

#[test]
fn h59_a_swallowed_refusal_through_the_guard() {
    for by_enqueue in [false, true] {
        let mut db = memory();
        assert_eq!(insert(&db, "s", 42, None, None), "ok");
        let held = Held::new("s", token(42)).holder("h");
        let mut fenced = Fenced::begin(&mut db, &held).unwrap();
        fenced.sql().unwrap().execute("INSERT INTO orders VALUES ('before')", []).unwrap();
        if by_enqueue {
            let bad = fenced.enqueue(&NewCommand::webhook("", "{}")).unwrap_err();
            assert_eq!(bad.to_string(), "FP003 illegal value: destination: it is empty");
        } else {
            assert_eq!(insert(fenced.sql().unwrap(), "s", 41, None, None), "FP001");
        }
        assert!(matches!(fenced.sql(), Err(WorkerError::Left)));
        assert!(matches!(fenced.enqueue(&NewCommand::webhook("billing", "{}")), Err(WorkerError::Left)));
        assert!(matches!(fenced.commit(), Err(WorkerError::Left)));
        assert_eq!(number(&db, "SELECT count(*) FROM orders"), 0);
        assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 1);
    }
}

#[test]
fn h62_equal_token_whose_is_it() {
    // (token, holder, answer, the holder that is stored then)
    type Step = (i64, Option<&'static str>, &'static str, Option<&'static str>);
    let lines: [&[Step]; 5] = [
        &[(6, None, "ok", None), (6, None, "ok", None)],
        &[(6, None, "ok", None), (6, Some("W1"), "ok", Some("W1")), (6, Some("W2"), "FP002", Some("W1"))],
        &[
            (6, Some("W1"), "ok", Some("W1")),
            (6, None, "ok", Some("W1")),
            (6, Some("W1"), "ok", Some("W1")),
            (6, Some("W2"), "FP002", Some("W1")),
        ],
        &[
            (6, Some("W1"), "ok", Some("W1")),
            (7, None, "ok", None),
            (7, Some("W1"), "ok", Some("W1")),
            (7, Some("W2"), "FP002", Some("W1")),
        ],
        &[(6, Some("W1"), "ok", Some("W1")), (7, None, "ok", None), (6, Some("W1"), "FP001", None)],
    ];
    let mut db = memory();
    for (index, line) in lines.iter().enumerate() {
        for way in ["insert", "fence", "library"] {
            let scope = format!("{way} {index}");
            for (number, holder, right, stored) in *line {
                let answer = match way {
                    "insert" => insert(&db, &scope, *number, *holder, None),
                    "fence" => said(db.execute(
                        "INSERT INTO outbox_fence(scope, token, holder) VALUES (?1, ?2, ?3)",
                        params![scope, number, holder],
                    )),
                    _ => by_library(
                        &mut db,
                        &Held { scope: &scope, token: token(*number), holder: *holder, source: None },
                    ),
                };
                assert_eq!(answer, *right, "{scope}: ({number}, {holder:?})");
                let sql = format!("SELECT holder FROM outbox_lease WHERE scope = '{scope}'");
                assert_eq!(text(&db, &sql).as_deref(), *stored, "{scope}: ({number}, {holder:?})");
            }
        }
    }
}

fn by_library(db: &mut Connection, held: &Held<'_>) -> String {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    match fence(&tx, held) {
        Ok(()) => {
            tx.commit().unwrap();
            "ok".to_owned()
        }
        Err(error) => error.code().unwrap().as_str().to_owned(),
    }
}

#[test]
fn h63_two_sources_of_tokens_in_one_scope() {
    let db = memory();
    run_lines(
        &db,
        "INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s','h1',30000) -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',1,'webhook','billing','{}') -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',2,'webhook','billing','{}') -- FP009
         INSERT INTO outbox(scope,token,source,kind,destination,payload) VALUES('s',1,'zk-a','webhook','billing','{}') -- FP014
         INSERT INTO outbox_seal(scope,token,holder,source) VALUES('s',9,'h9',NULL) -- FP013
         INSERT INTO outbox(scope,token,source,kind,destination,payload) VALUES('f',5,'zk-a','webhook','billing','{}') -- ok
         INSERT INTO outbox(scope,token,source,kind,destination,payload) VALUES('f',6,'etcd-b','webhook','billing','{}') -- FP014
         INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('f','h2',30000) -- FP013
         INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s','h2',30000) -- FP013",
    );
    let lease = |scope: &str| text(&db, &format!("SELECT source || token FROM outbox_lease WHERE scope = '{scope}'"));
    assert_eq!((lease("s").unwrap(), lease("f").unwrap()), ("lease1".to_owned(), "zk-a5".to_owned()));
}

#[test]
fn h64_a_first_token_of_any_size() {
    let db = memory();
    for (scope, number, right) in [
        ("z", 1_103_806_595_073, "ok"),
        ("z", 1_108_101_562_368, "ok"),
        ("z", 3_302_829_850_625, "FP012"),
        ("z", 1_108_101_562_369, "ok"),
        ("z2", TOKEN_MAX, "ok"),
        ("z3", TOKEN_MAX + 1, "FP003"),
        ("z4", 1, "ok"),
        ("z4", 1_099_511_627_777, "ok"),
        ("z5", 1, "ok"),
        ("z5", 1_099_511_627_778, "FP012"),
    ] {
        assert_eq!(insert(&db, scope, number, None, None), right, "{scope} {number}");
    }
}

#[test]
fn h65_seconds_or_microseconds_in_a_column_of_milliseconds() {
    let db = memory();
    for column in ["not_before_ms", "expires_at_ms"] {
        for (value, right) in [
            (Some(1_796_205_600), "FP003"),
            (Some(1_796_205_600_000), "ok"),
            (Some(1_796_205_600_000_000), "FP003"),
            (Some(99_999_999_999), "FP003"),
            (Some(100_000_000_000), "ok"),
            (Some(10_000_000_000_000), "ok"),
            (Some(10_000_000_000_001), "FP003"),
            (Some(0), "FP003"),
            (Some(-1), "FP003"),
            (None::<i64>, "ok"),
        ] {
            db.execute_batch("BEGIN IMMEDIATE; INSERT INTO orders VALUES ('before')").unwrap();
            let sql = format!(
                "INSERT INTO outbox(scope,token,kind,destination,payload,{column}) VALUES('s',1,'webhook','billing','{{}}',?1)"
            );
            assert_eq!(said(db.execute(&sql, [value])), right, "{column} {value:?}");
            assert_eq!(db.is_autocommit(), right != "ok");
            if right == "ok" {
                db.execute_batch("ROLLBACK").unwrap();
            }
        }
    }
    assert_eq!(number(&db, "SELECT count(*) FROM orders"), 0);
}

#[test]
fn h66_explicit_null_means_not_given() {
    let db = memory();
    run_lines(
        &db,
        "INSERT INTO outbox(id,holder,source,lane,key,headers,not_before_ms,expires_at_ms,traceparent,payload_bytes,scope,token,kind,destination,payload) VALUES(NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'s',1,'webhook','billing','{}') -- ok
         INSERT INTO outbox(n,scope,token,kind,destination,payload) VALUES(NULL,'s',1,'webhook','billing','{}') -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('s',1,'webhook','billing','{}','null') -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('s',1,'webhook','billing','{}',' null ') -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('s',1,'webhook','billing','{}','[]') -- ok
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES(NULL,1,'webhook','billing','{}') -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',NULL,'webhook','billing','{}') -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',1,NULL,'billing','{}') -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',1,'webhook',NULL,'{}') -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload,payload_bytes) VALUES('s',1,'webhook','billing',NULL,NULL) -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload,payload_bytes) VALUES('s',1,'webhook','billing','{}',X'7b7d') -- FP003
         INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',1,'webhook','billing',X'7b7d') -- refused
         INSERT INTO outbox(scope,token,kind,destination,payload_bytes) VALUES('s',1,'webhook','billing',X'7b7d') -- ok",
    );
    let first = "FROM outbox_status WHERE scope = 's' AND seq = 1";
    assert_eq!(text(&db, &format!("SELECT lane {first}")).unwrap(), "");
    assert_eq!(text(&db, &format!("SELECT id {first}")).unwrap().len(), 32);
    assert!(number(&db, &format!("SELECT due_ms {first}")) <= now_ms(&db));
    assert_eq!(number(&db, "SELECT count(*) FROM outbox_status"), 6);
    assert_eq!(number(&db, "SELECT count(DISTINCT id) FROM outbox_status"), 6);
}

#[test]
fn h67_identifiers_that_would_become_headers() {
    let db = memory();
    let values = [
        "'a'||char(0)||'b'",
        "'a'||char(0)||char(13,10)||'X-Injected: 1'",
        "char(0)",
        "'a'||char(13,10)||'X-Injected: 1'",
        "'a'||char(10)",
        "'a'||char(9)||'b'",
        "'a'||char(127)",
        "'a'||char(133)",
    ];
    for column in ["id", "scope", "lane", "key", "holder", "destination", "kind", "source"] {
        for value in values {
            let mut given =
                [("scope", "'s'"), ("token", "1"), ("kind", "'webhook'"), ("destination", "'billing'")].to_vec();
            given.retain(|(name, _)| *name != column);
            given.push((column, value));
            let names: Vec<_> = given.iter().map(|(name, _)| *name).collect();
            let all: Vec<_> = given.iter().map(|(_, value)| *value).collect();
            let sql = format!("INSERT INTO outbox({}, payload) VALUES({}, '{{}}')", names.join(","), all.join(","));
            assert_eq!(say(&db, &sql), "FP003", "{sql}");
        }
    }
    assert_eq!(number(&db, "SELECT count(*) FROM outbox"), 0);
    for name in ["Straße 7", "order/17", "100%", "a b", "用户", "it's"] {
        let sql = "INSERT INTO outbox(scope, lane, token, kind, destination, payload) VALUES(?1, ?1, 1, 'webhook', 'billing', '{}')";
        assert_eq!(said(db.execute(sql, [name])), "ok", "{name}");
        let stored: String =
            db.query_row("SELECT scope || lane FROM outbox_status WHERE scope = ?1", [name], |row| row.get(0)).unwrap();
        assert_eq!(stored, name.repeat(2));
    }
}

#[test]
fn h69_a_foreign_outbox_is_left_alone() {
    for (foreign, kind, name) in [
        (
            "CREATE TABLE outbox(id INTEGER PRIMARY KEY, topic TEXT, body TEXT); INSERT INTO outbox VALUES(1,'t','b')",
            "table",
            "outbox",
        ),
        ("CREATE VIEW Outbox AS SELECT 1 AS id", "view", "Outbox"),
        ("CREATE TABLE outbox_scope(id INTEGER PRIMARY KEY)", "table", "outbox_scope"),
        ("CREATE TABLE t(a); CREATE INDEX outbox_lane_due ON t(a)", "index", "outbox_lane_due"),
        ("CREATE TABLE outbox_meta(version TEXT)", "table", "outbox_meta"),
        ("CREATE TEMP TABLE outbox(a)", "table", "outbox"),
    ] {
        let mut db = Connection::open_in_memory().unwrap();
        db.execute_batch(&format!("PRAGMA user_version = 7; PRAGMA application_id = 9; {foreign}")).unwrap();
        let before = schema_of(&db);
        let tx = db.transaction().unwrap();
        let error = sqlite::migrate(&tx).unwrap_err();
        assert!(
            matches!(&error, SchemaError::Foreign { kind: k, name: n } if k == kind && n == name),
            "{foreign}: {error}"
        );
        assert!(error.to_string().contains(name) && error.to_string().contains("rename"), "{error}");
        tx.commit().unwrap();
        assert!(matches!(sqlite::verify(&db), Err(SchemaError::Foreign { .. })));
        assert_eq!(schema_of(&db), before, "{foreign}");
        assert_eq!((number(&db, "PRAGMA user_version"), number(&db, "PRAGMA application_id")), (7, 9));
    }
}

fn schema_of(db: &Connection) -> Vec<String> {
    let mut statement =
        db.prepare("SELECT type || ' ' || name || ' ' || coalesce(sql, '') FROM sqlite_schema ORDER BY 1").unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn migrate_twice_is_harmless_and_versions_are_kept_apart() {
    let mut db = Connection::open_in_memory().unwrap();
    assert!(matches!(sqlite::verify(&db), Err(SchemaError::Missing)));
    let migrated = |db: &mut Connection| {
        let tx = db.transaction().unwrap();
        let answer = sqlite::migrate(&tx);
        tx.commit().unwrap();
        answer
    };
    // The application's own names that only look alike stay.
    db.execute_batch("CREATE TABLE outbox_events(a); CREATE TABLE orders(note TEXT)").unwrap();
    migrated(&mut db).unwrap();
    let before = (schema_of(&db), text(&db, "SELECT uuid FROM outbox_meta"));
    migrated(&mut db).unwrap();
    assert_eq!((schema_of(&db), text(&db, "SELECT uuid FROM outbox_meta")), before);
    sqlite::verify(&db).unwrap();
    db.execute_batch("UPDATE outbox_meta SET minor = 7").unwrap();
    migrated(&mut db).unwrap();
    sqlite::verify(&db).unwrap();
    db.execute_batch("UPDATE outbox_meta SET major = 2").unwrap();
    assert!(matches!(migrated(&mut db), Err(SchemaError::Major { found: 2 })));
    assert!(matches!(sqlite::verify(&db), Err(SchemaError::Major { found: 2 })));

    let mut utf16 = Connection::open_in_memory().unwrap();
    utf16.execute_batch("PRAGMA encoding = 'UTF-16le'; CREATE TABLE t(a)").unwrap();
    assert!(matches!(migrated(&mut utf16), Err(SchemaError::Encoding { .. })));
    assert_eq!(schema_of(&utf16).len(), 1);
}

#[test]
fn verify_names_what_a_migration_tool_took_away() {
    for (change, name, how) in [
        ("DROP TRIGGER outbox_admit", "outbox_admit", Drift::Missing),
        ("DROP INDEX outbox_lane_due", "outbox_lane_due", Drift::Missing),
        ("DROP VIEW outbox_status; CREATE VIEW outbox_status AS SELECT 1 AS n", "outbox_status", Drift::Changed),
        ("ALTER TABLE outbox_refusal ADD COLUMN more TEXT", "outbox_refusal", Drift::Changed),
        ("CREATE TRIGGER outbox_extra BEFORE INSERT ON outbox BEGIN SELECT 1; END", "outbox_extra", Drift::Unknown),
    ] {
        let db = memory();
        sqlite::verify(&db).unwrap();
        db.execute_batch(change).unwrap();
        let Err(SchemaError::Drift { objects }) = sqlite::verify(&db) else { panic!("{change}") };
        assert!(objects.iter().any(|object| object.name == name && object.how == how), "{change}: {objects:?}");
        db.execute_batch("UPDATE outbox_meta SET minor = 1").unwrap();
        let newer = sqlite::verify(&db);
        assert_eq!(newer.is_err(), how == Drift::Missing, "{change}: {newer:?}");
    }
    // A formatter's blanks and comments are no drift, nor is an index that helps the application.
    let db = Connection::open_in_memory().unwrap();
    db.execute_batch(&CONTRACT.replace(", reason ", ",  /* why */\n  reason ")).unwrap();
    db.execute_batch("CREATE INDEX app_trace ON outbox(traceparent)").unwrap();
    sqlite::verify(&db).unwrap();
    // Its own trigger or unique index on our tables is: it can switch our guards off.
    for object in [
        "TRIGGER app_notes AFTER INSERT ON outbox BEGIN SELECT 1; END",
        "UNIQUE INDEX app_notes ON outbox(traceparent)",
    ] {
        db.execute_batch(&format!("CREATE {object}")).unwrap();
        let drift = sqlite::verify(&db).unwrap_err().to_string();
        assert!(drift.contains("app_notes"), "{drift}");
        let kind = if object.starts_with("TRIGGER") { "TRIGGER" } else { "INDEX" };
        db.execute_batch(&format!("DROP {kind} app_notes")).unwrap();
    }
    assert!(contract_objects().unwrap().len() > 60);
}

#[test]
fn prepare_wants_a_file_and_no_transaction() {
    let memory = Connection::open_in_memory().unwrap();
    assert!(matches!(sqlite::prepare(&memory), Err(SchemaError::NotWal { mode }) if mode == "memory"));
    let directory = tempfile::tempdir().unwrap();
    let file = Connection::open(directory.path().join("app.db")).unwrap();
    file.execute_batch("BEGIN").unwrap();
    assert!(matches!(sqlite::prepare(&file), Err(SchemaError::InTransaction)));
    file.execute_batch("COMMIT").unwrap();
    sqlite::prepare(&file).unwrap();
    assert_eq!((number(&file, "PRAGMA synchronous"), number(&file, "PRAGMA busy_timeout")), (2, 5000));
}

#[test]
fn a_lease_ends_by_the_clock_and_comes_back_by_renewal() {
    let db = memory();
    let acquire = |holder: &str| {
        said(db.execute("INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s',?1,30000)", [holder]))
    };
    let verb = |view: &str, token: i64, holder: &str| match view {
        "renew" => said(db.execute(
            "INSERT INTO outbox_renew(scope,token,holder,ttl_ms) VALUES('s',?1,?2,30000)",
            params![token, holder],
        )),
        _ => {
            said(db.execute("INSERT INTO outbox_release(scope,token,holder) VALUES('s',?1,?2)", params![token, holder]))
        }
    };
    let until = |shift: &str| db.execute_batch(&format!("UPDATE outbox_scope SET {shift}")).unwrap();
    assert_eq!((acquire("h1"), acquire("h1"), acquire("h2")), ("ok".into(), "FP013".into(), "FP013".into()));
    until("until_ms = 1800000000000 - 1800000000000 + 1");
    assert_eq!(acquire("h1"), "FP003", "a holder is one acquisition");
    assert_eq!(verb("renew", 1, "h1"), "ok");
    assert_eq!(acquire("h2"), "FP013", "the renewal revived it");
    assert_eq!(verb("release", 1, "h1"), "ok");
    assert_eq!(number(&db, "SELECT until_ms IS NULL FROM outbox_lease"), 1);
    assert_eq!(verb("renew", 1, "h1"), "ok");
    assert_eq!(acquire("h2"), "FP013", "the renewal revived a released one");
    until("until_ms = 1");
    assert_eq!(acquire("h2"), "ok");
    assert_eq!((verb("renew", 1, "h1"), verb("release", 1, "h1")), ("FP001".into(), "FP001".into()));
    assert_eq!((verb("renew", 3, "h2"), verb("renew", 2, "h1")), ("FP009".into(), "FP002".into()));
    // The clock was set back by more than the slack: whoever was granted it in the future had it.
    until("granted_ms = granted_ms + 4000, until_ms = until_ms + 4000");
    assert_eq!(acquire("h3"), "FP013");
    until("granted_ms = granted_ms + 60000, until_ms = until_ms + 60000");
    assert_eq!(acquire("h3"), "ok");
    assert_eq!(number(&db, "SELECT token FROM outbox_lease"), 3);
    assert_eq!(verb("release", 3, "h3"), "ok");
    db.execute_batch(&format!("UPDATE outbox_scope SET watermark = {TOKEN_MAX}, holder = 'h4'")).unwrap();
    assert_eq!(acquire("h5"), "FP012", "the range is used up, and nothing wraps");
}

#[test]
fn a_scope_without_a_lease_gets_one_later_and_goes_on_from_its_watermark() {
    let db = memory();
    assert_eq!(insert(&db, "s", 41, None, None), "ok");
    assert_eq!(say(&db, "INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s','h',30000)"), "ok");
    assert_eq!(number(&db, "SELECT token FROM outbox_lease WHERE holder = 'h' AND source = 'lease'"), 42);
    assert_eq!((insert(&db, "s", 41, None, None), insert(&db, "s", 42, None, None)), ("FP001".into(), "ok".into()));
    assert_eq!(number(&db, "SELECT count(*) FROM outbox_backlog WHERE scope = 's' AND token = 41"), 1);
}

#[test]
fn hot_queries_use_their_indexes() {
    let db = memory();
    for (query, index) in [
        (
            "SELECT scope, lane FROM outbox_lane WHERE kind = 'webhook' AND destination = 'billing' AND due_ms <= 9 ORDER BY due_ms LIMIT 9",
            "outbox_lane_due (kind=? AND destination=? AND due_ms<?)",
        ),
        (
            "SELECT n FROM outbox_state WHERE scope = 's' AND lane = '' AND state IN ('pending', 'sending', 'in_doubt', 'parked') ORDER BY seq LIMIT 1",
            "outbox_state_live (scope=? AND lane=?)",
        ),
        ("SELECT * FROM outbox_backlog WHERE scope = 's'", "outbox_state_live (scope=?)"),
        ("SELECT id, seq FROM outbox_backlog WHERE scope = 's' ORDER BY seq", "outbox_state_live (scope=?)"),
        ("SELECT * FROM outbox_status WHERE scope = 's' ORDER BY seq", "outbox_state_seq (scope=?)"),
        ("SELECT * FROM outbox_status WHERE scope = 's' AND key = 'k'", "outbox_state_key (scope=? AND key=?)"),
        ("SELECT * FROM outbox_status WHERE n = (SELECT n FROM outbox WHERE id = 'x')", "(id=?)"),
        ("SELECT n FROM outbox_state WHERE minted_id = 'x'", "outbox_state_minted (minted_id=?)"),
        ("SELECT n FROM outbox_attempt WHERE settled_ms IS NULL", "outbox_attempt_open"),
        ("SELECT n FROM outbox_state WHERE found_row >= 2 AND state = 'pending'", "outbox_state_suspect"),
        (
            "SELECT n FROM outbox_state WHERE state IN ('in_doubt', 'parked', 'sending') AND state = 'in_doubt' ORDER BY updated_ms",
            "outbox_state_waits (state=?)",
        ),
        (
            "SELECT n FROM outbox_state WHERE state = 'dead' AND reason = 'refused' ORDER BY updated_ms",
            "outbox_state_dead (reason=?)",
        ),
    ] {
        let plan = plan_of(&db, query);
        assert!(plan.contains(index), "{query}:\n{plan}");
        // The backlog is sorted after it was found: what is sorted is what waits, nothing more.
        assert!(!plan.contains("TEMP B-TREE") || query.contains("backlog"), "{query}:\n{plan}");
        assert!(!scans_all(&plan), "{query}:\n{plan}");
    }
}

pub fn plan_of(db: &Connection, query: &str) -> String {
    let mut statement = db.prepare(&format!("EXPLAIN QUERY PLAN {query}")).unwrap();
    let lines: Vec<String> = statement.query_map([], |row| row.get(3)).unwrap().map(Result::unwrap).collect();
    lines.join("\n")
}

/// A scan of a partial index sees only what the index holds; a scan of a table sees everything.
fn scans_all(plan: &str) -> bool {
    plan.lines().any(|line| line.starts_with("SCAN") && !line.contains("INDEX"))
}

// ── Random sequences: rules and database at once ───────────────────────────────────────────────────

#[derive(Clone, Debug)]
enum Step {
    Acquire {
        holder: usize,
        ttl_ms: i64,
    },
    Renew {
        token: i64,
        holder: usize,
        ttl_ms: i64,
    },
    Release {
        token: i64,
        holder: usize,
    },
    Seal {
        token: i64,
        holder: Option<usize>,
        source: Option<usize>,
    },
    Fence {
        token: i64,
        holder: Option<usize>,
        source: Option<usize>,
    },
    Insert {
        token: i64,
        holder: Option<usize>,
        source: Option<usize>,
    },
    /// Time passes, or the clock is set: the lease's times move by so much.
    Clock {
        by_ms: i64,
    },
    Policy {
        require_seal: Option<bool>,
        max_jump: Option<i64>,
    },
    Rebase {
        source: usize,
    },
}

const HOLDERS: [&str; 3] = ["h1", "h2", "h3"];
const SOURCES: [&str; 3] = ["lease", "zk-a", "etcd-b"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let token = || prop_oneof![8 => 1..7i64, 1 => Just(TOKEN_MAX), 1 => Just(TOKEN_MAX - 1)];
    let holder = || prop::option::of(0..3usize);
    let source = || prop::option::weighted(0.3, 0..3usize);
    let ttl =
        || prop_oneof![6 => Just(30_000), 1 => Just(0), 1 => Just(rules::TTL_MS_MAX), 1 => Just(rules::TTL_MS_MAX + 1)];
    let step = prop_oneof![
        3 => (0..3usize, ttl()).prop_map(|(holder, ttl_ms)| Step::Acquire { holder, ttl_ms }),
        2 => (token(), 0..3usize, ttl()).prop_map(|(token, holder, ttl_ms)| Step::Renew { token, holder, ttl_ms }),
        1 => (token(), 0..3usize).prop_map(|(token, holder)| Step::Release { token, holder }),
        2 => (token(), holder(), source()).prop_map(|(token, holder, source)| Step::Seal { token, holder, source }),
        3 => (token(), holder(), source()).prop_map(|(token, holder, source)| Step::Fence { token, holder, source }),
        4 => (token(), holder(), source()).prop_map(|(token, holder, source)| Step::Insert { token, holder, source }),
        2 => prop_oneof![Just(-40_000i64), Just(-2_000), Just(2_000), Just(40_000)].prop_map(|by_ms| Step::Clock { by_ms }),
        1 => (prop::option::of(any::<bool>()), prop::option::of(1..4i64))
            .prop_map(|(require_seal, max_jump)| Step::Policy { require_seal, max_jump }),
        1 => (1..3usize).prop_map(|source| Step::Rebase { source }),
    ];
    prop::collection::vec(step, 1..40)
}

/// A scope as the rules see it, beside the one in the database.
struct Twin {
    known: bool,
    facts: ScopeFacts<'static>,
    policy: ScopePolicy,
}

impl Twin {
    fn request(token: i64, holder: Option<usize>, source: Option<usize>) -> rules::Request<'static> {
        rules::Request {
            token: self::token(token),
            holder: holder.map(|index| HOLDERS[index]),
            source: source.map(|index| SOURCES[index]),
        }
    }

    fn admit(&self, request: &rules::Request<'static>) -> Result<rules::Admitted<'static>, Code> {
        match self.known {
            true => rules::admit(&self.facts, request, &self.policy),
            false => rules::admit_unknown(request, &self.policy),
        }
    }

    /// Takes the step by the rules. `now_ms` stands for the database's clock.
    fn take(&mut self, step: &Step, now_ms: i64) -> Result<(), Code> {
        let lease = |holder: usize, ttl_ms| rules::LeaseRequest { holder: HOLDERS[holder], ttl_ms, now_ms };
        self.facts = match *step {
            Step::Acquire { holder, ttl_ms } => rules::acquire(&self.facts, &lease(holder, ttl_ms))?.facts,
            Step::Renew { token, holder, ttl_ms } => {
                rules::renew(&self.facts, self::token(token), &lease(holder, ttl_ms))?
            }
            Step::Release { token, holder } => rules::release(&self.facts, self::token(token), HOLDERS[holder])?,
            Step::Seal { token, holder, source } => {
                rules::seal(&self.facts, &Self::request(token, holder, source), &self.policy)?.facts
            }
            Step::Fence { token, holder, source } | Step::Insert { token, holder, source } => {
                self.admit(&Self::request(token, holder, source))?.facts
            }
            Step::Clock { .. } | Step::Policy { .. } | Step::Rebase { .. } => return Ok(()),
        };
        self.known = true;
        Ok(())
    }
}

/// Takes the step in the database.
fn take(db: &Connection, step: &Step) -> String {
    let holder = |index: Option<usize>| index.map(|index| HOLDERS[index]);
    let source = |index: Option<usize>| index.map(|index| SOURCES[index]);
    said(match *step {
        Step::Acquire { holder, ttl_ms } => {
            db.execute("INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s',?1,?2)", params![HOLDERS[holder], ttl_ms])
        }
        Step::Renew { token, holder, ttl_ms } => db.execute(
            "INSERT INTO outbox_renew(scope,token,holder,ttl_ms) VALUES('s',?1,?2,?3)",
            params![token, HOLDERS[holder], ttl_ms],
        ),
        Step::Release { token, holder } => {
            db.execute("INSERT INTO outbox_release(scope,token,holder) VALUES('s',?1,?2)", params![token, HOLDERS[holder]])
        }
        Step::Seal { token, holder: h, source: s } => db.execute(
            "INSERT INTO outbox_seal(scope,token,holder,source) VALUES('s',?1,?2,?3)",
            params![token, holder(h), source(s)],
        ),
        Step::Fence { token, holder: h, source: s } => db.execute(
            "INSERT INTO outbox_fence(scope,token,holder,source) VALUES('s',?1,?2,?3)",
            params![token, holder(h), source(s)],
        ),
        Step::Insert { token, holder: h, source: s } => db.execute(INSERT, params!["s", token, holder(h), source(s)]),
        Step::Clock { by_ms } => db.execute(
            "UPDATE outbox_scope SET granted_ms = granted_ms - ?1, until_ms = until_ms - ?1 WHERE until_ms IS NOT NULL",
            [by_ms],
        ),
        Step::Policy { require_seal, max_jump } => db.execute(
            "UPDATE outbox_policy SET require_seal = coalesce(?1, 0), max_jump = coalesce(?2, 1099511627776)",
            params![require_seal, max_jump],
        ),
        Step::Rebase { source } => db.execute(
            "UPDATE outbox_scope SET era = era + 1, watermark = 0, holder = NULL, source = ?1, granted_ms = NULL, until_ms = NULL",
            [SOURCES[source]],
        ),
    })
}

fn compare(db: &Connection, twin: &Twin, slack_ms: i64) -> Result<(), TestCaseError> {
    let row = db.query_row(
        "SELECT watermark, source, holder, granted_ms, until_ms, next_seq FROM outbox_scope WHERE scope = 's'",
        [],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?)),
    );
    type Row = (i64, Option<String>, Option<String>, Option<i64>, Option<i64>, i64);
    let row: Result<Row, _> = row;
    prop_assert_eq!(row.is_ok(), twin.known);
    let Ok((watermark, source, holder, granted_ms, until_ms, next_seq)) = row else { return Ok(()) };
    let near = |ours: Option<i64>, theirs: Option<i64>| match (ours, theirs) {
        (Some(ours), Some(theirs)) => (ours - theirs).abs() <= slack_ms,
        (ours, theirs) => ours == theirs,
    };
    prop_assert_eq!(watermark, twin.facts.watermark);
    prop_assert_eq!(source.as_deref(), twin.facts.source);
    prop_assert_eq!(holder.as_deref(), twin.facts.holder);
    prop_assert!(near(until_ms, twin.facts.until_ms), "{:?} {:?}", until_ms, twin.facts.until_ms);
    prop_assert!(near(granted_ms, twin.facts.granted_ms), "{:?} {:?}", granted_ms, twin.facts.granted_ms);
    prop_assert_eq!(next_seq, 1 + number(db, "SELECT count(*) FROM outbox_state"));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Goal: the database decides as the rules do. Method: the same random steps in both; answer, scope
    /// row and seq are compared after each. The database's clock is real, so a step of the clock moves the
    /// lease's times instead, by far more than a test takes.
    #[test]
    fn the_database_decides_as_the_rules_do(steps in steps()) {
        let db = memory();
        let policy = ScopePolicy { require_seal: false, max_jump: rules::MAX_JUMP_DEFAULT };
        let mut twin = Twin { known: false, facts: ScopeFacts::NEW, policy };
        let began = now_ms(&db);
        for step in &steps {
            let right = twin.take(step, now_ms(&db)).map_or_else(Code::as_str, |()| "ok");
            prop_assert_eq!(take(&db, step), right, "{:?}", step);
            match *step {
                Step::Clock { by_ms } if twin.facts.until_ms.is_some() => {
                    twin.facts.granted_ms = twin.facts.granted_ms.map(|at| at - by_ms);
                    twin.facts.until_ms = twin.facts.until_ms.map(|at| at - by_ms);
                }
                Step::Policy { require_seal, max_jump } => {
                    twin.policy.require_seal = require_seal.unwrap_or(false);
                    twin.policy.max_jump = max_jump.unwrap_or(rules::MAX_JUMP_DEFAULT);
                }
                Step::Rebase { source } if twin.known => {
                    twin.facts = ScopeFacts { source: Some(SOURCES[source]), rebased: true, ..ScopeFacts::NEW };
                }
                _ => {}
            }
            compare(&db, &twin, now_ms(&db) - began)?;
        }
    }

    /// Goal: lane rows are what a full computation gives, whoever writes. Method: random inserts and legal
    /// changes of state over two lanes; after each the invariant of `bypass.json` is computed anew.
    #[test]
    fn lane_rows_equal_a_full_computation(steps in prop::collection::vec((0..6u8, 0..2usize, 0..12i64, any::<bool>()), 1..60)) {
        let suite = crate::bypass::suite();
        let db = memory();
        suite.remember(&db).unwrap();
        for (what, lane, which, expires) in steps {
            change(&db, what, ["", "x"][lane], which, expires);
            let broken = suite.breaches(&db, "lane");
            prop_assert!(broken.is_empty(), "{:?} after {} {}", broken, what, which);
        }
    }
}

/// One change of a command or of the `which`-th live one; those that the contract refuses change nothing.
fn change(db: &Connection, what: u8, lane: &str, which: i64, expires: bool) {
    let set = |set: &str, from: &str| {
        let sql = format!(
            "UPDATE outbox_state SET {set}, updated_ms = updated_ms + 1
               WHERE n = (SELECT n FROM outbox_state WHERE state IN ({from}) ORDER BY n LIMIT 1 OFFSET {which})"
        );
        db.execute(&sql, []).unwrap();
    };
    match what {
        0 => {
            let expires_at_ms = expires.then_some(1_500_000_000_000 + which);
            db.execute(
                "INSERT INTO outbox(scope, token, lane, kind, destination, payload, not_before_ms, expires_at_ms)
                   VALUES ('s', 1, ?1, 'webhook', ?2, '{}', ?3, ?4)",
                params![lane, format!("to-{which}"), 1_400_000_000_000 + which, expires_at_ms],
            )
            .unwrap();
        }
        1 => set("state = 'sending', attempt_no = attempt_no + 1", "'pending'"),
        2 => {
            set("state = 'pending', due_ms = due_ms + 5000, set_ms = set_ms + 5000", "'sending', 'parked', 'in_doubt'")
        }
        3 => set("state = 'delivered', effect = 'done'", "'sending', 'in_doubt'"),
        4 => set("state = 'in_doubt', effect = 'possible'", "'sending'"),
        _ if expires => set("state = 'parked'", "'pending'"),
        _ => set("state = 'dead', reason = 'cancelled'", "'pending', 'parked'"),
    }
}
