//! Where the weights of adapters are: beside those of their base model.

use super::low_rank::LowRank;
use candle_core::{DType, Device};
use foretoken_core::error::Result;
use foretoken_kernels::{DeviceLora, LoraPart};
use std::sync::{Arc, Mutex, PoisonError};

/// The device of a base model. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Place {
    device: Device,
    /// The dtype of activations, in which a GPU has the weights of adapters.
    dtype: DType,
    /// Adapters on a GPU that nobody has any more.
    unused: Arc<Mutex<Vec<DeviceLora>>>,
}

/// What an adapter adds to the outputs of each linear layer.
pub(super) enum AdapterWeights {
    Host(Vec<Option<LowRank>>),
    Device(OnDevice),
}

/// An adapter on a GPU. Any thread may drop it, also while the GPU still computes with it.
pub(super) struct OnDevice {
    lora: DeviceLora,
    unused: Arc<Mutex<Vec<DeviceLora>>>,
}

impl Place {
    pub fn new(device: Device, dtype: DType) -> Self {
        Self {
            device,
            dtype,
            unused: Arc::default(),
        }
    }

    /// Puts the weights of an adapter there, of which `sites` has those of each linear layer.
    ///
    /// # Errors
    /// If shapes do not match, or the device has no memory.
    pub fn put(&self, sites: Vec<Vec<LoraPart>>) -> Result<AdapterWeights> {
        if self.device.is_cpu() {
            let sites = sites.into_iter().map(LowRank::new);
            return Ok(AdapterWeights::Host(sites.collect::<Result<_>>()?));
        }
        Ok(AdapterWeights::Device(OnDevice {
            lora: DeviceLora::new(&sites, self.dtype, &self.device)?,
            unused: self.unused.clone(),
        }))
    }

    /// Bytes of a weight that has `own` bytes in its file.
    pub fn value_bytes(&self, own: usize) -> usize {
        if self.device.is_cpu() {
            own
        } else {
            self.dtype.size_in_bytes()
        }
    }

    /// Frees the memory of adapters that nobody has any more. The thread that computes calls it: the memory is free after
    /// all that it has launched.
    pub fn free_unused(&self) {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        unused.clear();
    }
}

impl OnDevice {
    pub fn lora(&self) -> &DeviceLora {
        &self.lora
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        unused.push(self.lora.clone());
    }
}
