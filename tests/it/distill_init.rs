//! `foretoken distill --init-from`: a run begins with the weights of another, if they mean the same in it.

use crate::common::distill_workshop::{VOCAB, Workshop, config, refused_with, weights};
use crate::common::refusals::merge;
use crate::common::tiny::convert;
use crate::distill_head::{OUTPUTS, options, parallel};
use candle_core::IndexOp;
use candle_core::quantized::GgmlDType;
use foretoken::train::{DistillOptions, Method, run};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// The run is refused before it writes anything, and so before the target runs over the corpus.
#[track_caller]
fn refused_at_once(options: &DistillOptions, needle: &str) {
    refused_with(options, needle);
    assert!(!options.out.exists(), "{needle}");
}

/// The GGUF file of the head `name` of `shop`.
fn converted(shop: &Workshop, name: &str) -> PathBuf {
    let out = shop.at(&format!("{name}.gguf"));
    convert(&shop.at(name), out, GgmlDType::F32).unwrap()
}

/// Runs `options` for a step, and returns those of a run that begins there.
fn followed(shop: &Workshop, options: DistillOptions) -> DistillOptions {
    let first = DistillOptions {
        steps: 1,
        ..options
    };
    run(&first).unwrap();
    DistillOptions {
        out: shop.at("next"),
        init_from: Some(first.out.clone()),
        ..first
    }
}

/// Sets keys in the `config.json` of `folder`, and returns its former content.
fn set(folder: &Path, keys: &Value) -> String {
    let file = folder.join("config.json");
    let before = fs::read_to_string(&file).unwrap();
    let mut json: Value = serde_json::from_str(&before).unwrap();
    merge(&mut json, keys);
    fs::write(file, json.to_string()).unwrap();
    before
}

#[test]
fn a_head_can_begin_with_another() {
    let shop = Workshop::new();
    let first = run(&options(&shop, "first")).unwrap();
    let mut second = options(&shop, "second");
    second.init_from = Some(shop.at("first"));
    second.steps = 2;
    let report = run(&second).unwrap();
    assert_eq!(report.untrained, first.trained);
    second.out = shop.at("third");
    second.draft_vocab_size = OUTPUTS - 1;
    refused_at_once(&second, "--draft-vocab-size 20");
}

/// A file without the folder that it was made of, as heads are shipped.
#[test]
fn a_head_can_begin_with_a_gguf_file() {
    let shop = Workshop::new();
    for (name, options) in [
        ("eagle3", options(&shop, "eagle3")),
        ("blocks", parallel(&shop, "blocks")),
    ] {
        let first = run(&options).unwrap();
        let second = DistillOptions {
            out: shop.at("second").join(name),
            init_from: Some(converted(&shop, name)),
            steps: 2,
            ..options
        };
        assert_eq!(run(&second).unwrap().untrained, first.trained, "{name}");
    }
    let mut other = options(&shop, "other");
    other.init_from = Some(shop.at("blocks.gguf"));
    refused_at_once(&other, "it is no head of this --method");
    other.method = Method::Draft;
    other.draft_config = Some(shop.at("draft.json"));
    refused_at_once(&other, "only heads");
    other.init_from = Some(shop.at("none.gguf"));
    refused_at_once(
        &DistillOptions {
            method: Method::Eagle3,
            ..other
        },
        "none.gguf",
    );
}

