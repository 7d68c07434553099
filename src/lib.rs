//! Fencepost: a transactional-outbox dispatcher for side effects that cannot be fenced.
//!
//! A lease can run out while its holder is paused. A resource that compares fencing tokens refuses
//! what such a holder still sends; a mail relay or a payment API can't. So the worker sends nothing.
//! It writes a *command* into an outbox, in its own database transaction and stamped with its token.
//! The database refuses a stale token together with the whole transaction, and one dispatcher, which
//! is fenced itself, checks the order again and is the only one that sends.
//!
//! What is promised: commands of a lane are never sent out of token order, never after a newer one,
//! and never unknowingly twice; a committed command always ends in a state that can be seen. What is
//! not: an effect that happens once whatever breaks. Where nobody can know, the outcome is *unknown*,
//! and a policy decides ([`rules::OnUnknown`]).
//!
//! # Features
//!
//! | feature | what it builds | what it pulls in |
//! | --- | --- | --- |
//! | none | [`rules`]: the protocol as pure functions | thiserror |
//! | `sqlite` | the worker side: `sqlite::{migrate, acquire, Fenced, enqueue}` | rusqlite with its bundled SQLite, sha2, uuid |
//! | `dispatcher` (default) | the dispatcher, both senders, the daemon and the command line | tokio, reqwest, lettre, rustls, clap and more |
//! | `faults` | points at which a test can kill the process; never in a release | nothing |
//!
//! A worker written in Rust wants `default-features = false, features = ["sqlite"]`. A worker in any
//! other language uses plain SQL: `schema.sql` is a public contract with a version of its own.
//!
//! # A worker
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # fn worker() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use fencepost::sqlite::{self, Enqueued, Fenced, NewCommand};
//! use rusqlite::{Connection, TransactionBehavior};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("app.db");
//! let mut connection = Connection::open(path)?;
//! // WAL, synchronous=FULL and a busy timeout; once for each connection.
//! sqlite::prepare(&connection)?;
//! let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
//! transaction.execute_batch("CREATE TABLE orders(id INTEGER PRIMARY KEY, paid INTEGER NOT NULL)")?;
//! sqlite::migrate(&transaction)?;
//! // A holder is one acquisition. The lease is durable with the commit, and older holders are out.
//! let lease = sqlite::acquire(&transaction, "order/17", &sqlite::new_holder(), Duration::from_secs(30))?;
//! transaction.commit()?;
//!
//! // Fence first, business writes next, the command last.
//! let mut work = Fenced::begin(&mut connection, &lease.held())?;
//! work.sql()?.execute("INSERT INTO orders VALUES (17, 1)", [])?;
//! let enqueued = work.enqueue(&NewCommand::webhook("billing", r#"{"paid":17}"#).key("paid-17"))?;
//! // Durable from here on: the row and the command together, or neither.
//! work.commit()?;
//! assert!(matches!(enqueued, Enqueued::New { seq: 1, .. }));
//! # Ok(())
//! # }
//! # #[cfg(feature = "sqlite")]
//! # worker().expect("the example runs");
//! ```
//!
//! # A dispatcher
//!
//! Most applications run the daemon, `fencepost run`. To embed it, open a `sqlite::SqliteStore` (which
//! locks the database for the life of the process), name every `dispatcher::Destination`, and await
//! `dispatcher::run`. Anything that implements `effect::Effect` can be a destination, and
//! `effect::conformance` checks that it keeps its word. `examples/webhook.rs`, `examples/email.rs` and
//! `examples/custom_effect.rs` do this in full.
//!
//! # Conventions
//!
//! Times are integers in milliseconds since 1970 and end in `_ms`. The documentation of a function
//! says what is durable when it returns. A failed send is an [`rules::Outcome`], not an error; an
//! error means that our own work could not be done.
//!
//! The reasons behind the rules are in `docs/protocol.md`, the way through the code is in
//! `docs/architecture.md`.

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

/// The README's Rust code is a test.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../README.md")]
mod readme {}
