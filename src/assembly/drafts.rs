//! Draft models: one beside the target, or the target's own layers.

use super::checkpoint::{Checkpoint, Target};
use super::draft_vocab;
use crate::config::DrafterChoice;
use crate::error::{Error, Result};
use crate::model::{
    DraftNetwork, DraftVocabulary, Head, HeadKind, Inventory, KvSource, LayerList, LoadOptions,
    LoadedModel, Model, ModelConfig, ModelInfo, ModelSource,
};
use crate::spec::{
    BlockDrafter, DraftModel, Drafter, JointModel, JointVocabulary, Tokenizer, Translator,
};
use crate::text::{Text, check_same_tokens};
use serde::Serialize;
use std::sync::Arc;

/// Prompt rows that the draft model reads per round: so many that they take little time.
const DRAFT_CHUNK: usize = 256;

/// A model or head that drafts for the target, as `check` shows it.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    /// The candidate's name for `--draft-model`, or `mtp`.
    pub name: String,
    /// `model`, or the kind of head: `Eagle3`.
    pub kind: String,
    pub parameters: u64,
    /// Size of the weights in memory, in bytes.
    pub bytes: u64,
}

impl Candidate {
    /// The kind of a small model.
    pub const MODEL: &str = "model";

    /// `kind` is `None` for a model.
    pub fn of(name: &str, kind: Option<HeadKind>, inventory: &Inventory) -> Self {
        Self {
            name: name.into(),
            kind: kind.map_or(Self::MODEL.into(), |kind| format!("{kind:?}")),
            parameters: inventory.sum(|entry| entry.elements),
            bytes: inventory.sum(|entry| entry.loaded_bytes),
        }
    }
}

/// A draft model, and what is needed to draft with it.
pub struct LoadedDraft {
    network: DraftNetwork,
    /// If its tokenizer is not the target's.
    vocabulary: Option<JointVocabulary>,
    /// What its headers say; `None` if it has no headers of its own.
    pub candidate: Option<Candidate>,
    /// The checkpoint; `None` if it is the target's.
    pub source: Option<ModelSource>,
}

impl LoadedDraft {
    /// The draft model, the head or the target's own layers of `choice`; `None` if no model drafts. `options` are
    /// those of a draft.
    ///
    /// # Errors
    /// `Setup`, in one line: why it cannot draft for this target.
    pub fn open(
        choice: &DrafterChoice,
        target: &Target,
        options: LoadOptions,
    ) -> Result<Option<Self>> {
        let vocabulary = options.draft_vocabulary.as_ref();
        let Some(named) = choice.model() else {
            return match choice {
                DrafterChoice::Own(layers) => Self::own(&*target.model, layers.as_ref()).map(Some),
                DrafterChoice::Mtp => match Self::further_layer(target, vocabulary)? {
                    None => Err(no_mtp(&target.checkpoint.name)),
                    found => Ok(found),
                },
                _ => Ok(None),
            };
        };
        let draft = Checkpoint::find(named, options, target.checkpoint.reading)?;
        let kind = draft.head_kind()?;
        if let Some(drafter) = choice.other_head(kind) {
            return Err(Error::setup(format!(
                "--drafter {drafter}: {} is no such head: leave out --drafter",
                draft.name
            )));
        }
        let draft = match kind {
            Some(kind) => Self::head(&draft, kind, target)?,
            None => Self::beside(target, &draft)?,
        };
        Ok(Some(draft))
    }

    fn head(draft: &Checkpoint, kind: HeadKind, target: &Target) -> Result<Self> {
        let name = &draft.name;
        let read = draft.head(kind, &*target.model);
        let (head, inventory) = read.map_err(|e| Error::setup(format!("{name}: {e}")))?;
        tracing::info!("{name}: a head drafts: {}", head.layout());
        draft_vocab::log(draft.options.draft_vocabulary.as_ref(), name, head.info());
        Ok(Self {
            candidate: Some(Candidate::of(name, Some(kind), &inventory)),
            source: Some(draft.source.clone()),
            ..Self::of_head(head)
        })
    }

