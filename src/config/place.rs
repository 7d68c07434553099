//! Where in the file an error is, and the line with a caret under it.
//!
//! The parser can print that line itself, but it prints all of it, and a mistyped line is just where
//! a password stands in clear text. So the line is drawn here, with every value that could be a
//! secret hidden and each column kept. Nothing in this module may show text between quotes.

/// A position in a text, counted from 1 in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// The place of a byte offset.
pub(super) fn of(text: &str, offset: usize) -> Place {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    Place { line, column }
}

/// The line at a place with carets under the next `length` characters.
pub(super) fn snippet(text: &str, place: Place, length: usize) -> String {
    let masked = masked(text);
    let line = masked.lines().nth(place.line - 1).unwrap_or_default();
    let room = line.chars().count().saturating_sub(place.column - 1);
    let carets = "^".repeat(length.min(room).max(1));
    let number = place.line.to_string();
    let gutter = " ".repeat(number.len());
    let indent = " ".repeat(place.column - 1);
    format!("{gutter} |\n{number} | {line}\n{gutter} | {indent}{carets}")
}

/// The text with what stands between quotes, in comments and as a bare word in a value's place
/// replaced by stars, one for each character.
fn masked(text: &str) -> String {
    let mut mask = Mask { out: String::with_capacity(text.len()), open: Vec::new(), in_value: false };
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' | '\'' => mask.quoted(rest, first),
            '#' => mask.hide(rest.split(['\n', '\r']).next().unwrap_or(rest)),
            _ if is_bare(first) => mask.word(rest),
            _ => mask.sign(first),
        };
        rest = rest.get(length..).unwrap_or_default();
    }
    mask.out
}

struct Mask {
    out: String,
    /// Brackets and braces that a value has opened.
    open: Vec<char>,
    in_value: bool,
}

impl Mask {
    fn hide(&mut self, text: &str) -> usize {
        self.out.extend(text.chars().map(|c| if matches!(c, '\n' | '\r') { c } else { '*' }));
        text.len()
    }

    /// A string of any of TOML's four forms. One that never ends is hidden to its end of line, or to
    /// the end of the text if it may span lines.
    fn quoted(&mut self, text: &str, quote: char) -> usize {
        let triple = quote.to_string().repeat(3);
        let mark = if text.starts_with(&triple) { triple } else { quote.to_string() };
        let body = text.get(mark.len()..).unwrap_or_default();
        let end = end_of_string(body, &mark);
        self.out.push_str(&mark);
        self.hide(body.get(..end).unwrap_or_default());
        let closed = body.get(end..).is_some_and(|tail| tail.starts_with(&mark));
        if closed {
            self.out.push_str(&mark);
        }
        mark.len() + end + if closed { mark.len() } else { 0 }
    }

    /// Numbers and booleans stay readable, keys too.
    fn word(&mut self, text: &str) -> usize {
        let word = text.split(|c| !is_bare(c)).next().unwrap_or(text);
        let harmless =
            matches!(word, "true" | "false") || (word.len() <= 6 && word.bytes().all(|b| b.is_ascii_digit()));
        if self.in_value && !harmless {
            return self.hide(word);
        }
        self.out.push_str(word);
        word.len()
    }

    fn sign(&mut self, sign: char) -> usize {
        match sign {
            '=' => self.in_value = true,
            '{' | '[' if self.in_value => {
                self.open.push(sign);
                self.in_value = sign == '[';
            }
            '}' | ']' if !self.open.is_empty() => {
                self.open.pop();
                self.in_value = true;
            }
            ',' | '\n' => self.in_value = self.open.last() == Some(&'['),
            _ => {}
        }
        self.out.push(sign);
        sign.len_utf8()
    }
}

fn is_bare(c: char) -> bool {
    !c.is_ascii() || c.is_ascii_alphanumeric() || "_-+.:/@%!?&$~^*;<>|\\`()".contains(c)
}

/// Length of the text before the mark that closes a string.
fn end_of_string(body: &str, mark: &str) -> usize {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        if escaped {
            escaped = false;
            continue;
        }
        escaped = c == '\\' && mark.starts_with('"');
        let line_ends = mark.len() == 1 && matches!(c, '\n' | '\r');
        if line_ends || body.get(at..).is_some_and(|tail| tail.starts_with(mark)) {
            return at;
        }
    }
    body.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_hidden_and_columns_kept() {
        for (text, shown) in [
            ("[webhook.billing]\nport = 587 # hunter2\n", "[webhook.billing]\nport = 587 *********\n"),
            ("password = \"hun\\\"ter2\"\nnext = 1", "password = \"*********\"\nnext = 1"),
            ("password = \"hunter2\nnext = true", "password = \"*******\nnext = true"),
            ("password = hunter2", "password = *******"),
            ("password = 0123456789", "password = **********"),
            ("password = { evn = 'X', other = y }", "password = { evn = '*', other = * }"),
            ("secrets = [\n  whsec_a,\n  \"b\",\n]\nkey = 1", "secrets = [\n  *******,\n  \"*\",\n]\nkey = 1"),
            ("a = \"\"\"\nhunter2\n\"\"\"\nb = 1", "a = \"\"\"\n*******\n\"\"\"\nb = 1"),
            ("a = 'geheim\u{e4}'", "a = '*******'"),
        ] {
            assert_eq!(masked(text), shown);
            assert_eq!(masked(text).chars().count(), text.chars().count());
        }
    }

    #[test]
    fn the_caret_stands_under_the_error() {
        let text = "[log]\nlevle = \"info\"\n";
        let place = of(text, 6);
        assert_eq!(place, Place { line: 2, column: 1 });
        assert_eq!(snippet(text, place, 5), "  |\n2 | levle = \"****\"\n  | ^^^^^");
        assert_eq!(of(text, text.len()), Place { line: 3, column: 1 });
        assert_eq!(snippet(text, of(text, text.len()), 0), "  |\n3 | \n  | ^");
    }
}