#[test]
fn an_eagle3_head_that_means_something_else_is_no_beginning() {
    let shop = Workshop::new();
    let next = followed(&shop, options(&shop, "first"));
    let folder = shop.at("first");
    let with = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = next.clone();
        change(&mut options);
        options
    };
    let other_taps = with(&|o| o.taps = vec![0, 2]);
    refused_at_once(&other_taps, "give --taps 0,1,2");
    let mut wide = config(VOCAB, 1, false);
    wide["intermediate_size"] = 96.into();
    fs::write(shop.at("wide.json"), wide.to_string()).unwrap();
    refused_at_once(
        &with(&|o| o.draft_config = Some(shop.at("wide.json"))),
        "midlayer.mlp.gate_proj.weight has shape [64, 32]",
    );
    refused_at_once(
        &with(&|o| (o.method, o.taps) = (Method::Parallel, vec![1, 2])),
        "it is no head of this --method",
    );
    for key in [
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ] {
        let before = set(&folder, &json!({ key: true }));
        refused_at_once(&next, &format!("its head has {key}"));
        if key == "norm_before_residual" {
            let of_file = with(&|o| o.init_from = Some(converted(&shop, "first")));
            refused_at_once(&of_file, "its head has norm_before_residual");
        }
        fs::write(folder.join("config.json"), before).unwrap();
    }
    let of_file = with(&|o| {
        o.init_from = Some(converted(&shop, "first"));
        o.taps = vec![1, 2];
    });
    refused_at_once(&of_file, "give --taps 0,1,2");

    let file = folder.join("model.safetensors");
    let mut tensors = weights(&folder);
    let embedding = tensors["lm_head.weight"].clone();
    tensors.insert("embed_tokens.weight".into(), embedding);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    refused_at_once(&next, "a tensor embed_tokens.weight");
    tensors.remove("embed_tokens.weight");
    tensors.remove("fc.weight");
    candle_core::safetensors::save(&tensors, &file).unwrap();
    refused_at_once(&next, "fc.weight");
    fs::remove_file(folder.join("config.json")).unwrap();
    refused_at_once(&next, "config.json");
}

#[test]
fn a_parallel_head_that_means_something_else_is_no_beginning() {
    let shop = Workshop::new();
    let next = followed(&shop, parallel(&shop, "first"));
    let folder = shop.at("first");
    let with = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = next.clone();
        change(&mut options);
        options
    };
    for rank in [0, 32] {
        refused_at_once(
            &with(&|o| o.markov_rank = Some(rank)),
            &format!("markov_rank of its head is 64, not {rank}"),
        );
    }
    for layers in [1, 3] {
        refused_at_once(
            &with(&|o| o.layers = Some(layers)),
            &format!("num_hidden_layers of its head is 2, but {layers}"),
        );
    }
    refused_at_once(&with(&|o| o.taps = vec![2]), "give --taps 1,2");
    let dflash2 = json!({
        "architectures": ["DFlash2DraftModel"], "conv_kernel_size": 2, "conv_group_size": 8,
        "selector_rank": 4, "selector_top_k": 4
    });
    for (keys, needle) in [
        (dflash2, "its head has conv_kernel_size"),
        (json!({ "sample_from_anchor": true }), "sample_from_anchor"),
        (
            json!({ "enable_confidence_head": true }),
            "enable_confidence_head",
        ),
        (
            json!({ "input_embedding_scale": 2.0 }),
            "input_embedding_scale",
        ),
        (json!({ "output_multiplier": 2.0 }), "output_multiplier"),
        (json!({ "markov_head_type": "gated" }), "must be vanilla"),
    ] {
        let before = set(&folder, &keys);
        refused_at_once(&next, needle);
        // A flag does not skip the check.
        refused_at_once(&with(&|o| o.markov_rank = Some(64)), needle);
        fs::write(folder.join("config.json"), before).unwrap();
    }
    let mut tensors = weights(&folder);
    let norm = tensors["layers.0.self_attn.q_proj.weight"]
        .i((0, ..8))
        .unwrap();
    tensors.insert("layers.0.self_attn.q_norm.weight".into(), norm);
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    refused_at_once(&next, "a tensor layers.0.self_attn.q_norm.weight");
}

/// A draft model is a model like any other, and begins with any model of its shape.
#[test]
fn a_draft_model_that_has_another_shape_is_refused_at_once() {
    let shop = Workshop::new();
    let next = followed(&shop, shop.options("first"));
    fs::remove_file(shop.at("first").join("config.json")).unwrap();
    run(&next).unwrap();
    let mut wide = config(VOCAB, 1, true);
    wide["intermediate_size"] = 96.into();
    fs::write(shop.at("draft.json"), wide.to_string()).unwrap();
    let other = DistillOptions {
        out: shop.at("other"),
        ..next
    };
    refused_at_once(
        &other,
        "model.layers.0.mlp.gate_proj.weight has shape [64, 32]",
    );
    let file = shop.at("first").join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    refused_at_once(&other, "first");
}
