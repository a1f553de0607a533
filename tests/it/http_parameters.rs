//! vLLM's parameters of the HTTP API, and those that few requests have: what they do, and that drafts change
//! nothing of it.

use crate::common::server::{EOS, Server, drafting, greedy, joined};
use crate::common::{Guess, assert_has};
use serde_json::{Value, json};

/// Servers whose drafts come from tables, and from a model, with trees.
async fn servers() -> [Server; 2] {
    [
        drafting(Guess::Tables).await,
        drafting(Guess::Toy(0.3)).await,
    ]
}

/// The choices of a reply, which are the same with and without drafts, streamed and not.
async fn choices(server: &Server, body: &Value) -> Value {
    let path = match body["messages"].is_null() {
        true => "/v1/completions",
        false => "/v1/chat/completions",
    };
    let reply = server.json(path, body).await;
    let mut plain = body.clone();
    plain["spec_length"] = 0.into();
    let without = server.json(path, &plain).await;
    assert_eq!(reply["choices"], without["choices"], "{body}");
    if body["best_of"].is_null() {
        let chunks = server.stream(path, body.clone()).await;
        let choice = &reply["choices"][0];
        let whole = (choice["text"].as_str()).or(choice["message"]["content"].as_str());
        let (text, finish) = joined(&chunks, 0);
        assert_eq!(Some(text.as_str()), whole, "{body}");
        assert_eq!(finish, choice["finish_reason"], "{body}");
        let ids = chunks.iter().flat_map(|chunk| {
            let of = chunk["choices"].as_array().unwrap().iter();
            of.filter(|choice| choice["index"] == 0)
                .flat_map(|choice| choice["token_ids"].as_array().cloned().unwrap_or_default())
        });
        let of_whole = choice["token_ids"].as_array().cloned();
        assert_eq!(
            ids.collect::<Vec<_>>(),
            of_whole.unwrap_or_default(),
            "{body}"
        );
    }
    reply["choices"].clone()
}

/// A greedy request for letters.
fn letters(prompt: &str, max_tokens: usize) -> Value {
    let mut body = greedy(prompt, max_tokens);
    body["allowed_token_ids"] = (0..26).collect();
    body
}

/// Greedy and sampled requests, whose texts have their full length.
fn requests() -> Vec<Value> {
    let mut all = Vec::new();
    for seed in 0..4 {
        let mut body = greedy(["abc", "hello", "aaaa", "zyx"][seed], 60);
        body["ignore_eos"] = true.into();
        all.push(body.clone());
        body["temperature"] = 1.0.into();
        body["seed"] = seed.into();
        all.push(body);
    }
    all
}

#[tokio::test]
async fn only_allowed_tokens_are_chosen() {
    for server in servers().await {
        for mut body in requests() {
            body["return_token_ids"] = true.into();
            body["allowed_token_ids"] = json!([0, 4, 8, 14, 20, 26]);
            body["n"] = 2.into();
            let choices = choices(&server, &body).await;
            for choice in choices.as_array().unwrap() {
                let text = choice["text"].as_str().unwrap();
                assert_eq!(text.len(), 60);
                assert!(text.chars().all(|c| "aeiou ".contains(c)), "{text}");
            }
            // With a grammar both must allow a token, and a text can end.
            body["structured_outputs"] = json!({"regex": "[a-h ]{5}"});
            let choices = self::choices(&server, &body).await;
            let text = choices[0]["text"].as_str().unwrap();
            assert!(
                text.len() == 5 && text.chars().all(|c| "ae ".contains(c)),
                "{text}"
            );
            assert_eq!(choices[0]["finish_reason"], "stop");
        }
        let mut none = greedy("abc", 8);
        none["allowed_token_ids"] = json!([3]);
        none["structured_outputs"] = json!({"regex": "[xyz]{5}"});
        let response = server.post("/v1/completions", &none).await;
        assert_eq!(response.status(), 400);
        let message = response.text().await.unwrap();
        assert!(message.contains("allowed_token_ids"), "{message}");
        server.done().await;
    }
}

