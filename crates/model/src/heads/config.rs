//! What the `config.json` of a draft head says: SafeAI Lab's, DFlash's and DeepSpec's, which are flat, and that of
//! the speculators library, which nests the shape of the layers.

use super::keys::{
    DFLASH2_KEYS, DOMINO_KEYS, END_KEYS, Flags, IS_CAUSAL, SHIFT_LABEL, layers_of, needed,
    refuse_present, set_architecture, set_muse_glimmer, shown, size, take_windows,
};
use super::rates;
use super::{HeadKind, MUSE_GLIMMER};
use crate::config::keys::is_one_of;
use crate::config::{HEAD_KEYS, ModelConfig, read_json};
use crate::layers::block_conv::ConvShape;
use crate::spec::{MixerSpec, QkNorm};
use foretoken_core::error::{Error, Result};
use foretoken_core::model::{DepthRates, MAX_TREE_NODES, MaskedBlock};
use serde_json::Value;
use std::path::Path;

pub(crate) const TARGET_HIDDEN_SIZE: &str = "target_hidden_size";
pub(crate) const NORM_BEFORE_RESIDUAL: &str = "norm_before_residual";
pub(crate) const BLOCK_SIZE: &str = "block_size";
pub(crate) const MASK_TOKEN_ID: &str = "mask_token_id";

/// Depths that a P-EAGLE head predicts if its configuration does not say.
const PEAGLE_DEPTHS: usize = 8;
/// Maximum rank of a Markov head or selector, or width of a GRU, checked before anything of that size is allocated.
pub const MAX_MARKOV_RANK: usize = 1 << 14;

/// A head's configuration.
#[derive(Debug, Clone)]
pub struct HeadConfig {
    /// The kind of head.
    pub kind: HeadKind,
    /// The configuration of the head's layers. The vocabulary is the target's.
    pub shape: ModelConfig,
    /// The size of the vocabulary, if the checkpoint says it.
    pub vocab_size: Option<usize>,
    /// The target's layers whose hidden states it reads, ascending; see [`Taps`](foretoken_core::model::Taps). `None` =
    /// those that are usual.
    pub taps: Option<Vec<usize>>,
    /// The target's hidden size, if it is not that of the head's own layers.
    pub target_hidden_size: Option<usize>,
    /// Whether the residual stream of an EAGLE-3 head begins with the features after their norm.
    pub norm_before_residual: bool,
    /// The norms of the target's hidden states before `fc`.
    pub fc_norm: FcNorm,
    /// Whether an EAGLE head reads its own outputs after their norm (EAGLE-3.1).
    pub norm_output: bool,
    /// Number of the target's layers, if it is known.
    pub target_layers: Option<usize>,
    /// The block, only of a head that predicts one.
    pub block: Option<MaskedBlock>,
    /// The layers in which rows of a block see only those before them.
    pub causality: Causality,
    /// The scales of the target's embedding and output layer.
    pub scales: EndScales,
    /// The convolutions around attention and MLP, which DFlash 2 has.
    pub convs: Option<ConvShape>,
    /// What a parallel head has besides its layers.
    pub path: PathConfig,
    /// How often its guesses were right in its training, if the checkpoint says so.
    pub rates: Option<DepthRates>,
}

/// The layers in which rows of a block see only those before them; in the others they see one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Causality {
    None,
    /// Those with a window.
    Windows,
    /// All (JetSpec, arXiv 2606.18394).
    All,
}

/// What a parallel head makes of its target's embedding and output layer, instead of what the target does.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EndScales {
    /// Factor of the embedding.
    pub embedding: Option<f32>,
    /// Factor of the logits. If this or the cap is given, the target's own are not used.
    pub logits: Option<f32>,
    /// Logits become `cap * tanh(logit / cap)`; 0 = they do not.
    pub soft_cap: Option<f32>,
}

