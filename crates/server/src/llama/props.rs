//! `/props`: what is served, for clients that ask a server for its context and its chat template.

use super::settings::GenerationSettings;
use crate::state::AppState;
use crate::wire::Common;
use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

/// The properties of the server.
#[derive(Serialize, JsonSchema)]
pub(crate) struct Props {
    default_generation_settings: SlotSettings,
    /// Maximum number of requests in one batch.
    total_slots: usize,
    model_alias: Option<String>,
    model_path: String,
    modalities: Modalities,
    chat_template: String,
    bos_token: String,
    eos_token: String,
    build_info: &'static str,
}

/// How a request that says nothing else is answered.
#[derive(Serialize, JsonSchema)]
struct SlotSettings {
    /// Tokens of a prompt and its answer together.
    n_ctx: usize,
    /// Whether tokens are drafted.
    speculative: bool,
    params: GenerationSettings,
}

/// What a model reads besides text.
#[derive(Serialize, JsonSchema)]
struct Modalities {
    vision: bool,
    audio: bool,
}

/// `GET /props`.
pub(crate) async fn props(State(state): State<AppState>) -> Json<Props> {
    let limits = state.engine.limits();
    let n_ctx = limits.max_model_len;
    let mut common = Common::default();
    state.defaults.fill(&mut common);
    let text = &state.text;
    let name = |id: Option<u32>| id.and_then(|id| text.token_name(id)).unwrap_or_default();
    Json(Props {
        default_generation_settings: SlotSettings {
            n_ctx,
            speculative: limits.spec_length > 0,
            params: GenerationSettings::new(&common, state.defaults.max_new_tokens, n_ctx),
        },
        total_slots: state.info.max_num_seqs,
        model_alias: state.model_names.first().cloned(),
        model_path: state.info.model.clone(),
        modalities: Modalities {
            vision: false,
            audio: false,
        },
        chat_template: text.chat_template().unwrap_or_default().to_owned(),
        bos_token: name(text.special_ids().bos),
        eos_token: name(text.eos()),
        build_info: concat!("foretoken ", env!("CARGO_PKG_VERSION")),
    })
}
