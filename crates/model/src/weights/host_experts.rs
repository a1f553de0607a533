//! Experts whose weights stay in the host's memory, where a GPU reads them.

use super::Weights;
use candle_core::Device;

/// Which layers' experts are in the host's memory, and what is read now.
#[derive(Debug, Default)]
pub(super) struct HostExperts {
    /// The experts of so many layers are, the first ones.
    layers: usize,
    /// The layer that is read; `None` = it is none of the decoder's.
    layer: Option<usize>,
    /// Whether experts are read that stay there.
    is_reading: bool,
}

impl HostExperts {
    /// The layer that is read, and whether the host keeps what is read.
    pub fn place(&self) -> (Option<usize>, bool) {
        (self.layer, self.is_reading)
    }
}

impl Weights {
    /// Keeps the experts of the first `layers` layers in the host's memory, if a GPU computes.
    pub(crate) fn with_host_experts(mut self, layers: usize) -> Self {
        if self.dtypes.on_gpu {
            self.experts.layers = layers;
        }
        self
    }

    /// Says that what follows is of this layer of the decoder, and goes to its GPU; `None` = of none.
    pub(crate) fn begin_layer(&mut self, layer: Option<usize>) {
        self.experts.layer = layer;
        if let Some(split) = &self.split {
            self.device = layer
                .map_or(split.first(), |layer| split.device(layer))
                .clone();
        }
    }

    /// Reads matrices of a layer's experts with `read`, to the memory in which they stay. They have the form in which a GPU
    /// reads them.
    pub(crate) fn of_experts<T>(&mut self, read: impl FnOnce(&mut Self) -> T) -> T {
        let is_kept = (self.experts.layer).is_some_and(|layer| layer < self.experts.layers);
        if !is_kept {
            return read(self);
        }
        let device = std::mem::replace(&mut self.device, Device::Cpu);
        self.experts.is_reading = true;
        let done = read(self);
        self.experts.is_reading = false;
        self.device = device;
        done
    }
}
