//! `fencepost why`: what a command waits for, now and at a past moment, in plain words.

use serde_json::Value;

use crate::support::daemon::{Site, webhook};
use crate::support::http::{Reply, Server};

/// Answers with its text and its JSON.
fn why(site: &Site, arguments: &[&str]) -> (String, Value) {
    let run = |json: bool| {
        let mut command = site.command("why");
        command.args(arguments).args(json.then_some("--json"));
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    };
    (run(false), serde_json::from_str(&run(true)).unwrap())
}

/// The reason, and words that the text must hold.
fn says(site: &Site, arguments: &[&str], because: &str, words: &[&str]) -> Value {
    let (text, value) = why(site, arguments);
    assert_eq!(value["because"], because, "{arguments:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{arguments:?} doesn't say {word:?}: {text}");
    }
    value
}

fn to(server: &Server, name: &str, more: &str) -> String {
    webhook(name, &format!("http://127.0.0.1:{}/{name}", server.port()), more)
        .replace("base = \"20ms\", cap = \"50ms\"", "base = \"1h\", cap = \"1h\"")
}

/// One that answers by the name of the destination.
fn receiver() -> Server {
    Server::start(|request| match request.target.as_str() {
        "/doubt" => Reply::status(500),
        "/later" => Reply::status(429).header("retry-after", "3600"),
        "/refuse" | "/block" => Reply::status(404),
        _ => Reply::status(200),
    })
}

/// Every state that a dispatcher leaves behind, with its reason, what was seen, and the command line.
#[test]
fn each_state_is_told_with_what_may_be_done() {
    let server = receiver();
    let site = Site::new();
    site.configure(
        &[
            to(&server, "good", ""),
            to(&server, "later", ""),
            to(&server, "doubt", "on_unknown = \"hold\""),
            to(&server, "refuse", ""),
            to(&server, "block", "on_dead = \"block\""),
        ]
        .join("\n"),
    );
    for (id, scope, destination) in [
        ("delivered", "a", "good"),
        ("backed", "b", "later"),
        ("doubtful", "c", "doubt"),
        ("behind", "c", "good"),
        ("third", "c", "good"),
        ("refused", "d", "refuse"),
        ("blocked", "e", "block"),
        ("lost", "f", "nowhere"),
    ] {
        site.webhook(id, scope, 1, destination);
    }
    site.sql(
        "UPDATE outbox_policy SET on_takeover = 'review';
         INSERT INTO outbox(id, scope, token, kind, destination, payload, not_before_ms) VALUES ('early', 'g', 1, 'webhook', 'good', '', 9000000000000);
         INSERT INTO outbox(id, scope, token, kind, destination, payload, expires_at_ms) VALUES ('expired', 'h', 1, 'webhook', 'good', '', 100000000001);
         INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('odd', 'i', 1, 'pigeon', 'good', '');
         INSERT INTO outbox(id, scope, token, kind, destination, payload, not_before_ms) VALUES ('older', 'j', 1, 'webhook', 'good', '', 9000000000000);
         INSERT INTO outbox_seal(scope, token) VALUES ('j', 2);
         INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('paused', 'k', 1, 'webhook', 'good', '');
         INSERT INTO outbox_pause VALUES ('', '', 'k', NULL, 1700000000000, 'ann', 'an audit')",
    );
    says(&site, &["odd"], "ends_invalid", &["knows the kind pigeon"]);
    says(&site, &["expired"], "expires", &["its time was over"]);
    site.drain();
    says(&site, &["delivered"], "delivered", &["attempt 1 of 1", "status 200"]);
    says(&site, &["backed"], "back_off", &["it is tried again", "deferred", "429", "fencepost cancel backed"]);
    let doubt = ["nobody knows", "500", "fencepost resolve doubtful delivered --reason", "not-delivered", "given-up"];
    says(&site, &["doubtful"], "in_doubt", &doubt);
    let behind =
        says(&site, &["behind"], "behind", &["waits behind doubtful", "in_doubt for", "fencepost resolve doubtful"]);
    assert_eq!(behind["head"]["because"], "in_doubt");
    says(&site, &["third"], "behind", &["waits behind doubtful", "and 1 more between them"]);
    says(&site, &["refused"], "dead", &["refused", "404", "certainly nothing happened", "fencepost reissue refused"]);
    says(
        &site,
        &["blocked"],
        "parked_block",
        &["refused", "404", "fencepost adopt blocked", "fencepost discard blocked"],
    );
    says(
        &site,
        &["lost"],
        "unknown_destination",
        &["webhook nowhere", "add [webhook.nowhere]", "fencepost config check"],
    );
    says(&site, &["early"], "not_before", &["at the earliest"]);
    let invalid = says(&site, &["odd"], "dead", &["invalid", "what the first look found: no such kind"]);
    assert_eq!(invalid["why"], "no such kind is registered");
    says(&site, &["expired"], "dead", &["expired", "what the first look found: its time is over"]);
    says(&site, &["older"], "parked_review", &["newer holder with token 2", "under token 1", "fencepost adopt older"]);
    says(
        &site,
        &["paused"],
        "paused",
        &["ann paused scope k", "an audit", "until it is resumed", "fencepost resume --scope 'k' --reason TEXT"],
    );
    let (text, lanes) = why(&site, &["--scope", "c"]);
    assert!(lanes[0]["because"] == "in_doubt" && text.contains("doubtful"), "{text}");
    assert!(why(&site, &["--scope", "a"]).0.contains("nothing waits"));
    site.command("resolve").args(["doubtful", "given-up", "--reason", "too late"]).output().unwrap();
    says(&site, &["doubtful"], "dead", &["abandoned", "too late", "something may have happened"]);
    says(&site, &["behind"], "due", &["nothing stands in its way", "fencepost doctor"]);
}

