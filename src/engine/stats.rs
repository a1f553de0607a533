//! Server-wide counters under vLLM's names, with the prefix `foretoken:`.

use crate::sampling::NoToken;
use crate::spec::{DraftCost, Source};
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};
use std::time::Instant;

/// Counters, gauges and histograms of one engine. The engine thread updates them cheaply;
/// [`Stats::registry`] renders them.
#[derive(Debug)]
pub struct Stats {
    pub registry: Registry,
    pub requests_running: IntGauge,
    pub requests_waiting: IntGauge,
    /// Fraction of the target's pool that running requests hold, 0 to 1. What is only cached is free.
    pub kv_cache_usage: Gauge,
    /// Fraction of the draft's pool in use, 0 to 1.
    pub draft_kv_cache_usage: Gauge,
    pub prompt_tokens: IntCounter,
    /// Prompt tokens that were looked up in the target's prefix cache.
    pub prefix_cache_queries: IntCounter,
    /// Those of them that were there.
    pub prefix_cache_hits: IntCounter,
    pub generation_tokens: IntCounter,
    pub preemptions: IntCounter,
    /// By `finished_reason`: `stop`, `length`, `abort` (the client disconnected, or the server shut
    /// down), `error`. Counted when the [`Events`](super::Events) of a request are dropped.
    pub requests_finished: IntCounterVec,
    /// Requests that failed because the model's logits were not finite.
    pub nonfinite_logits: IntCounter,
    /// Time from arrival to first token, seconds.
    pub time_to_first_token: Histogram,
    /// Time between two tokens of a request, seconds: a round's time divided by its number of
    /// tokens.
    pub inter_token_latency: Histogram,
    /// Time from arrival to last token, seconds.
    pub e2e_request_latency: Histogram,
    pub spec_drafts: IntCounter,
    pub spec_draft_tokens: IntCounter,
    pub spec_accepted_tokens: IntCounter,
    /// By `position` in the draft, from 0.
    pub spec_accepted_per_pos: IntCounterVec,
    /// By `source`: see [`Source`].
    pub spec_draft_by_source: IntCounterVec,
    pub spec_accepted_by_source: IntCounterVec,
    /// Proposed draft tokens that the budget did not verify.
    pub spec_refused_tokens: IntCounter,
    /// Current estimate of tokens per second over those of plain decoding.
    pub spec_speed_up: Gauge,
    /// Wall time of [`Stats::draft_steps`], seconds.
    pub draft_seconds: prometheus::Counter,
    /// Draft model forwards that drafted one token for every sequence and contained no prompt rows.
    pub draft_steps: IntCounter,
    /// Wall time of [`Stats::target_steps`], seconds.
    pub target_seconds: prometheus::Counter,
    /// Target forwards that decoded or verified and contained no prompt rows.
    pub target_steps: IntCounter,
}

const LATENCY_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
];

impl Stats {
    /// Metrics that all start at zero; every sample carries the label `model_name`.
    pub fn new(model_name: &str) -> Self {
        let labels = [("model_name".to_owned(), model_name.to_owned())].into();
        let registry =
            Registry::new_custom(None, Some(labels)).expect("no prefix and one label are valid");
        let make = Maker(&registry);
        Self {
            requests_running: make.int_gauge("num_requests_running", "Requests in the batch"),
            requests_waiting: make.int_gauge("num_requests_waiting", "Requests in the queue"),
            kv_cache_usage: make.gauge(
                "kv_cache_usage_perc",
                "Used fraction of the target's KV pool, 1 = full",
            ),
            draft_kv_cache_usage: make.gauge(
                "draft_kv_cache_usage_perc",
                "Used fraction of the draft's KV pool, 1 = full",
            ),
            prompt_tokens: make.counter("prompt_tokens_total", "Prompt tokens admitted"),
            prefix_cache_queries: make.counter(
                "prefix_cache_queries_total",
                "Prompt tokens looked up in the target's prefix cache",
            ),
            prefix_cache_hits: make.counter(
                "prefix_cache_hits_total",
                "Prompt tokens found in the target's prefix cache",
            ),
            generation_tokens: make.counter("generation_tokens_total", "Tokens generated"),
            preemptions: make.counter("num_preemptions_total", "Requests preempted"),
            requests_finished: make.counters(
                "request_success_total",
                "Requests ended, by reason",
                "finished_reason",
            ),
            nonfinite_logits: make.counter(
                "nonfinite_logits_total",
                "Requests that failed because the model's logits were not finite",
            ),
            time_to_first_token: make
                .histogram("time_to_first_token_seconds", "Arrival to first token"),
            inter_token_latency: make
                .histogram("inter_token_latency_seconds", "Time between two tokens"),
            e2e_request_latency: make
                .histogram("e2e_request_latency_seconds", "Arrival to last token"),
            spec_drafts: make.counter(
                "spec_decode_num_drafts_total",
                "Rounds with a draft, counted per request",
            ),
            spec_draft_tokens: make.counter(
                "spec_decode_num_draft_tokens_total",
                "Draft tokens proposed",
            ),
            spec_accepted_tokens: make.counter(
                "spec_decode_num_accepted_tokens_total",
                "Draft tokens accepted",
            ),
            spec_accepted_per_pos: make.counters(
                "spec_decode_num_accepted_tokens_per_pos_total",
                "Draft tokens accepted, by place in the draft",
                "position",
            ),
            spec_draft_by_source: make.counters(
                "spec_decode_num_draft_tokens_by_source_total",
                "Draft tokens proposed, by where they come from",
                "source",
            ),
            spec_accepted_by_source: make.counters(
                "spec_decode_num_accepted_tokens_by_source_total",
                "Draft tokens accepted, by where they come from",
                "source",
            ),
            spec_refused_tokens: make.counter(
                "spec_decode_num_refused_tokens_total",
                "Draft tokens that the budget did not verify",
            ),
            spec_speed_up: make.gauge(
                "spec_decode_speed_up",
                "Current estimate of tokens per second over those of plain decoding",
            ),
            draft_seconds: make.seconds("draft_seconds_total", "Wall time of draft_steps"),
            draft_steps: make.counter("draft_steps_total", "Draft model forwards, without prompts"),
            target_seconds: make.seconds("target_seconds_total", "Wall time of target_steps"),
            target_steps: make.counter(
                "target_steps_total",
                "Target forwards that decoded or verified, without prompts",
            ),
            registry,
        }
    }
}

