//! What the layers of a model compute. Architectures differ by this, not by types of layers.

pub(crate) mod conv;
pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod latent;
pub(crate) mod mamba;
mod norms;

use crate::layers::rope::RopeSpec;
use conv::ShortConvSpec;
use delta::DeltaSpec;
pub use experts::{ExpertGroups, ExpertsSpec, RouterScores, SharedExpert};
use foretoken_core::kv::{KvForm, KvHeads, PoolPlace};
use foretoken_kernels::{Activation, StateShape, Xielu};
use latent::LatentSpec;
use mamba::MambaSpec;
pub use norms::{NormSpec, Norms, QkNorm};

/// A layer: attention, or what it has in its place, then an MLP, each added to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Whether its first half reads what that of the layer before it reads, as the other half of one layer of the
    /// checkpoint.
    pub is_beside_last: bool,
    /// The first half of the layer: attention, or what replaces it.
    pub mixer: MixerSpec,
    /// Number of values of a row that it reads, if it is not the hidden size.
    pub inputs: Option<usize>,
    /// The layer's key/value heads, if they are not the model's. The heads of queries have the same width.
    pub kv_heads: Option<KvHeads>,
    /// Where K and V come from.
    pub kv: KvSource,
    /// Whether each head of v has an RMSNorm without weights.
    pub v_norm: bool,
    /// The position embedding of queries and keys; `None` = positions are not encoded.
    pub rope: Option<RopeSpec>,
    /// Where rows of q and k are whose values are rotated together.
    pub rope_rows: RopeRows,
    /// The norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Number of tokens up to its own that a token sees; `None` = all.
    pub window: Option<usize>,
    /// Whether a token sees those after it, too: as many as before it, with a window.
    pub is_bidirectional: bool,
    /// Scores of attention become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each head has a further score in its softmax, without a value.
    pub sinks: bool,
    /// Where the checkpoint has the gates of attention, if it has some: each value of the output of attention is multiplied
    /// by the sigmoid of a product.
    pub gate: Option<AttentionGate>,
    /// The norms around attention and MLP.
    pub norms: Norms,
    /// Whether the MLP reads what attention reads, instead of the residual stream after attention. A layer without
    /// either is parallel.
    pub parallel: bool,
    /// The second half of the layer.
    pub mlp: MlpSpec,
    /// Width of the MLP, if it is not the model's.
    pub mlp_width: Option<usize>,
    /// Factors of the products of gate and up of a [gated](MlpSpec::Gated) MLP.
    pub mlp_scales: [f32; 2],
    /// Whether the checkpoint has q, k and v as one tensor, `qkv_proj`.
    pub fused_qkv: bool,
    /// Whether q, k and v have a bias, the output of attention, and the products of the MLP.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether the products of the MLP have biases.
    pub mlp_bias: bool,
    /// Factor of what attention and MLP add to the residual stream.
    pub residual_scale: f32,
    /// Whether the checkpoint has a factor of the residual stream after the layer, `layer_scalar`.
    pub has_scalar: bool,
}

/// The first half of a layer: how a token sees those before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MixerSpec {
    /// Multi-head attention with K and V of each token.
    Attention,
    /// Attention whose keys and values are products of latent vectors. It keeps these in place of K and V.
    Latent(LatentSpec),
    /// A short convolution; what it keeps of each token takes the place of K and V.
    ShortConv(ShortConvSpec),
    /// The gated delta rule. It keeps no K and V, but a state of the whole text.
    Delta(DeltaSpec),
    /// Mamba 2, which keeps a state, too.
    Mamba(MambaSpec),
    /// The layer has only an MLP, and [is parallel](LayerSpec::parallel).
    None,
}

impl MixerSpec {
    /// The sizes of the state of a text, if it keeps one.
    pub fn states(&self) -> Option<StateShape> {
        match self {
            Self::Delta(delta) => Some(delta.shape.states()),
            Self::Mamba(mamba) => Some(mamba.shape.states()),
            Self::Attention | Self::Latent(_) | Self::ShortConv(_) | Self::None => None,
        }
    }
}

/// Where K and V of a layer come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// The layer computes K and V.
    Own,
    /// The layer computes K. V is the same before norm and position embedding.
    Keys,
    /// The layer reads K and V of this earlier layer, which has its own.
    Layer(usize),
}

