//! Products with unquantized weights on the CPU, with the same bits for any number of rows.
//!
//! Weights keep their dtype; only their layout changes, to tiles of 16 outputs with consecutive inputs,
//! so that one pass reads memory from front to back. Each result is one chain of fused multiply-adds in
//! f32, over inputs 0, 1, 2 and so on. Every pass (of any instruction set, with 1 row or 500) computes
//! exactly that chain, so all give the same bits. They only differ in how many chains run side by side,
//! and in when a partial sum is stored in memory. With weights of FP8 there is a chain for each `BLOCK` of inputs with
//! one scale, and one of these chains times their scales.
//!
//! Why not candle's own kernels: those for one row, for few results and for many rows add in different
//! orders, and with bf16 and f16 they are many times slower than reading the weights from memory.

#[cfg(feature = "cuda")]
mod on_device;
mod pack;
mod pass;
#[cfg(test)]
mod tests;
mod tiles;
mod value;

use super::cpu::Isa;
use super::glu::Activation;
use super::matmul::{CpuMatrix, Product};
use super::parallel::{Shared, for_each, threads};
use super::storage::{Place, output, write, written};
use candle_core::{Result, Tensor};
pub use pack::Float8;
use pack::unpacked;
use pass::{max_rows, pass};
use std::ops::Range;
use tiles::{ROWS, Scales, TILES, TileRow, Tiles, WIDTH};
use value::{E4m3, Unpacked, Value};

#[cfg(feature = "cuda")]
pub(crate) use on_device::{multiply_groups, takes};
pub use tiles::DenseMatrix;

/// Inputs that all passes process before the next block of inputs: the weights of [`TILES`] tiles stay
/// in the second-level cache and the activations of a pass in the first-level cache.
const BLOCK: usize = 512;
/// Number of passes from which FP8 is unpacked once for all of them.
const MIN_UNPACKED_PASSES: usize = 3;
/// Minimum number of pieces per thread that a product is divided into, if it has enough tiles.
const PIECES: usize = 4;
/// Number of multiply-adds from which waking other threads pays.
const MIN_PARALLEL_WORK: usize = 1 << 15;

impl CpuMatrix for DenseMatrix {
    const NAME: &'static str = "dense-matmul";

    fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    fn format(&self) -> String {
        self.dtype().as_str().to_owned()
    }

    fn read_row(&self, output: usize, row: &mut [f32]) {
        self.row(output, row);
    }

    fn multiply(product: &Product<'_, Self>, isa: Isa) -> Vec<f32> {
        let (x, width) = (product.x, product.outputs);
        let pieces = cut(product);
        let is_scaled = |task: &DenseTask<'_>| matches!(task.matrix.tiles, Tiles::F8(..));
        let scaled = pieces.iter().any(is_scaled);
        let scaled = scaled.then(|| x.iter().map(|x| x * E4m3::INPUT).collect::<Vec<f32>>());
        let parallelize = x.len() * width > MIN_PARALLEL_WORK;
        let work = |out: &Shared<'_, Place>| {
            for_each(pieces.len(), parallelize, |i| {
                let DenseTask { matrix, tiles, .. } = &pieces[i];
                let range = tiles.start * matrix.inputs..tiles.end * matrix.inputs;
                let (task, result) = (&pieces[i], (out, width));
                match &matrix.tiles {
                    Tiles::F32(all) => task.run(isa, &all[range], None, x, result),
                    Tiles::F16(all) => task.run(isa, &all[range], None, x, result),
                    Tiles::BF16(all) => task.run(isa, &all[range], None, x, result),
                    Tiles::F8(all, scales) => {
                        let x = scaled.as_deref().unwrap_or_default();
                        task.run(isa, &all[range], Some(scales), x, result);
                    }
                }
            });
        };
        // SAFETY: pieces cover all rows and all outputs.
        unsafe { output(product.rows() * width, work) }
    }
}

