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
#[cfg(target_arch = "x86_64")]
mod x86;

use super::clock::{self, Part};
use super::cpu::{self, Isa};
use super::parallel::{Shared, for_each};
use activations::{Activations, Pass};
use candle_core::quantized::GgmlDType;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use formats::{Format, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0};

/// Values a block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs a tile.
const WIDTH: usize = 8;
/// Most rows that share one pass over the tiles of eight outputs.
const ROWS: usize = 8;
/// Tiles that lie side by side in memory, as a strip of 16 outputs: two sums at a time keep the CPU
/// from waiting for one after the other.
const SIDES: usize = 2;
/// Rows that are worked on before the next tiles: their activations stay in the cache.
const PANEL: usize = 64;
/// Multiply-adds below which other threads are not worth waking.
const MIN_PARALLEL_WORK: usize = 1 << 15;

/// A whole matrix in one format. Outputs beyond the last are zero.
struct Tiles<F: Format> {
    /// `[outputs / 16 rounded up][inputs / 32]`.
    quants: Vec<[F::Quants; SIDES]>,
    /// `[outputs / 16 rounded up][inputs / 32 / F::SPAN]`.
    scales: Vec<[F::Scales; SIDES]>,
}

/// The tiles of 16 outputs.
struct Strip<'a, F: Format> {
    quants: &'a [[F::Quants; SIDES]],
    scales: &'a [[F::Scales; SIDES]],
}

impl<F: Format> Clone for Strip<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for Strip<'_, F> {}

enum AnyTiles {
    Q8_0(Tiles<Q8_0>),
    Q4_0(Tiles<Q4_0>),
    Q4_1(Tiles<Q4_1>),
    Q5_1(Tiles<Q5_1>),
    Q4K(Tiles<Q4K>),
    Q5K(Tiles<Q5K>),
    Q6K(Tiles<Q6K>),
}

/// Runs the same code for the tiles of each format.
macro_rules! with_tiles {
    ($tiles:expr, $name:ident => $body:expr) => {
        match $tiles {
            AnyTiles::Q8_0($name) => $body,
            AnyTiles::Q4_0($name) => $body,
            AnyTiles::Q4_1($name) => $body,
            AnyTiles::Q5_1($name) => $body,
            AnyTiles::Q4K($name) => $body,
            AnyTiles::Q5K($name) => $body,
            AnyTiles::Q6K($name) => $body,
        }
    };
}
use with_tiles;

/// A quantized weight `[outputs, inputs]`, laid out for this CPU.
pub struct QuantMatrix {
    outputs: usize,
    inputs: usize,
    tiles: AnyTiles,
}

impl QuantMatrix {
    /// Outputs and inputs.
    pub fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    fn strips(&self) -> usize {
        self.outputs.div_ceil(SIDES * WIDTH)
    }

    /// The block type that the tiles hold.
    pub fn dtype(&self) -> GgmlDType {
        match self.tiles {
            AnyTiles::Q8_0(_) => GgmlDType::Q8_0,
            AnyTiles::Q4_0(_) => GgmlDType::Q4_0,
            AnyTiles::Q4_1(_) => GgmlDType::Q4_1,
            AnyTiles::Q5_1(_) => GgmlDType::Q5_1,
            AnyTiles::Q4K(_) => GgmlDType::Q4K,
            AnyTiles::Q5K(_) => GgmlDType::Q5K,
            AnyTiles::Q6K(_) => GgmlDType::Q6K,
        }
    }

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

impl<F: Format> Tiles<F> {
    fn strip(&self, strip: usize, blocks: usize) -> Strip<'_, F> {
        let records = blocks / F::SPAN;
        Strip {
            quants: &self.quants[strip * blocks..(strip + 1) * blocks],
            scales: &self.scales[strip * records..(strip + 1) * records],
        }
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
        let x = super::contiguous::<f32>(self.name(), x, layout)?;
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
