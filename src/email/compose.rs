//! From a stored command to the mail: envelope, headers, body.
//!
//! Everything comes from the command and nothing from the clock, the host or chance, so that every
//! attempt sends the same bytes: `Date` is the time of the insert, `Message-ID` and the MIME
//! boundaries follow from the command. No CR, LF or other control character of a field may ever
//! become a line of the header or of the dialogue: such a mail can't be sent. What is refused is
//! named by its field, never by its value, and a hidden recipient is in the envelope alone.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lettre::Address;
use lettre::message::header::{self, ContentTransferEncoding, ContentType, HeaderName, HeaderValue, Headers};
use lettre::message::{Attachment, Body, Mailbox, Mailboxes, MultiPart, SinglePart};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::effect::{Command, Unsendable};

/// The greatest number of recipients of one mail.
const RECIPIENTS_MAX: usize = 1_000;

/// The greatest length of a line without its end (RFC 5322 §2.1.1).
const LINE_BYTES_MAX: usize = 998;

/// The greatest length of a word in a header: a line is folded between words only, and the name of
/// the header must fit beside it.
const WORD_BYTES_MAX: usize = 900;

/// The last second that a `Date` can hold, in milliseconds since 1970.
const DATE_MS_MAX: u64 = 253_402_300_799_000;

const FIELDS: [&str; 11] =
    ["from", "to", "cc", "bcc", "reply_to", "subject", "text", "html", "headers", "attachments", "message_id"];

/// Headers that have a field of their own, or that tell how the mail came about.
const RESERVED: [&str; 13] = [
    "From",
    "To",
    "Cc",
    "Bcc",
    "Sender",
    "Reply-To",
    "Subject",
    "Date",
    "Message-ID",
    "MIME-Version",
    "Return-Path",
    "Received",
    "DKIM-Signature",
];
const RESERVED_PREFIXES: [&str; 3] = ["Content-", "X-Fencepost-", "Resent-"];

/// A mail whose every field was checked.
pub(super) struct Mail {
    from: Mailbox,
    to: Vec<Mailbox>,
    cc: Vec<Mailbox>,
    bcc: Vec<Mailbox>,
    reply_to: Vec<Mailbox>,
    subject: Option<String>,
    text: Option<String>,
    html: Option<String>,
    headers: Vec<(HeaderName, String)>,
    attachments: Vec<Attached>,
    message_id: String,
    command_id: String,
    date: SystemTime,
    boundary: String,
}

struct Attached {
    name: String,
    kind: ContentType,
    content: Vec<u8>,
}

/// An address of the envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Recipient {
    pub(super) address: Address,
    /// A `bcc`: nobody but the relay may learn of it.
    pub(super) hidden: bool,
}

impl Mail {
    /// Reads and checks every field of the payload and of the `headers` column.
    pub(super) fn parse(command: &Command) -> Result<Self, Unsendable> {
        let payload = object(command.payload.as_bytes(), "the payload")?;
        if payload.keys().any(|name| !FIELDS.contains(&name.as_str())) {
            return Err(unsendable("the payload has a field that is not known"));
        }
        let from = single_mailbox(&payload)?;
        let message_id = match text(&payload, "message_id")? {
            Some(given) => checked_message_id(given)?,
            None => format!("<{}@{}>", command.id, from.email.domain()),
        };
        let mail = Self {
            to: mailboxes(&payload, "to")?,
            cc: mailboxes(&payload, "cc")?,
            bcc: mailboxes(&payload, "bcc")?,
            reply_to: mailboxes(&payload, "reply_to")?,
            subject: text(&payload, "subject")?.map(|text| one_line("subject", text)).transpose()?,
            text: text(&payload, "text")?.map(str::to_owned),
            html: text(&payload, "html")?.map(str::to_owned),
            headers: headers(&payload, command.headers.as_deref())?,
            attachments: attachments(&payload)?,
            command_id: command.id.clone(),
            date: date(command.inserted_ms)?,
            boundary: boundary(command),
            from,
            message_id,
        };
        match mail.recipients().len() {
            0 => Err(unsendable("no recipient in to, cc or bcc")),
            1..=RECIPIENTS_MAX => Ok(mail),
            _ => Err(unsendable("more than 1000 recipients")),
        }
    }

