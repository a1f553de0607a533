//! Checkpoints from the Hugging Face Hub, through its usual cache.

use super::weights::shards;
use crate::error::{Error, Result};
use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use hf_hub::repository::RepoTypeModel;
use hf_hub::{HFClient, HFError, HFRepositorySync, split_id};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Files that a repository may lack.
const OPTIONAL: [&str; 4] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The folder of model `id` at `revision` (`main` if none), with all that is needed to serve it.
///
/// A snapshot that is whole in the cache is used as it is, without asking the network. Else what is
/// missing is downloaded, unless `HF_HUB_OFFLINE` forbids it.
///
/// # Errors
/// A setup error, in one line: not found, access denied, no network, or not in the cache.
pub fn fetch(id: &str, revision: Option<&str>, weights: bool) -> Result<PathBuf> {
    // A few retries bridge a hiccup; more would only keep an offline operator waiting.
    let client = HFClient::builder()
        .retry_max_attempts(2)
        .build_sync()
        .map_err(|e| explain(id, revision, &e))?;
    let (owner, name) = split_id(id);
    let mut repo = Repo {
        repo: client.model(owner, name),
        revision,
        cache_only: true,
    };
    let cached = repo.snapshot(weights);
    match cached {
        Ok((folder, true)) => return Ok(folder),
        Ok((folder, false)) if offline() => return Ok(folder),
        Err(error) if offline() => {
            return Err(Error::setup(format!(
                "{id}: HF_HUB_OFFLINE is set, and the cache lacks it ({})",
                one_line(&error)
            )));
        }
        _ => repo.cache_only = false,
    }
    match (repo.snapshot(weights), cached) {
        (Ok((folder, _)), _) => Ok(folder),
        // What only may exist cannot be asked for; what must exist is there.
        (Err(HFError::Request { .. }), Ok((folder, _))) => Ok(folder),
        (Err(error), _) => Err(explain(id, revision, &error)),
    }
}

/// `HF_HUB_OFFLINE`, as `huggingface_hub` reads it.
fn offline() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(
        value.to_ascii_uppercase().as_str(),
        "1" | "ON" | "YES" | "TRUE"
    )
}

struct Repo<'a> {
    repo: HFRepositorySync<RepoTypeModel>,
    revision: Option<&'a str>,
    cache_only: bool,
}

impl Repo<'_> {
    /// The snapshot's folder, and whether nothing about it is left to ask the network.
    fn snapshot(&self, weights: bool) -> Result<(PathBuf, bool), HFError> {
        let config = self.file("config.json")?;
        let mut whole = true;
        for name in OPTIONAL {
            whole &= self.optional(name)? != Found::Unknown;
        }
        if weights {
            match self.optional(INDEX)? {
                Found::At(index) => {
                    let files = shards(&index).map_err(|e| HFError::Other(e.to_string()))?;
                    for file in files {
                        self.file(&file)?;
                    }
                }
                _ => {
                    self.file(SINGLE)?;
                }
            }
        }
        let folder = config.parent().map(PathBuf::from).unwrap_or_default();
        Ok((folder, whole))
    }

    fn optional(&self, name: &str) -> Result<Found, HFError> {
        match self.file(name) {
            Ok(path) => Ok(Found::At(path)),
            Err(HFError::EntryNotFound { .. }) => Ok(Found::Absent),
            Err(HFError::LocalEntryNotFound { .. }) => Ok(Found::Unknown),
            Err(error) => Err(error),
        }
    }

    fn file(&self, name: &str) -> Result<PathBuf, HFError> {
        self.repo
            .download_file()
            .filename(name)
            .maybe_revision(self.revision)
            .local_files_only(self.cache_only)
            .progress(Bar::new(name))
            .send()
    }
}

#[derive(PartialEq, Eq)]
enum Found {
    At(PathBuf),
    /// The Hub has said that there is none.
    Absent,
    /// Not in the cache, and the Hub was not asked.
    Unknown,
}

/// A download on the terminal; without one, a line in the log for what is large.
struct Bar {
    name: String,
    bar: ProgressBar,
}

/// Bytes from which a download is worth a line in the log.
const LARGE: u64 = 16 << 20;

impl Bar {
    fn new(name: &str) -> Self {
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::no_length(),
            false => ProgressBar::hidden(),
        };
        let style = ProgressStyle::with_template(
            "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        );
        Self {
            name: name.to_owned(),
            bar: bar
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(name.to_owned()),
        }
    }
}

impl ProgressHandler for Bar {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else {
            return;
        };
        match event {
            DownloadEvent::Start { total_bytes, .. } => {
                if self.bar.is_hidden() && *total_bytes >= LARGE {
                    tracing::info!("fetching {} ({} MiB)", self.name, total_bytes >> 20);
                }
                self.bar.set_length(*total_bytes);
            }
            DownloadEvent::Progress { files } => {
                for file in files {
                    self.bar.set_position(file.bytes_completed);
                }
            }
            DownloadEvent::AggregateProgress {
                bytes_completed, ..
            } => self.bar.set_position(*bytes_completed),
            DownloadEvent::Complete => self.bar.finish_and_clear(),
        }
    }
}

/// What the operator can do about `error`.
fn explain(id: &str, revision: Option<&str>, error: &HFError) -> Error {
    let at = revision.map_or(String::new(), |r| format!(" at revision '{r}'"));
    let message = match error {
        HFError::AuthRequired { .. } | HFError::Forbidden { .. } => format!(
            "{id}: the Hub denies access: check the name, accept the model's terms on its page if \
             it is gated, and set HF_TOKEN to a token that may read it"
        ),
        HFError::EntryNotFound { path, .. } if path == SINGLE => {
            format!("{id}{at} has neither {INDEX} nor {SINGLE}")
        }
        HFError::EntryNotFound { .. }
        | HFError::RepoNotFound { .. }
        | HFError::RevisionNotFound { .. } => format!(
            "{id}{at} is no local path, and the Hub has no such model with a config.json (a \
             private one needs HF_TOKEN)"
        ),
        HFError::Request { .. } => format!(
            "{id}: it is not in the cache, and the Hub cannot be reached: {}",
            one_line(error)
        ),
        _ => format!("{id}: {}", one_line(error)),
    };
    Error::setup(message)
}

fn one_line(error: &HFError) -> String {
    error
        .to_string()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}
