//! `fencepost lease` and `fencepost seal`: the token, for workers without a library.
//!
//! A holder is one acquisition, so each acquire makes a new one unless it is given. A lease that was
//! lost ends with 75 like one that is held: the work may be begun anew under another token, never be
//! gone on with.

use std::time::Duration;

use clap::Subcommand;
use fencepost::clock::wall_ms;
use fencepost::rules::{Code, LEASE};
use fencepost::sqlite::inspect::{self, Lease as Scope};
use fencepost::sqlite::{Lease, Waiting, WorkerError, acquire, new_holder, release, renew, seal as seal_scope};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use serde_json::{Value, json};

use crate::enqueue::held;
use crate::exit::{Exit, Failure};
use crate::output::{Screen, Tone, clean, decimal, moment, parse_duration, relative};
use crate::{Globals, database, exec, given};

/// So many inherited commands are listed; all of them are counted.
const BACKLOG_ROWS_MAX: usize = 20;

/// Options of `fencepost lease`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Take the lease of a scope, and print its token; 75 if somebody has it
    Acquire(Acquire),
    /// Prolong a lease from now on; 75 if it was lost
    Renew(Renew),
    /// Give a lease back; 75 if it was lost
    Release(Tenure),
    /// Show scopes, their tokens and leases
    Show(Show),
    /// Run a program under a lease, and stop it when the lease is lost
    Exec(exec::Args),
}

#[derive(Debug, clap::Args)]
struct Acquire {
    /// What is to be held
    #[arg(long, value_name = "SCOPE")]
    scope: String,
    /// How long it lasts without a renewal
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    ttl: Duration,
    /// The identity of this acquisition; by default a new UUID
    #[arg(long, value_name = "HOLDER")]
    holder: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Tenure {
    /// What is held
    #[arg(long, value_name = "SCOPE", env = "FENCEPOST_SCOPE", hide_env_values = true)]
    scope: String,
    /// The token of the acquisition
    #[arg(long, value_name = "N", env = "FENCEPOST_TOKEN", hide_env_values = true)]
    token: i64,
    /// The identity of the acquisition
    #[arg(long, value_name = "HOLDER", env = "FENCEPOST_HOLDER", hide_env_values = true)]
    holder: String,
}

#[derive(Debug, clap::Args)]
struct Renew {
    #[command(flatten)]
    tenure: Tenure,
    /// How long it lasts from now on
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    ttl: Duration,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// Only this scope
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// How many at most
    #[arg(long, value_name = "N", default_value = "50")]
    limit: u32,
}

/// Options of `fencepost seal`.
#[derive(Debug, clap::Args)]
pub(crate) struct SealArgs {
    /// What is held
    #[arg(long, value_name = "SCOPE", env = "FENCEPOST_SCOPE", hide_env_values = true)]
    scope: String,
    /// The token that the lease service issued
    #[arg(long, value_name = "N", env = "FENCEPOST_TOKEN", hide_env_values = true)]
    token: i64,
    /// The identity of the acquisition
    #[arg(long, value_name = "HOLDER", env = "FENCEPOST_HOLDER", hide_env_values = true)]
    holder: Option<String>,
    /// The name of the lease service; it is fixed for the scope from then on
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
}

/// One verb of a lease; `exec` answers with its program's exit code.
pub(crate) fn lease(args: Args, globals: &Globals) -> anyhow::Result<u8> {
    match args.verb {
        Verb::Acquire(args) => acquire_lease(&args, globals),
        Verb::Renew(args) => renew_lease(&args, globals),
        Verb::Release(args) => release_lease(&args, globals),
        Verb::Show(args) => show(&args, globals),
        Verb::Exec(args) => return exec::exec(args, globals),
    }
    .map(|()| 0)
}

/// Takes the lease in a transaction of its own.
pub(crate) fn take(
    connection: &mut Connection,
    scope: &str,
    holder: &str,
    ttl: Duration,
) -> Result<Lease, WorkerError> {
    in_transaction(connection, |transaction| acquire(transaction, scope, holder, ttl))
}

/// A verb in a transaction of its own, durable when this returns.
pub(crate) fn in_transaction<T>(
    connection: &mut Connection,
    verb: impl FnOnce(&Transaction<'_>) -> Result<T, WorkerError>,
) -> Result<T, WorkerError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(busy_or_broken)?;
    let done = verb(&transaction)?;
    transaction.commit().map_err(busy_or_broken)?;
    Ok(done)
}

fn busy_or_broken(error: rusqlite::Error) -> WorkerError {
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseBusy | rusqlite::ErrorCode::DatabaseLocked) => WorkerError::Locked,
        Some(_) | None => WorkerError::Database(error),
    }
}

