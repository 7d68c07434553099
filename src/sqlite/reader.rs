//! The one thread that looks: it owns a connection that only reads.
//!
//! Each look is a short read of its own, so that no read transaction ever stands open: one would keep the
//! WAL from being written back.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tokio::sync::oneshot;

use super::store::OpenError;
use super::writer::store_error;
use crate::store::StoreError;

type Read = Box<dyn FnOnce(&Connection) + Send>;

/// A thread with a connection that only reads.
#[derive(Debug)]
pub(super) struct Reader {
    reads: Sender<Read>,
}

impl Reader {
    pub(super) fn start(path: PathBuf) -> Result<Self, OpenError> {
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        connection.pragma_update(None, "query_only", true)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        let (reads, receiver) = channel::<Read>();
        let run = move || receiver.into_iter().for_each(|read| read(&connection));
        std::thread::Builder::new().name("fencepost-reader".to_owned()).spawn(run).map_err(OpenError::Thread)?;
        Ok(Self { reads })
    }

    pub(super) async fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (sender, receiver) = oneshot::channel();
        let read = move |connection: &Connection| {
            // Nobody waits any more: the answer is not needed.
            drop(sender.send(query(connection)));
        };
        let gone = || StoreError::Broken("the reader thread is gone".to_owned());
        self.reads.send(Box::new(read)).map_err(|_| gone())?;
        receiver.await.map_err(|_| gone())?.map_err(|error| store_error(&error))
    }
}
