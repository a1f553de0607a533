//! What is refused of draft heads, by name: keys that no layout has, and conversions that would lose something.

use crate::common::process;
use crate::common::refusals::{change, rows};
use crate::common::tiny::open;
use crate::head_fixtures::{changed, changed_in, fixtures, load, load_beside};
use serde_json::Value as Json;

/// Why such a head is refused.
fn refusal(name: &str, change: &dyn Fn(&mut Json)) -> String {
    let error = load(changed(name, change).path())
        .err()
        .expect("it is refused");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

/// Heads, changes of their configs, and what the errors name.
const REFUSED: &str = r#"
eagle31 | new_norm = true | new_norm
eagle3_latent | num_aux_hidden_states = 4 | num_aux_hidden_states 4
eagle3_latent | q_lora_rank = 21 | midlayer.self_attn.q_b_proj.weight
dflash | transformer_layer_config.kv_lora_rank = 8 | kv_lora_rank
dspark | selector_rank = 4 | selector_rank
eagle31 | markov_rank = 4 | markov_rank
dflash2 | markov_rank = 4 | markov_rank
dflash2 | conv_kernel_size = 9 | conv_kernel_size 9
dflash2 | conv_group_size = 7 | conv_group_size 7
dflash2 | selector_top_k = 257 | selector_top_k 257
dflash2 | selector_rank = 0 | selector_rank 0
eagle31 | norm_before_fc = true | exclude each other
eagle31 | norm_output = "yes" | norm_output "yes"
eagle31 | sample_from_anchor = true | sample_from_anchor
dflash | norm_output = true | norm_output
eagle31 | transformer_layer_config.model_type = "gemma3_text" | model_type gemma3_text
eagle31 | transformer_layer_config.logit_scale = 3 | logit_scale
peagle | transformer_layer_config.num_hidden_layers = 3 | layers.2
peagle | mask_token_id = null | mask_token_id null
peagle | mask_token_id = 256 | mask_token_id 256 must be below
peagle | speculators_config.proposal_methods.0.speculative_tokens = 1000 | block_size 1000
dspark | markov_rank = 1099511627776 | markov_rank
dspark | markov_rank = 9 | markov_head.markov_w1
dspark | markov_rank = 0 | confidence_head_with_markov
dspark | markov_head_type = "lstm" | markov_head_type "lstm"
dspark_rnn | sample_from_anchor = false | sample_from_anchor false
dflash | transformer_layer_config.sliding_window = 0 | sliding_window
domino | gru_hidden_dim = 11 | prefix_gru.weight_ih_l0
domino | gru_hidden_dim = 1099511627776 | gru_hidden_dim 1099511627776
domino | logits_correction_emb_dim = 0 | logits_correction_emb_dim 0
domino | pure_draft_prefix_len = 5 | pure_draft_prefix_len 5 is not supported: only 0 to 4
domino | emb_dim = 10 | emb_dim
domino | shift_label = true | shift_label
domino | markov_rank = 4 | markov_rank
domino | speculators_model_type = "dflash" | gru_hidden_dim
eagle31 | gru_hidden_dim = 4 | gru_hidden_dim
domino_specforge | dflash_config.projector_type = "linear" | projector_type "linear"
domino_specforge | emb_dim = 7 | emb_dim is given twice
domino_specforge | dflash_config.gru_hidden_dim = null | gru_hidden_dim null
dflash | is_causal = false | is_causal
dflash | transformer_layer_config.is_causal = false | is_causal
eagle31 | is_causal = false | is_causal false
eagle31 | output_multiplier = 2 | output_multiplier
dflash2_scaled | dflash_config.output_multiplier = -1 | output_multiplier -1
dflash2_scaled | sliding_window_non_causal = true | sliding_window_non_causal
dflash2_scaled | dflash_config.selector_k = 4 | dflash_config: selector_k
domino_specforge | is_causal = true | is_causal true
domino_specforge | final_logit_softcapping = 30 | final_logit_softcapping
domino_specforge | dflash_config.attention_mode = "mla" | attention_mode "mla"
domino_specforge | sample_from_anchor = true | sample_from_anchor
eagle31 | shift_label = false | shift_label
peagle | shift_label = true | shift_label
eagle31 | transformer_layer_config.norm_before_fc = true | transformer_layer_config: norm_before_fc
domino | transformer_layer_config.mask_token_id = 3 | transformer_layer_config: mask_token_id
domino_specforge | mask_token_id = 254 | mask_token_id is given twice
lilicorr | dflash_config.lilicorr_logit_scale = null | lilicorr_logit_scale null must be a finite number above 0
lilicorr | dflash_config.lilicorr_num_layers = null | lilicorr_num_layers null must be a number
lilicorr | dflash_config.lilicorr_candidate_topk = 17 | lilicorr_candidate_topk 17
lilicorr | dflash_config.lilicorr_num_heads = 3 | lilicorr_num_heads 3
lilicorr | dflash_config.lilicorr_factor_dim = 13 | lilicorr.out_head
lilicorr | dflash_config.lilicorr_enabled = false | lilicorr_enabled false
lilicorr | is_causal = true | is_causal true
jetspec | dflash_config.causal = false | causal_head is given twice
jetspec | is_causal = false | is_causal is given twice
lilicorr | dflash_config.selector_rank = 4 | selector_rank
dflash2 | dflash_config = {"lilicorr_num_heads": 2} | lilicorr_num_heads
dflash2_scaled | block_size = 7 | block_size is given twice
dflash2_scaled | dflash_config.causal = true | is_causal is given twice
dflash2_scaled | dflash_config.output_multiplier = 0 | output_multiplier 0 must be a finite number above 0
dflash2_scaled | dflash_config.input_embedding_scale = 1e-50 | must be a finite number above 0
dflash2_scaled | dflash_config.final_logit_softcapping = 1e39 | must be a finite number from 0
"#;

#[test]
fn what_no_head_does_is_refused_by_name() {
    for [name, keys, needle] in rows::<3>(REFUSED) {
        let error = refusal(name, &|config| change(config, keys));
        assert!(error.contains(needle), "{name} with {keys}: {error}");
    }
    for kind in ["xpress", "dfly"] {
        let error = refusal("dspark", &|c| c["speculators_model_type"] = kind.into());
        let needle = format!("speculators_model_type {kind} is not supported");
        assert!(error.contains(&needle), "{error}");
    }
}

/// Its configuration need not say a size of the vocabulary.
#[test]
fn what_no_assistant_of_muse_glimmer_does_is_refused_by_name() {
    let target = open(&fixtures().join("architectures/muse_glimmer")).unwrap();
    let from = fixtures().join("assistants/muse_glimmer");
    let table = r#"
        vocab_size = 512 | vocab_size is 512, but 256 in the target
        hidden_size = 64 | hidden_size is 64, but 32 in the target
        mask_token_id = 256 | mask_token_id 256 must be below vocab_size 256
        target_layer_ids = [0, 2, 5] | the layers [1, 3, 6], but the target has 5
        layer_types = null | sliding_window
        is_causal = true | is_causal true is not supported: only false is
        selector_rank = 4 | selector_rank
        norm_output = true | norm_output true
        new_norm = true | new_norm
    "#;
    for [keys, needle] in rows::<2>(table) {
        let changed = changed_in(&from, &|config| change(config, keys));
        let error = load_beside(changed.path(), &*target).err();
        let error = error.unwrap_or_else(|| panic!("{needle}: it was loaded"));
        assert!(error.contains(needle) && !error.contains('\n'), "{error}");
    }
    let same = changed_in(&from, &|config| change(config, "vocab_size = 256"));
    assert!(load_beside(same.path(), &*target).is_ok());
    let other = load(&from).err().unwrap();
    assert!(other.contains("does not fit the target"), "{other}");
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
