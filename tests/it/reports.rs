//! Public bug reports about other servers, sent to this one: those that no other test holds. docs/advisories.md has the
//! list. A name says what was wrong there, or what is right here.

use crate::advisories::{CHATS, COMPLETIONS, refused};
use crate::common::project::root;
use crate::common::scripted::{TEMPLATE, saying, saying_as, thinking};
use crate::common::server::{drafting, greedy};
use crate::common::{Guess, MAX_LEN, SEED, Toy, VOCAB, assert_idle, reference, run, toy_model};
use foretoken::engine;
use foretoken::model::toy::ToyModel;
use foretoken::spec::DraftModel;
use serde_json::{Value, json};

/// A model that wants to write white space for ever (xgrammar 412, oMLX 2990, vLLM 44619): JSON has what it needs of it
/// and no more.
#[tokio::test]
async fn a_model_that_wants_white_space_writes_json() {
    let server = saying(&" \n\t".repeat(300)).await;
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}, "b": {"const": "c"}},
        "required": ["a", "b"], "additionalProperties": false,
    });
    for format in [
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
        json!({"type": "json_object"}),
    ] {
        let body =
            json!({"prompt": "a", "max_tokens": 300, "temperature": 0, "response_format": format});
        let choice = server.json(COMPLETIONS, &body).await["choices"][0].clone();
        let text = choice["text"].as_str().expect("a text");
        if format["type"] == "json_schema" {
            assert_eq!(choice["finish_reason"], "stop", "{text}");
            assert!(
                text.starts_with("{\"a\": [")
                    && text.ends_with("], \"b\": \"c\"}")
                    && text.len() == 23,
                "{text}"
            );
        } else {
            // Nothing is said of its keys, where blanks may be.
            assert!(text.starts_with("{\"") || text == "{}", "{text}");
        }
    }
    server.done().await;
}

/// Brackets in brackets, by the ten thousand (llama.cpp 26600, 25283, 19008 and 27434): the stack of each ended.
#[tokio::test]
async fn brackets_in_brackets_do_not_end_the_server() {
    let nested = |(open, inner, close): (&str, &str, &str)| {
        open.repeat(60_000) + inner + &close.repeat(60_000)
    };
    let (groups, quoted) = (nested(("(", "a", ")")), nested(("(", "\"a\"", ")")));
    let of_schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    refused(&[
        json!({"guided_regex": groups}),
        json!({"guided_grammar": format!("start: {quoted}")}),
        of_schema(json!({"type": "string", "pattern": format!("^{groups}$")})),
        of_schema(json!({"type": "string", "pattern": "^+[a-z]$"})),
        json!({"guided_json": nested(("{\"items\":", "{}", "}"))}),
    ])
    .await;
    let server = crate::common::server::Server::start().await;
    for path in [
        COMPLETIONS,
        CHATS,
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
    ] {
        let body = format!("{{\"tools\": {}}}", nested(("[", "", "]")));
        let request = server
            .client
            .post(server.url.clone() + path)
            .header("content-type", "application/json");
        let response = request.body(body).send().await.expect("an answer");
        assert_eq!(response.status(), 400, "{path}");
    }
    server.done().await;
}

/// A draft model whose context is shorter than the target's (vLLM 5342 and 57941, LM Studio 499, ExLlamaV2 274): it drafts
/// as far as it can, and the text goes on.
#[test]
fn a_draft_model_with_a_short_context_drafts_as_far_as_it_can() {
    let short = 50;
    let model = ToyModel::new(VOCAB, short, SEED, 0.0);
    let draft = DraftModel::new(Box::new(model), 256, 4, 128).unwrap();
    let engine = engine::spawn(
        Box::new(toy_model(0.0)),
        Some(Box::new(draft)),
        256,
        4,
        Toy::default().options,
    )
    .unwrap();
    for prompt_len in [3, short - 2, short - 1, short, short + 1, 2 * short] {
        let prompt: Vec<u32> = (0..prompt_len).map(|i| i as u32 % 7).collect();
        let request = crate::common::greedy(&prompt, MAX_LEN - prompt_len);
        let answer = run(&engine, request.clone());
        assert_eq!(
            answer.ids(),
            reference(&mut toy_model(0.0), &request),
            "{prompt_len}"
        );
        // Near the end of its context there is no room for a draft.
        assert_eq!(
            answer.spec.drafted > 0,
            prompt_len + 4 < short,
            "{prompt_len}"
        );
    }
    assert_idle(&engine);
}

/// A stop string and the end of `max_tokens` in one round of accepted draft tokens (SGLang 31599, vLLM 47616): the text, its
/// tokens, their log-probabilities and why it ended are those of plain decoding.
#[tokio::test]
async fn a_stop_string_before_the_limit_ends_the_text_in_the_same_round() {
    let server = drafting(Guess::Toy(0.0)).await;
    let mut body = greedy("abc", 40);
    body["allowed_token_ids"] = (0..26).collect();
    body["logprobs"] = 1.into();
    body["return_token_ids"] = true.into();
    let whole = server.json(COMPLETIONS, &body).await["choices"][0]["text"].clone();
    let whole = whole.as_str().expect("a text");
    let mut by_stop = 0;
    for at in 2..30 {
        for further in [0, 1, 2] {
            body["stop"] = whole[at - 2..at].into();
            body["max_tokens"] = (at + further).into();
            body["spec_length"] = 6.into();
            let drafted = server.json(COMPLETIONS, &body).await;
            body["spec_length"] = 0.into();
            let plain = server.json(COMPLETIONS, &body).await;
            assert_eq!(drafted["choices"], plain["choices"], "{body}");
            assert_eq!(drafted["choices"][0]["finish_reason"], "stop", "{body}");
            assert_eq!(
                drafted["usage"]["completion_tokens"], plain["usage"]["completion_tokens"],
                "{body}"
            );
            let cut = whole.find(&whole[at - 2..at]).expect("a part of it");
            assert_eq!(drafted["choices"][0]["text"], whole[..cut], "{body}");
            assert_eq!(drafted["usage"]["completion_tokens"], cut + 2, "{body}");
            by_stop += usize::from(
                drafted["usage"]["speculative_decoding"]["num_accepted_tokens"].as_u64() > Some(0),
            );
        }
    }
    assert!(by_stop > 40, "{by_stop} had accepted tokens");
    server.done().await;
}

