//! From a [`Config`] to a running engine and its API: what the program does before it serves, and what
//! [`Foretoken`](crate::Foretoken) does for a program that embeds it.

pub mod adapters;
mod beside;
mod candidates;
pub mod check;
mod checkpoint;
mod corpus;
mod cost_cache;
mod decode;
pub mod defaults;
mod device_memory;
mod draft_vocab;
mod drafts;
mod gpu_report;
mod head_counts;
mod host_memory;
mod known;
mod learn;
pub mod load;
mod memory;
mod pairs;
mod plan;

use crate::config::Config;
use crate::error::Result;
use crate::http::{AppState, SamplingDefaults};
use crate::text::Text;
use load::Loaded;
use std::sync::Arc;

pub use decode::cpu_bandwidth;
pub use memory::free_memory;

/// Builds the server's state: the models that answer requests, and the options with which they do so.
///
/// # Errors
/// `Setup`, if the tokenizer does not go with a flag.
pub fn state(
    config: &Config,
    loaded: Loaded,
    text: Arc<Text>,
    sampling: SamplingDefaults,
) -> Result<AppState> {
    let first = std::iter::once(&config.served_model_name);
    let names = first.chain(&config.served_model_aliases).cloned().collect();
    let state = AppState::new(loaded.engine, text, names)
        .with_special_parsed(!config.http.no_parse_special)?;
    Ok(state
        .with_info(loaded.info)
        .with_embeddings(loaded.embeddings)
        .with_reranker(loaded.reranker)
        .with_adapters(loaded.adapters)
        .with_sampling_defaults(sampling)
        .with_api_keys(config.http.listen.api_keys().map(str::to_owned).collect())
        .with_tool_call_parser(config.http.tool_call_parser)
        .with_reasoning_parser(config.http.reasoning_parser)
        .with_reasoning_budget(usize::try_from(config.http.reasoning_budget).ok())?
        .with_limits(config.http.listen.limits.clone())
        .with_origins(config.http.listen.origins.clone(), &config.http.listen.host)
        .with_ui(!config.http.listen.no_ui)
        .with_strict_max_tokens(config.http.strict_max_tokens)
        .with_max_stored_responses(config.http.max_stored_responses)
        .with_metrics_prefix(&config.http.metrics_prefix))
}
