//! `adapter_config.json`, as PEFT writes it.

use crate::config::keys::is_one_of;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};
use std::path::Path;

/// The file's name.
const FILE: &str = "adapter_config.json";
/// Maximum number of entries of `rank_pattern`, and of `alpha_pattern`.
const MAX_PATTERNS: usize = 4096;
/// Maximum number of those that are regular expressions.
const MAX_REGEXES: usize = 64;
/// Maximum bytes of a compiled one.
const MAX_PATTERN_BYTES: usize = 1 << 18;

/// Keys that change nothing once an adapter is trained, or that only say which tensors there are.
const WITHOUT_EFFECT: &str = "
    arrow_config_path auto_mapping base_model_name_or_path corda_config ensure_weight_tying
    eva_config exclude_modules inference_mode layers_pattern layers_to_transform loftq_config
    lora_dropout lora_ga_config megatron_core peft_type peft_version qalora_group_size revision
    runtime_config target_modules task_type";

/// Ranks and scales of an adapter.
#[derive(Debug)]
pub(super) struct LoraConfig {
    rank: usize,
    alpha: f64,
    /// Whether the scale is alpha over the root of the rank (Kalajdzievski 2023, arXiv 2312.03732).
    has_root: bool,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
}

/// Values of the modules whose names end with a pattern.
type Patterns<T> = Vec<(ModulePattern, T)>;

impl LoraConfig {
    /// Reads the configuration of the adapter in `folder`.
    ///
    /// # Errors
    /// A setup error that names the file and the key that is missing or not supported.
    pub fn read(folder: &Path) -> Result<Self> {
        let file = folder.join(FILE);
        if !file.is_file() {
            return Err(Error::in_file(
                folder,
                format!("it has no {FILE}: an adapter is a folder as PEFT writes it"),
            ));
        }
        let text = files::read_text(&file)?;
        let keys: Map<String, Value> =
            serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
        Self::of(&keys).map_err(|what| Error::in_file(&file, what))
    }

    fn of(keys: &Map<String, Value>) -> Result<Self, String> {
        check(keys)?;
        let rank = keys.get("r").and_then(Value::as_u64);
        let rank = rank.filter(|&rank| (1..=1 << 20).contains(&rank));
        let rank = rank.ok_or("r must be a whole number from 1 to 1048576")?;
        let alpha = keys.get("lora_alpha").and_then(finite);
        Ok(Self {
            rank: rank as usize,
            alpha: alpha.ok_or("lora_alpha must be a number that 32 bits can hold")?,
            has_root: keys.get("use_rslora") == Some(&Value::Bool(true)),
            ranks: patterns(keys, "rank_pattern", |value| {
                let rank = value.as_u64().filter(|&rank| rank > 0);
                usize::try_from(rank?).ok()
            })?,
            alphas: patterns(keys, "alpha_pattern", finite)?,
        })
    }

    /// The rank and the scale of the module with this name.
    ///
    /// # Errors
    /// If patterns that the name matches disagree.
    pub fn of_module(&self, name: &str) -> Result<(usize, f64), String> {
        let rank = matching(&self.ranks, "rank_pattern", name)?.unwrap_or(self.rank);
        let alpha = matching(&self.alphas, "alpha_pattern", name)?.unwrap_or(self.alpha);
        let divisor = rank as f64;
        let divisor = if self.has_root {
            divisor.sqrt()
        } else {
            divisor
        };
        Ok((rank, alpha / divisor))
    }
}

/// A number that a scale of 32 bits can hold.
fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|&value| (value as f32).is_finite())
}

/// Refuses what is not implemented, and what is not known.
fn check(keys: &Map<String, Value>) -> Result<(), String> {
    let get = |key: &str| keys.get(key).unwrap_or(&Value::Null);
    if get("peft_type") != "LORA" {
        let found = clipped(&get("peft_type").to_string());
        return Err(format!("peft_type {found} is not supported: only LORA is"));
    }
    for (key, value) in keys {
        let is_empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            _ => false,
        };
        let is_fine = match key.as_str() {
            "r" | "lora_alpha" | "rank_pattern" | "alpha_pattern" => true,
            "use_rslora" => value.is_null() || value.is_boolean(),
            "bias" => value.is_null() || value == "none",
            // Others have changed the weights of the base.
            "init_lora_weights" => {
                value.is_null()
                    || value.is_boolean()
                    || ["gaussian", "eva", "orthogonal"]
                        .iter()
                        .any(|one| value == one)
            }
            key => is_empty || is_one_of(key, WITHOUT_EFFECT),
        };
        if !is_fine {
            let (key, found) = (clipped(key), clipped(&value.to_string()));
            let instead = match key.as_str() {
                "bias" => ": only \"none\" is",
                "use_dora" => ": DoRA's magnitudes are not implemented",
                "fan_in_fan_out" => ": weights have outputs as rows",
                "modules_to_save" => ": only products of low rank are",
                "init_lora_weights" => {
                    ": the adapter belongs to a base with other weights; convert it with PEFT"
                }
                _ => "",
            };
            return Err(format!("{key} {found} is not supported{instead}"));
        }
    }
    Ok(())
}

fn patterns<T>(
    keys: &Map<String, Value>,
    key: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Patterns<T>, String> {
    let map = match keys.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(map)) if map.len() <= MAX_PATTERNS => map,
        Some(_) => {
            return Err(format!(
                "{key} must be an object with at most {MAX_PATTERNS} numbers"
            ));
        }
    };
    let entries = map.iter().map(|(pattern, value)| {
        let read = read(value);
        let wrong = || format!("{key}: {} has no valid number", clipped(pattern));
        let compiled = ModulePattern::of(pattern).map_err(|e| format!("{key}: {e}"))?;
        Ok((compiled, read.ok_or_else(wrong)?))
    });
    let entries = entries.collect::<Result<Patterns<T>, String>>()?;
    let is_regex = |entry: &&(ModulePattern, T)| matches!(entry.0, ModulePattern::Regex(_));
    if entries.iter().filter(is_regex).count() > MAX_REGEXES {
        return Err(format!(
            "{key} has more than {MAX_REGEXES} regular expressions"
        ));
    }
    Ok(entries)
}

