//! Traces of requests, sent to a collector by OTLP over HTTP.
//!
//! A request becomes a span of the server, and each of its sequences three spans below it: `queue`, `prefill`
//! and `decode`. All are made when the request has ended, from times that were noted anyway. Attributes
//! have the names of OpenTelemetry's conventions for generative AI where there is one, and vLLM's for
//! latencies; our own begin with `foretoken.`.
//!
//! Nothing waits for the collector: spans go to a queue of limited length, and a thread of the SDK sends
//! them. Those that do not fit or cannot be sent are dropped and counted.

mod export;
mod parent;

use crate::engine::{RequestTimes, SequenceEnd};
use crate::error::{Error, Result};
use crate::http::{ChoiceRecord, JobRecord, Observer, RequestRecord};
use export::{BoundedProcessor, Counted, ExportClient, SpanQueue};
use opentelemetry::trace::{Span, SpanBuilder, SpanKind, Status, TraceContextExt, TracerProvider};
use opentelemetry::{Array, Context, Key, KeyValue, StringValue, Value};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT, SdkTracer, SdkTracerProvider,
};
use prometheus::{IntCounter, Registry};
use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Maximum time that the last spans may take when the server ends.
const FLUSH: Duration = Duration::from_secs(1);
/// Maximum time that a batch may take, if the environment does not set it.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The path at which a collector takes traces, if its URL has no path.
const PATH: &str = "/v1/traces";
/// The protocol that is spoken.
const PROTOCOL: &str = "http/protobuf";

/// The exporter of traces, if there is a collector.
pub struct Traces(Option<SdkTracerProvider>);

/// Makes spans of requests.
struct Spans(SdkTracer);

impl Traces {
    /// Starts the thread that sends traces to `endpoint`, or to the one that OpenTelemetry's environment
    /// variables name, if they do. `metrics` gets the number of dropped spans.
    ///
    /// # Errors
    /// `Setup`, naming what is wrong with the endpoint or a variable.
    pub fn start(endpoint: Option<&str>, metrics: &Registry) -> Result<Self> {
        let is = |name: &str, value: &str| {
            env::var(name).is_ok_and(|is: String| is.eq_ignore_ascii_case(value))
        };
        let named = variable(["TRACES_ENDPOINT", "ENDPOINT"]).map(|(_, url)| url);
        let wanted = endpoint.is_some() || named.is_some() && !is("OTEL_TRACES_EXPORTER", "none");
        if !wanted || is("OTEL_SDK_DISABLED", "true") {
            return Ok(Self(None));
        }
        if let Some((name, protocol)) = variable(["TRACES_PROTOCOL", "PROTOCOL"])
            && protocol != PROTOCOL
        {
            return Err(Error::setup(format!(
                "{name} is {protocol}: traces are sent by {PROTOCOL} only, usually to port 4318"
            )));
        }
        let dropped = IntCounter::new("foretoken:trace_spans_dropped_total", "Spans dropped")
            .map_err(|e| Error::internal(format!("metrics: {e}")))?;
        metrics
            .register(Box::new(dropped.clone()))
            .map_err(|e| Error::internal(format!("metrics: {e}")))?;
        let timeout = variable(["TRACES_TIMEOUT", "TIMEOUT"]);
        let timeout = timeout.and_then(|(_, ms)| Some(Duration::from_millis(ms.parse().ok()?)));
        let timeout = timeout.unwrap_or(TIMEOUT);
        let url = endpoint.or(named.as_deref()).unwrap_or_default();
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(ExportClient::new(url, timeout))
            .with_timeout(timeout);
        if let Some(endpoint) = endpoint {
            exporter = exporter.with_endpoint(with_path(endpoint));
        }
        let exporter = exporter
            .build()
            .map_err(|e| Error::setup(format!("traces cannot be sent: {e}")))?;
        let max = env::var(OTEL_BSP_MAX_QUEUE_SIZE).ok();
        let max = max.and_then(|max| max.parse().ok()).filter(|&max| max > 0);
        let max = max.unwrap_or(OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT);
        let queue = Arc::new(SpanQueue::new(max, dropped));
        let config = BatchConfigBuilder::default().with_max_queue_size(max);
        let batches = BatchSpanProcessor::builder(Counted::new(exporter, queue.clone()))
            .with_batch_config(config.build())
            .build();
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_span_processor(BoundedProcessor::new(batches, queue))
            .build();
        Ok(Self(Some(provider)))
    }

    /// Returns the observer that is told of requests.
    pub fn observer(&self) -> Option<Arc<dyn Observer>> {
        let provider = self.0.as_ref()?;
        Some(Arc::new(Spans(provider.tracer("foretoken"))))
    }

