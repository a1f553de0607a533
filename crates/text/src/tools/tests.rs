mod fallback;
mod families;
mod grammar;
mod round_trip;
pub(crate) mod templates;

use super::*;
use crate::part::{Part, joined, pieces};
use proptest::prelude::*;
use std::sync::Arc;

/// The formats that a [`ToolParser`] reads.
const TEXT_FORMATS: &[ToolFormat] = ToolFormat::ALL.split_at(1).1;

/// The content of a text, and its calls.
type Read = (String, Vec<(String, String)>);

fn tools() -> Arc<[Signature]> {
    let properties = json!({
        "a": {"type": "string"}, "n": {"type": "integer"}, "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]}, "flag": {"type": "boolean"}, "map": {"type": "object"},
        "color": {"$ref": "#/$defs/Color"}, "size": {"$ref": "#/$defs/Size"},
    });
    let definitions = json!({"Color": {"enum": ["red", "1"]}, "Size": {"type": "integer"}});
    let tool = |name: &str| {
        let parameters = json!({"type": "object", "properties": properties, "$defs": definitions});
        Signature::of(&json!({"function": {"name": name, "parameters": parameters}}))
    };
    ["f", "get_weather"].map(tool).into()
}

/// Reads a text that comes in pieces of these numbers of characters.
fn read_in(format: ToolFormat, max_calls: usize, text: &str, sizes: &[usize]) -> Read {
    let mut parser = ToolParser::new(format, tools(), max_calls);
    let mut parts = Vec::new();
    pieces(text, sizes).for_each(|piece| parser.push(&piece, &mut parts));
    parser.finish(&mut parts);
    let (reasoning, content, calls) = joined(parts);
    assert_eq!(reasoning, "", "not from here");
    (content, calls)
}

#[track_caller]
fn check(format: ToolFormat, text: &str, content: &str, calls: &[(&str, &str)]) {
    let owned = |&(name, arguments): &(&str, &str)| (name.to_owned(), arguments.to_owned());
    let expected: Read = (content.to_owned(), calls.iter().map(owned).collect());
    for sizes in [&[usize::MAX][..], &[1], &[7, 2]] {
        let read = read_in(format, usize::MAX, text, sizes);
        assert_eq!(read, expected, "{text:?} in pieces of {sizes:?}");
    }
}

