//! A person's answer for a command in doubt.
//!
//! It is one of the things that an operator decides (`operator`), with a name of its own because it is
//! the only one that a command can't do without. Nothing but `in_doubt` is touched: an open attempt is
//! the dispatcher's.

use rusqlite::Connection;

use super::inspect;
use super::operator::{Act, Decision, decide};
pub use super::operator::{OperatorError as ResolveError, word};
use crate::rules::Answer;

/// Who answers what, and why.
#[derive(Debug, Clone, Copy)]
pub struct Resolution<'a> {
    /// The command's id.
    pub id: &'a str,
    /// The answer.
    pub answer: Answer,
    /// Who says so.
    pub who: &'a str,
    /// Why; kept in the audit table.
    pub reason: &'a str,
    /// The wall clock, in milliseconds since 1970.
    pub now_ms: i64,
}

/// Writes a person's answer and its audit entry; both are durable when this returns. Returns the
/// command as it stands then.
pub fn resolve(connection: &mut Connection, resolution: &Resolution<'_>) -> Result<inspect::Listed, ResolveError> {
    let Resolution { id, answer, who, reason, now_ms } = *resolution;
    let act = Act { who, reason, now_ms };
    let mut resolved = decide(connection, Decision::Resolve(answer), &[id], &act)?;
    resolved.pop().ok_or(ResolveError::Database(rusqlite::Error::QueryReturnedNoRows))
}
