//! The memory layout of quantized weights on a GPU: `cuda/unpack.cuh` describes and reads it.

use super::block_type::BlockType;
use super::formats::{self, BLOCK, Format, WIDTH};
use super::pack::held_blocks;
use super::tiles::with_format;
use super::{QuantMatrix, formats::scales_k};
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// Inputs of a unit.
pub(super) const UNIT_INPUTS: usize = 64;
/// Units that share a part, if the format has such parts.
const SHARING: usize = formats::SUPER / UNIT_INPUTS;
/// Outputs `g` and `g + 8` belong to one thread.
const GROUPS: usize = WIDTH / 2;

/// Maximum number of rows that share one pass over the weights.
pub(super) const MAX_ROWS: usize = 64;

/// A quantized weight `[outputs, inputs]` on a GPU, in a layout of our own.
pub struct DeviceQuantMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) kind: BlockType,
    /// U8, as [`pack`] lays it out.
    pub(super) tiles: Tensor,
}

impl DeviceQuantMatrix {
    /// Whether there is a kernel for GGUF blocks of this type, with activations in `dtype`.
    pub fn keeps(kind: BlockType, dtype: DType) -> bool {
        held_as(kind).is_some() && matches!(dtype, DType::F16 | DType::BF16)
    }

    /// Bytes of a weight of a type that [`keeps`](Self::keeps) accepts.
    pub fn bytes(kind: BlockType, outputs: usize, inputs: usize) -> usize {
        held_as(kind).map_or(0, |held| bytes(held, outputs, inputs))
    }

    /// Copies the blocks of a GGUF tensor `[outputs, inputs]` to a GPU, without loss.
    ///
    /// # Errors
    /// If there is no kernel for the type, `data` has another length, or the device has no memory.
    pub fn from_blocks(
        kind: BlockType,
        data: &[u8],
        (outputs, inputs): (usize, usize),
        device: &Device,
    ) -> Result<Self> {
        let expected = outputs * inputs / kind.block_size() * kind.type_size();
        let (Some(held), true) = (
            held_as(kind),
            data.len() == expected && inputs.is_multiple_of(kind.block_size()),
        ) else {
            let found = data.len();
            candle_core::bail!("{found} bytes cannot be a [{outputs}, {inputs}] weight in {kind}");
        };
        let packed = pack(kind, data, outputs, inputs);
        let len = packed.len();
        Ok(Self {
            outputs,
            inputs,
            kind: held,
            tiles: Tensor::from_vec(packed, len, &Device::Cpu)?.to_device(device)?,
        })
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    /// The type of its blocks.
    pub fn kind(&self) -> BlockType {
        self.kind
    }
}

/// What a format stores besides quants; see `unpack.cuh`.
#[derive(Clone, Copy, PartialEq)]
enum Scales {
    /// A half for each block of 32.
    Block,
    /// A scale and an offset.
    BlockOffset,
    /// Factors of a scale and an offset that 256 inputs share.
    SuperOffset,
    /// Factors for each 16 inputs, of a scale that 256 inputs share.
    HalfBlock,
}

/// The sizes of a format's parts, in bytes.
#[derive(Clone, Copy)]
struct Sizes {
    /// Where the bits above the fourth begin in a unit, and where its scales do.
    high: usize,
    scales: usize,
    /// Bytes of scales for outputs `g` and `g + 8`.
    scale_bytes: usize,
    unit: usize,
    /// What [`SHARING`] units share.
    shared: usize,
}

/// The type whose units hold blocks of this type without loss; `None` if there is no kernel.
fn held_as(kind: BlockType) -> Option<BlockType> {
    use BlockType::{Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0};
    let held = QuantMatrix::held_as(kind);
    matches!(held, Q4_0 | Q4_1 | Q5_1 | Q8_0 | Q4K | Q5K | Q6K).then_some(held)
}

fn scales_of(held: BlockType) -> Scales {
    match held {
        BlockType::Q4_1 | BlockType::Q5_1 => Scales::BlockOffset,
        BlockType::Q4K | BlockType::Q5K => Scales::SuperOffset,
        BlockType::Q6K => Scales::HalfBlock,
        _ => Scales::Block,
    }
}

fn sizes(held: BlockType) -> Sizes {
    let bits = with_format!(held, F => F::BITS);
    let kind = scales_of(held);
    let high = UNIT_INPUTS * WIDTH / 8 * if bits == 8 { 8 } else { 4 };
    let scales = high + UNIT_INPUTS * WIDTH / 8 * if bits == 8 { 0 } else { bits - 4 };
    let scale_bytes = if kind == Scales::BlockOffset { 16 } else { 8 };
    Sizes {
        high,
        scales,
        scale_bytes,
        unit: scales + GROUPS * scale_bytes,
        shared: GROUPS
            * match kind {
                Scales::SuperOffset => 8,
                Scales::HalfBlock => 4,
                _ => 0,
            },
    }
}

/// Bytes of a weight `[outputs, inputs]`, of a type that [`held_as`] returned.
fn bytes(held: BlockType, outputs: usize, inputs: usize) -> usize {
    let (sizes, units) = (sizes(held), inputs.div_ceil(UNIT_INPUTS));
    outputs.div_ceil(WIDTH) * (units * sizes.unit + units / SHARING * sizes.shared)
}

/// Lays out GGUF blocks of `kind`, whose length is that of `[outputs, inputs]`. Missing outputs of the last
/// strip and missing inputs of the last unit are zero.
fn pack(kind: BlockType, data: &[u8], outputs: usize, inputs: usize) -> Vec<u8> {
    let (held, data, size) = held_blocks(kind, data);
    with_format!(held, F => pack_as::<F>(held, &data, size, (outputs, inputs)))
}

fn pack_as<F: Format>(
    held: BlockType,
    data: &[u8],
    size: usize,
    (outputs, inputs): (usize, usize),
) -> Vec<u8> {
    let sizes = sizes(held);
    let units = inputs.div_ceil(UNIT_INPUTS);
    let (strip_bytes, shared_bytes) = (units * sizes.unit, units / SHARING * sizes.shared);
    let mut packed = vec![0; bytes(held, outputs, inputs)];
    let strips = outputs.div_ceil(WIDTH);
    let (strips, shared) = packed.split_at_mut(strips * strip_bytes);
    let row = inputs / held.block_size() * size;
    // A format without shared parts has no bytes of them to divide.
    let mut shared: Vec<&mut [u8]> = match shared_bytes {
        0 => strips
            .chunks(strip_bytes.max(1))
            .map(|_| &mut [][..])
            .collect(),
        some => shared.chunks_mut(some).collect(),
    };
    strips
        .par_chunks_mut(strip_bytes.max(1))
        .zip(data.par_chunks((WIDTH * row).max(1)))
        .zip(shared.par_iter_mut())
        .for_each(|((strip, data), shared)| {
            let strip = Strip {
                held,
                sizes,
                strip,
                shared,
            };
            strip.fill::<F>(data, size, row);
        });
    packed
}

/// The parts of 16 outputs.
struct Strip<'a> {
    held: BlockType,
    sizes: Sizes,
    strip: &'a mut [u8],
    shared: &'a mut [u8],
}

