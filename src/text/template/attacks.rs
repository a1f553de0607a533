//! Templates, messages and variables that want to hang, to exhaust the memory or the stack, or to end the
//! process. Each ends soon, with an error or with a prompt of bounded size.

use super::{Chat, ChatTemplate};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// Far above what the bounds take, also on a busy machine and without optimization.
const LONGEST: Duration = Duration::from_secs(20);

fn run(source: &str, messages: &[Value], extra: &Map<String, Value>) -> Result<String> {
    let start = Instant::now();
    let result = ChatTemplate::new(source, Some("<s>"), Some("</s>")).and_then(|template| {
        template.render(&Chat {
            messages,
            tools: &[],
            add_generation_prompt: true,
            extra,
        })
    });
    let shown: String = source.chars().take(80).collect();
    assert!(
        start.elapsed() < LONGEST,
        "{shown} took {:?}",
        start.elapsed()
    );
    if let Ok(text) = &result {
        assert!(text.len() <= 256 << 20, "{shown} made {} bytes", text.len());
    }
    result
}

/// What is said.
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
fn loops_end() {
    // What does nothing pays, too.
    let nothing =
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let said = refused(nothing);
    assert!(said.contains("it does not end"), "{said}");
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% for a in range(10**15) %}{% endfor %}",
        "{% for a in [0] * 99999999 %}{% endfor %}",
        "{% set n = 99999999 %}{% for a in [0] * n %}{% endfor %}",
        "{% for a in 'x' * 99999999 %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% set l = range(1000)|list %}{% for a in l %}{% for b in l %}{% for c in l %}{{ l|sum }}{% endfor %}{% endfor %}{% endfor %}",
        "{% set s = 'ab' * 500000 %}{% for a in range(99999) %}{% if s.count('a') %}{% endif %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% if s.count('a') %}{% endif %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% if 'c' in s %}{% endif %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% set t = 'ab' * n %}{% for a in range(99999) %}{% if s == t %}{% endif %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% set x = s[n] %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% set x = s[n:n+1] %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% for c in s %}{% break %}{% endfor %}{% endfor %}",
        "{% set n = 500000 %}{% set s = 'ab' * n %}{% for a in range(99999) %}{% if s|length %}{% endif %}{% endfor %}",
        "{% set n = 99999 %}{% set l = [1] * n %}{% for a in range(99999) %}{% if l|last %}{% endif %}{% endfor %}",
        "{% set n = 99999 %}{% set l = [1] * n %}{% for a in range(99999) %}{% if 2 in l %}{% endif %}{% endfor %}",
        "{% set n = 99999 %}{% set l = [1] * n %}{% for a in range(99999) %}{% if l == l[::-1] %}{% endif %}{% endfor %}",
        "{% set n = 9999 %}{% set l = [1] * n %}{% for a in range(99999) %}{% if loop.changed(l) %}{% endif %}{% endfor %}",
    ] {
        refused(source);
    }
}

#[test]
fn values_stay_small() {
    let doubled = "{% set x = x ~ x %}".repeat(60);
    let added = "{% set x = x + x %}".repeat(60);
    for source in [
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}".to_owned(),
        "{% set ns = namespace(x=(1,)) %}{% for a in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}".to_owned(),
        "{% set ns = namespace(x={}) %}{% for a in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}".to_owned(),
        "{% set ns = namespace(x={}) %}{% for a in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|tojson }}".to_owned(),
        format!("{{% set x = 'ab' %}}{doubled}"),
        format!("{{% set x = 'ab' %}}{added}"),
        format!("{{% set x = [1] %}}{added}"),
        "{{ 'a' * 99999999 ~ 'a' * 99999999 }}".to_owned(),
        "{{ ('a', 'b') * 99999999 }}".to_owned(),
        "{% set n = 99999999 %}{{ ('a', 'b') * n }}".to_owned(),
        "{% set n = 99999999 %}{{ n * 'abc' }}".to_owned(),
        "{{ 'a' * 999 * 999 * 999 }}".to_owned(),
        "{{ (('a' * 999) * (999)) }}".to_owned(),
        "{{ 'a' * 10 ** 8 }}".to_owned(),
        "{{ messages | tojson(indent=100000000000) }}".to_owned(),
        "{{ messages | tojson(indent=100000) }}".to_owned(),
        "{{ 'a' | indent(100000000000) }}".to_owned(),
        "{{ '%100000000000d' | format(1) }}".to_owned(),
        "{{ '%*d' | format(1000000000, 1) }}".to_owned(),
        "{{ '{:100000000000}'.format(1) }}".to_owned(),
        "{{ '{:{}}'.format(1, 1000000000) }}".to_owned(),
        "{{ 'a' | center(100000000000) }}".to_owned(),
        "{{ 'a'.ljust(100000000000) }}".to_owned(),
        "{{ [1] | batch(100000000000, 'x') | list }}".to_owned(),
        "{{ [1] | slice(100000000000, 'x') | list }}".to_owned(),
        "{% set n = 9999 %}{{ ('a' * n).replace('a', 'b' * n) }}".to_owned(),
        "{% set n = 9999 %}{{ ('a' * n) | replace('a', 'b' * n) }}".to_owned(),
        "{% set n = 9999 %}{{ ('a' * n) | replace('', 'b' * n) }}".to_owned(),
        "{% set n = 9999 %}{{ ('b' * n).join('a' * n) }}".to_owned(),
        "{% set n = 9999 %}{{ range(n) | join('b' * n) }}".to_owned(),
        "{% set n = 9999999 %}{{ ('a' * n).split('') }}".to_owned(),
        "{% set n = 9999999 %}{{ ('a' * n) | list }}".to_owned(),
        "{% set n = 9999999 %}{% for a in range(200) %}{{ 'a' * n }}{% endfor %}".to_owned(),
        "{% set t %}{% for a in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endset %}{% set t = t ~ t %}".to_owned(),
        format!("{{% for a in range(99999) %}}{}{{% endfor %}}", "y".repeat(9999)),
        format!("{{{{ strftime_now('%{}Y') }}}}", "0".repeat(9999)),
        "{{ raise_exception('x' * 999) }}".to_owned(),
        "{% set a = [1] * messages|length %}{% for i in range(99999) %}{% set a = a|reverse %}{% endfor %}{{ debug() }}".to_owned(),
    ] {
        refused(&source);
    }
}

