//! The operator's view: what waits, what failed, what is stuck.
//!
//! Everything here only reads. A question about the present must not scan what is finished: it goes by
//! the lane rows and the partial indexes over live and dead commands, so that it costs the same after
//! ten million deliveries. Texts are read leniently, since one row that isn't UTF-8 must not hide the
//! others; payloads and headers are read only where they are asked for.

mod status;

use rusqlite::types::{ToSql, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row};
pub use status::{Blocked, Counts, Failing, Load, PART_ROWS_MAX, Refusal, Reign, Since, Status, status};
pub(super) use status::{reign, waiting};

/// The words of live states, as the partial indexes have them; a query must repeat a list literally,
/// or the planner doesn't use the index.
const LIVE: &str = "state IN ('pending', 'sending', 'in_doubt', 'parked')";
const WAITS: &str = "state IN ('in_doubt', 'parked', 'sending')";

const COMMAND: &str = "u.n, u.id, u.scope, u.lane, u.seq, u.token, u.holder, u.source, u.key, u.kind, u.destination,
    u.state, u.reason, u.effect, u.attempt_no, u.tries, u.inserted_ms, u.due_ms, u.expires_at_ms, u.updated_ms";
const COMMAND_COLUMNS: usize = 20;

/// A command as every listing shows it: a row of `outbox_status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Number of the row in `outbox`.
    pub n: i64,
    /// Unique for ever; the identity that the receiver sees.
    pub id: String,
    /// What is fenced as one.
    pub scope: String,
    /// The line inside the scope; may be empty.
    pub lane: String,
    /// Place in the scope.
    pub seq: i64,
    /// The fencing token that it was accepted under.
    pub token: i64,
    /// The holder that its writer gave.
    pub holder: Option<String>,
    /// The source that its writer gave.
    pub source: Option<String>,
    /// The writer's idempotency key; `None` also once it was given back.
    pub key: Option<String>,
    /// `webhook`, `email`, or another.
    pub kind: String,
    /// A named endpoint or relay, or a URL.
    pub destination: String,
    /// Where it stands.
    pub state: String,
    /// Why it is dead or parked.
    pub reason: Option<String>,
    /// What can have happened outside: none, possible, done.
    pub effect: String,
    /// Number of the latest attempt.
    pub attempt_no: i64,
    /// Tries that count.
    pub tries: i64,
    /// When it was inserted.
    pub inserted_ms: i64,
    /// When it may be begun next; `None` unless pending.
    pub due_ms: Option<i64>,
    /// When its time is over.
    pub expires_at_ms: Option<i64>,
    /// When its state changed last.
    pub updated_ms: i64,
}

/// What a listing is narrowed to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// One scope.
    pub scope: Option<String>,
    /// One lane name.
    pub lane: Option<String>,
    /// Some states; empty means all.
    pub states: Vec<StateWord>,
    /// One kind.
    pub kind: Option<String>,
    /// One destination.
    pub destination: Option<String>,
    /// How many rows at most.
    pub limit: u32,
}

/// A state that a listing can be narrowed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateWord {
    /// Waits: new, or due again later.
    Pending,
    /// An attempt is open.
    Sending,
    /// Its effect may or may not have happened.
    InDoubt,
    /// Waits for the holder or an operator.
    Parked,
    /// The destination has it.
    Delivered,
    /// Ended otherwise.
    Dead,
}

impl StateWord {
    /// The states in which a command holds its place in the lane.
    pub const LIVE: [Self; 4] = [Self::Pending, Self::Sending, Self::InDoubt, Self::Parked];
    /// The states that never change again.
    pub const FINAL: [Self; 2] = [Self::Delivered, Self::Dead];

    /// The word that the database uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sending => "sending",
            Self::InDoubt => "in_doubt",
            Self::Parked => "parked",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
        }
    }
}

/// One attempt of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Its number, from 1, never reused.
    pub attempt_no: i64,
    /// The dispatcher's reign that made it.
    pub epoch: i64,
    /// The policy that it was begun under.
    pub on_unknown: String,
    /// When it began.
    pub begun_ms: i64,
    /// From when on its effect was possible.
    pub armed_ms: Option<i64>,
    /// When it ended; `None` while it is open.
    pub settled_ms: Option<i64>,
    /// What was known then.
    pub outcome: Option<String>,
    /// What was seen, as JSON.
    pub evidence: Option<String>,
}

/// One thing that an operator did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at_ms: i64,
    /// Who.
    pub who: String,
    /// What.
    pub verb: String,
    /// Why.
    pub reason: String,
    /// The state before, as JSON.
    pub before: Option<String>,
    /// The state after, as JSON.
    pub after: Option<String>,
}

