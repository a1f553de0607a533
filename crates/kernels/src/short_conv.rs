//! Short causal convolutions over the paged pool of a layer, one of each channel (LFM2).
//!
//! What a convolution reads of earlier tokens is kept by token, as K and V are. So it is rolled back, shared by
//! prefixes, preempted and moved to an accepted path as they are, and nothing else knows of it.

use super::kv_write::kv_write;
use super::paged_attention::AttentionBatch;
use super::rope_kv_write::Pools;
use super::storage::contiguous;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use tracing::trace_span;

/// Number of multiply-adds from which waking other threads pays.
const MIN_PARALLEL_WORK: usize = 1 << 16;

/// The weights of a layer's convolutions.
#[derive(Debug, Clone)]
pub struct ConvWeights {
    /// `[taps, channels]` f32, that of the row's own token first. On a GPU there are up to 16 taps.
    pub taps: Tensor,
    /// `[channels]` f32.
    pub bias: Option<Tensor>,
}

/// Writes `B * x` of rows `[B, C, x]`, `[rows, 3 * channels]`, to the slots of the rows: the first half of the channels to
/// the pool of K, the other half to that of V, each `[num_slots, 1, channels / 2]`. On a GPU the pools have the dtype of
/// the rows.
///
/// # Errors
/// As [`kv_write`], and if the rows do not have three parts of an even number of channels.
pub fn short_conv_write(products: &Tensor, pools: Pools<'_>) -> Result<()> {
    let (rows, width) = products.dims2()?;
    let (channels, half) = (width / 3, width / 6);
    if half * 6 != width {
        candle_core::bail!("short-conv: rows of {width} values");
    }
    #[cfg(feature = "cuda")]
    if products.device().is_cuda() {
        return cuda::write(products, pools, half);
    }
    let part = |i| products.narrow(1, i * channels, channels);
    let x = (part(0)? * part(2)?)?.reshape((rows, 2, half))?;
    for (i, pool) in [pools.k, pools.v].into_iter().enumerate() {
        kv_write(pool, &x.narrow(1, i, 1)?, pools.slots.tensor())?;
    }
    Ok(())
}

/// The convolutions of the rows of `batch`, each channel times that of `c`, `[rows, channels]`, which may be a part of
/// wider rows: the sum over `i` of tap `i` times the input of the token `i` before the row's own, in its sequence or up its
/// branch of a draft; there is none before the first.
///
/// `k` and `v` are the pools that [`short_conv_write`] wrote the inputs of these tokens to, in f32, f16 or bf16. A row's sum
/// is in one order, from the token that is furthest away.
///
/// # Errors
/// If the shapes or dtypes do not match, or the pools have fewer slots than `batch` was checked for.
pub fn short_conv(
    c: &Tensor,
    (k, v): (&Tensor, &Tensor),
    weights: &ConvWeights,
    batch: &AttentionBatch<'_>,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if c.device().is_cuda() {
        return cuda::convolve(c, (k, v), weights, batch);
    }
    let mixed = k.apply_op3_no_bwd(v, &weights.taps, &ShortConv { batch })?;
    c * match &weights.bias {
        Some(bias) => mixed.broadcast_add(bias)?,
        None => mixed,
    }
}

struct ShortConv<'a> {
    batch: &'a AttentionBatch<'a>,
}

impl ShortConv<'_> {
    /// For each row the slots of its `taps` tokens, its own first; `None` before the first of a sequence.
    fn slots(&self, taps: usize) -> Vec<Option<u32>> {
        let size = self.batch.block_size();
        let spans = self.batch.spans().iter();
        let rows = spans.flat_map(|span| (0..span.rows.len()).map(move |row| (span, row)));
        rows.flat_map(|(span, row)| (0..taps).map(move |back| span.slot_before(row, back, size)))
            .collect()
    }

    fn run<T: Element>(
        &self,
        [k, v]: [&[T]; 2],
        weights: &[f32],
        channels: usize,
    ) -> Result<Vec<f32>> {
        let (half, taps) = (channels / 2, weights.len() / channels);
        if k.len().min(v.len()) < self.batch.num_slots() * half {
            candle_core::bail!("short-conv: the pools have too few slots");
        }
        let slots = self.slots(taps);
        let mut out = vec![0f32; self.batch.rows() * channels];
        let one = |(out, slots): (&mut [f32], &[Option<u32>])| {
            let mut input = vec![0f32; half];
            for (weights, slot) in weights.chunks_exact(channels).zip(slots).rev() {
                let Some(slot) = slot else { continue };
                let at = *slot as usize * half;
                let halves = out.chunks_exact_mut(half).zip(weights.chunks_exact(half));
                for ((out, weights), pool) in halves.zip([k, v]) {
                    T::widen(&pool[at..at + half], &mut input);
                    for ((out, weight), x) in out.iter_mut().zip(weights).zip(&input) {
                        *out = weight.mul_add(*x, *out);
                    }
                }
            }
        };
        let rows = slots.chunks_exact(taps);
        if out.len() * taps < MIN_PARALLEL_WORK {
            out.chunks_exact_mut(channels).zip(rows).for_each(one);
        } else {
            let rows = slots.par_chunks_exact(taps);
            out.par_chunks_exact_mut(channels).zip(rows).for_each(one);
        }
        Ok(out)
    }
}

