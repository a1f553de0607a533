//! The drafters, the flags that choose one, and what they mean together.

use super::draft_vocab::DraftVocab;
use crate::convert;
use crate::engine::SpecLimits;
use crate::error::{Error, Result};
use crate::kernels::quant::BlockType;
use crate::model::{HeadKind, LayerList, MAX_TREE_NODES};
use crate::parse::{at_least_one, bytes, number};
use crate::spec::{Drafter, Lookahead, NgramDrafter};
use crate::train::learn::LearnOptions;
use clap::{Args, ValueEnum};
use std::fmt;
use std::path::PathBuf;

const DEFAULT_SPEC_LENGTH: usize = 8;
/// The smallest share of a core for learning. With less, a step of training would be followed by hours of rest.
const MIN_LEARN_SHARE: f64 = 0.001;
/// A match of one token predicts the next one too rarely (25%, against 50% for two tokens; SmolLM2 on
/// Spec-Bench) to pay for a row when tokens are sampled.
const DEFAULT_PROMPT_LOOKUP: (usize, usize) = (2, 4);

/// The name of `--draft-model` that stands for the draft that is known for the target.
pub const AUTO_DRAFT: &str = "auto";

/// The drafter, and the maximum depth of its drafts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationFlags {
    /// Decode speculatively; =false decodes plainly [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    pub speculative_decoding: Option<bool>,
    /// Where drafts come from [default: model, eagle3 or parallel if --draft-model is given, whichever that
    /// is, otherwise mtp if the checkpoint has such a layer, otherwise tables].
    #[arg(long, value_enum)]
    pub drafter: Option<DrafterName>,
    /// Draft model, whose tokenizer may be another one, or EAGLE or parallel head of the target: an id, a
    /// folder or a .gguf file; or auto, the head beside the model's files, else the published draft that is
    /// known for the model.
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Branch, tag or commit of the draft model.
    #[arg(long, value_name = "REVISION")]
    pub draft_revision: Option<String>,
    /// Convert the weights of a draft in safetensors to these blocks while they are loaded [default: those of
    /// --quantize].
    #[arg(long, value_name = "TYPE", value_parser = convert::block_kinds())]
    pub draft_quantize: Option<BlockType>,
    /// Ids that a draft model, a head or an MTP layer may draft, so that its output layer takes less time: a file of ids
    /// (a JSON array, or numbers), or the number of ids that --tables-corpus has most often. No text changes [default:
    /// all].
    #[arg(long, value_name = "FILE|N")]
    pub draft_vocab: Option<DraftVocab>,
    /// Maximum depth of a draft in tokens (K) [default: 8].
    #[arg(long, value_name = "K")]
    pub spec_length: Option<usize>,
    /// Memory of the tables, texts of running requests included, in the format of --kv-cache-memory
    /// [default: 64MiB].
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub tables_memory: Option<usize>,
    /// Texts that the tables know from the start: plain text with blank lines between documents, or
    /// JSON lines (.jsonl) with "text".
    #[arg(long, value_name = "FILE")]
    pub tables_corpus: Option<PathBuf>,
    /// Layers of the target that draft with --drafter self, counted from 0: ranges such as 0-11,24-29
    /// [default: the first two fifths and the last quarter].
    #[arg(long, value_name = "LAYERS")]
    pub draft_layers: Option<LayerList>,
    /// Length in tokens of the shortest n-gram that the ngram drafter matches [default: 2].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub prompt_lookup_min: Option<usize>,
    /// Length in tokens of the longest n-gram, which it tries first [default: 4].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub prompt_lookup_max: Option<usize>,
    /// Train the EAGLE-3 head of --draft-model on the texts that are served, while no request runs. The trained head is
    /// kept in this folder, and the next start continues with it. On the CPU only, with one API key or none. SECURITY.md
    /// says what it reveals to other clients.
    #[arg(long, value_name = "DIR")]
    pub learn: Option<PathBuf>,
    /// With --learn: share of one core's time that training takes while no request runs [default: 0.25].
    #[arg(long, value_name = "SHARE",
          value_parser = number("a number above 0 and at most 1", |&share: &f64| share > 0. && share <= 1.))]
    pub learn_share: Option<f64>,
}

/// The kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrafterName {
    /// The model of --draft-model.
    Model,
    /// The EAGLE head of --draft-model (EAGLE-3, or 1 and 2), which reads the target's hidden states.
    Eagle3,
    /// The parallel head of --draft-model (DFlash), which reads them, too, and guesses a block at once.
    Parallel,
    /// Tables of what followed the same tokens in this text, in earlier answers, and in the target's
    /// own predictions.
    Tables,
    /// Repeated n-grams of this text.
    Ngram,
    /// N-grams that the target writes after guessed tokens beside the text (lookahead decoding).
    Lookahead,
    /// The target without some of its layers.
    #[value(name = "self")]
    Own,
    /// The layer of the target's checkpoint that predicts further tokens, as Qwen 3.5, DeepSeek-V3 and GLM-4.5 have it.
    Mtp,
}

