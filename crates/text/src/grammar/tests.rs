use super::toy::ToyTokens;
use super::*;
use foretoken_core::error::Error;
use foretoken_core::sampling::Grammar;
use foretoken_core::sampling::GrammarState;
use foretoken_core::sampling::Mask;
use foretoken_core::sampling::mix;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod company;
mod compiler;
mod schemas;

const EOS: [u32; 2] = [0, 1];
const LONG: [&str; 9] = [
    "true", "tr", "\": ", "\": \"", "name", "na", "{\"", ", \"", "ab",
];

/// The 128 ASCII characters, some longer tokens, and two ids that end a text.
fn vocabulary() -> ToyTokens {
    let ascii = (0..128u8).map(|byte| vec![byte]);
    let long = LONG.iter().map(|text| text.as_bytes().to_vec());
    ToyTokens::new(ascii.chain(long), &EOS)
}

fn compiler() -> Compiler {
    Compiler::new(Arc::new(vocabulary()))
}

fn compiled(source: &GrammarSource) -> Grammar {
    compiler().compile("field", source).expect("a good grammar")
}

fn refusal(source: &GrammarSource) -> String {
    match compiler().compile("field", source) {
        Err(error @ Error::Request { .. }) => {
            assert_eq!(error.param().as_deref(), Some("field"));
            error.to_string()
        }
        other => panic!("{source:?}: {other:?}"),
    }
}

/// A random text of the grammar, as tokens; cut off after `max`.
fn walk(state: &mut dyn GrammarState, seed: u64, max: usize) -> (String, bool) {
    let vocabulary = vocabulary();
    let mut text = Vec::new();
    for step in 0..max {
        let mask = state.mask().expect("no limit is near").clone();
        let allowed: Vec<u32> = (0..200).filter(|&id| mask.allows(id)).collect();
        assert!(!allowed.is_empty(), "after {text:?}");
        assert_eq!(mask.only().is_some(), allowed.len() == 1);
        // The end is taken when it is offered, in half of the cases.
        let roll = mix(seed ^ mix(step as u64));
        let mut token = allowed[roll as usize % allowed.len()];
        if roll >> 32 & 1 == 0 && mask.allows(EOS[0]) {
            token = EOS[0];
        }
        if EOS.contains(&token) {
            return (String::from_utf8(text).expect("ASCII"), true);
        }
        text.extend(vocabulary.bytes(token));
        state.push(token);
        state.commit();
    }
    (String::from_utf8(text).expect("ASCII"), false)
}

fn schema() -> GrammarSource {
    GrammarSource::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "flag": {"type": "boolean"},
            "list": {"type": "array", "items": {"enum": ["ab", "abc", 7]}, "maxItems": 3},
        },
        "required": ["name", "list"],
        "additionalProperties": false,
    }))
}

#[test]
fn texts_follow_their_grammar() {
    let mut ended = 0;
    let grammar = compiled(&schema());
    for seed in 0..60 {
        let (text, complete) = walk(&mut *grammar.start(), seed, 200);
        if complete {
            ended += 1;
            let value: serde_json::Value = serde_json::from_str(&text).expect(&text);
            let (name, list) = (value["name"].as_str(), value["list"].as_array());
            let fits = name.is_some_and(|name| name.len() <= 5);
            let fits = fits && list.is_some_and(|list| list.len() <= 3);
            assert!(
                fits && !text.contains('\n') && !text.contains("  "),
                "{text}"
            );
        }
    }
    assert!(ended > 40, "{ended}");
    for (source, fits) in [
        (
            GrammarSource::Regex("a[bc]{2,3}d?".into()),
            "abb abbb abc acbc accd",
        ),
        (
            GrammarSource::Choice(vec!["true".into(), "tr\"".into(), "a/b".into()]),
            "true tr\" a/b",
        ),
        (
            GrammarSource::Lark("start: \"ab\" x\nx: \"c\" | \"d\" x".into()),
            "abc abdc abddc",
        ),
    ] {
        let grammar = compiled(&source);
        let texts: Vec<String> = (0..200)
            .map(|seed| walk(&mut *grammar.start(), seed, 40))
            .filter_map(|(text, complete)| complete.then_some(text))
            .collect();
        for text in fits.split(' ').take(3) {
            assert!(
                texts.iter().any(|found| found == text),
                "{source:?}: {text}, {texts:?}"
            );
        }
    }
    let (text, _) = walk(&mut *compiled(&GrammarSource::JsonObject).start(), 3, 30);
    assert!(text.starts_with('{'), "{text}");
}

