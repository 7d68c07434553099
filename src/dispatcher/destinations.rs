//! Which effect serves which destination, and with which limits.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::effect::Effect;
use crate::rules::{Backoff, Jitter, Limits, OnUnknown};

/// One destination: its effect, its limits, and how many attempts may run to it at the same time.
#[derive(Debug, Clone)]
pub struct Destination {
    /// What sends.
    pub effect: Arc<dyn Effect>,
    /// What limits the attempts.
    pub limits: Limits,
    /// Places: attempts at the same time, each of another lane.
    pub max_in_flight: usize,
}

/// What is known of a kind and a destination.
#[derive(Debug, Clone, Copy)]
pub enum Found<'a> {
    /// It can be served.
    Known(&'a Destination),
    /// The kind is registered, the destination isn't: its commands wait, loud, until it is.
    UnknownDestination,
    /// No such kind: its commands end as invalid.
    UnknownKind,
}

#[derive(Debug, Default)]
struct Kind {
    named: BTreeMap<String, Destination>,
    urls: Option<Destination>,
}

/// Every destination that this process serves.
#[derive(Debug, Default)]
pub struct Destinations {
    kinds: BTreeMap<String, Kind>,
}

/// The limits for a command whose destination isn't known any more when a start finds it open.
const UNKNOWN: Limits = Limits {
    on_unknown: OnUnknown::Hold,
    on_dead: crate::rules::OnDead::Continue,
    max_attempts: 40,
    max_age_ms: 72 * 3_600_000,
    resend_window_ms: 24 * 3_600_000,
    backoff: Backoff { base_ms: 5_000, cap_ms: 3_600_000, jitter: Jitter::Full },
};

impl Destinations {
    /// Nothing yet; even the kinds `webhook` and `email` are to be registered.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a kind, so that its commands wait for their destination instead of ending as invalid.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        self.kinds.entry(kind.to_owned()).or_default();
        self
    }

    /// Adds a named destination.
    #[must_use]
    pub fn with(mut self, kind: &str, name: &str, destination: Destination) -> Self {
        self.kinds.entry(kind.to_owned()).or_default().named.insert(name.to_owned(), destination);
        self
    }

    /// Serves every destination of this kind that is an `http:` or `https:` URL.
    #[must_use]
    pub fn with_urls(mut self, kind: &str, destination: Destination) -> Self {
        self.kinds.entry(kind.to_owned()).or_default().urls = Some(destination);
        self
    }

    /// Finds what serves a command.
    pub fn find(&self, kind: &str, destination: &str) -> Found<'_> {
        let Some(kind) = self.kinds.get(kind) else { return Found::UnknownKind };
        let is_scheme =
            |scheme: &str| destination.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
        let is_url = || is_scheme("https:") || is_scheme("http:");
        match (kind.named.get(destination), &kind.urls) {
            (Some(named), _) => Found::Known(named),
            (None, Some(urls)) if is_url() => Found::Known(urls),
            (None, _) => Found::UnknownDestination,
        }
    }

    /// Today's limits of a destination, or cautious ones if it is unknown.
    pub fn limits(&self, kind: &str, destination: &str) -> Limits {
        match self.find(kind, destination) {
            Found::Known(destination) => destination.limits,
            Found::UnknownDestination | Found::UnknownKind => UNKNOWN,
        }
    }
}
