//! The layer of a checkpoint that predicts further tokens: as its authors' code computes it, and through the engine.

use crate::architectures::{Fixture, TOLERANCE, fixture, log_softmax};
use crate::common::process::{Server, foretoken, refusal, stdout_of};
use crate::common::refusals::merge;
use crate::common::rig::{Rig, Seq, argmax, distance};
use crate::common::tiny::{Tensors, open, write_config};
use crate::common::tiny_folder::{byte_level, write_tokenizer};
use crate::common::{
    assert_has, assert_idle, chains, collect, crowded, greedy, read_json, sampled,
};
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, SpecLimits};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::LoadedModel;
use foretoken::model::{Batch, Head, LoadOptions, ModelSource, Taps, load_mtp};
use foretoken::spec::{DraftModel, Drafter};
use serde_json::{Value as Json, json};
use std::path::Path;
use tempfile::TempDir;

fn options() -> LoadOptions {
    LoadOptions::of(DType::F32)
}

fn head(path: &Path, target: &dyn LoadedModel) -> Option<Box<dyn Head>> {
    let source = match path.extension() {
        Some(_) => ModelSource::Gguf(path.to_owned().into()),
        None => ModelSource::Folder(path.to_owned()),
    };
    load_mtp(&source, &options(), target).unwrap()
}

/// The target's hidden states of all tokens of the prompt but the last.
fn states(path: &Path, prompt: &[u32]) -> Tensor {
    let model = open(path).unwrap();
    let layers = vec![model.config().num_layers()];
    let mut rig = Rig::new(model, 32, 4);
    let mut seq = Seq::default();
    let rows = prompt.len() - 1;
    rig.blocks.reserve(&mut seq.table, rows).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&prompt[..rows], &[], 0, &seq.table, 4);
    batch.taps = Some(Taps {
        layers,
        rows: (0..rows as u32).collect(),
    });
    let output = rig.model.forward(&batch, &mut rig.kv).unwrap();
    output.tapped.unwrap()
}

/// The fixtures with such a layer.
const ALL: [&str; 7] = [
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "mellum",
];

/// How far the log-probabilities of drafts of the layer of `path` are from those that the fixture has. Each draft
/// follows the fixture's tokens, so one that is wrong does not change those after it.
fn farthest(fixture: &Fixture, path: &Path) -> f32 {
    let stored = fixture.folder.join("expected.safetensors");
    let stored = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
    let drafted = stored["mtp_drafted"].to_dtype(DType::U32).unwrap();
    let drafted: Vec<u32> = drafted.to_vec1().unwrap();
    let wanted: Vec<Vec<f32>> = stored["mtp_logprobs"].to_vec2().unwrap();
    let target = open(path).unwrap();
    let mut head = head(path, &*target).unwrap();
    let mut table = BlockTable::default();
    BlockAllocator::new(16, 4).reserve(&mut table, 64).unwrap();
    let mut kv = head.new_kv(16, 4).unwrap();
    let mut features = head.fuse(&states(path, &fixture.prompt)).unwrap();
    let (mut context, mut new) = (0, fixture.prompt[1..].to_vec());
    let mut farthest = 0f32;
    for (next, wanted) in drafted.iter().zip(&wanted) {
        let mut batch = Batch::default();
        batch.push_span(&new, &[], context, &table, 4);
        batch.features = Some(features);
        batch.logits = vec![new.len() as u32 - 1];
        let output = head.forward(&batch, &mut kv).unwrap();
        let found = &output.logits.to_vec2::<f32>().unwrap()[0];
        assert_eq!(argmax(wanted), *next);
        farthest = farthest.max(distance(&log_softmax(found), wanted));
        (features, context) = (output.features.unwrap(), context + new.len());
        new = vec![*next];
    }
    farthest
}

#[track_caller]
fn compare(fixture: &Fixture, path: &Path) {
    let far = farthest(fixture, path);
    assert!(far < TOLERANCE, "{}: {far}", fixture.name());
}

