//! The products with vectors of 256 bits: AVX2 or AVX-512 VNNI, which differ only in how they multiply
//! bytes.
//!
//! Loops over rows are plain loops: closures in `array::from_fn` and `map` are compiled without the
//! vector instructions wherever the compiler does not inline them (measured: a third of the speed).

mod vectors;

use super::activations::{Activations, BlockSums, Pass};
use super::formats::{BLOCK, Format, WIDTH};
use super::tiles::{SIDES, Strip};
use crate::kernels::cpu;
use std::arch::x86_64::*;
use vectors::VECTORS;
pub(super) use vectors::Vectors;

/// A way to multiply bytes.
trait Multiply {
    /// For each of `R` rows, the exact `sum(factor * (quant - bias) * x)` of a block for eight outputs.
    ///
    /// # Safety
    /// The CPU has the instructions; the tile and the rows are in range.
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R];
}

/// A pass of `R` rows, as pointers: bounds are checked once, not once per vector.
struct Rows<const R: usize> {
    q: *const i8,
    sums: *const BlockSums,
}

impl<const R: usize> Rows<R> {
    #[inline(always)]
    fn new(x: &Activations, pass: Pass, blocks: usize) -> Self {
        let (q, sums) = (x.q(pass), x.sums(pass));
        assert!(pass.rows == R && q.len() == R * blocks * BLOCK && sums.len() == R * blocks);
        Self {
            q: q.as_ptr(),
            sums: sums.as_ptr(),
        }
    }

    /// Inputs `4 v .. 4 v + 4` of a block of row `i`, repeated eight times.
    ///
    /// # Safety
    /// The pass has the block, `i < R`, `v < 8`, and the CPU has AVX2.
    #[inline(always)]
    unsafe fn broadcast(&self, i: usize, block: usize, v: usize) -> __m256i {
        // SAFETY: in range, by the caller's contract.
        unsafe {
            // Without a check for overflow, which would cost a tenth of the time.
            let at = self
                .q
                .add(block.wrapping_mul(BLOCK * R))
                .add((v * R + i) * 4);
            _mm256_set1_epi32(at.cast::<i32>().read_unaligned())
        }
    }

    /// # Safety
    /// The pass has the block, and `i < R`.
    #[inline(always)]
    unsafe fn sums(&self, i: usize, block: usize) -> &BlockSums {
        // SAFETY: by the caller's contract.
        unsafe { &*self.sums.add(block.wrapping_mul(R)).add(i) }
    }
}

/// Unrolled loop: repeats the body for each of these vectors.
macro_rules! each {
    ($v:ident in $($n:literal)* => $body:block) => {
        $({
            let $v: usize = $n;
            $body
        })*
    };
}

/// Returns the same vector, but keeps the compiler from reordering the code around it: otherwise it adds
/// row by row and spends a sixth of the time on copying registers.
///
/// # Safety
/// The CPU has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn keep(mut v: __m256i) -> __m256i {
    // SAFETY: the assembly contains no instruction.
    unsafe {
        std::arch::asm!("/* {} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags));
    }
    v
}

struct Avx2;

impl Multiply for Avx2 {
    #[inline(always)]
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut dots = [_mm256_setzero_si256(); R];
            // Products of these vectors are added in i16, where they fit: 8 * 2 * 15 * 127, and so on.
            // The two halves of the same bytes are processed one after the other.
            macro_rules! run {
                ($factor:expr; $($n:literal)*) => {
                    let mut pairs = [_mm256_setzero_si256(); R];
                    each!(v in $($n)* => {
                        let w = F::quants(quants, v);
                        for (i, pairs) in pairs.iter_mut().enumerate() {
                            let product = _mm256_maddubs_epi16(w, x.broadcast(i, block, v));
                            let sum = _mm256_add_epi16(*pairs, product);
                            *pairs = if R > 2 { keep(sum) } else { sum };
                        }
                    });
                    for (dot, pairs) in dots.iter_mut().zip(pairs) {
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, $factor));
                    }
                };
            }
            match F::BITS {
                8 => {
                    each!(v in 0 1 2 3 4 5 6 7 => {
                        let w = F::quants(quants, v);
                        let magnitude = _mm256_abs_epi8(w);
                        for (i, dot) in dots.iter_mut().enumerate() {
                            // |w| * (x with the sign of w): pairs are at most 2 * 128 * 127, within i16.
                            let signed = _mm256_sign_epi8(x.broadcast(i, block, v), w);
                            let pairs = _mm256_maddubs_epi16(magnitude, signed);
                            let sum = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
                            *dot = if R > 2 { keep(sum) } else { sum };
                        }
                    });
                }
                4 => {
                    run!(ones; 0 4 1 5 2 6 3 7);
                }
                5 => {
                    run!(ones; 0 4 1 5);
                    run!(ones; 2 6 3 7);
                }
                _ => {
                    let factors = F::factors(scales, sub);
                    let [low, high] = [both(factors, 0), both(factors, 1)];
                    run!(low; 0 1);
                    run!(low; 2 3);
                    run!(high; 4 5);
                    run!(high; 6 7);
                }
            }
            unbias::<F, R>(&mut dots, scales, sub, x, block);
            dots
        }
    }
}

