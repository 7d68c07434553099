//! From an error to an exit code and a message.
//!
//! Every error that a command returns ends here, and nowhere else is an exit code chosen: scripts and
//! service managers decide by it (sysexits, so that 75 means "try again later"). A message says what
//! happened, to which command or setting, and what to do; it must never hold a payload or a secret.

use std::io;

use fencepost::config::ConfigError;
use fencepost::rules::{Code, InvalidToken, LEASE};
use fencepost::sqlite::copies::BackupError;
use fencepost::sqlite::operator::OperatorError;
use fencepost::sqlite::{Refusal, SchemaError, WorkerError};

use crate::run::RunError;

/// What a process of ours ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// A check found a breach.
    Breach = 1,
    /// The command line is wrong.
    Usage = 64,
    /// What was given doesn't fit: every FP code, but a held lease.
    Data = 65,
    /// No database, or no outbox in it.
    Unavailable = 69,
    /// Our own fault.
    Bug = 70,
    /// The disk, a file or the system failed.
    InputOutput = 74,
    /// The lease is held or lost, the database is busy.
    TryLater = 75,
    /// The configuration is wrong.
    Config = 78,
}

/// An error that the command line itself makes.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// What to do about it.
    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// The exit code of an error: the first cause that has one decides.
pub(crate) fn code_of(error: &anyhow::Error) -> Exit {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.exit;
    }
    error.chain().find_map(code_of_cause).unwrap_or(Exit::Bug)
}

fn code_of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        Some(failure.exit)
    } else if cause.is::<clap::Error>() {
        Some(Exit::Usage)
    } else if cause.is::<ConfigError>() {
        Some(Exit::Config)
    } else if cause.is::<InvalidToken>() {
        Some(Exit::Data)
    } else if let Some(error) = cause.downcast_ref::<RunError>() {
        Some(error.exit())
    } else if let Some(error) = cause.downcast_ref::<WorkerError>() {
        Some(worker(error))
    } else if let Some(error) = cause.downcast_ref::<SchemaError>() {
        Some(schema(error))
    } else if let Some(error) = cause.downcast_ref::<OperatorError>() {
        Some(operator(error))
    } else if let Some(error) = cause.downcast_ref::<BackupError>() {
        Some(backup(error))
    } else if let Some(error) = cause.downcast_ref::<rusqlite::Error>() {
        Some(sqlite(error))
    } else {
        cause.is::<io::Error>().then_some(Exit::InputOutput)
    }
}

fn worker(error: &WorkerError) -> Exit {
    match error {
        WorkerError::Refused(refusal) if is_held(refusal) => Exit::TryLater,
        WorkerError::Refused(_) | WorkerError::IllegalValue { .. } => Exit::Data,
        WorkerError::Locked => Exit::TryLater,
        WorkerError::Database(error) => sqlite(error),
        WorkerError::NotInTransaction | WorkerError::Left | _ => Exit::Bug,
    }
}

/// FP013 also says that a scope isn't of this kind, and waiting does not change that.
pub(crate) fn is_held(refusal: &Refusal) -> bool {
    refusal.code == Code::Held && refusal.token.is_none() && refusal.source.as_deref() == Some(LEASE)
}

fn schema(error: &SchemaError) -> Exit {
    match error {
        SchemaError::Missing | SchemaError::Older { .. } | SchemaError::Major { .. } | SchemaError::Drift { .. } => {
            Exit::Unavailable
        }
        SchemaError::Foreign { .. } | SchemaError::Encoding { .. } => Exit::Data,
        SchemaError::NotWal { .. } | SchemaError::NotFull => Exit::InputOutput,
        SchemaError::Database(error) => sqlite(error),
        SchemaError::InTransaction | _ => Exit::Bug,
    }
}

fn operator(error: &OperatorError) -> Exit {
    match error {
        OperatorError::NotFound { .. }
        | OperatorError::Refused { .. }
        | OperatorError::Erased { .. }
        | OperatorError::Illegal { .. }
        | OperatorError::UnknownScope { .. }
        | OperatorError::Contract(_)
        | OperatorError::NotPaused(_)
        | OperatorError::TooMany(_) => Exit::Data,
        OperatorError::Database(error) => sqlite(error),
        _ => Exit::Bug,
    }
}

fn backup(error: &BackupError) -> Exit {
    match error {
        BackupError::Exists(_) => Exit::Usage,
        BackupError::Database(error) => sqlite(error),
        BackupError::Io { .. } | BackupError::NotSound(_) | _ => Exit::InputOutput,
    }
}

fn sqlite(error: &rusqlite::Error) -> Exit {
    use rusqlite::ErrorCode as Sqlite;
    match error.sqlite_error_code() {
        Some(Sqlite::DatabaseBusy | Sqlite::DatabaseLocked) => Exit::TryLater,
        Some(Sqlite::CannotOpen) => Exit::Unavailable,
        Some(Sqlite::NotADatabase) => Exit::Data,
        Some(
            Sqlite::SystemIoFailure
            | Sqlite::DiskFull
            | Sqlite::DatabaseCorrupt
            | Sqlite::ReadOnly
            | Sqlite::PermissionDenied
            | Sqlite::FileLockingProtocolFailed
            | Sqlite::NoLargeFileSupport,
        ) => Exit::InputOutput,
        Some(_) | None => Exit::Bug,
    }
}

/// What to do about an error, where there is something to say beyond the message itself.
fn hint_of(error: &anyhow::Error) -> Option<String> {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return failure.hint.clone();
    }
    error.chain().find_map(|cause| {
        let worker = cause.downcast_ref::<WorkerError>().and_then(hint_of_worker);
        worker
            .or_else(|| cause.downcast_ref::<OperatorError>().and_then(hint_of_operator))
            .or_else(|| cause.downcast_ref::<RunError>().and_then(RunError::hint).map(str::to_owned))
            .or_else(|| hint_of_sqlite(cause))
    })
}

