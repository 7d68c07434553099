//! `fencepost backup` and `fencepost adopt-clone`: making a copy, and saying what one is.
//!
//! Copying the file by hand leaves out what stands in its `-wal`. Adopting is a person's word about what
//! nobody else can know, so it needs a reason and is audited.

use std::path::PathBuf;

use fencepost::clock::wall_ms;
use fencepost::sqlite::copies::{AdoptError, adopt_clone as adopt, backup as copy};
use serde_json::json;

use crate::exit::{Exit, Failure};
use crate::operate::user_at_host;
use crate::run::RunError;
use crate::{Globals, database};

/// Options of `fencepost backup`.
#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// Where the copy goes; nothing is overwritten
    path: PathBuf,
}

/// Options of `fencepost adopt-clone`.
#[derive(Debug, clap::Args)]
pub(crate) struct AdoptArgs {
    /// Why; kept in the audit table
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Who says so; by default the user and host
    #[arg(long, value_name = "NAME")]
    who: Option<String>,
}

/// Copies the database.
pub(crate) fn backup(args: &BackupArgs, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let screen = globals.screen();
    let progress = screen.progress("copying");
    let copied = copy(&connection, &args.path, wall_ms(), &mut |pages, all| {
        progress.say(format!("copying: {pages} of {all} pages"));
    })?;
    drop(progress);
    let path = args.path.display().to_string();
    if screen.is_json() {
        let value = json!({ "path": path, "bytes": copied.bytes, "commands": copied.commands, "live": copied.live });
        return Ok(screen.print_json(&value)?);
    }
    Ok(screen.print(&format!(
        "{path}: {} bytes, {} commands, {} of them live; whole and checked, and marked as a copy",
        copied.bytes, copied.commands, copied.live
    ))?)
}

/// Parks what is live in a copy and gives it an identity of its own.
pub(crate) fn adopt_clone(args: &AdoptArgs, globals: &Globals) -> anyhow::Result<()> {
    if args.reason.trim().is_empty() {
        return Err(Failure::usage("--reason is empty").hint("say in a few words what this copy is for").into());
    }
    let path = database::path(globals)?;
    let who = args.who.clone().filter(|who| !who.trim().is_empty()).unwrap_or_else(user_at_host);
    let adopted = adopt(&path, &who, &args.reason, wall_ms()).map_err(|error| match error {
        AdoptError::Open(error) => RunError::from(error).into(),
        error @ (AdoptError::Damaged(_) | _) => anyhow::Error::from(Failure::new(Exit::InputOutput, error.to_string())),
    })?;
    let screen = globals.screen();
    if screen.is_json() {
        let value = json!({ "uuid": adopted.uuid, "parked": adopted.parked, "in_doubt": adopted.in_doubt });
        return Ok(screen.print_json(&value)?);
    }
    Ok(screen.print(&format!(
        "{}: a database of its own now; {} commands are parked and {} in doubt, and none goes out by itself",
        path.display(),
        adopted.parked,
        adopted.in_doubt
    ))?)
}
