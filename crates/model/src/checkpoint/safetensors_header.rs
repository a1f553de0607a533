//! Reads the headers of safetensors files whose weights are not on this machine.
//!
//! The format: <https://github.com/huggingface/safetensors#format>. Eight bytes are the length of a JSON object, the
//! header; the tensors follow it.

use foretoken_core::error::{Error, Result, clipped};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};

/// Maximum bytes of a header.
pub(crate) const MAX_BYTES: u64 = 64 << 20;
/// Bytes of the length before it.
const LENGTH_BYTES: u64 = 8;
/// Maximum number of dimensions of a tensor. A matrix of experts has 3, a convolution up to 5.
const MAX_DIMS: usize = 8;
/// The entry of a header that is not a tensor.
const METADATA: &str = "__metadata__";

/// The tensors of a checkpoint, by name.
pub type TensorHeaders = HashMap<String, TensorHeader>;

/// Type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TensorHeader {
    /// The dtype as the file writes it, for example `BF16`.
    pub dtype: String,
    /// The dimensions, outermost first.
    #[serde(rename = "shape")]
    pub dims: Vec<usize>,
    /// Offsets of the tensor's first byte and of the byte after its last one, counted from the end of the header.
    #[serde(rename = "data_offsets")]
    place: (u64, u64),
}

/// Adds the tensors of a file to `tensors`, checked to be in it.
///
/// # Errors
/// `Setup`, saying what is wrong.
pub fn read(reader: &mut (impl Read + Seek), tensors: &mut TensorHeaders) -> Result<()> {
    let read = parse(reader, tensors);
    read.map_err(|e| Error::setup(format!("not a readable safetensors file: {}", clipped(&e))))
}

fn parse(
    reader: &mut (impl Read + Seek),
    tensors: &mut TensorHeaders,
) -> std::result::Result<(), String> {
    let failed = |e: std::io::Error| e.to_string();
    let size = reader.seek(SeekFrom::End(0)).map_err(failed)?;
    reader.seek(SeekFrom::Start(0)).map_err(failed)?;
    let mut length = [0; LENGTH_BYTES as usize];
    reader.read_exact(&mut length).map_err(failed)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(format!(
            "its header has {length} bytes; up to {MAX_BYTES} are supported"
        ));
    }
    // Memory is taken as bytes arrive.
    let mut json = Vec::new();
    reader.take(length).read_to_end(&mut json).map_err(failed)?;
    let data = size.checked_sub(LENGTH_BYTES + length);
    let data = data.ok_or("it ends within its header")?;
    let entries: HashMap<String, &RawValue> =
        serde_json::from_slice(&json).map_err(|e| format!("its header: {e}"))?;
    for (name, entry) in entries {
        if name == METADATA {
            continue;
        }
        let wrong = |what: String| format!("tensor {}: {what}", clipped(&name));
        let tensor: TensorHeader =
            serde_json::from_str(entry.get()).map_err(|e| wrong(e.to_string()))?;
        tensor.check(data).map_err(wrong)?;
        tensors.insert(name, tensor);
    }
    Ok(())
}

impl TensorHeader {
    /// Number of its bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.place.1 - self.place.0
    }

    /// Checks that it is among `data` bytes, and as long as its shape says.
    fn check(&self, data: u64) -> std::result::Result<(), String> {
        let (start, end) = self.place;
        let dims = &self.dims;
        if start > end || end > data {
            return Err(format!(
                "it is at bytes {start} to {end} of {data} that the file has"
            ));
        }
        if dims.len() > MAX_DIMS {
            return Err(format!(
                "it has {} dimensions; up to {MAX_DIMS} are supported",
                dims.len()
            ));
        }
        let mut product = dims.iter().map(|&dim| dim as u64);
        let elements = product.try_fold(1u64, u64::checked_mul);
        let stored_bits = u128::from(end - start) * 8;
        let fits = elements.is_some_and(|elements| match self.element_bits() {
            Some(bits) => u128::from(elements) * bits == stored_bits,
            None => u128::from(elements) <= stored_bits,
        });
        if fits {
            Ok(())
        } else {
            Err(format!(
                "{} of shape {dims:?} has not {} bytes",
                clipped(&self.dtype),
                end - start
            ))
        }
    }

    /// Bits of a value; `None` of an unknown type, whose values have at least one.
    fn element_bits(&self) -> Option<u128> {
        match self.dtype.as_str() {
            "F64" | "I64" | "U64" | "C64" => Some(64),
            "F32" | "I32" | "U32" => Some(32),
            "F16" | "BF16" | "I16" | "U16" => Some(16),
            "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(8),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn tensors_are_told_without_their_data() {
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
        let mut tensors = TensorHeaders::new();
        read(&mut Cursor::new(file(header, 12)), &mut tensors).unwrap();
        let a = &tensors["a"];
        assert_eq!((tensors.len(), a.dtype.as_str()), (1, "BF16"));
        assert_eq!(a.dims, [2, 3]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let tensor = |dtype: &str, shape: &str, offsets: &str| {
            let entry = format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}"#);
            file(&format!(r#"{{"a":{{{entry}}}}}"#), 12)
        };
        let mut long = u64::MAX.to_le_bytes().to_vec();
        long.resize(100, b' ');
        let mut short = file("{}", 0);
        short[0] = 200;
        let (long_dims, many) = ("[4294967296,4294967296]", "[3,1,1,1,1,1,1,1,1]");
        let large = "[4611686018427387904]";
        let cases = [
            (Vec::new(), "fill whole buffer"),
            (long, "up to 67108864 are supported"),
            (short, "ends within its header"),
            (file("{", 0), "its header"),
            (file(r#"{"a":1}"#, 0), "tensor a"),
            (tensor("F32", "[3]", "[0,13]"), "of 12 that the file has"),
            (tensor("F32", "[3]", "[9,8]"), "of 12 that the file has"),
            (tensor("F32", "[2]", "[0,12]"), "has not 12 bytes"),
            (tensor("F32", long_dims, "[0,12]"), "has not 12 bytes"),
            (tensor("F32", "[-1]", "[0,12]"), "tensor a"),
            (tensor("F32", many, "[0,12]"), "9 dimensions; up to 8 are"),
            (tensor("F8_E4M3", large, "[0,0]"), "has not 0 bytes"),
            (tensor("?", large, "[0,0]"), "has not 0 bytes"),
        ];
        for (bytes, needle) in cases {
            let error = read(&mut Cursor::new(bytes), &mut TensorHeaders::new());
            let error = error.unwrap_err().to_string();
            assert!(error.contains(needle), "{needle}: {error}");
        }
    }
}
