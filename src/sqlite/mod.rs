//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`) needs nothing but rusqlite. The dispatcher's side (`store`,
//! `writer`, `lock`, `wake`) and the operator's (`inspect`) come with the feature `dispatcher`.

#[cfg(feature = "dispatcher")]
mod facts;
#[cfg(feature = "dispatcher")]
mod lock;
mod schema;
#[cfg(feature = "dispatcher")]
mod store;
#[cfg(feature = "dispatcher")]
mod wake;
mod worker;
#[cfg(feature = "dispatcher")]
mod writer;

#[cfg(feature = "dispatcher")]
pub use lock::LockError;
pub use schema::{CONTRACT, SchemaError, migrate, prepare, verify};
#[cfg(feature = "dispatcher")]
pub use store::{OpenError, OpenOptions, SqliteStore};
pub use worker::*;
