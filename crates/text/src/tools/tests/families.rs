//! What the models of each family write.

use super::*;

const WEATHER: &str = r#"{"a": "Zürich", "n": 3}"#;

/// Formats, and two calls as their families write them, as texts in JSON.
const TEXTS: &str = r#"
cohere_command_r | "Action: ```json\n[\n    {\n        \"tool_name\": \"get_weather\",\n        \"parameters\": {\"a\": \"Zürich\", \"n\": 3}\n    },\n    {\n        \"tool_name\": \"f\",\n        \"parameters\": {}\n    }\n]```"
apertus | "<|tools_prefix|>[{\"get_weather\": {\"a\": \"Zürich\", \"n\": 3}}, {\"f\": {}}]<|tools_suffix|>"
gigachat31 | "<|function_call|>{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}<|message_sep|>\n\n<|function_call|>{\"name\": \"f\", \"arguments\": {}}<|message_sep|>\n\n"
gigachat3 | "<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"f\", \"arguments\": {}}"
gigachat3 | "function call<|role_sep|>\n{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}<|function_call|>{\"name\": \"f\"}"
functionary_v31 | "<function=get_weather>{\"a\": \"Zürich\", \"n\": 3}</function><function=f>{}</function>"
gemma4 | "<|tool_call>call:get_weather{a:<|\"|>Zürich<|\"|>,n:3}<tool_call|><|tool_call>call:f{}<tool_call|>"
functiongemma | "<start_function_call>call:get_weather{a:<escape>Zürich<escape>, n:3}<end_function_call><start_function_call>call:f{}<end_function_call>"
deepseek_v3 | "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"a\": \"Zürich\", \"n\": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
deepseek_v31 | "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"a\": \"Zürich\", \"n\": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
kimi_k2 | "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"a\": \"Zürich\", \"n\": 3}<|tool_call_end|><|tool_call_begin|>functions.f:1 <|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>"
minimax_m2 | "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"a\">Zürich</parameter>\n<parameter name=\"n\">3</parameter>\n</invoke>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>"
seed_oss | "<seed:tool_call>\n<function=get_weather>\n<parameter=a>Zürich</parameter>\n<parameter=n>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>"
lfm2 | "<|tool_call_start|>[get_weather(a='Zürich', n=3), f()]<|tool_call_end|>"
lfm2 | "<|tool_call_start|>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\"}]<|tool_call_end|>"
olmo3 | "<function_calls>\nget_weather(a=\"Zürich\", n=3)\nf()\n</function_calls>"
cohere_command3 | "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"a\": \"Zürich\", \"n\": 3}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"f\", \"parameters\": {}}\n]<|END_ACTION|>"
phi4_mini_json | "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]<|/tool_call|>"
phi4_mini_json | "functools[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]"
granite | "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]"
nemotron_json | "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]</TOOLCALL>"
hunyuan_a13b | "<tool_calls>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]</tool_calls>"
hunyuan_a13b | "<tool_calls>\n<tool_call>get_weather\n```json\n{\"a\": \"Zürich\", \"n\": 3}\n```</tool_call>\n<tool_call>function<tool_sep>f\n```json\n{}\n```\n</tool_call>\n</tool_calls>"
glm45 | "<tool_call>get_weather\n<arg_key>a</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>"
deepseek_v32 | "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"a\" string=\"true\">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
deepseek_v4 | "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"a\">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"true\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
mistral_args | "[TOOL_CALLS]get_weather[ARGS]{\"a\": \"Zürich\", \"n\": 3}[TOOL_CALLS]f[ARGS]{}"
mistral_args | "[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{\"a\": \"Zürich\", \"n\": 3}[TOOL_CALLS]f[CALL_ID]abcdefgh2[ARGS]{}"
mistral_args | "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\"}]"
xlam | "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]"
xlam | "<tool_call>[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]</tool_call>"
xlam | "```json\n[{\"name\": \"get_weather\", \"arguments\": {\"a\": \"Zürich\", \"n\": 3}}, {\"name\": \"f\", \"arguments\": {}}]\n```"
glm45 | "<tool_call>get_weather<arg_key>a</arg_key><arg_value>Zürich</arg_value><arg_key>n</arg_key><arg_value>3</arg_value></tool_call><tool_call>f</tool_call>"
"#;

fn texts() -> impl Iterator<Item = (ToolFormat, String)> {
    TEXTS.trim().lines().map(|row| {
        let (name, text) = row.split_once(" | ").expect("two columns");
        (named(name), serde_json::from_str(text).expect("JSON"))
    })
}

#[test]
fn calls_of_each_family_are_found() {
    for (format, text) in texts() {
        let calls = [("get_weather", WEATHER), ("f", "{}")];
        check(format, &text, "", &calls);
        check(
            format,
            &format!("Let me see.\n{text}\n"),
            "Let me see.",
            &calls,
        );
        check(format, &format!("a{text} b"), "ab", &calls);
    }
}

