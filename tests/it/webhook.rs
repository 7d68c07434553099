//! The webhook sender against scripted receivers: each test drives one `Webhook` directly, and
//! looks at the report and at what came over the wire. Retries and states are tested at the dispatcher.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fencepost::effect::{Arm, Command, Effect, Payload, Report, Request};
use fencepost::rules::{Fault, Outcome};
use fencepost::webhook::{Settings, SettingsError, UrlError, Webhook};
use secrecy::SecretString;
use sha2::{Digest, Sha256};

use crate::support::http::{Gate, Received, Reply, Server, test_root};
use crate::support::wait_until;

const SECRET: &str = "whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY";
const OTHER_SECRET: &str = "whsec_++//++//++//++//++//++//++//++//";

/// Line ends, escapes, raw and escaped Unicode, odd numbers: everything that a second serialisation
/// would change.
const BODY: &[u8] = b"{\"z\":1, \"a\" :2,\r\n  \"path\":\"\\/v1\\/x\",\"sep_esc\":\"\\u2028\",\
\"sep_raw\":\"\xe2\x80\xa8\",\"emoji_raw\":\"\xf0\x9f\x98\x80\",\"emoji_esc\":\"\\uD83D\\uDE00\",\
\"html\":\"<b>&amp;</b>\",\"f\":1.0,\"e\":1E2,\"n\":-0,\"arr\":[ ],\"obj\":{ },\
\"\xc3\xa9\":\"caf\xc3\xa9 / cafe\xcc\x81\"}\n\n";

fn settings(url: Option<&str>) -> Settings {
    Settings {
        url: url.map(|url| url.parse().unwrap()),
        secrets: Vec::new(),
        connect_timeout: Duration::from_secs(10),
        read_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(30),
        allow_networks: vec!["127.0.0.0/8".parse().unwrap()],
        effect_free_status: Vec::new(),
        ca_file: None,
    }
}

fn signed(url: &str) -> Settings {
    Settings { secrets: vec![SECRET.into()], ..settings(Some(url)) }
}

fn command() -> Command {
    Command {
        n: 1,
        id: "cmd_0-A".to_owned(),
        scope: "order/17".to_owned(),
        lane: "é".to_owned(),
        seq: 3,
        token: 42,
        kind: "webhook".to_owned(),
        destination: "billing".to_owned(),
        headers: None,
        payload: Payload::Text(BODY.to_vec()),
        inserted_ms: 1_796_205_600_000,
        traceparent: None,
    }
}

fn with_headers(headers: &str) -> Command {
    Command { headers: Some(headers.to_owned()), ..command() }
}

