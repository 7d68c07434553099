//! `fencepost sink`: a local catcher for webhooks and mail, for demos, examples and users' tests.
//!
//! It accepts everything, keeps it in memory, shows it, and misbehaves on request: late, with an
//! error, or with the connection cut before or after the answer. It must never send anything
//! anywhere, and it listens on loopback only unless told otherwise, because whoever reaches it can
//! read what arrived. It shares no code with the senders, so that a fault in them shows here.

mod behaviour;
mod http;
mod listing;
mod smtp;
mod store;

use std::fs::{File, OpenOptions};
use std::future::Future;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::error::ErrorKind;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use behaviour::{Behaviour, Cut, Http, Mail};
use store::Store;

/// Greatest size of a webhook's body and of a mail.
const BODY_BYTES_MAX: usize = 10 * 1024 * 1024;

/// Connections of one protocol at the same time; further ones wait.
const CONNECTIONS_MAX: usize = 512;

/// Options of `fencepost sink`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where webhooks are caught; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8025")]
    http: SocketAddr,
    /// Where mail is caught; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:2525")]
    smtp: SocketAddr,
    /// Append each arrival to this file, as a line of JSON, before it is answered
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Wait this long before each answer, as in "500ms"
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    delay: Option<Duration>,
    /// Answer webhooks with this status code
    #[arg(long, value_name = "STATUS", value_parser = clap::value_parser!(u16).range(200..=999))]
    fail: Option<u16>,
    /// Answer the end of each mail with this reply, as in "451 4.3.0 try later"
    #[arg(long, value_name = "REPLY", value_parser = behaviour::parse_reply)]
    fail_mail: Option<String>,
    /// Close the connection instead of answering, or right after the answer
    #[arg(long, value_enum)]
    cut: Option<Cut>,
    /// Print the addresses as JSON
    #[arg(long)]
    json: bool,
    /// Allow addresses that other machines can reach
    #[arg(long)]
    public: bool,
}

impl Args {
    fn behaviour(&self) -> Behaviour {
        let delay_ms = self.delay.map_or(0, |delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX));
        let http = Http { delay_ms, status: self.fail.unwrap_or(200), cut: self.cut, hold: false };
        let mail = Mail { delay_ms, reply: self.fail_mail.clone(), cut: self.cut, hold: false };
        Behaviour { http, mail }
    }

    fn check_loopback(&self) -> anyhow::Result<()> {
        for address in [self.http, self.smtp] {
            if address.ip().is_loopback() {
                continue;
            }
            if !self.public {
                let text = format!(
                    "{address} can be reached by other machines, and the sink shows what it caught to everyone; \
                     use a loopback address, or add --public\n"
                );
                return Err(clap::Error::raw(ErrorKind::ValueValidation, text).into());
            }
            eprintln!("fencepost: warning: {address} can be reached by other machines, and there is no login");
        }
        Ok(())
    }
}

fn parse_delay(text: &str) -> Result<Duration, String> {
    let delay: jiff::SignedDuration =
        text.parse().map_err(|_| "write a number with its unit, as in 500ms".to_owned())?;
    Duration::try_from(delay).map_err(|_| "a delay can't be negative".to_owned())
}

/// Runs the sink until it is interrupted.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    args.check_loopback()?;
    // The handlers come first: a signal right after the addresses were printed must find them.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let log = args.log.as_deref().map(open_log).transpose()?;
    let store = Arc::new(Store::new(log, args.behaviour()));
    let http = listen(args.http).await?;
    let smtp = listen(args.smtp).await?;
    announce(http.local_addr()?, smtp.local_addr()?, args.json)?;
    let mail_store = Arc::clone(&store);
    tokio::select! {
        () = serve(http, move |stream| http::serve(stream, Arc::clone(&store))) => {}
        () = serve(smtp, move |stream| smtp::serve(stream, Arc::clone(&mail_store))) => {}
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.with_context(|| format!("can't open the log {}", path.display()))
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("can't listen on {address}"))
}

/// One line, flushed, because a program that started the sink waits for it.
fn announce(http: SocketAddr, smtp: SocketAddr, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::json!({ "http": http.to_string(), "smtp": smtp.to_string() }));
    } else {
        println!("catching webhooks on http://{http}/ and mail on {smtp}");
    }
    std::io::stdout().flush().context("can't print the addresses")
}

/// Accepts connections for ever.
async fn serve<F>(listener: TcpListener, handle: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let connection = handle(stream);
                tokio::spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                // Most likely out of descriptors: connections that end give some back.
                eprintln!("fencepost: can't accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
