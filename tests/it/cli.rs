//! The command line: every command, every exit code, on the real binary.
//!
//! States that only a dispatcher makes are written by SQL. Nothing here sends anything.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::types::FromSql;
use serde_json::Value;

use crate::support::wait_until;

const FENCEPOST: &str = env!("CARGO_BIN_EXE_fencepost");

/// A directory with `app.db`, and commands that run on it.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn empty() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn new() -> Self {
        let place = Self::empty();
        place.run(["init"]).exits(0);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.path(name).display().to_string()
    }

    fn command<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Command {
        let mut command = bare(arguments);
        command.env("FENCEPOST_DB", self.path("app.db")).current_dir(self.directory.path());
        command
    }

    fn run<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Ran {
        Ran::of(&mut self.command(arguments))
    }

    /// The answer as JSON, which is all that standard output holds.
    fn json<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Value {
        let mut command = self.command(arguments);
        Ran::of(command.arg("--json")).exits(0).json()
    }

    fn sql(&self) -> Connection {
        let connection = Connection::open(self.path("app.db")).unwrap();
        connection.busy_timeout(Duration::from_secs(5)).unwrap();
        connection
    }

    fn execute(&self, sql: &str) {
        self.sql().execute_batch(sql).unwrap();
    }

    fn get<T: FromSql>(&self, sql: &str) -> T {
        self.sql().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn webhook(&self, id: &str, scope: &str) {
        self.run(["enqueue", "webhook", "billing", "--scope", scope, "--id", id, "--payload", "{}"]).exits(0);
    }

    /// A command whose only attempt ended unknown, as a dispatcher leaves it.
    fn in_doubt(&self, id: &str, scope: &str) {
        self.webhook(id, scope);
        self.execute(&format!(
            "INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, armed_ms, settled_ms, outcome, evidence)
               SELECT n, 1, 4, 'hold', 1800000000000, 1800000000020, 1800000009000, 'unknown',
                 '{{\"phase\":\"end of data sent, no answer\",\"reply\":\"a\\u001b[31mb\"}}' FROM outbox WHERE id = '{id}';
             UPDATE outbox_state SET state = 'in_doubt', effect = 'possible', attempt_no = 1, tries = 1, found_open = 1, found_row = 1,
                 first_begun_ms = 1800000000000, first_unknown_ms = 1800000000000
               WHERE n = (SELECT n FROM outbox WHERE id = '{id}');"
        ));
    }
}

fn bare<I: AsRef<OsStr>>(arguments: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new(FENCEPOST);
    command.args(arguments).stdin(Stdio::null());
    for name in ["DB", "CONFIG", "SCOPE", "TOKEN", "HOLDER", "LOG_LEVEL", "LOG_FORMAT"] {
        command.env_remove(format!("FENCEPOST_{name}"));
    }
    command.env("TZ", "UTC").env_remove("NO_COLOR");
    command
}

/// What a command answered.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn of(command: &mut Command) -> Self {
        command.output().unwrap().into()
    }

    #[track_caller]
    fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    #[track_caller]
    fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.out.contains(word) || self.err.contains(word), "{word:?} is missing in {self:#?}");
        }
        self
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

#[track_caller]
fn same(left: &Value, right: impl Into<Value>, json: &Value) {
    assert_eq!(*left, right.into(), "{json:#}");
}

// ── Arguments and exit codes ────────────────────────────────────────────────────────────────────────

#[test]
fn usage_errors_end_with_64_and_help_with_0() {
    for arguments in [&["--version"][..], &["--help"], &["lease", "exec", "--help"], &["help", "status"]] {
        let ran = Ran::of(&mut bare(arguments)).exits(0);
        assert!(!ran.out.is_empty() && ran.err.is_empty(), "{ran:?}");
    }
    let place = Place::new();
    for arguments in [
        &[][..],
        &["nonsense"],
        &["list", "--state", "sleeping"],
        &["list", "--live", "--final"],
        &["status", "--max-age", "5m"],
        &["status", "--check", "--max-age", "5"],
        &["enqueue", "webhook", "billing", "--payload", "x"],
        &["enqueue", "webhook", "billing", "--scope", "s"],
        &["enqueue", "webhook", "billing", "--scope", "s", "--token", "eleven", "--payload", "x"],
        &["enqueue", "webhook", "billing", "--scope", "s", "--payload", "x", "--header", "no colon"],
        &["enqueue", "webhook", "billing", "--scope", "s", "--payload", "x", "--expires", "tomorrow"],
        &["enqueue", "email", "main", "--scope", "s", "--from", "a@example.com", "--subject", "x"],
        &["lease", "exec", "--scope", "s", "true"],
        &["resolve", "x", "delivered"],
        &["resolve", "x", "delivered", "--reason", " "],
        &["resolve", "x", "perhaps", "--reason", "y"],
        &["config", "check"],
    ] {
        place.run(arguments).exits(64);
    }
    Ran::of(&mut bare(["status"])).exits(64).says(&["no database is given", "--db", "FENCEPOST_DB"]);
}

#[test]
fn a_missing_database_or_outbox_is_69_and_is_not_made() {
    let place = Place::empty();
    for arguments in [
        &["status"][..],
        &["list"],
        &["show", "x"],
        &["lease", "acquire", "--scope", "s"],
        &["lease", "show"],
        &["seal", "--scope", "s", "--token", "1"],
        &["enqueue", "webhook", "a", "--scope", "s", "--payload", "x"],
        &["resolve", "x", "delivered", "--reason", "y"],
        &["lease", "exec", "--scope", "s", "--", "true"],
    ] {
        place.run(arguments).exits(69).says(&["app.db", "fencepost init"]);
        assert!(!place.path("app.db").exists(), "{arguments:?}");
    }
    place.execute("CREATE TABLE orders(id INTEGER PRIMARY KEY)");
    place.run(["status"]).exits(69).says(&["app.db has no outbox", "fencepost init"]);
    place.run(["lease", "acquire", "--scope", "s"]).exits(69);
    let nowhere = place.path("no/such/app.db");
    Ran::of(bare(["init", "--db"]).arg(nowhere)).exits(69);
    place.file("app.db", "this is not a database, only a text that is long enough to look like a file of some sort");
    place.run(["status"]).exits(65).says(&["app.db"]);
}

#[test]
fn a_busy_database_is_75() {
    let place = Place::new();
    let other = place.sql();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    place.run(["enqueue", "webhook", "a", "--scope", "s", "--payload", "x"]).exits(75).says(&["locked"]);
    other.execute_batch("ROLLBACK").unwrap();
}

