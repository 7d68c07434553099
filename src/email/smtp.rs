//! One SMTP dialogue: connect, log in, announce, arm, hand over.
//!
//! Every step has its own deadline and its own meaning when it fails. Up to `DATA` nothing can have
//! happened. The body alone can't cause a delivery either, since a server may not deliver without
//! the end mark (RFC 5321 §4.1.1.4); from the first byte of the end mark on, only a complete reply
//! says anything, and everything else is unknown. A connection carries one mail and is never
//! reused: after a step that was given up, the replies of a connection are one behind. Hidden
//! recipients and secrets stay out of the evidence, also where the relay repeats them.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lettre::transport::smtp::commands::{Data, Ehlo, Mail as MailFrom, Quit, Rcpt, Starttls};
use lettre::transport::smtp::extension::{MailBodyParameter, MailParameter};
use secrecy::ExposeSecret as _;
use tokio::net::TcpStream;

use super::compose::{Mail, Recipient};
use super::wire::{Broken, Class, Reply, Wire, within};
use super::{Email, Login, Tls};
use crate::effect::{Evidence, Report, Request};

const BLOCK_BYTES: usize = 65_536;
const END_MARK: &[u8] = b"\r\n.\r\n";
const QUIT_LIMIT: Duration = Duration::from_secs(2);

/// The phase of an attempt that may or may not have delivered.
const NO_ANSWER: &str = "end of data sent, no answer";

/// What the relay offers, as far as we use it.
#[derive(Debug, Default)]
struct Extensions {
    starttls: bool,
    size: bool,
    smtputf8: bool,
    plain: bool,
    login: bool,
}

struct Dialogue<'a> {
    email: &'a Email,
    wire: Wire,
    extensions: Extensions,
    server: Option<String>,
    /// Texts that must not get into the evidence, and what stands there instead.
    hidden: Vec<(String, &'static str)>,
    /// Whether the next reply on the connection would answer our next command.
    in_step: bool,
}

/// Sends one mail over a connection of its own. `bytes` is the rendered mail.
pub(super) async fn deliver(email: &Email, mail: &Mail, bytes: &[u8], request: Request<'_>) -> Report {
    let wire = match within(email.settings.timeouts.connect, connect(email)).await {
        Ok(wire) => wire,
        Err(broken) => {
            return Report::channel(relay(email, "connect").with("reason", &broken.to_string()));
        }
    };
    let mut dialogue = Dialogue::new(email, wire, mail);
    let report = match dialogue.run(mail, bytes, request).await {
        Ok(report) | Err(report) => report,
    };
    dialogue.leave();
    report
}

fn relay(email: &Email, phase: &str) -> Evidence {
    Evidence::new(phase).with("relay", &format!("{}:{}", email.settings.host, email.settings.port))
}

/// Tries each address of the relay, for an equal part of the time.
async fn connect(email: &Email) -> Result<Wire, Broken> {
    let settings = &email.settings;
    let addresses: Vec<_> = tokio::net::lookup_host((settings.host.as_str(), settings.port)).await?.collect();
    let share = settings.timeouts.connect / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
    let mut last = Broken::Io(std::io::Error::other("the name has no address"));
    for address in addresses {
        let tcp = async { TcpStream::connect(address).await.map_err(Broken::Io) };
        match within(share, tcp).await {
            Ok(tcp) => return Ok(Wire::new(tcp, settings.timeouts.body)?),
            Err(broken) => last = broken,
        }
    }
    Err(last)
}

impl<'a> Dialogue<'a> {
    fn new(email: &'a Email, wire: Wire, mail: &Mail) -> Self {
        let mut hidden: Vec<_> = mail
            .recipients()
            .into_iter()
            .filter(|recipient| recipient.hidden)
            .map(|recipient| (recipient.address.to_string(), "(a bcc recipient)"))
            .collect();
        if let Some(login) = &email.settings.login {
            let password = login.password.expose_secret();
            hidden.extend(
                [password.to_owned(), STANDARD.encode(password), plain_response(login)]
                    .map(|secret| (secret, "(a secret)")),
            );
        }
        Self { email, wire, extensions: Extensions::default(), server: None, hidden, in_step: false }
    }

