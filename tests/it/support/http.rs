//! A scripted HTTP/1.1 server on a loopback port, for receivers that behave well and badly.
//!
//! Plain threads and blocking sockets, so that a test decides about every byte:
//!
//! ```ignore
//! let server = Server::start(|request| match request.number {
//!     1 => Reply::status(503),
//!     _ => Reply::status(200).body("ok"),
//! });
//! // … send something to server.url() …
//! assert_eq!(server.wait_for(2)[1].header("webhook-id"), Some("a1"));
//! ```
//!
//! It never judges what it receives: requests are kept as they came, and tests look at them.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Received {
    /// Place among all requests of this server, from 1.
    pub number: usize,
    /// Place of its connection among all connections of this server, from 1.
    pub connection: usize,
    /// Request line and header lines, with the empty line.
    pub head: Vec<u8>,
    /// For instance `POST`.
    pub method: String,
    /// For instance `/hook?x=1`.
    pub target: String,
    /// In the order of the wire, names as they were written.
    pub headers: Vec<(String, String)>,
    /// Exactly the bytes after the head (`Content-Length` of them, or the decoded chunks).
    pub body: Vec<u8>,
    /// When the last byte had come.
    pub at: Instant,
}

impl Received {
    /// The value of a header that came once; panics if it came twice.
    pub fn header(&self, name: &str) -> Option<&str> {
        let values = self.header_all(name);
        assert!(values.len() < 2, "{name} came {} times", values.len());
        values.first().copied()
    }

    /// Every value of a header.
    pub fn header_all(&self, name: &str) -> Vec<&str> {
        let named = self.headers.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_str()).collect()
    }
}

/// What the server does with a request.
#[derive(Clone, Debug)]
pub struct Reply {
    gate: Option<Gate>,
    delay: Duration,
    interim: Vec<u8>,
    bytes: Bytes,
    linger: Option<Gate>,
    end: End,
}

#[derive(Clone, Debug)]
enum Bytes {
    Raw(Vec<u8>),
    Answer {
        status: u16,
        headers: Vec<(String, String)>,
        body: Vec<u8>,
    },
    /// `start`, then `filler` again and again up to `total` bytes or until the client hangs up.
    Endless {
        start: Vec<u8>,
        filler: Vec<u8>,
        total: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    KeepAlive,
    Close,
    Reset,
}

impl Reply {
    /// A whole answer; the connection stays open for a next request.
    pub fn status(status: u16) -> Self {
        let answer = Bytes::Answer { status, headers: Vec::new(), body: Vec::new() };
        let (interim, end) = (Vec::new(), End::KeepAlive);
        Self { gate: None, delay: Duration::ZERO, interim, bytes: answer, linger: None, end }
    }

    /// Adds a header to an answer made by [`Reply::status`]. Given twice, it is sent twice.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let Bytes::Answer { headers, .. } = &mut self.bytes else { panic!("only an answer has headers") };
        headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the body of an answer made by [`Reply::status`].
    pub fn body(mut self, text: impl AsRef<[u8]>) -> Self {
        let Bytes::Answer { body, .. } = &mut self.bytes else { panic!("only an answer has a body") };
        *body = text.as_ref().to_vec();
        self
    }

    /// These bytes, then the connection is closed.
    pub fn raw(bytes: impl AsRef<[u8]>) -> Self {
        Self { bytes: Bytes::Raw(bytes.as_ref().to_vec()), ..Self::status(200) }.then_close()
    }

    /// No byte: the request is read, then the connection is closed.
    pub fn close() -> Self {
        Self::raw("")
    }

    /// No byte: the request is read, then the connection is reset.
    pub fn reset() -> Self {
        Self { end: End::Reset, ..Self::raw("") }
    }

    /// A status line and half a header, then the connection is closed.
    pub fn half_a_head() -> Self {
        Self::raw("HTTP/1.1 200 OK\r\nContent-Ty")
    }

    /// A complete head with this status that promises a body which breaks off.
    pub fn body_cut_short(status: u16) -> Self {
        Self::raw(format!("HTTP/1.1 {status} Cut\r\nContent-Length: 1000\r\n\r\nonly this"))
    }

    /// `start`, then `filler` again and again: `total` bytes, or fewer if the client hangs up.
    pub fn endless(start: impl AsRef<[u8]>, filler: impl AsRef<[u8]>, total: u64) -> Self {
        let (start, filler) = (start.as_ref().to_vec(), filler.as_ref().to_vec());
        Self { bytes: Bytes::Endless { start, filler, total }, ..Self::close() }
    }

    /// An interim answer (1xx) before the answer itself.
    pub fn interim(mut self, status: u16) -> Self {
        self.interim.extend_from_slice(format!("HTTP/1.1 {status} Interim\r\n\r\n").as_bytes());
        self
    }

    /// Waits for the gate before the first byte.
    pub fn held_by(self, gate: &Gate) -> Self {
        Self { gate: Some(gate.clone()), ..self }
    }

    /// Waits so long before the first byte. Prefer [`Reply::held_by`].
    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// Does nothing more after the last byte until the gate opens.
    pub fn kept_open_by(self, gate: &Gate) -> Self {
        Self { linger: Some(gate.clone()), ..self }
    }

