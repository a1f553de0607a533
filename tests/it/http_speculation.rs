//! `stream_options.include_speculation`: what was drafted, and what became of it.

use crate::common::Guess;
use crate::common::server::{EOS, drafting, error, greedy, joined};
use serde_json::{Value, json};

/// The rounds of choice `index`.
fn rounds(chunks: &[Value], index: usize) -> Vec<Value> {
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let own = choices.filter(|choice| choice["index"] == index);
    let rounds = own.filter_map(|choice| choice["speculation"].as_array());
    rounds.flatten().cloned().collect()
}

fn list<'a>(round: &'a Value, key: &str) -> &'a [Value] {
    round[key].as_array().expect("a list")
}

/// The texts of `key` of all tokens, one after the other.
fn of_tokens(rounds: &[Value], key: &str) -> Vec<String> {
    let tokens = rounds.iter().flat_map(|round| list(round, "tokens"));
    tokens
        .map(|token| token[key].as_str().expect("a string").to_owned())
        .collect()
}

/// The numbers of rounds with a draft, of draft tokens, and of accepted ones. Checks that each round agrees
/// with itself: its tokens are those of an accepted path, and then one of the target.
fn counted(rounds: &[Value]) -> [u64; 3] {
    let mut sums = [0; 3];
    for round in rounds {
        let (draft, tokens) = (list(round, "draft"), list(round, "tokens"));
        let accepted = |node: &&usize| draft[**node]["accepted"] == true;
        let nodes: Vec<usize> = (0..draft.len()).collect();
        let path: Vec<usize> = nodes.iter().filter(accepted).copied().collect();
        let mut before = Value::Null;
        for (&node, token) in path.iter().zip(tokens) {
            for key in ["token", "source"] {
                assert_eq!(draft[node][key], token[key], "{round}");
            }
            assert_eq!(draft[node]["parent"], before, "{round}");
            before = node.into();
        }
        assert!((path.len()..=path.len() + 1).contains(&tokens.len()));
        if let Some(own) = tokens.get(path.len()) {
            let refused = draft.iter().any(|node| node["parent"] == before);
            let source = if refused { "correction" } else { "target" };
            assert_eq!(own["source"], source, "{round}");
        }
        let new = [!draft.is_empty() as usize, draft.len(), path.len()];
        sums.iter_mut()
            .zip(new)
            .for_each(|(sum, n)| *sum += n as u64);
    }
    sums
}

/// What `usage.speculative_decoding` counts; nothing if the request was decoded plainly.
fn in_usage(usage: &Value) -> [u64; 3] {
    let spec = &usage["speculative_decoding"];
    ["drafts", "draft_tokens", "accepted_tokens"]
        .map(|key| spec[format!("num_{key}")].as_u64().unwrap_or(0))
}

/// With every drafter and none, trees and chains, at both temperatures, with several choices: the rounds are
/// what the usage counts, and their tokens are those of the text.
#[tokio::test]
async fn rounds_are_the_text_and_the_usage() {
    for (guess, source) in [
        (Guess::Nothing, None),
        (Guess::Tables, Some("own")),
        (Guess::Ngram, Some("own")),
        (Guess::Toy(0.3), Some("model")),
    ] {
        let server = drafting(guess).await;
        let (mut drafted, mut branches, mut sources) = (0, 0, Vec::new());
        for (temperature, n, spec_length) in [(0, 1, 6), (1, 3, 6), (1, 2, 0), (0, 2, 2)] {
            let mut body = greedy("abc", 50);
            body["temperature"] = temperature.into();
            body["n"] = n.into();
            body["seed"] = 3.into();
            body["spec_length"] = spec_length.into();
            body["logprobs"] = 0.into();
            body["stream_options"] = json!({"include_usage": true});
            let without = server.stream("/v1/completions", body.clone()).await;
            let mut each = without.iter();
            assert!(each.all(|chunk| !chunk.to_string().contains("\"speculation\"")));
            body["stream_options"]["include_speculation"] = true.into();
            let chunks = server.stream("/v1/completions", body.clone()).await;
            let usage = &chunks.last().expect("a chunk")["usage"];
            let (mut sums, mut tokens) = ([0; 3], 0);
            for index in 0..n {
                let (text, finish) = joined(&chunks, index);
                assert_eq!((&text, &finish), (&joined(&without, index).0, &finish));
                let rounds = rounds(&chunks, index);
                let names = of_tokens(&rounds, "token");
                let scored: Vec<&str> = (chunks.iter())
                    .map(|chunk| &chunk["choices"][0])
                    .filter(|choice| choice["index"] == index)
                    .flat_map(|choice| list(&choice["logprobs"], "tokens"))
                    .map(|token| token.as_str().expect("a string"))
                    .collect();
                assert_eq!(names, scored);
                // An incomplete character at the end belongs to no token.
                let shown = of_tokens(&rounds, "text").concat();
                let rest = text.strip_prefix(&shown).expect("the same text");
                assert!(["", "\u{fffd}"].contains(&rest), "{rest:?}");
                let new = counted(&rounds);
                sums.iter_mut().zip(new).for_each(|(sum, n)| *sum += n);
                tokens += names.len();
                drafted += new[1];
                let nodes = rounds.iter().flat_map(|round| list(round, "draft"));
                sources.extend(nodes.map(|node| node["source"].clone()));
                for draft in rounds.iter().map(|round| list(round, "draft")) {
                    let parents = draft.iter().map(|node| &node["parent"]);
                    let next = |(i, parent): (usize, &Value)| {
                        parent.as_u64() != i.checked_sub(1).map(|i| i as u64)
                    };
                    branches += parents.enumerate().filter(|&pair| next(pair)).count();
                }
            }
            assert_eq!(sums, in_usage(usage), "{guess:?} {spec_length} {usage}");
            assert_eq!(usage["completion_tokens"], tokens);
            assert!(spec_length > 0 || sums[1] == 0);
        }
        assert_eq!(drafted > 0, source.is_some());
        assert!(
            source.is_none_or(|source| sources.contains(&source.into())),
            "{sources:?}"
        );
        assert!(guess != Guess::Tables || branches > 0, "no tree");
        server.done().await;
    }
}

