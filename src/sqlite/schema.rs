//! The contract in the database: made, upgraded, compared.
//!
//! `migrate` only adds objects, inside the caller's transaction, and writes nothing where it meets a
//! table of somebody else. `verify` finds out whether all guards are still there: a migration tool that
//! rebuilds a table drops its triggers without a word, and then nothing is fenced any more. Neither may
//! ever repair by itself what it finds changed.

use rusqlite::{Connection, OptionalExtension, Transaction};
use std::collections::BTreeMap;
use std::time::Duration;

/// The SQL contract, as `schema.sql` has it.
pub const CONTRACT: &str = include_str!("../../schema.sql");

/// The major version of [`CONTRACT`]. Another one is not understood.
pub const CONTRACT_MAJOR: i64 = 1;

/// The minor version of [`CONTRACT`]. A higher one only has more objects.
pub const CONTRACT_MINOR: i64 = 0;

/// How long a connection waits for another one's write lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// What each minor version adds to the one before: the number it leads to, and its statements. A test
/// compares a database that was upgraded with a fresh one.
const UPGRADES: &[(i64, &str)] = &[];

/// Why the contract can't be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// A transaction is open, and `journal_mode` and `synchronous` can't be set inside one.
    #[error("a transaction is open: prepare the connection before its first transaction")]
    InTransaction,
    /// The database could not be switched to WAL.
    #[error("the database is in journal mode {mode} and can't be switched to WAL: it must be a file on a local disk")]
    NotWal {
        /// The mode that it is in.
        mode: String,
    },
    /// `synchronous=FULL` did not take effect.
    #[error("synchronous=FULL could not be set")]
    NotFull,
    /// The database isn't UTF-8, and names are compared as bytes.
    #[error("the database has the encoding {encoding}: use a database in UTF-8")]
    Encoding {
        /// Its encoding.
        encoding: String,
    },
    /// An object of the application has a name of the contract. Nothing was written.
    #[error(
        "the {kind} {name} is not Fencepost's: rename it, or keep the outbox's database apart from it; nothing was written"
    )]
    Foreign {
        /// `table`, `view`, `index` or `trigger`.
        kind: String,
        /// Its name.
        name: String,
    },
    /// The contract of another major version.
    #[error(
        "the outbox has version {found}.x and this program knows {CONTRACT_MAJOR}.x: use a program of that version"
    )]
    Major {
        /// The major version in the database.
        found: i64,
    },
    /// The contract of an older minor version.
    #[error(
        "the outbox has version {CONTRACT_MAJOR}.{found}, older than {CONTRACT_MAJOR}.{CONTRACT_MINOR}: run fencepost init"
    )]
    Older {
        /// The minor version in the database.
        found: i64,
    },
    /// There is no outbox.
    #[error("the database has no outbox: run fencepost init")]
    Missing,
    /// Objects are missing, or changed while the version is ours. What they guarded isn't guarded.
    #[error("objects of the outbox are missing or changed: {}", list(.objects))]
    Drift {
        /// Which, by name.
        objects: Vec<Drifted>,
    },
    /// The database failed.
    #[error("database error")]
    Database(#[from] rusqlite::Error),
}

/// One object that isn't as the contract has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drifted {
    /// Its name.
    pub name: String,
    /// What is wrong with it.
    pub how: Drift,
}

/// What is wrong with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drift {
    /// It isn't there.
    Missing,
    /// It is there, and different.
    Changed,
    /// A trigger of this name, on a table of the contract, is not the contract's.
    Unknown,
}

impl std::fmt::Display for Drifted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = match self.how {
            Drift::Missing => "missing",
            Drift::Changed => "changed",
            Drift::Unknown => "not ours",
        };
        write!(f, "{} ({how})", self.name)
    }
}

fn list(objects: &[Drifted]) -> String {
    let each: Vec<String> = objects.iter().map(ToString::to_string).collect();
    each.join(", ")
}

/// One object of the contract, as a fresh database has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContractObject {
    /// `table`, `view`, `index` or `trigger`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// The table or view that it belongs to.
    pub table: String,
    /// Its statement, without comments and with single blanks.
    pub sql: String,
}

