//! Launches the kernels of latent attention.

use super::{LatentRows, LatentShape, LatentWeights};
use crate::gpu;
use crate::paged_attention::{
    AttentionBatch, AttentionParams, GPU_HEAD_DIM_STEP, MAX_GPU_LATENT_KEY, MAX_GPU_LATENT_RANK,
    latent_attention,
};
use candle_core::{DType, Result, Tensor};

const NAME: &str = "latent attention";
/// Threads of a block that takes a row, and its warps.
const THREADS: usize = 128;
const WARPS: usize = THREADS / 32;
/// Queries that a warp rotates, one after another.
const HEADS_OF_WARP: usize = 4;
/// Inputs that a warp reads at a time, and values of 16 bytes.
const STEP: usize = 32;
const PACK: usize = 8;
/// Outputs of a warp, and rows of a block with many rows; as in `head_products.cu`.
const OUTPUTS: usize = 16;
const MANY_ROWS: usize = 64;
/// Rows of a block without tensor cores.
const ANY_ROWS: usize = 8;

/// See [`DeviceLatent`](super::DeviceLatent).
#[derive(Clone)]
pub(super) struct Latent {
    shape: LatentShape,
    keys: Tensor,
    values: Tensor,
    norm: Tensor,
    eps: f32,
    dtype: DType,
}

impl Latent {
    /// See [`DeviceLatent::new`](super::DeviceLatent::new).
    pub fn new(shape: LatentShape, weights: &LatentWeights<'_>) -> Result<Self> {
        let LatentShape {
            heads,
            nope,
            rope,
            rank,
            value,
        } = shape;
        let kept = rank + rope;
        let fits = weights.keys.dims() == [heads, rank, nope]
            && weights.values.dims() == [heads, value, rank]
            && weights.norm.dims() == [rank];
        let steps = [rank, kept].map(|width| width.is_multiple_of(GPU_HEAD_DIM_STEP));
        let has_kernel = steps == [true; 2]
            && rank <= MAX_GPU_LATENT_RANK
            && kept <= MAX_GPU_LATENT_KEY
            && rope.is_multiple_of(2);
        if !fits || !has_kernel || heads == 0 {
            candle_core::bail!("{NAME}: no CUDA kernel for {shape:?}, or weights of other shapes");
        }
        let dtype = weights.keys.dtype();
        gpu::expect_dtype(NAME, dtype, [weights.values, weights.norm])?;
        Ok(Self {
            shape,
            keys: weights.keys.contiguous()?,
            values: weights.values.contiguous()?,
            norm: weights.norm.contiguous()?,
            eps: weights.eps,
            dtype,
        })
    }

    /// Values that are kept of a token.
    fn kept(&self) -> usize {
        self.shape.rank + self.shape.rope
    }

    /// Values of a head's query.
    fn key(&self) -> usize {
        self.shape.nope + self.shape.rope
    }

    /// See [`DeviceLatent::write`](super::DeviceLatent::write).
    pub fn write(&self, of: &LatentRows<'_>) -> Result<Tensor> {
        let LatentShape { heads, rank, .. } = self.shape;
        let ((rows, width), (q_rows, q_width)) = (of.products.dims2()?, of.q.dims2()?);
        let (cos, sin) = of.angles;
        let half = self.shape.rope / 2;
        let fits = of.first + self.kept() <= width
            && q_rows == rows
            && q_width >= heads * self.key()
            && [cos, sin]
                .iter()
                .all(|angles| angles.dims() == [rows, half])
            && of.slots.len() == rows
            && of.pool.dims() == [of.pool.dim(0)?, 1, self.kept()]
            && of.pool.dim(0)? >= of.slots.num_slots();
        if !fits {
            candle_core::bail!(
                "{NAME}: products {:?}, queries {:?}, angles {:?} and {} slots of pool {:?} do not fit {:?}",
                of.products.dims(),
                of.q.dims(),
                cos.dims(),
                of.slots.num_slots(),
                of.pool.dims(),
                self.shape
            );
        }
        gpu::expect_dtype(NAME, self.dtype, [of.products, of.q, cos, sin, of.pool])?;
        let device = of.products.device().as_cuda_device()?;
        let queries = gpu::output(device, self.dtype, (rows, heads, self.kept()))?;
        let kernel = kernel(of.products, "latent_write")?;
        let launch = kernel.launch().tensor(of.products)?.tensor(of.q)?;
        let launch = launch.tensor(cos)?.tensor(sin)?.tensor(&self.norm)?;
        let launch = launch.tensor(of.slots.tensor())?.tensor(of.pool)?;
        let launch = launch.tensor(&queries)?.int(width).int(of.first);
        let launch = launch.int(q_width).int(heads).int(rank);
        let launch = launch.int(self.shape.nope).int(half).float(self.eps);
        let blocks = 1 + heads.div_ceil(WARPS * HEADS_OF_WARP);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes: the pool
        // contains every slot of `Slots`. All work runs in the order of one stream, so nothing else reads the pool at the
        // same time.
        unsafe { launch.run(gpu::grid((rows, blocks, 1), THREADS, 0))? };
        Ok(queries)
    }

