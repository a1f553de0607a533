//! Medusa heads in the published layout.

use crate::bench::{Models, TINY};
use crate::common::plain;
use crate::common::tiny::{HIDDEN, Tensors, VOCAB, noise, write_config};
use crate::eagle_head::write_pytorch;
use crate::parallel_head::{assert_lossless, close, masked_logits, open_head, target};
use foretoken::model::MaskedBlock;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

const HEADS: usize = 3;
const BLOCKS: usize = 2;
const EPS: f64 = 1e-5;

pub fn config() -> Json {
    json!({
        "medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS,
        "base_model_name_or_path": "somebody/tiny"
    })
}

pub fn tensors() -> Tensors {
    let mut all = Tensors::new();
    let mut add = |name: String, dims: &[usize]| all.insert(name.clone(), noise(&name, dims));
    for head in 0..HEADS {
        for block in 0..BLOCKS {
            add(format!("{head}.{block}.linear.weight"), &[HIDDEN, HIDDEN]);
            add(format!("{head}.{block}.linear.bias"), &[HIDDEN]);
        }
        add(format!("{head}.{BLOCKS}.weight"), &[VOCAB, HIDDEN]);
    }
    all
}

/// A folder as published.
pub fn folder(config: &Json, tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), config);
    write_pytorch(&folder.path().join("medusa_lm_head.pt"), tensors, |_| ());
    folder
}

/// The logits of all heads at the hidden state `x`, in plain f64.
fn plain_logits(tensors: &Tensors, norm: &[f64], x: &[f64]) -> Vec<Vec<f32>> {
    let matrix = |name: String| plain::matrix(&tensors[&name]);
    let heads = (0..HEADS).map(|head| {
        let mut x = plain::rms_norm(x, norm, EPS);
        for block in 0..BLOCKS {
            let at = format!("{head}.{block}.linear");
            let product = plain::linear(&matrix(format!("{at}.weight")), &x);
            let sum = plain::add(&product, &matrix(format!("{at}.bias"))[0]);
            x = plain::add(&x, &plain::swiglu(&sum, &vec![1.; HIDDEN]));
        }
        let logits = plain::linear(&matrix(format!("{head}.{BLOCKS}.weight")), &x);
        logits.iter().map(|&logit| logit as f32).collect()
    });
    heads.collect()
}

/// Whichever forwards read the states before, and in either kind of file.
#[test]
fn logits_are_those_of_the_paper() {
    let (target, of_target) = target();
    let tensors = tensors();
    let folder = folder(&config(), &tensors);
    let states = noise("the target's hidden states", &[7, HIDDEN]);
    let norm = plain::matrix(&of_target["model.norm.weight"]).remove(0);
    let want = plain_logits(&tensors, &norm, &plain::matrix(&states)[6]);
    let compare = || {
        let mut opened = open_head(folder.path(), &*target).unwrap();
        assert_eq!(opened.reads(), [2], "the last layer's output");
        let block = MaskedBlock {
            size: HEADS + 1,
            mask: 0,
            from_anchor: false,
        };
        assert_eq!(opened.masked_block(), Some(block));
        for cuts in [&[7][..], &[3, 7], &[1, 2, 6, 7]] {
            close(&masked_logits(&mut *opened, &states, 5, cuts), &want);
        }
    };
    compare();
    std::fs::remove_file(folder.path().join("medusa_lm_head.pt")).unwrap();
    let file = folder.path().join("medusa_lm_head.safetensors");
    candle_core::safetensors::save(&tensors, file).unwrap();
    compare();
}

#[test]
fn texts_are_the_same_with_and_without_the_heads() {
    assert_lossless(folder(&config(), &tensors()).path());
}

#[test]
fn heads_that_do_not_fit_are_refused_in_one_line() {
    let refused = |config: &Json, tensors: &Tensors, needle: &str| {
        let folder = folder(config, tensors);
        let error = open_head(folder.path(), &*target().0).err().expect(needle);
        assert!(error.contains(needle) && !error.contains('\n'), "{error}");
    };
    for (key, value, needle) in [
        ("medusa_num_heads", json!(0), "medusa_num_heads must be"),
        ("medusa_num_heads", json!(64), "from 1 to 63, not 64"),
        ("medusa_num_heads", json!(4), "tensor 3.0.linear.weight"),
        ("medusa_num_heads", json!(2), "tensor 2."),
        ("medusa_num_layers", Json::Null, "medusa_num_layers must be"),
    ] {
        let mut config = config();
        config[key] = value;
        refused(&config, &tensors(), needle);
    }
    let mut narrow = tensors();
    let name = "1.0.linear.weight";
    narrow.insert(name.into(), noise(name, &[HIDDEN, HIDDEN / 2]));
    refused(&config(), &narrow, name);
}

/// As a user runs it, recognized by its configuration. The bench fails if a text changes.
#[test]
fn the_command_line_takes_medusa_heads() {
    let models = Models::new(&[("target", TINY), ("heads", &config().to_string())]);
    let flags = "--random-prompts 2 --prompt-tokens 20 --max-tokens 60 --spec-budget fixed";
    for drafter in ["", "--drafter parallel"] {
        let (_, report) = models.bench(&format!("{flags} --draft-model @heads {drafter}"));
        // Greedy texts of random weights repeat, and the tables draft them.
        let sampled = &report["temperatures"][1]["overall"];
        assert!(sampled["alpha"].as_f64().is_some(), "{report}");
        assert!(sampled["c"].as_f64().is_some_and(|c| c > 0.0), "{report}");
    }
}