fn hint_of_worker(error: &WorkerError) -> Option<String> {
    let WorkerError::Refused(refusal) = error else { return None };
    if let (true, Some(until_ms)) = (is_held(refusal), refusal.until_ms) {
        let until = crate::output::relative(until_ms, fencepost::clock::wall_ms());
        return Some(format!("it runs out {until} unless it is renewed; try again then"));
    }
    let hint = match refusal.code {
        Code::Live | Code::Final => {
            return refusal
                .command
                .as_ref()
                .map(|command| format!("`fencepost show {}` tells what may be done", command.id));
        }
        Code::StaleToken => "somebody newer took the scope over: stop working for it; nothing was written",
        Code::OtherHolder => "two holders have this token: check the lease service; nothing was written",
        Code::IdExists => "an id stays for ever: give another one, or none; nothing was written",
        Code::NeverSealed => "acquire the lease, or seal the token first, and use that token; nothing was written",
        Code::KeyExists => "the key names a different command: give another one; nothing was written",
        Code::JumpsTooFar => "check the token: a clock or a typo? max_jump of the policy sets the limit",
        Code::Held => "`fencepost lease show` tells whose tokens the scope has: built-in lease, or a foreign service",
        Code::OtherSource => "name the scope's own source with --source; `fencepost lease show` tells it",
        Code::IllegalValue | Code::Immutable | Code::MayNotFall => return None,
    };
    Some(hint.to_owned())
}

fn hint_of_operator(error: &OperatorError) -> Option<String> {
    match error {
        OperatorError::NotFound { .. } => Some("`fencepost list` shows ids".to_owned()),
        OperatorError::Refused { id, .. } => Some(format!("`fencepost show {id}` tells what may be done")),
        OperatorError::UnknownScope { .. } => Some("`fencepost scope list` shows scopes".to_owned()),
        OperatorError::NotPaused(_) => Some("`fencepost status` shows what is paused".to_owned()),
        OperatorError::TooMany(_) => Some("name fewer, or narrow the filter; nothing was written".to_owned()),
        OperatorError::Database(_) | _ => None,
    }
}

fn hint_of_sqlite(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let error = cause.downcast_ref::<rusqlite::Error>()?;
    (sqlite(error) == Exit::TryLater).then(|| "another process is writing for long; try again".to_owned())
}

/// Prints an error on standard error and answers the exit code.
pub(crate) fn report(error: &anyhow::Error) -> u8 {
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        // Help and version come as an error too, but are none. A closed pipe is no reason for another code.
        drop(usage.print());
        return if usage.use_stderr() { Exit::Usage as u8 } else { 0 };
    }
    eprintln!("fencepost: {}", crate::output::clean_lines(&format!("{error:#}")));
    if let Some(hint) = hint_of(error) {
        eprintln!("  hint: {}", crate::output::clean_lines(&hint));
    }
    code_of(error) as u8
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use rusqlite::ffi;

    use super::*;

    fn sqlite_error(code: std::ffi::c_int) -> rusqlite::Error {
        rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
    }

    /// Data: an error, and the exit code that it must have, also with context around it.
    #[test]
    fn every_typed_error_has_its_code() {
        let data: Vec<(anyhow::Error, Exit)> = vec![
            (Failure::usage("x").into(), Exit::Usage),
            (Failure::new(Exit::Breach, "x").into(), Exit::Breach),
            (WorkerError::Locked.into(), Exit::TryLater),
            (WorkerError::Left.into(), Exit::Bug),
            (WorkerError::IllegalValue { field: "scope", problem: "empty".to_owned() }.into(), Exit::Data),
            (WorkerError::Database(sqlite_error(ffi::SQLITE_FULL)).into(), Exit::InputOutput),
            (SchemaError::Missing.into(), Exit::Unavailable),
            (SchemaError::Major { found: 2 }.into(), Exit::Unavailable),
            (SchemaError::Foreign { kind: "table".to_owned(), name: "outbox".to_owned() }.into(), Exit::Data),
            (SchemaError::NotWal { mode: "delete".to_owned() }.into(), Exit::InputOutput),
            (SchemaError::InTransaction.into(), Exit::Bug),
            (OperatorError::NotFound { id: "x".to_owned() }.into(), Exit::Data),
            (OperatorError::Database(sqlite_error(ffi::SQLITE_BUSY)).into(), Exit::TryLater),
            (ConfigError::File { path: "x".into(), source: io::Error::other("y") }.into(), Exit::Config),
            (InvalidToken(0).into(), Exit::Data),
            (sqlite_error(ffi::SQLITE_BUSY).into(), Exit::TryLater),
            (sqlite_error(ffi::SQLITE_CANTOPEN).into(), Exit::Unavailable),
            (sqlite_error(ffi::SQLITE_NOTADB).into(), Exit::Data),
            (sqlite_error(ffi::SQLITE_IOERR).into(), Exit::InputOutput),
            (sqlite_error(ffi::SQLITE_ERROR).into(), Exit::Bug),
            (io::Error::other("x").into(), Exit::InputOutput),
            (anyhow::anyhow!("untyped"), Exit::Bug),
        ];
        for (error, exit) in data {
            assert_eq!(code_of(&error), exit, "{error:?}");
            let wrapped = Err::<(), _>(error).context("while reading").expect_err("it is an error");
            assert_eq!(code_of(&wrapped), exit, "{wrapped:?}");
        }
    }
}
