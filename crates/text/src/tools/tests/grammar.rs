//! The grammars of calls: how long they are, and what they share.

use crate::grammar::{Compiler, GrammarSource, MAX_SOURCE_BYTES, toy::ToyTokens};
use crate::tools::{Answer, Body, Calls, ToolFormat, answer_grammar};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

const FORMATS: [ToolFormat; ToolFormat::ALL.len()] = ToolFormat::ALL;

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn grammar(format: ToolFormat, tools: &[Value]) -> Option<String> {
    let calls = Calls {
        format,
        tools,
        parallel: true,
        inputs: &[],
    };
    let answer = Answer {
        reasoning: None,
        is_harmony: format == ToolFormat::Harmony,
        calls: Some(calls),
        content: None,
    };
    answer_grammar(answer, |_| None)
}

fn compiles(format: ToolFormat, source: String) {
    let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
    let compiler = Compiler::new(Arc::new(ToyTokens::new(bytes, &[0])));
    let compiled = compiler.compile("tools", &GrammarSource::Lark(source));
    assert!(compiled.is_ok(), "{format:?}: {compiled:?}");
}

/// A definition of about `bytes` bytes, which compiles quickly.
fn large(bytes: usize) -> Value {
    json!({"type": "array", "items": {"enum": ["x".repeat(bytes), 1]}, "maxItems": 1})
}

fn properties(count: usize, schema: impl Fn(usize) -> Value) -> Map<String, Value> {
    (0..count).map(|i| (format!("p{i}"), schema(i))).collect()
}

/// Definitions are written where they are needed, and once: not again for each property, tool or annotation.
#[test]
fn large_definitions_are_written_once() {
    let shared = |i: usize| match i % 4 {
        0 => json!({"$ref": "#/$defs/all", "description": format!("Number {i}.")}),
        1 => json!({"type": "integer"}),
        2 => json!({"$ref": "#/$defs/small"}),
        _ => json!({"type": "string"}),
    };
    let schema = json!({
        "type": "object", "properties": properties(200, shared),
        "$defs": {
            "all": large(60_000), "unused": large(60_000),
            "small": {"properties": {"next": {"$ref": "#/$defs/small"}}},
        },
    });
    assert!(schema.to_string().len() < MAX_SOURCE_BYTES);
    for format in FORMATS {
        let tools = [tool("f", schema.clone()), tool("g", schema.clone())];
        let source = grammar(format, &tools).expect("short enough");
        assert!(
            source.len() < MAX_SOURCE_BYTES,
            "{format:?}: {}",
            source.len()
        );
        let count = source.matches(&"x".repeat(60_000)).count();
        assert_eq!(count, 2, "{format:?}: each function has its own");
        assert!(!source.contains("Number"), "{format:?}");
        compiles(format, source);
    }
}

/// A grammar with a stranger's repetitions is not written first and then refused: a GiB takes longer.
#[test]
fn the_text_is_bounded_while_it_grows() {
    let all = large(125_000);
    let started = Instant::now();
    for (count, schema, is_too_long) in [
        (2000, json!({"$ref": "#/$defs/all"}), false),
        (7000, json!({"type": "null"}), true),
        // Each is another rule, with the definition.
        (1000, json!({"items": {"$ref": "#/$defs/all"}}), true),
    ] {
        let property = |i: usize| {
            let mut schema = schema.clone();
            if schema.get("items").is_some() {
                schema["maxItems"] = i.into();
            }
            schema
        };
        let parameters = json!({"properties": properties(count, property), "$defs": {"all": all}});
        for format in FORMATS {
            let source = grammar(format, &[tool("f", parameters.clone())]);
            let is_python = matches!(format.syntax().body, Body::Python | Body::Braces(_));
            // In Python, the text of an argument is written twice.
            let is_long = format.has_single_arguments() && is_too_long || is_python;
            assert_eq!(source.is_none(), is_long, "{format:?}, {schema}");
        }
    }
    let one = |i: usize| tool(&format!("f{i}"), json!({"properties": {"a": large(3000)}}));
    let tools: Vec<Value> = (0..128).map(one).collect();
    for format in FORMATS {
        assert_eq!(grammar(format, &tools), None, "{format:?}");
    }
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

/// Values that are written alike have one rule; those of other functions may mean something else.
#[test]
fn equal_values_share_a_rule() {
    let list = |text: &str| json!({"type": "array", "items": {"$ref": "#/$defs/x"}, "title": text});
    let parameters = |x: Value| {
        let color = json!({"enum": ["red", "blue"]});
        json!({"properties": {"a": list("A"), "b": list("B"), "c": color, "$ref": {"type": "null"}}, "$defs": {"x": x}})
    };
    let tools = [
        tool("f", parameters(json!({"type": "integer"}))),
        tool("g", parameters(json!({"type": "boolean"}))),
    ];
    let source = grammar(ToolFormat::Qwen3Coder, &tools).expect("short enough");
    assert_eq!(source.matches("%json").count(), 4, "{source}");
    assert_eq!(source.matches(r#"("red" | "blue")"#).count(), 2, "{source}");
    compiles(ToolFormat::Qwen3Coder, source);
}