    /// The sender of the envelope.
    pub(super) fn sender(&self) -> &Address {
        &self.from.email
    }

    /// The recipients of the envelope, each once. Whoever is both named and hidden counts as named.
    pub(super) fn recipients(&self) -> Vec<Recipient> {
        let mut seen = HashSet::new();
        let named = self.to.iter().chain(&self.cc).map(|mailbox| (mailbox, false));
        let hidden = self.bcc.iter().map(|mailbox| (mailbox, true));
        named
            .chain(hidden)
            .filter(|(mailbox, _)| seen.insert(&mailbox.email))
            .map(|(mailbox, hidden)| Recipient { address: mailbox.email.clone(), hidden })
            .collect()
    }

    /// Whether an address has a local part that isn't ASCII. It shows in the rendered mail too, unless
    /// the address is hidden; everything else that isn't ASCII is encoded there.
    pub(super) fn needs_smtputf8(&self, rendered: &[u8]) -> bool {
        !rendered.is_ascii() || self.recipients().iter().any(|recipient| !recipient.address.to_string().is_ascii())
    }

    /// The mail as it is sent, with CRLF at the end of every line and of the whole.
    pub(super) fn render(&self) -> Result<Vec<u8>, Unsendable> {
        let mut bytes = self.header_block().to_string().into_bytes();
        bytes.extend(self.body());
        check_lines(&bytes)?;
        Ok(bytes)
    }

    fn header_block(&self) -> Headers {
        let mut block = Headers::new();
        block.set(header::From::from(Mailboxes::from(self.from.clone())));
        if !self.to.is_empty() {
            block.set(header::To::from(Mailboxes::from(self.to.clone())));
        }
        if !self.cc.is_empty() {
            block.set(header::Cc::from(Mailboxes::from(self.cc.clone())));
        }
        if !self.reply_to.is_empty() {
            block.set(header::ReplyTo::from(Mailboxes::from(self.reply_to.clone())));
        }
        if let Some(subject) = self.subject.as_ref().filter(|subject| !subject.is_empty()) {
            block.insert_raw(unstructured(HeaderName::new_from_ascii_str("Subject"), subject));
        }
        block.set(header::Date::new(self.date));
        block.set(header::MessageId::from(self.message_id.clone()));
        block.insert_raw(unstructured(HeaderName::new_from_ascii_str("X-Fencepost-Id"), &self.command_id));
        // RFC 3834 §5; a writer who knows better overrides it by a header of its own below.
        block.insert_raw(unstructured(HeaderName::new_from_ascii_str("Auto-Submitted"), "auto-generated"));
        for (name, value) in &self.headers {
            block.insert_raw(unstructured(name.clone(), value));
        }
        block.set(header::MIME_VERSION_1_0);
        block
    }

    /// Header and content of the outermost MIME part.
    fn body(&self) -> Vec<u8> {
        if self.attachments.is_empty() {
            return match (&self.text, &self.html) {
                (Some(text), Some(html)) => self.alternative(text, html).formatted(),
                (_, _) => alone(&self.only_part()),
            };
        }
        let mixed = MultiPart::mixed().boundary(format!("fp-mixed-{}", self.boundary));
        let start = match (&self.text, &self.html) {
            (Some(text), Some(html)) => mixed.multipart(self.alternative(text, html)),
            (None, None) => mixed.build(),
            (_, _) => mixed.singlepart(self.only_part()),
        };
        self.attachments.iter().fold(start, |parts, file| parts.singlepart(file.part())).formatted()
    }

    fn alternative(&self, text: &str, html: &str) -> MultiPart {
        MultiPart::alternative()
            .boundary(format!("fp-alternative-{}", self.boundary))
            .singlepart(SinglePart::plain(encoded(text)))
            .singlepart(SinglePart::html(encoded(html)))
    }

