//! `fencepost lease exec`: a program that runs as long as its lease.
//!
//! The lease is renewed at a third of its time. When it is lost the program is stopped, first politely;
//! until it is, the fence refuses what it writes, so nothing here has to be in time for anything but
//! wasted work. The program must not outlive us, whatever kills us: it is started through a stage of
//! our own binary, which asks the kernel for SIGKILL at our death and then becomes the program. (Its
//! own children, and a program that is set-uid, are beyond that; the fence is not.)

use std::ffi::OsString;
use std::io::{IsTerminal, stdin};
use std::os::unix::process::{CommandExt, ExitStatusExt, parent_id};
use std::process::{Command as Program, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use fencepost::clock::wall_ms;
use fencepost::sqlite::{Lease, WorkerError, new_holder, release, renew};
use rusqlite::Connection;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};
use tokio::time::{sleep, timeout};

use crate::exit::{Exit, Failure, is_held};
use crate::lease::{in_transaction, is_lost, take};
use crate::output::{clean, parse_duration, relative, warn};
use crate::{Globals, database};

/// The hidden command that becomes the program.
pub(crate) const STAGE: &str = "lease-exec-stage";

/// While somebody else has the lease, it is asked for at least and at most this often.
const WAIT: std::ops::RangeInclusive<i64> = 20..=1_000;

/// Options of `fencepost lease exec`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What is to be held
    #[arg(long, value_name = "SCOPE")]
    scope: String,
    /// How long the lease lasts without a renewal; it is renewed at a third of that
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    ttl: Duration,
    /// Wait for the lease instead of ending with 75 if somebody has it
    #[arg(long)]
    wait: bool,
    /// How long the program has to end after SIGTERM, once the lease is lost
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    grace: Duration,
    /// The program and its arguments; it gets FENCEPOST_DB, _SCOPE, _TOKEN and _HOLDER
    #[arg(last = true, required = true, value_name = "CMD")]
    program: Vec<OsString>,
}

/// Options of the stage.
#[derive(Debug, clap::Args)]
pub(crate) struct StageArgs {
    #[arg(long)]
    parent: u32,
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// The connection for renewals, until the release takes it: a renewal that comes after the release
/// would revive the lease.
type Shared = Arc<Mutex<Option<Connection>>>;

/// Runs the program under the lease and answers with its exit code.
pub(crate) fn exec(args: Args, globals: &Globals) -> anyhow::Result<u8> {
    let mut connection = database::write(globals)?;
    let path = std::fs::canonicalize(database::path(globals)?).context("can't find the database again")?;
    let lease = acquire(&mut connection, &args, globals)?;
    let shared = Arc::new(Mutex::new(Some(connection)));
    // On this very thread: the kernel's signal at the parent's death goes by the thread that forked.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(run(&args, &lease, &shared, path.as_os_str()));
    if matches!(ended, Ok(Ended::Lost(_))) {
        // A renewal that hangs in the database must not keep us from telling.
        runtime.shutdown_background();
    }
    match ended {
        Ok(Ended::Itself(status)) => finish(status, &lease, &shared),
        Ok(Ended::Lost(reason)) => Err(lost(&lease, &reason)),
        Err(error) => {
            let_go(&lease, &shared)?;
            Err(error)
        }
    }
}

enum Ended {
    Itself(ExitStatus),
    Lost(String),
}

fn acquire(connection: &mut Connection, args: &Args, globals: &Globals) -> anyhow::Result<Lease> {
    let mut progress = None;
    loop {
        let held = match take(connection, &args.scope, &new_holder(), args.ttl) {
            Ok(lease) => return Ok(lease),
            Err(WorkerError::Refused(refusal)) if args.wait && is_held(&refusal) => refusal,
            Err(WorkerError::Locked) if args.wait => continue,
            Err(error) => return Err(error.into()),
        };
        let now_ms = wall_ms();
        let until_ms = held.until_ms.unwrap_or(now_ms);
        if progress.is_none() {
            let holder = clean(held.current_holder.as_deref().unwrap_or("somebody"));
            eprintln!(
                "fencepost: {} is held by {holder}, until {} unless renewed; waiting",
                clean(&args.scope),
                relative(until_ms, now_ms)
            );
            progress = Some(globals.screen().progress("waiting for the lease"));
        }
        let wait_ms = until_ms.saturating_sub(now_ms).clamp(*WAIT.start(), *WAIT.end());
        std::thread::sleep(Duration::from_millis(wait_ms.unsigned_abs()));
    }
}

async fn run(args: &Args, lease: &Lease, shared: &Shared, db: &std::ffi::OsStr) -> anyhow::Result<Ended> {
    // The handlers come first: a signal right after the start must find the program.
    let mut signals = Signals::new()?;
    let mut child = start(args, lease, db)?;
    let pid =
        child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).context("the program has no process id")?;
    let mut keeping = std::pin::pin!(keep(shared, lease, args.ttl));
    let reason = loop {
        tokio::select! {
            status = child.wait() => return Ok(Ended::Itself(status?)),
            reason = &mut keeping => break reason,
            signal = signals.next() => forward(pid, signal),
        }
    };
    warn(&format!(
        "the lease on {} is lost; stopping the program (process {pid})",
        lease.scope,
        pid = pid.as_raw_nonzero()
    ));
    stop(&mut child, pid, args.grace).await?;
    Ok(Ended::Lost(reason))
}