/// A model as given on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelChoice {
    /// A Hugging Face id, a folder or a `.gguf` file.
    pub name: String,
    /// The revision of the Hugging Face repository; `None` = the default one.
    pub revision: Option<String>,
}

/// The drafter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DrafterChoice {
    /// A draft model or a head: what the checkpoint is.
    Model(ModelChoice),
    /// An EAGLE head, which reads the target's hidden states.
    Eagle3(ModelChoice),
    /// A parallel head (DFlash), which predicts a block at once.
    Parallel(ModelChoice),
    /// Tables of what followed the same tokens before.
    Tables,
    /// Continues repeated n-grams of `min` to `max` tokens.
    Ngram {
        /// Length in tokens of the shortest n-gram.
        min: usize,
        /// Length in tokens of the longest n-gram.
        max: usize,
    },
    /// Lookahead decoding.
    Lookahead,
    /// Some of the target's layers, as in `--draft-layers`; `None` = a default choice.
    Own(Option<LayerList>),
    /// The layer of the target's checkpoint that predicts further tokens.
    Mtp,
}

impl ModelChoice {
    /// Whether it stands for the draft that is known for the target.
    pub fn is_auto(&self) -> bool {
        self.name == AUTO_DRAFT
    }
}

impl DrafterName {
    /// Whether it reads --draft-model.
    pub fn is_model(self) -> bool {
        matches!(self, Self::Model | Self::Eagle3 | Self::Parallel)
    }

    /// The drafter that `flags` describe under this name; drafts have at most `topk` siblings.
    ///
    /// # Errors
    /// `Setup`, naming a flag and what would be accepted.
    pub fn choose(self, flags: &SpeculationFlags, topk: usize) -> Result<DrafterChoice> {
        Ok(match self {
            Self::Model => DrafterChoice::Model(flags.model(self)?),
            Self::Eagle3 => DrafterChoice::Eagle3(flags.model(self)?),
            Self::Parallel => DrafterChoice::Parallel(flags.model(self)?),
            Self::Tables => DrafterChoice::Tables,
            Self::Ngram => flags.ngram()?,
            Self::Lookahead if topk < 2 => {
                return Err(Error::setup(
                    "--drafter lookahead drafts trees: add --spec-topk 4, or another number of 2 or more",
                ));
            }
            Self::Lookahead => DrafterChoice::Lookahead,
            Self::Own => DrafterChoice::Own(flags.draft_layers.clone()),
            Self::Mtp => DrafterChoice::Mtp,
        })
    }
}

/// The name on the command line.
impl fmt::Display for DrafterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl DrafterChoice {
    /// The model of `--draft-model`, if it has one.
    pub fn model(&self) -> Option<&ModelChoice> {
        match self {
            Self::Model(choice) | Self::Eagle3(choice) | Self::Parallel(choice) => Some(choice),
            _ => None,
        }
    }

    /// The same kind of drafter with another model, if it has one.
    pub fn with_model(&self, model: ModelChoice) -> Self {
        match self {
            Self::Model(_) => Self::Model(model),
            Self::Eagle3(_) => Self::Eagle3(model),
            Self::Parallel(_) => Self::Parallel(model),
            other => other.clone(),
        }
    }

    /// The name of the heads that alone are taken; `None` = this `kind`, a head or an ordinary model, is taken.
    pub fn other_head(&self, kind: Option<HeadKind>) -> Option<DrafterName> {
        match self {
            Self::Eagle3(_) if kind.is_none_or(HeadKind::is_parallel) => Some(DrafterName::Eagle3),
            Self::Parallel(_) if !kind.is_some_and(HeadKind::is_parallel) => {
                Some(DrafterName::Parallel)
            }
            _ => None,
        }
    }

    /// Whether it drafts by a network: a model, a head or the target's layers.
    pub fn has_network(&self) -> bool {
        self.model().is_some() || matches!(self, Self::Own(_) | Self::Mtp)
    }

    /// The drafter, if it needs neither a network nor tables.
    pub fn simple(&self) -> Option<Box<dyn Drafter>> {
        match self {
            Self::Ngram { min, max } => Some(Box::new(NgramDrafter::new(*min, *max))),
            Self::Lookahead => Some(Box::new(Lookahead::default())),
            _ => None,
        }
    }
}

