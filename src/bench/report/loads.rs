//! Figures of many requests at a time.

use super::{BenchMode, Difference};
use crate::bench::interval::{Interval, Pair, Verdict, Work};
use crate::engine::SpecUsage;
use serde::Serialize;
use std::ops::AddAssign;

/// The sums over the groups of requests at one number of streams: plain, and in one speculative mode.
#[derive(Debug, Clone)]
pub struct StreamLoad {
    pub streams: usize,
    pub temperature: f32,
    pub(in crate::bench) way: BenchMode,
    pub requests: usize,
    pub plain: Throughput,
    pub speculative: Throughput,
    /// Both throughputs of each group, over its repeats.
    pub pairs: Vec<Pair>,
    pub spec: SpecUsage,
    pub differing: Vec<Difference>,
}

/// Tokens of all requests together, and the wall time in which they came.
#[derive(Debug, Clone, Copy, Default)]
pub struct Throughput {
    pub tokens: usize,
    pub seconds: f64,
}

impl Throughput {
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    fn work(&self) -> Work {
        Work {
            tokens: self.tokens as f64,
            seconds: self.seconds,
        }
    }
}

impl AddAssign for Throughput {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.seconds += other.seconds;
    }
}

impl StreamLoad {
    pub(in crate::bench) fn new(streams: usize, temperature: f32, way: BenchMode) -> Self {
        Self {
            streams,
            temperature,
            way,
            requests: 0,
            plain: Throughput::default(),
            speculative: Throughput::default(),
            pairs: Vec::new(),
            spec: SpecUsage::default(),
            differing: Vec::new(),
        }
    }

    /// Adds a run of the `group`-th group in both ways. The repeats of a group are one pair, since they are not
    /// independent.
    pub fn add(&mut self, group: usize, plain: Throughput, speculative: Throughput) {
        self.plain += plain;
        self.speculative += speculative;
        let groups = self.pairs.len().max(group + 1);
        self.pairs.resize(groups, Pair::default());
        let pair = &mut self.pairs[group];
        pair.plain += plain.work();
        pair.speculative += speculative.work();
    }
}

/// Figures of one number of streams. A ratio without measurements is NaN, in JSON null.
#[derive(Debug, Clone, Serialize)]
pub struct LoadFigures {
    pub streams: usize,
    pub temperature: f32,
    #[serde(flatten)]
    pub(in crate::bench) way: BenchMode,
    pub requests: usize,
    /// Tokens of the speculative runs while all streams were busy.
    pub tokens: usize,
    /// Tokens over the wall time while all streams were busy, prompts included.
    pub plain_tokens_per_second: f64,
    pub spec_tokens_per_second: f64,
    /// Speculative over plain rate.
    pub speed_up: f64,
    /// The interval of `speed_up` over groups of requests; `None` = there were too few.
    pub interval: Option<Interval>,
    pub verdict: Verdict,
    pub alpha: f64,
    pub mean_accepted_length: f64,
    /// Mean draft tokens per round with a draft.
    pub mean_draft_length: f64,
    /// Texts that speculation changed; must be empty.
    pub differing: Vec<Difference>,
}

impl LoadFigures {
    /// The figures of `load`; the interval misses the speed-up with probability `error`.
    pub fn of(load: StreamLoad, error: f64) -> Self {
        let (plain, speculative) = (load.plain.rate(), load.speculative.rate());
        let interval = Interval::of(&load.pairs, error);
        Self {
            streams: load.streams,
            temperature: load.temperature,
            way: load.way,
            requests: load.requests,
            tokens: load.speculative.tokens,
            plain_tokens_per_second: plain,
            spec_tokens_per_second: speculative,
            speed_up: speculative / plain,
            interval,
            verdict: Verdict::of(interval, load.spec.accepted > 0),
            alpha: load.spec.alpha(),
            mean_accepted_length: load.spec.mean_accepted_length(),
            mean_draft_length: load.spec.drafted as f64 / load.spec.rounds as f64,
            differing: load.differing,
        }
    }
}
