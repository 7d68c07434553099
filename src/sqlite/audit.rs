//! Every invariant that can be read off the database, checked against all of it.
//!
//! A check is a query that finds what must not be there; what it returns names the rows. All of them
//! see one snapshot: a reader in WAL mode holds up no writer. Nothing here trusts what triggers keep
//! (lane rows, indexes over keys), since damage is what is looked for, and nothing is repaired: a
//! person decides what damage means.

use rusqlite::Connection;
use rusqlite::types::ValueRef;

use super::schema::{self, SchemaError};

/// How many rows a finding names at most; its count tells of the rest.
pub const ROWS_MAX: usize = 20;

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The check that found it.
    pub check: &'static str,
    /// What it means, for a person.
    pub means: &'static str,
    /// How many rows there are.
    pub count: usize,
    /// The first of them.
    pub rows: Vec<String>,
}

/// What an audit looked at and what it found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// How many checks ran.
    pub checks: usize,
    /// How many commands the database holds.
    pub commands: i64,
    /// Breaches, in the order of the checks.
    pub findings: Vec<Finding>,
}

struct Check {
    name: &'static str,
    means: &'static str,
    sql: &'static str,
}

/// Names the command of a row `x` of `outbox_state`; the command itself may be what is missing.
macro_rules! command {
    () => {
        "'command ' || coalesce((SELECT o.id FROM outbox o WHERE o.n = x.n), x.minted_id, 'number ' || x.n) || ' (' || x.scope || ', seq ' || x.seq || ')'"
    };
}

/// Commands `x` with something to say about them.
macro_rules! commands {
    ($says:literal, $rest:literal) => {
        concat!("SELECT ", command!(), " || ': ' || ", $says, " FROM outbox_state x ", $rest)
    };
}

const SCHEMA: &str = "the guards of the contract are not what they were, so nothing is known about what was written since; \
     compare with `fencepost init` on a fresh database, and look at everything else that this audit finds";

const UNCHECKED: &str = "it could not be checked, since something that it reads is missing";

