use super::super::cost::tests::Noise;
use super::super::target_cost::MeasuredForward;
use super::super::target_cost::tests::dense;
use super::*;

pub(super) fn budget(target: &[f64]) -> Budget {
    let mut budget = Budget::new(BudgetMode::Adaptive);
    budget.target().calibrate(&dense(&numbered(target)));
    budget
}

/// The seconds of 1, 2, ... rows.
pub(super) fn numbered(seconds: &[f64]) -> Vec<(usize, f64)> {
    (1..).zip(seconds.iter().copied()).collect()
}

pub(super) fn monotone(noise: &mut Noise, rows: usize, step: f64) -> Vec<f64> {
    let mut seconds = vec![0.5 + noise.unit()];
    for row in 1..rows {
        let tile = if noise.unit() < 0.3 { 3.0 } else { 0.3 };
        seconds.push(seconds[row - 1] + step * tile * noise.unit());
    }
    seconds
}

pub(super) fn chain_parents(len: usize) -> Vec<Option<u16>> {
    (0..len as u16).map(|node| node.checked_sub(1)).collect()
}

/// One chain's decision in a step of `sequences` sequences that all have this draft.
pub(super) fn kept(budget: &mut Budget, scores: &[f32], sequences: usize) -> usize {
    let parents = chain_parents(scores.len());
    let draft = Candidates {
        scores,
        parents: &parents,
    };
    let keep = budget
        .select(&vec![draft; sequences], plain(sequences))
        .keep;
    keep.concat().iter().filter(|&&keep| keep).count()
}

#[test]
fn no_choice_of_nodes_that_contains_their_ancestors_is_worth_more() {
    let mut noise = Noise(1);
    for round in 0..300 {
        let sequences = 1 + noise.below(3);
        let base = sequences + noise.below(3);
        let cost = monotone(&mut noise, 16, 0.4);
        let mut budget = budget(&cost);
        // Nodes of all sequences: (sequence, parent among all nodes, score).
        let (mut scores, mut parents) = (vec![vec![]; sequences], vec![vec![]; sequences]);
        let mut nodes: Vec<(usize, Option<usize>, f64)> = Vec::new();
        for _ in 0..noise.below(11) {
            let sequence = noise.below(sequences);
            let own: Vec<usize> = (0..nodes.len())
                .filter(|&i| nodes[i].0 == sequence)
                .collect();
            let at = noise.below(own.len() + 1);
            let above = own.get(at).map_or(1.0, |&node| nodes[node].2);
            let raw = match noise.below(12) {
                0 => [f32::NAN, -0.5, 1.5, f32::INFINITY][noise.below(4)],
                1 => noise.unit() as f32,
                2..5 => above as f32,
                _ => (above * noise.unit().sqrt()) as f32,
            };
            let valid = if (0.0..=1.0).contains(&raw) { raw } else { 0.0 };
            scores[sequence].push(raw);
            parents[sequence].push((at < own.len()).then_some(at as u16));
            nodes.push((sequence, own.get(at).copied(), f64::from(valid).min(above)));
        }
        let drafts = scores.iter().zip(&parents);
        let drafts: Vec<_> = drafts
            .map(|(scores, parents)| Candidates { scores, parents })
            .collect();
        let step = Base {
            rows: base,
            ..plain(sequences)
        };
        let keep = budget.select(&drafts, step).keep;
        let mut of = vec![0; sequences];
        let chosen = nodes.iter().enumerate().filter(|(_, node)| {
            of[node.0] += 1;
            keep[node.0][of[node.0] - 1]
        });
        let chosen: usize = chosen.map(|(at, _)| 1 << at).sum();
        let value = |set: usize| {
            let has = |node: usize| set >> node & 1 == 1;
            let of_set = || (0..nodes.len()).filter(|&node| has(node));
            let stands = |node: usize| nodes[node].2 >= 0.02 && nodes[node].1.is_none_or(has);
            let price = MARGIN * sequences as f64 / cost[sequences - 1];
            let added = cost[base + of_set().count() - 1] - cost[base - 1];
            let gain: f64 = of_set().map(|node| nodes[node].2).sum();
            of_set().all(stands).then_some(gain - price * added)
        };
        let best = (0..1 << nodes.len()).filter_map(value).fold(0.0, f64::max);
        let ours = value(chosen).expect("every kept node's parent is kept");
        assert!(ours >= best - 1e-9, "round {round}: {ours} of {best}");
    }
}

