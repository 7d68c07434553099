//! What the dispatcher asks of a database, in the verbs of the protocol.
//!
//! Each verb is one transaction, and its documentation says what is durable when it returns. A store
//! holds no rules: it loads facts, lets [`crate::rules`] decide, and writes if what it expected still
//! holds. The trait is sealed: the rules of admission live in a database's triggers, so a store is
//! more than an implementation of this.

use std::future::Future;

use crate::effect::Command;
use crate::rules::{Candidate, Code, Event, Limits, Verdict};

pub(crate) mod sealed {
    /// Keeps [`super::Store`] closed.
    pub trait Sealed {}
}

/// Why the store could not do its work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another dispatcher's epoch is current. Nothing more may be sent; the process ends (75).
    #[error("deposed: epoch {ours} is over, {current} is current")]
    Deposed {
        /// Our epoch.
        ours: i64,
        /// The epoch in the database.
        current: i64,
    },
    /// Busy or disk full. What is known is kept, and nothing new is begun until it can be recorded.
    #[error("the database can't record right now: {0}")]
    Unavailable(String),
    /// A failed fsync, corruption, a changed file or schema. The process ends at once (74), and the
    /// next start's recovery decides.
    #[error("the database can't be trusted: {0}")]
    Broken(String),
    /// A guard of state refused this verb alone: look again and decide anew.
    #[error("refused by a guard: {}", .0.as_str())]
    Refused(Code),
}

/// One head that is due, with everything that is needed to decide and to send.
#[derive(Debug, Clone)]
pub struct Due {
    /// Number of the row.
    pub n: i64,
    /// The stored command, or why it can't be read.
    pub command: Result<Command, String>,
    /// What the rules must know.
    pub candidate: Candidate,
    /// Whether two starts in a row found it open.
    pub suspect: bool,
}

/// A kind and a destination as the database has them: bytes, since it doesn't check that text is UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The kind.
    pub kind: Vec<u8>,
    /// The destination.
    pub destination: Vec<u8>,
}

impl Route {
    /// Both as text, if they are.
    pub fn as_text(&self) -> Option<(&str, &str)> {
        Some((std::str::from_utf8(&self.kind).ok()?, std::str::from_utf8(&self.destination).ok()?))
    }
}

/// Where commands wait: one line of the outlook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Kind and destination of the heads.
    pub route: Route,
    /// When the first of them is due, in milliseconds since 1970.
    pub first_due_ms: i64,
    /// When the next one after now is due.
    pub next_due_ms: Option<i64>,
    /// Whether the destination, or everything, is paused.
    pub paused: bool,
    /// Whether one of these due times was computed in the future: by a clock that is ahead of ours.
    pub ahead: bool,
}

/// What a begin asks for.
#[derive(Debug, Clone, Copy)]
pub struct Begin {
    /// The command.
    pub n: i64,
    /// The destination's limits, of which `on_unknown` is kept with the attempt.
    pub limits: Limits,
    /// The wall clock.
    pub now_ms: i64,
    /// Whether the clock has not jumped lately.
    pub steady: bool,
}

/// What came of a begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// The attempt is durable.
    Attempt {
        /// Its number.
        attempt_no: u32,
        /// Whether it was begun armed.
        armed: bool,
    },
    /// The rules said no, and nothing was written.
    NotNow(Verdict),
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub struct Settle {
    /// The command.
    pub n: i64,
    /// The attempt.
    pub attempt_no: u32,
    /// [`Event::Settle`] or [`Event::Stopped`].
    pub event: Event,
    /// The destination's limits.
    pub limits: Limits,
    /// The wall clock.
    pub now_ms: i64,
    /// Chance, from 0 to 1000.
    pub jitter: u32,
    /// What was seen, as JSON.
    pub evidence: String,
}

/// What a settle, an end or a recovery made of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Where the command stands now.
    pub state: &'static str,
    /// Why, if it is dead.
    pub reason: Option<&'static str>,
    /// When it is due again, if it is pending.
    pub due_ms: Option<i64>,
}

/// One attempt that the start found open.
#[derive(Debug, Clone)]
pub struct Recovered {
    /// The command's id.
    pub id: String,
    /// Its scope.
    pub scope: String,
    /// The attempt.
    pub attempt_no: u32,
    /// Whether it had been armed.
    pub armed: bool,
    /// What became of the command.
    pub settled: Settled,
}

/// The start of a reign.
#[derive(Debug, Clone)]
pub struct Reign {
    /// Our epoch: one more than the last.
    pub epoch: i64,
    /// The attempts that were found open.
    pub recovered: Vec<Recovered>,
}

/// The limits that are in force for a kind and destination today.
pub type LimitsOf = Box<dyn Fn(&str, &str) -> Limits + Send>;

/// A database with an outbox, as the dispatcher sees it.
///
/// Writing verbs are submitted when they are called, not when the future is polled, so that calls made
/// one after the other share a commit. Dropping a future does not undo its verb.
pub trait Store: sealed::Sealed + Send + Sync + 'static {
    /// Begins a reign: raises the epoch and recovers every open attempt, in one transaction. Durable
    /// when it returns, and from then on no verb of an older epoch changes anything.
    fn reign(&self, now_ms: i64, limits_of: LimitsOf) -> impl Future<Output = Result<Reign, StoreError>> + Send;

    /// Where heads wait, each kind and destination once.
    fn outlook(&self, now_ms: i64) -> impl Future<Output = Result<Vec<Waiting>, StoreError>> + Send;

    /// The heads of one destination that are due, the longest due first, at most `limit`: the suspects of
    /// killing the process, or the others. While the clock isn't `steady`, those past their expiry may do
    /// nothing, so they take no place here.
    fn due(
        &self,
        route: &Route,
        suspects: bool,
        now_ms: i64,
        steady: bool,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Due>, StoreError>> + Send;

    /// Whether any command that waits is a suspect.
    fn has_suspects(&self) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Records an attempt before it starts. When this returns, a crash is visible to whoever starts
    /// next.
    fn begin(&self, begin: Begin) -> impl Future<Output = Result<Begun, StoreError>> + Send + 'static;

    /// Marks the attempt as possibly effective. Durable when it returns `true`; `false` if the attempt
    /// was recalled, and then nothing may be sent.
    fn arm(
        &self,
        n: i64,
        attempt_no: u32,
        now_ms: i64,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send + 'static;

    /// Records how an attempt ended. `None` if the command was ended meanwhile, and nothing changed.
    fn settle(&self, settle: Settle) -> impl Future<Output = Result<Option<Settled>, StoreError>> + Send + 'static;

    /// Ends a waiting command without an attempt: [`Event::Expire`], [`Event::Invalid`] or
    /// [`Event::Fence`], and keeps why. `None` if it was not waiting any more.
    fn end(
        &self,
        n: i64,
        event: Event,
        why: &str,
        now_ms: i64,
    ) -> impl Future<Output = Result<Option<Settled>, StoreError>> + Send + 'static;

    /// Makes due times that were computed more than 5 s in the future due now, once, since the clock
    /// was set back. `not_before_ms` stays. Returns how many.
    fn clock_set_back(&self, now_ms: i64) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// Returns when somebody else has committed since the last call, or after the poll interval.
    fn changed(&self) -> impl Future<Output = ()> + Send;

    /// Returns when the store can't be used any more: [`StoreError::Deposed`] or
    /// [`StoreError::Broken`].
    fn failed(&self) -> impl Future<Output = StoreError> + Send;

    /// Whether the store is still the one that was opened.
    fn is_same(&self) -> Result<(), StoreError>;
}
