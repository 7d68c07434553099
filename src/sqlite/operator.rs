//! What an operator decides about commands: cancel, adopt, discard, resolve, reissue.
//!
//! A holder is fenced; an operator gives a reason instead, and what was done, by whom and why stands in
//! the audit table, with the state before and after. The rules decide what may be done; it is looked up,
//! written and audited in one transaction that holds the write lock from its first read, so that neither
//! a dispatcher nor a second person can decide in between. Of several commands all are decided or none.

use rusqlite::{Connection, Transaction, TransactionBehavior, params};
use serde_json::{Value, json};

use super::inspect::{self, Listed};
use super::worker::REISSUE;
use super::{facts, refused};
use crate::rules::{self, Answer, Code, CommandFacts, Event, IllegalTransition, Limits, Reason, State, next};

/// How many commands one act decides at most; the write lock is held as long.
pub const BULK_MAX: usize = 10_000;

/// Who acts, why, and when.
#[derive(Debug, Clone, Copy)]
pub struct Act<'a> {
    /// Who.
    pub who: &'a str,
    /// Why; kept in the audit table.
    pub reason: &'a str,
    /// The wall clock, in milliseconds since 1970; what is written is no earlier than the write lock.
    pub now_ms: i64,
}

impl Act<'_> {
    /// The same once the write lock is held: what it waited for must not seem to come after it.
    fn locked(&self) -> Self {
        Self { now_ms: self.now_ms.max(crate::clock::wall_ms()), ..*self }
    }
}

/// What is decided about a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// An answer for one in doubt.
    Resolve(Answer),
    /// End what waits, or was begun and may not send yet.
    Cancel,
    /// Send a parked one after all, with fresh tries.
    Adopt,
    /// End a parked one.
    Discard,
}

impl Decision {
    /// The word in the audit table.
    pub const fn verb(self) -> &'static str {
        match self {
            Self::Resolve(_) => "resolve",
            Self::Cancel => "cancel",
            Self::Adopt => "adopt",
            Self::Discard => "discard",
        }
    }

    const fn event(self) -> Event {
        match self {
            Self::Resolve(answer) => Event::Resolve(answer),
            Self::Cancel => Event::Cancel,
            Self::Adopt => Event::Adopt,
            Self::Discard => Event::Discard,
        }
    }

    /// Why a command in this state can't have it.
    const fn against(self, state: State) -> &'static str {
        match (self, state) {
            (Self::Cancel, State::Sending { .. }) => ": too late, it may have been sent already",
            (Self::Cancel, State::InDoubt) => ": nobody knows whether it happened, so resolve it",
            (Self::Resolve(_), _) => ", not in doubt",
            (Self::Adopt | Self::Discard, state) if state.is_live() => ", not parked",
            (Self::Cancel | Self::Adopt | Self::Discard, _) => "",
        }
    }
}

/// The word that the command line and the audit table use for an answer.
pub const fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Delivered => "delivered",
        Answer::NotDelivered => "not-delivered",
        Answer::GivenUp => "given-up",
    }
}

/// Why an operator's act was not done. Nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// There is no such command.
    #[error("there is no command with the id {id}")]
    NotFound {
        /// As it was given.
        id: String,
    },
    /// Where the command stands, it can't be done.
    #[error("{} {}: command {id} is {}{against}", code.as_str(), code.meaning(), describe(*state))]
    Refused {
        /// FP007 for a live command, FP011 for a final one.
        code: Code,
        /// The command.
        id: String,
        /// Where it stands.
        state: State,
        /// What speaks against it.
        against: &'static str,
    },
    /// Its content isn't there any more.
    #[error("the content of command {id} was erased")]
    Erased {
        /// The command.
        id: String,
    },
    /// A value is illegal.
    #[error("FP003 illegal value: {field}: {problem}")]
    Illegal {
        /// Which value.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// There is no such scope.
    #[error("there is no scope {scope}")]
    UnknownScope {
        /// As it was given.
        scope: String,
    },
    /// The contract said no.
    #[error("{} {}", .0.as_str(), .0.meaning())]
    Contract(Code),
    /// It isn't paused.
    #[error("{0} is not paused")]
    NotPaused(String),
    /// More than one act may decide.
    #[error("{0} commands are more than the {BULK_MAX} that one act may decide")]
    TooMany(usize),
    /// The database failed.
    #[error("database error")]
    Database(#[source] rusqlite::Error),
}

impl OperatorError {
    /// The code of the contract that says the same.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } | Self::Contract(code) => Some(*code),
            Self::NotFound { .. } | Self::Erased { .. } | Self::Illegal { .. } | Self::UnknownScope { .. } => {
                Some(Code::IllegalValue)
            }
            Self::NotPaused(_) | Self::TooMany(_) | Self::Database(_) => None,
        }
    }
}

impl From<rusqlite::Error> for OperatorError {
    fn from(error: rusqlite::Error) -> Self {
        refused::code_of(&error).map_or(Self::Database(error), Self::Contract)
    }
}

