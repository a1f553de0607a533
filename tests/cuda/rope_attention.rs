//! Attention that rotates heads and writes keys and values itself: the bits of the kernels one after the other.

use super::kv_cache_dtype::written_to;
use super::quantized::{noise, values};
use super::{BLOCK_SIZE, BLOCKS, gpu};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::{
    AttentionBatch, AttentionParams, HeadNorms, Pools, Slots, Span, ValueHeads, ValueNorm,
    paged_attention, rope_attention, rope_kv_write,
};

const KV_HEADS: usize = 2;

/// What a layer may have.
#[derive(Debug, Clone, Copy, Default)]
struct Case {
    heads: usize,
    dim: usize,
    /// Pairs of a head that are rotated.
    half: usize,
    /// Of each head, of all heads together, or of rotated heads.
    norms: Option<(bool, bool)>,
    values_are_keys: bool,
    norms_values: bool,
    /// Heads before the queries that are none of attention's.
    gates: usize,
    is_windowed: bool,
    /// Whether rows that are no tree see later ones, too.
    is_bidirectional: bool,
    /// The dtype of pools of 8 bits, and the elements of a head in them; `None` = that of all else.
    rounded: Option<(DType, usize)>,
}

/// Sequences: rows, tokens before them, and whether the rows are a tree.
type Parts<'a> = &'a [(usize, usize, bool)];

fn spans(parts: Parts<'_>) -> (Vec<Span>, Vec<u32>) {
    let table: Vec<u32> = (0..BLOCKS as u32).map(|i| i * 29 % BLOCKS as u32).collect();
    let (mut spans, mut slots, mut first, mut used) = (Vec::new(), Vec::new(), 0, 0);
    for &(rows, context, is_tree) in parts {
        let count = (rows + context).div_ceil(BLOCK_SIZE);
        let blocks = table[used..used + count].to_vec();
        used += count;
        for place in context..context + rows {
            let block = blocks[place / BLOCK_SIZE] as usize;
            slots.push((block * BLOCK_SIZE + place % BLOCK_SIZE) as u32);
        }
        let tree = is_tree.then(|| {
            let mut masks = vec![1u64];
            for node in 1..rows {
                masks.push(masks[(node - 1) / 2] | 1 << node);
            }
            masks
        });
        spans.push(Span {
            rows: first..first + rows,
            context,
            blocks,
            tree,
        });
        first += rows;
    }
    (spans, slots)
}

fn norms(case: Case, dtype: DType, gpu: &Device) -> Option<HeadNorms> {
    case.norms.map(|(whole, after_rotation)| {
        let weight = |heads: usize| {
            let count = if whole { heads * case.dim } else { case.dim };
            noise(1, count, dtype, gpu).flatten_all().unwrap()
        };
        HeadNorms {
            q: weight(case.heads),
            k: weight(KV_HEADS),
            eps: 1e-5,
            after_rotation,
        }
    })
}

