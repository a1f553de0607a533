//! `--learn`: the head that learns while it serves.

use crate::config::{Config, DrafterChoice};
use crate::engine::EngineHandle;
use crate::error::{Error, Result};
use crate::model::LoadedModel;
use crate::model::{LoadOptions, ModelSource};
use crate::train::learn::{IdleLearner, LearnSetup, Learning};

/// The learner of the head of `--draft-model`, which `load` says how to load; `None` without `--learn`.
///
/// # Errors
/// `Setup`, in one line: the head cannot learn here, or the folder is not suited.
pub fn open(
    config: &Config,
    load: LoadOptions,
    target: &dyn LoadedModel,
) -> Result<Option<Learning>> {
    let Some(options) = &config.learn else {
        return Ok(None);
    };
    let choice = config.drafter.as_ref().and_then(DrafterChoice::model);
    let choice = choice.ok_or_else(|| {
        Error::setup("--learn has no effect: this model serves embeddings only, without drafts")
    })?;
    let learning = LearnSetup {
        options,
        source: &ModelSource::resolve(&choice.name, choice.revision.as_deref(), load.format)?,
        load,
        target,
        api_key: config.http.listen.api_keys().next(),
    };
    let learning = learning.open()?;
    let (folder, share) = (options.folder.display(), 100.0 * options.share);
    let begins = if learning.head.is_some() {
        "goes on with the head there"
    } else {
        "begins"
    };
    tracing::info!("learning in {folder} {begins}: {share:.0}% of one core while no request runs");
    Ok(Some(learning))
}

/// Lets the learner work while `engine` has no request.
///
/// # Errors
/// `Setup`, if there is no thread for it.
pub fn start(learner: IdleLearner, engine: &EngineHandle) -> Result<()> {
    let stats = engine.stats();
    let (running, waiting) = (
        stats.requests_running.clone(),
        stats.requests_waiting.clone(),
    );
    learner.start(&stats.registry, move || running.get() + waiting.get() > 0)
}
