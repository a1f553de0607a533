//! From the drafter's guesses to the drafts that a step verifies.

mod observations;
mod reads;

use super::budget::{Base, Budget, BudgetMode, Candidates, DraftForecast, StepCost};
use super::cost::CostCurve;
use super::draft::{Draft, DraftCost, DraftRequest, Forecast, Proposal, SeqId};
use super::drafter::Drafter;
use super::guard::Guard;
use super::learned::Learned;
use super::masks::{Forced, follow_grammar};
use super::reading::Reading;
use super::step::{SequenceState, StepInput};
use super::target_cost::TargetCost;
use std::collections::{HashMap, HashSet};

/// The drafter, and the budget that decides how deep it drafts and what is verified.
pub struct Proposer {
    drafter: Guard,
    budget: Budget,
    reading: Reading,
    sequences: HashMap<SeqId, DraftStats>,
    /// Average seconds that asking for a draft takes, apart from a model's forwards.
    ask_seconds: f64,
    /// Average tokens that a draft gains, as in [`DraftStats::gain`].
    gain: f64,
    /// The sequences of this step that are asked for drafts.
    asked: HashSet<SeqId>,
    /// Number of those whose drafts no grammar forces whole.
    requests: usize,
    /// Of the sequences of this step that may draft: their prompt rows, and the number of those that gain a token.
    prompt_rows: usize,
    gaining: usize,
    /// Steps since all sequences were asked.
    waited: u32,
    /// Longest draft that a request could have so far.
    longest: usize,
    /// Steps with requests for drafts, up to [`FIRST_STEPS`].
    noted: u32,
    /// Whether a failure of the drafter was reported.
    has_failed: bool,
}

/// How much use drafts are to one sequence.
#[derive(Debug, Clone, Copy)]
struct DraftStats {
    /// Average tokens that its drafts were expected to gain, less those that the time of their rows is worth.
    gain: f64,
    /// Steps since the last request for a draft.
    waited: u32,
    /// Whether the drafter reads the target's hidden states, from some token on.
    is_read: bool,
    /// Whether it does not begin yet, although it was about to.
    waits: bool,
    /// The first position that the drafter has not observed, if there are any.
    late: Option<usize>,
}

impl DraftStats {
    /// The statistics of a new sequence. `gain` is the average of all drafts.
    fn new(gain: f64) -> Self {
        Self {
            gain,
            waited: 0,
            is_read: false,
            waits: false,
            late: None,
        }
    }
}

/// The weight of the past in averages over steps.
const DECAY: f64 = 0.9;
/// Tokens that a draft gains, while nothing is known: rather too many, since asking tells.
const FIRST_GAIN: f64 = 2.0;
/// Steps in which all sequences are asked at first: what asking takes is not known after one, when nothing is warm.
const FIRST_STEPS: u32 = 16;
/// The longest draft while no request has said more.
const FIRST_LENGTH: usize = 4;
/// An interrupted request for drafts counts as at most this many times the average, and an interrupted reading as this many
/// times what a forward of as many rows is expected to take.
const MAX_RATIO: f64 = 3.0;
/// The weight of the past in what asking takes, if asking took less than that. Low: the first request has nothing to be
/// compared with, and if it was interrupted, drafters would be asked only now and then until that is forgotten.
const DECAY_OF_DEARER: f64 = 0.5;
/// Drafters are asked for drafts that gain less than asking takes only now and then, so that looking for them takes
/// this share of the time: a small model's step is so short that looking in vain would be felt. All sequences
/// together, because the first row beyond an edge of the costs may pay only with those of others.
const LOOK_SHARE: f64 = 0.001;
/// But at least once in so many steps: the estimate of what it takes may be wrong.
const MAX_LOOK_EVERY: f64 = 128.0;

