//! The dispatcher at work: order, retries, places, destinations, first looks, graceful stops. Each test
//! runs the real binary against scripted servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::daemon::{Site, relay, webhook};
use crate::support::http::{Gate, Received, Reply, Server};
use crate::support::{smtp, wait_until};

fn ids(requests: &[Received]) -> Vec<String> {
    requests.iter().map(|request| request.header("webhook-id").unwrap().to_owned()).collect()
}

/// H08: a retry never runs behind a newer command of its lane, also across a restart.
#[test]
fn h08_an_older_command_is_retried_before_a_newer_one() {
    let fail = Arc::new(AtomicUsize::new(usize::MAX));
    let left = Arc::clone(&fail);
    let server = Server::start(move |_| {
        let before = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| Some(n.saturating_sub(1))).unwrap();
        Reply::status(if before > 0 { 503 } else { 200 })
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("x", "s", 5, "billing");
    let daemon = site.start();
    server.wait_for(1);
    site.webhook("y", "s", 6, "billing");
    site.webhook("y2", "s", 6, "billing");
    site.sql(
        "INSERT INTO outbox(id, scope, token, lane, kind, destination, payload)
         VALUES ('other', 's', 6, 'side', 'webhook', 'billing', '{}')",
    );
    server.wait_for(6);
    assert_eq!(site.status("y").attempt_no, 0, "Y waits while X is live");
    assert!(site.status("other").attempt_no > 0, "another lane isn't held up");
    daemon.kill();
    let daemon = site.start();
    let more = server.requests().len() + 2;
    server.wait_for(more);
    fail.store(0, Ordering::SeqCst);
    for id in ["x", "y", "y2", "other"] {
        site.wait_for_state(id, "delivered");
    }
    daemon.stop();
    let order: Vec<String> = ids(&server.requests()).into_iter().filter(|id| id != "other").collect();
    let first_y = order.iter().position(|id| id == "y").unwrap();
    assert!(order[..first_y].iter().all(|id| id == "x") && order[first_y..] == ["y", "y2"], "{order:?}");
    assert_eq!(site.state("x"), ("delivered".into(), "done".into()));
}

/// H08 under `hold`: X is in doubt and Y waits until a person has resolved X.
#[test]
fn h08_under_hold_the_lane_waits_for_a_person() {
    let server = Server::start(|request| {
        let first = request.header("webhook-id") == Some("x") && request.header("Fencepost-Attempt") == Some("1");
        if first { Reply::close() } else { Reply::status(200) }
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
    site.webhook("x", "s", 5, "billing");
    site.webhook("y", "s", 6, "billing");
    site.drain();
    assert_eq!(site.state("x"), ("in_doubt".into(), "possible".into()));
    assert_eq!(site.status("y").attempt_no, 0);
    let resolved = site
        .command("resolve")
        .args(["x", "not-delivered", "--reason", "the receiver has no such id"])
        .output()
        .unwrap();
    assert!(resolved.status.success(), "{}", String::from_utf8_lossy(&resolved.stderr));
    site.drain();
    assert_eq!(ids(&server.requests()), ["x", "x", "y"]);
    assert_eq!(site.state("x"), ("delivered".into(), "done".into()));
    let (who, verb, reason): (String, String, String) = site
        .connect()
        .query_row("SELECT who, verb, reason FROM outbox_audit", [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .unwrap();
    assert!(!who.is_empty() && verb.contains("resolve") && reason.contains("no such id"), "{who} {verb} {reason}");
}

/// H09: `sending` has no time limit from outside. The lease runs out, a newer token commits, a second
/// dispatcher comes: the first send goes on alone.
#[test]
fn h09_a_send_outlives_its_lease() {
    let relay_server = smtp::Server::start(smtp::Script::new().hold(smtp::Stage::Dot));
    let site = Site::new();
    site.configure(&relay("main", relay_server.port(), ""));
    site.sql("INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('s', 'a', 50)");
    site.email("old", "s", 1, "main");
    let daemon = site.start();
    relay_server.wait_for_mails(1);
    wait_until("the lease is free", 10, || {
        let mut connection = site.connect();
        let transaction = connection.transaction().unwrap();
        let acquired =
            transaction.execute("INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('s', 'b', 60000)", []);
        acquired.is_ok() && transaction.commit().is_ok()
    });
    site.email("new", "s", 2, "main");
    let second = site.run(&[]);
    let log = Arc::clone(&second.log);
    let status = second.wait();
    assert_eq!(status.code(), Some(75));
    let log = log.lock().unwrap().clone();
    assert!(log.contains(&format!("pid {}", daemon.pid())), "it says who holds the lock: {log}");
    assert_eq!(site.status("old").state, "sending");
    assert_eq!(site.status("new").attempt_no, 0);
    relay_server.release();
    site.wait_for_state("old", "delivered");
    site.wait_for_state("new", "delivered");
    daemon.stop();
    let mails = relay_server.mails();
    assert_eq!(mails.iter().map(|mail| mail.header("Subject").unwrap()).collect::<Vec<_>>(), ["old", "new"]);
}

/// H11 with `on_dead = "continue"`: a head that uses up its tries ends, and its lane goes on. A scope of
/// healthy commands isn't held up.
#[test]
fn h11_a_failing_head_ends_and_the_lane_goes_on() {
    let server =
        Server::start(|request| Reply::status(if request.header("webhook-id") == Some("x") { 500 } else { 200 }));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "max_attempts = 3"));
    for id in ["x", "y", "z"] {
        site.webhook(id, "s", 5, "billing");
    }
    for n in 0..100 {
        site.webhook(&format!("t{n}"), "t", 1, "billing");
    }
    let daemon = site.start();
    site.wait_for_state("z", "delivered");
    site.wait_for_state("t99", "delivered");
    daemon.stop();
    let x = site.status("x");
    assert_eq!((x.state.as_str(), x.effect.as_str(), x.tries, x.attempt_no), ("dead/exhausted", "possible", 3, 3));
    let order: Vec<String> = ids(&server.requests()).into_iter().filter(|id| !id.starts_with('t')).collect();
    assert_eq!(order, ["x", "x", "x", "y", "z"]);
    let of_t: Vec<String> = ids(&server.requests()).into_iter().filter(|id| id.starts_with('t')).collect();
    assert_eq!(of_t, (0..100).map(|n| format!("t{n}")).collect::<Vec<_>>());
}

/// H14: a graceful stop begins nothing new, gives back what has certainly sent nothing, and waits for
/// the rest as long as it was told.
fn graceful_stop(on_unknown: &str, state: &str) {
    let (gate, server) = Server::held();
    let relay_server = smtp::Server::start(smtp::Script::new().hold(smtp::Stage::Banner));
    let site = Site::new();
    site.configure(&format!(
        "[dispatcher]\ndrain_timeout = \"1s\"\n{}{}",
        webhook("billing", &server.url(), &format!("on_unknown = \"{on_unknown}\"\nmax_in_flight = 1")),
        relay("main", relay_server.port(), "max_in_flight = 10"),
    ));
    site.webhook("w", "w", 1, "billing");
    for n in 0..10 {
        site.email(&format!("m{n}"), &format!("m{n}"), 1, "main");
        site.webhook(&format!("later{n}"), &format!("later{n}"), 1, "billing");
    }
    let daemon = site.start();
    server.wait_for(1);
    wait_until("ten mails are begun", 30, || relay_server.connections() == 10);
    assert!((0..10).all(|n| site.status(&format!("m{n}")).state == "sending"));
    daemon.signal(Signal::TERM);
    let asked = Instant::now();
    for n in 0..10 {
        let mail = site.wait_for_state(&format!("m{n}"), "pending");
        assert_eq!((mail.tries, mail.attempt_no, mail.effect.as_str()), (0, 1, "none"));
    }
    assert!(asked.elapsed() < Duration::from_millis(900), "the mails go back at once, not after the timeout");
    let status = daemon.wait();
    assert!(status.success());
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    let w = site.status("w");
    assert_eq!((w.state.as_str(), w.effect.as_str(), w.tries), (state, "possible", 1));
    assert!(site.evidence("w").contains("stopped before an answer"), "{}", site.evidence("w"));
    assert!((0..10).all(|n| site.status(&format!("later{n}")).attempt_no == 0), "nothing new is begun");
    // After the start nothing waits for anything to run out.
    relay_server.release();
    gate.open();
    let daemon = site.start();
    for n in 0..10 {
        site.wait_for_state(&format!("m{n}"), "delivered");
        site.wait_for_state(&format!("later{n}"), "delivered");
    }
    daemon.stop();
}

#[test]
fn h14_graceful_stop_under_resend() {
    graceful_stop("resend", "pending");
}

#[test]
fn h14_graceful_stop_under_hold() {
    graceful_stop("hold", "in_doubt");
}

/// H14, the second SIGTERM: the process ends at once, and recovery decides as after a crash.
#[test]
fn h14_a_second_signal_ends_at_once() {
    let server = Server::start(|_| Reply::status(200).held_by(&Gate::new()));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
    site.webhook("w", "w", 1, "billing");
    let daemon = site.start();
    server.wait_for(1);
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("stopping");
    let asked = Instant::now();
    daemon.signal(Signal::TERM);
    let status = daemon.wait();
    assert!(asked.elapsed() < Duration::from_secs(5));
    assert_eq!(status.code(), Some(143));
    assert_eq!(site.status("w").state, "sending");
    site.drain();
    assert_eq!(site.state("w"), ("in_doubt".into(), "possible".into()));
}

/// H19: a bad row ends at its first look and stops nothing else.
#[test]
fn h19_one_bad_row_stops_nothing_else() {
    let server = Server::start(|_| Reply::status(200));
    let relay_server = smtp::Server::start(smtp::Script::new());
    let site = Site::new();
    site.configure(&format!("{}{}", webhook("billing", &server.url(), ""), relay("main", relay_server.port(), "")));
    let insert = |values: &str, headers: bool| {
        let column = if headers { ", headers" } else { "" };
        site.connect()
            .execute(
                &format!("INSERT INTO outbox(scope, token, kind, destination, payload{column}) VALUES ({values})"),
                [],
            )
            .map_err(|error| error.to_string())
    };
    insert(r#"'g1',1,'webhook','billing','{"ok":1}'"#, false).unwrap();
    insert(r#"'g2',1,'webhook','billing','{"unterminated":'"#, false).unwrap();
    insert(r#"'b1',1,'webhook','billing','{}','{"X-A":'"#, true).unwrap();
    insert("'b2',1,'email','main','not json at all'", false).unwrap();
    insert(r#"'b3',1,'email','main','{"to":[],"subject":"x","text":"s3cr3t"}'"#, false).unwrap();
    insert(r#"'b4',1,'email','main','{"to":"a@example.org","subject":7}'"#, false).unwrap();
    insert("'b5',1,'fax','main','{}'", false).unwrap();
    assert!(insert("'b6',1,NULL,'billing','{}'", false).unwrap_err().contains("FP003"));
    assert!(insert("'b7',1,'webhook','billing',NULL", false).unwrap_err().contains("FP003"));
    insert("'b8',1,'webhook','ht!tp://%%%','{}'", false).unwrap();
    insert("'b9',1,'webhook','file:///etc/passwd','{}'", false).unwrap();
    insert(r#"'g3',1,'webhook','billing','{"ok":2}'"#, false).unwrap();
    // Text that isn't UTF-8 can't be a JSON object or a header.
    insert("'b10',1,'webhook','billing','{}',CAST(x'7bff7d' AS TEXT)", true).unwrap();
    insert("CAST(x'62ff' AS TEXT),1,'webhook','billing','{}'", false).unwrap();
    let daemon = site.start();
    wait_until("the good ones are delivered", 30, || server.requests().len() == 3);
    wait_until("the bad ones are dead", 30, || {
        site.value::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'dead'") == 7
    });
    let invalid: i64 = site.value("SELECT count(*) FROM outbox_state WHERE state = 'dead' AND reason = 'invalid' AND effect = 'none' AND attempt_no = 0 AND why <> ''");
    assert_eq!(invalid, 7);
    for scope in ["b8", "b9"] {
        let state: String = site.value(&format!("SELECT state FROM outbox_state WHERE scope = '{scope}'"));
        assert_eq!(state, "pending", "{scope}: without [webhook_urls] a URL is an unknown destination");
    }
    let log = daemon.log();
    assert!(!log.contains("s3cr3t") && !log.contains("not json"), "{log}");
    let mut bodies: Vec<Vec<u8>> = server.requests().iter().map(|request| request.body.clone()).collect();
    bodies.sort();
    assert_eq!(bodies, [br#"{"ok":1}"#.to_vec(), br#"{"ok":2}"#.to_vec(), br#"{"unterminated":"#.to_vec()]);
    assert_eq!(relay_server.connections(), 0);
    daemon.stop();
}

/// H20: commands that can't progress take no place from others.
#[test]
fn h20_commands_that_cannot_progress_take_no_place() {
    let (gate, slow) = Server::held();
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&format!(
        "[dispatcher]\nmax_in_flight = 100\n{}{}{}",
        webhook("slow", &slow.url(), "max_in_flight = 20"),
        webhook("dead", "http://127.0.0.1:1/", "").replace("\"20ms\", cap = \"50ms\"", "\"1h\", cap = \"1h\""),
        webhook("billing", &server.url(), "max_in_flight = 50"),
    ));
    let mut statements = String::new();
    for n in 0..500 {
        let destination = ["slow", "dead", "missing"][n % 3];
        statements += &format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('old{n}', 'o{}', 1, 'webhook', '{destination}', '{{}}');",
            n / 3 * 3 + n % 3
        );
    }
    for n in 0..50 {
        statements += &format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('new{n}', 'n{n}', 1, 'webhook', 'billing', '{{}}');"
        );
    }
    site.sql(&statements);
    let daemon = site.start();
    server.wait_for(50);
    assert_eq!(slow.requests().len().max(20), 20, "a slow destination takes its own places only");
    gate.open();
    daemon.stop();
}

/// H68: a command for a destination that the configuration doesn't name waits, loud, without a try.
#[test]
fn h68_an_unknown_destination_waits() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("l", "s", 1, "loyalty");
    site.webhook("behind", "s", 1, "billing");
    site.webhook("free", "t", 1, "billing");
    let daemon = site.start();
    site.wait_for_state("free", "delivered");
    daemon.wait_for_log("loyalty");
    daemon.stop();
    let l = site.status("l");
    assert_eq!((l.state.as_str(), l.attempt_no, l.tries), ("pending", 0, 0));
    assert_eq!(site.status("behind").attempt_no, 0);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_attempt"), 1);
    let status = site.command("status").output().unwrap();
    assert!(String::from_utf8_lossy(&status.stdout).contains("loyalty"), "{}", String::from_utf8_lossy(&status.stdout));
    site.configure(&format!("{}{}", webhook("billing", &server.url(), ""), webhook("loyalty", &server.url(), "")));
    site.drain();
    assert_eq!(ids(&server.requests()), ["free", "l", "behind"]);
}

/// H73: a failed connect gives its try back, and its number is never used again.
#[test]
fn h73_a_try_given_back_is_not_a_number_given_back() {
    let answers = Arc::new(AtomicUsize::new(0));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let site = Site::new();
    site.configure(&webhook("billing", &format!("http://127.0.0.1:{port}/"), "max_attempts = 3"));
    site.webhook("x", "s", 1, "billing");
    let daemon = site.start();
    wait_until("ten connects have failed", 30, || site.status("x").attempt_no >= 10);
    assert_eq!(site.status("x").tries.max(1), 1, "at most the open one counts");
    daemon.stop();
    let refused = site.status("x");
    assert_eq!((refused.tries, refused.effect.as_str()), (0, "none"));
    let counter = Arc::clone(&answers);
    let server =
        Server::start(move |_| Reply::status(if counter.fetch_add(1, Ordering::SeqCst) < 2 { 500 } else { 200 }));
    site.configure(&webhook("billing", &server.url(), "max_attempts = 3"));
    let daemon = site.start();
    let x = site.wait_for_state("x", "delivered");
    daemon.stop();
    assert_eq!((x.tries, x.attempt_no), (3, refused.attempt_no + 3));
    let numbers: Vec<String> =
        server.requests().iter().map(|r| r.header("Fencepost-Attempt").unwrap().to_owned()).collect();
    let expected: Vec<String> = (1..=3).map(|n| (refused.attempt_no + n).to_string()).collect();
    assert_eq!(numbers, expected);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_attempt"), x.attempt_no);
    // A late settle of an earlier attempt changes no row.
    let late = site.connect().execute("UPDATE outbox_attempt SET outcome = 'delivered' WHERE attempt_no = 10", []);
    assert!(late.unwrap_err().to_string().contains("FP011"));
}

/// H75: order is per lane. A delayed command holds its own lane and no other.
#[test]
fn h75_a_delayed_command_holds_its_own_lane_only() {
    let relay_server = smtp::Server::start(smtp::Script::new());
    let site = Site::new();
    site.configure(&format!(
        "{}{}",
        webhook("billing", "http://127.0.0.1:1/", ""),
        relay("main", relay_server.port(), "")
    ));
    let mail = |id: &str, lane: &str, not_before: &str| {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, lane, kind, destination, not_before_ms, payload)
             VALUES ('{id}', 'order/17', 1, '{lane}', 'email', 'main', {not_before},
             '{{\"from\":\"shop@example.com\",\"to\":\"ann@example.org\",\"subject\":\"{id}\",\"text\":\"hello\"}}')"
        ));
    };
    mail("survey", "survey", "CAST(strftime('%s','now','+7 days') AS INTEGER) * 1000");
    site.sql(
        "INSERT INTO outbox(id, scope, token, lane, kind, destination, payload)
         VALUES ('hook', 'order/17', 1, 'billing', 'webhook', 'billing', '{}')",
    );
    mail("shipping", "", "NULL");
    mail("survey2", "survey", "NULL");
    let daemon = site.start();
    site.wait_for_state("shipping", "delivered");
    wait_until("the billing lane retries by itself", 30, || site.status("hook").attempt_no >= 3);
    daemon.stop();
    assert_eq!(site.status("survey").attempt_no, 0);
    assert_eq!(site.status("survey2").attempt_no, 0);
    assert_eq!(relay_server.mails().len(), 1);
    let stale = site.connect().execute_batch(
        "UPDATE outbox_scope SET watermark = 2;
         INSERT INTO outbox(scope, token, lane, kind, destination, payload) VALUES ('order/17', 1, 'survey', 'email', 'main', '{}')",
    );
    assert!(stale.unwrap_err().to_string().contains("FP001"), "one fence for all lanes");
}

/// Expiry ends a command that waits, with its effect kept, and frees the lane.
#[test]
fn an_expired_command_ends_and_frees_its_lane() {
    let server =
        Server::start(|request| Reply::status(if request.header("webhook-id") == Some("x") { 503 } else { 200 }));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "max_attempts = 100000"));
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload, expires_at_ms) VALUES
         ('x', 's', 1, 'webhook', 'billing', '{}', CAST(strftime('%s','now','+2 seconds') AS INTEGER) * 1000),
         ('past', 'p', 1, 'webhook', 'billing', '{}', CAST(strftime('%s','now','-2 seconds') AS INTEGER) * 1000)",
    );
    site.webhook("y", "s", 1, "billing");
    let daemon = site.start();
    site.wait_for_state("y", "delivered");
    daemon.stop();
    assert_eq!(site.state("x"), ("dead/expired".into(), "possible".into()));
    let past = site.status("past");
    assert_eq!((past.state.as_str(), past.effect.as_str(), past.attempt_no), ("dead/expired", "none", 0));
}

