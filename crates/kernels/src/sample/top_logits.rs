//! The largest logits of rows, and what all others weigh: what training stores of a target's distributions.
//!
//! The CPU and a GPU give the same ids and logits, bit for bit. Sums over the other ids are in f64 and may
//! differ in their last bits, because a GPU adds in another order.

use crate::parallel;
use crate::storage::contiguous;
use candle_core::{Device, Result, Storage, Tensor};

/// The largest logits of some rows, on the device of the logits.
#[derive(Debug)]
pub struct TopLogits {
    /// Number of ids of a row.
    k: usize,
    /// `[rows, 2 k + 2]` u32: the ids of a row, the bits of their logits in the same order, and the bits of
    /// [`TopRow::rest`], the low ones first.
    values: Tensor,
}

/// The largest logits of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct TopRow {
    /// The ids, best first. Of equal logits the lowest id is first.
    pub ids: Vec<u32>,
    /// Their logits.
    pub logits: Vec<f32>,
    /// The sum of `exp(logit - logits[0])` over all other ids.
    pub rest: f64,
}

/// The `k` largest values (from 1 to `vocab_size`) of each row of `logits`, `[rows, vocab_size]` f32. NaN counts as
/// larger than infinity, and with a negative sign as smaller than minus infinity. A GPU may still be at work when this
/// returns.
///
/// # Errors
/// If there are no rows, or not so many values, or the device fails.
pub fn top_logits(logits: &Tensor, k: usize) -> Result<TopLogits> {
    let (rows, vocab_size) = logits.dims2()?;
    if rows == 0 || !(1..=vocab_size).contains(&k) {
        candle_core::bail!("top_logits: {k} values of {rows} rows of {vocab_size}");
    }
    let logits = logits.contiguous()?;
    let values = match logits.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => super::cuda::top_logits(&logits, k)?,
        _ => on_cpu(&logits, k)?,
    };
    Ok(TopLogits { k, values })
}

fn on_cpu(logits: &Tensor, k: usize) -> Result<Tensor> {
    let (rows, vocab_size) = logits.dims2()?;
    let (storage, layout) = logits.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("top_logits: no kernel for {:?}", logits.device());
    };
    let logits = contiguous::<f32>("top_logits", storage, layout)?;
    let mut all: Vec<&[f32]> = logits.chunks_exact(vocab_size).collect();
    let top = parallel::map(&mut all, |logits| TopRow::of(logits, k).to_bits());
    Tensor::from_vec(top.concat(), (rows, 2 * k + 2), &Device::Cpu)
}

impl TopLogits {
    /// Copies them to the host, row after row; waits for a GPU.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<Vec<TopRow>> {
        let values = self.values.flatten_all()?.to_vec1::<u32>()?;
        let mut rows: Vec<&[u32]> = values.chunks_exact(2 * self.k + 2).collect();
        Ok(parallel::map(&mut rows, |row| TopRow::from_bits(row)))
    }
}

impl TopRow {
    /// The `k` largest of the `logits` of a row.
    fn of(logits: &[f32], k: usize) -> Self {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let best_first = |a: &u32, b: &u32| {
            let (za, zb) = (logits[*a as usize], logits[*b as usize]);
            zb.total_cmp(&za).then(a.cmp(b))
        };
        if k < order.len() {
            order.select_nth_unstable_by(k, best_first);
        }
        let (top, rest) = order.split_at_mut(k);
        top.sort_unstable_by(best_first);
        let highest = f64::from(logits[top[0] as usize]);
        let weight = |id: &u32| (f64::from(logits[*id as usize]) - highest).exp();
        Self {
            rest: rest.iter().map(weight).sum(),
            logits: top.iter().map(|id| logits[*id as usize]).collect(),
            ids: top.to_vec(),
        }
    }

    /// The row in the form of [`TopLogits`].
    fn to_bits(&self) -> Vec<u32> {
        let rest = self.rest.to_bits();
        let logits = self.logits.iter().map(|logit| logit.to_bits());
        let ids = self.ids.iter().copied();
        let rest = [rest as u32, (rest >> 32) as u32];
        ids.chain(logits).chain(rest).collect()
    }

    /// Reads the form of [`TopLogits`], where a GPU leaves the ids in any order.
    fn from_bits(bits: &[u32]) -> Self {
        let (top, rest) = bits.split_at(bits.len() - 2);
        let (ids, logits) = top.split_at(top.len() / 2);
        let logits = logits.iter().map(|&bits| f32::from_bits(bits));
        let mut top: Vec<(u32, f32)> = ids.iter().copied().zip(logits).collect();
        top.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let (ids, logits) = top.into_iter().unzip();
        Self {
            ids,
            logits,
            rest: f64::from_bits(u64::from(rest[1]) << 32 | u64::from(rest[0])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(logits: &[f32], k: usize) -> TopRow {
        let logits = Tensor::from_slice(logits, (1, logits.len()), &Device::Cpu).unwrap();
        top_logits(&logits, k).unwrap().read().unwrap().remove(0)
    }

    #[test]
    fn the_best_come_first_and_the_others_are_summed() {
        let row = top(&[1.0, 2.0, -3.0, 2.0, 0.5], 3);
        assert_eq!((row.ids, row.logits), (vec![1, 3, 0], vec![2.0, 2.0, 1.0]));
        let rest = (-5f64).exp() + (-1.5f64).exp();
        assert!((row.rest - rest).abs() < 1e-15, "{}", row.rest);
        let all = top(&[1.0, 2.0], 2);
        assert_eq!((all.ids, all.rest), (vec![1, 0], 0.0));
    }

    #[test]
    fn values_without_an_order_have_one() {
        let row = top(&[f32::NEG_INFINITY, f32::INFINITY, -0.0, f32::NAN, 0.0], 4);
        assert_eq!(row.ids, [3, 1, 4, 2]);
        assert!(row.rest.is_nan());
    }

    #[test]
    fn no_row_and_more_values_than_there_are_are_refused() {
        let logits = Tensor::new(&[[1f32, 2.0]], &Device::Cpu).unwrap();
        for k in [0, 3] {
            top_logits(&logits, k).unwrap_err();
        }
        top_logits(&logits.narrow(0, 0, 0).unwrap(), 1).unwrap_err();
    }
}
