//! Reads the headers of GGUF files: candle's reader knows fewer types of blocks.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. All numbers are little-endian.

use crate::error::{Error, Result, clipped};
use candle_core::quantized::gguf_file::Value;
use foretoken_kernels::quant::BlockType;
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};

/// The header of a model's file, or of all its files.
#[derive(Debug, Default)]
pub struct Header {
    /// The metadata values by key.
    pub metadata: HashMap<String, Value>,
    /// The tensors by name.
    pub tensors: HashMap<String, TensorPlace>,
}

/// Type, shape and place of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorPlace {
    /// The type of the tensor's blocks.
    pub kind: BlockType,
    /// Outputs first.
    pub dims: Vec<usize>,
    /// The file that has it, of those in which the model is.
    pub(super) part: usize,
    /// Offset of the tensor's first byte in that file, in bytes.
    pub(super) offset: u64,
}

impl TensorPlace {
    /// Number of values.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> usize {
        self.elements() / self.kind.block_size() * self.kind.type_size()
    }
}

// Limits on what is kept of a header, which takes more memory than it has bytes.
const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEYS: u64 = 1 << 16;
/// Maximum number of values of all arrays together: vocabularies have a few million.
const MAX_VALUES: u64 = 1 << 23;
const MAX_DIMS: u32 = 4;
/// Maximum depth of arrays within arrays.
const MAX_DEPTH: usize = 4;
/// Bytes of a string that are read at once.
const STRING_STEP: usize = 1 << 20;
const ALIGNMENT: &str = "general.alignment";

/// Bytes that are left of a file.
struct Bytes<'r, R> {
    reader: &'r mut R,
    left: u64,
    /// Values of arrays so far.
    values: u64,
    /// Whether lengths have 32 bits, as in the first version.
    short: bool,
}

type Read1<T> = Result<T, String>;

