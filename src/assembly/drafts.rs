//! Draft models: one beside the target, or the target's own layers.

use crate::error::{Error, Result};
use crate::model::LoadedModel;
use crate::model::{DraftNetwork, Head, KvSource, LayerList, Model, ModelConfig, ModelInfo};
use crate::spec::{
    DraftModel, Drafter, JointModel, JointVocabulary, ParallelDrafter, Tokenizer, Translator,
};
use crate::text::{Text, check_same_tokens};
use std::sync::Arc;

/// Prompt rows that the draft model reads per round: so many that they take little time.
const DRAFT_CHUNK: usize = 256;

/// A draft model, and what is needed to draft with it.
pub struct LoadedDraft {
    network: DraftNetwork,
    /// If its tokenizer is not the target's.
    vocabulary: Option<JointVocabulary>,
}

impl LoadedDraft {
    /// `draft` beside `target`, each with its tokenizer. If the tokenizers differ, the drafts will be
    /// translated, and the log says how much they share.
    ///
    /// # Errors
    /// `Setup`, if a tokenizer is missing and the draft has more ids than the target.
    pub fn beside(
        target: &dyn Model,
        text: Option<&Arc<Text>>,
        (draft, draft_text): (Box<dyn LoadedModel>, Option<Text>),
        name: &str,
    ) -> Result<Self> {
        let (known, drafted) = (target.info().vocab_size, draft.info().vocab_size);
        let vocabulary = match (text, draft_text) {
            (Some(text), Some(draft_text)) => {
                // Output layers may be padded, but the target must have every drafted id.
                let same = check_same_tokens(text, &draft_text);
                (same.is_err() || drafted > known).then(|| {
                    let words = |text| Box::new(Words(text));
                    let (ours, theirs) = (text.clone(), Arc::new(draft_text));
                    JointVocabulary::new(words(ours), words(theirs), known, drafted)
                })
            }
            _ if drafted > known => {
                return Err(Error::setup(format!(
                    "the draft model {name} has {drafted} token ids, but the target has only {known}"
                )));
            }
            _ => None,
        };
        if let Some(warning) = too_large(target.info(), draft.info(), name) {
            tracing::warn!("{warning}");
        }
        let Some(vocabulary) = vocabulary else {
            return Ok(Self {
                network: DraftNetwork::Model(draft),
                vocabulary: None,
            });
        };
        let (all, shared) = vocabulary.overlap();
        tracing::info!(
            "{name} has another tokenizer, so its drafts are translated: {shared} of its {all} tokens ({:.0}%) are tokens of the target, too",
            100.0 * shared as f64 / all.max(1) as f64
        );
        if let Some(warning) = too_foreign((all, shared), name) {
            tracing::warn!("{warning}");
        }
        Ok(Self {
            network: DraftNetwork::Model(Box::new(JointModel::new(draft, &vocabulary))),
            vocabulary: Some(vocabulary),
        })
    }

    /// A head of the target, which shares its vocabulary.
    pub fn of_head(head: Box<dyn Head>) -> Self {
        Self {
            network: DraftNetwork::Head(head),
            vocabulary: None,
        }
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
        Ok(Self {
            network: DraftNetwork::Model(model),
            vocabulary: None,
        })
    }

    /// The model or head.
    pub fn model(&self) -> &dyn Model {
        self.network.model()
    }

    /// Arithmetic operations of one of its tokens over those of one of `target`'s, about: the c-hat of
    /// Leviathan et al. 2023, section 3.4.
    pub fn operations(&self, target: &dyn Model) -> f64 {
        self.model().info().multiplications / target.info().multiplications
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
                let drafter = ParallelDrafter::new(head, num_blocks, block_size, DRAFT_CHUNK)?;
                return Ok(Box::new(drafter.with_prefix_cache(prefix_caching)));
            }
            DraftNetwork::Head(head) => {
                DraftModel::of_head(head, num_blocks, block_size, DRAFT_CHUNK)?
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

/// Why a draft of this shape cannot pay, if it cannot: a step of it takes about as long as one of the target.
fn too_large(target: &ModelInfo, draft: &ModelInfo, name: &str) -> Option<String> {
    /// The largest share of the target's multiplications that a draft may have. At a half, drafts pay only where
    /// nearly all draft tokens are accepted.
    const MAX_SHARE: f64 = 0.5;
    let share = draft.multiplications / target.multiplications;
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
pub fn no_mtp(name: &str) -> Error {
    Error::setup(format!(
        "--drafter mtp: {name} has no layer for further tokens that is supported (those of Qwen3-Next, Qwen 3.5, DeepSeek-V3, GLM-4.5 to 4.7 and ERNIE 4.5 with experts are): leave out --drafter"
    ))
}

/// The error that a layer for further tokens, which `--drafter mtp` asks for, cannot be loaded.
pub fn mtp_refused(error: Error) -> Error {
    Error::setup(format!("--drafter mtp: {error}"))
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
