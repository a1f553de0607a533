//! The checkpoints of target and draft, which are read whole or by their headers.

use super::{host_memory, memory};
use crate::config::{Config, Dtype, ModelChoice};
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::files;
use crate::model::{
    self, DraftVocabulary, Head, HeadKind, Inventory, LoadFormat, LoadOptions, LoadedModel,
    ModelConfig, ModelInfo, ModelSource, hub,
};
use crate::text::Text;
use candle_core::{DType, Device};
use std::sync::Arc;
use std::time::Instant;

/// How much of a checkpoint is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// All: weights that are not on this machine are fetched.
    Weights,
    /// Only headers: the models have no weights, and a forward fails.
    Headers,
}

/// A model or head, and its tensors.
pub type Read<M> = (Box<M>, Inventory);

/// A checkpoint that was found, and how it is read.
pub struct Checkpoint {
    /// The name that the operator gave.
    pub name: String,
    pub source: ModelSource,
    pub options: LoadOptions,
    pub reading: Reading,
}

/// The model whose text is served.
pub struct Target {
    pub checkpoint: Checkpoint,
    pub model: Box<dyn LoadedModel>,
    pub inventory: Inventory,
    /// `None`: dummy weights without a tokenizer.
    pub text: Option<Arc<Text>>,
}

impl Checkpoint {
    /// Finds the checkpoint of `choice`, or fetches it.
    ///
    /// # Errors
    /// `Setup`, in one line that says what was searched for.
    pub fn find(choice: &ModelChoice, options: LoadOptions, reading: Reading) -> Result<Self> {
        let (name, revision) = (choice.name.clone(), choice.revision.as_deref());
        let wanted = options.format;
        let (source, format) = match reading {
            Reading::Weights => (ModelSource::resolve(&name, revision, wanted)?, wanted),
            Reading::Headers => ModelSource::resolve_headers(&name, revision, wanted)?,
        };
        // Weights are asked for, and the Hub has them.
        let tensors = if format == wanted {
            None
        } else {
            hub::headers::tensors(&name, revision)?
        };
        Ok(Self {
            name,
            source,
            options: LoadOptions {
                format,
                tensors,
                ..options
            },
            reading,
        })
    }

    /// A draft on this machine, in `source`, of which only headers are read.
    pub fn inspected(config: &Config, device: &Device, name: String, source: ModelSource) -> Self {
        Self {
            name,
            source,
            options: LoadOptions {
                format: LoadFormat::Auto,
                ..draft_options(config, device)
            },
            reading: Reading::Headers,
        }
    }

    /// The kind of head that this is; `None` = an ordinary model.
    ///
    /// # Errors
    /// The errors of [`HeadKind::of`].
    pub fn head_kind(&self) -> Result<Option<HeadKind>> {
        HeadKind::of_headers(&self.source, self.options.tensors.as_deref())
    }

    /// The tokenizer; `None` if dummy weights have none.
    ///
    /// # Errors
    /// `Setup`, naming the file. What is wrong with the model's configuration is said first.
    pub fn text(&self) -> Result<Option<Text>> {
        let path = match &self.source {
            ModelSource::Gguf(file) => return Text::from_gguf(file.clone()).map(Some),
            ModelSource::Folder(path) => path,
        };
        ModelConfig::from_json(path)?;
        // `path` may be the config.json itself.
        let folder = files::folder_of(path);
        let is_dummy = self.options.format == LoadFormat::Dummy;
        let is_missing = is_dummy && !folder.join("tokenizer.json").exists();
        let text = (!is_missing).then(|| Text::from_folder(folder));
        Ok(text
            .transpose()?
            .map(|text| text.with_infill_of(&self.name)))
    }

    /// The model, and its tensors, beside weights of other models of `others` bytes. `check` may refuse the model before its
    /// weights are loaded.
    ///
    /// # Errors
    /// The errors of [`model::load`] and of `check`; this machine has too little memory.
    pub fn model(
        &self,
        others: u64,
        check: impl FnOnce(&ModelInfo) -> Result<()>,
    ) -> Result<Read<dyn LoadedModel>> {
        let (source, options) = (&self.source, &self.options);
        let (model, inventory) = model::inspect(source, options)?;
        check(model.info())?;
        self.check_memory(&inventory, others)?;
        if self.reading == Reading::Headers {
            return Ok((model, inventory));
        }
        let started = Instant::now();
        let model = model::load(source, options)?;
        tracing::info!("{}: loaded in {:.1?}", self.name, started.elapsed());
        Ok((model, inventory))
    }

    /// Checks, before weights are loaded, that this machine has the memory for those that are to be in it, beside `others`
    /// bytes of other models.
    fn check_memory(&self, inventory: &Inventory, others: u64) -> Result<()> {
        let options = &self.options;
        let (weights, experts) = inventory.loaded_bytes();
        if options.for_gpu {
            // Another machine has another memory.
            return Ok(());
        }
        if options.device.is_cpu() {
            let left = memory::total_memory().saturating_sub(others);
            let is_folder = matches!(self.source, ModelSource::Folder(_));
            let (name, weights) = (&self.name, weights + experts);
            host_memory::weights_fit(name, weights, left, is_folder)?;
            let free = memory::free_memory();
            let warning = host_memory::weights_warning(name, weights, free, is_folder);
            if let Some(warning) = warning.filter(|_| self.reading == Reading::Weights) {
                tracing::warn!("{warning}");
            }
            return Ok(());
        }
        // A GPU reads pages that cannot be swapped out.
        let left = match self.reading {
            Reading::Weights => memory::free_memory(),
            Reading::Headers => memory::total_memory(),
        };
        host_memory::experts_fit(experts, left)
    }

