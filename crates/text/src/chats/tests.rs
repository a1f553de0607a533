use super::*;
use crate::tools::{Signature, ToolParser};

/// A chat with two calls, which a template renders; the turn with the calls, read as an answer.
#[track_caller]
fn history(source: &str, format: ToolFormat) -> String {
    let template = ChatTemplate::new(source, Some("<s>"), Some("</s>")).expect("it parses");
    assert!(template.knows_tools(), "{source}");
    assert_eq!(ToolFormat::of_template(source), Some(format));
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
    let calls = [
        call("x", json!({"a": 1, "b": "it is"})),
        call("y", json!({"a": 2})),
    ];
    let messages = [
        json!({"role": "user", "content": "Do it."}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
        json!({"role": "tool", "tool_call_id": "y", "content": "done"}),
    ];
    let chat = Chat {
        tools: std::slice::from_ref(&tool),
        ..Chat::of(&messages)
    };
    let prompt = with_calls(&template, &chat).expect("it renders");
    let [before, after] = TURN;
    let turn = prompt.split_once(before).expect("a turn").1;
    let turn = turn.split_once(after).expect("its end").0;
    let mut parser = ToolParser::new(format, [Signature::of(&tool)].into(), usize::MAX);
    let mut parts = Vec::new();
    parser.push(turn, &mut parts);
    parser.finish(&mut parts);
    let (_, content, calls) = crate::part::joined(parts);
    assert_eq!(content, "", "{prompt}");
    let as_json = |(name, arguments): (String, String)| {
        let arguments: Value = serde_json::from_str(&arguments).expect("JSON");
        (name, arguments)
    };
    let calls: Vec<(String, Value)> = calls.into_iter().map(as_json).collect();
    let wanted = [json!({"a": 1, "b": "it is"}), json!({"a": 2})];
    assert_eq!(calls, wanted.map(|arguments| ("f".to_owned(), arguments)));
    prompt
}

/// The loop over messages of a template whose calls are written by `calls`.
fn turns(calls: &str) -> String {
    let tools = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}";
    let call = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}";
    let rest = "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}";
    format!("{tools}{call}{calls}{rest}")
}

/// What begins and ends a turn of the model in [`turns`].
const TURN: [&str; 2] = ["<|assistant|>", "<|end|>"];

