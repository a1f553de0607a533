//! Calls that must be made, over HTTP: a grammar makes any model write them.

use crate::common::scripted::{
    CHAT, EOS, MAX_LEN, TEMPLATE, VOCAB, body, call, saying_as, serve, start, thinking, tool,
};
use foretoken::http::AppState;
use foretoken::model::Model;
use foretoken::model::toy::ToyModel;
use foretoken::spec::DraftModel;
use foretoken::text::ToolFormat;
use serde_json::{Map, Value, json};

fn toy(noise: f32) -> Box<dyn Model> {
    Box::new(ToyModel::new(VOCAB, MAX_LEN, 1, noise).with_eos(&[EOS]))
}

/// Calls that a model of noise must make: tools whose arguments are short.
fn forced() -> Value {
    let mut body = body();
    body["tools"] = json!([
        tool("pick", json!({"colour": {"enum": ["red", "green", "blue"]}, "really": {"type": "boolean"}})),
        tool("roll", json!({"sides": {"type": "integer", "minimum": 2, "maximum": 20}})),
        {"type": "function", "function": {"name": "stop"}},
    ]);
    body["temperature"] = 1.into();
    body["max_tokens"] = 2000.into();
    body
}

fn check_arguments(name: &str, arguments: &str) {
    let arguments: Map<String, Value> = serde_json::from_str(arguments).expect("JSON");
    match name {
        "pick" => {
            assert!(
                ["red", "green", "blue"].contains(&arguments["colour"].as_str().expect("a name"))
            );
            assert!(arguments["really"].is_boolean() && arguments.len() == 2);
        }
        "roll" => {
            assert!((2..=20).contains(&arguments["sides"].as_u64().expect("a number")));
            assert_eq!(arguments.len(), 1);
        }
        "stop" => assert!(arguments.is_empty()),
        other => panic!("{other}"),
    }
}

/// A model that knows nothing calls correctly where it must, in every format, and with drafts as without.
#[tokio::test]
async fn required_calls_are_valid_whatever_the_model() {
    let mut names = Vec::new();
    // Harmony's messages are tested elsewhere.
    let formats = ToolFormat::ALL.into_iter();
    for format in formats.filter(|format| *format != ToolFormat::Harmony) {
        let draft = DraftModel::new(toy(0.3), 4096, 4, 512).expect("a draft");
        let engine = start(toy(0.0), Some(Box::new(draft)));
        let configure = |state: AppState| state.with_tool_call_parser(Some(format));
        let server = serve(engine, TEMPLATE, configure).await;
        for (seed, choice, parallel) in [
            (1, json!("required"), true),
            (2, json!("required"), true),
            (3, json!("required"), true),
            (4, json!("required"), false),
            (
                5,
                json!({"type": "function", "function": {"name": "roll"}}),
                true,
            ),
        ] {
            let mut asked = forced();
            asked["seed"] = seed.into();
            asked["tool_choice"] = choice.clone();
            asked["parallel_tool_calls"] = parallel.into();
            let reply = server.json(CHAT, &asked).await;
            let of = |reply: &Value| {
                let choice = &reply["choices"][0];
                let calls = choice["message"]["tool_calls"]
                    .as_array()
                    .expect("calls")
                    .clone();
                let read = calls.iter().map(call);
                let read: Vec<_> = read
                    .map(|(name, args)| (name.to_owned(), args.to_owned()))
                    .collect();
                (
                    read,
                    choice["finish_reason"].clone(),
                    choice["message"]["content"].clone(),
                )
            };
            let (calls, finish, content) = of(&reply);
            assert_eq!(content, Value::Null, "{format:?}");
            assert!(!calls.is_empty(), "{format:?}");
            for (name, arguments) in &calls {
                check_arguments(name, arguments);
                names.push(name.clone());
            }
            let named = choice.is_object();
            assert_eq!(finish, if named { "stop" } else { "tool_calls" });
            if named || !parallel {
                assert_eq!(calls.len(), 1);
            }
            if named {
                assert_eq!(calls[0].0, "roll");
            }
            asked["spec_length"] = 0.into();
            assert_eq!(
                of(&server.json(CHAT, &asked).await),
                (calls, finish, content)
            );
        }
        server.done().await;
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3, "all tools are called: {names:?}");
}

/// A model may think before it calls, and before it writes what a schema asks for.
#[tokio::test]
async fn reasoning_comes_before_what_is_required() {
    let colour = json!({"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": ["red", "green"]}}});
    for (says, opened) in [
        ("<think>\nHm.</think>\n\n", false),
        ("Hm.\n</think>\n\n", true),
    ] {
        for (key, value) in [
            ("tool_choice", json!("required")),
            ("response_format", colour.clone()),
        ] {
            let server = saying_as(says, TEMPLATE, thinking).await;
            let mut asked = forced();
            asked[key] = value;
            asked["temperature"] = 0.into();
            asked["chat_template_kwargs"] = json!({"enable_thinking": opened});
            if key == "response_format" {
                asked.as_object_mut().expect("an object").remove("tools");
            }
            let message = server.json(CHAT, &asked).await["choices"][0]["message"].clone();
            assert_eq!(message["reasoning_content"], "Hm.", "{message}");
            if key == "tool_choice" {
                let (name, arguments) = call(&message["tool_calls"][0]);
                check_arguments(name, arguments);
                assert_eq!(message["content"], Value::Null);
            } else {
                let content = message["content"].as_str().expect("a content");
                assert!(["\"red\"", "\"green\""].contains(&content), "{content}");
            }
            server.done().await;
        }
    }
}

/// With both tools and a schema for the content, an answer is calls or such content.
#[tokio::test]
async fn an_answer_is_calls_or_the_content_that_is_asked_for() {
    let server = serve(start(toy(0.0), None), TEMPLATE, |state| state).await;
    let (mut calls, mut contents) = (0, 0);
    for (seed, field, value) in (0..12).flat_map(|seed| {
        let schema = json!({"type": "object", "properties": {"a": {"enum": ["<", "/"]}},
            "required": ["a"], "additionalProperties": false});
        let format = json!({"type": "json_schema", "json_schema": {"name": "c", "schema": schema}});
        [
            (seed, "response_format", format),
            (seed, "guided_regex", json!(r#"\{"a": "[</]"\}"#)),
            (
                seed,
                "guided_choice",
                json!([r#"{"a": "/"}"#, r#"{"a": "<"}"#]),
            ),
        ]
    }) {
        let mut asked = forced();
        asked["seed"] = seed.into();
        asked[field] = value;
        let message = server.json(CHAT, &asked).await["choices"][0]["message"].clone();
        match message["tool_calls"].as_array() {
            Some(list) => {
                assert!(!list.is_empty(), "{field}");
                calls += 1;
                for (name, arguments) in list.iter().map(call) {
                    check_arguments(name, arguments);
                }
            }
            None => {
                contents += 1;
                let content = message["content"].as_str().expect("a content");
                assert!(
                    [r#"{"a": "/"}"#, r#"{"a": "<"}"#].contains(&content),
                    "{field}: {content}"
                );
            }
        }
    }
    assert!(calls > 0 && contents > 0, "{calls} and {contents}");

    let mut asked = forced();
    asked["guided_grammar"] = "start: \"a\"".into();
    let told = server.refused(CHAT, &asked).await;
    assert_eq!(told["param"], "guided_grammar");
    asked["tool_choice"] = "none".into();
    let message = &server.json(CHAT, &asked).await["choices"][0]["message"];
    assert_eq!(message["content"], "a");
    server.done().await;
}
