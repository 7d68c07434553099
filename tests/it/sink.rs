//! The local catcher, as a process, spoken to over raw TCP: what it records, and each misbehaviour.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::wait_until;

/// A running sink; it ends with this value.
struct Sink {
    child: Child,
    http: String,
    smtp: String,
}

impl Sink {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_fencepost"))
            .args(["sink", "--http", "127.0.0.1:0", "--smtp", "127.0.0.1:0", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addresses: Value = serde_json::from_str(&line).unwrap();
        let address = |name: &str| addresses[name].as_str().unwrap().to_owned();
        Self { child, http: address("http"), smtp: address("smtp") }
    }

    /// One request on a connection of its own: the status, 0 without an answer, and the body.
    fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let mut stream = connect(&self.http);
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: sink\r\n{headers}Content-Length: {length}\r\n\r\n");
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        read_answer(&mut BufReader::new(stream)).map_or((0, String::new()), |(status, _, body)| (status, body))
    }

    fn post(&self, path: &str, body: &[u8]) -> (u16, String) {
        self.request("POST", path, "", body)
    }

    fn behave(&self, behaviour: &Value) {
        let (status, text) = self.request("PUT", "/_sink/behaviour", "", behaviour.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
    }

    fn arrivals(&self) -> Vec<Value> {
        let (status, text) = self.request("GET", "/_sink/arrivals", "", b"");
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["arrivals"].as_array().unwrap().clone()
    }

    fn listing(&self, path: &str) -> String {
        let (status, text) = self.request("GET", path, "", b"");
        assert_eq!(status, 200);
        text
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // Fails only where the test has ended it already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Status, head and body of an answer; `None` if the connection ended before one.
fn read_answer(stream: &mut impl BufRead) -> Option<(u16, String, String)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        match stream.read_line(&mut head) {
            Ok(0) => {
                assert_eq!(head, "", "an answer is cut in the middle");
                return None;
            }
            Ok(_) => {}
            Err(error) => panic!("no answer: {error}"),
        }
    }
    let status = head[9..12].parse().unwrap();
    let length = head.to_ascii_lowercase().split("content-length: ").nth(1).unwrap().lines().next().unwrap().to_owned();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    Some((status, head, String::from_utf8(body).unwrap()))
}

/// A mail client that says what it is told.
struct Mail(BufReader<TcpStream>);

impl Mail {
    fn open(sink: &Sink) -> Self {
        let mut mail = Self(BufReader::new(connect(&sink.smtp)));
        assert!(mail.reply().starts_with("220 "));
        mail
    }

    /// A whole reply, or "" at the end of the connection.
    fn reply(&mut self) -> String {
        let mut text = String::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            text.push_str(&line);
            if line.get(3..4) != Some("-") {
                return text;
            }
        }
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).unwrap();
    }

    fn say(&mut self, line: &str) -> String {
        self.send(format!("{line}\r\n"));
        self.reply()
    }

    #[track_caller]
    fn expect(&mut self, line: &str, code: &str) {
        let reply = self.say(line);
        assert!(reply.starts_with(code), "{line:?} is answered with {reply:?}, not {code}");
    }

    /// Everything up to 354.
    fn envelope(&mut self) {
        self.expect("EHLO client.example.com", "250");
        self.expect("MAIL FROM:<a@example.com>", "250");
        self.expect("RCPT TO:<b@example.com>", "250");
        self.expect("DATA", "354");
    }
}

const MAIL: &str = "Message-ID: <1@example.com>\r\nX-Fencepost-Id: m1\r\nSubject: Hello\r\n\r\nbody\r\n";

fn send_mail(sink: &Sink) -> (Mail, String) {
    let mut mail = Mail::open(sink);
    mail.envelope();
    mail.send(MAIL);
    let reply = mail.say(".");
    (mail, reply)
}

