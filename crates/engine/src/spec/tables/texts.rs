//! The texts of the requests that run: their prompts, predictions and outputs, indexed a bounded part a step.

use super::own::{Indexed, SuffixIndex, TextKey};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The index, and how much of each text is in it. The choices of a request have the same prompt and the
/// same prediction, which are indexed once.
#[derive(Debug)]
pub struct Texts {
    index: SuffixIndex,
    /// Prompts and predictions: how much of each is indexed, and for how many requests it is kept.
    shared: HashMap<TextKey, (Indexed, usize)>,
    /// Number of outputs so far.
    outputs: u64,
}

/// The texts of one request.
#[derive(Debug)]
pub struct TextsOf {
    prompt: TextKey,
    prompt_len: usize,
    prediction: TextKey,
    output: Indexed,
}

impl TextsOf {
    /// The keys of a sequence's tokens, that of its end first.
    pub fn of_tokens(&self) -> [TextKey; 2] {
        [self.output.key, self.prompt]
    }

    /// The key of its prediction.
    pub fn of_prediction(&self) -> [TextKey; 1] {
        [self.prediction]
    }
}

impl Texts {
    /// No texts, and an index of at most `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self {
            index: SuffixIndex::new(bytes),
            shared: HashMap::new(),
            outputs: 0,
        }
    }

    /// The index of all texts.
    pub fn index(&mut self) -> &mut SuffixIndex {
        &mut self.index
    }

    /// Memory of the index, in bytes.
    pub fn bytes(&self) -> usize {
        self.index.bytes()
    }

    /// Texts for a new request. It shares those that others of its scope have; [`Texts::close`] gives
    /// them back.
    pub fn open(&mut self, scope: u64, prompt: &[u32], prediction: &[u32]) -> TextsOf {
        self.outputs += 1;
        TextsOf {
            prompt: self.share(scope, prompt),
            prompt_len: prompt.len(),
            prediction: self.share(scope, prediction),
            output: Indexed {
                key: self.index.key(self.outputs, &[]),
                len: prompt.len(),
            },
        }
    }

    fn share(&mut self, scope: u64, text: &[u32]) -> TextKey {
        let key = self.index.key(scope, text);
        let (_, users) = (self.shared.entry(key)).or_insert((Indexed { key, len: 0 }, 0));
        *users += 1;
        key
    }

    /// A request has ended. What nobody uses makes room for other texts.
    pub fn close(&mut self, texts: &TextsOf) {
        for key in [texts.prompt, texts.prediction] {
            if let Entry::Occupied(mut entry) = self.shared.entry(key) {
                entry.get_mut().1 -= 1;
                if entry.get().1 == 0 {
                    entry.remove();
                }
            }
        }
    }

    /// Indexes more of a request's texts: its output, its prediction and then its prompt, no more tokens than
    /// there is `room` for, which is lessened by their number. `tokens` are all of its sequence.
    pub fn extend(
        &mut self,
        texts: &mut TextsOf,
        tokens: &[u32],
        prediction: &[u32],
        room: &mut usize,
    ) {
        self.index.extend(&mut texts.output, tokens, room);
        let prompt = &tokens[..texts.prompt_len.min(tokens.len())];
        for (key, text) in [(texts.prediction, prediction), (texts.prompt, prompt)] {
            if let Some((indexed, _)) = self.shared.get_mut(&key) {
                self.index.extend(indexed, text, room);
            }
        }
    }
}

#[cfg(test)]
impl Texts {
    /// Number of prompts and predictions.
    pub fn num_shared(&self) -> usize {
        self.shared.len()
    }
}