    async fn run(&mut self, mail: &Mail, bytes: &[u8], request: Request<'_>) -> Result<Report, Report> {
        self.open().await?;
        self.announce_sender(mail, bytes).await?;
        self.announce_recipients(&mail.recipients()).await?;
        self.begin_data().await?;
        // From here on a step that is given up leaves the relay in the middle of a mail.
        self.in_step = false;
        if request.arm.arm().await.is_err() {
            return Err(Report::not_armed());
        }
        self.send_body(bytes).await?;
        Ok(self.send_end_mark(bytes, &request).await)
    }

    /// Everything that belongs to the channel and to no mail.
    async fn open(&mut self) -> Result<(), Report> {
        if self.email.settings.tls == Tls::Implicit {
            self.start_tls("tls").await?;
        }
        self.read_greeting().await?;
        self.say_hello().await?;
        self.secure().await?;
        self.log_in().await
    }

    async fn read_greeting(&mut self) -> Result<(), Report> {
        let greeting = within(self.email.settings.timeouts.greeting, self.wire.reply()).await;
        self.in_step = greeting.is_ok();
        let greeting = self.completed("greeting", greeting)?;
        self.server = greeting.lines.first().and_then(|line| line.split(' ').next()).map(str::to_owned);
        Ok(())
    }

    async fn say_hello(&mut self) -> Result<(), Report> {
        let id = &self.email.client_id;
        let answer = self.ask(&Ehlo::new(id.clone()).to_string()).await;
        let knows_no_ehlo = answer.as_ref().is_ok_and(|reply| matches!(reply.code, 500 | 501 | 502 | 504));
        if !knows_no_ehlo {
            self.extensions = Extensions::read(&self.completed("ehlo", answer)?);
            return Ok(());
        }
        // RFC 5321 §3.2: a server without extensions is greeted in the old way.
        let answer = self.ask(&format!("HELO {id}\r\n")).await;
        self.extensions = Extensions::default();
        self.completed("ehlo", answer).map(|_| ())
    }

    async fn secure(&mut self) -> Result<(), Report> {
        let is_required = match self.email.settings.tls {
            Tls::Implicit | Tls::None => return Ok(()),
            Tls::Starttls => true,
            Tls::Opportunistic => false,
        };
        if !self.extensions.starttls {
            let report = Report::channel(self.evidence("starttls").with("reason", "STARTTLS is not offered"));
            return if is_required { Err(report) } else { Ok(()) };
        }
        let answer = self.ask(&Starttls.to_string()).await;
        self.completed("starttls", answer)?;
        self.start_tls("starttls").await?;
        // RFC 3207 §4.2: what was learnt before TLS is forgotten.
        self.say_hello().await
    }

    async fn start_tls(&mut self, phase: &str) -> Result<(), Report> {
        let Some((connector, name)) = self.email.tls.clone() else {
            return Err(Report::channel(self.evidence(phase).with("reason", "TLS is not set up")));
        };
        let handshake = within(self.email.settings.timeouts.connect, self.wire.start_tls(connector, name)).await;
        self.in_step = handshake.is_ok();
        handshake.map_err(|broken| self.lost_channel(phase, &broken))
    }

    async fn log_in(&mut self) -> Result<(), Report> {
        let Some(login) = &self.email.settings.login else { return Ok(()) };
        if !self.wire.is_tls() && !self.wire.is_loopback() {
            return Err(Report::channel(self.evidence("auth").with("reason", "no login without TLS")));
        }
        let answer = if self.extensions.plain {
            self.ask(&format!("AUTH PLAIN {}\r\n", plain_response(login))).await
        } else if self.extensions.login {
            self.log_in_by_steps(login).await
        } else {
            return Err(Report::channel(self.evidence("auth").with("reason", "neither PLAIN nor LOGIN is offered")));
        };
        self.completed("auth", answer).map(|_| ())
    }

