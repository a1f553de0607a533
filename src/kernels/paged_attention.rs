//! Attention that reads K and V where they lie in a paged pool.
//!
//! One order of additions for a row: the keys that it sees are numbered 0, 1, 2.. in ascending
//! order, taken in tiles of [`TILE`], and each tile rescales the running softmax (Milakov and
//! Gimelshein 2018, "Online normalizer calculation for softmax"). Numbers, not pool places or rows
//! of a call, decide where a tile ends. So a row's bits do not depend on its neighbours, on how its
//! sequence was cut into calls, on which blocks hold it, or on the unseen branches of a draft tree.

use super::contiguous;
use super::float::{add_scaled, dot, exp};
use super::parallel::{Shared, for_each};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};
use std::ops::Range;

/// Keys a step of the running softmax.
const TILE: usize = 64;
/// Rows that share one pass over the keys: enough to reuse K and V from the cache.
const ROWS: usize = 16;
/// Multiply-adds below which other threads are not worth waking.
const HEAVY: usize = 1 << 16;

/// The rows of one sequence.
#[derive(Debug, Clone)]
pub struct Segment<'a> {
    /// Rows of the call.
    pub rows: Range<usize>,
    /// Tokens of the sequence in the pool before these rows.
    pub context: usize,
    /// Block table: pool position `p` lives in `blocks[p / block_size]`. Row `i` of the segment has
    /// its K and V at pool position `context + i`.
    pub blocks: &'a [u32],
    /// Bit `j` of entry `i`: row `i` sees row `j` of the segment. `None` = causal.
    pub tree: Option<&'a [u64]>,
}

/// Softmax attention of `q` over the pools: `[rows, heads, head_dim]`, in the dtype of `q`.
///
/// `q` is `[rows, heads, head_dim]`; `k` and `v` are `[num_slots, kv_heads, head_dim]` with
/// `kv_heads` dividing `heads`; all have one dtype (f32, f16 or bf16) and are contiguous. Every row
/// belongs to exactly one segment. Sums are in f32.
///
/// # Errors
/// Where shapes do not fit, a block is outside the pool, or the device has no such kernel.
pub fn paged_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    segments: &[Segment<'_>],
    block_size: usize,
    scale: f32,
) -> Result<Tensor> {
    let op = PagedAttention {
        segments,
        block_size,
        scale,
    };
    q.apply_op3_no_bwd(k, v, &op)
}

struct PagedAttention<'a> {
    segments: &'a [Segment<'a>],
    block_size: usize,
    scale: f32,
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
        let dims = self.dims(q_layout, k_layout, v_layout)?;
        let (storages, layouts) = ([q, k, v], [q_layout, k_layout, v_layout]);
        let out = match q {
            CpuStorage::F32(_) => self.run::<f32>(dims, storages, layouts)?,
            CpuStorage::F16(_) => self.run::<half::f16>(dims, storages, layouts)?,
            CpuStorage::BF16(_) => self.run::<half::bf16>(dims, storages, layouts)?,
            _ => candle_core::bail!("paged-attention: q must be f32, f16 or bf16"),
        };
        Ok((out, q_layout.shape().clone()))
    }
}

