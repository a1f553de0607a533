//! Which of the roles that instruct a model a template keeps, and where. Templates do not tell; some refuse such a
//! message, others drop its text. So examples are rendered, and chats are changed so that no text is lost.

use crate::json::append_content;
use serde_json::{Value, json};
use std::borrow::Cow;

/// Where a template keeps the messages of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Support {
    Nowhere,
    /// One message, at the beginning.
    First,
    Everywhere,
}

/// The support of both roles.
#[derive(Debug, Clone, Copy)]
pub(super) struct Roles {
    system: Support,
    /// OpenAI's newer name for `system`.
    developer: Support,
}

impl Roles {
    /// The support of a template that keeps all messages of both roles as they are.
    pub fn all() -> Self {
        Self {
            system: Support::Everywhere,
            developer: Support::Everywhere,
        }
    }

    /// Tries a template with `render`, which returns `None` if it refuses a chat. A template that does not name the
    /// role `developer` and writes any role knows it as little as its model.
    pub fn of(names_developer: bool, render: impl Fn(&[Value]) -> Option<String>) -> Self {
        Self {
            system: support("system", &render),
            developer: if names_developer {
                support("developer", &render)
            } else {
                Support::Nowhere
            },
        }
    }

    /// Whether a system message is part of what the user says.
    pub fn lack_system(self) -> bool {
        self.system == Support::Nowhere && self.developer == Support::Nowhere
    }

    /// The messages in the roles and places that the template keeps. What it does not keep becomes part of the next
    /// message of the user, or of the last one if none follows.
    pub fn fit(self, messages: &[Value]) -> Cow<'_, [Value]> {
        let is_kept = |(i, message): (usize, &Value)| match self.support(message) {
            None => true,
            Some((role, support)) => {
                message["role"] == role
                    && (support == Support::Everywhere || support == Support::First && i == 0)
            }
        };
        if messages.iter().enumerate().all(is_kept) {
            return messages.into();
        }
        let mut fitted = Fitted::default();
        for message in messages {
            match (self.support(message), message["content"].as_str()) {
                (Some((role, support)), Some(text)) => {
                    fitted.instruct(role, support, text, message)
                }
                _ => fitted.push(message.clone()),
            }
        }
        fitted.flush();
        fitted.messages.into()
    }

    /// For a message that instructs the model: the role that it gets, and where that is kept.
    fn support(self, message: &Value) -> Option<(&'static str, Support)> {
        match message["role"].as_str()? {
            "developer" if self.developer >= self.system && !self.lack_system() => {
                Some(("developer", self.developer))
            }
            "system" | "developer" => Some(("system", self.system)),
            _ => None,
        }
    }
}

fn support(role: &str, render: impl Fn(&[Value]) -> Option<String>) -> Support {
    const TEXTS: [&str; 3] = [
        "first instruction",
        "second instruction",
        "third instruction",
    ];
    let [first, second, third] = TEXTS.map(|text| json!({"role": role, "content": text}));
    let user = json!({"role": "user", "content": "Hi"});
    let assistant = json!({"role": "assistant", "content": "Hello"});
    let keeps = |messages: &[Value], texts: &[&str]| {
        render(messages).is_some_and(|prompt| texts.iter().all(|text| prompt.contains(text)))
    };
    let begins = [first, user];
    if !keeps(&begins, &TEXTS[..1]) {
        return Support::Nowhere;
    }
    let [first, user] = begins;
    let many = [first, second, user.clone(), assistant, third, user];
    if keeps(&many, &TEXTS) {
        Support::Everywhere
    } else {
        Support::First
    }
}

/// Messages with instructions that wait for the next message of the user.
#[derive(Default)]
struct Fitted {
    messages: Vec<Value>,
    waiting: Vec<String>,
    /// Whether there is a message that does not instruct the model.
    begun: bool,
}

impl Fitted {
    /// Adds a message that instructs the model.
    fn instruct(&mut self, role: &str, support: Support, text: &str, message: &Value) {
        match (support, self.messages.last_mut()) {
            (Support::First, Some(first)) if !self.begun && self.waiting.is_empty() => {
                append_content(first, "\n\n", text);
            }
            (Support::First, None) if self.waiting.is_empty() => self.push_as(role, message),
            (Support::Everywhere, _) => self.push_as(role, message),
            _ => self.waiting.push(text.to_owned()),
        }
    }

    fn push_as(&mut self, role: &str, message: &Value) {
        let mut message = message.clone();
        message["role"] = role.into();
        self.messages.push(message);
    }

    /// Adds another message.
    fn push(&mut self, mut message: Value) {
        self.begun |= message["role"] != "system" && message["role"] != "developer";
        if message["role"] == "user" {
            if let Some(text) = message["content"].as_str()
                && !self.waiting.is_empty()
            {
                self.waiting.push(text.to_owned());
                message["content"] = self.take_waiting().into();
            }
            self.flush();
        } else if message["role"] == "assistant" {
            self.flush();
        }
        self.messages.push(message);
    }

    /// Makes what waits a part of the last message, or one of its own.
    fn flush(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let text = self.take_waiting();
        match self.messages.last_mut() {
            Some(last) if last["role"] == "user" && last["content"].is_string() => {
                append_content(last, "\n\n", &text);
            }
            _ => self.messages.push(json!({"role": "user", "content": text})),
        }
    }

    fn take_waiting(&mut self) -> String {
        std::mem::take(&mut self.waiting).join("\n\n")
    }
}
