//! Products with quantized weights on the CPU, with the same bits for any number of rows.
//!
//! Weights keep their blocks ([`formats`]); only their layout changes, to tiles of 8 outputs by 32
//! inputs, so that one vector holds four inputs of eight outputs and is multiplied with four broadcast
//! activations. Activations are quantized to 8 bits in blocks of 32, as in llama.cpp. The sum within a
//! block is an exact integer; blocks are added in ascending order with one fused multiply-add each, or
//! two if the format has an offset. Every instruction set and any number of rows computes exactly that,
//! so all give the same bits.
//!
//! Why not candle's own kernels: on a CPU without VNNI its `Q8_0` costs six times as much for six rows
//! as for one, and its `Q4_1` is many times slower still. Verifying drafts needs cheap extra rows.

mod activations;
mod formats;
mod pack;
mod portable;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::cpu::{self, Isa};
use super::parallel::{Shared, for_each};
use activations::{Activations, Pass, ROWS};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use formats::{Format, WIDTH};
use tiles::{AnyTiles, SIDES, Strip, with_tiles};
use tracing::trace_span;

pub use formats::BLOCK;
pub use tiles::QuantMatrix;

/// Rows that are processed before the next tiles: their activations stay in the cache.
const PANEL: usize = 64;
/// Number of multiply-adds from which waking other threads pays.
const MIN_PARALLEL_WORK: usize = 1 << 15;

impl QuantMatrix {
    /// Computes the outputs of a strip for the rows of `passes`. `store` gets the side, the row and its
    /// eight outputs.
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

/// Multiplies the rows of `passes` with a strip.
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

/// `x @ w^T` for each of `weights`, with the outputs side by side: `[rows, sum of outputs]` f32 for `x`
/// `[rows, inputs]` f32 on the CPU. All weights take the same inputs. The rows are quantized once, and
/// all weights share one parallel loop.
///
/// # Errors
/// If `x` has another width, dtype or device, or is not contiguous.
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
            candle_core::bail!(
                "quant-matmul: {width} values per row, but the weight takes {inputs}"
            );
        }
        let x = super::storage::contiguous::<f32>(self.name(), x, layout)?;
        let out = trace_span!("matmul").in_scope(|| products(cpu::isa(), self.0, x, width));
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
                    // The last strip may have only one side.
                    return;
                }
                // SAFETY: no two (row, strip, side) triples share an element.
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

/// Copies the last outputs of a weight, which may be fewer than a tile's. A separate function, so that
/// the compiler keeps the other copies, whose length is constant, at two instructions.
#[cold]
#[inline(never)]
fn ragged(place: &mut [f32], sums: &[f32; WIDTH]) {
    place.copy_from_slice(&sums[..place.len()]);
}

/// The weight that contains strip `strip` of all weights, the strip's number in it, and the column of
/// the weight's first output.
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
