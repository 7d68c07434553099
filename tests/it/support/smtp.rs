//! A scripted SMTP server: it records every session and answers as it was told.
//!
//! It runs on threads with blocking sockets, apart from the code under test, and it is strict: only
//! `CRLF.CRLF` ends a mail. Without a script it accepts everything. A script may change while the
//! server runs; a session reads it anew at each step. Nothing that it does depends on time.
//!
//! ```ignore
//! let server = Server::start(Script::new().reply(Stage::Mail, "451 4.3.0 later"));
//! // … send to 127.0.0.1:server.port() …
//! server.set_script(Script::new().dots([Dot::Close, Dot::Reply("250 2.0.0 queued as 7".into())]));
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// A step of the dialogue at which the server answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The greeting.
    Banner,
    /// EHLO; a reply given here replaces the list of extensions.
    Ehlo,
    Helo,
    Starttls,
    /// The last answer of a login.
    Auth,
    Mail,
    /// Every RCPT that has no answer of its own.
    Rcpt,
    /// RCPT for this address.
    RcptTo(String),
    Data,
    /// The final dot. See also [`Script::dots`].
    Dot,
    Rset,
    Noop,
    Quit,
}

/// What happens at the final dot. The mail is recorded before.
#[derive(Clone, Debug)]
pub enum Dot {
    /// A line, to which CRLF is added; the session goes on.
    Reply(String),
    /// A line, to which CRLF is added, then an orderly close.
    ReplyThenClose(String),
    /// These bytes as they are, then an orderly close (half a reply).
    BytesThenClose(Vec<u8>),
    /// An orderly close.
    Close,
    /// A close of TLS (`close_notify`), then of TCP.
    CloseNotify,
    /// A TCP reset.
    Reset,
    /// Nothing until the client goes away.
    Silent,
}

/// How TLS is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// From the first byte.
    Implicit,
    /// After STARTTLS, which EHLO offers.
    Starttls,
}

/// What happens while the body comes in.
#[derive(Clone, Debug)]
struct Cut {
    after: usize,
    reply: String,
    reset: bool,
}

/// How the server answers.
#[derive(Clone, Debug, Default)]
pub struct Script {
    replies: HashMap<Stage, String>,
    extensions: Vec<String>,
    dots: VecDeque<Dot>,
    held: HashSet<Stage>,
    closing: HashSet<Stage>,
    cut: Option<Cut>,
    logins: Option<(String, String)>,
}

impl Script {
    /// Accepts everything, without extensions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Answers this line (CRLF is added) at this stage. Lines of a longer reply go between `\r\n`.
    #[must_use]
    pub fn reply(mut self, stage: Stage, line: &str) -> Self {
        self.replies.insert(stage, line.to_owned());
        self
    }

    /// Closes the connection after the answer of this stage.
    #[must_use]
    pub fn close_after(mut self, stage: Stage) -> Self {
        self.closing.insert(stage);
        self
    }

    /// Offers this in the answer to EHLO.
    #[must_use]
    pub fn offer(mut self, extension: &str) -> Self {
        self.extensions.push(extension.to_owned());
        self
    }

    /// The first mail meets the first of these, and so on; the last one stays.
    #[must_use]
    pub fn dots(mut self, dots: impl IntoIterator<Item = Dot>) -> Self {
        self.dots = dots.into_iter().collect();
        self
    }

    /// Waits with the answer of this stage until [`Server::release`].
    #[must_use]
    pub fn hold(mut self, stage: Stage) -> Self {
        self.held.insert(stage);
        self
    }

    /// Once so many bytes of the body came in, says this line (if it isn't empty) and closes.
    #[must_use]
    pub fn cut_body(mut self, after: usize, reply: &str) -> Self {
        self.cut = Some(Cut { after, reply: reply.to_owned(), reset: false });
        self
    }

    /// Once so many bytes of the body came in, resets the connection.
    #[must_use]
    pub fn reset_body(mut self, after: usize) -> Self {
        self.cut = Some(Cut { after, reply: String::new(), reset: true });
        self
    }

    /// Accepts this login only; others get 535.
    #[must_use]
    pub fn login(mut self, user: &str, password: &str) -> Self {
        self.logins = Some((user.to_owned(), password.to_owned()));
        self
    }

