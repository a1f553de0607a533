//! Draft heads: how their checkpoints are recognized, and what their configurations say.
//!
//! Layouts, by their names of tensors: SafeAI Lab's EAGLE-3 (`fc`, `midlayer.*`, `norm`, `lm_head`,
//! `d2t`, `t2d`), the speculators library's (the same with `layers.0.*`, and a nested `config.json`),
//! EAGLE-1 and 2 (`fc`, `layers.0.*`), DFlash (`fc`, `hidden_norm`, `layers.*`, `norm`), and Medusa
//! (`HEAD.BLOCK.linear`). A GGUF file says `eagle3` or `dflash` as its architecture.

use super::config::{GGUF_DFLASH, GGUF_EAGLE3, HEAD_KEYS, ModelConfig};
use super::pickle;
use super::safetensors_header::TensorHeaders;
use super::shards::safetensors_files;
use super::source::ModelSource;
use super::{MAX_TREE_NODES, MaskedBlock};
use crate::error::{Error, Result};
use crate::files;
use crate::gguf::Header;
use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::safetensors::MmapedSafetensors;
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// Keys of a GGUF file, after the architecture; llama.cpp's.
const EXTRACT_LAYERS: &str = "extract_layers";
const TARGET_HIDDEN_SIZE: &str = "target_hidden_size";
const NORM_BEFORE_RESIDUAL: &str = "norm_before_residual";
/// Ours, of parallel heads.
const BLOCK_SIZE: &str = "block_size";
const MASK_TOKEN_ID: &str = "mask_token_id";

/// The kind of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// EAGLE-1 and 2 (Li et al. 2024).
    Eagle,
    /// EAGLE-3 (Li et al. 2025).
    Eagle3,
    /// A parallel head: DFlash (arXiv 2602.06036).
    Parallel,
    /// Medusa (Cai et al. 2024), a parallel head, too.
    Medusa,
}

/// A head's configuration.
#[derive(Debug, Clone)]
pub(crate) struct HeadConfig {
    pub kind: HeadKind,
    /// Of its layer; the vocabulary is the target's.
    pub shape: ModelConfig,
    /// The target's layers whose hidden states it reads, ascending; see [`super::Taps`]. `None` = those
    /// that are usual.
    pub taps: Option<Vec<usize>>,
    /// If it is not that of the head's own layer.
    pub target_hidden_size: Option<usize>,
    pub norm_before_residual: bool,
    /// Number of the target's layers, if it is known.
    pub target_layers: Option<usize>,
    /// Only of a parallel head.
    pub block: Option<MaskedBlock>,
}