    /// The model of `draft` beside `target`. If the tokenizers differ, the drafts will be translated, and the log says
    /// how much they share.
    fn beside(target: &Target, draft: &Checkpoint) -> Result<Self> {
        let name = &draft.name;
        let named = |e| Error::setup(format!("{name}: {e}"));
        let draft_text = draft.text().map_err(named)?;
        let (model, inventory) = draft.model(target.bytes(), |_| Ok(())).map_err(named)?;
        if !model.generates() {
            return Err(Error::setup(format!(
                "{name} has no output layer (lm_head), so it cannot draft"
            )));
        }
        if let Some(warning) = too_large(target.model.info(), model.info(), name) {
            tracing::warn!("{warning}");
        }
        let texts = (target.text.as_ref(), draft_text);
        let vocabulary = joint_vocabulary(texts, target.model.info(), model.info(), name)?;
        let draft_vocabulary = draft.options.draft_vocabulary.as_ref();
        if vocabulary.is_some() && draft_vocabulary.is_some() {
            return Err(Error::setup(format!(
                "--draft-vocab has ids of the target, but {name} has another tokenizer: leave it out"
            )));
        }
        draft_vocab::log(draft_vocabulary, name, model.info());
        if model.info().mask_token.is_some() {
            if vocabulary.is_some() {
                return Err(Error::setup(format!(
                    "{name} guesses several tokens in one forward (PARD), which needs the target's tokenizer: it has another one"
                )));
            }
            tracing::info!("{name} guesses all tokens of a draft in one forward (PARD)");
        }
        let model: Box<dyn Model> = match &vocabulary {
            Some(vocabulary) => Box::new(JointModel::new(model, vocabulary)),
            None => model,
        };
        Ok(Self {
            vocabulary,
            candidate: Some(Candidate::of(name, None, &inventory)),
            source: Some(draft.source.clone()),
            ..Self::of_model(model)?
        })
    }

