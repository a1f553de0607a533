//! Rotary position embedding of queries and keys, and the write of keys and values to their slots.

use super::kv_write::kv_write;
use super::norm::rms_norm;
use super::rope::{HeadNorms, rope};
use super::slots::Slots;
use candle_core::{Result, Tensor};
use std::borrow::Cow;

#[cfg(feature = "cuda")]
pub(crate) use cuda::RopeArgs;

/// The pools and slots that the keys and values of a layer are written to.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    /// `[num_slots, num_kv_heads, head_dim]` each, or bytes of blocks: see [`kv_write`].
    pub k: &'a Tensor,
    /// The pool of values, of the same shape.
    pub v: &'a Tensor,
    /// The slot of each row.
    pub slots: &'a Slots,
}

impl Pools<'_> {
    /// Checks that they have the slots of the rows.
    pub(crate) fn check(&self) -> Result<()> {
        let needed = self.slots.num_slots();
        for pool in [self.k, self.v] {
            if pool.dim(0)? < needed {
                candle_core::bail!(
                    "rope-kv-write: {needed} slots do not fit in pool {:?}",
                    pool.dims()
                );
            }
        }
        Ok(())
    }
}

/// What the values of a layer are; by default heads of their own, as they are.
#[derive(Debug, Clone, Default)]
pub struct ValueHeads {
    /// Whether values are the keys before norms and rotation, as in some layers of Gemma 4.
    pub are_keys: bool,
    /// The RMSNorm of each head, without weights; `None` = there is no norm.
    pub norm: Option<ValueNorm>,
}

/// An RMSNorm of values, which multiplies with nothing.
#[derive(Debug, Clone)]
pub struct ValueNorm {
    /// `[head_dim]`: ones.
    pub ones: Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

impl ValueHeads {
    /// `[rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, and the values as these are.
    fn complete<'a>(&self, qkv: &'a Tensor, num_heads: usize) -> Result<Cow<'a, Tensor>> {
        if !self.are_keys && self.norm.is_none() {
            return Ok(Cow::Borrowed(qkv));
        }
        let (_, stored, d) = qkv.dims3()?;
        let kv_heads = kv_heads((num_heads, stored), self.are_keys);
        let mut v = qkv.narrow(1, stored - kv_heads, kv_heads)?.contiguous()?;
        if let Some(ValueNorm { ones, eps }) = &self.norm {
            let heads = v.reshape(((), d))?;
            let normed = rms_norm(&heads, ones, *eps)?;
            v = normed.reshape(v.dims())?;
        }
        let others = qkv.narrow(1, 0, num_heads + kv_heads)?;
        Ok(Cow::Owned(Tensor::cat(&[&others, &v], 1)?))
    }
}

/// The number of heads of keys, if `stored` heads of queries, keys and values are stored.
fn kv_heads((num_heads, stored): (usize, usize), values_are_keys: bool) -> usize {
    stored.saturating_sub(num_heads) / if values_are_keys { 1 } else { 2 }
}

/// Rotates queries and keys as [`rope`] does, writes keys and `values` to the pools as [`kv_write`] does,
/// and returns the queries, `[rows, num_heads, head_dim]`, on the CPU as a part of a larger tensor. The contents of
/// `qkv` afterwards are not specified.
///
/// `qkv` is `[rows, num_heads + 2 * num_kv_heads, head_dim]`, without the last `num_kv_heads` heads if values are keys,
/// and `angles` are as in [`rope`]; all are contiguous, but `qkv` may be a part of wider rows. On CUDA the pools have the
/// dtype of `qkv` or are of blocks, and a single kernel does everything. Values become blocks without being rounded to that
/// dtype before.
///
/// # Errors
/// If the shapes or dtypes do not match, or the pools have fewer slots than [`Slots`] were checked for.
pub fn rope_kv_write(
    qkv: &Tensor,
    num_heads: usize,
    angles: Option<(&Tensor, &Tensor)>,
    norms: Option<&HeadNorms>,
    values: &ValueHeads,
    pools: Pools<'_>,
) -> Result<Tensor> {
    pools.check()?;
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        let args = RopeArgs::new(qkv, num_heads, (angles, norms), values, Some(pools))?;
        return cuda::launch(&args);
    }
    let qkv = &qkv.contiguous()?;
    let qkv = &*values.complete(qkv, num_heads)?;
    rope(qkv, num_heads, angles, norms)?;
    let kv_heads = (qkv.dim(1)? - num_heads) / 2;
    let keys = qkv.narrow(1, num_heads, kv_heads)?;
    kv_write(pools.k, &keys, pools.slots.tensor())?;
    let values = qkv.narrow(1, num_heads + kv_heads, kv_heads)?;
    kv_write(pools.v, &values, pools.slots.tensor())?;
    qkv.narrow(1, 0, num_heads)
}

