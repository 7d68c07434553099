//! `fencepost audit`: a healthy database passes while it is busy, and each kind of damage is found.

use std::collections::BTreeSet;

use rusqlite::Connection;
use serde_json::Value;

use crate::support::daemon::{Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

fn audit(site: &Site) -> (Option<i32>, Value) {
    let ran = site.command("audit").arg("--json").output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let value =
        serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{}", String::from_utf8_lossy(&ran.stderr)));
    (ran.status.code(), value)
}

fn found(report: &Value) -> Vec<String> {
    report["findings"].as_array().unwrap().iter().map(|finding| finding["check"].as_str().unwrap().to_owned()).collect()
}

/// A database with every state in it, as a dispatcher made it: 1 delivered, 2 refused, 3 in doubt, 4
/// waiting behind it, 5 retried, 6 given its key back by expiry, 7 resolved by a person.
fn lived_in() -> Site {
    let server = Server::start(|request| {
        let path = request.target.as_str();
        match (path, request.number) {
            ("/refuse", _) => Reply::status(400),
            ("/doubt", _) => Reply::status(500),
            ("/later", _) => Reply::status(429),
            _ => Reply::status(200),
        }
    });
    let site = Site::new();
    let to = |name: &str, more: &str| webhook(name, &format!("http://127.0.0.1:{}/{name}", server.port()), more);
    let slow = "on_unknown = \"hold\"";
    site.configure(
        &[to("good", ""), to("refuse", ""), to("doubt", slow), to("later", "")]
            .join("\n")
            .replace("\"20ms\", cap = \"50ms\"", "\"1h\", cap = \"1h\""),
    );
    site.webhook("delivered", "a", 1, "good");
    site.webhook("refused", "b", 1, "refuse");
    site.webhook("doubtful", "c", 3, "doubt");
    site.webhook("behind", "c", 4, "good");
    site.webhook("retried", "d", 1, "later");
    site.sql(
        "INSERT INTO outbox(id, scope, token, key, kind, destination, payload, expires_at_ms) VALUES ('expired', 'e', 1, 'k', 'webhook', 'good', '', 100000000001);
         INSERT INTO outbox(id, scope, token, key, kind, destination, payload) VALUES ('keyed', 'e', 1, 'l', 'webhook', 'good', '');
         INSERT INTO outbox(id, scope, lane, token, kind, destination, payload, not_before_ms) VALUES ('later', 'e', 'x', 2, 'webhook', 'good', '', 9000000000000)",
    );
    site.webhook("answered", "f", 1, "doubt");
    site.drain();
    let resolved = site.command("resolve").args(["answered", "delivered", "--reason", "it is there"]).output().unwrap();
    assert!(resolved.status.success(), "{resolved:?}");
    site
}

/// Everything that a dispatcher, workers and a person do leaves nothing to find, at any moment of it.
#[test]
fn a_healthy_database_passes_while_it_is_busy() {
    let server = Server::start(|request| match request.number % 5 {
        0 => Reply::status(500),
        1 => Reply::status(429),
        2 => Reply::status(404),
        _ => Reply::status(200),
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let daemon = site.start();
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            for n in 0..150 {
                site.webhook(&format!("w{n}"), &format!("s{}", n % 7), 1 + n / 50, "billing");
            }
        });
        let mut audits = 0;
        while !writer.is_finished() || audits < 3 {
            let (code, report) = audit(&site);
            assert_eq!(code, Some(0), "{report:#}");
            audits += 1;
        }
    });
    wait_until("all have ended", 60, || {
        site.value::<i64>("SELECT count(*) FROM outbox_lane WHERE head_n IS NOT NULL") == 0
    });
    daemon.stop();
    let (code, report) = audit(&site);
    assert_eq!((code, &report["ok"], &report["commands"]), (Some(0), &true.into(), &150.into()), "{report:#}");
    let said = site.command("audit").output().unwrap();
    assert!(String::from_utf8_lossy(&said.stdout).contains("nothing found"), "{said:?}");
    let (code, report) = audit(&lived_in());
    assert_eq!(code, Some(0), "{report:#}");
}

