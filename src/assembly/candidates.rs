//! The models and heads on this machine that can draft for a target, by their headers.

use super::drafts::{LoadedDraft, mtp_refused, no_mtp};
use super::load::{draft_options, read_text, tensors_elsewhere};
use crate::config::{Config, DrafterChoice};
use crate::error::{Error, Result};
use crate::gguf::{EMBEDDED, GgufSource};
use crate::model::LoadedModel;
use crate::model::hub_gguf::{self, HubFile};
use crate::model::{
    self, DraftNetwork, HeadKind, LoadFormat, LoadOptions, ModelSource, TensorHeaders, hub,
};
use crate::text::{Text, check_same_tokens};
use candle_core::Device;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The folder in which the repository has heads.
const HEADS: &str = "models/heads";
/// A draft model has at most this share of the target's parameters: a larger one costs more than it wins.
const MAX_SHARE: f64 = 0.5;

/// A model or head that fits the target.
#[derive(Debug, Serialize)]
pub struct Candidate {
    /// The candidate's name for `--draft-model`.
    pub name: String,
    /// `model`, or the kind of head: `Eagle3`.
    pub kind: String,
    pub parameters: u64,
    /// Size of the weights in memory, in bytes.
    pub bytes: u64,
}

/// The target that drafts are looked for.
pub struct Target<'a> {
    pub config: &'a Config,
    pub device: &'a Device,
    pub model: &'a dyn LoadedModel,
    pub text: &'a Text,
    pub parameters: u64,
    pub source: &'a ModelSource,
    /// The options with which `source` is read.
    pub options: &'a LoadOptions,
}

/// Refuses a model that cannot draft, as [`DraftPool`](crate::spec::DraftPool) does.
fn refuse_recurrent(model: &dyn LoadedModel) -> Result<()> {
    if model.kv_shape().is_recurrent() {
        return Err(Error::setup(
            "a model with linear attention or Mamba cannot draft: only heads, tables and models with attention in all layers can",
        ));
    }
    Ok(())
}

