//! A command's life beside its attempts: take-over, cancel, keys, block, pause. Each test runs the real
//! binary against scripted servers.

use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::daemon::{Site, relay, webhook};
use crate::support::http::{Gate, Received, Reply, Server};
use crate::support::smtp::{self, Script, Stage};
use crate::support::wait_until;

fn ids(requests: &[Received]) -> Vec<String> {
    requests.iter().map(|request| request.header("webhook-id").unwrap().to_owned()).collect()
}

fn subjects(server: &smtp::Server) -> Vec<String> {
    server.mails().iter().map(|mail| mail.header("Subject").unwrap()).collect()
}

/// A command of the binary, and what it said.
fn fencepost(site: &Site, arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = site.command(arguments[0]).args(&arguments[1..]).output().unwrap();
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[track_caller]
fn done(site: &Site, arguments: &[&str]) -> String {
    let (code, said) = fencepost(site, arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {said}");
    said
}

#[track_caller]
fn refused(site: &Site, arguments: &[&str], words: &str) {
    let (code, said) = fencepost(site, arguments);
    assert_eq!(code, Some(65), "{arguments:?}: {said}");
    assert!(said.contains(words), "{arguments:?}: {said}");
}

fn policy(site: &Site, scope: &str, on_takeover: &str) {
    done(site, &["scope", "set", scope, "--on-takeover", on_takeover, "--reason", "test"]);
}

// ── H76 ─────────────────────────────────────────────────────────────────────────────────────────────

/// A relay that holds back its 354: mail `e` of token 7 is begun and unarmed, `next` stands behind it.
fn begun_and_unarmed() -> (smtp::Server, Site) {
    let server = smtp::Server::start(Script::new().hold(Stage::Data));
    let site = Site::new();
    site.configure(&relay("main", server.port(), ""));
    site.email("e", "s", 7, "main");
    (server, site)
}

/// H76 (a): cancelled between begin and arm. The arm changes no row, and no byte of the body leaves.
#[test]
fn h76a_a_mail_is_cancelled_between_begin_and_arm() {
    let (server, site) = begun_and_unarmed();
    site.email("next", "s", 7, "main");
    let daemon = site.start();
    server.wait_for_command("DATA");
    let said = done(&site, &["cancel", "e", "--reason", "the customer called", "--who", "ann"]);
    assert!(said.contains("dead"), "{said}");
    assert_eq!(site.state("e"), ("dead/cancelled".into(), "none".into()));
    server.release();
    site.wait_for_state("next", "delivered");
    daemon.wait_for_log("recalled before anything was sent");
    daemon.stop();
    assert_eq!(subjects(&server), ["next"]);
    assert_eq!(server.sessions()[0].body_bytes, 0, "no byte of the body");
    assert_eq!(site.state("e"), ("dead/cancelled".into(), "none".into()));
    assert!(site.evidence("e").contains("recalled"), "{}", site.evidence("e"));
    let audit: String =
        site.value("SELECT who || '|' || verb || '|' || id || '|' || reason FROM outbox_audit WHERE at_ms > 0");
    assert_eq!(audit, "ann|cancel|e|the customer called");
}

/// H76 (b): the same by a take-over under `discard`.
#[test]
fn h76b_a_takeover_recalls_what_is_not_armed() {
    let (server, site) = begun_and_unarmed();
    policy(&site, "s", "discard");
    let daemon = site.start();
    server.wait_for_command("DATA");
    site.email("next", "s", 8, "main");
    assert_eq!(site.state("e"), ("dead/superseded".into(), "none".into()));
    server.release();
    site.wait_for_state("next", "delivered");
    daemon.stop();
    assert_eq!(subjects(&server), ["next"]);
    assert_eq!(site.state("e"), ("dead/superseded".into(), "none".into()));
}

/// H76 (c): once armed it is too late, and the command runs to its outcome.
#[test]
fn h76c_once_armed_it_is_too_late() {
    let server = smtp::Server::start(Script::new().hold(Stage::Dot));
    let site = Site::new();
    site.configure(&relay("main", server.port(), ""));
    site.email("e", "s", 7, "main");
    let daemon = site.start();
    server.wait_for_mails(1);
    refused(&site, &["cancel", "e", "--reason", "x"], "too late");
    refused(&site, &["cancel", "e", "--scope", "s", "--token", "7"], "too late");
    assert_eq!(site.status("e").state, "sending");
    server.release();
    site.wait_for_state("e", "delivered");
    daemon.stop();
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_audit"), 0);
}

/// H76 (d): a stale holder can't cancel; the current one can.
#[test]
fn h76d_a_stale_holder_can_not_cancel() {
    let (server, site) = begun_and_unarmed();
    let daemon = site.start();
    server.wait_for_command("DATA");
    refused(&site, &["cancel", "e", "--scope", "s", "--token", "6"], "FP001");
    assert_eq!(site.status("e").state, "sending");
    let said = done(&site, &["cancel", "e", "--scope", "s", "--token", "7", "--holder", "h"]);
    assert!(said.contains("cancelled"), "{said}");
    server.release();
    daemon.stop();
    assert_eq!(site.state("e"), ("dead/cancelled".into(), "none".into()));
    assert!(server.mails().is_empty());
}

// ── H78 ─────────────────────────────────────────────────────────────────────────────────────────────

/// What becomes of X, which was being sent when token 8 took over, under each policy.
const AFTER_TAKEOVER: [(&str, &str); 3] =
    [("discard", "dead/superseded"), ("review", "parked"), ("deliver", "delivered")];

/// X as it must be; under `review` it is adopted then, sent, and not parked anew by the same take-over.
fn x_ends(site: &Site, state: &str, effect: &str) {
    site.wait_for_state("x", state);
    if state == "parked" {
        assert_eq!(site.state("x").1, effect);
        assert_eq!(site.status("y").attempt_no, 0, "its lane waits");
        done(site, &["adopt", "x", "--reason", "it is still wanted"]);
        site.wait_for_state("x", "delivered");
    }
    site.wait_for_state("y", "delivered");
    let right = if state == "dead/superseded" { effect } else { "done" };
    assert_eq!(site.state("x").1, right);
}

/// H78 (a): the endpoint answers 429 after the take-over. The armed attempt is not cut off; what comes
/// back goes by the policy.
#[test]
fn h78a_what_is_deferred_after_a_takeover_goes_by_the_policy() {
    for (on_takeover, state) in AFTER_TAKEOVER {
        let gate = Gate::new();
        let held = gate.clone();
        let server = Server::start(move |request| {
            let first = request.header("webhook-id") == Some("x") && request.header("Fencepost-Attempt") == Some("1");
            if first { Reply::status(429).held_by(&held) } else { Reply::status(200) }
        });
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        site.webhook("x", "s", 7, "billing");
        policy(&site, "s", on_takeover);
        let daemon = site.start();
        server.wait_for(1);
        site.webhook("y", "s", 8, "billing");
        assert_eq!(site.status("x").state, "sending", "an armed attempt is never cut off");
        gate.open();
        x_ends(&site, state, "none");
        daemon.stop();
        let right: &[&str] = if on_takeover == "discard" { &["x", "y"] } else { &["x", "x", "y"] };
        assert_eq!(ids(&server.requests()), right, "{on_takeover}");
    }
}

/// H78 (b): it ends unknown, and the operator says that it did not happen.
#[test]
fn h78b_what_is_resolved_after_a_takeover_goes_by_the_policy() {
    for (on_takeover, state) in AFTER_TAKEOVER {
        let gate = Gate::new();
        let held = gate.clone();
        let server = Server::start(move |request| {
            let first = request.header("webhook-id") == Some("x") && request.header("Fencepost-Attempt") == Some("1");
            if first { Reply::close().held_by(&held) } else { Reply::status(200) }
        });
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
        site.webhook("x", "s", 7, "billing");
        policy(&site, "s", on_takeover);
        let daemon = site.start();
        server.wait_for(1);
        site.webhook("y", "s", 8, "billing");
        gate.open();
        site.wait_for_state("x", "in_doubt");
        done(&site, &["resolve", "x", "not-delivered", "--reason", "asked the receiver"]);
        x_ends(&site, state, "possible");
        daemon.stop();
    }
}

/// H78 (c): a mail begun and unarmed, and the dispatcher is killed and started again.
#[test]
fn h78c_what_is_found_open_after_a_takeover_goes_by_the_policy() {
    for (on_takeover, state) in AFTER_TAKEOVER {
        let server = smtp::Server::start(Script::new().hold(Stage::Data));
        let site = Site::new();
        site.configure(&relay("main", server.port(), ""));
        site.email("x", "s", 7, "main");
        policy(&site, "s", on_takeover);
        let daemon = site.start();
        server.wait_for_command("DATA");
        site.email("y", "s", 8, "main");
        let at_once = if on_takeover == "discard" { "dead/superseded" } else { "sending" };
        assert_eq!(site.status("x").state, at_once, "{on_takeover}");
        daemon.kill();
        server.release();
        let daemon = site.start();
        x_ends(&site, state, "none");
        daemon.stop();
        let right: &[&str] = if on_takeover == "discard" { &["y"] } else { &["x", "y"] };
        assert_eq!(subjects(&server), right, "{on_takeover}");
    }
}

// ── H79 ─────────────────────────────────────────────────────────────────────────────────────────────

fn keyed(site: &Site, token: i64, total: i64) -> Result<usize, String> {
    let sql = "INSERT INTO outbox(scope, token, key, kind, destination, payload) VALUES ('s', ?1, 'ord-1', 'webhook', 'billing', ?2)";
    let payload = format!("{{\"total\":{total}}}");
    site.connect().execute(sql, rusqlite::params![token, payload]).map_err(|error| error.to_string())
}

fn by_seq(site: &Site) -> Vec<String> {
    site.statuses().into_iter().map(|status| format!("{} {}", status.seq, status.state)).collect()
}

/// H79: a superseded command gives its key back, to the very insert that took over.
#[test]
fn h79_a_key_is_given_back_to_the_one_who_takes_over() {
    let site = Site::new();
    policy(&site, "s", "discard");
    assert_eq!(keyed(&site, 7, 5), Ok(1));
    assert_eq!(keyed(&site, 8, 5), Ok(1));
    assert_eq!(by_seq(&site), ["1 dead/superseded", "2 pending"]);
    assert_eq!(keyed(&site, 8, 5), Ok(0));
    assert!(keyed(&site, 8, 6).unwrap_err().contains("FP010"));
    assert_eq!(keyed(&site, 9, 6), Ok(1));
    assert_eq!(by_seq(&site), ["1 dead/superseded", "2 dead/superseded", "3 pending"]);
}

/// H79, the other ends: expired with effect none gives the key back; refused and cancelled keep it.
#[test]
fn h79_every_other_end_keeps_the_key() {
    let server = Server::start(|_| Reply::status(422));
    for (end, free) in [("dead/expired", true), ("dead/refused", false), ("dead/cancelled", false)] {
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        let expires = if free { "1700000000000" } else { "NULL" };
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, key, kind, destination, payload, expires_at_ms)
             VALUES ('a', 's', 7, 'ord-1', 'webhook', 'billing', '{{\"total\":5}}', {expires})"
        ));
        if end == "dead/cancelled" {
            done(&site, &["cancel", "a", "--reason", "x"]);
        }
        site.drain();
        assert_eq!(site.state("a"), (end.into(), "none".into()));
        assert_eq!(keyed(&site, 7, 5), Ok(usize::from(free)), "{end}");
    }
}