/// Everything about one command.
#[derive(Debug, Clone)]
pub struct Detail {
    /// As listings show it.
    pub command: Listed,
    /// When its writer wanted it to be sent at the earliest.
    pub not_before_ms: Option<i64>,
    /// W3C trace context of the writer.
    pub traceparent: Option<String>,
    /// The id of the finished command that it was made from.
    pub reissue_of: Option<String>,
    /// The writer's own headers, as stored. They can hold secrets.
    pub headers: Option<String>,
    /// Whether the payload came from `payload_bytes`.
    pub payload_is_binary: bool,
    /// Size of the payload.
    pub payload_bytes: i64,
    /// Why it ended without an attempt, in words.
    pub why: Option<String>,
    /// When its first attempt began; `max_age` counts from here.
    pub first_begun_ms: Option<i64>,
    /// When the first attempt that ended unknown began; `resend_window` counts from here.
    pub first_unknown_ms: Option<i64>,
    /// When payload and headers were erased.
    pub erased_ms: Option<i64>,
    /// The scope's greatest accepted token.
    pub watermark: i64,
    /// Live commands of its lane that go before it; `None` once it is final.
    pub ahead: Option<i64>,
    /// The head of its lane, where that is another command.
    pub head: Option<Listed>,
    /// Attempts, oldest first.
    pub attempts: Vec<Attempt>,
    /// What operators did with it, oldest first.
    pub audit: Vec<AuditEntry>,
}

/// A scope as `outbox_lease` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The scope.
    pub scope: String,
    /// The greatest accepted token.
    pub token: i64,
    /// The holder bound to it.
    pub holder: Option<String>,
    /// Who issues the scope's tokens.
    pub source: Option<String>,
    /// When the lease was granted or renewed.
    pub granted_ms: Option<i64>,
    /// When it runs out; `None` without a lease, and after a release.
    pub until_ms: Option<i64>,
}

/// Version of the contract in this database, `None` where there is no outbox of ours.
pub fn contract_version(connection: &Connection) -> rusqlite::Result<Option<(i64, i64)>> {
    if !connection.table_exists(None, "outbox_meta")? || !connection.table_exists(None, "outbox_state")? {
        return Ok(None);
    }
    connection.query_row("SELECT major, minor FROM outbox_meta", [], |row| Ok((row.get(0)?, row.get(1)?))).optional()
}

/// Commands that fit the filter, newest first.
pub fn list(connection: &Connection, filter: &Filter) -> rusqlite::Result<Vec<Listed>> {
    let (sql, values) = list_query(filter);
    connection.prepare(&sql)?.query_map(values.as_slice(), listed)?.collect()
}

fn list_query(filter: &Filter) -> (String, Vec<&dyn ToSql>) {
    let mut values: Vec<&dyn ToSql> = vec![&filter.limit];
    let mut terms = state_terms(filter);
    let texts = [
        ("scope", &filter.scope),
        ("lane", &filter.lane),
        ("kind", &filter.kind),
        ("destination", &filter.destination),
    ];
    for (column, text) in texts {
        if let Some(text) = text {
            values.push(text);
            terms.push(format!("u.{column} = ?{}", values.len()));
            if column == "scope" && is_all(filter, &StateWord::LIVE) {
                terms.push(format!(
                    "u.n IN (SELECT n FROM outbox_state INDEXED BY outbox_state_live WHERE scope = ?{} AND {LIVE})",
                    values.len()
                ));
            }
        }
    }
    let terms = if terms.is_empty() { "1".to_owned() } else { terms.join(" AND ") };
    let sql = format!("SELECT {COMMAND} FROM outbox_status u WHERE {terms} ORDER BY {} DESC LIMIT ?1", order(filter));
    (sql, values)
}

/// Newest first, each time by what doesn't lead the planner away from the index that fits: states that
/// are rare are sorted, everything else is read in order until there is enough.
fn order(filter: &Filter) -> &'static str {
    if is_all(filter, &StateWord::LIVE) || is_all(filter, &[StateWord::Dead]) {
        "+u.n"
    } else if filter.scope.is_some() {
        "u.seq"
    } else {
        "u.n"
    }
}

fn is_all(filter: &Filter, states: &[StateWord]) -> bool {
    !filter.states.is_empty() && filter.states.iter().all(|state| states.contains(state))
}

/// Beside the states themselves, the list of a partial index that covers them all.
fn state_terms(filter: &Filter) -> Vec<String> {
    let words: Vec<String> = filter.states.iter().map(|state| format!("'{}'", state.as_str())).collect();
    let mut terms = match words.as_slice() {
        [] => return Vec::new(),
        [one] => vec![format!("u.state = {one}")],
        several => vec![format!("u.state IN ({})", several.join(", "))],
    };
    if is_all(filter, &[StateWord::InDoubt, StateWord::Parked, StateWord::Sending]) {
        terms.push(format!("u.{WAITS}"));
    } else if is_all(filter, &StateWord::LIVE) {
        terms.push(format!("u.{LIVE}"));
    }
    terms
}

