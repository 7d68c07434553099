//! `fencepost cancel`, `adopt`, `discard` and `reissue`: a word on commands that are there already.
//!
//! Either a holder says it, fenced like an enqueue by scope and token, or an operator, with a reason
//! that stands in the audit table. Never both: a stale worker must not get round its fence by giving a
//! reason. Of several commands all are done or none.

use fencepost::clock::wall_ms;
use fencepost::sqlite::inspect::{Listed, listed_by_id};
use fencepost::sqlite::operator::{self, Act, Decision, decide};
use fencepost::sqlite::{Fenced, WorkerError};
use serde_json::{Value, json};

use crate::enqueue::held;
use crate::exit::Failure;
use crate::inspect::command_json;
use crate::output::{Tone, clean};
use crate::{Globals, database, given};

/// Why, and who says so.
#[derive(Debug, clap::Args)]
pub(crate) struct Why {
    /// Why; kept in the audit table
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
    /// Who says so; by default the user and host
    #[arg(long, value_name = "NAME")]
    pub(crate) who: Option<String>,
}

impl Why {
    /// The act, with the name that stands in the audit table.
    pub(crate) fn act<'a>(&'a self, who: &'a str) -> anyhow::Result<Act<'a>> {
        act(&self.reason, who)
    }

    pub(crate) fn who(&self) -> String {
        who(self.who.as_deref())
    }
}

fn act<'a>(reason: &'a str, who: &'a str) -> anyhow::Result<Act<'a>> {
    if reason.trim().is_empty() {
        return Err(Failure::usage("--reason is empty").hint("say in a few words how you know").into());
    }
    Ok(Act { who, reason, now_ms: wall_ms() })
}

fn who(given: Option<&str>) -> String {
    given.filter(|who| !who.trim().is_empty()).map_or_else(user_at_host, str::to_owned)
}

pub(crate) fn user_at_host() -> String {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let user = set("USER").or_else(|| set("LOGNAME"));
    let user = user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}

/// Who speaks: a holder, or an operator.
#[derive(Debug, clap::Args)]
struct Speaker {
    /// As an operator: why; kept in the audit table
    #[arg(long, value_name = "TEXT", help_heading = "As an operator")]
    reason: Option<String>,
    /// As an operator: who says so; by default the user and host
    #[arg(long, value_name = "NAME", help_heading = "As an operator")]
    who: Option<String>,
    /// As a holder: what is held
    #[arg(long, value_name = "SCOPE", env = "FENCEPOST_SCOPE", hide_env_values = true, help_heading = "As a holder")]
    scope: Option<String>,
    /// As a holder: the fencing token; without any lease it is 1
    #[arg(long, value_name = "N", env = "FENCEPOST_TOKEN", hide_env_values = true, help_heading = "As a holder")]
    token: Option<i64>,
    /// As a holder: the identity of the acquisition
    #[arg(long, value_name = "HOLDER", env = "FENCEPOST_HOLDER", hide_env_values = true, help_heading = "As a holder")]
    holder: Option<String>,
    /// As a holder: the foreign lease service that issued the token
    #[arg(long, value_name = "NAME", help_heading = "As a holder")]
    source: Option<String>,
}

impl Speaker {
    /// The scope of a holder; `None` for an operator, who has given a reason.
    fn scope(&self) -> anyhow::Result<Option<&str>> {
        match (given(&self.scope), &self.reason) {
            (Some(_), Some(_)) => Err(Failure::usage("--reason is an operator's, and --scope a holder's")
                .hint("give one of them; under `lease exec` FENCEPOST_SCOPE is set, so unset it to act as an operator")
                .into()),
            (None, None) => Err(Failure::usage("neither --reason nor --scope is given")
                .hint("an operator gives --reason, a holder --scope and --token")
                .into()),
            (scope, _) => Ok(scope),
        }
    }

    /// Runs a holder's verbs in one fenced transaction.
    fn fenced<T>(
        &self,
        globals: &Globals,
        scope: &str,
        verbs: impl FnOnce(&mut Fenced<'_>) -> Result<T, WorkerError>,
    ) -> anyhow::Result<T> {
        let held = held(scope, self.token.unwrap_or(1), given(&self.holder), given(&self.source))?;
        let mut connection = database::write(globals)?;
        let mut transaction = Fenced::begin(&mut connection, &held)?;
        let done = verbs(&mut transaction)?;
        transaction.commit()?;
        Ok(done)
    }

    fn reason(&self) -> &str {
        self.reason.as_deref().unwrap_or_default()
    }
}

/// Options of `fencepost cancel`, `adopt` and `discard`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The commands
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
    #[command(flatten)]
    speaker: Speaker,
}

/// Options of `fencepost reissue`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReissueArgs {
    /// The finished commands
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
    /// The id of the new command; by default one is made
    #[arg(long, value_name = "ID")]
    new_id: Option<String>,
    #[command(flatten)]
    speaker: Speaker,
}

