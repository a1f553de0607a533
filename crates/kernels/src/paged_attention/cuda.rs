//! The CUDA side: tables for the kernels, and their launches.

use super::super::gpu::{self, Launch};
use super::super::q8_blocks;
use super::super::rope_kv_write::RopeArgs;
use super::batch::AttentionBatch;
use super::params::AttentionParams;
use super::plan::Dims;
use super::tables::{
    AttentionTables, CHUNK, FLOAT8_HEAD_DIM_STEP, GPU_HEAD_DIM_STEP, MAX_GPU_LATENT_KEY,
    MAX_GPU_LATENT_RANK, MAX_LONG_QUERIES, MAX_QUERIES, TILE, TableCapacity, latent_group,
};
use candle_core::{CudaDevice, DType, Device, Result, Tensor};

/// Sizes that the kernels have under the same names.
const THREADS: usize = 256;
const WEIGHTS: usize = CHUNK + 8;
const LONG_THREADS: usize = MAX_LONG_QUERIES / 16 * 32;
/// With fewer thread blocks than this, each chunk of a sequence gets its own block: two blocks per
/// multiprocessor of a large GPU. The kernels have so many counters of chunks.
const FULL: usize = 264;
/// Maximum number of floats of partial results: 256 MiB, of the memory that is kept free for libraries.
const MAX_PARTIALS: usize = 64 << 20;

/// Maximum number of values of a head that blocks that attend also rotate: registers have room for their queries.
const MAX_ROTATED: usize = 128;
/// Values of a head that a block of the kernel for prompts sums up, at most.
const MAX_LONG_VALUES: usize = 256;

/// What the pools of keys and values hold.
#[derive(Clone, Copy, PartialEq)]
enum PoolKind {
    /// Numbers of the dtype of queries.
    Numbers,
    /// Blocks of `Q8_0`.
    Blocks,
    Float8,
}

impl PoolKind {
    /// That of pools in `pool` beside queries in `dtype`, if there are kernels for both.
    fn of(pool: DType, dtype: DType) -> Option<Self> {
        match pool {
            DType::U8 => Some(Self::Blocks),
            DType::F8E4M3 => Some(Self::Float8),
            own => (own == dtype).then_some(Self::Numbers),
        }
    }
}

/// The kernels for heads of a size.
#[derive(Clone, Copy)]
struct Kernels {
    /// The values of a head that they compute with.
    width: usize,
    /// The end of their names.
    heads: &'static str,
    /// The module and the PTX of all of them, if they have one.
    own: Option<(&'static str, &'static str)>,
}

impl Kernels {
    /// The kernels for heads of `head_dim` values, in such pools, if there are any.
    fn of(head_dim: usize, pools: PoolKind) -> Option<Self> {
        let exact = |width, heads| Self {
            width,
            heads,
            own: None,
        };
        let with = |width, heads, module, ptx| Self {
            width,
            heads,
            own: Some((module, ptx)),
        };
        if !head_dim.is_multiple_of(GPU_HEAD_DIM_STEP) {
            return None;
        }
        use PoolKind::{Blocks, Float8, Numbers};
        match (head_dim, pools) {
            (64, Numbers) => Some(exact(64, "64")),
            (128, Numbers) => Some(exact(128, "128")),
            (1..128, Numbers) => Some(with(128, "to_128", "padded-128", gpu::PADDED_128)),
            (129..=256, Numbers) => Some(with(256, "to_256", "padded-256", gpu::PADDED_256)),
            (257..=512, Numbers) => Some(with(512, "to_512", "padded-512", gpu::PADDED_512)),
            (64, Blocks) => Some(with(64, "q8_0_64", "kv-q8-64", gpu::KV_Q8_0_64)),
            (128, Blocks) => Some(with(128, "q8_0_128", "kv-q8-128", gpu::KV_Q8_0_128)),
            (1..128, Blocks) => Some(with(128, "q8_0_to_128", "kv-q8-128", gpu::KV_Q8_0_128)),
            (129..=256, Blocks) => Some(with(256, "q8_0_to_256", "kv-q8-256", gpu::KV_Q8_0_256)),
            (257..=512, Blocks) => Some(with(512, "q8_0_to_512", "kv-q8-512", gpu::KV_Q8_0_512)),
            // Numbers are loaded 16 at a time.
            (dim, Float8) if !dim.is_multiple_of(FLOAT8_HEAD_DIM_STEP) => None,
            (64, Float8) => Some(with(64, "fp8_64", "kv-fp8-64", gpu::KV_FP8_64)),
            (128, Float8) => Some(with(128, "fp8_128", "kv-fp8-128", gpu::KV_FP8_128)),
            (1..128, Float8) => Some(with(128, "fp8_to_128", "kv-fp8-128", gpu::KV_FP8_128)),
            (129..=256, Float8) => Some(with(256, "fp8_to_256", "kv-fp8-256", gpu::KV_FP8_256)),
            (257..=512, Float8) => Some(with(512, "fp8_to_512", "kv-fp8-512", gpu::KV_FP8_512)),
            _ => None,
        }
    }

