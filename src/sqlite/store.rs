//! The dispatcher's store on SQLite: loads facts, lets the rules decide, writes.
//!
//! One writer thread does every write; one reader thread does the looks, each in a short read of its
//! own, so that no read transaction ever stands open. The lock comes before the first connection.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, named_params, params};

use super::identity::IdentityError;
use super::lock::{DispatcherLock, LockError, host};
use super::look::{self, text_lossy};
use super::reader::Reader;
use super::schema::{self, SchemaError};
use super::writer::{VerbError, Writer};
use super::{facts, identity};
use crate::rules::{self, CommandFacts, Event, Limits, Outcome, State, Verdict, next};
use crate::store::{
    Begin, Begun, Due, LimitsOf, Recovered, Reign, Route, Settle, Settled, Store, StoreError, Waiting, sealed,
};

/// SQLite from 3.7.0 to 3.51.2 can corrupt a WAL that two connections write and reset at once.
pub(super) const WAL_RESET_FIXED: i32 = 3_051_003;

/// Due times that were computed so far in the future tell that the clock was set back.
pub(super) const CLOCK_SLACK_MS: i64 = 5_000;

/// How a store is opened.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// How long a write waits for another process's transaction.
    pub busy_timeout: Duration,
    /// How long a commit of another process may stay unseen where notifications don't work.
    pub poll_interval: Duration,
    /// Who says that the file that the database was dispatched from is gone, so that this copy takes its
    /// place; `None`: a copy with live commands is refused.
    pub moved: Option<String>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { busy_timeout: Duration::from_secs(5), poll_interval: Duration::from_millis(250), moved: None }
    }
}

/// Why a store can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The lock.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The contract.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The database is not the one that was dispatched from.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// This process runs with a SQLite that can corrupt the file.
    #[error("SQLite {0} can corrupt a database in WAL mode; 3.51.3 is the first without that bug")]
    Library(&'static str),
    /// A thread could not be started.
    #[error("can't start a thread")]
    Thread(#[source] std::io::Error),
}

impl From<rusqlite::Error> for OpenError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Schema(error.into())
    }
}

/// An outbox in a SQLite database, locked for this process until it ends.
#[derive(Debug)]
pub struct SqliteStore {
    lock: DispatcherLock,
    writer: Writer,
    reader: Reader,
    wal: Wal,
    poll_interval: Duration,
}

