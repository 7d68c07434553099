//! The shop's own table: the business side of the transaction that the outbox is part of.
//!
//! It stands for the application's data, so its SQL is the application's and lives here, in these
//! constants, while all SQL of the outbox is the library's. Nothing else in the demo may hold SQL.

use rusqlite::{Connection, Transaction, params};

const CREATE: &str = "CREATE TABLE booking(worker TEXT NOT NULL, what TEXT NOT NULL) STRICT";
const BOOK: &str = "INSERT INTO booking(worker, what) VALUES (?1, ?2)";
const READ: &str = "SELECT worker, what FROM booking ORDER BY rowid";

/// Creates the table.
pub(super) fn create(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(CREATE)
}

/// Writes a booking; it counts when the transaction has committed. Returns the number of rows.
pub(super) fn book(transaction: &Transaction<'_>, worker: &str, what: &str) -> rusqlite::Result<usize> {
    transaction.execute(BOOK, params![worker, what])
}

/// All bookings, oldest first, as worker and what.
pub(super) fn bookings(connection: &Connection) -> rusqlite::Result<Vec<(String, String)>> {
    connection.prepare(READ)?.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}
