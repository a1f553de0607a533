//! Pools of a model whose layers are spread over several GPUs.

use candle_core::Device;

/// Where the pools of a model are. By default all are on the device of the model.
#[derive(Debug, Clone, Default)]
pub struct PoolGpus {
    /// The GPUs; none = all pools are on the device of the model. The CPU stands for GPUs that are only planned for.
    pub devices: Vec<Device>,
    /// For each layer with K and V, the index of its GPU.
    pub layers: Vec<usize>,
    /// For each layer with states, the index of its GPU.
    pub states: Vec<usize>,
}

impl PoolGpus {
    /// The index of the GPU of the layer with this place among those with K and V.
    pub(super) fn of_layer(&self, layer: usize) -> usize {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    /// The same among those with states.
    pub(super) fn of_state(&self, state: usize) -> usize {
        self.states.get(state).copied().unwrap_or_default()
    }

    /// The GPU with this index, of a model on `device`.
    pub(super) fn device<'a>(&'a self, gpu: usize, device: &'a Device) -> &'a Device {
        self.devices.get(gpu).unwrap_or(device)
    }
}
