//! The target's distributions for all rows: computed once, stored in a file, and read in any order. The
//! same pass gives the hidden states that a head reads.
//!
//! A position takes `6 k + 4` bytes, little endian: k ids (u32), k natural logarithms of their
//! probabilities (f16), and the mass of all other ids (f32). A JSON file beside it stores their
//! [`Identity`]. The file grows only by whole rows, so a stopped run continues where it was.

use super::corpus::Row;
use super::features::FeatureStore;
use super::identity::Identity;
use super::loss::Soft;
use super::output::{open_kept, write_json};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken_core::model::{Batch, KeptState, Model, Taps};
use foretoken_kernels::parallel;
use half::f16;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Tokens of one forward of the target.
const CHUNK: usize = 128;
const BLOCK_SIZE: usize = 16;

/// An open file of distributions.
pub struct SoftTargets {
    identity: Identity,
    file: File,
    path: PathBuf,
    /// Number of rows in the file.
    rows: usize,
}

impl SoftTargets {
    /// Opens the file in `folder`. Existing contents are kept if `reuse` is set and they have the same
    /// identity.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn open(folder: &Path, identity: Identity, reuse: bool) -> Result<Self> {
        let (path, note) = (folder.join("targets.bin"), folder.join("targets.json"));
        let known = std::fs::read(&note).ok();
        let known = known.and_then(|json| serde_json::from_slice::<Identity>(&json).ok());
        let fits = reuse && known.as_ref() == Some(&identity);
        let file = open_kept(&path, fits)?;
        if !fits {
            write_json(&note, &identity)?;
        }
        let bytes = file.metadata().map_err(|e| Error::in_file(&path, e))?.len() as usize;
        let rows = (bytes / identity.row_bytes()).min(identity.rows);
        Ok(Self {
            identity,
            file,
            path,
            rows,
        })
    }

    /// Number of rows that are not [computed](Self::compute) yet, here or in `features`.
    pub fn missing(&self, features: Option<&FeatureStore>) -> usize {
        let known = features.map_or(self.rows, |features| features.rows().min(self.rows));
        self.identity.rows - known
    }

    /// Runs `target` once over the missing rows, and calls `done` after each. The hidden states go to
    /// `features`.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be written; the error of the target.
    pub fn compute(
        &mut self,
        target: &mut dyn Model,
        rows: &[Row],
        mut features: Option<&mut FeatureStore>,
        mut done: impl FnMut(),
    ) -> Result<()> {
        let (len, k) = (self.identity.seq_len, self.identity.top_k);
        let taps = features.as_ref().map_or(&[][..], |f| f.taps()).to_vec();
        let blocks = len.div_ceil(BLOCK_SIZE);
        let mut pass = TargetPass {
            kv: target.new_kv(blocks, BLOCK_SIZE)?,
            table: BlockTable::default(),
            taps,
        };
        BlockAllocator::new(blocks, BLOCK_SIZE)
            .reserve(&mut pass.table, len)
            .map_err(|_| Error::internal("the pool is as large as a row"))?;
        let failed = |e| Error::in_file(&self.path, e);
        let first = rows.len() - self.missing(features.as_deref());
        for (number, row) in rows.iter().enumerate().skip(first) {
            let (bytes, hidden) = pass.row(target, &row.tokens[..len], k)?;
            let start = (number * self.identity.row_bytes()) as u64;
            self.file.write_all_at(&bytes, start).map_err(failed)?;
            if let Some(features) = &mut features {
                features.write(number, &hidden)?;
            }
            self.rows = self.rows.max(number + 1);
            done();
        }
        if let Some(features) = features {
            features.sync()?;
        }
        self.file.sync_all().map_err(failed)
    }

    /// The distributions of all positions of `rows`, in order, on `device`.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be read.
    pub fn read(&self, rows: &[usize], device: &Device) -> Result<Soft> {
        let (size, k) = (self.identity.row_bytes(), self.identity.top_k);
        let mut bytes = vec![0; size * rows.len()];
        for (&row, bytes) in rows.iter().zip(bytes.chunks_mut(size)) {
            (self.file.read_exact_at(bytes, (row * size) as u64))
                .map_err(|e| Error::in_file(&self.path, e))?;
        }
        let positions = rows.len() * self.identity.seq_len;
        let (mut ids, mut probs) = (Vec::new(), Vec::new());
        let mut tails = Vec::with_capacity(positions);
        for position in bytes.chunks_exact(6 * k + 4) {
            tails.push(unpack(position, k, &mut ids, &mut probs));
        }
        Ok(Soft {
            ids: Tensor::from_vec(ids, (positions, k), device)?,
            probs: Tensor::from_vec(probs, (positions, k), device)?,
            tail: Tensor::from_vec(tails, (positions, 1), device)?,
        })
    }
}

/// The target's KV pool, for one row at a time.
struct TargetPass {
    kv: KvStore,
    table: BlockTable,
    /// The layers whose hidden states are wanted.
    taps: Vec<usize>,
}

