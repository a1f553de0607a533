//! Products with quantized weights on the CPU, for any number of rows with the same bits.
//!
//! Weights keep their blocks ([`formats`]) and are only laid out anew, in tiles of 8 outputs by 32
//! inputs, so that one vector of four inputs of eight outputs meets four broadcast activations.
//! Activations are quantized to 8 bits in blocks of 32, as llama.cpp does. Inside a block the sum
//! is an exact integer; blocks are added in ascending order with one fused multiply-add each, two
//! with an offset. Every path and any number of rows does just that, so all give the same bits.
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
use super::cpu::{self, Path};
use super::parallel::{Shared, for_each};
use activations::Activations;
use candle_core::quantized::GgmlDType;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use formats::{Format, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0};

/// Values a block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs a tile.
const WIDTH: usize = 8;
/// Most rows that share one pass over the tiles of eight outputs.
const ROWS: usize = 8;
/// Rows that are worked on before the next tiles: their activations stay in the cache.
const PANEL: usize = 64;
/// Multiply-adds below which other threads are not worth waking.
const HEAVY: usize = 1 << 15;

/// A whole matrix in one format.
struct Tiles<F: Format> {
    /// `[outputs / 8 rounded up][inputs / 32]`.
    quants: Vec<F::Quants>,
    /// `[outputs / 8 rounded up][inputs / 32 / F::SPAN]`.
    scales: Vec<F::Scales>,
}

/// The tiles of eight outputs.
struct TileRow<'a, F: Format> {
    quants: &'a [F::Quants],
    scales: &'a [F::Scales],
}

impl<F: Format> Clone for TileRow<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for TileRow<'_, F> {}

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

    /// Eight outputs for rows `rows` of `x`, each given to `store`.
    fn tile_product(
        &self,
        path: Path,
        group: usize,
        x: &Activations,
        rows: std::ops::Range<usize>,
        store: impl FnMut(usize, &[f32; WIDTH]),
    ) {
        with_tiles!(&self.tiles, tiles => {
            product(path, tiles.row(group, self.inputs / BLOCK), x, rows, store)
        })
    }
}

impl<F: Format> Tiles<F> {
    fn row(&self, group: usize, blocks: usize) -> TileRow<'_, F> {
        let records = blocks / F::SPAN;
        TileRow {
            quants: &self.quants[group * blocks..(group + 1) * blocks],
            scales: &self.scales[group * records..(group + 1) * records],
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn product<F: x86::Vectors>(
    path: Path,
    tiles: TileRow<'_, F>,
    x: &Activations,
    rows: std::ops::Range<usize>,
    store: impl FnMut(usize, &[f32; WIDTH]),
) {
    match path {
        // SAFETY: a path is only taken where the CPU has its instructions.
        Path::Avx512Vnni => unsafe { x86::product_vnni(tiles, x, rows, store) },
        // SAFETY: as above.
        Path::Avx2 => unsafe { x86::product_avx2(tiles, x, rows, store) },
        Path::Portable => product_portable(tiles, x, rows, store),
    }
}

#[cfg(not(target_arch = "x86_64"))]
use product_portable as product;

#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
fn product_portable<F: Format>(
    #[cfg(not(target_arch = "x86_64"))] path: Path,
    tiles: TileRow<'_, F>,
    x: &Activations,
    rows: std::ops::Range<usize>,
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    for (row, sums) in rows.clone().zip(portable::product(tiles, x, rows)) {
        store(row, &sums);
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
        let out = clock::time(Part::Matmul, || products(cpu::path(), self.0, x, width));
        let outputs: usize = self.0.iter().map(|w| w.outputs).sum();
        Ok((CpuStorage::F32(out), (rows, outputs).into()))
    }
}

/// `[rows, sum of outputs]` for `x` `[rows, inputs]`.
fn products(path: Path, weights: &[&QuantMatrix], x: &[f32], inputs: usize) -> Vec<f32> {
    let rows = x.len() / inputs.max(1);
    let x = Activations::quantize(path, x, inputs);
    let outputs: usize = weights.iter().map(|w| w.outputs).sum();
    let mut out = vec![0f32; rows * outputs];
    let shared = Shared::new(&mut out);
    let groups: usize = weights.iter().map(|w| w.outputs.div_ceil(WIDTH)).sum();
    let heavy = rows * inputs * outputs > HEAVY;
    for panel in (0..rows).step_by(PANEL) {
        let panel = panel..rows.min(panel + PANEL);
        for_each(groups, heavy, |group| {
            let (weight, group, first) = locate(weights, group);
            let width = WIDTH.min(weight.outputs - group * WIDTH);
            let column = first + group * WIDTH;
            weight.tile_product(path, group, &x, panel.clone(), |row, sums| {
                // SAFETY: no two (row, group) share an element.
                let place = unsafe { shared.slice(row * outputs + column, width) };
                place.copy_from_slice(&sums[..width]);
            });
        });
    }
    out
}

/// The weight that group `group` of all weights falls into, its number there, and the column of the
/// weight's first output.
fn locate<'a>(weights: &[&'a QuantMatrix], mut group: usize) -> (&'a QuantMatrix, usize, usize) {
    let mut first = 0;
    for weight in &weights[..weights.len() - 1] {
        let groups = weight.outputs.div_ceil(WIDTH);
        if group < groups {
            return (weight, group, first);
        }
        group -= groups;
        first += weight.outputs;
    }
    (weights[weights.len() - 1], group, first)
}