/// Where the rows are whose products are the gates of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionGate {
    /// In `q_proj`, those of each head after its queries.
    InQueries,
    /// In `gate_proj`.
    Apart,
}

/// What a model computes, besides sizes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ModelSpec {
    /// The layers, in order.
    pub layers: Vec<LayerSpec>,
    /// How the norms are computed.
    pub norm: NormSpec,
    /// How those of the outputs of attention and MLP are computed, if it is not as the others.
    pub output_norm: Option<NormSpec>,
    /// How the norm before the output layer is computed, if it is not as the others.
    pub final_norm: Option<NormSpec>,
    /// Whether the embedding's rows have an RMSNorm without weights.
    pub has_embedding_norm: bool,
    /// Factor of the embedding's rows.
    pub embedding_scale: Option<f32>,
    /// Factor of the logits.
    pub logit_scale: Option<f32>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// Width of each layer's own input, if layers have one besides the residual stream.
    pub layer_input_width: Option<usize>,
    /// Prefixes of the names of the tensors that predict further tokens. These tensors are not read.
    pub unread: Vec<String>,
    /// The layers that predict further tokens, if checkpoints may have such layers that can draft.
    pub mtp: Option<MtpSpec>,
    /// Parts of the names of tensors, ours and those of safetensors, one replaced after the other.
    pub names: &'static [(&'static str, &'static str)],
}

/// The layers of a checkpoint that predict further tokens (multi-token prediction).
#[derive(Debug, Clone, PartialEq)]
pub struct MtpSpec {
    /// What each of these layers computes.
    pub layer: LayerSpec,
    pub layout: MtpLayout,
    /// Number of these layers, as the configuration says it.
    pub count: usize,
}

/// How a checkpoint names the parts of the layers for multi-token prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtpLayout {
    /// As the parts of layers after the model's own layers: DeepSeek and GLM, and all GGUF files.
    After,
    /// `mtp.*`: Qwen.
    Apart,
    /// `model.mtp_*`: ERNIE.
    Ernie,
}

impl From<Vec<LayerSpec>> for ModelSpec {
    fn from(layers: Vec<LayerSpec>) -> Self {
        Self {
            layers,
            ..Self::default()
        }
    }
}

impl ModelSpec {
    /// The name, without `.weight`, that classes of Hugging Face have for the weight that the code calls `name`.
    pub(crate) fn weight_name(&self, name: &str) -> String {
        let replaced = |name: String, (ours, theirs): &(&str, &str)| name.replace(ours, theirs);
        let full = self.names.iter().fold(format!("{name}.weight"), replaced);
        full.trim_end_matches(".weight").to_owned()
    }

    /// The number of the checkpoint's layer that layer `index` is of.
    pub(crate) fn stored_layer(&self, index: usize) -> usize {
        let before = self.layers[1..=index].iter();
        before.filter(|layer| !layer.is_beside_last).count()
    }

