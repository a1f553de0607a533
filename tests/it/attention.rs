//! Compares paged attention with f64, and with itself.

use candle_core::{DType, Device, Tensor};
use foretoken::kernels::{AttentionBatch, AttentionParams, Span, kv_write, paged_attention};
use proptest::prelude::*;

/// A small deterministic generator: proptest chooses the cases, this the random values.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.0 >> 33
    }

    fn tensor(&mut self, dims: (usize, usize, usize), dtype: DType) -> Tensor {
        let values = (0..dims.0 * dims.1 * dims.2).map(|_| self.next() as f32 / 1e9 - 1.07);
        let values: Vec<f32> = values.collect();
        let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
        tensor.to_dtype(dtype).unwrap()
    }

    /// `count` of `0..of`, shuffled.
    fn blocks(&mut self, count: usize, of: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..of as u32).collect();
        for i in (1..of).rev() {
            all.swap(i, self.next() as usize % (i + 1));
        }
        all.truncate(count);
        all
    }
}

/// What attention does besides.
#[derive(Debug, Clone, Copy, Default)]
struct Form {
    window: Option<usize>,
    soft_cap: Option<f32>,
}

/// One sequence: its K and V by position, and queries for the last rows.
struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    block_size: usize,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    form: Form,
    /// Whether pools are of blocks of `Q8_0`.
    in_blocks: bool,
}

const SLOTS_FACTOR: usize = 3;

impl Case {
    fn new(
        noise: &mut Noise,
        len: usize,
        shape: (usize, usize, usize),
        block_size: usize,
        dtype: DType,
    ) -> Self {
        let (kv_heads, group, d) = shape;
        let heads = kv_heads * group;
        Self {
            heads,
            kv_heads,
            d,
            block_size,
            k: noise.tensor((len, kv_heads, d), dtype),
            v: noise.tensor((len, kv_heads, d), dtype),
            q: noise.tensor((len, heads, d), dtype),
            form: Form::default(),
            in_blocks: false,
        }
    }

    fn with(self, form: Form) -> Self {
        Self { form, ..self }
    }

    fn len(&self) -> usize {
        self.k.dim(0).unwrap()
    }

    /// Pools with all of K and V written to `blocks`. All other slots hold NaN, so that reading them
    /// shows.
    fn pools(&self, blocks: &[u32]) -> (Tensor, Tensor) {
        let num_blocks = self.len().div_ceil(self.block_size) * SLOTS_FACTOR;
        let dims = (num_blocks * self.block_size, self.kv_heads, self.d);
        let slots: Vec<u32> = (0..self.len())
            .map(|p| {
                blocks[p / self.block_size] * self.block_size as u32 + (p % self.block_size) as u32
            })
            .collect();
        let slots = Tensor::new(slots, &Device::Cpu).unwrap();
        let pool = |rows: &Tensor| {
            let pool = if self.in_blocks {
                let blocks = (dims.0, dims.1, dims.2 / 32 * 34);
                Tensor::full(u8::MAX, blocks, &Device::Cpu).unwrap()
            } else {
                let pool = Tensor::full(f32::NAN, dims, &Device::Cpu).unwrap();
                pool.to_dtype(rows.dtype()).unwrap()
            };
            kv_write(&pool, rows, &slots).unwrap();
            pool
        };
        (pool(&self.k), pool(&self.v))
    }

    fn blocks(&self, noise: &mut Noise) -> Vec<u32> {
        let count = self.len().div_ceil(self.block_size);
        noise.blocks(count, count * SLOTS_FACTOR)
    }

    /// The attention of rows `start..end` in one call.
    fn rows(&self, blocks: &[u32], start: usize, end: usize) -> Vec<Vec<f32>> {
        let (k, v) = self.pools(blocks);
        let q = self
            .q
            .narrow(0, start, end - start)
            .unwrap()
            .contiguous()
            .unwrap();
        let span = Span::causal(0..end - start, start, blocks);
        run(&q, &k, &v, &[span], self.block_size, self.form)
    }