/// What a parallel head computes along paths: DSpark's, Domino's and DFlash 2's.
#[derive(Debug, Clone, Copy, Default)]
pub struct PathConfig {
    pub markov: Option<MarkovConfig>,
    pub domino: Option<DominoConfig>,
    pub confidence: Option<ConfidenceInput>,
    pub selector: Option<SelectorConfig>,
    pub lilicorr: Option<LiLiCorrConfig>,
}

impl PathConfig {
    /// Whether it has any such part.
    pub fn is_any(&self) -> bool {
        self.parts().iter().any(Option::is_some)
    }

    /// The name of the layout that has such parts.
    fn name(&self) -> &'static str {
        if self.lilicorr.is_some() {
            "LiLiCorr"
        } else if self.selector.is_some() {
            "DFlash 2"
        } else if self.domino.is_some() {
            "Domino"
        } else if self.markov.is_some() || self.confidence.is_some() {
            "DSpark"
        } else {
            "DFlash"
        }
    }

    /// The parts of the head, for the log; `None` = it lacks this part.
    fn parts(&self) -> Vec<Option<String>> {
        let markov = self.markov.map(|MarkovConfig { rank, kind }| {
            let kind = match kind {
                MarkovKind::Vanilla => "a Markov head",
                MarkovKind::Gated => "a gated Markov head",
                MarkovKind::Recurrent => "a recurrent Markov head",
            };
            format!("{kind} of rank {rank}")
        });
        let domino = self.domino.map(|DominoConfig { width, rank, .. }| {
            format!("a GRU of width {width}, a correction of rank {rank}")
        });
        let confidence = self.confidence.map(|_| "a confidence head".into());
        let selector = self.selector;
        let selector = selector.map(|of| format!("a selector among {} tokens", of.top_k));
        let lilicorr = self.lilicorr.map(|of| {
            let LiLiCorrConfig { top_k, layers, .. } = of;
            format!("{layers} layers over {top_k} candidates")
        });
        vec![markov, domino, confidence, selector, lilicorr]
    }
}

/// A selector of a token among the most probable ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorConfig {
    pub rank: usize,
    pub top_k: usize,
}

/// A transformer over the most probable tokens of all positions of a block (LiLiCorr).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LiLiCorrConfig {
    /// Number of candidates of a position.
    pub top_k: usize,
    /// Width of the transformer's rows.
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    /// Width of the transformer's MLPs.
    pub mlp_width: usize,
    /// Width of the vectors that are compared.
    pub factor: usize,
    /// Minimum length that vectors are divided by.
    pub min_length: f32,
    /// Factor of the similarities.
    pub scale: f32,
}

/// A GRU over the tokens of a block, which corrects logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DominoConfig {
    /// Width of the GRU's state.
    pub width: usize,
    /// Rank of the correction.
    pub rank: usize,
    /// Number of tokens at the beginning of a block whose logits are not corrected.
    pub prefix: usize,
}

/// The norms of the target's hidden states before the layer `fc` of an EAGLE-3 head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FcNorm {
    None,
    /// One of all layers side by side.
    Whole,
    /// One for each layer (EAGLE-3.1).
    EachLayer,
}

/// A head that adds to the logits of a token what the token before it makes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkovConfig {
    pub rank: usize,
    pub kind: MarkovKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkovKind {
    /// The addition depends on the token alone.
    Vanilla,
    /// A gate of the hidden state weighs the addition.
    Gated,
    /// The head has a state, which goes on from token to token.
    Recurrent,
}

/// The input of a confidence head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfidenceInput {
    Hidden,
    /// The Markov head's embedding of the token before, too.
    HiddenAndToken,
}

impl HeadConfig {
    /// A head of kind `kind` whose layers are like `shape`, with nothing that distinguishes it from others.
    pub(crate) fn new(kind: HeadKind, shape: ModelConfig) -> Self {
        Self {
            kind,
            vocab_size: Some(shape.vocab_size),
            shape,
            taps: None,
            target_hidden_size: None,
            norm_before_residual: false,
            fc_norm: FcNorm::None,
            norm_output: false,
            target_layers: None,
            block: None,
            causality: Causality::None,
            scales: EndScales::default(),
            convs: None,
            path: PathConfig::default(),
            rates: None,
        }
    }

