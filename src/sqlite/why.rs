//! What a reason is made of: where a command stands, what stands before it, what was tried and told.
//!
//! Only facts; `rules::explain` and `rules::then` give the reason. A question reads one snapshot and a
//! handful of rows, however much is finished; only a question about the past may have to walk through
//! the scope.

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::inspect::{self, Attempt, Detail, Listed, Reign};
use super::pause::Pause;
use super::{facts, look};
use crate::rules::{Outcome, Served, Standing, Told, Tried, is_suspect};

/// How many lanes of a scope are looked at.
pub const LANES_MAX: usize = 20;

/// Everything that tells why a command stands where it stands.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The command, its attempts, its head, what operators did.
    pub detail: Detail,
    /// What the rules are asked with; the caller knows whether its destination is served.
    pub standing: Standing,
    /// What the first look found, where it ended without an attempt.
    pub why: Option<String>,
    /// The pauses that hold it.
    pub pauses: Vec<Pause>,
    /// Another command that goes alone and is due or being sent.
    pub suspect: Option<Listed>,
    /// Attempts that are open, of all commands.
    pub in_flight: i64,
    /// The dispatcher that ran last.
    pub reign: Reign,
}

/// What can be known of an earlier moment.
#[derive(Debug, Clone)]
pub struct Past {
    /// The attempts, for [`crate::rules::then`].
    pub attempts: Vec<Tried>,
    /// The changes of state, for [`crate::rules::then`].
    pub changes: Vec<(i64, Told)>,
    /// What stood before it in its lane.
    pub ahead: Option<Listed>,
    /// A token that the scope had accepted by then; the watermark was this or a greater one.
    pub token_at_least: Option<i64>,
    /// Whether the feed was cut at its front, so that changes may be missing.
    pub feed_is_cut: bool,
}

/// An id that is remembered, though its command is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Used {
    /// Its scope.
    pub scope: String,
    /// Until when it is remembered.
    pub until_ms: i64,
}

/// Why a command stands where it stands at `now_ms`; `None` if there is none with this id.
///
/// Fails with [`rusqlite::Error::FromSqlConversionFailure`] if its state is unknown to this version.
pub fn facts(connection: &Connection, id: &str, now_ms: i64) -> rusqlite::Result<Option<Facts>> {
    let snapshot = connection.unchecked_transaction()?;
    inspect::find(&snapshot, id)?.map(|n| of_command(&snapshot, n, now_ms)).transpose()
}

/// The same for the heads of a scope's lanes, or of one of them; `None` if there is no such scope.
pub fn heads(
    connection: &Connection,
    scope: &str,
    lane: Option<&str>,
    now_ms: i64,
) -> rusqlite::Result<Option<Vec<Facts>>> {
    let snapshot = connection.unchecked_transaction()?;
    let known = "SELECT EXISTS (SELECT 1 FROM outbox_scope WHERE scope = ?1)";
    if !snapshot.query_row(known, [scope], |row| row.get::<_, bool>(0))? {
        return Ok(None);
    }
    let sql = format!(
        "SELECT head_n FROM outbox_lane WHERE scope = ?1 AND head_n IS NOT NULL AND (?2 IS NULL OR lane = ?2) ORDER BY lane LIMIT {LANES_MAX}"
    );
    let heads: Vec<i64> =
        snapshot.prepare(&sql)?.query_map(params![scope, lane], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    heads.into_iter().map(|n| of_command(&snapshot, n, now_ms)).collect::<rusqlite::Result<_>>().map(Some)
}

/// What is remembered of an id whose command was pruned.
pub fn used(connection: &Connection, id: &str) -> rusqlite::Result<Option<Used>> {
    let used = |row: &Row<'_>| Ok(Used { scope: inspect::text(row, 0)?, until_ms: row.get(1)? });
    connection.query_row("SELECT scope, until_ms FROM outbox_used WHERE id = ?1", [id], used).optional()
}

fn of_command(connection: &Connection, n: i64, now_ms: i64) -> rusqlite::Result<Facts> {
    let detail = inspect::detail(connection, n)?;
    let mut candidate = look::candidate(connection, n, now_ms)?;
    candidate.state = facts::load(connection, n)?.state;
    let (why, found_row) =
        connection.query_row("SELECT why, found_row FROM outbox_state WHERE n = ?1", [n], |row| {
            Ok((inspect::maybe_text(row, 0)?, row.get::<_, i64>(1)?))
        })?;
    let suspect = suspect(connection, n, now_ms)?;
    let standing = Standing {
        candidate,
        served: Served::NotKnown,
        suspect: is_suspect(u32::try_from(found_row.max(0)).unwrap_or(u32::MAX)),
        behind_suspect: suspect.is_some(),
    };
    let in_flight = "SELECT count(*) FROM outbox_attempt WHERE settled_ms IS NULL";
    Ok(Facts {
        pauses: pauses(connection, &detail.command, now_ms)?,
        detail,
        standing,
        why,
        suspect,
        in_flight: connection.query_row(in_flight, [], |row| row.get(0))?,
        reign: inspect::reign(connection)?,
    })
}

fn suspect(connection: &Connection, n: i64, now_ms: i64) -> rusqlite::Result<Option<Listed>> {
    let sql = "SELECT x.n FROM outbox_state x JOIN outbox_lane l ON l.scope = x.scope AND l.lane = x.lane AND l.head_n = x.n
            WHERE x.found_row >= 2 AND x.state = 'pending' AND l.due_ms <= ?2 AND x.n <> ?1
        UNION ALL SELECT x.n FROM outbox_state x
            WHERE x.state IN ('in_doubt', 'parked', 'sending') AND x.state = 'sending' AND x.found_row >= 2 AND x.n <> ?1 LIMIT 1";
    let found: Option<i64> = connection.query_row(sql, [n, now_ms], |row| row.get(0)).optional()?;
    found.map(|n| inspect::command(connection, n)).transpose()
}

fn pauses(connection: &Connection, command: &Listed, now_ms: i64) -> rusqlite::Result<Vec<Pause>> {
    let sql = "SELECT kind, destination, scope, until_ms, at_ms, who, reason FROM outbox_pause
        WHERE kind IN ('', ?1) AND destination IN ('', ?2) AND scope IN ('', ?3) AND (until_ms IS NULL OR until_ms > ?4)";
    let pause = |row: &Row<'_>| {
        Ok(Pause {
            kind: inspect::text(row, 0)?,
            destination: inspect::text(row, 1)?,
            scope: inspect::text(row, 2)?,
            until_ms: row.get(3)?,
            at_ms: row.get(4)?,
            who: inspect::text(row, 5)?,
            reason: inspect::text(row, 6)?,
        })
    };
    let values = params![command.kind, command.destination, command.scope, now_ms];
    connection.prepare(sql)?.query_map(values, pause)?.collect()
}

