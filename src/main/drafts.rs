//! Draft models: one beside the target, or the target's own layers.

use foretoken::error::{Error, Result};
use foretoken::model::{DraftNetwork, Head, LayerList, Model};
use foretoken::spec::{
    DraftModel, Drafter, JointModel, ParallelDrafter, Tokenizer, Translator, Vocabulary,
};
use foretoken::text::{Text, check_same_tokens};
use std::sync::Arc;

/// Prompt rows that the draft model reads per round: so many that they take little time.
const DRAFT_CHUNK: usize = 256;

/// A draft model, and what is needed to draft with it.
pub struct Draft {
    network: DraftNetwork,
    /// If its tokenizer is not the target's.
    vocabulary: Option<Vocabulary>,
}

impl Draft {
    /// `draft` beside `target`, each with its tokenizer. If the tokenizers differ, the drafts will be
    /// translated, and the log says how much they share.
    ///
    /// # Errors
    /// `Setup`, if a tokenizer is missing and the draft has more ids than the target.
    pub fn beside(
        target: &dyn Model,
        text: Option<&Arc<Text>>,
        (draft, draft_text): (Box<dyn Model>, Option<Text>),
        name: &str,
    ) -> Result<Self> {
        let (known, drafted) = (target.config().vocab_size, draft.config().vocab_size);
        let vocabulary = match (text, draft_text) {
            (Some(text), Some(draft_text)) => {
                // Output layers may be padded, but the target must have every drafted id.
                let same = check_same_tokens(text, &draft_text);
                (same.is_err() || drafted > known).then(|| {
                    let words = |text| Box::new(Words(text));
                    let (ours, theirs) = (text.clone(), Arc::new(draft_text));
                    Vocabulary::new(words(ours), words(theirs), known, drafted)
                })
            }
            _ if drafted > known => {
                return Err(Error::setup(format!(
                    "the draft model {name} has {drafted} token ids, but the target has only {known}"
                )));
            }
            _ => None,
        };
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
    pub fn own(target: &dyn Model, layers: Option<&LayerList>) -> Result<Self> {
        let count = target.config().num_layers();
        let default = LayerList::of_a_draft(count);
        let layers = layers.unwrap_or(&default);
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
