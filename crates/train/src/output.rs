//! The output folder of a run: checkpoints, and a draft that can be served.
//!
//! Every file is written under another name and then renamed, so that a full disk or a kill never
//! destroys the previous file.

use super::optimizer::AdamW;
use super::report::Evaluation;
use super::student::{self, Student};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result, first_line};
use foretoken_core::files::{self, folder_of};
use foretoken_core::model::DepthRates;
use foretoken_model::{ModelSource, RATES, rates_json};
use foretoken_text::Text;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

/// Files that belong to a tokenizer; a model need not have all of them.
const TOKENIZER_FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.json",
    "generation_config.json",
];
const CHECKPOINT: &str = "checkpoint.safetensors";
/// Name of the file with a trained model's weights, as loading expects it.
pub const WEIGHTS: &str = "model.safetensors";
/// The file that the target's pass writes, before there is a checkpoint.
const TARGETS: &str = "targets.bin";
/// The checkpoint's tensor that contains [`TrainState`] as the bytes of its JSON.
const STATE: &str = "state";
/// The name of the target's revision among the settings.
const REVISION: &str = "revision";

/// What a checkpoint contains in addition to weights and moments.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainState {
    /// Number of steps made.
    pub steps: usize,
    /// Everything that determines the weights after a step, including the seed.
    pub settings: Value,
    /// The evaluation before the first step, by depth.
    pub untrained: Vec<Evaluation>,
}

impl TrainState {
    /// Checks that `settings` are those of the run that is resumed.
    ///
    /// # Errors
    /// `Setup`, naming the first difference.
    pub fn check(&self, settings: &Value) -> Result<()> {
        let mut before = self.settings.clone();
        if let Some(keys) = before.as_object_mut() {
            // Older checkpoints do not have it. The note beside the distributions does, and is compared, too.
            keys.entry(REVISION)
                .or_insert_with(|| settings[REVISION].clone());
        }
        match difference(&before, settings) {
            None => Ok(()),
            Some((key, before, now)) => Err(Error::setup(format!(
                "--resume: {key} was {before} in the checkpoint's run, but is {now} now"
            ))),
        }
    }
}

/// The first key of `now` whose value was another one, with both values. Objects are compared by their own keys.
fn difference<'a>(before: &'a Value, now: &'a Value) -> Option<(&'a str, &'a Value, &'a Value)> {
    now.as_object()?.iter().find_map(|(key, now)| {
        let before = &before[key.as_str()];
        if now.is_object() {
            return difference(before, now);
        }
        (before != now).then_some((key.as_str(), before, now))
    })
}

/// Whether the values beside `note` belong to `wanted`, so that a run may go on with them; without a note nobody knows.
///
/// # Errors
/// `Setup`: they belong to something else, of which the first difference is named, or the note cannot be read.
pub fn belongs_to(note: &Path, wanted: &impl Serialize) -> Result<bool> {
    let json = match std::fs::read(note) {
        Ok(json) => json,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::in_file(note, e)),
    };
    let before: Value = serde_json::from_slice(&json).map_err(|e| Error::in_file(note, e))?;
    let now = serde_json::to_value(wanted).map_err(|e| Error::internal(e.to_string()))?;
    match difference(&before, &now) {
        None => Ok(true),
        Some((key, before, now)) => Err(Error::setup(format!(
            "--resume: {key} was {before} in {}, but is {now} now: give what it was, or another --out",
            note.display()
        ))),
    }
}

/// A folder that a run writes to.
pub struct OutputFolder {
    path: PathBuf,
}

