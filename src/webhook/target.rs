//! Where a webhook goes, and what of that may be seen.
//!
//! URLs of webhooks carry secrets: in the query, in the user part, often in the path. So evidence
//! and errors name the host, the port and the beginning of the path, and nothing else; what an
//! endpoint echoes of the rest is taken out before its answer is kept.

use std::fmt;

use url::Url;

use crate::effect::Evidence;
use crate::redact;

/// Shorter texts are too likely to stand in an answer for other reasons.
const SECRET_CHARS_MIN: usize = 6;

/// Why a URL can't be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It can't be parsed.
    #[error("not a URL")]
    Syntax,
    /// Only `http` and `https` can be called.
    #[error("the scheme is not http or https")]
    Scheme,
    /// A user name or password would be sent to the endpoint, and shown by tools on the way.
    #[error("a URL may hold no user name or password")]
    UserInfo,
}

/// Reads a URL that a command gave.
pub(super) fn parse(text: &str) -> Result<Url, UrlError> {
    let url = Url::parse(text).map_err(|_| UrlError::Syntax)?;
    check(&url)?;
    Ok(url)
}

/// Fails if the URL can't be called, whatever it resolves to.
pub(super) fn check(url: &Url) -> Result<(), UrlError> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(UrlError::Scheme);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(UrlError::UserInfo);
    }
    // The HTTP client has a narrower idea of what a URL is.
    url.as_str().parse::<hyper::Uri>().map_err(|_| UrlError::Syntax)?;
    Ok(())
}

/// Evidence of an attempt to this URL that ended in `phase`.
pub(super) fn evidence(url: &Url, phase: &str) -> Evidence {
    let port = url.port_or_known_default().unwrap_or_default();
    Evidence::new(phase)
        .with("host", url.host_str().unwrap_or_default())
        .with_number("port", port.into())
        .with("path", &redact::path_prefix(url))
}

/// A URL as it may be shown.
pub(super) struct Shown<'a>(pub(super) &'a Url);

impl fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact::url(self.0))
    }
}

/// The texts in the URL and in the command's own header values that an answer may not show.
pub(super) fn confidential<'a>(url: &Url, values: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut found: Vec<String> = url.query_pairs().map(|(_, value)| value.into_owned()).collect();
    found.extend(url.query().into_iter().flat_map(|query| query.split(['&', '='])).map(str::to_owned));
    // The first segment is shown anyway, where it is a word.
    let segments = url.path_segments().into_iter().flatten().enumerate();
    found.extend(segments.filter(|(n, text)| *n > 0 || !redact::shows(text)).map(|(_, text)| text.to_owned()));
    found.extend(values.flat_map(|value| value.split_whitespace()).map(str::to_owned));
    found.retain(|text| text.chars().count() >= SECRET_CHARS_MIN);
    // The longest first, or a text that contains another one would be taken out in part only.
    found.sort_by_key(|text| std::cmp::Reverse(text.len()));
    found
}
