//! Sends one mail through a relay of yours, and shows what became of it.
//!
//! ```text
//! cargo run --example email -- smtp.example.com:587 shop@example.com ann@example.org
//! SMTP_PASSWORD=… cargo run --example email -- smtp.example.com:465 shop@example.com ann@example.org --user app
//! cargo run --example email -- 127.0.0.1:2525 shop@example.com ann@example.org --tls none
//! ```
//!
//! It makes a database, writes one command as a worker does, and runs the dispatcher as a library
//! until nothing is left to do now. `--keep FILE` leaves the database behind, for `fencepost show`.
//! The policy is `hold`: if nobody can know whether the mail went out, it ends in doubt.
#![expect(clippy::print_stdout, reason = "an example talks to the person who runs it")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use fencepost::dispatcher::{self, Destination, Destinations};
use fencepost::email::{Email, Login, Settings, Timeouts, Tls};
use fencepost::rules::{Backoff, FencingToken, Jitter, Limits, OnUnknown};
use fencepost::sqlite::{self, Fenced, Held, NewCommand, OpenOptions, SqliteStore, inspect};
use rusqlite::{Connection, TransactionBehavior};

/// Send one mail through an outbox
#[derive(Debug, Parser)]
struct Args {
    /// Host and port of the relay, as smtp.example.com:587
    relay: String,
    /// The sender
    from: String,
    /// The recipient
    to: String,
    /// The text
    #[arg(long, default_value = "Your order was paid.")]
    text: String,
    /// How the connection is protected; by default implicit on port 465 and starttls elsewhere
    #[arg(long, value_enum)]
    tls: Option<Protection>,
    /// The user's name for a login; the password is taken from SMTP_PASSWORD
    #[arg(long)]
    user: Option<String>,
    /// The name that EHLO says
    #[arg(long, default_value = "[127.0.0.1]")]
    helo: String,
    /// A PEM file with the only roots to trust
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Keep the database here; the file must not exist yet
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Protection {
    Implicit,
    Starttls,
    None,
}

const LIMITS: Limits = Limits {
    on_unknown: OnUnknown::Hold,
    on_dead: fencepost::rules::OnDead::Continue,
    max_attempts: 40,
    max_age_ms: 72 * 3_600_000,
    resend_window_ms: 24 * 3_600_000,
    backoff: Backoff { base_ms: 300_000, cap_ms: 4 * 3_600_000, jitter: Jitter::UpToHalfMore },
};

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let folder = tempfile::tempdir()?;
    let path = args.keep.clone().unwrap_or_else(|| folder.path().join("outbox.db"));
    let mail = serde_json::json!({ "from": args.from, "to": args.to, "subject": "Order 17", "text": args.text });
    let relay = Email::new(settings(&args)?)?;
    let id = write_command(&path, &mail.to_string())?;
    let destination = Destination { effect: Arc::new(relay), limits: LIMITS, max_in_flight: 1 };
    send(&path, Destinations::new().with("email", "relay", destination))?;
    show(&path, &id)
}

fn settings(args: &Args) -> Result<Settings, Box<dyn Error>> {
    let (host, port) = args.relay.rsplit_once(':').ok_or("write the relay as HOST:PORT")?;
    let port: u16 = port.parse()?;
    let tls = match args.tls {
        Some(Protection::Implicit) => Tls::Implicit,
        Some(Protection::Starttls) => Tls::Starttls,
        Some(Protection::None) => Tls::None,
        None if port == 465 => Tls::Implicit,
        None => Tls::Starttls,
    };
    let password = || std::env::var("SMTP_PASSWORD").map_err(|_| "SMTP_PASSWORD is not set");
    let login = |username: &String| Ok::<_, &str>(Login { username: username.clone(), password: password()?.into() });
    Ok(Settings {
        host: host.trim_matches(['[', ']']).to_owned(),
        port,
        tls,
        login: args.user.as_ref().map(login).transpose()?,
        helo_name: args.helo.clone(),
        ca_file: args.ca.clone(),
        // Plain text to another machine stays refused.
        allow_plaintext: false,
        timeouts: Timeouts {
            connect: Duration::from_secs(30),
            greeting: Duration::from_secs(5 * 60),
            command: Duration::from_secs(5 * 60),
            body: Duration::from_secs(3 * 60),
            final_dot: Duration::from_secs(10 * 60),
        },
    })
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
    let id = work.enqueue(&NewCommand::email("relay", payload))?.id().to_owned();
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
