//! Checkpoints with experts: how their tensors may be stored, and what is refused. That they compute what transformers
//! computes is tested with all [architectures](crate::architectures).

use crate::architectures::{Fixture, TOLERANCE, fixture, fixtures};
use crate::common::read_json;
use crate::common::refusals::{assert_refused, merge};
use crate::common::rig::{Rig, Seq, distance};
use crate::common::tiny::{dummy, open, write_config};
use candle_core::quantized::gguf_file::{self, Content};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use foretoken::error::Error;
use foretoken::model::{ExpertsSpec, LoadOptions, ModelConfig, ModelSource, inspect, load};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

/// The fixtures with experts.
fn with_experts() -> Vec<Fixture> {
    let has = |fixture: &Fixture| {
        let config = ModelConfig::from_json(&fixture.folder).unwrap();
        config.spec.layers.iter().any(|l| l.experts().is_some())
    };
    let found: Vec<Fixture> = fixtures().into_iter().filter(has).collect();
    assert!(found.len() > 1);
    found
}

/// Moves a tensor of one expert to the name without its number; returns whether it is one.
fn stack(name: &str, names: [(&str, &str); 6]) -> Option<(String, usize)> {
    let (layer, rest) = name.split_once(".experts.")?;
    let (number, part) = rest.split_once('.')?;
    let (_, part) = names.iter().find(|(theirs, _)| *theirs == part)?;
    Some((format!("{layer}.experts.{part}"), number.parse().ok()?))
}

/// The classes of transformers 5 have the matrices of all experts as one tensor, gates before ups.
#[test]
fn experts_as_one_tensor_compute_the_same() {
    let mut count = 0;
    for fixture in with_experts() {
        let stored = fixture.stored();
        let (parts, mut others): (HashMap<_, _>, HashMap<_, _>) = stored
            .into_iter()
            .partition(|(name, _)| stack(name, PARTS).is_some());
        if parts.is_empty() {
            continue;
        }
        let mut stacks: HashMap<String, Vec<(usize, Tensor)>> = HashMap::new();
        for (name, tensor) in parts {
            let (name, number) = stack(&name, PARTS).unwrap();
            stacks.entry(name).or_default().push((number, tensor));
        }
        let joined = stacks.into_iter().map(|(name, mut parts)| {
            parts.sort_by_key(|(number, _)| *number);
            let parts: Vec<&Tensor> = parts.iter().map(|(_, tensor)| tensor).collect();
            (name, Tensor::stack(&parts, 0).unwrap())
        });
        let joined: HashMap<String, Tensor> = joined.collect();
        for (name, gate) in &joined {
            if let Some(layer) = name.strip_suffix("gate_proj") {
                let up = &joined[&format!("{layer}up_proj")];
                let both = Tensor::cat(&[gate, up], 1).unwrap();
                others.insert(format!("{layer}gate_up_proj"), both);
            } else if name.ends_with("down_proj") || !joined.contains_key(&gate_of(name)) {
                others.insert(name.clone(), gate.clone());
            }
        }
        // The class has this name for Mixtral's, too.
        let others = others.into_iter();
        let others: HashMap<String, Tensor> = others
            .map(|(name, tensor)| (name.replace("block_sparse_moe", "mlp"), tensor))
            .collect();
        let folder = fixture.with_tensors(&others);
        let model = open(folder.path()).unwrap();
        fixture.compare(model, TOLERANCE).unwrap();
        count += 1;
    }
    assert!(count > 1);
}