    /// Sends what is left, and waits for at most `FLUSH`.
    pub fn shut_down(&self) {
        if let Some(provider) = &self.0
            && let Err(e) = provider.shutdown_with_timeout(FLUSH)
        {
            tracing::warn!("the last traces may be lost: {e}");
        }
    }
}

/// The first of the variables of OTLP with these names that is set, with its whole name.
fn variable(names: [&str; 2]) -> Option<(String, String)> {
    names.into_iter().find_map(|name| {
        let name = format!("OTEL_EXPORTER_OTLP_{name}");
        let value = env::var(&name).ok().filter(|value| !value.is_empty())?;
        Some((name, value))
    })
}

/// A URL of a collector; one without a path gets the usual one.
fn with_path(url: &str) -> String {
    let bare = url.trim_end_matches('/');
    let has_path = bare
        .split_once("://")
        .is_some_and(|(_, rest)| rest.contains('/'));
    if has_path {
        url.to_owned()
    } else {
        format!("{bare}{PATH}")
    }
}

/// Returns the resource that sends the traces. Its name is `foretoken`, unless the environment has another name.
fn resource() -> Resource {
    let resource = Resource::builder().build();
    let name = resource.get(&Key::from_static_str("service.name"));
    let unnamed = name.is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let resource = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if unnamed {
        resource.with_service_name("foretoken").build()
    } else {
        resource.build()
    }
}

impl Observer for Spans {
    fn ended(&self, request: &RequestRecord) {
        let clock = Clock::new();
        let parent = parent::of(request);
        let name = match &request.job {
            Some(job) => format!("{} {}", request.operation, job.model),
            None => request.operation.to_owned(),
        };
        let mut span = SpanBuilder::from_name(name)
            .with_kind(SpanKind::Server)
            .with_start_time(clock.time(request.arrived))
            .with_attributes(of_request(request))
            .start_with_context(&self.0, &parent);
        if !span.is_recording() {
            return;
        }
        // A client's mistake is none of the server's.
        if let Some(error) = request.error
            && request
                .status
                .is_none_or(|status| !(400..500).contains(&status))
        {
            span.set_status(Status::error(error));
        }
        let context = parent.with_remote_span_context(span.span_context().clone());
        for (index, choice) in request.choices.iter().enumerate() {
            if let Some(end) = &choice.sequence {
                self.phases(&context, &clock, index, end, request.ended);
            }
        }
        span.end_with_timestamp(clock.time(request.ended));
    }
}

impl Spans {
    /// The spans of a sequence. One that was cut off has no later ones.
    fn phases(
        &self,
        context: &Context,
        clock: &Clock,
        choice: usize,
        end: &SequenceEnd,
        ended: Instant,
    ) {
        let RequestTimes {
            arrived,
            admitted,
            first_token,
            last_token,
        } = end.times;
        let phase = |name, from, to: Option<Instant>, mut attributes: Vec<KeyValue>| {
            attributes.push(KeyValue::new("foretoken.choice", choice as i64));
            SpanBuilder::from_name(name)
                .with_start_time(clock.time(from))
                .with_attributes(attributes)
                .start_with_context(&self.0, context)
                .end_with_timestamp(clock.time(to.unwrap_or(ended)));
        };
        phase("queue", arrived, admitted, Vec::new());
        if let Some(admitted) = admitted {
            phase("prefill", admitted, first_token, of_prefill(end));
        }
        if let Some(first_token) = first_token {
            phase("decode", first_token, last_token, of_decode(end));
        }
    }
}

/// Attributes of the server's span.
fn of_request(request: &RequestRecord) -> Vec<KeyValue> {
    let mut all = vec![
        KeyValue::new("gen_ai.operation.name", request.operation),
        KeyValue::new("gen_ai.provider.name", "foretoken"),
        KeyValue::new("gen_ai.request.id", request.id.clone()),
        KeyValue::new("http.request.method", request.method.clone()),
        KeyValue::new("http.route", request.route),
    ];
    if let Some(status) = request.status {
        all.push(KeyValue::new(
            "http.response.status_code",
            i64::from(status),
        ));
    }
    if let Some(error) = request.error {
        all.push(KeyValue::new("error.type", error));
    }
    if let Some(job) = &request.job {
        all.extend(of_job(job, &request.choices));
        all.extend(latencies(request));
    }
    all
}

