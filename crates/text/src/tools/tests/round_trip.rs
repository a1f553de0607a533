//! What a format writes and what its grammar allows, its parser reads back.

use super::*;
use crate::grammar::{Compiler, GrammarSource, toy::ToyTokens};
use crate::json::python_json;
use crate::tools::{Answer, Calls, FreeformInput, InputGrammar, answer_grammar};
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
    grammar_with(format, tools, &[], &[])
}

/// The grammar of calls where the texts `special` are tokens, whose ids follow [`EOS`].
fn grammar_with(
    format: ToolFormat,
    tools: &[Value],
    inputs: &[InputGrammar],
    special: &[&str],
) -> Grammar {
    let calls = Calls {
        format,
        tools,
        parallel: true,
        inputs,
    };
    let answer = Answer {
        reasoning: None,
        is_harmony: false,
        calls: Some(calls),
        content: None,
    };
    let ids: Vec<u32> = (EOS + 1..).take(special.len()).collect();
    let id = |text: &str| special.iter().zip(&ids).find(|(of, _)| **of == text);
    let source = answer_grammar(answer, |text| Some(*id(text)?.1)).expect("short enough");
    let bytes = (0..=EOS).map(|id| u8::try_from(id).into_iter().collect::<Vec<u8>>());
    let names = special.iter().map(|text| text.as_bytes().to_vec());
    let tokens = ToyTokens::new(bytes.chain(names), &[EOS]).with_special(&ids);
    let compiler = Compiler::new(Arc::new(tokens));
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
        for text in (0..4).filter_map(|seed| walk(&grammar, &[], seed)) {
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
        // `-0` is an integer, too.
        "n" => value
            .as_f64()
            .is_some_and(|n| n.abs() <= 20.0 && n.fract() == 0.0),
        "flag" => value.is_boolean(),
        "maybe" => value.is_null(),
        "list" => value.as_array().is_some_and(|list| list.len() <= 2),
        _ => false,
    }
}

/// A random text of the grammar; `None` if it does not end soon.
fn walk(grammar: &Grammar, special: &[&str], seed: u64) -> Option<String> {
    let mut state = grammar.start();
    let mut text = Vec::new();
    for step in 0..3000 {
        let mask = state.mask()?.clone();
        let last = EOS + special.len() as u32;
        let allowed: Vec<u32> = (0..=last).filter(|&id| mask.allows(id)).collect();
        let roll = mix(seed ^ mix(step));
        let token = allowed[roll as usize % allowed.len()];
        if token == EOS || roll >> 32 & 1 == 0 && mask.allows(EOS) {
            return Some(String::from_utf8(text).expect("UTF-8"));
        }
        match u8::try_from(token) {
            Ok(byte) => text.push(byte),
            Err(_) => text.extend(special[(token - EOS - 1) as usize].bytes()),
        }
        state.push(token);
        state.commit();
    }
    None
}

/// Where a marker is a token within tags, a text ends only with the whole tag.
#[test]
fn tags_may_have_a_token_within() {
    const DSML: &[&str] = &["｜DSML｜"];
    let tools = functions(&json!({"type": "string"}));
    for format in [ToolFormat::DeepseekV32, ToolFormat::DeepseekV4] {
        let text = text_of(
            format,
            &[
                ("f", json!({"a": "x </b> </", "n": 1})),
                ("stop", json!({})),
            ],
        );
        let mut state = grammar_with(format, &tools, &[], DSML).start();
        let mut rest = text.as_str();
        while let Some(c) = rest.chars().next() {
            let after = rest.strip_prefix(DSML[0]);
            let ids: Vec<u32> = match after {
                Some(_) => vec![EOS + 1],
                None => c.to_string().bytes().map(u32::from).collect(),
            };
            for id in ids {
                let allowed = state.mask().is_some_and(|mask| mask.allows(id));
                assert!(allowed, "{format:?}: {rest:?} of {text}");
                state.push(id);
                state.commit();
            }
            rest = after.unwrap_or(&rest[c.len_utf8()..]);
        }
        assert!(state.mask().is_some_and(|mask| mask.allows(EOS)), "{text}");
    }
}

