//! The worker side: lease, fence, enqueue and a holder's verdicts, inside the caller's own transaction.
//!
//! The database decides every question (`schema.sql`); these functions send one statement, read back
//! what it did and turn a refusal into a [`WorkerError`] that names both tokens. They must never decide
//! a second time, never open or commit the caller's transaction, and never wait. They roll it back in two
//! cases, as the database itself would: where a [`reissue`] can't be made, and where a key names a command
//! whose content is gone and its hash says that it was another one.
//!
//! **They can't stop a caller who passes over a refusal.** A refusal has rolled the transaction back,
//! and what is sent on the connection afterwards commits by itself, statement by statement. So fence
//! first, enqueue last, and leave the transaction function with `?`; or use [`super::Fenced`].

use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use std::time::Duration;

use super::content::{Compared, content_hash};
use super::refused::{Asked, WorkerError, explain, illegal_name, refuse};
use crate::rules::{self, Code, FencingToken, LEASE, TTL_MS_MAX};

/// The state of a command that was pruned, of which id, key and hash are left.
const PRUNED: &str = "pruned";

/// What a worker says of itself: its scope, its token, and who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Held<'a> {
    /// What it holds.
    pub scope: &'a str,
    /// The number of its acquisition.
    pub token: FencingToken,
    /// The identity of this one acquisition. Without it, the lease service alone answers for it that
    /// no two holders have one number.
    pub holder: Option<&'a str>,
    /// The name of the lease service.
    pub source: Option<&'a str>,
}

impl<'a> Held<'a> {
    /// A scope and a token, without a holder and a source.
    pub const fn new(scope: &'a str, token: FencingToken) -> Self {
        Self { scope, token, holder: None, source: None }
    }

    /// The same with the identity of this acquisition.
    #[must_use]
    pub const fn holder(self, holder: &'a str) -> Self {
        Self { holder: Some(holder), ..self }
    }

    /// The same with the name of the lease service.
    #[must_use]
    pub const fn source(self, source: &'a str) -> Self {
        Self { source: Some(source), ..self }
    }
}

/// The content of a command: text, or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content<'a> {
    /// Stored as text.
    Text(&'a str),
    /// Stored as a blob. The same bytes as text are the same content.
    Bytes(&'a [u8]),
}

impl<'a> From<&'a str> for Content<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a [u8]> for Content<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes)
    }
}

/// A command to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewCommand<'a> {
    kind: &'a str,
    destination: &'a str,
    content: Content<'a>,
    id: Option<&'a str>,
    key: Option<&'a str>,
    lane: Option<&'a str>,
    headers: Option<&'a str>,
    not_before_ms: Option<i64>,
    expires_at_ms: Option<i64>,
    traceparent: Option<&'a str>,
}

impl<'a> NewCommand<'a> {
    /// A command of any registered kind.
    pub fn new(kind: &'a str, destination: &'a str, content: impl Into<Content<'a>>) -> Self {
        Self {
            kind,
            destination,
            content: content.into(),
            id: None,
            key: None,
            lane: None,
            headers: None,
            not_before_ms: None,
            expires_at_ms: None,
            traceparent: None,
        }
    }

    /// A webhook to a named endpoint; the payload is its body.
    pub fn webhook(destination: &'a str, payload: impl Into<Content<'a>>) -> Self {
        Self::new("webhook", destination, payload)
    }

    /// A mail through a named relay; the payload is the mail as JSON.
    pub fn email(destination: &'a str, payload: impl Into<Content<'a>>) -> Self {
        Self::new("email", destination, payload)
    }

    /// Its id, 1 to 64 of `[A-Za-z0-9_-]` and unique for ever. Left out, the database makes one.
    #[must_use]
    pub const fn id(self, id: &'a str) -> Self {
        Self { id: Some(id), ..self }
    }

    /// Your own idempotency key, unique in the scope.
    #[must_use]
    pub const fn key(self, key: &'a str) -> Self {
        Self { key: Some(key), ..self }
    }

