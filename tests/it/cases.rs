//! Cases that go through the whole: contract, dispatcher, sender. The parts of each that one layer can
//! show alone stand with that layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::daemon::{Site, relay, webhook};
use crate::support::http::{Reply, Server};
use crate::support::smtp;

/// H01, on the wire: nothing of the stale worker goes out, everything of its successor does.
#[test]
fn h01_nothing_of_a_stale_worker_is_sent() {
    let server = Server::start(|_| Reply::status(200));
    let mails = smtp::Server::start(smtp::Script::new());
    let site = Site::new();
    site.configure(&format!("{}{}", webhook("billing", &server.url(), ""), relay("main", mails.port(), "")));
    site.sql("CREATE TABLE orders(note TEXT)");
    site.webhook("a7", "acct-7", 7, "billing");
    site.drain();
    site.webhook("b8", "acct-7", 8, "billing");
    site.drain();
    let stale = site.connect().execute_batch(
        "BEGIN IMMEDIATE; INSERT INTO orders VALUES ('stale');
         INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('acct-7', 7, 'webhook', 'billing', '{}'); COMMIT;",
    );
    assert!(stale.unwrap_err().to_string().contains("FP001"));
    let by_cli = site
        .command("enqueue")
        .args(["webhook", "billing", "--scope", "acct-7", "--token", "7", "--payload", "{}"])
        .output()
        .unwrap();
    assert_eq!(by_cli.status.code(), Some(65));
    let text = String::from_utf8_lossy(&by_cli.stderr).into_owned();
    assert!(text.contains('7') && text.contains('8') && text.contains("FP001"), "{text}");
    site.webhook("b8b", "acct-7", 8, "billing");
    site.webhook("c9", "acct-7", 9, "billing");
    site.webhook("other", "acct-8", 1, "billing");
    site.drain();
    let mut ids: Vec<String> = server.requests().iter().map(|r| r.header("webhook-id").unwrap().to_owned()).collect();
    ids.sort();
    assert_eq!(ids, ["a7", "b8", "b8b", "c9", "other"]);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM orders"), 0);
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox"), 5);
    let counted: (i64, i64, i64) = site
        .connect()
        .query_row("SELECT token, watermark, count FROM outbox_refusal WHERE scope = 'acct-7'", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })
        .unwrap();
    assert_eq!(counted, (7, 8, 1), "the CLI reports its refusal; plain SQL sees its own");
    assert!(mails.mails().is_empty());
}

/// H02 (b), on the wire: two holders without a name share a token, and their commands go out in commit
/// order, one at a time.
#[test]
fn h02_equal_tokens_without_holders_go_out_in_commit_order() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (running, greatest) = (Arc::clone(&now), Arc::clone(&most));
    let server = Server::start(move |_| {
        let parallel = running.fetch_add(1, Ordering::SeqCst) + 1;
        greatest.fetch_max(parallel, Ordering::SeqCst);
        std::thread::yield_now();
        running.fetch_sub(1, Ordering::SeqCst);
        Reply::status(200)
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    for id in ["w1a", "w2a", "w1b", "w2b"] {
        site.webhook(id, "s", 6, "billing");
    }
    site.drain();
    let ids: Vec<String> = server.requests().iter().map(|r| r.header("webhook-id").unwrap().to_owned()).collect();
    assert_eq!(ids, ["w1a", "w2a", "w1b", "w2b"]);
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

/// H23, on the wire: what is due a minute ago is sent now, what is due in an hour waits, whatever the
/// daemon's time zone is.
#[test]
fn h23_due_times_do_not_depend_on_the_time_zone() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    for (id, offset) in [("past", "-60 seconds"), ("future", "+1 hour")] {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload, not_before_ms)
             VALUES ('{id}', '{id}', 1, 'webhook', 'billing', '{{}}', CAST(strftime('%s','now','{offset}') AS INTEGER) * 1000)"
        ));
    }
    let daemon = site.run_with(&["--drain"], &[("TZ", "Asia/Kolkata")]);
    assert!(daemon.wait().success());
    assert_eq!((site.status("past").state.as_str(), site.status("future").attempt_no), ("delivered", 0));
}