/// The command line goes before the environment, which goes before the configuration.
#[test]
fn where_the_database_is() {
    let place = Place::new();
    let config = place.file("fencepost.toml", "[database]\npath = \"configured.db\"");
    let base = |arguments: &[&str]| {
        let mut command = bare(arguments);
        command.args(["--config", &config]);
        command
    };
    Ran::of(&mut base(&["init"])).exits(0);
    assert!(place.path("configured.db").exists(), "relative to the file");
    Ran::of(base(&["init"]).env("FENCEPOST_DB", place.path("env.db"))).exits(0);
    assert!(place.path("env.db").exists());
    let given = place.path("given.db");
    Ran::of(base(&["init"]).arg("--db").arg(&given).env("FENCEPOST_DB", place.path("unused.db"))).exits(0);
    assert!(given.exists() && !place.path("unused.db").exists());
    Ran::of(bare(["init"]).env("FENCEPOST_CONFIG", &config).env("FENCEPOST_DB", "")).exits(0).says(&["configured.db"]);
}

// ── init ────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn init_twice_is_harmless_and_warns_of_old_sqlite() {
    let place = Place::empty();
    place.run(["init"]).exits(0).says(&["outbox 1.0 created", "SQLite 3.37"]);
    let made: String = place.get("SELECT uuid FROM outbox_meta");
    place.webhook("a", "s");
    let json = place.json(["init"]);
    same(&json["outcome"], "unchanged", &json);
    same(&json["version"], "1.0", &json);
    assert_eq!(place.get::<String>("SELECT uuid FROM outbox_meta"), made);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox"), 1);
    assert_eq!(place.get::<String>("PRAGMA journal_mode"), "wal");
}

/// An application's own `outbox` stops init before anything is written.
#[test]
fn h69_a_foreign_outbox_is_refused_and_untouched() {
    for (name, sql) in [
        (
            "outbox",
            "CREATE TABLE outbox(id INTEGER PRIMARY KEY, topic TEXT, body TEXT); INSERT INTO outbox VALUES (1, 'a', 'b')",
        ),
        ("outbox", "CREATE TABLE t(a); CREATE VIEW outbox AS SELECT a FROM t"),
        ("outbox_scope", "CREATE TABLE outbox_scope(a TEXT); INSERT INTO outbox_scope VALUES ('x')"),
    ] {
        let place = Place::empty();
        place.execute(&format!("PRAGMA user_version = 7; PRAGMA application_id = 9; {sql}"));
        let before = std::fs::read(place.path("app.db")).unwrap();
        place.run(["init"]).exits(65).says(&[name, "rename", "nothing was written"]);
        assert_eq!(std::fs::read(place.path("app.db")).unwrap(), before, "{sql}: not a byte differs");
        place.run(["status"]).exits(65).says(&[name]);
    }
}

// ── enqueue ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_webhook_is_written_byte_for_byte() {
    let place = Place::new();
    let payload = "{\"a\" : 1.0,\n \"ü\":\"\\u00fc\"}\n";
    let file = place.file("body.json", payload);
    let json = place.json([
        "enqueue",
        "webhook",
        "billing",
        "--scope",
        "order/17",
        "--token",
        "42",
        "--holder",
        "h",
        "--source",
        "etcd-a",
        "--lane",
        "mails",
        "--key",
        "paid-17",
        "--id",
        "A-1",
        "--header",
        "X-Team: billing: eu",
        "--header",
        "X-B:b",
        "--not-before",
        "+5m",
        "--expires",
        "2030-01-01T00:00:00Z",
        "--traceparent",
        "00-1-2-01",
        "--payload-file",
        &file,
    ]);
    same(&json["id"], "A-1", &json);
    same(&json["seq"], "1", &json);
    same(&json["token"], "42", &json);
    same(&json["duplicate"], false, &json);
    assert_eq!(place.get::<String>("SELECT payload FROM outbox"), payload);
    assert_eq!(place.get::<String>("SELECT headers FROM outbox"), r#"{"X-B":"b","X-Team":"billing: eu"}"#);
    let columns =
        "SELECT scope || '|' || token || '|' || holder || '|' || source || '|' || lane || '|' || key || '|' || kind
        || '|' || destination || '|' || traceparent || '|' || expires_at_ms FROM outbox";
    let right = "order/17|42|h|etcd-a|mails|paid-17|webhook|billing|00-1-2-01|1893456000000";
    assert_eq!(place.get::<String>(columns), right);
    let wait: i64 = place.get("SELECT o.not_before_ms - x.inserted_ms FROM outbox o JOIN outbox_state x ON x.n = o.n");
    assert!((290_000..=300_000).contains(&wait), "{wait}");
}

#[test]
fn payloads_come_from_standard_input_and_as_bytes() {
    let place = Place::new();
    let piped = |arguments: &[&str], bytes: &[u8]| {
        let mut command = place.command(["enqueue", "webhook", "billing", "--scope", "s", "--payload-file", "-"]);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        Ran::from(child.wait_with_output().unwrap())
    };
    piped(&[], b"hello\n").exits(0);
    assert_eq!(place.get::<String>("SELECT payload FROM outbox WHERE n = 1"), "hello\n");
    piped(&[], b"a\xff\0").exits(65).says(&["isn't UTF-8 at byte 1", "--bytes"]);
    piped(&["--bytes"], b"a\xff\0").exits(0);
    assert_eq!(place.get::<Vec<u8>>("SELECT payload_bytes FROM outbox WHERE n = 2"), b"a\xff\0");
    place
        .run(["enqueue", "webhook", "b", "--scope", "s", "--payload-file", "no/such/file"])
        .exits(74)
        .says(&["no/such/file"]);
}

#[test]
fn a_repeat_is_told_and_another_content_is_refused() {
    let place = Place::new();
    let enqueue = |payload| {
        let arguments =
            ["enqueue", "webhook", "billing", "--scope", "s", "--key", "k", "--id", "A", "--payload", payload];
        place.command(arguments)
    };
    Ran::of(&mut enqueue("x")).exits(0).says(&["A", "seq 1"]);
    Ran::of(&mut enqueue("x")).exits(0).says(&["A", "already there", "pending"]);
    let json = Ran::of(enqueue("x").arg("--json")).exits(0).json();
    same(&json["duplicate"], true, &json);
    same(&json["state"], "pending", &json);
    Ran::of(&mut enqueue("y")).exits(65).says(&["FP005"]);
    place
        .run(["enqueue", "webhook", "billing", "--scope", "s", "--key", "k", "--payload", "y"])
        .exits(65)
        .says(&["FP010"]);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox"), 1);
}

#[test]
fn a_mail_is_composed_or_taken_from_a_file() {
    let place = Place::new();
    let html = place.file("mail.html", "<b>hi</b>");
    let pdf = place.file("bill.pdf", b"%PDF\0\xff");
    place
        .run([
            "enqueue",
            "email",
            "main",
            "--scope",
            "s",
            "--from",
            "Shop <shop@example.com>",
            "--to",
            "a@example.org",
            "--to",
            "b@example.org",
            "--bcc",
            "c@example.org",
            "--reply-to",
            "d@example.org",
            "--subject",
            "Bill",
            "--text",
            "hi",
            "--html-file",
            &html,
            "--attach",
            &pdf,
        ])
        .exits(0);
    let mail: Value = serde_json::from_str(&place.get::<String>("SELECT payload FROM outbox")).unwrap();
    let right = serde_json::json!({
        "from": "Shop <shop@example.com>", "to": ["a@example.org", "b@example.org"], "bcc": ["c@example.org"],
        "reply_to": ["d@example.org"], "subject": "Bill", "text": "hi", "html": "<b>hi</b>",
        "attachments": [{ "name": "bill.pdf", "type": "application/pdf", "base64": "JVBERgD/" }],
    });
    assert_eq!(mail, right);
    let written = "{ \"from\": \"a@example.com\",  \"to\": \"b@example.org\" }\n";
    let file = place.file("mail.json", written);
    place.run(["enqueue", "email", "main", "--scope", "s", "--payload-file", &file]).exits(0);
    assert_eq!(place.get::<String>("SELECT payload FROM outbox WHERE n = 2"), written);
    let broken = place.file("broken.json", "{\"subject\": \"hush\",\n }");
    let ran = place.run(["enqueue", "email", "main", "--scope", "s", "--payload-file", &broken]).exits(65);
    assert!(ran.err.contains("broken.json:2:2") && !ran.err.contains("hush"), "{ran:?}");
}

