//! The webhook sender: one POST in, one honest outcome out.
//!
//! One attempt is one request on a connection of its own, to an address that the guard admits. The
//! sender never repeats by itself, follows no redirect, uses no proxy, and takes no answer for more
//! than its status says: whatever it can't be sure of is unknown. Secrets (keys, headers, most of a
//! URL) are in no evidence, error or debug output.

mod answer;
mod guard;
mod headers;
mod sign;
mod target;

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use reqwest::{Certificate, Client, Method, Response};
use secrecy::SecretString;
use url::Url;

use crate::clock;
use crate::effect::{BoxFuture, Command, Effect, Evidence, Payload, Report, Request, Unsendable};
use crate::rules::Outcome;

use answer::{body_prefix, location_host, outcome, report, retry_after_ms};
pub use guard::{AddressNotAllowed, Guard};
use sign::Keys;
use target::Shown;
pub use target::UrlError;

/// How one endpoint is called.
#[derive(Clone)]
pub struct Settings {
    /// Where the POST goes. `None`: the command's destination is the URL (`[webhook_urls]`).
    pub url: Option<Url>,
    /// Standard Webhooks secrets (`whsec_` and 24 to 64 bytes in base64, with padding); every one
    /// signs. Empty: unsigned.
    pub secrets: Vec<SecretString>,
    /// Resolve, connect and TLS. At most half of the shorter one of the two below is used, so that
    /// a connection that never comes about isn't taken for a request without an answer.
    pub connect_timeout: Duration,
    /// The longest silence while the answer is awaited, counted from the start of the attempt.
    pub read_timeout: Duration,
    /// The whole attempt.
    pub timeout: Duration,
    /// Networks that the address guard would close otherwise.
    pub allow_networks: Vec<IpNet>,
    /// Status codes of the unknown row with which this endpoint says that nothing happened.
    pub effect_free_status: Vec<u16>,
    /// A PEM file with the only roots to trust; `None`: the system's.
    pub ca_file: Option<PathBuf>,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("url", &self.url.as_ref().map(Shown))
            .field("secrets", &self.secrets.len())
            .field("connect_timeout", &self.connect_timeout)
            .field("read_timeout", &self.read_timeout)
            .field("timeout", &self.timeout)
            .field("allow_networks", &self.allow_networks)
            .field("effect_free_status", &self.effect_free_status)
            .field("ca_file", &self.ca_file)
            .finish()
    }
}