/// The value of the patterns that `name` matches, as PEFT matches them: the name, or what follows one of its dots.
fn matching<T: Copy + PartialEq>(
    patterns: &Patterns<T>,
    key: &str,
    name: &str,
) -> Result<Option<T>, String> {
    let mut found: Option<T> = None;
    for (pattern, value) in patterns {
        if pattern.matches(name) {
            if found.is_some_and(|found| found != *value) {
                return Err(format!("{key} has several values for {}", clipped(name)));
            }
            found = Some(*value);
        }
    }
    Ok(found)
}

/// A pattern of names of modules.
#[derive(Debug, Clone)]
enum ModulePattern {
    /// The name itself.
    Whole(String),
    /// The end of the name, after a dot.
    End(String),
    Regex(Regex),
}

impl ModulePattern {
    /// # Errors
    /// If it is none.
    fn of(pattern: &str) -> Result<Self, String> {
        let is_plain = |c: char| c.is_alphanumeric() || "_.-".contains(c);
        if let Some(whole) = pattern.strip_prefix('^')
            && whole.chars().all(is_plain)
        {
            return Ok(Self::Whole(whole.to_owned()));
        }
        if pattern.chars().all(is_plain) {
            return Ok(Self::End(pattern.to_owned()));
        }
        let whole = format!(r"^(.*\.)?({pattern})$");
        let regex = RegexBuilder::new(&whole)
            .size_limit(MAX_PATTERN_BYTES)
            .build();
        let regex = regex.map_err(|_| format!("{} is no pattern", clipped(pattern)))?;
        Ok(Self::Regex(regex))
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Whole(whole) => name == whole,
            Self::End(end) => {
                let before = name.strip_suffix(end.as_str());
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }
            Self::Regex(regex) => regex.is_match(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(change: Value) -> Result<LoraConfig, String> {
        let mut keys = json!({
            "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_dora": false, "modules_to_save": null,
            "target_modules": ["q_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "loftq_config": {},
        });
        for (key, value) in change.as_object().unwrap() {
            keys[key] = value.clone();
        }
        LoraConfig::of(keys.as_object().unwrap())
    }

    #[test]
    fn scales_follow_rank_alpha_and_patterns() {
        let name = "model.layers.3.self_attn.q_proj";
        let of = |change: Value| config(change).unwrap().of_module(name).unwrap();
        assert_eq!(of(json!({})), (8, 2.));
        assert_eq!(of(json!({"use_rslora": true, "r": 16})), (16, 4.));
        assert_eq!(of(json!({"rank_pattern": {"q_proj": 4}})), (4, 4.));
        assert_eq!(of(json!({"rank_pattern": {"_proj": 4}})), (8, 2.));
        let exact = "^model.layers.3.self_attn.q_proj";
        assert_eq!(of(json!({"rank_pattern": {exact: 2}})), (2, 8.));
        let third = json!({"alpha_pattern": {r"3\.self_attn\.[qk]_proj": 8}});
        assert_eq!(of(third), (8, 1.));
        let second = json!({"alpha_pattern": {r"2\.self_attn\.[qk]_proj": 8}});
        assert_eq!(of(second), (8, 2.));
        let both = json!({"rank_pattern": {"q_proj": 4, "self_attn.q_proj": 2}});
        config(both).unwrap().of_module(name).unwrap_err();
    }

    /// Keys of an adapter, and what an error says of them.
    const REFUSED: &str = r#"
{"peft_type": "LOHA"} | peft_type "LOHA"
{"bias": "all"} | bias "all" is not supported: only "none"
{"use_dora": true} | use_dora true
{"modules_to_save": ["lm_head"]} | modules_to_save
{"fan_in_fan_out": true} | fan_in_fan_out true
{"init_lora_weights": "pissa"} | init_lora_weights
{"layer_replication": [[0, 1]]} | layer_replication
{"alora_invocation_tokens": [1]} | alora_invocation_tokens
{"trainable_token_indices": [1]} | trainable_token_indices
{"lora_bias": true} | lora_bias true
{"use_of_tomorrow": 3} | use_of_tomorrow 3 is not supported
{"r": 0} | r must be
{"r": "8"} | r must be
{"lora_alpha": null} | lora_alpha must be
{"lora_alpha": 1e39} | lora_alpha must be
{"alpha_pattern": {"q_proj": -1e39}} | alpha_pattern: q_proj
{"rank_pattern": {"q_proj": -1}} | rank_pattern: q_proj
{"rank_pattern": [1]} | rank_pattern must be an object
"#;

    #[test]
    fn what_is_not_supported_is_named() {
        for row in REFUSED.trim().lines() {
            let (change, needle) = row.split_once(" | ").expect("two columns");
            let change = serde_json::from_str::<Value>(change).expect("JSON");
            let error = config(change).unwrap_err();
            assert!(error.contains(needle), "{needle}: {error}");
        }
        let many = (0..65).map(|n| (format!("q_{n}|k"), json!(1)));
        let many: Map<String, Value> = many.collect();
        for (pattern, needle) in [
            (json!({"q_(": 1}), "is no pattern"),
            (json!(many), "more than 64 regular"),
        ] {
            let error = config(json!({ "rank_pattern": pattern })).unwrap_err();
            assert!(error.contains(needle), "{error}");
        }
    }
}
