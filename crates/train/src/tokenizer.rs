//! `foretoken tokenizer`: trains a byte-level BPE tokenizer (Sennrich et al. 2016; over bytes, Radford
//! et al. 2019) for a model that is trained from scratch.

use super::corpus;
use foretoken_core::error::{Error, Result};
use foretoken_text::{SpecialIds, Text};
use std::path::PathBuf;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// The special tokens, as in ChatML. The last one ends a text.
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// What to learn from, and how much: the flags of `foretoken tokenizer`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TokenizerOptions {
    /// What to learn from; may be given several times. JSON lines (.jsonl) as `foretoken generate`
    /// writes them, else plain text.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE", required = true))]
    pub corpus: Vec<PathBuf>,
    /// Token ids at most, those of the 256 bytes and of the special tokens included; fewer, where
    /// the corpus has no more pairs to merge.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 4096, value_parser = vocab_size))]
    pub vocab_size: usize,
    /// Jinja file with the chat template [default: ChatML].
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub chat_template: Option<PathBuf>,
    /// Folder for tokenizer.json and tokenizer_config.json.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub out: PathBuf,
}

/// Parses a vocabulary size.
#[cfg(feature = "clap")]
fn vocab_size(text: &str) -> Result<usize, String> {
    /// One id per byte and per special token.
    const MIN_IDS: usize = 256 + SPECIAL.len();
    /// Memory is allocated for all of them. Known vocabularies have up to a quarter of it.
    const MAX_IDS: usize = 1 << 20;
    let accepted = format!(
        "a whole number from {MIN_IDS} to {MAX_IDS}: the bytes and the special tokens have an id each"
    );
    foretoken_core::parse::number(accepted, |n: &usize| (MIN_IDS..=MAX_IDS).contains(n))(text)
}

/// Trains the tokenizer and writes it, for [`Text::from_folder`].
///
/// # Errors
/// `Setup`, if a file cannot be read, the corpus is empty, the template does not parse, or the folder
/// cannot be written.
pub fn run(options: &TokenizerOptions) -> Result<()> {
    let mut texts = Vec::new();
    for file in &options.corpus {
        texts.extend(corpus::texts(file)?);
    }
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes == 0 {
        return Err(Error::setup("--corpus contains no text"));
    }
    let template = match &options.chat_template {
        Some(file) => std::fs::read_to_string(file).map_err(|e| Error::in_file(file, e))?,
        None => CHATML.to_owned(),
    };
    let text = learn(&texts, options.vocab_size, &template)?;
    std::fs::create_dir_all(&options.out).map_err(|e| Error::in_file(&options.out, e))?;
    text.save(&options.out)?;
    let mut tokens = 0;
    for sample in &texts {
        tokens += text.encode(sample, false)?.len();
    }
    foretoken_core::console::say(format_args!(
        "{} ids from {bytes} bytes, {:.2} bytes per token",
        text.vocab_size(),
        bytes as f64 / tokens as f64
    ));
    Ok(())
}

/// Trains a tokenizer of at most `vocab_size` ids.
fn learn(texts: &[String], vocab_size: usize, template: &str) -> Result<Text> {
    let cannot = |e: tokenizers::Error| Error::setup(format!("cannot train a tokenizer: {e}"));
    let special = SPECIAL.map(|name| AddedToken::from(name, true));
    let mut trainer = TrainerWrapper::from(
        BpeTrainer::builder()
            .vocab_size(vocab_size)
            .show_progress(false)
            .special_tokens(special.to_vec())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build(),
    );
    let (add_prefix_space, trim_offsets, use_regex) = (false, true, true);
    let bytes = ByteLevel::new(add_prefix_space, trim_offsets, use_regex);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(bytes));
    tokenizer.with_decoder(Some(bytes));
    tokenizer
        .train(&mut trainer, texts.iter())
        .map_err(cannot)?;
    let end = SPECIAL.last().and_then(|name| tokenizer.token_to_id(name));
    let special = SpecialIds {
        bos: None,
        eos: end.into_iter().collect(),
    };
    Text::new(tokenizer, special, Some(template))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_trained_tokenizer_reads_and_writes_any_text() {
        let texts: Vec<String> = (0..50)
            .map(|n| format!("The little fox found a key in the garden, number {n}."))
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let learnt = learn(&texts, 300, CHATML).unwrap();
        learnt.save(dir.path()).unwrap();
        let text = Text::from_folder(dir.path()).unwrap();
        assert_eq!(text.vocab_size(), 300);
        for sample in [texts[3].as_str(), "Grüße, 你好\n\t?"] {
            let ids = text.encode(sample, true).unwrap();
            assert_eq!(ids, learnt.encode(sample, true).unwrap());
            assert_eq!(text.decode(&ids, true), sample);
            assert!(ids.len() <= sample.len());
        }
        assert!(text.encode(&texts[3], true).unwrap().len() < texts[3].len() / 2);

        let chat = [json!({"role": "user", "content": "Hi"})];
        let prompt = text
            .render_chat(&chat, true, &serde_json::Map::new())
            .unwrap();
        assert_eq!(
            prompt,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
        let ids = text.encode(&prompt, false).unwrap();
        let end = text.eos().unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == end).count(), 1);
        assert_eq!(text.special_ids().eos, [end]);
    }
}
