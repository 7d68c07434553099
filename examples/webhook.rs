//! Sends one webhook to an endpoint of yours, and shows what became of it.
//!
//! ```text
//! cargo run --example webhook -- https://example.com/hook
//! cargo run --example webhook -- https://example.com/hook whsec_…
//! cargo run --example webhook -- http://127.0.0.1:8025/hook --allow 127.0.0.0/8
//! ```
//!
//! It makes a database, writes one command as a worker does, and runs the dispatcher as a library
//! until nothing is left to do now. `--keep FILE` leaves the database behind, for `fencepost show`.
#![expect(clippy::print_stdout, reason = "an example talks to the person who runs it")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use fencepost::dispatcher::{self, Destination, Destinations};
use fencepost::rules::{Backoff, FencingToken, Jitter, Limits, OnUnknown};
use fencepost::sqlite::{self, Fenced, Held, NewCommand, OpenOptions, SqliteStore, inspect};
use fencepost::webhook::{Settings, Webhook};
use rusqlite::{Connection, TransactionBehavior};

/// Send one webhook through an outbox
#[derive(Debug, Parser)]
struct Args {
    /// Where the POST goes
    url: url::Url,
    /// A Standard Webhooks secret that signs it
    secret: Option<String>,
    /// The body
    #[arg(long, default_value = r#"{"paid":true}"#)]
    payload: String,
    /// A network that the address guard would refuse, as 127.0.0.0/8; may be repeated
    #[arg(long, value_name = "NETWORK")]
    allow: Vec<ipnet::IpNet>,
    /// A PEM file with the only roots to trust
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Keep the database here; the file must not exist yet
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
}

const LIMITS: Limits = Limits {
    on_unknown: OnUnknown::Resend,
    on_dead: fencepost::rules::OnDead::Continue,
    max_attempts: 40,
    max_age_ms: 20 * 3_600_000,
    resend_window_ms: 24 * 3_600_000,
    backoff: Backoff { base_ms: 5_000, cap_ms: 3_600_000, jitter: Jitter::Full },
};

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let folder = tempfile::tempdir()?;
    let path = args.keep.clone().unwrap_or_else(|| folder.path().join("outbox.db"));
    let id = write_command(&path, &args.payload)?;
    let endpoint = Webhook::new(Settings {
        url: Some(args.url),
        secrets: args.secret.into_iter().map(Into::into).collect(),
        connect_timeout: Duration::from_secs(10),
        read_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(30),
        allow_networks: args.allow,
        effect_free_status: Vec::new(),
        ca_file: args.ca,
    })?;
    let destination = Destination { effect: Arc::new(endpoint), limits: LIMITS, max_in_flight: 1 };
    send(&path, Destinations::new().with("webhook", "endpoint", destination))?;
    show(&path, &id)
}

/// The worker's part: in a real application this is the transaction of its own business.
fn write_command(path: &Path, payload: &str) -> Result<String, Box<dyn Error>> {
    std::fs::File::create_new(path)?;
    let mut connection = Connection::open(path)?;
    sqlite::prepare(&connection)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    sqlite::migrate(&transaction)?;
    transaction.commit()?;
    // Without any lease the token is 1.
    let mut work = Fenced::begin(&mut connection, &Held::new("order/17", FencingToken::new(1)?))?;
    let id = work.enqueue(&NewCommand::webhook("endpoint", payload))?.id().to_owned();
    work.commit()?;
    Ok(id)
}

/// The dispatcher's part. The lock on the database is held until the process ends.
fn send(path: &Path, destinations: Destinations) -> Result<(), Box<dyn Error>> {
    let store = Arc::new(SqliteStore::open(path, &OpenOptions::default())?);
    let settings = dispatcher::Settings { drain: true, ..dispatcher::Settings::default() };
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(dispatcher::run(store, Arc::new(destinations), settings, std::future::pending()))?;
    Ok(())
}

fn show(path: &Path, id: &str) -> Result<(), Box<dyn Error>> {
    let shown = inspect::show(&Connection::open(path)?, id)?.ok_or("the command is gone")?;
    let command = &shown.command;
    let reason = command.reason.as_ref().map(|reason| format!("/{reason}")).unwrap_or_default();
    println!("command  {id}");
    println!("state    {}{reason}, effect {}", command.state, command.effect);
    for attempt in &shown.attempts {
        let outcome = attempt.outcome.as_deref().unwrap_or("open");
        println!("attempt  {}: {outcome} {}", attempt.attempt_no, attempt.evidence.as_deref().unwrap_or(""));
    }
    Ok(())
}