impl OutputFolder {
    /// Creates the folder. If it contains an earlier run, `resume` must be set; a draft without a checkpoint stays as
    /// it is.
    ///
    /// # Errors
    /// `Setup`, naming the folder.
    pub fn open(path: &Path, resume: bool) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|e| Error::in_file(path, e))?;
        let former = [CHECKPOINT, WEIGHTS, TARGETS]
            .into_iter()
            .find(|file| path.join(file).is_file());
        match former {
            Some(file) if !resume => Err(Error::setup(format!(
                "{} has a {file} of an earlier run: add --resume to continue that run, or give another --out",
                path.display()
            ))),
            Some(WEIGHTS) => Err(Error::setup(format!(
                "{} has a {WEIGHTS} but no {CHECKPOINT} to resume from, and the draft would be overwritten: give another --out",
                path.display()
            ))),
            _ => Ok(Self {
                path: path.to_owned(),
            }),
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is a checkpoint to resume from.
    pub fn has_checkpoint(&self) -> bool {
        self.path.join(CHECKPOINT).exists()
    }

    /// Checks that `settings` are those of the checkpoint's run, if there is a checkpoint. A run does so before it
    /// writes to the folder.
    ///
    /// # Errors
    /// `Setup`, naming the first difference, or the file if it is broken.
    pub fn check(&self, settings: &Value) -> Result<()> {
        if !self.has_checkpoint() {
            return Ok(());
        }
        let (_, state) = self.checkpoint()?;
        state.check(settings)
    }

    /// The tensors of the checkpoint, and its state.
    fn checkpoint(&self) -> Result<(MmapedSafetensors, TrainState)> {
        let file = self.path.join(CHECKPOINT);
        let broken = |e: &dyn std::fmt::Display| Error::in_file(&file, e);
        // SAFETY: the file is only read. If someone changes it meanwhile, they get other weights or a
        // fault.
        let tensors = unsafe { MmapedSafetensors::new(&file) }.map_err(|e| broken(&e))?;
        let state = tensors.load(STATE, &Device::Cpu).map_err(|e| broken(&e))?;
        let state = serde_json::from_slice(&state.to_vec1::<u8>()?).map_err(|e| broken(&e))?;
        Ok((tensors, state))
    }

    /// Saves weights, moments and `state` in one file, so that they always belong together.
    ///
    /// # Errors
    /// `Setup`, naming the file, which then is unchanged.
    pub fn save_checkpoint(
        &self,
        model: &dyn Student,
        optimizer: &AdamW,
        state: &TrainState,
    ) -> Result<()> {
        let mut tensors = HashMap::new();
        for (name, var) in model.vars() {
            tensors.insert(format!("weight.{name}"), var.as_detached_tensor());
        }
        for (name, (first, second)) in &optimizer.moments {
            tensors.insert(format!("first.{name}"), first.clone());
            tensors.insert(format!("second.{name}"), second.clone());
        }
        let state = json_bytes(state)?;
        tensors.insert(STATE.to_owned(), Tensor::new(state, &Device::Cpu)?);
        save(&self.path.join(CHECKPOINT), &tensors)
    }

    /// Loads a checkpoint's weights and moments into `model` and `optimizer`. Returns its state.
    ///
    /// # Errors
    /// `Setup`, naming the file, if it is broken or belongs to another draft.
    pub fn load_checkpoint(
        &self,
        model: &dyn Student,
        optimizer: &mut AdamW,
        device: &Device,
    ) -> Result<TrainState> {
        let (tensors, state) = self.checkpoint()?;
        let broken = |e| Error::in_file(&self.path.join(CHECKPOINT), e);
        student::set(model.vars(), |name| {
            tensors.load(&format!("weight.{name}"), device).ok()
        })?;
        for (name, (first, second)) in &mut optimizer.moments {
            let load = |kind: &str| tensors.load(&format!("{kind}.{name}"), device);
            *first = load("first").map_err(broken)?;
            *second = load("second").map_err(broken)?;
        }
        optimizer.steps = state.steps;
        Ok(state)
    }

    /// Saves the weights under the file name that loading expects.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn save_weights(&self, model: &dyn Student) -> Result<()> {
        save(&self.path.join(WEIGHTS), &model.weights()?)
    }

    /// Adds how often a head's guesses were right to its `config.json`.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn write_rates(&self, rates: &DepthRates) -> Result<()> {
        let file = self.path.join("config.json");
        let text = files::read_text(&file)?;
        let mut config: Value =
            serde_json::from_str(&text).map_err(|e| Error::in_file(&file, e))?;
        config[RATES] = rates_json(rates);
        write_json(&file, &config)
    }

    /// Writes everything that serving needs besides the weights: `config`, which is the draft's
    /// `config.json`, with the target's special ids, and the target's tokenizer.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn write_model_files(
        &self,
        mut config: Value,
        source: &ModelSource,
        text: &Text,
    ) -> Result<()> {
        config["torch_dtype"] = "float32".into();
        // A head's output layer is its own, too, but its embedding is the target's.
        if config["draft_vocab_size"] != Value::Null {
            config["tie_word_embeddings"] = false.into();
        }
        if let Some(keys) = config.as_object_mut() {
            // transformers 5's name for `torch_dtype`; the two must not disagree.
            keys.shift_remove("dtype");
        }
        let special = text.special_ids();
        config["bos_token_id"] = json!(special.bos);
        config["eos_token_id"] = json!(special.eos);
        write_json(&self.path.join("config.json"), &config)?;
        match source {
            ModelSource::Gguf(_) => text.save(&self.path),
            ModelSource::Folder(path) => {
                let folder = folder_of(path);
                for file in TOKENIZER_FILES {
                    copy(&folder.join(file), &self.path.join(file))?;
                }
                Ok(())
            }
        }
    }
}