    /// The head of this `kind` for `target`, and its tensors.
    ///
    /// # Errors
    /// The errors of [`model::load_head`].
    pub fn head(&self, kind: HeadKind, target: &dyn LoadedModel) -> Result<Read<dyn Head>> {
        let (source, options) = (&self.source, &self.options);
        let (head, inventory) = model::inspect_head(source, kind, options, target)?;
        if self.reading == Reading::Headers {
            return Ok((head, inventory));
        }
        let head = model::load_head(source, kind, options, target)?;
        Ok((head, inventory))
    }
}

impl Target {
    /// Reads the tokenizer, whose absence is told before a long load, and the model, which must take sequences of the
    /// length that `engine` asks for.
    ///
    /// # Errors
    /// `Setup`: it is missing, broken, not supported, too short, or a draft head.
    pub fn open(checkpoint: Checkpoint, engine: &EngineOptions) -> Result<Self> {
        // Before the model, whose error would be about a layer.
        if checkpoint.head_kind()?.is_some() {
            return Err(Error::setup(format!(
                "{} is a draft head, not a model: give it as --draft-model beside its target",
                checkpoint.name
            )));
        }
        let text = checkpoint.text()?.map(Arc::new);
        let long_enough =
            |info: &ModelInfo| engine.longest(info.max_position_embeddings).map(|_| ());
        let (model, inventory) = checkpoint.model(0, long_enough)?;
        Ok(Self {
            checkpoint,
            model,
            inventory,
            text,
        })
    }

    /// The layer of this checkpoint that predicts further tokens, of the ids of `vocabulary`; `None` if it has none.
    ///
    /// # Errors
    /// `Setup`: it cannot be loaded, or this machine has too little memory for it.
    pub fn further_layer(
        &self,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Option<Read<dyn Head>>> {
        let source = &self.checkpoint.source;
        let options = &LoadOptions {
            draft_vocabulary: vocabulary.cloned(),
            ..self.checkpoint.options.clone()
        };
        let inspected = model::inspect_mtp(source, options, &*self.model)?;
        if let Some((_, inventory)) = &inspected {
            self.checkpoint.check_memory(inventory, self.bytes())?;
        }
        if !self.is_loaded() {
            return Ok(inspected);
        }
        let head = model::load_mtp(source, options, &*self.model)?;
        Ok(head
            .zip(inspected)
            .map(|(head, (_, inventory))| (head, inventory)))
    }

    /// Whether the weights are in memory.
    pub fn is_loaded(&self) -> bool {
        self.checkpoint.reading == Reading::Weights
    }

    /// Bytes of the weights in memory.
    pub fn bytes(&self) -> u64 {
        self.inventory.sum(|entry| entry.loaded_bytes)
    }
}

/// The options with which the flags load a target, on `devices`, of which there is at least one.
pub fn target_options(config: &Config, devices: &[Device]) -> LoadOptions {
    LoadOptions {
        more_devices: devices[1..].to_vec(),
        shares: config.load.tensor_split.clone(),
        host_expert_layers: config.load.host_expert_layers(),
        ..common_options(config, &devices[0])
    }
}

/// What a target and a draft on `device` have in common.
fn common_options(config: &Config, device: &Device) -> LoadOptions {
    let flags = &config.load;
    LoadOptions {
        dtype: match flags.dtype {
            Dtype::Auto => None,
            Dtype::F32 => Some(DType::F32),
            Dtype::Bf16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
        },
        kv_cache_dtype: flags.kv_cache_dtype,
        device: device.clone(),
        for_gpu: config.gpu.is_some(),
        format: flags.load_format,
        seed: flags.seed,
        enforce_eager: flags.enforce_eager,
        one_launch: flags.one_launch,
        batch_invariant: flags.batch_invariant,
        quantize: flags.quantize,
        ..LoadOptions::default()
    }
}

/// The options with which the flags load a draft.
pub fn draft_options(config: &Config, device: &Device) -> LoadOptions {
    let options = common_options(config, device);
    LoadOptions {
        quantize: config.draft_quantize.or(options.quantize),
        ..options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One with experts may take gigabytes, and drafts without a flag.
    #[test]
    fn a_further_layer_without_room_beside_the_target_is_refused() {
        let choice = ModelChoice {
            name: "tests/fixtures/architectures/deepseek_v3".into(),
            revision: None,
        };
        let options = LoadOptions::of(DType::F32);
        let checkpoint = Checkpoint::find(&choice, options, Reading::Headers).unwrap();
        let (model, inventory) = checkpoint.model(0, |_| Ok(())).unwrap();
        let mut target = Target {
            checkpoint,
            model,
            inventory,
            text: None,
        };
        assert!(target.further_layer(None).unwrap().is_some());
        target.inventory.entries[0].loaded_bytes = memory::total_memory();
        let refused = target.further_layer(None).map(drop);
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("the weights take") && error.contains("room for 0"),
            "{error}"
        );
    }
}
