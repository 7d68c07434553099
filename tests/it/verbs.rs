//! Every verb on a command in every state, through each way that has it: plain SQL and the library as a
//! holder, the library as an operator.
//!
//! Each way must answer the same, and `docs/operations.md` must say so. What was refused has changed
//! nothing; what an operator did stands in the audit table.

use fencepost::rules::{Answer, Code, FencingToken};
use fencepost::sqlite::operator::{Act, Decision, OperatorError, decide, reissue};
use fencepost::sqlite::{self, CONTRACT, Fenced, Held, WorkerError};
use rusqlite::Connection;

/// The states, and how a pending command with one try gets there.
const STATES: [(&str, &str); 9] = [
    ("`pending`", ""),
    ("`sending`, not armed", "UPDATE outbox_state SET state = 'sending', attempt_no = 2, tries = 2;
        INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms) VALUES (1, 2, 1, 'hold', 5)"),
    ("`sending`, armed", "UPDATE outbox_state SET state = 'sending', attempt_no = 2, tries = 2;
        INSERT INTO outbox_attempt(n, attempt_no, epoch, on_unknown, begun_ms, armed_ms) VALUES (1, 2, 1, 'hold', 5, 6)"),
    ("`in_doubt`", "UPDATE outbox_state SET state = 'in_doubt', effect = 'possible'"),
    ("`parked` by a take-over", "UPDATE outbox_state SET state = 'parked'"),
    ("the same, effect possible", "UPDATE outbox_state SET state = 'parked', effect = 'possible'"),
    ("`parked` by `on_dead`", "UPDATE outbox_state SET state = 'parked', reason = 'refused'"),
    ("`delivered`", "UPDATE outbox_state SET state = 'delivered', effect = 'done'"),
    ("`dead`", "UPDATE outbox_state SET state = 'dead', reason = 'exhausted'"),
];

const ACT: Act<'_> = Act { who: "ann", reason: "asked for it", now_ms: 1_800_000_000_000 };

/// A verb, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Of(Decision),
    Reissue,
}

const VERBS: [Verb; 7] = [
    Verb::Of(Decision::Cancel),
    Verb::Of(Decision::Adopt),
    Verb::Of(Decision::Discard),
    Verb::Reissue,
    Verb::Of(Decision::Resolve(Answer::Delivered)),
    Verb::Of(Decision::Resolve(Answer::NotDelivered)),
    Verb::Of(Decision::Resolve(Answer::GivenUp)),
];

impl Verb {
    fn name(self) -> String {
        match self {
            Self::Of(Decision::Resolve(answer)) => format!("resolve {}", sqlite::operator::word(answer)),
            Self::Of(decision) => decision.verb().to_owned(),
            Self::Reissue => "reissue".to_owned(),
        }
    }

    fn by_sql(self, db: &Connection, token: i64, id: &str) -> Option<Result<(), Option<Code>>> {
        let view = match self {
            Self::Of(Decision::Resolve(_)) | Self::Reissue => return None,
            Self::Of(decision) => decision.verb(),
        };
        let sql = format!("INSERT INTO outbox_{view}(scope, token, holder, id) VALUES ('s', ?1, 'h', ?2)");
        let done = db.execute(&sql, rusqlite::params![token, id]).map(drop);
        Some(done.map_err(|error| Code::find(&error.to_string())))
    }

    fn by_library(self, db: &mut Connection, token: i64, id: &str) -> Option<Result<(), Option<Code>>> {
        let held = Held::new("s", FencingToken::new(token).unwrap()).holder("h");
        let run = |db: &mut Connection| -> Result<(), WorkerError> {
            let mut fenced = Fenced::begin(db, &held)?;
            match self {
                Self::Of(Decision::Cancel) => fenced.cancel(id)?,
                Self::Of(Decision::Adopt) => fenced.adopt(id)?,
                Self::Of(Decision::Discard) => fenced.discard(id)?,
                Self::Reissue => drop(fenced.reissue(id, None)?),
                Self::Of(Decision::Resolve(_)) => unreachable!("only an operator resolves"),
            }
            fenced.commit()
        };
        if matches!(self, Self::Of(Decision::Resolve(_))) { None } else { Some(run(db).map_err(|error| error.code())) }
    }