struct Vnni;

impl Multiply for Vnni {
    #[inline(always)]
    unsafe fn dots<F: Vectors, const R: usize>(
        quants: &F::Quants,
        scales: &F::Scales,
        sub: usize,
        x: &Rows<R>,
        block: usize,
    ) -> [__m256i; R] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let mut dots = [[_mm256_setzero_si256(); 2]; R];
            each!(v in 0 4 1 5 2 6 3 7 => {
                let mut w = F::quants(quants, v);
                if F::BITS == 8 {
                    // The instruction needs one unsigned operand.
                    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                }
                for (i, dots) in dots.iter_mut().enumerate() {
                    let half = &mut dots[v / (VECTORS / 2)];
                    *half = _mm256_dpbusd_epi32(*half, w, x.broadcast(i, block, v));
                }
            });
            let mut sums = [_mm256_setzero_si256(); R];
            for (sum, [low, high]) in sums.iter_mut().zip(dots) {
                *sum = if F::BITS == 6 {
                    let factors = F::factors(scales, sub);
                    let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(factors));
                    let second = _mm256_srai_epi32::<16>(factors);
                    let low = _mm256_mullo_epi32(low, first);
                    _mm256_add_epi32(low, _mm256_mullo_epi32(high, second))
                } else {
                    _mm256_add_epi32(low, high)
                };
            }
            if F::BITS == 8 {
                shifted_totals::<R, 7>(&mut sums, x, block);
            } else {
                unbias::<F, R>(&mut sums, scales, sub, x, block);
            }
            sums
        }
    }
}

/// Sets both i16 of each pair to the one of `half`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn both(pairs: __m256i, half: usize) -> __m256i {
    // SAFETY: by the caller's contract.
    unsafe {
        let at = (2 * half) as i32;
        let place = 0x0100_0100 + at * 0x0101_0101;
        let lane = _mm_setr_epi32(
            place,
            place + 0x0404_0404,
            place + 0x0808_0808,
            place + 0x0C0C_0C0C,
        );
        _mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(lane))
    }
}

/// Subtracts the bias's contribution from the sums of unsigned quants.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn unbias<F: Vectors, const R: usize>(
    dots: &mut [__m256i; R],
    scales: &F::Scales,
    sub: usize,
    x: &Rows<R>,
    block: usize,
) {
    // SAFETY: by the caller's contract.
    unsafe {
        if F::BITS == 6 {
            let factors = F::factors(scales, sub);
            for (i, dot) in dots.iter_mut().enumerate() {
                let [low, high] = x.sums(i, block).halves;
                let halves = i32::from(high) << 16 | i32::from(low) & 0xFFFF;
                let biased = _mm256_madd_epi16(factors, _mm256_set1_epi32(halves));
                *dot = _mm256_sub_epi32(*dot, _mm256_slli_epi32::<5>(biased));
            }
        } else if F::BIAS != 0 {
            shifted_totals::<R, 3>(dots, x, block);
        }
    }
}

/// `dots - (total << SHIFT)`.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn shifted_totals<const R: usize, const SHIFT: u32>(
    dots: &mut [__m256i; R],
    x: &Rows<R>,
    block: usize,
) {
    // SAFETY: by the caller's contract.
    unsafe {
        for (i, dot) in dots.iter_mut().enumerate() {
            let bias = x.sums(i, block).total << SHIFT;
            *dot = _mm256_sub_epi32(*dot, _mm256_set1_epi32(bias));
        }
    }
}

