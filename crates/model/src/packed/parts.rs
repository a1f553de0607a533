//! The tensors of one packed matrix, which strangers wrote: each is checked before it is used.

use super::mxfp4::power_of_two;
use crate::checkpoint::finite;
use crate::checkpoint::raw_tensors::RawTensors;
use candle_core::DType;
use foretoken_core::error::{Error, Result, clipped};
use half::{bf16, f16};

/// The dtypes of scales.
pub const FLOATS: &[&str] = &["F16", "BF16", "F32"];
/// The dtype of words with several numbers each.
pub const WORDS: &[&str] = &["I32"];

/// The largest scale: its product with any number of 8 bits, or FP8, is far from infinite.
const MAX_SCALE: f32 = 1e30;

/// The tensors whose names begin with that of a matrix.
pub struct Parts<'a> {
    source: &'a dyn RawTensors,
    /// The name of the matrix in the checkpoint, without `.weight`.
    module: &'a str,
    /// The names of the tensors that were asked for.
    pub read: Vec<String>,
    /// Bytes of the tensors that were asked for.
    pub bytes: u64,
}

/// One tensor of [`Parts`].
pub struct Part<'a> {
    pub name: String,
    pub dtype: String,
    pub dims: Vec<usize>,
    /// The tensor's bytes; `None` if only headers are here.
    data: Option<&'a [u8]>,
}

impl<'a> Parts<'a> {
    pub fn new(source: &'a dyn RawTensors, module: &'a str) -> Self {
        Self {
            source,
            module,
            read: Vec::new(),
            bytes: 0,
        }
    }

    /// Whether there is the tensor with this end.
    pub fn has(&self, end: &str) -> bool {
        self.source.has(&self.name(end))
    }

    /// Whether there is the tensor with this end, in this dtype.
    pub fn has_dtype(&self, end: &str, dtype: &str) -> bool {
        let raw = self.source.raw(&self.name(end));
        raw.is_ok_and(|raw| raw.dtype == dtype)
    }

    /// The name of the tensor with this end.
    pub fn name(&self, end: &str) -> String {
        format!("{}.{end}", self.module)
    }

    /// The tensor with this end, of any shape and dtype.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing.
    pub fn any(&mut self, end: &str) -> Result<Part<'a>> {
        let name = self.name(end);
        let raw = self.source.raw(&name)?;
        self.read.push(name.clone());
        self.bytes += raw.bytes;
        Ok(Part {
            name,
            dtype: raw.dtype,
            dims: raw.dims,
            data: raw.data,
        })
    }

    /// The tensor with this end, which must have the shape `dims` and one of `dtypes`.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing, or another one.
    pub fn get(&mut self, end: &str, dims: &[usize], dtypes: &[&str]) -> Result<Part<'a>> {
        let part = self.any(end)?;
        part.check_dtype(dtypes)?;
        if part.dims != dims {
            return Err(Error::wrong_shape(&part.name, &part.dims, dims));
        }
        Ok(part)
    }

    /// The scales with this end for a grid of tiles. Dimensions of one may be missing, or be there.
    ///
    /// # Errors
    /// Returns the errors of [`Parts::get`].
    pub fn scales(&mut self, end: &str, grid: &[usize; 2], dtypes: &[&str]) -> Result<Part<'a>> {
        let part = self.any(end)?;
        part.check_dtype(dtypes)?;
        let real = |dims: &[usize]| -> Vec<usize> {
            dims.iter().copied().filter(|&dim| dim != 1).collect()
        };
        if real(&part.dims) != real(grid) {
            return Err(Error::wrong_shape(&part.name, &part.dims, grid));
        }
        Ok(part)
    }

    /// The tensor with this end, which does not count as asked for.
    ///
    /// # Errors
    /// Returns the errors of [`Parts::any`].
    pub fn peek(&self, end: &str) -> Result<Part<'a>> {
        Self::new(self.source, self.module).any(end)
    }

    /// Leaves the tensor with this end unread, if there is one.
    pub fn skip(&mut self, end: &str) {
        self.read.push(self.name(end));
    }

    /// The error that the tensor with this end is not as it must be.
    pub fn error(&self, end: &str, what: &str) -> Error {
        Error::setup(format!("tensor {} {what}", clipped(&self.name(end))))
    }
}