impl HeadKind {
    /// The kind of head that `source` contains; `None` = an ordinary model.
    ///
    /// # Errors
    /// `Setup`, if a file is missing or broken, or contains a head of a kind that is not supported.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        Self::of_headers(source, None)
    }

    /// The same of a source whose folder may have no weights, because `tensors` are elsewhere.
    ///
    /// # Errors
    /// As [`HeadKind::of`].
    pub fn of_headers(
        source: &ModelSource,
        tensors: Option<&TensorHeaders>,
    ) -> Result<Option<Self>> {
        match source {
            ModelSource::Gguf(file) => Ok(Self::of_gguf(&file.open()?.0)),
            ModelSource::Folder(path) => Self::of_folder(path, tensors),
        }
    }

    fn of_gguf(header: &Header) -> Option<Self> {
        match header.metadata.get("general.architecture") {
            Some(GgufValue::String(name)) => match name.as_str() {
                GGUF_EAGLE3 => Some(Self::Eagle3),
                GGUF_DFLASH => Some(Self::Parallel),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether one forward of such a head guesses several tokens.
    pub fn is_parallel(self) -> bool {
        matches!(self, Self::Parallel | Self::Medusa)
    }

    /// The architecture of such a head in a GGUF file; `None` if there is none.
    pub fn gguf_architecture(self) -> Option<&'static str> {
        match self {
            Self::Eagle | Self::Medusa => None,
            Self::Eagle3 => Some(GGUF_EAGLE3),
            Self::Parallel => Some(GGUF_DFLASH),
        }
    }

    fn of_folder(path: &Path, tensors: Option<&TensorHeaders>) -> Result<Option<Self>> {
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
        if !json["medusa_num_heads"].is_null() {
            return Ok(Some(Self::Medusa));
        }
        let class = json["architectures"][0].as_str().unwrap_or_default();
        if class.contains("Eagle3") {
            return Ok(Some(Self::Eagle3));
        }
        if class == "DFlashDraftModel" {
            return Ok(Some(Self::Parallel));
        }
        // Published EAGLE heads call themselves ordinary models: their tensors tell.
        if let Some(tensors) = tensors {
            return Ok(Self::of_tensors(|name| tensors.contains_key(name)));
        }
        match stored_names(files::folder_of(path))? {
            Some(names) => Ok(Self::of_tensors(|name| names.contains(name))),
            None => Ok(class.starts_with("Eagle").then_some(Self::Eagle)),
        }
    }

    /// The kind of head that has such tensors.
    fn of_tensors(has: impl Fn(&str) -> bool) -> Option<Self> {
        if !has("fc.weight") {
            None
        } else if has("hidden_norm.weight") {
            Some(Self::Parallel)
        } else if has("midlayer.hidden_norm.weight") || has("layers.0.hidden_norm.weight") {
            Some(Self::Eagle3)
        } else if has("layers.0.self_attn.q_proj.weight") {
            Some(Self::Eagle)
        } else {
            None
        }
    }
}

/// The names of the tensors in a folder; `None` if it has no weights.
fn stored_names(folder: &Path) -> Result<Option<HashSet<String>>> {
    Ok(match (safetensors_files(folder), pickle::file_in(folder)) {
        (Ok(files), _) => {
            // SAFETY: the files are only read. If someone changes them meanwhile, loading fails.
            let stored = unsafe { MmapedSafetensors::multi(&files) };
            let stored = stored.map_err(|e| Error::in_file(folder, e))?;
            Some(stored.tensors().into_iter().map(|(name, _)| name).collect())
        }
        (Err(_), Some(pickled)) => Some(pickle::names(&pickled)?),
        (Err(_), None) => None,
    })
}

/// `config.json` of a folder: its path and its content.
pub(super) fn read_json(path: &Path) -> Result<(std::path::PathBuf, Value)> {
    let file = files::config_of(path);
    let text = files::read_text(&file)?;
    let json: Value = serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
    if json.is_object() {
        Ok((file, json))
    } else {
        Err(Error::in_file(&file, "it must be a JSON object"))
    }
}

impl HeadConfig {
    /// Reads the `config.json` of a head of kind `kind`.
    ///
    /// # Errors
    /// `Setup`, naming the file and what is not supported.
    pub fn from_json(path: &Path, kind: HeadKind) -> Result<Self> {
        let (file, json) = read_json(path)?;
        Self::parse(&json, kind).map_err(|e| Error::in_file(&file, e))
    }

    fn parse(json: &Value, kind: HeadKind) -> Result<Self, String> {
        let mut shape = if json["transformer_layer_config"].is_object() {
            json["transformer_layer_config"].clone()
        } else {
            json.clone()
        };
        if let Some(keys) = shape.as_object_mut() {
            keys.retain(|key, _| !HEAD_KEYS.contains(&key.as_str()));
        }
        shape["draft_vocab_size"] = json["draft_vocab_size"].clone();
        shape["model_type"] = "llama".into();
        shape["architectures"] = Value::Null;
        if kind == HeadKind::Parallel {
            return Self::parse_parallel(json, &shape);
        }
        if let Some(layers) = shape["num_hidden_layers"].as_u64().filter(|&n| n != 1) {
            return Err(format!(
                "num_hidden_layers {layers} is not supported: an EAGLE head has 1"
            ));
        }
        let within = [json, &json["eagle_config"]];
        for (key, wanted) in [("norm_before_fc", false), ("use_aux_hidden_state", true)] {
            let mut found = within.iter().filter_map(|from| from[key].as_bool());
            if let Some(found) = found.find(|&found| found != wanted) {
                return Err(format!("{key} {found} is not supported: only {wanted} is"));
            }
        }
        let taps = within.map(|from| &from["eagle_aux_hidden_state_layer_ids"]);
        let taps = taps.into_iter().find(|ids| !ids.is_null());
        let list = |ids: &Value| {
            serde_json::from_value(ids.clone()).map_err(|_| {
                format!("eagle_aux_hidden_state_layer_ids {ids} must be a list of layers")
            })
        };
        let target_hidden = json["target_hidden_size"].as_u64();
        Ok(Self {
            kind,
            shape: ModelConfig::parse(&shape.to_string())?,
            taps: taps.map(list).transpose()?,
            target_hidden_size: target_hidden.map(|size| size as usize),
            norm_before_residual: json["norm_before_residual"].as_bool().unwrap_or(false),
            target_layers: None,
            block: None,
        })
    }

    /// DFlash's fields, which may be nested. It numbers the outputs of the target's layers.
    fn parse_parallel(json: &Value, shape: &Value) -> Result<Self, String> {
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
        Ok(Self {
            kind: HeadKind::Parallel,
            shape: ModelConfig::parse(&shape.to_string())?,
            taps: Some(outputs.into_iter().map(|layer| layer + 1).collect()),
            target_hidden_size: None,
            norm_before_residual: false,
            target_layers: if get("num_target_layers").is_null() {
                None
            } else {
                Some(number("num_target_layers")?)
            },
            block: Some(MaskedBlock {
                size: number(BLOCK_SIZE)?,
                mask: number(MASK_TOKEN_ID)? as u32,
            }),
        })
    }

    /// Reads the metadata of a GGUF file with a head of kind `kind` and its `shape`.
    ///
    /// # Errors
    /// What is missing or not supported.
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
            })
        } else {
            None
        };
        if block.is_some() && taps.is_none() {
            return Err(format!("{name}.{EXTRACT_LAYERS} is missing"));
        }
        let before = get(NORM_BEFORE_RESIDUAL).and_then(|value| value.to_bool().ok());
        Ok(Self {
            kind,
            shape,
            taps,
            target_hidden_size: get(TARGET_HIDDEN_SIZE).and_then(number),
            norm_before_residual: before.unwrap_or(false),
            target_layers: None,
            block,
        })
    }

    /// What a GGUF file says about it besides its shape.
    pub fn gguf_metadata(&self) -> Vec<(String, GgufValue)> {
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
        metadata
    }

    /// The layers of `target` that it reads.
    ///
    /// # Errors
    /// What differs, if it does not belong to a model like `target`.
    pub fn taps_of(&self, target: &ModelConfig) -> Result<Vec<usize>, String> {
        let shape = &self.shape;
        let hidden = self.target_hidden_size.unwrap_or(shape.hidden_size);
        let target_layers = self.target_layers.unwrap_or(target.num_layers());
        for (what, ours, theirs) in [
            ("vocab_size", shape.vocab_size, target.vocab_size),
            ("hidden_size", hidden, target.hidden_size),
            ("num_target_layers", target_layers, target.num_layers()),
        ] {
            if ours != theirs {
                return Err(format!(
                    "the head does not fit the target: {what} is {ours}, but {theirs} in the target"
                ));
            }
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

impl HeadKind {
    /// The layers that such a head reads of a target with so many `layers` if its configuration does not say:
    /// those of SafeAI Lab and vLLM, one low, one in the middle, one high; fewer of a tiny target.
    pub fn default_taps(self, layers: usize) -> Vec<usize> {
        if matches!(self, Self::Eagle | Self::Medusa) {
            return vec![layers];
        }
        let mut taps = vec![
            2.min(layers),
            (layers / 2).max(2).min(layers),
            layers.saturating_sub(3).max(layers.min(3)),
        ];
        taps.sort_unstable();
        taps.dedup();
        taps
    }
}

#[cfg(test)]
mod tests {
    use super::super::safetensors_header;
    use super::*;
    use std::io::Cursor;

    #[test]
    fn a_head_is_told_by_tensors_that_are_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let config = r#"{"architectures": ["LlamaForCausalLM"]}"#;
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let source = ModelSource::Folder(folder.path().to_owned());
        assert_eq!(HeadKind::of(&source).unwrap(), None);
        let kind_of = |names: &[&str]| {
            let tensor = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
            let entries: Vec<String> = names.iter().map(|n| format!("\"{n}\":{tensor}")).collect();
            let header = format!("{{{}}}", entries.join(","));
            let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
            let mut tensors = TensorHeaders::new();
            safetensors_header::read(&mut Cursor::new(bytes), &mut tensors).unwrap();
            HeadKind::of_headers(&source, Some(&tensors)).unwrap()
        };
        let query = "layers.0.self_attn.q_proj.weight";
        assert_eq!(kind_of(&["fc.weight", query]), Some(HeadKind::Eagle));
        assert_eq!(kind_of(&["model.embed_tokens.weight", query]), None);
    }
}
