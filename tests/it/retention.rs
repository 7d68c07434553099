//! Prune, erasure and what is remembered afterwards: by hand and by the daemon.

use std::time::{Duration, Instant};

use fencepost::clock::wall_ms;
use fencepost::rules::{Code, FencingToken};
use fencepost::sqlite::retention::{Ages, Gone, pass, plan};
use fencepost::sqlite::{Enqueued, Held, NewCommand, enqueue};
use rusqlite::{Connection, TransactionBehavior};

use crate::support::daemon::{BINARY, Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

const HOUR: Duration = Duration::from_secs(3600);
const HOUR_MS: i64 = 3_600_000;

/// Moves a command to an end, or another state, at a time. The contract lets a dispatcher do so.
fn put(connection: &Connection, id: &str, state: &str, reason: Option<&str>, at_ms: i64) {
    let set =
        "UPDATE outbox_state SET state = ?2, reason = ?3, effect = CASE ?2 WHEN 'dead' THEN effect ELSE 'done' END,
        updated_ms = ?4 WHERE n = (SELECT n FROM outbox_status WHERE id = ?1)";
    assert_eq!(connection.execute(set, (id, state, reason, at_ms)).unwrap(), 1, "{id}");
}

fn everything(connection: &mut Connection, ages: &Ages, now_ms: i64) -> Gone {
    let planned = plan(connection, ages, now_ms).unwrap();
    let gone = pass(connection, ages, now_ms, &mut |_, _| true).unwrap();
    assert_eq!(Gone { forgotten: 0, ..gone }, planned, "what a dry run says is what goes");
    gone
}

fn numbers(connection: &Connection, sql: &str) -> String {
    connection
        .query_row(&format!("SELECT coalesce(group_concat(v, ','), '') FROM ({sql})"), [], |row| row.get(0))
        .unwrap()
}

fn repeat(connection: &mut Connection, token: i64, key: &str, payload: &str) -> Result<Enqueued, Option<Code>> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let held = Held::new("s", FencingToken::new(token).unwrap());
    let answer = enqueue(&transaction, &held, &NewCommand::webhook("billing", payload).key(key));
    if answer.is_ok() {
        transaction.commit().unwrap();
    } else {
        assert!(transaction.is_autocommit(), "a refusal undoes the transaction");
    }
    answer.map_err(|error| error.code())
}

/// H25: retention 1 h. The scope, the key, and what is live outlive the prune.
#[test]
fn h25_retention_keeps_what_guards_against_repeats() {
    let site = Site::new();
    let mut db = site.connect();
    for (id, key, lane) in [
        ("d", "'ord-1'", ""),
        ("retry", "NULL", "b"),
        ("doubt", "NULL", "c"),
        ("dead", "NULL", "d"),
        ("late", "NULL", ""),
    ] {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, lane, key, kind, destination, payload)
             VALUES ('{id}', 's', 77, '{lane}', {key}, 'webhook', 'billing', '{{}}')"
        ));
    }
    site.sql("INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('x', 'other', 1, 'webhook', 'billing', '{}')");
    let now = wall_ms();
    let old = now - 3 * HOUR_MS;
    put(&db, "d", "delivered", None, old);
    put(&db, "doubt", "in_doubt", None, old);
    put(&db, "dead", "dead", Some("refused"), old);
    put(&db, "x", "dead", Some("refused"), old);
    put(&db, "late", "delivered", None, now);
    let gone = everything(&mut db, &Ages { delivered: Some(HOUR), ..Ages::default() }, now);
    assert_eq!(gone, Gone { delivered: 1, ..Gone::default() });
    assert_eq!(numbers(&db, "SELECT id AS v FROM outbox_status ORDER BY id"), "dead,doubt,late,retry,x");
    assert_eq!(site.value::<i64>("SELECT pruned_seq FROM outbox_scope WHERE scope = 's'"), 1);

    assert_eq!(repeat(&mut db, 60, "other", "{}"), Err(Some(Code::StaleToken)), "scopes outlive their commands");
    let known = Enqueued::Duplicate { id: "d".to_owned(), state: "pruned".to_owned() };
    assert_eq!(repeat(&mut db, 77, "ord-1", "{}"), Ok(known));
    assert_eq!(repeat(&mut db, 77, "ord-1", "{\"other\":1}"), Err(Some(Code::KeyExists)));
    // Plain SQL can't compare any more: a known key is a repeat, and a known id another command.
    site.sql("INSERT INTO outbox(scope, token, key, kind, destination, payload) VALUES ('s', 77, 'ord-1', 'webhook', 'billing', 'other')");
    let refused = db.execute("INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('d', 's', 77, 'webhook', 'billing', '{}')", []);
    assert!(refused.unwrap_err().to_string().contains("FP005"));
    assert_eq!(repeat(&mut db, 77, "new", "{}").map(|new| matches!(new, Enqueued::New { seq: 6, .. })), Ok(true));
    assert_eq!(numbers(&db, "SELECT seq AS v FROM outbox_state WHERE scope = 's' ORDER BY seq"), "2,3,4,5,6");

    // Dead ones have an age of their own.
    let gone = everything(&mut db, &Ages { dead: Some(HOUR), ..Ages::default() }, now);
    assert_eq!(
        gone,
        Gone { dead: 1, ..Gone::default() },
        "that of the other scope; the one of s stands behind a live one"
    );
    assert_eq!(site.value::<i64>("SELECT watermark FROM outbox_scope WHERE scope = 'other'"), 1);
}

