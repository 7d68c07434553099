//! Effects keep their word: the crate's own senders and the example's actuator pass the checks that it
//! offers to users, and each check finds the effect that breaks it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fencepost::effect::conformance::{self, Breach, Device, Scenario, Setup};
use fencepost::effect::{BoxFuture, Command, Effect, Evidence, Report, Request, Unsendable};
use fencepost::email::{Email, Login, Settings as EmailSettings, Timeouts, Tls};
use fencepost::webhook::{Settings as WebhookSettings, Webhook};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};

use crate::custom_effect::{Behaviour, Controller, Valves};
use crate::support::http::{Gate, Reply, Server};
use crate::support::smtp::{self, Dot, Script, Stage};

const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(10);

fn check(set_up: impl FnMut(Scenario) -> Setup) -> Result<(), Breach> {
    tokio::runtime::Runtime::new().unwrap().block_on(conformance::check(set_up))
}

// ── The crate's own ─────────────────────────────────────────────────────────────────────────────────

const KEY: &str = "whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY";

struct Receiver(Server);

impl Device for Receiver {
    fn effect_bytes(&self) -> usize {
        self.0.requests().iter().map(|request| request.head.len() + request.body.len()).sum()
    }

    fn open_connections(&self) -> usize {
        self.0.open_connections()
    }
}

fn receiver(scenario: Scenario) -> Server {
    match scenario {
        Scenario::Accepts => Server::start(|_| Reply::status(200)),
        Scenario::Refuses => Server::start(|_| Reply::status(410)),
        Scenario::ClosesBeforeRequest => Server::closing_at_once(),
        Scenario::ClosesAfterRequest => Server::start(|_| Reply::close()),
        Scenario::NeverAnswers => Server::start(|_| Reply::status(200).held_by(&Gate::new())),
    }
}