/// Writes past the guards: they are dropped, and made again as they were.
fn damage(site: &Site, statements: &str) {
    let connection = Connection::open(site.db()).unwrap();
    let all = "SELECT name, sql FROM sqlite_schema WHERE name LIKE 'outbox%' AND type = 'trigger'";
    let guards: Vec<(String, String)> = connection
        .prepare(all)
        .unwrap()
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    for (name, _) in &guards {
        connection.execute_batch(&format!("DROP TRIGGER {name}")).unwrap();
    }
    connection.execute_batch(statements).unwrap();
    for (_, sql) in &guards {
        connection.execute_batch(sql).unwrap();
    }
    connection.execute_batch("COMMIT").unwrap();
}

/// The number of the command with this id.
macro_rules! n {
    ($id:literal) => {
        concat!("(SELECT n FROM outbox WHERE id = '", $id, "')")
    };
}

/// Damage, and the check that must find it. Others may find it too.
const DAMAGE: &[(&str, &str)] = &[
    ("schema", "CREATE TRIGGER outbox_extra AFTER INSERT ON outbox BEGIN SELECT 1; END"),
    ("single-rows", "DELETE FROM outbox_policy"),
    ("pairs", concat!("DELETE FROM outbox WHERE n = ", n!("delivered"))),
    ("pairs", concat!("DELETE FROM outbox_state WHERE n = ", n!("refused"))),
    ("same-words", concat!("UPDATE outbox SET token = 7 WHERE n = ", n!("behind"))),
    ("states", concat!("UPDATE outbox_state SET state = 'lost' WHERE n = ", n!("delivered"))),
    ("states", concat!("UPDATE outbox_state SET reason = NULL WHERE n = ", n!("refused"))),
    ("content", concat!("UPDATE outbox SET payload = NULL WHERE n = ", n!("behind"))),
    ("seq-gaps", concat!("UPDATE outbox_state SET seq = 9 WHERE n = ", n!("behind"))),
    ("seq-gaps", "UPDATE outbox_scope SET next_seq = 5 WHERE scope = 'a'"),
    ("seq-gaps", "UPDATE outbox_scope SET next_seq = 5 WHERE scope = 'a'; DELETE FROM outbox_state WHERE scope = 'a'"),
    ("seq-gaps", "DELETE FROM outbox_scope WHERE scope = 'a'"),
    ("pruned-live", "UPDATE outbox_scope SET pruned_seq = 2 WHERE scope = 'c'"),
    ("token-order", concat!("UPDATE outbox_state SET token = 2 WHERE n = ", n!("behind"))),
    ("watermark", "UPDATE outbox_scope SET watermark = 3 WHERE scope = 'c'"),
    ("watermark", concat!("UPDATE outbox_state SET era = 1 WHERE n = ", n!("behind"))),
    (
        "one-holder",
        "UPDATE outbox SET holder = 'h' || n WHERE scope = 'e'; UPDATE outbox_state SET token = 1 WHERE scope = 'e'",
    ),
    ("lane-rows", "UPDATE outbox_lane SET head_n = NULL WHERE scope = 'c'"),
    ("lane-rows", "UPDATE outbox_lane SET kind = 'email' WHERE scope = 'c'"),
    ("lane-rows", "UPDATE outbox_lane SET due_ms = 5 WHERE scope = 'd'"),
    ("lane-rows", "UPDATE outbox_lane SET due_ms = NULL WHERE scope = 'd'"),
    ("lane-rows", "DELETE FROM outbox_lane WHERE scope = 'd'"),
    ("lane-rows", concat!("UPDATE outbox_lane SET head_n = ", n!("behind"), " WHERE scope = 'c'")),
    ("begun", "UPDATE outbox_lane SET begun_token = 9 WHERE scope = 'c'"),
    ("begun", "UPDATE outbox_lane SET begun_seq = 9 WHERE scope = 'c'"),
    ("begun-fell", "UPDATE outbox_lane SET begun_seq = 0 WHERE scope = 'c'"),
    ("head-only", concat!("UPDATE outbox_state SET state = 'in_doubt' WHERE n = ", n!("behind"))),
    ("one-sending", "UPDATE outbox_state SET state = 'sending' WHERE scope = 'c'"),
    ("open-attempt", concat!("UPDATE outbox_state SET state = 'sending' WHERE n = ", n!("retried"))),
    ("open-attempt", concat!("UPDATE outbox_attempt SET settled_ms = NULL, outcome = NULL WHERE n = ", n!("retried"))),
    ("attempt-numbers", concat!("DELETE FROM outbox_attempt WHERE n = ", n!("refused"))),
    ("attempt-numbers", concat!("UPDATE outbox_attempt SET attempt_no = 2 WHERE n = ", n!("refused"))),
    ("stray-attempts", "UPDATE outbox_attempt SET n = 99 WHERE attempt_no = 1 AND outcome = 'refused'"),
    ("attempt-ends", concat!("UPDATE outbox_attempt SET armed_ms = NULL WHERE n = ", n!("delivered"))),
    ("attempt-ends", concat!("UPDATE outbox_attempt SET outcome = 'fine' WHERE n = ", n!("refused"))),
    ("epochs", "UPDATE outbox_dispatcher SET epoch = 0"),
    (
        "delivered",
        concat!(
            "UPDATE outbox_state SET state = 'delivered', reason = NULL, effect = 'done' WHERE n = ",
            n!("refused")
        ),
    ),
    ("delivered", "DELETE FROM outbox_audit"),
    (
        "delivered-twice",
        concat!("UPDATE outbox_state SET state = 'dead', reason = 'cancelled' WHERE n = ", n!("delivered")),
    ),
    ("effect-none", concat!("UPDATE outbox_state SET effect = 'none' WHERE n = ", n!("doubtful"))),
    ("effect", concat!("UPDATE outbox_state SET effect = 'possible' WHERE n = ", n!("behind"))),
    ("effect", concat!("UPDATE outbox_state SET effect = 'possible' WHERE n = ", n!("delivered"))),
    ("unique-ids", concat!("UPDATE outbox_state SET minted_id = 'refused' WHERE n = ", n!("delivered"))),
    ("keys", concat!("UPDATE outbox_state SET key = NULL WHERE n = ", n!("keyed"))),
    ("used-ids", "INSERT INTO outbox_used VALUES ('behind', 'c', NULL, x'00', 9000000000000)"),
    ("event-numbers", "UPDATE sqlite_sequence SET seq = 1 WHERE name = 'outbox_event'"),
    (
        "events-after-end",
        "INSERT INTO outbox_event(at_ms, event, id, scope, lane, seq, effect) VALUES (1, 'in_doubt', 'delivered', 'a', '', 1, 'done')",
    ),
    ("events-true", concat!("UPDATE outbox_state SET reason = 'exhausted' WHERE n = ", n!("refused"))),
    ("counters", concat!("UPDATE outbox_state SET tries = 9 WHERE n = ", n!("retried"))),
    ("scopes", "UPDATE outbox_scope SET watermark = -1 WHERE scope = 'a'"),
];