/// A stale worker's command through the command line: refused, both tokens named, nothing written,
/// and counted.
#[test]
fn h01_a_stale_enqueue_is_refused_and_counted() {
    let place = Place::new();
    let enqueue = |token, id| {
        place.run([
            "enqueue",
            "webhook",
            "billing",
            "--scope",
            "acct-7",
            "--token",
            token,
            "--id",
            id,
            "--payload",
            "x",
        ])
    };
    enqueue("7", "a").exits(0);
    enqueue("8", "b").exits(0);
    enqueue("7", "c").exits(65).says(&["FP001", "7 for scope acct-7", "the watermark is 8"]);
    enqueue("7", "a").exits(65).says(&["FP001"]);
    assert_eq!(place.get::<String>("SELECT group_concat(id) FROM (SELECT id FROM outbox ORDER BY n)"), "a,b");
    assert_eq!(
        place.get::<i64>("SELECT count FROM outbox_refusal WHERE scope = 'acct-7' AND token = 7 AND watermark = 8"),
        2
    );
    enqueue("8", "d").exits(0);
    enqueue("9", "e").exits(0);
    place.webhook("other", "acct-8");
    place.run(["status"]).exits(0).says(&["Refused workers", "acct-7", "an old holder went on working"]);
    let json = place.json(["status"]);
    same(&json["refusals"][0]["token"], "7", &json);
    same(&json["refusals"][0]["watermark"], "8", &json);
    same(&json["refusals"][0]["count"], 2, &json);
}

#[test]
fn h06_absurd_tokens_are_refused_and_freeze_nothing() {
    let place = Place::new();
    let enqueue = |token: &str| {
        place.run(["enqueue", "webhook", "a", "--scope", "s", &format!("--token={token}"), "--payload", "x"])
    };
    enqueue("12").exits(0);
    for token in ["9223372036854775807", "4611686018427387905", "-1", "0"] {
        enqueue(token).exits(65).says(&["FP003"]);
    }
    enqueue("4611686018427387904").exits(65).says(&["FP012"]);
    enqueue("13").exits(0);
}

// ── lease and seal ──────────────────────────────────────────────────────────────────────────────────

#[test]
fn a_lease_is_acquired_renewed_released_and_lost() {
    let place = Place::new();
    place.webhook("old", "s");
    let lease = place.json(["lease", "acquire", "--scope", "s", "--ttl", "30s"]);
    same(&lease["token"], "2", &lease);
    same(&lease["backlog"][0]["id"], "old", &lease);
    same(&lease["backlog"][0]["seq"], "1", &lease);
    let (token, holder) = (lease["token"].as_str().unwrap(), lease["holder"].as_str().unwrap());
    place.run(["lease", "acquire", "--scope", "s"]).exits(75).says(&["FP013", holder, "it runs out in"]);
    let tenure = |verb, token, holder| place.run(["lease", verb, "--scope", "s", "--token", token, "--holder", holder]);
    tenure("renew", token, holder).exits(0).says(&["s is held until"]);
    tenure("renew", token, "somebody").exits(75).says(&["FP002", "lost"]);
    tenure("renew", "3", holder).exits(65).says(&["FP009"]);
    let shown = place.json(["lease", "show", "--scope", "s"]);
    same(&shown[0]["lease"], "held", &shown);
    same(&shown[0]["token"], "2", &shown);
    tenure("release", token, holder).exits(0).says(&["s is free"]);
    same(&place.json(["lease", "show"])[0]["lease"], "released", &shown);
    place
        .run(["lease", "acquire", "--scope", "s", "--holder", "next"])
        .exits(0)
        .says(&["token    3", "1 command of an earlier"]);
    tenure("renew", token, holder).exits(75).says(&["FP001", "the watermark is 3"]);
    tenure("release", token, holder).exits(75).says(&["FP001"]);
    place.run(["lease", "show"]).exits(0).says(&["next", "held"]);
}

#[test]
fn seal_prints_what_is_inherited() {
    let place = Place::new();
    place.webhook("old", "s");
    let seal = ["seal", "--scope", "s", "--token", "5012", "--holder", "h", "--source", "etcd-a"];
    place.run(seal).exits(0).says(&["5012", "1 command of an earlier holder", "old", "webhook billing"]);
    let json = place.json(seal);
    same(&json["backlog"][0]["token"], "1", &json);
    place.run(["seal", "--scope", "s", "--token", "5011"]).exits(65).says(&["FP001", "5012"]);
    place.run(["seal", "--scope", "s", "--token", "5013", "--source", "etcd-b"]).exits(65).says(&["FP014"]);
    place.run(["lease", "acquire", "--scope", "s"]).exits(65).says(&["FP013"]);
    place.run(["lease", "acquire", "--scope", "l"]).exits(0);
    place.run(["seal", "--scope", "l", "--token", "9"]).exits(65).says(&["FP013"]);
}

// ── status, list, show ──────────────────────────────────────────────────────────────────────────────

#[test]
fn status_of_a_new_outbox() {
    let place = Place::new();
    place.run(["status"]).exits(0).says(&["none has run yet", "0 pending", "nothing"]);
    let json = place.json(["status"]);
    same(&json["counts"]["pending"], 0, &json);
    assert!(json["oldest_due"].is_null() && json["waiting"] == serde_json::json!([]), "{json:#}");
    place.run(["status", "--check"]).exits(0).says(&["ok: nothing waits"]);
}