// ── H81 ─────────────────────────────────────────────────────────────────────────────────────────────

/// A site where X is refused and W uses up its tries, both under `block`, and one lane goes on; the
/// endpoint can be repaired.
fn blocked() -> (Server, Site, Arc<AtomicBool>) {
    let repaired = Arc::new(AtomicBool::new(false));
    let works = Arc::clone(&repaired);
    let server = Server::start(move |request| {
        Reply::status(match request.header("webhook-id") {
            Some("x") if !works.load(Ordering::SeqCst) => 422,
            Some("w") if !works.load(Ordering::SeqCst) => 500,
            _ => 200,
        })
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "on_dead = \"block\"\nmax_attempts = 2"));
    for id in ["x", "y", "z"] {
        site.webhook(id, "s", 5, "billing");
    }
    site.webhook("w", "t", 5, "billing");
    site.webhook("w2", "t", 5, "billing");
    site.webhook("free", "u", 5, "billing");
    let daemon = site.start();
    site.wait_for_state("x", "parked/refused");
    site.wait_for_state("w", "parked/exhausted");
    site.wait_for_state("free", "delivered");
    daemon.stop();
    (server, site, repaired)
}

/// H81: a blocked head stays the head, also after a restart, and is seen with its age; other lanes go on.
#[test]
fn h81_a_blocked_head_stays_the_head() {
    let (_server, site, _) = blocked();
    assert_eq!(site.state("x").1, "none");
    assert_eq!(site.state("w").1, "possible");
    site.webhook("free2", "u", 5, "billing");
    site.drain();
    assert_eq!(site.status("free2").state, "delivered");
    for id in ["y", "z", "w2"] {
        assert_eq!(site.status(id).attempt_no, 0, "{id} waits, also after a restart");
    }
    let status = done(&site, &["status"]);
    assert!(status.contains("parked") && status.contains('x') && status.contains("fencepost adopt"), "{status}");
    let json: serde_json::Value = serde_json::from_str(&done(&site, &["status", "--json"])).unwrap();
    let behind: Vec<_> =
        json["blocked"].as_array().unwrap().iter().map(|head| (&head["id"], &head["behind"])).collect();
    assert_eq!(behind.len(), 2, "{json:#}");
    assert!(json["blocked"].as_array().unwrap().iter().all(|head| head["updated_ms"].is_i64()), "{json:#}");
    let show = done(&site, &["show", "y"]);
    assert!(show.contains("the head is x, parked for"), "{show}");
    for verb in ["adopt", "discard"] {
        refused(&site, &[verb, "x", "--scope", "s", "--token", "4"], "FP001");
    }
    assert_eq!(site.status("x").state, "parked/refused");
}

