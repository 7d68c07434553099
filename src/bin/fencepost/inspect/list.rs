//! `fencepost list`: commands, newest first, narrowed down.

use clap::ValueEnum;
use fencepost::clock::wall_ms;
use fencepost::sqlite::inspect::{self, Filter, Listed, StateWord};
use fencepost::sqlite::pause::pauses;

use super::{command_json, is_paused, place, to};
use crate::output::{Tone, relative, span};
use crate::{Globals, database};

/// Options of `fencepost list`.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only this scope
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Only lanes of this name; '' is the one without a name
    #[arg(long, value_name = "LANE")]
    lane: Option<String>,
    /// Only this state; may be repeated
    #[arg(long, value_name = "STATE", value_enum)]
    state: Vec<StateArg>,
    /// Only this kind
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Only this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Only what isn't final
    #[arg(long, conflicts_with_all = ["state", "final"])]
    live: bool,
    /// Only what is final
    #[arg(long, conflicts_with = "state")]
    r#final: bool,
    /// How many at most, newest first
    #[arg(long, value_name = "N", default_value = "50")]
    limit: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum StateArg {
    Pending,
    Sending,
    #[value(alias = "in-doubt")]
    InDoubt,
    Parked,
    Delivered,
    Dead,
}

impl StateArg {
    const fn word(self) -> StateWord {
        match self {
            Self::Pending => StateWord::Pending,
            Self::Sending => StateWord::Sending,
            Self::InDoubt => StateWord::InDoubt,
            Self::Parked => StateWord::Parked,
            Self::Delivered => StateWord::Delivered,
            Self::Dead => StateWord::Dead,
        }
    }
}

/// Lists commands, newest first.
pub(crate) fn list(args: &ListArgs, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let screen = globals.screen();
    let progress = screen.progress("reading the outbox");
    let limit = args.limit as usize;
    let now_ms = wall_ms();
    let commands = inspect::list(&connection, &filter(args))?;
    let pauses = pauses(&connection, now_ms)?;
    drop(progress);
    let more = commands.len() > limit;
    let commands = commands.get(..limit).unwrap_or(&commands);
    if screen.is_json() {
        let listed = |command: &Listed| {
            let mut value = command_json(command);
            value["paused"] = is_paused(command, &pauses).into();
            value
        };
        screen.print_json(&commands.iter().map(listed).collect())?;
        return Ok(());
    }
    if commands.is_empty() {
        screen.print("no such command")?;
        return Ok(());
    }
    let row = |command: &Listed| list_row(command, is_paused(command, &pauses), now_ms);
    let rows: Vec<_> = commands.iter().map(row).collect();
    screen.print(
        &screen.table(&["!STATE", "!ID", "TO", "SCOPE", "?>SEQ", "?>TOKEN", "?>TRIES", "?!AGE", "!NEXT"], &rows),
    )?;
    if more {
        screen.print(&screen.note("… and more; --limit N shows them"))?;
    }
    Ok(())
}

fn filter(args: &ListArgs) -> Filter {
    let states = match (args.live, args.r#final) {
        (true, _) => StateWord::LIVE.to_vec(),
        (_, true) => StateWord::FINAL.to_vec(),
        (false, false) => args.state.iter().map(|state| state.word()).collect(),
    };
    Filter {
        scope: args.scope.clone(),
        lane: args.lane.clone(),
        states,
        kind: args.kind.clone(),
        destination: args.destination.clone(),
        // One more tells whether there are more.
        limit: args.limit.saturating_add(1),
    }
}

fn list_row(command: &Listed, paused: bool, now_ms: i64) -> (Tone, Vec<String>) {
    let next = match (command.state.as_str(), command.due_ms) {
        ("pending", _) if paused => "paused".to_owned(),
        ("pending", Some(due_ms)) if due_ms <= now_ms => "due".to_owned(),
        ("pending", Some(due_ms)) => relative(due_ms, now_ms),
        _ => command.reason.clone().unwrap_or_default(),
    };
    let cells = vec![
        command.state.clone(),
        command.id.clone(),
        to(command),
        place(command),
        command.seq.to_string(),
        command.token.to_string(),
        command.tries.to_string(),
        span(now_ms.saturating_sub(command.inserted_ms)),
        next,
    ];
    (Tone::of_state(&command.state), cells)
}
