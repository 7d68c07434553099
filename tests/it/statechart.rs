//! The state table and the diagram of `docs/protocol.md` are what `rules::next` does.
//!
//! Every pair of state and event is tried under every policy and at both sides of every limit, and the
//! result is written as the document has it. A pair that stands in no row is refused by the rules.

use std::collections::{BTreeMap, BTreeSet};

use fencepost::rules::{
    Answer, Backoff, CommandFacts, EffectState, Event, FOUND_OPEN_MAX, Fault, Jitter, Limits, OnDead, OnTakeover,
    OnUnknown, Outcome, Place, Reason, State, next,
};

const NOW_MS: i64 = 1_000_000_000_000;
const HOUR_MS: i64 = 3_600_000;

const DOCUMENT: &str = include_str!("../../docs/protocol.md");

/// What a state is called, in the order of the table. An attempt that isn't armed has no policy yet
/// that could matter.
const STATES: [(&str, State); 8] = [
    ("pending", State::Pending),
    ("sending", State::Sending { armed: false, on_unknown: OnUnknown::Hold }),
    ("armed, hold", State::Sending { armed: true, on_unknown: OnUnknown::Hold }),
    ("armed, resend", State::Sending { armed: true, on_unknown: OnUnknown::Resend }),
    ("in_doubt", State::InDoubt),
    ("parked", State::Parked(None)),
    ("delivered", State::Delivered),
    ("dead", State::Dead(Reason::Refused)),
];

fn name(state: State) -> String {
    match state {
        State::Dead(reason) => format!("dead/{}", reason.as_str()),
        State::Sending { armed: false, on_unknown } => {
            assert_eq!(on_unknown, OnUnknown::Hold, "what is sent again is begun armed");
            "sending".to_owned()
        }
        State::Sending { armed: true, on_unknown } => format!("armed, {}", on_unknown.as_str()),
        _ => state.as_str().to_owned(),
    }
}

fn events() -> Vec<(&'static str, Vec<Event>)> {
    let settle = |outcome| {
        let faults = [Fault::Command, Fault::Channel, Fault::Configuration];
        faults.map(|fault| Event::Settle { outcome, fault, retry_after_ms: None }).to_vec()
    };
    vec![
        ("begin", vec![Event::Begin]),
        ("arm", vec![Event::Arm]),
        ("settle delivered", settle(Outcome::Delivered)),
        ("settle deferred", settle(Outcome::Deferred)),
        ("settle refused", settle(Outcome::Refused)),
        ("settle unknown", settle(Outcome::Unknown)),
        ("stopped before sending", vec![Event::Stopped]),
        ("found open at start", vec![Event::FoundOpen]),
        ("resolved: delivered", vec![Event::Resolve(Answer::Delivered)]),
        ("resolved: not delivered", vec![Event::Resolve(Answer::NotDelivered)]),
        ("resolved: given up", vec![Event::Resolve(Answer::GivenUp)]),
        ("expire", vec![Event::Expire]),
        ("invalid at first look", vec![Event::Invalid]),
        ("behind a greater token", vec![Event::Fence]),
        ("cancel", vec![Event::Cancel]),
        ("adopt", vec![Event::Adopt]),
        ("discard", vec![Event::Discard]),
    ]
}

/// Every command in this state that differs in something a rule looks at.
fn commands(state: State) -> Vec<CommandFacts> {
    let mut all = Vec::new();
    for effect in [EffectState::None, EffectState::Possible] {
        for tries in [1, 40] {
            for found_open in [0, FOUND_OPEN_MAX] {
                for first_begun_ms in [None, Some(NOW_MS - 21 * HOUR_MS)] {
                    for first_unknown_ms in [None, Some(NOW_MS - 25 * HOUR_MS)] {
                        for overtaken in [false, true] {
                            all.push(CommandFacts {
                                state,
                                effect,
                                attempt_no: 41,
                                fresh_no: 0,
                                tries,
                                found_open,
                                first_begun_ms,
                                first_unknown_ms,
                                begun_ms: Some(NOW_MS - 1_000),
                                not_before_ms: None,
                                due_ms: NOW_MS,
                                overtaken,
                            });
                        }
                    }
                }
            }
        }
    }
    all
}

