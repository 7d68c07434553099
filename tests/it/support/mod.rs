//! What tests stand on: scripted servers, processes, waiting for a condition.

pub mod daemon;
pub mod http;
pub mod postfix;
pub mod smtp;

use std::time::{Duration, Instant};

/// Polls until the condition holds; panics with `what` after `seconds`.
pub fn wait_until(what: &str, seconds: u64, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(seconds);
    while !condition() {
        assert!(Instant::now() < end, "not within {seconds} s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
