//! What the dispatcher looks at: which destinations have something waiting, and which heads are due.
//!
//! Only reads, and only facts: whether a command may begin is said by `rules::look`, here and again in the
//! transaction that begins it. A row that can't be read never stops the others.

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::effect::{Command, Payload};
use crate::rules::{Candidate, EffectState, State, is_suspect};
use crate::store::{Due, Route, Waiting};

const FIRST: &str = "SELECT kind, destination, due_ms, set_ms FROM outbox_lane WHERE due_ms IS NOT NULL
    ORDER BY kind, destination, due_ms LIMIT 1";
const AFTER: &str = "SELECT kind, destination, due_ms, set_ms FROM outbox_lane WHERE due_ms IS NOT NULL
    AND (kind, destination) > (?1, ?2) ORDER BY kind, destination, due_ms LIMIT 1";
const NEXT_DUE: &str =
    "SELECT due_ms, set_ms FROM outbox_lane WHERE kind = ?1 AND destination = ?2 AND due_ms IS NOT NULL AND due_ms > ?3
    ORDER BY due_ms LIMIT 1";

const PAUSED: &str = "SELECT 1 FROM outbox_pause WHERE scope = '' AND kind IN ('', ?1) AND destination IN ('', ?2)
    AND (until_ms IS NULL OR until_ms > ?3)";

/// Bytes of a TEXT column, as a parameter.
struct Bytes<'a>(&'a [u8]);

impl rusqlite::ToSql for Bytes<'_> {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        Ok(rusqlite::types::ToSqlOutput::Borrowed(ValueRef::Text(self.0)))
    }
}

/// A skip scan over the distinct kinds and destinations: it costs as much as there are of them, not as
/// there are lanes. It goes on by the stored bytes: text made legal would sort elsewhere.
pub(super) fn outlook(connection: &Connection, now_ms: i64) -> rusqlite::Result<Vec<Waiting>> {
    let line = |row: &Row<'_>| {
        let bytes =
            |column| Ok::<_, rusqlite::Error>(row.get_ref(column)?.as_bytes_or_null()?.unwrap_or_default().to_owned());
        Ok((Route { kind: bytes(0)?, destination: bytes(1)? }, row.get::<_, i64>(2)?, row.get::<_, Option<i64>>(3)?))
    };
    let mut found = connection.prepare_cached(FIRST)?.query_row([], line).optional()?;
    let mut waiting = Vec::new();
    while let Some((route, first_due_ms, first_set_ms)) = found {
        let (kind, destination) = (Bytes(&route.kind), Bytes(&route.destination));
        let next = if first_due_ms > now_ms {
            Some((first_due_ms, first_set_ms))
        } else {
            let times = |row: &Row<'_>| Ok((row.get(0)?, row.get::<_, Option<i64>>(1)?));
            connection.prepare_cached(NEXT_DUE)?.query_row(params![kind, destination, now_ms], times).optional()?
        };
        let ahead =
            next.is_some_and(|(_, set_ms)| set_ms.is_some_and(|set_ms| set_ms > now_ms + super::store::CLOCK_SLACK_MS));
        let next_due_ms = next.map(|(due_ms, _)| due_ms);
        let paused = connection.prepare_cached(PAUSED)?.exists(params![kind, destination, now_ms])?;
        found = connection.prepare_cached(AFTER)?.query_row(params![kind, destination], line).optional()?;
        waiting.push(Waiting { route, first_due_ms, next_due_ms, paused, ahead });
    }
    Ok(waiting)
}

macro_rules! candidate {
    ($rest:literal) => {
        concat!(
            "SELECT x.n, coalesce(o.id, x.minted_id), x.scope, x.lane, x.seq, x.token, o.kind, o.destination, o.headers,
                o.payload, o.payload_bytes, x.inserted_ms, o.traceparent, x.state, x.effect, x.era, l.begun_era,
                l.begun_token, l.begun_seq, h.seq, x.due_ms, o.expires_at_ms, x.found_row,
                EXISTS (SELECT 1 FROM outbox_pause p WHERE p.kind IN ('', o.kind) AND p.destination IN ('', o.destination)
                    AND p.scope IN ('', x.scope) AND (p.until_ms IS NULL OR p.until_ms > ?1))
            FROM outbox_lane l JOIN outbox_state h ON h.n = l.head_n JOIN outbox_state x ON x.n = ",
            $rest
        )
    };
}

const DUE: &str = candidate!(
    "l.head_n JOIN outbox o ON o.n = x.n
    WHERE l.kind = ?2 AND l.destination = ?3 AND l.due_ms IS NOT NULL AND l.due_ms <= ?1 AND (x.found_row >= 2) = ?5
    AND (?6 OR o.expires_at_ms IS NULL OR o.expires_at_ms > ?1)
    AND NOT EXISTS (SELECT 1 FROM outbox_pause p WHERE p.kind = '' AND p.destination = '' AND p.scope = l.scope
        AND (p.until_ms IS NULL OR p.until_ms > ?1))
    ORDER BY l.due_ms LIMIT ?4"
);
const SUSPECTS: &str = "SELECT 1 FROM outbox_state WHERE found_row >= 2 AND state = 'pending' LIMIT 1";
const CANDIDATE: &str =
    "SELECT x.state, x.effect, x.era, x.token, x.seq, l.begun_era, l.begun_token, l.begun_seq, h.seq,
        x.due_ms, o.expires_at_ms,
        EXISTS (SELECT 1 FROM outbox_pause p WHERE p.kind IN ('', o.kind) AND p.destination IN ('', o.destination)
            AND p.scope IN ('', x.scope) AND (p.until_ms IS NULL OR p.until_ms > ?2))
    FROM outbox_state x JOIN outbox o ON o.n = x.n JOIN outbox_lane l ON l.scope = x.scope AND l.lane = x.lane
    LEFT JOIN outbox_state h ON h.n = l.head_n WHERE x.n = ?1";