/// Why [`Webhook::new`] refused its settings. No text holds a secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The URL can't be called.
    #[error("url: {0}")]
    Url(#[from] UrlError),
    /// A secret isn't `whsec_` and base64 of 24 to 64 bytes.
    #[error("secrets: number {} is not whsec_ and 24 to 64 bytes in base64 with padding", .index + 1)]
    Secret {
        /// Its place in the list, from 0.
        index: usize,
    },
    /// The outcome of this status is certain already.
    #[error("effect_free_status: the outcome of {0} is certain already")]
    EffectFreeStatus(u16),
    /// A time limit is zero.
    #[error("{0}: a time limit can't be zero")]
    Timeout(&'static str),
    /// The file with the roots can't be read.
    #[error("ca_file: can't read {path}")]
    CaFile {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file with the roots holds no certificate that can be used.
    #[error("ca_file: no usable certificate in {path}")]
    Roots {
        /// The file.
        path: PathBuf,
    },
    /// The HTTP client can't be built, for instance because the system has no root certificates.
    #[error("the HTTP client can't be built")]
    Client(#[source] reqwest::Error),
}

/// The sender for one endpoint, or for commands whose destination is a URL.
pub struct Webhook {
    url: Option<Url>,
    keys: Keys,
    guard: Guard,
    effect_free_status: Vec<u16>,
    /// The whole attempt in boot time. The client's own deadlines stand still in a suspend; they are a
    /// little shorter, since they know more about where the attempt was.
    limit: Duration,
    client: Client,
}

/// How much later than the client's own deadline the one in boot time is.
const LIMIT_SLACK: Duration = Duration::from_secs(1);

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook").field("url", &self.url.as_ref().map(Shown)).finish_non_exhaustive()
    }
}

impl Webhook {
    /// Checks the settings and reads the roots. No connection is made.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        check(&settings)?;
        let keys = Keys::parse(&settings.secrets).map_err(|index| SettingsError::Secret { index })?;
        let guard = Guard::new(settings.allow_networks.clone());
        let client = client(&settings, guard.clone())?;
        let Settings { url, effect_free_status, timeout, .. } = settings;
        let limit = timeout.saturating_add(LIMIT_SLACK);
        Ok(Self { url, keys, guard, effect_free_status, limit, client })
    }

    fn target(&self, command: &Command) -> Result<Url, Unsendable> {
        match &self.url {
            Some(url) => Ok(url.clone()),
            None => target::parse(&command.destination).map_err(|error| Unsendable(format!("destination: {error}"))),
        }
    }

    /// The request without its body.
    fn compose(&self, request: &Request<'_>) -> Result<Composed, Unsendable> {
        let url = self.target(request.command)?;
        let own = headers::of_command(request.command)?;
        let values = own.values().filter_map(|value| std::str::from_utf8(value.as_bytes()).ok());
        let confidential = target::confidential(&url, values);
        let headers = headers::of_request(request, own, &self.keys)?;
        let mut composed = reqwest::Request::new(Method::POST, url.clone());
        *composed.headers_mut() = headers;
        Ok(Composed { url, confidential, request: composed })
    }

    async fn attempt(&self, request: Request<'_>) -> Report {
        let composed = self.compose(&request);
        let Composed { url, confidential, request: mut post } = match composed {
            Ok(composed) => composed,
            Err(Unsendable(reason)) => return Report::refused(Evidence::new("look").with("reason", &reason)),
        };
        if let Err(denied) = self.guard.check_host(&url) {
            return self.denied(&url, &denied);
        }
        *post.body_mut() = Some(request.command.payload.as_bytes().to_vec().into());
        if request.arm.arm().await.is_err() {
            return Report::not_armed();
        }
        match clock::within(self.limit, self.client.execute(post)).await {
            Ok(Ok(response)) => self.answered(&url, &confidential, request.now_ms, response).await,
            Ok(Err(error)) => self.failed(&url, &error.without_url()),
            Err(clock::Elapsed) => Report::unknown(target::evidence(&url, "request").with("reason", "timeout")),
        }
    }

    /// A complete head has come.
    async fn answered(&self, url: &Url, confidential: &[String], now_ms: i64, mut response: Response) -> Report {
        let status = response.status().as_u16();
        let retry_after_ms = retry_after_ms(response.headers(), now_ms);
        let mut evidence = target::evidence(url, "answer").with_number("status", status.into());
        if response.status().is_redirection()
            && let Some(host) = location_host(response.headers(), url)
        {
            evidence = evidence.with("location_host", &host);
        }
        let body = body_prefix(&mut response, confidential).await;
        if !body.is_empty() {
            evidence = evidence.with("body", &body);
        }
        report(status, self.effect_free_status.contains(&status), retry_after_ms, evidence)
    }

    /// No complete head has come.
    fn failed(&self, url: &Url, error: &reqwest::Error) -> Report {
        if let Some(denied) = causes(error).find_map(|cause| cause.downcast_ref::<AddressNotAllowed>()) {
            return self.denied(url, denied);
        }
        // Only of these two is it certain that the request was not begun.
        let (phase, report): (_, fn(Evidence) -> Report) = if error.is_connect() {
            ("connect", Report::channel)
        } else if error.is_builder() {
            ("look", Report::refused)
        } else {
            ("request", Report::unknown)
        };
        // The innermost cause says what happened; what wraps it only says where.
        let reason = causes(error).last().map(ToString::to_string).unwrap_or_default();
        report(target::evidence(url, phase).with("reason", &reason))
    }

    /// A URL that a command gave will never be allowed; a named endpoint is for the operator to mend.
    fn denied(&self, url: &Url, denied: &AddressNotAllowed) -> Report {
        let evidence = target::evidence(url, "guard")
            .with("reason", "address not allowed")
            .with("address", &denied.address.to_string());
        if self.url.is_some() { Report::misconfigured(evidence) } else { Report::refused(evidence) }
    }
}