#[test]
fn no_choice_of_depths_is_worth_more() {
    let mut noise = Noise(2);
    for round in 0..600 {
        // Of several blocks, the best choice is not always the nodes of highest probability: a block
        // begins with a row that gains nothing.
        let at_once = round % 2 == 1;
        let sequences = if at_once { 1 } else { 1 + noise.below(3) };
        let cost = monotone(&mut noise, 16, 0.3);
        // Not so cheap that a sequence probes in its first step.
        let (fixed, row) = (0.02 + 0.3 * noise.unit(), 0.02 + 0.1 * noise.unit());
        let draft = |rows: usize| {
            if rows == 0 {
                0.0
            } else {
                fixed + row * rows as f64
            }
        };
        let mut budget = budget(&cost);
        budget
            .draft_cost()
            .calibrate(&numbered(&(1..=15).map(draft).collect::<Vec<_>>()));
        let paths: Vec<Vec<f32>> = (0..sequences)
            .map(|_| {
                let rate = noise.unit().sqrt() as f32;
                (1..=4).map(|depth| rate.powi(depth).max(0.03)).collect()
            })
            .collect();
        let mut forecasts = forecasts(&paths, 4);
        (forecasts.iter_mut()).for_each(|one| one.at_once = at_once);
        let value = |depths: &[usize]| {
            let price = MARGIN * sequences as f64 / cost[sequences - 1];
            let gain: f64 = depths
                .iter()
                .zip(&paths)
                .map(|(&depth, path)| path[..depth].iter().map(|&s| f64::from(s)).sum::<f64>())
                .sum();
            let rows = |level| depths.iter().filter(|&&depth| depth >= level).count();
            // A block has one row more than it guesses.
            let block: usize = (0..=4).map(|level| rows(level.max(1))).sum();
            let drafting = if at_once {
                draft(block)
            } else {
                (1..=4).map(|level| draft(rows(level))).sum()
            };
            let verifying =
                cost[sequences + depths.iter().sum::<usize>() - 1] - cost[sequences - 1];
            gain - price * (verifying + drafting)
        };
        let ours = value(&budget.depths(&forecasts, plain(sequences)));
        for choice in 0..5usize.pow(sequences as u32) {
            let depth = |sequence| choice / 5usize.pow(sequence as u32) % 5;
            let depths: Vec<usize> = (0..sequences).map(depth).collect();
            let theirs = value(&depths);
            assert!(
                ours >= theirs - 1e-9,
                "round {round}: {ours}, {theirs} for {depths:?}"
            );
        }
    }
}

/// Forecasts that hope for no more than they expect.
pub(super) fn forecasts(paths: &[Vec<f32>], max_length: usize) -> Vec<DraftForecast<'_>> {
    let paths = paths.iter();
    paths
        .map(|path| DraftForecast {
            path,
            hope: path[0],
            max_length,
            pending: 1,
            at_once: false,
        })
        .collect()
}

/// A step of so many sequences without drafts, at the start of their texts.
pub(super) fn plain(sequences: usize) -> Base {
    Base {
        sequences,
        rows: sequences,
        context: 0,
    }
}

#[test]
fn free_rows_are_all_used_and_dear_rows_are_not() {
    let scores = [0.9, 0.5, 0.1, 0.02, 0.019];
    let mut free = budget(&[1.0; 16]);
    assert_eq!(kept(&mut free, &scores, 1), 4);
    assert_eq!(free.pruned(), 1);
    let dear: Vec<f64> = (1..=16).map(f64::from).collect();
    let mut dear = budget(&dear);
    assert_eq!(kept(&mut dear, &scores, 1), 0);
    assert_eq!(dear.pruned(), 5);
    let mut fixed = Budget::new(BudgetMode::Fixed);
    assert_eq!(kept(&mut fixed, &scores, 1), 5);
}

#[test]
fn a_row_that_does_not_pay_is_taken_with_those_that_follow_it() {
    // A tile of eight rows: the ninth row is dear, and those after it are free.
    let tile: Vec<f64> = (0..16).map(|row| f64::from(1 + row / 8)).collect();
    let parents = chain_parents(2);
    let mut budget = budget(&tile);
    let mut keep = |scores: &[f32]| {
        let draft = Candidates {
            scores,
            parents: &parents,
        };
        // Four sequences pay a price of four tokens for the second tile.
        let keep = budget
            .select(
                &[draft; 4],
                Base {
                    rows: 8,
                    ..plain(4)
                },
            )
            .keep
            .concat();
        keep.iter().filter(|&&keep| keep).count()
    };
    assert_eq!(keep(&[0.9, 0.8]), 8);
    assert_eq!(keep(&[0.5, 0.4]), 0);
}

/// Attention makes each row dearer the longer the text is, though products cost the same.
#[test]
fn the_longer_the_text_the_dearer_a_row() {
    let forward = |rows: usize, context: usize| MeasuredForward {
        rows,
        context,
        experts_read: 0,
        seconds: 1.0 + 0.1 * (rows - 1) as f64 + (1e-4 + 2e-4 * rows as f64) * context as f64,
    };
    let mut budget = Budget::new(BudgetMode::Adaptive);
    let start = (1..=8).map(|rows| forward(rows, 0));
    let measured: Vec<_> = start.chain([forward(1, 512), forward(8, 512)]).collect();
    budget.target().calibrate(&measured);
    let scores = [0.9, 0.7, 0.5, 0.35, 0.2];
    let parents = chain_parents(scores.len());
    let draft = Candidates {
        scores: &scores,
        parents: &parents,
    };
    let mut kept = |context: usize| {
        let base = Base {
            context,
            ..plain(1)
        };
        let keep = budget.select(&[draft], base).keep.concat();
        keep.into_iter().filter(|&keep| keep).count()
    };
    assert_eq!([0, 1000, 3000, 8000].map(&mut kept), [5, 4, 3, 2]);
}