    /// The line of commands inside the scope in which order is kept.
    #[must_use]
    pub const fn lane(self, lane: &'a str) -> Self {
        Self { lane: Some(lane), ..self }
    }

    /// Additional headers: the text of a JSON object of texts.
    #[must_use]
    pub const fn headers(self, json: &'a str) -> Self {
        Self { headers: Some(json), ..self }
    }

    /// Not to be begun before this time, in milliseconds since 1970.
    #[must_use]
    pub const fn not_before_ms(self, at_ms: i64) -> Self {
        Self { not_before_ms: Some(at_ms), ..self }
    }

    /// Not to be begun after this time, in milliseconds since 1970.
    #[must_use]
    pub const fn expires_at_ms(self, at_ms: i64) -> Self {
        Self { expires_at_ms: Some(at_ms), ..self }
    }

    /// W3C trace context.
    #[must_use]
    pub const fn traceparent(self, traceparent: &'a str) -> Self {
        Self { traceparent: Some(traceparent), ..self }
    }
}

/// A lease that was acquired. It is durable when the transaction has committed, not before.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// What is held.
    pub scope: String,
    /// The number of this acquisition; the watermark is already raised to it.
    pub token: FencingToken,
    /// The identity of this acquisition.
    pub holder: String,
    /// When it runs out, in milliseconds since 1970.
    pub until_ms: i64,
    /// The live commands of earlier holders, by seq.
    pub backlog: Vec<Waiting>,
}

impl Lease {
    /// What to say of oneself in every transaction under this lease.
    pub fn held(&self) -> Held<'_> {
        Held { scope: &self.scope, token: self.token, holder: Some(&self.holder), source: Some(LEASE) }
    }
}

/// A live command of an earlier holder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Its id.
    pub id: String,
    /// Its lane.
    pub lane: String,
    /// Its place in the scope.
    pub seq: i64,
    /// The token under which it was written.
    pub token: i64,
    /// Its idempotency key.
    pub key: Option<String>,
    /// Its kind.
    pub kind: String,
    /// Its destination.
    pub destination: String,
    /// `pending`, `sending`, `in_doubt` or `parked`.
    pub state: String,
    /// `none`, `possible` or `done`.
    pub effect: String,
    /// How many attempts were begun.
    pub attempt_no: i64,
    /// When it was written, in milliseconds since 1970.
    pub inserted_ms: i64,
    /// When a pending one may be begun.
    pub due_ms: Option<i64>,
    /// When it expires.
    pub expires_at_ms: Option<i64>,
}

/// What an enqueue did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Enqueued {
    /// A new command is in.
    New {
        /// Its id.
        id: String,
        /// Its place in the scope.
        seq: i64,
    },
    /// The command was known already, with the same content; nothing was inserted. The fence and the
    /// watermark have acted all the same.
    Duplicate {
        /// The id of the known command.
        id: String,
        /// Its state now; `pruned` if only its id, key and hash are left.
        state: String,
    },
}

impl Enqueued {
    /// The id of the command, new or known.
    pub fn id(&self) -> &str {
        match self {
            Self::New { id, .. } | Self::Duplicate { id, .. } => id,
        }
    }
}

/// A holder for one acquisition: a random UUID. Make a new one each time.
pub fn new_holder() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Acquires the built-in lease of a scope for one acquisition, which seals it in the same transaction:
/// once this has committed, no older holder can write to the scope.
///
/// Fails with FP013 if it is held, by this holder too, or if the scope's tokens are a foreign
/// service's; with FP003 if this holder acquired it before. A refusal undoes the whole transaction, so
/// try one scope per transaction.
pub fn acquire(tx: &Transaction<'_>, scope: &str, holder: &str, ttl: Duration) -> Result<Lease, WorkerError> {
    let ttl_ms = whole_ms(ttl);
    let illegal = || {
        illegal_lease(scope, holder, Some(ttl_ms)).or_else(|| {
            Some(("holder", "it has acquired this scope before; make a new one for each acquisition".to_owned()))
        })
    };
    let asked = Asked { scope, token: None, id: None, illegal: &illegal };
    run(
        tx,
        &asked,
        "INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES (?1, ?2, ?3)",
        params![scope, holder, ttl_ms],
    )?;
    let (token, until_ms) = read(
        tx,
        "SELECT token, until_ms FROM outbox_lease WHERE scope = ?1 AND holder = ?2",
        params![scope, holder],
        |row| Ok((token_at(row, 0)?, row.get(1)?)),
    )?;
    let backlog = backlog(tx, scope)?;
    Ok(Lease { scope: scope.to_owned(), token, holder: holder.to_owned(), until_ms, backlog })
}

