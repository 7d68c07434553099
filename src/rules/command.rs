//! The life of one command: a total transition function.
//!
//! Recovery at start goes through the same function as a settle at run time; there is no second set
//! of rules for a restart.

use super::{FOUND_OPEN_MAX, Limits, OnDead, OnTakeover, OnUnknown, backoff_ms};

/// What is known after an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The destination took responsibility.
    Delivered,
    /// Certainly not delivered by this attempt; a later one may succeed.
    Deferred,
    /// Certainly not delivered; no attempt will succeed.
    Refused,
    /// It may or may not have been delivered.
    Unknown,
}

impl Outcome {
    /// The word that the database and every listing use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Deferred => "deferred",
            Self::Refused => "refused",
            Self::Unknown => "unknown",
        }
    }
}

/// Whose fault a deferred attempt is. Only a fault of the command uses up a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The destination's answer to this command.
    Command,
    /// Connect, TLS, greeting, login: every command to this destination would meet it.
    Channel,
    /// Our own configuration, as an address that the guard closes to a named destination.
    Configuration,
}

/// Whether anything can have happened outside. It never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EffectState {
    /// Certainly nothing.
    None,
    /// Perhaps.
    Possible,
    /// Certainly.
    Done,
}

impl EffectState {
    /// The word that the database and every listing use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Possible => "possible",
            Self::Done => "done",
        }
    }

    /// Reads [`EffectState::as_str`] back.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::Possible, Self::Done].into_iter().find(|effect| effect.as_str() == text)
    }
}

/// Why a command is dead or parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Behind a greater (token, seq) of its lane: damage, or a rebase.
    Fenced,
    /// The destination said no for good.
    Refused,
    /// No tries left.
    Exhausted,
    /// Its content can't be sent.
    Invalid,
    /// Discarded, because a newer holder took over.
    Superseded,
    /// Ended by its holder or an operator.
    Cancelled,
    /// Past its `expires_at_ms`.
    Expired,
    /// In doubt, and given up by a person.
    Abandoned,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 8] = [
        Self::Fenced,
        Self::Refused,
        Self::Exhausted,
        Self::Invalid,
        Self::Superseded,
        Self::Cancelled,
        Self::Expired,
        Self::Abandoned,
    ];

    /// The word that the database and every listing use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fenced => "fenced",
            Self::Refused => "refused",
            Self::Exhausted => "exhausted",
            Self::Invalid => "invalid",
            Self::Superseded => "superseded",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Abandoned => "abandoned",
        }
    }

    /// Whether a command that ends so, with effect none, gives its key back.
    pub const fn gives_key_back(self) -> bool {
        match self {
            Self::Superseded | Self::Expired | Self::Fenced => true,
            Self::Refused | Self::Exhausted | Self::Invalid | Self::Cancelled | Self::Abandoned => false,
        }
    }
}

/// Where a command stands. The last two are final.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Waits: new, or due again later.
    Pending,
    /// An attempt is open.
    Sending {
        /// Whether the attempt may cause the effect.
        armed: bool,
        /// What an unknown outcome of this very attempt leads to.
        on_unknown: OnUnknown,
    },
    /// Its effect may or may not have happened; waits for an answer.
    InDoubt,
    /// Waits for the holder or an operator.
    Parked(Option<Reason>),
    /// The destination has it.
    Delivered,
    /// Ended otherwise.
    Dead(Reason),
}

impl State {
    /// The word that the database and every listing use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sending { .. } => "sending",
            Self::InDoubt => "in_doubt",
            Self::Parked(_) => "parked",
            Self::Delivered => "delivered",
            Self::Dead(_) => "dead",
        }
    }

    /// The reason that stands beside the state.
    pub const fn reason(self) -> Option<Reason> {
        match self {
            Self::Dead(reason) | Self::Parked(Some(reason)) => Some(reason),
            Self::Pending | Self::Sending { .. } | Self::InDoubt | Self::Parked(None) | Self::Delivered => None,
        }
    }

    /// Whether the command still holds its place in the lane.
    pub const fn is_live(self) -> bool {
        match self {
            Self::Pending | Self::Sending { .. } | Self::InDoubt | Self::Parked(_) => true,
            Self::Delivered | Self::Dead(_) => false,
        }
    }
}

