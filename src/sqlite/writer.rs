//! The one thread that writes: it owns a connection, and verbs that wait together share a commit.
//!
//! Each verb runs in a savepoint of its own, so that a guard that refuses one undoes that one alone. A
//! batch whose transaction fails as a whole has changed nothing, and every verb in it hears so. The
//! same thread looks whether somebody else has committed: on another connection it would see its own
//! commits and wake itself.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{Notify, oneshot, watch};

use super::identity;
use super::lock::{Seen, Witness};
use crate::rules::Code;
use crate::store::StoreError;

/// Verbs that share a commit at the most.
const BATCH_MAX: usize = 256;

/// After a hint: so many looks 100 µs apart, then as many 1 ms apart. The hint comes at write(), and the
/// commit shows after its fsync.
const LOOKS: u32 = 50;

/// Why one verb failed.
#[derive(Debug)]
pub(crate) enum VerbError {
    /// SQLite said no.
    Sqlite(rusqlite::Error),
    /// The verb found the store unusable.
    Store(StoreError),
}

impl From<rusqlite::Error> for VerbError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// What verbs run on: the connection and, once there is one, the epoch.
type Verb = Box<dyn FnMut(&Connection) -> Result<(), VerbError> + Send>;

enum Order {
    /// Run this in a batch.
    Run { verb: Verb, done: Box<dyn FnOnce(Result<(), StoreError>) + Send> },
    /// The WAL was written: look fast for a while.
    Hint,
    /// From now on every batch checks that this epoch is current.
    Reign(i64),
}

/// The handle of the writer thread. The thread ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    orders: Sender<Order>,
    changed: Arc<Notify>,
    failure: watch::Receiver<Option<StoreError>>,
}

impl Writer {
    /// Starts the thread. `poll_interval` bounds how long a commit of somebody else stays unseen.
    pub(crate) fn start(
        connection: Connection,
        poll_interval: Duration,
        check: SchemaCheck,
        witness: Witness,
    ) -> std::io::Result<Self> {
        let (orders, receiver) = channel();
        let (failure_sender, failure) = watch::channel(None);
        let changed = Arc::new(Notify::new());
        let thread = Thread {
            connection,
            receiver,
            changed: Arc::clone(&changed),
            failure: failure_sender,
            poll_interval,
            data_version: 0,
            schema_version: 0,
            check,
            witness,
            epoch: None,
            fast_looks: 0,
        };
        std::thread::Builder::new().name("fencepost-writer".to_owned()).spawn(move || thread.run())?;
        Ok(Self { orders, changed, failure })
    }

    /// Submits a verb; the future resolves when its batch is durable or has failed. The verb may run
    /// more than once, so it must start from nothing each time.
    pub(crate) fn submit<T: Send + 'static>(
        &self,
        mut verb: impl FnMut(&Connection) -> Result<T, VerbError> + Send + 'static,
    ) -> impl Future<Output = Result<T, StoreError>> + Send + 'static {
        let (sender, receiver) = oneshot::channel();
        let slot = Arc::new(Mutex::new(None));
        let result = Arc::clone(&slot);
        let run = move |connection: &Connection| {
            let value = verb(connection)?;
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
            Ok(())
        };
        let done = move |outcome: Result<(), StoreError>| {
            let value = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            let answer = outcome.and_then(|()| value.ok_or_else(gone));
            // The caller may have stopped waiting; its verb counts all the same.
            drop(sender.send(answer));
        };
        let sent = self.orders.send(Order::Run { verb: Box::new(run), done: Box::new(done) });
        let failure = self.failure.clone();
        async move {
            let failed = || failure.borrow().clone().unwrap_or_else(gone);
            if sent.is_err() {
                return Err(failed());
            }
            receiver.await.unwrap_or_else(|_| Err(failed()))
        }
    }

    /// Every later batch is conditional on this epoch.
    pub(crate) fn reign(&self, epoch: i64) {
        // A thread that is gone has left its failure behind; the next verb reports it.
        drop(self.orders.send(Order::Reign(epoch)));
    }

    /// The WAL was written by somebody.
    pub(crate) fn hint(&self) -> bool {
        self.orders.send(Order::Hint).is_ok()
    }

    /// Resolves when somebody else has committed since the last call.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Resolves when the store can't be used any more.
    pub(crate) async fn failed(&self) -> StoreError {
        let mut failure = self.failure.clone();
        match failure.wait_for(Option::is_some).await {
            Ok(error) => error.clone().unwrap_or_else(gone),
            Err(_) => gone(),
        }
    }
}

