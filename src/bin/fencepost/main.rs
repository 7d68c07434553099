//! The command-line tool: arguments in, exit code out.
//!
//! Each group of commands has a file of its own. Usage errors end with 64, as in sysexits.
#![expect(clippy::print_stdout, reason = "a command's answer goes to standard output")]

mod demo;
mod run;
mod sink;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const USAGE: u8 = 64;
const INPUT_OUTPUT: u8 = 74;

/// A transactional-outbox dispatcher for side effects that cannot be fenced
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[arg(long, global = true)]
    db: Option<std::path::PathBuf>,
    #[arg(long, global = true)]
    config: Option<std::path::PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Dispatch
    Run(run::Args),
    /// Watch a stale worker being refused and a doubt being settled, on a database of its own
    Demo(demo::Args),
    /// A worker of the demo
    #[command(name = demo::WORKER, hide = true)]
    DemoWorker(demo::WorkerArgs),
    /// Catch webhooks and mail locally, and show what arrived
    Sink(sink::Args),
}

fn main() -> ExitCode {
    match Cli::try_parse().map_err(anyhow::Error::from).and_then(run) {
        Ok(code) => ExitCode::from(code),
        Err(error) => report(&error),
    }
}

fn run(cli: Cli) -> anyhow::Result<u8> {
    if let Command::Run(a) = &cli.command {
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_env_filter("fencepost=debug")
            .with_writer(std::io::stderr)
            .init();
        let config = fencepost::config::Config::load(cli.config.as_deref(), &|k| std::env::var(k).ok())?;
        match run::run(a, &config, &cli.db.unwrap_or_default()) {
            Ok(_) => return Ok(0),
            Err(error) => {
                eprintln!("fencepost: {:#}", anyhow::anyhow!(error.to_string()).context(format!("{error:?}")));
                std::process::exit(error.exit_code().into());
            }
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match cli.command {
        Command::Demo(args) => runtime.block_on(demo::run(&args)).map(|as_claimed| u8::from(!as_claimed)),
        Command::DemoWorker(args) => demo::work(&args),
        Command::Sink(args) => runtime.block_on(sink::run(args)).map(|()| 0),
        Command::Run(_) => Ok(0),
    }
}

fn report(error: &anyhow::Error) -> ExitCode {
    let Some(usage) = error.downcast_ref::<clap::Error>() else {
        eprintln!("fencepost: {error:#}");
        return ExitCode::from(INPUT_OUTPUT);
    };
    // A closed pipe is no reason for another exit code.
    let _ = usage.print();
    // Help and version come as an error too, but belong on standard output.
    if usage.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}