#[test]
fn its_probabilities_are_those_of_the_parts_of_transformers() {
    for name in ALL {
        let fixture = fixture(name);
        compare(&fixture, &fixture.folder);
    }
}

/// llama.cpp's conversion leaves out those of DeepSeek, ERNIE and Mellum.
#[test]
fn gguf_files_have_the_same() {
    for name in ALL {
        let fixture = fixture(name);
        let (_folder, file) = fixture.converted(&fixture.conversion());
        if matches!(name, "deepseek_v3" | "ernie4_5_moe" | "mellum") {
            let target = open(&file).unwrap();
            assert!(head(&file, &*target).is_none(), "{name}");
        } else {
            compare(&fixture, &file);
        }
    }
}

/// A copy of the checkpoint of a fixture, whose tensors and configuration are changed.
fn changed(fixture: &Fixture, change: impl Fn(&mut Tensors), keys: Json) -> TempDir {
    let mut stored = fixture.stored();
    change(&mut stored);
    let folder = fixture.with_tensors(&stored);
    let mut config = read_json(fixture.folder.join("config.json"));
    merge(&mut config, &keys);
    write_config(folder.path(), &config);
    folder
}

/// The comparison sees what could be wrong: the order of the two halves of the input, each norm, and whether the layer
/// has an embedding and an output layer of its own.
#[test]
fn every_part_counts() {
    let halves = |tensor: &Tensor| {
        let parts = tensor.chunk(2, 1).unwrap();
        Tensor::cat(&[&parts[1], &parts[0]], 1).unwrap()
    };
    let ones = |tensor: &Tensor| tensor.ones_like().unwrap();
    type Change<'c> = &'c dyn Fn(&Tensor) -> Tensor;
    let (halves, ones): (Change, Change) = (&halves, &ones);
    let cases = [
        ("deepseek_v3", "model.layers.3.eh_proj", Some(halves)),
        ("deepseek_v3", "model.layers.3.enorm", Some(ones)),
        ("deepseek_v3", "model.layers.3.shared_head.norm", Some(ones)),
        ("deepseek_v3", "model.layers.3.embed_tokens", None),
        ("deepseek_v3", "model.layers.3.shared_head.head", None),
        ("deepseek_v3", "model.norm", Some(ones)),
        ("glm4_moe", "model.layers.3.eh_proj", Some(halves)),
        ("glm4_moe", "model.layers.3.hnorm", Some(ones)),
        ("glm4_moe", "model.layers.3.embed_tokens", None),
        ("glm4_moe", "model.layers.3.shared_head.head", None),
        ("glm4_moe_lite", "model.layers.3.eh_proj", Some(halves)),
        ("ernie4_5_moe", "model.mtp_linear_proj.0", Some(halves)),
        ("ernie4_5_moe", "model.mtp_emb_norm.0", Some(ones)),
        ("ernie4_5_moe", "model.mtp_hidden_norm.0", Some(ones)),
    ];
    for (name, part, change) in cases {
        let fixture = fixture(name);
        let part = format!("{part}.weight");
        let folder = changed(
            &fixture,
            |stored| {
                let tensor = stored.remove(&part).unwrap();
                if let Some(change) = change {
                    stored.insert(part.clone(), change(&tensor));
                }
            },
            json!({}),
        );
        let far = farthest(&fixture, folder.path());
        assert!(far > 100. * TOLERANCE, "{name}, {part}: {far}");
    }
}

/// Of several layers the first drafts, and the head says so.
#[test]
fn the_first_of_several_drafts() {
    let fixture = fixture("deepseek_v3");
    let two = |stored: &mut Tensors| {
        let first = stored.clone().into_iter();
        for (name, tensor) in first.filter(|(name, _)| name.starts_with("model.layers.3.")) {
            let zeros = tensor.zeros_like().unwrap();
            stored.insert(name.replace(".3.", ".4."), zeros);
        }
    };
    let folder = changed(&fixture, two, json!({"num_nextn_predict_layers": 2}));
    compare(&fixture, folder.path());
    let target = open(folder.path()).unwrap();
    let layout = |path: &Path, target| head(path, target).unwrap().layout();
    let expected = "the first of 2 layers for further tokens (MTP)";
    assert_eq!(layout(folder.path(), &*target), expected);
    let one = layout(&fixture.folder, &*fixture.open());
    assert_eq!(one, "a layer for further tokens (MTP)");
}

