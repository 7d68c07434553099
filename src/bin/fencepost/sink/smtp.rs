//! The SMTP half (RFC 5321): strict about the dialogue, indifferent about content and addresses.
//!
//! Only CRLF, dot, CRLF ends a mail; a bare line feed never does, or one mail could smuggle another.
//! A mail whose end never came is no arrival. Nothing is ever passed on.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::BODY_BYTES_MAX;
use super::behaviour::Cut;
use super::store::{Content, Store};

/// RFC 5321 §4.5.3.1.4 asks for 512; addresses with SMTPUTF8 need more (RFC 6531 §3.4).
const COMMAND_BYTES_MAX: usize = 2_048;

const RECIPIENTS_MAX: usize = 1_000;

/// RFC 5321 §4.5.3.2.7: a server waits at least five minutes.
const SILENCE_MAX: Duration = Duration::from_secs(300);

/// A longer line of a mail is read in pieces of this size.
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// Serves one connection until either side ends it.
pub(super) async fn serve(stream: TcpStream, store: Arc<Store>) {
    // A failure only means slower replies.
    let _ = stream.set_nodelay(true);
    let mut session = Session { stream: BufReader::new(stream), store, helo: None, envelope: None };
    // Ends with an error when the client goes away, which is no news.
    let _ = session.converse().await;
}

struct Session {
    stream: BufReader<TcpStream>,
    store: Arc<Store>,
    helo: Option<String>,
    envelope: Option<Envelope>,
}

struct Envelope {
    from: String,
    to: Vec<String>,
    utf8: bool,
}

