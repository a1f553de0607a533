use super::*;
use crate::object::JsonObject;
use crate::wire;
use serde_json::json;

#[derive(Debug, Deserialize)]
struct Asked {
    system: Option<TextOr<ContentPart>>,
    #[serde(deserialize_with = "Option::deserialize")]
    messages: Option<Vec<MessageTurn>>,
}

fn read_all(system: &Value, turns: &Value) -> Result<MergedTurns> {
    let body = json!({"system": system, "messages": turns}).to_string();
    let body = JsonObject::parse(body.as_bytes(), &[wire::names::<Asked>()])?;
    let asked: Asked = body.fields()?;
    merged(asked.system, asked.messages.unwrap_or_default())
}

/// The messages.
fn read(system: &Value, turns: &Value) -> Result<Value> {
    Ok(json!(read_all(system, turns)?.messages))
}

#[test]
fn blocks_become_messages() {
    let cached = json!({"type": "ephemeral"});
    let turns = json!([
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "there", "cache_control": cached}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": [
                {"type": "text", "text": "one"}, {"type": "tool_reference", "tool_name": "Monitor"}]},
            {"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]},
    ]);
    let system = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let later = json!([
        {"role": "system", "content": "c"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ]);
    let expected = json!([
        {"role": "system", "content": "a\nb\nc"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "d\ne"},
    ]);
    assert_eq!(read(&system, &later).expect("fine"), expected);
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
    let expected = json!([
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: one\nTool: Monitor"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "tool_call_id": "2", "content": ""},
    ]);
    assert_eq!(read(&system, &turns).expect("fine"), expected);
}

#[test]
fn turns_of_the_model_are_one_message() {
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "f", "input": {}});
    let says = |content: Value| json!({"role": "assistant", "content": content});
    let mut turns = vec![
        json!({"role": "user", "content": "Hi"}),
        says(json!([{"type": "thinking", "thinking": "Hm."}])),
        says(json!([{"type": "text", "text": "Let me look."}])),
        says(json!([call("1")])),
        says(
            json!([{"type": "thinking", "thinking": "So."}, {"type": "text", "text": "And there."}, call("2")]),
        ),
        json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "one"}]}),
        says("Yes,".into()),
        says("it is.".into()),
    ];
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {}}});
    let expected = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me look.\nAnd there.", "reasoning_content": "Hm.\nSo.",
         "tool_calls": [call("1"), call("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "assistant", "content": "Yes,\nit is."},
    ]);
    let read = |turns: &[Value]| read(&Value::Null, &json!(turns));
    assert_eq!(read(&turns).expect("fine"), expected);
    // The last message, which the answer continues, is the whole one.
    turns.truncate(4);
    turns.push(says("There.".into()));
    let error = read(&turns).expect_err("refused");
    assert_eq!(error.param().as_deref(), Some("messages[4].content"));
}

#[test]
fn results_say_that_a_call_failed() {
    let of = |content: Value| {
        let block = json!({"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": content});
        let turns = json!([{"role": "user", "content": [block]}]);
        read(&Value::Null, &turns).expect("fine")[0]["content"].clone()
    };
    for (content, expected) in [
        (json!("no such file"), "Error: no such file"),
        (
            json!([{"type": "text", "text": "no"}, {"type": "text", "text": "file"}]),
            "Error: no\nfile",
        ),
        (Value::Null, "Error"),
        (json!([]), "Error"),
        (json!(" \n"), "Error"),
        (json!("Error: no file"), "Error: no file"),
        (json!("ValueError: no"), "ValueError: no"),
        (
            json!("<tool_use_error>no</tool_use_error>"),
            "<tool_use_error>no</tool_use_error>",
        ),
        (json!("the error is"), "Error: the error is"),
    ] {
        assert_eq!(of(content), expected);
    }
}

