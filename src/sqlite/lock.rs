//! One dispatcher on one database file: `flock`, held until the process dies.
//!
//! It cannot expire in a pause, and it is free the moment its holder is dead. The lock is on the
//! database file itself, because a bind-mounted file has another directory and so another lock file;
//! `<db>.dispatcher.lock` beside it says who holds it, and how far the database was seen: an old copy
//! put back in its place is behind that. Both descriptors are opened before SQLite opens the file and
//! are never closed: closing any descriptor of the database would drop SQLite's own locks.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::identity::FileIdentity;

/// How often a waiting dispatcher tries the lock.
const TRY_EVERY: Duration = Duration::from_millis(100);

/// Where in the lock file it stands how far the database was seen; what people read is before it.
const SEEN_AT: usize = 256;

/// File systems on which flock, SQLite's locks and its shared memory are known to work, by the magic
/// number of statfs(2). Everything else is refused, network file systems above all.
const FILE_SYSTEMS: [(&str, u64); 6] = [
    ("ext4", 0xef53),
    ("xfs", 0x5846_5342),
    ("btrfs", 0x9123_683e),
    ("zfs", 0x2fc1_2fc1),
    ("tmpfs", 0x0102_1994),
    ("overlay", 0x794c_7630),
];

/// File systems that are refused by name; others are refused by number.
const REFUSED: [(&str, u64); 6] = [
    ("NFS", 0x6969),
    ("SMB", 0xff53_4d42),
    ("SMB2", 0xfe53_4d42),
    ("9p", 0x0102_1997),
    ("FUSE", 0x6573_5546),
    ("Ceph", 0x00c3_6400),
];

/// Why the database can't be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// There is no such file.
    #[error("there is no database at {}", .0.display())]
    Missing(PathBuf),
    /// Another dispatcher runs on this file.
    #[error("a dispatcher runs on this database already: {0}")]
    Held(String),
    /// The file has several names, so that a second dispatcher could have another WAL.
    #[error("{} has {links} hard links; give the database one name", .path.display())]
    HardLinks {
        /// The database.
        path: PathBuf,
        /// How many names it has.
        links: u64,
    },
    /// Locks can't be trusted there.
    #[error("{} lies on {file_system}, where SQLite's locks can't be trusted; use a local file system", .path.display())]
    FileSystem {
        /// The database.
        path: PathBuf,
        /// Its file system.
        file_system: String,
    },
    /// The path names another file now.
    #[error("{} was removed, or replaced by another file", .0.display())]
    Replaced(PathBuf),
    /// The operating system failed.
    #[error("can't lock {}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
}

/// The lock on a database file. It is never given back before the process ends.
#[derive(Debug)]
pub(crate) struct DispatcherLock {
    path: PathBuf,
    device: u64,
    inode: u64,
    file: FileIdentity,
    seen: Option<Seen>,
    witness: File,
}

/// How far a database was dispatched from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) uuid: String,
    pub(crate) epoch: i64,
    pub(crate) attempts: i64,
}

impl Seen {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let mut after = |name| words.find(|word| *word == name).and_then(|_| words.next());
        let uuid = after("database")?.to_owned();
        Some(Self { uuid, epoch: after("epoch")?.parse().ok()?, attempts: after("attempts")?.parse().ok()? })
    }

    /// Always as long as before, so that one write replaces it whole.
    fn line(&self) -> String {
        format!("database {} epoch {:020} attempts {:020}\n", self.uuid, self.epoch, self.attempts)
    }
}

/// Writes down how far the database was seen, outside of the database.
///
/// Without an fsync: after a power cut it can be behind, and then an old copy that is hardly older than
/// the file passes. It is never ahead, since it is written after the commit.
#[derive(Debug)]
pub(crate) struct Witness {
    file: File,
    last: Option<Seen>,
}

impl Witness {
    /// Writes, where there is something new.
    pub(crate) fn note(&mut self, seen: Seen) -> std::io::Result<()> {
        if self.last.as_ref() == Some(&seen) {
            return Ok(());
        }
        self.file.write_all_at(seen.line().as_bytes(), SEEN_AT as u64)?;
        self.last = Some(seen);
        Ok(())
    }
}

impl DispatcherLock {
    /// Locks the database file, or fails with who holds it.
    pub(crate) fn acquire(path: &Path) -> Result<Self, LockError> {
        let files = Files::open(path)?;
        if files.try_lock()? { files.keep() } else { Err(LockError::Held(files.holder())) }
    }

    /// Locks the database file as soon as nobody else holds it; looks every 100 ms. `give_up` is asked
    /// at each look.
    pub(crate) fn wait(path: &Path, give_up: &dyn Fn() -> bool) -> Result<Self, LockError> {
        let files = Files::open(path)?;
        while !files.try_lock()? {
            if give_up() {
                return Err(LockError::Held(files.holder()));
            }
            std::thread::sleep(TRY_EVERY);
        }
        files.keep()
    }

    /// The canonical path of the database.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Which file it is.
    pub(crate) const fn file(&self) -> &FileIdentity {
        &self.file
    }

    /// How far the database that lay here was seen before.
    pub(crate) const fn seen(&self) -> Option<&Seen> {
        self.seen.as_ref()
    }

