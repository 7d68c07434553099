//! What a command's fields become on the wire. A capturing relay is the judge: whatever was put into
//! a field, the mail has exactly the headers that it should have, or it is never sent.

use std::collections::BTreeMap;
use std::process::Command as Process;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fencepost::effect::{Command, Effect, Unsendable};
use fencepost::email::Email;
use fencepost::rules::Outcome;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::email::{command, send, settings};
use crate::support::smtp::{Mail, Script, Server, Stage};

/// A relay, a sender for it, and a runtime to send in.
struct Capture {
    server: Server,
    email: Email,
    runtime: tokio::runtime::Runtime,
}

impl Capture {
    fn start(script: Script) -> Self {
        let server = Server::start(script);
        let email = Email::new(settings(server.port())).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self { server, email, runtime }
    }

    /// What the relay got, or why it was never sent. Then nothing was connected either.
    fn mail(&self, command: &Command) -> Result<Mail, Unsendable> {
        let before = (self.server.connections(), self.server.mails().len());
        let looked = self.email.look(command);
        let report = self.runtime.block_on(send(&self.email, command));
        let mails = self.server.mails();
        match looked {
            Err(reason) => {
                assert_eq!(report.outcome, Outcome::Refused, "{report:?}");
                assert_eq!((self.server.connections(), mails.len()), before, "{reason}");
                Err(reason)
            }
            Ok(()) => {
                assert_eq!(report.outcome, Outcome::Delivered, "{report:?}");
                assert_eq!(mails.len(), before.1 + 1);
                let mail = mails.last().unwrap().clone();
                check_wire(&mail.raw);
                Ok(mail)
            }
        }
    }

    fn payload(&self, payload: &Value) -> Result<Mail, Unsendable> {
        self.mail(&command(payload))
    }
}

/// CRLF ends every line, and none is too long.
fn check_wire(raw: &[u8]) {
    assert!(raw.ends_with(b"\r\n"));
    for line in raw[..raw.len() - 2].split(|b| *b == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        assert!(!line.contains(&b'\r'), "bare CR");
        assert!(line.len() <= 998, "a line of {} bytes", line.len());
    }
    let bare = raw.windows(2).any(|pair| pair[1] == b'\n' && pair[0] != b'\r');
    assert!(!bare, "bare LF");
}

fn with(field: &str, value: Value) -> Value {
    let mut payload = json!({
        "from": "Shop <shop@example.com>", "to": "ann@example.net", "subject": "Hi", "text": "Hello",
    });
    payload[field] = value;
    payload
}

fn names(mail: &Mail) -> Vec<String> {
    mail.headers().into_iter().map(|(name, _)| name).collect()
}

const USUAL: [&str; 10] = [
    "From",
    "To",
    "Subject",
    "Date",
    "Message-ID",
    "X-Fencepost-Id",
    "Auto-Submitted",
    "MIME-Version",
    "Content-Type",
    "Content-Transfer-Encoding",
];

/// Puts encoded words back into text; between two of them space doesn't count (RFC 2047 §6.2).
fn decoded(value: &str) -> String {
    let mut text = String::new();
    let mut bytes: Vec<u8> = Vec::new();
    for word in value.split(' ') {
        let encoded = word.strip_prefix("=?utf-8?b?").and_then(|rest| rest.strip_suffix("?="));
        match encoded {
            Some(encoded) => {
                assert!(word.len() <= 75, "{word}");
                let part = STANDARD.decode(encoded).unwrap();
                assert!(std::str::from_utf8(&part).is_ok(), "split inside a character: {word}");
                bytes.extend(part);
            }
            None => {
                text.push_str(&String::from_utf8(std::mem::take(&mut bytes)).unwrap());
                text.push_str(if text.is_empty() { "" } else { " " });
                text.push_str(word);
            }
        }
    }
    text + &String::from_utf8(bytes).unwrap()
}

