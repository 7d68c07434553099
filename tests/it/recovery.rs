//! A dispatcher that dies: what the next one finds, at every point of an attempt. Each test kills the
//! real binary, from outside or at a named point inside.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::daemon::{Daemon, Site, relay, webhook};
use crate::support::http::{Gate, Reply, Server};
use crate::support::{smtp, wait_until};

/// H12 for a webhook under `resend`: its begin armed it, so wherever the process dies it is sent again
/// with the same id and bytes, and after its settle never again.
#[test]
fn h12_webhook_killed_at_each_point() {
    for (point, arrivals, after) in [("begun", 1, "pending"), ("sent", 2, "pending"), ("settled", 1, "delivered")] {
        let server = Server::start(|_| Reply::status(200));
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        site.webhook("w", "s", 1, "billing");
        site.killed_at(point, "billing", &[]);
        let before = site.status("w");
        if after == "pending" {
            assert_eq!(
                (before.state.as_str(), before.effect.as_str(), before.tries),
                ("sending", "possible", 1),
                "{point}"
            );
        }
        site.drain();
        let w = site.status("w");
        assert_eq!((w.state.as_str(), w.effect.as_str()), ("delivered", "done"), "{point}");
        let requests = server.requests();
        assert_eq!(requests.len(), arrivals, "{point}");
        assert!(
            requests.iter().all(|request| request.header("webhook-id") == Some("w") && request.body == b"{}"),
            "{point}"
        );
        let open: i64 = site.value("SELECT count(*) FROM outbox_attempt WHERE settled_ms IS NULL");
        assert_eq!(open, 0, "{point}");
    }
}

/// H12 for a mail under `hold`: unarmed it is sent once, later; armed it is in doubt until a person says.
#[test]
fn h12_mail_killed_at_each_point() {
    for (point, arrived, state) in
        [("begun", 0, "delivered"), ("armed", 0, "in_doubt"), ("sent", 1, "in_doubt"), ("settled", 1, "delivered")]
    {
        let server = smtp::Server::start(smtp::Script::new());
        let site = Site::new();
        site.configure(&relay("main", server.port(), ""));
        site.email("m", "s", 1, "main");
        site.killed_at(point, "main", &[]);
        assert_eq!(server.mails().len(), arrived, "{point}");
        let expected = match (point, state) {
            ("begun", _) => ("sending", "none"),
            ("settled", _) => ("delivered", "done"),
            _ => ("sending", "possible"),
        };
        assert_eq!(site.state("m"), (expected.0.into(), expected.1.into()), "{point}");
        site.drain();
        let m = site.status("m");
        assert_eq!(m.state, state, "{point}");
        match state {
            "in_doubt" => {
                assert_eq!((m.effect.as_str(), server.mails().len()), ("possible", arrived), "{point}: not sent again");
                site.drain();
                assert_eq!(site.status("m").attempt_no, 1, "{point}: never by itself");
            }
            _ => assert_eq!((m.effect.as_str(), server.mails().len()), ("done", 1), "{point}"),
        }
        assert_eq!(m.tries, if point == "begun" { 2 } else { 1 }, "{point}: the open attempt counts");
    }
}

