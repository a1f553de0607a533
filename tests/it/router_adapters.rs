//! Adapters behind `foretoken router`.

use crate::common::tiny_folder::{byte_level, tiny_adapter, tiny_folder};
use crate::common::wait_until;
use crate::router::{MODELS, Router, children, read};
use serde_json::{Value, json};

#[test]
fn adapters_are_answered_by_the_process_of_their_model() {
    let (model, adapter) = (tiny_folder(byte_level()), tiny_adapter());
    let text = format!(
        "{MODELS}[[model]]\nname = 'tiny'\nmodel = '{}'\nlora-modules = ['tuned={}']\n",
        model.path().display(),
        adapter.path().display(),
    );
    let router = Router::of(&text, "");
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0});
        let (status, answer) = router.post("/v1/completions", &body);
        assert_eq!((status, &answer["model"]), (200, &json!(model)), "{answer}");
        answer["choices"][0]["text"].clone()
    };
    let described = || {
        let (status, model) = read(&router.server.get("/v1/models/tuned"));
        assert_eq!((status, &model["parent"]), (200, &json!("tiny")), "{model}");
        model
    };
    assert_eq!(described()["status"], json!({"value": "unloaded"}));
    assert_ne!(ask("tuned"), ask("tiny"));
    let folder = adapter.path().display().to_string();
    let model = described();
    assert_eq!(model["root"], json!(folder));
    assert_eq!(model["status"]["value"], "loaded");
    assert_eq!(children(router.server.id()).len(), 1);
    let names: Vec<String> = router.states().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["demo", "small", "tiny", "tuned"]);
    let (_, tags) = read(&router.server.get("/api/tags"));
    assert_eq!(tags["models"][3]["name"], "tuned:latest", "{tags}");
}

#[test]
fn adapters_that_clients_load_have_names_while_their_process_runs() {
    let (model, adapter) = (tiny_folder(byte_level()), tiny_adapter());
    let text = format!(
        "{MODELS}[[model]]\nname = 'tiny'\nmodel = '{}'\nargs = ['--enable-lora', '--allow-runtime-lora-updating']\n",
        model.path().display(),
    );
    let router = Router::of(&text, "");
    // The answer to a success is a text.
    let change = |what: &str, body: Value| {
        let path = format!("/v1/{what}_lora_adapter");
        let answer = router.server.post(&path, &body.to_string());
        let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer)
    };
    let folder = adapter.path().display().to_string();
    let load = |model: Option<&str>, name: &str| {
        let body = json!({"model": model, "lora_name": name, "lora_path": folder});
        change("load", body)
    };
    let names = || -> Vec<String> { router.states().into_iter().map(|(name, _)| name).collect() };
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0});
        let (status, answer) = router.post("/v1/completions", &body);
        (status, answer["choices"][0]["text"].clone())
    };
    for (model, name, status, why) in [
        (None, "tuned", 400, "model is missing"),
        (Some("none"), "tuned", 404, "does not exist"),
        (Some("tiny"), "demo", 400, "is that of another model"),
        (Some("tiny"), "tiny", 400, "is the base model's"),
    ] {
        let (found, answer) = load(model, name);
        assert_eq!(found, status, "{answer}");
        assert!(answer.contains(why), "{answer}");
    }
    assert_eq!(ask("tuned").0, 404);
    let (status, answer) = load(Some("tiny"), "tuned");
    assert_eq!(status, 200, "{answer}");
    assert_eq!(names(), ["demo", "small", "tiny", "tuned"]);
    let (_, listed) = read(&router.server.get("/v1/models/tuned"));
    assert_eq!(listed["parent"], "tiny");
    assert_eq!(listed["root"], json!(folder));
    let (base, tuned) = (ask("tiny"), ask("tuned"));
    assert_eq!((base.0, tuned.0), (200, 200));
    assert_ne!(base, tuned);
    let (status, answer) = change("unload", json!({"lora_name": "tuned"}));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(names(), ["demo", "small", "tiny"]);
    assert_eq!(ask("tuned").0, 404);
    // They go with their process.
    assert_eq!(load(Some("tiny"), "again").0, 200);
    assert_eq!(ask("again").0, 200);
    let success = (200, json!({"success": true}));
    let unloaded = router.post("/models/unload", &json!({"model": "tiny"}));
    assert_eq!(unloaded, success);
    wait_until("its adapter is no model any more", || names().len() == 3);
    assert_eq!(ask("again").0, 404);
}