    fn next_dot(&mut self) -> Dot {
        if self.dots.len() > 1 {
            return self.dots.pop_front().unwrap();
        }
        self.dots.front().cloned().unwrap_or_else(|| Dot::Reply("250 2.0.0 queued".to_owned()))
    }
}

/// A mail whose end mark came in, whatever the answer was.
#[derive(Clone, Debug)]
pub struct Mail {
    /// Which session it came over, from 0.
    pub session: usize,
    /// The address of MAIL.
    pub from: String,
    /// The addresses of the RCPTs that were accepted.
    pub recipients: Vec<String>,
    /// The bytes between 354 and the end mark, as they came, with the line end that begins the mark.
    pub raw: Vec<u8>,
}

impl Mail {
    /// The mail as it was sent: dots that were added for the transport are taken away.
    pub fn data(&self) -> Vec<u8> {
        let mut data = Vec::new();
        for line in self.raw.split_inclusive(|b| *b == b'\n') {
            data.extend_from_slice(line.strip_prefix(b".").unwrap_or(line));
        }
        data
    }

    /// The header block, unfolded: name and value of each line in turn.
    pub fn headers(&self) -> Vec<(String, String)> {
        let data = String::from_utf8(self.data()).expect("a mail is UTF-8");
        let block = data.split("\r\n\r\n").next().unwrap().replace("\r\n ", " ").replace("\r\n\t", " ");
        block
            .split("\r\n")
            .map(|line| {
                let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("not a header: {line:?}"));
                (name.to_owned(), value.trim().to_owned())
            })
            .collect()
    }

    /// The value of a header, if it is there.
    pub fn header(&self, name: &str) -> Option<String> {
        self.headers().into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// What comes after the header block.
    pub fn body(&self) -> Vec<u8> {
        let data = self.data();
        let end = data.windows(4).position(|four| four == b"\r\n\r\n").expect("an end of the header");
        data[end + 4..].to_vec()
    }
}

/// One connection.
#[derive(Clone, Debug, Default)]
pub struct Session {
    /// Every command line, without its end, answers of a login included.
    pub commands: Vec<String>,
    /// Whether TLS was up at the end.
    pub tls: bool,
    /// Name and password of a login that was accepted or refused.
    pub login: Option<(String, String)>,
    /// Bytes of bodies that came in, end marks included.
    pub body_bytes: usize,
    /// Whether it has ended.
    pub ended: bool,
    /// Whether the client ended it with a TCP reset.
    pub reset: bool,
}

impl Session {
    /// The first words of the commands.
    pub fn verbs(&self) -> Vec<String> {
        self.commands.iter().map(|line| line.split([' ', ':']).next().unwrap().to_owned()).collect()
    }
}

#[derive(Default)]
struct Log {
    script: Script,
    sessions: Vec<Session>,
    mails: Vec<Mail>,
    sockets: HashMap<usize, TcpStream>,
    threads: Vec<JoinHandle<()>>,
    released: bool,
}

type ServerTls = (TlsMode, Arc<rustls::ServerConfig>);

struct Shared {
    log: Mutex<Log>,
    changed: Condvar,
    stopping: AtomicBool,
    tls: Option<ServerTls>,
}

/// The server. It stops, and closes every session, when it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    port: u16,
    acceptor: Option<JoinHandle<()>>,
    certificate: Option<String>,
}

impl Server {
    /// Starts on a free port of 127.0.0.1, in plain text.
    pub fn start(script: Script) -> Self {
        Self::launch(script, None, None)
    }

    /// Starts with TLS and a certificate of its own for `localhost` and 127.0.0.1.
    pub fn start_tls(script: Script, mode: TlsMode) -> Self {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let made = rcgen::generate_simple_self_signed(names).expect("a certificate");
        let chain = vec![CertificateDer::from(made.cert.der().to_vec())];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("a certificate with its key");
        Self::launch(script, Some((mode, Arc::new(config))), Some(made.cert.pem()))
    }

    fn launch(script: Script, tls: Option<ServerTls>, certificate: Option<String>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().unwrap().port();
        let log = Mutex::new(Log { script, ..Log::default() });
        let shared = Arc::new(Shared { log, changed: Condvar::new(), stopping: AtomicBool::new(false), tls });
        let for_acceptor = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accept(&listener, &for_acceptor));
        Self { shared, port, acceptor: Some(acceptor), certificate }
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Writes the server's certificate, for use as the only root.
    pub fn write_certificate(&self, path: &Path) {
        std::fs::write(path, self.certificate.as_ref().expect("a server with TLS")).unwrap();
    }

