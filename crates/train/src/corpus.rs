//! Reads corpus files, and packs their documents into rows of token ids.

use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::mix;
use foretoken_text::Text;
use foretoken_text::prompts::{self, CorpusAnswer};
use std::path::Path;

/// The tokens of one document. The first `prompt` of them are the prompt; a draft learns to predict the
/// others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Token ids: prompt, then answer.
    pub tokens: Vec<u32>,
    /// Number of prompt tokens.
    pub prompt: usize,
}

/// `seq_len` tokens of the corpus, and the token after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// `seq_len + 1` ids: position `i` sees `tokens[..=i]` and predicts `tokens[i + 1]`.
    pub tokens: Vec<u32>,
    /// For each of the `seq_len` positions: whether the predicted token was written by a model (or is
    /// plain text), and does not belong to a prompt. Training uses all positions, evaluation only these.
    pub counted: Vec<bool>,
}

/// Reads the documents of `file`: JSON lines (.jsonl, .ndjson, .json) as `foretoken generate` writes
/// them, otherwise plain text with blank lines between documents. With `retokenize`, the texts of JSON
/// lines are encoded again and their ids ignored.
///
/// # Errors
/// `Setup`, naming the file and the line.
pub fn read(file: &Path, text: &Text, retokenize: bool) -> Result<Vec<Document>> {
    let document = |content| match content {
        DocumentText::Answer(answer) if retokenize => encode(&answer, text),
        DocumentText::Answer(answer) => Ok(document(*answer)),
        DocumentText::Plain(plain) => Ok(Document {
            tokens: text.encode(&plain, true)?,
            prompt: 0,
        }),
    };
    contents(file)?.into_iter().map(document).collect()
}

/// The texts of `file`, in the formats of [`read`]: each prompt and each answer is a text.
///
/// # Errors
/// `Setup`, naming the file and the line.
pub fn texts(file: &Path) -> Result<Vec<String>> {
    let texts = |content| match content {
        DocumentText::Answer(answer) => vec![answer.prompt, answer.text],
        DocumentText::Plain(plain) => vec![plain],
    };
    Ok(contents(file)?.into_iter().flat_map(texts).collect())
}

/// One document as it is in its file.
enum DocumentText {
    Answer(Box<CorpusAnswer>),
    Plain(String),
}

fn contents(file: &Path) -> Result<Vec<DocumentText>> {
    let content = std::fs::read_to_string(file).map_err(|e| Error::in_file(file, e))?;
    let extension = file.extension().and_then(|e| e.to_str());
    if !matches!(extension, Some("jsonl" | "ndjson" | "json")) {
        let lines: Vec<&str> = content.lines().collect();
        let documents = lines.split(|line| line.trim().is_empty());
        return Ok(documents
            .filter(|lines| !lines.is_empty())
            .map(|lines| DocumentText::Plain(lines.join("\n")))
            .collect());
    }
    (1..)
        .zip(content.lines())
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            serde_json::from_str(line)
                .map(DocumentText::Answer)
                .map_err(|e| Error::in_file(file, format!("line {number}: {e}")))
        })
        .collect()
}

/// A document of the ids that `answer` contains.
fn document(answer: CorpusAnswer) -> Document {
    let prompt = answer.prompt_ids.len();
    let tokens = [answer.prompt_ids, answer.ids].concat();
    Document { tokens, prompt }
}

/// Encodes the prompt as in a client's chat request, then the text, then EOS if the text ended with it.
fn encode(answer: &CorpusAnswer, text: &Text) -> Result<Document> {
    let mut tokens = prompts::encode(text, &answer.prompt)?;
    let prompt = tokens.len();
    tokens.extend(text.encode(&answer.text, false)?);
    if answer.finish_reason == "stop" {
        tokens.extend(text.eos());
    }
    Ok(Document { tokens, prompt })
}

/// Packs documents into rows of `len`, one after the other. `separator` follows each document that does
/// not end with EOS. A document may continue in the next row; tokens at the end that do not fill a row
/// are dropped.
pub fn pack(documents: &[Document], eos: &[u32], separator: Option<u32>, len: usize) -> Vec<Row> {
    let (mut tokens, mut written) = (Vec::new(), Vec::new());
    for document in documents {
        tokens.extend_from_slice(&document.tokens);
        written.extend((0..document.tokens.len()).map(|i| i >= document.prompt));
        let ended = document.tokens.last().is_some_and(|id| eos.contains(id));
        if !ended && let Some(separator) = separator {
            tokens.push(separator);
            written.push(false);
        }
    }
    let rows = tokens.len().saturating_sub(1) / len;
    (0..rows)
        .map(|row| Row {
            tokens: tokens[row * len..=(row + 1) * len].to_vec(),
            counted: written[row * len + 1..=(row + 1) * len].to_vec(),
        })
        .collect()
}

/// Indices of the rows to train on, and of those held out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Indices of the rows to train on.
    pub train: Vec<usize>,
    /// Indices of the rows for evaluation.
    pub held_out: Vec<usize>,
}

/// Holds out the share `holdout` of all rows, at least one. `seed` chooses them among the rows with
/// counted positions.
///
/// # Errors
/// `Setup`, if there are no rows to train on or none to hold out.
pub fn split(rows: &[Row], holdout: f64, seed: u64) -> Result<Split> {
    let wanted = ((rows.len() as f64 * holdout).round() as usize).max(1);
    let order = shuffled(rows.len(), mix(seed ^ HOLDOUT));
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for row in order {
        let counts = rows[row].counted.contains(&true);
        if counts && held_out.len() < wanted {
            held_out.push(row);
        } else {
            train.push(row);
        }
    }
    if train.is_empty() || held_out.is_empty() {
        return Err(Error::setup(format!(
            "the corpus fills {} rows, but at least one to train on and one to hold out are needed: add text, lower --seq-len or lower --holdout",
            rows.len()
        )));
    }
    train.sort_unstable();
    held_out.sort_unstable();
    Ok(Split { train, held_out })
}

