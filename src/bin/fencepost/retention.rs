//! Retention by policy: a thread of the daemon that takes away what the configuration calls old.
//!
//! It has a connection and small transactions of its own and never goes through the dispatcher's writer:
//! between two transactions it pauses for a multiple of the time that it held the write lock, so nine
//! tenths of that time stay with workers and sends. It believes no clock that has just jumped, and
//! whatever goes wrong here is logged and tried again: retention must never stop the dispatcher.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use fencepost::clock::{self, Watch};
use fencepost::config::{Config, RetentionSettings};
use fencepost::sqlite::retention::{Ages, Gone, pass};
use rusqlite::{Connection, OpenFlags};

/// How much longer than a transaction the pause after it is.
const PAUSE_FACTOR: u32 = 9;

/// The shortest pause.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// The running thread. Dropping it ends the thread after its current transaction, and waits for that.
pub(crate) struct Retention {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Retention {
    /// Starts the thread, if the configuration calls anything old.
    pub(crate) fn start(database: &Path, config: &Config) -> std::io::Result<Self> {
        let settings = config.retention;
        if ages(&settings) == Ages::default() {
            return Ok(Self { stop: None, thread: None });
        }
        let (stop, stopped) = channel();
        let worker =
            Worker { database: database.to_owned(), settings, busy_timeout: config.dispatcher.busy_timeout, stopped };
        let thread = std::thread::Builder::new().name("fencepost-keep".to_owned()).spawn(move || worker.run())?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Retention {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was reported there, and is no reason to end the dispatcher.
            drop(thread.join());
        }
    }
}

const fn ages(settings: &RetentionSettings) -> Ages {
    Ages { delivered: settings.delivered, dead: settings.dead, erase: settings.erase, events: settings.events }
}

struct Worker {
    database: PathBuf,
    settings: RetentionSettings,
    busy_timeout: Duration,
    stopped: Receiver<()>,
}

impl Worker {
    fn run(self) {
        let mut watch = Watch::new(clock::now());
        let mut connection = None;
        while !self.stops_within(self.settings.every) {
            let now = clock::now();
            watch.look(now);
            if !watch.is_steady(now) {
                continue;
            }
            match self.pass(&mut connection, now.wall_ms) {
                Ok(gone) if gone.total() == 0 => {}
                Ok(gone) => tracing::info!(
                    delivered = gone.delivered,
                    dead = gone.dead,
                    erased = gone.erased,
                    events = gone.events,
                    forgotten = gone.forgotten,
                    "what was old is gone",
                ),
                Err(error) => tracing::warn!(%error, "what is old stays for now"),
            }
        }
    }

    /// The connection is kept: opening one for each pass would read the whole schema again.
    fn pass(&self, connection: &mut Option<Connection>, now_ms: i64) -> anyhow::Result<Gone> {
        let connection = match connection {
            Some(connection) => connection,
            none => none.insert(self.open()?),
        };
        let gone = pass(connection, &ages(&self.settings), now_ms, &mut |_gone, took| {
            !self.stops_within((took * PAUSE_FACTOR).max(PAUSE_MIN))
        })?;
        Ok(gone)
    }

    fn open(&self) -> anyhow::Result<Connection> {
        let connection = Connection::open_with_flags(&self.database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        fencepost::sqlite::prepare(&connection)?;
        connection.busy_timeout(self.busy_timeout)?;
        Ok(connection)
    }

    fn stops_within(&self, wait: Duration) -> bool {
        self.stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout)
    }
}
