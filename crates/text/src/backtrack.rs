//! Checks the time that a tokenizer's regular expressions search. The expressions are a stranger's, and some take
//! exponential time.

use foretoken_core::error::{Error, Result, caught_here};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;

/// Units that the texts repeat, so that an expression that can match the text in several ways tries them all.
const UNITS: [&str; 8] = ["a", " ", "1", ".", "\n", "é", "a ", "A"];
/// The end of the texts, so that the expression fails to match all of a text.
const END: &str = "\u{1}";
/// Bytes of the texts. What takes too long with more is likely to take a while with less.
const LENGTHS: [usize; 4] = [256, 1024, 4096, 16384];
/// Far above what known tokenizers take, which is well below a second for all texts, on a busy machine, too.
const LONGEST: Duration = Duration::from_secs(10);

/// Encodes a few texts that make expressions backtrack.
///
/// # Errors
/// `Setup`, if that takes too long.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<()> {
    if !has_regex(tokenizer) {
        return Ok(());
    }
    let started = Instant::now();
    for length in LENGTHS {
        for unit in UNITS {
            let text = unit.repeat(length / unit.len()) + END;
            let refused = |why: &str| {
                Err(Error::setup(format!(
                    "the tokenizer's regular expressions take too long in {length} bytes of {unit:?}: {why}"
                )))
            };
            // An error is that of a tokenizer that lacks one of these characters.
            if let Err(why) = caught_here(|| tokenizer.encode_fast(text, false)) {
                return refused(&why);
            }
            if started.elapsed() > LONGEST {
                return refused(&format!("over {LONGEST:?}"));
            }
        }
    }
    Ok(())
}

/// Whether the file of the tokenizer has regular expressions. Its parts have private fields, so this reads
/// their JSON.
fn has_regex(tokenizer: &Tokenizer) -> bool {
    let parts = [
        serde_json::to_value(tokenizer.get_normalizer()),
        serde_json::to_value(tokenizer.get_pre_tokenizer()),
    ];
    parts.iter().flatten().any(mentions_regex)
}

fn mentions_regex(part: &Value) -> bool {
    match part {
        Value::Object(map) => map.contains_key("Regex") || map.values().any(mentions_regex),
        Value::Array(list) => list.iter().any(mentions_regex),
        _ => false,
    }
}