    /// Reads the `config.json` of a head of kind `kind`.
    ///
    /// # Errors
    /// `Setup`, naming the file and what is not supported.
    pub fn from_json(path: &Path, kind: HeadKind) -> Result<Self> {
        let (file, json) = read_json(path)?;
        Self::parse(&json, kind).map_err(|e| Error::in_file(&file, e))
    }

    fn parse(json: &Value, kind: HeadKind) -> Result<Self, String> {
        let mut shape = layers_of(json)?;
        // Of nested layers these would get lost. One is no key of a head: transformers has it for all classes.
        let nested = &json["transformer_layer_config"];
        let lost: Vec<&str> = HEAD_KEYS
            .split_whitespace()
            .filter(|&key| key != "has_no_defaults_at_init")
            .collect();
        refuse_present(&|_| nested, &lost).map_err(|e| format!("transformer_layer_config: {e}"))?;
        if let Some(keys) = shape.as_object_mut() {
            keys.retain(|key, _| !is_one_of(key, HEAD_KEYS));
        }
        shape["draft_vocab_size"] = json["draft_vocab_size"].clone();
        shape["architectures"] = Value::Null;
        set_architecture(&mut shape, kind);
        let is_muse_glimmer = json["architectures"][0] == MUSE_GLIMMER;
        let has_vocab_size = !is_muse_glimmer || !shape["vocab_size"].is_null();
        if is_muse_glimmer {
            set_muse_glimmer(&mut shape);
        }
        let windows = take_windows(&mut shape)?;
        let mut shape = ModelConfig::parse(&shape.to_string())?;
        if shape.mask_token.is_some() {
            return Err("pard_token is not supported for a head: only for a draft model".into());
        }
        // In that class, a row sees so many positions on either side of its own.
        let own = usize::from(is_muse_glimmer);
        for (layer, window) in shape.spec.layers.iter_mut().zip(windows) {
            layer.window = window.map(|window| window.saturating_add(own));
        }
        let head = Self {
            vocab_size: Some(shape.vocab_size).filter(|_| has_vocab_size),
            rates: rates::of_json(json)?,
            ..Self::new(kind, shape)
        };
        if kind == HeadKind::Parallel {
            head.parse_parallel(json)
        } else {
            head.parse_eagle(json)
        }
    }

