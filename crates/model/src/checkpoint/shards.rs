//! The files of a checkpoint in safetensors.

use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use std::path::{Path, PathBuf};

/// The file of a checkpoint in one part; the second is that of Medusa heads.
pub const SINGLE: [&str; 2] = ["model.safetensors", "medusa_lm_head.safetensors"];

/// Maximum number of files of a checkpoint; the largest models have a few hundred.
const MAX_SHARDS: usize = 4096;

/// The safetensors files of a folder: those that its index names, otherwise its only one.
///
/// # Errors
/// A setup error that names the missing file.
pub fn safetensors_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    let files: Vec<PathBuf> = if index.exists() {
        shards(&index)?.iter().map(|f| folder.join(f)).collect()
    } else {
        let mut names = SINGLE.into_iter().map(|name| folder.join(name));
        let found = names.find(|file| file.exists());
        vec![found.unwrap_or_else(|| folder.join(SINGLE[0]))]
    };
    match files.iter().find(|file| !file.exists()) {
        Some(missing) => Err(Error::in_file(missing, "it is missing")),
        None => Ok(files),
    }
}

/// The files that a `model.safetensors.index.json` names, each once.
///
/// # Errors
/// A setup error if the index cannot be read, names no file or too many, or one outside its folder.
pub(crate) fn shards(index: &Path) -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = files::read_text(index)?;
    let parsed: Index = serde_json::from_str(&text).map_err(|e| Error::in_file(index, e))?;
    let files: std::collections::BTreeSet<String> = parsed.weight_map.into_values().collect();
    if files.is_empty() {
        return Err(Error::in_file(index, "weight_map is empty"));
    }
    if files.len() > MAX_SHARDS {
        return Err(Error::in_file(
            index,
            format!("it names {} files; {MAX_SHARDS} are supported", files.len()),
        ));
    }
    if let Some(name) = files.iter().find(|name| !files::is_inside(name)) {
        return Err(Error::in_file(
            index,
            format!(
                "the file name {:?} is refused: it is outside the model's folder",
                clipped(name)
            ),
        ));
    }
    Ok(files.into_iter().collect())
}