    /// Replaces the script; sessions see it at their next step, and those that are held go by it at
    /// once. What it holds is held until the next [`Server::release`].
    pub fn set_script(&self, script: Script) {
        self.shared.record(|log| {
            log.script = script;
            log.released = false;
        });
    }

    /// Lets every stage that is held go on, now and until the next script.
    pub fn release(&self) {
        self.shared.log().released = true;
        self.shared.changed.notify_all();
    }

    /// The mails whose end mark came in, in order.
    pub fn mails(&self) -> Vec<Mail> {
        self.shared.log().mails.clone()
    }

    /// All sessions so far, in the order of their connections.
    pub fn sessions(&self) -> Vec<Session> {
        self.shared.log().sessions.clone()
    }

    /// How many connections were made.
    pub fn connections(&self) -> usize {
        self.shared.log().sessions.len()
    }

    /// Waits until so many mails came in, and returns them.
    pub fn wait_for_mails(&self, count: usize) -> Vec<Mail> {
        self.wait_for(&format!("{count} mails"), |log| log.mails.len() >= count).mails.clone()
    }

    /// Waits until a command that begins with this came in, in any session.
    pub fn wait_for_command(&self, start: &str) {
        drop(self.wait_for(start, |log| {
            log.sessions.iter().flat_map(|session| &session.commands).any(|line| line.starts_with(start))
        }));
    }

    /// Waits until so many sessions have ended, and returns all.
    pub fn wait_for_ended(&self, count: usize) -> Vec<Session> {
        let ended = |log: &Log| log.sessions.iter().filter(|session| session.ended).count() >= count;
        self.wait_for(&format!("{count} ended sessions"), ended).sessions.clone()
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&Log) -> bool) -> MutexGuard<'_, Log> {
        let limit = Duration::from_secs(20);
        let log = self.shared.log();
        let (log, waited) = self.shared.changed.wait_timeout_while(log, limit, |log| !condition(log)).unwrap();
        assert!(!waited.timed_out(), "not within {limit:?}: {what}; sessions: {:#?}", log.sessions);
        log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which then sees that it is to stop.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        let threads = {
            let mut log = self.shared.log();
            for socket in log.sockets.values() {
                let _ = socket.shutdown(Shutdown::Both);
            }
            std::mem::take(&mut log.threads)
        };
        self.shared.changed.notify_all();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn record(&self, change: impl FnOnce(&mut Log)) {
        change(&mut self.log());
        self.changed.notify_all();
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for socket in listener.incoming() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(socket) = socket else { continue };
        let _ = socket.set_nodelay(true);
        let mut log = shared.log();
        let number = log.sessions.len();
        log.sockets.insert(number, socket.try_clone().unwrap());
        log.sessions.push(Session::default());
        let for_thread = Arc::clone(shared);
        log.threads.push(std::thread::spawn(move || {
            let end = serve(socket, number, &for_thread);
            for_thread.record(|log| {
                log.sessions[number].reset = end.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset);
                // The last handle: its end is what the peer sees as the close.
                log.sockets.remove(&number);
                log.sessions[number].ended = true;
            });
        }));
    }
}

type Tls = rustls::StreamOwned<rustls::ServerConnection, TcpStream>;

enum Duplex {
    Plain(TcpStream),
    Tls(Box<Tls>),
}

impl Read for Duplex {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(plain) => plain.read(space),
            Self::Tls(tls) => tls.read(space),
        }
    }
}

impl Write for Duplex {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(plain) => plain.write(bytes),
            Self::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(plain) => plain.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}

/// Ends a session; the socket is closed by dropping it, or was reset.
type Flow = io::Result<()>;

fn ended() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

struct Conversation {
    peer: BufReader<Duplex>,
    socket: TcpStream,
    number: usize,
    shared: Arc<Shared>,
    from: String,
    recipients: Vec<String>,
    tls: bool,
}

fn serve(socket: TcpStream, number: usize, shared: &Arc<Shared>) -> Flow {
    let plain = Duplex::Plain(socket.try_clone()?);
    let mut conversation = Conversation {
        peer: BufReader::new(plain),
        socket,
        number,
        shared: Arc::clone(shared),
        from: String::new(),
        recipients: Vec::new(),
        tls: false,
    };
    if matches!(shared.tls, Some((TlsMode::Implicit, _))) {
        conversation.start_tls()?;
    }
    conversation.answer(Stage::Banner, "220 mx.example.com ESMTP test")?;
    while conversation.step()? {}
    Ok(())
}

