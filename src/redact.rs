//! What may be shown of a URL.
//!
//! Services put secrets into the user part, the query and the path of a webhook's URL. Everything that
//! is written for people or kept as evidence goes through here; scheme, host, port and the first word
//! of the path are enough to know which endpoint it is.

use url::Url;

/// The longest first segment that can be a plain word rather than a secret.
const WORD_BYTES_MAX: usize = 16;

/// A URL without user, password and query, and of the path what [`path_prefix`] leaves.
pub fn url(url: &Url) -> String {
    let origin = match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{}://{host}:{port}", url.scheme()),
        (Some(host), None) => format!("{}://{host}", url.scheme()),
        (None, _) => format!("{}:", url.scheme()),
    };
    format!("{origin}{}", path_prefix(url))
}

/// Of the path a first segment that is a plain lower-case word with more behind it, else nothing.
pub fn path_prefix(url: &Url) -> String {
    let mut segments = url.path().split('/').skip(1);
    let first = segments.next().unwrap_or_default();
    let goes_on = segments.next().is_some();
    match shows(first) && goes_on {
        true if first.is_empty() => "/…".to_owned(),
        true => format!("/{first}/…"),
        false if first.is_empty() && !goes_on => "/".to_owned(),
        false => "/…".to_owned(),
    }
}

/// Whether a first path segment with more behind it is shown.
pub(crate) fn shows(first: &str) -> bool {
    first.len() <= WORD_BYTES_MAX && first.bytes().all(|b| b.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_url_only_what_can_hold_no_secret_is_shown() {
        for (given, shown) in [
            ("https://u:p@a.example/services/T0/x?q=1#f", "https://a.example/services/…"),
            ("https://a.example/hooks", "https://a.example/…"),
            ("https://a.example/T000/x", "https://a.example/…"),
            ("http://a.example:81/", "http://a.example:81/"),
            ("http://a.example//x", "http://a.example/…"),
            ("mailto:ann@example.com", "mailto:/"),
        ] {
            assert_eq!(url(&given.parse().expect("a URL")), shown, "{given}");
        }
    }
}