/// H24, on the wire: after the newest rows are gone, nothing of them comes back: no number, no id, no seq.
#[test]
fn h24_a_row_number_that_comes_back_is_another_command() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let insert =
        "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('s', 1, 'webhook', 'billing', '{}')";
    for _ in 0..3 {
        site.sql(insert);
    }
    site.drain();
    site.sql("UPDATE outbox_state SET updated_ms = 100000000000");
    let pruned = site.command("prune").args(["--delivered-older-than", "1s"]).output().unwrap();
    assert!(pruned.status.success(), "{pruned:?}");
    site.connect().execute_batch("VACUUM").unwrap();
    assert_eq!(site.value::<i64>("SELECT count(*) FROM outbox"), 0);
    site.sql(insert);
    site.drain();
    let requests = server.requests();
    let ids: std::collections::BTreeSet<&str> = requests.iter().map(|r| r.header("webhook-id").unwrap()).collect();
    assert_eq!((requests.len(), ids.len()), (4, 4), "every id differs");
    assert_eq!(requests[3].header("Fencepost-Seq"), Some("4"), "seq goes on");
    assert_eq!(site.value::<i64>("SELECT n FROM outbox"), 4, "not even the number comes back");
}

/// H34, through the daemon: the reason is visible at the command; a URL destination ends, a named one
/// waits without a try.
#[test]
fn h34_closed_addresses_wait_or_end() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    let urls = [
        format!("http://127.0.0.1:{}/", server.port()),
        "http://10.0.0.1/".into(),
        "http://172.16.0.1/".into(),
        "http://192.168.0.1/".into(),
        "http://169.254.169.254/".into(),
    ];
    let mut config = "[webhook_urls]\nsecrets = []\n".to_owned();
    for (n, url) in urls.iter().enumerate() {
        config += &format!(
            "[webhook.named{n}]\nurl = \"{url}\"\nsecrets = []\nbackoff = {{ base = \"1h\", cap = \"1h\" }}\n"
        );
        site.webhook(&format!("url{n}"), &format!("u{n}"), 1, url);
        site.webhook(&format!("named{n}"), &format!("n{n}"), 1, &format!("named{n}"));
    }
    site.configure(&config);
    site.drain();
    for n in 0..urls.len() {
        assert_eq!(site.state(&format!("url{n}")), ("dead/refused".into(), "none".into()), "url{n}");
        let named = site.status(&format!("named{n}"));
        assert_eq!((named.state.as_str(), named.effect.as_str(), named.tries), ("pending", "none", 0), "named{n}");
        for id in [format!("url{n}"), format!("named{n}")] {
            assert!(site.evidence(&id).contains("address not allowed"), "{}", site.evidence(&id));
        }
    }
    assert_eq!(server.connections(), 0);
    site.configure(
        &config.replace(
            "[webhook_urls]\nsecrets = []",
            "[webhook_urls]\nsecrets = []\nallow_networks = [\"127.0.0.0/8\"]",
        ),
    );
    site.webhook("open", "open", 1, &urls[0]);
    site.webhook("shut", "shut", 1, &urls[1]);
    site.drain();
    assert_eq!(site.status("open").state, "delivered");
    assert_eq!(site.status("shut").state, "dead/refused");
    assert_eq!(server.requests().len(), 1);
}

