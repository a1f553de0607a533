//! Keys and values in the form that the loops over a tile read.

use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Keys per softmax chunk. Longer chunks need fewer merges, shorter ones give threads more pieces.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all queries (8 KiB with heads of 64 values).
pub(super) const TILE: usize = 32;
/// Distance between the scores of two queries; it leaves room for the whole vectors that kernels write.
pub(super) const STRIDE: usize = CHUNK + 8;
/// Widths are a multiple of this many floats.
pub(super) const ALIGN: usize = 8;

/// Keys or values of a tile: one at each of `places` in `data`, all of them within its bounds.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, E> {
    data: &'a [E],
    places: &'a [usize],
    /// Length of each, a multiple of [`ALIGN`].
    width: usize,
}

impl<'a, E> Vectors<'a, E> {
    pub fn new(data: &'a [E], places: &'a [usize], width: usize) -> Self {
        assert!(width.is_multiple_of(ALIGN));
        let last = places.iter().copied().max();
        assert!(last.is_none_or(|place| place <= data.len() && width <= data.len() - place));
        debug_assert!(places.len() <= CHUNK);
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

    /// A multiple of [`ALIGN`].
    pub fn width(&self) -> usize {
        self.width
    }

    /// Those at indices `start..end` of `places`.
    pub fn range(self, start: usize, end: usize) -> Self {
        Self {
            places: &self.places[start..end],
            ..self
        }
    }

    /// The first `N` of those at `places`; missing ones are replaced by the first.
    pub fn rows<const N: usize>(&self, places: &[usize]) -> [&'a [E]; N] {
        let row = |place: usize| &self.data[place..place + self.width];
        std::array::from_fn(|i| row(places[if i < places.len() { i } else { 0 }]))
    }
}

/// An element type of a pool.
pub(super) trait Element: WithDType {
    fn to_f32(self) -> f32;

    /// `to[..from.len()] = from`.
    fn widen(from: &[Self], to: &mut [f32]);
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    fn widen(from: &[f32], to: &mut [f32]) {
        to[..from.len()].copy_from_slice(from);
    }
}

macro_rules! half_element {
    ($t:ty) => {
        impl Element for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }

            fn widen(from: &[$t], to: &mut [f32]) {
                from.convert_to_f32_slice(&mut to[..from.len()]);
            }
        }
    };
}
half_element!(f16);
half_element!(bf16);
