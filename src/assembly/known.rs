//! The draft that is known for a target: a head beside the target's files, or one of the list of published drafts.

use super::beside;
use super::checkpoint::Target;
use super::pairs::{self, Layout, Pair};
use crate::config::{Config, DrafterChoice, ModelChoice};
use crate::error::{Error, Result};
use crate::files;
use crate::model::{HeadKind, ModelSource, known};
use candle_core::Device;
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// A draft that is known for a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KnownDraft {
    /// The draft's name for `--draft-model`.
    pub name: String,
    /// The head's layout and options, or `model`.
    pub layout: String,
    /// The draft's licence; `None` = it is not known.
    pub licence: Option<String>,
    /// Whether it is on this machine, beside the target; otherwise it is one of the list.
    pub is_beside: bool,
    /// The command that serves the target with it.
    pub command: String,
}

impl KnownDraft {
    /// The draft that is known for `target`, of the kinds that `takes` accepts: heads, or `None` for a model.
    pub fn find(
        config: &Config,
        device: &Device,
        target: &Target,
        takes: impl Fn(Option<HeadKind>) -> bool,
    ) -> Option<Self> {
        if !target.model.generates() {
            return None;
        }
        let of = |name: &str, layout: String, licence: Option<String>, is_beside| Self {
            name: name.into(),
            layout,
            licence,
            is_beside,
            command: command(&config.model, name),
        };
        let mut beside = beside::heads_beside(config, device, target);
        if let Some(head) = beside.find(|head| takes(Some(head.kind))) {
            return Some(of(&head.name, head.layout, None, true));
        }
        let fits = |pair: &&Pair| takes(pair.layout.head());
        let of_name = |name: &String| pairs::of_target(name).find(fits);
        // The files are opened only if the name says nothing.
        let within = || names_within(&target.checkpoint.source);
        // A name of the list of models says less than the name of its file.
        let listed =
            known::find(&config.model.name).filter(|listed| !Path::new(&listed.name).exists());
        let name = listed.map_or(&config.model.name, |listed| &listed.file);
        let found = of_name(name).or_else(|| within().iter().find_map(of_name));
        found.map(|pair| {
            let layout = match pair.layout {
                Layout::Model => "a small model".into(),
                head => head.name().into(),
            };
            of(&pair.draft, layout, pair.licence.clone(), false)
        })
    }

    /// The draft for a target that is served without a draft model; `None` = there is none, or the operator chose
    /// a drafter.
    pub fn unused(config: &Config, device: &Device, target: &Target) -> Option<Self> {
        let is_open = config
            .drafter
            .as_ref()
            .is_some_and(|choice| matches!(choice, DrafterChoice::Tables | DrafterChoice::Mtp));
        (is_open && config.prefers_mtp).then(|| Self::find(config, device, target, |_| true))?
    }
}

impl fmt::Display for KnownDraft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.name, self.layout)?;
        if let Some(licence) = &self.licence {
            write!(f, ", {licence}")?;
        }
        let place = if self.is_beside {
            "beside the model"
        } else {
            "published"
        };
        write!(f, ", {place})")
    }
}

/// The names that the files of a model give it.
fn names_within(source: &ModelSource) -> Vec<String> {
    match source {
        ModelSource::Gguf(file) => file.model_names().unwrap_or_default(),
        ModelSource::Folder(path) => {
            let text = files::read_text(&files::config_of(path)).unwrap_or_default();
            let json = files::parse_json(&text).unwrap_or_default();
            let name = json["_name_or_path"].as_str();
            name.map(str::to_owned).into_iter().collect()
        }
    }
}

/// The command that serves `model` with the draft `name`.
fn command(model: &ModelChoice, name: &str) -> String {
    let revision = model.revision.as_ref();
    let revision = revision.map_or(String::new(), |at| format!(" --revision {}", quoted(at)));
    let model = quoted(&model.name);
    format!("foretoken {model}{revision} --draft-model {}", quoted(name))
}

/// A word of a command line, in quotes if a shell would change it.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Names the drafts of `--draft-model auto`. If none is known for `target`, what drafts is what would without the flag,
/// and a line of the log says so.
///
/// # Errors
/// `Setup`, if `--learn` needs a head, and none is known.
pub fn resolve(config: &mut Config, device: &Device, target: &Target) -> Result<()> {
    let mut choices: Vec<&DrafterChoice> = config.drafter.iter().collect();
    choices.extend(config.compared.iter().map(|one| &one.choice));
    let named: Vec<Option<DrafterChoice>> = (choices.into_iter())
        .map(|choice| named(choice, config, device, target))
        .collect();
    let mut named = named.into_iter();
    let is_auto = config.has_auto_draft();
    let mut is_unknown = false;
    if let Some(drafter) = &mut config.drafter
        && let Some(found) = named.next()
    {
        is_unknown = found.is_none();
        *drafter = found.unwrap_or(DrafterChoice::Tables);
        config.prefers_mtp |= is_unknown;
    }
    for (one, found) in config.compared.iter_mut().zip(named) {
        match found {
            Some(choice) => one.choice = choice,
            None => {
                is_unknown = true;
                (one.choice, one.is_open) = (DrafterChoice::Tables, true);
            }
        }
    }
    if is_auto && is_unknown {
        let name = &target.checkpoint.name;
        if config.learn.is_some() {
            return Err(Error::setup(format!(
                "--learn needs a head, and --draft-model auto knows none for {name}: name one"
            )));
        }
        tracing::warn!(
            "--draft-model auto: no draft is known for {name}, so it drafts as without the flag"
        );
    }
    Ok(())
}

/// The choice with the name of the draft that is known for `target` in place of `auto`; `None` = none is known.
fn named(
    choice: &DrafterChoice,
    config: &Config,
    device: &Device,
    target: &Target,
) -> Option<DrafterChoice> {
    if !choice.model().is_some_and(ModelChoice::is_auto) {
        return Some(choice.clone());
    }
    let takes = |kind| choice.other_head(kind).is_none();
    let found = KnownDraft::find(config, device, target, takes)?;
    tracing::info!("--draft-model auto: {found}");
    Some(choice.with_model(ModelChoice {
        name: found.name,
        revision: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_pasted() {
        let model = |name: &str, revision: Option<&str>| ModelChoice {
            name: name.into(),
            revision: revision.map(str::to_owned),
        };
        assert_eq!(
            command(&model("o/m:Q8_0", Some("v1")), "o/h"),
            "foretoken o/m:Q8_0 --revision v1 --draft-model o/h"
        );
        assert_eq!(
            command(&model("my models/a.gguf", None), "it's.gguf"),
            r"foretoken 'my models/a.gguf' --draft-model 'it'\''s.gguf'"
        );
    }
}
