//! What can be wrong around a database: the file, its place, its WAL, its clock, its schema.
//!
//! Only facts are gathered here; what they mean and what cures them is the command line's to say.
//! Nothing is written and no lock is kept, so that it can run at any time, above all when something is
//! stuck. The database file is never opened but by SQLite.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rusqlite::Connection;

use super::inspect::{self, Load, Refusal, Reign, Since};
use super::lock;
use super::proc::beside;
pub use super::proc::{Dispatcher, Holders, Process, holders};
use super::schema::{self, SchemaError};
use super::store::WAL_RESET_FIXED;

/// Commands, from the newest one on, whose time of insertion is compared with the clock.
const NEWEST: i64 = 1_000;

/// What workers do whose SQLite has the bug of [`Library::wal_reset_bug`].
pub const WITH_THE_BUG: &str = "PRAGMA wal_autocheckpoint = 0";

/// What makes a WAL small again that nobody reads from.
pub const CHECKPOINT: &str = "PRAGMA wal_checkpoint(TRUNCATE)";

/// The SQLite of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// Its version.
    pub version: &'static str,
    /// Whether it can corrupt a WAL that two connections write and reset at once.
    pub wal_reset_bug: bool,
}

/// The SQLite that this process runs with.
pub fn library() -> Library {
    Library { version: rusqlite::version(), wal_reset_bug: rusqlite::version_number() < WAL_RESET_FIXED }
}

/// The file and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file system, by name or number.
    pub file_system: String,
    /// Whether SQLite's locks are known to work there.
    pub file_system_is_known: bool,
    /// How many names the file has.
    pub links: u64,
    /// Bytes of the database.
    pub database_bytes: u64,
    /// Bytes of its WAL.
    pub wal_bytes: u64,
    /// Bytes that are free there.
    pub free_bytes: u64,
}

/// Looks at the file by its name. Fails if it isn't there.
pub fn place(database: &Path) -> std::io::Result<Place> {
    let file = database.metadata()?;
    let (file_system, file_system_is_known) = lock::file_system(rustix::fs::statfs(database)?.f_type);
    let space = rustix::fs::statvfs(database)?;
    Ok(Place {
        file_system,
        file_system_is_known,
        links: file.nlink(),
        database_bytes: file.len(),
        wal_bytes: beside(database, "-wal").metadata().map_or(0, |wal| wal.len()),
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
    })
}

/// What the database says of itself.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Its journal mode; anything but `wal` is wrong.
    pub journal_mode: String,
    /// When the newest commands were inserted, at the latest.
    pub newest_ms: Option<i64>,
    /// Lanes whose due time a clock ahead of this one has set.
    pub lanes_from_the_future: i64,
    /// The dispatcher that ran last.
    pub reign: Reign,
    /// The head that has been waiting longest.
    pub oldest_due: Option<Since>,
    /// What waits, by destination.
    pub loads: Vec<Load>,
    /// Refusals, latest first.
    pub refusals: Vec<Refusal>,
}

/// Compares the contract's objects; `Ok` where nothing is wrong with them.
pub fn guards(connection: &Connection) -> Result<(), SchemaError> {
    schema::verify(connection)
}

/// Reads what the database says, at one moment of it; `now_ms` decides what is due, and `slack_ms` how far
/// ahead a clock may be.
pub fn facts(connection: &Connection, now_ms: i64, slack_ms: i64) -> rusqlite::Result<Facts> {
    let snapshot = connection.unchecked_transaction()?;
    let late_ms = now_ms.saturating_add(slack_ms);
    let newest = "SELECT max(inserted_ms) FROM (SELECT inserted_ms FROM outbox_state ORDER BY n DESC LIMIT ?1)";
    let future = "SELECT count(*) FROM outbox_lane WHERE due_ms IS NOT NULL AND set_ms > ?1";
    let status = inspect::waiting(&snapshot, now_ms)?;
    Ok(Facts {
        journal_mode: snapshot.query_row("PRAGMA journal_mode", [], |row| row.get(0))?,
        newest_ms: snapshot.query_row(newest, [NEWEST], |row| row.get(0))?,
        lanes_from_the_future: snapshot.query_row(future, [late_ms], |row| row.get(0))?,
        reign: status.reign,
        oldest_due: status.oldest_due,
        loads: status.loads,
        refusals: status.refusals,
    })
}
