//! `foretoken router`: the models of a folder or a file, and the flags of the processes that serve them.

use super::file;
use super::flags::{Cli, CliCommand, ListenOptions, LogFormat, RouterFlags};
use super::lora;
use super::{Command, Config, Exit};
use crate::error::{Error, Result};
use crate::gguf::PartName;
use crate::http::model_router::ModelSpec;
use clap::{Args, Parser};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A router's models and options.
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// The models at start, each with names of its own.
    pub models: Vec<ModelSpec>,
    /// Reads them anew.
    pub list: Arc<ModelList>,
    /// Maximum number of models that are loaded at a time.
    pub max_loaded: usize,
    /// Time after which the process of an unused model ends; `None` = never.
    pub idle: Option<Duration>,
    /// Where it listens, and for whom.
    pub listen: ListenOptions,
    /// The form of the log.
    pub log_format: LogFormat,
}

/// Where the models of a router come from: a folder, and the tables of a file.
#[derive(Debug, Clone)]
pub struct ModelList {
    flags: RouterFlags,
    of_file: Vec<FileModel>,
}

/// A table `[[model]]` of the file.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileModel {
    name: String,
    model: String,
    #[serde(default)]
    args: Vec<String>,
    /// Adapters, as the flag of this name has them.
    #[serde(default, rename = "lora-modules", alias = "lora_modules")]
    lora_modules: Vec<String>,
}

/// Flags of `serve` that the router sets, or that are its own.
const OF_THE_ROUTER: [&str; 14] = [
    "--model",
    "-m",
    "--served-model-name",
    "--host",
    "--port",
    "--api-key",
    "--tls-cert",
    "--tls-key",
    "--max-body-bytes",
    "--shutdown-timeout",
    "--allowed-hosts",
    "--log-format",
    "--no-ui",
    "--exit-on-stdin-end",
];

/// The router of the command line `args`, which `flags` were parsed from.
///
/// # Errors
/// A wrong flag, a wrong file, a model with wrong flags, or no model.
pub fn command(flags: RouterFlags, args: &[OsString]) -> Result<Command, Exit> {
    let Some(file) = flags.config.clone() else {
        return Ok(of_flags(flags)?);
    };
    let (flags, models) = with_file(&file, flags, args)?;
    Ok(Command::Router(flags.validate(models)?))
}

/// The router of flags without a file.
///
/// # Errors
/// A model with wrong flags, or no model.
pub fn of_flags(flags: RouterFlags) -> Result<Command> {
    Ok(Command::Router(flags.validate(Vec::new())?))
}

/// The flags with those of the file, and the file's models.
fn with_file(
    file: &Path,
    written: RouterFlags,
    args: &[OsString],
) -> Result<(RouterFlags, Vec<FileModel>), Exit> {
    let mut table = file::table(file)?;
    let models: Vec<FileModel> = taken(file, &mut table, "model")?;
    let for_all: Vec<String> = taken(file, &mut table, "args")?;
    let models = models.into_iter().map(|model| {
        let adapters = model.lora_modules.iter();
        let adapters = adapters.map(|adapter| file::placed(file, lora::MODULES, adapter));
        FileModel {
            model: file::placed(file, "model", &model.model),
            lora_modules: adapters.collect(),
            ..model
        }
    });
    let known = RouterFlags::augment_args(clap::Command::new("foretoken router"));
    let replaces = |name: &str| written.listen.replaces(name);
    let from_file = file::args_of(file, table, &known, replaces)?;
    let alone = ["foretoken", "router"].map(OsString::from).into_iter();
    Cli::try_parse_from(alone.chain(from_file.clone())).map_err(|e| Exit::from(e).in_file(file))?;
    let mut all = args.to_vec();
    all.splice(2..2, from_file);
    let mut flags = match Cli::try_parse_from(all)?.command {
        Some(CliCommand::Router(flags)) => *flags,
        _ => written,
    };
    flags.args.splice(0..0, for_all);
    Ok((flags, models.collect()))
}

/// The list with this key, which is no flag; an empty one if there is none.
fn taken<T: DeserializeOwned>(file: &Path, table: &mut toml::Table, key: &str) -> Result<Vec<T>> {
    let list = table.remove(key).map(toml::Value::try_into).transpose();
    let list = list.map_err(|e: toml::de::Error| {
        let what = e.message();
        Error::in_file(file, format!("`{key}`: {what}"))
    })?;
    Ok(list.unwrap_or_default())
}

impl RouterFlags {
    /// The router of these flags and the models of a file.
    ///
    /// # Errors
    /// `Setup`: a model with wrong flags or the name of another, or no model.
    fn validate(self, of_file: Vec<FileModel>) -> Result<RouterConfig> {
        let list = ModelList {
            flags: self,
            of_file,
        };
        let models = list.read()?;
        let flags = &list.flags;
        if models.is_empty() {
            return Err(Error::setup(match &flags.models_dir {
                Some(folder) => format!(
                    "{} has no models: there is neither a .gguf file nor a folder with config.json or .gguf files",
                    folder.display()
                ),
                None => "there are no models: give --models-dir DIR, or --config FILE with tables [[model]]".into(),
            }));
        }
        Ok(RouterConfig {
            models,
            max_loaded: flags.max_loaded,
            idle: Some(flags.idle).filter(|idle| !idle.is_zero()),
            log_format: flags.log_format,
            listen: flags.listen.clone(),
            list: Arc::new(list),
        })
    }
}

