//! `fencepost events`: the outcome feed, once or as it grows.
//!
//! It only reads, and keeps no place of its own: whoever follows the feed remembers the last number and
//! gives it back with `--after`. With `--follow` each event is one line, as JSON too, so that a pipe can
//! take them one by one.

use std::time::Duration;

use fencepost::clock::wall_ms;
use fencepost::sqlite::{OutcomeEvent, events as feed};
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::output::{Screen, Tone, clean, decimal, relative};
use crate::{Globals, database};

/// Rows of one read while the feed is followed.
const PAGE: u32 = 500;

/// How long an empty feed is left alone. A look at it costs one step into an index.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Options of `fencepost events`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Begin behind the event with this number
    #[arg(long, value_name = "N", default_value_t = 0)]
    after: i64,
    /// At most so many; with --follow there is no end
    #[arg(long, value_name = "N", default_value_t = 100, conflicts_with = "follow")]
    limit: u32,
    /// Go on with what happens from now on, one event a line, until interrupted
    #[arg(long)]
    follow: bool,
}

/// Prints the feed.
pub(crate) fn events(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let screen = globals.screen();
    if args.follow {
        return follow(&connection, args.after, screen);
    }
    let found = feed(&connection, args.after, args.limit)?;
    if screen.is_json() {
        screen.print_json(&found.iter().map(event_json).collect())?;
    } else if found.is_empty() {
        screen.print("nothing has happened there")?;
    } else {
        let now_ms = wall_ms();
        let rows: Vec<_> = found.iter().map(|event| row(event, now_ms)).collect();
        screen.print(&screen.table(&["!>N", "!EVENT", "!ID", "SCOPE", "?>SEQ", "?KEY", "!REASON", "?WHEN"], &rows))?;
    }
    Ok(())
}

fn follow(connection: &Connection, mut after: i64, screen: Screen) -> anyhow::Result<()> {
    loop {
        let found = feed(connection, after, PAGE)?;
        for event in &found {
            let text = if screen.is_json() { event_json(event).to_string() } else { line(event, screen) };
            if !screen.print_to_reader(&text)? {
                return Ok(());
            }
            after = event.n;
        }
        if found.is_empty() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

fn line(event: &OutcomeEvent, screen: Screen) -> String {
    let state = screen.paint(tone(event), &outcome(event));
    let lane = if event.lane.is_empty() { String::new() } else { format!(" lane {}", clean(&event.lane)) };
    let (id, scope) = (clean(&event.id), clean(&event.scope));
    format!("{} {state} {id} {scope}{lane} seq {} effect {}", event.n, event.seq, event.effect)
}

fn row(event: &OutcomeEvent, now_ms: i64) -> (Tone, Vec<String>) {
    let scope = if event.lane.is_empty() { event.scope.clone() } else { format!("{} / {}", event.scope, event.lane) };
    let cells = vec![
        event.n.to_string(),
        event.event.clone(),
        event.id.clone(),
        scope,
        event.seq.to_string(),
        event.key.clone().unwrap_or_default(),
        event.reason.clone().unwrap_or_default(),
        relative(event.at_ms, now_ms),
    ];
    (tone(event), cells)
}

fn outcome(event: &OutcomeEvent) -> String {
    match &event.reason {
        Some(reason) => format!("{}/{reason}", event.event),
        None => event.event.clone(),
    }
}

fn tone(event: &OutcomeEvent) -> Tone {
    // A command that goes on after a person's word stands as pending.
    Tone::of_state(if event.event == "resumed" { "pending" } else { &event.event })
}

fn event_json(event: &OutcomeEvent) -> Value {
    json!({
        "n": event.n,
        "at_ms": event.at_ms,
        "event": event.event,
        "id": event.id,
        "scope": event.scope,
        "lane": event.lane,
        "seq": decimal(event.seq),
        "key": event.key,
        "reason": event.reason,
        "effect": event.effect,
    })
}
