//! Negative controls of the contract: each guard is taken away, and the suite of ways round the fence
//! must notice. A guard that nothing misses is either useless or untested.
//!
//! First every trigger is dropped whole. Then every single condition of every trigger is switched off,
//! one at a time, found by its shape in `schema.sql`. What another guard covers is listed by hand with
//! the guard that covers it; the list may hold nothing that is noticed after all.

use crate::bypass::{Around, Attempt, Bench, Suite, brief_suite};
use fencepost::sqlite::{CONTRACT, contract_objects};
use regex::Regex;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A contract with one guard less.
struct Mutant {
    name: String,
    contract: String,
    /// What its guard speaks of, and the code that it raises: attempts that fit are tried first.
    words: Vec<String>,
    code: String,
}

/// A mutant, what covers for it, and the text of that cover with what takes its place.
type Covered = (&'static str, &'static str, Option<(&'static str, &'static str)>);

/// Mutants that nothing notices: the text that is changed, what covers for it, and that cover taken away
/// too, after which it must be noticed. Without a third text nothing covers: the condition only saves
/// work, and the result is the same without it.
const COVERED: [Covered; 12] = [
    (
        "outbox_keep: AND x.state IN ('delivered', 'dead') -> ",
        "outbox_scope_prune lets pruned_seq rise over final commands only",
        Some(("AND state NOT IN ('delivered', 'dead')))", "AND 0))")),
    ),
    (
        "outbox_attempt_keep: AND x.state IN ('delivered', 'dead') -> ",
        "outbox_scope_prune lets pruned_seq rise over final commands only",
        Some(("AND state NOT IN ('delivered', 'dead')))", "AND 0))")),
    ),
    ("outbox_state_event: NEW.state = 'pending' -> 1", "out of in_doubt and parked everything else is an end", None),
    (
        "outbox_takeover: coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) <> 'deliver' -> 1",
        "each statement asks for its policy again: this only saves work",
        None,
    ),
    (
        "outbox_takeover: coalesce(NEW.on_takeover, (SELECT on_takeover FROM outbox_policy)) = 'review' -> 1",
        "under discard nothing is pending any more",
        None,
    ),
    ("outbox_verdict_do: a.attempt_no = x.attempt_no -> 1", "the only open attempt is the current one", None),
    ("outbox_verdict_do: typeof(NEW.id) <> 'text' -> 0", "no command has an id that is not a text", None),
    ("outbox_takeover: AND state = 'sending' -> ", "an unarmed open attempt is of a command that is sending", None),
    (
        "outbox_admit: NEW.scope IS NULL -> 0",
        "outbox_claim_do checks the type",
        Some(("typeof(NEW.scope) <> 'text' OR typeof(NEW.holder) NOT", "typeof(NEW.holder) NOT")),
    ),
    (
        "outbox_admit: NEW.token IS NULL -> 0",
        "outbox_claim_do checks the type",
        Some(("NOT (typeof(NEW.token) = 'integer'", "NOT (NEW.token IS NULL OR typeof(NEW.token) = 'integer'")),
    ),
    ("outbox_lane_leave: NEW.state IN ('delivered', 'dead') -> 1", "the head is found again, and it is the same", None),
    (
        "outbox_lane_wait: NEW.state IN ('pending', 'sending', 'in_doubt', 'parked') -> 1",
        "outbox_lane_leave writes the lane of an ended head, or has written it",
        None,
    ),
];

#[test]
fn every_trigger_is_needed() {
    let triggers = contract_objects().unwrap().into_iter().filter(|object| object.kind == "trigger");
    let mutants = triggers.map(|trigger| Mutant {
        contract: format!("{CONTRACT}\nDROP TRIGGER {};", trigger.name),
        words: vec![format!("{} ", trigger.table), format!("{}(", trigger.table)],
        code: code_after(&trigger.sql),
        name: trigger.name,
    });
    check(mutants.collect());
}

