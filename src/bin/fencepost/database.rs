//! Which database, and opening it.
//!
//! Only `init` may create a file: a mistyped path must never become an empty database that looks fine.
//! Commands that read open it for reading only. Commands that write first compare the contract's
//! objects, because without its triggers nothing would be fenced.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use fencepost::config::Config;
use fencepost::sqlite::{SchemaError, prepare, verify};
use rusqlite::{Connection, OpenFlags};

use crate::Globals;
use crate::exit::{Exit, Failure};
use crate::output::warn;

const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The database file that options, environment or configuration name, in this order.
pub(crate) fn path(globals: &Globals) -> anyhow::Result<PathBuf> {
    if let Some(path) = globals.db.as_ref().filter(|path| !path.as_os_str().is_empty()) {
        return Ok(path.clone());
    }
    let configured = configuration_without_secrets(globals)?.and_then(|config| config.database);
    let missing = || {
        Failure::usage("no database is given")
            .hint("give --db PATH, set FENCEPOST_DB, or set [database] path in the file of --config")
    };
    Ok(configured.ok_or_else(missing)?)
}

/// The configuration, if one is given. A person who looks at the outbox doesn't have the daemon's
/// secrets, so variables that aren't set count as set.
fn configuration_without_secrets(globals: &Globals) -> anyhow::Result<Option<Config>> {
    let Some(path) = given_configuration(globals) else { return Ok(None) };
    let lenient = |name: &str| {
        let real = std::env::var(name).ok();
        if name.starts_with("FENCEPOST_") { real } else { real.or_else(|| Some("unset".to_owned())) }
    };
    Ok(Some(Config::load(Some(path), &lenient)?))
}

/// The path of the configuration, if one is given.
pub(crate) fn given_configuration(globals: &Globals) -> Option<&Path> {
    globals.config.as_deref().filter(|path| !path.as_os_str().is_empty())
}

/// The configuration for its destinations' names alone: without it, a listing still has its worth.
pub(crate) fn known_destinations(globals: &Globals) -> Option<Config> {
    configuration_without_secrets(globals).unwrap_or_else(|error| {
        warn(&format!("destinations can't be compared with the configuration: {error:#}"));
        None
    })
}

/// Opens the database for reading. Damaged guards are a warning here.
pub(crate) fn read(globals: &Globals) -> anyhow::Result<Connection> {
    let path = path(globals)?;
    let connection = open(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    match verify(&connection) {
        Err(SchemaError::Missing) => Err(no_outbox(&path)),
        Err(error @ (SchemaError::Drift { .. } | SchemaError::Older { .. })) => {
            warn(&format!("{}: {error}", path.display()));
            Ok(connection)
        }
        checked => checked.map(|()| connection).with_context(|| path.display().to_string()),
    }
}

/// Opens the database for reading whatever state its guards are in: for commands that tell of it. Fails
/// where there is no outbox at all.
pub(crate) fn look(globals: &Globals) -> anyhow::Result<(Connection, PathBuf)> {
    let path = path(globals)?;
    let connection = open(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    match verify(&connection) {
        Err(SchemaError::Missing) => Err(no_outbox(&path)),
        Err(error @ (SchemaError::Foreign { .. } | SchemaError::Database(_))) => {
            Err(error).with_context(|| path.display().to_string())
        }
        Ok(()) | Err(_) => Ok((connection, path)),
    }
}

/// Opens the database for writing, with WAL and full durability.
pub(crate) fn write(globals: &Globals) -> anyhow::Result<Connection> {
    let path = path(globals)?;
    let connection = open(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    match verify(&connection) {
        Err(SchemaError::Missing) => return Err(no_outbox(&path)),
        checked => checked.with_context(|| path.display().to_string())?,
    }
    prepare(&connection).with_context(|| path.display().to_string())?;
    Ok(connection)
}

fn open(path: &Path, mode: OpenFlags) -> anyhow::Result<Connection> {
    if !path.exists() {
        let missing = Failure::new(Exit::Unavailable, format!("there is no database {}", path.display()));
        return Err(missing.hint(init_hint(path)).into());
    }
    let connection = Connection::open_with_flags(path, mode | OpenFlags::SQLITE_OPEN_NO_MUTEX)
        .with_context(|| format!("can't open {}", path.display()))?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

fn no_outbox(path: &Path) -> anyhow::Error {
    Failure::new(Exit::Unavailable, format!("{} has no outbox", path.display())).hint(init_hint(path)).into()
}

fn init_hint(path: &Path) -> String {
    format!("check the path, or run `fencepost init --db {}`", path.display())
}
