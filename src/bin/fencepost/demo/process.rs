//! The demo's child processes: started, listened to, signalled, and never left behind.
//!
//! Only processes that were started here are ever signalled. Dropping one ends it, also when it is
//! stopped, whatever way the demo ends. They get a process group of their own, so that Ctrl-C reaches
//! the demo alone, which then ends them in order.

use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// The longest wait for any one thing.
const PATIENCE: Duration = Duration::from_secs(10);

const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Variables with which a user's shell could turn our children away from the demo's own files.
const FOREIGN: [&str; 4] = ["FENCEPOST_DB", "FENCEPOST_CONFIG", "FENCEPOST_LOG_LEVEL", "FENCEPOST_LOG_FORMAT"];

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    log: PathBuf,
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts this program with other arguments; what it logs goes to a file.
    pub(super) fn start<A: AsRef<OsStr>>(name: &str, log: PathBuf, arguments: &[A]) -> anyhow::Result<Self> {
        let itself = std::env::current_exe().context("can't find this program")?;
        let stderr = File::options().create(true).append(true).open(&log);
        let stderr = stderr.with_context(|| format!("can't write {}", log.display()))?;
        let mut command = Command::new(itself);
        command.args(arguments).process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        for name in FOREIGN {
            command.env_remove(name);
        }
        let mut child = command.spawn().with_context(|| format!("can't start {name}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("a child without its output")?;
        Ok(Self { name: name.to_owned(), log, child, input, lines: BufReader::new(output).lines() })
    }

    pub(super) fn pid(&self) -> anyhow::Result<Pid> {
        let raw = self.child.id().and_then(|id| i32::try_from(id).ok());
        raw.and_then(Pid::from_raw).with_context(|| format!("{} has ended; see {}", self.name, self.log.display()))
    }

    /// Its next line.
    pub(super) async fn line(&mut self) -> anyhow::Result<String> {
        let late = || format!("{} says nothing; see {}", self.name, self.log.display());
        let line = timeout(PATIENCE, self.lines.next_line()).await.with_context(late)??;
        line.with_context(|| format!("{} has ended; see {}", self.name, self.log.display()))
    }

    /// Writes an empty line to its input. It stays in the pipe until the child reads it.
    pub(super) async fn nudge(&mut self) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("a child without its input")?;
        input.write_all(b"\n").await.with_context(|| format!("{} doesn't listen", self.name))
    }

    pub(super) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill_process(self.pid()?, signal).with_context(|| format!("can't signal {}", self.name))
    }

    /// SIGSTOP. When this returns the system has confirmed that the process is stopped.
    pub(super) async fn stop(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        let pid = self.pid()?;
        // NOWAIT leaves the report where it is: the runtime does its own waiting.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        until(&format!("{} to be stopped", self.name), async || {
            Ok(waitid(WaitId::Pid(pid), options)?.filter(|status| status.stopped()).map(drop))
        })
        .await
    }

    /// How it ended by itself.
    pub(super) async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let late = || format!("{} does not end; see {}", self.name, self.log.display());
        Ok(timeout(PATIENCE, self.child.wait()).await.with_context(late)??)
    }

    /// Fails once it has ended.
    pub(super) fn still_runs(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("{} ended with {status}; see {}", self.name, self.log.display()),
            None => Ok(()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already can't be killed, and that is fine. SIGKILL also ends a process that
        // is stopped. The short wait keeps it from writing to a folder that is being removed.
        let _ = self.child.start_kill();
        for _ in 0..200 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Looks again and again until there is something to see.
pub(super) async fn until<T>(what: &str, look: impl AsyncFnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    let mut look = look;
    let seen = timeout(PATIENCE, async {
        loop {
            if let Some(seen) = look().await? {
                return Ok(seen);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    });
    seen.await.with_context(|| format!("waited {} s in vain for {what}", PATIENCE.as_secs()))?
}
