//! The target, as far as it is read before its weights.

use super::{DistillOptions, Objective};
use foretoken_core::error::Result;
use foretoken_core::files::folder_of;
use foretoken_model::{LoadFormat, ModelConfig, ModelSource};
use foretoken_text::Text;
use std::path::Path;

/// The parts of a target that are read before its weights are loaded.
pub struct DistillTarget {
    pub source: ModelSource,
    pub text: Text,
    /// `None` if there is only a tokenizer.
    pub config: Option<ModelConfig>,
}

impl DistillTarget {
    /// Opens the target that `options` name.
    ///
    /// # Errors
    /// `Setup`, if a file is missing or broken.
    pub fn open(options: &DistillOptions) -> Result<Self> {
        let path = Path::new(&options.model);
        let weights = options.objective == Objective::Kl;
        let tokenizer_alone =
            path.join("tokenizer.json").exists() && !path.join("config.json").exists();
        let source = if tokenizer_alone && !weights {
            ModelSource::Folder(path.to_owned())
        } else {
            let format = if weights || path.exists() {
                LoadFormat::Auto
            } else {
                LoadFormat::Dummy
            };
            ModelSource::resolve(&options.model, options.revision.as_deref(), format)?
        };
        let (text, config) = match &source {
            ModelSource::Gguf(file) => {
                let config = ModelConfig::from_gguf(&file.open()?.0, file.path())?;
                (Text::from_gguf(file.clone())?, Some(config))
            }
            ModelSource::Folder(path) => {
                let folder = folder_of(path);
                let config = if tokenizer_alone {
                    None
                } else {
                    Some(ModelConfig::from_json(path)?)
                };
                (Text::from_folder(folder)?, config)
            }
        };
        Ok(Self {
            source,
            text,
            config,
        })
    }
}
