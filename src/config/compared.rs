//! The drafters of `bench --drafters`.

use super::Config;
use super::speculation::{DrafterChoice, DrafterName, ModelChoice, SpeculationFlags};
use crate::bench::NO_DRAFTER;
use crate::error::{Error, Result};
use clap::ValueEnum;
use std::mem::discriminant;

/// Drafters of one run: each has a pool and tables of its own.
const MAX_DRAFTERS: usize = 16;
/// Ends the name of a model, a head or `self` whose drafts tables continue.
const WITH_TABLES: &str = "+tables";
/// The drafter that is taken if none is compared.
const AUTO: &str = "auto";

/// One of several drafters that are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComparedDrafter {
    /// The drafter's name, as it is written on the command line.
    pub name: String,
    /// The drafter that the name stands for.
    pub choice: DrafterChoice,
    /// Whether tables continue the drafts of a model.
    pub with_tables: bool,
    /// Whether the target's layer for further tokens drafts instead, if its checkpoint has one.
    pub is_open: bool,
}

impl ComparedDrafter {
    /// The drafters of these names; see [`BenchOptions::drafters`](crate::bench::BenchOptions::drafters).
    ///
    /// # Errors
    /// `Setup`: too many, the same twice, or one that needs a model which `config` lacks.
    pub fn all(names: &[String], config: &Config) -> Result<Vec<Self>> {
        if names.len() > MAX_DRAFTERS {
            return Err(Error::setup(format!(
                "--drafters takes at most {MAX_DRAFTERS} drafters: there are {}",
                names.len()
            )));
        }
        if let Some(twice) = (names.iter().enumerate())
            .find_map(|(i, name)| names[..i].contains(name).then_some(name))
        {
            return Err(Error::setup(format!("--drafters has {twice} twice")));
        }
        names.iter().map(|name| Self::of(name, config)).collect()
    }

    fn of(name: &str, config: &Config) -> Result<Self> {
        let (alone, with_tables) = match name.strip_suffix(WITH_TABLES) {
            Some(alone) => (alone, true),
            None => (name, false),
        };
        let configured = config.drafter.as_ref();
        let kind = DrafterName::from_str(alone, false);
        let model = || {
            let model = configured.and_then(DrafterChoice::model);
            model.cloned().ok_or_else(|| {
                Error::setup(format!(
                    "--drafters {name} needs a model: add --draft-model MODEL, or name the model in place of {alone}"
                ))
            })
        };
        let choice = match (alone, kind) {
            (AUTO, _) if !with_tables => {
                return Ok(Self {
                    name: name.into(),
                    choice: configured.cloned().unwrap_or(DrafterChoice::Tables),
                    with_tables: true,
                    is_open: config.prefers_mtp,
                });
            }
            // It is never asked for a draft.
            (NO_DRAFTER, _) => DrafterName::Ngram.choose(&SpeculationFlags::default(), 1)?,
            ("head", _) | (_, Ok(DrafterName::Model)) => DrafterChoice::Model(model()?),
            (_, Ok(DrafterName::Eagle3)) => DrafterChoice::Eagle3(model()?),
            (_, Ok(DrafterName::Parallel)) => DrafterChoice::Parallel(model()?),
            (_, Ok(kind)) => {
                let default = kind.choose(&SpeculationFlags::default(), usize::MAX)?;
                let same =
                    |drafter: &&DrafterChoice| discriminant(*drafter) == discriminant(&default);
                configured.filter(same).cloned().unwrap_or(default)
            }
            ("", _) => return Err(Error::setup("--drafters has an empty name")),
            (model, _) => DrafterChoice::Model(ModelChoice {
                name: model.into(),
                revision: None,
            }),
        };
        if with_tables && !choice.has_network() {
            return Err(Error::setup(format!(
                "--drafters {name}: only the drafts of a model, a head or self are continued by tables"
            )));
        }
        Ok(Self {
            name: name.into(),
            choice,
            with_tables,
            is_open: false,
        })
    }
}
