//! Fetches checkpoints from the Hugging Face Hub through its usual cache.

mod download;
mod error;
pub mod gguf;
pub mod headers;
mod link;
mod partial;
mod remote;

use crate::checkpoint::pickle;
use crate::checkpoint::shards::{SINGLE, shards};
use crate::config::modules::{MODULES, dense_files};
use download::HubClient;
use error::HubError;
use foretoken_core::console;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files::{is_inside, is_name, max_bytes, parse_json, read_text};
use hf_hub::{Cache, CacheRepo, RepoType};
use link::{link, make_folder_of};
use remote::RemoteFile;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// Files that a repository need not have.
const OPTIONAL: &str = "
    1_LogitScore/config.json 1_Pooling/config.json additional_chat_templates/tool_use.jinja
    chat_template.json generation_config.json modules.json config_sentence_transformers.json
    sentence_bert_config.json tokenizer.json tokenizer_config.json chat_template.jinja";
pub(crate) const CONFIG: &str = "config.json";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The folder of model `id` at `revision` (`main` if none), with everything needed to serve it.
///
/// A snapshot that is complete in the cache is used without any network access. Otherwise the missing
/// files are downloaded, unless `HF_HUB_OFFLINE` is set.
///
/// # Errors
/// A setup error in one line: not found, access denied, no network, not in the cache, or a repository
/// with a file name outside its folder.
pub(crate) fn fetch(id: &str, revision: Option<&str>, weights: bool) -> Result<PathBuf> {
    let repo = repo(id, revision)?;
    let explain = |error: &HubError| explain(id, revision, error);
    let cached = match repo.cached_commit() {
        Some(commit) => repo.snapshot(&commit, None, weights),
        None => Err(not_cached(&format!("revision '{}'", repo.revision))),
    };
    match cached {
        Ok((folder, true)) => return Ok(folder),
        Ok((folder, false)) if offline() => return Ok(folder),
        Err(error) if offline() => {
            return Err(Error::setup(format!(
                "{id}: HF_HUB_OFFLINE is set, and the cache lacks it ({error})"
            )));
        }
        _ => {}
    }
    let hub = repo.client();
    let fetched = repo
        .current_commit(&hub, CONFIG)
        .and_then(|commit| repo.snapshot(&commit, Some(&hub), weights));
    match (fetched, cached) {
        (Ok((folder, _)), _) => Ok(folder),
        // Only optional files are missing from the cache; all required ones are there.
        (Err(HubError::Unreachable(_)), Ok((folder, _))) => Ok(folder),
        (Err(error @ HubError::Cache { .. }), Ok((folder, _))) => {
            tracing::warn!(
                "using {id} as the Hub's cache has it, which cannot be written: {error}"
            );
            Ok(folder)
        }
        (Err(error), _) => Err(explain(&error)),
    }
}

/// The folder of model `id` at `revision` in the cache, if it has all that is needed to serve it.
pub fn cached(id: &str, revision: Option<&str>) -> Option<PathBuf> {
    let repo = repo(id, revision).ok()?;
    let commit = repo.cached_commit()?;
    let (folder, _) = repo.snapshot(&commit, None, true).ok()?;
    Some(folder)
}

/// The ids of the models of which the cache has something, in alphabetical order.
pub fn cached_ids() -> Vec<String> {
    let entries = home().and_then(|home| {
        let folder = cache(&home).path().clone();
        std::fs::read_dir(&folder).map_err(|e| Error::in_file(&folder, e))
    });
    let names = entries.into_iter().flatten().flatten();
    let ids = names.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        // The owner's name has no `--`.
        Some(name.strip_prefix("models--")?.replacen("--", "/", 1))
    });
    let mut ids: Vec<String> = ids.collect();
    ids.sort_unstable();
    ids
}

/// Model `id` at `revision` (`main` if none).
///
/// # Errors
/// `Setup`, if one of them cannot be the name of a file, or there is no home for the cache.
pub(crate) fn repo(id: &str, revision: Option<&str>) -> Result<Repo> {
    let repo = Repo::new(id, revision.unwrap_or("main"), home()?);
    if !is_inside(id) {
        let id = clipped(id);
        return Err(Error::setup(format!("'{id}' is no id of the Hub")));
    }
    if !is_inside(&repo.revision) {
        return Err(Error::setup(format!(
            "revision '{}' is not the name of a branch, tag or commit",
            repo.revision
        )));
    }
    Ok(repo)
}

