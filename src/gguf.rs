//! The location of a GGUF file, and how to open it.

use crate::error::{Error, Result, caught, clipped, first_line};
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use serde_json::{Map, Value as Json};
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek, SeekFrom};
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
        let content = header(&mut reader).map_err(|e| Error::in_file(self.path(), e))?;
        Ok((content, reader))
    }

    /// The sampling parameters that the file recommends in `general.sampling.*`, under the names that they
    /// have in a `generation_config.json`.
    ///
    /// # Errors
    /// As [`GgufSource::open`].
    pub fn recommended_sampling(&self) -> Result<Map<String, Json>> {
        let (content, _) = self.open()?;
        let recommended = content.metadata.iter().filter_map(|(key, value)| {
            let name = match key.strip_prefix("general.sampling.")? {
                "temp" => "temperature",
                "penalty_repeat" => "repetition_penalty",
                name => name,
            };
            Some((name.to_owned(), json(value)?))
        });
        Ok(recommended.collect())
    }

    /// llama.cpp's number of how an embedding model pools, if the file says it.
    ///
    /// # Errors
    /// As [`GgufSource::open`].
    pub fn pooling_type(&self) -> Result<Option<u64>> {
        let (content, _) = self.open()?;
        let Some(Value::String(architecture)) = content.metadata.get("general.architecture") else {
            return Ok(None);
        };
        let value = content
            .metadata
            .get(&format!("{architecture}.pooling_type"));
        Ok(value.and_then(|value| value.to_u64().ok()))
    }

    /// The file's path, or the embedded model's name, for messages.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Embedded(model) => Path::new(model.name),
        }
    }
}

/// A number as JSON, with as few digits as tell it from the others of its type.
fn json(value: &Value) -> Option<Json> {
    match value {
        Value::F32(x) => Some(x.to_string().parse::<f64>().ok()?.into()),
        Value::F64(x) => Some((*x).into()),
        Value::I32(n) => Some((*n).into()),
        Value::I64(n) => Some((*n).into()),
        other => Some(other.to_u64().ok()?.into()),
    }
}

/// Reads the header of a GGUF file and checks the places of its tensors.
///
/// # Errors
/// `Setup`, saying what is wrong.
pub(crate) fn header(reader: &mut (impl Read + Seek)) -> Result<Content> {
    let content = caught("the header", || {
        Content::read(reader)
            .map_err(|e| Error::setup(format!("not a readable GGUF file: {}", first_line(&e))))
    })?;
    let end = reader.seek(SeekFrom::End(0));
    let end = end.map_err(|e| Error::setup(e.to_string()))?;
    let available = end.saturating_sub(content.tensor_data_offset);
    for (name, tensor) in &content.tensor_infos {
        check(tensor, available)
            .map_err(|what| Error::setup(format!("tensor {}: {what}", clipped(name))))?;
    }
    Ok(content)
}

/// Checks that `tensor` has elements, that their number is one, and that they are among the `available`
/// bytes, before anything is computed with its shape.
fn check(tensor: &TensorInfo, available: u64) -> Result<(), String> {
    let (dims, kind) = (tensor.shape.dims(), tensor.ggml_dtype);
    let elements = dims
        .iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim));
    let (Some(elements @ 1..), Some(row)) = (elements, dims.last()) else {
        return Err(format!("its shape {dims:?} is not possible"));
    };
    if !row.is_multiple_of(kind.block_size()) {
        return Err(format!(
            "rows of {row} elements are no blocks of {}",
            kind.block_size()
        ));
    }
    let bytes = (elements / kind.block_size()).checked_mul(kind.type_size());
    let end = bytes.and_then(|bytes| tensor.offset.checked_add(bytes as u64));
    match end.is_some_and(|end| end <= available) {
        true => Ok(()),
        false => Err(format!("its shape {dims:?} is more than the file has")),
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
