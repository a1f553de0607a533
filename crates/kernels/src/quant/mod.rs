//! Products with quantized weights on the CPU, with the same bits for any number of rows.
//!
//! Weights keep their blocks (`formats`); only their layout changes, to tiles of 16 outputs by 32
//! inputs, so that one vector holds four inputs of 16 outputs and is multiplied with four broadcast
//! activations. Activations are quantized to 8 bits in blocks of 32, as in llama.cpp. The sum within a
//! block is an exact integer; blocks are added in ascending order with one fused multiply-add each, or
//! two if the format has an offset. Every instruction set and any number of rows computes exactly that,
//! so all give the same bits.
//!
//! Why not candle's own kernels: on a CPU without VNNI its `Q8_0` costs six times as much for six rows
//! as for one, and its `Q4_1` is many times slower still. Verifying drafts needs cheap extra rows.

mod activations;
mod block_sums;
mod block_type;
mod byte_rows;
mod codebooks;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod device_float8;
mod device_tiles;
mod formats;
mod grids;
mod kind;
mod nvfp4;
mod pack;
mod portable;
mod scales;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vector;

use super::cpu::Isa;
use super::matmul::{CpuMatrix, Group, Product};
use super::parallel::{Shared, for_each};
use super::storage::{Place, output, write};
use activations::{Activations, PAIRED_ROWS, TILE_ROWS, Turn, turns};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use formats::Format as VectorFormat;
use formats::{Format as _, TileFormat, WIDTH, with_format};
use tiles::Strip;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use vector::VectorFormat;

pub use block_type::{BlockType, Floats};
pub(crate) use byte_rows::{ByteRows, lines_of_16, pack_16};
#[cfg(feature = "cuda")]
pub(crate) use cuda::multiply_groups;
pub use device::{gated_quantized, matmul_quantized};
pub use device_tiles::DeviceQuantMatrix;
pub use formats::BLOCK;
pub use kind::QuantKind;
pub use nvfp4::Nvfp4;
pub(crate) use tiles::Line;
pub use tiles::QuantMatrix;

/// Passes of rows that are processed before the next tiles: their activations stay in the cache.
const PANEL: usize = 8;
/// Number of multiply-adds from which waking other threads pays.
const MIN_PARALLEL_WORK: usize = 1 << 15;

impl QuantMatrix {
    /// Computes the outputs of a strip for the rows of `turns`. `store` gets the row and its 16 outputs.
    fn strip_product(
        &self,
        isa: Isa,
        strip: usize,
        x: &Activations,
        turns: &[Turn],
        store: impl FnMut(usize, &[f32; WIDTH]),
    ) {
        with_format!(self.format, F => product::<F>(isa, self.strip(strip), x, turns, store));
    }
}

/// Multiplies the rows of `turns` with a strip.
fn product<F: VectorFormat>(
    isa: Isa,
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = x.tiles(F::APART) {
        // SAFETY: the CPU has the instructions, which `proof` is the proof of.
        return unsafe { vector::amx::product_amx(proof, strip, x, turns, store) };
    }
    #[cfg(target_arch = "x86_64")]
    match (isa.avx512(), isa) {
        (Some(proof), _) => {
            // SAFETY: as above.
            return unsafe { vector::x86::product_avx512(proof, strip, x, turns, store) };
        }
        (_, Isa::AvxVnni(proof)) => {
            // SAFETY: as above.
            return unsafe { vector::x86::product_avx_vnni(proof, strip, x, turns, store) };
        }
        (_, Isa::Avx2(proof)) => {
            // SAFETY: as above.
            return unsafe { vector::x86::product_avx2(proof, strip, x, turns, store) };
        }
        _ => {}
    }
    #[cfg(target_arch = "aarch64")]
    match (x.pairs(), isa.dotprod(), isa) {
        (Some(proof), ..) => {
            // SAFETY: the CPU has the instructions, which `proof` is the proof of.
            return unsafe { vector::i8mm::product_i8mm(proof, strip, x, turns, store) };
        }
        (_, Some(proof), _) => {
            // SAFETY: as above.
            return unsafe { vector::neon::product_dotprod(proof, strip, x, turns, store) };
        }
        (.., Isa::Neon(proof)) => return vector::neon::product_neon(proof, strip, x, turns, store),
        _ => {}
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = isa;
    let first = turns[0].pass.first + turns[0].first;
    for (i, sums) in portable::product(strip, x, turns).iter().enumerate() {
        store(first + i, sums);
    }
}

/// Maximum number of rows of a turn.
fn max_rows(isa: Isa, x: &Activations, format: TileFormat) -> usize {
    if with_format!(format, F => x.tiles(F::APART)).is_some() {
        return TILE_ROWS;
    }
    if x.pairs().is_some() {
        return PAIRED_ROWS;
    }
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    return with_format!(format, F => vector::max_rows::<F>(isa));
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = (isa, format);
        activations::ROWS
    }
}

