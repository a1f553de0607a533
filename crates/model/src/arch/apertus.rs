//! Apertus.

use super::parts::with_attention_bias;
use super::rope::{default_rope, default_theta, rope};
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, Norms, QkNorm};
use foretoken_kernels::Xielu;
use serde_json::json;

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    keys.default("rms_norm_eps", 1e-5);
    default_rope(
        keys,
        json!({
            "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }),
    );
    default_theta(keys, THETA);
}

/// The base that the class assumes.
const THETA: f64 = 12e6;

/// An Apertus model has norms of heads, and an MLP without a gate, whose activation has trained parameters in each
/// layer.
pub fn apertus(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("hidden_act", "xielu")?;
    keys.only("post_norm", false)?;
    keys.only("qk_norm", true)?;
    keys.only("mlp_bias", false)?;
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        norms: Norms {
            before_attention: Some("attention_layernorm"),
            before_mlp: Some("feedforward_layernorm"),
            ..Norms::BEFORE
        },
        qk_norm: Some(QkNorm::Head),
        mlp: MlpSpec::Xielu(None),
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    let layer = with_attention_bias(keys, layer, false)?;
    let mut layers = vec![layer; shape.num_layers];
    if keys.is_gguf() {
        // safetensors have them as tensors.
        let mut of = |name: &str| -> Result<Vec<f64>, String> {
            let key = format!("xielu.{name}");
            let values = keys.numbers(&key)?.unwrap_or_default();
            if values.len() < shape.num_layers {
                Err(keys.missing(&key))
            } else {
                Ok(values)
            }
        };
        let (alpha_p, alpha_n) = (of("alpha_p")?, of("alpha_n")?);
        let (beta, eps) = (of("beta")?, of("eps")?);
        for (i, layer) in layers.iter_mut().enumerate() {
            let (alpha_p, alpha_n) = (alpha_p[i] as f32, alpha_n[i] as f32);
            let xielu = Xielu::of_stored(alpha_p, alpha_n, beta[i] as f32, eps[i] as f32);
            layer.mlp = MlpSpec::Xielu(Some(xielu));
        }
    }
    Ok(layers.into())
}
