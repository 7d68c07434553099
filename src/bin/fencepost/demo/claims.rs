//! What the demo claims, held against what was seen: every difference is found and named.
//!
//! A pure comparison, so that a test can hand it wrong observations. It must never take anything on
//! trust from the play: a claim that nothing here compares has no place in the demo's words.

use std::fmt::Debug;

use super::receivers::Arrival;
use super::script::{Ask, Fate, Lane, PARTS, Part, asks, ids};

/// Everything that was seen, by whom it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    /// The shop's own table: worker and what.
    pub(super) bookings: Vec<(String, String)>,
    /// The outbox, by seq.
    pub(super) commands: Vec<Command>,
    /// The receivers, in order of arrival.
    pub(super) arrivals: Vec<Arrival>,
    /// The refused worker's own words.
    pub(super) told: Told,
    /// The database's count of refusals: token, watermark and how often.
    pub(super) counted: Vec<(i64, i64, i64)>,
    /// The moment after the dispatcher was killed.
    pub(super) cut: Cut,
    /// The moment when the next dispatcher had sent what it may send by itself.
    pub(super) doubt: Doubt,
}

/// A command at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) id: String,
    pub(super) lane: String,
    pub(super) token: i64,
    pub(super) state: String,
    /// Reign and outcome of each attempt.
    pub(super) attempts: Vec<(i64, String)>,
    /// What persons did with it.
    pub(super) answers: usize,
}

/// What the worker that came too late said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// The token of its lease.
    pub(super) token: i64,
    /// Whether its lease had run out before its transaction began.
    pub(super) too_late: bool,
    /// Rows that it had booked inside its transaction.
    pub(super) rows_inside: usize,
    /// Rows of its that were left after the refusal.
    pub(super) rows_left: usize,
    /// The refusal.
    pub(super) text: String,
}

/// What was on disk and at the receivers when the dispatcher was dead.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cut {
    /// The signal that it ended by.
    pub(super) signal: Option<i32>,
    /// Commands whose attempt was recorded as about to leave, and not as settled.
    pub(super) open: Vec<String>,
    /// What the receivers had of these.
    pub(super) arrived: Vec<String>,
}

/// What waited for a person.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Doubt {
    pub(super) in_doubt: Vec<String>,
    /// Commands that waited behind those.
    pub(super) waiting: Vec<String>,
    /// How often each of those in doubt had arrived.
    pub(super) arrived: Vec<usize>,
}

/// The result of the comparison.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) checks: usize,
    /// About what, and what differs.
    pub(super) differences: Vec<(String, String)>,
}

impl Verdict {
    fn same<T: PartialEq + Debug>(&mut self, about: &str, what: &str, claimed: T, seen: T) {
        self.checks += 1;
        if claimed != seen {
            let text = format!("{what}: claimed {claimed:?}, but saw {seen:?}");
            self.differences.push((about.to_owned(), text));
        }
    }

    pub(super) fn differs(&self, about: &str) -> bool {
        self.differences.iter().any(|(each, _)| each == about)
    }
}

/// The name under which a worker's booking is compared and shown.
pub(super) fn booking(part: &Part) -> String {
    format!("book {}", part.books)
}

/// Compares everything.
pub(super) fn compare(seen: &Seen) -> Verdict {
    let mut verdict = Verdict::default();
    for part in &PARTS {
        check_booking(&mut verdict, part, seen);
        for ask in part.asks {
            check_arrivals(&mut verdict, part, ask, seen);
            check_outbox(&mut verdict, part, ask, seen);
        }
    }
    check_nothing_else(&mut verdict, seen);
    for lane in Lane::ALL {
        verdict.same(lane.as_str(), "order of arrival", claimed_order(lane), order(lane, &seen.arrivals));
    }
    check_refusal(&mut verdict, seen);
    check_cut(&mut verdict, &seen.cut);
    check_doubt(&mut verdict, &seen.doubt);
    verdict
}

fn check_booking(verdict: &mut Verdict, part: &Part, seen: &Seen) {
    let claimed: &[&str] = if part.refused { &[] } else { &[part.books] };
    let rows = seen.bookings.iter().filter(|(worker, _)| worker == part.worker);
    let booked: Vec<&str> = rows.map(|(_, what)| what.as_str()).collect();
    verdict.same(&booking(part), "rows of this worker", claimed, &booked);
}

