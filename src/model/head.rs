//! Draft heads: how their checkpoints are recognized, what their configurations say, and their loading.
//!
//! Layouts, by their names of tensors: SafeAI Lab's EAGLE-3 (`fc`, `midlayer.*`, `norm`, `lm_head`,
//! `d2t`, `t2d`), the speculators library's (the same with `layers.0.*`, and a nested `config.json`),
//! EAGLE-1 and 2 (`fc`, `layers.0.*`), and DFlash (`fc`, `hidden_norm`, `layers.*`, `norm`). A GGUF file
//! says `eagle3` or `dflash` as its architecture.

use super::config::{GGUF_DFLASH, GGUF_EAGLE3, ModelConfig};
use super::eagle::EagleHead;
use super::gguf::GgufFile;
use super::load::{LoadOptions, dtypes_of_head};
use super::parallel::ParallelHead;
use super::source::{LoadFormat, ModelSource};
use super::weights::{Weights, safetensors_files};
use super::{Ends, MAX_TREE_NODES, MaskedBlock, Model};
use crate::error::{Error, Result};
use crate::files;
use crate::gguf::GgufSource;
use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use candle_core::safetensors::MmapedSafetensors;
use serde_json::Value;
use std::path::Path;

/// The kind of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// EAGLE-1 and 2 (Li et al. 2024).
    Eagle,
    /// EAGLE-3 (Li et al. 2025).
    Eagle3,
    /// A parallel head: DFlash (arXiv 2602.06036).
    Parallel,
}

/// A head's configuration.
#[derive(Debug, Clone)]
pub(super) struct HeadConfig {
    pub kind: HeadKind,
    /// Of its layer; the vocabulary is the target's.
    pub shape: ModelConfig,
    /// The target's layers whose hidden states it reads, ascending; see [`super::Taps`].
    pub taps: Vec<usize>,
    pub norm_before_residual: bool,
    /// Only of a parallel head.
    pub block: Option<MaskedBlock>,
}

impl HeadKind {
    /// The kind of head that `source` contains; `None` = an ordinary model.
    ///
    /// # Errors
    /// `Setup`, if a file is missing or broken, or contains a head of a kind that is not supported.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        match source {
            ModelSource::Gguf(file) => Ok(Self::of_gguf(&file.open()?.0)),
            ModelSource::Folder(path) => Self::of_folder(path),
        }
    }

    fn of_gguf(content: &Content) -> Option<Self> {
        match content.metadata.get("general.architecture") {
            Some(GgufValue::String(name)) => match name.as_str() {
                GGUF_EAGLE3 => Some(Self::Eagle3),
                GGUF_DFLASH => Some(Self::Parallel),
                _ => None,
            },
            _ => None,
        }
    }

    fn of_folder(path: &Path) -> Result<Option<Self>> {
        let (file, json) = read_json(path)?;
        if let Some(kind) = json["speculators_model_type"].as_str() {
            return match kind {
                "eagle3" => Ok(Some(Self::Eagle3)),
                other => Err(Error::in_file(
                    &file,
                    format!("speculators_model_type {other} is not supported: only eagle3 is"),
                )),
            };
        }
        let class = json["architectures"][0].as_str().unwrap_or_default();
        if class.contains("Eagle3") {
            return Ok(Some(Self::Eagle3));
        }
        if class == "DFlashDraftModel" {
            return Ok(Some(Self::Parallel));
        }
        // Published EAGLE heads call themselves ordinary models: their tensors tell.
        let Ok(files) = safetensors_files(files::folder_of(path)) else {
            return Ok(class.starts_with("Eagle").then_some(Self::Eagle));
        };
        // SAFETY: the files are only read. If someone changes them meanwhile, loading fails.
        let Ok(stored) = (unsafe { MmapedSafetensors::multi(&files) }) else {
            return Ok(None);
        };
        let has = |name: &str| stored.get(name).is_ok();
        Ok(match has("fc.weight") {
            false => None,
            true if has("hidden_norm.weight") => Some(Self::Parallel),
            true if has("midlayer.hidden_norm.weight") || has("layers.0.hidden_norm.weight") => {
                Some(Self::Eagle3)
            }
            true if has("layers.0.self_attn.q_proj.weight") => Some(Self::Eagle),
            true => None,
        })
    }
}

/// `config.json` of a folder: its path and its content.
fn read_json(path: &Path) -> Result<(std::path::PathBuf, Value)> {
    let file = files::config_of(path);
    let text = files::read_text(&file)?;
    let json = serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
    Ok((file, json))
}

