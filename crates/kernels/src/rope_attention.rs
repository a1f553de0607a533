//! Rope, the write of keys and values, and the attention of the same rows.

#[cfg(feature = "cuda")]
use super::paged_attention::attend_rotating;
use super::paged_attention::{AttentionBatch, AttentionParams, paged_attention};
use super::rope::HeadNorms;
#[cfg(feature = "cuda")]
use super::rope_kv_write::RopeArgs;
use super::rope_kv_write::{Pools, ValueHeads, rope_kv_write};
use candle_core::{Result, Tensor};

/// [`rope_kv_write`], then [`paged_attention`] of the queries over the same pools; all rows attend. For up to 16 rows of f16
/// or bf16 on a GPU, with heads of up to 128 values, a single kernel does both with the same bits.
///
/// # Errors
/// Returns the errors of both.
pub fn rope_attention(
    qkv: &Tensor,
    num_heads: usize,
    (angles, norms): (Option<(&Tensor, &Tensor)>, Option<&HeadNorms>),
    values: &ValueHeads,
    pools: Pools<'_>,
    batch: &AttentionBatch<'_>,
    params: AttentionParams<'_>,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        pools.check()?;
        params.check(num_heads)?;
        let rope = RopeArgs::new(qkv, num_heads, (angles, norms), values, Some(pools))?;
        if let Some(out) = attend_rotating(&rope, batch, params)? {
            return Ok(out);
        }
    }
    let q = rope_kv_write(qkv, num_heads, angles, norms, values, pools)?;
    paged_attention(&q, pools.k, pools.v, batch, params)
}