#[test]
fn status_tells_what_waits_and_what_is_stuck() {
    let place = Place::new();
    place.in_doubt("doubt", "a");
    place.webhook("behind", "a");
    place.webhook("retry", "b");
    place.webhook("done", "c");
    place.webhook("bad", "d");
    place.execute(
        "INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, settled_ms, outcome, evidence)
           SELECT n, 1, 4, 'resend', 1800000000000, 1800000000500, 'deferred', '{\"phase\":\"connect\",\"error\":\"refused\"}'
             FROM outbox WHERE id = 'retry';
         UPDATE outbox_state SET attempt_no = 1, tries = 1, due_ms = due_ms + 60000 WHERE n = (SELECT n FROM outbox WHERE id = 'retry');
         UPDATE outbox_state SET state = 'delivered', effect = 'done' WHERE n = (SELECT n FROM outbox WHERE id = 'done');
         UPDATE outbox_state SET state = 'dead', reason = 'refused' WHERE n = (SELECT n FROM outbox WHERE id = 'bad');
         UPDATE outbox_dispatcher SET epoch = 4, started_ms = 1800000000000, host = 'host1.example.com', pid = 77;",
    );
    let json = place.json(["status"]);
    let counts = serde_json::json!({
        "pending": 2, "sending": 0, "in_doubt": 1, "parked": 0, "delivered": 1, "dead": 1, "pruned": 0,
    });
    assert_eq!(json["counts"], counts, "{json:#}");
    assert_eq!(json["dead_by_reason"], serde_json::json!({ "refused": 1 }));
    same(&json["oldest_in_doubt"]["id"], "doubt", &json);
    same(&json["oldest_due"]["id"], "retry", &json);
    same(&json["blocked"][0]["id"], "doubt", &json);
    same(&json["blocked"][0]["behind"], 1, &json);
    same(&json["blocked"][0]["seq"], "1", &json);
    same(&json["failing"][0]["last_attempt"]["evidence"]["phase"], "connect", &json);
    same(&json["waiting"][0]["later"], 1, &json);
    same(&json["dispatcher"]["epoch"], 4, &json);
    assert!(json["waiting"][0]["configured"].is_null(), "no configuration is given: {json:#}");
    place.run(["status"]).exits(0).says(&[
        "host1.example.com as process 77",
        "1 dead (1 refused)",
        "Lanes that wait for somebody",
        "fencepost resolve ID",
        "deferred: connect, error refused",
    ]);
}

/// A destination that the configuration doesn't name is called out, secrets or not.
#[test]
fn h68_status_names_destinations_that_the_configuration_lacks() {
    let place = Place::new();
    place.webhook("known", "a");
    place.run(["enqueue", "webhook", "loyalty", "--scope", "b", "--payload", "x"]).exits(0);
    place.run(["enqueue", "webhook", "https://hooks.example.com/hush", "--scope", "c", "--payload", "x"]).exits(0);
    let table =
        "[webhook.billing]\nurl = \"https://billing.example.com/hooks\"\nsecrets = [{ env = \"NOT_SET_HERE\" }]\n";
    let config = place.file("fencepost.toml", table);
    let json = place.json(["status", "--config", &config]);
    let configured: Vec<(&str, bool)> = json["waiting"]
        .as_array()
        .unwrap()
        .iter()
        .map(|load| (load["destination"].as_str().unwrap(), load["configured"].as_bool().unwrap()))
        .collect();
    let right = [("billing", true), ("https://hooks.example.com/…", false), ("loyalty", false)];
    assert_eq!(configured, right, "{json:#}");
    let ran = place.run(["status", "--config", &config]).exits(0).says(&["loyalty", "not in the configuration"]);
    assert!(!ran.out.contains("hush"), "{ran:?}");
    place.file("fencepost.toml", format!("{table}[webhook_urls]\nsecrets = []\n"));
    let json = place.json(["status", "--config", &config]);
    same(&json["waiting"][1]["configured"], true, &json);
    place.file("fencepost.toml", "[webhok.billing]");
    place.run(["status", "--config", &config]).exits(0).says(&["warning", "webhok"]);
}

#[test]
fn status_check_answers_by_exit_code() {
    let place = Place::new();
    place.webhook("a", "a");
    place.run(["status", "--check"]).exits(0).says(&["ok: "]);
    let check = |arguments: &[&str]| {
        let mut command = place.command(["status", "--check"]);
        Ran::of(command.args(arguments))
    };
    wait_until("the command has an age", 5, || check(&["--max-age", "1ms"]).code == Some(1));
    let ran = check(&["--max-age", "1ms"]).exits(1).says(&["breach: a has been waiting"]);
    assert_eq!(ran.out.lines().count(), 1, "{ran:?}");
    place.in_doubt("b", "b");
    check(&[]).exits(1).says(&["breach: 1 in doubt (max 0)"]);
    check(&["--max-in-doubt", "1"]).exits(0);
    place.webhook("c", "c");
    place.execute(
        "UPDATE outbox_state SET state = 'parked', reason = 'refused' WHERE n = (SELECT n FROM outbox WHERE id = 'c')",
    );
    check(&["--max-in-doubt", "1"]).exits(0);
    check(&["--max-in-doubt", "1", "--max-parked", "0"]).exits(1).says(&["1 parked (max 0)"]);
    let json = check(&["--json"]).exits(1).json();
    same(&json["check"]["ok"], false, &json);
    same(&json["check"]["breaches"][0], "1 in doubt (max 0)", &json);
}

/// What is due later is not late; what is tried again is, from its first due time on.
#[test]
fn age_counts_from_the_first_due_time() {
    let place = Place::new();
    place.run(["enqueue", "webhook", "a", "--scope", "s", "--payload", "x", "--not-before", "+1h"]).exits(0);
    let json = place.json(["status"]);
    assert!(json["oldest_due"].is_null(), "{json:#}");
    place.webhook("b", "t");
    place.execute("UPDATE outbox_state SET attempt_no = 1, tries = 1, due_ms = due_ms + 3600000 WHERE scope = 't'");
    let json = place.json(["status"]);
    same(&json["oldest_due"]["id"], "b", &json);
}

#[test]
fn list_narrows_down() {
    let place = Place::new();
    place.in_doubt("a", "one");
    place.webhook("b", "one");
    place.webhook("c", "two");
    place
        .run([
            "enqueue",
            "email",
            "main",
            "--scope",
            "two",
            "--id",
            "d",
            "--lane",
            "mails",
            "--from",
            "a@example.com",
            "--to",
            "b@example.com",
            "--subject",
            "x",
        ])
        .exits(0);
    place.execute(
        "UPDATE outbox_state SET state = 'dead', reason = 'cancelled' WHERE n = (SELECT n FROM outbox WHERE id = 'c')",
    );
    for (arguments, right) in [
        (&[][..], "dcba"),
        (&["--scope", "one"], "ba"),
        (&["--scope", "one", "--live"], "ba"),
        (&["--state", "in_doubt"], "a"),
        (&["--state", "in-doubt"], "a"),
        (&["--state", "pending", "--state", "dead"], "dcb"),
        (&["--live"], "dba"),
        (&["--final"], "c"),
        (&["--kind", "email"], "d"),
        (&["--destination", "billing", "--live"], "ba"),
        (&["--lane", ""], "cba"),
        (&["--lane", "mails"], "d"),
        (&["--limit", "2"], "dc"),
        (&["--limit", "0"], ""),
        (&["--scope", "nobody"], ""),
    ] {
        let mut command = place.command(["list", "--json"]);
        let json = Ran::of(command.args(arguments)).exits(0).json();
        let ids: String = json.as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect();
        assert_eq!(ids, right, "{arguments:?}");
    }
    let json = place.json(["list", "--scope", "two", "--kind", "email"]);
    same(&json[0]["seq"], "2", &json);
    same(&json[0]["token"], "1", &json);
    same(&json[0]["lane"], "mails", &json);
    place.run(["list", "--limit", "2"]).exits(0).says(&["STATE", "two [mails]", "cancelled", "and more"]);
    place.run(["list", "--scope", "nobody"]).exits(0).says(&["no such command"]);
}

