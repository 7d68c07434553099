//! Take-over, a holder's verdicts, keys, prune and erasure, and the feed: what the contract does by itself.
//!
//! Cases are run by SQL and by the library. At the end random sequences run against a small model that
//! knows nothing of SQL, with statements as the dispatcher writes them.

use crate::contract::{memory, now_ms, number, plan_of, run_lines, say, text, token};
use fencepost::sqlite::{self, Enqueued, Held, NewCommand};
use proptest::prelude::*;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};
use std::time::{Duration, Instant};

/// `seq state reason effect` of each command of scope s, in order.
fn story(db: &Connection) -> String {
    let sql = "SELECT coalesce(group_concat(line, ', '), '') FROM (SELECT seq || ' ' || state || coalesce(' ' || reason, '')
        || CASE effect WHEN 'none' THEN '' ELSE ' ' || effect END AS line FROM outbox_status WHERE scope = 's' ORDER BY seq)";
    text(db, sql).unwrap()
}

/// `event seq` of the whole feed, in order.
fn feed(db: &Connection) -> String {
    let sql = "SELECT coalesce(group_concat(line, ', '), '') FROM (SELECT event || ' ' || seq AS line FROM outbox_event ORDER BY n)";
    text(db, sql).unwrap()
}

fn policy(db: &Connection, on_takeover: &str) {
    db.execute("UPDATE outbox_policy SET on_takeover = ?1", [on_takeover]).unwrap();
}

fn put(db: &Connection, token: i64, key: Option<&str>, lane: &str, payload: &str) -> String {
    let sql =
        "INSERT INTO outbox(scope,token,key,lane,kind,destination,payload) VALUES('s',?1,?2,?3,'webhook','billing',?4)";
    match db.execute(sql, params![token, key, lane, payload]) {
        Ok(rows) => rows.to_string(),
        Err(error) => fencepost::rules::Code::find(&error.to_string()).unwrap().as_str().to_owned(),
    }
}

fn verb(db: &Connection, verb: &str, token: i64, seq: i64) -> String {
    say(
        db,
        &format!(
            "INSERT INTO outbox_{verb}(scope,token,id) SELECT 's',{token},(SELECT id FROM outbox_status WHERE scope = 's' AND seq = {seq})"
        ),
    )
}

/// The statements of the dispatcher, in the order in which it sends them.
fn begin(db: &Connection, seq: i64, armed: bool) {
    run(
        db,
        &format!(
            "UPDATE outbox_state SET state = 'sending', attempt_no = attempt_no + 1, tries = tries + 1, updated_ms = {NOW} WHERE scope = 's' AND seq = {seq};
             UPDATE outbox_lane SET (begun_era, begun_token, begun_seq) = (SELECT era, token, seq FROM outbox_state WHERE scope = 's' AND seq = {seq})
               WHERE head_n = (SELECT n FROM outbox_state WHERE scope = 's' AND seq = {seq});
             INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, armed_ms)
               SELECT n, attempt_no, 0, 'hold', {NOW}, CASE WHEN {armed} THEN {NOW} END FROM outbox_state WHERE scope = 's' AND seq = {seq}"
        ),
    );
}

const NOW: &str = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)";

/// How many rows the arm changed.
fn arm(db: &Connection, seq: i64) -> usize {
    let sql = format!(
        "UPDATE outbox_attempt SET armed_ms = {NOW} WHERE armed_ms IS NULL AND settled_ms IS NULL
           AND (n, attempt_no) IN (SELECT n, attempt_no FROM outbox_state WHERE scope = 's' AND seq = {seq} AND state = 'sending')"
    );
    db.execute(&sql, []).unwrap()
}

/// Settles what is sending; back to pending goes by the take-over rule.
fn settle(db: &Connection, seq: i64, outcome: &str) -> bool {
    let open = db
        .execute(
            &format!(
                "UPDATE outbox_attempt SET settled_ms = {NOW}, outcome = ?1, evidence = '{{}}' WHERE settled_ms IS NULL
                   AND (n, attempt_no) IN (SELECT n, attempt_no FROM outbox_state WHERE scope = 's' AND seq = ?2 AND state = 'sending')"
            ),
            params![outcome, seq],
        )
        .unwrap();
    if open == 0 {
        return false;
    }
    match outcome {
        "delivered" => set(db, seq, "state = 'delivered', effect = 'done'"),
        "unknown" => set(db, seq, "state = 'in_doubt', effect = 'possible'"),
        "refused" => set(db, seq, "state = 'dead', reason = 'refused'"),
        _ => back(db, seq),
    }
    true
}

fn set(db: &Connection, seq: i64, what: &str) {
    run(db, &format!("UPDATE outbox_state SET {what}, updated_ms = {NOW} WHERE scope = 's' AND seq = {seq}"));
}

/// Back to pending by the take-over rule.
fn back(db: &Connection, seq: i64) {
    let overtaken: bool = db
        .query_row(
            "SELECT (x.era < s.era OR x.token < s.watermark) AND NOT (coalesce(x.adopted_era, -1) = s.era AND coalesce(x.adopted_token, -1) = s.watermark)
               FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope WHERE x.scope = 's' AND x.seq = ?1",
            [seq],
            |row| row.get(0),
        )
        .unwrap();
    let rule = text(
        db,
        "SELECT coalesce((SELECT on_takeover FROM outbox_scope WHERE scope = 's'), on_takeover) FROM outbox_policy",
    );
    match (overtaken, rule.as_deref()) {
        (true, Some("discard")) => {
            set(
                db,
                seq,
                "state = 'dead', reason = 'superseded', key = CASE WHEN effect = 'none' THEN NULL ELSE key END",
            );
        }
        (true, Some("review")) => set(db, seq, "state = 'parked', reason = NULL"),
        _ => set(db, seq, "state = 'pending'"),
    }
}

fn run(db: &Connection, sql: &str) {
    db.execute_batch(sql).unwrap_or_else(|error| panic!("{error}: {sql}"));
}

/// The order in which a dispatcher would send what is left of a lane: each head is delivered at once.
fn drained(db: &Connection) -> Vec<i64> {
    let mut sent = Vec::new();
    loop {
        let head =
            "SELECT x.seq FROM outbox_lane l JOIN outbox_state x ON x.n = l.head_n WHERE l.scope = 's' AND l.lane = ''
             AND x.state = 'pending' AND l.due_ms <= 9000000000000";
        let Ok(seq) = db.query_row(head, [], |row| row.get(0)) else { return sent };
        begin(db, seq, true);
        assert!(settle(db, seq, "delivered"));
        sent.push(seq);
    }
}

