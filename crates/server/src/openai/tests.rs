use super::*;
use crate::SamplingDefaults;
use foretoken_core::error::{Error, RequestErrorKind};
use foretoken_core::sampling::{Acceptance, LossyRule, SamplingParams};
use foretoken_engine::{CacheKey, RequestLimits};
use foretoken_text::grammar::Compiler;
use foretoken_text::{SpecialIds, Text};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;
use tokenizers::Tokenizer;

mod drafts;
mod parameters;
mod prompts;
mod ranges;
mod thinking;

/// A vocabulary of letters, a space and a BOS that the tokenizer puts in front.
fn text() -> &'static Arc<Text> {
    static TEXT: LazyLock<Arc<Text>> = LazyLock::new(|| {
        let mut vocab: Map<String, Value> = ('a'..='z')
            .map(String::from)
            .zip((0..).map(Value::from))
            .collect();
        vocab.insert("Ġ".into(), 26.into());
        vocab.insert("<s>".into(), 27.into());
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": [{"id": 27, "content": "<s>", "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [27], "tokens": ["<s>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        });
        let tokenizer =
            Tokenizer::from_bytes(tokenizer.to_string()).expect("a valid tokenizer.json");
        let special = SpecialIds {
            bos: Some(27),
            eos: Vec::new(),
        };
        let template =
            "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}";
        Arc::new(Text::new(tokenizer, special, Some(template)).expect("byte-level"))
    });
    &TEXT
}

