//! What a format writes and what its grammar allows, its parser reads back.

use super::*;
use crate::grammar::{Compiler, GrammarSource, toy::ToyTokens};
use crate::json::python_json;
use crate::tools::{Answer, Calls, answer_grammar};
use foretoken_core::sampling::{Grammar, mix};

/// The id that ends a text, after the 256 bytes.
const EOS: u32 = 256;

/// Functions with values of all types.
fn functions(text: &Value) -> Vec<Value> {
    let properties = json!({
        "a": text, "n": {"type": "integer", "minimum": -20, "maximum": 20}, "flag": {"type": "boolean"},
        "maybe": {"enum": [null]}, "list": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2},
    });
    let tool = |name: &str, required: &[&str]| {
        let parameters = json!({"type": "object", "properties": properties, "required": required});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    vec![
        tool("f", &[]),
        tool("get_weather", &["n", "list"]),
        json!({"type": "function", "function": {"name": "stop"}}),
    ]
}

fn grammar(format: ToolFormat, tools: &[Value]) -> Grammar {
    let calls = Calls {
        format,
        tools,
        parallel: true,
    };
    let answer = Answer {
        reasoning: None,
        is_harmony: false,
        calls: Some(calls),
        content: None,
    };
    let source = answer_grammar(answer, |_| None).expect("short enough");
    let bytes = (0..=EOS).map(|id| u8::try_from(id).into_iter().collect::<Vec<u8>>());
    let compiler = Compiler::new(Arc::new(ToyTokens::new(bytes, &[EOS])));
    let compiled = compiler.compile("tools", &GrammarSource::Lark(source.clone()));
    compiled.unwrap_or_else(|e| panic!("{format:?}: {e}: {source}"))
}

/// Reads calls, and their arguments as JSON.
#[track_caller]
fn calls_of(format: ToolFormat, tools: &[Value], text: &str) -> Vec<(String, Value)> {
    let signatures: Arc<[Signature]> = tools.iter().map(Signature::of).collect();
    let mut read = Vec::new();
    for sizes in [&[usize::MAX][..], &[1], &[5, 2]] {
        let mut parser = ToolParser::new(format, signatures.clone(), usize::MAX);
        let mut parts = Vec::new();
        pieces(text, sizes).for_each(|piece| parser.push(&piece, &mut parts));
        parser.finish(&mut parts);
        let (_, content, calls) = joined(parts);
        assert_eq!(content, "", "{format:?}: {text}");
        let as_json = |(name, arguments): (String, String)| {
            let json = serde_json::from_str(&arguments);
            (
                name,
                json.unwrap_or_else(|e| panic!("{format:?}: {e}: {text}")),
            )
        };
        read = calls.into_iter().map(as_json).collect();
    }
    read
}

/// Arguments with all that may be mistaken for a part of a format.
fn written() -> Vec<(&'static str, Value)> {
    vec![
        (
            "f",
            json!({"a": "it's }\\ \"<b>\" ), [x] \n a=1, é", "n": -3, "list": ["x", 1]}),
        ),
        ("stop", json!({})),
        (
            "get_weather",
            json!({"n": 1, "flag": true, "maybe": null, "list": []}),
        ),
    ]
}

fn text_of(format: ToolFormat, calls: &[(&str, Value)]) -> String {
    let texts: Vec<String> = calls.iter().map(|(_, value)| value.to_string()).collect();
    let calls: Vec<WrittenCall<'_>> = (calls.iter().zip(&texts))
        .map(|((name, _), arguments)| WrittenCall { name, arguments })
        .collect();
    format.write(&calls)
}

#[test]
fn written_calls_are_read_back() {
    let tools = functions(&json!({"type": "string"}));
    for &format in TEXT_FORMATS {
        let read = calls_of(format, &tools, &text_of(format, &written()));
        let wanted = written()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        assert_eq!(read, wanted.collect::<Vec<_>>(), "{format:?}");
    }
}

/// JSON without spaces, and not Python's literals, is what the grammar makes a model write.
#[test]
fn the_grammar_allows_what_is_written() {
    let tools = functions(&json!({"type": "string"}));
    for &format in TEXT_FORMATS {
        let mut calls = written();
        if format.syntax().single {
            calls.truncate(1);
        }
        if matches!(format.syntax().body, Body::Braces(_)) {
            // Texts in lists have marks as well, which the grammar does not know.
            calls[0].1["list"] = json!([1]);
        }
        if matches!(format.syntax().body, Body::Python) {
            calls.retain(|(name, _)| *name != "get_weather");
        }
        let texts: Vec<String> = (calls.iter())
            .map(|(_, value)| python_json(value).expect("JSON"))
            .collect();
        let calls: Vec<WrittenCall<'_>> = (calls.iter().zip(&texts))
            .map(|((name, _), arguments)| WrittenCall { name, arguments })
            .collect();
        let text = format.write(&calls);
        let mut state = grammar(format, &tools).start();
        for (at, byte) in text.bytes().enumerate() {
            let allowed = state.mask().is_some_and(|mask| mask.allows(byte.into()));
            assert!(allowed, "{format:?}: byte {at} of {text}");
            state.push(byte.into());
            state.commit();
        }
        let ends = state.mask().is_some_and(|mask| mask.allows(EOS));
        assert!(ends, "{format:?}: {text}");
    }
}

#[test]
fn what_the_grammar_allows_is_read_back() {
    let tools = functions(&json!({"enum": ["b", "c d", "\"', )"]}));
    for &format in TEXT_FORMATS {
        let grammar = grammar(format, &tools);
        let mut complete = 0;
        for text in (0..4).filter_map(|seed| walk(&grammar, seed)) {
            complete += 1;
            for (name, arguments) in calls_of(format, &tools, &text) {
                let tool = tools.iter().find(|tool| tool["function"]["name"] == *name);
                let parameters = &tool.expect("a known one")["function"]["parameters"];
                let required = parameters["required"].as_array().into_iter().flatten();
                for key in required.filter_map(Value::as_str) {
                    assert!(arguments.get(key).is_some(), "{format:?}: {text}");
                }
                for (key, value) in arguments.as_object().expect("an object") {
                    assert!(has_type(key, value), "{format:?}: {key} of {text}");
                }
            }
        }
        assert!(complete > 0, "{format:?}");
    }
}

fn has_type(key: &str, value: &Value) -> bool {
    match key {
        "a" => ["b", "c d", "\"', )"].map(Value::from).contains(value),
        "n" => value.as_i64().is_some_and(|n| n.abs() <= 20),
        "flag" => value.is_boolean(),
        "maybe" => value.is_null(),
        "list" => value.as_array().is_some_and(|list| list.len() <= 2),
        _ => false,
    }
}

/// A random text of the grammar; `None` if it does not end soon.
fn walk(grammar: &Grammar, seed: u64) -> Option<String> {
    let mut state = grammar.start();
    let mut text = Vec::new();
    for step in 0..3000 {
        let mask = state.mask()?.clone();
        let allowed: Vec<u32> = (0..=EOS).filter(|&id| mask.allows(id)).collect();
        let roll = mix(seed ^ mix(step));
        let token = allowed[roll as usize % allowed.len()];
        if token == EOS || roll >> 32 & 1 == 0 && mask.allows(EOS) {
            return Some(String::from_utf8(text).expect("UTF-8"));
        }
        text.push(u8::try_from(token).expect("a byte"));
        state.push(token);
        state.commit();
    }
    None
}