impl HeadConfig {
    fn from_json(path: &Path, kind: HeadKind, target: &ModelConfig) -> Result<Self> {
        let (file, json) = read_json(path)?;
        Self::parse(&json, kind, target).map_err(|e| Error::in_file(&file, e))
    }

    fn parse(json: &Value, kind: HeadKind, target: &ModelConfig) -> Result<Self, String> {
        let mut shape = match json["transformer_layer_config"].is_object() {
            true => json["transformer_layer_config"].clone(),
            false => json.clone(),
        };
        shape["draft_vocab_size"] = json["draft_vocab_size"].clone();
        shape["model_type"] = "llama".into();
        shape["architectures"] = Value::Null;
        if kind == HeadKind::Parallel {
            return Self::parse_parallel(json, &shape, target);
        }
        if let Some(layers) = shape["num_hidden_layers"].as_u64().filter(|&n| n != 1) {
            return Err(format!(
                "num_hidden_layers {layers} is not supported: an EAGLE head has 1"
            ));
        }
        for (key, wanted) in [("norm_before_fc", false), ("use_aux_hidden_state", true)] {
            let found = [&json[key], &json["eagle_config"][key]];
            if let Some(found) = found.into_iter().filter_map(Value::as_bool).next()
                && found != wanted
            {
                return Err(format!("{key} {found} is not supported: only {wanted} is"));
            }
        }
        let target_hidden = json["target_hidden_size"].as_u64();
        let taps = [json, &json["eagle_config"]]
            .map(|from| &from["eagle_aux_hidden_state_layer_ids"])
            .into_iter()
            .find(|ids| !ids.is_null());
        let taps = match taps {
            None => None,
            Some(ids) => Some(serde_json::from_value(ids.clone()).map_err(|_| {
                format!("eagle_aux_hidden_state_layer_ids {ids} must be a list of layers")
            })?),
        };
        let head = Self {
            kind,
            shape: ModelConfig::parse(&shape.to_string())?,
            taps: taps.unwrap_or_else(|| default_taps(kind, target.num_layers)),
            norm_before_residual: json["norm_before_residual"].as_bool().unwrap_or(false),
            block: None,
        };
        head.check(target_hidden.map(|size| size as usize), target)?;
        Ok(head)
    }

    /// DFlash's fields, which may be nested. It numbers the outputs of the target's layers.
    fn parse_parallel(json: &Value, shape: &Value, target: &ModelConfig) -> Result<Self, String> {
        let get = |key: &str| match &json["dflash_config"][key] {
            Value::Null => &json[key],
            nested => nested,
        };
        let number = |key: &str| {
            let value = get(key).as_u64().map(|n| n as usize);
            value.ok_or_else(|| format!("{key} {} must be a number", get(key)))
        };
        let outputs: Vec<usize> =
            serde_json::from_value(get("target_layer_ids").clone()).map_err(|_| {
                let found = get("target_layer_ids");
                format!("target_layer_ids {found} must be a list of layers")
            })?;
        let head = Self {
            kind: HeadKind::Parallel,
            shape: ModelConfig::parse(&shape.to_string())?,
            taps: outputs.into_iter().map(|layer| layer + 1).collect(),
            norm_before_residual: false,
            block: Some(MaskedBlock {
                size: number("block_size")?,
                mask: number("mask_token_id")? as u32,
            }),
        };
        if !get("num_target_layers").is_null() {
            let layers = number("num_target_layers")?;
            if layers != target.num_layers {
                return Err(differs("num_target_layers", layers, target.num_layers));
            }
        }
        head.check(None, target)?;
        Ok(head)
    }

