//! Copies: a sound one is made, and a copy becomes a database of its own.
//!
//! A backup is taken through SQLite, never from the file, whose latest commits stand in the `-wal`. It is
//! checked before it gets its name, and says of itself that it is a copy. Where a copy, or an old state,
//! is to be worked with, nothing that it holds may go out by itself: the original sent it, or will.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags, TransactionBehavior, params};
use serde_json::json;

use super::identity::{self, IdentityError};
use super::lock::{DispatcherLock, LockError};
use super::store::{OpenError, open_for_one_write, reign};
use super::writer::VerbError;
use super::{SchemaError, schema};
use crate::rules::Limits;

/// Pages between two reports of progress.
const PAGES: i32 = 1_000;

/// Why there is no backup. Nothing has the name that was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// Something has the name already, or one that SQLite would take for a part of the copy.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// The name belongs to the database itself.
    #[error("{} is a name that belongs to the database itself; give the backup another one", .0.display())]
    Sidecar(PathBuf),
    /// A file could not be written.
    #[error("can't write {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The original, and so its copy, is not in order.
    #[error("the copy is not sound, so it was not kept")]
    NotSound(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database failed.
    #[error("database error")]
    Database(#[from] rusqlite::Error),
}

/// A backup that was made and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Its size.
    pub bytes: u64,
    /// Commands in it.
    pub commands: i64,
    /// Those of them that are live.
    pub live: i64,
}

/// Copies the database as it is at one moment, beside whoever writes to it. `progress` hears how many
/// pages of how many are copied.
///
/// When it returns the copy is durable, whole, in order by SQLite's own check and the contract's, for
/// its owner's eyes only, and marked as a copy: a dispatcher refuses it while live commands are in it.
pub fn backup(
    from: &Connection,
    to: &Path,
    now_ms: i64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Copied, BackupError> {
    let beside = |ending: &str| {
        let mut name = to.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    for path in [to.to_owned(), beside("-wal"), beside("-shm"), beside("-journal")] {
        if path.symlink_metadata().is_ok() {
            return Err(BackupError::Exists(path));
        }
    }
    if is_sidecar(from, to) {
        return Err(BackupError::Sidecar(to.to_owned()));
    }
    let partial = Partial::create(beside(&format!(".partial-{}", std::process::id())))?;
    let copied = copy(from, &partial.0, now_ms, progress)?;
    partial.publish(to)?;
    Ok(copied)
}

/// Whether SQLite, or a dispatcher, would take a file of this name for its own beside the database.
fn is_sidecar(database: &Connection, to: &Path) -> bool {
    let folder = |path: &Path| path.parent().map(|parent| parent.canonicalize().unwrap_or_else(|_| parent.to_owned()));
    let Some(from) = database.path().map(Path::new).and_then(|path| path.canonicalize().ok()) else { return false };
    let (Some(from_name), Some(to_name)) = (from.file_name(), to.file_name()) else { return false };
    let ending = to_name.as_encoded_bytes().strip_prefix(from_name.as_encoded_bytes());
    let to_folder =
        folder(to).filter(|path| !path.as_os_str().is_empty()).or_else(|| Path::new(".").canonicalize().ok());
    folder(&from) == to_folder
        && ending.is_some_and(|ending| [&b"-wal"[..], b"-shm", b"-journal", b".dispatcher.lock"].contains(&ending))
}

/// The copy until it is sound. Dropping it removes it.
struct Partial(PathBuf);

impl Partial {
    fn create(path: PathBuf) -> Result<Self, BackupError> {
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        created.map(drop).map_err(|source| BackupError::Io { path: path.clone(), source })?;
        Ok(Self(path))
    }

    /// Gives it its name, which nothing may have, and makes that durable.
    fn publish(self, to: &Path) -> Result<(), BackupError> {
        let io = |source: std::io::Error| {
            if source.kind() == std::io::ErrorKind::AlreadyExists {
                return BackupError::Exists(to.to_owned());
            }
            BackupError::Io { path: to.to_owned(), source }
        };
        File::open(&self.0).and_then(|file| file.sync_all()).map_err(io)?;
        std::fs::hard_link(&self.0, to).map_err(io)?;
        std::fs::remove_file(&self.0).map_err(io)?;
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a success the name is gone already.
        drop(std::fs::remove_file(&self.0));
    }
}

fn copy(from: &Connection, to: &Path, now_ms: i64, progress: &mut dyn FnMut(u64, u64)) -> Result<Copied, BackupError> {
    let mut copy = Connection::open_with_flags(to, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    // One snapshot for all steps: else each commit of somebody else would start the copy anew.
    let snapshot = from.unchecked_transaction()?;
    snapshot.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get::<_, i64>(0))?;
    let backup = Backup::new(&snapshot, &mut copy)?;
    while backup.step(PAGES)? == StepResult::More {
        let pages = backup.progress();
        let all = u64::try_from(pages.pagecount).unwrap_or(0);
        progress(all.saturating_sub(u64::try_from(pages.remaining).unwrap_or(0)), all);
    }
    drop(backup);
    snapshot.finish()?;
    finish(copy, to, now_ms)
}

/// Checks and marks the copy, and leaves one file in WAL mode without anything beside it.
fn finish(copy: Connection, to: &Path, now_ms: i64) -> Result<Copied, BackupError> {
    copy.pragma_update(None, "journal_mode", "delete")?;
    identity::whole(&copy).map_err(|error| BackupError::NotSound(error.into()))?;
    schema::verify(&copy).map_err(|error| BackupError::NotSound(error.into()))?;
    copy.execute("UPDATE outbox_dispatcher SET copied_ms = ?1 WHERE one = 1", [now_ms])?;
    let sql = "SELECT count(*), count(*) FILTER (WHERE state NOT IN ('delivered', 'dead')) FROM outbox_state";
    let (commands, live) = copy.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    copy.pragma_update(None, "journal_mode", "wal")?;
    copy.close().map_err(|(_, error)| error)?;
    let bytes = std::fs::metadata(to).map_err(|source| BackupError::Io { path: to.to_owned(), source })?.len();
    Ok(Copied { bytes, commands, live })
}

/// Why a copy was not adopted. Nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// It can't be locked or opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What it says of an attempt can't be understood.
    #[error("the outbox contradicts itself: {0}")]
    Damaged(String),
}

impl From<rusqlite::Error> for AdoptError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Open(error.into())
    }
}

