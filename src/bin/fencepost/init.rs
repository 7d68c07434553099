//! `fencepost init`: the outbox in the application's database.
//!
//! Everything happens in one transaction that only adds objects, so that a refusal leaves the file as
//! it was. The change to WAL comes last, since it can't be undone by a rollback.

use anyhow::Context;
use fencepost::sqlite::{SchemaError, inspect, migrate, prepare};
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};
use serde_json::json;

use crate::database;
use crate::exit::{Exit, Failure};
use crate::output::warn;
use crate::{Globals, output};

/// Options of `fencepost init`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

const OLD_SQLITE: &str = "from now on only SQLite 3.37 or later can read this file at all, the application's own tables \
    included, because the outbox uses STRICT tables";

/// Creates or upgrades the outbox and says which version it has.
pub(crate) fn init(_args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let path = database::path(globals)?;
    let place = || path.display().to_string();
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection =
        Connection::open_with_flags(&path, flags).with_context(|| format!("can't open {}", path.display()))?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).with_context(place)?;
    let before = version(&transaction)?;
    migrate(&transaction).map_err(|error| explained(error, &place()))?;
    let after = version(&transaction)?;
    transaction.commit().with_context(place)?;
    prepare(&connection).with_context(place)?;
    say(globals, &place(), before.as_deref(), after.as_deref().unwrap_or_default())?;
    Ok(())
}

/// The version, as far as the outbox is ours; whose else it is, `migrate` finds out.
fn version(transaction: &Transaction<'_>) -> anyhow::Result<Option<String>> {
    match fencepost::sqlite::verify(transaction) {
        Err(SchemaError::Missing | SchemaError::Foreign { .. }) => Ok(None),
        Err(SchemaError::Database(error)) => Err(error.into()),
        _ => Ok(inspect::contract_version(transaction)?.map(|(major, minor)| format!("{major}.{minor}"))),
    }
}

fn explained(error: SchemaError, place: &str) -> anyhow::Error {
    let SchemaError::Foreign { kind, name } = error else { return anyhow::Error::new(error).context(place.to_owned()) };
    Failure::new(Exit::Data, format!("{place} has a {kind} {name} that isn't Fencepost's; nothing was written"))
        .hint(format!("the name is one of the contract's: rename the {kind}, then run init again"))
        .into()
}

fn say(globals: &Globals, place: &str, before: Option<&str>, after: &str) -> anyhow::Result<()> {
    let screen = globals.screen();
    let done = match before {
        None => "created",
        Some(before) if before == after => "unchanged",
        Some(_) => "upgraded",
    };
    if screen.is_json() {
        warn(OLD_SQLITE);
        screen.print_json(&json!({ "database": place, "version": after, "before": before, "outcome": done }))?;
        return Ok(());
    }
    let done = screen.paint(output::Tone::Good, done);
    screen.print(&format!("{place}: outbox {after} {done}"))?;
    warn(OLD_SQLITE);
    Ok(())
}
