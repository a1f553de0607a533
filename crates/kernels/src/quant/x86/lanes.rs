//! Vectors of 256 and 512 bits, and what the products do with them.

use std::arch::x86_64::*;

/// Vectors of one width. All functions need AVX2, FMA and F16C, those of 512 bits AVX-512 F and BW, and are
/// inlined into functions that have them. Pointers need no alignment, except that of [`Lanes::load`].
pub(in super::super) trait Lanes: 'static {
    /// Integers.
    type I: Copy;
    /// Floats of 32 bits.
    type F: Copy;
    /// Numbers of 32 bits in a vector: outputs.
    const COUNT: usize;

    /// Loads an aligned vector.
    unsafe fn load(at: *const u8) -> Self::I;
    /// Repeats four bytes.
    unsafe fn broadcast(at: *const u8) -> Self::I;
    /// Repeats a byte.
    unsafe fn bytes(byte: i8) -> Self::I;
    unsafe fn zero() -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Shift numbers of 16 bits.
    unsafe fn left<const BITS: u32>(a: Self::I) -> Self::I;
    unsafe fn right<const BITS: u32>(a: Self::I) -> Self::I;
    /// Add and multiply numbers of 32 bits.
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn mul(a: Self::I, b: Self::I) -> Self::I;
    /// Widens unsigned and signed bytes to 32 bits.
    unsafe fn unsigned(at: *const u8) -> Self::I;
    unsafe fn signed(at: *const u8) -> Self::I;

    /// Bytes of a table, each of which an index below 16 names.
    unsafe fn look_up(table: &[u8; 16], index: Self::I) -> Self::I;

    unsafe fn float_zero() -> Self::F;
    unsafe fn floats(a: Self::I) -> Self::F;
    /// Widens halves.
    unsafe fn halves(at: *const u8) -> Self::F;
    unsafe fn float_broadcast(at: &f32) -> Self::F;
    unsafe fn float_mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn negate(a: Self::F) -> Self::F;
    /// Floats with these exponents of 8 bits, but at least the float with the bits `min`.
    unsafe fn powers(exponents: Self::I, min: u32) -> Self::F;
    unsafe fn store(at: *mut f32, a: Self::F);
}

/// 256 bits.
pub(in super::super) struct Ymm;
/// 512 bits.
pub(in super::super) struct Zmm;

macro_rules! lanes {
    ($lanes:ty, $int:ty, $float:ty, $count:literal;
     $($name:ident $(<$bits:ident>)? ($($arg:ident: $type:ty),*) -> $result:ty => $body:expr;)*) => {
        impl Lanes for $lanes {
            type I = $int;
            type F = $float;
            const COUNT: usize = $count;
            $(
                #[inline(always)]
                unsafe fn $name $(<const $bits: u32>)? ($($arg: $type),*) -> $result {
                    // SAFETY: the CPU has the instructions and pointers are valid, by the caller's contract.
                    #[allow(unused_unsafe)]
                    unsafe { $body }
                }
            )*
            #[inline(always)]
            unsafe fn store(at: *mut f32, a: $float) {
                // SAFETY: as above.
                unsafe { at.cast::<$float>().write_unaligned(a) }
            }
        }
    };
}

lanes!(Ymm, __m256i, __m256, 8;
    load(at: *const u8) -> __m256i => _mm256_load_si256(at.cast());
    broadcast(at: *const u8) -> __m256i => _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
    bytes(byte: i8) -> __m256i => _mm256_set1_epi8(byte);
    zero() -> __m256i => _mm256_setzero_si256();
    and(a: __m256i, b: __m256i) -> __m256i => _mm256_and_si256(a, b);
    or(a: __m256i, b: __m256i) -> __m256i => _mm256_or_si256(a, b);
    left<BITS>(a: __m256i) -> __m256i => _mm256_sll_epi16(a, _mm_cvtsi32_si128(BITS as i32));
    right<BITS>(a: __m256i) -> __m256i => _mm256_srl_epi16(a, _mm_cvtsi32_si128(BITS as i32));
    add(a: __m256i, b: __m256i) -> __m256i => _mm256_add_epi32(a, b);
    mul(a: __m256i, b: __m256i) -> __m256i => _mm256_mullo_epi32(a, b);
    unsigned(at: *const u8) -> __m256i => _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
    signed(at: *const u8) -> __m256i => _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
    float_zero() -> __m256 => _mm256_setzero_ps();
    floats(a: __m256i) -> __m256 => _mm256_cvtepi32_ps(a);
    halves(at: *const u8) -> __m256 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
    float_broadcast(at: &f32) -> __m256 => _mm256_set1_ps(*at);
    float_mul(a: __m256, b: __m256) -> __m256 => _mm256_mul_ps(a, b);
    fma(a: __m256, b: __m256, c: __m256) -> __m256 => _mm256_fmadd_ps(a, b, c);
    negate(a: __m256) -> __m256 => _mm256_xor_ps(a, _mm256_set1_ps(-0.0));
    look_up(table: &[u8; 16], index: __m256i) -> __m256i => {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, index)
    };
    powers(exponents: __m256i, min: u32) -> __m256 => {
        let bits = _mm256_slli_epi32::<23>(exponents);
        _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(min as i32)))
    };
);

lanes!(Zmm, __m512i, __m512, 16;
    load(at: *const u8) -> __m512i => _mm512_load_si512(at.cast());
    broadcast(at: *const u8) -> __m512i => _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
    bytes(byte: i8) -> __m512i => _mm512_set1_epi8(byte);
    zero() -> __m512i => _mm512_setzero_si512();
    and(a: __m512i, b: __m512i) -> __m512i => _mm512_and_si512(a, b);
    or(a: __m512i, b: __m512i) -> __m512i => _mm512_or_si512(a, b);
    left<BITS>(a: __m512i) -> __m512i => _mm512_slli_epi16::<BITS>(a);
    right<BITS>(a: __m512i) -> __m512i => _mm512_srli_epi16::<BITS>(a);
    add(a: __m512i, b: __m512i) -> __m512i => _mm512_add_epi32(a, b);
    mul(a: __m512i, b: __m512i) -> __m512i => _mm512_mullo_epi32(a, b);
    unsigned(at: *const u8) -> __m512i => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
    signed(at: *const u8) -> __m512i => _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()));
    float_zero() -> __m512 => _mm512_setzero_ps();
    floats(a: __m512i) -> __m512 => _mm512_cvtepi32_ps(a);
    halves(at: *const u8) -> __m512 => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
    float_broadcast(at: &f32) -> __m512 => _mm512_set1_ps(*at);
    float_mul(a: __m512, b: __m512) -> __m512 => _mm512_mul_ps(a, b);
    fma(a: __m512, b: __m512, c: __m512) -> __m512 => _mm512_fmadd_ps(a, b, c);
    look_up(table: &[u8; 16], index: __m512i) -> __m512i => {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, index)
    };
    powers(exponents: __m512i, min: u32) -> __m512 => {
        let bits = _mm512_slli_epi32::<23>(exponents);
        _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(min as i32)))
    };
    negate(a: __m512) -> __m512 => {
        let sign = _mm512_set1_epi32(i32::MIN);
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
    };
);
