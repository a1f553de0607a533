//! On a GPU, real or emulated (`scripts/emulated-gpu.sh`): distributions, tokens and verdicts are those of
//! the CPU.

use candle_core::{Device, Tensor};
use foretoken::kernels;
use foretoken::kernels::sample::{
    Accepted, Chain, Draws, LogitsParams, MAX_BEST, NO_TOKEN, Node, ProcessedLogits, RowAdjustment,
    TokenChoice, best_logits, process_logits, top_logits,
};
use foretoken::sampling::{
    Dist, NoToken, Purpose, Rng, Sampler, SamplingParams, best, choose, distribution, guess, mix,
};
use foretoken::spec::{Draft, Source, logits_params, rejection, row_adjustments};

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
        // Fewer tokens than a row may have, and more than there are.
        SamplingParams {
            top_k: 3,
            ..plain.clone()
        },
        SamplingParams {
            temperature: 0.3,
            top_k: 99_999,
            top_p: 0.999,
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
    choice: TokenChoice,
}

impl Row {
    fn dist(&self) -> Dist {
        distribution(&self.logits, &self.sampler).unwrap()
    }

    /// The token of a row that is drawn by a quantile.
    fn draw(&self) -> u32 {
        match self.choice {
            TokenChoice::Quantile(uniform) => self.dist().sample(uniform),
            TokenChoice::GumbelMax(_) => panic!("a race has no quantile"),
        }
    }
}

fn process_on(device: &Device, rows: &[Row], best: usize) -> ProcessedLogits {
    let logits = logits_on(device, rows);
    process_logits(&logits, params_of(rows), adjustments_of(rows), best).unwrap()
}

fn logits_on(device: &Device, rows: &[Row]) -> Tensor {
    let all: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
    Tensor::from_vec(all, (rows.len(), VOCAB), device).unwrap()
}

fn params_of(rows: &[Row]) -> Vec<LogitsParams> {
    let numbered = (0u32..).zip(rows);
    let params = numbered.map(|(i, row)| logits_params(i, row.sampler.params(), row.choice));
    params.collect()
}

fn adjustments_of(rows: &[Row]) -> Vec<RowAdjustment> {
    let numbered = (0u32..).zip(rows);
    let adjustments = numbered.flat_map(|(i, row)| row_adjustments(i, &row.sampler));
    adjustments.collect()
}

/// `count` rows of all kinds of requests in turn, after a few output tokens.
fn rows(count: usize, choice: impl Fn(Rng) -> TokenChoice) -> Vec<Row> {
    let requests = requests();
    let row = |i: usize| {
        let params = &requests[i % requests.len()];
        let mut sampler = Sampler::new(params.clone(), &PROMPT);
        [9, 9, 2, 6].into_iter().for_each(|id| sampler.push(id));
        let seed = params.seed;
        Row {
            logits: logits(i as u64),
            sampler,
            choice: choice(Rng { seed, position: i }),
        }
    };
    (0..count).map(row).collect()
}

