//! The demo's last page: what was asked, what arrived, what was refused and why.
//!
//! Every cell is made from what was seen, never from the script's claims; a row that differs from them
//! is marked. The reader must be able to trust the table more than the words above it.

use std::io;

use super::claims::{self, Command, Seen, Verdict};
use super::receivers::Arrival;
use super::screen::{Screen, Tone};
use super::script::{Ask, Lane, PARTS, Part};

/// Prints both tables and the differences, if there are any.
pub(super) fn print(screen: Screen, seen: &Seen, verdict: &Verdict) -> io::Result<()> {
    screen.line(Tone::Plain, "")?;
    screen.line(Tone::Strong, "What was asked, what arrived, and how it ended")?;
    screen.table(&["worker", "asked", "arrived", "how it ended"], &rows(seen, verdict))?;
    screen.line(Tone::Plain, "")?;
    screen.line(Tone::Strong, "The order of arrival, lane by lane")?;
    for lane in Lane::ALL {
        let order = claims::order(lane, &seen.arrivals);
        let tone = if verdict.differs(lane.as_str()) { Tone::Bad } else { Tone::Plain };
        screen.line(
            tone,
            &format!("{}  {}", lane.as_str(), order.join(" → ").replace("hook-", "").replace("mail-", "")),
        )?;
    }
    for (about, text) in &verdict.differences {
        screen.difference(&format!("{about}: {text}"))?;
    }
    Ok(())
}

fn rows(seen: &Seen, verdict: &Verdict) -> Vec<(Tone, Vec<String>)> {
    let mut rows = Vec::new();
    for part in &PARTS {
        let about = claims::booking(part);
        let (tone, end) = booking_end(part, seen);
        let worker = format!("{}, token {}", part.worker, part.token);
        rows.push(row(verdict, &about, tone, [worker, about.clone(), "-".to_owned(), end]));
        for ask in part.asks {
            let (tone, end) = command_end(ask, seen);
            let cells = [String::new(), ask.id.to_owned(), arrived(ask, &seen.arrivals), end];
            rows.push(row(verdict, ask.id, tone, cells));
        }
    }
    rows
}

fn row(verdict: &Verdict, about: &str, tone: Tone, mut cells: [String; 4]) -> (Tone, Vec<String>) {
    let differs = verdict.differs(about);
    if let Some(end) = cells.last_mut().filter(|_| differs) {
        end.insert_str(0, "✗ ");
    }
    (if differs { Tone::Bad } else { tone }, cells.to_vec())
}

fn booking_end(part: &Part, seen: &Seen) -> (Tone, String) {
    let is_there = seen.bookings.iter().any(|(worker, what)| worker == part.worker && what == part.books);
    if is_there {
        (Tone::Plain, "committed".to_owned())
    } else {
        (Tone::Careful, "undone, with its transaction".to_owned())
    }
}

fn command_end(ask: &Ask, seen: &Seen) -> (Tone, String) {
    match seen.commands.iter().find(|command| command.id == ask.id) {
        Some(command) => found_end(command),
        None => {
            // The text begins with the code and its meaning; the database's own count has the numbers.
            let why = seen.told.text.split(':').next().unwrap_or_default();
            let numbers = seen.counted.first().map(|(token, current, _)| format!(", {token} is below {current}"));
            (Tone::Careful, format!("refused: {why}{}", numbers.unwrap_or_default()))
        }
    }
}

fn found_end(command: &Command) -> (Tone, String) {
    let unknown = command.attempts.iter().any(|(_, outcome)| outcome == "unknown");
    match (unknown, command.answers) {
        (false, 0) => (Tone::Plain, command.state.clone()),
        (true, 0) => (Tone::Careful, format!("answer lost, sent again: {}", command.state)),
        (_, _) => (Tone::Careful, format!("answer lost, in doubt; a person: {}", command.state)),
    }
}

fn arrived(ask: &Ask, arrivals: &[Arrival]) -> String {
    match arrivals.iter().filter(|arrival| arrival.id == ask.id).count() {
        0 => "never".to_owned(),
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        times => format!("{times} times"),
    }
}