/// H75: what waits behind a delayed head says so, names the head and its due time; other lanes go on.
#[test]
fn h75_a_command_behind_a_delayed_head_says_so() {
    let server = receiver();
    let site = Site::new();
    site.configure(&to(&server, "good", ""));
    site.sql(
        "INSERT INTO outbox(id, scope, lane, token, kind, destination, payload, not_before_ms) VALUES ('in-seven-days', 'order/17', 'survey', 1, 'webhook', 'good', '', 1900000000000);
         INSERT INTO outbox(id, scope, lane, token, kind, destination, payload) VALUES ('second', 'order/17', 'survey', 1, 'webhook', 'good', '');
         INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('shipping', 'order/17', 1, 'webhook', 'good', '')",
    );
    site.drain();
    says(&site, &["shipping"], "delivered", &[]);
    let second = says(
        &site,
        &["second"],
        "behind",
        &["waits behind in-seven-days", "due 2030-03-1", "What the head of its lane waits for"],
    );
    assert_eq!(second["head"]["because"], "not_before");
    let (_, lanes) = why(&site, &["--scope", "order/17"]);
    assert_eq!(lanes.as_array().unwrap().len(), 1);
    assert_eq!(why(&site, &["--scope", "order/17", "--lane", "survey"]).1[0]["id"], "in-seven-days");
    assert_eq!(why(&site, &["--scope", "order/17", "--lane", ""]).1, Value::Array(vec![]));
}

/// While it is being sent: which attempt, since when, by whom, and whether it may have happened.
#[test]
fn an_open_attempt_is_told() {
    let (gate, server) = Server::held();
    let site = Site::new();
    site.configure(&to(&server, "good", "on_unknown = \"hold\""));
    site.webhook("open", "s", 1, "good");
    let daemon = site.start();
    server.wait_for(1);
    says(
        &site,
        &["open"],
        "sending",
        &["attempt 1 is open since", &format!("process {}", daemon.pid()), "may have had its effect"],
    );
    site.sql("UPDATE outbox_attempt SET settled_ms = begun_ms, outcome = 'unknown'");
    says(&site, &["open"], "sending", &["the database is damaged", "fencepost audit"]);
    daemon.kill();
    gate.open();
    site.webhook("begun", "t", 1, "good");
    site.sql(
        "UPDATE outbox_state SET state = 'sending', attempt_no = 1, tries = 1 WHERE scope = 't';
         INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms) SELECT n, 1, 1, 'hold', 1796000000000 FROM outbox WHERE id = 'begun'",
    );
    says(
        &site,
        &["begun"],
        "sending",
        &["it has sent nothing yet", "the next start sends it again", "fencepost cancel begun"],
    );
}

