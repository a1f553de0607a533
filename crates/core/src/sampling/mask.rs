//! A set of tokens.

/// The tokens that a grammar allows next: one bit for each id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    words: Box<[u32]>,
    /// The only allowed id.
    only: Option<u32>,
}

impl Mask {
    /// The set of `ids`.
    pub fn of(ids: &[u32]) -> Self {
        Self::new(Box::default()).with(ids)
    }

    /// The first `vocab_size` ids whose bits are set in `words`: bit `id % 32` of word `id / 32`.
    pub fn from_words(words: &[u32], vocab_size: usize) -> Self {
        let mut words: Box<[u32]> = words.into();
        for id in vocab_size..words.len() * 32 {
            words[id / 32] &= !(1 << (id % 32));
        }
        Self::new(words)
    }

    fn new(words: Box<[u32]>) -> Self {
        let mut set = words.iter().enumerate().filter(|(_, word)| **word != 0);
        let only = match (set.next(), set.next()) {
            (Some((at, word)), None) if word.is_power_of_two() => {
                Some(32 * at as u32 + word.trailing_zeros())
            }
            _ => None,
        };
        Self { words, only }
    }

    /// The set with `ids` in it, too.
    pub fn with(&self, ids: &[u32]) -> Self {
        let len = ids.iter().max().map_or(0, |&id| id as usize / 32 + 1);
        let mut words = self.words.to_vec();
        words.resize(len.max(words.len()), 0);
        for &id in ids {
            words[id as usize / 32] |= 1 << (id % 32);
        }
        Self::new(words.into())
    }

    /// Whether `id` is allowed; ids beyond the vocabulary never are.
    pub fn allows(&self, id: u32) -> bool {
        let word = self.words.get(id as usize / 32);
        word.is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// The id that is forced: the only one allowed.
    pub fn only(&self) -> Option<u32> {
        self.only
    }

    /// Whether no id but `others` is allowed.
    pub fn is_within(&self, others: &[u32]) -> bool {
        let mut allowed: Vec<u32> = others.to_vec();
        allowed.sort_unstable();
        allowed.dedup();
        let among = allowed.iter().filter(|&&id| self.allows(id)).count();
        let all: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        all as usize == among
    }

    /// Sets the logits of all other ids to minus infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (chunk, word) in logits.chunks_mut(32).zip(words) {
            match word {
                0 => chunk.fill(f32::NEG_INFINITY),
                u32::MAX => (),
                word => {
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_keeps_what_it_allows() {
        for ids in [&[][..], &[7], &[0, 31, 32, 95], &[64], &[3, 4]] {
            let mask = Mask::of(ids);
            let mut logits: Vec<f32> = (0..100).map(|x| x as f32).collect();
            mask.apply(&mut logits);
            for (id, logit) in logits.into_iter().enumerate() {
                let allowed = ids.contains(&(id as u32));
                assert_eq!(mask.allows(id as u32), allowed);
                let want = if allowed {
                    id as f32
                } else {
                    f32::NEG_INFINITY
                };
                assert_eq!(logit, want);
            }
            let only = (ids.len() == 1).then(|| ids[0]);
            assert_eq!(mask.only(), only);
            assert!(mask.is_within(&[95, 31, 7, 0, 32, 3, 4, 64, 64]));
            assert_eq!(mask.is_within(&[0, 64]), ids.is_empty() || ids == [64]);
            assert!(!mask.allows(10_000));
            assert_eq!(mask.with(&[5, 96]), Mask::of(&[ids, &[5, 96]].concat()));
        }
    }

    #[test]
    fn bits_beyond_the_vocabulary_are_not_allowed() {
        let mask = Mask::from_words(&[u32::MAX; 2], 40);
        assert!(mask.allows(39) && !mask.allows(40) && !mask.allows(41));
    }
}
