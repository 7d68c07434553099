//! `fencepost pause` and `resume`: hold up a destination, a scope or everything.
//!
//! A pause begins nothing new; what was begun runs to its outcome. It is a row of the database, so it
//! survives restarts, and it says who asked for it and why.

use std::time::Duration;

use fencepost::clock::wall_ms;
use fencepost::sqlite::pause::{self, Pause, Target};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::inspect::shown;
use crate::operate::Why;
use crate::output::{Moment, clean, moment, parse_duration, parse_moment};
use crate::{Globals, database};

/// What is paused or resumed.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct What {
    /// A destination, as in webhook/billing
    #[arg(long, value_name = "KIND/NAME")]
    destination: Option<String>,
    /// A scope
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Everything
    #[arg(long)]
    all: bool,
}

impl What {
    fn target(&self) -> anyhow::Result<Target> {
        match (&self.destination, &self.scope) {
            (Some(both), _) => {
                let (kind, destination) = both
                    .split_once('/')
                    .filter(|(kind, name)| !kind.is_empty() && !name.is_empty())
                    .ok_or_else(|| {
                        Failure::usage(format!("--destination {} has no kind", clean(both)))
                            .hint("write it as in webhook/billing")
                    })?;
                Ok(Target::Destination { kind: kind.to_owned(), destination: destination.to_owned() })
            }
            (None, Some(scope)) => Ok(Target::Scope(scope.clone())),
            (None, None) => Ok(Target::Everything),
        }
    }
}

/// Options of `fencepost pause`.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    what: What,
    /// End it by itself after this time
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration, conflicts_with = "until")]
    duration: Option<Duration>,
    /// End it by itself at this time: +2h, 2026-03-01T10:00:00Z, a local 2026-03-01T10:00
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    until: Option<Moment>,
    #[command(flatten)]
    why: Why,
}

/// Options of `fencepost resume`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    why: Why,
}

/// Pauses from the dispatcher's next look on.
pub(crate) fn pause(args: &PauseArgs, globals: &Globals) -> anyhow::Result<()> {
    let target = args.what.target()?;
    let who = args.why.who();
    let act = args.why.act(&who)?;
    let until = args.duration.map(Moment::In).or(args.until).map(|until| until.at_ms(act.now_ms));
    let paused = pause::pause(&mut database::write(globals)?, &target, until, &act)?;
    say(globals, &paused, true)
}

/// Lets what was paused go on at once.
pub(crate) fn resume(args: &ResumeArgs, globals: &Globals) -> anyhow::Result<()> {
    let target = args.what.target()?;
    let who = args.why.who();
    let resumed = pause::resume(&mut database::write(globals)?, &target, &args.why.act(&who)?)?;
    say(globals, &resumed, false)
}

fn say(globals: &Globals, pause: &Pause, paused: bool) -> anyhow::Result<()> {
    let screen = globals.screen();
    if screen.is_json() {
        let mut value = pause_json(pause);
        value["paused"] = paused.into();
        screen.print_json(&value)?;
        return Ok(());
    }
    let name = name(pause);
    let text = match (paused, pause.until_ms) {
        (true, Some(until_ms)) => format!("{name} is paused until {}", moment(until_ms, wall_ms())),
        (true, None) => format!("{name} is paused until it is resumed"),
        (false, _) => format!("{name} goes on"),
    };
    screen.print(&text)?;
    Ok(())
}

/// What a pause is about, in words.
pub(crate) fn name(pause: &Pause) -> String {
    match (pause.kind.as_str(), pause.destination.as_str(), pause.scope.as_str()) {
        ("", "", "") => "everything".to_owned(),
        ("", "", scope) => format!("scope {}", clean(scope)),
        (kind, destination, "") => format!("{}/{}", clean(kind), clean(&shown(destination))),
        (kind, destination, scope) => {
            format!("{}/{} in scope {}", clean(kind), clean(&shown(destination)), clean(scope))
        }
    }
}

/// Since when, until when, by whom and why.
pub(crate) fn terms(pause: &Pause, now_ms: i64) -> String {
    let until = pause
        .until_ms
        .map_or_else(|| "until it is resumed".to_owned(), |at_ms| format!("until {}", moment(at_ms, now_ms)));
    format!(
        "since {}, {until}, by {}, because: {}",
        moment(pause.at_ms, now_ms),
        clean(&pause.who),
        clean(&pause.reason)
    )
}

/// A pause as every JSON answer shows it.
pub(crate) fn pause_json(pause: &Pause) -> Value {
    let maybe = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "kind": maybe(&pause.kind),
        "destination": maybe(&pause.destination).map(|destination| shown(&destination)),
        "scope": maybe(&pause.scope),
        "until_ms": pause.until_ms,
        "since_ms": pause.at_ms,
        "who": pause.who,
        "reason": pause.reason,
    })
}