impl fmt::Display for DrafterChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model(choice) | Self::Eagle3(choice) | Self::Parallel(choice) => {
                write!(f, "{}", choice.name)
            }
            Self::Tables => write!(f, "tables"),
            Self::Ngram { min, max } => write!(f, "ngram ({min} to {max})"),
            Self::Lookahead => write!(f, "lookahead"),
            Self::Own(Some(layers)) => write!(f, "layers {layers} of the target"),
            Self::Own(None) => write!(f, "some layers of the target"),
            Self::Mtp => write!(f, "mtp"),
        }
    }
}

/// Options of the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TablesOptions {
    /// Maximum bytes.
    pub memory: usize,
    /// Texts that they know from the start.
    pub corpus: Option<PathBuf>,
}

impl SpeculationFlags {
    /// Rejects flags of one source, the command line or the file, that contradict each other.
    ///
    /// # Errors
    /// `Setup`, naming them.
    pub fn check_conflicts(&self) -> Result<()> {
        let choice = [
            ("--draft-model", self.draft_model.is_some()),
            ("--drafter", self.drafter.is_some()),
            ("--learn", self.learn.is_some()),
        ];
        if self.speculative_decoding == Some(false)
            && let Some((flag, _)) = choice.iter().find(|(_, given)| *given)
        {
            return Err(Error::setup(format!(
                "--speculative-decoding=false uses no drafter: leave it out, or leave out {flag}"
            )));
        }
        match self.drafter {
            Some(other) if !other.is_model() && self.draft_model.is_some() => {
                Err(Error::setup(format!(
                    "--drafter {other} uses no draft model: leave out --draft-model or --drafter {other}"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Whether these flags, those of the command line, replace the file's key `name`: they choose a
    /// drafter, and the key chooses, or configures, another one.
    pub fn replaces(&self, name: &str) -> bool {
        let Some(chosen) = self.chosen() else {
            return false;
        };
        let mut particular = self.particular().into_iter();
        matches!(name, "drafter" | "speculative-decoding")
            || particular.any(|(flag, _, readers)| flag == name && !readers.contains(&chosen))
    }

    /// Whether a drafter other than a draft model, or none, is asked for.
    pub fn excludes_model(&self) -> bool {
        let chosen = self.chosen().unwrap_or(DrafterName::Model);
        self.speculative_decoding == Some(false) || !chosen.is_model()
    }

    /// The drafter and the depth of its drafts, within `limits`; `None` = plain decoding.
    ///
    /// # Errors
    /// `Setup`, naming a flag and what would be accepted.
    pub fn validate(&self, limits: &SpecLimits) -> Result<Option<(DrafterChoice, usize)>> {
        if self.speculative_decoding == Some(false) {
            return Ok(None);
        }
        let name = self.chosen().unwrap_or(DrafterName::Tables);
        self.check_particular(name)?;
        self.check_draft_vocab()?;
        let (drafter, nodes) = (name.choose(self, limits.topk)?, limits.nodes);
        match self.spec_length {
            Some(0) => Err(Error::setup(
                "--spec-length must be at least 1; for plain decoding, set --speculative-decoding=false",
            )),
            Some(length) if length > nodes => Err(Error::setup(format!(
                "--spec-length {length} is more than the {nodes} tokens of a draft: lower it, or raise --spec-nodes, up to {MAX_TREE_NODES}"
            ))),
            length => Ok(Some((drafter, length.unwrap_or(DEFAULT_SPEC_LENGTH)))),
        }
    }

    /// Whether no drafter was chosen: then the target's checkpoint decides.
    pub fn is_unchosen(&self) -> bool {
        self.chosen().is_none() && self.speculative_decoding != Some(false)
    }

    /// Returns the options of the tables, if the drafter uses them.
    pub fn tables(&self) -> TablesOptions {
        const DEFAULT_MEMORY: usize = 64 << 20;
        TablesOptions {
            memory: self.tables_memory.unwrap_or(DEFAULT_MEMORY),
            corpus: self.tables_corpus.clone(),
        }
    }

    /// Returns the options of the head's learning; `None` = it does not learn. `api_keys` is the number of keys that
    /// clients may have.
    ///
    /// # Errors
    /// `Setup`, naming a flag and what would be accepted.
    pub fn learning(&self, api_keys: usize) -> Result<Option<LearnOptions>> {
        let Some(folder) = self.learn.clone() else {
            return match self.learn_share {
                Some(_) => Err(Error::setup("--learn-share needs --learn")),
                None => Ok(None),
            };
        };
        if api_keys > 1 {
            return Err(Error::setup(format!(
                "--learn lets one head learn from all texts, so it needs one --api-key or none, not {api_keys}: leave out --learn, or start a server for each key"
            )));
        }
        let share = self.learn_share.unwrap_or(LearnOptions::SHARE);
        if !(MIN_LEARN_SHARE..=1.0).contains(&share) {
            return Err(Error::setup(format!(
                "--learn-share {share} must be from {MIN_LEARN_SHARE} to 1"
            )));
        }
        Ok(Some(LearnOptions {
            share,
            ..LearnOptions::new(folder)
        }))
    }

    /// The drafter that these flags name.
    fn chosen(&self) -> Option<DrafterName> {
        let by_model = self.draft_model.as_ref().map(|_| DrafterName::Model);
        self.drafter.or(by_model)
    }

    /// The flags that only some drafters read: name, whether it is given, and those drafters.
    fn particular(&self) -> [(&'static str, bool, &'static [DrafterName]); 10] {
        use DrafterName::{Eagle3, Model, Mtp, Ngram, Own, Parallel, Tables};
        // The tables also continue the draft of a model.
        let tables: &[DrafterName] = &[Tables, Model, Eagle3, Parallel, Own, Mtp];
        let models: &[DrafterName] = &[Model, Eagle3, Parallel];
        [
            ("draft-model", self.draft_model.is_some(), models),
            ("draft-revision", self.draft_revision.is_some(), models),
            ("draft-quantize", self.draft_quantize.is_some(), models),
            (
                "draft-vocab",
                self.draft_vocab.is_some(),
                &[Model, Eagle3, Parallel, Mtp],
            ),
            ("draft-layers", self.draft_layers.is_some(), &[Own]),
            (
                "prompt-lookup-min",
                self.prompt_lookup_min.is_some(),
                &[Ngram],
            ),
            (
                "prompt-lookup-max",
                self.prompt_lookup_max.is_some(),
                &[Ngram],
            ),
            ("tables-memory", self.tables_memory.is_some(), tables),
            ("tables-corpus", self.tables_corpus.is_some(), tables),
            ("learn", self.learn.is_some(), &[Eagle3, Model]),
        ]
    }

    /// Rejects a number of ids without texts in which they are counted, and a head that learns about others.
    fn check_draft_vocab(&self) -> Result<()> {
        match &self.draft_vocab {
            Some(_) if self.learn.is_some() => Err(Error::setup(
                "--learn trains the whole output layer of the head: leave out --learn or --draft-vocab",
            )),
            Some(DraftVocab::MostFrequent(_)) if self.tables_corpus.is_none() => Err(Error::setup(
                "--draft-vocab N counts the tokens of a text: add --tables-corpus FILE, or give a file of ids",
            )),
            _ => Ok(()),
        }
    }

    /// Rejects a flag that the drafter `name` does not read.
    fn check_particular(&self, name: DrafterName) -> Result<()> {
        let particular = self.particular().into_iter();
        let mut unread =
            particular.filter(|(_, given, readers)| *given && !readers.contains(&name));
        let Some((flag, _, readers)) = unread.next() else {
            return Ok(());
        };
        let reader = readers[0];
        Err(Error::setup(match flag {
            "draft-revision" | "draft-quantize" => format!("--{flag} needs --draft-model"),
            "draft-vocab" => format!("--{flag} needs --draft-model or --drafter mtp"),
            _ => format!(
                "--{flag} has no effect with --drafter {name}: leave it out, or choose --drafter {reader}"
            ),
        }))
    }

    fn model(&self, drafter: DrafterName) -> Result<ModelChoice> {
        let Some(name) = self.draft_model.clone() else {
            return Err(Error::setup(format!(
                "--drafter {drafter} needs a model: add --draft-model MODEL, or choose --drafter tables"
            )));
        };
        let choice = ModelChoice {
            name,
            revision: self.draft_revision.clone(),
        };
        if choice.is_auto() && choice.revision.is_some() {
            return Err(Error::setup(
                "--draft-revision is that of a draft with a name: leave it out with --draft-model auto",
            ));
        }
        Ok(choice)
    }

    fn ngram(&self) -> Result<DrafterChoice> {
        let (default_min, default_max) = DEFAULT_PROMPT_LOOKUP;
        let min = self
            .prompt_lookup_min
            .unwrap_or_else(|| default_min.min(self.prompt_lookup_max.unwrap_or(default_min)));
        let max = self.prompt_lookup_max.unwrap_or(default_max.max(min));
        if min > max {
            return Err(Error::setup(format!(
                "--prompt-lookup-min must be at most --prompt-lookup-max: they are {min} and {max}"
            )));
        }
        Ok(DrafterChoice::Ngram { min, max })
    }
}
