//! What the `config.json` of a parallel head says: DFlash's fields, which may be nested, and those of the heads that
//! are built on it.

use super::MUSE_GLIMMER;
use super::config::{
    BLOCK_SIZE, Causality, ConfidenceInput, DominoConfig, EndScales, HeadConfig, LiLiCorrConfig,
    MASK_TOKEN_ID, MAX_MARKOV_RANK, MarkovConfig, MarkovKind, NORM_BEFORE_RESIDUAL, SelectorConfig,
    TARGET_HIDDEN_SIZE,
};
use super::keys::{
    DFLASH2_KEYS, DOMINO_KEYS, END_KEYS, Flags, IS_CAUSAL, LILICORR_KEYS, SHIFT_LABEL,
    layer_outputs, needed, refuse_present, shown, size,
};
use crate::layers::block_conv::ConvShape;
use foretoken_core::error::clipped;
use foretoken_core::model::{MAX_TREE_NODES, MaskedBlock};
use serde_json::Value;

/// Maximum number of candidates of a position and of layers in LiLiCorr's layout; servers take no more candidates.
const MAX_CANDIDATES: usize = 16;
const MAX_LAYERS: usize = 64;
/// Maximum number of LiLiCorr's attention heads: each has a number for every two candidates of a block.
const MAX_HEADS: usize = 128;
const PROJECTOR_TYPE: &str = "projector_type";
const SAMPLE_FROM_ANCHOR: &str = "sample_from_anchor";
const NON_CAUSAL: &str = "sliding_window_non_causal";
/// Keys that may be in `dflash_config`, besides those of DFlash 2 and Domino.
const NESTED_KEYS: [&str; 8] = [
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    PROJECTOR_TYPE,
    SHIFT_LABEL,
    CAUSAL,
    CAUSAL_HEAD,
    "num_target_layers",
    "target_layer_ids",
];
/// vLLM's name for [`IS_CAUSAL`].
const CAUSAL: &str = "causal";
/// JetSpec's name for it.
const CAUSAL_HEAD: &str = "causal_head";
/// SpecForge has the keys of DSpark there, with one that other layers would need, and one of training.
const MARKOV_KEYS: [&str; 6] = [
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    ATTENTION_MODE,
    "confidence_head_alpha",
];
const ATTENTION_MODE: &str = "attention_mode";

/// The algorithms that are built on a block of masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    DFlash,
    DFlash2,
    DSpark,
    Domino,
    LiLiCorr,
    /// DFlash, as transformers has it for Muse Glimmer.
    MuseGlimmer,
}

/// A parallel head's `config.json`.
struct ParallelJson<'a> {
    json: &'a Value,
    algorithm: Algorithm,
    /// Whether it is of the speculators library.
    is_library: bool,
}

/// Whether both are there and differ; `30` and `30.0` do not.
fn contradict(one: &Value, other: &Value) -> bool {
    let is_same = one == other || one.is_number() && one.as_f64() == other.as_f64();
    !is_same && !one.is_null() && !other.is_null()
}