fn acquire_lease(args: &Acquire, globals: &Globals) -> anyhow::Result<()> {
    let holder = given(&args.holder).map_or_else(new_holder, str::to_owned);
    let lease = take(&mut database::write(globals)?, &args.scope, &holder, args.ttl)?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&json!({
            "scope": lease.scope,
            "token": decimal(lease.token.get()),
            "holder": lease.holder,
            "until_ms": lease.until_ms,
            "backlog": backlog_json(&lease.backlog),
        }))?;
        return Ok(());
    }
    let facts = [
        ("scope", clean(&lease.scope)),
        ("token", lease.token.to_string()),
        ("holder", clean(&lease.holder)),
        ("until", moment(lease.until_ms, wall_ms())),
        ("backlog", inherited(&lease.backlog)),
    ];
    screen.print(&screen.block(&facts))?;
    print_backlog(screen, &lease.backlog)
}

fn renew_lease(args: &Renew, globals: &Globals) -> anyhow::Result<()> {
    let tenure = &args.tenure;
    let held = held(&tenure.scope, tenure.token, Some(&tenure.holder), None)?;
    let mut connection = database::write(globals)?;
    let renewed = in_transaction(&mut connection, |transaction| {
        renew(transaction, &tenure.scope, held.token, &tenure.holder, args.ttl)
    });
    let until_ms = renewed.map_err(lost)?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&json!({
            "scope": tenure.scope, "token": decimal(tenure.token), "holder": tenure.holder, "until_ms": until_ms,
        }))?;
        return Ok(());
    }
    screen.print(&format!("{} is held until {}", clean(&tenure.scope), moment(until_ms, wall_ms())))?;
    Ok(())
}

fn release_lease(args: &Tenure, globals: &Globals) -> anyhow::Result<()> {
    let held = held(&args.scope, args.token, Some(&args.holder), None)?;
    let mut connection = database::write(globals)?;
    let released =
        in_transaction(&mut connection, |transaction| release(transaction, &args.scope, held.token, &args.holder));
    released.map_err(lost)?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&json!({ "scope": args.scope, "token": decimal(args.token), "released": true }))?;
        return Ok(());
    }
    screen.print(&format!("{} is free", clean(&args.scope)))?;
    Ok(())
}

/// Whether an answer means that somebody else has the lease now.
pub(crate) fn is_lost(error: &WorkerError) -> bool {
    matches!(error.code(), Some(Code::StaleToken | Code::OtherHolder))
}

fn lost(error: WorkerError) -> anyhow::Error {
    if is_lost(&error) {
        let failure = Failure::new(Exit::TryLater, format!("the lease is lost: {error}"));
        return failure.hint("stop what was done under it, and acquire it anew").into();
    }
    error.into()
}

/// Raises the watermark and prints what the new holder inherits.
pub(crate) fn seal(args: &SealArgs, globals: &Globals) -> anyhow::Result<()> {
    let held = held(&args.scope, args.token, given(&args.holder), given(&args.source))?;
    let mut connection = database::write(globals)?;
    let backlog = in_transaction(&mut connection, |transaction| {
        seal_scope(transaction, held.scope, held.token, held.holder, held.source)
    })?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&json!({
            "scope": args.scope, "token": decimal(args.token), "backlog": backlog_json(&backlog),
        }))?;
        return Ok(());
    }
    let facts = [
        ("scope", clean(&args.scope)),
        ("token", format!("{}: older ones are refused from now on", args.token)),
        ("backlog", inherited(&backlog)),
    ];
    screen.print(&screen.block(&facts))?;
    print_backlog(screen, &backlog)
}

fn inherited(backlog: &[Waiting]) -> String {
    match backlog.len() {
        0 => "nothing of earlier holders waits".to_owned(),
        1 => "1 command of an earlier holder waits, and goes out first".to_owned(),
        count => format!("{count} commands of earlier holders wait, and go out first"),
    }
}

