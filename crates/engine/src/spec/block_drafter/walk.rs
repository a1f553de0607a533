//! Drafting along paths with a head whose guesses depend on the tokens before them in its block.

use super::BlockRequest;
use super::drawn::RowDraws;
use crate::spec::acceptance_model::AcceptanceView;
use crate::spec::draft::DraftRequest;
use crate::spec::growth::{Grown, Growth, GrowthLimits};
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::model::{ForwardOutput, Head, PathRows};
use foretoken_core::sampling::{Guess, Sampler};
use foretoken_kernels::{parallel, pick_rows};

/// One request's draft, which grows level by level.
struct Walk<'a, 'b> {
    request: &'a mut DraftRequest<'b>,
    view: AcceptanceView<'a>,
    growth: Growth,
    limits: GrowthLimits,
    /// Number of levels that the block has.
    depth: usize,
    /// The block's first row among those of all blocks.
    first_row: usize,
    /// For each path to go on with, its row in the step before.
    rows_before: Vec<u32>,
    has_ended: bool,
}

impl<'a, 'b> Walk<'a, 'b> {
    /// A draft of nothing, whose block begins with `first_row`.
    fn new((request, round, view): Part<'a, 'b>, first_row: usize) -> Self {
        let (width, depth) = (request.max_siblings(), round.depth);
        let nodes = if width == 1 {
            request.nodes.min(depth)
        } else {
            request.nodes
        };
        let limits = GrowthLimits {
            nodes,
            width,
            min_score: request.min_score,
        };
        Self {
            request,
            view,
            growth: Growth::default(),
            limits,
            depth,
            first_row,
            rows_before: Vec::new(),
            has_ended: nodes == 0,
        }
    }

    fn is_open(&self, level: usize) -> bool {
        !self.has_ended && level < self.depth
    }

    fn token(&self, parent: Option<u16>) -> u32 {
        let last = self.request.tokens[self.request.tokens.len() - 1];
        parent.map_or(last, |node| self.growth.token(node))
    }

    /// The guesses of a level after each of its paths, whose rows have these logits.
    fn guesses(&mut self, level: usize, logits: &[f32], vocab_size: usize) -> Vec<Vec<Guess>> {
        let (choice, width) = (self.request.choice(level), self.limits.width);
        let parents = self.growth.parents().into_iter();
        let guess = |(parent, row)| {
            let sampler = &mut *self.request.sampler;
            (self.growth).guess(parent, row, sampler, choice, width)
        };
        parents.zip(logits.chunks(vocab_size)).map(guess).collect()
    }

    /// Adds the draws of a level after each of its paths, for a GPU.
    fn push_draws(&mut self, level: usize, draws: &mut RowDraws) {
        let (choice, width) = (self.request.choice(level), self.limits.width);
        for parent in self.growth.parents() {
            let draw = |sampler: &mut Sampler| draws.push(sampler, choice, width);
            (self.request.sampler).after(&self.growth.path(parent), draw);
        }
    }

    /// Adds the guesses of a level after each of its paths, whose rows have these confidences; `first_step_row` is the row
    /// of its first path in the step.
    fn expand(
        &mut self,
        level: usize,
        guesses: Vec<Vec<Guess>>,
        confidence: Option<&[f32]>,
        first_step_row: u32,
    ) {
        let first = self.growth.draft.len();
        let mut step_row_of = Vec::new();
        let parents = self.growth.parents().into_iter().zip(guesses);
        for (row, (parent, guesses)) in parents.enumerate() {
            let sure = confidence.and_then(|all| all.get(row).copied());
            let guesses = match sure {
                Some(sure) => confident(&guesses, sure),
                None => guesses,
            };
            self.growth.add(parent, &guesses, &self.view);
            let step_row = first_step_row + row as u32;
            step_row_of.extend(std::iter::repeat_n(step_row, guesses.len()));
        }
        let last = self.growth.draft.len();
        let deeper = level + 1 < self.depth;
        self.growth
            .open_level(if deeper { first } else { last }, &self.limits);
        let open = self.growth.open().iter();
        self.rows_before = open
            .map(|&node| step_row_of[usize::from(node) - first])
            .collect();
        self.has_ended = self.growth.open().is_empty();
    }
}

