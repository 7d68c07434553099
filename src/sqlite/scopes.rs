//! Scopes as an operator sees and sets them: token, source, era, own policy; rebase.
//!
//! A watermark never falls, with one exception that a person orders: a lease service that was restored
//! and starts again from low numbers. A rebase begins a new era then, under another source name, so that
//! what still comes from the old one is refused. The old watermark stays in the audit table.

use rusqlite::types::Value as Sql;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use serde_json::{Value, json};

use super::inspect::{Lease, Refusal};
use super::operator::{Act, Entry, OperatorError, audit};
use crate::rules::{self, OnTakeover};

/// One column of a scope's own policy; `None` is the database's default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// What becomes of older commands when the watermark rises.
    OnTakeover(Option<OnTakeover>),
    /// Whether a greater token must be sealed before it may write.
    RequireSeal(Option<bool>),
    /// How far a later token of a foreign source may jump.
    MaxJump(Option<i64>),
    /// Bytes of payload and of headers at most.
    MaxPayload(Option<i64>),
    /// Milliseconds for which ids and keys outlive their commands.
    KeyRetention(Option<i64>),
}

impl Setting {
    const fn column(self) -> &'static str {
        match self {
            Self::OnTakeover(_) => "on_takeover",
            Self::RequireSeal(_) => "require_seal",
            Self::MaxJump(_) => "max_jump",
            Self::MaxPayload(_) => "max_payload",
            Self::KeyRetention(_) => "key_retention",
        }
    }

    fn value(self) -> Sql {
        match self {
            Self::OnTakeover(policy) => policy.map_or(Sql::Null, |policy| policy.as_str().to_owned().into()),
            Self::RequireSeal(required) => required.map_or(Sql::Null, Sql::from),
            Self::MaxJump(number) | Self::MaxPayload(number) | Self::KeyRetention(number) => {
                number.map_or(Sql::Null, Sql::from)
            }
        }
    }
}

/// A policy: a scope's own, where a field may be missing, or what is in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// `deliver`, `discard` or `review`.
    pub on_takeover: Option<String>,
    /// Whether a greater token must be sealed first.
    pub require_seal: Option<bool>,
    /// How far a later token may jump.
    pub max_jump: Option<i64>,
    /// Bytes at most.
    pub max_payload: Option<i64>,
    /// How long ids and keys are remembered.
    pub key_retention_ms: Option<i64>,
}

/// The last command of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Last {
    /// Its seq.
    pub seq: i64,
    /// The token that it was accepted under.
    pub token: i64,
    /// The era of that token.
    pub era: i64,
}

/// Everything about a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeDetail {
    /// Token, holder, source and lease.
    pub lease: Lease,
    /// 0, and one more with each rebase.
    pub era: i64,
    /// Its own policy.
    pub own: Policy,
    /// What holds where it has none of its own.
    pub default: Policy,
    /// Live commands.
    pub live: i64,
    /// Those of them that an older token wrote.
    pub backlog: i64,
    /// The last command.
    pub last: Option<Last>,
    /// Refusals that were reported.
    pub refusal: Option<Refusal>,
}

impl ScopeDetail {
    /// Whether the watermark stands far above the last command's token: a typo, or a clock that was
    /// taken for a token. Whoever has honest tokens is refused then.
    pub fn has_jumped(&self) -> bool {
        let below = self.last.filter(|last| last.era == self.era).map_or(0, |last| last.token);
        let watermark = self.lease.token;
        is_far_above(watermark, below) || (below == watermark && is_like_a_clock(watermark))
    }
}

fn is_far_above(watermark: i64, below: i64) -> bool {
    below > 0 && watermark.saturating_sub(below) >= 1_000 && watermark / 10 >= below
}

/// Seconds, milliseconds, microseconds or nanoseconds since 1970, from 2017 to 2065.
fn is_like_a_clock(token: i64) -> bool {
    [1, 1_000, 1_000_000, 1_000_000_000].iter().any(|unit| (1_500_000_000..3_000_000_000).contains(&(token / unit)))
}

const POLICY: &str = "on_takeover, require_seal, max_jump, max_payload, key_retention";

