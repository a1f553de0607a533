//! Prompts for what is missing in the middle of a text (Bavarian et al. 2022, arXiv 2207.14255).

use super::Text;
use crate::grammar::GrammarTokens;
use foretoken_core::error::Result;

/// The names of a family's tokens for infilling.
struct InfillFormat {
    before: &'static str,
    after: &'static str,
    /// The token that comes last; without it, the text after the gap comes first.
    middle: Option<&'static str>,
    /// The tokens that end the text in the gap, besides EOS.
    ends: &'static [&'static str],
}

const FORMATS: &[InfillFormat] = &[
    // Qwen2.5-Coder, CodeGemma.
    InfillFormat {
        before: "<|fim_prefix|>",
        after: "<|fim_suffix|>",
        middle: Some("<|fim_middle|>"),
        ends: &[
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|file_separator|>",
        ],
    },
    // StarCoder, Granite, Stable Code.
    InfillFormat {
        before: "<fim_prefix>",
        after: "<fim_suffix>",
        middle: Some("<fim_middle>"),
        ends: &["<fim_pad>", "<file_sep>"],
    },
    // SantaCoder.
    InfillFormat {
        before: "<fim-prefix>",
        after: "<fim-suffix>",
        middle: Some("<fim-middle>"),
        ends: &["<fim-pad>"],
    },
    // CodeLlama.
    InfillFormat {
        before: "▁<PRE>",
        after: "▁<SUF>",
        middle: Some("▁<MID>"),
        ends: &["▁<EOT>"],
    },
    // DeepSeek-Coder.
    InfillFormat {
        before: "<｜fim▁begin｜>",
        after: "<｜fim▁hole｜>",
        middle: Some("<｜fim▁end｜>"),
        ends: &[],
    },
    // Codestral.
    InfillFormat {
        before: "[PREFIX]",
        after: "[SUFFIX]",
        middle: None,
        ends: &[],
    },
];

impl Text {
    /// The tokens of a prompt for the text between `before` and `after`, with BOS if the tokenizer adds it;
    /// `None` if the model has no tokens for that.
    ///
    /// # Errors
    /// `Internal`, if the tokenizer fails.
    pub fn infill(
        &self,
        before: &str,
        after: &str,
        add_special_tokens: bool,
    ) -> Result<Option<Vec<u32>>> {
        let Some(format) = self.infill_format() else {
            return Ok(None);
        };
        let mut ids = if add_special_tokens {
            self.encode("", true)?
        } else {
            Vec::new()
        };
        ids.retain(|&id| Some(id) == self.special.bos);
        let marker = |name: &str| self.added_id(name);
        let with_before = |ids: &mut Vec<u32>| -> Result<()> {
            ids.extend(marker(format.before));
            ids.extend(self.encode(before, false)?);
            Ok(())
        };
        // The text goes on there, so nothing is put in front of it.
        let with_after = |ids: &mut Vec<u32>| {
            ids.extend(marker(format.after));
            ids.extend(self.encode_part(after));
        };
        match format.middle {
            Some(middle) => {
                with_before(&mut ids)?;
                with_after(&mut ids);
                ids.extend(marker(middle));
            }
            None => {
                with_after(&mut ids);
                with_before(&mut ids)?;
            }
        }
        Ok(Some(ids))
    }

    /// Whether the model has tokens for [`Text::infill`].
    pub fn can_infill(&self) -> bool {
        self.infill_format().is_some()
    }

    /// The ids, besides EOS, that end what a model writes for [`Text::infill`].
    pub fn infill_ends(&self) -> Vec<u32> {
        let ends = self.infill_format().map_or(&[][..], |format| format.ends);
        ends.iter().filter_map(|name| self.added_id(name)).collect()
    }

    fn infill_format(&self) -> Option<&'static InfillFormat> {
        let has = |name: &str| self.added_id(name).is_some();
        let has_all = |format: &&InfillFormat| {
            has(format.before) && has(format.after) && format.middle.is_none_or(has)
        };
        FORMATS.iter().find(has_all)
    }

    /// The id of `name`, if it is a token that was added to the vocabulary.
    fn added_id(&self, name: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(name)?;
        let added = self.tokenizer.get_added_vocabulary();
        added.get_vocab().contains_key(name).then_some(id)
    }
}
