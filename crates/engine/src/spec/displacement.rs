//! What a head's forwards cost the target's: they put some of its weights out of a cache that nearly holds them.
//!
//! A forward reads all weights, in the same order each time. If the cache is a little too small for them, those that it
//! evicts are those that the next forward needs first, and reading them evicts the next ones. So a few megabytes of other
//! weights make all forwards slower until the cache has settled, which takes more of them than a draft lasts: a step without
//! drafts, in a text that a head reads, says nothing of a text that it does not read.
//!
//! It is measured before the first request. But the cache is shared with what else runs on the machine, and drafts read more
//! than the head's weights: so steps without drafts soon after its forwards are compared with those long after, too.

use foretoken_core::error::Result;
use serde::{Deserialize, Serialize};

/// Turns with and without the head's forwards, and the target's forwards in each, of which the first ones are not counted:
/// the cache changes. About so many of the last ones count.
const TURNS: u32 = 12;
const RECENT: u32 = 8;
const FORWARDS: usize = 8;
const SETTLING: usize = 3;
/// Turns that say anything at all.
const MIN_TURNS: u32 = 4;
/// After these seconds of forwards there is no further turn.
const MAX_SECONDS: f64 = 1.0;
/// The weights of a target whose forwards take less are in a cache of the core's own.
const MIN_FORWARD_SECONDS: f64 = 0.0005;
/// One turn says at most that a forward takes so many times as long, or that part of it: else something else ran.
const MAX_RATIO: f64 = 1.5;
/// Turns that what is known is worth at most: what else runs on the machine changes.
const MAX_SEEN: u32 = 8 * TURNS;
/// Steps of each kind that make a turn, and steps of one kind that count: few are without drafts beside the head.
const STEPS: u32 = 8;
const RECENT_STEPS: u32 = 8 * STEPS;
/// Steps after a forward of the head that are slowed as much as those beside it, and after which none is.
const BESIDE: u32 = 4;
const SETTLED: u32 = 16;

/// How much longer the target's forwards take while a head reads, as a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Displacement {
    /// The mean of the logarithms of the turns' ratios, of which noise makes as many too small as too large.
    mean: f64,
    /// The variance of these logarithms. It is not kept: it is that of what else runs.
    #[serde(skip)]
    variance: f64,
    /// The turns.
    seen: u32,
    /// The turn that steps make: long after a forward of the head, and beside it.
    #[serde(skip)]
    turn: [StepTimes; 2],
    /// Steps since the head's last forward.
    #[serde(skip)]
    since_head: u32,
}

/// Steps of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct StepTimes {
    /// The mean of the logarithms of their times.
    mean: f64,
    /// Those that count in the mean.
    steps: u32,
}

impl StepTimes {
    fn note(&mut self, seconds: f64) {
        self.steps = RECENT_STEPS.min(self.steps + 1);
        self.mean += (seconds.ln() - self.mean) / f64::from(self.steps);
    }
}

impl Displacement {
    /// Measures forwards of one row in turns with and without a forward of the head before each. Both functions run one and
    /// return its seconds. A target whose forwards are too short or too long has no displacement.
    ///
    /// # Errors
    /// The first error of a forward.
    pub fn measure(
        mut target: impl FnMut() -> Result<f64>,
        mut head: impl FnMut() -> Result<f64>,
    ) -> Result<Self> {
        let mut found = Self::default();
        // The first ones allocate, which does not take a second.
        if target()? > MAX_SECONDS {
            return Ok(found);
        }
        let (mut spent, one) = (0.0, target()?);
        let of_a_turn = (2 * FORWARDS) as f64 * one;
        if one < MIN_FORWARD_SECONDS || f64::from(MIN_TURNS) * of_a_turn > MAX_SECONDS {
            return Ok(found);
        }
        head()?;
        for turn in 0..TURNS {
            if spent > MAX_SECONDS {
                break;
            }
            let mut medians = [0.0; 2];
            // What becomes slower meanwhile must not seem to be the head's.
            let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
            for with_head in order {
                let mut seconds = Vec::with_capacity(FORWARDS);
                for _ in 0..FORWARDS {
                    if with_head == 1 {
                        spent += head()?;
                    }
                    seconds.push(target()?);
                }
                spent += seconds.iter().sum::<f64>();
                let counted = &mut seconds[SETTLING..];
                counted.sort_by(f64::total_cmp);
                medians[with_head] = counted[counted.len() / 2];
            }
            found.note(medians[1] / medians[0]);
        }
        if found.seen < MIN_TURNS {
            found = Self::default();
        }
        Ok(found)
    }