fn places() -> Vec<Place> {
    let backoff = Backoff { base_ms: 5_000, cap_ms: HOUR_MS, jitter: Jitter::Full };
    let mut all = Vec::new();
    for on_unknown in [OnUnknown::Hold, OnUnknown::Resend] {
        for on_takeover in [OnTakeover::Deliver, OnTakeover::Discard, OnTakeover::Review] {
            for on_dead in [OnDead::Continue, OnDead::Block] {
                let limits = Limits {
                    on_unknown,
                    on_dead,
                    max_attempts: 40,
                    max_age_ms: 20 * HOUR_MS,
                    resend_window_ms: 24 * HOUR_MS,
                    backoff,
                };
                all.push(Place { limits, on_takeover, now_ms: NOW_MS, jitter: 500 });
            }
        }
    }
    all
}

/// Where this event can lead from this state; empty if it can't happen there.
fn targets(state: State, events: &[Event]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut refused = false;
    for command in commands(state) {
        for place in places() {
            for event in events {
                match next(&command, *event, &place) {
                    Ok(after) => {
                        assert!(after.effect >= command.effect, "the effect never goes back: {command:?} {event:?}");
                        assert!(state.is_live(), "a final state stays final: {state:?} {event:?}");
                        found.insert(name(after.state));
                    }
                    Err(_) => refused = true,
                }
            }
        }
    }
    assert!(found.is_empty() || !refused, "whether {events:?} can happen to {state:?} depends on the state alone");
    found
}

fn transitions() -> Vec<(&'static str, &'static str, BTreeSet<String>)> {
    let events = events();
    let pairs =
        STATES.iter().flat_map(|(from, state)| events.iter().map(move |(event, all)| (from, state, event, all)));
    pairs
        .map(|(from, state, event, all)| (*from, *event, targets(*state, all)))
        .filter(|(_, _, to)| !to.is_empty())
        .collect()
}

fn table() -> String {
    let mut text = "| from | event | to |\n| --- | --- | --- |\n".to_owned();
    for (from, event, to) in transitions() {
        let to: Vec<String> = to.iter().map(|to| format!("`{to}`")).collect();
        text.push_str(&format!("| `{from}` | {event} | {} |\n", to.join(", ")));
    }
    text
}

/// One arrow for each pair of states; both armed states, and every way of being dead, are one.
fn diagram() -> String {
    let node = |name: &str| match name.split(['/', ',']).next() {
        Some(word) => word.to_owned(),
        None => name.to_owned(),
    };
    let mut arrows: BTreeMap<(usize, String), Vec<&str>> = BTreeMap::new();
    let order = ["pending", "sending", "armed", "in_doubt", "parked"];
    for (from, event, to) in transitions() {
        let from = node(from);
        let place = order.iter().position(|state| *state == from).expect("a final state has no arrow");
        for to in to.iter().map(|to| node(to)).collect::<BTreeSet<_>>() {
            let labels = arrows.entry((place, to)).or_default();
            if !labels.contains(&event) {
                labels.push(event);
            }
        }
    }
    let mut text = "```mermaid\nstateDiagram-v2\n    [*] --> pending: insert\n".to_owned();
    for ((from, to), labels) in &arrows {
        // A colon ends the name of a state, so a label has none.
        let label = labels.join(", ").replace(": ", " ");
        text.push_str(&format!("    {} --> {to}: {label}\n", order[*from]));
    }
    text.push_str("    delivered --> [*]\n    dead --> [*]\n```\n");
    text
}

fn block(name: &str) -> &'static str {
    let (start, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let from = DOCUMENT.find(&start).unwrap_or_else(|| panic!("docs/protocol.md has no {start}")) + start.len();
    let to = DOCUMENT[from..].find(&end).unwrap_or_else(|| panic!("docs/protocol.md has no {end}")) + from;
    DOCUMENT[from..to].trim_matches('\n')
}

#[test]
fn the_state_table_is_what_the_rules_do() {
    let right = table();
    assert_eq!(block("states"), right.trim_end(), "the table should be:\n{right}");
}

#[test]
fn the_state_diagram_is_what_the_rules_do() {
    let right = diagram();
    assert_eq!(block("diagram"), right.trim_end(), "the diagram should be:\n{right}");
}