    /// Closes the connection after the answer.
    pub fn then_close(self) -> Self {
        Self { end: End::Close, ..self }
    }
}

/// Holds answers back until it is opened; stays open then.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets everything through that waits or comes later.
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Returns `false` if the server stopped or the client hung up first.
    fn pass(&self, shared: &Shared, client: &TcpStream) -> bool {
        let mut open = self.0.0.lock().unwrap();
        while !*open && !shared.stopped() && !has_hung_up(client) {
            open = self.0.1.wait_timeout(open, Duration::from_millis(20)).unwrap().0;
        }
        *open
    }
}

/// The server. Dropping it closes its port and every connection.
#[derive(Debug)]
pub struct Server {
    scheme: &'static str,
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stopped: AtomicBool,
    connections: AtomicUsize,
    written: AtomicU64,
    /// Second handles of the open connections, to end them with the server.
    open: Mutex<HashMap<usize, TcpStream>>,
    requests: Mutex<Vec<Received>>,
    arrived: Condvar,
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

impl Server {
    /// Answers every request as the script says. It is called from one thread per connection.
    pub fn start<F>(script: F) -> Self
    where
        F: Fn(&Received) -> Reply + Send + Sync + 'static,
    {
        Self::per_connection(move |connection, shared| connection.serve(shared, &script))
    }

    /// Answers 200 to everything, once the gate is open.
    pub fn held() -> (Gate, Self) {
        let gate = Gate::new();
        let held = gate.clone();
        (gate, Self::start(move |_| Reply::status(200).held_by(&held)))
    }

    /// The same over TLS, with a certificate (for 127.0.0.1 and localhost) of `tests/data/tls`, whose
    /// root is [`test_root`].
    pub fn start_tls<F>(certificate: &str, script: F) -> Self
    where
        F: Fn(&Received) -> Reply + Send + Sync + 'static,
    {
        let config = Arc::new(tls_config(certificate));
        let mut server = Self::per_connection(move |connection, shared| {
            connection.encrypt(&config);
            connection.serve(shared, &script);
        });
        server.scheme = "https";
        server
    }

    /// Accepts connections and closes them before it has read a byte.
    pub fn closing_at_once() -> Self {
        Self::per_connection(|_, _| ())
    }

    /// Accepts connections and never reads a byte.
    pub fn never_reading() -> Self {
        Self::per_connection(|connection, shared| {
            Gate::new().pass(shared, connection.stream.tcp());
        })
    }

    /// Reads so many bytes of each connection, then resets it.
    pub fn resetting_after(bytes: usize) -> Self {
        Self::per_connection(move |connection, _| {
            if connection.stream.read_exact(&mut vec![0; bytes]).is_ok() {
                reset_at_close(connection.stream.tcp());
            }
        })
    }