/// Qwen3-VL with experts is Qwen 3 with experts under other names, in tensors that have inputs before outputs. Its GGUF
/// files have another name for the architecture.
#[test]
fn the_decoder_of_qwen3_vl_computes_what_qwen3_does() {
    let fixture = fixture("qwen3_moe");
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| read_json(fixture.folder.join(name));
    let mut text = read("config.json");
    let keys = text.as_object_mut().unwrap();
    keys.remove("architectures");
    keys.remove("norm_topk_prob");
    text["model_type"] = json!("qwen3_vl_moe_text");
    text["rope_parameters"]["mrope_section"] = json!([2, 1, 1]);
    text["rope_parameters"]["mrope_interleaved"] = json!(true);
    let config = json!({
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 250,
        "text_config": text, "tie_word_embeddings": false, "video_token_id": 251, "vision_config": { "depth": 1 },
        "vision_end_token_id": 252, "vision_start_token_id": 253
    });
    write_config(folder.path(), &config);

    let stored = fixture.stored();
    let (parts, others): (HashMap<_, _>, HashMap<_, _>) =
        (stored.into_iter()).partition(|(name, _)| name.contains(".experts."));
    let inside = |name: &str| name.replace("model.", "model.language_model.");
    let others = others.into_iter();
    let mut tensors: HashMap<String, Tensor> = others
        .map(|(name, tensor)| (inside(&name), tensor))
        .collect();
    for layer in 0..2 {
        let experts = format!("model.layers.{layer}.mlp.experts");
        let columns = |names: &[&str]| {
            let one = |i: usize| {
                let parts =
                    (names.iter()).map(|name| &parts[&format!("{experts}.{i}.{name}.weight")]);
                let rows = Tensor::cat(&parts.collect::<Vec<_>>(), 0).unwrap();
                rows.t().unwrap().contiguous().unwrap()
            };
            Tensor::stack(&(0..8).map(one).collect::<Vec<_>>(), 0).unwrap()
        };
        let experts = inside(&experts);
        let gate_up = columns(&["gate_proj", "up_proj"]);
        tensors.insert(format!("{experts}.gate_up_proj"), gate_up);
        tensors.insert(format!("{experts}.down_proj"), columns(&["down_proj"]));
    }
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let model = open(folder.path()).unwrap();
    fixture.compare(model, TOLERANCE).unwrap();

    let how = read("gguf.json").to_string();
    let how = how.replace("qwen3moe", "qwen3vlmoe");
    let mut how: Json = serde_json::from_str(&how).unwrap();
    how["metadata"]["qwen3vlmoe.n_deepstack_layers"] = json!(3);
    let (_folder, file) = fixture.converted(&how);
    fixture.compare(open(&file).unwrap(), TOLERANCE).unwrap();
}

/// The name of the gate of what is called `up`.
fn gate_of(up: &str) -> String {
    up.replace("up_proj", "gate_proj")
}

/// The names of the products of an expert: as they are stored, and of the class.
const PARTS: [(&str, &str); 6] = [
    ("gate_proj.weight", "gate_proj"),
    ("up_proj.weight", "up_proj"),
    ("down_proj.weight", "down_proj"),
    ("w1.weight", "gate_proj"),
    ("w3.weight", "up_proj"),
    ("w2.weight", "down_proj"),
];

fn read(folder: &Path, change: Json) -> Result<ModelConfig, Error> {
    let mut config = json!({
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2
    });
    merge(&mut config, &change);
    write_config(folder, &config);
    ModelConfig::from_json(folder)
}

/// The experts of each layer.
fn experts(config: &ModelConfig) -> Vec<Option<ExpertsSpec>> {
    let layers = config.spec.layers.iter();
    layers.map(|layer| layer.experts().copied()).collect()
}

/// The keys of published files, besides sizes.
#[test]
fn published_configs_with_experts_are_read() {
    let folder = tempfile::tempdir().unwrap();
    // Qwen3-30B-A3B.
    let qwen3 = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
        "decoder_sparse_step": 1, "head_dim": 64, "hidden_act": "silu", "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001, "sliding_window": null, "use_sliding_window": false
    });
    let found = experts(&read(folder.path(), qwen3).unwrap());
    let of_all = found[0].unwrap();
    assert_eq!(found, [Some(of_all); 4]);
    let sizes = (of_all.count, of_all.per_token, of_all.width);
    assert_eq!(sizes, (128, 8, 768));
    assert!(of_all.is_normalized);
    // What the class assumes.
    let bare = json!({ "architectures": ["Qwen3MoeForCausalLM"] });
    let bare = experts(&read(folder.path(), bare).unwrap())[0].unwrap();
    let not_normalized = ExpertsSpec {
        is_normalized: false,
        ..of_all
    };
    assert_eq!(bare, not_normalized);
    // Mixtral 8x7B.
    let mixtral = json!({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": null
    });
    let found = experts(&read(folder.path(), mixtral).unwrap())[0].unwrap();
    let sizes = (found.count, found.per_token, found.width);
    assert_eq!(sizes, (8, 2, 512));
    assert!(found.is_normalized);
    // OLMoE-1B-7B.
    let olmoe = json!({
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": false, "clip_qkv": null,
        "hidden_act": "silu", "norm_topk_prob": false, "num_experts": 64, "num_experts_per_tok": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01
    });
    let found = experts(&read(folder.path(), olmoe.clone()).unwrap())[0].unwrap();
    let sizes = (found.count, found.per_token, found.width);
    assert_eq!(sizes, (64, 8, 512));
    assert!(!found.is_normalized);
    let mut clipped = olmoe;
    clipped["clip_qkv"] = json!(8.0);
    let error = read(folder.path(), clipped).unwrap_err().to_string();
    assert!(error.contains("clip_qkv 8.0 is not supported"), "{error}");
    // Qwen2-57B-A14B.
    let qwen2 = json!({
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
        "hidden_act": "silu", "max_window_layers": 28, "moe_intermediate_size": 2560, "norm_topk_prob": false,
        "num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": false, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 20480,
        "sliding_window": 65536, "use_sliding_window": false
    });
    let found = read(folder.path(), qwen2).unwrap();
    assert!(found.spec.layers[0].qkv_bias && found.spec.layers[0].window.is_none());
    let found = experts(&found)[0].unwrap();
    let sizes = (found.count, found.per_token, found.width);
    assert_eq!(sizes, (64, 8, 2560));
    let shared = found.shared.unwrap();
    assert_eq!((shared.width, shared.has_gate), (20480, true));
    assert!(!found.is_normalized);
    // Granite 3.1 3B-A800M.
    let granite = json!({
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_bias": false,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 6.0,
        "num_experts_per_tok": 8, "num_local_experts": 40, "output_router_logits": false,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e7,
        "router_aux_loss_coef": 0.0, "tie_word_embeddings": true
    });
    let found = experts(&read(folder.path(), granite).unwrap())[0].unwrap();
    let sizes = (found.count, found.per_token, found.width);
    assert_eq!(sizes, (40, 8, 512));
    let some = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2, "mlp_only_layers": [3],
    });
    let some = experts(&read(folder.path(), some).unwrap());
    let has: Vec<bool> = some.iter().map(Option::is_some).collect();
    assert_eq!(has, [false, true, false, false]);
}