/// H25: ids and keys are forgotten after key_retention, and not before.
#[test]
fn h25_ids_and_keys_are_forgotten_in_time() {
    let site = Site::new();
    let mut db = site.connect();
    site.sql("UPDATE outbox_policy SET key_retention = 0");
    for scope in ["s", "kept"] {
        site.sql(&format!("INSERT INTO outbox(id, scope, token, key, kind, destination, payload) VALUES ('{scope}', '{scope}', 1, 'k', 'webhook', 'billing', '{{}}')"));
        put(&db, scope, "delivered", None, wall_ms() - HOUR_MS);
    }
    site.sql("UPDATE outbox_scope SET key_retention = 3600000 WHERE scope = 'kept'");
    let ages = Ages { delivered: Some(HOUR), ..Ages::default() };
    assert_eq!(everything(&mut db, &ages, wall_ms() - 1).delivered, 2);
    let now = wall_ms();
    wait_until("the clock goes on", 5, || wall_ms() > now + 1);
    assert_eq!(everything(&mut db, &ages, wall_ms()).forgotten, 1);
    assert_eq!(numbers(&db, "SELECT id AS v FROM outbox_used"), "kept");
    assert!(matches!(repeat(&mut db, 1, "k", "other"), Ok(Enqueued::New { seq: 2, .. })), "the key is free again");
}

/// Erasure: id, key and hash stay, payload and headers go, from the file too.
#[test]
fn erased_content_is_gone_and_still_compared() {
    let site = Site::new();
    let mut db = site.connect();
    for (id, scope, lane) in [("live", "s", "b"), ("e", "s", ""), ("young", "t", "")] {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, lane, key, kind, destination, headers, payload)
             VALUES ('{id}', '{scope}', 1, '{lane}', '{id}', 'webhook', 'billing', 'null', '{{\"card\":\"4111-{id}\"}}')"
        ));
    }
    let now = wall_ms();
    put(&db, "e", "delivered", None, now - 2 * HOUR_MS);
    put(&db, "young", "delivered", None, now);
    let ages = Ages { erase: Some(HOUR), delivered: Some(HOUR), ..Ages::default() };
    assert_eq!(everything(&mut db, &ages, now), Gone { erased: 1, ..Gone::default() });
    assert_eq!(everything(&mut db, &ages, now), Gone::default(), "once");
    assert_eq!(numbers(&db, "SELECT o.id AS v FROM outbox o WHERE payload IS NOT NULL ORDER BY id"), "live,young");
    assert_eq!(site.value::<i64>("SELECT erased_ms FROM outbox_state WHERE erased_ms IS NOT NULL"), now);
    db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, i64>(0)).unwrap();
    let file = std::fs::read(site.db()).unwrap();
    let holds = |text: &str| file.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(holds("4111-live") && !holds("4111-e"));

    let known = Enqueued::Duplicate { id: "e".to_owned(), state: "delivered".to_owned() };
    assert_eq!(repeat(&mut db, 1, "e", "{\"card\":\"4111-e\"}"), Ok(known));
    assert_eq!(repeat(&mut db, 1, "e", "{}"), Err(Some(Code::KeyExists)));
    // What is remembered of an erased command lasts as long as the command.
    let much_later = now + 90 * 24 * HOUR_MS;
    assert_eq!(everything(&mut db, &Ages { erase: Some(HOUR), ..Ages::default() }, much_later).forgotten, 0);
    assert!(site.value::<i64>("SELECT until_ms FROM outbox_used WHERE id = 'e'") > much_later);
    let shown = site.command("show").args(["e", "--payload"]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("erased"), "{shown}");
    // Pruned later, it keeps the hash that it has.
    put(&db, "live", "dead", Some("cancelled"), now - 2 * HOUR_MS);
    let gone = everything(&mut db, &Ages { delivered: Some(HOUR), dead: Some(HOUR), ..Ages::default() }, now);
    assert_eq!((gone.delivered, gone.dead), (1, 1));
    assert_eq!(repeat(&mut db, 1, "e", "{}"), Err(Some(Code::KeyExists)));
}