/// An environment variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The path in an environment variable, if it is set. As in Python, `~` is the user's home: no shell reads the variables of
/// a service or a container.
fn path_variable(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(variable(name)?);
    let in_home = path.strip_prefix("~").ok().map(Path::to_path_buf);
    Some(match (in_home, std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path,
    })
}

/// Whether `name` is set to a true value, as `huggingface_hub` reads it.
fn is_yes(name: &str) -> bool {
    let value = variable(name).unwrap_or_default().to_ascii_uppercase();
    matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
}

pub(crate) fn offline() -> bool {
    is_yes("HF_HUB_OFFLINE")
}

/// The user's folder for caches; `None` = there is none.
pub fn cache_folder() -> Option<PathBuf> {
    match variable("XDG_CACHE_HOME") {
        Some(caches) => Some(PathBuf::from(caches)),
        None => std::env::home_dir().map(|home| home.join(".cache")),
    }
}

/// The folder in which the Hub's tools store the cache and the token.
fn home() -> Result<PathBuf> {
    if let Some(home) = path_variable("HF_HOME") {
        return Ok(home);
    }
    match cache_folder() {
        Some(caches) => Ok(caches.join("huggingface")),
        None => Err(Error::setup(
            "cannot find a home folder for the Hub's cache: set HF_HOME",
        )),
    }
}

fn cache(home: &Path) -> Cache {
    let named = path_variable("HF_HUB_CACHE").or(path_variable("HUGGINGFACE_HUB_CACHE"));
    Cache::new(named.unwrap_or(home.join("hub")))
}

