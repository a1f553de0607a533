//! The location of a GGUF file, and how to open it.

use crate::error::{Error, Result};
use candle_core::quantized::gguf_file::Content;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

/// A GGUF file: on disk, or embedded in this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GgufSource {
    File(PathBuf),
    Embedded(&'static EmbeddedModel),
}

/// A GGUF file that is embedded in this program.
#[derive(PartialEq, Eq)]
pub struct EmbeddedModel {
    /// Its name for `--model`.
    pub name: &'static str,
    bytes: &'static [u8],
}

/// A source of a GGUF file's bytes.
pub trait Reader: Read + Seek + Send {}
impl<T: Read + Seek + Send> Reader for T {}

/// The embedded models: a small target, and a draft for it. Empty without the feature
/// `embedded-model`.
pub static EMBEDDED: &[EmbeddedModel] = &[
    #[cfg(feature = "embedded-model")]
    EmbeddedModel {
        name: "foretoken-demo",
        bytes: include_bytes!("../models/default/foretoken-demo.Q5_1.gguf"),
    },
    #[cfg(feature = "embedded-model")]
    EmbeddedModel {
        name: "foretoken-demo-draft",
        bytes: include_bytes!("../models/default/foretoken-demo-draft.Q8_0.gguf"),
    },
];

impl GgufSource {
    /// The embedded model called `name`.
    pub fn embedded(name: &str) -> Option<Self> {
        let found = EMBEDDED.iter().find(|model| model.name == name);
        found.map(Self::Embedded)
    }

    /// Opens the file and reads its header. The returned reader is for reading tensors.
    ///
    /// # Errors
    /// `Setup`, naming the file, if it does not exist or is not GGUF.
    pub fn open(&self) -> Result<(Content, Box<dyn Reader>)> {
        let mut reader: Box<dyn Reader> = match self {
            Self::File(path) => {
                let file = File::open(path).map_err(|e| Error::in_file(path, e))?;
                Box::new(BufReader::new(file))
            }
            Self::Embedded(model) => Box::new(Cursor::new(model.bytes)),
        };
        let content = Content::read(&mut reader)
            .map_err(|e| Error::in_file(self.path(), format!("not a readable GGUF file: {e}")))?;
        Ok((content, reader))
    }

    /// The file's path, or the embedded model's name, for messages.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Embedded(model) => Path::new(model.name),
        }
    }
}

impl<P: AsRef<Path>> From<P> for GgufSource {
    fn from(path: P) -> Self {
        Self::File(path.as_ref().to_owned())
    }
}

/// Leaves out the bytes, of which there are millions.
impl std::fmt::Debug for EmbeddedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EmbeddedModel({})", self.name)
    }
}
