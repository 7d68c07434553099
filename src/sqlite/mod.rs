//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`, `content`, `fenced`, `refused`) needs nothing but rusqlite and a
//! hash. The dispatcher's side (`facts`, `store`, `writer`, `lock`, `wake`,
//! `identity`) and the operator's
//! (`inspect`, `resolve`, `retention`, `copies`) come with the feature `dispatcher`.

mod content;
#[cfg(feature = "dispatcher")]
pub mod copies;
#[cfg(feature = "dispatcher")]
mod facts;
mod fenced;
#[cfg(feature = "dispatcher")]
mod identity;
#[cfg(feature = "dispatcher")]
pub mod inspect;
#[cfg(feature = "dispatcher")]
mod lock;
mod refused;
#[cfg(feature = "dispatcher")]
pub mod resolve;
#[cfg(feature = "dispatcher")]
pub mod retention;
mod schema;
#[cfg(feature = "dispatcher")]
mod store;
#[cfg(feature = "dispatcher")]
mod wake;
mod worker;
#[cfg(feature = "dispatcher")]
mod writer;

pub use fenced::Fenced;
#[cfg(feature = "dispatcher")]
pub use identity::IdentityError;
#[cfg(feature = "dispatcher")]
pub use lock::LockError;
pub use refused::{Refusal, WorkerError};
pub use schema::{
    CONTRACT, CONTRACT_MAJOR, CONTRACT_MINOR, ContractObject, Drift, Drifted, SchemaError, contract_objects,
    contract_statements, migrate, prepare, verify,
};
#[cfg(feature = "dispatcher")]
pub use store::{OpenError, OpenOptions, SqliteStore};
pub use worker::{
    Content, Enqueued, Held, Lease, NewCommand, Waiting, acquire, enqueue, fence, new_holder, release, renew, seal,
};