/// Prefetch distance in blocks: about 2 KB, which uses more of the memory's bandwidth than the hardware
/// prefetcher alone (measured: a third more bytes per second with one row).
const AHEAD: usize = 8;

/// Prefetches block `block`, counted from the start of this strip; it may belong to a later strip.
#[inline(always)]
fn prefetch<F: Format>(strip: Strip<'_, F>, block: usize) {
    let ask = |start: *const i8, bytes: usize| {
        for line in (0..bytes).step_by(64) {
            // SAFETY: a prefetch has no visible effect, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
        }
    };
    let quants = strip.quants.as_ptr().wrapping_add(block).cast();
    ask(quants, size_of::<F::Quants>() * SIDES);
    let bytes = size_of::<F::Scales>() * SIDES / F::SPAN;
    let scales = strip.scales.as_ptr().cast::<i8>();
    ask(scales.wrapping_add(bytes.wrapping_mul(block)), bytes);
}

/// Multiplies a pass of `R` rows with a strip.
///
/// # Safety
/// The CPU has what `M` and the format need.
#[inline(always)]
unsafe fn rows<M: Multiply, F: Vectors, const R: usize>(
    strip: Strip<'_, F>,
    x: &Activations,
    pass: Pass,
) -> [[[f32; WIDTH]; R]; SIDES] {
    let blocks = strip.quants.len();
    assert!(strip.scales.len() * F::SPAN >= blocks);
    let x = Rows::<R>::new(x, pass, blocks);
    // SAFETY: blocks are in range of tiles and rows; the CPU has the instructions by the caller's
    // contract.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); R]; SIDES];
        for block in 0..blocks {
            prefetch(strip, block.wrapping_add(AHEAD));
            let sub = block % F::SPAN;
            for (side, sums) in sums.iter_mut().enumerate() {
                let quants = strip.quants.get_unchecked(block).get_unchecked(side);
                let scales = strip.scales.get_unchecked(block / F::SPAN);
                let scales = scales.get_unchecked(side);
                let dots = M::dots::<F, R>(quants, scales, sub, &x, block);
                let d = F::scales(scales, sub);
                for i in 0..R {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps(x.sums(i, block).scale));
                    sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[i]), scale, sums[i]);
                }
                if F::OFFSET {
                    let m = F::offsets(scales, sub);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm256_fmadd_ps(m, _mm256_set1_ps(x.sums(i, block).sum), *sum);
                    }
                }
            }
        }
        let mut out = [[[0f32; WIDTH]; R]; SIDES];
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                _mm256_storeu_ps(out.as_mut_ptr(), sum);
            }
        }
        out
    }
}

/// Calls `rows` for each pass, and passes each row's outputs to `store`.
macro_rules! product {
    ($multiply:ty, $format:ty, $strip:expr, $x:expr, $passes:expr, $store:expr; $($n:literal)*) => {
        for &pass in $passes {
            match pass.rows {
                $($n => {
                    let out = rows::<$multiply, $format, $n>($strip, $x, pass);
                    for (side, out) in out.iter().enumerate() {
                        for (i, sums) in out.iter().enumerate() {
                            $store(side, pass.first + i, sums);
                        }
                    }
                })*
                _ => unreachable!("no pass has so many rows"),
            }
        }
    };
}

/// Multiplies the rows of `passes` with a strip. `store` is called with the side, the row and its eight
/// outputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn product_avx2<F: Vectors>(
    _: cpu::Avx2,
    strip: Strip<'_, F>,
    x: &Activations,
    passes: &[Pass],
    mut store: impl FnMut(usize, usize, &[f32; WIDTH]),
) {
    // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
    unsafe { product!(Avx2, F, strip, x, passes, store; 1 2 3 4 6 8) };
}

/// As [`product_avx2`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn product_vnni<F: Vectors>(
    _: cpu::Avx512Vnni,
    strip: Strip<'_, F>,
    x: &Activations,
    passes: &[Pass],
    mut store: impl FnMut(usize, usize, &[f32; WIDTH]),
) {
    // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
    unsafe { product!(Vnni, F, strip, x, passes, store; 1 2 3 4 6 8) };
}
