//! The flags of LoRA adapters.

use crate::error::{Error, Result};
use crate::http::AdapterLimits;
use crate::parse::at_least_one;
use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The flag whose values have paths within.
pub const MODULES: &str = "lora-modules";

/// LoRA adapters, which are served beside the model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Adapters")]
pub struct LoraFlags {
    /// Take LoRA adapters; --lora-modules does so, too.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub enable_lora: bool,
    /// LoRA adapters that are models of their own: NAME=FOLDER, or '{"name": "NAME", "path": "FOLDER"}'. A folder
    /// is as PEFT writes it.
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1.., action = ArgAction::Set, value_parser = lora_module)]
    pub lora_modules: Vec<LoraModule>,
    /// Maximum number of adapters that are loaded at a time. All of them may be in one batch.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub max_loras: usize,
    /// Maximum rank of an adapter.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub max_lora_rank: usize,
    /// Let clients load and unload adapters while the server runs, at /v1/load_lora_adapter and
    /// /v1/unload_lora_adapter. They name folders of this machine, so set --api-key with it.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub allow_runtime_lora_updating: bool,
}

/// An adapter that is loaded at start.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LoraModule {
    /// The name that requests give as their model.
    pub name: String,
    /// The folder of the adapter, as PEFT writes it.
    pub path: PathBuf,
    /// vLLM's: it must be the model's name.
    pub base_model_name: Option<String>,
}

/// The adapters of a server.
#[derive(Debug, Clone)]
pub struct LoraOptions {
    /// The adapters that are loaded at start.
    pub modules: Vec<LoraModule>,
    /// The limits of adapters that are loaded at a time.
    pub limits: AdapterLimits,
}

impl LoraFlags {
    /// The adapters; `None` = there are none. The model is called `served`.
    ///
    /// # Errors
    /// `Setup`, naming the flag.
    pub fn validate(self, served: &[&str]) -> Result<Option<LoraOptions>> {
        let modules = self.lora_modules;
        for module in &modules {
            if let Some(base) = &module.base_model_name
                && !served.contains(&base.as_str())
            {
                let name = &module.name;
                return Err(Error::setup(format!(
                    "--lora-modules {name}: its base_model_name {base} is not the model, which is {}",
                    served.join(", ")
                )));
            }
        }
        if modules.len() > self.max_loras {
            return Err(Error::setup(format!(
                "--lora-modules names {} adapters and --max-loras is {}: raise it",
                modules.len(),
                self.max_loras
            )));
        }
        if modules.is_empty() && !self.enable_lora {
            if self.allow_runtime_lora_updating {
                return Err(Error::setup(
                    "--allow-runtime-lora-updating needs --enable-lora or --lora-modules",
                ));
            }
            return Ok(None);
        }
        Ok(Some(LoraOptions {
            modules,
            limits: AdapterLimits {
                max_loras: self.max_loras,
                max_rank: self.max_lora_rank,
                may_update: self.allow_runtime_lora_updating,
            },
        }))
    }
}

/// Parses NAME=FOLDER, or vLLM's JSON object.
fn lora_module(text: &str) -> Result<LoraModule, String> {
    const ACCEPTED: &str =
        "must be NAME=FOLDER, or a JSON object with name, path and perhaps base_model_name";
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|e| format!("{ACCEPTED}: {e}"));
    }
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok(LoraModule {
            name: name.into(),
            path: path.into(),
            base_model_name: None,
        }),
        _ => Err(ACCEPTED.into()),
    }
}

/// A value of [`MODULES`] whose path is in relation to `folder`. One that cannot be read stays as it is.
pub fn relative_to(folder: &Path, text: &str) -> String {
    let Ok(mut module) = lora_module(text) else {
        return text.to_owned();
    };
    module.path = folder.join(&module.path);
    serde_json::to_string(&module).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_a_file_are_relative_to_its_folder() {
        let placed = |text: &str| lora_module(&relative_to(Path::new("/etc/f"), text)).unwrap();
        assert_eq!(placed("a=b/c").path, Path::new("/etc/f/b/c"));
        assert_eq!(placed("a=/b").path, Path::new("/b"));
        let json = placed(r#"{"name": "a", "path": "b", "base_model_name": "m"}"#);
        assert_eq!(json.path, Path::new("/etc/f/b"));
        assert_eq!(json.base_model_name.as_deref(), Some("m"));
        assert_eq!(relative_to(Path::new("/etc"), "wrong"), "wrong");
    }

    #[test]
    fn modules_are_named_in_two_forms() {
        let plain = lora_module("a/b=/x=y").unwrap();
        let json = r#"{"name": "a/b", "path": "/x=y", "base_model_name": "base"}"#;
        let json = lora_module(json).unwrap();
        assert_eq!((plain.name, plain.path), ("a/b".into(), "/x=y".into()));
        assert_eq!((json.name, json.path), ("a/b".into(), "/x=y".into()));
        assert_eq!(json.base_model_name.as_deref(), Some("base"));
        for wrong in [
            "a",
            "=x",
            "a=",
            "{",
            r#"{"name": "a"}"#,
            r#"{"name": "a", "path": "b", "c": 1}"#,
        ] {
            let error = lora_module(wrong).unwrap_err();
            assert!(error.starts_with("must be NAME=FOLDER"), "{wrong}: {error}");
        }
    }

    #[test]
    fn flags_that_do_not_fit_together_are_named() {
        let flags = |modules: &[&str], max_loras, updating| LoraFlags {
            enable_lora: false,
            lora_modules: modules
                .iter()
                .map(|text| lora_module(text).unwrap())
                .collect(),
            max_loras,
            max_lora_rank: 16,
            allow_runtime_lora_updating: updating,
        };
        let of = |flags: LoraFlags| flags.validate(&["base"]).map_err(|e| e.to_string());
        assert!(of(flags(&[], 8, false)).unwrap().is_none());
        let found = of(flags(&["a=x"], 1, true)).unwrap().unwrap();
        assert!(found.limits.may_update && found.modules.len() == 1);
        for (wrong, needle) in [
            (flags(&["a=x", "b=x"], 1, false), "--max-loras is 1"),
            (flags(&[], 8, true), "needs --enable-lora"),
            (
                flags(
                    &[r#"{"name":"a","path":"x","base_model_name":"c"}"#],
                    8,
                    false,
                ),
                "base_model_name c",
            ),
        ] {
            let error = of(wrong).unwrap_err();
            assert!(error.contains(needle), "{error}");
        }
    }
}
