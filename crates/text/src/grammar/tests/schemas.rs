//! Schemas that llguidance would not keep, and texts of those that it keeps.

use super::super::copies::Taken;
use super::super::*;
use super::super::{names, numbers, patterns};
use super::{compiled, compiler, refusal, walk};
use serde_json::{Value, json};

/// The integers that texts of `schema` have.
fn integers(schema: &Value) -> Vec<i128> {
    let grammar = compiled(&GrammarSource::JsonSchema(schema.clone()));
    let texts = (0..40).map(|seed| walk(&mut *grammar.start(), seed, 60));
    let texts = texts.filter(|(_, complete)| *complete);
    let integer = |(text, _): (String, bool)| text.parse().expect("an integer");
    texts.map(integer).collect()
}

/// Schemas of numbers that would not be kept, and what an error says.
const REFUSED_NUMBERS: &str = r##"
{"type": "integer", "minimum": 9007199254740993} | would be rounded to 9007199254740992
{"type": "number", "maximum": 9007199254740993} | would be rounded to 9007199254740992
{"type": "integer", "exclusiveMinimum": 9007199254740992} | beside 9007199254740992
{"type": "integer", "exclusiveMaximum": -9007199254740992} | beside -9007199254740992
{"minimum": 9007199254740992, "exclusiveMinimum": true} | beside 9007199254740992
{"type": "integer", "minimum": 10000000000000000000} | 64 bits
{"type": "integer", "maximum": 10000000000000000000} | 64 bits
{"type": "integer", "maximum": 18446744073709551615} | 64 bits
{"type": "integer", "minimum": -9223372036854775808} | 64 bits
{"type": "integer", "minimum": -9223372036854775807} | would be rounded
{"type": "integer", "minimum": -1e30} | 64 bits
{"type": "integer", "maximum": 1e300} | 64 bits
{"type": "number", "exclusiveMaximum": -9.3e18} | 64 bits
{"type": "number", "maximum": 9223372036854775807} | would be rounded
{"maximum": 9223372036854775807} | would be rounded
{"type": "number", "maximum": 1152921504606846976} | to 1152921504606847000
{"type": "integer", "maximum": 9223372036854775807, "exclusiveMaximum": true} | beside
{"const": 9007199254740993} | `#/const`
{"enum": [0, {"a": [9007199254740993]}]} | `#/enum`
{"const": 18446744073709551615} | 64 bits
{"type": "number", "multipleOf": 1e-10} | too many digits
{"type": "number", "multipleOf": 1e-22} | too many digits
{"type": "number", "multipleOf": 3000000000} | too many digits
{"allOf": [{"multipleOf": 65537.0}, {"multipleOf": 65537.0}]} | `#/multipleOf`: the product
{"$ref": "#/$defs/s", "multipleOf": 65537, "$defs": {"s": {"multipleOf": 65539}}} | the product
{"allOf": [{"properties": {"a": {"multipleOf": 65537}}}, {"properties": {"a": {"multipleOf": 65539}}}]} | least common multiple
{"$ref": "#/default", "default": {"type": "integer", "minimum": 1e30}} | `#/default/minimum`
{"properties": {"a/b": {"anyOf": [{}, {"type": "integer", "maximum": 9007199254740993}]}}} | `#/properties/a~1b/anyOf/1/maximum`
"##;