/// A commit of another process is seen at once, by the hint or by the poll.
#[test]
fn a_commit_elsewhere_wakes_the_dispatcher() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&format!("[dispatcher]\npoll_interval = \"30s\"\n{}", webhook("billing", &server.url(), "")));
    let daemon = site.start();
    for n in 1..=5 {
        site.webhook(&format!("w{n}"), "s", 1, "billing");
        server.wait_for(n);
    }
    daemon.stop();
}

/// H04: a worker's clock that is an hour ahead delays nothing, also while the dispatcher runs; only
/// `not_before_ms` does.
#[test]
fn h04_a_clock_that_is_ahead_delays_nothing() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let daemon = site.start();
    // As the trigger writes it under such a clock.
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload, not_before_ms)
           VALUES ('later', 'l', 1, 'webhook', 'billing', '{}', CAST(strftime('%s','now','+2 hours') AS INTEGER) * 1000);
         INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('fast', 's', 3, 'webhook', 'billing', '{}');
         UPDATE outbox_state SET due_ms = due_ms + 3600000, set_ms = set_ms + 3600000 WHERE scope = 's';
         INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('right', 's', 4, 'webhook', 'billing', '{}');",
    );
    site.wait_for_state("right", "delivered");
    daemon.stop();
    assert_eq!(ids(&server.requests()), ["fast", "right"]);
    assert_eq!(site.status("later").attempt_no, 0);
}
