//! Where a command stands, as the rules want to know it: read from the tables, and written back.
//!
//! Dispatcher and operator go through the same two functions, so that a state that a person decides is
//! written like one that an attempt decides. Nothing is decided here, and no transaction is opened:
//! the caller reads, asks `rules::next` and writes in one transaction, or two writers could decide from
//! the same old facts.

use rusqlite::types::Type;
use rusqlite::{Connection, Row, named_params};

use crate::rules::{CommandFacts, EffectState, Limits, OnTakeover, OnUnknown, Place, Reason, State};

const LOAD: &str = "SELECT x.state, x.reason, x.effect, x.attempt_no, x.fresh_no, x.tries, x.found_open,
        x.first_begun_ms, x.first_unknown_ms, x.due_ms, (x.era < s.era OR x.token < s.watermark)
            AND NOT (coalesce(x.adopted_era, -1) = s.era AND coalesce(x.adopted_token, -1) = s.watermark),
        a.on_unknown, a.armed_ms IS NOT NULL, a.begun_ms, o.not_before_ms
    FROM outbox_state x JOIN outbox o ON o.n = x.n JOIN outbox_scope s ON s.scope = x.scope
    LEFT JOIN outbox_attempt a ON a.n = x.n AND a.attempt_no = x.attempt_no AND a.settled_ms IS NULL
    WHERE x.n = ?1";

const POLICY: &str =
    "SELECT coalesce(s.on_takeover, p.on_takeover) FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope
    JOIN outbox_policy p WHERE x.n = ?1";

const STORE: &str = "UPDATE outbox_state SET state = :state, reason = :reason, effect = :effect,
        attempt_no = :attempt_no, fresh_no = :fresh_no, tries = :tries, found_open = :found_open,
        found_row = CASE WHEN :found_open = 0 THEN 0 ELSE found_row END,
        first_begun_ms = :first_begun_ms, first_unknown_ms = :first_unknown_ms,
        set_ms = CASE WHEN due_ms = :due_ms THEN set_ms ELSE :now_ms END, due_ms = :due_ms,
        key = CASE WHEN :key_back THEN NULL ELSE key END, updated_ms = :now_ms
    WHERE n = :n";

/// What the rules must know of the command with this number.
///
/// A command that is sending without an open attempt row is damage: it counts as armed and held, since
/// nobody can say that nothing left. Negative counters count as 0. Fails with
/// [`rusqlite::Error::QueryReturnedNoRows`] if there is no such command, and with
/// [`rusqlite::Error::FromSqlConversionFailure`] if a word is unknown to this version.
pub(crate) fn load(connection: &Connection, n: i64) -> rusqlite::Result<CommandFacts> {
    connection.prepare_cached(LOAD)?.query_row([n], |row| {
        Ok(CommandFacts {
            state: state(row)?,
            effect: known(2, &row.get::<_, String>(2)?, EffectState::parse)?,
            attempt_no: counter(row.get(3)?),
            fresh_no: counter(row.get(4)?),
            tries: counter(row.get(5)?),
            found_open: counter(row.get(6)?),
            first_begun_ms: row.get(7)?,
            first_unknown_ms: row.get(8)?,
            begun_ms: row.get(13)?,
            due_ms: row.get(9)?,
            not_before_ms: row.get(14)?,
            overtaken: row.get(10)?,
        })
    })
}

/// The surroundings of a transition of this command: its scope's policy, read here, and what the caller
/// knows.
pub(crate) fn place(
    connection: &Connection,
    n: i64,
    limits: &Limits,
    now_ms: i64,
    jitter: u32,
) -> rusqlite::Result<Place> {
    let policy: String = connection.prepare_cached(POLICY)?.query_row([n], |row| row.get(0))?;
    let on_takeover = known(0, &policy, OnTakeover::parse)?;
    Ok(Place { limits: *limits, on_takeover, now_ms, jitter })
}

