//! A deterministic test double. It stores token ids as K and positions as V, and hashes what it
//! reads back through block table and mask into logits, so that a wrong slot, mask, position or
//! rollback changes its output. Its hidden states are hashes of the same kind.

use super::{Batch, ForwardOutput, Model, ModelInfo, Span};
use crate::error::{Error, Result};
use crate::kv::{KvHeads, KvShape, KvStore};
use crate::sampling::mix;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use foretoken_kernels::kv_write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// See the module. Toys with the same `seed` and `noise` compute the same logits; `noise` mixes in
/// a second hash, so that a noisy toy is a draft that is right some of the time.
#[derive(Debug, Clone)]
pub struct ToyModel {
    info: ModelInfo,
    seed: u64,
    noise: f32,
    /// Rows of the largest forward so far.
    pub largest_forward: Arc<AtomicUsize>,
    /// Every forward takes this lock: holding it stops the model.
    pub gate: Arc<Mutex<()>>,
}

impl ToyModel {
    /// `noise` 0 = the target itself, 1 = nothing in common with it.
    pub fn new(vocab_size: usize, max_len: usize, seed: u64, noise: f32) -> Self {
        let info = ModelInfo {
            architecture: "toy".into(),
            vocab_size,
            max_position_embeddings: max_len,
            hidden_size: 1,
            ..ModelInfo::default()
        };
        Self {
            info,
            seed,
            noise,
            largest_forward: Arc::default(),
            gate: Arc::default(),
        }
    }

    /// Sets the [mask token](ModelInfo::mask_token) of the model.
    pub fn with_mask_token(mut self, mask: u32) -> Self {
        self.info.mask_token = Some(mask);
        self
    }

    /// Sets the end-of-sequence ids of the model.
    pub fn with_eos(mut self, ids: &[u32]) -> Self {
        self.info.eos_token_ids = ids.to_vec();
        self
    }

    /// Logits after a context that hashes to `context`.
    fn logits(&self, context: u64) -> impl Iterator<Item = f32> + '_ {
        (0..self.info.vocab_size as u64).map(move |id| {
            let base = unit(mix(context ^ mix(id ^ self.seed)));
            let own = unit(mix(context ^ mix(id ^ !self.seed)));
            6.0 * ((1.0 - self.noise) * base + self.noise * own)
        })
    }
}

/// A number in [0, 1).
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1u64 << 24) as f32
}

/// Hash of all tokens and positions that row `row` of `span` sees, as stored in the pool.
fn context_hash(keys: &[f32], values: &[f32], span: &Span, row: usize, block_size: usize) -> u64 {
    let visible = (0..span.context).chain(
        (0..span.rows.len())
            .filter(|&other| span.sees(row, other))
            .map(|other| span.context + other),
    );
    visible.fold(0, |hash, at| {
        let slot = span.blocks[at / block_size] as usize * block_size + at % block_size;
        mix(hash ^ mix(u64::from(keys[slot].to_bits()) << 32 | u64::from(values[slot].to_bits())))
    })
}

/// Calls `f` with the f32 data of a contiguous CPU tensor.
fn with_f32<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> T) -> Result<T> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(data)) => Ok(f(data)),
        _ => Err(Error::internal("the toy model's pool is f32 on the CPU")),
    }
}

impl Model for ToyModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn kv_shape(&self) -> KvShape {
        KvShape::new(vec![KvHeads::new(1, 1)], DType::F32)
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let rows = batch.tokens.len();
        drop(self.gate.lock());
        self.largest_forward.fetch_max(rows, Ordering::Relaxed);
        let column = |ids: &[u32]| {
            let data = ids.iter().map(|&id| id as f32).collect();
            Tensor::from_vec(data, (rows, 1, 1), &Device::Cpu)
        };
        let (keys, values) = &kv.layers[0];
        let slots = Tensor::new(batch.slots.as_slice(), &Device::Cpu)?;
        kv_write(keys, &column(&batch.tokens)?, &slots)?;
        kv_write(values, &column(&batch.positions)?, &slots)?;
        let context_of = |wanted: u32| -> Result<u64> {
            let of_row = |span: &&Span| span.rows.contains(&(wanted as usize));
            let span = (batch.spans.iter().find(of_row))
                .ok_or_else(|| Error::internal("a row without a span"))?;
            let row = wanted as usize - span.rows.start;
            with_f32(keys, |keys| {
                with_f32(values, |values| {
                    context_hash(keys, values, span, row, kv.block_size)
                })
            })?
        };
        let mut logits = Vec::with_capacity(batch.logits.len() * self.info.vocab_size);
        for &wanted in &batch.logits {
            logits.extend(self.logits(context_of(wanted)?));
        }
        let mut hidden = Vec::new();
        let taps = batch.taps.clone().unwrap_or_default();
        for &row in &taps.rows {
            let context = context_of(row)?;
            let layers = taps.layers.iter();
            hidden.extend(layers.map(|&layer| unit(mix(context ^ mix(layer as u64)))));
        }
        let shape = (batch.logits.len(), self.info.vocab_size);
        let logits = Tensor::from_vec(logits, shape, &Device::Cpu)?;
        let tapped = if hidden.is_empty() {
            None
        } else {
            let shape = (taps.rows.len(), taps.layers.len());
            Some(Tensor::from_vec(hidden, shape, &Device::Cpu)?)
        };
        let states = batch.last_hidden.iter();
        let states = states.map(|&row| context_of(row).map(|c| unit(mix(c ^ self.seed))));
        let states: Vec<f32> = states.collect::<Result<_>>()?;
        let last_hidden = match states.len() {
            0 => None,
            rows => Some(Tensor::from_vec(states, (rows, 1), &Device::Cpu)?),
        };
        Ok(ForwardOutput {
            tapped,
            last_hidden,
            ..ForwardOutput::of(logits)
        })
    }
}