/// The purposes of random numbers: choosing held-out rows, and shuffling.
const HOLDOUT: u64 = u64::from_le_bytes(*b"held out");
const ORDER: u64 = u64::from_le_bytes(*b"in order");

/// The numbers below `count`, shuffled by `seed` (Fisher and Yates; Durstenfeld 1964).
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        let other = mix(mix(seed) ^ i as u64) % (i as u64 + 1);
        all.swap(i, other as usize);
    }
    all
}

/// The order of rows in training: each epoch has all of them, shuffled differently. The `n`-th row
/// depends only on the seed and `n`, so a run can be resumed anywhere.
pub struct Order<'a> {
    rows: &'a [usize],
    seed: u64,
    epoch: Option<(usize, Vec<usize>)>,
}

impl<'a> Order<'a> {
    /// An order of `rows`, which must not be empty.
    pub fn new(rows: &'a [usize], seed: u64) -> Self {
        Self {
            rows,
            seed: mix(seed ^ ORDER),
            epoch: None,
        }
    }

    /// The `n`-th row of training, from 0.
    pub fn row(&mut self, n: usize) -> usize {
        let (epoch, at) = (n / self.rows.len(), n % self.rows.len());
        if self.epoch.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let order = shuffled(self.rows.len(), mix(self.seed ^ epoch as u64));
            self.epoch = Some((epoch, order));
        }
        let order = self.epoch.as_ref().map_or(&[][..], |(_, order)| order);
        self.rows[order[at]]
    }
}

/// A hash of the rows, to recognize a corpus.
pub fn fingerprint(rows: &[Row]) -> u64 {
    let ids = rows.iter().flat_map(|row| {
        let flags = row.counted.iter().map(|&counted| u64::from(counted));
        row.tokens.iter().map(|&id| u64::from(id)).chain(flags)
    });
    ids.fold(rows.len() as u64, |hash, id| mix(hash ^ id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(tokens: &[u32], prompt: usize) -> Document {
        Document {
            tokens: tokens.to_vec(),
            prompt,
        }
    }

    #[test]
    fn rows_overlap_by_the_predicted_token() {
        let documents = [document(&[1, 2, 3], 1), document(&[4, 5, 9], 2)];
        // 9 is an EOS already; a separator follows 3.
        let rows = pack(&documents, &[8, 9], Some(8), 3);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].tokens, [1, 2, 3, 8]);
        assert_eq!(rows[0].counted, [true, true, false]);
        assert_eq!(rows[1].tokens, [8, 4, 5, 9]);
        assert_eq!(rows[1].counted, [false, false, true]);
        // Without a separator documents follow each other directly; the last token does not fill a row.
        let rows = pack(&documents, &[], None, 3);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].tokens, [1, 2, 3, 4]);
        assert!(pack(&documents, &[], None, 6).is_empty());
        assert!(pack(&[], &[], None, 6).is_empty());
    }

    fn rows(count: usize) -> Vec<Row> {
        let row = |i: usize| Row {
            tokens: vec![i as u32; 3],
            counted: vec![i != 0; 2],
        };
        (0..count).map(row).collect()
    }

    #[test]
    fn the_seed_chooses_what_is_held_out() {
        let rows = rows(40);
        let split = |seed| split(&rows, 0.1, seed).unwrap();
        assert_eq!(split(1), split(1));
        assert_ne!(split(1), split(2));
        let Split { train, held_out } = split(3);
        assert_eq!((train.len(), held_out.len()), (36, 4));
        let mut all = [train, held_out.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
        for seed in 0..50 {
            // Row 0 has no counted position.
            assert!(!split(seed).held_out.contains(&0));
        }
        assert_eq!(super::split(&rows[..2], 0.01, 7).unwrap().held_out, [1]);
        for few in [&rows[..0], &rows[..1]] {
            let error = super::split(few, 0.1, 7).unwrap_err().to_string();
            assert!(error.contains("--seq-len"), "{error}");
        }
    }

    #[test]
    fn every_epoch_has_every_row_once_in_another_order() {
        let rows = [3, 5, 6, 7, 8, 9, 11];
        let all: Vec<usize> = {
            let mut order = Order::new(&rows, 4);
            (0..21).map(|n| order.row(n)).collect()
        };
        for epoch in all.chunks(7) {
            let mut epoch = epoch.to_vec();
            epoch.sort_unstable();
            assert_eq!(epoch, rows);
        }
        assert_ne!(all[..7], all[7..14]);
        // Resumed in the middle, it continues the same.
        let mut later = Order::new(&rows, 4);
        assert_eq!(
            (10..21).map(|n| later.row(n)).collect::<Vec<_>>(),
            all[10..]
        );
    }

    #[test]
    fn fingerprints_distinguish_corpora() {
        let one = rows(3);
        let mut other = one.clone();
        assert_eq!(fingerprint(&one), fingerprint(&other));
        other[1].tokens[2] += 1;
        assert_ne!(fingerprint(&one), fingerprint(&other));
        assert_ne!(fingerprint(&one), fingerprint(&one[..2]));
    }
}
