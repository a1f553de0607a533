//! Checkpoints of safetensors whose matrices are packed as `quantization_config` says. Only the weights are as it says:
//! activations are those of the form in memory, whatever the configuration says about them.

mod awq;
mod compressed;
mod config;
mod fp4;
pub(crate) mod fp8;
mod gptq;
mod integers;
mod listed;
mod modules;
pub(crate) mod mxfp4;
mod nf4;
mod parts;
mod scheme;
mod settings;
pub(crate) mod stacked;

pub use config::PackedConfig;
pub use parts::Parts;
pub use scheme::{Blocks, FloatFormat, Opened, Scheme, Unpacked};
