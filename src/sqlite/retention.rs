//! What may go after a while: finished commands, their payloads, events, and what is remembered of them.
//!
//! Only what is final goes, and of a scope only what stands at its front, so that seqs stay without gaps
//! for whoever reads on. A scope's row stays for ever: it is the fence. Id, key and a hash of the content
//! outlive a command, or a worker that repeats itself would be taken for a new one. Everything happens in
//! transactions of a few milliseconds, because workers and the dispatcher wait for the same write lock;
//! the caller pauses in between.

use std::collections::VecDeque;
use std::time::Duration;

use rusqlite::{Connection, Row, Transaction, TransactionBehavior, params};

use super::content::{Compared, content_hash};
use crate::clock;

/// Rows that one transaction touches at the most.
const ROWS_MAX: usize = 200;

/// After this long a transaction takes no further row.
const TIME_MAX_MS: i64 = 20;

/// Scopes, or commands, that one look goes through.
const LOOK_MAX: i64 = 2_000;

/// How old something must be before it goes; `None` keeps it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ages {
    /// Delivered commands, since their end.
    pub delivered: Option<Duration>,
    /// Dead commands, since their end.
    pub dead: Option<Duration>,
    /// Payload and headers of finished commands, since their end. The command itself stays.
    pub erase: Option<Duration>,
    /// Events of the feed.
    pub events: Option<Duration>,
}

/// What went, or would go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gone {
    /// Delivered commands that were pruned.
    pub delivered: u64,
    /// Dead commands that were pruned.
    pub dead: u64,
    /// Commands whose payload and headers were erased.
    pub erased: u64,
    /// Events.
    pub events: u64,
    /// Ids and keys that are not remembered any more.
    pub forgotten: u64,
}

impl Gone {
    /// All of it together.
    pub const fn total(&self) -> u64 {
        self.delivered + self.dead + self.erased + self.events + self.forgotten
    }
}

/// One pass: what is older than `ages` goes, and what is remembered too long is forgotten.
///
/// After each transaction `step` hears what has gone so far and how long that transaction took; it
/// pauses, and says whether to go on. What has gone then is durable, and another pass finds the rest.
/// Fails where the database does; a database that is busy for the whole busy timeout is one such case.
pub fn pass(
    connection: &mut Connection,
    ages: &Ages,
    now_ms: i64,
    step: &mut dyn FnMut(&Gone, Duration) -> bool,
) -> rusqlite::Result<Gone> {
    // What is erased must not stay in the free space of a page.
    connection.pragma_update(None, "secure_delete", true)?;
    let limits = Limits::new(ages, now_ms);
    let mut pass = Pass { connection, limits, gone: Gone::default(), step };
    let _stopped = pass.prune()? && pass.erase()? && pass.events()? && pass.forget()?;
    Ok(pass.gone)
}

/// Counts what a pass would take, without writing. What is only remembered is not counted.
pub fn plan(connection: &Connection, ages: &Ages, now_ms: i64) -> rusqlite::Result<Gone> {
    let limits = Limits::new(ages, now_ms);
    let mut gone = Gone::default();
    let mut erased_with_them = 0;
    let mut after = Vec::new();
    while let Some(look) = scopes(connection, &limits, &mut after)? {
        for scope in look {
            let mut seq = 0;
            loop {
                let front = front(connection, &limits, &scope, seq, ROWS_MAX)?;
                let Some(last) = front.last() else { break };
                seq = last.seq;
                front.iter().for_each(|row| gone.count(row));
                erased_with_them += front.iter().filter(|row| limits.erases(row)).count();
            }
        }
    }
    let mut after = 0;
    let mut erased = 0;
    while let Some(look) = erasable(connection, &limits, &mut after)? {
        erased += look.len();
    }
    gone.erased = u64::try_from(erased.saturating_sub(erased_with_them)).unwrap_or(u64::MAX);
    gone.events = connection.query_row(
        "SELECT count(*) FROM outbox_event WHERE n < coalesce((SELECT min(n) FROM outbox_event WHERE at_ms > ?1), 9223372036854775807)",
        [limits.events],
        |row| row.get::<_, i64>(0),
    )?.unsigned_abs();
    Ok(gone)
}

impl Gone {
    fn count(&mut self, row: &Final) {
        if row.dead {
            self.dead += 1;
        } else {
            self.delivered += 1;
        }
    }
}

/// What ended at this time or before it goes. Nothing is as old as the least number.
struct Limits {
    now_ms: i64,
    delivered: i64,
    dead: i64,
    erase: i64,
    events: i64,
}

