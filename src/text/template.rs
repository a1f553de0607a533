//! Chat templates: renders a model's Jinja template as Hugging Face does.

use super::json::python_json;
use crate::error::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, json};
use std::borrow::Cow;

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

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the names of the special tokens.
    ///
    /// # Errors
    /// `Setup`, if the template does not parse.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| Error::internal(e.to_string()))?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_global("bos_token", bos.unwrap_or_default());
        environment.add_global("eos_token", eos.unwrap_or_default());
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|e| Error::setup(format!("the chat template does not parse: {e}")))?;
        let mut template = Self {
            environment,
            knows_developer: source.contains("developer"),
            knows_tools: false,
        };
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
        let chat = Chat {
            messages: &[json!({"role": "user", "content": "Hi"})],
            tools: &[tool],
            add_generation_prompt: true,
            extra: &Map::new(),
        };
        self.render(&chat).is_ok_and(|text| text.contains(NAME))
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
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(&variables))))
            .map_err(|e| {
                let detail = e.detail().map_or_else(|| e.to_string(), str::to_owned);
                Error::invalid(
                    "messages",
                    format!("the model's chat template cannot be applied: {detail}"),
                )
            })
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

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    use std::fmt::Write;
    let mut out = String::new();
    // chrono reports an unknown directive only when formatting.
    write!(out, "{}", chrono::Local::now().format(format)).map_err(|_| {
        minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: unknown format {format:?}"),
        )
    })?;
    Ok(out)
}

/// The filter `tojson`, like `json.dumps(x, ensure_ascii=False)`. Jinja's own filter escapes HTML, which
/// models were not trained on.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass it, but without effect: we never escape.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let written = match indent {
        Some(width) => indented(value, width),
        None => python_json(value),
    };
    let text =
        written.map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

fn indented(value: &Value, width: usize) -> serde_json::Result<String> {
    let (mut out, indent) = (Vec::new(), vec![b' '; width]);
    let formatter = PrettyFormatter::with_indent(&indent);
    value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: serde_json::Value) -> Result<String> {
        let messages = messages.as_array().cloned().unwrap_or_default();
        ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(&Chat {
            messages: &messages,
            tools: &[],
            add_generation_prompt: true,
            extra: &Map::new(),
        })
    }

    #[test]
    fn python_methods_slices_namespaces_and_loop_controls_work() {
        let source = "{{ bos_token }}{% set ns = namespace(seen=0) %}\n\
            {%- for m in messages[1:] %}\n\
            {%- if m.role.startswith('tool') %}{% continue %}{% endif %}\n\
            {%- set ns.seen = ns.seen + 1 %}\n\
            [{{ m['content'].strip().split(' ')[-1] }}{{ m.get('name', '') }}]\n\
            {%- endfor %}{{ ns.seen }}{{ eos_token }}\n";
        let messages = json!([
            {"role": "system", "content": "x"},
            {"role": "user", "content": " a b ", "name": "!"},
            {"role": "tool", "content": "no"},
            {"role": "user", "content": "c"},
        ]);
        assert_eq!(render(source, messages).unwrap(), "<s>[b!][c]2</s>");
    }

    #[test]
    fn blocks_leave_no_blank_lines() {
        let source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend";
        let messages = json!([{"content": "a"}, {"content": "b"}]);
        assert_eq!(render(source, messages).unwrap(), "a\nb\nend");
    }

    #[test]
    fn tojson_writes_as_python_does() {
        let messages = json!([{"b": ["<é>", 1, 2.5, null, true], "a": {}}]);
        assert_eq!(
            render("{{ messages[0] | tojson }}", messages.clone()).unwrap(),
            r#"{"b": ["<é>", 1, 2.5, null, true], "a": {}}"#
        );
        assert_eq!(
            render("{{ messages[0] | tojson(indent=4) }}", json!([{"a": [1]}])).unwrap(),
            "{\n    \"a\": [\n        1\n    ]\n}"
        );
        assert_eq!(
            render("{{ messages | tojson(ensure_ascii=False) }}", json!(["ü"])).unwrap(),
            "[\"ü\"]"
        );
    }

    #[test]
    fn a_template_can_refuse() {
        let error = render("{{ raise_exception('roles must alternate') }}", json!([])).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("cannot be applied: roles must alternate"),
            "{error}"
        );
        assert!(matches!(error, Error::Request { param: Some(p), .. } if p == "messages"));
    }

    #[test]
    fn a_developer_is_system_where_the_template_does_not_know_one() {
        let messages =
            json!([{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]);
        let plain = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}";
        assert_eq!(render(plain, messages.clone()).unwrap(), "system:a user:b ");
        let knows = format!("{plain}{{% if messages[0].role == 'developer' %}}yes{{% endif %}}");
        assert_eq!(render(&knows, messages).unwrap(), "developer:a user:b yes");
    }

    #[test]
    fn the_date_is_todays() {
        let year = render(
            "{{ strftime_now('%Y') if strftime_now is defined }}",
            json!([]),
        )
        .unwrap();
        assert!(year.parse::<u32>().unwrap() >= 2025, "{year}");
        assert!(render("{{ strftime_now('%!') }}", json!([])).is_err());
    }

    #[test]
    fn tools_are_none_and_extra_variables_pass() {
        let template = ChatTemplate::new(
            "{% if tools is none and not enable_thinking and not add_generation_prompt %}ok{% endif %}",
            None,
            None,
        )
        .unwrap();
        let extra = json!({"enable_thinking": false})
            .as_object()
            .cloned()
            .unwrap();
        let chat = Chat {
            messages: &[],
            tools: &[],
            add_generation_prompt: false,
            extra: &extra,
        };
        assert_eq!(template.render(&chat).unwrap(), "ok");
    }

    #[test]
    fn a_broken_template_is_the_operators() {
        assert!(matches!(
            ChatTemplate::new("{% if %}", None, None),
            Err(Error::Setup(_))
        ));
    }
}