    /// AUTH LOGIN: name and password, each after a 334. Anything else is the answer.
    async fn log_in_by_steps(&mut self, login: &Login) -> Result<Reply, Broken> {
        let mut answer = self.ask("AUTH LOGIN\r\n").await?;
        for secret in [login.username.as_str(), login.password.expose_secret()] {
            if answer.code != 334 {
                break;
            }
            answer = self.ask(&format!("{}\r\n", STANDARD.encode(secret))).await?;
        }
        Ok(answer)
    }

    async fn announce_sender(&mut self, mail: &Mail, bytes: &[u8]) -> Result<(), Report> {
        let mut parameters = Vec::new();
        if self.extensions.size {
            parameters.push(MailParameter::Size(bytes.len()));
        }
        // RFC 6531 §3.2: such a mail can't go to a relay without the extension.
        if mail.needs_smtputf8(bytes) {
            if !self.extensions.smtputf8 {
                let reason = "an address needs SMTPUTF8, which the relay does not offer";
                return Err(Report::refused(self.evidence("mail").with("reason", reason)));
            }
            parameters.push(MailParameter::Body(MailBodyParameter::EightBitMime));
            parameters.push(MailParameter::SmtpUtfEight);
        }
        let answer = self.ask(&MailFrom::new(Some(mail.sender().clone()), parameters).to_string()).await;
        let reply = answer.map_err(|broken| self.lost("mail", &broken))?;
        let evidence = self.evidence_of("mail", &reply);
        match (reply.code, reply.class()) {
            (_, Class::Completed) => Ok(()),
            // "Authenticate, or use TLS first": every mail would meet it.
            (530, _) => Err(Report::channel(evidence)),
            (_, Class::Permanent) => Err(Report::refused(evidence)),
            (_, Class::Transient | Class::Preliminary | Class::Intermediate) => Err(Report::deferred(evidence)),
        }
    }

    /// All or none. One `5yz` refuses the mail whatever the others say, since no later attempt could
    /// reach all; so after a `4yz` the rest is still asked.
    async fn announce_recipients(&mut self, recipients: &[Recipient]) -> Result<(), Report> {
        let mut deferred = None;
        for recipient in recipients {
            let reply = match self.ask(&Rcpt::new(recipient.address.clone(), Vec::new()).to_string()).await {
                Ok(reply) => reply,
                Err(broken) => return Err(deferred.unwrap_or_else(|| self.lost("rcpt", &broken))),
            };
            match reply.class() {
                Class::Completed => {}
                Class::Permanent => return Err(Report::refused(self.evidence_about(recipient, &reply))),
                Class::Transient | Class::Preliminary | Class::Intermediate => {
                    deferred.get_or_insert_with(|| Report::deferred(self.evidence_about(recipient, &reply)));
                    // RFC 5321 §3.8: the relay closes.
                    if reply.code == 421 {
                        break;
                    }
                }
            }
        }
        deferred.map_or(Ok(()), Err)
    }

    async fn begin_data(&mut self) -> Result<(), Report> {
        let answer = self.ask(&Data.to_string()).await;
        let reply = answer.map_err(|broken| self.lost("data", &broken))?;
        match reply.class() {
            Class::Intermediate => Ok(()),
            Class::Permanent => Err(Report::refused(self.evidence_of("data", &reply))),
            Class::Transient | Class::Preliminary | Class::Completed => {
                Err(Report::deferred(self.evidence_of("data", &reply)))
            }
        }
    }

    /// The body without its last line end, which belongs to the end mark.
    async fn send_body(&mut self, bytes: &[u8]) -> Result<(), Report> {
        let limit = self.email.settings.timeouts.body;
        let stuffed = dot_stuffed(bytes.strip_suffix(b"\r\n").unwrap_or(bytes));
        for block in stuffed.chunks(BLOCK_BYTES) {
            match within(limit, self.wire.send_unless_refused(block)).await {
                Ok(None) => {}
                Ok(Some(refusal)) => return Err(self.verdict("body", &refusal)),
                Err(broken) => return Err(self.broken_before_end("body", bytes, &broken).await),
            }
        }
        match within(limit, self.wire.refusal_out_of_turn()).await {
            Ok(None) => Ok(()),
            Ok(Some(refusal)) => Err(self.verdict("body", &refusal)),
            Err(broken) => Err(self.broken_before_end("body", bytes, &broken).await),
        }
    }

