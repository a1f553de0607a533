//! Known fields of request bodies (OpenAI's, vLLM's and those of similar servers) that this server does
//! not read. Values that ask for nothing are accepted; others are refused by name, because ignoring them
//! would silently do something else than requested.

use super::wire::wrong;
use crate::error::Result;
use serde_json::Value;

/// A field's name, whether a value asks for nothing, and the value to set if it cannot be left out.
type Field = (&'static str, fn(&Value) -> bool, Option<&'static str>);

/// The fields of both APIs. Fields that an API reads itself are not looked up for it.
const UNSUPPORTED: &[Field] = &[
    // Tools.
    ("tools", is_empty, None),
    ("tool_choice", is_no_choice, Some(r#""none""#)),
    ("functions", is_empty, None),
    ("function_call", is_no_choice, Some(r#""none""#)),
    // An empty object asks for a search.
    ("web_search_options", Value::is_null, None),
    ("documents", is_empty, None),
    // Structured output.
    ("structural_tag", is_empty, None),
    ("grammar", is_empty, None),
    ("ebnf", is_empty, None),
    ("regex", is_empty, None),
    ("json_schema", is_empty, None),
    // Media other than text.
    ("audio", is_empty, None),
    (
        "modalities",
        |v| is_empty(v) || matches!(v.as_array().map(Vec::as_slice), Some([one]) if one == "text"),
        Some(r#"["text"]"#),
    ),
    ("mm_processor_kwargs", is_empty, None),
    ("media_io_kwargs", is_empty, None),
    ("prompt_embeds", is_empty, None),
    ("input_embeds", is_empty, None),
    // The prompt.
    ("chat_template", is_empty, None),
    ("continue_final_message", is_empty, Some("false")),
    ("truncate_prompt_tokens", Value::is_null, None),
    (
        "truncation",
        |v| v.is_null() || v == "disabled",
        Some(r#""disabled""#),
    ),
    ("echo", is_empty, Some("false")),
    ("suffix", is_empty, None),
    // Sampling, and the end of the text.
    ("logits_processors", is_empty, None),
    ("custom_logit_processor", is_empty, None),
    ("use_beam_search", is_empty, Some("false")),
    (
        "best_of",
        |v| v.is_null() || v.as_f64() == Some(1.0),
        Some("1"),
    ),
    (
        "typical_p",
        |v| v.is_null() || v.as_f64() == Some(1.0),
        Some("1"),
    ),
    ("top_a", is_zero, Some("0")),
    ("mirostat", is_zero, Some("0")),
    ("stop_regex", is_empty, None),
    ("thinking_token_budget", Value::is_null, None),
    ("repetition_detection", is_empty, None),
    ("max_completion_tokens", Value::is_null, None),
    ("n_predict", Value::is_null, None),
    // The reply. `prompt_logprobs: 0` asks for log-probabilities, too.
    ("prompt_logprobs", Value::is_null, None),
    ("top_logprobs", is_zero, Some("0")),
    ("no_stop_trim", is_empty, Some("false")),
    ("return_tokens_as_token_ids", is_empty, Some("false")),
    ("return_token_ids", is_empty, Some("false")),
    ("return_token_strs", is_empty, Some("false")),
    ("return_hidden_states", is_empty, Some("false")),
    // Side effects, and what is kept from one request to the next.
    ("store", is_empty, Some("false")),
    ("background", is_empty, Some("false")),
    ("previous_response_id", Value::is_null, None),
    ("conversation", Value::is_null, None),
    ("container", Value::is_null, None),
    ("context_management", is_empty, None),
    ("mcp_servers", is_empty, None),
    ("priority", is_zero, Some("0")),
    ("kv_transfer_params", is_empty, None),
    ("lora_path", is_empty, None),
    ("vllm_xargs", is_empty, None),
];

/// Prefix of several vLLM fields, all for structured output; some are read.
const GUIDED: &str = "guided_";

/// Accepted fields: hints, names, and settings of features that are refused above.
const HARMLESS: &[&str] = &[
    "early_stopping",
    "include_reasoning",
    "length_penalty",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "user",
    "verbosity",
];

/// Maximum bytes of a value that asks for nothing.
const MAX_HARMLESS_BYTES: usize = 1024;

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Number(_) => false,
    }
}

fn is_zero(value: &Value) -> bool {
    value.is_null() || value.as_f64() == Some(0.0)
}

/// Whether the value is satisfied without calling a tool.
fn is_no_choice(value: &Value) -> bool {
    is_empty(value) || value == "none" || value == "auto"
}

/// What becomes of a field that an API does not read itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Treatment {
    /// Its value must ask for nothing.
    Checked,
    /// The same, as one of the many names with its prefix.
    CheckedByPrefix,
    /// Any value is accepted.
    Accepted,
    /// The name is unknown, which is logged.
    Unknown,
}

/// How the field `name` is treated.
pub(super) fn treatment(name: &str) -> Treatment {
    match name {
        _ if UNSUPPORTED.iter().any(|(known, ..)| *known == name) => Treatment::Checked,
        _ if name.starts_with(GUIDED) => Treatment::CheckedByPrefix,
        _ if HARMLESS.contains(&name) => Treatment::Accepted,
        _ => Treatment::Unknown,
    }
}

/// Checks the value of a field that an API does not read itself, as JSON text.
///
/// # Errors
/// `Invalid`, if it asks for something the server does not do.
pub(super) fn check(name: &str, json: &str) -> Result<()> {
    let known = UNSUPPORTED.iter().find(|(field, ..)| *field == name);
    let (harmless, instead) = match known {
        Some((_, harmless, instead)) => (*harmless, *instead),
        None => (is_empty as fn(&Value) -> bool, None),
    };
    // Whatever is long asks for something.
    let value = Some(json).filter(|json| json.len() <= MAX_HARMLESS_BYTES);
    let value = value.and_then(|json| serde_json::from_str(json).ok());
    if value.is_some_and(|value| harmless(&value)) {
        return Ok(());
    }
    let instead = instead.map_or_else(String::new, |value| format!(" or set it to {value}"));
    wrong(name, format!("is not supported: leave it out{instead}"))
}

#[cfg(test)]
mod tests {
    use super::super::object::Object;
    use super::*;
    use crate::error::Error;
    use serde_json::json;

    fn checked(name: &str, value: Value) -> Result<()> {
        let body = json!({name: value, "model": "m"}).to_string();
        let read: &[&[&str]] = &[&["model"]];
        Object::parse(body.as_bytes(), read)?.check_others(read)
    }

    #[test]
    fn fields_that_ask_for_something_are_refused_by_name() {
        for (name, value) in [
            ("tools", json!([{"type": "function"}])),
            ("tool_choice", json!("required")),
            ("tool_choice", json!({"type": "function"})),
            ("functions", json!([{"name": "f"}])),
            ("function_call", json!({"name": "f"})),
            ("web_search_options", json!({})),
            ("documents", json!([{"text": "t"}])),
            ("guided_decoding_backend", json!("xgrammar")),
            ("grammar", json!("root ::= a")),
            ("json_schema", json!({"type": "object"})),
            ("audio", json!({"voice": "alloy"})),
            ("modalities", json!(["text", "audio"])),
            ("modalities", json!(["audio"])),
            ("mm_processor_kwargs", json!({"num_crops": 4})),
            ("prompt_embeds", json!("AAAA")),
            ("chat_template", json!("{{ x }}")),
            ("continue_final_message", json!(true)),
            ("truncate_prompt_tokens", json!(-1)),
            ("echo", json!(true)),
            ("suffix", json!("x")),
            ("logits_processors", json!(["x"])),
            ("use_beam_search", json!(true)),
            ("best_of", json!(2)),
            ("typical_p", json!(0.5)),
            ("thinking_token_budget", json!(0)),
            ("max_completion_tokens", json!(7)),
            ("prompt_logprobs", json!(0)),
            ("top_logprobs", json!(1)),
            ("return_tokens_as_token_ids", json!(true)),
            ("return_token_ids", json!(true)),
            ("store", json!(true)),
            ("priority", json!(-1)),
            ("kv_transfer_params", json!({"do_remote_decode": true})),
            ("vllm_xargs", json!({"a": 1})),
        ] {
            match checked(name, value.clone()) {
                Err(Error::Request { param, message, .. }) => {
                    assert_eq!(param.as_deref(), Some(name));
                    assert!(message.starts_with(&format!("{name} is not supported: leave it out")));
                }
                other => panic!("{name} {value}: {other:?}"),
            }
        }
        let error = checked("modalities", json!(["audio"])).unwrap_err();
        assert!(
            error.to_string().ends_with(r#" or set it to ["text"]"#),
            "{error}"
        );
    }

    #[test]
    fn fields_that_ask_for_nothing_are_accepted() {
        for (name, value) in [
            ("tools", json!([])),
            ("tool_choice", json!("none")),
            ("tool_choice", json!("auto")),
            ("function_call", json!("auto")),
            ("modalities", json!(["text"])),
            ("echo", json!(false)),
            ("best_of", json!(1)),
            ("typical_p", json!(1.0)),
            ("top_logprobs", json!(0)),
            ("store", json!(false)),
            ("priority", json!(0)),
            ("logits_processors", json!([])),
            ("kv_transfer_params", json!({})),
            ("metadata", json!({"a": "b"})),
            ("parallel_tool_calls", json!(true)),
            ("user", json!("me")),
            ("an_unknown_name", json!({"a": [1]})),
            ("model", json!("read elsewhere")),
        ] {
            assert!(checked(name, value.clone()).is_ok(), "{name} {value}");
        }
        for (name, ..) in UNSUPPORTED {
            assert!(checked(name, Value::Null).is_ok(), "{name}");
        }
    }

    #[test]
    fn fields_that_an_api_reads_itself_are_not_looked_up() {
        let body = br#"{"echo": true}"#;
        let checked = |read: &[&[&str]]| Object::parse(body, read)?.check_others(read);
        assert!(checked(&[&["model"], &["echo"]]).is_ok());
        assert!(checked(&[&["model"]]).is_err());
    }
}
