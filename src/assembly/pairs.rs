//! The published drafts of published models, by the names of the models.

use crate::model::HeadKind;
use serde::{Deserialize, Serialize};
use std::path::MAIN_SEPARATOR;
use std::sync::LazyLock;

/// The list, which is a part of the program.
const LIST: &str = include_str!("pairs.toml");

/// A draft and the models that it drafts for.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// Ids of the Hub, or names of models in this program.
    targets: Vec<String>,
    /// The draft's name for `--draft-model`.
    pub draft: String,
    pub layout: Layout,
    /// The draft's licence; `None` = its page says it.
    pub licence: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    pair: Vec<Pair>,
}

/// What a draft is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layout {
    #[serde(rename = "EAGLE-3")]
    Eagle3,
    #[serde(rename = "P-EAGLE")]
    PEagle,
    #[serde(rename = "DFlash")]
    DFlash,
    #[serde(rename = "DFlash 2")]
    DFlash2,
    #[serde(rename = "DSpark")]
    DSpark,
    Medusa,
    /// A small model.
    #[serde(rename = "model")]
    Model,
}

impl Layout {
    /// The kind of head; `None` = it is a model.
    pub fn head(self) -> Option<HeadKind> {
        match self {
            Self::Eagle3 => Some(HeadKind::Eagle3),
            Self::PEagle => Some(HeadKind::PEagle),
            Self::DFlash | Self::DFlash2 | Self::DSpark => Some(HeadKind::Parallel),
            Self::Medusa => Some(HeadKind::Medusa),
            Self::Model => None,
        }
    }

    /// The name in the list.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eagle3 => "EAGLE-3",
            Self::PEagle => "P-EAGLE",
            Self::DFlash => "DFlash",
            Self::DFlash2 => "DFlash 2",
            Self::DSpark => "DSpark",
            Self::Medusa => "Medusa",
            Self::Model => "model",
        }
    }
}

/// All pairs. Tests read the list; if a line of it were wrong, there would be none.
fn all() -> &'static [Pair] {
    static PAIRS: LazyLock<Vec<Pair>> =
        LazyLock::new(|| toml::from_str(LIST).map_or_else(|_| Vec::new(), |list: List| list.pair));
    &PAIRS
}

/// The pairs whose target has the name `name`: an id, a file, a folder, or a name in a file's metadata. The first is
/// the one to take.
pub fn of_target(name: &str) -> impl Iterator<Item = &'static Pair> {
    let wanted = family(name);
    let is_wanted = move |pair: &&Pair| {
        let mut targets = pair.targets.iter();
        !wanted.is_empty() && targets.any(|target| family(target) == wanted)
    };
    all().iter().filter(is_wanted)
}

/// The words of a model's name without its owner, folder and quantization: those of `unsloth/Qwen3-8B-GGUF:Q4_K_M` and
/// of `models/Qwen3-8B.Q8_0.gguf` are `qwen3` and `8b`.
fn family(name: &str) -> Vec<String> {
    let separators = ['/', MAIN_SEPARATOR];
    let last = name.trim_end_matches(separators).rsplit(separators).next();
    let last = last.unwrap_or_default().split(':').next();
    let lower = last.unwrap_or_default().to_ascii_lowercase();
    let words = lower.split(['-', '_', ' ', '.']);
    let words = words.filter(|word| !word.is_empty());
    let mut words: Vec<String> = words
        .take_while(|word| !is_format(word))
        .map(str::to_owned)
        .collect();
    // The name that Meta gave its models at first.
    if words.len() > 1 && words[0] == "meta" {
        words.remove(0);
    }
    words
}

/// Whether a word of a model's name begins what says how its weights are stored.
fn is_format(word: &str) -> bool {
    const FORMATS: &str = "gguf safetensors awq gptq exl2 exl3 mlx bnb fp8 fp16 fp32 bf16 f16 f32 int4 int8 w4a16 \
        w8a8 w8a16 nvfp4 mxfp4 4bit 8bit 6bit quantized ud i1 imat";
    let digits = word.strip_prefix("iq").or(word.strip_prefix('q'));
    let is_block = digits.is_some_and(|digits| digits.len() == 1 && ("1".."9").contains(&digits));
    is_block || FORMATS.split_whitespace().any(|format| format == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_list_can_be_read_and_has_no_line_twice() {
        let list: List = toml::from_str(LIST).unwrap();
        assert!(list.pair.len() > 40);
        assert_eq!(all().len(), list.pair.len());
        let mut seen = BTreeSet::new();
        for pair in &list.pair {
            assert!(!pair.targets.is_empty(), "{pair:?}");
            for target in &pair.targets {
                assert!(seen.insert((target, &pair.draft)), "{pair:?}");
                assert_ne!(family(target), family(&pair.draft), "{pair:?}");
            }
            let ids = pair.targets.iter().chain([&pair.draft]);
            for id in ids.filter(|id| !id.starts_with("foretoken-demo")) {
                let (owner, name) = id.split_once('/').unwrap();
                let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                assert!(!owner.is_empty() && name.chars().all(is_plain), "{id}");
            }
            let name = serde_json::to_value(pair.layout).unwrap();
            assert_eq!(name, pair.layout.name());
            assert_eq!(pair.layout.head().is_none(), pair.layout == Layout::Model);
        }
    }

    #[test]
    fn names_of_one_model_are_recognized() {
        let first = |name: &str| of_target(name).next().map(|pair| pair.draft.as_str());
        let wanted = Some("RedHatAI/Qwen3-8B-speculator.eagle3");
        for name in [
            "Qwen/Qwen3-8B",
            "qwen3-8b",
            "Qwen3 8B",
            "unsloth/Qwen3-8B-GGUF:Q4_K_M",
            "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf",
            "models/Qwen3-8B.IQ4_XS.gguf",
            "/a/Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf",
            "RedHatAI/Qwen3-8B-FP8-dynamic",
            "https://huggingface.co/Qwen/Qwen3-8B",
            "models/Qwen3-8B/",
        ] {
            assert_eq!(first(name), wanted, "{name}");
        }
        let path = std::path::Path::new("a").join("Qwen3-8B.Q8_0.gguf");
        assert_eq!(first(path.to_str().unwrap()), wanted);
        assert_eq!(
            first("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
            Some("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3")
        );
        // Others of the family are other models.
        for name in [
            "Qwen/Qwen3-8B-Base",
            "Qwen/Qwen3-80B",
            "Qwen3",
            "",
            "Q8_0.gguf",
            "q",
        ] {
            assert_eq!(first(name), None, "{name}");
        }
    }
}
