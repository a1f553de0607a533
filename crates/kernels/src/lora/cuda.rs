//! Launches the kernels of LoRA adapters.

use super::{LoraPart, RowsOfLora};
use crate::gpu;
use crate::graph::{Values, unrecorded};
use crate::writes::Writes;
use candle_core::{DType, Device, Result, Tensor};
use std::sync::Arc;

const NAME: &str = "lora";
/// Rows of a block; as in `lora.cu`.
const ROWS: usize = 8;
/// Threads of blocks that compute a product with a row of A in each warp. There are few such products, so blocks are small.
const SHRINK_THREADS: usize = 64;
/// Threads of blocks that compute an output in each.
const EXPAND_THREADS: usize = 128;
/// Values of 16 bytes, in the dtype with most. Weights begin at whole packs.
const PACK: usize = 8;
/// Numbers of an entry of a table: `Part` of `lora.cu`.
const ENTRY: usize = 5;

/// A linear layer: its parts among those of all layers, and its width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Site {
    first: usize,
    count: usize,
    inputs: usize,
    outputs: usize,
}

/// See [`DeviceLora`](super::DeviceLora).
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    /// All weights, one after the other.
    weights: Tensor,
    /// `[parts, ENTRY]` i64, as `lora.cu` says.
    table: Tensor,
    sites: Arc<[Site]>,
    /// The largest sum of ranks of a layer's parts.
    ranks: usize,
}

impl Adapter {
    /// See [`DeviceLora::new`](super::DeviceLora::new).
    pub fn new(sites: &[Vec<LoraPart>], dtype: DType, device: &Device) -> Result<Self> {
        let mut weights = Vec::new();
        let mut len = 0;
        let mut add = |weight: &Tensor| -> Result<usize> {
            let weight = weight.to_dtype(dtype)?.flatten_all()?;
            let (start, count) = (len, weight.elem_count());
            len = (start + count).next_multiple_of(PACK);
            weights.push(weight.pad_with_zeros(0, 0, len - start - count)?);
            Ok(start)
        };
        let (mut shapes, mut entries, mut ranks) = (Vec::new(), Vec::new(), 0);
        for parts in sites {
            let first = entries.len();
            let (mut outputs, mut start) = (0, 0);
            for part in parts {
                let mut entry = Entry {
                    start,
                    first: outputs,
                    outputs: part.outputs,
                    ..Entry::default()
                };
                if let Some(pair) = &part.pair {
                    let rank = pair.down.dim(0)?;
                    if pair.down.dims() != [rank, part.inputs]
                        || pair.up.dims() != [part.outputs, rank]
                    {
                        candle_core::bail!("{NAME}: {:?} and {:?}", pair.down, pair.up);
                    }
                    entry.weights = [add(&pair.down)?, add(&pair.up.t()?.contiguous()?)?];
                    (entry.rank, entry.scale) = (rank, pair.scale);
                    start += rank;
                }
                outputs += part.outputs;
                entries.push(entry);
            }
            let inputs = parts.first().map_or(0, |part| part.inputs);
            if parts.iter().any(|part| part.inputs != inputs) {
                candle_core::bail!("{NAME}: weights of one layer have different inputs");
            }
            shapes.push(Site {
                first,
                count: parts.len(),
                inputs,
                outputs,
            });
            ranks = ranks.max(start);
        }
        if weights.is_empty() {
            candle_core::bail!("{NAME}: an adapter without weights");
        }
        let weights = Tensor::cat(&weights, 0)?;
        let _unrecorded = unrecorded();
        let weights = weights.to_device(device)?;
        let base = gpu::address(&weights, &device.as_cuda_device()?.cuda_stream())?;
        let numbers = entries.iter();
        let numbers = numbers.flat_map(|entry| entry.numbers(base, dtype.size_in_bytes()));
        let numbers: Vec<i64> = numbers.collect();
        let table = Tensor::from_vec(numbers, (entries.len(), ENTRY), device)?;
        // Each thread has its own GPU queue, and another one computes with it.
        device.synchronize()?;
        Ok(Self {
            weights,
            table,
            sites: shapes.into(),
            ranks,
        })
    }
}

/// What an adapter adds to one weight.
#[derive(Default)]
struct Entry {
    /// The places of A and of B transposed among the weights.
    weights: [usize; 2],
    rank: usize,
    /// The place of its first product with A among those of the layer.
    start: usize,
    /// Its first output among those of the layer.
    first: usize,
    outputs: usize,
    scale: f32,
}

impl Entry {
    /// `Part` of `lora.cu`, with weights of `size` bytes a value from `base` on.
    fn numbers(&self, base: u64, size: usize) -> [i64; ENTRY] {
        let [down, up] = self.weights.map(|at| base + (at * size) as u64);
        let two = |low: usize, high: usize| u64::from(low as u32) | (high as u64) << 32;
        let all = [
            down,
            up,
            two(self.rank, self.start),
            two(self.first, self.outputs),
            u64::from(self.scale.to_bits()),
        ];
        all.map(|number| number as i64)
    }
}