/// What the rules must know of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommandFacts {
    /// Where it stands.
    pub state: State,
    /// What can have happened outside.
    pub effect: EffectState,
    /// Number of the latest attempt; never reused.
    pub attempt_no: u32,
    /// Number of the attempt after which its tries and windows began anew.
    pub fresh_no: u32,
    /// Tries that count against `max_attempts`.
    pub tries: u32,
    /// How many starts found an attempt of it open.
    pub found_open: u32,
    /// Begin of the first attempt, from which `max_age` counts.
    pub first_begun_ms: Option<i64>,
    /// Begin of the first attempt that ended unknown, from which `resend_window` counts.
    pub first_unknown_ms: Option<i64>,
    /// Begin of the open attempt.
    pub begun_ms: Option<i64>,
    /// When it may be begun next.
    pub due_ms: i64,
    /// When its writer wanted it to be sent at the earliest; never overruled.
    pub not_before_ms: Option<i64>,
    /// Whether it was accepted under an older token than the watermark and not adopted since.
    pub overtaken: bool,
}

/// A person's answer for a command in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The effect happened.
    Delivered,
    /// It did not.
    NotDelivered,
    /// Nobody will find out.
    GivenUp,
}

/// What can happen to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// An attempt begins; the store has checked [`super::look`].
    Begin,
    /// The open attempt may cause the effect from now on.
    Arm,
    /// The open attempt ended.
    Settle {
        /// What is known.
        outcome: Outcome,
        /// Whose fault it is, where it was deferred.
        fault: Fault,
        /// The wait that the destination asked for, in milliseconds.
        retry_after_ms: Option<i64>,
    },
    /// A graceful stop ended an attempt that had certainly sent nothing.
    Stopped,
    /// A start found the attempt open.
    FoundOpen,
    /// A person's answer.
    Resolve(Answer),
    /// Its time is over.
    Expire,
    /// The first look found content that can't be sent.
    Invalid,
    /// Behind a greater (token, seq) of its lane.
    Fence,
    /// Its holder or an operator ends it.
    Cancel,
    /// Its holder or an operator sends a parked one after all.
    Adopt,
    /// Its holder or an operator ends a parked one.
    Discard,
}

impl Event {
    /// What an attempt that ends so has found out.
    pub const fn outcome(self) -> Option<Outcome> {
        match self {
            Self::Settle { outcome, .. } => Some(outcome),
            Self::Stopped => Some(Outcome::Deferred),
            Self::Begin
            | Self::Arm
            | Self::FoundOpen
            | Self::Resolve(_)
            | Self::Expire
            | Self::Invalid
            | Self::Fence
            | Self::Cancel
            | Self::Adopt
            | Self::Discard => None,
        }
    }
}

/// An event that a command in this state can't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a command that is {} can't have {event:?}", state.as_str())]
pub struct IllegalTransition {
    /// Where the command stands.
    pub state: State,
    /// What was to happen.
    pub event: Event,
}

/// The surroundings of a transition: limits of the destination, policy of the scope, time, chance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The destination's limits.
    pub limits: Limits,
    /// What becomes of a command that was overtaken.
    pub on_takeover: OnTakeover,
    /// The wall clock, in milliseconds since 1970.
    pub now_ms: i64,
    /// Chance, drawn by the caller from 0 … 1000.
    pub jitter: u32,
}

