//! The bytes of the demonstration pair, GGUF files, as a part of a program.

/// The target model, `foretoken-demo`.
pub static TARGET: &[u8] = include_bytes!("foretoken-demo.Q5_1.gguf");

/// The draft model, `foretoken-demo-draft`.
pub static DRAFT: &[u8] = include_bytes!("foretoken-demo-draft.Q8_0.gguf");
