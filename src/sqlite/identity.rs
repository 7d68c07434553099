//! Which file a database is, so that a copy doesn't send what its original sends, or has sent.
//!
//! A copy is told by its file: the database keeps host, file system, device, inode and birth of the one
//! that it was dispatched from. An old copy put back into the same file is told by the lock file beside
//! it, which keeps how far the database was seen. Neither is certain: a copy made before the first start
//! is not known for one, and where the lock file went too, or the whole disk went back in time, nothing
//! is left to compare with. What is not known to be the original must never be taken for it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use rusqlite::{Connection, Transaction, params};
use sha2::{Digest, Sha256};

use super::lock::{DispatcherLock, Seen};
use crate::clock;

/// Up to this size the pages of a database are looked at before it is dispatched from.
const CHECKED_BYTES_MAX: i64 = 64 * 1024 * 1024;

/// Why a database is not dispatched from, though its contract is in order.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// It was dispatched from another file, and has live commands.
    #[error("{path} is a copy: its {live} live commands belong to another file, which may have sent them already")]
    Copy {
        /// The database.
        path: String,
        /// How many commands wait in it.
        live: i64,
    },
    /// It was made by `backup`, and has live commands.
    #[error("{path} is a backup: its {live} live commands belong to the original, which may have sent them already")]
    Backup {
        /// The database.
        path: String,
        /// How many commands wait in it.
        live: i64,
    },
    /// It is older than the database that was dispatched from at this place.
    #[error(
        "{path} is an old copy: it knows {attempts} attempts in {epoch} starts, and {seen_attempts} in {seen_epoch} were seen here, so it would send again what it has forgotten"
    )]
    Older {
        /// The database.
        path: String,
        /// Its attempts.
        attempts: i64,
        /// Its epoch.
        epoch: i64,
        /// The attempts that were seen.
        seen_attempts: i64,
        /// The epoch that was seen.
        seen_epoch: i64,
    },
    /// Its pages contradict one another.
    #[error("the database file is damaged, or mixed from two: {0}")]
    Damaged(String),
    /// The database failed.
    #[error("database error")]
    Database(#[from] rusqlite::Error),
}

/// One file, told from its copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    /// A hash of the machine's id; empty where there is none, as in most containers.
    host: String,
    file_system: u64,
    device: u64,
    inode: u64,
    /// In nanoseconds; 0 where the file system doesn't know it.
    born_ns: u64,
}

