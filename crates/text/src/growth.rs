//! Checks how much a tokenizer's normalizer can lengthen a text: replacements in a row multiply.

use foretoken_core::error::{Error, Result};
use serde::Deserialize;
use serde_json::Value;

/// Bytes of the normalized text for each byte of a text, and bytes that are put in front. In known models they are below
/// 40: NFKC makes up to 18 characters of one.
const MAX_GROWTH: usize = 256;
/// Growth by a normalization of Unicode, or by a table of SentencePiece, which libraries apply in one pass.
const UNICODE_GROWTH: usize = 18;

/// The part of `tokenizer.json` that is read here.
#[derive(Deserialize)]
struct TokenizerParts {
    normalizer: Option<Value>,
}

/// # Errors
/// `Setup`, if the normalizer of this `tokenizer.json` can make a text too much longer.
pub(super) fn check(json: &str) -> Result<()> {
    // Other faults of the file are found by its reader.
    let Ok(TokenizerParts {
        normalizer: Some(normalizer),
    }) = serde_json::from_str(json)
    else {
        return Ok(());
    };
    let growth = growth(&normalizer);
    if growth <= MAX_GROWTH {
        Ok(())
    } else {
        Err(Error::setup(format!(
            "the tokenizer's normalizer can make a text {growth} times as long; {MAX_GROWTH} is supported"
        )))
    }
}

/// How many times as long `normalizer` can make a text: the product of the growth of its steps.
fn growth(normalizer: &Value) -> usize {
    let len = |value: &Value| value.as_str().map_or(0, str::len);
    let by = match normalizer["type"].as_str() {
        Some("Sequence") => {
            let steps = normalizer["normalizers"].as_array();
            let steps = steps.into_iter().flatten().map(growth);
            steps.fold(1, usize::saturating_mul)
        }
        // A pattern may be empty, and then matches between all bytes.
        Some("Replace") => match len(&normalizer["pattern"]["String"]) {
            0 => 1 + len(&normalizer["content"]),
            pattern => len(&normalizer["content"]).div_ceil(pattern),
        },
        Some("Prepend") => len(&normalizer["prepend"]),
        Some("NFD" | "NFKD" | "NFC" | "NFKC" | "Precompiled") => UNICODE_GROWTH,
        Some("Lowercase" | "BertNormalizer" | "ByteLevel") => 3,
        _ => 1,
    };
    by.max(1)
}
