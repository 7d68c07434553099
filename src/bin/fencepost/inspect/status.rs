//! `fencepost status`: the whole outbox on one page, or checked against limits.

use std::time::Duration;

use fencepost::clock::wall_ms;
use fencepost::config::Config;
use fencepost::sqlite::inspect::{self, Blocked, Listed, Load, Refusal, Since, Status};
use serde_json::{Map, Value, json};

use super::{attempt_json, brief, command_json, is_configured, place, shown, to};
use crate::exit::Exit;
use crate::output::{Screen, Tone, clean, decimal, moment, parse_duration, relative, span};
use crate::refusals::{meaning, sustained};
use crate::{Globals, database};

/// Options of `fencepost status`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// Answer by exit code, for cron and monitoring: 1 on a breach, with one line that says why
    #[arg(long)]
    check: bool,
    /// With --check: how long a command may be waiting since it was first due, retries included
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_duration, requires = "check")]
    max_age: Duration,
    /// With --check: how many commands may be in doubt
    #[arg(long, value_name = "N", default_value = "0", requires = "check")]
    max_in_doubt: u32,
    /// With --check: how many commands may be parked; by default any number
    #[arg(long, value_name = "N", requires = "check")]
    max_parked: Option<u32>,
}

/// Shows the whole outbox, or checks it against limits.
pub(crate) fn status(args: &StatusArgs, globals: &Globals) -> anyhow::Result<u8> {
    let connection = database::read(globals)?;
    let screen = globals.screen();
    let now_ms = wall_ms();
    let progress = screen.progress("reading the outbox");
    let status = inspect::status(&connection, now_ms)?;
    drop(progress);
    let breaches = if args.check { breaches(args, &status, now_ms) } else { Vec::new() };
    if screen.is_json() {
        let config = database::known_destinations(globals);
        let mut value = status_json(&status, config.as_ref(), now_ms);
        if args.check {
            value["check"] = json!({ "ok": breaches.is_empty(), "breaches": breaches });
        }
        screen.print_json(&value)?;
    } else if args.check {
        screen.print(&check_line(screen, &status, &breaches, now_ms))?;
    } else {
        let config = database::known_destinations(globals);
        screen.print(&status_text(screen, &status, config.as_ref(), now_ms))?;
    }
    Ok(if breaches.is_empty() { 0 } else { Exit::Breach as u8 })
}

fn breaches(args: &StatusArgs, status: &Status, now_ms: i64) -> Vec<String> {
    let mut breaches = Vec::new();
    let max_age_ms = i64::try_from(args.max_age.as_millis()).unwrap_or(i64::MAX);
    if let Some(oldest) = status.oldest_due.as_ref().filter(|oldest| age(oldest, now_ms) > max_age_ms) {
        let id = clean(&oldest.command.id);
        breaches.push(format!("{id} has been waiting {} (max {})", span(age(oldest, now_ms)), span(max_age_ms)));
    }
    let too_many = |count: i64, max: u32| count > i64::from(max);
    if too_many(status.counts.in_doubt, args.max_in_doubt) {
        breaches.push(format!("{} in doubt (max {})", status.counts.in_doubt, args.max_in_doubt));
    }
    if let Some(max) = args.max_parked.filter(|max| too_many(status.counts.parked, *max)) {
        breaches.push(format!("{} parked (max {max})", status.counts.parked));
    }
    breaches
}

fn age(since: &Since, now_ms: i64) -> i64 {
    now_ms.saturating_sub(since.since_ms)
}

fn check_line(screen: Screen, status: &Status, breaches: &[String], now_ms: i64) -> String {
    if !breaches.is_empty() {
        return format!("{}: {}", screen.paint(Tone::Bad, "breach"), breaches.join("; "));
    }
    let oldest = status.oldest_due.as_ref().map_or("nothing waits".to_owned(), |oldest| {
        format!("the oldest has been waiting {}", span(age(oldest, now_ms)))
    });
    let counts = &status.counts;
    format!("{}: {oldest}, {} in doubt, {} parked", screen.paint(Tone::Good, "ok"), counts.in_doubt, counts.parked)
}

fn status_text(screen: Screen, status: &Status, config: Option<&Config>, now_ms: i64) -> String {
    let since = |since: &Since| {
        let command = &since.command;
        let to = to(command);
        format!("{} for {to} in {}, since {}", clean(&command.id), place(command), moment(since.since_ms, now_ms))
    };
    let nothing = || "nothing".to_owned();
    let mut facts = vec![
        ("dispatcher", reign(status, now_ms)),
        ("commands", counts(screen, status)),
        ("oldest due", status.oldest_due.as_ref().map_or_else(nothing, since)),
    ];
    if let Some(oldest) = &status.oldest_in_doubt {
        facts.push(("in doubt", format!("{}, the oldest: {}", status.counts.in_doubt, since(oldest))));
    }
    facts.extend(status.pauses.iter().map(|pause| {
        let text = format!("{}, {}", crate::pause::name(pause), crate::pause::terms(pause, now_ms));
        ("paused", screen.paint(Tone::Careful, &text))
    }));
    let mut parts = vec![screen.block(&facts)];
    blocked(screen, status, now_ms, &mut parts);
    waiting(screen, &status.loads, config, now_ms, &mut parts);
    failing(screen, status, now_ms, &mut parts);
    refusals(screen, &status.refusals, now_ms, &mut parts);
    parts.join("\n")
}