/// Prolongs a lease from now on and returns when it runs out. A lease that expired or was released is
/// revived, as long as nobody acquired the scope since; else FP001.
pub fn renew(
    tx: &Transaction<'_>,
    scope: &str,
    token: FencingToken,
    holder: &str,
    ttl: Duration,
) -> Result<i64, WorkerError> {
    let ttl_ms = whole_ms(ttl);
    let illegal = || illegal_lease(scope, holder, Some(ttl_ms));
    let asked = Asked { scope, token: Some(token), id: None, illegal: &illegal };
    run(
        tx,
        &asked,
        "INSERT INTO outbox_renew(scope, token, holder, ttl_ms) VALUES (?1, ?2, ?3, ?4)",
        params![scope, token.get(), holder, ttl_ms],
    )?;
    read(tx, "SELECT until_ms FROM outbox_lease WHERE scope = ?1", params![scope], |row| row.get(0))
}

/// Gives a lease back: the scope is free at once. Token and holder stay accepted until the next
/// acquisition.
pub fn release(tx: &Transaction<'_>, scope: &str, token: FencingToken, holder: &str) -> Result<(), WorkerError> {
    let illegal = || illegal_lease(scope, holder, None);
    let asked = Asked { scope, token: Some(token), id: None, illegal: &illegal };
    run(
        tx,
        &asked,
        "INSERT INTO outbox_release(scope, token, holder) VALUES (?1, ?2, ?3)",
        params![scope, token.get(), holder],
    )?;
    Ok(())
}

/// Raises the watermark to a token of a foreign lease service, before the new holder's first read, and
/// returns the live commands of earlier holders. Without it an old holder is accepted until the new
/// one writes. Fails with FP013 in a scope of the built-in lease, which is sealed by its acquire.
pub fn seal(
    tx: &Transaction<'_>,
    scope: &str,
    token: FencingToken,
    holder: Option<&str>,
    source: Option<&str>,
) -> Result<Vec<Waiting>, WorkerError> {
    claim(
        tx,
        "INSERT INTO outbox_seal(scope, token, holder, source) VALUES (?1, ?2, ?3, ?4)",
        &Held { scope, token, holder, source },
    )?;
    backlog(tx, scope)
}

/// Checks the token like an enqueue, raising included, without a command. First in every transaction:
/// from here on the write lock is ours, and what is read can't be changed by a newer holder.
pub fn fence(tx: &Transaction<'_>, held: &Held<'_>) -> Result<(), WorkerError> {
    claim(tx, "INSERT INTO outbox_fence(scope, token, holder, source) VALUES (?1, ?2, ?3, ?4)", held)
}