#[test]
fn show_tells_everything_but_secrets() {
    let place = Place::new();
    place.in_doubt("a", "s");
    place
        .run([
            "enqueue",
            "webhook",
            "billing",
            "--scope",
            "s",
            "--id",
            "b",
            "--header",
            "X-Auth: hush-1",
            "--payload",
            "hush-2",
        ])
        .exits(0);
    let shown = place.run(["show", "a"]).exits(0).says(&[
        "in_doubt since",
        "possible: something may have happened outside",
        "s, seq 1, token 1",
        "it is the head of its lane",
        "fencepost resolve a not-delivered --reason TEXT",
        "epoch 4, on_unknown hold",
        "armed after 20ms, unknown after 9s",
        "phase: end of data sent, no answer",
        "reply: a\u{fffd}[31mb",
    ]);
    assert!(!shown.out.contains('\u{1b}'), "what came from outside is no code for the terminal: {shown:?}");
    let json = place.json(["show", "a"]);
    same(&json["attempts"][0]["evidence"]["phase"], "end of data sent, no answer", &json);
    same(&json["ahead"], 0, &json);
    let ran = place.run(["show", "b"]).exits(0).says(&[
        "X-Auth (values hidden)",
        "6 bytes of text",
        "1 command goes before it; the head is a, in_doubt",
        "fencepost show a",
    ]);
    let hidden = place.json(["show", "b"]);
    assert!(!ran.out.contains("hush") && !hidden.to_string().contains("hush"), "{ran:?} {hidden}");
    same(&hidden["header_names"][0], "X-Auth", &hidden);
    same(&hidden["head"]["id"], "a", &hidden);
    place.run(["show", "b", "--payload"]).exits(0).says(&["X-Auth: hush-1", "hush-2"]);
    let json = place.json(["show", "b", "--payload"]);
    same(&json["payload"], "hush-2", &json);
    place.run(["show", "nobody"]).exits(65).says(&["there is no command with the id nobody"]);
}

/// A row that isn't UTF-8 is shown, and hides nothing else.
#[test]
fn text_that_is_not_utf8_is_shown() {
    let place = Place::new();
    place.webhook("a", "s");
    place.execute(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('b', CAST(x'73ff' AS TEXT), 1, 'webhook', CAST(x'ff' AS TEXT), CAST(x'ff' AS TEXT))",
    );
    place.run(["list"]).exits(0).says(&["s\u{fffd}", "billing"]);
    place.run(["status"]).exits(0).says(&["billing"]);
    let json = place.json(["show", "b", "--payload"]);
    same(&json["payload_base64"], "/w==", &json);
}

#[test]
fn damaged_guards_are_a_warning_for_readers_and_stop_writers() {
    let place = Place::new();
    place.execute("DROP TRIGGER outbox_admit");
    place.run(["status"]).exits(0).says(&["warning", "outbox_admit"]);
    place.run(["enqueue", "webhook", "a", "--scope", "s", "--payload", "x"]).exits(69).says(&["outbox_admit"]);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox"), 0);
}

// ── resolve ─────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn resolve_writes_the_answer_and_the_audit() {
    for (answer, state, reason, effect) in [
        ("delivered", "delivered", None, "done"),
        ("not-delivered", "pending", None, "possible"),
        ("given-up", "dead", Some("abandoned"), "possible"),
    ] {
        let place = Place::new();
        place.in_doubt("a", "s");
        place.webhook("b", "s");
        let before: i64 = place.get("SELECT updated_ms FROM outbox_state WHERE n = 1");
        let json = place.json(["resolve", "a", answer, "--reason", "asked the relay", "--who", "ann"]);
        same(&json["state"], state, &json);
        same(&json["effect"], effect, &json);
        same(&json["answer"], answer, &json);
        assert_eq!(json["reason"].as_str(), reason, "{json:#}");
        let head: String = place.get("SELECT o.id FROM outbox_lane l JOIN outbox o ON o.n = l.head_n");
        assert_eq!(head, if answer == "not-delivered" { "a" } else { "b" }, "the lane goes on");
        assert!(place.get::<i64>("SELECT updated_ms FROM outbox_state WHERE n = 1") >= before);
        let audit = "SELECT who || '|' || verb || '|' || id || '|' || scope || '|' || reason || '|' || json_extract(before, '$.state')
            || '|' || json_extract(after, '$.state') || '|' || json_extract(after, '$.answer') FROM outbox_audit";
        assert_eq!(place.get::<String>(audit), format!("ann|resolve|a|s|asked the relay|in_doubt|{state}|{answer}"));
        if answer == "not-delivered" {
            let fresh = "SELECT tries || '|' || fresh_no || '|' || attempt_no || '|' || found_open || '|' || found_row || '|' ||
                coalesce(first_begun_ms, '-') || coalesce(first_unknown_ms, '-') || (due_ms = set_ms) || (due_ms = updated_ms)
                FROM outbox_state WHERE n = 1";
            assert_eq!(place.get::<String>(fresh), "0|1|1|0|0|--11");
        }
        place.run(["show", "a"]).exits(0).says(&["Operators", "ann: resolve", answer, "asked the relay"]);
        if answer != "not-delivered" {
            place.run(["resolve", "a", answer, "--reason", "again"]).exits(65).says(&[state, "not in doubt"]);
        }
    }
}

#[test]
fn resolve_touches_nothing_that_is_not_in_doubt() {
    let place = Place::new();
    place.webhook("a", "s");
    place
        .run(["resolve", "a", "delivered", "--reason", "x"])
        .exits(65)
        .says(&["command a is pending, not in doubt", "fencepost show a"]);
    place.run(["resolve", "b", "delivered", "--reason", "x"]).exits(65).says(&["no command with the id b"]);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox_audit"), 0);
    place.in_doubt("c", "t");
    let mut command = place.command(["resolve", "c", "given-up", "--reason", "x"]);
    Ran::of(command.env("USER", "ben")).exits(0).says(&["c is dead now (abandoned)", "never be sent again"]);
    assert!(place.get::<String>("SELECT who FROM outbox_audit").starts_with("ben@"));
}

