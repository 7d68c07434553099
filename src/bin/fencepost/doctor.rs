//! `fencepost doctor`: what is wrong around the database, and what cures it.
//!
//! It runs at any time, above all when something is stuck: it only reads, waits for no lock and keeps
//! none. Each finding has its cure. What must not be is a breach and decides the exit code; everything
//! else is told and left to people.

use std::path::Path;

use fencepost::clock::{JUMP_MS, wall_ms};
use fencepost::config::Config;
use fencepost::sqlite::SchemaError;
use fencepost::sqlite::doctor::{self, Dispatcher, Facts, Holders, Place, Process};
use fencepost::sqlite::inspect::Load;
use serde_json::{Value, json};

use crate::exit::Exit;
use crate::inspect::{is_configured, section, shown};
use crate::output::{Screen, Tone, clean, moment, relative, span};
use crate::{Globals, database, refusals};

/// A WAL of this size was not reset for a while; it is a few MB otherwise.
const WAL_LARGE: u64 = 16 << 20;

/// With less than this the next large transaction fails.
const SPACE_LOW: u64 = 256 << 20;
const SPACE_OUT: u64 = 16 << 20;

/// How long something may be due before it is told.
const DUE_LONG_MS: i64 = 300_000;

/// Options of `fencepost doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    Note,
    Warning,
    Breach,
}

impl Level {
    const fn word(self) -> (&'static str, Tone) {
        match self {
            Self::Ok => ("ok", Tone::Good),
            Self::Note => ("note", Tone::Plain),
            Self::Warning => ("warning", Tone::Careful),
            Self::Breach => ("breach", Tone::Bad),
        }
    }
}

/// One thing that was looked at.
#[derive(Debug)]
struct Finding {
    topic: &'static str,
    level: Level,
    says: String,
    cure: String,
    /// Processes that it is about.
    pids: Vec<u32>,
}

impl Finding {
    fn new(topic: &'static str, level: Level, says: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { topic, level, says: says.into(), cure: cure.into(), pids: Vec::new() }
    }

    fn ok(topic: &'static str, says: impl Into<String>) -> Self {
        Self::new(topic, Level::Ok, says, "")
    }

    fn about(self, processes: &[Process]) -> Self {
        Self { pids: processes.iter().map(|process| process.pid).collect(), ..self }
    }
}

/// Looks at everything around the database; 1 if something must not be.
pub(crate) fn doctor(_: &Args, globals: &Globals) -> anyhow::Result<u8> {
    let screen = globals.screen();
    let (connection, path) = database::look(globals)?;
    let path = path.canonicalize()?;
    let now_ms = wall_ms();
    let mut findings = vec![library()];
    findings.extend(place(&doctor::place(&path)?));
    match doctor::holders(&path) {
        Ok(holders) => findings.extend(held(&path, &doctor::place(&path)?, &holders)),
        Err(error) => findings.push(Finding::new(
            "locks",
            Level::Note,
            format!("nobody can be named: {error}"),
            "run it where /proc can be read",
        )),
    }
    let guards = doctor::guards(&connection);
    let readable = matches!(guards, Ok(()) | Err(SchemaError::Drift { .. } | SchemaError::Older { .. }));
    findings.push(schema(&guards));
    if readable {
        match doctor::facts(&connection, now_ms, JUMP_MS) {
            Ok(facts) => findings.extend(inside(&facts, database::known_destinations(globals).as_ref(), now_ms)),
            Err(error) => findings.push(Finding::new(
                "outbox",
                Level::Breach,
                format!("it can't be read: {error}"),
                "restore the objects that are missing, then run fencepost audit",
            )),
        }
    }
    say(screen, &path, &findings)?;
    Ok(if findings.iter().any(|finding| finding.level == Level::Breach) { Exit::Breach as u8 } else { 0 })
}

// ── The process, the file and its place ─────────────────────────────────────────────────────────────

