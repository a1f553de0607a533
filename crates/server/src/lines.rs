//! Ends a text at a line: editors want no more than the block that they asked for, and that soon.

use std::time::{Duration, Instant};

/// What ends a text at a line. The default ends none.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct LineRules {
    /// A line, other than the first one, that is indented by fewer spaces and tabs ends the text, and is not a part of it.
    pub min_indent: usize,
    /// The first line break that comes so long after the text has begun ends it.
    pub max_time: Option<Duration>,
}

/// The state of one text.
#[derive(Debug, Default)]
pub(super) struct Lines {
    began: Option<Instant>,
    /// The spaces and tabs at the beginning of a line, until it is known whether the line is a part of the text; `None` = in
    /// a line.
    indent: Option<String>,
    ended: bool,
}

impl Lines {
    /// Adds text; returns what can be shown.
    pub fn push(&mut self, rules: &LineRules, new: String) -> String {
        if self.ended {
            return String::new();
        }
        let has_break = new.contains('\n');
        let shown = if rules.min_indent == 0 {
            new
        } else {
            self.indented(rules.min_indent, &new)
        };
        if let Some(max) = rules.max_time {
            let began = *self.began.get_or_insert_with(Instant::now);
            self.ended |= has_break && began.elapsed() >= max;
        }
        shown
    }

    /// The part of `new` before a line that is indented by less than `min`, without the beginning of a line that may be one.
    fn indented(&mut self, min: usize, new: &str) -> String {
        let mut shown = String::with_capacity(new.len());
        for char in new.chars() {
            match (&mut self.indent, char) {
                (Some(indent), ' ' | '\t') => indent.push(char),
                (Some(indent), _) if indent.len() < min => {
                    self.ended = true;
                    return shown;
                }
                (indent, _) => {
                    shown.push_str(&indent.take().unwrap_or_default());
                    shown.push(char);
                }
            }
            if char == '\n' {
                self.indent = Some(String::new());
            }
        }
        shown
    }

    /// Whether a line has ended the text.
    pub fn have_ended(&self) -> bool {
        self.ended
    }

    /// Ends the text otherwise, and returns what was held back.
    pub fn finish(&mut self) -> String {
        self.indent
            .take()
            .filter(|_| !self.ended)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of `text` in pieces of `size` characters, and whether a line ended it.
    fn shown(rules: LineRules, text: &str, size: usize) -> (String, bool) {
        let chars: Vec<char> = text.chars().collect();
        let mut lines = Lines::default();
        let mut shown = String::new();
        for piece in chars.chunks(size) {
            shown += &lines.push(&rules, piece.iter().collect());
            if lines.have_ended() {
                return (shown, true);
            }
        }
        (shown + &lines.finish(), false)
    }

    #[test]
    fn a_line_that_is_indented_less_ends_the_text() {
        let rules = |min_indent| LineRules {
            min_indent,
            max_time: None,
        };
        for (min, text, expected, ended) in [
            (0, "a\nb\n", "a\nb\n", false),
            (2, "a\n  b\n\tc", "a\n  b\n", true),
            (2, "a\n  b\n\t\tc\n ", "a\n  b\n\t\tc\n ", false),
            (2, "a\n  b\nc", "a\n  b\n", true),
            (4, "a", "a", false),
            (1, "a\n\n b", "a\n", true),
        ] {
            for size in 1..=text.len() {
                let found = shown(rules(min), text, size);
                assert_eq!(found, (expected.to_owned(), ended), "{text:?} {size}");
            }
        }
    }

    #[test]
    fn a_line_break_ends_a_text_that_is_late() {
        let rules = LineRules {
            min_indent: 0,
            max_time: Some(Duration::ZERO),
        };
        assert_eq!(shown(rules, "ab\ncd", 1), ("ab\n".into(), true));
        assert_eq!(shown(rules, "abcd", 1), ("abcd".into(), false));
        let rules = LineRules {
            max_time: Some(Duration::from_secs(3600)),
            ..rules
        };
        assert_eq!(shown(rules, "ab\ncd", 1), ("ab\ncd".into(), false));
    }
}