/// Nothing that comes after the end of a text counts, whatever ends it.
#[tokio::test]
async fn rounds_end_with_the_text() {
    let server = drafting(Guess::Toy(0.0)).await;
    let whole = joined(
        &server.stream("/v1/completions", greedy("abc", 60)).await,
        0,
    )
    .0;
    let mut cut_in_a_draft = 0;
    for (field, value) in (0..20)
        .filter_map(|i| Some(("stop", json!(whole.get(i..i + 2)?))))
        .chain((0..EOS).map(|id| ("stop_token_ids", json!([id]))))
        .chain((1..12).map(|len| ("max_tokens", json!(len))))
    {
        let mut body = greedy("abc", 60);
        body[field] = value;
        body["stream_options"] = json!({"include_usage": true, "include_speculation": true});
        let chunks = server.stream("/v1/completions", body).await;
        let rounds = rounds(&chunks, 0);
        let usage = &chunks.last().expect("a chunk")["usage"];
        assert_eq!(counted(&rounds), in_usage(usage), "{field}");
        assert_eq!(
            usage["completion_tokens"],
            of_tokens(&rounds, "token").len()
        );
        let shown = of_tokens(&rounds, "text").concat();
        let text = joined(&chunks, 0).0;
        assert!(
            shown.starts_with(text.trim_end_matches('\u{fffd}')),
            "{shown:?} {text:?}"
        );
        let sources = of_tokens(&rounds, "source");
        cut_in_a_draft += usize::from(sources.last().is_some_and(|source| source == "model"));
    }
    assert!(
        cut_in_a_draft > 0,
        "every text ended with the target's own token"
    );
    server.done().await;
}

/// What a grammar forces is drafted under its own name; chats have the field as well.
#[tokio::test]
async fn a_chat_shows_what_its_grammar_forces() {
    let server = drafting(Guess::Tables).await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 40,
        "guided_regex": "a long and certain answer (no|yes)",
        "stream_options": {"include_usage": true, "include_speculation": true},
    });
    let chunks = server.stream("/v1/chat/completions", body).await;
    let rounds = rounds(&chunks, 0);
    assert_eq!(
        counted(&rounds),
        in_usage(&chunks.last().expect("a chunk")["usage"])
    );
    assert_eq!(of_tokens(&rounds, "text").concat(), joined(&chunks, 0).0);
    let forced = of_tokens(&rounds, "source");
    let forced = forced.iter().filter(|source| *source == "grammar").count();
    assert!(forced > 10, "{rounds:?}");
    server.done().await;
}

#[tokio::test]
async fn it_is_for_streams() {
    let server = drafting(Guess::Tables).await;
    for (stream, asked) in [(false, json!(true)), (true, json!("yes"))] {
        let mut body = greedy("abc", 5);
        body["stream"] = stream.into();
        body["stream_options"] = json!({"include_speculation": asked});
        let refused = server.post("/v1/completions", &body).await;
        let param = error(refused, 400, "invalid_value").await["param"].clone();
        let param = param.as_str().expect("a field").to_owned();
        let field = "stream_options.include_speculation";
        assert_eq!(param, if stream { field } else { "stream_options" });
    }
    server.done().await;
}
