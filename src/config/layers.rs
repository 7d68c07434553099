//! The file as it is written: every setting optional, so that one layer can lie over another.
//!
//! The lowest layer is `examples/fencepost.toml` itself, so the documented defaults are the
//! defaults. A layer holds where secrets are found, never a secret; it can be printed.

use std::collections::BTreeMap;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::values::{
    Age, Endpoint, LevelWord, LogFormat, Network, OnDeadWord, SecretRef, Secrets, TlsWord, Unknown, UnknownStatus,
    Wait, anchor,
};

/// Something that can lie over a lower layer: what it doesn't say, the lower one does.
pub(super) trait Over {
    fn over(self, below: Self) -> Self;
}

impl<T> Over for Option<T> {
    fn over(self, below: Self) -> Self {
        self.or(below)
    }
}

macro_rules! layer {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, default)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }

        impl Over for $name {
            fn over(self, below: Self) -> Self {
                Self { $($field: self.$field.over(below.$field),)* }
            }
        }

        #[cfg(test)]
        impl $name {
            pub(super) const KEYS: &[&str] = &[$(stringify!($field),)*];
        }
    };
}

layer! {
    /// `[database]`
    DatabaseLayer {
        path: Option<PathBuf>,
    }
}

layer! {
    /// `[dispatcher]`
    DispatcherLayer {
        max_in_flight: Option<NonZeroU32>,
        poll_interval: Option<Wait>,
        drain_timeout: Option<Wait>,
        busy_timeout: Option<Wait>,
    }
}

layer! {
    /// `[retention]`
    RetentionLayer {
        delivered: Option<Age>,
        dead: Option<Age>,
        erase: Option<Age>,
        events: Option<Age>,
        every: Option<Wait>,
    }
}

layer! {
    /// `[log]`
    LogLayer {
        level: Option<LevelWord>,
        format: Option<LogFormat>,
    }
}

layer! {
    /// `backoff = { … }`
    BackoffLayer {
        base: Option<Wait>,
        cap: Option<Wait>,
    }
}

layer! {
    /// `[webhook.NAME]`, and `[webhook_urls]` without `url`.
    WebhookLayer {
        url: Option<Endpoint>,
        secrets: Option<Secrets>,
        on_unknown: Option<Unknown>,
        on_dead: Option<OnDeadWord>,
        max_attempts: Option<NonZeroU32>,
        max_age: Option<Wait>,
        resend_window: Option<Wait>,
        connect_timeout: Option<Wait>,
        read_timeout: Option<Wait>,
        timeout: Option<Wait>,
        allow_networks: Option<Vec<Network>>,
        effect_free_status: Option<Vec<UnknownStatus>>,
        max_in_flight: Option<NonZeroU32>,
        ca_file: Option<PathBuf>,
        backoff: BackoffLayer,
    }
}

layer! {
    /// `timeouts = { … }`
    TimeoutsLayer {
        connect: Option<Wait>,
        greeting: Option<Wait>,
        command: Option<Wait>,
        body: Option<Wait>,
        final_dot: Option<Wait>,
    }
}

layer! {
    /// `[email.NAME]`
    EmailLayer {
        host: Option<String>,
        port: Option<NonZeroU16>,
        tls: Option<TlsWord>,
        username: Option<String>,
        password: Option<SecretRef>,
        helo_name: Option<String>,
        allow_plaintext: Option<bool>,
        ca_file: Option<PathBuf>,
        on_unknown: Option<Unknown>,
        on_dead: Option<OnDeadWord>,
        max_attempts: Option<NonZeroU32>,
        max_age: Option<Wait>,
        resend_window: Option<Wait>,
        max_in_flight: Option<NonZeroU32>,
        backoff: BackoffLayer,
        timeouts: TimeoutsLayer,
    }
}

/// The whole file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct FileLayer {
    pub(super) database: DatabaseLayer,
    pub(super) dispatcher: DispatcherLayer,
    pub(super) retention: RetentionLayer,
    pub(super) log: LogLayer,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) webhook: BTreeMap<String, WebhookLayer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) webhook_urls: Option<WebhookLayer>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) email: BTreeMap<String, EmailLayer>,
}

/// The name under which the example file shows a destination.
const EXAMPLE: &str = "example";

impl FileLayer {
    /// Lays this file over the example, whose destinations lend their settings and vanish.
    pub(super) fn over_example(self, mut example: Self) -> Self {
        let webhook = webhook_defaults(example.webhook.remove(EXAMPLE).unwrap_or_default());
        let email = example.email.remove(EXAMPLE).unwrap_or_default();
        Self {
            database: self.database.over(example.database),
            dispatcher: self.dispatcher.over(example.dispatcher),
            retention: self.retention.over(example.retention),
            log: self.log.over(example.log),
            webhook: self.webhook.into_iter().map(|(name, layer)| (name, layer.over(webhook.clone()))).collect(),
            webhook_urls: self.webhook_urls.map(|layer| layer.over(webhook)),
            email: self.email.into_iter().map(|(name, layer)| (name, email_over(layer, &email))).collect(),
        }
    }

    /// Makes paths start at the directory of the file.
    pub(super) fn anchor(&mut self, directory: &Path) {
        let webhooks = self.webhook.values_mut().chain(&mut self.webhook_urls);
        let (mut paths, mut secrets): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        paths.extend(&mut self.database.path);
        for layer in webhooks {
            paths.extend(&mut layer.ca_file);
            secrets.extend(layer.secrets.iter_mut().flat_map(|list| &mut list.0));
        }
        for layer in self.email.values_mut() {
            paths.extend(&mut layer.ca_file);
            secrets.extend(&mut layer.password);
        }
        for secret in secrets {
            match secret {
                SecretRef::File(path) => paths.push(path),
                SecretRef::Env(_) | SecretRef::Credential(_) => {}
            }
        }
        paths.into_iter().for_each(|path| anchor(path, directory));
    }
}

fn webhook_defaults(example: WebhookLayer) -> WebhookLayer {
    WebhookLayer { url: None, secrets: None, ..example }
}

/// The port goes with the protection: a relay with TLS from the first byte listens elsewhere.
fn email_over(layer: EmailLayer, example: &EmailLayer) -> EmailLayer {
    use crate::email::Tls;
    let implicit = layer.tls == Some(TlsWord(Tls::Implicit));
    let port = if implicit { NonZeroU16::new(465) } else { example.port };
    layer.over(EmailLayer { host: None, username: None, password: None, port, ..example.clone() })
}
