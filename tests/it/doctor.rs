//! `fencepost doctor`: what is wrong around a database, by name and with its cure.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::daemon::{BINARY, Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

struct Examined {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Examined {
    fn of(site: &Site) -> Self {
        let ran = site.command("doctor").arg("--json").output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        let value: Value =
            serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{}", String::from_utf8_lossy(&ran.stderr)));
        assert_eq!(value["ok"].as_bool(), Some(ran.status.code() == Some(0)));
        Self { code: ran.status.code(), findings: value["findings"].as_array().unwrap().clone() }
    }

    fn all(&self, topic: &str) -> Vec<&Value> {
        self.findings.iter().filter(|finding| finding["topic"] == topic).collect()
    }

    fn one(&self, topic: &str) -> (&str, &str, Vec<u64>) {
        let found = self.all(topic);
        let finding = found.first().unwrap_or_else(|| panic!("nothing about {topic}"));
        let pids = finding["pids"].as_array().unwrap().iter().map(|pid| pid.as_u64().unwrap()).collect();
        (finding["level"].as_str().unwrap(), finding["says"].as_str().unwrap(), pids)
    }
}

/// A worker in Python, which is killed when the test is over.
struct Worker {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(site: &Site, what: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/stopped.py");
        let mut command = Command::new("python3");
        command.arg("-B").arg(script).arg(site.db()).arg(what).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut worker = Self { child, lines };
        assert_eq!(worker.line(), "inside");
        worker
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn pid(&self) -> u64 {
        u64::from(self.child.id())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap(), signal).unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // One that has ended already can't be killed, and that is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A site with a business table, whose dispatcher doesn't wait long for a lock.
fn shop(server: &Server) -> Site {
    let site = Site::new();
    site.configure(&format!("{}\n[dispatcher]\nbusy_timeout = \"100ms\"\n", webhook("billing", &server.url(), "")));
    site.sql("CREATE TABLE orders(paid INTEGER NOT NULL); INSERT INTO orders VALUES (0)");
    site
}

fn acquire(site: &Site) -> Result<i64, String> {
    let connection = site.connect();
    connection.busy_timeout(std::time::Duration::ZERO).unwrap();
    let sql = "INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('s', 'w2', 60000)";
    connection.execute(sql, []).map_err(|error| error.to_string())?;
    Ok(site.value("SELECT token FROM outbox_lease WHERE scope = 's' AND holder = 'w2'"))
}

/// A worker is stopped inside its write transaction while two sends are in flight: doctor names it, nothing
/// is begun, and the two outcomes are kept. Then `end` lets the lock go.
fn h82(end: impl FnOnce(&Site, &mut Worker)) {
    let (gate, server) = Server::held();
    let site = shop(&server);
    for (id, scope) in [("first", "a"), ("second", "b"), ("next", "a")] {
        site.webhook(id, scope, 1, "billing");
    }
    let daemon = site.start();
    server.wait_for(2);
    let mut worker = Worker::start(&site, "writes");
    wait_until("doctor names who stops everybody", 30, || {
        let examined = Examined::of(&site);
        let (level, says, pids) = examined.one("write lock");
        assert_eq!(pids, [worker.pid()], "{says}");
        level == "breach" && says.contains("python3") && says.contains("stopped") && examined.code == Some(1)
    });
    let said = String::from_utf8(site.command("doctor").output().unwrap().stdout).unwrap();
    assert!(said.contains(&format!("kill -CONT {}", worker.pid())), "{said}");
    assert_eq!(acquire(&site).unwrap_err(), "database is locked");
    gate.open();
    wait_until("both outcomes are known and kept", 30, || {
        daemon.log().matches("the outcome is known and can't be recorded yet").count() >= 2
    });
    assert_eq!(server.requests().len(), 2, "nothing is begun");
    end(&site, &mut worker);
    for id in ["first", "second", "next"] {
        let status = site.wait_for_state(id, "delivered");
        assert_eq!(status.attempt_no, 1, "{id}: its outcome was kept");
    }
    assert_eq!(server.requests().len(), 3);
    assert_eq!(Examined::of(&site).one("write lock").0, "ok");
    daemon.stop();
}

#[test]
fn h82_a_stopped_writer_goes_on() {
    h82(|site, worker| {
        worker.signal(Signal::CONT);
        assert_eq!(worker.line(), "committed", "its token was still the current one");
        wait_until("the next holder acquires", 30, || acquire(site) == Ok(2));
        let inherited: String = site.value("SELECT id FROM outbox_backlog WHERE scope = 's'");
        assert_eq!((inherited.as_str(), site.value::<i64>("SELECT paid FROM orders")), ("inherited", 1));
    });
}

#[test]
fn h82_a_stopped_writer_is_killed() {
    h82(|site, worker| {
        worker.signal(Signal::KILL);
        wait_until("the next holder acquires", 30, || acquire(site) == Ok(2));
        let commands: i64 = site.value("SELECT count(*) FROM outbox WHERE scope = 's'");
        assert_eq!((commands, site.value::<i64>("SELECT paid FROM orders")), (0, 0), "its transaction is undone");
    });
}

#[test]
fn h82_a_stopped_reader_stops_nobody() {
    let server = Server::start(|_| Reply::status(200));
    let site = shop(&server);
    let mut worker = Worker::start(&site, "reads");
    assert_eq!(Examined::of(&site).one("write lock").0, "ok");
    assert_eq!(acquire(&site), Ok(2));
    worker.signal(Signal::CONT);
    assert_eq!(worker.line(), "write: database is locked");
    assert_eq!(worker.line(), "again: database is locked");
    let fenced = worker.line();
    assert!(fenced.starts_with("anew: FP001"), "{fenced}");
    site.drain();
    assert_eq!(server.requests().len(), 0);
    assert_eq!(site.value::<i64>("SELECT paid FROM orders"), 0);
}

/// Nothing wrong: everything is told, and the answer is 0. A dispatcher that is stopped is a breach.
#[test]
fn a_healthy_site_and_a_stopped_dispatcher() {
    let server = Server::start(|_| Reply::status(200));
    let site = shop(&server);
    let examined = Examined::of(&site);
    assert_eq!(examined.code, Some(0), "{:#?}", examined.findings);
    for topic in ["file system", "names", "disk space", "write lock", "wal", "schema", "journal mode", "clock"] {
        assert_eq!(examined.one(topic).0, "ok", "{topic}: {:?}", examined.one(topic));
    }
    assert!(examined.one("dispatcher").1.contains("none runs"));
    let lock = site.dir.path().join("app.db.dispatcher.lock");
    std::fs::write(&lock, "pid 1 on elsewhere\n").unwrap();
    assert!(Examined::of(&site).one("dispatcher").1.contains("none runs"), "the lock decides, not the file");
    let daemon = site.start();
    let examined = Examined::of(&site);
    let pid = u64::from(daemon.pid());
    assert_eq!((examined.one("dispatcher").0, examined.one("dispatcher").2), ("ok", vec![pid]));
    // From a container that doesn't see the process, the lock itself tells.
    let mut apart = Command::new("unshare");
    apart.args(["-rpf", "--mount-proc", BINARY, "doctor", "--db"]).arg(site.db());
    let said = String::from_utf8(apart.output().unwrap().stdout).unwrap();
    assert!(
        said.contains(&format!("one runs that can't be seen from here; its lock file says: pid {pid} on")),
        "{said}"
    );
    daemon.signal(Signal::STOP);
    wait_until("doctor says that it is stopped", 30, || {
        let examined = Examined::of(&site);
        examined.code == Some(1) && examined.one("dispatcher").0 == "breach" && examined.one("dispatcher").2 == [pid]
    });
    daemon.signal(Signal::CONT);
    daemon.stop();
    let again = site.start();
    again.stop();
}

/// H17 in its visible part: a long reader keeps the WAL large, and is named.
#[test]
fn a_reader_that_keeps_the_wal_is_named() {
    let site = Site::new();
    let reader = site.connect();
    reader.execute_batch("BEGIN").unwrap();
    let _: i64 = reader.query_row("SELECT count(*) FROM outbox", [], |row| row.get(0)).unwrap();
    site.sql("CREATE TABLE bulk(b BLOB); INSERT INTO bulk VALUES (zeroblob(20000000))");
    let examined = Examined::of(&site);
    let (level, says, pids) = examined.one("wal");
    assert_eq!((level, pids), ("warning", vec![u64::from(std::process::id())]), "{says}");
    assert!(says.contains("read transaction") && examined.code == Some(0), "{says}");
    reader.execute_batch("COMMIT").unwrap();
    let examined = Examined::of(&site);
    assert!(examined.one("wal").1.contains("no reader keeps it"), "{:?}", examined.one("wal"));
    site.sql("PRAGMA user_version = 1");
    reader.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    assert_eq!(Examined::of(&site).one("wal").0, "ok");
}

/// What the database says: a clock that was ahead, a destination that nobody knows, refusals, guards.
#[test]
fn what_the_database_says_is_told() {
    let server = Server::start(|_| Reply::status(200));
    let site = shop(&server);
    site.webhook("lost", "s", 1, "nowhere");
    site.sql(
        "INSERT INTO outbox_refusal VALUES ('s', 10, 5000, 10, CAST(unixepoch() * 1000 AS INTEGER));
         INSERT INTO outbox_refusal VALUES ('t', 4, 5, 1, CAST(unixepoch() * 1000 AS INTEGER));
         UPDATE outbox_state SET set_ms = set_ms + 86400000, due_ms = due_ms + 86400000",
    );
    let examined = Examined::of(&site);
    assert_eq!(examined.code, Some(0), "{:#?}", examined.findings);
    assert_eq!(examined.one("clock").0, "warning");
    let (level, says, _) = examined.one("destinations");
    assert!(level == "warning" && says.contains("webhook nowhere"), "{says}");
    let refused = examined.all("refused workers");
    let loud = refused.first().unwrap();
    assert_eq!(loud["level"], "warning");
    assert!(loud["says"].as_str().unwrap().contains("sustained refusals, scope s, watermark 5000, seen 10"), "{loud}");
    assert_eq!(refused.len(), 3);
    let status = String::from_utf8(site.command("status").output().unwrap().stdout).unwrap();
    assert!(status.contains("sustained refusals, scope s, watermark 5000, seen 10"), "{status}");
    site.connect().execute_batch("DROP TRIGGER outbox_admit").unwrap();
    let examined = Examined::of(&site);
    let (level, says, _) = examined.one("schema");
    assert!(level == "breach" && says.contains("outbox_admit (missing)") && examined.code == Some(1), "{says}");
}

#[test]
fn a_second_name_of_the_file_is_a_breach() {
    let site = Site::new();
    std::fs::hard_link(site.db(), site.dir.path().join("other.db")).unwrap();
    let examined = Examined::of(&site);
    let (level, says, _) = examined.one("names");
    assert!(level == "breach" && says.contains("2 names") && examined.code == Some(1), "{says}");
}
