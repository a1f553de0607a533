//! Parameters that few requests have.

use super::*;
use crate::wire;
use foretoken_text::Text;

fn ids(text: &str) -> Vec<u32> {
    super::text().encode(text, false).expect("encodes")
}

#[test]
fn top_p_0_keeps_the_most_probable_token() {
    let job = completion(json!({"top_p": 0})).expect("accepted");
    let top_p = job.requests[0].params.top_p;
    assert!(top_p > 0.0 && top_p < 1e-30, "{top_p}");
}

#[test]
fn every_integer_may_have_a_point() {
    // As typed above; whoever adds an integer field adds it here.
    let common = [
        "max_tokens",
        "n",
        "top_k",
        "seed",
        "min_tokens",
        "spec_length",
    ];
    let completions = ["best_of", "logprobs", "truncate_prompt_tokens"];
    let chats = [
        "top_logprobs",
        "max_completion_tokens",
        "truncate_prompt_tokens",
    ];
    let known = |names: &[&str], of: &[&str]| of.iter().all(|name| names.contains(name));
    assert!(known(wire::names::<Common>(), &common));
    assert!(known(wire::names::<wire::Completion>(), &completions));
    assert!(known(wire::names::<wire::ChatFields>(), &chats));
    for field in common.iter().chain(&completions) {
        completion(json!({*field: 1.0, "max_tokens": 2.0, "echo": true})).expect("accepted");
    }
    for field in common.iter().chain(&chats) {
        chat(json!({*field: 1.0, "logprobs": true, "max_tokens": 2.0})).expect("accepted");
    }
}

#[test]
fn allowed_ids_become_a_mask() {
    let job = completion(json!({"allowed_token_ids": [3, 27, 3]})).expect("accepted");
    let allowed = job.requests[0].params.allowed.clone().expect("a mask");
    let all: Vec<u32> = (0..40).filter(|&id| allowed.allows(id)).collect();
    assert_eq!(all, [3, 27]);
    // The largest list that a body may have is one of plain numbers.
    let many: Vec<u32> = (0..100_000).map(|i| i % 28).collect();
    assert!(completion(json!({"allowed_token_ids": many})).is_ok());
}

#[test]
fn bad_words_are_forbidden_at_the_beginning_and_after_a_space() {
    let words = |value: Value| {
        let job = chat(json!({"bad_words": value})).expect("accepted");
        job.requests[0].params.bad_words.to_vec()
    };
    let expected = [ids("ab"), ids(" ab"), ids("c d"), ids(" c d")];
    assert_eq!(words(json!(["ab", " c d", "ab"])), expected);
    assert_eq!(words(json!("ab")), expected[..2]);
    assert!(words(json!([])).is_empty());
}

#[test]
fn the_best_of_several_are_asked_for() {
    let body = json!({"prompt": ["a", "b"], "n": 2, "best_of": 5, "seed": 1});
    let job = completion(body).expect("accepted");
    assert_eq!((job.requests.len(), job.choices.len()), (10, 10));
    assert_eq!(job.header.choices_per_prompt, 5);
    assert_eq!(job.header.shown_per_prompt, 2);
    // They are scored, but nobody asked to see the scores.
    assert_eq!(job.requests[0].logprobs, Some(0));
    assert_eq!(job.header.logprobs, None);
    let message = refused(completion(json!({"n": 3, "best_of": 2})), "best_of");
    assert!(message.contains("between 3 and 128"), "{message}");
    let streamed = |n: usize| completion(json!({"n": n, "best_of": 2, "stream": true}));
    let message = refused(streamed(1), "best_of");
    assert!(
        message.contains("must equal n (1) if stream is true"),
        "{message}"
    );
    assert!(streamed(2).is_ok());
    refused(
        completion(json!({"prompt": vec!["a"; 21], "best_of": 2})),
        "prompt",
    );
    refused(chat(json!({"best_of": 2})), "best_of");
}

