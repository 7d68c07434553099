//! Fencepost: a transactional-outbox dispatcher for side effects that cannot be fenced.

#[cfg(feature = "dispatcher")]
pub mod clock;
#[cfg(feature = "dispatcher")]
pub mod config;
#[cfg(feature = "dispatcher")]
pub mod dispatcher;
#[cfg(feature = "dispatcher")]
pub mod effect;
#[cfg(feature = "dispatcher")]
pub mod email;
#[cfg(feature = "dispatcher")]
mod faults;
#[cfg(feature = "dispatcher")]
pub mod redact;
pub mod rules;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "dispatcher")]
pub mod store;
#[cfg(feature = "dispatcher")]
mod tls;
#[cfg(feature = "dispatcher")]
pub mod webhook;
