//! `fencepost enqueue`: one command into the outbox, in one fenced transaction.
//!
//! The database decides whether it may be written; what is checked here first is only what it can't
//! see, so that a slip of the keyboard shows now and not as a dead command later. Content is written
//! byte for byte as it was given, since the same bytes are what idempotency compares.

use std::fs::File;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Subcommand;
use fencepost::clock::wall_ms;
use fencepost::rules::FencingToken;
use fencepost::sqlite::{Content, Enqueued, Fenced, Held, NewCommand};
use serde_json::{Map, Value, json};

use crate::exit::{Exit, Failure};
use crate::output::{Moment, Tone, clean, decimal, parse_moment};
use crate::{Globals, database, given};

/// No payload can be larger than SQLite's own limit for a value.
const INPUT_BYTES_MAX: u64 = 1_000_000_000;

/// Options of `fencepost enqueue`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Debug, Subcommand)]
enum Kind {
    /// A POST to a named endpoint, or to a URL where the configuration allows it
    Webhook(Box<Webhook>),
    /// A mail through a named relay
    Email(Box<Email>),
}

/// Who writes, and what every command can have.
#[derive(Debug, clap::Args)]
struct Common {
    /// What is fenced as one: an order, an account, a job
    #[arg(long, value_name = "SCOPE", env = "FENCEPOST_SCOPE", hide_env_values = true)]
    scope: String,
    /// The fencing token; without any lease it is 1
    #[arg(long, value_name = "N", env = "FENCEPOST_TOKEN", hide_env_values = true, default_value = "1")]
    token: i64,
    /// The identity of the acquisition that the token came from
    #[arg(long, value_name = "HOLDER", env = "FENCEPOST_HOLDER", hide_env_values = true)]
    holder: Option<String>,
    /// The foreign lease service that issued the token
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// A line of commands of its own inside the scope
    #[arg(long, value_name = "LANE")]
    lane: Option<String>,
    /// Your idempotency key: the same key with the same content is written once
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The command's id; by default the database makes one
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// A header of your own; may be repeated
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// Don't send before: +5m, 2026-03-01T10:00:00Z, a local 2026-03-01T10:00
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    not_before: Option<Moment>,
    /// Don't send any more after
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    expires: Option<Moment>,
    /// W3C trace context
    #[arg(long, value_name = "TRACEPARENT")]
    traceparent: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Webhook {
    /// A name of the configuration, or a URL
    destination: String,
    #[command(flatten)]
    common: Common,
    /// The body
    #[arg(long, value_name = "TEXT", required_unless_present = "payload_file")]
    payload: Option<String>,
    /// The body from a file; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "payload")]
    payload_file: Option<PathBuf>,
    /// Store the body as bytes: needed where it isn't UTF-8
    #[arg(long)]
    bytes: bool,
}

#[derive(Debug, clap::Args)]
struct Email {
    /// A relay of the configuration
    relay: String,
    #[command(flatten)]
    common: Common,
    /// The whole mail as JSON from a file, instead of the options below; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = MAIL_OPTIONS)]
    payload_file: Option<PathBuf>,
    /// The sender, as in "Shop <shop@example.com>"
    #[arg(long, value_name = "ADDRESS", required_unless_present = "payload_file")]
    from: Option<String>,
    /// A recipient; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    to: Vec<String>,
    /// A recipient of a copy; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    cc: Vec<String>,
    /// A hidden recipient; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    bcc: Vec<String>,
    /// Where answers go; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    reply_to: Vec<String>,
    /// The subject
    #[arg(long, value_name = "TEXT", required_unless_present = "payload_file")]
    subject: Option<String>,
    /// The text
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// The text from a file; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    text_file: Option<PathBuf>,
    /// The HTML from a file
    #[arg(long, value_name = "FILE")]
    html_file: Option<PathBuf>,
    /// A file to attach; may be repeated
    #[arg(long, value_name = "FILE")]
    attach: Vec<PathBuf>,
}

const MAIL_OPTIONS: [&str; 10] =
    ["from", "to", "cc", "bcc", "reply_to", "subject", "text", "text_file", "html_file", "attach"];

/// Writes the command and prints its id.
pub(crate) fn enqueue(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    match &args.kind {
        Kind::Webhook(webhook) => {
            let body = match &webhook.payload_file {
                Some(path) => read(path)?,
                None => webhook.payload.clone().unwrap_or_default().into_bytes(),
            };
            let content = content(&body, webhook.bytes, webhook.payload_file.as_deref())?;
            write(globals, &webhook.common, NewCommand::webhook(&webhook.destination, content))
        }
        Kind::Email(email) => {
            let mail = match &email.payload_file {
                Some(path) => mail_file(path)?,
                None => composed(email)?.to_string(),
            };
            write(globals, &email.common, NewCommand::email(&email.relay, mail.as_str()))
        }
    }
}

fn content<'a>(body: &'a [u8], as_bytes: bool, path: Option<&Path>) -> anyhow::Result<Content<'a>> {
    if as_bytes {
        return Ok(Content::Bytes(body));
    }
    let place = path.map_or("--payload".to_owned(), |path| path.display().to_string());
    let text = std::str::from_utf8(body).map_err(|error| {
        Failure::new(Exit::Data, format!("{place} isn't UTF-8 at byte {}", error.valid_up_to()))
            .hint("add --bytes to store it as it is")
    })?;
    Ok(Content::Text(text))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let from = || format!("can't read {}", path.display());
    let read = if path == Path::new("-") {
        stdin().lock().take(INPUT_BYTES_MAX).read_to_end(&mut bytes)
    } else {
        File::open(path).with_context(from)?.take(INPUT_BYTES_MAX).read_to_end(&mut bytes)
    };
    read.with_context(from)?;
    Ok(bytes)
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    let not_text = |_| Failure::new(Exit::Data, format!("{} isn't UTF-8", path.display()));
    Ok(String::from_utf8(read(path)?).map_err(not_text)?)
}

