//! How the hidden states of a text become its embedding, as a repository in the layout of
//! sentence-transformers says it, or a GGUF file.

use super::modules::{CONFIG, DENSE_LAYER, MAX_DENSE, MODULES, Module, folder_of, kinds, parse};
use super::{EMBEDDING_GEMMA, GGUF_DENSE, reranker};
use crate::checkpoint::gguf::GgufFile;
use crate::checkpoint::shards::safetensors_files;
use crate::checkpoint::tensor_source::TensorSource;
use crate::source::ModelSource;
use candle_core::quantized::gguf_file;
use candle_core::{DType, Device};
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use foretoken_core::gguf::GgufSource;
use foretoken_core::model::{DenseActivation, DenseLayer, EmbeddingSpec, Pooling};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The file with the settings of a Transformer module, besides `config.json`.
pub const TRANSFORMER: &str = "sentence_bert_config.json";
/// Prompts, of which one may come before all texts, unless a request chooses another.
pub const PROMPTS: &str = "config_sentence_transformers.json";
/// Maximum number of values of a dense layer whose weights are not here.
const MAX_DENSE_VALUES: usize = 1 << 26;

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
        ModelSource::Gguf(file) => {
            let own = match pooling {
                Some(_) => None,
                None => of_type(file.pooling_type()?),
            };
            let Some(spec) = plain(pooling.or(own)) else {
                return Ok(None);
            };
            let layers = layers_of_gguf(file, pooling.is_some())?.into();
            Ok(Some(EmbeddingSpec { layers, ..spec }))
        }
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
    let (first, others) = kinds.split_at(kinds.len().min(2));
    let (normalize, dense) = match others.split_last() {
        Some((&"Normalize", dense)) => (true, dense),
        _ => (false, others),
    };
    let is_known = first == ["Transformer", "Pooling"]
        && dense.len() <= MAX_DENSE
        && dense.iter().all(|&kind| kind == DENSE_LAYER);
    if !is_known {
        return Err(format!(
            "the modules {} are not supported: only Transformer, Pooling, up to {MAX_DENSE} of {DENSE_LAYER} and then Normalize or nothing are, and Transformer and LogitScore",
            clipped(&kinds.join(", "))
        ));
    }
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
    let dense = modules.iter().filter(|module| module.kind() == DENSE_LAYER);
    let layers: Result<Vec<DenseLayer>, String> = dense
        .map(|module| dense_layer(folder, &module.path))
        .collect();
    Ok(EmbeddingSpec {
        layers: layers?.into(),
        ..EmbeddingSpec::new(pooling, normalize)
    })
}

/// The dense layer in the folder `name` beside `modules.json`; its values are 0 where the model's weights are not on this
/// machine, either.
fn dense_layer(folder: &Path, name: &str) -> Result<DenseLayer, String> {
    if !files::is_name(name) {
        return Err(format!(
            "the path of {DENSE_LAYER} is not a folder beside it"
        ));
    }
    let own = folder.join(name);
    let file = own.join(CONFIG);
    let config = files::read_text(&file).and_then(|text| parse(&file, &text));
    let config: DenseConfig = config.map_err(|e| e.to_string())?;
    let in_config = |what: String| format!("{name}/{CONFIG}: {what}");
    let activation = config.activation().map_err(in_config)?;
    let shape = (config.out_features, config.in_features);
    if safetensors_files(folder).is_err() && safetensors_files(&own).is_err() {
        let values = vec![0.0; shape.0.saturating_mul(shape.1).min(MAX_DENSE_VALUES)];
        return DenseLayer::new(values, shape, Vec::new(), activation).map_err(in_config);
    }
    let in_weights = |e: Error| format!("{name}: {e}");
    let mut tensors = TensorSource::safetensors(&own).map_err(in_weights)?;
    let mut values = |part: &str, dims: &[usize]| -> Result<Vec<f32>> {
        let tensor = tensors.tensor(part, &Device::Cpu)?;
        if tensor.dims() != dims {
            return Err(Error::wrong_shape(part, tensor.dims(), dims));
        }
        Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    };
    let weights = values("linear.weight", &[shape.0, shape.1]).map_err(in_weights)?;
    let bias = if config.bias {
        values("linear.bias", &[shape.0]).map_err(in_weights)?
    } else {
        Vec::new()
    };
    DenseLayer::new(weights, shape, bias, activation).map_err(|e| format!("{name}: {e}"))
}

/// The configuration of a dense layer, and what sentence-transformers assumes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DenseConfig {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    activation_function: Option<String>,
    module_input_name: Option<String>,
    module_output_name: Option<String>,
}

fn yes() -> bool {
    true
}

