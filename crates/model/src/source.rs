//! Resolves the model that the operator names to files on disk.

use crate::hub::{self, gguf::HubFile};
use crate::known;
use foretoken_core::error::{Error, Result};
use foretoken_core::gguf::{GgufSource, PartName};
use std::path::{Path, PathBuf};

/// How weights are obtained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum LoadFormat {
    /// What is found: safetensors or GGUF.
    #[default]
    Auto,
    /// Random, in the model's shape; only config.json is read.
    Dummy,
}

/// Where a checkpoint is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A folder with `config.json` and safetensors (or a `config.json` itself, for dummy weights).
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(GgufSource),
}

impl ModelSource {
    /// Resolves `spec`: a GGUF file, a folder, a `config.json`, the name of an embedded model or of the
    /// [list](known), or else a Hugging Face id, or a [file](HubFile) of one, which is fetched into the usual cache (with `HF_HOME`,
    /// `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`). `revision` is only used for the Hub. With [`LoadFormat::Dummy`]
    /// no weights are fetched.
    ///
    /// # Errors
    /// A setup error in one line that says what was searched for and what to do.
    pub fn resolve(spec: &str, revision: Option<&str>, format: LoadFormat) -> Result<Self> {
        if let Some(found) = Self::local(spec, format)? {
            return Ok(found);
        }
        let spec = known::location(spec)?;
        match HubFile::of(spec) {
            Some(file) => file.fetch(revision).map(|path| Self::Gguf(path.into())),
            None => match hub::fetch(spec, revision, format == LoadFormat::Auto) {
                Ok(folder) => Ok(Self::Folder(folder)),
                Err(error) => match HubFile::default_of(spec, revision) {
                    Some(file) if format == LoadFormat::Auto => {
                        tracing::info!("{spec} has only GGUF files, of which {file} is taken");
                        file.fetch(revision).map(|path| Self::Gguf(path.into()))
                    }
                    _ => Err(error),
                },
            },
        }
    }

    /// As [`ModelSource::resolve`], but fetches no weights. Of a GGUF file of the Hub that is not in the cache, only
    /// the header is fetched. Where safetensors are missing, the format is `Dummy`; then
    /// [`tensors`](crate::hub::headers::tensors) has their headers.
    ///
    /// # Errors
    /// Returns the errors of [`ModelSource::resolve`].
    pub fn resolve_headers(
        spec: &str,
        revision: Option<&str>,
        format: LoadFormat,
    ) -> Result<(Self, LoadFormat)> {
        if let Some(found) = Self::local(spec, format)? {
            return Ok((found, format));
        }
        let spec = known::location(spec)?;
        let headers_of = |file: HubFile| -> Result<(Self, LoadFormat)> {
            Ok((Self::Gguf(file.headers(revision)?), format))
        };
        if let Some(file) = HubFile::of(spec) {
            return headers_of(file);
        }
        if let Some(folder) = hub::cached(spec, revision) {
            return Ok((Self::Folder(folder), format));
        }
        if let Some(file) = HubFile::default_of(spec, revision) {
            return headers_of(file);
        }
        let folder = hub::fetch(spec, revision, false)?;
        Ok((Self::Folder(folder), LoadFormat::Dummy))
    }

    /// Checks, without the Hub, that `spec` names a model on this machine or can be one of the Hub.
    ///
    /// # Errors
    /// Returns those errors of [`ModelSource::resolve`] that are about the name alone.
    pub fn check_name(spec: &str, format: LoadFormat) -> Result<()> {
        if Self::local(spec, format)?.is_none() {
            known::location(spec)?;
        }
        Ok(())
    }

    /// What `spec` names on this machine or in this program; `None` if it can only be an id of the Hub, or a name of the
    /// list.
    fn local(spec: &str, format: LoadFormat) -> Result<Option<Self>> {
        let path = Path::new(spec);
        if path.is_dir() {
            return folder(path, format).map(Some);
        }
        if path.is_file() {
            return file(path).map(Some);
        }
        // `models/m/x.gguf` is a path where there is a folder `models`.
        let first = spec.split('/').next().unwrap_or(spec);
        let is_file_of_hub = HubFile::of(spec).is_some() && !Path::new(first).is_dir();
        if looks_like_a_path(spec) && !is_file_of_hub && !known::is_bare(spec) {
            return Err(Error::setup(format!("model '{spec}' does not exist")));
        }
        Ok(GgufSource::embedded(spec).map(Self::Gguf))
    }
}

