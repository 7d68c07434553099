//! An effect of your own: opens a valve whose controller listens on a TCP port and can't be fenced.
//!
//! ```text
//! cargo run --example custom_effect
//! cargo run --example custom_effect -- --device busy
//! cargo run --example custom_effect -- 192.0.2.7:4001 --valve tank-3
//! ```
//!
//! The controller reads `OPEN <valve>` and answers `OK`, `BUSY` (try again later) or `ERR <reason>`. It
//! knows nothing of tokens and does a thing twice if it is told twice. Without an address a small device
//! runs in this process. What each way to end means:
//!
//! | where it ended | outcome | why |
//! | --- | --- | --- |
//! | the payload is no name of a valve | invalid, never sent | it could smuggle a second line |
//! | no connection within 5 s | deferred, the try is given back | nothing was said |
//! | the arm failed | not sent | recalled, or it could not be recorded |
//! | `OK` and a line end | delivered | the device says that it did it |
//! | `BUSY` and a line end | deferred | the device says that it did nothing, for now |
//! | `ERR …` and a line end | refused | the device says that it did nothing, and won't |
//! | anything else: half a line, another word, a close, no answer within 10 s | unknown | the valve may be open |
//!
//! An unknown outcome holds the lane until a person has looked at the valve (`OnUnknown::Hold`).
//! `fencepost::effect::conformance` checks an effect against such a table; `tests/it/conformance.rs` of
//! this crate runs it on this one.
#![expect(clippy::print_stdout, reason = "an example talks to the person who runs it")]

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use fencepost::clock::{Elapsed, within};
use fencepost::dispatcher::{self, Destination, Destinations};
use fencepost::effect::conformance::Device;
use fencepost::effect::{BoxFuture, Command, Effect, Evidence, Report, Request, Unsendable};
use fencepost::rules::{Backoff, FencingToken, Jitter, Limits, OnDead, OnUnknown};
use fencepost::sqlite::{self, Fenced, Held, NewCommand, OpenOptions, SqliteStore, inspect};
use rusqlite::{Connection, TransactionBehavior};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};

/// Open a valve through an outbox
#[derive(Debug, Parser)]
struct Args {
    /// The controller; without one a device in this process is used
    address: Option<SocketAddr>,
    /// The valve to open
    #[arg(long, default_value = "tank-1")]
    valve: String,
    /// How the device in this process behaves
    #[arg(long, value_enum, default_value = "ok", conflicts_with = "address")]
    device: Behaviour,
}

// ── The effect ──────────────────────────────────────────────────────────────────────────────────────

/// The controller of some valves.
#[derive(Debug)]
pub(crate) struct Valves {
    pub(crate) address: SocketAddr,
    /// How long to wait for a connection.
    pub(crate) connect: Duration,
    /// How long to wait for the answer.
    pub(crate) answer: Duration,
}

/// A longer line is no answer of this device.
const LINE_BYTES_MAX: u64 = 256;

impl Valves {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, connect: Duration::from_secs(5), answer: Duration::from_secs(10) }
    }

    /// The name is checked, since a line feed in it would make a second order.
    fn valve(command: &Command) -> Result<&str, Unsendable> {
        let legal = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
        match std::str::from_utf8(command.payload.as_bytes()) {
            Ok(name) if (1..=32).contains(&name.len()) && name.as_bytes().iter().all(legal) => Ok(name),
            Ok(_) | Err(_) => Err(Unsendable("payload: not the name of a valve".to_owned())),
        }
    }

    /// Nothing here can move a valve.
    async fn connect(&self) -> std::io::Result<tokio::net::TcpStream> {
        let stream = within(self.connect, tokio::net::TcpStream::connect(self.address)).await;
        let stream = stream.unwrap_or_else(|Elapsed| Err(std::io::ErrorKind::TimedOut.into()))?;
        stream.set_nodelay(true)?;
        // A connection that is dropped is reset, so that an order which still waits in the send buffer
        // can't arrive after the attempt was given up.
        stream.set_zero_linger()?;
        Ok(stream)
    }

    async fn attempt(&self, request: Request<'_>) -> Report {
        let valve = match Self::valve(request.command) {
            Ok(valve) => valve,
            Err(problem) => return Report::refused(Evidence::new("look").with("reason", &problem.to_string())),
        };
        let mut stream = match self.connect().await {
            Ok(stream) => stream,
            Err(error) => return Report::channel(Evidence::new("connect").with("reason", &error.to_string())),
        };
        // Right before the first byte that can open the valve. Until this returns nothing may leave.
        if request.arm.arm().await.is_err() {
            return Report::not_armed();
        }
        match within(self.answer, order(&mut stream, valve)).await {
            Ok(Ok(line)) => judge(&line),
            Ok(Err(error)) => Report::unknown(Evidence::new("order sent").with("reason", &error.to_string())),
            Err(Elapsed) => Report::unknown(Evidence::new("order sent").with("reason", "no answer in time")),
        }
    }
}