/// The checkpoint of a fixture with a tensor, called `name`, that no layer reads.
fn with_stray(fixture: &Fixture, name: &str) -> TempDir {
    let stray = |stored: &mut Tensors| {
        let any = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
        stored.insert(name.to_owned(), any);
    };
    changed(fixture, stray, json!({}))
}

/// What such a layer has besides is refused by its name, and so is one that lacks a part.
#[test]
fn a_layer_that_is_another_one_is_refused() {
    let refused = |folder: &TempDir, want: &str| {
        let target = open(folder.path()).unwrap();
        let source = ModelSource::Folder(folder.path().to_owned());
        let refused = load_mtp(&source, &options(), &*target).map(drop);
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains(want) && error.lines().count() == 1,
            "{error}"
        );
    };
    for (name, strays) in [
        ("deepseek_v3", &["model.layers.3.eh_proj.bias"][..]),
        ("glm4_moe", &["model.layers.3.eh_proj.bias"]),
        (
            "qwen3_5",
            &["mtp.fc.bias", "mtp.embed_tokens.weight", "mtp.layers.0.new"],
        ),
        (
            "ernie4_5_moe",
            &["model.mtp_linear_proj.0.bias", "model.mtp_new.0.weight"],
        ),
    ] {
        for stray in strays {
            let folder = with_stray(&fixture(name), stray);
            refused(&folder, &format!("tensor {stray} "));
        }
    }
    for name in ["deepseek_v3", "glm4_moe"] {
        let part = "model.layers.3.shared_head.norm.weight";
        let lacking = |stored: &mut Tensors| drop(stored.remove(part));
        refused(&changed(&fixture(name), lacking, json!({})), part);
    }
    // What is of a further layer is left out with it.
    for (name, further) in [
        ("qwen3_5", "mtp.layers.1.new"),
        ("ernie4_5_moe", "model.mtp_linear_proj.1.bias"),
    ] {
        let folder = with_stray(&fixture(name), further);
        let target = open(folder.path()).unwrap();
        assert!(head(folder.path(), &*target).is_some(), "{name}");
    }
}

/// A checkpoint without the layer has no such head, nor has one whose configuration says that it has none, or that it
/// is another one.
#[test]
fn not_every_checkpoint_has_one() {
    let plain = [
        "qwen3_next",
        "qwen3",
        "glm4_moe_plain",
        "deepseek_v3_plain",
        "deepseek_v2",
    ];
    for name in plain {
        let fixture = fixture(name);
        let target = fixture.open();
        assert!(head(&fixture.folder, &*target).is_none(), "{name}");
    }
    for (name, keys) in [
        ("qwen3_5", json!({"mtp_num_hidden_layers": 0})),
        ("qwen3_5", json!({"mtp_use_dedicated_embeddings": true})),
        ("ernie4_5_moe", json!({"num_nextn_predict_layers": 0})),
    ] {
        let folder = changed(&fixture(name), |_| (), keys.clone());
        let target = open(folder.path()).unwrap();
        assert!(head(folder.path(), &*target).is_none(), "{keys}");
    }
}

