//! The contract as other tools apply it, as an application's CI checks it, and as older files have it.
//!
//! Printed migrations are parsed and executed by Python, statement by statement, as their frameworks do.
//!
//! A contract that was released is kept as a dump in `tests/data`, with a command in each state. When a
//! new minor version comes: write its dump with `FENCEPOST_WRITE_DUMP=1 cargo test --features faults
//! --test it dumps`, add its line to `DUMPS`, and never touch an older one again. Until version
//! 1.0 of the contract is released its dump may be written anew in the same way.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rusqlite::Connection;

use crate::support::daemon::{BINARY, Site, webhook};
use crate::support::http::{Reply, Server};

/// Every contract that must still open, by version.
const DUMPS: [&str; 1] = ["1.0"];

fn dump_path(version: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/contract-{version}.sql"))
}

fn print(tool: &str) -> String {
    let output = Command::new(BINARY).args(["schema", "print", "--for", tool]).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn check(db: &Path) -> Output {
    Command::new(BINARY).arg("--db").arg(db).args(["schema", "check"]).output().unwrap()
}

fn assert_in_order(db: &Path) {
    let output = check(db);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("in order"), "{output:?}");
}

/// Runs a script with the printed text on its standard input, and a database as its argument.
fn python(script: &str, text: &str, db: &Path) -> String {
    use std::io::Write;
    let mut child = Command::new("python3")
        .args(["-B", "-c", script])
        .arg(db)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn db() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("app.db");
    (folder, path)
}

#[test]
fn h90_the_plain_contract_through_python() {
    let (_folder, path) = db();
    let script = "
import sqlite3, sys
sql = sys.stdin.read()
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute('PRAGMA journal_mode = WAL')
db.execute('BEGIN')
try:
    db.execute(sql)
except (sqlite3.Warning, sqlite3.ProgrammingError) as error:
    print(error)
db.execute('ROLLBACK')
assert not db.execute('SELECT * FROM sqlite_schema').fetchall()
db.executescript('BEGIN;' + sql + 'COMMIT;')
";
    assert!(python(script, &print("plain"), &path).contains("one statement"));
    assert_in_order(&path);
}

/// The statements that a printed Python migration holds, executed as its framework would: a failure
/// behind them leaves nothing, and without one the contract is whole.
#[test]
fn h90_python_migrations_are_all_or_nothing() {
    let script = "
import ast, sqlite3, sys
text = sys.stdin.read()
compile(text, 'migration.py', 'exec')
tree = ast.parse(text)
statements = next(ast.literal_eval(node.value) for node in tree.body
    if isinstance(node, ast.Assign) and node.targets[0].id == 'STATEMENTS')
assert ast.get_docstring(tree)
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute('PRAGMA journal_mode = WAL')
for end in ('ROLLBACK', 'COMMIT'):
    db.execute('BEGIN')
    db.execute('CREATE TABLE step(a)')
    for statement in statements:
        db.execute(statement)
    db.execute(end)
    if end == 'ROLLBACK':
        assert not db.execute('SELECT * FROM sqlite_schema').fetchall()
assert db.execute('PRAGMA user_version').fetchone() == (0,)
print(len(statements))
";
    for tool in ["alembic", "django"] {
        let (_folder, path) = db();
        let text = print(tool);
        let statements: usize = python(script, &text, &path).trim().parse().unwrap();
        assert_eq!(statements, fencepost::sqlite::contract_statements().unwrap().len());
        assert_in_order(&path);
        assert_eq!(text.contains("include_object"), tool == "alembic");
    }
}

