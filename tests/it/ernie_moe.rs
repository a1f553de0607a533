//! ERNIE 4.5 MoE: its configurations, and what is refused. What it computes is compared with transformers among all
//! [architectures](crate::architectures).

use crate::common::refusals::assert_refused;
use crate::glm_moe::{experts, read};
use foretoken::model::RouterScores;
use serde_json::{Value as Json, json};

/// ERNIE-4.5-21B-A3B's.
fn ernie() -> Json {
    json!({
        "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": true, "num_attention_heads": 20,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": true,
        "use_bias": false, "use_cache": false, "vocab_size": 103424
    })
}

#[test]
fn the_published_config_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let config = read(folder.path(), ernie(), json!({})).unwrap();
    let (found, dense) = experts(&config);
    assert_eq!((found.count, found.per_token, found.width), (64, 6, 1536));
    assert_eq!((dense, found.scores), (1, RouterScores::Softmax));
    assert_eq!(found.shared.unwrap().width, 3072);
    let none = json!({ "moe_num_shared_experts": 0, "moe_layer_end_index": -1 });
    let (found, _) = experts(&read(folder.path(), ernie(), none).unwrap());
    assert_eq!(found.shared, None);
}

#[test]
fn what_it_does_not_compute_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = r#"
        {"moe_gate": "switch"} | moe_gate "switch"
        {"moe_layer_interval": 0} | moe_layer_interval 0
        {"use_bias": true} | use_bias true
        {"moe_k": 65} | 65 experts of 64
        {"moe_multimodal": true} | moe_multimodal true
    "#;
    assert_refused(table, |change| read(folder.path(), ernie(), change));
}