/// Sends the order and reads a line, or what there is of it at the end of the connection.
async fn order(stream: &mut tokio::net::TcpStream, valve: &str) -> std::io::Result<Vec<u8>> {
    stream.write_all(format!("OPEN {valve}\n").as_bytes()).await?;
    let mut line = Vec::new();
    tokio::io::BufReader::new(stream.take(LINE_BYTES_MAX)).read_until(b'\n', &mut line).await?;
    Ok(line)
}

/// Only a whole line says anything.
fn judge(line: &[u8]) -> Report {
    let text = String::from_utf8_lossy(line);
    let evidence = Evidence::new("answer").with("line", text.trim_end());
    match text.strip_suffix('\n') {
        Some("OK") => Report::delivered(evidence),
        Some("BUSY") => Report::deferred(evidence),
        Some(line) if line == "ERR" || line.starts_with("ERR ") => Report::refused(evidence),
        Some(_) | None => Report::unknown(evidence),
    }
}

impl Effect for Valves {
    fn look(&self, command: &Command) -> Result<(), Unsendable> {
        Self::valve(command).map(drop)
    }

    fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report> {
        Box::pin(self.attempt(request))
    }
}

// ── The device ──────────────────────────────────────────────────────────────────────────────────────

/// How the device of this process behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Behaviour {
    /// Opens the valve and says so
    Ok,
    /// Says that it is busy
    Busy,
    /// Says that there is no such valve
    Err,
    /// Closes each connection before it has read anything
    Deaf,
    /// Opens the valve and closes the connection without a word
    Mute,
    /// Opens the valve and keeps the connection open without a word
    Silent,
}

/// A small valve controller on a free port of this machine.
pub(crate) struct Controller {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Seen>,
}

/// What the controller has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    bytes: AtomicUsize,
    open: AtomicUsize,
}

impl Device for Seen {
    fn effect_bytes(&self) -> usize {
        self.bytes.load(Ordering::SeqCst)
    }

    fn open_connections(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Controller {
    pub(crate) fn start(behaviour: Behaviour) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, seen) = (listener.local_addr()?, Arc::new(Seen::default()));
        let counts = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                counts.open.fetch_add(1, Ordering::SeqCst);
                // A connection that breaks ends itself alone.
                let _ = serve(stream, behaviour, &counts);
                counts.open.fetch_sub(1, Ordering::SeqCst);
            }
        });
        Ok(Self { address, seen })
    }
}

fn serve(mut stream: TcpStream, behaviour: Behaviour, seen: &Seen) -> std::io::Result<()> {
    if behaviour == Behaviour::Deaf {
        return Ok(());
    }
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    seen.bytes.fetch_add(line.len(), Ordering::SeqCst);
    match behaviour {
        Behaviour::Ok => stream.write_all(b"OK\n"),
        Behaviour::Busy => stream.write_all(b"BUSY\n"),
        Behaviour::Err => stream.write_all(b"ERR no such valve\n"),
        Behaviour::Silent => stream.read_to_end(&mut Vec::new()).map(drop),
        Behaviour::Deaf | Behaviour::Mute => Ok(()),
    }
}

// ── The application ─────────────────────────────────────────────────────────────────────────────────

/// A valve that may be open is for a person to look at. A busy controller is asked again soon.
const LIMITS: Limits = Limits {
    on_unknown: OnUnknown::Hold,
    on_dead: OnDead::Continue,
    max_attempts: 10,
    max_age_ms: 3_600_000,
    resend_window_ms: 3_600_000,
    backoff: Backoff { base_ms: 1_000, cap_ms: 60_000, jitter: Jitter::Full },
};

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let controller = match args.address {
        Some(address) => Controller { address, seen: Arc::default() },
        None => Controller::start(args.device)?,
    };
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("outbox.db");
    let id = write_command(&path, &args.valve)?;
    let valves = Destination { effect: Arc::new(Valves::new(controller.address)), limits: LIMITS, max_in_flight: 1 };
    send(&path, Destinations::new().with("actuator", "valves", valves))?;
    show(&path, &id)?;
    if args.address.is_none() {
        println!("device   heard {} bytes", controller.seen.effect_bytes());
    }
    Ok(())
}

/// The worker's part: in a real application this is the transaction of its own business.
fn write_command(path: &Path, valve: &str) -> Result<String, Box<dyn Error>> {
    let mut connection = Connection::open(path)?;
    sqlite::prepare(&connection)?;
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    sqlite::migrate(&transaction)?;
    transaction.commit()?;
    // Whoever controls the tank holds its lease, and with it the token.
    let mut work = Fenced::begin(&mut connection, &Held::new("tank/1", FencingToken::new(1)?))?;
    let id = work.enqueue(&NewCommand::new("actuator", "valves", valve))?.id().to_owned();
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
