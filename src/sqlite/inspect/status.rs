//! The whole outbox at one moment: counts, what waits longest, what is stuck, and for whom.
//!
//! Every part is bounded and goes by an index, whatever is finished: this is asked every few seconds.

use rusqlite::types::ToSql;
use rusqlite::{Connection, OptionalExtension, Row};

use super::{
    ATTEMPT, Attempt, COMMAND, COMMAND_COLUMNS, LIVE, Listed, WAITS, attempt, command, listed, maybe_text, text,
};
use crate::sqlite::pause::{self, Pause};

/// How many rows a part of [`Status`] holds at most; the totals tell of the rest.
pub const PART_ROWS_MAX: usize = 20;

/// How many destinations [`Status`] tells apart, which URLs as destinations could make many.
const DESTINATIONS_MAX: usize = 200;

/// How many commands are in each state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Waiting.
    pub pending: i64,
    /// With an open attempt.
    pub sending: i64,
    /// In doubt.
    pub in_doubt: i64,
    /// Parked.
    pub parked: i64,
    /// Delivered and still kept.
    pub delivered: i64,
    /// Dead and still kept, by reason.
    pub dead: Vec<(String, i64)>,
    /// Finished and pruned.
    pub pruned: i64,
}

/// A command and since when it is as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Since {
    /// The command.
    pub command: Listed,
    /// Since when.
    pub since_ms: i64,
}

/// A lane that waits for somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The head, in doubt or parked.
    pub head: Listed,
    /// Live commands behind it.
    pub behind: i64,
}

/// What waits for one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Of the heads.
    pub kind: String,
    /// Of the heads.
    pub destination: String,
    /// Heads that are due.
    pub due: i64,
    /// Heads that are due later.
    pub later: i64,
    /// When the first of them was, or is, due.
    pub first_due_ms: i64,
}

/// A head whose last attempt brought nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failing {
    /// The command.
    pub command: Listed,
    /// Its last attempt.
    pub attempt: Option<Attempt>,
}

/// The refusals of one scope, as library and command line reported them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The scope.
    pub scope: String,
    /// The token that was refused last.
    pub token: i64,
    /// The watermark at that time.
    pub watermark: i64,
    /// How many there were.
    pub count: i64,
    /// When the last one was.
    pub last_ms: i64,
}

/// The dispatcher's reign.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reign {
    /// Raised at every start; 0: none ever ran.
    pub epoch: i64,
    /// When it began.
    pub started_ms: Option<i64>,
    /// Where.
    pub host: Option<String>,
    /// As which process.
    pub pid: Option<i64>,
}

/// The whole outbox at one moment.
#[derive(Debug, Clone)]
pub struct Status {
    /// Commands by state.
    pub counts: Counts,
    /// The head that has been waiting longest since it was first due, retries included.
    pub oldest_due: Option<Since>,
    /// The command that has been in doubt longest.
    pub oldest_in_doubt: Option<Since>,
    /// How many lanes wait for somebody.
    pub blocked_lanes: i64,
    /// The first of them, longest first.
    pub blocked: Vec<Blocked>,
    /// What waits, by destination.
    pub loads: Vec<Load>,
    /// Heads that failed and wait for another attempt, most tries first.
    pub failing: Vec<Failing>,
    /// Refusals, latest first.
    pub refusals: Vec<Refusal>,
    /// The dispatcher that ran last.
    pub reign: Reign,
    /// What is paused now.
    pub pauses: Vec<Pause>,
}

/// The whole outbox, seen at one moment of the database; `now_ms` decides what is due.
pub fn status(connection: &Connection, now_ms: i64) -> rusqlite::Result<Status> {
    let snapshot = connection.unchecked_transaction()?;
    Ok(Status {
        counts: counts(&snapshot)?,
        oldest_due: oldest_due(&snapshot, now_ms)?,
        oldest_in_doubt: oldest_in_doubt(&snapshot)?,
        blocked_lanes: blocked_lanes(&snapshot)?,
        blocked: blocked(&snapshot)?,
        loads: loads(&snapshot, now_ms)?,
        failing: failing(&snapshot)?,
        refusals: refusals(&snapshot)?,
        reign: reign(&snapshot)?,
        pauses: pause::pauses(&snapshot, now_ms)?,
    })
}