/// Several commands, by ids, by a file and by filters: counted first, done with a yes, all or none.
#[test]
fn resolve_takes_many() {
    let place = Place::new();
    for n in 1..=6 {
        place.in_doubt(&format!("d{n}"), &format!("s{n}"));
    }
    place.webhook("fresh", "f");
    place.execute("UPDATE outbox_state SET updated_ms = 1700000000000 WHERE scope IN ('s5', 's6')");
    let left = || place.get::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'in_doubt'");
    let why = ["--reason", "asked the relay"];
    place.run(["resolve", "d1", "d2", "d1", "delivered"].iter().chain(&why)).exits(0).says(&["d1 is", "d2 is"]);
    assert_eq!(left(), 4);
    place.run(["resolve", "d3", "fresh", "delivered"].iter().chain(&why)).exits(65).says(&["fresh is pending"]);
    assert_eq!(left(), 4, "all or none");
    let file = place.file("ids", "# of the night\nd3\n\n");
    let dry = ["resolve", "given-up", "--from", &file, "--dry-run"];
    place.run(dry.iter().chain(&why)).exits(0).says(&["1 command to be resolved as given-up", "d3"]);
    let ran = place.run(["resolve", "given-up", "--from", &file].iter().chain(&why)).exits(64);
    ran.says(&["1 command to be resolved", "nothing was done", "--yes"]);
    assert_eq!(left(), 4);
    place
        .run(["resolve", "given-up", "--from", &file, "--yes"].iter().chain(&why))
        .exits(0)
        .says(&["1 command", "d3 is"]);
    let by = ["resolve", "not-delivered", "--destination", "billing", "--kind", "webhook"];
    place.run(by.iter().chain(&why)).exits(64).says(&["3 commands to be resolved", "d4", "d5", "d6"]);
    let old = ["resolve", "not-delivered", "--older-than", "1h", "--yes"];
    place.run(old.iter().chain(&why)).exits(0).says(&["2 commands", "d5 is", "d6 is"]);
    assert_eq!(left(), 1);
    let mut command = place.command(["resolve", "delivered", "--from", "-", "--yes", "--reason", "x"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"d4\n").unwrap();
    Ran::from(child.wait_with_output().unwrap()).exits(0).says(&["d4 is"]);
    let json = place.json(["resolve", "delivered", "--scope", "s1", "--dry-run", "--reason", "x"]);
    same(&json["count"], 0, &json);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox_audit"), 6);
    for wrong in
        [&["resolve", "delivered"][..], &["resolve", "d1", "delivered", "--scope", "s"], &["resolve", "d1", "d2"]]
    {
        place.run(wrong.iter().chain(&why)).exits(64);
    }
}

// ── cancel, adopt, discard, reissue ─────────────────────────────────────────────────────────────────

/// Either fenced as a holder or with a reason as an operator, never both and never neither.
#[test]
fn a_word_on_a_command_is_a_holders_or_an_operators() {
    let place = Place::new();
    for id in ["a", "b", "c"] {
        place.webhook(id, "s");
    }
    place.run(["cancel", "a"]).exits(64).says(&["neither --reason nor --scope"]);
    place.run(["cancel", "a", "--scope", "s", "--reason", "x"]).exits(64).says(&["an operator's"]);
    place.run(["cancel", "a", "--reason", " "]).exits(64);
    place.run(["cancel"]).exits(64);
    let mut command = place.command(["cancel", "a", "--reason", "x"]);
    Ran::of(command.env("FENCEPOST_SCOPE", "s")).exits(64).says(&["FENCEPOST_SCOPE"]);
    let json = place.json(["cancel", "a", "--scope", "s"]);
    same(&json["state"], "dead", &json);
    same(&json["reason"], "cancelled", &json);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox_audit"), 0, "a holder is fenced, not audited");
    place
        .run(["cancel", "b", "c", "--reason", "x", "--who", "ann"])
        .exits(0)
        .says(&["b is dead now (cancelled)", "c is"]);
    assert_eq!(place.get::<i64>("SELECT count(*) FROM outbox_audit WHERE who = 'ann'"), 2);
    place.run(["cancel", "b", "--reason", "x"]).exits(65).says(&["FP011", "fencepost show b"]);
    place.run(["cancel", "b", "--scope", "s"]).exits(65).says(&["FP011", "dead (cancelled)"]);
    place.run(["adopt", "nobody", "--reason", "x"]).exits(65).says(&["no command with the id nobody"]);
    place.run(["discard", "nobody", "--scope", "s"]).exits(65).says(&["FP003", "nobody"]);
}

#[test]
fn reissue_says_what_is_new() {
    let place = Place::new();
    place.webhook("a", "s");
    place.run(["reissue", "a", "--reason", "x"]).exits(65).says(&["FP007", "can still go out"]);
    place.run(["cancel", "a", "--reason", "x"]).exits(0);
    place.run(["show", "a"]).exits(0).says(&["fencepost reissue a"]);
    let json = place.json(["reissue", "a", "--reason", "wanted after all", "--new-id", "a2"]);
    same(&json["id"], "a2", &json);
    same(&json["reissue_of"], "a", &json);
    same(&json["seq"], "2", &json);
    place.run(["show", "a2"]).exits(0).says(&["reissue of", "a"]);
    place.run(["show", "a"]).exits(0).says(&["reissue", "wanted after all"]);
    place.run(["reissue", "a", "--scope", "s"]).exits(0).says(&["seq 3 of scope s, token 1, from a"]);
    place.run(["reissue", "a", "--reason", "x", "--new-id", "a2"]).exits(65).says(&["FP005"]);
    place.run(["reissue", "a", "a2", "--reason", "x", "--new-id", "a3"]).exits(64);
}

// ── pause, scope ────────────────────────────────────────────────────────────────────────────────────

#[test]
fn pauses_are_seen_wherever_one_looks() {
    let place = Place::new();
    place.webhook("a", "s");
    for wrong in [
        &["pause", "--reason", "x"][..],
        &["pause", "--all", "--scope", "s", "--reason", "x"],
        &["pause", "--all"],
        &["pause", "--destination", "billing", "--reason", "x"],
        &["pause", "--all", "--for", "1h", "--until", "+1h", "--reason", "x"],
    ] {
        place.run(wrong).exits(64);
    }
    place
        .run(["pause", "--scope", "s", "--reason", "moving house", "--who", "ann", "--for", "2h"])
        .exits(0)
        .says(&["scope s is paused until"]);
    place.run(["status"]).exits(0).says(&["paused", "scope s", "moving house", "ann"]);
    place.run(["list"]).exits(0).says(&["paused"]);
    place.run(["show", "a"]).exits(0).says(&["paused", "moving house"]);
    place.run(["scope", "show", "s"]).exits(0).says(&["paused", "moving house"]);
    place.run(["scope", "list"]).exits(0).says(&["paused"]);
    let json = place.json(["status"]);
    same(&json["paused"][0]["scope"], "s", &json);
    same(&json["paused"][0]["who"], "ann", &json);
    assert!(json["paused"][0]["until_ms"].is_i64() && json["paused"][0]["kind"].is_null(), "{json:#}");
    let json = place.json(["list"]);
    same(&json[0]["paused"], true, &json);
    let json = place.json(["show", "a"]);
    same(&json["paused"][0]["reason"], "moving house", &json);
    place.run(["resume", "--all", "--reason", "x"]).exits(65).says(&["everything is not paused"]);
    let json = place.json(["resume", "--scope", "s", "--reason", "x"]);
    same(&json["paused"], false, &json);
    let json = place.json(["list"]);
    same(&json[0]["paused"], false, &json);
    // One that is over is none.
    place.run(["pause", "--destination", "webhook/billing", "--reason", "x"]).exits(0);
    place.execute("UPDATE outbox_pause SET until_ms = 1700000000000");
    let json = place.json(["status"]);
    same(&json["paused"], Value::Array(vec![]), &json);
}

#[test]
fn a_scope_has_a_policy_of_its_own() {
    let place = Place::new();
    place.run(["scope", "show", "s"]).exits(65).says(&["there is no scope s"]);
    let set = [
        "scope",
        "set",
        "s",
        "--on-takeover",
        "discard",
        "--require-seal",
        "true",
        "--max-payload",
        "100",
        "--reason",
        "x",
    ];
    let json = place.json(set);
    same(&json["own"]["on_takeover"], "discard", &json);
    same(&json["own"]["require_seal"], true, &json);
    assert!(json["own"]["max_jump"].is_null(), "{json:#}");
    place.run(["scope", "show", "s"]).exits(0).says(&[
        "on_takeover discard",
        "max_jump 1099511627776 (default)",
        "no command yet",
    ]);
    place.run(["enqueue", "webhook", "a", "--scope", "s", "--payload", "x"]).exits(65).says(&["FP009"]);
    let back = ["scope", "set", "s", "--require-seal", "default", "--key-retention", "1h", "--reason", "y"];
    place.run(back).exits(0).says(&["require_seal false (default)", "key_retention 1h"]);
    place.webhook("a", "s");
    place.run(["scope", "set", "s", "--max-payload", "0", "--reason", "x"]).exits(65).says(&["max_payload"]);
    place.run(["scope", "set", "s", "--reason", "x"]).exits(64);
    place.run(["scope", "set", "s", "--on-takeover", "perhaps", "--reason", "x"]).exits(64);
    let audit = "SELECT group_concat(json_extract(before, '$.require_seal') || '>' || coalesce(json_extract(after, '$.require_seal'), '-')) FROM outbox_audit WHERE reason = 'y'";
    assert_eq!(place.get::<String>(audit), "1>-");
}

/// A token that jumped, who was refused, what is inherited: named where one looks for it.
#[test]
fn a_scope_shows_what_is_wrong_with_it() {
    let place = Place::new();
    place.webhook("a", "s");
    place.run(["seal", "--scope", "s", "--token", "1796206000", "--source", "etcd-a"]).exits(0);
    place.run(["enqueue", "webhook", "billing", "--scope", "s", "--token", "2", "--payload", "x"]).exits(65);
    place.run(["scope", "show", "s"]).exits(0).says(&[
        "the token jumped",
        "etcd-a, era 0",
        "seq 1, token 1",
        "1 commands, 1 of them of older tokens",
        "refused",
        "1 times",
    ]);
    let json = place.json(["scope", "show", "s"]);
    same(&json["jumped"], true, &json);
    same(&json["token"], "1796206000", &json);
    same(&json["refusals"]["count"], 1, &json);
    let json = place.json(["scope", "list"]);
    same(&json[0]["live"], 1, &json);
    same(&json[0]["lease"], "foreign", &json);
    let rebased = place.json(["scope", "rebase", "s", "--source", "etcd-b", "--watermark", "5", "--reason", "x"]);
    same(&rebased[0]["old_watermark"], "1796206000", &rebased);
    let json = place.json(["scope", "show", "s"]);
    same(&json["jumped"], false, &json);
    same(&json["era"], 1, &json);
    place.run(["scope", "rebase", "s", "--source", "etcd-c", "--watermark", "-1", "--reason", "x"]).exits(64);
}

// ── config ──────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn config_is_checked_and_shown_without_secrets() {
    let place = Place::empty();
    let text = "[webhook.billing]\nurl = \"https://billing.example.com/hush\"\nsecrets = [{ env = \"BILLING_SECRET\" }]\n\
                [email.main]\nhost = \"smtp.example.com\"\nusername = \"app\"\npassword = { env = \"SMTP_PASSWORD\" }\n";
    let config = place.file("fencepost.toml", text);
    let with_secrets = |arguments: &[&str]| {
        let mut command = bare(arguments);
        Ran::of(command.env("BILLING_SECRET", "whsec_aHVzaGh1c2hodXNoaHVzaGh1c2hodXNo").env("SMTP_PASSWORD", "hush-3"))
    };
    let checked =
        with_secrets(&["config", "check", &config]).exits(0).says(&["ok", "billing", "signed", "main", "with login"]);
    let shown =
        with_secrets(&["config", "show", "--config", &config]).exits(0).says(&["[webhook.billing]", "SMTP_PASSWORD"]);
    let json = with_secrets(&["config", "show", &config, "--json"]).exits(0);
    json.json();
    for ran in [checked, shown, json] {
        assert!(!ran.out.contains("hush") && !ran.out.contains("aHVza"), "{ran:?}");
    }
    let json = with_secrets(&["config", "check", &config, "--json"]).exits(0).json();
    same(&json["ok"], true, &json);
    Ran::of(&mut bare(["config", "check", &config])).exits(78).says(&["BILLING_SECRET"]);
    Ran::of(&mut bare(["config", "show"])).exits(0).says(&["[dispatcher]"]);
    let typo = place.file("typo.toml", "[webhook.billing]\n  ulr = \"https://hush.example.com\"\n");
    let ran = Ran::of(&mut bare(["config", "check", &typo])).exits(78).says(&["typo.toml:2:3", "ulr"]);
    assert!(!ran.err.contains("hush"), "{ran:?}");
    Ran::of(&mut bare(["config", "check", "no-such.toml"])).exits(78).says(&["no-such.toml"]);
}

