//! `--draft-vocab`: the ids that a draft may predict (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

use super::checkpoint::Target;
use super::corpus;
use crate::config::{Config, DraftVocab};
use crate::error::{Error, Result};
use crate::model::{DraftVocabulary, ModelInfo};
use crate::text::most_frequent;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maximum size in bytes of a file of ids.
const MAX_FILE: u64 = 64 << 20;

/// What the flag asks for, in ids of `target`; `None` if it asks for nothing, or nothing drafts.
///
/// # Errors
/// `Setup`, in one line that names the flag or the file.
pub fn of(config: &Config, target: &Target) -> Result<Option<DraftVocabulary>> {
    if config.drafter.is_none() && config.compared.is_empty() {
        return Ok(None);
    }
    let vocab_size = target.model.info().vocab_size;
    let ids = match &config.draft_vocab {
        None => return Ok(None),
        Some(DraftVocab::File(file)) => read(file, vocab_size)?,
        Some(DraftVocab::MostFrequent(count)) => counted(config, target, *count)?,
    };
    let checkpoint = &target.checkpoint;
    Ok(Some(DraftVocabulary {
        ids: ids.into(),
        target: Box::new((checkpoint.source.clone(), checkpoint.options.clone())),
    }))
}

/// The error that nothing has an output layer that could be cut. `why` says why a layer of the target is not used, if it
/// has one.
pub fn no_network(why: Option<&str>) -> Error {
    let why = why.map_or(String::new(), |why| format!(" ({why})"));
    Error::setup(format!(
        "--draft-vocab needs a draft model, a head or an MTP layer, and none drafts here{why}: leave it out, or name one with --draft-model"
    ))
}

/// Says what `vocabulary` saves of a draft like `draft`, which is called `name`.
pub fn log(vocabulary: Option<&DraftVocabulary>, name: &str, draft: &ModelInfo) {
    let Some(vocabulary) = vocabulary else { return };
    let (kept, all) = (vocabulary.ids.len(), draft.vocab_size);
    let saved = (draft.hidden_size * all.saturating_sub(kept)) as f64;
    let share = 100.0 * saved / (draft.multiplications + saved).max(1.0);
    tracing::info!(
        "--draft-vocab: {name} predicts {kept} of {all} ids, which saves {share:.0}% of the multiplications of a draft token"
    );
}

/// The ids that `file` lists, ascending: a JSON array, or numbers between spaces, commas or line breaks.
fn read(file: &Path, vocab_size: usize) -> Result<Vec<u32>> {
    let wrong = |e: std::io::Error| Error::in_file(file, e);
    let mut bytes = Vec::new();
    let mut reader = File::open(file).map_err(wrong)?.take(MAX_FILE + 1);
    reader.read_to_end(&mut bytes).map_err(wrong)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::in_file(
            file,
            format!("a file of ids has at most {MAX_FILE} bytes"),
        ));
    }
    let text = String::from_utf8(bytes).map_err(|_| {
        let wanted = "it is no text: a JSON array of ids is needed, or numbers (a .pt file can be saved as JSON by Python: json.dump(torch.load(file), out))";
        Error::in_file(file, wanted)
    })?;
    let mut ids = parsed(&text).map_err(|e| Error::in_file(file, e))?;
    ids.sort_unstable();
    ids.dedup();
    match ids.last() {
        None => Err(Error::in_file(file, "it lists no ids")),
        Some(&last) if last as usize >= vocab_size => Err(Error::in_file(
            file,
            format!("id {last} is not below the target's vocab_size {vocab_size}"),
        )),
        Some(_) => Ok(ids),
    }
}

fn parsed(text: &str) -> Result<Vec<u32>, String> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).map_err(|e| e.to_string());
    }
    let words = text.split(|c: char| c.is_whitespace() || c == ',');
    let words = words.filter(|word| !word.is_empty());
    let number = |word: &str| {
        let shown: String = word.chars().take(20).collect();
        word.parse()
            .map_err(|_| format!("{shown:?} is not the id of a token"))
    };
    words.map(number).collect()
}

/// The `count` ids that the tables' corpus has most often, and those that end a text.
fn counted(config: &Config, target: &Target, count: usize) -> Result<Vec<u32>> {
    let vocab_size = target.model.info().vocab_size;
    if count > vocab_size {
        return Err(Error::setup(format!(
            "--draft-vocab {count} is more than the target's vocab_size {vocab_size}"
        )));
    }
    let (Some(file), Some(text)) = (&config.tables.corpus, &target.text) else {
        return Err(Error::setup(
            "--draft-vocab N needs a tokenizer, which this model lacks: give a file of ids",
        ));
    };
    let mut counts = vec![0; vocab_size];
    corpus::read(file, text, config.tables.memory as u64, |ids| {
        for &id in ids {
            if let Some(count) = counts.get_mut(id as usize) {
                *count += 1;
            }
        }
    })?;
    let ends = &target.model.info().eos_token_ids;
    let ids = most_frequent(&counts, ends, count);
    let of = |ids: &[u32]| ids.iter().map(|&id| counts[id as usize]).sum::<u64>();
    let (kept, all) = (of(&ids), counts.iter().sum::<u64>());
    tracing::info!(
        "--draft-vocab: {count} ids are {:.1}% of the {all} tokens of {}",
        100.0 * kept as f64 / all.max(1) as f64,
        file.display()
    );
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(content: &[u8]) -> Result<Vec<u32>, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ids");
        std::fs::write(&file, content).unwrap();
        read(&file, 100).map_err(|e| e.to_string())
    }

    #[test]
    fn a_file_lists_ids_as_json_or_text() {
        for content in ["[7, 3, 99, 3]", "7 3\n99,3\n", " 3,7, 99"] {
            assert_eq!(
                read_of(content.as_bytes()).unwrap(),
                [3, 7, 99],
                "{content}"
            );
        }
    }

    #[test]
    fn what_is_no_list_of_ids_is_refused() {
        for (content, wanted) in [
            (&b""[..], "lists no ids"),
            (b"[]", "lists no ids"),
            (b"[1, -2]", "invalid value"),
            (b"1 two", "\"two\" is not the id"),
            (b"4294967296", "is not the id"),
            (b"5 100", "id 100 is not below the target's vocab_size 100"),
            (b"PK\x03\x04\xff", "no text"),
        ] {
            let error = read_of(content).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