fn token(home: &Path) -> Option<String> {
    if let Some(token) = variable("HF_TOKEN").or(variable("HUGGING_FACE_HUB_TOKEN")) {
        return Some(token.trim().to_owned());
    }
    if is_yes("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let file = path_variable("HF_TOKEN_PATH").unwrap_or(home.join("token"));
    let token = std::fs::read_to_string(file).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// One model at one revision. Its cache folder has `blobs` by content, `snapshots` by commit with links
/// to blobs, `refs` from revisions to commits, and `.no_exist` for files that the Hub does not have.
pub(crate) struct Repo {
    pub(crate) id: String,
    pub(crate) revision: String,
    /// The folder in which the Hub's tools store the cache and the token.
    home: PathBuf,
    folder: PathBuf,
    cache: CacheRepo,
}

/// Where a file of a repository is.
#[derive(PartialEq, Eq)]
pub(crate) enum Found {
    At(PathBuf),
    /// The Hub has reported that there is none.
    Absent,
    /// Not in the cache, and the Hub was not asked.
    Unknown,
}

impl Repo {
    fn new(id: &str, revision: &str, home: PathBuf) -> Self {
        let cache = cache(&home);
        let repo = hf_hub::Repo::with_revision(id.into(), RepoType::Model, revision.into());
        Self {
            id: id.to_owned(),
            revision: revision.to_owned(),
            folder: cache.path().join(repo.folder_name()),
            cache: cache.repo(repo),
            home,
        }
    }

    /// A client of the Hub that the environment names.
    pub(crate) fn client(&self) -> HubClient {
        let endpoint = variable("HF_ENDPOINT").unwrap_or("https://huggingface.co".into());
        HubClient::new(&endpoint, token(&self.home))
    }

    /// The commit of the revision according to the cache.
    pub(crate) fn cached_commit(&self) -> Option<String> {
        let is_commit =
            self.revision.len() == 40 && self.revision.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_commit {
            return Some(self.revision.clone());
        }
        let file = self.folder.join("refs").join(&self.revision);
        let commit = std::fs::read_to_string(file).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_name(commit))
    }

    /// The commit of the revision according to the Hub; all files are then requested at that commit.
    /// `name` is a file that it must have.
    pub(crate) fn current_commit(&self, hub: &HubClient, name: &str) -> Result<String, HubError> {
        self.accept(hub.describe(&self.id, &self.revision, name)?.commit)
    }

    /// Notes the commit that the Hub says the revision points to.
    pub(crate) fn accept(&self, commit: Option<String>) -> Result<String, HubError> {
        let commit = commit.ok_or(refused("no commit", ""))?;
        if !is_name(&commit) {
            return Err(refused("the commit", &commit));
        }
        if self.cached_commit().as_ref() != Some(&commit) {
            let made = self.cache.create_ref(&commit);
            made.map_err(|e| HubError::in_cache(&self.folder.join("refs"), &e))?;
        }
        Ok(commit)
    }

    /// What the Hub says about the file `name` of a commit.
    pub(crate) fn describe(
        &self,
        commit: &str,
        name: &str,
        hub: &HubClient,
    ) -> Result<RemoteFile, HubError> {
        hub.describe(&self.id, commit, name)
    }

    /// The snapshot's folder, and whether all its files, also the optional ones, are known. Without a
    /// `hub`, only the cache is used.
    fn snapshot(
        &self,
        commit: &str,
        hub: Option<&HubClient>,
        weights: bool,
    ) -> Result<(PathBuf, bool), HubError> {
        let need = |name: &str| match self.file(commit, name, hub)? {
            Found::At(_) => Ok(()),
            Found::Absent => Err(HubError::NotFound),
            Found::Unknown => Err(not_cached(name)),
        };
        need(CONFIG)?;
        let mut complete = true;
        for name in OPTIONAL.split_whitespace() {
            complete &= self.file(commit, name, hub)? != Found::Unknown;
        }
        for name in dense_files(&self.cache.pointer_path(commit)) {
            if weights || name.ends_with(CONFIG) {
                need(&name).map_err(|error| match error {
                    HubError::NotFound => HubError::Other(format!(
                        "{MODULES} needs {}, which it lacks",
                        clipped(&name)
                    )),
                    other => other,
                })?;
            }
        }
        if weights {
            match self.file(commit, INDEX, hub)? {
                Found::At(index) => {
                    let files = shards(&index).map_err(|e| HubError::Other(e.to_string()))?;
                    files.iter().try_for_each(|file| need(file))?;
                }
                _ => self.need_one(commit, hub)?,
            }
        }
        Ok((self.cache.pointer_path(commit), complete))
    }

    /// Finds the only file of a checkpoint in one part.
    fn need_one(&self, commit: &str, hub: Option<&HubClient>) -> Result<(), HubError> {
        let mut names = vec![SINGLE[0]];
        // Older heads have no safetensors, or another name; other models are not supported then.
        if is_head(&self.cache.pointer_path(commit).join(CONFIG)) {
            names.extend([pickle::FILES[0], SINGLE[1], pickle::FILES[1]]);
        }
        for name in names {
            match self.file(commit, name, hub)? {
                Found::At(_) => return Ok(()),
                Found::Absent => (),
                Found::Unknown => return Err(not_cached(name)),
            }
        }
        let single = SINGLE[0];
        Err(HubError::Other(format!(
            "it has neither {INDEX} nor {single}"
        )))
    }

    /// Where the file `name` of a commit is in the cache, if it is there.
    pub(crate) fn path(&self, commit: &str, name: &str) -> PathBuf {
        self.cache.pointer_path(commit).join(name)
    }

    /// Finds the file `name` in the cache, or else at the `hub`.
    pub(crate) fn file(
        &self,
        commit: &str,
        name: &str,
        hub: Option<&HubClient>,
    ) -> Result<Found, HubError> {
        let pointer = self.cache.pointer_path(commit).join(name);
        let absent = self.folder.join(".no_exist").join(commit).join(name);
        if pointer.exists() {
            return Ok(Found::At(pointer));
        }
        if absent.exists() {
            return Ok(Found::Absent);
        }
        let Some(hub) = hub else {
            return Ok(Found::Unknown);
        };
        match self.fetch(commit, name, hub) {
            Ok(blob) => {
                let linked = link(&blob, &pointer, name);
                linked.map_err(|e| HubError::in_cache(&pointer, &e))?;
                Ok(Found::At(pointer))
            }
            Err(HubError::NotFound) => {
                let noted = make_folder_of(&absent).and_then(|()| File::create(&absent));
                noted.map_err(|e| HubError::in_cache(&absent, &e))?;
                Ok(Found::Absent)
            }
            Err(error) => Err(error),
        }
    }

    /// The path of the content of the file `name` of a commit in the cache. Downloads it if it is missing.
    fn fetch(&self, commit: &str, name: &str, hub: &HubClient) -> Result<PathBuf, HubError> {
        let fetch = || self.blob(hub, &self.describe(commit, name, hub)?, name);
        match fetch() {
            // What an earlier process left may be damaged, and the file may be another one by now.
            Err(HubError::Changed(why)) => {
                tracing::warn!("downloading {name} anew: {why}");
                fetch()
            }
            fetched => fetched,
        }
    }

    /// The path of `file`'s content in the cache. Downloads it if it is missing; a lock lets only one
    /// process do so at a time.
    fn blob(&self, hub: &HubClient, file: &RemoteFile, name: &str) -> Result<PathBuf, HubError> {
        let etag = file.etag.as_deref().unwrap_or_default();
        if !is_name(etag) {
            return Err(refused("the etag", etag));
        }
        let blob = self.folder.join("blobs").join(etag);
        let part = self.folder.join("blobs").join(format!("{etag}.incomplete"));
        let lock = self.folder.join("blobs").join(format!("{etag}.lock"));
        let _lock = lock_file(&lock, name).map_err(|e| HubError::in_cache(&lock, &e))?;
        if !blob.exists() {
            download(hub, file, name, &part)?;
            std::fs::rename(&part, &blob).map_err(|e| HubError::in_cache(&blob, &e))?;
        }
        Ok(blob)
    }
}

/// Waits until no other process has the file `path` locked, to download `name`.
fn lock_file(path: &Path, name: &str) -> std::io::Result<File> {
    make_folder_of(path)?;
    let file = File::create(path)?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        tracing::info!("waiting for another process, which downloads {name}");
        file.lock()?;
    }
    Ok(file)
}