impl Limits {
    fn new(ages: &Ages, now_ms: i64) -> Self {
        let before = |age: Option<Duration>| {
            age.map_or(i64::MIN, |age| now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX)))
        };
        Self {
            now_ms,
            delivered: before(ages.delivered),
            dead: before(ages.dead),
            erase: before(ages.erase),
            events: before(ages.events),
        }
    }

    const fn prunes(&self, row: &Final) -> bool {
        row.ended_ms <= if row.dead { self.dead } else { self.delivered }
    }

    const fn erases(&self, row: &Final) -> bool {
        !row.erased && row.ended_ms <= self.erase
    }
}

/// A command that has ended.
struct Final {
    n: i64,
    seq: i64,
    dead: bool,
    ended_ms: i64,
    erased: bool,
}

const FINAL: &str =
    "x.n, x.seq, x.state = 'dead', x.updated_ms, x.erased_ms IS NOT NULL, x.state IN ('delivered', 'dead')
    AND NOT EXISTS (SELECT 1 FROM outbox_attempt a WHERE a.n = x.n AND a.settled_ms IS NULL)";

/// `None` if the command is live, or one of its attempts is still open.
fn ended(row: &Row<'_>) -> rusqlite::Result<Option<Final>> {
    let found =
        Final { n: row.get(0)?, seq: row.get(1)?, dead: row.get(2)?, ended_ms: row.get(3)?, erased: row.get(4)? };
    Ok(row.get::<_, bool>(5)?.then_some(found))
}

// ── Looking. Names are handled as bytes: a scope need not be UTF-8 ───────────────────────────────────

/// The next scopes whose first command may go; `None` behind the last scope. Each costs one look into an
/// index, however many commands it has.
fn scopes(connection: &Connection, limits: &Limits, after: &mut Vec<u8>) -> rusqlite::Result<Option<Vec<Vec<u8>>>> {
    if limits.delivered == i64::MIN && limits.dead == i64::MIN {
        return Ok(None);
    }
    let sql = format!(
        "SELECT {FINAL}, s.scope FROM (SELECT scope FROM outbox_scope WHERE scope > CAST(?1 AS TEXT) ORDER BY scope LIMIT {LOOK_MAX}) s
         LEFT JOIN outbox_state x ON x.scope = s.scope AND x.seq = (SELECT min(seq) FROM outbox_state WHERE scope = s.scope)
         ORDER BY s.scope"
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query([&after[..]])?;
    let (mut found, mut any) = (Vec::new(), false);
    while let Some(row) = rows.next()? {
        any = true;
        *after = row.get_ref(6)?.as_bytes()?.to_vec();
        // Without a command there is no row beside the scope.
        if row.get::<_, Option<i64>>(0)?.is_some() && ended(row)?.is_some_and(|row| limits.prunes(&row)) {
            found.push(after.clone());
        }
    }
    Ok(any.then_some(found))
}

/// What may go at the front of a scope, behind `seq`.
fn front(
    connection: &Connection,
    limits: &Limits,
    scope: &[u8],
    seq: i64,
    most: usize,
) -> rusqlite::Result<Vec<Final>> {
    let sql = format!(
        "SELECT {FINAL} FROM outbox_state x WHERE x.scope = CAST(?1 AS TEXT) AND x.seq > ?2 ORDER BY x.seq LIMIT {most}"
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params![scope, seq])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        match ended(row)?.filter(|row| limits.prunes(row)) {
            Some(row) => found.push(row),
            None => break,
        }
    }
    Ok(found)
}

/// The next commands whose content may go; `None` behind the last command.
fn erasable(connection: &Connection, limits: &Limits, after: &mut i64) -> rusqlite::Result<Option<Vec<i64>>> {
    if limits.erase == i64::MIN {
        return Ok(None);
    }
    let sql = format!("SELECT {FINAL} FROM outbox_state x WHERE x.n > ?1 ORDER BY x.n LIMIT {LOOK_MAX}");
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query([*after])?;
    let (mut found, mut any) = (Vec::new(), false);
    while let Some(row) = rows.next()? {
        any = true;
        *after = row.get(0)?;
        if ended(row)?.is_some_and(|row| limits.erases(&row)) {
            found.push(*after);
        }
    }
    Ok(any.then_some(found))
}

// ── Writing ──────────────────────────────────────────────────────────────────────────────────────────

struct Pass<'a> {
    connection: &'a mut Connection,
    limits: Limits,
    gone: Gone,
    step: &'a mut dyn FnMut(&Gone, Duration) -> bool,
}

/// What one transaction may still do.
struct Room {
    rows: usize,
    until_boot_ms: i64,
}

impl Room {
    /// Takes the place of one row, if there is one.
    fn take(&mut self) -> bool {
        // The first row is always taken, or nothing would ever go on a machine that stalls.
        let free = self.rows == ROWS_MAX || (self.rows > 0 && clock::now().boot_ms < self.until_boot_ms);
        if free {
            self.rows -= 1;
        }
        free
    }
}