fn with<T>(f: impl FnOnce(&Context<'_>) -> T) -> T {
    with_key(None, f)
}

fn with_key<T>(api_key: Option<&str>, f: impl FnOnce(&Context<'_>) -> T) -> T {
    with_defaults(&SamplingDefaults::default(), |context| {
        f(&Context { api_key, ..context })
    })
}

/// Calls `f` with the context of a server with these defaults.
fn with_defaults<T>(defaults: &SamplingDefaults, f: impl FnOnce(Context<'_>) -> T) -> T {
    static CACHE_KEY: LazyLock<CacheKey> = LazyLock::new(CacheKey::random);
    static GRAMMARS: LazyLock<Compiler> = LazyLock::new(|| Compiler::new(text().clone()));
    let limits = RequestLimits {
        max_model_len: 64,
        vocab_size: 28,
        max_logprobs: 5,
        max_waiting: 40,
        max_prompt_tokens: 64 * 40,
        spec_length: 4,
        generates: true,
        embedding_size: 8,
        takes_adapters: false,
    };
    f(Context {
        text: text(),
        limits: &limits,
        model_names: &["first".into(), "second".into()],
        adapters: None,
        defaults,
        fingerprint: None,
        tool_format: Some(foretoken_text::ToolFormat::Hermes),
        reasoning_format: None,
        thoughts: None,
        reasoning_budget: None,
        literal: None,
        api_key: None,
        strict_max_tokens: true,
        cache_key: &CACHE_KEY,
        grammars: &GRAMMARS,
        waiter: foretoken_text::grammar::Waiter::default(),
        embeddings: None,
        reranker: None,
        responses: &Arc::default(),
    })
}

/// `count` entries for `logit_bias`, all with ids of the vocabulary.
fn biases(count: usize) -> Value {
    let id = |i: usize| format!("{:0>1$}", i % 28, 2 + i / 28);
    (0..count).map(|i| (id(i), json!(1))).collect()
}

/// Reads a valid request whose fields are overridden by those of `body`.
fn completion(mut body: Value) -> Result<Job> {
    let fields = body.as_object_mut().expect("an object");
    fields.entry("prompt").or_insert("ab".into());
    with(|context| context.completion(body.to_string().as_bytes()))
}

fn chat(mut body: Value) -> Result<Job> {
    let fields = body.as_object_mut().expect("an object");
    fields
        .entry("messages")
        .or_insert(json!([{"role": "user", "content": "hi"}]));
    with(|context| context.chat(body.to_string().as_bytes()))
}

/// The message of a 400 that names `param`.
#[track_caller]
fn refused(result: Result<Job>, param: &str) -> String {
    let error = result.err().expect("refused");
    match error {
        Error::Request {
            kind: RequestErrorKind::Invalid | RequestErrorKind::ContextLengthExceeded,
            ..
        } => {
            assert_eq!(error.param().as_deref(), Some(param), "{error}");
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

/// The rows of a table: a field, JSON and what an error says.
fn rows(table: &str) -> impl Iterator<Item = (&str, Value, &str)> {
    table.trim().lines().map(|row| {
        let columns: Vec<&str> = row.split(" | ").collect();
        let [field, json, needle] = columns[..] else {
            panic!("three columns: {row}");
        };
        (field, serde_json::from_str(json).expect("JSON"), needle)
    })
}

/// llama.vim has the prompt of an instruction read while its user writes it.
#[test]
fn a_chat_may_only_be_read_into_the_cache() {
    let max = |fields: Value| chat(fields).map(|job| job.requests[0].max_tokens);
    for (fields, expected) in [
        (json!({"n_predict": 0}), Some(0)),
        (json!({"n_predict": 3}), Some(3)),
        (json!({"n_predict": -1}), None),
        (json!({"n_predict": 3, "max_tokens": 2}), Some(2)),
    ] {
        assert_eq!(max(fields.clone()).expect("accepted"), expected, "{fields}");
    }
    let searched = json!({"n_predict": 0, "use_beam_search": true});
    for body in [searched, json!({"n_predict": 64})] {
        refused(chat(body), "n_predict");
    }
    refused(completion(json!({"n_predict": 3})), "n_predict");
}

/// Clients of DeepSeek, Z.ai and OpenRouter do this.
#[test]
fn a_chat_may_say_that_the_model_is_not_to_think() {
    let disabled = json!({"type": "disabled"});
    chat(json!({"thinking": disabled, "reasoning": {}})).expect("accepted");
    // Thoughts that the model does not mark are left out.
    let job = chat(json!({"thinking": {"type": "enabled"}})).expect("accepted");
    assert!(job.warnings[0].contains("--reasoning-parser"));
    chat(json!({"enable_thinking": true, "thinking_budget": 9})).expect("accepted");
    for (field, value, instead) in [
        ("thinking_token_budget", json!(9), "--reasoning-parser"),
        ("reasoning", json!({"effort": "low"}), "reasoning_effort"),
    ] {
        let message = refused(chat(json!({field: value})), field);
        assert!(message.contains(instead), "{message}");
    }
}

#[test]
fn malformed_bodies_are_refused() {
    for body in ["", "{", "[]", "7", "{\"prompt\": \"a\",}"] {
        let error = with(|context| context.completion(body.as_bytes()))
            .err()
            .expect("refused");
        assert!(
            matches!(
                error,
                Error::Request {
                    kind: RequestErrorKind::Invalid,
                    param: None,
                    ..
                }
            ),
            "{body}"
        );
    }
    let error = completion(json!({"model": "third"}))
        .err()
        .expect("no such model");
    assert!(matches!(
        error,
        Error::Request {
            kind: RequestErrorKind::NotFound,
            ..
        }
    ));
    assert!(error.to_string().contains("first, second"), "{error}");
}

#[test]
fn edges_of_the_ranges_are_accepted() {
    let job = completion(json!({
        "model": "second", "temperature": 2, "top_p": 1, "top_k": -1, "min_p": 1, "repetition_penalty": 2,
        "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"0": -100, "27": 100.0},
        "seed": -2, "stop": vec!["é".repeat(512); 64], "stop_token_ids": vec![27; 1024], "ignore_eos": true,
        "min_tokens": 61, "max_tokens": 61, "n": 3, "best_of": 3, "suffix": "", "logprobs": 0,
        "stream": true, "stream_options": {"include_usage": true}, "spec_length": 0,
        "user": "me", "something": "unknown",
    }))
    .expect("accepted");
    assert_eq!((job.requests.len(), job.choices.len()), (3, 3));
    assert!(job.stream && job.include_usage && !job.header.speculates);
    assert_eq!(job.header.model, "first");
    let request = &job.requests[0];
    assert_eq!(request.prompt, [27, 0, 1]);
    assert_eq!(request.max_tokens, Some(61));
    assert_eq!(request.logprobs, Some(0));
    assert_eq!(request.spec_length, Some(0));
    assert_eq!(request.params.logit_bias, [(0, -100.0), (27, 100.0)]);
    assert_eq!(request.params.seed, u64::MAX - 1);
    assert_eq!(request.params.top_k, 0);
}

#[test]
fn null_is_absent() {
    let fields = "model temperature top_p top_k min_p repetition_penalty presence_penalty \
        frequency_penalty logit_bias stop stop_token_ids ignore_eos min_tokens allowed_token_ids \
        bad_words include_stop_str_in_output skip_special_tokens truncate_prompt_tokens \
        return_token_ids max_tokens n best_of suffix logprobs stream stream_options spec_length \
        acceptance posterior_threshold posterior_alpha lenience prediction cache_salt user seed \
        echo";
    let nulls: Map<String, Value> = (fields.split(' ').map(|f| (f.into(), Value::Null))).collect();
    let job = completion(nulls.into()).expect("accepted");
    let mut params = job.requests[0].params.clone();
    params.seed = 0;
    assert_eq!(params, SamplingParams::default());
    assert_eq!(job.requests[0].max_tokens, Some(16));
    assert!(job.header.speculates && !job.stream);
}

#[test]
fn every_choice_of_every_prompt_has_its_own_seed() {
    let seeds = |body: Value| -> Vec<u64> {
        let job = completion(body).expect("accepted");
        job.requests.iter().map(|r| r.params.seed).collect()
    };
    let seeded = || seeds(json!({"prompt": ["a", "a"], "n": 3, "seed": 5}));
    let unseeded = || seeds(json!({"prompt": ["a", "a"], "n": 3}));
    assert_eq!(
        seeded()[0],
        5,
        "one choice of one prompt has the seed as given"
    );
    assert_eq!(seeded(), seeded());
    // As in vLLM and llama.cpp, -1 is no seed.
    let random = || seeds(json!({"prompt": ["a", "a"], "n": 3, "seed": -1}));
    for unseeded in [&unseeded as &dyn Fn() -> Vec<u64>, &random] {
        assert_ne!(unseeded(), unseeded());
    }
    let of_chat = || {
        let message = json!({"role": "user", "content": "a"});
        let job = chat(json!({"messages": [message], "seed": -1}));
        job.expect("accepted").requests[0].params.seed
    };
    assert_ne!(of_chat(), of_chat());
    for mut seeds in [seeded(), unseeded()] {
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 6);
    }
}

#[test]
fn integers_may_have_a_point_but_no_fraction() {
    let job = completion(json!({
        "prompt": [[1.0, 2.0]], "max_tokens": 4.0, "n": 2.0, "seed": -3.0, "top_k": 5.0, "logprobs": 1.0,
        "stop_token_ids": [3.0], "min_tokens": 1.0, "spec_length": 2.0, "best_of": 2.0,
        "allowed_token_ids": [0.0, 3.0], "truncate_prompt_tokens": 2.0,
    }))
    .expect("accepted");
    let request = &job.requests[0];
    assert_eq!((job.requests.len(), &request.prompt[..]), (2, &[1, 2][..]));
    assert_eq!((request.max_tokens, request.logprobs), (Some(4), Some(1)));
    assert_eq!(request.params.seed, -3_i64 as u64);
    assert_eq!(request.params.top_k, 5);
    assert_eq!(request.params.stop_token_ids, [3]);
    let job = chat(json!({"max_completion_tokens": 3.0, "logprobs": true, "top_logprobs": 2.0}));
    assert_eq!(job.expect("accepted").requests[0].max_tokens, Some(3));
    let fields =
        "max_tokens n best_of seed top_k logprobs min_tokens spec_length truncate_prompt_tokens";
    for field in fields.split(' ') {
        let message = refused(completion(json!({field: 4.5})), field);
        assert!(message.contains("integer"), "{field}: {message}");
        refused(completion(json!({field: 1e300})), field);
    }
    refused(
        completion(json!({"stop_token_ids": [3.5]})),
        "stop_token_ids[0]",
    );
    refused(completion(json!({"prompt": [1.5]})), "prompt");
}

#[test]
fn a_field_is_refused_only_by_the_api_that_does_not_support_it() {
    for field in ["functions", "structural_tag", "documents"] {
        let asks = || json!({field: ["x"]});
        refused(completion(asks()), field);
        refused(chat(asks()), field);
    }
    assert!(completion(json!({"echo": true})).is_ok());
    refused(chat(json!({"echo": true})), "echo");
    assert!(chat(json!({"max_completion_tokens": 5})).is_ok());
    refused(
        completion(json!({"max_completion_tokens": 5})),
        "max_completion_tokens",
    );
    let asks = |value| json!({"stream": true, "stream_options": {"include_obfuscation": value}});
    assert!(chat(asks(false)).is_ok());
    refused(chat(asks(true)), "stream_options.include_obfuscation");
}

#[test]
fn a_tiny_temperature_is_greedy() {
    let job = completion(json!({"temperature": 1e-9})).expect("accepted");
    assert!(job.requests[0].params.is_greedy());
}