/// Writes a command. Last in every transaction: it is durable, and will be sent, when the transaction
/// has committed.
///
/// A known key of a command that was pruned, or whose payload was erased, is compared by the hash that
/// is left of it: other content is FP010, as it is while the content is there.
pub fn enqueue(tx: &Transaction<'_>, held: &Held<'_>, command: &NewCommand<'_>) -> Result<Enqueued, WorkerError> {
    let (text, bytes) = match command.content {
        Content::Text(text) => (Some(text), None),
        Content::Bytes(bytes) => (None, Some(bytes)),
    };
    let illegal = || illegal_held(held).or_else(|| illegal_command(tx, held.scope, command));
    let asked = Asked { scope: held.scope, token: Some(held.token), id: None, illegal: &illegal };
    // The default of the column makes an id only where the column is not named.
    let with_id = "INSERT INTO outbox(scope, token, holder, source, lane, key, kind, destination, not_before_ms,
        expires_at_ms, traceparent, headers, payload, payload_bytes, id)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)";
    let without_id = "INSERT INTO outbox(scope, token, holder, source, lane, key, kind, destination, not_before_ms,
        expires_at_ms, traceparent, headers, payload, payload_bytes)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)";
    let token = held.token.get();
    let mut values: Vec<&dyn rusqlite::ToSql> = vec![
        &held.scope,
        &token,
        &held.holder,
        &held.source,
        &command.lane,
        &command.key,
        &command.kind,
        &command.destination,
        &command.not_before_ms,
        &command.expires_at_ms,
        &command.traceparent,
        &command.headers,
        &text,
        &bytes,
    ];
    if command.id.is_some() {
        values.push(&command.id);
    }
    let sql = if command.id.is_some() { with_id } else { without_id };
    match run(tx, &asked, sql, &values[..])? {
        // An ignored insert leaves the rowid of the insert before, whichever table that was.
        0 => known(tx, &asked, command),
        _ => inserted(tx, tx.last_insert_rowid()),
    }
}

/// Ends a command of this scope that waits, or that was begun and may not send yet: `dead/cancelled`.
/// Its key stays taken.
///
/// Fails with FP007 once it is too late (it may have been sent) and while it is in doubt, with FP011 if
/// it ended already, with FP003 if there is no such command in this scope. Each undoes the transaction.
pub fn cancel(tx: &Transaction<'_>, held: &Held<'_>, id: &str) -> Result<(), WorkerError> {
    verdict(tx, "INSERT INTO outbox_cancel(scope, token, holder, id, source) VALUES (?1, ?2, ?3, ?4, ?5)", held, id)
}

/// Sends a parked command of this scope after all: pending again, due now, with fresh tries. The
/// take-over that parked it leaves it alone from now on; the next one looks at it again.
///
/// Fails with FP007 if it isn't parked, with FP011 if it ended, with FP003 if there is no such command
/// in this scope. Each undoes the transaction.
pub fn adopt(tx: &Transaction<'_>, held: &Held<'_>, id: &str) -> Result<(), WorkerError> {
    verdict(tx, "INSERT INTO outbox_adopt(scope, token, holder, id, source) VALUES (?1, ?2, ?3, ?4, ?5)", held, id)
}

/// Ends a parked command of this scope: `dead/superseded`, and its key is free again if nothing can
/// have happened; one that `on_dead = "block"` parked ends with its own reason. Fails like [`adopt`].
pub fn discard(tx: &Transaction<'_>, held: &Held<'_>, id: &str) -> Result<(), WorkerError> {
    verdict(tx, "INSERT INTO outbox_discard(scope, token, holder, id, source) VALUES (?1, ?2, ?3, ?4, ?5)", held, id)
}

/// Makes a new command from a finished one of this scope: a new id, the current token, the next seq, the
/// same lane, destination, headers and payload, and a link to the old one. It has no key and no times.
///
/// The same `new_id` again, for the same command, is a duplicate. Fails with FP007 while the old one is
/// live, with FP003 if there is none in this scope or its content was erased, with FP005 if `new_id` is
/// taken. Each undoes the transaction.
pub fn reissue(tx: &Transaction<'_>, held: &Held<'_>, id: &str, new_id: Option<&str>) -> Result<Enqueued, WorkerError> {
    fence(tx, held)?;
    let old = reissuable(tx, held.scope, id)?;
    let illegal = || {
        illegal_held(held)
            .or_else(|| new_id.and_then(|id| rules::check_id(id).err()).map(|problem| ("new id", problem.to_string())))
            .or_else(|| (new_id == Some(id)).then(|| ("new id", "it is the old one's".to_owned())))
            .or_else(|| Some(("id", no_content(old.as_ref(), held.scope, id))))
    };
    let asked = Asked { scope: held.scope, token: Some(held.token), id: Some(id), illegal: &illegal };
    match &old {
        Some(old) if !old.is_final => return Err(refuse(tx, Code::Live, &asked)),
        Some(old) if old.is_erased => return Err(refuse(tx, Code::IllegalValue, &asked)),
        None => return Err(refuse(tx, Code::IllegalValue, &asked)),
        Some(_) if new_id == Some(id) => return Err(refuse(tx, Code::IllegalValue, &asked)),
        Some(_) => {}
    }
    let values = params![id, held.token.get(), held.holder, held.source, new_id];
    match run(tx, &asked, REISSUE, values)? {
        0 => again(tx, &asked, id, new_id),
        _ => inserted(tx, tx.last_insert_rowid()),
    }
}

