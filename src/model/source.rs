//! From what the operator names to files on disk.

use std::path::PathBuf;

/// Where a checkpoint lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A folder with `config.json` and safetensors (or a `config.json` itself, for dummy weights).
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
}
