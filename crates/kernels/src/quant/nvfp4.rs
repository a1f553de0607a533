//! Weights of NVFP4.

use super::device_tiles::{DeviceQuantMatrix, Layout, Strip, UNIT_INPUTS};
use super::formats::{
    self, BLOCK, DeviceFormat, DeviceScales, GroupScales, TileFormat, VECTOR, WIDTH,
};
use super::kind::QuantKind;
use super::pack::pack;
use super::tiles::{QuantMatrix, strip_lines};
use candle_core::{DType, Device, Result};
use std::array::from_fn;

/// Bytes of what the CPU's layout is made of: the factor, two scales, and 32 numbers.
const BLOCK_BYTES: usize = size_of::<f32>() + 2 + BLOCK / 2;

/// A weight `[outputs, inputs]` of floats of 4 bits with 2 of an exponent (E2M1).
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4<'a> {
    /// Outputs and inputs.
    pub shape: (usize, usize),
    /// `[outputs, inputs / 2]`: two floats a byte, the first in its lower half.
    pub numbers: &'a [u8],
    /// `[outputs, inputs / 16]`: factors of 16 inputs, as floats of 8 bits with 4 of an exponent (E4M3).
    pub scales: &'a [u8],
    /// The factor of all scales.
    pub factor: f32,
}

impl Nvfp4<'_> {
    /// Inputs with one scale.
    pub const GROUP: usize = 16;
    /// Factors are smaller than this.
    const MAX_FACTOR: f32 = 256.;

    /// Whether products take the scales and their factor: none is negative, NaN or infinite.
    pub fn can_hold(&self) -> bool {
        let is_taken = self.factor.is_normal() && (0. ..Self::MAX_FACTOR).contains(&self.factor);
        is_taken && self.scales.iter().all(|&scale| scale < 0x7f)
    }

    /// Checks that products take it, whose inputs `are_taken`.
    fn check(&self, are_taken: bool) -> Result<()> {
        let (outputs, inputs) = self.shape;
        let groups = outputs * inputs / Self::GROUP;
        let fits = self.numbers.len() == 8 * groups && self.scales.len() == groups;
        if !fits || !are_taken || !self.can_hold() {
            candle_core::bail!("no kernel for this NVFP4 of [{outputs}, {inputs}]");
        }
        Ok(())
    }
}

impl QuantMatrix {
    /// Whether there is a kernel for NVFP4 of so many inputs.
    pub fn keeps_nvfp4(inputs: usize) -> bool {
        inputs.is_multiple_of(BLOCK) && inputs > 0
    }

    /// Bytes of a weight of NVFP4.
    pub fn nvfp4_bytes(outputs: usize, inputs: usize) -> usize {
        outputs.div_ceil(WIDTH) * strip_lines::<formats::Nvfp4>(inputs / BLOCK) * VECTOR
    }

    /// Lays out a weight of NVFP4, without loss.
    ///
    /// # Errors
    /// If [`keeps_nvfp4`](Self::keeps_nvfp4) or [`Nvfp4::can_hold`] says no, or the numbers or scales are not those of the
    /// shape.
    pub fn from_nvfp4(weight: &Nvfp4<'_>) -> Result<Self> {
        weight.check(Self::keeps_nvfp4(weight.shape.1))?;
        // The table of the tiles has twice the values of the floats.
        let factor = weight.factor * (0.5 * GroupScales::OVER);
        let (numbers, _) = weight.numbers.as_chunks::<{ BLOCK / 2 }>();
        let (scales, _) = weight.scales.as_chunks::<2>();
        let mut data = Vec::with_capacity(numbers.len() * BLOCK_BYTES);
        for (numbers, scales) in numbers.iter().zip(scales) {
            data.extend_from_slice(&factor.to_le_bytes());
            data.extend_from_slice(scales);
            data.extend_from_slice(numbers);
        }
        let (outputs, inputs) = weight.shape;
        Ok(Self {
            outputs,
            inputs,
            format: TileFormat::Nvfp4,
            lines: pack::<formats::Nvfp4>(&data, BLOCK_BYTES, 1, inputs / BLOCK),
        })
    }
}

