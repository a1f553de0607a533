//! The CUDA side: launches of the kernels.

use super::super::gpu::{self, *};
use super::{
    Accepted, Chain, DeviceRow, LogitsParams, ProcessedLogits, RowAdjustment, TokenChoice,
};
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Result, Tensor};
use std::sync::Arc;

const NAME: &str = "sample";
/// Threads per row or sequence, as in the kernels.
const THREADS: usize = 1024;
/// Values of a piece of a row, and threads that read one, as in the kernels.
const PIECE: usize = 2048;
const PIECE_THREADS: usize = 256;
/// Bytes of what a block finds in its piece.
const FOUND: usize = 16;
const ADJUST_THREADS: usize = 256;

// SAFETY: the kernels declare the same fields in the same order, and every bit pattern is valid.
unsafe impl DeviceRepr for RowAdjustment {}
// SAFETY: as above.
unsafe impl DeviceRepr for Accepted {}

/// Parameters of a row in the kernels' layout.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct RowParams {
    row: u32,
    top_k: u32,
    temperature: f32,
    min_p: f32,
    top_p: f32,
    by_race: u32,
    key: u64,
    uniform: f64,
    /// Counts the blocks that have read their pieces of the row; 0 between kernels.
    arrived: u32,
}

// SAFETY: as above.
unsafe impl DeviceRepr for RowParams {}

impl From<&LogitsParams> for RowParams {
    fn from(params: &LogitsParams) -> Self {
        let (by_race, key, uniform) = match params.choice {
            TokenChoice::GumbelMax(key) => (1, key, 0.),
            TokenChoice::Quantile(uniform) => (0, 0, uniform),
        };
        Self {
            row: params.row,
            top_k: params.top_k,
            temperature: params.temperature,
            min_p: params.min_p,
            top_p: params.top_p,
            by_race,
            key,
            uniform,
            arrived: 0,
        }
    }
}

impl RowParams {
    /// Whether the kernels store weights of the row.
    fn is_stored(&self) -> bool {
        let filtered = self.top_k > 0 || self.top_p < 1.;
        self.temperature != 0. && (self.by_race == 0 || filtered)
    }

    /// Whether the blocks of the row's pieces weigh it.
    fn is_weighed(&self, best: usize) -> bool {
        !self.is_stored() && (self.temperature != 0. || best > 0)
    }
}

/// A node in the kernels' layout; `q` is an address, 0 = none.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NodeLayout {
    q: u64,
    uniform: f64,
    token: u32,
    q_vocab: u32,
}

/// A chain in the kernels' layout; a negative `synthetic_acceptance` means none.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Range {
    node: u32,
    len: u32,
    row: u32,
    synthetic_acceptance: f64,
}

// SAFETY: as above.
unsafe impl DeviceRepr for NodeLayout {}
// SAFETY: as above.
unsafe impl DeviceRepr for Range {}

/// The parameters of all rows on the device.
pub(super) type Sent = Arc<CudaSlice<RowParams>>;

fn kernel(device: &CudaDevice, name: &str) -> Result<Kernel> {
    gpu::function(device, "sample", gpu::SAMPLE, name)
}

/// The number of pieces of a row.
fn pieces(vocab: usize) -> usize {
    vocab.div_ceil(PIECE).max(1)
}

/// A contiguous tensor of `values`.
fn tensor<T: CudaDType>(values: CudaSlice<T>, shape: &[usize], device: &CudaDevice) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(values, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Sends the parameters of rows, and allocates what draws of them write: their ids, and `2 * best` values of each.
pub(super) fn shared<'a>(
    rows: impl Iterator<Item = &'a LogitsParams>,
    best: usize,
    device: &Device,
) -> Result<(Sent, Tensor, Tensor)> {
    let params: Vec<RowParams> = rows.map(RowParams::from).collect();
    if params.is_empty() {
        candle_core::bail!("sample: no rows");
    }
    let device = device.as_cuda_device()?;
    let allocate = |len: usize| -> Result<Tensor> {
        // SAFETY: the kernels write every value that is read.
        let values = unsafe { device.alloc::<u32>(len)? };
        Ok(tensor(values, &[len], device))
    };
    let sent = Arc::new(device.clone_htod(&params)?);
    let ids = allocate(params.len())?;
    Ok((sent, ids, allocate(params.len() * 2 * best.max(1))?))
}

