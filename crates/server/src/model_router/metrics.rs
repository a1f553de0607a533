//! The metrics of a router.

use super::policy::StopReason;
use foretoken_core::error::{Error, Result};
use prometheus::{IntCounterVec, IntGauge, Opts, Registry};

/// Counts processes, and requests that wait for one.
pub(super) struct FleetMetrics {
    processes: IntGauge,
    waiting: IntGauge,
    starts: IntCounterVec,
    stops: IntCounterVec,
    failures: IntCounterVec,
}

impl FleetMetrics {
    /// Adds the metrics to `registry`.
    ///
    /// # Errors
    /// It has them already.
    pub fn new(registry: &Registry) -> Result<Self> {
        Self::register(registry).map_err(|e| Error::internal(format!("metrics: {e}")))
    }

    fn register(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(name, help), labels)
        };
        let metrics = Self {
            processes: IntGauge::new(
                "foretoken:router_processes",
                "Processes of models, loading and ending ones included",
            )?,
            waiting: IntGauge::new(
                "foretoken:router_requests_waiting",
                "Requests that wait for the process of their model",
            )?,
            starts: counters(
                "foretoken:router_starts_total",
                "Processes started, by model",
                &["model"],
            )?,
            stops: counters(
                "foretoken:router_stops_total",
                "Processes asked to end, by model and reason: idle, evicted for another model, or unloaded",
                &["model", "reason"],
            )?,
            failures: counters(
                "foretoken:router_failures_total",
                "Processes that ended by themselves, by model",
                &["model"],
            )?,
        };
        registry.register(Box::new(metrics.processes.clone()))?;
        registry.register(Box::new(metrics.waiting.clone()))?;
        registry.register(Box::new(metrics.starts.clone()))?;
        registry.register(Box::new(metrics.stops.clone()))?;
        registry.register(Box::new(metrics.failures.clone()))?;
        Ok(metrics)
    }

    /// Sets the numbers of processes and of requests that wait.
    pub fn set(&self, processes: usize, waiting: usize) {
        self.processes.set(processes as i64);
        self.waiting.set(waiting as i64);
    }

    /// Counts a start.
    pub fn started(&self, model: &str) {
        self.starts.with_label_values(&[model]).inc();
    }

    /// Counts a process that is asked to end.
    pub fn stopped(&self, model: &str, reason: StopReason) {
        let reason = match reason {
            StopReason::Idle => "idle",
            StopReason::Evicted => "evicted",
            StopReason::Unloaded => "unloaded",
        };
        self.stops.with_label_values(&[model, reason]).inc();
    }

    /// Counts a process that ended by itself.
    pub fn failed(&self, model: &str) {
        self.failures.with_label_values(&[model]).inc();
    }
}