/// `x @ weight^T` on a GPU, `[rows, outputs]`, for `x` `[rows, inputs]` and a weight `[outputs, inputs]`
/// in candle's layout. Up to 16 rows of f16 or bf16 take the time of reading the weight, and a row has
/// the same bits in any number of up to [`EXACT_ROWS`](crate::EXACT_ROWS) rows. More rows go to the device's library, unless
/// `batch_invariant` is set.
///
/// # Errors
/// If the shapes, dtypes or devices do not match, or if `batch_invariant` is set and we have no kernel
/// for the weight (see [`has_kernel_on_device`]).
pub fn matmul_on_device(weight: &Tensor, x: &Tensor, batch_invariant: bool) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && (x.dim(0)? <= crate::EXACT_ROWS || batch_invariant)
        && has_kernel_on_device(weight)?
    {
        return on_device::product(weight, x);
    }
    if batch_invariant {
        candle_core::bail!("no batch-invariant kernel for {weight:?}");
    }
    x.matmul(&weight.t()?)
}

/// `activation(gate) * up`, `[rows, outputs]`, where `gate` and `up` are the first and the second half of the product of
/// `x` with `weight`, `[2 * outputs, inputs]`, in one launch: the bits of [`matmul_on_device`] and
/// [`glu`](crate::glu()). `None` = there is no such launch, as for more than 16 rows.
///
/// # Errors
/// If the shapes, dtypes or devices do not match.
pub fn gated_on_device(
    weight: &Tensor,
    x: &Tensor,
    activation: Activation,
) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if let Some(number) = activation.fused()
        && (1..=crate::gpu::FEW_ROWS).contains(&x.dim(0)?)
        && weight.dim(0)?.is_multiple_of(2)
        && has_kernel_on_device(weight)?
    {
        return on_device::gated_product(weight, x, number).map(Some);
    }
    let _ = (weight, x, activation);
    Ok(None)
}

/// Whether `weight` `[outputs, inputs]` is on a GPU and we have a kernel for it, which gives a row the
/// same bits in any number of rows. There is one for f16 and bf16, and inputs that are a multiple of 32.
///
/// # Errors
/// If `weight` is not a matrix.
pub fn has_kernel_on_device(weight: &Tensor) -> Result<bool> {
    let (_, inputs) = weight.dims2()?;
    #[cfg(feature = "cuda")]
    return Ok(weight.device().is_cuda() && on_device::takes(inputs, weight.dtype()));
    #[cfg(not(feature = "cuda"))]
    {
        let _ = inputs;
        Ok(false)
    }
}

/// The inputs that all passes of a task process before the next ones.
struct DenseBlock<'a> {
    isa: Isa,
    inputs: Range<usize>,
    /// Number of passes over the rows.
    passes: usize,
    scales: Option<&'a Scales>,
}

/// Some tiles of one matrix, and the rows that they are multiplied with: what a thread computes at a time.
struct DenseTask<'a> {
    matrix: &'a DenseMatrix,
    tiles: Range<usize>,
    rows: Range<usize>,
    /// The matrix's first column in the result.
    column: usize,
}

/// Pieces of [`TILES`] tiles, or of fewer if threads would be left without work.
fn cut<'a>(product: &Product<'a, DenseMatrix>) -> Vec<DenseTask<'a>> {
    let matrices = product.groups.iter().flat_map(|group| &group.weights);
    let tiles: usize = matrices.map(|w| w.outputs.div_ceil(WIDTH)).sum();
    let size = (tiles / (threads() * PIECES)).clamp(1, TILES);
    let mut pieces = Vec::with_capacity(tiles.div_ceil(size) + 2 * product.groups.len());
    for group in product.groups {
        let mut column = 0;
        for &matrix in &group.weights {
            let tiles = matrix.outputs.div_ceil(WIDTH);
            pieces.extend((0..tiles).step_by(size).map(|start| DenseTask {
                matrix,
                tiles: start..tiles.min(start + size),
                rows: group.rows.clone(),
                column,
            }));
            column += matrix.outputs;
        }
    }
    pieces
}

