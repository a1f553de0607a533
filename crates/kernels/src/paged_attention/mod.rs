//! Attention that reads K and V directly from a paged pool.
//!
//! A row has one order of additions: the keys that it sees are numbered 0, 1, 2.. in ascending order
//! and divided into chunks by number. Each chunk has its own softmax (Dao et al. 2023, "Flash-Decoding
//! for long-context inference"), and these are merged in ascending order. Only the numbers decide where
//! a chunk ends, not pool slots, the rows of a call or threads. So a row's bits do not depend on its
//! neighbours, on how its sequence is divided into calls, on which blocks hold it, or on branches of a
//! draft tree that it does not see. A window hides the first keys of a row, which keep their numbers.
//!
//! On the CPU, pools in bf16 have products of bf16 with bf16 (`numbers`), others products of f32. With AMX, numbers of pools
//! in f16 are sums of two bf16, and their products have relative errors of about 2^-16. Keys in blocks of `Q8_0` are
//! multiplied as bytes, by queries rounded to bytes, and values as f32 (`stored`).
//!
//! On a GPU, blocks are widened to the dtype of `q` on their way to shared memory, so they have the bits of a pool of that
//! dtype with the same values. Keys are divided into chunks by their position in the sequence. Causal spans of more than
//! 64 rows in f16 or bf16, which are prompts, use a separate kernel. It has another order of additions,
//! which also depends neither on neighbours nor on the division into calls. So a prompt's row has
//! different bits in a prompt chunk of up to 64 rows than in a longer one, unless the batch is
//! [batch-invariant](AttentionBatch::with_batch_invariance).

mod batch;
mod byte_scores;
#[cfg(feature = "cuda")]
mod cuda;
mod numbers;
mod params;
mod partial;
mod plan;
mod queries;
mod scores;
mod scratch;
mod stored;
mod tables;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tile_products;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vectors;
mod weights;

use super::cpu::{self, Isa};
use super::parallel::{Shared, for_each, sharers};
use super::storage::{Place, contiguous, output, zeros};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use partial::Partial;
use plan::{Dims, Plan};
use queries::{Queries, QueryGroup};
use scratch::with_scratch;
use std::cell::RefCell;
use stored::Stored;
use tracing::trace_span;

pub use batch::AttentionBatch;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{attend_rotating, latent_attention, shared_of_attention, tables};
pub use params::AttentionParams;
pub use tables::{
    AttentionTables, FLOAT8_HEAD_DIM_STEP, GPU_HEAD_DIM_STEP, MAX_GPU_HEAD_DIM,
    MAX_GPU_HEADS_PER_KV_HEAD, MAX_GPU_LATENT_KEY, MAX_GPU_LATENT_RANK, TableCapacity,
    latent_group,
};

/// Number of multiply-adds from which waking other threads pays.
const MIN_PARALLEL_WORK: usize = 1 << 16;

thread_local! {
    /// Partial results of chunks that are separate tasks. The buffer is kept between calls: fresh memory
    /// would cost a page fault for every few results.
    static PARTIALS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Softmax attention of `q` over the pools: `[rows, heads, head_dim]`, in the dtype of `q`.
///
/// `q` is `[rows, heads, head_dim]`; `k` and `v` are `[num_slots, kv_heads, head_dim]`, where `kv_heads`
/// divides `heads`; all are contiguous, except that f32 rows of `q` may be parts of longer ones on the CPU. The pools have one dtype: f32, f16 or bf16. `q` has the same
/// dtype or, on the CPU, f32. Pools may also be in u8: `[num_slots, kv_heads, head_dim / 32 * 34]`, blocks of `Q8_0`, which
/// [`kv_write`](super::kv_write()) makes, and on a GPU [`rope_kv_write`](super::rope_kv_write()). Sums are in f32. On the CPU, q and the weights are rounded to bf16 if the pools are
/// in bf16: relative errors of the output are about 2e-3 then. On CUDA the number of a head's values
/// is a multiple of 8, up to 512.
///
/// # Errors
/// If the shapes do not match, `params` do not fit `q`, the pools have fewer slots than `batch` was checked
/// for, or the device has no such kernel.
pub fn paged_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &AttentionBatch<'_>,
    params: AttentionParams<'_>,
) -> Result<Tensor> {
    params.check(q.dim(1)?)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        let elements = match k.dtype() {
            DType::U8 => u8::elements,
            _ => Some,
        };
        let dims = dims(batch, q.layout(), k.layout(), v.layout(), elements)?;
        return cuda::launch(batch, dims, params, q, k, v);
    }
    let op = PagedAttention {
        batch,
        params,
        sinks: params.sinks.map(Tensor::to_vec1).transpose()?,
        isa: cpu::isa(),
        threads: sharers(),
    };
    q.apply_op3_no_bwd(k, v, &op)
}

struct PagedAttention<'a> {
    batch: &'a AttentionBatch<'a>,
    params: AttentionParams<'a>,
    /// The sinks of `params`, on the host.
    sinks: Option<Vec<f32>>,
    /// The instruction set of the CPU side.
    isa: Isa,
    /// The number of threads that the work is divided for.
    threads: usize,
}

