mod block;

use super::{
    Dist, Draft, NoToken, Purpose, Rng, Verdict, coupled, rejection, synthetic_acceptance,
};
use crate::spec::draft::Source;
use foretoken_core::sampling::mix;

const P: [f32; 5] = [0.5, 0.2, 0.15, 0.1, 0.05];
const Q: [f32; 5] = [0.1, 0.1, 0.6, 0.0, 0.2];
const ROUNDS: u64 = 400_000;

/// p after `token` in the second position: depends on the first token, as a model's would.
fn conditional(base: [f32; 5], token: u32) -> Dist {
    let mut probs = base;
    probs.rotate_left(token as usize);
    Dist::Dense(probs.to_vec())
}

fn total_variation(counts: &[f64], theory: impl Fn(usize) -> f64) -> f64 {
    let n: f64 = counts.iter().sum();
    let distance = |(i, c): (usize, &f64)| (c / n - theory(i)).abs();
    counts.iter().enumerate().map(distance).sum::<f64>() / 2.0
}

/// Adds a token that was drawn from `q` to a chain.
fn push(draft: &mut Draft, token: u32, q: Dist) {
    draft.push(token, 0.5, Source::Model);
    draft.dists.push(q.into());
}

/// `rejection` with p by node: the first after the empty path, the next after node 0, and so on.
fn verify(draft: &Draft, target: &[Dist], rng: &Rng) -> Verdict {
    let after = |path: &[usize]| path.last().map_or(0, |node| node + 1);
    super::rejection(draft, |path| Ok(target[after(path)].clone()), rng).unwrap()
}

/// Drafts a chain of `k` tokens from Q, verifies it against P, and returns the output.
fn round(seed: u64, k: usize) -> Vec<u32> {
    let rng = Rng::at(mix(seed), 7);
    let mut draft = Draft::default();
    let mut target = vec![Dist::Dense(P.to_vec())];
    let mut q = Dist::Dense(Q.to_vec());
    for i in 0..k {
        let x = q.sample(rng.uniform(i, Purpose::Draft, 0));
        push(&mut draft, x, q);
        target.push(conditional(P, x));
        q = conditional(Q, x);
    }
    let verdict = verify(&draft, &target, &rng);
    let mut out: Vec<u32> = verdict.path.iter().map(|&i| draft.tokens[i]).collect();
    out.push(verdict.next);
    out
}

/// Sun et al. 2024, Theorem 1: the first output token is distributed as p for every K,
/// and so is the second given the first, whether the first was accepted or the round ended
/// there. The noise floor at these counts is below 0.003.
#[test]
fn tokens_are_distributed_as_the_target() {
    for k in [0, 1, 2, 4] {
        let mut first = [0.0; 5];
        let mut second = [[0.0; 5]; 5];
        for seed in 0..ROUNDS {
            let out = round(seed, k);
            first[out[0] as usize] += 1.0;
            if let Some(&next) = out.get(1) {
                second[out[0] as usize][next as usize] += 1.0;
            }
        }
        let tv = total_variation(&first, |i| P[i].into());
        assert!(tv < 0.005, "K = {k}: total variation {tv}");
        for (token, counts) in second.iter().enumerate() {
            if counts.iter().sum::<f64>() > 20_000.0 {
                let p = conditional(P, token as u32);
                let tv = total_variation(counts, |i| p.prob(i as u32));
                assert!(tv < 0.01, "K = {k} after {token}: total variation {tv}");
            }
        }
    }
}

/// A draft model may draw ids that the target does not have. Its draft ends there, which must not show:
/// in such a round the first token is no more distributed as p than after any other rejection.
#[test]
fn ids_that_the_target_does_not_have_are_rejected_like_others() {
    let q = Dist::Dense([&Q.map(|q| 0.6 * q)[..], &[0.3, 0.1]].concat());
    let (mut first, mut second, mut cut) = ([0.0; 5], [0.0; 5], 0);
    for seed in 0..ROUNDS {
        let rng = Rng::at(mix(seed), 3);
        let mut draft = Draft::default();
        for i in 0..2 {
            push(
                &mut draft,
                q.sample(rng.uniform(i, Purpose::Draft, 0)),
                q.clone(),
            );
        }
        draft.end_where_invalid(2, 2, P.len());
        cut += usize::from(draft.len() < 2);
        let target = vec![Dist::Dense(P.to_vec()); 3];
        let verdict = verify(&draft, &target, &rng);
        let accepted = verdict.path.iter().map(|&node| draft.tokens[node]);
        let tokens: Vec<u32> = accepted.chain([verdict.next]).collect();
        first[tokens[0] as usize] += 1.0;
        if let Some(&token) = tokens.get(1) {
            second[token as usize] += 1.0;
        }
    }
    assert!(cut as f64 > 0.5 * ROUNDS as f64, "{cut}");
    for counts in [first, second] {
        let tv = total_variation(&counts, |i| P[i].into());
        assert!(tv < 0.005, "total variation {tv}");
    }
}

