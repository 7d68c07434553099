//! The command-line tool: arguments in, exit code out.
//!
//! Each group of commands has a file of its own and returns an error instead of ending the process;
//! `exit` alone chooses exit codes. No SQL belongs here: the library has it.

mod audit;
mod config;
mod database;
mod demo;
mod doctor;
mod enqueue;
mod events;
mod exec;
mod exit;
mod init;
mod inspect;
mod lease;
mod operate;
mod output;
mod pause;
mod prune;
mod refusals;
mod resolve;
mod retention;
mod run;
mod scope;
#[expect(clippy::print_stdout, reason = "it prints where it listens")]
mod sink;
mod why;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Parser, Subcommand};

use output::{ColorChoice, Screen};

/// A transactional-outbox dispatcher for side effects that cannot be fenced
///
/// A worker writes its emails and webhooks as commands into its own database, in its own transaction,
/// stamped with the fencing token of its lease. Fencepost checks the order again and sends them.
#[derive(Debug, Parser)]
#[command(name = "fencepost", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes:
   0  done                      70  a bug
   1  a check found a breach    74  input or output failed
  64  wrong usage               75  try later: lease held or lost, database busy
  65  refused, or wrong data    78  wrong configuration
  69  no database or outbox";

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    /// The application's database file; goes before [database] path of the configuration
    #[arg(long, global = true, value_name = "PATH", env = "FENCEPOST_DB", hide_env_values = true, value_parser = maybe_empty())]
    pub(crate) db: Option<PathBuf>,
    /// The configuration file
    #[arg(long, global = true, value_name = "PATH", env = "FENCEPOST_CONFIG", hide_env_values = true, value_parser = maybe_empty())]
    pub(crate) config: Option<PathBuf>,
    /// Answer in JSON, with tokens and seqs as decimal strings
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// When to use colour
    #[arg(long, global = true, value_name = "WHEN", value_enum, default_value = "auto", hide_possible_values = true)]
    pub(crate) color: ColorChoice,
    /// Say more in the log of `run`; twice for even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Globals {
    pub(crate) fn screen(&self) -> Screen {
        Screen::new(self.json, self.color)
    }
}

/// A path; an empty variable is taken for one that isn't set.
fn maybe_empty() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create the outbox in a database, or upgrade it
    Init(init::Args),
    /// Send what the outbox holds, until stopped
    Run(run::Args),
    /// Watch a stale worker being refused and a doubt being settled, on a database of its own
    Demo(demo::Args),
    /// A worker of the demo
    #[command(name = demo::WORKER, hide = true)]
    DemoWorker(demo::WorkerArgs),
    /// Catch webhooks and mail locally, and show what arrived
    Sink(sink::Args),
    /// Write a command into the outbox
    Enqueue(enqueue::Args),
    /// Acquire, renew, release and show leases, or run a program under one
    Lease(lease::Args),
    /// Raise a scope's watermark to a token of a foreign lease service
    Seal(lease::SealArgs),
    /// Show what waits, what failed and what is stuck; --check answers by exit code
    Status(inspect::StatusArgs),
    /// List commands, newest first
    List(inspect::ListArgs),
    /// Show everything about one command
    Show(inspect::ShowArgs),
    /// Show what became of commands, in the order in which it happened; --follow goes on
    Events(events::Args),
    /// Answer for commands in doubt: did they happen?
    Resolve(Box<resolve::Args>),
    /// End commands that wait, or were begun and may not send yet
    Cancel(operate::Args),
    /// Send parked commands after all, with fresh tries
    Adopt(operate::Args),
    /// End parked commands
    Discard(operate::Args),
    /// Make new commands from finished ones, under the current token
    Reissue(operate::ReissueArgs),
    /// Begin nothing new for a destination, a scope or everything
    Pause(pause::PauseArgs),
    /// Let what was paused go on
    Resume(pause::ResumeArgs),
    /// Show and set scopes: token, source, policy; rebase
    Scope(scope::Args),
    /// Remove what is finished and old; ids and keys stay known for a while
    Prune(prune::Args),
    /// Say why a command waits or how it ended, now or at a past moment, and what may be done
    Why(why::Args),
    /// Check every invariant that can be read off the database; ends with 1 if one doesn't hold
    Audit(audit::Args),
    /// Look at everything around the database: locks, WAL, disk, clock, schema; ends with 1 on a breach
    Doctor(doctor::Args),
    /// Check or show the configuration
    Config(config::Args),
    /// Becomes the program of `lease exec`
    #[command(name = exec::STAGE, hide = true)]
    Stage(exec::StageArgs),
}

fn main() -> ExitCode {
    match Cli::try_parse().map_err(anyhow::Error::from).and_then(|cli| dispatch(cli.command, &cli.globals)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(exit::report(&error)),
    }
}

fn dispatch(command: Command, globals: &Globals) -> anyhow::Result<u8> {
    let done = |result: anyhow::Result<()>| result.map(|()| 0);
    match command {
        Command::Init(args) => done(init::init(&args, globals)),
        Command::Run(args) => done(run::command(&args, globals)),
        Command::Demo(args) => many_threads()?.block_on(demo::run(&args)).map(|as_claimed| u8::from(!as_claimed)),
        Command::DemoWorker(args) => demo::work(&args),
        Command::Sink(args) => done(many_threads()?.block_on(sink::run(args))),
        Command::Enqueue(args) => done(enqueue::enqueue(&args, globals)),
        Command::Lease(args) => lease::lease(args, globals),
        Command::Seal(args) => done(lease::seal(&args, globals)),
        Command::Status(args) => inspect::status(&args, globals),
        Command::List(args) => done(inspect::list(&args, globals)),
        Command::Show(args) => done(inspect::show(&args, globals)),
        Command::Events(args) => done(events::events(&args, globals)),
        Command::Resolve(args) => done(resolve::resolve(&args, globals)),
        Command::Cancel(args) => done(operate::cancel(&args, globals)),
        Command::Adopt(args) => done(operate::adopt(&args, globals)),
        Command::Discard(args) => done(operate::discard(&args, globals)),
        Command::Reissue(args) => done(operate::reissue(&args, globals)),
        Command::Pause(args) => done(pause::pause(&args, globals)),
        Command::Resume(args) => done(pause::resume(&args, globals)),
        Command::Scope(args) => done(scope::scope(&args, globals)),
        Command::Prune(args) => done(prune::prune(&args, globals)),
        Command::Why(args) => done(why::why(&args, globals)),
        Command::Audit(args) => audit::audit(&args, globals),
        Command::Doctor(args) => doctor::doctor(&args, globals),
        Command::Config(args) => done(config::config(&args, globals)),
        Command::Stage(args) => Ok(exec::become_program(&args)),
    }
}

fn many_threads() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

/// A value that a variable of the environment lends; an empty one is none.
pub(crate) fn given(value: &Option<String>) -> Option<&str> {
    value.as_deref().filter(|text| !text.is_empty())
}
