//! Where the weights of adapters are: beside those of their base model.

use super::low_rank::LowRank;
use candle_core::{DType, Device};
use foretoken_core::error::Result;
use foretoken_kernels::{DeviceLora, LoraPart};
use std::sync::{Arc, Mutex, PoisonError};

/// The devices of a base model. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// At least one.
    devices: Vec<Device>,
    /// For each linear layer, the index of its device.
    sites: Arc<[usize]>,
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

/// An adapter on GPUs. Any thread may drop it, also while the GPU still computes with it.
pub(super) struct OnDevice {
    /// For each GPU on which it changes a layer, what it adds to those there.
    loras: Vec<(Device, DeviceLora)>,
    unused: Arc<Mutex<Vec<DeviceLora>>>,
}

impl Place {
    pub fn new(devices: Vec<Device>, sites: Vec<usize>, dtype: DType) -> Self {
        Self {
            devices,
            sites: sites.into(),
            dtype,
            unused: Arc::default(),
        }
    }

    /// Puts the weights of an adapter there, of which `sites` has those of each linear layer.
    ///
    /// # Errors
    /// If shapes do not match, or the device has no memory.
    pub fn put(&self, sites: Vec<Vec<LoraPart>>) -> Result<AdapterWeights> {
        if self.is_cpu() {
            let sites = sites.into_iter().map(LowRank::new);
            return Ok(AdapterWeights::Host(sites.collect::<Result<_>>()?));
        }
        let mut loras = Vec::new();
        for (gpu, device) in self.devices.iter().enumerate() {
            let own = self.own(&sites, gpu);
            if own.iter().flatten().any(|part| part.pair.is_some()) {
                loras.push((device.clone(), DeviceLora::new(&own, self.dtype, device)?));
            }
        }
        Ok(AdapterWeights::Device(OnDevice {
            loras,
            unused: self.unused.clone(),
        }))
    }

    /// What is added to the layers of one GPU.
    fn own(&self, sites: &[Vec<LoraPart>], gpu: usize) -> Vec<Vec<LoraPart>> {
        let of = |(site, parts): (usize, &Vec<LoraPart>)| {
            let parts = parts.iter().cloned().map(|part| LoraPart {
                pair: part.pair.filter(|_| self.gpu(site) == gpu),
                ..part
            });
            parts.collect()
        };
        sites.iter().enumerate().map(of).collect()
    }

    /// The index of the device of a linear layer.
    pub fn gpu(&self, site: usize) -> usize {
        self.sites.get(site).copied().unwrap_or_default()
    }

    fn is_cpu(&self) -> bool {
        self.devices.iter().all(Device::is_cpu)
    }

    /// Bytes of a weight that has `own` bytes in its file.
    pub fn value_bytes(&self, own: usize) -> usize {
        if self.is_cpu() {
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
    /// What it adds to layers on `device`; `None` = nothing.
    pub fn on(&self, device: &Device) -> Option<&DeviceLora> {
        let mut loras = self.loras.iter();
        let found = loras.find(|(own, _)| own.same_device(device));
        found.map(|(_, lora)| lora)
    }

    /// What it adds to the layers of a model on one GPU.
    pub fn lora(&self) -> Option<&DeviceLora> {
        self.loras.first().map(|(_, lora)| lora)
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        unused.extend(self.loras.drain(..).map(|(_, lora)| lora));
    }
}