    /// The layer of the target's checkpoint that predicts further tokens, of the ids of `vocabulary`; `None` if it has none.
    ///
    /// # Errors
    /// `Setup`: it cannot be loaded.
    pub fn further_layer(
        target: &Target,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Option<Self>> {
        let found = target.further_layer(vocabulary);
        let found = found.map_err(|e| Error::setup(format!("--drafter mtp: {e}")))?;
        Ok(found.map(|(head, inventory)| {
            let name = &target.checkpoint.name;
            tracing::info!("{name} drafts for itself: {}", head.layout());
            draft_vocab::log(vocabulary, "the layer", head.info());
            let candidate = Candidate {
                kind: "Mtp".into(),
                ..Candidate::of("mtp", None, &inventory)
            };
            Self {
                candidate: Some(candidate),
                ..Self::of_head(head)
            }
        }))
    }

    /// A head of the target, which shares its vocabulary.
    pub fn of_head(head: Box<dyn Head>) -> Self {
        Self {
            network: DraftNetwork::Head(head),
            vocabulary: None,
            candidate: None,
            source: None,
        }
    }

    /// A model with the target's vocabulary.
    fn of_model(model: Box<dyn Model>) -> Result<Self> {
        refuse_recurrent(&*model)?;
        Ok(Self {
            network: DraftNetwork::Model(model),
            vocabulary: None,
            candidate: None,
            source: None,
        })
    }

    /// Some `layers` of `target`.
    ///
    /// # Errors
    /// `Setup`, if the target does not have them.
    pub fn own(target: &dyn LoadedModel, layers: Option<&LayerList>) -> Result<Self> {
        let count = target.config().num_layers();
        let layers = match layers {
            Some(layers) => layers.clone(),
            None => default_layers(target.config())?,
        };
        let model = target.subset(&layers.indices(count)?)?;
        tracing::info!("the layers {layers} of the target's {count} draft");
        Self::of_model(model)
    }

    /// Size of its own weights, in bytes.
    pub fn bytes(&self) -> u64 {
        self.candidate.as_ref().map_or(0, |found| found.bytes)
    }

    /// The model or head.
    pub fn model(&self) -> &dyn Model {
        self.network.model()
    }

    /// Arithmetic operations of one of its tokens over those of one of `target`'s, about: the c-hat of
    /// Leviathan et al. 2023, section 3.4.
    pub fn operations(&self, target: &dyn Model) -> f64 {
        share(target.info(), self.model().info())
    }

    /// The drafter, with a pool of `num_blocks` blocks, which caches prefixes or not.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn drafter(
        self,
        num_blocks: usize,
        block_size: usize,
        prefix_caching: bool,
    ) -> Result<Box<dyn Drafter>> {
        let drafter = match self.network {
            DraftNetwork::Head(head) if head.masked_block().is_some() => {
                let drafter = BlockDrafter::new(head, num_blocks, block_size, DRAFT_CHUNK)?;
                return Ok(Box::new(drafter.with_prefix_cache(prefix_caching)));
            }
            DraftNetwork::Head(head) => {
                DraftModel::of_head(head, num_blocks, block_size, DRAFT_CHUNK)?
            }
            DraftNetwork::Model(model) if model.info().mask_token.is_some() => {
                let drafter = BlockDrafter::of_model(model, num_blocks, block_size, DRAFT_CHUNK)?;
                return Ok(Box::new(drafter.with_prefix_cache(prefix_caching)));
            }
            DraftNetwork::Model(model) => {
                DraftModel::new(model, num_blocks, block_size, DRAFT_CHUNK)?
            }
        };
        let drafter = drafter.with_prefix_cache(prefix_caching);
        Ok(match self.vocabulary {
            None => Box::new(drafter),
            Some(vocabulary) => Box::new(Translator::new(drafter, vocabulary)),
        })
    }
}

/// The layers that draft by default, and those whose K and V they read.
fn default_layers(target: &ModelConfig) -> Result<LayerList> {
    let count = target.num_layers();
    let mut layers = LayerList::of_a_draft(count).indices(count)?;
    let owner = |&layer: &usize| match target.spec.layers[layer].kv {
        KvSource::Layer(owner) => Some(owner),
        _ => None,
    };
    let owners: Vec<usize> = layers.iter().filter_map(owner).collect();
    layers.extend(owners);
    layers.sort_unstable();
    layers.dedup();
    Ok(LayerList::of(layers))
}

/// The vocabulary of target and draft together, if their tokenizers differ.
fn joint_vocabulary(
    texts: (Option<&Arc<Text>>, Option<Text>),
    target: &ModelInfo,
    draft: &ModelInfo,
    name: &str,
) -> Result<Option<JointVocabulary>> {
    let (known, drafted) = (target.vocab_size, draft.vocab_size);
    let (text, draft_text) = match texts {
        (Some(text), Some(draft_text)) => (text, draft_text),
        _ if drafted > known => {
            return Err(Error::setup(format!(
                "the draft model {name} has {drafted} token ids, but the target has only {known}"
            )));
        }
        _ => return Ok(None),
    };
    // Output layers may be padded, but the target must have every drafted id.
    if check_same_tokens(text, &draft_text).is_ok() && drafted <= known {
        return Ok(None);
    }
    let words = |text| Box::new(Words(text));
    let (ours, theirs) = (text.clone(), Arc::new(draft_text));
    let vocabulary = JointVocabulary::new(words(ours), words(theirs), known, drafted);
    let (all, shared) = vocabulary.overlap();
    tracing::info!(
        "{name} has another tokenizer, so its drafts are translated: {shared} of its {all} tokens ({:.0}%) are tokens of the target, too",
        100.0 * shared as f64 / all.max(1) as f64
    );
    if let Some(warning) = too_foreign((all, shared), name) {
        tracing::warn!("{warning}");
    }
    Ok(Some(vocabulary))
}

