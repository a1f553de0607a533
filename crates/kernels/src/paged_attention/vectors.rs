//! Keys and values as the loops over a tile read them.

use crate::simd::{Element, LANES, Loop, Simd};
use std::ops::Range;

/// Keys per softmax chunk. Longer chunks need fewer merges, shorter ones give threads more pieces.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all queries (8 KiB with heads of 64 values).
pub(super) const TILE: usize = 32;
/// Distance between the scores of two queries, whole vectors.
pub(super) const STRIDE: usize = CHUNK + LANES;

/// How many keys or values before its use a vector is prefetched into the first-level cache.
const NEAR: usize = 8;

/// Where keys or values begin in a pool.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    pub at: &'a [usize],
    /// If the pool is to be prefetched: where those begin that are read one chunk later. There may be fewer.
    next: Option<&'a [usize]>,
}

impl<'a> Places<'a> {
    /// Of what is in the caches.
    pub fn cached(at: &'a [usize]) -> Self {
        Self { at, next: None }
    }

    /// Of what is in memory; `next` are the places of the vectors one chunk later.
    pub fn in_memory(at: &'a [usize], next: &'a [usize]) -> Self {
        let next = Some(next);
        Self { at, next }
    }

    #[inline(always)]
    pub fn slice(self, range: Range<usize>) -> Self {
        let next =
            |next: &'a [usize]| &next[range.start.min(next.len())..range.end.min(next.len())];
        Self {
            next: self.next.map(next),
            at: &self.at[range],
        }
    }
}

/// Keys or values: one at each of `places` in `data`, all of them within its bounds.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, E> {
    data: &'a [E],
    places: Places<'a>,
    /// Length of each.
    width: usize,
}

impl<'a, E> Vectors<'a, E> {
    pub fn new(data: &'a [E], places: Places<'a>, width: usize) -> Self {
        let last = places.at.iter().copied().max();
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
        self.places.at
    }

    /// Length of each.
    pub fn width(&self) -> usize {
        self.width
    }

    #[inline(always)]
    pub fn slice(self, range: Range<usize>) -> Self {
        let places = self.places.slice(range);
        Self { places, ..self }
    }

    /// The first `N` of those at `places`; missing ones are replaced by the first.
    pub fn rows<const N: usize>(&self, places: &[usize]) -> [&'a [E]; N] {
        let row = |place: usize| &self.data[place..place + self.width];
        std::array::from_fn(|i| row(places[if i < places.len() { i } else { 0 }]))
    }

    /// Prefetches `columns` of what is read some vectors and one chunk after vector `number`. Loops call it as they
    /// go: the second-level cache takes more requests at a time than the first, but a run of them would fill its
    /// queue and stop the loop.
    #[inline(always)]
    pub fn prefetch(&self, number: usize, columns: Range<usize>) {
        let Some(next) = self.places.next else {
            return;
        };
        for at in columns.step_by(64 / size_of::<E>()) {
            if let Some(&place) = next.get(number) {
                prefetch_line::<E, false>(self.data, place.wrapping_add(at));
            }
            if let Some(&place) = self.places.at.get(number.wrapping_add(NEAR)) {
                prefetch_line::<E, true>(self.data, place.wrapping_add(at));
            }
        }
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
        for (number, (&place, to)) in self.vectors.places().iter().zip(rows).enumerate() {
            self.vectors.prefetch(number, 0..length);
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

/// Prefetches `width` numbers at each of `places` into the second-level cache.
pub(super) fn prefetch<E>(data: &[E], places: &[usize], width: usize) {
    for &place in places {
        for at in (0..width).step_by(64 / size_of::<E>()) {
            prefetch_line::<E, false>(data, place.wrapping_add(at));
        }
    }
}

/// Prefetches the cache line of a number into the first-level cache if `NEAR`, otherwise into the second-level one.
#[inline(always)]
fn prefetch_line<E, const NEAR: bool>(data: &[E], place: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let from = data.as_ptr().wrapping_add(place).cast();
        // SAFETY: a hint, which reads nothing.
        unsafe {
            if NEAR {
                _mm_prefetch::<_MM_HINT_T0>(from);
            } else {
                _mm_prefetch::<_MM_HINT_T1>(from);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, place);
}