/// H12 (b) with a kill from outside while the receiver holds its answer; H72 (a): the same id and bytes.
#[test]
fn h72_open_attempt_under_resend_is_resent() {
    let (gate, server) = Server::held();
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("w", "s", 1, "billing");
    let daemon = site.start();
    server.wait_for(1);
    daemon.kill();
    gate.open();
    site.drain();
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(requests[0].header("Idempotency-Key"), requests[1].header("Idempotency-Key"));
    assert_eq!(requests[1].header("Fencepost-Attempt"), Some("2"));
    let first: (String, Option<i64>) = site
        .connect()
        .query_row("SELECT outcome, armed_ms FROM outbox_attempt WHERE attempt_no = 1", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .unwrap();
    assert_eq!(first.0, "unknown");
    assert!(first.1.is_some());
    // The window counts from the begin of the first attempt that ended unknown.
    assert_eq!(
        site.value::<i64>("SELECT first_unknown_ms FROM outbox_state"),
        site.value::<i64>("SELECT begun_ms FROM outbox_attempt WHERE attempt_no = 1"),
    );
}

fn killed_while_the_receiver_holds(more: &str) -> (Site, Server, Gate) {
    let (gate, server) = Server::held();
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), more));
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload, expires_at_ms)
         VALUES ('w', 's', 1, 'webhook', 'billing', '{}', CAST(strftime('%s','now','+4 seconds') AS INTEGER) * 1000)",
    );
    let daemon = site.start();
    server.wait_for(1);
    daemon.kill();
    (site, server, gate)
}

#[test]
fn h72_b_expired_before_the_restart_keeps_its_effect() {
    let (site, server, gate) = killed_while_the_receiver_holds("");
    wait_until("its time is over", 30, || {
        site.value::<bool>("SELECT expires_at_ms < CAST(strftime('%s','now') AS INTEGER) * 1000 FROM outbox")
    });
    gate.open();
    site.drain();
    assert_eq!(site.state("w"), ("dead/expired".into(), "possible".into()));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn h72_c_the_open_attempt_goes_by_the_policy_it_was_begun_under() {
    let (site, server, gate) = killed_while_the_receiver_holds("");
    site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
    gate.open();
    site.drain();
    assert_eq!(server.requests().len(), 2, "resend, as it was begun");
    let policies: Vec<String> = {
        let connection = site.connect();
        let mut statement = connection.prepare("SELECT on_unknown FROM outbox_attempt ORDER BY attempt_no").unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    assert_eq!(policies, ["resend", "hold"]);
}

#[test]
fn h72_d_cancelled_after_the_restart_keeps_its_effect() {
    let (site, server, _gate) = killed_while_the_receiver_holds("");
    // The next start recovers it and can't begin it: its destination isn't configured.
    site.configure(&webhook("elsewhere", "http://127.0.0.1:1/", ""));
    site.drain();
    assert_eq!(site.state("w"), ("pending".into(), "possible".into()));
    // The verb comes later; what it writes is this.
    site.sql("UPDATE outbox_state SET state = 'dead', reason = 'cancelled' WHERE state = 'pending'");
    site.configure(&webhook("billing", &server.url(), ""));
    site.drain();
    assert_eq!(site.state("w"), ("dead/cancelled".into(), "possible".into()));
    assert_eq!(server.requests().len(), 1);
}

/// H74: a command that another process ended while its outcome was on the way costs the others nothing.
#[test]
fn h74_a_guard_refuses_one_verb_of_a_group_commit() {
    let (gate, server) = Server::held();
    let mails = smtp::Server::start(smtp::Script::new().hold(smtp::Stage::Data));
    let site = Site::new();
    site.configure(&format!(
        "[dispatcher]\nmax_in_flight = 100\n{}{}{}",
        webhook("billing", &server.url(), "max_in_flight = 64"),
        webhook("free", &server.url(), ""),
        relay("main", mails.port(), "")
    ));
    for n in 0..64 {
        site.webhook(&format!("w{n}"), &format!("w{n}"), 1, "billing");
    }
    site.email("recalled", "m", 1, "main");
    site.email("behind", "m", 1, "main");
    let daemon = site.start();
    server.wait_for(64);
    mails.wait_for_command("DATA");
    // One is final already, as by another process; one has an attempt number ahead of its state (FP008 at
    // its begin); one mail is cancelled between begin and arm.
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('ahead', 'ahead', 1, 'webhook', 'free', '{}');
         INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, settled_ms, outcome)
         SELECT n, 9, 1, 'resend', 1, 1, 'deferred' FROM outbox WHERE id = 'ahead';
         UPDATE outbox_state SET state = 'dead', reason = 'cancelled' WHERE n = (SELECT n FROM outbox WHERE id = 'w7');
         UPDATE outbox_attempt SET settled_ms = 1, outcome = 'deferred' WHERE n = (SELECT n FROM outbox WHERE id = 'recalled');
         UPDATE outbox_state SET state = 'dead', reason = 'cancelled' WHERE n = (SELECT n FROM outbox WHERE id = 'recalled');",
    );
    gate.open();
    mails.release();
    for n in (0..64).filter(|n| *n != 7) {
        site.wait_for_state(&format!("w{n}"), "delivered");
    }
    site.wait_for_state("behind", "delivered");
    daemon.wait_for_log("a guard refused the begin");
    daemon.stop();
    assert_eq!((site.status("ahead").state.as_str(), site.status("ahead").attempt_no), ("pending", 0));
    assert_eq!(site.status("w7").state, "dead/cancelled");
    assert_eq!(site.state("recalled"), ("dead/cancelled".into(), "none".into()));
    let subjects: Vec<String> = mails.mails().iter().map(|mail| mail.header("Subject").unwrap()).collect();
    assert_eq!(subjects, ["behind"], "the arm changed no row, so no byte of the body left");
}

