//! What a worker is told when the database says no, and the count of such answers.
//!
//! The contract's texts are fixed, since a trigger can't put values into them; here they get the
//! numbers and names that a person needs. Nothing in this module may fail because of that: a refusal
//! that can't be explained or counted is still reported as a refusal.

use rusqlite::{Connection, OptionalExtension, params};
use std::fmt;

use crate::rules::{self, Code, FencingToken};

/// Why a worker's verb did not happen. Every variant means: leave the transaction function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The database refused, and the whole transaction is undone.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// A value is illegal (FP003), and the whole transaction is undone.
    #[error("FP003 illegal value: {field}: {problem}")]
    IllegalValue {
        /// Which value.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Another connection has the write lock, or wrote since this transaction first read. Start the
    /// whole transaction again, with BEGIN IMMEDIATE; repeating one statement can't help.
    #[error("the database is locked: start the whole transaction again, with BEGIN IMMEDIATE")]
    Locked,
    /// No transaction is open on the connection.
    #[error("no transaction is open on this connection")]
    NotInTransaction,
    /// The transaction ended before its commit: a refusal was passed over, or it was left by hand.
    #[error("the transaction was left before its commit, and nothing of it is kept")]
    Left,
    /// The database failed.
    #[error("database error")]
    Database(#[source] rusqlite::Error),
}

impl WorkerError {
    /// The code of the contract, if the database refused.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(refusal) => Some(refusal.code),
            Self::IllegalValue { .. } => Some(Code::IllegalValue),
            Self::Locked | Self::NotInTransaction | Self::Left | Self::Database(_) => None,
        }
    }

    pub(super) fn database(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked) => Self::Locked,
            _ => Self::Database(error),
        }
    }
}

/// A refusal, with what the database knew after it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The contract's code.
    pub code: Code,
    /// The scope that was asked for.
    pub scope: String,
    /// The token that was given; an acquisition has none.
    pub token: Option<FencingToken>,
    /// The scope's watermark, if the scope is known.
    pub watermark: Option<i64>,
    /// The holder bound to the watermark.
    pub current_holder: Option<String>,
    /// Who issues the scope's tokens.
    pub source: Option<String>,
    /// When the scope's lease runs out, in milliseconds since 1970.
    pub until_ms: Option<i64>,
    /// The command that was asked for, as it stands after the refusal; only where one was named.
    pub command: Option<Standing>,
}

/// Where a command stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Standing {
    /// The command.
    pub id: String,
    /// `pending`, `sending`, `in_doubt`, `parked`, `delivered` or `dead`.
    pub state: String,
    /// Why it is dead or parked.
    pub reason: Option<String>,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "command {} is {}", self.id, self.state)?;
        match &self.reason {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

impl Standing {
    /// What follows from it for somebody who wanted to end or to send it.
    fn advice(&self) -> &'static str {
        match self.state.as_str() {
            "sending" => ": too late, it may have been sent already",
            "in_doubt" => ": nobody knows whether it happened, so it waits for an operator to resolve it",
            _ => "",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.code.as_str(), self.code.meaning())?;
        if let (Some(command), Code::Live | Code::Final) = (&self.command, self.code) {
            return write!(f, "{command}{}", command.advice());
        }
        match self.token {
            Some(token) => write!(f, "{token} for scope {}", self.scope)?,
            None => write!(f, "scope {}", self.scope)?,
        }
        if let Some(watermark) = self.watermark {
            write!(f, ", the watermark is {watermark}")?;
        }
        match (self.code, &self.current_holder, &self.source) {
            (Code::OtherHolder | Code::Held, Some(holder), _) => write!(f, ", the holder is {holder}"),
            (Code::OtherSource, _, Some(source)) => write!(f, ", its source is {source}"),
            (_, _, _) => Ok(()),
        }
    }
}

/// What was asked of the database when it refused.
pub(super) struct Asked<'a> {
    pub(super) scope: &'a str,
    pub(super) token: Option<FencingToken>,
    /// The command that a verb is about.
    pub(super) id: Option<&'a str>,
    /// Finds the illegal value, where the database says that there is one.
    pub(super) illegal: &'a dyn Fn() -> Option<(&'static str, String)>,
}

