//! Rotary position embedding of queries and keys, and Qwen3's head norms before it.

use super::parallel::{Shared, for_each};
use super::storage::contiguous;
use candle_core::{CpuStorage, InplaceOp3, Layout, Result, Tensor};
use tracing::trace_span;

/// Number of rows from which waking other threads pays.
const MIN_PARALLEL_ROWS: usize = 16;

/// Weights of the norms of q and k before the rotation, each `[head_dim]` f32.
#[derive(Debug, Clone)]
pub struct HeadNorms {
    pub q: Tensor,
    pub k: Tensor,
    pub eps: f32,
}

/// Rotates heads `0..num_heads + num_kv_heads` of `qkv`, the queries and keys, in place (Su et al.
/// 2021). As in Hugging Face's code, value `i` of a head is paired with value `i + head_dim / 2`.
///
/// `qkv` is `[rows, num_heads + 2 * num_kv_heads, head_dim]`; `cos` and `sin` are
/// `[rows, head_dim / 2]`, all contiguous f32.
///
/// # Errors
/// If the shapes or dtypes do not match, or the device has no such kernel.
pub fn rope(
    qkv: &Tensor,
    num_heads: usize,
    cos: &Tensor,
    sin: &Tensor,
    norms: Option<&HeadNorms>,
) -> Result<()> {
    qkv.inplace_op3(cos, sin, &Rope { num_heads, norms })
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
        let (rows, all, d) = self.dims(layout, cos_layout, sin_layout)?;
        let cos = contiguous::<f32>(self.name(), cos, cos_layout)?;
        let sin = contiguous::<f32>(self.name(), sin, sin_layout)?;
        let norms = match self.norms {
            Some(n) => Some((n.q.to_vec1::<f32>()?, n.k.to_vec1::<f32>()?, n.eps)),
            None => None,
        };
        let (CpuStorage::F32(qkv), Some((start, end))) = (qkv, layout.contiguous_offsets()) else {
            candle_core::bail!("rope: q, k and v must be contiguous and f32");
        };
        let qkv = Shared::new(&mut qkv[start..end]);
        let rotated = (all + self.num_heads) / 2;
        trace_span!("kv_write").in_scope(|| {
            for_each(rows, rows >= MIN_PARALLEL_ROWS, |row| {
                // SAFETY: rows do not overlap.
                let heads = unsafe { qkv.slice(row * all * d, rotated * d) };
                let angles = row * d / 2..(row + 1) * d / 2;
                for (i, head) in heads.chunks_exact_mut(d).enumerate() {
                    if let Some((q, k, eps)) = &norms {
                        norm(head, if i < self.num_heads { q } else { k }, *eps);
                    }
                    rotate(head, &cos[angles.clone()], &sin[angles.clone()]);
                }
            });
        });
        Ok(())
    }
}

impl Rope<'_> {
    /// Rows, heads (queries, keys and values), and values per head.
    fn dims(&self, qkv: &Layout, cos: &Layout, sin: &Layout) -> Result<(usize, usize, usize)> {
        let (rows, all, d) = qkv.shape().dims3()?;
        let table = [rows, d / 2];
        if cos.dims() != table || sin.dims() != table || all < self.num_heads {
            candle_core::bail!("rope: {qkv:?} does not match angles {cos:?}");
        }
        Ok((rows, all, d))
    }
}

fn norm(head: &mut [f32], weight: &[f32], eps: f32) {
    let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
    let scale = 1. / (mean + eps).sqrt();
    for (x, weight) in head.iter_mut().zip(weight) {
        *x *= scale * weight;
    }
}

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

    fn angles(rows: usize) -> (Tensor, Tensor) {
        let angles = Tensor::randn(0f32, 2., (rows, D / 2), &Device::Cpu).unwrap();
        (angles.cos().unwrap(), angles.sin().unwrap())
    }

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn agrees_with_candle_and_leaves_the_values_alone() {
        let rows = 21;
        let (cos, sin) = angles(rows);
        let dims = (rows, HEADS + 2 * KV_HEADS, D);
        let qkv = Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        let weights = Tensor::randn(1f32, 1., (2, D), &Device::Cpu).unwrap();
        for normed in [false, true] {
            let norms = HeadNorms {
                q: weights.get(0).unwrap(),
                k: weights.get(1).unwrap(),
                eps: 1e-5,
            };
            let ours = qkv.copy().unwrap();
            rope(&ours, HEADS, &cos, &sin, normed.then_some(&norms)).unwrap();
            let part = |start, len| qkv.narrow(1, start, len).unwrap().contiguous().unwrap();
            let theirs = |part: Tensor, weight: &Tensor| {
                let part = match normed {
                    true => candle_nn::ops::rms_norm(&part, weight, 1e-5).unwrap(),
                    false => part,
                };
                let part = part.unsqueeze(0).unwrap();
                candle_nn::rotary_emb::rope_thd(&part, &cos, &sin).unwrap()
            };
            let q = theirs(part(0, HEADS), &norms.q).squeeze(0).unwrap();
            let k = theirs(part(HEADS, KV_HEADS), &norms.k).squeeze(0).unwrap();
            let v = part(HEADS + KV_HEADS, KV_HEADS);
            let want = Tensor::cat(&[q, k, v], 1).unwrap();
            for (ours, want) in values(&ours).iter().zip(values(&want)) {
                assert!(
                    (ours - want).abs() < 1e-5 * want.abs().max(1.),
                    "{ours} {want}"
                );
            }
        }
    }

    #[test]
    fn a_row_does_not_know_its_neighbours() {
        let (cos, sin) = angles(20);
        let dims = (20, HEADS + 2 * KV_HEADS, D);
        let qkv = Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        let pick = |t: &Tensor| t.narrow(0, 7, 1).unwrap().copy().unwrap();
        let alone = pick(&qkv);
        rope(&alone, HEADS, &pick(&cos), &pick(&sin), None).unwrap();
        rope(&qkv, HEADS, &cos, &sin, None).unwrap();
        assert_eq!(values(&pick(&qkv)), values(&alone));
        assert!(rope(&qkv, HEADS, &pick(&cos), &pick(&sin), None).is_err());
    }
}