impl Conversation {
    fn start_tls(&mut self) -> Flow {
        let (_, config) = self.shared.tls.as_ref().expect("TLS is set up");
        let mut tls = rustls::ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        let mut tcp = self.socket.try_clone()?;
        while tls.is_handshaking() {
            tls.complete_io(&mut tcp)?;
        }
        self.peer = BufReader::new(Duplex::Tls(Box::new(rustls::StreamOwned::new(tls, tcp))));
        self.tls = true;
        let number = self.number;
        self.shared.record(|log| log.sessions[number].tls = true);
        Ok(())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.peer.read_until(b'\n', &mut bytes)?;
        let line = bytes.strip_suffix(b"\r\n").ok_or_else(ended)?;
        let line = String::from_utf8_lossy(line).into_owned();
        let number = self.number;
        self.shared.record(|log| log.sessions[number].commands.push(line.clone()));
        Ok(line)
    }

    fn say(&mut self, bytes: &[u8]) -> Flow {
        self.peer.get_mut().write_all(bytes)?;
        self.peer.get_mut().flush()
    }

    /// Answers as the script says, or else so. Tells the line that was said.
    fn answer(&mut self, stage: Stage, usual: &str) -> io::Result<String> {
        self.wait_while_held(&stage)?;
        let script = self.shared.log().script.clone();
        let line = script.replies.get(&stage).cloned().unwrap_or_else(|| usual.to_owned());
        self.say(format!("{line}\r\n").as_bytes())?;
        if script.closing.contains(&stage) { Err(ended()) } else { Ok(line) }
    }

    fn wait_while_held(&self, stage: &Stage) -> Flow {
        let is_held = |log: &mut Log| {
            log.script.held.contains(stage) && !log.released && !self.shared.stopping.load(Ordering::SeqCst)
        };
        drop(self.shared.changed.wait_while(self.shared.log(), is_held).unwrap());
        if self.shared.stopping.load(Ordering::SeqCst) { Err(ended()) } else { Ok(()) }
    }

    /// One command. `false` after QUIT.
    fn step(&mut self) -> io::Result<bool> {
        let line = self.line()?;
        let verb = line.split([' ', ':']).next().unwrap_or_default().to_ascii_uppercase();
        match verb.as_str() {
            "EHLO" => self.hello()?,
            "HELO" => drop(self.answer(Stage::Helo, "250 mx.example.com")?),
            "STARTTLS" => self.upgrade()?,
            "AUTH" => self.log_in(&line)?,
            "MAIL" => {
                self.from = path(&line);
                self.recipients.clear();
                self.answer(Stage::Mail, "250 2.1.0 ok")?;
            }
            "RCPT" => self.recipient(path(&line))?,
            "DATA" => self.data()?,
            "RSET" => drop(self.answer(Stage::Rset, "250 2.0.0 ok")?),
            "NOOP" => drop(self.answer(Stage::Noop, "250 2.0.0 ok")?),
            "QUIT" => {
                self.answer(Stage::Quit, "221 2.0.0 bye")?;
                return Ok(false);
            }
            _ => self.say(b"500 5.5.2 unknown command\r\n")?,
        }
        Ok(true)
    }

    fn hello(&mut self) -> Flow {
        let mut offered = self.shared.log().script.extensions.clone();
        if matches!(self.shared.tls, Some((TlsMode::Starttls, _))) && !self.tls {
            offered.push("STARTTLS".to_owned());
        }
        let names: Vec<&str> = std::iter::once("mx.example.com").chain(offered.iter().map(String::as_str)).collect();
        let (last, others) = names.split_last().unwrap();
        let usual: String = others.iter().map(|name| format!("250-{name}\r\n")).collect();
        self.answer(Stage::Ehlo, &format!("{usual}250 {last}")).map(drop)
    }

    fn upgrade(&mut self) -> Flow {
        let line = self.answer(Stage::Starttls, "220 2.0.0 go ahead")?;
        if line.starts_with("220") { self.start_tls() } else { Ok(()) }
    }

