//! What is paused: one destination, one scope, or everything.
//!
//! A pause is a row, so it survives restarts and holds for every dispatcher of the database. It only
//! keeps attempts from being begun; one that was begun runs to its outcome. Each change is an
//! operator's, with a reason, and audited.

use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use serde_json::{Value, json};

use super::inspect::Listed;
use super::operator::{Act, Entry, OperatorError, audit};
use crate::rules;

/// What a pause is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Every command.
    Everything,
    /// Every command of a scope.
    Scope(String),
    /// Every command to a destination.
    Destination {
        /// Its kind.
        kind: String,
        /// Its name, or a URL.
        destination: String,
    },
}

impl Target {
    /// Kind, destination and scope, as the table has them; `''` is every one.
    fn columns(&self) -> [&str; 3] {
        match self {
            Self::Everything => ["", "", ""],
            Self::Scope(scope) => ["", "", scope],
            Self::Destination { kind, destination } => [kind, destination, ""],
        }
    }

    fn check(&self) -> Result<(), OperatorError> {
        let names: &[(&'static str, &str)] = match self {
            Self::Everything => &[],
            Self::Scope(scope) => &[("scope", scope)],
            Self::Destination { kind, destination } => &[("kind", kind), ("destination", destination)],
        };
        for (field, name) in names {
            rules::check_name(name)
                .map_err(|problem| OperatorError::Illegal { field, problem: problem.to_string() })?;
        }
        Ok(())
    }
}

/// A pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// Kind of the destination; empty: every one.
    pub kind: String,
    /// The destination; empty: every one.
    pub destination: String,
    /// The scope; empty: every one.
    pub scope: String,
    /// When it ends by itself; `None`: when it is resumed.
    pub until_ms: Option<i64>,
    /// Since when.
    pub at_ms: i64,
    /// Who paused it.
    pub who: String,
    /// Why.
    pub reason: String,
}

impl Pause {
    /// Whether a command to this destination, in this scope, is held up.
    pub fn covers(&self, command: &Listed) -> bool {
        let fits = |mine: &str, its: &str| mine.is_empty() || mine == its;
        fits(&self.kind, &command.kind)
            && fits(&self.destination, &command.destination)
            && fits(&self.scope, &command.scope)
    }

    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            kind: row.get(0)?,
            destination: row.get(1)?,
            scope: row.get(2)?,
            until_ms: row.get(3)?,
            at_ms: row.get(4)?,
            who: row.get(5)?,
            reason: row.get(6)?,
        })
    }
}

const COLUMNS: &str = "kind, destination, scope, until_ms, at_ms, who, reason";

/// What is paused now; a pause that is over is none.
pub fn pauses(connection: &Connection, now_ms: i64) -> rusqlite::Result<Vec<Pause>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM outbox_pause WHERE until_ms IS NULL OR until_ms > ?1 ORDER BY kind, destination, scope"
    );
    connection.prepare(&sql)?.query_map([now_ms], Pause::read)?.collect()
}

/// Pauses, from the dispatcher's next look on; durable when this returns. A pause that is there already
/// gets the new end and reason.
pub fn pause(
    connection: &mut Connection,
    target: &Target,
    until_ms: Option<i64>,
    act: &Act<'_>,
) -> Result<Pause, OperatorError> {
    target.check()?;
    if until_ms.is_some_and(|until_ms| until_ms <= act.now_ms) {
        return Err(OperatorError::Illegal { field: "until", problem: "it is over already".to_owned() });
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let before = find(&transaction, target)?;
    let [kind, destination, scope] = target.columns();
    let sql = if before.is_some() {
        "UPDATE outbox_pause SET until_ms = ?4, at_ms = ?5, who = ?6, reason = ?7
            WHERE kind = ?1 AND destination = ?2 AND scope = ?3"
    } else {
        "INSERT INTO outbox_pause(kind, destination, scope, until_ms, at_ms, who, reason) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)"
    };
    transaction.execute(sql, params![kind, destination, scope, until_ms, act.now_ms, act.who, act.reason])?;
    let after = find(&transaction, target)?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
    note(&transaction, "pause", act, before.as_ref(), Some(&after))?;
    transaction.commit()?;
    Ok(after)
}

/// Takes a pause away; the dispatcher is woken by the commit. Returns the pause that was there. Fails
/// with [`OperatorError::NotPaused`] if there was none.
pub fn resume(connection: &mut Connection, target: &Target, act: &Act<'_>) -> Result<Pause, OperatorError> {
    target.check()?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let Some(before) = find(&transaction, target)? else {
        return Err(OperatorError::NotPaused(target.to_string()));
    };
    let sql = "DELETE FROM outbox_pause WHERE kind = ?1 AND destination = ?2 AND scope = ?3";
    transaction.execute(sql, target.columns())?;
    note(&transaction, "resume", act, Some(&before), None)?;
    transaction.commit()?;
    Ok(before)
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Everything => f.write_str("everything"),
            Self::Scope(scope) => write!(f, "scope {scope}"),
            Self::Destination { kind, destination } => write!(f, "{kind}/{destination}"),
        }
    }
}

fn find(transaction: &Transaction<'_>, target: &Target) -> rusqlite::Result<Option<Pause>> {
    let sql = format!("SELECT {COLUMNS} FROM outbox_pause WHERE kind = ?1 AND destination = ?2 AND scope = ?3");
    transaction.query_row(&sql, target.columns(), Pause::read).optional()
}

fn note(
    transaction: &Transaction<'_>,
    verb: &'static str,
    act: &Act<'_>,
    before: Option<&Pause>,
    after: Option<&Pause>,
) -> rusqlite::Result<()> {
    let scope = after.or(before).map(|pause| pause.scope.as_str()).filter(|scope| !scope.is_empty());
    let json = |pause: Option<&Pause>| pause.map_or(Value::Null, noted);
    audit(transaction, act, &Entry { verb, id: None, scope, before: json(before), after: json(after) })
}

fn noted(pause: &Pause) -> Value {
    json!({
        "kind": pause.kind,
        "destination": pause.destination,
        "scope": pause.scope,
        "until_ms": pause.until_ms,
        "who": pause.who,
        "reason": pause.reason,
    })
}
