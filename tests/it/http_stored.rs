//! Stored responses: what is told of them, who continues them, and how many there are.

use crate::common::scripted::{TEMPLATE, saying, saying_as};
use crate::common::server::error;
use crate::http_responses::{RESPONSES, text_body};
use foretoken::http::AppState;
use serde_json::{Value, json};

/// What continues a stored response has the prompt of the whole conversation.
#[tokio::test]
async fn stored_responses_are_told_again_continued_and_deleted() {
    let server = saying("Hello there.").await;
    let first = server.json(RESPONSES, &text_body()).await;
    let id = first["id"].as_str().expect("an id");
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(server.read(&path).await, first);

    let more = json!({"input": "And?", "temperature": 0, "previous_response_id": id});
    let second = server.json(RESPONSES, &more).await;
    assert_eq!(second["previous_response_id"], id);
    let counted = format!("{RESPONSES}/input_tokens");
    let counted = server.json(&counted, &more).await;
    let tokens = &second["usage"]["input_tokens"];
    assert_eq!(
        counted,
        json!({"object": "response.input_tokens", "input_tokens": tokens})
    );
    let user = |text: &str| json!({"role": "user", "content": text});
    let message = &first["output"][0];
    let reference = json!({"type": "item_reference", "id": message["id"]});
    for said in [message, &reference] {
        let input = json!([user("Hi"), said, user("And?")]);
        let body = json!({"input": input, "temperature": 0, "store": false});
        let whole = server.json(RESPONSES, &body).await;
        let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64();
        assert_eq!(tokens(&whole), tokens(&second));
        assert!(tokens(&whole) > tokens(&first));
        let path = format!("{RESPONSES}/{}", whole["id"].as_str().expect("an id"));
        error(server.get(&path).await, 404, "not_found").await;
    }

    let twice = json!({"input": [user("Hi"), reference, reference]});
    let refused = server.refused(RESPONSES, &twice).await;
    assert_eq!(refused["param"], "input[2].id");

    // The conversation of a stream is stored, too, with those before it.
    let mut more = more;
    more["previous_response_id"] = second["id"].clone();
    let events = server.named_events(RESPONSES, more.clone()).await;
    let (_, completed) = events.last().expect("events");
    more["previous_response_id"] = completed["response"]["id"].clone();
    let fourth = server.json(RESPONSES, &more).await;
    let third = &completed["response"]["usage"]["input_tokens"];
    let of = |tokens: &Value| tokens.as_u64().expect("a number");
    let second = of(&second["usage"]["input_tokens"]);
    let (third, fourth) = (of(third), of(&fourth["usage"]["input_tokens"]));
    assert_eq!(fourth - third, third - second);

    let refused = server.get(&format!("{path}?stream=true")).await;
    assert_eq!(
        error(refused, 400, "invalid_value").await["param"],
        "stream"
    );
    let delete = async || {
        let request = server.client.delete(server.url.clone() + &path);
        request.send().await.expect("an answer")
    };
    let deleted: Value = delete().await.json().await.expect("JSON");
    assert_eq!(
        deleted,
        json!({"id": id, "object": "response", "deleted": true})
    );
    for refused in [delete().await, server.get(&path).await] {
        let error = error(refused, 404, "not_found").await;
        assert_eq!(error["param"], "response_id");
    }
    let mut body = text_body();
    body["input"] = json!([user("Hi"), reference]);
    let refused = server.refused(RESPONSES, &body).await;
    assert_eq!(refused["param"], "input[1].id");
    server.done().await;
}

#[tokio::test]
async fn a_stored_response_belongs_to_a_key() {
    let keys = vec!["one".to_owned(), "two".to_owned()];
    let configure = |state: AppState| state.with_api_keys(keys);
    let server = saying_as("Hello there.", TEMPLATE, configure).await;
    let url = server.url.clone() + RESPONSES;
    let ask = async |key: &str, body: &Value| {
        let request = server.client.post(&url).bearer_auth(key).json(body);
        request.send().await.expect("an answer")
    };
    let first: Value = ask("one", &text_body()).await.json().await.expect("JSON");
    let id = first["id"].as_str().expect("an id");
    let mut more = text_body();
    more["previous_response_id"] = id.into();
    for (key, told, continued) in [("one", 200, 200), ("two", 404, 400)] {
        let request = server.client.get(format!("{url}/{id}")).bearer_auth(key);
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), told, "{key}");
        assert_eq!(ask(key, &more).await.status(), continued, "{key}");
    }
    server.done().await;
}