    /// The attention of row `row` in f64.
    fn reference(&self, row: usize) -> Vec<f64> {
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_vec3::<f64>().unwrap();
        let (q, k, v) = (wide(&self.q), wide(&self.k), wide(&self.v));
        let first = self.form.window.map_or(0, |w| (row + 1).saturating_sub(w));
        let mut out = Vec::new();
        for (head, query) in q[row].iter().enumerate() {
            let kv = head / (self.heads / self.kv_heads);
            let scores: Vec<f64> = (first..=row)
                .map(|p| {
                    let dot: f64 = query.iter().zip(&k[p][kv]).map(|(a, b)| a * b).sum();
                    let score = dot * f64::from(scale(self.d));
                    match self.form.soft_cap.map(f64::from) {
                        Some(cap) => cap * (score / cap).tanh(),
                        None => score,
                    }
                })
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..self.d {
                let values = weights.iter().zip(&v[first..]);
                let value: f64 = values.map(|(w, v)| w * v[kv][i]).sum();
                out.push(value / sum);
            }
        }
        out
    }
}

fn scale(d: usize) -> f32 {
    1. / (d as f32).sqrt()
}

fn run(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spans: &[Span],
    block_size: usize,
    form: Form,
) -> Vec<Vec<f32>> {
    let params = AttentionParams {
        window: form.window,
        soft_cap: form.soft_cap,
        ..AttentionParams::scaled(scale(q.dim(2).unwrap()))
    };
    let batch = AttentionBatch::new(spans, block_size, k.dim(0).unwrap()).unwrap();
    let out = paged_attention(q, k, v, &batch, params).unwrap();
    let out = out.flatten_from(1).unwrap().to_dtype(DType::F32).unwrap();
    out.to_vec2::<f32>().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn agrees_with_f64(
        seed in any::<u64>(),
        len in 1usize..400,
        kv_heads in 1usize..4,
        group in 1usize..4,
        d in 1usize..70,
        block_size in 1usize..20,
        start in 0usize..400,
        kind in 0usize..3,
        window in proptest::option::of(1usize..300),
        soft_cap in proptest::option::of(0.2f32..9.),
    ) {
        let noise = &mut Noise(seed);
        let (dtype, tolerance) = [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 2e-2)][kind];
        let case = Case::new(noise, len, (kv_heads, group, d), block_size, dtype);
        let case = case.with(Form { window, soft_cap });
        let blocks = case.blocks(noise);
        let start = start % len;
        for (row, got) in case.rows(&blocks, start, len).iter().enumerate().step_by(7) {
            for (got, want) in got.iter().zip(case.reference(start + row)) {
                prop_assert!((f64::from(*got) - want).abs() < tolerance, "{got} {want}");
            }
        }
    }

    #[test]
    fn chunks_and_blocks_do_not_change_a_bit(
        seed in any::<u64>(),
        len in 2usize..600,
        cut in 1usize..600,
        block_size in 1usize..20,
        window in proptest::option::of(1usize..300),
        soft_cap in proptest::option::of(0.2f32..9.),
    ) {
        let noise = &mut Noise(seed);
        let case = Case::new(noise, len, (2, 3, 24), block_size, DType::F32);
        let case = case.with(Form { window, soft_cap });
        let (blocks, others) = (case.blocks(noise), case.blocks(noise));
        let cut = cut % len;
        let whole = case.rows(&blocks, 0, len);
        let mut parts = case.rows(&others, 0, cut.max(1));
        parts.extend(case.rows(&others, cut.max(1), len));
        prop_assert_eq!(&whole, &parts);
        prop_assert_eq!(&case.rows(&others, len - 1, len)[0], &whole[len - 1]);
    }
}

/// A row of a tree equals the last row of its path as a sequence, wherever the tree begins: its keys are
/// numbered without the branches that it does not see, and a window ends at its position.
#[test]
fn a_row_of_a_tree_equals_its_path_alone() {
    for (window, soft_cap) in [(None, None), (Some(2), None), (Some(127), Some(0.9))] {
        a_row_of_a_tree_equals_its_path(Form { window, soft_cap });
    }
}

