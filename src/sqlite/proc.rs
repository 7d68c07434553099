//! Who holds which lock on the database, as the kernel tells it.
//!
//! A process that is stopped inside a write transaction stops every other writer, and SQLite can't say
//! who it is; `/proc/locks` can. Files are only looked at by name here, never opened: closing any
//! descriptor of the database or of its shared memory would drop the locks of this process on it.
//! Processes of another container are not seen; what is found is true, what isn't may be there.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes of the `-shm` file that SQLite locks in WAL mode: the one writer, and the five read marks.
const WRITE_BYTE: u64 = 120;
const READ_BYTES: std::ops::RangeInclusive<u64> = 123..=127;

/// A process, as people know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The name of its program; empty if it is gone already.
    pub name: String,
    /// Whether it is stopped (by a signal, or by a debugger), so that it does nothing until somebody lets
    /// it go on.
    pub stopped: bool,
}

/// Who holds the dispatcher's lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dispatcher {
    /// Nobody: no dispatcher runs.
    None,
    /// This process.
    Runs(Process),
    /// Somebody whom this process can't see, as in another container; and what the lock file says.
    RunsElsewhere(String),
}

/// The processes that have to do with a database, apart from this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders {
    /// The one that is inside a write transaction.
    pub writer: Option<Process>,
    /// Those that are inside a read transaction, which keeps the WAL from being reset.
    pub readers: Vec<Process>,
    /// Those that have the database open.
    pub open_by: Vec<Process>,
    /// The dispatcher.
    pub dispatcher: Dispatcher,
}

/// Looks who holds the database. Fails if `/proc` can't be read or the database isn't there.
pub fn holders(database: &Path) -> std::io::Result<Holders> {
    let locks: Vec<Lock> = std::fs::read_to_string("/proc/locks")?.lines().filter_map(Lock::parse).collect();
    let shm = beside(database, "-shm").metadata().ok().map(|file| Inode::of(&file));
    let on_shm = |write: bool, bytes: std::ops::RangeInclusive<u64>| {
        let fits = move |lock: &&Lock| {
            !lock.flock && lock.write == write && shm.is_some_and(|shm| lock.is_on(shm)) && lock.covers(&bytes)
        };
        processes(locks.iter().filter(fits).map(|lock| lock.pid))
    };
    Ok(Holders {
        writer: on_shm(true, WRITE_BYTE..=WRITE_BYTE).into_iter().next(),
        readers: on_shm(false, READ_BYTES),
        open_by: processes(open_by(Inode::of(&database.metadata()?)).into_iter()),
        dispatcher: dispatcher(database, &locks)?,
    })
}

