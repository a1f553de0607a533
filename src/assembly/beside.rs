//! The heads beside a model's files.

use super::checkpoint::{Checkpoint, Target};
use crate::config::Config;
use crate::files;
use crate::gguf::GgufSource;
use crate::model::{HeadKind, LoadFormat, ModelSource};
use candle_core::Device;
use std::path::{Path, PathBuf};

/// The folder with heads beside models.
const HEADS: &str = "heads";
/// Maximum number of files and folders that are opened.
const MAX_ENTRIES: usize = 32;

/// A head that fits a target.
pub struct FittingHead {
    /// The head's name for `--draft-model`.
    pub name: String,
    pub kind: HeadKind,
    /// The name of its layout and what distinguishes it.
    pub layout: String,
}

/// The heads that fit `target`: those in the folder `heads` beside its files, in its own folder if it is one, and
/// beside its files, each in alphabetical order.
pub fn heads_beside<'a>(
    config: &'a Config,
    device: &'a Device,
    target: &'a Target,
) -> impl Iterator<Item = FittingHead> + 'a {
    let source = &target.checkpoint.source;
    let own = match source {
        ModelSource::Gguf(GgufSource::File(path)) => Some(path.as_path()),
        ModelSource::Folder(path) => Some(files::folder_of(path)),
        ModelSource::Gguf(_) => None,
    };
    let folder = own.and_then(Path::parent);
    let here = |folder: &Path| {
        let is_empty = folder.as_os_str().is_empty();
        if is_empty {
            PathBuf::from(".")
        } else {
            folder.to_owned()
        }
    };
    let mut found = Vec::new();
    let folder = folder.map(here);
    if let Some(folder) = &folder {
        found.extend(entries(&folder.join(HEADS)));
    }
    if let ModelSource::Folder(path) = source {
        found.extend(entries(files::folder_of(path)));
    }
    if let Some(folder) = &folder {
        found.extend(entries(folder));
    }
    found.truncate(MAX_ENTRIES);
    found.into_iter().filter_map(move |path| {
        let name = path.display().to_string();
        let read = ModelSource::resolve_headers(&name, None, LoadFormat::Auto);
        let (head, _) = read.ok().filter(|(head, _)| head != source)?;
        let draft = Checkpoint::inspected(config, device, name, head);
        let kind = draft.head_kind().ok().flatten()?;
        match draft.head(kind, &*target.model) {
            Ok((head, _)) => Some(FittingHead {
                name: draft.name,
                kind,
                layout: head.layout(),
            }),
            Err(e) => {
                tracing::debug!("{}: {e}", draft.name);
                None
            }
        }
    })
}

/// Returns the folders and GGUF files in a folder, in alphabetical order. There are none if there is no such folder.
pub fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_model = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|e| e == "gguf");
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).filter(is_model).collect();
    paths.sort();
    paths
}
