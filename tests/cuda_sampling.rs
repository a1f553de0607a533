//! On a GPU, real or emulated (`scripts/emulated-gpu.sh`): distributions, tokens and verdicts are those of
//! the CPU.

use candle_core::{Device, Tensor};
use foretoken::kernels;
use foretoken::kernels::sample::{
    Accepted, Chain, Node, ProcessedLogits, TokenChoice, process_logits,
};
use foretoken::sampling::{Dist, Purpose, Rng, Sampler, SamplingParams, distribution, mix};
use foretoken::spec::{Draft, logits_params, row_adjustments, verify};

const VOCAB: usize = 3000;
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

fn gpu() -> Device {
    kernels::device("cuda").expect("a GPU, or scripts/emulated-gpu.sh")
}

/// Logits of a peaked distribution, which depend only on `seed`.
fn logits(seed: u64) -> Vec<f32> {
    let uniform = |i: usize| (mix(mix(seed) ^ i as u64) >> 40) as f32 / (1 << 24) as f32;
    (0..VOCAB).map(|i| 10. * uniform(i).powi(3) - 2.).collect()
}

/// All kinds of requests.
fn requests() -> Vec<SamplingParams> {
    let plain = SamplingParams::default();
    let mut all = vec![
        plain.clone(),
        SamplingParams {
            temperature: 0.,
            ..plain.clone()
        },
        SamplingParams {
            temperature: 0.6,
            top_p: 0.9,
            ..plain.clone()
        },
        SamplingParams {
            top_k: 50,
            top_p: 0.7,
            ..plain.clone()
        },
        SamplingParams {
            temperature: 1.5,
            min_p: 0.1,
            ..plain.clone()
        },
        SamplingParams {
            repetition_penalty: 1.4,
            presence_penalty: 0.3,
            frequency_penalty: 0.2,
            ..plain.clone()
        },
        SamplingParams {
            temperature: 0.,
            // The last id does not exist.
            logit_bias: vec![(17, 20.), (5, -100.), (17, 1.), (9999, 50.)],
            ..plain.clone()
        },
        SamplingParams {
            min_tokens: 9,
            stop_token_ids: vec![17, 2999],
            logit_bias: vec![(17, 30.)],
            ..plain
        },
    ];
    for (seed, params) in all.iter_mut().enumerate() {
        params.seed = seed as u64;
    }
    all
}

/// A row: the sampler of its sequence, and the tokens before it.
struct Row {
    logits: Vec<f32>,
    sampler: Sampler,
    uniform: f64,
}

impl Row {
    fn dist(&self) -> Dist {
        distribution(&self.logits, &self.sampler).unwrap()
    }
}

fn process_on(device: &Device, rows: &[Row], best: usize) -> ProcessedLogits {
    let all: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
    let logits = Tensor::from_vec(all, (rows.len(), VOCAB), device).unwrap();
    let numbered = || (0u32..).zip(rows);
    let params = numbered().map(|(i, row)| {
        let choice = TokenChoice::Quantile(row.uniform);
        logits_params(i, row.sampler.params(), choice)
    });
    let adjustments = numbered().flat_map(|(i, row)| row_adjustments(i, &row.sampler));
    process_logits(&logits, params.collect(), adjustments.collect(), best).unwrap()
}

#[test]
fn tokens_are_those_of_the_cpu() {
    let gpu = gpu();
    let requests = requests();
    let rows: Vec<Row> = (0..64)
        .map(|i| {
            let params = &requests[i % requests.len()];
            let mut sampler = Sampler::new(params.clone(), &PROMPT);
            [9, 9, 2, 6].into_iter().for_each(|id| sampler.push(id));
            Row {
                logits: logits(i as u64),
                sampler,
                uniform: Rng {
                    seed: params.seed,
                    position: i,
                }
                .uniform(0, Purpose::Draft, 0),
            }
        })
        .collect();
    let processed = process_on(&gpu, &rows, 1);
    let best = processed.read().unwrap();
    for (i, row) in rows.iter().enumerate() {
        let (token, want) = (best.token(i), row.dist());
        assert_eq!(
            token,
            want.sample(row.uniform),
            "row {i}: {:?}",
            row.sampler.params()
        );
        match (want, processed.row(i)) {
            (Dist::Point(_), None) => (),
            (Dist::Dense(want), Some(got)) => {
                for (id, (want, got)) in want.iter().zip(got.read().unwrap()).enumerate() {
                    let off = (want - got).abs();
                    assert!(off <= 1e-6 * want, "row {i}, id {id}: {got}, not {want}");
                }
            }
            (want, got) => panic!("row {i}: {got:?}, not {want:?}"),
        }
    }
}

#[test]
fn verdicts_are_those_of_the_cpu() {
    let gpu = gpu();
    let requests = requests();
    let (length, mut lengths) = (3, [0; 4]);
    for round in 0..8 {
        let mut rows = Vec::new();
        let mut drafted = Vec::new();
        // The draft's logits are almost the target's.
        for (i, params) in requests.iter().enumerate() {
            let rng = Rng {
                seed: params.seed,
                position: 100 * round,
            };
            let mut sampler = Sampler::new(params.clone(), &PROMPT);
            for at in 0..=length {
                let target = logits((round * 100 + i * 10 + at) as u64);
                let noise = logits(mix((round * 100 + i * 10 + at) as u64));
                let near = target.iter().zip(noise).map(|(x, y)| x + 0.1 * y);
                let draft = Row {
                    logits: near.collect(),
                    sampler: sampler.clone(),
                    uniform: rng.uniform(at, Purpose::Draft, 0),
                };
                rows.push(Row {
                    logits: target,
                    sampler: sampler.clone(),
                    uniform: rng.uniform(at, Purpose::Sample, 0),
                });
                sampler.push(draft.dist().sample(draft.uniform));
                drafted.push(draft);
            }
        }
        let q = process_on(&gpu, &drafted, 1);
        let best = q.read().unwrap();
        let tokens: Vec<u32> = (0..drafted.len()).map(|row| best.token(row)).collect();
        let dists: Vec<_> = (0..drafted.len()).map(|i| q.row(i)).collect();
        let p = process_on(&gpu, &rows, 0);
        for guessed in [false, true] {
            let mut chains = Vec::new();
            let mut want = Vec::new();
            for (i, params) in requests.iter().enumerate() {
                let first = i * (length + 1);
                let rng = Rng {
                    seed: params.seed,
                    position: 100 * round,
                };
                let mut draft = Draft::default();
                let mut nodes = Vec::new();
                for at in 0..length {
                    let (token, row) = (tokens[first + at], first + at);
                    let q = match guessed {
                        true => Dist::Point(token),
                        false => drafted[row].dist(),
                    };
                    draft.push(token, q);
                    nodes.push(Node {
                        token,
                        uniform: rng.uniform(at, Purpose::Accept, 0),
                        q: dists[row].as_ref().filter(|_| !guessed),
                    });
                }
                chains.push(Chain {
                    row: first,
                    nodes,
                    synthetic_acceptance: None,
                });
                let target = |path: &[usize]| Ok(rows[first + path.len()].dist());
                let verdict = verify(&draft, target, &rng).unwrap();
                lengths[verdict.path.len()] += 1;
                want.push(Accepted {
                    len: verdict.path.len() as u32,
                    next: verdict.next,
                });
            }
            assert_eq!(p.verify(&chains).unwrap(), want, "round {round}, {guessed}");
        }
    }
    println!("accepted: {lengths:?}");
    assert!(lengths.iter().all(|&n| n > 0), "{lengths:?}");
}
