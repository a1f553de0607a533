//! Acceptance by chance, through the engine: rounds are as long as was asked for, whatever the
//! models say.

use crate::common::*;
use foretoken::engine::{EngineHandle, Request, SpecUsage};

const K: usize = 4;

fn accepted_by_chance(request: Request, rate: f64) -> Request {
    Request {
        synthetic_acceptance: Some(rate),
        ..request
    }
}

/// What became of the drafts of `requests`, all together.
fn usage(engine: &EngineHandle, requests: Vec<Request>) -> SpecUsage {
    let mut sum = SpecUsage::default();
    for receiver in engine.submit_all(requests).unwrap() {
        let spec = collect(receiver).spec;
        sum.rounds += spec.rounds;
        sum.drafted += spec.drafted;
        sum.tested += spec.tested;
        sum.accepted += spec.accepted;
    }
    sum
}

/// A draft that is the target itself and one that knows nothing are accepted alike: so often, and
/// in rounds of as many tokens, as Leviathan et al. 2023 expect of that probability (equation 1).
#[test]
fn rounds_follow_the_probability_and_not_the_models() {
    for guess in [Guess::Toy(0.0), Guess::Toy(1.0)] {
        // With room for every draft.
        let engine = Toy {
            guess,
            num_blocks: 2000,
            ..Toy::default()
        }
        .start();
        for (temperature, rate) in [(0.0, 0.3), (0.0, 0.8), (1.0, 0.3), (1.0, 0.8)] {
            let requests = (0..60).map(|seed| {
                let mut request = sampled(&[1, 2, 3], 200, seed);
                request.params.temperature = temperature;
                accepted_by_chance(request, rate)
            });
            let spec = usage(&engine, requests.collect());
            let case = format!("{guess:?} at {temperature}, {rate}: {spec:?}");
            assert!((spec.alpha() - rate).abs() < 0.02, "{case}");
            let expected: f64 = (0..=K as i32).map(|i| rate.powi(i)).sum();
            // The drafts at the end of a text are shorter.
            let mean = spec.mean_accepted_length();
            assert!((mean / expected - 1.0).abs() < 0.04, "{case}: {mean}");
        }
        assert_idle(&engine);
    }
}

#[test]
fn certainty_and_impossibility() {
    let engine = Toy::guessing(Guess::Toy(1.0)).start();
    // One token from the prompt, then rounds of five.
    let all = run(&engine, accepted_by_chance(greedy(&[1, 2, 3], 41), 1.0));
    assert_eq!((all.spec.rounds, all.spec.accepted), (8, 32));
    let none = run(&engine, accepted_by_chance(greedy(&[1, 2, 3], 41), 0.0));
    assert_eq!(none.spec.accepted, 0);
    // What is left are the target's own tokens.
    let want = reference(&mut toy_model(0.0), &greedy(&[1, 2, 3], 41));
    assert_eq!(none.ids(), want);
    assert_ne!(all.ids(), want);
}
