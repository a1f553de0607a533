//! `foretoken generate`: writes a model's answers to prompts as JSON lines, the training data of a
//! draft, or its answers to a [`batch`] of requests.
//!
//! Many texts run through the engine at once, with speculation if it is configured. A text depends
//! only on its prompt, the prompt's index in the file, the sample number and the seed. An interrupted
//! run therefore resumes where it stopped and ends with the same texts, possibly in another order. A text is known
//! by its id, its sample number and its prompt, so that other prompts with an id are answered, too.

pub mod batch;
mod output;

use crate::console::{Progress, say};
use crate::engine::{EngineHandle, FinishReason, Request};
use crate::error::{Error, Result};
use crate::parse::{at_least_one, number, temperature, up_to};
use crate::prompts::{self, CorpusAnswer, Prompt};
use crate::sampling::{SamplingParams, mix};
use crate::text::Text;
use clap::Args;
use futures_util::stream::{self, StreamExt};
use output::Output;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

/// The flags of `foretoken generate`, without those of the engine.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Generate")]
#[group(skip)]
pub struct GenerateOptions {
    /// JSON lines with "prompt", or "turns", whose first is the prompt.
    #[arg(long, value_name = "FILE", required_unless_present = "input_file")]
    pub prompts: Option<PathBuf>,
    /// Requests to answer instead, in the format of OpenAI's Batch API, as the server would.
    #[arg(short, long, value_name = "FILE", conflicts_with_all =
          ["prompts", "samples", "limit_per_category", "max_tokens", "temperature", "top_p"])]
    pub input_file: Option<PathBuf>,
    /// Corpus to write, as JSON lines, or the answers to --input-file. What it already contains is not generated
    /// again.
    #[arg(short, long, alias = "output-file", value_name = "FILE")]
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
    let file = options.prompts.as_deref();
    let file = file.ok_or_else(|| Error::setup("--prompts is missing: give a file of prompts"))?;
    let mut prompts = prompts::from_file(file, text)?;
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
    let mut asked = HashSet::new();
    if let Some(again) = prompts
        .iter()
        .find(|p| !asked.insert(key(&p.id, &p.tokens, 0)))
    {
        let what = format!(
            "two lines have the id {:?} and the same prompt: give them other ids, or ask for more --samples",
            again.id
        );
        return Err(Error::in_file(file, what));
    }
    let (mut corpus, done) = Output::open(&options.out, "text of a corpus", |line| {
        let line = serde_json::from_slice::<CorpusAnswer>(line)?;
        Ok(Some(key(&line.id, &line.prompt_ids, line.sample)))
    })?;
    let mut tasks = Vec::new();
    for (place, prompt) in prompts.iter().enumerate() {
        for sample in 0..options.samples {
            let is_done = done.contains(&key(&prompt.id, &prompt.tokens, sample));
            if prompt.tokens.len() < context && !is_done {
                tasks.push((place, prompt, sample));
            }
        }
    }
    if prompts.len() == too_long {
        return Err(Error::in_file(file, "there are no prompts to answer"));
    }
    if !done.is_empty() {
        say(format_args!(
            "{} holds {} texts already; {} are to be generated",
            options.out.display(),
            done.len(),
            tasks.len()
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))?;
    runtime.block_on(generate_all(engine, text, options, tasks, &mut corpus))
}

/// What tells a text from the others of a corpus. Of the prompt it has a hash: a corpus has millions of tokens.
fn key(id: &str, prompt: &[u32], sample: usize) -> (String, u64, usize) {
    let hash = |hash: u64, &token: &u32| mix(hash ^ u64::from(token));
    let hash = prompt.iter().fold(prompt.len() as u64, hash);
    (id.to_owned(), hash, sample)
}

async fn generate_all(
    engine: &EngineHandle,
    text: &Text,
    options: &GenerateOptions,
    tasks: Vec<(usize, &Prompt, usize)>,
    corpus: &mut Output,
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
            stop_token_ids: prompt.ends.clone(),
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
