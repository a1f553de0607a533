//! One engine step: `propose -> forward -> verify`.

mod disk;

use super::budget::{BudgetMode, StepCost};
use super::calibration::{self, RepeatedForward};
use super::device;
use super::draft::{Committed, DraftCost, Proposal, SeqId};
use super::drafter::Drafter;
use super::guard::Guard;
use super::learned::Learned;
use super::masks;
use super::proposer::{Proposer, base_of};
use super::states::{StateSlots, max_state_copies};
use super::step::{SequenceState, StepInput, StepResult, decide, gained};
use super::target_cost::{MeasuredForward, TargetCost};
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::kv::{AcceptedPath, KvStore};
use foretoken_core::model::{Batch, ForwardOutput, GiveUp, Model, Taps};
use foretoken_core::sampling::NoToken;
use foretoken_kernels::{parallel, pick_rows};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The target, the tensors of its KV pool, and the drafters, of which one is in use. Plain decoding is
/// speculation with empty drafts.
pub struct SpeculativeRunner {
    target: Box<dyn Model>,
    store: KvStore,
    num_blocks: usize,
    /// Slots of recurrent states, for a target whose layers keep them.
    states: Option<StateSlots>,
    /// The drafters, each with what its budget has learned.
    proposers: Vec<Proposer>,
    /// Index of the proposer in use.
    used: usize,
    /// See [`SpeculativeRunner::experts_read`].
    experts_read: u64,
    /// Time that the drafter took to observe what the last step gave for its next drafts.
    observed: Duration,
}