/// Rows that only an index would keep apart: without it there are two of them.
const TWICE: &[(&str, &str, &str)] = &[
    ("unique-keys", "outbox_state_key", "UPDATE outbox_state SET key = 'l' WHERE scope = 'e' AND seq > 1"),
    ("unique-seqs", "outbox_state_seq", "UPDATE outbox_state SET seq = 1 WHERE scope = 'c'"),
];

/// A check that no damage reaches is no check.
#[test]
fn every_check_has_its_damage() {
    let source = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sqlite/audit.rs")).unwrap();
    let named = regex::Regex::new(r#"name: "([a-z-]+)""#).unwrap();
    let checks: BTreeSet<&str> = named.captures_iter(&source).map(|found| found.get(1).unwrap().as_str()).collect();
    let damaged = DAMAGE.iter().map(|(check, _)| *check).chain(TWICE.iter().map(|(check, _, _)| *check));
    let damaged: BTreeSet<&str> = damaged.filter(|check| *check != "schema").collect();
    assert_eq!(checks, damaged);
}

/// One byte of an index is another one: the file itself is damaged.
#[test]
fn a_damaged_index_is_found() {
    let site = Site::new();
    site.webhook("w", "s", 1, "good");
    let root: i64 = site.value("SELECT rootpage FROM sqlite_schema WHERE name = 'outbox_state_seq'");
    let size: i64 = site.value("PRAGMA page_size");
    site.connect().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    assert_eq!(audit(&site).0, Some(0));
    let mut bytes = std::fs::read(site.db()).unwrap();
    // The first entry of a page stands at its end: a scope and a seq.
    let page = &mut bytes[usize::try_from((root - 1) * size).unwrap()..usize::try_from(root * size).unwrap()];
    let at = page.iter().rposition(|byte| *byte == b's').unwrap();
    page[at] = b't';
    std::fs::write(site.db(), bytes).unwrap();
    let (code, report) = audit(&site);
    assert!(code == Some(1) && found(&report).contains(&"file".to_owned()), "{report:#}");
    assert!(report.to_string().contains("outbox_state_seq"), "{report:#}");
}

#[test]
fn each_damage_is_found_by_name() {
    let original = lived_in();
    let copy = |connection: &Connection| {
        let site = Site::new();
        std::fs::remove_file(site.db()).unwrap();
        connection.execute("VACUUM INTO ?1", [site.db().to_str().unwrap()]).unwrap();
        site
    };
    let healthy = original.connect();
    let mut missed = Vec::new();
    for (check, statements) in DAMAGE {
        let site = copy(&healthy);
        damage(&site, statements);
        let (code, report) = audit(&site);
        let rows_are_named = report["findings"].as_array().unwrap().iter().all(|finding| {
            finding["rows"].as_array().unwrap().iter().all(|row| !row.as_str().unwrap().contains("can't be named"))
        });
        if code != Some(1) || !found(&report).iter().any(|name| name == check) || !rows_are_named {
            missed.push(format!("{check}: {statements}: {report:#}"));
        }
    }
    for (check, index, statements) in TWICE {
        let site = copy(&healthy);
        damage(&site, &format!("DROP INDEX {index}; {statements}"));
        let (code, report) = audit(&site);
        let names = found(&report);
        if code != Some(1) || !names.iter().any(|name| name == check) || !names.contains(&"schema".to_owned()) {
            missed.push(format!("{check}: {report:#}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

/// Guards that are gone are found, and a table that is gone doesn't hide what else is wrong.
#[test]
fn what_is_missing_is_said() {
    let site = lived_in();
    let connection = Connection::open(site.db()).unwrap();
    connection.execute_batch("DROP TRIGGER outbox_admit; DROP TABLE outbox_used; DROP TRIGGER outbox_lane_rise; UPDATE outbox_lane SET begun_seq = 0 WHERE scope = 'c'").unwrap();
    let (code, report) = audit(&site);
    assert_eq!(code, Some(1));
    let names = found(&report);
    for name in ["schema", "used-ids", "begun-fell"] {
        assert!(names.iter().any(|found| found == name), "{name}: {report:#}");
    }
    let said = site.command("audit").output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(text.contains("outbox_admit (missing)") && text.contains("Stop the dispatcher"), "{text}");
}
