//! Which experts a row gets, and with which weights.

use crate::spec::{ExpertGroups, ExpertsSpec, RouterScores};

/// The experts of a row with these logits of the router, and their weights: those of the highest score, of equal ones
/// the first. `correction` is added to scores where they are compared, but not in weights, whose sum is taken in this
/// order.
pub fn choose(logits: &[f32], correction: Option<&[f32]>, spec: &ExpertsSpec) -> Vec<(u32, f32)> {
    let scores = match spec.scores {
        RouterScores::Softmax => softmax(logits),
        RouterScores::Sigmoid => logits.iter().map(|x| 1. / (1. + (-x).exp())).collect(),
    };
    let mut ranks = scores.clone();
    if let Some(correction) = correction {
        ranks
            .iter_mut()
            .zip(correction)
            .for_each(|(x, by)| *x += by);
    }
    if let Some(groups) = spec.groups {
        keep_groups(&mut ranks, groups);
    }
    let weights = by_rank(&ranks, spec.per_token);
    let mut chosen: Vec<(u32, f32)> = weights.map(|i| (i as u32, scores[i])).collect();
    if spec.is_normalized {
        let sum: f32 = chosen.iter().map(|(_, weight)| weight).sum();
        let sum = sum.max(spec.min_sum);
        chosen.iter_mut().for_each(|(_, weight)| *weight /= sum);
    }
    chosen
        .iter_mut()
        .for_each(|(_, weight)| *weight *= spec.scale);
    chosen
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut probs: Vec<f32> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let sum: f32 = probs.iter().sum();
    probs.iter_mut().for_each(|prob| *prob /= sum);
    probs
}

/// The places of the `count` highest of `ranks`, of equal ones the first.
fn by_rank(ranks: &[f32], count: usize) -> impl Iterator<Item = usize> + use<> {
    let mut places: Vec<usize> = (0..ranks.len()).collect();
    // Stable: equal ones stay in order.
    places.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    places.into_iter().take(count)
}

/// Leaves those of the groups whose best have the highest sums; the others come last.
fn keep_groups(ranks: &mut [f32], groups: ExpertGroups) {
    let size = ranks.len() / groups.count;
    let sums = ranks.chunks_exact(size).map(|group| {
        let best = by_rank(group, groups.best);
        best.map(|i| group[i]).sum::<f32>()
    });
    let sums: Vec<f32> = sums.collect();
    let kept: Vec<usize> = by_rank(&sums, groups.per_token).collect();
    for (i, group) in ranks.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&i) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::SPEC;
    use super::*;

    #[test]
    fn the_most_probable_experts_are_chosen_and_of_equal_ones_the_first() {
        let chosen = |logits: &[f32], spec: &ExpertsSpec| choose(logits, None, spec);
        let quarter = chosen(&[1., 1., 1., 1.], &SPEC);
        assert_eq!(quarter, [(0, 0.25), (1, 0.25)]);
        let ln = |p: f32| p.ln();
        let found = chosen(&[ln(0.1), ln(0.5), ln(0.1), ln(0.3)], &SPEC);
        let experts: Vec<u32> = found.iter().map(|(expert, _)| *expert).collect();
        assert_eq!(experts, [1, 3]);
        assert!((found[0].1 - 0.5).abs() < 1e-6 && (found[1].1 - 0.3).abs() < 1e-6);
        let normalized = ExpertsSpec {
            is_normalized: true,
            ..SPEC
        };
        let found = chosen(&[ln(0.1), ln(0.5), ln(0.1), ln(0.3)], &normalized);
        assert!((found[0].1 - 0.625).abs() < 1e-6 && (found[1].1 - 0.375).abs() < 1e-6);
        // Far below the highest, probabilities are equal: 0.
        let found = chosen(&[-900., -800., -700., 0.], &normalized);
        assert_eq!(found, [(3, 1.), (0, 0.)]);
    }

    /// The correction decides only which experts are chosen. It is not part of the weights.
    #[test]
    fn corrections_choose_and_do_not_weigh() {
        let spec = ExpertsSpec {
            scores: RouterScores::Sigmoid,
            scale: 3.,
            ..SPEC
        };
        let found = choose(&[0., 9., 0., 0.], Some(&[0., -2., 0., 0.1]), &spec);
        assert_eq!(found, [(3, 1.5), (0, 1.5)]);
        // Scores that are all 0 stay 0.
        let spec = ExpertsSpec {
            is_normalized: true,
            min_sum: 1e-20,
            ..spec
        };
        let found = choose(&[-200.; 4], None, &spec);
        assert_eq!(found, [(0, 0.), (1, 0.)]);
    }

    #[test]
    fn groups_are_chosen_by_their_best() {
        let spec = ExpertsSpec {
            scores: RouterScores::Sigmoid,
            count: 6,
            groups: Some(ExpertGroups {
                count: 3,
                per_token: 2,
                best: 2,
            }),
            ..SPEC
        };
        let chosen = |spec: &ExpertsSpec| -> Vec<u32> {
            let found = choose(&[4., -9., 1., 1., 2., 2.], None, spec);
            found.iter().map(|(expert, _)| *expert).collect()
        };
        // The best expert is in the worst group.
        assert_eq!(chosen(&spec), [4, 5]);
        let groups = spec.groups.map(|groups| ExpertGroups { best: 1, ..groups });
        assert_eq!(chosen(&ExpertsSpec { groups, ..spec }), [0, 4]);
    }
}
