//! The values that stand in a configuration file, checked as they are read.
//!
//! Checking while reading keeps the place in the file for the message. A value that can hold a
//! secret (a password, a URL) is never repeated in a message, a `Debug` text or a rendering.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use jiff::SignedDuration;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::{Serialize, Serializer};
use url::Url;

use crate::email::Tls;
use crate::rules::{OnDead, OnUnknown};

/// A value that is written as text: `$parse` reads it, `$show` writes it back without secrets.
macro_rules! text_value {
    ($name:ident, $expected:literal, $parse:expr, $show:expr) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        let parse: fn(&str) -> Result<$name, String> = $parse;
                        parse(text).map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let show: fn(&$name) -> String = $show;
                serializer.serialize_str(&show(self))
            }
        }
    };
}

/// A positive duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) struct Wait(SignedDuration);

/// Ten years. More is a slip of the keyboard, and arithmetic on milliseconds stays far from its end.
const WAIT_MAX: SignedDuration = SignedDuration::from_hours(87_600);

text_value!(Wait, "a duration with its unit, as in \"250ms\", \"5s\" or \"20h\"", parse_wait, |wait| format!(
    "{:#}",
    wait.0
));

fn parse_wait(text: &str) -> Result<Wait, String> {
    const FORM: &str = "write a number with its unit, as in \"250ms\", \"5s\", \"20m\" or \"72h\"";
    let duration: SignedDuration = text.parse().map_err(|_| format!("{text:?} is not a duration; {FORM}"))?;
    if duration < SignedDuration::from_millis(1) {
        return Err(format!("{text:?} is not positive; the shortest duration is \"1ms\""));
    }
    if duration > WAIT_MAX {
        return Err(format!("{text:?} is too long; the longest duration is \"87600h\""));
    }
    Ok(Wait(duration))
}

impl Wait {
    pub(super) fn as_ms(self) -> i64 {
        i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX)
    }

    pub(super) fn as_duration(self) -> Duration {
        self.0.unsigned_abs()
    }
}

/// How old something gets before it goes; `None` keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Age(pub(super) Option<Wait>);

text_value!(
    Age,
    "\"off\", or a duration as in \"720h\"",
    |text| if text == "off" { Ok(Age(None)) } else { parse_wait(text).map(|wait| Age(Some(wait))) },
    |age| age.0.map_or_else(|| "off".to_owned(), |wait| format!("{:#}", wait.0))
);

/// Where a secret is found. The secret itself never is in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SecretRef {
    Env(String),
    File(PathBuf),
    /// A credential that systemd passed on.
    Credential(String),
}

const CLEAR_TEXT: &str = "a secret never stands in clear text in this file; \
     write { env = \"NAME\" }, { file = \"PATH\" } or { credential = \"NAME\" }";

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct SecretKeys {
    env: Option<String>,
    file: Option<PathBuf>,
    credential: Option<String>,
}

struct SecretVisitor;

impl<'de> Visitor<'de> for SecretVisitor {
    type Value = SecretRef;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{ env = \"NAME\" }, { file = \"PATH\" } or { credential = \"NAME\" }")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SecretRef, A::Error> {
        let keys = SecretKeys::deserialize(MapAccessDeserializer::new(map))?;
        match (keys.env, keys.file, keys.credential) {
            (Some(name), None, None) => check_variable(name).map_err(de::Error::custom),
            (None, Some(path), None) => Ok(SecretRef::File(path)),
            (None, None, Some(name)) => check_credential(name).map_err(de::Error::custom),
            _ => Err(de::Error::custom("a secret comes from one of env, file and credential")),
        }
    }

    // Every scalar, or the message of serde would repeat it.
    fn visit_str<E: de::Error>(self, _: &str) -> Result<SecretRef, E> {
        Err(E::custom(CLEAR_TEXT))
    }
    fn visit_i64<E: de::Error>(self, _: i64) -> Result<SecretRef, E> {
        Err(E::custom(CLEAR_TEXT))
    }
    fn visit_u64<E: de::Error>(self, _: u64) -> Result<SecretRef, E> {
        Err(E::custom(CLEAR_TEXT))
    }
    fn visit_i128<E: de::Error>(self, _: i128) -> Result<SecretRef, E> {
        Err(E::custom(CLEAR_TEXT))
    }
    fn visit_f64<E: de::Error>(self, _: f64) -> Result<SecretRef, E> {
        Err(E::custom(CLEAR_TEXT))
    }
}

/// A name that can't be a variable is most likely the secret itself, so it is not repeated.
fn check_variable(name: String) -> Result<SecretRef, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.starts_with("whsec_") || !name.chars().all(fits) {
        return Err("env takes the name of an environment variable, never the secret itself".to_owned());
    }
    Ok(SecretRef::Env(name))
}

fn check_credential(name: String) -> Result<SecretRef, String> {
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return Err("credential takes the name of a file in $CREDENTIALS_DIRECTORY".to_owned());
    }
    Ok(SecretRef::Credential(name))
}

impl<'de> Deserialize<'de> for SecretRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SecretVisitor)
    }
}

impl Serialize for SecretRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("[redacted, from {self}]"))
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Credential(name) => write!(f, "credential {name}"),
        }
    }
}

/// The secrets that sign; empty means unsigned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Secrets(pub(super) Vec<SecretRef>);

