//! Layers of a model that are spread over several GPUs: consecutive ones on each, and all that is no layer on the first.
//! The hidden states of a forward's rows go from GPU to GPU. A layer computes the same wherever it is.

use crate::spec::{KvSource, ModelSpec};
use crate::weights::inventory::Inventory;
use candle_core::Device;
use foretoken_core::kv::{PoolGpus, PoolPlace};
use std::ops::Range;

/// The GPU of each layer of a model.
#[derive(Debug, Clone)]
pub struct LayerSplit {
    /// At least one. The CPU stands for GPUs that are only planned for.
    devices: Vec<Device>,
    /// For each layer the index of its GPU, ascending.
    layers: Vec<usize>,
}

impl LayerSplit {
    /// All of `layers` layers on one device.
    pub(crate) fn on_one(device: &Device, layers: usize) -> Self {
        Self {
            devices: vec![device.clone()],
            layers: vec![0; layers],
        }
    }

    /// Spreads the layers of a model like `spec`, whose weights `inventory` lists, over `devices`: so that the GPU with
    /// the most bytes for its share of `shares` has as few as possible. Layers that read K and V of another layer are
    /// on its GPU.
    ///
    /// # Errors
    /// In one line, if there are fewer layers that can be parted than GPUs, or not as many shares.
    pub(crate) fn of(
        devices: Vec<Device>,
        shares: &[f64],
        spec: &ModelSpec,
        inventory: &Inventory,
    ) -> Result<Self, String> {
        let mut bytes = vec![0; spec.layers.len()];
        let mut others = 0;
        for entry in inventory.entries.iter().filter(|entry| !entry.on_host) {
            match entry.layer.and_then(|layer| bytes.get_mut(layer)) {
                Some(of_layer) => *of_layer += entry.loaded_bytes,
                None => others += entry.loaded_bytes,
            }
        }
        let gpus = devices.len();
        let shares = match shares {
            [] => vec![1.; gpus],
            shares if shares.len() == gpus => shares.to_vec(),
            shares => {
                return Err(format!(
                    "--tensor-split has {} shares for {gpus} GPUs: give one for each",
                    shares.len()
                ));
            }
        };
        let starts = parts(&bytes, others, &shares, |layer| may_begin(spec, layer));
        let starts = starts.ok_or_else(|| {
            let borders = (1..bytes.len()).filter(|&layer| may_begin(spec, layer));
            format!(
                "{gpus} GPUs are too many for this model, whose {} layers can be on up to {}: lower --pipeline-parallel-size",
                bytes.len(),
                borders.count() + 1
            )
        })?;
        let gpu = |layer| starts.partition_point(|&start| start <= layer) - 1;
        Ok(Self {
            devices,
            layers: (0..bytes.len()).map(gpu).collect(),
        })
    }

    /// Of some of the layers.
    pub(crate) fn subset(&self, layers: &[usize]) -> Self {
        Self {
            devices: self.devices.clone(),
            layers: layers.iter().map(|&layer| self.layers[layer]).collect(),
        }
    }

    /// The first GPU, or the single device.
    pub(crate) fn first(&self) -> &Device {
        &self.devices[0]
    }

    /// The GPUs.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The index of the GPU of a layer.
    pub fn gpu(&self, layer: usize) -> usize {
        self.layers[layer]
    }

    /// The layers of the GPU with this index.
    pub fn layers_on(&self, gpu: usize) -> Range<usize> {
        let before = |of: usize| self.layers.partition_point(|&own| own < of);
        before(gpu)..before(gpu + 1)
    }

    /// The GPU of a layer.
    pub(crate) fn device(&self, layer: usize) -> &Device {
        &self.devices[self.layers[layer]]
    }

    /// Whether a layer is where all is that is no layer.
    pub(crate) fn is_on_first(&self, layer: usize) -> bool {
        self.layers[layer] == 0
    }

    /// Number of GPUs, or 1.
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// Bytes of the weights of `inventory` on each GPU.
    pub fn bytes(&self, inventory: &Inventory) -> Vec<u64> {
        let mut bytes = vec![0; self.count()];
        for entry in inventory.entries.iter().filter(|entry| !entry.on_host) {
            let layer = entry.layer.filter(|&layer| layer < self.layers.len());
            bytes[layer.map_or(0, |layer| self.gpu(layer))] += entry.loaded_bytes;
        }
        bytes
    }

    /// Where the pools of a model like `spec` are.
    pub(crate) fn pools(&self, spec: &ModelSpec) -> PoolGpus {
        let mut pools = PoolGpus::default();
        if self.count() == 1 {
            return pools;
        }
        pools.devices.clone_from(&self.devices);
        for (place, &gpu) in spec.pool_places().zip(&self.layers) {
            match place {
                // Otherwise it is the pool of an earlier layer.
                PoolPlace::Tokens(pool) if pool == pools.layers.len() => pools.layers.push(gpu),
                PoolPlace::States(_) => pools.states.push(gpu),
                PoolPlace::Tokens(_) | PoolPlace::Nothing => {}
            }
        }
        pools
    }
}