#[test]
fn impossible_numbers_of_experts_are_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let table = r#"
        {"num_experts": 0} | 0 experts are not
        {"num_experts": 1099511627776} | 1099511627776 experts are not supported: from 1 to 4096
        {"num_experts": -1} | num_experts -1
        {"num_experts_per_tok": 0} | 0 experts of 128 for each
        {"num_experts_per_tok": 129} | 129 experts of 128 for each token are not supported: from 1 to 128
        {"moe_intermediate_size": 0} | experts of width 0
        {"moe_intermediate_size": 1099511627776} | experts of width 1099511627776
        {"decoder_sparse_step": 0} | decoder_sparse_step 0 is not supported
        {"mlp_only_layers": ["a"]} | mlp_only_layers ["a"]
        {"n_shared_experts": 1} | n_shared_experts 1 is not supported
    "#;
    assert_refused(table, |mut change| {
        change["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        let found = read(folder.path(), change);
        found.inspect_err(|error| assert!(matches!(error, Error::Setup(_))))
    });
}

/// What no other layer of the model has is checked, too.
#[test]
fn the_layer_of_mellum_for_further_tokens_has_kinds_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let read = |more: Json| {
        let mut config = json!({
            "architectures": ["MellumForCausalLM"], "num_mtp_layers": 1,
            "layer_types": vec!["full_attention"; 4], "mlp_layer_types": vec!["dense"; 4]
        });
        merge(&mut config, &more);
        read(folder.path(), config)
    };
    let further = |more: Json| read(more).unwrap().spec.mtp.unwrap().layer;
    for unset in [
        json!({}),
        json!({"mtp_layer_types": null, "mtp_mlp_layer_types": null}),
    ] {
        let layer = further(unset);
        assert_eq!(layer.window, Some(1024));
        assert_eq!(layer.rope.as_ref().unwrap().theta, 1e4);
        assert_eq!(layer.experts().unwrap().count, 64);
    }
    let layer = further(json!({
        "layer_types": vec!["sliding_attention"; 4], "mlp_layer_types": vec!["sparse"; 4],
        "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["dense"]
    }));
    assert_eq!(layer.window, None);
    assert_eq!(layer.rope.as_ref().unwrap().theta, 5e5);
    assert!(layer.experts().is_none());
    let table = r#"
        {"num_mtp_layers": 2} | num_nextn_predict_layers 2 is not supported: only 1
        {"mtp_layer_types": ["chunked_attention"]} | mtp_layer_types "chunked_attention"
        {"mtp_layer_types": []} | mtp_layer_types has 0 entries
        {"mtp_mlp_layer_types": ["moe"]} | mtp_mlp_layer_types "moe"
        {"sliding_window": null} | mtp_layer_types "sliding_attention"
        {"sliding_window": 0} | sliding_window is 0
        {"num_experts": 0} | 0 experts are not
        {"num_experts_per_tok": 65} | 65 experts of 64
    "#;
    assert_refused(table, read);
}

/// The class of Granite in transformers 5 has other names.
#[test]
fn granites_of_transformers_5_compute_the_same() {
    let fixture = fixture("granite_moe");
    let stored = fixture.stored();
    let names = [
        ("input_linear.weight", "experts.gate_up_proj"),
        ("output_linear.weight", "experts.down_proj"),
        ("router.layer.weight", "router.weight"),
    ];
    let renamed = stored.into_iter().map(|(name, tensor)| {
        let of = |name: String, (old, new): &(&str, &str)| name.replace(old, new);
        (names.iter().fold(name, of), tensor)
    });
    let renamed: HashMap<String, Tensor> = renamed.collect();
    assert!(renamed.contains_key("model.layers.0.block_sparse_moe.experts.down_proj"));
    let folder = fixture.with_tensors(&renamed);
    fixture
        .compare(open(folder.path()).unwrap(), TOLERANCE)
        .unwrap();
}

