//! What an answer means. Only its status counts.
//!
//! A body is opaque: it is kept in part, for a person to read, and never changes the outcome, nor
//! does its breaking off. What no row of the table makes certain is unknown: an endpoint that says
//! `500` may have done everything before it failed. Nothing here follows a redirect.

use std::time::{Duration, SystemTime};

use reqwest::Response;
use reqwest::header::{HeaderMap, LOCATION, RETRY_AFTER};
use url::Url;

use crate::effect::{Evidence, Report};
use crate::rules::Outcome;

const BODY_BYTES_MAX: usize = 4 * 1024;
const BODY_CHARS_MAX: usize = 200;

/// The body decides nothing, so a slow one may not hold up the lane.
const BODY_TIME_MAX: Duration = Duration::from_secs(2);

/// A longer wait is not asked for in earnest.
const RETRY_AFTER_MS_MAX: i64 = 24 * 60 * 60 * 1_000;

/// The outcome that a complete head with this status stands for.
pub(super) const fn outcome(status: u16) -> Outcome {
    match status {
        200..=299 => Outcome::Delivered,
        421 | 423 | 425 | 429 => Outcome::Deferred,
        // An endpoint says 409 also while the first request with this key is still running.
        408 | 409 => Outcome::Unknown,
        300..=499 => Outcome::Refused,
        _ => Outcome::Unknown,
    }
}

/// The report for a complete head. `effect_free`: the endpoint says so with this status.
pub(super) fn report(status: u16, effect_free: bool, retry_after_ms: Option<i64>, evidence: Evidence) -> Report {
    match outcome(status) {
        Outcome::Delivered => Report::delivered(evidence),
        Outcome::Refused => Report::refused(evidence),
        Outcome::Unknown if !effect_free => Report::unknown(evidence).retry_after(retry_after_ms),
        Outcome::Deferred | Outcome::Unknown => Report::deferred(evidence).retry_after(retry_after_ms),
    }
}

/// The wait that the answer asks for (RFC 9110 §10.2.3). Illegal values are ignored, a time that is
/// over is no wait. Of several, the longest.
pub(super) fn retry_after_ms(headers: &HeaderMap, now_ms: i64) -> Option<i64> {
    let waits = headers.get_all(RETRY_AFTER).iter().filter_map(|value| wait_ms(value.to_str().ok()?.trim(), now_ms));
    waits.max()
}

fn wait_ms(text: &str, now_ms: i64) -> Option<i64> {
    let wait_ms = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        text.parse().unwrap_or(i64::MAX).saturating_mul(1_000)
    } else {
        let at = httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        i64::try_from(at.as_millis()).ok()?.saturating_sub(now_ms)
    };
    Some(wait_ms.clamp(0, RETRY_AFTER_MS_MAX))
}

/// Where a redirect points to, as far as it may be shown: the host alone.
pub(super) fn location_host(headers: &HeaderMap, base: &Url) -> Option<String> {
    let mut values = headers.get_all(LOCATION).iter();
    let first = values.next()?;
    if values.next().is_some() {
        return Some("several".to_owned());
    }
    let location = first.to_str().ok().and_then(|text| base.join(text).ok());
    Some(location.as_ref().and_then(Url::host_str).unwrap_or("none").to_owned())
}

/// The beginning of the body, without the texts that may not be shown.
pub(super) async fn body_prefix(response: &mut Response, confidential: &[String]) -> String {
    let mut bytes = Vec::new();
    let reading = async {
        while bytes.len() < BODY_BYTES_MAX
            && let Ok(Some(chunk)) = response.chunk().await
        {
            let room = BODY_BYTES_MAX - bytes.len();
            bytes.extend_from_slice(chunk.get(..room).unwrap_or(&chunk));
        }
    };
    // However the reading ends, what has come so far is all that is wanted.
    let _ = tokio::time::timeout(BODY_TIME_MAX, reading).await;
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    for secret in confidential {
        text = text.replace(secret, "…");
    }
    text.chars().take(BODY_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: i64 = 1_796_205_600_000; // Wed, 02 Dec 2026 10:00:00 GMT

    #[test]
    fn h30_every_form_of_retry_after() {
        for (text, seconds) in [
            ("120", Some(120)),
            ("14400", Some(14_400)),
            ("0", Some(0)),
            ("Wed, 02 Dec 2026 10:07:00 GMT", Some(420)),
            ("Wednesday, 02-Dec-26 10:07:00 GMT", Some(420)),
            ("Wed Dec  2 10:07:00 2026", Some(420)),
            ("Wed, 02 Dec 2026 09:59:00 GMT", Some(0)),
            ("Wed, 02 Dec 2026 10:07:00 +0100", None),
            ("1.5", None),
            ("+5", None),
            ("-5", None),
            ("soon", None),
            ("", None),
            ("99999999999999999999999", Some(86_400)),
        ] {
            assert_eq!(wait_ms(text, NOW_MS), seconds.map(|s| s * 1_000), "{text:?}");
        }
    }

    #[test]
    fn h30_of_two_waits_the_longer_counts() {
        let mut headers = HeaderMap::new();
        for wait in ["10", "  600  ", "soon"] {
            headers.append(RETRY_AFTER, wait.parse().expect("a legal header"));
        }
        assert_eq!(retry_after_ms(&headers, NOW_MS), Some(600_000));
    }
}
