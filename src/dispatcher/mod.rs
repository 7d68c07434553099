//! The dispatcher: the only place where rules, store, effects and clock meet.
//!
//! It holds no rules: it looks, asks, records, sends, records. Each await in an attempt is a point at
//! which the process may die; the comment beside it says what is on disk there.

mod attempt;
mod destinations;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use self::attempt::{Attempt, Stop};
pub use self::destinations::{Destination, Destinations, Found};
use crate::clock::{self, Jump, Now};
use crate::effect::Command;
use crate::rules::{Event, Limits, Verdict, look};
use crate::store::{Begin, Begun, Due, Route, Settled, Store, StoreError, Waiting};

/// The longest time without a look: due times are wall clock and may jump.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How often a missing destination is named in the log.
const LOUD_EVERY_MS: i64 = 60_000;

/// Missing destinations that are named each time.
const LOUD_MAX: usize = 20;

/// How the dispatcher works.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Attempts at the same time, over all destinations.
    pub max_in_flight: usize,
    /// How long a graceful stop waits for attempts that may have had their effect.
    pub drain_timeout: Duration,
    /// End when nothing is in flight and no head with a known destination is due.
    pub drain: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_in_flight: 64, drain_timeout: Duration::from_secs(30), drain: false }
    }
}

/// What a run did, counted by how attempts ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// State (and reason) after an attempt or an end → how many.
    pub ended: BTreeMap<String, u64>,
}

/// Runs until `stop` resolves and everything in flight has ended, or, with `drain`, until nothing is
/// left to do now.
///
/// After `stop` nothing is begun. Attempts that have certainly sent nothing go back at once and get
/// their try back; the others are awaited for `drain_timeout` and then recorded as unknown.
///
/// Fails with [`StoreError::Deposed`] or [`StoreError::Broken`] where nothing more may be sent: the
/// process should end at once then, and the next start's recovery decides what became of attempts in
/// flight.
pub async fn run<S: Store>(
    store: Arc<S>,
    destinations: Arc<Destinations>,
    settings: Settings,
    stop: impl Future<Output = ()>,
) -> Result<Summary, StoreError> {
    let now = clock::now();
    let limits_of = {
        let destinations = Arc::clone(&destinations);
        move |kind: &str, destination: &str| destinations.limits(kind, destination)
    };
    let reign = store.reign(now.wall_ms, Box::new(limits_of)).await?;
    tracing::info!(epoch = reign.epoch, recovered = reign.recovered.len(), "dispatching");
    for found in &reign.recovered {
        tracing::warn!(
            command = found.id,
            scope = found.scope,
            attempt = found.attempt_no,
            armed = found.armed,
            state = found.settled.state,
            reason = found.settled.reason,
            "the process died during this attempt{}",
            advice(&found.id, &found.settled),
        );
    }
    crate::faults::point("reigning", "*");
    let (stopping, _) = watch::channel(Stop::No);
    let dispatcher = Dispatcher {
        store,
        destinations,
        settings,
        epoch: reign.epoch,
        watch: clock::Watch::new(now),
        attempts: JoinSet::new(),
        in_flight: BTreeMap::new(),
        suspect_in_flight: false,
        unrecorded: Arc::new(AtomicUsize::new(0)),
        stopping,
        loud: BTreeMap::new(),
        unknown_destinations: 0,
        refused: BTreeMap::new(),
        correct_after_boot_ms: 0,
        summary: Summary::default(),
    };
    dispatcher.serve(stop).await
}

struct Dispatcher<S: Store> {
    store: Arc<S>,
    destinations: Arc<Destinations>,
    settings: Settings,
    epoch: i64,
    watch: clock::Watch,
    attempts: JoinSet<Ended>,
    in_flight: BTreeMap<Route, usize>,
    suspect_in_flight: bool,
    unrecorded: Arc<AtomicUsize>,
    stopping: watch::Sender<Stop>,
    loud: BTreeMap<Route, i64>,
    unknown_destinations: usize,
    refused: BTreeMap<i64, i64>,
    correct_after_boot_ms: i64,
    summary: Summary,
}

/// An attempt that has ended and is recorded.
struct Ended {
    route: Route,
    suspect: bool,
    settled: Result<Option<Settled>, StoreError>,
}

/// What a look found to do.
struct Look {
    /// Something was begun or ended, so another look may find more.
    again: bool,
    /// When the next head is due.
    next_due_ms: Option<i64>,
}

