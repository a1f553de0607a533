//! The CUDA side: tables for the kernels, and their launches.

use super::super::gpu;
use super::{Dims, PagedAttention, Rows};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, PushKernelArg, sys};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, builder_arg};

/// As in the kernels.
const CHUNK: usize = 64;
const THREADS: usize = 128;
const LANES: usize = 32;
const WEIGHTS: usize = LANES + 4;
/// Values of a tile, each an i32.
const TILE: usize = 6;
/// Blocks of threads below which a sequence's chunks go to blocks of their own: two for each
/// multiprocessor of a large GPU.
const FULL: usize = 264;
/// Shared memory that a block gets without asking.
const SHARED: usize = 48 << 10;

/// What the kernels need of [`Rows`], on the device.
pub(super) struct Tables {
    /// `[tiles][TILE]`: first row, rows, context, start in the segment, start of the block table,
    /// start of the tree masks (-1 = causal).
    tiles: CudaSlice<i32>,
    count: usize,
    blocks: CudaSlice<u32>,
    trees: CudaSlice<u64>,
    /// Rows of the longest tile.
    rows: usize,
    /// Chunks of the longest context.
    chunks: usize,
}

impl Tables {
    /// Cuts the segments into tiles, so that no tile has more than [`LANES`] pairs of a row and a
    /// head of one K/V head.
    fn new(rows: &Rows<'_>, dims: Dims, device: &CudaDevice) -> Result<Self> {
        let most = LANES / dims.group();
        let (mut tiles, mut blocks, mut trees) = (Vec::new(), Vec::new(), Vec::new());
        let (mut longest, mut keys) = (0, 0);
        for segment in &rows.segments {
            let tree = segment.tree.map_or(-1, |_| trees.len() as i32);
            for start in (0..segment.rows.len()).step_by(most) {
                let len = most.min(segment.rows.len() - start);
                let first = segment.rows.start + start;
                longest = longest.max(len);
                tiles.extend([first, len, segment.context, start, blocks.len()].map(|n| n as i32));
                tiles.push(tree);
            }
            keys = keys.max(segment.context + segment.rows.len());
            blocks.extend_from_slice(segment.blocks);
            trees.extend_from_slice(segment.tree.unwrap_or_default());
        }
        // There is no such thing as an empty allocation.
        trees.push(0);
        Ok(Self {
            count: tiles.len() / TILE,
            tiles: device.clone_htod(&tiles)?,
            blocks: device.clone_htod(&blocks)?,
            trees: device.clone_htod(&trees)?,
            rows: longest,
            chunks: keys.div_ceil(CHUNK),
        })
    }
}

/// Bytes of shared memory that a block needs.
fn shared(head_dim: usize, dtype: DType) -> usize {
    let size = dtype.size_in_bytes();
    let keys = CHUNK * (head_dim * size + 16);
    let values = CHUNK * head_dim * size;
    keys + values + 4 * (LANES * head_dim + CHUNK * WEIGHTS + 2 * LANES)
}

impl PagedAttention<'_> {
    /// As the CPU side, but for the order of additions.
    pub(super) fn launch(
        &self,
        dims: Dims,
        (q, q_layout): (&CudaStorage, &Layout),
        (k, k_layout): (&CudaStorage, &Layout),
        (v, v_layout): (&CudaStorage, &Layout),
    ) -> Result<CudaStorage> {
        let name = "paged-attention";
        let (dtype, d) = (q.dtype(), dims.head_dim);
        if k.dtype() != dtype || ![64, 128].contains(&d) || dims.group() > LANES {
            candle_core::bail!(
                "{name}: no CUDA kernel for heads of {d} values in {dtype:?}, {} of them for one of keys in {:?}",
                dims.group(),
                k.dtype()
            );
        }
        let device = q.device().clone();
        let rows = q_layout.dims()[0];
        let tables = match self.rows.tables.get() {
            Some(tables) => tables,
            None => {
                let tables = Tables::new(self.rows, dims, &device)?;
                self.rows.tables.get_or_init(|| tables)
            }
        };
        let split = tables.chunks > 1 && tables.count * dims.kv_heads < FULL;
        let kernel = |part: &str| {
            let kernel = format!("{part}_{}_{d}", gpu::suffix(dtype));
            gpu::function(&device, name, gpu::PAGED_ATTENTION, &kernel)
        };
        let attend = kernel(if split {
            "attend_split"
        } else {
            "attend_whole"
        })?;
        let bytes = shared(d, dtype);
        if bytes > SHARED {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            attend.function.set_attribute(most, bytes as i32).w()?;
        }
        gpu::with_float!(name, dtype, T => {
            let q = gpu::contiguous::<T>(name, q, q_layout)?;
            let k = gpu::contiguous::<T>(name, k, k_layout)?;
            let v = gpu::contiguous::<T>(name, v, v_layout)?;
            let floats = match split {
                true => rows * dims.heads * tables.chunks * (d + 2),
                false => 1,
            };
            // SAFETY: the first kernel writes what the second reads.
            let partials = unsafe { device.alloc::<f32>(floats)? };
            // SAFETY: the kernels write all of it.
            let out = unsafe { device.alloc::<T>(rows * dims.heads * d)? };
            macro_rules! parameters {
                ($args:ident) => {
                    $args.arg(&tables.tiles).arg(&tables.blocks).arg(&tables.trees).arg(&partials);
                    builder_arg!(
                        $args,
                        dims.heads as i32,
                        dims.kv_heads as i32,
                        self.rows.block_size as i32,
                        tables.chunks as i32,
                        self.scale
                    );
                };
            }
            let mut args = attend.builder();
            args.arg(&q).arg(&k).arg(&v).arg(&out);
            parameters!(args);
            let depth = if split { tables.chunks } else { 1 };
            let grid = gpu::grid((tables.count, dims.kv_heads, depth), THREADS, bytes);
            // SAFETY: the arguments are the kernel's; `dims` has checked what it reads.
            unsafe { args.launch(grid) }.w()?;
            if split {
                let merge = kernel("merge")?;
                let mut args = merge.builder();
                args.arg(&out);
                parameters!(args);
                let grid = gpu::grid((tables.count, dims.heads, tables.rows), d, 0);
                // SAFETY: as above.
                unsafe { args.launch(grid) }.w()?;
            }
            Ok(CudaStorage::wrap_cuda_slice(out, device))
        })
    }
}
