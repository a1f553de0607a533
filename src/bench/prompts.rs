//! What is measured on.

use super::{Options, PromptSource};
use crate::error::{Error, Result};
use crate::sampling::mix;
use crate::text::Text;
use serde::Deserialize;
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

/// One prompt, ready for the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    pub id: String,
    pub category: String,
    pub tokens: Vec<u32>,
}

/// One line of a prompts file; Spec-Bench says `question_id`.
#[derive(Debug, Deserialize)]
struct Line {
    #[serde(alias = "question_id", default)]
    id: serde_json::Value,
    #[serde(default = "no_category")]
    category: String,
    turns: Vec<String>,
}

fn no_category() -> String {
    "all".into()
}

/// The prompts that `options` names, in their order, limited by category.
///
/// # Errors
/// `Setup`: the file, one of its lines, or a model without a tokenizer.
pub fn load(options: &Options, text: Option<&Text>, vocab_size: usize) -> Result<Vec<Prompt>> {
    let mut prompts = match &options.prompts {
        PromptSource::File(path) => from_file(path, text)?,
        &PromptSource::Random {
            count,
            tokens,
            seed,
        } => random(count, tokens, seed, vocab_size),
    };
    if let Some(limit) = options.limit_per_category {
        let mut seen: HashMap<String, usize> = HashMap::new();
        prompts.retain(|prompt| {
            let seen = seen.entry(prompt.category.clone()).or_default();
            *seen += 1;
            *seen <= limit
        });
    }
    Ok(prompts)
}

fn from_file(path: &Path, text: Option<&Text>) -> Result<Vec<Prompt>> {
    let fail = |what: String| Error::setup(format!("{}: {what}", path.display()));
    let text = text.ok_or_else(|| {
        Error::setup("--prompts needs a tokenizer, which this model lacks: use --random-prompts N")
    })?;
    let lines = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(lines.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let (line, first) = parse(line).map_err(|what| fail(format!("line {number}: {what}")))?;
        prompts.push(Prompt {
            id: match line.id {
                serde_json::Value::String(id) => id,
                serde_json::Value::Null => number.to_string(),
                id => id.to_string(),
            },
            category: line.category,
            tokens: encode(text, &first)?,
        });
    }
    Ok(prompts)
}

/// A line and its first turn.
fn parse(line: &str) -> Result<(Line, String), String> {
    let mut line: Line = serde_json::from_str(line).map_err(|e| e.to_string())?;
    if line.turns.first().is_none_or(String::is_empty) {
        return Err("\"turns\" must begin with a text".into());
    }
    let first = line.turns.swap_remove(0);
    Ok((line, first))
}

/// As a client would get it: through the chat template where there is one.
fn encode(text: &Text, prompt: &str) -> Result<Vec<u32>> {
    if !text.has_chat_template() {
        return text.encode(prompt, true);
    }
    let messages = [json!({"role": "user", "content": prompt})];
    text.encode(
        &text.render_chat(&messages, true, &serde_json::Map::new())?,
        false,
    )
}

fn random(count: usize, tokens: usize, seed: u64, vocab_size: usize) -> Vec<Prompt> {
    let id = |n: usize| (mix(mix(seed) ^ n as u64) % vocab_size as u64) as u32;
    (0..count)
        .map(|prompt| Prompt {
            id: prompt.to_string(),
            category: "random".into(),
            tokens: (0..tokens).map(|at| id(prompt * tokens + at)).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_prompts_are_a_function_of_the_seed() {
        let options = |seed| Options {
            prompts: PromptSource::Random {
                count: 3,
                tokens: 5,
                seed,
            },
            limit_per_category: Some(2),
            max_tokens: 1,
            temperatures: vec![0.0],
            repeat: 1,
            json: None,
        };
        let prompts = load(&options(7), None, 11).unwrap();
        assert_eq!(prompts.len(), 2);
        assert!(prompts.iter().all(|p| p.tokens.len() == 5));
        assert!(prompts.iter().flat_map(|p| &p.tokens).all(|&id| id < 11));
        assert_ne!(prompts[0].tokens, prompts[1].tokens);
        assert_eq!(prompts, load(&options(7), None, 11).unwrap());
        assert_ne!(prompts, load(&options(8), None, 11).unwrap());
    }

    #[test]
    fn both_forms_of_a_line() {
        let (line, first) = parse(r#"{"id": 81, "category": "qa", "turns": ["a", "b"]}"#).unwrap();
        assert_eq!(
            (line.id, line.category, first),
            (81.into(), "qa".into(), "a".into())
        );
        let (line, _) = parse(r#"{"question_id": "x", "turns": ["a"]}"#).unwrap();
        assert_eq!((line.id, line.category), ("x".into(), "all".into()));
        assert!(parse(r#"{"id": 1, "turns": []}"#).is_err());
        assert!(parse("{").is_err());
    }
}
