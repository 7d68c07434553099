//! `fencepost show`: everything about one command, and what may be done with it.

use fencepost::clock::wall_ms;
use fencepost::config::Config;
use fencepost::sqlite::inspect::{self, Attempt, Detail, Listed};
use fencepost::sqlite::pause::{Pause, pauses};
use serde_json::{Map, Value, json};

use super::{attempt_json, command_json, evidence, is_configured, is_paused, place, to};
use crate::exit::{Exit, Failure};
use crate::output::{Screen, Tone, clean, clean_lines, decimal, moment, relative, span};
use crate::{Globals, database};

/// Options of `fencepost show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The command
    id: String,
    /// Show the payload and the values of headers too; they can hold secrets
    #[arg(long)]
    payload: bool,
}

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
