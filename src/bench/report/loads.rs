//! Figures of many requests at a time.

use super::{Difference, Way};
use crate::engine::SpecUsage;
use serde::Serialize;

/// The sums over the groups of requests at one number of streams: plain, and in one speculative mode.
#[derive(Debug, Clone)]
pub struct Load {
    pub streams: usize,
    pub temperature: f32,
    pub(in crate::bench) way: Way,
    pub requests: usize,
    pub plain: Throughput,
    pub speculative: Throughput,
    pub spec: SpecUsage,
    pub differing: Vec<Difference>,
}

/// Tokens, and the wall time of all requests together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Throughput {
    tokens: usize,
    seconds: f64,
}

impl Throughput {
    pub fn add(&mut self, tokens: usize, seconds: f64) {
        self.tokens += tokens;
        self.seconds += seconds;
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

impl Load {
    pub(in crate::bench) fn new(streams: usize, temperature: f32, way: Way) -> Self {
        Self {
            streams,
            temperature,
            way,
            requests: 0,
            plain: Throughput::default(),
            speculative: Throughput::default(),
            spec: SpecUsage::default(),
            differing: Vec::new(),
        }
    }
}

/// Figures of one number of streams. A ratio without measurements is NaN, in JSON null.
#[derive(Debug, Clone, Serialize)]
pub struct LoadFigures {
    pub streams: usize,
    pub temperature: f32,
    #[serde(flatten)]
    pub(in crate::bench) way: Way,
    pub requests: usize,
    /// Tokens of the speculative runs.
    pub tokens: usize,
    /// All tokens over the wall time, prompts included.
    pub plain_tokens_per_second: f64,
    pub spec_tokens_per_second: f64,
    /// Speculative over plain rate.
    pub speed_up: f64,
    pub alpha: f64,
    pub mean_accepted_length: f64,
    /// Mean draft tokens per round with a draft.
    pub mean_draft_length: f64,
    /// Texts that speculation changed; must be empty.
    pub differing: Vec<Difference>,
}

impl LoadFigures {
    pub fn of(load: Load) -> Self {
        let (plain, speculative) = (load.plain.rate(), load.speculative.rate());
        Self {
            streams: load.streams,
            temperature: load.temperature,
            way: load.way,
            requests: load.requests,
            tokens: load.speculative.tokens,
            plain_tokens_per_second: plain,
            spec_tokens_per_second: speculative,
            speed_up: speculative / plain,
            alpha: load.spec.alpha(),
            mean_accepted_length: load.spec.mean_accepted_length(),
            mean_draft_length: load.spec.drafted as f64 / load.spec.rounds as f64,
            differing: load.differing,
        }
    }
}
