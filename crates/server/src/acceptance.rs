//! The acceptance rule that a request names, with its parameters.

use super::numbers::within;
use super::wire::{AcceptanceName, Common, wrong};
use foretoken_core::error::Result;
use foretoken_core::sampling::{Acceptance, LossyRule};

/// Medusa's own (Cai et al. 2024, section 2.3.1, and its code).
const POSTERIOR_THRESHOLD: f64 = 0.09;
const POSTERIOR_ALPHA: f64 = 0.3;
/// No token comes with more than twice its probability.
const LENIENCE: f64 = 0.5;

impl Common {
    /// The rule that replaces the server's, and the lossy one that relaxes it.
    ///
    /// # Errors
    /// `Invalid`, naming the field: also for a parameter of another rule.
    pub fn acceptance_rule(&self) -> Result<(Option<Acceptance>, Option<LossyRule>)> {
        use AcceptanceName::{Coupled, Lenient, Rejection, Typical};
        let of_typical = [
            ("posterior_threshold", self.posterior_threshold),
            ("posterior_alpha", self.posterior_alpha),
        ];
        for (field, value) in of_typical {
            if value.is_some() && self.acceptance != Some(Typical) {
                return wrong(field, "requires acceptance to be \"typical\"");
            }
            within(field, value, 0.0..=1.0)?;
        }
        match self.lenience {
            Some(_) if self.acceptance != Some(Lenient) => {
                return wrong("lenience", "requires acceptance to be \"lenient\"");
            }
            Some(x) if !(x > 0.0 && x <= 1.0) => {
                let what = format!("must be greater than 0 and at most 1, not {x}");
                return wrong("lenience", what);
            }
            _ => {}
        }
        let or = |value: Option<f64>, default| value.unwrap_or(default) as f32;
        Ok(match self.acceptance {
            None => (None, None),
            Some(Coupled) => (Some(Acceptance::Coupled), None),
            Some(Rejection) => (Some(Acceptance::Rejection), None),
            Some(Typical) => {
                let rule = LossyRule::Typical {
                    threshold: or(self.posterior_threshold, POSTERIOR_THRESHOLD),
                    alpha: or(self.posterior_alpha, POSTERIOR_ALPHA),
                };
                (None, Some(rule))
            }
            Some(Lenient) => {
                // A number too small for f32 is not 0, which accepts everything.
                let lenience = or(self.lenience, LENIENCE).max(f32::MIN_POSITIVE);
                (None, Some(LossyRule::Lenient { lenience }))
            }
        })
    }
}
