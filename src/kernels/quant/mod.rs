//! Products with quantized weights on the CPU, for any number of rows with the same bits.
//!
//! Weights keep their blocks ([`formats`]) and are only laid out anew, in tiles of 8 outputs by 32
//! inputs, so that one vector of four inputs of eight outputs meets four broadcast activations.
//! Activations are quantized to 8 bits in blocks of 32, as llama.cpp does. Inside a block the sum
//! is an exact integer; blocks are added in ascending order with one fused multiply-add each, two
//! with an offset. Every set of instructions and any number of rows does just that, so all give the same bits.
//!
//! Why not candle's own kernels: on a CPU without VNNI its `Q8_0` costs six times as much for six
//! rows as for one, and `Q4_1` is many times slower still; verifying drafts needs the opposite.

mod activations;
mod formats;
mod pack;
mod portable;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::clock::{self, Part};
use super::cpu::{self, Isa};
use super::parallel::{Shared, for_each};
use activations::{Activations, Pass, ROWS};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use formats::{Format, WIDTH};
use tiles::{AnyTiles, SIDES, Strip, with_tiles};

pub use formats::BLOCK;
pub use tiles::QuantMatrix;

/// Rows that are worked on before the next tiles: their activations stay in the cache.
const PANEL: usize = 64;
/// Multiply-adds below which other threads are not worth waking.
const MIN_PARALLEL_WORK: usize = 1 << 15;

impl QuantMatrix {
    /// Outputs of a strip for the rows of `passes`: `store` gets the side, the row and eight outputs.
    fn strip_product(
        &self,
        isa: Isa,
        strip: usize,
        x: &Activations,
        passes: &[Pass],
        store: impl FnMut(usize, usize, &[f32; WIDTH]),
    ) {
        with_tiles!(&self.tiles, tiles => {
            product(isa, tiles.strip(strip, self.inputs / BLOCK), x, passes, store)
        })
    }
}

/// The rows of `passes` against a strip.
#[cfg(target_arch = "x86_64")]
fn product<F: x86::Vectors>(
    isa: Isa,
    strip: Strip<'_, F>,
    x: &Activations,
    passes: &[Pass],
    store: impl FnMut(usize, usize, &[f32; WIDTH]),
) {
    match isa {
        // SAFETY: the CPU has the instructions, which `proof` is the proof of.
        Isa::Avx512Vnni(proof) => unsafe { x86::product_vnni(proof, strip, x, passes, store) },
        // SAFETY: as above.
        Isa::Avx2(proof) => unsafe { x86::product_avx2(proof, strip, x, passes, store) },
        Isa::Portable => product_portable(strip, x, passes, store),
    }
}

#[cfg(not(target_arch = "x86_64"))]
use product_portable as product;

#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
fn product_portable<F: Format>(
    #[cfg(not(target_arch = "x86_64"))] isa: Isa,
    strip: Strip<'_, F>,
    x: &Activations,
    passes: &[Pass],
    mut store: impl FnMut(usize, usize, &[f32; WIDTH]),
) {
    for side in 0..SIDES {
        for (i, sums) in portable::product(strip, side, x, passes).iter().enumerate() {
            store(side, passes[0].first + i, sums);
        }
    }
}

/// `x @ w^T` for `x` `[rows, inputs]` f32 on the CPU and weights `w` that take the same inputs:
/// `[rows, sum of outputs]` f32, the outputs of each weight after those of the one before. The
/// rows are quantized once, and all weights are one parallel loop.
///
/// # Errors
/// Where `x` has another width, dtype, device or is not contiguous.
pub fn matmul(weights: &[&QuantMatrix], x: &Tensor) -> Result<Tensor> {
    x.apply_op1_no_bwd(&MatMul(weights))
}

struct MatMul<'a>(&'a [&'a QuantMatrix]);

impl CustomOp1 for MatMul<'_> {
    fn name(&self) -> &'static str {
        "quant-matmul"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        if let Some(wrong) = self.0.iter().find(|w| w.inputs != width) {
            let inputs = wrong.inputs;
            candle_core::bail!("quant-matmul: {width} values a row, the weight takes {inputs}");
        }
        let x = super::storage::contiguous::<f32>(self.name(), x, layout)?;
        let out = clock::time(Part::Matmul, || products(cpu::isa(), self.0, x, width));
        let outputs: usize = self.0.iter().map(|w| w.outputs).sum();
        Ok((CpuStorage::F32(out), (rows, outputs).into()))
    }
}

/// `[rows, sum of outputs]` for `x` `[rows, inputs]`.
fn products(isa: Isa, weights: &[&QuantMatrix], x: &[f32], inputs: usize) -> Vec<f32> {
    let rows = x.len() / inputs.max(1);
    let x = Activations::quantize(isa, x, inputs);
    let outputs: usize = weights.iter().map(|w| w.outputs).sum();
    let mut out = vec![0f32; rows * outputs];
    let shared = Shared::new(&mut out);
    let strips: usize = weights.iter().map(|w| w.strips()).sum();
    let parallelize = rows * inputs * outputs > MIN_PARALLEL_WORK;
    for panel in x.passes().chunks(PANEL / ROWS) {
        for_each(strips, parallelize, |strip| {
            let (weight, strip, first) = locate(weights, strip);
            weight.strip_product(isa, strip, &x, panel, |side, row, sums| {
                let column = (strip * SIDES + side) * WIDTH;
                let width = WIDTH.min(weight.outputs.saturating_sub(column));
                if width == 0 {
                    // The last strip may have one side alone.
                    return;
                }
                // SAFETY: no two (row, strip, side) share an element.
                let place = unsafe { shared.slice(row * outputs + first + column, width) };
                match <&mut [f32; WIDTH]>::try_from(&mut *place) {
                    Ok(place) => *place = *sums,
                    Err(_) => ragged(place, sums),
                }
            });
        });
    }
    out
}

/// The last outputs of a weight. Apart, so that the compiler keeps the copies of a known length,
/// which are two instructions.
#[cold]
#[inline(never)]
fn ragged(place: &mut [f32], sums: &[f32; WIDTH]) {
    place.copy_from_slice(&sums[..place.len()]);
}

/// The weight that strip `strip` of all weights falls into, its number there, and the column of the
/// weight's first output.
fn locate<'a>(weights: &[&'a QuantMatrix], mut strip: usize) -> (&'a QuantMatrix, usize, usize) {
    let mut first = 0;
    let (last, others) = weights.split_last().expect("at least one weight");
    for weight in others {
        if strip < weight.strips() {
            return (weight, strip, first);
        }
        strip -= weight.strips();
        first += weight.outputs;
    }
    (last, strip, first)
}
