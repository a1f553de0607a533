//! `foretoken generate`: writes a model's answers to prompts as JSON lines, the training data of a
//! draft.
//!
//! Many texts run through the engine at once, with speculation if it is configured. A text depends
//! only on its prompt, the prompt's index in the file, the sample number and the seed. An interrupted
//! run therefore resumes where it stopped and ends with the same texts, possibly in another order.

use crate::console::{Progress, say};
use crate::engine::{EngineHandle, FinishReason, Request};
use crate::error::{Error, Result};
use crate::parse::{at_least_one, number, temperature, up_to};
use crate::prompts::{self, CorpusAnswer, Prompt};
use crate::sampling::{SamplingParams, mix};
use crate::text::Text;
use clap::Args;
use futures_util::stream::{self, StreamExt};
use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The flags of `foretoken generate`, without those of the engine.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Generate")]
#[group(skip)]
pub struct GenerateOptions {
    /// JSON lines with "prompt", or "turns", whose first is the prompt.
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,
    /// Corpus to write, as JSON lines. Texts that it already contains are not generated again.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Texts per prompt.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = up_to::<{ 1 << 16 }>)]
    pub samples: usize,
    /// Use only the first N prompts of each category.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit_per_category: Option<usize>,
    /// Maximum tokens per text.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = up_to::<{ 1 << 30 }>)]
    pub max_tokens: usize,
    /// Sampling temperature; 0 = greedy.
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature)]
    pub temperature: f32,
    /// Sample from the smallest set of most probable tokens with at least this total probability;
    /// 1 = all tokens.
    #[arg(long, value_name = "P", default_value_t = 1.0,
          value_parser = number("a number above 0 and at most 1", |&p: &f32| p > 0.0 && p <= 1.0))]
    pub top_p: f32,
    /// From the engine's --seed.
    #[arg(skip)]
    pub seed: u64,
    /// Maximum texts in the engine at once.
    #[arg(skip)]
    pub concurrency: usize,
}

