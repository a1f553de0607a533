//! What a checkpoint stores and what it becomes when it is loaded, by its headers alone.

use crate::matrix::WeightForm;
use std::sync::{Arc, Mutex, PoisonError};

/// A tensor that a model reads.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Hugging Face's name.
    pub name: String,
    /// Number of values.
    pub elements: u64,
    /// The type in the file: `BF16` or `Q4_1`.
    pub stored: String,
    /// Bytes that the tensor takes in the file.
    pub stored_bytes: u64,
    /// The type in memory.
    pub loaded: String,
    /// Bytes that the tensor takes in memory.
    pub loaded_bytes: u64,
    /// The layer of the decoder that has it.
    pub layer: Option<usize>,
    /// Whether a GPU reads it in the host's memory.
    pub on_host: bool,
    /// Whether it is an embedding, of which a token needs one row, if it is not the output layer, too.
    pub is_embedding: bool,
}

impl TensorEntry {
    /// Whether it has weights of experts of which a token uses some.
    pub fn is_of_experts(&self) -> bool {
        let fused = ["input_linear", "output_linear"];
        let fused = fused.map(|part| format!(".block_sparse_moe.{part}."));
        self.name.contains(".experts.") || fused.iter().any(|part| self.name.contains(part))
    }
}

/// The tensors that a model reads, in the order in which it reads them.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The tensors.
    pub entries: Vec<TensorEntry>,
}

/// An inventory that is filled while a model is loaded.
pub(crate) type SharedInventory = Arc<Mutex<Inventory>>;

impl Inventory {
    /// Adds the tensor `name` of a layer, of the shape `dims`, that takes `stored_bytes` of its file and becomes `form`, in
    /// the host's memory or not.
    pub(crate) fn add(
        &mut self,
        (name, (layer, on_host)): (String, (Option<usize>, bool)),
        dims: &[usize],
        (stored, stored_bytes): (String, u64),
        form: WeightForm,
    ) {
        self.entries.push(TensorEntry {
            name,
            elements: dims.iter().map(|&dim| dim as u64).product(),
            stored,
            stored_bytes,
            loaded: form.name(),
            loaded_bytes: form.bytes(dims),
            layer,
            on_host,
            is_embedding: false,
        });
    }

    /// Whether a token needs one row of `entry`, which is of this list: an embedding that is not the output layer, too, as that
    /// of tokens is, which is the first, where `is_tied` holds.
    pub fn is_looked_up(&self, entry: &TensorEntry, is_tied: bool) -> bool {
        let first = self.entries.iter().find(|entry| entry.is_embedding);
        let is_output = is_tied && first.is_some_and(|first| std::ptr::eq(first, entry));
        entry.is_embedding && !is_output
    }

    /// Sets that the tensor that was added last is an embedding.
    pub(crate) fn last_is_embedding(&mut self) {
        if let Some(last) = self.entries.last_mut() {
            last.is_embedding = true;
        }
    }

    /// Sets that the tensor that was added last, of the shape `dims`, becomes `form` instead.
    pub(crate) fn last_becomes(&mut self, dims: &[usize], form: WeightForm) {
        if let Some(last) = self.entries.last_mut() {
            last.loaded = form.name();
            last.loaded_bytes = form.bytes(dims);
        }
    }

    /// Bytes that the tensors take in memory: of the device that computes, and of the host beside a GPU.
    pub fn loaded_bytes(&self) -> (u64, u64) {
        let of = |on_host| {
            self.sum(|entry| {
                if entry.on_host == on_host {
                    entry.loaded_bytes
                } else {
                    0
                }
            })
        };
        (of(false), of(true))
    }

    /// The sum of what `of` says about each tensor.
    pub fn sum(&self, of: impl Fn(&TensorEntry) -> u64) -> u64 {
        self.entries.iter().map(of).sum()
    }
}

/// Takes the inventory out after loading.
pub(crate) fn take(shared: &SharedInventory) -> Inventory {
    std::mem::take(&mut *lock(shared))
}

pub(crate) fn lock(shared: &SharedInventory) -> std::sync::MutexGuard<'_, Inventory> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