fn file(path: &Path) -> Result<ModelSource> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("gguf") => Ok(ModelSource::Gguf(path.into())),
        Some("json") => Ok(ModelSource::Folder(path.to_owned())),
        _ => Err(Error::setup(format!(
            "model '{}' is neither a .gguf file, a config.json, nor a folder",
            path.display()
        ))),
    }
}

/// Maximum number of files that an error names.
const MAX_NAMED: usize = 8;

fn folder(path: &Path, format: LoadFormat) -> Result<ModelSource> {
    if path.join("config.json").is_file() {
        return Ok(ModelSource::Folder(path.to_owned()));
    }
    let mut ggufs = ggufs(path).map_err(|e| Error::in_file(path, e))?;
    ggufs.sort();
    match ggufs.as_slice() {
        [only] if format == LoadFormat::Auto => Ok(ModelSource::Gguf(only.as_path().into())),
        [] => Err(Error::setup(format!(
            "{} has no config.json and no .gguf file",
            path.display()
        ))),
        _ => {
            let names = ggufs.iter().filter_map(|file| file.file_name());
            let first = names.take(MAX_NAMED).map(|name| name.to_string_lossy());
            Err(Error::setup(format!(
                "{} has no config.json; name one of its {} .gguf files: {}{}",
                path.display(),
                ggufs.len(),
                first.collect::<Vec<_>>().join(", "),
                if ggufs.len() > MAX_NAMED { ", ..." } else { "" }
            )))
        }
    }
}

/// The GGUF models in `folder`; of one in parts, the first part.
fn ggufs(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let file = entry?.path();
        let name = file.file_name().and_then(|name| name.to_str());
        let part = name.and_then(PartName::of);
        let is_first = part.is_none_or(|part| part.number == 1);
        if is_first && file.extension().is_some_and(|e| e == "gguf") {
            found.push(file);
        }
    }
    Ok(found)
}

/// The only GGUF model in `folder`, if it is a folder that is served as this model.
pub fn only_gguf(folder: &Path) -> Option<PathBuf> {
    match self::folder(folder, LoadFormat::Auto).ok()? {
        ModelSource::Gguf(GgufSource::File(path)) => Some(path),
        _ => None,
    }
}

/// Whether `spec` can only be a path: a Hub id is `name` or `owner/name`.
fn looks_like_a_path(spec: &str) -> bool {
    let part_of_an_id = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let ends_like_a_file = [".gguf", ".json", ".safetensors"]
        .iter()
        .any(|end| spec.ends_with(end));
    ends_like_a_file || spec.split('/').count() > 2 || !spec.split('/').all(part_of_an_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_paths_are_distinguished() {
        for id in ["gpt2", "Qwen/Qwen3-0.6B", "a_b/c.d-1"] {
            assert!(!looks_like_a_path(id), "{id}");
        }
        let paths = [
            "./x", "../x", "/x", "a/b/c", "x.gguf", "a/x.gguf", "a b", "~/m", "",
        ];
        for path in paths {
            assert!(looks_like_a_path(path), "{path}");
        }
    }

    #[test]
    fn errors_name_the_missing_file_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let resolve =
            |path: &Path| ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto);
        let error = resolve(&dir.path().join("no.gguf"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no.gguf' does not exist"), "{error}");
        let error = resolve(dir.path()).unwrap_err().to_string();
        assert!(error.contains("no config.json and no .gguf"), "{error}");

        let gguf = dir.path().join("one.gguf");
        std::fs::write(&gguf, "").unwrap();
        assert_eq!(
            resolve(dir.path()).unwrap(),
            ModelSource::Gguf(gguf.as_path().into())
        );
        assert_eq!(only_gguf(dir.path()), Some(gguf.clone()));
        assert_eq!(only_gguf(&gguf), None);
        assert_eq!(resolve(&gguf).unwrap(), ModelSource::Gguf(gguf.into()));
        std::fs::write(dir.path().join("two.gguf"), "").unwrap();
        assert_eq!(only_gguf(dir.path()), None);
        let error = resolve(dir.path()).unwrap_err().to_string();
        let named = "name one of its 2 .gguf files: one.gguf, two.gguf";
        assert!(error.ends_with(named), "{error}");
        for number in 3..10 {
            std::fs::write(dir.path().join(format!("x{number}.gguf")), "").unwrap();
        }
        let error = resolve(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with(", x7.gguf, x8.gguf, ..."), "{error}");
    }
}
