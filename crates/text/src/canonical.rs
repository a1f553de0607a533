//! The tokens of parts of texts, as grammars need them.

use super::Text;
use crate::grammar::GrammarTokens;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

impl GrammarTokens for Text {
    fn count(&self) -> usize {
        self.vocab_size()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.token_bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        Text::is_special(self, id)
    }

    fn eos(&self) -> &[u32] {
        &self.special.eos
    }

    fn encode_part(&self, text: &str) -> Vec<u32> {
        let tokenizer = self
            .part_tokenizer
            .get_or_init(|| for_parts(&self.tokenizer));
        let encoding = tokenizer.encode_fast(text, false);
        // Without tokens nothing is forced, and the model chooses among all that the grammar allows.
        encoding.map_or_else(|_| Vec::new(), |encoding| encoding.get_ids().to_vec())
    }
}

/// `tokenizer` without what it puts in front of a text, and with names of special tokens as plain text.
fn for_parts(tokenizer: &Tokenizer) -> Tokenizer {
    let mut parts = tokenizer.clone();
    parts.set_encode_special_tokens(true);
    // Normalizers and pre-tokenizers have private fields, so this edits their JSON.
    let normalizer = tokenizer.get_normalizer();
    if let Err(error) = parts.with_normalizer(edited::<NormalizerWrapper>(normalizer)) {
        tracing::warn!("grammars may force unusual tokens: {error}");
    }
    let splitter = tokenizer.get_pre_tokenizer();
    parts.with_pre_tokenizer(edited::<PreTokenizerWrapper>(splitter));
    parts
}

/// The part without what it adds; unchanged if its JSON cannot be read back.
fn edited<T: Serialize + DeserializeOwned + Clone>(part: Option<&T>) -> Option<T> {
    let part = part?;
    let json = serde_json::to_value(part).map(without_prefix);
    let edited = json.and_then(serde_json::from_value::<Option<T>>);
    edited.unwrap_or_else(|_| Some(part.clone()))
}

/// A normalizer or pre-tokenizer that adds no space.
fn without_prefix(mut part: Value) -> Value {
    for list in ["normalizers", "pretokenizers"] {
        if let Some(Value::Array(steps)) = part.get_mut(list) {
            steps.retain(|step| step["type"] != "Prepend");
            for step in steps {
                *step = without_prefix(step.take());
            }
        }
    }
    match part["type"].as_str() {
        Some("Prepend") => return Value::Null,
        Some("Metaspace") => part["prepend_scheme"] = "never".into(),
        Some("ByteLevel") if part.get("add_prefix_space").is_some() => {
            part["add_prefix_space"] = false.into();
        }
        _ => {}
    }
    part
}
