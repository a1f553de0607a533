//! Schemas, grammars and tools of strangers take little memory and time. Grammars are compiled on threads of their own, so
//! the memory is that of a process that does nothing else.
#![cfg(target_os = "linux")]

use crate::common::process::peak_memory;
use crate::corpus::{LONGEST, corpus};
use foretoken::fuzzing;
use serde_json::{Map, Value, json};
use std::process::Command;
use std::time::Instant;

/// Set in that process.
const ALONE: &str = "FORETOKEN_GRAMMARS_ALONE";
/// Maximum bytes that all inputs together may take at once.
const MAX_MEMORY: usize = 400 << 20;
/// Where the process ends that takes far more, before the machine does.
const MAX_ADDRESSES: usize = 6 << 30;

/// A fuzz target, what is hard about the input, and the input: a text, or JSON.
type Input = (&'static str, &'static str, Value);

/// Those of the corpus, those that cost too much, and those that repeat much.
#[test]
fn strangers_grammars_are_bounded() {
    if std::env::var_os(ALONE).is_some() {
        return replay_alone();
    }
    let mut child = Command::new("prlimit");
    child.arg(format!("--as={MAX_ADDRESSES}"));
    child.arg(std::env::current_exe().unwrap());
    let name = "grammar_bounds::strangers_grammars_are_bounded";
    child.args([name, "--exact", "--nocapture"]);
    let done = child.env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}{}", String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success());
    assert!(said.contains("1 passed"), "it has run");
}

fn replay_alone() {
    let before = peak_memory("self");
    let run = |name: &str, what: &str, bytes: &[u8]| {
        let start = Instant::now();
        fuzzing::run(name, bytes);
        let (took, more) = (start.elapsed(), peak_memory("self") - before);
        println!("{name}, {what}: {took:?}, {} MiB", more >> 20);
        assert!(more < MAX_MEMORY, "{name}, {what}: {} MiB", more >> 20);
        assert!(took < LONGEST, "{name}, {what}: {took:?}");
    };
    for (name, what, input) in costly().into_iter().chain(repetitive()) {
        let text = match input {
            Value::String(text) => text,
            json => json.to_string(),
        };
        run(name, what, text.as_bytes());
    }
    for name in ["schema", "grammar", "tools"] {
        for (file, bytes) in corpus(name) {
            run(name, &file.display().to_string(), &bytes);
        }
    }
}

/// Small sources of much work. A slash begins a regular expression.
fn costly() -> Vec<Input> {
    let chain: String = (0..8000).map(|i| format!("A{i}: A{}\n", i + 1)).collect();
    let rules: String = (0..8000)
        .map(|i| format!("a{i}: a{} \"x\"\n", i + 1))
        .collect();
    let nested = (0..120).fold(
        json!({}),
        |inner, _| json!({"anyOf": [inner, {"type": "null"}]}),
    );
    let link = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        (format!("d{i}"), json!({"allOf": [next]}))
    };
    let links: Map<String, Value> = (0..3000).map(link).collect();
    [
        (
            "grammar",
            "repeated repeats",
            json!("/(a{1,1000}){1,1000}b"),
        ),
        ("grammar", "many states", json!("/(a|b)*a(a|b){5000}")),
        (
            "grammar",
            "a chain of lexemes",
            json!(format!("start: A0\n{chain}A8000: \"a\"")),
        ),
        (
            "grammar",
            "a chain of rules",
            json!(format!("start: a0\n{rules}a8000: \"a\"")),
        ),
        (
            "grammar",
            "an ambiguous rule",
            json!("start: start start | \"a\""),
        ),
        ("schema", "nested choices", nested),
        (
            "schema",
            "a chain of references",
            json!({"$defs": links, "$ref": "#/$defs/d0"}),
        ),
        ("schema", "a reference to itself", json!({"$ref": "#"})),
        (
            "schema",
            "a long list",
            json!({"type": "array", "minItems": 10_000_000, "items": {"type": "null"}}),
        ),
        (
            "schema",
            "a long text",
            json!({"type": "string", "minLength": 1_000_000}),
        ),
    ]
    .into()
}

/// Schemas and tools, with what they repeat.
fn repetitive() -> Vec<Input> {
    let numbered = |count: usize, schema: &Value| -> Map<String, Value> {
        let entry = |i: usize| (format!("p{i}"), schema.clone());
        (0..count).map(entry).collect()
    };
    let tool = |parameters: Value| json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let large = json!({"enum": ["x".repeat(125_000), 1]});
    let reference = json!({"$ref": "#/$defs/large"});
    let beside = json!({"$ref": "#/$defs/large", "minLength": 1});
    let twice = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/p{}", i + 1)});
        (format!("p{i}"), json!({"allOf": [next, next]}))
    };
    let mut doubled: Map<String, Value> = (0..30).map(twice).collect();
    doubled.insert("p30".into(), json!({"type": "string", "pattern": "x"}));
    [
        (
            "schema",
            "definitions that double",
            json!({"$ref": "#/$defs/p0", "$defs": doubled}),
        ),
        (
            "schema",
            "names in pointers",
            json!({"properties": {"/".repeat(110_000): {"anyOf": vec![json!({}); 30_000]}}}),
        ),
        (
            "tools",
            "definitions that are not used",
            tool(
                json!({"properties": numbered(7000, &json!({"type": "integer"})), "$defs": {"large": large}}),
            ),
        ),
        (
            "tools",
            "definitions",
            tool(
                json!({"properties": numbered(300, &json!({"items": reference})), "$defs": {"large": large}}),
            ),
        ),
        (
            "schema",
            "definitions for errors",
            json!({"allOf": numbered(290, &reference).values().chain([&json!({"not": {}})]).collect::<Vec<_>>(),
                "$defs": {"large": large}}),
        ),
        (
            "schema",
            "definitions beside keywords",
            json!({"properties": numbered(2500, &beside), "$defs": {"large": {"const": "x".repeat(100_000)}}}),
        ),
        (
            "schema",
            "schemas of patterns",
            json!({"properties": numbered(3000, &json!({})), "patternProperties": {"^p": {"const": "x".repeat(100_000)}}}),
        ),
    ]
    .into()
}