#[test]
fn every_condition_is_needed() {
    let mutants = conditions();
    assert!(mutants.len() > 350, "only {} conditions", mutants.len());
    check(mutants);
}

#[test]
fn what_is_covered_is_needed_once_its_cover_is_gone() {
    let suite = brief_suite();
    let mutants = conditions();
    for (name, cover, without) in COVERED {
        let mutant = mutants.iter().find(|mutant| mutant.name == name);
        let mutant = mutant.unwrap_or_else(|| panic!("no such condition any more: {name}"));
        let Some((text, off)) = without else { continue };
        assert!(mutant.contract.contains(text), "no such cover any more: {text}");
        let contract = mutant.contract.replacen(text, off, 1);
        let both = Mutant { name: name.to_owned(), contract, words: mutant.words.clone(), code: mutant.code.clone() };
        assert!(is_noticed(&suite, &both), "unnoticed even without its cover ({cover}): {name}");
    }
}

/// Each condition of a trigger, by its shape, switched off where it stands.
fn conditions() -> Vec<Mutant> {
    let shapes = [
        (r"NEW\.(\w+) IS OLD\.\w+", "1"),
        (r"NEW\.(\w+) IS NOT OLD\.\w+", "0"),
        (r"NEW\.(\w+) IS NOT \d", "0"),
        (r"NEW\.(\w+) [<>] OLD\.\w+", "0"),
        (r"NEW\.(\w+) IS NULL", "0"),
        (r"NEW\.(\w+) (?:NOT )?IN \([^()]*\)", "X"),
        (r"NEW\.(\w+) NOT BETWEEN \d+ AND \d+", "0"),
        (r"NEW\.(\w+) (?:<|>|<>|=) (?:'\w*'|\d+)", "X"),
        (r"typeof\(NEW\.(\w+)\) <> '\w+'", "0"),
        (r"typeof\(NEW\.(\w+)\) NOT IN \([^()]*\)", "0"),
        (r"length\(CAST\(NEW\.(\w+) AS BLOB\)\) (?:NOT BETWEEN \d+ AND|>) \d+", "0"),
        (r"NEW\.(\w+) GLOB '[^']*'", "0"),
        (r"instr\(CAST\((?:[^()]|\([^()]*\))*AS BLOB\), x'00'\)", "0"),
        (r"(?:\b\w+(?:\.\w+)? \|\| |coalesce\([^()]*\)(?: \|\| )?|NEW\.\w+(?: \|\| )?)+ GLOB CAST\([^()]*\)", "0"),
        (r"(?:OR|AND) (?:NOT )?(EXISTS) \((?:[^()]|\([^()]*\))*\)", ""),
        (r"WHEN ([^\n]*?) THEN RAISE", "WHEN 0 THEN RAISE"),
        (r"s\.source = '(lease)' OR ", ""),
        (r"(?:x\.lane|o\.kind|o\.destination|o\.scope) = (?:NEW\.(\w+)|coalesce\(NEW\.\w+, ''\))", "1"),
        (r"CAST\(coalesce\(o\.(payload)[^\n]*? = CAST\(coalesce\(NEW\.payload, NEW\.payload_bytes\) AS BLOB\)", "1"),
        (r"AND CASE WHEN trim\(o\.(headers)[^\n]*\n\s*IS CASE WHEN trim\(NEW\.headers[^\n]*? END", ""),
        (r"\(NEW\.(key) IS NULL OR x\.key IS NEW\.key\)", "1"),
        (r"x\.(scope) = NEW\.scope AND NOT \(x", "NOT (x"),
        (r"NOT \(x\.(state) = 'dead'[^()]*\([^()]*\)[^()]*\)", "1"),
        (r"coalesce\(holder, NEW\.(holder)\)", "holder"),
        (r"coalesce\(holder, NEW\.(holder)\)", "NEW.holder"),
        (r"coalesce\(source, NEW\.(source)\)", "source"),
        (r"coalesce\(source, NEW\.(source)\)", "NEW.source"),
        (r"coalesce\(s\.require_seal, p\.(require_seal)\)", "s.require_seal"),
        (r"coalesce\(s\.require_seal, p\.(require_seal)\)", "p.require_seal"),
        (r"coalesce\(s\.max_jump, p\.(max_jump)\)", "s.max_jump"),
        (r"coalesce\(s\.max_jump, p\.(max_jump)\)", "p.max_jump"),
        (r"s\.(watermark) > 0 AND ", ""),
        (r"state = '(?:parked|pending|sending)' AND ", ""),
        (r"AND state = '(?:parked|pending|sending)'", ""),
        (r"reason IS NULL AND ", ""),
        (r"\(era < NEW\.era OR token < NEW\.watermark\)", "1"),
        (r"era < NEW\.era OR ", ""),
        (r" OR token < NEW\.watermark", ""),
        (r"(?:a\.)?armed_ms IS NULL", "1"),
        (r"(?:a\.)?settled_ms IS NULL", "1"),
        (r"a\.attempt_no = x\.attempt_no", "1"),
        (r"coalesce\(NEW\.(on_takeover), [^\n]*?\) (?:=|<>) '\w+'", "X"),
        (r"coalesce\(NEW\.(on_takeover), [^\n]*?outbox_policy\)\)", "NEW.on_takeover"),
        (r"coalesce\(NEW\.(on_takeover), [^\n]*?outbox_policy\)\)", "(SELECT on_takeover FROM outbox_policy)"),
        (r"NEW\.(era) = OLD\.era", "1"),
        (r"state IN \('pending', 'parked'\) OR ", ""),
        (r"coalesce\(NEW\.(verb), ''\) NOT IN \([^()]*\)", "0"),
        (r"NEW\.(scope) IS NOT \(SELECT scope[^\n]*", "0;"),
        (r"NEW\.verb = 'cancel' OR ", ""),
        (r"reason IS NOT NULL OR ", ""),
        (r" OR effect <> 'none'", ""),
        (r"CASE WHEN effect = 'none' THEN NULL ELSE key END", "key"),
        (r"CASE WHEN effect = 'none' THEN NULL ELSE key END", "NULL"),
        (r"coalesce\(reason, 'superseded'\)", "'superseded'"),
        (r"(?:tries|found_open|found_row) = 0, ", ""),
        (r"fresh_no = attempt_no,", ""),
        (r"first_(?:begun|unknown)_ms = NULL, ", ""),
        (r"max\((CAST[^\n]*? AS INTEGER\)), coalesce\(\(SELECT not_before_ms[^\n]*?, 0\)\)", "9"),
        (r"\(adopted_era, adopted_token\) = [^\n]*?NEW\.scope\),", ""),
        (r"u\.(scope) = NEW\.scope AND ", ""),
        (r"AND x\.(scope) = NEW\.scope ", ""),
        (r"AND x\.(key) IS NEW\.key ", ""),
        (r"AND x\.state IN \('delivered', 'dead'\)", ""),
        (r"AND x\.seq <= s\.(pruned_seq)", ""),
        (r"x\.(erased_ms) IS NOT NULL", "1"),
        (r"OLD\.(erased_ms) IS NULL", "1"),
        (r"NEW\.(until_ms) >= OLD\.until_ms", "1"),
        (r"OLD\.(until_ms) > CAST[^\n]* AS INTEGER\)", "0"),
        (r"NEW\.(pruned_seq) >= OLD\.next_seq", "0"),
        (r"n < OLD\.(n)\b", "0"),
    ];
    let triggers = CONTRACT.find("CREATE TRIGGER").unwrap();
    let columns = Regex::new(r"NEW\.(\w+)").unwrap();
    let mut mutants = Vec::new();
    for (shape, off) in shapes {
        for found in Regex::new(shape).unwrap().captures_iter(CONTRACT) {
            let whole = found.get(0).unwrap();
            if whole.start() < triggers || is_comment(whole.start()) {
                continue;
            }
            for off in if off == "X" { vec!["0", "1"] } else { vec![off] } {
                let contract = format!("{}{off}{}", &CONTRACT[..whole.start()], &CONTRACT[whole.end()..]);
                let trigger = trigger_at(whole.start());
                let name = format!("{trigger}: {} -> {off}", whole.as_str());
                let table = trigger.rsplit_once('_').map_or("", |(table, _)| table).to_owned();
                let columns = columns.captures_iter(whole.as_str()).map(|found| found[1].to_owned());
                let table = [format!("{table} "), format!("{table}(")];
                let verbs: &[&str] = match trigger {
                    "outbox_verdict_do" => &["outbox_cancel(", "outbox_adopt(", "outbox_discard("],
                    "outbox_takeover" => &["outbox_seal(", "'v'", "'p'"],
                    _ => &[],
                };
                let words = columns.chain(table).chain(verbs.iter().map(|verb| (*verb).to_owned())).collect();
                mutants.push(Mutant { name, contract, words, code: code_after(&CONTRACT[whole.start()..]) });
            }
        }
    }
    mutants
}