impl<S: Store> Dispatcher<S> {
    async fn serve(mut self, stop: impl Future<Output = ()>) -> Result<Summary, StoreError> {
        let store = Arc::clone(&self.store);
        let failed = store.failed();
        tokio::pin!(stop, failed);
        // Due times that a clock ahead of today's wrote would wait for nothing.
        self.clock_was_set_back(clock::wall_ms()).await?;
        loop {
            let found = if self.is_stopping() { Look { again: false, next_due_ms: None } } else { self.look().await? };
            let idle = self.attempts.is_empty();
            if idle && (self.is_stopping() || (self.settings.drain && !found.again)) {
                return Ok(self.summary);
            }
            if found.again {
                tokio::task::yield_now().await;
            }
            let wait = if found.again { Duration::ZERO } else { until(found.next_due_ms) };
            tokio::select! {
                biased;
                error = &mut failed => return Err(error),
                Some(ended) = self.attempts.join_next() => self.ended(ended)?,
                () = &mut stop, if !self.is_stopping() => self.stop(),
                () = store.changed(), if !found.again => {}
                () = tokio::time::sleep(wait) => {}
            }
            while let Some(ended) = self.attempts.try_join_next() {
                self.ended(ended)?;
            }
        }
    }

    fn is_stopping(&self) -> bool {
        *self.stopping.borrow() != Stop::No
    }

    fn stop(&mut self) {
        tracing::info!(in_flight = self.attempts.len(), "stopping: nothing new is begun");
        self.stopping.send_replace(Stop::Drain(self.settings.drain_timeout));
    }

