//! A model's drafts, continued by tables.

use super::calibration::Measured;
use super::draft::{Committed, Draft, DraftCost, DraftRequest, Drafter, Forecast, SeqId};
use super::tables::Tables;
use crate::error::Result;

/// Lets a drafter with a model draft first, and tables continue its drafts as far as they are likely to
/// (the horizontal cascade of CS-Drafting: Chen et al. 2023, arXiv 2312.11462, section 3.2). Where the
/// model drafts nothing, the tables draft alone.
pub struct Cascade {
    first: Box<dyn Drafter>,
    tables: Tables,
}

impl Cascade {
    /// A cascade of `first` and `tables`.
    pub fn new(first: Box<dyn Drafter>, tables: Tables) -> Self {
        Self { first, tables }
    }
}

impl Drafter for Cascade {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let mut drafts = self.first.propose(requests)?;
        for (request, draft) in requests.iter().zip(&mut drafts) {
            // Under the rejection rule a draft has a fixed size.
            if !request.is_fixed {
                self.tables.extend(request, draft);
            }
        }
        Ok(drafts)
    }

    fn taps(&self) -> &[usize] {
        self.first.taps()
    }

    fn candidates(&self) -> usize {
        self.tables.candidates()
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        self.first.forecast(request)
    }

    fn calibrate(&mut self) -> Result<Measured> {
        self.first.calibrate()
    }

    fn forwards(&self) -> &[(usize, f64)] {
        self.first.forwards()
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        self.first.observe(committed);
        self.tables.observe(committed);
    }

    fn forget(&mut self, id: SeqId) {
        self.first.forget(id);
        self.tables.forget(id);
    }

    fn end(&mut self, id: SeqId) {
        self.first.end(id);
        self.tables.end(id);
    }

    fn cost(&self) -> DraftCost {
        self.first.cost()
    }

    fn kv_usage(&self) -> f64 {
        self.first.kv_usage()
    }

    fn check_invariants(&self) -> Result<(), String> {
        self.first.check_invariants()?;
        self.tables.check_invariants()
    }
}