impl Pass<'_> {
    /// Does the work in as many transactions as it needs: it says whether it is done. Tells whether to go
    /// on with other work.
    fn in_steps(
        &mut self,
        mut work: impl FnMut(&Transaction<'_>, &Limits, &mut Room, &mut Gone) -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<bool> {
        loop {
            let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let began_ms = clock::now().boot_ms;
            let mut room = Room { rows: ROWS_MAX, until_boot_ms: began_ms.saturating_add(TIME_MAX_MS) };
            let mut gone = self.gone;
            let done = work(&transaction, &self.limits, &mut room, &mut gone)?;
            transaction.commit()?;
            self.gone = gone;
            let took_ms = clock::now().boot_ms.saturating_sub(began_ms);
            let took = Duration::from_millis(u64::try_from(took_ms).unwrap_or(0));
            if !(self.step)(&self.gone, took) {
                return Ok(false);
            }
            if done {
                return Ok(true);
            }
        }
    }

    /// Goes on from look to look until nothing more is found, and does `one` to each that was found; it says
    /// whether there was room for it.
    fn each<Found, Place: Default>(
        &mut self,
        look: impl Fn(&Connection, &Limits, &mut Place) -> rusqlite::Result<Option<Vec<Found>>>,
        one: impl Fn(&Transaction<'_>, &Limits, &Found, &mut Room, &mut Gone) -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<bool> {
        let mut after = Place::default();
        while let Some(found) = look(self.connection, &self.limits, &mut after)? {
            let mut left = VecDeque::from(found);
            if left.is_empty() {
                continue;
            }
            let go_on = self.in_steps(|transaction, limits, room, gone| {
                while let Some(found) = left.front() {
                    if !one(transaction, limits, found, room, gone)? {
                        return Ok(false);
                    }
                    left.pop_front();
                }
                Ok(true)
            })?;
            if !go_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn prune(&mut self) -> rusqlite::Result<bool> {
        self.each(scopes, |transaction, limits, scope, room, gone| prune_front(transaction, limits, scope, room, gone))
    }

    fn erase(&mut self) -> rusqlite::Result<bool> {
        self.each(erasable, |transaction, limits, n, room, gone| {
            let free = room.take();
            if free {
                gone.erased += u64::from(erase(transaction, limits, *n)?);
            }
            Ok(free)
        })
    }

    fn events(&mut self) -> rusqlite::Result<bool> {
        if self.limits.events == i64::MIN {
            return Ok(true);
        }
        self.in_steps(|transaction, limits, room, gone| {
            while let Some((n, at_ms)) = first(transaction, "SELECT n, at_ms FROM outbox_event ORDER BY n LIMIT 1")? {
                if at_ms > limits.events {
                    return Ok(true);
                }
                if !room.take() {
                    return Ok(false);
                }
                transaction.prepare_cached("DELETE FROM outbox_event WHERE n = ?1")?.execute([n])?;
                gone.events += 1;
            }
            Ok(true)
        })
    }

    fn forget(&mut self) -> rusqlite::Result<bool> {
        self.in_steps(|transaction, limits, room, gone| {
            loop {
                let sql = "SELECT id, EXISTS (SELECT 1 FROM outbox WHERE id = u.id) OR EXISTS (SELECT 1 FROM outbox_state WHERE minted_id = u.id)
                    FROM outbox_used u WHERE until_ms < ?1 ORDER BY until_ms LIMIT 1";
                let mut statement = transaction.prepare_cached(sql)?;
                let mut rows = statement.query([limits.now_ms])?;
                let Some(row) = rows.next()? else { return Ok(true) };
                let (id, there): (String, bool) = (row.get(0)?, row.get(1)?);
                drop(rows);
                if !room.take() {
                    return Ok(false);
                }
                if there {
                    // Its content was erased and the command is still there: it is remembered on.
                    transaction.prepare_cached(LONGER)?.execute(params![id, limits.now_ms])?;
                } else {
                    transaction.prepare_cached("DELETE FROM outbox_used WHERE id = ?1")?.execute([id])?;
                    gone.forgotten += 1;
                }
            }
        })
    }
}

fn first(connection: &Connection, sql: &str) -> rusqlite::Result<Option<(i64, i64)>> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query([])?;
    rows.next()?.map(|row| Ok((row.get(0)?, row.get(1)?))).transpose()
}

/// Prunes the front of a scope; `false` if there is no more room in this transaction.
fn prune_front(
    transaction: &Transaction<'_>,
    limits: &Limits,
    scope: &[u8],
    room: &mut Room,
    gone: &mut Gone,
) -> rusqlite::Result<bool> {
    loop {
        // Read under the write lock: nothing can come in between.
        let front = front(transaction, limits, scope, 0, ROWS_MAX)?;
        if front.is_empty() {
            return Ok(true);
        }
        for row in front {
            if !room.take() {
                return Ok(false);
            }
            prune(transaction, limits, scope, &row)?;
            gone.count(&row);
        }
    }
}

const PRUNED: &str = "UPDATE outbox_scope SET pruned_seq = ?2 WHERE scope = CAST(?1 AS TEXT) AND pruned_seq < ?2";

/// The start of a dispatcher compares: what its commands know of, and what went with them, was begun.
const ATTEMPTS: &str = "UPDATE outbox_dispatcher SET attempts_pruned = attempts_pruned + (SELECT attempt_no FROM outbox_state WHERE n = ?1)
    WHERE one = 1 AND EXISTS (SELECT 1 FROM outbox_state WHERE n = ?1 AND attempt_no > 0)";

/// The order is the contract's: first the number, then what is remembered, attempts, command and state.
fn prune(transaction: &Transaction<'_>, limits: &Limits, scope: &[u8], row: &Final) -> rusqlite::Result<()> {
    transaction.prepare_cached(PRUNED)?.execute(params![scope, row.seq])?;
    transaction.prepare_cached(ATTEMPTS)?.execute([row.n])?;
    remember(transaction, limits, row.n)?;
    for sql in [
        "DELETE FROM outbox_attempt WHERE n = ?1",
        "DELETE FROM outbox WHERE n = ?1",
        "DELETE FROM outbox_state WHERE n = ?1",
    ] {
        transaction.prepare_cached(sql)?.execute([row.n])?;
    }
    Ok(())
}

/// Erases payload and headers; `false` if somebody was faster.
fn erase(transaction: &Transaction<'_>, limits: &Limits, n: i64) -> rusqlite::Result<bool> {
    let mut statement = transaction.prepare_cached(
        "SELECT 1 FROM outbox_state WHERE n = ?1 AND state IN ('delivered', 'dead') AND erased_ms IS NULL",
    )?;
    if !statement.exists([n])? {
        return Ok(false);
    }
    remember(transaction, limits, n)?;
    transaction
        .prepare_cached("UPDATE outbox_state SET erased_ms = ?2 WHERE n = ?1")?
        .execute(params![n, limits.now_ms])?;
    transaction
        .prepare_cached("UPDATE outbox SET headers = NULL, payload = NULL, payload_bytes = NULL WHERE n = ?1")?
        .execute([n])?;
    Ok(true)
}

const LONGER: &str =
    "UPDATE outbox_used SET until_ms = max(until_ms, ?2 + (SELECT coalesce(s.key_retention, p.key_retention)
    FROM outbox_policy p LEFT JOIN outbox_scope s ON s.scope = outbox_used.scope)) WHERE id = ?1";

