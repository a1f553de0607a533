//! One engine thread that owns the models; everyone else holds a cloneable [`EngineHandle`].

mod handle;
pub mod request;
pub mod stats;

pub use handle::{EngineHandle, EngineOptions, Limits};
pub use request::{Event, FinishReason, Request, SpecUsage, TokenLogprobs, TokenOutput};
pub use stats::Stats;