/// Heads that are due for a destination, the longest due first: suspects, or all the others.
pub(super) fn due(
    connection: &Connection,
    route: &Route,
    suspects: bool,
    now_ms: i64,
    steady: bool,
    limit: usize,
) -> rusqlite::Result<Vec<Due>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (kind, destination) = (Bytes(&route.kind), Bytes(&route.destination));
    let mut statement = connection.prepare_cached(DUE)?;
    let rows = statement.query_map(params![now_ms, kind, destination, limit, suspects, steady], head)?;
    rows.collect()
}

/// Whether a command waits that was in flight when the process died, twice in a row.
pub(super) fn has_suspects(connection: &Connection) -> rusqlite::Result<bool> {
    connection.prepare_cached(SUSPECTS)?.exists([])
}

fn head(row: &Row<'_>) -> rusqlite::Result<Due> {
    let n = row.get(0)?;
    let state: String = row.get(13)?;
    let effect: String = row.get(14)?;
    let found_row: i64 = row.get(22)?;
    let candidate = Candidate {
        state: waiting_state(&state),
        effect: EffectState::parse(&effect).unwrap_or(EffectState::Possible),
        order: (row.get(15)?, row.get(5)?, row.get(4)?),
        begun: (row.get(16)?, row.get(17)?, row.get(18)?),
        head_seq: row.get(19)?,
        due_ms: row.get(20)?,
        expires_at_ms: row.get(21)?,
        paused: row.get(23)?,
    };
    let suspect = is_suspect(u32::try_from(found_row.max(0)).unwrap_or(u32::MAX));
    // One row that can't be read must not stop the others.
    let command = command(row, n).unwrap_or_else(|error| Err(format!("the row can't be read: {error}")));
    Ok(Due { n, command, candidate, suspect })
}

/// For the question whether something may begin only waiting states matter; the rest is one.
fn waiting_state(word: &str) -> State {
    match word {
        "pending" => State::Pending,
        "parked" => State::Parked(None),
        _ => State::InDoubt,
    }
}

/// The stored command; the inner error says which column is not UTF-8.
fn command(row: &Row<'_>, n: i64) -> rusqlite::Result<Result<Command, String>> {
    let text = |column: usize, name: &str| -> rusqlite::Result<Result<Option<String>, String>> {
        Ok(match row.get_ref(column)? {
            ValueRef::Text(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text.to_owned())),
                Err(_) => Err(format!("{name} is not UTF-8")),
            },
            ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => Ok(None),
        })
    };
    let payload = match row.get_ref(9)? {
        ValueRef::Text(bytes) => Payload::Text(bytes.to_owned()),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => Payload::Bytes(row.get(10)?),
    };
    let columns = (
        text(1, "id")?,
        text(2, "scope")?,
        text(3, "lane")?,
        text(6, "kind")?,
        text(7, "destination")?,
        text(8, "headers")?,
        text(12, "traceparent")?,
    );
    let (seq, token, inserted_ms) = (row.get(4)?, row.get(5)?, row.get(11)?);
    let build = || -> Result<Command, String> {
        let (id, scope, lane, kind, destination, headers, traceparent) = columns;
        Ok(Command {
            n,
            id: id?.unwrap_or_default(),
            scope: scope?.unwrap_or_default(),
            lane: lane?.unwrap_or_default(),
            seq,
            token,
            kind: kind?.unwrap_or_default(),
            destination: destination?.unwrap_or_default(),
            headers: headers?.filter(|headers| headers.trim_matches([' ', '\t', '\n', '\r']) != "null"),
            payload,
            inserted_ms,
            traceparent: traceparent?,
        })
    };
    Ok(build())
}

pub(super) fn text_lossy(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(match row.get_ref(column)? {
        ValueRef::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) | ValueRef::Blob(_) => String::new(),
    })
}

/// What decides whether this command may begin.
pub(super) fn candidate(connection: &Connection, n: i64, now_ms: i64) -> rusqlite::Result<Candidate> {
    connection.prepare_cached(CANDIDATE)?.query_row([n, now_ms], |row| {
        Ok(Candidate {
            state: waiting_state(&row.get::<_, String>(0)?),
            effect: EffectState::parse(&row.get::<_, String>(1)?).unwrap_or(EffectState::Possible),
            order: (row.get(2)?, row.get(3)?, row.get(4)?),
            begun: (row.get(5)?, row.get(6)?, row.get(7)?),
            head_seq: row.get::<_, Option<i64>>(8)?.unwrap_or(0),
            due_ms: row.get(9)?,
            expires_at_ms: row.get(10)?,
            paused: row.get(11)?,
        })
    })
}