fn start(args: &Args, lease: &Lease, db: &std::ffi::OsStr) -> anyhow::Result<Child> {
    let ourselves = std::env::current_exe().context("can't find our own program file")?;
    Command::new(ourselves)
        .args([STAGE, "--parent", &std::process::id().to_string(), "--"])
        .args(&args.program)
        .env("FENCEPOST_DB", db)
        .env("FENCEPOST_SCOPE", &lease.scope)
        .env("FENCEPOST_TOKEN", lease.token.to_string())
        .env("FENCEPOST_HOLDER", &lease.holder)
        .kill_on_drop(true)
        .spawn()
        .context("can't start the program")
}

/// Ties this process to its parent and becomes the program; returns only if that fails, with the
/// exit code that a shell has for it.
pub(crate) fn become_program(args: &StageArgs) -> u8 {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        warn(&format!("the program may outlive its lease's keeper: {error}"));
    }
    // The parent may have died before the kernel was asked.
    if parent_id() != args.parent {
        return Exit::TryLater as u8;
    }
    let Some((program, arguments)) = args.program.split_first() else { return Exit::Usage as u8 };
    let error = Program::new(program).args(arguments).exec();
    eprintln!("fencepost: can't run {}: {error}", clean(&program.to_string_lossy()));
    if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }
}

/// Renews the lease again and again; returns why it is lost.
///
/// Time is counted by the timer, from the last renewal on: a wall clock that is set back or forward
/// changes nothing here.
async fn keep(shared: &Shared, lease: &Lease, ttl: Duration) -> String {
    let third = ttl / 3;
    loop {
        sleep(third).await;
        match timeout(ttl - third, renewed(shared, lease, ttl)).await {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => return reason,
            Err(_) => return "it could not be renewed before it ran out".to_owned(),
        }
    }
}

/// Tries until it is renewed, or refused.
async fn renewed(shared: &Shared, lease: &Lease, ttl: Duration) -> Result<(), String> {
    let pause = (ttl / 10).min(Duration::from_secs(1));
    let mut warned = false;
    loop {
        let problem = match renew_once(shared, lease, ttl).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if error.code().is_some() => return Err(error.to_string()),
            Ok(Err(error)) => format!("{:#}", anyhow::Error::new(error)),
            Err(error) => error.to_string(),
        };
        if !warned {
            warn(&format!("the lease on {} can't be renewed, trying again: {problem}", lease.scope));
            warned = true;
        }
        sleep(pause).await;
    }
}

async fn renew_once(
    shared: &Shared,
    lease: &Lease,
    ttl: Duration,
) -> Result<Result<(), WorkerError>, tokio::task::JoinError> {
    let (shared, lease) = (Arc::clone(shared), lease.clone());
    let work = move || {
        let mut slot = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = slot.as_mut() else { return Ok(()) };
        in_transaction(connection, |transaction| renew(transaction, &lease.scope, lease.token, &lease.holder, ttl))
            .map(drop)
    };
    tokio::task::spawn_blocking(work).await
}

async fn stop(child: &mut Child, pid: Pid, grace: Duration) -> anyhow::Result<()> {
    forward(pid, Signal::TERM);
    if timeout(grace, child.wait()).await.is_err() {
        warn("the program does not end; killing it");
        child.kill().await.context("can't kill the program")?;
    }
    Ok(())
}

/// It was not waited for yet, so the number is still its own.
fn forward(pid: Pid, signal: Signal) {
    // It may have ended this very moment, which its exit code tells.
    let _ = kill_process(pid, signal);
}

fn finish(status: ExitStatus, lease: &Lease, shared: &Shared) -> anyhow::Result<u8> {
    let_go(lease, shared)?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(Exit::Bug as u8))
}

/// Gives the lease back. If somebody took it while the program ran, its exit code says too much.
fn let_go(lease: &Lease, shared: &Shared) -> anyhow::Result<()> {
    let connection = shared.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(mut connection) = connection else { return Ok(()) };
    let released =
        in_transaction(&mut connection, |transaction| release(transaction, &lease.scope, lease.token, &lease.holder));
    match released {
        Ok(()) => Ok(()),
        Err(error) if is_lost(&error) => Err(lost(lease, &error.to_string())),
        Err(error) => {
            warn(&format!("the lease on {} runs out by itself, since it can't be released: {error}", lease.scope));
            Ok(())
        }
    }
}

fn lost(lease: &Lease, reason: &str) -> anyhow::Error {
    Failure::new(Exit::TryLater, format!("the lease on {} was lost: {reason}", lease.scope))
        .hint("what the program wrote after that was refused; run it again for another token")
        .into()
}

/// What is passed on to the program.
struct Signals {
    terminate: Stream,
    interrupt: Stream,
    hang_up: Stream,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        // Ctrl-C at a terminal reaches the program by itself; twice means "at once" to many.
        let by_keyboard = stdin().is_terminal();
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Signal::TERM,
                _ = self.hang_up.recv() => return Signal::HUP,
                _ = self.interrupt.recv() => if !by_keyboard { return Signal::INT },
            }
        }
    }
}