    /// An attempt is over: its place is free.
    fn ended(&mut self, ended: Result<Ended, tokio::task::JoinError>) -> Result<(), StoreError> {
        let ended = match ended {
            Ok(ended) => ended,
            // What panicked in an attempt may have sent: end, and let recovery decide.
            Err(error) => return Err(StoreError::Broken(format!("an attempt panicked: {error}"))),
        };
        // A route that nothing is in flight to is forgotten: every URL is a route of its own.
        if let Some(count) = self.in_flight.get_mut(&ended.route) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.in_flight.remove(&ended.route);
            }
        }
        if ended.suspect {
            self.suspect_in_flight = false;
        }
        if let Some(settled) = ended.settled? {
            self.count(&settled);
        }
        Ok(())
    }

    fn count(&mut self, settled: &Settled) {
        let word =
            settled.reason.map_or_else(|| settled.state.to_owned(), |reason| format!("{}/{reason}", settled.state));
        *self.summary.ended.entry(word).or_default() += 1;
    }

    /// One look at everything that is due.
    async fn look(&mut self) -> Result<Look, StoreError> {
        self.store.is_same()?;
        let now = clock::now();
        self.look_at_clock(now).await?;
        // What is known must be recorded before anything else is begun.
        let unrecorded = self.unrecorded.load(Ordering::SeqCst) > 0 && !crate::faults::is_broken("record first");
        if unrecorded || self.suspect_in_flight {
            return Ok(Look { again: false, next_due_ms: None });
        }
        match self.look_for_work(now).await {
            // A drain that ended here would leave work behind and call itself done.
            Err(StoreError::Unavailable(problem)) if !self.settings.drain => {
                tracing::warn!(%problem, "the database can't be used right now; nothing is begun until it can");
                Ok(Look { again: false, next_due_ms: None })
            }
            other => other,
        }
    }

    async fn look_at_clock(&mut self, now: Now) -> Result<(), StoreError> {
        match self.watch.look(now) {
            Jump::None => Ok(()),
            Jump::Forward => {
                tracing::warn!("the clock jumped forward; nothing expires until it was steady for a minute");
                Ok(())
            }
            Jump::Back => {
                tracing::warn!("the clock was set back; nothing expires until it was steady for a minute");
                self.clock_was_set_back(now.wall_ms).await
            }
        }
    }

    async fn clock_was_set_back(&self, now_ms: i64) -> Result<(), StoreError> {
        match self.store.clock_set_back(now_ms).await {
            Ok(0) => Ok(()),
            Ok(commands) => {
                tracing::warn!(commands, "due times that a faster clock had set are due now");
                Ok(())
            }
            Err(StoreError::Unavailable(problem)) => {
                tracing::warn!(%problem, "due times could not be corrected yet");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn look_for_work(&mut self, now: Now) -> Result<Look, StoreError> {
        let mut outlook = self.store.outlook(now.wall_ms).await?;
        // A writer's clock is ahead of ours: what it inserted is due, whatever it thought the time was.
        if outlook.iter().any(|waiting| waiting.ahead) && now.boot_ms >= self.correct_after_boot_ms {
            self.correct_after_boot_ms = now.boot_ms.saturating_add(LOUD_EVERY_MS);
            self.clock_was_set_back(now.wall_ms).await?;
            outlook = self.store.outlook(now.wall_ms).await?;
        }
        if let Some(found) = self.look_for_suspects(&outlook, now).await? {
            return Ok(found);
        }
        let mut found = Look { again: false, next_due_ms: None };
        self.unknown_destinations = 0;
        for waiting in &outlook {
            found.next_due_ms = earliest(found.next_due_ms, waiting.next_due_ms);
            if waiting.first_due_ms <= now.wall_ms && !waiting.paused {
                found.again |= self.look_at(waiting, now).await?;
            }
        }
        Ok(found)
    }

    /// A suspect that is due goes alone: first everything in flight ends, then it is begun. One that may
    /// not begin now holds nobody up.
    async fn look_for_suspects(&mut self, outlook: &[Waiting], now: Now) -> Result<Option<Look>, StoreError> {
        if crate::faults::is_broken("suspects") || !self.store.has_suspects().await? {
            return Ok(None);
        }
        let mut acted = false;
        for waiting in outlook.iter().filter(|waiting| waiting.first_due_ms <= now.wall_ms && !waiting.paused) {
            let steady = self.watch.is_steady(now);
            let places = self.settings.max_in_flight;
            let due = self.store.due(&waiting.route, true, now.wall_ms, steady, places).await?;
            let begins = |due: &Due| matches!(self.first_look(due, now, steady), First::Begin(..));
            let (mut begins, others): (Vec<Due>, Vec<Due>) = due.into_iter().partition(begins);
            // That one expired, or can't be sent, needs no caution.
            acted |= self.decide(others, now).await?;
            begins.truncate(1);
            if begins.is_empty() {
                continue;
            }
            if !self.attempts.is_empty() {
                return Ok(Some(Look { again: false, next_due_ms: None }));
            }
            let again = self.decide(begins, now).await?;
            return Ok(Some(Look { again, next_due_ms: None }));
        }
        Ok(acted.then_some(Look { again: true, next_due_ms: None }))
    }

    fn find(&self, route: &Route) -> Found<'_> {
        match route.as_text() {
            Some((kind, destination)) => self.destinations.find(kind, destination),
            // No configuration can name it, so its commands end as invalid like those of an unknown kind.
            None => Found::UnknownKind,
        }
    }

    /// Serves one kind and destination. Tells whether anything was begun or ended.
    async fn look_at(&mut self, waiting: &Waiting, now: Now) -> Result<bool, StoreError> {
        let places = match self.find(&waiting.route) {
            Found::Known(destination) => {
                let used = self.in_flight.get(&waiting.route).copied().unwrap_or(0);
                destination
                    .max_in_flight
                    .saturating_sub(used)
                    .min(self.settings.max_in_flight.saturating_sub(self.attempts.len()))
            }
            Found::UnknownDestination => {
                self.be_loud(&waiting.route, now);
                return Ok(false);
            }
            Found::UnknownKind => self.settings.max_in_flight,
        };
        if places == 0 {
            return Ok(false);
        }
        let steady = self.watch.is_steady(now);
        let mut due = self.store.due(&waiting.route, false, now.wall_ms, steady, places).await?;
        if crate::faults::is_broken("suspects") {
            due.extend(self.store.due(&waiting.route, true, now.wall_ms, steady, places).await?);
        }
        self.decide(due, now).await
    }

    fn be_loud(&mut self, route: &Route, now: Now) {
        self.unknown_destinations += 1;
        let last = self.loud.get(route).copied().unwrap_or(i64::MIN);
        // Many at once are one mistake; `fencepost status` has them all.
        if now.boot_ms.saturating_sub(last) >= LOUD_EVERY_MS && self.unknown_destinations <= LOUD_MAX {
            self.loud.insert(route.clone(), now.boot_ms);
            let (kind, destination) = route.as_text().unwrap_or_default();
            tracing::warn!(
                kind,
                destination = shown(destination),
                "commands wait for a destination that the configuration does not name; add it and restart",
            );
        }
    }

    /// Decides on every head: begin, end, or leave. What is written for them shares a commit.
    async fn decide(&mut self, heads: Vec<Due>, now: Now) -> Result<bool, StoreError> {
        let steady = self.watch.is_steady(now);
        let (mut begins, mut ends) = (Vec::new(), Vec::new());
        let mut acted = false;
        for due in heads {
            match self.first_look(&due, now, steady) {
                First::Begin(command, limits) => {
                    let ask = Begin { n: due.n, limits, now_ms: now.wall_ms, steady };
                    begins.push((command, limits, due.suspect, self.store.begin(ask)));
                }
                First::End(event, why) => {
                    let ended = self.store.end(due.n, event, &why, now.wall_ms);
                    ends.push((due, why, ended));
                }
                First::Leave => {}
            }
        }
        for (due, why, ended) in ends {
            acted |= self.end(&due, &why, ended.await)?;
        }
        for (command, limits, suspect, begun) in begins {
            // Nothing is on disk before this returns; afterwards the attempt is.
            match begun.await {
                Ok(Begun::Attempt { attempt_no, armed }) => {
                    acted = true;
                    self.start(*command, limits, suspect, attempt_no, armed, now);
                }
                Ok(Begun::NotNow(verdict)) => tracing::debug!(command = command.id, ?verdict, "not begun"),
                Err(StoreError::Refused(code)) => {
                    let last = self.refused.insert(command.n, now.boot_ms);
                    if last.is_none_or(|last| now.boot_ms.saturating_sub(last) >= LOUD_EVERY_MS) {
                        tracing::error!(
                            command = command.id,
                            scope = command.scope,
                            code = code.as_str(),
                            "a guard refused the begin, so this command waits: the outbox was changed by hand",
                        );
                    } else {
                        self.refused.insert(command.n, last.unwrap_or(now.boot_ms));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(acted)
    }

    /// The first look: rules, kind, content. No I/O.
    fn first_look(&self, due: &Due, now: Now, steady: bool) -> First {
        match look(&due.candidate, now.wall_ms, steady) {
            Verdict::Begin => {}
            Verdict::Expire => return First::End(Event::Expire, "its time is over".to_owned()),
            Verdict::Fence => return First::End(Event::Fence, "something newer was begun in its lane".to_owned()),
            Verdict::NotHead | Verdict::NotPending | Verdict::NotDue | Verdict::Paused | Verdict::ClockUnsteady => {
                return First::Leave;
            }
        }
        let command = match &due.command {
            Ok(command) => command,
            Err(problem) => return First::End(Event::Invalid, problem.clone()),
        };
        match self.destinations.find(&command.kind, &command.destination) {
            Found::Known(destination) => match destination.effect.look(command) {
                Ok(()) => First::Begin(Box::new(command.clone()), destination.limits),
                Err(problem) => First::End(Event::Invalid, problem.to_string()),
            },
            Found::UnknownKind => First::End(Event::Invalid, "no such kind is registered".to_owned()),
            Found::UnknownDestination => First::Leave,
        }
    }

    /// A head was ended without an attempt, unless somebody else was first.
    fn end(&mut self, due: &Due, why: &str, ended: Result<Option<Settled>, StoreError>) -> Result<bool, StoreError> {
        let settled = match ended {
            Ok(Some(settled)) => settled,
            Ok(None) | Err(StoreError::Refused(_)) => return Ok(false),
            Err(error) => return Err(error),
        };
        let (id, scope) = due.command.as_ref().map_or(("", ""), |command| (&command.id, &command.scope));
        tracing::warn!(
            command = id,
            n = due.n,
            scope,
            state = settled.state,
            reason = settled.reason,
            why,
            "ended without an attempt",
        );
        self.count(&settled);
        Ok(true)
    }

    fn start(&mut self, command: Command, limits: Limits, suspect: bool, attempt_no: u32, armed: bool, now: Now) {
        let Found::Known(destination) = self.destinations.find(&command.kind, &command.destination) else { return };
        let route = Route { kind: command.kind.clone().into(), destination: command.destination.clone().into() };
        *self.in_flight.entry(route.clone()).or_default() += 1;
        self.suspect_in_flight |= suspect;
        let attempt = Attempt {
            store: Arc::clone(&self.store),
            effect: Arc::clone(&destination.effect),
            command,
            limits,
            attempt_no,
            begun_armed: armed,
            now_ms: now.wall_ms,
            epoch: self.epoch,
            unrecorded: Arc::clone(&self.unrecorded),
            stopping: self.stopping.subscribe(),
        };
        self.attempts.spawn(async move { Ended { route, suspect, settled: attempt.run().await } });
    }
}

enum First {
    Begin(Box<Command>, Limits),
    End(Event, String),
    Leave,
}

fn earliest(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    [one, other].into_iter().flatten().min()
}

fn until(due_ms: Option<i64>) -> Duration {
    let wait_ms = due_ms.map_or(i64::MAX, |due_ms| due_ms.saturating_sub(clock::wall_ms()).max(0));
    Duration::from_millis(wait_ms.unsigned_abs()).min(LOOK_AGAIN)
}

/// What an operator may do about a command that waits for a person.
fn advice(id: &str, settled: &Settled) -> String {
    if settled.state == "in_doubt" {
        format!("; its lane waits: find out what happened, then `fencepost resolve {id}`")
    } else {
        String::new()
    }
}

/// A destination as it may be shown.
fn shown(destination: &str) -> String {
    match url::Url::parse(destination) {
        Ok(url) if url.has_host() => crate::redact::url(&url),
        Ok(_) | Err(_) => destination.to_owned(),
    }
}
