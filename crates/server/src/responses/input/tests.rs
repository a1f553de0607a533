use super::*;
use crate::object::JsonObject;
use crate::responses::tools::tools;
use crate::tools::{Tools, name};
use crate::wire;
use serde_json::json;

#[derive(Debug, Deserialize)]
struct Asked {
    input: Option<TextOr<InputItem>>,
}

fn read_all(instructions: Option<String>, input: &Value) -> Result<Conversation> {
    let body = json!({"input": input}).to_string();
    let body = JsonObject::parse(body.as_bytes(), &[wire::names::<Asked>()])?;
    let input = required("input", body.fields::<Asked>()?.input)?;
    conversation(instructions, &[], input, |_| None)
}

/// The messages.
fn read(instructions: Option<String>, input: &Value) -> Result<Value> {
    Ok(json!(read_all(instructions, input)?.messages))
}

#[test]
fn items_become_messages_and_calls_join_their_turn() {
    let input = json!([
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Hm."}, {"type": "encrypted", "data": 1}, 7,
            {"type": "thought", "text": "So."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me look.", "refusal": null, "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}", "caller": {"type": "direct"}},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [
            {"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "4", "name": "patch",
            "input": "a\n"},
        {"type": "custom_tool_call_output", "call_id": "4", "name": "patch", "output": "done"},
        {"type": "local_shell_call", "call_id": "5", "status": "completed",
            "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "5", "output": "x"},
    ]);
    let call = |id: &str, name: &str, arguments: Value| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let expected = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "a\nb"},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.\nSo.",
         "tool_calls": [call("1", "f", "{}".into()), call("2", "g", "{\"a\": 1}".into())]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [
            call("3", "n__f", "{}".into()), call("4", "patch", json!({"input": "a\n"}))]},
        {"role": "tool", "tool_call_id": "4", "content": "done"},
        {"role": "assistant", "content": "", "tool_calls": [
            call("5", "local_shell", json!({"type": "exec", "command": ["ls"]}))]},
        {"role": "tool", "tool_call_id": "5", "content": "x"},
    ]);
    let items = read(Some("Be brief.".into()), &input).expect("items");
    assert_eq!(items, expected);
    let text = read(None, &"Hi".into()).expect("a text");
    assert_eq!(text, json!([{"role": "user", "content": "Hi"}]));
}

#[test]
fn thoughts_stay_in_their_turn() {
    let thought = |text: &str| {
        json!({"type": "reasoning", "summary": [], "content": [
            {"type": "reasoning_text", "text": text}]})
    };
    let summary = json!({"type": "reasoning", "encrypted_content": "x", "summary": [
        {"type": "summary_text", "text": "S."}]});
    let says = |text: &str| json!({"role": "assistant", "content": text});
    let user = |text: &str| json!({"role": "user", "content": text});
    let calls =
        |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
    let result = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "x"});
    let made = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let input = json!([
        user("Hi"),
        thought("A."),
        says("Let me look."),
        thought("B."),
        calls("1"),
        thought("C."),
        calls("2"),
        result("1"),
        result("2"),
        thought("D."),
        thought("E."),
        user("Go on"),
        summary,
        says("Yes."),
        user("?"),
        thought("F."),
    ]);
    let expected = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "A.\nB.\nC.",
         "tool_calls": [made("1"), made("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
        {"role": "assistant", "content": "", "reasoning_content": "D.\nE."},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "S."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "reasoning_content": "F."},
    ]);
    assert_eq!(read(None, &input).expect("items"), expected);
}

