//! GGUF files of the Hub, by the name of a file or of its quantization.

use super::download::HubClient;
use super::error::HubError;
use super::headers;
use super::{Found, Repo};
use crate::hub;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files::is_inside;
use foretoken_core::gguf::{GgufSource, PartName};
use std::path::{MAIN_SEPARATOR, Path, PathBuf};
use std::sync::Arc;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub id: String,
    /// Which of the files of the repository it is.
    pub which: Which,
}

/// Quantizations of which one is taken if none is named, best first.
const DEFAULTS: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Which file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// The one with this name, in a folder perhaps.
    Named(String),
    /// The one whose name ends with this quantization, as `Q4_K_M`, before `.gguf`.
    Quantized(String),
}

impl HubFile {
    /// Reads `owner/repo:Q4_K_M` and `owner/repo/file.gguf`, as llama.cpp and ollama have them; `hf.co/` may come
    /// first. `None` if it is something else.
    pub fn of(spec: &str) -> Option<Self> {
        let hosts = ["hf.co/", "huggingface.co/"];
        let bare = hosts.iter().find_map(|host| spec.strip_prefix(host));
        let spec = bare.unwrap_or(spec);
        let mut parts = spec.splitn(3, '/');
        let (owner, rest) = (parts.next()?, parts.next()?);
        let (name, which) = match parts.next() {
            Some(file) => (rest, Which::Named(file.to_owned())),
            None => {
                let (name, tag) = rest.split_once(':')?;
                (name, Which::Quantized(tag.to_owned()))
            }
        };
        let is_file = match &which {
            Which::Named(file) => file.ends_with(".gguf") && file.split('/').all(is_word),
            Which::Quantized(tag) => is_word(tag),
        };
        let id = format!("{owner}/{name}");
        (is_file && is_word(owner) && is_word(name)).then_some(Self { id, which })
    }

    /// The file that serves the repository `id`, if it has GGUF files and no safetensors, as llama.cpp chooses it: the
    /// first of [`DEFAULTS`], or else the first by name. Of the cache, if the Hub cannot be asked.
    pub(crate) fn default_of(id: &str, revision: Option<&str>) -> Option<Self> {
        let repo = hub::repo(id, revision).ok()?;
        let listed = if hub::offline() {
            None
        } else {
            repo.client().list(id, &repo.revision).ok()
        };
        let names = match listed {
            Some((_, names)) => names,
            None => names_within(&repo.path(&repo.cached_commit()?, "")),
        };
        Some(Self {
            id: id.to_owned(),
            which: Which::Named(default(&names)?.to_owned()),
        })
    }

    /// The file, or the first of its parts, with all parts beside it. What is in the cache is used without any
    /// network access; otherwise it is downloaded, unless `HF_HUB_OFFLINE` is set.
    ///
    /// # Errors
    /// A setup error in one line: no such file, access denied, no network, not in the cache, or a file name that
    /// leaves its folder.
    pub fn fetch(&self, revision: Option<&str>) -> Result<PathBuf> {
        if let Some(found) = self.cached(revision) {
            return Ok(found);
        }
        self.ask(revision, |repo, client, commit, name| {
            for part in parts(name)? {
                if repo.file(commit, &part, Some(client))? == Found::Absent {
                    return Err(headers::missing(&part));
                }
            }
            Ok(repo.path(commit, name))
        })
    }

    /// The headers of the file and of its parts; not its weights, unless it is in the cache.
    ///
    /// # Errors
    /// Returns the errors of [`HubFile::fetch`]. A server that sends only whole files, and a file that is no GGUF file,
    /// are errors, too.
    pub fn headers(&self, revision: Option<&str>) -> Result<GgufSource> {
        if let Some(found) = self.cached(revision) {
            return Ok(found.into());
        }
        self.ask(revision, |repo, client, commit, name| {
            let files = headers::gguf(repo, client, commit, &parts(name)?)?;
            Ok(GgufSource::Headers(Arc::new(files)))
        })
    }

