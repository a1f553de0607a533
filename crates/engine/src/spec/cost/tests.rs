use super::*;

/// What was measured beside other work is sooner corrected by steps, also where the numbers of rows are others.
#[test]
fn a_doubted_curve_recovers() {
    // The mean over many starts of the worst error after 100 steps.
    let error = |observations: u32| {
        let mut noise = Noise(3);
        let worst = (0..50).map(|seed| {
            let (mut curve, mut start) = (CostCurve::default(), Noise(seed));
            let wrong = [1, 2, 4, 6, 8, 16];
            let wrong = wrong.map(|rows| (rows, avx2(rows) * (0.8 + 2.2 * start.unit())));
            curve.calibrate(&wrong);
            curve.believe(observations);
            for _ in 0..100 {
                let rows = 8 + noise.below(14);
                curve.note(rows, 0.01 * avx2(rows) * noise.factor(0.05));
            }
            let relative = |rows| curve.seconds(rows) / curve.seconds(8) / (avx2(rows) / avx2(8));
            let errors = (8..22).map(|rows| (relative(rows) - 1.0).abs());
            errors.fold(0.0, f64::max)
        });
        worst.sum::<f64>() / 50.0
    };
    let (doubted, believed) = (error(1), error(CALIBRATED));
    assert!(doubted < 0.85 * believed, "{doubted} {believed}");
}

/// Reproducible noise (SplitMix64).
pub(in crate::spec) struct Noise(pub u64);

impl Noise {
    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64
    }

    /// Uniform in 0..`end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.unit() * end as f64) as usize).min(end - 1)
    }

    /// A random factor around 1 with the standard deviation `deviation`.
    pub fn factor(&mut self, deviation: f64) -> f64 {
        1.0 + deviation * 3f64.sqrt() * (2.0 * self.unit() - 1.0)
    }
}

/// Seconds of a forward of `rows` rows relative to one row, as measured on a CPU with AVX2.
fn avx2(rows: usize) -> f64 {
    let known = [(1, 1.0), (4, 1.51), (6, 2.0), (8, 2.5), (16, 4.3)];
    let [.., (a, low), (b, high)] = known;
    let after = known.windows(2).find(|pair| rows <= pair[1].0);
    let ((a, low), (b, high)) = after.map_or(((a, low), (b, high)), |pair| (pair[0], pair[1]));
    low + (high - low) * (rows - a) as f64 / (b - a) as f64
}

/// The largest relative difference of the curve's shape from `truth` at `rows`.
fn worst(
    curve: &CostCurve,
    truth: impl Fn(usize) -> f64,
    rows: impl Iterator<Item = usize>,
) -> f64 {
    let relative = |rows| curve.seconds(rows) / curve.seconds(1) / (truth(rows) / truth(1));
    rows.map(|rows| (relative(rows) - 1.0).abs())
        .fold(0.0, f64::max)
}

fn assert_monotone(curve: &CostCurve) {
    let seconds: Vec<f64> = (0..3000).map(|rows| curve.seconds(rows)).collect();
    assert!(seconds[1] > 0.0);
    // Rounding may differ between the pieces of the line.
    assert!(
        seconds
            .windows(2)
            .all(|two| two[0] <= two[1] * (1.0 + 1e-12))
    );
}

#[test]
fn a_curve_is_learned_through_noise_while_the_speed_changes_by_a_factor_of_two() {
    for seed in 0..5 {
        let (mut noise, mut curve) = (Noise(seed), CostCurve::default());
        for step in 0..6000 {
            let speed = 1.5 + 0.5 * (step as f64 / 300.0).sin();
            let rows = 1 + noise.below(if step % 3 == 0 { 100 } else { 12 });
            curve.note(rows, 0.02 * speed * avx2(rows) * noise.factor(0.2));
        }
        assert_monotone(&curve);
        let error = worst(&curve, avx2, 1..=12);
        assert!(error < 0.07, "{error} with few rows");
        let error = worst(&curve, avx2, 13..=110);
        assert!(error < 0.15, "{error} with many rows");
    }
}

#[test]
fn a_knot_that_was_not_seen_since_the_machine_slowed_keeps_its_place() {
    for (rounds, bound) in [(10, 0.08), (60, 0.02)] {
        let mut curve = CostCurve::default();
        for step in 0..rounds * 8 {
            curve.note(step % 8 + 1, avx2(step % 8 + 1));
        }
        let before = curve.clone();
        for _ in 0..500 {
            curve.note(1, 2.0);
        }
        assert!((curve.seconds(1) / 2.0 - 1.0).abs() < bound);
        let change = worst(&curve, |rows| before.seconds(rows), 1..=16);
        assert!(change < bound, "{change} after {rounds} rounds");
    }
}

#[test]
fn the_scale_follows_the_machine_within_a_few_steps() {
    let mut curve = CostCurve::default();
    curve.calibrate(&[(1, 1.0), (8, 2.5)]);
    for _ in 0..10 {
        curve.note(1, 2.0);
    }
    assert!((curve.seconds(1) / 2.0 - 1.0).abs() < 0.1);
}

#[test]
fn one_interrupted_step_changes_little() {
    let mut curve = CostCurve::default();
    for step in 0..400 {
        curve.note(step % 8 + 1, 0.02 * avx2(step % 8 + 1));
    }
    let before = curve.clone();
    curve.note(4, 10.0);
    assert!(worst(&curve, |rows| before.seconds(rows), 1..=16) < 0.03);
    for _ in 0..20 {
        curve.note(1, 0.02);
    }
    for rows in 1..=16 {
        let change = curve.seconds(rows) / before.seconds(rows);
        assert!((change - 1.0).abs() < 0.04, "{change} at {rows} rows");
    }
}

