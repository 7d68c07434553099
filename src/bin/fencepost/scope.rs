//! `fencepost scope`: tokens, sources and policies of scopes, and the rebase after a restored lease
//! service.
//!
//! Looking never changes anything. A rebase is the one way for a watermark to begin anew; it names its
//! scopes, its new source and its reason.

use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use fencepost::clock::wall_ms;
use fencepost::rules::OnTakeover;
use fencepost::sqlite::pause::{Pause, pauses};
use fencepost::sqlite::scopes::{self, Policy, Rebase, Rebased, ScopeDetail, ScopeLine, Setting};
use serde_json::{Value, json};

use crate::exit::{Exit, Failure};
use crate::lease::standing;
use crate::operate::{Why, unique};
use crate::output::{Screen, Tone, clean, decimal, moment, parse_duration, span};
use crate::pause::{name, pause_json, terms};
use crate::{Globals, database};

/// Options of `fencepost scope`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List scopes by name
    List(ListArgs),
    /// Show everything about a scope: token, source, era, policy, backlog, refusals
    Show(ShowArgs),
    /// Set a scope's own policy; `default` goes back to the database's
    Set(Box<SetArgs>),
    /// Begin a new era: for a lease service that was restored and starts again from low numbers
    Rebase(RebaseArgs),
}

#[derive(Debug, clap::Args)]
struct ListArgs {
    /// Only scopes after this one
    #[arg(long, value_name = "SCOPE", default_value = "")]
    after: String,
    /// How many at most
    #[arg(long, value_name = "N", default_value = "50")]
    limit: u32,
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// The scope
    scope: String,
}

#[derive(Debug, clap::Args)]
struct SetArgs {
    /// The scope
    scope: String,
    /// What becomes of older commands when a newer holder comes
    #[arg(long, value_name = "POLICY", value_enum)]
    on_takeover: Option<TakeoverArg>,
    /// Whether a greater token must be sealed before it may write
    #[arg(long, value_name = "true|false|default", value_parser = parse_flag)]
    require_seal: Option<Own<bool>>,
    /// How far a later token of a foreign source may jump
    #[arg(long, value_name = "N|default", value_parser = parse_number)]
    max_jump: Option<Own<i64>>,
    /// Bytes of a payload at most
    #[arg(long, value_name = "N|default", value_parser = parse_number)]
    max_payload: Option<Own<i64>>,
    /// How long ids and keys are remembered after prune
    #[arg(long, value_name = "DURATION|default", value_parser = parse_retention)]
    key_retention: Option<Own<i64>>,
    #[command(flatten)]
    why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TakeoverArg {
    /// They go out first
    Deliver,
    /// They end as superseded
    Discard,
    /// They are parked
    Review,
    /// As the database says
    Default,
}

/// A scope's own value, or the database's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Own<T>(Option<T>);

fn parse_number(text: &str) -> Result<Own<i64>, String> {
    if text == "default" {
        return Ok(Own(None));
    }
    text.parse().map(|number| Own(Some(number))).map_err(|_| "write a whole number, or default".to_owned())
}

fn parse_flag(text: &str) -> Result<Own<bool>, String> {
    if text == "default" {
        return Ok(Own(None));
    }
    text.parse().map(|flag| Own(Some(flag))).map_err(|_| "write true, false or default".to_owned())
}

fn parse_retention(text: &str) -> Result<Own<i64>, String> {
    if text == "default" {
        return Ok(Own(None));
    }
    let ms = |duration: Duration| Own(Some(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)));
    parse_duration(text).map(ms)
}

#[derive(Debug, clap::Args)]
struct RebaseArgs {
    /// The scopes
    #[arg(required = true, value_name = "SCOPE")]
    scopes: Vec<String>,
    /// The name of the new source; another one than before
    #[arg(long, value_name = "NAME")]
    source: String,
    /// The watermark to begin with
    #[arg(long, value_name = "N", default_value = "0")]
    watermark: i64,
    #[command(flatten)]
    why: Why,
}

/// One verb of `fencepost scope`.
pub(crate) fn scope(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    match &args.verb {
        Verb::List(args) => list(args, globals),
        Verb::Show(args) => show(args, globals),
        Verb::Set(args) => set(args, globals),
        Verb::Rebase(args) => rebase(args, globals),
    }
}

// ── list ────────────────────────────────────────────────────────────────────────────────────────────

