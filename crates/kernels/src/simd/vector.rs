//! Vectors of 16 floats: one register of AVX-512, two of AVX2, or an array. Loops are written once, over
//! [`Simd`], so that every instruction set gives the same bits.

use candle_core::WithDType;
use half::{bf16, f16};

/// Floats per vector.
pub(crate) const LANES: usize = 16;

/// The half of an f32 that is a bf16.
pub(crate) const UPPER: u32 = 0xFFFF_0000;
/// The bits of a float that those of an E4M3 become: the sign, the lower four of the exponent, the upper three of the fraction.
pub(crate) const E4M3_BITS: u32 = 0x87F0_0000;
/// The signs of the bytes of a lane.
pub(crate) const BYTE_SIGNS: u32 = 0x8080_8080;
/// Just below half a unit of it: adding this, and 1 if the unit is odd, rounds to it.
pub(crate) const BELOW_HALF: u32 = 0x7FFF;

/// An instruction set. Its value proves that the CPU has the instructions.
pub(crate) trait Simd: Copy {
    type Vector: Copy;
    /// How many sums stay in registers while two more vectors are used.
    const SUMS: usize;
    /// As [`SUMS`](Self::SUMS), of [`dot_pairs`](Self::dot_pairs), which needs other registers for both numbers of the pairs
    /// where no instruction multiplies them as they are.
    const PAIR_SUMS: usize = Self::SUMS / 2;