#[test]
fn images_and_documents_of_tools_are_left_out() {
    let data = |kind: &str| json!({"type": kind, "source": {"type": "base64", "media_type": "x/y", "data": "AAAA"}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let of_user = |content: Value| json!({"role": "user", "content": content});
    let result =
        |content: Value| json!({"type": "tool_result", "tool_use_id": "1", "content": content});
    let mut document = data("document");
    document["title"] = "a.pdf".into();
    // As Claude Code reads images and PDF files.
    let turns = json!([
        of_user(json!([result(json!([text("The page:"), data("image"), data("document")]))])),
        of_user(json!([result("PDF file read".into()), document, text("And?")])),
        {"role": "assistant", "content": "Yes."},
        of_user(json!([result("Read".into())])),
        of_user(json!([data("image")])),
    ]);
    let read = read_all(&Value::Null, &turns).expect("fine");
    let said = |message: &ChatMessage| (message.role.clone(), message.content.clone());
    let said: Vec<_> = read.messages.iter().map(said).collect();
    let (image, document) = (
        "[image: this model reads text only]",
        "[document: this model reads text only]",
    );
    let expected = [
        ("tool", format!("The page:\n{image}\n{document}")),
        ("tool", "PDF file read".into()),
        ("user", format!("{document}\nAnd?")),
        ("assistant", "Yes.".into()),
        ("tool", "Read".into()),
        ("user", image.into()),
    ];
    assert_eq!(said, expected.map(|(role, text)| (role.to_owned(), text)));
    let expected = [
        ("messages[0].content[0].content[1]", "image"),
        ("messages[0].content[0].content[2]", "document"),
        ("messages[1].content[1]", "document"),
        ("messages[4].content[0]", "image"),
    ];
    let told = |(at, name): (&str, &str)| {
        format!("{at}: this model reads text only, and the {name} was left out")
    };
    assert_eq!(read.warnings, expected.map(told));
}

#[test]
fn documents_that_are_texts_are_read() {
    let of = |source: Value| json!({"type": "document", "source": source});
    let plain = of(json!({"type": "text", "media_type": "text/plain", "data": "one"}));
    let mut titled = plain.clone();
    titled["title"] = "a.txt".into();
    titled["context"] = "A file.".into();
    titled["citations"] = json!({"enabled": false});
    let parts = of(json!({"type": "content", "content": [
        {"type": "text", "text": "two"}, {"type": "text", "text": "three"}]}));
    let whole = of(json!({"type": "content", "content": "four"}));
    let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [titled, parts]});
    let turns = json!([
        {"role": "user", "content": [titled, parts, whole, {"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [result, plain]},
    ]);
    let expected = json!([
        {"role": "user", "content": "a.txt\nA file.\none\ntwo\nthree\nfour\nAnd?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "tool_call_id": "1", "content": "a.txt\nA file.\none\ntwo\nthree"},
        {"role": "user", "content": "one"},
    ]);
    let read = read_all(&Value::Null, &turns).expect("fine");
    assert_eq!(json!(read.messages), expected);
    assert!(read.warnings.is_empty(), "{:?}", read.warnings);
}

#[test]
fn search_results_are_read() {
    let found = json!({
        "type": "search_result", "source": "https://a.b/c", "title": "Rain", "citations": {"enabled": false},
        "content": [{"type": "text", "text": "It rains."}, {"type": "text", "text": "It pours."}],
    });
    let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [found]});
    let turns = json!([
        {"role": "user", "content": [found, {"type": "text", "text": "Does it?"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [result]},
    ]);
    let text = "Rain\nhttps://a.b/c\nIt rains.\nIt pours.";
    let expected = json!([
        {"role": "user", "content": format!("{text}\nDoes it?")},
        {"role": "assistant", "content": "Yes."},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]);
    assert_eq!(read(&Value::Null, &turns).expect("fine"), expected);
}

/// Whole turns, or the content of a user's turn, or that of an assistant's before it, and the field that an error names.
const WRONG_BLOCKS: &str = r#"
turns | [] | messages
turns | [{"role": "assistant", "content": "x "}] | messages[0].content
turns | [{"role": "assistant", "content": [ {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}] | messages[0].content
user | 1 | messages[0].content
turns | [["user", "x"]] | messages[0]
user | [["text", "x"]] | messages[0].content[0]
user | [7] | messages[0].content[0]
user | [{"type": "image", "source": {}}] | messages[0].content[0].type
user | [{"type": "document", "source": {}}] | messages[0].content[0].source.type
user | [{"type": "document", "source": {"type": "url", "url": "x"}}] | messages[0].content[0].source.type
user | [{"type": "document", "title": "x"}] | messages[0].content[0].source
user | [{"type": "document", "source": {"type": "text"}}] | messages[0].content[0].source.data
user | [{"type": "document", "source": {"type": "content", "data": "x"}}] | messages[0].content[0].source.content
user | [{"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}] | messages[0].content[0].source.content[0].type
user | [{"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": true}}] | messages[0].content[0].citations.enabled
both | [{"type": "document", "source": {"type": "text", "data": "x"}}] | messages[0].content[0].type
both | [{"type": "image", "source": {}}] | messages[0].content[0].type
user | [{"type": "text"}] | messages[0].content[0].text
user | [{"type": "tool_result"}] | messages[0].content[0].tool_use_id
user | [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "web_search_result"}]}] | messages[0].content[0].content[0].type
user | [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "search_result"}]}] | messages[0].content[0].content[0].source
user | [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", "content": "y"}]}] | messages[0].content[0].content[0].content
user | [{"type": "search_result", "source": "x", "content": []}] | messages[0].content[0].title
user | [{"type": "search_result", "source": "x", "title": "y"}] | messages[0].content[0].content
user | [{"type": "search_result", "source": {}, "title": "y", "content": []}] | messages[0].content[0].source
user | [{"type": "search_result", "source": "x", "title": "y", "content": [], "citations": {"enabled": true}}] | messages[0].content[0].citations.enabled
both | [{"type": "search_result", "source": "x", "title": "y", "content": []}] | messages[0].content[0].type
user | [{"type": "document", "source": "x"}] | messages[0].content[0].source
user | [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "text": "x"}]}] | messages[0].content[0].content[0].text
user | [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference"}]}] | messages[0].content[0].content[0].tool_name
both | [{"type": "tool_use", "id": "1", "name": "f"}] | messages[0].content[0].input
user | [{"type": "tool_result", "tool_use_id": "1", "text": "x"}] | messages[0].content[0].text
user | [{"type": "text", "text": "x", "source": {}}] | messages[0].content[0].source
turns | [{"role": "user", "content": "x", "name": "y"}] | messages[0].name
both | [{"type": "text", "text": "x", "input": {}}] | messages[0].content[0].input
turns | [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}] | messages[0].content[0].type
both | [{"type": "server_tool_use"}] | messages[0].content[0].type
"#;

#[test]
fn wrong_blocks_are_named() {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let both = |content: Value| json!([{"role": "assistant", "content": content}, {"role": "user", "content": "x"}]);
    for row in WRONG_BLOCKS.trim().lines() {
        let (kind, row) = row.split_once(" | ").expect("three columns");
        let (turns, field) = row.rsplit_once(" | ").expect("three columns");
        let turns = serde_json::from_str(turns).expect("JSON");
        let turns = match kind {
            "user" => user(turns),
            "both" => both(turns),
            _ => turns,
        };
        let error = read(&Value::Null, &turns).expect_err("refused");
        assert_eq!(error.param().as_deref(), Some(field), "{turns}");
        assert!(error.to_string().starts_with(field), "{error}");
    }
    assert!(read(&json!(1), &user("x".into())).is_err());
}
