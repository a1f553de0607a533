//! The list of well-known models, by the names that Ollama gives them.

use foretoken_core::error::{Error, Result, clipped};
use serde::Deserialize;
use std::sync::LazyLock;

/// The list, which is a part of the program.
const LIST: &str = include_str!("models.toml");

/// Maximum number of names that an error proposes.
const MAX_NEAR: usize = 4;
/// Similarity, of 1, from which a name of the list is near another.
const NEAR: f64 = 0.75;

/// A model of the list.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownModel {
    /// Its family and its tag: `qwen3:4b`.
    pub name: String,
    /// The GGUF file of the Hub, as `--model` takes it.
    pub file: String,
    /// About the size of the file in bytes.
    pub bytes: u64,
    /// The class of its architecture.
    pub class: String,
    /// The model's licence.
    pub licence: String,
    /// The tasks that it is good for.
    pub good_for: String,
    /// Whether the family's name alone means it.
    #[serde(default, rename = "default")]
    is_default: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    model: Vec<KnownModel>,
}

impl KnownModel {
    /// The part of the name before the tag.
    fn family(&self) -> &str {
        let family = self.name.split(':').next();
        family.unwrap_or(&self.name)
    }

    /// Whether it is what Ollama means by `name`, in upper or lower case: with its tag, or, for the default of the family,
    /// with `latest` or without a tag.
    fn is_called(&self, name: &str) -> bool {
        let family = name.strip_suffix(":latest").unwrap_or(name);
        self.name.eq_ignore_ascii_case(name)
            || self.is_default && self.family().eq_ignore_ascii_case(family)
    }
}

/// All models of the list, the smallest first. Tests read the list; if a line of it were wrong, there would be none.
pub fn all() -> &'static [KnownModel] {
    static MODELS: LazyLock<Vec<KnownModel>> =
        LazyLock::new(|| toml::from_str(LIST).map_or_else(|_| Vec::new(), |list: List| list.model));
    &MODELS
}

/// The model that Ollama calls `name`, if the list has it.
pub fn find(name: &str) -> Option<&'static KnownModel> {
    all().iter().find(|model| model.is_called(name))
}

/// What `spec`, which is no file and no folder of this machine, stands for: the file of a model of the list if it is a
/// name without an owner, otherwise itself.
///
/// # Errors
/// `Setup`: the list does not have such a name. The error has the names that are near.
pub(crate) fn location(spec: &str) -> Result<&str> {
    if !is_bare(spec) {
        return Ok(spec);
    }
    if let Some(model) = find(spec) {
        return Ok(&model.file);
    }
    let near = near(spec);
    let proposed = if near.is_empty() {
        String::new()
    } else {
        format!(" (near it are {})", near.join(", "))
    };
    Err(Error::setup(format!(
        "'{}' is neither a file nor a folder, and the list of models has no such name{proposed}: give OWNER/NAME for a model of the Hub, or a path",
        clipped(spec)
    )))
}

/// Whether `spec` can be a name of the list: one word without an owner, with a tag perhaps.
pub(crate) fn is_bare(spec: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    let is_file = [".gguf", ".json", ".safetensors"]
        .iter()
        .any(|end| spec.ends_with(end));
    !spec.is_empty() && !spec.starts_with('.') && spec.chars().all(is_plain) && !is_file
}

/// The names of the list that are near `name`, the nearest first.
fn near(name: &str) -> Vec<&'static str> {
    let name = name.to_ascii_lowercase();
    // A similarity takes the square of the length.
    if name.len() > 64 {
        return Vec::new();
    }
    let score = |model: &'static KnownModel| {
        let whole = strsim::jaro_winkler(&name, &model.name);
        (
            whole.max(strsim::jaro_winkler(&name, model.family())),
            &*model.name,
        )
    };
    let mut scored: Vec<(f64, &str)> = all().iter().map(score).collect();
    scored.retain(|(score, _)| *score > NEAR);
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names = scored.into_iter().map(|(_, name)| name);
    names.take(MAX_NEAR).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ARCHITECTURES;
    use crate::hub::gguf::HubFile;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn the_list_can_be_read_and_has_models_that_can_be_served() {
        let list: List = toml::from_str(LIST).unwrap();
        assert!(list.model.len() >= 15);
        assert_eq!(all(), list.model);
        let (mut names, mut defaults) = (BTreeSet::new(), BTreeSet::new());
        for model in all() {
            let (family, tag) = model.name.split_once(':').unwrap();
            assert!(!family.is_empty() && !tag.is_empty(), "{model:?}");
            assert!(
                is_bare(&model.name) && names.insert(&model.name),
                "{model:?}"
            );
            assert!(!model.is_default || defaults.insert(family), "{model:?}");
            let file = HubFile::of(&model.file);
            assert!(file.is_some() && !is_bare(&model.file), "{model:?}");
            let mut classes = ARCHITECTURES.iter().map(|known| known.class);
            assert!(classes.any(|class| class == model.class), "{model:?}");
            assert!(!model.licence.is_empty() && !model.good_for.is_empty());
        }
        assert!(all().is_sorted_by_key(|model| model.bytes));
    }

    #[test]
    fn names_are_those_of_ollama() {
        let file = |name: &str| find(name).map(|model| model.name.as_str());
        assert_eq!(file("qwen3:4b"), Some("qwen3:4b"));
        assert_eq!(file("Qwen3:4B"), Some("qwen3:4b"));
        assert_eq!(file("llama3.2"), Some("llama3.2:3b"));
        assert_eq!(file("llama3.2:latest"), Some("llama3.2:3b"));
        assert_eq!(file("llama3.2:1b"), Some("llama3.2:1b"));
        // There are tags of these, but none of the list is what their names alone mean.
        for none in [
            "granite3.3",
            "deepseek-r1:latest",
            "qwen3:",
            ":4b",
            "",
            "latest",
        ] {
            assert_eq!(file(none), None, "{none}");
        }
    }

    #[test]
    fn other_names_are_told_which_are_near() {
        assert_eq!(location("qwen3").unwrap(), "Qwen/Qwen3-8B-GGUF:Q4_K_M");
        for itself in ["o/m", "o/m:Q4_K_M", "./x", "x.gguf", "/a", "a b"] {
            assert_eq!(location(itself).unwrap(), itself);
        }
        let refused = |name: &str| location(name).unwrap_err().to_string();
        let error = refused("qwen3:14b");
        assert!(error.contains("near it are qwen3:4b"), "{error}");
        let error = refused("lama3.2");
        assert!(error.contains("llama3.2:1b"), "{error}");
        let error = refused("zzz");
        assert!(error.contains("no such name: give OWNER/NAME"), "{error}");
        let error = refused(&"q".repeat(100_000));
        assert!(error.len() < 2_000, "{}", error.len());
    }

    /// The table of the documentation is the list.
    #[test]
    fn the_documentation_has_a_row_for_each() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
        let docs = std::fs::read_to_string(docs).unwrap();
        for model in all() {
            let (family, _) = model.name.split_once(':').unwrap();
            let name = if model.is_default {
                format!("`{}`, `{family}`", model.name)
            } else {
                format!("`{}`", model.name)
            };
            let (file, licence, good_for) = (&model.file, &model.licence, &model.good_for);
            let gb = model.bytes as f64 / 1e9;
            let row = format!("| {name} | {gb:.2} | `{file}` | {licence} | {good_for} |");
            assert!(docs.contains(&row), "{row}");
        }
    }
}
