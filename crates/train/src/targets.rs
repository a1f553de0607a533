//! The target's distributions for all rows: computed once, stored in a file, and read in any order. The
//! same pass gives the hidden states that a head reads.
//!
//! A position takes `6 k + 4` bytes, little endian: k ids (u32), k natural logarithms of their
//! probabilities (f16), and the mass of all other ids (f32). A JSON file beside it stores their
//! `Identity`. The file grows only by whole rows, so a stopped run continues where it was.

use super::corpus::Row;
use super::features::FeatureStore;
use super::identity::Identity;
use super::loss::Soft;
use super::output::{belongs_to, open_kept, write_json};
use super::pass::{TargetPass, Wanted, tokens_of_a_forward};
use super::positioned::FileExt;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::model::Model;
use foretoken_kernels::parallel;
use foretoken_kernels::sample::TopRow;
use half::f16;
use rayon::prelude::*;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The file that says what distributions are of.
pub const NOTE: &str = "targets.json";

/// An open file of distributions.
pub struct SoftTargets {
    identity: Identity,
    file: File,
    path: PathBuf,
    /// Number of rows in the file.
    rows: usize,
}

impl SoftTargets {
    /// Opens the file in `folder`. Existing contents are kept if `reuse` is set and there is a note of their identity.
    ///
    /// # Errors
    /// `Setup`, naming the file. With `reuse`, also if the note says that they have another identity; then all files
    /// stay as they are.
    pub fn open(folder: &Path, identity: Identity, reuse: bool) -> Result<Self> {
        let (path, note) = (folder.join("targets.bin"), folder.join(NOTE));
        let fits = reuse && belongs_to(&note, &identity)?;
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
    /// `Setup`, if the file cannot be written, or the target's GPU has too little memory; the error of the target.
    pub fn compute(
        &mut self,
        target: &mut dyn Model,
        rows: &[Row],
        features: Option<&mut FeatureStore>,
        done: impl FnMut(),
    ) -> Result<()> {
        let wanted = Wanted {
            top_k: self.identity.top_k,
            taps: features.as_ref().map_or(&[][..], |f| f.taps()).to_vec(),
        };
        let tokens = tokens_of_a_forward(target, self.identity.seq_len, &wanted)?;
        let missing = &rows[rows.len() - self.missing(features.as_deref())..];
        let shape = (missing.len(), self.identity.seq_len);
        let pass = TargetPass::new(target, shape, tokens, wanted)?;
        self.store(pass, missing, features, done)
    }

    /// Stores what `pass` computes of the last rows, which are `missing`.
    fn store(
        &mut self,
        mut pass: TargetPass<'_>,
        missing: &[Row],
        mut features: Option<&mut FeatureStore>,
        mut done: impl FnMut(),
    ) -> Result<()> {
        let (len, mut first) = (self.identity.seq_len, self.identity.rows - missing.len());
        let mut groups = missing.chunks(pass.rows_at_once()).map(|rows| {
            let rows: Vec<&[u32]> = rows.iter().map(|row| &row.tokens[..len]).collect();
            pass.start(&rows)
        });
        let mut computed = groups.next().transpose()?;
        while let Some(output) = computed {
            let (mut positions, hidden) = output.read()?;
            // A GPU computes the next rows meanwhile.
            let next = groups.next().transpose();
            let count = positions.len() / len;
            let bytes = parallel::map(&mut positions, |top| pack(top)).concat();
            let start = (first * self.identity.row_bytes()) as u64;
            (self.file.write_all_at(&bytes, start)).map_err(|e| Error::in_file(&self.path, e))?;
            if let Some(features) = &mut features {
                features.write(first, &hidden)?;
            }
            first += count;
            self.rows = self.rows.max(first);
            (0..count).for_each(|_| done());
            computed = next?;
        }
        if let Some(features) = features {
            features.sync()?;
        }
        (self.file.sync_all()).map_err(|e| Error::in_file(&self.path, e))
    }

    /// The distributions of all positions of `rows`, in order, on `device`.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be read.
    pub fn read(&self, rows: &[usize], device: &Device) -> Result<Soft> {
        let (size, k) = (self.identity.row_bytes(), self.identity.top_k);
        let read = |&row: &usize| -> Result<(Vec<u32>, Vec<f32>, Vec<f32>)> {
            let mut bytes = vec![0; size];
            (self.file.read_exact_at(&mut bytes, (row * size) as u64))
                .map_err(|e| Error::in_file(&self.path, e))?;
            let (mut ids, mut probs) = (Vec::new(), Vec::new());
            let positions = bytes.chunks_exact(6 * k + 4);
            let tails = positions.map(|position| unpack(position, k, &mut ids, &mut probs));
            let tails: Vec<f32> = tails.collect();
            Ok((ids, probs, tails))
        };
        // On the CPU each worker has a pool of its own, of one thread.
        let all: Vec<_> = rows.par_iter().map(read).collect::<Result<_>>()?;
        let (mut ids, mut probs, mut tails) = (Vec::new(), Vec::new(), Vec::new());
        for (of_ids, of_probs, of_tails) in all {
            ids.extend(of_ids);
            probs.extend(of_probs);
            tails.extend(of_tails);
        }
        let positions = tails.len();
        Ok(Soft {
            ids: Tensor::from_vec(ids, (positions, k), device)?,
            probs: Tensor::from_vec(probs, (positions, k), device)?,
            tail: Tensor::from_vec(tails, (positions, 1), device)?,
        })
    }
}

/// Packs one position in the format that the module describes.
fn pack(top: &TopRow) -> Vec<u8> {
    let highest = f64::from(top.logits[0]);
    let above = |logit: &f32| f64::from(*logit) - highest;
    let sum = top.logits.iter().map(|z| above(z).exp()).sum::<f64>() + top.rest;
    let mut bytes: Vec<u8> = top.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    for logit in &top.logits {
        bytes.extend(f16::from_f64(above(logit) - sum.ln()).to_le_bytes());
    }
    bytes.extend(((top.rest / sum) as f32).to_le_bytes());
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
mod tests;