    /// What `take` makes of the file's commit and name, which the Hub is asked for.
    fn ask<T>(
        &self,
        revision: Option<&str>,
        take: impl FnOnce(&Repo, &HubClient, &str, &str) -> Result<T, HubError>,
    ) -> Result<T> {
        let repo = hub::repo(&self.id, revision)?;
        if hub::offline() {
            return Err(Error::setup(format!(
                "{self}: HF_HUB_OFFLINE is set, and the cache lacks it"
            )));
        }
        let client = repo.client();
        let taken = (|| {
            let (commit, name) = match &self.which {
                Which::Named(name) => (repo.current_commit(&client, name)?, name.clone()),
                Which::Quantized(tag) => {
                    let (commit, names) = client.list(&self.id, &repo.revision)?;
                    let commit = repo.accept(commit)?;
                    let name = choose(names.iter().map(String::as_str), tag);
                    (commit, name.ok_or_else(|| none_of(tag, &names))?.to_owned())
                }
            };
            take(&repo, &client, &commit, &name)
        })();
        taken.map_err(|e| self.explain(revision, &e))
    }

    /// The file, if it is in the cache with all its parts.
    pub fn cached(&self, revision: Option<&str>) -> Option<PathBuf> {
        let repo = hub::repo(&self.id, revision).ok()?;
        let commit = repo.cached_commit()?;
        let name = match &self.which {
            Which::Named(name) => name.clone(),
            Which::Quantized(tag) => {
                let names = names_within(&repo.path(&commit, ""));
                choose(names.iter().map(String::as_str), tag)?.to_owned()
            }
        };
        let parts = parts(&name).ok()?;
        let all_there = parts.iter().all(|part| repo.path(&commit, part).exists());
        all_there.then(|| repo.path(&commit, &name))
    }

    fn explain(&self, revision: Option<&str>, error: &HubError) -> Error {
        let at = revision.map_or(String::new(), |r| format!(" at revision '{r}'"));
        match error {
            HubError::NotFound => Error::setup(format!(
                "{self}{at}: neither a local path nor a file that the Hub has (a private model needs HF_TOKEN)"
            )),
            HubError::Other(_) => Error::setup(format!("{self}{at}: {error}")),
            _ => hub::explain(&self.to_string(), revision, error),
        }
    }
}

impl std::fmt::Display for HubFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.which {
            Which::Named(file) => write!(f, "{}/{file}", self.id),
            Which::Quantized(tag) => write!(f, "{}:{tag}", self.id),
        }
    }
}

/// The names of the GGUF models of the repository `id` in the cache; of one in parts, that of the first.
pub fn cached_names(id: &str) -> Vec<String> {
    let folder = || {
        let repo = hub::repo(id, None).ok()?;
        Some(repo.path(&repo.cached_commit()?, ""))
    };
    let names = folder().map(|folder| names_within(&folder));
    let mut names = names.unwrap_or_default();
    names.retain(|name| is_model(name));
    names
}

/// Whether `part` can be a part of an id, or of a file's name.
fn is_word(part: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    !part.is_empty() && !part.starts_with('.') && part.chars().all(is_plain)
}

/// Whether a file is a model, or the first part of one: not what belongs to a model's images, or to how it was
/// quantized.
fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let is_other = file.contains("mmproj") || file.contains("imatrix");
    let is_first = PartName::of(name).is_none_or(|part| part.number == 1);
    file.ends_with(".gguf") && !is_other && is_first
}

/// The shortest of the `names` of models that end with the quantization `tag`, in any case.
fn choose<'n>(names: impl Iterator<Item = &'n str>, tag: &str) -> Option<&'n str> {
    let tag = tag.to_ascii_lowercase();
    let fits = |name: &&str| {
        let whole = PartName::of(name).map(|part| part.stem().to_owned());
        let whole = whole.unwrap_or_else(|| name.trim_end_matches(".gguf").to_owned());
        let before = whole.to_ascii_lowercase();
        let before = before.strip_suffix(&tag);
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '/']))
    };
    let fitting = names
        .filter(|name| is_inside(name) && is_model(name))
        .filter(fits);
    fitting.min_by_key(|name| (name.len(), *name))
}

/// The one of the files `names` of a repository that is taken if none is named.
fn default(names: &[String]) -> Option<&str> {
    let all = || names.iter().map(String::as_str);
    if all().any(|name| name.ends_with(".safetensors")) {
        return None;
    }
    let best = DEFAULTS.iter().find_map(|tag| choose(all(), tag));
    best.or_else(|| all().filter(|name| is_inside(name) && is_model(name)).min())
}