impl DenseTask<'_> {
    /// The results of the rows for these tiles, whose weights are `all`.
    fn run<V: Value>(
        &self,
        isa: Isa,
        all: &[TileRow<V>],
        scales: Option<&Scales>,
        x: &[f32],
        (out, width): (&Shared<'_, Place>, usize),
    ) {
        let inputs = self.matrix.inputs;
        let passes = self.rows.len().div_ceil(max_rows(isa));
        // The blocks of scaled numbers are part of their arithmetic.
        let is_cut = passes > 1 || V::IS_SCALED;
        let block = if is_cut { BLOCK } else { inputs.max(1) };
        for range in blocks(inputs, block, scales.map(|scales| scales.run)) {
            let of_tile = |tile: usize| &all[(tile - self.tiles.start) * inputs..][range.clone()];
            let block = DenseBlock {
                isa,
                inputs: range.clone(),
                passes,
                scales,
            };
            if V::IS_SCALED && passes >= MIN_UNPACKED_PASSES {
                let tiles = self.tiles.clone().map(|tile| unpacked(of_tile(tile)));
                let tiles: Vec<Vec<TileRow<Unpacked>>> = tiles.collect();
                let of_tile = |tile: usize| &tiles[tile - self.tiles.start][..];
                self.run_block(&block, of_tile, x, (out, width));
            } else {
                self.run_block(&block, of_tile, x, (out, width));
            }
        }
    }

    /// Adds the products with a block of inputs to the results. `of_tile` has the weights of a tile for these inputs.
    fn run_block<'w, V: Value>(
        &self,
        block: &DenseBlock<'_>,
        of_tile: impl Fn(usize) -> &'w [TileRow<V>],
        x: &[f32],
        (out, width): (&Shared<'_, Place>, usize),
    ) {
        let (first, count, passes) = (self.rows.start, self.rows.len(), block.passes);
        for number in 0..passes {
            let rows = first + count * number / passes..first + count * (number + 1) / passes;
            let mut x_rows = [[].as_slice(); ROWS];
            for (place, row) in x_rows.iter_mut().zip(rows.clone()) {
                *place = &x[row * self.matrix.inputs..][block.inputs.clone()];
            }
            let x_rows = &x_rows[..rows.len()];
            let mut tiles = self.tiles.clone();
            let mut sums = [[[0.; WIDTH]; ROWS]; TILES];
            while !tiles.is_empty() {
                let count = at_once(rows.len(), tiles.len());
                let now = tiles.start..tiles.start + count;
                let mut weights = [[].as_slice(); TILES];
                let mut factors = [&[0.; WIDTH]; TILES];
                for (place, tile) in now.clone().enumerate() {
                    weights[place] = of_tile(tile);
                    if let Some(scales) = block.scales {
                        factors[place] = scales.of(tile, block.inputs.start);
                    }
                }
                for tile in &mut sums[..count] {
                    tile[..rows.len()].fill([0.; WIDTH]);
                }
                let places = || self.places(&now, &rows, width);
                if block.inputs.start > 0 {
                    for (t, r, at, len) in places() {
                        // SAFETY: as below; no other slice of `out` is alive here, and the pass over
                        // the block before has written this one.
                        let so_far = unsafe { written(out.slice(at, len)) };
                        sums[t][r][..len].copy_from_slice(so_far);
                    }
                }
                let (weights, factors) = (&weights[..count], &factors[..count]);
                pass(block.isa, weights, factors, x_rows, &mut sums);
                for (t, r, at, len) in places() {
                    // SAFETY: no two (row, tile) pairs share an element, and a tile is in one piece.
                    write(unsafe { out.slice(at, len) }, &sums[t][r][..len]);
                }
                tiles.start += count;
            }
        }
    }

    /// Where the results of `tiles` and `rows` are in `[rows, width]`: for each the tile and the row,
    /// counted from the first of each, the start and the length.
    fn places(
        &self,
        tiles: &Range<usize>,
        rows: &Range<usize>,
        width: usize,
    ) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let (outputs, column) = (self.matrix.outputs, self.column);
        let rows = rows.clone();
        tiles.clone().enumerate().flat_map(move |(t, tile)| {
            let len = WIDTH.min(outputs - tile * WIDTH);
            let at = column + tile * WIDTH;
            let places = rows.clone().enumerate();
            places.map(move |(r, row)| (t, r, row * width + at, len))
        })
    }
}

/// The inputs cut into blocks, of which none has inputs of two runs. Without inputs one block, so that a pass writes zeros.
fn blocks(inputs: usize, block: usize, run: Option<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = move |start: usize| {
        let of_run = run.map_or(inputs, |run| (start / run + 1) * run);
        inputs.min(start + block).min(of_run)
    };
    let first = Some(0..end(0));
    std::iter::successors(first, move |last| {
        (last.end < inputs).then(|| last.end..end(last.end))
    })
}

/// The number of tiles of a pass over `rows` rows, if `left` tiles are left: enough chains to fill the
/// pipeline.
fn at_once(rows: usize, left: usize) -> usize {
    let best = match rows {
        1 => TILES,
        2 => 2,
        _ => 1,
    };
    if left < best { 1 } else { best }
}