    fn by_operator(self, db: &mut Connection, id: &str) -> Result<(), Option<Code>> {
        let done = match self {
            Self::Of(decision) => decide(db, decision, &[id], &ACT),
            Self::Reissue => reissue(db, &[id], None, &ACT),
        };
        done.map(drop).map_err(|error| error.code())
    }
}

/// A command `x` of token 7 in this state, with one try behind it.
fn outbox(state: &str) -> Connection {
    let db = Connection::open_in_memory().unwrap();
    db.execute_batch(CONTRACT).unwrap();
    db.execute_batch(
        "INSERT INTO outbox(id, scope, token, holder, key, kind, destination, payload)
           VALUES ('x', 's', 7, 'h', 'k', 'email', 'main', 'hello');
         UPDATE outbox_state SET attempt_no = 1, tries = 1;
         INSERT INTO outbox_attempt VALUES (1, 1, 1, 'hold', 1, NULL, 2, 'deferred', '{}')",
    )
    .unwrap();
    db.execute_batch(state).unwrap();
    db
}

fn text(db: &Connection, sql: &str) -> String {
    db.query_row(sql, [], |row| row.get(0)).unwrap()
}

fn row(db: &Connection) -> String {
    text(
        db,
        "SELECT group_concat(state || coalesce('/' || reason, '') || effect || tries || attempt_no || coalesce(key, '') || updated_ms
             || coalesce(adopted_token, '')) FROM outbox_state",
    )
}

/// What a verb changed, in the words of the table.
fn changes(db: &Connection, effect_before: &str) -> String {
    if text(db, "SELECT count(*) || '' FROM outbox") == "2" {
        return "a new command".to_owned();
    }
    let mut said = vec![format!("`{}`", text(db, "SELECT state || coalesce('/' || reason, '') FROM outbox_state"))];
    let effect = text(db, "SELECT effect FROM outbox_state");
    if effect != effect_before {
        said.push(format!("effect {effect}"));
    }
    if text(db, "SELECT tries || '' FROM outbox_state") == "0" {
        said.push("fresh tries".to_owned());
    }
    if text(db, "SELECT coalesce(key, '') FROM outbox_state").is_empty() {
        said.push("key free".to_owned());
    }
    if text(db, "SELECT count(*) || '' FROM outbox_attempt WHERE evidence LIKE '%recalled%'") == "1" {
        said.push("attempt recalled".to_owned());
    }
    said.join(", ")
}

/// One cell: what this way answers, with the proof that a refusal changes nothing.
fn cell(
    state: &str,
    verb: Verb,
    way: impl FnOnce(&mut Connection) -> Option<Result<(), Option<Code>>>,
) -> Option<String> {
    let mut db = outbox(state);
    let (row_before, effect_before) = (row(&db), text(&db, "SELECT effect FROM outbox_state"));
    match way(&mut db)? {
        Ok(()) => Some(changes(&db, &effect_before)),
        Err(code) => {
            assert_eq!(row(&db), row_before, "{verb:?} was refused");
            assert!(db.is_autocommit(), "{verb:?} is undone");
            assert_eq!(text(&db, "SELECT count(*) || '' FROM outbox_audit"), "0");
            Some(code.unwrap_or_else(|| panic!("{verb:?} in {state}: no code")).as_str().to_owned())
        }
    }
}

