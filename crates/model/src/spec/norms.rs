//! Which norms layers have, and how they are computed.

/// The norms of a layer, by the names of their weights; `None` = there is no such norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// The norm of the attention's input.
    pub before_attention: Option<&'static str>,
    /// The norm of the attention's output, before the output is added to the residual stream.
    pub after_attention: Option<&'static str>,
    /// The norm of the MLP's input.
    pub before_mlp: Option<&'static str>,
    /// The norm of the MLP's output.
    pub after_mlp: Option<&'static str>,
}

impl Norms {
    /// The norms of Llama: one of the attention's input, one of the MLP's input.
    pub const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };

    /// One norm only: of the attention's input.
    pub const FIRST: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: None,
        after_mlp: None,
    };

    /// The norms of OLMo 2: one of the attention's output, one of the MLP's output.
    pub const AFTER: Self = Self {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    };

    /// llama.cpp's name of the norm whose weight is called `name`.
    pub(crate) fn gguf_name(&self, name: &str) -> Option<&'static str> {
        let names = [
            (self.before_attention, "attn_norm"),
            (self.after_attention, "post_attention_norm"),
            (self.before_mlp, "ffn_norm"),
            (self.after_mlp, "post_ffw_norm"),
        ];
        let found = names.into_iter().find(|(ours, _)| *ours == Some(name));
        found.map(|(_, gguf)| gguf)
    }
}

/// What a norm of queries and keys spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head.
    Head,
    /// Each head. The norm has no weights.
    HeadWithoutWeights,
    /// All heads of a token together.
    Whole,
    /// Each head, after the position embedding.
    RotatedHead,
}

/// How norms of a model are computed, except those of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct NormSpec {
    /// Added to the stored weights, also to those of queries and keys.
    pub offset: f32,
    /// Whether it is a LayerNorm, which subtracts the mean, and not an RMSNorm.
    pub is_centered: bool,
    /// Whether the norm has a bias beside its weight.
    pub has_bias: bool,
    /// What is added to the mean square, if it is not the configuration's `rms_norm_eps`.
    pub eps: Option<f32>,
}

impl NormSpec {
    /// LayerNorm without biases.
    pub const LAYER: Self = Self {
        offset: 0.,
        is_centered: true,
        has_bias: false,
        eps: None,
    };
    /// LayerNorm.
    pub const LAYER_WITH_BIAS: Self = Self {
        has_bias: true,
        ..Self::LAYER
    };
}
