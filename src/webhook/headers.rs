//! The headers of a request: the command's own, checked, and ours.
//!
//! The database can't look into a command's headers, so whatever is wrong with them is found here,
//! before an attempt begins. A line end never gets near the wire, and a command can't speak in our
//! name: what identifies it, frames it or routes it is reserved. Messages name a header, never its
//! value.

use std::fmt;

use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::effect::{Command, Payload, Request, Unsendable};

use super::sign::Keys;

const TEXT_BYTES_MAX: usize = 64 * 1024;
const COUNT_MAX: usize = 100;

/// Names that a command may not set: its identity, the framing of the request, and what speaks to
/// the next hop instead of the receiver.
const RESERVED: [&str; 14] = [
    "idempotency-key",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "content-length",
    "transfer-encoding",
    "connection",
    "host",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "keep-alive",
    "http2-settings",
];
const RESERVED_PREFIXES: [&str; 2] = ["fencepost-", "proxy-"];

/// The command's own headers.
pub(super) fn of_command(command: &Command) -> Result<HeaderMap, Unsendable> {
    let Some(text) = command.headers.as_deref() else { return Ok(HeaderMap::new()) };
    if text.len() > TEXT_BYTES_MAX {
        return Err(Unsendable(format!("headers: longer than {TEXT_BYTES_MAX} bytes")));
    }
    let Pairs(pairs) = serde_json::from_str(text)
        .map_err(|_| Unsendable("headers: not a JSON object with a text for every name".to_owned()))?;
    if pairs.len() > COUNT_MAX {
        return Err(Unsendable(format!("headers: more than {COUNT_MAX}")));
    }
    let mut headers = HeaderMap::with_capacity(pairs.len());
    for (place, (name, value)) in pairs.iter().enumerate() {
        let name = check_name(name, place)?;
        let value = check_value(&name, value)?;
        if headers.insert(&name, value).is_some() {
            return Err(Unsendable(format!("headers: {name} is given twice")));
        }
    }
    Ok(headers)
}

fn check_name(name: &str, place: usize) -> Result<HeaderName, Unsendable> {
    // An illegal name isn't repeated: it can hold anything.
    let name = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| Unsendable(format!("headers: name {} is not a legal header name", place + 1)))?;
    let text = name.as_str();
    if RESERVED.contains(&text) || RESERVED_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
        return Err(Unsendable(format!("headers: {name} is reserved")));
    }
    Ok(name)
}

/// Visible ASCII, space, tab, and other text as UTF-8 (`obs-text`, RFC 9110 §5.5).
fn check_value(name: &HeaderName, value: &str) -> Result<HeaderValue, Unsendable> {
    let illegal = || Unsendable(format!("headers: the value of {name} holds control characters"));
    if value.chars().any(|c| c.is_control() && c != '\t') {
        return Err(illegal());
    }
    let mut value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| illegal())?;
    // The HTTP client prints headers at its lower log levels, but not sensitive ones.
    value.set_sensitive(true);
    Ok(value)
}

/// The command's own headers and ours, for one attempt.
pub(super) fn of_request(request: &Request<'_>, own: HeaderMap, keys: &Keys) -> Result<HeaderMap, Unsendable> {
    let Command { id, scope, lane, token, seq, payload, .. } = request.command;
    let timestamp_s = request.now_ms.div_euclid(1_000);
    let mut headers = HeaderMap::new();
    let mut set = |name: &'static str, value: &str| {
        let value = HeaderValue::from_str(value).map_err(|_| Unsendable(format!("{name}: not a legal value")))?;
        headers.insert(name, value);
        Ok(())
    };
    set(USER_AGENT.as_str(), concat!("fencepost/", env!("CARGO_PKG_VERSION")))?;
    set(CONTENT_TYPE.as_str(), content_type(payload))?;
    // The client leaves it out for an empty body, and some servers then answer 411.
    set(CONTENT_LENGTH.as_str(), &payload.as_bytes().len().to_string())?;
    set("idempotency-key", id)?;
    set("webhook-id", id)?;
    set("webhook-timestamp", &timestamp_s.to_string())?;
    if let Some(signature) = keys.sign(id, timestamp_s, payload.as_bytes()) {
        set("webhook-signature", &signature)?;
    }
    set("fencepost-scope", &percent_encode(scope))?;
    set("fencepost-lane", &percent_encode(lane))?;
    set("fencepost-token", &token.to_string())?;
    set("fencepost-seq", &seq.to_string())?;
    set("fencepost-attempt", &request.attempt_no.to_string())?;
    // Reserved names can't be among them, so this only overrides what is a mere default.
    headers.extend(own);
    Ok(headers)
}

const fn content_type(payload: &Payload) -> &'static str {
    match payload {
        Payload::Text(_) => "application/json",
        Payload::Bytes(_) => "application/octet-stream",
    }
}

/// Everything but the unreserved characters of RFC 3986 §2.3, as UTF-8 bytes.
fn percent_encode(text: &str) -> String {
    use fmt::Write;
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").expect("writing to a string can't fail");
        }
    }
    encoded
}

/// A JSON object of texts, as it is written: a map type would drop a name that is given twice.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor)
    }
}

struct PairsVisitor;

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Pairs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Pairs(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_characters_stay() {
        assert_eq!(percent_encode("order/17 é%\t~a.b_c-d"), "order%2F17%20%C3%A9%25%09~a.b_c-d");
        assert_eq!(percent_encode(""), "");
    }
}