fn check_arrivals(verdict: &mut Verdict, part: &Part, ask: &Ask, seen: &Seen) {
    let arrivals: Vec<&Arrival> = seen.arrivals.iter().filter(|arrival| arrival.id == ask.id).collect();
    verdict.same(ask.id, "arrivals", times(ask.fate), arrivals.len());
    for (no, arrival) in arrivals.iter().enumerate() {
        verdict.same(ask.id, "holds what was asked", true, arrival.bytes.contains(ask.says));
        if let Some(first) = arrivals.first().filter(|_| no > 0) {
            verdict.same(ask.id, "bytes of a repeat", &first.bytes, &arrival.bytes);
        }
        if ask.lane == Lane::Hooks {
            verdict.same(ask.id, "token at the receiver", Some(part.token.to_string()), arrival.token.clone());
            verdict.same(ask.id, "attempt at the receiver", Some((no + 1).to_string()), arrival.attempt.clone());
        }
    }
}

fn check_outbox(verdict: &mut Verdict, part: &Part, ask: &Ask, seen: &Seen) {
    let claimed = (ask.fate != Fate::Refused).then(|| Command {
        id: ask.id.to_owned(),
        lane: ask.lane.as_str().to_owned(),
        token: part.token,
        state: "delivered".to_owned(),
        attempts: attempts(ask),
        answers: usize::from(ask.fate == Fate::Answered),
    });
    let found = seen.commands.iter().find(|command| command.id == ask.id).cloned();
    verdict.same(ask.id, "row of the outbox", claimed, found);
}

/// The first dispatcher reigns until it is killed in the last worker's act.
fn attempts(ask: &Ask) -> Vec<(i64, String)> {
    let outcomes: &[(i64, &str)] = match ask.fate {
        Fate::Resent => &[(1, "unknown"), (2, "delivered")],
        Fate::Answered => &[(1, "unknown")],
        Fate::Delivered if behind_the_cut(ask) => &[(2, "delivered")],
        Fate::Delivered => &[(1, "delivered")],
        Fate::Refused => &[],
    };
    outcomes.iter().map(|(reign, outcome)| (*reign, (*outcome).to_owned())).collect()
}

fn behind_the_cut(ask: &Ask) -> bool {
    let mut before = asks().take_while(|(_, each)| each.id != ask.id);
    before.any(|(_, each)| each.lane == ask.lane && matches!(each.fate, Fate::Resent | Fate::Answered))
}

fn times(fate: Fate) -> usize {
    match fate {
        Fate::Delivered | Fate::Answered => 1,
        Fate::Resent => 2,
        Fate::Refused => 0,
    }
}

fn check_nothing_else(verdict: &mut Verdict, seen: &Seen) {
    let known = |id: &str| asks().any(|(_, ask)| ask.id == id);
    let arrived: Vec<&str> = seen.arrivals.iter().map(|arrival| arrival.id.as_str()).filter(|id| !known(id)).collect();
    verdict.same("receivers", "what nobody asked for", Vec::new(), arrived);
    let written: Vec<&str> = seen.commands.iter().map(|command| command.id.as_str()).filter(|id| !known(id)).collect();
    verdict.same("outbox", "what nobody asked for", Vec::new(), written);
    let unknown = |worker: &str| PARTS.iter().all(|part| part.worker != worker);
    let booked: Vec<&str> =
        seen.bookings.iter().map(|(worker, _)| worker.as_str()).filter(|worker| unknown(worker)).collect();
    verdict.same("bookings", "of nobody in the script", Vec::new(), booked);
}

fn claimed_order(lane: Lane) -> Vec<&'static str> {
    let in_lane = asks().filter(|(_, ask)| ask.lane == lane);
    in_lane.flat_map(|(_, ask)| std::iter::repeat_n(ask.id, times(ask.fate))).collect()
}

/// The ids of one lane as they arrived, repeats included.
pub(super) fn order(lane: Lane, arrivals: &[Arrival]) -> Vec<&str> {
    let in_lane = |id: &str| asks().any(|(_, ask)| ask.id == id && ask.lane == lane);
    arrivals.iter().map(|arrival| arrival.id.as_str()).filter(|id| in_lane(id)).collect()
}

