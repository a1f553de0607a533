//! What a reranker judges with, as a repository in the layout of sentence-transformers says it, or a GGUF file.

use super::modules::{CONFIG, MODULES, Module, folder_of, kinds, parse};
use super::{CLASSIFIER, RANK};
use crate::checkpoint::gguf::GgufFile;
use crate::source::ModelSource;
use foretoken_core::error::{Error, Result};
use foretoken_core::files;
use foretoken_core::gguf::GgufSource;
use foretoken_core::model::{Classifier, RerankerSpec};
use serde::Deserialize;
use std::sync::Arc;

/// The module that makes a score of two tokens' logits.
const LOGIT_SCORE: &str = "LogitScore";

/// Numbers of outputs of a layer for classification. The softmax of a single one is always 1.
const MIN_OUTPUTS: usize = 2;
const MAX_OUTPUTS: usize = 1024;

/// The configuration of such a module.
#[derive(Deserialize)]
struct LogitScore {
    true_token_id: u32,
    false_token_id: Option<u32>,
}

/// Whether these are the modules of a model whose next token tells the relevance.
pub(super) fn is_reranker(modules: &[Module]) -> bool {
    matches!(kinds(modules).as_slice(), ["Transformer", LOGIT_SCORE])
}

/// What the model of `source` judges with, as its files say it; `None` = they do not say it.
///
/// # Errors
/// A setup error that names the file, if the score is neither that of two tokens nor that of a layer for classification.
pub fn reranker_spec(source: &ModelSource) -> Result<Option<RerankerSpec>> {
    let path = match source {
        ModelSource::Folder(path) => path,
        ModelSource::Gguf(file) if file.pooling_type()? == Some(RANK) => {
            let classifier = Arc::new(classifier(file)?);
            return Ok(Some(RerankerSpec::Classifier(classifier)));
        }
        ModelSource::Gguf(_) => return Ok(None),
    };
    let folder = files::folder_of(path);
    let file = folder.join(MODULES);
    let Some(text) = files::read_text_if_any(&file)? else {
        return Ok(None);
    };
    let modules: Vec<Module> = parse(&file, &text)?;
    if !is_reranker(&modules) {
        return Ok(None);
    }
    let Some(name) = folder_of(&modules, LOGIT_SCORE) else {
        let what = "the path of LogitScore is not a folder beside it";
        return Err(Error::in_file(&file, what));
    };
    let file = folder.join(name).join(CONFIG);
    let score: LogitScore = parse(&file, &files::read_text(&file)?)?;
    let no = score.false_token_id.ok_or_else(|| {
        let what = "a score without false_token_id is not supported: it must be that of two tokens";
        Error::in_file(&file, what)
    })?;
    Ok(Some(RerankerSpec::Answer {
        yes: score.true_token_id,
        no,
    }))
}

/// The layer for classification of a file; its values are 0 where only headers are read.
fn classifier(file: &GgufSource) -> Result<Classifier> {
    let wrong = |what: String| Err(Error::in_file(file.path(), what));
    let mut opened = GgufFile::open(file)?;
    let hidden = opened.config().hidden_size;
    let names = ["weight", "bias"].map(|part| format!("{CLASSIFIER}.{part}"));
    let [weights, bias] = names
        .each_ref()
        .map(|name| opened.dims(name).unwrap_or(&[]));
    let outputs = match *weights {
        [outputs, inputs] if inputs == hidden && (MIN_OUTPUTS..=MAX_OUTPUTS).contains(&outputs) => {
            outputs
        }
        _ => {
            return wrong(format!(
                "a model of pooling type {RANK} (rank) needs the tensor {} of {MIN_OUTPUTS} to {MAX_OUTPUTS} rows of {hidden}, and has {weights:?}",
                names[0]
            ));
        }
    };
    if ![&[][..], &[outputs]].contains(&bias) {
        return wrong(format!("{} is {bias:?}, not [{outputs}]", names[1]));
    }
    let lens =
        [weights, bias].map(|dims| dims.iter().product::<usize>() * usize::from(!dims.is_empty()));
    let is_header = matches!(file, GgufSource::Headers(_));
    let mut values = |at: usize| match lens[at] {
        len if is_header || len == 0 => Ok(vec![0.0; len]),
        _ => opened.values(&names[at]),
    };
    let (weights, bias) = (values(0)?, values(1)?);
    Ok(Classifier {
        weights: weights.chunks_exact(hidden).map(<[f32]>::to_vec).collect(),
        bias,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pooling::embedding_spec;
    use std::fs;

    fn of(modules: &str, score: &str) -> Result<Option<RerankerSpec>> {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text);
        fs::create_dir(folder.path().join("1_LogitScore")).expect("a folder");
        write("modules.json", modules).expect("written");
        write("1_LogitScore/config.json", score).expect("written");
        let source = ModelSource::Folder(folder.path().to_owned());
        let spec = reranker_spec(&source)?;
        // It is no embedding model by that.
        assert_eq!(spec.is_some(), embedding_spec(&source, None).is_ok());
        Ok(spec)
    }

    #[test]
    fn the_tokens_are_those_of_the_module_for_scores() {
        let modules = r#"[
            {"idx": 0, "name": "0", "path": "",
             "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]"#;
        let both = r#"{"true_token_id": 9693, "false_token_id": 2152}"#;
        let expected = RerankerSpec::Answer {
            yes: 9693,
            no: 2152,
        };
        assert_eq!(of(modules, both).expect("fine"), Some(expected));
        let one = of(
            modules,
            r#"{"true_token_id": 9454, "false_token_id": null}"#,
        );
        let error = one.expect_err("one token").to_string();
        assert!(error.contains("without false_token_id"), "{error}");
        let outside = modules.replace("\"1_LogitScore\"", "\"../other\"");
        let error = of(&outside, both).expect_err("outside").to_string();
        assert!(error.contains("not a folder beside it"), "{error}");
        let alone = r#"[{"path": "", "type": "Transformer"}]"#;
        assert_eq!(of(alone, both).expect("no reranker"), None);
    }
}
