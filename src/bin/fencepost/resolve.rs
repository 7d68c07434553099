//! `fencepost resolve`: a person's answer for a command in doubt.
//!
//! What follows from an answer is decided by the rules and written with an audit entry by the library;
//! nothing is answered here without a reason and a name.

use clap::ValueEnum;
use fencepost::clock::wall_ms;
use fencepost::rules::Answer;
use fencepost::sqlite::inspect::Listed;
use fencepost::sqlite::resolve::{Resolution, resolve as answer, word};
use serde_json::json;

use crate::exit::Failure;
use crate::inspect::command_json;
use crate::output::{Tone, clean};
use crate::{Globals, database};

/// Options of `fencepost resolve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The command
    id: String,
    /// What became of it
    #[arg(value_enum)]
    answer: Word,
    /// Why you say so; kept in the audit table
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Who says so; by default the user and host
    #[arg(long, value_name = "NAME")]
    who: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Word {
    /// It happened
    Delivered,
    /// It did not: send it again, with fresh tries
    NotDelivered,
    /// Nobody will find out: end it, and let its lane go on
    GivenUp,
}

impl Word {
    const fn answer(self) -> Answer {
        match self {
            Self::Delivered => Answer::Delivered,
            Self::NotDelivered => Answer::NotDelivered,
            Self::GivenUp => Answer::GivenUp,
        }
    }
}

/// Writes the answer and prints what the command is now.
pub(crate) fn resolve(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    if args.reason.trim().is_empty() {
        return Err(Failure::usage("--reason is empty").hint("say in a few words how you know").into());
    }
    let mut connection = database::write(globals)?;
    let who = args.who.clone().filter(|who| !who.trim().is_empty()).unwrap_or_else(user_at_host);
    let resolution =
        Resolution { id: &args.id, answer: args.answer.answer(), who: &who, reason: &args.reason, now_ms: wall_ms() };
    let command = answer(&mut connection, &resolution)?;
    say(globals, &command, resolution.answer, &who)
}

fn say(globals: &Globals, command: &Listed, answer: Answer, who: &str) -> anyhow::Result<()> {
    let screen = globals.screen();
    if screen.is_json() {
        let mut value = command_json(command);
        value["answer"] = word(answer).into();
        value["who"] = json!(who);
        screen.print_json(&value)?;
        return Ok(());
    }
    let next = match answer {
        Answer::Delivered => "its lane goes on",
        Answer::NotDelivered => "it is due now, with fresh tries, and goes out under the same id",
        Answer::GivenUp => "it will never be sent again, and its lane goes on",
    };
    let state = screen.paint(Tone::of_state(&command.state), &command.state);
    screen.print(&format!("{} is {state} now, effect {}: {next}", clean(&command.id), command.effect))?;
    Ok(())
}

/// Who runs this process, for the audit table.
pub(crate) fn user_at_host() -> String {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let user = set("USER").or_else(|| set("LOGNAME"));
    let user = user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}
