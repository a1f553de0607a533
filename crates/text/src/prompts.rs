//! Prompts, read from a file, built in or random, and the lines of a corpus: answers to prompts.

use crate::{InfillText, Text};
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::sampling::mix;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

/// One prompt, ready for the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The prompt's id.
    pub id: String,
    /// The category of the prompt.
    pub category: String,
    /// The text that a user would type; empty if the tokens are random.
    pub text: String,
    /// Token ids of the prompt, as the model is given them.
    pub tokens: Vec<u32>,
    /// Token ids that end the answer, besides EOS: of a prompt with a suffix those that end what is filled in.
    pub ends: Vec<u32>,
    /// Token ids of what the answer is expected to be; a hint for drafts. May be empty.
    pub prediction: Vec<u32>,
}

/// One line of a corpus, which `generate` writes and `distill` reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusAnswer {
    /// The prompt's id.
    #[serde(default)]
    pub id: String,
    /// The category of the prompt.
    #[serde(default = "no_category")]
    pub category: String,
    /// Number of the answer among those to the same prompt, from 0.
    #[serde(default)]
    pub sample: usize,
    /// The prompt as the user would type it.
    pub prompt: String,
    /// The tokens that the model was given, including the chat template's.
    pub prompt_ids: Vec<u32>,
    /// The answer.
    pub text: String,
    /// The answer's tokens, including the one that ended it.
    pub ids: Vec<u32>,
    /// `stop`, or `length` if `max_tokens` or the context cut it off.
    pub finish_reason: String,
}

/// One line of a prompts file; Spec-Bench calls the id `question_id`.
#[derive(Debug, Deserialize)]
struct PromptLine {
    #[serde(alias = "question_id", default)]
    id: serde_json::Value,
    #[serde(default = "no_category")]
    category: String,
    prompt: Option<String>,
    suffix: Option<String>,
    #[serde(default)]
    prediction: String,
    #[serde(default)]
    turns: Vec<String>,
}

fn no_category() -> String {
    "all".into()
}

/// Keeps only the first `limit` prompts of each category.
pub fn limit_categories(prompts: &mut Vec<Prompt>, limit: usize) {
    let mut seen: HashMap<String, usize> = HashMap::new();
    prompts.retain(|prompt| {
        let seen = seen.entry(prompt.category.clone()).or_default();
        *seen += 1;
        *seen <= limit
    });
}

/// Prompts of chat, code, editing, summarization, translation, reasoning and retrieval: lines of a prompts file.
const BUILT_IN: &str = include_str!("prompts/built_in.jsonl");

/// What a line of a prompts file must be.
const LINE: &str = r#"expected a JSON object such as {"id": "1", "category": "qa", "prompt": "Why is the sky blue?"}, or with "turns": ["..."] in place of "prompt"; "id" and "category" may be missing; with "suffix", a text, the model fills in what is between both; "prediction", a text, is what the answer is expected to be"#;

/// Reads prompts from JSON lines with `prompt`, or with `turns`, of which only the first is used; `id`
/// and `category` are optional. Each goes through the chat template if there is one. A line with `suffix` asks for what
/// is missing between `prompt` and `suffix`, as a completion does. `prediction` is a text that drafts may follow.
///
/// # Errors
/// `Setup`, naming the file and the line, and saying what a line must hold.
pub fn from_file(path: &Path, text: &Text) -> Result<Vec<Prompt>> {
    let lines = std::fs::read_to_string(path).map_err(|e| Error::in_file(path, e))?;
    of_lines(&lines, text).map_err(|e| Error::in_file(path, e))
}

/// The built-in prompts: 20 of 7 categories, which were written for foretoken. Each goes through the chat template if
/// there is one.
///
/// # Errors
/// If the template refuses a prompt, or the tokenizer fails.
pub fn built_in(text: &Text) -> Result<Vec<Prompt>> {
    of_lines(BUILT_IN, text)
}

fn of_lines(lines: &str, text: &Text) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(lines.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let (line, prompt) =
            parse(line).map_err(|what| Error::setup(format!("line {number}: {what}")))?;
        let (tokens, ends) = match &line.suffix {
            None => (encode(text, &prompt)?, Vec::new()),
            Some(suffix) => infill(text, &prompt, suffix)
                .map_err(|what| Error::setup(format!("line {number}: {what}")))?,
        };
        prompts.push(Prompt {
            prediction: text.encode(&line.prediction, false)?,
            id: match line.id {
                serde_json::Value::String(id) => id,
                serde_json::Value::Null => number.to_string(),
                id => id.to_string(),
            },
            category: line.category,
            tokens,
            ends,
            text: prompt,
        });
    }
    Ok(prompts)
}

