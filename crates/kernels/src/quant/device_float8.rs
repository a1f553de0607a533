//! Weights of FP8 on a GPU.

use super::device_tiles::{DeviceQuantMatrix, Layout, Strip, UNIT_INPUTS};
use super::formats::{BLOCK, DeviceFormat, DeviceScales, WIDTH};
use super::kind::QuantKind;
use crate::dense::Float8;
use candle_core::{DType, Device, Result};

impl DeviceQuantMatrix {
    /// Whether there is a kernel for FP8 of so many inputs, of which `run` have a scale in common, with activations in
    /// `dtype`.
    pub fn keeps_float8(inputs: usize, run: usize, dtype: DType) -> bool {
        let has_whole_units = run.is_multiple_of(UNIT_INPUTS) || run >= inputs;
        let is_taken = inputs.is_multiple_of(BLOCK) && inputs > 0 && has_whole_units;
        is_taken && matches!(dtype, DType::F16 | DType::BF16)
    }

    /// Bytes of a weight of FP8.
    pub fn float8_bytes(outputs: usize, inputs: usize) -> usize {
        layout().bytes(outputs, inputs)
    }

    /// Copies a weight of FP8 to a GPU, without loss.
    ///
    /// # Errors
    /// If [`keeps_float8`](Self::keeps_float8) says no, the numbers or scales are not those of the shape or not finite, or
    /// the device has no memory.
    pub fn from_float8(weight: &Float8<'_>, device: &Device) -> Result<Self> {
        weight.check()?;
        let ((outputs, inputs), run) = (weight.shape, weight.block.1);
        if !Self::keeps_float8(inputs, run, DType::F16) {
            candle_core::bail!("no kernel for FP8 of {inputs} inputs with a scale for each {run}");
        }
        let packed = layout().pack(weight.shape, |first, mut strip| {
            for output in first..outputs.min(first + WIDTH) {
                fill(&mut strip, output - first, weight, output);
            }
        });
        Self::packed(layout(), packed, weight.shape, device)
    }
}

fn layout() -> Layout {
    let format = DeviceFormat {
        scales: DeviceScales::Unit,
        #[cfg(feature = "cuda")]
        ptx: crate::gpu::F8E4M3,
    };
    Layout::new(QuantKind::Float8, 8, format)
}

/// Stores an output of `weight` as output `c` of the strip.
fn fill(strip: &mut Strip<'_>, c: usize, weight: &Float8<'_>, output: usize) {
    let ((_, inputs), (_, run)) = (weight.shape, weight.block);
    let numbers = &weight.numbers[output * inputs..][..inputs];
    let (blocks, _) = numbers.as_chunks::<BLOCK>();
    for (at, block) in blocks.iter().enumerate() {
        strip.put_quants(8, c, at, block);
    }
    let scales = weight.scales_of(output);
    for unit in 0..inputs.div_ceil(UNIT_INPUTS) {
        strip.put_unit_scale(c, unit, scales[unit * UNIT_INPUTS / run]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float8_is_taken_where_units_have_one_scale() {
        let keeps = |inputs, run| DeviceQuantMatrix::keeps_float8(inputs, run, DType::BF16);
        assert!(keeps(96, 96) && keeps(32, 128) && keeps(1056, 64) && keeps(7168, 128));
        assert!(!keeps(96, 32) && !keeps(128, 96) && !keeps(40, 40) && !keeps(0, 64));
        assert!(!DeviceQuantMatrix::keeps_float8(128, 128, DType::F32));
    }

    #[test]
    fn wrong_float8_is_refused() {
        let of = |inputs: usize, numbers: &[u8], scales: &[f32], block| {
            let weight = Float8 {
                shape: (2, inputs),
                numbers,
                scales,
                block,
            };
            let made = DeviceQuantMatrix::from_float8(&weight, &Device::Cpu);
            made.map(|made| {
                assert_eq!(made.kind(), QuantKind::Float8);
                let bytes = DeviceQuantMatrix::float8_bytes(2, inputs);
                assert_eq!(made.tiles.elem_count(), bytes);
            })
        };
        let numbers = [0x7e; 256];
        // One strip of two units of 1024 numbers and 16 scales.
        assert_eq!(DeviceQuantMatrix::float8_bytes(2, 96), 2 * (1024 + 64));
        assert!(of(96, &numbers[..192], &[1.], (2, 96)).is_ok());
        assert!(of(128, &numbers, &[1., 2., 3., 4.], (1, 64)).is_ok());
        assert!(of(128, &numbers, &[1., 2.], (1, 64)).is_err());
        assert!(of(128, &numbers, &[1.; 8], (1, 32)).is_err());
        assert!(of(40, &numbers[..80], &[1.], (2, 40)).is_err());
        assert!(of(96, &numbers, &[1.], (2, 96)).is_err());
        assert!(of(96, &[0xff; 192], &[1.], (2, 96)).is_err());
        assert!(of(96, &numbers[..192], &[f32::INFINITY], (2, 96)).is_err());
    }
}
