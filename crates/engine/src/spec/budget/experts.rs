//! What it gains to know that a row may bring new experts into memory: steps whose time follows the experts that their
//! rows chose, at random.

use super::super::cost::tests::Noise;
use super::super::target_cost::tests::dense;
use super::super::target_cost::{MeasuredForward, TargetCost};
use super::tests::{chain_parents, plain};
use super::*;

const LAYERS: usize = 4;
const EXPERTS: usize = 64;
const PER_ROW: u32 = 4;
const DEPTH: usize = 6;
const STEPS: u64 = 6000;
const STEPS_OF_TEXTS: u64 = 1500;

/// The experts of a row: a bit each, in each layer.
type Chosen = [u64; LAYERS];

/// The experts of the row after one with `chosen`. Each expert stays with the probability `share`; the others are new.
fn next(mut chosen: Chosen, share: f64, noise: &mut Noise) -> Chosen {
    for layer in &mut chosen {
        let mut others = *layer;
        while others != 0 {
            let expert = others & others.wrapping_neg();
            others ^= expert;
            if noise.unit() >= share {
                *layer ^= expert;
            }
        }
        while layer.count_ones() < PER_ROW {
            *layer |= 1 << noise.below(EXPERTS);
        }
    }
    chosen
}

/// The experts of a row that has nothing to do with any other.
fn fresh(noise: &mut Noise) -> Chosen {
    next([0; LAYERS], 0.0, noise)
}

fn count(rows: &[Chosen]) -> usize {
    let of_layer = |layer| {
        rows.iter()
            .fold(0u64, |all, row| all | row[layer])
            .count_ones()
    };
    (0..LAYERS).map(|layer| of_layer(layer) as usize).sum()
}

/// A machine on which a step of one row takes one second, a share of it for experts.
#[derive(Clone, Copy)]
struct Machine {
    of_experts: f64,
    row: f64,
}

impl Machine {
    fn seconds(&self, rows: &[Chosen]) -> f64 {
        let experts = count(rows) as f64 / (LAYERS * PER_ROW as usize) as f64;
        let others = 1.0 - self.of_experts;
        others * (1.0 + self.row * (rows.len() as f64 - 1.0)) + self.of_experts * experts
    }

    /// The forwards that are measured before the first step: of rows that have nothing in common, and of rows
    /// that are alike.
    fn measured(&self, noise: &mut Noise) -> Vec<MeasuredForward> {
        let mut measured = Vec::new();
        for count_of_rows in [1, 2, 4, 6, 8, 16] {
            let first = fresh(noise);
            let others = (0..count_of_rows).map(|_| fresh(noise)).collect();
            for rows in [others, vec![first; count_of_rows]] {
                measured.push(MeasuredForward {
                    rows: count_of_rows,
                    context: 0,
                    experts_read: count(&rows),
                    seconds: self.seconds(&rows) * noise.factor(0.05),
                });
            }
        }
        measured
    }
}

/// The rule that sets the number of nodes of a draft that are verified.
#[derive(Clone, Copy, PartialEq)]
enum Policy {
    /// The number that the budget says, which knows of experts or only of rows.
    Budget {
        of_experts: bool,
    },
    Fixed(usize),
}