fn list(args: &ListArgs, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let now_ms = wall_ms();
    let lines = scopes::list(&connection, &args.after, args.limit.saturating_add(1))?;
    let pauses = pauses(&connection, now_ms)?;
    let more = lines.len() > args.limit as usize;
    let lines = lines.get(..args.limit as usize).unwrap_or(&lines);
    let screen = globals.screen();
    let paused = |line: &ScopeLine| pauses.iter().any(|pause| holds_all_of(pause, &line.lease.scope));
    if screen.is_json() {
        screen.print_json(&lines.iter().map(|line| line_json(line, paused(line), now_ms)).collect())?;
        return Ok(());
    }
    if lines.is_empty() {
        screen.print("no scope yet")?;
        return Ok(());
    }
    let row = |line: &ScopeLine| {
        let lease = &line.lease;
        let cells = vec![
            lease.scope.clone(),
            lease.token.to_string(),
            lease.source.clone().unwrap_or_default(),
            line.era.to_string(),
            standing(lease, now_ms).to_owned(),
            line.on_takeover.clone(),
            line.live.to_string(),
            if paused(line) { "paused".to_owned() } else { String::new() },
        ];
        (Tone::Plain, cells)
    };
    let rows: Vec<_> = lines.iter().map(row).collect();
    screen.print(&screen.table(&["SCOPE", ">TOKEN", "SOURCE", "?>ERA", "!LEASE", "?TAKEOVER", ">LIVE", ""], &rows))?;
    if let (true, Some(last)) = (more, lines.last()) {
        screen.print(&screen.note(&format!("… and more: --after {}", clean(&last.lease.scope))))?;
    }
    Ok(())
}

fn line_json(line: &ScopeLine, paused: bool, now_ms: i64) -> Value {
    let lease = &line.lease;
    json!({
        "scope": lease.scope,
        "token": decimal(lease.token),
        "holder": lease.holder,
        "source": lease.source,
        "era": line.era,
        "lease": standing(lease, now_ms),
        "until_ms": lease.until_ms,
        "on_takeover": line.on_takeover,
        "live": line.live,
        "paused": paused,
    })
}

/// A pause of one destination leaves the rest of a scope alone.
fn holds_all_of(pause: &Pause, scope: &str) -> bool {
    pause.kind.is_empty() && pause.destination.is_empty() && (pause.scope.is_empty() || pause.scope == scope)
}

// ── show ────────────────────────────────────────────────────────────────────────────────────────────

fn show(args: &ShowArgs, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let now_ms = wall_ms();
    let detail = scopes::show(&connection, &args.scope)?.ok_or_else(|| {
        let failure = Failure::new(Exit::Data, format!("there is no scope {}", clean(&args.scope)));
        failure.hint("`fencepost scope list` shows scopes")
    })?;
    let mut held = pauses(&connection, now_ms)?;
    held.retain(|pause| holds_all_of(pause, &args.scope));
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&detail_json(&detail, &held, now_ms))?;
        return Ok(());
    }
    screen.print(&screen.block(&facts(screen, &detail, &held, now_ms)))?;
    Ok(())
}

fn facts(screen: Screen, detail: &ScopeDetail, held: &[Pause], now_ms: i64) -> Vec<(&'static str, String)> {
    let lease = &detail.lease;
    let none = || "none".to_owned();
    let until = lease.until_ms.map(|at_ms| format!(", until {}", moment(at_ms, now_ms))).unwrap_or_default();
    let mut facts = vec![
        ("scope", clean(&lease.scope)),
        ("token", lease.token.to_string()),
        ("holder", lease.holder.as_deref().map_or_else(none, clean)),
        ("source", format!("{}, era {}", lease.source.as_deref().map_or_else(none, clean), detail.era)),
        ("lease", format!("{}{until}", standing(lease, now_ms))),
        ("last", last(detail)),
        ("live", format!("{} commands, {} of them of older tokens", detail.live, detail.backlog)),
        ("policy", policy_text(&detail.own, &detail.default)),
    ];
    if detail.has_jumped() {
        let text = "the token jumped: a typo, or a clock that was taken for one? Honest holders are refused then; \
                    `fencepost scope rebase` begins anew";
        facts.push(("warning", screen.paint(Tone::Bad, text)));
    }
    if let Some(refusal) = &detail.refusal {
        let last = moment(refusal.last_ms, now_ms);
        let numbers = format!("token {} against {}", refusal.token, refusal.watermark);
        facts.push(("refused", format!("{} times, last {last}: {numbers}", refusal.count)));
    }
    facts.extend(held.iter().map(|pause| ("paused", format!("{}, {}", name(pause), terms(pause, now_ms)))));
    facts
}

fn last(detail: &ScopeDetail) -> String {
    match detail.last {
        Some(last) if last.era < detail.era => format!("seq {}, token {} of era {}", last.seq, last.token, last.era),
        Some(last) => format!("seq {}, token {}", last.seq, last.token),
        None => "no command yet".to_owned(),
    }
}

