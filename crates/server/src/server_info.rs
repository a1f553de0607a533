//! The operator's choices, for those who ask the server what it is.

use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// A description of the model that is served, and of the options that it is served with.
#[derive(Debug, Clone, Default)]
pub struct ServerInfo {
    /// The operator's name of the model: a name of the hub, a folder or a file.
    pub model: String,
    /// The device of the model: `cpu` or `cuda`.
    pub device: String,
    /// Differs where the model's files, the program's version or how it computes differ.
    pub fingerprint: Option<Arc<str>>,
    /// The drafter and its K; `None` = plain decoding.
    pub drafter: Option<(String, usize)>,
    /// The acceptance rule of requests that name none.
    pub acceptance: String,
    /// Tokens per block of the KV cache, and its blocks.
    pub block_size: usize,
    /// Number of blocks of the KV cache.
    pub num_blocks: usize,
    /// Whether prefixes of sequences are cached for other requests.
    pub prefix_caching: bool,
    /// Maximum bytes of the files in which prefixes are kept; `None` = they are kept in memory alone.
    pub prefix_cache_disk_size: Option<usize>,
    /// Maximum number of requests in one batch.
    pub max_num_seqs: usize,
    /// Maximum number of tokens in one target forward.
    pub max_num_batched_tokens: usize,
    /// What the model's files have.
    pub files: ModelFiles,
}

/// The files of a model.
#[derive(Debug, Clone, Default)]
pub struct ModelFiles {
    /// `gguf` or `safetensors`.
    pub format: String,
    /// The name of the model's architecture, as GGUF files have it (`llama`).
    pub architecture: String,
    /// Number of values of all tensors.
    pub parameters: u64,
    /// The type of most of these values (`Q4_K`).
    pub quantization: String,
    /// Bytes of all tensors.
    pub bytes: u64,
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
    vllm_config: VllmConfig,
}

/// Sections as in vLLM's configuration.
#[derive(Serialize, JsonSchema)]
struct VllmConfig {
    model_config: ServedModel,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    parallel_config: ParallelConfig,
    speculative_config: Option<SpeculativeConfig>,
}

#[derive(Serialize, JsonSchema)]
struct ServedModel {
    model: String,
    served_model_name: Vec<String>,
    max_model_len: usize,
}

#[derive(Serialize, JsonSchema)]
struct CacheConfig {
    block_size: usize,
    num_gpu_blocks: usize,
    enable_prefix_caching: bool,
    prefix_cache_disk_size: Option<usize>,
}

#[derive(Serialize, JsonSchema)]
struct SchedulerConfig {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

#[derive(Serialize, JsonSchema)]
struct ParallelConfig {
    tensor_parallel_size: usize,
    data_parallel_size: usize,
}

#[derive(Serialize, JsonSchema)]
struct SpeculativeConfig {
    method: String,
    num_speculative_tokens: usize,
    acceptance: String,
}

impl ServerInfo {
    pub(super) fn describe(
        &self,
        model_names: &[String],
        max_model_len: usize,
    ) -> ServerDescription {
        let speculative = |(method, length): &(String, usize)| SpeculativeConfig {
            method: method.clone(),
            num_speculative_tokens: *length,
            acceptance: self.acceptance.clone(),
        };
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
            vllm_config: VllmConfig {
                model_config: ServedModel {
                    model: self.model.clone(),
                    served_model_name: model_names.to_vec(),
                    max_model_len,
                },
                cache_config: CacheConfig {
                    block_size: self.block_size,
                    num_gpu_blocks: self.num_blocks,
                    enable_prefix_caching: self.prefix_caching,
                    prefix_cache_disk_size: self.prefix_cache_disk_size,
                },
                scheduler_config: SchedulerConfig {
                    max_num_seqs: self.max_num_seqs,
                    max_num_batched_tokens: self.max_num_batched_tokens,
                },
                parallel_config: ParallelConfig {
                    tensor_parallel_size: 1,
                    data_parallel_size: 1,
                },
                speculative_config: self.drafter.as_ref().map(speculative),
            },
        }
    }
}
