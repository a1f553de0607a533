//! Products with quantized weights on the CPU, for any number of rows with the same bits.
//!
//! Weights keep their blocks of 32 (`Q8_0`: `d * q`; `Q4_0` and `Q4_1`: `d * q + m`) and are only
//! laid out anew, in tiles of 8 outputs by 32 inputs, so that one vector of four inputs of eight
//! outputs meets four broadcast activations. Activations are quantized to 8 bits in blocks of 32,
//! as llama.cpp does. Inside a block the sum is an exact integer; blocks are added in ascending
//! order with one fused multiply-add each. Every path (AVX2 or portable, 1 row or 500) does just
//! that, so all give the same bits.
//!
//! Why not candle's own kernels: on a CPU without VNNI its `Q8_0` costs six times as much for six
//! rows as for one, and `Q4_1` is many times slower still; verifying drafts needs the opposite.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod pack;
mod portable;
#[cfg(test)]
mod tests;

use super::contiguous;
use super::parallel::{Shared, for_each};
use candle_core::quantized::GgmlDType;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use half::f16;

/// Values a block, along the inputs.
pub const BLOCK: usize = 32;
/// Outputs a tile.
const WIDTH: usize = 8;
/// Rows that share one pass over the tiles of eight outputs.
const ROWS: usize = 4;
/// Multiply-adds below which other threads are not worth waking.
const HEAVY: usize = 1 << 15;

/// Eight outputs by 32 inputs, 8 bits: `q[4 * (8 * j + c) + t]` is input `4 j + t` of output `c`.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Tile8 {
    d: [f16; WIDTH],
    q: [i8; BLOCK * WIDTH],
}

/// Eight outputs by 32 inputs, 4 bits: the low half of `q[4 * (8 * j + c) + t]` is input `4 j + t`
/// of output `c`, the high half input `16 + 4 j + t`.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Tile4 {
    d: [f16; WIDTH],
    m: [f16; WIDTH],
    q: [u8; BLOCK * WIDTH / 2],
}

enum Tiles {
    Q8(Vec<Tile8>),
    Q4(Vec<Tile4>),
}

/// A quantized weight `[outputs, inputs]`, laid out for this CPU.
pub struct QuantMatrix {
    outputs: usize,
    inputs: usize,
    /// `[outputs / 8 rounded up][inputs / 32]`.
    tiles: Tiles,
}

/// Activations: blocks of 32 as `scale * q`.
struct Activations {
    inputs: usize,
    q: Vec<i8>,
    /// One a block.
    scale: Vec<f32>,
    /// `scale * sum(q)`, one a block: what a weight's offset `m` is multiplied with.
    sum: Vec<f32>,
}

impl QuantMatrix {
    /// Outputs and inputs.
    pub fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    /// The block type that the tiles hold.
    pub fn dtype(&self) -> GgmlDType {
        match self.tiles {
            Tiles::Q8(_) => GgmlDType::Q8_0,
            Tiles::Q4(_) => GgmlDType::Q4_1,
        }
    }