impl Proposer {
    /// A proposer that knows no costs yet, for a target without experts.
    pub fn new(drafter: Box<dyn Drafter>, mode: BudgetMode) -> Self {
        let drafter = Guard::new(drafter);
        let edges = drafter.pool(|pool| pool.edges()).unwrap_or_default();
        Self {
            drafter,
            budget: Budget::new(mode).with_draft(CostCurve::with_edges(edges)),
            reading: Reading::default(),
            sequences: HashMap::new(),
            ask_seconds: 0.0,
            gain: FIRST_GAIN,
            asked: HashSet::new(),
            requests: 0,
            prompt_rows: 0,
            gaining: 0,
            waited: 0,
            longest: FIRST_LENGTH,
            noted: 0,
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

    /// Lets the budget know what forwards of the drafter's model of at most `max_rows` rows cost. If it cannot be
    /// measured, the budget learns it from drafts.
    pub fn calibrate(&mut self, max_rows: usize) {
        match self.drafter.pool(|pool| pool.calibrate(max_rows)) {
            None => (),
            Some(Ok(measured)) => {
                let rows = measured.forwards.iter().map(|one| (one.rows, one.seconds));
                let cost = self.budget.draft_cost();
                cost.calibrate(&rows.collect::<Vec<_>>());
                cost.believe(measured.observations);
            }
            Some(Err(error)) => tracing::warn!("the draft model was not measured: {error}"),
        }
    }

    /// What was learned so far, to [recall](Proposer::recall) it after the next start.
    pub fn learned(&mut self) -> Learned {
        let mut learned = Learned::default();
        self.budget.learned(&mut learned);
        learned.displacement = self.reading.displacement;
        let drafts = &mut learned.drafts;
        (self.drafter).call("learned", |drafter| drafter.learned(drafts));
        learned
    }

    /// Begins with what was learned before an earlier end, beside what was measured since.
    pub fn recall(&mut self, learned: &Learned) {
        self.budget.recall(learned);
        self.reading.displacement.recall(&learned.displacement);
        (self.drafter).call("recall", |drafter| drafter.recall(&learned.drafts));
    }

    /// Returns a proposal for each input, of what is worth verifying, with ids below `vocab_size`. If
    /// the drafter fails or panics, the drafts are empty and the step continues.
    pub fn propose(&mut self, inputs: &mut [StepInput<'_>], vocab_size: usize) -> Vec<Proposal> {
        let base = base_of(inputs);
        let longest = inputs.iter().map(|input| input.length).max();
        self.longest = self.longest.max(longest.unwrap_or(0));
        let may_draft = |input: &&StepInput<'_>| input.may_draft;
        let gaining = inputs.iter().filter(may_draft);
        self.gaining = gaining.filter(|input| input.sample).count();
        let rows = inputs.iter().filter(may_draft).map(|input| input.rows);
        self.prompt_rows = rows.sum::<usize>() - self.gaining;
        self.begin_reading(inputs.len(), base.context);
        let forced: Vec<Forced> = inputs.iter_mut().map(Forced::of).collect();
        let asked = self.whom_to_ask(inputs, base);
        self.observe_asked(inputs, &asked);
        let min_score = if asked.contains(&true) {
            self.budget.min_score(base)
        } else {
            0.0
        };
        let mut proposals = Vec::with_capacity(inputs.len());
        let (mut places, mut requests) = (Vec::new(), Vec::new());
        for (place, (input, forced)) in inputs.iter_mut().zip(&forced).enumerate() {
            let is_read = input.may_draft && self.is_read(input.state);
            let is_asked = asked[place];
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
        self.requests = requests.len();
        if !requests.is_empty() {
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
        let gains = self.cut(inputs, &mut proposals, base);
        for &place in &places {
            if let Some(sequence) = self.sequences.get_mut(&inputs[place].state.id) {
                let waited = std::mem::take(&mut sequence.waited);
                let old = DECAY.powi(waited as i32);
                sequence.gain = old * sequence.gain + (1.0 - old) * gains[place];
                self.gain = DECAY * self.gain + (1.0 - DECAY) * gains[place];
            }
        }
        proposals
    }

    /// Whether to ask for a draft of each sequence in this step: where a draft gains more than asking takes, and now
    /// and then of all.
    fn whom_to_ask(&mut self, inputs: &[StepInput<'_>], base: Base) -> Vec<bool> {
        let ask = self.budget.price(base) * self.ask_seconds;
        let share = self.ask_seconds / self.budget.plain_share(base);
        self.waited += 1;
        let look_every = (share / LOOK_SHARE).min(MAX_LOOK_EVERY);
        let looks = self.noted < FIRST_STEPS || f64::from(self.waited) >= look_every;
        if looks {
            self.waited = 0;
        }
        let is_fixed = self.budget.is_fixed();
        let mut asks = |input: &StepInput<'_>| {
            if input.nodes == 0 || input.length == 0 {
                return false;
            }
            let sequence = self.sequence(input.state.id);
            sequence.waited += 1;
            looks || sequence.gain > ask || is_fixed || input.state.has_fixed_draft()
        };
        inputs.iter().map(&mut asks).collect()
    }

    fn sequence(&mut self, id: SeqId) -> &mut DraftStats {
        let gain = self.gain;
        let new = || DraftStats::new(gain);
        self.sequences.entry(id).or_insert_with(new)
    }

    /// Sets how many levels of each draft may cost forwards.
    fn limit_model_lengths(&mut self, requests: &mut [DraftRequest<'_>], base: Base) {
        let mut expected: Vec<(usize, Forecast)> = Vec::new();
        for (place, request) in requests.iter().enumerate() {
            if !request.is_fixed
                && request.model_length > 0
                && let Some(Some(forecast)) =
                    (self.drafter).call("forecast", |drafter| drafter.forecast(request))
            {
                expected.push((place, forecast));
            }
        }
        if expected.is_empty() {
            return;
        }
        let asked: Vec<_> = (expected.iter())
            .map(|(place, forecast)| DraftForecast::of(forecast, requests[*place].length))
            .collect();
        let depths = self.budget.depths(&asked, base);
        for ((place, _), depth) in expected.into_iter().zip(depths) {
            requests[place].model_length = depth;
        }
    }

    /// Removes the nodes that are not worth their row. Returns what each draft is expected to gain; see
    /// [`Selection::gains`](budget::Selection::gains).
    fn cut(
        &mut self,
        inputs: &[StepInput<'_>],
        proposals: &mut [Proposal],
        base: Base,
    ) -> Vec<f64> {
        let mut gains = vec![0.0; proposals.len()];
        let drafts = proposals.iter_mut().map(|proposal| &mut proposal.draft);
        let drafts = inputs.iter().zip(drafts).zip(&mut gains);
        let (fixed, mut open): (Vec<_>, Vec<_>) =
            drafts.partition(|((input, _), _)| input.state.has_fixed_draft());
        let fixed_rows: usize = fixed.iter().map(|((_, draft), _)| draft.len()).sum();
        open.retain(|((_, draft), _)| !draft.is_empty());
        let candidates: Vec<Candidates<'_>> = (open.iter())
            .map(|((_, draft), _)| Candidates {
                scores: &draft.scores,
                parents: &draft.parents,
            })
            .collect();
        let rows = base.rows + fixed_rows;
        let selection = self.budget.select(&candidates, Base { rows, ..base });
        let selected = selection.keep.into_iter().zip(selection.gains);
        for (((_, draft), gain), (keep, gains)) in open.into_iter().zip(selected) {
            *gain = gains;
            if keep.contains(&false) {
                draft.retain(&keep);
            }
        }
        gains
    }

    /// Learns what a step cost.
    pub fn note_step(&mut self, step: &StepCost) {
        let asked = self.requests;
        if self.reads_states() {
            let read = (self.drafter).pool(|pool| std::mem::take(&mut pool.network.read));
            let (rows, seconds) = read.unwrap_or_default();
            let cost = self.budget.draft_cost();
            let most = match cost.is_known() {
                true => MAX_RATIO * cost.seconds(rows),
                false => f64::INFINITY,
            };
            let (read, each) = ((rows, seconds.min(most)), step.sequences.max(1) as f64);
            let tokens = step.tokens as f64 * self.gaining as f64 / each;
            self.reading.note_step(self.prompt_rows, tokens, read);
            let is_plain = step.draft_nodes == 0 && step.base_rows == step.sequences;
            let is_plain = is_plain && step.sequences > 0;
            let ratio = is_plain.then(|| self.budget.relative_seconds(step));
            let has_drafted = self.drafter.pool(|pool| !pool.network.forwards.is_empty());
            let displacement = &mut self.reading.displacement;
            displacement.note_step(rows > 0 || has_drafted.unwrap_or_default(), ratio);
        }
        if asked == 0 {
            return self.budget.observe(step);
        }
        let forwards = self.drafter.pool(|pool| {
            let note = |(rows, seconds)| {
                self.budget.draft_cost().note(rows, seconds);
                seconds
            };
            pool.network.forwards.drain(..).map(note).sum::<f64>()
        });
        let forwards = forwards.unwrap_or(0.0);
        let own = (step.draft_seconds - forwards).max(0.0) / asked as f64;
        self.noted = FIRST_STEPS.min(self.noted + 1);
        let average = &mut self.ask_seconds;
        *average = if *average > 0.0 {
            let decay = if own < *average {
                DECAY_OF_DEARER
            } else {
                DECAY
            };
            decay * *average + (1.0 - decay) * own.min(MAX_RATIO * *average)
        } else {
            own
        };
        self.budget.observe(step);
    }

    /// See [`DraftPool::reset_prefix_cache`](super::pool::DraftPool::reset_prefix_cache).
    pub fn reset_prefix_cache(&mut self) {
        self.drafter.pool(|pool| pool.reset_prefix_cache());
    }

    /// Frees what is held for a sequence that does not begin yet. Whether it is to be read stays decided.
    pub fn release(&mut self, id: SeqId) {
        self.drafter.call("forget", |drafter| drafter.forget(id));
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.waits = true;
        }
    }

    /// See [`Drafter::forget`].
    pub fn forget(&mut self, id: SeqId) {
        self.drafter.call("forget", |drafter| drafter.forget(id));
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.is_read = false;
            sequence.late = None;
        }
    }

    /// See [`Drafter::end`].
    pub fn end(&mut self, state: &SequenceState) {
        if let Some(late) = self.take_late(state) {
            (self.drafter).call("observe", |drafter| drafter.observe(&[late]));
        }
        self.sequences.remove(&state.id);
        self.drafter.call("end", |drafter| drafter.end(state.id));
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

/// The step of these inputs without drafts.
pub fn base_of(inputs: &[StepInput<'_>]) -> Base {
    let gaining = || inputs.iter().filter(|input| input.sample);
    let sequences = gaining().count();
    let tokens: usize = gaining().map(|input| input.state.tokens.len()).sum();
    Base {
        sequences,
        rows: inputs.iter().map(|input| input.rows).sum(),
        context: tokens / sequences.max(1),
    }
}

#[cfg(test)]
mod gains;
#[cfg(test)]
mod loads;
#[cfg(test)]
mod runs;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