    fn parse_eagle(mut self, json: &Value) -> Result<Self, String> {
        let layers = self.shape.num_layers();
        if self.kind == HeadKind::Eagle && layers != 1 {
            return Err(format!(
                "num_hidden_layers {layers} is not supported: an EAGLE-1 head has 1"
            ));
        }
        let flags = Flags::of(json);
        flags.refuse(&[
            "enable_confidence_head",
            "sample_from_anchor",
            "sliding_window_non_causal",
        ])?;
        refuse_present(&|_| json, &["markov_rank", "markov_head_type", SHIFT_LABEL])?;
        refuse_present(&|_| json, &DFLASH2_KEYS)?;
        refuse_present(&|_| json, &DOMINO_KEYS)?;
        refuse_present(&|_| json, &END_KEYS)?;
        if flags.get(IS_CAUSAL)? == Some(false) {
            return Err(format!("{IS_CAUSAL} false is not supported: only true is"));
        }
        if flags.get("use_aux_hidden_state")? == Some(false) {
            return Err("use_aux_hidden_state false is not supported: only true is".into());
        }
        if self.kind == HeadKind::Eagle {
            flags.refuse(&["norm_before_fc", "fc_norm", "norm_output"])?;
        }
        self.fc_norm = match (flags.is_set("norm_before_fc")?, flags.is_set("fc_norm")?) {
            (true, true) => return Err("norm_before_fc and fc_norm exclude each other".into()),
            (true, false) => FcNorm::Whole,
            (false, true) => FcNorm::EachLayer,
            (false, false) => FcNorm::None,
        };
        self.norm_output = flags.is_set("norm_output")?;
        self.norm_before_residual = flags.is_set(NORM_BEFORE_RESIDUAL)?;
        let taps = flags
            .0
            .map(|from| &from["eagle_aux_hidden_state_layer_ids"]);
        let taps = taps.into_iter().find(|ids| !ids.is_null());
        let list = |ids: &Value| {
            serde_json::from_value(ids.clone()).map_err(|_| {
                format!(
                    "eagle_aux_hidden_state_layer_ids {} must be a list of layers",
                    shown(ids)
                )
            })
        };
        self.taps = taps.map(list).transpose()?;
        let count = self.taps.as_ref().map_or(3, Vec::len);
        if let Some(other) = size(json, "num_aux_hidden_states")?.filter(|&n| n != count) {
            return Err(format!(
                "num_aux_hidden_states {other} is not supported: only {count} is, the number of eagle_aux_hidden_state_layer_ids (3 if there are none)"
            ));
        }
        self.target_hidden_size = size(json, TARGET_HIDDEN_SIZE)?;
        if self.kind == HeadKind::PEagle {
            let methods = &json["speculators_config"]["proposal_methods"];
            self.block = Some(MaskedBlock {
                size: size(&methods[0], "speculative_tokens")?.unwrap_or(PEAGLE_DEPTHS),
                mask: needed(json, MASK_TOKEN_ID)?,
                from_anchor: true,
            });
        }
        Ok(self)
    }

    /// Says what the attention of its layers reads. `has_norms` says whether the checkpoint has norms of queries and
    /// keys.
    pub(crate) fn set_inputs(&mut self, has_norms: bool) {
        let is_eagle1 = self.kind == HeadKind::Eagle;
        let layers = &mut self.shape.spec.layers;
        for layer in &mut *layers {
            layer.qk_norm = (has_norms && !is_eagle1).then_some(QkNorm::Head);
        }
        // An EAGLE head makes the input of its first attention itself: EAGLE-3 of embedding and features.
        if self.kind != HeadKind::Parallel
            && let Some(first) = layers.first_mut()
        {
            first.norms.before_attention = None;
            first.inputs = (!is_eagle1).then_some(2 * self.shape.hidden_size);
        }
    }

    /// The name of its layout and what distinguishes it, for the log. It reads so many layers of its target, and its
    /// outputs may be only some ids.
    pub(crate) fn layout(&self, taps: usize, has_ids: bool) -> String {
        let size = self.block.map_or(0, |block| block.size);
        let layers = &self.shape.spec.layers;
        let (mut name, notes) = match self.kind {
            HeadKind::Eagle => return "EAGLE-1".into(),
            HeadKind::Parallel => {
                let block = Some(format!("blocks of {size}"));
                let windows = layers.iter().filter(|layer| layer.window.is_some()).count();
                let windows = (windows > 0).then(|| format!("{windows} layers with windows"));
                let mut notes = self.path.parts();
                let is_causal = self.causality == Causality::All;
                let causal = is_causal.then(|| "rows that see those before them".into());
                notes.extend([block, windows, causal]);
                (self.path.name().to_owned(), notes)
            }
            _ => {
                let name = match self.kind {
                    HeadKind::PEagle => format!("P-EAGLE of {size} depths"),
                    _ if self.norm_output => "EAGLE-3.1".into(),
                    _ => "EAGLE-3".to_owned(),
                };
                let norms = match self.fc_norm {
                    FcNorm::None => None,
                    FcNorm::EachLayer if taps > 1 => Some(format!("{taps} norms before fc")),
                    FcNorm::Whole | FcNorm::EachLayer => Some("a norm before fc".into()),
                };
                let outputs = self.shape.output_size();
                let is_latent =
                    (layers.iter()).any(|layer| matches!(layer.mixer, MixerSpec::Latent(_)));
                let notes = vec![
                    is_latent.then(|| "latent attention".into()),
                    (layers.len() > 1).then(|| format!("{} layers", layers.len())),
                    norms,
                    (self.norm_before_residual).then(|| "the norm before the residual".into()),
                    has_ids.then(|| format!("{outputs} output ids")),
                ];
                (name, notes)
            }
        };
        for note in notes.into_iter().flatten() {
            name = format!("{name}, {note}");
        }
        name
    }