/// The rows of a group, and one of the weights that they are multiplied with.
struct ProductPart<'a> {
    weight: &'a QuantMatrix,
    x: &'a Activations,
    /// Consecutive rows of `x`.
    turns: Vec<Turn>,
    /// The first row of `x` and the first column of the weight in the result.
    row: usize,
    column: usize,
    /// The weight's first strip among those of all parts.
    first: usize,
}

impl CpuMatrix for QuantMatrix {
    const NAME: &'static str = "quant-matmul";

    fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    fn format(&self) -> String {
        self.kind().to_string()
    }

    fn read_row(&self, output: usize, row: &mut [f32]) {
        self.dequantize_row(output, row);
    }

    /// The rows of a group are quantized once.
    fn multiply(product: &Product<'_, Self>, isa: Isa) -> Vec<f32> {
        let (inputs, width) = (product.inputs, product.outputs);
        let parallelize = product.x.len() * width > MIN_PARALLEL_WORK;
        let groups = product.groups.iter().map(|group| {
            let x = &product.x[group.rows.start * inputs..group.rows.end * inputs];
            (group, Activations::quantize(isa, x, inputs))
        });
        let groups: Vec<_> = groups.collect();
        let work = |out: &Shared<'_, Place>| {
            for panel in 0.. {
                let (parts, strips) = parts(isa, &groups, panel);
                if parts.is_empty() {
                    break;
                }
                for_each(strips, parallelize, |strip| {
                    let part = &parts[parts.partition_point(|part| part.first <= strip) - 1];
                    part.run(isa, strip - part.first, out, width);
                });
            }
        };
        // SAFETY: groups cover all rows, panels the rows of a group, and strips its outputs.
        unsafe { output(product.rows() * width, work) }
    }
}

/// The weights of all groups that have so many panels of rows, and the number of their strips.
fn parts<'a>(
    isa: Isa,
    groups: &'a [(&Group<'a, QuantMatrix>, Activations)],
    panel: usize,
) -> (Vec<ProductPart<'a>>, usize) {
    let (mut parts, mut strips) = (Vec::new(), 0);
    for (group, x) in groups {
        let Some(passes) = x.passes().chunks(PANEL).nth(panel) else {
            continue;
        };
        let (row, mut column) = (group.rows.start, 0);
        for &weight in &group.weights {
            parts.push(ProductPart {
                weight,
                x,
                turns: turns(passes, max_rows(isa, x, weight.format)),
                row,
                column,
                first: strips,
            });
            strips += weight.strips();
            column += weight.outputs;
        }
    }
    (parts, strips)
}

impl ProductPart<'_> {
    /// The results of a strip of the weight; rows of the result have `width` columns.
    fn run(&self, isa: Isa, strip: usize, out: &Shared<'_, Place>, width: usize) {
        let weight = self.weight;
        let column = strip * WIDTH;
        let len = WIDTH.min(weight.outputs - column);
        weight.strip_product(isa, strip, self.x, &self.turns, |row, sums| {
            let at = (self.row + row) * width + self.column + column;
            // SAFETY: no two (row, weight, strip) share an element.
            let place = unsafe { out.slice(at, len) };
            match <&mut [Place; WIDTH]>::try_from(&mut *place) {
                Ok(place) => write(place, sums),
                Err(_) => ragged(place, sums),
            }
        });
    }
}

/// Copies the last outputs of a weight, which may be fewer than a tile's. A separate function, so that
/// the compiler keeps the other copies, whose length is constant, at two instructions.
#[cold]
#[inline(never)]
fn ragged(place: &mut [Place], sums: &[f32; WIDTH]) {
    write(place, &sums[..place.len()]);
}
