//! What attention does with some queries and one tile of keys: scores, weights, weighted values.
//!
//! Each function keeps one order of additions for a (query, key) or a (query, tile), whatever else
//! is computed beside it. The AVX2 and the portable path differ in their orders; a process uses one
//! of them for good.

use super::portable;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::kernels::cpu::Path;
use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Keys whose softmax is taken at once. Longer chunks leave less to merge, shorter ones are more
/// pieces for threads.
pub(super) const CHUNK: usize = 128;
/// Keys whose vectors stay in the first-level cache for all lanes (8 KiB where heads are 64 wide).
pub(super) const TILE: usize = 32;
/// Between the scores of two lanes: kernels write whole vectors.
pub(super) const STRIDE: usize = CHUNK + 8;
/// Widths are a multiple of this many floats.
pub(super) const ALIGN: usize = 8;

/// Keys or values of a tile: one in `data` at each of `places`.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, E> {
    pub(super) data: &'a [E],
    pub(super) places: &'a [usize],
    /// Numbers of each, a multiple of [`ALIGN`].
    pub(super) width: usize,
}

impl<'a, E> Vectors<'a, E> {
    pub fn new(data: &'a [E], places: &'a [usize], width: usize) -> Self {
        assert!(width.is_multiple_of(ALIGN));
        let last = places.iter().copied().max();
        assert!(last.is_none_or(|place| place + width <= data.len()));
        let vectors = Self {
            data,
            places,
            width,
        };
        debug_assert!(vectors.places.len() <= CHUNK);
        vectors
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

/// Calls the AVX2 or the portable function of a name.
macro_rules! dispatch {
    ($path:expr, $name:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if $path >= Path::Avx2 {
            // SAFETY: a path is only taken where the CPU has its instructions.
            return unsafe { x86::$name($($argument),*) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = $path;
        portable::$name($($argument),*)
    }};
}

/// The products of all queries with all keys.
///
/// `queries` is `[lanes, width]`; the scores of lane `i` begin at `scores[i * STRIDE]`, and up to
/// seven after the last of them are overwritten.
pub(super) fn scores<E: Element>(
    path: Path,
    queries: &[f32],
    keys: Vectors<'_, E>,
    scores: &mut [f32],
) {
    dispatch!(path, scores(queries, keys, scores))
}

/// Turns scores into `e^(score - max)`; gives back their maximum and the sum of what they become.
pub(super) fn weigh(path: Path, scores: &mut [f32]) -> (f32, f32) {
    dispatch!(path, weigh(scores))
}

/// `sums[lane] += weights[lane][i] * values[i]` for the first `counts[lane]` values, in order.
///
/// `sums` is `[lanes, width]`; weights lie as scores do; counts do not fall.
pub(super) fn add_weighted<E: Element>(
    path: Path,
    sums: &mut [f32],
    weights: &[f32],
    counts: &[usize],
    values: Vectors<'_, E>,
) {
    assert!(counts.is_sorted());
    dispatch!(path, add_weighted(sums, weights, counts, values))
}

/// Asks for `width` numbers at each of `places` to be brought near. Keys of a head lie apart, which
/// the CPU does not foresee: without this it waits for memory key by key.
pub(super) fn prefetch<E>(data: &[E], places: &[usize], width: usize) {
    #[cfg(target_arch = "x86_64")]
    for &place in places {
        for at in (0..width).step_by(64 / size_of::<E>()) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(place + at).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, places, width);
}

/// What a pool may hold.
pub(super) trait Element: WithDType {
    fn to_f32(self) -> f32;

    /// `to[..from.len()] = from`.
    fn widen(path: Path, from: &[Self], to: &mut [f32]);

    /// Eight numbers.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C; eight numbers may be read.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load(from: *const Self) -> std::arch::x86_64::__m256;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    fn widen(_: Path, from: &[f32], to: &mut [f32]) {
        to[..from.len()].copy_from_slice(from);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load(from: *const f32) -> std::arch::x86_64::__m256 {
        // SAFETY: the caller's promise.
        unsafe { std::arch::x86_64::_mm256_loadu_ps(from) }
    }
}

/// A type of 16 bits: how `half` widens it, and how one vector does.
macro_rules! half_element {
    ($t:ty, $widen:expr, $load:ident) => {
        impl Element for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                <$t>::to_f32(self)
            }

            fn widen(path: Path, from: &[$t], to: &mut [f32]) {
                let to = &mut to[..from.len()];
                #[cfg(target_arch = "x86_64")]
                if path >= Path::Avx2 {
                    // SAFETY: a path is only taken where the CPU has its instructions.
                    return unsafe { x86::widen(from, to) };
                }
                let _ = path;
                $widen(from, to);
            }

            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn load(from: *const $t) -> std::arch::x86_64::__m256 {
                // SAFETY: the caller's promise.
                unsafe { x86::$load(from.cast()) }
            }
        }
    };
}
half_element!(
    f16,
    |from: &[f16], to: &mut [f32]| from.convert_to_f32_slice(to),
    load_f16
);
half_element!(
    bf16,
    |from: &[bf16], to: &mut [f32]| from.convert_to_f32_slice(to),
    load_bf16
);