/// The text as it is; only that it is an object is checked. The parser's error could quote content.
fn mail_file(path: &Path) -> anyhow::Result<String> {
    let text = read_text(path)?;
    let object: Result<Map<String, Value>, _> = serde_json::from_str(&text);
    object.map_err(|error| {
        let place = format!("{}:{}:{}", path.display(), error.line(), error.column());
        Failure::new(Exit::Data, format!("{place}: this is not a mail as a JSON object"))
            .hint("a mail has the fields from, to, cc, bcc, reply_to, subject, text, html, headers, attachments")
    })?;
    Ok(text)
}

fn composed(email: &Email) -> anyhow::Result<Value> {
    if email.to.is_empty() && email.cc.is_empty() && email.bcc.is_empty() {
        return Err(Failure::usage("the mail has no recipient").hint("give --to, --cc or --bcc").into());
    }
    let text = email.text_file.as_deref().map(read_text).transpose()?.or_else(|| email.text.clone());
    let html = email.html_file.as_deref().map(read_text).transpose()?;
    let attachments = email.attach.iter().map(|path| attachment(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut mail = json!({ "from": email.from, "subject": email.subject });
    let lists = [("to", &email.to), ("cc", &email.cc), ("bcc", &email.bcc), ("reply_to", &email.reply_to)];
    for (field, addresses) in lists.into_iter().filter(|(_, addresses)| !addresses.is_empty()) {
        mail[field] = json!(addresses);
    }
    for (field, text) in [("text", text), ("html", html)] {
        if let Some(text) = text {
            mail[field] = text.into();
        }
    }
    if !attachments.is_empty() {
        mail["attachments"] = attachments.into();
    }
    Ok(mail)
}

fn attachment(path: &Path) -> anyhow::Result<Value> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .ok_or_else(|| Failure::usage(format!("--attach {} has no file name in UTF-8", path.display())))?;
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    Ok(json!({ "name": name, "type": media_type(extension), "base64": STANDARD.encode(read(path)?) }))
}

/// Of the usual attachments; a mail program goes by the name anyway.
fn media_type(extension: &str) -> &'static str {
    match extension.to_ascii_lowercase().as_str() {
        "pdf" => "application/pdf",
        "txt" | "log" => "text/plain",
        "csv" => "text/csv",
        "html" | "htm" => "text/html",
        "ics" => "text/calendar",
        "json" => "application/json",
        "xml" => "application/xml",
        "zip" => "application/zip",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        _ => "application/octet-stream",
    }
}

