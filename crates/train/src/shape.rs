//! The shapes of what is trained, from flags and the target.

use super::corpus::Row;
use super::parallel::ANCHOR_STRIDE;
use super::spec::{TrainSpec, Unrolling};
use super::target::DistillTarget;
use super::{DistillOptions, DraftSize, Method, Objective, Products, initial};
use foretoken_core::error::{Error, Result};
use foretoken_core::files::config_of;
use foretoken_core::model::MaskedBlock;
use foretoken_model::{HeadKind, LayerSpec, ModelConfig, RopeScaling, RopeSpec};
use foretoken_text::Text;
use serde_json::{Value, json};
use std::path::Path;

/// Layers of a parallel head.
const LAYERS: usize = 2;
/// Rank of the Markov head of a parallel head.
const MARKOV_RANK: usize = 64;

/// The shape of the draft model or the head that `options` ask for.
///
/// # Errors
/// `Setup`, if it does not fit the target or the other options.
pub fn of(options: &DistillOptions, target: &DistillTarget) -> Result<TrainSpec> {
    if options.method != Method::Parallel {
        let flags = [
            ("--layers", options.layers.is_some()),
            ("--mask-token-id", options.mask_token_id.is_some()),
            ("--markov-rank", options.markov_rank.is_some()),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
            return Err(Error::setup(format!("{flag} belongs to --method parallel")));
        }
    }
    if options.method != Method::Draft && options.draft_size.is_some() {
        return Err(Error::setup("--draft-size belongs to --method draft"));
    }
    if options.ttt_stride > 1 && (options.method != Method::Eagle3 || options.ttt_steps == 1) {
        return Err(Error::setup(
            "--ttt-stride belongs to --method eagle3 with at least two --ttt-steps",
        ));
    }
    if options.method == Method::Draft && options.products != Products::F32 {
        return Err(Error::setup(
            "--products bf16 belongs to --method eagle3 and parallel",
        ));
    }
    let spec = match options.method {
        Method::Draft => draft_model(options, target)?,
        Method::Eagle3 | Method::Parallel => head(options, target)?,
    };
    if let Some(path) = &options.init_from {
        initial::check(path, &spec, target.config.as_ref())?;
    }
    if options.top_k > spec.config.vocab_size {
        return Err(Error::setup(format!(
            "--top-k must be at most {}, the number of token ids, not {}",
            spec.config.vocab_size, options.top_k
        )));
    }
    Ok(spec)
}

/// The student of `options` with this configuration, which is `json` in its `config.json`.
fn spec(options: &DistillOptions, config: ModelConfig, json: Value) -> TrainSpec {
    TrainSpec {
        method: options.method,
        config,
        json,
        taps: Vec::new(),
        unrolling: Unrolling {
            passes: options.ttt_steps,
            stride: options.ttt_stride,
        },
        block: MaskedBlock {
            size: options.block_size,
            mask: 0,
            from_anchor: false,
        },
        markov_rank: 0,
        seq_len: options.seq_len,
        seed: options.seed,
        products: options.products,
    }
}

fn draft_model(options: &DistillOptions, target: &DistillTarget) -> Result<TrainSpec> {
    let (config, json) = match (&options.draft_config, options.draft_size) {
        (Some(path), _) => given(path, options, target)?,
        (None, Some(size)) => sized(size, options, target)?,
        (None, None) => {
            return Err(Error::setup(
                "--method draft needs --draft-size tiny or small, or --draft-config, a config.json with the draft's shape",
            ));
        }
    };
    Ok(spec(options, config, json))
}

/// A Llama of this `size` for the target, and its `config.json`.
fn sized(
    size: DraftSize,
    options: &DistillOptions,
    target: &DistillTarget,
) -> Result<(ModelConfig, Value)> {
    const HEAD_DIM: usize = 64;
    /// Ids from which the output layer covers only the most frequent ones: it would be most of the draft.
    const LARGE_VOCABULARY: usize = 16_000;
    let (hidden, layers) = match size {
        DraftSize::Tiny => (256, 2),
        DraftSize::Small => (512, 4),
    };
    let of_target = target.config.as_ref();
    let vocab = of_target.map_or(target.text.vocab_size(), |config| config.vocab_size);
    let context = of_target.map_or(options.seq_len, |config| config.max_position_embeddings);
    let predicted = (vocab > LARGE_VOCABULARY).then(|| options.draft_vocab_size.min(vocab));
    let special = target.text.special_ids();
    let mut json = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden / HEAD_DIM,
        "num_key_value_heads": hidden / HEAD_DIM / 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context.max(options.seq_len),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": predicted.is_none(),
        "vocab_size": vocab,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
    });
    if let Some(predicted) = predicted {
        json["draft_vocab_size"] = predicted.into();
    }
    let config = ModelConfig::parse(&json.to_string()).map_err(Error::setup)?;
    Ok((config, json))
}