    /// The kernels for latent attention.
    const LATENT: Self = Self {
        width: MAX_GPU_LATENT_KEY,
        heads: "latent",
        own: Some(("latent", gpu::LATENT)),
    };

    /// The kernel `part`, whose module and PTX are `shared` if these kernels have none of their own.
    fn load(
        self,
        device: &CudaDevice,
        part: &str,
        shared: (&str, &str),
        dtype: DType,
    ) -> Result<gpu::Kernel> {
        let (module, ptx) = self.own.unwrap_or(shared);
        let name = format!("{part}_{}_{}", gpu::suffix(dtype), self.heads);
        gpu::function(device, module, ptx, &name)
    }
}

/// Adds the keys or values of a pool: their address, or those of the bytes and scales of blocks.
fn add_pool<'l>(launch: Launch<'l>, pool: &Tensor) -> Result<Launch<'l>> {
    let mut planes = q8_blocks::planes(pool)?.into_iter();
    planes.try_fold(launch, |launch, plane| launch.tensor(&plane))
}

/// As `IS_WIDE` in `paged_attention.cuh`.
fn is_wide(width: usize) -> bool {
    width > 128
}

/// Bytes of shared memory for the keys and values of a chunk, with so many values from one to the next. Those of wide
/// heads take turns.
fn shared_by_chunk(width: usize, (key, value): (usize, usize), dtype: DType) -> usize {
    let values = if is_wide(width) {
        key.max(value)
    } else {
        key + value
    };
    CHUNK * (values * dtype.size_in_bytes() + size_of::<i32>())
}

/// Bytes of shared memory that a block of the kernel for prompts needs, which computes with heads of `width` values and
/// has room for so many chunks; see `Shared` in `prefill.cuh`.
fn shared_by_long(width: usize, dtype: DType, stages: usize) -> usize {
    let rows = (width + 32, width.min(MAX_LONG_VALUES) + 8);
    let slots = CHUNK * size_of::<i32>();
    stages * (shared_by_chunk(width, rows, dtype) - slots) + 2 * slots
}

/// The chunks that a block of the kernel for prompts has room for: two if it loads ahead, and a multiprocessor then still
/// has shared memory for as many blocks as it has registers for.
fn stages_of_long(
    device: &CudaDevice,
    kernels: Kernels,
    dtype: DType,
    pools: PoolKind,
) -> Result<usize> {
    // What a multiprocessor takes for itself of the memory of each block.
    const OWN: usize = 1 << 10;
    if pools != PoolKind::Numbers || is_wide(kernels.width) {
        return Ok(1);
    }
    let blocks = if kernels.width == 64 { 3 } else { 2 };
    let (_, shared) = gpu::size(device.cuda_stream().context())?;
    let has_room = blocks * (shared_by_long(kernels.width, dtype, 2) + OWN) <= shared + OWN;
    Ok(1 + usize::from(has_room))
}

/// Bytes of shared memory that a block of the kernel for all other rows needs.
pub(crate) fn shared_of_attention(width: usize, dtype: DType) -> usize {
    let key = width + if dtype == DType::F32 { 4 } else { 32 };
    let weights = MAX_QUERIES * (WEIGHTS + 2);
    shared_by_chunk(width, (key, width + 8), dtype) + 4 * weights
}

/// Bytes of shared memory that a block of the kernel for latent attention needs: keys are values and not padded, see
/// `Shared` in `attend.cuh`.
fn shared_of_latent(dtype: DType) -> usize {
    let keys = CHUNK * (MAX_GPU_LATENT_KEY * dtype.size_in_bytes() + size_of::<i32>());
    keys + 4 * MAX_QUERIES * (WEIGHTS + 2)
}