/// Sets and checks what the contract needs of a connection: WAL, `synchronous=FULL`, and a busy timeout
/// of 5 seconds. Once for each connection, outside of a transaction. WAL stays with the file; the other
/// two are the connection's own.
pub fn prepare(connection: &Connection) -> Result<(), SchemaError> {
    if !connection.is_autocommit() {
        return Err(SchemaError::InTransaction);
    }
    connection.busy_timeout(BUSY_TIMEOUT)?;
    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        return Err(SchemaError::NotWal { mode });
    }
    connection.execute_batch("PRAGMA synchronous = FULL")?;
    let synchronous: i64 = connection.query_row("PRAGMA synchronous", [], |row| row.get(0))?;
    if synchronous < 2 { Err(SchemaError::NotFull) } else { Ok(()) }
}

/// Creates the contract's objects where there are none, and upgrades those of an older minor version.
/// On the same or a higher minor version it changes nothing. Durable when the transaction commits; on an
/// error nothing was written, and the transaction goes on.
pub fn migrate(transaction: &Transaction<'_>) -> Result<(), SchemaError> {
    let encoding: String = transaction.query_row("PRAGMA encoding", [], |row| row.get(0))?;
    if encoding != "UTF-8" {
        return Err(SchemaError::Encoding { encoding });
    }
    match version(transaction)? {
        None => whole(transaction, |inside| inside.execute_batch(CONTRACT)),
        Some((CONTRACT_MAJOR, minor)) => whole(transaction, |inside| upgrade(inside, minor)),
        Some((found, _)) => Err(SchemaError::Major { found }),
    }
}

/// Compares every object of the contract in the database with a fresh one.
///
/// Fails with [`SchemaError::Missing`] without an outbox, [`SchemaError::Major`] and
/// [`SchemaError::Older`] under another version, and [`SchemaError::Drift`] if an object is missing, or
/// changed while the database says that it has this version. Under a higher minor version only missing
/// ones count. Objects of the application's own are left alone, except triggers and unique indexes on the
/// contract's tables: those can switch its guards off.
pub fn verify(connection: &Connection) -> Result<(), SchemaError> {
    let Some((major, minor)) = version(connection)? else { return Err(SchemaError::Missing) };
    if major != CONTRACT_MAJOR {
        return Err(SchemaError::Major { found: major });
    }
    if minor < CONTRACT_MINOR {
        return Err(SchemaError::Older { found: minor });
    }
    let objects = drift(&contract_objects()?, &objects_of(connection)?, minor == CONTRACT_MINOR);
    if objects.is_empty() { Ok(()) } else { Err(SchemaError::Drift { objects }) }
}

/// Every object of the contract, by name.
pub fn contract_objects() -> Result<Vec<ContractObject>, SchemaError> {
    let fresh = Connection::open_in_memory()?;
    fresh.execute_batch(CONTRACT)?;
    Ok(objects_of(&fresh)?)
}

fn drift(ours: &[ContractObject], theirs: &[ContractObject], same_version: bool) -> Vec<Drifted> {
    let found: BTreeMap<&str, &ContractObject> = theirs.iter().map(|object| (object.name.as_str(), object)).collect();
    let mut drifted = Vec::new();
    for object in ours {
        let how = match found.get(object.name.as_str()) {
            None => Drift::Missing,
            Some(other) if same_version && *other != object => Drift::Changed,
            Some(_) => continue,
        };
        drifted.push(Drifted { name: object.name.clone(), how });
    }
    let known = |name: &str| ours.iter().any(|object| object.name == name);
    // A newer minor version may bring objects of its own names.
    let stray = |object: &&ContractObject| {
        can_disturb(object)
            && known(&object.table)
            && !known(&object.name)
            && (same_version || !is_reserved(&object.name))
    };
    drifted
        .extend(theirs.iter().filter(stray).map(|object| Drifted { name: object.name.clone(), how: Drift::Unknown }));
    drifted
}

/// A trigger that fires inside one of ours switches ours off, since SQLite does not let a trigger fire from
/// itself; a unique index lets REPLACE delete a command that only the index knows.
fn can_disturb(object: &ContractObject) -> bool {
    object.kind == "trigger" || object.sql.get(..20).is_some_and(|sql| sql.eq_ignore_ascii_case("CREATE UNIQUE INDEX "))
}

fn is_reserved(name: &str) -> bool {
    name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("outbox"))
}

