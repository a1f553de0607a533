//! How much the model is to think.

use super::*;
use foretoken_core::sampling::{ThoughtLimit, ThoughtMarks, TokenBytes};
use foretoken_text::ReasoningFormat::{self, DeepseekR1, Harmony, Qwen3};

/// One token closes a thought.
struct Closing;

impl TokenBytes for Closing {
    fn bytes(&self, id: u32) -> &[u8] {
        if id == 3 { b"</think>" } else { b"a" }
    }
}

/// Calls `f` with the context of a server whose model marks its thoughts so, and whose `--reasoning-budget` is `budget`.
fn of<T>(format: ReasoningFormat, budget: Option<usize>, f: impl FnOnce(Context<'_>) -> T) -> T {
    let marks = ThoughtMarks::new(&["<think>"], &["</think>"], vec![3], Arc::new(Closing));
    let marks = marks.map(Arc::new);
    with_defaults(&SamplingDefaults::default(), |context| {
        f(Context {
            reasoning_format: Some(format),
            thoughts: marks.as_ref(),
            reasoning_budget: budget,
            ..context
        })
    })
}

fn body(fields: &Value) -> String {
    let mut body = fields.clone();
    body["messages"] = json!([{"role": "user", "content": "hi"}]);
    body.to_string()
}

fn limit(format: ReasoningFormat, budget: Option<usize>, fields: &Value) -> Option<ThoughtLimit> {
    let job = of(format, budget, |context| {
        context.chat(body(fields).as_bytes())
    });
    let mut job = job.unwrap_or_else(|e| panic!("{fields}: {e}"));
    job.requests.remove(0).params.thought
}

#[test]
fn fields_limit_the_thought() {
    let enabled = |budget| json!({"thinking": {"type": "enabled", "budget_tokens": budget}});
    for (fields, budget, max) in [
        (json!({}), None, None),
        (json!({"thinking_token_budget": 9}), None, Some(9)),
        (json!({"thinking_token_budget": 0}), None, Some(0)),
        (enabled(12), None, Some(12)),
        (
            json!({"enable_thinking": true, "thinking_budget": 12}),
            None,
            Some(12),
        ),
        (json!({"thinking": {"type": "enabled"}}), None, None),
        (json!({"thinking": {"type": "disabled"}}), None, Some(0)),
        (json!({"thinking": {"type": "adaptive"}}), None, None),
        (json!({"enable_thinking": false}), None, Some(0)),
        (json!({"reasoning_effort": "none"}), None, Some(0)),
        (json!({"reasoning_effort": "minimal"}), None, None),
        // The server's default, and what requests say against it.
        (json!({}), Some(7), Some(7)),
        (json!({}), Some(0), Some(0)),
        (json!({"enable_thinking": true}), Some(7), Some(7)),
        (json!({"enable_thinking": true}), Some(0), None),
        (json!({"reasoning_effort": "none"}), Some(7), Some(0)),
        (json!({"thinking_token_budget": -1}), Some(7), None),
        (json!({"thinking_token_budget": -1}), Some(0), None),
        (enabled(12), Some(7), Some(12)),
        (enabled(12), Some(0), Some(12)),
        // The first switch counts.
        (
            json!({"enable_thinking": true, "reasoning_effort": "none"}),
            None,
            None,
        ),
        (
            json!({"enable_thinking": false, "thinking_token_budget": 9}),
            None,
            Some(0),
        ),
        (
            json!({"chat_template_kwargs": {"enable_thinking": true}, "enable_thinking": false}),
            None,
            None,
        ),
    ] {
        for (format, is_open) in [(DeepseekR1, true), (Qwen3, false)] {
            let found = limit(format, budget, &fields);
            let found = found.map(|limit| (limit.max_tokens, limit.is_open));
            assert_eq!(found, max.map(|max| (max, is_open)), "{budget:?} {fields}");
        }
    }
    // A variable is for the template. If it goes on to open a thought, it does not know the variable.
    let variable = json!({"chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(limit(Qwen3, None, &variable), None);
    assert_eq!(
        limit(DeepseekR1, None, &variable).map(|limit| limit.max_tokens),
        Some(0)
    );
}

#[test]
fn the_template_is_told() {
    use crate::thinking::ThinkingFields;
    let none = || Some("none".to_owned());
    let both = |on: bool| json!({"enable_thinking": on, "thinking": on});
    for (asked, budget, variables) in [
        (ThinkingFields::default(), None, Value::Null),
        (ThinkingFields::default(), Some(5), Value::Null),
        (ThinkingFields::default(), Some(0), both(false)),
        (
            ThinkingFields {
                enable_thinking: Some(true),
                ..ThinkingFields::default()
            },
            Some(0),
            both(true),
        ),
        (
            ThinkingFields {
                effort: none(),
                ..ThinkingFields::default()
            },
            None,
            json!({"enable_thinking": false, "thinking": false, "reasoning_effort": "none"}),
        ),
        (
            ThinkingFields {
                effort: Some("high".into()),
                ..ThinkingFields::default()
            },
            None,
            json!({"reasoning_effort": "high"}),
        ),
        (
            ThinkingFields {
                variables: json!({"thinking": true}).as_object().cloned(),
                effort: none(),
                ..ThinkingFields::default()
            },
            None,
            json!({"thinking": true, "reasoning_effort": "none"}),
        ),
    ] {
        let plan = of(Qwen3, budget, |context| context.thinking(asked));
        let plan = plan.expect("accepted");
        assert_eq!(json!(plan.variables), variables);
    }
}

/// The field that an error names, those of a request, and what the error says.
const UNKEPT: &str = r#"
thinking_token_budget | {"thinking_token_budget": -2} | 0 or more, or -1
thinking_token_budget | {"thinking_token_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}} | exclude each other
thinking_token_budget | {"thinking_token_budget": 5, "thinking_budget": 6} | and thinking_budget exclude each other
thinking.budget_tokens | {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_budget": 6} | and thinking_budget exclude each other
thinking_budget | {"thinking_budget": 5, "use_beam_search": true} | use_beam_search
thinking.budget_tokens | {"thinking": {"type": "disabled", "budget_tokens": 6}} | requires the type enabled
thinking_token_budget | {"thinking_token_budget": 5, "use_beam_search": true} | use_beam_search
"#;

#[test]
fn a_budget_that_cannot_be_kept_is_refused_by_name() {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let calling = json!({"thinking_token_budget": 9, "tools": [tool]});
    let of_qwen = rows(UNKEPT).map(|row| (Qwen3, row));
    let of_harmony = (
        Harmony,
        ("thinking_token_budget", calling, "reasoning_effort"),
    );
    for (format, (field, fields, needle)) in of_qwen.chain([of_harmony]) {
        let message = refused(
            of(format, None, |context| {
                context.chat(body(&fields).as_bytes())
            }),
            field,
        );
        assert!(message.contains(needle), "{message}");
    }
}

/// In Harmony, what closes a thought is the header of the answer, after which there is no call.
#[test]
fn a_thought_in_channels_has_a_limit_without_tools() {
    for (fields, max) in [
        (json!({}), 40),
        (json!({"thinking_token_budget": 9}), 9),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 6}}),
            6,
        ),
        (json!({"reasoning_effort": "none"}), 0),
    ] {
        let found = limit(Harmony, Some(40), &fields).map(|limit| limit.max_tokens);
        assert_eq!(found, Some(max), "{fields}");
    }
}