    fn per_connection<F>(serve: F) -> Self
    where
        F: Fn(&mut Connection, &Shared) + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let (accepting, serve) = (Arc::clone(&shared), Arc::new(serve));
        let acceptor = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.stopped() {
                    break;
                }
                let Ok(stream) = stream else { continue };
                let number = accepting.connections.fetch_add(1, Ordering::SeqCst) + 1;
                accepting.open.lock().unwrap().insert(number, stream.try_clone().unwrap());
                let (shared, serve) = (Arc::clone(&accepting), Arc::clone(&serve));
                std::thread::spawn(move || {
                    let mut connection = Connection { number, stream: Stream::Plain(stream), buffer: Vec::new() };
                    serve(&mut connection, &shared);
                    // Only the last handle closes it, and only a close can reset.
                    shared.open.lock().unwrap().remove(&number);
                });
            }
        });
        Self { scheme: "http", address, shared, acceptor: Some(acceptor) }
    }

    /// `http://127.0.0.1:PORT/hook`, or `https`.
    pub fn url(&self) -> String {
        format!("{}://{}/hook", self.scheme, self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many connections were accepted.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// How many connections have not ended yet.
    pub fn open_connections(&self) -> usize {
        self.shared.open.lock().unwrap().len()
    }

    /// How many bytes of [`Reply::endless`] answers were taken by the clients (or by the kernel's
    /// buffers for them).
    pub fn written(&self) -> u64 {
        self.shared.written.load(Ordering::SeqCst)
    }

    /// Every whole request so far, in the order of arrival.
    pub fn requests(&self) -> Vec<Received> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Waits until `count` whole requests have come and returns all of them; panics after 30 s.
    pub fn wait_for(&self, count: usize) -> Vec<Received> {
        let requests = self.shared.requests.lock().unwrap();
        let limit = Duration::from_secs(30);
        let (requests, waited) =
            self.shared.arrived.wait_timeout_while(requests, limit, |requests| requests.len() < count).unwrap();
        assert!(!waited.timed_out(), "{} of {count} requests in {limit:?}", requests.len());
        requests.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for stream in self.shared.open.lock().unwrap().values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

struct Connection {
    number: usize,
    stream: Stream,
    buffer: Vec<u8>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>),
}

impl Stream {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &stream.sock,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

impl Connection {
    fn serve(&mut self, shared: &Shared, script: impl Fn(&Received) -> Reply) {
        while let Some(request) = self.read(shared)
            && self.answer(shared, &script(&request)).is_ok_and(|end| end == End::KeepAlive)
        {}
    }

    fn encrypt(&mut self, config: &Arc<ServerConfig>) {
        let tcp = self.stream.tcp().try_clone().unwrap();
        let session = ServerConnection::new(Arc::clone(config)).unwrap();
        self.stream = Stream::Tls(Box::new(StreamOwned::new(session, tcp)));
    }

    /// The next whole request, or `None` at the end of the connection.
    fn read(&mut self, shared: &Shared) -> Option<Received> {
        let head_length = loop {
            match self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                Some(place) => break place + 4,
                None => self.more()?,
            }
        };
        let head: Vec<u8> = self.buffer.drain(..head_length).collect();
        let (method, target, headers) = parse_head(&head);
        let find = |name: &str| headers.iter().find(|(other, _)| other.eq_ignore_ascii_case(name));
        let body = if find("transfer-encoding").is_some() {
            self.chunked()?
        } else {
            let length = find("content-length").map_or(0, |(_, value)| value.parse().unwrap());
            self.exactly(length)?
        };
        let mut requests = shared.requests.lock().unwrap();
        let (number, connection) = (requests.len() + 1, self.number);
        let request = Received { number, connection, head, method, target, headers, body, at: Instant::now() };
        requests.push(request.clone());
        shared.arrived.notify_all();
        Some(request)
    }

    fn more(&mut self) -> Option<()> {
        let mut part = [0; 16 * 1024];
        let length = self.stream.read(&mut part).ok().filter(|length| *length > 0)?;
        self.buffer.extend_from_slice(&part[..length]);
        Some(())
    }

    fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            self.more()?;
        }
        Some(self.buffer.drain(..length).collect())
    }

    fn chunked(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line_length = loop {
                match self.buffer.windows(2).position(|window| window == b"\r\n") {
                    Some(place) => break place,
                    None => self.more()?,
                }
            };
            let line = self.exactly(line_length + 2)?;
            let digits = String::from_utf8_lossy(&line[..line_length]).into_owned();
            let size = usize::from_str_radix(digits.split(';').next().unwrap().trim(), 16).unwrap();
            let chunk = self.exactly(size + 2)?;
            if size == 0 {
                return Some(body);
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }

    fn answer(&mut self, shared: &Shared, reply: &Reply) -> io::Result<End> {
        if reply.gate.as_ref().is_some_and(|gate| !gate.pass(shared, self.stream.tcp())) {
            return Ok(End::Close);
        }
        std::thread::sleep(reply.delay);
        self.stream.write_all(&reply.interim)?;
        match &reply.bytes {
            Bytes::Raw(bytes) => self.stream.write_all(bytes)?,
            Bytes::Answer { status, headers, body } => self.stream.write_all(&render(*status, headers, body))?,
            Bytes::Endless { start, filler, total } => {
                self.stream.write_all(start)?;
                let mut sent = 0;
                while sent < *total {
                    self.stream.write_all(filler)?;
                    sent += filler.len() as u64;
                    shared.written.fetch_add(filler.len() as u64, Ordering::SeqCst);
                }
            }
        }
        self.stream.flush()?;
        if let Some(gate) = &reply.linger {
            gate.pass(shared, self.stream.tcp());
        }
        if reply.end == End::Reset {
            reset_at_close(self.stream.tcp());
        }
        Ok(reply.end)
    }
}

fn parse_head(head: &[u8]) -> (String, String, Vec<(String, String)>) {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.split("\r\n").filter(|line| !line.is_empty());
    let mut words = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let headers = lines.map(|line| {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        (name.to_owned(), value.trim().to_owned())
    });
    (words.next().unwrap_or_default(), words.next().unwrap_or_default(), headers.collect())
}

fn render(status: u16, headers: &[(String, String)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status} Scripted\r\n").into_bytes();
    for (name, value) in headers {
        bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    // These two never have a body, not even an empty one (RFC 9110 §8.6).
    if !matches!(status, 204 | 304) {
        bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

/// The root of the certificates in `tests/data/tls`.
pub fn test_root() -> PathBuf {
    tls_file("ca.pem")
}

fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name)
}

fn tls_config(certificate: &str) -> ServerConfig {
    let chain = CertificateDer::pem_file_iter(tls_file(certificate)).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(tls_file("server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    builder.with_no_client_auth().with_single_cert(chain, key).unwrap()
}

/// Whether the client has closed, and everything it sent before was read.
fn has_hung_up(client: &TcpStream) -> bool {
    client.set_nonblocking(true).unwrap();
    let peeked = client.peek(&mut [0]);
    client.set_nonblocking(false).unwrap();
    match peeked {
        Ok(length) => length == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Lets the close send RST instead of FIN: what the peer hasn't read is lost.
fn reset_at_close(stream: &TcpStream) {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).unwrap();
}
