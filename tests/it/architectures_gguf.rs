//! Every architecture from GGUF files as llama.cpp converts them, and files that say less or say it in another way.

use crate::architectures::{TOLERANCE, fixture, fixtures, write_gguf};
use crate::common::tiny::open;
use candle_core::Tensor;
use serde_json::{Value as Json, json};

/// llama.cpp's names of tensors and metadata, its order of rows, and its norms.
#[test]
fn gguf_files_compute_the_same() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for fixture in fixtures() {
        if !fixture.folder.join("gguf.json").exists() {
            continue;
        }
        let (_folder, file) = fixture.converted(&fixture.conversion());
        let model = open(&file).map_err(|e| e.to_string());
        if let Err(what) = model.and_then(|model| fixture.compare(model, TOLERANCE)) {
            wrong.push(format!("{}: {what}", fixture.name()));
        }
        count += 1;
    }
    assert!(wrong.is_empty() && count > 10, "{wrong:#?}");
}

/// The texts of a Qwen2-VL are those of a Qwen2 with the same weights. (llama.cpp's Qwen2 has neither windows nor dynamic
/// ropes, which the fixture of Qwen2 has.)
#[test]
fn files_of_qwen_2_compute_the_same() {
    let fixture = fixture("qwen2_vl");
    let how = fixture.conversion().to_string();
    let mut how: Json = serde_json::from_str(&how.replace("qwen2vl", "qwen2")).unwrap();
    let metadata = how["metadata"].as_object_mut().unwrap();
    // Positions are one number in a text.
    metadata.retain(|key, _| key != "qwen2.rope.dimension_sections");
    let (_folder, file) = fixture.converted(&how);
    let model = open(&file).unwrap();
    assert_eq!(model.config().architecture, "qwen2");
    fixture.compare(model, TOLERANCE).unwrap();
}

/// llama.cpp assumes soft caps and windows where a file of Gemma 2 says nothing of them.
#[test]
fn files_of_gemma_2_need_not_say_caps_and_windows() {
    let fixture = fixture("gemma2");
    let mut how = fixture.conversion();
    let metadata = how["metadata"].as_object_mut().unwrap();
    let said = metadata.len();
    metadata.retain(|key, _| !key.contains("softcapping") && !key.contains("sliding_window"));
    assert_eq!(metadata.len(), said - 3);
    metadata.insert("gemma2.context_length".into(), 8192.into());
    let (_folder, file) = fixture.converted(&how);
    let model = open(&file).unwrap();
    let spec = &model.config().spec;
    assert_eq!(spec.logit_soft_cap, Some(30.));
    let layers = spec.layers.iter();
    let layers: Vec<_> = layers.map(|layer| (layer.soft_cap, layer.window)).collect();
    let (slides, sees_all) = ((Some(50.), Some(4096)), (Some(50.), None));
    assert_eq!(layers, [slides, sees_all, slides]);
}

#[test]
fn files_of_gemma_4_may_have_gates_of_experts_apart() {
    let fixture = fixture("gemma4_moe");
    let mut how = fixture.conversion();
    for layer in 0..3 {
        let name = format!("model.layers.{layer}.experts.gate_up_proj");
        let part = |name: &str, start: usize| {
            let name = format!("blk.{layer}.ffn_{name}_exps.weight");
            json!({ "name": name, "interleaved_heads": 0, "offset": 0, "rows": [start, 16] })
        };
        how["tensors"][name] = json!([part("gate", 0), part("up", 16)]);
    }
    let (_folder, file) = fixture.converted(&how);
    fixture.compare(open(&file).unwrap(), TOLERANCE).unwrap();
}

/// Most files of the GLM-4 of 2024 were converted from its first code, which has q, k and v in one tensor.
#[test]
fn older_files_of_glm_4_compute_the_same() {
    let fixture = fixture("glm");
    let how = fixture.conversion();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_gguf(&fixture, &how, &file, |all| {
        let (parts, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(name, _)| {
            ["attn_q.", "attn_k.", "attn_v."]
                .iter()
                .any(|part| name.contains(part))
        });
        let find = |name: String| &parts.iter().find(|(found, _)| *found == name).unwrap().1;
        for (name, q) in parts.iter().filter(|(name, _)| name.contains("attn_q.")) {
            let [k, v] = ["attn_k", "attn_v"].map(|part| find(name.replace("attn_q", part)));
            let joined = Tensor::cat(&[q, k, v], 0).unwrap();
            others.push((name.replace("attn_q", "attn_qkv"), joined));
        }
        others
    });
    fixture.compare(open(&file).unwrap(), TOLERANCE).unwrap();
}
