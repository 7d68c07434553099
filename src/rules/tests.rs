//! The rules as tables and as properties. The numbers of the rows are those of `docs/protocol.md`.

use proptest::prelude::*;

use super::*;

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const NOW: i64 = 1_796_205_600_000;

const LIMITS: Limits = Limits {
    on_unknown: OnUnknown::Hold,
    on_dead: OnDead::Continue,
    max_attempts: 3,
    max_age_ms: 20 * HOUR,
    resend_window_ms: 24 * HOUR,
    backoff: Backoff { base_ms: 1_000, cap_ms: HOUR, jitter: Jitter::UpToHalfMore },
};

const PLACE: Place = Place { limits: LIMITS, on_takeover: OnTakeover::Deliver, now_ms: NOW, jitter: 0 };

const NEW: CommandFacts = CommandFacts {
    state: State::Pending,
    effect: EffectState::None,
    attempt_no: 0,
    fresh_no: 0,
    tries: 0,
    found_open: 0,
    first_begun_ms: None,
    first_unknown_ms: None,
    begun_ms: None,
    due_ms: NOW,
    not_before_ms: None,
    overtaken: false,
};

const fn sending(armed: bool, on_unknown: OnUnknown) -> CommandFacts {
    CommandFacts {
        state: State::Sending { armed, on_unknown },
        attempt_no: 1,
        tries: 1,
        first_begun_ms: Some(NOW - MINUTE),
        begun_ms: Some(NOW - MINUTE),
        ..NEW
    }
}

const fn settle(outcome: Outcome, fault: Fault) -> Event {
    Event::Settle { outcome, fault, retry_after_ms: None }
}

const DELIVERED: Event = settle(Outcome::Delivered, Fault::Command);
const DEFERRED: Event = settle(Outcome::Deferred, Fault::Command);
const REFUSED: Event = settle(Outcome::Refused, Fault::Command);
const UNKNOWN: Event = settle(Outcome::Unknown, Fault::Command);