impl CustomOp3 for PagedAttention<'_> {
    fn name(&self) -> &'static str {
        "paged-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let elements = match k {
            CpuStorage::U8(_) => u8::elements,
            _ => Some,
        };
        let dims = dims(self.batch, q_layout, k_layout, v_layout, elements)?;
        if q_layout.dims()[0] != self.batch.rows() {
            candle_core::bail!("paged-attention: rows of q that belong to no span");
        }
        let dtypes = [k.dtype(), v.dtype()];
        let is_wide = [dtypes[0], DType::F32].contains(&q.dtype()) && q.dtype().is_float();
        if dtypes[0] != dtypes[1] || !is_wide {
            candle_core::bail!(
                "paged-attention: q in {:?} and pools in {dtypes:?}",
                q.dtype()
            );
        }
        let pools = [(k, k_layout), (v, v_layout)];
        let out = trace_span!("attention").in_scope(|| match k {
            CpuStorage::F32(_) => self.wide::<f32>(dims, (q, q_layout), pools),
            CpuStorage::F16(_) => self.wide::<f16>(dims, (q, q_layout), pools),
            CpuStorage::BF16(_) => self.wide::<bf16>(dims, (q, q_layout), pools),
            CpuStorage::U8(_) => self.wide::<u8>(dims, (q, q_layout), pools),
            _ => candle_core::bail!("paged-attention: pools must be f32, f16, bf16 or blocks"),
        })?;
        Ok((out, q_layout.shape().clone()))
    }
}

/// `elements` are those that a pool has of a head.
fn dims(
    batch: &AttentionBatch<'_>,
    q: &Layout,
    k: &Layout,
    v: &Layout,
    elements: impl Fn(usize) -> Option<usize>,
) -> Result<Dims> {
    let (rows, heads, head_dim) = q.shape().dims3()?;
    let (slots, kv_heads, kv_elements) = k.shape().dims3()?;
    let fits = k.dims() == v.dims() && elements(head_dim) == Some(kv_elements);
    if !fits || kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
        candle_core::bail!(
            "paged-attention: q {:?}, k {:?} and v {:?} do not match",
            q.dims(),
            k.dims(),
            v.dims()
        );
    }
    let (all, needed) = (batch.rows(), batch.num_slots());
    if rows < all || slots < needed {
        candle_core::bail!(
            "paged-attention: {rows} rows and {slots} slots for a batch of {all} over {needed}"
        );
    }
    Ok(Dims {
        heads,
        kv_heads,
        head_dim,
    })
}

impl PagedAttention<'_> {
    /// Converts q to f32, and the result back to q's dtype.
    fn wide<E: Stored>(
        &self,
        dims: Dims,
        (q, q_layout): (&CpuStorage, &Layout),
        [(k, k_layout), (v, v_layout)]: [(&CpuStorage, &Layout); 2],
    ) -> Result<CpuStorage> {
        let name = "paged-attention";
        let pools = [
            contiguous::<E>(name, k, k_layout)?,
            contiguous::<E>(name, v, v_layout)?,
        ];
        let run = |q: &[f32]| {
            let stride = dims.heads * dims.head_dim;
            self.run(dims, Queries { q, stride }, pools)
        };
        Ok(match q {
            CpuStorage::F16(_) => {
                let out = run(&contiguous::<f16>(name, q, q_layout)?.to_f32_vec());
                CpuStorage::F16(out.into_iter().map(f16::from_f32).collect())
            }
            CpuStorage::BF16(_) => {
                let out = run(&contiguous::<bf16>(name, q, q_layout)?.to_f32_vec());
                CpuStorage::BF16(out.into_iter().map(bf16::from_f32).collect())
            }
            q => {
                // A copy of the rows alone would be one more pass over memory.
                let (stride, rest) = (q_layout.stride()[0], &q_layout.stride()[1..]);
                if rest != [dims.head_dim, 1] {
                    candle_core::bail!("{name}: rows of q must be contiguous, got {q_layout:?}");
                }
                let q = &q.as_slice::<f32>()?[q_layout.start_offset()..];
                CpuStorage::F32(self.run(dims, Queries { q, stride }, pools))
            }
        })
    }

    fn run<E: Stored>(&self, dims: Dims, q: Queries<'_>, [k, v]: [&[E]; 2]) -> Vec<f32> {
        let reach = self.params.reach();
        let plan = Plan::new(self.batch.spans(), dims, reach, self.threads);
        let floats = Partial::floats(dims.width());
        let parallelize = plan.pairs * dims.group() * dims.head_dim > MIN_PARALLEL_WORK;
        let work = |out: &Shared<'_, Place>| {
            PARTIALS.with_borrow_mut(|partials| {
                if partials.len() < plan.partials * floats {
                    partials.resize(plan.partials * floats, 0.0);
                }
                let partials = Shared::new(partials);
                for_each(plan.tasks.len(), parallelize, |i| {
                    let task = &plan.tasks[i];
                    let item = &plan.items[task.item];
                    let queries = QueryGroup {
                        isa: self.isa,
                        scale: self.params.scale,
                        soft_cap: self.params.soft_cap,
                        sinks: self.sinks.as_deref(),
                        block_size: self.batch.block_size(),
                        item,
                        q,
                        k,
                        v,
                        dims,
                    };
                    // SAFETY: items are disjoint in (row, K/V head), and so are these slices.
                    let place = |at| zeros(unsafe { out.slice(at, dims.group() * dims.head_dim) });
                    let Some(first) = item.split else {
                        return with_scratch(|scratch| queries.all(scratch, place));
                    };
                    let (start, len) = (first * floats, queries.count() * floats);
                    let number = task.chunks.start - item.chunks.start;
                    // SAFETY: each chunk of each item has its own slice.
                    let floats = unsafe { partials.slice(start + number * len, len) };
                    let mut partial = Partial::new(floats, dims.width());
                    with_scratch(|scratch| queries.one(task.chunks.start, scratch, &mut partial));
                    if item.finish() {
                        // SAFETY: all other tasks of the item are done.
                        let all = unsafe { partials.slice(start, item.chunks.len() * len) };
                        queries.merge_all(all, place);
                    }
                });
            })
        };
        // SAFETY: items cover all rows and all heads, and each is stored.
        unsafe { output(self.batch.rows() * dims.heads * dims.head_dim, work) }
    }
}