/// The whole Alembic migration, with a stand-in for `op`: all or nothing without a transaction around it.
#[test]
fn h90_the_alembic_migration_runs() {
    let script = "
import sqlite3, sys, types
db = sqlite3.connect(sys.argv[1])
class Bind:
    broken = False
    def exec_driver_sql(self, sql):
        if self.broken and 'CREATE TRIGGER outbox_audit_keep' in sql:
            raise RuntimeError('stopped')
        return db.execute(sql)
alembic = types.ModuleType('alembic')
bind = Bind()
alembic.op = types.SimpleNamespace(get_bind=lambda: bind)
sys.modules['alembic'] = alembic
migration = {}
exec(compile(sys.stdin.read(), 'migration.py', 'exec'), migration)
bind.broken = True
try:
    migration['upgrade']()
except RuntimeError:
    pass
assert not db.execute('SELECT * FROM sqlite_schema').fetchall()
bind.broken = False
migration['upgrade']()
db.commit()
include = {}
recipe = migration['__doc__'].split('    context.configure')[0]
exec('\\n'.join(line[4:] for line in recipe.splitlines() if line.startswith('    ')), include)
table = types.SimpleNamespace(name='outbox_state')
assert not include['include_object'](table, 'outbox_state', 'table', True, None)
assert not include['include_object'](types.SimpleNamespace(table=table), 'ix', 'index', True, None)
assert include['include_object'](types.SimpleNamespace(name='orders'), 'orders', 'table', True, None)
";
    let (_folder, path) = db();
    python(script, &print("alembic"), &path);
    assert_in_order(&path);
}

/// Rails: every heredoc is one statement, and nothing of the SQL is taken for Ruby.
#[test]
fn h90_the_rails_migration_holds_every_statement() {
    let text = print("rails");
    assert!(text.contains("schema_format = :sql"));
    let (_folder, path) = db();
    let connection = Connection::open(&path).unwrap();
    let mut count = 0;
    for part in text.split("    execute <<'SQL'\n").skip(1) {
        let (statement, _) = part.split_once("\nSQL\n").unwrap();
        connection.execute(statement, []).unwrap();
        count += 1;
    }
    assert_eq!(count, fencepost::sqlite::contract_statements().unwrap().len());
    fencepost::sqlite::verify(&connection).unwrap();
}

/// H88, H89: what a migration tool dropped or rebuilt is named, in CI too.
#[test]
fn h88_h89_schema_check_names_what_is_missing() {
    let site = Site::new();
    assert_in_order(&site.db());
    site.sql("DROP TRIGGER outbox_admit; DROP TRIGGER outbox_keep; CREATE TRIGGER outbox_keep BEFORE DELETE ON outbox BEGIN SELECT 1; END");
    let output = check(&site.db());
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("missing outbox_admit") && text.contains("changed outbox_keep"), "{text}");
    let json = site.command("schema").args(["check", "--json"]).output().unwrap();
    assert_eq!(json.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&json.stdout).contains("\"ok\": false"));
    // Rebuilt by copy and rename, as migration tools do.
    let site = Site::new();
    site.sql("PRAGMA legacy_alter_table = ON; CREATE TABLE _new AS SELECT * FROM outbox; DROP TABLE outbox; ALTER TABLE _new RENAME TO outbox");
    assert_eq!(check(&site.db()).status.code(), Some(1));
    let (_folder, empty) = db();
    Connection::open(&empty).unwrap().execute_batch("CREATE TABLE orders(a)").unwrap();
    assert_eq!(check(&empty).status.code(), Some(69));
}

/// A dump has everything but the journal mode, and `run` sets that again (H89).
#[test]
fn h89_a_dump_is_whole() {
    let site = Site::new();
    site.webhook("w", "s", 1, "billing");
    let (_folder, path) = db();
    let dump = Command::new("sqlite3").arg(site.db()).arg(".dump").output().unwrap();
    Connection::open(&path).unwrap().execute_batch(&String::from_utf8(dump.stdout).unwrap()).unwrap();
    assert_in_order(&path);
    let server = Server::start(|_| Reply::status(200));
    site.configure(&webhook("billing", &server.url(), ""));
    let run = Command::new(BINARY)
        .arg("--db")
        .arg(&path)
        .arg("--config")
        .arg(site.config())
        .args(["run", "--drain"])
        .output()
        .unwrap();
    assert!(run.status.success(), "{run:?}");
    assert_eq!(server.requests().len(), 1);
    let mode: String = Connection::open(&path).unwrap().query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
    assert_eq!(mode, "wal");
}

/// Another major is refused by everything that writes or sends; a higher minor is not.
#[test]
fn another_major_is_refused_and_a_higher_minor_accepted() {
    let site = Site::new();
    site.sql("UPDATE outbox_meta SET minor = 9");
    assert_in_order(&site.db());
    site.drain();
    site.sql("UPDATE outbox_meta SET major = 2");
    assert_eq!(check(&site.db()).status.code(), Some(69));
    let run = site.command("run").arg("--drain").output().unwrap();
    assert_eq!(run.status.code(), Some(74));
    assert!(String::from_utf8_lossy(&run.stderr).contains("version 2.x"), "{run:?}");
    assert!(!site.command("init").output().unwrap().status.success());
}