/// Each row: what a command was, what happened, what it is: state, effect, tries.
#[test]
fn transitions() {
    use EffectState::{Done, None as Nothing, Possible};
    let hold = sending(true, OnUnknown::Hold);
    let resend = sending(true, OnUnknown::Resend);
    let unarmed = sending(false, OnUnknown::Hold);
    let last = |facts: CommandFacts| CommandFacts { tries: 3, ..facts };
    let aged = |facts: CommandFacts| CommandFacts { first_begun_ms: Some(NOW - 20 * HOUR), ..facts };
    let window_over = CommandFacts { first_unknown_ms: Some(NOW - 24 * HOUR), ..resend };
    let overtaken = |facts: CommandFacts| CommandFacts { overtaken: true, ..facts };
    let at = |on_takeover| Place { on_takeover, ..PLACE };
    let in_doubt = CommandFacts { state: State::InDoubt, effect: Possible, attempt_no: 4, tries: 3, ..NEW };
    let parked = CommandFacts { state: State::Parked(None), ..NEW };
    let dead = State::Dead;
    for (row, before, event, place, state, effect, tries) in [
        (2, NEW, Event::Begin, PLACE, unarmed.state, Nothing, 1),
        (3, unarmed, Event::Arm, PLACE, hold.state, Nothing, 1),
        (4, hold, DELIVERED, PLACE, State::Delivered, Done, 1),
        (5, hold, DEFERRED, PLACE, State::Pending, Nothing, 1),
        (5, unarmed, DEFERRED, PLACE, State::Pending, Nothing, 1),
        (5, unarmed, settle(Outcome::Deferred, Fault::Channel), PLACE, State::Pending, Nothing, 0),
        (5, resend, settle(Outcome::Deferred, Fault::Configuration), PLACE, State::Pending, Nothing, 0),
        (5, last(hold), DEFERRED, PLACE, dead(Reason::Exhausted), Nothing, 3),
        (5, aged(hold), DEFERRED, PLACE, dead(Reason::Exhausted), Nothing, 1),
        (5, aged(hold), settle(Outcome::Deferred, Fault::Channel), PLACE, dead(Reason::Exhausted), Nothing, 0),
        (5, overtaken(hold), DEFERRED, at(OnTakeover::Discard), dead(Reason::Superseded), Nothing, 1),
        (5, overtaken(hold), DEFERRED, at(OnTakeover::Review), State::Parked(None), Nothing, 1),
        (5, overtaken(hold), DEFERRED, PLACE, State::Pending, Nothing, 1),
        (6, hold, REFUSED, PLACE, dead(Reason::Refused), Nothing, 1),
        (6, unarmed, REFUSED, PLACE, dead(Reason::Refused), Nothing, 1),
        (7, hold, UNKNOWN, PLACE, State::InDoubt, Possible, 1),
        (7, last(hold), UNKNOWN, PLACE, State::InDoubt, Possible, 3),
        (7, hold, Event::FoundOpen, PLACE, State::InDoubt, Possible, 1),
        (8, resend, UNKNOWN, PLACE, State::Pending, Possible, 1),
        (8, resend, Event::FoundOpen, PLACE, State::Pending, Possible, 1),
        (8, last(resend), UNKNOWN, PLACE, dead(Reason::Exhausted), Possible, 3),
        (8, overtaken(resend), UNKNOWN, at(OnTakeover::Discard), dead(Reason::Superseded), Possible, 1),
        (9, window_over, UNKNOWN, PLACE, State::InDoubt, Possible, 1),
        (9, last(window_over), UNKNOWN, PLACE, dead(Reason::Exhausted), Possible, 3),
        (10, unarmed, Event::Stopped, PLACE, State::Pending, Nothing, 0),
        (10, resend, Event::Stopped, PLACE, State::Pending, Nothing, 0),
        (11, unarmed, Event::FoundOpen, PLACE, State::Pending, Nothing, 1),
        (11, last(unarmed), Event::FoundOpen, PLACE, dead(Reason::Exhausted), Nothing, 3),
        (12, unarmed, Event::Cancel, PLACE, dead(Reason::Cancelled), Nothing, 1),
        (13, in_doubt, Event::Resolve(Answer::Delivered), PLACE, State::Delivered, Done, 3),
        (14, in_doubt, Event::Resolve(Answer::NotDelivered), PLACE, State::Pending, Possible, 0),
        (
            14,
            overtaken(in_doubt),
            Event::Resolve(Answer::NotDelivered),
            at(OnTakeover::Discard),
            dead(Reason::Superseded),
            Possible,
            0,
        ),
        (15, in_doubt, Event::Resolve(Answer::GivenUp), PLACE, dead(Reason::Abandoned), Possible, 3),
        (19, NEW, Event::Cancel, PLACE, dead(Reason::Cancelled), Nothing, 0),
        (19, parked, Event::Cancel, PLACE, dead(Reason::Cancelled), Nothing, 0),
        (20, NEW, Event::Expire, PLACE, dead(Reason::Expired), Nothing, 0),
        (20, parked, Event::Expire, PLACE, dead(Reason::Expired), Nothing, 0),
        (21, NEW, Event::Invalid, PLACE, dead(Reason::Invalid), Nothing, 0),
        (22, NEW, Event::Fence, PLACE, dead(Reason::Fenced), Nothing, 0),
    ] {
        let after = next(&before, event, &place).unwrap_or_else(|error| panic!("row {row}: {error}"));
        assert_eq!((after.state, after.effect, after.tries), (state, effect, tries), "row {row}: {before:?} {event:?}");
    }
}

/// What can't happen: above all, an attempt that isn't armed is never delivered and never unknown.
#[test]
fn illegal_transitions() {
    let unarmed = sending(false, OnUnknown::Hold);
    let armed = sending(true, OnUnknown::Hold);
    for (before, event) in [
        (unarmed, DELIVERED),
        (unarmed, UNKNOWN),
        (armed, Event::Arm),
        (armed, Event::Stopped),
        (armed, Event::Cancel),
        (armed, Event::Expire),
        (armed, Event::Begin),
        (CommandFacts { state: State::InDoubt, ..NEW }, Event::Cancel),
        (CommandFacts { state: State::InDoubt, ..NEW }, Event::Expire),
        (CommandFacts { state: State::InDoubt, ..NEW }, Event::Begin),
        (CommandFacts { state: State::Parked(None), ..NEW }, Event::Begin),
        (NEW, DELIVERED),
        (NEW, Event::Resolve(Answer::Delivered)),
        (NEW, Event::FoundOpen),
    ] {
        let error = next(&before, event, &PLACE).expect_err("illegal");
        assert_eq!((error.state, error.event), (before.state, event));
    }
}