/// Expected tokens per second. Now and then other texts begin: more or fewer of them, which are easier or harder to
/// guess and whose rows have more or less in common. All of this is the same for each policy.
fn rate(seed: u64, policy: Policy) -> f64 {
    let noise = &mut Noise(seed);
    let machine = Machine {
        of_experts: 0.3 + 0.5 * noise.unit(),
        row: 0.1 * noise.unit(),
    };
    let measured = machine.measured(noise);
    let mut budget = Budget::new(BudgetMode::Adaptive);
    let of_experts = policy == Policy::Budget { of_experts: true };
    if of_experts {
        budget = budget.with_target(TargetCost::new([(EXPERTS, PER_ROW as usize); LAYERS]));
        budget.target().calibrate(&measured);
    } else {
        // The first of each two has no row like another.
        let rows = measured.iter().step_by(2);
        let rows: Vec<_> = rows.map(|one| (one.rows, one.seconds)).collect();
        budget.target().calibrate(&dense(&rows));
    }
    let parents = chain_parents(DEPTH);
    let (mut tokens, mut seconds) = (0.0, 0.0);
    let (mut texts, mut likely, mut share) = (Vec::new(), 0.0, 0.0);
    for step in 0..STEPS {
        let noise = &mut Noise(seed << 32 | step << 16);
        if step % STEPS_OF_TEXTS == 0 {
            let streams = [1, 1, 2, 4][noise.below(4)];
            texts = (0..streams).map(|_| fresh(noise)).collect();
            (likely, share) = (0.3 + 0.6 * noise.unit(), noise.unit());
        }
        let speed = 1.5 + 0.5 * (step as f64 / 200.0).sin();
        let rate = |noise: &mut Noise| (likely + 0.3 * (noise.unit() - 0.5)).clamp(0.0, 0.95);
        let rates: Vec<f64> = texts.iter().map(|_| rate(noise)).collect();
        let draws: Vec<[f64; DEPTH]> = texts
            .iter()
            .map(|_| [(); DEPTH].map(|()| noise.unit()))
            .collect();
        let spent = noise.factor(0.1);
        let path = |rate: &f64| {
            (1..=DEPTH as i32)
                .map(|depth| rate.powi(depth) as f32)
                .collect()
        };
        let paths: Vec<Vec<f32>> = rates.iter().map(path).collect();
        let drafts = paths.iter().map(|scores| Candidates {
            scores,
            parents: &parents,
        });
        let drafts: Vec<_> = drafts.collect();
        let keep = budget.select(&drafts, plain(texts.len())).keep;
        let (mut rows, mut nodes, mut gained) = (Vec::new(), 0, 0);
        for (at, keep) in keep.iter().enumerate() {
            let depth = match policy {
                Policy::Fixed(depth) => depth,
                Policy::Budget { .. } => keep.iter().filter(|&&keep| keep).count(),
            };
            let mut of_text = vec![texts[at]];
            for _ in 0..depth {
                let row = next(of_text[of_text.len() - 1], share, noise);
                of_text.push(row);
            }
            let accepted = draws[at][..depth]
                .iter()
                .take_while(|draw| **draw < rates[at]);
            let accepted = accepted.count();
            texts[at] = next(of_text[accepted], share, noise);
            rows.extend(of_text);
            tokens += 1.0
                + paths[at][..depth]
                    .iter()
                    .map(|&s| f64::from(s))
                    .sum::<f64>();
            (nodes, gained) = (nodes + depth, gained + 1 + accepted);
        }
        let took = machine.seconds(&rows);
        seconds += took;
        budget.observe(&StepCost {
            sequences: texts.len(),
            base_rows: texts.len(),
            draft_nodes: nodes,
            context: 0,
            experts_read: if of_experts { count(&rows) } else { 0 },
            tokens: gained,
            target_seconds: took * speed * spent,
            draft_seconds: 0.0,
        });
    }
    tokens / seconds
}

#[test]
fn to_know_of_experts_is_worth_it() {
    const WORLDS: u64 = 12;
    let mut gain = 0.0;
    for seed in 0..WORLDS {
        let ours = rate(seed, Policy::Budget { of_experts: true });
        let of_rows = rate(seed, Policy::Budget { of_experts: false });
        let fixed = (0..=DEPTH).map(|depth| rate(seed, Policy::Fixed(depth)));
        let best = fixed.fold(0.0, f64::max);
        let (over_rows, over_best) = (ours / of_rows, ours / best);
        assert!(over_rows >= 0.99, "world {seed}: {over_rows} of rows alone");
        assert!(
            over_best >= 0.98,
            "world {seed}: {over_best} of the best fixed depth"
        );
        gain += over_rows / WORLDS as f64;
    }
    assert!(gain > 1.03, "{gain} of rows alone");
}