impl SpeculativeRunner {
    /// A runner with an empty target pool. Of several drafters the first one is in use.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn new(
        target: Box<dyn Model>,
        drafters: Vec<Box<dyn Drafter>>,
        budget: BudgetMode,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let store = target.new_kv(num_blocks, block_size)?;
        let state_bytes = target.kv_shape().bytes_per_state();
        let states =
            (state_bytes > 0).then(|| StateSlots::new(block_size, max_state_copies(state_bytes)));
        let cost = TargetCost::new(target.info().experts.iter().copied())
            .with_edges(calibration::edges(&*target));
        let proposer = |drafter| Proposer::new(drafter, budget).with_target(cost.clone());
        Ok(Self {
            target,
            store,
            num_blocks,
            states,
            proposers: drafters.into_iter().map(proposer).collect(),
            used: 0,
            experts_read: 0,
            observed: Duration::ZERO,
        })
    }

    /// Lets the runner copy no recurrent states for prefixes.
    pub fn without_prefix_cache(mut self) -> Self {
        self.states.iter_mut().for_each(StateSlots::share_nothing);
        self
    }

    /// Measures what a forward of the target and of a draft model costs by its number of rows and of the
    /// experts that it reads, so that the budget knows it before the first request; without a drafter it does
    /// nothing. On a GPU it measures forwards of up to `max_rows` rows, which steps may have without prompts. Returns the
    /// forwards of the target. Call it while no sequence has blocks: it writes to the pools.
    ///
    /// # Errors
    /// If the device failed.
    pub fn calibrate(&mut self, max_rows: usize) -> Result<Vec<MeasuredForward>> {
        if self.proposers.is_empty() {
            return Ok(Vec::new());
        }
        let (target, store) = (&mut *self.target, &mut self.store);
        let measured = calibration::measure(target, store, self.num_blocks, true, max_rows)?;
        for proposer in &mut self.proposers {
            let cost = proposer.budget().target();
            cost.calibrate(&measured.forwards);
            cost.believe(measured.observations);
            proposer.calibrate(max_rows);
            // The caches of a GPU are small beside its models.
            if !target.device().is_cuda() {
                let mut one = RepeatedForward::new(target, store, self.num_blocks, 1)?;
                proposer.measure_displacement(|| one.run());
            }
        }
        tracing::debug!(observations = measured.observations, "steps were measured");
        Ok(measured.forwards)
    }

    /// What each drafter and its budget have learned, to [recall](SpeculativeRunner::recall) it after the next start.
    pub fn learned(&mut self) -> Vec<Learned> {
        self.proposers.iter_mut().map(Proposer::learned).collect()
    }

    /// Lets each drafter and its budget begin with what they had learned before an earlier end. Call it after
    /// [`SpeculativeRunner::calibrate`].
    pub fn recall(&mut self, learned: &[Learned]) {
        let both = self.proposers.iter_mut().zip(learned);
        both.for_each(|(proposer, learned)| proposer.recall(learned));
    }

    /// Lets the drafter of this index draft from the next step on; without it, nothing changes. A drafter
    /// knows of a running text what it observes from then on.
    pub fn use_drafter(&mut self, index: usize) {
        if index < self.proposers.len() {
            self.used = index;
        }
    }

    fn proposer(&mut self) -> Option<&mut Proposer> {
        self.proposers.get_mut(self.used)
    }

    /// Runs one step: requests drafts, computes all rows in one target forward, verifies the
    /// drafts, and moves K and V of accepted nodes directly after those of the preceding tokens.
    /// The caller then appends the new tokens to the sequences, truncates their block tables, and
    /// calls [`SpeculativeRunner::observe`].
    ///
    /// If no token can be chosen for a sequence, only its own result is an error. The second value
    /// is the wall time of the target's forward and of the verification.
    ///
    /// With `gives_up`, the forward may be [given up](Model::forward_unless): `None`, and the inputs
    /// may come again as if there had been no step. They must be without drafts.
    ///
    /// # Errors
    /// If the device failed; no sequence has a result then.
    pub fn step(
        &mut self,
        inputs: &mut [StepInput<'_>],
        gives_up: Option<&GiveUp<'_>>,
    ) -> Result<Option<(Vec<StepResult>, Duration)>> {
        let started = Instant::now();
        let vocab_size = self.target.info().vocab_size;
        let proposals = match self.proposer() {
            Some(proposer) => proposer.propose(inputs, vocab_size),
            None => vec![Proposal::default(); inputs.len()],
        };
        let drafted = Instant::now();
        let (batch, rows) = self.batch(inputs, &proposals, gives_up.is_some())?;
        let masks = masks::of_step(inputs, &proposals);
        let (target, store) = (&mut self.target, &mut self.store);
        let output = masks::overlap_with_forward(masks, || match gives_up {
            Some(gives_up) => target.forward_unless(&batch, store, gives_up),
            None => target.forward(&batch, store).map(Some),
        })?;
        let Some(output) = output else {
            self.states.iter_mut().for_each(StateSlots::take_back);
            return Ok(None);
        };
        self.experts_read += output.experts_read as u64;
        if let Some(proposer) = self.proposer() {
            // A GPU computes meanwhile.
            proposer.observe_late(inputs);
        }
        if batch.logits.is_empty() && batch.last_hidden.is_empty() {
            // Nothing is read back. Without this, a GPU would queue one chunk of a prompt after the other,
            // and who arrives would wait for them all.
            self.target.device().synchronize()?;
        }
        let mut outputs = self.decide(&output, inputs, &proposals, rows)?;
        // A GPU's forward is done when its tokens are there.
        let target_time = drafted.elapsed();
        self.commit(inputs, &outputs)?;
        if let Some(states) = &mut self.states {
            states.finish(inputs, &outputs);
        }
        if let Some(tapped) = &output.tapped {
            hand_out(tapped, inputs, &proposals, &mut outputs)?;
        }
        if let Some(states) = &output.last_hidden {
            hand_out_last(states, inputs, &mut outputs)?;
        }
        let base = base_of(inputs);
        let drafting = drafted - started + std::mem::take(&mut self.observed);
        if let Some(proposer) = self.proposer() {
            proposer.note_step(&StepCost {
                sequences: base.sequences,
                base_rows: base.rows,
                draft_nodes: proposals.iter().map(|proposal| proposal.draft.len()).sum(),
                context: base.context,
                experts_read: output.experts_read,
                tokens: gained(inputs, &outputs),
                target_seconds: drafted.elapsed().as_secs_f64(),
                draft_seconds: drafting.as_secs_f64(),
            });
        }
        for (output, proposal) in outputs.iter_mut().zip(proposals) {
            if let Ok(output) = output {
                output.draft = proposal.draft.without_dists();
            }
        }
        Ok(Some((outputs, target_time)))
    }

    /// Passes the committed tokens to the drafter; see [`Drafter::observe`].
    pub fn observe(&mut self, committed: &[Committed<'_>]) {
        let started = Instant::now();
        if let Some(proposer) = self.proposer() {
            proposer.observe(committed);
        }
        if self.drafter().is_some_and(Guard::observes_late) {
            // Of all that it observes, this is for drafts: the rest is observed late.
            self.observed = started.elapsed();
        }
    }

    /// Number of the first `len` tokens of a sequence, which are in the target's prefix cache, that the target
    /// need not compute. If the target has recurrent states, there is one after these tokens. If the sequence
    /// `may_draft`, the drafter does not need to see them; see [`Drafter::resume`].
    pub fn resume(&mut self, state: &SequenceState, len: usize, may_draft: bool) -> usize {
        let states = &mut self.states;
        let mut of_target = |len| {
            let states = states.as_mut();
            states.map_or(len, |states| states.resume(state, len))
        };
        let proposer = self.proposers.get_mut(self.used);
        match proposer.filter(|_| may_draft) {
            Some(proposer) => proposer.resume(state, len, of_target),
            None => of_target(len),
        }
    }

    /// Forgets the prefixes of which the drafter's pool or recurrent states are cached.
    pub fn reset_prefix_cache(&mut self) {
        self.states
            .iter_mut()
            .for_each(StateSlots::reset_prefix_cache);
        (self.proposers.iter_mut()).for_each(Proposer::reset_prefix_cache);
    }

    /// Frees what [`resume`](Self::resume) holds for a sequence that does not begin yet.
    pub fn release(&mut self, id: SeqId) {
        self.states.iter_mut().for_each(|states| states.release(id));
        (self.proposers.iter_mut()).for_each(|proposer| proposer.release(id));
    }

    /// Frees the state for a sequence that was preempted.
    pub fn forget(&mut self, id: SeqId) {
        self.states.iter_mut().for_each(|states| states.release(id));
        (self.proposers.iter_mut()).for_each(|proposer| proposer.forget(id));
    }

    /// Frees the state for a request that ended.
    pub fn end(&mut self, state: &SequenceState) {
        (self.states.iter_mut()).for_each(|states| states.release(state.id));
        (self.proposers.iter_mut()).for_each(|proposer| proposer.end(state));
    }

    /// The rate of the last steps over that of plain decoding, as the budget expects it; `None` without a
    /// drafter.
    pub fn speed_up(&self) -> Option<f64> {
        self.proposers.get(self.used).map(Proposer::speed_up)
    }

    /// Draft nodes that were proposed and not verified, since the start.
    pub fn pruned(&self) -> u64 {
        self.proposers.iter().map(Proposer::pruned).sum()
    }

    /// Number of experts whose weights the target's forwards read, since the start: of each forward those that
    /// [`ForwardOutput::experts_read`] counts.
    pub fn experts_read(&self) -> u64 {
        self.experts_read
    }

    /// Cost of drafting with models since the start.
    pub fn draft_cost(&self) -> DraftCost {
        let costs = self.proposers.iter().map(Proposer::cost);
        costs.fold(DraftCost::default(), |sum, cost| DraftCost {
            steps: sum.steps + cost.steps,
            step_seconds: sum.step_seconds + cost.step_seconds,
        })
    }

    /// Used fraction of the drafter's pool, 0 to 1.
    pub fn draft_kv_usage(&self) -> f64 {
        let drafter = self.drafter();
        let usage = drafter.and_then(|drafter| drafter.pool(|pool| pool.usage()));
        usage.unwrap_or(0.0)
    }

    /// Checks the drafters' pools.
    ///
    /// # Errors
    /// The inconsistency found.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.states
            .as_ref()
            .map_or(Ok(()), StateSlots::check_invariants)?;
        let mut drafters = self.proposers.iter().map(Proposer::drafter);
        drafters.try_for_each(|drafter| {
            let checked = drafter.call("check_invariants", |d| d.check_invariants());
            checked.unwrap_or(Ok(()))
        })
    }

    /// Maximum number of sequences of a step that can be [given up](Model::forward_unless). If it has recurrent states,
    /// one, because it needs another state of each sequence.
    pub fn max_interruptible(&self) -> usize {
        match (self.target.is_interruptible(), &self.states) {
            (false, _) => 0,
            (true, Some(_)) => 1,
            (true, None) => usize::MAX,
        }
    }

    /// Number of sequences that have a recurrent state.
    pub fn num_states(&self) -> usize {
        self.states.as_ref().map_or(0, StateSlots::num_sequences)
    }

    /// Whether the drafter has panicked: then there are no more drafts.
    pub fn drafter_is_off(&self) -> bool {
        self.drafter().is_some_and(Guard::is_off)
    }

    fn drafter(&self) -> Option<&Guard> {
        self.proposers.get(self.used).map(Proposer::drafter)
    }

    /// Computes each input's result from its logits; `rows` has each input's range of logits rows.
    fn decide(
        &self,
        output: &ForwardOutput,
        inputs: &mut [StepInput<'_>],
        proposals: &[Proposal],
        rows: Vec<Range<usize>>,
    ) -> Result<Vec<StepResult>> {
        let vocab = self.target.info().vocab_size;
        if output.is_on_gpu() {
            return device::decide_all(output, inputs, proposals, rows, vocab);
        }
        output.read(|logits| {
            let mut parts: Vec<_> = inputs.iter_mut().zip(proposals).zip(rows).collect();
            parallel::map(&mut parts, |((input, proposal), rows)| {
                let logits = &logits[rows.start * vocab..rows.end * vocab];
                decide(input, &proposal.draft, logits, vocab, proposal.candidates)
            })
        })
    }

    /// Moves K and V of accepted nodes to the slots that plain decoding would use.
    fn commit(&mut self, inputs: &[StepInput<'_>], outputs: &[StepResult]) -> Result<()> {
        let accepted = inputs.iter().zip(outputs).filter_map(|(input, output)| {
            Some(AcceptedPath {
                table: &input.state.table,
                first: input.state.kv_len + input.rows,
                nodes: &output.as_ref().ok()?.path,
            })
        });
        self.store.commit(accepted)
    }

    /// The batch with all rows of the step, which may be given up if it `is_tentative`, and each input's range of logits
    /// rows.
    ///
    /// # Errors
    /// If a sequence lacks its recurrent state.
    fn batch(
        &mut self,
        inputs: &[StepInput<'_>],
        proposals: &[Proposal],
        is_tentative: bool,
    ) -> Result<(Batch, Vec<Range<usize>>)> {
        let mut batch = Batch::default();
        let states = self.states.as_mut();
        let states = states.map(|states| states.plan(inputs, is_tentative));
        let mut states = states.transpose()?.into_iter().flatten();
        let mut ranges = Vec::with_capacity(inputs.len());
        let layers = self.drafter().map_or(&[][..], Guard::taps);
        let mut tapped = Vec::new();
        for (input, proposal) in inputs.iter().zip(proposals) {
            let (state, draft, base) = (&*input.state, &proposal.draft, batch.tokens.len());
            let pending = &state.tokens[state.kv_len..state.kv_len + input.rows];
            let rows = [pending, &draft.tokens].concat();
            let (table, block_size) = (&state.table, self.store.block_size);
            batch.push_span(&rows, &draft.parents, state.kv_len, table, block_size);
            if let Some(adapter) = &state.adapter {
                batch.adapt(rows.len(), adapter);
            }
            if let Some(kept) = states.next() {
                batch.keep_state(rows.len(), &draft.parents, kept);
            }
            let first = batch.logits.len();
            // Row i of the span is at position kv_len + i and predicts the next position.
            let row_of = |position: usize| (base + position - 1 - state.kv_len) as u32;
            batch.logits.extend(input.prompt_scores.clone().map(row_of));
            let pooled = input.pooled.clone().map(|position| row_of(position + 1));
            batch.last_hidden.extend(pooled);
            if input.sample {
                let decided = state.tokens.len()..=state.tokens.len() + draft.len();
                batch.logits.extend(decided.map(row_of));
            }
            ranges.push(first..batch.logits.len());
            if proposal.is_tapped && !layers.is_empty() {
                tapped.extend(base as u32..batch.tokens.len() as u32);
            }
        }
        if !tapped.is_empty() {
            batch.taps = Some(Taps {
                layers: layers.to_vec(),
                rows: tapped,
            });
        }
        Ok((batch, ranges))
    }
}

/// Distributes the rows of `hidden`: each output of a proposal that is tapped receives those of its
/// pending tokens and accepted nodes. `hidden` has the pending and draft rows of all such inputs.
fn hand_out(
    hidden: &Tensor,
    inputs: &[StepInput<'_>],
    proposals: &[Proposal],
    outputs: &mut [StepResult],
) -> Result<()> {
    let mut start = 0;
    for ((input, proposal), output) in inputs.iter().zip(proposals).zip(outputs) {
        if !proposal.is_tapped {
            continue;
        }
        let first = start + input.rows;
        if let Ok(output) = output {
            let kept = hidden.narrow(0, start, input.rows + output.path.len())?;
            let nodes = output.path.iter().map(|node| first + node);
            output.hidden = Some(if nodes.clone().eq(first..first + output.path.len()) {
                kept
            } else {
                let rows = (start..first).chain(nodes).map(|row| row as u32);
                let rows = Tensor::from_iter(rows, hidden.device())?;
                pick_rows(hidden, &rows)?
            });
        }
        start = first + proposal.draft.len();
    }
    Ok(())
}

/// Distributes the last hidden states, which are those of all inputs' `pooled`.
fn hand_out_last(
    states: &Tensor,
    inputs: &[StepInput<'_>],
    outputs: &mut [StepResult],
) -> Result<()> {
    let width = states.dim(1)?;
    let states: Vec<f32> = states.flatten_all()?.to_vec1()?;
    let mut rest = states.as_slice();
    for (input, output) in inputs.iter().zip(outputs) {
        let (own, others) = rest.split_at(input.pooled.len() * width);
        rest = others;
        match output {
            Ok(_) if !own.iter().all(|x| x.is_finite()) => *output = Err(NoToken::NotFinite),
            Ok(output) => output.states = own.to_vec(),
            Err(_) => {}
        }
    }
    Ok(())
}
