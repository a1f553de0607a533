//! Draft heads: how their checkpoints are recognized.
//!
//! Layouts, by their names of tensors: SafeAI Lab's EAGLE-3 (`fc`, `midlayer.*`, `norm`, `lm_head`,
//! `d2t`, `t2d`), the speculators library's (the same with `layers.0.*`, and a nested `config.json`),
//! P-EAGLE (the same with `mask_hidden`), EAGLE-1 and 2 (`fc`, `layers.0.*`), DFlash (`fc`, `hidden_norm`,
//! `layers.*`, `norm`), DSpark (the same with `markov_head.*` and `confidence_head.*`), Domino (with `prefix_gru.*`
//! and `embed_proj.*`), LiLiCorr (with `lilicorr.*`), Muse Glimmer's assistant (DFlash, with `encoder.fc` and
//! `encoder.output_norm_enc` in the place of `fc` and `hidden_norm`), Medusa (`HEAD.BLOCK.linear`), and Gemma 4's
//! assistants (`pre_projection`, `model.layers.*`, `post_projection`). A GGUF file says `eagle3` or `dflash` as its architecture.

pub(crate) mod assistant;
mod candidates;
mod chain;
pub(crate) mod config;
mod domino;
pub(crate) mod draft;
mod gguf;
mod input;
mod keys;
mod lilicorr;
pub(crate) mod medusa;
pub(crate) mod mtp;
mod parallel;
mod path;
pub(crate) mod rates;
mod states;

use crate::arch::GEMMA4_ASSISTANTS;
use crate::checkpoint::pickle;
use crate::checkpoint::safetensors_header::TensorHeaders;
use crate::checkpoint::shards::safetensors_files;
use crate::config::{GGUF_DFLASH, GGUF_EAGLE3, read_json};
use crate::source::ModelSource;
use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::safetensors::MmapedSafetensors;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use foretoken_core::gguf::Header;
use std::collections::HashSet;
use std::path::Path;

/// The class of Muse Glimmer's assistant, a DFlash.
pub(crate) const MUSE_GLIMMER: &str = "MuseGlimmerAssistantModel";

/// The kind of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// EAGLE-1 and 2 (Li et al. 2024).
    Eagle,
    /// EAGLE-3 (Li et al. 2025).
    Eagle3,
    /// P-EAGLE: an EAGLE-3 head that predicts all depths in one forward.
    PEagle,
    /// A parallel head: DFlash (arXiv 2602.06036), DFlash 2, DSpark (arXiv 2607.05147), Domino (arXiv 2605.29707), LiLiCorr
    /// (arXiv 2608.20530).
    Parallel,
    /// Medusa (Cai et al. 2024), a parallel head, too.
    Medusa,
    /// Gemma 4's assistants, which read the target's K and V.
    Assistant,
}

impl HeadKind {
    /// The kind of head that `source` contains; `None` = an ordinary model.
    ///
    /// # Errors
    /// `Setup`, if a file is missing or broken, or contains a head of a kind that is not supported.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        Self::of_headers(source, None)
    }

    /// As [`HeadKind::of`], for a source whose folder may have no weights. Its `tensors` are then elsewhere.
    ///
    /// # Errors
    /// Returns the errors of [`HeadKind::of`].
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
        matches!(self, Self::Parallel | Self::PEagle | Self::Medusa)
    }

    /// The architecture of such a head in a GGUF file; `None` if there is none.
    pub fn gguf_architecture(self) -> Option<&'static str> {
        match self {
            Self::Eagle | Self::PEagle | Self::Medusa | Self::Assistant => None,
            Self::Eagle3 => Some(GGUF_EAGLE3),
            Self::Parallel => Some(GGUF_DFLASH),
        }
    }

    fn of_folder(path: &Path, tensors: Option<&TensorHeaders>) -> Result<Option<Self>> {
        let (file, json) = read_json(path)?;
        if let Some(kind) = json["speculators_model_type"].as_str() {
            return match kind {
                "eagle3" => Ok(Some(Self::Eagle3)),
                "peagle" => Ok(Some(Self::PEagle)),
                "dflash" | "dflash2" | "dspark" | "domino" => Ok(Some(Self::Parallel)),
                other => Err(Error::in_file(
                    &file,
                    format!(
                        "speculators_model_type {} is not supported: only eagle3, peagle, dflash, dflash2, dspark and domino are",
                        clipped(other)
                    ),
                )),
            };
        }
        if !json["medusa_num_heads"].is_null() {
            return Ok(Some(Self::Medusa));
        }
        let class = json["architectures"][0].as_str().unwrap_or_default();
        if GEMMA4_ASSISTANTS.iter().any(|known| known.class == class) {
            return Ok(Some(Self::Assistant));
        }
        if class.contains("Eagle3") {
            return Ok(Some(Self::Eagle3));
        }
        if matches!(
            class,
            "DFlashDraftModel"
                | "DFlash2DraftModel"
                | "DominoDraftModel"
                | "LiLiCorrDraftModel"
                | "DSparkDraftModel"
                | "Qwen3DSparkModel"
                | MUSE_GLIMMER
        ) {
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

impl HeadKind {
    /// The layers that such a head reads of a target with so many `layers` if its configuration does not say:
    /// those of SafeAI Lab and vLLM, one low, one in the middle, one high; fewer of a tiny target.
    pub fn default_taps(self, layers: usize) -> Vec<usize> {
        if matches!(self, Self::Eagle | Self::Medusa | Self::Assistant) {
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
    use super::*;
    use crate::checkpoint::safetensors_header;
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
