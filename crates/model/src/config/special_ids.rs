//! The ids of a configuration that are no text: those that begin and end one, and the one that stands for a guess.

use super::keys::Keys;
use candle_core::quantized::gguf_file::Value;
use foretoken_core::gguf::Header;

/// Tokens that end a turn or a text if a GGUF's vocabulary has them.
const END_TOKENS: [&str; 13] = [
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    // FunctionGemma's, and GLM-4's: where the result of a call would begin.
    "<start_function_response>",
    "<|observation|>",
    // Apertus': after a turn, and after calls.
    "<|assistant_end|>",
    "<|tools_suffix|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
];

/// Tokens that end a turn of gpt-oss. Where a vocabulary has both, [`HARMONY_MESSAGE_END`] ends only a message.
const HARMONY_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];
/// Ends each message of a turn in Harmony, and turns in other formats.
const HARMONY_MESSAGE_END: &str = "<|end|>";

/// The mask token of a PARD draft model, whose training writes these keys; -1 = there is none.
pub(super) fn mask_token(keys: &mut Keys, vocab_size: usize) -> Result<Option<u32>, String> {
    let name = keys.text("spd_type")?;
    if let Some(name) = name.filter(|name| name != "pard") {
        return Err(keys.refused("spd_type", &name.into(), "only pard is"));
    }
    match keys.number("pard_token")? {
        None | Some(-1.0) => Ok(None),
        Some(id) if id >= 0.0 && id < vocab_size as f64 && id.fract() == 0.0 => Ok(Some(id as u32)),
        Some(id) => Err(format!(
            "pard_token {id} must be an id below vocab_size {vocab_size}"
        )),
    }
}

/// Takes the ids that end a text, of a model with `vocab_size` ids.
pub(super) fn end_ids(keys: &mut Keys, vocab_size: usize) -> Result<Vec<u32>, String> {
    let ids = keys.ids("eos_token_id")?;
    check_ids("eos_token_id", &ids, vocab_size)?;
    Ok(ids)
}

/// Checks that a model with `vocab_size` ids can produce all of `ids`, those of `key`.
fn check_ids(key: &str, ids: &[u32], vocab_size: usize) -> Result<(), String> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => Err(format!("{key} {id} must be below vocab_size {vocab_size}")),
    }
}

/// The id that a GGUF file has as `key`.
pub(super) fn gguf_id(header: &Header, key: &str) -> Option<u32> {
    header.metadata.get(key)?.to_u32().ok()
}

/// The declared end ids, and the ids of the tokens with which chat templates end turns.
pub(super) fn gguf_end_ids(header: &Header, vocab_size: usize) -> Result<Vec<u32>, String> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        let key = format!("tokenizer.ggml.{key}");
        let declared: Vec<u32> = gguf_id(header, &key).into_iter().collect();
        check_ids(&key, &declared, vocab_size)?;
        add_missing(&mut ids, declared);
    }
    let Some(Value::Array(tokens)) = header.metadata.get("tokenizer.ggml.tokens") else {
        return Ok(ids);
    };
    let with_names = |names: &[&str]| -> Vec<u32> {
        let tokens = tokens.iter().take(vocab_size).enumerate();
        let named = tokens.filter(
            |(_, token)| matches!(token, Value::String(name) if names.contains(&name.as_str())),
        );
        named.map(|(id, _)| id as u32).collect()
    };
    add_missing(&mut ids, with_names(&END_TOKENS));
    let harmony = HARMONY_ENDS.map(|name| with_names(&[name]));
    if harmony.iter().all(|found| !found.is_empty()) {
        add_missing(&mut ids, harmony.concat());
        let message_ends = with_names(&[HARMONY_MESSAGE_END]);
        ids.retain(|id| !message_ends.contains(id));
    }
    Ok(ids)
}

/// Adds those of `more` that are not among `ids`.
pub(super) fn add_missing(ids: &mut Vec<u32>, more: impl IntoIterator<Item = u32>) {
    for id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end ids of a file with these tokens, which declares `eos`.
    fn ends(tokens: &[&str], eos: u32) -> Vec<u32> {
        let names = tokens.iter().map(|&token| Value::String(token.to_owned()));
        let mut header = Header::default();
        let metadata = &mut header.metadata;
        metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::U32(eos));
        metadata.insert(
            "tokenizer.ggml.tokens".into(),
            Value::Array(names.collect()),
        );
        gguf_end_ids(&header, tokens.len()).unwrap()
    }

    /// In Harmony, `<|end|>` stands between a thought and the answer.
    #[test]
    fn the_end_of_a_message_of_gpt_oss_ends_no_turn() {
        assert_eq!(ends(&["a", "<|return|>", "<|end|>", "<|call|>"], 1), [1, 3]);
        // Not even if the file says so.
        assert_eq!(ends(&["a", "<|return|>", "<|end|>", "<|call|>"], 2), [1, 3]);
    }

    /// Files declare at most one end of a turn, and models end one with calls in another way.
    #[test]
    fn where_a_result_would_begin_a_turn_ends() {
        let glm4 = ["a", "<|endoftext|>", "<|user|>", "<|observation|>"];
        assert_eq!(ends(&glm4, 1), [1, 3]);
        let gemma = ["a", "<eos>", "<end_of_turn>", "<start_function_response>"];
        assert_eq!(ends(&gemma, 1), [1, 2, 3]);
        let apertus = ["a", "</s>", "<|assistant_end|>", "<|tools_suffix|>"];
        assert_eq!(ends(&apertus, 2), [2, 3]);
    }

    #[test]
    fn other_models_end_turns_with_it() {
        let phi = ["a", "<|endoftext|>", "<|end|>"];
        assert_eq!(ends(&phi, 1), [1, 2]);
        assert_eq!(ends(&["a", "<|end|>", "<|call|>"], 0), [0, 1]);
        assert_eq!(ends(&["a", "<|return|>", "<|end|>"], 1), [1, 2]);
    }
}
