//! The location of a model in GGUF files, and how to open it.

mod excerpt;
mod header;
mod split;

use crate::error::{Error, Result, clipped};
use candle_core::quantized::gguf_file::Value;
use serde_json::{Map, Value as Json};
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use excerpt::{Excerpt, ExcerptReader};
pub use header::{Header, TensorPlace};
pub use split::PartName;

/// A GGUF file: on disk, embedded in this program, or elsewhere. Of a model in several files, the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GgufSource {
    /// A file on disk.
    File(PathBuf),
    /// A file in this program.
    Embedded(&'static EmbeddedModel),
    /// The headers of all its files: it can be inspected, but not loaded.
    Headers(Arc<Vec<Excerpt>>),
}

/// A GGUF file that is embedded in this program.
#[derive(PartialEq, Eq)]
pub struct EmbeddedModel {
    /// The model's name for `--model`.
    pub name: &'static str,
    bytes: &'static [u8],
}

/// A source of a GGUF file's bytes.
pub trait Reader: Read + Seek + Send {}
impl<T: Read + Seek + Send> Reader for T {}

/// The open files of a model.
pub struct GgufParts(Vec<Box<dyn Reader>>);

impl GgufParts {
    /// The bytes of a tensor of the model's header, which was checked: they are in its file.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn read(&mut self, place: &TensorPlace) -> Result<Vec<u8>> {
        let failed = |e: std::io::Error| Error::setup(e.to_string());
        let Some(file) = self.0.get_mut(place.part) else {
            return Err(Error::internal("a tensor is in no file of its model"));
        };
        file.seek(SeekFrom::Start(place.offset)).map_err(failed)?;
        let mut bytes = vec![0; place.bytes()];
        file.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}

/// The embedded models: a small target, and a draft for it. Empty without the feature
/// `embedded-model`.
pub static EMBEDDED: &[EmbeddedModel] = &[
    #[cfg(feature = "embedded-model")]
    EmbeddedModel {
        name: "foretoken-demo",
        bytes: foretoken_demo_models::TARGET,
    },
    #[cfg(feature = "embedded-model")]
    EmbeddedModel {
        name: "foretoken-demo-draft",
        bytes: foretoken_demo_models::DRAFT,
    },
];

impl GgufSource {
    /// The embedded model called `name`.
    pub fn embedded(name: &str) -> Option<Self> {
        let found = EMBEDDED.iter().find(|model| model.name == name);
        found.map(Self::Embedded)
    }

    /// Opens all files of the model and reads their headers.
    ///
    /// # Errors
    /// `Setup`, naming the file, if it does not exist or is not GGUF, or parts are missing.
    pub fn open(&self) -> Result<(Header, GgufParts)> {
        let files = self.readers()?;
        let count = files.len();
        let mut whole = Header::default();
        let mut parts: Vec<Box<dyn Reader>> = Vec::with_capacity(count);
        for (number, (file, mut reader)) in files.into_iter().enumerate() {
            let wrong = |what: String| Error::in_file(&file, what);
            let header = header::read(&mut reader).map_err(|e| wrong(e.to_string()))?;
            check_part(&header, number, count).map_err(wrong)?;
            for (name, mut place) in header.tensors {
                place.part = number;
                if whole.tensors.insert(name.clone(), place).is_some() {
                    let name = clipped(&name);
                    return Err(wrong(format!("another part has tensor {name}, too")));
                }
            }
            if number == 0 {
                whole.metadata = header.metadata;
            }
            parts.push(reader);
        }
        let wanted = whole.metadata.get(SPLIT_TENSORS).and_then(natural);
        let found = whole.tensors.len() as u64;
        match wanted.filter(|&wanted| count > 1 && wanted != found) {
            None => Ok((whole, GgufParts(parts))),
            Some(wanted) => {
                let what =
                    format!("its parts have {found} tensors, but {SPLIT_TENSORS} is {wanted}");
                Err(Error::in_file(self.path(), what))
            }
        }
    }

    /// All files of the model, with the names that they have in messages.
    fn readers(&self) -> Result<Vec<(PathBuf, Box<dyn Reader>)>> {
        let named = |name: &Path, reader: Box<dyn Reader>| (name.to_owned(), reader);
        match self {
            Self::Embedded(model) => {
                let reader = Box::new(Cursor::new(model.bytes));
                Ok(vec![named(self.path(), reader)])
            }
            Self::Headers(files) => {
                let files = files.iter();
                Ok(files
                    .map(|file| named(&file.name, Box::new(file.reader())))
                    .collect())
            }
            Self::File(path) => {
                let files = split::files(path)?.into_iter().map(|file| {
                    let opened = File::open(&file).map_err(|e| Error::in_file(&file, e))?;
                    Ok(named(&file, Box::new(BufReader::new(opened))))
                });
                files.collect()
            }
        }
    }

