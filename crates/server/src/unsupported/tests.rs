use super::super::anthropic::MessageFields;
use super::super::object::JsonObject;
use super::super::ollama;
use super::super::responses::ResponseFields;
use super::super::wire;
use super::*;

/// Checks a body with this field.
fn checked(field: &str) -> Result<()> {
    let body = format!(r#"{{{field}, "model": "m"}}"#);
    let read: &[&[&str]] = &[&["model"]];
    JsonObject::parse(body.as_bytes(), read)?.check_others(read)
}

#[test]
fn fields_that_ask_for_something_are_refused_by_name() {
    for field in [
        r#""tools": [{"type": "function"}]"#,
        r#""system": "Be brief.""#,
        r#""max_output_tokens": 5"#,
        r#""thinking": {"type": "disabled"}"#,
        r#""add_generation_prompt": false"#,
        r#""tool_choice": "required""#,
        r#""tool_choice": {"type": "function"}"#,
        r#""functions": [{"name": "f"}]"#,
        r#""function_call": {"name": "f"}"#,
        r#""web_search_options": {}"#,
        r#""documents": [{"text": "t"}]"#,
        r#""guided_decoding_backend": "xgrammar""#,
        r#""grammar": "root ::= a""#,
        r#""json_schema": {"type": "object"}"#,
        r#""audio": {"voice": "alloy"}"#,
        r#""modalities": ["text", "audio"]"#,
        r#""modalities": ["audio"]"#,
        r#""mm_processor_kwargs": {"num_crops": 4}"#,
        r#""prompt_embeds": "AAAA""#,
        r#""chat_template": "{{ x }}""#,
        r#""continue_final_message": true"#,
        r#""truncate_prompt_tokens": -1"#,
        r#""echo": true"#,
        r#""suffix": "x""#,
        r#""logits_processors": ["x"]"#,
        r#""use_beam_search": true"#,
        r#""best_of": 2"#,
        r#""typical_p": 0.5"#,
        r#""dry_multiplier": 0.8"#,
        r#""n_probs": 5"#,
        r#""use_activation": false"#,
        r#""thinking_token_budget": 0"#,
        r#""thinking_budget": 1024"#,
        r#""max_completion_tokens": 7"#,
        r#""prompt_logprobs": 0"#,
        r#""top_logprobs": 1"#,
        r#""return_tokens_as_token_ids": true"#,
        r#""return_token_ids": true"#,
        r#""moderation": {"model": "omni-moderation-latest"}"#,
        r#""compaction": {"type": "summary"}"#,
        r#""thread": {"type": "continue", "previous_message_id": "msg_1"}"#,
        r#""store": true"#,
        r#""truncation": "auto""#,
        r#""truncation_side": "right""#,
        r#""logprob_token_ids": [5]"#,
        r#""separate_reasoning": false"#,
        r#""normalize": false"#,
        r#""input_type": "query""#,
        r#""embed_dtype": "float16""#,
        r#""endianness": "big""#,
        r#""modality": "image""#,
        r#""rank_fields": ["title"]"#,
        r#""raw_scores": true"#,
        r#""max_tokens_per_query": 5"#,
        r#""priority": -1"#,
        r#""kv_transfer_params": {"do_remote_decode": true}"#,
        r#""vllm_xargs": {"a": 1}"#,
        r#""options": {"num_ctx": 32768, "temperature": 0}"#,
    ] {
        let error = checked(field).expect_err(field);
        let name = field.split('"').nth(1).expect("a name");
        assert_eq!(error.param().as_deref(), Some(name));
        let what = format!("{name} is not supported: leave it out");
        assert!(error.to_string().starts_with(&what), "{error}");
    }
    let error = checked(r#""reasoning": {"effort": "low"}"#).unwrap_err();
    assert!(error.to_string().contains("reasoning_effort"), "{error}");
    for (field, route) in [
        (r#""messages": [{}]"#, "/v1/chat/completions"),
        (r#""prompt": "a""#, "/v1/completions"),
    ] {
        let error = checked(field).unwrap_err().to_string();
        assert!(error.ends_with(&format!("; {route} takes it")), "{error}");
    }
    let error = checked(r#""prompt_logprobs": 1"#).unwrap_err();
    assert!(error.to_string().contains("echo"), "{error}");
    let error = checked(r#""modalities": ["audio"]"#).unwrap_err();
    let instead = r#" or set it to ["text"]"#;
    assert!(error.to_string().ends_with(instead), "{error}");
}

#[test]
fn fields_that_ask_for_nothing_are_accepted() {
    for field in [
        r#""tools": []"#,
        r#""add_generation_prompt": true"#,
        r#""logprobs": false"#,
        r#""reasoning": {}"#,
        r#""tool_choice": "none""#,
        r#""tool_choice": "auto""#,
        r#""function_call": "auto""#,
        r#""modalities": ["text"]"#,
        r#""truncation": "disabled""#,
        r#""truncation_side": "left""#,
        r#""separate_reasoning": true"#,
        r#""normalize": true"#,
        r#""endianness": "native""#,
        r#""modality": "text""#,
        r#""rank_fields": ["text"]"#,
        r#""raw_scores": false"#,
        r#""max_tokens_per_query": 0"#,
        r#""echo": false"#,
        r#""best_of": 1"#,
        r#""typical_p": 1.0"#,
        r#""top_logprobs": 0"#,
        r#""store": false"#,
        r#""priority": 0"#,
        r#""logits_processors": []"#,
        r#""kv_transfer_params": {}"#,
        r#""metadata": {"a": "b"}"#,
        r#""prompt_cache_options": {"mode": "explicit"}"#,
        r#""parallel_tool_calls": true"#,
        r#""user": "me""#,
        r#""an_unknown_name": {"a": [1]}"#,
        r#""options": {}"#,
        r#""options": {"num_ctx": 32768, "temperature": null}"#,
        r#""model": "read elsewhere""#,
    ] {
        assert!(checked(field).is_ok(), "{field}");
    }
    for (name, _) in UNSUPPORTED {
        assert!(checked(&format!(r#""{name}": null"#)).is_ok(), "{name}");
    }
}

/// A field that another API reads is not ignored.
#[test]
fn no_field_of_another_api_is_unknown() {
    use super::super::openai::Body;
    fn of<F: serde::de::DeserializeOwned>() -> Vec<&'static str> {
        Body::<F>::names().concat()
    }
    let apis = [
        of::<wire::Completion>(),
        of::<wire::ChatFields>(),
        of::<ResponseFields>(),
        of::<MessageFields>(),
        of::<ollama::ChatFields>(),
        of::<ollama::GenerateFields>(),
    ];
    for name in apis.iter().flatten() {
        for api in apis.iter().filter(|api| !api.contains(name)) {
            assert!(
                treatment(name) != Treatment::Unknown,
                "{name} beside {api:?}"
            );
        }
    }
}

#[test]
fn fields_that_an_api_reads_itself_are_not_looked_up() {
    let body = br#"{"echo": true}"#;
    let checked = |read: &[&[&str]]| JsonObject::parse(body, read)?.check_others(read);
    assert!(checked(&[&["model"], &["echo"]]).is_ok());
    assert!(checked(&[&["model"]]).is_err());
}