    async fn send_end_mark(&mut self, bytes: &[u8], request: &Request<'_>) -> Report {
        let timeouts = self.email.settings.timeouts;
        let handed_before = self.wire.handed();
        let sent = within(timeouts.body, self.wire.send(END_MARK)).await;
        if let Err(broken) = &sent
            && self.wire.handed() == handed_before
        {
            return self.broken_before_end("body", bytes, broken).await;
        }
        let reply = match within(timeouts.final_dot, self.wire.reply()).await {
            Ok(reply) => reply,
            Err(broken) => {
                return Report::unknown(self.evidence(NO_ANSWER).with("reason", &self.clean(&broken.to_string())));
            }
        };
        self.in_step = true;
        match reply.class() {
            // A server can't have accepted a mail whose end it was not sent.
            Class::Completed if sent.is_ok() => {
                warn_of_odd_code(&reply, request);
                Report::delivered(self.evidence_of("end of data", &reply))
            }
            Class::Transient | Class::Permanent => self.verdict("end of data", &reply),
            Class::Preliminary | Class::Completed | Class::Intermediate => {
                Report::unknown(self.evidence_of(NO_ANSWER, &reply))
            }
        }
    }

    /// The connection broke while the end mark had not begun, so certainly nothing was delivered.
    /// What the relay said before it closed may still be read.
    async fn broken_before_end(&mut self, phase: &str, bytes: &[u8], broken: &Broken) -> Report {
        if matches!(broken, Broken::Io(_))
            && let Ok(reply) = within(self.email.settings.timeouts.command, self.wire.reply()).await
            && matches!(reply.class(), Class::Transient | Class::Permanent)
        {
            return self.verdict(phase, &reply);
        }
        // A relay that cuts off large mails says so by closing alone.
        let size_bytes = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        let evidence = self.evidence(phase).with("reason", &self.clean(&broken.to_string()));
        Report::deferred(evidence.with_number("size_bytes", size_bytes))
    }

    /// What a complete negative reply to the mail itself means.
    fn verdict(&self, phase: &str, reply: &Reply) -> Report {
        let evidence = self.evidence_of(phase, reply);
        if reply.class() == Class::Permanent { Report::refused(evidence) } else { Report::deferred(evidence) }
    }

    async fn ask(&mut self, command: &str) -> Result<Reply, Broken> {
        let answer = within(self.email.settings.timeouts.command, self.wire.exchange(command)).await;
        self.in_step = answer.is_ok();
        answer
    }

    /// Whatever isn't a complete 2yz is a fault of the channel.
    fn completed(&self, phase: &str, answer: Result<Reply, Broken>) -> Result<Reply, Report> {
        let reply = answer.map_err(|broken| self.lost_channel(phase, &broken))?;
        if reply.class() == Class::Completed {
            Ok(reply)
        } else {
            Err(Report::channel(self.evidence_of(phase, &reply)))
        }
    }

    fn lost_channel(&self, phase: &str, broken: &Broken) -> Report {
        Report::channel(self.evidence(phase).with("reason", &self.clean(&broken.to_string())))
    }

    fn lost(&self, phase: &str, broken: &Broken) -> Report {
        Report::deferred(self.evidence(phase).with("reason", &self.clean(&broken.to_string())))
    }

    fn evidence(&self, phase: &str) -> Evidence {
        let evidence = relay(self.email, phase).with("tls", if self.wire.is_tls() { "yes" } else { "no" });
        match &self.server {
            Some(server) => evidence.with("server", &self.clean(server)),
            None => evidence,
        }
    }

    fn evidence_of(&self, phase: &str, reply: &Reply) -> Evidence {
        with_codes(self.evidence(phase), reply).with("reply", &self.clean(&format!("{} {}", reply.code, reply.text())))
    }