#[test]
fn the_webhook_sender_keeps_its_word() {
    let set_up = |scenario| {
        let server = receiver(scenario);
        let webhook = Webhook::new(WebhookSettings {
            url: Some(server.url().parse().unwrap()),
            secrets: vec![KEY.into()],
            connect_timeout: LONG,
            read_timeout: if scenario == Scenario::NeverAnswers { SHORT } else { LONG },
            timeout: LONG,
            allow_networks: vec!["127.0.0.0/8".parse().unwrap()],
            effect_free_status: Vec::new(),
            ca_file: None,
        });
        let command = conformance::command("webhook", "billing", r#"{"paid":true}"#);
        Setup::new(webhook.unwrap(), command, Arc::new(Receiver(server))).secret(&KEY["whsec_".len()..])
    };
    check(set_up).unwrap();
}

struct Relay(smtp::Server);

impl Device for Relay {
    fn effect_bytes(&self) -> usize {
        self.0.sessions().iter().map(|session| session.body_bytes).sum()
    }

    fn open_connections(&self) -> usize {
        self.0.sessions().iter().filter(|session| !session.ended).count()
    }
}

fn relay(scenario: Scenario) -> smtp::Server {
    let script = Script::new().offer("AUTH PLAIN").login("app", "opensesame");
    smtp::Server::start(match scenario {
        Scenario::Accepts => script,
        Scenario::Refuses => script.dots([Dot::Reply("554 5.6.0 no".into())]),
        Scenario::ClosesBeforeRequest => script.close_after(Stage::Banner),
        Scenario::ClosesAfterRequest => script.dots([Dot::Close]),
        Scenario::NeverAnswers => script.dots([Dot::Silent]),
    })
}

#[test]
fn the_mail_sender_keeps_its_word() {
    let set_up = |scenario| {
        let server = relay(scenario);
        let final_dot = if scenario == Scenario::NeverAnswers { SHORT } else { LONG };
        let email = Email::new(EmailSettings {
            host: "127.0.0.1".to_owned(),
            port: server.port(),
            tls: Tls::None,
            login: Some(Login { username: "app".to_owned(), password: "opensesame".into() }),
            helo_name: "client.example.com".to_owned(),
            ca_file: None,
            allow_plaintext: false,
            timeouts: Timeouts { connect: LONG, greeting: LONG, command: LONG, body: LONG, final_dot },
        });
        let mail = r#"{"from":"shop@example.com","to":"ann@example.net","subject":"Hi","text":"Hello"}"#;
        let command = conformance::command("email", "main", mail);
        Setup::new(email.unwrap(), command, Arc::new(Relay(server))).secret("opensesame")
    };
    check(set_up).unwrap();
}

// ── The example's ───────────────────────────────────────────────────────────────────────────────────

fn controller(scenario: Scenario) -> Controller {
    let behaviour = match scenario {
        Scenario::Accepts => Behaviour::Ok,
        Scenario::Refuses => Behaviour::Err,
        Scenario::ClosesBeforeRequest => Behaviour::Deaf,
        Scenario::ClosesAfterRequest => Behaviour::Mute,
        Scenario::NeverAnswers => Behaviour::Silent,
    };
    Controller::start(behaviour).unwrap()
}

fn open_a_valve() -> Command {
    conformance::command("actuator", "valves", "tank-1")
}

#[test]
fn the_actuator_of_the_example_keeps_its_word() {
    let set_up = |scenario| {
        let device = controller(scenario);
        let valves = Valves { address: device.address, connect: LONG, answer: SHORT };
        Setup::new(valves, open_a_valve(), device.seen)
    };
    check(set_up).unwrap();
}

/// A busy controller has refused for now only, which the checks allow too.
#[test]
fn a_busy_actuator_keeps_its_word() {
    let set_up = |scenario| {
        let busy = || Controller::start(Behaviour::Busy).unwrap();
        let device = if scenario == Scenario::Refuses { busy() } else { controller(scenario) };
        let valves = Valves { address: device.address, connect: LONG, answer: SHORT };
        Setup::new(valves, open_a_valve(), device.seen)
    };
    check(set_up).unwrap();
}

#[test]
fn only_names_of_valves_are_sent() {
    let valves = Valves::new(controller(Scenario::Accepts).address);
    let look = |payload: &str| valves.look(&conformance::command("actuator", "valves", payload)).is_ok();
    assert!(look("tank-1") && look("7"));
    for payload in ["", "tank 1", "tank-1\nOPEN tank-2", "tänk", &"x".repeat(33)] {
        assert!(!look(payload), "{payload:?}");
    }
}

// ── Effects that don't ──────────────────────────────────────────────────────────────────────────────

/// What is wrong with an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    SendsBeforeArm,
    NeverArms,
    ArmsTwice,
    SendsAfterAFailedArm,
    TakesACloseForSuccess,
    TakesACloseForFailure,
    TakesSilenceForFailure,
    TakesANoForUnknown,
    GoesOnWhenDropped,
    LooksOverTheWire,
    ShowsASecret,
    RecordsASecret,
}

const SECRET: &str = "opensesame";

/// A caller of valves with one fault.
struct Faulty {
    wrong: Wrong,
    address: std::net::SocketAddr,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.wrong == Wrong::ShowsASecret { SECRET } else { "Faulty" })
    }
}

impl Faulty {
    fn is(&self, wrong: Wrong) -> bool {
        self.wrong == wrong
    }

    async fn attempt(&self, request: Request<'_>) -> Report {
        let mut stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        if self.is(Wrong::SendsBeforeArm) {
            stream.write_all(b"OPEN tank-1\n").await.unwrap();
        }
        let armed = self.is(Wrong::NeverArms) || request.arm.arm().await.is_ok();
        if self.is(Wrong::ArmsTwice) {
            let _ = request.arm.arm().await;
        }
        if !armed && !self.is(Wrong::SendsAfterAFailedArm) {
            return Report::not_armed();
        }
        let sending = exchange(stream, !self.is(Wrong::SendsBeforeArm));
        let answer = if self.is(Wrong::GoesOnWhenDropped) {
            let sending = tokio::spawn(sending);
            tokio::time::timeout(SHORT, sending).await.map(Result::unwrap)
        } else {
            tokio::time::timeout(SHORT, sending).await
        };
        if !armed {
            return Report::not_armed();
        }
        self.judge(answer.ok().as_deref())
    }

