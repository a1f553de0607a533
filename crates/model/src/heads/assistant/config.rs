//! What the `config.json` of an assistant of Gemma 4 says, and which layers of the target it reads.

use crate::arch::GEMMA4_ASSISTANTS;
use crate::config::ModelConfig;
use crate::config::keys::Keys;
use crate::spec::{KvSource, LayerSpec, MixerSpec};
use serde_json::Value;

/// Maximum number of groups of ids, checked before anything of that size is allocated.
const MAX_CENTROIDS: usize = 1 << 16;
/// Maximum number of ids that have logits where groups of them do.
const MAX_SCORED_IDS: usize = 1 << 16;

/// The configuration of such a head.
pub struct AssistantConfig {
    /// The configuration of the head's layers.
    pub shape: ModelConfig,
    /// The hidden size of the target.
    pub target_hidden_size: usize,
    /// Groups of ids, and how many of them have logits; `None` = all ids have.
    pub centroids: Option<(usize, usize)>,
}

impl AssistantConfig {
    /// Reads a `config.json` with the content `json`.
    ///
    /// # Errors
    /// A message that names what is missing or not supported.
    pub fn parse(json: &Value) -> Result<Self, String> {
        let mut keys = Keys::of_json(json.clone())?;
        let class = keys.texts("architectures")?.unwrap_or_default();
        keys.ignore("model_type");
        let known = GEMMA4_ASSISTANTS
            .iter()
            .find(|known| class.first().is_some_and(|class| class == known.class));
        let known = known.ok_or("architectures must name a class of Gemma 4's assistants")?;
        let (mut keys, kind) = known.text(keys)?;
        let target_hidden_size = keys.needed_size("backbone_hidden_size")?;
        let is_ordered = keys.flag("use_ordered_embeddings")?.unwrap_or(false);
        let count = keys.size("num_centroids")?.unwrap_or(2048);
        let top_k = keys.size("centroid_intermediate_top_k")?.unwrap_or(32);
        keys.only("hidden_size_per_layer_input", 0)?;
        keys.set("hidden_size_per_layer_input", 0);
        keys.only("use_double_wide_mlp", false)?;
        keys.only("final_logit_softcapping", Value::Null)?;
        // All layers share K and V, whatever the file says: those of the target.
        let (layers, shared) = (keys.peek("num_hidden_layers"), "num_kv_shared_layers");
        if keys.peek(shared) != layers {
            keys.only(shared, 0)?;
        }
        keys.ignore(shared);
        let mut shape = ModelConfig::of_text(keys, &kind)?;
        for layer in &mut shape.spec.layers {
            layer.kv = KvSource::Layer(0);
            layer.window = layer.window.map(|window| window + 1);
        }
        let centroids = is_ordered.then_some((count, top_k));
        if let Some((count, top_k)) = centroids {
            let vocab_size = shape.vocab_size;
            if !(1..=MAX_CENTROIDS).contains(&count) || !vocab_size.is_multiple_of(count) {
                return Err(format!(
                    "num_centroids {count} is not supported: only a divisor of vocab_size {vocab_size} up to {MAX_CENTROIDS} is"
                ));
            }
            // So many ids are scored for each row.
            let most = (MAX_SCORED_IDS / (vocab_size / count)).min(count);
            if !(1..=most).contains(&top_k) {
                return Err(format!(
                    "centroid_intermediate_top_k {top_k} is not supported: only 1 to {most} are"
                ));
            }
        }
        Ok(Self {
            shape,
            target_hidden_size,
            centroids,
        })
    }

    /// For each layer of the head, the layer of `target` whose K and V it reads.
    ///
    /// # Errors
    /// A message that says what differs, if the head does not belong to a model like `target`.
    pub fn owners(&self, target: &ModelConfig) -> Result<Vec<usize>, String> {
        let shape = &self.shape;
        for (what, ours, theirs) in [
            ("vocab_size", shape.vocab_size, target.vocab_size),
            (
                "backbone_hidden_size",
                self.target_hidden_size,
                target.hidden_size,
            ),
        ] {
            if ours != theirs {
                return Err(misfit(&format!(
                    "{what} is {ours}, but {theirs} in the target"
                )));
            }
        }
        let owner = |(i, layer): (usize, &LayerSpec)| {
            let is_alike = |other: &LayerSpec| {
                other.mixer == MixerSpec::Attention
                    && other.has_own_kv()
                    && other.window.is_some() == layer.window.is_some()
            };
            let kind = layer.window.map_or("without", |_| "with");
            let owner = (target.spec.layers.iter().rposition(is_alike)).ok_or_else(|| {
                misfit(&format!(
                    "its layer {i} is one {kind} a window, and the target has none with K and V"
                ))
            })?;
            let theirs = &target.spec.layers[owner];
            let ours = layer.kv_heads.unwrap_or(shape.kv_heads());
            let theirs = theirs.kv_heads.unwrap_or(target.kv_heads());
            if ours != theirs {
                return Err(misfit(&format!(
                    "its layer {i} reads {} heads of {} values, but layer {owner} of the target has {} of {}",
                    ours.count, ours.dim, theirs.count, theirs.dim
                )));
            }
            Ok(owner)
        };
        (shape.spec.layers.iter().enumerate().map(owner)).collect()
    }
}

