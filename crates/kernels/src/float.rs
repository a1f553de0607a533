//! Functions that compilers can vectorize and that give the same bits on every CPU: they use no fused
//! multiply-add and no library call.

/// `e^x` within 2 units in the last place; 0 for `x` below -87; `x` above 88 counts as 88.
///
/// Cody-Waite reduction to `2^n * e^r`, `|r| <= ln(2)/2`, and a polynomial for `e^r`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    /// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-88.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let e_r = p * (r * r) + r + 1.0;
    // 2^n from the integer that `shifted` holds: n is in -127..=127.
    let n_bits = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let scale = f32::from_bits((n_bits.wrapping_add(127) << 23) as u32);
    if x < -87.0 { 0.0 } else { e_r * scale }
}

/// The value of an f16 with these bits, exactly. The library's function asks each time what the CPU can do.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    /// 2^112, the ratio of values with the same bits of exponent.
    const RATIO: f32 = f32::from_bits(0x7780_0000);
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    let value = if magnitude < 0x0F80_0000 {
        f32::from_bits(magnitude) * RATIO
    } else {
        f32::from_bits(magnitude | 0x7F80_0000)
    };
    f32::from_bits(value.to_bits() | sign)
}

/// `tanh(x)` within 2e-7: Cephes' polynomial for small `x`, so that the error is relative to the result.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    p = p * square + 2.063_909e-2;
    p = p * square - 5.373_971_6e-2;
    p = p * square + 1.333_144_2e-1;
    p = p * square - 3.333_328e-1;
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// `1 - erf(x)` within 6e-7, for `x` from 0: Abramowitz and Stegun's formula 7.1.26. It vanishes for large `x`, as
/// it should.
#[inline(always)]
pub fn erfc(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let mut p = 1.061_405_4;
    for factor in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        p = p * t + factor;
    }
    p * t * exp(-x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            let (got, want) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                got == want && got.is_sign_negative() == want.is_sign_negative()
                    || want.is_nan() && got.is_nan()
            );
        }
    }

    #[test]
    fn tanh_and_erfc_agree_with_f64() {
        for i in -120_000..=120_000 {
            let x = i as f32 * 1e-4;
            let wide = f64::from(x);
            let off = (f64::from(tanh(x)) - wide.tanh()).abs();
            assert!(
                off <= 2e-7 * wide.tanh().abs(),
                "tanh of {x} is off by {off}"
            );
            let tail = 1.0 - candle_core::cpu::erf::erf_f64(wide.abs());
            let off = (f64::from(erfc(x.abs())) - tail).abs();
            assert!(off < 6e-7, "erfc of {x} is off by {off}");
        }
        assert_eq!(tanh(f32::INFINITY), 1.0);
    }

    #[test]
    fn exp_agrees_with_the_library() {
        let mut worst = 0f64;
        for i in -8_700_000..=8_800_000i64 {
            if i % 37 != 0 {
                continue;
            }
            let x = i as f32 * 1e-5;
            let (ours, theirs) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max((ours - theirs).abs() / theirs);
        }
        assert!(worst < 2.5e-7, "relative error {worst}");
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }
}