/// What the kernels for short spans take after q, pools and output.
struct Args<'a> {
    tables: &'a AttentionTables,
    partials: Tensor,
    dims: Dims,
    block_size: usize,
    params: AttentionParams<'a>,
    /// The values that latent attention sums up; 0 = those of heads.
    latent: usize,
}

/// The floats of partial results, of `summed` values a head, if each chunk of a sequence gets its own block; `None` = there
/// are enough tiles without that.
fn split_partials(capacity: TableCapacity, dims: Dims, summed: usize) -> Option<usize> {
    let TableCapacity {
        tiles,
        chunks,
        rows,
    } = capacity;
    let partials = rows * dims.heads * chunks * (summed + 2);
    (tiles * dims.kv_heads < FULL && partials <= MAX_PARTIALS).then_some(partials)
}

impl<'a> Args<'a> {
    /// Whether each chunk of a sequence gets its own block, and the arguments with memory for their results. Both ways
    /// have the same bits.
    fn new(
        batch: &AttentionBatch<'_>,
        tables: &'a AttentionTables,
        (dims, latent): (Dims, usize),
        params: AttentionParams<'a>,
        device: &CudaDevice,
    ) -> Result<(bool, Self)> {
        let summed = if latent > 0 { latent } else { dims.head_dim };
        let split = split_partials(tables.capacity, dims, summed);
        let split = split.filter(|_| tables.capacity.chunks > 1);
        let partials = split.unwrap_or(1);
        let args = Self {
            tables,
            partials: gpu::scratch(device, partials)?,
            dims,
            block_size: batch.block_size(),
            params,
            latent,
        };
        Ok((split.is_some(), args))
    }

    /// Launches the kernel for the tiles of short spans, which has `bytes` bytes of shared memory.
    fn run(
        &self,
        split: bool,
        kernels: Kernels,
        bytes: usize,
        [q, k, v, out]: [&Tensor; 4],
    ) -> Result<()> {
        let TableCapacity { tiles, chunks, .. } = self.tables.capacity;
        if tiles == 0 {
            return Ok(());
        }
        let part = if split {
            "attend_split"
        } else {
            "attend_whole"
        };
        let device = q.device().as_cuda_device()?;
        let exact = ("paged-attention", gpu::PAGED_ATTENTION);
        let attend = kernels.load(device, part, exact, q.dtype())?;
        let attend = attend.with_shared(bytes)?;
        let launch = add_pool(attend.launch().tensor(q)?, k)?;
        let launch = add_pool(launch, v)?.tensor(out)?;
        let depth = if split { chunks } else { 1 };
        let grid = gpu::grid((tiles, self.dims.kv_heads, depth), THREADS, bytes);
        // SAFETY: the arguments match the kernel's parameters. `AttentionBatch` and the callers have checked that rows
        // and blocks are inside q and the pools.
        unsafe { self.add_to(launch)?.run(grid) }
    }

    fn add_to<'l>(&self, launch: Launch<'l>) -> Result<Launch<'l>> {
        let AttentionTables {
            tiles,
            blocks,
            trees,
            ..
        } = self.tables;
        let launch = launch
            .tensor(tiles)?
            .tensor(blocks)?
            .tensor(trees)?
            .tensor(&self.partials)?;
        let launch = launch
            .int(self.dims.heads)
            .int(self.dims.kv_heads)
            .int(self.block_size);
        let launch = launch.int(self.tables.capacity.chunks);
        let launch = add_params(launch, self.params)?;
        Ok(launch.int(self.dims.head_dim).int(self.latent))
    }
}

/// Adds what makes up the kernels' `Scores`. Windows are counted in i32, as positions are.
fn add_params<'l>(launch: Launch<'l>, params: AttentionParams<'_>) -> Result<Launch<'l>> {
    let (window, ahead) = params.reach();
    let all = i32::MAX as usize;
    launch
        .float(params.scale)
        .int(window.min(all))
        .int(ahead.min(all))
        .float(params.soft_cap.unwrap_or(0.))
        .optional(params.sinks)
}

