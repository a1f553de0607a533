//! The draft that is known for a model: told by `check` and by the log, and taken with `--draft-model auto`.

use crate::common::hub::Hub;
use crate::common::process::{foretoken, refusal, refusal_line, stdout_of};
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::common::{assert_has, read_json};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

const SMOLLM2: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
const HEAD: &str = "models/heads/smollm2-135m-eagle3.Q4_1.gguf";
/// A target of the list, and its draft there.
const TARGET: &str = "Qwen2.5-7B-Instruct";
const DRAFT: &str = "Qwen/Qwen2.5-0.5B-Instruct";

/// A tiny model in a folder with the name of a published one.
fn named(name: &str) -> (TempDir, PathBuf) {
    let (home, tiny) = (tempfile::tempdir().unwrap(), tiny_folder(byte_level()));
    let folder = home.path().join(name);
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(tiny.path()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    (home, folder)
}

/// A Hub that has a tiny model as `id`.
fn hub(id: &str) -> Hub {
    let tiny = tiny_folder(byte_level());
    let entries = std::fs::read_dir(tiny.path()).unwrap();
    let files: HashMap<String, Vec<u8>> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            (format!("{id}/{name}"), std::fs::read(&path).unwrap())
        })
        .collect();
    Hub::of(files)
}

/// Runs the program with an empty cache in `home`.
fn run(args: &[&str], hub: &str, home: &Path) -> Output {
    let mut command = foretoken();
    command
        .env("HF_HOME", home.join("cache"))
        .env("HF_ENDPOINT", hub)
        .env("HF_TOKEN", "hf_test");
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.args(args).output().unwrap()
}

/// What `check` says of a model in JSON, and on stderr.
#[track_caller]
fn check(args: &[&str], hub: &str, home: &Path) -> (Value, String) {
    let flags = ["--json", "--num-blocks", "64"];
    let output = run(&[&["check"], args, &flags].concat(), hub, home);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {said}");
    (serde_json::from_slice(&output.stdout).unwrap(), said)
}

#[test]
fn a_head_beside_the_model_is_found_and_taken() {
    let home = tempfile::tempdir().unwrap();
    let nowhere = "http://127.0.0.1:9";
    let (found, _) = check(&[SMOLLM2], nowhere, home.path());
    let known = &found["known_draft"];
    assert_eq!(known["name"], HEAD, "{found}");
    assert_eq!(known["is_beside"], true);
    assert!(
        known["layout"].as_str().unwrap().starts_with("EAGLE-3"),
        "{known}"
    );
    let command = format!("foretoken {SMOLLM2} --draft-model {HEAD}");
    assert_eq!(known["command"], command);
    let table = run(&["check", SMOLLM2], nowhere, home.path()).stdout;
    let table = String::from_utf8(table).unwrap();
    let last = table.lines().last().unwrap();
    let command = format!("foretoken serve {SMOLLM2} --draft-model {HEAD}");
    assert!(last.ends_with(&command), "{table}");
    let command = format!("foretoken serve {SMOLLM2} --num-blocks 64 --draft-model {HEAD}");
    assert_eq!(found["command"], command);
    // Who chose a drafter is told of no other.
    let (found, _) = check(&[SMOLLM2, "--drafter", "tables"], nowhere, home.path());
    assert!(found["known_draft"].is_null(), "{found}");
    let command = format!("foretoken serve {SMOLLM2} --drafter tables --num-blocks 64");
    assert_eq!(found["command"], command);
    // It is taken, and what is taken is no longer told.
    for drafter in [&[][..], &["--drafter", "eagle3"]] {
        let flags = [&[SMOLLM2, "--draft-model", "auto"], drafter].concat();
        let (found, _) = check(&flags, nowhere, home.path());
        assert_eq!(found["draft"]["name"], HEAD, "{found}");
        assert!(found["known_draft"].is_null(), "{found}");
    }
    // A drafter of another kind is not asked for.
    let flags = [SMOLLM2, "--draft-model", "auto", "--drafter", "parallel"];
    let (found, said) = check(&flags, nowhere, home.path());
    assert!(found["draft"].is_null(), "{found}");
    assert!(said.contains("no draft is known for"), "{said}");
}