/// The correction itself: if the first draft token was rejected, the sampled token follows
/// norm(max(0, p - q)).
#[test]
fn a_rejection_samples_the_residual() {
    let mut counts = [0.0; 5];
    for seed in 0..ROUNDS {
        let rng = Rng::at(mix(seed), 0);
        let q = Dist::Dense(Q.to_vec());
        let mut draft = Draft::default();
        push(&mut draft, q.sample(rng.uniform(0, Purpose::Draft, 0)), q);
        let p = Dist::Dense(P.to_vec());
        let verdict = verify(&draft, &[p.clone(), p], &rng);
        if verdict.path.is_empty() {
            counts[verdict.next as usize] += 1.0;
        }
    }
    // max(0, p - q) = 0.4, 0.1, 0, 0.1, 0 and its sum is the rejection probability.
    let tv = total_variation(&counts, |i| [0.4, 0.1, 0.0, 0.1, 0.0][i] / 0.6);
    assert!(tv < 0.005, "total variation {tv}");
    let rejected = counts.iter().sum::<f64>() / ROUNDS as f64;
    assert!((rejected - 0.6).abs() < 0.005, "rejected {rejected}");
}

#[test]
fn acceptance_is_the_overlap_of_p_and_q() {
    let accepted = (0..ROUNDS)
        .filter(|&seed| round(seed, 1).len() == 2)
        .count();
    let rate = accepted as f64 / ROUNDS as f64;
    let overlap: f32 = P.iter().zip(Q).map(|(p, q)| p.min(q)).sum();
    assert!(
        (rate - f64::from(overlap)).abs() < 0.005,
        "{rate} against {overlap}"
    );
}

/// q without token `x`, normalized.
fn without(q: &Dist, x: u32) -> Dist {
    q.residual(&Dist::Point(x)).unwrap()
}

/// The first token of a tree of `siblings` roots, each drawn from Q, or without replacement.
fn first_of_siblings(seed: u64, siblings: usize, replace: bool) -> u32 {
    let rng = Rng::at(mix(seed), 0);
    let mut q = Dist::Dense(Q.to_vec());
    let mut draft = Draft::default();
    let mut target = vec![Dist::Dense(P.to_vec())];
    for sibling in 0..siblings {
        let token = q.sample(rng.uniform(0, Purpose::Draft, sibling));
        draft.add(token, None, 0.5, Source::Model);
        draft.dists.push(q.clone().into());
        target.push(conditional(P, token));
        if !replace {
            q = without(&q, token);
        }
    }
    let verdict = verify(&draft, &target, &rng);
    let first = verdict.path.first();
    first.map_or(verdict.next, |&node| draft.tokens[node])
}

/// Siblings drawn independently (SpecInfer), or without replacement (Sequoia).
#[test]
fn siblings_keep_the_distribution() {
    for (siblings, replace) in [(2, true), (2, false), (3, false)] {
        let mut counts = [0.0; 5];
        for seed in 0..ROUNDS {
            counts[first_of_siblings(seed, siblings, replace) as usize] += 1.0;
        }
        let tv = total_variation(&counts, |i| P[i].into());
        assert!(tv < 0.005, "{siblings}, {replace}: total variation {tv}");
    }
}

/// The walk follows the target's tokens, whatever else is in the tree.
#[test]
fn the_coupled_rule_accepts_what_the_target_draws() {
    let mut draft = Draft::default();
    let first = draft.add(4, None, 0.5, Source::Pool);
    let right = draft.add(7, None, 0.4, Source::Model);
    draft.add(1, Some(first), 0.3, Source::Own);
    let deep = draft.add(9, Some(right), 0.3, Source::Own);
    let drawn = [7, 9, 5];
    let target = |path: &[usize]| Ok::<_, ()>(drawn[path.len()]);
    let verdict = coupled(&draft, target).unwrap();
    let path = vec![usize::from(right), usize::from(deep)];
    assert_eq!((verdict.path, verdict.next, verdict.tested), (path, 5, 2));
    let none = coupled(&draft, |_| Ok::<_, ()>(8)).unwrap();
    assert_eq!((none.path, none.next, none.tested), (vec![], 8, 1));
    let empty = coupled(&Draft::default(), |_| Ok::<_, ()>(8)).unwrap();
    assert_eq!((empty.path, empty.next, empty.tested), (vec![], 8, 0));
}

