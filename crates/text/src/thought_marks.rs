//! The marks of a thought, for the limit on its tokens.

use super::{ReasoningFormat, Text};
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

/// How thoughts in `format` are marked in the tokens of `text`. `None` if the format has no mark that closes them, or
/// the tokenizer cannot write it.
pub fn thought_marks(text: &Arc<Text>, format: ReasoningFormat) -> Option<ThoughtMarks> {
    let end = format.end_marker()?;
    let begin = *ReasoningFormat::MARKERS.first()?;
    let closing = text.encode(end, false).ok()?;
    let shown = ShownTokens {
        text: text.clone(),
        marks: Vec::from_iter([begin, end].iter().filter_map(|mark| text.special_id(mark))),
    };
    ThoughtMarks::new(begin, end, closing, Arc::new(shown))
}
