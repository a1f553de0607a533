//! Keys and values as the loops over a tile read them.

use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Keys whose softmax is taken at once. Longer chunks leave less to merge, shorter ones are more
/// pieces for threads.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all queries (8 KiB where heads are 64 wide).
pub(super) const TILE: usize = 32;
/// Between the scores of two queries: kernels write whole vectors.
pub(super) const STRIDE: usize = CHUNK + 8;
/// Widths are a multiple of this many floats.
pub(super) const ALIGN: usize = 8;

/// Keys or values of a tile: one in `data` at each of `places`, all of them inside of it.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, E> {
    data: &'a [E],
    places: &'a [usize],
    /// Numbers of each, a multiple of [`ALIGN`].
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

    /// Some of them, by number.
    pub fn range(self, start: usize, end: usize) -> Self {
        Self {
            places: &self.places[start..end],
            ..self
        }
    }

    /// Those at `places`, filled up with the first.
    pub fn rows<const N: usize>(&self, places: &[usize]) -> [&'a [E]; N] {
        let row = |place: usize| &self.data[place..place + self.width];
        std::array::from_fn(|i| row(places[if i < places.len() { i } else { 0 }]))
    }
}

/// What a pool may hold.
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