/// H74, the end: an epoch that is over rolls the whole batch back and ends the process with 75.
#[test]
fn h74_a_deposed_dispatcher_ends_with_75() {
    let (gate, server) = Server::held();
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
    site.webhook("w", "s", 1, "billing");
    let daemon = site.start();
    server.wait_for(1);
    site.sql("UPDATE outbox_dispatcher SET epoch = epoch + 1");
    site.webhook("later", "t", 1, "billing");
    gate.open();
    assert_eq!(daemon.wait().code(), Some(75));
    assert_eq!(site.status("w").state, "sending", "its settle changed nothing");
    assert_eq!(site.status("later").attempt_no, 0, "nothing more was begun");
    site.drain();
    assert_eq!(site.state("w"), ("in_doubt".into(), "possible".into()), "unknown, never delivered");
}

/// Starts the daemon again and again until it stays up, as a supervisor would.
fn supervise(site: &Site, fault: &str, starts_max: usize, done: impl Fn() -> bool) -> (Daemon, usize) {
    for start in 1..=starts_max {
        let mut daemon = site.run_with(&[], &[("FENCEPOST_FAULT", fault)]);
        let mut up = true;
        wait_until("the daemon dies or is done", 60, || {
            up = daemon.is_running();
            !up || done()
        });
        if up {
            return (daemon, start);
        }
    }
    panic!("it died {starts_max} times");
}

/// H15: a command whose handling kills the process ends, and its neighbours are delivered.
#[test]
fn h15_a_command_that_kills_the_process_ends() {
    for (kind, point, state, effect, tries) in [
        ("webhook", "sent", "dead/exhausted", "possible", 5),
        ("email", "begun", "dead/exhausted", "none", 5),
        ("email", "armed", "in_doubt", "possible", 1),
    ] {
        let server = Server::start(|_| Reply::status(200));
        let mails = smtp::Server::start(smtp::Script::new());
        let site = Site::new();
        site.configure(&format!(
            "{}{}{}",
            webhook("billing", &server.url(), "max_attempts = 5"),
            webhook("killer", &server.url(), "max_attempts = 5"),
            relay("killer", mails.port(), "max_attempts = 5"),
        ));
        for n in 0..20 {
            site.webhook(&format!("w{n}"), &format!("w{n}"), 1, "billing");
        }
        match kind {
            "webhook" => site.webhook("k", "k", 1, "killer"),
            _ => site.email("k", "k", 1, "killer"),
        }
        let done = || site.statuses().iter().all(|status| !["pending", "sending"].contains(&status.state.as_str()));
        let (daemon, _) = supervise(&site, &format!("{point}:killer:kill"), 8, done);
        daemon.stop();
        let k = site.status("k");
        assert_eq!((k.state.as_str(), k.effect.as_str(), k.tries), (state, effect, tries), "{kind} {point}");
        assert!(site.evidence("k").contains("process died during attempt"), "{}", site.evidence("k"));
        for n in 0..20 {
            let w = site.status(&format!("w{n}"));
            assert_eq!(w.state, "delivered", "{kind} {point}");
            assert!(w.tries <= 3, "{kind} {point}: {w:?}");
        }
    }
}