    fn judge(&self, answer: Option<&str>) -> Report {
        let secret = if self.is(Wrong::RecordsASecret) { SECRET } else { "" };
        let evidence = Evidence::new("answer").with("login", secret);
        match answer {
            Some("OK\n") => Report::delivered(evidence),
            Some("ERR no such valve\n") if !self.is(Wrong::TakesANoForUnknown) => Report::refused(evidence),
            Some(_) if self.is(Wrong::TakesACloseForSuccess) => Report::delivered(evidence),
            Some(_) if self.is(Wrong::TakesACloseForFailure) => Report::deferred(evidence),
            None if self.is(Wrong::TakesSilenceForFailure) => Report::deferred(evidence),
            Some(_) | None => Report::unknown(evidence),
        }
    }
}

async fn exchange(stream: tokio::net::TcpStream, sends: bool) -> String {
    let mut stream = tokio::io::BufReader::new(stream);
    let mut answer = String::new();
    if sends {
        let _ = stream.write_all(b"OPEN tank-1\n").await;
    }
    let _ = stream.read_line(&mut answer).await;
    answer
}

impl Effect for Faulty {
    fn look(&self, _: &Command) -> Result<(), Unsendable> {
        if self.is(Wrong::LooksOverTheWire) {
            // Kept open, so that the device is sure to see it.
            std::mem::forget(std::net::TcpStream::connect(self.address).unwrap());
        }
        Ok(())
    }

    fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report> {
        Box::pin(self.attempt(request))
    }
}

/// Goal: each check can fail. Method: an effect that passes, and one variant for each rule.
#[test]
fn every_check_finds_the_effect_that_breaks_it() {
    let run = |wrong| {
        check(|scenario| {
            let device = controller(scenario);
            Setup::new(Faulty { wrong, address: device.address }, open_a_valve(), device.seen).secret(SECRET)
        })
    };
    run(Wrong::Nothing).unwrap();
    let outcome = "the outcome is one that the scenario allows";
    for (wrong, scenario, rule) in [
        (Wrong::SendsBeforeArm, Scenario::Accepts, "nothing that can cause the effect leaves before the arm"),
        (Wrong::NeverArms, Scenario::Accepts, "the arm is asked for once, before an effect is possible"),
        (Wrong::ArmsTwice, Scenario::Accepts, "the arm is asked for once, before an effect is possible"),
        (Wrong::SendsAfterAFailedArm, Scenario::Accepts, "nothing that can cause the effect leaves before the arm"),
        (Wrong::TakesACloseForSuccess, Scenario::ClosesBeforeRequest, outcome),
        (Wrong::TakesACloseForFailure, Scenario::ClosesAfterRequest, outcome),
        (Wrong::TakesSilenceForFailure, Scenario::NeverAnswers, outcome),
        (Wrong::TakesANoForUnknown, Scenario::Refuses, outcome),
        (Wrong::GoesOnWhenDropped, Scenario::NeverAnswers, "a future that is dropped closes its connection"),
        (Wrong::LooksOverTheWire, Scenario::Accepts, "look does no I/O"),
        (Wrong::ShowsASecret, Scenario::Accepts, "secrets are shown nowhere"),
        (Wrong::RecordsASecret, Scenario::Accepts, "secrets are shown nowhere"),
    ] {
        let breach = run(wrong).expect_err("a breach");
        assert_eq!((breach.scenario, breach.rule), (scenario, rule), "{wrong:?}: {breach}");
    }
}
