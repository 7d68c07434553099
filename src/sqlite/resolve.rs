//! A person's answer for a command in doubt.
//!
//! The rules decide what follows from an answer; here it is looked up, written and audited in one
//! transaction that holds the write lock from its first read, so that a dispatcher or a second person
//! can't answer in between. Nothing but `in_doubt` is touched: an open attempt is the dispatcher's.

use rusqlite::{Connection, Transaction, TransactionBehavior, params};
use serde_json::json;

use super::{facts, inspect};
use crate::rules::{Answer, CommandFacts, Event, IllegalTransition, Limits, Reason, State, next};

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

/// Why an answer was not taken. Nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// There is no such command.
    #[error("there is no command with the id {id}")]
    NotFound {
        /// As it was given.
        id: String,
    },
    /// It isn't in doubt, so there is nothing to answer.
    #[error("command {id} is {}, not in doubt", describe(*state))]
    NotInDoubt {
        /// The command.
        id: String,
        /// Where it stands.
        state: State,
    },
    /// The database failed.
    #[error("database error")]
    Database(#[from] rusqlite::Error),
}

/// Writes a person's answer and its audit entry; both are durable when this returns. Returns the
/// command as it stands then.
pub fn resolve(connection: &mut Connection, resolution: &Resolution<'_>) -> Result<inspect::Listed, ResolveError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let not_found = || ResolveError::NotFound { id: resolution.id.to_owned() };
    let n = inspect::find(&transaction, resolution.id)?.ok_or_else(not_found)?;
    let before = facts::load(&transaction, n)?;
    let after = next(
        &before,
        Event::Resolve(resolution.answer),
        &facts::place(&transaction, n, &Limits::NONE, resolution.now_ms, 0)?,
    )
    .map_err(|IllegalTransition { state, event: _ }| ResolveError::NotInDoubt {
        id: resolution.id.to_owned(),
        state,
    })?;
    facts::store(&transaction, n, &after, resolution.now_ms)?;
    audit(&transaction, n, resolution, &before, &after)?;
    let resolved = inspect::command(&transaction, n)?;
    transaction.commit()?;
    Ok(resolved)
}

fn audit(
    transaction: &Transaction<'_>,
    n: i64,
    resolution: &Resolution<'_>,
    before: &CommandFacts,
    after: &CommandFacts,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO outbox_audit(at_ms, who, verb, id, scope, reason, before, after)
        SELECT ?2, ?3, 'resolve', ?4, scope, ?5, ?6, ?7 FROM outbox_state WHERE n = ?1";
    let answer = word(resolution.answer);
    let mut noted = noted(after);
    noted["answer"] = answer.into();
    let values = params![
        n,
        resolution.now_ms,
        resolution.who,
        resolution.id,
        resolution.reason,
        self::noted(before).to_string(),
        noted.to_string(),
    ];
    transaction.execute(sql, values).map(drop)
}

fn noted(facts: &CommandFacts) -> serde_json::Value {
    json!({
        "state": facts.state.as_str(),
        "reason": facts.state.reason().map(Reason::as_str),
        "effect": facts.effect.as_str(),
        "attempt_no": facts.attempt_no,
        "tries": facts.tries,
        "first_begun_ms": facts.first_begun_ms,
        "first_unknown_ms": facts.first_unknown_ms,
    })
}

/// The word that the command line and the audit table use for an answer.
pub const fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Delivered => "delivered",
        Answer::NotDelivered => "not-delivered",
        Answer::GivenUp => "given-up",
    }
}

fn describe(state: State) -> String {
    match state.reason() {
        Some(reason) => format!("{} ({})", state.as_str(), reason.as_str()),
        None => state.as_str().to_owned(),
    }
}