/// Turns an error of a worker's statement into what the worker is told, and counts it.
pub(super) fn explain(connection: &Connection, error: rusqlite::Error, asked: &Asked<'_>) -> WorkerError {
    let Some(code) = code_of(&error) else { return WorkerError::database(error) };
    if code == Code::IllegalValue {
        return illegal(asked);
    }
    let refusal = describe(connection, code, asked);
    // Before the rollback a row here would be undone with the rest, or be part of the caller's work.
    if counts(code) && connection.is_autocommit() {
        // Best effort: a full disk or a busy writer must not hide the refusal itself.
        drop(count(connection, &refusal));
    }
    WorkerError::Refused(Box::new(refusal))
}

pub(super) fn code_of(error: &rusqlite::Error) -> Option<Code> {
    let rusqlite::Error::SqliteFailure(failure, Some(message)) = error else { return None };
    let raised = failure.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_TRIGGER;
    if raised { Code::find(message) } else { None }
}

fn describe(connection: &Connection, code: Code, asked: &Asked<'_>) -> Refusal {
    let known = connection
        .query_row("SELECT token, holder, source, until_ms FROM outbox_lease WHERE scope = ?1", [asked.scope], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })
        .optional()
        .unwrap_or_default()
        .unwrap_or_default();
    let (watermark, current_holder, source, until_ms) = known;
    let scope = asked.scope.to_owned();
    let command = asked.id.and_then(|id| standing(connection, id).ok().flatten());
    Refusal { code, scope, token: asked.token, watermark, current_holder, source, until_ms, command }
}

fn standing(connection: &Connection, id: &str) -> rusqlite::Result<Option<Standing>> {
    let sql = "SELECT state, reason FROM outbox_state
        WHERE n = coalesce((SELECT n FROM outbox WHERE id = ?1), (SELECT n FROM outbox_state WHERE minted_id = ?1))";
    let row = |row: &rusqlite::Row<'_>| Ok(Standing { id: id.to_owned(), state: row.get(0)?, reason: row.get(1)? });
    connection.query_row(sql, [id], row).optional()
}

/// A refusal that the contract has no statement for. The transaction is undone here, as the database
/// undoes it after its own refusals.
pub(super) fn refuse(connection: &Connection, code: Code, asked: &Asked<'_>) -> WorkerError {
    if let Err(error) = connection.execute_batch("ROLLBACK") {
        return WorkerError::database(error);
    }
    if code == Code::IllegalValue {
        illegal(asked)
    } else {
        WorkerError::Refused(Box::new(describe(connection, code, asked)))
    }
}

fn illegal(asked: &Asked<'_>) -> WorkerError {
    let unnamed = || ("value", "it is not allowed here".to_owned());
    let (field, problem) = (asked.illegal)().unwrap_or_else(unnamed);
    WorkerError::IllegalValue { field, problem }
}

const fn counts(code: Code) -> bool {
    match code {
        Code::StaleToken | Code::OtherHolder | Code::NeverSealed | Code::JumpsTooFar | Code::OtherSource => true,
        Code::IllegalValue
        | Code::IdExists
        | Code::Immutable
        | Code::Live
        | Code::MayNotFall
        | Code::KeyExists
        | Code::Final
        | Code::Held => false,
    }
}

fn count(connection: &Connection, refusal: &Refusal) -> rusqlite::Result<()> {
    let counted = rusqlite::Transaction::new_unchecked(connection, rusqlite::TransactionBehavior::Immediate)?;
    let watermark = refusal.watermark.unwrap_or(0);
    let token = refusal.token.map_or(watermark, FencingToken::get);
    let changed = counted.execute(
        "UPDATE outbox_refusal SET token = ?2, watermark = ?3, count = count + 1,
           last_ms = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE scope = ?1",
        params![refusal.scope, token, watermark],
    )?;
    if changed == 0 {
        counted.execute(
            "INSERT INTO outbox_refusal(scope, token, watermark, count, last_ms)
               VALUES (?1, ?2, ?3, 1, CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))",
            params![refusal.scope, token, watermark],
        )?;
    }
    counted.commit()
}

/// The first name that is illegal, of those that are given.
pub(super) fn illegal_name(names: &[(&'static str, Option<&str>)]) -> Option<(&'static str, String)> {
    names.iter().find_map(|(field, text)| {
        let check = if *field == "lane" { rules::check_lane } else { rules::check_name };
        text.and_then(|text| check(text).err()).map(|problem| (*field, problem.to_string()))
    })
}