/// The code that is raised next.
fn code_after(sql: &str) -> String {
    sql.find("'FP0").and_then(|at| sql.get(at + 1..at + 6)).unwrap_or_default().to_owned()
}

fn is_comment(at: usize) -> bool {
    let line = CONTRACT[..at].rfind('\n').map_or(0, |end| end + 1);
    CONTRACT[line..at].contains("--")
}

fn trigger_at(at: usize) -> &'static str {
    let start = CONTRACT[..at].rfind("CREATE TRIGGER ").unwrap() + "CREATE TRIGGER ".len();
    CONTRACT[start..].split_whitespace().next().unwrap()
}

/// Fails with the names of the mutants that nothing noticed and nothing covers.
fn check(mutants: Vec<Mutant>) {
    let suite = brief_suite();
    let next = AtomicUsize::new(0);
    let unnoticed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(mutant) = mutants.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if !is_noticed(&suite, mutant) {
                        unnoticed.lock().unwrap().push(mutant.name.clone());
                    }
                }
            });
        }
    });
    let mut unnoticed = unnoticed.into_inner().unwrap();
    unnoticed.sort();
    let uncovered: Vec<_> =
        unnoticed.iter().filter(|name| !COVERED.iter().any(|covered| covered.0 == **name)).collect();
    let known = |name: &str| mutants.iter().any(|mutant| mutant.name == name);
    let noticed = COVERED.iter().filter(|covered| known(covered.0) && !unnoticed.iter().any(|name| name == covered.0));
    assert_eq!(noticed.map(|covered| covered.0).collect::<Vec<_>>(), [""; 0], "noticed after all");
    assert!(uncovered.is_empty(), "{} of {} unnoticed:\n{}", uncovered.len(), mutants.len(), join(&uncovered));
}

fn join(names: &[&String]) -> String {
    names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join("\n")
}

/// A contract that can't even make the setup is noticed too.
fn is_noticed(suite: &Suite, mutant: &Mutant) -> bool {
    let Ok(mut bench) = Bench::new(suite, &mutant.contract, false) else { return true };
    if !bench.breaches().is_empty() {
        return true;
    }
    let mut attempts: Vec<&Attempt> = suite.attempts.iter().collect();
    let hits = |attempt: &&Attempt| {
        let words = mutant.words.iter().filter(|word| attempt.sql.contains(word.as_str())).count();
        words + 2 * usize::from(attempt.answer == mutant.code)
    };
    attempts.sort_by_key(|attempt| std::cmp::Reverse(hits(attempt)));
    attempts.into_iter().any(|attempt| !bench.attempt(attempt, Around::Nothing).is_empty())
}
