//! Whether an effect keeps its word: checks that an application runs on an effect of its own.
//!
//! An effect that reports "delivered" too early, or sends before it armed, breaks what the dispatcher
//! promises, and no rule elsewhere can make up for it. [`check`] drives the effect against a device that
//! the application sets up for each [`Scenario`], and says what was broken first. It needs a runtime with
//! time and I/O, takes a few seconds, and belongs in a test.
//!
//! ```
//! use std::io::{BufRead, BufReader, Read, Write};
//! use std::net::{SocketAddr, TcpListener, TcpStream};
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicUsize, Ordering};
//! use std::time::Duration;
//!
//! use fencepost::clock::within;
//! use fencepost::effect::conformance::{self, Device, Scenario, Setup};
//! use fencepost::effect::{BoxFuture, Command, Effect, Evidence, Report, Request, Unsendable};
//! use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
//!
//! /// A bell on a TCP port: one line in, `OK` or `NO` out.
//! #[derive(Debug)]
//! struct Bell(SocketAddr);
//!
//! impl Effect for Bell {
//!     fn look(&self, _: &Command) -> Result<(), Unsendable> {
//!         Ok(())
//!     }
//!
//!     fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report> {
//!         Box::pin(async move {
//!             let Ok(stream) = tokio::net::TcpStream::connect(self.0).await else {
//!                 return Report::channel(Evidence::new("connect"));
//!             };
//!             let mut stream = tokio::io::BufReader::new(stream);
//!             if request.arm.arm().await.is_err() {
//!                 return Report::not_armed();
//!             }
//!             let mut answer = String::new();
//!             let ring = async {
//!                 stream.write_all(b"RING\n").await?;
//!                 stream.read_line(&mut answer).await
//!             };
//!             let ended = within(Duration::from_millis(500), ring).await;
//!             match (ended, answer.as_str()) {
//!                 (Ok(Ok(_)), "OK\n") => Report::delivered(Evidence::new("answer")),
//!                 (Ok(Ok(_)), "NO\n") => Report::refused(Evidence::new("answer")),
//!                 _ => Report::unknown(Evidence::new("no answer")),
//!             }
//!         })
//!     }
//! }
//!
//! /// What the device has seen.
//! #[derive(Debug, Default)]
//! struct Seen {
//!     bytes: AtomicUsize,
//!     open: AtomicUsize,
//! }
//!
//! impl Device for Seen {
//!     fn effect_bytes(&self) -> usize {
//!         self.bytes.load(Ordering::SeqCst)
//!     }
//!     fn open_connections(&self) -> usize {
//!         self.open.load(Ordering::SeqCst)
//!     }
//! }
//!
//! fn serve(mut stream: TcpStream, scenario: Scenario, seen: &Seen) -> std::io::Result<()> {
//!     if scenario == Scenario::ClosesBeforeRequest {
//!         return Ok(());
//!     }
//!     let mut line = String::new();
//!     BufReader::new(&stream).read_line(&mut line)?;
//!     seen.bytes.fetch_add(line.len(), Ordering::SeqCst);
//!     match scenario {
//!         Scenario::Accepts => stream.write_all(b"OK\n"),
//!         Scenario::Refuses => stream.write_all(b"NO\n"),
//!         Scenario::NeverAnswers => stream.read_to_end(&mut Vec::new()).map(drop),
//!         Scenario::ClosesBeforeRequest | Scenario::ClosesAfterRequest => Ok(()),
//!     }
//! }
//!
//! fn set_up(scenario: Scenario) -> Setup {
//!     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
//!     let address = listener.local_addr().unwrap();
//!     let seen = Arc::new(Seen::default());
//!     let device = Arc::clone(&seen);
//!     std::thread::spawn(move || {
//!         for stream in listener.incoming() {
//!             device.open.fetch_add(1, Ordering::SeqCst);
//!             let _ = serve(stream.unwrap(), scenario, &device);
//!             device.open.fetch_sub(1, Ordering::SeqCst);
//!         }
//!     });
//!     Setup::new(Bell(address), conformance::command("bell", "door", "ring"), seen)
//! }
//!
//! # let runtime = tokio::runtime::Runtime::new().unwrap();
//! runtime.block_on(conformance::check(set_up)).expect("the bell keeps its word");
//! ```

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Arm, Command, Effect, Payload, Report, Request};
use crate::clock::{now, within};
use crate::rules::Outcome;

/// What the device does when the effect comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// It takes the request and says so.
    Accepts,
    /// It takes the request and says for certain that nothing happened and nothing will.
    Refuses,
    /// It takes the connection and closes it before it has read anything.
    ClosesBeforeRequest,
    /// It reads the whole request and closes the connection without a word.
    ClosesAfterRequest,
    /// It reads the whole request and says nothing while the connection stands.
    NeverAnswers,
}