/// Whether `config` may be that of a head: it has one layer, or says so.
pub(crate) fn is_head(config: &Path) -> bool {
    let text = read_text(config).unwrap_or_default();
    let json = parse_json(&text).unwrap_or_default();
    json["num_hidden_layers"] == 1 || !json["medusa_num_heads"].is_null()
}

/// Downloads `file`, which is called `name`, to `part`, and shows the progress: a bar on a terminal, otherwise a log
/// line if the file is large.
fn download(hub: &HubClient, file: &RemoteFile, name: &str, part: &Path) -> Result<(), HubError> {
    let is_weights =
        name.ends_with(".safetensors") || name.ends_with(".gguf") || pickle::FILES.contains(&name);
    let limit = if is_weights {
        u64::MAX / 2
    } else {
        max_bytes(name)
    };
    let size = file.size.unwrap_or(0);
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = console::bar(template, size).with_message(name.to_owned());
    if bar.is_hidden() && size >= LARGE {
        let here = std::fs::metadata(part).map_or(0, |part| part.len());
        tracing::info!(
            "downloading {name} ({} MiB, of which {} are here)",
            size >> 20,
            here >> 20
        );
    }
    let done = hub.download(file, part, limit, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    done
}

/// Size in bytes from which a download gets a log line.
const LARGE: u64 = 16 << 20;

fn not_cached(what: &str) -> HubError {
    HubError::Other(format!("{what} is not cached"))
}

fn refused(what: &str, name: &str) -> HubError {
    let name = clipped(name);
    HubError::Other(format!(
        "{what} {name:?} of the repository is refused: it could be a path out of the cache"
    ))
}

/// The setup error for `error`, which says what the operator can do.
pub(crate) fn explain(id: &str, revision: Option<&str>, error: &HubError) -> Error {
    let at = revision.map_or(String::new(), |r| format!(" at revision '{r}'"));
    let message = match error {
        HubError::Denied => format!(
            "{id}: the Hub denies access: check the name, accept the model's terms on its page if \
             it is gated, and set HF_TOKEN to a token that may read it"
        ),
        HubError::NotFound => format!(
            "{id}{at} is not a local path, and the Hub has no such model with a config.json (a \
             private model needs HF_TOKEN)"
        ),
        HubError::Unreachable(_) => {
            format!("{id} is not in the cache, and the Hub cannot be reached: {error}")
        }
        HubError::Changed(_) => format!(
            "{id}{at}: a download is not the file that the Hub describes: {error}; try again later"
        ),
        HubError::Cache { is_full: true, .. } => format!(
            "{id}{at}: the Hub's cache has no room: {error}: free some, or set HF_HUB_CACHE to \
             another folder; what has arrived is kept"
        ),
        HubError::Cache { .. } => format!(
            "{id}{at}: the Hub's cache cannot be written: {error}: set HF_HUB_CACHE to a folder \
             that can"
        ),
        HubError::Other(_) => format!("{id}{at}: {error}"),
    };
    Error::setup(message)
}