/// `?1` the old id, then token, holder, source and the new id. The new id is made here, since an explicit
/// NULL would leave it out of the row.
pub(super) const REISSUE: &str = "INSERT INTO outbox(id, scope, token, holder, source, lane, kind, destination, traceparent,
        reissue_of, headers, payload, payload_bytes)
    SELECT coalesce(?5, lower(hex(randomblob(16)))), o.scope, ?2, ?3, ?4, o.lane, o.kind, o.destination, o.traceparent,
        ?1, o.headers, o.payload, o.payload_bytes
    FROM outbox o WHERE o.n = coalesce((SELECT n FROM outbox WHERE id = ?1), (SELECT n FROM outbox_state WHERE minted_id = ?1))";

/// The inserted row was known: a repeat only if it is a reissue of the same command.
fn again(tx: &Connection, asked: &Asked<'_>, id: &str, new_id: Option<&str>) -> Result<Enqueued, WorkerError> {
    let sql = "SELECT o.reissue_of IS ?2, x.state FROM outbox o JOIN outbox_state x ON x.n = o.n
        WHERE o.n = coalesce((SELECT n FROM outbox WHERE id = ?1), (SELECT n FROM outbox_state WHERE minted_id = ?1))";
    let (same, state) = read(tx, sql, params![new_id, id], |row| Ok((row.get::<_, bool>(0)?, row.get(1)?)))?;
    if same {
        Ok(Enqueued::Duplicate { id: new_id.unwrap_or_default().to_owned(), state })
    } else {
        Err(refuse(tx, Code::IdExists, asked))
    }
}

/// What a reissue must know of the old command.
struct Reissuable {
    is_final: bool,
    is_erased: bool,
}

fn reissuable(tx: &Connection, scope: &str, id: &str) -> Result<Option<Reissuable>, WorkerError> {
    let sql = "SELECT x.state IN ('delivered', 'dead'), x.erased_ms IS NOT NULL FROM outbox_state x
        WHERE x.scope = ?2 AND x.n = coalesce((SELECT n FROM outbox WHERE id = ?1), (SELECT n FROM outbox_state WHERE minted_id = ?1))";
    let old = |row: &Row<'_>| Ok(Reissuable { is_final: row.get(0)?, is_erased: row.get(1)? });
    let mut statement = tx.prepare_cached(sql).map_err(WorkerError::database)?;
    statement.query_row(params![id, scope], old).optional().map_err(WorkerError::database)
}

fn no_content(old: Option<&Reissuable>, scope: &str, id: &str) -> String {
    match old {
        Some(_) => format!("the content of {id} was erased, or is larger than max_payload now"),
        None => format!("there is no command {id} in scope {scope}"),
    }
}

/// A holder's word on one command. The fence comes first, with the holder's own source, which the
/// statement itself has no place for.
fn verdict(tx: &Transaction<'_>, sql: &str, held: &Held<'_>, id: &str) -> Result<(), WorkerError> {
    let illegal =
        || illegal_held(held).or_else(|| Some(("id", format!("there is no command {id} in scope {}", held.scope))));
    let asked = Asked { scope: held.scope, token: Some(held.token), id: Some(id), illegal: &illegal };
    run(tx, &asked, sql, params![held.scope, held.token.get(), held.holder, id, held.source])?;
    Ok(())
}

