//! Rotary position embedding of queries and keys, and their norms before it.

use super::norm::mean_square;
use super::parallel::{Shared, for_each};
use super::storage::contiguous;
use candle_core::{CpuStorage, DType, Device, InplaceOp3, Layout, Result, Tensor};
use tracing::trace_span;

/// Number of rows from which waking other threads pays.
const MIN_PARALLEL_ROWS: usize = 16;

/// Weights of the norms of q and k, in the dtype of q: `[head_dim]` each, one for every
/// head, as in Qwen3; or `[num_heads * head_dim]` and `[num_kv_heads * head_dim]`, of all heads together, as
/// in OLMo 2.
#[derive(Debug, Clone)]
pub struct HeadNorms {
    /// The weight of the norm of queries.
    pub q: Tensor,
    /// The weight of the norm of keys.
    pub k: Tensor,
    /// Added to the mean square of both norms.
    pub eps: f32,
    /// Whether they come after the rotation, as in Hunyuan.
    pub after_rotation: bool,
}

impl HeadNorms {
    /// Whether all heads together have one norm, of so many heads of q and of k with `head_dim` values.
    ///
    /// # Errors
    /// If the weights have other shapes.
    pub(super) fn are_whole(&self, heads: (usize, usize), head_dim: usize) -> Result<bool> {
        let dims = (self.q.dims(), self.k.dims());
        if dims == (&[head_dim], &[head_dim]) {
            return Ok(false);
        }
        if dims == (&[heads.0 * head_dim], &[heads.1 * head_dim]) {
            return Ok(true);
        }
        candle_core::bail!("rope: norms {dims:?} for {heads:?} heads of {head_dim} values")
    }
}

/// Rotates heads `0..num_heads + num_kv_heads` of `qkv`, the queries and keys, in place (Su et al.
/// 2021). As in Hugging Face's code, value `i` of a head is paired with value `i + width / 2`, and values
/// from `width` on stay as they are.
///
/// `qkv` is `[rows, num_heads + 2 * num_kv_heads, head_dim]`; `angles`, the cosines and sines, are
/// `[rows, width / 2]` each, where `width` is at most `head_dim`; all contiguous f32. Without angles nothing
/// is rotated.
///
/// # Errors
/// If the shapes or dtypes do not match, or the device has no such kernel.
pub fn rope(
    qkv: &Tensor,
    num_heads: usize,
    angles: Option<(&Tensor, &Tensor)>,
    norms: Option<&HeadNorms>,
) -> Result<()> {
    let op = Rope { num_heads, norms };
    match angles {
        Some((cos, sin)) => qkv.inplace_op3(cos, sin, &op),
        None if norms.is_none() => Ok(()),
        None => {
            let none = Tensor::zeros((qkv.dim(0)?, 0), DType::F32, &Device::Cpu)?;
            qkv.inplace_op3(&none, &none, &op)
        }
    }
}

/// The number of pairs of a head that are rotated by `angles`, the dims of cosines and sines.
pub(super) fn pairs(
    rows: usize,
    head_dim: usize,
    angles: Option<(&[usize], &[usize])>,
) -> Result<usize> {
    match angles {
        None => Ok(0),
        Some((&[all, pairs], sin))
            if all == rows && sin == [rows, pairs] && 2 * pairs <= head_dim =>
        {
            Ok(pairs)
        }
        Some(angles) => candle_core::bail!(
            "rope: angles {angles:?} for {rows} rows of heads of {head_dim} values"
        ),
    }
}

struct Rope<'a> {
    num_heads: usize,
    norms: Option<&'a HeadNorms>,
}

impl InplaceOp3 for Rope<'_> {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(
        &self,
        qkv: &mut CpuStorage,
        layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> Result<()> {
        let (rows, all, d) = layout.shape().dims3()?;
        let pairs = pairs(rows, d, Some((cos_layout.dims(), sin_layout.dims())))?;
        let Some(kv_heads) = all.checked_sub(self.num_heads).map(|rest| rest / 2) else {
            candle_core::bail!("rope: {} of {all} heads are queries", self.num_heads);
        };
        let cos = contiguous::<f32>(self.name(), cos, cos_layout)?;
        let sin = contiguous::<f32>(self.name(), sin, sin_layout)?;
        let norms = match self.norms {
            Some(n) => Some((n.q.to_vec1::<f32>()?, n.k.to_vec1::<f32>()?, n.eps)),
            None => None,
        };
        let whole = match self.norms {
            Some(norms) => norms.are_whole((self.num_heads, kv_heads), d)?,
            None => false,
        };
        let after_rotation = self.norms.is_some_and(|norms| norms.after_rotation);
        let (CpuStorage::F32(qkv), Some((start, end))) = (qkv, layout.contiguous_offsets()) else {
            candle_core::bail!("rope: q, k and v must be contiguous and f32");
        };
        let qkv = Shared::new(&mut qkv[start..end]);
        trace_span!("kv_write").in_scope(|| {
            for_each(rows, rows >= MIN_PARALLEL_ROWS, |row| {
                // SAFETY: rows do not overlap.
                let heads = unsafe { qkv.slice(row * all * d, (self.num_heads + kv_heads) * d) };
                let norm_heads = |heads: &mut [f32]| {
                    let (q, k) = heads.split_at_mut(self.num_heads * d);
                    let Some((q_norm, k_norm, eps)) = &norms else {
                        return;
                    };
                    for (part, weight) in [(q, q_norm), (k, k_norm)] {
                        if whole {
                            norm_all(part, weight, *eps);
                        } else {
                            part.chunks_exact_mut(d).for_each(|x| norm(x, weight, *eps));
                        }
                    }
                };
                if !after_rotation {
                    norm_heads(heads);
                }
                let angles = row * pairs..(row + 1) * pairs;
                for head in heads.chunks_exact_mut(d) {
                    rotate(head, &cos[angles.clone()], &sin[angles.clone()]);
                }
                if after_rotation {
                    norm_heads(heads);
                }
            });
        });
        Ok(())
    }
}