impl SqliteStore {
    /// Locks and opens the database. An older contract of the same major version is upgraded.
    ///
    /// Fails with [`LockError::Held`] while another dispatcher runs. Nothing is written then.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self, OpenError> {
        Self::open_locked(DispatcherLock::acquire(path)?, options)
    }

    /// Waits for the lock, looking every 100 ms until `give_up` says so, and opens the database. Blocks.
    pub fn wait_and_open(path: &Path, options: &OpenOptions, give_up: &dyn Fn() -> bool) -> Result<Self, OpenError> {
        Self::open_locked(DispatcherLock::wait(path, give_up)?, options)
    }

    fn open_locked(lock: DispatcherLock, options: &OpenOptions) -> Result<Self, OpenError> {
        if rusqlite::version_number() < WAL_RESET_FIXED {
            return Err(OpenError::Library(rusqlite::version()));
        }
        let mut connection = Connection::open_with_flags(lock.path(), OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        set_busy(&mut connection, options.busy_timeout)?;
        identity::check_pages(&connection)?;
        // Nothing is written into a database that has no outbox, or somebody else's.
        match schema::verify(&connection) {
            Ok(()) | Err(SchemaError::Older { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        schema::prepare(&connection)?;
        set_busy(&mut connection, options.busy_timeout)?;
        let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        schema::migrate(&transaction)?;
        // A refusal undoes the upgrade too.
        let new = identity::claim(&transaction, &lock, options.moved.as_deref())?;
        transaction.commit()?;
        if new {
            identity::checkpoint(&connection)?;
        }
        schema::verify(&connection)?;
        connection.set_prepared_statement_cache_capacity(64);
        let reader = Reader::start(lock.path().to_owned())?;
        let check = |connection: &Connection| schema::verify(connection).map_err(|error| error.to_string());
        let witness = lock.witness().map_err(OpenError::Thread)?;
        let writer = Writer::start(connection, options.poll_interval, check, witness).map_err(OpenError::Thread)?;
        super::wake::start(lock.path(), writer.clone()).map_err(OpenError::Thread)?;
        let wal = Wal::beside(lock.path());
        Ok(Self { lock, writer, reader, wal, poll_interval: options.poll_interval })
    }
}

/// The file with the newest commits. While a connection is open nobody may remove it: others would start
/// a new one, and neither side would see the other's commits.
#[derive(Debug)]
struct Wal {
    path: PathBuf,
    first_seen: OnceLock<(u64, u64)>,
}

impl Wal {
    fn beside(database: &Path) -> Self {
        let mut name = database.to_owned().into_os_string();
        name.push("-wal");
        Self { path: name.into(), first_seen: OnceLock::new() }
    }

    fn is_same(&self) -> Result<(), String> {
        let now = std::fs::metadata(&self.path).ok().map(|wal| (wal.dev(), wal.ino()));
        match (self.first_seen.get(), now) {
            (Some(first), Some(now)) if *first == now => Ok(()),
            (None, Some(now)) => {
                // Somebody else can only have set the same.
                let _ = self.first_seen.set(now);
                Ok(())
            }
            (None, None) => Ok(()),
            (Some(_), _) => Err(format!("{} was removed or replaced while the database was open", self.path.display())),
        }
    }
}

/// Opens a locked database for a single write of an operator, as the dispatcher would.
pub(super) fn open_for_one_write(lock: &DispatcherLock) -> Result<Connection, OpenError> {
    let connection = Connection::open_with_flags(lock.path(), OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    connection.busy_timeout(Duration::from_secs(5))?;
    identity::check_pages(&connection)?;
    match schema::verify(&connection) {
        Ok(()) | Err(SchemaError::Older { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    schema::prepare(&connection)?;
    Ok(connection)
}

/// SQLite's own handler sleeps up to 100 ms at a time and starves a writer among busy ones; short even
/// sleeps don't. 200 µs each, so the count is the time.
fn set_busy(connection: &mut Connection, timeout: Duration) -> rusqlite::Result<()> {
    // The handler is a plain function, so the timeout of this process stands in a static.
    let looks = i32::try_from(timeout.as_micros() / 200).unwrap_or(i32::MAX);
    BUSY_LOOKS.store(looks, std::sync::atomic::Ordering::Relaxed);
    connection.busy_handler(Some(|tried| {
        std::thread::sleep(Duration::from_micros(200));
        tried < BUSY_LOOKS.load(std::sync::atomic::Ordering::Relaxed)
    }))
}

static BUSY_LOOKS: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(25_000);

impl sealed::Sealed for SqliteStore {}

impl Store for SqliteStore {
    async fn reign(&self, now_ms: i64, limits_of: LimitsOf) -> Result<Reign, StoreError> {
        let reign = self.writer.submit(move |connection| reign(connection, now_ms, &limits_of)).await?;
        self.writer.reign(reign.epoch);
        Ok(reign)
    }

    async fn outlook(&self, now_ms: i64) -> Result<Vec<Waiting>, StoreError> {
        self.reader.read(move |connection| look::outlook(connection, now_ms)).await
    }

    async fn due(
        &self,
        route: &Route,
        suspects: bool,
        now_ms: i64,
        steady: bool,
        limit: usize,
    ) -> Result<Vec<Due>, StoreError> {
        let route = route.clone();
        self.reader.read(move |connection| look::due(connection, &route, suspects, now_ms, steady, limit)).await
    }

    async fn has_suspects(&self) -> Result<bool, StoreError> {
        self.reader.read(look::has_suspects).await
    }

    fn begin(&self, ask: Begin) -> impl Future<Output = Result<Begun, StoreError>> + Send + 'static {
        self.writer.submit(move |connection| begin(connection, &ask))
    }

    fn arm(
        &self,
        n: i64,
        attempt_no: u32,
        now_ms: i64,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send + 'static {
        self.writer.submit(move |connection| {
            let changed = connection.prepare_cached(ARM)?.execute(params![n, attempt_no, now_ms])?;
            Ok(changed == 1)
        })
    }

    fn settle(&self, ask: Settle) -> impl Future<Output = Result<Option<Settled>, StoreError>> + Send + 'static {
        self.writer.submit(move |connection| settle(connection, &ask))
    }

    fn end(
        &self,
        n: i64,
        event: Event,
        why: &str,
        now_ms: i64,
    ) -> impl Future<Output = Result<Option<Settled>, StoreError>> + Send + 'static {
        let why = why.to_owned();
        self.writer.submit(move |connection| {
            let Some(facts) = facts::load(connection, n).optional()? else { return Ok(None) };
            // No limit and no chance enters into an end without an attempt.
            let Ok(after) = next(&facts, event, &facts::place(connection, n, &Limits::NONE, now_ms, 0)?) else {
                return Ok(None);
            };
            facts::store(connection, n, &after, now_ms)?;
            connection.prepare_cached("UPDATE outbox_state SET why = ?2 WHERE n = ?1")?.execute(params![n, why])?;
            Ok(Some(settled(&after)))
        })
    }

    async fn clock_set_back(&self, now_ms: i64) -> Result<usize, StoreError> {
        let verb = move |connection: &Connection| Ok(connection.execute(SET_BACK, params![now_ms, CLOCK_SLACK_MS])?);
        self.writer.submit(verb).await
    }

    async fn changed(&self) {
        // A lost notification costs one poll interval, never a command.
        let _elapsed =
            tokio::time::timeout(self.poll_interval.max(Duration::from_millis(10)), self.writer.changed()).await;
    }

    async fn failed(&self) -> StoreError {
        self.writer.failed().await
    }

    fn is_same(&self) -> Result<(), StoreError> {
        self.lock.is_same().map_err(|error| StoreError::Broken(error.to_string()))?;
        self.wal.is_same().map_err(StoreError::Broken)
    }
}

fn settled(facts: &CommandFacts) -> Settled {
    Settled {
        state: facts.state.as_str(),
        reason: facts.state.reason().map(rules::Reason::as_str),
        due_ms: (facts.state == State::Pending).then_some(facts.due_ms),
    }
}

const BEGUN: &str = "UPDATE outbox_lane SET begun_era = :era, begun_token = :token, begun_seq = :seq
    WHERE head_n = :n AND (scope, lane) = (SELECT scope, lane FROM outbox_state WHERE n = :n)";
const ATTEMPT: &str = "INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, armed_ms)
    SELECT :n, :attempt_no, epoch, :on_unknown, :now_ms, CASE WHEN :armed THEN :now_ms END FROM outbox_dispatcher WHERE one = 1";
const ARM: &str = "UPDATE outbox_attempt SET armed_ms = ?3 WHERE n = ?1 AND attempt_no = ?2 AND armed_ms IS NULL
    AND settled_ms IS NULL AND epoch = (SELECT epoch FROM outbox_dispatcher)
    AND EXISTS (SELECT 1 FROM outbox_state WHERE n = ?1 AND attempt_no = ?2 AND state = 'sending')";
const SETTLE: &str = "UPDATE outbox_attempt SET settled_ms = :now_ms, outcome = :outcome, evidence = :evidence
    WHERE n = :n AND attempt_no = :attempt_no AND settled_ms IS NULL AND epoch = (SELECT epoch FROM outbox_dispatcher)
    AND EXISTS (SELECT 1 FROM outbox_state WHERE n = :n AND attempt_no = :attempt_no AND state = 'sending')";
const SET_BACK: &str = "UPDATE outbox_state SET set_ms = ?1,
        due_ms = max(?1, coalesce((SELECT not_before_ms FROM outbox o WHERE o.n = outbox_state.n), 0))
    WHERE state IN ('pending', 'sending', 'in_doubt', 'parked') AND state = 'pending' AND set_ms > ?1 + ?2";

fn begin(connection: &Connection, ask: &Begin) -> Result<Begun, VerbError> {
    // Between the look and now it may have ended and been pruned.
    let Some(candidate) = look::candidate(connection, ask.n, ask.now_ms).optional()? else {
        return Ok(Begun::NotNow(Verdict::NotPending));
    };
    let verdict = rules::look(&candidate, ask.now_ms, ask.steady);
    if verdict != Verdict::Begin {
        return Ok(Begun::NotNow(verdict));
    }
    let before = facts::load(connection, ask.n)?;
    let after =
        next(&before, Event::Begin, &facts::place(connection, ask.n, &ask.limits, ask.now_ms, 0)?).map_err(damaged)?;
    let armed = matches!(after.state, State::Sending { armed: true, .. });
    facts::store(connection, ask.n, &after, ask.now_ms)?;
    let (era, token, seq) = candidate.order;
    let moved = connection
        .prepare_cached(BEGUN)?
        .execute(named_params! { ":n": ask.n, ":era": era, ":token": token, ":seq": seq })?;
    if moved != 1 {
        return Err(damaged("the lane row has another head"));
    }
    connection.prepare_cached("UPDATE outbox_dispatcher SET attempts = attempts + 1 WHERE one = 1")?.execute([])?;
    connection.prepare_cached(ATTEMPT)?.execute(named_params! {
        ":n": ask.n, ":attempt_no": after.attempt_no, ":on_unknown": ask.limits.on_unknown.as_str(),
        ":now_ms": ask.now_ms, ":armed": armed,
    })?;
    Ok(Begun::Attempt { attempt_no: after.attempt_no, armed })
}

fn settle(connection: &Connection, ask: &Settle) -> Result<Option<Settled>, VerbError> {
    // A recalled attempt may outlive its command, which can be pruned meanwhile.
    let Some(before) = facts::load(connection, ask.n).optional()? else { return Ok(None) };
    let Some(outcome) = ask.event.outcome() else { return Err(damaged("an event that ends no attempt")) };
    let closed = connection.prepare_cached(SETTLE)?.execute(named_params! {
        ":n": ask.n, ":attempt_no": ask.attempt_no, ":now_ms": ask.now_ms, ":outcome": outcome.as_str(),
        ":evidence": ask.evidence,
    })?;
    if closed == 0 {
        return Ok(None);
    }
    let after = next(&before, ask.event, &facts::place(connection, ask.n, &ask.limits, ask.now_ms, ask.jitter)?)
        .map_err(damaged)?;
    facts::store(connection, ask.n, &after, ask.now_ms)?;
    // It came to an end, so it did not kill the process.
    connection
        .prepare_cached("UPDATE outbox_state SET found_row = 0 WHERE n = ?1 AND found_row <> 0")?
        .execute([ask.n])?;
    Ok(Some(settled(&after)))
}

const EPOCH: &str =
    "UPDATE outbox_dispatcher SET epoch = epoch + 1, started_ms = ?1, host = ?2, pid = ?3 WHERE one = 1";
const OPEN: &str = "SELECT a.n, a.attempt_no, a.armed_ms IS NOT NULL, u.id, u.scope, u.kind, u.destination
    FROM outbox_attempt a JOIN outbox_status u ON u.n = a.n WHERE a.settled_ms IS NULL";
const FOUND: &str = "UPDATE outbox_state SET found_row = CASE WHEN found_epoch = ?2 - 1 THEN found_row + 1 ELSE 1 END,
    found_epoch = ?2 WHERE n = ?1";
const CLOSE: &str = "UPDATE outbox_attempt SET settled_ms = ?3, outcome = ?4, evidence = ?5
    WHERE n = ?1 AND attempt_no = ?2 AND settled_ms IS NULL";

pub(super) fn reign(connection: &Connection, now_ms: i64, limits_of: &LimitsOf) -> Result<Reign, VerbError> {
    connection.execute(EPOCH, params![now_ms, host(), std::process::id()])?;
    let epoch: i64 = connection.query_row("SELECT epoch FROM outbox_dispatcher", [], |row| row.get(0))?;
    let mut statement = connection.prepare(OPEN)?;
    let open: Vec<Open> = statement.query_map([], Open::read)?.collect::<rusqlite::Result<_>>()?;
    let recovered = open.into_iter().map(|open| recover(connection, open, epoch, now_ms, limits_of));
    Ok(Reign { epoch, recovered: recovered.collect::<Result<_, _>>()? })
}

struct Open {
    n: i64,
    attempt_no: u32,
    armed: bool,
    id: String,
    scope: String,
    kind: String,
    destination: String,
}

impl Open {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            n: row.get(0)?,
            attempt_no: row.get(1)?,
            armed: row.get(2)?,
            id: text_lossy(row, 3)?,
            scope: text_lossy(row, 4)?,
            kind: text_lossy(row, 5)?,
            destination: text_lossy(row, 6)?,
        })
    }
}

/// An attempt found open goes through the same rules as one that ends at run time, by the policy that
/// it was begun under.
fn recover(
    connection: &Connection,
    open: Open,
    epoch: i64,
    now_ms: i64,
    limits_of: &LimitsOf,
) -> Result<Recovered, VerbError> {
    let before = facts::load(connection, open.n)?;
    let limits = limits_of(&open.kind, &open.destination);
    let current = matches!(before.state, State::Sending { .. }) && before.attempt_no == open.attempt_no;
    let before =
        if crate::faults::is_broken("count") { CommandFacts { tries: 0, found_open: 0, ..before } } else { before };
    let outcome = if open.armed { Outcome::Unknown } else { Outcome::Deferred };
    let evidence = crate::effect::Evidence::new("process died during attempt").to_json();
    connection.prepare_cached(CLOSE)?.execute(params![open.n, open.attempt_no, now_ms, outcome.as_str(), evidence])?;
    let after = if current {
        let after =
            next(&before, Event::FoundOpen, &facts::place(connection, open.n, &limits, now_ms, 0)?).map_err(damaged)?;
        facts::store(connection, open.n, &after, now_ms)?;
        connection.prepare_cached(FOUND)?.execute([open.n, epoch])?;
        after
    } else {
        // Somebody ended the command while the attempt was open.
        before
    };
    let Open { attempt_no, armed, id, scope, .. } = open;
    Ok(Recovered { id, scope, attempt_no, armed, settled: settled(&after) })
}

/// The database contradicts itself: nothing more is sent from it.
fn damaged(problem: impl std::fmt::Display) -> VerbError {
    VerbError::Store(StoreError::Broken(format!("the outbox contradicts itself: {problem}")))
}
