//! Tests of what templates need, and of what no template may do.

mod jinja;
mod limits;
pub(crate) mod models;
mod roles;
mod tools;

use super::*;

fn render(source: &str, messages: serde_json::Value) -> Result<String> {
    let messages = messages.as_array().cloned().unwrap_or_default();
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(&Chat::of(&messages))
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
        {"role": "user", "content": "x"},
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
        render(
            "{{ messages | tojson(ensure_ascii=True) }}",
            json!(["ü\u{fdd0}"])
        )
        .unwrap(),
        "[\"\\u00fc\u{fdd0}\"]",
        "a mark of a literal text stays"
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
    assert!(matches!(error, Error::Request { param: Some(p), .. } if p.is("messages")));
}

#[test]
fn a_developer_is_system_where_the_template_does_not_know_one() {
    let messages = json!([{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]);
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

/// Features that legitimate templates use, and that an earlier version refused.
#[test]
fn the_whole_language_works() {
    let messages = json!([{"role": "user"}, {"role": "user"}, {"role": "tool"}]);
    let changed = "{% for m in messages %}{{ 1 if loop.changed(m.role) else 0 }}{% endfor %}";
    assert_eq!(render(changed, messages.clone()).unwrap(), "101");
    let spread = "{% set a = [1, 4] %}{{ range(*a) | join(',') }} {{ dict(**messages[0]).role }}";
    assert_eq!(render(spread, messages.clone()).unwrap(), "1,2,3 user");
    let chained = "{{ 0 < messages | length <= 3 }} {{ 3 < messages | length < 9 }}";
    assert_eq!(render(chained, messages.clone()).unwrap(), "True False");
    let constants = "{{ '-' * 20 ~ '=' * 2000 }}";
    assert_eq!(render(constants, json!([])).unwrap().len(), 2_020);
    let blocks = "{% block a %}{{ messages | length }}{% endblock %} {{ [1, 2] | sum }}";
    assert_eq!(render(blocks, messages).unwrap(), "3 3");
}
