//! Paged attention of one sequence or eight: decoding and verification (1 to 16 rows) after 256 and 1024 tokens,
//! and prompts. Reads from the cache (always the same pool), and from memory (so many pools
//! in turn that no cache holds them, like the layers of a model with weights in between).
//!
//! `FORETOKEN_BENCH_POOL` is the dtype of the pools: `f32`, `f16` or `bf16`. Queries are f32.

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use foretoken::kernels::{AttentionBatch, AttentionParams, Span, paged_attention};
use std::hint::black_box;

/// Name, heads, K/V heads, and width of a head.
const SHAPES: [(&str, usize, usize, usize); 2] =
    [("SmolLM2-135M", 9, 3, 64), ("Llama-3.2-1B", 32, 8, 64)];
/// Sequences, rows of each, and tokens before them.
const CALLS: [(usize, usize, usize); 12] = [
    (1, 1, 256),
    (1, 4, 256),
    (1, 8, 256),
    (1, 16, 256),
    (1, 1, 1024),
    (1, 4, 1024),
    (1, 8, 1024),
    (1, 16, 1024),
    (8, 1, 1024),
    (1, 256, 0),
    (1, 512, 0),
    (1, 2048, 0),
];
const BLOCK_SIZE: usize = 16;
/// Bytes of keys and values, more than any cache holds.
const MEMORY: usize = 200 << 20;

fn attention(c: &mut Criterion) {
    let dtype = match std::env::var("FORETOKEN_BENCH_POOL").as_deref() {
        Ok("f16") => DType::F16,
        Ok("bf16") => DType::BF16,
        _ => DType::F32,
    };
    for (name, heads, kv_heads, d) in SHAPES {
        let mut group = c.benchmark_group(format!("attention/{name}/{dtype:?}"));
        for (sequences, rows, context) in CALLS {
            let blocks = (context + rows).div_ceil(BLOCK_SIZE);
            let keys = sequences * blocks * BLOCK_SIZE;
            let dims = (keys, kv_heads, d);
            let bytes = 2 * keys * kv_heads * d * dtype.size_in_bytes();
            let tensor = |dims| Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
            let pool = tensor(dims).to_dtype(dtype).unwrap();
            let pools: Vec<Tensor> = (0..2 * MEMORY.div_ceil(bytes))
                .map(|_| pool.copy().unwrap())
                .collect();
            let q = tensor((sequences * rows, heads, d));
            // Blocks out of order, as in a pool that has been in use.
            let blocks: Vec<u32> = (0..(sequences * blocks) as u32).rev().collect();
            let blocks = blocks.chunks(blocks.len() / sequences).enumerate();
            let spans: Vec<Span> = blocks
                .map(|(i, blocks)| Span::causal(i * rows..(i + 1) * rows, context, blocks))
                .collect();
            let call = |pools: &[Tensor]| {
                let batch = AttentionBatch::new(&spans, BLOCK_SIZE, keys).unwrap();
                let out = paged_attention(
                    &q,
                    &pools[0],
                    &pools[1],
                    &batch,
                    AttentionParams::scaled(0.125),
                );
                black_box(out.unwrap());
            };
            let id =
                |place| BenchmarkId::new(place, format!("{sequences}x{rows}-rows-after-{context}"));
            group.bench_function(id("cache"), |b| b.iter(|| call(&pools[..2])));
            let mut next = pools.chunks(2).cycle();
            group.bench_function(id("memory"), |b| {
                b.iter(|| call(next.next().expect("the pools come in turn")));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(700))
        .sample_size(30);
    targets = attention
}
criterion_main!(benches);