/// Attention and the pools after it, by one kernel and by several.
fn both(case: Case, parts: Parts<'_>, dtype: DType, gpu: &Device) -> [Vec<Vec<Vec<f32>>>; 2] {
    let (spans, slots) = spans(parts);
    let (rows, pool) = (slots.len(), BLOCKS * BLOCK_SIZE);
    let slots = Slots::new(&slots, pool, gpu).unwrap();
    let stored = case.heads + KV_HEADS * if case.values_are_keys { 1 } else { 2 };
    let all = noise(rows, (case.gates + stored) * case.dim, dtype, gpu);
    let angles = (case.half > 0).then(|| [(); 2].map(|()| noise(rows, case.half, dtype, gpu)));
    let angles = angles.as_ref().map(|[cos, sin]| (cos, sin));
    let norms = norms(case, dtype, gpu);
    let values_of = ValueHeads {
        are_keys: case.values_are_keys,
        norm: case.norms_values.then(|| ValueNorm {
            ones: Tensor::ones(case.dim, dtype, gpu).unwrap(),
            eps: 1e-6,
        }),
    };
    let sinks = Tensor::arange(0f32, case.heads as f32, gpu).unwrap();
    let params = AttentionParams {
        window: case.is_windowed.then_some(70),
        sinks: case.is_windowed.then_some(&sinks),
        bidirectional: case.is_bidirectional,
        ..AttentionParams::scaled(0.1)
    };
    let blocks = spans.iter().flat_map(|span| &span.blocks);
    let size = BLOCK_SIZE as u32;
    let places: Vec<u32> = blocks
        .flat_map(|block| block * size..(block + 1) * size)
        .collect();
    let old = noise(places.len(), (1 + 2 * KV_HEADS) * case.dim, dtype, gpu);
    let old = old.reshape((places.len(), (), case.dim)).unwrap();
    let form = case.rounded.unwrap_or((dtype, case.dim));
    let old = written_to(form, &old, &places, pool, gpu);
    [true, false].map(|at_once| {
        let [k, v] = [0, 1].map(|i| old[i].copy().unwrap());
        let qkv = all.copy().unwrap().reshape((rows, (), case.dim)).unwrap();
        let qkv = qkv.narrow(1, case.gates, stored).unwrap();
        let pools = Pools {
            k: &k,
            v: &v,
            slots: &slots,
        };
        let batch = AttentionBatch::new(&spans, BLOCK_SIZE, pool).unwrap();
        let (heads, norms) = (case.heads, norms.as_ref());
        let out = if at_once {
            rope_attention(
                &qkv,
                heads,
                (angles, norms),
                &values_of,
                pools,
                &batch,
                params,
            )
        } else {
            let q = rope_kv_write(&qkv, heads, angles, norms, &values_of, pools);
            paged_attention(&q.unwrap(), &k, &v, &batch, params)
        };
        [out.unwrap(), k, v]
            .map(|t| values(&t.flatten_from(1).unwrap()))
            .into()
    })
}

#[test]
fn one_kernel_gives_the_bits_of_several() {
    let gpu = gpu();
    let plain = Case {
        heads: 6,
        dim: 64,
        half: 32,
        ..Case::default()
    };
    let cases = [
        plain,
        Case {
            dim: 128,
            half: 64,
            norms: Some((false, false)),
            ..plain
        },
        Case {
            dim: 80,
            half: 10,
            norms: Some((true, false)),
            is_windowed: true,
            ..plain
        },
        Case {
            norms: Some((false, true)),
            gates: 6,
            ..plain
        },
        Case {
            heads: 2,
            half: 0,
            values_are_keys: true,
            norms_values: true,
            ..plain
        },
        Case {
            is_bidirectional: true,
            ..plain
        },
        Case {
            rounded: Some((DType::U8, 68)),
            is_windowed: true,
            ..plain
        },
        Case {
            dim: 128,
            half: 64,
            norms: Some((false, false)),
            rounded: Some((DType::U8, 136)),
            ..plain
        },
        Case {
            dim: 96,
            half: 48,
            values_are_keys: true,
            norms_values: true,
            rounded: Some((DType::U8, 102)),
            ..plain
        },
        Case {
            norms: Some((false, true)),
            rounded: Some((DType::F8E4M3, 64)),
            ..plain
        },
        Case {
            dim: 128,
            half: 64,
            is_windowed: true,
            is_bidirectional: true,
            rounded: Some((DType::F8E4M3, 128)),
            ..plain
        },
        Case {
            dim: 80,
            half: 10,
            norms: Some((true, false)),
            rounded: Some((DType::F8E4M3, 80)),
            ..plain
        },
    ];
    let sequences: [Parts<'_>; 4] = [
        &[(1, 300, false)],
        &[(1, 0, false), (3, 20, false), (2, 127, false)],
        // Trees across a border of chunks, and with two tiles.
        &[(7, 60, true), (1, 63, false), (8, 130, true)],
        &[(16, 120, false)],
    ];
    for case in cases {
        for parts in sequences {
            for dtype in [DType::F16, DType::BF16] {
                let [got, want] = both(case, parts, dtype, &gpu);
                assert!(got == want, "{case:?}, {parts:?}, {dtype:?}");
            }
        }
    }
}