fn norm(head: &mut [f32], weight: &[f32], eps: f32) {
    let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
    scale(head, weight, 1. / (mean + eps).sqrt());
}

/// Like [`norm`], with partial sums, as there are many values.
fn norm_all(heads: &mut [f32], weight: &[f32], eps: f32) {
    scale(heads, weight, 1. / (mean_square(heads) + eps).sqrt());
}

fn scale(values: &mut [f32], weight: &[f32], scale: f32) {
    for (x, weight) in values.iter_mut().zip(weight) {
        *x *= scale * weight;
    }
}

/// `head` may be longer than the pairs.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const D: usize = 16;

    fn angles(rows: usize, pairs: usize) -> (Tensor, Tensor) {
        let angles = Tensor::randn(0f32, 2., (rows, pairs), &Device::Cpu).unwrap();
        (angles.cos().unwrap(), angles.sin().unwrap())
    }

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Heads with a norm each, with one of all, and without.
    fn all_norms() -> [Option<HeadNorms>; 3] {
        let norms = |q: usize, k: usize| HeadNorms {
            q: Tensor::randn(1f32, 1., q, &Device::Cpu).unwrap(),
            k: Tensor::randn(1f32, 1., k, &Device::Cpu).unwrap(),
            eps: 1e-5,
            after_rotation: false,
        };
        let whole = norms(HEADS * D, KV_HEADS * D);
        [None, Some(norms(D, D)), Some(whole)]
    }

    /// The whole heads are rotated, a part of each, or nothing.
    #[test]
    fn agrees_with_candle_and_leaves_the_values_alone() {
        let rows = 21;
        let dims = (rows, HEADS + 2 * KV_HEADS, D);
        let qkv = Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        for (norms, pairs) in all_norms()
            .iter()
            .flat_map(|n| [(n, D / 2), (n, 3), (n, 0)])
        {
            let (cos, sin) = angles(rows, pairs);
            let ours = qkv.copy().unwrap();
            let turned = (pairs > 0).then_some((&cos, &sin));
            rope(&ours, HEADS, turned, norms.as_ref()).unwrap();
            let part = |start, len| qkv.narrow(1, start, len).unwrap().contiguous().unwrap();
            let theirs = |part: Tensor, weight: Option<&Tensor>| {
                let dims = part.dims().to_vec();
                let part = match weight {
                    Some(weight) => {
                        let wide = part.reshape(((), weight.elem_count())).unwrap();
                        candle_nn::ops::rms_norm(&wide, weight, 1e-5).unwrap()
                    }
                    None => part,
                };
                let part = part.reshape(dims).unwrap();
                if pairs == 0 {
                    return part;
                }
                let (turned, rest) = (
                    part.narrow(2, 0, 2 * pairs).unwrap(),
                    part.narrow(2, 2 * pairs, D - 2 * pairs).unwrap(),
                );
                let turned = turned.unsqueeze(0).unwrap().contiguous().unwrap();
                let turned = candle_nn::rotary_emb::rope_thd(&turned, &cos, &sin).unwrap();
                Tensor::cat(&[turned.squeeze(0).unwrap(), rest], 2).unwrap()
            };
            let q = theirs(part(0, HEADS), norms.as_ref().map(|n| &n.q));
            let k = theirs(part(HEADS, KV_HEADS), norms.as_ref().map(|n| &n.k));
            let v = part(HEADS + KV_HEADS, KV_HEADS);
            let want = Tensor::cat(&[q, k, v], 1).unwrap();
            for (ours, want) in values(&ours).iter().zip(values(&want)) {
                assert!(
                    (ours - want).abs() < 1e-5 * want.abs().max(1.),
                    "{pairs} pairs: {ours} {want}"
                );
            }
        }
    }

    #[test]
    fn a_row_does_not_know_its_neighbours() {
        let (cos, sin) = angles(20, D / 2);
        let dims = (20, HEADS + 2 * KV_HEADS, D);
        let qkv = Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        let pick = |t: &Tensor| t.narrow(0, 7, 1).unwrap().copy().unwrap();
        let alone = pick(&qkv);
        let [_, each, whole] = all_norms();
        for norms in [None, each.as_ref(), whole.as_ref()] {
            let (all, alone) = (qkv.copy().unwrap(), alone.copy().unwrap());
            rope(&alone, HEADS, Some((&pick(&cos), &pick(&sin))), norms).unwrap();
            rope(&all, HEADS, Some((&cos, &sin)), norms).unwrap();
            assert_eq!(values(&pick(&all)), values(&alone));
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu).unwrap();
        let run = |angles: &[usize], q: usize| {
            let norms = HeadNorms {
                q: ones(&[q]),
                k: ones(&[D]),
                eps: 1e-5,
                after_rotation: false,
            };
            let angles = ones(angles);
            let qkv = ones(&[2, HEADS + 2 * KV_HEADS, D]);
            rope(&qkv, HEADS, Some((&angles, &angles)), Some(&norms)).is_ok()
        };
        assert!(run(&[2, D / 2], D) && run(&[2, 1], D));
        assert!(!run(&[1, D / 2], D) && !run(&[2, D / 2 + 1], D) && !run(&[2], D));
        assert!(!run(&[2, D / 2], D + 1) && !run(&[2, D / 2], HEADS * D));
    }
}