/// The table, as each way answers it.
fn table() -> String {
    let names: Vec<String> = VERBS.iter().map(|verb| verb.name()).collect();
    let mut lines =
        vec![format!("| state | {} |", names.join(" | ")), format!("|{}", " --- |".repeat(VERBS.len() + 1))];
    for (name, state) in STATES {
        let cells = VERBS.map(|verb| {
            let by_operator = cell(state, verb, |db| Some(verb.by_operator(db, "x"))).unwrap();
            let by_library = cell(state, verb, |db| verb.by_library(db, 7, "x"));
            let by_sql = cell(state, verb, |db| verb.by_sql(db, 7, "x"));
            assert!(by_library.is_none_or(|said| said == by_operator), "{verb:?} on {name}: the library differs");
            assert!(by_sql.is_none_or(|said| said == by_operator), "{verb:?} on {name}: plain SQL differs");
            by_operator
        });
        lines.push(format!("| {name} | {} |", cells.join(" | ")));
    }
    lines.join("\n")
}

#[test]
fn the_runbook_says_what_each_verb_does_in_each_state() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md")).unwrap();
    let section = page.split("<!-- verbs -->").nth(1).expect("the section between two markers <!-- verbs -->");
    let said: Vec<&str> = section.lines().filter(|line| line.starts_with('|')).collect();
    let right = table();
    assert_eq!(said, right.lines().collect::<Vec<_>>(), "the table must be:\n{right}");
}

/// A stale holder can do nothing, in no state, and an unknown command is none. Nothing changes, so one
/// outbox for each state is enough.
#[test]
fn a_stale_holder_can_do_nothing() {
    for (name, state) in STATES {
        let mut db = outbox(state);
        let before = row(&db);
        for verb in VERBS {
            for (token, id, right) in [(6, "x", "FP001"), (7, "nobody", "FP003")] {
                let said = [verb.by_library(&mut db, token, id), verb.by_sql(&db, token, id)];
                for answer in said.into_iter().flatten() {
                    assert_eq!(answer.unwrap_err().map(Code::as_str), Some(right), "{verb:?} on {name}");
                }
            }
            let said = verb.by_operator(&mut db, "nobody").unwrap_err();
            assert_eq!(said.map(Code::as_str), Some("FP003"), "{verb:?} on {name}");
        }
        assert_eq!(row(&db), before, "{name}");
        assert_eq!(text(&db, "SELECT count(*) || '' FROM outbox_audit"), "0");
    }
}

/// What an operator does is written down: who, what, why, before and after.
#[test]
fn an_operator_is_audited_for_every_verb() {
    for (verb, state, before, after) in [
        (VERBS[0], STATES[1].1, "sending", "dead"),
        (VERBS[1], STATES[4].1, "parked", "pending"),
        (VERBS[2], STATES[6].1, "parked", "dead"),
        (VERBS[4], STATES[3].1, "in_doubt", "delivered"),
        (VERBS[3], STATES[8].1, "dead", ""),
    ] {
        let mut db = outbox(state);
        verb.by_operator(&mut db, "x").unwrap();
        let said = text(
            &db,
            "SELECT at_ms || '|' || who || '|' || verb || '|' || id || '|' || scope || '|' || reason || '|' ||
                json_extract(before, '$.state') || '|' || coalesce(json_extract(after, '$.state'), '') FROM outbox_audit",
        );
        let word = verb.name().split(' ').next().unwrap().to_owned();
        assert_eq!(said, format!("{}|ann|{word}|x|s|asked for it|{before}|{after}", ACT.now_ms));
    }
}

/// Adopted stands for this take-over, and for no later one.
#[test]
fn an_operator_adopts_for_this_takeover() {
    let mut db = outbox(STATES[4].1);
    db.execute_batch("UPDATE outbox_scope SET on_takeover = 'review', watermark = 9, holder = NULL").unwrap();
    db.execute_batch("UPDATE outbox_state SET found_open = 3, found_row = 2").unwrap();
    decide(&mut db, Decision::Adopt, &["x"], &ACT).unwrap();
    let adopted = "SELECT adopted_era || '|' || adopted_token || '|' || found_open || '|' || found_row || '|' || fresh_no || '|' ||
        (due_ms = set_ms) FROM outbox_state";
    assert_eq!(text(&db, adopted), "0|9|0|0|1|1");
    db.execute_batch("UPDATE outbox_scope SET watermark = 10").unwrap();
    assert_eq!(text(&db, "SELECT state FROM outbox_state"), "parked");
}