/// What a look at the waiting needs of [`Status`].
pub(in crate::sqlite) struct Waiting {
    pub(in crate::sqlite) oldest_due: Option<Since>,
    pub(in crate::sqlite) loads: Vec<Load>,
    pub(in crate::sqlite) refusals: Vec<Refusal>,
    pub(in crate::sqlite) reign: Reign,
}

/// The part of [`status`] that counts nothing; in the caller's snapshot.
pub(in crate::sqlite) fn waiting(connection: &Connection, now_ms: i64) -> rusqlite::Result<Waiting> {
    Ok(Waiting {
        oldest_due: oldest_due(connection, now_ms)?,
        loads: loads(connection, now_ms)?,
        refusals: refusals(connection)?,
        reign: reign(connection)?,
    })
}

/// A scope's seqs have no gap, and those up to `pruned_seq` count as gone: what is neither live nor dead
/// of the rest was delivered. It costs as much as there are scopes, not as there are commands.
fn counts(connection: &Connection) -> rusqlite::Result<Counts> {
    let number = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0));
    let kept = number("SELECT coalesce(sum(next_seq - 1 - pruned_seq), 0) FROM outbox_scope")?;
    let live = number(&format!("SELECT count(*) FROM outbox_state WHERE {LIVE}"))?;
    let mut counts =
        Counts { pruned: number("SELECT coalesce(sum(pruned_seq), 0) FROM outbox_scope")?, ..Counts::default() };
    let mut statement =
        connection.prepare(&format!("SELECT state, count(*) FROM outbox_state WHERE {WAITS} GROUP BY state"))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        match text(row, 0)?.as_str() {
            "sending" => counts.sending = row.get(1)?,
            "in_doubt" => counts.in_doubt = row.get(1)?,
            _ => counts.parked = row.get(1)?,
        }
    }
    let dead = "SELECT coalesce(reason, ''), count(*) FROM outbox_state WHERE state = 'dead' GROUP BY reason";
    counts.dead = connection
        .prepare(dead)?
        .query_map([], |row| Ok((text(row, 0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    counts.pending = live - counts.sending - counts.in_doubt - counts.parked;
    counts.delivered = (kept - live - counts.dead.iter().map(|(_, count)| count).sum::<i64>()).max(0);
    Ok(counts)
}

/// A retry moves the due time, but the command has been waiting since it was first due.
fn oldest_due(connection: &Connection, now_ms: i64) -> rusqlite::Result<Option<Since>> {
    let sql = "SELECT x.n, max(x.inserted_ms, coalesce(o.not_before_ms, 0)) AS since
        FROM outbox_lane l JOIN outbox_state x ON x.n = l.head_n JOIN outbox o ON o.n = l.head_n
        WHERE l.due_ms IS NOT NULL AND x.state = 'pending' AND (l.due_ms <= ?1 OR x.attempt_no > 0)
        ORDER BY since LIMIT 1";
    since(connection, sql, &[&now_ms])
}

fn oldest_in_doubt(connection: &Connection) -> rusqlite::Result<Option<Since>> {
    let sql = format!(
        "SELECT n, updated_ms FROM outbox_state WHERE {WAITS} AND state = 'in_doubt' ORDER BY updated_ms LIMIT 1"
    );
    since(connection, &sql, &[])
}

fn since(connection: &Connection, sql: &str, values: &[&dyn ToSql]) -> rusqlite::Result<Option<Since>> {
    let found: Option<(i64, i64)> =
        connection.query_row(sql, values, |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    found.map(|(n, since_ms)| Ok(Since { command: command(connection, n)?, since_ms })).transpose()
}

const BLOCKED_HEADS: &str =
    "outbox_state x JOIN outbox_lane l ON l.scope = x.scope AND l.lane = x.lane AND l.head_n = x.n
    WHERE x.state IN ('in_doubt', 'parked', 'sending') AND x.state IN ('in_doubt', 'parked')";

fn blocked_lanes(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row(&format!("SELECT count(*) FROM {BLOCKED_HEADS}"), [], |row| row.get(0))
}

fn blocked(connection: &Connection) -> rusqlite::Result<Vec<Blocked>> {
    let sql = format!(
        "SELECT {COMMAND}, (SELECT count(*) FROM outbox_state y WHERE y.scope = b.scope AND y.lane = b.lane AND y.n <> b.n
                AND y.state IN ('pending', 'sending', 'in_doubt', 'parked'))
            FROM (SELECT x.n, x.scope, x.lane, x.updated_ms FROM {BLOCKED_HEADS} ORDER BY x.updated_ms LIMIT {PART_ROWS_MAX}) b
            JOIN outbox_status u ON u.n = b.n ORDER BY b.updated_ms"
    );
    let row = |row: &Row<'_>| Ok(Blocked { head: listed(row)?, behind: row.get(COMMAND_COLUMNS)? });
    connection.prepare(&sql)?.query_map([], row)?.collect()
}

/// Goes from one (kind, destination) to the next along the index, whatever the number of lanes.
fn loads(connection: &Connection, now_ms: i64) -> rusqlite::Result<Vec<Load>> {
    let mut next = connection.prepare(
        "SELECT kind, destination FROM outbox_lane WHERE due_ms IS NOT NULL AND (kind, destination) > (?1, ?2)
            ORDER BY kind, destination LIMIT 1",
    )?;
    let mut load = connection.prepare(
        "SELECT count(*) FILTER (WHERE due_ms <= ?3), count(*) FILTER (WHERE due_ms > ?3), min(due_ms)
            FROM outbox_lane WHERE kind = ?1 AND destination = ?2 AND due_ms IS NOT NULL",
    )?;
    let mut loads = Vec::new();
    let mut at = (String::new(), String::new());
    while loads.len() < DESTINATIONS_MAX {
        let found = next.query_row([&at.0, &at.1], |row| Ok((text(row, 0)?, text(row, 1)?))).optional()?;
        // A name that isn't UTF-8 is read as another one, from which the walk could not go on.
        let Some(found) = found.filter(|found| *found > at) else { break };
        at = found;
        loads.push(load.query_row(rusqlite::params![at.0, at.1, now_ms], |row| {
            Ok(Load {
                kind: at.0.clone(),
                destination: at.1.clone(),
                due: row.get(0)?,
                later: row.get(1)?,
                first_due_ms: row.get::<_, Option<i64>>(2)?.unwrap_or(now_ms),
            })
        })?);
    }
    Ok(loads)
}

fn failing(connection: &Connection) -> rusqlite::Result<Vec<Failing>> {
    let sql = format!(
        "SELECT {COMMAND}, {ATTEMPT} FROM outbox_lane l JOIN outbox_state x ON x.n = l.head_n JOIN outbox_status u ON u.n = x.n
            LEFT JOIN outbox_attempt a ON a.n = x.n AND a.attempt_no = x.attempt_no
            WHERE l.due_ms IS NOT NULL AND x.state = 'pending' AND x.attempt_no > 0
            ORDER BY x.tries DESC, x.attempt_no DESC, x.n LIMIT {PART_ROWS_MAX}"
    );
    let row = |row: &Row<'_>| {
        let known: Option<i64> = row.get(COMMAND_COLUMNS)?;
        let attempt = known.map(|_| attempt(row, COMMAND_COLUMNS)).transpose()?;
        Ok(Failing { command: listed(row)?, attempt })
    };
    connection.prepare(&sql)?.query_map([], row)?.collect()
}

fn refusals(connection: &Connection) -> rusqlite::Result<Vec<Refusal>> {
    let sql = format!(
        "SELECT scope, token, watermark, count, last_ms FROM outbox_refusal ORDER BY last_ms DESC LIMIT {PART_ROWS_MAX}"
    );
    let row = |row: &Row<'_>| {
        Ok(Refusal {
            scope: text(row, 0)?,
            token: row.get(1)?,
            watermark: row.get(2)?,
            count: row.get(3)?,
            last_ms: row.get(4)?,
        })
    };
    connection.prepare(&sql)?.query_map([], row)?.collect()
}

pub(in crate::sqlite) fn reign(connection: &Connection) -> rusqlite::Result<Reign> {
    let sql = "SELECT epoch, started_ms, host, pid FROM outbox_dispatcher";
    let row = |row: &Row<'_>| {
        Ok(Reign { epoch: row.get(0)?, started_ms: row.get(1)?, host: maybe_text(row, 2)?, pid: row.get(3)? })
    };
    Ok(connection.query_row(sql, [], row).optional()?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::CONTRACT;

    /// Seqs have no gap: what is neither live, dead nor pruned was delivered. Numbers of rows have gaps,
    /// and pruning one scope leaves them in the middle.
    #[test]
    fn counts_add_up() -> rusqlite::Result<()> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(CONTRACT)?;
        assert_eq!(counts(&connection)?, Counts::default());
        for number in 0..9 {
            let sql = "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES (?1, 1, 'webhook', 'a', '')";
            connection.execute(sql, [format!("s{number}")])?;
        }
        connection.execute_batch(
            "UPDATE outbox_state SET state = 'delivered' WHERE n IN (1, 2, 9);
             UPDATE outbox_state SET state = 'dead', reason = 'refused' WHERE n = 3;
             UPDATE outbox_state SET state = 'dead', reason = 'expired' WHERE n = 4;
             UPDATE outbox_state SET state = 'in_doubt' WHERE n = 5;
             UPDATE outbox_state SET state = 'parked' WHERE n = 6;
             UPDATE outbox_state SET state = 'sending' WHERE n = 7;",
        )?;
        let dead = vec![("expired".to_owned(), 1), ("refused".to_owned(), 1)];
        let right = Counts { pending: 1, sending: 1, in_doubt: 1, parked: 1, delivered: 3, dead, pruned: 0 };
        assert_eq!(counts(&connection)?, right);
        connection.execute_batch(
            "INSERT INTO outbox_used SELECT o.id, o.scope, o.key, x'00', 9000000000000 FROM outbox o WHERE o.n IN (2, 3);
             UPDATE outbox_scope SET pruned_seq = 1 WHERE scope IN ('s1', 's2');
             DELETE FROM outbox WHERE n IN (2, 3); DELETE FROM outbox_state WHERE n IN (2, 3);",
        )?;
        let left = Counts { delivered: 2, dead: vec![("expired".to_owned(), 1)], pruned: 2, ..right };
        assert_eq!(counts(&connection)?, left);
        Ok(())
    }

    /// One destination after the other, whatever the number of lanes.
    #[test]
    fn loads_tell_destinations_apart() -> rusqlite::Result<()> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(CONTRACT)?;
        for (scope, kind, destination) in
            [("a", "webhook", "x"), ("b", "webhook", "x"), ("c", "webhook", "y"), ("d", "email", "x")]
        {
            let sql = "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES (?1, 1, ?2, ?3, '')";
            connection.execute(sql, [scope, kind, destination])?;
        }
        let due: i64 = connection.query_row("SELECT max(due_ms) FROM outbox_lane", [], |row| row.get(0))?;
        let seen: Vec<_> = loads(&connection, due)?
            .into_iter()
            .map(|load| (load.kind, load.destination, load.due, load.later))
            .collect();
        let right = [("email", "x", 1), ("webhook", "x", 2), ("webhook", "y", 1)]
            .map(|(kind, destination, due)| (kind.to_owned(), destination.to_owned(), due, 0));
        assert_eq!(seen, right);
        assert_eq!(loads(&connection, 1)?.iter().map(|load| load.later).sum::<i64>(), 4);
        Ok(())
    }
}
