//! Tests of what a template tells the model of tools.

use super::super::{Chat, ChatTemplate};
use serde_json::{Map, json};

/// A template that writes tools as Kimi K2's does.
const KIMI: &str = "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}{% for m in messages %}{{ m.content }}{% endfor %}";

#[test]
fn tools_without_spaces_are_known() {
    let template = ChatTemplate::new(KIMI, None, None).unwrap();
    assert!(template.knows_tools() && template.tools_refused().is_none());
    let chat = Chat {
        messages: &[json!({"role": "user", "content": "Hi"})],
        tools: &[json!({"type": "function", "function": {"name": "f"}})],
        add_generation_prompt: true,
        extra: &Map::new(),
    };
    let wanted = "<|im_system|>tool_declare<|im_middle|>[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]<|im_end|>Hi";
    assert_eq!(template.render(&chat).unwrap(), wanted);
}

/// A template that fails with tools is told apart from one that knows none, with its reason.
#[test]
fn a_template_that_fails_with_tools_says_why() {
    let refusing =
        "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}{{ messages[0].content }}";
    let template = ChatTemplate::new(refusing, None, None).unwrap();
    assert!(!template.knows_tools());
    let why = template.tools_refused().unwrap();
    assert!(why.ends_with("cannot be applied: no tools here"), "{why}");
    let unknown =
        "{% for t in tools or [] %}{{ t|surely_unknown }}{% endfor %}{{ messages[0].content }}";
    let why = ChatTemplate::new(unknown, None, None).unwrap();
    assert!(why.tools_refused().unwrap().contains("surely_unknown"));
    // A template that is refused without tools, too, fails for another reason.
    for source in [
        "{{ messages[0].content }}",
        "{{ raise_exception('never') }}",
    ] {
        let template = ChatTemplate::new(source, None, None).unwrap();
        assert!(!template.knows_tools() && template.tools_refused().is_none());
    }
}
