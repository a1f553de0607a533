//! Which GPU each layer of a model is loaded to, if there are several.

use super::{LoadOptions, open};
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::source::ModelSource;
use crate::split::LayerSplit;
use crate::weights::inventory::{self, SharedInventory};
use candle_core::Device;
use foretoken_core::error::{Error, Result};

/// Spreads the layers of the model of `source`, which is like `config`, by what they take, over the GPUs of `options`.
///
/// # Errors
/// A setup error, in one line: there are too many GPUs for it, or as of a load.
pub(super) fn split(
    source: &ModelSource,
    options: &LoadOptions,
    config: &ModelConfig,
) -> Result<LayerSplit> {
    let headers = LoadOptions {
        for_gpu: options.are_for_gpu(),
        device: Device::Cpu,
        more_devices: Vec::new(),
        ..options.clone()
    };
    let list = SharedInventory::default();
    let weights = open(source, &headers)?.1;
    let weights = weights.with_host_experts(options.host_expert_layers);
    Decoder::load(config.clone(), weights.headers_only(Some(&list)), || ())?;
    let first = std::iter::once(&options.device);
    let devices = first.chain(&options.more_devices).cloned().collect();
    let split = LayerSplit::of(
        devices,
        &options.shares,
        &config.spec,
        &inventory::take(&list),
    );
    split.map_err(Error::setup)
}
