//! What the operator chose, for those who ask the server what it is.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// What is served, and how.
#[derive(Debug, Clone, Default)]
pub struct ServerInfo {
    /// What the operator called the model: a name of the hub, a folder or a file.
    pub model: String,
    /// Where it runs: `cpu` or `cuda`.
    pub device: String,
    /// Differs where the model's files, the program's version or how it computes differ.
    pub fingerprint: Option<Arc<str>>,
    /// The drafter and its K; `None` = plain decoding.
    pub drafter: Option<(String, usize)>,
    /// The acceptance rule of requests that name none.
    pub acceptance: String,
    /// Tokens per block of the KV cache, and its blocks.
    pub block_size: usize,
    pub num_blocks: usize,
    pub prefix_caching: bool,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
}

/// What is served, and how: what routers read has SGLang's names.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ServerInfo")]
pub(super) struct ServerDescription {
    version: &'static str,
    system_fingerprint: Option<String>,
    model_path: String,
    tokenizer_path: String,
    served_model_name: Option<String>,
    device: String,
    tp_size: usize,
    dp_size: usize,
    max_model_len: usize,
    max_running_requests: usize,
    max_total_num_tokens: usize,
    /// Sections as in vLLM's configuration.
    vllm_config: Value,
}

impl ServerInfo {
    pub(super) fn describe(
        &self,
        model_names: &[String],
        max_model_len: usize,
    ) -> ServerDescription {
        let speculative = self.drafter.as_ref().map(|(method, length)| {
            json!({
                "method": method,
                "num_speculative_tokens": length,
                "acceptance": self.acceptance,
            })
        });
        ServerDescription {
            version: env!("CARGO_PKG_VERSION"),
            system_fingerprint: self.fingerprint.as_deref().map(str::to_owned),
            model_path: self.model.clone(),
            tokenizer_path: self.model.clone(),
            served_model_name: model_names.first().cloned(),
            device: self.device.clone(),
            tp_size: 1,
            dp_size: 1,
            max_model_len,
            max_running_requests: self.max_num_seqs,
            max_total_num_tokens: self.num_blocks.saturating_mul(self.block_size),
            vllm_config: json!({
                "model_config": {
                    "model": self.model,
                    "served_model_name": model_names,
                    "max_model_len": max_model_len,
                },
                "cache_config": {
                    "block_size": self.block_size,
                    "num_gpu_blocks": self.num_blocks,
                    "enable_prefix_caching": self.prefix_caching,
                },
                "scheduler_config": {
                    "max_num_seqs": self.max_num_seqs,
                    "max_num_batched_tokens": self.max_num_batched_tokens,
                },
                "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1},
                "speculative_config": speculative,
            }),
        }
    }
}