/// H81 (a): adopted after the repair it goes out at its place, with fresh tries and new numbers.
#[test]
fn h81a_an_adopted_head_goes_out_at_its_place() {
    let (server, site, repaired) = blocked();
    repaired.store(true, Ordering::SeqCst);
    done(&site, &["adopt", "w", "--scope", "t", "--token", "5"]);
    let daemon = site.start();
    site.wait_for_state("w2", "delivered");
    done(&site, &["adopt", "x", "--reason", "repaired"]);
    let x = site.wait_for_state("x", "delivered");
    site.wait_for_state("z", "delivered");
    daemon.stop();
    assert_eq!((x.tries, x.attempt_no), (1, 2));
    assert_eq!(site.status("w").attempt_no, 3);
    let order: Vec<String> = ids(&server.requests()).into_iter().filter(|id| "xyz".contains(id.as_str())).collect();
    assert_eq!(order, ["x", "x", "y", "z"]);
}

/// H81 (b): discarded it ends with its own reason, seen with who and why, and its lane goes on.
#[test]
fn h81b_a_discarded_head_ends_with_its_own_reason() {
    let (server, site, _) = blocked();
    done(&site, &["discard", "x", "w", "--reason", "sent by hand", "--who", "ann"]);
    assert_eq!(site.state("x"), ("dead/refused".into(), "none".into()));
    assert_eq!(site.state("w"), ("dead/exhausted".into(), "possible".into()));
    let show = done(&site, &["show", "x"]);
    assert!(show.contains("ann: discard") && show.contains("sent by hand"), "{show}");
    site.drain();
    let order: Vec<String> = ids(&server.requests()).into_iter().filter(|id| "xyz".contains(id.as_str())).collect();
    assert_eq!(order, ["x", "y", "z"]);
    assert_eq!(site.status("w2").state, "delivered");
}