/// The configuration in the file or folder `path`, and its JSON.
fn given(
    path: &Path,
    options: &DistillOptions,
    target: &DistillTarget,
) -> Result<(ModelConfig, Value)> {
    let file = config_of(path);
    let draft = ModelConfig::from_json(&file)?;
    let text = std::fs::read_to_string(&file).map_err(|e| Error::in_file(&file, e))?;
    let json = serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
    let refused = |what: String| Err(Error::in_file(&file, what));
    if draft.architecture != "llama" {
        return refused(format!(
            "a draft of architecture {} cannot be trained: only llama can",
            draft.architecture
        ));
    }
    let biased = |layer: &LayerSpec| layer.qkv_bias || layer.o_bias || layer.mlp_bias;
    if draft.plain_rope().is_err() || draft.spec.layers.iter().any(biased) {
        return refused(
            "a draft whose layers are not like Llama's, without biases, cannot be trained".into(),
        );
    }
    let (wanted, whose) = match &target.config {
        Some(config) => (config.vocab_size, "model"),
        None => (target.text.vocab_size(), "tokenizer"),
    };
    if draft.vocab_size != wanted {
        return refused(format!(
            "vocab_size is {} but must be {wanted}, that of the target's {whose}",
            draft.vocab_size
        ));
    }
    if options.seq_len > draft.max_position_embeddings {
        return refused(format!(
            "max_position_embeddings is {}: lower --seq-len, which is {}",
            draft.max_position_embeddings, options.seq_len
        ));
    }
    Ok((draft, json))
}

/// A head of the shape of the target's layers, or of those in --draft-config.
fn head(options: &DistillOptions, target: &DistillTarget) -> Result<TrainSpec> {
    let parallel = options.method == Method::Parallel;
    let (name, least, flag, of_flag) = if parallel {
        let least = options.block_size.max(ANCHOR_STRIDE) + 1;
        ("parallel", least, "--block-size", options.block_size)
    } else {
        let steps = options.ttt_steps;
        ("eagle3", steps + 2, "--ttt-steps", steps)
    };
    if options.objective != Objective::Kl {
        return Err(Error::setup(format!(
            "--method {name} learns the target's distributions: --objective must be kl"
        )));
    }
    if options.seq_len < least {
        return Err(Error::setup(format!(
            "--seq-len must be at least {least} for {flag} {of_flag}, not {}",
            options.seq_len
        )));
    }
    let Some(of_target) = &target.config else {
        return Err(Error::internal("a target has a configuration"));
    };
    let (mut config, layers) = match &options.draft_config {
        Some(path) => {
            let config = given(path, options, target)?.0;
            let layers = config.num_layers();
            (config, layers)
        }
        None => (of_target.clone(), LAYERS),
    };
    if config.hidden_size != of_target.hidden_size {
        return Err(Error::setup(format!(
            "--draft-config has hidden_size {}, but a head reads the target's embedding, which has {}",
            config.hidden_size, of_target.hidden_size
        )));
    }
    let wanted = config.draft_vocab_size.unwrap_or(options.draft_vocab_size);
    let layers = if parallel {
        options.layers.unwrap_or(layers)
    } else {
        1
    };
    // A head's positions are the target's.
    let rope = RopeSpec {
        width: config.head_dim,
        ..of_target.plain_rope().map_err(Error::setup)?.clone()
    };
    config = ModelConfig {
        architecture: "llama".into(),
        spec: vec![LayerSpec::llama(rope, config.head_dim); layers].into(),
        draft_vocab_size: Some(wanted.min(config.vocab_size)),
        tie_word_embeddings: false,
        max_position_embeddings: of_target.max_position_embeddings,
        ..config
    };
    let taps = taps(options, of_target.num_layers())?;
    let markov_rank = if parallel { markov_rank(options)? } else { 0 };
    let fields = if parallel {
        parallel_json(options, of_target, &taps, markov_rank)?
    } else {
        eagle3_json(&taps)
    };
    let json = head_json(&config, fields)?;
    Ok(TrainSpec {
        taps,
        markov_rank,
        ..spec(options, config, json)
    })
}

