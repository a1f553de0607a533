//! The marks of a thought, for the limit on its tokens.

use super::{ReasoningFormat, Text, harmony};
use foretoken_core::sampling::{ThoughtMarks, TokenBytes};
use std::sync::Arc;

/// The tokens of a text as a [`ReasoningParser`](super::ReasoningParser) gets them: without special tokens other than
/// marks.
struct ShownTokens {
    text: Arc<Text>,
    marks: Vec<u32>,
}

impl TokenBytes for ShownTokens {
    fn bytes(&self, id: u32) -> &[u8] {
        if self.text.is_special(id) && !self.marks.contains(&id) {
            return &[];
        }
        self.text.token_bytes(id)
    }
}

/// How thoughts in `format` are marked in the tokens of `text`. `None` if the tokenizer cannot write the mark that closes
/// them. In Harmony, that is the header of the answer.
pub fn thought_marks(text: &Arc<Text>, format: ReasoningFormat) -> Option<ThoughtMarks> {
    let ((begin, end), markers) = match format {
        ReasoningFormat::Harmony => (harmony::THOUGHT_MARKS, harmony::MARKERS),
        format => (format.marks_of_thoughts(), format.markers()),
    };
    let closing = text.encode(end.first()?, false).ok()?;
    let shown = ShownTokens {
        text: text.clone(),
        marks: Vec::from_iter(markers.iter().filter_map(|mark| text.special_id(mark))),
    };
    ThoughtMarks::new(begin, end, closing, Arc::new(shown))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpecialIds;
    use crate::tests::{byte_level, tokenizer};
    use foretoken_core::sampling::{Sampler, SamplingParams, ThoughtLimit};

    /// A tokenizer of bytes with these added tokens, each with whether it is special.
    fn text(added: &[(&str, bool)]) -> Arc<Text> {
        let is_special = |of: &str| {
            let mut all = added.iter();
            let (_, special) = all.find(|(name, _)| *name == of)?;
            Some([*special, false])
        };
        let file = byte_level(added.iter().map(|(name, _)| *name), is_special);
        let text = Text::new(tokenizer(&file), SpecialIds::default(), None);
        Arc::new(text.expect("byte-level"))
    }

    /// The mark is one token, special or not, or a token for each byte. Special tokens that are no marks are no text.
    #[test]
    fn a_thought_is_closed_in_the_tokens_of_the_model() {
        let marks = |special| [("<s>", true), ("<think>", special), ("</think>", special)];
        for (added, tokens) in [
            (&marks(true)[..1], 8),
            (&marks(false)[..], 1),
            (&marks(true)[..], 1),
        ] {
            let text = text(added);
            let marks = thought_marks(&text, ReasoningFormat::Qwen3).expect("a mark");
            let closing = text.encode("</think>", false).expect("encodes");
            assert_eq!((marks.closing(), closing.len()), (&closing[..], tokens));
            let limit = ThoughtLimit {
                marks: Arc::new(marks),
                max_tokens: 2,
                is_open: false,
            };
            let params = SamplingParams {
                thought: Some(limit),
                ..SamplingParams::default()
            };
            let mut sampler = Sampler::new(params, &[0]);
            let written = text.encode("<s>\n<think>ab", false).expect("encodes");
            for &id in &written {
                assert!(sampler.forced(9).is_empty());
                sampler.push(id);
            }
            assert_eq!(sampler.forced(9), closing);
        }
    }

    /// In Harmony, the header of the answer closes a thought. Another message of reasoning goes on with it.
    #[test]
    fn a_thought_in_channels_is_closed_with_the_header_of_the_answer() {
        let added = harmony::MARKERS.iter().map(|name| (*name, true));
        let text = text(&added.collect::<Vec<_>>());
        let encode = |text_: &str| text.encode(text_, false).expect("encodes");
        let marks = thought_marks(&text, ReasoningFormat::Harmony).expect("marks");
        let header = "<|end|><|start|>assistant<|channel|>final<|message|>";
        assert_eq!(marks.closing(), encode(header));
        let limit = ThoughtLimit {
            marks: Arc::new(marks),
            max_tokens: 2,
            is_open: false,
        };
        let again = "<|end|><|start|>assistant<|channel|>analysis<|message|>";
        for (written, left) in [
            ("", None),
            ("a", None),
            ("a<|end|>", Some(1)),
            ("ab", Some(0)),
            (again, Some(0)),
            ("abc<|end|><|start|>assi", Some(6)),
            ("abcNEXT<|channel|>", Some(12)),
            ("abcNEXT<|channel|>final<|mess", Some(0)),
            (header, None),
            (
                "aNEXT<|channel|>final <|constrain|>json<|message|>abcd",
                None,
            ),
            ("aNEXT<|channel|>commentary<|message|>abcd", None),
            ("aNEXT to=functions.f<|channel|>abcd", None),
        ] {
            let written = written.replace("NEXT", "<|end|><|start|>assistant");
            let params = SamplingParams {
                thought: Some(limit.clone()),
                ..SamplingParams::default()
            };
            let mut sampler = Sampler::new(params, &[0]);
            for id in encode(&format!("<|channel|>analysis<|message|>{written}")) {
                sampler.push(id);
            }
            let closing = limit.marks.closing();
            let expected = left.map_or(&[][..], |left| &closing[left..]);
            assert_eq!(sampler.forced(99), expected, "{written}");
        }
    }
}
