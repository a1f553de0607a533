//! Tests that the cuts of a text into pieces change neither the blocks of an answer nor their order.

use super::super::super::blocks::{Blocks, Change, OutputBlock};
use super::*;
use foretoken_text::ToolFormat;

/// The blocks that a client sees: each with its kind and text, as it was built up by changes.
type Shown = Vec<(&'static str, String)>;

fn call(name: &str) -> serde_json::Value {
    serde_json::json!({"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}})
}

fn tools(format: ToolFormat) -> ToolRules {
    ToolRules {
        format,
        callable: ["weather", "time"]
            .map(|name| Signature::of(&call(name)))
            .into(),
        custom: Vec::new(),
        max_calls: usize::MAX,
        forced: false,
        named: false,
    }
}

fn harmony() -> MessageRules {
    MessageRules {
        harmony: Some("<|start|>assistant".into()),
        tools: Some(tools(ToolFormat::Harmony)),
        ..MessageRules::default()
    }
}

fn hermes() -> MessageRules {
    MessageRules {
        reasoning: Some((ReasoningFormat::Qwen3, false)),
        tools: Some(tools(ToolFormat::Hermes)),
        ..MessageRules::default()
    }
}

/// `time` takes a text.
fn custom() -> MessageRules {
    let mut rules = hermes();
    let tools = rules.tools.iter_mut();
    tools.for_each(|tools| tools.custom = vec!["time".into()]);
    rules
}

/// The pieces of a choice whose text comes in these parts.
fn pieces(message: MessageRules, cut: &[&str]) -> Vec<Piece> {
    let rules = Rules {
        message,
        ..Rules::default()
    };
    let mut choice = Choice::new(Arc::new(rules), None);
    let mut pieces: Vec<Piece> = Vec::new();
    for part in cut {
        let mut piece = Piece::default();
        let ends = choice.show((*part).to_owned(), &mut piece);
        pieces.push(piece);
        if ends {
            return pieces;
        }
    }
    let mut last = Piece::default();
    let finish = Finish {
        reason: FinishKind::Stop,
        stop: None,
    };
    choice.end(finish, &mut last);
    pieces.push(last);
    pieces
}

/// The blocks that a stream of these pieces builds by its changes, which must be those of the list.
fn streamed(pieces: Vec<Piece>) -> Shown {
    let mut blocks = Blocks::default();
    let (mut shown, mut open): (Shown, Option<usize>) = (Vec::new(), None);
    for piece in pieces {
        for (index, change) in blocks.push(piece) {
            match change {
                Change::Begin => {
                    assert_eq!((index, open), (shown.len(), None), "one block at a time");
                    let kind = match &blocks.list()[index] {
                        OutputBlock::Reasoning(_) => "reasoning",
                        OutputBlock::Text(_) => "text",
                        OutputBlock::Call { head, .. } if head.name == "weather" => "weather",
                        OutputBlock::Call { .. } => "time",
                    };
                    shown.push((kind, String::new()));
                    open = Some(index);
                }
                Change::Extend(text) => {
                    assert_eq!(Some(index), open);
                    shown[index].1 += &text;
                }
                Change::End => assert_eq!(Some(index), open.take()),
            }
        }
    }
    assert_eq!(open, None, "all have ended");
    let written = blocks.list().iter().map(OutputBlock::written);
    assert!(written.eq(shown.iter().map(|(_, text)| text)), "{shown:?}");
    shown
}

/// The deltas of a chat's stream, with those of the same kind joined.
fn deltas(pieces: Vec<Piece>) -> Vec<MessagePart> {
    let mut parts = joined(pieces).parts;
    for part in &mut parts {
        if let MessagePart::Call(CallPiece {
            head: Some(head), ..
        }) = part
        {
            head.id.clear();
        }
    }
    parts
}

/// `text` cut at each place, with each short part from there on its own, and into its characters.
fn cuts(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    let short = (0..places.len()).flat_map(move |first| {
        let places = places.clone();
        let second = (first..places.len()).take(12);
        second.map(move |second| {
            let (first, second) = (places[first], places[second]);
            vec![&text[..first], &text[first..second], &text[second..]]
        })
    });
    short.chain([text.split_inclusive(|_| true).collect()])
}

const HARMONY: &str = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>B<|end|>\
    <|start|>assistant<|channel|>analysis<|message|>C<|end|><|start|>assistant to=functions.weather<|channel|>commentary\
    <|message|>{\"city\": 1}<|end|><|start|>assistant<|channel|>analysis<|message|>D<|end|><|start|>assistant\
    <|channel|>final<|message|>E<|end|><|start|>assistant to=functions.time<|channel|>commentary<|message|>{}<|call|>";

const HERMES: &str = "<think>\nA\n</think>\n\nB <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": 1}}\n</tool_call>\n\
    C\n<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call> D";

const CUSTOM: &str = "B <tool_call>\n{\"name\": \"time\", \"arguments\": {\"input\": \"a\\n\\\"\\u00e9\\ud83d\\ude00\"}}\n</tool_call>\
    <tool_call>{\"name\": \"time\", \"arguments\": {\"patch\": \"x\\ty\"}}</tool_call>\
    <tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call> D\
    <tool_call>{\"name\": \"weather\", \"arguments\": {\"input\": \"x\"}}</tool_call>";

#[test]
fn blocks_come_in_the_models_order_however_a_text_is_cut() {
    let in_channels = [
        ("reasoning", "A"),
        ("text", "B"),
        ("reasoning", "C"),
        ("weather", "{\"city\": 1}"),
        ("reasoning", "D"),
        ("text", "E"),
        ("time", "{}"),
    ];
    let in_marks = [
        ("reasoning", "A"),
        ("text", "B"),
        ("weather", "{\"city\": 1}"),
        ("text", "C"),
        ("time", "{}"),
        ("text", "D"),
    ];
    let of_custom = [
        ("text", "B"),
        ("time", "a\n\"é😀"),
        ("time", "x\ty"),
        ("time", "{}"),
        ("text", "D"),
        ("weather", "{\"input\": \"x\"}"),
    ];
    for (rules, text, expected) in [
        (harmony as fn() -> MessageRules, HARMONY, &in_channels[..]),
        (hermes, HERMES, &in_marks[..]),
        (custom, CUSTOM, &of_custom[..]),
    ] {
        let expected: Vec<(&str, String)> = (expected.iter())
            .map(|(kind, text)| (*kind, (*text).to_owned()))
            .collect();
        let whole = deltas(pieces(rules(), &[text]));
        for cut in cuts(text) {
            assert_eq!(streamed(pieces(rules(), &cut)), expected, "{cut:?}");
            assert_eq!(deltas(pieces(rules(), &cut)), whole, "{cut:?}");
        }
        // What is not streamed is one piece.
        let one = joined(pieces(rules(), &[text]));
        assert_eq!(streamed(vec![one]), expected);
    }
}

proptest! {
    #[test]
    fn no_text_shows_how_it_was_cut(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "analysis", "final", "commentary",
            " to=functions.weather", "{\"a\": 1}", " ", "\n", "é", "<think>", "</think>", "<tool_call>", "</tool_call>",
            "{\"name\": \"time\", \"arguments\": {}}", "{\"name\": \"time\", \"arguments\": {\"input\": \"", "\\n", "\\u00e9",
            "\\", "\"}}",
        ]), 0..20),
        sizes in prop::collection::vec(1usize..9, 1..6),
    ) {
        let text = parts.concat();
        let mut cut = Vec::new();
        let (mut rest, mut sizes) = (text.as_str(), sizes.iter().cycle());
        while !rest.is_empty() {
            let size = *sizes.next().expect("it cycles");
            let at = rest.char_indices().nth(size).map_or(rest.len(), |(at, _)| at);
            let (now, later) = rest.split_at(at);
            cut.push(now);
            rest = later;
        }
        for rules in [harmony as fn() -> MessageRules, hermes, custom] {
            let whole = pieces(rules(), &[&text]);
            prop_assert_eq!(deltas(pieces(rules(), &cut)), deltas(whole));
            let whole = streamed(pieces(rules(), &[&text]));
            prop_assert_eq!(streamed(pieces(rules(), &cut)), whole);
        }
    }
}
