//! From the drafter's guesses to the drafts that a step verifies.

use super::budget::{self, Budget, BudgetMode, Candidates, Probe, StepCost};
use super::draft::{Committed, Draft, DraftCost, DraftRequest, Drafter, Forecast, SeqId};
use super::step::StepInput;
use std::collections::HashMap;

/// The drafter, and the budget that decides how deep it drafts and what is verified.
pub struct Proposer {
    drafter: Box<dyn Drafter>,
    budget: Budget,
    /// What sequences without drafts have saved for their next one.
    probes: HashMap<SeqId, Probe>,
    /// Whether a failure of the drafter was reported.
    has_failed: bool,
}

/// A step without its drafts.
#[derive(Debug, Clone, Copy)]
pub struct Base {
    /// Sequences that gain a token.
    pub sequences: usize,
    /// Rows, and the nodes of drafts of a fixed size.
    pub rows: usize,
}

impl Proposer {
    pub fn new(drafter: Box<dyn Drafter>, mode: BudgetMode) -> Self {
        Self {
            drafter,
            budget: Budget::new(mode),
            probes: HashMap::new(),
            has_failed: false,
        }
    }

    /// The costs that the budget learns.
    pub fn budget(&mut self) -> &mut Budget {
        &mut self.budget
    }

    /// The current estimate of tokens per second over those of plain decoding.
    pub fn speed_up(&self) -> f64 {
        self.budget.speed_up()
    }

    pub fn drafter(&self) -> &dyn Drafter {
        &*self.drafter
    }

    /// Returns a draft for each input, of what is worth verifying, with ids below `vocab_size`. If
    /// the drafter fails, the drafts are empty and the step continues.
    pub fn propose(&mut self, inputs: &mut [StepInput<'_>], vocab_size: usize) -> Vec<Draft> {
        let mut drafts = vec![Draft::default(); inputs.len()];
        let base = Base::of(inputs);
        let min_score = self.budget.min_score(base.rows, base.sequences);
        let wants = |input: &StepInput<'_>| input.nodes > 0 && input.depth > 0;
        let asking = inputs.iter_mut().enumerate();
        let asking = asking.filter(|(_, input)| wants(input));
        let (places, mut requests): (Vec<usize>, Vec<_>) = asking
            .map(|(place, input)| {
                let min_score = if input.has_fixed_draft() {
                    0.0
                } else {
                    min_score
                };
                (place, input.draft_request(min_score))
            })
            .unzip();
        if requests.is_empty() {
            return drafts;
        }
        self.limit_depths(&mut requests, base);
        match self.drafter.propose(&mut requests) {
            Ok(proposed) => places
                .into_iter()
                .zip(proposed)
                .for_each(|(place, draft)| drafts[place] = draft),
            Err(error) => {
                if std::mem::replace(&mut self.has_failed, true) {
                    tracing::debug!("no drafts in this step: {error}");
                } else {
                    tracing::warn!("no drafts in this step: {error} (reported once)");
                }
                let failed: Vec<SeqId> = requests.iter().map(|request| request.id).collect();
                failed.into_iter().for_each(|id| self.forget(id));
            }
        }
        for (input, draft) in inputs.iter_mut().zip(&mut drafts) {
            draft.end_where_invalid(input.nodes, input.depth, vocab_size);
            input.state.restore_sampler();
        }
        self.cut(inputs, &mut drafts, base);
        drafts
    }

    /// Sets how many levels of each draft may cost forwards.
    fn limit_depths(&mut self, requests: &mut [DraftRequest<'_>], base: Base) {
        let forecast = |request: &DraftRequest<'_>| match request.is_fixed {
            true => None,
            false => self.drafter.forecast(request),
        };
        let forecasts: Vec<Option<Forecast>> = requests.iter().map(forecast).collect();
        let mut probes: Vec<Probe> = (requests.iter())
            .map(|request| self.probes.get(&request.id).copied().unwrap_or_default())
            .collect();
        let expected = forecasts.iter().zip(requests.iter()).zip(&mut probes);
        let mut asked: Vec<budget::Forecast<'_>> = expected
            .filter_map(|((forecast, request), probe)| {
                let forecast = forecast.as_ref()?;
                Some(budget::Forecast {
                    path: &forecast.path,
                    max_depth: request.length,
                    pending: forecast.pending,
                    probe,
                })
            })
            .collect();
        let mut depths = (self.budget)
            .depths(&mut asked, base.rows, base.sequences)
            .into_iter();
        for ((request, forecast), probe) in requests.iter_mut().zip(&forecasts).zip(probes) {
            if forecast.is_some() {
                request.model_depth = depths.next().unwrap_or(0);
                self.probes.insert(request.id, probe);
            }
        }
    }

    /// Removes the nodes that are not worth their row.
    fn cut(&mut self, inputs: &[StepInput<'_>], drafts: &mut [Draft], base: Base) {
        let fixed = |(input, draft): (&StepInput<'_>, &Draft)| match input.has_fixed_draft() {
            true => draft.len(),
            false => 0,
        };
        let fixed_rows: usize = inputs.iter().zip(&*drafts).map(fixed).sum();
        let both = inputs.iter().zip(drafts);
        let mut open: Vec<&mut Draft> = both
            .filter(|(input, draft)| !input.has_fixed_draft() && !draft.is_empty())
            .map(|(_, draft)| draft)
            .collect();
        let candidates: Vec<Candidates<'_>> = (open.iter())
            .map(|draft| Candidates {
                scores: &draft.scores,
                parents: &draft.parents,
            })
            .collect();
        let rows = base.rows + fixed_rows;
        let keep = self.budget.select(&candidates, rows, base.sequences);
        for (draft, keep) in open.iter_mut().zip(keep) {
            if keep.contains(&false) {
                draft.retain(&keep);
            }
        }
    }

    /// Learns what a step cost.
    pub fn note_step(&mut self, step: &StepCost) {
        for &(rows, seconds) in self.drafter.forwards() {
            self.budget.draft_cost().note(rows, seconds);
        }
        self.budget.observe(step);
    }

    /// See [`Drafter::observe`].
    pub fn observe(&mut self, committed: &[Committed<'_>]) {
        self.drafter.observe(committed);
    }

    /// See [`Drafter::forget`].
    pub fn forget(&mut self, id: SeqId) {
        self.drafter.forget(id);
    }

    /// See [`Drafter::end`].
    pub fn end(&mut self, id: SeqId) {
        self.probes.remove(&id);
        self.drafter.end(id);
    }

    /// Draft nodes that were proposed and not verified, since the start.
    pub fn refused(&self) -> u64 {
        self.budget.refused()
    }

    /// See [`Drafter::cost`].
    pub fn cost(&self) -> DraftCost {
        self.drafter.cost()
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