// ── Pause ───────────────────────────────────────────────────────────────────────────────────────────

/// What is paused is not begun, by any start of the dispatcher, until it is resumed; the rest goes on.
#[test]
fn a_pause_survives_restarts() {
    for (what, free) in
        [(&["--destination", "webhook/billing"][..], true), (&["--scope", "held"], true), (&["--all"], false)]
    {
        let server = Server::start(|_| Reply::status(200));
        let site = Site::new();
        site.configure(&format!("{}{}", webhook("billing", &server.url(), ""), webhook("other", &server.url(), "")));
        done(&site, &[&["pause", "--reason", "maintenance", "--who", "ann"][..], what].concat());
        site.webhook("held", "held", 1, "billing");
        for restart in 1..=2 {
            let id = format!("free{restart}");
            site.webhook(&id, "free", 1, "other");
            site.drain();
            assert_eq!(site.status("held").attempt_no, 0, "{what:?}");
            assert_eq!(site.status(&id).state == "delivered", free, "{what:?}");
        }
        let seen = [done(&site, &["status"]), done(&site, &["show", "held"]), done(&site, &["list"])];
        assert!(seen.iter().all(|text| text.contains("paused")), "{what:?}: {seen:?}");
        assert!(seen[..2].iter().all(|text| text.contains("maintenance") && text.contains("ann")), "{seen:?}");
        let daemon = site.start();
        done(&site, &[&["resume", "--reason", "done"][..], what].concat());
        site.wait_for_state("held", "delivered");
        site.wait_for_state("free2", "delivered");
        daemon.stop();
        refused(&site, &[&["resume", "--reason", "again"][..], what].concat(), "not paused");
        let audit = "SELECT group_concat(verb || ':' || reason || ':' || (before IS NULL) || (after IS NULL), ' ') FROM outbox_audit";
        assert_eq!(site.value::<String>(audit), "pause:maintenance:10 resume:done:01");
    }
}

