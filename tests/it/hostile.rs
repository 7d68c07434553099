//! What an attacker or a clumsy application found to do with the database, and how it must come out.

use rusqlite::Connection;
use rustix::process::Signal;

use crate::support::daemon::{Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

/// A kind or a destination that isn't UTF-8 ends as invalid, wherever its bytes sort, and hides nobody.
#[test]
fn names_that_are_not_utf8_stop_nothing_else() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&format!("{}{}", webhook("billing", &server.url(), ""), webhook("\"가\"", &server.url(), "")));
    for (n, (kind, destination)) in [
        ("6d66", "FF"),
        ("776562686f6f6b", "FF"),
        ("776562686f6f6b", "6dfc6e6368656e"),
        ("776562686f6f6b", "E9"),
        ("6dfc", "6d"),
    ]
    .iter()
    .enumerate()
    {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload)
             VALUES ('bad{n}', 'bad{n}', 1, CAST(x'{kind}' AS TEXT), CAST(x'{destination}' AS TEXT), '{{}}')"
        ));
    }
    site.webhook("good", "good", 1, "billing");
    site.webhook("hangul", "hangul", 1, "가");
    site.drain();
    assert_eq!((site.status("good").state.as_str(), site.status("hangul").state.as_str()), ("delivered", "delivered"));
    let invalid: i64 = site.value("SELECT count(*) FROM outbox_state WHERE scope GLOB 'bad*' AND state = 'dead' AND reason = 'invalid' AND effect = 'none'");
    assert_eq!(invalid, 5);
}

/// With SQLite's default a trigger can't fire from inside itself, so an application's trigger that writes
/// commands from inside one of ours would write past the fence. The insert is refused as a whole.
#[test]
fn a_trigger_of_the_application_cannot_write_past_the_fence() {
    const INSERT: &str = "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES";
    for trigger in [
        format!("AFTER INSERT ON outbox_state WHEN NEW.scope <> 'audit' BEGIN {INSERT} ('audit', 1, 'webhook', 'billing', 'x'); END"),
        format!("AFTER INSERT ON outbox_lane WHEN NEW.scope <> 'audit' BEGIN {INSERT} ('audit', 1, 'webhook', 'billing', 'x'); END"),
        format!("AFTER INSERT ON outbox_scope WHEN NEW.scope <> 'audit' BEGIN {INSERT} ('audit', 1, 'webhook', 'billing', 'x'); END"),
        format!("AFTER UPDATE ON outbox_scope WHEN NEW.watermark > OLD.watermark BEGIN {INSERT} (NEW.scope, OLD.watermark, 'webhook', 'billing', 'x'); END"),
        format!("AFTER UPDATE ON outbox_scope WHEN NEW.watermark > OLD.watermark BEGIN {INSERT} (NEW.scope, -7, 'webhook', 'billing', NULL); END"),
        format!("AFTER INSERT ON outbox WHEN NEW.token = 1 BEGIN {INSERT} (NEW.scope, 2, 'webhook', 'billing', 'x'); END"),
        "AFTER INSERT ON outbox WHEN NEW.token = 1 BEGIN INSERT INTO outbox_fence(scope, token) VALUES (NEW.scope, 2); END".to_owned(),
    ] {
        for recursive in ["OFF", "ON"] {
            let connection = Connection::open_in_memory().unwrap();
            connection.execute_batch(fencepost::sqlite::CONTRACT).unwrap();
            connection.execute_batch(&format!("PRAGMA recursive_triggers = {recursive}; CREATE TRIGGER app {trigger}")).unwrap();
            for token in [1, 5, 6] {
                // Whether the statement is refused or not: what it leaves must be right.
                let _ = connection.execute(&format!("{INSERT} ('s', {token}, 'webhook', 'billing', 'x')"), []);
                let lost: i64 = connection
                    .query_row("SELECT count(*) FROM outbox o WHERE NOT EXISTS (SELECT 1 FROM outbox_state x WHERE x.n = o.n)", [], |row| row.get(0))
                    .unwrap();
                let backwards: i64 = connection
                    .query_row(
                        "SELECT count(*) FROM outbox_state a JOIN outbox_state b ON a.scope = b.scope AND a.seq < b.seq AND a.token > b.token",
                        [],
                        |row| row.get(0),
                    )
                    .unwrap();
                let illegal: i64 = connection
                    .query_row("SELECT count(*) FROM outbox WHERE token < 1 OR (payload IS NULL AND payload_bytes IS NULL)", [], |row| row.get(0))
                    .unwrap();
                assert_eq!((lost, backwards, illegal), (0, 0, 0), "{trigger}, recursive_triggers {recursive}, token {token}");
            }
        }
    }
}

