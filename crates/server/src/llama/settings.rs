//! The parameters of a text, with llama.cpp's names.

use crate::content::TextOr;
use crate::wire::Common;
use schemars::JsonSchema;
use serde::Serialize;

/// The parameters of a text.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct GenerationSettings {
    /// Tokens of a prompt and its answer together.
    n_ctx: usize,
    /// Maximum number of tokens; -1 = as many as the context has room for.
    n_predict: i64,
    max_tokens: i64,
    /// -1 = a random one.
    seed: i64,
    temperature: f64,
    top_k: i64,
    top_p: f64,
    min_p: f64,
    repeat_penalty: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    stop: Vec<String>,
    ignore_eos: bool,
    stream: bool,
}

impl GenerationSettings {
    /// The parameters of `common`, and those that stand for what it does not name.
    pub fn new(common: &Common, max_tokens: Option<usize>, n_ctx: usize) -> Self {
        let n_predict = max_tokens.map_or(-1, |max| i64::try_from(max).unwrap_or(i64::MAX));
        let stop = common.stop.as_ref().map_or(&[][..], TextOr::list);
        Self {
            n_ctx,
            n_predict,
            max_tokens: n_predict,
            seed: common.seed.unwrap_or(-1),
            temperature: common.temperature.unwrap_or(1.0),
            top_k: common.top_k.unwrap_or(0),
            top_p: common.top_p.unwrap_or(1.0),
            min_p: common.min_p.unwrap_or(0.0),
            repeat_penalty: common.repetition_penalty.unwrap_or(1.0),
            presence_penalty: common.presence_penalty.unwrap_or(0.0),
            frequency_penalty: common.frequency_penalty.unwrap_or(0.0),
            stop: stop.to_vec(),
            ignore_eos: common.ignore_eos.unwrap_or(false),
            stream: common.stream.unwrap_or(false),
        }
    }
}
