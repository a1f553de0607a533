//! FP4 as compressed-tensors and NVIDIA's Model Optimizer pack it, two floats of 4 bits in a byte, the first in its lower
//! half: NVFP4, whose groups of 16 inputs have scales of FP8, and whose matrices have one of all groups, and MXFP4, whose
//! groups of 32 have powers of two (Open Compute Project 2023, "Microscaling Formats (MX)").

use super::fp8::{E4M3, finite, table};
use super::mxfp4::{self, VALUES, power_of_two};
use super::parts::{Part, Parts};
use super::scheme::{Blocks, FloatFormat, Opened, Scheme, Unpacked};
use crate::checkpoint::finite::MAX_MXFP4_EXPONENT;
use foretoken_core::error::Result;
use foretoken_kernels::quant::{BLOCK, BlockType, Nvfp4};

/// The ends of the names of the scales of matrices: of compressed-tensors, and of Model Optimizer.
const DIVISOR: &str = "weight_global_scale";
const FACTOR: &str = "weight_scale_2";

/// A format of FP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp4 {
    /// NVFP4 of compressed-tensors: the scale of a matrix divides those of groups.
    Nv,
    /// NVFP4 of Model Optimizer: it multiplies them.
    NvTimes,
    Mx,
}

impl Fp4 {
    /// Inputs of a group.
    pub fn group(self) -> usize {
        match self {
            Self::Nv | Self::NvTimes => Nvfp4::GROUP,
            Self::Mx => BLOCK,
        }
    }

    /// The end of the name of the numbers.
    fn numbers(self) -> &'static str {
        match self {
            Self::Nv | Self::Mx => "weight_packed",
            Self::NvTimes => "weight",
        }
    }
}

impl Scheme for Fp4 {
    fn label(&self) -> String {
        match self {
            Self::Nv | Self::NvTimes => "NVFP4".into(),
            Self::Mx => "MXFP4".into(),
        }
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        match self {
            Self::Nv | Self::Mx => parts.has(self.numbers()),
            // Its numbers have the name of a dense matrix.
            Self::NvTimes => parts.has(FACTOR),
        }
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        let (outputs, inputs) = shape;
        let group = self.group();
        if !inputs.is_multiple_of(group) {
            let what = format!("needs a multiple of {group} inputs");
            return Err(parts.error(self.numbers(), &what));
        }
        // Scales of activations, which are not quantized here.
        for end in ["input_global_scale", "input_scale"] {
            parts.skip(end);
        }
        let numbers = parts.get(self.numbers(), &[outputs, inputs / 2], &["U8"])?;
        let grid = [outputs, inputs / group];
        match self {
            Self::Nv => open_nv(parts, numbers, grid, inputs, DIVISOR),
            Self::NvTimes => open_nv(parts, numbers, grid, inputs, FACTOR),
            Self::Mx => open_mx(parts, numbers, grid, inputs),
        }
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        (*self == Self::Mx).then_some(BlockType::Mxfp4)
    }

    fn floats(&self, _: (usize, usize)) -> Option<FloatFormat> {
        (*self != Self::Mx).then_some(FloatFormat::Nvfp4)
    }
}

/// Checks the scales of NVFP4, of which that of the matrix has the name `end`.
fn open_nv<'a>(
    parts: &mut Parts<'a>,
    numbers: Part<'a>,
    grid: [usize; 2],
    inputs: usize,
    end: &str,
) -> Result<Opened<'a>> {
    let scales = parts.get("weight_scale", &grid, &[E4M3])?;
    let whole = parts.scales(end, &[1, 1], &["F32"])?;
    let divides = end == DIVISOR;
    let unpack = move || {
        let of_all = whole.floats()?[0];
        if !of_all.is_normal() {
            return Err(whole.error("is no divisor or factor of scales"));
        }
        let table = table();
        let scale = |&byte: &u8| {
            let scale = table[usize::from(byte)];
            if divides {
                scale / of_all
            } else {
                scale * of_all
            }
        };
        let bytes = finite(&scales)?;
        Ok(Floats {
            numbers: numbers.data()?,
            inputs,
            scales: bytes.iter().map(scale).collect(),
            stored: Stored::Floats {
                bytes,
                factor: if divides { of_all.recip() } else { of_all },
            },
        })
    };
    Ok(Opened::new(None, unpack))
}

/// Checks the scales of MXFP4.
fn open_mx<'a>(
    parts: &mut Parts<'a>,
    numbers: Part<'a>,
    grid: [usize; 2],
    inputs: usize,
) -> Result<Opened<'a>> {
    let scales = parts.get("weight_scale", &grid, &["U8", "F8_E8M0"])?;
    let unpack = move || {
        let exponents = scales.data()?;
        if exponents.iter().any(|&of| of > MAX_MXFP4_EXPONENT) {
            return Err(scales.not_finite());
        }
        Ok(Floats {
            numbers: numbers.data()?,
            inputs,
            scales: exponents.iter().map(|&e| power_of_two(e)).collect(),
            stored: Stored::Exponents(exponents),
        })
    };
    Ok(Opened::new(Some(BlockType::Mxfp4), unpack))
}

struct Floats<'a> {
    numbers: &'a [u8],
    inputs: usize,
    /// `[outputs, groups]`.
    scales: Vec<f32>,
    stored: Stored<'a>,
}

/// Scales as the file has them.
enum Stored<'a> {
    /// Of NVFP4, with a factor of all.
    Floats { bytes: &'a [u8], factor: f32 },
    /// Of MXFP4.
    Exponents(&'a [u8]),
}

impl Unpacked for Floats<'_> {
    fn row(&self, output: usize, row: &mut [f32]) {
        let groups = self.scales.len() * self.inputs / (2 * self.numbers.len()).max(1);
        let group = self.inputs / groups;
        let numbers = &self.numbers[output * self.inputs / 2..][..self.inputs / 2];
        let scales = &self.scales[output * groups..][..groups];
        for (input, value) in row.iter_mut().enumerate() {
            let number = numbers[input / 2] >> (input % 2 * 4) & 15;
            *value = scales[input / group] * VALUES[usize::from(number)];
        }
    }

    fn blocks(&self) -> Option<Blocks> {
        let Stored::Exponents(exponents) = self.stored else {
            return None;
        };
        Some(Blocks {
            kind: BlockType::Mxfp4,
            data: mxfp4::blocks(self.numbers, exponents),
            inputs: None,
        })
    }

    fn nvfp4(&self) -> Option<Nvfp4<'_>> {
        let Stored::Floats { bytes, factor } = self.stored else {
            return None;
        };
        let matrix = Nvfp4 {
            shape: (2 * self.numbers.len() / self.inputs, self.inputs),
            numbers: self.numbers,
            scales: bytes,
            factor,
        };
        matrix.can_hold().then_some(matrix)
    }
}