impl Scenario {
    /// Every scenario, in the order in which [`check`] sets them up.
    pub const ALL: [Self; 5] =
        [Self::Accepts, Self::Refuses, Self::ClosesBeforeRequest, Self::ClosesAfterRequest, Self::NeverAnswers];

    /// What may be reported. A close before the request can be seen before or after the request went out.
    const fn allows(self, outcome: Outcome) -> bool {
        match self {
            Self::Accepts => matches!(outcome, Outcome::Delivered),
            Self::Refuses => matches!(outcome, Outcome::Deferred | Outcome::Refused),
            Self::ClosesBeforeRequest => matches!(outcome, Outcome::Deferred | Outcome::Unknown),
            Self::ClosesAfterRequest | Self::NeverAnswers => matches!(outcome, Outcome::Unknown),
        }
    }
}

/// What the device of a test can tell about itself.
pub trait Device: Send + Sync {
    /// How many bytes have come that can cause the effect: the request, not a greeting or a login.
    fn effect_bytes(&self) -> usize;

    /// How many connections stand open now.
    fn open_connections(&self) -> usize;
}

/// An effect and a fresh device that behaves as one scenario says.
#[expect(missing_debug_implementations, reason = "a device need not be printable")]
pub struct Setup {
    effect: Box<dyn Effect>,
    command: Command,
    device: Arc<dyn Device>,
    secrets: Vec<String>,
}

impl Setup {
    /// An effect that talks to this device. Its own deadlines should be short: below [`PATIENCE`].
    pub fn new(effect: impl Effect, command: Command, device: Arc<dyn Device>) -> Self {
        Self { effect: Box::new(effect), command, device, secrets: Vec::new() }
    }

    /// Names a text that the effect was given and must show nowhere.
    #[must_use]
    pub fn secret(mut self, text: &str) -> Self {
        self.secrets.push(text.to_owned());
        self
    }
}

/// A command as a test needs it, with the number 1 wherever a number is wanted.
pub fn command(kind: &str, destination: &str, payload: &str) -> Command {
    Command {
        n: 1,
        id: "0192f0c1-7d3a-7c4e-8f00-0123456789ab".to_owned(),
        scope: "order/17".to_owned(),
        lane: String::new(),
        seq: 1,
        token: 1,
        kind: kind.to_owned(),
        destination: destination.to_owned(),
        headers: None,
        payload: Payload::Text(payload.as_bytes().to_vec()),
        inserted_ms: now().wall_ms,
        traceparent: None,
    }
}

/// A rule that the effect broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{scenario:?}: {rule}: {found}")]
pub struct Breach {
    /// Where.
    pub scenario: Scenario,
    /// What must hold.
    pub rule: &'static str,
    /// What was seen instead.
    pub found: String,
}

/// How long an attempt may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long a device may take to notice that a connection is gone.
const LET_GO: Duration = Duration::from_secs(5);

/// How long nothing may come before an arm is answered. Bytes that were sent too early come within it.
const SILENCE: Duration = Duration::from_millis(100);

/// Between two looks at the device.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// So many looks at a command may take a second together.
const LOOKS: u32 = 100;

/// Drives the effect through every scenario. Fails with the first rule that it broke:
///
/// - nothing that can cause the effect leaves before the arm, and nothing at all after an arm that
///   failed;
/// - the arm is asked for once, and before anything is reported as delivered or unknown;
/// - what is reported is what the scenario allows: delivered only where the device said so, unknown
///   where the connection ended after the request, and always within [`PATIENCE`];
/// - a future that is dropped closes its connection;
/// - `look` says the same each time, costs little and connects to nothing;
/// - no secret is in the debug output or the evidence.
///
/// `set_up` is called several times for some scenarios, and makes a fresh device each time.
pub async fn check(mut set_up: impl FnMut(Scenario) -> Setup) -> Result<(), Breach> {
    for scenario in Scenario::ALL {
        let run = Run { scenario, setup: set_up(scenario) };
        run.looks().await?;
        run.reports().await?;
    }
    let run = Run { scenario: Scenario::Accepts, setup: set_up(Scenario::Accepts) };
    run.heeds_an_arm_that_fails().await?;
    let run = Run { scenario: Scenario::NeverAnswers, setup: set_up(Scenario::NeverAnswers) };
    run.lets_go_when_dropped().await
}

struct Run {
    scenario: Scenario,
    setup: Setup,
}

impl Run {
    fn breach(&self, rule: &'static str, found: impl fmt::Display) -> Breach {
        Breach { scenario: self.scenario, rule, found: found.to_string() }
    }

