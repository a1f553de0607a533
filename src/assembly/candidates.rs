//! The models and heads on this machine that can draft for a target, by their headers.

use super::beside::entries;
use super::checkpoint::Checkpoint;
use super::drafts::{Candidate, refuse_recurrent, too_large};
use super::plan::Plan;
use crate::error::{Error, Result};
use crate::gguf::{EMBEDDED, GgufSource};
use crate::model::hub::gguf::{self, HubFile};
use crate::model::{LoadFormat, ModelSource, hub};
use crate::text::{Text, check_same_tokens};
use std::path::Path;

/// The folder in which the repository has heads.
const HEADS: &str = "models/heads";

/// Returns the models and heads that fit the target of `plan`, of the Hugging Face cache, of [`HEADS`] and of this
/// program. A candidate that cannot be read or does not fit is left out.
pub fn fitting(plan: &Plan, text: &Text) -> Vec<Candidate> {
    if !plan.target.model.generates() {
        return Vec::new();
    }
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
        for file in gguf::cached_names(&id) {
            let name = format!("{id}/{file}");
            let path = HubFile::of(&name).and_then(|file| file.cached(None));
            found.extend(path.map(|path| (name, ModelSource::Gguf(path.into()))));
        }
        if let Some(folder) = hub::cached(&id, None) {
            found.push((id, ModelSource::Folder(folder)));
        }
    }
    let others = found
        .into_iter()
        .filter(|(_, source)| *source != plan.target.checkpoint.source);
    let fitting = others.filter_map(|(name, source)| {
        let fits = check(plan, text, name.clone(), source);
        // A cache has much that is no draft.
        fits.map_err(|e| tracing::debug!("{name}: {e}")).ok()
    });
    fitting.collect()
}

/// The draft `name` in `source`, if it is one to recommend.
///
/// # Errors
/// `Setup`: why it is none for this target.
fn check(plan: &Plan, text: &Text, name: String, source: ModelSource) -> Result<Candidate> {
    let draft = Checkpoint::inspected(&plan.config, &plan.device, name, source);
    let (name, target) = (&draft.name, &*plan.target.model);
    if let Some(kind) = draft.head_kind()? {
        let (_, inventory) = draft.head(kind, target)?;
        return Ok(Candidate::of(name, Some(kind), &inventory));
    }
    let (model, inventory) = draft.model(plan.target.bytes(), |_| Ok(()))?;
    refuse_recurrent(&*model)?;
    if let Some(why) = too_large(target.info(), model.info(), name) {
        return Err(Error::setup(why));
    }
    if model.info().vocab_size > target.info().vocab_size {
        return Err(Error::setup("it has more token ids than the target"));
    }
    let theirs = draft.text()?;
    let theirs = theirs.ok_or_else(|| Error::setup("a tokenizer is missing"))?;
    check_same_tokens(text, &theirs)?;
    Ok(Candidate::of(name, None, &inventory))
}