/// Formats, answers, and their content and calls. Answers without these columns stay as they are.
const ANSWERS: &str = r##"
hermes | Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}{ \" </tool_call>", "b": [{}]}}\n</tool_call>\n | Let me see. | f {"a": "x}{ \" </tool_call>", "b": [{}]}
hermes | <tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call> |  | f {} | get_weather {"city": "Zürich"}
// As SmolLM2 was taught: a list between the markers.
hermes | <tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]</tool_call>done | done | f {"a": 1} | f {"a": 2}
// Text on both sides, and the end of the text in place of the marker.
hermes | a <tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>{"name": "f", "arguments": {}} | ab | f {} | f {}
// The next call is found nevertheless.
hermes | <tool_call>{"name": <tool_call>{"name": "f", "arguments": {}}</tool_call> | <tool_call>{"name": | f {}
// A call that has begun stands however it ends.
hermes | <tool_call>{"name": "f", "arguments": {"a": "b |  | f {"a": "b
hermes | <tool_call>{"name": "f", "arguments": {a: oops}}</tool_call> |  | f {a: oops}
hermes | <tool_call>{"name": "f", "arguments": {}, oops | oops | f {}
hermes | <tool_call>{"name": "f", "arguments": {}}\n</tool_c |  | f {}
// A brace too many.
hermes | <tool_call>\n{"name":"f","arguments":{}}}\n</tool_call> |  | f {}
qwen3_coder | Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=a>\nline 1\n  "line" 2 <b>\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=list>\n[1, {"x": "</y>"}]\n</parameter>\n</function>\n</tool_call> | Let me see. | get_weather {"a": "line 1\n  \"line\" 2 <b>", "n": 3, "list": [1, {"x": "</y>"}]}
// Two calls, no arguments, no first marker, no ends.
qwen3_coder | <tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call><function=f><parameter=a>x <parameter=n>\n<parameter=n>1\n</function></tool_call> |  | f {} | f {"a": "x <parameter=n>", "n": 1}
qwen3_coder | So: <function=f>\n<parameter=other>\n12\n</parameter>\n</function>\n</tool_call> | So: | f {"other": "12"}
// Empty values without their ends.
qwen3_coder | <tool_call>\n<function=f>\n<parameter=a>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call> |  | f {"a": "", "n": 3}
qwen3_coder | <tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=a>\n</function>\n</tool_call> |  | f {"n": 3, "a": ""}
qwen3_coder | <function=f>\n<parameter=a>\n<par\n</parameter>\n</function> |  | f {"a": "<par"}
// A second value of a parameter is dropped.
qwen3_coder | <function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function> |  | f {"n": 1}
// Cut off: what came stands.
qwen3_coder | <tool_call>\n<function=f>\n<parameter=a>\nPar |  | f {"a": "Par
qwen3_coder | <tool_call>\n<function=f>\n<parameter=a>\nPar\n</param |  | f {"a": "Par
qwen3_coder | <tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
qwen3_coder | <tool_call>\n<function=f
qwen3_coder | <tool_call>{"name": "f", "arguments": {}}</tool_call>
qwen3_coder | the tag <function= begins a call
qwen3_coder | <func
llama3_json | \n{"name": "f", "parameters": {"a": 1}} |  | f {"a": 1}
llama3_json | <|python_tag|>{"type": "function", "name": "f", "parameters": {}} |  | f {}
llama3_json | {"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}} |  | f {} | f {"b": 2}
llama3_json | {"a": 1}
llama3_json | Here: {"name": "f", "parameters": {}}
mistral | [TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "f", "arguments": {}}] |  | f {"a": [1]} | f {}
mistral | Well.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{} | Well. | get_weather {"city": "Paris"} | f {}
mistral | [TOOL_CALLS]g{"city": 1}
mistral | [TOOL
mistral | [TOOL_CALLS] [
mistral | [TOOL_CALLS]get_w
pythonic | [get_weather(a='it\'s, ("here")', n = -1), f(list=[1, {'x': None}], flag=True)] |  | get_weather {"a": "it's, (\"here\")", "n": -1} | f {"list": [1, {"x": null}], "flag": true}
pythonic | <|python_start|>[f(\n    a='''x'y,\n''',\n    maybe="",\n)]<|python_end|>done | done | f {"a": "x'y,\n", "maybe": ""}
pythonic | ```tool_code\n[f(n=1)]\n``` |  | f {"n": 1}
// JSON is read as well; what is neither is a text, and a second value is dropped.
pythonic | [f(flag=true, a=Paris, a='x', map={"b": [null]}, n=)] ok | ok | f {"flag": true, "a": "Paris", "map": {"b": [null]}, "n": ""}
// An argument without a name after others is dropped; cut off, what came stands.
pythonic | [f(a='x', 'y', n=1)] |  | f {"a": "x", "n": 1}
pythonic | [f(a='x', n=1 |  | f {"a": "x"
pythonic | [1, 2]
pythonic | [f]
pythonic | [f(x)]
pythonic | [f('x')]
pythonic | [f(a==1)]
pythonic | [g(a=1)]
pythonic | [f(a
pythonic | See f(a=1)
pythonic | [link](http://example.com/?f(a=1))
glm45 | <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>\n x <b>\n</arg_value>\n<arg_key>list</arg_key> <arg_value>[1]</arg_value>\n<arg_key>n</arg_key>oops</tool_call> |  | f {"a": "\n x <b>\n", "list": [1]}
minimax_m2 | <invoke name="f">\n<parameter name="a">1\n</parameter><parameter name="flag">True</parameter></invoke> |  | f {"a": "1\n", "flag": true}
gemma4 | <|tool_call>call:f{a:<|"|>Par |  | f {"a": "Par
gemma4 | <|tool_call>call:g{a:1}<tool_call|>
gemma4 | <|tool_call>call:f
gemma4 | call:f{}
"##;

fn named(name: &str) -> ToolFormat {
    let mut formats = ToolFormat::ALL.into_iter();
    formats.find(|format| format.name() == name).expect(name)
}

#[test]
fn answers_are_content_and_calls() {
    for row in (ANSWERS.trim().lines()).filter(|row| !row.starts_with("//")) {
        let mut columns = row.split(" | ");
        let format = named(columns.next().expect("a format"));
        let text = columns.next().expect("an answer").replace("\\n", "\n");
        let content = columns.next().map(|content| content.replace("\\n", "\n"));
        let calls = columns.map(|call| call.split_once(' ').expect("a name and arguments"));
        let content = content.as_deref().unwrap_or(&text);
        check(format, &text, content, &calls.collect::<Vec<_>>());
    }
    let spaced = " {\"name\": \"g\", \"parameters\": {}} ";
    check(ToolFormat::Llama3Json, spaced, spaced, &[]);
    for (format, marker) in [
        (ToolFormat::Qwen3Coder, "<function="),
        (ToolFormat::Mistral, "[TOOL_CALLS]"),
    ] {
        let endless = format!("{marker}{}", "f".repeat(1000));
        check(format, &endless, &endless, &[]);
    }
}

#[test]
fn keys_of_a_call_come_in_any_order_and_others_are_skipped() {
    for (object, arguments) in [
        (
            r#"{"id": "1", "name": "f", "arguments": {"a": 1}, "x": [1, {"name": 2}]}"#,
            r#"{"a": 1}"#,
        ),
        (
            r#"{"arguments": {"a": {"name": "g"}}, "name": "f"}"#,
            r#"{"a": {"name": "g"}}"#,
        ),
        (
            r#"{"type":"function","n":-1.5e3,"t":true,"name":"\u0066","parameters":{}}"#,
            "{}",
        ),
        (r#"{"name": "f"}"#, "{}"),
        (r#"{"name": "f", "arguments": null}"#, "{}"),
        (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, r#"{"a": 1}"#),
    ] {
        let text = format!("<tool_call>{object}</tool_call>");
        check(ToolFormat::Hermes, &text, "", &[("f", arguments)]);
    }
}

#[test]
fn what_looks_like_a_call_and_is_none_is_content() {
    for text in [
        "<tool_call>not JSON</tool_call> and more",
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        "<tool_call>{\"name\": 1, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"nom\": \"f\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": ",
        "<tool_call>{\"name\" \"f\"}",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>\n",
        "<tool_call>",
        "<tool_ca",
        "  ",
        "</tool_call> {\"name\": \"f\", \"arguments\": {}}",
        "1 < 2\n\n\n2 > 1 ",
    ] {
        check(ToolFormat::Hermes, text, text, &[]);
    }
}

#[test]
fn a_brace_too_many_is_dropped_however_it_comes() {
    let surplus = "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}}\n</tool_call>";
    let whole = read_in(ToolFormat::Hermes, usize::MAX, surplus, &[usize::MAX]);
    for cut in 1..surplus.len() {
        let read = read_in(ToolFormat::Hermes, usize::MAX, surplus, &[cut, usize::MAX]);
        assert_eq!(read, whole, "cut at {cut}");
    }
    let twice = format!("{surplus}\n{surplus} Done.");
    let calls = [("f", "{}"), ("f", "{}")];
    check(ToolFormat::Hermes, &twice, "Done.", &calls);
}

#[test]
fn a_call_begins_as_soon_as_it_is_certain() {
    let mut parser = ToolParser::new(ToolFormat::Hermes, tools(), usize::MAX);
    let mut parts = Vec::new();
    parser.push("<tool_call>\n{\"name\": \"f\", \"arguments\":", &mut parts);
    assert_eq!(parts, []);
    parser.push(" {\"a\"", &mut parts);
    let arguments = |text: &str| Part::Arguments(text.into());
    let begun = [Part::CallStart("f".into()), arguments("{\"a\"")];
    assert_eq!(parts, begun);
    parts.clear();
    parser.push(": 1}", &mut parts);
    assert_eq!(parts, [arguments(": 1}")]);
}

/// What the schema says decides what a value is.
#[test]
fn values_in_xml_have_the_types_of_their_schemas() {
    for (parameter, value, json) in [
        ("a", "12", r#""12""#),
        ("a", "null", r#""null""#),
        ("maybe", "null", "null"),
        ("maybe", "\nnull or so\n", r#""\nnull or so\n""#),
        ("n", " -1 ", "-1"),
        ("n", "many", r#""many""#),
        ("flag", "True", "true"),
        ("flag", "false", "false"),
        ("a", "", r#""""#),
        // Python's literals, where a text is not possible.
        ("list", "['a', 'b']", r#"["a", "b"]"#),
        ("list", "[]", "[]"),
        (
            "map",
            "{'a': None, 'b': [True, 1.5]}",
            r#"{"a": null, "b": [true, 1.5]}"#,
        ),
        ("map", "{'a': oops}", r#""{'a': oops}""#),
        ("flag", "None", "null"),
        ("a", "['a']", r#""['a']""#),
        ("maybe", "None", r#""None""#),
        // Definitions say what they are of.
        ("color", "1", r#""1""#),
        ("color", "red", r#""red""#),
        ("size", "1", "1"),
    ] {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let wanted = format!("{{\"{parameter}\": {json}}}");
        check(ToolFormat::Qwen3Coder, &text, "", &[("f", &wanted)]);
    }
}

#[test]
fn the_text_is_complete_after_the_calls_that_may_be_made() {
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>x";
    let calls = |n| vec![("f".to_owned(), "{}".to_owned()); n];
    for sizes in [&[usize::MAX][..], &[1]] {
        let one = read_in(ToolFormat::Hermes, 1, text, sizes);
        assert_eq!(one, (String::new(), calls(1)));
    }
    let mut parser = ToolParser::new(ToolFormat::Hermes, tools(), 1);
    parser.push(&text[..text.len() / 3], &mut Vec::new());
    assert!(!parser.is_full(), "the call has begun");
    parser.push(&text[text.len() / 3..], &mut Vec::new());
    assert!(parser.is_full());
}

#[test]
fn formats_are_known_by_what_templates_teach() {
    use ToolFormat::*;
    for (source, format) in [
        (
            "<tools>{{ tools | tojson }}</tools> <tool_call>",
            Some(Hermes),
        ),
        ("<tool_call>\n<function=example>", Some(Qwen3Coder)),
        ("{{ '[TOOL_CALLS]' }}", Some(Mistral)),
        (
            "Environment: ipython {\"name\": x, \"parameters\": y}",
            Some(Llama3Json),
        ),
        ("{{ '<|python_tag|>' }}", Some(Llama3Json)),
        (
            "Environment: ipython [func_name1(params_name1=params_value1)]",
            Some(Pythonic),
        ),
        ("<|start|>user<|message|>{{ m }}<|channel|>", Some(Harmony)),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}\n```json",
            Some(DeepseekV3),
        ),
        ("<｜tool▁calls▁begin｜>{{ name }}", Some(DeepseekV31)),
        ("<|tool_call_begin|>{{ id }}", Some(KimiK2)),
        ("'<minimax:tool_call>' <invoke name=", Some(MinimaxM2)),
        ("'<seed:tool_call>' <function=", Some(SeedOss)),
        ("<|tool_list_start|>[", Some(Lfm2)),
        ("<function_calls>", Some(Olmo3)),
        ("<|START_ACTION|>[", Some(Command)),
        ("<|tool|>{{ tools }}<|/tool|>", Some(Phi4Mini)),
        ("respond with <|tool_call|> followed by", Some(Granite)),
        ("<TOOLCALL>[{", Some(Nemotron)),
        ("<tool_calls>[{", Some(Hunyuan)),
        ("'<|tool_call>call:'", Some(Gemma4)),
        ("<start_function_call>call:", Some(FunctionGemma)),
        ("<tool_call>{name}<arg_key>{key}</arg_key>", Some(Glm45)),
        ("<|observation|>{{ metadata }}", Some(Glm4)),
        ("{{ tools }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
    let deepseek = "{{ '<｜tool▁calls▁begin｜>' }}";
    assert_eq!(ToolFormat::of_history(deepseek), Some(DeepseekV31));
    assert_eq!(ToolFormat::of_history("<tool_call>"), None);
}

#[test]
fn rows_are_in_the_order_of_the_formats() {
    for (i, format) in ToolFormat::ALL.into_iter().enumerate() {
        assert_eq!((format as usize, format.syntax().format), (i, format));
    }
    assert_eq!(ToolFormat::ALL.last(), Some(&ToolFormat::Llama3Json));
}

#[test]
fn a_template_without_tools_gets_them_in_messages() {
    let tools =
        [json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})];
    let call = |arguments: Value| json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "Go."}),
        json!({"role": "assistant", "content": "", "tool_calls": [call(json!({"a": 1})), call(json!("no JSON"))]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "one"}),
        json!({"role": "tool", "tool_call_id": "2", "content": "two"}),
        json!({"role": "assistant", "content": "Well:", "tool_calls": [call(json!({}))]}),
        json!({"role": "tool", "tool_call_id": "3", "content": "three"}),
    ];
    let plain = without_tools(&messages, &tools, ToolFormat::Hermes);
    let system = plain[0]["content"].as_str().expect("a text");
    assert!(system.starts_with("Be brief.\n\nYou can call"), "{system}");
    let tool =
        r#"{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}"#;
    let has_example = system.contains("<tool_call>\n{\"name\": ");
    assert!(has_example && system.contains(tool), "{system}");
    let said = |i: usize| (plain[i]["role"].as_str(), plain[i]["content"].as_str());
    let call = |arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let two = format!("{}\n{}", call(r#"{"a": 1}"#), call("no JSON"));
    assert_eq!(said(2), (Some("assistant"), Some(two.as_str())));
    let results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>";
    assert_eq!(said(3), (Some("user"), Some(results)));
    let with_text = format!("Well:\n{}", call("{}"));
    assert_eq!(said(4), (Some("assistant"), Some(with_text.as_str())));
    assert_eq!(plain.len(), 6);
    let mut rewritten = plain.iter();
    assert!(rewritten.all(|message| message.get("tool_calls").is_none()));

    // Without a system message there is a new one; without tools there is none.
    let new = without_tools(&messages[1..2], &tools, ToolFormat::Llama3Json);
    assert_eq!(
        (new.len(), &new[0]["role"], &new[1]),
        (2, &json!("system"), &messages[1])
    );
    let parameters = "\"parameters\": {\"<name of an argument>\"";
    let system = new[0]["content"].as_str().expect("a text");
    assert!(system.contains(parameters));
    let same = without_tools(&messages[..2], &[], ToolFormat::Hermes);
    assert_eq!(same, messages[..2]);
}

proptest! {
    #[test]
    fn pieces_change_nothing(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[", "]", "{", "}",
                "{\"name\": \"f\", \"arguments\": {", "{\"name\": \"f\", \"arguments\": {\"a\": \"b\\\"\"}}",
                "<function=", "f>", "\n", "<function=get_weather>\n", "<parameter=a>", "<parameter=n>\n", "</parameter>",
                "\n</function>", "\n<parameter=n>", "True", "null",
                "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<TOOLCALL>", "<|START_ACTION|>", "functools", "f(",
                "a='x'", "a=", ", n=1", ")", "'''", "'", "(", "=", "<|python_start|>", "<|tool_call_start|>", "```json\n",
                "```", "\n```\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n",
                "<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0",
                "<|tool_call_argument_begin|>", "<invoke name=\"f\">", "<parameter name=\"a\">", "</invoke>",
                "<seed:tool_call>", "f<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>", "<function_calls>",
                "<|tool_call>call:f{", "<|\"|>", "<tool_call|>", "a:",
                "{\"name\": \"g\"", "\"", ",", ":", "; ", " ", "\n", "a", "é", "<", "<tool", "get_weather", "1",
            ]),
            0..14,
        ),
        format in prop::sample::select(TEXT_FORMATS.to_vec()),
        max_calls in prop::sample::select(vec![1, 2, usize::MAX]),
        sizes in prop::collection::vec(1usize..9, 1..6),
    ) {
        let text = parts.concat();
        let whole = read_in(format, max_calls, &text, &[usize::MAX]);
        prop_assert_eq!(read_in(format, max_calls, &text, &sizes), whole);
    }

    /// Without a marker, and without a brace at the beginning, all text is content.
    #[test]
    fn plain_text_is_not_changed(text in "[^{<\\[]{0,60}", sizes in prop::collection::vec(1usize..9, 1..6)) {
        for format in TEXT_FORMATS {
            let (content, calls) = read_in(*format, usize::MAX, &text, &sizes);
            prop_assert_eq!((content.as_str(), calls.len()), (text.as_str(), 0));
        }
    }
}
