//! The memory layout of quantized weights on a GPU: `cuda/unpack.cuh` describes and reads it.

use super::block_type::BlockType;
use super::formats::{
    BLOCK, Block, DeviceFormat, DeviceScales, Format, HalfBlockOffsets, SUPER, ScaleLayout,
    SuperOffsets, SuperScales, TileFormat, WIDTH, of_half, with_format,
};
use super::kind::QuantKind;
use super::pack::held_blocks;
use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

/// Inputs of a unit.
pub(super) const UNIT_INPUTS: usize = 64;
/// Units that share a part, if the format has such parts.
const SHARING: usize = SUPER / UNIT_INPUTS;
/// Outputs `g` and `g + 8` belong to one thread.
const GROUPS: usize = WIDTH / 2;
/// Bytes of the scales of outputs `g` and `g + 8` in [`DeviceScales::Group`], and of the factor with what fills it up.
const GROUP_SCALES: usize = 8;
const FACTOR: usize = 16;
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
        Layout::of(kind).map_or(0, |(_, layout)| layout.bytes(outputs, inputs))
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
        let Some((tiles, layout)) = Layout::of(kind).filter(|_| fits) else {
            let found = data.len();
            candle_core::bail!("{found} bytes cannot be a [{outputs}, {inputs}] weight in {kind}");
        };
        let (data, size) = held_blocks(kind, data);
        let row = inputs / kind.block_size() * size;
        let together = kind.block_size() / BLOCK;
        let packed = layout.pack((outputs, inputs), |first, mut strip| {
            let data = &data[first * row..data.len().min((first + WIDTH) * row)];
            with_format!(tiles, F => strip.fill::<F>(data, together, size, row));
        });
        Self::packed(layout, packed, (outputs, inputs), device)
    }

    /// Copies to a GPU what [`Layout::pack`] laid out.
    pub(super) fn packed(
        layout: Layout,
        packed: Vec<u8>,
        (outputs, inputs): (usize, usize),
        device: &Device,
    ) -> Result<Self> {
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

    /// Its shape and format, for kernels that are given addresses of such weights.
    #[cfg(feature = "cuda")]
    pub(crate) fn without_memory(&self) -> Result<Self> {
        Ok(Self {
            tiles: Tensor::zeros(0, DType::U8, &Device::Cpu)?,
            ..self.clone()
        })
    }

    /// Its format.
    pub fn kind(&self) -> QuantKind {
        self.layout.kind
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
    kind: QuantKind,
    pub(super) format: DeviceFormat,
    /// Whether quants of 4 bits are places in a table. Then a register's two are in one byte.
    has_table: bool,
    /// Where the scales begin in a unit.
    scales: usize,
    /// Bytes of scales for outputs `g` and `g + 8`.
    scale_bytes: usize,
    unit: usize,
    /// What [`SHARING`] units share.
    shared: usize,
}

impl Layout {
    /// The layout that holds blocks of this type without loss, and what they are on the CPU; `None` if there is no kernel.
    fn of(kind: BlockType) -> Option<(TileFormat, Self)> {
        let tiles = TileFormat::of(kind)?;
        let (bits, format) = with_format!(tiles, F => (F::BITS, F::DEVICE?));
        Some((tiles, Self::new(tiles.kind(), bits, format)))
    }

    /// The layout of quants of so many bits.
    pub(super) fn new(kind: QuantKind, bits: usize, format: DeviceFormat) -> Self {
        let scales = UNIT_INPUTS * WIDTH * bits / 8;
        let (scale_bytes, shared) = match format.scales {
            DeviceScales::Block | DeviceScales::Unit => (8, 0),
            DeviceScales::BlockOffset => (16, 0),
            DeviceScales::BlockExponent => (4, 0),
            DeviceScales::Super => (4, 4),
            DeviceScales::SuperOffset => (8, 8),
            DeviceScales::HalfBlock => (8, 4),
            DeviceScales::HalfBlockOffset => (8, 8),
            // With a part of the factor.
            DeviceScales::Group => (GROUP_SCALES + FACTOR / GROUPS, 0),
        };
        let tables = [
            BlockType::Iq4Nl,
            BlockType::Iq4Xs,
            BlockType::Iq3S,
            BlockType::Iq3Xxs,
            BlockType::Iq2Xxs,
            BlockType::Iq2Xs,
        ];
        Self {
            kind,
            format,
            has_table: tables.map(QuantKind::Blocks).contains(&kind),
            scales,
            scale_bytes,
            unit: scales + GROUPS * scale_bytes,
            shared: GROUPS * shared,
        }
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
    pub(super) fn bytes(self, outputs: usize, inputs: usize) -> usize {
        let (units, shared) = self.strip_bytes(inputs);
        outputs.div_ceil(WIDTH) * (units + shared)
    }

    /// Lays out a weight of `[outputs, inputs]`: `fill` gets the first output of each strip, and the strip, whose quants
    /// and scales are zero.
    pub(super) fn pack(
        self,
        (outputs, inputs): (usize, usize),
        fill: impl Fn(usize, Strip<'_>) + Sync,
    ) -> Vec<u8> {
        let (strip_bytes, shared_bytes) = self.strip_bytes(inputs);
        let mut packed = vec![0; self.bytes(outputs, inputs)];
        let (strips, shared) = packed.split_at_mut(outputs.div_ceil(WIDTH) * strip_bytes);
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
            .zip(shared.par_iter_mut())
            .enumerate()
            .for_each(|(number, (strip, shared))| {
                let strip = Strip {
                    layout: self,
                    strip,
                    shared,
                };
                fill(WIDTH * number, strip);
            });
        packed
    }
}

/// The parts of 16 outputs.
pub(super) struct Strip<'a> {
    layout: Layout,
    strip: &'a mut [u8],
    shared: &'a mut [u8],
}

impl Strip<'_> {
    /// Fills the strip with up to 16 rows of `row` bytes: of GGUF blocks of `size` bytes, each of which is `together`
    /// blocks of 32.
    fn fill<F: Format>(&mut self, data: &[u8], together: usize, size: usize, row: usize) {
        let mut record = vec![0; F::SCALES];
        for (c, data) in data.chunks_exact(row).enumerate() {
            for (at, data) in data.chunks_exact(size).enumerate() {
                for sub in 0..together {
                    F::Scales::read(data, sub, c, &mut record);
                    let block = at * together + sub;
                    self.put_quants(F::BITS, c, block, &F::quants(data, sub));
                    self.put_scales(c, block, sub, &record);
                }
            }
        }
    }

    /// Stores the quants of block `block` of output `c`.
    pub(super) fn put_quants(&mut self, bits: usize, c: usize, block: usize, quants: &Block) {
        let Layout {
            unit, has_table, ..
        } = self.layout;
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
            if bits == 2 {
                put(
                    unit,
                    8 * lane + m / 2 * 4,
                    2 * (m % 2 * 4 + j) + 16 * half,
                    q,
                );
                continue;
            }
            let bit = if has_table {
                8 * j + 4 * half
            } else {
                4 * j + 16 * half
            };
            put(unit, 16 * lane + 4 * m, bit, q & 15);
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

    /// Where the scales of output `c` are in a unit.
    fn scales_at(&self, c: usize, unit: usize) -> usize {
        let layout = self.layout;
        let second = if layout.scale_bytes == 4 { 2 } else { 4 };
        unit * layout.unit + layout.scales + c % GROUPS * layout.scale_bytes + c / GROUPS * second
    }

    /// Stores the scale of output `c` in a unit, of [`DeviceScales::Unit`].
    pub(super) fn put_unit_scale(&mut self, c: usize, unit: usize, scale: f32) {
        let at = self.scales_at(c, unit);
        self.strip[at..][..size_of::<f32>()].copy_from_slice(&scale.to_le_bytes());
    }

    /// Stores the scales of the halves of a block of output `c`, of [`DeviceScales::Group`].
    pub(super) fn put_group_scales(&mut self, c: usize, block: usize, scales: [u8; 2]) {
        let of_unit = block / 2 * self.layout.unit + self.layout.scales;
        let at = of_unit + c % GROUPS * GROUP_SCALES + c / GROUPS * 4 + block % 2 * 2;
        self.strip[at..][..2].copy_from_slice(&scales);
    }

    /// Stores the factor of all scales in a unit, of [`DeviceScales::Group`].
    pub(super) fn put_factor(&mut self, unit: usize, factor: f32) {
        let at = unit * self.layout.unit + self.layout.scales + GROUPS * GROUP_SCALES;
        self.strip[at..][..size_of::<f32>()].copy_from_slice(&factor.to_le_bytes());
    }

    /// Stores the scales of a block from a record of the CPU's layout, in which it is block `sub`.
    fn put_scales(&mut self, c: usize, block: usize, sub: usize, record: &[u8]) {
        let shared = self.layout.shared;
        let at = self.scales_at(c, block / 2);
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
            DeviceScales::BlockExponent => to[block % 2] = record[sub * WIDTH + c],
            DeviceScales::Super => {
                to[block % 2] = record[SuperScales::factors(sub) + c].wrapping_add(32);
                self.shared[shared_at(2)..][..2].copy_from_slice(half(0));
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
                    to[block % 2 * 2 + half] = record[of_half(sub, half) + c];
                }
                self.shared[shared_at(2)..][..2].copy_from_slice(half(0));
            }
            DeviceScales::HalfBlockOffset => {
                for half in 0..2 {
                    to[block % 2 * 2 + half] = record[of_half(sub, half) + c];
                }
                let shared = &mut self.shared[shared_at(4)..];
                shared[..2].copy_from_slice(half(0));
                shared[2..4].copy_from_slice(half(HalfBlockOffsets::M));
            }
            // There are no blocks with them.
            DeviceScales::Unit | DeviceScales::Group => (),
        }
    }
}

/// Puts bits into the little-endian word at `at`, which has zeros there. They do not cross a byte.
fn put(unit: &mut [u8], at: usize, bit: usize, value: u8) {
    unit[at + bit / 8] |= value << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward in one launch would read a format that has no row as dense weights.
    #[test]
    fn forwards_in_one_launch_have_all_formats_of_blocks() {
        let formats = include_str!("cuda/formats.cuh");
        for kind in BlockType::all() {
            let Some((_, layout)) = Layout::of(kind) else {
                continue;
            };
            let QuantKind::Blocks(held) = layout.kind else {
                panic!("{kind} is held as {}", layout.kind);
            };
            let row = format!("DO({held}, {})", held.number());
            assert!(formats.contains(&row), "{kind} has no {row}");
        }
    }
}