/// H71: the neighbours of a killer lose two tries at most. The killer's receiver answers only when all 63
/// others are in flight, so that every crash of the first starts hits them all.
#[test]
fn h71_neighbours_of_a_killer() {
    let wave: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let all_in_flight = Arc::new(AtomicBool::new(false));
    let together = Arc::new(AtomicUsize::new(0));
    let (seen, ready) = (Arc::clone(&wave), Arc::clone(&all_in_flight));
    // Answers are held until all 63 have arrived in one life of the dispatcher.
    let healthy = Server::start(move |request| {
        let mut seen = seen.lock().unwrap();
        seen.insert(request.header("webhook-id").unwrap().to_owned());
        let crowd = request.header("Fencepost-Attempt").unwrap().parse::<u32>().unwrap() <= 2;
        if seen.len() == 63 {
            ready.store(true, Ordering::SeqCst);
        }
        if crowd { Reply::status(200).held_by(&Gate::new()) } else { Reply::status(200) }
    });
    let (ready, count) = (Arc::clone(&all_in_flight), Arc::clone(&together));
    let killer = Server::start(move |request| {
        count.fetch_add(1, Ordering::SeqCst);
        if request.header("Fencepost-Attempt").unwrap().parse::<u32>().unwrap() <= 2 {
            wait_until("63 are in flight", 30, || ready.load(Ordering::SeqCst));
            ready.store(false, Ordering::SeqCst);
        }
        Reply::status(200)
    });
    let site = Site::new();
    site.configure(&format!(
        "[dispatcher]\nmax_in_flight = 64\n{}{}",
        webhook("billing", &healthy.url(), "max_attempts = 5\nmax_in_flight = 63"),
        webhook("killer", &killer.url(), "max_attempts = 5"),
    ));
    for n in 0..63 {
        site.webhook(&format!("w{n}"), &format!("w{n}"), 1, "billing");
    }
    site.webhook("k", "k", 1, "killer");
    let done = || site.statuses().iter().all(|status| !["pending", "sending"].contains(&status.state.as_str()));
    let mut starts = 0;
    let daemon = loop {
        starts += 1;
        wave.lock().unwrap().clear();
        let mut daemon = site.run_with(&[], &[("FENCEPOST_FAULT", "sent:killer:kill")]);
        let mut up = true;
        wait_until("the daemon dies or is done", 60, || {
            up = daemon.is_running();
            !up || done()
        });
        if up {
            break daemon;
        }
        assert!(starts < 8, "it died {starts} times");
    };
    daemon.stop();
    let k = site.status("k");
    assert_eq!((k.state.as_str(), k.effect.as_str(), k.tries), ("dead/exhausted", "possible", 5));
    assert_eq!(together.load(Ordering::SeqCst), 5);
    for n in 0..63 {
        let w = site.status(&format!("w{n}"));
        assert_eq!(w.state, "delivered");
        assert!(w.tries <= 3, "{w:?}");
    }
    assert_eq!(starts, 6, "five crashes, and a start that stays up");
}

/// H71: a suspect that can't be sent any more ends like any other command; only a begin needs caution.
#[test]
fn h71_a_suspect_that_may_never_begin_ends() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload, expires_at_ms) VALUES
         ('late', 'a', 1, 'webhook', 'billing', '{}', CAST(strftime('%s','now','-2 seconds') AS INTEGER) * 1000),
         ('odd', 'b', 1, 'pigeon', 'billing', '{}', NULL);
         UPDATE outbox_state SET found_row = 2, found_open = 2",
    );
    site.drain();
    assert_eq!(site.status("late").state, "dead/expired");
    assert_eq!(site.status("odd").state, "dead/invalid");
}

