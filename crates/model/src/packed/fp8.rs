//! FP8: floats of 8 bits with 4 of an exponent (E4M3), and scales of tiles. They stay as they are where there is a product for
//! them; no format of blocks holds them, so that they become dense elsewhere.

use super::parts::{FLOATS, Part, Parts};
use super::scheme::{FloatFormat, Opened, Scheme, Unpacked};
use crate::config::keys::Keys;
use float8::F8E4M3;
use foretoken_core::error::Result;
use foretoken_kernels::dense::Float8;
use foretoken_kernels::quant::BlockType;

/// The dtype of the floats.
pub const E4M3: &str = "F8_E4M3";
/// The dtypes of the scales.
const SCALES: [&str; 4] = [FLOATS[0], FLOATS[1], FLOATS[2], "F8_E8M0"];

/// Keys that say nothing about the weights: activations are not quantized here.
const HARMLESS: &str = "
    activation_scheme dequantize ignored_layers is_checkpoint_fp8_serialized modules_to_convert
    modules_to_not_convert quant_method scale_fmt weight_per_tensor";

/// `quant_method: fp8`.
#[derive(Debug)]
pub struct Fp8 {
    /// Outputs and inputs of a tile; `None` = a matrix is one.
    tile: Option<(usize, usize)>,
}

impl Fp8 {
    /// One scale for each matrix.
    pub const OF_MATRICES: Self = Self { tile: None };

    /// Reads the keys of a `quantization_config` for FP8.
    ///
    /// # Errors
    /// A message, if a key asks for something that is not supported.
    pub fn take(keys: &mut Keys) -> Result<Self, String> {
        let given = keys.peek("fmt");
        if let Some(format) = keys.text("fmt")?
            && !["e4m3", "float8_e4m3fn"].contains(&&*format)
        {
            return Err(keys.refused("fmt", &given, "only e4m3 is"));
        }
        let given = keys.peek("weight_block_size");
        let tile = match keys.sizes("weight_block_size")?.as_deref() {
            None => None,
            Some(&[outputs, inputs]) if outputs > 0 && inputs > 0 => Some((outputs, inputs)),
            Some(_) => {
                let accepted = "it must be outputs and inputs of a tile";
                return Err(keys.refused("weight_block_size", &given, accepted));
            }
        };
        keys.ignore(HARMLESS);
        Ok(Self { tile })
    }
}

impl Scheme for Fp8 {
    fn label(&self) -> String {
        "FP8".into()
    }

    fn is_in(&self, parts: &Parts<'_>) -> bool {
        parts.has_dtype("weight", E4M3)
    }

    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>> {
        // Both are factors: the name of the second says what the weights were multiplied with before.
        let known = ["weight_scale_inv", "weight_scale"];
        let scale = known.into_iter().find(|end| parts.has(end));
        for end in ["input_scale", "activation_scale"] {
            parts.skip(end);
        }
        let tile = self.tile.unwrap_or(shape);
        open(parts, shape, scale.unwrap_or(known[0]), tile)
    }

    fn usual_blocks(&self) -> Option<BlockType> {
        None
    }

    fn floats(&self, (_, inputs): (usize, usize)) -> Option<FloatFormat> {
        let run = self.tile.map_or(inputs, |tile| tile.1);
        Some(FloatFormat::Float8(run))
    }
}

/// Checks a matrix of FP8 whose part `scale` has a factor for each tile of outputs and inputs.
///
/// # Errors
/// Returns the errors of [`Scheme::open`].
pub fn open<'a>(
    parts: &mut Parts<'a>,
    shape: (usize, usize),
    scale: &str,
    tile: (usize, usize),
) -> Result<Opened<'a>> {
    let (outputs, inputs) = shape;
    let numbers = parts.get("weight", &[outputs, inputs], &[E4M3])?;
    let columns = inputs.div_ceil(tile.1);
    let scales = parts.scales(scale, &[outputs.div_ceil(tile.0), columns], &SCALES)?;
    Ok(Opened::new(None, move || {
        Ok(Floats {
            table: table(),
            numbers: finite(&numbers)?,
            shape,
            scales: scales.scales()?,
            tile,
            columns,
        })
    }))
}

/// The numbers of values times 1 over `scale`, each rounded to the nearest.
pub fn rounded(values: &[f32], scale: f32) -> Vec<u8> {
    let number = |value: &f32| F8E4M3::from_f32(value / scale).to_bits();
    values.iter().map(number).collect()
}

/// The largest number.
pub const MAX: f32 = 448.0;

/// The value of each byte.
pub fn table() -> [f32; 256] {
    std::array::from_fn(|byte| F8E4M3::from_bits(byte as u8).to_f32())
}

/// The bytes of a part in E4M3, which has no infinity, and two NaN.
///
/// # Errors
/// A setup error that names the part if it has one of those.
pub fn finite<'a>(part: &Part<'a>) -> Result<&'a [u8]> {
    let data = part.data()?;
    if data.iter().any(|byte| byte & 0x7f == 0x7f) {
        return Err(part.not_finite());
    }
    Ok(data)
}

struct Floats<'a> {
    table: [f32; 256],
    numbers: &'a [u8],
    shape: (usize, usize),
    /// `[outputs / tile, columns]`.
    scales: Vec<f32>,
    tile: (usize, usize),
    columns: usize,
}

impl Unpacked for Floats<'_> {
    fn row(&self, output: usize, row: &mut [f32]) {
        let inputs = self.shape.1;
        let numbers = &self.numbers[output * inputs..][..inputs];
        let scales = &self.scales[output / self.tile.0 * self.columns..][..self.columns];
        let tiles = row.chunks_mut(self.tile.1).zip(numbers.chunks(self.tile.1));
        for ((row, numbers), scale) in tiles.zip(scales) {
            for (value, &number) in row.iter_mut().zip(numbers) {
                *value = scale * self.table[usize::from(number)];
            }
        }
    }

    fn float8(&self) -> Option<Float8<'_>> {
        Float8::can_hold(&self.scales).then_some(Float8 {
            shape: self.shape,
            numbers: self.numbers,
            scales: &self.scales,
            block: self.tile,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the definition: 3 bits of a fraction, an exponent with a bias of 7, and numbers below the smallest power.
    #[test]
    fn bytes_mean_what_the_format_defines() {
        for (byte, &value) in table().iter().enumerate() {
            let (exponent, fraction) = ((byte >> 3 & 15) as i32, (byte & 7) as f32);
            if byte & 0x7f == 0x7f {
                assert!(value.is_nan());
                continue;
            }
            let size = match exponent {
                0 => fraction / 8. * 2f32.powi(-6),
                _ => (1. + fraction / 8.) * 2f32.powi(exponent - 7),
            };
            assert_eq!(value, if byte < 128 { size } else { -size }, "{byte}");
        }
    }
}