impl ModelList {
    /// Whether there may be other models later.
    pub fn can_change(&self) -> bool {
        self.flags.models_dir.is_some()
    }

    /// Reads the folder, and returns all models.
    ///
    /// # Errors
    /// `Setup`: the folder cannot be read, or a model has wrong flags or a name of another.
    pub fn read(&self) -> Result<Vec<ModelSpec>> {
        let folder = self.flags.models_dir.as_deref();
        let found = folder.map(in_folder).transpose()?.unwrap_or_default();
        // The file's come first, and say how a model of the folder is served that has the same name.
        let of_file = &self.of_file;
        let is_named = |found: &FileModel| of_file.iter().any(|model| model.name == found.name);
        let others = found.iter().filter(|found| !is_named(found));
        let mut names = HashSet::new();
        let mut specs = Vec::new();
        for model in of_file.iter().chain(others) {
            let spec = self.flags.spec(model)?;
            if let Some(name) = spec.names().find(|name| !names.insert((*name).to_owned())) {
                return Err(Error::setup(format!("two models have the name {name}")));
            }
            specs.push(spec);
        }
        Ok(specs)
    }
}

impl RouterFlags {
    /// The command line of the process that serves `model`, which is checked as if it were to run now.
    fn spec(&self, model: &FileModel) -> Result<ModelSpec> {
        let FileModel {
            name,
            model,
            args,
            lora_modules,
        } = model;
        let wrong = |what: String| Error::setup(format!("the model {name}: {what}"));
        if name.is_empty() {
            return Err(Error::setup(format!("the model {model} has an empty name")));
        }
        let given = || self.args.iter().chain(args);
        let is_set = |arg: &&String| {
            let flag = arg.split('=').next().unwrap_or_default();
            OF_THE_ROUTER.contains(&flag)
        };
        if let Some(flag) = given().find(is_set) {
            return Err(wrong(format!("{flag} is set by the router: leave it out")));
        }
        let ListenOptions {
            limits,
            shutdown_timeout,
            ..
        } = &self.listen;
        let log_format = match self.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let mut line = vec![
            "serve".to_owned(),
            format!("--model={model}"),
            // The process would otherwise end what the router goes on with. A model's own flags may say something else.
            format!("--max-connections={}", limits.max_connections),
            format!("--timeout-write={}", limits.timeout_write.as_secs_f64()),
        ];
        line.extend(given().cloned());
        if !lora_modules.is_empty() {
            line.push(format!("--{}", lora::MODULES));
            line.extend(lora_modules.iter().cloned());
        }
        line.extend([
            format!("--served-model-name={name}"),
            "--host=127.0.0.1".into(),
            "--port=0".into(),
            format!("--max-body-bytes={}", limits.max_body_bytes),
            format!("--shutdown-timeout={}", shutdown_timeout.as_secs()),
            format!("--log-format={log_format}"),
            "--exit-on-stdin-end".into(),
        ]);
        let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
        let program = std::iter::once(OsString::from("foretoken"));
        match Command::from_args(program.chain(line.iter().cloned())) {
            Ok(Command::Serve(config)) => Ok(ModelSpec {
                name: name.clone(),
                adapters: adapters(&config),
                args: line,
            }),
            Ok(_) | Err(Exit::Text(_)) => Err(wrong("its args are not flags of serve".into())),
            Err(Exit::Wrong(e)) => Err(wrong(e.to_string())),
        }
    }
}

/// The names of the adapters that a process loads.
fn adapters(config: &Config) -> Vec<String> {
    let modules = config.lora.iter().flat_map(|lora| &lora.modules);
    modules.map(|module| module.name.clone()).collect()
}

/// The models in `folder`, by name.
fn in_folder(folder: &Path) -> Result<Vec<FileModel>> {
    let mut models = Vec::new();
    for path in entries(folder)? {
        let name = name_of(&path);
        if path.is_file() {
            models.extend(gguf_model(&path));
        } else if path.join("config.json").is_file() {
            models.push(model(name, &path));
        } else if path.is_dir() {
            let mut files: Vec<_> = entries(&path)?
                .iter()
                .filter_map(|file| gguf_model(file))
                .collect();
            if let [only] = &mut files[..] {
                only.name = name;
            } else {
                for file in &mut files {
                    file.name = format!("{name}/{}", file.name);
                }
            }
            models.extend(files);
        }
    }
    Ok(models)
}

/// The paths in `folder`, without hidden ones, in order.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder)?;
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    let mut paths = read().map_err(|e| Error::in_file(folder, e))?;
    paths.retain(|path| !name_of(path).starts_with('.'));
    paths.sort();
    Ok(paths)
}

/// The model of a `.gguf` file, or of the first of its files; `None` for others, and for what only reads images.
fn gguf_model(file: &Path) -> Option<FileModel> {
    let name = name_of(file);
    let stem = name.strip_suffix(".gguf")?;
    if stem.starts_with("mmproj") {
        return None;
    }
    match PartName::of(&name) {
        Some(part) if part.number != 1 => None,
        Some(part) => Some(model(part.stem().to_owned(), file)),
        None => Some(model(stem.to_owned(), file)),
    }
}

fn model(name: String, path: &Path) -> FileModel {
    FileModel {
        name,
        model: path.to_string_lossy().into_owned(),
        args: Vec::new(),
        lora_modules: Vec::new(),
    }
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
