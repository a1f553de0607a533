//! Figures of single prompts.

use super::MeasuredPair;
use crate::bench::BenchMode;
use crate::bench::interval::{Interval, Pair, Work};
use serde::Serialize;
use std::fmt::Write;

/// The names of the columns of a CSV file.
pub const CSV_HEAD: &str = "temperature,drafter,spec_length,spec_topk,acceptance,synthetic_acceptance,id,category,\
prompt_tokens,tokens,plain_seconds,plain_seconds_low,plain_seconds_high,spec_seconds,spec_seconds_low,\
spec_seconds_high,speed_up,tokens_per_step,drafted,accepted";

/// A prompt at one temperature in one speculative mode. A figure without measurements is NaN, in JSON null.
#[derive(Debug, Clone, Serialize)]
pub struct PromptFigures {
    pub id: String,
    pub category: String,
    pub prompt_tokens: usize,
    /// Decoded tokens after the first round, in each way.
    pub plain_tokens: usize,
    pub tokens: usize,
    /// Decode time without prompt processing: the median over the repeats.
    pub plain_seconds: f64,
    pub spec_seconds: f64,
    /// The shortest and the longest decode time of the repeats.
    pub plain_seconds_range: Option<Interval>,
    pub spec_seconds_range: Option<Interval>,
    /// Speculative over plain tokens per second.
    pub speed_up: f64,
    /// Tokens per target step of the speculative runs.
    pub tokens_per_step: f64,
    pub drafted: usize,
    pub accepted: usize,
}

impl PromptFigures {
    pub(super) fn of(pair: &MeasuredPair) -> Self {
        let (plain, speculative) = (&pair.plain, &pair.speculative);
        Self {
            id: pair.id.clone(),
            category: pair.category.clone(),
            prompt_tokens: pair.prompt_tokens,
            plain_tokens: plain.decoded,
            tokens: speculative.decoded,
            plain_seconds: plain.decode_seconds,
            spec_seconds: speculative.decode_seconds,
            plain_seconds_range: pair.plain_seconds,
            spec_seconds_range: pair.spec_seconds,
            speed_up: speculative.rate() / plain.rate(),
            tokens_per_step: speculative.tokens_per_step(),
            drafted: speculative.spec.drafted,
            accepted: speculative.spec.accepted,
        }
    }

    /// The same prompt in two speculative modes, this one as the plain way of the pair.
    pub(super) fn against(&self, other: &Self) -> Pair {
        let work = |of: &Self| Work {
            tokens: of.tokens as f64,
            seconds: of.spec_seconds,
        };
        Pair {
            plain: work(self),
            speculative: work(other),
        }
    }

    /// The line of a CSV file, with its end.
    pub(super) fn csv_line(&self, temperature: f32, drafter: &str, way: &BenchMode) -> String {
        let acceptance = serde_json::to_value(way.acceptance).unwrap_or_default();
        let number = |value: f64| {
            let text = value.is_finite().then(|| value.to_string());
            text.unwrap_or_default()
        };
        let ends = |range: Option<Interval>| match range {
            Some(range) => format!("{},{}", range.low, range.high),
            None => ",".into(),
        };
        let mut line = format!("{temperature},{}", quoted(drafter));
        // Writing to a string does not fail.
        let _ = writeln!(
            line,
            ",{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
            way.spec_length,
            way.spec_topk,
            acceptance.as_str().unwrap_or_default(),
            way.synthetic_acceptance.map_or(String::new(), number),
            quoted(&self.id),
            quoted(&self.category),
            self.prompt_tokens,
            self.tokens,
            number(self.plain_seconds),
            ends(self.plain_seconds_range),
            number(self.spec_seconds),
            ends(self.spec_seconds_range),
            number(self.speed_up),
            number(self.tokens_per_step),
            self.drafted,
            self.accepted
        );
        line
    }
}

/// A field of a CSV file, in quotes if it needs them.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