/// The names of all parts of a model whose first, or only, file is `name`.
fn parts(name: &str) -> Result<Vec<String>, HubError> {
    match PartName::of(name) {
        None => Ok(vec![name.to_owned()]),
        Some(part) => part.all().map_err(|e| HubError::Other(e.to_string())),
    }
}

fn none_of(tag: &str, names: &[String]) -> HubError {
    const MAX_NAMES: usize = 20;
    let models = names.iter().filter(|name| is_model(name));
    let models: Vec<_> = models.take(MAX_NAMES).map(|name| clipped(name)).collect();
    HubError::Other(match models.as_slice() {
        [] => "it has no GGUF file".to_owned(),
        models => format!(
            "no GGUF file of it ends with {}: it has {}",
            clipped(tag),
            clipped(&models.join(", "))
        ),
    })
}

/// The names of the files in `folder` and in the folders in it.
fn names_within(folder: &Path) -> Vec<String> {
    let list = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut names = Vec::new();
    for path in list(folder) {
        let within = if path.is_dir() {
            list(&path)
        } else {
            vec![path]
        };
        let relative = within
            .iter()
            .filter_map(|file| file.strip_prefix(folder).ok());
        names.extend(relative.filter_map(|name| Some(name.to_str()?.replace(MAIN_SEPARATOR, "/"))));
    }
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_llama_cpp_and_ollama() {
        let named = |id: &str, file: &str| {
            Some(HubFile {
                id: id.into(),
                which: Which::Named(file.into()),
            })
        };
        let quantized = |id: &str, tag: &str| {
            Some(HubFile {
                id: id.into(),
                which: Which::Quantized(tag.into()),
            })
        };
        assert_eq!(HubFile::of("o/m:Q4_K_M"), quantized("o/m", "Q4_K_M"));
        assert_eq!(HubFile::of("hf.co/o/m:q8_0"), quantized("o/m", "q8_0"));
        assert_eq!(HubFile::of("o/m/m-Q8_0.gguf"), named("o/m", "m-Q8_0.gguf"));
        assert_eq!(HubFile::of("o/m/Q8/m.gguf"), named("o/m", "Q8/m.gguf"));
        let others = "o/m | m:Q8 | o/m: | o/m/m.bin | ./o/m.gguf | ../o/m/m.gguf | /o/m/m.gguf | o/m/../m.gguf";
        let more = "o//m.gguf | o/m.gguf | o/m:a b | ~/o/m.gguf | o/m/a:b.gguf";
        for other in others.split(" | ").chain(more.split(" | ")) {
            assert_eq!(HubFile::of(other), None, "{other}");
        }
    }

    #[test]
    fn a_quantization_is_the_end_of_a_name() {
        let names = [
            "README.md",
            "m-UD-Q4_K_M.gguf",
            "m-Q4_K_M.gguf",
            "m.Q8_0.gguf",
            "mmproj-m-Q8_0.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            "IQ4_NL.gguf",
            "../m-Q2_K.gguf",
        ];
        let found = |tag| choose(names.into_iter(), tag);
        assert_eq!(found("Q4_K_M"), Some("m-Q4_K_M.gguf"));
        assert_eq!(found("ud-q4_k_m"), Some("m-UD-Q4_K_M.gguf"));
        assert_eq!(found("q8_0"), Some("m.Q8_0.gguf"));
        assert_eq!(found("bf16"), Some("BF16/m-BF16-00001-of-00002.gguf"));
        assert_eq!(found("IQ4_NL"), Some("IQ4_NL.gguf"));
        for none in ["K_M", "Q2_K", "Q4", "md"] {
            assert_eq!(found(none), None, "{none}");
        }
    }

    #[test]
    fn a_repository_of_gguf_files_has_a_default() {
        let found = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            default(&names).map(str::to_owned)
        };
        let [four, eight, other] = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q6_K.gguf"];
        assert_eq!(found(&[other, eight, four]).as_deref(), Some(four));
        assert_eq!(found(&[other, eight]).as_deref(), Some(eight));
        assert_eq!(
            found(&["m-a.gguf.txt", "n.gguf", other]).as_deref(),
            Some(other)
        );
        assert_eq!(found(&["a-mmproj-f16.gguf", other]).as_deref(), Some(other));
        for none in ["model.safetensors", "../m-Q4_K_M.gguf", "README.md"] {
            assert_eq!(found(&["a.txt", none]), None, "{none}");
        }
        assert_eq!(found(&["model.safetensors", four]), None);
    }
}