    /// Checks that it makes no logit NaN, with heads of `head_dim` values and so many positions, and keeps something of
    /// each token.
    ///
    /// # Errors
    /// A message that names what would.
    pub fn check(&self, head_dim: usize, max_positions: usize) -> Result<(), String> {
        let further = self.mtp.as_ref().map(|mtp| &mtp.layer);
        for layer in self.layers.iter().chain(further) {
            let dim = layer.kv_heads.map_or(head_dim, |heads| heads.dim);
            layer.check(dim, max_positions)?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if let KvSource::Layer(of) = layer.kv
                && !(self.layers[..i].get(of))
                    .is_some_and(|other| other.kv_heads == layer.kv_heads && other.has_own_kv())
            {
                return Err(format!(
                    "layer {i} cannot read K and V of layer {of}: it must be an earlier one with heads of the same shape that has its own"
                ));
            }
        }
        if !self.layers.is_empty() && self.with_kv(self.layers.len()).next().is_none() {
            return Err("models without any layer of attention are not supported".into());
        }
        for (name, value) in [
            ("the scale of the embedding", self.embedding_scale),
            ("the scale of the logits", self.logit_scale),
            ("final_logit_softcapping", self.logit_soft_cap),
        ] {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.)) {
                return Err(format!("{name} {value} must be finite and more than 0"));
            }
        }
        Ok(())
    }

    /// The places of what the layers read.
    pub(crate) fn pool_places(&self) -> impl Iterator<Item = PoolPlace> {
        let (mut tokens, mut states) = (0.., 0..);
        let place = move |layer: &LayerSpec| match layer.kv {
            _ if layer.mixer == MixerSpec::None => Some(PoolPlace::Nothing),
            _ if layer.mixer.states().is_some() => states.next().map(PoolPlace::States),
            KvSource::Layer(owner) => Some(PoolPlace::Tokens(self.with_kv(owner).count())),
            KvSource::Own | KvSource::Keys => tokens.next().map(PoolPlace::Tokens),
        };
        self.layers.iter().map_while(place)
    }

    /// The layers before `end` that have their own K and V.
    fn with_kv(&self, end: usize) -> impl Iterator<Item = &LayerSpec> {
        let layers = self.layers[..end].iter();
        layers.filter(|layer| layer.has_own_kv())
    }

    /// The key/value heads of the layers that have their own K and V, which are in `form` where the layer is attention;
    /// `heads` are those of the model.
    pub(crate) fn pool_heads(&self, heads: KvHeads, form: Option<KvForm>) -> Vec<KvHeads> {
        let of = |layer: &LayerSpec| KvHeads {
            form: form.filter(|_| layer.mixer == MixerSpec::Attention),
            ..layer.kv_heads.unwrap_or(heads)
        };
        self.with_kv(self.layers.len()).map(of).collect()
    }

    /// The sizes of the states of the layers that keep some.
    pub(crate) fn states(&self) -> Vec<StateShape> {
        let layers = self.layers.iter();
        layers.filter_map(|layer| layer.mixer.states()).collect()
    }

    /// Whether a layer keeps a state of a whole text.
    pub fn is_recurrent(&self) -> bool {
        self.layers
            .iter()
            .any(|layer| layer.mixer.states().is_some())
    }

    /// Whether tokens see those after them, too.
    pub fn is_bidirectional(&self) -> bool {
        self.layers.iter().any(|layer| layer.is_bidirectional)
    }

    /// Lets tokens see those after them, too, if the architecture does not say it.
    ///
    /// # Errors
    /// If a layer has a window, of which nobody says where it ends then, or something else than attention.
    pub(crate) fn make_bidirectional(&mut self) -> Result<(), String> {
        if self.is_bidirectional() {
            return Ok(());
        }
        let is_plain =
            |layer: &LayerSpec| layer.mixer == MixerSpec::Attention && layer.window.is_none();
        if !self.layers.iter().all(is_plain) {
            return Err(
                "attention in both directions is only supported in layers of attention without a window"
                    .into(),
            );
        }
        for layer in &mut self.layers {
            layer.is_bidirectional = true;
        }
        Ok(())
    }

    /// The model of these layers of this one, ascending.
    ///
    /// # Errors
    /// If one reads K and V of a layer that is not among them.
    pub(crate) fn subset(&self, layers: &[usize]) -> Result<Self, String> {
        let chosen = layers.iter().map(|&i| {
            let mut layer = self.layers[i].clone();
            if let KvSource::Layer(of) = &mut layer.kv {
                let place = layers.iter().position(|layer| layer == of);
                *of = place.ok_or_else(|| {
                    format!("layer {i} reads K and V of layer {of}, which must be among them, too")
                })?;
            }
            Ok(layer)
        });
        Ok(Self {
            layers: chosen.collect::<Result<_, String>>()?,
            ..self.clone()
        })
    }
}

/// The second half of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MlpSpec {
    /// `down(activation(up(x)))`, with these names of the weights.
    Plain {
        /// The activation function.
        activation: Activation,
        /// The name of the up projection.
        up: &'static str,
        /// The name of the down projection.
        down: &'static str,
    },
    /// `down(activation(gate(x)) * up(x))`.
    Gated(Activation),
    /// As [`MlpSpec::Gated`], but gate and up are one tensor.
    Fused {
        /// The activation function, which is applied to the gate.
        activation: Activation,
        /// The name of the fused gate and up projection.
        gate_up: &'static str,
        /// The name of the down projection.
        down: &'static str,
    },
    /// As [`MlpSpec::Plain`], with these parameters of the activation; `None` = those of the checkpoint.
    Xielu(Option<Xielu>),
    /// Many MLPs like `Gated`, of which each row uses a few.
    Experts(ExpertsSpec),
    /// The layer has none, and [is parallel](LayerSpec::parallel).
    None,
}