    fn note(&mut self, ratio: f64) {
        if ratio.is_finite() {
            let log = ratio.clamp(1.0 / MAX_RATIO, MAX_RATIO).ln();
            self.seen = MAX_SEEN.min(self.seen + 1);
            let (off, share) = (log - self.mean, 1.0 / self.counted());
            self.mean += share * off;
            self.variance += share * (off * (log - self.mean) - self.variance);
        }
    }

    /// The number of turns that count.
    fn counted(&self) -> f64 {
        f64::from(self.seen.clamp(1, RECENT))
    }

    /// Learns from a step, which the head has run a forward for or not. `ratio` is how many times as long it took as such a
    /// step should, if it had no drafts. Where nothing was measured, nothing is learned.
    pub fn note_step(&mut self, head_ran: bool, ratio: Option<f64>) {
        self.since_head = match head_ran {
            true => 0,
            false => self.since_head.saturating_add(1),
        };
        let may_be = |ratio: &f64| ratio.is_normal() && *ratio > 0.0;
        let Some(ratio) = ratio.filter(|ratio| self.is_known() && may_be(ratio)) else {
            return;
        };
        match self.since_head {
            0..=BESIDE => self.turn[1].note(ratio),
            SETTLED.. => self.turn[0].note(ratio),
            _ => (),
        }
        if self.turn.iter().all(|kind| kind.steps >= STEPS) {
            let [without, with] = std::mem::take(&mut self.turn);
            self.note((with.mean - without.mean).exp());
        }
    }

    /// Whether it was measured.
    pub fn is_known(&self) -> bool {
        self.seen > 0
    }

    /// A displacement that is known.
    #[cfg(test)]
    pub fn of(share: f64) -> Self {
        Self {
            mean: share.ln_1p(),
            seen: TURNS,
            ..Self::default()
        }
    }

    /// The time that is surely added to a forward, as a share of it: less by the standard error. If too much were believed,
    /// the head would hardly read any more, and nobody would find out.
    pub fn share(&self) -> f64 {
        let error = (self.variance / self.counted()).sqrt();
        (self.mean - error).exp_m1().max(0.0)
    }

    /// Adds what was learned at another time, beside what was measured.
    pub fn recall(&mut self, learned: &Self) {
        let seen = self.seen + learned.seen;
        if seen > 0 {
            let share = f64::from(learned.seen) / f64::from(seen);
            self.mean += (learned.mean - self.mean) * share;
            self.seen = seen.min(MAX_SEEN);
        }
    }