/// The tables of a batch whose activations have this dtype, for `group` query heads per K/V head.
pub(crate) fn tables<'a>(
    batch: &'a AttentionBatch<'_>,
    device: &Device,
    group: usize,
    dtype: DType,
) -> Result<&'a AttentionTables> {
    tables_for(batch, device, group, batch.has_prefill(dtype))
}

/// As [`tables`]; `prefill` says whether prompts have tiles apart.
fn tables_for<'a>(
    batch: &'a AttentionBatch<'_>,
    device: &Device,
    group: usize,
    prefill: bool,
) -> Result<&'a AttentionTables> {
    let tables = batch.send(device, group, prefill, None)?;
    // Tiles have room for the rows of fewer query heads.
    if tables.group() < group {
        candle_core::bail!(
            "paged-attention: the tables are for up to {} query heads per K/V head, not {group}",
            tables.group()
        );
    }
    Ok(tables)
}

/// Attention of `q`, `[rows, heads, kept]`, over `pool`, `[num_slots, 1, kept]`, whose first `rank` values are the values,
/// too: `[rows, heads, rank]`. Both widths are multiples of 8, up to 576 and 512. All rows use one kernel, prompts
/// included.
///
/// # Errors
/// If the shapes or dtypes do not match, the pool has fewer slots than `batch` was checked for, or the device fails.
pub(crate) fn latent_attention(
    q: &Tensor,
    pool: &Tensor,
    rank: usize,
    batch: &AttentionBatch<'_>,
    params: AttentionParams<'_>,
) -> Result<Tensor> {
    let name = "latent attention";
    let ((rows, heads, kept), (slots, count, width)) = (q.dims3()?, pool.dims3()?);
    let steps = [kept, rank].map(|width| width.is_multiple_of(GPU_HEAD_DIM_STEP));
    let is_known = steps == [true; 2] && kept <= MAX_GPU_LATENT_KEY && rank <= MAX_GPU_LATENT_RANK;
    let fits = count == 1 && width == kept && rank <= kept && heads > 0;
    let has_room = rows >= batch.rows() && slots >= batch.num_slots();
    if !is_known || !fits || !has_room {
        candle_core::bail!(
            "{name}: no kernel for q {:?} with {rank} values, pool {:?} and a batch of {} rows over {} slots",
            q.dims(),
            pool.dims(),
            batch.rows(),
            batch.num_slots()
        );
    }
    gpu::expect_dtype(name, q.dtype(), [pool])?;
    let dims = Dims {
        heads,
        kv_heads: heads / latent_group(heads),
        head_dim: kept,
    };
    let tables = tables_for(batch, q.device(), dims.group(), false)?;
    if tables.long > 0 {
        candle_core::bail!("{name}: the tables have tiles of prompts apart");
    }
    let device = q.device().as_cuda_device()?;
    let out = gpu::output(device, q.dtype(), (rows, heads, rank))?;
    let (split, args) = Args::new(batch, tables, (dims, rank), params, device)?;
    let bytes = shared_of_latent(q.dtype());
    args.run(split, Kernels::LATENT, bytes, [q, pool, pool, &out])?;
    Ok(out)
}

