//! Every way round the fence that a worker's statement can take, sent through rusqlite.
//!
//! `tests/data/bypass.json` has the statements, their answers and the invariants, and Python's sqlite3
//! runs the same file (`tests/python/bypass.py`). Each conflict clause of INSERT and UPDATE, upserts,
//! each name of the rowid, multi-row inserts and each table of the outbox are tried alone, in a
//! transaction after a business row, and inside a savepoint, with `recursive_triggers` on and off.
//! After none of them may a watermark be lower, a live command be gone, a payload differ, a seq be
//! missing or a stale token be in. `mutants.rs` shows that this suite notices each guard that is gone.

use fencepost::rules::Code;
use fencepost::sqlite::CONTRACT;
use rusqlite::Connection;
use std::path::PathBuf;

/// The data file, with its placeholders filled in.
pub struct Suite {
    setup: Vec<String>,
    pub attempts: Vec<Attempt>,
    before: Vec<String>,
    invariants: Vec<(String, String)>,
}

/// One statement and what it must answer.
pub struct Attempt {
    pub answer: String,
    first: Vec<String>,
    pub sql: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Around {
    Nothing,
    Transaction,
    Savepoint,
}

impl Suite {
    /// Remembers how everything is now, which the invariants compare with.
    pub fn remember(&self, connection: &Connection) -> rusqlite::Result<()> {
        for table in &self.before {
            let sql = format!(
                "DROP TABLE IF EXISTS temp.was_{table}; CREATE TEMP TABLE was_{table} AS SELECT * FROM {table}"
            );
            connection.execute_batch(&sql)?;
        }
        Ok(())
    }

    /// The invariants about something (everything: `""`) that don't hold now.
    pub fn breaches(&self, connection: &Connection, about: &str) -> Vec<String> {
        let is_broken = |(_, sql): &&(String, String)| connection.prepare(sql).unwrap().exists([]).unwrap();
        self.invariants
            .iter()
            .filter(|(name, _)| name.contains(about))
            .filter(is_broken)
            .map(|(name, _)| name.clone())
            .collect()
    }
}

/// The whole suite.
pub fn suite() -> Suite {
    filled(|_, texts| texts)
}

/// The suite with two or three texts for each placeholder that multiplies the attempts.
pub fn brief_suite() -> Suite {
    let few = |hole: &str, texts: Vec<String>| match hole {
        "or" => ["", "OR IGNORE", "OR REPLACE"].map(str::to_owned).to_vec(),
        "rowid" | "upsert" => [texts.first(), texts.last()].into_iter().flatten().cloned().collect(),
        _ => texts,
    };
    filled(few)
}

fn filled(choose: impl Fn(&str, Vec<String>) -> Vec<String>) -> Suite {
    let data: serde_json::Value = serde_json::from_str(include_str!("../data/bypass.json")).unwrap();
    let fillings =
        ["or", "rowid", "upsert", "bad"].map(|hole| (format!("{{{hole}}}"), choose(hole, texts(&data[hole]))));
    let mut attempts = Vec::new();
    for attempt in data["attempts"].as_array().unwrap() {
        let attempt = texts(attempt);
        let [answer, first @ .., template] = &attempt[..] else { panic!("{attempt:?}") };
        for sql in fillings.iter().fold(vec![template.clone()], |sqls, (hole, all)| fill(&sqls, hole, all)) {
            attempts.push(Attempt { answer: answer.clone(), first: first.to_vec(), sql });
        }
    }
    let invariants = data["invariants"].as_array().unwrap().iter().map(|pair| pair_of(&texts(pair))).collect();
    Suite { setup: texts(&data["setup"]), attempts, before: texts(&data["before"]), invariants }
}

fn texts(list: &serde_json::Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn pair_of(texts: &[String]) -> (String, String) {
    let [first, second] = texts else { panic!("{texts:?}") };
    (first.clone(), second.clone())
}

fn fill(sqls: &[String], hole: &str, all: &[String]) -> Vec<String> {
    let filled = |sql: &String| match sql.contains(hole) {
        true => all.iter().map(|text| sql.replace(hole, text)).collect(),
        false => vec![sql.clone()],
    };
    sqls.iter().flat_map(filled).collect()
}

/// A database with the setup, made anew as soon as an attempt changed anything in it.
pub struct Bench<'a> {
    suite: &'a Suite,
    directory: tempfile::TempDir,
    recursive: bool,
    connection: Connection,
    dump: Vec<String>,
}

impl<'a> Bench<'a> {
    pub fn new(suite: &'a Suite, contract: &str, recursive: bool) -> rusqlite::Result<Self> {
        let directory = tempfile::tempdir().unwrap();
        let template = Connection::open(directory.path().join("template.db"))?;
        template.execute_batch("PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; BEGIN")?;
        template.execute_batch(contract)?;
        for sql in &suite.setup {
            template.execute_batch(sql)?;
        }
        template.execute_batch("COMMIT")?;
        drop(template);
        let mut bench =
            Self { suite, directory, recursive, connection: Connection::open_in_memory()?, dump: Vec::new() };
        bench.renew()?;
        bench.dump = bench.dump_of()?;
        Ok(bench)
    }

    fn renew(&mut self) -> rusqlite::Result<()> {
        self.connection = Connection::open_in_memory()?;
        let file = |name: &str| -> PathBuf { self.directory.path().join(name) };
        std::fs::copy(file("template.db"), file("copy.db")).unwrap();
        self.connection = Connection::open(file("copy.db"))?;
        let recursive = if self.recursive { "ON" } else { "OFF" };
        self.connection.execute_batch(&format!(
            "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA recursive_triggers = {recursive}"
        ))?;
        self.suite.remember(&self.connection)
    }

