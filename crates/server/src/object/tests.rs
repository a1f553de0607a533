use super::*;
use wire::{Common, Completion, Detokenize, PromptInput, Tokenize};

const READ: fn() -> [&'static [&'static str]; 3] = || {
    [
        wire::names::<Common>(),
        wire::names::<Completion>(),
        wire::names::<Detokenize>(),
    ]
};

fn fields<T: DeserializeOwned>(body: &str) -> Result<T> {
    JsonObject::parse(body.as_bytes(), &READ())?.fields()
}

#[test]
fn the_last_of_two_fields_counts_and_null_is_absent() {
    let body: Common = fields(r#"{"n": 2, "seed": 1, "n": 3, "seed": null}"#).expect("fine");
    assert_eq!((body.n, body.seed), (Some(3), None));
}

#[test]
fn whole_numbers_are_integers_alone_and_in_lists() {
    let body: Common =
        fields(r#"{"n": 4.0, "top_k": -1.0, "stop_token_ids": [1.0, 2]}"#).expect("whole numbers");
    assert_eq!((body.n, body.top_k), (Some(4), Some(-1)));
    assert_eq!(body.stop_token_ids, Some(vec![1, 2]));
    let prompt = |json: &str| {
        let body: Result<Completion> = fields(&format!(r#"{{"prompt": {json}}}"#));
        body.map(|body| body.prompt)
    };
    assert!(matches!(prompt("[1.0, 2]"), Ok(Some(PromptInput::Ids(ids))) if ids == [1, 2]));
    assert!(matches!(prompt("[[1], [2.0]]"), Ok(Some(PromptInput::IdLists(l))) if l == [[1], [2]]));
    assert!(matches!(prompt(r#"["a"]"#), Ok(Some(PromptInput::Texts(texts))) if texts == ["a"]));
    assert!(matches!(prompt(r#""a""#), Ok(Some(PromptInput::Text(text))) if text == "a"));
    assert!(prompt("[1.5]").is_err() && prompt("[-1]").is_err() && prompt("{}").is_err());
}

/// Bodies, and what errors say.
const WRONG: &str = r#"
{"n": "two"} | n: invalid type: string "two", expected a non-negative integer
{"n": 1.5} | n: invalid type: number `1.5`, expected a non-negative integer
{"seed": []} | seed: invalid type: list, expected an integer
{"stop_token_ids": [1, -1]} | stop_token_ids[1]: invalid value: integer `-1`, expected a non-negative integer
{"stop_token_ids": [null]} | stop_token_ids[0]: invalid type: null, expected a non-negative integer
{"stop": [1]} | stop[0]: invalid type: integer `1`, expected a string
{"prediction": {"type": "content"}} | prediction.content is required
{"stream_options": {"include_usage": 1}} | stream_options.include_usage: invalid type: integer `1`, expected a boolean
{"stream_options": []} | stream_options: invalid type: list, expected an object
{"acceptance": 1} | acceptance: invalid type: integer `1`, expected a string
"#;

#[test]
fn errors_name_the_place_and_what_is_accepted() {
    for row in WRONG.trim().lines() {
        let (body, message) = row.split_once(" | ").expect("two columns");
        let error = fields::<Common>(body).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    for (body, start) in [
        ("", "the body is not valid JSON: EOF"),
        ("{\"n\": 1", "the body is not valid JSON: EOF"),
        (
            "{\"n\": 1} x",
            "the body is not valid JSON: trailing characters",
        ),
        ("{\"x\": [1,]}", "the body is not valid JSON: "),
        (
            "{\"x\": \"\u{1}\"}",
            "the body is not valid JSON: control character",
        ),
        ("[1]", "the body must be a JSON object"),
        ("\"a\"", "the body must be a JSON object"),
        ("1.5", "the body must be a JSON object"),
        ("null", "the body must be a JSON object"),
    ] {
        let error = fields::<Common>(body).unwrap_err().to_string();
        assert!(error.starts_with(start), "{body}: {error}");
    }
    let bytes = JsonObject::parse(b"{\"x\": \"\xff\"}", &READ());
    assert!(bytes.is_err());
}

#[test]
fn trees_are_bounded_and_lists_are_not() {
    let list = format!("[{}0]", "0,".repeat(MAX_VALUES));
    let body: Detokenize = fields(&format!(r#"{{"tokens": {list}}}"#)).expect("ids");
    assert_eq!(body.tokens.map(|ids| ids.len()), Some(MAX_VALUES + 1));
    let unread = format!(r#"{{"unknown": {list}, "n": 1}}"#);
    assert!(fields::<Common>(&unread).is_ok());
    let read = [wire::names::<Tokenize>()];
    let tree = format!(r#"{{"messages": {list}}}"#);
    let tree = JsonObject::parse(tree.as_bytes(), &read).expect("JSON");
    let error = tree.fields::<Tokenize>().unwrap_err().to_string();
    assert_eq!(
        error,
        format!("messages: may have at most {MAX_VALUES} values")
    );
}

#[test]
fn the_line_about_unknown_names_is_bounded() {
    let line = |names: &[String]| {
        let fields: Vec<String> = names.iter().map(|name| format!("{name}: 0")).collect();
        let body = format!("{{{}}}", fields.join(","));
        let body = JsonObject::parse(body.as_bytes(), &[]);
        body.expect("an object").ignored()
    };
    assert_eq!(
        line(&[r#""a""#.into(), r#""b\n""#.into(), r#""user""#.into()]),
        r#"unknown fields are ignored: ["a", "b\n"]"#
    );
    let long = format!("\"{}\"", "é".repeat(10_000));
    let line = line(&vec![long; 1000]);
    assert!(line.ends_with("] and 984 more"), "{line}");
    assert!(line.chars().count() < 1200, "{line}");
}

/// Unknown names are read in time linear in the length of the JSON text.
#[test]
fn many_names_take_linear_time() {
    let names = |name: &str| -> String {
        let field = |i| format!(r#""{name}{i}":null,"model":"m","#);
        (0..300_000).map(field).collect()
    };
    for name in ["guided_", "unknown"] {
        let body = format!(r#"{{{}"model":"m"}}"#, names(name));
        let started = std::time::Instant::now();
        let read: &[&[&str]] = &[&["model"]];
        let body = JsonObject::parse(body.as_bytes(), read).expect("an object");
        assert!(body.check_others(read).is_ok());
        assert!(started.elapsed() < std::time::Duration::from_secs(30));
    }
}
