//! Where a GGUF file lies, and how it is opened.

use crate::error::{Error, Result};
use candle_core::quantized::gguf_file::Content;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

/// A GGUF file: on disk, or a part of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GgufSource {
    File(PathBuf),
    Embedded(&'static EmbeddedModel),
}

/// A GGUF file that is a part of this program.
#[derive(PartialEq, Eq)]
pub struct EmbeddedModel {
    /// What `--model` calls it.
    pub name: &'static str,
    bytes: &'static [u8],
}

/// What a GGUF file is read from.
pub trait Reader: Read + Seek + Send {}
impl<T: Read + Seek + Send> Reader for T {}

/// The models that are a part of this program: a small target, and a draft for it. None, without
/// the feature `embedded-model`.
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
    /// The embedded model that is called `name`.
    pub fn embedded(name: &str) -> Option<Self> {
        let found = EMBEDDED.iter().find(|model| model.name == name);
        found.map(Self::Embedded)
    }

    /// Opens the file and reads its header; tensors are read with the second of the two.
    ///
    /// # Errors
    /// `Setup`, naming the file: not there, or not GGUF.
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

    /// The file, or what stands for it in messages.
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

/// Without the bytes, of which there are millions.
impl std::fmt::Debug for EmbeddedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EmbeddedModel({})", self.name)
    }
}
