//! The email sender: one SMTP dialogue, step by step, one honest outcome out.

use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

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
    /// Whether a login may cross a connection without TLS.
    pub allow_plaintext: bool,
    /// Login, if the relay wants one.
    pub login: Option<Login>,
    /// The name that EHLO says.
    pub helo_name: String,
    /// A PEM file with the only roots to trust; `None`: the system's.
    pub ca_file: Option<PathBuf>,
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
