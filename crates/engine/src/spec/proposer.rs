//! From the drafter's guesses to the drafts that a step verifies.

use super::budget::{self, Budget, BudgetMode, Candidates, Probe, StepCost};
use super::draft::{Committed, Draft, DraftCost, DraftRequest, Forecast, Proposal, SeqId};
use super::drafter::Drafter;
use super::guard::Guard;
use super::masks::{Forced, follow_grammar};
use super::reading::Reading;
use super::step::{SequenceState, StepInput};
use super::target_cost::TargetCost;
use std::collections::HashMap;

/// The drafter, and the budget that decides how deep it drafts and what is verified.
pub struct Proposer {
    drafter: Guard,
    budget: Budget,
    reading: Reading,
    sequences: HashMap<SeqId, DraftStats>,
    /// Average share of a sequence's part of a step's time that asking for its draft takes, apart from a
    /// model's forwards.
    overhead: f64,
    /// Average share of all drafts that were worth verifying.
    useful: f64,
    /// Number of drafts requested in this step.
    asked: usize,
    /// Whether a failure of the drafter was reported.
    has_failed: bool,
}

/// How much use drafts are to one sequence.
#[derive(Debug, Clone, Copy)]
struct DraftStats {
    /// Average share of its drafts that were worth verifying.
    useful: f64,
    /// Steps since the last request for a draft.
    waited: u32,
    /// Time that the sequence has saved, while it has no drafts, for its next draft by a model.
    probe: Probe,
    /// Whether the drafter reads the target's hidden states, from some token on.
    is_read: bool,
}

impl DraftStats {
    /// The statistics of a new sequence. `useful` is the share of all drafts that were worth verifying.
    fn new(useful: f64) -> Self {
        Self {
            useful: useful.max(MIN_FIRST_USEFUL),
            waited: 0,
            probe: Probe::default(),
            is_read: false,
        }
    }
}

/// The weight of the past in averages over steps.
const DECAY: f64 = 0.9;
/// A new sequence's drafts count as useful as this at least.
const MIN_FIRST_USEFUL: f64 = 0.1;
/// The drafter is asked for less useful drafts only now and then...
const MIN_USEFUL: f64 = 0.05;
/// ...so that looking for them takes this share of a sequence's time: a small model's step is so short that
/// looking in vain would be felt.
const LOOK_SHARE: f64 = 0.001;
/// But at least once in so many steps: the estimate of what it takes may be wrong.
const MAX_LOOK_EVERY: f64 = 64.0;

/// A step without its drafts.
#[derive(Debug, Clone, Copy)]
pub struct Base {
    /// Sequences that gain a token.
    pub sequences: usize,
    pub rows: usize,
}

impl Proposer {
    /// A proposer that knows no costs yet, for a target without experts.
    pub fn new(drafter: Box<dyn Drafter>, mode: BudgetMode) -> Self {
        Self {
            drafter: Guard::new(drafter),
            budget: Budget::new(mode),
            reading: Reading::default(),
            sequences: HashMap::new(),
            overhead: 0.0,
            useful: 1.0,
            asked: 0,
            has_failed: false,
        }
    }

    /// Sets the cost of the target, which is known.
    pub fn with_target(mut self, cost: TargetCost) -> Self {
        self.budget = self.budget.with_target(cost);
        self
    }

