//! Structured output as clients ask for it.

use crate::common::refusals::{merge, parsed, rows};
use crate::common::server::{Server, joined, until};
use crate::common::{Guess, Toy};
use foretoken::http::AppState;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A field, its value, and whether a text may be the answer.
type Field = (&'static str, Value, fn(&str) -> bool);

/// The fields that ask for a text.
fn fields() -> [Field; 7] {
    let digraphs = |text: &str| {
        let pairs = text.as_bytes().chunks(2);
        text.len() <= 8 && pairs.into_iter().all(|pair| pair == b"ab" || pair == b"cd")
    };
    let colour = |text: &str| ["red", "green", "blue"].contains(&text);
    let nested = |text: &str| {
        let half = text.len() / 2;
        text.len() <= 40 && text == "x".repeat(half) + &"y".repeat(half)
    };
    [
        ("guided_regex", json!("(ab|cd){1,4}"), digraphs),
        ("guided_choice", json!(["red", "green", "blue"]), colour),
        ("guided_grammar", json!("start: \"x\" start? \"y\""), nested),
        (
            "structured_outputs",
            json!({"regex": "(ab|cd){1,4}", "json": null}),
            digraphs,
        ),
        (
            "structured_outputs",
            json!({"choice": ["red", "green", "blue"]}),
            colour,
        ),
        (
            "structured_outputs",
            json!({"grammar": "start: \"x\" start? \"y\""}),
            nested,
        ),
        ("response_format", json!({"type": "text"}), |text| {
            !text.is_empty()
        }),
    ]
}

/// Each field, at both routes, at once and streamed, with every drafter and without drafts.
#[tokio::test]
async fn answers_follow_the_grammar() {
    for guess in [
        Guess::Ngram,
        Guess::Tables,
        Guess::Lookahead,
        Guess::Toy(0.0),
        Guess::Toy(0.6),
    ] {
        let toy = Toy::guessing(guess);
        let server = Server::of(toy.start()).await;
        let (mut complete, mut drafted) = (0, 0);
        for (field, value, fits) in fields() {
            for temperature in [0, 1] {
                for path in ["/v1/completions", "/v1/chat/completions"] {
                    let mut body = json!({"max_tokens": 60, "temperature": temperature, "seed": 5});
                    match path {
                        "/v1/completions" => body["prompt"] = "abc".into(),
                        _ => body["messages"] = json!([{"role": "user", "content": "hi"}]),
                    }
                    body[field] = value.clone();
                    let answer = server.json(path, &body).await;
                    let choice = &answer["choices"][0];
                    let text = choice["text"]
                        .as_str()
                        .or(choice["message"]["content"].as_str());
                    let text = text.expect("a text");
                    if choice["finish_reason"] == "stop" {
                        assert!(fits(text), "{field} {value}: {text}");
                        complete += 1;
                    }
                    let (streamed, finish) = joined(&server.stream(path, body.clone()).await, 0);
                    assert_eq!(streamed.as_str(), text);
                    assert_eq!(finish, choice["finish_reason"]);
                    let usage = &answer["usage"]["speculative_decoding"];
                    drafted += usage["num_draft_tokens"].as_u64().unwrap_or(0);
                    body["spec_length"] = 0.into();
                    let plain = server.json(path, &body).await;
                    assert_eq!(
                        plain["choices"], answer["choices"],
                        "{field} {value}, {guess:?}"
                    );
                }
            }
        }
        assert!(
            complete > 12 && drafted > 10,
            "{complete} complete, {drafted} drafted"
        );
        server.done().await;
    }
}

/// What requests have more, their grammars, and how their texts end.
const ENDS: &str = r#"
{"min_tokens": 30} | abc | abc | stop
{"ignore_eos": true} | abc | abc | stop
{"min_tokens": 9} | a{2,6} | aaaaaa | stop
{"ignore_eos": true} | a{2,6} | aaaaaa | stop
{"max_tokens": 2} | a{4} | aa | length
{"stop": "b"} | abc | a | stop
{"stop_token_ids": [1], "min_tokens": 3} | abc | abc | stop
"#;

/// Where the grammar allows nothing but the end, the text ends, whatever else was asked for; where it allows
/// more, `min_tokens` and `ignore_eos` are kept.
#[tokio::test]
async fn the_end_of_the_grammar_is_the_end_of_the_text() {
    let server = Server::start().await;
    for [extra, regex, text, finish] in rows::<4>(ENDS) {
        for temperature in [0, 1] {
            let mut body = json!({"prompt": "q", "max_tokens": 40, "temperature": temperature, "seed": 3,
                "guided_regex": regex});
            merge(&mut body, &parsed(extra));
            let answer = server.json("/v1/completions", &body).await;
            let choice = &answer["choices"][0];
            assert_eq!(choice["text"], text, "{body}");
            assert_eq!(choice["finish_reason"], finish, "{body}");
        }
    }
    let body = json!({"prompt": "q", "guided_regex": "a", "logit_bias": {"0": -100}});
    let answer = server.json("/v1/completions", &body).await;
    assert_eq!(
        answer["choices"][0]["text"], "a",
        "a bias is not enough to forbid"
    );
    server.done().await;
}

/// Fields, the one that an error names, and what it says.
const REFUSED: &str = r#"
{"response_format": "json"} | response_format | an object
{"response_format": {"type": "xml"}} | response_format.type | json_schema
{"response_format": {"type": "json_schema"}} | response_format.json_schema | required
{"response_format": {"type": "json_object", "json_schema": {}}} | response_format.json_schema | requires
{"response_format": {"type": "json_object", "schema": {"type": "strin"}}} | response_format.schema | strin
{"response_format": {"type": "text", "schema": {}}} | response_format.schema | requires
{"response_format": {"type": "json_object", "scheme": {}}} | response_format.scheme | not supported
{"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}} | response_format.json_schema.name | required
{"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}} | response_format.json_schema.name | letters
{"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}} | response_format.json_schema.schema | required
{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}}} | response_format.json_schema.strict | a boolean
{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "scheme": {}}}} | response_format.json_schema.scheme | not supported
{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {"a": {"items": {"type": "strin"}}}}}}} | response_format.json_schema.schema | `#/properties/a/items`, {"type":"strin"}
{"guided_json": {"type": "array", "contains": {}}} | guided_json | contains
{"guided_json": "{"} | guided_json | valid JSON
{"guided_regex": "a("} | guided_regex | unclosed
{"guided_regex": 5} | guided_regex | string
{"guided_choice": [1]} | guided_choice[0] | string
{"guided_grammar": "start: b"} | guided_grammar | b
{"guided_regex": "a", "guided_choice": ["a"]} | guided_choice | exclude
{"guided_regex": "a", "response_format": {"type": "json_object"}} | response_format | guided_regex
{"structured_outputs": {"regex": "a", "choice": ["a"]}} | structured_outputs.choice | exclude
{"structured_outputs": {"structural_tag": "x"}} | structured_outputs.structural_tag | not supported
{"structured_outputs": {"whitespace_pattern": " "}} | structured_outputs.whitespace_pattern | requires
{"structured_outputs": []} | structured_outputs | an object
{"guided_decoding_backend": "x"} | guided_decoding_backend | not supported
{"guided_json_object": true} | guided_json_object | matches no text
"#;