    fn splat(self, x: f32) -> Self::Vector;
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `if a > b { a } else { b }`.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `x * 2^n` by an addition to the exponent, where the low bits of `n` are the integer.
    fn scale(self, x: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// `if x < limit { 0 } else { y }`.
    fn zero_below(self, limit: f32, x: Self::Vector, y: Self::Vector) -> Self::Vector;
    /// The largest lane.
    fn max_of(self, x: Self::Vector) -> f32;
    /// The sum of all lanes: halves are added until one lane is left.
    fn sum_of(self, x: Self::Vector) -> f32;

    /// The sum of each half: `(((x0 + x1) + x2) + x3) + (((x4 + x5) + x6) + x7)`.
    fn sums_of_halves(self, x: [Self::Vector; 2]) -> [f32; 4];

    /// # Safety
    /// 16 numbers can be read at `from`, which need not be aligned.
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    /// # Safety
    /// 16 numbers can be read at `from`.
    unsafe fn load_f16(self, from: *const f16) -> Self::Vector;
    /// # Safety
    /// 16 numbers can be read at `from`.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::Vector;
    /// Loads signed bytes.
    ///
    /// # Safety
    /// 16 bytes can be read at `from`.
    unsafe fn load_i8(self, from: *const i8) -> Self::Vector;
    /// Loads the numbers that [`e4m3`] makes of bytes: number `i` of byte `4 (i % 4) + 3 - i / 4`.
    ///
    /// # Safety
    /// 16 bytes can be read at `from`.
    unsafe fn load_e4m3(self, from: *const u8) -> Self::Vector;
    /// Loads eight pairs: the first of each, then the second of each.
    ///
    /// # Safety
    /// 16 numbers can be read at `from`.
    unsafe fn load_apart(self, from: *const bf16) -> Self::Vector;
    /// # Safety
    /// Eight numbers can be read at each of `from`.
    unsafe fn load_halves(self, from: [*const f32; 2]) -> Self::Vector;
    /// # Safety
    /// Eight numbers can be read at each of `from`.
    unsafe fn load_halves_f16(self, from: [*const f16; 2]) -> Self::Vector;
    /// # Safety
    /// Eight numbers can be read at each of `from`.
    unsafe fn load_halves_bf16(self, from: [*const bf16; 2]) -> Self::Vector;
    /// Changes the sign of each of the four bytes of a lane: a signed byte becomes the unsigned byte that is 128 more.
    fn flip_bytes(self, x: Self::Vector) -> Self::Vector;
    /// Pairs of bf16, one in 32 bits each: the upper halves of the lanes of both, the first in the lower half.
    fn pair(self, first: Self::Vector, second: Self::Vector) -> Self::Vector;
    /// The first of each pair.
    fn first(self, pairs: Self::Vector) -> Self::Vector;
    /// The second of each pair.
    fn second(self, pairs: Self::Vector) -> Self::Vector;
    /// `a.first * b.first + (a.second * b.second + c)`, each product and its addition rounded once.
    #[inline(always)]
    fn dot_pairs(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        let second = self.fma(self.second(a), self.second(b), c);
        self.fma(self.first(a), self.first(b), second)
    }

    /// Writes `x` rounded to the nearest bf16, ties to even. NaNs stay so if the CPU made them.
    ///
    /// # Safety
    /// 16 numbers can be written at `to`.
    unsafe fn store_bf16(self, to: *mut bf16, x: Self::Vector);
    /// # Safety
    /// 16 numbers can be written at `to`.
    unsafe fn store(self, to: *mut f32, x: Self::Vector);
    /// Writes 16 vectors: the numbers `i` of all `from` at `to[i / 8] + i % 8 * step`.
    ///
    /// # Safety
    /// 16 numbers can be read at each of `from`, and the vectors be written.
    unsafe fn transpose<E: Element>(self, from: &[*const E; LANES], to: [*mut f32; 2], step: usize);
}

/// Methods of vectors alone.
macro_rules! on_vectors {
    ($($(#[$about:meta])* $name:ident($($x:ident),*) => $value:expr;)*) => {
        $(
            $(#[$about])*
            #[inline(always)]
            fn $name(self, $($x: Self::Vector),*) -> Self::Vector {
                $value
            }
        )*
    };
}
#[cfg(target_arch = "aarch64")]
pub(super) use on_vectors;

/// Methods that read numbers.
macro_rules! loads {
    ($($(#[$about:meta])* $name:ident($from:ident: $type:ty) => $value:expr;)*) => {
        $(
            $(#[$about])*
            #[inline(always)]
            unsafe fn $name(self, $from: $type) -> Self::Vector {
                // SAFETY: `self` proves that the CPU has the instructions; the caller, that the numbers can be read.
                #[allow(unused_unsafe)]
                unsafe { $value }
            }
        )*
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use loads;

/// Functions of registers, for callers that know what the CPU has.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! with_instructions {
    ($($(#[$about:meta])* $name:ident($($x:ident: $from:ty),*) -> $to:ty => $value:expr;)*) => {
        $(
            $(#[$about])*
            ///
            /// # Safety
            /// The CPU has the instructions, and what is read can be read.
            #[inline(always)]
            unsafe fn $name($($x: $from),*) -> $to {
                // SAFETY: the caller's contract.
                unsafe { $value }
            }
        )*
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use with_instructions;

/// Work that is compiled for each instruction set.
pub(crate) trait Loop {
    type Output;

    /// Implementations are `#[inline(always)]`, and so is all that they call: only what is inlined gets the
    /// instructions. Closures are not.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An element type of a pool.
pub(crate) trait Element: WithDType {
    fn to_f32(self) -> f32;

    /// Loads [`LANES`] numbers.
    ///
    /// # Safety
    /// They can be read at `from`.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::Vector;

    /// Loads eight numbers for each half of a vector.
    ///
    /// # Safety
    /// They can be read at each of `from`.
    unsafe fn load_halves<S: Simd>(s: S, from: [*const Self; 2]) -> S::Vector;
}

macro_rules! element {
    ($type:ty, $to_f32:expr, $load:ident, $load_halves:ident) => {
        impl Element for $type {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }

            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::Vector {
                // SAFETY: the caller's contract.
                unsafe { s.$load(from) }
            }

            #[inline(always)]
            unsafe fn load_halves<S: Simd>(s: S, from: [*const Self; 2]) -> S::Vector {
                // SAFETY: the caller's contract.
                unsafe { s.$load_halves(from) }
            }
        }
    };
}
element!(f32, std::convert::identity, load, load_halves);
element!(f16, f16::to_f32, load_f16, load_halves_f16);
element!(bf16, bf16::to_f32, load_bf16, load_halves_bf16);

/// A finite number of FP8 with an exponent of 4 bits (E4M3), over 2^120: that is what the exponents' zeros are apart. Numbers
/// below the smallest power are such of f32, too.
#[inline(always)]
pub(crate) fn e4m3(byte: u8) -> f32 {
    let moved = (u32::from(byte) << 24).cast_signed() >> 4;
    f32::from_bits(moved.cast_unsigned() & E4M3_BITS)
}

/// `2^x` within 1.2 units in the last place, for numbers up to 127; 0 for those below -125. NaN stays NaN.
///
/// The nearest whole number goes to the exponent; a polynomial through `2^r` at Chebyshev's points does the rest,
/// `|r| <= 1/2`.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let factors = [
        1.545_316_3e-4,
        1.339_086_3e-3,
        9.618_083e-3,
        5.550_357e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
        1.0,
    ];
    exp2_by(s, x, &factors)
}

/// As [`exp2`], within 1.0e-4 of the value: enough for a bf16, which is within 2.0e-3.
#[inline(always)]
pub(crate) fn exp2_for_bf16<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let factors = [5.583_828_3e-2, 2.426_395e-1, 6.931_367e-1, 9.999_245_6e-1];
    exp2_by(s, x, &factors)
}

/// `factors` are those of the polynomial, from that of the highest power on.
#[inline(always)]
fn exp2_by<S: Simd>(s: S, x: S::Vector, factors: &[f32]) -> S::Vector {
    /// Adding it rounds to an integer and leaves that in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = s.add(x, s.splat(ROUND));
    let r = s.sub(x, s.sub(shifted, s.splat(ROUND)));
    let mut p = s.splat(factors[0]);
    for &factor in &factors[1..] {
        p = s.fma(p, r, s.splat(factor));
    }
    s.zero_below(-125.0, x, s.scale(p, shifted))
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// `f` of each lane.
macro_rules! lanes {
    ($i:ident => $value:expr) => {
        lanes!(LANES, $i => $value)
    };
    ($n:expr, $i:ident => $value:expr) => {{
        let mut out = [0f32; $n];
        for ($i, out) in out.iter_mut().enumerate() {
            *out = $value;
        }
        out
    }};
}

/// Lanes of half a vector.
const HALF: usize = LANES / 2;

/// # Safety
/// Eight numbers can be read at each of `from`.
#[inline(always)]
unsafe fn halves<E: Element>(from: [*const E; 2]) -> [f32; LANES] {
    // SAFETY: the caller's contract.
    let x = unsafe { from.map(|from| from.cast::<[E; HALF]>().read_unaligned()) };
    lanes!(i => x[i / HALF][i % HALF].to_f32())
}

impl Simd for Portable {
    type Vector = [f32; LANES];
    const SUMS: usize = 6;

    on_vectors! {
        add(a, b) => lanes!(i => a[i] + b[i]);
        sub(a, b) => lanes!(i => a[i] - b[i]);
        mul(a, b) => lanes!(i => a[i] * b[i]);
        fma(a, b, c) => lanes!(i => a[i].mul_add(b[i], c[i]));
        max(a, b) => lanes!(i => if a[i] > b[i] { a[i] } else { b[i] });
        scale(x, n) => lanes!(i => f32::from_bits(x[i].to_bits().wrapping_add(n[i].to_bits() << 23)));
        pair(first, second) => lanes!(i => f32::from_bits(first[i].to_bits() >> 16 | second[i].to_bits() & UPPER));
        first(pairs) => lanes!(i => f32::from_bits(pairs[i].to_bits() << 16));
        second(pairs) => lanes!(i => f32::from_bits(pairs[i].to_bits() & UPPER));
    }

    loads! {
        load(from: *const f32) => from.cast::<[f32; LANES]>().read_unaligned();
        load_f16(from: *const f16) => {
            let x = from.cast::<[f16; LANES]>().read();
            lanes!(i => x[i].to_f32())
        };
        load_bf16(from: *const bf16) => {
            let x = from.cast::<[bf16; LANES]>().read();
            lanes!(i => x[i].to_f32())
        };
        load_i8(from: *const i8) => {
            let x = from.cast::<[i8; LANES]>().read();
            lanes!(i => f32::from(x[i]))
        };
        load_e4m3(from: *const u8) => {
            let x = from.cast::<[u8; LANES]>().read();
            lanes!(i => e4m3(x[4 * (i % 4) + 3 - i / 4]))
        };
        load_apart(from: *const bf16) => {
            let x = from.cast::<[bf16; LANES]>().read();
            lanes!(i => x[i % 8 * 2 + i / 8].to_f32())
        };
        load_halves(from: [*const f32; 2]) => halves(from);
        load_halves_f16(from: [*const f16; 2]) => halves(from);
        load_halves_bf16(from: [*const bf16; 2]) => halves(from);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn zero_below(self, limit: f32, x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
        lanes!(i => if x[i] < limit { 0.0 } else { y[i] })
    }

    #[inline(always)]
    fn flip_bytes(self, x: [f32; LANES]) -> [f32; LANES] {
        lanes!(i => f32::from_bits(x[i].to_bits() ^ BYTE_SIGNS))
    }

    #[inline(always)]
    fn max_of(self, x: [f32; LANES]) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn sum_of(self, mut x: [f32; LANES]) -> f32 {
        for half in [8, 4, 2, 1] {
            let (low, high) = x.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                *low += *high;
            }
        }
        x[0]
    }

    #[inline(always)]
    fn sums_of_halves(self, x: [[f32; LANES]; 2]) -> [f32; 4] {
        lanes!(4, i => {
            let x = &x[i / 2][i % 2 * HALF..];
            (((x[0] + x[1]) + x[2]) + x[3]) + (((x[4] + x[5]) + x[6]) + x[7])
        })
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: [f32; LANES]) {
        for (i, x) in x.into_iter().enumerate() {
            let odd = x.to_bits() >> 16 & 1;
            let rounded = x.to_bits().wrapping_add(BELOW_HALF + odd) >> 16;
            // SAFETY: the caller's contract.
            unsafe { to.add(i).write(bf16::from_bits(rounded as u16)) };
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: [f32; LANES]) {
        // SAFETY: the caller's contract.
        unsafe { to.cast::<[f32; LANES]>().write(x) }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(
        self,
        from: &[*const E; LANES],
        to: [*mut f32; 2],
        step: usize,
    ) {
        for (j, from) in from.iter().enumerate() {
            for i in 0..LANES {
                let to = to[i / 8].wrapping_add(i % 8 * step + j);
                // SAFETY: the caller's contract, which does not ask for alignment.
                unsafe { *to = from.add(i).read_unaligned().to_f32() };
            }
        }
    }
}