/// The version that the database says it has; `None` if it has nothing of the contract. An object with
/// a name of the contract without our `outbox_meta` is somebody else's.
fn version(connection: &Connection) -> Result<Option<(i64, i64)>, SchemaError> {
    if is_ours(connection)? {
        let version = connection
            .query_row("SELECT major, minor FROM outbox_meta", [], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        if let Some(version) = version {
            return Ok(Some(version));
        }
    }
    let names: Vec<String> = contract_objects()?.into_iter().map(|object| object.name).collect();
    let mut statement = connection.prepare(
        "SELECT type, name FROM sqlite_schema UNION ALL SELECT type, name FROM sqlite_temp_schema ORDER BY 2",
    )?;
    let found = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
    for object in found {
        let (kind, name) = object?;
        if names.iter().any(|ours| ours.eq_ignore_ascii_case(&name)) {
            return Err(SchemaError::Foreign { kind, name });
        }
    }
    Ok(None)
}

fn is_ours(connection: &Connection) -> Result<bool, SchemaError> {
    let mut statement = connection.prepare("SELECT name FROM pragma_table_info('outbox_meta')")?;
    let columns: Vec<String> = statement.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    Ok(["one", "major", "minor", "uuid", "created_ms"].iter().all(|ours| columns.iter().any(|name| name == ours)))
}

fn upgrade(transaction: &Connection, from_minor: i64) -> rusqlite::Result<()> {
    for (minor, statements) in UPGRADES.iter().filter(|(minor, _)| *minor > from_minor) {
        transaction.execute_batch(statements)?;
        transaction.execute("UPDATE outbox_meta SET minor = ?1", [minor])?;
    }
    Ok(())
}

/// All of it or nothing, without touching the rest of the caller's transaction.
fn whole(transaction: &Connection, write: impl FnOnce(&Connection) -> rusqlite::Result<()>) -> Result<(), SchemaError> {
    transaction.execute_batch("SAVEPOINT outbox_migrate")?;
    let written = write(transaction);
    let end =
        if written.is_ok() { "RELEASE outbox_migrate" } else { "ROLLBACK TO outbox_migrate; RELEASE outbox_migrate" };
    transaction.execute_batch(end)?;
    Ok(written?)
}

fn objects_of(connection: &Connection) -> rusqlite::Result<Vec<ContractObject>> {
    let mut statement = connection.prepare(
        "SELECT type, name, tbl_name, sql FROM main.sqlite_schema WHERE sql IS NOT NULL ORDER BY name, type",
    )?;
    let rows = statement.query_map([], |row| {
        let sql: String = row.get(3)?;
        Ok(ContractObject { kind: row.get(0)?, name: row.get(1)?, table: row.get(2)?, sql: plain(&sql) })
    })?;
    rows.collect()
}

/// The statement without comments and with single blanks, so that neither a better comment nor a tool
/// that formats SQL counts as a change. Quoted text is kept as it is.
fn plain(sql: &str) -> String {
    let mut plain = String::with_capacity(sql.len());
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let (length, keep) = piece(rest, first);
        let (piece, after) = rest.split_at(length);
        match keep {
            true => plain.push_str(piece),
            false if !plain.ends_with(' ') => plain.push(' '),
            false => {}
        }
        rest = after;
    }
    plain.trim().to_owned()
}

/// The length of the piece that `text` starts with, and whether it says anything.
fn piece(text: &str, first: char) -> (usize, bool) {
    let through = |end: &str, from: usize| {
        text.get(from..).and_then(|body| body.find(end)).map_or(text.len(), |at| from + at + end.len())
    };
    if text.starts_with("--") {
        (through("\n", 2), false)
    } else if text.starts_with("/*") {
        (through("*/", 2), false)
    } else if first.is_whitespace() {
        (first.len_utf8(), false)
    } else if matches!(first, '\'' | '"' | '`') {
        (through(&first.to_string(), 1), true)
    } else {
        (first.len_utf8(), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blanks_say_nothing() {
        for (sql, right) in [
            ("CREATE TABLE t(\n  a TEXT, -- a comment; with 'a quote\n  b TEXT)", "CREATE TABLE t( a TEXT, b TEXT)"),
            ("SELECT '--  kept  /* too */', \"b  c\" /* gone */ ;", "SELECT '--  kept  /* too */', \"b  c\" ;"),
            ("SELECT 'it''s  --' -- gone", "SELECT 'it''s  --'"),
        ] {
            assert_eq!(plain(sql), right);
        }
    }
}