/// Refuses a model that cannot draft, as [`DraftPool`](crate::spec::DraftPool) does.
pub fn refuse_recurrent(model: &dyn Model) -> Result<()> {
    if model.kv_shape().is_recurrent() {
        return Err(Error::setup(
            "a model with linear attention or Mamba cannot draft: only heads, tables and models with attention in all layers can",
        ));
    }
    Ok(())
}

/// Multiplications of a token of `draft` over those of one of `target`.
fn share(target: &ModelInfo, draft: &ModelInfo) -> f64 {
    draft.multiplications / target.multiplications
}

/// Why a draft of this shape cannot pay, if it cannot: a step of it takes about as long as one of the target.
pub fn too_large(target: &ModelInfo, draft: &ModelInfo, name: &str) -> Option<String> {
    /// The largest share of the target's multiplications that a draft may have. At a half, drafts pay only where
    /// nearly all draft tokens are accepted.
    const MAX_SHARE: f64 = 0.5;
    let share = share(target, draft);
    (share > MAX_SHARE).then(|| {
        format!(
            "{name} cannot make anything faster: a step of it takes about {:.0}% of one of the target; take a smaller draft, or leave out --draft-model, and tables draft",
            100.0 * share
        )
    })
}

/// Why a draft with another tokenizer cannot pay, if it cannot: `shared` of its `all` tokens are the target's.
fn too_foreign((all, shared): (usize, usize), name: &str) -> Option<String> {
    (2 * shared < all).then(|| {
        format!(
            "{name} will hardly make anything faster: fewer than half of its tokens are tokens of the target; take a draft of the target's family, or leave out --draft-model, and tables draft"
        )
    })
}

/// A model's [`Text`], as the translation of drafts sees it.
struct Words(Arc<Text>);

impl Tokenizer for Words {
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.0.token_bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        self.0.is_special(id)
    }

    fn bos(&self) -> Option<u32> {
        self.0.special_ids().bos
    }

    fn eos(&self) -> Option<u32> {
        self.0.eos()
    }

    fn encode(&self, text: &str, whole: bool) -> Vec<u32> {
        self.0.encode(text, whole).unwrap_or_default()
    }
}

/// The error that the model `name` has no layer for further tokens, which `--drafter mtp` asks for.
fn no_mtp(name: &str) -> Error {
    Error::setup(format!(
        "--drafter mtp: {name} has no layer for further tokens that is supported (those of Qwen3-Next, Qwen 3.5, DeepSeek-V3, GLM-4.5 to 4.7 and ERNIE 4.5 with experts are): leave out --drafter"
    ))
}

/// The warning that tables draft, because the layer for further tokens cannot be loaded and no flag asked for it.
pub fn tables_instead(error: &Error) -> String {
    format!("tables draft, not the layer for further tokens: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The last two of the six layers read the K and V of other layers.
    #[test]
    fn layers_that_draft_come_with_those_whose_keys_they_read() {
        let fixture = Path::new("tests/fixtures/architectures/gemma4/config.json");
        let config = ModelConfig::from_json(fixture).unwrap();
        assert_eq!(default_layers(&config).unwrap().to_string(), "0-1,3,5");
    }

    #[test]
    fn drafts_that_cannot_pay_are_told() {
        let of = |name: &str| {
            let file = format!("configs/{name}/config.json");
            let config = ModelConfig::from_json(Path::new(&file));
            config.expect("a shipped file").info()
        };
        let (one, three) = (of("llama-3.2-1b"), of("llama-3.2-3b"));
        assert_eq!(too_large(&three, &one, "d"), None);
        let same = too_large(&three, &three, "d").expect("a warning");
        assert!(same.contains("about 100% of one of the target"), "{same}");
        assert!(too_large(&one, &three, "d").is_some());
        assert_eq!(too_foreign((1000, 600), "d"), None);
        assert!(too_foreign((1000, 400), "d").is_some());
    }
}
