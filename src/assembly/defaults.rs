//! The sampling parameters of requests that do not name them.

use crate::config::{GenerationConfig, GenerationFlags};
use crate::error::{Error, Result};
use crate::files;
use crate::http::SamplingDefaults;
use crate::model::ModelSource;
use serde_json::{Map, Value};

const FILE: &str = "generation_config.json";

/// The parameters for the model of `source`, and a line that names them and the flag that changes them.
pub fn of(flags: &GenerationFlags, source: &ModelSource) -> Result<(SamplingDefaults, String)> {
    let (found, place) = match &flags.generation_config {
        GenerationConfig::Ignored => (None, String::new()),
        GenerationConfig::Path(path) => {
            let file = if path.is_dir() {
                path.join(FILE)
            } else {
                path.clone()
            };
            (Some(files::read_text(&file)?), file.display().to_string())
        }
        GenerationConfig::Auto => of_model(source)?,
    };
    let named = |e: Error| {
        Error::setup(format!(
            "{place}: {e}; --generation-config vllm leaves it out"
        ))
    };
    let found = found
        .map(|json| read(&json, &place).map_err(named))
        .transpose()?
        .unwrap_or_default();
    let overriding = flags.override_generation_config.clone();
    let overridden = overriding.is_some();
    let has_none = found == SamplingDefaults::default();
    let defaults = found.overridden_by(overriding.unwrap_or_default());
    let from = match (has_none, overridden) {
        (true, true) => "from --override-generation-config".to_owned(),
        (true, false) => "OpenAI's defaults; --override-generation-config sets others".to_owned(),
        (false, true) => format!("from {place} and --override-generation-config"),
        (false, false) => format!("from {place}; --generation-config vllm leaves them out"),
    };
    let openai = SamplingDefaults {
        temperature: Some(1.0),
        top_p: Some(1.0),
        ..SamplingDefaults::default()
    };
    let all = openai.overridden_by(defaults.clone());
    let notice = format!("requests that do not say otherwise have {all} ({from})");
    Ok((defaults, notice))
}

/// The JSON that the model has, and where.
fn of_model(source: &ModelSource) -> Result<(Option<String>, String)> {
    Ok(match source {
        ModelSource::Folder(path) => {
            let file = files::folder_of(path).join(FILE);
            (
                files::read_text_if_any(&file)?,
                format!("the model's {FILE}"),
            )
        }
        ModelSource::Gguf(file) => {
            let recommended = Value::Object(file.recommended_sampling()?);
            let place = "general.sampling of the model's file";
            (Some(recommended.to_string()), place.to_owned())
        }
    })
}

/// Reads a `generation_config.json`, and warns of what it asks for and is not done.
fn read(json: &str, place: &str) -> Result<SamplingDefaults> {
    let defaults = SamplingDefaults::from_json(json)?;
    let object: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
    let unread = SamplingDefaults::unread(&object);
    if !unread.is_empty() {
        tracing::warn!("{place}: not supported, so left out: {}", unread.join(", "));
    }
    Ok(defaults)
}