#[tokio::test]
async fn bad_words_do_not_appear() {
    for server in servers().await {
        let mut changed = 0;
        for mut body in requests() {
            let text = |choices: Value| choices[0]["text"].as_str().unwrap().to_owned();
            let free = text(choices(&server, &body).await);
            // Words of one to three characters that the model would have written.
            let letters: Vec<char> = free.chars().filter(char::is_ascii_lowercase).collect();
            if letters.len() < 30 {
                continue;
            }
            let words: Vec<String> = free
                .split(|c: char| !c.is_ascii_lowercase())
                .filter(|word| word.len() >= 3)
                .flat_map(|word| [word[..3].to_owned(), word[1..3].to_owned()])
                .chain([letters[20].to_string()])
                .collect();
            body["bad_words"] = json!(words);
            body["return_token_ids"] = true.into();
            let without = text(choices(&server, &body).await);
            for word in &words {
                assert!(!without.contains(word), "{word} in {without}");
            }
            changed += 1;
        }
        assert!(changed > 4, "{changed}");
        server.done().await;
    }
}

#[tokio::test]
async fn what_ends_a_text_may_be_a_part_of_it() {
    for server in servers().await {
        let mut body = letters("abc", 40);
        let text = choices(&server, &body).await[0]["text"].clone();
        let text = text.as_str().unwrap();
        let stop: String = text.chars().skip(9).take(3).collect();
        let cut = &text[..text.find(&stop).unwrap()];
        body["stop"] = json!([stop]);
        for (include, expected) in [(false, cut.to_owned()), (true, format!("{cut}{stop}"))] {
            body["include_stop_str_in_output"] = include.into();
            let choice = &choices(&server, &body).await[0];
            assert_eq!(choice["text"], expected);
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["stop_reason"], json!(stop));
        }
        // Ids that end it, too, but not special tokens, unless those are shown.
        body["stop"] = Value::Null;
        body["stop_token_ids"] = json!([text.as_bytes()[5] - b'a']);
        let at = text.find(char::from(text.as_bytes()[5])).unwrap();
        let choice = &choices(&server, &body).await[0];
        assert_eq!(choice["text"], text[..=at]);
        let mut special = greedy("abc", 40);
        special["logit_bias"] = json!({EOS.to_string(): 100});
        for (include, skip, expected) in [
            (false, true, ""),
            (true, true, ""),
            (false, false, ""),
            (true, false, "<|end|>"),
        ] {
            special["include_stop_str_in_output"] = include.into();
            special["skip_special_tokens"] = skip.into();
            let choice = &choices(&server, &special).await[0];
            assert_eq!(choice["text"], expected, "{special}");
        }
        special["ignore_eos"] = true.into();
        special["max_tokens"] = 2.into();
        let choice = &choices(&server, &special).await[0];
        assert_eq!(choice["text"], "<|end|><|end|>");
        server.done().await;
    }
}

#[tokio::test]
async fn token_ids_are_shown() {
    for server in servers().await {
        let mut body = letters("ab", 12);
        body["prompt"] = json!(["ab", "c"]);
        body["n"] = 2.into();
        body["return_token_ids"] = true.into();
        let choices = choices(&server, &body).await;
        for (i, choice) in choices.as_array().unwrap().iter().enumerate() {
            let prompt = if i < 2 { json!([0, 1]) } else { json!([2]) };
            assert_eq!(choice["prompt_token_ids"], prompt);
            let ids = &choice["token_ids"];
            let spelled = json!({"tokens": ids});
            let text = server.json("/detokenize", &spelled).await["prompt"].clone();
            assert_eq!(text, choice["text"]);
        }
        let chunks = server.stream("/v1/completions", body).await;
        let prompts = chunks.iter().filter_map(|chunk| {
            let choice = &chunk["choices"][0];
            let ids = choice.get("prompt_token_ids")?;
            Some((choice["index"].as_u64(), ids.clone()))
        });
        let mut prompts: Vec<_> = prompts.collect();
        prompts.sort_by_key(|(index, _)| *index);
        let expected = [json!([0, 1]), json!([0, 1]), json!([2]), json!([2])];
        assert_eq!(prompts, (0..).map(Some).zip(expected).collect::<Vec<_>>());

        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
            "temperature": 0, "return_token_ids": true});
        let reply = server.json("/v1/chat/completions", &chat).await;
        let counted = |ids: &Value| ids.as_array().map(|ids| json!(ids.len()));
        let usage = &reply["usage"];
        assert_eq!(
            counted(&reply["prompt_token_ids"]).as_ref(),
            Some(&usage["prompt_tokens"])
        );
        let ids = &reply["choices"][0]["token_ids"];
        assert_eq!(counted(ids).as_ref(), Some(&usage["completion_tokens"]));
        assert!(reply["choices"][0].get("prompt_token_ids").is_none());
        self::choices(&server, &chat).await;
        let chunks = server.stream("/v1/chat/completions", chat).await;
        assert_eq!(chunks[0]["prompt_token_ids"], reply["prompt_token_ids"]);
        let others = &chunks[1..];
        let mut each = others.iter();
        assert!(each.all(|chunk| chunk.get("prompt_token_ids").is_none()));
        // Nobody else gets them.
        let plain = server.json("/v1/completions", &greedy("ab", 3)).await;
        assert!(plain["choices"][0].get("token_ids").is_none());
        server.done().await;
    }
}

