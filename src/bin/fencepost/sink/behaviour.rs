//! How the sink misbehaves. Set by arguments, changed at run time by `PUT /_sink/behaviour`.
//!
//! An arrival is always recorded before any of this acts, so that "recorded, but never answered" can
//! be told from "never arrived".

use serde::{Deserialize, Serialize};

/// The behaviour of both protocols.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Behaviour {
    pub(super) http: Http,
    pub(super) mail: Mail,
}

/// What `PUT /_sink/behaviour` takes: a section that is given replaces the whole section.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Change {
    http: Option<Http>,
    mail: Option<Mail>,
}

/// How a webhook is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Http {
    /// Wait before the answer.
    pub(super) delay_ms: u64,
    /// Status code of the answer.
    pub(super) status: u16,
    /// Close the connection around the answer.
    pub(super) cut: Option<Cut>,
    /// Answer only when this is false again.
    pub(super) hold: bool,
}

impl Default for Http {
    fn default() -> Self {
        Self { delay_ms: 0, status: 200, cut: None, hold: false }
    }
}

/// How the end of a mail is answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mail {
    /// Wait before the reply.
    pub(super) delay_ms: u64,
    /// The reply; without one the mail is accepted.
    pub(super) reply: Option<String>,
    /// Close the connection around the reply.
    pub(super) cut: Option<Cut>,
    /// Reply only when this is false again.
    pub(super) hold: bool,
}

/// When the connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cut {
    /// Recorded, but never answered
    BeforeAnswer,
    /// Answered, and no further request on this connection
    AfterAnswer,
}

impl Behaviour {
    /// The behaviour after a change, if that can be obeyed.
    pub(super) fn changed(&self, json: &[u8]) -> Result<Self, String> {
        let change: Change = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let http = change.http.unwrap_or_else(|| self.http.clone());
        let mail = change.mail.unwrap_or_else(|| self.mail.clone());
        if !(200..=999).contains(&http.status) {
            return Err(format!("{} is not a final status code", http.status));
        }
        mail.reply.as_deref().map(parse_reply).transpose()?;
        Ok(Self { http, mail })
    }
}

/// Checks that a reply is one complete line of SMTP, without its end.
pub(super) fn parse_reply(text: &str) -> Result<String, String> {
    let code = text.get(..3).is_some_and(|code| code.bytes().all(|b| b.is_ascii_digit()));
    let class = text.starts_with(['2', '3', '4', '5']);
    let separated = text.len() == 3 || text.get(3..4) == Some(" ");
    if code && class && separated && text.len() <= 510 && !text.chars().any(char::is_control) {
        return Ok(text.to_owned());
    }
    Err("a reply is one line of a three-digit code, a space and a text, as in \"451 4.3.0 try later\"".to_owned())
}
