//! A hint that somebody may have committed: inotify on the `-wal` file.
//!
//! The event comes at write(), before the commit can be seen, and tells nothing by itself; the writer
//! thread then looks at `PRAGMA data_version`, which is the truth. Without inotify, or when the watch
//! is lost, the poll interval alone is enough. A thread of its own waits for events, since there is no
//! safe way to hand the descriptor to the runtime.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify;

use super::writer::Writer;
use crate::faults;

/// How long to wait before a lost watch is set up again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Starts the thread. It ends at the first event, or a second, after the writer is gone.
pub(crate) fn start(database: &Path, writer: Writer) -> std::io::Result<()> {
    let mut name = database.to_owned().into_os_string();
    name.push("-wal");
    let wal = PathBuf::from(name);
    std::thread::Builder::new().name("fencepost-wake".to_owned()).spawn(move || watch(&wal, &writer)).map(drop)
}

/// Watches until the writer is gone. Says once when notifications don't work.
fn watch(wal: &Path, writer: &Writer) {
    let mut told = false;
    // The first hint after a lost watch makes up for what was missed meanwhile.
    while writer.hint() {
        match watch_once(wal, writer) {
            Ok(()) => tracing::debug!("the watch was lost; it is set up again soon"),
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "no notifications of other processes' commits; polling alone goes on");
            }
            Err(_) => {}
        }
        std::thread::sleep(AGAIN_AFTER);
    }
}

/// Passes events on as hints. Returns when the watch is lost, by an overflow or with the file.
fn watch_once(wal: &Path, writer: &Writer) -> std::io::Result<()> {
    faults::watch_setup()?;
    let descriptor: OwnedFd = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    let events = inotify::WatchFlags::MODIFY | inotify::WatchFlags::DELETE_SELF | inotify::WatchFlags::MOVE_SELF;
    inotify::add_watch(&descriptor, wal, events)?;
    tracing::debug!("watching for other processes' commits");
    let lost = inotify::ReadFlags::IGNORED
        | inotify::ReadFlags::QUEUE_OVERFLOW
        | inotify::ReadFlags::DELETE_SELF
        | inotify::ReadFlags::MOVE_SELF;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&descriptor, &mut buffer);
    loop {
        let event = reader.next()?;
        // One hint for a burst: more events of the same read tell nothing new.
        if event.events().intersects(lost) || faults::watch_is_lost() || (reader.is_buffer_empty() && !writer.hint()) {
            return Ok(());
        }
    }
}