fn gone() -> StoreError {
    StoreError::Broken("the writer thread is gone".to_owned())
}

/// Compares the contract's objects; called when the schema moved.
pub(crate) type SchemaCheck = fn(&Connection) -> Result<(), String>;

struct Thread {
    connection: Connection,
    receiver: Receiver<Order>,
    changed: Arc<Notify>,
    failure: watch::Sender<Option<StoreError>>,
    poll_interval: Duration,
    data_version: i64,
    schema_version: i64,
    check: SchemaCheck,
    witness: Witness,
    epoch: Option<i64>,
    fast_looks: u32,
}

/// What came of each verb of a batch.
type Results = Vec<Result<(), StoreError>>;

type Waiting = (Verb, Box<dyn FnOnce(Result<(), StoreError>) + Send>);

impl Thread {
    fn run(mut self) {
        let end = self.serve();
        if let Err(error) = end {
            tracing::error!(%error, "the dispatcher stops");
            self.failure.send_replace(Some(error));
        }
    }

    fn serve(&mut self) -> Result<(), StoreError> {
        self.look()?;
        loop {
            let wait = match self.fast_looks {
                0 => self.poll_interval,
                1..=LOOKS => Duration::from_millis(1),
                _ => Duration::from_micros(100),
            };
            let mut batch = Vec::new();
            match self.receiver.recv_timeout(wait) {
                Ok(order) => self.take(order, &mut batch),
                Err(RecvTimeoutError::Timeout) => self.fast_looks = self.fast_looks.saturating_sub(1),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            while batch.len() < BATCH_MAX {
                let Ok(order) = self.receiver.try_recv() else { break };
                self.take(order, &mut batch);
            }
            if !batch.is_empty() {
                self.commit(batch)?;
            }
            self.look()?;
        }
    }

    fn take(&mut self, order: Order, batch: &mut Vec<Waiting>) {
        match order {
            Order::Run { verb, done } => batch.push((verb, done)),
            Order::Hint => self.fast_looks = 2 * LOOKS,
            Order::Reign(epoch) => self.epoch = Some(epoch),
        }
    }

    /// Looks whether somebody else has committed, and whether the schema is still ours.
    fn look(&mut self) -> Result<(), StoreError> {
        let pragma = |name| self.connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let data_version = match pragma("data_version") {
            Ok(version) => version,
            Err(error) => return after_failure(&error).map_or(Ok(()), Err),
        };
        if data_version == self.data_version {
            return Ok(());
        }
        self.data_version = data_version;
        self.fast_looks = 0;
        self.changed.notify_one();
        let schema_version = match pragma("schema_version") {
            Ok(version) => version,
            Err(error) => return after_failure(&error).map_or(Ok(()), Err),
        };
        if schema_version != self.schema_version {
            (self.check)(&self.connection).map_err(StoreError::Broken)?;
            self.schema_version = schema_version;
        }
        Ok(())
    }

    /// Runs a batch in one transaction. Fails only where the thread must end.
    fn commit(&mut self, mut batch: Vec<Waiting>) -> Result<(), StoreError> {
        let outcome = self.transaction(&mut batch);
        let end = match &outcome {
            Err(error @ (StoreError::Deposed { .. } | StoreError::Broken(_))) => Some(error.clone()),
            Ok(_) | Err(StoreError::Unavailable(_) | StoreError::Refused(_)) => None,
        };
        match outcome {
            Ok(results) => batch.into_iter().zip(results).for_each(|((_, done), result)| done(result)),
            Err(error) => batch.into_iter().for_each(|(_, done)| done(Err(error.clone()))),
        }
        end.map_or(Ok(()), Err)
    }

    fn transaction(&mut self, batch: &mut [Waiting]) -> Result<Results, StoreError> {
        let mut refused = vec![None; batch.len()];
        loop {
            // Without a result a trigger rolled the whole transaction back: the others begin anew without
            // that verb.
            if let Some((results, seen)) = self.try_transaction(batch, &mut refused)? {
                // After the commit, so that it is never ahead of what is durable.
                if let Err(error) = self.witness.note(seen) {
                    tracing::warn!(%error, "the lock file can't be written: an old copy of the database would not be noticed");
                }
                return Ok(results);
            }
        }
    }

    /// `None` if a verb was refused in a way that ended the transaction; `refused` then has it.
    fn try_transaction(
        &self,
        batch: &mut [Waiting],
        refused: &mut [Option<Code>],
    ) -> Result<Option<(Results, Seen)>, StoreError> {
        self.connection.execute_batch("BEGIN IMMEDIATE").map_err(|error| store_error(&error))?;
        let results = self.verbs(batch, refused);
        let results = results.and_then(|results| results.map(|results| Ok((results, self.seen()?))).transpose());
        let ended = match &results {
            Ok(Some(_)) => self.connection.execute_batch("COMMIT").map_err(|error| store_error(&error)),
            Ok(None) | Err(_) => Ok(()),
        };
        if !self.connection.is_autocommit() {
            // A failed ROLLBACK leaves the transaction open, and the next BEGIN says so.
            drop(self.connection.execute_batch("ROLLBACK"));
        }
        ended.and(results)
    }

    fn seen(&self) -> Result<Seen, StoreError> {
        identity::seen(&self.connection).map_err(|error| store_error(&error))
    }

    fn verbs(&self, batch: &mut [Waiting], refused: &mut [Option<Code>]) -> Result<Option<Results>, StoreError> {
        self.check_epoch()?;
        let mut results = Vec::with_capacity(batch.len());
        for ((verb, _), refused) in batch.iter_mut().zip(refused) {
            if let Some(code) = refused {
                results.push(Err(StoreError::Refused(*code)));
                continue;
            }
            match self.verb(verb)? {
                Err(StoreError::Refused(code)) if self.connection.is_autocommit() => {
                    *refused = Some(code);
                    return Ok(None);
                }
                result => results.push(result),
            }
        }
        Ok(Some(results))
    }

    /// One verb in its savepoint. The inner result is the verb's own; the outer one ends the batch.
    fn verb(&self, verb: &mut Verb) -> Result<Result<(), StoreError>, StoreError> {
        let sql = |text: &str| -> Result<(), StoreError> {
            let mut statement = self.connection.prepare_cached(text).map_err(|error| store_error(&error))?;
            statement.execute([]).map(drop).map_err(|error| store_error(&error))
        };
        sql("SAVEPOINT verb")?;
        let result = verb(&self.connection).map_err(|error| match error {
            VerbError::Sqlite(error) => store_error(&error),
            VerbError::Store(error) => error,
        });
        match result {
            Ok(()) => sql("RELEASE verb").map(Ok),
            Err(StoreError::Refused(code)) if self.connection.is_autocommit() => Ok(Err(StoreError::Refused(code))),
            Err(StoreError::Refused(code)) => {
                sql("ROLLBACK TO verb")?;
                sql("RELEASE verb").map(|()| Err(StoreError::Refused(code)))
            }
            Err(error) => Err(error),
        }
    }

    fn check_epoch(&self) -> Result<(), StoreError> {
        let Some(ours) = self.epoch.filter(|_| !crate::faults::is_broken("epoch")) else { return Ok(()) };
        let current = self
            .connection
            .prepare_cached(
                "SELECT d.epoch, m.major FROM outbox_dispatcher d JOIN outbox_meta m ON m.one = d.one WHERE d.one = 1",
            )
            .and_then(|mut statement| statement.query_row([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))))
            .map_err(|error| store_error(&error))?;
        match current {
            (_, major) if major != super::schema::CONTRACT_MAJOR => {
                Err(StoreError::Broken(format!("the outbox contract is of major version {major} now")))
            }
            (current, _) if current != ours => Err(StoreError::Deposed { ours, current }),
            (_, _) => Ok(()),
        }
    }
}

/// The error of a mere look: busy is nothing, the rest is as bad as anywhere.
fn after_failure(error: &rusqlite::Error) -> Option<StoreError> {
    match store_error(error) {
        error @ (StoreError::Broken(_) | StoreError::Deposed { .. }) => Some(error),
        StoreError::Unavailable(_) | StoreError::Refused(_) => None,
    }
}

/// What an error of SQLite means for us. Anything that is not known to be harmless ends the process:
/// a failed fsync is never tried again, since the kernel may have dropped the pages.
pub(crate) fn store_error(error: &rusqlite::Error) -> StoreError {
    let text = error.to_string();
    if let Some(code) = Code::find(&text) {
        return StoreError::Refused(code);
    }
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::DiskFull) => {
            StoreError::Unavailable(text)
        }
        _ => StoreError::Broken(text),
    }
}
