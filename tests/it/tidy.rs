//! What must stay true of the source itself, as tables: who may import whom, what the rules may not
//! touch, where SQL stands, which words are never written.
//!
//! Each check is a search in text, with a table of exceptions and their reasons. It is coarse and
//! cheap; the compiler and clippy do the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use regex::Regex;

/// Imports go one way: each module of the library, and what of the crate it may name.
const IMPORTS: [(&str, &[&str]); 12] = [
    ("rules", &[]),
    // A test build can move the clocks.
    ("clock", &["faults"]),
    ("faults", &[]),
    ("redact", &[]),
    ("tls", &[]),
    // Only its conformance checks look at a clock.
    ("effect", &["rules", "clock"]),
    ("store", &["rules", "effect"]),
    // `sqlite` names itself where a test wants the whole contract.
    ("sqlite", &["rules", "effect", "store", "clock", "faults", "sqlite"]),
    ("webhook", &["rules", "effect", "clock", "redact", "tls"]),
    ("email", &["rules", "effect", "clock", "tls"]),
    // The settings of the senders are what a configuration is made of.
    ("config", &["rules", "redact", "webhook", "email"]),
    ("dispatcher", &["rules", "store", "effect", "clock", "faults", "redact"]),
];

/// What the rules must be free of.
const IMPURE: [&str; 12] = [
    r"\basync\b",
    r"\.await\b",
    r"\bcrate::",
    r"\bstd::(fs|net|env|process|thread|time|io|sync|cell)\b",
    r"\bSystemTime\b",
    r"\bInstant\b",
    r"\b(fast)?rand\b",
    r"\bunsafe\b",
    r"^\s*(pub(\(\w+\))? )?static\b",
    r"\bprintln!",
    r"\btracing\b",
    r"\brusqlite\b",
];

/// Files outside `src/sqlite` with SQL in them, and why.
const SQL_ELSEWHERE: [(&str, &str); 2] = [
    ("src/bin/fencepost/demo", "the demo is an application of its own, with business tables and workers"),
    ("src/bin/fencepost/schema.rs", "it prints migrations, and one of them needs a savepoint"),
];

/// The only files that may read a clock, and why.
const CLOCK_READERS: [(&str, &str); 1] = [("src/clock.rs", "the one reader of time")];

/// Tests that wait for a fixed time: file, how often, why.
const SLEEPING_TESTS: [(&str, usize, &str); 2] = [
    ("tests/it/webhook.rs", 1, "polls for a condition between two looks, on the runtime under test"),
    ("tests/it/load.rs", 2, "a load is a rate for some time; nothing is waited for"),
];

/// Nobody can promise these, so they are written nowhere, not even in a negation.
const NEVER_SAID: [&str; 8] = [
    r"exactly[\s-]once",
    r"guaranteed\s+delivery",
    r"guarantees?\s+delivery",
    r"(can't|cannot|can\s+not|never)\s+be\s+lost",
    r"never\s+los(es?|t)\b",
    r"zero\s+duplicates",
    r"no\s+duplicates",
    r"dispatcher\s+is\s+dead,\s+so",
];