/// Rotates the queries `q`, `[rows, num_heads, head_dim]`, which may be a part of wider rows, as [`rope`] does, and returns
/// them: of a layer that reads the keys and values of another one. The contents of `q` afterwards are not specified.
///
/// # Errors
/// If the shapes or dtypes do not match.
pub fn rope_queries(
    q: &Tensor,
    angles: Option<(&Tensor, &Tensor)>,
    norms: Option<&HeadNorms>,
) -> Result<Tensor> {
    let num_heads = q.dim(1)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        let values = ValueHeads::default();
        return cuda::launch(&RopeArgs::new(
            q,
            num_heads,
            (angles, norms),
            &values,
            None,
        )?);
    }
    let q = q.contiguous()?;
    rope(&q, num_heads, angles, norms)?;
    Ok(q)
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::rope::pairs;
    use super::super::{gpu, q8_blocks};
    use super::{HeadNorms, Pools, ValueHeads, kv_heads};
    use candle_core::{DType, Result, Tensor};

    const NAME: &str = "rope-kv-write";
    const THREADS: usize = 128;

    type Angles<'a> = Option<(&'a Tensor, &'a Tensor)>;

    /// Heads of rows that fit each other, for kernels that rotate them.
    pub struct RopeArgs<'a> {
        pub qkv: &'a Tensor,
        pub rows: usize,
        pub heads: usize,
        pub kv_heads: usize,
        pub head_dim: usize,
        /// Without pools, all heads are queries.
        pub pools: Option<Pools<'a>>,
        half: usize,
        whole: bool,
        angles: Angles<'a>,
        norms: Option<&'a HeadNorms>,
        values: &'a ValueHeads,
    }

    impl<'a> RopeArgs<'a> {
        /// # Errors
        /// If the shapes or dtypes do not match.
        pub fn new(
            qkv: &'a Tensor,
            num_heads: usize,
            (angles, norms): (Angles<'a>, Option<&'a HeadNorms>),
            values: &'a ValueHeads,
            pools: Option<Pools<'a>>,
        ) -> Result<Self> {
            let (rows, stored, d) = qkv.dims3()?;
            let kv_heads = kv_heads((num_heads, stored), values.are_keys);
            let half = pairs(rows, d, angles.map(|(cos, sin)| (cos.dims(), sin.dims())))?;
            let whole = match norms {
                // Heads without keys have no norm of keys.
                Some(norms) if pools.is_none() => norms.q.dims() != [d],
                Some(norms) => norms.are_whole((num_heads, kv_heads), d)?,
                None => false,
            };
            let args = Self {
                qkv,
                rows,
                heads: num_heads,
                kv_heads,
                head_dim: d,
                pools,
                half,
                whole,
                angles,
                norms,
                values,
            };
            let elements = if args.are_in_blocks() {
                q8_blocks::bytes(d)
            } else {
                Some(d)
            };
            let fits = |pools: &Pools<'_>| {
                let fits = |pool: &Tensor| {
                    elements.is_some_and(|d| pool.dims().get(1..) == Some(&[kv_heads, d][..]))
                };
                pools.slots.len() == rows && fits(pools.k) && fits(pools.v)
            };
            let of_values = if values.are_keys { 1 } else { 2 };
            if num_heads + of_values * kv_heads != stored
                || !pools.as_ref().map_or(kv_heads == 0, fits)
                || (whole && args.norms_rotated())
                || (whole && norms.is_some_and(|norms| norms.q.elem_count() != num_heads * d))
            {
                candle_core::bail!(
                    "{NAME}: {num_heads} queries in {:?} with {norms:?} do not match {pools:?}",
                    qkv.dims(),
                );
            }
            let dtype = qkv.dtype();
            let of_pools = args.dtype_if_rounded().unwrap_or(dtype);
            let both = pools.iter().flat_map(|pools| [pools.k, pools.v]);
            gpu::expect_dtype(NAME, of_pools, both)?;
            let angles = angles.into_iter().flat_map(|(cos, sin)| [cos, sin]);
            gpu::expect_dtype(NAME, dtype, angles)?;
            let norms = norms.into_iter().flat_map(|norms| [&norms.q, &norms.k]);
            gpu::expect_dtype(NAME, dtype, norms)?;
            Ok(args)
        }

        /// The dtype of the pools, if they are of blocks or of FP8: what is written is then rounded.
        fn dtype_if_rounded(&self) -> Option<DType> {
            let dtype = self.pools.map(|pools| pools.k.dtype());
            dtype.filter(|dtype| matches!(dtype, DType::U8 | DType::F8E4M3))
        }

        fn are_in_blocks(&self) -> bool {
            self.dtype_if_rounded() == Some(DType::U8)
        }

        fn norms_rotated(&self) -> bool {
            self.norms.is_some_and(|norms| norms.after_rotation)
        }

        /// Adds the first parameters of such kernels: heads, angles, norms and slots. Returns the values from a row to the
        /// next one, too.
        ///
        /// # Errors
        /// If a tensor is not on the GPU, or not contiguous.
        pub fn begin<'l>(&self, launch: gpu::Launch<'l>) -> Result<(gpu::Launch<'l>, usize)> {
            let (cos, sin) = self.angles.unzip();
            let (q_norm, k_norm) = (self.norms.map(|n| &n.q), self.norms.map(|n| &n.k));
            let (launch, stride) = launch.rows(self.qkv)?;
            let launch = launch.optional(cos)?.optional(sin)?;
            let launch = launch.optional(q_norm)?.optional(k_norm)?;
            let slots = self.pools.map(|pools| pools.slots.tensor());
            Ok((launch.optional(slots)?, stride))
        }

        /// Adds HEAD_PARAMETERS of `rope_kv_write.cuh`.
        pub fn end<'l>(&self, launch: gpu::Launch<'l>, stride: usize) -> gpu::Launch<'l> {
            let value_norm = self.values.norm.as_ref();
            let launch = launch.int(self.half).int(usize::from(self.whole));
            launch
                .float(self.norms.map_or(0., |n| n.eps))
                .int(usize::from(self.norms_rotated()))
                .int(usize::from(self.values.are_keys))
                .int(usize::from(value_norm.is_some()))
                .float(value_norm.map_or(0., |norm| norm.eps))
                .int(stride)
        }
    }

    /// Launches the kernel. Without pools, all heads are queries.
    pub fn launch(args: &RopeArgs<'_>) -> Result<Tensor> {
        let &RopeArgs {
            rows,
            heads,
            head_dim: d,
            pools,
            ..
        } = args;
        let all = heads + 2 * args.kv_heads;
        let in_blocks = args.are_in_blocks();
        let (device, dtype) = (args.qkv.device().as_cuda_device()?, args.qkv.dtype());
        let rounded = args.dtype_if_rounded();
        let form = match rounded {
            Some(DType::U8) => "q8_0_",
            Some(_) => "fp8_",
            None => "",
        };
        let kernel = format!("rope_kv_write_{form}{}", gpu::suffix(dtype));
        let kernel = gpu::function(device, "rope_kv_write", gpu::ROPE_KV_WRITE, &kernel)?;
        let q = gpu::output(device, dtype, (rows, heads, d))?;
        let (launch, stride) = args.begin(kernel.launch())?;
        let mut launch = launch.tensor(&q)?;
        for pool in [pools.map(|pools| pools.k), pools.map(|pools| pools.v)] {
            launch = match pool {
                Some(pool) if in_blocks => {
                    let [bytes, scales] = q8_blocks::parts(pool)?;
                    launch.tensor(&bytes)?.tensor(&scales)?
                }
                pool => launch.optional(pool)?,
            };
        }
        let launch = launch.int(rows).int(heads).int(all).int(d);
        let launch = args.end(launch, stride);
        let blocks = (rows * all * 32).div_ceil(THREADS);
        // A head for each warp, before it is rounded.
        let shared = if rounded.is_some() {
            THREADS / 32 * d * size_of::<f32>()
        } else {
            0
        };
        // SAFETY: the arguments match the kernel's parameters, and have the lengths that it reads and
        // writes: the pools contain every slot of `Slots`. All work runs in the order of one stream, so
        // nothing else reads the pools at the same time.
        unsafe { launch.run(gpu::grid((blocks, 1, 1), THREADS, shared))? };
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
            let (angles, values) = (Some((&angles, &angles)), ValueHeads::default());
            rope_kv_write(&ones((2, 4, 8)), 2, angles, None, &values, pools)
        };
        assert_eq!(run(5, 6).unwrap().dims(), [2, 2, 8]);
        run(4, 5).unwrap_err();
        run(5, 4).unwrap_err();
    }
}
