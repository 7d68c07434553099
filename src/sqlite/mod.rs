//! SQLite: the only place with SQLite's SQL.
//!
//! The worker side (`schema`, `worker`, `content`, `fenced`, `refused`, `events`) needs nothing but
//! rusqlite and a hash. The dispatcher's side (`facts`, `identity`, `lock`, `look`, `reader`, `store`, `wake`,
//! `writer`) and the operator's (the rest) come with the feature `dispatcher`.

#[cfg(feature = "dispatcher")]
pub mod audit;
mod content;
#[cfg(feature = "dispatcher")]
pub mod copies;
#[cfg(feature = "dispatcher")]
pub mod doctor;
mod events;
#[cfg(feature = "dispatcher")]
mod facts;
mod fenced;
#[cfg(feature = "dispatcher")]
mod identity;
#[cfg(feature = "dispatcher")]
pub mod inspect;
#[cfg(feature = "dispatcher")]
mod lock;
#[cfg(feature = "dispatcher")]
mod look;
#[cfg(feature = "dispatcher")]
pub mod operator;
#[cfg(feature = "dispatcher")]
pub mod pause;
#[cfg(feature = "dispatcher")]
mod proc;
#[cfg(feature = "dispatcher")]
mod reader;
mod refused;
#[cfg(feature = "dispatcher")]
pub mod resolve;
#[cfg(feature = "dispatcher")]
pub mod retention;
mod schema;
#[cfg(feature = "dispatcher")]
pub mod scopes;
#[cfg(feature = "dispatcher")]
mod store;
#[cfg(feature = "dispatcher")]
mod wake;
#[cfg(feature = "dispatcher")]
pub mod why;
mod worker;
#[cfg(feature = "dispatcher")]
mod writer;

pub use events::{OutcomeEvent, events};
pub use fenced::Fenced;
#[cfg(feature = "dispatcher")]
pub use identity::IdentityError;
#[cfg(feature = "dispatcher")]
pub use lock::LockError;
pub use refused::{Refusal, Standing, WorkerError};
pub use schema::{
    CONTRACT, CONTRACT_MAJOR, CONTRACT_MINOR, ContractObject, Drift, Drifted, SchemaError, contract_objects,
    contract_statements, migrate, prepare, verify,
};
#[cfg(feature = "dispatcher")]
pub use store::{OpenError, OpenOptions, SqliteStore};
pub use worker::{
    Content, Enqueued, Held, Lease, NewCommand, Waiting, acquire, adopt, cancel, discard, enqueue, fence, new_holder,
    reissue, release, renew, seal,
};