    /// See [`DeviceLatent::attend`](super::DeviceLatent::attend).
    pub fn attend(
        &self,
        (q, queries): (&Tensor, &Tensor),
        pool: &Tensor,
        batch: &AttentionBatch<'_>,
        params: AttentionParams<'_>,
    ) -> Result<Tensor> {
        let LatentShape {
            heads, rank, value, ..
        } = self.shape;
        let ((rows, q_width), kept) = (q.dims2()?, self.kept());
        if queries.dims() != [rows, heads, kept] || q_width < heads * self.key() {
            candle_core::bail!(
                "{NAME}: queries {:?} and {:?} do not fit {:?}",
                q.dims(),
                queries.dims(),
                self.shape
            );
        }
        let in_heads = |head| Strides {
            head,
            row: heads * head,
        };
        let of_q = Strides {
            head: self.key(),
            row: q_width,
        };
        self.product(&self.keys, (q, of_q), (queries, in_heads(kept)))?;
        let attended = latent_attention(queries, pool, rank, batch, params)?;
        let device = q.device().as_cuda_device()?;
        let y = gpu::output(device, self.dtype, (rows, heads * value))?;
        let to = (&y, in_heads(value));
        self.product(&self.values, (&attended, in_heads(rank)), to)?;
        Ok(y)
    }

    /// Multiplies the first values of each head of each row of `x` with the matrix of the head, of `w`, `[heads, outputs,
    /// inputs]`. The products become the first values of the heads of `y`. The strides are inside the rows of both.
    fn product(
        &self,
        w: &Tensor,
        (x, of_x): (&Tensor, Strides),
        (y, of_y): (&Tensor, Strides),
    ) -> Result<()> {
        let (heads, outputs, inputs) = w.dims3()?;
        let rows = y.dim(0)?;
        gpu::expect_dtype(NAME, self.dtype, [w, x, y])?;
        // Tensor cores take whole steps, and rows and heads in whole packs.
        let rests = [
            inputs % STEP,
            of_x.head % PACK,
            of_x.row % PACK,
            start(x) % PACK,
        ];
        let (name, blocks) = if self.dtype == DType::F32 || rests != [0; 4] {
            let blocks = (rows.div_ceil(ANY_ROWS), outputs.div_ceil(WARPS));
            ("head_products_any", blocks)
        } else if rows > gpu::FEW_ROWS {
            let blocks = outputs.div_ceil(OUTPUTS * WARPS);
            ("head_products_many", (rows.div_ceil(MANY_ROWS), blocks))
        } else if rows > gpu::TILE {
            ("head_products_2", (1, outputs.div_ceil(OUTPUTS)))
        } else {
            ("head_products_1", (1, outputs.div_ceil(OUTPUTS)))
        };
        gpu::check_blocks(blocks.1.max(heads))?;
        let name = format!("{name}_{}", gpu::suffix(self.dtype));
        let device = w.device().as_cuda_device()?;
        let kernel = gpu::function(device, "head-products", gpu::HEAD_PRODUCTS, &name)?;
        let launch = kernel.launch().tensor(w)?.tensor(x)?.tensor(y)?;
        let launch = launch.int(outputs).int(inputs).int(rows);
        let launch = launch.int(of_x.head).int(of_x.row);
        let launch = launch.int(of_y.head).int(of_y.row);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes: the callers
        // have checked that the heads are inside the rows.
        unsafe { launch.run(gpu::grid((blocks.0, blocks.1, heads), THREADS, 0)) }
    }
}

/// From a head to the next, and from a row to the next, in values.
#[derive(Clone, Copy)]
struct Strides {
    head: usize,
    row: usize,
}

/// The place of a tensor's first value in its memory.
fn start(tensor: &Tensor) -> usize {
    tensor.layout().start_offset()
}

/// The kernel `name` of `latent_rows.cu` for the dtype of `like`.
fn kernel(like: &Tensor, name: &str) -> Result<gpu::Kernel> {
    let name = format!("{name}_{}", gpu::suffix(like.dtype()));
    let device = like.device().as_cuda_device()?;
    gpu::function(device, "latent-rows", gpu::LATENT_ROWS, &name)
}

/// See [`norm_part`](super::norm_part).
pub(super) fn norm_part(x: &Tensor, first: usize, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let ((rows, stride), width) = (x.dims2()?, weight.dims1()?);
    if first + width > stride {
        candle_core::bail!("norm: {width} values from {first} on of {x:?}");
    }
    gpu::expect_dtype("norm", x.dtype(), [weight])?;
    let y = gpu::output(x.device().as_cuda_device()?, x.dtype(), (rows, width))?;
    let kernel = kernel(x, "norm_part")?;
    let launch = kernel.launch().tensor(x)?.tensor(weight)?.tensor(&y)?;
    let launch = launch.int(stride).int(first).int(width).float(eps);
    let threads = width.next_multiple_of(32).clamp(32, 512);
    // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes.
    unsafe { launch.run(gpu::grid((rows, 1, 1), threads, 0))? };
    Ok(y)
}