/// The number of the command with this id.
pub fn find(connection: &Connection, id: &str) -> rusqlite::Result<Option<i64>> {
    let sql = "SELECT n FROM outbox WHERE id = ?1 UNION ALL SELECT n FROM outbox_state WHERE minted_id = ?1";
    connection.query_row(sql, [id], |row| row.get(0)).optional()
}

/// The command with this id, as listings show it.
pub fn listed_by_id(connection: &Connection, id: &str) -> rusqlite::Result<Option<Listed>> {
    find(connection, id)?.map(|n| command(connection, n)).transpose()
}

/// Everything about one command, but its payload; `None` if there is none with this id.
pub fn show(connection: &Connection, id: &str) -> rusqlite::Result<Option<Detail>> {
    let snapshot = connection.unchecked_transaction()?;
    find(&snapshot, id)?.map(|n| detail(&snapshot, n)).transpose()
}

pub(super) fn detail(connection: &Connection, n: i64) -> rusqlite::Result<Detail> {
    let command = command(connection, n)?;
    let sql = "SELECT o.not_before_ms, o.traceparent, o.headers, o.payload_bytes IS NOT NULL,
            coalesce(length(o.payload_bytes), length(CAST(o.payload AS BLOB)), 0), x.first_begun_ms, x.first_unknown_ms,
            s.watermark, l.head_n,
            (SELECT count(*) FROM outbox_state y WHERE y.scope = x.scope AND y.lane = x.lane AND y.seq < x.seq
                AND y.state IN ('pending', 'sending', 'in_doubt', 'parked')), x.why, o.reissue_of, x.erased_ms
        FROM outbox o JOIN outbox_state x ON x.n = o.n JOIN outbox_scope s ON s.scope = x.scope
        LEFT JOIN outbox_lane l ON l.scope = x.scope AND l.lane = x.lane WHERE o.n = ?1";
    let is_final = StateWord::FINAL.iter().any(|word| word.as_str() == command.state);
    let (mut detail, head_n) = connection.query_row(sql, [n], |row| {
        let detail = Detail {
            command: command.clone(),
            not_before_ms: row.get(0)?,
            traceparent: maybe_text(row, 1)?,
            reissue_of: maybe_text(row, 11)?,
            headers: maybe_text(row, 2)?,
            payload_is_binary: row.get(3)?,
            payload_bytes: row.get(4)?,
            why: maybe_text(row, 10)?,
            first_begun_ms: row.get(5)?,
            first_unknown_ms: row.get(6)?,
            watermark: row.get(7)?,
            erased_ms: row.get(12)?,
            ahead: if is_final { None } else { Some(row.get(9)?) },
            head: None,
            attempts: Vec::new(),
            audit: Vec::new(),
        };
        Ok((detail, row.get::<_, Option<i64>>(8)?))
    })?;
    let other = head_n.filter(|head_n| *head_n != n && !is_final);
    detail.head = other.map(|head_n| self::command(connection, head_n)).transpose()?;
    detail.attempts = attempts(connection, n)?;
    detail.audit = audit(connection, &detail.command.id)?;
    Ok(detail)
}

/// The payload of a command, whatever column it came from; empty once erased. It can hold secrets.
pub fn payload(connection: &Connection, n: i64) -> rusqlite::Result<Vec<u8>> {
    let sql = "SELECT CAST(coalesce(payload, payload_bytes) AS BLOB) FROM outbox WHERE n = ?1";
    connection.query_row(sql, [n], |row| row.get::<_, Option<Vec<u8>>>(0)).map(Option::unwrap_or_default)
}

pub(super) fn command(connection: &Connection, n: i64) -> rusqlite::Result<Listed> {
    connection.query_row(&format!("SELECT {COMMAND} FROM outbox_status u WHERE u.n = ?1"), [n], listed)
}

const ATTEMPT: &str =
    "a.attempt_no, a.epoch, a.on_unknown, a.begun_ms, a.armed_ms, a.settled_ms, a.outcome, a.evidence";

fn attempts(connection: &Connection, n: i64) -> rusqlite::Result<Vec<Attempt>> {
    let sql = format!("SELECT {ATTEMPT} FROM outbox_attempt a WHERE a.n = ?1 ORDER BY a.attempt_no");
    connection.prepare(&sql)?.query_map([n], |row| attempt(row, 0))?.collect()
}