/// What is missing, or has another shape, is named.
#[test]
fn tensors_of_experts_are_checked() {
    let fixture = fixture("qwen3_moe");
    let stored = fixture.stored();
    let attempt = |stored: &HashMap<String, Tensor>| {
        let folder = fixture.with_tensors(stored);
        let error = open(folder.path()).map(drop).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    };
    let name = "model.layers.1.mlp.experts.7.up_proj.weight";
    let mut fewer = stored.clone();
    fewer.remove(name);
    let error = attempt(&fewer);
    assert!(
        error.contains(&format!("cannot find tensor {name}")),
        "{error}"
    );
    let mut other = stored.clone();
    other.insert(name.into(), stored[name].narrow(0, 0, 8).unwrap());
    let error = attempt(&other);
    assert!(error.contains(name) && error.contains("[8, 32]"), "{error}");
    let mut more = stored.clone();
    let ninth = name.replace(".7.", ".8.");
    more.insert(ninth.clone(), stored[name].clone());
    let error = attempt(&more);
    assert!(error.contains(&format!("tensor {ninth}")), "{error}");
}

/// `--quantize` makes blocks of experts, but not of their router.
#[test]
fn routers_are_never_quantized() {
    let source = ModelSource::Folder(fixture("qwen3_moe").folder);
    let options = LoadOptions {
        quantize: Some(GgmlDType::Q4_0.into()),
        ..LoadOptions::default()
    };
    let (_, inventory) = inspect(&source, &options).unwrap();
    let kinds = |part: &str| {
        let entries = inventory.entries.iter();
        let found = entries.filter(|entry| entry.name.contains(part));
        let kinds: Vec<&str> = found.map(|entry| entry.loaded.as_str()).collect();
        kinds
    };
    assert_eq!(kinds(".mlp.gate."), ["f32"; 2]);
    assert_eq!(kinds(".up_proj."), ["Q4_0"; 16]);
    load(&source, &options).unwrap();
}

/// The experts of a GGUF file keep their blocks, each its own; those of gates and ups may differ.
#[test]
fn quantized_experts_of_a_gguf_are_those_of_their_values() {
    let fixture = fixture("qwen3_moe");
    let (folder, file) = fixture.converted(&fixture.conversion());
    let mut reader = std::fs::File::open(&file).unwrap();
    let content = Content::read(&mut reader).unwrap();
    let names = content.tensor_infos.keys();
    let stored: Vec<(&String, QTensor)> = names
        .map(|name| {
            (
                name,
                content.tensor(&mut reader, name, &Device::Cpu).unwrap(),
            )
        })
        .collect();
    let metadata: Vec<_> = content.metadata.iter().map(|(k, v)| (&**k, v)).collect();
    // As blocks, or in f32 with the values of these blocks.
    let logits = |dense: bool| {
        let tensors = stored.iter().map(|(name, tensor)| {
            let values = tensor.dequantize(&Device::Cpu).unwrap();
            let blocks = match name.split('.').nth(2) {
                Some("ffn_gate_exps") => GgmlDType::Q8_0,
                Some("ffn_up_exps") => GgmlDType::Q4_0,
                _ => GgmlDType::F32,
            };
            let blocks = QTensor::quantize(&values, blocks).unwrap();
            let values = blocks.dequantize(&Device::Cpu).unwrap();
            let values = QTensor::quantize(&values, GgmlDType::F32).unwrap();
            (name.as_str(), if dense { values } else { blocks })
        });
        let tensors: Vec<(&str, QTensor)> = tensors.collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (*k, v)).collect();
        let file = folder.path().join(format!("{dense}.gguf"));
        let mut out = std::fs::File::create(&file).unwrap();
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
        drop(out);
        let mut rig = Rig::new(open(&file).unwrap(), 32, 4);
        rig.feed(&mut Seq::default(), &fixture.prompt).concat()
    };
    let (blocks, values) = (logits(false), logits(true));
    // Kernels for blocks round the activations, too.
    let far = distance(&blocks, &values);
    assert!(far > 0. && far < 0.3, "{far}");
}

/// Random weights need no files.
#[test]
fn dummy_experts_are_made_for_all_architectures() {
    for fixture in with_experts() {
        let source = ModelSource::Folder(fixture.folder.clone());
        let options = dummy();
        let mut rig = Rig::new(load(&source, &options).unwrap(), 32, 4);
        let logits = rig.feed(&mut Seq::default(), &fixture.prompt).concat();
        assert!(logits.iter().all(|logit| logit.is_finite()));
    }
}
