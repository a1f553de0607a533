//! Prompts: their forms, their length, and what a template adds.

use super::*;

#[test]
fn every_form_of_prompt_is_read() {
    for (prompt, expected) in [
        (json!("ab"), vec![vec![27, 0, 1]]),
        (json!(["a", "b"]), vec![vec![27, 0], vec![27, 1]]),
        (json!([1, 2]), vec![vec![1, 2]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        let job = completion(json!({"prompt": prompt})).expect("accepted");
        let prompts: Vec<_> = job.requests.iter().map(|r| r.prompt.clone()).collect();
        assert_eq!(prompts, expected);
        assert_eq!(job.header.prompt_tokens, expected.concat().len());
    }
}

#[test]
fn the_default_length_is_limited_by_the_context() {
    let job = completion(json!({"prompt": vec![1; 60]})).expect("accepted");
    assert_eq!(job.requests[0].max_tokens, Some(4));
    assert_eq!(
        chat(json!({})).expect("accepted").requests[0].max_tokens,
        None
    );
    let both = json!({"max_tokens": 7, "max_completion_tokens": 5});
    assert_eq!(
        chat(both).expect("accepted").requests[0].max_tokens,
        Some(5)
    );
    // As Jan names it.
    let job = chat(json!({"max_output_tokens": 6})).expect("accepted");
    assert_eq!(job.requests[0].max_tokens, Some(6));
    // As clients of llama.cpp ask for no limit.
    let body = json!({"prompt": vec![1; 20], "max_tokens": -1});
    let job = completion(body).expect("accepted");
    assert_eq!((job.requests[0].max_tokens, job.cut_to), (Some(44), None));
    for field in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
        let job = chat(json!({field: -1})).expect("accepted");
        assert_eq!((job.requests[0].max_tokens, job.cut_to), (None, None));
    }
}

#[test]
fn echo_asks_for_the_prompts_logprobs_and_allows_no_tokens() {
    let job = completion(json!({"echo": true, "max_tokens": 0, "logprobs": 1})).expect("accepted");
    let request = &job.requests[0];
    assert_eq!(request.max_tokens, Some(0));
    assert_eq!(request.prompt_logprobs, Some(1));
    let without = completion(json!({"logprobs": 1})).expect("accepted");
    assert_eq!(without.requests[0].prompt_logprobs, None);
}

#[test]
fn a_templates_bos_is_not_doubled() {
    let job = chat(json!({"logprobs": true, "top_logprobs": 3})).expect("accepted");
    let request = &job.requests[0];
    assert_eq!(request.prompt.iter().filter(|&&id| id == 27).count(), 1);
    assert_eq!(text().decode(&request.prompt, false), "<s>user hi");
    assert_eq!((request.logprobs, job.header.logprobs), (Some(3), Some(3)));
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]);
    let job = chat(json!({"messages": parts})).expect("accepted");
    // The line break between the parts has no token.
    assert_eq!(text().decode(&job.requests[0].prompt, true), "user hi");
}

#[test]
fn a_message_without_content_is_an_empty_text() {
    let rendered = |message: Value| {
        let job = chat(json!({"messages": [message]})).expect("accepted");
        text().decode(&job.requests[0].prompt, true)
    };
    assert_eq!(rendered(json!({"role": "a", "content": null})), "a ");
    assert_eq!(rendered(json!({"role": "a"})), "a ");
}

#[test]
fn a_request_over_the_context_gets_openais_message() {
    let error_of = |result: Result<Job>| match result.err().expect("refused") {
        Error::Request {
            kind: RequestErrorKind::ContextLengthExceeded,
            message,
            param,
            ..
        } => (param.expect("a field").to_string(), message),
        other => panic!("{other:?}"),
    };
    let begins = "This model's maximum context length is 64 tokens. However, you requested";
    let (param, message) = error_of(completion(json!({"prompt": vec![1; 70], "max_tokens": 5})));
    let rest = "75 tokens (70 in the prompt, 5 in the completion). Please reduce the length of the prompt or completion.";
    assert_eq!(param.as_str(), "prompt");
    assert_eq!(message, format!("{begins} {rest}"));
    let long = json!([{"role": "user", "content": "a".repeat(64)}]);
    let (param, message) = error_of(chat(json!({"messages": long, "max_tokens": 5})));
    let rest = "75 tokens (70 in the messages, 5 in the completion). Please reduce the length of the messages or completion.";
    assert_eq!(param.as_str(), "messages");
    assert_eq!(message, format!("{begins} {rest}"));
    let (param, message) = error_of(chat(json!({"messages": long})));
    let rest = "71 tokens (70 in the messages, at least 1 in the completion). Please reduce the length of the messages.";
    assert_eq!(param.as_str(), "messages");
    assert_eq!(message, format!("{begins} {rest}"));
    let (param, _) = error_of(chat(json!({"max_completion_tokens": 64})));
    assert_eq!(
        param, "max_completion_tokens",
        "the messages alone would fit"
    );
}

#[test]
fn special_tokens_are_added_on_request() {
    let boses = |job: Result<Job>| {
        let job = job.expect("accepted");
        job.requests[0]
            .prompt
            .iter()
            .filter(|&&id| id == 27)
            .count()
    };
    assert_eq!(boses(completion(json!({}))), 1);
    assert_eq!(boses(completion(json!({"add_special_tokens": false}))), 0);
    assert_eq!(boses(chat(json!({"add_special_tokens": true}))), 2);
}
