//! Limits of the cost of a stranger's Unigram model.

use foretoken_core::error::{Error, Result};
use tokenizers::{Model, ModelWrapper, Tokenizer};

/// Bytes of all tokens that one place of a text can begin with; the library copies them at each place. Runs of
/// one character are the most in known models, and take below 7,000.
const MAX_BYTES: usize = 16 << 10;

/// # Errors
/// `Setup`, if the model is Unigram, and too many tokens begin with each other, or a character without a token
/// is an error.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<()> {
    let ModelWrapper::Unigram(model) = tokenizer.get_model() else {
        return Ok(());
    };
    let mut names: Vec<String> = model.get_vocab().into_keys().collect();
    names.sort_unstable();
    // The tokens that each begins with, behind each other, and the bytes of all of them.
    let (mut nested, mut bytes): (Vec<&str>, usize) = (Vec::new(), 0);
    for name in &names {
        while let Some(last) = nested.last().filter(|last| !name.starts_with(**last)) {
            bytes -= last.len();
            nested.pop();
        }
        nested.push(name);
        bytes += name.len();
        if bytes > MAX_BYTES {
            return Err(Error::setup(format!(
                "tokens of the Unigram model that begin with each other have {bytes} bytes together; at most {MAX_BYTES} are supported"
            )));
        }
    }
    // No vocabulary has all of these characters.
    let mut private = ('\u{F0000}'..='\u{FFFFD}').map(String::from);
    let unknown = private.find(|c| model.token_to_id(c).is_none());
    match unknown.map(|c| model.tokenize(&c)) {
        Some(Err(why)) => Err(Error::setup(format!(
            "the Unigram model cannot read every text: {why}; it needs an unk_id"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::Text;
    use serde_json::{Value, json};

    /// A Unigram model as those that transformers converts from SentencePiece.
    fn load(vocab: &[Value], unk_id: Value) -> foretoken_core::error::Result<Text> {
        let mark = |kind: &str| json!({"type": kind, "replacement": "▁", "prepend_scheme": "always", "split": true});
        let json = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null,
            "pre_tokenizer": mark("Metaspace"), "decoder": mark("Metaspace"),
            "model": {"type": "Unigram", "unk_id": unk_id, "vocab": vocab, "byte_fallback": false},
        });
        Text::from_json(&json.to_string())
    }

    #[test]
    fn the_most_probable_tokens_are_chosen() {
        let vocab = [
            ("<unk>", 0.),
            ("▁", -2.),
            ("a", -3.),
            ("b", -3.),
            ("▁a", -4.),
            ("ab", -3.5),
            ("▁ab", -9.),
        ];
        let vocab = vocab.map(|(name, score)| json!([name, score]));
        let text = load(&vocab, json!(0)).expect("loads");
        // -2 - 3.5 is more than -9 and than -4 - 3.
        assert_eq!(text.encode("ab", false).expect("encodes"), [1, 5]);
        let ids = text.encode("ab a☃☃", false).expect("encodes");
        assert_eq!(ids, [1, 5, 4, 0], "unknown ones are one token");
        assert_eq!(text.decode(&ids[..3], true), "ab a");
        let error = load(&vocab, Value::Null).expect_err("no unk_id");
        assert!(error.to_string().contains("unk_id"), "{error}");
    }

    #[test]
    fn tokens_that_begin_with_each_other_are_bounded() {
        let runs = |unit: &str, longest: usize| {
            let runs = (1..=longest).map(|len| json!([unit.repeat(len), -1.]));
            let vocab: Vec<Value> = [json!(["<unk>", 0.])].into_iter().chain(runs).collect();
            load(&vocab, json!(0))
        };
        let text = runs("▁", 64).expect("such models are known");
        let started = std::time::Instant::now();
        let ids = text.encode(&" ".repeat(1 << 17), false).expect("encodes");
        assert!(ids.len() > 2000, "{}", ids.len());
        let took = started.elapsed();
        assert!(took.as_secs() < 60, "{took:?}");
        let error = runs("a", 1000).expect_err("too many").to_string();
        assert!(error.contains("begin with each other"), "{error}");
    }
}