impl<'a> ParallelJson<'a> {
    /// # Errors
    /// A message that names what is not supported.
    fn of(json: &'a Value) -> Result<Self, String> {
        let nested = json["dflash_config"].as_object();
        let known = || {
            let keys = NESTED_KEYS.iter().chain(&MARKOV_KEYS).chain(&END_KEYS);
            let keys = keys.chain(&DFLASH2_KEYS).chain(&DOMINO_KEYS);
            keys.chain(&LILICORR_KEYS)
        };
        let mut keys = nested.into_iter().flat_map(|keys| keys.keys());
        if let Some(odd) = keys.find(|key| !known().any(|known| known == key)) {
            return Err(format!("dflash_config: {} is not supported", clipped(odd)));
        }
        let nested = &json["dflash_config"];
        let places = known().map(|key| (*key, &nested[*key]));
        let mut places = places.chain([CAUSAL, CAUSAL_HEAD].map(|key| (IS_CAUSAL, &nested[key])));
        let twice = places.find(|(key, inner)| contradict(inner, &json[*key]));
        let twice = twice
            .map(|(key, _)| key)
            .or_else(|| contradict(&nested[CAUSAL], &nested[CAUSAL_HEAD]).then_some(CAUSAL_HEAD));
        if let Some(key) = twice {
            return Err(format!("{key} is given twice, with different values"));
        }
        let library = json["speculators_model_type"].as_str();
        let projector = &nested[PROJECTOR_TYPE];
        let algorithm = match (library, json["architectures"][0].as_str()) {
            (Some("dflash2"), _) | (None, Some("DFlash2DraftModel")) => Algorithm::DFlash2,
            (Some("dspark"), _) | (None, Some("Qwen3DSparkModel" | "DSparkDraftModel")) => {
                Algorithm::DSpark
            }
            (Some("domino"), _) | (None, Some("DominoDraftModel")) => Algorithm::Domino,
            (None, Some("LiLiCorrDraftModel")) => Algorithm::LiLiCorr,
            (None, Some(MUSE_GLIMMER)) => Algorithm::MuseGlimmer,
            // SpecForge's exports for servers name the class of DFlash.
            (None, _) if projector == "domino" => Algorithm::Domino,
            (None, _) if projector == "lilicorr" => Algorithm::LiLiCorr,
            _ => Algorithm::DFlash,
        };
        let wanted = match algorithm {
            Algorithm::DFlash | Algorithm::DFlash2 | Algorithm::MuseGlimmer => "dflash",
            Algorithm::DSpark => "dspark",
            Algorithm::Domino => "domino",
            Algorithm::LiLiCorr => "lilicorr",
        };
        if !projector.is_null() && projector != wanted {
            return Err(format!(
                "{PROJECTOR_TYPE} {} is not supported: only {wanted} is for such a head",
                shown(projector)
            ));
        }
        Ok(Self {
            json,
            algorithm,
            is_library: library.is_some(),
        })
    }