    /// Whether it can have been measured.
    pub fn is_valid(&self) -> bool {
        // A little more than the largest logarithm of a turn.
        self.mean.abs() < MAX_RATIO - 1.0 && self.seen <= MAX_SEEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::cost::tests::Noise;
    use std::cell::RefCell;
    use std::collections::VecDeque;

    /// A cache of so many megabytes that evicts what was not used for longest. A megabyte takes 1 from it, and 4 from memory.
    struct Cache {
        lines: VecDeque<usize>,
        size: usize,
        second: f64,
        noise: Noise,
    }

    impl Cache {
        /// Reads what is at these places; returns the seconds.
        fn read(&mut self, places: std::ops::Range<usize>) -> f64 {
            let each = places.map(|place| {
                let at = self.lines.iter().position(|&line| line == place);
                let _ = at.map(|at| self.lines.remove(at));
                self.lines.push_back(place);
                if self.lines.len() > self.size {
                    self.lines.pop_front();
                }
                if at.is_some() { 1.0 } else { 4.0 }
            });
            let sum: f64 = each.sum();
            sum * self.second * self.noise.factor(0.05)
        }
    }

    /// What is found with a cache of `size` for 90 of the target and 6 of a head.
    fn measured(size: usize, second: f64) -> (Displacement, f64) {
        let cache = RefCell::new(Cache {
            lines: VecDeque::new(),
            size,
            second,
            noise: Noise(3),
        });
        let spent = RefCell::new(0.0);
        let read = |places| {
            let seconds = cache.borrow_mut().read(places);
            *spent.borrow_mut() += seconds;
            Ok(seconds)
        };
        let found = Displacement::measure(|| read(0..90), || read(90..96)).unwrap();
        (found, spent.into_inner())
    }

    #[test]
    fn a_head_makes_forwards_slower_where_a_cache_nearly_holds_the_target() {
        for (size, share) in [(200, 0.0), (96, 0.0), (92, 3.0), (40, 0.0)] {
            let (found, spent) = measured(size, 2e-5);
            let expected = f64::min(share, MAX_RATIO - 1.0);
            let off = (found.share() - expected).abs();
            assert!(off < 0.05, "{size}: {found:?}");
            assert!(spent < 1.2 * MAX_SECONDS, "{spent}");
        }
    }

    #[test]
    fn forwards_that_are_too_short_or_too_long_are_not_measured() {
        for second in [1e-6, 1e-3] {
            let (found, spent) = measured(92, second);
            assert_eq!(found, Displacement::default());
            assert!(spent < 1.0, "{spent}");
        }
    }

    /// Whatever else runs makes one side of a turn as slow as the other.
    #[test]
    fn what_else_runs_is_not_the_heads() {
        let mut found = Displacement::default();
        for ratio in [1.5, 1.0 / 1.5, 1.2, 1.0 / 1.2, 9.0, 0.1] {
            found.note(ratio);
        }
        assert!(found.share() < 1e-9, "{found:?}");
    }

    /// The last turns count.
    #[test]
    fn steps_beside_the_head_are_compared_with_others() {
        let mut found = Displacement::of(0.0);
        let noise = &mut Noise(7);
        for (displaced, off) in [(0.13, 0.04), (0.0, 0.03)] {
            let mut since_head = 0;
            for step in 0..4000 {
                let head_ran = step % 50 > 40;
                since_head = if head_ran { 0 } else { since_head + 1 };
                let slow = if since_head < 8 { displaced } else { 0.0 };
                let ratio = 0.004 * (1.0 + slow) * noise.factor(0.1);
                // Not each step is without drafts.
                found.note_step(head_ran, (step % 3 > 0).then_some(ratio));
            }
            assert!((found.share() - displaced).abs() < off, "{found:?}");
            assert!(found.is_valid());
        }
        let mut unknown = Displacement::default();
        for step in 0..200 {
            unknown.note_step(step % 100 < 50, Some(1.0 + f64::from(step % 3)));
        }
        assert!(!unknown.is_known() && unknown.share() == 0.0, "{unknown:?}");
    }

    #[test]
    fn starts_are_averaged() {
        let mut known = Displacement::of(-0.02);
        assert_eq!(known.share(), 0.0);
        known.recall(&Displacement::default());
        assert_eq!(known, Displacement::of(-0.02));
        for _ in 0..40 {
            known.recall(&Displacement::of(0.1));
            assert!(known.is_valid());
        }
        assert!((0.09..=0.1).contains(&known.share()), "{known:?}");
        let wrong = Displacement {
            mean: f64::NAN,
            ..known
        };
        assert!(!wrong.is_valid());
        let mut new = Displacement::default();
        new.recall(&known);
        assert_eq!(new, known);
    }
}