    /// The look is pure and cheap, and nothing shows a secret.
    async fn looks(&self) -> Result<(), Breach> {
        let Setup { effect, command, device, .. } = &self.setup;
        let begun_ms = now().boot_ms;
        for _ in 0..LOOKS {
            if let Err(problem) = effect.look(command) {
                return Err(self.breach("look accepts the command of the test", problem));
            }
        }
        let took_ms = now().boot_ms.saturating_sub(begun_ms);
        if took_ms > 1_000 {
            return Err(self.breach("look is cheap", format!("{LOOKS} looks took {took_ms} ms")));
        }
        let called = until(|| device.open_connections() > 0 || device.effect_bytes() > 0);
        if within(SILENCE, called).await.is_ok() {
            return Err(self.breach("look does no I/O", "the device was called"));
        }
        self.keeps_secrets("debug output", &format!("{effect:?} {effect:#?}"))
    }

    fn keeps_secrets(&self, place: &str, text: &str) -> Result<(), Breach> {
        match self.setup.secrets.iter().position(|secret| text.contains(secret.as_str())) {
            Some(at) => Err(self.breach("secrets are shown nowhere", format!("secret {} in the {place}", at + 1))),
            None => Ok(()),
        }
    }

    /// One attempt to its end.
    async fn reports(&self) -> Result<(), Breach> {
        let arm = self.arm(true);
        let report = self.attempt(&arm).await?;
        self.keeps_secrets("evidence", &report.evidence.to_json())?;
        if arm.has_failed() {
            return Err(self.sent_too_early());
        }
        if !self.scenario.allows(report.outcome) {
            return Err(self.breach("the outcome is one that the scenario allows", format!("{report:?}")));
        }
        let asked = arm.asked.load(Ordering::SeqCst);
        let needs_arm = matches!(report.outcome, Outcome::Delivered | Outcome::Unknown);
        if asked > 1 || (needs_arm && !arm.is_armed()) {
            let found = format!("{} after {asked} calls", report.outcome.as_str());
            return Err(self.breach("the arm is asked for once, before an effect is possible", found));
        }
        Ok(())
    }

    fn sent_too_early(&self) -> Breach {
        let bytes = self.setup.device.effect_bytes();
        self.breach("nothing that can cause the effect leaves before the arm", format!("{bytes} bytes had come"))
    }

    /// An arm that fails, by itself or because the device has heard something already.
    fn arm(&self, succeeds: bool) -> Arm {
        let device = Arc::clone(&self.setup.device);
        Arm::recorded_by(move || {
            let device = Arc::clone(&device);
            Box::pin(async move {
                let early = within(SILENCE, until(|| device.effect_bytes() > 0)).await.is_ok();
                succeeds && !early
            })
        })
    }

    async fn attempt(&self, arm: &Arm) -> Result<Report, Breach> {
        let request = Request { command: &self.setup.command, attempt_no: 1, now_ms: now().wall_ms, arm };
        let late = |_| self.breach("an attempt ends by itself", format!("it went on for {} s", PATIENCE.as_secs()));
        within(PATIENCE, self.setup.effect.send(request)).await.map_err(late)
    }

    /// Where the arm fails, the connection is dropped and nothing is sent.
    async fn heeds_an_arm_that_fails(&self) -> Result<(), Breach> {
        let arm = self.arm(false);
        let report = self.attempt(&arm).await?;
        if arm.asked.load(Ordering::SeqCst) != 1 {
            return Err(self.breach("the arm is asked for once", format!("{report:?}")));
        }
        if report != Report::not_armed() {
            return Err(self.breach("without an arm the report is Report::not_armed()", format!("{report:?}")));
        }
        self.is_let_go("a connection that could not be armed is closed").await?;
        // A device that has seen the end of the connection has seen everything that came over it.
        if self.setup.device.effect_bytes() > 0 { Err(self.sent_too_early()) } else { Ok(()) }
    }

    /// A future that is dropped while it awaits the answer takes its connection with it.
    async fn lets_go_when_dropped(&self) -> Result<(), Breach> {
        let arm = self.arm(true);
        let came = until(|| self.setup.device.effect_bytes() > 0);
        tokio::select! {
            ended = self.attempt(&arm) => {
                return Err(self.breach("the request leaves before the answer is awaited", format!("{ended:?}")));
            }
            // The attempt goes away here, in the middle of its work.
            () = came => {}
        }
        self.is_let_go("a future that is dropped closes its connection").await
    }

    async fn is_let_go(&self, rule: &'static str) -> Result<(), Breach> {
        let device = &self.setup.device;
        let gone = within(LET_GO, until(|| device.open_connections() == 0)).await;
        gone.map_err(|_| self.breach(rule, format!("{} connections stand open", device.open_connections())))
    }
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