/// Returns the fields that the `config.json` of an EAGLE-3 head has besides those of every head.
pub fn eagle3_json(taps: &[usize]) -> Value {
    json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": taps,
    })
}

/// Rank of the Markov head of a parallel head.
fn markov_rank(options: &DistillOptions) -> Result<usize> {
    if let Some(rank) = options.markov_rank {
        return Ok(rank);
    }
    let Some(path) = &options.init_from else {
        return Ok(MARKOV_RANK);
    };
    // A Markov head of another kind is refused with the rest of the head.
    let head = initial::head_config(path, HeadKind::Parallel)?;
    Ok(head.markov_rank().unwrap_or_default())
}

/// Returns the fields that the `config.json` of a parallel head has besides those of every head, without the mask
/// token. The published layout numbers the outputs of the target's layers.
fn parallel_json(
    options: &DistillOptions,
    target: &ModelConfig,
    taps: &[usize],
    markov_rank: usize,
) -> Result<Value> {
    let outputs: Option<Vec<usize>> = taps.iter().map(|tap| tap.checked_sub(1)).collect();
    let outputs = outputs.ok_or_else(|| {
        Error::setup("--taps must be from 1 with --method parallel: its layout cannot express 0, the embedding")
    })?;
    let mut json = json!({
        "architectures": ["DFlashDraftModel"],
        "block_size": options.block_size,
        "num_target_layers": target.num_layers(),
        "dflash_config": { "target_layer_ids": outputs },
    });
    if markov_rank > 0 {
        // DSpark's field.
        json["markov_rank"] = markov_rank.into();
    }
    Ok(json)
}

impl TrainSpec {
    /// Chooses the mask token of a parallel head: its embedding is the target's, and is not trained.
    ///
    /// # Errors
    /// `Setup`, if the corpus contains all ids and no flag names one, or one that does not exist.
    pub fn choose_mask(
        &mut self,
        options: &DistillOptions,
        rows: &[Row],
        text: &Text,
    ) -> Result<()> {
        if self.method == Method::Parallel {
            self.block.mask = mask(options, self.config.vocab_size, rows, text)?;
            self.json["dflash_config"]["mask_token_id"] = self.block.mask.into();
        }
        Ok(())
    }
}

/// A token that means nothing else: a special one, or an id that is reserved, which no text contains.
fn mask(options: &DistillOptions, vocab_size: usize, rows: &[Row], text: &Text) -> Result<u32> {
    if let Some(id) = options.mask_token_id {
        return if (id as usize) < vocab_size {
            Ok(id)
        } else {
            Err(Error::setup(format!(
                "--mask-token-id must be below {vocab_size}, the number of token ids, not {id}"
            )))
        };
    }
    if let Some(path) = &options.init_from {
        let block = initial::head_config(path, HeadKind::Parallel)?.block;
        if let Some(block) = block.filter(|block| (block.mask as usize) < vocab_size) {
            return Ok(block.mask);
        }
    }
    let mut used = vec![false; vocab_size];
    let special = text.special_ids();
    let known = rows.iter().flat_map(|row| &row.tokens);
    for &id in known.chain(&special.eos).chain(&special.bos) {
        if let Some(used) = used.get_mut(id as usize) {
            *used = true;
        }
    }
    let last = |holds: &dyn Fn(u32) -> bool| {
        let unused = (0..vocab_size as u32).filter(|&id| !used[id as usize]);
        unused.rev().find(|&id| holds(id))
    };
    last(&|id| text.is_special(id))
        .or_else(|| last(&|_| true))
        .ok_or_else(|| {
            Error::setup("the corpus contains all token ids: --mask-token-id must name one that stands for those to guess")
        })
}

/// The layers whose inputs the head reads.
fn taps(options: &DistillOptions, layers: usize) -> Result<Vec<usize>> {
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

/// The `config.json` of a head: the fields of every head, and `fields`.
///
/// # Errors
/// If its layers are not like Llama's.
pub fn head_json(config: &ModelConfig, fields: Value) -> Result<Value> {
    let rope = config.plain_rope().map_err(Error::setup)?;
    let mut json = json!({
        "architectures": null,
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers(),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": false,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.output_size(),
        "tie_word_embeddings": false,
    });
    if let Some(RopeScaling::Llama3(scaling)) = &rope.scaling {
        json["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        });
    }
    if let (Some(json), Value::Object(fields)) = (json.as_object_mut(), fields) {
        json.extend(fields);
    }
    Ok(json)
}
