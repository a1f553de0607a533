//! Separates what a model thinks from what it answers.

use super::part::{Part, push_reasoning, until_marker};

/// How a model marks what it thinks. All formats here but Harmony write `<think>...</think>` before the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "clap",
    derive(clap::ValueEnum),
    value(rename_all = "snake_case")
)]
pub enum ReasoningFormat {
    /// A text begins with reasoning, whether `<think>` was in the prompt, is in the text, or is missing,
    /// unless the prompt ends with `</think>`.
    DeepseekR1,
    /// A text begins with reasoning only after a `<think>`, in the prompt or the text.
    Qwen3,
    /// Messages in channels, as gpt-oss: calls, too.
    #[cfg_attr(feature = "clap", value(name = "openai_gptoss"))]
    Harmony,
}

const BEGIN: &str = "<think>";
const END: &str = "</think>";

impl ReasoningFormat {
    /// The texts that have a meaning, but for Harmony. Those that are special tokens must be part of the text that
    /// a [`ReasoningParser`] reads.
    pub const MARKERS: &[&str] = &[BEGIN, END];

    /// Whether the answer to `prompt` begins with reasoning even if it does not say so.
    pub fn begins_with_reasoning(self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        match self {
            Self::DeepseekR1 => !prompt.ends_with(END),
            Self::Qwen3 => prompt.ends_with(BEGIN),
            Self::Harmony => false,
        }
    }
}

/// Splits a model's text into reasoning and the rest, however it is cut into pieces. Space around the
/// reasoning is dropped.
#[derive(Debug)]
pub struct ReasoningParser {
    state: ReasoningState,
    /// Text that is not certain yet: part of a marker, or space.
    held: String,
}

#[derive(Debug)]
enum ReasoningState {
    /// Before anything but space. `reasons`: what is not marked is reasoning.
    Start {
        reasons: bool,
    },
    /// `blank`: nothing but space so far.
    Reasoning {
        blank: bool,
    },
    /// After the reasoning, before anything but space.
    Answer,
    Content,
}

impl ReasoningParser {
    /// `reasons`: see [`ReasoningFormat::begins_with_reasoning`].
    pub fn new(reasons: bool) -> Self {
        Self {
            state: ReasoningState::Start { reasons },
            held: String::new(),
        }
    }

    /// Adds text. Appends reasoning that is certain to `parts`, and returns the content that is.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) -> String {
        if matches!(self.state, ReasoningState::Content) {
            return text.to_owned();
        }
        self.held.push_str(text);
        if let ReasoningState::Start { reasons } = self.state {
            let text = self.held.trim_start();
            if let Some(rest) = text.strip_prefix(BEGIN) {
                self.held = rest.to_owned();
                self.state = ReasoningState::Reasoning { blank: true };
            } else if BEGIN.starts_with(text) {
                return String::new();
            } else if reasons {
                self.held = text.to_owned();
                self.state = ReasoningState::Reasoning { blank: true };
            } else {
                self.state = ReasoningState::Content;
                return std::mem::take(&mut self.held);
            }
        }
        if let ReasoningState::Reasoning { blank } = self.state {
            self.reasoning(blank, parts);
        }
        if matches!(self.state, ReasoningState::Answer) {
            let text = self.held.trim_start().to_owned();
            self.held.clear();
            if !text.is_empty() {
                self.state = ReasoningState::Content;
            }
            return text;
        }
        String::new()
    }

    /// Whether what comes next is reasoning, or ends it.
    pub fn is_reasoning(&self) -> bool {
        matches!(
            self.state,
            ReasoningState::Start { reasons: true } | ReasoningState::Reasoning { .. }
        )
    }

    /// Ends the text; as [`ReasoningParser::push`].
    pub fn finish(&mut self, parts: &mut Vec<Part>) -> String {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            ReasoningState::Start { reasons: false } => rest,
            ReasoningState::Start { reasons: true } | ReasoningState::Reasoning { blank: true } => {
                push_reasoning(parts, rest.trim());
                String::new()
            }
            ReasoningState::Reasoning { blank: false } => {
                push_reasoning(parts, rest.trim_end());
                String::new()
            }
            ReasoningState::Answer | ReasoningState::Content => String::new(),
        }
    }

    fn reasoning(&mut self, blank: bool, parts: &mut Vec<Part>) {
        if blank {
            self.held = self.held.trim_start().to_owned();
        }
        let (end, marker) = until_marker(&self.held, &[END]);
        let shown = self.held[..end].trim_end();
        push_reasoning(parts, shown);
        let blank = blank && shown.is_empty();
        let (read, state) = match marker {
            Some(_) => (end + END.len(), ReasoningState::Answer),
            None => (shown.len(), ReasoningState::Reasoning { blank }),
        };
        self.held.drain(..read);
        self.state = state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::pieces;
    use proptest::prelude::*;

    /// The reasoning and the content of a text that comes in pieces of these sizes.
    fn split(reasons: bool, text: &str, sizes: &[usize]) -> (String, String) {
        let mut parser = ReasoningParser::new(reasons);
        let (mut parts, mut content) = (Vec::new(), String::new());
        for piece in pieces(text, sizes) {
            content += &parser.push(&piece, &mut parts);
        }
        content += &parser.finish(&mut parts);
        let text = |part| match part {
            Part::Reasoning(text) => text,
            other => panic!("{other:?}"),
        };
        (parts.into_iter().map(text).collect(), content)
    }

    #[test]
    fn reasoning_is_what_stands_between_the_marks() {
        for (reasons, text, reasoning, content) in [
            (false, "\n<think>\na b\n</think>\n\nyes \n", "a b", "yes \n"),
            (false, " hi <think>a</think>", "", " hi <think>a</think>"),
            (
                true,
                "\na </thin b</think>c</think>",
                "a </thin b",
                "c</think>",
            ),
            (true, "<think>a</think>", "a", ""),
            (true, "a b\n", "a b", ""),
            (false, "<think>\n\n</think>\n\nyes", "", "yes"),
            (false, "<thi", "", "<thi"),
            (true, "<thi", "<thi", ""),
            (false, "  ", "", "  "),
        ] {
            for sizes in [&[1000][..], &[1], &[3, 2]] {
                let expected = (reasoning.to_owned(), content.to_owned());
                assert_eq!(split(reasons, text, sizes), expected, "{text:?}");
            }
        }
    }

    #[test]
    fn the_prompt_says_whether_a_text_begins_with_reasoning() {
        use ReasoningFormat::{DeepseekR1, Qwen3};
        for (prompt, r1, qwen) in [
            ("<|im_start|>assistant\n", true, false),
            ("<|im_start|>assistant\n<think>\n", true, true),
            (
                "<|im_start|>assistant\n<think>\n\n</think>\n\n",
                false,
                false,
            ),
        ] {
            assert_eq!(DeepseekR1.begins_with_reasoning(prompt), r1, "{prompt}");
            assert_eq!(Qwen3.begins_with_reasoning(prompt), qwen, "{prompt}");
        }
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(
            parts in prop::collection::vec(
                prop::sample::select(vec!["<think>", "</think>", "a", " ", "\n", "é", "<", "/", "</th", "ink>"]),
                0..12,
            ),
            reasons: bool,
            sizes in prop::collection::vec(1usize..6, 1..5),
        ) {
            let text = parts.concat();
            let whole = split(reasons, &text, &[text.len() + 1]);
            prop_assert_eq!(split(reasons, &text, &sizes), whole);
        }
    }
}
