//! The draft's vocabulary, if it is smaller than the target's.
//!
//! A small draft spends most of its time on its output layer, and most tokens of a text are among few
//! ids. The other ids are left to the target (FR-Spec, Zhao et al. 2025; EAGLE-3, Li et al. 2025, with a
//! table from draft to target ids). Their q is 0, which the acceptance rule allows.

use super::corpus::Row;
use super::loss::Soft;
use candle_core::{Device, Tensor};
use foretoken_core::error::Result;
use foretoken_text::most_frequent;

/// The draft's vocabulary: some ids of the target's, ascending. A draft with all ids has none.
pub struct DraftVocabulary {
    ids: Vec<u32>,
    /// `[vocab_size]`, u32: the index of each id in `ids`, or `ids.len()` if it is not there.
    places: Tensor,
}

impl DraftVocabulary {
    /// The `size` ids that `rows` have most often at counted positions; always includes `always`.
    pub fn most_frequent<'a>(
        rows: impl Iterator<Item = &'a Row>,
        always: &[u32],
        size: usize,
        vocab_size: usize,
        device: &Device,
    ) -> Result<Self> {
        let mut counts = vec![0; vocab_size];
        for row in rows {
            let predicted = row.tokens[1..].iter().zip(&row.counted);
            for (&id, _) in predicted.filter(|(_, counted)| **counted) {
                counts[id as usize] += 1;
            }
        }
        Self::of(most_frequent(&counts, always, size), vocab_size, device)
    }

    /// The vocabulary of `ids`, which are ascending and below `vocab_size`.
    pub fn of(ids: Vec<u32>, vocab_size: usize, device: &Device) -> Result<Self> {
        let mut places = vec![ids.len() as u32; vocab_size];
        for (place, &id) in (0..).zip(&ids) {
            places[id as usize] = place;
        }
        Ok(Self {
            places: Tensor::new(places, device)?,
            ids,
        })
    }

    /// The ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Maps `soft` to the draft's ids and one column for all others, which has no mass.
    pub fn restrict(&self, soft: Soft) -> Result<Soft> {
        let dims = soft.ids.dims2()?;
        let places = self.places.index_select(&soft.ids.flatten_all()?, 0)?;
        let ids = places.reshape(dims)?;
        let is_known = ids.lt(self.ids.len() as u32)?;
        let in_draft_vocab = is_known.to_dtype(soft.probs.dtype())?;
        Ok(Soft {
            ids,
            probs: (soft.probs * in_draft_vocab)?,
            tail: soft.tail,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::{Comparison, NEVER};

    #[test]
    fn frequent_ids_are_kept_and_the_others_have_no_mass() {
        let cpu = &Device::Cpu;
        let row = Row {
            tokens: vec![0, 4, 4, 2, 2, 2, 5],
            // The last two belong to a prompt.
            counted: vec![true, true, true, true, false, false],
        };
        let rows = std::iter::once(&row);
        let kept = DraftVocabulary::most_frequent(rows, &[7], 4, 8, cpu).unwrap();
        assert_eq!(kept.ids(), [0, 2, 4, 7]);

        let soft = Soft {
            ids: Tensor::new(&[[5u32, 4, 2], [3, 1, 6]], cpu).unwrap(),
            probs: Tensor::new(&[[0.5f32, 0.3, 0.1], [0.6, 0.3, 0.1]], cpu).unwrap(),
            tail: Tensor::new(&[[0.1f32], [0.0]], cpu).unwrap(),
        };
        let soft = kept.restrict(soft).unwrap();
        let ids = soft.ids.to_vec2::<u32>().unwrap();
        assert_eq!(ids, [[4, 2, 1], [4, 4, 4]]);
        let logits = [[1.0f32, 2.0, 3.0, 4.0, NEVER as f32]; 2];
        let logits = Tensor::new(&logits, cpu).unwrap();
        let compared = Comparison::new(&logits, &soft).unwrap();
        let gradient = compared.gradient().unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(gradient[1], [0.0; 5]);
        assert_eq!(gradient[0][4], 0.0);
        assert!(gradient[0][..4].iter().sum::<f32>().abs() < 1e-6);
        assert!(gradient[0][0].abs() > 1e-3);
        let loss = compared.loss().unwrap().to_vec1::<f32>().unwrap();
        assert!(loss[0].is_finite() && loss[1] == 0.0, "{loss:?}");
        // Ids outside the draft's vocabulary never agree, and are not part of the overlap.
        assert_eq!(
            compared.agrees().unwrap().to_vec1::<f32>().unwrap(),
            [0.0; 2]
        );
        let [lower, _] = compared.overlap().unwrap();
        assert_eq!(lower.to_vec1::<f32>().unwrap()[1], 0.0);
    }
}