/// Schemas of integers; the least integer, the largest, and the step between them.
const KEPT_INTEGERS: &str = r#"
{"minimum": -9007199254740992, "maximum": 9007199254740992} | -9007199254740992 | 9007199254740992 | 1
{"minimum": 0, "maximum": 9223372036854775807} | 0 | 9223372036854775807 | 1
{"exclusiveMinimum": 5, "exclusiveMaximum": 9007199254740992} | 6 | 9007199254740991 | 1
{"minimum": 9007199254740991, "maximum": 9007199254740994} | 9007199254740991 | 9007199254740994 | 1
{"const": 9223372036854775807} | 9223372036854775807 | 9223372036854775807 | 1
{"enum": [9007199254740994, 9007199254740996]} | 9007199254740994 | 9007199254740996 | 2
{"minimum": 1, "maximum": 1e18, "allOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]} | 1 | 1000000000000000000 | 1000
{"minimum": 1, "maximum": 999999, "multipleOf": 251} | 1 | 999999 | 251
"#;

/// The rows of a table, each with a schema first.
fn rows(table: &str) -> impl Iterator<Item = (Value, &str)> {
    table.trim().lines().map(|row| {
        let (schema, rest) = row.split_once(" | ").expect("two columns");
        (serde_json::from_str(schema).expect(schema), rest)
    })
}

/// Bounds and steps are kept, or refused with what would become of them, before the parser sees them.
#[test]
fn numbers_are_kept_or_refused() {
    for (schema, what) in rows(REFUSED_NUMBERS) {
        let refused = numbers::check(&schema).expect_err(&schema.to_string());
        assert!(refused.contains(what), "{schema}: {refused}");
        let source = GrammarSource::JsonSchema(schema.clone());
        let message = refusal(&source);
        assert!(message.starts_with("field is not supported"), "{message}");
        // Neither is it kept elsewhere.
        let text = format!("start: \"x\" inner\ninner: %json {schema} | \"y\"");
        let message = refusal(&GrammarSource::Lark(text));
        assert!(message.contains(what), "{message}");
    }
    for (mut schema, bounds) in rows(KEPT_INTEGERS) {
        let mut bounds = bounds
            .split(" | ")
            .map(|n| n.parse::<i128>().expect("an integer"));
        let [least, most, step] = [(); 3].map(|()| bounds.next().expect("a bound"));
        schema["type"] = "integer".into();
        assert_eq!(numbers::check(&schema), Ok(()), "{schema}");
        let found = integers(&schema);
        assert!(found.len() > 10, "{schema}: {found:?}");
        for found in found {
            let fits = (least..=most).contains(&found);
            assert!(fits && found % step == 0, "{schema}: {found}");
        }
    }
    // Data is no schema, and what does not meet has no multiple.
    for schema in [
        json!({"const": {"minimum": -1e30}}),
        json!({"enum": [1152921504606846976.0, 0.1]}),
        json!({"properties": {"a": {"multipleOf": 65537}, "b": {"multipleOf": 65539}}}),
    ] {
        assert_eq!(numbers::check(&schema), Ok(()), "{schema}");
    }
}

/// A product that the check does not find overflows in the parser, also in a release.
#[test]
fn overflows_are_refused() {
    let part = json!({"properties": {"a": {"multipleOf": 100_003}}});
    let schema = json!({"allOf": [part, part]});
    assert_eq!(numbers::check(&schema), Ok(()));
    let message = refusal(&GrammarSource::JsonSchema(schema));
    assert!(message.contains("too large to compute with"), "{message}");
    let manifest: toml::Table = include_str!("../../../../../Cargo.toml")
        .parse()
        .expect("TOML");
    let packages = &manifest["profile"]["release"]["package"];
    for package in ["llguidance", "derivre"] {
        let checks = &packages[package]["overflow-checks"];
        assert_eq!(checks.as_bool(), Some(true), "{package}");
    }
}

/// A comma is offered only if a property can follow, and properties fit both what they are declared as and patterns.
#[test]
fn patterns_of_declared_names_lead_nowhere() {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let high = json!({"minimum": 5});
    let closed = |patterns: Value, more: Value| {
        let mut schema = json!({
            "type": "object", "properties": {"a": digit, "b": digit}, "additionalProperties": false,
            "patternProperties": patterns,
        });
        let more = more.as_object().cloned().unwrap_or_default();
        schema.as_object_mut().expect("an object").extend(more);
        schema
    };
    for (schema, high) in [
        (closed(json!({"^a$": high}), json!({})), "a"),
        (closed(json!({"^(a|b)$": high}), json!({})), "ab"),
        (
            closed(
                json!({"^[ab]$": high, "^c$": digit}),
                json!({"required": ["c"]}),
            ),
            "ab",
        ),
        (
            closed(
                json!({"^c$": {"$ref": "#/$defs/d"}}),
                json!({"required": ["c"], "$defs": {"d": digit}}),
            ),
            "",
        ),
        (
            json!({"type": "object", "allOf": [
                {"properties": {"a": digit, "b": digit}},
                {"patternProperties": {"^a$": high}},
            ], "properties": {"a": true, "b": true}, "additionalProperties": false}),
            "a",
        ),
        (
            closed(
                json!({"^[^ab]": false, "^$": false, "^[ab](.|\\n)": false}),
                json!({"additionalProperties": digit}),
            ),
            "",
        ),
        (
            json!({"type": "array", "items": closed(json!({"^b$": high}), json!({})), "minItems": 1, "maxItems": 1}),
            "b",
        ),
    ] {
        let mut rewritten = schema.clone();
        assert!(patterns::rewrite(&mut rewritten), "{schema}");
        let sources = [
            GrammarSource::JsonSchema(schema.clone()),
            GrammarSource::Lark(format!("start: %json {schema}\n")),
        ];
        for source in sources {
            let grammar = compiled(&source);
            let mut complete = 0;
            for seed in 0..60 {
                let (text, ended) = walk(&mut *grammar.start(), seed, 80);
                if !ended {
                    continue;
                }
                complete += 1;
                let value: Value = serde_json::from_str(&text).expect(&text);
                let object = value.get(0).unwrap_or(&value).as_object();
                for (name, value) in object.expect("an object") {
                    let least = if high.contains(name.as_str()) { 5 } else { 0 };
                    let fits = value.as_u64().is_some_and(|n| (least..=9).contains(&n));
                    assert!(fits && ["a", "b", "c"].contains(&name.as_str()), "{text}");
                }
            }
            assert!(complete > 20, "{schema}: {complete}");
        }
    }
    for schema in [
        closed(json!({"^x": high}), json!({})),
        closed(json!({"^[a-z]$": high}), json!({})),
        json!({"patternProperties": {"^.*$": digit}}),
        json!({"properties": {"patternProperties": {"const": "a"}, "a": {}}}),
        json!({"properties": {"a": {}}, "patternProperties": 5}),
    ] {
        let mut same = schema.clone();
        assert!(!patterns::rewrite(&mut same) && same == schema, "{schema}");
    }
    // Those that overlap are refused.
    let overlapping = closed(json!({"^a$": high, "^(a)$": digit}), json!({}));
    let message = refusal(&GrammarSource::JsonSchema(overlapping));
    assert!(message.contains("not disjoint"), "{message}");
    assert!(
        compiler()
            .compile(
                "field",
                &GrammarSource::JsonSchema(closed(json!({}), json!({})))
            )
            .is_ok()
    );
}

/// Names that are any or listed are declared without the keyword, as Zod and Pydantic write records.
#[test]
fn names_of_properties_are_declared() {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let record = |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": digit});
    let open = json!({"type": "object", "additionalProperties": digit});
    let closed = |names: &[&str]| {
        let properties: serde_json::Map<_, _> = (names.iter())
            .map(|name| ((*name).to_owned(), digit.clone()))
            .collect();
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    };
    let of_colors = json!({"$defs": {"Color": {"enum": ["a", "b"], "title": "Color"}}, "items": record(json!({"$ref": "#/$defs/Color"}))});
    let mut declared = of_colors.clone();
    declared["items"] = closed(&["a", "b"]);
    for (schema, expected) in [
        (record(json!({"type": "string"})), open.clone()),
        (record(json!({"description": "x"})), open.clone()),
        (record(json!(true)), open),
        (
            record(json!({"type": "string", "enum": ["a", "b"]})),
            closed(&["a", "b"]),
        ),
        (record(json!({"const": "b"})), closed(&["b"])),
        (
            json!({"propertyNames": {"enum": ["a"]}}),
            json!({"properties": {"a": true}, "additionalProperties": false}),
        ),
        (of_colors, declared),
    ] {
        let mut rewritten = schema.clone();
        assert!(names::rewrite(&mut rewritten), "{schema}");
        assert_eq!(rewritten, expected);
        compiled(&GrammarSource::JsonSchema(schema.clone()));
        compiled(&GrammarSource::Lark(format!("start: %json {schema}\n")));
    }
    let mut record_of_two = record(json!({"enum": ["a", "b"]}));
    record_of_two["required"] = json!(["a", "b"]);
    let (text, complete) = walk(
        &mut *compiled(&GrammarSource::JsonSchema(record_of_two)).start(),
        1,
        80,
    );
    let value: Value = serde_json::from_str(&text).expect(&text);
    let fits = |name: &str| value[name].as_u64().is_some_and(|n| n <= 9);
    assert!(complete && fits("a") && fits("b"), "{text}");
    let long = json!({"const": "x".repeat(40_000)});
    for schema in [
        record(json!({"pattern": "^a"})),
        record(json!({"enum": ["a"], "maxLength": 3})),
        record(json!({"enum": ["a", 1]})),
        json!({"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}),
        json!({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": long}),
        json!({"properties": {"propertyNames": {"type": "string"}}}),
        json!({"properties": {"a": record(json!({"const": "b"})), "b": {"$ref": "#/properties/a/additionalProperties"}}}),
    ] {
        let mut same = schema.clone();
        assert!(!names::rewrite(&mut same) && same == schema, "{schema}");
    }
    let message = refusal(&GrammarSource::JsonSchema(record(json!({"pattern": "^a"}))));
    assert!(message.contains("propertyNames"), "{message}");
    let list: Vec<String> = (0..1000).map(|i| format!("n{i}")).collect();
    let record = json!({"propertyNames": {"$ref": "#/$defs/list"}});
    let mut many = json!({"$defs": {"list": {"enum": list}}, "anyOf": vec![record; 100]});
    assert!(names::rewrite(&mut many));
    assert!(many.to_string().len() < 200_000, "of one list");
}

/// A schema that becomes too large is refused before it is built. The repetitions of honest schemas are not refused.
#[test]
fn copies_are_bounded() {
    let chain = |count: usize, last: Value, link: &dyn Fn(Value) -> Value| {
        let next = |i: usize| link(json!({"$ref": format!("#/$defs/d{}", i + 1)}));
        let mut all: serde_json::Map<_, _> =
            (0..count).map(|i| (format!("d{i}"), next(i))).collect();
        all.insert(format!("d{count}"), last);
        json!({"$ref": "#/$defs/d0", "$defs": all})
    };
    let numbered = |count: usize, schema: &Value| -> serde_json::Map<String, Value> {
        (0..count)
            .map(|i| (format!("p{i}"), schema.clone()))
            .collect()
    };
    let text = json!({"type": "string", "pattern": "x"});
    let long = json!({"const": "x".repeat(100_000)});
    let lengths: Vec<Value> = (0..9000).map(|i| json!({"minLength": i})).collect();
    for schema in [
        chain(24, text.clone(), &|next| json!({"allOf": [next, next]})),
        chain(
            1100,
            text.clone(),
            &|next| json!({"allOf": [next], "minLength": 1}),
        ),
        json!({"properties": numbered(2500, &json!({"$ref": "#/$defs/a", "minLength": 1})), "$defs": {"a": long}}),
        json!({"properties": numbered(3000, &json!({})), "patternProperties": {"^p": long}}),
        json!({"type": "string", "anyOf": lengths, "pattern": "x".repeat(50_000)}),
        json!({"enum": vec!["x"; 9000], "pattern": "x".repeat(50_000)}),
    ] {
        let message = refusal(&GrammarSource::JsonSchema(schema));
        assert!(
            message.contains("too large") || message.contains("too deep"),
            "{message}"
        );
    }
    // B is looked into while A is open, whose constant it copies.
    let uses = vec![json!({"type": "string", "$ref": "#/$defs/B"}); 50];
    let mut properties = numbered(2000, &json!({"$ref": "#/$defs/D", "minLength": 1}));
    properties.insert("first".into(), json!({"$ref": "#/$defs/A", "minLength": 1}));
    let recursive = json!({
        "anyOf": [{"$ref": "#/$defs/B"}, {"type": "object", "properties": properties}],
        "$defs": {
            "A": {"anyOf": [{"type": "object", "properties": {"q": {"$ref": "#/$defs/B"}}}, long]},
            "B": {"allOf": [{"$ref": "#/$defs/A"}, {"minLength": 1}]},
            "D": {"type": "string", "allOf": uses},
        },
    });
    assert!(Taken::default().add(&recursive).is_err());
    let names = json!({"properties": {"ab".repeat(100_000): {}}, "patternProperties": {"^(a|b)*a(a|b){5000}$": {}}});
    let message = refusal(&GrammarSource::JsonSchema(names));
    assert!(message.contains("256 bytes"), "{message}");
    let several = json!({"properties": numbered(3000, &json!({}))});
    let several = format!("start: a | b\na: %json {several}\nb: %json {several}");
    let message = refusal(&GrammarSource::Lark(several));
    assert!(message.contains("may have 4000"), "{message}");
    let message = refusal(&GrammarSource::JsonSchema(
        json!({"items": {"properties": numbered(4001, &json!({}))}}),
    ));
    assert!(message.contains("may have 4000"), "{message}");
    let node = json!({"type": "object", "properties": {"next": {"$ref": "#/$defs/d0"}, "a": text}});
    for schema in [
        chain(
            3000,
            text.clone(),
            &|next| json!({"allOf": [next], "description": "Next."}),
        ),
        chain(20, node.clone(), &|next| json!({"allOf": [next, node]})),
        json!({"type": "string", "enum": (0..9000).map(|i| i.to_string()).collect::<Vec<_>>()}),
        json!({"properties": numbered(3000, &json!({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]})), "$defs": {"a": long}}),
    ] {
        assert_eq!(Taken::default().add(&schema), Ok(()));
    }
}
