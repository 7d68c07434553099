//! The email sender: one SMTP dialogue, step by step, one honest outcome out.
//!
//! [`Email`] serves one relay. A command's payload is a JSON object of the fields `from`, `to`, `cc`,
//! `bcc`, `reply_to`, `subject`, `text`, `html`, `headers`, `attachments` (each with `name`, `type`,
//! `base64`) and `message_id`. An address is a string, `ann@example.net` or `Ann <ann@example.net>`,
//! and several are a list of strings; `from` and one recipient are required. A mail with neither text
//! nor HTML has an empty text, an attachment without a type is `application/octet-stream`, and `null`
//! means "not given". The mail is rendered from the stored command alone, so every attempt sends the
//! same bytes. It never logs in or sends over a connection that is
//! weaker than its [`Tls`] setting, never sends to a part of the recipients, and never repeats by
//! itself.

mod compose;
mod smtp;
mod wire;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lettre::transport::smtp::extension::ClientId;
use rustls_pki_types::ServerName;
use secrecy::SecretString;
use tokio_rustls::TlsConnector;

use crate::effect::{BoxFuture, Command, Effect, Evidence, Report, Request, Unsendable};
pub use crate::tls::TlsError;

/// How the connection is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// TLS from the first byte (port 465).
    Implicit,
    /// STARTTLS, required (port 587).
    Starttls,
    /// STARTTLS if it is offered.
    Opportunistic,
    /// Plain text.
    None,
}

/// How one relay is used.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Host name or address of the relay.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// How the connection is protected.
    pub tls: Tls,
    /// Login, if the relay wants one.
    pub login: Option<Login>,
    /// The name that EHLO says.
    pub helo_name: String,
    /// A PEM file with the only roots to trust; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether [`Tls::None`] and [`Tls::Opportunistic`] are meant, where the relay isn't on this
    /// machine: mails, and what they hold, may then cross the network in clear text.
    pub allow_plaintext: bool,
    /// A deadline for every phase.
    pub timeouts: Timeouts,
}

/// A login.
#[derive(Debug, Clone)]
pub struct Login {
    /// The user's name.
    pub username: String,
    /// The password.
    pub password: SecretString,
}

/// How long each phase may take (RFC 5321 §4.5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Resolve, TCP connect and TLS.
    pub connect: Duration,
    /// The greeting.
    pub greeting: Duration,
    /// EHLO, STARTTLS, AUTH, MAIL, RCPT, DATA, each.
    pub command: Duration,
    /// Each block of the body.
    pub body: Duration,
    /// The answer to the final dot. Cutting it short makes doubts (RFC 1047).
    pub final_dot: Duration,
}

/// Why a relay can't be used as it is configured.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The host is neither a name nor an address.
    #[error("the host is neither a name nor an address")]
    Host,
    /// The name for EHLO is neither a domain nor an address.
    #[error("the EHLO name is neither a domain nor an address")]
    HeloName,
    /// A user's name or a password is empty.
    #[error("the login has an empty user name or password")]
    Login,
    /// Plain text to another machine needs `allow_plaintext`.
    #[error("tls allows plain text to a relay on another machine, and allow_plaintext is not set")]
    Plaintext,
    /// A deadline is zero.
    #[error("a timeout is zero")]
    Timeout,
    /// TLS can't be set up.
    #[error("TLS can't be set up")]
    Tls(#[from] TlsError),
}

/// The sender for one relay.
pub struct Email {
    settings: Settings,
    client_id: ClientId,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl std::fmt::Debug for Email {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Email").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Email {
    /// Checks the settings and reads the roots. Nothing is connected yet.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        let name = ServerName::try_from(settings.host.clone()).map_err(|_| SettingsError::Host)?;
        let client_id = client_id(&settings.helo_name).ok_or(SettingsError::HeloName)?;
        check_login(settings.login.as_ref())?;
        check_timeouts(&settings.timeouts)?;
        let (may_be_plain, may_be_tls) = match settings.tls {
            Tls::Implicit | Tls::Starttls => (false, true),
            Tls::Opportunistic => (true, true),
            Tls::None => (true, false),
        };
        if may_be_plain && !settings.allow_plaintext && !is_this_machine(&settings.host) {
            return Err(SettingsError::Plaintext);
        }
        let connector = || crate::tls::client_config(settings.ca_file.as_deref()).map(Arc::new).map(TlsConnector::from);
        let tls = if may_be_tls { Some((connector()?, name)) } else { None };
        Ok(Self { settings, client_id, tls })
    }
}

impl Effect for Email {
    fn look(&self, command: &Command) -> Result<(), Unsendable> {
        compose::Mail::parse(command).map(|_| ())
    }

    fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report> {
        Box::pin(async move {
            let rendered =
                compose::Mail::parse(request.command).and_then(|mail| mail.render().map(|bytes| (mail, bytes)));
            match rendered {
                Ok((mail, bytes)) => smtp::deliver(self, &mail, &bytes, request).await,
                Err(Unsendable(reason)) => Report::refused(Evidence::new("compose").with("reason", &reason)),
            }
        })
    }
}

/// A domain, or an address as it stands in a configuration or, in brackets, on the wire (RFC 5321 §4.1.3).
fn client_id(name: &str) -> Option<ClientId> {
    let literal = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    match literal.strip_prefix("IPv6:").unwrap_or(literal).parse() {
        Ok(IpAddr::V4(address)) => return Some(ClientId::Ipv4(address)),
        Ok(IpAddr::V6(address)) => return Some(ClientId::Ipv6(address)),
        Err(_) => {}
    }
    let is_domain = !name.is_empty()
        && name.len() <= 255
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-' || b == b'_');
    is_domain.then(|| ClientId::Domain(name.to_owned()))
}

fn check_login(login: Option<&Login>) -> Result<(), SettingsError> {
    use secrecy::ExposeSecret as _;
    let is_empty = |login: &Login| login.username.is_empty() || login.password.expose_secret().is_empty();
    if login.is_some_and(is_empty) { Err(SettingsError::Login) } else { Ok(()) }
}

fn check_timeouts(timeouts: &Timeouts) -> Result<(), SettingsError> {
    let Timeouts { connect, greeting, command, body, final_dot } = *timeouts;
    if [connect, greeting, command, body, final_dot].contains(&Duration::ZERO) {
        Err(SettingsError::Timeout)
    } else {
        Ok(())
    }
}

fn is_this_machine(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}