#[test]
fn an_empty_text_begins_with_bos() {
    let prompt = |body: Value| {
        let job = completion(body).expect("accepted");
        job.requests[0].prompt.clone()
    };
    assert_eq!(prompt(json!({"prompt": ""})), [27]);
    let both = completion(json!({"prompt": ["", "a"], "echo": true})).expect("accepted");
    assert_eq!(both.requests[0].prompt, [27]);
    let without = json!({"prompt": "", "add_special_tokens": false});
    let message = refused(completion(without), "prompt");
    assert!(message.contains("add_special_tokens is false"), "{message}");
    refused(completion(json!({"prompt": [[]]})), "prompt");
    // The line break has no token.
    let message = with_text(&without_bos(), |context| {
        refused(context.completion(br#"{"prompt": "\n"}"#), "prompt")
    });
    assert!(message.contains("the model has no BOS token"), "{message}");
    // A BOS that the tokenizer does not put in front by itself.
    let prompt = with_text(&never_adding_bos(), |context| {
        let job = context.completion(br#"{"prompt": ""}"#).expect("accepted");
        job.requests[0].prompt.clone()
    });
    assert_eq!(prompt, [27]);
}

#[test]
fn the_last_tokens_of_a_prompt_are_kept() {
    let prompt = |body: Value| {
        let job = completion(body).expect("accepted");
        assert_eq!(job.header.prompt_tokens, job.requests[0].prompt.len());
        job.requests[0].prompt.clone()
    };
    let cut = |count: i64| prompt(json!({"prompt": "abcd", "truncate_prompt_tokens": count}));
    // The BOS that the tokenizer adds stays.
    assert_eq!(cut(3), [27, 2, 3]);
    assert_eq!(cut(1), [27]);
    assert_eq!(cut(64), [27, 0, 1, 2, 3]);
    let plain = json!({"prompt": [5, 6, 7], "truncate_prompt_tokens": 2});
    assert_eq!(prompt(plain), [6, 7]);
    // -1 keeps what the context has room for.
    let long = |max_tokens: usize| {
        let text = "ab".repeat(500);
        let body = json!({"prompt": text, "truncate_prompt_tokens": -1, "max_tokens": max_tokens});
        prompt(body).len()
    };
    assert_eq!((long(10), long(63)), (54, 1));
    let echoed = json!({"prompt": "abcd", "truncate_prompt_tokens": 3, "echo": true});
    let mut job = completion(echoed).expect("accepted");
    let event = foretoken_engine::Event::Tokens {
        tokens: Vec::new(),
        round: None,
        finish: Some(foretoken_engine::FinishReason::Length),
        spec: foretoken_engine::SpecUsage::default(),
        cached_tokens: 0,
    };
    let piece = job.choices[0].on_event(text(), event).expect("fine");
    assert_eq!(piece.text(), "cd");

    let messages = json!([{"role": "user", "content": "a".repeat(500)}]);
    let body = json!({"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": 4});
    let job = chat(body).expect("accepted");
    assert_eq!(job.requests[0].prompt, [0; 60]);
}

#[test]
fn the_servers_defaults_hold_where_a_request_names_none() {
    let defaults = SamplingDefaults::from_json(
        r#"{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1,
            "max_new_tokens": 9}"#,
    )
    .expect("fine");
    let ask = |body: Value| {
        with_defaults(&defaults, |context| {
            let body = body.to_string();
            let job = if body.contains("messages") {
                context.chat(body.as_bytes())
            } else {
                context.completion(body.as_bytes())
            };
            job.expect("accepted").requests.remove(0)
        })
    };
    let messages = || json!([{"role": "user", "content": "hi"}]);
    let mut request = ask(json!({"prompt": "a"}));
    request.params.seed = 0;
    let expected = SamplingParams {
        temperature: 0.6,
        top_p: 0.9,
        top_k: 20,
        min_p: 0.1,
        repetition_penalty: 1.1,
        ..SamplingParams::default()
    };
    assert_eq!(request.params, expected);
    assert_eq!(request.max_tokens, Some(9));
    let request = ask(json!({"messages": messages()}));
    assert_eq!((request.params.top_k, request.max_tokens), (20, Some(9)));
    let request = ask(json!({
        "messages": messages(), "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0,
        "repetition_penalty": 1, "max_completion_tokens": 30,
    }));
    assert!(request.params.is_greedy());
    assert_eq!((request.params.top_p, request.params.top_k), (1.0, 0));
    assert_eq!(request.params.min_p, 0.0);
    assert_eq!(request.params.repetition_penalty, 1.0);
    // A default length is not more than the context leaves; one that is asked for is refused.
    assert_eq!(request.max_tokens, Some(30));
    let long = json!([{"role": "user", "content": "a".repeat(50)}]);
    assert_eq!(ask(json!({"messages": long})).max_tokens, Some(64 - 56));
    // Completions have OpenAI's 16 where the model's is more.
    let more = SamplingDefaults::from_json(r#"{"max_new_tokens": 40}"#).expect("fine");
    with_defaults(&more, |context| {
        let job = context.completion(br#"{"prompt": "a"}"#).expect("accepted");
        assert_eq!(job.requests[0].max_tokens, Some(16));
    });
}

#[test]
fn the_gap_before_a_suffix_is_asked_for() {
    for (names, expected) in [
        (
            [
                "<|fim_prefix|>",
                "<|fim_suffix|>",
                "<|fim_middle|>",
                "<|fim_pad|>",
            ],
            // The BOS, the text before the gap, the one after it, and what is to come.
            vec![27, 28, 0, 1, 29, 26, 2, 30],
        ),
        (
            ["[PREFIX]", "[SUFFIX]", "[MIDDLE]", "[PAD]"],
            vec![27, 29, 26, 2, 28, 0, 1],
        ),
        (
            [
                "<｜fim▁begin｜>",
                "<｜fim▁hole｜>",
                "<｜fim▁end｜>",
                "<pad>",
            ],
            vec![27, 28, 0, 1, 29, 26, 2, 30],
        ),
    ] {
        let text = with_added(&names, true, Some(27));
        let ask = |mut body: Value| {
            body["suffix"] = " c".into();
            with_text(&text, |context| {
                context.completion(body.to_string().as_bytes())
            })
        };
        let job = ask(json!({"prompt": "ab"})).expect("accepted");
        assert_eq!(job.requests[0].prompt, expected, "{names:?}");
        let ends = &job.requests[0].params.stop_token_ids;
        assert_eq!(ends.contains(&31), names[3] == "<|fim_pad|>", "{names:?}");
        let without = json!({"prompt": ["", "b"], "add_special_tokens": false, "ignore_eos": true});
        let job = ask(without).expect("accepted");
        assert_eq!(job.requests[1].prompt.len(), expected.len() - 2);
        assert!(job.requests[0].params.stop_token_ids.is_empty());
        refused(ask(json!({"prompt": [1, 2]})), "suffix");
        refused(ask(json!({"prompt": "a", "echo": true})), "echo");
        let cut = json!({"prompt": "a", "truncate_prompt_tokens": 3});
        refused(ask(cut), "truncate_prompt_tokens");
        refused(ask(json!({"prompt": "a".repeat(200)})), "prompt");
    }
}

/// Calls `f` with the context of a server of another tokenizer.
fn with_text<T>(text: &Arc<Text>, f: impl FnOnce(&Context<'_>) -> T) -> T {
    with_defaults(&SamplingDefaults::default(), |context| {
        let limits = RequestLimits {
            vocab_size: text.vocab_size(),
            ..context.limits.clone()
        };
        f(&Context {
            text,
            limits: &limits,
            ..context
        })
    })
}

fn without_bos() -> Arc<Text> {
    with_added(&[], false, None)
}

fn never_adding_bos() -> Arc<Text> {
    with_added(&[], false, Some(27))
}

/// The tokenizer of the other tests with these added tokens, from id 28.
fn with_added(names: &[&str], adds_bos: bool, bos: Option<u32>) -> Arc<Text> {
    let json = text().tokenizer_json().expect("serializes");
    let mut json: Value = serde_json::from_str(&json).expect("JSON");
    if !adds_bos {
        json["post_processor"] = Value::Null;
    }
    for (id, name) in (28..).zip(names) {
        json["model"]["vocab"][*name] = id.into();
        let added = json["added_tokens"].as_array_mut().expect("a list");
        // Qwen's are not marked as special.
        added.push(
            json!({"id": id, "content": name, "special": false, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}),
        );
    }
    let tokenizer = Tokenizer::from_bytes(json.to_string()).expect("a valid tokenizer.json");
    let special = SpecialIds {
        bos,
        eos: Vec::new(),
    };
    Arc::new(Text::new(tokenizer, special, None).expect("byte-level"))
}

/// APIs, fields, their values, and the key that an error names.
const UNKNOWN_KEYS: &str = r#"
chat | stream_options | {"include_usage": true, "x": 1} | stream_options.x
chat | prediction | {"type": "content", "content": "a", "x": 1} | prediction.x
chat | tool_choice | {"type": "function", "function": {"name": "f"}, "x": 1} | tool_choice.x
chat | messages | [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}] | messages[0].content[0].x
chat | messages | [{"role": "assistant", "content": "a", "audio": {"id": "x"}}] | messages[0].audio
response | text | {"x": 1} | text.x
response | reasoning | {"effort": "low", "x": 1} | reasoning.x
response | tool_choice | {"type": "function", "name": "f", "x": 1} | tool_choice.x
response | system | "a" | system
message | tool_choice | {"type": "auto", "x": 1} | tool_choice.x
message | tool_choice | {"type": "auto", "name": "f"} | tool_choice.name
message | thinking | {"type": "disabled", "x": 1} | thinking.x
message | output_config | {"x": 1} | output_config.x
message | instructions | "a" | instructions
"#;

/// In every API, a key that the server does not read in an object of a request is refused, unless its value is null.
#[test]
fn unknown_keys_of_objects_are_named() {
    type Read = fn(&Context<'_>, &[u8]) -> Result<()>;
    let chat: Read = |context, body| context.chat(body).map(drop);
    let response: Read = |context, body| context.response(body).map(drop);
    let message: Read = |context, body| context.message(body).map(drop);
    let said = json!([{"role": "user", "content": "hi"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let of_chat = json!({"messages": said, "tools": tools});
    let of_response = json!({"input": said});
    let of_message =
        json!({"messages": said, "max_tokens": 4, "tools": [{"name": "f", "input_schema": {}}]});
    for row in UNKNOWN_KEYS.trim().lines() {
        let columns: Vec<&str> = row.split(" | ").collect();
        let [api, field, value, param] = columns[..] else {
            panic!("four columns: {row}")
        };
        let (read, body) = match api {
            "chat" => (chat, &of_chat),
            "response" => (response, &of_response),
            _ => (message, &of_message),
        };
        let value: Value = serde_json::from_str(value).expect("JSON");
        let asked = |value: Value| {
            let mut body = body.clone();
            body["stream"] = true.into();
            body[field] = value;
            with(|context| read(context, body.to_string().as_bytes()))
        };
        let error = asked(value.clone()).expect_err("refused");
        assert_eq!(error.param().as_deref(), Some(param), "{value}");
        // Null asks for nothing; the prompt with tools is too long here, and there is no tool to choose.
        let text = value.to_string();
        let nothing = text.replace("\"x\":1", "\"x\":null");
        let chooses = field == "tool_choice" && text.contains("\"f\"");
        if text != nothing && param.ends_with(".x") && !param.contains("content") && !chooses {
            let error = asked(serde_json::from_str(&nothing).expect("JSON")).err();
            let param = error.and_then(|error| error.param());
            assert!(
                matches!(param.as_deref(), None | Some("messages")),
                "{nothing}"
            );
        }
    }
    // What a client sends back of an earlier answer is read.
    let refused = json!([{"role": "assistant", "content": null, "refusal": "no", "audio": null, "annotations": []},
        {"role": "user", "content": "hi", "refusal": ""}]);
    let body = json!({"messages": refused}).to_string();
    let job = with(|context| context.chat(body.as_bytes())).expect("accepted");
    let prompt = text().decode(&job.requests[0].prompt, true);
    assert!(prompt.contains("no"), "{prompt}");
}
