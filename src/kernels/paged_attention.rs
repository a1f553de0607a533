//! Attention that reads K and V where they lie in a paged pool.
//!
//! One order of additions for a row: the keys that it sees are numbered 0, 1, 2.. in ascending
//! order, taken in tiles of [`TILE`], and each tile rescales the running softmax (Milakov and
//! Gimelshein 2018, "Online normalizer calculation for softmax"). Numbers, not pool places or rows
//! of a call, decide where a tile ends. So a row's bits do not depend on its neighbours, on how its
//! sequence was cut into calls, on which blocks hold it, or on the unseen branches of a draft tree.

use super::attention_tile::{TILE, add_weighted, is_fast, scores, weigh};
use super::contiguous;
use super::float::exp;
use super::parallel::{Shared, for_each};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// (Sequence, K/V head) pairs below which the heads of a group are worked on apart.
const FEW: usize = 8;
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
        let out = super::clock::time(super::clock::Part::Attention, || match q {
            CpuStorage::F32(_) => self.run::<f32>(dims, storages, layouts),
            CpuStorage::F16(_) => self.run::<half::f16>(dims, storages, layouts),
            CpuStorage::BF16(_) => self.run::<half::bf16>(dims, storages, layouts),
            _ => candle_core::bail!("paged-attention: q must be f32, f16 or bf16"),
        })?;
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

/// A run of rows of one segment, with heads that share a K/V head: the unit of work. All its rows see a prefix of
/// the same list of keys.
struct Item {
    /// First row of the call.
    row: usize,
    rows: usize,
    kv_head: usize,
    /// Query heads of the K/V head's group.
    heads: Range<usize>,
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
        let group = dims.heads / dims.kv_heads;
        // One sequence alone is too few pieces for several threads, unless its heads part.
        let step = if self.segments.len() * dims.kv_heads < FEW {
            1
        } else {
            group
        };
        let mut items = Vec::new();
        for (segment, s) in self.segments.iter().enumerate() {
            let rows = if s.tree.is_some() { 1 } else { ROWS };
            for start in (0..s.rows.len()).step_by(rows) {
                let branch = s.tree.map(|tree| branch(s.context, tree[start]));
                let pieces = (0..dims.kv_heads)
                    .flat_map(|kv_head| (0..group).step_by(step).map(move |head| (kv_head, head)));
                items.extend(pieces.map(|(kv_head, head)| {
                    Item {
                        row: s.rows.start + start,
                        rows: rows.min(s.rows.len() - start),
                        kv_head,
                        heads: head..group.min(head + step),
                        first_sees: branch
                            .as_ref()
                            .map_or(s.context + start + 1, |b| s.context + b.len()),
                        segment,
                        branch: branch.clone(),
                    }
                }));
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
            let mut lanes = Lanes::load(item, q, dims, self.scale);
            self.attend(item, &mut lanes, pools, dims);
            for row in 0..item.rows {
                let len = item.heads.len() * dims.head_dim;
                // SAFETY: items are disjoint in (row, head), and so are these slices.
                let place = unsafe { shared.slice(item.query(row, dims), len) };
                lanes.store(row, item.heads.len(), place);
            }
        });
        debug_assert_eq!(out.len(), dims.rows * dims.heads * dims.head_dim);
        Ok(T::to_cpu_storage_owned(out))
    }

    /// One pass over the keys of `item`, tile by tile: a tile stays in the cache for all rows and
    /// heads, and is widened once.
    fn attend<T: Element>(&self, item: &Item, lanes: &mut Lanes, [k, v]: [&[T]; 2], dims: Dims) {
        let (d, heads) = (dims.head_dim, item.heads.len());
        let fast = is_fast(d);
        let mut wide = Vec::new();
        let mut places = [0usize; TILE];
        let all = item.first_sees + item.rows - 1;
        for start in (0..all).step_by(TILE) {
            let len = TILE.min(all - start);
            for (i, place) in places[..len].iter_mut().enumerate() {
                *place = (self.slot(item, start + i) * dims.kv_heads + item.kv_head) * d;
            }
            // Lanes are row-major; the first rows may not see as far as this tile.
            let first = (start + 1).saturating_sub(item.first_sees) * heads;
            let sees = |lane: usize| (item.first_sees + lane / heads - start).min(len);
            let (keys, at) = T::tile(k, &places[..len], d, &mut wide);
            for lane in first..item.rows * heads {
                let at = &at[..sees(lane)];
                let row = &mut lanes.scores[lane * TILE..][..at.len()];
                scores(fast, &lanes.q[lane * d..][..d], keys, at, row);
                lanes.rescale(fast, lane, at.len(), d);
            }
            let (values, at) = T::tile(v, &places[..len], d, &mut wide);
            for lane in first..item.rows * heads {
                let at = &at[..sees(lane)];
                let weights = &lanes.scores[lane * TILE..][..at.len()];
                add_weighted(fast, &mut lanes.acc[lane * d..][..d], weights, values, at);
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

impl Item {
    /// Where the heads of this item's row `row` begin in q, and in the output.
    fn query(&self, row: usize, dims: Dims) -> usize {
        let head = self.kv_head * (dims.heads / dims.kv_heads) + self.heads.start;
        ((self.row + row) * dims.heads + head) * dims.head_dim
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
        let (d, heads) = (dims.head_dim, item.heads.len());
        let count = item.rows * heads;
        let mut queries = vec![0f32; count * d];
        for (lane, query) in queries.chunks_exact_mut(d).enumerate() {
            let at = item.query(lane / heads, dims) + lane % heads * d;
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
    fn rescale(&mut self, fast: bool, lane: usize, sees: usize, d: usize) {
        let scores = &mut self.scores[lane * TILE..][..sees];
        let max = scores.iter().copied().fold(self.max[lane], f32::max);
        let shrink = exp(self.max[lane] - max);
        self.sum[lane] = self.sum[lane] * shrink + weigh(fast, scores, max);
        self.max[lane] = max;
        if shrink != 1.0 {
            for a in &mut self.acc[lane * d..][..d] {
                *a *= shrink;
            }
        }
    }

    fn store<T: Element>(&self, row: usize, heads: usize, out: &mut [T]) {
        let d = out.len() / heads;
        for (i, place) in out.chunks_exact_mut(d).enumerate() {
            let lane = row * heads + i;
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
    /// Vectors of `d` values at `places` as f32, and where they are in what is returned: `data`
    /// itself, or `buffer` where they must be converted.
    fn tile<'a>(
        data: &'a [Self],
        places: &'a [usize],
        d: usize,
        buffer: &'a mut Vec<f32>,
    ) -> (&'a [f32], std::borrow::Cow<'a, [usize]>);
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(x: f32) -> Self {
        x
    }

    fn tile<'a>(
        data: &'a [f32],
        places: &'a [usize],
        _: usize,
        _: &'a mut Vec<f32>,
    ) -> (&'a [f32], std::borrow::Cow<'a, [usize]>) {
        (data, places.into())
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

            fn tile<'a>(
                data: &'a [$t],
                places: &'a [usize],
                d: usize,
                buffer: &'a mut Vec<f32>,
            ) -> (&'a [f32], std::borrow::Cow<'a, [usize]>) {
                buffer.resize(places.len() * d, 0.0);
                for (&place, wide) in places.iter().zip(buffer.chunks_exact_mut(d)) {
                    HalfFloatSliceExt::convert_to_f32_slice(&data[place..place + d], wide);
                }
                let at = (0..places.len()).map(|i| i * d).collect();
                (buffer, at)
            }
        }
    };
}
half_element!(half::f16);
half_element!(half::bf16);