struct SecretsVisitor;

impl<'de> Visitor<'de> for SecretsVisitor {
    type Value = Secrets;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list, as in [{ env = \"NAME\" }]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Secrets, A::Error> {
        let mut secrets = Vec::new();
        while let Some(secret) = list.next_element()? {
            secrets.push(secret);
        }
        Ok(Secrets(secrets))
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Secrets, E> {
        Err(E::custom(CLEAR_TEXT))
    }
}

impl<'de> Deserialize<'de> for Secrets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SecretsVisitor)
    }
}

/// Where a webhook goes. It can hold secrets in each part but scheme, host and port.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Endpoint(pub(super) Url);

text_value!(Endpoint, "a URL, as in \"https://billing.example.com/hooks\"", parse_endpoint, |url| crate::redact::url(
    &url.0
));

/// Messages never repeat the URL.
fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    let url = Url::parse(text).map_err(|error| format!("this is not a URL: {error}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("a webhook's URL begins with https:// or http://".to_owned());
    }
    Ok(Endpoint(url))
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::redact::url(&self.0))
    }
}

/// A network that the address guard lets pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Network(pub(super) IpNet);

text_value!(Network, "a network, as in \"10.0.0.0/8\"", parse_network, |network| network.0.to_string());

fn parse_network(text: &str) -> Result<Network, String> {
    let network = text.parse::<IpNet>().ok();
    let address = || text.parse::<std::net::IpAddr>().ok().map(IpNet::from);
    let message = || format!("{text:?} is not a network; write an address and a length, as in \"10.0.0.0/8\"");
    network.or_else(address).map(Network).ok_or_else(message)
}

/// A status code of the unknown row of the outcome table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(try_from = "i64")]
pub(super) struct UnknownStatus(pub(super) u16);

impl TryFrom<i64> for UnknownStatus {
    type Error = String;

    fn try_from(code: i64) -> Result<Self, String> {
        let message = || format!("{code} has a fixed meaning or none; only 408, 409 and 500 to 999 can be listed");
        let code = u16::try_from(code).map_err(|_| message())?;
        if matches!(code, 408 | 409 | 500..=999) { Ok(Self(code)) } else { Err(message()) }
    }
}

/// What an unknown outcome leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unknown(pub(super) OnUnknown);

text_value!(Unknown, "\"hold\" or \"resend\"", parse_on_unknown, |policy| policy.0.as_str().to_owned());

fn parse_on_unknown(text: &str) -> Result<Unknown, String> {
    match (OnUnknown::parse(text), text) {
        (Some(policy), _) => Ok(Unknown(policy)),
        (None, "probe") => {
            Err("\"probe\" comes with a later version; until then write \"hold\" or \"resend\"".to_owned())
        }
        (None, _) => Err(format!("{text:?} is not one of \"hold\" and \"resend\"")),
    }
}

/// What a dead command means for its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OnDeadWord(pub(super) OnDead);

text_value!(OnDeadWord, "\"continue\" or \"block\"", parse_on_dead, |word| word.0.as_str().to_owned());

fn parse_on_dead(text: &str) -> Result<OnDeadWord, String> {
    OnDead::parse(text).map(OnDeadWord).ok_or_else(|| format!("{text:?} is not one of \"continue\" and \"block\""))
}

/// How a relay's connection is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TlsWord(pub(super) Tls);

const TLS_WORDS: [(&str, Tls); 4] = [
    ("implicit", Tls::Implicit),
    ("starttls", Tls::Starttls),
    ("opportunistic", Tls::Opportunistic),
    ("none", Tls::None),
];

text_value!(TlsWord, "\"implicit\", \"starttls\", \"opportunistic\" or \"none\"", parse_tls, |tls| {
    TLS_WORDS.iter().find(|(_, each)| *each == tls.0).map_or("none", |(word, _)| word).to_owned()
});

fn parse_tls(text: &str) -> Result<TlsWord, String> {
    let found = TLS_WORDS.iter().find(|(word, _)| *word == text);
    found
        .map(|(_, tls)| TlsWord(*tls))
        .ok_or_else(|| format!("{text:?} is not one of \"implicit\", \"starttls\", \"opportunistic\" and \"none\""))
}

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LevelWord(pub(super) tracing::Level);

text_value!(LevelWord, "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"", parse_level, |level| {
    level.0.as_str().to_ascii_lowercase()
});

pub(super) fn parse_level(text: &str) -> Result<LevelWord, String> {
    use tracing::Level;
    let words = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
    let found = words.into_iter().find(|level| level.as_str().to_ascii_lowercase() == text);
    let message = || format!("{text:?} is not one of \"error\", \"warn\", \"info\", \"debug\" and \"trace\"");
    found.map(LevelWord).ok_or_else(message)
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

text_value!(LogFormat, "\"text\" or \"json\"", parse_format, |format| match format {
    LogFormat::Text => "text".to_owned(),
    LogFormat::Json => "json".to_owned(),
});

pub(super) fn parse_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(format!("{text:?} is not one of \"text\" and \"json\"")),
    }
}

/// A path that is relative to the configuration file becomes one that is not.
pub(super) fn anchor(path: &mut PathBuf, directory: &Path) {
    // `join` keeps an absolute path as it is.
    *path = directory.join(&path);
}