fn library() -> Finding {
    let library = doctor::library();
    let says = format!("this process has {}", library.version);
    if library.wal_reset_bug {
        return Finding::new(
            "sqlite",
            Level::Breach,
            format!("{says}, which can corrupt a WAL"),
            "use 3.51.3 or later",
        );
    }
    let workers = format!(
        "workers with SQLite 3.7.0 to 3.51.2 can corrupt the file when two checkpoint at once: there {}, \
         and leave checkpoints to the daemon",
        doctor::WITH_THE_BUG
    );
    Finding::new("sqlite", Level::Note, says, workers)
}

fn place(place: &Place) -> Vec<Finding> {
    let file_system = match place.file_system_is_known {
        true => Finding::ok("file system", &place.file_system),
        false => Finding::new(
            "file system",
            Level::Breach,
            format!("{}: locks can't be trusted there", place.file_system),
            "move the database to a local disk (ext4, xfs, btrfs, zfs, tmpfs, overlay)",
        ),
    };
    let links = match place.links {
        0 | 1 => Finding::ok("names", "the file has one name"),
        links => Finding::new(
            "names",
            Level::Breach,
            format!("the file has {links} names (hard links), and each name has a WAL of its own"),
            "delete all but one; `find DIR -inum` with the number of `ls -i` finds them",
        ),
    };
    vec![file_system, links, space(place)]
}

fn space(place: &Place) -> Finding {
    let says = format!("{} free; the database has {}", bytes(place.free_bytes), bytes(place.database_bytes));
    let cure = "free some space: what can't be recorded is not sent, and workers get errors";
    let level = match place.free_bytes {
        ..SPACE_OUT => Level::Breach,
        SPACE_OUT..SPACE_LOW => Level::Warning,
        SPACE_LOW.. => return Finding::ok("disk space", says),
    };
    Finding::new("disk space", level, says, cure)
}

fn bytes(bytes: u64) -> String {
    match bytes {
        ..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        0x4000_0000.. => format!("{} GiB", bytes >> 30),
    }
}

// ── Who holds it ────────────────────────────────────────────────────────────────────────────────────

fn held(path: &Path, place: &Place, holders: &Holders) -> Vec<Finding> {
    vec![writer(holders), wal(path, place, holders), dispatcher(holders)]
}

fn writer(holders: &Holders) -> Finding {
    let Some(writer) = &holders.writer else { return Finding::ok("write lock", "nobody holds it right now") };
    let says = format!("process {} holds it", named(writer));
    let finding = if writer.stopped {
        let pid = writer.pid;
        let says = format!("{says} and is stopped inside its transaction: nobody else can write");
        let cure = format!(
            "let it go on (kill -CONT {pid}), or end it (kill -KILL {pid}): its transaction is undone then, and nothing of it is sent"
        );
        Finding::new("write lock", Level::Breach, says, cure)
    } else {
        let cure = "normal for a moment; if it is still there at the next look, its transaction is too long";
        Finding::new("write lock", Level::Note, says, cure)
    };
    finding.about(std::slice::from_ref(writer))
}

fn wal(path: &Path, place: &Place, holders: &Holders) -> Finding {
    let size = bytes(place.wal_bytes);
    if place.wal_bytes < WAL_LARGE {
        return Finding::ok("wal", size);
    }
    if holders.readers.is_empty() {
        let open: Vec<String> = holders.open_by.iter().map(named).collect();
        let who = if open.is_empty() { "nobody that can be seen".to_owned() } else { open.join(", ") };
        let says = format!("{size}, and no reader keeps it so now; open by {who}");
        let cure = format!("it shrinks at the next checkpoint: sqlite3 {} '{}'", path.display(), doctor::CHECKPOINT);
        return Finding::new("wal", Level::Warning, says, cure).about(&holders.open_by);
    }
    let readers: Vec<String> = holders.readers.iter().map(named).collect();
    let says = format!("{size}; it can't be reset while a read transaction is open: {}", readers.join(", "));
    Finding::new("wal", Level::Warning, says, "end the long read transaction there").about(&holders.readers)
}

