//! What an effect is: one request in, one outcome with evidence out.
//!
//! The senders for webhooks and email implement [`Effect`], and so can an application for anything
//! else that cannot be fenced. An effect never reads the outbox, never repeats by itself, and must
//! earn every answer other than [`Outcome::Unknown`]. [`conformance`] checks that it does.

pub mod conformance;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::rules::{Fault, Outcome};

/// A stored command, as its writer gave it. Nothing here ever changes.
#[derive(Clone, PartialEq, Eq)]
pub struct Command {
    /// Number of the row in `outbox`.
    pub n: i64,
    /// Unique for ever; the identity that the receiver sees.
    pub id: String,
    /// What is fenced as one.
    pub scope: String,
    /// The line inside the scope; may be empty.
    pub lane: String,
    /// Place in the scope, from 1, without gaps.
    pub seq: i64,
    /// The fencing token that it was accepted under.
    pub token: i64,
    /// `webhook`, `email`, or one that the application registered.
    pub kind: String,
    /// A named endpoint or relay, or a URL.
    pub destination: String,
    /// The writer's own headers, a JSON object as it was stored; JSON `null` is `None` already.
    pub headers: Option<String>,
    /// The bytes to be sent.
    pub payload: Payload,
    /// When it was inserted, in milliseconds since 1970.
    pub inserted_ms: i64,
    /// W3C trace context of the writer.
    pub traceparent: Option<String>,
}

/// Payloads and headers can hold secrets, so neither is printed.
impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Command")
            .field("id", &self.id)
            .field("scope", &self.scope)
            .field("lane", &self.lane)
            .field("seq", &self.seq)
            .field("token", &self.token)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// The payload and the column it came from.
#[derive(Clone, PartialEq, Eq)]
pub enum Payload {
    /// From `payload`. SQLite doesn't check that text is UTF-8, so these are bytes.
    Text(Vec<u8>),
    /// From `payload_bytes`.
    Bytes(Vec<u8>),
}

impl Payload {
    /// The bytes, whatever column they came from.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(bytes) | Self::Bytes(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (column, bytes) = match self {
            Self::Text(bytes) => ("Text", bytes),
            Self::Bytes(bytes) => ("Bytes", bytes),
        };
        write!(f, "{column}({} bytes)", bytes.len())
    }
}

/// Why a command can never be sent: it ends as `dead/invalid`. The text names the field, never its
/// value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsendable(pub String);

/// One attempt, as an effect sees it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What is to be sent.
    pub command: &'a Command,
    /// Number of this attempt, from 1, never reused.
    pub attempt_no: u32,
    /// The wall clock at the begin of this attempt, in milliseconds since 1970.
    pub now_ms: i64,
    /// To be called right before the first byte that can cause the effect.
    pub arm: &'a Arm,
}

/// A future that a trait object can return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Something that cannot be fenced: a mail, a POST, an actuator.
///
/// One value serves one destination. It is shared by all attempts to it, which run at the same time
/// for different lanes.
pub trait Effect: Send + Sync + fmt::Debug + 'static {
    /// Whether the content can be sent at all. Cheap, without I/O, called before an attempt begins.
    fn look(&self, command: &Command) -> Result<(), Unsendable>;

    /// Makes one attempt.
    ///
    /// The order is: everything that can't cause the effect (resolve, connect, log in), then
    /// [`Arm::arm`], then the bytes that can. When `arm` fails, nothing may be sent: drop the
    /// connection and return [`Report::not_armed`]. The future may be dropped at any await; a
    /// connection that it holds must then be closed, never reused.
    fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report>;
}

/// What an attempt found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is known.
    pub outcome: Outcome,
    /// Whose fault it is, where it was deferred.
    pub fault: Fault,
    /// The wait that the destination asked for, in milliseconds.
    pub retry_after_ms: Option<i64>,
    /// What was seen.
    pub evidence: Evidence,
}

impl Report {
    /// The destination took responsibility.
    pub fn delivered(evidence: Evidence) -> Self {
        Self::new(Outcome::Delivered, Fault::Command, evidence)
    }

    /// Certainly nothing happened; a later attempt may succeed. Uses up a try.
    pub fn deferred(evidence: Evidence) -> Self {
        Self::new(Outcome::Deferred, Fault::Command, evidence)
    }

    /// Certainly nothing happened, and it is not the command's fault. The try is given back.
    pub fn channel(evidence: Evidence) -> Self {
        Self::new(Outcome::Deferred, Fault::Channel, evidence)
    }

    /// Certainly nothing happened: our own configuration forbids it. The try is given back.
    pub fn misconfigured(evidence: Evidence) -> Self {
        Self::new(Outcome::Deferred, Fault::Configuration, evidence)
    }

    /// Certainly nothing happened, and no attempt will succeed.
    pub fn refused(evidence: Evidence) -> Self {
        Self::new(Outcome::Refused, Fault::Command, evidence)
    }

