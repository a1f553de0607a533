//! The sampling parameters of requests that do not name them, as a model's publisher recommends them.

use super::numbers::{numbers, within};
use super::object::JsonObject;
use super::wire::{self, Common};
use foretoken_core::error::{Error, Result};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::fmt;

/// Parameters for requests that do not name them; `None` = OpenAI's default. The names are those of
/// `generation_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct SamplingDefaults {
    /// Divisor of the logits.
    pub temperature: Option<f64>,
    /// Total probability of the tokens that are kept (nucleus sampling).
    pub top_p: Option<f64>,
    /// Number of most probable tokens that are kept.
    pub top_k: Option<i64>,
    /// Minimum probability of a token that is kept, relative to the most probable one.
    pub min_p: Option<f64>,
    /// Factor that penalizes the tokens of prompt and output; 1 = none.
    pub repetition_penalty: Option<f64>,
    /// Maximum length of an answer in tokens.
    pub max_new_tokens: Option<usize>,
}

/// Options that a `generation_config.json` may set and that the server does not support, with the values that ask for
/// nothing.
const OTHERS: [(&str, &[f64]); 8] = [
    ("typical_p", &[1.0]),
    ("num_beams", &[1.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("penalty_alpha", &[0.0]),
    ("mirostat", &[0.0]),
    ("xtc_probability", &[0.0]),
];

impl SamplingDefaults {
    /// The names that [`SamplingDefaults::from_json`] reads.
    pub fn names() -> &'static [&'static str] {
        wire::names::<Self>()
    }

    /// Reads the fields of a JSON object; others are ignored.
    ///
    /// # Errors
    /// `Setup`, naming the field, if a value is not what requests may ask for.
    pub fn from_json(json: &str) -> Result<Self> {
        let read = || {
            let defaults: Self = JsonObject::parse(json.as_bytes(), &[Self::names()])?.fields()?;
            let mut common = Common::default();
            defaults.fill(&mut common);
            numbers(&common)?;
            within("max_new_tokens", defaults.max_new_tokens, 1..=usize::MAX)?;
            Ok(defaults)
        };
        read().map_err(|e: Error| Error::setup(e.to_string()))
    }

    /// The names of what the fields of `object` ask for and requests cannot have.
    pub fn unread(object: &Map<String, Value>) -> Vec<&'static str> {
        let asks = |(name, nothing): &(&'static str, &[f64])| {
            let value = object.get(*name)?;
            let is_nothing = value.is_null() || nothing.iter().any(|n| value.as_f64() == Some(*n));
            (!is_nothing).then_some(*name)
        };
        OTHERS.iter().filter_map(asks).collect()
    }

    /// Adds what a request does not name.
    pub(super) fn fill(&self, common: &mut Common) {
        common.temperature = common.temperature.or(self.temperature);
        common.top_p = common.top_p.or(self.top_p);
        common.top_k = common.top_k.or(self.top_k);
        common.min_p = common.min_p.or(self.min_p);
        common.repetition_penalty = common.repetition_penalty.or(self.repetition_penalty);
    }

    /// These, with those of `other` instead, where it has any.
    pub fn overridden_by(self, other: Self) -> Self {
        Self {
            temperature: other.temperature.or(self.temperature),
            top_p: other.top_p.or(self.top_p),
            top_k: other.top_k.or(self.top_k),
            min_p: other.min_p.or(self.min_p),
            repetition_penalty: other.repetition_penalty.or(self.repetition_penalty),
            max_new_tokens: other.max_new_tokens.or(self.max_new_tokens),
        }
    }
}

/// A list like `temperature 0.6, top_k 20`; empty if there are none.
impl fmt::Display for SamplingDefaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = [
            ("temperature", self.temperature.map(|x| x.to_string())),
            ("top_p", self.top_p.map(|x| x.to_string())),
            ("top_k", self.top_k.map(|x| x.to_string())),
            ("min_p", self.min_p.map(|x| x.to_string())),
            (
                "repetition_penalty",
                self.repetition_penalty.map(|x| x.to_string()),
            ),
            ("max_new_tokens", self.max_new_tokens.map(|x| x.to_string())),
        ];
        let shown = shown.into_iter();
        let shown = shown.filter_map(|(name, value)| Some(format!("{name} {}", value?)));
        f.write_str(&shown.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_and_checked_as_those_of_requests() {
        let json = r#"{"bos_token_id": 1, "do_sample": true, "temperature": 0.6, "top_k": 20.0,
            "top_p": null, "max_new_tokens": 2048, "transformers_version": "4.51.0"}"#;
        let defaults = SamplingDefaults::from_json(json).expect("fine");
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            max_new_tokens: Some(2048),
            ..SamplingDefaults::default()
        };
        assert_eq!(defaults, expected);
        let shown = "temperature 0.6, top_k 20, max_new_tokens 2048";
        assert_eq!(defaults.to_string(), shown);
        assert_eq!(SamplingDefaults::default().to_string(), "");
        let other = SamplingDefaults::from_json(r#"{"temperature": 0, "min_p": 0.1}"#);
        let both = defaults.overridden_by(other.expect("fine"));
        let shown = "temperature 0, top_k 20, min_p 0.1, max_new_tokens 2048";
        assert_eq!(both.to_string(), shown);
        for (json, needle) in [
            (
                r#"{"temperature": 3}"#,
                "temperature must be between 0 and 2",
            ),
            (r#"{"top_p": 1.5}"#, "top_p must be between 0 and 1"),
            (r#"{"repetition_penalty": 0}"#, "greater than 0"),
            (r#"{"top_k": "many"}"#, "top_k: invalid type"),
            (
                r#"{"max_new_tokens": 0}"#,
                "max_new_tokens must be between 1",
            ),
            ("[1]", "must be a JSON object"),
            ("{", "not valid JSON"),
        ] {
            let error = SamplingDefaults::from_json(json).expect_err("refused");
            assert!(matches!(error, Error::Setup(_)), "{error:?}");
            assert!(error.to_string().contains(needle), "{json}: {error}");
        }
    }

    #[test]
    fn what_is_not_done_is_named() {
        let json = r#"{"num_beams": 4, "typical_p": 1.0, "eta_cutoff": 0.01, "top_k": 3}"#;
        let object: Map<String, Value> = serde_json::from_str(json).expect("an object");
        assert_eq!(
            SamplingDefaults::unread(&object),
            ["num_beams", "eta_cutoff"]
        );
    }
}
