//! Clocks, waking and odd bytes with the real daemon: what a suspend, a clock that was set, lost
//! notifications and strange contents may not do. The clocks of a daemon are moved through a file, since
//! nothing outside the process could move them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::daemon::{BINARY, Daemon, Site, relay, touch, webhook};
use crate::support::http::{Gate, Reply, Server};
use crate::support::{smtp, wait_until};

const MINUTE_MS: i64 = 60_000;
const HOUR_MS: i64 = 60 * MINUTE_MS;
const DAY_MS: i64 = 24 * HOUR_MS;

/// The clocks of a site's daemons.
struct Clocks(PathBuf);

impl Clocks {
    fn new(site: &Site) -> Self {
        let clocks = Self(site.dir.path().join("clock"));
        clocks.set(0, 0);
        clocks
    }

    /// What is added to the wall clock and to the boot-time clock; a look sees both or neither.
    fn set(&self, wall_ms: i64, boot_ms: i64) {
        let next = self.0.with_extension("next");
        std::fs::write(&next, format!("{wall_ms} {boot_ms}")).unwrap();
        std::fs::rename(next, &self.0).unwrap();
    }

    fn start(&self, site: &Site) -> Daemon {
        let daemon = site.run_with(&[], &[("FENCEPOST_FAULT_CLOCK", self.0.to_str().unwrap())]);
        daemon.wait_for_log("dispatching");
        daemon
    }
}

/// A time of the test's own clock from now on, for SQL.
fn from_now(ms: i64) -> String {
    format!("(CAST(strftime('%s','now') AS INTEGER) * 1000 + {ms})")
}

/// Answers the first attempt of `retry` with "in five minutes", everything else with success.
fn five_minutes_later() -> Server {
    Server::start(|request| {
        let first = request.header("webhook-id") == Some("retry") && request.header("Fencepost-Attempt") == Some("1");
        if first { Reply::status(429).header("Retry-After", "300") } else { Reply::status(200) }
    })
}

/// Shows that the daemon has looked since the clocks were set: what is inserted now is sent.
fn looked(site: &Site, id: &str) {
    site.webhook(id, id, 1, "billing");
    site.wait_for_state(id, "delivered");
}

// ── H04 ─────────────────────────────────────────────────────────────────────────────────────────────

/// H04: commands go by seq, whatever the clocks of their writers said. Token 3 was written by a host
/// whose clock is an hour ahead, token 4 by one whose clock is right.
#[test]
fn h04_order_is_seq_and_never_a_clock() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("fast", "s", 3, "billing");
    site.webhook("right", "s", 4, "billing");
    site.sql(&format!(
        "UPDATE outbox_state SET due_ms = due_ms + {HOUR_MS}, set_ms = set_ms + {HOUR_MS} WHERE seq = 1"
    ));
    site.drain();
    let order: Vec<_> = server.requests().iter().map(|r| r.header("webhook-id").unwrap().to_owned()).collect();
    assert_eq!(order, ["fast", "right"]);
}

// ── H22 ─────────────────────────────────────────────────────────────────────────────────────────────

/// The daemon also looks by itself every second, so what takes half of that was found by something else.
const SOONER_THAN_A_LOOK: Duration = Duration::from_millis(500);