fn write(globals: &Globals, common: &Common, command: NewCommand<'_>) -> anyhow::Result<()> {
    let headers = headers(&common.header)?;
    let now_ms = wall_ms();
    let mut command = command;
    if let Some(headers) = &headers {
        command = command.headers(headers);
    }
    if let Some(lane) = given(&common.lane) {
        command = command.lane(lane);
    }
    if let Some(key) = &common.key {
        command = command.key(key);
    }
    if let Some(id) = &common.id {
        command = command.id(id);
    }
    if let Some(time) = common.not_before {
        command = command.not_before_ms(time.at_ms(now_ms));
    }
    if let Some(time) = common.expires {
        command = command.expires_at_ms(time.at_ms(now_ms));
    }
    if let Some(traceparent) = given(&common.traceparent) {
        command = command.traceparent(traceparent);
    }
    let held = held(&common.scope, common.token, given(&common.holder), given(&common.source))?;
    let mut connection = database::write(globals)?;
    let mut transaction = Fenced::begin(&mut connection, &held)?;
    let enqueued = transaction.enqueue(&command)?;
    transaction.commit()?;
    say(globals, &held, &enqueued)
}

/// What a writer says of itself.
pub(crate) fn held<'a>(
    scope: &'a str,
    token: i64,
    holder: Option<&'a str>,
    source: Option<&'a str>,
) -> anyhow::Result<Held<'a>> {
    let token = FencingToken::new(token).context("FP003 illegal value")?;
    let held = Held::new(scope, token);
    let held = holder.map_or(held, |holder| held.holder(holder));
    Ok(source.map_or(held, |source| held.source(source)))
}

fn headers(lines: &[String]) -> anyhow::Result<Option<String>> {
    let mut headers = Map::new();
    for line in lines {
        // The value can be a secret, so no message repeats it.
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| Failure::usage("--header has no colon").hint("write it as in --header 'X-Team: billing'"))?;
        let (name, value) = (name.trim(), value.trim());
        if name.is_empty() || name.chars().chain(value.chars()).any(char::is_control) {
            return Err(Failure::usage("--header has no name, or a control character in it").into());
        }
        if headers.keys().any(|known| known.eq_ignore_ascii_case(name)) {
            return Err(Failure::usage(format!("--header {name} is given twice")).into());
        }
        headers.insert(name.to_owned(), value.into());
    }
    Ok((!headers.is_empty()).then(|| Value::Object(headers).to_string()))
}

fn say(globals: &Globals, held: &Held<'_>, enqueued: &Enqueued) -> anyhow::Result<()> {
    let screen = globals.screen();
    if screen.is_json() {
        let mut value = json!({ "id": enqueued.id(), "scope": held.scope, "token": decimal(held.token.get()) });
        match enqueued {
            Enqueued::New { seq, .. } => value["seq"] = decimal(*seq),
            Enqueued::Duplicate { state, .. } => value["state"] = state.as_str().into(),
        }
        value["duplicate"] = matches!(enqueued, Enqueued::Duplicate { .. }).into();
        screen.print_json(&value)?;
        return Ok(());
    }
    let scope = clean(held.scope);
    screen.print(&match enqueued {
        Enqueued::New { id, seq } => format!("{id}  seq {seq} of scope {scope}, token {}", held.token),
        Enqueued::Duplicate { id, state } => {
            format!("{id}  already there: {}", screen.paint(Tone::of_state(state), state))
        }
    })?;
    Ok(())
}