    fn log_in(&mut self, line: &str) -> Flow {
        let decoded = |text: &str| String::from_utf8(STANDARD.decode(text).unwrap_or_default()).unwrap_or_default();
        let login = if let Some(response) = line.strip_prefix("AUTH PLAIN ") {
            let response = decoded(response);
            let mut parts = response.split('\0').skip(1).map(str::to_owned);
            (parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
        } else {
            self.say(format!("334 {}\r\n", STANDARD.encode("Username:")).as_bytes())?;
            let user = decoded(&self.line()?);
            self.say(format!("334 {}\r\n", STANDARD.encode("Password:")).as_bytes())?;
            (user, decoded(&self.line()?))
        };
        let number = self.number;
        self.shared.record(|log| log.sessions[number].login = Some(login.clone()));
        let is_right = self.shared.log().script.logins.as_ref().is_none_or(|right| *right == login);
        let usual = if is_right { "235 2.7.0 accepted" } else { "535 5.7.8 authentication failed" };
        self.answer(Stage::Auth, usual).map(drop)
    }

    fn recipient(&mut self, address: String) -> Flow {
        let own = Stage::RcptTo(address.clone());
        let stage = if self.shared.log().script.replies.contains_key(&own) { own } else { Stage::Rcpt };
        if self.answer(stage, "250 2.1.5 ok")?.starts_with('2') {
            self.recipients.push(address);
        }
        Ok(())
    }

    fn data(&mut self) -> Flow {
        if !self.answer(Stage::Data, "354 go")?.starts_with('3') {
            return Ok(());
        }
        let raw = self.body()?;
        let mail = Mail {
            session: self.number,
            from: self.from.clone(),
            recipients: std::mem::take(&mut self.recipients),
            raw,
        };
        let mut dot = None;
        self.shared.record(|log| {
            log.mails.push(mail);
            dot = Some(log.script.next_dot());
        });
        self.end_of_data(dot.unwrap())
    }

    /// Reads up to `CRLF.CRLF`. An empty mail would begin with the dot.
    fn body(&mut self) -> io::Result<Vec<u8>> {
        let mut raw = Vec::new();
        while !raw.ends_with(b"\r\n.\r\n") && raw != b".\r\n" {
            let chunk = self.peer.fill_buf()?;
            if chunk.is_empty() {
                return Err(ended());
            }
            let line = chunk.iter().position(|b| *b == b'\n').map_or(chunk.len(), |place| place + 1);
            raw.extend_from_slice(&chunk[..line]);
            self.peer.consume(line);
            let (number, total) = (self.number, raw.len());
            self.shared.record(|log| log.sessions[number].body_bytes = total);
            let cut = self.shared.log().script.cut.clone();
            if let Some(cut) = cut.filter(|cut| cut.after <= total) {
                return Err(self.cut_off(&cut)?);
            }
        }
        raw.truncate(raw.len() - 3);
        Ok(raw)
    }

    fn cut_off(&mut self, cut: &Cut) -> io::Result<io::Error> {
        if !cut.reply.is_empty() {
            self.say(format!("{}\r\n", cut.reply).as_bytes())?;
        }
        if cut.reset {
            self.reset()?;
        }
        Ok(ended())
    }

    fn end_of_data(&mut self, dot: Dot) -> Flow {
        self.wait_while_held(&Stage::Dot)?;
        match dot {
            Dot::Reply(line) => self.answer(Stage::Dot, &line).map(drop),
            Dot::ReplyThenClose(line) => {
                self.say(format!("{line}\r\n").as_bytes())?;
                Err(ended())
            }
            Dot::BytesThenClose(bytes) => {
                self.say(&bytes)?;
                Err(ended())
            }
            Dot::Close => Err(ended()),
            Dot::CloseNotify => {
                if let Duplex::Tls(tls) = self.peer.get_mut() {
                    tls.conn.send_close_notify();
                    tls.flush()?;
                }
                Err(ended())
            }
            Dot::Reset => {
                self.reset()?;
                Err(ended())
            }
            Dot::Silent => {
                // The client says nothing more, so this returns when it goes away.
                self.peer.fill_buf()?;
                Err(ended())
            }
        }
    }

    /// Dissolving the association sends a reset at once, whoever else holds the socket.
    fn reset(&self) -> Flow {
        Ok(rustix::net::connect_unspec(&self.socket)?)
    }
}

/// What stands between `<` and `>`.
fn path(line: &str) -> String {
    let start = line.find('<').map_or(0, |place| place + 1);
    let end = line.find('>').unwrap_or(line.len());
    line.get(start..end).unwrap_or_default().to_owned()
}