fn a_row_of_a_tree_equals_its_path(form: Form) {
    let noise = &mut Noise(9);
    let parents = [
        None,
        Some(0),
        Some(0),
        Some(1),
        Some(2),
        None,
        Some(4),
        Some(6),
    ];
    let mut masks: Vec<u64> = Vec::new();
    for (row, parent) in parents.iter().enumerate() {
        masks.push(parent.map_or(0, |p: usize| masks[p]) | 1 << row);
    }
    for context in [0usize, 5, 120, 124, 126, 127, 128, 130, 255, 300] {
        let (rows, shape) = (parents.len(), (2, 3, 24));
        let case = Case::new(noise, context + rows, shape, 4, DType::F32).with(form);
        let blocks = case.blocks(noise);
        let (k, v) = case.pools(&blocks);
        let pick = |t: &Tensor, rows: &[u32]| {
            let rows = Tensor::new(rows, &Device::Cpu).unwrap();
            t.index_select(&rows, 0).unwrap()
        };
        let span = Span {
            rows: 0..rows,
            context,
            blocks: blocks.clone(),
            tree: Some(masks.clone()),
        };
        let q = case.q.narrow(0, context, rows).unwrap();
        let tree = run(&q.contiguous().unwrap(), &k, &v, &[span], 4, form);
        for (row, mask) in masks.iter().enumerate() {
            let branch = (0..rows)
                .filter(|j| mask >> j & 1 == 1)
                .map(|j| context + j);
            let path: Vec<u32> = (0..context).chain(branch).map(|p| p as u32).collect();
            let alone = Case {
                k: pick(&case.k, &path),
                v: pick(&case.v, &path),
                q: pick(&case.q, &path),
                ..case
            };
            let last = path.len() - 1;
            let alone = alone.rows(&alone.blocks(noise), last, last + 1);
            assert_eq!(tree[row], alone[0], "row {row} after {context}, {form:?}");
        }
    }
}

#[test]
fn several_spans_equal_each_alone() {
    let noise = &mut Noise(5);
    let block_size = 4;
    let lens = [70usize, 1, 150];
    let starts = [69usize, 0, 40];
    let cases: Vec<Case> = lens
        .iter()
        .map(|&len| Case::new(noise, len, (2, 2, 16), block_size, DType::F32))
        .collect();
    // One pool for all: each sequence takes every third block.
    let tables: Vec<Vec<u32>> = (0..3)
        .map(|i| (0..40).map(|b| b * 3 + i).rev().collect())
        .collect();
    let pool = || Tensor::zeros((120 * block_size, 2, 16), DType::F32, &Device::Cpu).unwrap();
    let (k, v) = (pool(), pool());
    let (mut spans, mut queries, mut row) = (Vec::new(), Vec::new(), 0);
    for ((case, table), &start) in cases.iter().zip(&tables).zip(&starts) {
        let slots: Vec<u32> = (0..case.len())
            .map(|p| table[p / block_size] * block_size as u32 + (p % block_size) as u32)
            .collect();
        let slots = Tensor::new(slots, &Device::Cpu).unwrap();
        kv_write(&k, &case.k, &slots).unwrap();
        kv_write(&v, &case.v, &slots).unwrap();
        let rows = case.len() - start;
        spans.push(Span::causal(row..row + rows, start, table));
        queries.push(case.q.narrow(0, start, rows).unwrap());
        row += rows;
    }
    let q = Tensor::cat(&queries, 0).unwrap();
    let together = run(&q, &k, &v, &spans, block_size, Form::default());
    for (span, case) in spans.iter().zip(&cases) {
        let blocks = case.blocks(noise);
        let alone = case.rows(&blocks, span.context, case.len());
        assert_eq!(together[span.rows.clone()], alone[..]);
    }
}

/// Pools may have fewer bits than queries: the result equals f32 attention over the pools' values, or is near it
/// where bf16 is multiplied by bf16.
#[test]
fn queries_may_be_wider_than_pools() {
    let noise = &mut Noise(7);
    for dtype in [DType::F16, DType::BF16] {
        let narrow = Case::new(noise, 300, (2, 3, 40), 4, dtype);
        let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let blocks = narrow.blocks(noise);
        let both = Case {
            k: narrow.k.clone(),
            v: narrow.v.clone(),
            q: wide(&narrow.q),
            ..narrow
        };
        let all = Case {
            k: wide(&narrow.k),
            v: wide(&narrow.v),
            q: wide(&narrow.q),
            ..narrow
        };
        for (start, end) in [(299, 300), (290, 300), (0, 300)] {
            let (got, want) = (
                both.rows(&blocks, start, end),
                all.rows(&blocks, start, end),
            );
            if dtype == DType::F16 {
                assert_eq!(got, want);
            }
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() < 2e-2, "{got} {want}");
            }
        }
        let (k, v) = both.pools(&blocks);
        let spans = [Span::causal(0..300, 0, &blocks)];
        let batch = AttentionBatch::new(&spans, 4, k.dim(0).unwrap()).unwrap();
        let out = paged_attention(&both.q, &k, &v, &batch, AttentionParams::scaled(1.)).unwrap();
        assert_eq!(out.dtype(), DType::F32);
    }
}

