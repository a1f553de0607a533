use super::*;
use crate::part::{Joined, joined, pieces};
use crate::{MessageParser, ReasoningFormat, ReasoningParser};
use proptest::prelude::*;
use serde_json::json;

fn parser(format: ToolFormat, reasons: bool, max_calls: usize) -> MessageParser {
    let tool = json!({"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}});
    let tools: Arc<[Signature]> = [Signature::of(&tool)].into();
    MessageParser {
        reasoning: Some(ReasoningParser::new(ReasoningFormat::Qwen3, reasons)),
        tools: Some(ToolParser::new(format, tools.clone(), max_calls)),
        thought: Some(ThoughtParser::new(format, tools, max_calls)),
        harmony: None,
    }
}

fn read(mut parser: MessageParser, text: &str, sizes: &[usize]) -> Joined {
    let mut parts = Vec::new();
    pieces(text, sizes).for_each(|piece| parts.extend(parser.push(piece)));
    parts.extend(parser.finish());
    joined(parts)
}

/// Checks a text, its reasoning, its content and the arguments of its calls. HERMES and XML stand for calls.
#[track_caller]
fn check(format: ToolFormat, text: [&str; 3], calls: &[&str]) {
    let [text, reasoning, content] =
        text.map(|text| text.replace("HERMES", HERMES).replace("XML", XML));
    let calls = calls
        .iter()
        .map(|arguments| ("f".to_owned(), (*arguments).to_owned()));
    let wanted = (reasoning, content, calls.collect());
    for sizes in [&[usize::MAX][..], &[1], &[7, 2]] {
        let read = read(parser(format, true, usize::MAX), &text, sizes);
        assert_eq!(read, wanted, "{text:?} in pieces of {sizes:?}");
    }
}

const HERMES: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>";
const XML: &str =
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>";
const ARGUMENTS: &str = r#"{"a": "x"}"#;

#[test]
fn a_call_ends_a_thought_that_has_no_other_end() {
    let hermes = |text, calls: &[_]| check(ToolFormat::Hermes, text, calls);
    let xml = |text, calls: &[_]| check(ToolFormat::Qwen3Coder, text, calls);
    let two = [ARGUMENTS; 2];
    hermes(["<think>\nI look.\n\nHERMES", "I look.", ""], &two[1..]);
    xml(["I look.\nXML\n", "I look.", ""], &two[1..]);
    xml(["I look.\nXML\nXML", "I look.", ""], &two);
    hermes(["HERMES", "", ""], &two[1..]);
    hermes(["a HERMES b HERMES\n", "ab", ""], &two);
    // Qwen 3.5 leaves out the first marker at times.
    let unmarked = "I look. <function=f>\n</function>\n</tool_call>";
    xml([unmarked, "I look.", ""], &["{}"]);
    // Cut off.
    let cut = "a <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b";
    hermes([cut, "a", ""], &["{\"a\": \"b"]);
    let mistral = "Hm. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]";
    check(ToolFormat::Mistral, [mistral, "Hm.", ""], &["{}"]);
}

#[test]
fn a_call_in_a_thought_that_ends_is_only_mentioned() {
    let hermes = |text| check(ToolFormat::Hermes, text, &[]);
    let thought = "I could write HERMES or not.";
    let text = format!("<think>{thought}</think>\n\nNo.");
    hermes([&text, thought, "No."]);
    let text = ["XML\n</think>\n\nXML", "XML", ""];
    check(ToolFormat::Qwen3Coder, text, &[ARGUMENTS]);
    let begun = "a <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1";
    hermes([&format!("{begun}</think>b"), begun, "b"]);
}

#[test]
fn a_call_that_a_thought_goes_on_after_is_only_mentioned() {
    for thought in ["a HERMES b", "a HERMESHERMES b"] {
        check(ToolFormat::Hermes, [thought, thought, ""], &[]);
        let thought = thought.replace("HERMES", HERMES);
        for sizes in [&[usize::MAX][..], &[1]] {
            let read = read(parser(ToolFormat::Hermes, true, 1), &thought, sizes);
            assert_eq!(read, (thought.clone(), String::new(), vec![]));
        }
    }
}

#[test]
fn what_looks_like_a_call_in_a_thought_and_is_none_is_reasoning() {
    for thought in [
        "I use <tool_call> for it",
        "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\"",
        "<tool_call",
        "plain",
    ] {
        check(ToolFormat::Hermes, [thought, thought, ""], &[]);
        let text = format!("{thought}</think>b");
        check(ToolFormat::Hermes, [&text, thought, "b"], &[]);
    }
}

/// A text that cannot be a call is passed on at once. The call itself is passed on when the text ends.
#[test]
fn only_calls_are_held() {
    let mut parser = parser(ToolFormat::Hermes, true, usize::MAX);
    let reasoning = |text: &str| vec![Part::Reasoning(text.to_owned())];
    assert_eq!(
        parser.push("I use <tool_call> for".into()),
        reasoning("I use <tool_call> for")
    );
    assert_eq!(parser.push(" it.".into()), reasoning(" it."));
    assert_eq!(parser.push(HERMES.into()), []);
    assert!(parser.is_reasoning() && !parser.is_complete());
    let call = Part::CallStart("f".into());
    assert!(parser.finish().starts_with(&[call]));
}

#[test]
fn calls_in_a_thought_are_as_many_as_may_be_made() {
    let text = format!("a {HERMES}{HERMES}");
    for sizes in [&[usize::MAX][..], &[1]] {
        let (reasoning, content, calls) = read(parser(ToolFormat::Hermes, true, 1), &text, sizes);
        assert_eq!(
            (reasoning.as_str(), content.as_str(), calls.len()),
            ("a", "", 1)
        );
    }
}

proptest! {
    #[test]
    fn pieces_change_nothing(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<think>", "</think>", HERMES, XML, "<tool_call>", "</tool_call>", "{\"name\": \"f\", ", "[TOOL_CALLS]",
                "<function=f>", " ", "\n", "a", "é", "<", "{",
            ]),
            0..10,
        ),
        format in prop::sample::select(ToolFormat::ALL.to_vec()),
        reasons: bool,
        sizes in prop::collection::vec(1usize..9, 1..6),
    ) {
        let text = parts.concat();
        let whole = read(parser(format, reasons, usize::MAX), &text, &[usize::MAX]);
        prop_assert_eq!(read(parser(format, reasons, usize::MAX), &text, &sizes), whole);
    }
}
