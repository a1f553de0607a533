//! Chats about tools as a template sees them that knows none.

use super::*;
use crate::ChatTemplate;
use crate::template::Chat;

/// Role and content of each message.
fn plain(messages: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let plain = without_tools(messages, &[], ToolFormat::Hermes);
    (plain.iter())
        .map(|message| (text(&message["role"]), text(&message["content"])))
        .collect()
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
    let pair = |role: &str, content: String| (role.to_owned(), content);
    let (user, tool) = (said("user", "Go."), said("tool", "one"));
    for (messages, wanted) in [
        (
            vec![user.clone(), calls(""), tool.clone(), said("user", "And?")],
            vec![
                pair("user", "Go.".into()),
                pair("assistant", CALL.into()),
                pair("user", format!("{ONE}\nAnd?")),
            ],
        ),
        (
            vec![
                user.clone(),
                said("assistant", "a"),
                calls("b"),
                said("assistant", "c"),
                tool.clone(),
            ],
            vec![
                pair("user", "Go.".into()),
                pair("assistant", format!("a\nb\n{CALL}\nc")),
                pair("user", ONE.into()),
            ],
        ),
        (
            vec![
                calls(""),
                said("user", "a"),
                tool.clone(),
                tool,
                said("user", "b"),
                said("user", "c"),
            ],
            vec![
                pair("assistant", CALL.into()),
                pair("user", format!("a\n{ONE}\n{ONE}\nb\nc")),
            ],
        ),
        // What the chat has by itself stays.
        (
            vec![
                user.clone(),
                user,
                said("assistant", "a"),
                said("assistant", "b"),
            ],
            vec![
                pair("user", "Go.".into()),
                pair("user", "Go.".into()),
                pair("assistant", "a".into()),
                pair("assistant", "b".into()),
            ],
        ),
    ] {
        assert_eq!(plain(&messages), wanted);
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
    let messages = [
        said("user", "Go."),
        calls(""),
        said("tool", "one"),
        said("user", "And?"),
    ];
    for (before, begins) in [
        (vec![], "<user>You can call"),
        (
            vec![said("system", "Be brief.")],
            "<user>Be brief.\n\nYou can call",
        ),
        (
            vec![said("developer", "Be brief.")],
            "<user>Be brief.\n\nYou can call",
        ),
    ] {
        let messages: Vec<Value> = before.into_iter().chain(messages.clone()).collect();
        let plain = without_tools(&messages, &tools, ToolFormat::Hermes);
        let prompt = ChatTemplate::new(TURNS, None, None)
            .unwrap()
            .render(&Chat::of(&plain));
        let prompt = prompt.unwrap();
        assert!(prompt.starts_with(begins), "{prompt}");
        let rest = format!("\n\nGo.<assistant>{CALL}<user>{ONE}\nAnd?");
        assert!(prompt.ends_with(&rest), "{prompt}");
    }
}
