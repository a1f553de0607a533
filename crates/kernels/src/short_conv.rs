//! Short causal convolutions over the paged pool of a layer, one of each channel (LFM2).
//!
//! What a convolution reads of earlier tokens is kept by token, as K and V are. So it is rolled back, shared by
//! prefixes, preempted and moved to an accepted path as they are, and nothing else knows of it.

use super::cpu::{self, Isa};
use super::kv_write::kv_write;
use super::paged_attention::AttentionBatch;
use super::parallel::{Shared, for_each};
use super::rope_kv_write::Pools;
use super::simd::{self, Element, LANES, Loop, Simd};
use super::storage::{Place, contiguous, output, write};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use half::{bf16, f16};
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
    let isa = cpu::isa();
    let mixed = k.apply_op3_no_bwd(v, &weights.taps, &ShortConv { batch, isa })?;
    c * match &weights.bias {
        Some(bias) => mixed.broadcast_add(bias)?,
        None => mixed,
    }
}

struct ShortConv<'a> {
    batch: &'a AttentionBatch<'a>,
    isa: Isa,
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

    fn run<E: Element>(
        &self,
        pools: [&[E]; 2],
        weights: &[f32],
        channels: usize,
    ) -> Result<Vec<f32>> {
        let (half, taps) = (channels / 2, weights.len() / channels);
        if pools
            .iter()
            .any(|pool| pool.len() < self.batch.num_slots() * half)
        {
            candle_core::bail!("short-conv: the pools have too few slots");
        }
        let (slots, rows) = (self.slots(taps), self.batch.rows());
        let is_much = rows * channels * taps >= MIN_PARALLEL_WORK;
        let isa = self.isa;
        let work = |out: &Shared<'_, Place>| {
            for_each(rows, is_much, |row| {
                let work = Row {
                    pools,
                    weights,
                    slots: &slots[row * taps..][..taps],
                    // SAFETY: rows do not overlap.
                    out: unsafe { out.slice(row * channels, channels) },
                };
                simd::run(isa, work);
            });
        };
        // SAFETY: each row is written.
        Ok(unsafe { output(rows * channels, work) })
    }
}

/// The sums of one row.
struct Row<'a, E> {
    /// Those with the first half of the channels, and with the other one.
    pools: [&'a [E]; 2],
    /// `[taps, channels]`
    weights: &'a [f32],
    /// That of each tap.
    slots: &'a [Option<u32>],
    /// `[channels]`
    out: &'a mut [Place],
}

impl<E: Element> Loop for Row<'_, E> {
    type Output = ();

    /// Writes every place of `out`, a vector of channels after the other. A sum is in one order, from the last tap.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (channels, half) = (self.out.len(), self.out.len() / 2);
        let halves = self.out.chunks_exact_mut(half).zip(self.pools);
        for (number, (out, pool)) in halves.enumerate() {
            let mut start = 0;
            while start < half {
                let count = LANES.min(half - start);
                let mut sum = s.splat(0.);
                for (weights, slot) in self.weights.chunks_exact(channels).zip(self.slots).rev() {
                    let Some(slot) = slot else { continue };
                    let x = load(s, &pool[*slot as usize * half + start..][..count]);
                    let weights = load(s, &weights[number * half + start..][..count]);
                    sum = s.fma(weights, x, sum);
                }
                store(s, &mut out[start..][..count], sum);
                start += count;
            }
        }
    }
}

/// Up to [`LANES`] numbers, and zeros after them.
#[inline(always)]
fn load<E: Element, S: Simd>(s: S, from: &[E]) -> S::Vector {
    if from.len() >= LANES {
        // SAFETY: there are as many.
        return unsafe { E::load(s, from.as_ptr()) };
    }
    let mut padded = [0f32; LANES];
    for (to, x) in padded.iter_mut().zip(from) {
        *to = x.to_f32();
    }
    // SAFETY: there are as many.
    unsafe { s.load(padded.as_ptr()) }
}

/// Writes the first of `x` to all of `to`, up to [`LANES`] places.
#[inline(always)]
fn store<S: Simd>(s: S, to: &mut [Place], x: S::Vector) {
    if to.len() >= LANES {
        // SAFETY: there is room for as many, and a float has the layout of its place.
        return unsafe { s.store(to.as_mut_ptr().cast(), x) };
    }
    let mut padded = [0f32; LANES];
    // SAFETY: there is room for as many.
    unsafe { s.store(padded.as_mut_ptr(), x) };
    write(to, &padded[..to.len()]);
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
    use crate::recurrent::testing::random;
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

    /// Whole vectors and parts of one, on one thread and on several: the sums of the definition, by fused multiply-adds
    /// from the token that is furthest away.
    #[test]
    fn instruction_sets_and_threads_change_no_bit() {
        const TAPS: usize = 3;
        let cpu = Device::Cpu;
        for (rows, half) in [(5, 3), (7, 16), (4, 37), (301, 40)] {
            let channels = 2 * half;
            let spans = [Span::causal(0..rows, 0, &[0])];
            let batch = AttentionBatch::new(&spans, rows, rows).unwrap();
            let weights = random(TAPS * channels, 1.);
            let taps = Tensor::from_slice(&weights, (TAPS, channels), &cpu).unwrap();
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let pools = [(); 2].map(|()| {
                    let pool = Tensor::from_vec(random(rows * half, 1.), (rows, 1, half), &cpu);
                    pool.unwrap().to_dtype(dtype).unwrap()
                });
                let run = |isa: Isa| {
                    let op = ShortConv { batch: &batch, isa };
                    let out = pools[0].apply_op3_no_bwd(&pools[1], &taps, &op).unwrap();
                    let out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let inputs = [&pools[0], &pools[1]].map(|pool| {
                    let pool = pool.to_dtype(DType::F32).unwrap();
                    pool.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                });
                let defined = |place: usize| {
                    let (row, channel) = (place / channels, place % channels);
                    let input = &inputs[channel / half];
                    let sum = (0..TAPS.min(row + 1)).rev().fold(0f32, |sum, back| {
                        let x = input[(row - back) * half + channel % half];
                        weights[back * channels + channel].mul_add(x, sum)
                    });
                    sum.to_bits()
                };
                let wanted: Vec<u32> = (0..rows * channels).map(defined).collect();
                for isa in Isa::available() {
                    assert!(run(isa) == wanted, "{isa:?}, {dtype:?}, {rows}, {half}");
                }
            }
        }
    }

    #[test]
    fn pools_of_other_shapes_are_refused() {
        let cpu = Device::Cpu;
        let spans = [Span::causal(0..1, 0, &[0])];
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
