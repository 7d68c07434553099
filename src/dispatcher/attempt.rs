//! One attempt: send between two records.
//!
//! It was begun durably before this starts. What it finds out is recorded, however long the store
//! takes; a stop closes it only where certainly nothing was sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use super::{advice, shown};
use crate::clock;
use crate::effect::{Arm, Command, Effect, Evidence, Report, Request};
use crate::rules::{Event, Fault, Limits, Outcome};
use crate::store::{Settle, Settled, Store, StoreError};

/// Waits between tries to record a known outcome: they double from the first to the last.
const RECORD_AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

/// Whether the dispatcher is stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// It isn't.
    No,
    /// It is, and waits so long for attempts that may have had their effect.
    Drain(Duration),
}

/// Everything that one attempt needs.
pub(super) struct Attempt<S: Store> {
    pub(super) store: Arc<S>,
    pub(super) effect: Arc<dyn Effect>,
    pub(super) command: Command,
    pub(super) limits: Limits,
    pub(super) attempt_no: u32,
    pub(super) begun_armed: bool,
    pub(super) now_ms: i64,
    pub(super) epoch: i64,
    pub(super) unrecorded: Arc<AtomicUsize>,
    pub(super) stopping: watch::Receiver<Stop>,
}

/// How the sending ended.
enum Sent {
    /// The effect reported.
    Report(Report),
    /// A stop closed it; certainly nothing was sent.
    Stopped,
    /// The arm could not be made durable, so nothing was sent.
    NotArmed,
}

impl<S: Store> Attempt<S> {
    /// Sends, and records what came of it. `None` if the command was ended meanwhile.
    pub(super) async fn run(self) -> Result<Option<Settled>, StoreError> {
        crate::faults::point("begun", &self.command.destination);
        let arm = Arc::new(self.arm());
        let sent = self.send(&arm).await;
        crate::faults::point("sent", &self.command.destination);
        let (event, evidence) = self.judge(sent, &arm).await;
        let evidence = evidence.to_json();
        let settled = self.record(event, evidence.clone()).await?;
        crate::faults::point("settled", &self.command.destination);
        if settled.is_none() && arm.has_failed() {
            let (command, scope) = (&self.command.id, &self.command.scope);
            tracing::info!(command, scope, attempt = self.attempt_no, "recalled before anything was sent");
            return Ok(None);
        }
        self.log(event, settled.as_ref(), &evidence);
        Ok(settled)
    }

    fn arm(&self) -> Arm {
        if self.begun_armed {
            return Arm::begun_armed();
        }
        let (store, n, attempt_no) = (Arc::clone(&self.store), self.command.n, self.attempt_no);
        let destination = self.command.destination.clone();
        Arm::recorded_by(move || {
            if crate::faults::is_broken("arm") {
                return Box::pin(async { true });
            }
            let (recorded, destination) = (store.arm(n, attempt_no, clock::wall_ms()), destination.clone());
            // When this returns true the attempt is on disk as armed: a crash leaves it unknown.
            Box::pin(async move {
                let armed = matches!(recorded.await, Ok(true));
                crate::faults::point("armed", &destination);
                armed
            })
        })
    }

    /// On disk while this runs: the begin, and the arm once the effect asked for it.
    async fn send(&self, arm: &Arm) -> Sent {
        let request = Request { command: &self.command, attempt_no: self.attempt_no, now_ms: self.now_ms, arm };
        let mut sending = self.effect.send(request);
        let mut stopping = self.stopping.clone();
        let report = tokio::select! {
            report = &mut sending => report,
            stop = requested(&mut stopping) => {
                if arm.close() {
                    return Sent::Stopped;
                }
                match clock::within(stop, &mut sending).await {
                    Ok(report) => report,
                    Err(_) => Report::unknown(Evidence::new("the process stopped before an answer came")),
                }
            }
        };
        if arm.has_failed() { Sent::NotArmed } else { Sent::Report(report) }
    }

