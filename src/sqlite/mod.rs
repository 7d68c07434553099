//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`, `fenced`, `refused`) needs nothing but rusqlite. The
//! dispatcher's side (`facts`, `store`, `writer`, `lock`, `wake`) and the operator's (`inspect`,
//! `resolve`) come with the feature `dispatcher`.

#[cfg(feature = "dispatcher")]
mod facts;
mod fenced;
#[cfg(feature = "dispatcher")]
pub mod inspect;
mod refused;
#[cfg(feature = "dispatcher")]
pub mod resolve;
mod schema;
mod worker;

pub use fenced::Fenced;
pub use refused::{Refusal, WorkerError};
pub use schema::{
    CONTRACT, CONTRACT_MAJOR, CONTRACT_MINOR, ContractObject, Drift, Drifted, SchemaError, contract_objects, migrate,
    prepare, verify,
};
pub use worker::{
    Content, Enqueued, Held, Lease, NewCommand, Waiting, acquire, enqueue, fence, new_holder, release, renew, seal,
};