fn inserted(tx: &Connection, n: i64) -> Result<Enqueued, WorkerError> {
    read(
        tx,
        "SELECT coalesce(o.id, x.minted_id), x.seq FROM outbox_state x JOIN outbox o ON o.n = x.n WHERE x.n = ?1",
        params![n],
        |row| Ok(Enqueued::New { id: row.get(0)?, seq: row.get(1)? }),
    )
}

/// The command that an ignored insert met. Where its content is gone, the database could not compare, so
/// the hash that is left decides here.
fn known(tx: &Connection, asked: &Asked<'_>, command: &NewCommand<'_>) -> Result<Enqueued, WorkerError> {
    let found: Option<(String, String, bool)> = tx
        .prepare_cached(
            "SELECT coalesce(o.id, x.minted_id), x.state, x.erased_ms IS NOT NULL FROM outbox_state x JOIN outbox o ON o.n = x.n
               WHERE x.n = coalesce((SELECT n FROM outbox WHERE id = ?1), (SELECT n FROM outbox_state WHERE minted_id = ?1),
                 (SELECT n FROM outbox_state WHERE scope = ?2 AND key = ?3))",
        )
        .and_then(|mut statement| {
            let values = params![command.id, asked.scope, command.key];
            statement.query_row(values, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).optional()
        })
        .map_err(WorkerError::database)?;
    let (id, state) = match found {
        Some((id, state, false)) => return Ok(Enqueued::Duplicate { id, state }),
        Some((id, state, true)) => (Some(id), state),
        None => (None, PRUNED.to_owned()),
    };
    let (remembered, sha256): (String, Vec<u8>) = read(
        tx,
        "SELECT id, sha256 FROM outbox_used WHERE id = ?1 OR (?1 IS NULL AND scope = ?2 AND key = ?3 AND key IS NOT NULL)",
        params![id, asked.scope, command.key],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    if sha256 == content_hash(&compared(command)) {
        Ok(Enqueued::Duplicate { id: remembered, state })
    } else {
        Err(refuse(tx, Code::KeyExists, asked))
    }
}

fn compared<'a>(command: &NewCommand<'a>) -> Compared<'a> {
    let payload = match command.content {
        Content::Text(text) => text.as_bytes(),
        Content::Bytes(bytes) => bytes,
    };
    Compared {
        lane: command.lane.unwrap_or_default().as_bytes(),
        kind: command.kind.as_bytes(),
        destination: command.destination.as_bytes(),
        headers: command.headers.map(str::as_bytes),
        payload,
    }
}

fn claim(tx: &Transaction<'_>, sql: &str, held: &Held<'_>) -> Result<(), WorkerError> {
    let illegal = || illegal_held(held);
    let asked = Asked { scope: held.scope, token: Some(held.token), id: None, illegal: &illegal };
    run(tx, &asked, sql, params![held.scope, held.token.get(), held.holder, held.source])?;
    Ok(())
}

/// Sends one statement of a worker. It is an INSERT, which takes the write lock before it reads.
fn run(tx: &Connection, asked: &Asked<'_>, sql: &str, values: impl rusqlite::Params) -> Result<usize, WorkerError> {
    if tx.is_autocommit() {
        return Err(WorkerError::NotInTransaction);
    }
    let mut statement = tx.prepare_cached(sql).map_err(WorkerError::database)?;
    let changed = statement.execute(values);
    // A statement that failed is reset here, so that the count of refusals can commit.
    drop(statement);
    changed.map_err(|error| explain(tx, error, asked))
}

