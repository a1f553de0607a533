//! `/v1/rerank` and `/v1/score`: embedding models, models that answer yes or no, refusals.

use crate::architectures::{Named, fixture, write_gguf};
use crate::common::assert_has;
use crate::common::hooked::edited;
use crate::common::refusals::{merge, parsed, rows};
use crate::common::scripted::{self, MAX_LEN, PLAIN, VOCAB, serve, start};
use crate::common::server::{Server, error};
use crate::common::tiny::{noise, open};
use crate::embeddings::folder;
use foretoken::engine::{self, EngineOptions};
use foretoken::http::AppState;
use foretoken::model::toy::ToyModel;
use foretoken::model::{EmbeddingSpec, Model, ModelSource, Pooling, RerankerSpec, reranker_spec};
use foretoken::text::Text;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";

/// A template that knows the roles of a pair.
const PAIRS: &str = "{% set q = messages | selectattr('role', 'eq', 'query') | first %}{% set d = messages | selectattr('role', 'eq', 'document') | first %}{% for m in messages if m.role == 'system' %}{{ m.content }}: {% endfor %}{{ q.content }}? {{ d.content }}<|im_end|>";

/// A server over the embedding model of the fixture: letters from `a` are ids from 0.
async fn embedding() -> Server {
    let options = EngineOptions::default();
    let engine = engine::spawn(open(&folder()).expect("opens"), None, 64, 4, options);
    let spec = Some(EmbeddingSpec::new(Pooling::Last, true));
    Server::over(engine.expect("starts"), |s| s.with_embeddings(spec)).await
}

async fn embedded(server: &Server, text: &str) -> Vec<f64> {
    let reply = server.json("/v1/embeddings", &json!({"input": text})).await;
    serde_json::from_value(reply["data"][0]["embedding"].clone()).expect("numbers")
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn near(found: &Value, expected: f64) {
    let found = found.as_f64().expect("a number");
    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
}

#[tokio::test]
async fn embeddings_rank_by_their_cosines() {
    let server = embedding().await;
    let documents = ["hello", "abc", "b", "zzz"];
    let query = embedded(&server, "abc").await;
    let mut expected = Vec::new();
    for (index, document) in documents.iter().enumerate() {
        let score = dot(&query, &embedded(&server, document).await);
        expected.push((index, score));
    }
    let body = json!({"model": "toy", "query": "abc", "documents": documents});
    let reply = server.json(RERANK, &body).await;
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(expected[0].0, 1);
    let results = reply["results"].as_array().expect("a list");
    assert_eq!(results.len(), 4);
    for (result, (index, score)) in results.iter().zip(&expected) {
        assert_eq!(result["index"], json!(index));
        assert_eq!(result["document"], json!({"text": documents[*index]}));
        near(&result["relevance_score"], *score);
    }
    assert_eq!(reply["model"], "toy");
    let wanted = json!({"prompt_tokens": 15, "total_tokens": 15});
    assert_eq!(reply["usage"], wanted);
    // Other names of the route, and of a document.
    for path in ["/rerank", "/v2/rerank", "/v1/reranking", "/reranking"] {
        let body = json!({"query": "abc", "top_n": 2, "return_documents": false,
            "documents": [{"text": "hello"}, "abc", {"text": "b"}, "zzz"]});
        let short = server.json(path, &body).await["results"].clone();
        assert_eq!(short.as_array().map(Vec::len), Some(2));
        let want = json!({"index": 1, "relevance_score": results[0]["relevance_score"]});
        assert_eq!(short[0], want);
    }
    // In the form of Text Embeddings Inference.
    let body = json!({"query": "abc", "texts": documents, "truncate": true, "raw_scores": false});
    let list = server.json("/rerank", &body).await;
    assert_eq!(list.as_array().map(Vec::len), Some(4));
    assert_eq!(
        list[0],
        json!({"index": 1, "score": results[0]["relevance_score"]})
    );
    let long = format!("abc{}", "d".repeat(300));
    let body = json!({"query": "abc", "texts": [long], "truncate": true, "return_text": true});
    let list = server.json("/rerank", &body).await;
    assert_eq!(list[0]["text"], json!(long));
    let kept = embedded(&server, &long[..256]).await;
    near(&list[0]["score"], dot(&query, &kept));
    let cut = json!({"query": "abc", "documents": ["abcdef"], "max_tokens_per_doc": 3});
    let cut = server.json(RERANK, &cut).await["results"][0].clone();
    near(&cut["relevance_score"], 1.0);
    assert_eq!(cut["document"]["text"], "abcdef");

    let scores = async |body: Value| {
        let reply = server.json(SCORE, &body).await;
        assert_eq!(reply["object"], "list");
        let data = reply["data"].as_array().expect("a list").clone();
        data.into_iter()
            .enumerate()
            .map(|(index, one)| {
                assert_eq!(one["index"], json!(index));
                assert_eq!(one["object"], "score");
                one["score"].clone()
            })
            .collect::<Vec<_>>()
    };
    let all = scores(json!({"text_1": "abc", "text_2": documents})).await;
    for (index, score) in &expected {
        near(&all[*index], *score);
    }
    for (first, second) in [
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ] {
        let found = scores(json!({first: ["abc"], second: documents})).await;
        assert_eq!(found, all);
    }
    let pairs = scores(json!({"text_1": ["b", "abc"], "text_2": ["b", "zzz"]})).await;
    near(&pairs[0], 1.0);
    assert_eq!(pairs[1], all[3]);
    assert_eq!(scores(json!({"text_1": "b", "text_2": "b"})).await.len(), 1);
    server.done().await;
}

/// Routes, bodies and the field that an error names.
const REFUSED: &str = r#"
/v1/rerank | {"documents": ["a"]} | query
/v1/rerank | {"query": "a"} | documents
/v1/rerank | {"query": "a", "documents": []} | documents
/v1/rerank | {"query": "a", "documents": [""]} | documents
/v1/rerank | {"query": "", "documents": ["a"]} | query
/v1/rerank | {"query": "a", "texts": [""]} | texts
/v1/rerank | {"query": "a", "texts": ["a"], "documents": ["a"]} | texts
/v1/rerank | {"query": "a", "texts": ["a"], "truncation_direction": "Left"} | truncation_direction
/v1/rerank | {"query": "a", "documents": ["a"], "instruct": "x"} | instruction
/v1/rerank | {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0} | max_tokens_per_doc
/v1/rerank | {"query": "a", "documents": ["a"], "use_activation": false} | use_activation
/v1/score | {"text_2": "a"} | text_1
/v1/score | {"text_1": "a", "queries": "a", "text_2": "a"} | queries
/v1/score | {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]} | text_1
/v1/score | {"text_1": "a", "documents": []} | documents
"#;