    /// `x @ self^T` for `x` `[rows, inputs]` f32 on the CPU: `[rows, outputs]` f32.
    ///
    /// # Errors
    /// Where `x` has another width, dtype, device or is not contiguous.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1_no_bwd(&MatMul(self))
    }

    /// `[rows, outputs]` for `x` `[rows, inputs]`.
    fn product(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.inputs;
        let x = Activations::quantize(x, self.inputs);
        let mut out = vec![0f32; rows * self.outputs];
        let shared = Shared::new(&mut out);
        let heavy = rows * self.inputs * self.outputs > HEAVY;
        for_each(self.outputs.div_ceil(WIDTH), heavy, |group| {
            let column = group * WIDTH;
            let width = WIDTH.min(self.outputs - column);
            for row in (0..rows).step_by(ROWS) {
                let count = ROWS.min(rows - row);
                let sums = self.tile_product(group, &x, row, count);
                for (i, sums) in sums[..count].iter().enumerate() {
                    // SAFETY: no two (row, group) share an element.
                    let place = unsafe { shared.slice((row + i) * self.outputs + column, width) };
                    place.copy_from_slice(&sums[..width]);
                }
            }
        });
        out
    }

    /// Eight outputs for rows `row..row + count` of `x`, `count <= ROWS`.
    fn tile_product(
        &self,
        group: usize,
        x: &Activations,
        row: usize,
        count: usize,
    ) -> [[f32; WIDTH]; ROWS] {
        let blocks = self.inputs / BLOCK;
        let tiles = group * blocks..(group + 1) * blocks;
        #[cfg(target_arch = "x86_64")]
        if avx2::available() {
            // SAFETY: the CPU has the features that the functions are compiled for.
            return unsafe {
                match &self.tiles {
                    Tiles::Q8(all) => avx2::product8(&all[tiles], x, row, count),
                    Tiles::Q4(all) => avx2::product4(&all[tiles], x, row, count),
                }
            };
        }
        match &self.tiles {
            Tiles::Q8(all) => portable::product8(&all[tiles], x, row, count),
            Tiles::Q4(all) => portable::product4(&all[tiles], x, row, count),
        }
    }
}

impl Activations {
    fn quantize(x: &[f32], inputs: usize) -> Self {
        let blocks = x.len() / BLOCK;
        let mut this = Self {
            inputs,
            q: vec![0; x.len()],
            scale: vec![0.; blocks],
            sum: vec![0.; blocks],
        };
        let (q, scale, sum) = (
            Shared::new(&mut this.q),
            Shared::new(&mut this.scale),
            Shared::new(&mut this.sum),
        );
        let (rows, row_blocks) = (x.len() / inputs, inputs / BLOCK);
        for_each(rows, rows >= 8, |row| {
            // SAFETY: rows do not overlap.
            let (q, scale, sum) = unsafe {
                (
                    q.slice(row * inputs, inputs),
                    scale.slice(row * row_blocks, row_blocks),
                    sum.slice(row * row_blocks, row_blocks),
                )
            };
            let x = &x[row * inputs..][..inputs];
            for (i, (x, q)) in x
                .chunks_exact(BLOCK)
                .zip(q.chunks_exact_mut(BLOCK))
                .enumerate()
            {
                (scale[i], sum[i]) = quantize_block(x, q);
            }
        });
        this
    }

    /// The block's 32 values of row `row`.
    #[inline(always)]
    fn block(&self, row: usize, block: usize) -> &[i8] {
        &self.q[row * self.inputs + block * BLOCK..][..BLOCK]
    }

    #[inline(always)]
    fn at(&self, row: usize, block: usize) -> usize {
        row * (self.inputs / BLOCK) + block
    }
}

/// Quantizes 32 values to `q` in -127..=127; gives back the scale, and the scale times the sum.
#[inline(always)]
fn quantize_block(x: &[f32], q: &mut [i8]) -> (f32, f32) {
    /// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
    let inverse = if max > 0. { 127. / max } else { 0. };
    let mut sum = 0i32;
    for (q, &x) in q.iter_mut().zip(x) {
        let n = (x * inverse + ROUND)
            .to_bits()
            .wrapping_sub(ROUND.to_bits()) as i32;
        *q = n as i8;
        sum += n;
    }
    let scale = max / 127.;
    (scale, scale * sum as f32)
}

struct MatMul<'a>(&'a QuantMatrix);

impl CustomOp1 for MatMul<'_> {
    fn name(&self) -> &'static str {
        "quant-matmul"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (outputs, inputs) = self.0.shape();
        let (rows, width) = layout.shape().dims2()?;
        if width != inputs {
            candle_core::bail!("quant-matmul: {width} values a row, the weight takes {inputs}");
        }
        let x = contiguous::<f32>(self.name(), x, layout)?;
        let out = self.0.product(x);
        Ok((CpuStorage::F32(out), (rows, outputs).into()))
    }
}
