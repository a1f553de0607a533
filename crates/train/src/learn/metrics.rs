//! Metrics of the learner's work.

use foretoken_core::error::{Error, Result};
use prometheus::{Counter, Gauge, IntCounter, IntGauge, Registry};

/// The learner's metrics, with the server's prefix.
#[derive(Clone)]
pub struct LearnMetrics {
    pub examples: IntCounter,
    pub dropped: IntCounter,
    pub steps: IntCounter,
    pub seconds: Counter,
    pub switches: IntCounter,
    pub switches_back: IntCounter,
    /// Expected accepted tokens of a draft, on recent examples that are held out.
    pub used: Gauge,
    pub candidate: Gauge,
    pub ended: IntGauge,
}

impl LearnMetrics {
    /// Metrics that start at zero, in no registry.
    ///
    /// # Errors
    /// Never: their names are constants.
    pub fn new() -> Result<Self> {
        let wrong = |e: prometheus::Error| Error::internal(format!("metrics: {e}"));
        let name = |name: &str| format!("foretoken:learn_{name}");
        let counter = |of: &str, help: &str| IntCounter::new(name(of), help).map_err(wrong);
        let gauge = |of: &str, help: &str| Gauge::new(name(of), help).map_err(wrong);
        Ok(Self {
            examples: counter(
                "examples_total",
                "Parts of texts that the head can learn from",
            )?,
            dropped: counter(
                "dropped_examples_total",
                "Parts of texts for which the learner had no room",
            )?,
            steps: counter("steps_total", "Steps of training")?,
            seconds: Counter::new(name("seconds_total"), "Time that the learner computed")
                .map_err(wrong)?,
            switches: counter("switches_total", "Better heads that came into use")?,
            switches_back: counter(
                "switches_back_total",
                "Heads that proved worse, so that the one before came back",
            )?,
            used: gauge(
                "used_accepted_tokens",
                "Expected accepted tokens of a draft of the head in use, on held-out texts",
            )?,
            candidate: gauge(
                "candidate_accepted_tokens",
                "The same of the head in training",
            )?,
            ended: IntGauge::new(
                name("ended"),
                "1 = learning has failed: the head in use stays until the server starts again",
            )
            .map_err(wrong)?,
        })
    }

    /// Publishes them in `registry`.
    ///
    /// # Errors
    /// If it has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<()> {
        let all: [Box<dyn prometheus::core::Collector>; 9] = [
            Box::new(self.examples.clone()),
            Box::new(self.dropped.clone()),
            Box::new(self.steps.clone()),
            Box::new(self.seconds.clone()),
            Box::new(self.switches.clone()),
            Box::new(self.switches_back.clone()),
            Box::new(self.used.clone()),
            Box::new(self.candidate.clone()),
            Box::new(self.ended.clone()),
        ];
        all.into_iter().try_for_each(|metric| {
            let registered = registry.register(metric);
            registered.map_err(|e| Error::internal(format!("metrics: {e}")))
        })
    }
}
