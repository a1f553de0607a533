//! The acceptance rules. Pure: no model, no tensors.

use super::draft::Draft;
use foretoken_core::sampling::{Dist, NoToken, Purpose, Rng};
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

/// Accepts or corrects a draft so that the output has exactly the target's distribution (Leviathan
/// et al. 2023, Algorithm 1 and Appendix A.1).
///
/// `target(path)` is p after the accepted nodes of `path`. It is called with the empty path first,
/// then with one more node each time, and never for what comes after a rejection. A node x with
/// draft probability q(x) is accepted with probability `min(1, p(x) / q(x))`. After a rejection, p
/// becomes `norm(max(0, p - q))` and the next sibling is tried against that (SpecInfer, Miao et al.
/// 2024, Algorithm 2); if no sibling is left, the token is sampled from it. Siblings drawn without
/// replacement each have the q that is left after the earlier ones (Sequoia, Chen et al. 2024,
/// Algorithm 2). With point distributions this is greedy decoding: exact match.
///
/// `rng.position` is the position of the token that follows the sequence's last one.
///
/// # Errors
/// See [`coupled`].
pub fn rejection(
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
            tested += 1;
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
        if let Some((parent, q)) = &draft.rejected
            && parent.map(usize::from) == path.last().copied()
            && let Some(rest) = p.residual(q.on_host())
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
/// Otherwise it takes the same time as [`rejection`]: it calls `target` with the same paths and
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
