//! Speculative decoding: drafters, the acceptance rule, and the runner that joins them.

mod device;
pub mod draft;
mod draft_model;
mod ngram;
mod runner;
pub mod verify;

pub use draft::{Ask, Draft, DraftCost, Drafter, Kept, SeqId};
pub use draft_model::DraftModel;
pub use ngram::NgramDrafter;
pub use runner::{Round, SpeculativeRunner, Turn};
pub use verify::{Verdict, accept_by_chance, verify};