fn reign(status: &Status, now_ms: i64) -> String {
    let reign = &status.reign;
    let Some(started_ms) = reign.started_ms else { return "none has run yet".to_owned() };
    let host = clean(reign.host.as_deref().unwrap_or("an unknown host"));
    let pid = reign.pid.map(|pid| format!(" as process {pid}")).unwrap_or_default();
    format!("epoch {}, started {} on {host}{pid}", reign.epoch, moment(started_ms, now_ms))
}

fn counts(screen: Screen, status: &Status) -> String {
    let counts = &status.counts;
    let word = |state: &str, count: i64| {
        let text = format!("{count} {state}");
        if count > 0 { screen.paint(Tone::of_state(state), &text) } else { text }
    };
    let dead: i64 = counts.dead.iter().map(|(_, count)| count).sum();
    let reasons: Vec<String> = counts.dead.iter().map(|(reason, count)| format!("{count} {}", clean(reason))).collect();
    let mut text = [
        word("pending", counts.pending),
        word("sending", counts.sending),
        word("in_doubt", counts.in_doubt),
        word("parked", counts.parked),
        word("delivered", counts.delivered),
        word("dead", dead),
    ]
    .join(", ");
    if dead > 0 {
        text.push_str(&format!(" ({})", reasons.join(", ")));
    }
    if counts.pruned > 0 {
        text.push_str(&format!(", {} pruned", counts.pruned));
    }
    text
}

fn blocked(screen: Screen, status: &Status, now_ms: i64, parts: &mut Vec<String>) {
    if status.blocked.is_empty() {
        return;
    }
    parts.push(screen.heading("Lanes that wait for somebody"));
    let row = |Blocked { head, behind }: &Blocked| {
        let cells = vec![
            head.state.clone(),
            head.id.clone(),
            to(head),
            place(head),
            relative(head.updated_ms, now_ms),
            behind.to_string(),
            halted_by(head).to_owned(),
        ];
        (Tone::of_state(&head.state), cells)
    };
    let rows: Vec<_> = status.blocked.iter().map(row).collect();
    parts.push(screen.table(&["!STATE", "!ID", "TO", "SCOPE", "!SINCE", ">BEHIND", "BECAUSE"], &rows));
    let more = status.blocked_lanes - i64::try_from(rows.len()).unwrap_or(i64::MAX);
    if more > 0 {
        parts.push(screen.note(&format!("… and {more} more: fencepost list --state in_doubt --state parked")));
    }
    if status.counts.parked > 0 {
        let next = "of what is parked: fencepost adopt ID --reason TEXT sends it, fencepost discard ID ends it";
        parts.push(screen.note(next));
    }
    if status.counts.in_doubt > 0 {
        let next = "find out what happened (fencepost show ID), then fencepost resolve ID ANSWER --reason TEXT";
        parts.push(screen.note(next));
    }
}

/// Why the head of a lane waits for somebody.
fn halted_by(head: &Listed) -> &'static str {
    match (head.state.as_str(), head.reason.as_deref()) {
        ("in_doubt", _) => "nobody knows whether it happened",
        ("parked", None) => "a newer holder decides about it",
        ("parked", Some("refused")) => "refused, and on_dead = block",
        ("parked", Some("exhausted")) => "no tries left, and on_dead = block",
        (_, _) => "",
    }
}

fn waiting(screen: Screen, loads: &[Load], config: Option<&Config>, now_ms: i64, parts: &mut Vec<String>) {
    if loads.is_empty() {
        return;
    }
    parts.push(screen.heading("Lanes that wait, by destination of their head"));
    let row = |load: &Load| {
        let unknown = config.filter(|config| !is_configured(config, &load.kind, &load.destination));
        let tone = if unknown.is_some() { Tone::Bad } else { Tone::Plain };
        let cells = vec![
            load.kind.clone(),
            shown(&load.destination),
            load.due.to_string(),
            load.later.to_string(),
            relative(load.first_due_ms, now_ms),
            unknown.map(|_| unknown_note(&load.kind)).unwrap_or_default().to_owned(),
        ];
        (tone, cells)
    };
    let rows: Vec<_> = loads.iter().map(row).collect();
    parts.push(screen.table(&["KIND", "DESTINATION", ">DUE", ">LATER", "FIRST DUE", ""], &rows));
}

