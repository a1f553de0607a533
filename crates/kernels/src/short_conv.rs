//! Short causal convolutions over the paged pool of a layer, one of each channel. CPU only.
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

/// Writes the inputs `x`, `[rows, channels]` f32, to the slots of the rows: the first half of the channels to the pool
/// of K, the other half to that of V, each `[num_slots, 1, channels / 2]`.
///
/// # Errors
/// As [`kv_write`], and if the number of channels is odd.
pub fn short_conv_write(x: &Tensor, pools: Pools<'_>) -> Result<()> {
    let (rows, channels) = x.dims2()?;
    let half = channels / 2;
    let x = x.reshape((rows, 2, half))?;
    for (i, pool) in [pools.k, pools.v].into_iter().enumerate() {
        kv_write(pool, &x.narrow(1, i, 1)?, pools.slots.tensor())?;
    }
    Ok(())
}

/// The convolutions of the rows of `batch`, `[rows, channels]` f32: the sum over `i` of `weights[i]` times the input of
/// the token `i` before the row's own, in its sequence or up its branch of a draft; there is none before the first.
///
/// `k` and `v` are the pools that [`short_conv_write`] wrote the inputs of these tokens to, in f32, f16 or bf16; `weights`
/// is `[taps, channels]` f32. A row's sum is in one order, from the token that is furthest away.
///
/// # Errors
/// If the shapes or dtypes do not match, or the pools have fewer slots than `batch` was checked for.
pub fn short_conv(
    k: &Tensor,
    v: &Tensor,
    weights: &Tensor,
    batch: &AttentionBatch<'_>,
) -> Result<Tensor> {
    k.apply_op3_no_bwd(v, weights, &ShortConv { batch })
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
            let weights = Tensor::from_vec(weights, (3, channels), &cpu).unwrap();
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
                short_conv_write(&inputs(tokens), pools).unwrap();
                let spans = [Span {
                    rows: 0..tokens.len(),
                    context,
                    blocks: blocks.clone(),
                    tree,
                }];
                let batch = AttentionBatch::new(&spans, 2, 16).unwrap();
                let out = short_conv(&k, &v, &weights, &batch).unwrap();
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
        let weights = Tensor::zeros((3, 4), DType::F32, &cpu).unwrap();
        for (slots, width) in [(15, 2), (16, 3)] {
            let pool = Tensor::zeros((slots, 1, width), DType::F16, &cpu).unwrap();
            short_conv(&pool, &pool, &weights, &batch).unwrap_err();
        }
    }
}