/// A file that says that a row costs a thousand steps keeps nobody from trying it.
#[test]
fn what_is_recalled_is_bounded_by_what_was_measured() {
    let mut curve = CostCurve::default();
    curve.calibrate(&[(1, 0.04), (2, 0.05), (8, 0.08)]);
    let measured = curve.seconds(2);
    for cost in [1e5, 1e-3] {
        let mut after = curve.clone();
        let (rows, seen) = (2, 50);
        after.recall(&[LearnedCost { rows, cost, seen }]);
        let ratio = after.seconds(2) / measured;
        assert!((0.2..8.0).contains(&ratio), "{ratio}");
    }
    // Nor do its entries lift each other.
    let far = [16, 24, 40, 64].map(|rows| LearnedCost {
        rows,
        cost: 1e5,
        seen: 50,
    });
    let mut after = curve.clone();
    after.recall(&far);
    assert!(after.seconds(64) <= 8.1 * curve.seconds(64));
}

#[test]
fn a_shape_is_recalled_at_the_machines_speed() {
    let mut before = CostCurve::default();
    for step in 0..2000 {
        before.note(1 + step % 12, 0.02 * avx2(1 + step % 12));
    }
    let learned = before.learned();
    let mut unknown = CostCurve::default();
    unknown.recall(&learned);
    assert!(!unknown.is_known());
    // Measured on a machine that is twice as slow, with an error of a fifth at 4 rows.
    let mut after = CostCurve::default();
    after.calibrate(&[(1, 0.04), (4, 0.04 * 1.2 * avx2(4)), (8, 0.04 * avx2(8))]);
    let wrong = worst(&after, avx2, 1..=12);
    after.recall(&learned);
    assert_monotone(&after);
    let error = worst(&after, avx2, 1..=12);
    assert!(error < 0.6 * wrong, "{error} instead of {wrong}");
    assert!((after.seconds(1) / 0.04 - 1.0).abs() < 0.05);
    // What is seen now counts more.
    for step in 0..3000 {
        after.note(1 + step % 8, 0.02 * (1 + step % 8) as f64);
    }
    assert!(worst(&after, |rows| rows as f64, 1..=8) < 0.1);
}

#[test]
fn the_curve_never_falls_whatever_is_observed() {
    let mut noise = Noise(7);
    for _ in 0..200 {
        let mut curve = CostCurve::default();
        for _ in 0..noise.below(60) {
            let magnitude = noise.below(12);
            let rows = noise.below(1 << magnitude);
            let seconds = [0.0, f64::NAN, -1.0, f64::INFINITY, 1e-9, 1e9];
            let seconds = seconds.get(noise.below(50)).copied();
            curve.note(rows, seconds.unwrap_or_else(|| noise.unit()));
        }
        assert_monotone(&curve);
    }
}

#[test]
fn steps_of_the_curve_are_kept() {
    let tiles = |rows: usize| 1.0 + 0.5 * ((rows - 1) / 8) as f64;
    let (mut noise, mut curve) = (Noise(3), CostCurve::default());
    for _ in 0..8000 {
        let rows = 1 + noise.below(16);
        curve.note(rows, tiles(rows) * noise.factor(0.2));
    }
    let error = worst(&curve, tiles, 1..=16);
    assert!(error < 0.05, "{error}");
}

/// Rows up to an edge cost the same, and beyond the last edge each number of rows has its own cost.
#[test]
fn edges_have_a_knot_each() {
    let edges = vec![1, 2, 4, 8, 12, 16, 24, 32];
    let truth = |rows: usize| match rows {
        ..=16 => 1.0,
        17..=24 => 1.5,
        25..=32 => 1.6,
        33.. => 2.0 + (rows - 33) as f64 / 31.0,
    };
    let mut curve = CostCurve::with_edges(edges);
    curve.calibrate(&[1, 16, 17, 32, 33, 64].map(|rows| (rows, truth(rows))));
    let error = worst(&curve, truth, 1..=64);
    assert!(error < 1e-9, "{error}");
    assert!(!curve.is_settled(20));
    let mut noise = Noise(5);
    for _ in 0..8000 {
        let rows = 1 + noise.below(64);
        curve.note(rows, truth(rows) * noise.factor(0.1));
    }
    let error = worst(&curve, truth, 1..=32);
    assert!(error < 0.07, "{error}");
    assert!(curve.is_settled(20) && curve.seconds(17) == curve.seconds(24));
    assert_monotone(&curve);
}

#[test]
fn what_is_unknown_is_dear_at_first_and_then_lies_on_the_line() {
    let mut curve = CostCurve::default();
    assert!((curve.seconds(6) - 2.0).abs() < 1e-9);
    curve.note(1, 0.1);
    assert!((curve.seconds(6) - 0.2).abs() < 1e-9);
    curve.calibrate(&[(8, 0.25), (1, 0.1), (16, 0.45), (16, 0.35), (0, 1.0)]);
    assert!((curve.seconds(1) - 0.1).abs() < 1e-9);
    assert!((curve.seconds(12) - 0.325).abs() < 1e-9);
    assert!((curve.seconds(24) - 0.55).abs() < 1e-9);
}
