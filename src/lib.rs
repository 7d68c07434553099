//! Fencepost: a transactional-outbox dispatcher for side effects that cannot be fenced.

#[cfg(feature = "dispatcher")]
pub mod effect;
#[cfg(feature = "dispatcher")]
pub mod email;
pub mod rules;
#[cfg(feature = "dispatcher")]
mod tls;
#[cfg(feature = "dispatcher")]
pub mod webhook;