const CHECKS: [Check; 34] = [
    Check {
        name: "single-rows",
        means: "policy, dispatcher and version each have one row, without which nothing is admitted or sent",
        sql: "SELECT 'outbox_policy has ' || count(*) || ' rows' FROM outbox_policy HAVING count(*) <> 1
            UNION ALL SELECT 'outbox_dispatcher has ' || count(*) || ' rows' FROM outbox_dispatcher HAVING count(*) <> 1
            UNION ALL SELECT 'outbox_meta has ' || count(*) || ' rows' FROM outbox_meta HAVING count(*) <> 1",
    },
    Check {
        name: "pairs",
        means: "a command and its state come and go together; half of one is damage",
        sql: "SELECT 'command ' || coalesce(o.id, 'number ' || o.n) || ' has no state' FROM outbox o
                WHERE NOT EXISTS (SELECT 1 FROM outbox_state x WHERE x.n = o.n)
            UNION ALL SELECT 'the state of number ' || x.n || ' (' || x.scope || ', seq ' || x.seq || ') has no command' FROM outbox_state x
                WHERE NOT EXISTS (SELECT 1 FROM outbox o WHERE o.n = x.n)",
    },
    Check {
        name: "same-words",
        means: "what the writer gave and what is sent by must be the same",
        sql: commands!(
            "'scope, lane, token or id differ from what its writer gave'",
            "JOIN outbox o ON o.n = x.n WHERE o.scope <> x.scope OR coalesce(o.lane, '') <> x.lane OR o.token <> x.token
                OR (o.id IS NULL) = (x.minted_id IS NULL)"
        ),
    },
    Check {
        name: "states",
        means: "a state that no version writes: it is not known what would be done with the command",
        sql: commands!(
            "'state ' || x.state || coalesce(', reason ' || x.reason, '') || ', effect ' || x.effect",
            "WHERE x.state NOT IN ('pending', 'sending', 'in_doubt', 'parked', 'delivered', 'dead')
                OR x.effect NOT IN ('none', 'possible', 'done')
                OR (x.state = 'dead' AND coalesce(x.reason, '') NOT IN
                    ('fenced', 'refused', 'exhausted', 'invalid', 'superseded', 'cancelled', 'expired', 'abandoned'))
                OR (x.state = 'parked' AND x.reason NOT IN ('refused', 'exhausted'))
                OR (x.state IN ('pending', 'sending', 'in_doubt', 'delivered') AND x.reason IS NOT NULL)"
        ),
    },
    Check {
        name: "content",
        means: "a command that may still be sent has lost what it is to send",
        sql: commands!(
            "'no payload'",
            "JOIN outbox o ON o.n = x.n WHERE (o.payload IS NULL) = (o.payload_bytes IS NULL) AND x.erased_ms IS NULL"
        ),
    },
    Check {
        name: "seq-gaps",
        means: "the commands of a scope are 1, 2, 3 … in commit order, but for what was pruned: some are gone, or were never counted",
        sql: "SELECT 'scope ' || scope || ': seq ' || seq || ' comes after ' || before FROM (
                SELECT x.scope, x.seq, coalesce(lag(x.seq) OVER (PARTITION BY x.scope ORDER BY x.seq), s.pruned_seq) AS before
                    FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope WHERE x.seq > s.pruned_seq)
                WHERE seq <> before + 1
            UNION ALL SELECT 'scope ' || s.scope || ': the last seq is ' || last || ', the next one will be ' || s.next_seq FROM outbox_scope s
                JOIN (SELECT scope, max(seq) AS last FROM outbox_state GROUP BY scope) m ON m.scope = s.scope
                WHERE max(last, s.pruned_seq) <> s.next_seq - 1
            UNION ALL SELECT 'scope ' || s.scope || ': no command is left, the next seq will be ' || s.next_seq FROM outbox_scope s
                WHERE s.next_seq - 1 <> s.pruned_seq AND NOT EXISTS (SELECT 1 FROM outbox_state x WHERE x.scope = s.scope)
            UNION ALL SELECT 'scope ' || x.scope || ' has commands and no row in outbox_scope' FROM outbox_state x
                WHERE NOT EXISTS (SELECT 1 FROM outbox_scope s WHERE s.scope = x.scope) GROUP BY x.scope",
    },
    Check {
        name: "pruned-live",
        means: "only what is final may be pruned, from the front of a scope",
        sql: commands!(
            "x.state || ', though commands up to seq ' || s.pruned_seq || ' count as pruned'",
            "JOIN outbox_scope s ON s.scope = x.scope WHERE x.seq <= s.pruned_seq AND x.state NOT IN ('delivered', 'dead')"
        ),
    },
    Check {
        name: "token-order",
        means: "a command of an older holder was accepted after one of a newer holder: the fence did not hold",
        sql: "SELECT 'scope ' || scope || ': seq ' || seq || ' has era ' || era || ', token ' || token || ' after era ' || era_before || ', token ' || token_before FROM (
                SELECT scope, seq, era, token, lag(era) OVER w AS era_before, lag(token) OVER w AS token_before
                    FROM outbox_state WINDOW w AS (PARTITION BY scope ORDER BY seq))
                WHERE (era, token) < (era_before, token_before)",
    },
    Check {
        name: "watermark",
        means: "a token above its scope's watermark: the watermark fell, and holders that were fenced off may write again",
        sql: commands!(
            "'era ' || x.era || ', token ' || x.token || '; its scope stands at era ' || s.era || ', watermark ' || s.watermark",
            "JOIN outbox_scope s ON s.scope = x.scope WHERE (x.era, x.token) > (s.era, s.watermark)"
        ),
    },
    Check {
        name: "one-holder",
        means: "two holders were accepted with one token: each believes that it holds the lease",
        sql: "SELECT 'scope ' || x.scope || ', token ' || x.token || ': ' || count(DISTINCT o.holder) || ' holders, ' || min(o.holder) || ' and ' || max(o.holder)
                FROM outbox o JOIN outbox_state x ON x.n = o.n WHERE o.holder IS NOT NULL
                GROUP BY x.scope, x.era, x.token HAVING count(DISTINCT o.holder) > 1",
    },
    Check {
        name: "lane-rows",
        means: "the dispatcher finds its work by the lane rows: a wrong one hides a command, or shows one that must wait",
        sql: "SELECT 'scope ' || l.scope || ', lane ''' || l.lane || ''': the row says ' || coalesce('number ' || l.head_n, 'no head')
                || coalesce(' to ' || l.kind || ' ' || l.destination, '') || coalesce(', due ' || l.due_ms, '') || '; it is '
                || coalesce('number ' || h.n, 'no head') || coalesce(' to ' || h.kind || ' ' || h.destination, '') || coalesce(', due ' || h.at_ms, '')
                FROM outbox_lane l LEFT JOIN (
                    SELECT f.*, o.kind, o.destination, CASE f.state WHEN 'pending' THEN min(f.due_ms, coalesce(o.expires_at_ms, f.due_ms))
                            WHEN 'parked' THEN o.expires_at_ms END AS at_ms
                        FROM (SELECT scope, lane, min(seq) AS seq, n, state, due_ms, set_ms FROM outbox_state NOT INDEXED
                            WHERE state IN ('pending', 'sending', 'in_doubt', 'parked') GROUP BY scope, lane) f
                        JOIN outbox o ON o.n = f.n) h ON h.scope = l.scope AND h.lane = l.lane
                WHERE l.head_n IS NOT h.n OR l.kind IS NOT h.kind OR l.destination IS NOT h.destination OR l.due_ms IS NOT h.at_ms OR l.set_ms IS NOT h.set_ms
            UNION ALL SELECT 'scope ' || x.scope || ', lane ''' || x.lane || ''': ' || count(*) || ' live and no row' FROM outbox_state x
                WHERE x.state IN ('pending', 'sending', 'in_doubt', 'parked')
                AND NOT EXISTS (SELECT 1 FROM outbox_lane l WHERE l.scope = x.scope AND l.lane = x.lane) GROUP BY x.scope, x.lane",
    },
    Check {
        name: "begun",
        means: "what was begun in a lane is above what its scope ever accepted",
        sql: "SELECT 'scope ' || l.scope || ', lane ''' || l.lane || ''': begun era ' || l.begun_era || ', token ' || l.begun_token || ', seq ' || l.begun_seq
                || '; the scope stands at era ' || s.era || ', watermark ' || s.watermark || ', next seq ' || s.next_seq
                FROM outbox_lane l JOIN outbox_scope s ON s.scope = l.scope
                WHERE (l.begun_era, l.begun_token) > (s.era, s.watermark) OR l.begun_seq >= s.next_seq",
    },
    Check {
        name: "begun-fell",
        means: "an attempt was made that its lane doesn't know of: something older could be begun after it",
        sql: commands!(
            "'it has attempts, and its lane says that nothing above era ' || l.begun_era || ', token ' || l.begun_token || ', seq ' || l.begun_seq || ' was begun'",
            "JOIN outbox_lane l ON l.scope = x.scope AND l.lane = x.lane
                WHERE x.attempt_no > 0 AND (x.era, x.token, x.seq) > (l.begun_era, l.begun_token, l.begun_seq)"
        ),
    },
    Check {
        name: "head-only",
        means: "only the head of a lane may be sent: this one went before an older one",
        sql: commands!(
            "x.state || ', behind a live one of its lane'",
            "WHERE x.state IN ('in_doubt', 'parked', 'sending') AND x.state IN ('in_doubt', 'sending') AND EXISTS (SELECT 1 FROM outbox_state y
                WHERE y.scope = x.scope AND y.lane = x.lane AND y.seq < x.seq AND y.state IN ('pending', 'sending', 'in_doubt', 'parked'))"
        ),
    },
    Check {
        name: "one-sending",
        means: "two commands of one lane are being sent at the same time",
        sql: "SELECT 'scope ' || scope || ', lane ''' || lane || ''': ' || count(*) || ' are sending' FROM outbox_state
                WHERE state IN ('in_doubt', 'parked', 'sending') AND state = 'sending' GROUP BY scope, lane HAVING count(*) > 1",
    },
    Check {
        name: "open-attempt",
        means: "an attempt is open exactly while its command is being sent; else a start would judge the wrong one",
        sql: "SELECT 'command number ' || x.n || ' (' || x.scope || ', seq ' || x.seq || '): sending, and attempt ' || x.attempt_no || ' is not open' FROM outbox_state x
                WHERE x.state = 'sending' AND NOT EXISTS (SELECT 1 FROM outbox_attempt a WHERE a.n = x.n AND a.attempt_no = x.attempt_no AND a.settled_ms IS NULL)
            UNION ALL SELECT 'command number ' || a.n || ', attempt ' || a.attempt_no || ': open, and the command is ' || coalesce(x.state || ' at attempt ' || x.attempt_no, 'gone')
                FROM outbox_attempt a LEFT JOIN outbox_state x ON x.n = a.n
                WHERE a.settled_ms IS NULL AND (x.state IS NOT 'sending' OR x.attempt_no IS NOT a.attempt_no)",
    },
    Check {
        name: "attempt-numbers",
        means: "attempts are numbered 1, 2, 3 … and none is forgotten: something may have been sent that nothing tells of",
        sql: commands!(
            "'attempt_no ' || x.attempt_no || ', and ' || count(a.attempt_no) || ' attempts from ' || coalesce(min(a.attempt_no), 0) || ' to ' || coalesce(max(a.attempt_no), 0)",
            "JOIN outbox_scope s ON s.scope = x.scope LEFT JOIN outbox_attempt a ON a.n = x.n
                WHERE x.seq > s.pruned_seq GROUP BY x.n
                HAVING count(a.attempt_no) <> x.attempt_no OR coalesce(max(a.attempt_no), 0) <> x.attempt_no OR coalesce(min(a.attempt_no), 1) <> 1"
        ),
    },
    Check {
        name: "stray-attempts",
        means: "an attempt of a command that isn't there",
        sql: "SELECT 'command number ' || a.n || ', attempt ' || a.attempt_no FROM outbox_attempt a
                WHERE NOT EXISTS (SELECT 1 FROM outbox_state x WHERE x.n = a.n)",
    },
    Check {
        name: "attempt-ends",
        means: "an attempt that has ended knows how; only one that was armed can have had an effect",
        sql: "SELECT 'command number ' || n || ', attempt ' || attempt_no || ': ' || coalesce(outcome, 'no outcome')
                || CASE WHEN armed_ms IS NULL THEN ', not armed' ELSE ', armed' END || CASE WHEN settled_ms IS NULL THEN ', open' ELSE ', ended' END
                FROM outbox_attempt WHERE (settled_ms IS NULL) <> (outcome IS NULL) OR outcome NOT IN ('delivered', 'deferred', 'refused', 'unknown')
                OR (outcome IN ('delivered', 'unknown') AND armed_ms IS NULL) OR on_unknown NOT IN ('hold', 'resend', 'probe')",
    },
    Check {
        name: "epochs",
        means: "an attempt of a reign that is to come, or of an older one after a newer one: the epoch fell, or a deposed dispatcher wrote",
        sql: "SELECT 'command number ' || n || ', attempt ' || attempt_no || ': epoch ' || epoch || coalesce(' after ' || before, '') || '; the current one is ' || (SELECT max(epoch) FROM outbox_dispatcher)
                FROM (SELECT n, attempt_no, epoch, lag(epoch) OVER (PARTITION BY n ORDER BY attempt_no) AS before FROM outbox_attempt)
                WHERE epoch < before OR epoch > (SELECT max(epoch) FROM outbox_dispatcher)",
    },
    Check {
        name: "delivered",
        means: "it counts as delivered, and neither an attempt nor a person said so",
        sql: commands!(
            "'no armed attempt that was delivered, and no such answer'",
            "JOIN outbox_scope s ON s.scope = x.scope JOIN outbox o ON o.n = x.n WHERE x.state = 'delivered' AND x.seq > s.pruned_seq
                AND NOT EXISTS (SELECT 1 FROM outbox_attempt a WHERE a.n = x.n AND a.armed_ms IS NOT NULL AND a.outcome = 'delivered')
                AND NOT EXISTS (SELECT 1 FROM outbox_audit v WHERE v.id = coalesce(o.id, x.minted_id) AND v.verb IN ('resolve', 'probe')
                    AND (NOT json_valid(v.after) OR json_extract(v.after, '$.state') = 'delivered' OR json_extract(v.after, '$.answer') = 'delivered'))"
        ),
    },
    Check {
        name: "delivered-twice",
        means: "nothing is sent after it was delivered",
        sql: commands!(
            "'attempt ' || a.attempt_no || ' was delivered, and the last one is ' || x.attempt_no",
            "JOIN outbox_attempt a ON a.n = x.n AND a.outcome = 'delivered' WHERE a.attempt_no <> x.attempt_no OR x.state <> 'delivered'"
        ),
    },
    Check {
        name: "effect-none",
        means: "it says that certainly nothing happened, and an attempt ended without anybody knowing",
        sql: commands!(
            "x.state || ' with effect none; attempt ' || a.attempt_no || ' ended ' || a.outcome",
            "JOIN outbox_attempt a ON a.n = x.n AND a.outcome IN ('unknown', 'delivered') WHERE x.effect = 'none'"
        ),
    },
    Check {
        name: "effect",
        means: "effect and attempts don't fit: done is delivered and nothing else, and possible needs an attempt that ended unknown",
        sql: commands!(
            "x.state || ' with effect ' || x.effect",
            "JOIN outbox_scope s ON s.scope = x.scope WHERE (x.effect = 'done') <> (x.state = 'delivered') OR (x.state = 'in_doubt' AND x.effect <> 'possible')
                OR (x.effect = 'possible' AND x.seq > s.pruned_seq AND NOT EXISTS (SELECT 1 FROM outbox_attempt a WHERE a.n = x.n AND a.outcome = 'unknown'))"
        ),
    },
    Check {
        name: "unique-ids",
        means: "one id names two commands: a receiver takes the second for a repeat",
        sql: "SELECT 'id ' || id || ': ' || count(*) || ' commands' FROM (SELECT id FROM outbox NOT INDEXED WHERE id IS NOT NULL
                UNION ALL SELECT minted_id FROM outbox_state NOT INDEXED WHERE minted_id IS NOT NULL) GROUP BY id HAVING count(*) > 1",
    },
    Check {
        name: "unique-keys",
        means: "one key names two commands: a repeat was not seen as one",
        sql: "SELECT 'scope ' || scope || ', key ' || key || ': ' || count(*) || ' commands' FROM outbox_state NOT INDEXED
                WHERE key IS NOT NULL GROUP BY scope, key HAVING count(*) > 1",
    },
    Check {
        name: "unique-seqs",
        means: "one seq names two commands of a scope",
        sql: "SELECT 'scope ' || scope || ', seq ' || seq || ': ' || count(*) || ' commands' FROM outbox_state NOT INDEXED
                GROUP BY scope, seq HAVING count(*) > 1",
    },
    Check {
        name: "keys",
        means: "a key is given back only where certainly nothing happened: a repeat of this one would make a second command",
        sql: commands!(
            "'its writer gave ' || coalesce('the key ' || o.key, 'no key') || ', it has ' || coalesce('the key ' || x.key, 'none')",
            "JOIN outbox o ON o.n = x.n WHERE x.key IS NOT o.key
                AND NOT (x.key IS NULL AND x.state = 'dead' AND x.reason IN ('superseded', 'expired', 'fenced') AND x.effect = 'none')"
        ),
    },
    Check {
        name: "used-ids",
        means: "the id of a live command counts as used up: it was taken for pruned",
        sql: commands!(
            "x.state || ', and its id is in outbox_used'",
            "JOIN outbox o ON o.n = x.n JOIN outbox_used u ON u.id = coalesce(o.id, x.minted_id) WHERE x.state NOT IN ('delivered', 'dead')"
        ),
    },
    Check {
        name: "event-numbers",
        means: "the numbers of the feed only rise: its readers would miss what comes next",
        sql: "SELECT 'the greatest number is ' || max(e.n) || ', the next one will be ' || (1 + coalesce((SELECT max(q.seq) FROM sqlite_sequence q WHERE q.name = 'outbox_event'), 0))
                FROM outbox_event e HAVING max(e.n) > coalesce((SELECT max(q.seq) FROM sqlite_sequence q WHERE q.name = 'outbox_event'), 0) OR min(e.n) < 1",
    },
    Check {
        name: "events-after-end",
        means: "a final state never changes, and the feed tells of a change",
        sql: "SELECT 'command ' || id || ': event ' || max(n) || ' after the end in event ' || min(n) FILTER (WHERE event IN ('delivered', 'dead')) FROM outbox_event
                GROUP BY scope, seq HAVING max(n) > min(n) FILTER (WHERE event IN ('delivered', 'dead'))",
    },
    Check {
        name: "events-true",
        means: "the feed told of another end than the command has",
        sql: commands!(
            "'the feed says ' || e.event || coalesce('/' || e.reason, '') || ', effect ' || e.effect || '; it is ' || x.state || coalesce('/' || x.reason, '') || ', effect ' || x.effect",
            "JOIN outbox_event e ON e.scope = x.scope AND e.seq = x.seq AND e.event IN ('delivered', 'dead')
                WHERE e.event <> x.state OR e.reason IS NOT x.reason OR e.effect <> x.effect"
        ),
    },
    Check {
        name: "counters",
        means: "numbers that only rise have fallen below nothing",
        sql: commands!(
            "'attempt_no ' || x.attempt_no || ', tries ' || x.tries || ', fresh_no ' || x.fresh_no || ', found_open ' || x.found_open",
            "WHERE min(x.attempt_no, x.tries, x.fresh_no, x.found_open, x.found_row) < 0 OR x.tries > x.attempt_no OR x.fresh_no > x.attempt_no"
        ),
    },
    Check {
        name: "scopes",
        means: "numbers of a scope that no contract gives",
        sql: "SELECT 'scope ' || scope || ': watermark ' || watermark || ', era ' || era || ', next seq ' || next_seq || ', pruned to ' || pruned_seq FROM outbox_scope
                WHERE watermark NOT BETWEEN 0 AND 4611686018427387904 OR era < 0 OR next_seq < 1 OR pruned_seq NOT BETWEEN 0 AND next_seq - 1
                OR (era > 0 AND source IS NULL)",
    },
];

/// Tables whose rows and indexes SQLite itself compares.
const TABLES: [&str; 12] = [
    "outbox",
    "outbox_state",
    "outbox_scope",
    "outbox_lane",
    "outbox_attempt",
    "outbox_policy",
    "outbox_dispatcher",
    "outbox_refusal",
    "outbox_pause",
    "outbox_used",
    "outbox_event",
    "outbox_audit",
];

/// Checks everything, at one moment of the database.
///
/// Fails with [`SchemaError::Missing`], [`SchemaError::Major`] or [`SchemaError::Older`] where there is
/// no outbox of this version to check; changed or missing guards are a finding.
pub fn audit(connection: &Connection) -> Result<Report, SchemaError> {
    let snapshot = connection.unchecked_transaction()?;
    let mut findings: Vec<Finding> = guards(&snapshot)?.into_iter().collect();
    findings.extend(file(&snapshot)?);
    let guarded = findings.iter().all(|finding| finding.check != "schema");
    for check in &CHECKS {
        match rows(&snapshot, check.sql) {
            Ok((0, _)) => {}
            Ok((count, rows)) => findings.push(Finding { check: check.name, means: check.means, count, rows }),
            // A table or column is gone, which is told already; the other checks must not be held up.
            Err(error) if !guarded && error.sqlite_error_code() == Some(rusqlite::ErrorCode::Unknown) => {
                findings.push(Finding { check: check.name, means: UNCHECKED, count: 1, rows: vec![error.to_string()] });
            }
            Err(error) => return Err(error.into()),
        }
    }
    let commands = match snapshot.table_exists(None, "outbox_state")? {
        true => snapshot.query_row("SELECT count(*) FROM outbox_state", [], |row| row.get(0))?,
        false => 0,
    };
    Ok(Report { checks: CHECKS.len() + 2, commands, findings })
}

fn guards(connection: &Connection) -> Result<Option<Finding>, SchemaError> {
    match schema::verify(connection) {
        Ok(()) => Ok(None),
        Err(SchemaError::Drift { objects }) => {
            let rows = objects.iter().take(ROWS_MAX).map(ToString::to_string).collect();
            Ok(Some(Finding { check: "schema", means: SCHEMA, count: objects.len(), rows }))
        }
        Err(error) => Err(error),
    }
}

/// Whether pages, rows and indexes agree, for the tables of the contract alone: the application's may be
/// large, and are its own.
fn file(connection: &Connection) -> rusqlite::Result<Option<Finding>> {
    let mut finding = Finding {
        check: "file",
        means: "the file is damaged: restore a backup, or have SQLite recover it",
        count: 0,
        rows: Vec::new(),
    };
    for table in TABLES {
        if !connection.table_exists(None, table)? {
            continue;
        }
        let (count, rows) = rows(
            connection,
            &format!("SELECT integrity_check FROM pragma_integrity_check('{table}') WHERE integrity_check <> 'ok'"),
        )?;
        finding.count += count;
        finding.rows.extend(rows.into_iter().map(|row| format!("{table}: {row}")));
    }
    finding.rows.truncate(ROWS_MAX);
    Ok((finding.count > 0).then_some(finding))
}

/// How many rows a query has, and the first of them.
fn rows(connection: &Connection, sql: &str) -> rusqlite::Result<(usize, Vec<String>)> {
    let mut statement = connection.prepare(sql)?;
    let mut found = statement.query([])?;
    let (mut count, mut rows) = (0, Vec::new());
    while let Some(row) = found.next()? {
        count += 1;
        if rows.len() < ROWS_MAX {
            rows.push(match row.get_ref(0)? {
                ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                // A NULL among the parts leaves no text; that there is a row is what counts.
                ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => "a row that can't be named".to_owned(),
            });
        }
    }
    Ok((count, rows))
}