    /// The text or the HTML; a mail without either has an empty text.
    fn only_part(&self) -> SinglePart {
        match &self.html {
            Some(html) => SinglePart::html(encoded(html)),
            None => SinglePart::plain(encoded(self.text.as_deref().unwrap_or_default())),
        }
    }
}

impl Attached {
    fn part(&self) -> SinglePart {
        // Base64 always: other encodings let bare line ends of a file through to the wire.
        let body = Body::new_with_encoding(self.content.clone(), ContentTransferEncoding::Base64)
            .expect("base64 fits every content");
        Attachment::new(self.name.clone()).body(body, self.kind.clone())
    }
}

fn unsendable(text: &str) -> Unsendable {
    Unsendable(text.to_owned())
}

fn object(bytes: &[u8], what: &str) -> Result<Map<String, Value>, Unsendable> {
    // The error of the parser quotes the content, so it is not passed on.
    serde_json::from_slice(bytes).map_err(|_| Unsendable(format!("{what} is not a JSON object")))
}

/// A field that isn't null. ORMs write every column and every field, so null means "not given".
fn given<'a>(payload: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    payload.get(field).filter(|value| !value.is_null())
}

fn text<'a>(payload: &'a Map<String, Value>, field: &str) -> Result<Option<&'a str>, Unsendable> {
    let Some(value) = given(payload, field) else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| Unsendable(format!("{field} is not a string")))
}

fn one_line(field: &str, text: &str) -> Result<String, Unsendable> {
    if text.chars().any(char::is_control) {
        return Err(Unsendable(format!("{field} has a control character")));
    }
    Ok(text.to_owned())
}

fn single_mailbox(payload: &Map<String, Value>) -> Result<Mailbox, Unsendable> {
    let mut from = mailboxes(payload, "from")?;
    match (from.pop(), from.is_empty()) {
        (Some(mailbox), true) => Ok(mailbox),
        (_, _) => Err(unsendable("from is not exactly one address")),
    }
}

/// A string with one address, or a list of such strings. A comma never makes two of one: a name that
/// an application took from its users could add a recipient otherwise.
fn mailboxes(payload: &Map<String, Value>, field: &str) -> Result<Vec<Mailbox>, Unsendable> {
    let Some(value) = given(payload, field) else { return Ok(Vec::new()) };
    let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    items.iter().map(|item| mailbox(field, item)).collect()
}

fn mailbox(field: &str, item: &Value) -> Result<Mailbox, Unsendable> {
    let text = item.as_str().ok_or_else(|| Unsendable(format!("{field} is neither a string nor a list of strings")))?;
    let parsed = one_line(field, text)?.parse().map_err(|_| Unsendable(format!("{field} has an illegal address")))?;
    checked_mailbox(field, parsed)
}

/// The parser is more generous than a relay: quoted local parts, addresses of hosts, U-labels.
fn checked_mailbox(field: &str, mailbox: Mailbox) -> Result<Mailbox, Unsendable> {
    let illegal = || Unsendable(format!("{field} has an illegal address"));
    let name = mailbox.name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    if name.as_ref().is_some_and(|name| has_long_word(name)) {
        return Err(Unsendable(format!("{field} has a name that is too long")));
    }
    let user = mailbox.email.user();
    if user.chars().any(|c| c.is_whitespace() || c.is_control() || "\"(),:;<>@[\\]".contains(c)) {
        return Err(illegal());
    }
    let domain = a_label(mailbox.email.domain()).ok_or_else(illegal)?;
    let email = Address::new(user, domain).map_err(|_| illegal())?;
    Ok(Mailbox::new(name, email))
}

/// The form of a domain that every relay takes, so that SMTPUTF8 is asked for only where the local
/// part needs it.
fn a_label(domain: &str) -> Option<String> {
    // A URL's host may be percent-encoded or a number; a mail domain may not.
    if domain.contains('%') {
        return None;
    }
    let url::Host::Domain(ascii) = url::Host::parse(domain).ok()? else { return None };
    let legal_label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    ascii.split('.').all(legal_label).then_some(ascii)
}

