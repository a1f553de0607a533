//! The CUDA side: tables for the kernels, and their launches.

use super::super::gpu::{self, Launch};
use super::batch::AttentionBatch;
use super::params::AttentionParams;
use super::plan::Dims;
use super::tables::{
    AttentionTables, CHUNK, GPU_HEAD_DIMS, MAX_LONG_QUERIES, MAX_QUERIES, TILE, TableCapacity,
};
use candle_core::{DType, Result, Tensor};

/// Sizes that the kernels have under the same names.
const THREADS: usize = 256;
const WEIGHTS: usize = CHUNK + 8;
const LONG_THREADS: usize = MAX_LONG_QUERIES / 16 * 32;
/// With fewer thread blocks than this, each chunk of a sequence gets its own block: two blocks per
/// multiprocessor of a large GPU. The kernels have so many counters of chunks.
const FULL: usize = 264;

/// Bytes of shared memory that a block of the kernel for prompts needs.
fn shared_by_long(head_dim: usize, dtype: DType) -> usize {
    CHUNK * ((2 * head_dim + 32 + 8) * dtype.size_in_bytes() + 4)
}

/// Bytes of shared memory that a block of the kernel for all other rows needs.
pub(crate) fn shared_of_attention(head_dim: usize, dtype: DType) -> usize {
    let key = head_dim + if dtype == DType::F32 { 4 } else { 32 };
    let value = head_dim + 8;
    let weights = MAX_QUERIES * (WEIGHTS + 2);
    CHUNK * (key + value) * dtype.size_in_bytes() + 4 * (weights + CHUNK)
}

/// What the kernels for short spans take after q, pools and output.
struct Args<'a> {
    tables: &'a AttentionTables,
    partials: Tensor,
    dims: Dims,
    block_size: usize,
    params: AttentionParams<'a>,
}

impl Args<'_> {
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
        add_params(launch.int(self.tables.capacity.chunks), self.params)
    }
}

/// Adds what makes up the kernels' `Scores`. Windows are counted in i32, as positions are.
fn add_params<'l>(launch: Launch<'l>, params: AttentionParams<'_>) -> Result<Launch<'l>> {
    let all = i32::MAX as usize;
    launch
        .float(params.scale)
        .int(params.window.map_or(all, |window| window.min(all)))
        .float(params.soft_cap.unwrap_or(0.))
        .optional(params.sinks)
}

/// Does the same as the CPU side, except for the order of additions.
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
    if k.dtype() != dtype || !GPU_HEAD_DIMS.contains(&d) || dims.group() > MAX_QUERIES {
        candle_core::bail!(
            "{name}: no CUDA kernel for heads of {d} values in {dtype:?} with {} query heads per K/V head and pools in {:?}",
            dims.group(),
            k.dtype()
        );
    }
    gpu::expect_dtype(name, dtype, [v])?;
    let device = q.device().as_cuda_device()?;
    // The kernel for prompts uses tensor cores, which do not take f32.
    let prefill = dtype != DType::F32 && !batch.is_batch_invariant();
    let tables = batch.send(q.device(), dims.group(), prefill, None)?;
    if tables.group() != dims.group() {
        candle_core::bail!(
            "{name}: the tables are for {} query heads per K/V head, not {}",
            tables.group(),
            dims.group()
        );
    }
    let TableCapacity {
        tiles,
        chunks,
        rows,
    } = tables.capacity;
    let split = chunks > 1 && tiles * dims.kv_heads < FULL;
    let named = |part: &str| format!("{part}_{}_{d}", gpu::suffix(dtype));
    let floats = match split {
        true => rows * dims.heads * chunks * (d + 2),
        false => 1,
    };
    let partials = gpu::scratch(device, floats)?;
    let out = gpu::output(device, dtype, q.shape())?;
    let args = Args {
        tables,
        partials,
        dims,
        block_size: batch.block_size(),
        params,
    };
    if tiles > 0 {
        let kernel = named(if split {
            "attend_split"
        } else {
            "attend_whole"
        });
        let attend = gpu::function(device, name, gpu::PAGED_ATTENTION, &kernel)?;
        let bytes = shared_of_attention(d, dtype);
        let attend = attend.with_shared(bytes)?;
        let launch = attend
            .launch()
            .tensor(q)?
            .tensor(k)?
            .tensor(v)?
            .tensor(&out)?;
        let depth = if split { chunks } else { 1 };
        let grid = gpu::grid((tiles, dims.kv_heads, depth), THREADS, bytes);
        // SAFETY: the arguments match the kernel's parameters. `AttentionBatch` and `PagedAttention::dims`
        // have checked that rows and blocks are inside q and the pools.
        unsafe { args.add_to(launch)?.run(grid)? };
    }
    if tables.long > 0 {
        let prefill = gpu::function(device, "prefill", gpu::PREFILL, &named("prefill"))?;
        let long = tables.tiles.narrow(0, tiles * TILE, tables.long * TILE)?;
        let launch = prefill
            .launch()
            .tensor(q)?
            .tensor(k)?
            .tensor(v)?
            .tensor(&out)?;
        let launch = launch.tensor(&long)?.tensor(&tables.blocks)?;
        let launch = launch
            .int(dims.heads)
            .int(dims.kv_heads)
            .int(batch.block_size());
        let grid = gpu::grid(
            (tables.long, dims.kv_heads, 1),
            LONG_THREADS,
            shared_by_long(d, dtype),
        );
        // SAFETY: as above; this kernel writes the rows that the other one does not.
        unsafe { add_params(launch, params)?.run(grid)? };
    }
    Ok(out)
}