fn print_backlog(screen: Screen, backlog: &[Waiting]) -> anyhow::Result<()> {
    if backlog.is_empty() {
        return Ok(());
    }
    let rows: Vec<_> = backlog.iter().take(BACKLOG_ROWS_MAX).map(backlog_row).collect();
    screen.print("")?;
    screen.print(&screen.table(&["!STATE", ">SEQ", ">TOKEN", "!ID", "TO", "?LANE", "?KEY"], &rows))?;
    let more = backlog.len().saturating_sub(BACKLOG_ROWS_MAX);
    if more > 0 {
        screen.print(&screen.note(&format!("… and {more} more")))?;
    }
    Ok(())
}

fn backlog_row(waiting: &Waiting) -> (Tone, Vec<String>) {
    let cells = vec![
        waiting.state.clone(),
        waiting.seq.to_string(),
        waiting.token.to_string(),
        waiting.id.clone(),
        format!("{} {}", waiting.kind, waiting.destination),
        waiting.lane.clone(),
        waiting.key.clone().unwrap_or_default(),
    ];
    (Tone::of_state(&waiting.state), cells)
}

fn backlog_json(backlog: &[Waiting]) -> Value {
    let each = backlog.iter().map(|waiting| {
        json!({
            "id": waiting.id,
            "lane": waiting.lane,
            "seq": decimal(waiting.seq),
            "token": decimal(waiting.token),
            "key": waiting.key,
            "kind": waiting.kind,
            "destination": waiting.destination,
            "state": waiting.state,
            "effect": waiting.effect,
            "attempt_no": waiting.attempt_no,
            "inserted_ms": waiting.inserted_ms,
            "due_ms": waiting.due_ms,
            "expires_at_ms": waiting.expires_at_ms,
        })
    });
    each.collect()
}

fn show(args: &Show, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let now_ms = wall_ms();
    let scopes = inspect::leases(&connection, args.scope.as_deref(), args.limit.saturating_add(1))?;
    let more = scopes.len() > args.limit as usize;
    let scopes = scopes.get(..args.limit as usize).unwrap_or(&scopes);
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&scopes.iter().map(|scope| scope_json(scope, now_ms)).collect())?;
        return Ok(());
    }
    if scopes.is_empty() {
        screen.print("no scope yet")?;
        return Ok(());
    }
    let rows: Vec<_> = scopes.iter().map(|scope| scope_row(scope, now_ms)).collect();
    screen.print(&screen.table(&["!LEASE", "SCOPE", ">TOKEN", "!HOLDER", "?SOURCE", "!UNTIL"], &rows))?;
    if more {
        screen.print(&screen.note("… and more; --limit N shows them, --scope S one"))?;
    }
    Ok(())
}

/// The word for what `until_ms` means now.
pub(crate) fn standing(scope: &Scope, now_ms: i64) -> &'static str {
    match (scope.source.as_deref(), scope.until_ms) {
        (Some(LEASE), Some(until_ms)) if now_ms < until_ms => "held",
        (Some(LEASE), Some(_)) => "expired",
        (Some(LEASE), None) => "released",
        (Some(_), _) => "foreign",
        (None, _) => "none",
    }
}

fn scope_row(scope: &Scope, now_ms: i64) -> (Tone, Vec<String>) {
    let standing = standing(scope, now_ms);
    let tone = match standing {
        "held" => Tone::Active,
        "expired" => Tone::Careful,
        _ => Tone::Plain,
    };
    let cells = vec![
        standing.to_owned(),
        scope.scope.clone(),
        scope.token.to_string(),
        scope.holder.clone().unwrap_or_default(),
        scope.source.clone().unwrap_or_default(),
        scope.until_ms.map(|until_ms| relative(until_ms, now_ms)).unwrap_or_default(),
    ];
    (tone, cells)
}

fn scope_json(scope: &Scope, now_ms: i64) -> Value {
    json!({
        "scope": scope.scope,
        "token": decimal(scope.token),
        "holder": scope.holder,
        "source": scope.source,
        "lease": standing(scope, now_ms),
        "granted_ms": scope.granted_ms,
        "until_ms": scope.until_ms,
    })
}
