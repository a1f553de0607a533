//! What the `config.json` of a parallel head says: DFlash's fields, which may be nested, and those of the heads that
//! are built on it.

use super::config::{
    BLOCK_SIZE, ConfidenceInput, DominoConfig, EndScales, HeadConfig, MASK_TOKEN_ID,
    MAX_MARKOV_RANK, MarkovConfig, MarkovKind, NORM_BEFORE_RESIDUAL, SelectorConfig,
    TARGET_HIDDEN_SIZE,
};
use super::keys::{
    DFLASH2_KEYS, DOMINO_KEYS, END_KEYS, Flags, IS_CAUSAL, SHIFT_LABEL, layer_outputs, needed,
    refuse_present, shown, size,
};
use crate::layers::block_conv::ConvShape;
use foretoken_core::error::clipped;
use foretoken_core::model::{MAX_TREE_NODES, MaskedBlock};
use serde_json::Value;

const PROJECTOR_TYPE: &str = "projector_type";
const SAMPLE_FROM_ANCHOR: &str = "sample_from_anchor";
const NON_CAUSAL: &str = "sliding_window_non_causal";
/// Keys that may be in `dflash_config`, besides those of DFlash 2 and Domino.
const NESTED_KEYS: [&str; 7] = [
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    PROJECTOR_TYPE,
    SHIFT_LABEL,
    CAUSAL,
    "num_target_layers",
    "target_layer_ids",
];
/// vLLM's name for [`IS_CAUSAL`].
const CAUSAL: &str = "causal";
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
            keys.chain(&DFLASH2_KEYS).chain(&DOMINO_KEYS)
        };
        let mut keys = nested.into_iter().flat_map(|keys| keys.keys());
        if let Some(odd) = keys.find(|key| !known().any(|known| known == key)) {
            return Err(format!("dflash_config: {} is not supported", clipped(odd)));
        }
        let nested = &json["dflash_config"];
        let places = known().map(|key| (*key, &nested[*key]));
        let mut places = places.chain([(IS_CAUSAL, &nested[CAUSAL])]);
        if let Some((key, _)) = places.find(|(key, inner)| contradict(inner, &json[*key])) {
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
            // SpecForge's exports for servers name the class of DFlash.
            (None, _) if projector == "domino" => Algorithm::Domino,
            _ => Algorithm::DFlash,
        };
        let wanted = match algorithm {
            Algorithm::DFlash | Algorithm::DFlash2 => "dflash",
            Algorithm::DSpark => "dspark",
            Algorithm::Domino => "domino",
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

    /// Whether rows of a block see only those before them in layers with a window: in layouts without a key for
    /// it they do unless [`IS_CAUSAL`] says otherwise, as in servers and in the code of DFlash's authors.
    fn causal_windows(&self, head: &HeadConfig) -> Result<bool, String> {
        let flags = Flags::of(self.json);
        if self.is_library {
            self.refuse(&[IS_CAUSAL, CAUSAL])?;
            let non_causal = flags.get(NON_CAUSAL)?;
            return Ok(!non_causal.unwrap_or(self.algorithm == Algorithm::DFlash2));
        }
        self.refuse(&[NON_CAUSAL])?;
        let causal = match flags.get(IS_CAUSAL)? {
            Some(causal) => Some(causal),
            None => Flags::of(&self.json["dflash_config"]).get(CAUSAL)?,
        };
        let has_full = (head.shape.spec.layers.iter()).any(|layer| layer.window.is_none());
        if causal == Some(true) && has_full {
            return Err(format!(
                "{IS_CAUSAL} true is not supported for layers without a window: only false is"
            ));
        }
        Ok(causal.unwrap_or(true))
    }

    /// What a block makes of its target's embedding and output layer.
    fn end_scales(&self) -> Result<EndScales, String> {
        if self.is_library || !matches!(self.algorithm, Algorithm::DFlash | Algorithm::DFlash2) {
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
            embedding: factor(embedding)?,
            logits: factor(logits)?,
            soft_cap: number(soft_cap, |cap| cap >= 0., "from")?,
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
            Algorithm::DFlash | Algorithm::DFlash2 => (SAMPLE_FROM_ANCHOR, false),
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
        self.causal_windows = source.causal_windows(&self)?;
        self.scales = source.end_scales()?;
        let is_dflash2 = source.algorithm == Algorithm::DFlash2;
        if is_dflash2 {
            self.parse_dflash2(&source, block)?;
        } else {
            source.refuse(&DFLASH2_KEYS)?;
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
        let [taps, group, rank, top_k] = DFLASH2_KEYS;
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
        self.path.selector = Some(SelectorConfig {
            rank: source.number(rank, 256, (1, MAX_MARKOV_RANK))?,
            top_k: source.number(top_k, 16, (1, self.shape.vocab_size.min(1 << 10)))?,
        });
        Ok(())
    }
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