    /// The costs that the budget learns.
    pub fn budget(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// The current estimate of tokens per second over those of plain decoding.
    pub fn speed_up(&self) -> f64 {
        self.budget.speed_up()
    }

    /// The drafter that the proposer asks for drafts.
    pub fn drafter(&self) -> &Guard {
        &self.drafter
    }

    /// Lets the budget know what the drafter's model costs. If it cannot be measured, the budget learns it
    /// from drafts.
    pub fn calibrate(&mut self) {
        match self.drafter.pool(|pool| pool.calibrate()) {
            None => (),
            Some(Ok(measured)) => {
                let rows = measured.iter().map(|one| (one.rows, one.seconds));
                self.budget
                    .draft_cost()
                    .calibrate(&rows.collect::<Vec<_>>());
            }
            Some(Err(error)) => tracing::warn!("the draft model was not measured: {error}"),
        }
    }

    /// Returns a proposal for each input, of what is worth verifying, with ids below `vocab_size`. If
    /// the drafter fails or panics, the drafts are empty and the step continues.
    pub fn propose(&mut self, inputs: &mut [StepInput<'_>], vocab_size: usize) -> Vec<Proposal> {
        let base = Base::of(inputs);
        self.begin_reading(inputs);
        let min_score = self.budget.min_score(base.rows, base.sequences);
        let forced: Vec<Forced> = inputs.iter_mut().map(Forced::of).collect();
        let mut proposals = Vec::with_capacity(inputs.len());
        let (mut places, mut requests) = (Vec::new(), Vec::new());
        for (place, (input, forced)) in inputs.iter_mut().zip(&forced).enumerate() {
            let is_read = input.may_draft && self.is_read(input.state);
            let is_asked = self.asks(input);
            proposals.push(Proposal {
                draft: Draft::default().after_forced(&forced.tokens),
                candidates: if is_asked {
                    self.drafter.candidates()
                } else {
                    0
                },
                is_tapped: is_read || self.learns_from(input),
            });
            if is_asked && let Some(mut request) = forced.request(input, min_score) {
                if !is_read {
                    request.model_length = 0;
                }
                places.push(place);
                requests.push(request);
            }
        }
        if !requests.is_empty() {
            self.asked = requests.len();
            self.limit_model_lengths(&mut requests, base);
            match (self.drafter).call("propose", |drafter| drafter.propose(&mut requests)) {
                None => (),
                Some(Ok(proposed)) => places.iter().zip(proposed).for_each(|(&place, draft)| {
                    proposals[place].draft = draft.after_forced(&forced[place].tokens);
                }),
                Some(Err(error)) => {
                    if std::mem::replace(&mut self.has_failed, true) {
                        tracing::debug!("no drafts in this step: {error}");
                    } else {
                        tracing::warn!("no drafts in this step: {error} (reported once)");
                    }
                    let failed: Vec<SeqId> = requests.iter().map(|request| request.id).collect();
                    failed.into_iter().for_each(|id| self.forget(id));
                }
            }
        }
        for (input, Proposal { draft, .. }) in inputs.iter_mut().zip(&mut proposals) {
            draft.end_where_invalid(input.nodes, input.length, vocab_size);
            input.state.restore_sampler();
            follow_grammar(input, draft);
        }
        self.cut(inputs, &mut proposals, base);
        for &place in &places {
            if let Some(sequence) = self.sequences.get_mut(&inputs[place].state.id) {
                let useful = f64::from(u8::from(!proposals[place].draft.is_empty()));
                for average in [&mut sequence.useful, &mut self.useful] {
                    *average = DECAY * *average + (1.0 - DECAY) * useful;
                }
            }
        }
        proposals
    }

    /// Whether to ask for a draft of this sequence in this step.
    fn asks(&mut self, input: &StepInput<'_>) -> bool {
        if input.nodes == 0 || input.length == 0 {
            return false;
        }
        let sequence = self.sequence(input.state.id);
        let (is_useful, waited) = (sequence.useful >= MIN_USEFUL, sequence.waited + 1);
        sequence.waited = waited;
        let is_fixed = self.budget.is_fixed() || input.state.has_fixed_draft();
        let look_every = (self.overhead / LOOK_SHARE).min(MAX_LOOK_EVERY);
        let asks = is_fixed || is_useful || f64::from(waited) >= look_every;
        if asks {
            self.sequence(input.state.id).waited = 0;
        }
        asks
    }

    fn sequence(&mut self, id: SeqId) -> &mut DraftStats {
        let useful = self.useful;
        let new = || DraftStats::new(useful);
        self.sequences.entry(id).or_insert_with(new)
    }

    /// Sets how many levels of each draft may cost forwards.
    fn limit_model_lengths(&mut self, requests: &mut [DraftRequest<'_>], base: Base) {
        let mut expected: Vec<(usize, Forecast, Probe)> = Vec::new();
        for (place, request) in requests.iter().enumerate() {
            if !request.is_fixed
                && request.model_length > 0
                && let Some(Some(forecast)) =
                    (self.drafter).call("forecast", |drafter| drafter.forecast(request))
            {
                let probe = self.sequence(request.id).probe;
                expected.push((place, forecast, probe));
            }
        }
        if expected.is_empty() {
            return;
        }
        let mut asked: Vec<budget::DraftForecast<'_>> = (expected.iter_mut())
            .map(|(place, forecast, probe)| budget::DraftForecast {
                path: &forecast.path,
                max_length: requests[*place].length,
                pending: forecast.pending,
                at_once: forecast.at_once,
                probe,
            })
            .collect();
        let depths = self.budget.depths(&mut asked, base.rows, base.sequences);
        for ((place, _, probe), depth) in expected.into_iter().zip(depths) {
            requests[place].model_length = depth;
            self.sequence(requests[place].id).probe = probe;
        }
    }

    /// Removes the nodes that are not worth their row.
    fn cut(&mut self, inputs: &[StepInput<'_>], proposals: &mut [Proposal], base: Base) {
        let drafts = proposals.iter_mut().map(|proposal| &mut proposal.draft);
        let (fixed, mut open): (Vec<_>, Vec<_>) =
            (inputs.iter().zip(drafts)).partition(|(input, _)| input.state.has_fixed_draft());
        let fixed_rows: usize = fixed.iter().map(|(_, draft)| draft.len()).sum();
        open.retain(|(_, draft)| !draft.is_empty());
        let candidates: Vec<Candidates<'_>> = (open.iter())
            .map(|(_, draft)| Candidates {
                scores: &draft.scores,
                parents: &draft.parents,
            })
            .collect();
        let rows = base.rows + fixed_rows;
        let keep = self.budget.select(&candidates, rows, base.sequences);
        for ((_, draft), keep) in open.iter_mut().zip(keep) {
            if keep.contains(&false) {
                draft.retain(&keep);
            }
        }
    }

    /// Learns what a step cost.
    pub fn note_step(&mut self, step: &StepCost) {
        let asked = std::mem::take(&mut self.asked);
        if self.reads_states() {
            let read = (self.drafter).pool(|pool| std::mem::take(&mut pool.network.read));
            self.reading.note_step(step, read.unwrap_or_default());
        }
        if asked == 0 {
            return self.budget.observe(step);
        }
        let forwards = self.drafter.pool(|pool| {
            let note = |&(rows, seconds): &(usize, f64)| {
                self.budget.draft_cost().note(rows, seconds);
                seconds
            };
            pool.network.forwards.iter().map(note).sum::<f64>()
        });
        let forwards = forwards.unwrap_or(0.0);
        let own = (step.draft_seconds - forwards).max(0.0) / asked as f64;
        let rest = step.target_seconds / step.sequences.max(1) as f64;
        let share = own / (own + rest).max(f64::MIN_POSITIVE);
        self.overhead = DECAY * self.overhead + (1.0 - DECAY) * share;
        self.budget.observe(step);
    }

    /// See [`Drafter::observe`].
    pub fn observe(&mut self, committed: &[Committed<'_>]) {
        if !self.drafter.learns() {
            (self.drafter).call("observe", |drafter| drafter.observe(committed));
            return;
        }
        // What is learned from need not be read.
        let read = committed.iter().map(|one| {
            let sequence = self.sequences.get(&one.id);
            let is_read = sequence.is_some_and(|sequence| sequence.is_read);
            Committed {
                hidden: one.hidden.clone().filter(|_| is_read),
                ..one.clone()
            }
        });
        let read: Vec<Committed<'_>> = read.collect();
        self.drafter.call("observe", |drafter| {
            drafter.learn(committed);
            drafter.observe(&read);
        });
    }

    /// Decides now and then which kinds of texts a head reads.
    fn begin_reading(&mut self, inputs: &[StepInput<'_>]) {
        if self.reads_states() && self.reading.begin_step(inputs.len()) {
            let length = inputs.iter().map(|input| input.length).max().unwrap_or(0);
            let paths = self.drafter.pool(|pool| pool.typical(length));
            if let Some((greedy, sampled, at_once)) = paths {
                self.reading
                    .look(&self.budget, [&greedy, &sampled], at_once);
            }
        }
    }

    /// Whether the drafter learns from the target's hidden states of this sequence.
    fn learns_from(&self, input: &StepInput<'_>) -> bool {
        input.may_draft && self.drafter.learns() && input.state.draft_context.may_train
    }

    /// Whether the drafter is a head with a pool, which need not read every text.
    fn reads_states(&self) -> bool {
        !self.budget.is_fixed() && !self.drafter.taps().is_empty()
    }

    /// Whether the drafter reads the target's hidden states of this sequence from here on. A sequence that was read is
    /// read on: what follows costs little.
    fn is_read(&mut self, state: &SequenceState) -> bool {
        let is_sampled = !state.sampler.params().is_greedy();
        let pays = !self.reads_states()
            || state.has_fixed_draft()
            || self.reading.pays(state.id, is_sampled);
        let sequence = self.sequence(state.id);
        sequence.is_read |= pays;
        sequence.is_read
    }

    /// See [`Drafter::resume`].
    pub fn resume(&mut self, state: &SequenceState, len: usize) -> usize {
        if !self.is_read(state) {
            return len;
        }
        let scope = state.draft_context.scope;
        let resumed = self.drafter.call("resume", |drafter| {
            drafter.resume(state.id, &state.tokens, scope, len)
        });
        resumed.unwrap_or(len)
    }

    /// See [`DraftPool::reset_prefix_cache`](super::pool::DraftPool::reset_prefix_cache).
    pub fn reset_prefix_cache(&mut self) {
        self.drafter.pool(|pool| pool.reset_prefix_cache());
    }

    /// See [`Drafter::forget`].
    pub fn forget(&mut self, id: SeqId) {
        self.drafter.call("forget", |drafter| drafter.forget(id));
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.is_read = false;
        }
    }

    /// See [`Drafter::end`].
    pub fn end(&mut self, id: SeqId) {
        self.sequences.remove(&id);
        self.drafter.call("end", |drafter| drafter.end(id));
    }

    /// Draft nodes that were proposed and not verified, since the start.
    pub fn pruned(&self) -> u64 {
        self.budget.pruned()
    }

    /// Cost of drafting with a model since the start; nothing once the drafter is off.
    pub fn cost(&self) -> DraftCost {
        let cost = self.drafter.pool(|pool| pool.network.cost);
        cost.unwrap_or_default()
    }
}

impl Base {
    /// The step of these inputs.
    pub fn of(inputs: &[StepInput<'_>]) -> Self {
        Self {
            sequences: inputs.iter().filter(|input| input.sample).count(),
            rows: inputs.iter().map(|input| input.rows).sum(),
        }
    }
}

#[cfg(test)]
mod tests;
