//! Workers in Python: the contract through another driver and another SQLite.
//!
//! Each script is complete in itself and says what it found; here they are only run.

use std::path::Path;
use std::process::Command;

fn run(script: &str, arguments: &[&Path]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let output = Command::new("python3").arg("-B").arg(&script).args(arguments).output().expect("python3 runs");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {text}", script.display());
    text
}

#[test]
fn h60_h61_no_statement_from_python_gets_round_the_fence() {
    run("tests/python/bypass.py", &[]);
}

#[test]
fn h07_h59_h60_h61_h66_from_python() {
    let text = run("tests/python/contract.py", &[]);
    assert_eq!(text.matches("ok h").count(), 5, "{text}");
}

#[test]
fn the_example_runs_on_a_fresh_database_and_again_on_the_same() {
    assert!(run("examples/worker.py", &[]).contains("refused: FP001 stale token"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.db");
    assert!(run("examples/worker.py", &[&path]).contains("token 1, 0 commands inherited"));
    assert!(run("examples/worker.py", &[&path]).contains("token 3, 1 commands inherited"));
}