#[test]
fn a_published_draft_is_told_and_fetched() {
    let (home, folder) = named(TARGET);
    let model = folder.to_str().unwrap();
    let (hub, address) = hub(DRAFT).start();
    let (found, _) = check(&[model], &address, home.path());
    assert_eq!(found["known_draft"]["name"], DRAFT, "{found}");
    assert_eq!(found["known_draft"]["licence"], "Apache-2.0");
    let command = format!("foretoken {model} --draft-model {DRAFT}");
    assert_eq!(found["known_draft"]["command"], command);
    assert_eq!(
        hub.asked.load(Ordering::SeqCst),
        0,
        "the list needs no network"
    );
    let (found, _) = check(&[model, "--draft-model", "auto"], &address, home.path());
    assert_eq!(found["draft"]["name"], DRAFT, "{found}");
    // `bench` fetches it, and drafts with it.
    let json = home.path().join("report.json");
    let flags = "--num-blocks 64 --random-prompts 1 --max-tokens 8 --temperatures 0 --json";
    let flags: Vec<&str> = flags.split(' ').chain(json.to_str()).collect();
    let args = [&["bench", model, "--draft-model", "auto"], &flags[..]].concat();
    stdout_of(&run(&args, &address, home.path()));
    let report = read_json(&json);
    assert_eq!(report["subject"]["drafters"], serde_json::json!([DRAFT]));
    // Among others, too, and by now without the Hub.
    hub.gone.store(true, Ordering::SeqCst);
    let args = [&args[..], &["--drafters", "model,auto,tables"]].concat();
    stdout_of(&run(&args, &address, home.path()));
}

/// It was asked for, so it is an error, which names it.
#[test]
fn a_published_draft_that_cannot_be_had_is_an_error() {
    let (home, folder) = named(TARGET);
    let args = ["check", folder.to_str().unwrap(), "--draft-model", "auto"];
    let refused = |address: &str, needle: &str| {
        let said = refusal_line(&run(&args, address, home.path()));
        let begins = format!("error: --draft-model auto: {DRAFT}");
        assert!(said.starts_with(&begins) && said.contains(needle), "{said}");
    };
    let (other, address) = hub("org/other").start();
    refused(&address, "the Hub has no such model");
    other.gone.store(true, Ordering::SeqCst);
    refused(&address, "cannot be reached");
    let revision = [&args[..], &["--draft-revision", "v1"]].concat();
    let said = refusal(&run(&revision, &address, home.path()));
    assert_has(&said, &["leave it out with --draft-model auto"]);
}

#[test]
fn without_a_known_draft_tables_draft_and_a_line_says_so() {
    let (home, folder) = named("tiny");
    let nowhere = "http://127.0.0.1:9";
    let model = folder.to_str().unwrap();
    let args = [model, "--draft-model", "auto"];
    let (found, said) = check(&args, nowhere, home.path());
    assert!(
        found["draft"].is_null() && found["known_draft"].is_null(),
        "{found}"
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(
        lines[0].contains(&format!(
            "--draft-model auto: no draft is known for {model}"
        )),
        "{said}"
    );
    // Tables draft any id.
    let ids = home.path().join("ids");
    std::fs::write(&ids, "1 2 3").unwrap();
    let vocabulary = ["--draft-vocab", ids.to_str().unwrap()];
    let args = [&["check"], &args[..], &vocabulary].concat();
    let said = refusal(&run(&args, nowhere, home.path()));
    assert_has(
        &said,
        &["error: --draft-vocab needs a draft model, a head or an MTP layer"],
    );
    // The name that a checkpoint had is enough.
    let config = folder.join("config.json");
    let mut json = read_json(&config);
    json["_name_or_path"] = format!("Qwen/{TARGET}").into();
    std::fs::write(&config, json.to_string()).unwrap();
    let (found, _) = check(&[model], nowhere, home.path());
    assert_eq!(found["known_draft"]["name"], DRAFT, "{found}");
}
