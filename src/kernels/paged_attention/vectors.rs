//! Keys and values as the loops over a tile read them.

use super::simd::{Element, LANES, Loop, Simd};

/// Keys per softmax chunk. Longer chunks need fewer merges, shorter ones give threads more pieces.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all queries (8 KiB with heads of 64 values).
pub(super) const TILE: usize = 32;
/// Distance between the scores of two queries, whole vectors.
pub(super) const STRIDE: usize = CHUNK + LANES;

/// Keys or values: one at each of `places` in `data`, all of them within its bounds.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, E> {
    data: &'a [E],
    places: &'a [usize],
    /// Length of each.
    width: usize,
}

impl<'a, E> Vectors<'a, E> {
    pub fn new(data: &'a [E], places: &'a [usize], width: usize) -> Self {
        let last = places.iter().copied().max();
        assert!(last.is_none_or(|place| place <= data.len() && width <= data.len() - place));
        Self {
            data,
            places,
            width,
        }
    }

    pub fn data(&self) -> &'a [E] {
        self.data
    }

    /// `place + width <= data.len()` holds for each.
    pub fn places(&self) -> &'a [usize] {
        self.places
    }

    /// Length of each.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The first `N` of those at `places`; missing ones are replaced by the first.
    pub fn rows<const N: usize>(&self, places: &[usize]) -> [&'a [E]; N] {
        let row = |place: usize| &self.data[place..place + self.width];
        std::array::from_fn(|i| row(places[if i < places.len() { i } else { 0 }]))
    }
}

/// Copies vectors as f32, padded with zeros to `width`, whole vectors.
pub(super) struct Widen<'a, E> {
    pub vectors: Vectors<'a, E>,
    pub width: usize,
    /// `[vectors, width]`.
    pub to: &'a mut [f32],
}

impl<E: Element> Loop for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (data, length) = (self.vectors.data(), self.vectors.width());
        let rows = self.to.chunks_exact_mut(self.width);
        assert!(self.vectors.places().len() <= rows.len());
        for (&place, to) in self.vectors.places().iter().zip(rows) {
            let (whole, rest) = data[place..place + length].as_chunks::<LANES>();
            let (to, last) = to.as_chunks_mut::<LANES>();
            let (to, padded) = to.split_at_mut(whole.len());
            for (from, to) in whole.iter().zip(to) {
                // SAFETY: 16 numbers.
                unsafe { s.store(to.as_mut_ptr(), E::load(s, from.as_ptr())) };
            }
            for to in padded {
                let mut from = [E::zero(); LANES];
                from[..rest.len()].copy_from_slice(rest);
                // SAFETY: 16 numbers.
                unsafe { s.store(to.as_mut_ptr(), E::load(s, from.as_ptr())) };
            }
            debug_assert!(last.is_empty());
        }
    }
}

/// Prefetches `width` numbers at each of `places`. The keys of a head are scattered in memory, which the
/// CPU does not predict: without this it would wait for memory at each key.
pub(super) fn prefetch<E>(data: &[E], places: &[usize], width: usize) {
    #[cfg(target_arch = "x86_64")]
    for &place in places {
        for at in (0..width).step_by(64 / size_of::<E>()) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let from = data.as_ptr().wrapping_add(place).wrapping_add(at);
            // SAFETY: a hint, which reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, places, width);
}
