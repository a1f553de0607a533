//! Metrics in Prometheus' text format.

use super::state::AppState;
use crate::error::Refused;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use foretoken_core::error::{Error, Result};
use prometheus::TextEncoder;

/// The names that vLLM's metrics have, too, without what they begin with.
const OF_VLLM: &[&str] = &[
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
    "time_to_first_token_seconds",
];

/// `GET /metrics`. Names that vLLM does not have never begin as those do: its benchmark takes every name with
/// `num_draft_tokens` for the one that it means.
pub(super) async fn metrics(State(state): State<AppState>) -> Result<impl IntoResponse, Refused> {
    let mut families = state.engine.stats().registry.gather();
    for family in &mut families {
        let name = family.name().strip_prefix("foretoken:");
        let name = name.filter(|name| OF_VLLM.contains(name));
        if let Some(name) = name.map(|name| format!("{}:{name}", state.metrics_prefix)) {
            family.set_name(name);
        }
    }
    let text = TextEncoder::new()
        .encode_to_string(&families)
        .map_err(|e| Error::internal(format!("metrics: {e}")))?;
    Ok(([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text))
}
