//! Compares each instruction set with f64, and with itself under other divisions into calls.

use super::numbers::Number;
use super::vectors::CHUNK;
use super::*;
use crate::span::Span;
use std::f32::consts::LOG2_E;
use std::ops::Range;

const BLOCK_SIZE: usize = 8;

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

/// What attention does besides.
#[derive(Debug, Clone, Default)]
struct Form {
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: bool,
}

/// Windows shorter than a tile and longer than a chunk; caps and sinks near the scores, so that they matter.
fn forms() -> [Form; 5] {
    let form = |window, soft_cap, sinks| Form {
        window,
        soft_cap,
        sinks,
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
struct Case<E> {
    dims: Dims,
    len: usize,
    q: Vec<f32>,
    k: Vec<E>,
    v: Vec<E>,
    /// Every other block of the pool, in descending order.
    blocks: Vec<u32>,
    form: Form,
}

impl<E: Pool> Case<E> {
    fn new(len: usize, rows: usize, group: usize, head_dim: usize, narrow: fn(f32) -> E) -> Self {
        let kv_heads = 2;
        let dims = Dims {
            heads: kv_heads * group,
            kv_heads,
            head_dim,
        };
        let width = kv_heads * head_dim;
        let count = len.div_ceil(BLOCK_SIZE);
        let blocks: Vec<u32> = (0..count as u32).rev().map(|block| 2 * block).collect();
        // Slots that are not the sequence's hold NaN, so that reading them shows.
        let pool = |salt| {
            let mut pool = vec![narrow(f32::NAN); 2 * count * BLOCK_SIZE * width];
            for (position, row) in noise(len * width, salt).chunks(width).enumerate() {
                let slot =
                    blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE;
                for (to, from) in pool[slot * width..].iter_mut().zip(row) {
                    *to = narrow(*from);
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

    fn with(self, form: Form) -> Self {
        Self { form, ..self }
    }

    /// The sinks of all heads.
    fn sinks(&self) -> Option<Vec<f32>> {
        self.form.sinks.then(|| noise(self.dims.heads, 3))
    }

    fn row_floats(&self) -> usize {
        self.dims.heads * self.dims.head_dim
    }

    fn rows(&self) -> usize {
        self.q.len() / self.row_floats()
    }

    /// Runs some rows of the sequence in one call.
    fn run(&self, isa: Isa, threads: usize, rows: Range<usize>, tree: Option<&[u64]>) -> Vec<f32> {
        let spans = [Span {
            rows: 0..rows.len(),
            context: self.len - self.rows() + rows.start,
            blocks: self.blocks.clone(),
            tree: tree.map(<[u64]>::to_vec),
        }];
        self.run_spans(isa, threads, &spans, rows)
    }

    /// Runs some rows of the sequence, each as a sequence of its own, in one call.
    fn run_apart(&self, isa: Isa, threads: usize, rows: Range<usize>) -> Vec<f32> {
        let span = |i| Span {
            rows: i..i + 1,
            context: self.len - self.rows() + rows.start + i,
            blocks: self.blocks.clone(),
            tree: None,
        };
        let spans: Vec<Span> = (0..rows.len()).map(span).collect();
        self.run_spans(isa, threads, &spans, rows)
    }

    fn run_spans(&self, isa: Isa, threads: usize, spans: &[Span], rows: Range<usize>) -> Vec<f32> {
        let slots = self.k.len() / (self.dims.kv_heads * self.dims.head_dim);
        let op = PagedAttention {
            batch: &AttentionBatch::new(spans, BLOCK_SIZE, slots).unwrap(),
            params: AttentionParams {
                window: self.form.window,
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
    fn wide(&self, pool: &[E], position: usize, kv_head: usize) -> Vec<f64> {
        let slot = self.blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE;
        let at = (slot * self.dims.kv_heads + kv_head) * self.dims.head_dim;
        let vector = &pool[at..at + self.dims.head_dim];
        vector.iter().map(|x| f64::from(x.to_f32())).collect()
    }

    /// The expected output of a head of a row, which sees itself and all rows before it in its window.
    fn reference(&self, row: usize, head: usize) -> Vec<f64> {
        let end = self.len - self.rows() + row + 1;
        let window = self.form.window.unwrap_or(end);
        self.reference_of(end.saturating_sub(window)..end, row, head)
    }

    /// The expected output of a head of a row that sees the keys `sees`.
    fn reference_of(&self, sees: Range<usize>, row: usize, head: usize) -> Vec<f64> {
        let (d, kv_head) = (self.dims.head_dim, head / self.dims.group());
        let query = &self.q[row * self.row_floats() + head * d..][..d];
        // Where products are those of bf16, the kernel rounds queries after it scaled them.
        let base = self.form.soft_cap.map_or(LOG2_E, |_| 1.0);
        let scaled = |q: f32| match E::Number::COUNT {
            2 => f64::from(bf16::from_f32(q * (0.3 * base))) / f64::from(base),
            _ => f64::from(q * 0.3),
        };
        let score = |position| {
            let key = self.wide(&self.k, position, kv_head);
            let products = query.iter().zip(key).map(|(&q, k)| scaled(q) * k);
            let score = products.sum::<f64>();
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
    fn limit(&self, isa: Isa) -> f64 {
        match E::Number::COUNT {
            2 => 2e-3,
            _ if Self::first_like(isa) == Isa::Portable => 1e-5,
            _ => 6e-5,
        }
    }

    /// The slowest instruction set that has the same bits.
    fn first_like(isa: Isa) -> Isa {
        match isa {
            Isa::AmxBf16(_) if E::IN_TILES => isa,
            _ => Isa::Portable,
        }
    }

    fn check(&self, isa: Isa) {
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

fn bits(out: Vec<f32>) -> Vec<u32> {
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn each_isa_agrees_with_f64() {
    let mut salt = 0;
    for head_dim in [1, 13, 24, 40, 64, 80, 96, 128, 256] {
        for group in [1, 2, 3, 4, 8] {
            salt += 1;
            // Varied pairs of rows and keys, chunk borders among them.
            let rows = [1, 2, 3, 5, 7, 16, 50][salt % 7];
            let keys = [0, 1, 30, CHUNK - 2, CHUNK, 2 * CHUNK - 3, 300][salt * 5 % 7] + rows;
            for isa in Isa::available() {
                Case::new(keys, rows, group, head_dim, |x| x).check(isa);
                Case::new(keys, rows, group, head_dim, f16::from_f32).check(isa);
                Case::new(keys, rows, group, head_dim, bf16::from_f32).check(isa);
            }
        }
    }
}

#[test]
fn each_isa_agrees_with_f64_in_every_form() {
    for (i, form) in forms().iter().enumerate() {
        for (group, head_dim) in [(1, 64), (3, 40), (8, 13)] {
            let rows = [1, 3, 16, 50][(i + group) % 4];
            for keys in [rows, CHUNK, CHUNK + 40, 3 * CHUNK + 7] {
                let keys = keys.max(rows);
                for isa in Isa::available() {
                    let form = || form.clone();
                    Case::new(keys, rows, group, head_dim, |x| x)
                        .with(form())
                        .check(isa);
                    let half = Case::new(keys, rows, group, head_dim, f16::from_f32);
                    half.with(form()).check(isa);
                    let half = Case::new(keys, rows, group, head_dim, bf16::from_f32);
                    half.with(form()).check(isa);
                }
            }
        }
    }
}

fn same_bits_for_any_division<E: Pool>(narrow: fn(f32) -> E) {
    // The last are those of latent attention.
    let shapes = [
        (1, 64),
        (3, 64),
        (4, 40),
        (8, 13),
        (2, 128),
        (1, 256),
        (4, 576),
    ];
    let plain = shapes.map(|shape| (shape, Form::default()));
    let others = forms().into_iter().zip([40, 64].into_iter().cycle());
    let others = others.map(|(form, head_dim)| ((3, head_dim), form));
    for ((group, head_dim), form) in plain.into_iter().chain(others) {
        for keys in [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17] {
            let case = Case::new(keys, 19, group, head_dim, narrow).with(form.clone());
            for isa in Isa::available() {
                let like = Case::<E>::first_like(isa);
                let all_rows = bits(case.run(like, 1, 0..19, None));
                assert_eq!(bits(case.run(isa, 1, 0..19, None)), all_rows, "{isa:?}");
                for threads in [2, 16] {
                    assert_eq!(bits(case.run(isa, threads, 0..19, None)), all_rows);
                }
                for threads in [1, 2] {
                    assert_eq!(bits(case.run_apart(isa, threads, 0..19)), all_rows);
                }
                let chain: Vec<u64> = (0..19).map(|row| (2 << row) - 1).collect();
                for threads in [1, 16] {
                    assert_eq!(bits(case.run(isa, threads, 0..19, Some(&chain))), all_rows);
                }
                for rows in [0..1, 18..19, 3..5, 7..10, 1..18] {
                    let want =
                        &all_rows[rows.start * case.row_floats()..rows.end * case.row_floats()];
                    let got = bits(case.run(isa, 2, rows.clone(), None));
                    assert_eq!(got, want, "{rows:?}, {form:?}");
                }
            }
        }
    }
}

#[test]
fn threads_chunks_and_masks_do_not_change_a_bit() {
    same_bits_for_any_division(|x| x);
    same_bits_for_any_division(f16::from_f32);
    same_bits_for_any_division(bf16::from_f32);
}

/// A prompt in long chunks, in short ones and row by row, also where an item has more rows than a chunk has
/// keys.
#[test]
fn a_prompt_has_the_same_bits_however_it_is_divided() {
    same_bits_of_a_prompt(f16::from_f32);
    same_bits_of_a_prompt(bf16::from_f32);
}

fn same_bits_of_a_prompt<E: Pool>(narrow: fn(f32) -> E) {
    let window = Form {
        window: Some(70),
        ..Form::default()
    };
    for (group, head_dim, form) in [
        (1, 64, Form::default()),
        (3, 64, window),
        (1, 40, Form::default()),
    ] {
        let rows = 2 * CHUNK + 45;
        let case = Case::new(rows + 11, rows, group, head_dim, narrow).with(form);
        let plain = Isa::available().rfind(|&isa| Case::<E>::first_like(isa) != isa);
        for isa in Isa::available() {
            let like = match Case::<E>::first_like(isa) {
                Isa::Portable => plain.unwrap_or(Isa::Portable),
                other => other,
            };
            let want = bits(case.run(like, 2, 0..rows, None));
            for pieces in [1, 2, 7, 64, 200, rows] {
                let mut got = Vec::new();
                for start in (0..rows).step_by(pieces) {
                    // Row by row only some: it takes long.
                    let end = rows.min(start + pieces);
                    if pieces > 2 || start % 16 == 0 {
                        got.extend(bits(case.run(isa, 1 + pieces % 3, start..end, None)));
                    } else {
                        got.extend(&want[start * case.row_floats()..end * case.row_floats()]);
                    }
                }
                assert!(
                    got == want,
                    "{isa:?}, {pieces} rows at a time, {:?}",
                    case.form
                );
            }
        }
    }
}

/// A branching tree whose rows see different numbers of private keys: each row has the bits of the same path
/// as a chain, on every instruction set.
#[test]
fn a_row_of_a_tree_has_the_bits_of_its_path() {
    same_bits_of_a_path(f16::from_f32);
    same_bits_of_a_path(bf16::from_f32);
}

fn same_bits_of_a_path<E: Pool>(narrow: fn(f32) -> E) {
    let rows = 24;
    let parent = |row: usize| (row - 1) / 2;
    let mut masks = vec![1u64];
    for row in 1..rows {
        masks.push(masks[parent(row)] | 1 << row);
    }
    for (len, group, head_dim) in [
        (30, 3, 64),
        (CHUNK + 22, 3, 64),
        (CHUNK + 23, 3, 64),
        (CHUNK + 25, 2, 40),
        (CHUNK + 40, 8, 40),
        (300, 1, 128),
    ] {
        for form in forms().into_iter().chain([Form::default()]) {
            let case = Case::new(len, rows, group, head_dim, narrow).with(form);
            for (isa, threads) in Isa::available().flat_map(|isa| [(isa, 1), (isa, 16)]) {
                let like = Case::<E>::first_like(isa);
                let want = bits(case.run(like, 1, 0..rows, Some(&masks)));
                assert!(bits(case.run(isa, threads, 0..rows, Some(&masks))) == want);
                // The first rows alone, few of which read keys and values without a copy.
                for rows in 1..4 {
                    let few = bits(case.run(isa, threads, 0..rows, Some(&masks[..rows])));
                    assert!(few == want[..rows * case.row_floats()], "{rows} rows");
                }
                // Rows of the first path alone: 0, 1, 3, 7, 15. Row 1 is the second of a chain of two.
                let chain = bits(case.run(isa, threads, 0..2, None));
                assert!(
                    chain == want[..2 * case.row_floats()],
                    "{isa:?}, {:?}",
                    case.form
                );
            }
        }
    }
}

/// The rows of a block see one another, before and after them, also across the border of a chunk.
#[test]
fn rows_see_later_rows() {
    see_later_rows(f16::from_f32);
    see_later_rows(bf16::from_f32);
}

fn see_later_rows<E: Pool>(narrow: fn(f32) -> E) {
    for (len, rows, group) in [
        (9, 9, 1),
        (40, 16, 3),
        (CHUNK + 5, 16, 3),
        (CHUNK + 60, 64, 8),
        (CHUNK - 1, 64, 2),
    ] {
        let masks = vec![u64::MAX >> (64 - rows); rows];
        for (isa, window) in Isa::available().flat_map(|isa| [(isa, None), (isa, Some(7))]) {
            let form = Form {
                window,
                ..Form::default()
            };
            let case = Case::new(len, rows, group, 64, narrow).with(form);
            let one = case.run(isa, 1, 0..rows, Some(&masks));
            assert_eq!(one, case.run(isa, 16, 0..rows, Some(&masks)));
            let heads = case.dims.heads;
            for (i, got) in one.chunks(64).enumerate() {
                // A window ends at the row's own position, and hides nothing after it.
                let position = len - rows + i / heads;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let want = case.reference_of(first..len, i / heads, i % heads);
                let off = got
                    .iter()
                    .zip(want)
                    .map(|(got, want)| f64::from(*got) - want);
                let worst = off.fold(0f64, |worst, off| worst.max(off.abs()));
                assert!(
                    worst < case.limit(isa),
                    "{isa:?}, {rows} rows of {len}: {worst}"
                );
            }
        }
    }
}

/// What a row does not see changes nothing, whatever it is: the next token's value may be infinite.
#[test]
fn hidden_values_do_not_matter() {
    ignore_hidden_values(|x| x);
    ignore_hidden_values(f16::from_f32);
    ignore_hidden_values(bf16::from_f32);
}

fn ignore_hidden_values<E: Pool>(narrow: fn(f32) -> E) {
    for (len, rows, window) in [
        (20, 4, None),
        (21, 4, None),
        (41, 8, Some(4)),
        (40, 8, Some(5)),
    ] {
        let form = Form {
            window,
            ..Form::default()
        };
        let case = || Case::new(len, rows, 3, 64, narrow).with(form.clone());
        let mut broken = case();
        let slot = |position: usize| {
            broken.blocks[position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE
        };
        let width = broken.dims.kv_heads * broken.dims.head_dim;
        // The last token, and one before the window of the last row but one.
        let hidden = window.map(|window| len - 2 - window);
        for slot in [Some(len - 1), hidden]
            .into_iter()
            .flatten()
            .map(slot)
            .collect::<Vec<_>>()
        {
            broken.v[slot * width..][..width].fill(narrow(f32::INFINITY));
        }
        let row = (rows - 2) * broken.row_floats()..(rows - 1) * broken.row_floats();
        for isa in Isa::available() {
            let want = bits(case().run(isa, 1, 0..rows, None));
            let got = bits(broken.run(isa, 1, 0..rows, None));
            assert_eq!(got[row.clone()], want[row.clone()], "{isa:?}, {len} keys");
        }
    }
}

/// With scores far apart, all but a few weights vanish, in the first or the last chunk.
#[test]
fn large_scores_stay_finite() {
    for isa in Isa::available() {
        let mut case = Case::new(3 * CHUNK, 4, 3, 64, |x| x);
        for q in &mut case.q {
            *q *= 100.0;
        }
        let got = case.run(isa, 2, 0..4, None);
        for (i, got) in got.chunks(64).enumerate() {
            let want = case.reference(i / 6, i % 6);
            assert!(
                got.iter()
                    .zip(want)
                    .all(|(got, want)| (f64::from(*got) - want).abs() < 1e-3)
            );
        }
    }
}

/// As they are where queries, keys and values have one product.
#[test]
fn rows_of_queries_may_be_parts_of_longer_ones() {
    let cpu = candle_core::Device::Cpu;
    let tensor = |dims: (usize, usize, usize)| Tensor::randn(0f32, 1., dims, &cpu).unwrap();
    let (all, k, v) = (tensor((6, 7, 16)), tensor((8, 2, 16)), tensor((8, 2, 16)));
    let spans = [Span {
        rows: 0..6,
        context: 2,
        blocks: vec![0],
        tree: None,
    }];
    let run = |q: &Tensor| {
        let batch = AttentionBatch::new(&spans, 8, 8).unwrap();
        let out = paged_attention(q, &k, &v, &batch, AttentionParams::scaled(0.3))?;
        out.flatten_all()?.to_vec1::<f32>()
    };
    let part = all.narrow(1, 1, 4).unwrap();
    let alone = run(&part.contiguous().unwrap()).unwrap();
    assert_eq!(run(&part).unwrap(), alone);
    // Not the rows themselves.
    run(&all.narrow(2, 0, 8).unwrap()).unwrap_err();
    let turned = tensor((4, 6, 16)).transpose(0, 1).unwrap();
    run(&turned).unwrap_err();
}
