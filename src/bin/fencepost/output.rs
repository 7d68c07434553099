//! What a person or a program sees: tables, times, colour, JSON.
//!
//! With `--json` standard output holds exactly one JSON value and nothing else; warnings and progress
//! go to standard error. Text from the database is data, never terminal codes: control characters are
//! replaced before it is shown. Colour is for terminals and only repeats what the words say.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::ValueEnum;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

const ESCAPE: char = '\u{1b}';

const WIDTHS: std::ops::RangeInclusive<u16> = 40..=200;

/// From here on a terminal has room for every column.
const WIDE: u16 = 100;

/// What a name in the head of a table can begin with.
const MARKS: [char; 3] = ['>', '!', '?'];

/// How long work may take before it shows that it is going on.
const PROGRESS_AFTER: Duration = Duration::from_millis(400);

/// When colour is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Where answers go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    json: bool,
    color: bool,
    /// Of the terminal; without one, lines are never broken, so that tools can read them.
    width: Option<u16>,
}

/// A meaning that is shown as a colour too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    Careful,
    Active,
    Quiet,
    Strong,
    Plain,
}

impl Tone {
    /// The tone of a state's word.
    pub(crate) fn of_state(state: &str) -> Self {
        match state {
            "delivered" => Self::Good,
            "dead" => Self::Bad,
            "in_doubt" | "parked" => Self::Careful,
            "sending" => Self::Active,
            _ => Self::Plain,
        }
    }

    const fn code(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Bad => "31",
            Self::Careful => "33",
            Self::Active => "36",
            Self::Quiet => "2",
            Self::Strong => "1",
            Self::Plain => "",
        }
    }
}

impl Screen {
    pub(crate) fn new(json: bool, choice: ColorChoice) -> Self {
        let terminal = io::stdout().is_terminal();
        let wanted = || {
            let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
            terminal && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
        };
        let color = match choice {
            ColorChoice::Auto => wanted(),
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        let width = terminal.then(|| columns().unwrap_or(80).clamp(*WIDTHS.start(), *WIDTHS.end()));
        Self { json, color: color && !json, width }
    }

    pub(crate) const fn is_json(self) -> bool {
        self.json
    }

    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        if self.color && tone != Tone::Plain { format!("\x1b[{}m{text}\x1b[0m", tone.code()) } else { text.to_owned() }
    }

    /// Prints text and the end of its line. A reader that went away is no error.
    pub(crate) fn print(self, text: &str) -> io::Result<()> {
        self.print_to_reader(text).map(drop)
    }