// ── Output ──────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn colour_is_for_terminals_and_never_in_json() {
    let place = Place::new();
    place.in_doubt("a", "s");
    let esc = |arguments: &[&str]| place.run(arguments).exits(0).out.contains('\u{1b}');
    assert!(!esc(&["list"]), "a pipe is no terminal");
    assert!(esc(&["list", "--color", "always"]));
    assert!(esc(&["status", "--color", "always"]));
    assert!(!esc(&["list", "--color", "always", "--json"]));
}

/// Whoever closes the pipe early gets no error.
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::new();
    place.webhook("a", "s");
    let mut child = place.command(["list"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    Ran::from(child.wait_with_output().unwrap()).exits(0);
}

// ── lease exec ──────────────────────────────────────────────────────────────────────────────────────

/// `lease exec` around a shell script, in the background.
struct Held {
    child: Option<Child>,
}

impl Held {
    fn start(place: &Place, options: &[&str], script: &str) -> Self {
        let mut command = place.command(["lease", "exec", "--scope", "s"]);
        command.args(options).args(["--", "sh", "-c", script]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: Some(command.spawn().unwrap()) }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id = self.child.as_ref().unwrap().id();
        let pid = rustix::process::Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn ends(mut self) -> Ran {
        self.child.take().unwrap().wait_with_output().unwrap().into()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Says that it runs, and ends when the file `go` is there, or the whole directory is gone.
const UNTIL_GO: &str = "echo $$ > pid.new; mv pid.new pid; while [ -e pid ] && ! [ -e go ]; do sleep 0.02; done";

fn runs(place: &Place) -> bool {
    place.path("pid").exists()
}

/// Whether the script's process is gone, or only waits to be buried.
fn is_dead(place: &Place) -> bool {
    let pid = std::fs::read_to_string(place.path("pid")).unwrap();
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.trim()).join("stat"));
    stat.is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
}

/// Another holder takes the scope over, after the lease was made to run out.
fn take_over(place: &Place) {
    place.execute(
        "BEGIN IMMEDIATE; UPDATE outbox_scope SET until_ms = 1 WHERE scope = 's';
         INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('s', 'thief', 60000); COMMIT",
    );
}

#[test]
fn exec_passes_the_exit_code_through_and_releases() {
    let place = Place::new();
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)] {
        Held::start(&place, &[], script).ends().exits(code);
        assert!(place.get::<bool>("SELECT until_ms IS NULL FROM outbox_scope"), "{script}: released");
    }
    assert_eq!(place.get::<i64>("SELECT watermark FROM outbox_scope"), 4);
    place.run(["lease", "exec", "--scope", "s", "--", "no-such-program"]).exits(127).says(&["no-such-program"]);
    place.run(["lease", "exec", "--scope", "s", "--", "/"]).exits(126);
    assert!(place.get::<bool>("SELECT until_ms IS NULL FROM outbox_scope"));
}

