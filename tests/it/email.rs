//! The email sender against relays that misbehave: every ending must say exactly what is known.

use std::sync::Arc;
use std::time::Duration;

use fencepost::effect::{Arm, Command, Effect, Payload, Report, Request};
use fencepost::email::{Email, Login, Settings, SettingsError, Timeouts, Tls};
use fencepost::rules::{Fault, Outcome};
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::support::postfix::Postfix;
use crate::support::smtp::{Dot, Script, Server, Stage, TlsMode};
use crate::support::wait_until;

const NO_ANSWER: &str = "end of data sent, no answer";

/// Deadlines that no test on a slow machine meets by accident.
const LONG: Timeouts = Timeouts {
    connect: Duration::from_secs(20),
    greeting: Duration::from_secs(20),
    command: Duration::from_secs(20),
    body: Duration::from_secs(20),
    final_dot: Duration::from_secs(20),
};

const SHORT: Duration = Duration::from_millis(200);

pub fn settings(port: u16) -> Settings {
    Settings {
        host: "127.0.0.1".to_owned(),
        port,
        tls: Tls::None,
        login: None,
        helo_name: "client.example.com".to_owned(),
        ca_file: None,
        allow_plaintext: false,
        timeouts: LONG,
    }
}

pub fn command(payload: &Value) -> Command {
    Command {
        n: 1,
        id: "0192f0c1-7d3a-7c4e-8f00-0123456789ab".to_owned(),
        scope: "order/17".to_owned(),
        lane: String::new(),
        seq: 1,
        token: 42,
        kind: "email".to_owned(),
        destination: "main".to_owned(),
        headers: None,
        payload: Payload::Text(payload.to_string().into_bytes()),
        inserted_ms: 1_790_000_000_123,
        traceparent: None,
    }
}

fn simple() -> Command {
    command(&json!({"from": "shop@example.com", "to": "ann@example.net", "subject": "Hi", "text": "Hello"}))
}

pub async fn send(email: &Email, command: &Command) -> Report {
    send_armed(email, command, &Arm::begun_armed()).await
}

async fn send_armed(email: &Email, command: &Command, arm: &Arm) -> Report {
    email.send(Request { command, attempt_no: 1, now_ms: 1_790_000_001_000, arm }).await
}

async fn send_to(server: &Server) -> Report {
    send(&Email::new(settings(server.port())).unwrap(), &simple()).await
}

fn phase(report: &Report) -> &str {
    report.evidence.text("phase").unwrap()
}

