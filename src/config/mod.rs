//! The configuration: layers in, one checked value out.
//!
//! The lowest layer is `examples/fencepost.toml`, which documents every setting and is compiled in;
//! the user's file lies over it, and three environment variables over that. Everything is read here,
//! once, secrets too: nothing reads the environment later. A secret must never get into a message, a
//! `Debug` text or a rendering, which is why types here print where it came from instead.

mod layers;
mod place;
mod resolve;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::rules::Limits;
use crate::{email, webhook};
use layers::FileLayer;

pub use values::LogFormat;

/// The example file: every setting, its unit, its default and why.
pub const EXAMPLE: &str = include_str!("../../examples/fencepost.toml");

/// Everything that the daemon and the command line are told from outside.
///
/// Its `Debug` text is [`Config::to_toml`], without secrets.
#[derive(Clone)]
pub struct Config {
    /// The application's database file.
    pub database: Option<PathBuf>,
    /// The loop.
    pub dispatcher: DispatcherSettings,
    /// What goes after a while.
    pub retention: RetentionSettings,
    /// The log.
    pub log: LogSettings,
    /// Webhook destinations by name.
    pub webhooks: BTreeMap<String, Destination<webhook::Settings>>,
    /// How a URL as destination is called; `None`: such a command waits.
    pub webhook_urls: Option<Destination<webhook::Settings>>,
    /// Relays by name.
    pub emails: BTreeMap<String, Destination<email::Settings>>,
    /// What is allowed but unwise, one sentence each.
    pub warnings: Vec<String>,
    effective: FileLayer,
}

/// Settings of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatcherSettings {
    /// Attempts at the same time, over all destinations; at least 1.
    pub max_in_flight: usize,
    /// How often to look without being woken.
    pub poll_interval: Duration,
    /// How long a graceful stop waits.
    pub drain_timeout: Duration,
    /// How long a write waits for another writer.
    pub busy_timeout: Duration,
}

/// How old something gets before the daemon takes it away; `None` keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionSettings {
    /// Delivered commands.
    pub delivered: Option<Duration>,
    /// Dead commands.
    pub dead: Option<Duration>,
    /// Payload and headers of finished commands.
    pub erase: Option<Duration>,
    /// Events of the feed.
    pub events: Option<Duration>,
    /// How often the daemon looks for what is too old.
    pub every: Duration,
}

/// Settings of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSettings {
    /// The least important level that is written.
    pub level: tracing::Level,
    /// How lines look.
    pub format: LogFormat,
}

/// One destination: how it is called, what limits its attempts, how many run at the same time.
#[derive(Clone)]
pub struct Destination<S> {
    /// What the sender needs.
    pub settings: S,
    /// What the rules need.
    pub limits: Limits,
    /// Attempts at the same time; at least 1.
    pub max_in_flight: usize,
}

/// Settings can hold a URL with a secret in it, so they are not printed.
impl<S> fmt::Debug for Destination<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destination")
            .field("limits", &self.limits)
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_toml())
    }
}

