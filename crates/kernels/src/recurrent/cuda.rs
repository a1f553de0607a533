//! Launches the kernels of recurrent layers.

use super::tables::StateBatch;
use super::{Recurrence, RecurrentVectors, Sizes};
use crate::gpu::{self, Launch};
use crate::states::StatePool;
use candle_core::{CudaDevice, DType, Result, Tensor};

/// Threads of blocks that compute a value in each.
const THREADS: usize = 256;
/// Warps of a block that takes in tokens, and columns of a matrix that each has; as in `recurrent.cu`.
const WARPS: usize = 4;
const COLUMNS: usize = 4;
/// Maximum number of tokens that a convolution mixes, as there.
const MAX_TAPS: usize = 16;
/// Rows of a matrix that a warp has for each of its registers of a column.
const WARP: usize = 32;

/// How a GPU computes a layer.
pub struct Rule<'a> {
    /// The name of its kernels.
    pub name: &'static str,
    pub vectors: &'a RecurrentVectors,
    /// Number of heads of q and k, or of groups of B and C.
    pub shared: usize,
    /// What the kernel takes last.
    pub last: Last,
    pub output: Output,
}

/// The last arguments of a kernel.
pub enum Last {
    /// Whether a head of q and k serves every so many heads.
    IsTiled(bool),
    /// The least and the largest step.
    Limits(f32, f32),
}

/// How a row's output is normalized.
pub struct Output {
    /// Number of values that have a norm together.
    pub width: usize,
    /// Whether all norms have the same weights.
    pub is_of_each: bool,
    /// Whether the gates come before the norm.
    pub gates_first: bool,
    pub eps: f32,
}

fn kernel(device: &CudaDevice, name: &str) -> Result<gpu::Kernel> {
    gpu::function(device, "recurrent", gpu::RECURRENT, name)
}

/// Adds what makes up the kernels' `Sizes`.
fn add_sizes<'l>(launch: Launch<'l>, sizes: &Sizes) -> Launch<'l> {
    let launch = launch.int(sizes.heads).int(sizes.outputs);
    let launch = launch.int(sizes.matrix / sizes.outputs);
    let launch = launch.int(sizes.channels).int(sizes.scalars);
    launch.int(sizes.taps)
}

/// A layer in a forward.
struct Work<'a> {
    sizes: Sizes,
    device: &'a CudaDevice,
    dtype: DType,
    /// Number of rows, and places for sequences and tokens.
    rows: usize,
    parts: usize,
    tokens: usize,
    x: &'a Tensor,
    addresses: &'a Tensor,
    /// Parts, steps, what is kept, and tokens.
    tables: [Tensor; 4],
    /// `[tokens, inputs]` f32: inputs, the channels mixed.
    mixed: Tensor,
    /// `[rows, values]` f32: what the heads read.
    raw: Tensor,
}

/// Does the same as the CPU side, except for the order of additions.
pub(super) fn run<R: Recurrence>(
    layer: &R,
    x: &Tensor,
    states: &StateBatch,
    pool: &StatePool,
) -> Result<Tensor> {
    let (name, sizes) = (R::NAME, layer.sizes());
    let (Some(rule), Some(memory)) = (layer.on_gpu(), pool.on_device()) else {
        candle_core::bail!("{name}: the weights or the states are not on the GPU");
    };
    let (rows, dtype) = (x.dim(0)?, x.dtype());
    memory.check(states.rows(), dtype)?;
    let tables = states.send(x.device(), rows, None)?;
    if tables.rows() != rows || pool.shape() != sizes.states() {
        candle_core::bail!("{name}: {rows} rows, and tables of {}", tables.rows());
    }
    if sizes.taps > MAX_TAPS || sizes.matrix / sizes.outputs > super::MAX_GPU_STATE_ROWS {
        candle_core::bail!("{name}: {sizes:?} are too much for a GPU");
    }
    let device = x.device().as_cuda_device()?;
    let (parts, tokens) = tables.room();
    let (of_mixed, of_raw) = (tokens * sizes.inputs(), rows * sizes.values());
    let scratch = gpu::scratch(device, of_mixed + of_raw)?;
    let work = Work {
        sizes,
        device,
        dtype,
        rows,
        parts,
        tokens,
        x,
        addresses: memory.addresses(),
        tables: tables.tensors()?,
        mixed: scratch.narrow(0, 0, of_mixed)?,
        raw: scratch.narrow(0, of_mixed, of_raw)?,
    };
    work.mix(rule.vectors)?;
    work.take(&rule)?;
    let out = work.finish(&rule)?;
    work.keep()?;
    Ok(out)
}

