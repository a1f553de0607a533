//! GLM-4 MoE: its configurations, and what is refused. What it computes is compared with transformers among all
//! [architectures](crate::architectures). And GLM-4 as the decoder of a model for images.

use crate::architectures::{Fixture, TOLERANCE, fixture, write_gguf};
use crate::common::refusals::{assert_refused, merge};
use crate::common::tiny::{open, write_config};
use crate::common::{assert_has, read_json};
use candle_core::{Device, Tensor};
use foretoken::error::Error;
use foretoken::model::{
    ExpertGroups, ExpertsSpec, ModelConfig, QkNorm, RouterScores, SharedExpert,
};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

pub fn read(folder: &Path, mut config: Json, change: Json) -> Result<ModelConfig, Error> {
    merge(&mut config, &change);
    write_config(folder, &config);
    ModelConfig::from_json(folder)
}

/// GLM-4.5's.
fn glm() -> Json {
    json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1000000,
        "routed_scaling_factor": 2.5, "tie_word_embeddings": false, "topk_group": 1, "use_cache": true,
        "use_qk_norm": true, "vocab_size": 151552
    })
}

/// The experts of the last layer, and the number of layers without any before it.
pub fn experts(config: &ModelConfig) -> (ExpertsSpec, usize) {
    let layers = &config.spec.layers;
    let dense = layers.iter().filter(|l| l.experts().is_none()).count();
    assert!(layers[dense..].iter().all(|l| l.experts().is_some()));
    (*layers[layers.len() - 1].experts().unwrap(), dense)
}

#[test]
fn the_published_config_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let config = read(folder.path(), glm(), json!({})).unwrap();
    let (found, dense) = experts(&config);
    assert_eq!((found.count, found.per_token, found.width), (160, 8, 1536));
    assert_eq!((dense, found.groups, found.scale), (3, None, 2.5));
    assert_eq!(found.scores, RouterScores::Sigmoid);
    let shared = SharedExpert {
        name: "mlp.shared_experts",
        width: 1536,
        has_gate: false,
        is_fused: false,
    };
    assert!(found.is_normalized && found.shared == Some(shared));
    let layer = &config.spec.layers[0];
    assert!(layer.qkv_bias && !layer.o_bias && layer.qk_norm == Some(QkNorm::Head));
    assert_eq!(layer.rope.as_ref().unwrap().width, 64);
    assert_eq!(config.spec.unread, ["model.layers.92."]);
    let grouped = json!({ "n_group": 8, "topk_group": 4 });
    let (found, _) = experts(&read(folder.path(), glm(), grouped).unwrap());
    let groups = ExpertGroups {
        count: 8,
        per_token: 4,
        best: 2,
    };
    assert_eq!(found.groups, Some(groups));
}

#[test]
fn what_its_router_cannot_do_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = r#"
        {"n_group": 7} | 7 groups of 160 experts are not
        {"n_group": 160} | 160 groups of 160 experts are not
        {"n_group": 0} | 0 groups of 160 experts are not
        {"n_group": 8, "topk_group": 9} | 9 of 8 groups
        {"n_group": 40, "topk_group": 1} | 1 of 40 groups for each token are not supported: they must have its 8 experts
        {"routed_scaling_factor": 1e300} | weights times inf
        {"num_nextn_predict_layers": 1152921504606846976} | num_nextn_predict_layers 1152921504606846976 is not supported: only up to 16 are
        {"n_shared_experts": 4611686018427387904} | shared experts are not
        {"topk_method": "greedy"} | topk_method "greedy"
    "#;
    assert_refused(table, |change| read(folder.path(), glm(), change));
}

/// Layers that predict further tokens are left unread; those after them are not known.
#[test]
fn only_known_layers_are_left_unread() {
    let fixture = fixture("glm4_moe");
    let mut stored = fixture.stored();
    let further = stored["model.layers.3.eh_proj.weight"].clone();
    stored.insert("model.layers.4.eh_proj.weight".into(), further);
    let folder = fixture.with_tensors(&stored);
    let error = open(folder.path()).map(drop).unwrap_err().to_string();
    assert_has(&error, &["tensor model.layers.4.eh_proj.weight"]);
}

/// The fixture `name` as the decoder of the class `class` for images and texts, whose `model_type` is `kind`.
fn compare_within(name: &str, kind: &str, class: &str) {
    let fixture = fixture(name);
    let folder = tempfile::tempdir().unwrap();
    let mut text = read_json(fixture.folder.join("config.json"));
    text.as_object_mut().unwrap().remove("architectures");
    text["model_type"] = json!(format!("{kind}_text"));
    text["image_token_id"] = json!(252);
    text["rope_parameters"]["mrope_section"] = json!([1, 2, 1]);
    let config = json!({
        "architectures": [class], "model_type": kind, "image_end_token_id": 251, "image_start_token_id": 250,
        "image_token_id": 252, "text_config": text, "tie_word_embeddings": false, "video_end_token_id": 254,
        "video_start_token_id": 253, "video_token_id": 255, "vision_config": { "depth": 1 }
    });
    write_config(folder.path(), &config);
    let inside = |name: &str| name.replace("model.", "model.language_model.");
    let stored = fixture.stored().into_iter();
    let tensors: HashMap<String, Tensor> = stored
        .map(|(name, tensor)| (inside(&name), tensor))
        .collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let model = open(folder.path()).unwrap();
    fixture.compare(model, TOLERANCE).unwrap();
}

/// GLM-4.1V and 4.6V-Flash, and GLM-4.5V and 4.6V with experts.
#[test]
fn the_decoders_of_glm_4v_compute_what_glm_4_does() {
    compare_within("glm4", "glm4v", "Glm4vForConditionalGeneration");
    let class = "Glm4vMoeForConditionalGeneration";
    compare_within("glm4_moe_plain", "glm4v_moe", class);
}

/// Writes the GGUF file of a GLM as the decoder of a model for images. What is rotated together is in the halves of a head
/// there: llama.cpp rotates so by positions of three numbers.
pub fn write_gguf_of_glm_4v(fixture: &Fixture, file: &Path) {
    let mut how = fixture.conversion();
    let sections = format!(
        "{}.rope.dimension_sections",
        how["architecture"].as_str().unwrap()
    );
    how["metadata"][sections] = json!([1, 2, 1, 0]);
    write_gguf(fixture, &how, file, |tensors| {
        let is_rotated = |name: &str| name.contains("attn_q.") || name.contains("attn_k.");
        // Heads of 16 values, of which 8 are rotated.
        let of_head = |head: u32| {
            let (even, odd) = ((0..8).step_by(2), (1..8).step_by(2));
            even.chain(odd).chain(8..16).map(move |row| 16 * head + row)
        };
        let reordered = |tensor: Tensor| {
            let heads = tensor.dims()[0] as u32 / 16;
            let order: Vec<u32> = (0..heads).flat_map(of_head).collect();
            let order = Tensor::new(order, &Device::Cpu).unwrap();
            tensor.index_select(&order, 0).unwrap()
        };
        let tensors = tensors.into_iter().map(|(name, tensor)| {
            let is_rotated = is_rotated(&name);
            (
                name,
                if is_rotated {
                    reordered(tensor)
                } else {
                    tensor
                },
            )
        });
        tensors.collect()
    });
}

#[test]
fn files_of_glm_4v_compute_what_glm_4_does() {
    let fixture = fixture("glm4");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_gguf_of_glm_4v(&fixture, &file);
    fixture.compare(open(&file).unwrap(), TOLERANCE).unwrap();
}
