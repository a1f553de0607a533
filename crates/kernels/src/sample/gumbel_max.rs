//! The random numbers of the coupled draw, and the draw itself, on the CPU.
//!
//! A token is drawn by an exponential race: every token x waits E(x) / w(x), where E(x) is exponentially
//! distributed, and the first one wins. This is the Gumbel-max trick without logarithms of the weights:
//! argmax log w(x) + g(x) with g(x) = -ln E(x). Every operation is exact or correctly rounded and none
//! is fused, so all CPUs and the CUDA kernel compute the same bits.

use crate::simd::{Loop, Simd, run};
use crate::{cpu, float};

/// The exponentially distributed number (mean 1) of token `id` under `key`.
///
/// The bits are hashed with two rounds of `triple32` (Wellons 2018, "Hash function prospector"), with
/// the second half of the key between them; the logarithm is the one of Cephes (Moshier, `logf`), with
/// a full relative precision for small results, which decide the race.
#[inline(always)]
pub fn exponential(key: u64, id: u32) -> f32 {
    let mut h = id ^ key as u32;
    h = (h ^ (h >> 17)).wrapping_mul(0xed5a_d4bb);
    h ^= (key >> 32) as u32;
    h = (h ^ (h >> 11)).wrapping_mul(0xac4c_1b51);
    h = (h ^ (h >> 15)).wrapping_mul(0x3184_8bab);
    h ^= h >> 14;
    // Uniform in (0, 1). Small numbers have all their 31 bits.
    let v = ((h >> 1) as i32 as f32 + 0.5) * (1.0 / 2_147_483_648.0);
    let v = if v < LARGEST { v } else { LARGEST };
    -ln_1m(v)
}

/// The largest float below 1.
const LARGEST: f32 = 1.0 - f32::EPSILON / 2.0;

/// ln(1 - v) for v in (0, 1).
#[inline(always)]
fn ln_1m(v: f32) -> f32 {
    /// Bits of sqrt(1/2): the fraction is reduced to [sqrt(1/2), sqrt(2)).
    const SQRT_HALF: i32 = 0x3f35_04f3;
    let y = (1.0 - v).to_bits() as i32;
    let e = y.wrapping_sub(SQRT_HALF) >> 23;
    let m = f32::from_bits(y.wrapping_sub(e << 23) as u32);
    // 1 - v has lost the last bits of a small v.
    let f = if e == 0 { -v } else { m - 1.0 };
    let mut p = 7.037_683_6e-2;
    p = p * f - 1.151_461e-1;
    p = p * f + 1.167_699_84e-1;
    p = p * f - 1.242_014_1e-1;
    p = p * f + 1.424_932_3e-1;
    p = p * f - 1.666_805_8e-1;
    p = p * f + 2.000_071_4e-1;
    p = p * f - 2.499_999_4e-1;
    p = p * f + 3.333_333e-1;
    let z = f * f;
    (((f * z) * p - 0.5 * z) + f) + e as f32 * std::f32::consts::LN_2
}

/// Replaces each weight w(x) (at least 0) by w(x) / E(x). The largest result is that of the token drawn
/// with probability w(x) over the sum of all weights. At most `u32::MAX` weights.
pub fn gumbel_max(weights: &mut [f32], key: u64) {
    run(cpu::isa(), GumbelMax { weights, key });
}

/// Replaces each `x` by `exp((x - max) / temperature)`. `max` is the largest entry, which becomes 1.
pub fn weights(logits: &mut [f32], max: f32, temperature: f32) {
    let work = SoftmaxWeights {
        logits,
        max,
        temperature,
    };
    run(cpu::isa(), work);
}

struct GumbelMax<'a> {
    weights: &'a mut [f32],
    key: u64,
}

impl Loop for GumbelMax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (id, weight) in self.weights.iter_mut().enumerate() {
            *weight /= exponential(self.key, id as u32);
        }
    }
}

struct SoftmaxWeights<'a> {
    logits: &'a mut [f32],
    max: f32,
    temperature: f32,
}