/// A suspect that isn't due, or waits for its destination, holds nobody up.
#[test]
fn h71_a_suspect_that_may_not_begin_holds_nobody_up() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("lost", "a", 1, "missing");
    site.webhook("later", "b", 1, "billing");
    site.webhook("free", "c", 1, "billing");
    site.sql(
        "UPDATE outbox_state SET found_row = 2, found_open = 2 WHERE scope IN ('a', 'b');
         UPDATE outbox_state SET due_ms = due_ms + 3600000 WHERE scope = 'b'",
    );
    site.drain();
    assert_eq!(site.status("free").state, "delivered");
    assert_eq!((site.status("later").attempt_no, site.status("lost").attempt_no), (0, 0));
}

/// H27: the body is what was stored, on both attempts, across a restart; the signature is fresh.
#[test]
fn h27_the_same_bytes_after_a_restart() {
    let body = "{\"z\":1, \"a\" :2,\r\n  \"path\":\"\\/v1\\/x\",\"sep_esc\":\"\\u2028\",\"sep_raw\":\"\u{2028}\",\"emoji_raw\":\"\u{1f600}\",\"emoji_esc\":\"\\uD83D\\uDE00\",\"html\":\"<b>&amp;</b>\",\"f\":1.0,\"e\":1E2,\"n\":-0,\"arr\":[ ],\"obj\":{ },\"\u{e9}\":\"caf\u{e9} / cafe\u{301}\"}\n\n";
    let server = Server::start(|request| {
        Reply::status(if request.header("Fencepost-Attempt") == Some("1") { 503 } else { 200 })
    });
    let site = Site::new();
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let destination =
        webhook("billing", &server.url(), "").replace("secrets = []", "secrets = [{ env = \"BILLING_SECRET\" }]");
    site.configure(&destination.replace("\"20ms\", cap = \"50ms\"", "\"1s\", cap = \"1s\""));
    let connection = site.connect();
    connection
        .execute("INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('text', 't', 1, 'webhook', 'billing', ?1)", [body])
        .unwrap();
    connection
        .execute(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload_bytes) VALUES ('bytes', 'b', 1, 'webhook', 'billing', ?1)",
            [body.as_bytes()],
        )
        .unwrap();
    let environment = [("BILLING_SECRET", secret)];
    let daemon = site.run_with(&[], &environment);
    server.wait_for(2);
    site.wait_for_state("text", "pending");
    site.wait_for_state("bytes", "pending");
    daemon.stop();
    let daemon = site.run_with(&[], &environment);
    site.wait_for_state("text", "delivered");
    site.wait_for_state("bytes", "delivered");
    daemon.stop();
    let verifier = standardwebhooks::Webhook::new(secret).unwrap();
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    for request in requests {
        assert_eq!(request.body, body.as_bytes());
        assert_eq!(request.header("Content-Length"), Some(body.len().to_string().as_str()));
        assert_eq!(request.header("Content-Encoding"), None);
        let plain =
            if request.header("webhook-id") == Some("text") { "application/json" } else { "application/octet-stream" };
        assert_eq!(request.header("Content-Type"), Some(plain));
        let mut headers = http_headers(&request);
        headers.retain(|(name, _)| name.starts_with("webhook-"));
        let map = headers.into_iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        verifier.verify(&request.body, &map).unwrap();
    }
}

fn http_headers(request: &crate::support::http::Received) -> Vec<(String, String)> {
    ["webhook-id", "webhook-timestamp", "webhook-signature"]
        .iter()
        .map(|name| ((*name).to_owned(), request.header(name).unwrap().to_owned()))
        .collect()
}