/// An element type of a pool.
trait Element: WithDType {
    fn widen(from: &[Self], to: &mut [f32]);
}

impl Element for f32 {
    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

impl Element for bf16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

impl CustomOp3 for ShortConv<'_> {
    fn name(&self) -> &'static str {
        "short-conv"
    }

    fn cpu_fwd(
        &self,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, channels) = weights_layout.shape().dims2()?;
        let half = [1, channels / 2];
        if channels == 0
            || channels % 2 == 1
            || k_layout.dims().get(1..) != Some(&half)
            || v_layout.dims().get(1..) != Some(&half)
        {
            candle_core::bail!(
                "short-conv: pools {k_layout:?} and {v_layout:?} do not have {channels} channels"
            );
        }
        let name = self.name();
        let weights = contiguous::<f32>(name, weights, weights_layout)?;
        macro_rules! of {
            ($type:ty) => {{
                let k = contiguous::<$type>(name, k, k_layout)?;
                let v = contiguous::<$type>(name, v, v_layout)?;
                self.run([k, v], weights, channels)?
            }};
        }
        let out = trace_span!("attention").in_scope(|| -> Result<Vec<f32>> {
            Ok(match k {
                CpuStorage::F32(_) => of!(f32),
                CpuStorage::F16(_) => of!(f16),
                CpuStorage::BF16(_) => of!(bf16),
                _ => candle_core::bail!("{name}: the pools must be f32, f16 or bf16"),
            })
        })?;
        Ok((CpuStorage::F32(out), (self.batch.rows(), channels).into()))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{ConvWeights, Pools};
    use crate::gpu;
    use crate::paged_attention::{AttentionBatch, tables};
    use candle_core::{CudaDevice, DType, Result, Tensor};

    const NAME: &str = "short-conv";
    const THREADS: usize = 256;
    /// As in `short_conv.cu`.
    const MAX_TAPS: usize = 16;

    fn kernel(device: &CudaDevice, part: &str, dtype: DType) -> Result<gpu::Kernel> {
        let name = format!("short_conv{part}_{}", gpu::suffix(dtype));
        gpu::function(device, NAME, gpu::SHORT_CONV, &name)
    }

    /// Checks that the pools have `half` channels each, in `dtype`, and the slots.
    fn check(pools: [&Tensor; 2], half: usize, slots: usize, dtype: DType) -> Result<()> {
        gpu::expect_dtype(NAME, dtype, pools)?;
        for pool in pools {
            if pool.dims().get(1..) != Some(&[1, half][..]) || pool.dim(0)? < slots {
                candle_core::bail!("{NAME}: {half} channels and {slots} slots for {pool:?}");
            }
        }
        Ok(())
    }

    /// See [`super::short_conv_write`].
    pub fn write(products: &Tensor, pools: Pools<'_>, half: usize) -> Result<()> {
        let (rows, dtype) = (products.dim(0)?, products.dtype());
        check([pools.k, pools.v], half, pools.slots.num_slots(), dtype)?;
        if pools.slots.len() != rows {
            candle_core::bail!("{NAME}: {rows} rows for {pools:?}");
        }
        let kernel = kernel(products.device().as_cuda_device()?, "_write", dtype)?;
        let launch = kernel.launch().tensor(products)?;
        let launch = launch.tensor(pools.slots.tensor())?;
        let launch = launch.tensor(pools.k)?.tensor(pools.v)?;
        let count = rows * 2 * half;
        let launch = launch.int(half).int(count);
        let grid = gpu::grid((count.div_ceil(THREADS), 1, 1), THREADS, 0);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and writes: the pools
        // contain every slot of `Slots`.
        unsafe { launch.run(grid) }
    }

    /// See [`super::short_conv`].
    pub fn convolve(
        c: &Tensor,
        (k, v): (&Tensor, &Tensor),
        weights: &ConvWeights,
        batch: &AttentionBatch<'_>,
    ) -> Result<Tensor> {
        let ((rows, channels), dtype) = (c.dims2()?, c.dtype());
        let (taps, width) = weights.taps.dims2()?;
        check([k, v], channels / 2, batch.num_slots(), dtype)?;
        gpu::expect_dtype(
            NAME,
            DType::F32,
            [&weights.taps].into_iter().chain(&weights.bias),
        )?;
        let bias_fits = (weights.bias.as_ref()).is_none_or(|bias| bias.dims() == [channels]);
        if width != channels
            || channels % 2 == 1
            || !(1..=MAX_TAPS).contains(&taps)
            || rows < batch.rows()
            || !bias_fits
        {
            candle_core::bail!("{NAME}: {weights:?} of {c:?} for {} rows", batch.rows());
        }
        let tables = tables(batch, c.device(), 1, dtype)?;
        let [tiles, blocks, trees] = tables.tensors();
        let device = c.device().as_cuda_device()?;
        let out = gpu::output(device, dtype, (rows, channels))?;
        let kernel = kernel(device, "", dtype)?;
        let (launch, stride) = kernel.launch().rows(c)?;
        let launch = launch.tensor(k)?.tensor(v)?;
        let launch = launch.tensor(&weights.taps)?;
        let launch = launch.optional(weights.bias.as_ref())?.tensor(&out)?;
        let launch = launch.tensor(tiles)?.tensor(blocks)?.tensor(trees)?;
        let launch = launch.int(channels / 2).int(taps);
        let launch = launch.int(batch.block_size()).int(stride);
        let count = tables.num_tiles();
        gpu::check_blocks(count)?;
        let grid = gpu::grid((channels.div_ceil(THREADS), count, 1), THREADS, 0);
        // SAFETY: the arguments match the kernel's parameters. `AttentionBatch` has checked that the rows and blocks of
        // its tables are inside its rows, of which `c` has as many, and inside the pools. A tile has up to 64 rows.
        unsafe { launch.run(grid)? };
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::Slots;
    use crate::span::Span;
    use candle_core::{DType, Device};

    /// A chunk, then a row and a tree after it: each sees its own tokens in their order.
    #[test]
    fn rows_see_the_tokens_before_them() {
        let (cpu, channels) = (Device::Cpu, 4);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let pool = || Tensor::zeros((16, 1, channels / 2), dtype, &cpu).unwrap();
            let (k, v) = (pool(), pool());
            // Whole numbers, which all dtypes hold: token t has 10 t + channel.
            let inputs = |tokens: &[u32]| {
                let values = tokens
                    .iter()
                    .flat_map(|&t| (0..channels).map(move |c| (10 * t) as f32 + c as f32));
                Tensor::from_iter(values, &cpu)
                    .unwrap()
                    .reshape((tokens.len(), channels))
                    .unwrap()
            };
            let weights: Vec<f32> = [1., 2., 4.].into_iter().flat_map(|w| [w; 4]).collect();
            let weights = ConvWeights {
                taps: Tensor::from_vec(weights, (3, channels), &cpu).unwrap(),
                bias: None,
            };
            // Blocks of two slots, the pool's in another order than the sequence's.
            let blocks = vec![5, 2, 7, 1, 3];
            let slot = |position: usize| blocks[position / 2] * 2 + (position % 2) as u32;
            let run = |tokens: &[u32], context: usize, tree: Option<Vec<u64>>| {
                let slots: Vec<u32> = (0..tokens.len()).map(|i| slot(context + i)).collect();
                let slots = Slots::new(&slots, 16, &cpu).unwrap();
                let pools = Pools {
                    k: &k,
                    v: &v,
                    slots: &slots,
                };
                let x = inputs(tokens);
                let ones = x.ones_like().unwrap();
                let products = Tensor::cat(&[&ones, &ones, &x], 1).unwrap();
                short_conv_write(&products, pools).unwrap();
                let spans = [Span {
                    rows: 0..tokens.len(),
                    context,
                    blocks: blocks.clone(),
                    tree,
                }];
                let batch = AttentionBatch::new(&spans, 2, 16).unwrap();
                let out = short_conv(&ones, (&k, &v), &weights, &batch).unwrap();
                out.to_vec2::<f32>().unwrap()
            };
            let want = |path: &[u32]| -> Vec<f32> {
                let of = |c: usize| {
                    let near = path.iter().rev().zip([1., 2., 4.]);
                    near.map(|(&t, w)| w * ((10 * t) as f32 + c as f32)).sum()
                };
                (0..channels).map(of).collect()
            };
            let chunk = run(&[1, 2, 3], 0, None);
            assert_eq!(chunk, [want(&[1]), want(&[1, 2]), want(&[1, 2, 3])]);
            // The root, two children of it, and a child of the second one.
            let tree = vec![0b1, 0b11, 0b101, 0b1101];
            let found = run(&[4, 5, 6, 7], 3, Some(tree));
            let paths: [&[u32]; 4] = [&[2, 3, 4], &[3, 4, 5], &[3, 4, 6], &[4, 6, 7]];
            assert_eq!(found, paths.map(want));
        }
    }

    #[test]
    fn pools_of_other_shapes_are_refused() {
        let cpu = Device::Cpu;
        let spans = [Span {
            rows: 0..1,
            context: 0,
            blocks: vec![0],
            tree: None,
        }];
        let batch = AttentionBatch::new(&spans, 2, 16).unwrap();
        let c = Tensor::zeros((1, 4), DType::F32, &cpu).unwrap();
        let weights = ConvWeights {
            taps: Tensor::zeros((3, 4), DType::F32, &cpu).unwrap(),
            bias: None,
        };
        for (slots, width) in [(15, 2), (16, 3)] {
            let pool = Tensor::zeros((slots, 1, width), DType::F16, &cpu).unwrap();
            short_conv(&c, (&pool, &pool), &weights, &batch).unwrap_err();
        }
    }
}
