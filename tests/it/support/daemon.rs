//! The real binary on a real database in a folder of the test's own.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use rusqlite::{Connection, TransactionBehavior};
use tempfile::TempDir;

use super::wait_until;

pub const BINARY: &str = env!("CARGO_BIN_EXE_fencepost");

/// A folder with a database that has the contract.
pub struct Site {
    pub dir: TempDir,
}

/// One line of `outbox_status`, as a test wants to see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub id: String,
    pub scope: String,
    pub seq: i64,
    /// `dead/refused`, `pending`, …
    pub state: String,
    pub effect: String,
    pub attempt_no: i64,
    pub tries: i64,
}

impl Site {
    pub fn new() -> Self {
        let site = Self { dir: tempfile::tempdir().unwrap() };
        let mut connection = Connection::open(site.db()).unwrap();
        fencepost::sqlite::prepare(&connection).unwrap();
        let transaction = connection.transaction().unwrap();
        fencepost::sqlite::migrate(&transaction).unwrap();
        transaction.commit().unwrap();
        site
    }

    pub fn db(&self) -> PathBuf {
        self.dir.path().join("app.db")
    }

    /// A connection like a worker's.
    pub fn connect(&self) -> Connection {
        let connection = Connection::open(self.db()).unwrap();
        fencepost::sqlite::prepare(&connection).unwrap();
        connection
    }

    /// Writes the configuration that daemons of this site read.
    pub fn configure(&self, toml: &str) {
        std::fs::write(self.config(), toml).unwrap();
    }

    pub fn config(&self) -> PathBuf {
        self.dir.path().join("fencepost.toml")
    }

    /// Runs statements in one transaction.
    pub fn sql(&self, statements: &str) {
        let mut connection = self.connect();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        transaction.execute_batch(statements).unwrap();
        transaction.commit().unwrap();
    }

    /// One command with an empty JSON object as payload.
    pub fn webhook(&self, id: &str, scope: &str, token: i64, destination: &str) {
        self.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload)
             VALUES ('{id}', '{scope}', {token}, 'webhook', '{destination}', '{{}}')"
        ));
    }

    /// A short mail to one recipient.
    pub fn email(&self, id: &str, scope: &str, token: i64, relay: &str) {
        self.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('{id}', '{scope}', {token}, 'email', '{relay}',
             '{{\"from\":\"shop@example.com\",\"to\":\"ann@example.org\",\"subject\":\"{id}\",\"text\":\"hello\"}}')"
        ));
    }

    pub fn statuses(&self) -> Vec<Status> {
        let connection = self.connect();
        let mut statement = connection
            .prepare(
                "SELECT id, scope, seq, state || coalesce('/' || reason, ''), effect, attempt_no, tries
                 FROM outbox_status ORDER BY scope, seq",
            )
            .unwrap();
        let rows = statement.query_map([], |row| {
            Ok(Status {
                id: row.get(0)?,
                scope: row.get(1)?,
                seq: row.get(2)?,
                state: row.get(3)?,
                effect: row.get(4)?,
                attempt_no: row.get(5)?,
                tries: row.get(6)?,
            })
        });
        rows.unwrap().collect::<Result<_, _>>().unwrap()
    }

    pub fn status(&self, id: &str) -> Status {
        let found = self.statuses().into_iter().find(|status| status.id == id);
        found.unwrap_or_else(|| panic!("no command {id}"))
    }

    /// State and effect, for short comparisons.
    pub fn state(&self, id: &str) -> (String, String) {
        let status = self.status(id);
        (status.state, status.effect)
    }

    pub fn wait_for_state(&self, id: &str, state: &str) -> Status {
        wait_until(&format!("{id} is {state} (it is {:?})", self.state(id)), 30, || self.status(id).state == state);
        self.status(id)
    }

    /// Waits until the first attempt has ended with this state.
    pub fn wait_for_first_attempt(&self, id: &str, state: &str) {
        wait_until(&format!("the first attempt of {id} ended as {state}"), 30, || {
            let status = self.status(id);
            status.attempt_no > 0 && status.state == state
        });
    }

    /// One value of one row.
    pub fn value<T: rusqlite::types::FromSql>(&self, query: &str) -> T {
        self.connect().query_row(query, [], |row| row.get(0)).unwrap()
    }

    /// Evidence of the latest attempt, as JSON text.
    pub fn evidence(&self, id: &str) -> String {
        self.value(&format!(
            "SELECT coalesce(a.evidence, '') FROM outbox_attempt a JOIN outbox_status u ON u.n = a.n
             WHERE u.id = '{id}' ORDER BY a.attempt_no DESC LIMIT 1"
        ))
    }

    /// `fencepost run`.
    pub fn run(&self, arguments: &[&str]) -> Daemon {
        self.run_with(arguments, &[])
    }

    pub fn run_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Daemon {
        let mut command = self.command("run");
        command.args(arguments).envs(environment.iter().copied());
        Daemon::spawn(command)
    }

    /// Runs until the process has killed itself at this point of an attempt to this destination.
    pub fn killed_at(&self, point: &str, destination: &str, environment: &[(&str, &str)]) {
        let fault = format!("{point}:{destination}:kill");
        let daemon = self.run_with(&[], &[&[("FENCEPOST_FAULT", fault.as_str())], environment].concat());
        let log = Arc::clone(&daemon.log);
        assert_eq!(daemon.wait().signal(), Some(9), "{}", log.lock().unwrap());
    }

    /// `fencepost run`, once it dispatches.
    pub fn start(&self) -> Daemon {
        let daemon = self.run(&[]);
        daemon.wait_for_log("dispatching");
        daemon
    }

    /// `fencepost run --drain` to its end.
    pub fn drain(&self) {
        let daemon = self.run(&["--drain"]);
        let log = Arc::clone(&daemon.log);
        let status = daemon.wait();
        assert!(status.success(), "{status}: {}", log.lock().unwrap());
    }

    /// Any command of the binary on this site.
    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(BINARY);
        command.arg("--db").arg(self.db());
        if self.config().exists() {
            command.arg("--config").arg(self.config());
        }
        command.arg(verb);
        command
    }
}