/// A refusal says what stands against it: too late, in doubt and ended are three things.
#[test]
fn refusals_tell_too_late_in_doubt_and_final_apart() {
    for (state, words) in [(2, "too late"), (3, "resolve"), (8, "dead (exhausted)")] {
        let mut db = outbox(STATES[state].1);
        let held = Held::new("s", FencingToken::new(7).unwrap()).holder("h");
        let mut fenced = Fenced::begin(&mut db, &held).unwrap();
        let by_library = fenced.cancel("x").unwrap_err().to_string();
        assert!(matches!(fenced.commit(), Err(WorkerError::Left)), "a refusal can't be passed over");
        let by_operator = decide(&mut db, Decision::Cancel, &["x"], &ACT).unwrap_err().to_string();
        assert!(by_library.contains(words) && by_operator.contains(words), "{by_library} / {by_operator}");
    }
    let mut db = outbox("");
    let held = Held::new("s", FencingToken::new(7).unwrap()).holder("h");
    let mut fenced = Fenced::begin(&mut db, &held).unwrap();
    let unknown = fenced.cancel("nobody").unwrap_err().to_string();
    assert!(unknown.contains("FP003") && unknown.contains("nobody") && unknown.contains("scope s"), "{unknown}");
}

/// A reissue is a copy of the content, under the current token, without key and times, linked to the old
/// one; its id can be repeated safely.
#[test]
fn a_reissue_is_a_new_command() {
    let mut db = outbox(STATES[8].1);
    db.execute_batch("UPDATE outbox_scope SET watermark = 9, holder = NULL").unwrap();
    let held = Held::new("s", FencingToken::new(9).unwrap());
    for duplicate in [false, true] {
        let mut fenced = Fenced::begin(&mut db, &held).unwrap();
        let new = fenced.reissue("x", Some("y")).unwrap();
        assert_eq!(matches!(new, sqlite::Enqueued::Duplicate { .. }), duplicate, "{new:?}");
        fenced.commit().unwrap();
    }
    let copy = "SELECT token || '|' || coalesce(key, '-') || '|' || reissue_of || '|' || kind || '|' || destination || '|' || payload
        FROM outbox WHERE id = 'y'";
    assert_eq!(text(&db, copy), "9|-|x|email|main|hello");
    assert_eq!(text(&db, "SELECT seq || state FROM outbox_state WHERE n = 2"), "2pending");
    let mut fenced = Fenced::begin(&mut db, &held).unwrap();
    assert_eq!(fenced.reissue("x", Some("x")).unwrap_err().code(), Some(Code::IllegalValue));
    drop(fenced);
    let error = reissue(&mut db, &["x"], Some("y"), &ACT).unwrap_err();
    assert!(matches!(error, OperatorError::Contract(Code::IdExists)), "{error}");
    assert_eq!(text(&db, "SELECT count(*) || '' FROM outbox"), "2");
}

/// Of several commands all are decided or none.
#[test]
fn one_that_does_not_fit_stops_all() {
    let mut db = outbox(STATES[3].1);
    db.execute_batch(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('y', 't', 1, 'email', 'main', '')",
    )
    .unwrap();
    let error = decide(&mut db, Decision::Resolve(Answer::GivenUp), &["x", "y"], &ACT).unwrap_err();
    assert!(error.to_string().contains("command y is pending, not in doubt"), "{error}");
    assert_eq!(text(&db, "SELECT state FROM outbox_state WHERE n = 1"), "in_doubt");
    assert_eq!(text(&db, "SELECT count(*) || '' FROM outbox_audit"), "0");
}
