//! The modules of a model in the layout of sentence-transformers.

use foretoken_core::error::{Error, Result};
use foretoken_core::files;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Lists the modules of an embedding model or a reranker.
pub const MODULES: &str = "modules.json";
/// The file in the folder of a module, which is usually called `1_Pooling` or `1_LogitScore`.
pub(super) const CONFIG: &str = "config.json";

/// An entry of `modules.json`.
#[derive(Deserialize)]
pub(super) struct Module {
    pub path: String,
    #[serde(rename = "type")]
    class: String,
}

impl Module {
    /// The name of the class. Its place changes with the library's versions.
    pub fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }
}

/// The names of the modules' classes.
pub(super) fn kinds(modules: &[Module]) -> Vec<&str> {
    modules.iter().map(Module::kind).collect()
}

/// The folder of the module of this kind, if it is one beside `modules.json`.
pub(super) fn folder_of<'a>(modules: &'a [Module], kind: &str) -> Option<&'a str> {
    let module = modules.iter().rfind(|module| module.kind() == kind)?;
    Some(module.path.as_str()).filter(|path| files::is_name(path))
}

/// The value of a file's text.
pub(super) fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::in_file(file, e))
}
