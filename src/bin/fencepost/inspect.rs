//! `fencepost status`, `list` and `show`: what waits, what failed, what is stuck, and what to do.
//!
//! Nothing here changes anything. Payloads and the values of headers can hold secrets, as the path of a
//! URL can: a payload is shown only where it is asked for, headers by name, URLs by their origin.

use std::time::Duration;

use clap::ValueEnum;
use fencepost::clock::wall_ms;
use fencepost::config::Config;
use fencepost::redact;
use fencepost::sqlite::inspect::{
    self, Attempt, Blocked, Detail, Filter, Listed, Load, Refusal, Since, StateWord, Status,
};
use fencepost::sqlite::pause::{Pause, pauses};
use serde_json::{Map, Value, json};

use crate::Globals;
use crate::database;
use crate::exit::{Exit, Failure};
use crate::output::{Screen, Tone, clean, clean_lines, decimal, moment, parse_duration, relative, span};
use crate::refusals::{meaning, sustained};

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

/// Options of `fencepost show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The command
    id: String,
    /// Show the payload and the values of headers too; they can hold secrets
    #[arg(long)]
    payload: bool,
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

// ── status ──────────────────────────────────────────────────────────────────────────────────────────

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

/// The section of the configuration that a destination lacks.
pub(crate) fn section(kind: &str, destination: &str) -> String {
    match destination.starts_with("https://") || destination.starts_with("http://") {
        true => "[webhook_urls]".to_owned(),
        false => format!("[{}.{}]", clean(kind), clean(destination)),
    }
}

