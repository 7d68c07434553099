//! What arrived, as text for a person: one line each, with what tells repeats and order.
//!
//! Everything that came from outside is cleaned of control characters, since the text goes to a
//! terminal.

use std::collections::HashMap;

use super::store::{Arrival, Content, Store};

/// All arrivals that are kept, oldest first.
pub(super) fn text(store: &Store) -> String {
    let (arrivals, dropped) = store.arrivals();
    let mut text = format!("fencepost sink: {} arrivals", arrivals.len());
    if dropped > 0 {
        text.push_str(&format!(", {dropped} older ones dropped"));
    }
    text.push_str("\n\n");
    let mut seen = HashMap::new();
    for arrival in &arrivals {
        text.push_str(&line(arrival, &mut seen));
        text.push('\n');
    }
    text
}

fn line(arrival: &Arrival, seen: &mut HashMap<String, u32>) -> String {
    let content = &arrival.content;
    let what = match content {
        Content::Webhook { method, path, .. } => format!("webhook  {method} {path}"),
        Content::Email { from, to, .. } => {
            let subject = content.header("subject").unwrap_or_default();
            format!("email  {from} to {}  {subject:?}", to.join(", "))
        }
    };
    let mut line = format!("{}  {}  {what}", arrival.no, time(arrival.time_ms));
    for name in ["scope", "lane", "seq", "token", "attempt"] {
        if let Some(value) = content.fact(name).filter(|value| !value.is_empty()) {
            line.push_str(&format!("  {name}={value}"));
        }
    }
    if let Some(id) = content.id() {
        line.push_str(&format!("  id={id}"));
        let times = seen.entry(id).or_default();
        *times += 1;
        if *times > 1 {
            line.push_str(&format!("  (time {times} for this id)"));
        }
    }
    line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn time(time_ms: i64) -> String {
    jiff::Timestamp::from_millisecond(time_ms).map_or_else(|_| time_ms.to_string(), |time| format!("{time:.3}"))
}
