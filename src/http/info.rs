//! The routes that say what the server is and how busy it is.

use super::state::AppState;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

/// `GET /version`.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /load`: the number of requests that are being answered.
pub(super) async fn load(State(state): State<AppState>) -> Json<Value> {
    Json(json!({"server_load": state.load.count()}))
}

/// `GET /server_info`.
pub(super) async fn server_info(State(state): State<AppState>) -> Json<Value> {
    let max_model_len = state.engine.limits().max_model_len;
    Json(state.info.json(&state.model_names, max_model_len))
}

/// `GET /tokenizer_info`: what clients that render chats themselves need besides `/tokenize`, with the names of
/// `tokenizer_config.json`.
pub(super) async fn tokenizer_info(State(state): State<AppState>) -> Json<Value> {
    let text = &state.text;
    let special = text.special_ids();
    let name = |id: Option<u32>| id.and_then(|id| text.token_name(id));
    Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name(special.bos),
        "eos_token": name(text.eos()),
        "pad_token": name(text.pad()),
        "bos_token_id": special.bos,
        "eos_token_id": text.eos(),
        "pad_token_id": text.pad(),
        "vocab_size": text.vocab_size(),
        "model_max_length": state.engine.limits().max_model_len,
        "clean_up_tokenization_spaces": false,
        "chat_template": text.chat_template(),
    }))
}
