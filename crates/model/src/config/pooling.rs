//! How the hidden states of a text become its embedding, as a repository in the layout of
//! sentence-transformers says it, or a GGUF file.

use super::modules::{CONFIG, MODULES, Module, folder_of, kinds, parse};
use super::reranker;
use crate::source::ModelSource;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use foretoken_core::model::{EmbeddingSpec, Pooling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The file with the settings of a Transformer module, besides `config.json`.
pub const TRANSFORMER: &str = "sentence_bert_config.json";
/// Prompts, of which one may come before all texts, unless a request chooses another.
pub const PROMPTS: &str = "config_sentence_transformers.json";
/// How the model of `source` embeds texts, as its files say it. `pooling`, if given, replaces the pooling of the files.
/// `None` = neither says a pooling. Embeddings are normalized unless there is a `modules.json` without a module that
/// normalizes.
///
/// # Errors
/// A setup error that names the file, and the module or the kind of pooling that is not supported.
pub fn embedding_spec(
    source: &ModelSource,
    pooling: Option<Pooling>,
) -> Result<Option<EmbeddingSpec>> {
    let plain = |pooling: Option<Pooling>| pooling.map(|pooling| EmbeddingSpec::new(pooling, true));
    match source {
        ModelSource::Gguf(file) => match pooling {
            Some(_) => Ok(plain(pooling)),
            None => Ok(plain(of_type(file.pooling_type()?))),
        },
        ModelSource::Folder(path) => {
            let folder = files::folder_of(path);
            let file = folder.join(MODULES);
            match files::read_text_if_any(&file)? {
                None => Ok(plain(pooling)),
                Some(text) => {
                    let modules: Vec<Module> = parse(&file, &text)?;
                    if reranker::is_reranker(&modules) {
                        return Ok(plain(pooling));
                    }
                    let spec = of_modules(folder, modules, pooling)
                        .map_err(|e| Error::in_file(&file, e))?;
                    with_limits(spec, folder).map(Some)
                }
            }
        }
    }
}

fn of_modules(
    folder: &Path,
    modules: Vec<Module>,
    pooling: Option<Pooling>,
) -> Result<EmbeddingSpec, String> {
    let kinds = kinds(&modules);
    let normalize = match kinds.as_slice() {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            return Err(format!(
                "the modules {} are not supported: only Transformer, Pooling and then Normalize or nothing are, and Transformer and LogitScore",
                clipped(&kinds.join(", "))
            ));
        }
    };
    if !modules[0].path.is_empty() {
        return Err("a Transformer in another folder is not supported".into());
    }
    let pooling = match (pooling, folder_of(&modules, "Pooling")) {
        (Some(pooling), _) => pooling,
        (None, Some(name)) => {
            let file = folder.join(name).join(CONFIG);
            let config = files::read_text(&file).and_then(|text| parse(&file, &text));
            let config = config.map_err(|e| e.to_string())?;
            of_config(&config).map_err(|e| format!("{name}/{CONFIG}: {e}"))?
        }
        _ => return Err("the path of Pooling is not a folder beside it".into()),
    };
    Ok(EmbeddingSpec::new(pooling, normalize))
}