/// Formats, and how templates write calls. Between @each and @end is what they write of a call, after @rest what stands between
/// two; between @for and @done what they write of an argument.
const TEMPLATES: &str = r#"
minimax_m2 | <minimax:tool_call>\n@each<invoke name="@name">\n@for<parameter name="{{ k }}">{{ v }}</parameter>\n@done</invoke>\n@rest@end</minimax:tool_call>
seed_oss | @each<seed:tool_call>\n<function=@name>\n@for<parameter={{ k }}>{{ v }}</parameter>\n@done</function>\n</seed:tool_call>@rest\n@end
glm45 | @each\n<tool_call>@name\n@for<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n@done</tool_call>@rest@end
lfm2 | <|tool_call_start|>[@each@json@rest, @end]<|tool_call_end|>
nemotron_json | <TOOLCALL>[@each@json@rest, @end]</TOOLCALL>
phi4_mini_json | @each<|tool_call|>@json<|/tool_call|>@rest@end
granite | <|tool_call|>[@each@json@rest, @end]
hunyuan_a13b | <tool_calls>[@each@json@rest, @end]</tool_calls>
cohere_command3 | <|START_ACTION|>[\n@each    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "@name", "parameters": {{ f.arguments | tojson }}}@rest,\n@end\n]<|END_ACTION|>
mistral_args | @each[TOOL_CALLS]@name[ARGS]{{ f.arguments | tojson }}@rest@end
xlam | {# "tool_call_name" #}[@each@json@rest, @end]
deepseek_v32 | {% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}\n@each{{ '<' + dsml + 'invoke name="' + f.name + '">' }}\n@for{{ '<' + dsml + 'parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}{{ v }}{{ '</' + dsml + 'parameter>' }}\n@done{{ '</' + dsml + 'invoke>' }}\n@rest@end{{ '</' + dsml + 'function_calls>' }}
"#;

#[test]
fn templates_write_calls_as_models_do() {
    let words = [
        ("\\n", "\n"),
        (
            "@each",
            "{% for call in m.tool_calls %}{% set f = call.function %}",
        ),
        ("@rest", "{% if not loop.last %}"),
        ("@end", "{% endif %}{% endfor %}"),
        ("@for", "{% for k, v in f.arguments | items %}"),
        ("@done", "{% endfor %}"),
        (
            "@json",
            r#"{"name": "@name", "arguments": {{ f.arguments | tojson }}}"#,
        ),
        ("@name", "{{ f.name }}"),
    ];
    for row in TEMPLATES.trim().lines() {
        let (name, calls) = row.split_once(" | ").expect("two columns");
        let mut formats = ToolFormat::ALL.into_iter();
        let format = formats.find(|format| format.name() == name).expect(name);
        let calls = words
            .iter()
            .fold(calls.to_owned(), |calls, (word, meaning)| {
                calls.replace(word, meaning)
            });
        history(&turns(&calls), format);
    }
}

/// DeepSeek's templates add arguments to texts, so that they must be texts.
#[test]
fn arguments_are_texts_where_a_template_takes_no_objects() {
    let source = turns(
        "{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}",
    );
    history(&source, ToolFormat::DeepseekV31);
    let source = turns(
        "{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n' + '```json' + '\\n' + call.function.arguments + '\\n' + '```' + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}",
    );
    history(&source, ToolFormat::DeepseekV3);
}

/// GLM-4's template writes what stands in `metadata` after the role, and knows no other role for results.
#[test]
fn calls_are_messages_where_a_template_has_metadata() {
    let source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% set meta = m.get('metadata', '') %}{% if m.role == 'observation' %}<|observation|>\n{{ m.content }}<|end|>{% elif m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ meta }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}";
    let call = |name: &str, arguments: Value| json!({"id": name, "type": "function", "function": {"name": name, "arguments": arguments}});
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let template = ChatTemplate::new(source, Some("<s>"), Some("</s>")).expect("it parses");
    assert!(template.knows_tools());
    let messages = [
        json!({"role": "user", "content": "Do it."}),
        json!({"role": "assistant", "content": "Well.", "tool_calls": [call("f", json!({"a": 1}))]}),
        json!({"role": "tool", "tool_call_id": "f", "content": "one"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call("g", json!("{}"))]}),
        json!({"role": "tool", "tool_call_id": "g", "content": "two"}),
    ];
    let chat = Chat {
        messages: &messages,
        tools: std::slice::from_ref(&tool),
        add_generation_prompt: false,
        extra: &Map::new(),
    };
    let prompt = with_calls(&template, &chat).expect("it renders");
    let turns = "<|user|>\nDo it.<|end|><|assistant|>\nWell.<|end|><|assistant|>f\n{\"a\": 1}<|end|><|observation|>\none<|end|><|assistant|>g\n{}<|end|><|observation|>\ntwo<|end|>";
    assert!(prompt.ends_with(turns), "{prompt}");
}

/// Kimi's template writes ids, of which its models read the functions' names.
#[test]
fn calls_have_the_ids_that_the_model_gives() {
    let calls = "<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>";
    let source = turns(calls).replace("{{ m.content }}", "{{ m.tool_call_id }}: {{ m.content }}");
    let prompt = history(&source, ToolFormat::KimiK2);
    assert!(
        prompt.ends_with("<|tool|>functions.f:1: done<|end|>"),
        "{prompt}"
    );
}

