//! The modules of a model in the layout of sentence-transformers.

use crate::checkpoint::shards::SINGLE;
use foretoken_core::error::{Error, Result};
use foretoken_core::files;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Lists the modules of an embedding model or a reranker.
pub const MODULES: &str = "modules.json";
/// The file in the folder of a module, which is usually called `1_Pooling` or `1_LogitScore`.
pub(super) const CONFIG: &str = "config.json";
/// The kind of a module that is a layer after the pooling, and the maximum number of these.
pub(super) const DENSE_LAYER: &str = "Dense";
pub(super) const MAX_DENSE: usize = 4;

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

/// The files of the dense layers that `modules.json` in `folder` names, if there are any: settings and weights.
pub(crate) fn dense_files(folder: &Path) -> Vec<String> {
    let file = folder.join(MODULES);
    let text = files::read_text_if_any(&file).ok().flatten();
    // Whoever serves the model says what is wrong with it.
    let modules: Option<Vec<Module>> = text.and_then(|text| parse(&file, &text).ok());
    let modules = modules.unwrap_or_default().into_iter();
    let dense =
        modules.filter(|module| module.kind() == DENSE_LAYER && files::is_name(&module.path));
    let files = dense
        .take(MAX_DENSE)
        .flat_map(|module| [CONFIG, SINGLE[0]].map(|name| format!("{}/{name}", module.path)));
    files.collect()
}

/// The value of a file's text.
pub(super) fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::in_file(file, e))
}