impl<R: Read> Bytes<'_, R> {
    fn array<const N: usize>(&mut self) -> Read1<[u8; N]> {
        let mut bytes = [0; N];
        self.count(N as u64)?;
        self.reader
            .read_exact(&mut bytes)
            .map_err(|e| e.to_string())?;
        Ok(bytes)
    }

    /// Takes `bytes` off what is left.
    fn count(&mut self, bytes: u64) -> Read1<()> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or("it ends within its header")?;
        Ok(())
    }

    fn u32(&mut self) -> Read1<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Read1<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn length(&mut self) -> Read1<u64> {
        if self.short {
            Ok(self.u32()?.into())
        } else {
            self.u64()
        }
    }

    /// A number of `what`, each of which has at least `bytes` bytes.
    fn number_of(&mut self, what: &str, max: u64, bytes: u64) -> Read1<u64> {
        let count = self.length()?;
        if count > max {
            return Err(format!("it has {count} {what}; up to {max} are supported"));
        }
        if count.saturating_mul(bytes) > self.left {
            Err(format!("it has no room for {count} {what}"))
        } else {
            Ok(count)
        }
    }

    /// A string, without NULs at its end; what is not UTF-8 becomes U+FFFD.
    fn string(&mut self) -> Read1<String> {
        let len = self.number_of("bytes in a string", 1 << 30, 1)?;
        self.count(len)?;
        let mut bytes = Vec::new();
        // A file that is elsewhere only claims to be long: memory is taken as its bytes arrive.
        while bytes.len() < len as usize {
            let start = bytes.len();
            bytes.resize((start + STRING_STEP).min(len as usize), 0);
            self.reader
                .read_exact(&mut bytes[start..])
                .map_err(|e| e.to_string())?;
        }
        let end = bytes.iter().rposition(|&byte| byte != 0);
        bytes.truncate(end.map_or(0, |last| last + 1));
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A value of type `kind` within `depth` arrays.
    fn value(&mut self, kind: u32, depth: usize) -> Read1<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(format!("{other} is no bool")),
            },
            8 => Value::String(self.string()?),
            9 if depth < MAX_DEPTH => {
                let kind = self.u32()?;
                let bytes = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    10..=12 => 8,
                    _ => 4,
                };
                let count = self.number_of("values in an array", MAX_VALUES, bytes)?;
                self.values += count;
                if self.values > MAX_VALUES {
                    return Err(format!(
                        "its arrays have over {MAX_VALUES} values, which is the limit"
                    ));
                }
                let values = (0..count).map(|_| self.value(kind, depth + 1));
                Value::Array(values.collect::<Read1<_>>()?)
            }
            9 => return Err(format!("it has over {MAX_DEPTH} arrays within each other")),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("{other} is no type of a value")),
        })
    }

    fn metadata(&mut self, count: u64) -> Read1<HashMap<String, Value>> {
        let mut metadata = HashMap::new();
        for _ in 0..count {
            let key = self.string()?;
            let kind = self.u32()?;
            let named = |e| format!("{}: {e}", clipped(&key));
            let value = self.value(kind, 0).map_err(named)?;
            if metadata.contains_key(&key) {
                return Err(format!("it has {} twice", clipped(&key)));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    /// The name of a tensor and what is said of it; its offset is that among the data of tensors.
    fn tensor(&mut self) -> Read1<(String, TensorPlace)> {
        let name = self.string()?;
        let named = |e: String| format!("tensor {}: {e}", clipped(&name));
        let count = self.u32()?;
        if count > MAX_DIMS {
            return Err(named(format!(
                "{count} dimensions; up to {MAX_DIMS} are supported"
            )));
        }
        let mut dims = Vec::new();
        for _ in 0..count {
            let dim = self.length()?;
            dims.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        dims.reverse();
        let kind = BlockType::of_number(self.u32()?).map_err(named)?;
        let offset = self.u64()?;
        let part = 0;
        let place = TensorPlace {
            kind,
            dims,
            part,
            offset,
        };
        Ok((name, place))
    }
}

/// Reads the header of a file, and checks that its tensors are in it.
///
/// # Errors
/// `Setup` if the file is not a readable GGUF file. The message says what is wrong.
pub(super) fn read<R: Read + Seek>(reader: &mut R) -> Result<Header> {
    read_checked(reader)
        .map_err(|e| Error::setup(format!("not a readable GGUF file: {}", clipped(&e))))
}

fn read_checked<R: Read + Seek>(reader: &mut R) -> Read1<Header> {
    let failed = |e: std::io::Error| e.to_string();
    let end = reader.seek(SeekFrom::End(0)).map_err(failed)?;
    reader.seek(SeekFrom::Start(0)).map_err(failed)?;
    let mut bytes = Bytes {
        reader,
        left: end,
        values: 0,
        short: false,
    };
    if &bytes.array()? != b"GGUF" {
        return Err("it does not begin with GGUF".into());
    }
    let version = bytes.u32()?;
    if !(1..=3).contains(&version) {
        return Err(format!(
            "version {version} is not supported: only 1, 2 and 3 are"
        ));
    }
    bytes.short = version == 1;
    let prefix = if bytes.short { 4 } else { 8 };
    let tensors = bytes.number_of("tensors", MAX_TENSORS, prefix + 16)?;
    let keys = bytes.number_of("keys", MAX_KEYS, prefix + 5)?;
    let mut header = Header {
        metadata: bytes.metadata(keys)?,
        tensors: HashMap::new(),
    };
    for _ in 0..tensors {
        let (name, place) = bytes.tensor()?;
        if header.tensors.contains_key(&name) {
            return Err(format!("it has tensor {} twice", clipped(&name)));
        }
        header.tensors.insert(name, place);
    }
    let alignment = match header.metadata.get(ALIGNMENT) {
        None => 32,
        Some(value) => match value.to_u64() {
            Ok(alignment) if alignment.is_power_of_two() => alignment,
            _ => return Err(format!("{ALIGNMENT} {value:?} is no power of two")),
        },
    };
    let data = (end - bytes.left)
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| format!("{ALIGNMENT} {alignment} is too much"))?;
    let available = end.saturating_sub(data);
    for (name, place) in &mut header.tensors {
        check(place, available).map_err(|what| format!("tensor {}: {what}", clipped(name)))?;
        place.offset += data;
    }
    check_apart(&header.tensors)?;
    Ok(header)
}

/// Checks that no tensors have bytes in common: a small file could have any number of large ones.
fn check_apart(tensors: &HashMap<String, TensorPlace>) -> Read1<()> {
    let mut places: Vec<(u64, &str, u64)> = Vec::new();
    for (name, place) in tensors {
        places.push((place.offset, name.as_str(), place.bytes() as u64));
    }
    places.sort_unstable();
    for (&(start, name, bytes), &(next, other, _)) in places.iter().zip(places.iter().skip(1)) {
        if start + bytes > next {
            let (name, other) = (clipped(name), clipped(other));
            return Err(format!("tensors {name} and {other} have bytes in common"));
        }
    }
    Ok(())
}

/// Checks that a tensor has elements, that their number is one, and that they are among the `available`
/// bytes, before anything is computed with its shape.
fn check(place: &TensorPlace, available: u64) -> Read1<()> {
    let (dims, kind) = (&place.dims, place.kind);
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
    let end = bytes.and_then(|bytes| place.offset.checked_add(bytes as u64));
    if end.is_some_and(|end| end <= available) {
        Ok(())
    } else {
        Err(format!("its shape {dims:?} is more than the file has"))
    }
}

#[cfg(test)]
mod tests;
