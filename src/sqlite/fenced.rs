//! A transaction that can't outlive a refusal.
//!
//! A refusal of the contract rolls the transaction back and leaves the connection in autocommit, where
//! whatever is sent next commits by itself. Code that passes over the error would go on as if nothing
//! had happened. This guard must never lend the connection, nor commit, once that has happened.

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::refused::WorkerError;
use super::worker::{self, Enqueued, Held, NewCommand, enqueue, fence};

/// A transaction under a token: fenced first, command last, and never continued after a refusal.
///
/// Two things it can't see. A reference kept from [`Fenced::sql`] goes on working after a refusal that
/// came through that same reference, so ask `sql()` anew for every statement. And a value of the wrong
/// type in plain SQL is refused by the table in SQLite's own words, without a rollback: passed over,
/// the rest of the transaction can commit without that command. [`Fenced::enqueue`] has neither gap.
#[derive(Debug)]
pub struct Fenced<'a> {
    transaction: Transaction<'a>,
    held: Held<'a>,
    failed: bool,
}

impl<'a> Fenced<'a> {
    /// Opens BEGIN IMMEDIATE and fences. When this returns, the write lock is ours, and no newer holder
    /// can come in before the commit. Fails like [`fence`], and with [`WorkerError::Locked`] if another
    /// connection keeps the write lock longer than the busy timeout.
    pub fn begin(connection: &'a mut Connection, held: &Held<'a>) -> Result<Self, WorkerError> {
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(WorkerError::database)?;
        // The savepoint is the mark of this very transaction: another one, begun by hand after a
        // refusal, doesn't have it.
        transaction.execute_batch("SAVEPOINT outbox_fenced").map_err(WorkerError::database)?;
        fence(&transaction, held)?;
        Ok(Self { transaction, held: *held, failed: false })
    }

    /// The connection, for the business writes. Fails with [`WorkerError::Left`] once anything was
    /// refused or the connection left its transaction.
    pub fn sql(&self) -> Result<&Connection, WorkerError> {
        if self.is_left() { Err(WorkerError::Left) } else { Ok(&self.transaction) }
    }

    /// Writes a command, like [`enqueue`]. After any error the transaction is over.
    pub fn enqueue(&mut self, command: &NewCommand<'_>) -> Result<Enqueued, WorkerError> {
        self.then(|transaction, held| enqueue(transaction, held, command))
    }

    /// Ends a command that waits, or that was begun and may not send yet, like [`worker::cancel`].
    pub fn cancel(&mut self, id: &str) -> Result<(), WorkerError> {
        self.then(|transaction, held| worker::cancel(transaction, held, id))
    }

    /// Sends a parked command after all, like [`worker::adopt`].
    pub fn adopt(&mut self, id: &str) -> Result<(), WorkerError> {
        self.then(|transaction, held| worker::adopt(transaction, held, id))
    }

    /// Ends a parked command, like [`worker::discard`].
    pub fn discard(&mut self, id: &str) -> Result<(), WorkerError> {
        self.then(|transaction, held| worker::discard(transaction, held, id))
    }

    /// Makes a new command from a finished one, like [`worker::reissue`].
    pub fn reissue(&mut self, id: &str, new_id: Option<&str>) -> Result<Enqueued, WorkerError> {
        self.then(|transaction, held| worker::reissue(transaction, held, id, new_id))
    }

    /// One verb, unless the transaction is over; after any error it is.
    fn then<T>(
        &mut self,
        verb: impl FnOnce(&Transaction<'_>, &Held<'_>) -> Result<T, WorkerError>,
    ) -> Result<T, WorkerError> {
        if self.is_left() {
            return Err(WorkerError::Left);
        }
        let done = verb(&self.transaction, &self.held);
        self.failed = done.is_err();
        done
    }

    /// Commits. Fails with [`WorkerError::Left`], and keeps nothing of the transaction, if a refusal was
    /// passed over or the transaction was ended by hand. When it returns, business writes and commands
    /// are durable together.
    pub fn commit(self) -> Result<(), WorkerError> {
        let ours = !self.is_left() && self.transaction.execute_batch("RELEASE outbox_fenced").is_ok();
        if !ours {
            return Err(WorkerError::Left);
        }
        self.transaction.commit().map_err(WorkerError::database)
    }

    /// Undoes everything, as dropping does.
    pub fn rollback(self) -> Result<(), WorkerError> {
        if self.transaction.is_autocommit() {
            return Ok(());
        }
        self.transaction.rollback().map_err(WorkerError::database)
    }

    fn is_left(&self) -> bool {
        self.failed || self.transaction.is_autocommit()
    }
}
