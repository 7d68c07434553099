//! From layers to the checked configuration: what fits alone was checked while reading, so here is
//! what is missing, what has to fit another setting, and the secrets.
//!
//! Messages name a setting and where its secret should be found, never what was found there.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU32;
use std::path::Path;

use secrecy::SecretString;
use toml::de::{DeTable, DeValue};

use super::layers::{
    BackoffLayer, DispatcherLayer, EmailLayer, FileLayer, LogLayer, RetentionLayer, TimeoutsLayer, WebhookLayer,
};
use super::values::{Age, SecretRef, TlsWord, Wait};
use super::{At, Config, ConfigError, Destination, DispatcherSettings, LogSettings, RetentionSettings, place};
use crate::rules::{Backoff, Jitter, Limits, OnUnknown, check_name};
use crate::{email, webhook};

const SECRET_FILE_BYTES_MAX: usize = 64 * 1024;

/// What layers are resolved against: the user's file, for the place of an error, and the environment.
pub(super) struct Source<'a> {
    pub(super) file: Option<(&'a Path, &'a str)>,
    pub(super) env: &'a dyn Fn(&str) -> Option<String>,
}

impl Source<'_> {
    /// Where the setting is, or else the innermost table on the way to it.
    fn at(&self, keys: &[&str]) -> Option<At> {
        let (path, text) = self.file?;
        let document = DeTable::parse(text).ok()?;
        let (mut table, mut offset) = (document.get_ref(), None);
        for key in keys {
            let Some((found, value)) = table.iter().find(|(each, _)| each.get_ref() == key) else { break };
            offset = Some(found.span().start);
            let DeValue::Table(inner) = value.get_ref() else { break };
            table = inner;
        }
        offset.map(|offset| At::new(path, place::of(text, offset)))
    }
}

pub(super) fn resolve(effective: FileLayer, source: &Source<'_>) -> Result<Config, ConfigError> {
    let mut webhooks = BTreeMap::new();
    for (name, layer) in &effective.webhook {
        let table = Table::named("webhook", name, source)?;
        table.need(layer.url.as_ref(), "url", "write where the POST goes")?;
        webhooks.insert(name.clone(), table.webhook(layer)?);
    }
    let mut emails = BTreeMap::new();
    for (name, layer) in &effective.email {
        emails.insert(name.clone(), Table::named("email", name, source)?.email(layer)?);
    }
    let webhook_urls = effective.webhook_urls.as_ref().map(|layer| webhook_urls(layer, source)).transpose()?;
    let config = Config {
        database: effective.database.path.clone(),
        dispatcher: Table::new("dispatcher", source).dispatcher(&effective.dispatcher)?,
        retention: Table::new("retention", source).retention(&effective.retention)?,
        log: Table::new("log", source).log(&effective.log)?,
        webhooks,
        webhook_urls,
        emails,
        warnings: Vec::new(),
        effective,
    };
    Ok(Config { warnings: warnings(&config), ..config })
}

fn webhook_urls(layer: &WebhookLayer, source: &Source<'_>) -> Result<Destination<webhook::Settings>, ConfigError> {
    let table = Table::new("webhook_urls", source);
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
    keys: Vec<&'a str>,
    source: &'a Source<'a>,
}

impl<'a> Table<'a> {
    fn new(name: &'a str, source: &'a Source<'a>) -> Self {
        Self { keys: vec![name], source }
    }

    fn named(kind: &'a str, name: &'a str, source: &'a Source<'a>) -> Result<Self, ConfigError> {
        let keys = vec![kind, name];
        check_name(name).map_err(|invalid| ConfigError::Setting {
            at: source.at(&keys),
            setting: format!("{kind}.{name:?}"),
            problem: format!("the name of a destination is {invalid}"),
        })?;
        Ok(Self { keys, source })
    }

    fn setting(&self, key: &str) -> String {
        format!("{}.{key}", self.keys.join("."))
    }

    fn at(&self, key: &str) -> Option<At> {
        let keys: Vec<&str> = self.keys.iter().copied().chain(key.split('.')).collect();
        self.source.at(&keys)
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError::Setting { at: self.at(key), setting: self.setting(key), problem: problem.into() }
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

    fn retention(&self, layer: &RetentionLayer) -> Result<RetentionSettings, ConfigError> {
        let age = |age: Option<Age>, key| Ok(self.get(age, key)?.0.map(Wait::as_duration));
        Ok(RetentionSettings {
            delivered: age(layer.delivered, "delivered")?,
            dead: age(layer.dead, "dead")?,
            erase: age(layer.erase, "erase")?,
            events: age(layer.events, "events")?,
            every: self.get(layer.every, "every")?.as_duration(),
        })
    }

    fn log(&self, layer: &LogLayer) -> Result<LogSettings, ConfigError> {
        Ok(LogSettings { level: self.get(layer.level, "level")?.0, format: self.get(layer.format, "format")? })
    }

    fn webhook(&self, layer: &WebhookLayer) -> Result<Destination<webhook::Settings>, ConfigError> {
        let limits = Limits {
            on_unknown: self.get(layer.on_unknown, "on_unknown")?.0,
            on_dead: self.get(layer.on_dead, "on_dead")?.0,
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
        let limits = Limits {
            on_unknown: self.get(layer.on_unknown, "on_unknown")?.0,
            on_dead: self.get(layer.on_dead, "on_dead")?.0,
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
            SecretRef::Env(name) => (self.source.env)(name)
                .ok_or_else(|| self.error(key, format!("environment variable {name} is not set, or isn't UTF-8")))?,
            SecretRef::File(path) => self.secret_file(key, path)?,
            SecretRef::Credential(name) => {
                let directory = (self.source.env)("CREDENTIALS_DIRECTORY").ok_or_else(|| {
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
        let failed = |source| ConfigError::SecretFile {
            at: self.at(key),
            setting: self.setting(key),
            path: path.to_owned(),
            source,
        };
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

fn count(number: NonZeroU32) -> usize {
    usize::try_from(number.get()).unwrap_or(usize::MAX)
}
