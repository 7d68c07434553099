//! Fencing tokens and names: what a value must look like before any rule compares it.

use std::fmt;

/// The greatest fencing token, 2^62. Above it every value is refused, so that no sum can wrap.
pub const TOKEN_MAX: i64 = 1 << 62;

/// The greatest length of a name (scope, lane, key, holder, source, kind, destination), in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Number of one lease acquisition in a scope, from 1 to 2^62. It has an order and a successor, and
/// no other arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(i64);

/// A number outside 1 … 2^62.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fencing token is a number from 1 to 2^62, not {0}")]
pub struct InvalidToken(pub i64);

impl FencingToken {
    /// Fails if the number lies outside 1 … 2^62.
    pub const fn new(number: i64) -> Result<Self, InvalidToken> {
        if number < 1 || number > TOKEN_MAX { Err(InvalidToken(number)) } else { Ok(Self(number)) }
    }

    /// The number itself.
    pub const fn get(self) -> i64 {
        self.0
    }

    /// The token of the next acquisition, or `None` where the range is used up (never a wrap).
    pub const fn checked_next(self) -> Option<Self> {
        if self.0 == TOKEN_MAX { None } else { Some(Self(self.0 + 1)) }
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = InvalidToken;
    fn try_from(number: i64) -> Result<Self, InvalidToken> {
        Self::new(number)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a text can't be a name or an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// Empty, where only a lane may be.
    #[error("it is empty")]
    Empty,
    /// Longer than [`NAME_BYTES_MAX`] bytes (64 for an id).
    #[error("it is too long")]
    TooLong,
    /// NUL, C0, DEL or C1 characters; for an id anything outside `[A-Za-z0-9_-]`.
    #[error("it has a character that is not allowed")]
    Character,
}

/// Checks a name: 1 to 255 bytes without NUL, C0, DEL or C1 characters.
pub fn check_name(text: &str) -> Result<(), InvalidName> {
    if text.is_empty() { Err(InvalidName::Empty) } else { check_lane(text) }
}

/// Checks a lane, which is a name that may be empty.
pub fn check_lane(text: &str) -> Result<(), InvalidName> {
    if text.len() > NAME_BYTES_MAX {
        Err(InvalidName::TooLong)
    } else if text.chars().any(char::is_control) {
        Err(InvalidName::Character)
    } else {
        Ok(())
    }
}

/// Checks a command id: 1 to 64 of `[A-Za-z0-9_-]`. There is no dot, since a dot separates the signed
/// fields of Standard Webhooks.
pub fn check_id(text: &str) -> Result<(), InvalidName> {
    if text.is_empty() {
        Err(InvalidName::Empty)
    } else if text.len() > 64 {
        Err(InvalidName::TooLong)
    } else if text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        Ok(())
    } else {
        Err(InvalidName::Character)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_has_a_range_and_never_wraps() {
        for number in [i64::MIN, -1, 0, TOKEN_MAX + 1, i64::MAX] {
            assert_eq!(FencingToken::new(number), Err(InvalidToken(number)));
        }
        let last = FencingToken::new(TOKEN_MAX).expect("2^62 is legal");
        assert_eq!(last.checked_next(), None);
        assert_eq!(FencingToken::new(1).expect("1 is legal").checked_next(), FencingToken::new(2).ok());
    }

    #[test]
    fn names() {
        let long = "x".repeat(256);
        for (text, right) in [
            ("order/17", Ok(())),
            ("Straße 7", Ok(())),
            ("用户", Ok(())),
            ("", Err(InvalidName::Empty)),
            (&long[..255], Ok(())),
            (&long, Err(InvalidName::TooLong)),
            ("a\0b", Err(InvalidName::Character)),
            ("a\r\nb", Err(InvalidName::Character)),
            ("a\tb", Err(InvalidName::Character)),
            ("a\u{7f}b", Err(InvalidName::Character)),
            ("a\u{85}b", Err(InvalidName::Character)),
        ] {
            assert_eq!(check_name(text), right, "{text:?}");
        }
        assert_eq!(check_lane(""), Ok(()));
        for (id, right) in [
            ("a-b_C9", Ok(())),
            ("", Err(InvalidName::Empty)),
            ("a.b", Err(InvalidName::Character)),
            ("ä", Err(InvalidName::Character)),
            (&long[..64], Ok(())),
            (&long[..65], Err(InvalidName::TooLong)),
        ] {
            assert_eq!(check_id(id), right, "{id:?}");
        }
    }
}
