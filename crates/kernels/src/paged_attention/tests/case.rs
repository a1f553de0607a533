//! A sequence in a pool of any kind, and its attention in f64.

use super::super::numbers::{Number, Pool};
use super::super::vectors::CHUNK;
use super::super::*;
use crate::q8_blocks::{self, Quantize};
use crate::simd::{Element, Portable, run};
use crate::span::Span;
use half::{bf16, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;

pub(super) const BLOCK_SIZE: usize = 8;

/// Numbers in -1..1 that depend only on `salt`.
fn noise(len: usize, salt: usize) -> Vec<f32> {
    let mut state = salt as u64 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// What the tests keep in a pool.
pub(super) trait Sample: Stored {
    /// A head as the pool has it.
    fn narrow(head: &[f32]) -> Vec<Self>;

    /// The numbers of a head.
    fn wide(head: &[Self]) -> Vec<f32>;

    /// A scaled query as it is multiplied.
    fn query(scaled: Vec<f32>) -> Vec<f32>;
}

macro_rules! sample {
    ($($number:ty, $from_f32:expr, $query:expr;)*) => {
        $(impl Sample for $number {
            fn narrow(head: &[f32]) -> Vec<Self> {
                head.iter().map(|&x| $from_f32(x)).collect()
            }

            fn wide(head: &[Self]) -> Vec<f32> {
                head.iter().map(|x| x.to_f32()).collect()
            }

            fn query(scaled: Vec<f32>) -> Vec<f32> {
                scaled.into_iter().map($query).collect()
            }
        })*
    };
}
sample! {
    f32, std::convert::identity, std::convert::identity;
    f16, f16::from_f32, std::convert::identity;
    bf16, bf16::from_f32, |q| bf16::from_f32(q).to_f32();
}

impl Sample for u8 {
    fn narrow(head: &[f32]) -> Vec<u8> {
        let mut blocks = vec![0; q8_blocks::bytes(head.len()).unwrap()];
        let to = &mut blocks;
        run(Isa::Portable, Quantize { from: head, to });
        blocks
    }

    fn wide(head: &[u8]) -> Vec<f32> {
        let mut numbers = vec![0.0; head.len() / q8_blocks::BYTES * q8_blocks::BLOCK];
        q8_blocks::dequantize(Portable, head, &mut numbers);
        numbers
    }

    fn query(mut scaled: Vec<f32>) -> Vec<f32> {
        for block in scaled.chunks_mut(q8_blocks::BLOCK) {
            let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            for x in block {
                *x = (*x * (127. / largest)).round_ties_even() * (largest / 127.);
            }
        }
        scaled
    }
}

type NumberOf<E> = <<E as Stored>::Numbers as Pool>::Number;

/// What attention does besides.
#[derive(Debug, Clone, Default)]
pub(super) struct Form {
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
    pub sinks: bool,
    pub bidirectional: bool,
}

/// Windows shorter than a tile and longer than a chunk; caps and sinks near the scores, so that they matter.
pub(super) fn forms() -> [Form; 5] {
    let form = |window, soft_cap, sinks| Form {
        window,
        soft_cap,
        sinks,
        bidirectional: false,
    };
    [
        form(Some(5), None, false),
        form(Some(CHUNK + 9), None, false),
        form(None, Some(1.5), false),
        form(None, None, true),
        form(Some(40), Some(0.8), true),
    ]
}

/// K and V of one sequence by position, and queries for its last rows.
pub(super) struct Case<E> {
    pub dims: Dims,
    pub len: usize,
    pub q: Vec<f32>,
    pub k: Vec<E>,
    pub v: Vec<E>,
    /// Every other block of the pool, in descending order.
    pub blocks: Vec<u32>,
    pub form: Form,
}

impl<E: Sample> Case<E> {
    pub fn new(len: usize, rows: usize, group: usize, head_dim: usize) -> Self {
        let kv_heads = 2;
        let dims = Dims {
            heads: kv_heads * group,
            kv_heads,
            head_dim,
        };
        let (width, stored) = (kv_heads * head_dim, kv_heads * elements::<E>(head_dim));
        let count = len.div_ceil(BLOCK_SIZE);
        let blocks: Vec<u32> = (0..count as u32).rev().map(|block| 2 * block).collect();
        // Slots that are not the sequence's hold NaN, so that reading them shows.
        let pool = |salt| {
            let hole = E::narrow(&vec![f32::NAN; head_dim]);
            let mut pool = hole.repeat(2 * count * BLOCK_SIZE * kv_heads);
            for (position, row) in noise(len * width, salt).chunks(width).enumerate() {
                let slot =
                    blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE;
                let heads = row.chunks(head_dim).flat_map(E::narrow);
                for (to, from) in pool[slot * stored..].iter_mut().zip(heads) {
                    *to = from;
                }
            }
            pool
        };
        let (k, v) = (pool(len), pool(len + 1));
        let q = noise(rows * dims.heads * head_dim, len + 2)
            .iter()
            .map(|x| 4.0 * x)
            .collect();
        Self {
            dims,
            len,
            q,
            k,
            v,
            blocks,
            form: Form::default(),
        }
    }

    pub fn with(self, form: Form) -> Self {
        Self { form, ..self }
    }

    /// The sinks of all heads.
    pub fn sinks(&self) -> Option<Vec<f32>> {
        self.form.sinks.then(|| noise(self.dims.heads, 3))
    }

    pub fn row_floats(&self) -> usize {
        self.dims.heads * self.dims.head_dim
    }

    pub fn rows(&self) -> usize {
        self.q.len() / self.row_floats()
    }

    /// Runs some rows of the sequence in one call.
    pub fn run(
        &self,
        isa: Isa,
        threads: usize,
        rows: Range<usize>,
        tree: Option<&[u64]>,
    ) -> Vec<f32> {
        let spans = [Span {
            rows: 0..rows.len(),
            context: self.len - self.rows() + rows.start,
            blocks: self.blocks.clone(),
            tree: tree.map(<[u64]>::to_vec),
        }];
        self.run_spans(isa, threads, &spans, rows)
    }

    /// Runs some rows of the sequence, each as a sequence of its own, in one call.
    pub fn run_apart(&self, isa: Isa, threads: usize, rows: Range<usize>) -> Vec<f32> {
        let span = |i| {
            Span::causal(
                i..i + 1,
                self.len - self.rows() + rows.start + i,
                &self.blocks,
            )
        };
        let spans: Vec<Span> = (0..rows.len()).map(span).collect();
        self.run_spans(isa, threads, &spans, rows)
    }

    pub fn run_spans(
        &self,
        isa: Isa,
        threads: usize,
        spans: &[Span],
        rows: Range<usize>,
    ) -> Vec<f32> {
        let slots = self.k.len() / (self.dims.kv_heads * elements::<E>(self.dims.head_dim));
        let op = PagedAttention {
            batch: &AttentionBatch::new(spans, BLOCK_SIZE, slots).unwrap(),
            params: AttentionParams {
                window: self.form.window,
                bidirectional: self.form.bidirectional,
                soft_cap: self.form.soft_cap,
                ..AttentionParams::scaled(0.3)
            },
            sinks: self.sinks(),
            isa,
            threads,
        };
        let stride = self.row_floats();
        let q = &self.q[rows.start * stride..rows.end * stride];
        op.run(self.dims, Queries { q, stride }, [&self.k, &self.v])
    }

    /// A key or a value as f64.
    pub fn wide(&self, pool: &[E], position: usize, kv_head: usize) -> Vec<f64> {
        let slot = self.blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE;
        let head = elements::<E>(self.dims.head_dim);
        let at = (slot * self.dims.kv_heads + kv_head) * head;
        let numbers = E::wide(&pool[at..at + head]);
        numbers.into_iter().map(f64::from).collect()
    }

    /// The expected output of a head of a row, which sees itself and all rows before it in its window, and as many after it
    /// if the form is so.
    pub fn reference(&self, row: usize, head: usize) -> Vec<f64> {
        let end = self.len - self.rows() + row + 1;
        let window = self.form.window.unwrap_or(self.len);
        let last = if self.form.bidirectional {
            (end + window - 1).min(self.len)
        } else {
            end
        };
        self.reference_of(end.saturating_sub(window)..last, row, head)
    }

    /// The expected output of a head of a row that sees the keys `sees`.
    pub fn reference_of(&self, sees: Range<usize>, row: usize, head: usize) -> Vec<f64> {
        let (d, kv_head) = (self.dims.head_dim, head / self.dims.group());
        let query = &self.q[row * self.row_floats() + head * d..][..d];
        // The kernel may round queries, after it scaled them.
        let base = self.form.soft_cap.map_or(LOG2_E, |_| 1.0);
        let scaled = query.iter().map(|q| q * (0.3 * base)).collect();
        let scaled = E::query(scaled);
        let score = |position| {
            let key = self.wide(&self.k, position, kv_head);
            let products = scaled.iter().zip(key).map(|(&q, k)| f64::from(q) * k);
            let score = products.sum::<f64>() / f64::from(base);
            match self.form.soft_cap.map(f64::from) {
                Some(cap) => cap * (score / cap).tanh(),
                None => score,
            }
        };
        let scores: Vec<f64> = sees.clone().map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let mut sums = vec![0.0; d];
        let sink = self.sinks().map(|sinks| f64::from(sinks[head]));
        let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
        for (position, score) in sees.zip(&scores) {
            let weight = (score - max).exp();
            sum += weight;
            for (sum, v) in sums.iter_mut().zip(self.wide(&self.v, position, kv_head)) {
                *sum += weight * v;
            }
        }
        sums.iter().map(|x| x / sum).collect()
    }

    /// The largest difference that rounding may make. Weights in bf16 are off by up to 2^-9 each, and values are
    /// in -1..1. Products of sums of two bf16 are off by up to 2^-16.
    pub fn limit(&self, isa: Isa) -> f64 {
        match NumberOf::<E>::COUNT {
            2 => 2e-3,
            _ if Self::first_like(isa) == Isa::Portable => 1e-5,
            _ => 6e-5,
        }
    }

    /// The slowest instruction set that has the same bits.
    pub fn first_like(isa: Isa) -> Isa {
        match isa {
            Isa::AmxBf16(_) if E::Numbers::IN_TILES => isa,
            _ => Isa::Portable,
        }
    }

    pub fn check(&self, isa: Isa) {
        let got = self.run(isa, 2, 0..self.rows(), None);
        for (i, got) in got.chunks(self.dims.head_dim).enumerate() {
            let want = self.reference(i / self.dims.heads, i % self.dims.heads);
            for (got, want) in got.iter().zip(want) {
                let off = (f64::from(*got) - want).abs();
                assert!(
                    off < self.limit(isa),
                    "{isa:?}, {} keys, {:?}, {:?}: {got} {want}",
                    self.len,
                    self.dims,
                    self.form
                );
            }
        }
    }
}

/// Elements of a head in a pool.
pub(super) fn elements<E: Stored>(head_dim: usize) -> usize {
    E::elements(head_dim).unwrap()
}