/// Values of up to 1.08 are off by up to half of 1.08 / 127, so a score of 64 products by 0.0015 (rms), and the output by
/// the 0.0043 of a value and a few times the 0.0015.
#[test]
fn blocks_of_8_bits_are_near_f64() {
    let noise = &mut Noise(11);
    for (len, shape, window) in [
        (1, (1, 1, 64), None),
        (40, (2, 3, 64), None),
        (300, (2, 7, 64), Some(70)),
        (700, (1, 4, 128), None),
    ] {
        let case = Case::new(noise, len, shape, 4, DType::F32);
        let form = Form {
            window,
            soft_cap: None,
        };
        let case = Case {
            in_blocks: true,
            ..case.with(form)
        };
        let blocks = case.blocks(noise);
        let start = len - len.min(33);
        let mut worst = 0f64;
        for (row, got) in case.rows(&blocks, start, len).iter().enumerate() {
            for (got, want) in got.iter().zip(case.reference(start + row)) {
                worst = worst.max((f64::from(*got) - want).abs());
            }
        }
        assert!(0. < worst && worst < 0.015, "{len} keys: {worst}");
    }
}

/// Blocks are of whole heads, and of f32.
#[test]
fn pools_of_blocks_have_whole_ones() {
    let cpu = Device::Cpu;
    let pool = |width| Tensor::zeros((8, 2, width), DType::U8, &cpu).unwrap();
    let rows = |d, dtype| Tensor::ones((1, 2, d), dtype, &cpu).unwrap();
    let slots = Tensor::new(&[3u32], &cpu).unwrap();
    let write = |width, d, dtype| kv_write(&pool(width), &rows(d, dtype), &slots).is_ok();
    assert!(write(68, 64, DType::F32));
    assert!(!write(64, 64, DType::F32), "no room for scales");
    assert!(!write(34, 40, DType::F32), "a part of a block");
    assert!(!write(68, 64, DType::F16));
    let spans = [Span::causal(0..1, 3, &[0])];
    let batch = AttentionBatch::new(&spans, 4, 8).unwrap();
    let attend = |width, d, dtype| {
        let (q, pool) = (Tensor::ones((1, 4, d), dtype, &cpu).unwrap(), pool(width));
        paged_attention(&q, &pool, &pool, &batch, AttentionParams::scaled(1.)).is_ok()
    };
    assert!(attend(68, 64, DType::F32));
    assert!(!attend(64, 64, DType::F32));
    assert!(!attend(34, 40, DType::F32));
    assert!(!attend(68, 64, DType::U8));
}

#[test]
fn shapes_that_do_not_match_are_errors() {
    let tensor = |rows, heads| Tensor::zeros((rows, heads, 8), DType::F32, &Device::Cpu).unwrap();
    let spans = [Span::causal(0..2, 3, &[0, 1])];
    let batch = AttentionBatch::new(&spans, 4, 8).unwrap();
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
        paged_attention(q, k, v, &batch, AttentionParams::scaled(1.)).is_ok()
    };
    let (q, pool) = (tensor(2, 4), tensor(8, 2));
    assert!(attend(&q, &pool, &pool));
    assert!(attend(&q, &tensor(9, 2), &tensor(9, 2)), "larger pools");
    assert!(!attend(&tensor(2, 3), &pool, &pool), "heads");
    assert!(!attend(&q, &tensor(8, 0), &tensor(8, 0)), "no heads");
    assert!(!attend(&tensor(3, 4), &pool, &pool), "a row without a span");
    assert!(!attend(&tensor(1, 4), &pool, &pool), "a span without rows");
    // The batch was checked for pools of eight slots.
    assert!(!attend(&q, &tensor(7, 2), &tensor(7, 2)), "small pools");
    assert!(!attend(&q, &pool, &tensor(9, 2)), "pools that differ");
    let narrow = q.to_dtype(DType::F16).unwrap();
    assert!(!attend(&narrow, &pool, &pool), "pools wider than q");
    let (few, plain) = (
        Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap(),
        AttentionParams::scaled(1.),
    );
    for wrong in [
        AttentionParams {
            window: Some(0),
            ..plain
        },
        AttentionParams {
            soft_cap: Some(0.),
            ..plain
        },
        AttentionParams {
            sinks: Some(&few),
            ..plain
        },
    ] {
        assert!(paged_attention(&q, &pool, &pool, &batch, wrong).is_err());
    }
}