/// Names and addresses that may stand in a text: reserved ones, and the standards that are cited.
const HOSTS: [&str; 7] = [
    "example.com",
    "example.org",
    "example.net",
    "127.0.0.1",
    "localhost",
    "keepachangelog.com",
    "www.standardwebhooks.com",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below a folder with this ending, by their path from the root.
fn files(folder: &str, ending: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == ending) {
                found.insert(name(&path), std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    assert!(!found.is_empty(), "no {ending} files in {folder}");
    found
}

fn name(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()
}

/// The code without its comments, line by line. A `//` inside a string is no comment.
fn code(text: &str) -> Vec<(usize, &str)> {
    let comment = Regex::new(r"(^|\s)//.*$").unwrap();
    text.lines()
        .enumerate()
        .map(|(at, line)| (at + 1, comment.find(line).map_or(line, |comment| &line[..comment.start()])))
        .collect()
}

/// The code before the unit tests of a file.
fn production(text: &str) -> Vec<(usize, &str)> {
    code(text).into_iter().take_while(|(_, line)| !line.starts_with("#[cfg(test)]")).collect()
}

fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

/// The module of the library that a file belongs to; `None` for the root and for the binary.
fn module(file: &str) -> Option<&str> {
    let inside = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let first = inside.split('/').next()?;
    (first != "lib" && first != "bin").then_some(first)
}

/// The modules of this crate that a text names.
fn named(text: &str) -> BTreeSet<String> {
    let single = Regex::new(r"\bcrate::(\w+)").unwrap();
    let group = Regex::new(r"\bcrate::\{([^;]*)\}").unwrap();
    let (inner, word) = (Regex::new(r"\{[^{}]*\}").unwrap(), Regex::new(r"^\s*(\w+)").unwrap());
    let mut found: BTreeSet<String> = single.captures_iter(text).map(|part| part[1].to_owned()).collect();
    for part in group.captures_iter(text) {
        // Inner braces hold names of a module, not modules.
        let flat = inner.replace_all(&part[1], "").into_owned();
        found.extend(flat.split(',').filter_map(|item| word.captures(item)).map(|item| item[1].to_owned()));
    }
    found
}

#[test]
fn imports_go_one_way() {
    assert_eq!(named("use crate::a::B;\nuse crate::{c::{D, E}, f};"), ["a", "c", "f"].map(str::to_owned).into());
    let allowed: BTreeMap<_, _> = IMPORTS.into_iter().collect();
    let mut wrong = Vec::new();
    for (file, text) in files("src", "rs") {
        let Some(module) = module(&file) else { continue };
        let Some(allowed) = allowed.get(module) else {
            wrong.push(format!("{file}: the module {module} is not in the table"));
            continue;
        };
        let lines: Vec<&str> = code(&text).into_iter().map(|(_, line)| line).collect();
        let text = lines.join("\n");
        let others = named(&text).into_iter().filter(|other| other != module && !allowed.contains(&other.as_str()));
        wrong.extend(others.map(|other| format!("{file} names crate::{other}")));
        // What a file can't reach through `super` is what it can't name without `crate`.
        let top = file.matches('/').count() == 1 || file.ends_with("/mod.rs");
        let leaves = |line: &&&str| line.contains("super::super") || (top && line.starts_with("use super"));
        wrong.extend(lines.iter().filter(leaves).map(|line| format!("{file} leaves its module: {line}")));
    }
    assert_none("imports against the table", &wrong);
}

#[test]
fn a_module_is_in_the_table_once_and_there() {
    let library = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let declared = Regex::new(r"(?m)^(?:pub )?mod (\w+);").unwrap();
    let declared: BTreeSet<&str> = declared.captures_iter(&library).map(|part| part.get(1).unwrap().as_str()).collect();
    assert_eq!(declared, IMPORTS.iter().map(|(module, _)| *module).collect());
}

#[test]
fn the_rules_are_pure() {
    let impure = IMPURE.map(|word| Regex::new(word).unwrap());
    let mut wrong = Vec::new();
    for (file, text) in files("src/rules", "rs").into_iter().filter(|(file, _)| !file.ends_with("/tests.rs")) {
        for (at, line) in production(&text) {
            let found = impure.iter().filter(|word| word.is_match(line));
            wrong.extend(found.map(|word| format!("{file}:{at}: {word}: {line}")));
        }
    }
    assert_none("the rules take arguments and give values, nothing else", &wrong);
}

#[test]
fn sql_stands_in_one_place() {
    let sql = Regex::new(
        r"\b(SELECT\s+[\w*(]|INSERT\s+(OR\s+\w+\s+)?INTO\b|UPDATE\s+\w+\s+SET\b|DELETE\s+FROM\b|CREATE\s+(TABLE|VIEW|INDEX|TRIGGER)\b|PRAGMA\s+\w|BEGIN IMMEDIATE|SAVEPOINT \w)",
    )
    .unwrap();
    let mut wrong = Vec::new();
    for (file, text) in files("src", "rs") {
        let excepted = SQL_ELSEWHERE.iter().any(|(place, _)| file.starts_with(place));
        if file.starts_with("src/sqlite/") || excepted {
            continue;
        }
        let found = production(&text).into_iter().filter(|(_, line)| sql.is_match(line));
        wrong.extend(found.map(|(at, line)| format!("{file}:{at}: {}", line.trim())));
    }
    assert_none("SQL outside src/sqlite", &wrong);
}

#[test]
fn every_module_says_what_it_is_for() {
    let mut wrong = Vec::new();
    for (file, text) in files("src", "rs").into_iter().chain(files("examples", "rs")) {
        if !text.starts_with("//! ") {
            wrong.push(file);
        }
    }
    assert_none("these begin without //!", &wrong);
}

#[test]
fn one_file_reads_the_clock() {
    let clock = Regex::new(
        r"\b(SystemTime|Instant|Timestamp|Zoned|Utc|Local)::now\b|\bclock_gettime\b|\bclock_getres\b|\bgettimeofday\b",
    )
    .unwrap();
    let mut wrong = Vec::new();
    for (file, text) in files("src", "rs") {
        if CLOCK_READERS.iter().any(|(reader, _)| *reader == file) {
            continue;
        }
        let found = production(&text).into_iter().filter(|(_, line)| clock.is_match(line));
        wrong.extend(found.map(|(at, line)| format!("{file}:{at}: {}", line.trim())));
    }
    assert_none("a clock is read outside clock.rs", &wrong);
}

#[test]
fn no_test_is_left_out_and_none_waits_blindly() {
    let (ignored, sleeps) = (Regex::new(r"#\[ignore").unwrap(), Regex::new(r"\bsleep\(").unwrap());
    let allowed: BTreeMap<_, _> = SLEEPING_TESTS.into_iter().map(|(file, count, _)| (file, count)).collect();
    let mut wrong = Vec::new();
    for (file, text) in files("tests", "rs").into_iter().chain(files("src", "rs")) {
        if file == "tests/it/tidy.rs" {
            continue;
        }
        let lines = code(&text);
        wrong.extend(lines.iter().filter(|(_, line)| ignored.is_match(line)).map(|(at, _)| format!("{file}:{at}")));
        if file.starts_with("src/") || file.starts_with("tests/it/support/") {
            continue;
        }
        let count = lines.iter().filter(|(_, line)| sleeps.is_match(line)).count();
        if count != allowed.get(file.as_str()).copied().unwrap_or(0) {
            wrong.push(format!("{file}: sleeps {count} times"));
        }
    }
    assert_none("ignored tests, or fixed waits that the table does not know", &wrong);
}

/// Everything that people read.
fn texts() -> BTreeMap<String, String> {
    let mut all = files("docs", "md");
    all.extend(files("src", "rs"));
    all.extend(files("examples", "rs"));
    all.extend(files("examples", "toml"));
    for file in ["README.md", "CHANGELOG.md", "schema.sql", "Cargo.toml"] {
        all.insert(file.to_owned(), std::fs::read_to_string(root().join(file)).unwrap());
    }
    all
}

#[test]
fn nothing_is_promised_that_nobody_can_keep() {
    let mut wrong = Vec::new();
    let texts = texts();
    for word in NEVER_SAID.map(|word| Regex::new(&format!("(?i){word}")).unwrap()) {
        for (file, text) in &texts {
            wrong.extend(word.find_iter(text).map(|found| {
                let line = text[..found.start()].lines().count();
                format!("{file}:{line}: {}", found.as_str())
            }));
        }
    }
    assert_none("words that are never written", &wrong);
}

#[test]
fn names_and_addresses_are_reserved_ones() {
    let url = Regex::new(r"\b(?:https?|smtps?)://([A-Za-z0-9.-]+)").unwrap();
    let address = Regex::new(r"\b[\w.+-]+@([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)\b").unwrap();
    let mut wrong = Vec::new();
    let all = texts().into_iter().filter(|(file, _)| !file.starts_with("src/"));
    for (file, text) in all {
        for pattern in [&url, &address] {
            for found in pattern.captures_iter(&text) {
                let host = found[1].trim_end_matches('.').to_ascii_lowercase();
                let known = HOSTS.iter().any(|known| host == *known || host.ends_with(&format!(".{known}")));
                if !known && host != "…" {
                    wrong.push(format!("{file}: {}", &found[0]));
                }
            }
        }
    }
    assert_none("hosts that are not reserved for examples", &wrong);
}

/// The anchors that a page's headings make.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut found = BTreeSet::new();
    for line in page.lines() {
        fenced ^= line.starts_with("```");
        if fenced || !line.starts_with('#') {
            continue;
        }
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        found.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
    }
    found
}

#[test]
fn every_relative_link_leads_somewhere() {
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let pages = texts().into_iter().filter(|(file, _)| file.ends_with(".md"));
    let mut wrong = Vec::new();
    let mut count = 0;
    for (file, text) in pages {
        for found in link.captures_iter(&text) {
            let target = &found[1];
            if target.starts_with("http") {
                continue;
            }
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let page = root().join(&file);
            let path: PathBuf = if path.is_empty() { page } else { page.parent().unwrap().join(path) };
            let there = path.exists();
            let anchored =
                anchor.is_empty() || std::fs::read_to_string(&path).is_ok_and(|page| anchors(&page).contains(anchor));
            if !there || !anchored {
                wrong.push(format!("{file}: {target}"));
            }
        }
    }
    assert_none("links that lead nowhere", &wrong);
    assert!(count > 10, "only {count} links were found");
}

/// The two commands that the README begins with.
#[test]
fn the_two_commands_of_the_readme_exist() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    for command in ["cargo run --release -- demo", "scripts/test"] {
        assert!(readme.lines().any(|line| line == command), "the README has no line {command:?}");
    }
    let script = root().join("scripts/test").metadata().unwrap();
    assert!(script.permissions().mode() & 0o111 != 0, "scripts/test can't be executed");
    let entry = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    let steps: Vec<&str> = entry.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    assert_eq!(steps, [r#"exec "$(dirname "$0")/../scripts/test""#], ".ci/run decides nothing by itself");
    let help = std::process::Command::new(env!("CARGO_BIN_EXE_fencepost")).args(["demo", "--help"]).output().unwrap();
    assert!(help.status.success(), "fencepost demo: {}", String::from_utf8_lossy(&help.stderr));
}

#[test]
fn test_faults_are_in_no_release() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let features = manifest["features"].as_table().unwrap();
    // What `default` reaches.
    let mut reached = BTreeSet::new();
    let mut left = vec!["default".to_owned()];
    while let Some(feature) = left.pop() {
        let needs = features.get(&feature).and_then(toml::Value::as_array);
        let needs = needs.into_iter().flatten().map(|need| need.as_str().unwrap().to_owned());
        if reached.insert(feature) {
            left.extend(needs);
        }
    }
    assert!(reached.contains("dispatcher") && !reached.contains("faults"), "{reached:?}");
}

/// Every crate that the manifest names has its line in the decisions.
#[test]
fn every_dependency_has_its_reason() {
    let manifest: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let decisions = std::fs::read_to_string(root().join("docs/decisions.md")).unwrap();
    let tables = ["dependencies", "dev-dependencies"].map(|table| manifest[table].as_table().unwrap());
    let missing: Vec<String> = tables
        .into_iter()
        .flat_map(toml::Table::keys)
        .filter(|name| !decisions.contains(&format!("`{name}`")))
        .cloned()
        .collect();
    assert_none("dependencies without a reason in docs/decisions.md", &missing);
}
