//! What products need of the inputs besides their quantized values.

use super::formats::BLOCK;

/// What a sum of values is of `less_32`, which offsets of half a block are multiplied with.
pub(super) const BY_LESS_32: f32 = -1. / 32.;

/// What a product needs of a block besides its values. Sums of unsigned quants begin with the negative of
/// what their bias will add.
///
/// Of a block with NaN or infinity, scale and sum are NaN, so that all of its products are NaN, too.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct BlockSums {
    pub scale: f32,
    /// `scale * sum(q)`, which is multiplied with a weight's offset.
    pub sum: f32,
    /// `-8 * sum(q)`.
    pub less_8: i32,
    /// `-128 * sum(q)`.
    pub less_128: i32,
    /// `-32 * sum(q)` over inputs 0..16 and over 16..32.
    pub less_32: [i32; 2],
    /// `sum(q)` over the same.
    pub halves: [i16; 2],
}

impl BlockSums {
    #[inline(always)]
    pub fn new(scale: f32, halves: [i16; 2]) -> Self {
        let wide = halves.map(i32::from);
        let total = wide[0] + wide[1];
        Self {
            scale,
            sum: scale * total as f32,
            less_8: -8 * total,
            less_128: -128 * total,
            less_32: wide.map(|sum| -32 * sum),
            halves,
        }
    }

    /// The sums of a block that is not finite, whose `q` become 0.
    #[cold]
    pub fn not_finite(q: &mut [i8; BLOCK]) -> Self {
        q.fill(0);
        Self::new(f32::NAN, [0; 2])
    }
}

/// What products need of a block of two rows. Each vector has the numbers of both rows, twice. See [`BlockSums`].
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PairSums {
    pub less_8: [i32; 4],
    pub scale: [f32; 4],
    pub less_128: [i32; 4],
    pub sum: [f32; 4],
    /// Of inputs 0..16 and of 16..32.
    pub less_32: [[i32; 4]; 2],
}

impl PairSums {
    #[inline(always)]
    pub fn new([a, b]: &[BlockSums; 2]) -> Self {
        let less_32 = |half: usize| [a.less_32[half], b.less_32[half]];
        Self {
            less_8: twice([a.less_8, b.less_8]),
            scale: twice([a.scale, b.scale]),
            less_128: twice([a.less_128, b.less_128]),
            sum: twice([a.sum, b.sum]),
            less_32: [twice(less_32(0)), twice(less_32(1))],
        }
    }
}

#[inline(always)]
fn twice<T: Copy>([a, b]: [T; 2]) -> [T; 4] {
    [a, b, a, b]
}
