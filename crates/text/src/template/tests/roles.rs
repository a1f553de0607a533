//! Where messages of `system` and `developer` go, by what a template keeps.

use super::super::{Chat, ChatTemplate};
use foretoken_core::error::Result;
use serde_json::{Value, json};

/// A template that keeps any role, anywhere.
const CHATML: &str =
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{# no other role #}";

/// A template like that of Mistral 0.3: a system message stands only at the beginning.
const FIRST: &str = "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content }}[/SYS]{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}";

/// A template like those of Gemma 2, Mistral 0.1 and 0.2, which keep no system message.
const NOWHERE: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}";

/// A template like that of Apertus: it writes a developer block of its own, and no developer message of the chat.
const OWN_DEVELOPER: &str = "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}{% endif %}{% if loop.first %}<|developer|>Tools: disabled{% endif %}{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}";

/// A template like that of gpt-oss: the first message may be of either role, and later ones are dropped.
const EITHER: &str = "{% if messages[0].role in ['developer', 'system'] %}<|developer|>{{ messages[0].content }}{% endif %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}";

fn rendered(source: &str, messages: &[(&str, &str)]) -> Result<String> {
    let messages: Vec<Value> = (messages.iter())
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect();
    ChatTemplate::new(source, None, None)?.render(&Chat::of(&messages))
}

#[track_caller]
fn check(source: &str, messages: &[(&str, &str)], wanted: &str) {
    assert_eq!(rendered(source, messages).unwrap(), wanted);
}

#[test]
fn a_template_that_keeps_all_roles_gets_them_as_they_are() {
    let chat = [
        ("system", "a"),
        ("user", "b"),
        ("system", "c"),
        ("assistant", "d"),
    ];
    check(
        CHATML,
        &chat,
        "<|system|>a\n<|user|>b\n<|system|>c\n<|assistant|>d\n",
    );
    check(
        CHATML,
        &[("developer", "a"), ("user", "b")],
        "<|system|>a\n<|user|>b\n",
    );
}

#[test]
fn a_later_system_message_is_said_by_the_user() {
    let system = ("system", "a");
    for (chat, wanted) in [
        (vec![system, ("user", "b")], "[SYS]a[/SYS]<|user|>b"),
        (
            vec![
                system,
                ("user", "b"),
                ("assistant", "c"),
                ("system", "d"),
                ("user", "e"),
            ],
            "[SYS]a[/SYS]<|user|>b<|assistant|>c<|user|>d\n\ne",
        ),
        (
            vec![
                ("user", "b"),
                ("system", "c"),
                ("assistant", "d"),
                ("user", "e"),
            ],
            "<|user|>b\n\nc<|assistant|>d<|user|>e",
        ),
        (
            vec![("user", "b"), ("assistant", "c"), ("system", "d")],
            "<|user|>b<|assistant|>c<|user|>d",
        ),
        // What begins a chat is one message.
        (
            vec![system, ("developer", "b"), ("system", "c"), ("user", "d")],
            "[SYS]a\n\nb\n\nc[/SYS]<|user|>d",
        ),
    ] {
        check(FIRST, &chat, wanted);
    }
}

#[test]
fn a_template_without_system_messages_gets_them_from_the_user() {
    for (chat, wanted) in [
        (vec![("system", "a"), ("user", "b")], "<|user|>a\n\nb"),
        (
            vec![
                ("system", "a"),
                ("developer", "b"),
                ("user", "c"),
                ("assistant", "d"),
                ("user", "e"),
            ],
            "<|user|>a\n\nb\n\nc<|assistant|>d<|user|>e",
        ),
        (vec![("system", "a")], "<|user|>a"),
        (vec![("user", "a"), ("system", "b")], "<|user|>a\n\nb"),
        (
            vec![("system", "a"), ("assistant", "b"), ("user", "c")],
            "<|user|>a<|assistant|>b<|user|>c",
        ),
    ] {
        check(NOWHERE, &chat, wanted);
    }
    // What the client gets wrong is still refused.
    let error = rendered(NOWHERE, &[("user", "a"), ("user", "b")]).unwrap_err();
    assert!(
        error.to_string().ends_with("roles must alternate"),
        "{error}"
    );
    assert!(
        ChatTemplate::new(NOWHERE, None, None)
            .unwrap()
            .lacks_system()
    );
    assert!(!ChatTemplate::new(FIRST, None, None).unwrap().lacks_system());
}

/// Whether a template names the role does not tell whether it keeps such a message.
#[test]
fn a_developers_text_is_never_lost() {
    check(
        OWN_DEVELOPER,
        &[("developer", "a"), ("user", "b")],
        "<|system|>a<|developer|>Tools: disabled<|user|>b",
    );
    check(
        EITHER,
        &[("developer", "a"), ("user", "b")],
        "<|developer|>a<|user|>b",
    );
    check(
        EITHER,
        &[
            ("system", "a"),
            ("developer", "b"),
            ("user", "c"),
            ("assistant", "d"),
            ("developer", "e"),
            ("user", "f"),
        ],
        "<|developer|>a\n\nb<|user|>c<|assistant|>d<|user|>e\n\nf",
    );
}