/// A line and its prompt. What some editors of Windows begin a file with does not count.
fn parse(line: &str) -> Result<(PromptLine, String), String> {
    let line = line.trim_start_matches('\u{feff}');
    let object = serde_json::from_str::<PromptLine>(line);
    let mut line = object.map_err(|e| format!("{}: {LINE}", clipped(&e.to_string())))?;
    let prompt = line.prompt.take().or_else(|| line.turns.first().cloned());
    match prompt.filter(|prompt| !prompt.is_empty()) {
        Some(prompt) => Ok((line, prompt)),
        None => Err(format!("it has no text to answer: {LINE}")),
    }
}

/// The tokens of a prompt as in a client's request: with the chat template if there is one.
///
/// # Errors
/// If the template refuses the prompt, or the tokenizer fails.
pub fn encode(text: &Text, prompt: &str) -> Result<Vec<u32>> {
    if !text.has_chat_template() {
        return text.encode(prompt, true);
    }
    let messages = [json!({"role": "user", "content": prompt})];
    let prompt = text.render_chat(&messages, true, &serde_json::Map::new())?;
    text.encode(&prompt, false)
}

/// The tokens of a prompt for what is missing between `before` and `after`, and those that end it.
fn infill(text: &Text, before: &str, after: &str) -> Result<(Vec<u32>, Vec<u32>)> {
    let between = InfillText {
        before,
        after,
        files: &[],
    };
    let prompt = text.infill(between, true, None)?;
    let prompt = prompt.ok_or_else(|| {
        Error::setup("this model has no tokens for \"suffix\": leave such prompts out")
    })?;
    Ok((prompt.ids, text.infill_ends()))
}

/// `count` prompts of `tokens` random ids below `vocab_size`; they depend only on the seed.
pub fn random(count: usize, tokens: usize, seed: u64, vocab_size: usize) -> Vec<Prompt> {
    let id = |n: usize| (mix(mix(seed) ^ n as u64) % vocab_size as u64) as u32;
    (0..count)
        .map(|prompt| Prompt {
            id: prompt.to_string(),
            category: "random".into(),
            text: String::new(),
            tokens: (0..tokens).map(|at| id(prompt * tokens + at)).collect(),
            ends: Vec::new(),
            prediction: Vec::new(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_prompts_are_a_function_of_the_seed() {
        let mut prompts = random(3, 5, 7, 11);
        assert_eq!(prompts, random(3, 5, 7, 11));
        assert_ne!(prompts, random(3, 5, 8, 11));
        limit_categories(&mut prompts, 2);
        assert_eq!(prompts.len(), 2);
        assert!(prompts.iter().all(|p| p.tokens.len() == 5));
        assert!(prompts.iter().flat_map(|p| &p.tokens).all(|&id| id < 11));
        assert_ne!(prompts[0].tokens, prompts[1].tokens);
    }

    #[test]
    fn all_forms_of_a_line() {
        let (line, first) = parse(r#"{"id": 81, "category": "qa", "turns": ["a", "b"]}"#).unwrap();
        assert_eq!(
            (line.id, line.category, first),
            (81.into(), "qa".into(), "a".into())
        );
        let (line, _) = parse(r#"{"question_id": "x", "turns": ["a"]}"#).unwrap();
        assert_eq!((line.id, line.category), ("x".into(), "all".into()));
        let (_, prompt) = parse(r#"{"prompt": "c"}"#).unwrap();
        assert_eq!(prompt, "c");
        let (line, before) = parse(r#"{"prompt": "a", "suffix": "b"}"#).unwrap();
        assert_eq!((before, line.suffix), ("a".into(), Some("b".into())));
        for wrong in [
            r#"{"id": 1, "turns": []}"#,
            r#"{"prompt": ""}"#,
            r#"{"prompt": 1}"#,
            "Why is the sky blue?",
            "{",
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(r#"{"id": "1", "category": "qa""#), "{error}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_prompt() {
        let (_, prompt) = parse("\u{feff}{\"prompt\": \"Why?\"}\r").unwrap();
        assert_eq!(prompt, "Why?");
    }

    #[test]
    fn built_in_prompts_are_of_seven_categories() {
        let parsed: Vec<_> = BUILT_IN.lines().map(|line| parse(line).unwrap()).collect();
        assert_eq!(parsed.len(), 20);
        let distinct = |of: fn(&(PromptLine, String)) -> String| {
            let all: std::collections::BTreeSet<String> = parsed.iter().map(of).collect();
            all.len()
        };
        assert_eq!(distinct(|(line, _)| line.category.clone()), 7);
        assert_eq!(distinct(|(line, _)| line.id.to_string()), 20);
        assert_eq!(distinct(|(_, prompt)| prompt.clone()), 20);
    }
}