/// The dispatcher doesn't run on a database where somebody else's trigger or unique index is on our tables,
/// and ends when one appears.
#[test]
fn foreign_triggers_and_unique_indexes_stop_the_dispatcher() {
    for (object, name) in [
        (
            "CREATE TRIGGER alert AFTER UPDATE ON outbox_state WHEN NEW.state = 'dead' BEGIN SELECT RAISE(ROLLBACK, 'FP010 key exists'); END",
            "alert",
        ),
        ("CREATE UNIQUE INDEX mine ON outbox(traceparent)", "mine"),
        ("create  unique  index mine ON outbox(traceparent)", "mine"),
    ] {
        let site = Site::new();
        let daemon = site.start();
        site.sql(object);
        let log = std::sync::Arc::clone(&daemon.log);
        assert_eq!(daemon.wait().code(), Some(74), "{object}");
        assert!(log.lock().unwrap().contains(name));
        assert_eq!(site.run(&[]).wait().code(), Some(74), "{object}");
    }
    let site = Site::new();
    site.sql("CREATE INDEX harmless ON outbox(traceparent)");
    site.drain();
}

/// A second signal ends the process also while a look at the database takes for ever; and a removed WAL is
/// noticed before anything more is planned.
#[test]
fn a_removed_wal_ends_the_process() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let daemon = site.start();
    site.webhook("w", "s", 1, "billing");
    server.wait_for(1);
    site.wait_for_state("w", "delivered");
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(site.dir.path().join(format!("app.db{suffix}"))).unwrap();
    }
    let log = std::sync::Arc::clone(&daemon.log);
    assert_eq!(daemon.wait().code(), Some(74));
    assert!(log.lock().unwrap().contains("-wal was removed"));
}

/// Suspects of a destination that is gone hold up neither healthy commands nor other suspects.
#[test]
fn many_suspects_of_a_missing_destination_hold_nobody_up() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    for n in 0..80 {
        site.webhook(&format!("gone{n}"), &format!("g{n}"), 1, "gone");
    }
    site.webhook("suspect", "s", 1, "billing");
    site.webhook("healthy", "h", 1, "billing");
    site.sql("UPDATE outbox_state SET found_row = 2, found_open = 2 WHERE scope <> 'h'");
    site.drain();
    assert_eq!(
        (site.status("suspect").state.as_str(), site.status("healthy").state.as_str()),
        ("delivered", "delivered")
    );
}

/// `show` says why a command ended without an attempt, and `config check` finds what `run` would refuse.
#[test]
fn an_operator_is_told_why() {
    let site = Site::new();
    site.configure(&webhook("billing", "http://127.0.0.1:1/", ""));
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, headers, payload)
         VALUES ('dd', 'dd', 1, 'webhook', 'billing', '{\"Host\":\"x\"}', '{}')",
    );
    site.drain();
    let show = site.command("show").arg("dd").output().unwrap();
    assert!(String::from_utf8_lossy(&show.stdout).contains("reserved"), "{}", String::from_utf8_lossy(&show.stdout));
    site.configure(&webhook("billing", "https://billing.example.com/", "ca_file = \"nope.pem\""));
    let check = site.command("config").arg("check").output().unwrap();
    assert_eq!(check.status.code(), Some(78), "{}", String::from_utf8_lossy(&check.stdout));
    assert_eq!(site.run(&["--drain"]).wait().code(), Some(78));
}

/// Two signals end the process at once, whatever it is busy with.
#[test]
fn two_signals_end_a_busy_process() {
    let (_gate, server) = Server::held();
    let site = Site::new();
    site.configure(&format!("[dispatcher]\ndrain_timeout = \"1h\"\n{}", webhook("billing", &server.url(), "")));
    site.webhook("w", "s", 1, "billing");
    let daemon = site.start();
    server.wait_for(1);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping");
    daemon.signal(Signal::INT);
    assert_eq!(daemon.wait().code(), Some(143));
    wait_until("the connection is gone", 10, || server.open_connections() == 0);
}