const CONTENT: &str =
    "SELECT coalesce(o.id, x.minted_id), x.lane, o.kind, o.destination, o.headers, coalesce(o.payload, o.payload_bytes)
    FROM outbox_state x JOIN outbox o ON o.n = x.n WHERE x.n = ?1";

const REMEMBER: &str = "INSERT INTO outbox_used(id, scope, key, sha256, until_ms)
    SELECT coalesce(o.id, x.minted_id), x.scope, x.key, ?2, ?3 + coalesce(s.key_retention, p.key_retention)
    FROM outbox_policy p, outbox_state x JOIN outbox o ON o.n = x.n JOIN outbox_scope s ON s.scope = x.scope WHERE x.n = ?1";

/// Keeps id, key and hash. What was erased before is known already, and its content is gone.
fn remember(transaction: &Transaction<'_>, limits: &Limits, n: i64) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare_cached(CONTENT)?;
    let mut rows = statement.query([n])?;
    let Some(row) = rows.next()? else { return Err(rusqlite::Error::QueryReturnedNoRows) };
    let id: String = row.get(0)?;
    if transaction.prepare_cached(LONGER)?.execute(params![id, limits.now_ms])? > 0 {
        return Ok(());
    }
    let sha256 = content_hash(&Compared {
        lane: row.get_ref(1)?.as_bytes()?,
        kind: row.get_ref(2)?.as_bytes()?,
        destination: row.get_ref(3)?.as_bytes()?,
        headers: row.get_ref(4)?.as_bytes_or_null()?,
        payload: row.get_ref(5)?.as_bytes()?,
    });
    transaction.prepare_cached(REMEMBER)?.execute(params![n, sha256, limits.now_ms]).map(drop)
}
