//! What is refused of draft heads, by name: keys that no layout has, and conversions that would lose something.

use crate::common::process;
use crate::head_fixtures::{changed, fixtures, load};
use serde_json::Value as Json;

/// Why such a head is refused.
fn refusal(name: &str, change: &dyn Fn(&mut Json)) -> String {
    let error = load(changed(name, change).path())
        .err()
        .expect("it is refused");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn what_no_head_does_is_refused_by_name() {
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Json), &'a str);
    let changes: [Change<'_>; 71] = [
        ("eagle31", &|c| c["new_norm"] = true.into(), "new_norm"),
        (
            "eagle3_latent",
            &|c| c["num_aux_hidden_states"] = 4.into(),
            "num_aux_hidden_states 4",
        ),
        (
            "eagle3_latent",
            &|c| c["q_lora_rank"] = 21.into(),
            "midlayer.self_attn.q_b_proj.weight",
        ),
        (
            "dflash",
            &|c| c["transformer_layer_config"]["kv_lora_rank"] = 8.into(),
            "kv_lora_rank",
        ),
        (
            "dspark",
            &|c| c["selector_rank"] = 4.into(),
            "selector_rank",
        ),
        ("eagle31", &|c| c["markov_rank"] = 4.into(), "markov_rank"),
        ("dflash2", &|c| c["markov_rank"] = 4.into(), "markov_rank"),
        (
            "dflash2",
            &|c| c["conv_kernel_size"] = 9.into(),
            "conv_kernel_size 9",
        ),
        (
            "dflash2",
            &|c| c["conv_group_size"] = 7.into(),
            "conv_group_size 7",
        ),
        (
            "dflash2",
            &|c| c["selector_top_k"] = 257.into(),
            "selector_top_k 257",
        ),
        (
            "dflash2",
            &|c| c["selector_rank"] = 0.into(),
            "selector_rank 0",
        ),
        (
            "eagle31",
            &|c| c["norm_before_fc"] = true.into(),
            "exclude each other",
        ),
        (
            "eagle31",
            &|c| c["norm_output"] = "yes".into(),
            "norm_output \"yes\"",
        ),
        (
            "eagle31",
            &|c| c["sample_from_anchor"] = true.into(),
            "sample_from_anchor",
        ),
        ("dflash", &|c| c["norm_output"] = true.into(), "norm_output"),
        (
            "eagle31",
            &|c| c["transformer_layer_config"]["model_type"] = "gemma3_text".into(),
            "model_type gemma3_text",
        ),
        (
            "eagle31",
            &|c| c["transformer_layer_config"]["logit_scale"] = 3.into(),
            "logit_scale",
        ),
        (
            "peagle",
            &|c| c["transformer_layer_config"]["num_hidden_layers"] = 3.into(),
            "layers.2",
        ),
        (
            "peagle",
            &|c| c["mask_token_id"] = Json::Null,
            "mask_token_id null",
        ),
        (
            "peagle",
            &|c| c["mask_token_id"] = 256.into(),
            "mask_token_id 256 must be below",
        ),
        (
            "peagle",
            &|c| c["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 1000.into(),
            "block_size 1000",
        ),
        (
            "dspark",
            &|c| c["markov_rank"] = (1u64 << 40).into(),
            "markov_rank",
        ),
        (
            "dspark",
            &|c| c["markov_rank"] = 9.into(),
            "markov_head.markov_w1",
        ),
        (
            "dspark",
            &|c| c["markov_rank"] = 0.into(),
            "confidence_head_with_markov",
        ),
        (
            "dspark",
            &|c| c["markov_head_type"] = "lstm".into(),
            "markov_head_type \"lstm\"",
        ),
        (
            "dspark_rnn",
            &|c| c["sample_from_anchor"] = false.into(),
            "sample_from_anchor false",
        ),
        (
            "dflash",
            &|c| c["transformer_layer_config"]["sliding_window"] = 0.into(),
            "sliding_window",
        ),
        (
            "domino",
            &|c| c["gru_hidden_dim"] = 11.into(),
            "prefix_gru.weight_ih_l0",
        ),
        (
            "domino",
            &|c| c["gru_hidden_dim"] = (1u64 << 40).into(),
            "gru_hidden_dim 1099511627776",
        ),
        (
            "domino",
            &|c| c["logits_correction_emb_dim"] = 0.into(),
            "logits_correction_emb_dim 0",
        ),
        (
            "domino",
            &|c| c["pure_draft_prefix_len"] = 5.into(),
            "pure_draft_prefix_len 5 is not supported: only 0 to 4",
        ),
        ("domino", &|c| c["emb_dim"] = 10.into(), "emb_dim"),
        ("domino", &|c| c["shift_label"] = true.into(), "shift_label"),
        ("domino", &|c| c["markov_rank"] = 4.into(), "markov_rank"),
        (
            "domino",
            &|c| c["speculators_model_type"] = "dflash".into(),
            "gru_hidden_dim",
        ),
        (
            "eagle31",
            &|c| c["gru_hidden_dim"] = 4.into(),
            "gru_hidden_dim",
        ),
        (
            "domino_specforge",
            &|c| c["dflash_config"]["projector_type"] = "linear".into(),
            "projector_type \"linear\"",
        ),
        (
            "domino_specforge",
            &|c| c["emb_dim"] = 7.into(),
            "emb_dim is given twice",
        ),
        (
            "domino_specforge",
            &|c| c["dflash_config"]["gru_hidden_dim"] = Json::Null,
            "gru_hidden_dim null",
        ),
        ("dflash", &|c| c["is_causal"] = false.into(), "is_causal"),
        (
            "dflash",
            &|c| c["transformer_layer_config"]["is_causal"] = false.into(),
            "is_causal",
        ),
        (
            "eagle31",
            &|c| c["is_causal"] = false.into(),
            "is_causal false",
        ),
        (
            "eagle31",
            &|c| c["output_multiplier"] = 2.into(),
            "output_multiplier",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["output_multiplier"] = (-1).into(),
            "output_multiplier -1",
        ),
        (
            "dflash2_scaled",
            &|c| c["sliding_window_non_causal"] = true.into(),
            "sliding_window_non_causal",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["selector_k"] = 4.into(),
            "dflash_config: selector_k",
        ),
        (
            "domino_specforge",
            &|c| c["is_causal"] = true.into(),
            "is_causal true",
        ),
        (
            "domino_specforge",
            &|c| c["final_logit_softcapping"] = 30.into(),
            "final_logit_softcapping",
        ),
        (
            "domino_specforge",
            &|c| c["dflash_config"]["attention_mode"] = "mla".into(),
            "attention_mode \"mla\"",
        ),
        (
            "domino_specforge",
            &|c| c["sample_from_anchor"] = true.into(),
            "sample_from_anchor",
        ),
        (
            "eagle31",
            &|c| c["shift_label"] = false.into(),
            "shift_label",
        ),
        ("peagle", &|c| c["shift_label"] = true.into(), "shift_label"),
        (
            "eagle31",
            &|c| c["transformer_layer_config"]["norm_before_fc"] = true.into(),
            "transformer_layer_config: norm_before_fc",
        ),
        (
            "domino",
            &|c| c["transformer_layer_config"]["mask_token_id"] = 3.into(),
            "transformer_layer_config: mask_token_id",
        ),
        (
            "domino_specforge",
            &|c| c["mask_token_id"] = 254.into(),
            "mask_token_id is given twice",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_logit_scale"] = Json::Null,
            "lilicorr_logit_scale null must be a finite number above 0",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_num_layers"] = Json::Null,
            "lilicorr_num_layers null must be a number",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_candidate_topk"] = 17.into(),
            "lilicorr_candidate_topk 17",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_num_heads"] = 3.into(),
            "lilicorr_num_heads 3",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_factor_dim"] = 13.into(),
            "lilicorr.out_head",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["lilicorr_enabled"] = false.into(),
            "lilicorr_enabled false",
        ),
        (
            "lilicorr",
            &|c| c["is_causal"] = true.into(),
            "is_causal true",
        ),
        (
            "jetspec",
            &|c| c["dflash_config"]["causal"] = false.into(),
            "causal_head is given twice",
        ),
        (
            "jetspec",
            &|c| c["is_causal"] = false.into(),
            "is_causal is given twice",
        ),
        (
            "lilicorr",
            &|c| c["dflash_config"]["selector_rank"] = 4.into(),
            "selector_rank",
        ),
        (
            "dflash2",
            &|c| c["dflash_config"] = serde_json::json!({"lilicorr_num_heads": 2}),
            "lilicorr_num_heads",
        ),
        (
            "dflash2_scaled",
            &|c| c["block_size"] = 7.into(),
            "block_size is given twice",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["causal"] = true.into(),
            "is_causal is given twice",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["output_multiplier"] = 0.into(),
            "output_multiplier 0 must be a finite number above 0",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["input_embedding_scale"] = 1e-50.into(),
            "must be a finite number above 0",
        ),
        (
            "dflash2_scaled",
            &|c| c["dflash_config"]["final_logit_softcapping"] = 1e39.into(),
            "must be a finite number from 0",
        ),
    ];
    for (name, change, needle) in changes {
        let error = refusal(name, change);
        assert!(error.contains(needle), "{name}: {error}");
    }
    for kind in ["xpress", "dfly"] {
        let error = refusal("dspark", &|c| c["speculators_model_type"] = kind.into());
        let needle = format!("speculators_model_type {kind} is not supported");
        assert!(error.contains(&needle), "{error}");
    }
}

/// A value that is there twice and the same is taken, and so is a null.
#[test]
fn what_says_the_same_is_not_refused() {
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Json));
    let changes: [Change<'_>; 4] = [
        ("dflash2_scaled", &|c| {
            c["final_logit_softcapping"] = 2.5.into()
        }),
        ("dflash2_scaled", &|c| {
            c["dflash_config"]["causal"] = false.into()
        }),
        ("domino_specforge", &|c| c["block_size"] = 6.into()),
        ("eagle31", &|c| {
            c["transformer_layer_config"]["norm_before_fc"] = Json::Null;
            c["transformer_layer_config"]["has_no_defaults_at_init"] = false.into();
        }),
    ];
    for (name, change) in changes {
        let loaded = load(changed(name, change).path());
        assert!(loaded.is_ok(), "{name}: {:?}", loaded.err());
    }
}

/// What the keys of a GGUF file cannot say is not left out of one.
#[test]
fn a_layout_without_a_gguf_file_is_not_converted() {
    let out = tempfile::tempdir().unwrap();
    for (name, needle) in [
        ("eagle31", "cannot say fc_norm"),
        ("eagle3_layers", "cannot say num_hidden_layers"),
        ("peagle", "kind PEagle"),
        ("dspark", "cannot say sample_from_anchor"),
        ("dflash2", "cannot say conv_kernel_size"),
        ("domino_specforge", "cannot say prefix_gru"),
        ("lilicorr", "cannot say lilicorr_candidate_topk"),
        ("jetspec", "cannot say is_causal"),
        ("dflash", "only models whose layers all are like"),
        ("eagle3_latent", "only models whose layers all are like"),
    ] {
        let folder = fixtures().join("heads").join(name);
        let out = out.path().join("head.gguf").display().to_string();
        let folder = folder.display().to_string();
        let arguments = ["convert", "--model", &folder, "--out", &out];
        let done = process::foretoken().args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(needle), "{said}");
    }
}