/// Heads of a paused scope, however many and however old, take no place of their destination from others.
#[test]
fn what_is_paused_takes_no_place_from_others() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "max_in_flight = 1"));
    for lane in 0..30 {
        site.sql(&format!(
            "INSERT INTO outbox(scope, token, lane, kind, destination, payload) VALUES ('s', 1, 'l{lane}', 'webhook', 'billing', '{{}}')"
        ));
    }
    done(&site, &["pause", "--scope", "s", "--reason", "x"]);
    for n in 0..5 {
        site.webhook(&format!("n{n}"), &format!("t{n}"), 1, "billing");
    }
    site.drain();
    assert_eq!(server.requests().len(), 5);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'pending'"), 30);
}

/// A resume wakes the dispatcher, which would else look again a second after the last commit.
#[test]
fn a_resume_wakes_the_dispatcher_at_once() {
    const ROUNDS: usize = 5;
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&format!("[dispatcher]\npoll_interval = \"30s\"\n{}", webhook("billing", &server.url(), "")));
    let daemon = site.start();
    for round in 1..=ROUNDS {
        done(&site, &["pause", "--destination", "webhook/billing", "--reason", "x"]);
        site.webhook(&format!("w{round}"), "s", 1, "billing");
        done(&site, &["resume", "--destination", "webhook/billing", "--reason", "x"]);
        server.wait_for(round);
    }
    daemon.stop();
    let waited = "SELECT (SELECT sum(begun_ms) FROM outbox_attempt) - (SELECT sum(at_ms) FROM outbox_audit WHERE verb = 'resume')";
    let waited: i64 = site.value(waited);
    assert!(waited < 2_500, "{ROUNDS} resumes took {waited} ms");
}

/// A pause with an end ends by itself.
#[test]
fn a_pause_with_an_end_ends_by_itself() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.webhook("a", "s", 1, "billing");
    refused(&site, &["pause", "--all", "--reason", "x", "--until", "2020-01-01T00:00:00Z"], "over already");
    done(&site, &["pause", "--all", "--reason", "x", "--for", "1h"]);
    let said = done(&site, &["pause", "--all", "--reason", "shorter", "--for", "1500ms"]);
    assert!(said.contains("everything is paused until"), "{said}");
    let until: i64 = site.value("SELECT until_ms FROM outbox_pause");
    let daemon = site.start();
    site.wait_for_state("a", "delivered");
    daemon.stop();
    let begun: i64 = site.value("SELECT begun_ms FROM outbox_attempt");
    assert!(begun >= until, "begun {} ms before the end", until - begun);
    assert!(!done(&site, &["status"]).contains("paused"));
}

