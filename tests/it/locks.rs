//! One dispatcher on one database file, whatever names and places it has.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::daemon::{BINARY, Daemon, Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

fn exit_code(daemon: Daemon) -> (Option<i32>, String) {
    let log = Arc::clone(&daemon.log);
    let status = daemon.wait();
    let log = log.lock().unwrap().clone();
    (status.code(), log)
}

/// H53: at no time do two dispatchers send; the second says who holds the lock, or waits its turn.
#[test]
fn h53_two_dispatchers_during_a_roll_out() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let commands: String = (0..1000)
        .map(|n| {
            format!("INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('w{n}', 's{}', 1, 'webhook', 'billing', '{{}}');", n % 50)
        })
        .collect();
    site.sql(&commands);
    let first = site.start();
    server.wait_for(50);
    // A newer version's addition doesn't disturb the older one.
    site.sql("CREATE TABLE outbox_later(n INTEGER PRIMARY KEY) STRICT; UPDATE outbox_meta SET minor = minor + 1");
    let (code, log) = exit_code(site.run(&[]));
    assert_eq!(code, Some(75));
    assert!(log.contains(&format!("pid {}", first.pid())), "{log}");
    let waiting = site.run(&["--wait"]);
    waiting.wait_for_log("waiting for the dispatcher");
    server.wait_for(200);
    assert!(!waiting.log().contains("dispatching"));
    first.stop();
    let stopped = Instant::now();
    waiting.wait_for_log("dispatching");
    assert!(stopped.elapsed() < Duration::from_secs(5), "{:?}", stopped.elapsed());
    wait_until("all are delivered", 60, || {
        site.value::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'delivered'") == 1000
    });
    waiting.stop();
    assert_eq!(server.requests().len(), 1000, "each arrived once");
    assert_eq!(site.value::<i64>("SELECT epoch FROM outbox_dispatcher"), 2, "the refused one wrote nothing");
}

/// H53, the lock decides and not what stands in the lock file.
#[test]
fn h53_a_stale_lock_file_means_nothing() {
    let site = Site::new();
    let lock = site.dir.path().join("app.db.dispatcher.lock");
    std::fs::write(&lock, "pid 1 on elsewhere, fencepost 0.0.1\n").unwrap();
    let first = site.start();
    // A lie in the file is no reason to ignore a live lock, and neither is its absence.
    std::fs::write(&lock, "").unwrap();
    assert_eq!(exit_code(site.run(&[])).0, Some(75));
    std::fs::remove_file(&lock).unwrap();
    assert_eq!(exit_code(site.run(&[])).0, Some(75));
    first.kill();
    site.drain();
}

/// H53: D1 is killed while D2 waits.
#[test]
fn h53_a_killed_dispatcher_is_followed_at_once() {
    let (gate, server) = Server::held();
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("w", "s", 1, "billing");
    let first = site.start();
    server.wait_for(1);
    let second = site.run(&["--wait"]);
    second.wait_for_log("waiting for the dispatcher");
    first.kill();
    second.wait_for_log("dispatching");
    gate.open();
    site.wait_for_state("w", "delivered");
    second.stop();
    assert_eq!(server.requests().len(), 2, "unknown, by its policy");
}

/// Many at once: one gets it, in every round.
#[test]
fn of_many_starts_at_once_one_gets_the_lock() {
    let site = Site::new();
    site.configure(&webhook("billing", "http://127.0.0.1:1/", ""));
    for _ in 0..5 {
        let starts: Vec<Daemon> = (0..6).map(|_| site.run(&[])).collect();
        let dispatching = AtomicUsize::new(0);
        wait_until("one dispatches and five have ended", 30, || {
            let up = starts.iter().filter(|daemon| daemon.log().contains("dispatching")).count();
            let refused = starts.iter().filter(|daemon| daemon.log().contains("runs on this database already")).count();
            dispatching.store(up, Ordering::SeqCst);
            assert!(up <= 1);
            up == 1 && refused == 5
        });
        for daemon in starts {
            daemon.kill();
        }
    }
}

fn in_namespace(script: &str) -> std::process::Output {
    Command::new("unshare").args(["-rm", "bash", "-euc", script]).stdin(Stdio::null()).output().unwrap()
}

/// H70: the same file bind-mounted into another folder has another lock file and another WAL; the lock
/// on the file itself refuses the second dispatcher.
#[test]
fn h70_a_bind_mounted_database_is_the_same_database() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().display();
    let script = format!(
        r#"
        cd {path}; mkdir a b; {BINARY} --db a/app.db init >/dev/null; touch b/app.db
        mount --bind a/app.db b/app.db
        {BINARY} --db a/app.db run 2>d1.log & D1=$!
        trap 'kill -9 $D1 2>/dev/null || true' EXIT
        until grep -q dispatching d1.log; do read -rt 0.02 <> <(:) || true; done
        before=$(sha256sum < a/app.db)
        code=0; {BINARY} --db b/app.db run 2>d2.log || code=$?; echo "second: $code"
        ls b
        rm a/app.db.dispatcher.lock
        code=0; {BINARY} --db a/app.db run 2>d3.log || code=$?; echo "without its lock file: $code"
        test "$before" = "$(sha256sum < a/app.db)" && echo "no write"
        {BINARY} --db b/app.db run --wait 2>d4.log & D4=$!
        until grep -q waiting d4.log; do read -rt 0.02 <> <(:) || true; done
        # SQLite's own locks of D1 still hold: a transaction that is open keeps a third process out.
        python3 - <<'PY'
import sqlite3
one = sqlite3.connect('a/app.db', isolation_level=None, timeout=0)
two = sqlite3.connect('a/app.db', isolation_level=None, timeout=0)
one.execute('BEGIN IMMEDIATE')
try:
    two.execute('BEGIN IMMEDIATE'); print('both write')
except sqlite3.OperationalError as error:
    print('locks:', error)
one.execute('ROLLBACK')
PY
        kill -0 $D1 && echo "first runs on"
        kill -9 $D4
        kill -9 $D1; wait $D1 2>/dev/null || true
        rm -f b/app.db-wal b/app.db-shm
        {BINARY} --db a/app.db run --drain 2>d5.log && echo "nothing stays locked"
        "#
    );
    let output = in_namespace(&script);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}\n{wrong}");
    for line in [
        "second: 75",
        "without its lock file: 75",
        "no write",
        "locks: database is locked",
        "first runs on",
        "nothing stays locked",
    ] {
        assert!(text.contains(line), "{line}: {text}\n{wrong}");
    }
    assert!(!text.contains("app.db-wal"), "the second opened nothing: {text}");
}

