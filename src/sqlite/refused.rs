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
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: ", self.code.as_str(), self.code.meaning())?;
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
    /// Finds the illegal value, where the database says that there is one.
    pub(super) illegal: &'a dyn Fn() -> Option<(&'static str, String)>,
}

/// Turns an error of a worker's statement into what the worker is told, and counts it.
pub(super) fn explain(connection: &Connection, error: rusqlite::Error, asked: &Asked<'_>) -> WorkerError {
    let Some(code) = code_of(&error) else { return WorkerError::database(error) };
    if code == Code::IllegalValue {
        let unnamed = || ("value", "it is not allowed here".to_owned());
        let (field, problem) = (asked.illegal)().unwrap_or_else(unnamed);
        return WorkerError::IllegalValue { field, problem };
    }
    let refusal = describe(connection, code, asked);
    // Before the rollback a row here would be undone with the rest, or be part of the caller's work.
    if counts(code) && connection.is_autocommit() {
        // Best effort: a full disk or a busy writer must not hide the refusal itself.
        drop(count(connection, &refusal));
    }
    WorkerError::Refused(Box::new(refusal))
}

/// Refuses in the database's place, where it can't see that it should: the whole transaction is undone.
pub(super) fn refuse(connection: &Connection, code: Code, asked: &Asked<'_>) -> WorkerError {
    if let Err(error) = connection.execute_batch("ROLLBACK") {
        return WorkerError::database(error);
    }
    WorkerError::Refused(Box::new(describe(connection, code, asked)))
}

fn code_of(error: &rusqlite::Error) -> Option<Code> {
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
    Refusal { code, scope, token: asked.token, watermark, current_holder, source, until_ms }
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