/// `<left@right>` of atoms and dots (RFC 5322 §3.6.4).
fn checked_message_id(given: &str) -> Result<String, Unsendable> {
    let atoms = |side: &str| {
        !side.is_empty()
            && side.split('.').all(|atom| !atom.is_empty())
            && side.bytes().all(|b| b.is_ascii_alphanumeric() || b".!#$%&'*+-/=?^_`{|}~".contains(&b))
    };
    given
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .and_then(|inside| inside.split_once('@'))
        .filter(|(left, right)| atoms(left) && atoms(right) && given.len() <= 250)
        .map(|_| given.to_owned())
        .ok_or_else(|| unsendable("message_id is not of the form <left@right>"))
}

/// The headers of the payload and of the column. A name may come once, whatever its case.
fn headers(payload: &Map<String, Value>, column: Option<&str>) -> Result<Vec<(HeaderName, String)>, Unsendable> {
    let of_payload = match given(payload, "headers") {
        Some(value) => value.as_object().cloned().ok_or_else(|| unsendable("headers is not an object"))?,
        None => Map::new(),
    };
    let of_column = column.map(|json| object(json.as_bytes(), "the headers column")).transpose()?.unwrap_or_default();
    let mut names = HashSet::new();
    let mut all = Vec::new();
    for (name, value) in of_payload.iter().chain(&of_column) {
        if !names.insert(name.to_ascii_lowercase()) {
            return Err(unsendable("headers has a name twice"));
        }
        all.push((header_name(name)?, header_value(value)?));
    }
    Ok(all)
}

fn header_name(name: &str) -> Result<HeaderName, Unsendable> {
    let is_reserved = RESERVED.iter().any(|reserved| name.eq_ignore_ascii_case(reserved))
        || RESERVED_PREFIXES
            .iter()
            .any(|prefix| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)));
    if is_reserved {
        return Err(unsendable("headers has a reserved name"));
    }
    if !name.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(unsendable("headers has an illegal name"));
    }
    HeaderName::new_from_ascii(name.to_owned()).map_err(|_| unsendable("headers has an illegal name"))
}

fn header_value(value: &Value) -> Result<String, Unsendable> {
    let text = value.as_str().ok_or_else(|| unsendable("headers has a value that is not a string"))?;
    // Encoding would make it fit, and would break the addresses that such headers hold.
    if text.is_ascii() && has_long_word(text) {
        return Err(unsendable("headers has a value that is too long"));
    }
    one_line("headers", text)
}

fn attachments(payload: &Map<String, Value>) -> Result<Vec<Attached>, Unsendable> {
    let Some(value) = given(payload, "attachments") else { return Ok(Vec::new()) };
    let list = value.as_array().ok_or_else(|| unsendable("attachments is not a list"))?;
    list.iter().map(attached).collect()
}

fn attached(item: &Value) -> Result<Attached, Unsendable> {
    let file = item.as_object().ok_or_else(|| unsendable("attachments has something else than an object"))?;
    if file.keys().any(|name| !["name", "type", "base64"].contains(&name.as_str())) {
        return Err(unsendable("attachments has a field that is not known"));
    }
    let missing = || unsendable("attachments has no name or no base64");
    let wrong = |error: Unsendable| Unsendable(format!("attachments: {error}"));
    let name = text(file, "name").map_err(wrong)?.filter(|name| !name.is_empty()).ok_or_else(missing)?;
    let base64 = text(file, "base64").map_err(wrong)?.ok_or_else(missing)?;
    Ok(Attached {
        name: one_line("attachments: name", name)?,
        kind: attachment_type(text(file, "type").map_err(wrong)?.unwrap_or("application/octet-stream"))?,
        content: STANDARD.decode(base64).map_err(|_| unsendable("attachments: base64 is not legal"))?,
    })
}

fn attachment_type(given: &str) -> Result<ContentType, Unsendable> {
    let illegal = || unsendable("attachments: type is not legal");
    let lower = given.to_ascii_lowercase();
    // Composite types may not be in base64 (RFC 2045 §6.4).
    let is_composite = lower.starts_with("multipart/") || lower.starts_with("message/");
    if is_composite || given.len() > 200 || !given.bytes().all(|b| b == b' ' || b.is_ascii_graphic()) {
        return Err(illegal());
    }
    ContentType::parse(given).map_err(|_| illegal())
}