/// Decides about these commands, all of them or none; durable when this returns. Returns each as it
/// stands then.
pub fn decide(
    connection: &mut Connection,
    decision: Decision,
    ids: &[&str],
    act: &Act<'_>,
) -> Result<Vec<Listed>, OperatorError> {
    if ids.len() > BULK_MAX {
        return Err(OperatorError::TooMany(ids.len()));
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let act = &act.locked();
    let decided = ids.iter().map(|id| decide_one(&transaction, decision, id, act)).collect::<Result<_, _>>()?;
    transaction.commit()?;
    Ok(decided)
}

/// What would become of each command, without doing it: as it stands now, or why it can't be.
pub fn rehearse(connection: &Connection, decision: Decision, ids: &[&str], now_ms: i64) -> Vec<Rehearsed> {
    let one = |id: &&str| (*id).to_owned();
    let result = |id: &&str| Ok(inspect::command(connection, ask(connection, decision, id, now_ms)?.n)?);
    ids.iter().map(|id| Rehearsed { id: one(id), command: result(id) }).collect()
}

/// One command of a rehearsal.
#[derive(Debug)]
pub struct Rehearsed {
    /// As it was given.
    pub id: String,
    /// As it stands now, or why the decision doesn't fit it.
    pub command: Result<Listed, OperatorError>,
}

/// A command before and after a decision.
struct Asked {
    n: i64,
    before: CommandFacts,
    after: CommandFacts,
}

fn ask(connection: &Connection, decision: Decision, id: &str, now_ms: i64) -> Result<Asked, OperatorError> {
    let n = find(connection, id)?;
    let before = facts::load(connection, n)?;
    let place = facts::place(connection, n, &Limits::NONE, now_ms, 0)?;
    match next(&before, decision.event(), &place) {
        Ok(after) => Ok(Asked { n, before, after }),
        Err(IllegalTransition { state, event: _ }) => Err(refusal(id, state, decision.against(state))),
    }
}

fn find(connection: &Connection, id: &str) -> Result<i64, OperatorError> {
    inspect::find(connection, id)?.ok_or_else(|| OperatorError::NotFound { id: id.to_owned() })
}

fn refusal(id: &str, state: State, against: &'static str) -> OperatorError {
    let code = if state.is_live() { Code::Live } else { Code::Final };
    OperatorError::Refused { code, id: id.to_owned(), state, against }
}

fn decide_one(
    transaction: &Transaction<'_>,
    decision: Decision,
    id: &str,
    act: &Act<'_>,
) -> Result<Listed, OperatorError> {
    let Asked { n, before, after } = ask(transaction, decision, id, act.now_ms)?;
    match decision {
        Decision::Cancel => recall(transaction, n, act.now_ms)?,
        Decision::Adopt | Decision::Discard | Decision::Resolve(_) => {}
    }
    facts::store(transaction, n, &after, act.now_ms)?;
    if decision == Decision::Adopt {
        transaction.prepare_cached(ADOPTED)?.execute([n])?;
    }
    let command = inspect::command(transaction, n)?;
    let mut noted_after = noted(&after);
    if let Decision::Resolve(answer) = decision {
        noted_after["answer"] = word(answer).into();
    }
    let entry = Entry {
        verb: decision.verb(),
        id: Some(id),
        scope: Some(&command.scope),
        before: noted(&before),
        after: noted_after,
    };
    audit(transaction, act, &entry)?;
    Ok(command)
}

/// The open attempt ends with its command. It isn't armed, or the rules had said no; its arm will
/// change no row, and nothing is sent.
fn recall(transaction: &Transaction<'_>, n: i64, now_ms: i64) -> rusqlite::Result<()> {
    let sql = r#"UPDATE outbox_attempt SET settled_ms = ?2, outcome = 'deferred', evidence = '{"phase":"recalled"}'
        WHERE n = ?1 AND settled_ms IS NULL AND armed_ms IS NULL"#;
    transaction.prepare_cached(sql)?.execute(params![n, now_ms]).map(drop)
}

/// The take-over that parked it leaves it alone from now on.
const ADOPTED: &str = "UPDATE outbox_state SET (adopted_era, adopted_token) =
    (SELECT era, watermark FROM outbox_scope s WHERE s.scope = outbox_state.scope) WHERE n = ?1";

/// Makes new commands from finished ones, all of them or none, each under its scope's current token, with
/// a new id and the next seq, without a key and without times. `new_id` is for one alone. Durable when
/// this returns; returns the new commands.
pub fn reissue(
    connection: &mut Connection,
    ids: &[&str],
    new_id: Option<&str>,
    act: &Act<'_>,
) -> Result<Vec<Listed>, OperatorError> {
    if ids.len() > BULK_MAX {
        return Err(OperatorError::TooMany(ids.len()));
    }
    if let Some(problem) = new_id.and_then(|id| rules::check_id(id).err()) {
        return Err(OperatorError::Illegal { field: "new id", problem: problem.to_string() });
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let act = &act.locked();
    let reissued = ids.iter().map(|id| reissue_one(&transaction, id, new_id, act)).collect::<Result<_, _>>()?;
    transaction.commit()?;
    Ok(reissued)
}

fn reissue_one(
    transaction: &Transaction<'_>,
    id: &str,
    new_id: Option<&str>,
    act: &Act<'_>,
) -> Result<Listed, OperatorError> {
    let n = find(transaction, id)?;
    let before = facts::load(transaction, n)?;
    if before.state.is_live() {
        return Err(refusal(id, before.state, ", so it can still go out itself"));
    }
    let current = current(transaction, n)?;
    if current.erased {
        return Err(OperatorError::Erased { id: id.to_owned() });
    }
    if current.token == 0 {
        let problem = format!("scope {} has no token since its rebase", current.scope);
        return Err(OperatorError::Illegal { field: "token", problem });
    }
    let values = params![id, current.token, current.holder, current.source, new_id];
    if transaction.prepare_cached(REISSUE)?.execute(values)? == 0 {
        return Err(OperatorError::Contract(Code::IdExists));
    }
    let command = inspect::command(transaction, transaction.last_insert_rowid())?;
    let (token, seq) = (command.token.to_string(), command.seq.to_string());
    let after = json!({ "reissued_as": command.id, "token": token, "seq": seq });
    let entry = Entry { verb: "reissue", id: Some(id), scope: Some(&command.scope), before: noted(&before), after };
    audit(transaction, act, &entry)?;
    Ok(command)
}

/// The scope's current token and holder, under which an operator writes.
struct Current {
    scope: String,
    token: i64,
    holder: Option<String>,
    source: Option<String>,
    erased: bool,
}

fn current(transaction: &Transaction<'_>, n: i64) -> rusqlite::Result<Current> {
    let sql = "SELECT s.scope, s.watermark, s.holder, s.source, x.erased_ms IS NOT NULL
        FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope WHERE x.n = ?1";
    transaction.query_row(sql, [n], |row| {
        Ok(Current {
            scope: row.get(0)?,
            token: row.get(1)?,
            holder: row.get(2)?,
            source: row.get(3)?,
            erased: row.get(4)?,
        })
    })
}

/// What of the commands in doubt is meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// One scope.
    pub scope: Option<String>,
    /// One kind.
    pub kind: Option<String>,
    /// One destination.
    pub destination: Option<String>,
    /// In doubt since this time or longer.
    pub until_ms: Option<i64>,
}

/// The ids of the commands in doubt that are meant, oldest doubt first; at most one more than
/// [`BULK_MAX`].
pub fn in_doubt(connection: &Connection, selection: &Selection) -> rusqlite::Result<Vec<String>> {
    let sql = "SELECT coalesce(o.id, x.minted_id) FROM outbox_state x JOIN outbox o ON o.n = x.n
        WHERE x.state IN ('in_doubt', 'parked', 'sending') AND x.state = 'in_doubt'
        AND (?1 IS NULL OR x.scope = ?1) AND (?2 IS NULL OR o.kind = ?2) AND (?3 IS NULL OR o.destination = ?3)
        AND (?4 IS NULL OR x.updated_ms <= ?4) ORDER BY x.updated_ms, x.n LIMIT ?5";
    let Selection { scope, kind, destination, until_ms } = selection;
    let limit = i64::try_from(BULK_MAX + 1).unwrap_or(i64::MAX);
    let mut statement = connection.prepare(sql)?;
    statement.query_map(params![scope, kind, destination, until_ms, limit], |row| row.get(0))?.collect()
}

/// One line of the audit table.
pub(super) struct Entry<'a> {
    pub(super) verb: &'static str,
    pub(super) id: Option<&'a str>,
    pub(super) scope: Option<&'a str>,
    pub(super) before: Value,
    pub(super) after: Value,
}

/// Writes what an operator did; part of the same transaction as the act itself.
pub(super) fn audit(transaction: &Transaction<'_>, act: &Act<'_>, entry: &Entry<'_>) -> rusqlite::Result<()> {
    let sql = "INSERT INTO outbox_audit(at_ms, who, verb, id, scope, reason, before, after)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    let json = |value: &Value| (!value.is_null()).then(|| value.to_string());
    let (before, after) = (json(&entry.before), json(&entry.after));
    let values = params![act.now_ms, act.who, entry.verb, entry.id, entry.scope, act.reason, before, after];
    transaction.prepare_cached(sql)?.execute(values).map(drop)
}

fn noted(facts: &CommandFacts) -> Value {
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

fn describe(state: State) -> String {
    match state.reason() {
        Some(reason) => format!("{} ({})", state.as_str(), reason.as_str()),
        None => state.as_str().to_owned(),
    }
}