/// Whether a GPU may begin with `layer`: neither it nor a later layer reads K and V of an earlier one.
fn may_begin(spec: &ModelSpec, layer: usize) -> bool {
    let reads_earlier = |kv| matches!(kv, KvSource::Layer(owner) if owner < layer);
    !spec.layers[layer..]
        .iter()
        .any(|later| reads_earlier(later.kv))
}

/// The first layer of each of `shares.len()` parts of the layers with these `bytes`, none of them empty, so that the
/// largest number of bytes for its share is as small as possible, and then the others are as alike as possible, by the sum of
/// their squares. The first part has `others` bytes besides. `None` = there are not so many parts, each but the first of which
/// begins with a layer that `may_begin` one.
fn parts(
    bytes: &[u64],
    others: u64,
    shares: &[f64],
    may_begin: impl Fn(usize) -> bool,
) -> Option<Vec<usize>> {
    let begins: Vec<bool> = (0..bytes.len()).map(may_begin).collect();
    let mut sums = vec![0];
    for bytes in bytes {
        sums.push(sums[sums.len() - 1] + bytes);
    }
    let load = |part: usize, from: usize, to: usize| {
        let others = if part == 0 { others } else { 0 };
        (sums[to] - sums[from] + others) as f64 / shares[part]
    };
    // best[part][end]: the largest load of the parts up to this one, which ends before layer `end`, the sum of their squares,
    // and where it begins.
    let mut best: Vec<Vec<Option<(f64, f64, usize)>>> = Vec::new();
    for part in 0..shares.len() {
        let to_end = |end: usize| {
            let first = (part..end).filter(|&from| match part {
                0 => from == 0,
                _ => begins[from],
            });
            let loads = first.filter_map(|from| {
                let (largest, squares, _) = match part {
                    0 => (0., 0., 0),
                    _ => best[part - 1][from]?,
                };
                let own = load(part, from, end);
                Some((own.max(largest), squares + own * own * shares[part], from))
            });
            loads.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)))
        };
        let row = (0..=bytes.len()).map(to_end).collect();
        best.push(row);
    }
    let mut starts = Vec::new();
    let mut end = bytes.len();
    for row in best.iter().rev() {
        end = row[end]?.2;
        starts.push(end);
    }
    starts.reverse();
    Some(starts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use std::path::Path;

    #[test]
    fn the_fullest_gpu_is_as_empty_as_layers_allow() {
        let of = |bytes: &[u64], others, shares: &[f64]| parts(bytes, others, shares, |_| true);
        assert_eq!(of(&[1; 6], 0, &[1., 1.]), Some(vec![0, 3]));
        // What is no layer is on the first.
        assert_eq!(of(&[1; 6], 2, &[1., 1.]), Some(vec![0, 2]));
        assert_eq!(of(&[1; 6], 0, &[2., 1.]), Some(vec![0, 4]));
        assert_eq!(of(&[4, 1, 1, 4], 0, &[1., 1., 1.]), Some(vec![0, 1, 3]));
        assert_eq!(of(&[1; 3], 100, &[1., 1., 1.]), Some(vec![0, 1, 2]));
        // However full the first must be, the others are alike.
        assert_eq!(of(&[1; 30], 20, &[1., 1., 1.]), Some(vec![0, 1, 15]));
        let shares = [1., 24., 24.];
        assert_eq!(of(&[17; 81], 42, &shares), Some(vec![0, 1, 41]));
        assert_eq!(of(&[1; 2], 0, &[1., 1., 1.]), None);
        let odd = parts(&[1; 6], 0, &[1., 1.], |layer| layer % 2 == 0);
        assert_eq!(odd, Some(vec![0, 2]));
        assert_eq!(parts(&[1; 6], 0, &[1., 1.], |_| false), None);
    }

    #[test]
    fn a_gpu_has_consecutive_layers() {
        let split = LayerSplit {
            devices: vec![Device::Cpu; 3],
            layers: vec![0, 0, 1, 2, 2],
        };
        let found: Vec<_> = (0..3).map(|gpu| split.layers_on(gpu)).collect();
        assert_eq!(found, [0..2, 2..3, 3..5]);
        // A draft of some of them may have none of one GPU.
        let some = split.subset(&[0, 3]);
        let found: Vec<_> = (0..3).map(|gpu| some.layers_on(gpu).len()).collect();
        assert_eq!(found, [1, 0, 1]);
    }

    /// Of the six layers, the last two read the K and V of layers 2 and 3.
    #[test]
    fn layers_stay_with_those_whose_keys_they_read() {
        let fixture = "../../tests/fixtures/architectures/gemma4/config.json";
        let config = ModelConfig::from_json(Path::new(fixture)).unwrap();
        let begins: Vec<usize> = (1..6)
            .filter(|&layer| may_begin(&config.spec, layer))
            .collect();
        assert_eq!(begins, [1, 2]);
    }
}