impl Strip<'_> {
    /// Fills the strip with up to 16 rows of `row` bytes.
    fn fill<F: Format>(mut self, data: &[u8], size: usize, row: usize) {
        let together = self.held.block_size() / BLOCK;
        let mut record = vec![0; F::SCALES];
        for (c, data) in data.chunks_exact(row).enumerate() {
            for (at, data) in data.chunks_exact(size).enumerate() {
                for sub in 0..together {
                    let quants = F::read(data, sub, c, &mut record);
                    let block = at * together + sub;
                    self.put_quants(F::BITS, c, block, &quants);
                    self.put_scales(c, block, sub, &record);
                }
            }
        }
    }

    fn put_quants(&mut self, bits: usize, c: usize, block: usize, quants: &formats::Block) {
        let (unit, high) = (block / 2 * self.sizes.unit, self.sizes.high);
        let unit = &mut self.strip[unit..][..self.sizes.unit];
        for (k, &q) in quants.iter().enumerate() {
            // The fragment, the thread, its register and the half word.
            let m = block % 2 * 2 + k / 16;
            let lane = c % GROUPS * 4 + k % 16 / 4;
            let (j, half) = (k % 4 / 2 * 2 + c / GROUPS, k % 2);
            if bits == 8 {
                unit[m / 2 * 512 + 16 * lane + m % 2 * 8 + 2 * j + half] = q;
                continue;
            }
            put(unit, 16 * lane + 4 * m, 4 * j + 16 * half, q & 15);
            match bits {
                5 => put(unit, high + 4 * lane, 4 * m + j + 16 * half, q >> 4),
                6 => put(
                    unit,
                    high + 8 * lane + m / 2 * 4,
                    2 * (m % 2 * 4 + j) + 16 * half,
                    q >> 4,
                ),
                _ => (),
            }
        }
    }

    /// Stores the scales of a block from a record of the CPU's layout, in which it is block `sub`.
    fn put_scales(&mut self, c: usize, block: usize, sub: usize, record: &[u8]) {
        let Sizes {
            scales,
            scale_bytes,
            unit,
            shared,
            ..
        } = self.sizes;
        let at = block / 2 * unit + scales + c % GROUPS * scale_bytes + c / GROUPS * 4;
        let to = &mut self.strip[at..];
        // The shared part of output `c`, of so many bytes per output.
        let shared_at = |bytes: usize| {
            block / 2 / SHARING * shared + c % GROUPS * 2 * bytes + c / GROUPS * bytes
        };
        let half = |from: usize| &record[from + 2 * c..][..2];
        match scales_of(self.held) {
            Scales::Block => to[block % 2 * 2..][..2].copy_from_slice(half(sub * 2 * WIDTH)),
            Scales::BlockOffset => {
                to[block % 2 * 2..][..2].copy_from_slice(half(0));
                to[8 + block % 2 * 2..][..2].copy_from_slice(half(2 * WIDTH));
            }
            Scales::SuperOffset => {
                to[block % 2] = record[scales_k::SC + sub * WIDTH + c];
                to[2 + block % 2] = record[scales_k::MN + sub * WIDTH + c];
                let shared = &mut self.shared[shared_at(4)..];
                shared[..2].copy_from_slice(half(0));
                shared[2..4].copy_from_slice(half(scales_k::M));
            }
            Scales::HalfBlock => {
                for half in 0..2 {
                    to[block % 2 * 2 + half] = record[formats::Q6K::factors(sub, half) + c];
                }
                self.shared[shared_at(2)..][..2].copy_from_slice(half(0));
            }
        }
    }
}

/// Puts bits into the little-endian word at `at`, which has zeros there. They do not cross a byte.
fn put(unit: &mut [u8], at: usize, bit: usize, value: u8) {
    unit[at + bit / 8] |= value << (bit % 8);
}
