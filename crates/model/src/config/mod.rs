//! A model's configuration: shapes, layers, special ids.

pub(crate) mod gpu;
mod info;
pub(crate) mod keys;
pub(crate) mod layer_list;
pub(crate) mod modules;
pub(crate) mod pooling;
pub(crate) mod reranker;
mod sizes;
mod special_ids;

use crate::arch::{self, ARCHITECTURES, Architecture, IMAGE_TENSORS, WRAPPERS};
use crate::layers::rope::{RopeScaling, RopeSpec};
use crate::packed::PackedConfig;
use crate::spec::{LayerSpec, MixerSpec, ModelSpec, QkNorm, RopeRows};
use candle_core::DType;
use candle_core::quantized::gguf_file::Value;
use foretoken_core::error::{Error, Result};
use foretoken_core::files;
use foretoken_core::gguf::Header;
use foretoken_core::kv::{KvForm, KvHeads, KvShape};
use foretoken_kernels::latent_group;
use keys::{Keys, ModelShape};
use special_ids::{add_missing, end_ids, gguf_end_ids, gguf_id, mask_token};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// llama.cpp's pooling type of models with a layer for classification after the last hidden state.
const RANK: u64 = 4;
/// The only architecture whose files of that type are read: llama.cpp takes the softmax of its outputs.
const RANKS: &str = "qwen3";
/// llama.cpp's name of that layer.
const CLASSIFIER: &str = "cls.output";

/// llama.cpp's name of EmbeddingGemma.
const EMBEDDING_GEMMA: &str = "gemma-embedding";
/// llama.cpp's names of the dense layers after its pooling.
const GGUF_DENSE: [&str; 2] = ["dense_2.weight", "dense_3.weight"];

/// The shapes and constants of a decoder, from `config.json` or GGUF metadata.
#[derive(Debug, Clone, Default)]
pub struct ModelConfig {
    /// The name of its architecture in `arch/mod.rs`; of a GGUF file, its name there.
    pub architecture: String,
    /// Number of ids of the embedding and, in most models, of the output layer.
    pub vocab_size: usize,
    /// Number of ids of the output layer, if a draft predicts only some ids: [`output_ids`](Self::output_ids), or
    /// those of the tensor `d2t`.
    pub draft_vocab_size: Option<usize>,
    /// The ids of which rows of the output layer are loaded, if a draft is to predict fewer than it could.
    pub output_ids: Option<Arc<[u32]>>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP in layers that have no other.
    pub intermediate_size: usize,
    /// What the layers and the ends of the model compute.
    pub spec: ModelSpec,
    /// Number of query heads.
    pub num_heads: usize,
    /// Key/value heads (grouped-query attention); divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head: as given, otherwise `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Added to the mean square of norms (the variance of a LayerNorm).
    pub rms_norm_eps: f64,
    /// The longest sequence that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Ids that end a text; zero or more.
    pub eos_token_ids: Vec<u32>,
    /// The id that begins a text, if there is one.
    pub bos_token_id: Option<u32>,
    /// The id that stands for tokens to guess, of a draft model that guesses several in one forward (PARD).
    pub mask_token: Option<u32>,
    /// How matrices are packed, if they are.
    pub packed: Option<PackedConfig>,
    /// Prefixes of the names of the tensors that a checkpoint has for images. These tensors are not read.
    pub skipped_tensors: &'static [&'static str],
}

/// The architecture of an EAGLE-3 head in a GGUF file.
pub const GGUF_EAGLE3: &str = "eagle3";
/// The architecture of a parallel head in a GGUF file.
pub const GGUF_DFLASH: &str = "dflash";
/// The architectures of all draft heads in GGUF files.
pub const GGUF_HEADS: [&str; 2] = [GGUF_EAGLE3, GGUF_DFLASH];

/// Keys of draft heads that say nothing about their layers: [`HeadConfig`](crate::HeadConfig) reads them, except those
/// of training (`lambda_base_start` and `lambda_base_decay_ratio`), and `bias`, whether the linear layer before the
/// layers of EAGLE-1 has one: its tensors tell.
pub const HEAD_KEYS: &str = "
    aux_hidden_state_layer_ids bias block_size confidence_head_with_markov conv_group_size
    conv_kernel_size dflash_config eagle_aux_hidden_state_layer_ids eagle_config emb_dim
    embed_requires_grad enable_confidence_head extract_layers fc_norm final_logit_softcapping
    foretoken_acceptance gru_hidden_dim has_no_defaults_at_init input_embedding_scale is_causal lambda_base_decay_ratio
    lambda_base_start logits_correction_emb_dim markov_head_type markov_rank mask_token_id
    norm_before_fc norm_before_residual norm_output num_anchors num_aux_hidden_states
    num_target_layers output_multiplier pure_draft_prefix_len sample_from_anchor selector_rank
    selector_top_k shift_label
    sliding_window_non_causal speculators_config speculators_model_type speculators_version
    target_hidden_size target_layer_ids target_model_type use_aux_hidden_state";

