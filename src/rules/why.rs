//! Why a command waits, or how it ended, as a value: at this moment, and at an earlier one.
//!
//! The same rules that decide give the reason, so that what a person is told is what the dispatcher does.
//! What stands in no rule (which destinations there are, who is in flight) is an argument. No words here:
//! they are the command line's.

use super::{Candidate, Outcome, Reason, State, Verdict, look};

/// Whether a destination can be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Served {
    /// It is configured.
    Yes,
    /// It isn't, and its kind is known: its commands wait.
    NoDestination,
    /// No such kind: its commands end as invalid.
    NoKind,
    /// The configuration is not known here.
    NotKnown,
}

/// What a reason depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Standing {
    /// What decides whether it may begin, with the state in full.
    pub candidate: Candidate,
    /// Whether its destination can be served.
    pub served: Served,
    /// Whether two starts in a row found it open.
    pub suspect: bool,
    /// Whether another suspect is due or being sent, which goes alone.
    pub behind_suspect: bool,
}

/// The reason for where a command stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Because {
    /// The destination has it.
    Delivered,
    /// It ended otherwise.
    Ended(Reason),
    /// An attempt is open.
    Sending {
        /// Whether the attempt may have had its effect.
        armed: bool,
    },
    /// Nobody knows whether it happened.
    InDoubt,
    /// It waits for a verdict: after a take-over, or with the reason for which its lane halts.
    Parked(Option<Reason>),
    /// An older command of its lane is live.
    Behind,
    /// It ends at the dispatcher's next look.
    Ends(Reason),
    /// Its time is over, and the clock is not trusted yet.
    ClockUnsteady,
    /// It is due later.
    NotDue,
    /// Its destination, its scope or everything is paused.
    Paused,
    /// The configuration doesn't name its destination.
    NoDestination,
    /// It may be what kills the process, and goes alone: everything in flight ends first.
    Alone,
    /// Another command may be what kills the process, and goes alone.
    BehindSuspect,
    /// Nothing stands in its way.
    Due,
}

/// Why a command stands where it stands. `steady` tells that the clock has not jumped lately.
pub fn explain(standing: &Standing, now_ms: i64, steady: bool) -> Because {
    let state = standing.candidate.state;
    match state {
        State::Delivered => return Because::Delivered,
        State::Dead(reason) => return Because::Ended(reason),
        State::Sending { armed, .. } => return Because::Sending { armed },
        State::InDoubt => return Because::InDoubt,
        State::Pending | State::Parked(_) => {}
    }
    match (look(&standing.candidate, now_ms, steady), state) {
        (Verdict::NotHead, _) => Because::Behind,
        (Verdict::Expire, _) => Because::Ends(Reason::Expired),
        (Verdict::Fence, _) => Because::Ends(Reason::Fenced),
        (Verdict::ClockUnsteady, _) => Because::ClockUnsteady,
        (Verdict::NotPending, State::Parked(reason)) => Because::Parked(reason),
        (Verdict::NotPending, _) => Because::Parked(None),
        (Verdict::NotDue, _) => Because::NotDue,
        (Verdict::Paused, _) => Because::Paused,
        (Verdict::Begin, _) => begins(standing),
    }
}

/// The rules would let it begin; what else may keep it.
const fn begins(standing: &Standing) -> Because {
    match standing.served {
        Served::NoDestination => Because::NoDestination,
        Served::NoKind => Because::Ends(Reason::Invalid),
        Served::Yes | Served::NotKnown if standing.suspect => Because::Alone,
        Served::Yes | Served::NotKnown if standing.behind_suspect => Because::BehindSuspect,
        Served::Yes | Served::NotKnown => Because::Due,
    }
}

/// An attempt, as its row tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tried {
    /// When it began.
    pub begun_ms: i64,
    /// When it was armed.
    pub armed_ms: Option<i64>,
    /// When it ended.
    pub settled_ms: Option<i64>,
    /// How.
    pub outcome: Option<Outcome>,
}

/// A change of state that the database remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Told {
    /// It was delivered.
    Delivered,
    /// It ended otherwise.
    Dead,
    /// It came into doubt.
    InDoubt,
    /// It was parked.
    Parked,
    /// It was pending again, by a person's word.
    Resumed,
}

/// Where a command stood at an earlier moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    /// It had not been inserted.
    NotYet,
    /// It waited; with the place of the last attempt before, if there was one.
    Waiting {
        /// Counted from 0.
        after: Option<usize>,
    },
    /// An attempt was open.
    Sending {
        /// Which, counted from 0.
        attempt: usize,
        /// Whether it may have had its effect by then.
        armed: bool,
    },
    /// Nobody knew whether it had happened.
    InDoubt,
    /// It waited for a verdict.
    Parked,
    /// It had been delivered.
    Delivered,
    /// It had ended otherwise.
    Dead,
}

