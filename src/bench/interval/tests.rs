use super::*;
use crate::sampling::mix;

/// Numbers of a standard normal distribution, by the seed.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 += 1;
        (mix(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// `count` prompts of unequal length. A prompt is decoded `factor` times as fast with drafts, but for noise of
/// relative size `noise` in each way.
fn pairs(count: usize, factor: f64, noise: f64, normal: &mut Normal) -> Vec<Pair> {
    let work = |tokens: f64, rate: f64, normal: &mut Normal| Work {
        tokens,
        seconds: tokens / rate * (noise * normal.next()).exp(),
    };
    (0..count)
        .map(|number| {
            let tokens = 100.0 + (number % 3) as f64;
            Pair {
                plain: work(tokens, 50.0, normal),
                speculative: work(tokens, 50.0 * factor, normal),
            }
        })
        .collect()
}

#[track_caller]
fn close(a: f64, b: f64, within: f64) {
    assert!((a - b).abs() <= within, "{a} is not {b}");
}

#[test]
fn quantiles_are_those_of_the_tables() {
    for (freedom, wanted) in [
        (1, 12.706),
        (2, 4.303),
        (5, 2.571),
        (10, 2.228),
        (19, 2.093),
    ] {
        close(student_quantile(0.025, freedom), wanted, 0.001);
    }
    close(student_quantile(0.025, 10_000), 1.960, 0.001);
    close(normal_tail(0.0), 0.5, 1e-7);
    close(normal_tail(1.959_964), 0.025, 1e-7);
    close(normal_tail(3.090_232), 0.001, 1e-7);
    // Wider than the plain percentiles, and hardly with many pairs.
    assert!(expanded_tail(0.05, 6) < 0.005);
    close(expanded_tail(0.05, 1_000), 0.025, 0.001);
}

/// Of a ratio of sums of log-normal times, in many experiments of 20 prompts: the interval misses as often as it says.
#[test]
fn an_interval_misses_as_often_as_it_says() {
    let mut normal = Normal(1 << 40);
    let mut misses = |experiments: usize, error: f64| {
        let missed = (0..experiments).filter(|_| {
            let interval = Interval::of(&pairs(20, 1.3, 0.2, &mut normal), error).unwrap();
            !interval.includes(1.3)
        });
        missed.count() as f64 / experiments as f64
    };
    // Within three standard errors of the experiments.
    close(misses(200, 0.05), 0.05, 0.045);
    close(misses(60, 0.5), 0.5, 0.19);
}

/// The width is that of the normal distribution: a ratio of means of n prompts, each with noise s, has the
/// relative error s * sqrt(2 / n).
#[test]
fn a_width_is_that_of_the_noise() {
    let interval = Interval::of(&pairs(400, 1.0, 0.1, &mut Normal(7)), 0.05).unwrap();
    let wanted = 2.0 * 1.96 * 0.1 * (2.0 / 400.0f64).sqrt();
    close((interval.high - interval.low) / wanted, 1.0, 0.15);
}

/// Of 20 modes, each has a part of the error, so that more pairs must agree.
#[test]
fn many_modes_need_more_pairs() {
    for (modes, wanted) in [(1.0, 6), (2.0, 7), (8.0, 9), (20.0, 10)] {
        let error = ERROR / modes;
        assert_eq!(min_pairs(error), wanted, "{modes} modes");
        assert!(0.5f64.powi(wanted as i32 - 1) <= error);
        let measured = pairs(wanted, 2.0, 0.1, &mut Normal(5));
        assert!(Interval::of(&measured, error).is_some());
        assert!(Interval::of(&measured[1..], error).is_none());
    }
}

/// An interval does not end at the extreme of its resamples: more are made, or it is undecided.
#[test]
fn the_ends_of_an_interval_are_within_its_resamples() {
    for (modes, resampled) in [(1.0, true), (8.0, true), (20.0, true), (100.0, false)] {
        let error = ERROR / modes;
        let count = min_pairs(error);
        let tail = expanded_tail(error, count);
        let number = resamples(tail, count);
        assert_eq!(number.is_some(), resampled, "{modes} modes, {count} pairs");
        if let Some(number) = number {
            assert!(number >= RESAMPLES && number * count <= MAX_DRAWS);
            let beyond = tail * (number - 1) as f64;
            assert!(beyond > 1.9, "{modes} modes: {beyond} of {number}");
        } else {
            let measured = pairs(count, 2.0, 0.1, &mut Normal(5));
            assert!(Interval::of(&measured, error).is_none());
            assert!(Interval::of(&pairs(2 * count, 2.0, 0.1, &mut Normal(5)), error).is_some());
        }
    }
    // Many pairs have long resamples, of which there are at least some.
    assert_eq!(resamples(0.025, 100_000), Some(MIN_RESAMPLES));
    assert_eq!(resamples(1e-4, 100_000), None);
}

#[test]
fn the_same_measurements_have_the_same_interval() {
    let measured = pairs(20, 1.1, 0.1, &mut Normal(3));
    assert_eq!(Interval::of(&measured, 0.05), Interval::of(&measured, 0.05));
    // What does not vary has no width.
    let exact = Interval::of(&pairs(6, 1.5, 0.0, &mut Normal(3)), 0.05).unwrap();
    close(exact.low, 1.5, 1e-9);
    close(exact.high, 1.5, 1e-9);
}

/// A machine on which runs differ by half, as a busy one's do: of 100 runs of 20 prompts without any difference, few
/// are decided. A difference of two is decided in the same noise.
#[test]
fn noise_is_undecided_and_a_clear_difference_is_not() {
    let mut normal = Normal(1 << 20);
    let verdict = |count, factor, normal: &mut Normal| {
        let measured = pairs(count, factor, 0.4, normal);
        Verdict::of(Interval::of(&measured, ERROR), true)
    };
    let decided = (0..100).filter(|_| verdict(20, 1.0, &mut normal) != Verdict::Undecided);
    let decided = decided.count();
    assert!(decided <= 12, "{decided} of 100");
    for (factor, wanted) in [(2.0, Verdict::Helps), (0.5, Verdict::Costs)] {
        let right = (0..20).filter(|_| verdict(20, factor, &mut normal) == wanted);
        let right = right.count();
        assert!(right >= 19, "{right} of 20 are {wanted:?}");
    }
    // However clear they are, five prompts decide nothing.
    assert_eq!(verdict(5, 3.0, &mut normal), Verdict::Undecided);
}

#[test]
fn what_accepts_nothing_never_helps() {
    let interval = |low, high| Some(Interval { low, high });
    for (interval, accepts, wanted) in [
        (interval(1.04, 1.2), true, Verdict::Helps),
        (interval(1.04, 1.2), false, Verdict::NothingAccepted),
        (interval(0.8, 0.9), false, Verdict::Costs),
        (interval(0.8, 0.9), true, Verdict::Costs),
        (interval(0.98, 1.02), true, Verdict::Neither),
        (interval(0.9, 1.02), true, Verdict::Undecided),
        (None, true, Verdict::Undecided),
        (None, false, Verdict::NothingAccepted),
    ] {
        assert_eq!(
            Verdict::of(interval, accepts),
            wanted,
            "{interval:?}, {accepts}"
        );
    }
}

#[test]
fn what_was_not_measured_has_no_interval() {
    let mut measured = pairs(6, 1.0, 0.1, &mut Normal(9));
    assert!(Interval::of(&measured[..5], 0.05).is_none());
    measured[0].plain.seconds = f64::NAN;
    assert!(Interval::of(&measured, 0.05).is_none());
    assert_eq!(Interval::range([]), None);
    assert_eq!(Interval::range([1.0, f64::NAN]), None);
    let (low, high) = (1.0, 3.0);
    assert_eq!(
        Interval::range([2.0, 1.0, 3.0]),
        Some(Interval { low, high })
    );
}