/// A begin under `resend` is armed; under `hold` it isn't. Numbers and times of a first and a later one.
#[test]
fn a_begin_writes_what_it_must() {
    let resend = Place { limits: Limits { on_unknown: OnUnknown::Resend, ..LIMITS }, ..PLACE };
    let first = next(&NEW, Event::Begin, &resend).expect("pending");
    assert_eq!(first.state, State::Sending { armed: true, on_unknown: OnUnknown::Resend });
    assert_eq!((first.attempt_no, first.first_begun_ms, first.begun_ms), (1, Some(NOW), Some(NOW)));
    let later = CommandFacts { attempt_no: 7, tries: 0, first_begun_ms: Some(NOW - HOUR), ..NEW };
    let again = next(&later, Event::Begin, &PLACE).expect("pending");
    assert_eq!(
        (again.attempt_no, again.tries, again.first_begun_ms, again.begun_ms),
        (8, 1, Some(NOW - HOUR), Some(NOW))
    );
}

/// The wait grows with the attempts since the tries began anew, also where tries are given back, and a
/// wait that the destination asks for is kept in full.
#[test]
fn waits() {
    let after = |attempt_no, fresh_no, retry_after_ms| {
        let before = CommandFacts { attempt_no, fresh_no, ..sending(true, OnUnknown::Hold) };
        let event = Event::Settle { outcome: Outcome::Deferred, fault: Fault::Channel, retry_after_ms };
        next(&before, event, &PLACE).expect("sending").due_ms - NOW
    };
    assert_eq!(after(1, 0, None), 1_000);
    assert_eq!(after(4, 0, None), 8_000);
    assert_eq!(after(4, 3, None), 1_000);
    assert_eq!(after(1, 0, Some(7 * HOUR)), 7 * HOUR);
    assert_eq!(after(60, 0, Some(0)), HOUR);
    // A 503 may say when to come back too.
    let event = Event::Settle { outcome: Outcome::Unknown, fault: Fault::Command, retry_after_ms: Some(7 * HOUR) };
    let resent = next(&sending(true, OnUnknown::Resend), event, &PLACE).expect("sending");
    assert_eq!((resent.state, resent.due_ms - NOW), (State::Pending, 7 * HOUR));
}

/// The windows: tries end before the resend window by default, and the window counts from the begin of
/// the first attempt that ended unknown.
#[test]
fn the_resend_window_counts_from_the_first_unknown() {
    let resend = sending(true, OnUnknown::Resend);
    let first = next(&resend, UNKNOWN, &PLACE).expect("sending");
    assert_eq!(first.first_unknown_ms, Some(NOW - MINUTE), "its begin, not its end");
    let second = CommandFacts { begun_ms: Some(NOW), ..CommandFacts { state: resend.state, ..first } };
    let later = next(&second, UNKNOWN, &PLACE).expect("sending");
    assert_eq!(later.first_unknown_ms, Some(NOW - MINUTE));
}

/// A person's "not delivered" gives fresh tries and starts the windows anew.
#[test]
fn a_persons_answer_starts_anew() {
    let doubt = CommandFacts {
        state: State::InDoubt,
        effect: EffectState::Possible,
        attempt_no: 9,
        tries: 3,
        found_open: 4,
        first_begun_ms: Some(0),
        first_unknown_ms: Some(0),
        ..NEW
    };
    let after = next(&doubt, Event::Resolve(Answer::NotDelivered), &PLACE).expect("in doubt");
    let expected = CommandFacts {
        state: State::Pending,
        tries: 0,
        found_open: 0,
        fresh_no: 9,
        first_begun_ms: None,
        first_unknown_ms: None,
        due_ms: NOW,
        ..doubt
    };
    assert_eq!(after, expected);
}

/// Adopted, a parked command still waits for the time that its writer named.
#[test]
fn adopted_is_not_sent_too_early() {
    let parked = CommandFacts { state: State::Parked(None), tries: 2, attempt_no: 5, ..NEW };
    for (not_before_ms, due_ms) in [(None, NOW), (Some(NOW - HOUR), NOW), (Some(NOW + HOUR), NOW + HOUR)] {
        let after = next(&CommandFacts { not_before_ms, ..parked }, Event::Adopt, &PLACE).expect("parked");
        assert_eq!((after.state, after.due_ms, after.tries, after.fresh_no), (State::Pending, due_ms, 0, 5));
    }
}

/// Five starts that found it open end a command, whatever its limits say.
#[test]
fn five_starts_that_found_it_open_end_it() {
    let generous = Place { limits: Limits { max_attempts: 1_000, ..LIMITS }, ..PLACE };
    let mut command = NEW;
    for start in 1..=5 {
        let begun = next(&command, Event::Begin, &generous).expect("pending");
        command = next(&begun, Event::FoundOpen, &generous).expect("sending");
        let state = if start < 5 { State::Pending } else { State::Dead(Reason::Exhausted) };
        assert_eq!((command.state, command.tries), (state, start), "start {start}");
    }
}

