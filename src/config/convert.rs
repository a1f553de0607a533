//! The flags of `foretoken convert`.

use crate::convert;
use candle_core::quantized::GgmlDType;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// The flags of `foretoken convert`.
#[derive(Debug, Clone, Args)]
pub struct ConvertFlags {
    /// Model: a Hugging Face id, or a folder with config.json, safetensors and tokenizer.json.
    #[arg(long)]
    pub model: String,
    /// Branch, tag or commit of a Hugging Face model.
    #[arg(long)]
    pub revision: Option<String>,
    /// GGUF file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Type of the matrices.
    #[arg(long = "type", value_enum, value_name = "TYPE", default_value_t)]
    pub kind: GgufType,
}

/// Types that a GGUF file may keep matrices in.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GgufType {
    F32,
    F16,
    Bf16,
    #[default]
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q4_1")]
    Q4_1,
    #[value(name = "q5_0")]
    Q5_0,
    #[value(name = "q5_1")]
    Q5_1,
    #[value(name = "q4_k")]
    Q4K,
    #[value(name = "q5_k")]
    Q5K,
    #[value(name = "q6_k")]
    Q6K,
}

impl From<ConvertFlags> for convert::Options {
    fn from(flags: ConvertFlags) -> Self {
        Self {
            model: flags.model,
            revision: flags.revision,
            out: flags.out,
            kind: match flags.kind {
                GgufType::F32 => GgmlDType::F32,
                GgufType::F16 => GgmlDType::F16,
                GgufType::Bf16 => GgmlDType::BF16,
                GgufType::Q8_0 => GgmlDType::Q8_0,
                GgufType::Q4_0 => GgmlDType::Q4_0,
                GgufType::Q4_1 => GgmlDType::Q4_1,
                GgufType::Q5_0 => GgmlDType::Q5_0,
                GgufType::Q5_1 => GgmlDType::Q5_1,
                GgufType::Q4K => GgmlDType::Q4K,
                GgufType::Q5K => GgmlDType::Q5K,
                GgufType::Q6K => GgmlDType::Q6K,
            },
        }
    }
}
