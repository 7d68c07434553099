//! The only reader of time.
//!
//! Everything else takes times as arguments, so that tests and models can set them. `clippy.toml`
//! forbids reading a clock anywhere else under `src`.

use std::time::{SystemTime, UNIX_EPOCH};

/// The wall clock, in milliseconds since 1970; 0 if it stands before that.
#[expect(clippy::disallowed_methods, reason = "this is the place where time is read")]
pub fn wall_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
