//! Keys and values as the loops over a tile read them.

use super::numbers::{Number, Pool};
use crate::simd::{LANES, Loop, Simd, prefetch};
use std::ops::Range;

/// Keys per softmax chunk. Longer chunks need fewer merges, shorter ones give threads more pieces.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all queries (16 KiB with heads of 128 values). Of heads of up to 64
/// values there are twice as many, so that queries and their sums come half as often from the second-level cache.
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
        let data = self.data.as_ptr();
        for at in columns.step_by(64 / size_of::<E>()) {
            if let Some(&place) = next.get(number) {
                prefetch::<_, false>(data.wrapping_add(place).wrapping_add(at));
            }
            if let Some(&place) = self.places.at.get(number.wrapping_add(NEAR)) {
                prefetch::<_, true>(data.wrapping_add(place).wrapping_add(at));
            }
        }
    }
}

/// Copies vectors as lanes: those of each as f32, or those of each two as pairs.
pub(super) struct Widen<'a, E> {
    pub vectors: Vectors<'a, E>,
    /// `[vectors, width]`, or half as many pairs; an odd last vector has zeros beside it. The width is the length of a
    /// vector, padded with zeros to whole vectors of [`LANES`].
    pub to: &'a mut [f32],
}

impl<E: Pool> Loop for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (data, length, count) = (self.vectors.data(), self.vectors.width(), E::Number::COUNT);
        let rows = self.to.chunks_exact_mut(length.next_multiple_of(LANES));
        assert!(self.vectors.places().len() <= count * rows.len());
        let zeros = [E::zero(); LANES];
        for (i, (places, to)) in self.vectors.places().chunks(count).zip(rows).enumerate() {
            for j in 0..count {
                self.vectors.prefetch(count * i + j, 0..length);
            }
            let first = &data[places[0]..places[0] + length];
            let (second, step) = match places {
                [_, place] => (&data[*place..place + length], LANES),
                _ => (zeros.as_slice(), 0),
            };
            let (whole, rest) = to.split_at_mut(length / LANES * LANES);
            for (i, to) in whole.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                // SAFETY: `first` has 16 numbers for each vector of `whole`, and so has `second`, or 16 for all.
                unsafe {
                    let first = E::load(s, first.as_ptr().add(i * LANES));
                    let second = E::load(s, second.as_ptr().add(i * step));
                    s.store(to.as_mut_ptr(), E::Number::join(s, first, second));
                }
            }
            if !rest.is_empty() {
                let mut padded = [[E::zero(); LANES]; 2];
                let (tail, from) = (length % LANES, length / LANES);
                padded[0][..tail].copy_from_slice(&first[from * LANES..]);
                padded[1][..tail].copy_from_slice(&second[from * step..][..tail]);
                // SAFETY: `padded` has 16 numbers twice, and `rest` is what `length` lacks of 16.
                unsafe {
                    let first = E::load(s, padded[0].as_ptr());
                    let second = E::load(s, padded[1].as_ptr());
                    s.store(rest.as_mut_ptr(), E::Number::join(s, first, second));
                }
            }
        }
    }
}

/// Prefetches `width` numbers at each of `places` into the second-level cache.
pub(super) fn prefetch_all<E>(data: &[E], places: &[usize], width: usize) {
    for &place in places {
        for at in (0..width).step_by(64 / size_of::<E>()) {
            prefetch::<_, false>(data.as_ptr().wrapping_add(place).wrapping_add(at));
        }
    }
}
