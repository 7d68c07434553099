//! `fencepost resolve`: a person's answer for commands in doubt.
//!
//! What follows from an answer is decided by the rules and written with an audit entry by the library;
//! nothing is answered here without a reason and a name. What a file or a filter chose is counted first,
//! and decided only after a yes.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use fencepost::rules::Answer;
use fencepost::sqlite::inspect::Listed;
use fencepost::sqlite::operator::{BULK_MAX, Decision, Rehearsed, Selection, decide, in_doubt, rehearse};
use fencepost::sqlite::resolve::word;
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::exit::{Exit, Failure};
use crate::inspect::command_json;
use crate::operate::{Why, unique};
use crate::output::{Tone, clean, parse_duration, warn};
use crate::{Globals, database};

/// So many commands of a rehearsal are listed; all of them are counted.
const ROWS_MAX: usize = 20;

/// No list of ids is longer.
const FILE_BYTES_MAX: u64 = 10_000_000;

/// Options of `fencepost resolve`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "fencepost resolve ID… <ANSWER> --reason TEXT\n       \
    fencepost resolve <ANSWER> --reason TEXT (--from FILE | --scope S --destination D …) (--dry-run | --yes)")]
pub(crate) struct Args {
    /// The commands, and what became of them: delivered, not-delivered (it is sent again, with fresh
    /// tries) or given-up (it ends, and its lane goes on)
    #[arg(required = true, value_name = "ID… ANSWER")]
    words: Vec<String>,
    /// Take ids from a file, one a line; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = FILTERS)]
    from: Option<PathBuf>,
    /// Every command in doubt of this scope
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Every command in doubt to this destination
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Every command in doubt of this kind
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Every command that has been in doubt longer than this
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    older_than: Option<Duration>,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
    /// Do it: needed with a file or a filter
    #[arg(long, conflicts_with = "dry_run")]
    yes: bool,
    #[command(flatten)]
    why: Why,
}

const FILTERS: [&str; 4] = ["scope", "destination", "kind", "older_than"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Word {
    Delivered,
    NotDelivered,
    GivenUp,
}

impl Word {
    const fn answer(self) -> Answer {
        match self {
            Self::Delivered => Answer::Delivered,
            Self::NotDelivered => Answer::NotDelivered,
            Self::GivenUp => Answer::GivenUp,
        }
    }
}

/// Writes the answer and prints what the commands are now.
pub(crate) fn resolve(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let (answer, ids) = words(args)?;
    let who = args.why.who();
    let act = args.why.act(&who)?;
    let mut connection = if args.dry_run { database::read(globals)? } else { database::write(globals)? };
    let (ids, bulk) = chosen(args, &connection, ids, act.now_ms)?;
    let ids = unique(ids.iter().map(String::as_str));
    let decision = Decision::Resolve(answer);
    if args.dry_run || (bulk && !args.yes) {
        return say_rehearsal(globals, answer, &rehearse(&connection, decision, &ids, act.now_ms), args.dry_run);
    }
    if bulk && !globals.screen().is_json() {
        globals.screen().print(&counted(ids.len(), answer))?;
    }
    let commands = decide(&mut connection, decision, &ids, &act)?;
    say(globals, &commands, answer, &who)
}

/// The answer stands last.
fn words(args: &Args) -> anyhow::Result<(Answer, Vec<String>)> {
    let (last, ids) = args.words.split_last().context("clap requires one word")?;
    let answer = Word::from_str(last, false).map_err(|_| {
        Failure::usage(format!("{} is no answer", clean(last)))
            .hint("the last word is delivered, not-delivered or given-up; ids stand before it")
    })?;
    Ok((answer.answer(), ids.to_vec()))
}

/// The ids that are meant, and whether a file or a filter chose them.
fn chosen(args: &Args, connection: &Connection, ids: Vec<String>, now_ms: i64) -> anyhow::Result<(Vec<String>, bool)> {
    let filtered =
        args.scope.is_some() || args.destination.is_some() || args.kind.is_some() || args.older_than.is_some();
    match (&args.from, filtered, ids.is_empty()) {
        (None, false, false) => Ok((ids, false)),
        (Some(path), _, true) => Ok((ids_of(path)?, true)),
        (None, true, true) => {
            let since = |age: Duration| now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
            let selection = Selection {
                scope: args.scope.clone(),
                kind: args.kind.clone(),
                destination: args.destination.clone(),
                until_ms: args.older_than.map(since),
            };
            let mut found = in_doubt(connection, &selection)?;
            if found.len() > BULK_MAX {
                warn(&format!("more than {BULK_MAX} commands are meant; the oldest {BULK_MAX} are taken"));
                found.truncate(BULK_MAX);
            }
            Ok((found, true))
        }
        (_, _, false) => Err(Failure::usage("ids are given, and a file or a filter too").into()),
        (None, false, true) => Err(Failure::usage("no command is named")
            .hint("give ids before the answer, --from FILE, or a filter as --destination NAME")
            .into()),
    }
}

fn ids_of(path: &Path) -> anyhow::Result<Vec<String>> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(FILE_BYTES_MAX).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text))
    };
    read.with_context(|| format!("can't read ids from {}", path.display()))?;
    Ok(text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect())
}

