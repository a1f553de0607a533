//! The keys of a draft head's `config.json`.

use super::HeadKind;
use crate::config::HEAD_KEYS;
use crate::config::keys::{Keys, ModelShape, is_one_of};
use foretoken_core::error::clipped;
use serde_json::Value;

/// Keys of DFlash 2: rows of a convolution, channels of a group, rank and width of the selector.
pub const DFLASH2_KEYS: [&str; 4] = [
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
];
/// Keys of Domino: width of the GRU, tokens that are not corrected, rank of the correction in the layout of its
/// authors, and in that of the speculators library.
pub const DOMINO_KEYS: [&str; 4] = [
    "gru_hidden_dim",
    "pure_draft_prefix_len",
    "emb_dim",
    "logits_correction_emb_dim",
];

/// Keys of LiLiCorr: whether it is there, candidates of a position, width (0 = that of the head), layers, heads, the factor
/// of the width of MLPs, width and minimum length of the vectors that are compared, and the factor of similarities.
pub const LILICORR_KEYS: [&str; 9] = [
    "lilicorr_enabled",
    "lilicorr_candidate_topk",
    "lilicorr_hidden_size",
    "lilicorr_num_layers",
    "lilicorr_num_heads",
    "lilicorr_mlp_ratio",
    "lilicorr_factor_dim",
    "lilicorr_vector_eps",
    "lilicorr_logit_scale",
];

/// Keys about the target's embedding and output layer: factors of both, and a cap of the logits.
pub const END_KEYS: [&str; 3] = [
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
];
/// The key that says whether rows see only the rows before them.
pub const IS_CAUSAL: &str = "is_causal";
/// The key, in the layout of Domino's authors, that says whether each row of a block predicts the token after its
/// position.
pub const SHIFT_LABEL: &str = "shift_label";

/// The largest vocabulary that there may be, in the place of one that is not known.
const ANY_VOCABULARY: usize = 1 << 24;

/// The places where a flag of an EAGLE head may be.
pub struct Flags<'a>(pub [&'a Value; 2]);

impl Flags<'_> {
    /// The flags of a `config.json`.
    pub fn of(json: &Value) -> Flags<'_> {
        Flags([json, &json["eagle_config"]])
    }

    /// The flag `key`; `None` = it is not there.
    ///
    /// # Errors
    /// If the value of `key` is not a flag.
    pub fn get(&self, key: &str) -> Result<Option<bool>, String> {
        let found = self.0.iter().map(|from| &from[key]);
        match found.into_iter().find(|value| !value.is_null()) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(format!("{key} {} must be true or false", shown(other))),
        }
    }

    /// Whether the flag `key` is there and true.
    ///
    /// # Errors
    /// Returns the errors of [`Flags::get`].
    pub fn is_set(&self, key: &str) -> Result<bool, String> {
        Ok(self.get(key)?.unwrap_or(false))
    }

    /// Refuses flags of `keys` that are true, because such a head would ignore them.
    ///
    /// # Errors
    /// A message that names the first flag that is true.
    pub fn refuse(&self, keys: &[&str]) -> Result<(), String> {
        for key in keys {
            if self.is_set(key)? {
                return Err(format!("{key} true is not supported: only false is"));
            }
        }
        Ok(())
    }
}

/// A value in messages.
pub fn shown(value: &Value) -> String {
    clipped(&value.to_string())
}

/// Refuses `keys` that are there, where `of` finds them: such a head would ignore them.
///
/// # Errors
/// A message that names the first key that is there.
pub fn refuse_present<'a>(of: &dyn Fn(&str) -> &'a Value, keys: &[&str]) -> Result<(), String> {
    match keys.iter().find(|key| !of(key)[**key].is_null()) {
        Some(key) => Err(format!("{key} is not supported in this layout")),
        None => Ok(()),
    }
}

/// A number of `json` that may be missing.
///
/// # Errors
/// A message that names the key, if its value is not a number.
pub fn size(json: &Value, key: &str) -> Result<Option<usize>, String> {
    let value = &json[key];
    match value.as_u64().map(usize::try_from) {
        _ if value.is_null() => Ok(None),
        Some(Ok(number)) => Ok(Some(number)),
        _ => Err(format!("{key} {} must be a number", shown(value))),
    }
}

/// A number of `json` that must be there.
///
/// # Errors
/// A message that names the key, if it is missing or its value is not a number.
pub fn needed(json: &Value, key: &str) -> Result<u32, String> {
    let number = size(json, key)?.and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| format!("{key} {} must be a number", shown(&json[key])))
}

