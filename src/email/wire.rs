//! One SMTP connection at the level of bytes: what was handed to the kernel, what came back.
//!
//! Two questions decide an outcome, and both are about single bytes: had the end mark begun to
//! leave, and was the answer complete? So the stream counts what the kernel took, below TLS, and
//! replies are read here. (The client of lettre can't read a legal `250` without text, a code such
//! as 571, or a text in Latin-1; it falls silent over them, which after the final dot would turn a
//! clear answer into doubt.) Nothing here knows commands or outcomes, and nothing waits without the
//! caller's deadline.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::clock;

/// The greatest length of a reply, all its lines together.
const REPLY_BYTES_MAX: usize = 65_536;

/// A complete reply (RFC 5321 §4.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) code: u16,
    pub(super) lines: Vec<String>,
}

/// What the first digit says. Text never decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Preliminary,
    Completed,
    Intermediate,
    Transient,
    Permanent,
}

impl Reply {
    pub(super) fn class(&self) -> Class {
        match self.code / 100 {
            1 => Class::Preliminary,
            2 => Class::Completed,
            3 => Class::Intermediate,
            4 => Class::Transient,
            _ => Class::Permanent,
        }
    }

    pub(super) fn text(&self) -> String {
        self.lines.join(" ")
    }

    /// The enhanced status code (RFC 2034 §4), where the text begins with one.
    pub(super) fn enhanced(&self) -> Option<&str> {
        let word = self.lines.first()?.split(' ').next()?;
        let parts: Vec<&str> = word.split('.').collect();
        let is_number = |part: &&str| (1..=3).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        (parts.len() == 3 && ["2", "4", "5"].contains(&parts[0]) && parts.iter().all(is_number)).then_some(word)
    }
}

/// Why a step has no answer.
#[derive(Debug)]
pub(super) enum Broken {
    /// The peer closed the connection.
    Closed,
    /// The peer closed it in the middle of a reply.
    HalfReply(String),
    /// What came is not a reply.
    Malformed,
    /// A reply came that nothing had asked for.
    OutOfTurn,
    /// Our own deadline passed.
    TimedOut,
    /// The operating system, or TLS.
    Io(io::Error),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("connection closed"),
            Self::HalfReply(text) => write!(f, "connection closed in the middle of a reply: {text}"),
            Self::Malformed => f.write_str("not an SMTP reply"),
            Self::OutOfTurn => f.write_str("a reply out of turn"),
            Self::TimedOut => f.write_str("timeout"),
            Self::Io(error) => write!(f, "connection broken: {error}"),
        }
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Ends a step at its deadline, a suspend of the machine included.
pub(super) async fn within<T>(limit: Duration, step: impl Future<Output = Result<T, Broken>>) -> Result<T, Broken> {
    clock::within(limit, step).await.unwrap_or(Err(Broken::TimedOut))
}

/// A TCP stream that counts the bytes that the kernel took.
#[derive(Debug)]
struct Observed {
    tcp: TcpStream,
    handed: u64,
}

impl AsyncRead for Observed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for Observed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let taken = ready!(Pin::new(&mut self.tcp).poll_write(cx, bytes))?;
        self.handed += taken as u64;
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[derive(Debug)]
enum Stream {
    Plain(Observed),
    Tls(Box<TlsStream<Observed>>),
    /// In the middle of a handshake, or after one that failed.
    Gone,
}

impl Stream {
    fn observed(&self) -> Option<&Observed> {
        match self {
            Self::Plain(observed) => Some(observed),
            Self::Tls(tls) => Some(tls.get_ref().0),
            Self::Gone => None,
        }
    }
}

fn gone<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(plain) => Pin::new(plain).poll_read(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
            Self::Gone => gone(),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(plain) => Pin::new(plain).poll_write(cx, bytes),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, bytes),
            Self::Gone => gone(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(plain) => Pin::new(plain).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
            Self::Gone => gone(),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(plain) => Pin::new(plain).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
            Self::Gone => gone(),
        }
    }
}

/// A connection, and what was read from it but not yet understood.
#[derive(Debug)]
pub(super) struct Wire {
    stream: Stream,
    inbox: Vec<u8>,
}

impl Wire {
    /// Takes over a connected socket and sets what a sender needs.
    ///
    /// With linger at zero a dropped connection is reset, and bytes that still wait in the send
    /// buffer can't arrive after the attempt was given up. `unacknowledged` bounds how long sent
    /// bytes may lack an acknowledgement, which notices a peer that is gone without a word.
    pub(super) fn new(tcp: TcpStream, unacknowledged: Duration) -> io::Result<Self> {
        tcp.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_linger(&tcp, Some(Duration::ZERO))?;
        let limit_ms = u32::try_from(unacknowledged.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&tcp, limit_ms)?;
        Ok(Self { stream: Stream::Plain(Observed { tcp, handed: 0 }), inbox: Vec::new() })
    }

