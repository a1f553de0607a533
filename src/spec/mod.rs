//! Speculative decoding: drafters, the acceptance rule, and the runner that combines them.

mod device;
pub mod draft;
mod draft_model;
mod ngram;
mod runner;
mod step;
pub mod verify;

pub use device::{logits_params, row_adjustments};
pub use draft::{
    CacheScope, Committed, Draft, DraftContext, DraftCost, DraftDist, DraftRequest, Drafter, SeqId,
    Source,
};
pub use draft_model::DraftModel;
pub use ngram::NgramDrafter;
pub use runner::SpeculativeRunner;
pub use step::{SequenceState, StepInput, StepOutput, StepResult};
pub use verify::{Verdict, coupled, rejection, synthetic_acceptance};