#[test]
fn tokens_are_those_of_the_cpu() {
    let gpu = gpu();
    let rows = rows(64, |rng| {
        TokenChoice::Quantile(rng.uniform(0, Purpose::Draft, 0))
    });
    let processed = process_on(&gpu, &rows, 1);
    let best = processed.read().unwrap();
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(
            best.token(i),
            row.draw(),
            "row {i}: {:?}",
            row.sampler.params()
        );
        match (row.dist(), processed.row(i)) {
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

/// Steps whose parameters are sent together have the tokens, distributions and verdicts that they have alone.
#[test]
fn draws_of_several_steps_are_those_of_each() {
    let gpu = gpu();
    let is_quantile = |i: usize| i.is_multiple_of(3);
    let all = rows(40, |rng| match is_quantile(rng.position) {
        true => TokenChoice::Quantile(rng.uniform(0, Purpose::Draft, 0)),
        false => TokenChoice::GumbelMax(rng.key(0)),
    });
    let steps = [0..20, 21..22, 22..40];
    for best in [0, 1] {
        let params = steps.iter().map(|own| params_of(&all[own.clone()]));
        let mut draws = Draws::new(params.collect(), best, &gpu).unwrap();
        let mut want = Vec::new();
        for (step, own) in steps.iter().enumerate() {
            let rows = &all[own.clone()];
            let alone = process_on(&gpu, rows, best);
            // The second step writes its ids to the begin of other memory.
            let memory = Tensor::full(7777u32, rows.len() + 2, &gpu).unwrap();
            let place = (step == 1).then_some(&memory);
            let logits = logits_on(&gpu, rows);
            let drawn = draws.draw(&logits, adjustments_of(rows), place).unwrap();
            let ids = |of: &ProcessedLogits| of.ids().to_vec1::<u32>().unwrap();
            assert_eq!(ids(&drawn), ids(&alone), "step {step}");
            let memory: Vec<u32> = memory.to_vec1().unwrap();
            assert_eq!(memory.starts_with(&ids(&alone)), step == 1);
            assert_eq!(memory[rows.len()..], [7777; 2], "step {step}");
            let quantiles = own.clone().filter(|&i| is_quantile(i));
            let chain = |row| Chain {
                row: row - own.start,
                nodes: Vec::new(),
                synthetic_acceptance: None,
            };
            let chains: Vec<Chain<'_>> = quantiles.map(chain).collect();
            let verdicts = |of: &ProcessedLogits| of.verify(&chains).unwrap();
            assert_eq!(verdicts(&drawn), verdicts(&alone), "step {step}");
            want.push(alone.read().unwrap());
        }
        assert_eq!(draws.read().unwrap(), want);
        let logits = logits_on(&gpu, &all);
        assert!(draws.draw(&logits, Vec::new(), None).is_err());
    }
}

/// Compares the tokens of rows that are races with those of the CPU, each with its siblings.
fn expect_races(gpu: &Device, rows: &[Row], siblings: usize) {
    let processed = process_on(gpu, rows, siblings);
    let best = processed.read().unwrap();
    let ids: Vec<u32> = processed.ids().to_vec1().unwrap();
    for (i, row) in rows.iter().enumerate() {
        let TokenChoice::GumbelMax(key) = row.choice else {
            panic!("all rows are races");
        };
        let what = format!("row {i} of {siblings}: {:?}", row.sampler.params());
        let drawn = choose(&row.logits, &row.sampler, key).unwrap();
        assert_eq!((best.token(i), ids[i]), (drawn, drawn), "{what}");
        assert!(processed.row(i).is_none(), "{what}");
        let got: Vec<(u32, f32)> = best.of_row(i).collect();
        if siblings == 0 {
            assert_eq!(got, [(drawn, 0.)], "{what}");
            continue;
        }
        let want = guess(&row.logits, &row.sampler, key, siblings).unwrap();
        assert_eq!(got.len(), want.len(), "{what}");
        let dist = distribution(&row.logits, &row.sampler).unwrap();
        for ((token, prob), want) in got.into_iter().zip(want) {
            assert_eq!(token, want.token, "{what}");
            // The GPU has the best tokens alone, so it tells the probability before the noise.
            let want = match &dist {
                Dist::Point(_) => want.prob,
                dist => dist.prob(token) as f32,
            };
            let off = (prob - want).abs();
            assert!(off <= 1e-6 * want, "{what}: {prob}, not {want:?}");
        }
    }
}

/// The coupled draw of targets and drafts, alone and with siblings.
#[test]
fn races_are_those_of_the_cpu() {
    let gpu = gpu();
    for (count, siblings) in [(200, 0), (60, 1), (60, 3), (60, MAX_BEST)] {
        let rows = rows(count, |rng| TokenChoice::GumbelMax(rng.key(siblings)));
        expect_races(&gpu, &rows, siblings);
    }
}

/// A launch needs other kernels if all its rows are of one kind.
#[test]
fn rows_of_one_kind_are_those_of_the_cpu() {
    let gpu = gpu();
    for siblings in [0, 1, 2] {
        let rows = rows(requests().len(), |rng| {
            TokenChoice::GumbelMax(rng.key(siblings))
        });
        for row in rows.chunks(1) {
            expect_races(&gpu, row, siblings);
        }
    }
}

/// A request that is decided on the host, because it asks for log-probabilities or has a grammar, draws the
/// token that it would draw on the GPU, even where top-p ends between two equal weights, and a sum of floats
/// would depend on its order.
#[test]
fn top_p_ends_at_the_same_token_on_host_and_gpu() {
    let gpu = gpu();
    let row = |seed: u64| {
        let params = SamplingParams {
            top_p: 0.5,
            seed,
            ..SamplingParams::default()
        };
        let mut logits = vec![-31.2; VOCAB];
        [logits[70], logits[2070]] = [0.; 2];
        let rng = Rng { seed, position: 9 };
        Row {
            logits,
            sampler: Sampler::new(params, &PROMPT),
            choice: TokenChoice::GumbelMax(rng.key(0)),
        }
    };
    let rows: Vec<Row> = (0..40).map(row).collect();
    let best = process_on(&gpu, &rows, 0).read().unwrap();
    for (i, row) in rows.iter().enumerate() {
        let TokenChoice::GumbelMax(key) = row.choice else {
            panic!("all rows are races");
        };
        let drawn = choose(&row.logits, &row.sampler, key).unwrap();
        assert_eq!(best.token(i), drawn, "row {i}");
    }
}

/// A distribution belongs to its own row, and a verdict needs it.
#[test]
fn races_and_quantiles_share_a_launch() {
    let gpu = gpu();
    let mut rows = rows(6, |rng| TokenChoice::GumbelMax(rng.key(0)));
    for row in rows.iter_mut().step_by(2) {
        row.choice = TokenChoice::Quantile(0.3);
    }
    let processed = process_on(&gpu, &rows, 1);
    let best = processed.read().unwrap();
    for (i, row) in rows.iter().enumerate() {
        let want = match row.choice {
            TokenChoice::GumbelMax(key) => choose(&row.logits, &row.sampler, key).unwrap(),
            TokenChoice::Quantile(_) => row.draw(),
        };
        assert_eq!(best.token(i), want, "row {i}");
    }
    let Some(got) = processed.row(2) else {
        panic!("row 2 is sampled from its distribution");
    };
    let prob = f64::from(got.read().unwrap()[best.token(2) as usize]);
    assert!((prob - rows[2].dist().prob(best.token(2))).abs() < 1e-6);
    let chain = |row| Chain {
        row,
        nodes: Vec::new(),
        synthetic_acceptance: None,
    };
    assert_eq!(
        processed.verify(&[chain(2)]).unwrap()[0].next,
        best.token(2)
    );
    processed.verify(&[chain(3)]).unwrap_err();
}

/// A row without a token does not affect others.
#[test]
fn rows_that_are_not_finite_have_no_token() {
    let gpu = gpu();
    let mut rows = rows(30, |rng| TokenChoice::GumbelMax(rng.key(0)));
    for (i, row) in rows.iter_mut().enumerate().step_by(3) {
        row.logits[i * 90] = [f32::NAN, f32::INFINITY][i % 2];
    }
    for siblings in [0, 4] {
        let processed = process_on(&gpu, &rows, siblings);
        let best = processed.read().unwrap();
        let ids: Vec<u32> = processed.ids().to_vec1().unwrap();
        for (i, row) in rows.iter().enumerate() {
            let TokenChoice::GumbelMax(key) = row.choice else {
                panic!("all rows are races");
            };
            match choose(&row.logits, &row.sampler, key) {
                Ok(token) => assert_eq!(best.token(i), token, "row {i}"),
                Err(NoToken::NotFinite) => {
                    assert_eq!((best.token(i), ids[i]), (NO_TOKEN, 0), "row {i}");
                    assert_eq!(best.of_row(i).count(), 0, "row {i}");
                }
                Err(error) => panic!("row {i}: {error}"),
            }
        }
    }
}

#[test]
fn the_best_logits_are_those_of_the_cpu() {
    let gpu = gpu();
    let mut rows: Vec<Vec<f32>> = (0..20).map(logits).collect();
    for row in &mut rows[10..] {
        row.iter_mut().for_each(|x| *x = x.round());
    }
    let all = Tensor::from_vec(rows.concat(), (rows.len(), VOCAB), &gpu).unwrap();
    for count in [1, 3, MAX_BEST] {
        let got: Vec<Vec<u32>> = best_logits(&all, count).unwrap().to_vec2().unwrap();
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(got[i], best(row, count), "row {i}");
        }
    }
    for count in [0, MAX_BEST + 1] {
        best_logits(&all, count).unwrap_err();
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
                    choice: TokenChoice::Quantile(rng.uniform(at, Purpose::Draft, 0)),
                };
                rows.push(Row {
                    logits: target,
                    sampler: sampler.clone(),
                    choice: TokenChoice::Quantile(rng.uniform(at, Purpose::Sample, 0)),
                });
                sampler.push(draft.draw());
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
                    draft.push(token, 1., Source::Model);
                    draft.dists.push(q.into());
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
                let verdict = rejection(&draft, target, &rng).unwrap();
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

/// Ids and logits have the same bits; a sum of thousands of values in f64 differs in its last ones.
#[test]
fn the_largest_logits_are_those_of_the_cpu() {
    let gpu = gpu();
    const ROWS: usize = 5;
    let mut all: Vec<f32> = (0..ROWS as u64).flat_map(logits).collect();
    // Many equal logits.
    all[VOCAB..2 * VOCAB]
        .iter_mut()
        .for_each(|x| *x = x.round());
    all[2 * VOCAB..3 * VOCAB].fill(0.5);
    let all = Tensor::from_vec(all, (ROWS, VOCAB), &Device::Cpu).unwrap();
    for k in [1, 32, 1500, VOCAB] {
        let rows = |device: &Device| {
            let logits = all.to_device(device).unwrap();
            top_logits(&logits, k).unwrap().read().unwrap()
        };
        for (ours, theirs) in rows(&gpu).iter().zip(rows(&Device::Cpu)) {
            assert_eq!((&ours.ids, &ours.logits), (&theirs.ids, &theirs.logits));
            let off = (ours.rest - theirs.rest).abs();
            assert!(off <= 1e-13 * theirs.rest, "{} {}", ours.rest, theirs.rest);
        }
    }
    top_logits(&all.to_device(&gpu).unwrap(), VOCAB + 1).unwrap_err();
}
