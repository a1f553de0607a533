//! The way of spans to the collector: a queue of limited length, a thread of the SDK, an HTTP client.

use crate::chat::is_loopback;
use futures_util::future::BoxFuture;
use opentelemetry::Context;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::SpanExporter as OtlpExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor};
use prometheus::IntCounter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

/// Bytes of an answer of the collector that are read.
const MAX_ANSWER: u64 = 1 << 20;

/// Counts the spans that wait or are being sent, and those that were dropped.
#[derive(Debug)]
pub struct SpanQueue {
    spans: AtomicUsize,
    max: usize,
    dropped: IntCounter,
    /// Whether it was said that the queue is full.
    said_full: AtomicBool,
    /// Whether it was said that the collector takes nothing. It may do so again after a success.
    said_failed: AtomicBool,
}

impl SpanQueue {
    /// A queue of at most `max` spans.
    pub fn new(max: usize, dropped: IntCounter) -> Self {
        Self {
            spans: AtomicUsize::new(0),
            max,
            dropped,
            said_full: AtomicBool::new(false),
            said_failed: AtomicBool::new(false),
        }
    }

    /// Takes a place in the queue; false if there is none.
    fn enter(&self) -> bool {
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        let fits = |spans: usize| (spans < self.max).then_some(spans + 1);
        if self.spans.fetch_update(set, fetch, fits).is_ok() {
            return true;
        }
        self.dropped.inc();
        if !self.said_full.swap(true, Ordering::SeqCst) {
            tracing::warn!(
                "the collector takes traces too slowly: what does not fit the queue is dropped (foretoken:trace_spans_dropped_total counts it)"
            );
        }
        false
    }

    /// `count` spans were sent, or are lost.
    fn leave(&self, count: usize, result: &OTelSdkResult) {
        self.spans.fetch_sub(count, Ordering::SeqCst);
        match result {
            Ok(()) => self.said_failed.store(false, Ordering::SeqCst),
            Err(e) => {
                self.dropped.inc_by(count as u64);
                if !self.said_failed.swap(true, Ordering::SeqCst) {
                    tracing::warn!(
                        "traces cannot be sent and are dropped (foretoken:trace_spans_dropped_total counts them): {e}"
                    );
                }
            }
        }
    }
}

/// Lets as many spans in as the queue holds.
#[derive(Debug)]
pub struct BoundedProcessor {
    batches: BatchSpanProcessor,
    queue: Arc<SpanQueue>,
}

impl BoundedProcessor {
    /// `batches` must have room for as many spans as `queue`.
    pub fn new(batches: BatchSpanProcessor, queue: Arc<SpanQueue>) -> Self {
        Self { batches, queue }
    }
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.queue.enter() {
            self.batches.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// Tells the queue what has left it.
#[derive(Debug)]
pub struct Counted {
    exporter: OtlpExporter,
    queue: Arc<SpanQueue>,
}

impl Counted {
    pub fn new(exporter: OtlpExporter, queue: Arc<SpanQueue>) -> Self {
        Self { exporter, queue }
    }
}

impl SpanExporter for Counted {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let result = self.exporter.export(batch).await;
        self.queue.leave(count, &result);
        result
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// The HTTP client of downloads, which blocks: only the SDK's thread uses it here.
#[derive(Debug)]
pub struct ExportClient(Agent);

impl ExportClient {
    /// A client of the collector at `url`, whose requests take at most `timeout`. For one on this machine, no proxy is meant.
    pub fn new(url: &str, timeout: Duration) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .tls_config(tls.build())
            .timeout_global(Some(timeout));
        if is_loopback(url) {
            config = config.proxy(None);
        }
        Self(config.build().into())
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let answer = self.0.run(Request::from_parts(head, &body[..]));
        let answer = answer.inspect_err(|e| tracing::debug!("the collector: {e}"))?;
        let (head, mut body) = answer.into_parts();
        let body = body.with_config().limit(MAX_ANSWER).read_to_vec()?;
        Ok(Response::from_parts(head, body.into()))
    }
}

impl HttpClient for ExportClient {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> BoxFuture<'b, Result<Response<Bytes>, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}
