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

/// Renders a chat of messages that are written `role content, role content`.
fn rendered(source: &str, chat: &str) -> Result<String> {
    let messages: Vec<Value> = (chat.split(", "))
        .map(|said| said.split_once(' ').expect("a role and a content"))
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect();
    ChatTemplate::new(source, None, None)?.render(&Chat::of(&messages))
}

#[track_caller]
fn check(source: &str, chat: &str, wanted: &str) {
    assert_eq!(rendered(source, chat).unwrap(), wanted, "{chat}");
}

#[test]
fn a_template_that_keeps_all_roles_gets_them_as_they_are() {
    let kept = "<|system|>a\n<|user|>b\n<|system|>c\n<|assistant|>d\n";
    check(CHATML, "system a, user b, system c, assistant d", kept);
    let renamed = "<|system|>a\n<|user|>b\n";
    check(CHATML, "developer a, user b", renamed);
}

/// Chats, and what becomes of them.
const FIRST_CHATS: &str = r"
system a, user b | [SYS]a[/SYS]<|user|>b
system a, user b, assistant c, system d, user e | [SYS]a[/SYS]<|user|>b<|assistant|>c<|user|>d\n\ne
user b, system c, assistant d, user e | <|user|>b\n\nc<|assistant|>d<|user|>e
user b, assistant c, system d | <|user|>b<|assistant|>c<|user|>d
system a, developer b, system c, user d | [SYS]a\n\nb\n\nc[/SYS]<|user|>d
";

const NOWHERE_CHATS: &str = r"
system a, user b | <|user|>a\n\nb
system a, developer b, user c, assistant d, user e | <|user|>a\n\nb\n\nc<|assistant|>d<|user|>e
system a | <|user|>a
user a, system b | <|user|>a\n\nb
system a, assistant b, user c | <|user|>a<|assistant|>b<|user|>c
";

#[test]
fn a_system_message_without_a_place_is_said_by_the_user() {
    for (source, chats) in [(FIRST, FIRST_CHATS), (NOWHERE, NOWHERE_CHATS)] {
        for row in chats.trim().lines() {
            let (chat, wanted) = row.split_once(" | ").expect("two columns");
            check(source, chat, &wanted.replace("\\n", "\n"));
        }
    }
    // What the client gets wrong is still refused.
    let error = rendered(NOWHERE, "user a, user b").unwrap_err().to_string();
    assert!(error.ends_with("roles must alternate"), "{error}");
    for (source, lacks) in [(NOWHERE, true), (FIRST, false)] {
        let template = ChatTemplate::new(source, None, None).unwrap();
        assert_eq!(template.lacks_system(), lacks);
    }
}

/// Whether a template names the role does not tell whether it keeps such a message.
#[test]
fn a_developers_text_is_never_lost() {
    let chat = "developer a, user b";
    let own = "<|system|>a<|developer|>Tools: disabled<|user|>b";
    check(OWN_DEVELOPER, chat, own);
    check(EITHER, chat, "<|developer|>a<|user|>b");
    let chat = "system a, developer b, user c, assistant d, developer e, user f";
    let joined = "<|developer|>a\n\nb<|user|>c<|assistant|>d<|user|>e\n\nf";
    check(EITHER, chat, joined);
}
