//! The acceptance rules. Pure: no model, no tensors.

use super::draft::Draft;
use foretoken_core::sampling::{Dist, NoToken, Purpose, Rng};
use std::borrow::Cow;
use std::hint::black_box;

/// The accepted part of a draft, and the token that the target adds to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted nodes, from the root down.
    pub path: Vec<usize>,
    /// The token after them: corrected after a rejection, otherwise a bonus.
    pub next: u32,
    /// Nodes whose acceptance was decided.
    pub tested: usize,
    /// Nodes of `path` that stand by a lossy rule alone.
    pub lossy: Vec<usize>,
}

impl Verdict {
    /// The verdict of a lossless rule.
    fn exact(path: Vec<usize>, next: u32, tested: usize) -> Self {
        let lossy = Vec::new();
        Self {
            path,
            next,
            tested,
            lossy,
        }
    }
}

/// Accepts the draft tokens that are the target's own: walks down the tree along the tokens that the
/// target draws with each position's own random numbers (Daliri, Musco and Suresh 2024, arXiv
/// 2408.07978). So the draft has no influence on the tokens.
///
/// `target(path)` is the token that the target draws after the accepted nodes of `path`. It is called
/// with the empty path first, then with one more node each time.
///
/// # Errors
/// The error of `target` for the empty path. After a draft token an error only ends the round: the text may have
/// ended there, and if not, the next step says why it cannot go on.
pub fn coupled<E>(
    draft: &Draft,
    mut target: impl FnMut(&[usize]) -> Result<u32, E>,
) -> Result<Verdict, E> {
    lossy(draft, |path, _| Ok((target(path)?, None)))
}

/// The coupled rule, relaxed: where no child of the path is the token that the target draws, one of them may
/// stand nonetheless (see [`LossyRule`](foretoken_core::sampling::LossyRule)).
///
/// `target(path, children)` is the token that the target draws, and the child that stands in its place, if
/// one does and none has that token.
///
/// # Errors
/// See [`coupled`].
pub fn lossy<E>(
    draft: &Draft,
    mut target: impl FnMut(&[usize], &[usize]) -> Result<(u32, Option<usize>), E>,
) -> Result<Verdict, E> {
    let mut so_far = Verdict::default();
    loop {
        let path = &so_far.path;
        let children: Vec<usize> = draft.children(path.last().copied()).collect();
        let (next, stands) = match target(path, &children) {
            Ok(chosen) => chosen,
            Err(error) => return without_next(draft, so_far).ok_or(error),
        };
        // One decision a depth, as for a chain: siblings exclude each other.
        so_far.tested += usize::from(!children.is_empty());
        let drawn = children
            .into_iter()
            .find(|&node| draft.tokens[node] == next);
        let Some(node) = drawn.or(stands) else {
            return Ok(Verdict { next, ..so_far });
        };
        so_far.path.push(node);
        if drawn.is_none() {
            so_far.lossy.push(node);
        }
    }
}

/// The verdict where the target has no token after the path of `so_far`: its last node is the round's last token.
/// `None` if the path is empty.
fn without_next(draft: &Draft, mut so_far: Verdict) -> Option<Verdict> {
    let last = so_far.path.pop()?;
    so_far.lossy.retain(|&node| node != last);
    so_far.next = draft.tokens[last];
    Some(so_far)
}

/// Accepts or corrects a draft so that the output has exactly the target's distribution: a chain as a `Block`, a
/// tree token by token (`tree`). With point distributions both are greedy decoding: exact match.
///
/// `target(path)` is p after the nodes of `path`. It is called with the empty path first, then with one more node each
/// time.
///
/// `rng.position` is the position of the token that follows the sequence's last one.
///
/// # Errors
/// See [`coupled`].
pub fn rejection(
    draft: &Draft,
    target: impl FnMut(&[usize]) -> Result<Dist, NoToken>,
    rng: &Rng,
) -> Result<Verdict, NoToken> {
    if !draft.is_drawn_as_chain() {
        return tree(draft, target, rng);
    }
    let block = Block::new(draft, target)?;
    let mut len = block.weights.len() - 1;
    let mut end = block.end(len);
    while len > 0 && rng.uniform(len - 1, Purpose::Accept, 0) >= end.stands {
        len -= 1;
        end = block.end(len);
    }
    let tested = draft.len().min(len + usize::from(end.next.is_some()));
    let so_far = Verdict::exact((0..len).collect(), 0, tested);
    match end.next {
        None => without_next(draft, so_far).ok_or(NoToken::NotFinite),
        Some(next) => Ok(Verdict {
            next: next.sample(rng.uniform(len, Purpose::Sample, 0)),
            ..so_far
        }),
    }
}

/// Block verification of a chain (Sun et al. 2024, arXiv 2403.10444, Algorithm 2). It accepts at least as many tokens as
/// verification token by token, on average, and more if the chain has several tokens that were drawn from a model.
///
/// Let a path of i tokens have the weight w(i) = min(1, w(i - 1) p(x) / q(x)), with w(0) = 1 and x the path's last
/// token. The rule lets at least i tokens of a draft stand with probability w(i), given these tokens. The longest path
/// of which [`End::stands`] says so stands. The token after it is drawn from norm(max(0, w(i) p - q)).
struct Block<'a> {
    draft: &'a Draft,
    /// The weights of the paths of 0, 1, ... tokens, down to the last that is possible.
    weights: Vec<f64>,
    /// p after each of them. The last path lacks it if the text can end there, or the step's next round says why not.
    target: Vec<Dist>,
}