    /// Tries one statement and returns everything that went wrong.
    pub fn attempt(&mut self, attempt: &Attempt, around: Around) -> Vec<String> {
        let mut wrong = Vec::new();
        for sql in &attempt.first {
            if let Err(error) = send(&self.connection, sql) {
                wrong.push(format!("{error} from {sql}, before"));
            }
        }
        if !attempt.first.is_empty() {
            self.suite.remember(&self.connection).unwrap();
        }
        let commands = self.count("SELECT count(*) FROM outbox");
        let before = if attempt.first.is_empty() { self.dump.clone() } else { self.dump_of().unwrap() };
        let begin = match around {
            Around::Nothing => "",
            Around::Transaction => "BEGIN IMMEDIATE; INSERT INTO orders VALUES('before')",
            Around::Savepoint => "BEGIN IMMEDIATE; INSERT INTO orders VALUES('before'); SAVEPOINT p",
        };
        self.connection.execute_batch(begin).unwrap();
        let answer = send(&self.connection, &attempt.sql);
        // The worker passes over the error, and over those that follow from it.
        if answer.is_err() && around == Around::Savepoint {
            drop(self.connection.execute_batch("ROLLBACK TO p"));
        }
        if around != Around::Nothing {
            drop(self.connection.execute_batch("COMMIT"));
        }
        assert!(self.connection.is_autocommit(), "still in a transaction: {}", attempt.sql);

        let more = self.count("SELECT count(*) FROM outbox") - commands;
        let code = answer.as_ref().err().and_then(|error| Code::find(&error.to_string()));
        if !is_right(&attempt.answer, &answer, code, more) {
            wrong.push(format!("the answer is {answer:?} and {more} more, not {}", attempt.answer));
        }
        let orders = self.count("SELECT count(*) FROM orders");
        if let (true, Some(code)) = (around != Around::Nothing, code) {
            let kept = i64::from(!is_workers(&attempt.sql));
            if orders != kept {
                wrong.push(format!("{orders} business rows after {}, not {kept}", code.as_str()));
            }
        }
        self.connection.execute_batch("DELETE FROM orders").unwrap();
        let dump = self.dump_of();
        if answer.is_err() && dump.as_ref() != Ok(&before) {
            wrong.push("refused, and something changed".to_owned());
        }
        if !attempt.first.is_empty() || dump.as_ref() != Ok(&self.dump) {
            wrong.extend(self.breaches());
            self.renew().unwrap();
        }
        wrong.iter().map(|what| format!("{what}: {}", attempt.sql)).collect()
    }

    /// The invariants that don't hold now.
    pub fn breaches(&self) -> Vec<String> {
        self.suite.breaches(&self.connection, "")
    }

    fn count(&self, sql: &str) -> i64 {
        self.connection.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Every row of every table that an attempt can change.
    fn dump_of(&self) -> rusqlite::Result<Vec<String>> {
        let mut dump = Vec::new();
        for table in self.suite.before.iter().map(String::as_str).chain(["outbox_refusal"]) {
            let mut statement = self.connection.prepare_cached(&format!("SELECT * FROM {table}"))?;
            let columns = statement.column_count();
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let values: rusqlite::Result<Vec<_>> = (0..columns).map(|column| row.get_ref(column)).collect();
                dump.push(format!("{table} {:?}", values?));
            }
        }
        Ok(dump)
    }
}

fn send(connection: &Connection, sql: &str) -> rusqlite::Result<()> {
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(())
}

fn is_right(right: &str, answer: &rusqlite::Result<()>, code: Option<Code>, more: i64) -> bool {
    match right {
        "same" => answer.is_ok() && more == 0,
        "none" => more == 0,
        "error" => answer.is_err() && more == 0,
        "FP" => code.is_some() && more == 0,
        _ => match right.strip_prefix("new ") {
            Some(count) => answer.is_ok() && more.to_string() == count,
            None => code.is_some_and(|code| code.as_str() == right) && more == 0,
        },
    }
}

/// Whether this is a statement of a worker, whose refusal undoes its whole transaction. Guards of state
/// undo their own statement only, so that one of them never takes a group commit with it.
fn is_workers(sql: &str) -> bool {
    let into =
        |view: &str| sql.contains(&format!("INTO outbox{view}(")) || sql.contains(&format!("INTO outbox{view} "));
    [
        "", "_fence", "_seal", "_claim", "_acquire", "_renew", "_release", "_tenure", "_verdict", "_cancel", "_adopt",
        "_discard",
    ]
    .iter()
    .any(|view| into(view))
}

/// Tries everything and fails with a list of what went wrong.
fn check(suite: &Suite, around: Around, recursive: bool) {
    let mut bench = Bench::new(suite, CONTRACT, recursive).unwrap();
    let mut wrong = bench.breaches();
    for attempt in &suite.attempts {
        wrong.extend(bench.attempt(attempt, around));
    }
    assert!(wrong.is_empty(), "{} breaches:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn h60_h61_no_statement_gets_round_the_fence() {
    let suite = suite();
    assert!(suite.attempts.len() > 3500, "only {} attempts", suite.attempts.len());
    check(&suite, Around::Nothing, false);
}

#[test]
fn h60_h61_nor_with_recursive_triggers() {
    check(&brief_suite(), Around::Nothing, true);
}

#[test]
fn h60_h61_nor_in_a_transaction_after_a_business_row() {
    check(&brief_suite(), Around::Transaction, false);
}

#[test]
fn h60_h61_nor_inside_a_savepoint() {
    check(&brief_suite(), Around::Savepoint, true);
}