/// Its drafts, chains and trees, change no text, in batches, with chunks, preemption and a prefix cache, and some are
/// accepted.
#[test]
fn its_drafts_change_no_text() {
    for name in ALL {
        let fixture = fixture(name);
        let prompt = |kept: usize, other: u32| [&fixture.prompt[..kept], &[other, 7]].concat();
        // With so much of the noise that drafts share, even random weights agree now and then.
        let hot = |prompt: &[u32], seed: u64| {
            let mut request = sampled(prompt, 24, seed);
            request.params.temperature = 8.;
            request
        };
        let requests = vec![
            greedy(&fixture.prompt, 24),
            hot(&prompt(40, 3), 5),
            greedy(&prompt(40, 4), 24),
            hot(&prompt(13, 3), 6),
            greedy(&prompt(21, 4), 24),
        ];
        let texts = |drafter: Option<Box<dyn Drafter>>, spec: SpecLimits| {
            let options = crowded(spec, 20);
            let engine = engine::spawn(fixture.open(), drafter, 24, 4, options).unwrap();
            let mut texts = Vec::new();
            let mut accepted = 0;
            for _ in 0..2 {
                for answer in engine.submit_all(requests.clone()).unwrap() {
                    let answer = collect(answer);
                    accepted += answer.spec.accepted;
                    texts.push(answer.ids());
                }
            }
            assert_idle(&engine);
            let stats = engine.stats();
            let cached = stats.prefix_cache_hits.get();
            (texts, accepted, (stats.preemptions.get(), cached))
        };
        let (plain, ..) = texts(None, chains(3));
        assert_eq!(plain[0], fixture.greedy[..24], "{name}");
        let target = fixture.open();
        // Of a model with states drafts are chains.
        let is_recurrent = target.config().spec.is_recurrent();
        let tree = SpecLimits {
            nodes: 6,
            topk: 3,
            ..chains(3)
        };
        let limits = [Some(chains(3)), Some(tree).filter(|_| !is_recurrent)];
        for spec in limits.into_iter().flatten() {
            let head = head(&fixture.folder, &*target).unwrap();
            let drafter = DraftModel::of_head(head, 24, 4, 16).unwrap();
            let (drafted, accepted, (preempted, cached)) = texts(Some(Box::new(drafter)), spec);
            assert_eq!(drafted, plain, "{name}");
            assert!(preempted > 0, "{name}: none was preempted");
            assert!(cached > 0, "{name}: nothing was cached");
            assert!(accepted > 0, "{name}: none accepted");
        }
    }
}

/// As a user runs it, without a flag: `check` names it, the log says that it drafts, and no text changes.
#[test]
fn it_drafts_without_a_flag() {
    for name in ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe"] {
        let fixture = fixture(name);
        let folder = changed(&fixture, |_| (), json!({}));
        write_tokenizer(folder.path(), byte_level());
        let path = folder.path().to_str().unwrap();
        let checked = foretoken()
            .args(["check", path, "--json"])
            .output()
            .unwrap();
        let checked: Json = serde_json::from_slice(&checked.stdout).unwrap();
        assert_eq!(checked["draft"]["name"], "mtp", "{name}: {checked}");

        let log = tempfile::NamedTempFile::new().unwrap();
        let flags = format!(
            "--model {path} --served-model-name m --spec-budget fixed --spec-length 3 --dtype f32"
        );
        let server = Server::start_logging(&flags, "foretoken=info", log.reopen().unwrap());
        let ask = |more: Json| {
            let mut body = json!({
                "model": "m", "prompt": fixture.prompt, "max_tokens": 24, "temperature": 0,
                "ignore_eos": true, "return_token_ids": true
            });
            merge(&mut body, &more);
            server.json("/v1/completions", &body)["choices"][0]["token_ids"].clone()
        };
        let plain = ask(json!({"spec_length": 0}));
        assert_eq!(ask(json!({})), plain, "{name}");
        assert_eq!(plain, json!(fixture.greedy[..24]), "{name}");
        let metrics = server.get("/metrics");
        let drafted = "foretoken:spec_decode_num_draft_tokens_by_source_total{";
        let mut lines = metrics.lines().filter(|line| line.starts_with(drafted));
        let is_counted =
            lines.any(|line| line.contains("source=\"model\"") && !line.ends_with(" 0"));
        assert!(is_counted, "{name}: {metrics}");
        let log = std::fs::read_to_string(log.path()).unwrap();
        let said = "drafts for itself: a layer for further tokens (MTP)";
        assert!(log.contains(said), "{name}: {log}");
    }
}