/// A suspect goes alone, and what waits for it says so.
#[test]
fn a_suspect_and_what_waits_for_it() {
    let server = receiver();
    let site = Site::new();
    site.configure(&to(&server, "good", ""));
    site.webhook("killer", "a", 1, "good");
    site.webhook("neighbour", "b", 1, "good");
    site.sql("UPDATE outbox_state SET found_row = 2, found_open = 2 WHERE scope = 'a'");
    says(&site, &["killer"], "alone", &["it is sent alone", "0 attempts now"]);
    says(&site, &["neighbour"], "behind_suspect", &["waits for killer", "fencepost why killer"]);
    site.configure(&to(&server, "other", ""));
    says(&site, &["neighbour"], "unknown_destination", &[]);
}

/// An id that was never there is an error; one that was pruned is an answer; a strange scope is an error.
#[test]
fn ids_that_are_not_there() {
    let site = Site::new();
    site.webhook("kept", "s", 1, "good");
    says(&site, &["kept"], "due", &["give --config"]);
    site.webhook("gone", "t", 1, "good");
    site.sql(
        "UPDATE outbox_state SET state = 'delivered', effect = 'done', updated_ms = 100000000000 WHERE scope = 't'",
    );
    let pruned = site.command("prune").args(["--delivered-older-than", "1s"]).output().unwrap();
    assert!(pruned.status.success(), "{pruned:?}");
    says(&site, &["gone"], "pruned", &["was a command of t", "pruned", "never used again"]);
    for (arguments, code, word) in [
        (vec!["never"], 65, "there is no command with the id never"),
        (vec!["--scope", "never"], 65, "nothing was ever written for the scope never"),
        (vec!["kept", "--at", "+5m"], 64, "for the past"),
        (vec![], 64, "required"),
        (vec!["kept", "--scope", "s"], 64, "cannot be used with"),
    ] {
        let ran = site.command("why").args(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(code) && said.contains(word), "{arguments:?}: {said}");
    }
}

/// A life is told afterwards, moment by moment, from attempts, feed and audit.
#[test]
fn a_past_moment_is_told() {
    let server = receiver();
    let site = Site::new();
    site.configure(&to(&server, "doubt", "on_unknown = \"hold\""));
    site.webhook("first", "s", 3, "doubt");
    site.webhook("second", "s", 4, "doubt");
    site.drain();
    let resolved = site.command("resolve").args(["first", "delivered", "--reason", "they have it"]).output().unwrap();
    assert!(resolved.status.success(), "{resolved:?}");
    let at = |query: &str| site.value::<i64>(query).to_string();
    let inserted = at("SELECT inserted_ms FROM outbox_state WHERE seq = 1");
    let begun = at("SELECT begun_ms FROM outbox_attempt");
    let settled = at("SELECT settled_ms FROM outbox_attempt");
    let before = (inserted.parse::<i64>().unwrap() - 1).to_string();
    says(&site, &["first", "--at", &before], "not_yet", &["had not been inserted"]);
    says(&site, &["first", "--at", "-1h"], "not_yet", &[]);
    let just_before = (begun.parse::<i64>().unwrap() - 1).to_string();
    if just_before >= inserted {
        says(&site, &["first", "--at", &just_before], "waited", &["was the head", "attempt 1 began", "not recorded"]);
        says(&site, &["second", "--at", &just_before], "waited", &["first went before it", "token 4"]);
    }
    if begun < settled {
        says(&site, &["first", "--at", &begun], "sending", &["attempt 1 was open", "it ended"]);
    }
    says(&site, &["first", "--at", &settled], "in_doubt", &["nobody knew"]);
    let answered = at("SELECT at_ms FROM outbox_audit");
    says(&site, &["first", "--at", &answered], "delivered", &["had been delivered", "they have it"]);
    says(&site, &["second", "--at", &settled], "waited", &["first went before it"]);
    site.sql("DELETE FROM outbox_event WHERE n = 1");
    says(&site, &["second", "--at", &settled], "waited", &["cut at its front"]);
}