impl Stats {
    /// Records a round with draft tokens from `sources`, of which those of `path` were accepted.
    pub(super) fn note_round(&self, sources: &[Source], path: &[usize]) {
        if sources.is_empty() {
            return;
        }
        self.spec_drafts.inc();
        self.spec_draft_tokens.inc_by(sources.len() as u64);
        self.spec_accepted_tokens.inc_by(path.len() as u64);
        for source in sources {
            let counter = &self.spec_draft_by_source;
            counter.with_label_values(&[label(*source)]).inc();
        }
        for position in 0..path.len() {
            self.spec_accepted_per_pos
                .with_label_values(&[&position.to_string()])
                .inc();
        }
        for source in path.iter().filter_map(|&node| sources.get(node)) {
            let counter = &self.spec_accepted_by_source;
            counter.with_label_values(&[label(*source)]).inc();
        }
    }

    /// Records `new` tokens of a request at time `now`; `last` is the time of the tokens before
    /// them. The first token is timed from the request's arrival.
    pub(super) fn note_tokens(
        &self,
        arrived: Instant,
        last: Option<Instant>,
        now: Instant,
        new: usize,
    ) {
        self.generation_tokens.inc_by(new as u64);
        match last {
            None if new > 0 => self
                .time_to_first_token
                .observe((now - arrived).as_secs_f64()),
            None => {}
            Some(last) => {
                let each = (now - last).as_secs_f64() / new.max(1) as f64;
                (0..new).for_each(|_| self.inter_token_latency.observe(each));
            }
        }
    }

    /// Records that no next token could be chosen for a request.
    pub(super) fn note_no_token(&self, reason: NoToken) {
        if reason == NoToken::NotFinite {
            self.nonfinite_logits.inc();
        }
    }

    /// Sets the number of refused draft tokens to `total`.
    pub(super) fn note_refused(&self, total: u64) {
        let counter = &self.spec_refused_tokens;
        counter.inc_by(total.saturating_sub(counter.get()));
    }

    /// Sets the drafter's counters to `total`.
    pub(super) fn note_draft_cost(&self, total: DraftCost) {
        let steps = total.steps - self.draft_steps.get();
        if steps > 0 {
            self.draft_steps.inc_by(steps);
            self.draft_seconds
                .inc_by((total.step_seconds - self.draft_seconds.get()).max(0.0));
        }
    }
}

fn label(source: Source) -> &'static str {
    match source {
        Source::Grammar => "grammar",
        Source::Model => "model",
        Source::Own => "own",
        Source::Prediction => "prediction",
        Source::Pool => "pool",
        Source::Recycled => "recycled",
    }
}

/// Creates and registers metrics with the prefix `foretoken:`.
struct Maker<'a>(&'a Registry);

impl Maker<'_> {
    fn register<M: prometheus::core::Collector + Clone + 'static>(
        &self,
        metric: prometheus::Result<M>,
    ) -> M {
        let metric = metric.expect("names are constants and valid");
        self.0
            .register(Box::new(metric.clone()))
            .expect("names are distinct");
        metric
    }

    fn int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::new(format!("foretoken:{name}"), help))
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::new(format!("foretoken:{name}"), help))
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::new(format!("foretoken:{name}"), help))
    }

    fn seconds(&self, name: &str, help: &str) -> prometheus::Counter {
        self.register(prometheus::Counter::new(format!("foretoken:{name}"), help))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.register(IntCounterVec::new(
            Opts::new(format!("foretoken:{name}"), help),
            &[label],
        ))
    }

    fn histogram(&self, name: &str, help: &str) -> Histogram {
        self.register(Histogram::with_opts(
            HistogramOpts::new(format!("foretoken:{name}"), help).buckets(LATENCY_BUCKETS.to_vec()),
        ))
    }
}