    /// The same, and tells whether anybody still reads.
    pub(crate) fn print_to_reader(self, text: &str) -> io::Result<bool> {
        let mut out = io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush());
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            written => written.map(|()| true),
        }
    }

    pub(crate) fn print_json(self, value: &Value) -> io::Result<()> {
        self.print(&format!("{value:#}"))
    }

    /// Shows that work is going on, once it takes a while, on a terminal only.
    pub(crate) fn progress(self, what: &'static str) -> Progress {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_message(what);
        if io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(PROGRESS_AFTER);
        }
        Progress(bar)
    }

    /// Rows under a head; a narrow terminal breaks long cells. The first column has the row's tone.
    ///
    /// A name of the head can begin with marks: `>` right-aligned, `!` never broken, `?` left out where
    /// there is no room for everything.
    pub(crate) fn table(self, head: &[&str], rows: &[(Tone, Vec<String>)]) -> String {
        let narrow = self.width.is_some_and(|width| width < WIDE);
        let kept: Vec<usize> = (0..head.len()).filter(|at| !(narrow && marks(head, *at).contains('?'))).collect();
        let mut table = Table::new();
        table.load_style(NOTHING);
        match self.width {
            Some(width) => table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width),
            None => table.set_content_arrangement(ContentArrangement::Disabled),
        };
        table.set_header(kept.iter().filter_map(|at| head.get(*at)).map(|name| name.trim_start_matches(MARKS)));
        for (_, row) in rows {
            table.add_row(kept.iter().filter_map(|at| row.get(*at)).map(|cell| clean(cell)));
        }
        for (column, at) in table.column_iter_mut().zip(&kept) {
            column.set_padding((0, 2));
            if marks(head, *at).contains('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
            if marks(head, *at).contains('!') {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        self.painted(&lines, rows)
    }

    fn painted(self, lines: &[String], rows: &[(Tone, Vec<String>)]) -> String {
        let mut rows = rows.iter();
        let painted = lines.iter().enumerate().map(|(at, line)| {
            if at == 0 {
                return self.paint(Tone::Quiet, line);
            }
            // A broken cell goes on in lines that begin with the blanks of the first column.
            let Some((tone, word)) = rows.clone().next().and_then(|(tone, row)| Some((*tone, clean(row.first()?))))
            else {
                return line.clone();
            };
            match line.strip_prefix(&word).filter(|_| !word.is_empty()) {
                Some(rest) => {
                    rows.next();
                    format!("{}{rest}", self.paint(tone, &word))
                }
                None => line.clone(),
            }
        });
        painted.collect::<Vec<_>>().join("\n")
    }

    /// Names and values below each other; a value goes on under itself.
    pub(crate) fn block(self, pairs: &[(&str, String)]) -> String {
        let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let room = self.width.map_or(usize::MAX, |columns| usize::from(columns).saturating_sub(width + 2).max(20));
        let lines = pairs.iter().map(|(name, value)| {
            let indent = format!("\n{:width$}  ", "");
            let value = value.lines().flat_map(|line| wrap(line, room)).collect::<Vec<_>>().join(&indent);
            let name = format!("{name:width$}");
            format!("{}  {value}", self.paint(Tone::Quiet, &name)).trim_end().to_owned()
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// An aside, broken to fit.
    pub(crate) fn note(self, text: &str) -> String {
        let lines = wrap(text, self.width.map_or(usize::MAX, usize::from));
        lines.iter().map(|line| self.paint(Tone::Quiet, line)).collect::<Vec<_>>().join("\n")
    }

    pub(crate) fn heading(self, text: &str) -> String {
        format!("\n{}", self.paint(Tone::Strong, text))
    }
}

fn marks<'a>(head: &[&'a str], at: usize) -> &'a str {
    let name = head.get(at).copied().unwrap_or_default();
    name.strip_suffix(name.trim_start_matches(MARKS)).unwrap_or_default()
}

/// Something that stops to be shown when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Says what has been done so far.
    pub(crate) fn say(&self, text: String) {
        self.0.set_message(text);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Breaks at blanks, and nowhere else: an id or a command to copy stays whole, and so does what is
/// painted.
fn wrap(line: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words(line) {
        let current = lines.last_mut().expect("there is always a line");
        if current.is_empty() {
            current.push_str(word);
        } else if visible(current) + 1 + visible(word) <= room {
            current.push(' ');
            current.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// The pieces between the blanks that aren't painted.
fn words(line: &str) -> Vec<&str> {
    let mut painted = false;
    line.split(|c: char| {
        // A painted text begins with ESC and ends with another one; nothing else holds an ESC.
        painted ^= c == ESCAPE;
        c == ' ' && !painted
    })
    .collect()
}

/// How many characters are seen.
fn visible(text: &str) -> usize {
    let mut in_code = false;
    let seen = |c: &char| {
        let code = in_code || *c == ESCAPE;
        in_code = code && *c != 'm';
        !code
    };
    text.chars().filter(seen).count()
}

fn columns() -> Option<u16> {
    let said = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    said.or_else(|| rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| size.ws_col))
        .filter(|columns| *columns > 0)
}

/// A warning, on standard error.
pub(crate) fn warn(text: &str) {
    eprintln!("fencepost: warning: {}", clean_lines(text));
}

/// Text of the database as one line that no terminal takes for a command.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if is_code(c) { '\u{fffd}' } else { c }).collect()
}

/// The same for text that has lines of its own.
pub(crate) fn clean_lines(text: &str) -> String {
    text.chars().map(|c| if is_code(c) && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// Controls, and the marks that turn the direction of writing around.
fn is_code(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A token or seq, which a JSON number of many languages can't hold.
pub(crate) fn decimal(number: i64) -> Value {
    Value::String(number.to_string())
}

/// Local time and how long ago it is: `2026-03-01T10:00:00+01:00 (3m ago)`.
pub(crate) fn moment(at_ms: i64, now_ms: i64) -> String {
    format!("{} ({})", local(at_ms), relative(at_ms, now_ms))
}

fn local(at_ms: i64) -> String {
    match Timestamp::from_millisecond(at_ms) {
        Ok(time) => time.to_zoned_datetime(TimeZone::system()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
        Err(_) => format!("{at_ms} ms"),
    }
}

/// `3m ago`, `in 5s`, `now`.
pub(crate) fn relative(at_ms: i64, now_ms: i64) -> String {
    let ago = now_ms.saturating_sub(at_ms);
    match ago {
        -999..=999 => "now".to_owned(),
        1_000.. => format!("{} ago", span(ago)),
        _ => format!("in {}", span(ago.saturating_neg())),
    }
}

/// A duration to read, in its two greatest units: `45s`, `3m 20s`, `2d 4h`.
pub(crate) fn span(ms: i64) -> String {
    let seconds = ms.max(0) / 1_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    let two = |big: i64, big_unit: &str, small: i64, small_unit: &str| match small {
        0 => format!("{big}{big_unit}"),
        small => format!("{big}{big_unit} {small}{small_unit}"),
    };
    match seconds {
        0 => format!("{}ms", ms.max(0)),
        1..60 => format!("{seconds}s"),
        60..3_600 => two(minutes, "m", seconds % 60, "s"),
        3_600..86_400 => two(hours, "h", minutes % 60, "m"),
        _ => two(days, "d", hours % 24, "h"),
    }
}

/// Reads a duration with its unit.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration: jiff::SignedDuration =
        text.parse().map_err(|_| "write a number with its unit, as in 500ms, 30s or 5m".to_owned())?;
    Duration::try_from(duration).map_err(|_| "it can't be negative".to_owned())
}

/// The same with days as a unit too: `30d`.
pub(crate) fn parse_age(text: &str) -> Result<Duration, String> {
    let Some(days) = text.strip_suffix('d').and_then(|days| days.parse::<u32>().ok()) else {
        return parse_duration(text).map_err(|problem| problem.replace("500ms, 30s or 5m", "30d, 12h or 5m"));
    };
    Ok(Duration::from_secs(86_400) * days)
}

/// A time that was given: absolute, or from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    At(i64),
    In(Duration),
}

impl Moment {
    pub(crate) fn at_ms(self, now_ms: i64) -> i64 {
        match self {
            Self::At(at_ms) => at_ms,
            Self::In(wait) => now_ms.saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)),
        }
    }
}

/// Reads `+5m`, `2026-03-01T10:00:00Z`, a local `2026-03-01T10:00`, or milliseconds since 1970.
pub(crate) fn parse_moment(text: &str) -> Result<Moment, String> {
    if let Some(wait) = text.strip_prefix('+') {
        return parse_duration(wait).map(Moment::In);
    }
    if let Ok(at_ms) = text.parse::<i64>() {
        return Ok(Moment::At(at_ms));
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(Moment::At(time.as_millisecond()));
    }
    let local = text.parse::<jiff::civil::DateTime>().and_then(|time| time.to_zoned_datetime(TimeZone::system()));
    local
        .map(|time| Moment::At(time.timestamp().as_millisecond()))
        .map_err(|_| "write +5m, 2026-03-01T10:00:00Z, a local 2026-03-01T10:00, or milliseconds since 1970".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_well() {
        for (ms, right) in [
            (0, "0ms"),
            (950, "950ms"),
            (1_000, "1s"),
            (59_999, "59s"),
            (60_000, "1m"),
            (200_000, "3m 20s"),
            (3_600_000, "1h"),
            (90_061_000, "1d 1h"),
            (-5, "0ms"),
        ] {
            assert_eq!(span(ms), right, "{ms}");
        }
        assert_eq!(relative(1_000, 61_000), "1m ago");
        assert_eq!(relative(61_000, 1_000), "in 1m");
        assert_eq!(relative(1_000, 1_500), "now");
        assert_eq!(relative(i64::MAX, i64::MIN), format!("in {}", span(i64::MAX)));
    }

    #[test]
    fn moments() {
        assert_eq!(parse_moment("+5m"), Ok(Moment::In(Duration::from_secs(300))));
        assert_eq!(parse_moment("1800000000000"), Ok(Moment::At(1_800_000_000_000)));
        assert_eq!(parse_moment("2027-01-15T08:00:00Z"), Ok(Moment::At(1_800_000_000_000)));
        assert!(parse_moment("2027-01-15T08:00").is_ok());
        assert!(parse_moment("2027-01-15 08:00").is_ok());
        assert!(parse_moment("tomorrow").is_err());
        assert!(parse_moment("+-5m").is_err());
        assert!(parse_duration("5").is_err());
    }

    #[test]
    fn the_database_can_not_talk_to_the_terminal() {
        assert_eq!(clean("a\x1b[31mb\r\n\u{9b}2J\u{202e}c"), "a\u{fffd}[31mb\u{fffd}\u{fffd}\u{fffd}2J\u{fffd}c");
    }

    #[test]
    fn lines_break_at_blanks_that_are_not_painted() {
        let screen = Screen { json: false, color: true, width: Some(40) };
        let text = format!("aa {} dd", screen.paint(Tone::Bad, "bb cc"));
        assert_eq!(wrap(&text, 8), ["aa \u{1b}[31mbb cc\u{1b}[0m", "dd"]);
        assert_eq!(wrap(&text, 7), ["aa", "\u{1b}[31mbb cc\u{1b}[0m", "dd"]);
        assert_eq!(wrap("far-too-long b", 3), ["far-too-long", "b"]);
    }

    #[test]
    fn only_the_first_column_is_painted_and_broken_lines_are_left_alone() {
        let screen = Screen { json: false, color: true, width: Some(40) };
        let long = "a scope that is far too long for a narrow terminal".to_owned();
        let rows = [
            (Tone::Bad, vec!["dead".to_owned(), long.clone()]),
            (Tone::Good, vec!["delivered".to_owned(), "s".to_owned()]),
        ];
        let text = screen.table(&["STATE", "SCOPE"], &rows);
        assert_eq!(text.matches("\x1b[31mdead\x1b[0m").count(), 1, "{text}");
        assert_eq!(text.matches("\x1b[32mdelivered\x1b[0m").count(), 1, "{text}");
        assert!(text.lines().count() > 3, "{text}");
        let plain = Screen { json: false, color: false, width: None }.table(&["STATE", "SCOPE"], &rows);
        assert_eq!(plain.lines().count(), 3, "{plain}");
        assert!(plain.contains(&long), "{plain}");
    }
}