/// Where a command stood at `at_ms`: attempts and changes in their order. Where the two tell of the same
/// moment, the change came last.
pub fn then(at_ms: i64, inserted_ms: i64, attempts: &[Tried], changes: &[(i64, Told)]) -> Then {
    if at_ms < inserted_ms {
        return Then::NotYet;
    }
    let last = attempts.iter().enumerate().rfind(|(_, attempt)| attempt.begun_ms <= at_ms);
    if let Some((attempt, tried)) = last.filter(|(_, tried)| tried.settled_ms.is_none_or(|end_ms| end_ms > at_ms)) {
        return Then::Sending { attempt, armed: tried.armed_ms.is_some_and(|armed_ms| armed_ms <= at_ms) };
    }
    let waiting = Then::Waiting { after: last.map(|(place, _)| place) };
    let change = changes.iter().rfind(|(change_ms, _)| *change_ms <= at_ms);
    match change.filter(|(change_ms, _)| last.is_none_or(|(_, tried)| tried.begun_ms <= *change_ms)) {
        None | Some((_, Told::Resumed)) => waiting,
        Some((_, Told::Delivered)) => Then::Delivered,
        Some((_, Told::Dead)) => Then::Dead,
        Some((_, Told::InDoubt)) => Then::InDoubt,
        Some((_, Told::Parked)) => Then::Parked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{EffectState, OnUnknown};

    const NOW: i64 = 1_000;

    /// The head of its lane, due, nothing in its way.
    const FREE: Standing = Standing {
        candidate: Candidate {
            state: State::Pending,
            effect: EffectState::None,
            order: (0, 5, 3),
            begun: (0, 5, 2),
            head_seq: 3,
            due_ms: NOW,
            expires_at_ms: None,
            paused: false,
        },
        served: Served::Yes,
        suspect: false,
        behind_suspect: false,
    };

    fn with(change: impl FnOnce(&mut Standing)) -> Standing {
        let mut standing = FREE;
        change(&mut standing);
        standing
    }

    /// Each reason, and which of two goes first.
    #[test]
    fn each_reason_has_its_case() {
        let sending = |armed| State::Sending { armed, on_unknown: OnUnknown::Hold };
        let in_state = |state| with(|it| it.candidate.state = state);
        let parked = Some(Reason::Refused);
        for (standing, steady, because) in [
            (FREE, true, Because::Due),
            (with(|it| it.served = Served::NotKnown), true, Because::Due),
            (with(|it| it.candidate.due_ms = NOW + 1), true, Because::NotDue),
            (with(|it| it.candidate.paused = true), true, Because::Paused),
            (with(|it| (it.candidate.paused, it.candidate.due_ms) = (true, NOW + 1)), true, Because::NotDue),
            (with(|it| it.candidate.head_seq = 2), true, Because::Behind),
            (with(|it| (it.candidate.head_seq, it.candidate.paused) = (2, true)), true, Because::Behind),
            (with(|it| it.served = Served::NoDestination), true, Because::NoDestination),
            (with(|it| (it.served, it.suspect) = (Served::NoDestination, true)), true, Because::NoDestination),
            (with(|it| it.served = Served::NoKind), true, Because::Ends(Reason::Invalid)),
            (with(|it| it.suspect = true), true, Because::Alone),
            (with(|it| it.behind_suspect = true), true, Because::BehindSuspect),
            (with(|it| it.candidate.expires_at_ms = Some(NOW)), true, Because::Ends(Reason::Expired)),
            (with(|it| it.candidate.expires_at_ms = Some(NOW)), false, Because::ClockUnsteady),
            (with(|it| it.candidate.begun = (0, 5, 4)), true, Because::Ends(Reason::Fenced)),
            (in_state(State::Parked(None)), true, Because::Parked(None)),
            (in_state(State::Parked(parked)), true, Because::Parked(parked)),
            (in_state(sending(false)), true, Because::Sending { armed: false }),
            (in_state(sending(true)), true, Because::Sending { armed: true }),
            (in_state(State::InDoubt), true, Because::InDoubt),
            (in_state(State::Delivered), true, Because::Delivered),
            (in_state(State::Dead(Reason::Expired)), true, Because::Ended(Reason::Expired)),
        ] {
            assert_eq!(explain(&standing, NOW, steady), because, "{standing:?}");
        }
    }

    /// A command that was deferred once, came into doubt at 40, was resumed at 60 and delivered at 80.
    #[test]
    fn a_life_can_be_told_afterwards() {
        let tried = |begun_ms, armed_ms, settled_ms, outcome| Tried {
            begun_ms,
            armed_ms,
            settled_ms: Some(settled_ms),
            outcome: Some(outcome),
        };
        let attempts = [
            tried(10, None, 20, Outcome::Deferred),
            tried(30, Some(35), 40, Outcome::Unknown),
            tried(70, Some(72), 80, Outcome::Delivered),
        ];
        let changes = [(40, Told::InDoubt), (60, Told::Resumed), (80, Told::Delivered)];
        for (at_ms, right) in [
            (4, Then::NotYet),
            (5, Then::Waiting { after: None }),
            (10, Then::Sending { attempt: 0, armed: false }),
            (20, Then::Waiting { after: Some(0) }),
            (30, Then::Sending { attempt: 1, armed: false }),
            (35, Then::Sending { attempt: 1, armed: true }),
            (40, Then::InDoubt),
            (60, Then::Waiting { after: Some(1) }),
            (79, Then::Sending { attempt: 2, armed: true }),
            (80, Then::Delivered),
            (i64::MAX, Then::Delivered),
        ] {
            assert_eq!(then(at_ms, 5, &attempts, &changes), right, "{at_ms}");
        }
        let open = [Tried { settled_ms: None, outcome: None, ..tried(10, None, 0, Outcome::Unknown) }];
        assert_eq!(then(99, 5, &open, &[]), Then::Sending { attempt: 0, armed: false });
        assert_eq!(then(9, 5, &[], &[(7, Told::Parked)]), Then::Parked);
        assert_eq!(then(9, 5, &[], &[(7, Told::Dead)]), Then::Dead);
    }
}