#[test]
fn under_load_nothing_is_drafted() {
    // Half of a one-row step is the weights' memory, as on a CPU; the rest is arithmetic.
    let cost: Vec<f64> = (1..=200).map(|rows| 0.5 + 0.2 * rows as f64).collect();
    let scores = [0.85, 0.7, 0.5, 0.3];
    let mut budget = budget(&cost);
    let of = [1, 4, 16, 64].map(|streams| kept(&mut budget, &scores, streams));
    assert_eq!(of, [3, 8, 0, 0]);
}

#[test]
fn what_speculation_gains_elsewhere_raises_the_price_of_a_row() {
    let cost: Vec<f64> = (0..16).map(|row| 1.0 + 0.3 * f64::from(row)).collect();
    let mut budget = budget(&cost);
    assert_eq!(kept(&mut budget, &[0.9, 0.5, 0.4], 1), 3);
    for _ in 0..2000 {
        budget.observe(&StepCost {
            sequences: 1,
            base_rows: 1,
            draft_nodes: 1,
            tokens: 2,
            target_seconds: 1.3,
            draft_seconds: 0.1,
            ..StepCost::default()
        });
    }
    assert!(
        (budget.speed_up() - 2.0 / 1.4).abs() < 0.01,
        "{}",
        budget.speed_up()
    );
    assert_eq!(kept(&mut budget, &[0.9, 0.5, 0.4], 1), 2);
}

#[test]
fn prompts_and_an_interrupted_step_do_not_disturb_the_estimates() {
    let mut budget = budget(&[1.0; 16]);
    let step = StepCost {
        sequences: 1,
        base_rows: 1,
        tokens: 1,
        target_seconds: 1000.0,
        ..StepCost::default()
    };
    budget.observe(&StepCost {
        base_rows: 9,
        ..step
    });
    budget.observe(&StepCost {
        sequences: 0,
        base_rows: 0,
        ..step
    });
    assert_eq!(
        (budget.speed_up(), budget.target().seconds(1, 0)),
        (1.0, 1.0)
    );
    budget.observe(&step);
    assert!(budget.speed_up() > 0.98);
    budget.observe(&StepCost {
        target_seconds: f64::NAN,
        ..step
    });
    assert!(budget.speed_up() > 0.98);
}

#[test]
fn unknown_costs_of_drafting_are_found_out() {
    let mut budget = budget(&[1.0, 1.1, 1.2]);
    let paths = [vec![0.5]];
    let one = forecasts(&paths, 1);
    assert_eq!(budget.depths(&one, plain(1)), [1]);
    budget.draft_cost().note(1, 0.6);
    assert_eq!(budget.depths(&one, plain(1)), [0]);
    budget.draft_cost().calibrate(&[(1, 0.3)]);
    assert_eq!(budget.depths(&one, plain(1)), [1]);
}

/// A model that has not seen a prompt is fed it only where its drafts will pay for that.
#[test]
fn a_backlog_is_fed_where_it_pays() {
    let cost: Vec<f64> = (0..64).map(|row| 1.0 + 0.1 * f64::from(row)).collect();
    let mut budget = budget(&cost);
    let draft: Vec<f64> = (0..400).map(|row| 0.01 * f64::from(1 + row)).collect();
    budget.draft_cost().calibrate(&numbered(&draft));
    let mut depth = |score: f32, pending: usize| {
        let paths = [vec![score]];
        let mut one = forecasts(&paths, 1);
        one[0].pending = pending;
        budget.depths(&one, plain(1))[0]
    };
    // A row more and one of the draft model's cost 0.11 steps.
    assert_eq!(depth(0.15, 1), 1);
    assert_eq!(depth(0.15, 300), 0);
    assert_eq!(depth(0.6, 300), 1);
    // What the step before gained is fed in each step.
    assert_eq!(depth(0.13, 1), 1);
    assert_eq!(depth(0.13, 3), 0);
}

/// A sequence whose backlog does not pay takes no draft from another one.
#[test]
fn a_backlog_holds_up_nobody() {
    let cost: Vec<f64> = (0..64).map(|row| 1.0 + 0.1 * f64::from(row)).collect();
    let mut budget = budget(&cost);
    let draft: Vec<f64> = (0..600).map(|row| 0.06 * f64::from(1 + row)).collect();
    budget.draft_cost().calibrate(&numbered(&draft));
    let paths = [vec![0.95], vec![0.9]];
    for (pending, want) in [(1, [1, 1]), (512, [0, 1]), (4096, [0, 1])] {
        let mut both = forecasts(&paths, 1);
        both[0].pending = pending;
        assert_eq!(budget.depths(&both, plain(2)), want, "{pending} rows");
    }
}
