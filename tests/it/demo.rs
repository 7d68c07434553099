//! The demo as a user starts it: what it says, what it leaves, and that it can fail.
//!
//! Each test gives it a temporary directory of its own, which also finds its processes: their arguments
//! name files in it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use fencepost::sqlite::inspect;
use rusqlite::Connection;
use tempfile::TempDir;

use crate::support::daemon::BINARY;
use crate::support::wait_until;

fn demo(tmp: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    // A user's own settings must not turn the demo's processes to the user's files.
    command.arg("demo").args(arguments).env("TMPDIR", tmp.path()).env("FENCEPOST_LOG_LEVEL", "nonsense");
    command.env_remove("FENCEPOST_DB").env_remove("FENCEPOST_CONFIG");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What the demo left in its temporary directory.
fn left(tmp: &TempDir) -> Vec<PathBuf> {
    std::fs::read_dir(tmp.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Processes whose arguments name a file below this folder.
fn processes(tmp: &TempDir) -> Vec<String> {
    let folder = tmp.path().to_str().unwrap();
    // Systems without /proc are not looked at.
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok());
    let arguments = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    arguments.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).filter(|text| text.contains(folder)).collect()
}

fn assert_good(output: &Output) -> String {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert_eq!(err, "");
    out
}

/// Row by row: what was asked, how often it arrived, how it ended.
const TABLE: &str = "\
worker      asked           arrived  how it ended
A, token 1  book paid       -        committed
            hook-paid       once     delivered
            mail-thanks     once     delivered
B, token 2  book cancelled  -        undone, with its transaction
            mail-cancelled  never    refused: FP001 stale token, 2 is below 3
C, token 3  book shipped    -        committed
            hook-shipped    once     delivered
D, token 4  book invoiced   -        committed
            hook-invoice    twice    answer lost, sent again: delivered
            mail-invoice    once     answer lost, in doubt; a person: delivered
            hook-closed     once     delivered
            mail-survey     once     delivered

The order of arrival, lane by lane
hooks  paid → shipped → invoice → invoice → closed
mails  thanks → invoice → survey
";

#[test]
fn the_demo_shows_what_it_claims_and_leaves_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let out = assert_good(&demo(&tmp, &[]).output().unwrap());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(out.contains(TABLE), "{out}");
    assert!(out.contains("FP001 stale token: 2 for scope order/17, the watermark is 3"), "{out}");
    assert!(out.contains(": all as claimed ("), "{out}");
    assert!(!out.contains('✗') && !out.contains('\x1b'), "{out}");
    assert!(out.lines().count() <= 70, "{} lines", out.lines().count());
    for line in out.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert_eq!(left(&tmp), [] as [PathBuf; 0]);
    assert_eq!(processes(&tmp), [] as [String; 0]);
}

#[test]
fn kept_files_can_be_looked_at() {
    let tmp = tempfile::tempdir().unwrap();
    let out = assert_good(&demo(&tmp, &["--keep"]).output().unwrap());
    let [folder] = &left(&tmp)[..] else { panic!("{:?}", left(&tmp)) };
    assert!(out.contains(&format!("Kept in {}", folder.display())), "{out}");
    assert_eq!(processes(&tmp), [] as [String; 0]);
    let connection = Connection::open(folder.join("shop.db")).unwrap();
    let detail = inspect::show(&connection, "hook-invoice").unwrap().unwrap();
    let outcomes: Vec<_> = detail.attempts.iter().map(|attempt| attempt.outcome.as_deref()).collect();
    assert_eq!(
        (detail.command.state.as_str(), &outcomes[..]),
        ("delivered", &[Some("unknown"), Some("delivered")][..])
    );
    let answered = inspect::show(&connection, "mail-invoice").unwrap().unwrap();
    assert_eq!(answered.audit.iter().map(|entry| entry.verb.as_str()).collect::<Vec<_>>(), ["resolve"]);
    let whole: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(whole, "ok");
}

/// A demo that plays, and what it says.
struct Playing {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Playing {
    /// Returns once the second act has begun, which waits for a lease to run out.
    fn start(tmp: &TempDir) -> Self {
        let mut child = demo(tmp, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("2  ") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "the demo ended");
        }
        Self { child, out }
    }

    /// The exit status and the rest of what it says.
    fn end(mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (self.child.wait().unwrap().code(), out, err)
    }
}

/// Somebody else's hand in the database while the demo plays: one booking and one command more.
fn meddle(database: &Path) {
    let connection = Connection::open(database).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection
        .execute_batch(
            "BEGIN IMMEDIATE;
             INSERT INTO booking(worker, what) VALUES ('B', 'cancelled');
             INSERT INTO outbox(id, scope, token, kind, destination, payload)
               VALUES ('hook-extra', 'order/18', 1, 'webhook', 'billing', '{}');
             COMMIT;",
        )
        .unwrap();
}

#[test]
fn what_differs_from_the_claims_ends_with_1_and_is_named() {
    let tmp = tempfile::tempdir().unwrap();
    let playing = Playing::start(&tmp);
    let [folder] = &left(&tmp)[..] else { panic!("{:?}", left(&tmp)) };
    meddle(&folder.join("shop.db"));
    let (code, out, err) = playing.end();
    assert_eq!((code, err.as_str()), (Some(1), ""), "{out}");
    assert!(out.contains("✗ book cancelled: rows of this worker: claimed [], but saw [\"cancelled\"]"), "{out}");
    assert!(out.contains("✗ receivers: what nobody asked for"), "{out}");
    assert!(out.contains("✗ outbox: what nobody asked for"), "{out}");
    assert!(out.contains(" checks differ from what is claimed"), "{out}");
    assert!(folder.join("dispatcher.log").exists(), "a failed demo keeps its logs");
    assert_eq!(processes(&tmp), [] as [String; 0]);
}

#[test]
fn an_interrupted_demo_leaves_no_process_and_no_file() {
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM, rustix::process::Signal::HUP] {
        let tmp = tempfile::tempdir().unwrap();
        let playing = Playing::start(&tmp);
        wait_until("a worker plays", 10, || processes(&tmp).iter().any(|arguments| arguments.contains("demo-worker")));
        let pid = rustix::process::Pid::from_raw(i32::try_from(playing.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        let (code, out, err) = playing.end();
        assert!(code.is_some_and(|code| code != 0), "{code:?} {out}");
        assert!(err.contains("interrupted"), "{err}");
        assert_eq!(processes(&tmp), [] as [String; 0]);
        assert_eq!(left(&tmp), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_reader_that_goes_away_changes_nothing() {
    let tmp = tempfile::tempdir().unwrap();
    let playing = Playing::start(&tmp);
    let Playing { mut child, out } = playing;
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(left(&tmp), [] as [PathBuf; 0]);
    assert_eq!(processes(&tmp), [] as [String; 0]);
}

#[test]
fn without_a_place_for_its_files_it_fails() {
    let tmp = tempfile::tempdir().unwrap();
    let output = demo(&tmp, &[]).env("TMPDIR", tmp.path().join("missing")).output().unwrap();
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("can't create"), "{}", text(&output.stderr));
}
