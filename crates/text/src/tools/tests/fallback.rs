//! Chats about tools as a template sees them that knows none.

use super::*;
use crate::ChatTemplate;
use crate::template::Chat;

/// The messages of a chat that is written `role content | role content`. The role `calls` is that of an assistant who calls.
fn chat(text: &str) -> Vec<Value> {
    let message = |message: &str| match message.split_once(' ').expect("a role and a content") {
        ("calls", content) => calls(content),
        (role, content) => said(role, content),
    };
    text.split(" | ").map(message).collect()
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn calls(content: &str) -> Value {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}});
    json!({"role": "assistant", "content": content, "tool_calls": [call]})
}

const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
const ONE: &str = "<tool_response>\none\n</tool_response>";

#[test]
fn what_is_rewritten_is_joined_with_its_neighbours() {
    for (messages, wanted) in [
        (
            "user Go. | calls  | tool one | user And?",
            "user Go. | assistant CALL | user ONE\nAnd?",
        ),
        (
            "user Go. | assistant a | calls b | assistant c | tool one",
            "user Go. | assistant a\nb\nCALL\nc | user ONE",
        ),
        (
            "calls  | user a | tool one | tool one | user b | user c",
            "assistant CALL | user a\nONE\nONE\nb\nc",
        ),
        // What the chat has by itself stays.
        (
            "user Go. | user Go. | assistant a | assistant b",
            "user Go. | user Go. | assistant a | assistant b",
        ),
    ] {
        let plain = without_tools(&chat(messages), &[], ToolFormat::Hermes);
        let wanted = wanted.replace("CALL", CALL).replace("ONE", ONE);
        assert_eq!(plain, chat(&wanted), "{messages}");
    }
}

#[test]
fn nothing_of_a_message_is_lost() {
    let with = |key: &str, value: &str, mut message: Value| {
        message[key] = value.into();
        message
    };
    let thought = |text: &str, message: Value| with("reasoning_content", text, message);
    let kept = [
        with("name", "Ann", said("user", "And?")),
        thought("Hm.", said("assistant", "b")),
    ];
    let before = [said("tool", "one"), thought("So.", calls("a"))];
    for (before, after) in before.into_iter().zip(kept) {
        let plain = without_tools(&[before, after.clone()], &[], ToolFormat::Hermes);
        assert_eq!((plain.len(), &plain[1]), (2, &after));
    }
    let null =
        json!({"role": "assistant", "content": "b", "reasoning_content": "Hm.", "name": null});
    let plain = without_tools(&[calls("a"), null], &[], ToolFormat::Hermes);
    let joined = format!("a\n{CALL}\nb");
    assert_eq!(plain, [thought("Hm.", said("assistant", &joined))]);
}

/// Gemma's and Mistral's old templates take neither tools nor a system message.
#[test]
fn a_template_of_two_roles_gets_tools_from_the_user() {
    const TURNS: &str = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let tools = [json!({"type": "function", "function": {"name": "f"}})];
    let messages = chat("user Go. | calls  | tool one | user And?");
    for (role, begins) in [
        (None, ""),
        (Some("system"), "Be brief.\n\n"),
        (Some("developer"), "Be brief.\n\n"),
    ] {
        let before = role.map(|role| said(role, "Be brief."));
        let messages: Vec<Value> = before.into_iter().chain(messages.clone()).collect();
        let plain = without_tools(&messages, &tools, ToolFormat::Hermes);
        let template = ChatTemplate::new(TURNS, None, None).unwrap();
        let prompt = template.render(&Chat::of(&plain)).unwrap();
        let begins = format!("<user>{begins}You can call");
        assert!(prompt.starts_with(&begins), "{prompt}");
        let rest = format!("\n\nGo.<assistant>{CALL}<user>{ONE}\nAnd?");
        assert!(prompt.ends_with(&rest), "{prompt}");
    }
}