    fn evidence_about(&self, recipient: &Recipient, reply: &Reply) -> Evidence {
        // A relay tells of an unknown user in many spellings, so of a hidden one only codes are kept.
        if recipient.hidden {
            with_codes(self.evidence("rcpt"), reply).with("recipient", "a bcc recipient")
        } else {
            self.evidence_of("rcpt", reply).with("recipient", recipient.address.as_ref())
        }
    }

    fn clean(&self, text: &str) -> String {
        self.hidden.iter().fold(text.to_owned(), |text, (hidden, instead)| replaced(&text, hidden, instead))
    }

    /// Says goodbye, if the connection is in a state for it, without anybody waiting: the outcome is
    /// known. Otherwise the connection is reset.
    fn leave(self) {
        let mut wire = self.wire;
        if !self.in_step || wire.close_gently().is_err() {
            return;
        }
        tokio::spawn(async move {
            let _ = within(QUIT_LIMIT, wire.exchange(&Quit.to_string())).await;
        });
    }
}

impl Extensions {
    fn read(reply: &Reply) -> Self {
        let mut offered = Self::default();
        for line in reply.lines.iter().skip(1) {
            let mut words = line.split([' ', '=']).map(str::to_ascii_uppercase);
            match words.next().as_deref() {
                Some("STARTTLS") => offered.starttls = true,
                Some("SIZE") => offered.size = true,
                Some("SMTPUTF8") => offered.smtputf8 = true,
                Some("AUTH") => {
                    for mechanism in words {
                        offered.plain |= mechanism == "PLAIN";
                        offered.login |= mechanism == "LOGIN";
                    }
                }
                _ => {}
            }
        }
        offered
    }
}

fn with_codes(evidence: Evidence, reply: &Reply) -> Evidence {
    let evidence = evidence.with_number("code", i64::from(reply.code));
    match reply.enhanced() {
        Some(enhanced) => evidence.with("enhanced", enhanced),
        None => evidence,
    }
}

fn warn_of_odd_code(reply: &Reply, request: &Request<'_>) {
    if reply.code != 250 {
        tracing::warn!(
            command = request.command.id,
            attempt = request.attempt_no,
            code = reply.code,
            "the relay accepted the mail with a code other than 250"
        );
    }
}

/// RFC 4616 §2.
fn plain_response(login: &Login) -> String {
    STANDARD.encode(format!("\0{}\0{}", login.username, login.password.expose_secret()))
}

/// Every line that begins with a dot gets one more (RFC 5321 §4.5.2).
fn dot_stuffed(bytes: &[u8]) -> Vec<u8> {
    let mut stuffed = Vec::with_capacity(bytes.len() + bytes.len() / 64);
    let mut is_line_start = true;
    for &byte in bytes {
        if is_line_start && byte == b'.' {
            stuffed.push(b'.');
        }
        stuffed.push(byte);
        is_line_start = byte == b'\n';
    }
    stuffed
}

/// Replaces every occurrence, whatever the case of its ASCII letters.
fn replaced(text: &str, hidden: &str, instead: &str) -> String {
    if hidden.is_empty() {
        return text.to_owned();
    }
    // Lower case of ASCII letters keeps the place of every byte.
    let (lower, hidden) = (text.to_ascii_lowercase(), hidden.to_ascii_lowercase());
    let mut clean = String::new();
    let mut rest = 0;
    for (place, found) in lower.match_indices(&hidden) {
        clean.push_str(&text[rest..place]);
        clean.push_str(instead);
        rest = place + found.len();
    }
    clean + &text[rest..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots() {
        for (bytes, right) in
            [(&b""[..], &b""[..]), (b".", b".."), (b"a.b\r\n.\r\n..c\r\nd.", b"a.b\r\n..\r\n...c\r\nd.")]
        {
            assert_eq!(dot_stuffed(bytes), right);
        }
    }

    #[test]
    fn hidden_texts() {
        assert_eq!(replaced("550 <Eve@Example.com> unknown", "eve@example.com", "(x)"), "550 <(x)> unknown");
        assert_eq!(replaced("Straße aß", "ß", "s"), "Strase as");
        assert_eq!(replaced("abc", "", "x"), "abc");
    }
}