/// H37, through the daemon, under `resend` and under `hold`.
#[test]
fn h37_status_codes_become_states() {
    let answer = |status: u16| move |_: &crate::support::http::Received| Reply::status(status);
    for (status, under_resend, under_hold, effect) in [
        (204, "delivered", "delivered", "done"),
        (304, "dead/refused", "dead/refused", "none"),
        (404, "dead/refused", "dead/refused", "none"),
        (429, "pending", "pending", "none"),
        (409, "pending", "in_doubt", "possible"),
        (500, "pending", "in_doubt", "possible"),
    ] {
        let server = Server::start(answer(status));
        for (on_unknown, state) in [("resend", under_resend), ("hold", under_hold)] {
            let site = Site::new();
            site.configure(
                &webhook("billing", &server.url(), &format!("on_unknown = \"{on_unknown}\""))
                    .replace("\"20ms\", cap = \"50ms\"", "\"1h\", cap = \"1h\""),
            );
            site.webhook("w", "s", 1, "billing");
            let daemon = site.start();
            site.wait_for_first_attempt("w", state);
            daemon.stop();
            assert_eq!(site.state("w"), (state.into(), effect.into()), "{status} under {on_unknown}");
            if effect != "done" {
                assert!(site.evidence("w").contains(&status.to_string()), "{}", site.evidence("w"));
            }
        }
    }
}

/// H41, through the daemon: in doubt, not sent again, its lane waits; each answer of a person does what it
/// says, and what is sent again is the same mail.
#[test]
fn h41_a_mail_whose_answer_is_lost_waits_for_a_person() {
    for (answer, state, arrivals) in
        [("delivered", "delivered", 1), ("not-delivered", "delivered", 2), ("given-up", "dead/abandoned", 1)]
    {
        let server = smtp::Server::start(
            smtp::Script::new().dots([smtp::Dot::Close, smtp::Dot::Reply("250 2.0.0 queued as X".into())]),
        );
        let site = Site::new();
        site.configure(&relay("main", server.port(), ""));
        site.email("m", "s", 1, "main");
        site.email("behind", "s", 1, "main");
        site.drain();
        assert_eq!(site.state("m"), ("in_doubt".into(), "possible".into()));
        assert!(site.evidence("m").contains("end of data sent, no answer"), "{}", site.evidence("m"));
        assert_eq!(site.status("behind").attempt_no, 0, "its lane waits");
        site.drain();
        assert_eq!(server.mails().len(), 1, "not sent again by itself");
        let check = site.command("status").args(["--check", "--max-in-doubt", "0"]).output().unwrap();
        assert_eq!(check.status.code(), Some(1), "visible and countable");
        let resolved =
            site.command("resolve").args(["m", answer, "--reason", "asked the relay's log"]).output().unwrap();
        assert!(resolved.status.success(), "{}", String::from_utf8_lossy(&resolved.stderr));
        site.drain();
        assert_eq!(site.status("m").state, state, "{answer}");
        assert_eq!(site.status("behind").state, "delivered", "{answer}");
        let mails = server.mails();
        let of_m: Vec<_> = mails.iter().filter(|mail| mail.header("Subject").as_deref() == Some("m")).collect();
        assert_eq!(of_m.len(), arrivals, "{answer}");
        assert!(of_m.iter().all(|mail| mail.raw == of_m[0].raw), "the same bytes, Message-ID and Date");
        let again = site.command("resolve").args(["m", answer, "--reason", "again"]).output().unwrap();
        assert_eq!(again.status.code(), Some(65), "only what is in doubt can be resolved");
    }
}

/// H41 under `resend`: sent again by itself, the same mail.
#[test]
fn h41_under_resend_the_same_mail_is_sent_again() {
    let server = smtp::Server::start(smtp::Script::new().dots([smtp::Dot::Reset, smtp::Dot::Reply("250 ok".into())]));
    let site = Site::new();
    site.configure(&relay("main", server.port(), "on_unknown = \"resend\""));
    site.email("m", "s", 1, "main");
    let daemon = site.start();
    site.wait_for_state("m", "delivered");
    daemon.stop();
    let mails = server.mails();
    assert_eq!(mails.len(), 2);
    assert_eq!(mails[0].raw, mails[1].raw);
}

