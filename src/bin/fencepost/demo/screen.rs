//! How the demo speaks: numbered acts, short lines, tables; colour on a terminal only.
//!
//! Colour only repeats what the words say. Nothing here may panic, since that would leave processes
//! behind: a reader that went away is no error, the demo goes on and its exit status still tells, and
//! any other failed write is an error.

use std::io::{self, IsTerminal, Write};

use comfy_table::Table;
use comfy_table::presets::NOTHING;

/// Text is broken here, whatever the width of the terminal: lines of a book, not of a log.
const WIDTH: usize = 78;

const INDENT: &str = "   ";

/// Where the demo's words go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Screen {
    color: bool,
}

/// A meaning that is shown as a colour too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Strong,
    Quiet,
    Good,
    Careful,
    Bad,
}

impl Tone {
    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "0",
            Self::Strong => "1",
            Self::Quiet => "2",
            Self::Good => "32",
            Self::Careful => "33",
            Self::Bad => "31",
        }
    }
}

impl Screen {
    pub(super) fn new() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let is_plain = set("NO_COLOR").is_some() || set("TERM").is_some_and(|term| term == "dumb");
        Self { color: io::stdout().is_terminal() && !is_plain }
    }

    fn paint(self, tone: Tone, text: &str) -> String {
        if self.color && tone != Tone::Plain { format!("\x1b[{}m{text}\x1b[0m", tone.code()) } else { text.to_owned() }
    }

    pub(super) fn line(self, tone: Tone, text: &str) -> io::Result<()> {
        print(&format!("{}\n", self.paint(tone, text)))
    }

    /// The head of an act.
    pub(super) fn act(self, no: u32, title: &str) -> io::Result<()> {
        self.line(Tone::Plain, "")?;
        self.line(Tone::Strong, &format!("{no}  {title}"))
    }

    /// A paragraph.
    pub(super) fn say(self, text: &str) -> io::Result<()> {
        self.block(Tone::Plain, [INDENT; 2], text)
    }

    /// Something that a process or a person said or did, word for word.
    pub(super) fn quote(self, text: &str) -> io::Result<()> {
        self.block(Tone::Quiet, ["     ", "       "], text)
    }

    /// Something that was claimed, and whether it was seen to be so.
    pub(super) fn fact(self, is_so: bool, text: &str) -> io::Result<()> {
        if !is_so {
            return self.difference(&format!("not so: {text}"));
        }
        self.block(Tone::Plain, [&self.paint(Tone::Good, " ✓ "), INDENT], text)
    }

    /// What was claimed and what was seen instead.
    pub(super) fn difference(self, text: &str) -> io::Result<()> {
        self.block(Tone::Bad, [" ✗ ", INDENT], text)
    }

    /// Text with what stands before its first line and before the others.
    fn block(self, tone: Tone, [first, next]: [&str; 2], text: &str) -> io::Result<()> {
        for (no, line) in wrap(text, WIDTH - next.len()).iter().enumerate() {
            self.line(tone, &format!("{}{line}", if no == 0 { first } else { next }))?;
        }
        Ok(())
    }

    /// Rows under a head, each in its tone.
    pub(super) fn table(self, head: &[&str], rows: &[(Tone, Vec<String>)]) -> io::Result<()> {
        let mut table = Table::new();
        table.load_style(NOTHING).set_header(head);
        for (_, row) in rows {
            table.add_row(row);
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        // Cells are single lines and never broken, so lines and rows go together.
        let tones = std::iter::once(Tone::Quiet).chain(rows.iter().map(|(tone, _)| *tone));
        for (line, tone) in table.lines().zip(tones) {
            self.line(tone, line.trim_end())?;
        }
        Ok(())
    }
}

/// Flushed, so that what is said now is seen now.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Breaks between words only.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a-very-long-word b", 4), ["a-very-long-word", "b"]);
        assert_eq!(wrap("", 4), [""]);
    }
}
