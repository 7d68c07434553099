//! `fencepost run`: the daemon.
//!
//! It puts the parts together: configuration, store, effects, signals. A first SIGTERM or SIGINT stops
//! gracefully, a second one ends the process at once and leaves the rest to the next start's recovery.
//! Where the store can't be trusted any more the process ends on the spot: what is in memory then is
//! worth less than what is on disk.

use std::path::Path;
use std::process::exit;
use std::sync::Arc;

use fencepost::config::{Config, LogFormat};
use fencepost::dispatcher::{self, Destination, Destinations, Settings, Summary};
use fencepost::email::Email;
use fencepost::rules::Limits;
use fencepost::sqlite::{IdentityError, LockError, OpenError, OpenOptions, SchemaError, SqliteStore};
use fencepost::store::StoreError;
use fencepost::webhook::Webhook;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::exit::Exit;
use crate::operate::user_at_host;
use crate::output::warn;
use crate::retention::Retention;
use crate::{Globals, database};

/// Exit status of a process that a second signal ended: 128 + SIGTERM.
const ENDED_BY_SIGNAL: i32 = 143;

/// How the daemon is started.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Args {
    /// Send what is due, and end when nothing is left to do now
    #[arg(long)]
    pub(crate) drain: bool,
    /// Wait until no other dispatcher runs on this database, instead of ending with 75
    #[arg(long)]
    pub(crate) wait: bool,
    /// Say that the file that was dispatched from is gone, and that this copy takes its place
    #[arg(long)]
    pub(crate) moved: bool,
}

/// Why the daemon ended other than by a stop.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// A destination of the configuration can't be used.
    #[error("{kind}.{name} can't be used")]
    Destination {
        kind: &'static str,
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The database can't be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nothing more may be sent.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The runtime or a signal handler can't be set up.
    #[error("the runtime can't be started")]
    Runtime(#[source] std::io::Error),
}

impl RunError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Destination { .. }
            | Self::Open(OpenError::Identity(
                IdentityError::Copy { .. } | IdentityError::Backup { .. } | IdentityError::Older { .. },
            ))
            | Self::Open(OpenError::Lock(LockError::FileSystem { .. } | LockError::HardLinks { .. })) => Exit::Config,
            Self::Open(OpenError::Lock(LockError::Held(_)))
            | Self::Store(StoreError::Deposed { .. } | StoreError::Unavailable(_)) => Exit::TryLater,
            Self::Open(OpenError::Lock(LockError::Missing(_)) | OpenError::Schema(SchemaError::Missing)) => {
                Exit::Unavailable
            }
            Self::Open(OpenError::Schema(SchemaError::Foreign { .. } | SchemaError::Encoding { .. })) => Exit::Data,
            Self::Open(_) | Self::Store(_) | Self::Runtime(_) => Exit::InputOutput,
        }
    }
}

impl RunError {
    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Open(OpenError::Identity(IdentityError::Copy { .. } | IdentityError::Backup { .. })) => Some(
                "if the original is gone for good, start once with `run --moved`; if it lives on, or may send, \
                 `fencepost adopt-clone --reason …` parks what is live here",
            ),
            Self::Open(OpenError::Identity(IdentityError::Older { .. })) => Some(
                "put the newest copy back; if there is none, `fencepost adopt-clone --reason …` parks what is live, \
                 so that each command can be compared with what its receiver got",
            ),
            Self::Open(OpenError::Identity(IdentityError::Damaged(_))) => {
                Some("move the file with its -wal and -shm away, and put back a copy that `fencepost backup` made")
            }
            Self::Open(_) | Self::Destination { .. } | Self::Store(_) | Self::Runtime(_) => None,
        }
    }
}

/// `fencepost run`: the configuration, then the dispatcher.
pub(crate) fn command(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let path = database::given_configuration(globals);
    let config = Config::load(path, &|name| std::env::var(name).ok())?;
    log(&config, globals.verbose);
    for warning in &config.warnings {
        warn(warning);
    }
    let summary = run(args, &config, &database::path(globals)?)?;
    let ended: Vec<String> = summary.ended.iter().map(|(state, count)| format!("{state}: {count}")).collect();
    tracing::info!(ended = ended.join(", "), "ended");
    Ok(())
}