/// What may begin, row by row.
#[test]
fn looks() {
    let head = Candidate {
        state: State::Pending,
        effect: EffectState::None,
        order: (0, 5, 3),
        begun: (0, 5, 2),
        head_seq: 3,
        due_ms: NOW,
        expires_at_ms: None,
        paused: false,
    };
    let past = Candidate { expires_at_ms: Some(NOW), ..head };
    for (candidate, steady, verdict) in [
        (head, true, Verdict::Begin),
        (head, false, Verdict::Begin),
        (Candidate { begun: (0, 5, 3), ..head }, true, Verdict::Begin),
        (Candidate { begun: (0, 6, 1), ..head }, true, Verdict::Fence),
        (Candidate { begun: (0, 5, 4), ..head }, true, Verdict::Fence),
        (Candidate { order: (1, 1, 3), begun: (0, 5_000, 2), ..head }, true, Verdict::Begin),
        (Candidate { head_seq: 2, ..head }, true, Verdict::NotHead),
        (Candidate { due_ms: NOW + 1, ..head }, true, Verdict::NotDue),
        (Candidate { paused: true, ..head }, true, Verdict::Paused),
        (Candidate { paused: true, ..past }, true, Verdict::Expire),
        (Candidate { state: State::InDoubt, ..head }, true, Verdict::NotPending),
        (Candidate { state: State::Parked(None), ..head }, true, Verdict::NotPending),
        (past, true, Verdict::Expire),
        (past, false, Verdict::ClockUnsteady),
        (Candidate { due_ms: NOW + HOUR, ..past }, true, Verdict::Expire),
        (Candidate { state: State::Parked(None), ..past }, true, Verdict::Expire),
        (Candidate { state: State::InDoubt, ..past }, true, Verdict::NotPending),
        (Candidate { head_seq: 2, ..past }, true, Verdict::NotHead),
        (Candidate { expires_at_ms: Some(NOW + 1), ..head }, true, Verdict::Begin),
    ] {
        assert_eq!(look(&candidate, NOW, steady), verdict, "{candidate:?} steady: {steady}");
    }
    assert!(!is_suspect(1) && is_suspect(2) && is_suspect(9));
}

/// The codes are found wherever a driver puts them, and only as whole words.
#[test]
fn codes_are_found_anywhere() {
    for code in Code::ALL {
        assert_eq!(Code::find(&format!("(sqlite3.IntegrityError) {} {}", code.as_str(), code.meaning())), Some(code));
    }
    for text in ["", "FP0", "FP00", "XFP001", "FP0011", "FP001x", "FP999", "FP004", "fp001"] {
        assert_eq!(Code::find(text), None, "{text}");
    }
    assert_eq!(Code::find("éFP001é"), Some(Code::StaleToken));
    assert_eq!(Code::find("FP0ab then FP013: held"), Some(Code::Held));
}

fn any_event() -> impl Strategy<Value = Event> {
    let outcome =
        prop_oneof![Just(Outcome::Delivered), Just(Outcome::Deferred), Just(Outcome::Refused), Just(Outcome::Unknown)];
    let fault = prop_oneof![Just(Fault::Command), Just(Fault::Channel), Just(Fault::Configuration)];
    prop_oneof![
        6 => Just(Event::Begin),
        3 => Just(Event::Arm),
        6 => (outcome, fault, proptest::option::of(0..=HOUR))
            .prop_map(|(outcome, fault, retry_after_ms)| Event::Settle { outcome, fault, retry_after_ms }),
        1 => Just(Event::Stopped),
        2 => Just(Event::FoundOpen),
        1 => Just(Event::Resolve(Answer::NotDelivered)),
        1 => Just(Event::Resolve(Answer::Delivered)),
        1 => Just(Event::Resolve(Answer::GivenUp)),
        1 => Just(Event::Expire),
        1 => Just(Event::Invalid),
        1 => Just(Event::Fence),
        1 => Just(Event::Cancel),
    ]
}

fn any_place() -> impl Strategy<Value = Place> {
    let policy = prop_oneof![Just(OnTakeover::Deliver), Just(OnTakeover::Discard), Just(OnTakeover::Review)];
    let on_unknown = prop_oneof![Just(OnUnknown::Hold), Just(OnUnknown::Resend)];
    (policy, on_unknown, 0..50 * HOUR, 0..=1000_u32).prop_map(|(on_takeover, on_unknown, later_ms, jitter)| Place {
        limits: Limits { on_unknown, ..LIMITS },
        on_takeover,
        now_ms: NOW + later_ms,
        jitter,
    })
}