// ── Rebase ──────────────────────────────────────────────────────────────────────────────────────────

/// H05: a lease service that was restored starts again from low numbers. All are refused and counted,
/// until an operator begins a new era; then the old name, or none, is refused. Order is by seq over eras.
#[test]
fn h05_a_rebase_begins_a_new_era() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.sql(
        "INSERT INTO outbox(id, scope, token, source, kind, destination, payload) VALUES ('old', 's', 5000, 'etcd-a', 'webhook', 'billing', '{}')",
    );
    let enqueue = |id: &str, token: &str, source: &[&str]| {
        let base = ["enqueue", "webhook", "billing", "--scope", "s", "--payload", "{}", "--id", id, "--token", token];
        fencepost(&site, &[&base[..], source].concat())
    };
    for token in 1..=10 {
        let (code, said) = enqueue(&format!("n{token}"), &token.to_string(), &["--source", "etcd-a"]);
        assert_eq!(code, Some(65), "{said}");
        assert!(said.contains("FP001") && said.contains("5000"), "{said}");
    }
    let show = done(&site, &["scope", "show", "s"]);
    assert!(show.contains("10 times") && show.contains("token 10 against 5000"), "{show}");
    refused(&site, &["scope", "rebase", "s", "--source", "etcd-a", "--reason", "x"], "new name");
    refused(
        &site,
        &["scope", "rebase", "s", "nobody", "--source", "etcd-b", "--reason", "x"],
        "there is no scope nobody",
    );
    let said = done(&site, &["scope", "rebase", "s", "--source", "etcd-b", "--reason", "restored", "--who", "ann"]);
    assert!(said.contains("era 1") && said.contains("5000"), "{said}");
    assert_eq!(enqueue("new", "10", &["--source", "etcd-b"]).0, Some(0));
    for source in [&["--source", "etcd-a"][..], &[]] {
        let (code, said) = enqueue("zombie", "5001", source);
        assert!(code == Some(65) && said.contains("FP014"), "{source:?}: {said}");
    }
    refused(&site, &["scope", "rebase", "s", "--source", "etcd-a", "--reason", "back"], "new name");
    site.drain();
    assert_eq!(ids(&server.requests()), ["old", "new"]);
    let audit = "SELECT who || '|' || reason || '|' || json_extract(before, '$.watermark') || '|' || json_extract(before, '$.source')
        || '|' || json_extract(after, '$.era') || '|' || json_extract(after, '$.source') FROM outbox_audit";
    assert_eq!(site.value::<String>(audit), "ann|restored|5000|etcd-a|1|etcd-b");
}

/// A recalled attempt that is still connecting when its command is pruned, and a new command: the old
/// attempt must not arm or settle what isn't its own. So a number is never given again.
#[test]
fn a_recalled_attempt_never_meets_another_command() {
    let server = smtp::Server::start(smtp::Script::new().hold(smtp::Stage::Banner));
    let site = Site::new();
    site.configure(&relay("main", server.port(), ""));
    site.email("old", "a", 1, "main");
    let daemon = site.start();
    wait_until("the old one connects", 30, || server.connections() == 1);
    let run = |verb: &str, arguments: &[&str]| {
        let ran = site.command(verb).args(arguments).output().unwrap();
        assert!(ran.status.success(), "{verb}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    run("cancel", &["old", "--reason", "not wanted"]);
    site.sql("UPDATE outbox_state SET updated_ms = 100000000000");
    run("prune", &["--dead-older-than", "1s"]);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox"), 0);
    site.email("new", "b", 1, "main");
    wait_until("the new one connects too", 30, || server.connections() == 2);
    server.release();
    let new = site.wait_for_state("new", "delivered");
    daemon.stop();
    let subjects: Vec<String> = server.mails().iter().map(|mail| mail.header("Subject").unwrap()).collect();
    assert_eq!(subjects, ["new"]);
    assert_eq!((new.attempt_no, new.tries), (1, 1));
}
