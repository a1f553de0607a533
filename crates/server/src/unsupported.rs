//! Known fields of request bodies (OpenAI's, vLLM's and those of similar servers) that this server does
//! not read. Values that ask for nothing are accepted; others are refused by name, because ignoring them
//! would silently do something else than requested.

use super::wire::wrong;
use foretoken_core::error::Result;
use serde_json::Value;

/// The values of a field that ask for nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Nothing {
    /// Null alone: whatever else there is asks for something.
    Null,
    /// Null, and what is empty or false.
    Empty,
    False,
    True,
    Zero,
    One,
    /// A value that is satisfied without calling a tool.
    NoTool,
    /// This text.
    Text(&'static str),
    /// A list of this text.
    List(&'static str),
    /// The order of bytes that the server sends, which is that of all machines that it runs on.
    LittleEndian,
    /// [`LOADER_OPTIONS`].
    Loading,
}

use Nothing::{Empty, False, List, LittleEndian, Loading, NoTool, Null, One, Text, True, Zero};

/// The fields of all APIs. Fields that an API reads itself are not looked up for it; whatever one reads is here, so that
/// the others do not ignore it.
const UNSUPPORTED: &[(&str, Nothing)] = &[
    // What other APIs here call it.
    ("messages", Empty),
    ("prompt", Empty),
    ("input", Empty),
    ("instructions", Empty),
    ("template", Empty),
    ("context", Empty),
    ("raw", False),
    ("options", Loading),
    ("system", Empty),
    ("max_output_tokens", Null),
    ("stop_sequences", Empty),
    ("text", Empty),
    ("output_config", Empty),
    ("output_format", Empty),
    ("format", Empty),
    ("thinking", Null),
    ("enable_thinking", Null),
    ("thinking_token_budget", Null),
    ("thinking_budget", Null),
    ("think", Null),
    ("reasoning", Empty),
    ("reasoning_effort", Empty),
    ("include", Empty),
    ("logprobs", False),
    ("chat_template_kwargs", Empty),
    ("add_generation_prompt", True),
    ("add_special_tokens", False),
    // Tools.
    ("tools", Empty),
    ("tool_choice", NoTool),
    ("functions", Empty),
    ("function_call", NoTool),
    // An empty object asks for a search.
    ("web_search_options", Null),
    ("documents", Empty),
    // Structured output.
    ("structural_tag", Empty),
    ("grammar", Empty),
    ("ebnf", Empty),
    ("regex", Empty),
    ("json_schema", Empty),
    // Media other than text.
    ("audio", Empty),
    ("images", Empty),
    ("modalities", List("text")),
    ("mm_processor_kwargs", Empty),
    ("media_io_kwargs", Empty),
    ("prompt_embeds", Empty),
    ("input_embeds", Empty),
    ("modality", Text("text")),
    // The prompt.
    ("chat_template", Empty),
    ("continue_final_message", False),
    ("truncate_prompt_tokens", Null),
    ("truncation", Text("disabled")),
    ("truncation_side", Text("left")),
    ("truncation_direction", Text("Right")),
    ("padding", Text("do_not_pad")),
    ("input_ids", Empty),
    ("echo", False),
    ("suffix", Empty),
    // Sampling, and the end of the text.
    ("logits_processors", Empty),
    ("custom_logit_processor", Empty),
    ("use_beam_search", False),
    ("best_of", One),
    ("typical_p", One),
    ("top_a", Zero),
    ("mirostat", Zero),
    ("dry_multiplier", Zero),
    ("xtc_probability", Zero),
    ("dynatemp_range", Zero),
    ("stop_regex", Empty),
    ("repetition_detection", Empty),
    ("max_completion_tokens", Null),
    ("n_predict", Null),
    ("watermark", Empty),
    ("watermarking", False),
    // The reply. `prompt_logprobs: 0` asks for log-probabilities, too.
    ("prompt_logprobs", Null),
    ("top_logprobs", Zero),
    ("n_probs", Zero),
    ("logprob_token_ids", Empty),
    ("no_stop_trim", False),
    ("return_tokens_as_token_ids", False),
    ("return_token_ids", False),
    ("return_token_strs", False),
    ("return_hidden_states", False),
    ("return_meta_info", False),
    ("return_prompt_token_ids", False),
    ("separate_reasoning", True),
    ("stream_reasoning", True),
    // Embeddings, and what is ranked.
    ("input_type", Empty),
    ("prompt_name", Empty),
    ("late_chunking", False),
    ("normalize", True),
    ("normalized", True),
    ("output_dimension", Null),
    ("output_dtype", Text("float")),
    ("embed_dtype", Text("float32")),
    ("embedding_type", Text("float")),
    ("embedding_types", List("float")),
    ("endianness", LittleEndian),
    ("rank_fields", List("text")),
    ("raw_scores", False),
    ("max_tokens_per_query", Zero),
    // Side effects, and what is kept from one request to the next.
    ("moderation", Empty),
    ("compaction", Empty),
    ("store", False),
    ("background", False),
    ("previous_response_id", Null),
    ("conversation", Null),
    ("thread", Null),
    ("container", Null),
    ("context_management", Empty),
    ("mcp_servers", Empty),
    ("use_activation", True),
    ("priority", Zero),
    ("kv_transfer_params", Empty),
    ("ec_transfer_params", Empty),
    ("session_params", Empty),
    ("lora_path", Empty),
    ("vllm_xargs", Empty),
    ("custom_params", Empty),
];

/// Prefix of several vLLM fields, all for structured output; some are read.
const GUIDED: &str = "guided_";

/// Accepted fields: hints, names, and settings of features that are refused above.
const HARMLESS: &[&str] = &[
    "client_metadata",
    "early_stopping",
    "include_reasoning",
    "keep_alive",
    "length_penalty",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "user",
    "verbosity",
];

/// Ollama's options about how a model is loaded, which are the operator's here, and settings of what is refused.
const LOADER_OPTIONS: &[&str] = &[
    "embedding_only",
    "f16_kv",
    "keep_alive",
    "logits_all",
    "low_vram",
    "main_gpu",
    "mirostat_eta",
    "mirostat_tau",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_gqa",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

/// Maximum bytes of a value that asks for nothing.
const MAX_HARMLESS_BYTES: usize = 1024;

impl Nothing {
    /// Whether `value` asks for nothing.
    fn is(self, value: &Value) -> bool {
        match value {
            Value::Null => true,
            _ if self == Null => false,
            Value::Bool(value) => *value == (self == True),
            Value::String(text) => match self {
                NoTool => matches!(text.as_str(), "" | "none" | "auto"),
                Text(harmless) => text.is_empty() || text == harmless,
                LittleEndian => matches!(text.as_str(), "" | "native" | "little"),
                _ => text.is_empty(),
            },
            Value::Array(list) => match (self, &list[..]) {
                (List(harmless), [one]) => one == harmless,
                _ => list.is_empty(),
            },
            Value::Object(map) => map
                .iter()
                .all(|(name, value)| self == Loading && (value.is_null() || is_of_loader(name))),
            Value::Number(number) => match self {
                Zero => number.as_f64() == Some(0.0),
                One => number.as_f64() == Some(1.0),
                _ => false,
            },
        }
    }

    /// The value to set if the field cannot be left out.
    fn instead(self) -> Option<String> {
        match self {
            Null | Empty | Loading => None,
            False => Some("false".into()),
            True => Some("true".into()),
            Zero => Some("0".into()),
            One => Some("1".into()),
            NoTool => Some(Value::from("none").to_string()),
            LittleEndian => Some(Value::from("little").to_string()),
            Text(harmless) => Some(Value::from(harmless).to_string()),
            List(harmless) => Some(Value::from(vec![harmless]).to_string()),
        }
    }
}

/// Whether an option of Ollama's API asks for nothing that a request can have.
pub(super) fn is_of_loader(name: &str) -> bool {
    LOADER_OPTIONS.contains(&name)
}

/// How the server treats a field that an API does not read itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Treatment {
    /// The field's value must ask for nothing.
    Checked,
    /// The field's value must ask for nothing. The field is known by its prefix, which many names have.
    CheckedByPrefix,
    /// Any value is accepted.
    Accepted,
    /// The name is unknown, which is logged.
    Unknown,
}

/// Returns the treatment of the field `name`.
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
    let known = UNSUPPORTED.iter().find(|(field, _)| *field == name);
    let nothing = known.map_or(Empty, |(_, nothing)| *nothing);
    // Whatever is long asks for something.
    let value = Some(json).filter(|json| json.len() <= MAX_HARMLESS_BYTES);
    let value = value.and_then(|json| serde_json::from_str(json).ok());
    if value.is_some_and(|value| nothing.is(&value)) {
        return Ok(());
    }
    let instead = nothing.instead();
    let instead = instead.map_or_else(String::new, |value| format!(" or set it to {value}"));
    let otherwise = match name {
        "messages" => "; /v1/chat/completions takes it",
        "prompt" => "; /v1/completions takes it",
        "reasoning" => "; a chat has reasoning_effort for it",
        "thinking" | "enable_thinking" | "thinking_token_budget" | "thinking_budget" => {
            "; a chat may have it"
        }
        "think" => "; a chat has enable_thinking for it",
        "prompt_logprobs" => "; a completion has echo and logprobs for it",
        _ => "",
    };
    let what = format!("is not supported: leave it out{instead}{otherwise}");
    wrong(name, what)
}

#[cfg(test)]
mod tests;