/// Inserts nine commands, each right after the one before has arrived, and gives the median time from
/// the insert to the arrival. A median, since one slow moment of a busy machine says nothing.
fn median_pick_up(server: &Server, mut insert: impl FnMut(usize)) -> Duration {
    let before = server.requests().len();
    let mut times: Vec<Duration> = (1..=9)
        .map(|n| {
            let begun = Instant::now();
            insert(n);
            server.wait_for(before + n)[before + n - 1].at.saturating_duration_since(begun)
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

fn waking(poll_interval: &str) -> (Site, Server) {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    let billing = webhook("billing", &server.url(), "");
    site.configure(&format!("[dispatcher]\npoll_interval = \"{poll_interval}\"\n{billing}"));
    (site, server)
}

/// H22 (a): as shipped, notifications alone wake the daemon; the poll is far too slow to do it.
#[test]
fn h22_a_a_notification_wakes() {
    let (site, server) = waking("30s");
    let daemon = site.start();
    let median = median_pick_up(&server, |n| site.webhook(&format!("w{n}"), "s", 1, "billing"));
    assert!(median < SOONER_THAN_A_LOOK, "{median:?}");
    daemon.stop();
}

/// H22 (b): without inotify the poll alone wakes it, and the log says so once.
#[test]
fn h22_b_without_notifications_the_poll_wakes() {
    let (site, server) = waking("50ms");
    let daemon = site.run_with(&[], &[("FENCEPOST_FAULT_WATCH", "none")]);
    daemon.wait_for_log("dispatching");
    let median = median_pick_up(&server, |n| site.webhook(&format!("w{n}"), "s", 1, "billing"));
    assert!(median < SOONER_THAN_A_LOOK, "{median:?}");
    // The watch was tried again meanwhile, more than once.
    let begun = Instant::now();
    for n in 10.. {
        site.webhook(&format!("w{n}"), "s", 1, "billing");
        server.wait_for(n);
        if begun.elapsed() > Duration::from_millis(2_500) {
            break;
        }
    }
    let log = daemon.log();
    assert_eq!(log.matches("no notifications of other processes' commits").count(), 1, "{log}");
    daemon.stop();
}

/// H22 (c): the event that would have told of a commit tells of a lost watch instead. The command is
/// found all the same, the watch is set up anew, and afterwards notifications wake as before.
#[test]
fn h22_c_a_lost_watch_is_set_up_again() {
    let (site, server) = waking("30s");
    let lost = site.dir.path().join("lost");
    let daemon = site.run_with(&["-v"], &[("FENCEPOST_FAULT_WATCH", lost.to_str().unwrap())]);
    daemon.wait_for_log("dispatching");
    let watches = |count| {
        wait_until(&format!("watch {count} is set up"), 30, || {
            daemon.log().matches("watching for other processes' commits").count() >= count
        });
    };
    for n in 1..=3 {
        watches(n);
        touch(&lost);
        site.webhook(&format!("l{n}"), "s", 1, "billing");
        server.wait_for(n);
        wait_until("the watch was lost", 30, || !lost.exists());
    }
    watches(4);
    assert_eq!(daemon.log().matches("the watch was lost").count(), 3, "{}", daemon.log());
    let median = median_pick_up(&server, |n| site.webhook(&format!("w{n}"), "s", 1, "billing"));
    assert!(median < SOONER_THAN_A_LOOK, "{median:?}");
    daemon.stop();
}

/// H22 (d): the writer is plain SQL from Python in a mount namespace of its own, as in another
/// container, and reaches the same folder by another path.
#[test]
fn h22_d_a_writer_in_another_container_wakes() {
    let (site, server) = waking("100ms");
    let daemon = site.start();
    let mount = site.dir.path().join("elsewhere");
    std::fs::create_dir(&mount).unwrap();
    let mut writer = Command::new("unshare")
        .args(["-rm", "bash", "-euc", r#"mount --bind "$1" "$2"; exec python3 -uc "$3" "$2/app.db""#, "writer"])
        .args([site.dir.path(), &mount, Path::new(PYTHON_WRITER)])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut names = writer.stdin.take().unwrap();
    let median = median_pick_up(&server, |n| {
        std::io::Write::write_all(&mut names, format!("w{n}\n").as_bytes()).unwrap();
    });
    drop(names);
    assert!(writer.wait().unwrap().success());
    assert!(median < SOONER_THAN_A_LOOK, "{median:?}");
    daemon.stop();
}

/// Inserts a command for each line that it reads. It knows nothing of the daemon.
const PYTHON_WRITER: &str = "
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
for line in sys.stdin:
    db.execute(\"INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES (?, 's', 1, 'webhook', 'billing', '{}')\", [line.strip()])
";

// ── H54 ─────────────────────────────────────────────────────────────────────────────────────────────

/// What stands before the machine stops: a retry in five minutes, something due in half an hour,
/// something due then and over in an hour, a webhook and a mail in flight, an old lease.
struct BeforeSuspend {
    site: Site,
    clocks: Clocks,
    server: Server,
    slow: Server,
    answer: Gate,
    relay: smtp::Server,
}

impl BeforeSuspend {
    fn new() -> Self {
        let answer = Gate::new();
        let held = answer.clone();
        let slow = Server::start(move |_| Reply::status(200).held_by(&held));
        let relay_server = smtp::Server::start(smtp::Script::new().dots([smtp::Dot::Silent]));
        let server = five_minutes_later();
        let site = Site::new();
        // One place only: what may not go on must not stand in the way of what may.
        site.configure(&format!(
            "{}{}{}",
            webhook("billing", &server.url(), "max_in_flight = 1"),
            webhook("slow", &slow.url(), "on_unknown = \"hold\""),
            relay("main", relay_server.port(), ""),
        ));
        site.webhook("retry", "r", 1, "billing");
        site.webhook("flying", "f", 1, "slow");
        site.email("mail", "m", 1, "main");
        // What may not go on is due first, and would be asked first.
        let (first, soon, later) = (from_now(HOUR_MS / 3), from_now(HOUR_MS / 2), from_now(HOUR_MS));
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload, not_before_ms, expires_at_ms) VALUES
             ('expiring', 'e', 1, 'webhook', 'billing', '{{}}', {first}, {later}),
             ('due', 'd', 1, 'webhook', 'billing', '{{}}', {soon}, NULL);
             INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('leased', 'ann', 1)"
        ));
        let clocks = Clocks::new(&site);
        Self { site, clocks, server, slow, answer, relay: relay_server }
    }

    /// Runs a daemon to this point, stops it, moves the clocks and lets it go on.
    fn suspend(&self, wall_ms: i64, boot_ms: i64) -> Daemon {
        let daemon = self.clocks.start(&self.site);
        self.site.wait_for_first_attempt("retry", "pending");
        self.slow.wait_for(1);
        wait_until("the mail waits for its last answer", 30, || self.relay.mails().len() == 1);
        daemon.signal(Signal::STOP);
        self.clocks.set(wall_ms, boot_ms);
        // The lock is held by whoever is stopped, so nobody else begins anything.
        let second = Command::new(BINARY).arg("--db").arg(self.site.db()).arg("run").output().unwrap();
        assert_eq!(second.status.code(), Some(75), "{second:?}");
        daemon.signal(Signal::CONT);
        daemon
    }

    fn the_overdue_runs(&self) {
        self.site.wait_for_state("retry", "delivered");
        self.site.wait_for_state("due", "delivered");
    }

    /// The lease has run out and is free, yet its token is good until somebody takes the scope.
    fn the_lease_is_free_and_its_token_good(&self) {
        self.site.webhook("old-holder", "leased", 1, "billing");
        self.site.sql("INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('leased', 'ben', 60000)");
        let stale = self.site.connect().execute_batch(
            "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('leased', 1, 'webhook', 'billing', '{}')",
        );
        assert!(stale.unwrap_err().to_string().contains("FP001"));
    }
}

/// H54, a machine that was stopped and whose clock was moved: due times are looked at soon, an expiry
/// isn't believed until the clock was steady for a minute, and what is in flight ends as it ends.
#[test]
fn h54_the_clock_jumps_forward() {
    let before = BeforeSuspend::new();
    let BeforeSuspend { site, clocks, server, answer, .. } = &before;
    let daemon = before.suspend(2 * HOUR_MS, 0);
    before.the_overdue_runs();
    before.the_lease_is_free_and_its_token_good();
    looked(site, "after-the-jump");
    assert_eq!((site.status("expiring").state.as_str(), site.status("expiring").attempt_no), ("pending", 0));
    // Not even a second before the minute is over.
    clocks.set(2 * HOUR_MS + 40_000, 40_000);
    looked(site, "not-yet-steady");
    assert_eq!((site.status("expiring").state.as_str(), site.status("expiring").attempt_no), ("pending", 0));
    clocks.set(2 * HOUR_MS + MINUTE_MS, MINUTE_MS);
    site.wait_for_state("expiring", "dead/expired");
    assert_eq!(site.state("expiring").1, "none");
    answer.open();
    let log = daemon.log();
    assert_eq!(log.matches("the clock jumped forward").count(), 1, "{log}");
    daemon.kill();
    let sent = server.requests();
    assert!(sent.iter().all(|request| request.header("webhook-id") != Some("expiring")), "{sent:?}");
}

/// H54, a machine that slept: the boot-time clock has counted it, so nothing has jumped. Deadlines of
/// attempts have passed, and what is in flight is unknown, never "not sent".
#[test]
fn h54_the_machine_sleeps() {
    let before = BeforeSuspend::new();
    let site = &before.site;
    let daemon = before.suspend(2 * HOUR_MS, 2 * HOUR_MS);
    before.the_overdue_runs();
    before.the_lease_is_free_and_its_token_good();
    site.wait_for_state("expiring", "dead/expired");
    for id in ["flying", "mail"] {
        let ended = site.wait_for_state(id, "in_doubt");
        assert_eq!((ended.effect.as_str(), ended.attempt_no), ("possible", 1), "{}", site.evidence(id));
        assert!(site.evidence(id).contains("timeout"), "{}", site.evidence(id));
    }
    assert!(!daemon.log().contains("the clock jumped"), "{}", daemon.log());
    daemon.stop();
}

/// H54: what was in flight when the clock jumped is awaited, and its answer counts.
#[test]
fn h54_an_answer_after_the_jump_counts() {
    let before = BeforeSuspend::new();
    let daemon = before.suspend(2 * HOUR_MS, 0);
    before.the_overdue_runs();
    before.answer.open();
    let flying = before.site.wait_for_state("flying", "delivered");
    assert_eq!((flying.attempt_no, before.slow.requests().len()), (1, 1));
    daemon.kill();
}

/// H54: the clock is set back by a day, under a daemon that runs and between two of them. A retry in
/// five minutes doesn't wait for a day and five minutes.
#[test]
fn h54_the_clock_is_set_back() {
    for running in [true, false] {
        let server = five_minutes_later();
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        let clocks = Clocks::new(&site);
        clocks.set(DAY_MS, 0);
        site.webhook("retry", "r", 1, "billing");
        let daemon = clocks.start(&site);
        site.wait_for_first_attempt("retry", "pending");
        let daemon = if running {
            clocks.set(0, 0);
            daemon
        } else {
            daemon.stop();
            clocks.set(0, 0);
            clocks.start(&site)
        };
        let retry = site.wait_for_state("retry", "delivered");
        assert_eq!(retry.attempt_no, 2);
        daemon.stop();
    }
}

// ── H26 ─────────────────────────────────────────────────────────────────────────────────────────────

/// H26 (a)(a2): NUL characters and lone surrogates arrive as they were written, and every byte counts.
#[test]
fn h26_odd_bytes_arrive_unchanged() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let json: &[u8] = b"{\"name\":\"before\\u0000after\",\"tail\":\"\\ud83d\\ude00\",\"lone\":\"\\ud800\"}\n";
    let insert = "INSERT INTO outbox(id, scope, token, kind, destination, payload, payload_bytes)
        VALUES (?1, ?1, 1, 'webhook', 'billing', ?2, ?3)";
    let connection = site.connect();
    let text = std::str::from_utf8(json).unwrap();
    connection.execute(insert, rusqlite::params!["json", text, None::<&[u8]>]).unwrap();
    connection.execute(insert, rusqlite::params!["bytes", None::<&str>, b"ab\0cdef"]).unwrap();
    let nul = insert.replace("?2", "'ab' || char(0) || 'cdef'");
    connection.execute(&nul, rusqlite::params!["text", None::<&str>, None::<&[u8]>]).unwrap();
    site.drain();
    let body = |id: &str| {
        let found = server.requests().into_iter().find(|request| request.header("webhook-id") == Some(id));
        found.unwrap_or_else(|| panic!("{id} was not sent")).body
    };
    assert_eq!(body("json"), json);
    assert_eq!((body("text"), body("bytes")), (b"ab\0cdef".to_vec(), b"ab\0cdef".to_vec()));
    connection.execute_batch("UPDATE outbox_policy SET max_payload = 6").unwrap();
    for (id, statement) in [("text2", nul.as_str()), ("bytes2", insert)] {
        let bytes = (id == "bytes2").then_some(b"ab\0cdef");
        let refused = connection.execute(statement, rusqlite::params![id, None::<&str>, bytes]).unwrap_err();
        assert!(refused.to_string().contains("FP003"), "{id}: {refused}");
    }
    connection.execute_batch("UPDATE outbox_policy SET max_payload = 7").unwrap();
    connection.execute(&nul, rusqlite::params!["text3", None::<&str>, None::<&[u8]>]).unwrap();
}

/// The evidence of the first attempt: legal JSON without a control character.
fn first_evidence(site: &Site, id: &str) -> Value {
    let text: String = site.value(&format!(
        "SELECT a.evidence FROM outbox_attempt a JOIN outbox_status u ON u.n = a.n WHERE u.id = '{id}' AND a.attempt_no = 1"
    ));
    let evidence: Value = serde_json::from_str(&text).unwrap();
    let texts = evidence.as_object().unwrap().values().filter_map(Value::as_str);
    assert!(texts.flat_map(str::chars).all(|c| !c.is_control()), "{text}");
    evidence
}

/// H26 (b): an answer with NUL and broken UTF-8 in it is recorded, cleaned, and holds nothing up.
#[test]
fn h26_b_odd_bytes_in_an_answer() {
    let server = Server::start(|request| {
        let first = request.header("Fencepost-Attempt") == Some("1");
        if first { Reply::status(500).body(b"no\0\xff\xfe\x1b[31m way") } else { Reply::status(200) }
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("x", "s", 1, "billing");
    let daemon = site.start();
    assert_eq!(site.wait_for_state("x", "delivered").attempt_no, 2);
    daemon.stop();
    let evidence = first_evidence(&site, "x");
    let body = evidence["body"].as_str().unwrap();
    assert!(body.starts_with("no\u{fffd}") && body.ends_with("[31m way"), "{body:?}");
}

/// H26 (c): a reply of a relay with a NUL in it.
#[test]
fn h26_c_odd_bytes_in_a_reply() {
    let bytes = b"451 4.3.0 try\0 \xff later\r\n".to_vec();
    let script = smtp::Script::new().dots([smtp::Dot::BytesThenClose(bytes), smtp::Dot::Reply("250 ok".into())]);
    let relay_server = smtp::Server::start(script);
    let site = Site::new();
    site.configure(&relay("main", relay_server.port(), ""));
    site.email("x", "s", 1, "main");
    let daemon = site.start();
    assert_eq!(site.wait_for_state("x", "delivered").attempt_no, 2);
    daemon.stop();
    let evidence = first_evidence(&site, "x");
    assert_eq!(evidence["code"], 451);
    assert!(evidence["reply"].as_str().unwrap().contains("try\u{fffd} \u{fffd} later"), "{evidence}");
}