/// Does the same as the CPU side, except for the order of additions, and the dtype that it computes in: that of `q`, to which
/// values of blocks are rounded, too; it has those of FP8.
pub(super) fn launch(
    batch: &AttentionBatch<'_>,
    dims: Dims,
    params: AttentionParams<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Tensor> {
    let name = "paged-attention";
    let (dtype, d) = (q.dtype(), dims.head_dim);
    let kind = PoolKind::of(k.dtype(), dtype).filter(|_| dims.group() <= MAX_QUERIES);
    let kernels = kind.and_then(|kind| Kernels::of(d, kind));
    let (Some(kind), Some(kernels)) = (kind, kernels) else {
        candle_core::bail!(
            "{name}: no CUDA kernel for heads of {d} values in {dtype:?} with {} query heads per K/V head and pools in {:?}",
            dims.group(),
            k.dtype()
        );
    };
    gpu::expect_dtype(name, k.dtype(), [v])?;
    let device = q.device().as_cuda_device()?;
    let tables = tables(batch, q.device(), dims.group(), dtype)?;
    let out = gpu::output(device, dtype, q.shape())?;
    let (split, args) = Args::new(batch, tables, (dims, 0), params, device)?;
    let bytes = shared_of_attention(kernels.width, dtype);
    args.run(split, kernels, bytes, [q, k, v, &out])?;
    if tables.long > 0 {
        let prefill = kernels.load(device, "prefill", ("prefill", gpu::PREFILL), dtype)?;
        let stages = stages_of_long(device, kernels, dtype, kind)?;
        let bytes = shared_by_long(kernels.width, dtype, stages);
        let prefill = prefill.with_shared(bytes)?;
        let first = tables.capacity.tiles * TILE;
        let long = tables.tiles.narrow(0, first, tables.long * TILE)?;
        let launch = add_pool(prefill.launch().tensor(q)?, k)?;
        let launch = add_pool(launch, v)?.tensor(&out)?;
        let launch = launch.tensor(&long)?.tensor(&tables.blocks)?;
        let launch = launch
            .int(dims.heads)
            .int(dims.kv_heads)
            .int(batch.block_size());
        let launch = add_params(launch, params)?.int(d).int(stages);
        let depth = kernels.width.div_ceil(MAX_LONG_VALUES);
        let grid = gpu::grid((tables.long, dims.kv_heads, depth), LONG_THREADS, bytes);
        // SAFETY: as above; this kernel writes the rows that the other one does not.
        unsafe { launch.run(grid)? };
    }
    Ok(out)
}

/// Attention of rows that are not rotated yet, and the write of their keys and values, in one launch; `None` = there is no
/// such launch. All rows attend.
pub(crate) fn attend_rotating(
    rope: &RopeArgs<'_>,
    batch: &AttentionBatch<'_>,
    params: AttentionParams<'_>,
) -> Result<Option<Tensor>> {
    let (dtype, d, rows) = (rope.qkv.dtype(), rope.head_dim, rope.rows);
    let dims = Dims {
        heads: rope.heads,
        kv_heads: rope.kv_heads,
        head_dim: d,
    };
    let is_16_bits = matches!(dtype, DType::F16 | DType::BF16);
    let has_groups = dims.kv_heads > 0 && dims.heads.is_multiple_of(dims.kv_heads);
    // Each block looks at all rows for those that are among its keys.
    let is_few = (1..=gpu::FEW_ROWS).contains(&rows) && rows == batch.rows();
    let kind = (rope.pools).and_then(|pools| PoolKind::of(pools.k.dtype(), dtype));
    let kernels = kind.and_then(|kind| Kernels::of(d, kind));
    let kernels = kernels.filter(|kernels| kernels.width <= MAX_ROTATED);
    let (Some(kernels), Some(pools), true, true, true) =
        (kernels, rope.pools, is_16_bits, has_groups, is_few)
    else {
        return Ok(None);
    };
    if dims.group() > MAX_QUERIES || pools.k.dim(0)? < batch.num_slots() {
        return Ok(None);
    }
    let device = rope.qkv.device().as_cuda_device()?;
    let tables = tables(batch, rope.qkv.device(), dims.group(), dtype)?;
    let TableCapacity { tiles, chunks, .. } = tables.capacity;
    let Some(partials) = split_partials(tables.capacity, dims, d) else {
        return Ok(None);
    };
    if tables.long > 0 || tiles == 0 {
        return Ok(None);
    }
    let args = Args {
        tables,
        partials: gpu::scratch(device, partials)?,
        dims,
        block_size: batch.block_size(),
        params,
        latent: 0,
    };
    let exact = ("paged-attention", gpu::PAGED_ATTENTION);
    let kernel = kernels.load(device, "attend_rotating", exact, dtype)?;
    let bytes = shared_of_attention(kernels.width, dtype);
    let kernel = kernel.with_shared(bytes)?;
    let out = gpu::output(device, dtype, (rows, dims.heads, d))?;
    let (launch, stride) = rope.begin(kernel.launch())?;
    let launch = add_pool(add_pool(launch, pools.k)?, pools.v)?.tensor(&out)?;
    let launch = args.add_to(rope.end(launch.int(rows), stride))?;
    let grid = gpu::grid((tiles, dims.kv_heads, chunks), THREADS, bytes);
    // SAFETY: the arguments match the kernel's parameters. `RopeArgs` and `AttentionBatch` have checked that heads, slots
    // and blocks are inside the rows and the pools. All work runs in the order of one stream.
    unsafe { launch.run(grid)? };
    Ok(Some(out))
}