/// What can be known of the command at `at_ms`.
pub fn past(connection: &Connection, detail: &Detail, at_ms: i64) -> rusqlite::Result<Past> {
    let snapshot = connection.unchecked_transaction()?;
    let command = &detail.command;
    let feed: (Option<i64>, i64) = snapshot.query_row(
        "SELECT (SELECT n FROM outbox_event ORDER BY n LIMIT 1), (SELECT count(*) FROM sqlite_sequence WHERE name = 'outbox_event' AND seq > 0)",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    Ok(Past {
        attempts: detail.attempts.iter().map(tried).collect(),
        changes: changes(&snapshot, command)?,
        ahead: ahead(&snapshot, command, at_ms)?,
        token_at_least: token_at(&snapshot, &command.scope, at_ms)?,
        feed_is_cut: feed.0.map_or(feed.1 > 0, |first| first > 1),
    })
}

fn tried(attempt: &Attempt) -> Tried {
    let outcomes = [Outcome::Delivered, Outcome::Deferred, Outcome::Refused, Outcome::Unknown];
    Tried {
        begun_ms: attempt.begun_ms,
        armed_ms: attempt.armed_ms,
        settled_ms: attempt.settled_ms,
        outcome: outcomes.into_iter().find(|outcome| attempt.outcome.as_deref() == Some(outcome.as_str())),
    }
}

/// From the feed, and from the command itself where the feed doesn't tell of its last change any more.
fn changes(connection: &Connection, command: &Listed) -> rusqlite::Result<Vec<(i64, Told)>> {
    // The feed has no index but its number: this reads all of it that is kept.
    let sql = "SELECT at_ms, event FROM outbox_event WHERE scope = ?1 AND seq = ?2 ORDER BY n";
    let mut changes: Vec<(i64, Told)> = Vec::new();
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query(params![command.scope, command.seq])?;
    while let Some(row) = rows.next()? {
        let at_ms = row.get(0)?;
        changes.extend(told(&inspect::text(row, 1)?).map(|told| (at_ms, told)));
    }
    let now = told(&command.state).filter(|now| changes.last().is_none_or(|(_, last)| last != now));
    changes.extend(now.map(|now| (command.updated_ms, now)));
    Ok(changes)
}

fn told(word: &str) -> Option<Told> {
    match word {
        "delivered" => Some(Told::Delivered),
        "dead" => Some(Told::Dead),
        "in_doubt" => Some(Told::InDoubt),
        "parked" => Some(Told::Parked),
        "resumed" => Some(Told::Resumed),
        _ => None,
    }
}

/// What was live before it then: still is, or ended later. A final command never changes again.
fn ahead(connection: &Connection, command: &Listed, at_ms: i64) -> rusqlite::Result<Option<Listed>> {
    let sql = "SELECT n FROM outbox_state WHERE scope = ?1 AND lane = ?2 AND seq < ?3 AND inserted_ms <= ?4
        AND (state NOT IN ('delivered', 'dead') OR updated_ms > ?4) ORDER BY seq LIMIT 1";
    let values = params![command.scope, command.lane, command.seq, at_ms];
    let found: Option<i64> = connection.query_row(sql, values, |row| row.get(0)).optional()?;
    found.map(|n| inspect::command(connection, n)).transpose()
}

/// Tokens rise with seq, so the last command that was inserted by then has the greatest. A seal or a lease
/// may have raised the watermark further: of those only the last one is remembered.
fn token_at(connection: &Connection, scope: &str, at_ms: i64) -> rusqlite::Result<Option<i64>> {
    let sql = "SELECT token FROM outbox_state WHERE scope = ?1 AND inserted_ms <= ?2 ORDER BY seq DESC LIMIT 1";
    let inserted: Option<i64> = connection.query_row(sql, params![scope, at_ms], |row| row.get(0)).optional()?;
    let sql = "SELECT watermark FROM outbox_scope WHERE scope = ?1 AND source = 'lease' AND granted_ms <= ?2";
    let granted = connection.query_row(sql, params![scope, at_ms], |row| row.get(0)).optional()?;
    Ok(inserted.max(granted))
}