impl DenseConfig {
    fn activation(&self) -> Result<DenseActivation, String> {
        for (key, name) in [
            ("module_input_name", &self.module_input_name),
            ("module_output_name", &self.module_output_name),
        ] {
            if let Some(name) = name.as_deref().filter(|&name| name != "sentence_embedding") {
                let name = clipped(name);
                return Err(format!(
                    "{key} {name:?} is not supported: only \"sentence_embedding\" is"
                ));
            }
        }
        let class = self.activation_function.as_deref().unwrap_or("Tanh");
        match class.rsplit('.').next() {
            Some("Identity") => Ok(DenseActivation::Identity),
            Some("Tanh") => Ok(DenseActivation::Tanh),
            _ => Err(format!(
                "activation_function {:?} is not supported: only Identity and Tanh of torch.nn are",
                clipped(class)
            )),
        }
    }
}

/// The dense layers of EmbeddingGemma in a GGUF file; their values are 0 where only headers are read. Other models have none.
///
/// # Errors
/// A setup error if the file has not all of them, unless `may_lack` them.
fn layers_of_gguf(file: &GgufSource, may_lack: bool) -> Result<Vec<DenseLayer>> {
    let (header, _) = file.open()?;
    let architecture = header.metadata.get("general.architecture");
    let is_gemma =
        matches!(architecture, Some(gguf_file::Value::String(name)) if name == EMBEDDING_GEMMA);
    let present = GGUF_DENSE
        .iter()
        .filter(|name| header.tensors.contains_key(**name));
    let present = present.count();
    if !is_gemma || present == 0 && may_lack {
        return Ok(Vec::new());
    }
    if present < GGUF_DENSE.len() {
        let what = format!(
            "it lacks {}, without which its embeddings are not EmbeddingGemma's: convert the model with --sentence-transformers-dense-modules; --pooling mean does without them, as llama.cpp does",
            GGUF_DENSE.join(" and ")
        );
        return Err(Error::in_file(file.path(), what));
    }
    let mut opened = GgufFile::open(file)?;
    let is_header = matches!(file, GgufSource::Headers(_));
    let layers = GGUF_DENSE.into_iter().map(|name| {
        let wrong = |what: String| Error::in_file(file.path(), format!("{name}: {what}"));
        let shape = match *opened.dims(name).unwrap_or(&[]) {
            [outputs, inputs] => (outputs, inputs),
            _ => return Err(wrong("it must be a matrix".into())),
        };
        let values = if is_header {
            vec![0.0; shape.0.saturating_mul(shape.1).min(MAX_DENSE_VALUES)]
        } else {
            opened.values(name)?
        };
        DenseLayer::new(values, shape, Vec::new(), DenseActivation::Identity).map_err(wrong)
    });
    layers.collect()
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
    fn dense_layers_that_are_not_followed_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        for name in ["1_Pooling", "2_Dense"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let dense = |path| ("sentence_transformers.models.Dense", path);
        let of = |path| {
            write(MODULES, &modules(&[FIRST, POOLING, dense(path), NORMALIZE]));
            embedding_spec(&ModelSource::Folder(folder.path().to_owned()), None)
        };
        write("1_Pooling/config.json", LAST);
        let plain = serde_json::json!({"in_features": 3, "out_features": 2});
        let set = |key: &str, value: &str| {
            let mut config = plain.clone();
            config[key] = value.into();
            write("2_Dense/config.json", &config.to_string());
            of("2_Dense")
        };
        // The weights of the model are not here, either.
        let spec = set("activation_function", "torch.nn.modules.activation.Tanh");
        assert_eq!(spec.unwrap().unwrap().size(3), 2);
        let cases = [
            (
                "activation_function",
                "torch.nn.ReLU",
                "only Identity and Tanh",
            ),
            (
                "module_input_name",
                "token_embeddings",
                "only \"sentence_embedding\" is",
            ),
        ];
        for (key, value, why) in cases {
            let error = set(key, value).unwrap_err().to_string();
            let named = format!("2_Dense/config.json: {key} {value:?} is not supported: {why}");
            assert!(error.contains(&named), "{error}");
        }
        let error = set("key_of_tomorrow", "x").unwrap_err().to_string();
        assert!(error.contains("unknown field `key_of_tomorrow`"), "{error}");
        write("2_Dense/config.json", &plain.to_string());
        write("model.safetensors", "");
        let error = of("2_Dense").unwrap_err().to_string();
        assert!(error.contains("2_Dense: "), "{error}");
        let error = of("../2_Dense").unwrap_err().to_string();
        assert!(error.contains("the path of Dense"), "{error}");
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