    /// Speaks TLS from here on. Fails if the peer said more than the reply before: what came in
    /// clear text must not count as said inside TLS.
    pub(super) async fn start_tls(
        &mut self,
        connector: TlsConnector,
        name: rustls_pki_types::ServerName<'static>,
    ) -> Result<(), Broken> {
        if !self.inbox.is_empty() {
            return Err(Broken::OutOfTurn);
        }
        let Stream::Plain(plain) = std::mem::replace(&mut self.stream, Stream::Gone) else {
            return Err(Broken::Io(io::ErrorKind::NotConnected.into()));
        };
        self.stream = Stream::Tls(Box::new(connector.connect(name, plain).await?));
        Ok(())
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self.stream, Stream::Tls(_))
    }

    pub(super) fn is_loopback(&self) -> bool {
        let peer = self.stream.observed().and_then(|observed| observed.tcp.peer_addr().ok());
        peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback())
    }

    /// How many bytes the kernel has taken.
    pub(super) fn handed(&self) -> u64 {
        self.stream.observed().map_or(0, |observed| observed.handed)
    }

    /// Lets a later close send what is still in the buffer, instead of a reset.
    pub(super) fn close_gently(&self) -> io::Result<()> {
        let Some(observed) = self.stream.observed() else { return Ok(()) };
        Ok(rustix::net::sockopt::set_socket_linger(&observed.tcp, None)?)
    }

    /// Hands everything to the kernel.
    pub(super) async fn send(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await?;
        Ok(())
    }

    /// Sends a command and reads the reply. If a refusal waits already (a relay that shuts down says
    /// 421 unasked), it is the answer, and the command isn't sent.
    pub(super) async fn exchange(&mut self, command: &str) -> Result<Reply, Broken> {
        if let Some(reply) = self.refusal_out_of_turn().await? {
            return Ok(reply);
        }
        self.send(command.as_bytes()).await?;
        self.reply().await
    }

    /// The next reply.
    pub(super) async fn reply(&mut self) -> Result<Reply, Broken> {
        loop {
            if let Some(reply) = take_reply(&mut self.inbox)? {
                return Ok(reply);
            }
            let read = std::future::poll_fn(|cx| self.poll_fill(cx)).await?;
            if read == 0 {
                return Err(self.closed());
            }
        }
    }

    /// A refusal that came before we said what it could answer. Any other reply that waits would be
    /// taken for the answer to the next step, so it ends the connection.
    pub(super) async fn refusal_out_of_turn(&mut self) -> Result<Option<Reply>, Broken> {
        let read = std::future::poll_fn(|cx| match self.poll_fill(cx) {
            Poll::Ready(read) => Poll::Ready(read.map(Some)),
            Poll::Pending => Poll::Ready(Ok(None)),
        });
        let read = read.await?;
        if self.inbox.is_empty() {
            return if read == Some(0) { Err(Broken::Closed) } else { Ok(None) };
        }
        only_refusal(self.reply().await?).map(Some)
    }

    /// Sends a block of the body, and stops as soon as the peer refuses the mail meanwhile.
    pub(super) async fn send_unless_refused(&mut self, block: &[u8]) -> Result<Option<Reply>, Broken> {
        let mut sent = 0;
        loop {
            if let Some(reply) = take_reply(&mut self.inbox)? {
                return only_refusal(reply).map(Some);
            }
            let step = std::future::poll_fn(|cx| match self.poll_fill(cx) {
                Poll::Ready(read) => Poll::Ready(Step::Read(read)),
                Poll::Pending if sent < block.len() => {
                    Pin::new(&mut self.stream).poll_write(cx, &block[sent..]).map(Step::Wrote)
                }
                Poll::Pending => Pin::new(&mut self.stream).poll_flush(cx).map(Step::Flushed),
            });
            match step.await {
                Step::Read(read) => {
                    if read? == 0 {
                        return Err(self.closed());
                    }
                }
                Step::Wrote(wrote) => match wrote? {
                    0 => return Err(Broken::Io(io::ErrorKind::WriteZero.into())),
                    count => sent += count,
                },
                Step::Flushed(flushed) => return flushed.map(|()| None).map_err(Broken::Io),
            }
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = [0_u8; 2_048];
        let mut buf = ReadBuf::new(&mut space);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf))?;
        self.inbox.extend_from_slice(buf.filled());
        Poll::Ready(Ok(buf.filled().len()))
    }

    fn closed(&self) -> Broken {
        if self.inbox.is_empty() {
            Broken::Closed
        } else {
            Broken::HalfReply(String::from_utf8_lossy(&self.inbox).trim_end().to_owned())
        }
    }
}

