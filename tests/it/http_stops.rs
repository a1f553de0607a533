//! Stop strings that are names of special tokens, which texts are without: their ids end a text.

use crate::common::scripted::{CHAT, saying};
use serde_json::{Value, json};

const SAYS: &str = "one two one two one[TOOL_CALLS]two one two one two";
const STOP: &str = "[TOOL_CALLS]";
const BEFORE: &str = "one two one two one";

fn chat(extra: &[(&str, Value)]) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stop": [STOP],
        "max_tokens": 40});
    extra
        .iter()
        .for_each(|(key, value)| body[key] = value.clone());
    body
}

#[tokio::test]
async fn a_special_token_ends_a_text_as_its_name_does() {
    for (extra, text) in [
        (vec![], BEFORE.to_owned()),
        (vec![("stop", json!(STOP))], BEFORE.to_owned()),
        (vec![("stop", json!(["x!", STOP]))], BEFORE.to_owned()),
        (
            vec![("skip_special_tokens", json!(false))],
            BEFORE.to_owned(),
        ),
        (
            vec![("include_stop_str_in_output", json!(true))],
            format!("{BEFORE}{STOP}"),
        ),
        // The beginning of another one is held back until then.
        (vec![("stop", json!([STOP, "one!"]))], BEFORE.to_owned()),
    ] {
        let server = saying(SAYS).await;
        for drafts in [4, 0] {
            let mut body = chat(&extra);
            body["spec_length"] = drafts.into();
            let reply = server.json(CHAT, &body).await;
            let choice = &reply["choices"][0];
            assert_eq!(choice["message"]["content"], text, "{extra:?}");
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["stop_reason"], STOP);
            // Tokens are bytes here, and one that is special.
            assert_eq!(reply["usage"]["completion_tokens"], BEFORE.len() + 1);
            let chunks = server.stream(CHAT, body).await;
            let streamed: String = (chunks.iter())
                .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
                .collect();
            assert_eq!(streamed, text, "{extra:?}");
        }
        server.done().await;
    }
}

/// The name of EOS changes nothing, unless EOS itself is ignored.
#[tokio::test]
async fn the_end_of_a_text_is_no_stop_string() {
    let says = "one[TOOL_CALLS]<|im_end|>two<|im_end|>";
    let server = saying(says).await;
    let stop = json!(["<|im_end|>"]);
    let reply = server.json(CHAT, &chat(&[("stop", stop.clone())])).await;
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], "one");
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("stop"), &Value::Null)
    );
    let ignored = chat(&[("stop", stop), ("ignore_eos", json!(true))]);
    let choice = &server.json(CHAT, &ignored).await["choices"][0];
    assert_eq!(choice["message"]["content"], "one");
    assert_eq!(choice["stop_reason"], "<|im_end|>");
    // A stop id is reported as an id.
    let by_id = chat(&[("stop_token_ids", json!([258]))]);
    let choice = &server.json(CHAT, &by_id).await["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["stop_reason"]),
        (&json!("one"), &json!(258))
    );
    server.done().await;
}

#[tokio::test]
async fn every_api_ends_there() {
    let server = saying(SAYS).await;
    let body = json!({"prompt": "Hi", "temperature": 0, "stop": STOP, "max_tokens": 40});
    let choice = &server.json("/v1/completions", &body).await["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["stop_reason"]),
        (&json!(BEFORE), &json!(STOP))
    );
    server.done().await;

    let server = saying(SAYS).await;
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 40,
        "stop_sequences": [STOP]});
    let message = server.json("/v1/messages", &body).await;
    assert_eq!(
        message["content"],
        json!([{"type": "text", "text": BEFORE}])
    );
    assert_eq!(
        (&message["stop_reason"], &message["stop_sequence"]),
        (&json!("stop_sequence"), &json!(STOP))
    );
    server.done().await;

    let server = saying(SAYS).await;
    let body = json!({"input": "Hi", "temperature": 0, "max_output_tokens": 40, "stop": [STOP]});
    let response = server.json("/v1/responses", &body).await;
    assert_eq!(response["status"], "completed");
    assert_eq!(response["output"][0]["content"][0]["text"], BEFORE);
    server.done().await;
}