#[tokio::test]
async fn refusals_name_the_field() {
    let server = Server::start().await;
    let deep = (0..200).fold("1".to_owned(), |inner, _| format!("[{inner}]"));
    let deep = (json!({"guided_json": deep}), "guided_json", "recursion");
    let all = rows::<3>(REFUSED).map(|[body, param, says]| (parsed(body), param, says));
    for (body, param, says) in all.chain([deep]) {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let mut body = body.clone();
            match path {
                "/v1/completions" => body["prompt"] = "a".into(),
                _ => body["messages"] = json!([{"role": "user", "content": "hi"}]),
            }
            body["stream"] = true.into();
            let told = server.refused(path, &body).await;
            assert_eq!(told["param"], param, "{body}: {told}");
            let message = told["message"].as_str().unwrap();
            assert!(message.contains(says), "{says} is missing: {message}");
        }
    }
    for nothing in [
        json!({"guided_json": null, "guided_regex": "", "guided_choice": []}),
        json!({"structured_outputs": {}}),
    ] {
        let mut body = json!({"prompt": "a", "max_tokens": 2});
        merge(&mut body, &nothing);
        server.json("/v1/completions", &body).await;
    }
    server.done().await;
}

/// Grammars that take long to compile delay neither requests without one nor those of another client.
#[tokio::test(flavor = "multi_thread")]
async fn large_grammars_delay_nobody() {
    let keys = ["one".to_owned(), "other".to_owned()];
    let with_keys = |state: AppState| state.with_api_keys(keys.to_vec());
    let server = Server::over(Toy::default().start(), with_keys).await;
    let ask = |key: &str, fields: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 3});
        merge(&mut body, &fields);
        let request = server.client.post(format!("{}/v1/completions", server.url));
        let sent = request.bearer_auth(key).json(&body).send();
        async move { sent.await.expect("an answer").status().as_u16() }
    };
    let large = |i: usize| {
        let name = |n: usize| (format!("p{i}_{n}"), json!({"type": "integer"}));
        let properties: Map<String, Value> = (0..1500).map(name).collect();
        json!({"guided_json": {"type": "object", "properties": properties}})
    };
    let ended = Arc::new(AtomicUsize::new(0));
    let count = 32;
    let slow: Vec<_> = (0..count)
        .map(|i| {
            let (asked, ended) = (ask("one", large(i)), ended.clone());
            tokio::spawn(async move {
                // No token of the toy has a bracket.
                assert_eq!(asked.await, 400);
                ended.fetch_add(1, Ordering::SeqCst);
            })
        })
        .collect();
    until("one is refused", || ended.load(Ordering::SeqCst) > 0).await;
    assert_eq!(ask("one", json!({})).await, 200);
    assert_eq!(ask("other", json!({"guided_regex": "ab+"})).await, 200);
    let before = ended.load(Ordering::SeqCst);
    assert!(
        before < count * 3 / 4,
        "{before} of {count} were compiled before"
    );
    for slow in slow {
        slow.await.unwrap();
    }
    server.done().await;
}

