//! What speculation gains, by theory.

/// The speed-up that Theorem 3.8 of Leviathan et al. 2023 predicts for drafts of `k` tokens, each
/// accepted with probability `alpha` at a cost of `c` target steps:
/// (1 - alpha^(k+1)) / ((1 - alpha)(c k + 1)); at alpha = 1 its limit, (k + 1) / (c k + 1).
pub fn expected_speed_up(alpha: f64, k: usize, c: f64) -> f64 {
    // The sum 1 + alpha + ... + alpha^k is defined at alpha = 1, unlike the quotient.
    let tokens: f64 = (0..=k).map(|i| alpha.powi(i as i32)).sum();
    tokens / (c * k as f64 + 1.0)
}
