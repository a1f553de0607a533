//! Templates with the constructs of Qwen 2.5's, Llama 3.1's and Mistral 0.3's: that they run, what they
//! teach, and that the parser reads what they show.

use crate::Text;
use crate::part::joined;
use crate::template::{Chat, ChatTemplate};
use crate::tools::{Signature, ToolFormat, ToolParser};
use serde_json::{Map, Value, json};

pub(crate) const QWEN: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'Help.' }}
    {%- endif %}
    {{- "\n\nSignatures:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\nCall with:\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {{- '<|im_start|>system\nHelp.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

pub(crate) const LLAMA: &str = r#"{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("there is no user message") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- 'Answer with {"name": name, "parameters": arguments}.\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

pub(crate) const MISTRAL: &str = r#"{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("ids must have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"#;

const QWEN3_CODER: &str = r#"{%- macro shown(of) %}
    {%- for key, value in of|items %}
        {{- '\n<' ~ key ~ '>' ~ (value | tojson | safe) ~ '</' ~ key ~ '>' }}
    {%- endfor %}
{%- endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}
            {%- set tool = tool.function %}
        {%- endif %}
        {{- '\n<function>\n<name>' ~ tool.name ~ '</name>' }}
        {%- if tool.parameters is mapping %}
            {{- shown(tool.parameters.properties) }}
        {%- endif %}
        {{- '\n</function>' }}
    {%- endfor %}
    {{- '\n</tools>\nCall with:\n<tool_call>\n<function=example>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
            {{- '\n' + message.content | trim + '\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- if tool_call.arguments is defined %}
                {%- for name, value in tool_call.arguments|items %}
                    {{- '<parameter=' + name + '>\n' }}
                    {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                    {{- value }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user\n' }}
        {%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- elif loop.last %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

const FUNCTION: &str = r#"{"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}"#;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>"), Some("</s>")).expect("it parses")
}

/// A call, its result, and a question, as the server gives them to templates.
fn chat(template: &ChatTemplate, with_tools: bool) -> String {
    let function: Value = serde_json::from_str(FUNCTION).expect("JSON");
    let tools = [json!({"type": "function", "function": function})];
    let call = json!({"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
    let messages = [
        json!({"role": "user", "content": "Do it."}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "abcdefgh1", "content": "done"}),
        json!({"role": "assistant", "content": "It is done."}),
        json!({"role": "user", "content": "Again."}),
    ];
    let chat = Chat {
        messages: &messages,
        tools: if with_tools { &tools } else { &[] },
        add_generation_prompt: true,
        extra: &Map::new(),
    };
    template.render(&chat).expect("it renders")
}

/// Renders [`chat`], which shows `parts`. The assistant's first turn, between `around`, is read as its answer. Without tools,
/// there is no `instruction`.
#[track_caller]
fn check(source: &str, format: ToolFormat, parts: [&str; 2], around: [&str; 2], instruction: &str) {
    let template = template(source);
    assert!(template.knows_tools());
    assert_eq!(ToolFormat::of_template(source), Some(format));
    let prompt = chat(&template, true);
    for part in parts {
        assert!(prompt.contains(part), "{part} is missing: {prompt}");
    }
    let turn = prompt.split_once(around[0]).expect("a turn").1;
    let turn = turn.split_once(around[1]).expect("its end").0;
    let function: Value = serde_json::from_str(FUNCTION).expect("JSON");
    let mut parser = ToolParser::new(format, [Signature::of(&function)].into(), usize::MAX);
    let mut parts = Vec::new();
    parser.push(turn, &mut parts);
    parser.finish(&mut parts);
    let calls = vec![("f".to_owned(), r#"{"a": 1}"#.to_owned())];
    assert_eq!(joined(parts), (String::new(), String::new(), calls));
    assert!(!chat(&template, false).contains(instruction));
}

#[test]
fn qwen() {
    let tool = format!("<tools>\n{{\"type\": \"function\", \"function\": {FUNCTION}}}");
    let result = "<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n";
    let (parts, around) = ([&*tool, result], ["assistant\n", "<|im_end|>"]);
    check(QWEN, ToolFormat::Hermes, parts, around, "Signatures");
}

#[test]
fn qwen3_coder() {
    let result = "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<|im_end|>\n";
    let (parts, around) = (["<name>f</name>", result], ["assistant\n", "<|im_end|>"]);
    let format = ToolFormat::Qwen3Coder;
    check(QWEN3_CODER, format, parts, around, "# Tools");
}

#[test]
fn llama() {
    // In Python a text is iterable, and so the template quotes it.
    let result = "<|start_header_id|>ipython<|end_header_id|>\n\n\"done\"<|eot_id|>";
    let parts = ["        \"name\": \"f\",\n", result];
    let around = ["assistant<|end_header_id|>\n\n", "<|eot_id|>"];
    let format = ToolFormat::Llama3Json;
    check(LLAMA, format, parts, around, "ipython\n\n");
}

#[test]
fn mistral() {
    let tool = format!(r#"[AVAILABLE_TOOLS] [{{"type": "function", "function": {FUNCTION}}}]"#);
    let result = r#"[TOOL_RESULTS] {"content": done, "call_id": "abcdefgh1"}[/TOOL_RESULTS]"#;
    let (parts, around) = ([&*tool, result], ["[/INST]", "</s>"]);
    let format = ToolFormat::Mistral;
    check(MISTRAL, format, parts, around, "[AVAILABLE_TOOLS]");
}

/// SmolLM2's template knows no tools.
#[test]
fn a_template_without_tools_is_recognized() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    let text = Text::from_gguf(std::path::Path::new(file)).expect("it loads");
    assert_eq!(text.tool_format(), Some(ToolFormat::Hermes));
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert!(!template(plain).knows_tools());
}