/// The taps of layers that are numbered by their outputs; -1 = the embedding.
///
/// # Errors
/// A message that shows `ids`, if they are not a list of layers.
pub fn layer_outputs(ids: &Value) -> Result<Vec<usize>, String> {
    let list: Option<Vec<i64>> = serde_json::from_value(ids.clone()).ok();
    let taps = list.map(|ids| {
        let tap = |id: i64| usize::try_from(id.checked_add(1)?).ok();
        ids.into_iter().map(tap).collect::<Option<Vec<usize>>>()
    });
    let message = || format!("target_layer_ids {} must be a list of layers", shown(ids));
    taps.flatten().ok_or_else(message)
}

/// The keys about the layers, which the speculators library nests.
///
/// # Errors
/// A message that names the key that is not supported.
pub fn layers_of(json: &Value) -> Result<Value, String> {
    let nested = &json["transformer_layer_config"];
    if !nested.is_object() {
        return Ok(json.clone());
    }
    if let Some(kind) = nested["model_type"].as_str()
        && !matches!(kind, "llama" | "qwen3")
    {
        return Err(format!(
            "model_type {} of transformer_layer_config is not supported: only llama and qwen3 are",
            clipped(kind)
        ));
    }
    // Nothing beside it may ask for what no layer does.
    let mut outer = json.clone();
    if let Some(keys) = outer.as_object_mut() {
        let known = "architectures draft_vocab_size transformer_layer_config";
        keys.retain(|key, _| !is_one_of(key, HEAD_KEYS) && !is_one_of(key, known));
    }
    // The output layer's tensor tells whether it is shared.
    let mut keys = Keys::of_json(outer)?;
    keys.flag("tie_word_embeddings")?;
    keys.finish(&ModelShape::default())?;
    Ok(nested.clone())
}

/// Keys of experts and of layers for further tokens. A head with latent attention has them of its target, and no such
/// layers.
const KEYS_OF_EXPERTS: &str = "
    aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers
    routed_scaling_factor scoring_func seq_aux topk_group topk_method";

/// Names the architecture of a head's layers: a Llama's, or DeepSeek's without experts if an EAGLE-3 head has latent
/// attention.
pub fn set_architecture(shape: &mut Value, kind: HeadKind) {
    let is_latent = kind == HeadKind::Eagle3 && !shape["kv_lora_rank"].is_null();
    if !is_latent {
        shape["model_type"] = "llama".into();
        return;
    }
    if let Some(keys) = shape.as_object_mut() {
        keys.retain(|key, _| !is_one_of(key, KEYS_OF_EXPERTS));
    }
    shape["model_type"] = "deepseek_v3".into();
    shape["first_k_dense_replace"] = shape["num_hidden_layers"].clone();
    shape["num_nextn_predict_layers"] = 0.into();
}

/// Sets what the class of Muse Glimmer's assistant assumes, in the configuration of its layers. The class says no size of
/// the vocabulary, which is the target's.
pub fn set_muse_glimmer(shape: &mut Value) {
    let of_ropes = ["rope_parameters", "rope_scaling"].map(|place| &shape[place]["rope_theta"]);
    if of_ropes.into_iter().all(Value::is_null) && shape["rope_theta"].is_null() {
        shape["rope_theta"] = 5e5.into();
    }
    if shape["rms_norm_eps"].is_null() {
        shape["rms_norm_eps"] = 1e-5.into();
    }
    if shape["vocab_size"].is_null() {
        shape["vocab_size"] = ANY_VOCABULARY.into();
    }
}

/// Takes the keys about windows of a head's layers, if they say which layers have one.
///
/// # Errors
/// A message that says what is wrong with the keys.
pub fn take_windows(shape: &mut Value) -> Result<Vec<Option<usize>>, String> {
    let slides = |kind: &Value| kind == "sliding_attention";
    let Some(kinds) = shape["layer_types"].as_array() else {
        return Ok(Vec::new());
    };
    if !kinds.iter().any(slides) || shape["sliding_window"].is_null() {
        return Ok(Vec::new());
    }
    if shape["use_sliding_window"] == false {
        return Err("layer_types with sliding_attention needs use_sliding_window true".into());
    }
    let window = size(shape, "sliding_window")?.filter(|&window| window > 0);
    let window = window.ok_or("sliding_window must be more than 0")?;
    let of = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Ok(Some(window)),
        Some("full_attention") => Ok(None),
        _ => Err(format!(
            "layer_types {} is not supported: only full_attention and sliding_attention are",
            shown(kind)
        )),
    };
    let windows: Vec<Option<usize>> = kinds.iter().map(of).collect::<Result<_, String>>()?;
    let layers = size(shape, "num_hidden_layers")?.unwrap_or(0);
    if windows.len() < layers {
        let given = windows.len();
        return Err(format!(
            "layer_types has {given} entries for {layers} layers"
        ));
    }
    if let Some(keys) = shape.as_object_mut() {
        for key in [
            "layer_types",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
        ] {
            keys.remove(key);
        }
    }
    Ok(windows)
}