/// Everything about a scope; `None` if nobody has used it yet.
pub fn show(connection: &Connection, scope: &str) -> rusqlite::Result<Option<ScopeDetail>> {
    let snapshot = connection.unchecked_transaction()?;
    let sql = format!(
        "SELECT scope, watermark, holder, source, granted_ms, until_ms, era, {POLICY} FROM outbox_scope WHERE scope = ?1"
    );
    let row = |row: &Row<'_>| Ok((lease(row)?, row.get(6)?, policy(row, 7)?));
    let Some((lease, era, own)) = snapshot.query_row(&sql, [scope], row).optional()? else { return Ok(None) };
    let default = snapshot.query_row(&format!("SELECT {POLICY} FROM outbox_policy"), [], |row| policy(row, 0))?;
    let (live, backlog) = snapshot.query_row(WAITING, [scope], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let last = "SELECT seq, token, era FROM outbox_state WHERE scope = ?1 ORDER BY seq DESC LIMIT 1";
    let last = snapshot
        .query_row(last, [scope], |row| Ok(Last { seq: row.get(0)?, token: row.get(1)?, era: row.get(2)? }))
        .optional()?;
    let refusal = refusal(&snapshot, scope)?;
    Ok(Some(ScopeDetail { lease, era, own, default, live, backlog, last, refusal }))
}

const WAITING: &str = "SELECT count(*), count(*) FILTER (WHERE x.era < s.era OR x.token < s.watermark)
    FROM outbox_state x JOIN outbox_scope s ON s.scope = x.scope
    WHERE x.scope = ?1 AND x.state IN ('pending', 'sending', 'in_doubt', 'parked')";

fn lease(row: &Row<'_>) -> rusqlite::Result<Lease> {
    Ok(Lease {
        scope: row.get(0)?,
        token: row.get(1)?,
        holder: row.get(2)?,
        source: row.get(3)?,
        granted_ms: row.get(4)?,
        until_ms: row.get(5)?,
    })
}

fn policy(row: &Row<'_>, first: usize) -> rusqlite::Result<Policy> {
    Ok(Policy {
        on_takeover: row.get(first)?,
        require_seal: row.get(first + 1)?,
        max_jump: row.get(first + 2)?,
        max_payload: row.get(first + 3)?,
        key_retention_ms: row.get(first + 4)?,
    })
}

fn refusal(connection: &Connection, scope: &str) -> rusqlite::Result<Option<Refusal>> {
    let sql = "SELECT scope, token, watermark, count, last_ms FROM outbox_refusal WHERE scope = ?1";
    let row = |row: &Row<'_>| {
        Ok(Refusal {
            scope: row.get(0)?,
            token: row.get(1)?,
            watermark: row.get(2)?,
            count: row.get(3)?,
            last_ms: row.get(4)?,
        })
    };
    connection.query_row(sql, [scope], row).optional()
}

/// One line of the list of scopes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeLine {
    /// Token, holder, source and lease.
    pub lease: Lease,
    /// 0, and one more with each rebase.
    pub era: i64,
    /// The policy in force for older commands.
    pub on_takeover: String,
    /// Live commands.
    pub live: i64,
}

/// Scopes by name, from after `after` on.
pub fn list(connection: &Connection, after: &str, limit: u32) -> rusqlite::Result<Vec<ScopeLine>> {
    let sql = "SELECT s.scope, s.watermark, s.holder, s.source, s.granted_ms, s.until_ms, s.era,
            coalesce(s.on_takeover, (SELECT on_takeover FROM outbox_policy)),
            (SELECT count(*) FROM outbox_state x WHERE x.scope = s.scope AND x.state IN ('pending', 'sending', 'in_doubt', 'parked'))
        FROM outbox_scope s WHERE s.scope > ?1 ORDER BY s.scope LIMIT ?2";
    let row = |row: &Row<'_>| {
        Ok(ScopeLine { lease: lease(row)?, era: row.get(6)?, on_takeover: row.get(7)?, live: row.get(8)? })
    };
    connection.prepare(sql)?.query_map(params![after, limit], row)?.collect()
}

/// Sets a scope's own policy; durable when this returns. A scope that nobody has used yet is made, so
/// that its policy holds from its first command on. Returns the policy that it has then.
pub fn set(
    connection: &mut Connection,
    scope: &str,
    settings: &[Setting],
    act: &Act<'_>,
) -> Result<Policy, OperatorError> {
    check("scope", scope)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute(
        "INSERT INTO outbox_scope(scope, watermark) SELECT ?1, 0 WHERE NOT EXISTS (SELECT 1 FROM outbox_scope WHERE scope = ?1)",
        [scope],
    )?;
    let before = own(&transaction, scope)?;
    for setting in settings {
        let sql = format!("UPDATE outbox_scope SET {} = ?2 WHERE scope = ?1", setting.column());
        transaction.execute(&sql, params![scope, setting.value()]).map_err(|error| illegal(*setting, error))?;
    }
    let after = own(&transaction, scope)?;
    let entry = Entry { verb: "scope set", id: None, scope: Some(scope), before: noted(&before), after: noted(&after) };
    audit(&transaction, act, &entry)?;
    transaction.commit()?;
    Ok(after)
}

fn own(transaction: &Transaction<'_>, scope: &str) -> rusqlite::Result<Policy> {
    transaction.query_row(&format!("SELECT {POLICY} FROM outbox_scope WHERE scope = ?1"), [scope], |row| policy(row, 0))
}

/// The contract says that a value is illegal; here it is known which.
fn illegal(setting: Setting, error: rusqlite::Error) -> OperatorError {
    match OperatorError::from(error) {
        OperatorError::Contract(rules::Code::IllegalValue) => {
            OperatorError::Illegal { field: setting.column(), problem: "it is out of range".to_owned() }
        }
        other => other,
    }
}

