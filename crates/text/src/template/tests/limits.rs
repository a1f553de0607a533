//! Tests of the limits of a template: its source, its instructions, its recursion and its output.

use super::super::{Chat, ChatTemplate, MAX_SOURCE};
use foretoken_core::error::{Error, Result};
use serde_json::{Map, Value, json};

fn run(source: &str, messages: &[Value], extra: &Map<String, Value>) -> Result<String> {
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(&Chat {
        messages,
        tools: &[],
        add_generation_prompt: true,
        extra,
    })
}

/// Returns the message with which a template is refused.
fn refused(source: &str) -> String {
    let shown: String = source.chars().take(80).collect();
    let messages = [json!({"role": "user", "content": "Hi"})];
    match run(source, &messages, &Map::new()) {
        Ok(text) => panic!("{shown} gave {} bytes", text.len()),
        Err(Error::Internal(e)) => panic!("{shown}: internal: {e}"),
        Err(e) => {
            let e = e.to_string();
            assert!(e.len() < 1_000 && !e.contains('\n'), "{shown}: {e}");
            e
        }
    }
}

#[test]
fn loops_and_outputs_end() {
    let (endless, long) = ("it does not end", "it writes more than 64 MiB");
    for (source, reason) in [
        (
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            endless,
        ),
        (
            "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
            endless,
        ),
        (
            "{% set l = range(1000)|list %}{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
            endless,
        ),
        (
            "{% set n = 9999999 %}{% for a in range(200) %}{{ 'a' * n }}{% endfor %}",
            long,
        ),
        ("{% set n = 9999999 %}{{ (['a' * n] * 9) | tojson }}", long),
    ] {
        let said = refused(source);
        assert!(said.contains(reason), "{said}");
    }
}

#[test]
fn recursion_ends() {
    for source in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% include 'chat_template' %}",
        "{% extends 'chat_template' %}",
    ] {
        refused(source);
    }
}

#[test]
fn sources_do_not_overflow_the_stack() {
    let around = |open: &str, middle: &str, close: &str| {
        let times = (MAX_SOURCE - 100) / (open.len() + close.len());
        format!("{}{middle}{}", open.repeat(times), close.repeat(times))
    };
    let chain = |before: &str, link: &str, after: &str| {
        format!("{{{{ {before}{}{after} }}}}", around(link, "", ""))
    };
    // Each is read or refused; none ends the process.
    for source in [
        chain("", "1+", "1"),
        chain("", "not ", "1"),
        chain("", "-", "1"),
        chain("", "2**", "1"),
        chain("", "1 if 1 else ", "1"),
        chain("x", "|e", ""),
        chain("x", ".a", ""),
        chain("x", "[0]", ""),
        chain("x", "()", ""),
        chain("x", "<x", ""),
        chain("x", " in x", ""),
        chain("x", " is defined", ""),
        format!(
            "{{% if x %}}{}{{% endif %}}",
            around("{% elif x %}", "", "")
        ),
    ] {
        assert!(source.len() <= MAX_SOURCE);
        if let Err(e) = run(&source, &[], &Map::new()) {
            assert!(!matches!(e, Error::Internal(_)), "{e}");
        }
    }
    for source in [
        format!("{{{{ {} }}}}", around("(", "1", ")")),
        format!("{{{{ {} }}}}", around("[", "1", "]")),
        format!("{{{{ {} }}}}", around("{1:", "1", "}")),
        around("{%if x%}", "", "{%endif%}"),
        around("{%for a in b%}", "", "{%endfor%}"),
        around("{%macro m()%}", "", "{%endmacro%}"),
        around("{%call m()%}", "", "{%endcall%}"),
        "x".repeat(MAX_SOURCE + 1),
    ] {
        refused(&source);
    }
}

