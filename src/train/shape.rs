//! The shapes of what is trained, from flags and the target.

use super::{Method, Objective, Options, Target};
use crate::error::{Error, Result};
use crate::files::config_of;
use crate::model::{HeadKind, ModelConfig};
use serde_json::{Value, json};
use std::path::Path;

/// What to train.
pub struct Shape {
    pub config: ModelConfig,
    /// Its `config.json`.
    pub json: Value,
    /// The layers of the target whose hidden states it reads.
    pub taps: Vec<usize>,
}

/// The shape of the draft model or the head that `options` ask for.
///
/// # Errors
/// `Setup`, if it does not fit the target or the other options.
pub fn of(options: &Options, target: &Target) -> Result<Shape> {
    let shape = match options.method {
        Method::Draft => draft_model(options, target)?,
        Method::Eagle3 => head(options, target)?,
    };
    if options.top_k > shape.config.vocab_size {
        return Err(Error::setup(format!(
            "--top-k must be at most {}, the number of token ids, not {}",
            shape.config.vocab_size, options.top_k
        )));
    }
    Ok(shape)
}

fn draft_model(options: &Options, target: &Target) -> Result<Shape> {
    let Some(path) = &options.draft_config else {
        return Err(Error::setup(
            "--method draft needs --draft-config, a config.json with the draft's shape",
        ));
    };
    let (config, json) = given(path, options, target)?;
    Ok(Shape {
        config,
        json,
        taps: Vec::new(),
    })
}

/// The configuration in the file or folder `path`, and its JSON.
fn given(path: &Path, options: &Options, target: &Target) -> Result<(ModelConfig, Value)> {
    let file = config_of(path);
    let draft = ModelConfig::from_json(&file)?;
    let text = std::fs::read_to_string(&file).map_err(|e| Error::in_file(&file, e))?;
    let json = serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
    if draft.architecture != "llama" {
        return Err(Error::in_file(
            &file,
            format!(
                "a draft of architecture {} cannot be trained: only llama can",
                draft.architecture
            ),
        ));
    }
    let (wanted, whose) = match &target.config {
        Some(config) => (config.vocab_size, "model"),
        None => (target.text.vocab_size(), "tokenizer"),
    };
    if draft.vocab_size != wanted {
        return Err(Error::in_file(
            &file,
            format!(
                "vocab_size is {} but must be {wanted}, that of the target's {whose}",
                draft.vocab_size
            ),
        ));
    }
    if options.seq_len > draft.max_position_embeddings {
        return Err(Error::in_file(
            &file,
            format!(
                "max_position_embeddings is {}: lower --seq-len, which is {}",
                draft.max_position_embeddings, options.seq_len
            ),
        ));
    }
    Ok((draft, json))
}

/// A head of the shape of the target's layers, or of those in --draft-config.
fn head(options: &Options, target: &Target) -> Result<Shape> {
    if options.objective != Objective::Kl {
        return Err(Error::setup(
            "--method eagle3 learns the target's distributions: --objective must be kl",
        ));
    }
    if !matches!(options.device.as_str(), "auto" | "cpu") {
        return Err(Error::setup(format!(
            "--method eagle3 trains on the CPU: --device must be cpu, not {}",
            options.device
        )));
    }
    if options.seq_len < options.ttt_steps + 2 {
        return Err(Error::setup(format!(
            "--seq-len must be at least {} for --ttt-steps {}, not {}",
            options.ttt_steps + 2,
            options.ttt_steps,
            options.seq_len
        )));
    }
    let Some(of_target) = &target.config else {
        return Err(Error::internal("a target has a configuration"));
    };
    let mut config = match &options.draft_config {
        Some(path) => given(path, options, target)?.0,
        None => of_target.clone(),
    };
    if config.hidden_size != of_target.hidden_size {
        return Err(Error::setup(format!(
            "--draft-config has hidden_size {}, but a head reads the target's embedding, which has {}",
            config.hidden_size, of_target.hidden_size
        )));
    }
    let wanted = config.draft_vocab_size.unwrap_or(options.draft_vocab_size);
    config = ModelConfig {
        architecture: "llama".into(),
        num_layers: 1,
        draft_vocab_size: Some(wanted.min(config.vocab_size)),
        tie_word_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
        // A head's positions are the target's.
        rope_theta: of_target.rope_theta,
        rope_scaling: of_target.rope_scaling.clone(),
        max_position_embeddings: of_target.max_position_embeddings,
        ..config
    };
    let taps = taps(options, of_target.num_layers)?;
    Ok(Shape {
        json: head_json(&config, &taps),
        config,
        taps,
    })
}

/// The layers whose inputs the head reads.
fn taps(options: &Options, layers: usize) -> Result<Vec<usize>> {
    if options.taps.is_empty() {
        return Ok(HeadKind::Eagle3.default_taps(layers));
    }
    let ascending = options.taps.is_sorted_by(|a, b| a < b);
    if !ascending || options.taps.iter().any(|&tap| tap > layers) {
        return Err(Error::setup(format!(
            "--taps must be layers in ascending order, from 0 (the embedding) to {layers} (the input of the final norm)"
        )));
    }
    Ok(options.taps.clone())
}

/// The `config.json` of a head, in the published layout.
fn head_json(config: &ModelConfig, taps: &[usize]) -> Value {
    let mut json = json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": false,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.output_size(),
        "tie_word_embeddings": false,
        "eagle_aux_hidden_state_layer_ids": taps,
    });
    if let Some(scaling) = &config.rope_scaling {
        json["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        });
    }
    json
}
