//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`, `fenced`, `refused`) needs nothing but rusqlite. The
//! dispatcher's side (`facts`, `store`, `writer`, `lock`, `wake`) and the operator's (`inspect`,
//! `resolve`, `why`, `audit`, `doctor`) come with the feature `dispatcher`.

#[cfg(feature = "dispatcher")]
pub mod audit;
#[cfg(feature = "dispatcher")]
pub mod doctor;
#[cfg(feature = "dispatcher")]
mod facts;
mod fenced;
#[cfg(feature = "dispatcher")]
pub mod inspect;
#[cfg(feature = "dispatcher")]
mod lock;
#[cfg(feature = "dispatcher")]
mod proc;
mod refused;
#[cfg(feature = "dispatcher")]
pub mod resolve;
mod schema;
#[cfg(feature = "dispatcher")]
mod store;
#[cfg(feature = "dispatcher")]
mod wake;
#[cfg(feature = "dispatcher")]
pub mod why;
mod worker;
#[cfg(feature = "dispatcher")]
mod writer;

pub use fenced::Fenced;
#[cfg(feature = "dispatcher")]
pub use lock::LockError;
pub use refused::{Refusal, WorkerError};
pub use schema::{
    CONTRACT, CONTRACT_MAJOR, CONTRACT_MINOR, ContractObject, Drift, Drifted, SchemaError, contract_objects, migrate,
    prepare, verify,
};
#[cfg(feature = "dispatcher")]
pub use store::{OpenError, OpenOptions, SqliteStore};
pub use worker::{
    Content, Enqueued, Held, Lease, NewCommand, Waiting, acquire, enqueue, fence, new_holder, release, renew, seal,
};
