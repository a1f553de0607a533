//! Chat templates: renders a model's Jinja template as Hugging Face does.
//!
//! A template is a program that comes with a model, which the operator chose; what it reads comes from
//! requests. The library bounds its instructions and its recursion, and we bound its source and its output.
//! `SECURITY.md` says what it can still do.

mod arguments;
mod functions;
mod methods;
mod output;
mod roles;
mod source;
mod texts;

use foretoken_core::error::{Error, Result, clipped};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use output::BoundedOutput;
use roles::Roles;
use serde::Serialize;
use serde_json::{Map, json};
use std::sync::LazyLock;

/// A compiled chat template.
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    roles: Roles,
    /// Whether it tells the model of tools, or why it cannot.
    tools: Result<bool, String>,
}

/// A chat to render.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// Objects with `role` and `content`; other keys are passed through.
    pub messages: &'a [serde_json::Value],
    /// The functions that the model may call, as in a request: objects with `type` and `function`.
    pub tools: &'a [serde_json::Value],
    /// Whether the prompt ends with the beginning of the answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template.
    pub extra: &'a Map<String, serde_json::Value>,
}

static NO_VARIABLES: LazyLock<Map<String, serde_json::Value>> = LazyLock::new(Map::new);

impl<'a> Chat<'a> {
    /// A chat of these messages alone, with the beginning of the answer.
    pub fn of(messages: &'a [serde_json::Value]) -> Self {
        Self {
            messages,
            tools: &[],
            add_generation_prompt: true,
            extra: &NO_VARIABLES,
        }
    }
}

/// The variables of a template. If two have the same name, the later field wins.
#[derive(Serialize)]
struct Variables<'a> {
    #[serde(flatten)]
    extra: &'a Map<String, serde_json::Value>,
    messages: &'a [serde_json::Value],
    add_generation_prompt: bool,
    /// The tools of the chat; `null` if there are none, which templates ask for.
    tools: Option<&'a [serde_json::Value]>,
    documents: Option<()>,
}

