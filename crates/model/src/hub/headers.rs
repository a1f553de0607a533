//! Headers of files of the Hub whose weights are not on this machine.

use super::download::HubClient;
use super::error::HubError;
use super::{CONFIG, Found, INDEX, Repo};
use crate::checkpoint::safetensors_header::{self, TensorHeaders};
use crate::checkpoint::shards::{SINGLE, shards};
use crate::hub;
use foretoken_core::error::{Result, clipped};
use foretoken_core::gguf::{self, Excerpt, ExcerptReader};
use std::io;
use std::sync::Arc;

/// Maximum bytes of the headers of all files of a model; those of the largest vocabularies have 20 million.
const MAX_BYTES: u64 = 64 << 20;

/// Reads headers of one commit, [`MAX_BYTES`] in all.
struct Fetcher<'h> {
    repo: &'h Repo,
    client: &'h HubClient,
    commit: &'h str,
    /// Bytes that may still be fetched.
    left: u64,
}

impl<'h> Fetcher<'h> {
    fn new(repo: &'h Repo, client: &'h HubClient, commit: &'h str) -> Self {
        Self {
            repo,
            client,
            commit,
            left: MAX_BYTES,
        }
    }

    /// What `read` makes of the file `name`, and the bytes that it read.
    fn read<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut dyn gguf::Reader) -> Result<T>,
    ) -> Result<(T, Excerpt), HubError> {
        let file = self.repo.describe(self.commit, name, self.client)?;
        let size = file.size.ok_or_else(|| {
            let name = clipped(name);
            HubError::Other(format!("the Hub does not say how large {name} is"))
        })?;
        let mut failed = None;
        let fetch = |from, len| {
            self.client.range(&file, from, len).map_err(|e| {
                let what = e.to_string();
                failed = Some(e);
                io::Error::other(what)
            })
        };
        let excerpt = Excerpt::new(format!("{}/{name}", self.repo.id), size);
        let mut reader = ExcerptReader::new(excerpt, self.left, fetch);
        let found = read(&mut reader);
        let (excerpt, left) = reader.finish();
        self.left = left;
        match (found, failed) {
            (Ok(found), _) => Ok((found, excerpt)),
            (Err(_), Some(error)) => Err(error),
            (Err(error), None) => Err(HubError::Other(format!("{}: {error}", clipped(name)))),
        }
    }
}

/// The headers of GGUF files of the Hub, named `parts`.
pub(crate) fn gguf(
    repo: &Repo,
    client: &HubClient,
    commit: &str,
    parts: &[String],
) -> Result<Vec<Excerpt>, HubError> {
    let mut fetcher = Fetcher::new(repo, client, commit);
    let mut read = |part: &String| {
        let read = fetcher.read(part, |mut reader| gguf::read_inspected(&mut reader));
        match read {
            Ok(((), excerpt)) => Ok(excerpt),
            Err(HubError::NotFound) => Err(missing(part)),
            Err(error) => Err(error),
        }
    };
    parts.iter().map(&mut read).collect()
}

pub(crate) fn missing(part: &str) -> HubError {
    HubError::Other(format!("its part {} is missing", clipped(part)))
}

/// The tensors of the safetensors of model `id` at the Hub, whose `config.json` is in the cache. `None` if the Hub may
/// not be asked, or if it is a head that has no safetensors.
///
/// # Errors
/// A setup error in one line: as of a download, or what is wrong with a header.
pub fn tensors(id: &str, revision: Option<&str>) -> Result<Option<Arc<TensorHeaders>>> {
    if hub::offline() {
        return Ok(None);
    }
    let repo = hub::repo(id, revision)?;
    let client = repo.client();
    let fetched = (|| {
        let commit = match repo.cached_commit() {
            Some(commit) => commit,
            None => repo.current_commit(&client, CONFIG)?,
        };
        let mut fetcher = Fetcher::new(&repo, &client, &commit);
        let mut headers = TensorHeaders::default();
        let mut add = |name: &str| {
            let read = |mut reader: &mut dyn gguf::Reader| {
                safetensors_header::read(&mut reader, &mut headers)
            };
            fetcher.read(name, read).map(drop)
        };
        match repo.file(&commit, INDEX, Some(&client))? {
            Found::At(index) => {
                let files = shards(&index).map_err(|e| HubError::Other(e.to_string()))?;
                files.iter().try_for_each(|file| match add(file) {
                    Err(HubError::NotFound) => Err(missing(file)),
                    other => other,
                })?;
            }
            _ => {
                let is_head = hub::is_head(&repo.path(&commit, CONFIG));
                let names = if is_head { &SINGLE[..] } else { &SINGLE[..1] };
                let mut results = names.iter().map(|name| add(name));
                match results.find(|result| !matches!(result, Err(HubError::NotFound))) {
                    Some(result) => result?,
                    None if is_head => return Ok(None),
                    None => {
                        let single = SINGLE[0];
                        let what = format!("it has neither {INDEX} nor {single}");
                        return Err(HubError::Other(what));
                    }
                }
            }
        }
        Ok(Some(Arc::new(headers)))
    })();
    fetched.map_err(|e| hub::explain(id, revision, &e))
}