    /// The object that has `key`, if any does.
    fn at(&self, key: &str) -> &'a Value {
        let nested = &self.json["dflash_config"];
        if nested[key].is_null() {
            self.json
        } else {
            nested
        }
    }

    /// The number at `key`, from `min` to `max`.
    fn number(
        &self,
        key: &str,
        default: usize,
        (min, max): (usize, usize),
    ) -> Result<usize, String> {
        let number = size(self.at(key), key)?.unwrap_or(default);
        if (min..=max).contains(&number) {
            Ok(number)
        } else {
            Err(format!(
                "{key} {number} is not supported: only {min} to {max} are"
            ))
        }
    }

    /// Refuses `keys` that are there.
    fn refuse(&self, keys: &[&str]) -> Result<(), String> {
        refuse_present(&|key| self.at(key), keys)
    }

    /// The layers in which rows of a block see only those before them: in layouts without a key for it those with a
    /// window unless [`IS_CAUSAL`] says otherwise, as in servers and in the code of DFlash's authors.
    fn causality(&self, head: &HeadConfig) -> Result<Causality, String> {
        let flags = Flags::of(self.json);
        if self.is_library {
            self.refuse(&[IS_CAUSAL, CAUSAL, CAUSAL_HEAD])?;
            let non_causal = flags.get(NON_CAUSAL)?;
            return Ok(
                if non_causal.unwrap_or(self.algorithm == Algorithm::DFlash2) {
                    Causality::None
                } else {
                    Causality::Windows
                },
            );
        }
        self.refuse(&[NON_CAUSAL])?;
        let nested = Flags::of(&self.json["dflash_config"]);
        let causal = flags.get(IS_CAUSAL)?.or(nested.get(CAUSAL)?);
        let causal = causal.or(nested.get(CAUSAL_HEAD)?);
        let has_full = (head.shape.spec.layers.iter()).any(|layer| layer.window.is_none());
        match (causal, self.algorithm) {
            // The windows of LiLiCorr's authors and of transformers' class reach to both sides.
            (Some(false), _) | (None, Algorithm::LiLiCorr | Algorithm::MuseGlimmer) => {
                Ok(Causality::None)
            }
            (Some(true), Algorithm::LiLiCorr | Algorithm::MuseGlimmer) => {
                Err(format!("{IS_CAUSAL} true is not supported: only false is"))
            }
            (Some(true), Algorithm::DFlash) if has_full => Ok(Causality::All),
            (Some(true), _) if has_full => Err(format!(
                "{IS_CAUSAL} true is not supported for layers without a window: only false is"
            )),
            _ => Ok(Causality::Windows),
        }
    }

    /// What a block makes of its target's embedding and output layer. Muse Glimmer's assistant reads rows of the embedding
    /// as they are stored, and its logits are products with the output layer.
    fn end_scales(&self) -> Result<EndScales, String> {
        let is_muse_glimmer = self.algorithm == Algorithm::MuseGlimmer;
        let is_dflash = matches!(self.algorithm, Algorithm::DFlash | Algorithm::DFlash2);
        if self.is_library || !is_dflash && !is_muse_glimmer {
            self.refuse(&END_KEYS)?;
        }
        let number = |key: &str, fits: fn(f32) -> bool, range: &str| {
            let value = &self.at(key)[key];
            // Checked as it is used: what is small may round to 0.
            match value.as_f64().map(|number| number as f32) {
                _ if value.is_null() => Ok(None),
                Some(number) if number.is_finite() && fits(number) => Ok(Some(number)),
                _ => {
                    let value = shown(value);
                    Err(format!("{key} {value} must be a finite number {range} 0"))
                }
            }
        };
        let factor = |key: &str| number(key, |factor| factor > 0., "above");
        let [embedding, logits, soft_cap] = END_KEYS;
        Ok(EndScales {
            embedding: factor(embedding)?.or(is_muse_glimmer.then_some(1.)),
            logits: factor(logits)?,
            soft_cap: number(soft_cap, |cap| cap >= 0., "from")?.or(is_muse_glimmer.then_some(0.)),
        })
    }

    /// Whether each row of a block predicts the token after its position.
    fn samples_from_anchor(&self) -> Result<bool, String> {
        let (key, default) = match self.algorithm {
            Algorithm::Domino if !self.is_library => {
                self.refuse(&[SAMPLE_FROM_ANCHOR])?;
                (SHIFT_LABEL, false)
            }
            Algorithm::Domino | Algorithm::DSpark => (SAMPLE_FROM_ANCHOR, true),
            Algorithm::DFlash
            | Algorithm::DFlash2
            | Algorithm::LiLiCorr
            | Algorithm::MuseGlimmer => (SAMPLE_FROM_ANCHOR, false),
        };
        if key != SHIFT_LABEL {
            Flags::of(self.at(SHIFT_LABEL)).refuse(&[SHIFT_LABEL])?;
        }
        Ok(Flags::of(self.at(key)).get(key)?.unwrap_or(default))
    }
}