    fn from_gguf(
        content: &Content,
        kind: HeadKind,
        shape: ModelConfig,
        target: &ModelConfig,
    ) -> Result<Self, String> {
        let name = shape.architecture.clone();
        let get = |key: &str| content.metadata.get(&format!("{name}.{key}"));
        let number = |value: &GgufValue| value.to_u64().ok().map(|n| n as usize);
        let is_parallel = kind == HeadKind::Parallel;
        let taps = match get("extract_layers") {
            None if !is_parallel => default_taps(kind, target.num_layers),
            Some(GgufValue::Array(list)) => (list.iter().map(number).collect::<Option<_>>())
                .ok_or(format!("{name}.extract_layers must be numbers"))?,
            _ => return Err(format!("{name}.extract_layers must be a list")),
        };
        let needed = |key: &str| {
            let value = get(key).and_then(number);
            value.ok_or(format!("{name}.{key} is missing or no number"))
        };
        let block = match is_parallel {
            false => None,
            true => Some(MaskedBlock {
                size: needed("block_size")?,
                mask: needed("mask_token_id")? as u32,
            }),
        };
        let norm_before_residual = get("norm_before_residual").and_then(|v| v.to_bool().ok());
        let head = Self {
            kind,
            shape,
            taps,
            norm_before_residual: norm_before_residual.unwrap_or(false),
            block,
        };
        head.check(get("target_hidden_size").and_then(number), target)?;
        Ok(head)
    }

    /// Checks that the head belongs to a model like `target`.
    fn check(&self, target_hidden: Option<usize>, target: &ModelConfig) -> Result<(), String> {
        let shape = &self.shape;
        let refused = |what: &str, ours, theirs| Err(differs(what, ours, theirs));
        if shape.vocab_size != target.vocab_size {
            return refused("vocab_size", shape.vocab_size, target.vocab_size);
        }
        if let Some(hidden) = target_hidden.filter(|&hidden| hidden != target.hidden_size) {
            return refused("target_hidden_size", hidden, target.hidden_size);
        }
        if target_hidden.is_none() && shape.hidden_size != target.hidden_size {
            return refused("hidden_size", shape.hidden_size, target.hidden_size);
        }
        if let Some(MaskedBlock { size, mask }) = self.block {
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
        let layers = target.num_layers;
        let is_ascending = self.taps.is_sorted_by(|a, b| a < b);
        match self.taps.last() {
            Some(&last) if last <= layers && is_ascending => Ok(()),
            _ => Err(format!(
                "the head does not fit the target: it reads the hidden states of the layers {:?}, but the target has {layers}",
                self.taps
            )),
        }
    }
}

fn differs(what: &str, ours: usize, theirs: usize) -> String {
    format!("the head does not fit the target: {what} is {ours}, but {theirs} in the target")
}

/// The layers that a head reads if its configuration does not say: those of SafeAI Lab and vLLM.
fn default_taps(kind: HeadKind, layers: usize) -> Vec<usize> {
    match kind {
        HeadKind::Eagle => vec![layers],
        _ => vec![2, layers / 2, layers.saturating_sub(3)],
    }
}

/// Loads the head of kind `kind` in `source`, which drafts for `target`.
///
/// # Errors
/// A setup error, in one line: files are missing or broken, the head is not supported, or it does not fit
/// the target; then it says what differs.
pub fn load_head(
    source: &ModelSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &dyn Model,
) -> Result<Box<dyn Model>> {
    let config = target.config();
    let ends = target.ends().ok_or_else(|| {
        Error::setup(format!(
            "{}: this model cannot have a head",
            config.architecture
        ))
    })?;
    let (mut head, weights) = match source {
        ModelSource::Gguf(file) => gguf(file, kind, options, config, &ends)?,
        ModelSource::Folder(folder) => {
            let head = HeadConfig::from_json(folder, kind, config)?;
            let dtypes = dtypes_of_head(options, &ends)?;
            let weights = match options.format {
                LoadFormat::Auto => {
                    Weights::safetensors(files::folder_of(folder), dtypes, &options.device)?
                }
                LoadFormat::Dummy => Weights::dummy(options.seed, dtypes, &options.device),
            };
            (head, weights)
        }
    };
    // Rotary positions have no end, and a published limit is often that of the training texts.
    let context = &mut head.shape.max_position_embeddings;
    *context = (*context).max(config.max_position_embeddings);
    Ok(match kind {
        HeadKind::Parallel => Box::new(ParallelHead::load(head, weights, config, &ends)?),
        _ => Box::new(EagleHead::load(head, weights, config, &ends)?),
    })
}

fn gguf(
    source: &GgufSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &ModelConfig,
    ends: &Ends,
) -> Result<(HeadConfig, Weights)> {
    let (content, _) = source.open()?;
    let file = GgufFile::open(source)?;
    let shape = file.config().clone();
    let head = HeadConfig::from_gguf(&content, kind, shape, target)
        .map_err(|e| Error::in_file(source.path(), e))?;
    let dtypes = dtypes_of_head(options, ends)?;
    Ok((head, Weights::gguf(file, dtypes, &options.device)))
}
