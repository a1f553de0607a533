//! The plan in device memory, and the launch.

use super::plan::Phases;
use super::{ForwardModel, ForwardRows, MAX_FORWARD_ROWS};
use crate::gpu;
use crate::gpu::{WrapErr, address};
use crate::paged_attention::shared_of_attention;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
use candle_core::{CudaDevice, DType, Device, Result, Tensor};
use sys::CUdevice_attribute as Attribute;

/// Sizes that the kernel has under the same names.
const WARPS: usize = 16;
const FORWARD_THREADS: usize = WARPS * 32 + 32;
const MAX_SLOTS: usize = 32;
/// The barriers of the ring, and what a block needs all the time.
const HEAD_BYTES: usize = 2 * MAX_SLOTS * 8 + 512;
const TILE_SUMS: usize = 16 * 8;
/// Passes whose sums are kept, times their tiles.
const KEPT_SUMS: usize = 4;
const ROW_PADDING: usize = 16;
const MAX_NORM_WARPS: usize = 32;
/// Teams of threads that attend at the same time.
const TEAMS: usize = 2;
/// With fewer slots of the ring, copies would wait for products.
const MIN_SLOTS: usize = 2;
/// Maximum bytes of the partial results of attention.
const MAX_PARTIALS: usize = 256 << 20;

/// See [`ForwardPlan`](super::ForwardPlan).
pub(super) struct Plan {
    /// `Plan` of `plan.cuh`.
    plan: Tensor,
    /// Everything whose address is in the plan.
    _held: Vec<Tensor>,
    device: Device,
    dtype: DType,
    hidden: usize,
    /// Query heads, K/V heads, values of a head.
    heads: (usize, usize, usize),
    /// Pairs of values that are rotated in the layers with rope; 0 = there are none.
    pairs: usize,
    /// Slots per block, and slots of the pools.
    pool: (usize, usize),
    /// Outputs of the output layer; `None` = there is none.
    vocab: Option<usize>,
    half_bytes: usize,
    /// Multiprocessors, and bytes of shared memory that a block may have.
    gpu: (usize, usize),
}

/// The multiprocessors of a GPU that can run such a forward, and the shared memory of a block.
fn check_gpu(context: &CudaContext) -> Result<(usize, usize)> {
    let read = |attribute| context.attribute(attribute).w();
    let major = read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let together = read(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)?;
    if major < 9 || together == 0 {
        candle_core::bail!(
            "a GPU of compute capability {major}.x: only 9.0 and higher, with cooperative launches"
        );
    }
    gpu::size(context)
}

impl Plan {
    /// See [`ForwardPlan::new`](super::ForwardPlan::new).
    pub fn new(model: &ForwardModel<'_>) -> Result<Self> {
        let (device, dtype) = (model.device, model.dtype);
        let cuda = device.as_cuda_device()?;
        let stream = cuda.cuda_stream();
        let gpu = check_gpu(stream.context())?;
        let phases = Phases::of(model, &stream)?;
        // Fails if this program was built for GPUs without such copies.
        kernel(cuda, dtype, 1)?;
        let heads = (model.heads, model.kv_heads, model.head_dim);
        let mut pairs = (model.layers.iter().map(|layer| layer.pairs)).filter(|&pairs| pairs > 0);
        let one = pairs.next().unwrap_or_default();
        if pairs.any(|pairs| pairs != one) {
            candle_core::bail!("layers with different position embeddings");
        }
        let slots = model.layers[0].pool.0.dim(0)?;
        if (model.layers.iter()).any(|layer| layer.pool.0.dim(0).ok() != Some(slots)) {
            candle_core::bail!("layers with pools of different sizes");
        }
        let mut held = phases.held.clone();
        let mut place = |tensor: Tensor| -> Result<u64> {
            let at = address(&tensor, &stream)?;
            held.push(tensor);
            Ok(at)
        };
        let rows = |width| Tensor::zeros((MAX_FORWARD_ROWS, width), dtype, device);
        let counters = |count: usize| Tensor::zeros(count, DType::U32, device);
        let (q, kv) = (heads.0 * heads.2, heads.1 * heads.2);
        let signed: Vec<i64> = phases.words.iter().map(|&word| word as i64).collect();
        let pair = |first: usize, second: usize| first as u64 | (second as u64) << 32;
        let words = [
            place(Tensor::new(signed, device)?)?,
            place(counters(phases.len())?)?,
            place(counters(MAX_FORWARD_ROWS * heads.1)?)?,
            place(rows(q + 2 * kv)?)?,
            place(rows(q)?)?,
            place(rows(phases.wide)?)?,
            pair(phases.len(), model.hidden),
            pair(heads.0, heads.1),
            pair(heads.2, model.block_size),
            pair(model.eps.to_bits() as usize, phases.half_bytes),
        ];
        let words = words.map(|word| word as i64);
        let vocab = model.output.map(|output| output.shape());
        Ok(Self {
            plan: Tensor::new(&words, device)?,
            _held: held,
            device: device.clone(),
            dtype,
            hidden: model.hidden,
            heads,
            pairs: one,
            pool: (model.block_size, slots),
            vocab: vocab.transpose()?.map(|(outputs, _)| outputs),
            half_bytes: phases.half_bytes,
            gpu,
        })
    }

    /// See [`ForwardPlan::check`](super::ForwardPlan::check).
    pub fn check(&self, rows: usize, chunks: usize) -> Result<()> {
        self.ring(rows)?;
        let bytes = self.partials(rows, chunks) * size_of::<f32>();
        if bytes > MAX_PARTIALS {
            candle_core::bail!("{bytes} bytes of partial results of attention");
        }
        Ok(())
    }