/// The input of a custom tool follows its grammar where a token ends texts.
#[test]
fn inputs_follow_their_grammars() {
    const LARK: &str =
        "start: \"say \\\"\" WORD LF+ \"\\\\\"\nWORD: /[\"<>x]{1,3}/\n%import common.LF";
    let parameters = json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]});
    let tool = json!({"type": "function", "function": {"name": "patch", "parameters": parameters}});
    let tools = [tool, functions(&json!({"type": "string"})).remove(2)];
    let is_followed = |input: &str| {
        let word = input
            .strip_prefix("say \"")
            .and_then(|rest| rest.strip_suffix('\\'));
        word.is_some_and(|word| {
            let text = word.trim_end_matches('\n');
            let fits = (1..=3).contains(&text.len()) && text.len() < word.len();
            fits && text.chars().all(|c| "\"<>x".contains(c))
        })
    };
    let inputs = [InputGrammar {
        tool: "patch".into(),
        definition: LARK.into(),
    }];
    for (format, special) in [
        (ToolFormat::Glm45, &["</arg_value>"][..]),
        (ToolFormat::Gemma4, &["<|\"|>"]),
        (ToolFormat::FunctionGemma, &["<escape>"]),
    ] {
        let grammar = grammar_with(format, &tools, &inputs, special);
        let mut patches = 0;
        for text in (0..16).filter_map(|seed| walk(&grammar, special, seed)) {
            for (name, arguments) in calls_of(format, &tools, &text) {
                if name != "patch" {
                    continue;
                }
                let mut input = FreeformInput::default();
                let read = input.push(&arguments.to_string()) + &input.finish();
                assert!(is_followed(&read), "{format:?}: {read:?} of {text}");
                patches += 1;
            }
        }
        assert!(patches > 0, "{format:?}");
    }
}

/// A text between tags follows its schema as well.
#[test]
fn texts_between_tags_follow_their_schemas() {
    let properties = json!({
        "a": {"type": "string", "pattern": "^[b<\n]{2,4}$", "maxLength": 3},
        "b": {"type": "string", "minLength": 1, "maxLength": 2},
        "c": {"type": "string", "const": "x y"},
        "d": {"$ref": "#/$defs/d"},
    });
    let parameters = json!({"type": "object", "properties": properties, "required": ["a", "b", "c", "d"],
        "$defs": {"d": {"type": "string", "pattern": "^q.$"}}});
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
    for &format in TEXT_FORMATS {
        let tokens: &[&[&str]] = match format.syntax().body {
            Body::Tags(_) if format.markers().contains(&"｜DSML｜") => &[&[], &["｜DSML｜"]],
            Body::Tags(_) => &[&[]],
            _ => continue,
        };
        for special in tokens {
            let grammar = grammar_with(format, &tools, &[], special);
            let mut complete = 0;
            for text in (0..12).filter_map(|seed| walk(&grammar, special, seed)) {
                for (_, arguments) in calls_of(format, &tools, &text) {
                    let of = |key: &str| arguments[key].as_str().expect("a text").to_owned();
                    let (a, b) = (of("a"), of("b"));
                    let fits = (2..=3).contains(&a.len()) && a.chars().all(|c| "b<\n".contains(c));
                    assert!(fits, "{format:?}: {a:?} of {text}");
                    assert!((1..=2).contains(&b.chars().count()), "{format:?}: {text}");
                    assert_eq!(of("c"), "x y", "{format:?}: {text}");
                    assert!(of("d").starts_with('q'), "{format:?}: {text}");
                    complete += 1;
                }
            }
            assert!(complete > 0, "{format:?} {special:?}");
        }
    }
}
