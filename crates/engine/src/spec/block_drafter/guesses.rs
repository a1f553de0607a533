//! Drafts of a head or model that follows no paths: its guesses for each depth are the same after every path.

use super::drawn::RowDraws;
use super::product::{self, LevelCandidate, ProductLimits};
use super::{BlockDrafter, BlockRequest};
use crate::spec::acceptance_model::{AcceptanceView, Estimate, Level};
use crate::spec::draft::{Draft, DraftDist, DraftRequest};
use crate::spec::growth::guesses;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::model::ForwardOutput;
use foretoken_core::sampling::Guess;
use foretoken_kernels::parallel;

/// The guesses for one request.
#[derive(Default)]
struct Guessed {
    draft: Draft,
    levels: Vec<Level>,
}

impl BlockDrafter {
    /// The draft of each round, from the logits of its block.
    fn guess(
        &self,
        requests: &mut [DraftRequest<'_>],
        rounds: &[BlockRequest],
        mut logits: &[f32],
    ) -> Vec<Guessed> {
        let vocab_size = self.pool.network.draft.model().info().vocab_size;
        let (mut parts, mut rounds) = (Vec::with_capacity(rounds.len()), rounds.iter().peekable());
        for (place, request) in requests.iter_mut().enumerate() {
            if let Some(round) = rounds.next_if(|round| round.place == place)
                && let Some(sequence) = self.pool.sequences.get(&request.id)
            {
                let (rows, rest) = logits.split_at(round.depth * vocab_size);
                logits = rest;
                let acceptance = &self.pool.acceptance;
                let view = acceptance.view(&sequence.history, request.is_sampled());
                parts.push((request, view, rows));
            }
        }
        parallel::map(&mut parts, |(request, view, rows)| {
            guess_all(request, view, rows.chunks(vocab_size))
        })
    }

    /// As [`guess`](Self::guess), but a GPU draws the tokens of all rows at once, and only these are copied. No token changes
    /// how those after it are drawn.
    fn guess_on_gpu(
        &self,
        requests: &mut [DraftRequest<'_>],
        rounds: &[BlockRequest],
        logits: &Tensor,
    ) -> Result<Vec<Guessed>> {
        let mut draws = RowDraws::default();
        for round in rounds {
            let request = &mut requests[round.place];
            let output_len = request.sampler.output_len();
            for depth in 0..round.depth {
                let (choice, width) = (request.choice(depth), request.max_siblings());
                draws.push(request.sampler, choice, width);
                request.sampler.push_unknown();
            }
            request.sampler.truncate(output_len);
        }
        let (drawn, mut first) = (draws.run(logits)?, 0);
        let guessed = rounds.iter().map(|round| {
            let (request, rows) = (&requests[round.place], first..first + round.depth);
            first = rows.end;
            let Some(sequence) = self.pool.sequences.get(&request.id) else {
                return Guessed::default();
            };
            let acceptance = &self.pool.acceptance;
            let view = acceptance.view(&sequence.history, request.is_sampled());
            let (mut levels, mut dists) = (Vec::new(), Vec::new());
            for row in rows {
                let guesses = drawn.guesses(row, request.max_siblings(), &mut dists);
                if guesses.is_empty() {
                    break;
                }
                levels.push(level_of(&guesses, &view));
            }
            from_levels(request, levels, dists)
        });
        Ok(guessed.collect())
    }

    /// The draft of each round, from a forward's `output`. The sequences remember their guesses.
    pub(super) fn guess_rounds(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        rounds: &[BlockRequest],
        output: &ForwardOutput,
    ) -> Result<Vec<Draft>> {
        let is_drawn = |round: &BlockRequest| {
            let request = &requests[round.place];
            RowDraws::takes(request) && !request.sampler.depends_on_tokens()
        };
        let guessed = if output.is_on_gpu() && rounds.iter().all(is_drawn) {
            self.guess_on_gpu(requests, rounds, &output.logits)?
        } else {
            output.read(|logits| self.guess(requests, rounds, logits))?
        };
        let (network, sequences) = (&self.pool.network, &mut self.pool.sequences);
        let drafts = rounds.iter().zip(guessed).map(|(round, guessed)| {
            let request = &requests[round.place];
            if let Some(sequence) = sequences.get_mut(&request.id)
                && round.depth > 0
            {
                let tokens = network.tokens_of(sequence, request.tokens);
                let (history, sampled) = (&mut sequence.history, request.is_sampled());
                history.propose_levels(tokens, sampled, guessed.levels);
            }
            guessed.draft
        });
        Ok(drafts.collect())
    }
}

/// The draft of a request whose block has the logits `rows`, of a head that follows no paths.
///
/// A tree's guesses for a depth are the same after every path. Penalties, which do depend on the path, see
/// the most probable guesses before it; those of a chain are its path. It is only a draft.
fn guess_all<'a>(
    request: &mut DraftRequest<'_>,
    view: &AcceptanceView<'_>,
    rows: impl Iterator<Item = &'a [f32]>,
) -> Guessed {
    let width = request.max_siblings();
    let output_len = request.sampler.output_len();
    let (mut levels, mut dists) = (Vec::new(), Vec::<DraftDist>::new());
    for (depth, row) in rows.enumerate() {
        let choice = request.choice(depth);
        let guesses = guesses(row, request.sampler, choice, width, &mut dists);
        let Some(first) = guesses.first() else {
            break;
        };
        request.sampler.push(first.token);
        levels.push(level_of(&guesses, view));
    }
    request.sampler.truncate(output_len);
    from_levels(request, levels, dists)
}

/// A level of these guesses.
fn level_of(guesses: &[Guess], view: &AcceptanceView<'_>) -> Level {
    let ranked = guesses.iter().enumerate();
    let level = ranked.map(|(rank, guess)| (guess.token, view.estimate(rank, guess.prob)));
    level.collect()
}

/// The draft of a request whose block has these levels. Of a chain whose tokens were drawn, `dists` are the distributions.
fn from_levels(
    request: &DraftRequest<'_>,
    levels: Vec<Level>,
    mut dists: Vec<DraftDist>,
) -> Guessed {
    let candidates = levels.iter().map(|level| {
        let candidate = |&(token, estimate): &(u32, Estimate)| LevelCandidate {
            token,
            prob: estimate.adjusted,
        };
        let mut level: Vec<LevelCandidate> = level.iter().map(candidate).collect();
        level.sort_by(|a, b| b.prob.total_cmp(&a.prob));
        level
    });
    let limits = ProductLimits {
        nodes: request.nodes,
        width: request.max_siblings(),
        min_score: request.min_score,
    };
    let mut draft = product::tree(&candidates.collect::<Vec<_>>(), &limits);
    dists.truncate(draft.len());
    draft.dists = dists;
    Guessed { draft, levels }
}