impl HeadConfig {
    /// Adds what `json` says about a parallel head.
    ///
    /// # Errors
    /// A message that names what is not supported.
    pub(crate) fn parse_parallel(mut self, json: &Value) -> Result<Self, String> {
        let source = ParallelJson::of(json)?;
        let flags = Flags::of(json);
        flags.refuse(&[
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            NORM_BEFORE_RESIDUAL,
        ])?;
        self.taps = Some(match &json["aux_hidden_state_layer_ids"] {
            // The speculators library numbers the inputs of layers, the others their outputs.
            Value::Null => layer_outputs(&source.at("target_layer_ids")["target_layer_ids"])?,
            ids => serde_json::from_value(ids.clone()).map_err(|_| {
                format!(
                    "aux_hidden_state_layer_ids {} must be a list of layers",
                    shown(ids)
                )
            })?,
        });
        self.target_layers = size(source.at("num_target_layers"), "num_target_layers")?;
        self.target_hidden_size = size(json, TARGET_HIDDEN_SIZE)?;
        let block = MaskedBlock {
            size: needed(source.at(BLOCK_SIZE), BLOCK_SIZE)? as usize,
            mask: needed(source.at(MASK_TOKEN_ID), MASK_TOKEN_ID)?,
            from_anchor: source.samples_from_anchor()?,
        };
        self.block = Some(block);
        self.causality = source.causality(&self)?;
        self.scales = source.end_scales()?;
        let [conv, group, selectors @ ..] = DFLASH2_KEYS;
        match source.algorithm {
            Algorithm::DFlash2 => self.parse_dflash2(&source, block)?,
            Algorithm::LiLiCorr => {
                source.refuse(&selectors)?;
                let is_off = |key| size(source.at(key), key).map(|n| n.unwrap_or(0) == 0);
                if !is_off(conv)? || !is_off(group)? {
                    self.parse_convs(&source, block)?;
                }
            }
            _ => source.refuse(&DFLASH2_KEYS)?,
        }
        if source.algorithm == Algorithm::LiLiCorr {
            self.path.lilicorr = Some(lilicorr(&source, &self)?);
        } else {
            source.refuse(&LILICORR_KEYS)?;
        }
        if source.algorithm == Algorithm::Domino {
            self.path.domino = Some(domino(&source, block)?);
        } else {
            source.refuse(&DOMINO_KEYS)?;
        }
        self.parse_markov(&source)?;
        Ok(self)
    }

    /// The fields of DSpark.
    fn parse_markov(&mut self, source: &ParallelJson<'_>) -> Result<(), String> {
        let [rank, kind, enable, with_token, mode, alpha] = MARKOV_KEYS;
        let attention = &source.at(mode)[mode];
        if !attention.is_null() && attention != "gqa" && attention != "mha" {
            return Err(format!(
                "{mode} {} is not supported: only gqa and mha are",
                shown(attention)
            ));
        }
        let is_dspark = source.algorithm == Algorithm::DSpark;
        // SpecForge's layout has other defaults.
        let is_specforge = !source.is_library && !source.json["dflash_config"].is_null();
        let is_deepspec = is_dspark && !is_specforge;
        let default_rank = if is_deepspec { 256 } else { 0 };
        let rank = source.number(rank, default_rank, (0, MAX_MARKOV_RANK))?;
        let name = &source.at(kind)[kind];
        let kind = match name.as_str() {
            Some("vanilla") => MarkovKind::Vanilla,
            None if name.is_null() => MarkovKind::Vanilla,
            Some("gated") => MarkovKind::Gated,
            Some("rnn") => MarkovKind::Recurrent,
            _ => {
                return Err(format!(
                    "{kind} {} is not supported: only vanilla, gated and rnn are",
                    shown(name)
                ));
            }
        };
        self.path.markov = (rank > 0).then_some(MarkovConfig { rank, kind });
        let flag = |key: &str| Flags::of(source.at(key)).get(key);
        let is_trained = source.at(alpha)[alpha].as_f64() > Some(0.);
        let enabled = flag(enable)?.unwrap_or(is_deepspec || is_dspark && is_trained);
        let with_token = flag(with_token)?.unwrap_or(!(is_dspark && is_specforge));
        if enabled && with_token && rank == 0 {
            return Err("confidence_head_with_markov true needs a markov_rank".into());
        }
        let input = if with_token {
            ConfidenceInput::HiddenAndToken
        } else {
            ConfidenceInput::Hidden
        };
        self.path.confidence = enabled.then_some(input);
        Ok(())
    }

    /// The fields of DFlash 2.
    fn parse_dflash2(
        &mut self,
        source: &ParallelJson<'_>,
        block: MaskedBlock,
    ) -> Result<(), String> {
        let [_, _, rank, top_k] = DFLASH2_KEYS;
        self.parse_convs(source, block)?;
        self.path.selector = Some(SelectorConfig {
            rank: source.number(rank, 256, (1, MAX_MARKOV_RANK))?,
            top_k: source.number(top_k, 16, (1, self.shape.vocab_size.min(1 << 10)))?,
        });
        Ok(())
    }