/// The demonstration pair writes JSON, with a draft model and tables, at once and in a batch.
#[cfg(feature = "embedded-model")]
#[test]
fn json_of_a_real_model() {
    // The adaptive budget may find on a busy machine that no draft pays.
    let flags = "--num-blocks 256 --spec-budget fixed";
    let server = crate::common::process::Server::start(flags);
    let schema = json!({
        "type": "object",
        "properties": {
            "animal": {"enum": ["bear", "rabbit", "owl"]},
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "likes": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 2},
        },
        "required": ["animal", "name", "age", "likes"],
        "additionalProperties": false,
    });
    let ask = |body: &Value| server.json("/v1/chat/completions", body);
    let forms = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "strict": true, "schema": schema}}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"guided_json": schema, "guided_whitespace_pattern": " ?"}),
    ];
    let mut texts = Vec::new();
    for (temperature, seed) in [(0, 0), (1, 1), (1, 2), (1, 3)] {
        for form in &forms {
            let mut body = json!({"messages": [{"role": "user", "content": "Describe a pet."}],
                "max_tokens": 150, "temperature": temperature, "seed": seed});
            merge(&mut body, form);
            let answer = ask(&body);
            let (text, finish) = (
                &answer["choices"][0]["message"]["content"],
                &answer["choices"][0]["finish_reason"],
            );
            assert_eq!(finish, "stop", "{answer}");
            let pet: Value = serde_json::from_str(text.as_str().unwrap()).expect("JSON");
            assert!(
                ["bear", "rabbit", "owl"].contains(&pet["animal"].as_str().unwrap()),
                "{pet}"
            );
            assert!(pet["name"].as_str().unwrap().chars().count() <= 12, "{pet}");
            assert!(pet["age"].as_u64().unwrap() <= 99, "{pet}");
            assert!(pet["likes"].as_array().unwrap().len() <= 2, "{pet}");
            assert_eq!(pet.as_object().unwrap().len(), 4, "{pet}");
            let spec = &answer["usage"]["speculative_decoding"];
            assert!(
                spec["num_accepted_tokens"].as_u64().unwrap() > 3,
                "{answer}"
            );
            body["spec_length"] = 0.into();
            assert_eq!(ask(&body)["choices"], answer["choices"]);
            if form.get("guided_whitespace_pattern").is_none() {
                texts.push(((temperature, seed), text.clone()));
            }
        }
    }
    for (key, text) in &texts {
        let same = texts.iter().filter(|(other, _)| other == key);
        same.for_each(|(_, other)| assert_eq!(text, other));
    }
    let body = json!({"messages": [{"role": "user", "content": "Describe a pet."}], "n": 4, "seed": 1,
        "max_tokens": 150, "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}});
    let together = ask(&body);
    let first = texts.iter().find(|(key, _)| *key == (1, 1)).unwrap();
    assert_eq!(
        together["choices"][0]["message"]["content"], first.1,
        "batched equals single"
    );
}