#[test]
fn a_webhook_is_recorded_and_answered() {
    let sink = Sink::start(&[]);
    let headers = "webhook-id: c1\r\nFencepost-Scope: order%2F17\r\nFencepost-Lane: \r\n\
        Fencepost-Token: 4611686018427387904\r\nFencepost-Seq: 9007199254740993\r\nX-Twice: 1\r\nX-Twice: 2\r\n";
    let (status, body) = sink.request("POST", "/hooks?a=b", headers, "{\"paid\": tru\u{e9}}\n".as_bytes());
    assert_eq!((status, body.as_str()), (200, "{\"ok\":true}"));
    assert_eq!(sink.request("PUT", "/raw", "", b"\x00\xff").0, 200);

    let arrivals = sink.arrivals();
    assert_eq!(arrivals.len(), 2);
    let first = &arrivals[0];
    for (name, value) in [
        ("no", json!(1)),
        ("kind", json!("webhook")),
        ("method", json!("POST")),
        ("path", json!("/hooks?a=b")),
        ("id", json!("c1")),
        ("scope", json!("order%2F17")),
        ("lane", json!("")),
        ("token", json!("4611686018427387904")),
        ("seq", json!("9007199254740993")),
        ("attempt", Value::Null),
        ("body", json!("{\"paid\": tru\u{e9}}\n")),
    ] {
        assert_eq!(first[name], value, "{name}");
    }
    assert!(first["time_ms"].as_i64().unwrap() > 1_600_000_000_000);
    let headers = first["headers"].as_array().unwrap();
    assert!(headers.contains(&json!(["x-twice", "1"])) && headers.contains(&json!(["x-twice", "2"])));
    assert_eq!((&arrivals[1]["body_base64"], &arrivals[1]["body"]), (&json!("AP8="), &Value::Null));
}

#[test]
fn arrivals_are_listed_and_cleared() {
    let sink = Sink::start(&[]);
    for path in ["/first", "/second"] {
        sink.request("POST", path, "Idempotency-Key: c1\r\nFencepost-Seq: 7\r\n", b"x");
    }
    send_mail(&sink);
    for page in ["/", "/_sink"] {
        let text = sink.listing(page);
        let lines: Vec<_> = text.lines().skip(2).collect();
        assert!(text.starts_with("fencepost sink: 3 arrivals\n"), "{text}");
        assert!(lines[0].contains("POST /first  seq=7  id=c1") && !lines[0].contains("time 2"), "{text}");
        assert!(lines[1].contains("POST /second  seq=7  id=c1  (time 2 for this id)"), "{text}");
        assert!(lines[2].contains("email  a@example.com to b@example.com  \"Hello\"  id=m1"), "{text}");
    }
    assert_eq!(sink.request("DELETE", "/_sink/arrivals", "", b"").0, 200);
    assert_eq!(sink.arrivals(), Vec::<Value>::new());
    sink.post("/third", b"");
    assert_eq!(sink.arrivals()[0]["no"], 4, "numbers go on");
}

