//! Speculative decoding: drafters, the acceptance rule, and the runner that combines them.

mod acceptance_model;
mod attention_cost;
mod block_drafter;
mod budget;
mod calibration;
mod cascade;
mod cost;
mod device;
mod displacement;
pub mod draft;
mod draft_model;
mod drafter;
mod estimate;
mod features;
mod growth;
mod guard;
mod learned;
mod learning;
mod lookahead;
mod masks;
mod ngram;
mod pool;
mod proposer;
mod reading;
mod runner;
mod share;
mod states;
mod step;
mod tables;
mod target_cost;
mod theory;
mod translate;
pub mod verify;

pub use block_drafter::BlockDrafter;
pub use budget::BudgetMode;
pub use calibration::measure;
pub use cascade::Cascade;
pub use device::{logits_params, row_adjustments};
pub use draft::{
    CacheScope, Committed, Draft, DraftContext, DraftCost, DraftDist, DraftRequest, Forecast,
    Proposal, RejectedNode, SeqId, Source,
};
pub use draft_model::DraftModel;
pub use drafter::Drafter;
pub use learned::{Learned, LearnedCost, LearnedCount, LearnedDrafts};
pub use learning::{EXAMPLE_ROWS, LearnerLink, LearningDrafter, TrainingExample};
pub use lookahead::Lookahead;
pub use ngram::NgramDrafter;
pub use pool::DraftPool;
pub use proposer::Proposer;
pub use runner::SpeculativeRunner;
pub use states::max_state_copies;
pub use step::{SequenceState, StepInput, StepOutput, StepResult};
pub use tables::Tables;
pub use target_cost::{MeasuredForward, TargetCost};
pub use theory::expected_speed_up;
pub use translate::{JointModel, JointVocabulary, Tokenizer, Translator};
pub use verify::{Verdict, coupled, lossy, rejection, synthetic_acceptance};