/// The file beside the database with this ending.
pub(crate) fn beside(database: &Path, ending: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn dispatcher(database: &Path, locks: &[Lock]) -> std::io::Result<Dispatcher> {
    let path = beside(database, ".dispatcher.lock");
    let files = [database, &path].map(|file| file.metadata().ok().map(|file| Inode::of(&file)));
    let fits = |lock: &&Lock| lock.flock && lock.write && files.iter().flatten().any(|file| lock.is_on(*file));
    if let Some(process) = processes(locks.iter().filter(fits).map(|lock| lock.pid)).into_iter().next() {
        return Ok(Dispatcher::Runs(process));
    }
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Dispatcher::None),
        Err(error) => return Err(error),
    };
    // Shared and given back at once: it never keeps a dispatcher out for longer than this look.
    match file.try_lock_shared() {
        Ok(()) => Ok(Dispatcher::None),
        Err(TryLockError::WouldBlock) => {
            let mut says = String::new();
            file.take(300).read_to_string(&mut says)?;
            Ok(Dispatcher::RunsElsewhere(says.trim().to_owned()))
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inode {
    device: u64,
    inode: u64,
}

impl Inode {
    fn of(file: &std::fs::Metadata) -> Self {
        Self { device: file.dev(), inode: file.ino() }
    }
}

/// A line of `/proc/locks`.
#[derive(Debug, PartialEq, Eq)]
struct Lock {
    flock: bool,
    write: bool,
    pid: u32,
    device: (u32, u32),
    inode: u64,
    first: u64,
    last: u64,
}

impl Lock {
    /// `5: POSIX  ADVISORY  WRITE 31586 fe:00:11821072 120 120`; one that only waits has an arrow.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, kind, _, access, pid, file, first, last] = fields.as_slice() else { return None };
        let mut file = file.split(':');
        let mut hex = || u32::from_str_radix(file.next()?, 16).ok();
        let device = (hex()?, hex()?);
        Some(Self {
            flock: *kind == "FLOCK",
            write: *access == "WRITE",
            pid: pid.parse().ok().filter(|pid| *pid > 0)?,
            device,
            inode: file.next()?.parse().ok()?,
            first: first.parse().ok()?,
            last: if *last == "EOF" { u64::MAX } else { last.parse().ok()? },
        })
    }

    /// Some file systems show another device to stat(2) than to the lock table; there the process must have
    /// that file open.
    fn is_on(&self, file: Inode) -> bool {
        let same_device = self.device == (rustix::fs::major(file.device), rustix::fs::minor(file.device));
        self.inode == file.inode && (same_device || has_open(self.pid, file))
    }

    fn covers(&self, bytes: &std::ops::RangeInclusive<u64>) -> bool {
        self.first <= *bytes.end() && *bytes.start() <= self.last
    }
}

fn processes(pids: impl Iterator<Item = u32>) -> Vec<Process> {
    let others: BTreeSet<u32> = pids.filter(|pid| *pid != std::process::id()).collect();
    others.into_iter().map(process).collect()
}

fn process(pid: u32) -> Process {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    // `pid (name) state …`, and the name may hold blanks and brackets.
    let stat = read("stat");
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    Process { pid, name: read("comm").trim().to_owned(), stopped: matches!(state, Some('T' | 't')) }
}

fn open_by(file: Inode) -> Vec<u32> {
    let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| has_open(*pid, file)).collect()
}

/// Whether a process has the file open, where this one may know.
fn has_open(pid: u32, file: Inode) -> bool {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut paths = descriptors.flatten().map(|entry| entry.path());
    paths.any(|path| path.metadata().is_ok_and(|open| Inode::of(&open) == file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_lock_table() {
        let line = "5: POSIX  ADVISORY  WRITE 31586 fe:0a:11821072 120 120";
        let lock = Lock {
            flock: false,
            write: true,
            pid: 31_586,
            device: (0xfe, 0x0a),
            inode: 11_821_072,
            first: 120,
            last: 120,
        };
        assert_eq!(Lock::parse(line), Some(lock));
        let whole = Lock::parse("1: FLOCK  ADVISORY  READ 7 00:2b:9 0 EOF").expect("a lock");
        assert!(whole.flock && !whole.write && whole.covers(&READ_BYTES));
        let merged = Lock::parse("1: POSIX  ADVISORY  READ 7 00:2b:9 127 128").expect("a lock");
        assert!(merged.covers(&READ_BYTES) && !merged.covers(&(WRITE_BYTE..=WRITE_BYTE)));
        let shared = Lock::parse("1: POSIX  ADVISORY  READ 7 00:2b:9 128 128").expect("a lock");
        assert!(!shared.covers(&READ_BYTES), "every connection holds that one");
        for line in ["", "1: -> POSIX  ADVISORY  WRITE 7 00:2b:9 120 120", "1: POSIX ADVISORY WRITE -1 00:2b:9 0 1"] {
            assert_eq!(Lock::parse(line), None, "{line}");
        }
    }

    #[test]
    fn this_process_runs() {
        let me = process(std::process::id());
        assert!(!me.stopped && !me.name.is_empty(), "{me:?}");
        assert_eq!(processes([std::process::id()].into_iter()), []);
    }
}