fn dispatcher(holders: &Holders) -> Finding {
    match &holders.dispatcher {
        Dispatcher::None => Finding::new("dispatcher", Level::Note, "none runs: nothing is sent", "fencepost run"),
        Dispatcher::Runs(process) if process.stopped => {
            let says = format!("process {} is stopped: nothing is sent, and nobody may take over", named(process));
            let cure =
                format!("let it go on (kill -CONT {0}), or end it (kill -KILL {0}) and start another", process.pid);
            Finding::new("dispatcher", Level::Breach, says, cure).about(std::slice::from_ref(process))
        }
        Dispatcher::Runs(process) => {
            Finding::ok("dispatcher", format!("process {} runs", named(process))).about(std::slice::from_ref(process))
        }
        Dispatcher::RunsElsewhere(says) => {
            let says = format!("one runs that can't be seen from here; its lock file says: {}", clean(says));
            Finding::ok("dispatcher", says)
        }
    }
}

fn named(process: &Process) -> String {
    let stopped = if process.stopped { ", stopped" } else { "" };
    format!("{} ({}{stopped})", process.pid, clean(&process.name))
}

// ── What the database says ──────────────────────────────────────────────────────────────────────────

fn schema(guards: &Result<(), SchemaError>) -> Finding {
    let cure = match guards {
        Ok(()) => return Finding::ok("schema", "every object of the contract is as it must be"),
        Err(SchemaError::Older { .. }) => {
            return Finding::new(
                "schema",
                Level::Note,
                "an older version of the contract",
                "fencepost init upgrades it",
            );
        }
        Err(SchemaError::Drift { .. }) => {
            "a migration that rebuilds a table drops its triggers: stop the workers, create the objects anew from schema.sql, \
             then run fencepost audit"
        }
        Err(_) => "use the version of fencepost that fits this database",
    };
    let says = guards.as_ref().err().map(|error| clean(&error.to_string())).unwrap_or_default();
    Finding::new("schema", Level::Breach, says, cure)
}

fn inside(facts: &Facts, config: Option<&Config>, now_ms: i64) -> Vec<Finding> {
    let mut findings = vec![journal(facts), clock(facts, now_ms), oldest(facts, now_ms)];
    findings.extend(destinations(facts, config, now_ms));
    findings.extend(refused(facts, now_ms));
    findings
}

fn journal(facts: &Facts) -> Finding {
    match facts.journal_mode.as_str() {
        "wal" => {
            Finding::ok("journal mode", "wal; synchronous is each connection's own and must be full in every worker")
        }
        other => Finding::new(
            "journal mode",
            Level::Breach,
            format!("{}: readers and writers shut each other out", clean(other)),
            "fencepost init sets it to wal; see that no worker sets it back",
        ),
    }
}

fn clock(facts: &Facts, now_ms: i64) -> Finding {
    let ahead_ms = facts.newest_ms.map_or(0, |newest_ms| newest_ms.saturating_sub(now_ms));
    let started_ms = facts.reign.started_ms.map_or(0, |started_ms| started_ms.saturating_sub(now_ms));
    let ahead_ms = ahead_ms.max(started_ms);
    if ahead_ms <= JUMP_MS && facts.lanes_from_the_future == 0 {
        return Finding::ok("clock", "nothing in the database is from the future");
    }
    let says = format!(
        "the database has times up to {} ahead of this clock, and {} lanes wait by them: it was set back, or another machine's was ahead",
        span(ahead_ms),
        facts.lanes_from_the_future
    );
    let cure = "check the clock; due times that are too far ahead become due when the dispatcher sees it, or starts";
    Finding::new("clock", Level::Warning, says, cure)
}

