//! What the budget's decisions gain over many steps whose outcomes and times are drawn at random.

use super::super::cost::tests::Noise;
use super::super::target_cost::tests::dense;
use super::tests::{budget, chain_parents, forecasts, kept, monotone, numbered, plain};
use super::*;

/// Sequences that never accept anything, in a batch of `streams`: seconds of drafting over those
/// of decoding, and the number of probes. The draft model is fed what it has not seen: a share
/// `catch_up` of a row's cost for each token.
fn probing(streams: usize, catch_up: bool) -> (f64, usize) {
    let draft = |rows: usize| 0.1 + 0.02 * (rows as f64 - 1.0);
    let cost: Vec<f64> = (0..200).map(|row| 1.0 + 0.02 * f64::from(row)).collect();
    let mut budget = budget(&cost);
    let draft_curve: Vec<f64> = (1..200).map(draft).collect();
    budget.draft_cost().calibrate(&numbered(&draft_curve));
    let paths = vec![vec![0.03f32; 4]; streams];
    let mut behind = vec![1; streams];
    let (mut drafting, mut decoding, mut count) = (0.0, 0.0, 0);
    for _ in 0..20_000 {
        budget.exploration.save(cost[streams - 1]);
        let mut all = forecasts(&paths, 4);
        all.iter_mut()
            .zip(&behind)
            .for_each(|(one, &behind)| one.pending = behind);
        let depths = budget.depths(&all, plain(streams));
        let mut rows = 0;
        for (depth, behind) in depths.into_iter().zip(&mut behind) {
            assert!(depth <= 1);
            *behind += usize::from(catch_up);
            if depth > 0 {
                rows += std::mem::replace(behind, 1);
                count += 1;
            }
        }
        drafting += if rows > 0 { draft(rows) } else { 0.0 };
        decoding += cost[streams - 1];
    }
    (drafting / decoding, count)
}

#[test]
fn probing_costs_at_most_a_hundredth() {
    for streams in [1, 8, 32] {
        let (share, count) = probing(streams, false);
        assert!(share < 0.0101, "{share} with {streams} streams");
        assert!(count > 100, "{count} probes");
    }
    // A draft model that must be fed all tokens of a lone sequence costs more than that.
    assert_eq!(probing(1, true).1, 0);
}

/// Expected tokens per second of the budget, and of fixed depths 0..=8, in a random world: a cost
/// curve, acceptance rates that differ between sequences and steps and are known to the drafter,
/// and a draft model or none. Times have noise of a tenth, and the machine's speed changes by a
/// factor of two.
fn world(seed: u64) -> (f64, Vec<f64>) {
    const DEPTH: usize = 8;
    let noise = &mut Noise(seed);
    let streams = [1, 1, 4, 16][noise.below(4)];
    let row_cost = [0.01, 0.1, 0.3, 1.0][noise.below(4)];
    let cost = monotone(noise, streams * (DEPTH + 1), row_cost);
    let level = [0.0, 0.05, 0.2][noise.below(3)] * cost[0];
    let draft = |rows: usize| {
        if rows == 0 {
            0.0
        } else {
            level * (1.0 + 0.05 * rows as f64)
        }
    };
    let (likely, spread) = (noise.unit(), noise.unit());
    let mut budget = Budget::new(BudgetMode::Adaptive);
    let measured: Vec<(usize, f64)> = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]
        .into_iter()
        .filter(|&rows| rows <= cost.len())
        .map(|rows| {
            let mut runs = [(); 5].map(|()| cost[rows - 1] * noise.factor(0.1));
            runs.sort_by(f64::total_cmp);
            (rows, runs[2])
        })
        .collect();
    budget.target().calibrate(&dense(&measured));
    let (mut ours, mut fixed) = ((0.0, 0.0), vec![(0.0, 0.0); DEPTH + 1]);
    for step in 0..3000 {
        let rate =
            |noise: &mut Noise| (likely + spread * (noise.unit() - 0.5)).clamp(0.0, 0.98) as f32;
        let rates: Vec<f32> = (0..streams).map(|_| rate(noise)).collect();
        let path = |&rate: &f32| (1..=DEPTH as i32).map(|depth| rate.powi(depth)).collect();
        let paths: Vec<Vec<f32>> = rates.iter().map(path).collect();
        let mut depths = vec![DEPTH; streams];
        let mut drafting = 0.0;
        let speed = 1.5 + 0.5 * (step as f64 / 200.0).sin();
        if level > 0.0 {
            depths = budget.depths(&forecasts(&paths, DEPTH), plain(streams));
            for deeper in 0..DEPTH {
                let rows = depths.iter().filter(|&&depth| depth > deeper).count();
                if rows > 0 {
                    drafting += draft(rows);
                    budget
                        .draft_cost()
                        .note(rows, draft(rows) * speed * noise.factor(0.1));
                }
            }
        }
        let parents = chain_parents(DEPTH);
        let drafts = paths.iter().zip(&depths).map(|(path, &depth)| Candidates {
            scores: &path[..depth],
            parents: &parents[..depth],
        });
        let drafts: Vec<_> = drafts.collect();
        let keep = budget.select(&drafts, plain(streams)).keep;
        let (mut expected, mut tokens, mut nodes) = (0.0, 0, 0);
        for ((path, rate), keep) in paths.iter().zip(&rates).zip(&keep) {
            let depth = keep.iter().filter(|&&keep| keep).count();
            expected += 1.0 + path[..depth].iter().map(|&s| f64::from(s)).sum::<f64>();
            let stands = |noise: &mut Noise| noise.unit() < f64::from(*rate);
            tokens += 1 + (0..depth).take_while(|_| stands(noise)).count();
            nodes += depth;
        }
        let seconds = cost[streams + nodes - 1];
        ours = (ours.0 + expected, ours.1 + seconds + drafting);
        budget.observe(&StepCost {
            sequences: streams,
            base_rows: streams,
            draft_nodes: nodes,
            tokens,
            target_seconds: seconds * speed * noise.factor(0.1),
            draft_seconds: drafting * speed * noise.factor(0.1),
            ..StepCost::default()
        });
        for (depth, (tokens, seconds)) in fixed.iter_mut().enumerate() {
            let gained = paths.iter().flat_map(|path| &path[..depth]);
            *tokens += streams as f64 + gained.map(|&s| f64::from(s)).sum::<f64>();
            *seconds += cost[streams * (depth + 1) - 1] + draft(streams) * depth as f64;
        }
    }
    let rate = |(tokens, seconds): (f64, f64)| tokens / seconds;
    (rate(ours), fixed.into_iter().map(rate).collect())
}