/// A text that only mentions a marker, or calls something else, stays as it is.
#[test]
fn what_only_mentions_a_marker_is_content() {
    for syntax in ToolFormat::ALL.map(ToolFormat::syntax) {
        for marker in syntax.markers.iter().chain(syntax.begin) {
            for text in [
                format!("The text {marker} begins a call."),
                format!("{marker} {marker}"),
                (*marker).to_owned(),
                marker
                    .strip_suffix(|_: char| true)
                    .unwrap_or_default()
                    .to_owned(),
            ] {
                check(syntax.format, &text, &text, &[]);
            }
        }
    }
    for (format, text) in texts() {
        let other = text.replace("get_weather", "other").replace('f', "g");
        let (_, calls) = read_in(format, usize::MAX, &other, &[3]);
        assert!(calls.is_empty(), "{other}");
    }
}

#[test]
fn names_before_arguments_may_have_no_marker() {
    let glm4 = |text, content, calls: &[_]| check(ToolFormat::Glm4, text, content, calls);
    let call = format!("get_weather\n{WEATHER}");
    glm4(&call, "", &[("get_weather", WEATHER)]);
    let both = format!("\n{call}\nf\n {{}}\n");
    glm4(&both, "", &[("get_weather", WEATHER), ("f", "{}")]);
    // Neither a name within a text, nor one without arguments, nor that of no tool.
    for text in [
        "\nf is a function.",
        "f\nis a function of {}",
        "f",
        "f\n",
        "g\n{}",
        "f {}",
    ] {
        glm4(text, text, &[]);
    }
    let within = format!("Yes.\n{call}");
    glm4(&within, &within, &[]);
}