/// H23: ages are compared as integers, whatever the time zone; events go from the front.
#[test]
fn h23_prune_removes_only_what_is_older() {
    let site = Site::new();
    let db = site.connect();
    let now = wall_ms();
    for (n, age_ms) in [3 * HOUR_MS, 2 * HOUR_MS, HOUR_MS + 60_000, HOUR_MS - 60_000, 0].into_iter().enumerate() {
        let id = format!("t{n}");
        site.webhook(&id, &id, 1, "billing");
        put(&db, &id, "delivered", None, now - age_ms);
    }
    let events: i64 = site.value("SELECT count(*) FROM outbox_event");
    let prune = |arguments: &[&str]| {
        let output = site.command("prune").args(arguments).env("TZ", "Asia/Kolkata").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let said = prune(&["--delivered-older-than", "1h", "--events-older-than", "0s", "--dry-run"]);
    assert!(said.contains("would go: 3 delivered and 0 dead") && said.contains(&format!("{events} events")), "{said}");
    let said = prune(&["--delivered-older-than", "1h", "--events-older-than", "1d", "--json"]);
    assert!(said.contains("\"delivered\": 3") && said.contains("\"events\": 0"), "{said}");
    assert_eq!(numbers(&db, "SELECT id AS v FROM outbox_status ORDER BY id"), "t3,t4");
    prune(&["--events-older-than", "0s"]);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_event"), 0);
    assert_eq!(site.command("prune").output().unwrap().status.code(), Some(64), "nothing is old by itself");
}

/// H24: after prune neither a number nor an identity is used again.
#[test]
fn h24_nothing_is_used_again_after_prune() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let insert = |count: usize| {
        let rows =
            "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('s', 1, 'webhook', 'billing', '{}');";
        site.sql(&rows.repeat(count));
    };
    insert(20);
    site.drain();
    let mut db = site.connect();
    let ages = Ages { delivered: Some(Duration::ZERO), ..Ages::default() };
    assert_eq!(everything(&mut db, &ages, wall_ms()).delivered, 20);
    assert_eq!(
        site.value::<i64>("SELECT count(*) FROM outbox_attempt") + site.value::<i64>("SELECT count(*) FROM outbox"),
        0
    );
    db.execute_batch("VACUUM").unwrap();
    insert(1);
    assert_eq!(numbers(&db, "SELECT n AS v FROM outbox"), "21", "the number is not used again");
    assert_eq!(numbers(&db, "SELECT seq AS v FROM outbox_state"), "21");
    site.drain();
    let ids: Vec<String> =
        server.requests().iter().map(|request| request.header("webhook-id").unwrap().to_owned()).collect();
    assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), 21);
}

/// The daemon prunes by policy beside a steady load, and no send waits for it noticeably.
#[test]
fn the_daemon_keeps_house_without_holding_up_sends() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    let keep = "[retention]\ndelivered = \"1h\"\ndead = \"off\"\nevery = \"50ms\"\n";
    site.configure(&format!("{keep}{}", webhook("billing", &server.url(), "")));
    let old =
        "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('old', 1, 'webhook', 'gone', '{}');";
    site.sql(&old.repeat(3000));
    let ended = wall_ms() - 2 * HOUR_MS;
    site.sql(&format!(
        "UPDATE outbox_state SET state = 'delivered', effect = 'done', updated_ms = {ended} WHERE scope = 'old'"
    ));
    let daemon = site.start();
    let mut slowest = Duration::ZERO;
    let mut sent = 0;
    let left = || site.value::<i64>("SELECT count(*) FROM outbox_state WHERE scope = 'old'");
    while left() > 0 {
        site.webhook(&format!("w{sent}"), &format!("s{sent}"), 1, "billing");
        let began = Instant::now();
        sent += 1;
        server.wait_for(sent);
        slowest = slowest.max(began.elapsed());
    }
    daemon.stop();
    assert!(sent > 3, "sends and prune went on together: {sent}");
    println!("{sent} sends beside the prune of 3000, the slowest took {slowest:?}");
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_used"), 3000);
}

/// A prune that dies leaves whole transactions behind, and the next one goes on.
#[test]
fn a_prune_can_be_stopped_anywhere() {
    let site = Site::new();
    let mut db = site.connect();
    let rows =
        "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('s', 1, 'webhook', 'billing', '{}');";
    site.sql(&rows.repeat(450));
    site.sql("UPDATE outbox_state SET state = 'delivered', updated_ms = 1");
    let ages = Ages { delivered: Some(HOUR), ..Ages::default() };
    let first = pass(&mut db, &ages, wall_ms(), &mut |_, _| false).unwrap();
    assert!((1..=200).contains(&first.delivered), "{first:?}");
    let left: i64 = site.value("SELECT count(*) FROM outbox");
    assert_eq!(left, 450 - i64::try_from(first.delivered).unwrap());
    assert_eq!(
        site.value::<i64>("SELECT min(seq) - 1 FROM outbox_state"),
        site.value::<i64>("SELECT pruned_seq FROM outbox_scope")
    );
    assert_eq!(pass(&mut db, &ages, wall_ms(), &mut |_, _| true).unwrap().delivered, u64::try_from(left).unwrap());
    assert_eq!(
        std::process::Command::new(BINARY).arg("--db").arg(site.db()).args(["status"]).output().unwrap().status.code(),
        Some(0)
    );
}