/// Where the target has no token, the round ends before: only a text without a next token fails.
#[test]
fn a_round_ends_where_the_target_has_no_token() {
    let mut draft = Draft::default();
    push(&mut draft, 7, Dist::Point(7));
    push(&mut draft, 9, Dist::Point(9));
    let rng = Rng::at(0, 0);
    let drawn = [7, 9, 5];
    for (tokens, want) in [
        (0, None),
        (1, Some((vec![], 7, 1))),
        (2, Some((vec![0], 9, 2))),
        (3, Some((vec![0, 1], 5, 2))),
    ] {
        let token = |path: &[usize]| {
            if path.len() < tokens {
                Ok(drawn[path.len()])
            } else {
                Err(NoToken::AllForbidden)
            }
        };
        let dist = |path: &[usize]| token(path).map(Dist::Point);
        for verdict in [coupled(&draft, token), rejection(&draft, dist, &rng)] {
            let verdict = verdict.map(|found| (found.path, found.next, found.tested));
            assert_eq!(verdict, want.clone().ok_or(NoToken::AllForbidden));
        }
    }
}

#[test]
fn greedy_is_exact_match() {
    let points = |tokens: &[u32]| tokens.iter().map(|&t| Dist::Point(t)).collect::<Vec<_>>();
    let mut draft = Draft::default();
    [3, 1, 4]
        .into_iter()
        .for_each(|t| push(&mut draft, t, Dist::Point(t)));
    let rng = Rng::at(0, 0);
    let all = verify(&draft, &points(&[3, 1, 4, 9]), &rng);
    assert_eq!((all.path, all.next, all.tested), (vec![0, 1, 2], 9, 3));
    let one = verify(&draft, &points(&[3, 7, 4, 9]), &rng);
    assert_eq!((one.path, one.next, one.tested), (vec![0], 7, 2));
    let none = verify(&Draft::default(), &points(&[5]), &rng);
    assert_eq!((none.path, none.next, none.tested), (vec![], 5, 0));
}

#[test]
fn equal_distributions_accept_always() {
    for seed in 0..1000 {
        let rng = Rng { seed, position: 0 };
        let p = Dist::Dense(P.to_vec());
        let mut draft = Draft::default();
        push(
            &mut draft,
            p.sample(rng.uniform(0, Purpose::Draft, 0)),
            p.clone(),
        );
        assert_eq!(verify(&draft, &[p.clone(), p], &rng).path, [0]);
    }
}

/// One draft that the target would mostly reject, and one that it would always accept:
/// synthetic acceptance keeps i tokens of both with probability rate^i, and the next token is
/// distributed as p.
#[test]
fn by_chance_acceptance_follows_the_rate_alone() {
    const K: usize = 4;
    const RATE: f64 = 0.7;
    for drafted in [Dist::Point(3), Dist::Dense(P.to_vec())] {
        let mut reached = [0.0; K + 1];
        let mut tested = 0;
        let mut next = [0.0; 5];
        for seed in 0..ROUNDS / 4 {
            let rng = Rng::at(mix(seed), 7);
            let mut draft = Draft::default();
            (0..K).for_each(|_| push(&mut draft, 3, drafted.clone()));
            let target = |_: &[usize]| Ok(Dist::Dense(P.to_vec()));
            let verdict = synthetic_acceptance(&draft, RATE, target, &rng).unwrap();
            (0..=verdict.path.len()).for_each(|i| reached[i] += 1.0);
            tested += verdict.tested;
            next[verdict.next as usize] += 1.0;
        }
        for (i, count) in reached.iter().enumerate() {
            let share = count / reached[0];
            let theory = RATE.powi(i as i32);
            assert!((share - theory).abs() < 0.006, "{i} tokens: {share}");
        }
        let alpha = reached[1..].iter().sum::<f64>() / tested as f64;
        assert!((alpha - RATE).abs() < 0.005, "alpha {alpha}");
        let tv = total_variation(&next, |i| P[i].into());
        assert!(tv < 0.01, "total variation {tv}");
    }
}

/// It evaluates the paths that it accepts, in their order, and nothing after a rejection.
#[test]
fn by_chance_the_target_is_asked_for_what_was_accepted() {
    let mut draft = Draft::default();
    (0..3).for_each(|token| push(&mut draft, token, Dist::Point(token)));
    for seed in 0..100 {
        let rng = Rng { seed, position: 0 };
        let mut asked = Vec::new();
        let target = |path: &[usize]| {
            asked.push(path.to_vec());
            Ok(Dist::Point(9))
        };
        let verdict = synthetic_acceptance(&draft, 0.5, target, &rng).unwrap();
        let want: Vec<Vec<usize>> = (0..=verdict.path.len()).map(|n| (0..n).collect()).collect();
        assert_eq!((asked, verdict.next), (want, 9));
    }
    let rng = Rng::at(0, 0);
    let target = |_: &[usize]| Ok(Dist::Point(9));
    let all = synthetic_acceptance(&draft, 1.0, target, &rng).unwrap();
    assert_eq!((all.path, all.tested), (vec![0, 1, 2], 3));
    let none = synthetic_acceptance(&draft, 0.0, target, &rng).unwrap();
    assert_eq!((none.path, none.tested), (vec![], 1));
    let empty = synthetic_acceptance(&Draft::default(), 1.0, target, &rng).unwrap();
    assert_eq!((empty.path, empty.tested), (vec![], 0));
}
