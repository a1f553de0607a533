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

/// Asserts what is said of each row of a table, which has a text in JSON and the words.
#[track_caller]
fn assert_told<T: DeserializeOwned + std::fmt::Debug>(table: &str) {
    for row in table.trim().lines() {
        let (json, plain) = row.split_once(" | ").expect("two columns");
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let error = serde_json::from_value::<T>(value).unwrap_err();
        assert_eq!(json_words(&error.to_string()), plain, "{json}");
    }
}

/// serde's own messages, as the version in use writes them.
#[test]
fn no_type_of_rust_is_named() {
    assert_told::<Options>(
        r#"
5 | invalid type: integer `5`, expected an object
[] | invalid type: list, expected an object
{"on": {}} | invalid type: object, expected a boolean
{"size": 70000} | invalid value: integer `70000`, expected a non-negative integer
{"size": 0.5} | invalid type: number `0.5`, expected a non-negative integer
"#,
    );
    assert_told::<Mode>(
        r#"
5 | invalid type: integer `5`, expected a string
{"fast": 1} | invalid type: integer `1`, expected null
"slow" | unknown variant `slow`, expected `fast`
"#,
    );
    assert_told::<Part>("5 | invalid type: integer `5`, expected an object");
    assert_told::<Pair>(
        r#"
true | invalid type: boolean `true`, expected a list
[1, "x"] | invalid type: string "x", expected an integer
["struct", 1] | invalid type: string "struct", expected a number
"#,
    );
    assert_told::<Vec<Pair>>(
        r#""a, expected struct X" | invalid type: string "a, expected struct X", expected a list"#,
    );
    assert_told::<BTreeMap<String, f32>>("[1] | invalid type: list, expected an object");
    let in_file = "invalid type: map, expected struct X with 2 elements at line 3 column 4";
    assert_eq!(
        json_words(in_file),
        "invalid type: object, expected an object at line 3 column 4"
    );
    assert_eq!(json_words("missing field `a`"), "missing field `a`");
}
