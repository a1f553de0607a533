//! What the metadata of a GGUF file says about a draft head.

use super::HeadKind;
use super::config::{
    BLOCK_SIZE, HeadConfig, MASK_TOKEN_ID, MAX_MARKOV_RANK, MarkovConfig, MarkovKind,
    NORM_BEFORE_RESIDUAL, PathConfig, TARGET_HIDDEN_SIZE,
};
use super::rates;
use crate::ModelConfig;
use candle_core::quantized::gguf_file::Value as GgufValue;
use foretoken_core::gguf::Header;
use foretoken_core::model::MaskedBlock;

/// Key after the architecture; llama.cpp's, as the target's hidden size and the norm before the residual are.
const EXTRACT_LAYERS: &str = "extract_layers";
/// Ours, of parallel heads.
const MARKOV_RANK: &str = "markov_rank";

impl HeadConfig {
    /// Reads the metadata of a GGUF file with a head of kind `kind` and its `shape`.
    ///
    /// # Errors
    /// A message that names what is missing or not supported.
    pub fn from_gguf(header: &Header, kind: HeadKind, shape: ModelConfig) -> Result<Self, String> {
        let name = shape.architecture.clone();
        let get = |key: &str| header.metadata.get(&format!("{name}.{key}"));
        let number = |value: &GgufValue| value.to_u64().ok().map(|n| n as usize);
        let numbers = |value: &GgufValue| match value {
            GgufValue::Array(list) => list.iter().map(number).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        let taps = get(EXTRACT_LAYERS).map(|value| {
            numbers(value).ok_or(format!("{name}.{EXTRACT_LAYERS} must be a list of layers"))
        });
        let taps = taps.transpose()?;
        let needed = |key: &str| {
            let value = get(key).and_then(number);
            value.ok_or(format!("{name}.{key} is missing or no number"))
        };
        let block = if kind == HeadKind::Parallel {
            Some(MaskedBlock {
                size: needed(BLOCK_SIZE)?,
                mask: needed(MASK_TOKEN_ID)? as u32,
                from_anchor: false,
            })
        } else {
            None
        };
        if block.is_some() && taps.is_none() {
            return Err(format!("{name}.{EXTRACT_LAYERS} is missing"));
        }
        let rank = get(MARKOV_RANK).map_or(Some(0), number);
        let rank = rank.filter(|&rank| rank <= MAX_MARKOV_RANK).ok_or(format!(
            "{name}.{MARKOV_RANK} must be a number up to {MAX_MARKOV_RANK}"
        ))?;
        let path = PathConfig {
            markov: (block.is_some() && rank > 0).then_some(MarkovConfig {
                rank,
                kind: MarkovKind::Vanilla,
            }),
            ..PathConfig::default()
        };
        let before = get(NORM_BEFORE_RESIDUAL).and_then(|value| value.to_bool().ok());
        Ok(Self {
            taps,
            target_hidden_size: get(TARGET_HIDDEN_SIZE).and_then(number),
            norm_before_residual: before.unwrap_or(false),
            block,
            path,
            rates: rates::of_gguf(|key| header.metadata.get(key))?,
            ..Self::new(kind, shape)
        })
    }

    /// The metadata of a GGUF file with this head, besides the shape of its layers.
    ///
    /// # Errors
    /// A message that names what a GGUF file cannot say.
    pub fn gguf_metadata(&self) -> Result<Vec<(String, GgufValue)>, String> {
        let layers = self.shape.num_layers();
        let deep = self.kind == HeadKind::Eagle3 && layers > 1;
        let unsaid = (self.extra())
            .or((self.markov_rank().is_err()).then_some("this markov_head_type"))
            .or(deep.then_some("num_hidden_layers above 1"));
        if let Some(what) = unsaid {
            return Err(format!("a GGUF file of a head cannot say {what}"));
        }
        let number = |&n: &usize| GgufValue::U32(n as u32);
        let architecture = self.kind.gguf_architecture().unwrap_or_default();
        let key = |name: &str| format!("{architecture}.{name}");
        let hidden = self.target_hidden_size.unwrap_or(self.shape.hidden_size);
        let mut metadata = vec![
            (key(TARGET_HIDDEN_SIZE), number(&hidden)),
            (
                key(NORM_BEFORE_RESIDUAL),
                GgufValue::Bool(self.norm_before_residual),
            ),
        ];
        if let Some(taps) = &self.taps {
            let taps = GgufValue::Array(taps.iter().map(number).collect());
            metadata.push((key(EXTRACT_LAYERS), taps));
        }
        if let Some(block) = &self.block {
            metadata.push((key(BLOCK_SIZE), number(&block.size)));
            metadata.push((key(MASK_TOKEN_ID), GgufValue::U32(block.mask)));
        }
        let rank = self.markov_rank()?;
        if rank > 0 {
            metadata.push((key(MARKOV_RANK), number(&rank)));
        }
        metadata.extend(self.rates.iter().flat_map(rates::to_gguf));
        Ok(metadata)
    }
}
