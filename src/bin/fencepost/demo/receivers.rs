//! The receivers: a `fencepost sink` process, what arrived there, and when it answers.
//!
//! The demo speaks to it over plain HTTP, as anybody could. What arrived is taken from the receiver
//! alone, never from what the dispatcher believes to have sent.

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::process::Process;

/// One webhook or mail that arrived.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Arrival {
    pub(super) id: String,
    /// Of webhooks; a mail carries its id alone.
    pub(super) token: Option<String>,
    pub(super) attempt: Option<String>,
    /// The webhook's body or the whole mail.
    #[serde(alias = "body", alias = "message", alias = "body_base64", alias = "message_base64")]
    pub(super) bytes: String,
}

#[derive(Debug, Deserialize)]
struct Arrivals {
    arrivals: Vec<Arrival>,
}

#[derive(Debug, Deserialize)]
struct Addresses {
    http: String,
    smtp: String,
}

/// A running sink.
#[derive(Debug)]
pub(super) struct Receivers {
    addresses: Addresses,
    _process: Process,
}

impl Receivers {
    /// Starts the sink on free ports; it listens when this returns.
    pub(super) async fn start(folder: &Path) -> anyhow::Result<Self> {
        let arrivals = folder.join("arrivals.jsonl");
        let mut arguments = ["sink", "--http", "127.0.0.1:0", "--smtp", "127.0.0.1:0", "--json", "--log"]
            .map(|argument| argument.as_ref())
            .to_vec();
        arguments.push(arrivals.as_os_str());
        let mut process = Process::start("the sink", folder.join("sink.log"), &arguments)?;
        let addresses = serde_json::from_str(&process.line().await?).context("the sink's addresses")?;
        Ok(Self { addresses, _process: process })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/hooks", self.addresses.http)
    }

    /// The mail server's port.
    pub(super) fn port(&self) -> anyhow::Result<u16> {
        let address: std::net::SocketAddr = self.addresses.smtp.parse()?;
        Ok(address.port())
    }

    /// Whether receivers take what comes but give no answer.
    pub(super) async fn hold(&self, hold: bool) -> anyhow::Result<()> {
        let behaviour = json!({ "http": { "hold": hold }, "mail": { "hold": hold } });
        self.request("PUT", "/_sink/behaviour", &behaviour.to_string()).await.map(drop)
    }

    /// Everything that arrived, in order.
    pub(super) async fn arrivals(&self) -> anyhow::Result<Vec<Arrival>> {
        let body = self.request("GET", "/_sink/arrivals", "").await?;
        let arrivals: Arrivals = serde_json::from_value(body).context("what the sink says arrived")?;
        Ok(arrivals.arrivals)
    }

    /// One request on a connection of its own. HTTP/1.0, so that the answer ends with the connection.
    async fn request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<Value> {
        let mut stream = TcpStream::connect(&self.addresses.http).await.context("the sink is not there")?;
        let request = format!("{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the sink's answer has no end")?;
        ensure!(head.starts_with("HTTP/1.0 200 "), "the sink says {}", head.lines().next().unwrap_or_default());
        serde_json::from_str(body).context("the sink's answer")
    }
}