impl MlpSpec {
    /// `Fused` with the names of Phi-3.
    pub fn fused(activation: Activation) -> Self {
        Self::Fused {
            activation,
            gate_up: "mlp.gate_up_proj",
            down: "mlp.down_proj",
        }
    }
}

/// Where rows of q and k are in a checkpoint whose values are rotated together. The code has them in the two halves of
/// a head, so loading reorders neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeRows {
    /// The two halves of a head, in all checkpoints.
    Halves,
    /// Neighbours, in all checkpoints.
    Neighbours,
    /// Neighbours in GGUF files, whose conversion has reordered the halves of Hugging Face's.
    NeighboursInGguf,
    /// Halves in GGUF files, whose conversion has reordered the neighbours of Hugging Face's.
    HalvesInGguf,
}

/// Checks that each of these sizes is from 1 to its maximum.
fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<(), String> {
    match (sizes.iter()).find(|(_, size, max)| !(1..=*max).contains(size)) {
        None => Ok(()),
        Some((name, size, max)) => Err(format!(
            "{name} {size} is not supported: from 1 to {max} is"
        )),
    }
}

impl LayerSpec {
    /// A layer of Llama with heads of `head_dim` values: what an architecture does not say otherwise.
    pub fn llama(rope: RopeSpec, head_dim: usize) -> Self {
        Self {
            rope: Some(rope),
            ..Self::without_rope(head_dim)
        }
    }

    /// As [`LayerSpec::llama`], but without a position embedding.
    pub(crate) fn without_rope(head_dim: usize) -> Self {
        Self {
            is_beside_last: false,
            mixer: MixerSpec::Attention,
            kv_heads: None,
            kv: KvSource::Own,
            v_norm: false,
            rope: None,
            rope_rows: RopeRows::Halves,
            qk_norm: None,
            attention_scale: 1. / (head_dim as f32).sqrt(),
            window: None,
            is_bidirectional: false,
            soft_cap: None,
            sinks: false,
            gate: None,
            norms: Norms::BEFORE,
            parallel: false,
            mlp: MlpSpec::Gated(Activation::Silu),
            mlp_width: None,
            mlp_scales: [1.; 2],
            fused_qkv: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            residual_scale: 1.,
            has_scalar: false,
            inputs: None,
        }
    }

    /// Whether it keeps K and V of its own.
    pub(crate) fn has_own_kv(&self) -> bool {
        self.mixer.states().is_none() && self.keeps()
    }

    /// Whether it keeps anything of tokens or texts.
    pub(crate) fn keeps(&self) -> bool {
        self.mixer != MixerSpec::None && !matches!(self.kv, KvSource::Layer(_))
    }

    /// The layer's experts, if it has any.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match &self.mlp {
            MlpSpec::Experts(experts) => Some(experts),
            _ => None,
        }
    }

    /// Number of values between the products of the MLP of a row, in a model whose MLPs have `width` if a layer does
    /// not say otherwise.
    pub(crate) fn active_width(&self, width: usize) -> usize {
        match &self.mlp {
            MlpSpec::Experts(experts) => {
                let shared = experts.shared.map_or(0, |shared| shared.width);
                experts.per_token * experts.width + shared
            }
            MlpSpec::None => 0,
            _ => self.mlp_width.unwrap_or(width),
        }
    }

    /// Checks it for heads of `head_dim` values.
    pub(crate) fn check(&self, head_dim: usize, max_positions: usize) -> Result<(), String> {
        if self.window == Some(0) {
            return Err("sliding_window is 0".into());
        }
        if let Some(cap) = self.soft_cap
            && !(cap.is_finite() && cap > 0.)
        {
            return Err(format!("attn_logit_softcapping {cap} must be more than 0"));
        }
        self.experts().map_or(Ok(()), ExpertsSpec::check)?;
        for (name, value) in [
            ("the scale of attention", self.attention_scale),
            ("residual_multiplier", self.residual_scale),
            ("the factor of the MLP's gate", self.mlp_scales[0]),
            ("the factor of the MLP", self.mlp_scales[1]),
        ] {
            if !value.is_finite() {
                return Err(format!("{name} {value} must be finite"));
            }
        }
        (self.rope.as_ref()).map_or(Ok(()), |rope| rope.check(head_dim, max_positions))
    }
}