struct Composed {
    url: Url,
    confidential: Vec<String>,
    request: reqwest::Request,
}

impl Effect for Webhook {
    fn look(&self, command: &Command) -> Result<(), Unsendable> {
        self.target(command)?;
        headers::of_command(command)?;
        match &command.payload {
            Payload::Text(bytes) if std::str::from_utf8(bytes).is_err() => {
                Err(Unsendable("payload: not UTF-8".to_owned()))
            }
            Payload::Text(_) | Payload::Bytes(_) => Ok(()),
        }
    }

    fn send<'a>(&'a self, request: Request<'a>) -> BoxFuture<'a, Report> {
        Box::pin(self.attempt(request))
    }
}

fn check(settings: &Settings) -> Result<(), SettingsError> {
    if let Some(url) = &settings.url {
        target::check(url)?;
    }
    for (name, limit) in [
        ("connect_timeout", settings.connect_timeout),
        ("read_timeout", settings.read_timeout),
        ("timeout", settings.timeout),
    ] {
        if limit.is_zero() {
            return Err(SettingsError::Timeout(name));
        }
    }
    match settings.effect_free_status.iter().find(|&&status| outcome(status) != Outcome::Unknown) {
        Some(&status) => Err(SettingsError::EffectFreeStatus(status)),
        None => Ok(()),
    }
}

/// A client that sends each request once, to where it was addressed.
fn client(settings: &Settings, guard: Guard) -> Result<Client, SettingsError> {
    crate::tls::install_provider();
    let shorter = settings.read_timeout.min(settings.timeout);
    let builder = Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .http1_only()
        // A reused connection can die between our check and our write, and then nobody could tell
        // whether the request arrived. A fresh one fails before anything was sent.
        .pool_max_idle_per_host(0)
        // A proxy would be asked to connect to addresses that the guard never sees.
        .no_proxy()
        .dns_resolver(guard)
        .connect_timeout(settings.connect_timeout.min(shorter / 2))
        .read_timeout(settings.read_timeout)
        .timeout(settings.timeout)
        // Bytes that wait in the kernel for a broken network to heal must not arrive long after the
        // attempt was given up.
        .tcp_user_timeout(settings.timeout);
    let builder = match &settings.ca_file {
        Some(path) => builder.tls_certs_only(roots(path)?),
        None => builder,
    };
    builder.build().map_err(SettingsError::Client)
}

fn roots(path: &Path) -> Result<Vec<Certificate>, SettingsError> {
    let pem = std::fs::read(path).map_err(|source| SettingsError::CaFile { path: path.to_owned(), source })?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(roots) if !roots.is_empty() => Ok(roots),
        Ok(_) | Err(_) => Err(SettingsError::Roots { path: path.to_owned() }),
    }
}

/// The error and everything that caused it, from the outside in.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Fault;

    /// `localhost` is closed before a connection already, so the client is called past that check:
    /// what is left is the resolver, and its refusal must be found inside the client's error.
    #[test]
    fn h35_a_refusal_inside_the_resolver_is_recognised() {
        let url: Url = "http://localhost:9/".parse().expect("a URL");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        for (named, outcome, fault) in
            [(true, Outcome::Deferred, Fault::Configuration), (false, Outcome::Refused, Fault::Command)]
        {
            let limit = Duration::from_secs(10);
            let settings = Settings {
                url: named.then(|| url.clone()),
                secrets: Vec::new(),
                connect_timeout: limit,
                read_timeout: limit,
                timeout: limit,
                allow_networks: Vec::new(),
                effect_free_status: Vec::new(),
                ca_file: None,
            };
            let webhook = Webhook::new(settings).expect("legal settings");
            let request = reqwest::Request::new(Method::POST, url.clone());
            let error =
                runtime.block_on(async { webhook.client.execute(request).await }).expect_err("the loopback is closed");
            let report = webhook.failed(&url, &error);
            assert_eq!((report.outcome, report.fault), (outcome, fault), "{report:?}");
            assert_eq!(report.evidence.text("reason"), Some("address not allowed"));
        }
    }
}