#[test]
fn it_is_never_slower_than_plain_decoding_and_near_the_best_fixed_depth() {
    let mut gains = Vec::new();
    for seed in 0..60 {
        let (ours, fixed) = world(seed);
        let best = fixed.iter().copied().fold(0.0, f64::max);
        let (plain, best) = (ours / fixed[0], ours / best);
        assert!(plain >= 0.99, "world {seed}: {plain} of plain decoding");
        assert!(best >= 0.95, "world {seed}: {best} of the best fixed depth");
        gains.push(best);
    }
    let mean = gains.iter().sum::<f64>() / gains.len() as f64;
    assert!(
        mean > 1.03,
        "a depth for each step: {mean} of the best fixed one"
    );
}

/// The shares of the last 1,000 of 5,000 steps of one sequence that verify 0, 1, ... nodes of a
/// chain, if a step of 1, 2, ... rows takes `seconds`.
fn shares(budget: &mut Budget, scores: &[f32], seconds: &[f64]) -> Vec<f64> {
    let mut noise = Noise(4);
    let mut shares = vec![0.0; scores.len() + 1];
    for step in 0..5000 {
        let nodes = kept(budget, scores, 1);
        let above = scores
            .iter()
            .scan(1.0, |above, score| Some(std::mem::replace(above, *score)));
        let mut rates = scores[..nodes]
            .iter()
            .zip(above)
            .map(|(score, above)| score / above);
        let accepted = rates.position(|rate| noise.unit() > f64::from(rate));
        budget.observe(&StepCost {
            sequences: 1,
            base_rows: 1,
            draft_nodes: nodes,
            tokens: 1 + accepted.unwrap_or(nodes),
            target_seconds: seconds[nodes] * noise.factor(0.1),
            ..StepCost::default()
        });
        if step >= 4000 {
            shares[nodes] += 1e-3;
        }
    }
    shares
}

#[test]
fn a_cost_that_was_overestimated_is_found_out() {
    let mut unknown = Budget::new(BudgetMode::Adaptive);
    assert_eq!(kept(&mut unknown, &[0.15, 0.1], 1), 0);
    let of = shares(&mut unknown, &[0.15, 0.1], &[1.0, 1.02, 1.04]);
    assert!(of[2] > 0.9, "{of:?}");
}

#[test]
fn dearer_drafts_are_told_from_a_slower_machine() {
    let mut dearer = budget(&[1.0, 1.2]);
    let of = shares(&mut dearer, &[0.5], &[1.0, 1.7]);
    assert!(of[0] > 0.95, "{of:?}");
    let mut slower = budget(&[1.0, 1.2]);
    let of = shares(&mut slower, &[0.5], &[2.0, 2.4]);
    assert!(of[1] > 0.95, "{of:?}");
}

#[test]
fn steps_without_drafts_are_run_to_compare_with() {
    let mut budget = budget(&[1.0, 1.0]);
    let of = shares(&mut budget, &[0.9], &[1.0, 1.0]);
    let lost = of[0] * (1.0 - 1.0 / 1.9);
    assert!((0.001..0.004).contains(&lost), "{of:?}");
}