/// The guesses with the head's own opinion of the first: that it stands with probability `sure`. The others
/// share the rest.
fn confident(guesses: &[Guess], sure: f32) -> Vec<Guess> {
    let Some((first, others)) = guesses.split_first() else {
        return Vec::new();
    };
    let rest = (1.0 - sure) / (1.0 - first.prob).max(f32::MIN_POSITIVE);
    let others = others.iter().map(|guess| Guess {
        prob: (guess.prob * rest).min(1.0 - sure),
        ..*guess
    });
    let first = Guess {
        prob: sure,
        ..*first
    };
    std::iter::once(first).chain(others).collect()
}

/// A request with its round, and the estimates for it.
pub type Part<'a, 'b> = (&'a mut DraftRequest<'b>, BlockRequest, AcceptanceView<'a>);

/// The drafts of `parts`, whose blocks have the rows of `output`, one after the other. All paths of all
/// requests take a level together.
///
/// # Errors
/// If the device fails.
pub fn walk(
    head: &dyn Head,
    output: &ForwardOutput,
    parts: Vec<Part<'_, '_>>,
) -> Result<Vec<Grown>> {
    let Some(hidden) = &output.path_hidden else {
        return Ok(Vec::new());
    };
    let mut first_row = 0;
    let walks = parts.into_iter().map(|part| {
        let walk = Walk::new(part, first_row);
        first_row += walk.depth;
        walk
    });
    let mut walks: Vec<Walk<'_, '_>> = walks.collect();
    let levels = walks.iter().map(|walk| walk.depth).max().unwrap_or(0);
    let vocab_size = head.info().vocab_size;
    let mut states: Option<Tensor> = None;
    for level in 0..levels {
        let (mut rows, mut before, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for walk in walks.iter().filter(|walk| walk.is_open(level)) {
            for parent in walk.growth.parents() {
                rows.push((walk.first_row + level) as u32);
                tokens.push(walk.token(parent));
            }
            before.extend(&walk.rows_before);
        }
        if rows.is_empty() {
            break;
        }
        let pick = |all: &Tensor, rows: &[u32]| -> Result<Tensor> {
            let rows = Tensor::new(rows, all.device())?;
            Ok(pick_rows(all, &rows)?)
        };
        let of_paths = match states {
            Some(states) if level > 0 => Some(pick(&states, &before)?),
            _ => None,
        };
        let next = head.follow(&PathRows {
            logits: &pick(&output.logits, &rows)?,
            hidden: &pick(hidden, &rows)?,
            tokens: &tokens,
            level,
            states: of_paths.as_ref(),
        })?;
        states = next.states;
        let (mut work, mut row) = (Vec::new(), 0);
        for walk in walks.iter_mut().filter(|walk| walk.is_open(level)) {
            let end = row + walk.growth.parents().len();
            let confidence = next.confidence.as_ref().map(|all| &all[row..end]);
            work.push((walk, row..end, confidence));
            row = end;
        }
        let output = ForwardOutput::of(next.logits);
        let is_drawn =
            output.is_on_gpu() && (work.iter()).all(|(walk, _, _)| RowDraws::takes(walk.request));
        if is_drawn {
            let mut draws = RowDraws::default();
            for (walk, _, _) in &mut work {
                walk.push_draws(level, &mut draws);
            }
            let drawn = draws.run(&output.logits)?;
            for (walk, rows, confidence) in work {
                let (first, width) = (rows.start as u32, walk.limits.width);
                let dists = &mut walk.growth.draft.dists;
                let guesses = rows.map(|row| drawn.guesses(row, width, dists));
                let guesses = guesses.collect();
                walk.expand(level, guesses, confidence, first);
            }
            continue;
        }
        output.read(|logits| {
            parallel::map(&mut work, |(walk, rows, confidence)| {
                let logits = &logits[rows.start * vocab_size..rows.end * vocab_size];
                let guesses = walk.guesses(level, logits, vocab_size);
                walk.expand(level, guesses, *confidence, rows.start as u32);
            });
        })?;
    }
    let grown = walks.into_iter();
    Ok(grown.map(|walk| walk.growth.finish(&walk.limits)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confident_head_decides_what_its_guesses_are_worth() {
        let guess = |token, prob| Guess { token, prob };
        let guesses = [guess(1, 0.6), guess(2, 0.3), guess(3, 0.1)];
        let found: Vec<f32> = confident(&guesses, 0.2).iter().map(|g| g.prob).collect();
        for (found, wanted) in found.iter().zip([0.2, 0.6, 0.2]) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
        let sure = confident(&[guess(1, 1.0), guess(2, 0.0)], 0.5);
        assert!(sure.iter().all(|g| (0.0..=0.5).contains(&g.prob)));
        assert!(confident(&[], 0.5).is_empty());
    }
}