proptest! {
    /// Whatever happens to a command: what is final stays final, an effect never goes back, a number is
    /// never reused, tries never exceed attempts, and nothing is delivered that was never armed.
    #[test]
    fn no_history_breaks_a_command(
        steps in proptest::collection::vec((any_event(), any_place(), any::<bool>()), 1..60),
    ) {
        let mut command = NEW;
        let mut armed_ever = false;
        for (event, place, overtaken) in steps {
            let before = CommandFacts { overtaken, ..command };
            let Ok(after) = next(&before, event, &place) else { continue };
            armed_ever |= matches!(after.state, State::Sending { armed: true, .. });
            prop_assert!(before.state.is_live(), "{:?} is final", before.state);
            prop_assert!(after.effect >= before.effect);
            prop_assert!(after.attempt_no >= before.attempt_no);
            prop_assert_eq!(after.attempt_no > before.attempt_no, event == Event::Begin);
            prop_assert!(after.tries <= after.attempt_no);
            if after.state == State::Delivered {
                prop_assert!(armed_ever);
                prop_assert_eq!(after.effect, EffectState::Done);
            }
            if after.state == State::InDoubt {
                prop_assert!(armed_ever);
                prop_assert_eq!(after.effect, EffectState::Possible);
            }
            // Under `hold` an armed attempt that ends unknown is never pending again by itself (S11).
            if let State::Sending { armed: true, on_unknown: OnUnknown::Hold } = before.state {
                let unknown = event == Event::FoundOpen || event.outcome() == Some(Outcome::Unknown);
                if unknown {
                    prop_assert_eq!(after.state, State::InDoubt);
                }
            }
            // What is overtaken never comes back to pending under discard or review.
            if overtaken && event != Event::Begin && event != Event::Arm {
                prop_assert!(place.on_takeover == OnTakeover::Deliver || after.state != State::Pending);
            }
            // Nothing is begun without tries, and a window that is over is never resent in.
            if after.state == State::Pending {
                prop_assert!(after.found_open < FOUND_OPEN_MAX);
            }
            command = after;
        }
    }

    /// Admission: the watermark never falls, an older token never passes, and a refusal says why.
    #[test]
    fn no_request_lowers_a_watermark(
        requests in proptest::collection::vec((1..40_i64, proptest::option::of(0..3_usize), proptest::option::of(0..2_usize), any::<bool>()), 1..40),
        require_seal in any::<bool>(),
        max_jump in 1..20_i64,
    ) {
        const HOLDERS: [&str; 3] = ["a", "b", "c"];
        const SOURCES: [&str; 2] = ["zk", "etcd"];
        let policy = ScopePolicy { require_seal, max_jump };
        let mut scope = ScopeFacts::NEW;
        for (token, holder, source, seals) in requests {
            let request = Request {
                token: FencingToken::new(token).expect("from 1"),
                holder: holder.map(|n| HOLDERS[n]),
                source: source.map(|n| SOURCES[n]),
            };
            let answer = if seals { seal(&scope, &request, &policy) } else { admit(&scope, &request, &policy) };
            match answer {
                Ok(admitted) => {
                    prop_assert!(admitted.facts.watermark >= scope.watermark);
                    prop_assert_eq!(admitted.facts.watermark, token);
                    prop_assert_eq!(admitted.raised, token > scope.watermark);
                    prop_assert!(scope.watermark == 0 || token - scope.watermark <= max_jump || !admitted.raised);
                    // A bound holder changes with the watermark alone (S3).
                    prop_assert!(admitted.raised || scope.holder.is_none() || admitted.facts.holder == scope.holder);
                    prop_assert!(scope.source.is_none() || admitted.facts.source == scope.source);
                    prop_assert!(!admitted.raised || seals || !require_seal);
                    scope = admitted.facts;
                }
                Err(Code::StaleToken) => prop_assert!(token < scope.watermark),
                Err(Code::OtherHolder) => prop_assert!(token == scope.watermark && request.holder != scope.holder),
                Err(Code::NeverSealed) => prop_assert!(require_seal && !seals && token > scope.watermark),
                Err(Code::JumpsTooFar) => prop_assert!(token - scope.watermark > max_jump),
                Err(Code::OtherSource) => prop_assert!(request.source.is_some() && request.source != scope.source),
                Err(code) => prop_assert!(false, "{code:?}"),
            }
        }
    }
}