/// Only our own lines are ever written. The libraries for HTTP, SMTP and TLS log what they send at
/// their finer levels, secrets included, so no level and no variable turns them on.
fn log(config: &Config, verbose: u8) {
    let level = match verbose {
        0 => config.log.level,
        1 => config.log.level.max(tracing::Level::DEBUG),
        _ => tracing::Level::TRACE,
    };
    let ours = Targets::new().with_target("fencepost", LevelFilter::from_level(level)).with_default(LevelFilter::OFF);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let registry = tracing_subscriber::registry().with(ours);
    match config.log.format {
        LogFormat::Text => {
            let colour = std::io::IsTerminal::is_terminal(&std::io::stderr()) && std::env::var_os("NO_COLOR").is_none();
            registry.with(lines.with_ansi(colour)).init();
        }
        LogFormat::Json => registry.with(lines.json()).init(),
    }
}

/// Runs the dispatcher until it is stopped, or with `--drain` until nothing is left to do now.
fn run(args: &Args, config: &Config, database: &Path) -> Result<Summary, RunError> {
    let destinations = Arc::new(destinations(config)?);
    let options = OpenOptions {
        busy_timeout: config.dispatcher.busy_timeout,
        poll_interval: config.dispatcher.poll_interval,
        moved: args.moved.then(user_at_host),
    };
    let settings = Settings {
        max_in_flight: config.dispatcher.max_in_flight,
        drain_timeout: config.dispatcher.drain_timeout,
        drain: args.drain,
    };
    if config.webhooks.is_empty() && config.webhook_urls.is_none() && config.emails.is_empty() {
        tracing::warn!("the configuration names no destination, so every command waits; see --config");
    }
    let store = Arc::new(open(args, database, &options)?);
    let runtime = tokio::runtime::Runtime::new().map_err(RunError::Runtime)?;
    let retention = (!args.drain).then(|| Retention::start(database, config)).transpose().map_err(RunError::Runtime)?;
    let ran = runtime.block_on(async {
        let stop = stop().map_err(RunError::Runtime)?;
        dispatcher::run(store, destinations, settings, stop).await.map_err(RunError::Store)
    });
    // Attempts in flight are not awaited: after a stop there are none, and after a failure they must
    // not go on.
    runtime.shutdown_background();
    if ran.is_ok() {
        drop(retention);
    }
    ran
}

fn open(args: &Args, database: &Path, options: &OpenOptions) -> Result<SqliteStore, OpenError> {
    match SqliteStore::open(database, options) {
        Err(OpenError::Lock(LockError::Held(by))) if args.wait => {
            tracing::info!(by, "waiting for the dispatcher that runs on this database");
            SqliteStore::wait_and_open(database, options, &|| false)
        }
        other => other,
    }
}

/// Every destination of the configuration; what can't be used is an error here.
pub(crate) fn destinations(config: &Config) -> Result<Destinations, RunError> {
    let mut all = Destinations::new().kind("webhook").kind("email");
    for (name, webhook) in &config.webhooks {
        let effect = Webhook::new(webhook.settings.clone()).map_err(|source| bad("webhook", name, source))?;
        all = all.with("webhook", name, destination(effect, webhook.limits, webhook.max_in_flight));
    }
    if let Some(urls) = &config.webhook_urls {
        let effect = Webhook::new(urls.settings.clone()).map_err(|source| bad("webhook_urls", "*", source))?;
        all = all.with_urls("webhook", destination(effect, urls.limits, urls.max_in_flight));
    }
    for (name, relay) in &config.emails {
        let effect = Email::new(relay.settings.clone()).map_err(|source| bad("email", name, source))?;
        all = all.with("email", name, destination(effect, relay.limits, relay.max_in_flight));
    }
    Ok(all)
}

fn destination(effect: impl fencepost::effect::Effect, limits: Limits, max_in_flight: usize) -> Destination {
    Destination { effect: Arc::new(effect), limits, max_in_flight }
}

fn bad(kind: &'static str, name: &str, source: impl std::error::Error + Send + Sync + 'static) -> RunError {
    RunError::Destination { kind, name: name.to_owned(), source: Box::new(source) }
}

/// Resolves at the first SIGTERM or SIGINT. The second one ends the process, whatever the dispatcher is
/// busy with.
fn stop() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (first, stop) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        either(&mut terminate, &mut interrupt).await;
        // The dispatcher may have ended by itself meanwhile.
        let _ = first.send(());
        either(&mut terminate, &mut interrupt).await;
        tracing::warn!("a second signal: ending at once; the next start decides about attempts in flight");
        exit(ENDED_BY_SIGNAL);
    });
    Ok(async move {
        // The task above lives as long as the process, so this only ends with a signal.
        let _ = stop.await;
    })
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}