#[tokio::test]
async fn the_best_of_several_choices_are_returned() {
    for server in servers().await {
        let mut all = greedy("abc", 20);
        all["prompt"] = json!(["abc", "xy"]);
        all["temperature"] = 1.0.into();
        all["seed"] = 3.into();
        all["n"] = 6.into();
        all["logprobs"] = 0.into();
        let mean = |choice: &Value| {
            let of = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            of.iter().filter_map(Value::as_f64).sum::<f64>() / of.len() as f64
        };
        let reply = server.json("/v1/completions", &all).await;
        let mut expected = Vec::new();
        for of_prompt in reply["choices"].as_array().unwrap().chunks(6) {
            let mut of_prompt = of_prompt.to_vec();
            of_prompt.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
            assert!(mean(&of_prompt[0]) > mean(&of_prompt[5]));
            expected.extend(of_prompt[..2].iter().map(|choice| choice["text"].clone()));
        }
        let mut best = all.clone();
        (best["n"], best["best_of"]) = (2.into(), 6.into());
        for logprobs in [json!(0), Value::Null] {
            best["logprobs"] = logprobs.clone();
            let choices = choices(&server, &best).await;
            let choices = choices.as_array().unwrap();
            let texts = choices.iter().map(|choice| choice["text"].clone());
            assert_eq!(texts.collect::<Vec<_>>(), expected);
            for (i, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], i);
                assert_eq!(choice["logprobs"].is_null(), logprobs.is_null());
            }
        }
        // All of them cost.
        let usage = &server.json("/v1/completions", &best).await["usage"];
        assert_eq!(
            usage["completion_tokens"],
            reply["usage"]["completion_tokens"]
        );
        assert_eq!(usage["prompt_tokens"], 5);
        server.done().await;
    }
}

#[tokio::test]
async fn each_chunk_may_say_what_the_reply_has_cost() {
    for server in servers().await {
        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30,
            "temperature": 0, "ignore_eos": true});
        for (path, body) in [
            ("/v1/completions", letters("abc", 30)),
            ("/v1/chat/completions", chat),
        ] {
            let whole = server.json(path, &body).await;
            for (include, last_chunks) in [(true, 1), (false, 0)] {
                let mut body = body.clone();
                body["stream_options"] =
                    json!({"include_usage": include, "continuous_usage_stats": true});
                let chunks = server.stream(path, body).await;
                let last = chunks.iter().filter(|chunk| chunk["choices"] == json!([]));
                assert_eq!(last.count(), last_chunks);
                let counts = chunks.iter().map(|chunk| {
                    let usage = &chunk["usage"];
                    assert_eq!(usage["prompt_tokens"], whole["usage"]["prompt_tokens"]);
                    usage["completion_tokens"].as_u64().expect("a count")
                });
                let counts: Vec<u64> = counts.collect();
                assert!(counts.is_sorted() && counts.len() > 3, "{counts:?}");
                assert_eq!(counts.last(), Some(&30));
                assert!(counts[0] < 30);
            }
        }
        // The streams of other APIs have no such chunks.
        for (path, body) in [
            ("/v1/responses", json!({"input": "a", "stream": true})),
            (
                "/v1/messages",
                json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": true}),
            ),
        ] {
            let mut body = body;
            body["stream_options"] = json!({"continuous_usage_stats": true});
            let response = server.post(path, &body).await;
            assert_eq!(response.status(), 400, "{path}");
            let message = response.text().await.unwrap();
            assert_has(&message, &["stream_options.continuous_usage_stats"]);
        }
        server.done().await;
    }
}

#[tokio::test]
async fn top_p_0_is_greedy() {
    let [server, other] = servers().await;
    let mut body = greedy("abc", 30);
    let expected = choices(&server, &body).await;
    (body["temperature"], body["top_p"]) = (1.5.into(), 0.into());
    assert_eq!(choices(&server, &body).await, expected);
    assert_eq!(choices(&other, &body).await, expected);
    server.done().await;
    other.done().await;
}