#[tokio::test]
async fn what_cannot_be_ranked_is_refused_by_name() {
    let server = embedding().await;
    let long = "ab".repeat(200);
    let all = rows::<3>(REFUSED).map(|[path, body, param]| (path, parsed(body), param));
    let many = json!({"query": "a", "documents": vec!["a"; 2049]});
    for (path, body, param) in all.chain([(RERANK, many, "documents")]) {
        let error = server.refused(path, &body).await;
        assert_eq!(error["param"], param, "{error}");
    }
    for documents in [
        json!([{"image": "x"}]),
        json!([{"text": "a", "image": "x"}]),
        json!([1]),
    ] {
        let body = json!({"query": "a", "documents": documents});
        let error = server.refused(RERANK, &body).await;
        let message = error["message"].as_str().expect("text");
        assert_has(message, &["a string, or an object with text"]);
    }
    let body = json!({"query": "a", "documents": ["a", long]});
    let too_long = error(
        server.post(RERANK, &body).await,
        400,
        "context_length_exceeded",
    )
    .await;
    assert_eq!(too_long["param"], "documents");
    let body = json!({"query": "a", "documents": ["a"], "model": "x"});
    error(server.post(RERANK, &body).await, 404, "model_not_found").await;
    server.done().await;

    let plain = Server::start().await;
    for (path, body) in [
        (RERANK, json!({"query": "a", "documents": ["a"]})),
        (SCORE, json!({"text_1": "a", "text_2": "a"})),
    ] {
        let error = plain.refused(path, &body).await;
        let message = error["message"].as_str().expect("text");
        assert_has(message, &["--pooling last", "--reranker"]);
    }
    plain.done().await;
}

/// The tokens of the two answers.
fn answers() -> [u32; 2] {
    let text = scripted::text(PLAIN);
    ["y", "n"].map(|word| text.encode(word, false).expect("encodes")[0])
}

/// A server over a model of bytes that judges. If `sure`, both answers are among its most probable tokens; otherwise they
/// are anywhere.
async fn judge(template: &str, sure: bool) -> Server {
    let [yes, no] = answers();
    let toy = ToyModel::new(VOCAB, MAX_LEN, 1, 0.0);
    let model: Box<dyn Model> = edited(toy, move |_, _, logits| {
        if sure {
            logits[yes as usize] += 20.0;
            logits[no as usize] += 20.0;
        }
    });
    serve(start(model, None), template, |s| {
        s.with_reranker(Some(RerankerSpec::Answer { yes, no }))
    })
    .await
}

