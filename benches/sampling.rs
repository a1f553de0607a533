//! The work per generated token besides the forward: logits to a distribution, and the verification of a
//! draft, with the vocabulary size of Llama 3.

use criterion::{Criterion, criterion_group, criterion_main};
use foretoken::sampling::{Dist, NoToken, Rng, Sampler, SamplingParams, distribution, mix};
use foretoken::spec::{Draft, Source, rejection};
use std::hint::black_box;

const VOCAB: u64 = 128_256;
const DRAFTED: u64 = 5;

/// Random logits with a few likely tokens, like a model's.
fn logits(seed: u64) -> Vec<f32> {
    let uniform = |i| ((mix(seed ^ mix(i)) >> 40) as f32 + 0.5) / (1 << 24) as f32;
    (0..VOCAB).map(|i| -4.0 * uniform(i).ln() - 8.0).collect()
}

fn sampling(c: &mut Criterion) {
    let logits = logits(1);
    let plain = SamplingParams::default();
    let kinds = [
        (
            "greedy",
            SamplingParams {
                temperature: 0.0,
                ..plain.clone()
            },
        ),
        (
            "temperature",
            SamplingParams {
                temperature: 0.8,
                ..plain.clone()
            },
        ),
        (
            "top-p",
            SamplingParams {
                top_p: 0.9,
                ..plain.clone()
            },
        ),
        ("top-k", SamplingParams { top_k: 40, ..plain }),
    ];
    let mut group = c.benchmark_group("distribution");
    for (name, params) in kinds {
        let sampler = Sampler::new(params, &[1, 2, 3]);
        group.bench_function(name, |b| {
            b.iter(|| distribution(black_box(&logits), &sampler));
        });
    }
    group.finish();
}

/// The next token's distribution, and pushing and truncating that token. The cost should be the same at
/// every length of the text.
fn penalties(c: &mut Criterion) {
    let logits = logits(1);
    let params = SamplingParams {
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        ..SamplingParams::default()
    };
    let mut group = c.benchmark_group("penalties");
    for len in [100, 4000] {
        let mut sampler = Sampler::new(params.clone(), &[1, 2, 3]);
        (0..len).for_each(|i| sampler.push((mix(i) % 2000) as u32));
        group.bench_function(format!("{len} tokens"), |b| {
            b.iter(|| {
                let dist = distribution(black_box(&logits), &sampler);
                sampler.push(7);
                sampler.truncate(len as usize);
                dist
            });
        });
    }
    group.finish();
}

fn verifying(c: &mut Criterion) {
    let params = SamplingParams::default();
    let sampler = Sampler::new(params, &[1]);
    let dist = |seed| -> Dist { distribution(&logits(seed), &sampler).expect("finite") };
    let target: Vec<Dist> = (0..=DRAFTED).map(dist).collect();
    let rng = Rng::at(1, 7);
    let mut draft = Draft::default();
    for (place, q) in target.iter().take(DRAFTED as usize).enumerate() {
        draft.push(q.sample(0.1 + place as f64 / 10.0), 0.5, Source::Model);
        draft.dists.push(q.clone().into());
    }
    c.bench_function("verify, all accepted", |b| {
        b.iter(|| rejection(black_box(&draft), after(&target), &rng));
    });
    let other: Vec<Dist> = (100..=100 + DRAFTED).map(dist).collect();
    c.bench_function("verify, another distribution", |b| {
        b.iter(|| rejection(black_box(&draft), after(&other), &rng));
    });
}

/// p by node: the first after no node, the next after node 0, and so on. The time includes copying it.
fn after(target: &[Dist]) -> impl Fn(&[usize]) -> Result<Dist, NoToken> + '_ {
    |path| Ok(target[path.last().map_or(0, |node| node + 1)].clone())
}

criterion_group!(benches, sampling, penalties, verifying);
criterion_main!(benches);
