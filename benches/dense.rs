//! Products with unquantized weights, compared with candle's own, by shape, dtype and rows; those of FP8 with ours of bf16.
//!
//! The two are run alternately, so that they differ in what they do and not in when they were measured,
//! and neither finds its weights in a near cache.

use candle_core::{DType, Device, Tensor};
use criterion::{Bencher, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use foretoken::kernels::dense::{DenseMatrix, Float8};
use foretoken::kernels::matmul::CpuMatrix;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// `[outputs, inputs]` of Llama-3.2-1B: o, and gate or up.
const SHAPES: [(usize, usize); 2] = [(2048, 2048), (8192, 2048)];
const ROWS: [usize; 5] = [1, 4, 8, 64, 256];

/// The time of `timed`, with a run of `other` before each.
fn in_turns(b: &mut Bencher<'_>, timed: impl Fn() -> Tensor, other: impl Fn() -> Tensor) {
    b.iter_custom(|rounds| {
        let mut total = Duration::ZERO;
        for _ in 0..rounds {
            black_box(other());
            let start = Instant::now();
            black_box(timed());
            total += start.elapsed();
        }
        total
    });
}

fn products(c: &mut Criterion) {
    for (outputs, inputs) in SHAPES {
        for dtype in [DType::F32, DType::BF16] {
            let weight = Tensor::randn(0f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
            let weight = weight.to_dtype(dtype).unwrap();
            let matrix = DenseMatrix::new(&weight).unwrap();
            let name = format!("{outputs}x{inputs}-{}", dtype.as_str());
            let mut group = c.benchmark_group(name);
            let bytes = outputs * inputs * dtype.size_in_bytes();
            group.throughput(Throughput::Bytes(bytes as u64));
            for rows in ROWS {
                let x = Tensor::randn(0f32, 1., (rows, inputs), &Device::Cpu).unwrap();
                // candle needs both in one dtype.
                let same = x.to_dtype(dtype).unwrap();
                let ours = || matrix.matmul(&x).unwrap();
                let candle = || same.matmul(&weight.t().unwrap()).unwrap();
                group.bench_function(BenchmarkId::new("ours", rows), |b| {
                    in_turns(b, ours, candle);
                });
                group.bench_function(BenchmarkId::new("candle", rows), |b| {
                    in_turns(b, candle, ours);
                });
            }
        }
    }
}

/// FP8 with a scale for each 128 by 128 weights.
fn float8(c: &mut Criterion) {
    for (outputs, inputs) in SHAPES {
        let numbers: Vec<u8> = (0..outputs * inputs)
            .map(|i| (i * 37 % 120) as u8)
            .collect();
        let scales = vec![0.01; outputs.div_ceil(128) * inputs.div_ceil(128)];
        let matrix = DenseMatrix::of_float8(&Float8 {
            shape: (outputs, inputs),
            numbers: &numbers,
            scales: &scales,
            block: (128, 128),
        });
        let matrix = matrix.unwrap();
        let weight = Tensor::randn(0f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
        let other = DenseMatrix::new(&weight.to_dtype(DType::BF16).unwrap()).unwrap();
        let mut group = c.benchmark_group(format!("{outputs}x{inputs}-fp8"));
        for rows in ROWS {
            let x = Tensor::randn(0f32, 1., (rows, inputs), &Device::Cpu).unwrap();
            let (fp8, bf16) = (|| matrix.matmul(&x).unwrap(), || other.matmul(&x).unwrap());
            group.bench_function(BenchmarkId::new("fp8", rows), |b| in_turns(b, fp8, bf16));
            group.bench_function(BenchmarkId::new("bf16", rows), |b| in_turns(b, bf16, fp8));
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .sample_size(10);
    targets = products, float8
}
criterion_main!(benches);
