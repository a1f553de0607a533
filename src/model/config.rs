//! What a model is: shapes, rope, special ids. Architectures differ by flags, not by types.

pub use candle_transformers::models::llama::{Llama3RopeConfig, Llama3RopeType};

/// Shapes and constants of a decoder, from `config.json` or from GGUF metadata.
#[derive(Debug, Clone, Default)]
pub struct ModelConfig {
    /// `llama`, `qwen2`, `qwen3`.
    pub architecture: String,
    /// Rows of the output layer.
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// Key/value heads (grouped-query attention); divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; given, or `hidden_size / num_heads`.
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f32,
    /// Llama 3's frequency scaling, where the model has it.
    pub rope_scaling: Option<Llama3RopeConfig>,
    /// Longest sequence the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// The output layer is the embedding.
    pub tie_word_embeddings: bool,
    /// Bias on q, k and v (Qwen2).
    pub qkv_bias: bool,
    /// RMSNorm on each head of q and k (Qwen3).
    pub qk_norm: bool,
    /// Ids that end a text; may be several, may be none.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
}
