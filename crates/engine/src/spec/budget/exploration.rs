//! Time for drafts that are not expected to pay: without them nobody would know what they are worth.

/// The share of the time for drafts that would pay if they were as good as what is known of them allows.
const HOPEFUL: f64 = 0.0075;
/// The share of it for others: what is known may have changed.
const HOPELESS: f64 = 0.0025;
/// Steps whose time may be spent on hopeful drafts from the first one on: without luck, the first few drafts of a good
/// drafter fail.
const FIRST_STEPS: f64 = 8.0;
/// The time of so many steps is saved for drafts of either kind at most, so that what was saved long ago is not spent at once.
const MAX_STEPS: f64 = 16.0;

/// Seconds that are saved for such drafts, a share of each step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Exploration {
    hopeful: f64,
    hopeless: f64,
    /// Whether anything was saved.
    has_begun: bool,
}

impl Exploration {
    /// Saves for a step that took so many seconds.
    pub fn save(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds > 0.0 {
            if !std::mem::replace(&mut self.has_begun, true) {
                self.hopeful = FIRST_STEPS * seconds;
            }
            let saved = [(&mut self.hopeful, HOPEFUL), (&mut self.hopeless, HOPELESS)];
            for (saved, share) in saved {
                let most = saved.max(MAX_STEPS * seconds);
                *saved = (*saved + share * seconds).min(most);
            }
        }
    }

    /// Seconds that a draft for which there is hope may take at most.
    pub fn most(&self) -> f64 {
        self.hopeful
    }

    /// Takes so many seconds; returns false, and takes none, if they are not saved.
    pub fn take(&mut self, seconds: f64, is_hopeful: bool) -> bool {
        let saved = if is_hopeful {
            &mut self.hopeful
        } else {
            &mut self.hopeless
        };
        let is_saved = *saved >= seconds;
        if is_saved {
            *saved -= seconds;
        }
        is_saved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_spent_than_a_share_of_the_time() {
        let (mut exploration, mut spent) = (Exploration::default(), [0.0; 2]);
        assert!(!exploration.take(0.1, true));
        for step in 0..10_000 {
            exploration.save(1.0);
            for (spent, is_hopeful) in spent.iter_mut().zip([true, false]) {
                if step % 7 == 0 && exploration.take(0.4, is_hopeful) {
                    *spent += 0.4;
                }
            }
        }
        assert!((82.0..83.1).contains(&spent[0]), "{spent:?}");
        assert!((24.0..25.1).contains(&spent[1]), "{spent:?}");
    }

    #[test]
    fn little_is_kept_for_later() {
        let mut exploration = Exploration::default();
        (0..100_000).for_each(|_| exploration.save(1.0));
        assert_eq!(exploration.most(), MAX_STEPS);
        // Steps became shorter: nothing is taken away.
        exploration.save(0.1);
        assert_eq!(exploration.most(), MAX_STEPS);
        for wrong in [f64::NAN, f64::INFINITY, -1.0] {
            exploration.save(wrong);
            assert_eq!(exploration.most(), MAX_STEPS);
        }
    }
}
