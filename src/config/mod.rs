//! The configuration: layers in, one checked value out.
//!
//! The lowest layer is `examples/fencepost.toml`, which documents every setting and is compiled in;
//! the user's file lies over it, and three environment variables over that. Everything is read here,
//! once, secrets too: nothing reads the environment later. A secret must never get into a message, a
//! `Debug` text or a rendering, which is why types here print where it came from instead.

mod layers;
mod place;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use crate::rules::{Backoff, Jitter, Limits, OnUnknown, check_name};
use crate::{email, webhook};
use layers::{BackoffLayer, DispatcherLayer, EmailLayer, FileLayer, LogLayer, TimeoutsLayer, WebhookLayer};
use values::{SecretRef, TlsWord};

pub use values::{LogFormat, redacted_url};

/// The example file: every setting, its unit, its default and why.
pub const EXAMPLE: &str = include_str!("../../examples/fencepost.toml");

const SECRET_FILE_BYTES_MAX: usize = 64 * 1024;

/// Everything that the daemon and the command line are told from outside.
///
/// Its `Debug` text is [`Config::to_toml`], without secrets.
#[derive(Clone)]
pub struct Config {
    /// The application's database file.
    pub database: Option<PathBuf>,
    /// The loop.
    pub dispatcher: DispatcherSettings,
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
    #[error("{}:{line}:{column}: {message}\n{snippet}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// What is wrong and what to do.
        message: String,
        /// The line with a caret, values hidden.
        snippet: String,
    },
    /// A setting is missing, or doesn't fit another one.
    #[error("{setting}: {problem}")]
    Setting {
        /// The setting's full name, or the environment variable's.
        setting: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A secret can't be read from its file.
    #[error("{setting}: can't read the secret from {}", path.display())]
    SecretFile {
        /// The setting's full name.
        setting: String,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Config {
    /// Reads the file, lays it over the defaults, and reads every secret that it names. Without a
    /// path there are the defaults, and no destination.
    ///
    /// `env` looks a variable up; it is used here only. Fails on the first thing that is wrong.
    pub fn load(path: Option<&Path>, env: &dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let file = path.map(read).transpose()?.unwrap_or_default();
        let example = parse(Path::new("examples/fencepost.toml"), EXAMPLE)?;
        let mut effective = file.over_example(example);
        lay_environment_over(&mut effective, env)?;
        resolve(effective, env)
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

fn read(path: &Path) -> Result<FileLayer, ConfigError> {
    let bytes = std::fs::read(path).map_err(|source| ConfigError::File { path: path.to_owned(), source })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let source = io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
        ConfigError::File { path: path.to_owned(), source }
    })?;
    let mut layer = parse(path, &text)?;
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
        path: path.to_owned(),
        line: place.line,
        column: place.column,
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
    let wrong = |name: &str, problem: String| ConfigError::Setting { setting: name.to_owned(), problem };
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

fn resolve(effective: FileLayer, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    let mut webhooks = BTreeMap::new();
    for (name, layer) in &effective.webhook {
        let table = Table::named("webhook", name, env)?;
        table.need(layer.url.as_ref(), "url", "write where the POST goes")?;
        webhooks.insert(name.clone(), table.webhook(layer)?);
    }
    let mut emails = BTreeMap::new();
    for (name, layer) in &effective.email {
        emails.insert(name.clone(), Table::named("email", name, env)?.email(layer)?);
    }
    let webhook_urls = effective.webhook_urls.as_ref().map(|layer| webhook_urls(layer, env)).transpose()?;
    let config = Config {
        database: effective.database.path.clone(),
        dispatcher: Table::new("dispatcher", env).dispatcher(&effective.dispatcher)?,
        log: Table::new("log", env).log(&effective.log)?,
        webhooks,
        webhook_urls,
        emails,
        warnings: Vec::new(),
        effective,
    };
    Ok(Config { warnings: warnings(&config), ..config })
}

fn webhook_urls(
    layer: &WebhookLayer,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Destination<webhook::Settings>, ConfigError> {
    let table = Table::new("webhook_urls", env);
    if layer.url.is_some() {
        return Err(table.error("url", "every command brings its own URL; remove this line"));
    }
    table.webhook(layer)
}

fn warnings(config: &Config) -> Vec<String> {
    let webhooks = config.webhooks.iter().map(|(name, each)| (format!("webhook.{name}"), each.limits));
    let urls = config.webhook_urls.iter().map(|each| ("webhook_urls".to_owned(), each.limits));
    let emails = config.emails.iter().map(|(name, each)| (format!("email.{name}"), each.limits));
    let late = |limits: &Limits| limits.on_unknown == OnUnknown::Resend && limits.resend_window_ms <= limits.max_age_ms;
    let all = webhooks.chain(urls).chain(emails);
    let text = |name| {
        format!(
            "{name}: max_age is not below resend_window, so a command can end in doubt before its tries end; \
             lower max_age, or raise resend_window as far as the receiver remembers ids"
        )
    };
    all.filter(|(_, limits)| late(limits)).map(|(name, _)| text(name)).collect()
}

/// A table of the file, for the names in messages and for the secrets in it.
struct Table<'a> {
    name: String,
    env: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Table<'a> {
    fn new(name: &str, env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { name: name.to_owned(), env }
    }

    fn named(kind: &str, name: &str, env: &'a dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        check_name(name).map_err(|invalid| ConfigError::Setting {
            setting: format!("{kind}.{name:?}"),
            problem: format!("the name of a destination is {invalid}"),
        })?;
        Ok(Self { name: format!("{kind}.{name}"), env })
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError::Setting { setting: format!("{}.{key}", self.name), problem: problem.into() }
    }

    fn need<T>(&self, value: Option<T>, key: &str, what_to_do: &str) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.error(key, format!("not set; {what_to_do}")))
    }

    /// A setting that the example has a default for.
    fn get<T>(&self, value: Option<T>, key: &str) -> Result<T, ConfigError> {
        self.need(value, key, "examples/fencepost.toml has no default for it")
    }

    fn dispatcher(&self, layer: &DispatcherLayer) -> Result<DispatcherSettings, ConfigError> {
        Ok(DispatcherSettings {
            max_in_flight: count(self.get(layer.max_in_flight, "max_in_flight")?),
            poll_interval: self.get(layer.poll_interval, "poll_interval")?.as_duration(),
            drain_timeout: self.get(layer.drain_timeout, "drain_timeout")?.as_duration(),
            busy_timeout: self.get(layer.busy_timeout, "busy_timeout")?.as_duration(),
        })
    }

    fn log(&self, layer: &LogLayer) -> Result<LogSettings, ConfigError> {
        Ok(LogSettings { level: self.get(layer.level, "level")?.0, format: self.get(layer.format, "format")? })
    }

    fn webhook(&self, layer: &WebhookLayer) -> Result<Destination<webhook::Settings>, ConfigError> {
        self.get(layer.on_dead, "on_dead")?;
        let limits = Limits {
            on_unknown: self.get(layer.on_unknown, "on_unknown")?.0,
            max_attempts: self.get(layer.max_attempts, "max_attempts")?.get(),
            max_age_ms: self.get(layer.max_age, "max_age")?.as_ms(),
            resend_window_ms: self.get(layer.resend_window, "resend_window")?.as_ms(),
            backoff: self.backoff(&layer.backoff, Jitter::Full)?,
        };
        let settings = webhook::Settings {
            url: layer.url.as_ref().map(|endpoint| endpoint.0.clone()),
            secrets: self.secrets(layer)?,
            connect_timeout: self.get(layer.connect_timeout, "connect_timeout")?.as_duration(),
            read_timeout: self.get(layer.read_timeout, "read_timeout")?.as_duration(),
            timeout: self.get(layer.timeout, "timeout")?.as_duration(),
            allow_networks: layer.allow_networks.iter().flatten().map(|network| network.0).collect(),
            effect_free_status: layer.effect_free_status.iter().flatten().map(|status| status.0).collect(),
            ca_file: layer.ca_file.clone(),
        };
        let max_in_flight = count(self.get(layer.max_in_flight, "max_in_flight")?);
        Ok(Destination { settings, limits, max_in_flight })
    }

    fn secrets(&self, layer: &WebhookLayer) -> Result<Vec<SecretString>, ConfigError> {
        let what = "write [{ env = \"NAME\" }], [{ file = \"PATH\" }], or [] to send unsigned";
        let list = self.need(layer.secrets.as_ref(), "secrets", what)?;
        list.0.iter().map(|secret| self.secret("secrets", secret)).collect()
    }

    fn email(&self, layer: &EmailLayer) -> Result<Destination<email::Settings>, ConfigError> {
        self.get(layer.on_dead, "on_dead")?;
        let limits = Limits {
            on_unknown: self.get(layer.on_unknown, "on_unknown")?.0,
            max_attempts: self.get(layer.max_attempts, "max_attempts")?.get(),
            max_age_ms: self.get(layer.max_age, "max_age")?.as_ms(),
            resend_window_ms: self.get(layer.resend_window, "resend_window")?.as_ms(),
            backoff: self.backoff(&layer.backoff, Jitter::UpToHalfMore)?,
        };
        let host = self.need(layer.host.as_ref(), "host", "write the relay's name or address")?;
        let settings = email::Settings {
            host: self.word("host", host)?,
            port: self.get(layer.port, "port")?.get(),
            tls: self.get(layer.tls, "tls")?.0,
            allow_plaintext: self.get(layer.allow_plaintext, "allow_plaintext")?,
            login: self.login(layer)?,
            helo_name: self.word("helo_name", &self.get(layer.helo_name.clone(), "helo_name")?)?,
            ca_file: layer.ca_file.clone(),
            timeouts: self.timeouts(&layer.timeouts)?,
        };
        let max_in_flight = count(self.get(layer.max_in_flight, "max_in_flight")?);
        Ok(Destination { settings, limits, max_in_flight })
    }

    /// A word that becomes part of an SMTP line or is looked up as a name.
    fn word(&self, key: &str, text: &str) -> Result<String, ConfigError> {
        let fits = !text.is_empty() && text.len() <= 255 && text.bytes().all(|b| b.is_ascii_graphic());
        if fits {
            return Ok(text.to_owned());
        }
        Err(self.error(key, "has to be 1 to 255 ASCII characters without spaces; write an IDN in its xn-- form"))
    }

    fn login(&self, layer: &EmailLayer) -> Result<Option<email::Login>, ConfigError> {
        let (username, password) = match (&layer.username, &layer.password) {
            (None, None) => return Ok(None),
            (Some(_), None) => return Err(self.error("password", "not set, but username is; set both or neither")),
            (None, Some(_)) => return Err(self.error("username", "not set, but password is; set both or neither")),
            (Some(username), Some(password)) => (username, password),
        };
        if layer.tls == Some(TlsWord(email::Tls::None)) && layer.allow_plaintext != Some(true) {
            let problem = "\"none\" would send the password in clear text; \
                           write \"starttls\", or allow_plaintext = true for a relay on this host";
            return Err(self.error("tls", problem));
        }
        let password = self.secret("password", password)?;
        Ok(Some(email::Login { username: username.clone(), password }))
    }

    fn timeouts(&self, layer: &TimeoutsLayer) -> Result<email::Timeouts, ConfigError> {
        Ok(email::Timeouts {
            connect: self.get(layer.connect, "timeouts.connect")?.as_duration(),
            greeting: self.get(layer.greeting, "timeouts.greeting")?.as_duration(),
            command: self.get(layer.command, "timeouts.command")?.as_duration(),
            body: self.get(layer.body, "timeouts.body")?.as_duration(),
            final_dot: self.get(layer.final_dot, "timeouts.final_dot")?.as_duration(),
        })
    }

    fn backoff(&self, layer: &BackoffLayer, jitter: Jitter) -> Result<Backoff, ConfigError> {
        let base_ms = self.get(layer.base, "backoff.base")?.as_ms();
        let cap_ms = self.get(layer.cap, "backoff.cap")?.as_ms();
        if cap_ms < base_ms {
            return Err(self.error("backoff", "cap is shorter than base; raise cap or lower base"));
        }
        Ok(Backoff { base_ms, cap_ms, jitter })
    }

    fn secret(&self, key: &str, secret: &SecretRef) -> Result<SecretString, ConfigError> {
        let text = match secret {
            SecretRef::Env(name) => (self.env)(name)
                .ok_or_else(|| self.error(key, format!("environment variable {name} is not set, or isn't UTF-8")))?,
            SecretRef::File(path) => self.secret_file(key, path)?,
            SecretRef::Credential(name) => {
                let directory = (self.env)("CREDENTIALS_DIRECTORY").ok_or_else(|| {
                    self.error(key, format!("credential {name} needs $CREDENTIALS_DIRECTORY, which systemd sets"))
                })?;
                self.secret_file(key, &Path::new(&directory).join(name))?
            }
        };
        if text.is_empty() {
            return Err(self.error(key, format!("the secret from {secret} is empty")));
        }
        if text.chars().any(char::is_control) {
            return Err(self.error(key, format!("the secret from {secret} holds a control character or a second line")));
        }
        Ok(SecretString::from(text))
    }

    fn secret_file(&self, key: &str, path: &Path) -> Result<String, ConfigError> {
        let setting = || format!("{}.{key}", self.name);
        let failed = |source| ConfigError::SecretFile { setting: setting(), path: path.to_owned(), source };
        let bytes = std::fs::read(path).map_err(failed)?;
        if bytes.len() > SECRET_FILE_BYTES_MAX {
            return Err(self.error(key, format!("{} is too large for a secret", path.display())));
        }
        // The bytes are not part of the error.
        let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8");
        let text = String::from_utf8(bytes).map_err(not_text).map_err(failed)?;
        let line = text.strip_suffix('\n').unwrap_or(&text);
        Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
    }
}

fn count(number: std::num::NonZeroU32) -> usize {
    usize::try_from(number.get()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every setting that can be read stands in the example, with a comment in front of its block.
    #[test]
    fn the_example_shows_every_setting() {
        let keys = [
            layers::DatabaseLayer::KEYS,
            DispatcherLayer::KEYS,
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
        assert_eq!(merged.log, example.log);
        let webhook = WebhookLayer { url: None, secrets: None, ..merged.webhook["a"].clone() };
        assert_eq!(webhook, WebhookLayer { url: None, secrets: None, ..example.webhook["example"].clone() });
        let login_less =
            |layer: &EmailLayer| EmailLayer { host: None, username: None, password: None, ..layer.clone() };
        assert_eq!(login_less(&merged.email["a"]), login_less(&example.email["example"]));
        assert_eq!(merged.webhook.len() + merged.email.len(), 2, "examples are no destinations");
    }
}
