use super::json_words;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

#[derive(Debug, Deserialize)]
struct Options {
    #[serde(rename = "on")]
    _on: Option<bool>,
    #[serde(rename = "size")]
    _size: Option<u16>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Fast,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Part {
    Text {
        #[serde(rename = "text")]
        _text: String,
    },
}

#[derive(Debug, PartialEq, Deserialize)]
struct Pair(f32, i64);

fn told<T: DeserializeOwned + std::fmt::Debug>(json: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(json).unwrap();
    json_words(&serde_json::from_value::<T>(value).unwrap_err().to_string())
}

/// serde's own messages, as the version in use writes them.
#[test]
fn no_type_of_rust_is_named() {
    for (told, plain) in [
        (
            told::<Options>("5"),
            "invalid type: integer `5`, expected an object",
        ),
        (
            told::<Options>("[]"),
            "invalid type: list, expected an object",
        ),
        (
            told::<Options>(r#"{"on": {}}"#),
            "invalid type: object, expected a boolean",
        ),
        (
            told::<Options>(r#"{"size": 70000}"#),
            "invalid value: integer `70000`, expected a non-negative integer",
        ),
        (
            told::<Options>(r#"{"size": 0.5}"#),
            "invalid type: number `0.5`, expected a non-negative integer",
        ),
        (
            told::<Mode>("5"),
            "invalid type: integer `5`, expected a string",
        ),
        (
            told::<Mode>(r#"{"fast": 1}"#),
            "invalid type: integer `1`, expected null",
        ),
        (
            told::<Mode>(r#""slow""#),
            "unknown variant `slow`, expected `fast`",
        ),
        (
            told::<Part>("5"),
            "invalid type: integer `5`, expected an object",
        ),
        (
            told::<Pair>("true"),
            "invalid type: boolean `true`, expected a list",
        ),
        (
            told::<Pair>(r#"[1, "x"]"#),
            "invalid type: string \"x\", expected an integer",
        ),
        (
            told::<Pair>(r#"["struct", 1]"#),
            "invalid type: string \"struct\", expected a number",
        ),
        (
            told::<Vec<Pair>>(r#""a, expected struct X""#),
            "invalid type: string \"a, expected struct X\", expected a list",
        ),
        (
            told::<BTreeMap<String, f32>>("[1]"),
            "invalid type: list, expected an object",
        ),
    ] {
        assert_eq!(told, plain);
    }
    let in_file = "invalid type: map, expected struct X with 2 elements at line 3 column 4";
    assert_eq!(
        json_words(in_file),
        "invalid type: object, expected an object at line 3 column 4"
    );
    assert_eq!(json_words("missing field `a`"), "missing field `a`");
}