#[test]
fn exec_lends_the_environment_to_enqueue() {
    let place = Place::new();
    let ran = Held::start(&place, &[], "echo \"$FENCEPOST_DB $FENCEPOST_SCOPE $FENCEPOST_TOKEN $FENCEPOST_HOLDER\"")
        .ends()
        .exits(0);
    let holder: String = place.get("SELECT holder FROM outbox_scope");
    let database = std::fs::canonicalize(place.path("app.db")).unwrap();
    assert_eq!(ran.out, format!("{} s 1 {holder}\n", database.display()));
    let script = format!("cd / && exec '{FENCEPOST}' enqueue webhook billing --payload x");
    Held::start(&place, &[], &script).ends().exits(0);
    assert_eq!(place.get::<i64>("SELECT token FROM outbox"), 2);
    assert!(place.get::<bool>("SELECT o.holder = s.holder FROM outbox o JOIN outbox_scope s ON s.scope = o.scope"));
}

#[test]
fn exec_renews_until_the_program_ends() {
    let place = Place::new();
    let held = Held::start(&place, &["--ttl", "1500ms"], UNTIL_GO);
    wait_until("the program runs", 10, || runs(&place));
    let granted = || place.get::<i64>("SELECT granted_ms FROM outbox_scope");
    for renewal in 1..=3 {
        let before = granted();
        wait_until(&format!("renewal {renewal}"), 10, || granted() > before);
        assert!(granted() - before < 1500, "renewal {renewal} came before the lease ran out");
    }
    place.file("go", "");
    held.ends().exits(0);
    assert_eq!(place.get::<i64>("SELECT watermark FROM outbox_scope"), 1);
    assert!(place.get::<bool>("SELECT until_ms IS NULL FROM outbox_scope"));
}

#[test]
fn exec_answers_75_if_the_lease_is_held_or_waits() {
    let place = Place::new();
    let lease = place.json(["lease", "acquire", "--scope", "s", "--ttl", "1h"]);
    let ran = Held::start(&place, &[], "touch ran").ends().exits(75).says(&["FP013"]);
    assert!(!place.path("ran").exists(), "{ran:?}");
    let held = Held::start(&place, &["--wait"], "touch ran");
    let holder = lease["holder"].as_str().unwrap();
    place.run(["lease", "release", "--scope", "s", "--token", "1", "--holder", holder]).exits(0);
    held.ends().exits(0);
    assert!(place.path("ran").exists());
}

#[test]
fn exec_stops_the_program_when_the_lease_is_lost() {
    let place = Place::new();
    let script = format!("trap 'touch asked; exit 0' TERM; {UNTIL_GO}");
    let held = Held::start(&place, &["--ttl", "300ms"], &script);
    wait_until("the program runs", 10, || runs(&place));
    take_over(&place);
    held.ends().exits(75).says(&["FP001", "was lost", "the watermark is 2"]);
    assert!(place.path("asked").exists(), "it was asked to end before it was killed");
    assert_eq!(place.get::<String>("SELECT holder FROM outbox_scope"), "thief", "what isn't ours isn't released");
    assert!(place.get::<bool>("SELECT until_ms IS NOT NULL FROM outbox_scope"));
}

#[test]
fn exec_kills_a_program_that_does_not_end() {
    let place = Place::new();
    let script = format!("trap '' TERM; {UNTIL_GO}");
    let held = Held::start(&place, &["--ttl", "300ms", "--grace", "50ms"], &script);
    wait_until("the program runs", 10, || runs(&place));
    take_over(&place);
    held.ends().exits(75).says(&["killing it"]);
    assert!(is_dead(&place));
}

/// A database that can't be written to until the lease has run out.
#[test]
fn exec_gives_up_when_it_can_not_renew_in_time() {
    let place = Place::new();
    let held = Held::start(&place, &["--ttl", "600ms"], UNTIL_GO);
    wait_until("the program runs", 10, || runs(&place));
    let other = place.sql();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let locked = Instant::now();
    held.ends().exits(75).says(&["could not be renewed before it ran out"]);
    assert!(locked.elapsed() < Duration::from_secs(4), "it doesn't wait for the database longer than for the lease");
    assert!(is_dead(&place));
    other.execute_batch("ROLLBACK").unwrap();
}

/// The program ended well, but somebody had taken the scope over meanwhile.
#[test]
fn exec_tells_of_a_loss_that_it_sees_at_the_end() {
    let place = Place::new();
    let held = Held::start(&place, &["--ttl", "1h"], UNTIL_GO);
    wait_until("the program runs", 10, || runs(&place));
    take_over(&place);
    place.file("go", "");
    held.ends().exits(75).says(&["was lost", "FP001"]);
}

#[test]
fn exec_forwards_signals() {
    for (signal, name) in [(rustix::process::Signal::TERM, "TERM"), (rustix::process::Signal::INT, "INT")] {
        let place = Place::new();
        let script = format!("trap 'exit 5' {name}; {UNTIL_GO}");
        let held = Held::start(&place, &[], &script);
        wait_until("the program runs", 10, || runs(&place));
        held.signal(signal);
        held.ends().exits(5);
        assert!(place.get::<bool>("SELECT until_ms IS NULL FROM outbox_scope"), "{name}: released");
    }
}

#[test]
fn exec_takes_the_program_along_when_it_is_killed() {
    let place = Place::new();
    let held = Held::start(&place, &[], UNTIL_GO);
    wait_until("the program runs", 10, || runs(&place));
    held.signal(rustix::process::Signal::KILL);
    wait_until("the program is gone", 10, || is_dead(&place));
    // The shell's last `sleep` still holds the pipes for a moment.
    assert_eq!(held.ends().code, None);
}