/// Adds to `spec` what other files of `folder` say: the longest input, the prompts, and the one that sentence-transformers
/// takes if none is named.
fn with_limits(spec: EmbeddingSpec, folder: &Path) -> Result<EmbeddingSpec> {
    #[derive(Default, Deserialize)]
    struct Transformer {
        max_seq_length: Option<usize>,
        do_lower_case: Option<bool>,
    }
    #[derive(Default, Deserialize)]
    struct Prompts {
        prompts: Option<BTreeMap<String, String>>,
        default_prompt_name: Option<String>,
    }
    let file = folder.join(TRANSFORMER);
    let limits: Transformer = parse_if_any(&file)?;
    if limits.do_lower_case == Some(true) {
        let what = "do_lower_case true is not supported: only false is";
        return Err(Error::in_file(&file, what));
    }
    let file = folder.join(PROMPTS);
    let all: Prompts = parse_if_any(&file)?;
    let prompts = all.prompts.unwrap_or_default();
    let prompt = match all.default_prompt_name {
        None => None,
        Some(name) => {
            let prompt = prompts.get(&name).cloned();
            let none = || {
                let name = clipped(&name);
                Error::in_file(
                    &file,
                    format!("it has no prompt of the default name {name:?}"),
                )
            };
            Some(prompt.ok_or_else(none)?)
        }
    };
    Ok(EmbeddingSpec {
        max_tokens: limits.max_seq_length.filter(|&max| max > 0),
        prompt: prompt.filter(|prompt| !prompt.is_empty()),
        prompts,
        ..spec
    })
}

/// The content of a file, or what is so without it.
fn parse_if_any<T: DeserializeOwned + Default>(file: &Path) -> Result<T> {
    match files::read_text_if_any(file)? {
        Some(text) => parse(file, &text),
        None => Ok(T::default()),
    }
}

/// The pooling of `1_Pooling/config.json`: `pooling_mode`, or, before version 6, a flag for each mode.
fn of_config(config: &Map<String, Value>) -> Result<Pooling, String> {
    let modes: Vec<&str> = match config.get("pooling_mode") {
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        Some(mode) => mode.as_str().into_iter().collect(),
        None => {
            let set = config.iter().filter(|(_, value)| **value == true);
            set.filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
                .collect()
        }
    };
    let pooling = match modes.as_slice() {
        ["lasttoken"] => Pooling::Last,
        ["mean" | "mean_tokens"] => Pooling::Mean,
        _ => {
            return Err(format!(
                "pooling {:?} is not supported: only lasttoken and mean are; --pooling sets one of them",
                clipped(&modes.join(", "))
            ));
        }
    };
    // Of a prompt's tokens, which nobody can tell from the text's.
    if pooling == Pooling::Mean && config.get("include_prompt") == Some(&Value::Bool(false)) {
        return Err(
            "include_prompt false is not supported: --pooling mean pools all tokens".into(),
        );
    }
    Ok(pooling)
}

