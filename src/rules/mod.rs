//! The protocol: what is admitted, what may be begun, what an outcome means.
//!
//! Arguments in, values out. This module has no I/O, no clock and no randomness: times, jitter and
//! limits are parameters, and the types are small and comparable, so that the dispatcher, the tests
//! and a model checker run the very same functions. It must never import anything else of this
//! crate; `cargo check --no-default-features` builds it alone.

mod admission;
mod command;
mod dispatch;
mod names;
mod retry;
#[cfg(test)]
mod tests;
mod why;

pub use admission::{
    Admitted, Code, LEASE, LeaseRequest, MAX_JUMP_DEFAULT, OnTakeover, Request, ScopeFacts, ScopePolicy, TTL_MS_MAX,
    acquire, admit, admit_unknown, release, renew, seal,
};
pub use command::{
    Answer, CommandFacts, EffectState, Event, Fault, IllegalTransition, Outcome, Place, Reason, State, next,
};
pub use dispatch::{Candidate, FOUND_OPEN_MAX, Verdict, is_suspect, look};
pub use names::{FencingToken, InvalidName, InvalidToken, NAME_BYTES_MAX, TOKEN_MAX, check_id, check_lane, check_name};
pub use retry::{Backoff, Jitter, Limits, OnDead, OnUnknown, backoff_bound_ms, backoff_ms};
pub use why::{Because, Served, Standing, Then, Told, Tried, explain, then};