fn unknown_note(kind: &str) -> &'static str {
    match kind {
        "webhook" | "email" => "not in the configuration: waits until it is",
        _ => "no sender here: ends as invalid",
    }
}

fn failing(screen: Screen, status: &Status, now_ms: i64, parts: &mut Vec<String>) {
    if status.failing.is_empty() {
        return;
    }
    parts.push(screen.heading("Heads that failed and will be tried again"));
    let row = |failing: &inspect::Failing| {
        let command = &failing.command;
        let cells = vec![
            command.tries.to_string(),
            command.id.clone(),
            to(command),
            command.due_ms.map(|due_ms| relative(due_ms, now_ms)).unwrap_or_default(),
            failing.attempt.as_ref().map(brief).unwrap_or_default(),
        ];
        (Tone::Careful, cells)
    };
    let rows: Vec<_> = status.failing.iter().map(row).collect();
    parts.push(screen.table(&["TRIES", "!ID", "TO", "!NEXT", "LAST ATTEMPT"], &rows));
}

fn refusals(screen: Screen, refusals: &[Refusal], now_ms: i64, parts: &mut Vec<String>) {
    if refusals.is_empty() {
        return;
    }
    parts.push(screen.heading("Refused workers"));
    let row = |refusal: &Refusal| {
        let cells = vec![
            refusal.count.to_string(),
            refusal.scope.clone(),
            refusal.token.to_string(),
            refusal.watermark.to_string(),
            relative(refusal.last_ms, now_ms),
            meaning(refusal).to_owned(),
        ];
        (Tone::Plain, cells)
    };
    let rows: Vec<_> = refusals.iter().map(row).collect();
    parts.push(screen.table(&["COUNT", "SCOPE", ">TOKEN", ">WATERMARK", "LAST", "USUALLY"], &rows));
    let loud = sustained(refusals, now_ms);
    parts.extend(loud.iter().map(|(says, cure)| format!("{}: {says}\n{cure}", screen.paint(Tone::Bad, "warning"))));
}

fn status_json(status: &Status, config: Option<&Config>, now_ms: i64) -> Value {
    let counts = &status.counts;
    let since = |since: &Since| {
        let mut value = command_json(&since.command);
        value["since_ms"] = since.since_ms.into();
        value["age_ms"] = age(since, now_ms).into();
        value
    };
    let reasons: Map<String, Value> =
        counts.dead.iter().map(|(reason, count)| (reason.clone(), (*count).into())).collect();
    json!({
        "now_ms": now_ms,
        "counts": {
            "pending": counts.pending,
            "sending": counts.sending,
            "in_doubt": counts.in_doubt,
            "parked": counts.parked,
            "delivered": counts.delivered,
            "dead": counts.dead.iter().map(|(_, count)| count).sum::<i64>(),
            "pruned": counts.pruned,
        },
        "dead_by_reason": reasons,
        "oldest_due": status.oldest_due.as_ref().map(since),
        "oldest_in_doubt": status.oldest_in_doubt.as_ref().map(since),
        "paused": status.pauses.iter().map(crate::pause::pause_json).collect::<Vec<_>>(),
        "blocked_lanes": status.blocked_lanes,
        "blocked": status.blocked.iter().map(blocked_json).collect::<Vec<_>>(),
        "waiting": status.loads.iter().map(|load| load_json(load, config)).collect::<Vec<_>>(),
        "failing": status.failing.iter().map(failing_json).collect::<Vec<_>>(),
        "refusals": status.refusals.iter().map(refusal_json).collect::<Vec<_>>(),
        "sustained_refusals": sustained(&status.refusals, now_ms).into_iter().map(|(says, _)| says).collect::<Vec<_>>(),
        "dispatcher": {
            "epoch": status.reign.epoch,
            "started_ms": status.reign.started_ms,
            "host": status.reign.host,
            "pid": status.reign.pid,
        },
    })
}

fn blocked_json(blocked: &Blocked) -> Value {
    let mut value = command_json(&blocked.head);
    value["behind"] = blocked.behind.into();
    value
}

fn load_json(load: &Load, config: Option<&Config>) -> Value {
    json!({
        "kind": load.kind,
        "destination": shown(&load.destination),
        "due": load.due,
        "later": load.later,
        "first_due_ms": load.first_due_ms,
        "configured": config.map(|config| is_configured(config, &load.kind, &load.destination)),
    })
}

fn failing_json(failing: &inspect::Failing) -> Value {
    let mut value = command_json(&failing.command);
    value["last_attempt"] = failing.attempt.as_ref().map_or(Value::Null, attempt_json);
    value
}

fn refusal_json(refusal: &Refusal) -> Value {
    json!({
        "scope": refusal.scope,
        "token": decimal(refusal.token),
        "watermark": decimal(refusal.watermark),
        "count": refusal.count,
        "last_ms": refusal.last_ms,
        "usually": meaning(refusal),
    })
}
