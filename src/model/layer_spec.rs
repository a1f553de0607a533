//! What the layers of a model compute. Architectures differ by this, not by types of layers.

use super::rope::Rope;
use crate::kernels::Activation;

/// A layer: attention, then an MLP, each added to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// The position embedding of queries and keys; `None` = positions are not encoded.
    pub rope: Option<Rope>,
    /// The norms of queries and keys before it.
    pub qk_norm: Option<QkNorm>,
    /// Factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Number of tokens up to its own that a token sees; `None` = all.
    pub window: Option<usize>,
    /// Scores of attention become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each head has a further score in its softmax, without a value.
    pub sinks: bool,
    pub norms: Norms,
    pub mlp: MlpSpec,
    /// Whether q, k and v have a bias, the output of attention, and the products of the MLP.
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Factor of what attention and MLP add to the residual stream.
    pub residual_scale: f32,
}

/// What a norm of queries and keys spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head.
    Head,
    /// All heads of a token together.
    Whole,
}

/// The norms of a layer, by the names of their weights; `None` = there is no such norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// Of the input of attention.
    pub before_attention: Option<&'static str>,
    /// Of its output, before it is added to the residual stream.
    pub after_attention: Option<&'static str>,
    /// Of the input of the MLP.
    pub before_mlp: Option<&'static str>,
    /// Of its output.
    pub after_mlp: Option<&'static str>,
}

/// The second half of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpSpec {
    /// `down(activation(gate(x)) * up(x))`.
    Gated(Activation),
}

impl Norms {
    /// Those of Llama: of both inputs.
    pub const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
}

impl LayerSpec {
    /// A layer of Llama with heads of `head_dim` values: what an architecture does not say otherwise.
    pub fn llama(rope: Rope, head_dim: usize) -> Self {
        Self {
            rope: Some(rope),
            qk_norm: None,
            attention_scale: 1. / (head_dim as f32).sqrt(),
            window: None,
            soft_cap: None,
            sinks: false,
            norms: Norms::BEFORE,
            mlp: MlpSpec::Gated(Activation::Silu),
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            residual_scale: 1.,
        }
    }

    /// Checks it for heads of `head_dim` values.
    pub(super) fn check(&self, head_dim: usize, max_positions: usize) -> Result<(), String> {
        if self.window == Some(0) {
            return Err("sliding_window is 0".into());
        }
        (self.rope.as_ref()).map_or(Ok(()), |rope| rope.check(head_dim, max_positions))
    }
}