/// The command after `event`. Every pair of state and event has an answer.
pub fn next(command: &CommandFacts, event: Event, place: &Place) -> Result<CommandFacts, IllegalTransition> {
    let illegal = IllegalTransition { state: command.state, event };
    let dead = |reason| Ok(CommandFacts { state: State::Dead(reason), ..*command });
    match (command.state, event) {
        (State::Pending, Event::Begin) => Ok(begin(command, place)),
        (State::Sending { armed: false, on_unknown }, Event::Arm) => {
            Ok(CommandFacts { state: State::Sending { armed: true, on_unknown }, ..*command })
        }
        (State::Sending { armed, on_unknown }, Event::Settle { outcome, fault, retry_after_ms }) => match outcome {
            Outcome::Delivered if armed => {
                Ok(CommandFacts { state: State::Delivered, effect: EffectState::Done, ..*command })
            }
            Outcome::Unknown if armed => {
                let wait_ms = retry_after_ms.unwrap_or(0).max(wait_ms(command, place));
                Ok(unknown(command, on_unknown, wait_ms, place))
            }
            Outcome::Delivered | Outcome::Unknown => Err(illegal),
            Outcome::Deferred => Ok(deferred(command, fault, retry_after_ms, place)),
            Outcome::Refused => Ok(failed(command, Reason::Refused, place)),
        },
        // Begun armed and not yet connected is certain too; armed later is not.
        (
            State::Sending { armed: false, .. } | State::Sending { on_unknown: OnUnknown::Resend, .. },
            Event::Stopped,
        ) => {
            let tries = command.tries.saturating_sub(1);
            Ok(back(&CommandFacts { tries, due_ms: place.now_ms, ..*command }, place))
        }
        (State::Sending { armed, on_unknown }, Event::FoundOpen) => {
            let found = CommandFacts { found_open: command.found_open.saturating_add(1), ..*command };
            Ok(if armed { unknown(&found, on_unknown, 0, place) } else { again(&found, place.now_ms, place) })
        }
        (State::Sending { armed: false, .. } | State::Pending | State::Parked(_), Event::Cancel) => {
            dead(Reason::Cancelled)
        }
        // A takeover's later look leaves an adopted command alone; the store notes the watermark.
        (State::Parked(_), Event::Adopt) => {
            Ok(CommandFacts { state: State::Pending, overtaken: false, ..anew(command, place) })
        }
        (State::Parked(reason), Event::Discard) => dead(reason.unwrap_or(Reason::Superseded)),
        (State::InDoubt, Event::Resolve(answer)) => Ok(resolve(command, answer, place)),
        (State::Pending | State::Parked(_), Event::Expire) => dead(Reason::Expired),
        (State::Pending, Event::Invalid) => dead(Reason::Invalid),
        (State::Pending, Event::Fence) => dead(Reason::Fenced),
        (
            State::Pending
            | State::Sending { .. }
            | State::InDoubt
            | State::Parked(_)
            | State::Delivered
            | State::Dead(_),
            Event::Begin
            | Event::Arm
            | Event::Settle { .. }
            | Event::Stopped
            | Event::FoundOpen
            | Event::Resolve(_)
            | Event::Expire
            | Event::Invalid
            | Event::Fence
            | Event::Cancel
            | Event::Adopt
            | Event::Discard,
        ) => Err(illegal),
    }
}

/// Begun armed where an unknown outcome is sent again: one commit less, and never an attempt without
/// a mark. The price is that it can't be recalled.
fn begin(command: &CommandFacts, place: &Place) -> CommandFacts {
    let on_unknown = place.limits.on_unknown;
    CommandFacts {
        state: State::Sending { armed: on_unknown == OnUnknown::Resend, on_unknown },
        attempt_no: command.attempt_no.saturating_add(1),
        tries: command.tries.saturating_add(1),
        first_begun_ms: command.first_begun_ms.or(Some(place.now_ms)),
        begun_ms: Some(place.now_ms),
        ..*command
    }
}