const NAME: &str = "chat_template";
/// Bytes of a template. The largest of known models have 20,000.
const MAX_SOURCE: usize = 128 << 10;
/// Instructions of one rendering; each also pays for 64 bytes that are made, read or written. A chat of 1,000 messages takes
/// tens of thousands.
const FUEL: u64 = 5_000_000;
/// Loops, blocks and, four times, macros in each other.
const RECURSION: usize = 200;
/// Bytes of the stack of the library's compiler, which is recursive: enough for an expression that is as long
/// as the source.
const COMPILER_STACK: usize = 128 << 20;

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the names of the special tokens.
    ///
    /// # Errors
    /// `Setup`, if the template is too large or does not parse.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = environment()?;
        environment.add_global("bos_token", bos.unwrap_or_default());
        environment.add_global("eos_token", eos.unwrap_or_default());
        compile(&mut environment, source)?;
        let mut template = Self {
            source: source.to_owned(),
            environment,
            roles: Roles::all(),
            tools: Ok(false),
        };
        template.try_out();
        Ok(template)
    }

    /// The Jinja source, as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it tells the model of tools.
    pub fn knows_tools(&self) -> bool {
        self.tools == Ok(true)
    }

    /// Returns why the template cannot be applied to a chat with tools, although it can be applied to other chats.
    pub fn tools_refused(&self) -> Option<&str> {
        self.tools.as_ref().err().map(String::as_str)
    }

    /// Whether it refuses messages that instruct the model, or drops them.
    pub fn lacks_system(&self) -> bool {
        self.roles.lack_system()
    }

    /// Renders examples, and learns from the prompts what the template knows.
    fn try_out(&mut self) {
        let hello = [json!({"role": "user", "content": "Hi"})];
        // A template that cannot be applied does not keep completions from being served.
        if let Err(e) = self.render_example(&hello, &[]) {
            return tracing::warn!("{e}; chats will be refused");
        }
        self.tools = self.shows_a_tool(&hello);
        if let Err(why) = &self.tools {
            tracing::warn!(
                "with tools, {why}; they will be described in the system message instead"
            );
        }
        self.roles = Roles::of(self.source.contains("developer"), |messages| {
            self.render_example(messages, &[]).ok()
        });
        if self.lacks_system() {
            tracing::info!(
                "the chat template keeps no system message; its text will be part of the user's message"
            );
        }
    }

    /// Renders a chat with a tool, and looks for it in the prompt.
    fn shows_a_tool(&self, messages: &[serde_json::Value]) -> Result<bool, String> {
        const NAME: &str = "an_example_of_a_tool";
        let argument = json!({"type": "string", "description": "Any text."});
        let parameters = json!({
            "type": "object", "properties": {"text": argument}, "required": ["text"],
        });
        let tool = json!({"type": "function", "function": {
            "name": NAME, "description": "Does nothing.", "parameters": parameters,
        }});
        let prompt = self.render_example(messages, &[tool]);
        prompt
            .map(|text| text.contains(NAME))
            .map_err(|e| e.to_string())
    }

    fn render_example(
        &self,
        messages: &[serde_json::Value],
        tools: &[serde_json::Value],
    ) -> Result<String> {
        self.render(&Chat {
            tools,
            ..Chat::of(messages)
        })
    }

    /// Renders a chat to a prompt. Messages of `system` and `developer` come in a role and at a place that the
    /// template keeps.
    ///
    /// # Errors
    /// `Invalid`, with the template's own message.
    pub fn render(&self, chat: &Chat<'_>) -> Result<String> {
        self.render_as_is(&Chat {
            messages: &self.roles.fit(chat.messages),
            ..*chat
        })
    }

    /// Renders a chat whose messages stay what they are.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::render`].
    pub(super) fn render_as_is(&self, chat: &Chat<'_>) -> Result<String> {
        let variables = Variables {
            extra: chat.extra,
            messages: chat.messages,
            add_generation_prompt: chat.add_generation_prompt,
            tools: Some(chat.tools).filter(|tools| !tools.is_empty()),
            documents: None,
        };
        self.run(Value::from(Serde(&variables))).map_err(|e| {
            let detail = match e.kind() {
                ErrorKind::OutOfFuel => "it does not end".to_owned(),
                ErrorKind::WriteFailure => output::too_long(),
                _ => e.detail().map_or_else(|| e.to_string(), clipped),
            };
            Error::invalid(
                "messages",
                format!("the model's chat template cannot be applied: {detail}"),
            )
        })
    }

    fn run(&self, variables: Value) -> Result<String, minijinja::Error> {
        let mut prompt = BoundedOutput::default();
        (self.environment.get_template(NAME)?).render_captured_to(variables, &mut prompt)?;
        Ok(prompt.into_string())
    }
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| Error::internal(e.to_string()))?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    functions::register(&mut environment);
    Ok(environment)
}

/// Parses and compiles `source`.
fn compile(environment: &mut Environment<'static>, source: &str) -> Result<()> {
    if source.len() > MAX_SOURCE {
        let (bytes, kib) = (source.len(), MAX_SOURCE >> 10);
        return Err(Error::setup(format!(
            "the chat template has {bytes} bytes; {kib} KiB are accepted"
        )));
    }
    let compile = || {
        let source = source::rewrite(source, environment.syntax());
        environment.add_template_owned(NAME, source).map_err(|e| {
            let what = clipped(&e.to_string());
            Error::setup(format!("the chat template does not parse: {what}"))
        })
    };
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .stack_size(COMPILER_STACK)
            .spawn_scoped(scope, compile)
            .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))?
            .join()
            .unwrap_or_else(|_| Err(Error::setup("the chat template does not parse")))
    })
}

#[cfg(test)]
pub(crate) mod tests;