/// The pooling of llama.cpp's `pooling_type`; the loader has refused other types.
fn of_type(kind: Option<u64>) -> Option<Pooling> {
    match kind {
        Some(1) => Some(Pooling::Mean),
        Some(3) => Some(Pooling::Last),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(
        modules: &str,
        pooling: &str,
        chosen: Option<Pooling>,
    ) -> Result<Option<EmbeddingSpec>> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(MODULES), modules).unwrap();
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        fs::write(folder.path().join("1_Pooling/config.json"), pooling).unwrap();
        embedding_spec(&ModelSource::Folder(folder.path().to_owned()), chosen)
    }

    fn modules(kinds: &[(&str, &str)]) -> String {
        let module = |(class, path): &(&str, &str)| serde_json::json!({"idx": 0, "name": "x", "path": path, "type": class});
        Value::from_iter(kinds.iter().map(module)).to_string()
    }

    const FIRST: (&str, &str) = ("sentence_transformers.models.Transformer", "");
    const POOLING: (&str, &str) = ("sentence_transformers.models.Pooling", "1_Pooling");
    const NORMALIZE: (&str, &str) = ("sentence_transformers.models.Normalize", "2_Normalize");
    const LAST: &str = r#"{"word_embedding_dimension": 1024, "pooling_mode_cls_token": false,
        "pooling_mode_mean_tokens": false, "pooling_mode_max_tokens": false,
        "pooling_mode_mean_sqrt_len_tokens": false, "pooling_mode_weightedmean_tokens": false,
        "pooling_mode_lasttoken": true, "include_prompt": true}"#;

    #[test]
    fn the_layout_of_sentence_transformers_is_read() {
        let all = modules(&[FIRST, POOLING, NORMALIZE]);
        let spec = |pooling, normalize| Some(EmbeddingSpec::new(pooling, normalize));
        assert_eq!(read(&all, LAST, None).unwrap(), spec(Pooling::Last, true));
        let raw = modules(&[FIRST, POOLING]);
        let mean = r#"{"pooling_mode": "mean"}"#;
        assert_eq!(read(&raw, mean, None).unwrap(), spec(Pooling::Mean, false));
        let chosen = Some(Pooling::Mean);
        assert_eq!(read(&all, LAST, chosen).unwrap(), spec(Pooling::Mean, true));
        assert_eq!(read(&raw, "", chosen).unwrap(), spec(Pooling::Mean, false));
        let none = tempfile::tempdir().unwrap();
        let none = ModelSource::Folder(none.path().to_owned());
        assert_eq!(embedding_spec(&none, None).unwrap(), None);
        let given = embedding_spec(&none, Some(Pooling::Last)).unwrap();
        assert_eq!(given, spec(Pooling::Last, true));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let all = modules(&[FIRST, POOLING, NORMALIZE]);
        let dense = ("sentence_transformers.models.Dense", "2_Dense");
        let dense = modules(&[FIRST, POOLING, dense, NORMALIZE]);
        let outside = modules(&[FIRST, (POOLING.0, "../1_Pooling"), NORMALIZE]);
        let elsewhere = modules(&[(FIRST.0, "0_Transformer"), POOLING, NORMALIZE]);
        let cls = r#"{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true}"#;
        let prompt = r#"{"pooling_mode_mean_tokens": true, "include_prompt": false}"#;
        for (modules, pooling, why) in [
            (
                &all,
                cls,
                "1_Pooling/config.json: pooling \"cls_token, lasttoken\"",
            ),
            (&all, prompt, "include_prompt"),
            (&all, "{}", "pooling \"\""),
            (&all, "[]", "config.json"),
            (&dense, LAST, "Dense"),
            (&outside, LAST, "the path of Pooling"),
            (&elsewhere, LAST, "another folder"),
            (&"[]".to_owned(), LAST, "modules  are"),
            (&"{}".to_owned(), LAST, "modules.json"),
        ] {
            let error = read(modules, pooling, None).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn a_limit_and_a_default_prompt_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let of = || embedding_spec(&ModelSource::Folder(folder.path().to_owned()), None);
        write(MODULES, &modules(&[FIRST, POOLING]));
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        write("1_Pooling/config.json", LAST);
        write(
            TRANSFORMER,
            r#"{"max_seq_length": 512, "do_lower_case": false}"#,
        );
        let plain = r#"{"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": null}"#;
        write(PROMPTS, plain);
        let spec = of().unwrap().unwrap();
        assert_eq!(
            (spec.max_tokens, spec.prompt_of("search_query")),
            (Some(512), Some("Q: "))
        );
        assert_eq!(spec.prompt, None);
        write(PROMPTS, &plain.replace("null", "\"query\""));
        let spec = of().unwrap().unwrap();
        assert_eq!(spec.prompt.as_deref(), Some("Q: "));
        assert!(
            spec.to_string()
                .ends_with("up to 512 tokens, after the prompt \"Q: \"")
        );
        write(PROMPTS, &plain.replace("null", "\"document\""));
        assert_eq!(of().unwrap().unwrap().prompt, None);
        write(PROMPTS, &plain.replace("null", "\"other\""));
        let error = of().unwrap_err().to_string();
        assert!(
            error.contains("no prompt of the default name \"other\""),
            "{error}"
        );
        write(PROMPTS, "[]");
        assert!(of().unwrap_err().to_string().contains(PROMPTS));
        write(TRANSFORMER, r#"{"do_lower_case": true}"#);
        let error = of().unwrap_err().to_string();
        let what = format!("{TRANSFORMER}: do_lower_case true is not supported");
        assert!(error.contains(&what), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}
