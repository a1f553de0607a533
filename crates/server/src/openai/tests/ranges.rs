//! Values out of their ranges.

use super::*;

/// Fields, values and what errors say of them.
const OUT_OF_RANGE: &str = r#"
temperature | -0.1 | between 0 and 2
temperature | 2.1 | between 0 and 2
temperature | "hot" | expected a number
top_p | -0.1 | between 0 and 1
top_p | 1.01 | between 0 and 1
top_k | -2 | -1 or 0 (off)
top_k | 1.5 | expected an integer
min_p | 1.5 | between 0 and 1
repetition_penalty | 0 | greater than 0 and at most 2
presence_penalty | -2.5 | between -2 and 2
frequency_penalty | 3 | between -2 and 2
logit_bias | {"3": 101} | between -100 and 100
logit_bias | {"x": 1} | between -100 and 100
logit_bias | {"28": 1} | not in the vocabulary
logit_bias | [1] | expected an object
seed | "one" | expected an integer
stop | ["a", ""] | each of 1 to 1024 bytes
logit_bias | {"3": "much"} | between -100 and 100
stop | 7 | a string or a list
stop_token_ids | [28] | not in the vocabulary
min_tokens | 17 | between 0 and max_tokens (16)
max_tokens | 0 | at least 1
max_tokens | 62 | maximum context length is 64 tokens
max_tokens | -2 | expected a non-negative integer
n | 0 | between 1 and 128
n | 129 | between 1 and 128
best_of | 0 | between 1 and 128
best_of | 129 | between 1 and 128
suffix | "x" | no fill-in-the-middle tokens
allowed_token_ids | [] | at least one id
allowed_token_ids | [28] | not in the vocabulary (0 to 27)
allowed_token_ids | "0" | invalid type
bad_words | [""] | at most 256 words, each of 1 to 256 bytes
bad_words | ["a", " "] | not only spaces
bad_words | 7 | a string or a list
include_stop_str_in_output | 1 | expected a boolean
skip_special_tokens | "no" | expected a boolean
return_token_ids | 1 | expected a boolean
truncate_prompt_tokens | 0 | between 1 and 64, or -1
truncate_prompt_tokens | 65 | between 1 and 64, or -1
truncate_prompt_tokens | -2 | between 1 and 64, or -1
truncate_prompt_tokens | "2" | expected an integer
logprobs | 6 | between 0 and 5
logprobs | true | expected a non-negative integer
stream | "yes" | expected a boolean
stream_options | {"include_usage": true} | requires stream
spec_length | -1 | expected a non-negative integer
acceptance | "all" | `coupled`, `rejection`, `typical`, `lenient`
lenience | 0.5 | requires acceptance
posterior_alpha | 0.5 | requires acceptance
posterior_threshold | 0.5 | requires acceptance
prediction | "x" | expected an object
cache_salt | "" | 1 to 1024 bytes
cache_salt | 7 | expected a string
prompt | {} | list of token ids
prompt | [] | must not be empty
prompt | [28] | not in the vocabulary
prompt | [[1], []] | at least one token
prompt | null | required
"#;

#[test]
fn ranges_are_checked_and_named_in_the_error() {
    let large = [
        ("stop", json!(vec!["a"; 65]), "at most 64 strings"),
        ("stop", json!("é".repeat(513)), "each of 1 to 1024 bytes"),
        (
            "stop_token_ids",
            json!(vec![0; 1025]),
            "at most 1024 entries, not 1025",
        ),
        ("logit_bias", biases(1025), "at most 1024 entries, not 1025"),
        ("bad_words", json!(vec!["a"; 257]), "at most 256 words"),
        (
            "bad_words",
            json!("a".repeat(257)),
            "each of 1 to 256 bytes",
        ),
        ("cache_salt", json!("é".repeat(513)), "1 to 1024 bytes"),
        ("prompt", json!(vec!["a"; 41]), "at most 40 sequences"),
        (
            "prompt",
            json!(vec![1; 64]),
            "maximum context length is 64 tokens",
        ),
    ];
    for (field, bad, needle) in rows(OUT_OF_RANGE).chain(large) {
        let message = refused(completion(json!({field: bad})), field);
        assert!(message.contains(needle), "{field}: {message}");
    }
}

/// A chat without `max_tokens` has the room of the context.
#[test]
fn min_tokens_must_fit_the_context() {
    let message = refused(chat(json!({"min_tokens": 64})), "min_tokens");
    assert!(
        message.contains("for which the context has room"),
        "{message}"
    );
    assert!(chat(json!({"min_tokens": 1})).is_ok());
}

/// The same of chats.
const OUT_OF_RANGE_IN_CHATS: &str = r#"
top_logprobs | 6 | between 0 and 5
top_logprobs | 2 | requires logprobs
logprobs | 1 | expected a boolean
max_completion_tokens | 0 | at least 1
max_output_tokens | 0 | at least 1
max_completion_tokens | 64 | maximum context length is 64 tokens
messages | null | required
messages | [] | must not be empty
messages | "hi" | expected a list
messages[0] | ["hi"] | an object
messages[1].role | [{"role": "user"}, {"content": "hi"}] | is required
messages[0].content | [{"role": "user", "content": 7}] | a string or a list
messages[0].content[0].type | [{"role": "user", "content": [{"type": "image_url"}]}] | `text`
"#;

#[test]
fn the_chats_own_fields_are_checked() {
    let long = json!([{"role": "user", "content": "a".repeat(64)}]);
    let told = "(70 in the messages, at least 1 in the completion)";
    for (field, bad, needle) in rows(OUT_OF_RANGE_IN_CHATS).chain([("messages", long, told)]) {
        let key = field.split('[').next().expect("a name");
        let message = refused(chat(json!({key: bad})), field);
        assert!(message.contains(needle), "{field}: {message}");
    }
}
