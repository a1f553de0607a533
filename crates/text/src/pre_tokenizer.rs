//! Pre-tokenizers by the names that GGUF files have for them (`tokenizer.ggml.pre`).
//!
//! The patterns are those of the models' own `tokenizer.json`.

use foretoken_core::error::{Error, Result};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

/// The parts of a tokenizer that a name of a pre-tokenizer stands for.
pub(super) struct Named {
    pub normalizer: Option<NormalizerWrapper>,
    pub splitter: PreTokenizerWrapper,
    /// Whether a word that is a token needs no merges, if the file does not say.
    pub ignore_merges: bool,
    /// Whether BOS comes first, if the file does not say.
    pub add_bos: bool,
}

/// GPT-4's words, with digits in groups of three: Llama 3.
const WORDS_DIGITS_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4's words, with single digits: Qwen2.
const WORDS_DIGITS_1: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4's words, with single digits, and marks as parts of words: Qwen3.5.
const WORDS_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4's words, with single digits, and punctuation without the line ends after it: Seed-Coder.
const WORDS_LINES: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4's words, with single digits, in a pattern with possessive quantifiers: Ling, LLaDA.
const WORDS_POSSESSIVE: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
/// Words begin where capitals do: Mistral's Tekken.
const CAPITALS_DIGITS_1: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words that begin where capitals do, with digits in groups of three, and endings as parts of words: GPT-4o, Llama
/// 4.
const CAPITALS_DIGITS_3: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4o's words, without Chinese characters, of which all in a row are a word: Kimi K2, Moonlight.
const CAPITALS_HAN: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words without punctuation: BLOOM.
const WORDS_BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// The splits of DeepSeek-V3.
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// The splits of DeepSeek-Coder.
const DEEPSEEK_CODER: [&str; 4] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"];
/// The splits of DeepSeek LLM: letters of scripts with upper and lower case, and punctuation in half and full width.
/// Characters that Unicode's normalization would change are written as numbers.
const DEEPSEEK_LLM: [&str; 5] = [
    r"[\r\n]",
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u{1F5F}-\u{1F7D}ᾀ-ᾴᾶ-ᾼ\u{1FBE}ῂ-ῄῆ-ῌ\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212A}-\u{212D}ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⲳⲳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
];

/// The pre-tokenizer `name`, and what its models have besides.
///
/// # Errors
/// `Setup`, if the name is not known.
pub(super) fn named(name: &str) -> Result<Named> {
    let digits = || PreTokenizerWrapper::from(Digits::new(true));
    let steps = match name {
        "default" | "gpt-2" | "gpt2" | "phi-2" | "gigachat" | "a.x-4.0" | "mellum" | "mpt"
        | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4" => vec![words()],
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => vec![digits(), words()],
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" | "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => split(&[WORDS_DIGITS_3])?,
        "qwen2" | "deepseek-r1-qwen" | "f2llmv2" | "kormo" | "megrez" | "stablelm2" | "hunyuan"
        | "grok-2" => split(&[WORDS_DIGITS_1])?,
        "minicpm5" => split(&[r"\p{N}{1,3}", WORDS_DIGITS_3])?,
        "qwen35" => split(&[WORDS_MARKS])?,
        "seed-coder" => split(&[WORDS_LINES])?,
        "bailingmoe" | "bailingmoe2" | "llada-moe" => split(&[WORDS_POSSESSIVE])?,
        "tekken" => split(&[CAPITALS_DIGITS_1])?,
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" | "talkie" => split(&[CAPITALS_DIGITS_3])?,
        "kimi-k2" => split(&[CAPITALS_HAN])?,
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => split(&DEEPSEEK_V3)?,
        "deepseek-coder" => [split(&DEEPSEEK_CODER)?, vec![digits()]].concat(),
        "deepseek-llm" => [split(&DEEPSEEK_LLM)?, vec![digits()]].concat(),
        "poro-chat" | "bloom" | "gpt3-finnish" => split(&[WORDS_BLOOM])?,
        "viking" => split(&[WORDS_BLOOM, r"\p{N}"])?,
        "falcon" => {
            let punctuation = Punctuation::new(SplitDelimiterBehavior::Contiguous);
            let start = vec![punctuation.into(), words(), Digits::new(false).into()];
            [start, split(&["[0-9][0-9][0-9]"])?].concat()
        }
        other => {
            return Err(Error::setup(format!(
                "pre-tokenizer `{other}` is not supported; use the model's folder with tokenizer.json"
            )));
        }
    };
    let has_words = (steps.iter()).any(|step| matches!(step, PreTokenizerWrapper::ByteLevel(_)));
    let bytes = (!has_words).then(|| byte_level(false));
    let composed = matches!(
        name,
        "qwen2"
            | "qwen35"
            | "deepseek-r1-qwen"
            | "f2llmv2"
            | "stablelm2"
            | "mpt"
            | "olmo"
            | "command-r"
    );
    let as_llama3 = matches!(
        name,
        "llama-bpe"
            | "llama3"
            | "llama-v3"
            | "falcon3"
            | "falcon-h1"
            | "pixtral"
            | "midm-2.0"
            | "lfm2"
            | "tekken"
    );
    Ok(Named {
        normalizer: composed.then(|| NFC.into()),
        splitter: Sequence::new(steps.into_iter().chain(bytes).collect()).into(),
        ignore_merges: as_llama3 || name == "minicpm5",
        add_bos: as_llama3,
    })
}

/// The name of the pre-tokenizer that all models of `architecture` have, if there is one: for files that do not name it,
/// as none did before April 2024. A Llama may be a Llama 3, a SmolLM or a DeepSeek-Coder.
pub(super) fn of_architecture(architecture: &str) -> Option<&'static str> {
    match architecture {
        "qwen2" | "qwen2moe" | "qwen2vl" | "qwen3" | "qwen3moe" | "qwen3vl" | "qwen3vlmoe"
        | "qwen3next" => Some("qwen2"),
        "qwen35" | "qwen35moe" => Some("qwen35"),
        "starcoder2" => Some("starcoder"),
        "command-r" | "cohere2" => Some("command-r"),
        "gpt-oss" => Some("gpt-4o"),
        _ => None,
    }
}

/// GPT-2's words, byte by byte.
fn words() -> PreTokenizerWrapper {
    byte_level(true)
}

fn byte_level(use_regex: bool) -> PreTokenizerWrapper {
    let (add_prefix_space, trim_offsets) = (false, true);
    ByteLevel::new(add_prefix_space, trim_offsets, use_regex).into()
}

/// Splits that follow each other: each match is a word.
fn split(patterns: &[&str]) -> Result<Vec<PreTokenizerWrapper>> {
    let split = |pattern: &&str| {
        let pattern = SplitPattern::Regex((*pattern).into());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        Ok(split.map_err(|e| Error::setup(e.to_string()))?.into())
    };
    patterns.iter().map(split).collect()
}

#[cfg(test)]
mod tests;
