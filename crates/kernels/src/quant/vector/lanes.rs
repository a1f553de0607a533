//! Vectors of 128, 256 and 512 bits, and what the products do with them.

/// Vectors of one width. All functions need AVX2, FMA and F16C (256 bits), AVX-512 F and BW too (512 bits), or NEON
/// (128 bits), and are inlined into functions that have them. Pointers need no alignment, except that of
/// [`Lanes::load`].
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
    /// Shift numbers of 8 or 16 bits: callers mask off what may come from the neighbouring byte.
    unsafe fn left<const BITS: u32>(a: Self::I) -> Self::I;
    unsafe fn right<const BITS: u32>(a: Self::I) -> Self::I;
    /// Adds numbers of 32 bits.
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
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
    /// Floats whose bits are these numbers of 32 bits, 20 places to the left.
    unsafe fn floats_of_bits(numbers: Self::I) -> Self::F;
    unsafe fn store(at: *mut f32, a: Self::F);
}

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
pub(super) use lanes;