#[test]
fn cycles_and_depth_are_refused() {
    for source in [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = {'x': ns} %}{{ ns | tojson }}",
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = b %}{% set b.a = a %}{{ a == b }}",
        "{% set ns = namespace() %}{% set l = [[ns]] %}{% set ns.a = l %}{{ l }}",
        "{% set ns = namespace() %}{% set d = dict(x=ns) %}{% set ns.a = d %}{{ d }}",
        "{% set ns = namespace() %}{% set m = namespace(x=ns) %}{% set ns.a = m %}{{ m }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = {'x': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = dict(x=ns.x) %}{% endfor %}",
    ] {
        refused(source);
    }
    // A chain of views of views becomes lists.
    let reversed = "{% set ns = namespace(x=[1, 2]) %}{% for a in range(50000) %}{% set ns.x = ns.x|reverse %}{% endfor %}{{ ns.x }}";
    assert_eq!(run(reversed, &[], &Map::new()).unwrap(), "[1, 2]");
}

#[test]
fn sources_do_not_overflow_the_stack() {
    const MANY: usize = 50_000;
    let around = |open: &str, middle: &str, close: &str| {
        format!("{}{middle}{}", open.repeat(MANY), close.repeat(MANY))
    };
    for source in [
        format!("{{{{ {}1 }}}}", "1+".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "x~".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "not ".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "-".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "- ".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "2**".repeat(MANY)),
        format!("{{{{ {}1 }}}}", "1 if 1 else ".repeat(MANY)),
        format!("{{{{ x{} }}}}", "|string".repeat(MANY / 2)),
        format!("{{{{ x{} }}}}", ".a".repeat(MANY)),
        format!("{{{{ x{} }}}}", "[0]".repeat(MANY)),
        format!("{{{{ x{} }}}}", "()".repeat(MANY)),
        format!("{{{{ x{} }}}}", " is defined".repeat(MANY / 4)),
        format!("{{{{ {} }}}}", around("(", "1", ")")),
        format!("{{{{ {} }}}}", around("[", "1", "]")),
        format!("{{{{ {} }}}}", around("f(", "1", ")")),
        format!("{{{{ {} }}}}", "{1:".repeat(MANY)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000)),
        around("{%if x%}", "", "{%endif%}"),
        around("{%for a in b%}", "", "{%endfor%}"),
        around("{%macro m()%}", "", "{%endmacro%}"),
        around("{%set a%}", "", "{%endset%}"),
        around("{%call m()%}", "", "{%endcall%}"),
        around("{%filter upper%}", "", "{%endfilter%}"),
        around("{%with a=1%}", "", "{%endwith%}"),
        "x".repeat(1 << 20),
        "{# ".repeat(MANY),
        "{%raw%}".repeat(MANY),
    ] {
        refused(&source);
    }
    // As long as is accepted.
    for source in [
        format!("{{{{ {}1 }}}}", "1+".repeat(990)),
        format!("{{{{ x{} }}}}", "|string".repeat(990)),
        format!("{{{{ {}1 }}}}", "not ".repeat(1_990)),
        format!("{{{{ {}1 }}}}", "1 if 0 else ".repeat(120)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(490)),
    ] {
        run(&source, &[], &Map::new()).unwrap();
    }
}

#[test]
fn other_templates_and_what_is_not_bounded_are_refused() {
    for source in [
        "{% include 'chat_template' %}",
        "{% extends 'chat_template' %}",
        "{% import 'chat_template' as x %}",
        "{% from 'chat_template' import x %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% autoescape true %}{% endautoescape %}",
        "{{ range(*messages) }}",
        "{{ dict(**messages[0]) }}",
    ] {
        refused(source);
    }
}

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
