//! `fencepost demo`: what Fencepost is for, played with real processes in a few seconds.
//!
//! A real database file, the real dispatcher, real workers and the sink; one worker is really stopped
//! past its lease, one dispatcher really killed in the middle of an attempt. What is said on the way is
//! compared at the end with the database, the receivers and the workers' own words, and any difference
//! makes the demo fail. It must never touch anything outside its own folder, and leaves no process
//! behind, however it ends.

mod acts;
mod business;
mod claims;
mod process;
mod receivers;
mod report;
mod screen;
mod script;
mod stage;
mod worker;

use std::path::Path;

use anyhow::{Context, bail};
use fencepost::clock;
use tokio::signal::unix::{SignalKind, signal};

pub(crate) use stage::WORKER;
pub(crate) use worker::{Args as WorkerArgs, run as work};

use claims::Verdict;
use screen::{Screen, Tone};
use stage::{Folder, Stage};

/// Options of `fencepost demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave the database and the logs, to look at them afterwards
    #[arg(long)]
    keep: bool,
}

/// Plays the demo. True if everything was as it claims.
pub(crate) async fn run(args: &Args) -> anyhow::Result<bool> {
    let mut interrupts = Interrupts::new()?;
    let mut folder = Folder::create()?;
    let played = tokio::select! {
        played = play(folder.path()) => played,
        () = interrupts.next() => bail!("the demo was interrupted, and its processes and files are removed"),
    };
    // After a failure the logs are worth more than a tidy folder.
    folder.keep = args.keep || !matches!(played, Ok(true));
    let is_good = played.with_context(|| format!("the demo failed; its logs are in {}", folder.path().display()))?;
    if folder.keep {
        invite(Screen::new(), folder.path())?;
    }
    Ok(is_good)
}

async fn play(folder: &Path) -> anyhow::Result<bool> {
    let (screen, begun_ms) = (Screen::new(), clock::now().boot_ms);
    screen.line(Tone::Strong, "Fencepost demo: order 17, its mails and its webhooks, and what goes wrong")?;
    screen.line(Tone::Quiet, "Real processes, a real database file, real signals. It takes a few seconds.")?;
    let mut stage = Stage::set(folder).await?;
    let seen = acts::play(&mut stage, screen).await?;
    let verdict = claims::compare(&seen);
    report::print(screen, &seen, &verdict)?;
    conclude(screen, &verdict, clock::now().boot_ms - begun_ms)?;
    Ok(verdict.differences.is_empty())
}

fn conclude(screen: Screen, verdict: &Verdict, took_ms: i64) -> std::io::Result<()> {
    screen.line(Tone::Plain, "")?;
    let (checks, differences) = (verdict.checks, verdict.differences.len());
    let took = format!("{}.{} s", took_ms / 1_000, took_ms % 1_000 / 100);
    if differences == 0 {
        screen.line(
            Tone::Good,
            &format!("{checks} checks against database, receivers and workers: all as claimed ({took})"),
        )
    } else {
        screen.line(Tone::Bad, &format!("{differences} of {checks} checks differ from what is claimed ({took})"))
    }
}

/// How to look at what was kept.
fn invite(screen: Screen, folder: &Path) -> std::io::Result<()> {
    let database = stage::database(folder);
    // As the reader called it, since it need not be on the path.
    let program = std::env::args().next().unwrap_or_else(|| "fencepost".to_owned());
    screen.line(Tone::Plain, "")?;
    screen.line(Tone::Plain, &format!("Kept in {}, to be looked at:", folder.display()))?;
    for verb in ["status", "list"] {
        screen.line(Tone::Quiet, &format!("  {program} {verb} --db {}", database.display()))?;
    }
    Ok(())
}

/// The signals by which a person or a system ends a program.
struct Interrupts([tokio::signal::unix::Signal; 3]);

impl Interrupts {
    fn new() -> std::io::Result<Self> {
        Ok(Self([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