/// A model that may think and does not (vLLM 39138 and 44012, mlx-serve 331): what is asked for is the content, of a chat and
/// of a response, and is not taken for a thought.
#[tokio::test]
async fn a_format_is_followed_by_a_model_that_does_not_think() {
    let schema = json!({"type": "object", "properties": {"answer": {"const": 42}}, "required": ["answer"],
        "additionalProperties": false});
    let server = saying_as("Hello, this is no JSON.", TEMPLATE, thinking).await;
    let chat = json!({
        "messages": [{"role": "user", "content": "a"}], "temperature": 0, "chat_template_kwargs": {"enable_thinking": false},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    });
    let message = server.json(CHATS, &chat).await["choices"][0]["message"].clone();
    assert_eq!(message["content"], "{\"answer\": 42}", "{message}");
    assert!(message["reasoning_content"].is_null(), "{message}");
    let response = json!({
        "input": "a", "temperature": 0, "chat_template_kwargs": {"enable_thinking": false},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
    });
    let output = server.json("/v1/responses", &response).await["output"].clone();
    assert_eq!(output.as_array().map(Vec::len), Some(1), "{output}");
    assert_eq!(output[0]["content"][0]["text"], "{\"answer\": 42}");
    server.done().await;
}

/// A model that writes about calls before it makes one (vLLM 58227): the marker in its prose stays prose, and the call after it
/// is found, at once and in deltas.
#[tokio::test]
async fn a_marker_in_prose_does_not_hide_the_call_after_it() {
    let prose = "Calls begin with <tool_call> and are closed.";
    let says = format!(
        "{prose}\n<tool_call>\n{{\"name\": \"add\", \"arguments\": {{\"a\": 1, \"b\": 2}}}}\n</tool_call>"
    );
    let server = saying(&says).await;
    let body = crate::common::scripted::body();
    let message = server.json(CHATS, &body).await["choices"][0]["message"].clone();
    assert_eq!(message["content"], prose);
    let calls = message["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 1, "{message}");
    let of_message = crate::common::scripted::call(&calls[0]);
    assert_eq!(of_message, ("add", "{\"a\": 1, \"b\": 2}"));
    let chunks = server.stream(CHATS, body).await;
    let said = crate::common::server::joined(&chunks, 0);
    assert_eq!(said, (prose.to_owned(), json!("tool_calls")));
    server.done().await;
}

/// A token that is a part of a character has no text, and its bytes say what it is (vLLM 16540 and 19177, where the letters
/// that stand for bytes in a vocabulary were shown).
#[tokio::test]
async fn log_probabilities_of_parts_of_characters_have_their_bytes() {
    let server = saying("né€").await;
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "temperature": 0, "logprobs": true, "top_logprobs": 2,
    });
    let choice = server.json(CHATS, &body).await["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "né€");
    let tokens = choice["logprobs"]["content"]
        .as_array()
        .expect("tokens")
        .clone();
    let bytes = |token: &Value| -> Vec<u8> {
        serde_json::from_value(token["bytes"].clone()).expect("bytes")
    };
    let all: Vec<u8> = tokens.iter().flat_map(bytes).collect();
    assert!(all.starts_with("né€".as_bytes()), "{tokens:?}");
    for token in &tokens[..6] {
        for shown in [token, &token["top_logprobs"][0]] {
            assert_eq!(bytes(shown).len(), 1, "{shown}");
            let text = shown["token"].as_str().expect("a text");
            assert!(
                text == "n" || !text.contains(['Ã', 'â', '©', '¬', 'Ĥ']),
                "{shown}"
            );
        }
    }
    server.done().await;
}

/// Each test that the list names is in the file that it names.
#[test]
fn the_list_names_tests_that_there_are() {
    let read = |path: &str| {
        let text = std::fs::read_to_string(root().join(path));
        text.unwrap_or_else(|e| panic!("{path}: {e}"))
    };
    let list = read("docs/advisories.md");
    let (_, reports) = list.split_once("# Bug reports").unwrap();
    let own = read("tests/it/reports.rs") + &read("tests/it/advisories.rs");
    let mut count = 0;
    for line in reports.lines().filter(|line| line.starts_with("| ")) {
        let named = line.rsplit('|').nth(1).unwrap();
        let mut code = own.clone();
        for name in named.split('`').skip(1).step_by(2) {
            if !name.ends_with(".rs") {
                assert!(code.contains(&format!("fn {name}(")), "{line}");
                count += 1;
                continue;
            }
            code = read(&match name.split_once('/') {
                None => format!("tests/it/{name}"),
                Some(("src", _)) => name.to_owned(),
                Some((part, rest)) => format!("crates/{part}/src/{rest}"),
            });
        }
    }
    assert!(count > 50, "{count}");
}