/// A layer that cannot be loaded stops nothing without a flag, and `check` and the log say the same of it.
#[test]
fn the_reason_why_it_does_not_draft_is_said() {
    let folder = with_stray(&fixture("deepseek_v3"), "model.layers.3.eh_proj.bias");
    write_tokenizer(folder.path(), byte_level());
    let path = folder.path().to_str().unwrap();
    let check = |flags: &[&str]| {
        let output = foretoken().args(["check", path]).args(flags).output();
        let output = output.unwrap();
        let is_done = output.status.success();
        let said = if is_done {
            output.stdout
        } else {
            output.stderr
        };
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let why = "--drafter mtp: tensor model.layers.3.eh_proj.bias ";
    let (_, report) = check(&["--json"]);
    let report: Json = serde_json::from_str(&report).unwrap();
    let said = report["draft_refused"].as_str().unwrap();
    assert!(
        said.contains("tables draft") && said.contains(why),
        "{said}"
    );
    assert_eq!(report["draft"], Json::Null);
    let (code, table) = check(&[]);
    assert!(code == Some(0) && table.contains(said), "{table}");

    let log = tempfile::NamedTempFile::new().unwrap();
    let flags = format!("--model {path} --dtype f32");
    let file = log.reopen().unwrap();
    drop(Server::start_logging(&flags, "foretoken=info", file));
    let log = std::fs::read_to_string(log.path()).unwrap();
    assert!(log.contains(said), "{log}");

    let (code, error) = check(&["--drafter", "mtp"]);
    assert!(code == Some(2) && error.contains(why), "{error}");
    let (_, report) = check(&["--drafter", "tables", "--json"]);
    assert!(!report.contains("draft_refused"), "{report}");
}

/// The report of a benchmark names what drafted, and random weights have the layer, too.
#[test]
fn a_benchmark_says_that_it_drafts() {
    for name in ["deepseek_v3", "qwen3_5", "ernie4_5_moe"] {
        let folder = tempfile::tempdir().unwrap();
        let config = fixture(name).folder.join("config.json");
        std::fs::copy(config, folder.path().join("config.json")).unwrap();
        let path = folder.path().to_str().unwrap();
        let bench = foretoken()
            .args(["bench", path, "--load-format", "dummy"])
            .args(["--random-prompts", "1"])
            .output()
            .unwrap();
        let said = stdout_of(&bench);
        assert!(said.contains("drafted by mtp"), "{name}: {said}");
    }
}

/// A model without such a layer does not take the flag.
#[test]
fn the_flag_needs_such_a_layer() {
    let folder = changed(&fixture("glm4_moe_plain"), |_| (), json!({}));
    write_tokenizer(folder.path(), byte_level());
    let path = folder.path().to_str().unwrap();
    let serve = ["serve", "--model", path, "--port", "0"];
    let check = ["check", path];
    for command in [&serve[..], &check[..]] {
        let mut run = foretoken();
        let refused = run.args(command).args(["--drafter", "mtp"]).output();
        let error = refusal(&refused.unwrap());
        assert!(error.contains("has no layer for further tokens"), "{error}");
    }
}

/// Its states are not cut back to what was accepted, so it drafts neither for others nor for itself.
#[test]
fn a_model_with_states_cannot_draft() {
    let target = fixture("qwen3_5").open();
    for model in [fixture("qwen3_5").open(), target.subset(&[0, 3]).unwrap()] {
        let refused = DraftModel::new(model, 24, 4, 16).map(drop);
        let error = refused.unwrap_err().to_string();
        assert_has(&error, &["linear attention or Mamba cannot draft"]);
    }
    // The layers with attention alone can.
    DraftModel::new(target.subset(&[3]).unwrap(), 24, 4, 16).unwrap();
}