/// The items that a response answers are listed, those before it included, a page at a time.
#[tokio::test]
async fn what_a_stored_response_answers_is_listed() {
    let server = saying("Hello there.").await;
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"});
    let output =
        json!({"type": "function_call_output", "id": "out", "call_id": "1", "output": "7"});
    let mut body = text_body();
    body["input"] = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me look."},
        call,
        output,
    ]);
    let first = server.json(RESPONSES, &body).await;
    let more = json!({"input": "And?", "temperature": 0, "previous_response_id": first["id"]});
    let second = server.json(RESPONSES, &more).await;
    let id = second["id"].as_str().expect("an id");
    let path = format!("{RESPONSES}/{id}/input_items");
    let list = server.read(&format!("{path}?order=asc")).await;
    let items = list["data"].as_array().expect("items");
    let said = |role: &str, part: Value| json!({"role": role, "content": [part], "type": "message", "status": "completed"});
    let input = |text: &str| json!({"type": "input_text", "text": text});
    let answer = json!({"type": "output_text", "text": "Let me look.", "annotations": []});
    let expected = [
        said("user", input("Hi")),
        said("assistant", answer),
        call,
        output,
        first["output"][0].clone(),
        said("user", input("And?")),
    ];
    assert_eq!(items.len(), expected.len(), "{list}");
    let mut ids = Vec::new();
    for (item, mut expected) in items.iter().zip(expected) {
        let id = item["id"].as_str().expect("an id");
        ids.push(id);
        expected["id"] = id.into();
        expected["status"] = "completed".into();
        assert_eq!(*item, expected);
    }
    assert!(ids[0].starts_with("msg_"), "{ids:?}");
    assert!(ids[2].starts_with("item_"), "{ids:?}");
    assert_eq!(ids[3], "out");
    assert_eq!(items[4], first["output"][0]);
    assert_eq!(list["object"], "list");
    let ends =
        |list: &Value| [&list["first_id"], &list["last_id"], &list["has_more"]].map(Value::clone);
    assert_eq!(ends(&list), [json!(ids[0]), json!(ids[5]), json!(false)]);
    // The items of the first response keep their ids, and those that have none.
    let of_first = format!(
        "{RESPONSES}/{}/input_items?order=asc",
        first["id"].as_str().expect("an id")
    );
    assert_eq!(server.read(&of_first).await["data"], json!(items[..4]));

    let middle = format!("?limit=2&after={}", ids[3]);
    let last = format!("?order=asc&after={}", ids[5]);
    for (query, shown, has_more) in [
        ("?limit=2", vec![ids[5], ids[4]], true),
        (
            "?order=asc&limit=4&include%5B%5D=reasoning.encrypted_content",
            ids[..4].to_vec(),
            true,
        ),
        (middle.as_str(), vec![ids[2], ids[1]], true),
        (last.as_str(), vec![], false),
    ] {
        let list = server.read(&format!("{path}{query}")).await;
        let listed = list["data"].as_array().expect("items").iter();
        let listed: Vec<&str> = listed.filter_map(|item| item["id"].as_str()).collect();
        assert_eq!(listed, shown, "{query}");
        let expected = [json!(shown.first()), json!(shown.last()), json!(has_more)];
        assert_eq!(ends(&list), expected, "{query}");
    }
    for (query, param) in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=two", "limit"),
        ("order=up", "order"),
        ("after=msg_1", "after"),
        ("before=out", "before"),
        ("include=message.output_text.logprobs", "include"),
    ] {
        let refused = server.get(&format!("{path}?{query}")).await;
        assert_eq!(
            error(refused, 400, "invalid_value").await["param"],
            param,
            "{query}"
        );
    }
    let unknown = server.get(&format!("{RESPONSES}/resp_1/input_items")).await;
    assert_eq!(
        error(unknown, 404, "not_found").await["param"],
        "response_id"
    );
    server.done().await;
}

/// A client may send an item twice.
#[tokio::test]
async fn pages_end_although_ids_repeat() {
    let server = saying("Hello there.").await;
    let mut body = text_body();
    let item = |id: &str| json!({"role": "user", "content": "Hi", "id": id});
    body["input"] = json!(["a", "b", "a", "c"].map(item));
    let reply = server.json(RESPONSES, &body).await;
    let id = reply["id"].as_str().expect("an id");
    for (query, shown) in [("order=asc&after=a", vec!["c"]), ("after=a", vec![])] {
        let path = format!("{RESPONSES}/{id}/input_items?{query}");
        let list = server.read(&path).await;
        let listed = list["data"].as_array().expect("items").iter();
        let listed: Vec<&str> = listed.filter_map(|item| item["id"].as_str()).collect();
        assert_eq!(listed, shown, "{query}");
    }
    server.done().await;
}

#[tokio::test]
async fn an_operator_bounds_how_many_responses_are_stored() {
    let few = |state: AppState| state.with_max_stored_responses(1);
    let server = saying_as("Hello there.", TEMPLATE, few).await;
    let first = server.json(RESPONSES, &text_body()).await;
    let second = server.json(RESPONSES, &text_body()).await;
    for (reply, status) in [(&first, 404), (&second, 200)] {
        let path = format!("{RESPONSES}/{}", reply["id"].as_str().expect("an id"));
        assert_eq!(server.get(&path).await.status(), status);
    }
    server.done().await;

    let none = |state: AppState| state.with_max_stored_responses(0);
    let server = saying_as("Hello there.", TEMPLATE, none).await;
    let mut body = text_body();
    for store in [Value::Null, json!(false)] {
        body["store"] = store;
        let reply = server.json(RESPONSES, &body).await;
        assert_eq!(reply["store"], false);
        let path = format!("{RESPONSES}/{}", reply["id"].as_str().expect("an id"));
        error(server.get(&path).await, 404, "not_found").await;
        let mut more = text_body();
        more["previous_response_id"] = reply["id"].clone();
        let refused = server.refused(RESPONSES, &more).await;
        assert_eq!(refused["param"], "previous_response_id");
    }
    body["store"] = true.into();
    let refused = server.refused(RESPONSES, &body).await;
    assert_eq!(refused["param"], "store");
    let message = refused["message"].as_str().expect("a message");
    assert!(message.contains("--max-stored-responses"), "{message}");
    server.done().await;
}