pub(crate) fn is_configured(config: &Config, kind: &str, destination: &str) -> bool {
    let is_url = || destination.starts_with("https://") || destination.starts_with("http://");
    match kind {
        "webhook" => config.webhooks.contains_key(destination) || (config.webhook_urls.is_some() && is_url()),
        "email" => config.emails.contains_key(destination),
        _ => false,
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

// ── list ────────────────────────────────────────────────────────────────────────────────────────────

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

/// Whether a pause keeps it from being begun.
fn is_paused(command: &Listed, pauses: &[Pause]) -> bool {
    command.state == "pending" && pauses.iter().any(|pause| pause.covers(command))
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

/// A command as every JSON answer shows it.
pub(crate) fn command_json(command: &Listed) -> Value {
    json!({
        "id": command.id,
        "scope": command.scope,
        "lane": command.lane,
        "seq": decimal(command.seq),
        "token": decimal(command.token),
        "holder": command.holder,
        "source": command.source,
        "key": command.key,
        "kind": command.kind,
        "destination": shown(&command.destination),
        "state": command.state,
        "reason": command.reason,
        "effect": command.effect,
        "attempt_no": command.attempt_no,
        "tries": command.tries,
        "inserted_ms": command.inserted_ms,
        "due_ms": command.due_ms,
        "expires_at_ms": command.expires_at_ms,
        "updated_ms": command.updated_ms,
    })
}

pub(crate) fn to(command: &Listed) -> String {
    format!("{} {}", clean(&command.kind), clean(&shown(&command.destination)))
}

/// The path of a URL can be a secret, as a chat's webhook has it.
pub(crate) fn shown(destination: &str) -> String {
    match url::Url::parse(destination) {
        Ok(url) if matches!(url.scheme(), "http" | "https") => redact::url(&url),
        _ => destination.to_owned(),
    }
}

/// Scope and lane, as in `order/17` or `order/17 [mails]`.
pub(crate) fn place(command: &Listed) -> String {
    let scope = clean(&command.scope);
    if command.lane.is_empty() { scope } else { format!("{scope} [{}]", clean(&command.lane)) }
}

// ── show ────────────────────────────────────────────────────────────────────────────────────────────

/// Shows everything about one command.
pub(crate) fn show(args: &ShowArgs, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let detail = inspect::show(&connection, &args.id)?.ok_or_else(|| {
        let message = format!("there is no command with the id {}", clean(&args.id));
        Failure::new(Exit::Data, message).hint("`fencepost list` shows ids")
    })?;
    let now_ms = wall_ms();
    let mut held = pauses(&connection, now_ms)?;
    held.retain(|pause| is_paused(&detail.command, std::slice::from_ref(pause)));
    let payload = if args.payload { Some(inspect::payload(&connection, detail.command.n)?) } else { None };
    let screen = globals.screen();
    if screen.is_json() {
        let mut value = detail_json(&detail, payload.as_deref());
        value["paused"] = held.iter().map(crate::pause::pause_json).collect();
        screen.print_json(&value)?;
        return Ok(());
    }
    let config = database::known_destinations(globals);
    screen.print(&detail_text(screen, &detail, payload.as_deref(), &held, config.as_ref(), now_ms))?;
    Ok(())
}

fn detail_text(
    screen: Screen,
    detail: &Detail,
    payload: Option<&[u8]>,
    held: &[Pause],
    config: Option<&Config>,
    now_ms: i64,
) -> String {
    let mut facts = identity(screen, detail, now_ms);
    facts.extend(times(detail, now_ms));
    facts.push(("payload", payload_fact(detail)));
    if let Some(headers) = headers_fact(detail, payload.is_some()) {
        facts.push(("headers", headers));
    }
    if let Some(position) = position(detail, now_ms) {
        facts.push(("lane", position));
    }
    facts.extend(
        held.iter()
            .map(|pause| ("paused", format!("{}, {}", crate::pause::name(pause), crate::pause::terms(pause, now_ms)))),
    );
    facts.push(("what now", what_now(detail, config, now_ms)));
    let mut parts = vec![screen.block(&facts)];
    if !detail.attempts.is_empty() {
        parts.push(screen.heading("Attempts"));
        let numbers: Vec<String> = detail.attempts.iter().map(|attempt| attempt.attempt_no.to_string()).collect();
        let texts = detail.attempts.iter().map(|attempt| attempt_text(screen, attempt, now_ms));
        let pairs: Vec<(&str, String)> = numbers.iter().map(String::as_str).zip(texts).collect();
        parts.push(screen.block(&pairs));
    }
    if !detail.audit.is_empty() {
        parts.push(screen.heading("Operators"));
        parts.extend(detail.audit.iter().map(|entry| {
            let who = clean(&entry.who);
            let answer = audit_answer(entry.after.as_deref());
            let (verb, reason) = (clean(&entry.verb), clean(&entry.reason));
            format!("{}\n   {who}: {verb}{answer}, because: {reason}", moment(entry.at_ms, now_ms))
        }));
    }
    if let Some(payload) = payload {
        parts.push(screen.heading("Payload"));
        parts.push(clean_lines(&String::from_utf8_lossy(payload)));
    }
    parts.join("\n")
}

fn identity(screen: Screen, detail: &Detail, now_ms: i64) -> Vec<(&'static str, String)> {
    let command = &detail.command;
    let state = screen.paint(Tone::of_state(&command.state), &command.state);
    let reason = command.reason.as_deref().map(|reason| format!(" ({})", clean(reason))).unwrap_or_default();
    let since = moment(command.updated_ms, now_ms);
    let newer = match detail.watermark > command.token {
        true => format!(" (a newer holder has {})", detail.watermark),
        false => String::new(),
    };
    let mut facts = vec![
        ("command", clean(&command.id)),
        ("state", format!("{state}{reason} since {since}")),
        ("effect", format!("{}: {}", command.effect, effect_meaning(&command.effect))),
        ("to", to(command)),
        ("scope", format!("{}, seq {}, token {}{newer}", place(command), command.seq, command.token)),
    ];
    let optional = [
        ("holder", &command.holder),
        ("source", &command.source),
        ("key", &command.key),
        ("traceparent", &detail.traceparent),
        ("reissue of", &detail.reissue_of),
        ("why", &detail.why),
    ];
    facts.extend(optional.into_iter().filter_map(|(name, text)| Some((name, clean(text.as_ref()?)))));
    facts
}

fn effect_meaning(effect: &str) -> &'static str {
    match effect {
        "none" => "certainly nothing has happened outside",
        "possible" => "something may have happened outside",
        "done" => "it has happened",
        _ => "",
    }
}

fn times(detail: &Detail, now_ms: i64) -> Vec<(&'static str, String)> {
    let command = &detail.command;
    let tries = format!("{} that count, {} attempts in all", command.tries, command.attempt_no);
    let mut facts = vec![("inserted", moment(command.inserted_ms, now_ms)), ("tries", tries)];
    let optional = [
        ("due", command.due_ms),
        ("not before", detail.not_before_ms),
        ("expires", command.expires_at_ms),
        ("first try", detail.first_begun_ms),
    ];
    facts.extend(optional.into_iter().filter_map(|(name, at_ms)| Some((name, moment(at_ms?, now_ms)))));
    facts
}

fn payload_fact(detail: &Detail) -> String {
    if let Some(erased_ms) = detail.erased_ms {
        return format!("erased {}", moment(erased_ms, wall_ms()));
    }
    let kind = if detail.payload_is_binary { "bytes" } else { "bytes of text" };
    format!("{} {kind}; --payload shows them", detail.payload_bytes)
}

fn headers_fact(detail: &Detail, with_values: bool) -> Option<String> {
    let headers = detail.headers.as_deref()?;
    match serde_json::from_str::<Option<Map<String, Value>>>(headers) {
        Ok(None) => None,
        Ok(Some(headers)) if with_values => {
            let line = |(name, value): (&String, &Value)| {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("{}: {}", clean(name), clean(&value))
            };
            Some(headers.iter().map(line).collect::<Vec<_>>().join("\n"))
        }
        Ok(Some(headers)) => {
            let names: Vec<String> = headers.keys().map(|name| clean(name)).collect();
            Some(format!("{} (values hidden)", names.join(", ")))
        }
        Err(_) => Some("not a JSON object: it will end as invalid".to_owned()),
    }
}

fn position(detail: &Detail, now_ms: i64) -> Option<String> {
    let ahead = detail.ahead?;
    let Some(head) = &detail.head else { return Some("it is the head of its lane".to_owned()) };
    let others = if ahead == 1 { "1 command goes".to_owned() } else { format!("{ahead} commands go") };
    let since = span(now_ms.saturating_sub(head.updated_ms));
    Some(format!("{others} before it; the head is {}, {} for {since}", clean(&head.id), clean(&head.state)))
}

/// What may be done with a command, by where it stands.
fn what_now(detail: &Detail, config: Option<&Config>, now_ms: i64) -> String {
    let command = &detail.command;
    let id = clean(&command.id);
    match (command.state.as_str(), &detail.head) {
        ("pending" | "parked", Some(head)) => {
            format!("wait for the head of its lane; `fencepost show {}` tells what that waits for", clean(&head.id))
        }
        ("pending", None) => pending_now(command, config, now_ms),
        ("sending", _) => "wait: an attempt is open. If its dispatcher died, the next start decides".to_owned(),
        ("in_doubt", _) => format!(
            "find out at the destination whether it happened, then say so:\n\
             fencepost resolve {id} delivered --reason TEXT\n\
             fencepost resolve {id} not-delivered --reason TEXT   (sends it again)\n\
             fencepost resolve {id} given-up --reason TEXT"
        ),
        ("parked", None) => format!(
            "its lane waits with it, for its holder or an operator to say:\n\
             fencepost adopt {id} --reason TEXT     (sends it, with fresh tries)\n\
             fencepost discard {id} --reason TEXT   (ends it)"
        ),
        ("delivered", _) => "nothing: the destination has it".to_owned(),
        ("dead", _) => dead_now(command),
        (_, _) => "this version doesn't know its state: use a newer one".to_owned(),
    }
}

fn pending_now(command: &Listed, config: Option<&Config>, now_ms: i64) -> String {
    if config.is_some_and(|config| !is_configured(config, &command.kind, &command.destination)) {
        return format!("add {} to the configuration: it waits until it is there", to(command));
    }
    match command.due_ms.filter(|due_ms| *due_ms > now_ms) {
        Some(due_ms) => format!("wait: it is due {}", relative(due_ms, now_ms)),
        None => "it goes out at the dispatcher's next look; if it doesn't, see `fencepost status`".to_owned(),
    }
}

fn dead_now(command: &Listed) -> String {
    let happened = match command.effect.as_str() {
        "none" => "nothing has happened, and it will not be sent any more",
        _ => "something may have happened; it will not be sent any more",
    };
    format!("{happened}. If it is still wanted: fencepost reissue {} --reason TEXT", clean(&command.id))
}

fn attempt_text(screen: Screen, attempt: &Attempt, now_ms: i64) -> String {
    let begun = moment(attempt.begun_ms, now_ms);
    let head = format!("{begun}, epoch {}, on_unknown {}", attempt.epoch, clean(&attempt.on_unknown));
    let after = |at_ms: i64| span(at_ms.saturating_sub(attempt.begun_ms));
    let armed = match attempt.armed_ms {
        Some(at_ms) => format!("armed after {}", after(at_ms)),
        None => "not armed: nothing left".to_owned(),
    };
    let ended = match (&attempt.outcome, attempt.settled_ms) {
        (Some(outcome), Some(at_ms)) => {
            let tone = match outcome.as_str() {
                "delivered" => Tone::Good,
                "unknown" => Tone::Careful,
                _ => Tone::Bad,
            };
            format!("{} after {}", screen.paint(tone, &clean(outcome)), after(at_ms))
        }
        (_, _) => "open".to_owned(),
    };
    let evidence: String = evidence(attempt).iter().map(|(name, value)| format!("\n{name}: {value}")).collect();
    format!("{head}\n{armed}, {ended}{evidence}")
}

/// What was seen, the phase first.
fn evidence(attempt: &Attempt) -> Vec<(String, String)> {
    let Some(json) = attempt.evidence.as_deref() else { return Vec::new() };
    let Ok(seen) = serde_json::from_str::<Map<String, Value>>(json) else {
        return vec![("evidence".to_owned(), clean(json))];
    };
    let text = |value: &Value| clean(&value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    let mut pairs: Vec<_> = seen.iter().map(|(name, value)| (clean(name), text(value))).collect();
    pairs.sort_by_key(|(name, _)| name != "phase");
    pairs
}

/// The last attempt in one line of a table.
pub(crate) fn brief(attempt: &Attempt) -> String {
    let outcome = clean(attempt.outcome.as_deref().unwrap_or("open"));
    let seen: Vec<String> = evidence(attempt)
        .into_iter()
        .map(|(name, value)| if name == "phase" { value } else { format!("{name} {value}") })
        .collect();
    format!("{outcome}: {}", seen.join(", "))
}

fn audit_answer(after: Option<&str>) -> String {
    let after: Option<Value> = after.and_then(|json| serde_json::from_str(json).ok());
    let answer = after.as_ref().and_then(|after| after.get("answer")).and_then(Value::as_str);
    answer.map(|answer| format!(" {}", clean(answer))).unwrap_or_default()
}

fn detail_json(detail: &Detail, payload: Option<&[u8]>) -> Value {
    let mut value = command_json(&detail.command);
    value["not_before_ms"] = detail.not_before_ms.into();
    value["reissue_of"] = detail.reissue_of.clone().into();
    value["traceparent"] = detail.traceparent.clone().into();
    value["watermark"] = decimal(detail.watermark);
    value["why"] = detail.why.clone().into();
    value["first_begun_ms"] = detail.first_begun_ms.into();
    value["first_unknown_ms"] = detail.first_unknown_ms.into();
    value["payload_bytes"] = detail.payload_bytes.into();
    value["erased_ms"] = detail.erased_ms.into();
    value["payload_is_binary"] = detail.payload_is_binary.into();
    value["ahead"] = detail.ahead.into();
    value["head"] = detail.head.as_ref().map_or(Value::Null, command_json);
    value["attempts"] = detail.attempts.iter().map(attempt_json).collect();
    value["audit"] = detail.audit.iter().map(audit_json).collect();
    let headers: Option<Map<String, Value>> =
        detail.headers.as_deref().and_then(|headers| serde_json::from_str(headers).ok());
    value["header_names"] = headers.as_ref().map(|headers| headers.keys().cloned().collect::<Vec<_>>()).into();
    if let Some(payload) = payload {
        value["headers"] = headers.into();
        match std::str::from_utf8(payload) {
            Ok(text) => value["payload"] = text.into(),
            Err(_) => value["payload_base64"] = base64(payload).into(),
        }
    }
    value
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

pub(crate) fn attempt_json(attempt: &Attempt) -> Value {
    let evidence = attempt.evidence.as_deref();
    let parsed: Option<Value> = evidence.and_then(|json| serde_json::from_str(json).ok());
    json!({
        "attempt_no": attempt.attempt_no,
        "epoch": attempt.epoch,
        "on_unknown": attempt.on_unknown,
        "begun_ms": attempt.begun_ms,
        "armed_ms": attempt.armed_ms,
        "settled_ms": attempt.settled_ms,
        "outcome": attempt.outcome,
        "evidence": parsed.or_else(|| evidence.map(Value::from)),
    })
}

fn audit_json(entry: &inspect::AuditEntry) -> Value {
    let parsed = |json: &Option<String>| -> Option<Value> { serde_json::from_str(json.as_deref()?).ok() };
    json!({
        "at_ms": entry.at_ms,
        "who": entry.who,
        "verb": entry.verb,
        "reason": entry.reason,
        "before": parsed(&entry.before),
        "after": parsed(&entry.after),
    })
}