    /// It may or may not have happened.
    pub fn unknown(evidence: Evidence) -> Self {
        Self::new(Outcome::Unknown, Fault::Command, evidence)
    }

    /// [`Arm::arm`] failed, so nothing was sent. The dispatcher knows why and decides; this report
    /// is not recorded.
    pub fn not_armed() -> Self {
        Self::new(Outcome::Deferred, Fault::Channel, Evidence::new("not armed"))
    }

    /// Sets the wait that the destination asked for, in milliseconds.
    #[must_use]
    pub fn retry_after(self, retry_after_ms: Option<i64>) -> Self {
        Self { retry_after_ms, ..self }
    }

    fn new(outcome: Outcome, fault: Fault, evidence: Evidence) -> Self {
        Self { outcome, fault, retry_after_ms: None, evidence }
    }
}

/// What was seen during an attempt: a phase and named facts, as one line of JSON.
///
/// Texts are cut to 1,000 characters, and control characters in them are replaced. No payload,
/// address of a hidden recipient or secret belongs here.
#[derive(Clone, PartialEq, Eq)]
pub struct Evidence(serde_json::Map<String, serde_json::Value>);

impl Evidence {
    const TEXT_CHARS_MAX: usize = 1_000;

    /// Evidence that the attempt ended in this phase.
    pub fn new(phase: &str) -> Self {
        Self(serde_json::Map::new()).with("phase", phase)
    }

    /// Adds a text.
    #[must_use]
    pub fn with(mut self, name: &str, text: &str) -> Self {
        let clean: String =
            text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).take(Self::TEXT_CHARS_MAX).collect();
        self.0.insert(name.to_owned(), clean.into());
        self
    }

    /// Adds a number.
    #[must_use]
    pub fn with_number(mut self, name: &str, number: i64) -> Self {
        self.0.insert(name.to_owned(), number.into());
        self
    }

    /// A text that was added.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(serde_json::Value::as_str)
    }

    /// The line of JSON that the database keeps.
    pub fn to_json(&self) -> String {
        serde_json::Value::Object(self.0.clone()).to_string()
    }
}

impl fmt::Debug for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_json())
    }
}

/// The mark that must be durable before the first byte that can cause the effect.
///
/// Where unknown outcomes are sent again, the attempt was begun armed, and [`Arm::arm`] only notes
/// that bytes may leave from now on.
pub struct Arm {
    progress: AtomicU8,
    /// How often it was asked for; more than once is a bug of the effect.
    asked: AtomicU32,
    record: Option<Recorder>,
}

/// Makes the arm durable; `false` if the attempt was recalled or the store can't record.
type Recorder = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

const UNARMED: u8 = 0;
const ARMED: u8 = 1;
const CLOSED: u8 = 2;
const FAILED: u8 = 3;

/// The attempt may not send: it was recalled, or the arm could not be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the attempt was not armed")]
pub struct NotArmed;

impl Arm {
    /// An arm that `record` makes durable.
    pub fn recorded_by<F>(record: F) -> Self
    where
        F: Fn() -> BoxFuture<'static, bool> + Send + Sync + 'static,
    {
        Self { progress: AtomicU8::new(UNARMED), asked: AtomicU32::new(0), record: Some(Box::new(record)) }
    }

    /// The arm of an attempt that was begun armed.
    pub fn begun_armed() -> Self {
        Self { progress: AtomicU8::new(UNARMED), asked: AtomicU32::new(0), record: None }
    }

    /// Returns when the mark is durable: a crash from here on leaves the attempt as unknown. Call it
    /// once, right before the first byte that can cause the effect.
    ///
    /// Fails if the attempt was recalled, the process is stopping, or the store can't record. Then
    /// nothing may be sent.
    pub async fn arm(&self) -> Result<(), NotArmed> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        // The mark in memory comes first: from here on a graceful stop no longer takes the attempt
        // for one that has sent nothing.
        if self.progress.compare_exchange(UNARMED, ARMED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return Err(NotArmed);
        }
        let Some(record) = &self.record else { return Ok(()) };
        if record().await {
            Ok(())
        } else {
            self.progress.store(FAILED, Ordering::SeqCst);
            Err(NotArmed)
        }
    }

    /// Closes an arm that was not asked for yet, so that it never will be. Tells whether it was
    /// still open, that is, whether certainly nothing was sent.
    pub fn close(&self) -> bool {
        self.progress.compare_exchange(UNARMED, CLOSED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Whether bytes that can cause the effect may have left.
    pub fn is_armed(&self) -> bool {
        self.progress.load(Ordering::SeqCst) == ARMED
    }

    /// Whether recording the arm failed.
    pub fn has_failed(&self) -> bool {
        self.progress.load(Ordering::SeqCst) == FAILED
    }
}

impl fmt::Debug for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arm").field("armed", &self.is_armed()).finish_non_exhaustive()
    }
}
