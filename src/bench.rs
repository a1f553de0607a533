//! stub
use std::path::PathBuf;
/// x
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub prompts: PromptSource,
    pub limit_per_category: Option<usize>,
    pub max_tokens: usize,
    pub temperatures: Vec<f32>,
    pub repeat: usize,
    pub json: Option<PathBuf>,
}
/// x
#[derive(Debug, Clone, PartialEq)]
pub enum PromptSource {
    File(PathBuf),
    Random {
        count: usize,
        tokens: usize,
        seed: u64,
    },
}
