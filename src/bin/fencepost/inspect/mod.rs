//! `fencepost status`, `list` and `show`: what waits, what failed, what is stuck, and what to do.
//!
//! Nothing here changes anything. Payloads and the values of headers can hold secrets, as the path of a
//! URL can: a payload is shown only where it is asked for, headers by name, URLs by their origin.

mod list;
mod show;
mod status;

use fencepost::config::Config;
use fencepost::redact;
use fencepost::sqlite::inspect::{Attempt, Listed};
use fencepost::sqlite::pause::Pause;
pub(crate) use list::{ListArgs, list};
use serde_json::{Map, Value, json};
pub(crate) use show::{ShowArgs, show};
pub(crate) use status::{StatusArgs, status};

use crate::output::{clean, decimal};

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

/// Whether a pause keeps it from being begun.
fn is_paused(command: &Listed, pauses: &[Pause]) -> bool {
    command.state == "pending" && pauses.iter().any(|pause| pause.covers(command))
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