impl Target<'_> {
    /// Returns the models and heads that fit this target, of the Hugging Face cache, of [`HEADS`] and of this
    /// program. A candidate that cannot be read or does not fit is left out.
    pub fn fitting(&self) -> Vec<Candidate> {
        let mut found: Vec<(String, ModelSource)> = Vec::new();
        for embedded in EMBEDDED {
            found.push((
                embedded.name.into(),
                ModelSource::Gguf(GgufSource::Embedded(embedded)),
            ));
        }
        for path in entries(Path::new(HEADS)) {
            let name = path.display().to_string();
            if let Ok((source, _)) = ModelSource::resolve_headers(&name, None, LoadFormat::Auto) {
                found.push((name, source));
            }
        }
        for id in hub::cached_ids() {
            for file in hub_gguf::cached_names(&id) {
                let name = format!("{id}/{file}");
                let path = HubFile::of(&name).and_then(|file| file.cached(None));
                found.extend(path.map(|path| (name, ModelSource::Gguf(path.into()))));
            }
            if let Some(folder) = hub::cached(&id, None) {
                found.push((id, ModelSource::Folder(folder)));
            }
        }
        let others = found.iter().filter(|(_, source)| source != self.source);
        let fitting = others.filter_map(|(name, source)| {
            let fits = self.check(name, source);
            // A cache has much that is no draft.
            fits.map_err(|e| tracing::debug!("{name}: {e}")).ok()
        });
        fitting.collect()
    }

    /// The draft `name` in `source`, if it is one to recommend.
    ///
    /// # Errors
    /// `Setup`: why it is none for this target.
    fn check(&self, name: &str, source: &ModelSource) -> Result<Candidate> {
        let (draft, candidate) = self.inspect(name, source, LoadFormat::Auto, None)?;
        if draft.head().is_some() {
            return Ok(candidate);
        }
        if candidate.parameters as f64 > MAX_SHARE * self.parameters as f64 {
            return Err(Error::setup("it is too large for a draft"));
        }
        if draft.model().info().vocab_size > self.model.config().vocab_size {
            return Err(Error::setup("it has more token ids than the target"));
        }
        let theirs = read_text(source, LoadFormat::Auto)?;
        let theirs = theirs.ok_or_else(|| Error::setup("a tokenizer is missing"))?;
        check_same_tokens(self.text, &theirs)?;
        Ok(candidate)
    }

    /// The draft that `--draft-model` names, whose tokenizer may be another one; `None` if `drafter` has no model
    /// of its own.
    ///
    /// # Errors
    /// `Setup`: why it cannot draft for this target.
    pub fn given(&self, drafter: &DrafterChoice) -> Result<Option<(DraftNetwork, Candidate)>> {
        let (choice, takes): (_, fn(HeadKind) -> bool) = match drafter {
            DrafterChoice::Model(choice) => (choice, |_| true),
            DrafterChoice::Eagle3(choice) => (choice, |kind| !kind.is_parallel()),
            DrafterChoice::Parallel(choice) => (choice, HeadKind::is_parallel),
            DrafterChoice::Own(layers) => {
                refuse_recurrent(self.model)?;
                LoadedDraft::own(self.model, layers.as_ref())?;
                return Ok(None);
            }
            DrafterChoice::Mtp => {
                let found = self.further_layer()?;
                return found
                    .ok_or_else(|| no_mtp(&self.config.model.name))
                    .map(Some);
            }
            _ => return Ok(None),
        };
        let (name, revision) = (&choice.name, choice.revision.as_deref());
        let format = self.config.load.load_format;
        let (source, format) = ModelSource::resolve_headers(name, revision, format)?;
        let named = |e| Error::setup(format!("{name}: {e}"));
        // Before the kind of head, which the tensors tell.
        let flags = &self.config.load;
        let tensors = tensors_elsewhere(flags, name, revision, format)?;
        let any = matches!(drafter, DrafterChoice::Model(_));
        if !any && !HeadKind::of_headers(&source, tensors.as_deref())?.is_some_and(takes) {
            return Err(named(Error::setup(
                "it is no such head: leave out --drafter",
            )));
        }
        let inspected = self.inspect(name, &source, format, tensors);
        let (draft, candidate) = inspected.map_err(named)?;
        if draft.head().is_none() {
            read_text(&source, format)?;
        }
        Ok(Some((draft, candidate)))
    }

    /// The layer of the target's checkpoint that predicts further tokens, if it has one.
    ///
    /// # Errors
    /// `Setup`: why it cannot be loaded.
    pub fn further_layer(&self) -> Result<Option<(DraftNetwork, Candidate)>> {
        let found = model::inspect_mtp(self.source, self.options, self.model);
        Ok(found.map_err(mtp_refused)?.map(|(head, inventory)| {
            let candidate = Candidate {
                name: "mtp".into(),
                kind: "Mtp".into(),
                parameters: inventory.sum(|entry| entry.elements),
                bytes: inventory.sum(|entry| entry.loaded_bytes),
            };
            (DraftNetwork::Head(head), candidate)
        }))
    }

    fn inspect(
        &self,
        name: &str,
        source: &ModelSource,
        format: LoadFormat,
        tensors: Option<Arc<TensorHeaders>>,
    ) -> Result<(DraftNetwork, Candidate)> {
        let options = LoadOptions {
            format,
            tensors,
            ..draft_options(self.config, self.device)
        };
        let kind = HeadKind::of_headers(source, options.tensors.as_deref())?;
        let (draft, kind, inventory) = match kind {
            Some(kind) => {
                let (head, inventory) = model::inspect_head(source, kind, &options, self.model)?;
                (DraftNetwork::Head(head), format!("{kind:?}"), inventory)
            }
            None => {
                let (model, inventory) = model::inspect(source, &options)?;
                refuse_recurrent(&*model)?;
                (DraftNetwork::Model(model), "model".to_owned(), inventory)
            }
        };
        let candidate = Candidate {
            name: name.to_owned(),
            kind,
            parameters: inventory.sum(|entry| entry.elements),
            bytes: inventory.sum(|entry| entry.loaded_bytes),
        };
        Ok((draft, candidate))
    }
}

/// Returns the folders and GGUF files in a folder, in alphabetical order. There are none if there is no such folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_model = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|e| e == "gguf");
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).filter(is_model).collect();
    paths.sort();
    paths
}
