//! The outcome feed: what became of commands, for applications that go on from there.
//!
//! Every change of state that somebody may wait for is a row of `outbox_event`, written by a trigger in
//! the transaction of the change itself. A reader keeps one number, the `n` of the last row that it has
//! handled, and asks for what comes after. Nothing here is ever marked as read: any number of readers
//! follow the feed, each at its own pace, and none of them holds up the dispatcher.

use rusqlite::types::ValueRef;
use rusqlite::{Connection, Row, params};

/// One row of the outcome feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutcomeEvent {
    /// Its place in the feed: what a reader remembers. Gaps mean nothing.
    pub n: i64,
    /// When it happened, in milliseconds since 1970. Clocks can be set, so this is no order.
    pub at_ms: i64,
    /// `delivered`, `dead`, `in_doubt`, `parked`, or `resumed` (pending again after a person's word).
    pub event: String,
    /// The command.
    pub id: String,
    /// Its scope.
    pub scope: String,
    /// Its lane; may be empty.
    pub lane: String,
    /// Its place in the scope.
    pub seq: i64,
    /// The idempotency key that its writer gave, also where the key was given back since.
    pub key: Option<String>,
    /// Why it is dead or parked.
    pub reason: Option<String>,
    /// What can have happened outside: `none`, `possible` or `done`.
    pub effect: String,
}

const AFTER: &str = "SELECT n, at_ms, event, id, scope, lane, seq, key, reason, effect FROM outbox_event
    WHERE n > ?1 ORDER BY n LIMIT ?2";

/// The first `limit` events behind the one with number `after`, in commit order; 0 begins at the front.
///
/// No row can ever appear behind one that was already read: SQLite has one writer at a time, and the
/// number is drawn inside the writing transaction, so whoever draws the next number does it after the
/// one before has committed or was rolled back. A number is never used twice either. A reader that
/// stores `n` together with what it did misses nothing and does nothing twice. One that falls behind
/// what was pruned goes on at the oldest row that is left.
///
/// The call is one short read, which blocks no writer. `connection` needs no [`prepare`](super::prepare).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let mut connection = rusqlite::Connection::open(folder.path().join("app.db"))?;
/// # fencepost::sqlite::prepare(&connection)?;
/// # let transaction = connection.transaction()?;
/// # fencepost::sqlite::migrate(&transaction)?;
/// # transaction.commit()?;
/// # let mut after = 0;
/// for event in fencepost::sqlite::events(&connection, after, 100)? {
///     if event.event == "dead" {
///         eprintln!("{} of {} was given up: {:?}", event.id, event.scope, event.reason);
///     }
///     after = event.n;
/// }
/// # Ok(())
/// # }
/// ```
pub fn events(connection: &Connection, after: i64, limit: u32) -> rusqlite::Result<Vec<OutcomeEvent>> {
    connection.prepare_cached(AFTER)?.query_map(params![after, limit], event)?.collect()
}

fn event(row: &Row<'_>) -> rusqlite::Result<OutcomeEvent> {
    Ok(OutcomeEvent {
        n: row.get(0)?,
        at_ms: row.get(1)?,
        event: row.get(2)?,
        id: text(row, 3)?.unwrap_or_default(),
        scope: text(row, 4)?.unwrap_or_default(),
        lane: text(row, 5)?.unwrap_or_default(),
        seq: row.get(6)?,
        key: text(row, 7)?,
        reason: row.get(8)?,
        effect: row.get(9)?,
    })
}

/// SQLite doesn't check that a text is UTF-8, and one odd name must not end the feed.
fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(match row.get_ref(column)? {
        ValueRef::Text(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => None,
    })
}