/// See [`super::Draws::draw`]: the adjustments are sorted, and their ids exist. `first` is the first row of `params` among
/// those that were `sent`; `ids` and `tokens` have room for all rows.
pub(super) fn draw(
    (logits, adjustments): (&Tensor, &[RowAdjustment]),
    (params, sent, first): (Vec<LogitsParams>, &Sent, usize),
    (ids, tokens): (Tensor, Tensor),
    best: usize,
) -> Result<ProcessedLogits> {
    let device = logits.device().as_cuda_device()?.clone();
    let (all, vocab) = logits.dims2()?;
    let rows = params.len();
    if rows == 0 || params.iter().any(|params| params.row as usize >= all) {
        candle_core::bail!("sample: {rows} rows of {all}");
    }
    let logits = match adjustments {
        [] => logits.clone(),
        adjustments => adjusted(logits, adjustments, &device)?,
    };
    let row_params: Vec<RowParams> = params.iter().map(RowParams::from).collect();
    let stored = row_params.iter().any(RowParams::is_stored);
    let dims = if stored { [rows, vocab] } else { [1, 1] };
    let pieces = pieces(vocab);
    // SAFETY: the kernels write every value that is read.
    let probs = unsafe { device.alloc::<f32>(dims[0] * dims[1])? };
    // SAFETY: as above.
    let found = unsafe { device.alloc::<u8>(rows * (1 + pieces) * FOUND)? };
    gpu::expect_dtype(NAME, DType::F32, [&logits])?;
    gpu::expect_dtype(NAME, DType::U32, [&ids, &tokens])?;
    let of_rows = sent.slice(first..);
    let by_pieces = |name: &str| -> Result<()> {
        let kernel = kernel(&device, name)?;
        let launch = kernel.launch().tensor(&logits)?;
        let launch = launch.memory(&of_rows).memory(&found);
        let launch = launch.tensor(&ids)?.tensor(&tokens)?;
        let launch = launch.int(vocab).int(best);
        // SAFETY: the arguments match the kernel's, and are as long as it reads and writes.
        unsafe { launch.run_ordinary(gpu::grid((rows, pieces, 1), PIECE_THREADS, 0)) }
    };
    by_pieces("largest_logits")?;
    if row_params.iter().any(|params| params.is_weighed(best)) {
        by_pieces("weigh_logits")?;
    }
    if stored || best > 1 {
        let kernel = kernel(&device, "process_logits")?;
        let launch = kernel.launch().tensor(&logits)?;
        let launch = launch.memory(&of_rows).memory(&found).memory(&probs);
        let launch = launch.tensor(&ids)?.tensor(&tokens)?;
        let launch = launch.int(vocab).int(best);
        // SAFETY: as above.
        unsafe { launch.run_ordinary(gpu::grid((rows, 1, 1), THREADS, 0))? };
    }
    Ok(ProcessedLogits {
        params,
        sent: sent.clone(),
        first,
        probs: tensor(probs, &dims, &device),
        ids,
        tokens,
    })
}

/// See [`super::best_logits`].
pub(super) fn best_logits(logits: &Tensor, best: usize) -> Result<Tensor> {
    let device = logits.device().as_cuda_device()?.clone();
    let (rows, vocab) = logits.dims2()?;
    if rows == 0 || best == 0 {
        candle_core::bail!("sample: the best {best} of {rows} rows");
    }
    let pieces = pieces(vocab);
    // SAFETY: the kernel writes every value.
    let ids = unsafe { device.alloc::<u32>(rows * best)? };
    // SAFETY: as above.
    let found = unsafe { device.alloc::<u8>(rows * pieces * best * FOUND)? };
    let arrived = device.alloc_zeros::<u32>(rows)?;
    gpu::expect_dtype(NAME, DType::F32, [logits])?;
    let kernel = kernel(&device, "best_logits")?;
    let launch = kernel.launch().tensor(logits)?;
    let launch = launch.memory(&found).memory(&arrived).memory(&ids);
    let launch = launch.int(vocab).int(best);
    // SAFETY: the arguments match the kernel's, and are as long as it reads and writes.
    unsafe { launch.run_ordinary(gpu::grid((rows, pieces, 1), PIECE_THREADS, 0))? };
    Ok(tensor(ids, &[rows, best], &device))
}

