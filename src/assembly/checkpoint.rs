//! The checkpoints of target and draft, which are read whole or by their headers.

use crate::config::{Config, Dtype, ModelChoice};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{
    self, DraftVocabulary, Head, HeadKind, Inventory, LoadFormat, LoadOptions, LoadedModel,
    ModelConfig, ModelSource, hub,
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

/// A model or head, and its tensors, which are only listed if headers alone are read.
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
    /// Empty if the weights were loaded.
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
        (!is_missing).then(|| Text::from_folder(folder)).transpose()
    }

    /// The model.
    ///
    /// # Errors
    /// The errors of [`model::load`].
    pub fn model(&self) -> Result<Read<dyn LoadedModel>> {
        if self.reading == Reading::Headers {
            return model::inspect(&self.source, &self.options);
        }
        let started = Instant::now();
        let model = model::load(&self.source, &self.options)?;
        tracing::info!("{}: loaded in {:.1?}", self.name, started.elapsed());
        Ok((model, Inventory::default()))
    }

    /// The head of this `kind` for `target`.
    ///
    /// # Errors
    /// The errors of [`model::load_head`].
    pub fn head(&self, kind: HeadKind, target: &dyn LoadedModel) -> Result<Read<dyn Head>> {
        let (source, options) = (&self.source, &self.options);
        if self.reading == Reading::Headers {
            return model::inspect_head(source, kind, options, target);
        }
        let head = model::load_head(source, kind, options, target)?;
        Ok((head, Inventory::default()))
    }
}

impl Target {
    /// Reads the tokenizer, whose absence is told before a long load, and the model.
    ///
    /// # Errors
    /// `Setup`: it is missing, broken, not supported, or a draft head.
    pub fn open(checkpoint: Checkpoint) -> Result<Self> {
        // Before the model, whose error would be about a layer.
        if checkpoint.head_kind()?.is_some() {
            return Err(Error::setup(format!(
                "{} is a draft head, not a model: give it as --draft-model beside its target",
                checkpoint.name
            )));
        }
        let text = checkpoint.text()?.map(Arc::new);
        let (model, inventory) = checkpoint.model()?;
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
    /// `Setup`: it cannot be loaded.
    pub fn further_layer(
        &self,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Option<Read<dyn Head>>> {
        let source = &self.checkpoint.source;
        let options = &LoadOptions {
            draft_vocabulary: vocabulary.cloned(),
            ..self.checkpoint.options.clone()
        };
        if self.checkpoint.reading == Reading::Headers {
            return model::inspect_mtp(source, options, &*self.model);
        }
        let head = model::load_mtp(source, options, &*self.model)?;
        Ok(head.map(|head| (head, Inventory::default())))
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