    /// The fields of the convolutions of DFlash 2.
    fn parse_convs(&mut self, source: &ParallelJson<'_>, block: MaskedBlock) -> Result<(), String> {
        let [taps, group, ..] = DFLASH2_KEYS;
        let hidden = self.shape.hidden_size;
        let shape = ConvShape {
            taps: source.number(taps, 2, (1, block.size.min(MAX_TREE_NODES)))?,
            group: source.number(group, 16, (1, hidden))?,
        };
        if !hidden.is_multiple_of(shape.group) {
            return Err(format!(
                "{group} {} does not divide hidden_size {hidden}",
                shape.group
            ));
        }
        self.convs = Some(shape);
        Ok(())
    }
}

/// The fields of LiLiCorr, all of which must be there, in `head`.
fn lilicorr(source: &ParallelJson<'_>, head: &HeadConfig) -> Result<LiLiCorrConfig, String> {
    let [
        enabled,
        top_k,
        width,
        layers,
        heads,
        ratio,
        factor,
        min_length,
        scale,
    ] = LILICORR_KEYS;
    let is_enabled = Flags::of(source.at(enabled)).get(enabled)?;
    if is_enabled == Some(false) {
        return Err(format!("{enabled} false is not supported: only true is"));
    }
    let (hidden, vocab_size) = (head.shape.hidden_size, head.shape.vocab_size);
    let count = |key: &str, limits| {
        needed(source.at(key), key)?;
        source.number(key, 0, limits)
    };
    let above_0 = |key: &str| {
        let value = &source.at(key)[key];
        let number = value.as_f64().map(|number| number as f32);
        let number = number.filter(|number| number.is_finite() && *number > 0.);
        number.ok_or_else(|| format!("{key} {} must be a finite number above 0", shown(value)))
    };
    let given = count(width, (0, MAX_MARKOV_RANK))?;
    let width = if given == 0 { hidden } else { given };
    let of_heads = count(heads, (1, width))?;
    if !width.is_multiple_of(of_heads) || of_heads > MAX_HEADS {
        return Err(format!(
            "{heads} {of_heads} is not supported: only divisors of the width {width} up to {MAX_HEADS} are"
        ));
    }
    let mlp_width = (width as f32 * above_0(ratio)?) as usize;
    if !(1..=MAX_MARKOV_RANK).contains(&mlp_width) || !hidden.is_multiple_of(2) {
        return Err(format!(
            "{ratio} makes MLPs of width {mlp_width}, hidden_size is {hidden}: only widths up to {MAX_MARKOV_RANK} and even sizes are supported"
        ));
    }
    Ok(LiLiCorrConfig {
        top_k: count(top_k, (1, vocab_size.min(MAX_CANDIDATES)))?,
        width,
        layers: count(layers, (1, MAX_LAYERS))?,
        heads: of_heads,
        mlp_width,
        factor: count(factor, (1, MAX_MARKOV_RANK))?,
        min_length: above_0(min_length)?,
        scale: above_0(scale)?,
    })
}

/// The fields of Domino, of SpecForge's layout or of the speculators library's. SpecForge demands the widths.
fn domino(source: &ParallelJson<'_>, block: MaskedBlock) -> Result<DominoConfig, String> {
    let [width, prefix, rank, library_rank] = DOMINO_KEYS;
    let (rank, other) = if source.is_library {
        (library_rank, rank)
    } else {
        (rank, library_rank)
    };
    source.refuse(&[other])?;
    if source.is_library {
        source.refuse(&[PROJECTOR_TYPE])?;
    } else {
        for key in [width, rank] {
            needed(source.at(key), key)?;
        }
    }
    let last = (block.size).saturating_sub(if block.from_anchor { 1 } else { 2 });
    Ok(DominoConfig {
        width: source.number(width, 1024, (1, MAX_MARKOV_RANK))?,
        rank: source.number(rank, 256, (1, MAX_MARKOV_RANK))?,
        prefix: source.number(prefix, usize::from(source.is_library), (0, last))?,
    })
}
