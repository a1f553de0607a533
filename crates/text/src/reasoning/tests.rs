use super::*;
use crate::part::pieces;
use proptest::prelude::*;

/// The reasoning and the content of a text that comes in pieces of these sizes.
fn split(format: ReasoningFormat, reasons: bool, text: &str, sizes: &[usize]) -> (String, String) {
    let mut parser = ReasoningParser::new(format, reasons);
    let (mut parts, mut content) = (Vec::new(), String::new());
    for piece in pieces(text, sizes) {
        content += &parser.push(&piece, &mut parts);
    }
    content += &parser.finish(&mut parts);
    let text = |part| match part {
        Part::Reasoning(text) => text,
        other => panic!("{other:?}"),
    };
    (parts.into_iter().map(text).collect(), content)
}

/// Formats, whether the prompt has begun the reasoning, and a text with its reasoning and its content.
const TEXTS: &str = r#"
qwen3 | false | ["\n<think>\na b\n</think>\n\nyes \n", "a b", "yes \n"]
qwen3 | false | [" hi <think>a</think>", "", " hi <think>a</think>"]
qwen3 | true | ["\na </thin b</think>c</think>", "a </thin b", "c</think>"]
qwen3 | true | ["<think>a</think>", "a", ""]
qwen3 | true | ["a b\n", "a b", ""]
qwen3 | false | ["<think>\n\n</think>\n\nyes", "", "yes"]
qwen3 | false | ["<thi", "", "<thi"]
qwen3 | true | ["<thi", "<thi", ""]
qwen3 | false | ["  ", "", "  "]
seed_oss | false | ["<seed:think>a</seed:think>b", "a", "b"]
seed_oss | false | ["<think>a</think>b", "", "<think>a</think>b"]
cohere_command3 | false | ["<|START_THINKING|>a<|END_THINKING|>b", "a", "b"]
cohere_command3 | true | ["a<|END_THINKING|>b", "a", "b"]
mistral | false | ["[THINK]a[/THINK]\n[TOOL_CALLS]", "a", "[TOOL_CALLS]"]
gemma4 | false | ["<|channel>thought\na\n<channel|>b", "a", "b"]
kimi | false | ["◁think▷ a ◁/think▷ b", "a", "b"]
apertus | false | ["<|inner_prefix|>a<|inner_suffix|>b", "a", "b"]
exaone | true | ["<thought>\na\n</thought>\n\nb", "a", "b"]
granite | false | ["Here is my thought process: a. Here's my response: b", "a.", "b"]
granite | false | ["Here is my cat.", "", "Here is my cat."]
hunyuan_a13b | false | ["<think>\na\n</think>\n<answer>\nb c\n</answer>\n", "a", "b c"]
hunyuan_a13b | false | ["<think>a</think> <ans b", "a", "<ans b"]
hunyuan_a13b | false | ["<answer>\nb c\n</answer>", "", "b c"]
hunyuan_a13b | false | [" <ans b", "", " <ans b"]
hunyuan_a13b | false | ["<think>a</think>\n<answer>b <", "a", "b <"]
hunyuan_a13b | false | ["<think>a</think><answer>b</answer> c", "a", "bc"]
ernie45 | true | ["a</think>\n\n<response>\nb\n</response>", "a", "b"]
ernie45 | true | ["a</think>b </response>", "a", "b </response>"]
"#;

#[test]
fn reasoning_is_what_stands_between_the_marks() {
    for row in TEXTS.trim().lines() {
        let mut columns = row.split(" | ");
        let mut next = || columns.next().expect("three columns");
        let (name, reasons) = (next(), next() == "true");
        let [text, reasoning, content]: [String; 3] = serde_json::from_str(next()).expect("JSON");
        let mut all = ReasoningFormat::ALL.into_iter();
        let format = all.find(|format| format.name() == name).expect(name);
        let expected = (reasoning, content);
        for sizes in [&[1000][..], &[1], &[3, 2]] {
            assert_eq!(split(format, reasons, &text, sizes), expected, "{row}");
        }
    }
}

#[test]
fn rows_are_in_the_order_of_the_formats() {
    for (i, format) in ReasoningFormat::ALL.into_iter().enumerate() {
        assert_eq!(format as usize, i);
        assert!(format.marks().markers.len() != 1);
    }
    let (_, ends) = ReasoningFormat::Qwen3.marks_of_thoughts();
    assert_eq!(ends, ["</think>"]);
    let (_, ends) = ReasoningFormat::Harmony.marks_of_thoughts();
    assert!(ends.is_empty());
}

#[test]
fn templates_have_the_marks_of_their_format() {
    for (source, format) in [
        (
            "{{ m.content.split('</think>') }}",
            Some(ReasoningFormat::Qwen3),
        ),
        (
            "<think> </think> <answer> </answer>",
            Some(ReasoningFormat::Hunyuan),
        ),
        (
            "<think> <response> </response>",
            Some(ReasoningFormat::Ernie45),
        ),
        ("<seed:think>", Some(ReasoningFormat::SeedOss)),
        ("[THINK]", Some(ReasoningFormat::Mistral)),
        (
            "after 'Here is my thought process:' and",
            Some(ReasoningFormat::Granite),
        ),
        ("<|START_THINKING|>", Some(ReasoningFormat::Command)),
        (
            "{% set inner_token = '<|inner_prefix|>' %}",
            Some(ReasoningFormat::Apertus),
        ),
        ("<|channel|>analysis<|message|>", None),
        ("{{ messages }}", None),
    ] {
        assert_eq!(ReasoningFormat::of_template(source), format, "{source}");
    }
}

#[test]
fn the_prompt_says_whether_a_text_begins_with_reasoning() {
    use ReasoningFormat::{DeepseekR1, Qwen3};
    for (prompt, r1, qwen) in [
        ("<|im_start|>assistant\n", true, false),
        ("<|im_start|>assistant\n<think>\n", true, true),
        (
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            false,
            false,
        ),
    ] {
        assert_eq!(DeepseekR1.begins_with_reasoning(prompt), r1, "{prompt}");
        assert_eq!(Qwen3.begins_with_reasoning(prompt), qwen, "{prompt}");
    }
}

/// What comes first is no beginning of reasoning: its space is part of it.
#[test]
fn reasoning_goes_on() {
    let mut parser = ReasoningParser::within_reasoning(ReasoningFormat::Qwen3);
    let mut parts = Vec::new();
    let content = parser.push(" b</think>\n\nc", &mut parts) + &parser.finish(&mut parts);
    assert_eq!(parts, [Part::Reasoning(" b".into())]);
    assert_eq!(content, "c");
    assert!(ends_in_thought("\n<think>a") && ends_in_thought("<think>"));
    assert!(ends_in_thought("[THINK]a</think>"));
    assert!(!ends_in_thought("<think>a</think>") && !ends_in_thought("a <think>"));
}

proptest! {
    #[test]
    fn pieces_change_nothing(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<think>", "</think>", "a", " ", "\n", "é", "<", "/", "</th", "ink>", "<answer>", "</answer>",
                "<response>", "</response>", "<ans", "Here is my ", "thought process:", "response:", "◁think▷",
                "◁/think▷", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
            ]),
            0..12,
        ),
        format in prop::sample::select(ReasoningFormat::ALL.to_vec()),
        reasons: bool,
        sizes in prop::collection::vec(1usize..6, 1..5),
    ) {
        let text = parts.concat();
        let whole = split(format, reasons, &text, &[text.len() + 1]);
        prop_assert_eq!(split(format, reasons, &text, &sizes), whole);
    }
}
