use super::*;

fn dense(logits: &[f32], params: &SamplingParams) -> Vec<f32> {
    match distribution(logits, &Sampler::new(params.clone(), &[])).unwrap() {
        Dist::Dense(probs) => probs,
        other => panic!("not dense: {other:?}"),
    }
}

fn kept(probs: &[f32]) -> Vec<usize> {
    (0..probs.len()).filter(|&id| probs[id] > 0.0).collect()
}

/// Probabilities 0.5, 0.25, 0.125, ... as logits, in a shuffled order of ids.
fn halves(n: usize) -> Vec<f32> {
    (0..n)
        .map(|id| -((id * 7 % n) as f32) * std::f32::consts::LN_2)
        .collect()
}

#[test]
fn top_k_top_p_and_min_p_keep_the_right_tokens() {
    let logits = halves(11);
    let rank = |id: usize| id * 7 % 11;
    let with = |top_k, top_p, min_p| SamplingParams {
        top_k,
        top_p,
        min_p,
        ..Default::default()
    };
    for (params, ranks) in [
        (with(3, 1.0, 0.0), 3),
        (with(0, 0.74, 0.0), 2),
        (with(0, 0.76, 0.0), 3),
        (with(0, 1.0, 0.3), 2),
        (with(0, 1.0, 0.2), 3),
        (with(5, 0.6, 0.0), 2),
    ] {
        let probs = dense(&logits, &params);
        let kept = kept(&probs);
        assert_eq!(kept.len(), ranks, "{params:?}");
        assert!(kept.iter().all(|&id| rank(id) < ranks), "{params:?}");
        assert!((probs.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}

/// Sums of floats depend on their order, and a GPU's is another one. Here, weights that are too small to count
/// would move the end by a token.
#[test]
fn top_p_counts_in_integers() {
    let params = SamplingParams {
        top_p: 0.5,
        ..Default::default()
    };
    let logits = [&[-31.2; 1000][..], &[0.0, 0.0]].concat();
    assert_eq!(kept(&dense(&logits, &params)), [1000]);
}

#[test]
fn top_p_of_a_flat_distribution_sorts_in_stages() {
    let params = SamplingParams {
        top_p: 0.5,
        ..Default::default()
    };
    let probs = dense(&vec![0.0; 1000], &params);
    assert_eq!(kept(&probs), (0..500).collect::<Vec<_>>());
}

#[test]
fn penalties_follow_their_formulas_and_grow_with_the_draft() {
    let params = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..Default::default()
    };
    let mut sampler = Sampler::new(params, &[0]);
    sampler.push(1);
    sampler.push(1);
    let mut logits = vec![4.0, 4.0, -1.0, 3.0];
    apply(sampler.adjustments(), [None, None], &mut logits);
    assert_eq!(logits, [2.0, 2.0 - 0.5 - 0.5, -1.0, 3.0]);
    sampler.push(3);
    sampler.push(2);
    let mut logits = vec![4.0, 4.0, -1.0, 3.0];
    apply(sampler.adjustments(), [None, None], &mut logits);
    assert_eq!(logits, [2.0, 1.0, -2.0 - 0.75, 1.5 - 0.75]);
}

#[test]
fn bias_and_min_tokens_change_the_greedy_choice() {
    let mut params = SamplingParams {
        temperature: 0.0,
        min_tokens: 2,
        stop_token_ids: vec![1],
        ..Default::default()
    };
    let logits = [0.0, 5.0, 1.0];
    let choose = |params: &SamplingParams, output: usize| {
        let mut sampler = Sampler::new(params.clone(), &[0]);
        (0..output).for_each(|_| sampler.push(0));
        distribution(&logits, &sampler).unwrap()
    };
    assert_eq!(choose(&params, 1), Dist::Point(2));
    assert_eq!(choose(&params, 2), Dist::Point(1));
    params.logit_bias = vec![(0, 100.0)];
    assert_eq!(choose(&params, 2), Dist::Point(0));
}

/// For each kind of request: greedy and sampled, with and without adjustments.
#[test]
fn rows_without_a_token_are_errors() {
    let plain = SamplingParams::default();
    let biased = SamplingParams {
        logit_bias: vec![(0, 1.0)],
        ..plain.clone()
    };
    for params in [plain, biased] {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams {
                temperature,
                ..params.clone()
            };
            let outcome = |logits: &[f32], params: &SamplingParams| {
                distribution(logits, &Sampler::new(params.clone(), &[])).map(drop)
            };
            let mut logits = halves(40);
            assert_eq!(outcome(&logits, &params), Ok(()));
            logits[7] = f32::NEG_INFINITY;
            assert_eq!(outcome(&logits, &params), Ok(()));
            for odd in [f32::NAN, f32::INFINITY] {
                logits[21] = odd;
                assert_eq!(outcome(&logits, &params), Err(NoToken::NotFinite));
                assert_eq!(logprobs(&logits, 3, 1), Err(NoToken::NotFinite));
            }
            let nothing = [f32::NEG_INFINITY; 40];
            assert_eq!(outcome(&nothing, &params), Err(NoToken::NotFinite));
            let forbids = SamplingParams {
                min_tokens: 1,
                stop_token_ids: (0..40).collect(),
                ..params
            };
            assert_eq!(outcome(&halves(40), &forbids), Err(NoToken::AllForbidden));
            assert_eq!(outcome(&nothing, &forbids), Err(NoToken::NotFinite));
        }
    }
}

#[test]
fn logprobs_are_the_log_softmax() {
    let out = logprobs(&halves(11), 0, 2).unwrap();
    let total: f64 = (0..11).map(|i| 0.5f64.powi(i)).sum();
    assert!((f64::from(out.logprob) + total.ln()).abs() < 1e-6);
    assert_eq!(out.top[0], (0, out.logprob));
    assert_eq!(out.top[1].0, 8, "8 * 7 % 11 = 1");
}

#[test]
fn random_numbers_are_uniform_and_addressed() {
    let rng = Rng::at(1, 5);
    let shifted = Rng::at(1, 3);
    assert_eq!(rng.key(0), shifted.key(2));
    // The numbers with which a step drafts and verifies are its own.
    let both = [(rng, 0), (shifted, 2)].map(|(rng, offset)| rng.uniform(offset, Purpose::Draft, 0));
    assert_ne!(both[0], both[1]);
    let mean: f64 = (0..10_000)
        .map(|i| rng.uniform(i, Purpose::Accept, 0))
        .sum::<f64>()
        / 1e4;
    assert!((mean - 0.5).abs() < 0.01, "{mean}");
    let all = [Purpose::Draft, Purpose::Accept, Purpose::Sample].map(|p| rng.uniform(0, p, 0));
    assert!(all[0] != all[1] && all[1] != all[2]);
}

#[test]
fn only_allowed_ids_are_chosen() {
    let allowed = |ids: &[u32]| Some(Arc::new(Mask::of(ids)));
    for temperature in [0.0, 1.0] {
        let params = |ids: &[u32]| SamplingParams {
            temperature,
            allowed: allowed(ids),
            ..SamplingParams::default()
        };
        let logits = [3.0, 1.0, 2.0, 0.5];
        let dist = |ids: &[u32]| distribution(&logits, &Sampler::new(params(ids), &[]));
        let two = dist(&[1, 2]).expect("a token");
        assert_eq!((two.prob(0), two.prob(3)), (0.0, 0.0));
        assert!(two.prob(2) > two.prob(1));
        // Ids that the model lacks are no choice.
        assert_eq!(dist(&[9]), Err(NoToken::AllForbidden));
        // A word that is the only choice leaves none.
        let forbidden = SamplingParams {
            bad_words: Arc::new([vec![3]]),
            ..params(&[3])
        };
        let sampler = Sampler::new(forbidden, &[]);
        assert_eq!(distribution(&logits, &sampler), Err(NoToken::AllForbidden));
    }
}