fn noted(policy: &Policy) -> Value {
    json!({
        "on_takeover": policy.on_takeover,
        "require_seal": policy.require_seal,
        "max_jump": policy.max_jump.map(|number| number.to_string()),
        "max_payload": policy.max_payload,
        "key_retention_ms": policy.key_retention_ms,
    })
}

/// What a rebase begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rebase<'a> {
    /// The name of the source whose tokens count from now on; another one than before.
    pub source: &'a str,
    /// The watermark to begin with; 0 accepts any token of the new source first.
    pub watermark: i64,
}

/// A scope before and after a rebase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebased {
    /// The scope.
    pub scope: String,
    /// The era that began.
    pub era: i64,
    /// The greatest token of the old era.
    pub old_watermark: i64,
    /// The source of the old era.
    pub old_source: Option<String>,
}

/// Begins a new era in these scopes, in all of them or none; durable when this returns. From then on
/// only tokens of the new source are accepted, and only from writers who name it (FP014). What the old
/// era wrote stays, goes first, and counts as overtaken; the order is by seq over eras.
pub fn rebase(
    connection: &mut Connection,
    scopes: &[&str],
    to: &Rebase<'_>,
    act: &Act<'_>,
) -> Result<Vec<Rebased>, OperatorError> {
    check("source", to.source)?;
    if !(0..=rules::TOKEN_MAX).contains(&to.watermark) {
        return Err(OperatorError::Illegal { field: "watermark", problem: "it must be 0 to 2^62".to_owned() });
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let rebased = scopes.iter().map(|scope| rebase_one(&transaction, scope, to, act)).collect::<Result<_, _>>()?;
    transaction.commit()?;
    Ok(rebased)
}

fn rebase_one(
    transaction: &Transaction<'_>,
    scope: &str,
    to: &Rebase<'_>,
    act: &Act<'_>,
) -> Result<Rebased, OperatorError> {
    let sql = "SELECT era, watermark, source, holder FROM outbox_scope WHERE scope = ?1";
    let row = |row: &Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get(2)?, row.get(3)?));
    let unknown = || OperatorError::UnknownScope { scope: scope.to_owned() };
    let (era, watermark, source, holder) = transaction.query_row(sql, [scope], row).optional()?.ok_or_else(unknown)?;
    let (source, holder): (Option<String>, Option<String>) = (source, holder);
    // Under a name of an old era its holders' 4990 would pass as a new token again.
    if source.as_deref() == Some(to.source) || was_its_source(transaction, scope, to.source)? {
        let problem = format!("scope {scope} has or had it; a new era needs a new name");
        return Err(OperatorError::Illegal { field: "source", problem });
    }
    transaction.execute(
        "UPDATE outbox_scope SET era = era + 1, source = ?2, watermark = ?3, holder = NULL, granted_ms = NULL, until_ms = NULL
            WHERE scope = ?1",
        params![scope, to.source, to.watermark],
    )?;
    let entry = Entry {
        verb: "scope rebase",
        id: None,
        scope: Some(scope),
        before: json!({ "era": era, "watermark": watermark.to_string(), "source": source, "holder": holder }),
        after: json!({ "era": era + 1, "watermark": to.watermark.to_string(), "source": to.source, "holder": null }),
    };
    audit(transaction, act, &entry)?;
    Ok(Rebased { scope: scope.to_owned(), era: era + 1, old_watermark: watermark, old_source: source })
}

fn was_its_source(transaction: &Transaction<'_>, scope: &str, source: &str) -> rusqlite::Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM outbox_audit
        WHERE verb = 'scope rebase' AND scope = ?1 AND json_extract(before, '$.source') = ?2)";
    transaction.query_row(sql, [scope, source], |row| row.get(0))
}

fn check(field: &'static str, name: &str) -> Result<(), OperatorError> {
    rules::check_name(name).map_err(|problem| OperatorError::Illegal { field, problem: problem.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail(watermark: i64, last: Option<(i64, i64)>, era: i64) -> ScopeDetail {
        let lease = Lease {
            scope: "s".to_owned(),
            token: watermark,
            holder: None,
            source: None,
            granted_ms: None,
            until_ms: None,
        };
        let last = last.map(|(token, era)| Last { seq: 1, token, era });
        let (own, default) = (Policy::default(), Policy::default());
        ScopeDetail { lease, era, own, default, live: 0, backlog: 0, last, refusal: None }
    }

    #[test]
    fn a_jump_is_told_from_a_scope_that_moves_on() {
        for (watermark, last, era, right) in [
            (43, Some((42, 0)), 0, false),
            (5_100_000, Some((5_000_000, 0)), 0, false),
            (420_000, Some((42, 0)), 0, true),
            (1_796_206_000, Some((42, 0)), 0, true),
            (1_796_206_000_000, Some((1_796_206_000_000, 0)), 0, true),
            (10, Some((5_000, 0)), 1, false),
            (5_000, None, 0, false),
        ] {
            assert_eq!(detail(watermark, last, era).has_jumped(), right, "{watermark} {last:?}");
        }
    }
}