fn read<T>(
    tx: &Connection,
    sql: &str,
    values: impl rusqlite::Params,
    row: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<T, WorkerError> {
    tx.prepare_cached(sql).and_then(|mut statement| statement.query_row(values, row)).map_err(WorkerError::database)
}

fn backlog(tx: &Connection, scope: &str) -> Result<Vec<Waiting>, WorkerError> {
    let sql = "SELECT id, lane, seq, token, key, kind, destination, state, effect, attempt_no, inserted_ms, due_ms, expires_at_ms
                 FROM outbox_backlog WHERE scope = ?1 ORDER BY seq";
    let mut statement = tx.prepare_cached(sql).map_err(WorkerError::database)?;
    let rows = statement.query_map([scope], waiting).map_err(WorkerError::database)?;
    rows.collect::<rusqlite::Result<_>>().map_err(WorkerError::database)
}

fn waiting(row: &Row<'_>) -> rusqlite::Result<Waiting> {
    Ok(Waiting {
        id: row.get(0)?,
        lane: row.get(1)?,
        seq: row.get(2)?,
        token: row.get(3)?,
        key: row.get(4)?,
        kind: row.get(5)?,
        destination: row.get(6)?,
        state: row.get(7)?,
        effect: row.get(8)?,
        attempt_no: row.get(9)?,
        inserted_ms: row.get(10)?,
        due_ms: row.get(11)?,
        expires_at_ms: row.get(12)?,
    })
}

fn token_at(row: &Row<'_>, column: usize) -> rusqlite::Result<FencingToken> {
    let number: i64 = row.get(column)?;
    FencingToken::new(number).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(column, number))
}

/// A time to live too long for the column is too long for the contract as well, which says so.
fn whole_ms(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}

fn illegal_held(held: &Held<'_>) -> Option<(&'static str, String)> {
    illegal_name(&[("scope", Some(held.scope)), ("holder", held.holder), ("source", held.source)])
}

fn illegal_lease(scope: &str, holder: &str, ttl_ms: Option<i64>) -> Option<(&'static str, String)> {
    illegal_name(&[("scope", Some(scope)), ("holder", Some(holder))]).or_else(|| {
        let legal = ttl_ms.is_none_or(|ttl_ms| (1..=TTL_MS_MAX).contains(&ttl_ms));
        (!legal).then(|| ("ttl", format!("it must be 1 to {TTL_MS_MAX} milliseconds")))
    })
}

fn illegal_command(tx: &Connection, scope: &str, command: &NewCommand<'_>) -> Option<(&'static str, String)> {
    illegal_name(&[
        ("kind", Some(command.kind)),
        ("destination", Some(command.destination)),
        ("lane", command.lane),
        ("key", command.key),
    ])
    .or_else(|| command.id.and_then(|id| rules::check_id(id).err()).map(|problem| ("id", problem.to_string())))
    .or_else(|| illegal_time("not_before_ms", command.not_before_ms))
    .or_else(|| illegal_time("expires_at_ms", command.expires_at_ms))
    .or_else(|| illegal_size(tx, scope, command))
}

fn illegal_time(field: &'static str, at_ms: Option<i64>) -> Option<(&'static str, String)> {
    let legal = at_ms.is_none_or(|at_ms| (100_000_000_000..=10_000_000_000_000).contains(&at_ms));
    (!legal).then(|| (field, "it must be milliseconds since 1970, 10^11 to 10^13".to_owned()))
}

fn illegal_size(tx: &Connection, scope: &str, command: &NewCommand<'_>) -> Option<(&'static str, String)> {
    let content = match command.content {
        Content::Text(text) => text.len(),
        Content::Bytes(bytes) => bytes.len(),
    };
    let max: Option<i64> = tx
        .query_row(
            "SELECT coalesce((SELECT max_payload FROM outbox_scope WHERE scope = ?1), max_payload) FROM outbox_policy",
            [scope],
            |row| row.get(0),
        )
        .optional()
        .unwrap_or_default();
    let max = max.and_then(|max| usize::try_from(max).ok())?;
    [("payload", content), ("headers", command.headers.map_or(0, str::len))]
        .into_iter()
        .find(|(_, size)| *size > max)
        .map(|(field, size)| (field, format!("{size} bytes, and max_payload is {max}")))
        .or_else(|| {
            let long = command.traceparent.is_some_and(|text| text.len() > rules::NAME_BYTES_MAX);
            long.then(|| ("traceparent", "it is too long".to_owned()))
        })
}
