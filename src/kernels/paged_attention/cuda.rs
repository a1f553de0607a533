//! The CUDA side: tables for the kernels, and their launches.

use super::super::gpu::{self, *};
use super::batch::AttentionBatch;
use super::plan::Dims;
use super::tables::{CHUNK, MAX_LONG_QUERIES, MAX_QUERIES, TILE, TableCapacity, max_tile_rows};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Device, Result};

/// The same as in the kernels.
const THREADS: usize = 256;
const WEIGHTS: usize = CHUNK + 8;
const LONG_THREADS: usize = MAX_LONG_QUERIES / 16 * 32;
/// With fewer thread blocks than this, each chunk of a sequence gets its own block: two blocks per
/// multiprocessor of a large GPU.
const FULL: usize = 264;
/// Bytes of shared memory that a block may have without setting an attribute.
const SHARED: usize = 48 << 10;

/// Bytes of shared memory that a block of the kernel for prompts needs.
fn shared_by_long(head_dim: usize, dtype: DType) -> usize {
    CHUNK * ((2 * head_dim + 32 + 8) * dtype.size_in_bytes() + 4)
}

/// Bytes of shared memory that a block of the kernel for all other rows needs.
fn shared(head_dim: usize, dtype: DType) -> usize {
    let key = head_dim + if dtype == DType::F32 { 4 } else { 32 };
    let value = head_dim + 8;
    let weights = MAX_QUERIES * (WEIGHTS + 2);
    CHUNK * (key + value) * dtype.size_in_bytes() + 4 * (weights + CHUNK)
}

/// Does the same as the CPU side, except for the order of additions.
pub(super) fn launch(
    batch: &AttentionBatch<'_>,
    dims: Dims,
    scale: f32,
    (q, q_layout): (&CudaStorage, &Layout),
    (k, k_layout): (&CudaStorage, &Layout),
    (v, v_layout): (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    let name = "paged-attention";
    let (dtype, d) = (q.dtype(), dims.head_dim);
    if k.dtype() != dtype || ![64, 128].contains(&d) || dims.group() > MAX_QUERIES {
        candle_core::bail!(
            "{name}: no CUDA kernel for heads of {d} values in {dtype:?} with {} query heads per K/V head and pools in {:?}",
            dims.group(),
            k.dtype()
        );
    }
    let device = q.device().clone();
    let rows = q_layout.dims()[0];
    let cuda = Device::Cuda(device.clone());
    // The kernel for prompts uses tensor cores, which do not take f32.
    let prefill = dtype != DType::F32 && !batch.is_batch_invariant();
    let tables = batch.send(&cuda, dims.group(), prefill, None)?;
    if tables.group() != dims.group() {
        candle_core::bail!(
            "{name}: the tables are for {} query heads per K/V head, not {}",
            tables.group(),
            dims.group()
        );
    }
    let TableCapacity { tiles, chunks } = tables.capacity;
    let split = chunks > 1 && tiles * dims.kv_heads < FULL;
    let (tiles_at, blocks_at, trees_at) = (
        tables.tiles.storage_and_layout(),
        tables.blocks.storage_and_layout(),
        tables.trees.storage_and_layout(),
    );
    let tiles_at = gpu::view::<u32>(name, &tiles_at.0, tiles_at.1)?;
    let blocks_at = gpu::view::<u32>(name, &blocks_at.0, blocks_at.1)?;
    let trees_at = gpu::view::<i64>(name, &trees_at.0, trees_at.1)?;
    let named = |part: &str| format!("{part}_{}_{d}", gpu::suffix(dtype));
    let kernel = |part| gpu::function(&device, name, gpu::PAGED_ATTENTION, &named(part));
    gpu::with_float!(name, dtype, T => {
        let q = gpu::contiguous::<T>(name, q, q_layout)?;
        let k = gpu::contiguous::<T>(name, k, k_layout)?;
        let v = gpu::contiguous::<T>(name, v, v_layout)?;
        let floats = match split {
            true => tables.short_rows * dims.heads * chunks * (d + 2),
            false => 1,
        };
        // SAFETY: the first kernel writes everything that the second one reads.
        let partials = unsafe { device.alloc::<f32>(floats)? };
        // SAFETY: the kernels write every element.
        let out = unsafe { device.alloc::<T>(rows * dims.heads * d)? };
        macro_rules! parameters {
            ($args:ident) => {
                $args.arg(&tiles_at).arg(&blocks_at).arg(&trees_at).arg(&partials);
                builder_arg!(
                    $args,
                    dims.heads as i32,
                    dims.kv_heads as i32,
                    batch.block_size() as i32,
                    chunks as i32,
                    scale
                );
            };
        }
        if tiles > 0 {
            let attend = kernel(if split { "attend_split" } else { "attend_whole" })?;
            let bytes = shared(d, dtype);
            if bytes > SHARED {
                let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                attend.function.set_attribute(limit, bytes as i32).w()?;
            }
            let mut args = attend.builder();
            args.arg(&q).arg(&k).arg(&v).arg(&out);
            parameters!(args);
            let depth = if split { chunks } else { 1 };
            let grid = gpu::grid((tiles, dims.kv_heads, depth), THREADS, bytes);
            // SAFETY: the arguments match the kernel's parameters. `AttentionBatch` and
            // `PagedAttention::dims` have checked that rows and blocks are inside q and the pools.
            unsafe { args.launch(grid) }.w()?;
        }
        if split {
            let merge = kernel("merge")?;
            let mut args = merge.builder();
            args.arg(&out);
            parameters!(args);
            let grid = gpu::grid((tiles, dims.heads, max_tile_rows(dims.group())), d, 0);
            // SAFETY: as above.
            unsafe { args.launch(grid) }.w()?;
        }
        if tables.long > 0 {
            let prefill = gpu::function(&device, "prefill", gpu::PREFILL, &named("prefill"))?;
            let tiles = tiles_at.slice(tiles * TILE..);
            let mut args = prefill.builder();
            args.arg(&q).arg(&k).arg(&v).arg(&out).arg(&tiles).arg(&blocks_at);
            builder_arg!(
                args,
                dims.heads as i32,
                dims.kv_heads as i32,
                batch.block_size() as i32,
                scale
            );
            let grid = (tables.long, dims.kv_heads, 1);
            let grid = gpu::grid(grid, LONG_THREADS, shared_by_long(d, dtype));
            // SAFETY: as above; this kernel writes the rows that the other one does not.
            unsafe { args.launch(grid) }.w()?;
        }
        Ok(CudaStorage::wrap_cuda_slice(out, device))
    })
}