/// Copies a file, if it exists, into a folder that may be missing.
fn copy(from: &Path, to: &Path) -> Result<()> {
    match std::fs::read(from) {
        Ok(bytes) => replace(to, |part| {
            to.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(part, &bytes)
        }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::in_file(from, e)),
    }
}

/// Writes `tensors` to `path`.
///
/// # Errors
/// `Setup`, naming the file, which then is unchanged.
pub fn save(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<()> {
    replace(path, |part| {
        candle_core::safetensors::save(tensors, part)
            .map_err(|e| std::io::Error::other(first_line(&e)))?;
        // The library creates files that only their owner can read, but a server may run as another
        // user.
        match std::fs::metadata(path.with_file_name("config.json")) {
            Ok(config) => std::fs::set_permissions(part, config.permissions()),
            Err(_) => Ok(()),
        }
    })
}

fn json_bytes(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| Error::internal(e.to_string()))
}

/// Writes `value` to `path`.
///
/// # Errors
/// `Setup`, naming the file, which then is unchanged.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let bytes = json_bytes(value)?;
    replace(path, |part| std::fs::write(part, &bytes))
}

/// Opens a file that a later run may go on with. Unless `keep`, it is a new one: that of another run, to which `path`
/// may be a link, stays as it is.
///
/// # Errors
/// `Setup`, naming the file.
pub fn open_kept(path: &Path, keep: bool) -> Result<File> {
    let wrong = |e| Error::in_file(path, e);
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if keep {
        return options
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(wrong);
    }
    if let Err(e) = std::fs::remove_file(path)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(wrong(e));
    }
    options.create_new(true).open(path).map_err(wrong)
}

/// Lets `write` create a file beside `path`, and renames it to `path` once it is on the disk.
fn replace(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    write(&part)
        .and_then(|()| {
            // Windows puts on the disk only what is open for writing.
            let file = File::options()
                .read(true)
                .write(cfg!(windows))
                .open(&part)?;
            file.sync_all()
        })
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|e| {
            // An incomplete file would take up disk space.
            let _ = std::fs::remove_file(&part);
            Error::setup(format!(
                "cannot write {}: {e}; the previous file is kept",
                path.display()
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_without_a_revision_is_of_any() {
        let check = |before: Value, now: Value| {
            let state = TrainState {
                steps: 1,
                settings: before,
                untrained: Vec::new(),
            };
            state.check(&now).map_err(|e| e.to_string())
        };
        let of = |revision: Option<&str>| json!({"model": "m", "revision": revision, "seed": 3});
        let older = || json!({"model": "m", "seed": 3});
        check(older(), of(Some("v2"))).unwrap();
        check(older(), of(None)).unwrap();
        check(of(Some("v2")), of(Some("v2"))).unwrap();
        for (before, now) in [
            (None, Some("v2")),
            (Some("v1"), Some("v2")),
            (Some("v1"), None),
        ] {
            let error = check(of(before), of(now)).unwrap_err();
            assert!(error.contains("revision was"), "{error}");
        }
        let error = check(older(), json!({"model": "m", "revision": null, "seed": 4}));
        assert!(error.unwrap_err().contains("seed was 3"));
    }
}