fn immediate(db: &mut Connection) -> Transaction<'_> {
    db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap()
}

/// How the new holder comes: the third command itself where it is an insert, else before it.
const WAYS: [&str; 6] = ["insert", "fence", "seal", "acquire", "library enqueue", "library seal"];

fn take_over(db: &mut Connection, way: &str) {
    let held = Held::new("s", token(8));
    let third = NewCommand::webhook("billing", r#"{"n":3}"#);
    match way {
        "insert" => {}
        "fence" => assert_eq!(say(db, "INSERT INTO outbox_fence(scope,token) VALUES('s',8)"), "ok"),
        "seal" => assert_eq!(say(db, "INSERT INTO outbox_seal(scope,token) VALUES('s',8)"), "ok"),
        "acquire" => {
            assert_eq!(say(db, "INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s','h8',30000)"), "ok")
        }
        "library seal" => {
            let tx = immediate(db);
            let inherited = sqlite::seal(&tx, "s", token(8), None, None).unwrap();
            assert!(inherited.iter().all(|waiting| waiting.state != "dead"));
            tx.commit().unwrap();
        }
        _ => {
            let tx = immediate(db);
            assert!(matches!(sqlite::enqueue(&tx, &held, &third).unwrap(), Enqueued::New { seq: 3, .. }));
            tx.commit().unwrap();
            return;
        }
    }
    assert_eq!(put(db, 8, None, "", r#"{"n":3}"#), "1");
}

#[test]
fn h77_a_takeover_by_nobodys_seal() {
    for way in WAYS {
        for (rule, after, sent) in [
            ("discard", "1 dead superseded, 2 dead superseded, 3 pending", vec![3]),
            ("review", "1 parked, 2 parked, 3 pending", vec![]),
            ("deliver", "1 pending, 2 pending, 3 pending", vec![1, 2, 3]),
        ] {
            let mut db = memory();
            policy(&db, rule);
            run_lines(
                &db,
                r#"INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',7,'webhook','billing','{"n":1}') -- ok
                   INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',7,'webhook','billing','{"n":2}') -- ok"#,
            );
            let before = (story(&db), feed(&db));
            // It acts in the transaction that raised, and a rollback undoes it.
            run(&db, "BEGIN IMMEDIATE");
            let raise = if way == "acquire" {
                "INSERT INTO outbox_acquire(scope,holder,ttl_ms) VALUES('s','h8',30000)"
            } else {
                r#"INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',8,'webhook','billing','{"n":3}')"#
            };
            assert_eq!(say(&db, raise), "ok");
            assert_eq!(story(&db) == before.0, rule == "deliver" && way == "acquire", "{way} {rule}");
            run(&db, "ROLLBACK");
            assert_eq!((story(&db), feed(&db)), before, "{way} {rule}");

            take_over(&mut db, way);
            assert_eq!(story(&db), after, "{way} {rule}");
            assert_eq!(number(&db, "SELECT token FROM outbox_lease WHERE scope = 's'"), 8);
            assert_eq!(drained(&db), sent, "{way} {rule}");
            if rule == "review" {
                let (holder, other) = if way == "acquire" { ("'h8'", "FP002") } else { ("NULL", "ok") };
                let say_of = |view: &str, holder: &str, seq: i64| {
                    say(
                        &db,
                        &format!(
                            "INSERT INTO outbox_{view}(scope,token,holder,id) SELECT 's',8,{holder},(SELECT id FROM outbox_status WHERE scope = 's' AND seq = {seq})"
                        ),
                    )
                };
                assert_eq!(verb(&db, "adopt", 7, 1), "FP001");
                if other == "FP002" {
                    assert_eq!(say_of("adopt", "'h9'", 1), other);
                }
                assert_eq!(say_of("adopt", holder, 2), "ok");
                assert_eq!(drained(&db), [0; 0], "the parked head keeps its place");
                assert_eq!(say_of("adopt", holder, 1), "ok");
                assert_eq!(drained(&db), [1, 2, 3], "{way}");
            }
        }
    }
}

#[test]
fn h79_a_key_given_back_after_superseded() {
    let db = memory();
    policy(&db, "discard");
    let insert = |token: i64, payload: &str| put(&db, token, Some("ord-1"), "", payload);
    assert_eq!(insert(7, r#"{"total":5}"#), "1");
    assert_eq!(insert(8, r#"{"total":5}"#), "1");
    assert_eq!(story(&db), "1 dead superseded, 2 pending");
    assert_eq!(insert(8, r#"{"total":5}"#), "0");
    assert_eq!(insert(8, r#"{"total":6}"#), "FP010");
    assert_eq!(story(&db), "1 dead superseded, 2 pending");
    assert_eq!(insert(9, r#"{"total":6}"#), "1");
    assert_eq!(story(&db), "1 dead superseded, 2 dead superseded, 3 pending");
    assert_eq!(text(&db, "SELECT group_concat(seq) FROM outbox_status WHERE key = 'ord-1'").unwrap(), "3");

    // The same after expired and fenced; every other end, and any possible effect, keeps the key.
    for (end, effect, back) in [
        ("expired", "none", true),
        ("fenced", "none", true),
        ("superseded", "none", true),
        ("superseded", "possible", false),
        ("expired", "possible", false),
        ("delivered", "done", false),
        ("refused", "none", false),
        ("exhausted", "none", false),
        ("cancelled", "none", false),
        ("invalid", "none", false),
        ("abandoned", "possible", false),
    ] {
        let db = memory();
        assert_eq!(put(&db, 7, Some("k"), "", "1"), "1");
        let state = if end == "delivered" {
            "state = 'delivered', effect".to_owned()
        } else {
            format!("state = 'dead', reason = '{end}', effect")
        };
        let key = if back { "NULL" } else { "key" };
        set(&db, 1, &format!("{state} = '{effect}', key = {key}"));
        assert_eq!(put(&db, 7, Some("k"), "", "other"), if back { "1" } else { "FP010" }, "{end} {effect}");
        assert_eq!(put(&db, 7, Some("k"), "", "1"), if back { "FP010" } else { "0" }, "{end} {effect}");
        if !back {
            let sql = "UPDATE outbox_state SET key = NULL WHERE scope = 's'";
            assert_ne!(say(&db, sql), "ok", "{end} {effect}");
        }
    }
}

/// A copy of the first row of H80 with some columns changed.
fn h80_row(changes: &[(&str, &str)]) -> String {
    let mut columns = vec![
        ("scope", "'s'"),
        ("token", "42"),
        ("holder", "NULL"),
        ("lane", "''"),
        ("key", "'k'"),
        ("kind", "'webhook'"),
        ("destination", "'billing'"),
        ("headers", "NULL"),
        ("payload", r#"'{"a":1}'"#),
        ("expires_at_ms", "1796209200000"),
        ("traceparent", "'00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'"),
    ];
    columns.retain(|(name, _)| !changes.iter().any(|(changed, _)| changed == name));
    columns.extend(changes);
    let (names, values): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
    format!("INSERT INTO outbox({}) VALUES({})", names.join(","), values.join(","))
}

#[test]
fn h80_a_repeat_that_differs_only_in_what_is_not_content() {
    let mut db = memory();
    assert_eq!(say(&db, &h80_row(&[("id", "'first'")])), "ok");
    let first = text(
        &db,
        "SELECT group_concat(quote(id) || quote(token) || quote(expires_at_ms) || quote(holder) || quote(seq)) FROM outbox_status",
    );
    db.execute("INSERT INTO orders VALUES('last')", []).unwrap();
    let rowid = db.last_insert_rowid();
    for (changes, right) in [
        (&[("expires_at_ms", "1796209500000")][..], "ok"),
        (&[("not_before_ms", "1796206000000")], "ok"),
        (&[("traceparent", "'00-00000000000000000000000000000001-0000000000000001-01'")], "ok"),
        (&[("id", "'another'")], "ok"),
        (&[("holder", "'w1'")], "ok"),
        (&[("payload", "NULL"), ("payload_bytes", "X'7B2261223A317D'")], "ok"),
        (&[("payload", r#"'{"a": 1}'"#)], "FP010"),
        (&[("destination", "'other'")], "FP010"),
        (&[("kind", "'email'")], "FP010"),
        (&[("lane", "'x'")], "FP010"),
        (&[("headers", r#"'{"X-A":"1"}'"#)], "FP010"),
        (&[("id", "'first'"), ("key", "NULL")], "ok"),
        (&[("id", "'first'"), ("key", "NULL"), ("payload", "'other'")], "FP005"),
        (&[("token", "43")], "ok"),
        (&[("token", "42")], "FP001"),
    ] {
        let sql = h80_row(changes);
        db.execute("UPDATE orders SET note = note", []).unwrap();
        assert_eq!(say(&db, &sql), right, "{sql}");
        if right == "ok" {
            assert_eq!((db.changes(), db.last_insert_rowid()), (0, rowid), "{sql}");
            let token = if changes.contains(&("token", "43")) { 43 } else { 42 };
            assert_eq!(number(&db, "SELECT token FROM outbox_lease WHERE scope = 's'"), token);
            let mut returning = db.prepare(&format!("{sql} RETURNING id")).unwrap();
            assert!(!returning.exists([]).unwrap(), "{sql}");
        }
        let now = text(
            &db,
            "SELECT group_concat(quote(id) || quote(token) || quote(expires_at_ms) || quote(holder) || quote(seq)) FROM outbox_status",
        );
        assert_eq!(now, first, "{sql}");
        if changes.contains(&("holder", "'w1'")) {
            assert_eq!(text(&db, "SELECT holder FROM outbox_lease WHERE scope = 's'").unwrap(), "w1");
        }
    }
    assert_eq!(say(&db, &h80_row(&[("scope", "'t'")])), "ok");
    assert_eq!(number(&db, "SELECT count(*) FROM outbox WHERE scope = 't'"), 1, "keys are per scope");

    // The library answers the first one's id and state; the next line is refused.
    let held = Held::new("s", token(43));
    let content = r#"{"a":1}"#;
    let again = NewCommand::webhook("billing", content).key("k").expires_at_ms(1_796_209_900_000);
    let tx = immediate(&mut db);
    let known = sqlite::enqueue(&tx, &held, &again).unwrap();
    assert_eq!(known, Enqueued::Duplicate { id: "first".to_owned(), state: "pending".to_owned() });
    let by_id = NewCommand::webhook("billing", content).id("first");
    assert_eq!(sqlite::enqueue(&tx, &held, &by_id).unwrap(), known);
    let other = NewCommand::webhook("other", content).key("k");
    let refused = sqlite::enqueue(&tx, &held, &other).unwrap_err();
    assert!(matches!(&refused, error if error.code().is_some_and(|code| code.as_str() == "FP010")), "{refused}");
    drop(tx);
    let stale = Held::new("s", token(42));
    let tx = immediate(&mut db);
    assert_eq!(sqlite::enqueue(&tx, &stale, &again).unwrap_err().code().map(|code| code.as_str()), Some("FP001"));
}

/// The contract with a clock that the test sets: one process's wall clock differs from another's.
fn with_clock() -> Connection {
    let db = Connection::open_in_memory().unwrap();
    run(&db, "CREATE TABLE clock(ahead_ms INTEGER); INSERT INTO clock VALUES(0); CREATE TABLE orders(note TEXT)");
    run(
        &db,
        &sqlite::CONTRACT.replace("julianday('now')", "((SELECT ahead_ms FROM clock) / 86400000.0 + julianday('now'))"),
    );
    db
}

#[test]
fn h04_order_is_the_commit_order_whatever_the_clocks_say() {
    let db = with_clock();
    for (token, ahead_ms) in [(3, 300_000), (4, 0), (4, 3_600_000)] {
        db.execute("UPDATE clock SET ahead_ms = ?1", [ahead_ms]).unwrap();
        assert_eq!(put(&db, token, None, "", &format!("{token}")), "1", "nothing is refused because of a time");
    }
    run(&db, "UPDATE clock SET ahead_ms = 0");
    assert_eq!(
        text(&db, "SELECT group_concat(token) FROM (SELECT token FROM outbox_status ORDER BY seq)").unwrap(),
        "3,4,4"
    );
    assert!(
        number(
            &db,
            "SELECT (SELECT inserted_ms FROM outbox_state WHERE seq = 1) - (SELECT inserted_ms FROM outbox_state WHERE seq = 2)"
        ) > 200_000
    );
    // What the dispatcher writes when due times lie in the future of its clock: only not_before_ms is absolute.
    let now = now_ms(&db);
    let set_back = "UPDATE outbox_state SET set_ms = ?1, due_ms = max(?1, coalesce((SELECT not_before_ms FROM outbox o WHERE o.n = outbox_state.n), 0))
        WHERE state IN ('pending', 'sending', 'in_doubt', 'parked') AND state = 'pending' AND set_ms > ?1 + 5000";
    assert_eq!(db.execute(set_back, [now]).unwrap(), 2);
    assert_eq!(number(&db, "SELECT due_ms FROM outbox_lane WHERE scope = 's'"), now, "the head is due at once");
    assert_eq!(drained(&db), [1, 2, 3]);
}

/// What `prune` does: remember, raise, then attempts, command and state of everything final at the front.
fn prune(db: &Connection, upto: i64, until: &str) {
    run(
        db,
        &format!(
            "BEGIN IMMEDIATE;
             INSERT INTO outbox_used SELECT coalesce(o.id, x.minted_id), x.scope, x.key, zeroblob(32), {until} FROM outbox_state x JOIN outbox o ON o.n = x.n
               WHERE x.scope = 's' AND x.seq <= {upto} AND NOT EXISTS (SELECT 1 FROM outbox_used u WHERE u.id = coalesce(o.id, x.minted_id));
             UPDATE outbox_scope SET pruned_seq = max(pruned_seq, {upto}) WHERE scope = 's';
             DELETE FROM outbox_attempt WHERE n IN (SELECT n FROM outbox_state WHERE scope = 's' AND seq <= {upto});
             DELETE FROM outbox WHERE n IN (SELECT n FROM outbox_state WHERE scope = 's' AND seq <= {upto});
             DELETE FROM outbox_state WHERE scope = 's' AND seq <= {upto};
             COMMIT"
        ),
    );
}

#[test]
fn h25_what_guards_against_repeats_outlives_the_rows() {
    for content in ["1", "other"] {
        let mut db = memory();
        for (seq, key) in [(1, Some("ord-1")), (2, None), (3, None), (4, Some("ord-4"))] {
            assert_eq!(put(&db, 77, key, &format!("{seq}"), "1"), "1");
        }
        for seq in [1, 3] {
            begin(&db, seq, true);
            assert!(settle(&db, seq, if seq == 1 { "delivered" } else { "unknown" }));
        }
        set(&db, 2, "state = 'dead', reason = 'refused'");
        let ids = [1, 2].map(|seq| text(&db, &format!("SELECT id FROM outbox_status WHERE seq = {seq}")).unwrap());
        // Out of order, or of what is live, nothing goes.
        for (sql, right) in [
            ("DELETE FROM outbox WHERE n = 1", "FP007"),
            ("DELETE FROM outbox_state WHERE n = 1", "FP007"),
            ("DELETE FROM outbox_attempt WHERE n = 1", "FP007"),
            ("UPDATE outbox_scope SET pruned_seq = 3 WHERE scope = 's'", "FP007"),
        ] {
            assert_eq!(say(&db, sql), right, "{sql}");
        }
        prune(&db, 2, &format!("{NOW} + 2592000000"));
        assert_eq!(story(&db), "3 in_doubt possible, 4 pending", "what is in doubt or waits stays");
        assert_eq!(put(&db, 60, None, "", "x"), "FP001", "scopes outlive rows");
        assert_eq!(put(&db, 77, Some("ord-1"), "1", content), "0", "the key is remembered, whatever the content");
        for or in ["OR IGNORE", "OR REPLACE", ""] {
            for id in &ids {
                let sql = format!(
                    "INSERT {or} INTO outbox(id,scope,token,lane,kind,destination,payload) VALUES('{id}','s',77,'1','webhook','billing','1')"
                );
                assert_eq!(say(&db, &sql), "FP005");
            }
        }
        let tx = immediate(&mut db);
        let answer = sqlite::enqueue(&tx, &Held::new("s", token(77)), &NewCommand::webhook("billing", "5")).unwrap();
        assert!(matches!(answer, Enqueued::New { seq: 5, .. }), "seq goes on: {answer:?}");
        tx.commit().unwrap();
        // It is forgotten after its time, and not before.
        assert_eq!(say(&db, "DELETE FROM outbox_used"), "FP007");
        let mut db = memory();
        assert_eq!(put(&db, 77, Some("ord-1"), "", "1"), "1");
        assert_eq!(put(&db, 77, None, "", "2"), "1");
        set(&db, 1, "state = 'delivered', effect = 'done'");
        prune(&db, 1, &format!("{NOW} - 1"));
        run(&db, "DELETE FROM outbox_used");
        assert_eq!(put(&db, 77, Some("ord-1"), "", content), "1");
        let tx = immediate(&mut db);
        drop(tx);
        assert_eq!(number(&db, "SELECT max(seq) FROM outbox_state"), 3);
    }
}

#[test]
fn an_erased_payload_is_remembered_by_its_key_and_its_id() {
    let db = memory();
    assert_eq!(
        say(
            &db,
            "INSERT INTO outbox(id,scope,token,key,kind,destination,payload,headers) VALUES('e','s',1,'k','webhook','billing','secret','{}')"
        ),
        "ok"
    );
    let erase = "UPDATE outbox SET payload = NULL, headers = NULL WHERE id = 'e'";
    assert_eq!(say(&db, erase), "FP006", "it is live");
    assert_eq!(
        say(&db, "INSERT INTO outbox_used VALUES('e','s','k',zeroblob(32),9000000000000)"),
        "FP005",
        "it is live"
    );
    set(&db, 1, "state = 'delivered', effect = 'done'");
    assert_eq!(say(&db, erase), "FP006", "it is not remembered");
    assert_eq!(say(&db, "UPDATE outbox_state SET erased_ms = 1 WHERE scope = 's'"), "FP006");
    run(&db, "INSERT INTO outbox_used VALUES('e','s','k',zeroblob(32),9000000000000)");
    assert_eq!(say(&db, erase), "FP006", "nothing says that it was erased");
    assert_eq!(put(&db, 1, Some("k"), "", "other"), "FP010", "as long as the content is there, it counts");
    run(&db, "UPDATE outbox_state SET erased_ms = 1800000000000 WHERE scope = 's'");
    run(&db, erase);
    assert_eq!(put(&db, 1, Some("k"), "", "whatever"), "0");
    assert_eq!(
        say(
            &db,
            "INSERT OR IGNORE INTO outbox(id,scope,token,kind,destination,payload) VALUES('e','s',1,'webhook','billing','secret')"
        ),
        "FP005"
    );
    assert_eq!(say(&db, "UPDATE outbox SET payload = 'other' WHERE id = 'e'"), "FP006");
    assert_eq!(say(&db, "DELETE FROM outbox_used"), "FP007");
    assert_eq!(story(&db), "1 delivered done");
}

#[test]
fn a_repeat_under_review_adopts() {
    let mut db = memory();
    policy(&db, "review");
    assert_eq!(put(&db, 7, Some("a"), "", "1"), "1");
    assert_eq!(put(&db, 7, Some("b"), "", "2"), "1");
    assert_eq!(put(&db, 8, Some("a"), "", "1"), "0", "the very repeat that takes over adopts");
    assert_eq!(story(&db), "1 pending, 2 parked");
    assert_eq!(put(&db, 8, Some("b"), "", "other"), "FP010");
    assert_eq!(story(&db), "1 pending, 2 parked", "other content adopts nothing");
    assert_eq!(put(&db, 7, Some("b"), "", "2"), "FP001");
    assert_eq!(story(&db), "1 pending, 2 parked", "a stale repeat adopts nothing");
    // Adopted, it is left alone until the next raise: begun, deferred, and pending again.
    begin(&db, 1, false);
    assert!(settle(&db, 1, "deferred"));
    assert_eq!(story(&db), "1 pending, 2 parked");
    let tx = immediate(&mut db);
    let again = NewCommand::webhook("billing", "2").key("b");
    let answer = sqlite::enqueue(&tx, &Held::new("s", token(8)), &again).unwrap();
    assert!(matches!(&answer, Enqueued::Duplicate { state, .. } if state == "pending"), "{answer:?}");
    tx.commit().unwrap();
    assert_eq!(feed(&db), "parked 1, parked 2, resumed 1, resumed 2");
    assert_eq!(say(&db, "INSERT INTO outbox_fence(scope,token) VALUES('s',8)"), "ok");
    assert_eq!(story(&db), "1 pending, 2 pending");
    assert_eq!(say(&db, "INSERT INTO outbox_fence(scope,token) VALUES('s',9)"), "ok");
    assert_eq!(story(&db), "1 parked, 2 parked", "the next raise looks again");
    // What the destination refused is not adopted by a repeat, only by a word.
    set(&db, 1, "reason = 'refused'");
    assert_eq!(put(&db, 9, Some("a"), "", "1"), "0");
    assert_eq!(story(&db), "1 parked refused, 2 parked");
    assert_eq!(verb(&db, "discard", 9, 1), "ok");
    assert_eq!(story(&db), "1 dead refused, 2 parked");
}

#[test]
fn a_takeover_recalls_what_may_not_send_yet_and_leaves_what_may() {
    for (rule, unarmed, armed) in [
        ("discard", "1 dead superseded", "1 sending possible"),
        ("review", "1 sending", "1 sending possible"),
        ("deliver", "1 sending", "1 sending possible"),
    ] {
        for (is_armed, right) in [(false, unarmed), (true, armed)] {
            let db = memory();
            policy(&db, rule);
            assert_eq!(put(&db, 7, Some("k"), "", "1"), "1");
            begin(&db, 1, is_armed);
            assert_eq!(say(&db, "INSERT INTO outbox_seal(scope,token) VALUES('s',8)"), "ok");
            assert_eq!(story(&db), right, "{rule} {is_armed}");
            let recalled = rule == "discard" && !is_armed;
            assert_eq!(
                number(&db, "SELECT count(*) FROM outbox_attempt WHERE settled_ms IS NULL"),
                i64::from(!recalled)
            );
            assert_eq!(
                arm(&db, 1),
                usize::from(!recalled && !is_armed),
                "{rule}: an arm after the recall changes no row"
            );
            assert_eq!(settle(&db, 1, "deferred"), !recalled);
            let end = match rule {
                "discard" => "1 dead superseded",
                "review" => "1 parked",
                _ => "1 pending",
            };
            assert_eq!(story(&db), end, "{rule}: back to pending goes by the same policy");
        }
    }
}

#[test]
fn h76_a_cancel_between_begin_and_arm() {
    let db = memory();
    for _ in 0..3 {
        assert_eq!(put(&db, 7, None, "", "1"), "1");
    }
    begin(&db, 1, false);
    assert_eq!(verb(&db, "cancel", 6, 1), "FP001");
    assert_eq!(story(&db), "1 sending, 2 pending, 3 pending");
    assert_eq!(verb(&db, "cancel", 7, 1), "ok");
    assert_eq!((arm(&db, 1), settle(&db, 1, "delivered")), (0, false));
    begin(&db, 2, false);
    assert_eq!(arm(&db, 2), 1);
    assert_eq!(verb(&db, "cancel", 7, 2), "FP007", "too late");
    assert!(settle(&db, 2, "delivered"));
    assert_eq!(story(&db), "1 dead cancelled, 2 delivered done, 3 pending");
    assert_eq!(verb(&db, "cancel", 7, 2), "FP011");
    assert_eq!(feed(&db), "dead 1, delivered 2");
}

#[test]
fn after_a_rebase_the_new_era_is_greater_and_names_its_source() {
    for rule in ["discard", "review"] {
        let db = memory();
        policy(&db, rule);
        assert_eq!(put(&db, 900, None, "", "1"), "1");
        run(
            &db,
            "UPDATE outbox_scope SET era = era + 1, watermark = 0, holder = NULL, source = 'zk-b' WHERE scope = 's'",
        );
        assert_eq!(story(&db), "1 pending", "the rebase itself takes nothing over");
        for view in ["cancel", "adopt", "discard"] {
            for stale in [5, 900, 4990] {
                assert_eq!(verb(&db, view, stale, 1), "FP014", "{view}: the source isn't named");
            }
        }
        assert_eq!(put(&db, 901, None, "", "x"), "FP014");
        let sql = "INSERT INTO outbox(scope,token,source,kind,destination,payload) VALUES('s',3,'zk-b','webhook','billing','2')";
        assert_eq!(say(&db, sql), "ok");
        let id = text(&db, "SELECT id FROM outbox_status WHERE seq = 1").unwrap();
        if rule == "discard" {
            assert_eq!(story(&db), "1 dead superseded, 2 pending");
        } else {
            assert_eq!(story(&db), "1 parked, 2 pending");
            let adopt = format!("INSERT INTO outbox_adopt(scope,token,source,id) VALUES('s',3,'zk-b','{id}')");
            assert_eq!(say(&db, &adopt), "ok");
            assert_eq!(drained(&db), [1, 2], "seq goes first, (era, token, seq) never falls");
            assert_eq!(number(&db, "SELECT begun_era * 1000 + begun_token FROM outbox_lane"), 1003);
        }
    }
}

#[test]
fn no_cursor_misses_an_event_of_two_writers() {
    const EACH: i64 = 150;
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let db = Connection::open(directory.path().join("app.db")).unwrap();
        db.busy_timeout(Duration::from_secs(60)).unwrap();
        db.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF").unwrap();
        db
    };
    run(&open(), sqlite::CONTRACT);
    let seen = std::thread::scope(|scope| {
        for writer in ["a", "b"] {
            let db = open();
            scope.spawn(move || {
                for index in 0..EACH {
                    run(
                        &db,
                        &format!(
                            "BEGIN IMMEDIATE;
                             INSERT INTO outbox(id,scope,token,kind,destination,payload) VALUES('{writer}{index}','{writer}',1,'webhook','billing','x');
                             INSERT INTO outbox_cancel(scope,token,id) VALUES('{writer}',1,'{writer}{index}')"
                        ),
                    );
                    // Every third is undone, and its number may come again or not: nobody has seen it.
                    run(&db, if index % 3 == 0 { "ROLLBACK" } else { "COMMIT" });
                }
            });
        }
        let reader = open();
        let (mut last, mut seen) = (0, Vec::new());
        while seen.len() < 200 {
            let mut statement =
                reader.prepare_cached("SELECT n, id FROM outbox_event WHERE n > ?1 ORDER BY n LIMIT 7").unwrap();
            let rows = statement.query_map([last], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
            let rows: Vec<(i64, String)> = rows.map(Result::unwrap).collect();
            for (n, id) in rows {
                assert!(n > last);
                last = n;
                seen.push(id);
            }
            std::thread::yield_now();
        }
        seen
    });
    let db = open();
    let all = text(&db, "SELECT group_concat(id) FROM (SELECT id FROM outbox_event ORDER BY n)").unwrap();
    assert_eq!(seen.join(","), all);
    // Numbers don't come again, not even after the feed was emptied.
    let last = number(&db, "SELECT max(n) FROM outbox_event");
    run(&db, "DELETE FROM outbox_event WHERE n <= 9000");
    run(
        &db,
        "INSERT INTO outbox(id,scope,token,kind,destination,payload) VALUES('z','a',1,'webhook','billing','x'); INSERT INTO outbox_cancel(scope,token,id) VALUES('a',1,'z')",
    );
    assert_eq!(number(&db, "SELECT n FROM outbox_event"), last + 1);
}

#[test]
fn a_takeover_of_many_waiting_commands_finishes() {
    let db = memory();
    run(
        &db,
        "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < 300000)
         INSERT INTO outbox(scope,token,lane,kind,destination,payload) SELECT 's', 7, x % 1000, 'webhook', 'billing', '{}' FROM i",
    );
    for (rule, token, right) in [("review", 8, "parked"), ("discard", 9, "dead")] {
        policy(&db, rule);
        let began = Instant::now();
        assert_eq!(say(&db, &format!("INSERT INTO outbox_seal(scope,token) VALUES('s',{token})")), "ok");
        println!("{rule}: 300,000 commands in {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        assert_eq!(number(&db, &format!("SELECT count(*) FROM outbox_state WHERE state = '{right}'")), 300_000);
    }
    assert_eq!(number(&db, "SELECT count(*) FROM outbox_event"), 600_000);
}

#[test]
fn what_the_triggers_ask_goes_by_index() {
    let db = memory();
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_TRIGGER_EQP, true).unwrap();
    for (sql, index, times) in [
        ("UPDATE outbox_scope SET watermark = 1 WHERE scope = 's'", "outbox_state_live (scope=?)", 3),
        ("INSERT INTO outbox_cancel(scope,token,id) VALUES('s',1,'a')", "outbox_state_minted (minted_id=?)", 4),
        ("DELETE FROM outbox WHERE n = 1", "USING PRIMARY KEY (id=?)", 1),
        ("DELETE FROM outbox_state WHERE n = 1", "INTEGER PRIMARY KEY (rowid=?)", 1),
        ("DELETE FROM outbox_attempt WHERE n = 1 AND attempt_no = 1", "INTEGER PRIMARY KEY (rowid=?)", 1),
        ("DELETE FROM outbox_used WHERE id = 'a'", "outbox_state_minted (minted_id=?)", 1),
        ("INSERT INTO outbox_used VALUES('a','s','k',x'00',1)", "outbox_state_minted (minted_id=?)", 1),
        (
            "UPDATE outbox_scope SET pruned_seq = 3 WHERE scope = 's'",
            "outbox_state_seq (scope=? AND seq>? AND seq<?)",
            1,
        ),
        ("UPDATE outbox_state SET state = 'dead' WHERE n = 1", "outbox_state_live (scope=? AND lane=?)", 1),
        (
            "INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',1,'webhook','billing','x')",
            "outbox_used_key (scope=? AND key=?)",
            1,
        ),
        ("DELETE FROM outbox_event WHERE n < 9", "INTEGER PRIMARY KEY (rowid<?)", 2),
    ] {
        let plan = plan_of(&db, sql);
        assert!(plan.matches(index).count() >= times, "{sql}:\n{plan}");
        // One row of policy may be scanned, and what stands without a table.
        let scans = |line: &&str| {
            line.starts_with("SCAN")
                && !["outbox_policy", "CONSTANT ROW", "SCAN p", "SCAN t"].iter().any(|one| line.contains(one))
        };
        let scanned: Vec<_> = plan.lines().filter(scans).collect();
        assert!(scanned.is_empty(), "{sql}: {scanned:?}\n{plan}");
    }
}

// ── Random sequences against a model ───────────────────────────────────────────────────────────────

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert { lane: usize, key: Option<usize>, other: bool, raise: bool },
    Policy(usize),
    Seal,
    Verb { verb: usize, which: usize, stale: bool },
    Begin { lane: usize, armed: bool },
    Arm { which: usize },
    Settle { which: usize, outcome: usize },
    Resolve { which: usize },
    Prune,
}

const RULES: [&str; 3] = ["deliver", "discard", "review"];
const VERBS: [&str; 3] = ["cancel", "adopt", "discard"];
const OUTCOMES: [&str; 4] = ["delivered", "deferred", "unknown", "refused"];
const LANES: [&str; 2] = ["", "x"];
const KEYS: [&str; 3] = ["k0", "k1", "k2"];

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..6usize;
    prop_oneof![
        6 => (0..2usize, prop::option::of(0..3usize), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(lane, key, other, raise)| Step::Insert { lane, key, other, raise }),
        2 => (0..3usize).prop_map(Step::Policy),
        2 => Just(Step::Seal),
        4 => (0..3usize, which(), prop::bool::weighted(0.2)).prop_map(|(verb, which, stale)| Step::Verb { verb, which, stale }),
        4 => (0..2usize, any::<bool>()).prop_map(|(lane, armed)| Step::Begin { lane, armed }),
        2 => which().prop_map(|which| Step::Arm { which }),
        4 => (which(), 0..4usize).prop_map(|(which, outcome)| Step::Settle { which, outcome }),
        1 => which().prop_map(|which| Step::Resolve { which }),
        1 => Just(Step::Prune),
    ]
}

#[derive(Clone, Debug, PartialEq)]
struct Cmd {
    token: i64,
    lane: usize,
    key: Option<usize>,
    content: bool,
    state: &'static str,
    reason: Option<&'static str>,
    effect: &'static str,
    armed: bool,
    adopted: i64,
    pruned: bool,
}

impl Cmd {
    fn is_final(&self) -> bool {
        ["delivered", "dead"].contains(&self.state)
    }
}

/// What the contract promises, by itself: commands in order of seq, and the feed.
#[derive(Default)]
struct Model {
    watermark: i64,
    rule: &'static str,
    commands: Vec<Cmd>,
    events: Vec<String>,
}

impl Model {
    fn turn(&mut self, index: usize, state: &'static str, reason: Option<&'static str>) {
        let was = self.commands[index].state;
        let command = &mut self.commands[index];
        (command.state, command.reason) = (state, reason);
        if state == "dead" && reason == Some("superseded") && command.effect == "none" {
            command.key = None;
        }
        let event = match (was, state) {
            ("parked" | "in_doubt", "pending") => "resumed",
            (_, "pending" | "sending") => return,
            (_, other) => other,
        };
        self.events.push(format!("{event} {}", index + 1));
    }

    fn raise(&mut self) {
        self.watermark += 1;
        for index in 0..self.commands.len() {
            match (self.rule, self.commands[index].state) {
                ("discard", "pending" | "parked") => self.turn(index, "dead", Some("superseded")),
                ("discard", "sending") if !self.commands[index].armed => self.turn(index, "dead", Some("superseded")),
                ("review", "pending") => self.turn(index, "parked", None),
                _ => {}
            }
        }
    }

    fn back(&mut self, index: usize) {
        let command = &self.commands[index];
        let overtaken = command.token < self.watermark && command.adopted != self.watermark;
        match self.rule {
            "discard" if overtaken => self.turn(index, "dead", Some("superseded")),
            "review" if overtaken => self.turn(index, "parked", None),
            _ => self.turn(index, "pending", None),
        }
    }

    fn adopt(&mut self, index: usize) {
        self.turn(index, "pending", None);
        self.commands[index].adopted = self.watermark;
    }

    /// What an insert with a key answers.
    fn insert(&mut self, lane: usize, key: Option<usize>, content: bool) -> &'static str {
        let known = key.and_then(|key| self.commands.iter().position(|command| command.key == Some(key)));
        if let Some(index) = known {
            let command = &self.commands[index];
            if command.pruned {
                return "0";
            }
            if (command.lane, command.content) != (lane, content) {
                return "FP010";
            }
            if command.state == "parked" && command.reason.is_none() {
                self.adopt(index);
            }
            return "0";
        }
        let token = self.watermark;
        self.commands.push(Cmd {
            token,
            lane,
            key,
            content,
            state: "pending",
            reason: None,
            effect: "none",
            armed: false,
            adopted: 0,
            pruned: false,
        });
        "1"
    }

    fn verb(&mut self, verb: &str, index: usize, stale: bool) -> &'static str {
        let command = &self.commands[index];
        let (state, armed) = (command.state, command.armed);
        if stale {
            return "FP001";
        }
        match (verb, state) {
            (_, _) if command.pruned => return "FP003",
            (_, "delivered" | "dead") => return "FP011",
            ("cancel", "in_doubt") => return "FP007",
            ("cancel", "sending") if armed => return "FP007",
            ("cancel", _) => self.turn(index, "dead", Some("cancelled")),
            ("adopt", "parked") => self.adopt(index),
            (_, "parked") => {
                let reason = command.reason.or(Some("superseded"));
                self.turn(index, "dead", reason);
            }
            (_, _) => return "FP007",
        }
        "ok"
    }

    fn head(&self, lane: usize) -> Option<usize> {
        self.commands.iter().position(|command| command.lane == lane && !command.is_final())
    }

    fn story(&self) -> String {
        let line = |(index, command): (usize, &Cmd)| {
            let reason = command.reason.map_or(String::new(), |reason| format!(" {reason}"));
            let effect = if command.state == "sending" && command.armed { "possible" } else { command.effect };
            let effect = if effect == "none" { String::new() } else { format!(" {effect}") };
            format!("{} {}{reason}{effect}", index + 1, command.state)
        };
        let lines = self.commands.iter().enumerate().filter(|(_, command)| !command.pruned).map(line);
        lines.collect::<Vec<_>>().join(", ")
    }

    fn keys(&self) -> String {
        let line = |(index, command): (usize, &Cmd)| Some(format!("{} {}", index + 1, KEYS[command.key?]));
        let lines = self.commands.iter().enumerate().filter(|(_, command)| !command.pruned).filter_map(line);
        lines.collect::<Vec<_>>().join(", ")
    }
}

/// Takes the step in both, and returns both answers.
fn take(db: &Connection, model: &mut Model, step: Step) -> (String, String) {
    let seq = |index: usize| i64::try_from(index + 1).unwrap();
    let nothing = || (String::new(), String::new());
    let nth = |model: &Model, which: usize, state: &str| {
        let found = model.commands.iter().enumerate().filter(|(_, command)| command.state == state && !command.pruned);
        let found: Vec<usize> = found.map(|(index, _)| index).collect();
        (!found.is_empty()).then(|| found[which % found.len()])
    };
    match step {
        Step::Insert { lane, key, other, raise } => {
            let before = (model.watermark, model.commands.clone(), model.events.clone());
            if raise {
                model.raise();
            }
            let token = model.watermark;
            let right = model.insert(lane, key, other);
            if right.starts_with("FP") {
                (model.watermark, model.commands, model.events) = before;
            }
            let answer = put(db, token, key.map(|key| KEYS[key]), LANES[lane], if other { "other" } else { "one" });
            (answer, right.to_owned())
        }
        Step::Policy(rule) => {
            model.rule = RULES[rule];
            policy(db, model.rule);
            nothing()
        }
        Step::Seal => {
            model.raise();
            (say(db, &format!("INSERT INTO outbox_seal(scope,token) VALUES('s',{})", model.watermark)), "ok".to_owned())
        }
        Step::Verb { verb: index, which, stale } => {
            if model.commands.is_empty() || model.watermark < 2 {
                return nothing();
            }
            let which = model.commands.len() - 1 - which % model.commands.len();
            let right = model.verb(VERBS[index], which, stale);
            (verb(db, VERBS[index], model.watermark - i64::from(stale), seq(which)), right.to_owned())
        }
        Step::Begin { lane, armed } => {
            let Some(index) = model.head(lane).filter(|index| model.commands[*index].state == "pending") else {
                return nothing();
            };
            begin(db, seq(index), armed);
            (model.commands[index].state, model.commands[index].armed) = ("sending", armed);
            nothing()
        }
        Step::Arm { which } => {
            let Some(index) = nth(model, which, "sending") else { return nothing() };
            let right = usize::from(!model.commands[index].armed);
            model.commands[index].armed = true;
            (arm(db, seq(index)).to_string(), right.to_string())
        }
        Step::Settle { which, outcome } => {
            let Some(index) = nth(model, which, "sending") else { return nothing() };
            let outcome = match OUTCOMES[outcome] {
                "delivered" | "unknown" if !model.commands[index].armed => "deferred",
                outcome => outcome,
            };
            let answer = settle(db, seq(index), outcome);
            match outcome {
                "delivered" => {
                    model.commands[index].effect = "done";
                    model.turn(index, "delivered", None);
                }
                "unknown" => {
                    model.commands[index].effect = "possible";
                    model.turn(index, "in_doubt", None);
                }
                "refused" => model.turn(index, "dead", Some("refused")),
                _ => model.back(index),
            }
            model.commands[index].armed = false;
            (answer.to_string(), "true".to_owned())
        }
        Step::Resolve { which } => {
            let Some(index) = nth(model, which, "in_doubt") else { return nothing() };
            back(db, seq(index));
            model.back(index);
            nothing()
        }
        Step::Prune => {
            let upto = model.commands.iter().position(|command| !command.is_final()).unwrap_or(model.commands.len());
            prune(db, i64::try_from(upto).unwrap(), "9000000000000");
            model.commands[..upto].iter_mut().for_each(|command| command.pruned = true);
            nothing()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Goal: whatever workers, holders, dispatcher and prune do in turn, the contract keeps states, reasons,
    /// keys, order, lanes and feed. Method: random steps in the database and in the model; all is compared
    /// after each, and lanes and remembered ids are computed anew by the invariants of `bypass.json`.
    #[test]
    fn a_life_is_what_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        let suite = crate::bypass::suite();
        let db = memory();
        let mut model = Model { watermark: 1, rule: "deliver", ..Model::default() };
        run(&db, "INSERT INTO outbox_seal(scope,token) VALUES('s',1)");
        let mut last = 0;
        for step in steps {
            suite.remember(&db).unwrap();
            let (answer, right) = take(&db, &mut model, step);
            prop_assert_eq!(answer, right, "{:?}", step);
            prop_assert_eq!(story(&db), model.story(), "{:?}", step);
            // One step's events have no order among themselves; every step's stand behind those before.
            let mut statement = db.prepare_cached("SELECT event || ' ' || seq, n FROM outbox_event WHERE n > ?1 ORDER BY 1").unwrap();
            let news = statement.query_map([last], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
            let news: Vec<(String, i64)> = news.map(Result::unwrap).collect();
            last = news.iter().map(|(_, n)| *n).fold(last, i64::max);
            let mut right = std::mem::take(&mut model.events);
            right.sort();
            prop_assert_eq!(news.into_iter().map(|(line, _)| line).collect::<Vec<_>>(), right, "{:?}", step);
            let keys = text(&db, "SELECT coalesce(group_concat(line, ', '), '') FROM (SELECT seq || ' ' || key AS line FROM outbox_status WHERE key IS NOT NULL ORDER BY seq)");
            prop_assert_eq!(keys.unwrap(), model.keys(), "{:?}", step);
            prop_assert_eq!(number(&db, "SELECT token FROM outbox_lease"), model.watermark);
            for (lane, name) in LANES.iter().enumerate() {
                let sql = format!("SELECT max(seq) FROM outbox_state WHERE n = (SELECT head_n FROM outbox_lane WHERE lane = '{name}')");
                let head: Option<i64> = db.query_row(&sql, [], |row| row.get(0)).unwrap();
                prop_assert_eq!(head, model.head(lane).map(|index| i64::try_from(index + 1).unwrap()), "{:?}", step);
            }
            for about in ["lane", "seq is missing", "pruned", "forgotten", "feed", "event", "attempt is open", "fresh tries"] {
                prop_assert_eq!(suite.breaches(&db, about), [""; 0], "{:?}", step);
            }
        }
    }
}
