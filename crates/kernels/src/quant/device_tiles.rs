//! The memory layout of quantized weights on a GPU: `cuda/unpack.cuh` describes and reads it.

use super::block_type::BlockType;
use super::formats::{
    BLOCK, Block, DeviceFormat, DeviceScales, Format, HalfBlockScales, SUPER, ScaleLayout,
    SuperOffsets, TileFormat, WIDTH, with_format,
};
use super::pack::held_blocks;
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// Inputs of a unit.
pub(super) const UNIT_INPUTS: usize = 64;
/// Units that share a part, if the format has such parts.
const SHARING: usize = SUPER / UNIT_INPUTS;
/// Outputs `g` and `g + 8` belong to one thread.
const GROUPS: usize = WIDTH / 2;
/// Where the bits above the fourth begin in a unit.
const HIGH: usize = UNIT_INPUTS * WIDTH / 2;

/// A quantized weight `[outputs, inputs]` on a GPU, in a layout of our own. A clone shares its memory.
#[derive(Clone)]
pub struct DeviceQuantMatrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) layout: Layout,
    /// U8, as [`Layout::pack`] lays it out.
    pub(super) tiles: Tensor,
}

impl DeviceQuantMatrix {
    /// Whether there is a kernel for GGUF blocks of this type, with activations in `dtype`.
    pub fn keeps(kind: BlockType, dtype: DType) -> bool {
        Layout::of(kind).is_some() && matches!(dtype, DType::F16 | DType::BF16)
    }

    /// Bytes of a weight of a type that [`keeps`](Self::keeps) accepts.
    pub fn bytes(kind: BlockType, outputs: usize, inputs: usize) -> usize {
        Layout::of(kind).map_or(0, |layout| layout.bytes(outputs, inputs))
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
        let fits = data.len() == expected && inputs.is_multiple_of(kind.block_size());
        let Some(layout) = Layout::of(kind).filter(|_| fits) else {
            let found = data.len();
            candle_core::bail!("{found} bytes cannot be a [{outputs}, {inputs}] weight in {kind}");
        };
        let packed = layout.pack(kind, data, outputs, inputs);
        let len = packed.len();
        Ok(Self {
            outputs,
            inputs,
            layout,
            tiles: Tensor::from_vec(packed, len, &Device::Cpu)?.to_device(device)?,
        })
    }

    /// Outputs and inputs.
    pub fn shape(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    /// Where a kernel finds its parts.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> DeviceMemory<'_> {
        let (strip, _) = self.layout.strip_bytes(self.inputs);
        DeviceMemory {
            tiles: &self.tiles,
            shared_from: self.outputs.div_ceil(WIDTH) * strip,
            unit: self.layout.unit,
            shared: self.layout.shared,
        }
    }

    /// The type of its blocks.
    pub fn kind(&self) -> BlockType {
        self.layout.tiles.block_type()
    }
}

/// The parts of a [`DeviceQuantMatrix`], with sizes in bytes.
#[cfg(feature = "cuda")]
pub(crate) struct DeviceMemory<'a> {
    /// Units of all strips, then the parts that units share.
    pub tiles: &'a Tensor,
    /// Where the latter begin.
    pub shared_from: usize,
    /// A unit, and what four units share.
    pub unit: usize,
    pub shared: usize,
}

/// A format, and the sizes of its parts in bytes.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    tiles: TileFormat,
    pub(super) format: DeviceFormat,
    /// Where the scales begin in a unit.
    scales: usize,
    /// Bytes of scales for outputs `g` and `g + 8`.
    scale_bytes: usize,
    unit: usize,
    /// What [`SHARING`] units share.
    shared: usize,
}

impl Layout {
    /// The layout that holds blocks of this type without loss; `None` if there is no kernel.
    fn of(kind: BlockType) -> Option<Self> {
        let tiles = TileFormat::of(kind)?;
        let (bits, format) = with_format!(tiles, F => (F::BITS, F::DEVICE?));
        let scales = UNIT_INPUTS * WIDTH * bits / 8;
        let (scale_bytes, shared) = match format.scales {
            DeviceScales::Block => (8, 0),
            DeviceScales::BlockOffset => (16, 0),
            DeviceScales::SuperOffset => (8, 8),
            DeviceScales::HalfBlock => (8, 4),
        };
        Some(Self {
            tiles,
            format,
            scales,
            scale_bytes,
            unit: scales + GROUPS * scale_bytes,
            shared: GROUPS * shared,
        })
    }

    /// Bytes of a unit and of its shared part.
    #[cfg(feature = "cuda")]
    pub(super) fn stage_bytes(self) -> usize {
        self.unit + self.shared
    }