fn audit(connection: &Connection, id: &str) -> rusqlite::Result<Vec<AuditEntry>> {
    let sql = "SELECT at_ms, who, verb, reason, before, after FROM outbox_audit WHERE id = ?1 ORDER BY n";
    let entry = |row: &Row<'_>| {
        Ok(AuditEntry {
            at_ms: row.get(0)?,
            who: text(row, 1)?,
            verb: text(row, 2)?,
            reason: text(row, 3)?,
            before: maybe_text(row, 4)?,
            after: maybe_text(row, 5)?,
        })
    };
    connection.prepare(sql)?.query_map([id], entry)?.collect()
}

/// Scopes and their tokens, by name; one of them if `scope` is given.
pub fn leases(connection: &Connection, scope: Option<&str>, limit: u32) -> rusqlite::Result<Vec<Lease>> {
    let sql = "SELECT scope, token, holder, source, granted_ms, until_ms FROM outbox_lease
        WHERE ?1 IS NULL OR scope = ?1 ORDER BY scope LIMIT ?2";
    let row = |row: &Row<'_>| {
        Ok(Lease {
            scope: text(row, 0)?,
            token: row.get(1)?,
            holder: maybe_text(row, 2)?,
            source: maybe_text(row, 3)?,
            granted_ms: row.get(4)?,
            until_ms: row.get(5)?,
        })
    };
    connection.prepare(sql)?.query_map(rusqlite::params![scope, limit], row)?.collect()
}

fn listed(row: &Row<'_>) -> rusqlite::Result<Listed> {
    Ok(Listed {
        n: row.get(0)?,
        id: text(row, 1)?,
        scope: text(row, 2)?,
        lane: text(row, 3)?,
        seq: row.get(4)?,
        token: row.get(5)?,
        holder: maybe_text(row, 6)?,
        source: maybe_text(row, 7)?,
        key: maybe_text(row, 8)?,
        kind: text(row, 9)?,
        destination: text(row, 10)?,
        state: text(row, 11)?,
        reason: maybe_text(row, 12)?,
        effect: text(row, 13)?,
        attempt_no: row.get(14)?,
        tries: row.get(15)?,
        inserted_ms: row.get(16)?,
        due_ms: row.get(17)?,
        expires_at_ms: row.get(18)?,
        updated_ms: row.get(19)?,
    })
}

fn attempt(row: &Row<'_>, first: usize) -> rusqlite::Result<Attempt> {
    Ok(Attempt {
        attempt_no: row.get(first)?,
        epoch: row.get(first + 1)?,
        on_unknown: text(row, first + 2)?,
        begun_ms: row.get(first + 3)?,
        armed_ms: row.get(first + 4)?,
        settled_ms: row.get(first + 5)?,
        outcome: maybe_text(row, first + 6)?,
        evidence: maybe_text(row, first + 7)?,
    })
}

pub(super) fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(maybe_text(row, column)?.unwrap_or_default())
}

/// SQLite doesn't check that text is UTF-8; what isn't is shown with replacement characters.
pub(super) fn maybe_text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(match row.get_ref(column)? {
        ValueRef::Null => None,
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::CONTRACT;

    fn plan(connection: &Connection, sql: &str, values: &[&dyn ToSql]) -> rusqlite::Result<String> {
        let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
        let steps: Vec<String> = statement.query_map(values, |row| row.get(3))?.collect::<rusqlite::Result<_>>()?;
        Ok(steps.join("; "))
    }

    /// What is rare is found by its index, however much is finished; the rest is read from its newest
    /// end, without sorting.
    #[test]
    fn no_listing_of_what_is_rare_scans_what_is_finished() -> rusqlite::Result<()> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(CONTRACT)?;
        use StateWord::{Dead, Delivered, InDoubt, Parked, Pending};
        let s = || Some("s".to_owned());
        for (states, scope, index) in [
            (vec![InDoubt], None, "outbox_state_waits"),
            (vec![InDoubt, Parked], None, "outbox_state_waits"),
            (vec![Pending], None, "outbox_state_live"),
            (StateWord::LIVE.to_vec(), None, "outbox_state_live"),
            (StateWord::LIVE.to_vec(), s(), "outbox_state_live"),
            (vec![Pending], s(), "outbox_state_live"),
            (vec![Dead], None, "outbox_state_dead"),
            (vec![], s(), "outbox_state_seq"),
            (vec![Delivered], s(), "outbox_state_seq"),
            (vec![], None, "SCAN x; SEARCH o"),
        ] {
            let filter = Filter { states, scope, limit: 51, ..Filter::default() };
            let (sql, values) = list_query(&filter);
            let plan = plan(&connection, &sql, &values)?;
            assert!(plan.contains(index), "{filter:?}: {plan}");
            let sorts = plan.contains("TEMP B-TREE");
            let rare = is_all(&filter, &StateWord::LIVE) || is_all(&filter, &[Dead]);
            assert_eq!(sorts, rare, "{filter:?}: {plan}");
        }
        Ok(())
    }
}