fn of_job(job: &JobRecord, choices: &[ChoiceRecord]) -> Vec<KeyValue> {
    let reasons = choices
        .iter()
        .map(|choice| choice.finish.map_or("abort", |(why, _)| why));
    let reasons = reasons.map(StringValue::from).collect();
    let tokens = |choice: &ChoiceRecord| match (choice.finish, &choice.sequence) {
        (Some((_, tokens)), _) => tokens,
        (None, Some(end)) => end.output_tokens,
        (None, None) => 0,
    };
    // As usage has it: of each prompt, what was cached before its first choice.
    let of_prompt = |choices: &[ChoiceRecord]| {
        let sequences = choices.iter().filter_map(|choice| choice.sequence);
        sequences.map(|end| end.cached_tokens).min()
    };
    let prompts = choices.chunks(job.choices_per_prompt.max(1));
    let cached: usize = prompts.filter_map(of_prompt).sum();
    let mut all = vec![
        KeyValue::new("gen_ai.request.model", job.model.clone()),
        KeyValue::new("gen_ai.response.model", job.model.clone()),
        KeyValue::new("gen_ai.request.temperature", shortest(job.temperature)),
        KeyValue::new("gen_ai.request.top_p", shortest(job.top_p)),
        KeyValue::new("gen_ai.request.stream", job.stream),
        KeyValue::new("gen_ai.request.choice.count", choices.len() as i64),
        KeyValue::new("gen_ai.response.id", job.response_id.clone()),
        KeyValue::new(
            "gen_ai.response.finish_reasons",
            Value::Array(Array::String(reasons)),
        ),
        KeyValue::new("gen_ai.usage.input_tokens", job.prompt_tokens as i64),
        KeyValue::new(
            "gen_ai.usage.output_tokens",
            choices.iter().map(tokens).sum::<usize>() as i64,
        ),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", cached as i64),
    ];
    if let Some(max_tokens) = job.max_tokens {
        all.push(KeyValue::new(
            "gen_ai.request.max_tokens",
            max_tokens as i64,
        ));
    }
    all
}

/// Seconds, of the sequence that got its first token first.
fn latencies(request: &RequestRecord) -> Vec<KeyValue> {
    let sequences = request.choices.iter().filter_map(|choice| choice.sequence);
    let first =
        sequences.min_by_key(|end| (end.times.first_token.is_none(), end.times.first_token));
    let seconds = |name, from: Option<Instant>, to: Option<Instant>| {
        let seconds = to?.saturating_duration_since(from?).as_secs_f64();
        Some(KeyValue::new(name, seconds))
    };
    let e2e = seconds(
        "gen_ai.latency.e2e",
        Some(request.arrived),
        Some(request.ended),
    );
    let of_first = first.map(|end| {
        let RequestTimes {
            arrived,
            admitted,
            first_token,
            last_token,
        } = end.times;
        let arrived = Some(arrived);
        [
            seconds("gen_ai.latency.time_in_queue", arrived, admitted),
            seconds("gen_ai.latency.time_to_first_token", arrived, first_token),
            seconds(
                "gen_ai.latency.time_in_model_prefill",
                admitted,
                first_token,
            ),
            seconds(
                "gen_ai.latency.time_in_model_decode",
                first_token,
                last_token,
            ),
            seconds(
                "gen_ai.latency.time_in_model_inference",
                admitted,
                last_token,
            ),
        ]
    });
    let all = of_first.into_iter().flatten().chain([e2e]);
    all.flatten().collect()
}

fn of_prefill(end: &SequenceEnd) -> Vec<KeyValue> {
    vec![
        KeyValue::new("gen_ai.usage.input_tokens", end.prompt_tokens as i64),
        KeyValue::new("foretoken.cached_tokens", end.cached_tokens as i64),
    ]
}

/// Rounds are those with a draft.
fn of_decode(end: &SequenceEnd) -> Vec<KeyValue> {
    let spec = end.spec;
    vec![
        KeyValue::new("gen_ai.usage.output_tokens", end.output_tokens as i64),
        KeyValue::new("foretoken.speculation.rounds", spec.rounds as i64),
        KeyValue::new("foretoken.speculation.drafted", spec.drafted as i64),
        KeyValue::new("foretoken.speculation.accepted", spec.accepted as i64),
        KeyValue::new(
            "foretoken.speculation.acceptance_rate",
            spec.acceptance_rate(),
        ),
    ]
}

/// The number that a client wrote: 0.7, not 0.699999988079071.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// The time of the day at instants that are past.
struct Clock {
    instant: Instant,
    time: SystemTime,
}

impl Clock {
    fn new() -> Self {
        Self {
            instant: Instant::now(),
            time: SystemTime::now(),
        }
    }

    fn time(&self, at: Instant) -> SystemTime {
        self.time - self.instant.saturating_duration_since(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_without_a_path_get_one() {
        let usual = "http://collector:4318/v1/traces";
        for url in ["http://collector:4318", "http://collector:4318/", usual] {
            assert_eq!(with_path(url), usual);
        }
        let own = "https://collector/otlp/";
        assert_eq!(with_path(own), own);
    }
}