/// See [`super::TopLogits`]; there are rows, and as many values.
pub(super) fn top_logits(logits: &Tensor, k: usize) -> Result<Tensor> {
    let device = logits.device().as_cuda_device()?.clone();
    let (rows, vocab) = logits.dims2()?;
    let width = 2 * k + 2;
    // SAFETY: the kernel writes every value.
    let top = unsafe { device.alloc::<u32>(rows * width)? };
    gpu::expect_dtype(NAME, DType::F32, [logits])?;
    let kernel = gpu::function(&device, "top_logits", gpu::TOP_LOGITS, "top_logits")?;
    let launch = kernel.launch().tensor(logits)?.memory(&top);
    let launch = launch.int(vocab).int(k);
    // SAFETY: the arguments match the kernel's, and are as long as it reads and writes.
    unsafe { launch.run_ordinary(gpu::grid((rows, 1, 1), THREADS, 0))? };
    Ok(tensor(top, &[rows, width], &device))
}

/// A copy of the logits with the adjustments applied; there is at least one.
fn adjusted(logits: &Tensor, adjustments: &[RowAdjustment], device: &CudaDevice) -> Result<Tensor> {
    let (rows, vocab) = logits.dims2()?;
    if let Some(adjustment) = adjustments
        .iter()
        .find(|adjustment| adjustment.row as usize >= rows)
    {
        candle_core::bail!("sample: {adjustment:?} of {rows} rows");
    }
    gpu::expect_dtype(NAME, DType::F32, [logits])?;
    let copy = logits.copy()?;
    let on_device = device.clone_htod(adjustments)?;
    let kernel = kernel(device, "adjust_logits")?;
    let launch = kernel.launch().tensor(&copy)?.memory(&on_device);
    let launch = launch.int(adjustments.len()).int(vocab);
    let blocks = adjustments.len().div_ceil(ADJUST_THREADS);
    // SAFETY: the arguments match the kernel's, and nothing else uses the copy.
    unsafe { launch.run_ordinary(gpu::grid((blocks, 1, 1), ADJUST_THREADS, 0))? };
    Ok(copy)
}

/// Address and length of a distribution. Its owner must outlive all readers.
fn address(row: &DeviceRow) -> Result<(u64, u32)> {
    let vocab = row.probs.dim(1)?;
    let (storage, layout) = row.probs.storage_and_layout();
    let probs = gpu::view::<f32>(NAME, &storage, layout)?;
    let device = row.probs.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (start, _reads) = probs.device_ptr(&stream);
    let at = start + (row.row * vocab * size_of::<f32>()) as u64;
    Ok((at, vocab as u32))
}

/// See [`ProcessedLogits::verify`]; the chains have been checked.
pub(super) fn verify(processed: &ProcessedLogits, chains: &[Chain<'_>]) -> Result<Vec<Accepted>> {
    let device = processed.tokens.device().as_cuda_device()?.clone();
    let (mut nodes, mut ranges) = (Vec::new(), Vec::with_capacity(chains.len()));
    for chain in chains {
        ranges.push(Range {
            node: nodes.len() as u32,
            len: chain.nodes.len() as u32,
            row: chain.row as u32,
            synthetic_acceptance: chain.synthetic_acceptance.unwrap_or(-1.),
        });
        for node in &chain.nodes {
            let (q, q_vocab) = node.q.map_or(Ok((0, 0)), address)?;
            nodes.push(NodeLayout {
                q,
                uniform: node.uniform,
                token: node.token,
                q_vocab,
            });
        }
    }
    // GPUs have no empty allocations.
    nodes.push(NodeLayout {
        q: 0,
        uniform: 0.,
        token: 0,
        q_vocab: 0,
    });
    let (nodes, ranges) = (device.clone_htod(&nodes)?, device.clone_htod(&ranges)?);
    // SAFETY: the kernel writes every value.
    let verdicts = unsafe { device.alloc::<Accepted>(chains.len())? };
    let kernel = kernel(&device, "verify_chains")?;
    let launch = kernel.launch().tensor(&processed.probs)?;
    let sent = processed.sent.slice(processed.first..);
    let launch = launch.tensor(&processed.chosen()?)?.memory(&sent);
    let launch = launch.memory(&nodes).memory(&ranges).memory(&verdicts);
    let launch = launch.int(processed.probs.dim(1)?);
    // SAFETY: the arguments match the kernel's; `chains` keeps the distributions of the drafts alive,
    // and later frees happen in the order of the stream.
    unsafe { launch.run_ordinary(gpu::grid((chains.len(), 1, 1), THREADS, 0))? };
    device.clone_dtoh(&verdicts)
}