/// Hard links give a database two names, so two WALs: refused before anything is written.
#[test]
fn a_database_with_two_names_is_refused() {
    let site = Site::new();
    std::fs::hard_link(site.db(), site.dir.path().join("other.db")).unwrap();
    let (code, log) = exit_code(site.run(&[]));
    assert_eq!(code, Some(78));
    assert!(log.contains("hard links"), "{log}");
}

/// A symbolic link is another name for the same path: the lock is the same.
#[test]
fn a_symbolic_link_leads_to_the_same_lock() {
    let site = Site::new();
    let link = site.dir.path().join("link.db");
    std::os::unix::fs::symlink(site.db(), &link).unwrap();
    let first = site.start();
    let mut command = Command::new(BINARY);
    command.arg("--db").arg(&link).arg("run");
    assert_eq!(exit_code(Daemon::spawn(command)).0, Some(75));
    first.stop();
}

/// A database that was replaced under the dispatcher ends it before it plans anything more.
#[test]
fn a_replaced_database_ends_the_process() {
    let site = Site::new();
    let daemon = site.start();
    let copy = site.dir.path().join("copy.db");
    std::fs::copy(site.db(), &copy).unwrap();
    std::fs::rename(&copy, site.db()).unwrap();
    let (code, log) = exit_code(daemon);
    assert_eq!(code, Some(74), "{log}");
    assert!(log.contains("replaced"), "{log}");
}

/// No database, no outbox, a foreign `outbox`: each says what to do, and nothing is written (H69).
#[test]
fn h69_run_refuses_what_is_not_an_outbox() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str| {
        let mut command = Command::new(BINARY);
        command.arg("--db").arg(dir.path().join(name)).arg("run");
        exit_code(Daemon::spawn(command))
    };
    let (code, log) = run("missing.db");
    assert_eq!(code, Some(69), "{log}");
    for (name, statement, exit, names) in [
        ("empty.db", "CREATE TABLE orders(id INTEGER PRIMARY KEY)", 69, "init"),
        ("table.db", "CREATE TABLE outbox(id INTEGER PRIMARY KEY, topic TEXT, body TEXT)", 65, "table outbox"),
        ("view.db", "CREATE VIEW outbox AS SELECT 1", 65, "view outbox"),
        ("scope.db", "CREATE TABLE outbox_scope(a)", 65, "table outbox_scope"),
    ] {
        let path = dir.path().join(name);
        rusqlite::Connection::open(&path).unwrap().execute_batch(statement).unwrap();
        let before = std::fs::read(&path).unwrap();
        let (code, log) = run(name);
        assert_eq!(code, Some(exit), "{name}: {log}");
        assert!(log.contains(names), "{name}: {log}");
        assert_eq!(std::fs::read(&path).unwrap(), before, "{name}");
    }
}

/// The dispatcher's own objects: dropped or changed under it, it stops.
#[test]
fn a_dropped_trigger_stops_the_dispatcher() {
    let site = Site::new();
    let daemon = site.start();
    site.sql("DROP TRIGGER outbox_admit");
    let (code, log) = exit_code(daemon);
    assert_eq!(code, Some(74), "{log}");
    assert!(log.contains("outbox_admit"), "{log}");
    let (code, log) = exit_code(site.run(&[]));
    assert_eq!(code, Some(74), "{log}");
}

/// A drain that can't begin what is due, because the database stays locked, does not call itself done.
#[test]
fn a_drain_that_cannot_write_ends_with_75() {
    let site = Site::new();
    site.configure(&format!(
        "[dispatcher]\nbusy_timeout = \"200ms\"\n{}",
        webhook("billing", "http://127.0.0.1:1/", "")
    ));
    site.webhook("w", "s", 1, "billing");
    let fault = site.dir.path().join("hold");
    std::fs::write(&fault, "").unwrap();
    // The lock is taken between the start, which writes, and the first begin.
    let daemon = site.run_with(
        &["--drain"],
        &[("FENCEPOST_FAULT", "reigning:*:pause"), ("FENCEPOST_FAULT_FILE", fault.to_str().unwrap())],
    );
    daemon.wait_for_log("dispatching");
    let locker = site.connect();
    locker.execute_batch("BEGIN IMMEDIATE").unwrap();
    std::fs::remove_file(&fault).unwrap();
    let (code, log) = exit_code(daemon);
    assert_eq!(code, Some(75), "{log}");
    locker.execute_batch("ROLLBACK").unwrap();
    assert_eq!(site.status("w").attempt_no, 0);
}