/// What is wrong with the configuration. No variant holds a secret, or a line of the file that could
/// have one in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file can't be read.
    #[error("can't read the configuration {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file isn't TOML, or a value in it doesn't fit.
    // The parser's own error is not kept as the source: it prints the whole line, secrets too.
    #[error("{at}: {message}\n{snippet}")]
    Text {
        /// Where.
        at: At,
        /// What is wrong and what to do.
        message: String,
        /// The line with a caret, values hidden.
        snippet: String,
    },
    /// A setting is missing, or doesn't fit another one.
    #[error("{}{setting}: {problem}", At::prefix(at))]
    Setting {
        /// Where it is, or its table, if it stands in a file.
        at: Option<At>,
        /// The setting's full name, or the environment variable's.
        setting: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A secret can't be read from its file.
    #[error("{}{setting}: can't read the secret from {}", At::prefix(at), path.display())]
    SecretFile {
        /// Where the setting is.
        at: Option<At>,
        /// The setting's full name.
        setting: String,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A place in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct At {
    /// The file.
    pub path: PathBuf,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
}

impl At {
    fn new(path: &Path, place: place::Place) -> Self {
        Self { path: path.to_owned(), line: place.line, column: place.column }
    }

    fn prefix(at: &Option<Self>) -> String {
        at.as_ref().map_or(String::new(), |at| format!("{at}: "))
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.path.display(), self.line, self.column)
    }
}

impl Config {
    /// Reads the file, lays it over the defaults, and reads every secret that it names. Without a
    /// path there are the defaults, and no destination.
    ///
    /// `env` looks a variable up; it is used here only. Fails on the first thing that is wrong.
    pub fn load(path: Option<&Path>, env: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let example = parse(Path::new("examples/fencepost.toml"), EXAMPLE)?;
        let text = path.map(read).transpose()?;
        let file = path.zip(text.as_deref());
        let layer = file.map(|(path, text)| parse_anchored(path, text)).transpose()?.unwrap_or_default();
        let mut effective = layer.over_example(example);
        lay_environment_over(&mut effective, env)?;
        resolve::resolve(effective, &resolve::Source { file, env })
    }

    /// The effective configuration as TOML: each setting, defaults too. Instead of a secret it shows
    /// where that comes from; URLs lack whatever can hold one.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(&self.effective).unwrap_or_else(|error| format!("# can't be shown: {error}\n"))
    }

    /// The same as [`Config::to_toml`], as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(&self.effective).unwrap_or(serde_json::Value::Null)
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::File { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(failed)?;
    // Only where it breaks is kept, not the bytes.
    let broken = |error: std::string::FromUtf8Error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
    String::from_utf8(bytes).map_err(broken).map_err(failed)
}

fn parse_anchored(path: &Path, text: &str) -> Result<FileLayer, ConfigError> {
    let mut layer = parse(path, text)?;
    layer.anchor(path.parent().unwrap_or(Path::new("")));
    Ok(layer)
}

fn parse(path: &Path, text: &str) -> Result<FileLayer, ConfigError> {
    toml::from_str(text).map_err(|error| text_error(path, text, error))
}

fn text_error(path: &Path, text: &str, error: toml::de::Error) -> ConfigError {
    let span = error.span().unwrap_or(0..0);
    let place = place::of(text, span.start);
    let length = text.get(span).unwrap_or_default().chars().count();
    ConfigError::Text {
        at: At::new(path, place),
        message: named_message(error),
        snippet: place::snippet(text, place, length),
    }
}

/// The message with the setting's full name in front, where the parser knows it.
fn named_message(mut error: toml::de::Error) -> String {
    let message = error.message().trim_end().replace('\n', " ");
    // Without its input the error prints the message and then the keys that lead to it, but no line.
    error.set_input(None);
    let text = error.to_string();
    let keys = text.trim_end().rsplit_once("\nin `").and_then(|(_, keys)| keys.strip_suffix('`'));
    keys.map_or(message.clone(), |keys| format!("{keys}: {message}"))
}

fn lay_environment_over(layer: &mut FileLayer, env: &dyn Fn(&str) -> Option<String>) -> Result<(), ConfigError> {
    let given = |name: &str| env(name).filter(|value| !value.is_empty());
    let wrong = |name: &str, problem: String| ConfigError::Setting { at: None, setting: name.to_owned(), problem };
    if let Some(path) = given("FENCEPOST_DB") {
        layer.database.path = Some(path.into());
    }
    if let Some(level) = given("FENCEPOST_LOG_LEVEL") {
        let level = values::parse_level(&level).map_err(|problem| wrong("FENCEPOST_LOG_LEVEL", problem))?;
        layer.log.level = Some(level);
    }
    if let Some(format) = given("FENCEPOST_LOG_FORMAT") {
        let format = values::parse_format(&format).map_err(|problem| wrong("FENCEPOST_LOG_FORMAT", problem))?;
        layer.log.format = Some(format);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::layers::{
        BackoffLayer, DatabaseLayer, DispatcherLayer, EmailLayer, LogLayer, RetentionLayer, TimeoutsLayer, WebhookLayer,
    };
    use super::*;

    /// Every setting that can be read stands in the example, with a comment in front of its block.
    #[test]
    fn the_example_shows_every_setting() {
        let keys = [
            DatabaseLayer::KEYS,
            DispatcherLayer::KEYS,
            RetentionLayer::KEYS,
            LogLayer::KEYS,
            WebhookLayer::KEYS,
            BackoffLayer::KEYS,
            EmailLayer::KEYS,
            TimeoutsLayer::KEYS,
        ];
        for key in keys.into_iter().flatten() {
            let shown = |line: &str| {
                let line = line.trim_start_matches("# ");
                line.starts_with(&format!("{key} = "))
                    || line.contains(&format!("{{ {key} = "))
                    || line.contains(&format!(", {key} = "))
                    || line.ends_with(&format!(".{key}]"))
            };
            assert!(EXAMPLE.lines().any(shown), "{key} is not in the example");
        }
    }

    /// The documented defaults are the defaults: a destination with only what has no default gets
    /// each value that the example shows.
    #[test]
    fn the_example_is_the_lowest_layer() {
        let example = parse(Path::new("example"), EXAMPLE).unwrap_or_else(|error| panic!("{error}"));
        let text = "[webhook.a]\nurl = \"https://example.com\"\nsecrets = []\n[email.a]\nhost = \"example.com\"";
        let file = parse(Path::new("file"), text).unwrap_or_else(|error| panic!("{error}"));
        let merged = file.over_example(example.clone());
        assert_eq!(merged.dispatcher, example.dispatcher);
        assert_eq!(merged.retention, example.retention);
        assert_eq!(merged.log, example.log);
        let webhook = WebhookLayer { url: None, secrets: None, ..merged.webhook["a"].clone() };
        assert_eq!(webhook, WebhookLayer { url: None, secrets: None, ..example.webhook["example"].clone() });
        let login_less =
            |layer: &EmailLayer| EmailLayer { host: None, username: None, password: None, ..layer.clone() };
        assert_eq!(login_less(&merged.email["a"]), login_less(&example.email["example"]));
        assert_eq!(merged.webhook.len() + merged.email.len(), 2, "examples are no destinations");
    }
}