impl DeviceQuantMatrix {
    /// Whether there is a kernel for NVFP4 of so many inputs, with activations in `dtype`.
    pub fn keeps_nvfp4(inputs: usize, dtype: DType) -> bool {
        QuantMatrix::keeps_nvfp4(inputs) && matches!(dtype, DType::F16 | DType::BF16)
    }

    /// Bytes of a weight of NVFP4.
    pub fn nvfp4_bytes(outputs: usize, inputs: usize) -> usize {
        layout().bytes(outputs, inputs)
    }

    /// Copies a weight of NVFP4 to a GPU, without loss.
    ///
    /// # Errors
    /// If [`keeps_nvfp4`](Self::keeps_nvfp4) or [`Nvfp4::can_hold`] says no, the numbers or scales are not those of the
    /// shape, or the device has no memory.
    pub fn from_nvfp4(weight: &Nvfp4<'_>, device: &Device) -> Result<Self> {
        let (outputs, inputs) = weight.shape;
        weight.check(Self::keeps_nvfp4(inputs, DType::F16))?;
        let packed = layout().pack(weight.shape, |first, mut strip| {
            for unit in 0..inputs.div_ceil(UNIT_INPUTS) {
                strip.put_factor(unit, weight.factor * 2f32.powi(120));
            }
            for output in first..outputs.min(first + WIDTH) {
                fill(&mut strip, output - first, weight, output);
            }
        });
        Self::packed(layout(), packed, weight.shape, device)
    }
}

fn layout() -> Layout {
    let format = DeviceFormat {
        scales: DeviceScales::Group,
        #[cfg(feature = "cuda")]
        ptx: crate::gpu::NVFP4,
    };
    Layout::new(QuantKind::Nvfp4, 4, format)
}

/// Stores an output of `weight` as output `c` of the strip.
fn fill(strip: &mut Strip<'_>, c: usize, weight: &Nvfp4<'_>, output: usize) {
    let inputs = weight.shape.1;
    let groups = inputs / Nvfp4::GROUP;
    let (numbers, _) =
        weight.numbers[output * inputs / 2..][..inputs / 2].as_chunks::<{ BLOCK / 2 }>();
    let (scales, _) = weight.scales[output * groups..][..groups].as_chunks::<2>();
    for (at, (numbers, &scales)) in numbers.iter().zip(scales).enumerate() {
        let block = from_fn(|k| numbers[k / 2] >> (k % 2 * 4) & 15);
        strip.put_quants(4, c, at, &block);
        strip.put_group_scales(c, at, scales);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_nvfp4_is_refused() {
        let of = |inputs: usize, numbers: usize, scales: &[u8], factor| {
            let weight = Nvfp4 {
                shape: (2, inputs),
                numbers: &vec![0xf7; numbers],
                scales,
                factor,
            };
            let made = DeviceQuantMatrix::from_nvfp4(&weight, &Device::Cpu);
            assert_eq!(QuantMatrix::from_nvfp4(&weight).is_ok(), made.is_ok());
            made.map(|made| {
                assert_eq!(made.kind(), QuantKind::Nvfp4);
                let bytes = DeviceQuantMatrix::nvfp4_bytes(2, inputs);
                assert_eq!(made.tiles.elem_count(), bytes);
            })
        };
        // One strip of two units of 512 bytes of numbers, 64 of scales and 16 of the factor.
        assert_eq!(DeviceQuantMatrix::nvfp4_bytes(2, 96), 2 * 592);
        assert!(of(96, 96, &[0x7e; 12], 255.).is_ok());
        assert!(of(96, 95, &[0x7e; 12], 1.).is_err());
        assert!(of(96, 96, &[0x7e; 11], 1.).is_err());
        assert!(of(48, 48, &[1; 6], 1.).is_err());
        for (scale, factor) in [
            (0x7f, 1.),
            (0x80, 1.),
            (1, 256.),
            (1, -1.),
            (1, f32::NAN),
            (1, 0.),
        ] {
            assert!(
                of(96, 96, &[scale; 12], factor).is_err(),
                "{scale} {factor}"
            );
        }
        assert!(!DeviceQuantMatrix::keeps_nvfp4(64, DType::F32));
    }
}
