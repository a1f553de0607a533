//! The target, as far as it is read before its weights.

use super::{Objective, Options};
use crate::error::Result;
use crate::files::folder_of;
use crate::model::{LoadFormat, ModelConfig, ModelSource};
use crate::text::Text;
use std::path::Path;

/// What is read of a target before its weights are loaded.
pub struct Target {
    pub source: ModelSource,
    pub text: Text,
    /// `None` if there is only a tokenizer.
    pub config: Option<ModelConfig>,
}

impl Target {
    /// Opens the target that `options` name.
    ///
    /// # Errors
    /// `Setup`, if a file is missing or broken.
    pub fn open(options: &Options) -> Result<Self> {
        let path = Path::new(&options.model);
        let weights = options.objective == Objective::Kl;
        let tokenizer_alone =
            path.join("tokenizer.json").exists() && !path.join("config.json").exists();
        let source = if tokenizer_alone && !weights {
            ModelSource::Folder(path.to_owned())
        } else {
            let format = match weights || path.exists() {
                true => LoadFormat::Auto,
                false => LoadFormat::Dummy,
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
                let config = match tokenizer_alone {
                    true => None,
                    false => Some(ModelConfig::from_json(path)?),
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
