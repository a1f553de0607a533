//! Files of safetensors as their bytes, to change what candle cannot read.

use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor as it is stored.
pub struct StoredTensor {
    pub dtype: String,
    pub dims: Vec<usize>,
    pub data: Vec<u8>,
}

/// The tensors of a file.
pub struct Stored {
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl Stored {
    pub fn read(file: &Path) -> Self {
        let bytes = std::fs::read(file).unwrap();
        let (len, rest) = bytes.split_at(8);
        let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
        let (header, data) = rest.split_at(len);
        let header: Map<String, Json> = serde_json::from_slice(header).unwrap();
        let tensor = |entry: &Json| {
            let number = |json: &Json| json.as_u64().unwrap() as usize;
            let offsets = [0, 1].map(|i| number(&entry["data_offsets"][i]));
            StoredTensor {
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                dims: entry["shape"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(number)
                    .collect(),
                data: data[offsets[0]..offsets[1]].to_vec(),
            }
        };
        let entries = header.iter().filter(|(name, _)| *name != "__metadata__");
        let tensors = entries.map(|(name, entry)| (name.clone(), tensor(entry)));
        Self {
            tensors: tensors.collect(),
        }
    }

    pub fn write(&self, file: &Path) {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, tensor) in &self.tensors {
            let start = data.len();
            data.extend(&tensor.data);
            let offsets = [start, data.len()];
            let entry =
                json!({ "dtype": tensor.dtype, "shape": tensor.dims, "data_offsets": offsets });
            header.insert(name.clone(), entry);
        }
        let header = Json::from(header).to_string().into_bytes();
        let len = (header.len() as u64).to_le_bytes();
        std::fs::write(file, [&len[..], &header, &data].concat()).unwrap();
    }

    /// Gives a tensor another shape, of as many values or fewer.
    pub fn reshape(&mut self, name: &str, dims: &[usize]) {
        let tensor = self.tensors.get_mut(name).unwrap();
        let values: usize = tensor.dims.iter().product();
        let wanted: usize = dims.iter().product();
        tensor.data.resize(tensor.data.len() / values * wanted, 0);
        tensor.dims = dims.to_vec();
    }

    /// Gives a tensor another first bytes.
    pub fn start(&mut self, name: &str, bytes: &[u8]) {
        let tensor = self.tensors.get_mut(name).unwrap();
        tensor.data[..bytes.len()].copy_from_slice(bytes);
    }

    /// Gives a tensor another dtype of the same size.
    pub fn retype(&mut self, name: &str, dtype: &str) {
        self.tensors.get_mut(name).unwrap().dtype = dtype.to_owned();
    }
}
