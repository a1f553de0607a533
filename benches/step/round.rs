//! What a round of speculative decoding costs beside the forward of its rows and the choice of their tokens, and beside
//! the forwards of a head: asking for a draft, hidden states for the head, verifying, moving K and V, observing what stands.

use crate::{BLOCK_SIZE, PROMPT_ROWS, greedy};
use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, Model};
use foretoken::sampling::{Sampler, distribution};
use foretoken::spec::{
    BudgetMode, Committed, DraftContext, Drafter, SequenceState, SpeculativeRunner, StepInput,
};
use std::time::Instant;

/// Rounds of a text, if all drafts stand, and texts.
const ROUNDS: usize = 32;
const TEXTS: usize = 6;

/// A sequence that the runner continues. Its request predicts the text, so that tables always have a draft.
struct Rounds {
    runner: SpeculativeRunner,
    blocks: BlockAllocator,
    state: SequenceState,
}

impl Rounds {
    fn new(
        target: Box<dyn Model>,
        drafter: Box<dyn Drafter>,
        text: &[u32],
        prompt_len: usize,
    ) -> Self {
        let num_blocks = (text.len() + PROMPT_ROWS).div_ceil(BLOCK_SIZE);
        let mode = BudgetMode::Fixed;
        let runner = SpeculativeRunner::new(target, vec![drafter], mode, num_blocks, BLOCK_SIZE);
        let state = SequenceState {
            draft_context: DraftContext {
                prediction: text[prompt_len..].into(),
                ..DraftContext::default()
            },
            ..SequenceState::new(0, text[..prompt_len].to_vec(), greedy())
        };
        Self {
            runner: runner.expect("there is memory"),
            blocks: BlockAllocator::new(num_blocks, BLOCK_SIZE),
            state,
        }
    }

    /// A step of `rows` pending tokens and a draft of at most `nodes`. Returns its seconds without a head's forwards, and the
    /// tokens that were drafted.
    fn step(&mut self, rows: usize, nodes: usize) -> (f64, usize) {
        let before = self.state.kv_len;
        let state = &mut self.state;
        let reserved = (self.blocks).reserve(&mut state.table, before + rows + nodes);
        reserved.expect("there are as many blocks");
        let sample = before + rows == state.tokens.len();
        let of_heads = self.runner.draft_cost().step_seconds;
        let started = Instant::now();
        let mut inputs = [StepInput {
            state,
            rows,
            sample,
            nodes,
            length: nodes,
            width: 1,
            may_draft: true,
            prompt_scores: 0..0,
            pooled: 0..0,
        }];
        let outputs = self.runner.step(&mut inputs, None);
        let (outputs, _) = outputs
            .expect("the step works")
            .expect("it is not given up");
        let output = outputs.into_iter().next().expect("one for each input");
        let output = output.expect("a token is chosen");
        output
            .tokens
            .iter()
            .for_each(|&token| self.state.push(token));
        self.state.kv_len += rows + output.path.len();
        self.runner.observe(&[Committed {
            hidden: output.hidden.clone(),
            candidates: &output.candidates,
            parents: &output.draft.parents,
            ..self.state.committed(before..self.state.kv_len)
        }]);
        let seconds = started.elapsed().as_secs_f64();
        let of_heads = self.runner.draft_cost().step_seconds - of_heads;
        (seconds - of_heads, output.draft.len())
    }

    /// Begins the text again after its prompt.
    fn begin(&mut self) {
        self.runner.end(&self.state);
        let prompt_len = self.state.prompt_len;
        self.state.id += 1;
        self.state.tokens.truncate(prompt_len);
        self.state.sampler = Sampler::new(greedy(), &self.state.tokens);
        self.state.kv_len = 0;
        while self.state.kv_len < prompt_len {
            self.step(PROMPT_ROWS.min(prompt_len - self.state.kv_len), 0);
        }
    }
}

/// Forwards of a text's rows without a runner.
struct Forwards<'a> {
    model: &'a mut dyn Model,
    kv: KvStore,
    table: BlockTable,
}

impl Forwards<'_> {
    /// The tokens that follow those of `tokens`, of which `rows` are the last. Returns also the seconds.
    fn next(&mut self, tokens: &[u32], rows: usize) -> (Vec<u32>, f64) {
        let started = Instant::now();
        let first = tokens.len() - rows;
        let mut batch = Batch::default();
        batch.push_span(&tokens[first..], &[], first, &self.table, BLOCK_SIZE);
        batch.logits = (0..rows as u32).collect();
        let output = self.model.forward(&batch, &mut self.kv);
        let vocab = self.model.info().vocab_size;
        let sampler = Sampler::new(greedy(), &[1]);
        let chosen = output.expect("the forward works").read(|logits| {
            let dists = logits.chunks(vocab).map(|row| distribution(row, &sampler));
            let chosen = dists.map(|dist| dist.expect("logits are finite").sample(0.0));
            chosen.collect::<Vec<u32>>()
        });
        (
            chosen.expect("logits are f32"),
            started.elapsed().as_secs_f64(),
        )
    }
}

/// The median seconds of a forward of `rows` rows with the choice of their tokens, and the median of the times of a round
/// with as many rows over that of such a forward. Both have turns, after about `context` tokens; `target` is the same
/// model as `model`, and `drafter` the one that drafts for it.
pub fn measure(
    model: &mut dyn Model,
    (target, drafter): (Box<dyn Model>, Box<dyn Drafter>),
    context: usize,
    rows: usize,
) -> (f64, f64) {
    let len = context + ROUNDS * rows;
    let num_blocks = len.div_ceil(BLOCK_SIZE);
    let (mut blocks, mut table) = (
        BlockAllocator::new(num_blocks, BLOCK_SIZE),
        BlockTable::default(),
    );
    blocks
        .reserve(&mut table, len)
        .expect("there are as many blocks");
    let kv = model
        .new_kv(num_blocks, BLOCK_SIZE)
        .expect("there is memory");
    let mut forwards = Forwards { model, kv, table };
    let mut text: Vec<u32> = (0..context as u32).map(|i| 100 + 31 * i % 40_000).collect();
    for start in (0..context).step_by(PROMPT_ROWS) {
        let end = context.min(start + PROMPT_ROWS);
        let (next, _) = forwards.next(&text[..end], end - start);
        if end == context {
            text.extend(next.last());
        }
    }
    while text.len() < len {
        let (next, _) = forwards.next(&text, 1);
        text.extend(next);
    }
    let mut rounds = Rounds::new(target, drafter, &text, context);
    let (mut alone, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..TEXTS {
        rounds.begin();
        while rounds.state.tokens.len() + rows <= len {
            let fed = rounds.state.tokens.len() + rows - 1;
            let (_, seconds) = forwards.next(&text[..fed], rows);
            let (of_round, drafted) = rounds.step(1, rows - 1);
            let (tokens, same) = (&rounds.state.tokens, &text[..rounds.state.tokens.len()]);
            assert_eq!(tokens, same, "the text is the same");
            if drafted == rows - 1 {
                alone.push(seconds);
                ratios.push(of_round / seconds);
            }
        }
    }
    (median(alone), median(ratios))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}