fn to(destination: &str) -> Command {
    Command { destination: destination.to_owned(), ..command() }
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

fn wait_for<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn attempt(settings: Settings, command: &Command, attempt_no: u32) -> Report {
    let (webhook, arm) = (Webhook::new(settings).unwrap(), Arm::begun_armed());
    wait_for(webhook.send(Request { command, attempt_no, now_ms: now_ms(), arm: &arm }))
}

fn send(settings: Settings, command: &Command) -> Report {
    attempt(settings, command, 1)
}

/// One webhook to a server that gives this reply; also what the server received.
fn exchange(reply: Reply) -> (Report, Vec<Received>) {
    let server = Server::start(move |_| reply.clone());
    let report = send(settings(Some(&server.url())), &command());
    (report, server.requests())
}

fn status_of(report: &Report) -> Option<i64> {
    let evidence: serde_json::Value = serde_json::from_str(&report.evidence.to_json()).unwrap();
    evidence["status"].as_i64()
}

// ---- the request ----

#[test]
fn h27_the_body_is_the_stored_bytes_on_every_attempt() {
    for payload in [Payload::Text(BODY.to_vec()), Payload::Bytes(BODY.to_vec())] {
        let server = Server::start(|request| Reply::status(if request.number == 1 { 503 } else { 200 }));
        let command = Command { payload, ..command() };
        let outcomes = [1, 2].map(|no| attempt(signed(&server.url()), &command, no).outcome);
        assert_eq!(outcomes, [Outcome::Unknown, Outcome::Delivered]);
        for request in server.wait_for(2) {
            assert_eq!(Sha256::digest(&request.body), Sha256::digest(BODY));
            assert_eq!(request.header("content-length"), Some(BODY.len().to_string().as_str()));
            assert_eq!(request.header("content-encoding"), None);
            assert_eq!(request.header("transfer-encoding"), None);
            assert!(!request.header("content-type").unwrap().contains("charset"));
            verify(&request, SECRET);
        }
    }
}

#[test]
fn every_header_of_a_request() {
    let server = Server::start(|_| Reply::status(200));
    let before_s = now_ms() / 1_000;
    attempt(signed(&server.url()), &command(), 7);
    let request = &server.requests()[0];
    let timestamp_s: i64 = request.header("webhook-timestamp").unwrap().parse().unwrap();
    assert!((before_s..=now_ms() / 1_000).contains(&timestamp_s));
    for (name, value) in [
        ("idempotency-key", "cmd_0-A"),
        ("webhook-id", "cmd_0-A"),
        ("fencepost-scope", "order%2F17"),
        ("fencepost-lane", "%C3%A9"),
        ("fencepost-token", "42"),
        ("fencepost-seq", "3"),
        ("fencepost-attempt", "7"),
        ("content-type", "application/json"),
        ("user-agent", concat!("fencepost/", env!("CARGO_PKG_VERSION"))),
        ("host", &format!("127.0.0.1:{}", server.port())),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    assert_eq!((request.method.as_str(), request.target.as_str()), ("POST", "/hook"));
}

#[test]
fn bytes_are_an_octet_stream_and_an_empty_body_has_a_length() {
    let server = Server::start(|_| Reply::status(200));
    let command = Command { lane: String::new(), payload: Payload::Bytes(Vec::new()), ..command() };
    send(settings(Some(&server.url())), &command);
    let request = &server.requests()[0];
    assert_eq!(request.header("content-type"), Some("application/octet-stream"));
    assert_eq!(request.header("content-length"), Some("0"));
    assert_eq!(request.header("fencepost-lane"), Some(""));
    assert_eq!(request.header("webhook-signature"), None, "no secret, no signature");
}

#[test]
fn every_secret_signs_so_that_a_receiver_can_change_from_one_to_the_next() {
    let server = Server::start(|_| Reply::status(200));
    let secrets = vec![SECRET.into(), OTHER_SECRET.into()];
    send(Settings { secrets, ..settings(Some(&server.url())) }, &command());
    let request = &server.requests()[0];
    assert_eq!(request.header("webhook-signature").unwrap().split(' ').count(), 2);
    verify(request, SECRET);
    verify(request, OTHER_SECRET);
    assert!(verified_by_crate(request, "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA").is_err(), "the verifier does look");
}

/// Two independent verifiers must accept the request.
fn verify(request: &Received, secret: &str) {
    verified_by_crate(request, secret).unwrap();
    verify_by_python(request, secret);
}

fn verified_by_crate(request: &Received, secret: &str) -> Result<(), standardwebhooks::WebhookError> {
    let names = ["webhook-id", "webhook-timestamp", "webhook-signature"];
    let headers = names.map(|name| (name.parse().unwrap(), request.header(name).unwrap().parse().unwrap()));
    let verifier = standardwebhooks::Webhook::new(secret).unwrap();
    verifier.verify(&request.body, &headers.into_iter().collect())
}

fn verify_by_python(request: &Received, secret: &str) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("FENCEPOST_TEST_PYTHON").map_or(root.join("target/venv/bin/python"), PathBuf::from);
    assert!(python.exists(), "{} is missing: run scripts/test", python.display());
    let headers: serde_json::Map<_, _> =
        request.headers.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
    let body: String = request.body.iter().map(|byte| format!("{byte:02x}")).collect();
    let input = serde_json::json!({ "secret": secret, "headers": headers, "body": body });
    let mut process = Process::new(python)
        .arg(root.join("tests/python/verify_webhook.py"))
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    process.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

// ---- what is found before an attempt ----

fn look(command: &Command) -> Result<(), String> {
    let webhook = Webhook::new(settings(Some("http://127.0.0.1:9/"))).unwrap();
    webhook.look(command).map_err(|error| error.to_string())
}

#[test]
fn h45_a_header_never_brings_a_line_end_to_the_wire() {
    let server = Server::start(|_| Reply::status(200));
    for headers in [r#"{"X-Ok": "a\r\nX-Injected: 1"}"#, r#"{"X-Ok\r\nX-Injected": "1"}"#] {
        let text = look(&with_headers(headers)).unwrap_err();
        assert!(!text.contains("Injected"), "{text}");
        // A dispatcher that didn't look gets the same answer, and nothing is sent either.
        let report = send(settings(Some(&server.url())), &with_headers(headers));
        assert_eq!(report.outcome, Outcome::Refused);
    }
    assert_eq!(server.connections(), 0);
}

#[test]
fn h38_illegal_headers_are_found_before_an_attempt() {
    let many: String = (0..1_000).map(|n| format!("\"X-{n}\":\"v\",")).collect();
    let many = format!("{{{}}}", many.trim_end_matches(','));
    let long = format!("{{\"X-Long\":\"{}\"}}", "a".repeat(1 << 20));
    for headers in [
        r#"{"X-Ok": "a\nb"}"#,
        r#"{"X-Ok": "a\u0000b"}"#,
        r#"{"X-Ok": "a\u0085b"}"#,
        r#"{"X Bad Name": "v"}"#,
        r#"{"": "v"}"#,
        r#"{"X:Y": "v"}"#,
        r#"{"X-Näme": "v"}"#,
        r#"{"X-Secret": "tok\u007fen-do-not-log"}"#,
        r#"{"X-Num": 5}"#,
        r#"{"X-Obj": {"a": "do-not-log"}}"#,
        r#"{"X-Null": null}"#,
        r#"{"X-Twice": "a", "x-twice": "b"}"#,
        r#"{"X-Twice": "a", "X-Twice": "a"}"#,
        r#"["do-not-log"]"#,
        r#""do-not-log""#,
        r#"{"X-Ok": "do-not-log""#,
        "",
        &many,
        &long,
    ] {
        let text = look(&with_headers(headers)).expect_err(headers);
        assert!(text.starts_with("headers: ") && !text.contains("do-not-log"), "{text}");
    }
}

#[test]
fn h38_legal_odd_headers_are_sent_as_they_are() {
    let long = "a".repeat(8_192);
    let text = format!(r#"{{"X-Empty":"","X-Tab":"a\tb","X-Long":"{long}","x-lower":"v","X-Name":"عبد café"}}"#);
    let server = Server::start(|_| Reply::status(200));
    assert_eq!(look(&with_headers(&text)), Ok(()));
    send(settings(Some(&server.url())), &with_headers(&text));
    let request = &server.requests()[0];
    for (name, value) in
        [("x-empty", ""), ("x-tab", "a\tb"), ("x-long", long.as_str()), ("x-lower", "v"), ("x-name", "عبد café")]
    {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
}

#[test]
fn a_command_cannot_speak_in_the_name_of_the_dispatcher() {
    for name in [
        "Idempotency-Key",
        "WEBHOOK-ID",
        "webhook-timestamp",
        "webhook-signature",
        "Fencepost-Token",
        "fencepost-anything",
        "Content-Length",
        "Transfer-Encoding",
        "Connection",
        "Host",
        "Upgrade",
        "TE",
        "Trailer",
        "Expect",
        "Proxy-Authorization",
        "Keep-Alive",
    ] {
        let text = look(&with_headers(&format!(r#"{{"{name}": "v"}}"#))).expect_err(name);
        assert!(text.ends_with("is reserved"), "{text}");
    }
}

#[test]
fn a_command_may_set_content_type_and_authorization() {
    let server = Server::start(|_| Reply::status(200));
    let headers = r#"{"content-TYPE": "application/cloudevents+json", "Authorization": "Bearer abc"}"#;
    send(settings(Some(&server.url())), &with_headers(headers));
    let request = &server.requests()[0];
    assert_eq!(request.header("content-type"), Some("application/cloudevents+json"));
    assert_eq!(request.header("authorization"), Some("Bearer abc"));
}

#[test]
fn text_that_is_not_utf8_is_found_before_an_attempt() {
    let payload = vec![b'"', 0xff, b'"'];
    let text = Command { payload: Payload::Text(payload.clone()), ..command() };
    assert_eq!(look(&text), Err("payload: not UTF-8".to_owned()));
    assert_eq!(look(&Command { payload: Payload::Bytes(payload), ..command() }), Ok(()));
}

#[test]
fn a_destination_that_is_no_usable_url_is_found_before_an_attempt() {
    let webhook = Webhook::new(settings(None)).unwrap();
    for destination in [
        "billing",
        "",
        "//example.com/",
        "http:///",
        "ftp://203.0.113.9/",
        "file:///etc/passwd",
        "http://user@127.0.0.1:9/",
        "http://hook:s3cr3t-User@example.com/",
        "http://203.0.113.9@127.0.0.1:9/",
        "http://127.0.0.1%2f.example.com:9/",
        "http://example.com:99999/",
    ] {
        let text = webhook.look(&to(destination)).expect_err(destination).to_string();
        assert!(text.starts_with("destination: ") && !text.contains("s3cr3t"), "{text}");
    }
    assert_eq!(webhook.look(&to("https://example.com/h?x=1#f")), Ok(()));
}

// ---- settings ----

#[test]
fn a_bad_secret_is_named_by_its_place_and_not_shown() {
    let secrets: Vec<SecretString> = vec![SECRET.into(), "whsec_s3cr3t-Whsec".into()];
    let error = Webhook::new(Settings { secrets, ..settings(None) }).unwrap_err();
    assert!(matches!(error, SettingsError::Secret { index: 1 }));
    assert!(error.to_string().contains("number 2") && !format!("{error} {error:?}").contains("s3cr3t"));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let new = |settings| Webhook::new(settings).unwrap_err();
    let url = |url| new(settings(Some(url)));
    assert!(matches!(url("ftp://example.com/"), SettingsError::Url(UrlError::Scheme)));
    assert!(matches!(url("https://a:b@example.com/"), SettingsError::Url(UrlError::UserInfo)));
    let zero = Settings { timeout: Duration::ZERO, ..settings(None) };
    assert!(matches!(new(zero), SettingsError::Timeout("timeout")));
    for status in [200, 302, 404, 429] {
        let certain = Settings { effect_free_status: vec![503, status], ..settings(None) };
        assert!(matches!(new(certain), SettingsError::EffectFreeStatus(other) if other == status));
    }
    let missing = Settings { ca_file: Some("/no/such/file".into()), ..settings(None) };
    assert!(matches!(new(missing), SettingsError::CaFile { .. }));
    let empty = Settings { ca_file: Some("/dev/null".into()), ..settings(None) };
    assert!(matches!(new(empty), SettingsError::Roots { .. }));
}

// ---- the address guard in the sender ----

fn assert_address_not_allowed(report: &Report, outcome: Outcome, fault: Fault) {
    assert_eq!((report.outcome, report.fault), (outcome, fault), "{report:?}");
    assert_eq!(report.evidence.text("reason"), Some("address not allowed"));
}

#[test]
fn h34_addresses_inside_are_closed() {
    let server = Server::start(|_| Reply::status(200));
    let loopback = format!("http://127.0.0.1:{}/", server.port());
    let others = ["http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.0.1/", "http://169.254.169.254/"];
    for url in others.into_iter().chain([loopback.as_str()]) {
        let closed = |url| Settings { allow_networks: Vec::new(), ..settings(url) };
        assert_address_not_allowed(&send(closed(None), &to(url)), Outcome::Refused, Fault::Command);
        assert_address_not_allowed(&send(closed(Some(url)), &command()), Outcome::Deferred, Fault::Configuration);
    }
    assert_eq!(server.connections(), 0);

    assert_eq!(send(settings(None), &to(&loopback)).outcome, Outcome::Delivered);
    for url in others {
        assert_address_not_allowed(&send(settings(None), &to(url)), Outcome::Refused, Fault::Command);
    }
    assert_eq!(server.connections(), 1);
}

#[test]
fn h34_every_spelling_of_an_address_inside_is_closed() {
    let server = Server::start(|_| Reply::status(200));
    let closed = Settings { allow_networks: Vec::new(), ..settings(None) };
    for host in [
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "127.0.0.1.",
        "%31%32%37.0.0.1",
        "①②⑦.0.0.1",
        "localhost",
        "LOCALHOST.",
        "sub.localhost",
        "0.0.0.0",
        "0",
        "127.127.127.127",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "2852039166",
        "0251.0376.0251.0376",
        "169.254.43518",
        "100.100.100.200",
        "172.31.255.255",
        "192.0.0.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        let url = format!("http://{host}:{}/", server.port());
        assert_address_not_allowed(&send(closed.clone(), &to(&url)), Outcome::Refused, Fault::Command);
    }
    assert_eq!(server.connections(), 0);
}

/// Runs one test of this file again in a process of its own, with other environment variables.
fn run_again(test: &str, variables: &[(&str, &str)]) {
    let mut process = Process::new(std::env::current_exe().unwrap());
    process.args(["--exact", &format!("webhook::{test}")]).envs(variables.iter().copied());
    let output = process.env_remove("NO_PROXY").env_remove("no_proxy").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// A proxy would dial addresses that the guard never sees.
#[test]
fn a_proxy_of_the_environment_is_not_used() {
    let proxy = Server::start(|_| Reply::status(200));
    let url = proxy.url();
    let variables = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"].map(|name| (name, url.as_str()));
    run_again("every_header_of_a_request", &variables);
    assert_eq!(proxy.connections(), 0);
}

#[test]
fn localhost_can_be_opened() {
    let server = Server::start(|_| Reply::status(200));
    let url = format!("http://localhost:{}/", server.port());
    assert_eq!(send(settings(None), &to(&url)).outcome, Outcome::Delivered);
    assert_eq!(server.requests()[0].header("host"), Some(format!("localhost:{}", server.port()).as_str()));
}

// ---- what an answer means ----

#[test]
fn h37_every_status() {
    let rows: [(&[u16], Outcome); 4] = [
        (&[200, 201, 202, 204, 205, 206, 226, 299], Outcome::Delivered),
        (&[421, 423, 425, 429], Outcome::Deferred),
        (&[300, 304, 305, 399, 400, 401, 403, 404, 405, 407, 410, 413, 415, 418, 422, 426, 451, 499], Outcome::Refused),
        (&[101, 408, 409, 500, 501, 502, 503, 504, 507, 511, 520, 599, 600, 999], Outcome::Unknown),
    ];
    let server = Server::start(|request| {
        let status = request.target.trim_start_matches('/').parse().unwrap();
        Reply::status(status).body(r#"{"ok":false}"#)
    });
    for (statuses, outcome) in rows {
        for status in statuses {
            let report = send(settings(None), &to(&format!("http://127.0.0.1:{}/{status}", server.port())));
            assert_eq!((report.outcome, report.fault), (outcome, Fault::Command), "{status} {report:?}");
            assert_eq!(status_of(&report), Some(i64::from(*status)));
            if !matches!(status, 101 | 204 | 304) {
                assert_eq!(report.evidence.text("body"), Some(r#"{"ok":false}"#), "{status}");
            }
        }
    }
}

#[test]
fn h37_what_is_no_complete_head_is_unknown() {
    for reply in [
        Reply::half_a_head(),
        Reply::close(),
        Reply::reset(),
        Reply::raw("HTTP/1.1 99 Malformed\r\n\r\n"),
        Reply::raw("HTTP/1.1 2000 Malformed\r\n\r\n"),
        Reply::raw("HTTP/1.1 100 Continue\r\n\r\n"),
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"),
        Reply::raw("\x16\x03\x01 no HTTP at all\r\n\r\n"),
        Reply::raw("200 OK\r\n\r\n"),
    ] {
        let (report, requests) = exchange(reply.clone());
        assert_eq!(report.outcome, Outcome::Unknown, "{reply:?} {report:?}");
        assert!(report.evidence.text("reason").is_some_and(|reason| !reason.is_empty()));
        assert_eq!(requests.len(), 1);
    }
}

#[test]
fn h37_interim_answers_are_skipped() {
    let (report, _) = exchange(Reply::status(200).interim(100).interim(103));
    assert_eq!((report.outcome, status_of(&report)), (Outcome::Delivered, Some(200)));
}

#[test]
fn h37_a_complete_head_counts_even_if_the_body_breaks_off() {
    let (report, _) = exchange(Reply::body_cut_short(200));
    assert_eq!((report.outcome, report.evidence.text("body")), (Outcome::Delivered, Some("only this")));
    let (report, _) = exchange(Reply::body_cut_short(404));
    assert_eq!(report.outcome, Outcome::Refused);
}

#[test]
fn h37_an_endpoint_can_say_that_a_status_means_no_effect() {
    let server = Server::start(|request| {
        let status = request.target.trim_start_matches('/').parse().unwrap();
        Reply::status(status).header("Retry-After", "7")
    });
    let endpoint = Settings { effect_free_status: vec![503], ..settings(None) };
    let to_status = |status| to(&format!("http://127.0.0.1:{}/{status}", server.port()));
    let listed = send(endpoint.clone(), &to_status(503));
    assert_eq!((listed.outcome, listed.fault, listed.retry_after_ms), (Outcome::Deferred, Fault::Command, Some(7_000)));
    assert_eq!(send(endpoint, &to_status(500)).outcome, Outcome::Unknown);
}

#[test]
fn h30_the_wait_is_kept_where_the_command_can_come_again() {
    for (status, wait_ms) in [(429, Some(120_000)), (503, Some(120_000)), (404, None), (200, None)] {
        let (report, _) = exchange(Reply::status(status).header("retry-after", " 120 "));
        assert_eq!(report.retry_after_ms, wait_ms, "{status}");
    }
    let (report, _) = exchange(Reply::status(429).header("Retry-After", "soon"));
    assert_eq!((report.outcome, report.retry_after_ms), (Outcome::Deferred, None));
}

#[test]
fn h33_no_redirect_is_followed() {
    let target = Server::start(|_| Reply::status(200));
    let here = format!("http://127.0.0.1:{}/target", target.port());
    let secret = format!("{here}?token=s3cr3t-Query");
    for (status, locations, host) in [
        (301, vec![here.as_str()], Some("127.0.0.1")),
        (302, vec![here.as_str()], Some("127.0.0.1")),
        (303, vec![here.as_str()], Some("127.0.0.1")),
        (307, vec![here.as_str()], Some("127.0.0.1")),
        (308, vec![secret.as_str()], Some("127.0.0.1")),
        (300, vec![], None),
        (304, vec![], None),
        (302, vec![], None),
        (302, vec!["//other.example/x"], Some("other.example")),
        (302, vec!["../relative"], Some("127.0.0.1")),
        (302, vec!["javascript:alert(1)"], Some("none")),
        (302, vec!["http://[broken"], Some("none")),
        (302, vec![here.as_str(), "//other.example/x"], Some("several")),
        (399, vec![], None),
    ] {
        let reply = locations.iter().fold(Reply::status(status), |reply, value| reply.header("Location", value));
        let (report, requests) = exchange(reply);
        assert_eq!((report.outcome, report.fault), (Outcome::Refused, Fault::Command), "{status} {locations:?}");
        assert_eq!(status_of(&report), Some(i64::from(status)));
        assert_eq!(report.evidence.text("location_host"), host, "{status} {locations:?}");
        assert!(!report.evidence.to_json().contains("s3cr3t"));
        assert_eq!(requests.len(), 1);
    }
    assert_eq!(target.connections(), 0);
}

/// The obvious client sends the POST again, body included.
#[test]
fn h33_a_307_is_not_posted_to_the_second_url() {
    let target = Server::start(|_| Reply::status(200));
    let location = target.url();
    let (report, requests) = exchange(Reply::status(307).header("Location", &location));
    assert_eq!((report.outcome, requests.len(), target.connections()), (Outcome::Refused, 1, 0));
}

// ---- where it breaks ----

/// A connection that was used once is never used again, so a receiver that closes on the second
/// request sees it once, and nothing repeats it in silence.
#[test]
fn h32_read_then_close_is_unknown_and_seen_once() {
    let server = Server::start(|request| if request.number == 1 { Reply::status(200) } else { Reply::close() });
    let webhook = Webhook::new(settings(Some(&server.url()))).unwrap();
    let command = command();
    let outcomes = wait_for(async {
        let mut outcomes = Vec::new();
        for attempt_no in [1, 2] {
            let arm = Arm::begun_armed();
            let request = Request { command: &command, attempt_no, now_ms: now_ms(), arm: &arm };
            outcomes.push(webhook.send(request).await.outcome);
        }
        outcomes
    });
    assert_eq!(outcomes, [Outcome::Delivered, Outcome::Unknown]);
    assert_eq!((server.requests().len(), server.connections()), (2, 2));
}

#[test]
fn h32_a_connection_that_ends_before_the_answer_is_unknown() {
    for server in [Server::closing_at_once(), Server::resetting_after(400)] {
        let command = Command { payload: Payload::Bytes(vec![b'x'; 1 << 20]), ..command() };
        let report = send(settings(Some(&server.url())), &command);
        assert_eq!(report.outcome, Outcome::Unknown, "{report:?}");
        assert_eq!(server.connections(), 1);
    }
}

/// A port that refuses: bound, then closed.
fn closed_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A name that no resolver can look up, found so without asking any: a label has 63 bytes at most.
fn no_such_host() -> String {
    format!("{}.invalid", "no-such-host-".repeat(5))
}

#[test]
fn what_fails_in_connect_is_the_fault_of_the_channel() {
    let no_tls = Server::closing_at_once();
    for url in [
        format!("http://127.0.0.1:{}/", closed_port()),
        format!("http://{}/", no_such_host()),
        format!("https://127.0.0.1:{}/", no_tls.port()),
    ] {
        let report = send(settings(None), &to(&url));
        assert_eq!((report.outcome, report.fault), (Outcome::Deferred, Fault::Channel), "{url} {report:?}");
        assert_eq!(report.evidence.text("phase"), Some("connect"));
        assert!(report.evidence.text("reason").is_some_and(|reason| !reason.is_empty()));
    }
}

#[test]
fn a_handshake_that_never_ends_is_the_fault_of_the_channel() {
    let gate = Gate::new();
    // It takes the greeting of TLS for the head of a request that never ends.
    let silent = Server::start(move |_| Reply::close().held_by(&gate));
    let url = format!("https://127.0.0.1:{}/", silent.port());
    let read_timeout = Duration::from_millis(300);
    let report = send(Settings { read_timeout, ..settings(Some(&url)) }, &command());
    assert_eq!((report.outcome, report.fault), (Outcome::Deferred, Fault::Channel), "{report:?}");
}

#[test]
fn an_answer_that_does_not_come_in_time_is_unknown() {
    let limit = Duration::from_millis(300);
    let (read, whole) = (settings(None), settings(None));
    for limits in [Settings { read_timeout: limit, ..read }, Settings { timeout: limit, ..whole }] {
        let (gate, server) = Server::held();
        let started = Instant::now();
        let report = send(Settings { url: Some(server.url().parse().unwrap()), ..limits }, &command());
        assert_eq!(report.outcome, Outcome::Unknown);
        assert_eq!(report.evidence.text("reason"), Some("operation timed out"));
        assert!((limit..Duration::from_secs(10)).contains(&started.elapsed()));
        gate.open();
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn a_peer_that_never_reads_is_unknown() {
    let server = Server::never_reading();
    let command = Command { payload: Payload::Bytes(vec![b'x'; 8 << 20]), ..command() };
    let read_timeout = Duration::from_millis(300);
    let report = send(Settings { read_timeout, ..settings(Some(&server.url())) }, &command);
    assert_eq!(report.outcome, Outcome::Unknown);
}

#[test]
fn only_the_roots_of_the_file_are_trusted() {
    let server = Server::start_tls("server.pem", |_| Reply::status(200).body("over TLS"));
    let ca_file = Some(test_root());
    let report = send(Settings { ca_file: ca_file.clone(), ..signed(&server.url()) }, &command());
    assert_eq!((report.outcome, report.evidence.text("body")), (Outcome::Delivered, Some("over TLS")));
    assert_eq!(server.requests()[0].body, BODY);

    let by_name = format!("https://localhost:{}/", server.port());
    let report = send(Settings { ca_file: ca_file.clone(), ..settings(Some(&by_name)) }, &command());
    assert_eq!(report.outcome, Outcome::Delivered);

    let unknown_root = send(settings(Some(&server.url())), &command());
    let expired = Server::start_tls("expired.pem", |_| Reply::status(200));
    let expired_certificate = send(Settings { ca_file: ca_file.clone(), ..settings(Some(&expired.url())) }, &command());
    for report in [unknown_root, expired_certificate] {
        assert_eq!((report.outcome, report.fault), (Outcome::Deferred, Fault::Channel), "{report:?}");
        assert!(report.evidence.text("reason").is_some_and(|reason| reason.contains("certificate")), "{report:?}");
    }
    assert_eq!((server.requests().len(), expired.requests().len()), (2, 0));
}

/// The variable stands for the system's store, so that it trusts the test root here.
#[test]
fn a_file_replaces_the_roots_of_the_system() {
    let root = test_root();
    if std::env::var_os("SSL_CERT_FILE").is_none_or(|file| file != root) {
        return run_again("a_file_replaces_the_roots_of_the_system", &[("SSL_CERT_FILE", root.to_str().unwrap())]);
    }
    let server = Server::start_tls("server.pem", |_| Reply::status(200));
    assert_eq!(send(settings(Some(&server.url())), &command()).outcome, Outcome::Delivered);
    // Some certificate that didn't sign the server's.
    let ca_file = Some(root.with_file_name("expired.pem"));
    let report = send(Settings { ca_file, ..settings(Some(&server.url())) }, &command());
    assert_eq!((report.outcome, report.fault), (Outcome::Deferred, Fault::Channel), "{report:?}");
}

/// Polls, so that the runtime goes on meanwhile.
async fn until(condition: impl Fn() -> bool) {
    let polling = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), polling).await.expect("the condition within 30 s");
}

/// A recalled or stopped attempt must not leave a connection behind that goes on.
#[test]
fn dropping_the_attempt_closes_its_connection() {
    let (_gate, server) = Server::held();
    let webhook = Webhook::new(settings(Some(&server.url()))).unwrap();
    let (command, arm) = (command(), Arm::begun_armed());
    let request = Request { command: &command, attempt_no: 1, now_ms: now_ms(), arm: &arm };
    wait_for(async {
        tokio::select! {
            report = webhook.send(request) => panic!("{report:?} before the answer"),
            () = until(|| !server.requests().is_empty()) => {}
        }
        until(|| server.open_connections() == 0).await;
    });
    assert_eq!(server.connections(), 1);
}

#[test]
fn an_attempt_that_is_not_armed_sends_nothing() {
    let server = Server::start(|_| Reply::status(200));
    let webhook = Webhook::new(settings(Some(&server.url()))).unwrap();
    let (command, arm) = (command(), Arm::recorded_by(|| Box::pin(async { false })));
    let request = Request { command: &command, attempt_no: 1, now_ms: now_ms(), arm: &arm };
    assert_eq!(wait_for(webhook.send(request)), Report::not_armed());
    assert_eq!(server.connections(), 0);
}

// ---- bounds ----

/// One webhook to an answer of 100 MB. What the sender holds of it can't be more than what the
/// server could write, and that has to be little more than the kernel's buffers.
fn exchange_endless(start: &str, filler: &str) -> Report {
    let reply = Reply::endless(start, filler, 100 << 20);
    let server = Server::start(move |_| reply.clone());
    let report = send(settings(Some(&server.url())), &command());
    wait_until("the connection has ended", 10, || server.open_connections() == 0);
    assert!(server.written() < 32 << 20, "{} bytes were taken", server.written());
    report
}

#[test]
fn h36_a_head_without_end_is_unknown() {
    let header = exchange_endless("HTTP/1.1 200 OK\r\nX-Huge: ", &"a".repeat(1 << 16));
    let lines = exchange_endless("HTTP/1.1 200 OK\r\n", &"X-Line: a\r\n".repeat(1_000));
    assert_eq!([header.outcome, lines.outcome], [Outcome::Unknown; 2]);
}

#[test]
fn h36_a_body_without_end_is_cut() {
    let chunk = format!("10000\r\n{}\r\n", "b".repeat(0x10000));
    for (status, outcome) in [(200, Outcome::Delivered), (500, Outcome::Unknown)] {
        let chunked = format!("HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n");
        let promised = format!("HTTP/1.1 {status} X\r\nContent-Length: 1000000000000000\r\n\r\n");
        for (start, filler) in [(chunked, chunk.clone()), (promised, "b".repeat(0x10000))] {
            let report = exchange_endless(&start, &filler);
            assert_eq!(report.outcome, outcome);
            assert_eq!(report.evidence.text("body").map(str::len), Some(200));
        }
    }
}

#[test]
fn h36_a_packed_body_is_not_unpacked() {
    let headers = Reply::status(200).header("Content-Encoding", "gzip").body("plain after all");
    assert_eq!(exchange(headers).0.evidence.text("body"), Some("plain after all"));
}

/// The head has decided; what is left of the body is waited for, but not for long.
#[test]
fn a_slow_body_does_not_hold_up_the_lane() {
    let gate = Gate::new();
    let reply = Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this").kept_open_by(&gate);
    let started = Instant::now();
    let (report, _) = exchange(reply);
    assert_eq!((report.outcome, report.evidence.text("body")), (Outcome::Delivered, Some("only this")));
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}

// ---- what is shown ----

#[test]
fn h55_no_secret_is_shown_whatever_fails() {
    let echo = Server::start(|request| {
        let head = String::from_utf8_lossy(&request.head).into_owned();
        Reply::status(500).body(format!("failed: {}", head.replace("\r\n", " ")))
    });
    let gate = Gate::new();
    let slow = Server::start(move |_| Reply::status(200).held_by(&gate));
    let tail = "services/T000/B000/s3cr3t-Path?token=s3cr3t-Query&x=1#s3cr3t-Frag";
    let own = r#"{"Authorization": "Bearer s3cr3t-Bearer"}"#;
    for base in [
        format!("http://127.0.0.1:{}", echo.port()),
        format!("http://127.0.0.1:{}", slow.port()),
        format!("http://127.0.0.1:{}", closed_port()),
        format!("https://127.0.0.1:{}", echo.port()),
        "http://10.0.0.1".to_owned(),
        format!("https://{}", no_such_host()),
    ] {
        let url = format!("{base}/{tail}");
        let read_timeout = Duration::from_millis(300);
        let endpoint = Settings { secrets: vec![SECRET.into()], read_timeout, ..settings(Some(&url)) };
        let shown = format!("{endpoint:?} {:?}", Webhook::new(endpoint.clone()).unwrap());
        let command = with_headers(own);
        let report = send(endpoint, &command);
        let all = format!("{shown} {report:?} {command:?}");
        assert!(!all.contains("s3cr3t") && !all.contains("AQIDBAUG"), "{all}");
        assert_eq!(report.evidence.text("path"), Some("/services/…"));
        assert!(report.evidence.text("host").is_some_and(|host| base.contains(host)));
    }
}