fn policy_text(own: &Policy, default: &Policy) -> String {
    let of = |name: &str, own: Option<String>, default: Option<String>| {
        let own_mark = if own.is_some() { "" } else { " (default)" };
        format!("{name} {}{own_mark}", own.or(default).unwrap_or_default())
    };
    let number = |number: Option<i64>| number.map(|number| number.to_string());
    let time = |ms: Option<i64>| ms.map(span);
    let flag = |flag: Option<bool>| flag.map(|flag| flag.to_string());
    [
        of("on_takeover", own.on_takeover.clone(), default.on_takeover.clone()),
        of("require_seal", flag(own.require_seal), flag(default.require_seal)),
        of("max_jump", number(own.max_jump), number(default.max_jump)),
        of("max_payload", number(own.max_payload), number(default.max_payload)),
        of("key_retention", time(own.key_retention_ms), time(default.key_retention_ms)),
    ]
    .join("\n")
}

fn detail_json(detail: &ScopeDetail, held: &[Pause], now_ms: i64) -> Value {
    let lease = &detail.lease;
    json!({
        "scope": lease.scope,
        "token": decimal(lease.token),
        "holder": lease.holder,
        "source": lease.source,
        "era": detail.era,
        "lease": standing(lease, now_ms),
        "granted_ms": lease.granted_ms,
        "until_ms": lease.until_ms,
        "live": detail.live,
        "backlog": detail.backlog,
        "last": detail.last.map(|last| json!({
            "seq": decimal(last.seq), "token": decimal(last.token), "era": last.era,
        })),
        "jumped": detail.has_jumped(),
        "refusals": detail.refusal.as_ref().map(|refusal| json!({
            "count": refusal.count,
            "token": decimal(refusal.token),
            "watermark": decimal(refusal.watermark),
            "last_ms": refusal.last_ms,
        })),
        "own": policy_json(&detail.own),
        "default": policy_json(&detail.default),
        "paused": held.iter().map(pause_json).collect::<Vec<_>>(),
    })
}

fn policy_json(policy: &Policy) -> Value {
    json!({
        "on_takeover": policy.on_takeover,
        "require_seal": policy.require_seal,
        "max_jump": policy.max_jump.map(decimal),
        "max_payload": policy.max_payload,
        "key_retention_ms": policy.key_retention_ms,
    })
}

// ── set, rebase ─────────────────────────────────────────────────────────────────────────────────────

fn set(args: &SetArgs, globals: &Globals) -> anyhow::Result<()> {
    let settings = settings(args);
    if settings.is_empty() {
        return Err(Failure::usage("nothing is to be set").hint("as in --on-takeover discard").into());
    }
    let who = args.why.who();
    let own = scopes::set(&mut database::write(globals)?, &args.scope, &settings, &args.why.act(&who)?)?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&json!({ "scope": args.scope, "own": policy_json(&own), "who": who }))?;
        return Ok(());
    }
    let connection = database::read(globals)?;
    let default = scopes::show(&connection, &args.scope)?.map(|detail| detail.default).unwrap_or_default();
    screen.print(&screen.block(&[("scope", clean(&args.scope)), ("policy", policy_text(&own, &default))]))?;
    Ok(())
}

fn settings(args: &SetArgs) -> Vec<Setting> {
    let takeover = args.on_takeover.map(|policy| {
        Setting::OnTakeover(match policy {
            TakeoverArg::Deliver => Some(OnTakeover::Deliver),
            TakeoverArg::Discard => Some(OnTakeover::Discard),
            TakeoverArg::Review => Some(OnTakeover::Review),
            TakeoverArg::Default => None,
        })
    });
    [
        takeover,
        args.require_seal.map(|own| Setting::RequireSeal(own.0)),
        args.max_jump.map(|own| Setting::MaxJump(own.0)),
        args.max_payload.map(|own| Setting::MaxPayload(own.0)),
        args.key_retention.map(|own| Setting::KeyRetention(own.0)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn rebase(args: &RebaseArgs, globals: &Globals) -> anyhow::Result<()> {
    let names = unique(args.scopes.iter().map(String::as_str));
    let to = Rebase { source: &args.source, watermark: args.watermark };
    let who = args.why.who();
    let rebased = scopes::rebase(&mut database::write(globals)?, &names, &to, &args.why.act(&who)?)?;
    let screen = globals.screen();
    if screen.is_json() {
        screen.print_json(&rebased.iter().map(|rebased| rebased_json(rebased, &to)).collect())?;
        return Ok(());
    }
    let source = clean(to.source);
    for Rebased { scope, era, old_watermark, old_source } in &rebased {
        let before = old_source.as_deref().map_or_else(|| "no source".to_owned(), clean);
        let scope = clean(scope);
        screen.print(&format!(
            "{scope} is in era {era}: tokens of {source} above {} count; before: {old_watermark} of {before}",
            to.watermark
        ))?;
    }
    screen.print(&screen.note("every writer must name its source from now on; what names another or none is FP014"))?;
    Ok(())
}

fn rebased_json(rebased: &Rebased, to: &Rebase<'_>) -> Value {
    json!({
        "scope": rebased.scope,
        "era": rebased.era,
        "source": to.source,
        "watermark": decimal(to.watermark),
        "old_watermark": decimal(rebased.old_watermark),
        "old_source": rebased.old_source,
    })
}
