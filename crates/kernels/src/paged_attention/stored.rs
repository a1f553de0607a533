//! What a pool is an array of: numbers, which are read where they are, or blocks of bytes. Of blocks, keys are multiplied
//! as bytes, by queries that are rounded to such blocks too, with the bits of a product with quantized weights; values are
//! copied to the caches in f32, a tile at a time.

use super::numbers::Pool;
use super::scratch::Copies;
use super::vectors::{Places, Vectors};
use crate::cpu::Isa;
use crate::q8_blocks;
use crate::simd::{Loop, Simd, run};
use candle_core::WithDType;

/// What a pool is an array of.
pub(super) trait Stored: WithDType {
    /// What products with values read, and those with keys unless these are multiplied as bytes.
    type Numbers: Pool;
    /// Whether keys are multiplied as bytes, and values copied.
    const IN_BLOCKS: bool;

    /// Elements of a head of `head_dim` numbers; `None` if there is no such head.
    fn elements(head_dim: usize) -> Option<usize>;

    /// The numbers of a pool that has no blocks. Tiles read no others.
    #[cfg(target_arch = "x86_64")]
    fn numbers(pool: &[Self]) -> &[Self::Numbers];

    /// The bytes of a pool that has blocks.
    fn bytes(pool: &[Self]) -> &[u8];

    /// The heads at `places`, of `head_dim` numbers each.
    fn vectors<'a>(
        isa: Isa,
        pool: &'a [Self],
        places: Places<'a>,
        head_dim: usize,
        copies: &'a mut Copies,
    ) -> Vectors<'a, Self::Numbers>;
}

impl<E: Pool> Stored for E {
    type Numbers = E;
    const IN_BLOCKS: bool = false;

    fn elements(head_dim: usize) -> Option<usize> {
        Some(head_dim)
    }

    #[cfg(target_arch = "x86_64")]
    fn numbers(pool: &[E]) -> &[E] {
        pool
    }

    fn bytes(_: &[E]) -> &[u8] {
        &[]
    }

    fn vectors<'a>(
        _: Isa,
        pool: &'a [E],
        places: Places<'a>,
        head_dim: usize,
        _: &'a mut Copies,
    ) -> Vectors<'a, E> {
        Vectors::new(pool, places, head_dim)
    }
}

/// Bytes of blocks of `Q8_0`.
impl Stored for u8 {
    type Numbers = f32;
    const IN_BLOCKS: bool = true;

    fn elements(head_dim: usize) -> Option<usize> {
        q8_blocks::bytes(head_dim)
    }

    #[cfg(target_arch = "x86_64")]
    fn numbers(_: &[u8]) -> &[f32] {
        &[]
    }

    fn bytes(pool: &[u8]) -> &[u8] {
        pool
    }

    fn vectors<'a>(
        isa: Isa,
        pool: &'a [u8],
        places: Places<'a>,
        head_dim: usize,
        copies: &'a mut Copies,
    ) -> Vectors<'a, f32> {
        let count = places.at.len();
        let bytes = head_dim / q8_blocks::BLOCK * q8_blocks::BYTES;
        let (to, at) = copies.room(count, head_dim);
        let dequantize = Dequantize {
            heads: Vectors::new(pool, places, bytes),
            to,
            head_dim,
        };
        run(isa, dequantize);
        Vectors::new(to, Places::cached(at), head_dim)
    }
}

/// Copies heads as f32.
struct Dequantize<'a> {
    heads: Vectors<'a, u8>,
    /// `[heads, head_dim]`.
    to: &'a mut [f32],
    head_dim: usize,
}

impl Loop for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (data, bytes) = (self.heads.data(), self.heads.width());
        let places = self.heads.places().iter();
        let heads = places.zip(self.to.chunks_exact_mut(self.head_dim));
        for (number, (&place, to)) in heads.enumerate() {
            self.heads.prefetch(number, 0..bytes);
            q8_blocks::dequantize(s, &data[place..place + bytes], to);
        }
    }
}