fn check_refusal(verdict: &mut Verdict, seen: &Seen) {
    for part in PARTS.iter().filter(|part| part.refused) {
        let (about, told, current) = (booking(part), &seen.told, part.token + 1);
        verdict.same(&about, "token", part.token, told.token);
        verdict.same(&about, "its lease had run out", true, told.too_late);
        verdict.same(&about, "rows inside the transaction", 1, told.rows_inside);
        verdict.same(&about, "rows left after the refusal", 0, told.rows_left);
        verdict.same(&about, "the refusal is FP001", true, told.text.starts_with("FP001 "));
        verdict.same(&about, "refusals counted", &[(part.token, current, 1)][..], &seen.counted);
    }
}

fn check_cut(verdict: &mut Verdict, cut: &Cut) {
    let claimed: Vec<&str> = [ids(Fate::Resent), ids(Fate::Answered)].concat();
    verdict.same("dispatcher", "ended by signal", Some(rustix::process::Signal::KILL.as_raw()), cut.signal);
    verdict.same("dispatcher", "armed and not settled at its end", claimed.clone(), strs(&cut.open));
    verdict.same("dispatcher", "arrived before its end", sorted(claimed), sorted(strs(&cut.arrived)));
}

fn check_doubt(verdict: &mut Verdict, doubt: &Doubt) {
    verdict.same("doubt", "commands in doubt", ids(Fate::Answered), strs(&doubt.in_doubt));
    verdict.same("doubt", "arrivals of these", vec![1; ids(Fate::Answered).len()], doubt.arrived.clone());
    let behind = asks().filter(|(_, ask)| ask.lane == Lane::Mails && behind_the_cut(ask));
    verdict.same("doubt", "waiting behind these", behind.map(|(_, ask)| ask.id).collect(), strs(&doubt.waiting));
}