#[derive(Clone, Copy)]
struct Dims {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// A run of rows of one segment, with one K/V head: the unit of work. All its rows see a prefix of
/// the same list of keys.
struct Item {
    /// First row of the call.
    row: usize,
    rows: usize,
    kv_head: usize,
    /// Keys that the first row sees; each further row sees one more.
    first_sees: usize,
    segment: usize,
    /// Pool positions seen at or beyond the context, for a row of a tree.
    branch: Option<Vec<usize>>,
}

impl PagedAttention<'_> {
    fn dims(&self, q: &Layout, k: &Layout, v: &Layout) -> Result<Dims> {
        let (rows, heads, head_dim) = q.shape().dims3()?;
        let (slots, kv_heads, kv_dim) = k.shape().dims3()?;
        if k.dims() != v.dims() || kv_dim != head_dim || heads % kv_heads != 0 {
            candle_core::bail!(
                "paged-attention: q {:?}, k {:?} and v {:?} do not fit",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        let mut next = 0;
        for s in self.segments {
            let needs = (s.context + s.rows.len()).div_ceil(self.block_size);
            let inside = |&b: &u32| (b as usize + 1) * self.block_size <= slots;
            if s.rows.start != next || s.blocks.len() < needs || !s.blocks.iter().all(inside) {
                candle_core::bail!("paged-attention: segment {s:?} does not fit {slots} slots");
            }
            if s.tree
                .is_some_and(|t| t.len() != s.rows.len() || t.len() > 64)
            {
                candle_core::bail!("paged-attention: a tree has one mask a row, for up to 64 rows");
            }
            next = s.rows.end;
        }
        if next != rows {
            candle_core::bail!("paged-attention: segments cover {next} of {rows} rows");
        }
        Ok(Dims {
            rows,
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// The work, longest first, so that threads end together.
    fn items(&self, dims: Dims) -> Vec<Item> {
        let mut items = Vec::new();
        for (segment, s) in self.segments.iter().enumerate() {
            let step = if s.tree.is_some() { 1 } else { ROWS };
            for start in (0..s.rows.len()).step_by(step) {
                let branch = s.tree.map(|tree| branch(s.context, tree[start]));
                for kv_head in 0..dims.kv_heads {
                    items.push(Item {
                        row: s.rows.start + start,
                        rows: step.min(s.rows.len() - start),
                        kv_head,
                        first_sees: branch
                            .as_ref()
                            .map_or(s.context + start + 1, |b| s.context + b.len()),
                        segment,
                        branch: branch.clone(),
                    });
                }
            }
        }
        items.sort_by_key(|item| std::cmp::Reverse(item.first_sees * item.rows));
        items
    }

    fn run<T: Element>(
        &self,
        dims: Dims,
        [q, k, v]: [&CpuStorage; 3],
        [q_layout, k_layout, v_layout]: [&Layout; 3],
    ) -> Result<CpuStorage> {
        let name = "paged-attention";
        let q = contiguous::<T>(name, q, q_layout)?;
        let pools = [
            contiguous::<T>(name, k, k_layout)?,
            contiguous::<T>(name, v, v_layout)?,
        ];
        let mut out = vec![T::zero(); q.len()];
        let shared = Shared::new(&mut out);
        let items = self.items(dims);
        let work: usize = items.iter().map(|i| i.first_sees * i.rows).sum();
        let heavy = work * (dims.heads / dims.kv_heads) * dims.head_dim > HEAVY;
        for_each(items.len(), heavy, |i| {
            let item = &items[i];
            let group = dims.heads / dims.kv_heads;
            let mut lanes = Lanes::load(item, q, dims, self.scale);
            self.attend(item, &mut lanes, pools, dims);
            for row in 0..item.rows {
                let head = (item.row + row) * dims.heads + item.kv_head * group;
                let len = group * dims.head_dim;
                // SAFETY: items are disjoint in (row, K/V head), and so are these slices.
                let place = unsafe { shared.slice(head * dims.head_dim, len) };
                lanes.store(row, group, place);
            }
        });
        debug_assert_eq!(out.len(), dims.rows * dims.heads * dims.head_dim);
        Ok(T::to_cpu_storage_owned(out))
    }

    fn attend<T: Element>(&self, item: &Item, lanes: &mut Lanes, pools: [&[T]; 2], dims: Dims) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { self.attend_avx2(item, lanes, pools, dims) };
        }
        self.attend_body(item, lanes, pools, dims);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn attend_avx2<T: Element>(
        &self,
        item: &Item,
        lanes: &mut Lanes,
        pools: [&[T]; 2],
        dims: Dims,
    ) {
        self.attend_body(item, lanes, pools, dims);
    }

    /// One pass over the keys of `item`. Key outer, row inner: a key is read (and widened) once for
    /// all rows and all heads of the group.
    #[inline(always)]
    fn attend_body<T: Element>(
        &self,
        item: &Item,
        lanes: &mut Lanes,
        [k, v]: [&[T]; 2],
        dims: Dims,
    ) {
        let d = dims.head_dim;
        let group = dims.heads / dims.kv_heads;
        let mut wide = vec![0f32; d];
        let mut places = [0usize; TILE];
        let all = item.first_sees + item.rows - 1;
        for start in (0..all).step_by(TILE) {
            let len = TILE.min(all - start);
            for (i, place) in places[..len].iter_mut().enumerate() {
                *place = (self.slot(item, start + i) * dims.kv_heads + item.kv_head) * d;
            }
            // Lanes of the first row that sees key `number`; lanes are row-major.
            let first = |number: usize| (number + 1).saturating_sub(item.first_sees) * group;
            for (i, &place) in places[..len].iter().enumerate() {
                let key = T::widen(&k[place..place + d], &mut wide);
                for lane in first(start + i)..item.rows * group {
                    lanes.scores[lane * TILE + i] = dot(&lanes.q[lane * d..][..d], key);
                }
            }
            for lane in first(start)..item.rows * group {
                let sees = (item.first_sees + lane / group - start).min(len);
                lanes.rescale(lane, sees, d);
            }
            for (i, &place) in places[..len].iter().enumerate() {
                let value = T::widen(&v[place..place + d], &mut wide);
                for lane in first(start + i)..item.rows * group {
                    let weight = lanes.scores[lane * TILE + i];
                    add_scaled(&mut lanes.acc[lane * d..][..d], weight, value);
                }
            }
        }
    }

    /// Pool slot of the key with this number.
    #[inline(always)]
    fn slot(&self, item: &Item, number: usize) -> usize {
        let segment = &self.segments[item.segment];
        let position = match &item.branch {
            Some(branch) if number >= segment.context => branch[number - segment.context],
            _ => number,
        };
        segment.blocks[position / self.block_size] as usize * self.block_size
            + position % self.block_size
    }
}

/// Pool positions of the rows of a segment that `mask` shows.
fn branch(context: usize, mask: u64) -> Vec<usize> {
    let seen = (0..64).filter(|j| mask >> j & 1 == 1);
    seen.map(|j| context + j).collect()
}

/// Running softmax of every (row, head) of an item: one lane each, row-major.
struct Lanes {
    /// Queries, already scaled.
    q: Vec<f32>,
    /// Weighted sums of the values so far.
    acc: Vec<f32>,
    /// Scores of the tile, then their weights.
    scores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl Lanes {
    fn load<T: Element>(item: &Item, q: &[T], dims: Dims, scale: f32) -> Self {
        let group = dims.heads / dims.kv_heads;
        let (d, count) = (dims.head_dim, item.rows * group);
        let mut queries = vec![0f32; count * d];
        for (lane, query) in queries.chunks_exact_mut(d).enumerate() {
            let head = item.kv_head * group + lane % group;
            let at = ((item.row + lane / group) * dims.heads + head) * d;
            for (to, from) in query.iter_mut().zip(&q[at..at + d]) {
                *to = from.to_f32() * scale;
            }
        }
        Self {
            q: queries,
            acc: vec![0f32; count * d],
            scores: vec![0f32; count * TILE],
            max: vec![f32::NEG_INFINITY; count],
            sum: vec![0f32; count],
        }
    }

    /// Turns the first `sees` scores of the tile into weights against the new maximum, and brings
    /// what was summed so far to it.
    #[inline(always)]
    fn rescale(&mut self, lane: usize, sees: usize, d: usize) {
        let scores = &mut self.scores[lane * TILE..][..sees];
        let max = scores.iter().copied().fold(self.max[lane], f32::max);
        let shrink = exp(self.max[lane] - max);
        let mut sum = 0f32;
        for score in scores.iter_mut() {
            *score = exp(*score - max);
        }
        for score in scores.iter() {
            sum += score;
        }
        self.sum[lane] = self.sum[lane] * shrink + sum;
        self.max[lane] = max;
        if shrink != 1.0 {
            for a in &mut self.acc[lane * d..][..d] {
                *a *= shrink;
            }
        }
    }

    fn store<T: Element>(&self, row: usize, group: usize, out: &mut [T]) {
        let d = out.len() / group;
        for (i, place) in out.chunks_exact_mut(d).enumerate() {
            let lane = row * group + i;
            for (to, from) in place.iter_mut().zip(&self.acc[lane * d..][..d]) {
                *to = T::from_f32(from / self.sum[lane]);
            }
        }
    }
}

/// What a pool may hold.
trait Element: WithDType {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    /// `row` as f32, in `buffer` where it must be converted.
    fn widen<'a>(row: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32];
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn widen<'a>(row: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        row
    }
}

macro_rules! half_element {
    ($t:ty) => {
        impl Element for $t {
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }

            fn from_f32(x: f32) -> Self {
                <$t>::from_f32(x)
            }

            #[inline(always)]
            fn widen<'a>(row: &'a [$t], buffer: &'a mut [f32]) -> &'a [f32] {
                half::slice::HalfFloatSliceExt::convert_to_f32_slice(row, buffer);
                buffer
            }
        }
    };
}
half_element!(half::f16);
half_element!(half::bf16);
