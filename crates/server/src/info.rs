//! The routes that say what the server is and how busy it is.

use super::server_info::ServerDescription;
use super::state::AppState;
use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

#[derive(Serialize, JsonSchema)]
pub(super) struct Version {
    version: &'static str,
}

/// `GET /version`.
pub(super) async fn version() -> Json<Version> {
    let version = env!("CARGO_PKG_VERSION");
    Json(Version { version })
}

/// How many requests are being answered.
#[derive(Serialize, JsonSchema)]
pub(super) struct ServerLoad {
    server_load: usize,
}

/// `GET /load`.
pub(super) async fn load(State(state): State<AppState>) -> Json<ServerLoad> {
    let server_load = state.load.count();
    Json(ServerLoad { server_load })
}

/// `GET /server_info`.
pub(super) async fn server_info(State(state): State<AppState>) -> Json<ServerDescription> {
    let max_model_len = state.engine.limits().max_model_len;
    Json(state.info.describe(&state.model_names, max_model_len))
}

/// What clients that render chats themselves need besides `/tokenize`, with the names of
/// `tokenizer_config.json`.
#[derive(Serialize, JsonSchema)]
pub(super) struct TokenizerInfo {
    tokenizer_class: &'static str,
    bos_token: Option<String>,
    eos_token: Option<String>,
    pad_token: Option<String>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    vocab_size: usize,
    model_max_length: usize,
    clean_up_tokenization_spaces: bool,
    chat_template: Option<String>,
}

/// `GET /tokenizer_info`.
pub(super) async fn tokenizer_info(State(state): State<AppState>) -> Json<TokenizerInfo> {
    let text = &state.text;
    let special = text.special_ids();
    let name = |id: Option<u32>| id.and_then(|id| text.token_name(id));
    Json(TokenizerInfo {
        tokenizer_class: "PreTrainedTokenizerFast",
        bos_token: name(special.bos),
        eos_token: name(text.eos()),
        pad_token: name(text.pad()),
        bos_token_id: special.bos,
        eos_token_id: text.eos(),
        pad_token_id: text.pad(),
        vocab_size: text.vocab_size(),
        model_max_length: state.engine.limits().max_model_len,
        clean_up_tokenization_spaces: false,
        chat_template: text.chat_template().map(Into::into),
    })
}
