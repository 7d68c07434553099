//! What arrived, in order, bounded in number and bytes, and the behaviour that both servers obey.
//!
//! An arrival gets its number, its line in the log and its place in memory under one lock, so that
//! all three agree on the order. It must never be answered before that.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fencepost::clock::wall_ms;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::behaviour::Behaviour;

/// Arrivals kept in memory; older ones are dropped.
const ARRIVALS_MAX: usize = 10_000;

/// Bytes of bodies kept in memory; older arrivals are dropped.
const ARRIVALS_BYTES_MAX: usize = 256 * 1024 * 1024;

/// One webhook or mail.
#[derive(Debug)]
pub(super) struct Arrival {
    /// From 1, never reused while the sink runs.
    pub(super) no: u64,
    /// When it was complete.
    pub(super) time_ms: i64,
    pub(super) content: Content,
}

/// What arrived.
#[derive(Debug)]
pub(super) enum Content {
    Webhook { method: String, path: String, headers: Vec<(String, String)>, body: Bytes },
    Email { helo: String, from: String, to: Vec<String>, message: Vec<u8> },
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Self::Webhook { body, .. } => body.len(),
            Self::Email { message, .. } => message.len(),
        }
    }

    /// The first header of this name, unfolded.
    pub(super) fn header(&self, name: &str) -> Option<String> {
        match self {
            Self::Webhook { headers, .. } => {
                headers.iter().find(|(each, _)| each.eq_ignore_ascii_case(name)).map(|(_, value)| value.clone())
            }
            Self::Email { message, .. } => mail_header(message, name),
        }
    }

    /// The command's id, as the receiver sees it.
    pub(super) fn id(&self) -> Option<String> {
        match self {
            Self::Webhook { .. } => self.header("webhook-id").or_else(|| self.header("idempotency-key")),
            Self::Email { .. } => self.header("x-fencepost-id"),
        }
    }

    /// One of the facts that the dispatcher adds to a webhook, and to a mail if told so.
    pub(super) fn fact(&self, name: &str) -> Option<String> {
        match self {
            Self::Webhook { .. } => self.header(&format!("fencepost-{name}")),
            Self::Email { .. } => self.header(&format!("x-fencepost-{name}")),
        }
    }
}

impl Arrival {
    /// Numbers of the dispatcher stay text, because JSON readers lose digits above 2^53.
    pub(super) fn to_json(&self) -> Value {
        let content = &self.content;
        let mut value = json!({ "no": self.no, "time_ms": self.time_ms, "id": content.id() });
        for name in ["scope", "lane", "token", "seq", "attempt"] {
            value[name] = content.fact(name).into();
        }
        match content {
            Content::Webhook { method, path, headers, body } => {
                value["kind"] = "webhook".into();
                value["method"] = method.as_str().into();
                value["path"] = path.as_str().into();
                value["headers"] = json!(headers);
                put_bytes(&mut value, "body", body);
            }
            Content::Email { helo, from, to, message } => {
                value["kind"] = "email".into();
                value["helo"] = helo.as_str().into();
                value["from"] = from.as_str().into();
                value["to"] = json!(to);
                value["message_id"] = content.header("message-id").into();
                value["subject"] = content.header("subject").into();
                put_bytes(&mut value, "message", message);
            }
        }
        value
    }
}

/// As text where the bytes are text, in base64 under another name where they are not.
fn put_bytes(value: &mut Value, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => value[name] = text.into(),
        Err(_) => value[format!("{name}_base64")] = STANDARD.encode(bytes).into(),
    }
}

fn mail_header(message: &[u8], name: &str) -> Option<String> {
    let mut found: Option<String> = None;
    for line in message.split(|b| *b == b'\n') {
        let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line));
        if line.is_empty() {
            break;
        }
        let folded = line.starts_with([' ', '\t']);
        match (&mut found, folded) {
            (Some(value), true) => value.push_str(&line),
            (Some(_), false) => break,
            (None, true) => {}
            (None, false) => {
                let field = line.split_once(':').filter(|(each, _)| each.trim_end().eq_ignore_ascii_case(name));
                found = field.map(|(_, value)| value.to_owned());
            }
        }
    }
    found.map(|value| value.trim().to_owned())
}

/// What the sink has caught, and how it behaves.
#[derive(Debug)]
pub(super) struct Store {
    shelf: Mutex<Shelf>,
    behaviour: watch::Sender<Behaviour>,
}

