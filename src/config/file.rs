//! The TOML file of `--config`, whose keys become flags.

use super::draft_vocab::is_number;
use super::flags::CommonOptions;
use super::hints;
use super::lora;
use crate::error::{Error, Result};
use crate::model::hub::gguf::HubFile;
use clap::{ArgAction, Args};
use std::ffi::OsString;
use std::path::Path;

/// The file's keys as flags, without those that `written`, the command line, replaces.
///
/// # Errors
/// The errors of [`table`] and [`args_of`].
pub fn args(path: &Path, written: &CommonOptions) -> Result<Vec<OsString>> {
    let command = CommonOptions::augment_args(clap::Command::new("foretoken"));
    args_of(path, table(path)?, &command, |name| written.replaces(name))
}

/// The keys and values of the file.
///
/// # Errors
/// `Setup`, naming the file and the line.
pub fn table(path: &Path) -> Result<toml::Table> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::in_file(path, e))?;
    text.parse().map_err(|e: toml::de::Error| {
        let line = e
            .span()
            .map_or(1, |s| text[..s.start].lines().count().max(1));
        Error::in_file(path, format!("line {line}: {}", e.message()))
    })
}

/// The keys of `table`, which the file has, as flags of `command`, without those that the command line replaces.
///
/// # Errors
/// `Setup`, naming the file and all keys that are unknown, or the first value of a wrong type.
pub fn args_of(
    path: &Path,
    table: toml::Table,
    command: &clap::Command,
    replaces: impl Fn(&str) -> bool,
) -> Result<Vec<OsString>> {
    let fail = |what: String| Error::in_file(path, what);
    let known = |name: &str| {
        let mut flags = command.get_arguments();
        flags.find(|flag| flag.get_long() == Some(name) && name != "config")
    };
    let is_unknown = |key: &&String| known(&key.replace('_', "-")).is_none();
    let unknown: Vec<&String> = table.keys().filter(is_unknown).collect();
    if !unknown.is_empty() {
        let names = || command.get_arguments().filter_map(|flag| flag.get_long());
        let told = unknown.iter().map(|key| match hints::instead_of(key) {
            Some(hint) => format!("`{key}` ({hint})"),
            None => match hints::near(&key.replace('_', "-"), names().filter(|n| *n != "config")) {
                Some(near) => format!("`{key}` (did you mean `{near}`?)"),
                None => format!("`{key}`"),
            },
        });
        let keys = if unknown.len() == 1 { "key" } else { "keys" };
        let told = told.collect::<Vec<_>>().join(", ");
        return Err(fail(format!(
            "unknown {keys} {told}: keys are the long flags of `{} --help`",
            command.get_name()
        )));
    }
    let mut args = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        if replaces(&name) {
            continue;
        }
        let flag = known(&name);
        let repeats = flag.is_some_and(|flag| matches!(flag.get_action(), ArgAction::Append));
        let count = flag.and_then(|flag| flag.get_num_args());
        let takes_many = count.is_some_and(|count| count.max_values() > 1);
        let value = match value {
            toml::Value::Array(values) if takes_many || repeats => {
                let values = values.iter().map(|value| plain(path, &name, value));
                let values = values.collect::<Option<Vec<_>>>();
                let values = values.filter(|values| !values.is_empty());
                let values = values.ok_or_else(|| {
                    fail(format!(
                        "`{key}` must be a string, a number or a list of them"
                    ))
                })?;
                if repeats {
                    let flag = |value| format!("--{name}={value}").into();
                    args.extend(values.into_iter().map(flag));
                } else {
                    args.push(format!("--{name}").into());
                    args.extend(values.into_iter().map(OsString::from));
                }
                continue;
            }
            value => plain(path, &name, &value),
        };
        let value = value
            .ok_or_else(|| fail(format!("`{key}` must be a string, a number or a boolean")))?;
        args.push(format!("--{name}={value}").into());
    }
    // Ends a list of values, which would else go on with the model of the command line.
    let mut end = OsString::from("--config=");
    end.push(path);
    args.push(end);
    Ok(args)
}

/// `value` of the key `name` as the command line has it; `None` = it is a list, a table or a time.
fn plain(file: &Path, name: &str, value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(placed(file, name, text)),
        toml::Value::Integer(number) => Some(number.to_string()),
        // With its point: 1.0 is no whole number.
        toml::Value::Float(number) => Some(format!("{number:?}")),
        toml::Value::Boolean(value) => Some(value.to_string()),
        _ => None,
    }
}

/// `value` of the key `name`; a relative path in it is one in the folder of the file. A model is a path if there is such
/// a file or folder, or if it cannot be an id of the Hub.
pub fn placed(file: &Path, name: &str, value: &str) -> String {
    let folder = file.parent().unwrap_or(Path::new(""));
    let path = folder.join(value);
    let is_path = match name {
        lora::MODULES => return lora::relative_to(folder, value),
        "generation-config" => !["auto", "vllm"].contains(&value),
        "tables-corpus" | "learn" | "models-dir" | "prefix-cache-disk" | "tls-cert" | "tls-key" => {
            true
        }
        "draft-vocab" => !is_number(value),
        "model" | "draft-model" => {
            let first = folder.join(value.split('/').next().unwrap_or_default());
            let names_a_file =
                value.ends_with(".gguf") && (first.is_dir() || HubFile::of(value).is_none());
            path.exists() || names_a_file || value.starts_with('.')
        }
        _ => false,
    };
    let path = path.to_str().filter(|_| is_path);
    path.unwrap_or(value).to_owned()
}
