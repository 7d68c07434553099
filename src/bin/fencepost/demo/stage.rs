//! What the demo plays on: a folder of its own with a database, a configuration and a secret, the
//! receivers, and the dispatcher.
//!
//! Nothing outside the folder is ever written, and it is removed at the end unless it is to be kept.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fencepost::clock;
use fencepost::sqlite::{inspect, migrate, prepare};
use rusqlite::Connection;
use rustix::process::Signal;

use super::business;
use super::process::{Process, until};
use super::receivers::{Arrival, Receivers};
use super::script::Lane;

/// The name of the subcommand that a worker's process runs.
pub(crate) const WORKER: &str = "demo-worker";

/// Children come before the folder: they must be gone when it is removed.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) receivers: Receivers,
    pub(super) connection: Connection,
    folder: PathBuf,
}

/// The demo's folder. Dropping it removes it, unless it is to be kept.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    pub(super) keep: bool,
}

impl Folder {
    /// A new one that only this user can read.
    pub(super) fn create() -> anyhow::Result<Self> {
        let mut name = format!("fencepost-demo-{}", uuid::Uuid::new_v4().simple());
        // Short enough for a person; if it is taken all the same, nothing of the other one is touched.
        name.truncate("fencepost-demo-".len() + 8);
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path).with_context(|| format!("can't create {}", path.display()))?;
        Ok(Self { path, keep: false })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep {
            // What can't be removed is left to the system's own cleaning.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

pub(super) fn database(folder: &Path) -> PathBuf {
    folder.join("shop.db")
}

fn config(folder: &Path) -> PathBuf {
    folder.join("fencepost.toml")
}

impl Stage {
    /// Everything but the dispatcher.
    pub(super) async fn set(folder: &Path) -> anyhow::Result<Self> {
        let connection = create_database(&database(folder))?;
        let receivers = Receivers::start(folder).await?;
        let secret: Vec<u8> =
            [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].iter().flat_map(|id| *id.as_bytes()).collect();
        std::fs::write(folder.join("secret"), format!("whsec_{}\n", STANDARD.encode(secret)))?;
        std::fs::write(config(folder), configuration(&receivers.url(), receivers.port()?))?;
        Ok(Self { receivers, connection, folder: folder.to_owned() })
    }

    /// Starts a dispatcher; it reigns when this returns.
    pub(super) async fn dispatcher(&self) -> anyhow::Result<Process> {
        let arguments: [OsString; 5] = [
            "--db".into(),
            database(&self.folder).into(),
            "--config".into(),
            config(&self.folder).into(),
            "run".into(),
        ];
        let mut process = Process::start("the dispatcher", self.folder.join("dispatcher.log"), &arguments)?;
        let pid = i64::from(process.pid()?.as_raw_nonzero().get());
        until("the dispatcher to start", async || {
            process.still_runs()?;
            let reign = inspect::status(&self.connection, clock::wall_ms())?.reign;
            Ok((reign.pid == Some(pid)).then_some(()))
        })
        .await?;
        Ok(process)
    }

    /// Stops a dispatcher in the regular way.
    pub(super) async fn dismiss(&self, mut dispatcher: Process) -> anyhow::Result<()> {
        dispatcher.signal(Signal::TERM)?;
        let status = dispatcher.ended().await?;
        ensure!(status.success(), "the dispatcher ended with {status}");
        Ok(())
    }

    /// Starts a worker.
    pub(super) fn worker(&self, worker: &str, ttl_ms: u64, wait: bool) -> anyhow::Result<Process> {
        let mut arguments: Vec<OsString> = vec![
            WORKER.into(),
            database(&self.folder).into(),
            worker.into(),
            "--ttl-ms".into(),
            ttl_ms.to_string().into(),
        ];
        if wait {
            arguments.push("--wait".into());
        }
        Process::start(&format!("worker {worker}"), self.folder.join("workers.log"), &arguments)
    }

    /// A command as the outbox shows it, if it is there.
    pub(super) fn command(&self, id: &str) -> anyhow::Result<Option<inspect::Detail>> {
        Ok(inspect::show(&self.connection, id)?)
    }

    /// What the receivers have of a command.
    pub(super) async fn arrived(&self, id: &str) -> anyhow::Result<Vec<Arrival>> {
        let arrivals = self.receivers.arrivals().await?.into_iter();
        Ok(arrivals.filter(|arrival| arrival.id == id).collect())
    }

    /// Waits until all of these are in a state.
    pub(super) async fn until_state(&self, ids: &[&str], state: &str) -> anyhow::Result<()> {
        until(&format!("{} to be {state}", ids.join(" and ")), async || {
            for id in ids {
                if self.command(id)?.is_none_or(|detail| detail.command.state != state) {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the receivers have all of these.
    pub(super) async fn until_arrived(&self, ids: &[&str]) -> anyhow::Result<()> {
        until(&format!("{} to arrive", ids.join(" and ")), async || {
            let arrivals = self.receivers.arrivals().await?;
            let all = ids.iter().all(|id| arrivals.iter().any(|arrival| arrival.id == *id));
            Ok(all.then_some(()))
        })
        .await
    }
}

fn create_database(path: &Path) -> anyhow::Result<Connection> {
    let mut connection = Connection::open(path).with_context(|| format!("can't create {}", path.display()))?;
    prepare(&connection)?;
    let transaction = connection.transaction()?;
    migrate(&transaction)?;
    business::create(&transaction)?;
    transaction.commit()?;
    Ok(connection)
}

/// Loopback is closed for webhooks unless it is opened, and waits are short, for a demo's sake.
fn configuration(url: &str, port: u16) -> String {
    let [hooks, mails] = [Lane::Hooks, Lane::Mails].map(|lane| lane.on_unknown().as_str());
    format!(
        "# Written by `fencepost demo`. The receivers that it names are gone when the demo has ended.

[webhook.billing]
url = \"{url}\"
secrets = [{{ file = \"secret\" }}]
allow_networks = [\"127.0.0.0/8\"]
on_unknown = \"{hooks}\"
backoff = {{ base = \"100ms\", cap = \"200ms\" }}

[email.main]
host = \"127.0.0.1\"
port = {port}
tls = \"none\"
on_unknown = \"{mails}\"
"
    )
}