fn date(inserted_ms: i64) -> Result<SystemTime, Unsendable> {
    u64::try_from(inserted_ms)
        .ok()
        .filter(|ms| *ms <= DATE_MS_MAX)
        .map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms))
        .ok_or_else(|| unsendable("the time of the insert is no date"))
}

/// Follows from id and content, so it is the same on every attempt, and no content can hold it.
fn boundary(command: &Command) -> String {
    let mut hash = Sha256::new();
    hash.update(command.id.as_bytes());
    hash.update([0]);
    hash.update(command.payload.as_bytes());
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn has_long_word(text: &str) -> bool {
    text.split(' ').any(|word| word.len() > WORD_BYTES_MAX)
}

/// A header without structure, such as `Subject`. What isn't plain goes whole into encoded words
/// (RFC 2047), so that it decodes to exactly what was given: outer spaces, and what only looks like
/// an encoded word, would not survive otherwise.
fn unstructured(name: HeaderName, text: &str) -> HeaderValue {
    let is_plain = text.bytes().all(|b| b == b' ' || b.is_ascii_graphic())
        && !text.contains("=?")
        && text.trim_matches(' ').len() == text.len()
        && !text.contains("  ")
        && !has_long_word(text);
    if is_plain {
        HeaderValue::new(name, text.to_owned())
    } else {
        let encoded = encoded_words(name.len(), text);
        HeaderValue::dangerous_new_pre_encoded(name, text.to_owned(), encoded)
    }
}

/// Encoded words, split between characters, one to a line; no line is longer than 76 characters
/// (RFC 2047 §2). The first one stands behind the name of the header.
fn encoded_words(name_bytes: usize, text: &str) -> String {
    const FRAME_BYTES: usize = "=?utf-8?b??=".len();
    let mut words = Vec::new();
    let mut rest = text;
    let mut taken_bytes = name_bytes + ": ".len();
    while !rest.is_empty() {
        // No character is longer than four bytes, so each word takes at least one.
        let bytes_max = (76_usize.saturating_sub(taken_bytes + FRAME_BYTES) / 4 * 3).max(6);
        let (head, tail) = rest.split_at(rest.floor_char_boundary(bytes_max));
        words.push(format!("=?utf-8?b?{}?=", STANDARD.encode(head)));
        rest = tail;
        taken_bytes = " ".len();
    }
    words.join("\r\n ")
}

/// A part that is the whole body. Its last line end isn't doubled, as it is before a boundary.
fn alone(part: &SinglePart) -> Vec<u8> {
    let mut bytes = part.formatted();
    if part.raw_body().ends_with(b"\r\n") {
        bytes.truncate(bytes.len() - 2);
    }
    bytes
}

/// A text with CRLF for every line end, in an encoding that keeps the wire legal.
fn encoded(text: &str) -> Body {
    let text = text.replace("\r\n", "\n").replace(['\r', '\n'], "\r\n");
    if text.chars().any(|c| c.is_ascii_control() && !matches!(c, '\r' | '\n' | '\t')) {
        return Body::new_with_encoding(text, ContentTransferEncoding::Base64).expect("base64 fits every content");
    }
    Body::new(text)
}

/// The last word before the wire: a bare CR or LF is how commands are smuggled past a relay.
fn check_lines(bytes: &[u8]) -> Result<(), Unsendable> {
    let Some(lines) = bytes.strip_suffix(b"\r\n") else {
        return Err(unsendable("the mail does not end with a line end"));
    };
    for line in lines.split(|b| *b == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.contains(&b'\r') {
            return Err(unsendable("the mail has a bare CR"));
        }
        if line.len() > LINE_BYTES_MAX {
            return Err(unsendable("the mail has a line that is too long"));
        }
    }
    let has_bare_lf =
        lines.windows(2).any(|pair| pair[1] == b'\n' && pair[0] != b'\r') || lines.first() == Some(&b'\n');
    if has_bare_lf { Err(unsendable("the mail has a bare LF")) } else { Ok(()) }
}