/// The softmax of the two answers' logits after `prompt`, as completions tell them.
async fn expected(server: &Server, prompt: &str) -> f64 {
    let mut logprobs = Vec::new();
    for token in answers() {
        let body = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 0, "temperature": 0,
            "allowed_token_ids": [token], "add_special_tokens": false});
        let reply = server.json("/v1/completions", &body).await;
        let logprob = &reply["choices"][0]["logprobs"]["token_logprobs"][0];
        logprobs.push(logprob.as_f64().expect("a number"));
    }
    1.0 / (1.0 + (logprobs[1] - logprobs[0]).exp())
}

fn qwen(instruction: &str, query: &str, document: &str) -> String {
    let system = "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".";
    format!(
        "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}

const WEB: &str = "Given a web search query, retrieve relevant passages that answer the query";

#[tokio::test]
async fn a_model_that_answers_ranks_by_the_probability_of_yes() {
    let documents = ["Paris.", "It rains", "é \u{1F600}", "Ein Fluß", "no", "yes"];
    for sure in [true, false] {
        let server = judge(PLAIN, sure).await;
        let body = json!({"query": "Where?", "documents": documents});
        let reply = server.json(RERANK, &body).await;
        let mut tokens = 0;
        let mut last = f64::INFINITY;
        for result in reply["results"].as_array().expect("a list") {
            let index = result["index"].as_u64().expect("an index") as usize;
            let prompt = qwen(WEB, "Where?", documents[index]);
            near(&result["relevance_score"], expected(&server, &prompt).await);
            let score = result["relevance_score"].as_f64().expect("a number");
            assert!((0.0..=1.0).contains(&score) && score <= last);
            last = score;
            let text = json!({"prompt": prompt, "add_special_tokens": false});
            tokens += server.json("/tokenize", &text).await["count"]
                .as_u64()
                .expect("a number");
        }
        assert_eq!(reply["usage"]["prompt_tokens"], json!(tokens));
        let info = server.read("/info").await;
        let labels = json!({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}});
        assert_eq!(info["model_type"], json!({"reranker": labels}));
        assert_eq!(info["max_input_length"], MAX_LEN - 1);
        for field in ["instruct", "instruction"] {
            let mut body = json!({"text_1": "Where?", "text_2": ["Paris."]});
            body[field] = "Find capitals".into();
            let reply = server.json(SCORE, &body).await;
            let prompt = qwen("Find capitals", "Where?", "Paris.");
            near(&reply["data"][0]["score"], expected(&server, &prompt).await);
        }
        server.done().await;
    }
}

/// As Text Embeddings Inference has it. The question is never cut off.
#[tokio::test]
async fn the_ends_of_documents_that_do_not_fit_are_cut_off_if_that_is_asked_for() {
    let server = judge(PLAIN, true).await;
    let long = "a".repeat(MAX_LEN);
    let mut body = json!({"query": "Where?", "texts": [long, "Paris."]});
    let refused = server.post(RERANK, &body).await;
    let refused = error(refused, 400, "context_length_exceeded").await;
    assert_eq!(refused["param"], "texts");
    body["truncate"] = true.into();
    let list = server.json(RERANK, &body).await;
    assert_eq!(list.as_array().map(Vec::len), Some(2));
    let body = json!({"query": long, "texts": ["Paris."], "truncate": true});
    let refused = server.refused(RERANK, &body).await;
    assert_eq!(refused["param"], "query");
    server.done().await;
}

#[tokio::test]
async fn a_template_with_the_roles_of_a_pair_makes_the_prompt() {
    let server = judge(PAIRS, true).await;
    let score = async |more: Value| {
        let mut body = json!({"text_1": "Where", "text_2": "Paris"});
        merge(&mut body, &more);
        server.json(SCORE, &body).await["data"][0]["score"].clone()
    };
    near(
        &score(json!({})).await,
        expected(&server, "Where? Paris<|im_end|>").await,
    );
    let with = score(json!({"instruction": "Geography"})).await;
    near(
        &with,
        expected(&server, "Geography: Where? Paris<|im_end|>").await,
    );
    // The end of the document is cut off.
    let short = expected(&server, "Where? Par<|im_end|>").await;
    near(&score(json!({"max_tokens_per_doc": 3})).await, short);
    near(&score(json!({"truncate_prompt_tokens": 11})).await, short);
    let body = json!({"text_1": "Where", "text_2": "Paris", "truncate_prompt_tokens": 7});
    let refused = server.refused(SCORE, &body).await;
    assert_eq!(refused["param"], "truncate_prompt_tokens");
    let body = json!({"text_1": "Where", "text_2": "x".repeat(5000)});
    let refused = error(
        server.post(SCORE, &body).await,
        400,
        "context_length_exceeded",
    )
    .await;
    assert_eq!(refused["param"], "text_2");
    server.done().await;
}

/// The values of the layer for classification of [`write_ranker`].
fn classifier() -> Vec<Vec<f32>> {
    let values = noise("cls.output.weight", &[2, 32]);
    values.to_vec2().expect("a matrix")
}

/// Adds a layer for classification. The conversion leaves the output layer out.
fn with_layer<const OUTPUTS: usize>(all: Named) -> Named {
    let name = "cls.output.weight";
    let layer = (name.to_owned(), noise(name, &[OUTPUTS, 32]));
    let others = all.into_iter().filter(|(name, _)| name != "output.weight");
    others.chain([layer]).collect()
}

/// Writes a Qwen3 whose pooling type is rank as llama.cpp's conversion does, with a tokenizer of bytes. `change` has the
/// last word on its tensors.
fn write_ranker(file: &Path, template: &str, change: fn(Named) -> Named) {
    let fixture = fixture("qwen3");
    let mut how = fixture.conversion();
    let mut tokens: Vec<String> = ByteLevel::alphabet()
        .into_iter()
        .map(String::from)
        .collect();
    tokens.sort_unstable();
    tokens[255] = "ab".into();
    let more = json!({
        "qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": vec![1; 256], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template.rerank": template,
    });
    merge(&mut how["metadata"], &more);
    write_gguf(&fixture, &how, file, change);
}

#[tokio::test]
async fn a_gguf_file_with_a_layer_for_classification_ranks_by_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ranker.gguf");
    let source = ModelSource::Gguf(file.as_path().into());
    // The softmax of one output tells nothing.
    type Change = fn(Named) -> Named;
    let refused: [(Change, &str); 2] = [(|all| all, "has []"), (with_layer::<1>, "has [1, 32]")];
    for (change, has) in refused {
        write_ranker(&file, "", change);
        let error = reranker_spec(&source).expect_err("no layer").to_string();
        assert!(
            error.contains("cls.output.weight") && error.ends_with(has),
            "{error}"
        );
    }

    write_ranker(&file, "Q {query} D {document} A", with_layer::<2>);
    let spec = reranker_spec(&source).expect("reads").expect("it ranks");
    let text = Text::from_gguf(file.as_path()).expect("a tokenizer");
    let options = EngineOptions::default();
    let engine = engine::spawn(open(&file).expect("opens"), None, 64, 4, options).expect("starts");
    let state = AppState::new(engine.clone(), Arc::new(text), vec!["toy".into()]);
    let raw = EmbeddingSpec::new(Pooling::Last, false);
    let state = state.with_reranker(Some(spec)).with_embeddings(Some(raw));
    let server = Server::over(engine, |_| state).await;
    // The softmax of the layer's outputs after the last hidden state.
    let expected = async |prompt: &str| {
        let hidden = embedded(&server, prompt).await;
        let output = |row: &Vec<f32>| -> f64 {
            let products = row.iter().zip(&hidden).map(|(w, x)| f64::from(*w) * x);
            products.sum::<f64>().exp()
        };
        let [yes, no] = &classifier()[..] else {
            panic!("two outputs");
        };
        output(yes) / (output(yes) + output(no))
    };
    let documents = ["abc", "{query}", "zz top", "\u{e9}"];
    let body = json!({"text_1": "where {document}", "text_2": documents});
    let reply = server.json(SCORE, &body).await;
    let mut scores = Vec::new();
    for (at, document) in documents.iter().enumerate() {
        let prompt = format!("Q where {{document}} D {document} A");
        let score = expected(&prompt).await;
        near(&reply["data"][at]["score"], score);
        scores.push(score);
    }
    assert!(scores.iter().all(|score| (0.0..1.0).contains(score)));
    let body = json!({"query": "where {document}", "documents": documents});
    let ranking = server.json(RERANK, &body).await;
    let best = scores.iter().copied().fold(f64::MIN, f64::max);
    near(&ranking["results"][0]["relevance_score"], best);
    let body = json!({"query": "a", "documents": ["b"], "instruction": "c"});
    let refused = error_of(&server, &body).await;
    assert_eq!(refused, "instruction");
    server.done().await;
}

/// The field that a refused ranking names.
async fn error_of(server: &Server, body: &Value) -> Value {
    let refused = server.refused(RERANK, body).await;
    refused["param"].clone()
}
