//! `fencepost config`: is the configuration right, and what does it amount to?
//!
//! It is read exactly as `run` reads it, secrets too, and shown without them.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use fencepost::config::Config;
use fencepost::redact;
use serde_json::json;

use crate::Globals;
use crate::database::given_configuration;
use crate::exit::Failure;
use crate::output::{Screen, Tone, warn};

/// Options of `fencepost config`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Read the configuration as `run` would, and say what is wrong with it
    Check {
        /// The file; by default that of --config
        path: Option<PathBuf>,
    },
    /// Show every setting that is in force, without secrets
    Show {
        /// The file; by default that of --config
        path: Option<PathBuf>,
    },
}

/// Checks or shows.
pub(crate) fn config(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Check { path } => check(path.as_deref().or(given_configuration(globals)), globals.screen()),
        Verb::Show { path } => show(path.as_deref().or(given_configuration(globals)), globals.screen()),
    }
}

fn load(path: Option<&Path>) -> anyhow::Result<Config> {
    let config = Config::load(path, &|name| std::env::var(name).ok())?;
    config.warnings.iter().for_each(|warning| warn(warning));
    Ok(config)
}

fn check(path: Option<&Path>, screen: Screen) -> anyhow::Result<()> {
    let path = path.ok_or_else(|| {
        Failure::usage("no configuration is given").hint("give a PATH, --config, or set FENCEPOST_CONFIG")
    })?;
    let config = load(Some(path))?;
    // What `run` would refuse later: a certificate that isn't there, a secret that can't sign.
    crate::run::destinations(&config)?;
    if screen.is_json() {
        screen.print_json(&json!({ "path": path.display().to_string(), "ok": true, "warnings": config.warnings }))?;
        return Ok(());
    }
    screen.print(&format!("{}: {}", path.display(), screen.paint(Tone::Good, "ok")))?;
    screen.print(&screen.block(&summary(&config)))?;
    Ok(())
}

fn summary(config: &Config) -> Vec<(&'static str, String)> {
    let database = config
        .database
        .as_ref()
        .map_or("not set; --db or FENCEPOST_DB names it".to_owned(), |path| path.display().to_string());
    let webhooks = config.webhooks.iter().map(|(name, destination)| {
        let url = destination.settings.url.as_ref().map(redact::url).unwrap_or_default();
        let signed = match destination.settings.secrets.len() {
            0 => "unsigned".to_owned(),
            1 => "signed".to_owned(),
            count => format!("signed with {count} secrets"),
        };
        format!("{name} → {url} ({signed}, on_unknown {})", destination.limits.on_unknown.as_str())
    });
    let emails = config.emails.iter().map(|(name, destination)| {
        let relay = &destination.settings;
        let login = if relay.login.is_some() { "with login" } else { "without login" };
        let unknown = destination.limits.on_unknown.as_str();
        format!("{name} → {}:{} ({login}, on_unknown {unknown})", relay.host, relay.port)
    });
    let list = |lines: Vec<String>| if lines.is_empty() { "none".to_owned() } else { lines.join("\n") };
    let urls = if config.webhook_urls.is_some() { "allowed" } else { "not allowed: such a command waits" };
    vec![
        ("database", database),
        ("webhooks", list(webhooks.collect())),
        ("URLs", urls.to_owned()),
        ("relays", list(emails.collect())),
    ]
}

fn show(path: Option<&Path>, screen: Screen) -> anyhow::Result<()> {
    let config = load(path)?;
    if screen.is_json() {
        screen.print_json(&config.to_json())?;
    } else {
        screen.print(config.to_toml().trim_end())?;
    }
    Ok(())
}