impl Loop for SoftmaxWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for x in self.logits {
            *x = float::exp((*x - self.max) / self.temperature);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix;

    #[test]
    fn numbers_are_exponentially_distributed() {
        const N: u32 = 1 << 20;
        let (mut sum, mut squares, mut above) = (0f64, 0f64, [0u32; 12]);
        let mut smallest = f32::INFINITY;
        for id in 0..N {
            let e = exponential(mix(7), id);
            assert!(e > 0.0 && e < 18.0, "{e}");
            smallest = smallest.min(e);
            sum += f64::from(e);
            squares += f64::from(e) * f64::from(e);
            for (i, count) in above.iter_mut().enumerate() {
                *count += u32::from(e > i as f32 / 2.0);
            }
        }
        let n = f64::from(N);
        assert!((sum / n - 1.0).abs() < 0.004, "mean {}", sum / n);
        assert!((squares / n - 2.0).abs() < 0.03, "{}", squares / n);
        for (i, &count) in above.iter().enumerate() {
            let (share, want) = (f64::from(count) / n, (-0.5 * i as f64).exp());
            let deviation = (want * (1.0 - want) / n).sqrt();
            assert!((share - want).abs() <= 4.5 * deviation, "{i}: {share}");
        }
        assert!(smallest < 8.0 / N as f32, "{smallest}");
    }

    /// Over ids under one key, over keys of one id, and over both halves of the key: no pair of
    /// neighbours is correlated.
    #[test]
    fn numbers_are_independent() {
        const N: u64 = 200_000;
        /// The key and the id of both.
        type Neighbours = fn(u64) -> [(u64, u32); 2];
        let neighbours: [Neighbours; 5] = [
            |i| [(mix(3), i as u32), (mix(3), i as u32 + 1)],
            |i| [(mix(i), 5), (mix(i + 1), 5)],
            |i| [(i, 5), (i + 1, 5)],
            |i| [(i << 32, 5), ((i + 1) << 32, 5)],
            |i| [(mix(i), 5), (mix(i), 5 ^ 1 << (i % 17))],
        ];
        for (which, pair) in neighbours.into_iter().enumerate() {
            let products = (0..N).map(|i| {
                let [a, b] = pair(i).map(|(key, id)| exponential(key, id));
                f64::from(a - 1.0) * f64::from(b - 1.0)
            });
            let correlation = products.sum::<f64>() / N as f64;
            let limit = 4.5 / (N as f64).sqrt();
            assert!(correlation.abs() < limit, "{which}: {correlation}");
        }
    }

    /// `tests/emulator/sample.cpp` compares the numbers of the CUDA kernel with the same hash.
    #[test]
    fn numbers_have_the_bits_of_the_cuda_kernel() {
        let hash = (0..1 << 18).fold(0u64, |hash, id: u32| {
            let key = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let bits = exponential(key, id).to_bits();
            (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!(hash, 0x997a_d0e8_ab2a_a143);
    }

    #[test]
    fn the_logarithm_agrees_with_the_library() {
        let mut worst = 0f64;
        for i in 1..2_000_000u32 {
            let v = if i % 2 == 0 {
                i as f32 / 2e6
            } else {
                (i as f32 / 2e6).powi(8)
            };
            if v <= 0.0 || v > LARGEST {
                continue;
            }
            let (ours, theirs) = (f64::from(ln_1m(v)), (-f64::from(v)).ln_1p());
            worst = worst.max((ours / theirs - 1.0).abs());
        }
        assert!(worst < 3e-7, "relative error {worst}");
    }

    #[test]
    fn all_instruction_sets_have_the_same_bits() {
        for len in [0, 1, 7, 8, 33, 5000] {
            let weights: Vec<f32> = (0..len).map(|i| mix(i) as f32 / u64::MAX as f32).collect();
            let (mut fast, mut plain) = (weights.clone(), weights);
            gumbel_max(&mut fast, mix(len));
            for (id, weight) in plain.iter_mut().enumerate() {
                *weight /= exponential(mix(len), std::hint::black_box(id as u32));
            }
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&fast), bits(&plain));
        }
    }
}