/// What follows a command.
enum Step {
    Reply(&'static str),
    Greet,
    Data,
    Quit,
}

impl Session {
    async fn converse(&mut self) -> io::Result<()> {
        self.reply("220 localhost ESMTP fencepost sink").await?;
        while let Some(line) = self.command().await? {
            let step = line.map_or(Step::Reply("500 5.5.2 line too long, or not UTF-8"), |line| self.obey(&line));
            match step {
                Step::Reply(text) => self.reply(text).await?,
                Step::Greet => self.greet().await?,
                Step::Quit => return self.reply("221 2.0.0 bye").await,
                Step::Data => {
                    if self.data().await? == Some(Cut::AfterAnswer) {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    async fn reply(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(format!("{text}\r\n").as_bytes()).await
    }

    async fn greet(&mut self) -> io::Result<()> {
        let extensions = format!(
            "250-SIZE {BODY_BYTES_MAX}\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250-PIPELINING\r\n250 ENHANCEDSTATUSCODES"
        );
        self.reply(&format!("250-localhost\r\n{extensions}")).await
    }

    /// The next command without its end; `Some(None)` for one that is no text or too long, `None`
    /// after the last one.
    async fn command(&mut self) -> io::Result<Option<Option<String>>> {
        let mut line = self.piece(COMMAND_BYTES_MAX).await?;
        let complete = line.ends_with(b"\n");
        if line.is_empty() {
            return Ok(None);
        }
        while !line.ends_with(b"\n") {
            line = self.piece(COMMAND_BYTES_MAX).await?;
            if line.is_empty() {
                return Ok(None);
            }
        }
        let text = String::from_utf8(line).ok().filter(|_| complete);
        Ok(Some(text.map(|text| text.trim_end().to_owned())))
    }

    /// Bytes up to and with the next line feed, at most `max`; empty at the end of the stream.
    async fn piece(&mut self, max: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut limited = (&mut self.stream).take(u64::try_from(max).unwrap_or(u64::MAX));
        timeout(SILENCE_MAX, limited.read_until(b'\n', &mut bytes)).await.map_err(io::Error::from)??;
        Ok(bytes)
    }

    fn obey(&mut self, line: &str) -> Step {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb.to_ascii_uppercase().as_str() {
            "EHLO" if rest.is_empty() => Step::Reply("501 5.5.4 say who you are"),
            "HELO" if rest.is_empty() => Step::Reply("501 5.5.4 say who you are"),
            "EHLO" => self.hello(rest, Step::Greet),
            "HELO" => self.hello(rest, Step::Reply("250 localhost")),
            "MAIL" => Step::Reply(self.mail(rest)),
            "RCPT" => Step::Reply(self.recipient(rest)),
            "DATA" => self.may_send(),
            "RSET" => {
                self.envelope = None;
                Step::Reply("250 2.0.0 reset")
            }
            "NOOP" => Step::Reply("250 2.0.0 well"),
            "VRFY" => Step::Reply("252 2.5.0 everyone is accepted"),
            "QUIT" => Step::Quit,
            "STARTTLS" | "AUTH" => Step::Reply("502 5.5.1 the sink has no TLS and no login"),
            _ => Step::Reply("500 5.5.1 unknown command"),
        }
    }

    fn hello(&mut self, name: &str, step: Step) -> Step {
        self.helo = Some(name.to_owned());
        self.envelope = None;
        step
    }

    fn mail(&mut self, rest: &str) -> &'static str {
        if self.helo.is_none() {
            return "503 5.5.1 say EHLO first";
        }
        if self.envelope.is_some() {
            return "503 5.5.1 there is a sender already";
        }
        let Some((from, parameters)) = path(rest, "FROM:") else {
            return "501 5.5.4 write MAIL FROM:<address>";
        };
        let utf8 = match parameters_utf8(parameters) {
            Ok(utf8) => utf8,
            Err(reply) => return reply,
        };
        if !utf8 && !from.is_ascii() {
            return "553 5.6.7 this address needs SMTPUTF8";
        }
        self.envelope = Some(Envelope { from: from.to_owned(), to: Vec::new(), utf8 });
        "250 2.1.0 sender accepted"
    }

    fn recipient(&mut self, rest: &str) -> &'static str {
        let Some(envelope) = &mut self.envelope else {
            return "503 5.5.1 say MAIL first";
        };
        match path(rest, "TO:") {
            None | Some(("", _)) => "501 5.5.4 write RCPT TO:<address>",
            Some((_, parameters)) if !parameters.is_empty() => "555 5.5.4 unknown parameter",
            Some((to, _)) if !envelope.utf8 && !to.is_ascii() => "553 5.6.7 this address needs SMTPUTF8",
            Some(_) if envelope.to.len() >= RECIPIENTS_MAX => "452 4.5.3 too many recipients",
            Some((to, _)) => {
                envelope.to.push(to.to_owned());
                "250 2.1.5 recipient accepted"
            }
        }
    }

    fn may_send(&self) -> Step {
        match &self.envelope {
            None => Step::Reply("503 5.5.1 say MAIL first"),
            Some(envelope) if envelope.to.is_empty() => Step::Reply("503 5.5.1 say RCPT first"),
            Some(_) => Step::Data,
        }
    }

    /// Takes a mail and answers its end. The cut that was made, if any: the connection ends then.
    async fn data(&mut self) -> io::Result<Option<Cut>> {
        self.reply("354 end with a dot on a line of its own").await?;
        let message = self.message().await?;
        let (Some(envelope), Some(helo)) = (self.envelope.take(), self.helo.clone()) else { return Ok(None) };
        let Some(message) = message else {
            self.reply("552 5.3.4 the mail is larger than the sink takes").await?;
            return Ok(None);
        };
        match self.store.record(Content::Email { helo, from: envelope.from, to: envelope.to, message }) {
            Ok(no) => self.answer(no).await,
            Err(error) => {
                eprintln!("fencepost: can't write the log: {error}");
                self.reply("451 4.3.0 the sink can't write its log").await?;
                Ok(None)
            }
        }
    }

    async fn answer(&mut self, no: u64) -> io::Result<Option<Cut>> {
        tokio::time::sleep(Duration::from_millis(self.store.behaviour().mail.delay_ms)).await;
        let mail = self.store.released(|behaviour| behaviour.mail.hold).await.mail;
        if mail.cut == Some(Cut::BeforeAnswer) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let reply = mail.reply.unwrap_or_else(|| format!("250 2.0.0 accepted as {no}"));
        self.reply(&reply).await?;
        Ok(mail.cut)
    }

    /// The mail without its dots; `None` if it is too large, read to its end all the same.
    async fn message(&mut self) -> io::Result<Option<Vec<u8>>> {
        let (mut message, mut too_large) = (Vec::new(), false);
        let (mut at_line_start, mut after_return) = (true, false);
        loop {
            let piece = self.piece(PIECE_BYTES_MAX).await?;
            if piece.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if at_line_start && piece == b".\r\n" {
                return Ok((!too_large).then_some(message));
            }
            let text = piece.strip_prefix(b".").filter(|_| at_line_start).unwrap_or(&piece);
            too_large |= message.len() + text.len() > BODY_BYTES_MAX;
            if !too_large {
                message.extend_from_slice(text);
            }
            at_line_start = piece.ends_with(b"\r\n") || (after_return && piece == b"\n");
            after_return = piece.ends_with(b"\r");
        }
    }
}

/// The address in `FROM:<address> parameters`, and the parameters. A quoted local part may hold
/// anything.
fn path<'a>(rest: &'a str, word: &str) -> Option<(&'a str, &'a str)> {
    let prefix = rest.get(..word.len()).filter(|prefix| prefix.eq_ignore_ascii_case(word))?;
    let text = rest.get(prefix.len()..)?.strip_prefix('<')?;
    let (mut quoted, mut escaped) = (false, false);
    let end = text.char_indices().find_map(|(at, c)| {
        let literal = escaped;
        escaped = quoted && !literal && c == '\\';
        quoted ^= c == '"' && !literal;
        (c == '>' && !quoted).then_some(at)
    })?;
    let parameters = text.get(end + 1..)?;
    let separated = parameters.is_empty() || parameters.starts_with(' ');
    separated.then_some((text.get(..end)?, parameters.trim()))
}

/// Whether SMTPUTF8 is asked for; the reply to a parameter that can't be obeyed.
fn parameters_utf8(parameters: &str) -> Result<bool, &'static str> {
    let mut utf8 = false;
    for parameter in parameters.split_ascii_whitespace() {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match (name.to_ascii_uppercase().as_str(), value.to_ascii_uppercase().as_str()) {
            ("SMTPUTF8", "") => utf8 = true,
            ("BODY", "7BIT" | "8BITMIME") => {}
            ("SIZE", size) => match size.parse::<usize>() {
                Ok(size) if size <= BODY_BYTES_MAX => {}
                Ok(_) => return Err("552 5.3.4 the mail is larger than the sink takes"),
                Err(_) => return Err("501 5.5.4 SIZE takes a number"),
            },
            _ => return Err("555 5.5.4 unknown parameter"),
        }
    }
    Ok(utf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_apart() {
        for (rest, expected) in [
            ("FROM:<>", Some(("", ""))),
            ("from:<a@example.com> SIZE=5 BODY=8BITMIME", Some(("a@example.com", "SIZE=5 BODY=8BITMIME"))),
            ("FROM:<\"a> \\\"b\"@example.com>", Some(("\"a> \\\"b\"@example.com", ""))),
            ("FROM: <a@example.com>", None),
            ("FROM:a@example.com", None),
            ("FROM:<a@example.com", None),
            ("FROM:<a@example.com>x", None),
            ("TO:<a@example.com>", None),
        ] {
            assert_eq!(path(rest, "FROM:"), expected, "{rest}");
        }
    }

    #[test]
    fn parameters_are_checked() {
        assert_eq!(parameters_utf8("SIZE=10 body=8bitmime smtputf8"), Ok(true));
        assert_eq!(parameters_utf8(""), Ok(false));
        for (parameters, code) in [("SIZE=99999999999", "552"), ("SIZE=x", "501"), ("RET=FULL", "555")] {
            assert!(parameters_utf8(parameters).is_err_and(|reply| reply.starts_with(code)), "{parameters}");
        }
    }
}
