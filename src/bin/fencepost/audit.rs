//! `fencepost audit`: is everything as it must be?
//!
//! The library checks; here it is said, row by row and with what it means, and answered by exit code.
//! Nothing is repaired: what damage means, a person decides.

use fencepost::sqlite::audit::{self, Finding, Report};
use serde_json::{Value, json};

use crate::exit::Exit;
use crate::output::{Screen, Tone, clean};
use crate::{Globals, database};

/// Options of `fencepost audit`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Checks every invariant that can be read off the database; 1 if one doesn't hold.
pub(crate) fn audit(_: &Args, globals: &Globals) -> anyhow::Result<u8> {
    let (connection, _) = database::look(globals)?;
    let screen = globals.screen();
    let progress = screen.progress("checking the outbox");
    let report = audit::audit(&connection)?;
    drop(progress);
    if screen.is_json() {
        screen.print_json(&report_json(&report))?;
    } else {
        screen.print(&report_text(screen, &report))?;
    }
    Ok(if report.findings.is_empty() { 0 } else { Exit::Breach as u8 })
}

fn report_text(screen: Screen, report: &Report) -> String {
    let looked = format!("{} checks over {} commands", report.checks, report.commands);
    if report.findings.is_empty() {
        return format!("{}: {looked}, nothing found", screen.paint(Tone::Good, "ok"));
    }
    let mut parts = vec![format!("{}: {looked}, {} found", screen.paint(Tone::Bad, "breach"), report.findings.len())];
    parts.extend(report.findings.iter().map(|finding| finding_text(screen, finding)));
    parts.push(screen.note(
        "\nStop the dispatcher, keep a copy of the file (with SQLite's .backup), and find out who wrote past the contract.",
    ));
    parts.join("\n")
}

fn finding_text(screen: Screen, finding: &Finding) -> String {
    let mut lines = vec![screen.heading(finding.check), finding.means.to_owned()];
    lines.extend(finding.rows.iter().map(|row| format!("  {}", clean(row))));
    if finding.count > finding.rows.len() {
        lines.push(format!("  … and {} more", finding.count - finding.rows.len()));
    }
    lines.join("\n")
}

fn report_json(report: &Report) -> Value {
    let finding = |finding: &Finding| json!({ "check": finding.check, "means": finding.means, "count": finding.count, "rows": finding.rows });
    json!({
        "ok": report.findings.is_empty(),
        "checks": report.checks,
        "commands": report.commands,
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}