impl TargetPass {
    /// The packed distributions of all positions of one row, and their hidden states.
    fn row(
        &mut self,
        target: &mut dyn Model,
        tokens: &[u32],
        k: usize,
    ) -> Result<(Vec<u8>, Vec<f32>)> {
        let vocab = target.info().vocab_size;
        let (mut packed, mut hidden) = (Vec::new(), Vec::new());
        for (chunk, part) in tokens.chunks(CHUNK).enumerate() {
            let mut batch = Batch::default();
            batch.push_span(part, &[], chunk * CHUNK, &self.table, BLOCK_SIZE);
            batch.keep_state(part.len(), &[], KeptState::of_chunk(0, chunk == 0));
            batch.logits = (0..part.len() as u32).collect();
            batch.taps = (!self.taps.is_empty()).then(|| Taps {
                layers: self.taps.clone(),
                rows: batch.logits.clone(),
            });
            let output = target.forward(&batch, &mut self.kv)?;
            let positions = output.read(|logits| {
                let mut rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
                parallel::map(&mut rows, |logits| pack(logits, k))
            })?;
            packed.extend(positions.into_iter().flatten());
            if let Some(states) = &output.tapped {
                let states = states.to_dtype(DType::F32)?.flatten_all()?;
                hidden.extend(states.to_vec1::<f32>()?);
            }
        }
        Ok((packed, hidden))
    }
}

/// Packs one position in the format that the module describes.
fn pack(logits: &[f32], k: usize) -> Vec<u8> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // If logits are equal, the lower id comes first, as in sampling.
    let by_logit = |a: &u32, b: &u32| {
        let (za, zb) = (logits[*a as usize], logits[*b as usize]);
        zb.total_cmp(&za).then(a.cmp(b))
    };
    if k < order.len() {
        order.select_nth_unstable_by(k, by_logit);
    }
    let (top, rest) = order.split_at_mut(k.min(logits.len()));
    top.sort_unstable_by(by_logit);
    let highest = f64::from(logits[top[0] as usize]);
    let weight = |id: &u32| (f64::from(logits[*id as usize]) - highest).exp();
    let tail: f64 = rest.iter().map(weight).sum();
    let sum = top.iter().map(weight).sum::<f64>() + tail;
    let mut bytes: Vec<u8> = top.iter().flat_map(|id| id.to_le_bytes()).collect();
    for id in &*top {
        let ln = f64::from(logits[*id as usize]) - highest - sum.ln();
        bytes.extend(f16::from_f64(ln).to_le_bytes());
    }
    bytes.extend(((tail / sum) as f32).to_le_bytes());
    bytes
}

/// Appends the ids and probabilities of one packed position, and returns the tail. The probabilities are
/// scaled so that all masses sum to 1 in spite of f16 rounding.
fn unpack(bytes: &[u8], k: usize, ids: &mut Vec<u32>, probs: &mut Vec<f32>) -> f32 {
    let (packed_ids, rest) = bytes.split_at(4 * k);
    let (logs, tail) = rest.split_at(2 * k);
    let id = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    ids.extend(packed_ids.chunks_exact(4).map(id));
    let tail = f32::from_bits(id(tail));
    let prob = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32().exp();
    let top: Vec<f32> = logs.chunks_exact(2).map(prob).collect();
    let scale = (1.0 - tail) / top.iter().sum::<f32>();
    probs.extend(top.iter().map(|p| p * scale));
    tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_survives_packing() {
        let logits: Vec<f32> = (0..50)
            .map(|i| ((i * 13 % 50) as f32).sqrt() * 2.0)
            .collect();
        let sum: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
        for k in [1, 7, 50] {
            let bytes = pack(&logits, k);
            assert_eq!(bytes.len(), 6 * k + 4);
            let (mut ids, mut probs) = (Vec::new(), Vec::new());
            let tail = unpack(&bytes, k, &mut ids, &mut probs);
            assert!(ids.is_sorted_by_key(|&id| -logits[id as usize]));
            let mut mass = f64::from(tail);
            for (&id, &p) in ids.iter().zip(&probs) {
                let exact = f64::from(logits[id as usize]).exp() / sum;
                // f16 stores logarithms down to -16 with an error of up to 1/256.
                assert!((f64::from(p) - exact).abs() < 5e-3 * exact, "{p} {exact}");
                mass += f64::from(p);
            }
            assert!((mass - 1.0).abs() < 1e-5, "{mass}");
            assert!(k < 50 || tail == 0.0);
        }
    }

    #[test]
    fn the_lower_of_equally_probable_ids_is_first() {
        let bytes = pack(&[1.0, 2.0, 2.0, 2.0], 2);
        let (mut ids, mut probs) = (Vec::new(), Vec::new());
        unpack(&bytes, 2, &mut ids, &mut probs);
        assert_eq!(ids, [1, 2]);
    }
}