    /// Values of the partial results of attention.
    fn partials(&self, rows: usize, chunks: usize) -> usize {
        rows * self.heads.0 * chunks * (self.heads.2 + 2)
    }

    /// Where the ring begins in shared memory, and the number of its slots.
    fn ring(&self, rows: usize) -> Result<(usize, usize)> {
        if rows == 0 || rows > MAX_FORWARD_ROWS {
            candle_core::bail!("a forward of {rows} rows in one launch");
        }
        let size = self.dtype.size_in_bytes();
        let sums = 4 * (KEPT_SUMS * WARPS * TILE_SUMS + MAX_FORWARD_ROWS * MAX_NORM_WARPS);
        let products = sums + rows * (self.hidden + ROW_PADDING) * size;
        let team = shared_of_attention(self.heads.2, self.dtype) + size_of::<i32>();
        let phases = products.max(TEAMS * team.next_multiple_of(16));
        let at = (HEAD_BYTES + phases).next_multiple_of(128);
        let slots = self.gpu.1.saturating_sub(at) / (2 * self.half_bytes);
        if slots < MIN_SLOTS {
            candle_core::bail!(
                "{rows} rows of {} values leave no shared memory for weights",
                self.hidden
            );
        }
        Ok((at, slots.min(MAX_SLOTS)))
    }

    /// See [`ForwardPlan::run`](super::ForwardPlan::run).
    pub fn run(&self, inputs: &ForwardRows<'_>) -> Result<Tensor> {
        let (rows, wanted) = (inputs.x.dim(0)?, inputs.wanted.dims1()?);
        let tables = self.tables(inputs, rows)?;
        let capacity = tables.capacity();
        self.check(rows, capacity.chunks)?;
        let (ring_at, ring_slots) = self.ring(rows)?;
        let cuda = self.device.as_cuda_device()?;
        let out = match self.vocab {
            Some(vocab) => gpu::output(cuda, DType::F32, (wanted, vocab))?,
            None => gpu::output(cuda, self.dtype, (wanted, self.hidden))?,
        };
        let (logits, normed) = match self.vocab {
            Some(_) => (Some(&out), None),
            None => (None, Some(&out)),
        };
        let partials = gpu::scratch(cuda, self.partials(rows, capacity.chunks).max(1))?;
        let (cos, sin) = inputs.angles.unzip();
        let bytes = ring_at + ring_slots * 2 * self.half_bytes;
        // The limit belongs to the function, which other plans and numbers of rows use, too.
        let kernel = kernel(cuda, self.dtype, tiles(rows))?.with_shared(self.gpu.1)?;
        let launch = kernel.launch().tensor(&self.plan)?.tensor(inputs.x)?;
        let launch = launch.optional(cos)?.optional(sin)?;
        let launch = launch.tensor(inputs.slots.tensor())?;
        let [tiles, blocks, trees] = tables.tensors();
        let launch = launch.tensor(tiles)?.tensor(blocks)?.tensor(trees)?;
        let launch = launch.tensor(&partials)?.tensor(inputs.wanted)?;
        let launch = launch.optional(logits)?.optional(normed)?;
        let launch = launch.int(rows).int(wanted);
        let launch = launch.int(capacity.tiles).int(capacity.chunks);
        let launch = launch.int(ring_at).int(ring_slots);
        let grid = gpu::grid((self.gpu.0, 1, 1), FORWARD_THREADS, bytes);
        // SAFETY: the arguments match the kernel's parameters. `Phases::of` has checked the sizes of what is in the
        // plan, which holds it, and `tables` those of the rows; the contents of tables, slots and `wanted` were
        // checked on the host. Buffers of the plan are used by one launch at a time, in the order of one stream.
        unsafe { launch.run_together(grid)? };
        Ok(out)
    }

    /// The tables of a call, if its parts fit the plan.
    fn tables<'a>(
        &self,
        inputs: &'a ForwardRows<'_>,
        rows: usize,
    ) -> Result<&'a crate::AttentionTables> {
        let ForwardRows {
            x,
            angles,
            slots,
            batch,
            wanted,
        } = *inputs;
        let pool = (batch.block_size(), batch.num_slots());
        let angles_fit = match angles {
            None => self.pairs == 0,
            Some((cos, sin)) => {
                [cos, sin].map(|t| (t.dims(), t.dtype()))
                    == [(&[rows, self.pairs][..], self.dtype); 2]
            }
        };
        let fits = x.dims() == [rows, self.hidden]
            && x.dtype() == self.dtype
            && angles_fit
            && (slots.len(), slots.num_slots()) == (rows, self.pool.1)
            && (batch.rows(), pool) == (rows, self.pool)
            && wanted.dtype() == DType::U32
            && wanted.dims1()? <= rows;
        if !fits {
            candle_core::bail!("forward: {x:?}, {angles:?}, {slots:?} and {pool:?} do not fit");
        }
        let group = self.heads.0 / self.heads.1;
        let tables = batch.send(&self.device, group, false, None)?;
        if tables.group() != group
            || tables.has_prompts()
            || tables.capacity().tiles > MAX_FORWARD_ROWS
        {
            candle_core::bail!("forward: the tables are for other kernels");
        }
        Ok(tables)
    }
}

/// Tiles of eight rows.
fn tiles(rows: usize) -> usize {
    rows.div_ceil(8)
}

fn kernel(device: &CudaDevice, dtype: DType, tiles: usize) -> Result<gpu::Kernel> {
    let ptx = match dtype {
        DType::F16 => gpu::FORWARD_F16,
        _ => gpu::FORWARD_BF16,
    };
    let module = format!("forward_{}", gpu::suffix(dtype));
    gpu::function(device, &module, ptx, &format!("{module}_{tiles}"))
}