#[test]
fn pages_of_the_sink_are_no_arrivals() {
    let sink = Sink::start(&[]);
    for (method, path, status) in [
        ("GET", "/_sink/nothing", 404),
        ("POST", "/_sink/arrivals", 405),
        ("POST", "/_sink", 405),
        ("GET", "/_sink/behaviour", 200),
    ] {
        assert_eq!(sink.request(method, path, "", b"").0, status, "{method} {path}");
    }
    assert_eq!(sink.arrivals().len(), 0);
    assert_eq!(sink.request("POST", "/", "", b"").0, 200);
    assert_eq!(sink.request("GET", "/_sinker", "", b"").0, 200);
    assert_eq!(sink.arrivals().len(), 2);
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    let sink = Sink::start(&[]);
    let mut mail = Mail::open(&sink);
    mail.envelope();
    mail.send("Subject: \x1b[2Jgone\r\nX-Fencepost-Id: a\x07b\r\n\r\n");
    assert!(mail.say(".").starts_with("250 "));
    let text = sink.listing("/");
    assert!(text.contains("gone") && !text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
}

#[test]
fn a_large_body_is_refused() {
    let sink = Sink::start(&[]);
    let mut stream = connect(&sink.http);
    stream.write_all(b"POST / HTTP/1.1\r\nHost: sink\r\nContent-Length: 99999999\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    // The sink answers and closes while the body is still on its way, so writing may fail.
    let writer = std::thread::spawn(move || {
        let block = [b'x'; 65_536];
        while stream.write_all(&block).is_ok() {}
    });
    let (status, _, text) = read_answer(&mut reader).unwrap();
    assert_eq!(status, 413, "{text}");
    drop(reader);
    wait_until("the sink closes the connection", 20, || writer.is_finished());
    assert_eq!(sink.arrivals().len(), 0);
}

/// A webhook that never became complete is no arrival.
#[test]
fn half_a_webhook_is_not_recorded() {
    let sink = Sink::start(&[]);
    let mut stream = connect(&sink.http);
    stream.write_all(b"POST / HTTP/1.1\r\nHost: sink\r\nContent-Length: 10\r\n\r\nhalf").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"");
    assert_eq!(sink.arrivals().len(), 0);
}

#[test]
fn arguments_set_the_behaviour() {
    let sink = Sink::start(&["--fail", "503", "--fail-mail", "451 4.3.0 try later", "--delay", "20ms"]);
    let (status, body) = sink.post("/", b"");
    assert_eq!((status, serde_json::from_str::<Value>(&body).unwrap()["ok"].clone()), (503, json!(false)));
    assert_eq!(send_mail(&sink).1, "451 4.3.0 try later\r\n");
    let shown: Value = serde_json::from_str(&sink.listing("/_sink/behaviour")).unwrap();
    let expected = json!({
        "http": {"delay_ms": 20, "status": 503, "cut": null, "hold": false},
        "mail": {"delay_ms": 20, "reply": "451 4.3.0 try later", "cut": null, "hold": false},
    });
    assert_eq!(shown, expected);
    assert_eq!(sink.arrivals().len(), 2, "what fails is recorded all the same");
}

#[test]
fn behaviour_changes_by_section() {
    let sink = Sink::start(&["--fail", "503"]);
    sink.behave(&json!({"mail": {"reply": "554 5.7.1 no"}}));
    assert_eq!(sink.post("/", b"").0, 503);
    assert_eq!(send_mail(&sink).1, "554 5.7.1 no\r\n");
    sink.behave(&json!({"http": {}}));
    assert_eq!(sink.post("/", b"").0, 200);
    for wrong in [
        json!({"http": {"status": 100}}),
        json!({"http": {"status": 1000}}),
        json!({"http": {"stats": 500}}),
        json!({"mail": {"reply": "250 ok\r\n250 ok"}}),
        json!({"mail": {"reply": "123 no"}}),
        json!({"mail": {"reply": "250-more"}}),
        json!({"mail": {"cut": "sometimes"}}),
        json!([]),
    ] {
        let (status, text) = sink.request("PUT", "/_sink/behaviour", "", wrong.to_string().as_bytes());
        assert_eq!(status, 400, "{wrong}: {text}");
    }
    assert_eq!(sink.post("/", b"").0, 200, "a refused change changes nothing");
}

#[test]
fn an_answer_can_be_late() {
    let sink = Sink::start(&["--delay", "300ms"]);
    let begin = Instant::now();
    sink.post("/", b"");
    assert!(begin.elapsed() >= Duration::from_millis(300));
    let begin = Instant::now();
    assert!(send_mail(&sink).1.starts_with("250 "));
    assert!(begin.elapsed() >= Duration::from_millis(300));
}

#[test]
fn the_connection_can_be_cut_before_the_answer() {
    let sink = Sink::start(&["--cut", "before-answer"]);
    assert_eq!(sink.post("/", b"x").0, 0);
    assert_eq!(send_mail(&sink).1, "");
    assert_eq!(sink.arrivals().len(), 2, "recorded, but never answered");
}

#[test]
fn the_connection_can_be_cut_after_the_answer() {
    let sink = Sink::start(&["--cut", "after-answer"]);
    let mut stream = connect(&sink.http);
    stream.write_all(b"POST / HTTP/1.1\r\nHost: sink\r\nContent-Length: 0\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream);
    assert_eq!(read_answer(&mut reader).unwrap().0, 200);
    assert_eq!(read_answer(&mut reader), None);

    let (mut mail, reply) = send_mail(&sink);
    assert!(reply.starts_with("250 "), "{reply}");
    assert_eq!(mail.reply(), "");
}

/// A held answer is recorded at once and comes when it is released, as the behaviour is then.
#[test]
fn an_answer_can_be_held() {
    let sink = Sink::start(&[]);
    sink.behave(&json!({"http": {"hold": true}, "mail": {"hold": true}}));
    let mut webhook = connect(&sink.http);
    webhook.write_all(b"POST /held HTTP/1.1\r\nHost: sink\r\nContent-Length: 0\r\n\r\n").unwrap();
    let mut mail = Mail::open(&sink);
    mail.envelope();
    mail.send(format!("{MAIL}.\r\n"));
    wait_until("both are recorded", 20, || sink.arrivals().len() == 2);
    webhook.set_nonblocking(true).unwrap();
    let early = webhook.read(&mut [0]).expect_err("not answered yet");
    assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock);
    webhook.set_nonblocking(false).unwrap();

    sink.behave(&json!({"http": {"status": 500}, "mail": {"reply": "452 4.2.2 full"}}));
    assert_eq!(read_answer(&mut BufReader::new(webhook)).unwrap().0, 500);
    assert_eq!(mail.reply(), "452 4.2.2 full\r\n");
}

#[test]
fn a_mail_is_recorded_byte_for_byte() {
    let sink = Sink::start(&[]);
    let mut mail = Mail::open(&sink);
    let greeting = mail.say("EHLO client.example.com");
    for extension in ["SIZE 10485760", "8BITMIME", "SMTPUTF8", "PIPELINING", "ENHANCEDSTATUSCODES"] {
        assert!(greeting.contains(extension), "{greeting}");
    }
    // Pipelined, as RFC 2920 allows.
    mail.send("MAIL FROM:<a@example.com> BODY=8BITMIME SMTPUTF8 SIZE=200\r\nRCPT TO:<b@example.com>\r\n");
    mail.send("RCPT TO:<\"c >\"@example.com>\r\nRCPT TO:<d\u{e9}@example.com>\r\nDATA\r\n");
    for code in ["250", "250", "250", "250", "354"] {
        assert!(mail.reply().starts_with(code));
    }
    let message = "Message-ID: <1@example.com>\r\nX-Fencepost-Id:\r\n m1\r\nSubject: Hello\r\n\r\n.dot\r\n..\r\n\
        bare\n.\nstill\rhere\n.\r\n\u{e9}\r\n";
    let stuffed = message.replace("\r\n.", "\r\n..");
    mail.send(stuffed);
    let reply = mail.say(".");
    assert!(reply.starts_with("250 2.0.0"), "{reply}");
    mail.expect("QUIT", "221");
    assert_eq!(mail.reply(), "");

    let arrivals = sink.arrivals();
    let arrival = &arrivals[0];
    for (name, value) in [
        ("kind", json!("email")),
        ("helo", json!("client.example.com")),
        ("from", json!("a@example.com")),
        ("to", json!(["b@example.com", "\"c >\"@example.com", "d\u{e9}@example.com"])),
        ("message_id", json!("<1@example.com>")),
        ("id", json!("m1")),
        ("subject", json!("Hello")),
        ("message", json!(message)),
    ] {
        assert_eq!(arrival[name], value, "{name}");
    }
}

/// Lines of any length are kept, and a piece of one that happens to end inside CRLF, or to begin
/// with a dot, changes nothing.
#[test]
fn long_lines_survive() {
    let sink = Sink::start(&[]);
    let mut message = String::new();
    for length in [65_534, 65_535, 65_536, 65_537] {
        message.push_str(&"x".repeat(length));
        message.push_str("\r\n.after\r\n");
    }
    message.push_str(&format!("{}.dot inside\r\n", "y".repeat(65_536)));
    let mut mail = Mail::open(&sink);
    mail.envelope();
    mail.send(message.replace("\r\n.", "\r\n.."));
    assert!(mail.say(".").starts_with("250 "));
    assert_eq!(sink.arrivals()[0]["message"].as_str().unwrap(), message);
}

#[test]
fn the_dialogue_is_strict() {
    let sink = Sink::start(&[]);
    let mut mail = Mail::open(&sink);
    for (line, code) in [
        ("MAIL FROM:<a@example.com>", "503 5.5.1"),
        ("EHLO", "501"),
        ("HELO client.example.com", "250 "),
        ("RCPT TO:<b@example.com>", "503 5.5.1"),
        ("DATA", "503 5.5.1"),
        ("MAIL FROM: a@example.com", "501"),
        ("MAIL FROM:<a@example.com> SIZE=99999999", "552 5.3.4"),
        ("MAIL FROM:<a@example.com> RET=FULL", "555 5.5.4"),
        ("MAIL FROM:<\u{e9}@example.com>", "553 5.6.7"),
        ("mail from:<>", "250 2.1.0"),
        ("MAIL FROM:<a@example.com>", "503 5.5.1"),
        ("DATA", "503 5.5.1"),
        ("RCPT TO:<>", "501"),
        ("RCPT TO:<b@example.com> NOTIFY=NEVER", "555 5.5.4"),
        ("RCPT TO:<\u{e9}@example.com>", "553 5.6.7"),
        ("RCPT TO:<b@example.com>", "250 2.1.5"),
        ("RSET", "250 2.0.0"),
        ("DATA", "503 5.5.1"),
        ("NOOP", "250 "),
        ("VRFY b", "252 "),
        ("STARTTLS", "502 "),
        ("AUTH PLAIN", "502 "),
        ("GET / HTTP/1.1", "500 "),
        ("", "500 "),
        ("QUIT", "221 "),
    ] {
        mail.expect(line, code);
    }
    assert_eq!(sink.arrivals().len(), 0);
}

#[test]
fn long_and_unreadable_commands_are_refused() {
    let sink = Sink::start(&[]);
    let mut mail = Mail::open(&sink);
    mail.expect(&"x".repeat(100_000), "500 5.5.2");
    mail.send(b"NOOP \xff\r\n");
    assert!(mail.reply().starts_with("500 5.5.2"));
    mail.expect("NOOP", "250");
}

/// A mail whose end never came is no arrival, and one that is too large is refused at its end.
#[test]
fn unfinished_and_large_mails_are_not_recorded() {
    let sink = Sink::start(&[]);
    let mut mail = Mail::open(&sink);
    mail.envelope();
    mail.send(MAIL);
    mail.0.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(mail.reply(), "");

    let mut mail = Mail::open(&sink);
    mail.envelope();
    for _ in 0..161 {
        mail.send([b'x'; 65_536]);
    }
    mail.send("\r\n");
    mail.expect(".", "552 5.3.4");
    mail.expect("NOOP", "250");
    assert_eq!(sink.arrivals().len(), 0);
}

/// The line is in the file when the answer comes.
#[test]
fn the_log_has_a_line_for_each_arrival() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log.jsonl");
    std::fs::write(&path, "{\"kept\":true}\n").unwrap();
    let sink = Sink::start(&["--log", path.to_str().unwrap()]);
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    sink.post("/one", b"1");
    assert_eq!(lines().len(), 2);
    send_mail(&sink);
    let lines = lines();
    assert_eq!(lines[0]["kept"], true, "the log is appended to");
    assert_eq!(lines[1..], sink.arrivals());
}