#[derive(Debug, Default)]
struct Shelf {
    arrivals: VecDeque<Arc<Arrival>>,
    bytes: usize,
    last_no: u64,
    dropped: u64,
    log: Option<File>,
}

impl Store {
    pub(super) fn new(log: Option<File>, behaviour: Behaviour) -> Self {
        let shelf = Shelf { log, ..Shelf::default() };
        Self { shelf: Mutex::new(shelf), behaviour: watch::Sender::new(behaviour) }
    }

    /// Keeps an arrival and returns its number. It is in the log, if there is one, when this returns;
    /// if it can't be logged it is not kept either.
    pub(super) fn record(&self, content: Content) -> io::Result<u64> {
        let mut shelf = self.lock();
        shelf.last_no += 1;
        let arrival = Arrival { no: shelf.last_no, time_ms: wall_ms(), content };
        if let Some(log) = &mut shelf.log {
            // One write for the whole line, so that a reader never sees half of it.
            log.write_all(format!("{}\n", arrival.to_json()).as_bytes())?;
            log.flush()?;
        }
        let no = arrival.no;
        shelf.keep(arrival);
        Ok(no)
    }

    /// What is kept, oldest first, and how many were dropped before.
    pub(super) fn arrivals(&self) -> (Vec<Arc<Arrival>>, u64) {
        let shelf = self.lock();
        (shelf.arrivals.iter().cloned().collect(), shelf.dropped)
    }

    /// Forgets what is kept; numbers go on.
    pub(super) fn clear(&self) {
        let mut shelf = self.lock();
        shelf.arrivals.clear();
        shelf.bytes = 0;
        shelf.dropped = 0;
    }

    pub(super) fn behaviour(&self) -> Behaviour {
        self.behaviour.borrow().clone()
    }

    pub(super) fn change_behaviour(&self, json: &[u8]) -> Result<(), String> {
        let mut result = Ok(());
        self.behaviour.send_modify(|behaviour| match behaviour.changed(json) {
            Ok(changed) => *behaviour = changed,
            Err(problem) => result = Err(problem),
        });
        result
    }

    /// The behaviour as soon as `held` no longer says that an answer is held.
    pub(super) async fn released(&self, held: impl Fn(&Behaviour) -> bool) -> Behaviour {
        let mut watcher = self.behaviour.subscribe();
        // Fails only when the sender is gone, and the sender is `self`.
        let released = watcher.wait_for(|behaviour| !held(behaviour)).await.map(|behaviour| behaviour.clone());
        released.unwrap_or_else(|_| self.behaviour())
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn keep(&mut self, arrival: Arrival) {
        self.bytes += arrival.content.len();
        self.arrivals.push_back(Arc::new(arrival));
        while self.arrivals.len() > ARRIVALS_MAX || self.bytes > ARRIVALS_BYTES_MAX {
            let Some(oldest) = self.arrivals.pop_front() else { return };
            self.bytes -= oldest.content.len();
            self.dropped += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mail(message: &[u8]) -> Content {
        Content::Email { helo: String::new(), from: String::new(), to: Vec::new(), message: message.to_vec() }
    }

    #[test]
    fn memory_is_bounded_and_numbers_go_on() {
        let behaviour = Behaviour { http: Default::default(), mail: Default::default() };
        let store = Store::new(None, behaviour);
        for _ in 0..ARRIVALS_MAX + 3 {
            store.record(mail(b"x")).unwrap_or_else(|error| panic!("{error}"));
        }
        let (arrivals, dropped) = store.arrivals();
        assert_eq!((arrivals.len(), dropped, arrivals[0].no), (ARRIVALS_MAX, 3, 4));
        store.clear();
        assert_eq!(store.record(mail(b"x")).ok(), Some(10_004));
        assert_eq!((store.arrivals().0.len(), store.arrivals().1), (1, 0));
    }

    #[test]
    fn mail_headers_are_found_and_unfolded() {
        let content = mail(b"Subject: one\r\n two\r\nsubject: three\r\nX-Fencepost-Id:a\r\n\r\nX-Late: body\r\n");
        assert_eq!(content.header("SUBJECT").as_deref(), Some("one two"));
        assert_eq!(content.id().as_deref(), Some("a"));
        assert_eq!(content.header("x-late"), None);
    }
}