    /// The place to write down how far it is seen from now on.
    pub(crate) fn witness(&self) -> std::io::Result<Witness> {
        Ok(Witness { file: self.witness.try_clone()?, last: None })
    }

    /// Fails if the path does not name the locked file any more.
    pub(crate) fn is_same(&self) -> Result<(), LockError> {
        let now = std::fs::metadata(&self.path);
        match now {
            Ok(now) if (now.dev(), now.ino()) == (self.device, self.inode) => Ok(()),
            Ok(_) | Err(_) => Err(LockError::Replaced(self.path.clone())),
        }
    }
}

struct Files {
    path: PathBuf,
    database: File,
    beside: File,
}

impl Files {
    fn open(path: &Path) -> Result<Self, LockError> {
        let io = |source| LockError::Io { path: path.to_owned(), source };
        let missing = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        let path = path
            .canonicalize()
            .map_err(|error| if missing(&error) { LockError::Missing(path.to_owned()) } else { io(error) })?;
        let database = OpenOptions::new().read(true).write(true).open(&path).map_err(io)?;
        let links = database.metadata().map_err(io)?.nlink();
        if links > 1 {
            return Err(LockError::HardLinks { path, links });
        }
        check_file_system(&path, &database)?;
        let mut name = path.clone().into_os_string();
        name.push(".dispatcher.lock");
        let beside = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&name)
            .map_err(|source| LockError::Io { path: name.into(), source })?;
        Ok(Self { path, database, beside })
    }

    /// The database first: that is the lock that decides. One that got it and not the other one drops
    /// both with its descriptors.
    fn try_lock(&self) -> Result<bool, LockError> {
        let got = |result: Result<(), TryLockError>| match result {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(source)) => Err(LockError::Io { path: self.path.clone(), source }),
        };
        if crate::faults::is_broken("lock") {
            return Ok(true);
        }
        if !got(self.database.try_lock())? {
            return Ok(false);
        }
        if got(self.beside.try_lock())? {
            return Ok(true);
        }
        // SQLite has not opened the file yet, so unlocking is harmless here.
        self.database.unlock().map_err(|source| LockError::Io { path: self.path.clone(), source })?;
        Ok(false)
    }

    fn keep(self) -> Result<DispatcherLock, LockError> {
        let io = |source| LockError::Io { path: self.path.clone(), source };
        let held = self.database.metadata().map_err(io)?;
        let text = self.text().map_err(io)?;
        let lock = DispatcherLock {
            path: self.path.clone(),
            device: held.dev(),
            inode: held.ino(),
            file: FileIdentity::of(&self.database).map_err(io)?,
            seen: text.get(SEEN_AT..).and_then(Seen::parse),
            // Another descriptor of the same open file: closing it gives no lock back.
            witness: self.beside.try_clone().map_err(io)?,
        };
        lock.is_same()?;
        // What stands in the file decides nothing; it is there to be read by people.
        let who = format!("pid {} on {}, fencepost {}", std::process::id(), host(), env!("CARGO_PKG_VERSION"));
        if lock.seen.is_none() {
            self.beside.set_len(0).map_err(io)?;
        }
        let line = format!("{:<width$.width$}\n", who, width = SEEN_AT - 1);
        self.beside.write_all_at(line.as_bytes(), 0).map_err(io)?;
        std::mem::forget(self.database);
        std::mem::forget(self.beside);
        Ok(lock)
    }

    /// The lock file's text. It is short; more is not ours.
    fn text(&self) -> std::io::Result<String> {
        let mut bytes = [0; 2 * SEEN_AT];
        let length = self.beside.read_at(&mut bytes, 0)?;
        Ok(String::from_utf8_lossy(bytes.get(..length).unwrap_or_default()).into_owned())
    }

    fn holder(&self) -> String {
        let text = self.text().unwrap_or_default();
        match text.lines().next().map(str::trim) {
            Some(who) if !who.is_empty() => who.to_owned(),
            Some(_) | None => "unknown (its lock file is elsewhere or unreadable)".to_owned(),
        }
    }
}

fn check_file_system(path: &Path, file: &File) -> Result<(), LockError> {
    let io = |source: rustix::io::Errno| LockError::Io { path: path.to_owned(), source: source.into() };
    match file_system(rustix::fs::fstatfs(file).map_err(io)?.f_type) {
        (_, true) => Ok(()),
        (file_system, false) => Err(LockError::FileSystem { path: path.to_owned(), file_system }),
    }
}

/// The file system with this magic number, and whether locks can be trusted there.
pub(super) fn file_system(magic: rustix::fs::FsWord) -> (String, bool) {
    let magic = u64::from_ne_bytes(magic.to_ne_bytes()) & 0xffff_ffff;
    let find = |list: &[(&'static str, u64)]| list.iter().find(|(_, known)| *known == magic).map(|(name, _)| *name);
    match (find(&FILE_SYSTEMS), find(&REFUSED)) {
        (Some(name), _) => (name.to_owned(), true),
        (None, Some(name)) => (name.to_owned(), false),
        (None, None) => (format!("a file system with magic {magic:#x}"), false),
    }
}

/// The name of this machine, for people to read.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