/// Writes the facts back, `now_ms` as the time of the change; triggers move the lane along.
///
/// `set_ms` follows a new due time, `found_row` ends with `found_open`, and a key is given back where
/// the end gives keys back and certainly nothing happened. The attempt row, and `found_row` and
/// `found_epoch` where a start found the attempt open, are the caller's. Fails with
/// [`rusqlite::Error::StatementChangedRows`] if there is no such command.
pub(crate) fn store(connection: &Connection, n: i64, facts: &CommandFacts, now_ms: i64) -> rusqlite::Result<()> {
    let changed = connection.prepare_cached(STORE)?.execute(named_params! {
        ":n": n,
        ":state": facts.state.as_str(),
        ":reason": facts.state.reason().map(Reason::as_str),
        ":effect": facts.effect.as_str(),
        ":attempt_no": facts.attempt_no,
        ":fresh_no": facts.fresh_no,
        ":tries": facts.tries,
        ":found_open": facts.found_open,
        ":first_begun_ms": facts.first_begun_ms,
        ":first_unknown_ms": facts.first_unknown_ms,
        ":due_ms": facts.due_ms,
        ":key_back": gives_key_back(facts),
        ":now_ms": now_ms,
    })?;
    if changed == 1 { Ok(()) } else { Err(rusqlite::Error::StatementChangedRows(changed)) }
}

fn gives_key_back(facts: &CommandFacts) -> bool {
    match facts.state {
        State::Dead(reason) => reason.gives_key_back() && facts.effect == EffectState::None,
        State::Pending | State::Sending { .. } | State::InDoubt | State::Parked(_) | State::Delivered => false,
    }
}

fn state(row: &Row<'_>) -> rusqlite::Result<State> {
    let reason: Option<String> = row.get(1)?;
    let reason = reason.map(|text| known(1, &text, parse_reason)).transpose()?;
    let word: String = row.get(0)?;
    match (word.as_str(), reason) {
        ("pending", _) => Ok(State::Pending),
        ("sending", _) => sending(row),
        ("in_doubt", _) => Ok(State::InDoubt),
        ("parked", reason) => Ok(State::Parked(reason)),
        ("delivered", _) => Ok(State::Delivered),
        ("dead", Some(reason)) => Ok(State::Dead(reason)),
        (_, _) => Err(unknown_word(0, &word)),
    }
}

fn sending(row: &Row<'_>) -> rusqlite::Result<State> {
    let policy: Option<String> = row.get(11)?;
    match policy {
        Some(policy) => Ok(State::Sending { armed: row.get(12)?, on_unknown: known(11, &policy, OnUnknown::parse)? }),
        None => Ok(State::Sending { armed: true, on_unknown: OnUnknown::Hold }),
    }
}

fn parse_reason(text: &str) -> Option<Reason> {
    Reason::ALL.into_iter().find(|reason| reason.as_str() == text)
}

fn known<T>(column: usize, text: &str, parse: impl Fn(&str) -> Option<T>) -> rusqlite::Result<T> {
    parse(text).ok_or_else(|| unknown_word(column, text))
}

fn unknown_word(column: usize, word: &str) -> rusqlite::Error {
    let problem = format!("this version doesn't know the word {word:?} in outbox_state or outbox_attempt");
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, problem.into())
}