/// Whatever was pushed, popped, committed and asked for before, a mask depends on the tokens alone.
#[test]
fn a_mask_is_a_function_of_the_tokens() {
    for source in [
        schema(),
        GrammarSource::Regex("(ab|[a-f]{2,9})*x".into()),
        // It cannot go back, so that its parser starts again.
        GrammarSource::Lark("start: a \"x\"\na[max_tokens=3]: /[a-f]*/".into()),
    ] {
        let grammar = compiled(&source);
        for seed in 0..25 {
            let mut state = grammar.start();
            let (mut tokens, mut committed): (Vec<u32>, usize) = (Vec::new(), 0);
            for step in 0..60 {
                let roll = mix(seed << 32 | step);
                match roll % 6 {
                    0 => {
                        let count = (roll >> 8) as usize % (tokens.len() - committed + 1);
                        tokens.truncate(tokens.len() - count);
                        state.pop(count);
                    }
                    1 if tokens.len() > committed + 2 => {
                        state.commit();
                        committed = tokens.len();
                    }
                    _ => {
                        let mask = state.mask().expect("no limit is near");
                        let allowed: Vec<u32> = (2..200).filter(|&id| mask.allows(id)).collect();
                        // Sometimes a token that is not allowed: nothing may come after it.
                        let token = match roll >> 16 & 7 {
                            0 if committed < tokens.len() => 100 + (roll >> 24) as u32 % 30,
                            _ if allowed.is_empty() => continue,
                            _ => allowed[(roll >> 24) as usize % allowed.len()],
                        };
                        tokens.push(token);
                        state.push(token);
                    }
                }
                let mut fresh = grammar.start();
                tokens.iter().for_each(|&token| fresh.push(token));
                fresh.commit();
                assert_eq!(state.mask(), fresh.mask(), "{source:?} after {tokens:?}");
            }
        }
    }
}

/// Forced tokens are those that the masks force: token by token, the only allowed one.
#[test]
fn forced_tokens_are_the_only_ones() {
    let vocabulary = vocabulary();
    let mut state = compiled(&schema()).start();
    let forced = state.forced(20);
    let bytes = forced.iter().flat_map(|&id| vocabulary.bytes(id));
    let text: Vec<u8> = bytes.copied().collect();
    assert_eq!(String::from_utf8_lossy(&text), "{\"name");
    for &token in &forced {
        assert_eq!(state.mask().and_then(Mask::only), Some(token));
        state.push(token);
    }
    // A colon may come alone or in a longer token.
    assert_eq!(state.mask().and_then(Mask::only), None);
    state.pop(forced.len());
    assert_eq!(state.forced(2), forced[..2]);
    let choice = compiled(&GrammarSource::Choice(vec!["x".into()]));
    assert_eq!(choice.start().forced(9), [120]);
}

#[test]
fn drafts_are_cut_where_the_grammar_ends_them() {
    let mut state = compiled(&GrammarSource::Regex("x(b|c)d".into())).start();
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
    let chain = [None, Some(0), Some(1), Some(2)];
    let accepted = [true, true, true, false];
    assert_eq!(state.accepts(&ids("xcdd"), &chain), accepted);
    let tree = [None, Some(0), Some(0), Some(1), Some(2), Some(3)];
    let of_tree = [true, false, true, false, true, false];
    assert_eq!(state.accepts(&ids("xybdda"), &tree), of_tree);
    state.prepare(&ids("xcdd"), &chain, &AtomicBool::new(false));
    assert_eq!(state.accepts(&ids("xcdd"), &chain), accepted);
    assert_eq!(state.forced(5), ids("x"));
}

/// Schemas that are refused, and what an error says.
const REFUSED_SCHEMAS: &str = r##"
{"type": "object", "properties": {"a": {"type": "strin"}}} | `#/properties/a` | {"type":"strin"}
{"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"not": {}}]}}}} | `#/properties/a~1b/items/anyOf/1` | not
{"$ref": "#/$defs/x", "$defs": {"x": {"required": ["k"], "type": "object", "properties": {"k": {"type": "string", "minLength": 3, "maxLength": 2}}}}} | `#/$defs/x/properties/k` | minLength
{"type": "string", "pattern": "a(b"} | the schema | a(b
{"type": "string", "format": "nonsense"} | the schema | nonsense
false | false
[1] | must be an object or a boolean
{"$ref": "#"} | matches no text
"##;

#[test]
fn errors_quote_the_place() {
    let schemas = REFUSED_SCHEMAS.trim().lines().map(|row| {
        let (schema, quoted) = row.split_once(" | ").expect("two columns");
        let schema = serde_json::from_str(schema).expect("JSON");
        (GrammarSource::JsonSchema(schema), quoted)
    });
    let (regex, lark) = (GrammarSource::Regex, GrammarSource::Lark);
    let others = [
        (regex("a(b".into()), "a(b"),
        (lark("start: \"a\" |\n  b\n".into()), "b"),
        (lark("root ::= \"a\"".into()), "Lark"),
        (GrammarSource::Choice(Vec::new()), "at least one"),
        (regex("(".repeat(101)), "at most 100 deep"),
        (lark("x".repeat(MAX_SOURCE_BYTES + 1)), "bytes"),
    ];
    for (source, quoted) in schemas.chain(others) {
        let message = refusal(&source);
        println!("{message}");
        for part in quoted.split(" | ") {
            assert!(message.contains(part), "{part} is missing: {message}");
        }
        let is_short = message.len() < 1000 && !message.contains("backtrace");
        assert!(is_short, "{message}");
    }
}
