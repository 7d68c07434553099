//! One dispatcher on one database file: `flock`, held until the process dies.
//!
//! It cannot expire in a pause, and it is free the moment its holder is dead. The lock is on the
//! database file itself, because a bind-mounted file has another directory and so another lock file;
//! `<db>.dispatcher.lock` beside it says who holds it. Both descriptors are opened before SQLite opens
//! the file and are never closed: closing any descriptor of the database would drop SQLite's own locks.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a waiting dispatcher tries the lock.
const TRY_EVERY: Duration = Duration::from_millis(100);

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
}

impl DispatcherLock {
    /// Locks the database file, or fails with who holds it.
    pub(crate) fn acquire(path: &Path) -> Result<Self, LockError> {
        let mut files = Files::open(path)?;
        if files.try_lock()? { files.keep() } else { Err(LockError::Held(files.holder())) }
    }

    /// Locks the database file as soon as nobody else holds it; looks every 100 ms. `give_up` is asked
    /// at each look.
    pub(crate) fn wait(path: &Path, give_up: &dyn Fn() -> bool) -> Result<Self, LockError> {
        let mut files = Files::open(path)?;
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
    fn try_lock(&mut self) -> Result<bool, LockError> {
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

    fn keep(mut self) -> Result<DispatcherLock, LockError> {
        let io = |source| LockError::Io { path: self.path.clone(), source };
        let held = self.database.metadata().map_err(io)?;
        let lock = DispatcherLock { path: self.path.clone(), device: held.dev(), inode: held.ino() };
        lock.is_same()?;
        // What stands in the file decides nothing; it is there to be read by people.
        let who = format!("pid {} on {}, fencepost {}\n", std::process::id(), host(), env!("CARGO_PKG_VERSION"));
        self.beside.set_len(0).map_err(io)?;
        self.beside.seek(SeekFrom::Start(0)).map_err(io)?;
        self.beside.write_all(who.as_bytes()).map_err(io)?;
        std::mem::forget(self.database);
        std::mem::forget(self.beside);
        Ok(lock)
    }

    fn holder(&mut self) -> String {
        let mut text = String::new();
        let read =
            self.beside.seek(SeekFrom::Start(0)).and_then(|_| (&mut self.beside).take(300).read_to_string(&mut text));
        match read {
            Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
            Ok(_) | Err(_) => "unknown (its lock file is elsewhere or unreadable)".to_owned(),
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