fn counter(stored: i64) -> u32 {
    u32::try_from(stored.max(0)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::CONTRACT;

    /// An outbox with one command, which has the number 1.
    fn outbox() -> rusqlite::Result<Connection> {
        let connection = Connection::open_in_memory()?;
        connection.execute_batch(CONTRACT)?;
        connection.execute_batch(
            "INSERT INTO outbox(scope, token, key, kind, destination, payload) VALUES ('s', 5, 'k', 'email', 'main', '')",
        )?;
        Ok(connection)
    }

    fn column(connection: &Connection, name: &str) -> rusqlite::Result<rusqlite::types::Value> {
        connection.query_row(&format!("SELECT {name} FROM outbox_state WHERE n = 1"), [], |row| row.get(0))
    }

    #[test]
    fn what_is_stored_is_loaded_again() -> rusqlite::Result<()> {
        let connection = outbox()?;
        let new = load(&connection, 1)?;
        assert_eq!((new.state, new.effect, new.tries, new.overtaken), (State::Pending, EffectState::None, 0, false));
        let later = CommandFacts {
            state: State::Pending,
            effect: EffectState::Possible,
            attempt_no: 7,
            fresh_no: 3,
            tries: 4,
            found_open: 2,
            first_begun_ms: Some(1_000),
            first_unknown_ms: Some(2_000),
            begun_ms: None,
            due_ms: 9_000,
            not_before_ms: None,
            overtaken: false,
        };
        store(&connection, 1, &later, 8_000)?;
        assert_eq!(load(&connection, 1)?, later);
        assert_eq!(column(&connection, "set_ms")?, 8_000.into());
        let head = "SELECT due_ms, set_ms FROM outbox_lane WHERE head_n = 1";
        assert_eq!(connection.query_row(head, [], |row| Ok((row.get(0)?, row.get(1)?)))?, (9_000, 8_000));
        for state in [State::InDoubt, State::Parked(Some(Reason::Refused)), State::Parked(None), State::Delivered] {
            store(&connection, 1, &CommandFacts { state, ..later }, 8_500)?;
            assert_eq!(load(&connection, 1)?.state, state);
        }
        assert_eq!(column(&connection, "updated_ms")?, 8_500.into());
        Ok(())
    }

    #[test]
    fn the_open_attempt_says_whether_it_is_armed_and_what_unknown_means() -> rusqlite::Result<()> {
        let connection = outbox()?;
        connection.execute_batch("UPDATE outbox_state SET state = 'sending', attempt_no = 1 WHERE n = 1")?;
        let held = State::Sending { armed: true, on_unknown: OnUnknown::Hold };
        assert_eq!(load(&connection, 1)?.state, held, "without an attempt row nobody can say that nothing left");
        connection.execute_batch(
            "INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms) VALUES (1, 1, 1, 'resend', 77)",
        )?;
        let open = load(&connection, 1)?;
        assert_eq!(open.state, State::Sending { armed: false, on_unknown: OnUnknown::Resend });
        assert_eq!(open.begun_ms, Some(77));
        connection.execute_batch("UPDATE outbox_attempt SET armed_ms = 78")?;
        assert_eq!(load(&connection, 1)?.state, State::Sending { armed: true, on_unknown: OnUnknown::Resend });
        Ok(())
    }

    #[test]
    fn a_key_is_given_back_only_where_nothing_happened() -> rusqlite::Result<()> {
        for (reason, effect, kept) in [
            (Reason::Expired, EffectState::None, false),
            (Reason::Superseded, EffectState::None, false),
            (Reason::Expired, EffectState::Possible, true),
            (Reason::Refused, EffectState::None, true),
        ] {
            let connection = outbox()?;
            let facts = CommandFacts { state: State::Dead(reason), effect, ..load(&connection, 1)? };
            store(&connection, 1, &facts, 9_000)?;
            let null = column(&connection, "key")? == rusqlite::types::Value::Null;
            assert_eq!(null, !kept, "{reason:?} {effect:?}");
        }
        Ok(())
    }

    #[test]
    fn damage_and_newer_words() -> rusqlite::Result<()> {
        let connection = outbox()?;
        connection
            .execute_batch("UPDATE outbox_state SET tries = -3, found_open = -1, found_row = 2, fresh_no = -9")?;
        let facts = load(&connection, 1)?;
        assert_eq!((facts.tries, facts.found_open, facts.fresh_no), (0, 0, 0));
        store(&connection, 1, &facts, 9_000)?;
        assert_eq!(column(&connection, "found_row")?, 0.into());
        connection.execute_batch("UPDATE outbox_scope SET watermark = 6")?;
        assert!(load(&connection, 1)?.overtaken);
        connection.execute_batch("UPDATE outbox_state SET state = 'parked', reason = 'tired'")?;
        let error = load(&connection, 1).expect_err("an unknown word");
        assert!(error.to_string().contains("tired"), "{error}");
        assert!(matches!(load(&connection, 2), Err(rusqlite::Error::QueryReturnedNoRows)));
        assert!(matches!(store(&connection, 2, &facts, 1), Err(rusqlite::Error::StatementChangedRows(0))));
        Ok(())
    }
}