/// What follows a path if it is the longest that stands.
struct End {
    /// Probability that the path stands if no longer one does.
    stands: f64,
    /// The distribution of the token after the path; `None` = the target has none there.
    next: Option<Dist>,
}

impl<'a> Block<'a> {
    /// # Errors
    /// The error of `target` for the empty path.
    fn new(
        draft: &'a Draft,
        mut after: impl FnMut(&[usize]) -> Result<Dist, NoToken>,
    ) -> Result<Self, NoToken> {
        let (mut path, mut weights, mut target) = (Vec::new(), vec![1.0], vec![after(&[])?]);
        for (node, &token) in draft.tokens.iter().enumerate() {
            let p = target[node].prob(token);
            if p <= 0.0 {
                break;
            }
            let q = draft.dist(node).on_host().prob(token);
            weights.push((weights[node] * (p / q)).min(1.0));
            path.push(node);
            match after(&path) {
                Ok(p) => target.push(p),
                Err(_) => break,
            }
        }
        Ok(Self {
            draft,
            weights,
            target,
        })
    }

    /// What follows the path of `len` tokens.
    fn end(&self, len: usize) -> End {
        let weight = self.weights[len];
        let Some(p) = self.target.get(len) else {
            let (stands, next) = (weight, None);
            return End { stands, next };
        };
        // The distribution that the token after the path was drawn from.
        let q = if len < self.draft.len() {
            Some(self.draft.dist(len))
        } else {
            let rejected = self.draft.rejected.as_ref();
            rejected.map(|node| Cow::Borrowed(&node.dist))
        };
        let (rest, mass) = match q {
            None => (None, weight),
            Some(q) => p.weighted_residual(weight, q.on_host()),
        };
        End {
            // 0 / 0 only where all that was drafted after it stands, too.
            stands: if weight < 1.0 {
                mass / (mass + 1.0 - weight)
            } else {
                1.0
            },
            // If rounding leaves nothing of p - q, p and q are equal: p itself is right.
            next: Some(rest.unwrap_or_else(|| p.clone())),
        }
    }
}

/// Accepts or corrects a tree token by token (Leviathan et al. 2023, Algorithm 1 and Appendix A.1).
///
/// A node x with draft probability q(x) is accepted with probability `min(1, p(x) / q(x))`. After a rejection, p
/// becomes `norm(max(0, p - q))` and the next sibling is tried against that (SpecInfer, Miao et al.
/// 2024, Algorithm 2); if no sibling is left, the token is sampled from it. Siblings drawn without
/// replacement each have the q that is left after the earlier ones (Sequoia, Chen et al. 2024,
/// Algorithm 2). `target` is never called for what comes after a rejection.
///
/// # Errors
/// See [`coupled`].
fn tree(
    draft: &Draft,
    mut target: impl FnMut(&[usize]) -> Result<Dist, NoToken>,
    rng: &Rng,
) -> Result<Verdict, NoToken> {
    let mut path = Vec::new();
    let mut tested = 0;
    'accepted: loop {
        let mut p = match target(&path) {
            Ok(p) => p,
            Err(error) => {
                return without_next(draft, Verdict::exact(path, 0, tested)).ok_or(error);
            }
        };
        for (sibling, node) in draft.children(path.last().copied()).enumerate() {
            let (x, q) = (draft.tokens[node], draft.dist(node));
            let q = q.on_host();
            let u = rng.uniform(path.len(), Purpose::Accept, sibling);
            // Of siblings one decision.
            tested += usize::from(sibling == 0);
            if u * q.prob(x) < p.prob(x) {
                path.push(node);
                continue 'accepted;
            }
            // If rounding leaves nothing of p - q, p and q are equal: p itself is right.
            if let Some(rest) = p.residual(q) {
                p = rest;
            }
        }
        // The p of its token is 0.
        if let Some(node) = &draft.rejected
            && node.parent.map(usize::from) == path.last().copied()
            && let Some(rest) = p.residual(node.dist.on_host())
        {
            p = rest;
        }
        let next = p.sample(rng.uniform(path.len(), Purpose::Sample, 0));
        return Ok(Verdict::exact(path, next, tested));
    }
}

/// Accepts each token of a chain, or of a tree's first branch, with probability `rate`, whatever
/// the models say. This measures the speed of a pair at an acceptance rate that its weights do not
/// reach. The output does *not* have the target's distribution: use it for measurements only.
///
/// Otherwise it takes the same time as verification token by token: it calls `target` with the same paths and
/// samples the last token from the result (not from the residual of p and q, which is still
/// computed).
///
/// # Errors
/// The error of `target`.
pub fn synthetic_acceptance(
    draft: &Draft,
    rate: f64,
    mut target: impl FnMut(&[usize]) -> Result<Dist, NoToken>,
    rng: &Rng,
) -> Result<Verdict, NoToken> {
    let mut path = Vec::new();
    let mut tested = 0;
    let mut p = target(&path)?;
    while let Some(node) = draft.children(path.last().copied()).next() {
        tested += 1;
        if rng.uniform(path.len(), Purpose::Accept, 0) >= rate {
            black_box(p.residual(draft.dist(node).on_host()));
            break;
        }
        path.push(node);
        p = target(&path)?;
    }
    let next = p.sample(rng.uniform(path.len(), Purpose::Sample, 0));
    Ok(Verdict::exact(path, next, tested))
}

#[cfg(test)]
mod tests;
