//! What makes two commands the same: one hash over what idempotency compares.
//!
//! It is all that is left of a command's content after prune or erasure, so its form must never change:
//! another form would take every repeat for a different command. The columns are those that the
//! contract's triggers compare; token, holder, times and trace context are not among them.

use sha2::{Digest, Sha256};

/// Begins the hashed bytes, so that another form could be told apart.
const FORM: &[u8] = b"fencepost content 1\n";

/// What idempotency compares.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compared<'a> {
    pub(super) lane: &'a [u8],
    pub(super) kind: &'a [u8],
    pub(super) destination: &'a [u8],
    pub(super) headers: Option<&'a [u8]>,
    pub(super) payload: &'a [u8],
}

/// The hash of a command's content: each part with its length in front, headers only if there are any.
/// JSON `null` as headers means none, and text has the same bytes as a blob.
pub(super) fn content_hash(content: &Compared<'_>) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(FORM);
    for part in [content.lane, content.kind, content.destination, content.payload] {
        add(&mut hash, part);
    }
    if let Some(headers) = content.headers.filter(|headers| !is_json_null(headers)) {
        add(&mut hash, headers);
    }
    hash.finalize().into()
}

fn add(hash: &mut Sha256, part: &[u8]) {
    hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
    hash.update(part);
}

fn is_json_null(headers: &[u8]) -> bool {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    let from = headers.iter().position(|byte| !blank(byte)).unwrap_or(headers.len());
    let to = headers.iter().rposition(|byte| !blank(byte)).map_or(from, |last| last + 1);
    headers.get(from..to) == Some(b"null")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Compared<'_> =
        Compared { lane: b"", kind: b"webhook", destination: b"billing", headers: None, payload: b"{}" };

    /// The form is for ever: this is the hash that databases hold.
    #[test]
    fn the_form_does_not_change() {
        let hex: String = content_hash(&ONE).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "722ee037cb7ef9b91a6a955fc0816d2851d3789f714f9de1395f15a918c2b706");
    }

    #[test]
    fn what_is_compared_is_hashed() {
        let same = Compared { headers: Some(b" null\n"), ..ONE };
        assert_eq!(content_hash(&same), content_hash(&ONE));
        for other in [
            Compared { lane: b"a", ..ONE },
            Compared { kind: b"webhookb", destination: b"illing", ..ONE },
            Compared { headers: Some(b"{}"), ..ONE },
            Compared { headers: Some(b""), ..ONE },
            Compared { payload: b"", ..ONE },
        ] {
            assert_ne!(content_hash(&other), content_hash(&ONE), "{other:?}");
        }
    }
}
