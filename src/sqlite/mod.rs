//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`) needs nothing but rusqlite. The dispatcher's side (`store`,
//! `writer`, `lock`, `wake`) and the operator's (`inspect`) come with the feature `dispatcher`.

#[cfg(feature = "dispatcher")]
mod facts;
#[cfg(feature = "dispatcher")]
pub mod inspect;
#[cfg(feature = "dispatcher")]
pub mod resolve;
mod schema;
mod worker;

pub use schema::{CONTRACT, SchemaError, migrate, prepare, verify};
pub use worker::*;
