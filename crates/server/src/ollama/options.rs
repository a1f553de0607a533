//! The field `options`, in which clients of this API say how texts are sampled.

use crate::content::TextOr;
use crate::object;
use crate::unsupported::is_of_loader;
use crate::wire::{Common, whole, wrong};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

const FIELD: &str = "options";

/// The names of fields in other APIs, with their names in this API.
pub(super) const NAMES: [(&str, &str); 15] = [
    ("max_tokens", "options.num_predict"),
    ("temperature", "options.temperature"),
    ("top_k", "options.top_k"),
    ("top_p", "options.top_p"),
    ("min_p", "options.min_p"),
    ("seed", "options.seed"),
    ("stop", "options.stop"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    (
        "tool_choice.allowed_tools.tools.*.function",
        "tool_choice.tools.*",
    ),
    ("tool_choice.allowed_tools", "tool_choice"),
    ("tool_choice.function", "tool_choice"),
];

/// The options that are read.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "OllamaOptions")]
pub(super) struct Options {
    /// Below 1, a text may be as long as the context has room for.
    num_predict: Option<i64>,
    /// The largest draft depth; below 1, nothing is drafted.
    draft_num_predict: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<TextOr<String>>,
    repeat_penalty: Option<f64>,
    /// 0 turns the penalties off. They are of all tokens.
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    /// Must be 0.
    mirostat: Option<f64>,
    /// Must be 1.
    tfs_z: Option<f64>,
    /// Must be 1.
    typical_p: Option<f64>,
    /// Must be true.
    penalize_newline: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Adds what `options` say to the fields that all APIs have.
///
/// # Errors
/// `Invalid`, naming the option.
pub(super) fn add(options: Option<Map<String, Value>>, common: &mut Common) -> Result<()> {
    let Some(mut options) = options else {
        return Ok(());
    };
    // As everywhere, integers may be written as 4.0.
    for value in options.values_mut() {
        let float = value.as_f64().filter(|_| value.is_f64());
        if let Some(n) = float.and_then(whole) {
            *value = n.into();
        }
    }
    let options: Options = object::read(&FieldPath::from(FIELD), options.into())?;
    options.check()?;
    options.fill(common);
    Ok(())
}

impl Options {
    /// Refuses what would change a text and is not done.
    fn check(&self) -> Result<()> {
        let at = FieldPath::from(FIELD);
        for (name, value, nothing) in [
            ("mirostat", self.mirostat, 0.0),
            ("tfs_z", self.tfs_z, 1.0),
            ("typical_p", self.typical_p, 1.0),
        ] {
            if value.is_some_and(|value| value != nothing) {
                let what = format!("is not supported: leave it out or set it to {nothing}");
                return wrong(at.key(name), what);
            }
        }
        if self.penalize_newline == Some(false) {
            return wrong(
                at.key("penalize_newline"),
                "is not supported: leave it out or set it to true",
            );
        }
        let penalties = [
            (self.repeat_penalty, 1.0),
            (self.presence_penalty, 0.0),
            (self.frequency_penalty, 0.0),
        ];
        let is_penalty = |(value, none): &(Option<f64>, f64)| value.is_some_and(|x| x != *none);
        if self.repeat_last_n.is_some_and(|n| n > 0) && penalties.iter().any(is_penalty) {
            return wrong(
                at.key("repeat_last_n"),
                "must be -1, for penalties of all tokens, or 0, for none",
            );
        }
        let is_other = |(name, value): &(&String, &Value)| !value.is_null() && !is_of_loader(name);
        match self.others.iter().find(is_other) {
            Some((name, _)) => wrong(at.key(name), "is not supported: leave it out"),
            None => Ok(()),
        }
    }

    fn fill(self, common: &mut Common) {
        if let Some(max) = self.num_predict {
            common.max_tokens = usize::try_from(max).ok().filter(|max| *max > 0);
        }
        if let Some(depth) = self.draft_num_predict {
            common.spec_length = Some(usize::try_from(depth).unwrap_or(0));
        }
        let (mut repeat, mut presence) = (self.repeat_penalty, self.presence_penalty);
        let mut frequency = self.frequency_penalty;
        if self.repeat_last_n == Some(0) {
            (repeat, presence, frequency) = (Some(1.0), Some(0.0), Some(0.0));
        }
        for (field, option) in [
            (&mut common.temperature, self.temperature),
            (&mut common.top_p, self.top_p),
            (&mut common.min_p, self.min_p),
            (&mut common.repetition_penalty, repeat),
            (&mut common.presence_penalty, presence),
            (&mut common.frequency_penalty, frequency),
        ] {
            *field = option.or(*field);
        }
        common.top_k = self.top_k.or(common.top_k);
        common.seed = self.seed.or(common.seed);
        common.stop = self.stop.or(common.stop.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn added(options: &Value) -> Result<Common> {
        let mut common = Common::default();
        add(options.as_object().cloned(), &mut common).map(|()| common)
    }

    #[test]
    fn options_become_fields() {
        let common = added(&json!({
            "num_predict": 7.0, "temperature": 0, "top_k": 40.0, "top_p": 0.9, "min_p": 0.1, "seed": 3,
            "stop": ["a"], "repeat_penalty": 1.1, "repeat_last_n": -1, "presence_penalty": 0.5,
            "frequency_penalty": null, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1, "typical_p": 1.0,
            "num_ctx": 1_000_000, "num_gpu": 99, "use_mmap": true, "unknown": null, "draft_num_predict": 4,
        }));
        let common = common.expect("fine");
        assert_eq!((common.max_tokens, common.seed), (Some(7), Some(3)));
        assert_eq!(common.spec_length, Some(4));
        assert_eq!((common.temperature, common.top_k), (Some(0.0), Some(40)));
        assert_eq!((common.top_p, common.min_p), (Some(0.9), Some(0.1)));
        assert_eq!(common.repetition_penalty, Some(1.1));
        assert_eq!(common.presence_penalty, Some(0.5));
        assert_eq!(common.frequency_penalty, None);
        assert_eq!(common.stop.expect("a stop").list(), ["a"]);
        let off = added(&json!({"repeat_last_n": 0, "repeat_penalty": 1.5})).expect("fine");
        assert_eq!(off.repetition_penalty, Some(1.0));
        for none in [-1, -2, 0] {
            let options = json!({"num_predict": none, "draft_num_predict": none});
            let common = added(&options).expect("fine");
            assert_eq!((common.max_tokens, common.spec_length), (None, Some(0)));
        }
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for (options, name) in [
            (json!({"mirostat": 1}), "mirostat"),
            (json!({"tfs_z": 0.5}), "tfs_z"),
            (json!({"typical_p": 0.7}), "typical_p"),
            (json!({"penalize_newline": false}), "penalize_newline"),
            (
                json!({"repeat_last_n": 64, "repeat_penalty": 1.1}),
                "repeat_last_n",
            ),
            (json!({"rope_frequency_base": 1e6}), "rope_frequency_base"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"stop": 1}), "stop"),
        ] {
            let error = added(&options).expect_err(name);
            assert_eq!(error.param(), Some(format!("options.{name}")), "{error}");
        }
        assert!(added(&json!({"repeat_last_n": 64})).is_ok());
    }
}
