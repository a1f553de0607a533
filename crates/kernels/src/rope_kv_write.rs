//! Rotary position embedding of queries and keys, and the write of keys and values to their slots.

use super::kv_write::kv_write;
use super::rope::{HeadNorms, rope};
use super::slots::Slots;
use candle_core::{Result, Tensor};

/// The pools and slots that the keys and values of a layer are written to.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    /// `[num_slots, num_kv_heads, head_dim]` each.
    pub k: &'a Tensor,
    /// The pool of values, of the same shape.
    pub v: &'a Tensor,
    /// The slot of each row.
    pub slots: &'a Slots,
}

/// Rotates queries and keys as [`rope`] does, writes keys and values to the pools as [`kv_write`] does,
/// and returns the queries, `[rows, num_heads, head_dim]`, on the CPU as a part of `qkv`. The contents of `qkv`
/// afterwards are not specified.
///
/// `qkv` is `[rows, num_heads + 2 * num_kv_heads, head_dim]`, and `angles` are as in [`rope`]; all are
/// contiguous. On CUDA the pools have the dtype of `qkv`, and a single
/// kernel does everything.
///
/// # Errors
/// If the shapes or dtypes do not match, or the pools have fewer slots than [`Slots`] were checked for.
pub fn rope_kv_write(
    qkv: &Tensor,
    num_heads: usize,
    angles: Option<(&Tensor, &Tensor)>,
    norms: Option<&HeadNorms>,
    pools: Pools<'_>,
) -> Result<Tensor> {
    let needed = pools.slots.num_slots();
    for pool in [pools.k, pools.v] {
        if pool.dim(0)? < needed {
            candle_core::bail!(
                "rope-kv-write: {needed} slots do not fit in pool {:?}",
                pool.dims()
            );
        }
    }
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        return cuda::launch(qkv, num_heads, angles, norms, pools);
    }
    rope(qkv, num_heads, angles, norms)?;
    let kv_heads = (qkv.dim(1)? - num_heads) / 2;
    let keys = qkv.narrow(1, num_heads, kv_heads)?;
    kv_write(pools.k, &keys, pools.slots.tensor())?;
    let values = qkv.narrow(1, num_heads + kv_heads, kv_heads)?;
    kv_write(pools.v, &values, pools.slots.tensor())?;
    qkv.narrow(1, 0, num_heads)
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::gpu;
    use super::super::rope::pairs;
    use super::{HeadNorms, Pools};
    use candle_core::{Result, Tensor};

    const NAME: &str = "rope-kv-write";
    const THREADS: usize = 128;

    /// Launches the kernel.
    pub fn launch(
        qkv: &Tensor,
        num_heads: usize,
        angles: Option<(&Tensor, &Tensor)>,
        norms: Option<&HeadNorms>,
        pools: Pools<'_>,
    ) -> Result<Tensor> {
        let (rows, all, d) = qkv.dims3()?;
        let kv_heads = all.saturating_sub(num_heads) / 2;
        let fits = |pool: &Tensor| pool.dims().get(1..) == Some(&[kv_heads, d][..]);
        let half = pairs(rows, d, angles.map(|(cos, sin)| (cos.dims(), sin.dims())))?;
        let whole = match norms {
            Some(norms) if norms.after_rotation => {
                candle_core::bail!("{NAME}: no CUDA kernel for norms after the rotation")
            }
            Some(norms) => norms.are_whole((num_heads, kv_heads), d)?,
            None => false,
        };
        if num_heads + 2 * kv_heads != all
            || pools.slots.len() != rows
            || !fits(pools.k)
            || !fits(pools.v)
        {
            candle_core::bail!(
                "{NAME}: {:?} does not match {:?} slots and pools {:?}",
                qkv.dims(),
                pools.slots.len(),
                pools.k.dims()
            );
        }
        let (device, dtype) = (qkv.device().as_cuda_device()?, qkv.dtype());
        let (cos, sin) = angles.unzip();
        let angles = cos.into_iter().chain(sin);
        gpu::expect_dtype(NAME, dtype, angles.chain([pools.k, pools.v]))?;
        let (q_norm, k_norm) = (norms.map(|n| &n.q), norms.map(|n| &n.k));
        gpu::expect_dtype(NAME, dtype, q_norm.into_iter().chain(k_norm))?;
        let kernel = format!("rope_kv_write_{}", gpu::suffix(dtype));
        let kernel = gpu::function(device, "rope_kv_write", gpu::ROPE_KV_WRITE, &kernel)?;
        let q = gpu::output(device, dtype, (rows, num_heads, d))?;
        let launch = kernel.launch().tensor(qkv)?;
        let launch = launch.optional(cos)?.optional(sin)?;
        let launch = launch.optional(q_norm)?.optional(k_norm)?;
        let launch = launch.tensor(pools.slots.tensor())?.tensor(&q)?;
        let launch = launch.tensor(pools.k)?.tensor(pools.v)?;
        let launch = launch.int(rows).int(num_heads).int(all).int(d);
        let launch = launch.int(half).int(usize::from(whole));
        let launch = launch.float(norms.map_or(0., |n| n.eps));
        let blocks = (rows * all * 32).div_ceil(THREADS);
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and
        // writes: the pools contain every slot of `Slots`. All work runs in the order of one stream, so
        // nothing else reads the pools at the same time.
        unsafe { launch.run(gpu::grid((blocks, 1, 1), THREADS, 0))? };
        Ok(q)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// A GPU does not check each slot, so the number of slots must be checked instead.
    #[test]
    fn a_pool_that_is_smaller_than_the_slots_were_checked_for_is_refused() {
        let cpu = Device::Cpu;
        let ones = |dims: (usize, usize, usize)| Tensor::ones(dims, DType::F32, &cpu).unwrap();
        let angles = Tensor::ones((2, 4), DType::F32, &cpu).unwrap();
        let slots = Slots::new(&[0, 4], 5, &cpu).unwrap();
        let run = |k: usize, v: usize| {
            let (k, v) = (ones((k, 1, 8)), ones((v, 1, 8)));
            let pools = Pools {
                k: &k,
                v: &v,
                slots: &slots,
            };
            rope_kv_write(&ones((2, 4, 8)), 2, Some((&angles, &angles)), None, pools)
        };
        assert_eq!(run(5, 6).unwrap().dims(), [2, 2, 8]);
        run(4, 5).unwrap_err();
        run(5, 4).unwrap_err();
    }
}