/// One command in each state, as an application leaves them behind.
const ROWS: &str = "
INSERT INTO outbox(id, scope, token, key, kind, destination, payload, headers) VALUES ('delivered', 's', 5, 'k', 'webhook', 'billing', '{}', '{\"a\":\"b\"}');
INSERT INTO outbox(id, scope, token, kind, destination, payload_bytes) VALUES ('dead', 's', 5, 'webhook', 'billing', x'00ff');
INSERT INTO outbox(id, scope, token, lane, kind, destination, payload) VALUES ('doubt', 's', 5, 'mail', 'email', 'main', '{}');
INSERT INTO outbox(id, scope, token, lane, kind, destination, payload) VALUES ('sending', 's', 5, 'c', 'webhook', 'billing', '{}');
INSERT INTO outbox(id, scope, token, lane, kind, destination, payload) VALUES ('parked', 's', 5, 'd', 'webhook', 'billing', '{}');
INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES (NULL, 's', 5, 'webhook', 'billing', '{}');
UPDATE outbox_state SET state = 'delivered', effect = 'done', attempt_no = 1, tries = 1 WHERE n = 1;
UPDATE outbox_state SET state = 'dead', reason = 'refused', attempt_no = 1, tries = 1 WHERE n = 2;
UPDATE outbox_state SET state = 'in_doubt', effect = 'possible', attempt_no = 1, tries = 1 WHERE n = 3;
UPDATE outbox_state SET state = 'sending', attempt_no = 1, tries = 1 WHERE n = 4;
UPDATE outbox_state SET state = 'parked' WHERE n = 5;
INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, armed_ms) VALUES (4, 1, 1, 'resend', 1800000000000, 1800000000000);
UPDATE outbox_dispatcher SET epoch = 1;
INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES ('leased', 'h', 30000);
";

/// Every contract that was released opens, is upgraded or accepted, and goes on where it stopped.
#[test]
fn dumps_of_every_contract_open() {
    if std::env::var_os("FENCEPOST_WRITE_DUMP").is_some() {
        write_dump();
    }
    for version in DUMPS {
        let sql = std::fs::read_to_string(dump_path(version)).unwrap();
        let server = Server::start(|_| Reply::status(200));
        let site = Site::new();
        std::fs::remove_file(site.db()).unwrap();
        site.configure(&webhook("billing", &server.url(), ""));
        Connection::open(site.db()).unwrap().execute_batch(&sql).unwrap();
        assert!(site.command("init").output().unwrap().status.success(), "{version} is upgraded");
        assert_in_order(&site.db());
        site.drain();
        let states = |sql: &str| site.value::<String>(sql);
        assert_eq!(
            states(
                "SELECT group_concat(x, ' ') FROM (SELECT seq || ':' || state AS x FROM outbox_status WHERE scope = 's' ORDER BY seq)"
            ),
            "1:delivered 2:dead 3:in_doubt 4:delivered 5:parked 6:delivered",
            "{version}: an attempt found open is sent again by its policy, and what was pending goes out"
        );
        assert_eq!(server.requests().len(), 2);
        assert_eq!(site.value::<i64>("SELECT watermark FROM outbox_scope WHERE scope = 'leased'"), 1);
        let refused = site.connect().execute(
            "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('s', 4, 'webhook', 'billing', '{}')",
            [],
        );
        assert!(refused.unwrap_err().to_string().contains("FP001"), "{version}");
    }
}

fn write_dump() {
    let site = Site::new();
    site.sql(ROWS);
    let dump = Command::new("sqlite3").arg(site.db()).arg(".dump").output().unwrap();
    assert!(dump.status.success());
    let version = format!("{}.{}", fencepost::sqlite::CONTRACT_MAJOR, fencepost::sqlite::CONTRACT_MINOR);
    std::fs::create_dir_all(dump_path(&version).parent().unwrap()).unwrap();
    std::fs::write(dump_path(&version), dump.stdout).unwrap();
}