/// As Codex sends them.
#[test]
fn agents_talk_and_find_tools() {
    let found = |names: &[&str]| {
        let tools = names.iter().map(|name| {
            json!({"type": "function", "name": name, "description": "d", "strict": false, "defer_loading": true,
                "parameters": {"type": "object", "properties": {}}})
        });
        json!({"type": "namespace", "name": "calendar", "description": "Events.", "tools": tools.collect::<Vec<_>>()})
    };
    let search = |id: Value, query: &str| {
        json!({"type": "tool_search_call", "id": "tsc_1", "call_id": id, "status": "completed", "execution": "client",
            "arguments": {"query": query, "limit": 5}})
    };
    let output = |id: Value, tools: Value| {
        json!({"type": "tool_search_output", "call_id": id, "status": "completed", "execution": "client",
            "tools": tools, "internal_chat_message_metadata_passthrough": {"turn_id": "1"}})
    };
    let input = json!([
        {"type": "agent_message", "id": "am_1", "author": "/root", "recipient": "/root/reader", "content": [
            {"type": "input_text", "text": "Read it."}, {"type": "encrypted_content", "encrypted_content": "x"}]},
        search("1".into(), "events"),
        output("1".into(), json!([found(&["create", "list"])])),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "revised_prompt": "x", "result": "AAAA"},
        search("2".into(), "more"),
        output("2".into(), json!([found(&["list", "remove"])])),
        search("3".into(), "nothing"),
        output("3".into(), json!([])),
        search(Value::Null, "of a server"),
        output(Value::Null, json!([{"type": "function", "name": "f"}])),
        {"type": "agent_message", "author": "a", "recipient": "b", "content": [
            {"type": "encrypted_content", "encrypted_content": "x"}]},
        {"type": "context_compaction"},
        {"type": "function_call_output", "call_id": "4", "name": "f", "namespace": "n", "output": "x"},
    ]);
    let read = read_all(None, &input).expect("items");
    let call = |id: &str, query: &str| {
        let function = json!({"name": "tool_search", "arguments": {"query": query, "limit": 5}});
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": id, "type": "function", "function": function}]})
    };
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let expected = json!([
        {"role": "user", "content": "Message from /root to /root/reader:\nRead it."},
        call("1", "events"),
        result("1", "These tools can be called now:\ncalendar__create\ncalendar__list"),
        call("2", "more"),
        result("2", "These tools can be called now:\ncalendar__list\ncalendar__remove"),
        call("3", "nothing"),
        result("3", "No tool was found."),
        result("4", "x"),
    ]);
    assert_eq!(json!(read.messages), expected);
    let left_out = [
        "input[0].content: encrypted_content",
        "input[3]: web_search_call",
        "input[4]: image_generation_call",
        "input[9]: tool_search_call",
        "input[11].content: encrypted_content",
        "input[12]: context_compaction",
    ];
    let told = left_out.map(|what| format!("{what} is not available here and was left out"));
    assert_eq!(read.warnings, told);
    let (tools, names) = tools(read.tools).expect("tools");
    let tools = Tools::only(Some(tools)).expect("each once");
    let shown: Vec<&str> = tools.list.iter().map(name).collect();
    let expected = [
        "calendar__create",
        "calendar__list",
        "calendar__remove",
        "f",
    ];
    assert_eq!(shown, expected);
    assert_eq!(names.of("calendar__remove"), (Some("calendar"), "remove"));
}

/// Open WebUI sends such items.
#[test]
fn reasoning_may_have_further_keys() {
    let input = json!([
        {"type": "reasoning", "content": "Hm.", "summary": null, "started_at": 1.5, "ended_at": 2.5, "duration": 1,
         "_tag_type": "think", "attributes": {"a": "b"}, "start_tag": "<think>", "end_tag": "</think>"},
        {"role": "assistant", "content": "Yes."},
    ]);
    let said = json!({"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."});
    assert_eq!(read(None, &input).expect("items"), json!([said]));
}

/// Inputs, and the field that an error names.
const WRONG_ITEMS: &str = r#"
7 | input
[] | input
["Hi"] | input[0]
[["message", "user", "Hi"]] | input[0]
[{"role": "user", "content": [["input_text", "Hi"]]}] | input[0].content[0]
[{"role": "user", "content": 7}] | input[0].content
[{"role": "tool", "content": "x"}] | input[0].role
[{"role": "user"}] | input[0].content
[{"role": "user", "content": [{"type": "input_image"}]}] | input[0].content[0].type
[{"role": "user", "content": [{"type": "input_text"}]}] | input[0].content[0].text
[{"type": "item_reference", "id": "x"}] | input[0].id
[{"type": "file_search_call"}] | input[0].type
[{"type": "compaction", "encrypted_content": "x"}] | input[0].type
[{"type": "compaction_summary", "encrypted_content": "x"}] | input[0].type
[{"type": "context_compaction", "encrypted_content": "x"}] | input[0].type
[{"type": "compaction_trigger"}] | input[0].type
[{"type": "tool_search_call", "call_id": "1", "arguments": "{}"}] | input[0].arguments
[{"type": "tool_search_output", "call_id": "1", "status": "completed"}] | input[0].tools
[{"type": "agent_message", "author": "a", "content": []}] | input[0].recipient
[{"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "input_image"}]}] | input[0].content[0].type
[{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}] | input[0].arguments
[{"type": "custom_tool_call", "call_id": "1", "name": "f"}] | input[0].input
[{"type": "function_call_output", "call_id": "1", "output": [ {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:image/png;base64,"}]}] | input[0].output[1].image_url
[{"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_image"}]}] | input[0].output[0].image_url
[{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}] | input[0].output[0].type
[{"type": "function_call_output", "call_id": "1", "output": 7}] | input[0].output
[{"type": "additional_tools", "role": "developer"}] | input[0].tools
[{"role": "user", "content": "x", "output": "y"}] | input[0].output
[{"role": "user", "content": "x", "audio": {"id": "y"}}] | input[0].audio
[{"type": "reasoning", "content": "x", "arguments": "{}"}] | input[0].arguments
[{"role": "user", "content": [{"type": "input_text", "text": "x", "image_url": "y"}]}] | input[0].content[0].image_url
[{"type": "function_call", "name": "f", "arguments": "{}"}] | input[0].call_id
[{"type": "function_call_output", "call_id": "1"}] | input[0].output
"#;

#[test]
fn wrong_items_are_named() {
    for row in WRONG_ITEMS.trim().lines() {
        let (input, field) = row.rsplit_once(" | ").expect("two columns");
        let input: Value = serde_json::from_str(input).expect("JSON");
        let error = read(None, &input).expect_err("refused");
        assert_eq!(error.param().as_deref(), Some(field), "{input}");
        assert!(error.to_string().starts_with(field), "{error}");
    }
}
