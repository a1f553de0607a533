//! Chat templates: renders a model's Jinja template as Hugging Face does.
//!
//! A template is a program of a stranger, and its variables come from others. Its source is checked
//! before it is parsed ([`source`]), its instructions are counted, and everything that can take more time
//! or memory than an instruction pays for it ([`budget`]): operators ([`guard`], [`operators`]) as well as
//! filters, tests, functions and methods ([`library`]). What exceeds its budget is refused.

mod budget;
mod guard;
mod library;
mod operators;
mod source;

use crate::error::{Error, Result, clipped};
use minijinja::machinery::{self, CompiledTemplate};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind, Template, Value};
use serde::Serialize;
use serde_json::{Map, json};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether it knows the role `developer`, OpenAI's newer name for `system`.
    knows_developer: bool,
    /// Whether it tells the model of tools.
    knows_tools: bool,
}

/// A chat to render.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// Objects with `role` and `content`; other keys are passed through.
    pub messages: &'a [serde_json::Value],
    /// What the model may call, as in a request: objects with `type` and `function`.
    pub tools: &'a [serde_json::Value],
    /// Whether the prompt ends with the beginning of the answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template.
    pub extra: &'a Map<String, serde_json::Value>,
}

/// The variables of a template. If two have the same name, the later field wins.
#[derive(Serialize)]
struct Variables<'a> {
    #[serde(flatten)]
    extra: &'a Map<String, serde_json::Value>,
    messages: &'a [serde_json::Value],
    add_generation_prompt: bool,
    /// As `null` where there are none, which templates ask for.
    tools: Option<&'a [serde_json::Value]>,
    documents: Option<()>,
}

const NAME: &str = "chat_template";
/// Loops, blocks and, four times, macros in each other.
const RECURSION: usize = 200;
/// Bytes of the stack that the library's recursive compiler gets.
const COMPILER_STACK: usize = 64 << 20;

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the names of the special tokens.
    ///
    /// # Errors
    /// `Setup`, if the template does not parse or cannot be bounded.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = environment()?;
        environment.add_global("bos_token", bos.unwrap_or_default());
        environment.add_global("eos_token", eos.unwrap_or_default());
        source::check(source, environment.syntax())?;
        compile(&mut environment, source)?;
        let mut template = Self {
            environment,
            knows_developer: source.contains("developer"),
            knows_tools: false,
        };
        // A template that cannot be applied does not keep completions from being served.
        if let Err(e) = template.render_sample(&[]) {
            tracing::warn!("{e}; chats will be refused");
        }
        template.knows_tools = template.shows_a_tool();
        Ok(template)
    }

    /// Whether it tells the model of tools.
    pub fn knows_tools(&self) -> bool {
        self.knows_tools
    }

    /// Renders a chat with a tool, and looks for it in the prompt.
    fn shows_a_tool(&self) -> bool {
        const NAME: &str = "an_example_of_a_tool";
        let tool = json!({"type": "function", "function": {
            "name": NAME, "description": "", "parameters": {"type": "object", "properties": {}},
        }});
        (self.render_sample(&[tool])).is_ok_and(|text| text.contains(NAME))
    }

    fn render_sample(&self, tools: &[serde_json::Value]) -> Result<String> {
        self.render(&Chat {
            messages: &[json!({"role": "user", "content": "Hi"})],
            tools,
            add_generation_prompt: true,
            extra: &Map::new(),
        })
    }

    /// Renders a chat to a prompt. A template that does not know the role `developer` gets `system`
    /// instead.
    ///
    /// # Errors
    /// `Invalid`, with the template's own message.
    pub fn render(&self, chat: &Chat<'_>) -> Result<String> {
        let messages = self.with_known_roles(chat.messages);
        let variables = Variables {
            extra: chat.extra,
            messages: &messages,
            add_generation_prompt: chat.add_generation_prompt,
            tools: Some(chat.tools).filter(|tools| !tools.is_empty()),
            documents: None,
        };
        self.run(Value::from(Serde(&variables))).map_err(|e| {
            let detail = match e.kind() {
                ErrorKind::OutOfFuel => "it does not end".to_owned(),
                _ => e.detail().map_or_else(|| e.to_string(), clipped),
            };
            Error::invalid(
                "messages",
                format!("the model's chat template cannot be applied: {detail}"),
            )
        })
    }

    fn run(&self, variables: Value) -> Result<String, minijinja::Error> {
        let template = self.environment.get_template(NAME)?;
        let program = guard::guarded(&program(&template).instructions)
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
        let mut prompt = String::new();
        let mut out = machinery::make_string_output(&mut prompt);
        let (env, blocks) = (&self.environment, BTreeMap::new());
        machinery::eval(
            env,
            &program,
            variables,
            &blocks,
            &mut out,
            AutoEscape::None,
        )?;
        Ok(prompt)
    }

    fn with_known_roles<'a>(
        &self,
        messages: &'a [serde_json::Value],
    ) -> Cow<'a, [serde_json::Value]> {
        let is_developer = |message: &serde_json::Value| message["role"] == "developer";
        if self.knows_developer || !messages.iter().any(is_developer) {
            return messages.into();
        }
        let mut messages = messages.to_vec();
        for message in messages.iter_mut().filter(|message| is_developer(message)) {
            message["role"] = "system".into();
        }
        messages.into()
    }
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::empty();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| Error::internal(e.to_string()))?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(budget::FUEL));
    environment.set_recursion_limit(RECURSION);
    library::register(&mut environment);
    operators::register(&mut environment);
    Ok(environment)
}

/// Parses and compiles `source` on a stack that is large enough for what [`source::check`] lets through.
fn compile(environment: &mut Environment<'static>, source: &str) -> Result<()> {
    let compile = || -> Result<()> {
        environment
            .add_template_owned(NAME, source.to_owned())
            .and_then(|()| environment.get_template(NAME))
            .map_err(|e| {
                let what = clipped(&e.to_string());
                Error::setup(format!("the chat template does not parse: {what}"))
            })
            .and_then(|template| guard::guarded(&program(&template).instructions).map(drop))
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

fn program<'a>(template: &'a Template<'a, 'a>) -> &'a CompiledTemplate<'a> {
    machinery::get_compiled_template(template)
}

#[cfg(test)]
mod attacks;
#[cfg(test)]
mod models;
#[cfg(test)]
mod tests;