/// The message that a head does not fit its target.
fn misfit(why: &str) -> String {
    format!("the head does not fit the target: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys that are published for E2B.
    fn published() -> Value {
        let text = r#"{
            "architectures": ["Gemma4AssistantForCausalLM"], "audio_token_id": 258881, "backbone_hidden_size": 1536,
            "boa_token_id": 256000, "boi_token_id": 255999, "centroid_intermediate_top_k": 32, "dtype": "bfloat16",
            "eoa_token_id": 258883, "eoi_token_id": 258882, "image_token_id": 258880, "model_type": "gemma4_assistant",
            "num_centroids": 2048, "tie_word_embeddings": true, "transformers_version": "5.7.0.dev0",
            "use_ordered_embeddings": true, "text_config": {
                "_name_or_path": "", "architectures": null, "attention_bias": false, "attention_dropout": 0.0,
                "attention_k_eq_v": false, "bos_token_id": 2, "chunk_size_feed_forward": 0, "dtype": "bfloat16",
                "enable_moe_block": false, "eos_token_id": 1, "final_logit_softcapping": null, "global_head_dim": 512,
                "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 256,
                "hidden_size_per_layer_input": 0, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
                "intermediate_size": 2048, "is_encoder_decoder": false, "label2id": {"LABEL_0": 0},
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": null,
                "num_attention_heads": 4, "num_experts": null, "num_global_key_value_heads": null,
                "num_hidden_layers": 4, "num_key_value_heads": 1, "num_kv_shared_layers": 4, "pad_token_id": 0,
                "rms_norm_eps": 1e-6, "rope_parameters": {
                    "full_attention": {
                        "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"
                    },
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}
                },
                "sliding_window": 512, "tie_word_embeddings": true, "top_k_experts": null,
                "use_bidirectional_attention": null, "use_cache": true, "use_double_wide_mlp": false,
                "vocab_size": 262144, "vocab_size_per_layer_input": 0
            }
        }"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_published_keys_are_read() {
        let head = AssistantConfig::parse(&published()).unwrap();
        assert_eq!(head.centroids, Some((2048, 32)));
        assert_eq!(head.target_hidden_size, 1536);
        let layers = &head.shape.spec.layers;
        let windows: Vec<_> = layers.iter().map(|layer| layer.window).collect();
        assert_eq!(windows, [Some(513), Some(513), Some(513), None]);
        let widths: Vec<_> = layers
            .iter()
            .map(|layer| layer.kv_heads.unwrap().dim)
            .collect();
        assert_eq!(widths, [256, 256, 256, 512]);
        assert_eq!(head.shape.spec.layer_input_width, None);
    }

    /// A target in which the last layers share K and V, too: the head reads those of the layers before.
    #[test]
    fn each_kind_of_layer_reads_the_last_of_its_kind() {
        let mut target = published()["text_config"].clone();
        target["num_hidden_layers"] = 10.into();
        target["num_kv_shared_layers"] = 5.into();
        let kinds = [["sliding_attention"; 4].as_slice(), &["full_attention"]].concat();
        target["layer_types"] = kinds.repeat(2).into();
        target["hidden_size"] = 1536.into();
        let target = ModelConfig::parse(&target.to_string()).unwrap();
        let head = AssistantConfig::parse(&published()).unwrap();
        assert_eq!(head.owners(&target), Ok(vec![3, 3, 3, 4]));
        let mut wide = published();
        wide["text_config"]["num_key_value_heads"] = 2.into();
        let wide = AssistantConfig::parse(&wide).unwrap();
        let error = wide.owners(&target).unwrap_err();
        assert!(
            error.contains("its layer 0 reads 2 heads of 256 values"),
            "{error}"
        );
    }
}