// SAFETY of all launches: the arguments match the kernels' parameters. The tables come from rows that were checked and
// `DeviceStates` has memory for their slots; other lengths follow from the sizes.
impl Work<'_> {
    fn kernel(&self, part: &str) -> Result<gpu::Kernel> {
        let name = format!("recurrent_{part}_{}", gpu::suffix(self.dtype));
        kernel(self.device, &name)
    }

    /// Mixes the channels of each token with those before.
    fn mix(&self, vectors: &RecurrentVectors) -> Result<()> {
        let [.., tokens] = &self.tables;
        let kernel = self.kernel("mix")?;
        let launch = kernel.launch().tensor(self.x)?.tensor(self.addresses)?;
        let launch = launch.tensor(tokens)?.tensor(&vectors.conv)?;
        let launch = launch.optional(vectors.conv_bias.as_ref())?;
        let launch = add_sizes(launch.tensor(&self.mixed)?, &self.sizes).int(self.tokens);
        let blocks = self.sizes.inputs().div_ceil(THREADS);
        let grid = gpu::grid((blocks, self.tokens.min(gpu::MAX_GROUPS), 1), THREADS, 0);
        // SAFETY: see above.
        unsafe { launch.run(grid) }
    }

    /// Lets the states take in tokens.
    fn take(&self, rule: &Rule<'_>) -> Result<()> {
        let (sizes, vectors) = (&self.sizes, rule.vectors);
        let registers = if sizes.matrix / sizes.outputs <= 4 * WARP {
            4
        } else {
            8
        };
        let name = format!("recurrent_{}_{registers}", rule.name);
        let kernel = kernel(self.device, &name)?;
        let [parts, steps, ..] = &self.tables;
        let launch = kernel.launch().tensor(parts)?.tensor(steps)?;
        let launch = launch.tensor(self.addresses)?.tensor(&self.mixed)?;
        let launch = launch.tensor(&self.raw)?;
        let launch = launch.tensor(&vectors.decay)?.tensor(&vectors.dt_bias)?;
        let launch = match &vectors.skip {
            Some(skip) => launch.tensor(skip)?,
            None => launch,
        };
        let launch = add_sizes(launch, sizes).int(rule.shared);
        let launch = match rule.last {
            Last::IsTiled(is_tiled) => launch.int(usize::from(is_tiled)),
            Last::Limits(least, most) => launch.float(least).float(most),
        };
        let units = sizes.heads * sizes.outputs.div_ceil(COLUMNS);
        gpu::check_blocks(self.parts)?;
        let grid = gpu::grid((units.div_ceil(WARPS), self.parts, 1), WARPS * WARP, 0);
        // SAFETY: see above.
        unsafe { launch.run(grid) }
    }

    /// The outputs of the rows.
    fn finish(&self, rule: &Rule<'_>) -> Result<Tensor> {
        let (sizes, output) = (&self.sizes, &rule.output);
        let out = gpu::output(self.device, self.dtype, (self.rows, sizes.values()))?;
        let kernel = self.kernel("finish")?;
        let launch = kernel.launch().tensor(self.x)?.tensor(&self.raw)?;
        let launch = launch.optional(rule.vectors.norm.as_ref())?.tensor(&out)?;
        let launch = add_sizes(launch, sizes).int(output.width);
        let launch = launch.int(usize::from(output.is_of_each));
        let launch = launch.int(usize::from(output.gates_first));
        let launch = launch.float(output.eps);
        let threads = output.width.next_multiple_of(WARP).min(THREADS);
        let groups = sizes.values() / output.width;
        let grid = gpu::grid((self.rows, groups, 1), threads, 0);
        // SAFETY: see above.
        unsafe { launch.run(grid)? };
        Ok(out)
    }

    /// Keeps windows, and the inputs of nodes.
    fn keep(&self) -> Result<()> {
        let [parts, _, keeps, tokens] = &self.tables;
        let kernel = self.kernel("keep")?;
        let launch = kernel.launch().tensor(self.x)?.tensor(self.addresses)?;
        let launch = launch.tensor(tokens)?.tensor(parts)?.tensor(keeps)?;
        let launch = add_sizes(launch, &self.sizes);
        let blocks = self.sizes.inputs().div_ceil(THREADS);
        let grid = gpu::grid((blocks, self.parts, 1), THREADS, 0);
        // SAFETY: see above.
        unsafe { launch.run(grid) }
    }
}