/// H42, through the daemon: a negative answer to the final dot is definite.
#[test]
fn h42_a_negative_answer_to_the_dot_is_definite() {
    for (reply, state) in [
        ("451 4.4.2 timeout waiting for data", "pending"),
        ("452 4.3.1 insufficient storage", "pending"),
        ("552 5.3.4 message too big", "dead/refused"),
        ("554 5.7.1 rejected by content filter", "dead/refused"),
    ] {
        let server = smtp::Server::start(smtp::Script::new().dots([smtp::Dot::Reply(reply.into())]));
        let site = Site::new();
        site.configure(&relay("main", server.port(), "").replace("\"20ms\", cap = \"50ms\"", "\"1h\", cap = \"1h\""));
        site.email("m", "s", 1, "main");
        let daemon = site.start();
        site.wait_for_first_attempt("m", state);
        daemon.stop();
        let m = site.status("m");
        assert_eq!((m.state.as_str(), m.effect.as_str(), m.tries), (state, "none", 1), "{reply}");
        assert!(site.evidence("m").contains(&reply[..3]));
    }
}

/// H44, the default wait: a greylisting server's first retry comes after 5 to 15 minutes.
#[test]
fn h44_the_first_retry_of_a_mail_suits_greylisting() {
    let server = smtp::Server::start(smtp::Script::new().reply(smtp::Stage::Rcpt, "450 4.2.0 greylisted"));
    let site = Site::new();
    site.configure(&format!("[email.main]\nhost = \"127.0.0.1\"\nport = {}\ntls = \"none\"\n", server.port()));
    site.email("m", "s", 1, "main");
    let daemon = site.start();
    site.wait_for_first_attempt("m", "pending");
    daemon.stop();
    let wait: i64 = site.value("SELECT due_ms - set_ms FROM outbox_state");
    assert!((5 * 60_000..=15 * 60_000).contains(&wait), "{wait}");
}

/// H66, on the wire: an ORM that names every column sends one command, once, and JSON null is no header.
#[test]
fn h66_explicit_nulls_are_sent_as_not_given() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    site.sql(
        "INSERT INTO outbox(id,holder,source,lane,key,headers,not_before_ms,expires_at_ms,traceparent,payload_bytes,scope,token,kind,destination,payload)
           VALUES(NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'a',1,'webhook','billing','{}');
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('b',1,'webhook','billing','{}','null');
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('c',1,'webhook','billing','{}',' null ');
         INSERT INTO outbox(scope,token,kind,destination,payload,headers) VALUES('d',1,'webhook','billing','{}','[]');
         INSERT INTO outbox(scope,token,kind,destination,payload_bytes) VALUES('e',1,'webhook','billing',X'7b7d');",
    );
    site.drain();
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    assert!(requests.iter().all(|request| request.body == b"{}" && !request.header("webhook-id").unwrap().is_empty()));
    let states: Vec<String> = site.statuses().into_iter().map(|status| status.state).collect();
    assert_eq!(states, ["delivered", "delivered", "delivered", "dead/invalid", "delivered"]);
}

/// H67, on the wire: a scope of any letters arrives percent-encoded and decodes to the stored bytes.
#[test]
fn h67_scopes_and_lanes_arrive_percent_encoded() {
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    let names = ["Straße 7", "order/17", "100%", "a b", "用户"];
    for name in names {
        site.connect()
            .execute(
                "INSERT INTO outbox(scope, token, lane, kind, destination, payload) VALUES (?1, 1, ?1, 'webhook', 'billing', '{}')",
                [name],
            )
            .unwrap();
    }
    site.drain();
    let decode = |text: &str| {
        let mut bytes = Vec::new();
        let mut rest = text.as_bytes();
        while let [first, tail @ ..] = rest {
            if *first == b'%' {
                bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
                rest = &tail[2..];
            } else {
                bytes.push(*first);
                rest = tail;
            }
        }
        String::from_utf8(bytes).unwrap()
    };
    for header in ["Fencepost-Scope", "Fencepost-Lane"] {
        let mut seen: Vec<String> = server.requests().iter().map(|r| decode(r.header(header).unwrap())).collect();
        seen.sort();
        let mut expected = names.map(str::to_owned);
        expected.sort();
        assert_eq!(seen, expected);
    }
}