fn deferred(command: &CommandFacts, fault: Fault, retry_after_ms: Option<i64>, place: &Place) -> CommandFacts {
    let tries = match fault {
        Fault::Command => command.tries,
        Fault::Channel | Fault::Configuration => command.tries.saturating_sub(1),
    };
    let wait_ms = retry_after_ms.unwrap_or(0).max(wait_ms(command, place));
    again(&CommandFacts { tries, ..*command }, place.now_ms.saturating_add(wait_ms), place)
}

fn unknown(command: &CommandFacts, on_unknown: OnUnknown, wait_ms: i64, place: &Place) -> CommandFacts {
    let possible = CommandFacts {
        effect: command.effect.max(EffectState::Possible),
        first_unknown_ms: command.first_unknown_ms.or(command.begun_ms).or(Some(place.now_ms)),
        ..*command
    };
    let window_over = possible
        .first_unknown_ms
        .is_some_and(|first| place.now_ms.saturating_sub(first) >= place.limits.resend_window_ms);
    match on_unknown {
        OnUnknown::Hold => CommandFacts { state: State::InDoubt, ..possible },
        OnUnknown::Resend if tries_left(&possible, place) && window_over => {
            CommandFacts { state: State::InDoubt, ..possible }
        }
        OnUnknown::Resend => again(&possible, place.now_ms.saturating_add(wait_ms), place),
    }
}

/// A person's "not delivered" gives fresh tries and starts the windows anew.
fn resolve(command: &CommandFacts, answer: Answer, place: &Place) -> CommandFacts {
    match answer {
        Answer::Delivered => CommandFacts { state: State::Delivered, effect: EffectState::Done, ..*command },
        Answer::GivenUp => CommandFacts { state: State::Dead(Reason::Abandoned), ..*command },
        Answer::NotDelivered => back(&anew(command, place), place),
    }
}

/// Fresh tries and windows, due now.
fn anew(command: &CommandFacts, place: &Place) -> CommandFacts {
    CommandFacts {
        tries: 0,
        found_open: 0,
        fresh_no: command.attempt_no,
        first_begun_ms: None,
        first_unknown_ms: None,
        due_ms: place.now_ms.max(command.not_before_ms.unwrap_or(0)),
        ..*command
    }
}

/// Back to pending, unless no tries are left.
fn again(command: &CommandFacts, due_ms: i64, place: &Place) -> CommandFacts {
    if tries_left(command, place) {
        back(&CommandFacts { due_ms, ..*command }, place)
    } else {
        failed(command, Reason::Exhausted, place)
    }
}

/// Refused, or out of tries: by the destination's policy the end, or a halt of the lane.
fn failed(command: &CommandFacts, reason: Reason, place: &Place) -> CommandFacts {
    let state = match place.limits.on_dead {
        OnDead::Continue => State::Dead(reason),
        OnDead::Block => State::Parked(Some(reason)),
    };
    CommandFacts { state, begun_ms: None, ..*command }
}

/// Back to pending by the take-over rule: what a newer holder superseded does not come back later.
fn back(command: &CommandFacts, place: &Place) -> CommandFacts {
    let state = match place.on_takeover {
        OnTakeover::Discard if command.overtaken => State::Dead(Reason::Superseded),
        OnTakeover::Review if command.overtaken => State::Parked(None),
        OnTakeover::Deliver | OnTakeover::Discard | OnTakeover::Review => State::Pending,
    };
    CommandFacts { state, begun_ms: None, ..*command }
}

fn tries_left(command: &CommandFacts, place: &Place) -> bool {
    let aged =
        command.first_begun_ms.is_some_and(|first| place.now_ms.saturating_sub(first) >= place.limits.max_age_ms);
    command.tries < place.limits.max_attempts && command.found_open < FOUND_OPEN_MAX && !aged
}

fn wait_ms(command: &CommandFacts, place: &Place) -> i64 {
    let failures = command.attempt_no.saturating_sub(command.fresh_no).saturating_sub(1);
    backoff_ms(failures, place.jitter, &place.limits.backoff)
}