fn strs(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

fn sorted(mut ids: Vec<&str>) -> Vec<&str> {
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a run shows that keeps every claim, written down by hand.
    fn good() -> Seen {
        let text = |text: &str| text.to_owned();
        let command = |id: &str, lane: &str, token, attempts: &[(i64, &str)], answers| Command {
            id: text(id),
            lane: text(lane),
            token,
            state: text("delivered"),
            attempts: attempts.iter().map(|(reign, outcome)| (*reign, text(outcome))).collect(),
            answers,
        };
        let hook = |id: &str, token: &str, attempt: &str, event: &str| Arrival {
            id: text(id),
            token: Some(text(token)),
            attempt: Some(text(attempt)),
            bytes: format!("{{\"event\":\"{event}\",\"order\":17}}"),
        };
        let mail = |id: &str, subject: &str| Arrival {
            id: text(id),
            token: None,
            attempt: None,
            bytes: format!("Subject: {subject}\r\n\r\n"),
        };
        Seen {
            bookings: [("A", "paid"), ("C", "shipped"), ("D", "invoiced")].map(|(a, b)| (text(a), text(b))).to_vec(),
            commands: vec![
                command("hook-paid", "hooks", 1, &[(1, "delivered")], 0),
                command("mail-thanks", "mails", 1, &[(1, "delivered")], 0),
                command("hook-shipped", "hooks", 3, &[(1, "delivered")], 0),
                command("hook-invoice", "hooks", 4, &[(1, "unknown"), (2, "delivered")], 0),
                command("mail-invoice", "mails", 4, &[(1, "unknown")], 1),
                command("hook-closed", "hooks", 4, &[(2, "delivered")], 0),
                command("mail-survey", "mails", 4, &[(2, "delivered")], 0),
            ],
            arrivals: vec![
                mail("mail-thanks", "Thank you for order 17"),
                hook("hook-paid", "1", "1", "paid"),
                hook("hook-shipped", "3", "1", "shipped"),
                mail("mail-invoice", "Invoice for order 17"),
                hook("hook-invoice", "4", "1", "invoiced"),
                hook("hook-invoice", "4", "2", "invoiced"),
                hook("hook-closed", "4", "1", "closed"),
                mail("mail-survey", "How did we do?"),
            ],
            told: Told {
                token: 2,
                too_late: true,
                rows_inside: 1,
                rows_left: 0,
                text: text("FP001 stale token: 2 for scope order/17, the watermark is 3"),
            },
            counted: vec![(2, 3, 1)],
            cut: Cut {
                signal: Some(9),
                open: vec![text("hook-invoice"), text("mail-invoice")],
                arrived: vec![text("mail-invoice"), text("hook-invoice")],
            },
            doubt: Doubt { in_doubt: vec![text("mail-invoice")], waiting: vec![text("mail-survey")], arrived: vec![1] },
        }
    }

    #[test]
    fn what_was_claimed_is_no_difference() {
        let verdict = compare(&good());
        assert_eq!(verdict.differences, []);
        assert!(verdict.checks > 50, "{}", verdict.checks);
    }

    /// Each sabotage must be noticed, and be said of what was sabotaged.
    #[test]
    fn every_sabotage_is_named() {
        type Sabotage = fn(&mut Seen);
        let sabotages: &[(&str, Sabotage)] = &[
            ("book paid", |seen| drop(seen.bookings.remove(0))),
            ("book cancelled", |seen| seen.bookings.push(("B".to_owned(), "cancelled".to_owned()))),
            ("bookings", |seen| seen.bookings.push(("E".to_owned(), "paid".to_owned()))),
            ("mail-thanks", |seen| drop(seen.arrivals.remove(0))),
            ("mail-cancelled", |seen| seen.arrivals.push(renamed(&seen.arrivals[0], "mail-cancelled"))),
            ("mail-cancelled", |seen| {
                let mut command = seen.commands[0].clone();
                command.id = "mail-cancelled".to_owned();
                seen.commands.push(command);
            }),
            ("mail-invoice", |seen| seen.arrivals.push(seen.arrivals[3].clone())),
            ("mail-invoice", |seen| seen.commands[4].state = "in_doubt".to_owned()),
            ("mail-invoice", |seen| seen.commands[4].answers = 0),
            ("mail-invoice", |seen| seen.commands[4].attempts.push((2, "delivered".to_owned()))),
            ("hook-invoice", |seen| drop(seen.arrivals.remove(5))),
            ("hook-invoice", |seen| seen.arrivals[5].bytes.push(' ')),
            ("hook-invoice", |seen| seen.arrivals[5].id = "hook-invoice-again".to_owned()),
            ("hook-invoice", |seen| seen.arrivals[5].attempt = Some("1".to_owned())),
            ("hook-shipped", |seen| seen.arrivals[2].token = Some("2".to_owned())),
            ("hook-paid", |seen| seen.arrivals[1].bytes = "{}".to_owned()),
            ("hooks", |seen| seen.arrivals.swap(5, 6)),
            ("hooks", |seen| seen.arrivals.swap(1, 2)),
            ("mails", |seen| seen.arrivals.swap(3, 7)),
            ("hook-closed", |seen| seen.commands[5].attempts[0].0 = 1),
            ("receivers", |seen| seen.arrivals.push(renamed(&seen.arrivals[0], "mail-extra"))),
            ("outbox", |seen| seen.commands[0].id = "hook-extra".to_owned()),
            ("book cancelled", |seen| seen.told = Told::default()),
            ("book cancelled", |seen| seen.told.rows_left = 1),
            ("book cancelled", |seen| seen.told.rows_inside = 0),
            ("book cancelled", |seen| seen.told.too_late = false),
            ("book cancelled", |seen| seen.told.text = "FP002 token belongs to another holder".to_owned()),
            ("book cancelled", |seen| seen.counted.clear()),
            ("dispatcher", |seen| seen.cut.signal = None),
            ("dispatcher", |seen| drop(seen.cut.open.pop())),
            ("dispatcher", |seen| drop(seen.cut.arrived.pop())),
            ("doubt", |seen| seen.doubt.in_doubt.push("hook-invoice".to_owned())),
            ("doubt", |seen| seen.doubt.arrived = vec![2]),
            ("doubt", |seen| seen.doubt.waiting.clear()),
        ];
        for (no, (about, sabotage)) in sabotages.iter().enumerate() {
            let mut seen = good();
            sabotage(&mut seen);
            assert_ne!(seen, good(), "sabotage {no} does nothing");
            let verdict = compare(&seen);
            assert!(verdict.differs(about), "sabotage {no}, of {about}: {:?}", verdict.differences);
        }
    }

    fn renamed(arrival: &Arrival, id: &str) -> Arrival {
        Arrival { id: id.to_owned(), ..arrival.clone() }
    }
}
