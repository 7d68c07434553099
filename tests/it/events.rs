//! The outcome feed: what became of commands, in commit order, for readers with a cursor of their own.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use fencepost::sqlite::events;
use serde_json::Value;

use crate::support::daemon::{Site, webhook};
use crate::support::http::{Reply, Server};

/// A site where `good` is delivered, `bad` refused and `odd` in doubt, in this order.
fn three_outcomes() -> (Site, Server) {
    let server = Server::start(|request| match request.header("webhook-id") {
        Some("good") => Reply::status(200),
        Some("bad") => Reply::status(410),
        _ => Reply::close(),
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "on_unknown = \"hold\""));
    for id in ["good", "bad", "odd"] {
        site.webhook(id, "s", 1, "billing");
    }
    site.drain();
    (site, server)
}

fn told(site: &Site, after: i64, limit: u32) -> Vec<(i64, String, String)> {
    let found = events(&site.connect(), after, limit).unwrap();
    found.into_iter().map(|event| (event.n, event.event, event.id)).collect()
}

/// Goal: a reader with a cursor sees each outcome once, whatever the size of its pages, and what comes
/// later comes behind what it has read.
#[test]
fn a_cursor_meets_every_outcome_once() {
    let (site, _server) = three_outcomes();
    let all = told(&site, 0, 100);
    let words: Vec<(&str, &str)> = all.iter().map(|(_, event, id)| (event.as_str(), id.as_str())).collect();
    assert_eq!(words, [("delivered", "good"), ("dead", "bad"), ("in_doubt", "odd")]);
    let (mut after, mut paged) = (0, Vec::new());
    while let [event] = told(&site, after, 1).as_slice() {
        after = event.0;
        paged.push(event.clone());
    }
    assert_eq!(paged, all);
    let answer = ["odd", "not-delivered", "--reason", "the receiver has no such id"];
    assert!(site.command("resolve").args(answer).output().unwrap().status.success());
    let later = told(&site, after, 100);
    assert!(
        matches!(later.as_slice(), [(n, event, id)] if *n > after && event == "resumed" && id == "odd"),
        "{later:?}"
    );
}

/// A transaction that was rolled back leaves no row, and its number is not missed by anybody.
#[test]
fn a_rollback_tells_nothing() {
    let (site, _server) = three_outcomes();
    let before = told(&site, 0, 100);
    let mut connection = site.connect();
    let transaction = connection.transaction().unwrap();
    transaction
        .execute_batch("INSERT INTO outbox_event(at_ms, event, id, scope, lane, seq, effect) VALUES (1, 'dead', 'x', 's', '', 9, 'none')")
        .unwrap();
    assert_eq!(events(&transaction, 0, 100).unwrap().len(), before.len() + 1);
    assert_eq!(told(&site, 0, 100), before, "nobody else sees it");
    transaction.rollback().unwrap();
    assert_eq!(told(&site, 0, 100), before);
}

#[test]
fn the_command_prints_a_page_of_the_feed() {
    let (site, _server) = three_outcomes();
    let output = site.command("events").args(["--after", "1", "--json"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ids: Vec<&str> = page.as_array().unwrap().iter().map(|event| event["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["bad", "odd"]);
    assert_eq!((&page[0]["reason"], &page[0]["seq"]), (&"refused".into(), &"2".into()));
    let text = site.command("events").args(["--limit", "1"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("delivered") && text.contains("good") && !text.contains("bad"), "{text}");
    let nothing = site.command("events").args(["--after", "99"]).output().unwrap();
    assert_eq!(String::from_utf8(nothing.stdout).unwrap(), "nothing has happened there\n");
}

/// `--follow` tells what is there, then what happens, a line of JSON each.
#[test]
fn the_command_follows_the_feed() {
    let (site, _server) = three_outcomes();
    let mut command = site.command("events");
    let mut following = command.args(["--follow", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    for id in ["good", "bad", "odd"] {
        assert_eq!(next()["id"], id);
    }
    let answer = ["odd", "delivered", "--reason", "the receiver has it"];
    assert!(site.command("resolve").args(answer).output().unwrap().status.success());
    let event = next();
    assert_eq!((&event["id"], &event["event"]), (&"odd".into(), &"delivered".into()));
    following.kill().unwrap();
    following.wait().unwrap();
}