/// The values of a request may be large. A template that reads each message a few times can take them.
#[test]
fn requests_cannot_swell_a_template() {
    let mut nested = json!([]);
    for _ in 0..120 {
        nested = json!([nested]);
    }
    let large = json!({"role": "user", "content": "x".repeat(2 << 20)});
    let many: Vec<Value> = vec![json!({"role": "user", "content": ""}); 20_000];
    let extra = |value: Value| Map::from_iter([("x".to_owned(), value)]);
    let plain =
        "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}{{ x }}";
    assert!(run(plain, &[large], &Map::new()).is_ok());
    assert!(run(plain, &many, &Map::new()).is_ok());
    assert!(run(plain, &[], &extra(nested.clone())).is_ok());
    let counted = "{% set ns = namespace(n=0) %}{% for i in range(n) %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}";
    let n = |n: u64| Map::from_iter([("n".to_owned(), json!(n))]);
    assert_eq!(run(counted, &[], &n(1_000)).unwrap(), "1000");
    assert!(run(counted, &[], &n(1 << 60)).is_err());
    let indented = "{{ messages | tojson(indent=n) }}";
    assert!(run(indented, &[], &n(4)).is_ok());
    assert!(run(indented, &[], &n(1 << 40)).is_err());
    let quadratic =
        "{% for m in messages %}{% for n in messages %}{{ m == n }}{% endfor %}{% endfor %}";
    assert!(run(quadratic, &many, &Map::new()).is_err());
}

/// A function that fills up, cuts, or indents takes no more than an output may have, and says so.
#[test]
fn widths_are_bounded() {
    let long = "it writes more than 64 MiB";
    for (source, reason) in [
        ("{{ '%99999999999d' % 1 }}", long),
        ("{{ '%.99999999999f' % 1.5 }}", long),
        ("{{ ('%9999999d' * 9) % (1,2,3,4,5,6,7,8,9) }}", long),
        ("{{ '%(a)99999999999s' % {'a': 1} }}", long),
        ("{{ '%99999999999999999999999d' % 1 }}", long),
        ("{{ '%99999999999s'|format('a') }}", long),
        ("{{ '{:>99999999999}'.format(1) }}", long),
        ("{{ '{a:99999999999}'.format(a=1) }}", long),
        ("{{ 'a'.ljust(99999999999) }}", long),
        ("{{ 'a'.rjust(99999999999999999) }}", long),
        ("{{ 'a'.center(99999999999, 'é') }}", long),
        ("{{ 'a'.zfill(99999999999) }}", long),
        ("{{ ('\\n' * 9999999)|indent(100, blank=true) }}", long),
        ("{{ 'a'|indent(99999999999) }}", "at most 100 spaces"),
        ("{{ 'a'|indent('x' * 1000) }}", "at most 100 spaces"),
        ("{{ [1]|tojson(indent=99999999999) }}", "at most 100 spaces"),
        ("{{ [1]|tojson(indent='x' * 1000) }}", "at most 100 spaces"),
        (
            "{{ ([1] * 100)|tojson(separators=['x' * 9999999, ':']) }}",
            long,
        ),
        ("{{ 'a'|truncate(2) }}", "length must be 3 or more"),
    ] {
        let said = refused(source);
        assert!(said.contains(reason), "{source}: {said}");
    }
    for (source, text) in [
        (
            "{{ 'a b'|truncate(99999999999, leeway=99999999999999) }}",
            "a b",
        ),
        ("{{ '%5d|{}|%%' % 1 }}", "    1|{}|%"),
        (
            "{{ 'in %(year)s, 99999999999' % {'year': 1} }}",
            "in 1, 99999999999",
        ),
        ("{{ '{:>5}, 99999999999'.format(1) }}", "    1, 99999999999"),
    ] {
        assert_eq!(run(source, &[], &Map::new()).unwrap(), text);
    }
}

/// A rewritten source is as harmless as the one that it comes from.
#[test]
fn rewritten_sources_are_bounded() {
    let times = (MAX_SOURCE - 100) / 40;
    let nested = |open: &str, middle: &str, close: &str| {
        format!("{}{middle}{}", open.repeat(times), close.repeat(times))
    };
    for source in [
        format!("{{{{ {}1 }}}}", "1%".repeat(MAX_SOURCE / 2 - 10)),
        format!("{{{{ {} }}}}", nested("(1%", "1", ")")),
        format!("{{{{ {} }}}}", nested("[1%", "1", "]")),
        nested("{%generation%}", "x", "{%endgeneration%}"),
        "{%generation%}".repeat(times),
        "{%endgeneration%}".repeat(times),
        "%".repeat(MAX_SOURCE),
        "{{ % }}".repeat(times),
        "{{ ) % ( }}".into(),
        "{{ ]%1%[ }}".into(),
        "{{ a % }}".into(),
    ] {
        assert!(source.len() <= MAX_SOURCE);
        if let Err(e) = run(&source, &[], &Map::new()) {
            assert!(!matches!(e, Error::Internal(_)), "{e}");
        }
    }
}