/// Generates the texts that the corpus does not contain, and appends each one when it is complete.
///
/// # Errors
/// `Setup`: the prompts, or a corpus that is invalid or cannot be read or written. `Internal`: the
/// engine failed. Lines written before the error stay.
pub fn run(engine: &EngineHandle, text: &Text, options: &GenerateOptions) -> Result<()> {
    let mut prompts = prompts::from_file(&options.prompts, text)?;
    if let Some(limit) = options.limit_per_category {
        prompts::limit_categories(&mut prompts, limit);
    }
    let context = engine.limits().max_model_len;
    let too_long = prompts.iter().filter(|p| p.tokens.len() >= context).count();
    if too_long > 0 {
        let all = prompts.len();
        say(format_args!(
            "{too_long} of {all} prompts do not fit in {context} tokens and are skipped"
        ));
    }
    let mut corpus = Corpus::open(&options.out)?;
    let mut tasks = Vec::new();
    for (place, prompt) in prompts.iter().enumerate() {
        for sample in 0..options.samples {
            if prompt.tokens.len() < context && !corpus.has(&prompt.id, sample) {
                tasks.push((place, prompt, sample));
            }
        }
    }
    if prompts.len() == too_long {
        return Err(Error::in_file(
            &options.prompts,
            "there are no prompts to answer",
        ));
    }
    if !corpus.done.is_empty() {
        say(format_args!(
            "{} holds {} texts already; {} are to be generated",
            options.out.display(),
            corpus.done.len(),
            tasks.len()
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))?;
    runtime.block_on(generate_all(engine, text, options, tasks, &mut corpus))
}

async fn generate_all(
    engine: &EngineHandle,
    text: &Text,
    options: &GenerateOptions,
    tasks: Vec<(usize, &Prompt, usize)>,
    corpus: &mut Corpus,
) -> Result<()> {
    let mut progress = Progress::new("generating", "texts", tasks.len() as u64);
    let started = Instant::now();
    let (mut texts, mut tokens, mut stopped) = (0, 0, 0);
    let width = options.concurrency.min(engine.limits().max_waiting);
    let mut answers = stream::iter(tasks)
        .map(|(place, prompt, sample)| answer(engine, text, options, place, prompt, sample))
        .buffer_unordered(width);
    while let Some(line) = answers.next().await {
        let line = line?;
        corpus.add(&line)?;
        texts += 1;
        tokens += line.ids.len();
        stopped += usize::from(line.finish_reason == "stop");
        let speed = tokens as f64 / started.elapsed().as_secs_f64();
        progress.step(format!("{speed:.0} tokens/s"));
    }
    progress.end();
    let seconds = started.elapsed().as_secs_f64();
    say(format_args!(
        "{texts} texts, {tokens} tokens, {:.0} tokens/s; {stopped} ended with EOS, {} were cut off",
        tokens as f64 / seconds.max(1e-9),
        texts - stopped
    ));
    Ok(())
}

/// Generates one text.
async fn answer(
    engine: &EngineHandle,
    text: &Text,
    options: &GenerateOptions,
    place: usize,
    prompt: &Prompt,
    sample: usize,
) -> Result<CorpusAnswer> {
    let room = engine.limits().max_model_len - prompt.tokens.len();
    let seed = mix(mix(mix(options.seed) ^ place as u64) ^ sample as u64);
    let events = engine.submit(Request {
        prompt: prompt.tokens.clone(),
        params: SamplingParams {
            temperature: options.temperature,
            top_p: options.top_p,
            seed,
            ..SamplingParams::default()
        },
        max_tokens: Some(options.max_tokens.min(room)),
        ..Request::default()
    })?;
    let completion = events.collect().await?;
    let ids = completion.ids();
    let (text_ids, finish_reason) = match completion.finish {
        Some(FinishReason::Stop { .. }) => (&ids[..ids.len() - 1], "stop"),
        _ => (&ids[..], "length"),
    };
    Ok(CorpusAnswer {
        id: prompt.id.clone(),
        category: prompt.category.clone(),
        sample,
        prompt: prompt.text.clone(),
        prompt_ids: prompt.tokens.clone(),
        text: text.decode(text_ids, true),
        ids,
        finish_reason: finish_reason.into(),
    })
}

/// The corpus file, to which texts are appended.
struct Corpus {
    path: PathBuf,
    file: File,
    done: HashSet<(String, usize)>,
}

impl Corpus {
    /// Opens or creates the file and removes an incomplete last line.
    fn open(path: &Path) -> Result<Self> {
        let unreadable = |e| Error::in_file(path, e);
        if path.exists() && !path.is_file() {
            return Err(Error::in_file(path, "is no file that can hold a corpus"));
        }
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(unreadable)?;
        let mut contents = String::new();
        file.read_to_string(&mut contents).map_err(unreadable)?;
        let complete_len = contents.rfind('\n').map_or(0, |end| end + 1);
        let mut done = HashSet::new();
        for (number, line) in (1..).zip(contents[..complete_len].lines()) {
            let line: CorpusAnswer = serde_json::from_str(line).map_err(|e| {
                let what = "is no text of a corpus, choose another --out";
                Error::in_file(path, format!("line {number} {what}: {e}"))
            })?;
            done.insert((line.id, line.sample));
        }
        file.set_len(complete_len as u64)
            .and_then(|()| file.seek(SeekFrom::End(0)))
            .map_err(unreadable)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            done,
        })
    }

    fn has(&self, id: &str, sample: usize) -> bool {
        self.done.contains(&(id.to_owned(), sample))
    }

    /// Appends one line with a single write.
    fn add(&mut self, line: &CorpusAnswer) -> Result<()> {
        let mut json = serde_json::to_string(line)
            .map_err(|e| Error::internal(format!("a corpus line: {e}")))?;
        json.push('\n');
        self.file
            .write_all(json.as_bytes())
            .map_err(|e| Error::in_file(&self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk is an error that names the file.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_line_that_cannot_be_written_is_an_error() {
        let mut corpus = Corpus {
            path: "corpus.jsonl".into(),
            file: File::options().write(true).open("/dev/full").unwrap(),
            done: HashSet::new(),
        };
        let line = r#"{"id": "1", "sample": 0, "prompt": "a", "prompt_ids": [1], "text": "b", "ids": [2], "finish_reason": "stop"}"#;
        let error = corpus.add(&serde_json::from_str(line).unwrap());
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("corpus.jsonl: No space left"), "{error}");
        let error = Corpus::open(Path::new("/dev/full")).err().unwrap();
        assert!(error.to_string().contains("is no file"), "{error}");
    }
}