impl FileIdentity {
    pub(crate) fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        let born = metadata.created().ok().and_then(|born| born.duration_since(std::time::UNIX_EPOCH).ok());
        Ok(Self {
            host: host_id(),
            file_system: rustix::fs::fstatvfs(file)?.f_fsid,
            device: metadata.dev(),
            inode: metadata.ino(),
            born_ns: born.and_then(|born| u64::try_from(born.as_nanos()).ok()).unwrap_or(0),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let host = words.next()?.to_owned();
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        Some(Self { host, file_system: number()?, device: number()?, inode: number()?, born_ns: number()? })
    }

    fn text(&self) -> String {
        format!("{} {:x} {:x} {:x} {:x}", self.host, self.file_system, self.device, self.inode, self.born_ns)
    }

    /// A device can get another number with a restart of the machine, and some file systems another id:
    /// one of the two is enough. An inode that is used again has another birth.
    fn is_same(&self, other: &Self) -> bool {
        let host = self.host == other.host || self.host.is_empty() || other.host.is_empty();
        let place = self.device == other.device || self.file_system == other.file_system;
        let born = self.born_ns == other.born_ns || self.born_ns == 0 || other.born_ns == 0;
        host && place && born && self.inode == other.inode
    }
}

/// The machine's id is not for others to see, so a hash of it is kept. Host names are not used: a
/// container gets a new one with each start.
fn host_id() -> String {
    let text = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = text.trim();
    if id.len() < 32 {
        return String::new();
    }
    let hash = Sha256::digest(format!("fencepost host {id}"));
    hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// How far the database is.
pub(super) fn seen(connection: &Connection) -> rusqlite::Result<Seen> {
    let sql = "SELECT m.uuid, d.epoch, d.attempts FROM outbox_dispatcher d JOIN outbox_meta m ON m.one = d.one WHERE d.one = 1";
    connection
        .prepare_cached(sql)?
        .query_row([], |row| Ok(Seen { uuid: row.get(0)?, epoch: row.get(1)?, attempts: row.get(2)? }))
}

/// Takes the database for this file, if it is the one that was dispatched from, or nothing in it waits,
/// or somebody says that the original is gone. Tells whether the file was written down anew.
pub(super) fn claim(
    transaction: &Transaction<'_>,
    lock: &DispatcherLock,
    moved: Option<&str>,
) -> Result<bool, IdentityError> {
    let path = lock.path().display().to_string();
    check_age(transaction, lock, &path)?;
    check_attempts(transaction)?;
    let sql = "SELECT file, copied_ms IS NOT NULL FROM outbox_dispatcher WHERE one = 1";
    let (stored, copied): (Option<String>, bool) =
        transaction.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    // What can't be read was written by a later version, for a file that we can't compare.
    let same =
        stored.as_deref().is_none_or(|text| FileIdentity::parse(text).is_some_and(|file| file.is_same(lock.file())));
    let live = if same && !copied { 0 } else { live(transaction)? };
    match moved {
        None if live > 0 && copied => return Err(IdentityError::Backup { path, live }),
        None if live > 0 => return Err(IdentityError::Copy { path, live }),
        Some(who) if !same || copied => note_move(transaction, who, stored.as_deref(), lock)?,
        Some(_) | None => {}
    }
    write_down(transaction, lock, stored.as_deref(), copied)
}

/// The lock file's word counts for the database that it is about, and for no other.
fn check_age(transaction: &Transaction<'_>, lock: &DispatcherLock, path: &str) -> Result<(), IdentityError> {
    let now = seen(transaction)?;
    let Some(before) = lock.seen().filter(|before| before.uuid == now.uuid) else { return Ok(()) };
    if now.epoch >= before.epoch && now.attempts >= before.attempts {
        return Ok(());
    }
    Err(IdentityError::Older {
        path: path.to_owned(),
        attempts: now.attempts,
        epoch: now.epoch,
        seen_attempts: before.attempts,
        seen_epoch: before.epoch,
    })
}

fn live(transaction: &Transaction<'_>) -> rusqlite::Result<i64> {
    let sql = "SELECT count(*) FROM outbox_state WHERE state IN ('pending', 'sending', 'in_doubt', 'parked')";
    transaction.query_row(sql, [], |row| row.get(0))
}

pub(super) fn write_down(
    transaction: &Transaction<'_>,
    lock: &DispatcherLock,
    stored: Option<&str>,
    copied: bool,
) -> Result<bool, IdentityError> {
    let file = lock.file().text();
    let new = copied || stored != Some(&file);
    if new {
        transaction.execute("UPDATE outbox_dispatcher SET file = ?1, copied_ms = NULL WHERE one = 1", [file])?;
    }
    Ok(new)
}

fn note_move(
    transaction: &Transaction<'_>,
    who: &str,
    stored: Option<&str>,
    lock: &DispatcherLock,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO outbox_audit(at_ms, who, verb, reason, before, after) VALUES (?1, ?2, 'moved', 'the original is gone', ?3, ?4)";
    transaction.execute(sql, params![clock::wall_ms(), who, stored, lock.file().text()]).map(drop)
}

/// Puts what was written down into the database file itself: a copy of that file alone, without its
/// `-wal`, must carry it too.
pub(super) fn checkpoint(connection: &Connection) -> rusqlite::Result<()> {
    let busy: bool = connection.query_row("PRAGMA wal_checkpoint(FULL)", [], |row| row.get(0))?;
    if busy {
        tracing::warn!(
            "a long reader keeps the database file behind its -wal: a copy of the file alone would not be noticed"
        );
    }
    Ok(())
}

/// Looks through a database that is small enough: one file put over another, with the -wal of the other
/// left beside it, shows in its pages and indexes.
pub(super) fn check_pages(connection: &Connection) -> Result<(), IdentityError> {
    if is_small(connection)? { whole(connection) } else { Ok(()) }
}

fn is_small(connection: &Connection) -> rusqlite::Result<bool> {
    let sql = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
    Ok(connection.query_row(sql, [], |row| row.get::<_, i64>(0))? <= CHECKED_BYTES_MAX)
}

/// Every attempt is known twice: in the total, and by its command. Where old pages of commands lie under
/// a total from a newer -wal, whole tables and their indexes can fit each other, but this doesn't.
fn check_attempts(transaction: &Transaction<'_>) -> Result<(), IdentityError> {
    if !is_small(transaction)? {
        return Ok(());
    }
    let sql = "SELECT attempts - attempts_pruned - (SELECT total(attempt_no) FROM outbox_state) FROM outbox_dispatcher WHERE one = 1";
    let missing: f64 = transaction.query_row(sql, [], |row| row.get(0))?;
    if missing > 0.0 {
        return Err(IdentityError::Damaged(format!("{missing} attempts that were begun are not with their commands")));
    }
    Ok(())
}

/// Looks through the whole database, indexes too.
pub(super) fn whole(connection: &Connection) -> Result<(), IdentityError> {
    let found: String = connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if found == "ok" { Ok(()) } else { Err(IdentityError::Damaged(found)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileIdentity {
        FileIdentity { host: "a1".to_owned(), file_system: 5, device: 6, inode: 7, born_ns: 8 }
    }

    #[test]
    fn a_file_is_told_from_its_copies_and_not_from_itself() {
        assert_eq!(FileIdentity::parse(&file().text()), Some(file()));
        let hostless = FileIdentity { host: String::new(), ..file() };
        assert_eq!(FileIdentity::parse(&hostless.text()), Some(hostless.clone()));
        for (other, same) in [
            (hostless, true),
            (FileIdentity { host: "b2".to_owned(), ..file() }, false),
            (FileIdentity { device: 60, ..file() }, true),
            (FileIdentity { file_system: 50, ..file() }, true),
            (FileIdentity { device: 60, file_system: 50, ..file() }, false),
            (FileIdentity { inode: 70, ..file() }, false),
            (FileIdentity { born_ns: 80, ..file() }, false),
            (FileIdentity { born_ns: 0, ..file() }, true),
        ] {
            assert_eq!(file().is_same(&other), same, "{other:?}");
            assert_eq!(other.is_same(&file()), same, "{other:?}");
        }
    }
}