/// Mistral's templates expect ids of nine letters and digits.
#[test]
fn ids_of_other_servers_become_those_that_the_template_expects() {
    let calls = "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id if call.id | length == 9 else raise_exception('no id') }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}";
    let source = turns(calls).replace("{{ m.content }}", "{{ m.tool_call_id }}: {{ m.content }}");
    let prompt = history(&source, ToolFormat::MistralArgs);
    assert!(prompt.contains("f[CALL_ID]000000001[ARGS]"), "{prompt}");
    assert!(
        prompt.ends_with("<|tool|>000000001: done<|end|>"),
        "{prompt}"
    );

    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {}}});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "done"});
    let calls =
        |ids: [&str; 2]| json!({"role": "assistant", "content": "", "tool_calls": ids.map(call)});
    let chat = |ids: [&str; 2], late: &str| {
        let results = [result(ids[1]), result(ids[0]), result(late)];
        Vec::from_iter([calls(ids)].into_iter().chain(results))
    };
    // What fits stays, also where it would be the next new one.
    assert_eq!(
        short_ids(&chat(["toolu_01", "000000000"], "call-9999"), 9),
        chat(["000000001", "000000000"], "000000002")
    );
    let own = chat(["aB3dE6gH9", "123456789"], "aB3dE6gH9");
    assert_eq!(short_ids(&own, 9), own);
}

/// Llama's templates refuse a message with several calls.
#[test]
fn calls_become_turns_where_a_turn_has_one() {
    let source = "{# <|python_tag|> #}{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{{ m.content }}{{ raise_exception('single') if m.tool_calls | length != 1 }}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, None, None).expect("it parses");
    assert_eq!(
        ToolFormat::of_template(source),
        Some(ToolFormat::Llama3Json)
    );
    let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": {}}});
    let result =
        |id: &str, says: &str| json!({"role": "tool", "tool_call_id": id, "content": says});
    let calls = [call("x", "f"), call("y", "g")];
    let mut messages = vec![
        json!({"role": "user", "content": "Do it."}),
        json!({"role": "assistant", "content": "Well. ", "tool_calls": calls}),
        result("x", "one"),
        result("y", "two"),
        json!({"role": "user", "content": "And?"}),
    ];
    let render = |messages: &[Value]| {
        let chat = Chat::of(messages);
        with_calls(&template, &chat)
    };
    let prompt = render(&messages).expect("it renders");
    let turns =
        "<|user|>Do it.<|assistant|>Well. f<|tool|>one<|assistant|>g<|tool|>two<|user|>And?";
    assert!(prompt.ends_with(turns), "{prompt}");
    assert_eq!(in_form(ToolFormat::Harmony, &messages).len(), 6);
    assert_eq!(in_form(ToolFormat::Hermes, &messages), messages);
    // Without a result for each, the template decides.
    messages.remove(3);
    assert_eq!(one_call_a_turn(&messages), messages);
    let told = render(&messages).expect_err("it is refused").to_string();
    assert!(told.ends_with("single"), "{told}");
}

/// The templates of gpt-oss and Apertus add descriptions of tools to texts.
#[test]
fn a_tool_without_a_description_has_an_empty_one_where_it_is_added() {
    let source = "{% for tool in tools %}{{ '// ' + tool.function.description + '\\n' }}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}";
    let template = ChatTemplate::new(source, None, None).expect("it parses");
    assert!(template.knows_tools());
    let tools = [
        json!({"type": "function", "function": {"name": "f"}}),
        json!({"type": "function", "function": {"name": "g", "description": "Does it."}}),
    ];
    let messages = [json!({"role": "user", "content": "Do it."})];
    let chat = Chat {
        tools: &tools,
        ..Chat::of(&messages)
    };
    let prompt = with_calls(&template, &chat).expect("it renders");
    assert!(prompt.starts_with("// \n{"), "{prompt}");
    assert!(prompt.contains("// Does it.\n{"), "{prompt}");

    // A template that asks for a description sees that there is none.
    let source = "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description is defined }}. {% endfor %}";
    let template = ChatTemplate::new(source, None, None).expect("it parses");
    let prompt = with_calls(&template, &chat).expect("it renders");
    assert_eq!(prompt.to_lowercase(), "f: false. g: true. ");
}

#[test]
fn a_template_that_refuses_a_chat_says_why() {
    let source = "{{ tools | tojson }}{{ raise_exception('no') if messages[1] }}";
    let template = ChatTemplate::new(source, None, None).expect("it parses");
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}});
    let messages = [
        json!({"role": "user", "content": "Do it."}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
    ];
    let chat = Chat::of(&messages);
    let told = with_calls(&template, &chat).expect_err("it is refused");
    assert!(told.to_string().ends_with("no"), "{told}");
}