    /// Rank of its Markov head, 0 = it has none.
    ///
    /// # Errors
    /// If that head is more than two matrices.
    pub fn markov_rank(&self) -> Result<usize, String> {
        match self.path.markov {
            None => Ok(0),
            Some(markov) if markov.kind == MarkovKind::Vanilla => Ok(markov.rank),
            Some(_) => Err("markov_head_type must be vanilla".into()),
        }
    }

    /// The key of something that it computes besides `fc`, its layers and a Markov head; `None` = there is nothing.
    pub fn extra(&self) -> Option<&'static str> {
        let (path, scales) = (&self.path, &self.scales);
        let all = [
            ("norm_before_fc", self.fc_norm == FcNorm::Whole),
            ("fc_norm", self.fc_norm == FcNorm::EachLayer),
            ("norm_output", self.norm_output),
            ("is_causal", self.causality == Causality::All),
            ("prefix_gru", path.domino.is_some()),
            (
                "sample_from_anchor",
                self.block.is_some_and(|block| block.from_anchor),
            ),
            ("enable_confidence_head", path.confidence.is_some()),
            ("conv_kernel_size", self.convs.is_some()),
            ("selector_rank", path.selector.is_some()),
            ("lilicorr_candidate_topk", path.lilicorr.is_some()),
            ("input_embedding_scale", scales.embedding.is_some()),
            ("output_multiplier", scales.logits.is_some()),
            ("final_logit_softcapping", scales.soft_cap.is_some()),
        ];
        let found = all.into_iter().find(|(_, is_there)| *is_there);
        found.map(|(key, _)| key)
    }

    /// The layers of `target` that it reads.
    ///
    /// # Errors
    /// A message that says what differs, if the head does not belong to a model like `target`.
    pub fn taps_of(&self, target: &ModelConfig) -> Result<Vec<usize>, String> {
        let shape = &self.shape;
        let hidden = self.target_hidden_size.unwrap_or(shape.hidden_size);
        let target_layers = self.target_layers.unwrap_or(target.num_layers());
        let vocab_size = self.vocab_size.unwrap_or(target.vocab_size);
        for (what, ours, theirs) in [
            ("vocab_size", vocab_size, target.vocab_size),
            ("hidden_size", hidden, target.hidden_size),
            ("num_target_layers", target_layers, target.num_layers()),
        ] {
            if ours != theirs {
                return Err(format!(
                    "the head does not fit the target: {what} is {ours}, but {theirs} in the target"
                ));
            }
        }
        if let Some(MaskedBlock { size, mask, .. }) = self.block {
            if !(2..=MAX_TREE_NODES).contains(&size) {
                return Err(format!(
                    "block_size {size} is not supported: only 2 to {MAX_TREE_NODES} are"
                ));
            }
            if mask as usize >= target.vocab_size {
                let vocab_size = target.vocab_size;
                return Err(format!(
                    "mask_token_id {mask} must be below vocab_size {vocab_size}"
                ));
            }
        }
        let layers = target.num_layers();
        let taps = match &self.taps {
            Some(taps) => taps.clone(),
            None => self.kind.default_taps(layers),
        };
        match taps.last() {
            Some(&last) if last <= layers && taps.is_sorted_by(|a, b| a < b) => Ok(taps),
            _ => Err(format!(
                "the head does not fit the target: it reads the hidden states of the layers {taps:?}, but the target has {layers}"
            )),
        }
    }
}