    /// The bytes of an embedded model.
    pub fn embedded_bytes(&self) -> Option<&'static [u8]> {
        match self {
            Self::File(_) | Self::Headers(_) => None,
            Self::Embedded(model) => Some(model.bytes),
        }
    }

    /// The files of the model on this machine; none if it is embedded.
    ///
    /// # Errors
    /// `Setup`, if parts are missing.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        match self {
            Self::File(path) => split::files(path),
            Self::Embedded(_) | Self::Headers(_) => Ok(Vec::new()),
        }
    }

    /// The sampling parameters that the file recommends in `general.sampling.*`, under the names that they
    /// have in a `generation_config.json`.
    ///
    /// # Errors
    /// Returns the errors of [`GgufSource::open`].
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
    /// Returns the errors of [`GgufSource::open`].
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

    /// The names that the file gives its model: first the addresses of the models that it was made of.
    ///
    /// # Errors
    /// Returns the errors of [`GgufSource::open`].
    pub fn model_names(&self) -> Result<Vec<String>> {
        let (content, _) = self.open()?;
        let keys = [
            "general.base_model.0.repo_url",
            "general.source.huggingface.repository",
            "general.name",
            "general.base_model.0.name",
        ];
        let names = keys
            .into_iter()
            .filter_map(|key| match content.metadata.get(key)? {
                Value::String(name) => Some(name.clone()),
                _ => None,
            });
        Ok(names.collect())
    }

    /// The file's path, or the embedded model's name, for messages.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Embedded(model) => Path::new(model.name),
            Self::Headers(files) => files.first().map_or(Path::new(""), |file| &file.name),
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

/// Keys of a model in several files: the number of a part from 0, how many there are, and the tensors of all.
const SPLIT_NUMBER: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// Checks that what a file says of its place agrees with its name.
fn check_part(header: &Header, number: usize, count: usize) -> Result<(), String> {
    let says = |key: &str| header.metadata.get(key).and_then(natural);
    // 0 of 0 is a whole model.
    let (of, at) = (
        says(SPLIT_COUNT).unwrap_or(0),
        says(SPLIT_NUMBER).unwrap_or(0),
    );
    if of.max(1) == count as u64 && at == number as u64 {
        Ok(())
    } else {
        Err(format!(
            "it is part {} of {of}: the files of a model must be named NAME-00001-of-{of:05}.gguf and so on",
            at.saturating_add(1)
        ))
    }
}

/// A number that is not negative, of any type.
fn natural(value: &Value) -> Option<u64> {
    match value {
        Value::I32(n) => (*n).try_into().ok(),
        Value::I64(n) => (*n).try_into().ok(),
        other => other.to_u64().ok(),
    }
}

/// Reads the header of a GGUF file and checks the places of its tensors.
///
/// # Errors
/// `Setup`, saying what is wrong.
pub fn header(reader: &mut (impl Read + Seek)) -> Result<Header> {
    header::read(reader)
}

/// The tensors with factors of ropes. A header may list many others, and each that is read may be a request.
const FACTOR_TENSORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];
/// Maximum bytes of the factors of a rope.
const MAX_FACTOR_BYTES: usize = 64 << 10;

/// Reads what a model is inspected with: the header of a file, and the factors of ropes, which are checked.
///
/// # Errors
/// Returns the errors of [`header`]. `Setup` also if the factors of a rope cannot be read.
pub fn read_inspected(reader: &mut (impl Read + Seek)) -> Result<()> {
    let failed = |e: std::io::Error| Error::setup(e.to_string());
    let header = header(reader)?;
    for place in FACTOR_TENSORS
        .map(|name| header.tensors.get(name))
        .into_iter()
        .flatten()
    {
        if place.bytes() <= MAX_FACTOR_BYTES {
            reader.seek(SeekFrom::Start(place.offset)).map_err(failed)?;
            let mut bytes = vec![0; place.bytes()];
            reader.read_exact(&mut bytes).map_err(failed)?;
        }
    }
    Ok(())
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
