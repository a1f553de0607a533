//! The products with vectors: what all instruction sets have in common, and those of x86-64 and of aarch64.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "aarch64")]
pub(super) mod i8mm;
mod lanes;
mod multiply;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "aarch64")]
mod pairs;
mod vectors;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

use super::activations::{Activations, ROWS, Turn};
use super::block_sums::BY_LESS_32;
use super::formats::{BLOCK, ScaleLayout, VECTOR, WIDTH};
use super::tiles::Strip;
use crate::cpu::Isa;
use crate::simd::prefetch;
use lanes::Lanes;
use multiply::{Float, Multiply, RecordWeights, Rows, each, floats};
pub(super) use vectors::VectorFormat;
use vectors::VectorScales;

/// Prefetch distance in tiles if a strip is read once. Without it, one row reads a third fewer bytes per second
/// from memory (measured); a distance of 8 is about as good.
const AHEAD: usize = 16;

/// What a pass over a strip prefetches as it goes: some lines per block.
#[derive(Clone, Copy)]
struct Ahead {
    at: *const u8,
    /// Bytes from what is prefetched with a block to what is prefetched with the next.
    stride: usize,
}

impl Ahead {
    /// What pass `pass` of `passes` over a strip prefetches. If there is one, what it needs itself a few
    /// tiles later, beyond the end of the strip too. If there are several, the strip comes from the cache
    /// for most of them, and they share the next strip.
    #[inline(always)]
    fn new<F: VectorFormat>(strip: Strip<'_, F>, pass: usize, passes: usize) -> Self {
        let start = strip.bytes().as_ptr();
        if passes == 1 {
            return Self {
                at: start.wrapping_add(AHEAD * F::RECORD / F::SPAN),
                stride: F::RECORD / F::SPAN,
            };
        }
        let stride = Self::lines::<F>().div_ceil(passes) * VECTOR;
        let share = stride * strip.blocks();
        let (len, from) = (strip.bytes().len(), pass * share);
        Self {
            at: start.wrapping_add(len + from),
            stride: if from < len { stride } else { 0 },
        }
    }

    /// Lines of a block and its share of the scales.
    const fn lines<F: VectorFormat>() -> usize {
        F::RECORD.div_ceil(F::SPAN * VECTOR)
    }

    /// Prefetches the lines for a block: always as many, also where a pass needs fewer, because a loop of a
    /// number that only the pass knows costs more than lines that are in the cache already.
    #[inline(always)]
    fn step<F: VectorFormat>(&mut self) {
        self.share::<F>(1);
    }

    /// As [`Ahead::step`], if there are at least so many passes.
    #[inline(always)]
    fn share<F: VectorFormat>(&mut self, passes: usize) {
        // This branch also keeps the compiler from spilling vectors of 10 rows and more.
        if self.stride == 0 {
            return;
        }
        for line in 0..Self::lines::<F>().div_ceil(passes) {
            let at = self.at.wrapping_add(line * VECTOR);
            prefetch::<_, true>(at);
        }
        self.at = self.at.wrapping_add(self.stride);
    }
}

/// Adds the products of a block to the sums of a vector's outputs, for `R` rows.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn add_block<M: Multiply, F: VectorFormat, const R: usize>(
    w: &RecordWeights,
    x: &Rows,
    sums: &mut [Float<M>; R],
) {
    // SAFETY: by the caller's contract.
    unsafe {
        if F::Scales::BY_HALF {
            return add_halves::<M, F, R>(w, x, sums);
        }
        let dots = M::dots::<F, R>(w, x);
        let d = F::Scales::scales::<M::Lanes>(w.scales, w.sub, w.first, 0);
        add_scaled::<M, R>(&dots, d, x, sums);
        if F::Scales::OFFSET {
            let m = F::Scales::offsets::<M::Lanes>(w.scales, w.sub, w.first, 0);
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = M::Lanes::float_broadcast(&x.sums(i).sum);
                *sum = M::Lanes::fma(m, x, *sum);
            }
        }
    }
}

/// The same for halves of a block with scales of their own.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn add_halves<M: Multiply, F: VectorFormat, const R: usize>(
    w: &RecordWeights,
    x: &Rows,
    sums: &mut [Float<M>; R],
) {
    // SAFETY: by the caller's contract.
    unsafe {
        let dots = M::half_dots::<F, R>(w, x);
        each!(half in 0 1 => {
            let d = F::Scales::scales::<M::Lanes>(w.scales, w.sub, w.first, half);
            add_scaled::<M, R>(&floats::<M, R>(&dots[half]), d, x, sums);
            if F::Scales::OFFSET {
                let m = F::Scales::offsets::<M::Lanes>(w.scales, w.sub, w.first, half);
                let m = M::Lanes::float_mul(m, M::Lanes::float_broadcast(&BY_LESS_32));
                let mut less_32 = [M::Lanes::zero(); R];
                for (i, less_32) in less_32.iter_mut().enumerate() {
                    *less_32 = M::Lanes::broadcast((&raw const x.sums(i).less_32[half]).cast());
                }
                add_scaled::<M, R>(&floats::<M, R>(&less_32), m, x, sums);
            }
        });
    }
}

/// Adds a number of each row to its sum, times what the weights have for it and the row's scale.
///
/// # Safety
/// The CPU has what `M` needs; there are such rows.
#[inline(always)]
unsafe fn add_scaled<M: Multiply, const R: usize>(
    numbers: &[Float<M>; R],
    by: Float<M>,
    x: &Rows,
    sums: &mut [Float<M>; R],
) {
    // SAFETY: by the caller's contract.
    unsafe {
        for (i, sum) in sums.iter_mut().enumerate() {
            let scale = M::Lanes::float_broadcast(&x.sums(i).scale);
            let scale = M::Lanes::float_mul(by, scale);
            *sum = M::Lanes::fma(numbers[i], scale, *sum);
        }
    }
}