#[test]
fn a_mail_has_the_headers_that_were_stated() {
    let relay = Capture::start(Script::new());
    let mut stated = command(&json!({
        "from": "Jörg Müller <shop@example.com>",
        "to": ["Ann <ann@example.net>", "bob@example.net"],
        "cc": "carl@example.net",
        "bcc": ["eve@example.org", "ann@example.net"],
        "reply_to": "help@example.com",
        "subject": "Your order",
        "text": "Hello\n.\n..dots\rend",
        "html": "<p>Hello</p>",
        "headers": {"X-Order": "17"},
        "attachments": [{"name": "Straße.pdf", "type": "application/pdf", "base64": "AQID"}],
    }));
    stated.headers = Some(r#"{"List-Unsubscribe": "<https://example.com/u>"}"#.to_owned());
    let mail = relay.mail(&stated).unwrap();
    assert_eq!(mail.from, "shop@example.com");
    assert_eq!(mail.recipients, ["ann@example.net", "bob@example.net", "carl@example.net", "eve@example.org"]);
    assert!(!String::from_utf8(mail.data()).unwrap().contains("eve@"));
    let mut right = vec!["From", "To", "Cc", "Reply-To", "Subject", "Date", "Message-ID", "X-Fencepost-Id"];
    right.extend(["Auto-Submitted", "X-Order", "List-Unsubscribe", "MIME-Version", "Content-Type"]);
    assert_eq!(names(&mail), right);
    for (name, value) in [
        ("Message-ID", "<0192f0c1-7d3a-7c4e-8f00-0123456789ab@example.com>"),
        ("X-Fencepost-Id", "0192f0c1-7d3a-7c4e-8f00-0123456789ab"),
        ("Auto-Submitted", "auto-generated"),
        ("Date", "Mon, 21 Sep 2026 14:13:20 +0000"),
        ("X-Order", "17"),
        ("List-Unsubscribe", "<https://example.com/u>"),
        ("Reply-To", "help@example.com"),
    ] {
        assert_eq!(mail.header(name).as_deref(), Some(value), "{name}");
    }
    let body = String::from_utf8(mail.body()).unwrap();
    for part in ["Hello\r\n.\r\n..dots\r\nend\r\n", "<p>Hello</p>", "AQID", "filename*0*=utf-8''Stra%C3%9Fe.pdf"] {
        assert!(body.contains(part), "{part}: {body}");
    }
}

#[test]
fn h45_header_injection() {
    let relay = Capture::start(Script::new());
    let file = |name: &str, kind: &str| json!([{"name": name, "type": kind, "base64": "AQID"}]);
    for (field, value) in [
        ("subject", json!("Hi\r\nBcc: eve@example.com\r\n\r\nnew body")),
        ("subject", json!("Hi\nX-A: 1")),
        ("subject", json!("Hi\rX-A: 1")),
        ("from", json!("Ann\r\nBcc: eve@example.com <a@example.com>")),
        ("to", json!("\"Bob\r\n\" <eve@example.com>, <b@example.com>")),
        ("to", json!("Bob <eve@example.com>, <b@example.com>")),
        ("to", json!(["Bob\n <eve@example.com>"])),
        ("to", json!("<\"a> SIZE=1\"@example.com>")),
        ("to", json!("a@example.com\u{0}")),
        ("reply_to", json!("a@example.org\r\nBcc: eve@example.com")),
        ("headers", json!({"X-Ref": "1\r\nBcc: eve@example.com"})),
        ("headers", json!({"X-Ref: 1\r\nBcc": "eve@example.com"})),
        ("headers", json!({"X-Ref:": "1"})),
        ("headers", json!({"": "1"})),
        ("headers", json!({"X-Ref": "1", "x-ref": "2"})),
        ("headers", json!({"List-Unsubscribe": "<https://example.org/u>\r\nBcc: eve@example.com"})),
        ("headers", json!({"In-Reply-To": "<a@b>\r\n\r\n<script>"})),
        ("headers", json!({"Subject": "second subject"})),
        ("headers", json!({"From": "other@example.org"})),
        ("headers", json!({"bCC": "eve@example.com"})),
        ("headers", json!({"content-type": "text/html"})),
        ("headers", json!({"Resent-To": "eve@example.com"})),
        ("headers", json!({"X-Fencepost-Scope": "a"})),
        ("message_id", json!("<x@example.org>\r\nBcc: eve@example.com")),
        ("attachments", file("a.pdf\"\r\nContent-Type: text/html\r\n\r\n<b>", "application/pdf")),
        ("attachments", file("a.pdf", "application/pdf\r\nX-A: 1")),
        ("attachments", file("a.pdf", "multipart/mixed; boundary=x")),
        ("subject", json!("a\u{2028}b\u{b}c\u{0}d\u{85}e")),
    ] {
        let reason = relay.payload(&with(field, value.clone())).expect_err(&format!("{field}: {value}"));
        assert!(reason.0.starts_with(field), "{field}: {reason}");
        assert!(!reason.0.contains("eve") && !reason.0.contains("X-A"), "{reason}");
    }
    for (field, value) in [
        ("subject", json!("=?utf-8?Q?Hi=0D=0ABcc:_eve@example.com?=")),
        ("subject", json!("a\u{2028}b")),
        ("to", json!("Bob\" <eve@example.com>, \"x <b@example.com>")),
        ("from", json!("\"=?utf-8?Q?Hi=0D=0ABcc:_eve@example.com?=\" <shop@example.com>")),
    ] {
        let mail = relay.payload(&with(field, value)).unwrap();
        assert_eq!(names(&mail), USUAL);
        assert_eq!(mail.recipients.len(), 1);
        assert!(!String::from_utf8(mail.data()).unwrap().contains("=0D=0A"));
    }
}

/// The rows of H19 that concern mail, and every wrong type.
#[test]
fn h19_what_can_never_be_sent() {
    let relay = Capture::start(Script::new());
    for (payload, field) in [
        (json!({"to": [], "subject": "x", "text": "y"}), "from"),
        (json!({"to": "a@example.org", "subject": 7}), "from"),
        (json!({"from": "a@example.org", "to": [], "text": "y"}), "no recipient"),
        (json!({"from": "a@example.org", "to": null}), "no recipient"),
        (json!({"from": ["a@example.org", "b@example.org"], "to": "a@example.org"}), "from"),
        (with("subject", json!(7)), "subject"),
        (with("text", json!(["a"])), "text"),
        (with("html", json!({})), "html"),
        (with("to", json!({"a": "b"})), "to"),
        (with("to", json!(["a@example.org", 7])), "to"),
        (with("to", json!([["a@example.org"]])), "to"),
        (with("cc", json!("nobody")), "cc"),
        (with("cc", json!("a@")), "cc"),
        (with("cc", json!("")), "cc"),
        (with("bcc", json!("a@1.2.3.4")), "bcc"),
        (with("bcc", json!("a@b%63.example")), "bcc"),
        (with("headers", json!([])), "headers"),
        (with("headers", json!({"X-A": 1})), "headers"),
        (with("attachments", json!({})), "attachments"),
        (with("attachments", json!([{"name": "a"}])), "attachments"),
        (with("attachments", json!([{"name": "a", "base64": "?"}])), "attachments"),
        (with("attachments", json!([{"name": "a", "base64": "AQID", "path": "/etc/passwd"}])), "attachments"),
        (with("message_id", json!("x@example.org")), "message_id"),
        (with("sender", json!("a@example.org")), "the payload has a field"),
        (json!([]), "the payload is not"),
    ] {
        let reason = relay.payload(&payload).expect_err(&payload.to_string());
        assert!(reason.0.starts_with(field), "{payload}: {reason}");
    }
    let mut broken = command(&json!({}));
    broken.payload = fencepost::effect::Payload::Text(b"not json at all".to_vec());
    assert_eq!(relay.mail(&broken).unwrap_err().0, "the payload is not a JSON object");
    let mut headers = command(&with("text", json!("x")));
    for column in ["{\"X-A\":", "[]", "{\"X-A\": 1}", "{\"X-A\": \"a\\r\\nX-B: 1\"}"] {
        headers.headers = Some(column.to_owned());
        assert!(relay.mail(&headers).is_err(), "{column}");
    }
    let many: Vec<String> = (0..1_001).map(|n| format!("user{n}@example.net")).collect();
    assert!(relay.payload(&with("to", json!(many))).is_err());
}

#[test]
fn a_mail_may_be_short() {
    let relay = Capture::start(Script::new());
    let mail = relay.payload(&json!({"from": "a@example.org", "bcc": "b@example.org", "subject": null})).unwrap();
    assert_eq!(mail.body(), b"\r\n");
    assert_eq!(mail.header("To"), None);
    let given = with("message_id", json!("<order.17@example.org>"));
    assert_eq!(relay.payload(&given).unwrap().header("Message-ID").as_deref(), Some("<order.17@example.org>"));
    let kept = with("headers", json!({"Auto-Submitted": "no"}));
    let mail = relay.payload(&kept).unwrap();
    assert_eq!((mail.header("Auto-Submitted").as_deref(), names(&mail).len()), (Some("no"), USUAL.len()));
}

#[test]
fn h46_bare_lf_lone_cr_and_leading_dots() {
    let text = "line one (LF)\nline two (CRLF)\r\n.starts with one dot\n..starts with two dots\n.\n\
                after a lone dot line\n\r\nlone CR here\rstill text\r\n.\r\nMAIL FROM:<eve@example.com>\r\n\
                RCPT TO:<bob@example.net>\r\nDATA\r\nSubject: smuggled\r\n\r\nhello\n.\r\nRSET\r\n\
                last line without end";
    let relay = Capture::start(Script::new());
    let mail = relay.payload(&with("text", json!(text))).unwrap();
    let right = text.replace("\r\n", "\n").replace('\r', "\n").replace('\n', "\r\n") + "\r\n";
    assert_eq!(String::from_utf8(mail.body()).unwrap(), right);
    assert_eq!(relay.server.mails().len(), 1);
    let verbs = relay.server.wait_for_ended(1)[0].verbs();
    assert_eq!(verbs, ["EHLO", "MAIL", "RCPT", "DATA", "QUIT"]);
    // Control characters would not survive as they are.
    let mail = relay.payload(&with("text", json!("a\u{0}b\u{1b}c"))).unwrap();
    assert_eq!(mail.header("Content-Transfer-Encoding").as_deref(), Some("base64"));
    // A text that ends with a line end gets no second one.
    assert_eq!(relay.payload(&with("text", json!("a\n"))).unwrap().body(), b"a\r\n");
}

#[test]
fn h47_long_subjects_and_names() {
    let relay = Capture::start(Script::new());
    for subject in [
        "Ihre Bestellung über Straßenbahnfahrscheine ist unterwegs".to_owned(),
        "ÄÖÜ ".repeat(120),
        "用户订单确认".repeat(60),
        "👨‍👩‍👧‍👦 family".to_owned(),
        "مرحبا hello שלום".to_owned(),
        "a".repeat(1_386),
        "  two leading and three trailing   ".to_owned(),
        "a =?utf-8?Q?fake?= b".to_owned(),
        "two  spaces".to_owned(),
        "many short words ".repeat(60).trim_end().to_owned(),
    ] {
        let mail = relay.payload(&with("subject", json!(subject))).unwrap();
        assert_eq!(decoded(&mail.header("Subject").unwrap()), subject);
        let raw = mail.raw.split(|b| *b == b'\n').map(<[u8]>::len).max().unwrap();
        // With its line end but for the LF.
        assert!(raw <= 79, "a line of {raw} bytes");
    }
    // Inside an encoded word a tab would be legal, but nobody means one.
    assert!(relay.payload(&with("subject", json!("tab\there"))).is_err());
    for name in ["Müller, Jörg (Vertrieb)", "\"Quoted\" O'Neil", "=?x?", "a@b <c@d>", &"😀".repeat(40), "Ann B."] {
        let quoted = name.replace('"', "\\\"");
        let mail = relay.payload(&with("to", json!(format!("\"{quoted}\" <ann@example.net>")))).unwrap();
        let header = mail.header("To").unwrap();
        let found = decoded(header.strip_suffix(" <ann@example.net>").unwrap());
        assert_eq!(found.trim_matches('"').replace("\\\"", "\""), name.trim_matches('"'), "{header}");
    }
    assert!(relay.payload(&with("from", json!(format!("{} <a@example.org>", "x".repeat(1_000))))).is_err());
}

#[test]
fn h48_long_lines_and_many_addresses() {
    let relay = Capture::start(Script::new());
    let html = format!("<p>{}</p>\n<p>{}</p>", "x".repeat(5_000), "€".repeat(5_000));
    let to: Vec<String> = (1..=300).map(|n| format!("\"Name {n}, Dept\" <user{n}@example.net>")).collect();
    let mail = relay.payload(&json!({"from": "a@example.org", "to": to, "html": html})).unwrap();
    assert_eq!(mail.recipients.len(), 300);
    assert_eq!(mail.header("To").unwrap().matches(" <user").count(), 300);
    assert_eq!(mail.header("Content-Transfer-Encoding").as_deref(), Some("base64"));
    let body: Vec<u8> = mail.body().into_iter().filter(|b| !b.is_ascii_whitespace()).collect();
    assert_eq!(String::from_utf8(STANDARD.decode(body).unwrap()).unwrap(), html.replace('\n', "\r\n"));
    // More than the relay takes at once: nobody gets it.
    let script = Script::new().reply(Stage::RcptTo("user101@example.net".into()), "452 4.5.3 too many recipients");
    relay.server.set_script(script);
    let payload = command(&json!({"from": "a@example.org", "to": to}));
    let report = relay.runtime.block_on(send(&relay.email, &payload));
    assert_eq!(report.outcome, Outcome::Deferred);
    assert_eq!(relay.server.mails().len(), 1);
}

#[test]
fn h49_internationalised_domain() {
    let relay = Capture::start(Script::new());
    for (address, right) in [
        ("info@bücher.example", "info@xn--bcher-kva.example"),
        ("info@BÜCHER.example", "info@xn--bcher-kva.example"),
        ("info@bücher。example", "info@xn--bcher-kva.example"),
        ("info@straße.example", "info@xn--strae-oqa.example"),
        ("info@xn--bcher-kva.example", "info@xn--bcher-kva.example"),
        ("info@пример.рф", "info@xn--e1afmkfd.xn--p1ai"),
        ("info@ابجد.مصر", "info@xn--mgbcmm.xn--wgbh1c"),
        ("info@bu\u{308}cher.example", "info@xn--bcher-kva.example"),
    ] {
        let mail = relay.payload(&with("to", json!(address))).unwrap();
        assert_eq!(mail.recipients, [right], "{address}");
        assert!(mail.raw.is_ascii());
    }
    assert!(relay.payload(&with("to", json!("info@xn--a.example"))).is_err());
    // A local part that isn't ASCII needs the extension, and is refused without it.
    let local = command(&with("to", json!("jörg@example.net")));
    assert_eq!(relay.runtime.block_on(send(&relay.email, &local)).outcome, Outcome::Refused);
    relay.server.set_script(Script::new().offer("8BITMIME").offer("SMTPUTF8"));
    assert_eq!(relay.mail(&local).unwrap().recipients, ["jörg@example.net"]);
    let sessions = relay.server.sessions();
    let mail = sessions.last().unwrap().commands[1].clone();
    assert_eq!(mail, "MAIL FROM:<shop@example.com> BODY=8BITMIME SMTPUTF8");
}

fn everything() -> Command {
    command(&json!({
        "from": "Jörg <shop@example.com>", "to": ["Ann <ann@example.net>"], "subject": "Bestellung für Ann",
        "text": "Hellö", "html": "<p>Hellö</p>", "headers": {"X-B": "2", "X-A": "1"},
        "attachments": [{"name": "a.txt", "type": "text/plain", "base64": "AQID"}],
    }))
}

/// Run by the next test in processes of their own: prints the bytes as the relay got them.
#[test]
fn h50_print() {
    let relay = Capture::start(Script::new());
    let mail = relay.mail(&everything()).unwrap();
    assert_eq!(mail.raw, relay.mail(&everything()).unwrap().raw);
    println!("captured:{}", STANDARD.encode(&mail.raw));
}

/// Goal: the same stored command gives the same bytes, after a restart and in another time zone.
#[test]
fn h50_the_same_bytes_on_every_attempt() {
    let run = |zone: &str| {
        let test = Process::new(std::env::current_exe().unwrap())
            .args(["--exact", "compose::h50_print", "--nocapture", "--test-threads=1"])
            .env("TZ", zone)
            .output()
            .unwrap();
        let output = String::from_utf8(test.stdout).unwrap();
        let captured = output.lines().find_map(|line| line.split_once("captured:")).expect(&output).1.to_owned();
        String::from_utf8(STANDARD.decode(captured).unwrap()).unwrap()
    };
    let first = run("UTC");
    assert_eq!(first, run("Asia/Tokyo"));
    assert!(first.contains("boundary=\"fp-mixed-"), "{first}");
    // Another command with the same content is another mail.
    let relay = Capture::start(Script::new());
    let other = Command { id: "other".to_owned(), ..everything() };
    let mail = relay.mail(&other).unwrap();
    assert_eq!(mail.header("Message-ID").as_deref(), Some("<other@example.com>"));
    assert_ne!(mail.raw, first.into_bytes());
}

/// What breaks out of a field, if anything does.
const BREAKERS: [&str; 24] = [
    "\r",
    "\n",
    "\r\n",
    "\0",
    "\t",
    "\"",
    "\\",
    "<",
    ">",
    ",",
    ":",
    "=?utf-8?q?=0A?=",
    "Bcc: eve@example.com",
    "\u{2028}",
    "\u{85}",
    " ",
    "é",
    "😀",
    "(",
    ")",
    ".",
    ";",
    "@",
    "?=",
];

fn awkward() -> impl Strategy<Value = String> {
    let any_characters = proptest::collection::vec(any::<char>(), 0..20).prop_map(String::from_iter);
    let breakers = proptest::collection::vec(proptest::sample::select(&BREAKERS[..]), 0..8);
    let repeated = ("[a-zé ]{1,5}", 0..400_usize).prop_map(|(word, times)| word.repeat(times));
    prop_oneof![
        3 => "[ -~]{0,40}",
        1 => any_characters,
        1 => breakers.prop_map(|parts| parts.concat()),
        1 => repeated,
    ]
}

/// Goal: no string in any field gets out of it. Method: strings that are made to break out go into
/// every field at once; the mail is never sent, or the relay sees each expected header once and each
/// stated recipient.
#[test]
fn whatever_is_put_into_fields_stays_in_them() {
    let relay = Capture::start(Script::new().offer("SMTPUTF8"));
    let sent = std::cell::Cell::new(0);
    let strings = proptest::collection::vec(prop_oneof![2 => Just("plain".to_owned()), 1 => awkward()], 7);
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(strings in strings)| {
        let [name, subject, text, html, value, file, header] = strings.try_into().unwrap();
        let payload = json!({
            "from": format!("{name} <shop@example.com>"),
            "to": [format!("\"{name}\" <ann@example.net>"), "bob@example.net"],
            "bcc": "eve@example.org",
            "subject": format!("s{subject}"),
            "text": text,
            "html": html,
            "headers": {"X-One": value, (format!("X-{header}")): "2"},
            "attachments": [{"name": format!("f{file}"), "base64": "AQID"}],
        });
        let Ok(mail) = relay.payload(&payload) else { return Ok(()) };
        sent.set(sent.get() + 1);
        let mut right = vec!["From", "To", "Subject", "Date", "Message-ID", "X-Fencepost-Id", "Auto-Submitted"];
        let own = format!("X-{header}");
        right.extend(["X-One", own.as_str(), "MIME-Version", "Content-Type"]);
        let counted = |names: &[&str]| {
            names.iter().fold(BTreeMap::new(), |mut counts, name| {
                *counts.entry((*name).to_owned()).or_insert(0) += 1;
                counts
            })
        };
        let found = names(&mail);
        prop_assert_eq!(counted(&found.iter().map(String::as_str).collect::<Vec<_>>()), counted(&right));
        prop_assert_eq!(&mail.recipients, &["ann@example.net", "bob@example.net", "eve@example.org"]);
        prop_assert_eq!(decoded(&mail.header("Subject").unwrap()), format!("s{subject}"));
        prop_assert!(!mail.header("To").unwrap().contains("eve@example.org"));
    });
    assert!(sent.get() > 40, "only {} of the mails were sent", sent.get());
}
