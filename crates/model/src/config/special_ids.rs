//! The ids of a configuration that are no text: those that begin and end one, and the one that stands for a guess.

use super::keys::Keys;
use candle_core::quantized::gguf_file::Value;
use foretoken_core::gguf::Header;

/// Tokens that end a turn or a text if a GGUF's vocabulary has them.
const END_TOKENS: [&str; 9] = [
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
];

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
    if let Some(Value::Array(tokens)) = header.metadata.get("tokenizer.ggml.tokens") {
        let ends = tokens.iter().take(vocab_size).enumerate().filter(
            |(_, token)| matches!(token, Value::String(t) if END_TOKENS.contains(&t.as_str())),
        );
        add_missing(&mut ids, ends.map(|(id, _)| id as u32));
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