/// Multiplies the `R` rows of a turn with the outputs of `V` vectors of a strip, from output `from`.
///
/// # Safety
/// The CPU has what `M` needs.
#[inline(always)]
unsafe fn rows<M: Multiply, F: VectorFormat, const R: usize, const V: usize>(
    strip: Strip<'_, F>,
    from: usize,
    x: &Activations,
    &Turn { pass, first, rows }: &Turn,
    mut ahead: Ahead,
    out: &mut [[f32; WIDTH]; R],
) {
    let count = M::Lanes::COUNT;
    let (q, block_sums) = (x.q(pass), x.sums(pass));
    let values = pass.rows * strip.blocks();
    assert!(rows == R && first + R <= pass.rows);
    assert!(q.len() == values * BLOCK && block_sums.len() == values);
    assert!(from + V * count <= WIDTH);
    // SAFETY: blocks are in range of strip and rows; the CPU has the instructions by the caller's contract.
    unsafe {
        let mut x = Rows {
            q: q.as_ptr().add(first * BLOCK),
            sums: block_sums.as_ptr().add(first),
        };
        let mut record = strip.bytes().as_ptr();
        let mut sums = [[M::Lanes::float_zero(); R]; V];
        let mut left = strip.blocks();
        while left > 0 {
            let blocks = left.min(F::SPAN);
            let mut tile = record.add(F::SCALES + 4 * from);
            for sub in 0..blocks {
                ahead.step::<F>();
                let w = |v: usize| RecordWeights {
                    scales: record,
                    sub,
                    first: from + v * count,
                    tile: tile.add(4 * v * count),
                };
                if V == 4 {
                    // Otherwise the compiler keeps the sums in memory.
                    each!(v in 0 1 2 3 => { add_block::<M, F, R>(&w(v), &x, &mut sums[v]) });
                } else {
                    for (v, sums) in sums.iter_mut().enumerate() {
                        add_block::<M, F, R>(&w(v), &x, sums);
                    }
                }
                tile = tile.wrapping_add(F::TILE);
                x.q = x.q.wrapping_add(pass.rows * BLOCK);
                x.sums = x.sums.wrapping_add(pass.rows);
            }
            record = record.wrapping_add(F::RECORD);
            left -= blocks;
        }
        for (v, sums) in sums.into_iter().enumerate() {
            for (out, sum) in out.iter_mut().zip(sums) {
                M::Lanes::store(out.as_mut_ptr().add(from + v * count), sum);
            }
        }
    }
}

/// Maximum number of rows of a turn.
pub(super) fn max_rows<F: VectorFormat>(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        isa if isa.avx512().is_some() => x86::Avx512::max_rows(F::APART),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni(_) => x86::AvxVnni::max_rows(F::APART),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => x86::Avx2Ymm::max_rows(F::APART),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon(_) => neon::Widening::max_rows(F::APART),
        #[cfg(target_arch = "aarch64")]
        isa if isa.dotprod().is_some() => neon::Dots::max_rows(F::APART),
        _ => ROWS,
    }
}

/// Calls `rows` for each turn, and passes each row's outputs to `store`. Numbers in brackets: rows, and the
/// vectors of a tile that they are multiplied with at a time. AVX2 takes both halves of a tile at once although
/// that needs more registers than it has: reading each strip twice costs more (measured at 4 rows: a fifth).
macro_rules! product {
    ($multiply:ty, $format:ty, $strip:expr, $x:expr, $turns:expr, $store:expr;
     $([$rows:literal x $vectors:literal])*) => {{
        let width = <$multiply as Multiply>::Lanes::COUNT;
        let passes = |turn: &Turn| match turn.rows {
            $($rows => WIDTH / width / $vectors,)*
            _ => unreachable!("no turn has so many rows"),
        };
        let all = $turns.iter().map(passes).sum();
        let mut number = 0;
        for turn in $turns {
            match turn.rows {
                $($rows if $rows <= <$multiply>::max_rows(<$format>::APART) => {
                    let mut out = [[0f32; WIDTH]; $rows];
                    for from in (0..WIDTH).step_by($vectors * width) {
                        let ahead = Ahead::new($strip, number, all);
                        rows::<$multiply, $format, $rows, $vectors>($strip, from, $x, turn, ahead, &mut out);
                        number += 1;
                    }
                    for (i, out) in out.iter().enumerate() {
                        $store(turn.pass.first + turn.first + i, out);
                    }
                })*
                _ => unreachable!("no turn has so many rows"),
            }
        }
    }};
}
use product;

/// A function that multiplies the rows of `turns` with a strip by [`product`]. `store` is called with the row and its 16
/// outputs.
macro_rules! product_fn {
    ($(#[$about:meta])* $name:ident($proof:ty) by $multiply:ident; $($turns:tt)*) => {
        $(#[$about])*
        pub(in super::super) fn $name<F: VectorFormat>(
            _: $proof,
            strip: Strip<'_, F>,
            x: &Activations,
            turns: &[Turn],
            mut store: impl FnMut(usize, &[f32; WIDTH]),
        ) {
            // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
            unsafe { product!($multiply, F, strip, x, turns, store; $($turns)*) };
        }
    };
}
use product_fn;