enum Step {
    Read(io::Result<usize>),
    Wrote(io::Result<usize>),
    Flushed(io::Result<()>),
}

fn only_refusal(reply: Reply) -> Result<Reply, Broken> {
    match reply.class() {
        Class::Transient | Class::Permanent => Ok(reply),
        Class::Preliminary | Class::Completed | Class::Intermediate => Err(Broken::OutOfTurn),
    }
}

/// Takes the first complete reply out of what was read.
fn take_reply(inbox: &mut Vec<u8>) -> Result<Option<Reply>, Broken> {
    let mut reply: Option<Reply> = None;
    let mut start = 0;
    while let Some(length) = inbox[start..].iter().position(|b| *b == b'\n') {
        let line = &inbox[start..start + length];
        let (code, is_last, text) = split_line(line.strip_suffix(b"\r").unwrap_or(line)).ok_or(Broken::Malformed)?;
        let reply = reply.get_or_insert_with(|| Reply { code, lines: Vec::new() });
        if reply.code != code {
            return Err(Broken::Malformed);
        }
        reply.lines.push(text);
        start += length + 1;
        if is_last {
            let reply = reply.clone();
            inbox.drain(..start);
            return Ok(Some(reply));
        }
    }
    if inbox.len() > REPLY_BYTES_MAX { Err(Broken::Malformed) } else { Ok(None) }
}

/// Code, whether it is the last line, text. The text may be missing (RFC 5321 §4.2).
fn split_line(line: &[u8]) -> Option<(u16, bool, String)> {
    let (code, rest) = line.split_at_checked(3)?;
    if !code.iter().all(u8::is_ascii_digit) || !(b'1'..=b'5').contains(&code[0]) {
        return None;
    }
    let number = code.iter().fold(0, |number, digit| number * 10 + u16::from(digit - b'0'));
    let is_last = match rest.first() {
        None | Some(b' ') => true,
        Some(b'-') => false,
        Some(_) => return None,
    };
    Some((number, is_last, String::from_utf8_lossy(rest.get(1..).unwrap_or_default()).trim_end().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a reply counts only when it is complete, and every legal one is understood. Method:
    /// bytes in, reply and rest out.
    #[test]
    fn replies() {
        let reply = |code, lines: &[&str]| Some(Reply { code, lines: lines.iter().map(|l| (*l).to_owned()).collect() });
        for (bytes, right, rest) in [
            (&b"250 2.0.0 ok\r\n"[..], reply(250, &["2.0.0 ok"]), &b""[..]),
            (b"250\r\n", reply(250, &[""]), b""),
            (b"250 ok\n", reply(250, &["ok"]), b""),
            (b"571 no\r\n", reply(571, &["no"]), b""),
            (b"250-a\r\n250 b\r\n220 c", reply(250, &["a", "b"]), b"220 c"),
            (b"250 gr\xfc\xdfe\r\n", reply(250, &["gr\u{fffd}\u{fffd}e"]), b""),
            (b"", None, b""),
            (b"250", None, b"250"),
            (b"250 ok", None, b"250 ok"),
            (b"250 ok\r", None, b"250 ok\r"),
            (b"250-queued\r\n", None, b"250-queued\r\n"),
        ] {
            let mut inbox = bytes.to_vec();
            assert_eq!(take_reply(&mut inbox).expect("well formed"), right, "{bytes:?}");
            assert_eq!(inbox, rest, "{bytes:?}");
        }
        for bytes in [&b"hello\r\n"[..], b"25 ok\r\n", b"650 ok\r\n", b"250_ok\r\n", b"250-a\r\n251 b\r\n", b"\r\n"] {
            assert!(take_reply(&mut bytes.to_vec()).is_err(), "{bytes:?}");
        }
        assert!(take_reply(&mut vec![b'2'; REPLY_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn enhanced_codes() {
        let enhanced = |text: &str| Reply { code: 550, lines: vec![text.to_owned()] }.enhanced().map(str::to_owned);
        assert_eq!(enhanced("5.1.1 no such user").as_deref(), Some("5.1.1"));
        assert_eq!(enhanced("4.7.500 busy").as_deref(), Some("4.7.500"));
        assert_eq!(enhanced("192.0.2.1 is listed"), None);
        assert_eq!(enhanced("no such user"), None);
    }
}