/// DeepSeek says whether a value is a text. One that says wrongly is read as what fits the parameter.
#[test]
fn tags_may_say_what_a_value_is() {
    let call = |parameters: &str| {
        format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n{parameters}</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        )
    };
    let parameter = |name: &str, is_text: &str, value: &str| {
        format!(
            "<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n"
        )
    };
    for (name, is_text, value, json) in [
        ("maybe", "true", "null", r#""null""#),
        ("maybe", "false", "null", "null"),
        (
            "a",
            "true",
            "</｜DSML｜x> {\"é\"}",
            r#""</｜DSML｜x> {\"é\"}""#,
        ),
        ("a", "false", "[1]", "[1]"),
        ("n", "true", "7", "7"),
        ("n", "true", "seven", r#""seven""#),
        ("other", "false", "{\"x\": [true]}", "{\"x\": [true]}"),
        ("other", "true", "1", r#""1""#),
    ] {
        let text = call(&parameter(name, is_text, value));
        let arguments = format!("{{\"{name}\": {json}}}");
        check(ToolFormat::DeepseekV32, &text, "", &[("f", &arguments)]);
    }
}

/// xLAM writes a list and nothing else.
#[test]
fn a_list_of_calls_may_be_the_whole_answer() {
    let calls =
        "[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {}}]";
    let read = [("f", r#"{"a": 1}"#), ("f", "{}")];
    check(ToolFormat::Xlam, calls, "", &read);
    for text in [
        "[1, 2]",
        "[{\"name\": \"g\", \"arguments\": {}}]",
        "[]",
        "See [f].",
    ] {
        check(ToolFormat::Xlam, text, text, &[]);
    }
}

/// Mistral's two ways of writing calls have one name in other servers.
#[test]
fn the_template_tells_which_of_two_ways_is_meant() {
    let (old, new) = ("[TOOL_CALLS] [", "[TOOL_CALLS]x[ARGS]{}");
    assert_eq!(ToolFormat::Mistral.in_template(old), ToolFormat::Mistral);
    assert_eq!(
        ToolFormat::Mistral.in_template(new),
        ToolFormat::MistralArgs
    );
    assert_eq!(ToolFormat::Hermes.in_template(new), ToolFormat::Hermes);
    assert_eq!(ToolFormat::of_template(new), Some(ToolFormat::MistralArgs));
    let of = ToolFormat::of_template;
    assert_eq!(
        of("<|python_tag|>{{ '<function=' + name + '>' }}"),
        Some(ToolFormat::Functionary31)
    );
    let (old, new) = (
        "{{ 'function call' + '<|role_sep|>' }}",
        "{{ '<|role_sep|>' + '<|function_call|>' }}",
    );
    assert_eq!(of(old), Some(ToolFormat::Gigachat3));
    assert_eq!(
        ToolFormat::Gigachat3.in_template(old),
        ToolFormat::Gigachat3
    );
    assert_eq!(
        ToolFormat::Gigachat3.in_template(new),
        ToolFormat::Gigachat31
    );
    assert_eq!(
        of("{% set tool_calls_token = '<|tools_prefix|>' %}"),
        Some(ToolFormat::Apertus)
    );
    assert_eq!(
        of("Write 'Action:' and a list:\n```json\n[{\"tool_name\": title}]"),
        Some(ToolFormat::CommandR)
    );
    assert_eq!(of("<|tool_response_start|>"), Some(ToolFormat::Lfm2));
    assert_eq!(
        of("'<' + '｜DSML｜' + 'function_calls>'"),
        Some(ToolFormat::DeepseekV32)
    );
    assert_eq!(
        of("'<' + '｜DSML｜' + 'tool_calls>'"),
        Some(ToolFormat::DeepseekV4)
    );
    assert_eq!(
        of("ipython [{\"name\": \"tool_call_name\"}]"),
        Some(ToolFormat::Xlam)
    );
}

#[test]
fn values_between_braces_become_json() {
    for (arguments, json) in [
        (
            "{map:{x y:<|\"|>it's \"<b>\"\n<|\"|>,k:[1,<|\"|>a,b}<|\"|>,{}]},flag:true,maybe:null}",
            r#"{"map": {"x y": "it's \"<b>\"\n", "k": [1, "a,b}", {}]}, "flag": true, "maybe": null}"#,
        ),
        (
            r#"{"a": "x\"}", <|"|>n<|"|>: -1.5, list: []}"#,
            r#"{"a": "x\"}", "n": -1.5, "list": []}"#,
        ),
        // Texts without marks, and a call without an end.
        ("{a:Paris,flag:True}", r#"{"a": "Paris", "flag": true}"#),
        ("{map:{n:1", r#"{"map": {"n": 1}}"#),
    ] {
        let text = format!("<|tool_call>call:f{arguments}<tool_call|>");
        check(ToolFormat::Gemma4, &text, "", &[("f", json)]);
    }
}

/// Qwen2.5-Coder and others leave out the markers.
#[test]
fn an_answer_that_is_nothing_but_a_call_is_one() {
    let call = r#"{"name": "f", "arguments": {"a": "```\n<b>"}}"#;
    let arguments = r#"{"a": "```\n<b>"}"#;
    for format in [
        ToolFormat::Hermes,
        ToolFormat::Qwen3Coder,
        ToolFormat::Mistral,
    ] {
        for text in [
            call.to_owned(),
            format!("\n{call}\n"),
            format!("```json\n{call}\n```"),
            format!("```\n{call}\n```\n"),
            format!("```json\n{call}"),
            format!("[{call}]"),
            r#"{"arguments": {"a": "```\n<b>"}, "name": "f"}"#.to_owned(),
            r#"{"type": "function", "name": "f", "parameters": {"a": "```\n<b>"}, "id": "1"}"#
                .to_owned(),
        ] {
            check(format, &text, "", &[("f", arguments)]);
        }
        for text in [
            format!("{call}\n{call}"),
            format!("```json\n{call}\n```\n\n```json\n{call}\n```"),
        ] {
            check(format, &text, "", &[("f", arguments), ("f", arguments)]);
        }
        for text in [
            format!("{call} is how to call it."),
            format!("```json\n{call}\n```\nRuns it."),
            format!("So: {call}"),
            format!("```python\nf({call})\n```"),
            call.replace("\"f\"", "\"other\""),
            call[..call.len() - 1].to_owned(),
            r#"{"name": "f", "arguments": {}, "why": 1}"#.to_owned(),
            r#"{"name": "f", "arguments": [1]}"#.to_owned(),
            r#"{"city": "Paris"}"#.to_owned(),
            "[]".to_owned(),
            "```json\n```".to_owned(),
            "``".to_owned(),
            "`f`".to_owned(),
        ] {
            check(format, &text, &text, &[]);
        }
    }
    // The markers are found after an object.
    let text = format!("{call}\n<tool_call>{call}</tool_call>");
    check(ToolFormat::Hermes, &text, call, &[("f", arguments)]);
    // What goes on after the calls that may be made is not read.
    let two = format!("{call}\n{call}");
    for sizes in [&[usize::MAX][..], &[1]] {
        let read = read_in(ToolFormat::Hermes, 1, &two, sizes);
        assert_eq!(read, (String::new(), vec![("f".into(), arguments.into())]));
    }
}

/// Text that cannot be such an answer is passed on at once.
#[test]
fn other_objects_are_not_held() {
    let mut parser = ToolParser::new(ToolFormat::Hermes, tools(), usize::MAX);
    for text in ["{\"city\"", ": \"Paris\""] {
        let mut parts = Vec::new();
        parser.push(text, &mut parts);
        assert_eq!(joined(parts).1, text);
    }
    let mut parser = ToolParser::new(ToolFormat::Hermes, tools(), usize::MAX);
    let mut parts = Vec::new();
    parser.push("{\"name\": \"f\", \"arguments\": {\"a\": 1}}", &mut parts);
    assert_eq!(parts, [], "it is held until the text ends");
    parser.finish(&mut parts);
    assert_eq!(parts[0], Part::CallStart("f".into()));
}