impl ModelConfig {
    /// Reads `config.json` (the file, or the folder that contains it), and adds the end tokens of a
    /// `generation_config.json` beside it.
    ///
    /// # Errors
    /// A setup error that names the file and the problem.
    pub fn from_json(path: &Path) -> Result<Self> {
        let file = files::config_of(path);
        let text = files::read_text(&file)?;
        let mut config = Self::parse(&text).map_err(|e| Error::in_file(&file, e))?;
        let generation = file.with_file_name("generation_config.json");
        if let Some(text) = files::read_text_if_any(&generation)? {
            let json = serde_json::from_str(&text).map_err(|e| Error::in_file(&generation, e))?;
            let ids =
                Keys::of_json(json).and_then(|mut keys| end_ids(&mut keys, config.vocab_size));
            add_missing(
                &mut config.eos_token_ids,
                ids.map_err(|e| Error::in_file(&generation, e))?,
            );
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let json = files::parse_json(text).map_err(|e| e.to_string())?;
        let mut keys = Keys::of_json(json)?;
        let classes = keys.texts("architectures")?.unwrap_or_default();
        let kind = keys.text("model_type")?;
        let name = classes.first().or(kind.as_ref());
        let wrapper = WRAPPERS.iter().find(|wrapper| match classes.first() {
            Some(class) => class == wrapper.class,
            None => kind.as_deref() == Some(wrapper.name),
        });
        if let Some(wrapper) = wrapper {
            let (keys, kind) = wrapper.text(keys)?;
            return Ok(Self {
                skipped_tensors: &IMAGE_TENSORS,
                ..Self::of_text(keys, &kind)?
            });
        }
        let found = ARCHITECTURES.iter().find(|arch| match classes.first() {
            Some(class) => arch.has_class(class),
            None => kind.as_deref() == Some(arch.name),
        });
        let found = found.ok_or_else(|| unsupported(name.map(String::as_str)))?;
        (found.defaults)(&mut keys);
        Self::read_in_directions(keys, found.name, found.spec)
    }

    /// Reads the keys of a decoder of texts that is a part of another class: those of the architecture `kind`.
    pub(crate) fn of_text(mut keys: Keys, kind: &str) -> Result<Self, String> {
        let found = ARCHITECTURES.iter().find(|arch| arch.name == kind);
        let found = found.ok_or_else(|| unsupported(Some(kind)))?;
        (found.defaults)(&mut keys);
        Self::read(keys, found.name, found.spec)
    }

    /// Reads GGUF metadata. `file` only names the file in errors.
    ///
    /// # Errors
    /// A setup error that names the file and what is missing or unsupported.
    pub fn from_gguf(header: &Header, file: &Path) -> Result<Self> {
        Self::parse_gguf(header).map_err(|e| Error::in_file(file, e))
    }

    fn parse_gguf(header: &Header) -> Result<Self, String> {
        let architecture = match header.metadata.get("general.architecture") {
            Some(Value::String(name)) => name,
            _ => return Err("general.architecture is missing".into()),
        };
        let is_head = GGUF_HEADS.contains(&architecture.as_str());
        let known = arch::of_gguf(architecture).or(is_head.then_some(Architecture::LLAMA));
        let Some(known) = known else {
            return Err(unsupported(Some(architecture)));
        };
        let mut keys = Keys::of_gguf(header, architecture);
        (known.defaults)(&mut keys);
        if is_head {
            keys.ignore(HEAD_KEYS);
        }
        let vocab_size = gguf_vocab_size(header, &mut keys, is_head)?;
        keys.set("vocab_size", vocab_size);
        if let Some(info) = header.tensors.get("d2t") {
            keys.set("draft_vocab_size", info.dims.first().copied());
        }
        let is_tied = !header.tensors.contains_key("output.weight");
        keys.set("tie_word_embeddings", is_tied);
        keys.set("eos_token_id", gguf_end_ids(header, vocab_size)?);
        keys.set(
            "bos_token_id",
            gguf_id(header, "tokenizer.ggml.bos_token_id"),
        );
        let ranks = known.name == RANKS && keys.peek("pooling_type") == RANK;
        if ranks {
            keys.ignore("pooling_type classifier.output_labels");
        }
        let mut config = if is_head {
            Self::read(keys, architecture, known.spec)?
        } else {
            Self::read_in_directions(keys, architecture, known.spec)?
        };
        if architecture == EMBEDDING_GEMMA {
            // `embedding_spec` reads them.
            config.spec.unread.extend(GGUF_DENSE.map(String::from));
        }
        if ranks {
            // `reranker_spec` reads it.
            config.spec.unread.push(format!("{CLASSIFIER}."));
        }
        if is_head {
            // Their rows have Hugging Face's order, also where they are like a Llama's.
            for layer in &mut config.spec.layers {
                layer.rope_rows = RopeRows::Halves;
            }
        }
        Ok(config)
    }

    /// As [`read`](Self::read), of a model whose tokens may see those after them, too.
    fn read_in_directions(
        mut keys: Keys,
        architecture: &str,
        spec: fn(&mut Keys, &ModelShape) -> Result<ModelSpec, String>,
    ) -> Result<Self, String> {
        let names = ["is_causal", "attention.causal"];
        let mut not_causal = None;
        for name in names {
            if keys.flag(name)? == Some(false) {
                not_causal = Some(name);
            }
        }
        let mut config = Self::read(keys, architecture, spec)?;
        if let Some(name) = not_causal {
            let made = config.spec.make_bidirectional();
            made.map_err(|e| format!("{name} false: {e}"))?;
        }
        Ok(config)
    }

    /// Takes all keys of a model of `architecture`, of which `spec` says what it computes.
    fn read(
        mut keys: Keys,
        architecture: &str,
        spec: fn(&mut Keys, &ModelShape) -> Result<ModelSpec, String>,
    ) -> Result<Self, String> {
        if keys.is_gguf() {
            for key in [
                "num_attention_heads",
                "num_key_value_heads",
                "intermediate_size",
            ] {
                same_of_all_layers(&mut keys, key);
            }
        }
        let (hidden_size, num_heads) = (
            keys.needed_size("hidden_size")?,
            keys.needed_size("num_attention_heads")?,
        );
        let head_dim = match keys.size("head_dim")? {
            Some(given) => given,
            None if num_heads == 0 || hidden_size.is_multiple_of(num_heads) => {
                hidden_size / num_heads.max(1)
            }
            None => {
                return Err(format!(
                    "hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}, and there is no head_dim"
                ));
            }
        };
        let eps = keys.number("rms_norm_eps")?;
        if eps.is_none() && keys.is_gguf() {
            return Err(keys.missing("rms_norm_eps"));
        }
        let shape = ModelShape {
            num_layers: keys.needed_size("num_hidden_layers")?,
            head_dim,
            hidden_size,
            num_heads,
            num_kv_heads: keys.size("num_key_value_heads")?.unwrap_or(num_heads),
            intermediate_size: keys.needed_size("intermediate_size")?,
            vocab_size: keys.needed_size("vocab_size")?,
            max_position_embeddings: keys.size("max_position_embeddings")?.unwrap_or(2048),
        };
        let mut config = Self {
            architecture: architecture.to_owned(),
            vocab_size: shape.vocab_size,
            draft_vocab_size: keys.size("draft_vocab_size")?,
            output_ids: None,
            hidden_size,
            intermediate_size: shape.intermediate_size,
            spec: ModelSpec::default(),
            num_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim,
            rms_norm_eps: eps.unwrap_or(1e-6),
            max_position_embeddings: shape.max_position_embeddings,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids: Vec::new(),
            bos_token_id: keys.ids("bos_token_id")?.first().copied(),
            mask_token: None,
            packed: None,
            skipped_tensors: &[],
        };
        config.validate(shape.num_layers)?;
        config.eos_token_ids = end_ids(&mut keys, config.vocab_size)?;
        config.mask_token = mask_token(&mut keys, config.vocab_size)?;
        config.spec = spec(&mut keys, &shape)?;
        config.packed = PackedConfig::take(&mut keys)?;
        config.validate_layers()?;
        config
            .spec
            .check(head_dim, config.max_position_embeddings)?;
        keys.finish(&shape)?;
        Ok(config)
    }

    /// The shape of a pool with K and V in `dtype`.
    pub fn kv_shape(&self, dtype: DType) -> KvShape {
        self.kv_shape_in(None, dtype)
    }

    /// The shape of a pool with K and V of attention in `form`, and all else in `dtype`.
    pub(crate) fn kv_shape_in(&self, form: Option<KvForm>, dtype: DType) -> KvShape {
        KvShape {
            states: self.spec.states(),
            ..KvShape::new(self.spec.pool_heads(self.kv_heads(), form), dtype)
        }
    }

    /// The key/value heads of the layers that have no others.
    pub fn kv_heads(&self) -> KvHeads {
        KvHeads::new(self.num_kv_heads, self.head_dim)
    }

    /// Query heads that are computed together, because they have the same head of keys, in the layer with the most.
    pub(crate) fn max_query_heads_a_key(&self) -> usize {
        let (own, heads) = (self.kv_heads().count, self.num_heads);
        let of_layer = |layer: &LayerSpec| match layer.mixer {
            MixerSpec::Latent(_) => Some(latent_group(heads)),
            MixerSpec::Attention => {
                Some(heads / layer.kv_heads.map_or(own, |heads| heads.count).max(1))
            }
            _ => None,
        };
        let layers = self.spec.layers.iter().filter_map(of_layer);
        layers.max().unwrap_or(heads / own.max(1))
    }

    /// Whether it is the decoder of a model for images and texts.
    pub(crate) fn is_part(&self) -> bool {
        !self.skipped_tensors.is_empty()
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.spec.layers.len()
    }

    /// The position embeddings of the layers that have one.
    pub fn ropes(&self) -> impl Iterator<Item = &RopeSpec> {
        let layers = self.spec.layers.iter();
        layers.filter_map(|layer| layer.rope.as_ref())
    }

    /// The configuration of a draft of which only the rows `ids` of the output layer are loaded (FR-Spec, Zhao et al.
    /// 2025, arXiv 2502.14856).
    ///
    /// # Errors
    /// If it predicts only some ids as it is, or does not have one of these.
    pub(crate) fn with_output_ids(mut self, ids: &Arc<[u32]>) -> Result<Self, String> {
        let vocab_size = self.vocab_size;
        let size = self.output_size();
        if size < vocab_size || self.output_ids.is_some() {
            return Err(format!(
                "--draft-vocab: the draft predicts only {size} of {vocab_size} ids as it is: leave it out"
            ));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(format!(
                "--draft-vocab: id {id} is not below the draft's vocab_size {vocab_size}"
            ));
        }
        self.draft_vocab_size = Some(ids.len());
        self.output_ids = Some(ids.clone());
        Ok(self)
    }

    /// Number of rows of the output layer.
    pub fn output_size(&self) -> usize {
        self.draft_vocab_size.unwrap_or(self.vocab_size)
    }

    /// The position embedding of all layers, if the model is like a Llama, with or without biases and norms of the
    /// heads of q and k.
    ///
    /// # Errors
    /// If a layer is another one, or there is none.
    pub fn plain_rope(&self) -> Result<&RopeSpec, String> {
        let rope = self.ropes().next();
        let is_plain = |rope: &RopeSpec| {
            let plain = self.spec.layers.iter().map(|layer| LayerSpec {
                rope_rows: layer.rope_rows,
                qkv_bias: layer.qkv_bias,
                o_bias: layer.o_bias,
                mlp_bias: layer.mlp_bias,
                qk_norm: layer.qk_norm.filter(|norm| *norm == QkNorm::Head),
                ..LayerSpec::llama(rope.clone(), self.head_dim)
            });
            self.spec == plain.collect::<Vec<_>>().into()
        };
        let is_known = |rope: &RopeSpec| {
            rope.query_scaling.is_none()
                && matches!(rope.scaling, None | Some(RopeScaling::Llama3(_)))
        };
        let rope = rope.filter(|rope| is_known(rope) && is_plain(rope));
        rope.ok_or_else(|| {
            "only models whose layers all are like Llama's are supported here".to_owned()
        })
    }
}

/// `config.json` of a folder: its path and its content.
pub(crate) fn read_json(path: &Path) -> Result<(PathBuf, serde_json::Value)> {
    let file = files::config_of(path);
    let text = files::read_text(&file)?;
    let json = files::parse_json(&text).map_err(|e| Error::in_file(&file, e))?;
    if json.is_object() {
        Ok((file, json))
    } else {
        Err(Error::in_file(&file, "it must be a JSON object"))
    }
}

/// Makes the values that a GGUF file has for the layers one value, if they are the same.
fn same_of_all_layers(keys: &mut Keys, key: &str) {
    if let Some((first, others)) = keys.peek(key).as_array().and_then(|all| all.split_first())
        && others.iter().all(|other| other == first)
    {
        keys.set(key, first.clone());
    }
}

/// The number of rows of the embedding, which is also that of the logits. The tokenizer may have fewer ids.
fn gguf_vocab_size(header: &Header, keys: &mut Keys, is_head: bool) -> Result<usize, String> {
    let embedding = header.tensors.get("token_embd.weight");
    match embedding.map(|info| info.dims.as_slice()) {
        Some([rows, _]) => Ok(*rows),
        // A head shares the target's embedding.
        None if is_head => keys.needed_size("vocab_size"),
        _ => Err("token_embd.weight is missing or no matrix".into()),
    }
}

fn unsupported(name: Option<&str>) -> String {
    let wrappers = WRAPPERS.iter().map(|wrapper| wrapper.class);
    let supported = ARCHITECTURES.iter().map(|arch| arch.class);
    let supported: Vec<&str> = supported.chain(wrappers).collect();
    format!(
        "architecture '{}' is not supported: only {} are",
        name.unwrap_or("(none given)"),
        supported.join(", ")
    )
}