/// The four words and the channel, as the cases name them.
fn class(report: &Report) -> &'static str {
    match (report.outcome, report.fault) {
        (Outcome::Delivered, _) => "delivered",
        (Outcome::Deferred, Fault::Command) => "deferred",
        (Outcome::Deferred, Fault::Channel) => "channel",
        (Outcome::Deferred, Fault::Configuration) => "configuration",
        (Outcome::Refused, _) => "refused",
        (Outcome::Unknown, _) => "unknown",
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mail_is_delivered() {
    let server = Server::start(Script::new().reply(Stage::Dot, "250 2.0.0 Ok: queued as 4F2K"));
    let arm = Arm::recorded_by(|| Box::pin(async { true }));
    let report = send_armed(&Email::new(settings(server.port())).unwrap(), &simple(), &arm).await;
    assert_eq!(class(&report), "delivered", "{report:?}");
    assert!(arm.is_armed());
    assert_eq!(phase(&report), "end of data");
    assert_eq!(report.evidence.text("reply"), Some("250 2.0.0 Ok: queued as 4F2K"));
    assert_eq!(report.evidence.text("enhanced"), Some("2.0.0"));
    assert_eq!(report.evidence.text("server"), Some("mx.example.com"));
    assert_eq!(report.evidence.text("tls"), Some("no"));
    let mails = server.mails();
    assert_eq!(mails.len(), 1);
    assert_eq!(mails[0].from, "shop@example.com");
    assert_eq!(mails[0].recipients, ["ann@example.net"]);
    assert_eq!(mails[0].body(), b"Hello\r\n");
    let verbs = server.wait_for_ended(1)[0].verbs();
    assert_eq!(verbs, ["EHLO", "MAIL", "RCPT", "DATA", "QUIT"]);
}

/// Goal: no answer to the end mark is ever taken for an answer. Method: the relay stores the mail and
/// breaks in each of the ways of the case.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h41_connection_lost_after_the_final_dot() {
    for (variant, dot, reason) in [
        ("a", Dot::Close, "connection closed"),
        ("b", Dot::Reset, "connection broken"),
        ("d", Dot::BytesThenClose(b"250".to_vec()), "middle of a reply: 250"),
        ("e", Dot::BytesThenClose(b"250-queued\r\n".to_vec()), "middle of a reply: 250-queued"),
        ("e2", Dot::BytesThenClose(b"250 ok".to_vec()), "middle of a reply: 250 ok"),
        ("garbage", Dot::BytesThenClose(b"hello\r\n".to_vec()), "not an SMTP reply"),
        ("1yz", Dot::Reply("150 working".into()), ""),
        ("3yz", Dot::Reply("354 go on".into()), ""),
    ] {
        let server = Server::start(Script::new().dots([dot]));
        let report = send_to(&server).await;
        assert_eq!(class(&report), "unknown", "{variant}: {report:?}");
        assert_eq!(phase(&report), NO_ANSWER, "{variant}");
        assert!(report.evidence.text("reason").unwrap_or_default().contains(reason), "{variant}: {report:?}");
        assert_eq!(server.mails().len(), 1, "{variant}");
        assert_eq!(server.connections(), 1, "{variant}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h41_c_silent_until_the_deadline() {
    let server = Server::start(Script::new().dots([Dot::Silent]));
    let email = Email::new(Settings { timeouts: Timeouts { final_dot: SHORT, ..LONG }, ..settings(server.port()) });
    let report = send(&email.unwrap(), &simple()).await;
    assert_eq!((class(&report), phase(&report)), ("unknown", NO_ANSWER));
    assert_eq!(report.evidence.text("reason"), Some("timeout"));
    // A reset takes back what still waits in the send buffer; after a close it could arrive later.
    assert!(server.wait_for_ended(1)[0].reset);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h41_f_tls_closed_without_an_answer() {
    for dot in [Dot::CloseNotify, Dot::Close, Dot::Reset] {
        let relay = TlsRelay::start(Script::new().dots([dot.clone()]), TlsMode::Implicit);
        let report = send(&relay.email(Tls::Implicit), &simple()).await;
        assert_eq!((class(&report), phase(&report)), ("unknown", NO_ANSWER), "{dot:?}: {report:?}");
        assert_eq!(report.evidence.text("tls"), Some("yes"));
        assert_eq!(relay.server.mails().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h42_a_negative_answer_to_the_final_dot_is_definite() {
    for (dot, right) in [
        (Dot::Reply("451 4.4.2 timeout waiting for data".into()), "deferred"),
        (Dot::Reply("452 4.3.1 insufficient storage".into()), "deferred"),
        (Dot::Reply("552 5.3.4 message too big".into()), "refused"),
        (Dot::Reply("554 5.7.1 rejected by content filter".into()), "refused"),
        (Dot::ReplyThenClose("451 4.3.0 try again later".into()), "deferred"),
    ] {
        let server = Server::start(Script::new().dots([dot.clone()]));
        let report = send_to(&server).await;
        assert_eq!((class(&report), phase(&report)), (right, "end of data"), "{dot:?}");
        let (Dot::Reply(reply) | Dot::ReplyThenClose(reply)) = dot else { unreachable!("replies only") };
        assert_eq!(report.evidence.text("reply"), Some(reply.as_str()));
    }
}

/// The table of the case, as it stands there but for what the dispatcher does with each class.
const H44: &str = "\
banner|421 4.3.2 not accepting messages|channel
banner|554 5.7.1 go away|channel
EHLO|502 unknown command|delivered
EHLO|554 5.7.1 no|channel
MAIL|451 4.3.0 local error|deferred
MAIL|550 5.7.1 sender not allowed|refused
MAIL|530 5.7.0 must issue STARTTLS|channel
RCPT|450 4.2.0 greylisted|deferred
RCPT|422 4.2.2 greylisted|deferred
RCPT|451 4.7.500 server busy|deferred
RCPT|450 4.1.2 domain not found|deferred
RCPT|421 4.7.0 TSS04 deferred|deferred
RCPT|550 5.1.1 user unknown|refused
RCPT|551 user not local|refused
RCPT|553 5.1.3 bad syntax|refused
RCPT|501 5.1.3 bad address|refused
RCPT|552 5.2.2 mailbox full|refused
RCPT|251 will forward|delivered
RCPT|252 cannot verify|delivered
RCPT|354 what|deferred
DATA|451 aborted|deferred
DATA|554 no valid recipients|refused
DATA|250 what|deferred
final dot|250 2.0.0 queued as X|delivered
final dot|250|delivered
final dot|251 2.0.0 taken|delivered
final dot|450 4.7.1 rate limited|deferred
final dot|550 5.7.1 spam|refused
final dot|571 message refused|refused
RSET|500 error|delivered
NOOP|500 error|delivered
QUIT|500 error|delivered
QUIT|421 bye|delivered";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h44_each_reply_at_each_stage() {
    for row in H44.lines() {
        let [name, reply, right] = row.split('|').collect::<Vec<_>>().try_into().unwrap();
        let (stage, phase_of) = match name {
            "banner" => (Stage::Banner, "greeting"),
            "EHLO" => (Stage::Ehlo, "ehlo"),
            "MAIL" => (Stage::Mail, "mail"),
            "RCPT" => (Stage::Rcpt, "rcpt"),
            "DATA" => (Stage::Data, "data"),
            "final dot" => (Stage::Dot, "end of data"),
            "RSET" => (Stage::Rset, ""),
            "NOOP" => (Stage::Noop, ""),
            "QUIT" => (Stage::Quit, ""),
            other => panic!("no stage {other}"),
        };
        let server = Server::start(Script::new().reply(stage, reply));
        let report = send_to(&server).await;
        assert_eq!(class(&report), right, "{row}: {report:?}");
        if right == "delivered" {
            assert_eq!(phase(&report), "end of data", "{row}");
        } else {
            assert_eq!(phase(&report), phase_of, "{row}");
            assert_eq!(report.evidence.text("reply"), Some(reply), "{row}");
            assert_eq!(server.mails().len(), usize::from(name == "final dot"), "{row}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h44_a_connection_lost_before_the_body_is_no_verdict() {
    for (stage, right) in
        [(Stage::Banner, "channel"), (Stage::Ehlo, "deferred"), (Stage::Mail, "deferred"), (Stage::Rcpt, "deferred")]
    {
        // The answer of the stage is still good; the step after it meets the close.
        let server = Server::start(Script::new().close_after(stage.clone()));
        let report = send_to(&server).await;
        assert_eq!(class(&report), right, "{stage:?}: {report:?}");
        assert!(server.mails().is_empty());
    }
}

/// Goal: what happens between 354 and the end mark is certain, also for a mail that fits into one
/// packet. Method: the relay ends its part while the attempt is being armed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_gives_up_before_the_end_mark_has_delivered_nothing() {
    for (data, right) in [
        ("354 go", "deferred"),
        ("354 go\r\n421 4.3.2 shutting down", "deferred"),
        ("354 go\r\n554 5.7.1 changed my mind", "refused"),
        ("354 go\r\n250 2.0.0 queued", "deferred"),
    ] {
        let server = Arc::new(Server::start(Script::new().reply(Stage::Data, data).close_after(Stage::Data)));
        let email = Email::new(settings(server.port())).unwrap();
        let closing = Arc::clone(&server);
        let arm = Arm::recorded_by(move || {
            let server = Arc::clone(&closing);
            Box::pin(async move { tokio::task::spawn_blocking(move || server.wait_for_ended(1)).await.is_ok() })
        });
        let report = send_armed(&email, &simple(), &arm).await;
        assert_eq!((class(&report), phase(&report)), (right, "body"), "{data}: {report:?}");
        assert!(server.mails().is_empty());
    }
}

/// Goal: every phase has a deadline of its own. Method: the relay holds its answer at each of them
/// until the report is in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withheld_answer_ends_in_our_timeout() {
    for (stage, right, phase_of) in [
        (Stage::Banner, "channel", "greeting"),
        (Stage::Ehlo, "channel", "ehlo"),
        (Stage::Mail, "deferred", "mail"),
        (Stage::Rcpt, "deferred", "rcpt"),
        (Stage::Data, "deferred", "data"),
        (Stage::Dot, "unknown", NO_ANSWER),
    ] {
        let server = Server::start(Script::new().hold(stage.clone()));
        let timeouts = match stage {
            Stage::Banner => Timeouts { greeting: SHORT, ..LONG },
            Stage::Dot => Timeouts { final_dot: SHORT, ..LONG },
            _ => Timeouts { command: SHORT, ..LONG },
        };
        let email = Email::new(Settings { timeouts, ..settings(server.port()) }).unwrap();
        let report = send(&email, &simple()).await;
        assert_eq!((class(&report), phase(&report)), (right, phase_of), "{stage:?}: {report:?}");
        assert_eq!(report.evidence.text("reason"), Some("timeout"), "{stage:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_listens() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let report = send(&Email::new(settings(port)).unwrap(), &simple()).await;
    assert_eq!((class(&report), phase(&report)), ("channel", "connect"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_recipient_and_nobody_gets_it() {
    let three = command(&json!({
        "from": "shop@example.com", "to": ["one@example.net", "gone@example.net"], "bcc": "three@example.net",
        "subject": "Hi", "text": "Hello",
    }));
    let at = |address: &str| Stage::RcptTo(address.to_owned());
    for (script, right, recipient) in [
        (Script::new().reply(at("gone@example.net"), "550 5.1.1 no such user"), "refused", "gone@example.net"),
        (Script::new().reply(at("gone@example.net"), "450 4.2.0 later"), "deferred", "gone@example.net"),
        (Script::new().reply(at("three@example.net"), "550 5.1.1 no three@example.net"), "refused", "a bcc recipient"),
        (Script::new().reply(at("three@example.net"), "450 4.2.0 <THREE@example.net>"), "deferred", "a bcc recipient"),
        // A refusal wins, whichever came first: no later attempt could reach all.
        (
            Script::new().reply(at("one@example.net"), "450 4.2.0 later").reply(at("gone@example.net"), "550 5.1.1 no"),
            "refused",
            "gone@example.net",
        ),
        (Script::new().reply(Stage::Data, "554 5.5.1 three@example.net is gone"), "refused", ""),
    ] {
        let server = Server::start(script);
        let report = send(&Email::new(settings(server.port())).unwrap(), &three).await;
        assert_eq!(class(&report), right, "{report:?}");
        assert_eq!(report.evidence.text("recipient").unwrap_or_default(), recipient);
        assert!(!report.evidence.to_json().to_lowercase().contains("three"), "{report:?}");
        assert!(server.mails().is_empty());
    }
}

/// Goal: a send that is given up can't lend its late answer to the next one. Method: the first is
/// dropped while the relay holds the answer to its final dot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_then_send_returns_554_as_554() {
    let server = Server::start(
        Script::new()
            .hold(Stage::Dot)
            .dots([Dot::Reply("250 2.0.0 queued as FIRST".into()), Dot::Reply("554 5.7.1 SECOND rejected".into())]),
    );
    let email = Email::new(settings(server.port())).unwrap();
    let first = simple();
    {
        let arm = Arm::begun_armed();
        let sending = send_armed(&email, &first, &arm);
        let arrived = tokio::task::spawn_blocking({
            let server = Arc::new(server);
            move || {
                server.wait_for_mails(1);
                server
            }
        });
        let server = tokio::select! {
            report = sending => panic!("ended early: {report:?}"),
            server = arrived => server.unwrap(),
        };
        server.release();
        let report = send(&email, &simple()).await;
        assert_eq!(class(&report), "refused", "{report:?}");
        assert_eq!(report.evidence.text("reply"), Some("554 5.7.1 SECOND rejected"));
        assert_eq!(server.connections(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_may_not_arm_sends_no_byte_of_the_body() {
    let server = Server::start(Script::new());
    let arm = Arm::recorded_by(|| Box::pin(async { false }));
    let report = send_armed(&Email::new(settings(server.port())).unwrap(), &simple(), &arm).await;
    assert_eq!(report, Report::not_armed());
    let session = &server.wait_for_ended(1)[0];
    assert_eq!(session.verbs(), ["EHLO", "MAIL", "RCPT", "DATA"]);
    assert_eq!(session.body_bytes, 0);
    assert!(server.mails().is_empty());
}

/// Goal: before the end mark has begun, a relay that cuts the mail off has certainly not delivered
/// it, and what it said first counts. Method: a body that no socket buffer holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_cut_off_is_certain() {
    let large = command(&json!({
        "from": "shop@example.com", "to": "ann@example.net", "text": "0123456789abcdef\n".repeat(400_000),
    }));
    for (script, right) in [
        (Script::new().cut_body(10_000, "552 5.3.4 too big"), "refused"),
        (Script::new().cut_body(10_000, "451 4.3.0 full"), "deferred"),
        (Script::new().cut_body(10_000, "250 2.0.0 queued"), "deferred"),
        (Script::new().cut_body(10_000, ""), "deferred"),
        (Script::new().reset_body(10_000), "deferred"),
    ] {
        let server = Server::start(script.clone());
        let report = send(&Email::new(settings(server.port())).unwrap(), &large).await;
        assert_eq!((class(&report), phase(&report)), (right, "body"), "{script:?}: {report:?}");
        assert!(server.mails().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_stops_reading_ends_in_our_timeout() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let relay = std::thread::spawn(move || {
        use std::io::{BufRead, BufReader, Write};
        let (mut socket, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
        for reply in ["220 mx", "250 mx", "250 ok", "250 ok", "354 go"] {
            socket.write_all(format!("{reply}\r\n").as_bytes()).unwrap();
            if reply != "354 go" {
                lines.next().unwrap().unwrap();
            }
        }
        socket
    });
    let large = command(&json!({
        "from": "shop@example.com", "to": "ann@example.net", "text": "0123456789abcdef\n".repeat(500_000),
    }));
    let timeouts = Timeouts { body: SHORT, ..LONG };
    let report = send(&Email::new(Settings { timeouts, ..settings(port) }).unwrap(), &large).await;
    assert_eq!((class(&report), phase(&report)), ("deferred", "body"), "{report:?}");
    drop(relay.join().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_out_of_turn_is_not_taken_for_the_next_answer() {
    // Two answers to RCPT: the second would pass for the one to DATA, and so on to the final dot.
    let server = Server::start(Script::new().reply(Stage::Rcpt, "250 ok\r\n250 once more"));
    let report = send_to(&server).await;
    assert_eq!(class(&report), "deferred", "{report:?}");
    assert_eq!(report.evidence.text("reason"), Some("a reply out of turn"));
    assert!(server.mails().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_size_is_announced_where_the_relay_wants_it() {
    let server = Server::start(Script::new().offer("SIZE 10485760").reply(Stage::Mail, "552 5.3.4 too big"));
    let report = send_to(&server).await;
    assert_eq!((class(&report), phase(&report)), ("refused", "mail"));
    let commands = server.wait_for_ended(1)[0].commands.clone();
    let size: usize = commands[1].strip_prefix("MAIL FROM:<shop@example.com> SIZE=").unwrap().parse().unwrap();
    assert!((300..600).contains(&size), "{size}");
}

/// A relay with TLS and the file that holds its certificate.
struct TlsRelay {
    server: Server,
    folder: tempfile::TempDir,
}

impl TlsRelay {
    fn start(script: Script, mode: TlsMode) -> Self {
        let server = Server::start_tls(script, mode);
        let folder = tempfile::tempdir().unwrap();
        server.write_certificate(&folder.path().join("ca.pem"));
        Self { server, folder }
    }

    fn settings(&self, tls: Tls) -> Settings {
        let ca_file = Some(self.folder.path().join("ca.pem"));
        Settings { host: "localhost".to_owned(), tls, ca_file, ..settings(self.server.port()) }
    }

    fn email(&self, tls: Tls) -> Email {
        Email::new(self.settings(tls)).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_from_the_first_byte_and_by_starttls() {
    for (mode, tls) in [
        (TlsMode::Implicit, Tls::Implicit),
        (TlsMode::Starttls, Tls::Starttls),
        (TlsMode::Starttls, Tls::Opportunistic),
    ] {
        let relay = TlsRelay::start(Script::new(), mode);
        let report = send(&relay.email(tls), &simple()).await;
        assert_eq!(class(&report), "delivered", "{tls:?}: {report:?}");
        assert_eq!(report.evidence.text("tls"), Some("yes"));
        let session = &relay.server.wait_for_ended(1)[0];
        assert!(session.tls);
        let hellos = session.verbs().iter().filter(|verb| *verb == "EHLO").count();
        assert_eq!(hellos, if mode == TlsMode::Implicit { 1 } else { 2 });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starttls_that_is_stripped_or_refused_sends_nothing() {
    let stripped = Server::start(Script::new());
    let required = Email::new(Settings { tls: Tls::Starttls, ..settings(stripped.port()) }).unwrap();
    let report = send(&required, &simple()).await;
    assert_eq!((class(&report), phase(&report)), ("channel", "starttls"), "{report:?}");
    assert!(!stripped.wait_for_ended(1)[0].verbs().contains(&"MAIL".to_owned()));

    for reply in ["454 4.7.0 TLS not available", "220 go\r\n250 injected"] {
        let relay = TlsRelay::start(Script::new().reply(Stage::Starttls, reply), TlsMode::Starttls);
        for tls in [Tls::Starttls, Tls::Opportunistic] {
            let report = send(&relay.email(tls), &simple()).await;
            assert_eq!((class(&report), phase(&report)), ("channel", "starttls"), "{reply}: {report:?}");
        }
        assert!(relay.server.mails().is_empty());
    }

    let plain = Server::start(Script::new());
    let opportunistic = Email::new(Settings { tls: Tls::Opportunistic, ..settings(plain.port()) }).unwrap();
    assert_eq!(class(&send(&opportunistic, &simple()).await), "delivered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_of_another_authority_is_refused() {
    let other = TlsRelay::start(Script::new(), TlsMode::Implicit);
    for (mode, tls, phase_of) in
        [(TlsMode::Implicit, Tls::Implicit, "tls"), (TlsMode::Starttls, Tls::Starttls, "starttls")]
    {
        let relay = TlsRelay::start(Script::new(), mode);
        for ca_file in [Some(other.folder.path().join("ca.pem")), None] {
            let email = Email::new(Settings { ca_file, ..relay.settings(tls) }).unwrap();
            let report = send(&email, &simple()).await;
            assert_eq!((class(&report), phase(&report)), ("channel", phase_of), "{report:?}");
        }
        assert!(relay.server.mails().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn login_by_both_mechanisms_and_never_in_clear() {
    let login = |password: &str| {
        Some(Login { username: "mailer".to_owned(), password: SecretString::from(password.to_owned()) })
    };
    let right = ("mailer".to_owned(), "s3cr3t-Smtp".to_owned());
    for offer in ["AUTH LOGIN", "AUTH PLAIN", "AUTH LOGIN PLAIN", "AUTH=LOGIN"] {
        let script = Script::new().offer(offer).login(&right.0, &right.1);
        let relay = TlsRelay::start(script, TlsMode::Starttls);
        let email = Email::new(Settings { login: login("s3cr3t-Smtp"), ..relay.settings(Tls::Starttls) }).unwrap();
        assert_eq!(class(&send(&email, &simple()).await), "delivered", "{offer}");
        assert_eq!(relay.server.sessions()[0].login.as_ref(), Some(&right));
        assert!(!format!("{email:?}").contains("s3cr3t"), "{email:?}");

        let email = Email::new(Settings { login: login("wrong"), ..relay.settings(Tls::Starttls) }).unwrap();
        let report = send(&email, &simple()).await;
        assert_eq!((class(&report), phase(&report)), ("channel", "auth"), "{offer}: {report:?}");
    }
    for reply in ["454 4.7.0 too many login attempts", "535 5.7.8 not s3cr3t-Smtp nor czNjcjN0LVNtdHA="] {
        let server = Server::start(Script::new().offer("AUTH PLAIN").reply(Stage::Auth, reply));
        let email = Email::new(Settings { login: login("s3cr3t-Smtp"), ..settings(server.port()) }).unwrap();
        let report = send(&email, &simple()).await;
        assert_eq!((class(&report), phase(&report)), ("channel", "auth"), "{report:?}");
        let evidence = report.evidence.to_json();
        assert!(!evidence.contains("s3cr3t") && !evidence.contains("czNjcjN0"), "{evidence}");
    }
    // A relay that offers no login, or hides it behind TLS that was stripped.
    let server = Server::start(Script::new());
    for tls in [Tls::None, Tls::Starttls] {
        let email = Email::new(Settings { tls, login: login("s3cr3t-Smtp"), ..settings(server.port()) }).unwrap();
        assert_eq!(class(&send(&email, &simple()).await), "channel");
    }
    assert!(server.sessions().iter().all(|session| session.login.is_none()));
}

#[test]
fn settings_that_are_refused() {
    let relay = |tls| Settings { host: "smtp.example.com".to_owned(), tls, ..settings(25) };
    for tls in [Tls::None, Tls::Opportunistic] {
        assert!(matches!(Email::new(relay(tls)), Err(SettingsError::Plaintext)));
        assert!(Email::new(Settings { allow_plaintext: true, ..relay(tls) }).is_ok());
        for host in ["localhost", "127.0.0.1", "::1"] {
            assert!(Email::new(Settings { host: host.to_owned(), tls, ..settings(25) }).is_ok(), "{host}");
        }
    }
    for tls in [Tls::Implicit, Tls::Starttls] {
        assert!(Email::new(relay(tls)).is_ok());
    }
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    for ca_file in [empty, folder.path().join("missing.pem")] {
        let missing = Settings { ca_file: Some(ca_file), ..relay(Tls::Implicit) };
        assert!(matches!(Email::new(missing), Err(SettingsError::Tls(_))));
    }
    for helo_name in ["", "a b", "a\r\nMAIL"] {
        let wrong = Settings { helo_name: helo_name.to_owned(), ..settings(25) };
        assert!(matches!(Email::new(wrong), Err(SettingsError::HeloName)));
    }
    assert!(matches!(Email::new(Settings { host: "a b".to_owned(), ..settings(25) }), Err(SettingsError::Host)));
    let timeouts = Timeouts { body: Duration::ZERO, ..LONG };
    assert!(matches!(Email::new(Settings { timeouts, ..settings(25) }), Err(SettingsError::Timeout)));
}

/// Goal: what the scripted relay says of us holds for a real one. Method: a private Postfix delivers
/// into a mailbox, and the file there is compared with the bytes that the scripted relay captured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postfix_takes_and_refuses() {
    let mail = command(&json!({
        "from": "Jörg <shop@example.com>", "to": ["Ann <ann@example.net>"], "bcc": "eve@example.net",
        "subject": "Bestellung für Ann", "text": "Hellö\n.\n..dots\n.\n", "html": "<p>Hellö</p>",
        "attachments": [{"name": "a.txt", "type": "text/plain", "base64": "AQID"}],
    }));
    let scripted = Server::start(Script::new());
    assert_eq!(class(&send(&Email::new(settings(scripted.port())).unwrap(), &mail).await), "delivered");
    let right = String::from_utf8(scripted.mails()[0].data()).unwrap().replace("\r\n", "\n");

    let postfix = Postfix::start(&["ann", "eve"]);
    let email = Email::new(settings(postfix.port())).unwrap();
    let report = send(&email, &mail).await;
    assert_eq!((class(&report), phase(&report)), ("delivered", "end of data"), "{report:?}\n{}", postfix.log());
    assert!(report.evidence.text("reply").unwrap().contains("queued as"), "{report:?}");
    for user in ["ann", "eve"] {
        wait_until(user, 20, || postfix.mails(user).len() == 1);
        let found = &postfix.mails(user)[0];
        assert!(found.ends_with(&right), "{found}");
        assert!(found.contains(&format!("Message-ID: <{}@example.com>\n", mail.id)));
        assert_eq!(found.contains("eve@example.net"), user == "eve", "{found}");
    }

    let two = json!({"from": "shop@example.com", "to": ["ann@example.net", "nobody@example.net"], "text": "Hello"});
    let report = send(&email, &command(&two)).await;
    assert_eq!((class(&report), phase(&report)), ("refused", "rcpt"), "{report:?}");
    assert!(report.evidence.text("reply").unwrap().starts_with("550 5.1.1"), "{report:?}");
    assert_eq!(report.evidence.text("recipient"), Some("nobody@example.net"));

    let relayed = json!({"from": "shop@example.com", "to": "ann@example.org", "text": "Hello"});
    assert_eq!(class(&send(&email, &command(&relayed)).await), "refused");

    let large = json!({"from": "shop@example.com", "to": "ann@example.net", "text": "0123456789\n".repeat(10_000)});
    let report = send(&email, &command(&large)).await;
    assert_eq!((class(&report), phase(&report)), ("refused", "mail"), "{report:?}");
    assert_eq!(report.evidence.text("enhanced"), Some("5.3.4"));
    assert_eq!(postfix.mails("ann").len(), 1);
}