fn counted(count: usize, answer: Answer) -> String {
    let commands = if count == 1 { "command" } else { "commands" };
    format!("{count} {commands} to be resolved as {}", word(answer))
}

fn say_rehearsal(globals: &Globals, answer: Answer, rehearsed: &[Rehearsed], dry_run: bool) -> anyhow::Result<()> {
    let screen = globals.screen();
    let fits = rehearsed.iter().filter(|one| one.command.is_ok()).count();
    if screen.is_json() {
        screen.print_json(&rehearsal_json(answer, rehearsed, fits))?;
    } else {
        screen.print(&counted(fits, answer))?;
        let row = |command: &Listed| {
            let to = format!("{} {}", command.kind, crate::inspect::shown(&command.destination));
            (Tone::of_state(&command.state), vec![command.id.clone(), to, command.scope.clone()])
        };
        let rows: Vec<_> =
            rehearsed.iter().filter_map(|one| one.command.as_ref().ok()).take(ROWS_MAX).map(row).collect();
        if !rows.is_empty() {
            screen.print(&screen.table(&["!ID", "TO", "SCOPE"], &rows))?;
        }
        if fits > rows.len() {
            screen.print(&screen.note(&format!("… and {} more", fits - rows.len())))?;
        }
    }
    for problem in rehearsed.iter().filter_map(|one| one.command.as_ref().err()).take(ROWS_MAX) {
        warn(&problem.to_string());
    }
    if fits < rehearsed.len() {
        let failure = Failure::new(Exit::Data, format!("{} of {} don't fit", rehearsed.len() - fits, rehearsed.len()));
        return Err(failure.hint("take them out: of several commands all are resolved or none").into());
    }
    if dry_run { Ok(()) } else { Err(unconfirmed()) }
}

fn unconfirmed() -> anyhow::Error {
    Failure::usage("nothing was done: a file or a filter chose the commands")
        .hint("--yes does it, --dry-run only looks")
        .into()
}

fn rehearsal_json(answer: Answer, rehearsed: &[Rehearsed], fits: usize) -> Value {
    let problems: Vec<Value> = rehearsed
        .iter()
        .filter_map(|one| Some(json!({ "id": one.id, "problem": one.command.as_ref().err()?.to_string() })))
        .collect();
    let commands = rehearsed.iter().filter_map(|one| one.command.as_ref().ok());
    json!({
        "answer": word(answer),
        "count": fits,
        "done": false,
        "commands": commands.map(command_json).collect::<Vec<_>>(),
        "problems": problems,
    })
}

fn say(globals: &Globals, commands: &[Listed], answer: Answer, who: &str) -> anyhow::Result<()> {
    if !globals.screen().is_json() {
        return crate::operate::say(globals, "resolve", commands, Some(who));
    }
    let value = |command: &Listed| {
        let mut value = command_json(command);
        value["answer"] = word(answer).into();
        value["who"] = json!(who);
        value
    };
    let mut values: Vec<Value> = commands.iter().map(value).collect();
    globals.screen().print_json(&if values.len() == 1 { values.remove(0) } else { values.into() })?;
    Ok(())
}