fn oldest(facts: &Facts, now_ms: i64) -> Finding {
    let Some(oldest) = &facts.oldest_due else { return Finding::ok("oldest pending", "nothing waits") };
    let id = clean(&oldest.command.id);
    let says = format!("{id} has been waiting since {}", moment(oldest.since_ms, now_ms));
    if now_ms.saturating_sub(oldest.since_ms) < DUE_LONG_MS {
        return Finding::ok("oldest pending", says);
    }
    Finding::new("oldest pending", Level::Warning, says, format!("fencepost why {id} says what it waits for"))
}

fn destinations(facts: &Facts, config: Option<&Config>, now_ms: i64) -> Vec<Finding> {
    let Some(config) = config else {
        let cure = "give --config, and they are compared with what waits";
        return vec![Finding::new("destinations", Level::Note, "the configuration is not known here", cure)];
    };
    let unknown = |load: &&Load| !is_configured(config, &load.kind, &load.destination);
    let found: Vec<_> = facts.loads.iter().filter(unknown).map(|load| unknown_destination(load, now_ms)).collect();
    if found.is_empty() { vec![Finding::ok("destinations", "what waits goes to what is configured")] } else { found }
}

fn unknown_destination(load: &Load, now_ms: i64) -> Finding {
    let (kind, name) = (clean(&load.kind), clean(&shown(&load.destination)));
    let lanes = load.due + load.later;
    let since = relative(load.first_due_ms, now_ms);
    let says = format!(
        "{lanes} lanes wait for {kind} {name}, which the configuration doesn't name; the first was due {since}"
    );
    let cure = match load.kind.as_str() {
        "webhook" | "email" => {
            format!(
                "add {} and restart the daemon, or see why a worker writes that name",
                section(&load.kind, &load.destination)
            )
        }
        _ => "no sender here knows that kind: they end as invalid".to_owned(),
    };
    Finding::new("destinations", Level::Warning, says, cure)
}

fn refused(facts: &Facts, now_ms: i64) -> Vec<Finding> {
    if facts.refusals.is_empty() {
        return vec![Finding::ok("refused workers", "none was reported")];
    }
    let loud = refusals::sustained(&facts.refusals, now_ms);
    let mut findings: Vec<Finding> =
        loud.into_iter().map(|(says, cure)| Finding::new("refused workers", Level::Warning, says, cure)).collect();
    findings.extend(facts.refusals.iter().map(|refusal| {
        let (scope, last) = (clean(&refusal.scope), relative(refusal.last_ms, now_ms));
        let numbers = format!("token {}, watermark {}", refusal.token, refusal.watermark);
        let says = format!("{} in {scope}, the last {last}: {numbers}", refusal.count);
        Finding::new("refused workers", Level::Note, says, format!("usually: {}", refusals::meaning(refusal)))
    }));
    findings
}

// ── Saying it ───────────────────────────────────────────────────────────────────────────────────────

fn say(screen: Screen, path: &Path, findings: &[Finding]) -> std::io::Result<()> {
    if screen.is_json() {
        return screen.print_json(&json!({
            "database": path.display().to_string(),
            "ok": findings.iter().all(|finding| finding.level != Level::Breach),
            "findings": findings.iter().map(finding_json).collect::<Vec<_>>(),
        }));
    }
    let lines = findings.iter().map(|finding| {
        let (word, tone) = finding.level.word();
        let cure = if finding.cure.is_empty() { String::new() } else { format!("\n{}", finding.cure) };
        (finding.topic, format!("{}: {}{cure}", screen.paint(tone, word), finding.says))
    });
    screen.print(&screen.block(&lines.collect::<Vec<_>>()))
}

fn finding_json(finding: &Finding) -> Value {
    json!({
        "topic": finding.topic,
        "level": finding.level.word().0,
        "says": finding.says,
        "cure": if finding.cure.is_empty() { Value::Null } else { finding.cure.clone().into() },
        "pids": finding.pids,
    })
}
