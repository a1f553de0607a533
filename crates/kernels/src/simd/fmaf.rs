//! The C function `fmaf`, which `f32::mul_add` calls where the CPU need not have the instruction. That of mingw-w64 rounds
//! more than once, so that portable code would have other bits than vector code, and than it has on Linux.

/// The function that the program is linked with, in place of that of the C library.
#[cfg(all(windows, target_env = "gnu"))]
#[unsafe(no_mangle)]
extern "C" fn fmaf(a: f32, b: f32, c: f32) -> f32 {
    fused(a, b, c)
}

/// `a * b + c`, rounded once. The sum is computed in f64 and rounded to odd there, after which rounding to f32 is what it would
/// be of the exact sum (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
fn fused(a: f32, b: f32, c: f32) -> f32 {
    // Exact: of 48 bits.
    let product = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let sum = product + c;
    // What the sum lacks, exactly (Knuth's TwoSum); not a number if the sum is infinite or none.
    let of_c = sum - product;
    let rest = (product - (sum - of_c)) + (c - of_c);
    let is_exact = rest == 0.0 || rest.is_nan();
    let bits = sum.to_bits();
    let odd = if bits & 1 == 1 || is_exact {
        bits
    } else if (rest > 0.0) == (sum > 0.0) {
        bits + 1
    } else {
        bits - 1
    };
    f64::from_bits(odd) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers whose sum is decided by a rest that f64 has no room for, and others.
    #[test]
    fn the_sum_is_rounded_once() {
        let e = f32::EPSILON;
        let tiny = f32::from_bits(1);
        for (a, b, c, want) in [
            (2.0, 3.0, 4.0, 10.0),
            // Half a bit above 1, and a little more, less or nothing.
            (e / 2.0, 1.0 + e, 1.0, 1.0 + e),
            (e / 2.0, 1.0 - e, 1.0, 1.0),
            (e / 2.0, 1.0, 1.0, 1.0),
            (-tiny, tiny, 1.0 + e, 1.0 + e),
            // The little does not fit into f64 beside the half.
            (1.0 + e, 1.0 + e, tiny, 1.0 + 2.0 * e),
            (4097.0, 4097.0, tiny, 16_785_410.0),
            (4097.0, 4097.0, -tiny, 16_785_408.0),
            (4097.0, 4097.0, 0.0, 16_785_408.0),
            (-4097.0, 4097.0, tiny, -16_785_408.0),
            (-4097.0, 4097.0, -tiny, -16_785_410.0),
            // Subnormal numbers.
            (tiny, 0.5, tiny, 2.0 * tiny),
            (tiny, 0.5, 0.0, 0.0),
            (tiny, 0.25, tiny, tiny),
            (f32::MAX, 2.0, f32::NEG_INFINITY, f32::NEG_INFINITY),
            (f32::MAX, 2.0, -f32::MAX, f32::MAX),
            (f32::MAX, f32::MAX, 0.0, f32::INFINITY),
        ] {
            assert_eq!(fused(a, b, c), want, "{a} * {b} + {c}");
        }
        assert!(fused(f32::INFINITY, 0.0, 1.0).is_nan());
        assert!(fused(f32::INFINITY, 1.0, f32::NEG_INFINITY).is_nan());
        assert!(fused(-0.0, 1.0, -0.0).is_sign_negative());
    }

    /// On Windows, that is the same function; on Linux, another.
    #[test]
    fn it_is_mul_add() {
        let mut state = 1_u64;
        let mut number = |exponents: u32| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 32) as u32;
            let exponent = 127 - exponents / 2 + (bits >> 8) % exponents;
            f32::from_bits(
                (bits & 0x8000_0000) | (exponent << 23) | ((state >> 9) as u32 & 0x7f_ffff),
            )
        };
        for exponents in [2, 8, 30, 60, 250] {
            for _ in 0..100_000 {
                let (a, b, c) = (number(exponents), number(exponents), number(exponents));
                let (once, want) = (fused(a, b, c), a.mul_add(b, c));
                assert_eq!(once.to_bits(), want.to_bits(), "{a} * {b} + {c}");
            }
        }
    }
}