    /// The event that the rules are asked about.
    async fn judge(&self, sent: Sent, arm: &Arm) -> (Event, Evidence) {
        let report = match sent {
            Sent::Stopped => return (Event::Stopped, Evidence::new("stopped before anything was sent")),
            Sent::NotArmed => Report::channel(Evidence::new("the arm could not be recorded; nothing was sent")),
            Sent::Report(report) => report,
        };
        let certain = matches!(report.outcome, Outcome::Deferred | Outcome::Refused);
        if certain || self.begun_armed || arm.is_armed() {
            let Report { outcome, fault, retry_after_ms, evidence } = report;
            return (Event::Settle { outcome, fault, retry_after_ms }, evidence);
        }
        // An effect that says so without having armed has a bug, and nobody knows what it did.
        tracing::error!(
            command = self.command.id,
            kind = self.command.kind,
            "the effect did not arm; its report is not believed"
        );
        let armed = arm.arm().await.is_ok();
        let outcome = if armed { Outcome::Unknown } else { Outcome::Deferred };
        (Event::Settle { outcome, fault: Fault::Command, retry_after_ms: None }, report.evidence)
    }

    /// Records the outcome, again and again while the store can't: nothing new is begun meanwhile. If
    /// the process dies here, recovery finds the attempt open.
    async fn record(&self, event: Event, evidence: String) -> Result<Option<Settled>, StoreError> {
        let mut wait = RECORD_AGAIN.0;
        let mut counted = false;
        let result = loop {
            let settle = Settle {
                n: self.command.n,
                attempt_no: self.attempt_no,
                event,
                limits: self.limits,
                now_ms: clock::wall_ms(),
                jitter: fastrand::u32(0..=1000),
                evidence: evidence.clone(),
            };
            match self.store.settle(settle).await {
                Err(StoreError::Unavailable(problem)) => {
                    if !counted {
                        counted = true;
                        self.unrecorded.fetch_add(1, Ordering::SeqCst);
                    }
                    tracing::warn!(command = self.command.id, %problem, "the outcome is known and can't be recorded yet");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RECORD_AGAIN.1);
                }
                // Somebody ended the command while it was being sent, or damaged it.
                Err(StoreError::Refused(code)) => {
                    tracing::error!(command = self.command.id, code = code.as_str(), "a guard refused the outcome");
                    break Ok(None);
                }
                other => break other,
            }
        };
        if counted {
            self.unrecorded.fetch_sub(1, Ordering::SeqCst);
        }
        result
    }

    /// One line for the change of state. Evidence holds no secret, so it may stand there.
    fn log(&self, event: Event, settled: Option<&Settled>, evidence: &str) {
        let command = &self.command;
        let destination = shown(&command.destination);
        let outcome = event.outcome().map(Outcome::as_str);
        let Some(settled) = settled else {
            tracing::warn!(
                command = command.id,
                scope = command.scope,
                attempt = self.attempt_no,
                outcome,
                "the command was ended while it was being sent; its outcome is not recorded",
            );
            return;
        };
        macro_rules! line {
            ($level:ident, $text:expr) => {
                tracing::$level!(
                    command = command.id,
                    scope = command.scope,
                    lane = command.lane,
                    token = command.token,
                    seq = command.seq,
                    epoch = self.epoch,
                    attempt = self.attempt_no,
                    kind = command.kind,
                    destination,
                    outcome,
                    state = settled.state,
                    reason = settled.reason,
                    "{}",
                    $text
                )
            };
        }
        match settled.state {
            "delivered" => line!(info, "delivered"),
            "pending" => {
                let in_s = settled.due_ms.unwrap_or_default().saturating_sub(clock::wall_ms()).max(0) / 1_000;
                line!(warn, format!("it will be tried again in {in_s} s: {evidence}"))
            }
            "in_doubt" => {
                line!(warn, format!("nobody knows whether it happened: {evidence}{}", advice(&command.id, settled)))
            }
            _ => line!(warn, format!("it ended: {evidence}; see `fencepost show {}`", command.id)),
        }
    }
}

/// Resolves when a stop was asked for, with the time that is left.
async fn requested(stopping: &mut watch::Receiver<Stop>) -> Duration {
    loop {
        if let Stop::Drain(timeout) = *stopping.borrow_and_update() {
            return timeout;
        }
        if stopping.changed().await.is_err() {
            // The dispatcher is gone, and this task is about to be.
            std::future::pending::<()>().await;
        }
    }
}