impl<'a> Part<'a> {
    /// Checks the dtype.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is none of `dtypes`.
    pub fn check_dtype(&self, dtypes: &[&str]) -> Result<()> {
        if dtypes.contains(&self.dtype.as_str()) {
            return Ok(());
        }
        Err(self.error(&format!(
            "has dtype {}, which is not supported here: only {} is",
            clipped(&self.dtype),
            dtypes.join(" or ")
        )))
    }

    /// The error that it is not as it must be.
    pub fn error(&self, what: &str) -> Error {
        Error::setup(format!("tensor {} {what}", clipped(&self.name)))
    }

    /// The tensor's bytes.
    ///
    /// # Errors
    /// If only headers are here.
    pub fn data(&self) -> Result<&'a [u8]> {
        let data = self.data;
        data.ok_or_else(|| Error::internal("there are no weights that have values"))
    }

    /// The tensor's values, which must be finite. Exponents of `F8_E8M0` become powers of two.
    ///
    /// # Errors
    /// A setup error that names the tensor if a value is NaN or infinite.
    pub fn floats(&self) -> Result<Vec<f32>> {
        let data = self.data()?;
        let halves = || data.as_chunks::<2>().0.iter().copied();
        let (dtype, values) = match self.dtype.as_str() {
            "F16" => {
                let values = halves().map(|b| f16::from_le_bytes(b).to_f32());
                (DType::F16, values.collect())
            }
            "BF16" => {
                let values = halves().map(|b| bf16::from_le_bytes(b).to_f32());
                (DType::BF16, values.collect())
            }
            "F8_E8M0" => {
                if data.contains(&u8::MAX) {
                    return Err(self.not_finite());
                }
                (DType::U8, data.iter().map(|&e| power_of_two(e)).collect())
            }
            _ => {
                let words = data.as_chunks::<4>().0.iter();
                (DType::F32, words.map(|b| f32::from_le_bytes(*b)).collect())
            }
        };
        if finite::floats(dtype, data) {
            Ok(values)
        } else {
            Err(self.not_finite())
        }
    }

    /// The tensor's values as scales: small enough that no weight is infinite.
    ///
    /// # Errors
    /// Returns the errors of [`Part::floats`]. A scale that is too large is an error, too.
    pub fn scales(&self) -> Result<Vec<f32>> {
        let scales = self.floats()?;
        if scales.iter().all(|scale| scale.abs() <= MAX_SCALE) {
            Ok(scales)
        } else {
            Err(self.error(&format!("has a scale above {MAX_SCALE:e}")))
        }
    }

    /// The error that a value is NaN or infinite.
    pub fn not_finite(&self) -> Error {
        self.error("contains NaN or infinity")
    }

    /// The tensor's words of 32 bits.
    ///
    /// # Errors
    /// Returns the errors of [`Part::data`].
    pub fn words(&self) -> Result<Words<'a>> {
        Ok(Words(self.data()?.as_chunks().0))
    }
}

/// Number of values of `bits` bits in a word of 32 bits.
pub fn numbers_of_word(bits: u32) -> usize {
    (u32::BITS / bits) as usize
}

/// Words of 32 bits with several numbers each, the first in the lowest bits.
#[derive(Clone, Copy)]
pub struct Words<'a>(&'a [[u8; 4]]);

impl Words<'_> {
    /// Word `at`.
    pub fn word(self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at])
    }

    /// Number `place` of word `at`, of `bits` bits.
    pub fn number(self, at: usize, place: usize, bits: u32) -> u8 {
        (self.word(at) >> (place as u32 * bits) & ((1 << bits) - 1)) as u8
    }
}