    /// Bytes of the units and of the shared parts of 16 outputs.
    fn strip_bytes(self, inputs: usize) -> (usize, usize) {
        let units = inputs.div_ceil(UNIT_INPUTS);
        (units * self.unit, units / SHARING * self.shared)
    }

    /// Bytes of a weight `[outputs, inputs]`.
    fn bytes(self, outputs: usize, inputs: usize) -> usize {
        let (units, shared) = self.strip_bytes(inputs);
        outputs.div_ceil(WIDTH) * (units + shared)
    }

    /// Lays out GGUF blocks of `kind`, whose length is that of `[outputs, inputs]`. Missing outputs of the last
    /// strip and missing inputs of the last unit are zero.
    fn pack(self, kind: BlockType, data: &[u8], outputs: usize, inputs: usize) -> Vec<u8> {
        let (data, size) = held_blocks(kind, self.tiles.block_type(), data);
        let (strip_bytes, shared_bytes) = self.strip_bytes(inputs);
        let mut packed = vec![0; self.bytes(outputs, inputs)];
        let (strips, shared) = packed.split_at_mut(outputs.div_ceil(WIDTH) * strip_bytes);
        let row = inputs / kind.block_size() * size;
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
                    layout: self,
                    together: kind.block_size() / BLOCK,
                    strip,
                    shared,
                };
                with_format!(self.tiles, F => strip.fill::<F>(data, size, row));
            });
        packed
    }
}

/// The parts of 16 outputs.
struct Strip<'a> {
    layout: Layout,
    /// Blocks of 32 per GGUF block.
    together: usize,
    strip: &'a mut [u8],
    shared: &'a mut [u8],
}

impl Strip<'_> {
    /// Fills the strip with up to 16 rows of `row` bytes.
    fn fill<F: Format>(mut self, data: &[u8], size: usize, row: usize) {
        let mut record = vec![0; F::SCALES];
        for (c, data) in data.chunks_exact(row).enumerate() {
            for (at, data) in data.chunks_exact(size).enumerate() {
                for sub in 0..self.together {
                    F::Scales::read(data, sub, c, &mut record);
                    let block = at * self.together + sub;
                    self.put_quants(F::BITS, c, block, &F::quants(data, sub));
                    self.put_scales(c, block, sub, &record);
                }
            }
        }
    }

    fn put_quants(&mut self, bits: usize, c: usize, block: usize, quants: &Block) {
        let unit = self.layout.unit;
        let unit = &mut self.strip[block / 2 * unit..][..unit];
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
                5 => put(unit, HIGH + 4 * lane, 4 * m + j + 16 * half, q >> 4),
                6 => put(
                    unit,
                    HIGH + 8 * lane + m / 2 * 4,
                    2 * (m % 2 * 4 + j) + 16 * half,
                    q >> 4,
                ),
                _ => (),
            }
        }
    }

    /// Stores the scales of a block from a record of the CPU's layout, in which it is block `sub`.
    fn put_scales(&mut self, c: usize, block: usize, sub: usize, record: &[u8]) {
        let Layout {
            scales,
            scale_bytes,
            unit,
            shared,
            ..
        } = self.layout;
        let at = block / 2 * unit + scales + c % GROUPS * scale_bytes + c / GROUPS * 4;
        let to = &mut self.strip[at..];
        // The shared part of output `c`, of so many bytes per output.
        let shared_at = |bytes: usize| {
            block / 2 / SHARING * shared + c % GROUPS * 2 * bytes + c / GROUPS * bytes
        };
        let half = |from: usize| &record[from + 2 * c..][..2];
        match self.layout.format.scales {
            DeviceScales::Block => to[block % 2 * 2..][..2].copy_from_slice(half(sub * 2 * WIDTH)),
            DeviceScales::BlockOffset => {
                to[block % 2 * 2..][..2].copy_from_slice(half(0));
                to[8 + block % 2 * 2..][..2].copy_from_slice(half(2 * WIDTH));
            }
            DeviceScales::SuperOffset => {
                to[block % 2] = record[SuperOffsets::SC + sub * WIDTH + c];
                to[2 + block % 2] = record[SuperOffsets::MN + sub * WIDTH + c];
                let shared = &mut self.shared[shared_at(4)..];
                shared[..2].copy_from_slice(half(0));
                shared[2..4].copy_from_slice(half(SuperOffsets::M));
            }
            DeviceScales::HalfBlock => {
                for half in 0..2 {
                    to[block % 2 * 2 + half] = record[HalfBlockScales::factors(sub, half) + c];
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