/// A running daemon. Dropping it kills it.
pub struct Daemon {
    child: Child,
    pub log: Arc<Mutex<String>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Daemon {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, stderr) = (Arc::clone(&log), child.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            for line in std::io::BufRead::lines(std::io::BufReader::new(stderr)).map_while(Result::ok) {
                let mut log = lines.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Self { child, log, reader: Some(reader) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn wait_for_log(&self, text: &str) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !self.log().contains(text) {
            assert!(
                std::time::Instant::now() < end,
                "not within 30 s: the log says {text:?}. It says:\n{}",
                self.log()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM, and waits for the end, which must be a good one.
    pub fn stop(self) {
        self.signal(rustix::process::Signal::TERM);
        let log = Arc::clone(&self.log);
        let status = self.wait();
        assert!(status.success(), "{status}: {}", log.lock().unwrap());
    }

    /// Waits for the end by itself, at most 60 s.
    pub fn wait(mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the daemon ends by itself", 60, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        status.unwrap()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A daemon that has ended already can't be killed, and that is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A webhook destination for tests: loopback opened, short waits.
pub fn webhook(name: &str, url: &str, more: &str) -> String {
    format!(
        "[webhook.{name}]\nurl = \"{url}\"\nsecrets = []\nallow_networks = [\"127.0.0.0/8\"]\n\
         backoff = {{ base = \"20ms\", cap = \"50ms\" }}\n{more}\n"
    )
}

/// A relay for tests: plain text to loopback, short waits.
pub fn relay(name: &str, port: u16, more: &str) -> String {
    format!(
        "[email.{name}]\nhost = \"127.0.0.1\"\nport = {port}\ntls = \"none\"\n\
         backoff = {{ base = \"20ms\", cap = \"50ms\" }}\n{more}\n"
    )
}

/// Whether a path exists, for pause points.
pub fn touch(path: &Path) {
    std::fs::write(path, "").unwrap();
}
