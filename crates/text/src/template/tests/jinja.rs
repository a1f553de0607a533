//! Comparison with the texts of Jinja and transformers: each line of `jinja.jsonl` has a template and its text, or
//! null where it is refused. The texts are those of jinja2 3.1.6 in the environment that transformers 5.24 makes for
//! chat templates.

use super::super::{Chat, ChatTemplate};
use serde_json::json;

#[test]
fn templates_render_as_in_jinja() {
    let variables = json!({
        "s": "a-b-c", "t": "  Hello World foo bar baz  ", "n": 5, "f": 1.5, "big": 1e16, "small": 1e-5,
        "tiny": 1.5e-7, "l": [1, 2, 3], "d": {"b": 1, "a": [true, null, 2.0]},
        "u8": "é\u{2028}\u{7f}😀\u{1}", "msgs": [{"role": "user", "content": "x"}], "neg": -7, "flt": 1e22,
        "p": "%s!", "lit": 0.1,
    });
    let variables = variables.as_object().cloned().unwrap_or_default();
    let mut differences = Vec::new();
    for line in include_str!("jinja.jsonl").lines() {
        let (source, wanted): (String, Option<String>) = serde_json::from_str(line).unwrap();
        let chat = Chat {
            messages: &[],
            tools: &[],
            add_generation_prompt: true,
            extra: &variables,
        };
        let template = ChatTemplate::new(&source, Some("<s>"), Some("</s>"));
        let rendered = template.and_then(|template| template.render(&chat));
        if rendered.as_ref().ok() != wanted.as_ref() {
            differences.push(format!("{source:?} is {rendered:?}, not {wanted:?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