/// Ends commands that wait, or that were begun and may not send yet.
pub(crate) fn cancel(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    word_on(args, globals, Decision::Cancel, |transaction, id| transaction.cancel(id))
}

/// Sends parked commands after all.
pub(crate) fn adopt(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    word_on(args, globals, Decision::Adopt, |transaction, id| transaction.adopt(id))
}

/// Ends parked commands.
pub(crate) fn discard(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    word_on(args, globals, Decision::Discard, |transaction, id| transaction.discard(id))
}

fn word_on(
    args: &Args,
    globals: &Globals,
    decision: Decision,
    by_holder: impl Fn(&mut Fenced<'_>, &str) -> Result<(), WorkerError>,
) -> anyhow::Result<()> {
    let ids = unique(args.ids.iter().map(String::as_str));
    if let Some(scope) = args.speaker.scope()? {
        args.speaker.fenced(globals, scope, |transaction| ids.iter().try_for_each(|id| by_holder(transaction, id)))?;
        let connection = database::read(globals)?;
        let commands = ids.iter().filter_map(|id| listed_by_id(&connection, id).transpose());
        return say(globals, decision.verb(), &commands.collect::<Result<Vec<_>, _>>()?, None);
    }
    let who = who(args.speaker.who.as_deref());
    let act = act(args.speaker.reason(), &who)?;
    let commands = decide(&mut database::write(globals)?, decision, &ids, &act)?;
    say(globals, decision.verb(), &commands, Some(&who))
}

/// The same command twice in one list is meant once.
pub(crate) fn unique<'a>(ids: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = std::collections::HashSet::new();
    ids.filter(|id| seen.insert(*id)).collect()
}

/// Prints what commands are now; with `--json` one alone is an object, as of every command.
pub(crate) fn say(globals: &Globals, verb: &str, commands: &[Listed], who: Option<&str>) -> anyhow::Result<()> {
    let screen = globals.screen();
    if screen.is_json() {
        let value = |command: &Listed| {
            let mut value = command_json(command);
            value["verb"] = verb.into();
            value["who"] = json!(who);
            value
        };
        let mut values: Vec<Value> = commands.iter().map(value).collect();
        screen.print_json(&if values.len() == 1 { values.remove(0) } else { values.into() })?;
        return Ok(());
    }
    for command in commands {
        let reason = command.reason.as_deref().map(|reason| format!(" ({})", clean(reason))).unwrap_or_default();
        let state = screen.paint(Tone::of_state(&command.state), &command.state);
        let (id, effect) = (clean(&command.id), &command.effect);
        screen.print(&format!("{id} is {state} now{reason}, effect {effect}: {}", next(command)))?;
    }
    Ok(())
}

fn next(command: &Listed) -> &'static str {
    match command.state.as_str() {
        "delivered" => "its lane goes on",
        "dead" => "it will never be sent again, and its lane goes on",
        "pending" => "it is due now, with fresh tries, and goes out under the same id",
        _ => "it waits for its holder or an operator: the scope was taken over",
    }
}

/// Makes new commands from finished ones.
pub(crate) fn reissue(args: &ReissueArgs, globals: &Globals) -> anyhow::Result<()> {
    let ids = unique(args.ids.iter().map(String::as_str));
    if args.new_id.is_some() && ids.len() > 1 {
        return Err(Failure::usage("--new-id names one command, and several are given").into());
    }
    let new_id = args.new_id.as_deref();
    let commands = match args.speaker.scope()? {
        Some(scope) => {
            let verbs = |transaction: &mut Fenced<'_>| {
                ids.iter()
                    .map(|id| transaction.reissue(id, new_id).map(|new| new.id().to_owned()))
                    .collect::<Result<Vec<_>, _>>()
            };
            let new = args.speaker.fenced(globals, scope, verbs)?;
            let connection = database::read(globals)?;
            new.iter().filter_map(|id| listed_by_id(&connection, id).transpose()).collect::<Result<Vec<_>, _>>()?
        }
        None => {
            let who = who(args.speaker.who.as_deref());
            operator::reissue(&mut database::write(globals)?, &ids, new_id, &act(args.speaker.reason(), &who)?)?
        }
    };
    say_reissued(globals, &ids, &commands)
}

fn say_reissued(globals: &Globals, old: &[&str], new: &[Listed]) -> anyhow::Result<()> {
    let screen = globals.screen();
    if screen.is_json() {
        let value = |(old, new): (&&str, &Listed)| {
            let mut value = command_json(new);
            value["reissue_of"] = (*old).into();
            value
        };
        let mut values: Vec<Value> = old.iter().zip(new).map(value).collect();
        screen.print_json(&if values.len() == 1 { values.remove(0) } else { values.into() })?;
        return Ok(());
    }
    for (old, new) in old.iter().zip(new) {
        let (id, scope) = (clean(&new.id), clean(&new.scope));
        screen.print(&format!("{id}  seq {} of scope {scope}, token {}, from {}", new.seq, new.token, clean(old)))?;
    }
    Ok(())
}
