//! The look of an answer: colours for accepted draft tokens, where the server tells them.

use super::client::{AnswerToken, SpeculationRound};
use std::collections::VecDeque;
use std::ffi::OsString;

const RESET: &str = "\x1b[0m";

/// The look of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// The target's own token, or of unknown origin.
    Plain,
    /// Drafted by a draft model or a head, and accepted.
    Model,
    /// Drafted from tables or the prompt, and accepted.
    Tables,
    /// No part of the answer.
    Aside,
}

impl Style {
    fn of(token: &AnswerToken) -> Self {
        match token.source.as_str() {
            "target" | "correction" => Self::Plain,
            "model" => Self::Model,
            _ => Self::Tables,
        }
    }

    /// The escape sequence that begins it.
    fn start(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Model => "\x1b[32m",
            Self::Tables => "\x1b[36m",
            Self::Aside => "\x1b[2m",
        }
    }
}

/// Whether a terminal may be sent colours. `NO_COLOR` and `TERM=dumb` forbid it, and a console of Windows that knows none.
pub fn shows_colours() -> bool {
    // Windows' console shows them only to those who ask for it; elsewhere, nobody has to.
    are_allowed(std::env::var_os) && anstyle_query::windows::enable_ansi_colors().unwrap_or(true)
}

/// Whether the environment of these variables allows colours.
fn are_allowed(variable: impl Fn(&'static str) -> Option<OsString>) -> bool {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// Turns parts of an answer into what is written.
#[derive(Debug)]
pub struct Painter {
    /// Whether the output is a terminal, which control characters would command.
    terminal: bool,
    colours: bool,
    /// The tokens that the text has not reached yet.
    tokens: VecDeque<(String, Style)>,
    /// Whether reasoning was the last that was shown.
    in_reasoning: bool,
}

impl Painter {
    /// For a terminal or anything else; `colours` are those of a terminal.
    pub fn new(terminal: bool, colours: bool) -> Self {
        Self {
            terminal,
            colours: terminal && colours,
            tokens: VecDeque::new(),
            in_reasoning: false,
        }
    }

    /// Whether accepted draft tokens can be told from others.
    pub fn has_colours(&self) -> bool {
        self.colours
    }

    /// A new answer begins.
    pub fn begin(&mut self) {
        self.tokens.clear();
        self.in_reasoning = false;
    }

    /// The next tokens, whose text comes now or later.
    pub fn expect(&mut self, rounds: &[SpeculationRound]) {
        if self.colours {
            let tokens = rounds.iter().flat_map(|round| &round.tokens);
            let shown = tokens.filter(|token| !token.text.is_empty());
            (self.tokens).extend(shown.map(|token| (token.text.clone(), Style::of(token))));
        }
    }

    /// Paints the model's reasoning, which is shown to people only.
    pub fn reasoning(&mut self, text: &str) -> String {
        if text.is_empty() || !self.terminal {
            return String::new();
        }
        self.in_reasoning = true;
        self.styled(Style::Aside, text)
    }

    /// The next part of the answer's text.
    pub fn content(&mut self, text: &str) -> String {
        let mut out = String::new();
        if text.is_empty() {
            return out;
        }
        if std::mem::take(&mut self.in_reasoning) {
            out.push_str("\n\n");
        }
        // Neighbours of one style are one piece.
        let (mut style, mut piece) = (Style::Plain, String::new());
        let mut rest = text;
        while !rest.is_empty() {
            let (next, len) = self.style_of(rest);
            if next != style {
                out.push_str(&self.styled(style, &piece));
                (style, piece) = (next, String::new());
            }
            piece.push_str(&rest[..len]);
            rest = &rest[len..];
        }
        out.push_str(&self.styled(style, &piece));
        out
    }

    /// The style of the beginning of `text`, and the length of that beginning. Tokens that the text passes
    /// over, such as those of the reasoning, are forgotten.
    fn style_of(&mut self, text: &str) -> (Style, usize) {
        while let Some((token, style)) = self.tokens.pop_front() {
            if text.starts_with(&token) {
                return (style, token.len());
            }
            // The server keeps back what may become a stop string.
            if let Some(later) = token.strip_prefix(text) {
                self.tokens.push_front((later.to_owned(), style));
                return (style, text.len());
            }
        }
        (Style::Plain, text.len())
    }

    /// `text` in `style`, without what would command a terminal.
    pub fn styled(&self, style: Style, text: &str) -> String {
        let commands = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
        let text = if self.terminal {
            // A line break of Windows is one of all.
            text.replace('\r', "").replace(commands, "\u{fffd}")
        } else {
            text.to_owned()
        };
        let start = if self.colours { style.start() } else { "" };
        if start.is_empty() || text.is_empty() {
            text
        } else {
            format!("{start}{text}{RESET}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_forbids_colours() {
        let allowed = |no_color: Option<&str>, term: Option<&str>| {
            are_allowed(|name| match name {
                "NO_COLOR" => no_color.map(OsString::from),
                _ => term.map(OsString::from),
            })
        };
        assert!(allowed(None, None) && allowed(Some(""), Some("xterm")));
        assert!(!allowed(Some("1"), Some("xterm")) && !allowed(None, Some("dumb")));
    }

    fn round(tokens: &[(&str, &str)]) -> Vec<SpeculationRound> {
        let token = |&(text, source): &(&str, &str)| AnswerToken {
            text: text.into(),
            source: source.into(),
        };
        vec![SpeculationRound {
            draft: Vec::new(),
            tokens: tokens.iter().map(token).collect(),
        }]
    }

    #[test]
    fn accepted_tokens_have_the_colour_of_their_drafter() {
        let mut painter = Painter::new(true, true);
        painter.expect(&round(&[
            ("a", "target"),
            (" b", "model"),
            (" c", "model"),
            (" d", "own"),
            (" e", "correction"),
        ]));
        assert_eq!(
            painter.content("a b c d e"),
            "a\x1b[32m b c\x1b[0m\x1b[36m d\x1b[0m e"
        );
    }

    #[test]
    fn a_text_may_be_late_or_cut() {
        let mut painter = Painter::new(true, true);
        painter.expect(&round(&[("abc", "model"), ("d", "target")]));
        assert_eq!(painter.content("a"), "\x1b[32ma\x1b[0m");
        assert_eq!(painter.content("bcd"), "\x1b[32mbc\x1b[0md");
        painter.expect(&round(&[("xyz", "model")]));
        painter.begin();
        assert_eq!(painter.content("xyz"), "xyz");
    }

    #[test]
    fn a_text_that_is_not_its_tokens_is_plain() {
        let mut painter = Painter::new(true, true);
        painter.expect(&round(&[("abc", "model")]));
        assert_eq!(painter.content("other"), "other");
        painter.expect(&round(&[("<think>", "model"), ("hm", "model")]));
        assert_eq!(painter.reasoning("hm"), "\x1b[2mhm\x1b[0m");
        painter.expect(&round(&[("</think>", "target"), ("so", "own")]));
        assert_eq!(painter.content("so"), "\n\n\x1b[36mso\x1b[0m");
    }

    #[test]
    fn without_colours_a_text_is_itself() {
        for terminal in [true, false] {
            let mut painter = Painter::new(terminal, !terminal);
            painter.expect(&round(&[("a", "model")]));
            assert_eq!(painter.content("a"), "a");
        }
        assert_eq!(Painter::new(false, false).reasoning("hm"), "");
    }

    #[test]
    fn a_model_cannot_command_a_terminal() {
        let text = "a\x1b]0;title\x07\tb\r\n\u{9b}c";
        let mut painter = Painter::new(true, false);
        assert_eq!(
            painter.content(text),
            "a\u{fffd}]0;title\u{fffd}\tb\n\u{fffd}c"
        );
        assert_eq!(Painter::new(false, false).content(text), text);
    }
}
