//! Products with quantized weights, by shape, block type and rows. Reads from the cache (always the same
//! matrix), and from memory (so many matrices in turn that no cache holds them).

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use foretoken::kernels::matmul::CpuMatrix;
use foretoken::kernels::quant::QuantMatrix;

/// `[outputs, inputs]` of SmolLM2-135M (q, k and v; o; gate and up; down) and Llama-3.2-1B (o).
const SHAPES: [(usize, usize); 5] = [
    (960, 576),
    (576, 576),
    (3072, 576),
    (576, 1536),
    (2048, 2048),
];
const TYPES: [GgmlDType; 4] = [
    GgmlDType::Q4_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q6K,
];
const ROWS: [usize; 5] = [1, 2, 4, 8, 64];
/// Bytes of weights, more than any cache holds.
const MEMORY: usize = 200 << 20;

fn products(c: &mut Criterion) {
    for (outputs, inputs) in SHAPES {
        for kind in TYPES {
            if !QuantMatrix::keeps(kind.into(), inputs) {
                continue;
            }
            let floats = Tensor::randn(0f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
            let blocks = QTensor::quantize(&floats, kind).unwrap();
            let data = blocks.data().unwrap();
            let matrix = || QuantMatrix::from_blocks(kind, &data, outputs, inputs).unwrap();
            let weights: Vec<QuantMatrix> = (0..MEMORY / data.len()).map(|_| matrix()).collect();
            let mut group = c.benchmark_group(format!("{outputs}x{inputs}-{kind:?}"));
            group.throughput(Throughput::Bytes(data.len() as u64));
            for rows in ROWS {
                let x = Tensor::randn(0f32, 1., (rows, inputs), &Device::Cpu).unwrap();
                group.bench_function(BenchmarkId::new("cache", rows), |b| {
                    b.iter(|| weights[0].matmul(&x).unwrap());
                });
                let mut next = weights.iter().cycle();
                group.bench_function(BenchmarkId::new("memory", rows), |b| {
                    b.iter(|| next.next().unwrap().matmul(&x).unwrap());
                });
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_secs(1))
        .sample_size(20);
    targets = products
}
criterion_main!(benches);