impl From<LockError> for AdoptError {
    fn from(error: LockError) -> Self {
        Self::Open(error.into())
    }
}

impl From<SchemaError> for AdoptError {
    fn from(error: SchemaError) -> Self {
        Self::Open(error.into())
    }
}

impl From<IdentityError> for AdoptError {
    fn from(error: IdentityError) -> Self {
        Self::Open(error.into())
    }
}

/// What became of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adopted {
    /// Its identity from now on.
    pub uuid: String,
    /// Commands that wait to be adopted or discarded, one by one.
    pub parked: i64,
    /// Commands whose attempt was under way in the original, and which wait for an answer.
    pub in_doubt: i64,
}

/// Makes a copy, or an old state put back, a database of its own: everything live is parked, attempts
/// under way are ended by their policy, and it gets a new identity. Audited, in one transaction.
///
/// It locks the database as a dispatcher does, until the process ends.
pub fn adopt_clone(path: &Path, who: &str, reason: &str, now_ms: i64) -> Result<Adopted, AdoptError> {
    let lock = DispatcherLock::acquire(path)?;
    let mut connection = open_for_one_write(&lock)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    schema::migrate(&transaction)?;
    let before = identity::seen(&transaction)?;
    reign(&transaction, now_ms, &(Box::new(|_: &str, _: &str| Limits::NONE) as _)).map_err(adopt_error)?;
    transaction.execute(
        "UPDATE outbox_state SET state = 'parked', reason = NULL, updated_ms = ?1
           WHERE state IN ('pending', 'sending', 'in_doubt', 'parked') AND state = 'pending'",
        [now_ms],
    )?;
    // The guard lets only a copy have a new identity.
    transaction.execute("UPDATE outbox_dispatcher SET copied_ms = ?1 WHERE one = 1", [now_ms])?;
    transaction.execute("UPDATE outbox_meta SET uuid = lower(hex(randomblob(16))) WHERE one = 1", [])?;
    identity::write_down(&transaction, &lock, None, true)?;
    let adopted = adopted(&transaction)?;
    transaction.execute(
        "INSERT INTO outbox_audit(at_ms, who, verb, reason, before, after) VALUES (?1, ?2, 'adopt-clone', ?3, ?4, ?5)",
        params![
            now_ms,
            who,
            reason,
            json!({ "uuid": before.uuid }).to_string(),
            json!({ "uuid": adopted.uuid, "parked": adopted.parked, "in_doubt": adopted.in_doubt }).to_string(),
        ],
    )?;
    transaction.commit()?;
    identity::checkpoint(&connection)?;
    Ok(adopted)
}

fn adopted(connection: &Connection) -> rusqlite::Result<Adopted> {
    let sql = "SELECT (SELECT uuid FROM outbox_meta), count(*) FILTER (WHERE state = 'parked'), count(*) FILTER (WHERE state = 'in_doubt')
        FROM outbox_state WHERE state IN ('pending', 'sending', 'in_doubt', 'parked')";
    connection.query_row(sql, [], |row| Ok(Adopted { uuid: row.get(0)?, parked: row.get(1)?, in_doubt: row.get(2)? }))
}

fn adopt_error(error: VerbError) -> AdoptError {
    match error {
        VerbError::Sqlite(error) => error.into(),
        VerbError::Store(error) => AdoptError::Damaged(error.to_string()),
    }
}