/// See [`LoraRows::room`](super::LoraRows::room).
pub(super) fn room(rows: &[RowsOfLora<'_>]) -> usize {
    let ranks = rows.iter().map(|(_, adapter)| adapter.inner.ranks);
    ranks.max().map_or(0, usize::next_power_of_two)
}

/// See [`LoraRows`](super::LoraRows).
#[derive(Debug)]
pub(super) struct Rows {
    /// `[rows]` i64: the addresses of the tables, 0 = a row has none.
    addresses: Tensor,
    sites: Arc<[Site]>,
    dtype: DType,
    /// Memory for the products with A of a layer, `[rows, room]` f32. All layers share it.
    narrow: Tensor,
}

impl Rows {
    /// See [`LoraRows::new`](super::LoraRows::new).
    pub fn new(rows: &[RowsOfLora<'_>], count: usize, device: &Device) -> Result<Self> {
        let Some((_, first)) = rows.first() else {
            candle_core::bail!("{NAME}: no row has an adapter");
        };
        let room = room(rows);
        let narrow = gpu::allocate(device.as_cuda_device()?, DType::F32, count * room)?;
        let none = Self {
            addresses: Tensor::zeros(count, DType::I64, device)?,
            sites: first.inner.sites.clone(),
            dtype: first.inner.weights.dtype(),
            narrow: narrow.reshape((count, room))?,
        };
        let mut writes = Writes::default();
        none.replace(rows, &mut writes)?;
        writes.write()?;
        Ok(none)
    }

    /// See [`LoraRows::replace`](super::LoraRows::replace).
    pub fn replace(&self, rows: &[RowsOfLora<'_>], writes: &mut Writes) -> Result<()> {
        let (count, room) = self.narrow.dims2()?;
        let device = self.addresses.device();
        let stream = device.as_cuda_device()?.cuda_stream();
        let mut addresses = vec![0; count];
        for (rows, adapter) in rows {
            let Adapter {
                weights,
                table,
                sites,
                ranks,
            } = &adapter.inner;
            let is_same = Arc::ptr_eq(sites, &self.sites) || *sites == self.sites;
            let fits = is_same
                && weights.dtype() == self.dtype
                && table.device().location() == device.location()
                && *ranks <= room;
            let own = addresses.get_mut(rows.clone()).filter(|_| fits);
            let Some(own) = own else {
                candle_core::bail!(
                    "{NAME}: rows {rows:?} of {count} have an adapter of another model, or of rank {ranks}"
                );
            };
            own.fill(gpu::address(table, &stream)? as i64);
        }
        writes.push(&self.addresses, Values::I64(&addresses))
    }

    /// See [`LoraRows::add`](super::LoraRows::add).
    ///
    /// # Safety
    /// As there.
    pub unsafe fn add(&self, site: usize, x: &Tensor, y: &Tensor) -> Result<()> {
        let (rows, room) = self.narrow.dims2()?;
        let Some(site) = self.sites.get(site) else {
            candle_core::bail!("{NAME}: layer {site} of {}", self.sites.len());
        };
        if x.dims() != [rows, site.inputs] || y.dims() != [rows, site.outputs] {
            candle_core::bail!("{NAME}: {x:?} and {y:?} for {rows} rows of {site:?}");
        }
        gpu::expect_dtype(NAME, self.dtype, [x, y])?;
        let device = x.device().as_cuda_device()?;
        let kernel = |part: &str| {
            let name = format!("lora_{part}_{}", gpu::suffix(self.dtype));
            gpu::function(device, NAME, gpu::LORA, &name)
        };
        let shrink = kernel("shrink")?;
        let launch = shrink.launch().tensor(&self.addresses)?;
        let launch = launch.tensor(x)?.tensor(&self.narrow)?;
        let launch = launch.int(rows).int(site.inputs).int(room);
        let launch = launch.int(site.first).int(site.count);
        let blocks = room.div_ceil(SHRINK_THREADS / 32);
        gpu::check_blocks(blocks)?;
        let grid = gpu::grid((rows.div_ceil(ROWS), blocks, 1), SHRINK_THREADS, 0);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes: tables were
        // made for these layers, their ranks are within the room, and the caller vouches for their memory.
        unsafe { launch.run(grid)? };
        let expand = kernel("expand")?;
        let launch = expand.launch().tensor(&self.addresses)?;
        let launch = launch.tensor(&self.narrow)?.tensor(y)?;
        let launch = launch.int(rows).int(site.outputs).int(room);
        let launch = launch.int(site.first).int(site.count);
        let blocks = site.outputs.div_ceil(EXPAND_THREADS);
        gpu::check_blocks(blocks)?;
        let grid = gpu::grid((rows.div_ceil(ROWS), blocks, 1), EXPAND_THREADS, 0);
        // SAFETY: as above.
        unsafe { launch.run(grid) }
    }
}