#[test]
fn an_arrival_that_cannot_be_logged_is_not_accepted() {
    if !Path::new("/dev/full").exists() {
        println!("there is no /dev/full here, so a full disk can't be shown");
        return;
    }
    let sink = Sink::start(&["--log", "/dev/full"]);
    assert_eq!(sink.post("/", b"").0, 500);
    assert!(send_mail(&sink).1.starts_with("451 "));
    assert_eq!(sink.arrivals().len(), 0);
}

#[test]
fn signals_end_it_well() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut sink = Sink::start(&[]);
        kill_process(Pid::from_child(&sink.child), signal).unwrap();
        wait_until("the sink ends", 20, || sink.child.try_wait().unwrap().is_some());
        assert_eq!(sink.child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_public_address_has_to_be_asked_for() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_fencepost")).arg("sink").args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [["--http", "0.0.0.0:0"], ["--smtp", "[::]:0"], ["--http", "192.0.2.1:80"]] {
        let (code, text) = run(&arguments);
        assert_eq!(code, Some(64), "{text}");
        assert!(text.contains("--public") && text.contains(arguments[1]), "{text}");
    }
    for arguments in [["--delay", "soon"], ["--fail", "99"], ["--fail-mail", "later"], ["--cut", "never"]] {
        let (code, text) = run(&arguments);
        assert_eq!(code, Some(64), "{text}");
        assert!(text.contains(arguments[0]), "{text}");
    }
}

#[test]
fn addresses_are_printed_for_people_too() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_fencepost"))
        .args(["sink", "--http", "127.0.0.1:0", "--smtp", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        line.starts_with("catching webhooks on http://127.0.0.1:") && line.contains(" mail on 127.0.0.1:"),
        "{line}"
    );
}
