//! Server-wide counters under vLLM's names, with the prefix `foretoken:`.

use super::adapter_stats::AdapterStats;
use crate::spec::{DraftCost, Source};
use foretoken_core::sampling::{LossyRule, NoToken};
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};
use std::sync::OnceLock;
use std::time::Instant;

#[cfg(target_os = "linux")]
use prometheus::process_collector::ProcessCollector;

/// Declares a struct of metrics with the value of each field, which `$make`, a [`MetricFactory`], makes.
macro_rules! metrics {
    ($(#[$about:meta])* $name:ident by $make:ident {
        $($(#[$doc:meta])* $vis:vis $field:ident: $type:ty = $value:expr,)*
    }) => {
        $(#[$about])*
        #[derive(Debug)]
        pub struct $name {
            $($(#[$doc])* $vis $field: $type,)*
        }

        impl $name {
            fn made_by($make: &MetricFactory<'_>) -> Self {
                Self { $($field: $value,)* }
            }
        }
    };
}

metrics! {
    /// Counters, gauges and histograms of one engine. The engine thread updates them cheaply;
    /// [`Stats::registry`] renders them.
    Stats by make {
        /// The registry that holds all metrics below.
        pub registry: Registry = make.0.clone(),
        /// Number of requests in the batch.
        pub requests_running: IntGauge = make.int_gauge("num_requests_running", "Requests in the batch"),
        /// Number of requests in the queue.
        pub requests_waiting: IntGauge = make.int_gauge("num_requests_waiting", "Requests in the queue"),
        /// Fraction of the target's pool that running requests hold, 0 to 1. What is only cached is free.
        pub kv_cache_usage: Gauge = make.gauge(
            "kv_cache_usage_perc", "Used fraction of the target's KV pool, 1 = full",
        ),
        /// Fraction of the draft's pool in use, 0 to 1.
        pub draft_kv_cache_usage: Gauge = make.gauge(
            "draft_kv_cache_usage_perc", "Used fraction of the draft's KV pool, 1 = full",
        ),
        /// Prompt tokens admitted.
        pub prompt_tokens: IntCounter = make.counter("prompt_tokens_total", "Prompt tokens admitted"),
        /// Prompt tokens of steps that were interrupted, and that are computed again.
        pub interrupted_tokens: IntCounter = make.counter(
            "prompt_tokens_interrupted_total", "Prompt tokens of steps that were interrupted for other requests",
        ),
        /// Prompt tokens that were looked up in the target's prefix cache.
        pub prefix_cache_queries: IntCounter = make.counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in the target's prefix cache",
        ),
        /// Prompt tokens that were found in the target's prefix cache.
        pub prefix_cache_hits: IntCounter = make.counter(
            "prefix_cache_hits_total", "Prompt tokens found in the target's prefix cache",
        ),
        /// Prompt tokens that were looked up in the prefix cache on disk, because memory does not have them.
        pub prefix_cache_disk_queries: IntCounter = make.counter(
            "prefix_cache_disk_queries_total", "Tokens looked up in the prefix cache on disk",
        ),
        /// Prompt tokens that were found in the prefix cache on disk and read into that in memory.
        pub prefix_cache_disk_hits: IntCounter = make.counter(
            "prefix_cache_disk_hits_total", "Tokens read from the prefix cache on disk",
        ),
        /// Bytes of blocks and states that were read from disk.
        pub prefix_cache_disk_read_bytes: IntCounter = make.counter(
            "prefix_cache_disk_read_bytes_total", "Bytes read from the prefix cache on disk",
        ),
        /// Bytes of blocks and states that were written to disk.
        pub prefix_cache_disk_written_bytes: IntCounter = make.counter(
            "prefix_cache_disk_written_bytes_total", "Bytes written to the prefix cache on disk",
        ),
        /// Blocks and states that were handed over and not written.
        pub prefix_cache_disk_dropped: IntCounter = make.counter(
            "prefix_cache_disk_dropped_total", "Blocks and states that could not be written to disk",
        ),
        /// Bytes of all files of the prefix cache on disk, when they were last counted.
        pub prefix_cache_disk_bytes: IntGauge = make.int_gauge(
            "prefix_cache_disk_bytes", "Bytes of the prefix cache on disk",
        ),
        /// Tokens generated.
        pub generation_tokens: IntCounter = make.counter("generation_tokens_total", "Tokens generated"),
        /// Preemptions of sequences.
        pub preemptions: IntCounter = make.counter("num_preemptions_total", "Requests preempted"),
        /// Requests that finished, by `finished_reason`: `stop`, `length`, `abort` (the client disconnected, or the
        /// server shut down), `error`. Counted when the [`Events`](super::Events) of a request are dropped.
        pub requests_finished: IntCounterVec = make.counters(
            "request_success_total", "Requests ended, by reason", "finished_reason",
        ),
        /// Requests that failed because the model's logits were not finite.
        pub nonfinite_logits: IntCounter = make.counter(
            "nonfinite_logits_total", "Requests that failed because the model's logits were not finite",
        ),
        /// Time from arrival to first token, seconds.
        pub time_to_first_token: Histogram = make.histogram("time_to_first_token_seconds", "Arrival to first token"),
        /// Time between two tokens of a request, seconds: a round's time divided by its number of
        /// tokens.
        pub inter_token_latency: Histogram = make.histogram("inter_token_latency_seconds", "Time between two tokens"),
        /// Time from arrival to last token, seconds.
        pub e2e_request_latency: Histogram = make.histogram("e2e_request_latency_seconds", "Arrival to last token"),
        /// What requests ask for and get, observed when they end.
        pub requests: RequestStats = RequestStats::made_by(make),
        /// Rounds with a draft, counted per request.
        pub spec_drafts: IntCounter = make.counter(
            "spec_decode_num_drafts_total", "Rounds with a draft, counted per request",
        ),
        /// Draft tokens proposed.
        pub spec_draft_tokens: IntCounter = make.counter(
            "spec_decode_num_draft_tokens_total", "Draft tokens proposed",
        ),
        /// Draft tokens accepted.
        pub spec_accepted_tokens: IntCounter = make.counter(
            "spec_decode_num_accepted_tokens_total", "Draft tokens accepted",
        ),
        /// Accepted draft tokens by `position` in the draft, from 0.
        pub spec_accepted_per_pos: IntCounterVec = make.counters(
            "spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted, by place in the draft", "position",
        ),
        /// Draft tokens by `source`; see [`Source::name`].
        pub spec_draft_by_source: IntCounterVec = make.counters(
            "spec_decode_num_draft_tokens_by_source_total", "Draft tokens proposed, by where they come from", "source",
        ),
        /// Accepted draft tokens by `source`; see [`Source::name`].
        pub spec_accepted_by_source: IntCounterVec = make.counters(
            "spec_decode_num_accepted_tokens_by_source_total",
            "Draft tokens accepted, by where they come from", "source",
        ),
        /// Draft tokens that a lossy rule accepted in the place of the model's own, by `rule`.
        pub spec_lossy_tokens: IntCounterVec = make.counters(
            "spec_decode_num_lossy_tokens_total",
            "Draft tokens that a lossy rule accepted in the place of the model's own", "rule",
        ),
        /// Proposed draft tokens that the budget did not verify.
        pub spec_pruned_tokens: IntCounter = make.counter(
            "spec_decode_num_refused_tokens_total", "Draft tokens that the budget did not verify",
        ),
        /// Current estimate of tokens per second over those of plain decoding.
        pub spec_speed_up: Gauge = make.gauge(
            "spec_decode_speed_up", "Current estimate of tokens per second over those of plain decoding",
        ),
        /// 1 once the drafter has panicked: then there are no more drafts.
        pub drafter_off: IntGauge = make.int_gauge(
            "drafter_off", "1 = the drafter has panicked: no more drafts until the server starts again",
        ),
        /// Wall time of [`Stats::draft_steps`], seconds.
        pub draft_seconds: prometheus::Counter = make.seconds("draft_seconds_total", "Wall time of draft_steps"),
        /// Draft model forwards that drafted one token for every sequence and contained no prompt rows.
        pub draft_steps: IntCounter = make.counter("draft_steps_total", "Draft model forwards, without prompts"),
        /// Wall time of [`Stats::target_steps`], seconds.
        pub target_seconds: prometheus::Counter = make.seconds("target_seconds_total", "Wall time of target_steps"),
        /// Target forwards that decoded or verified and contained no prompt rows.
        pub target_steps: IntCounter = make.counter(
            "target_steps_total", "Target forwards that decoded or verified, without prompts",
        ),
        /// Experts whose weights target forwards read: in each layer of each forward, the experts that some row chose.
        pub experts_read: IntCounter = make.counter(
            "experts_read_total",
            "Experts whose weights target forwards read, prompts included: of each layer those that some row chose",
        ),
        /// The gauge of adapters, if requests may have adapters.
        pub(super) adapters: OnceLock<AdapterStats> = OnceLock::new(),
    }
}

metrics! {
    /// Histograms over requests. Times are in seconds.
    RequestStats by make {
        /// Time from arrival to the batch.
        pub queue_time: Histogram = make.histogram("request_queue_time_seconds", "Arrival to the batch"),
        /// Time from the batch to the first token.
        pub prefill_time: Histogram = make.histogram(
            "request_prefill_time_seconds", "From the batch to the first token",
        ),
        /// Time from the first token to the last.
        pub decode_time: Histogram = make.histogram(
            "request_decode_time_seconds", "From the first token to the last",
        ),
        /// Time from the batch to the last token.
        pub inference_time: Histogram = make.histogram(
            "request_inference_time_seconds", "From the batch to the last token",
        ),
        /// Decode time divided by the number of tokens after the first.
        pub time_per_output_token: Histogram = make.histogram(
            "request_time_per_output_token_seconds", "Decode time by the tokens after the first",
        ),
        pub prompt_tokens: Histogram = make.histogram_of(
            "request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS,
        ),
        pub generation_tokens: Histogram = make.histogram_of(
            "request_generation_tokens", "Tokens that a request got", TOKEN_BUCKETS,
        ),
        /// Sequences that a request makes.
        pub n: Histogram = make.histogram_of("request_params_n", "Sequences that a request makes", COUNT_BUCKETS),
        /// Maximum number of tokens that a request asks for, if it asks for one.
        pub max_tokens: Histogram = make.histogram_of(
            "request_params_max_tokens", "max_tokens, where it is given", TOKEN_BUCKETS,
        ),
    }
}

/// The times of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestTimes {
    /// When the request arrived.
    pub arrived: Instant,
    /// When it was first admitted to the batch.
    pub admitted: Option<Instant>,
    /// When the first token was sent.
    pub first_token: Option<Instant>,
    /// When the last token was sent.
    pub last_token: Option<Instant>,
}

impl RequestTimes {
    /// Those of a request that has just arrived.
    pub(super) fn new(arrived: Instant) -> Self {
        Self {
            arrived,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Notes that tokens were sent at `now`.
    pub(super) fn note_tokens(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    /// The time from the arrival to the first token.
    pub fn first_token_seconds(&self) -> Option<f64> {
        Some((self.first_token? - self.arrived).as_secs_f64())
    }

    /// The rate of the tokens after the first, of `tokens` in all; `None` if there are none.
    pub fn tokens_per_second(&self, tokens: usize) -> Option<f64> {
        let seconds = (self.last_token? - self.first_token?).as_secs_f64();
        let rate = tokens.saturating_sub(1) as f64 / seconds;
        (rate > 0.0 && rate.is_finite()).then_some(rate)
    }
}

const TOKEN_BUCKETS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
];

const COUNT_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];

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
        #[cfg(target_os = "linux")]
        registry
            .register(Box::new(ProcessCollector::for_self()))
            .expect("names are distinct");
        let stats = Self::made_by(&MetricFactory(&registry));
        // A sample that was not there before is no increase: the first request of a kind would not show.
        for reason in ["stop", "length", "abort", "error"] {
            stats.requests_finished.with_label_values(&[reason]);
        }
        stats
    }
}

impl RequestStats {
    /// Records the end of a request of `prompt_len` tokens that got `output_len`.
    pub(super) fn note_end(&self, times: RequestTimes, prompt_len: usize, output_len: usize) {
        let between =
            |from: Option<Instant>, to: Option<Instant>| Some((to? - from?).as_secs_f64());
        let observe = |histogram: &Histogram, seconds: Option<f64>| {
            if let Some(seconds) = seconds {
                histogram.observe(seconds);
            }
        };
        let RequestTimes {
            arrived,
            admitted,
            first_token,
            last_token,
        } = times;
        let decode_time = between(first_token, last_token);
        observe(&self.queue_time, between(Some(arrived), admitted));
        observe(&self.prefill_time, between(admitted, first_token));
        observe(&self.decode_time, decode_time);
        observe(&self.inference_time, between(admitted, last_token));
        let later = output_len.saturating_sub(1);
        let each = decode_time.filter(|_| later > 0);
        observe(
            &self.time_per_output_token,
            each.map(|seconds| seconds / later as f64),
        );
        self.prompt_tokens.observe(prompt_len as f64);
        self.generation_tokens.observe(output_len as f64);
    }
}

impl Stats {
    /// Publishes the sizes of the pool, as labels of a gauge that is 1.
    pub(super) fn set_cache_config(
        &self,
        num_blocks: usize,
        block_size: usize,
        enable_prefix_caching: bool,
    ) {
        let (num_blocks, block_size) = (num_blocks.to_string(), block_size.to_string());
        let caching = enable_prefix_caching.to_string();
        let options = Opts::new("foretoken:cache_config_info", "The target's KV pool")
            .const_label("num_gpu_blocks", num_blocks)
            .const_label("block_size", block_size)
            .const_label("enable_prefix_caching", caching);
        MetricFactory(&self.registry)
            .register(Gauge::with_opts(options))
            .set(1.0);
    }

    /// Publishes which adapters requests use, of at most `max`.
    pub(super) fn count_adapters(&self, max: usize) {
        let made = MetricFactory(&self.registry).register(AdapterStats::new(max));
        self.adapters.get_or_init(|| made);
    }

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
            counter.with_label_values(&[source.name()]).inc();
        }
        for position in 0..path.len() {
            self.spec_accepted_per_pos
                .with_label_values(&[&position.to_string()])
                .inc();
        }
        for source in path.iter().filter_map(|&node| sources.get(node)) {
            let counter = &self.spec_accepted_by_source;
            counter.with_label_values(&[source.name()]).inc();
        }
    }

    /// Records the tokens of a round that stand by a lossy rule alone.
    pub(super) fn note_lossy(&self, rule: LossyRule, tokens: usize) {
        let counter = &self.spec_lossy_tokens;
        counter
            .with_label_values(&[rule.name()])
            .inc_by(tokens as u64);
    }

    /// Records `new` tokens at time `now` of a request that had `times` before them. The first token is timed from
    /// the request's arrival.
    pub(super) fn note_tokens(&self, times: &RequestTimes, now: Instant, new: usize) {
        self.generation_tokens.inc_by(new as u64);
        match times.last_token {
            None if new > 0 => {
                let waited = (now - times.arrived).as_secs_f64();
                self.time_to_first_token.observe(waited);
            }
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

    /// Sets the number of pruned draft tokens to `total`.
    pub(super) fn note_pruned(&self, total: u64) {
        raise(&self.spec_pruned_tokens, total);
    }

    /// Sets the number of experts read to `total`.
    pub(super) fn note_experts_read(&self, total: u64) {
        raise(&self.experts_read, total);
    }

    /// Sets the drafter's counters to `total`.
    pub(super) fn note_draft_cost(&self, total: DraftCost) {
        let steps = total.steps.saturating_sub(self.draft_steps.get());
        if steps > 0 {
            self.draft_steps.inc_by(steps);
            self.draft_seconds
                .inc_by((total.step_seconds - self.draft_seconds.get()).max(0.0));
        }
    }
}

/// Raises a counter to `total`.
fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

/// Creates and registers metrics with the prefix `foretoken:`.
struct MetricFactory<'a>(&'a Registry);

impl MetricFactory<'_> {
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
        self.histogram_of(name, help, LATENCY_BUCKETS)
    }

    fn histogram_of(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let options = HistogramOpts::new(format!("foretoken:{name}"), help);
        self.register(Histogram::with_opts(options.buckets(buckets.to_vec())))
    }
}
