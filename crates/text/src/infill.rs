//! Prompts for what is missing in the middle of a text (Bavarian et al. 2022, arXiv 2207.14255).

use super::Text;
use crate::grammar::GrammarTokens;
use foretoken_core::error::Result;

/// The names of a family's tokens for infilling.
struct InfillFormat {
    before: &'static str,
    after: &'static str,
    /// The token that comes last, if there is one.
    middle: Option<&'static str>,
    /// Whether the text after the gap comes first.
    is_suffix_first: bool,
    /// The tokens that end the text in the gap, besides EOS.
    ends: &'static [&'static str],
    /// The token before the name of a repository.
    repository: Option<&'static str>,
    /// The token before the name of each file.
    file: Option<&'static str>,
}

/// What an infilled text stands between, and what else the model may know.
#[derive(Debug, Default, Clone, Copy)]
pub struct InfillText<'a> {
    /// The text before the gap.
    pub before: &'a str,
    /// The text after the gap.
    pub after: &'a str,
    /// The names and texts of other files, the least important one first.
    pub files: &'a [(&'a str, &'a str)],
}

/// A prompt for infilling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InfillPrompt {
    /// The token ids.
    pub ids: Vec<u32>,
    /// Whether a part was left out for want of room.
    pub truncated: bool,
}

/// What files of a repository have before them; models know no other name.
const REPOSITORY: &str = "repository\n";
/// The name of the file with the gap.
const FILE: &str = "filename\n";

const FORMATS: &[InfillFormat] = &[
    // Qwen2.5-Coder, CodeGemma.
    InfillFormat {
        before: "<|fim_prefix|>",
        after: "<|fim_suffix|>",
        middle: Some("<|fim_middle|>"),
        is_suffix_first: false,
        ends: &[
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|file_separator|>",
        ],
        repository: Some("<|repo_name|>"),
        file: Some("<|file_sep|>"),
    },
    // StarCoder, Granite, Stable Code.
    InfillFormat {
        before: "<fim_prefix>",
        after: "<fim_suffix>",
        middle: Some("<fim_middle>"),
        is_suffix_first: false,
        ends: &["<fim_pad>", "<file_sep>"],
        repository: Some("<repo_name>"),
        file: Some("<file_sep>"),
    },
    // SantaCoder.
    InfillFormat {
        before: "<fim-prefix>",
        after: "<fim-suffix>",
        middle: Some("<fim-middle>"),
        is_suffix_first: false,
        ends: &["<fim-pad>"],
        repository: None,
        file: None,
    },
    // CodeLlama.
    InfillFormat {
        before: "▁<PRE>",
        after: "▁<SUF>",
        middle: Some("▁<MID>"),
        is_suffix_first: false,
        ends: &["▁<EOT>"],
        repository: None,
        file: None,
    },
    // DeepSeek-Coder.
    InfillFormat {
        before: "<｜fim▁begin｜>",
        after: "<｜fim▁hole｜>",
        middle: Some("<｜fim▁end｜>"),
        is_suffix_first: false,
        ends: &[],
        repository: None,
        file: None,
    },
    // Seed-Coder.
    InfillFormat {
        before: "<[fim-prefix]>",
        after: "<[fim-suffix]>",
        middle: Some("<[fim-middle]>"),
        is_suffix_first: true,
        ends: &[],
        repository: None,
        file: None,
    },
    // Codestral.
    InfillFormat {
        before: "[PREFIX]",
        after: "[SUFFIX]",
        middle: None,
        is_suffix_first: true,
        ends: &[],
        repository: None,
        file: None,
    },
];

/// What all names of Mellum have in common. Mellum 2 has other names.
const MELLUM_NAME: &str = "mellum-4b";
/// Mellum, which has StarCoder's tokens, but was trained with the text after the gap first.
const MELLUM: InfillFormat = InfillFormat {
    before: "<fim_prefix>",
    after: "<fim_suffix>",
    middle: Some("<fim_middle>"),
    is_suffix_first: true,
    ends: &["<fim_pad>", "<filename>"],
    repository: None,
    file: Some("<filename>"),
};

impl Text {
    /// The tokens of a prompt for what is missing in `text`, with BOS if the tokenizer adds it; `None` if the model has no
    /// tokens for that. A prompt has at most `room` tokens: what is far from the gap is left out, first of all the files.
    ///
    /// # Errors
    /// `Invalid` or `Internal`, if the tokenizer fails.
    pub fn infill(
        &self,
        text: InfillText<'_>,
        add_special_tokens: bool,
        room: Option<usize>,
    ) -> Result<Option<InfillPrompt>> {
        let Some(format) = self.infill_format() else {
            return Ok(None);
        };
        let mut ids = if add_special_tokens {
            self.encode("", true)?
        } else {
            Vec::new()
        };
        ids.retain(|&id| Some(id) == self.special.bos);
        let mut files = self.infill_files(format, text.files)?;
        let mut before = self.encode(text.before, false)?;
        // The text goes on there, so nothing is put in front of it.
        let mut after = self.encode_part(text.after);
        let mut truncated = false;
        if let Some(room) = room {
            let room = room.saturating_sub(ids.len() + 3);
            // The text before the gap tells more of it.
            let after_room = room.saturating_sub(before.len()).max(room / 4);
            truncated |= after.len() > after_room;
            after.truncate(after_room);
            truncated |= keep_last(&mut before, room - after.len());
            truncated |= keep_last(&mut files, room - after.len() - before.len());
        }
        ids.extend(files);
        let marker = |name: &str| self.added_id(name);
        let before = marker(format.before).into_iter().chain(before);
        let after = marker(format.after).into_iter().chain(after);
        if format.is_suffix_first {
            ids.extend(after.chain(before));
        } else {
            ids.extend(before.chain(after));
        }
        ids.extend(format.middle.and_then(marker));
        Ok(Some(InfillPrompt { ids, truncated }))
    }

    /// The tokens of other files, and the name of the one with the gap. Without tokens for files, their names are lines.
    fn infill_files(&self, format: &InfillFormat, files: &[(&str, &str)]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if files.is_empty() {
            return Ok(ids);
        }
        let marker = |name: &str| self.added_id(name);
        if let Some(repository) = format.repository.and_then(marker) {
            ids.push(repository);
            ids.extend(self.encode(REPOSITORY, false)?);
        }
        let separator = format.file.and_then(marker);
        for (name, text) in files {
            match separator {
                Some(separator) => {
                    ids.push(separator);
                    ids.extend(self.encode(&format!("{name}\n{text}\n"), false)?);
                }
                None => ids.extend(self.encode(&format!("\n--- {name} ---\n{text}\n"), false)?),
            }
        }
        if let Some(separator) = separator {
            ids.push(separator);
            ids.extend(self.encode(FILE, false)?);
        }
        Ok(ids)
    }

    /// Lets [`Text::infill`] take the form of the model of this name, where the tokenizer does not tell it.
    pub fn with_infill_of(self, name: &str) -> Self {
        let is_mellum = name.to_ascii_lowercase().contains(MELLUM_NAME);
        Self {
            is_mellum: self.is_mellum || is_mellum,
            ..self
        }
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
        let of_mellum = self.is_mellum.then_some(&MELLUM);
        of_mellum.into_iter().chain(FORMATS).find(has_all)
    }

    /// The id of `name`, if it is a token that was added to the vocabulary.
    fn added_id(&self, name: &str) -> Option<u32> {
        let id = self.tokenizer.token_to_id(name)?;
        let added = self.tokenizer.get_added_vocabulary();
        added.get_vocab().contains_key(name).then_some(id)
    }
}

/// Keeps the last `room` of `ids`; returns whether there were more.
fn keep_last(ids: &mut Vec<u32>, room: usize) -> bool {
    let over = ids.len().saturating_sub(room);
    ids.drain(..over);
    over > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpecialIds;
    use crate::tests::{byte_level, tokenizer};

    /// A tokenizer of bytes with these special tokens.
    fn text(names: &[&str]) -> Text {
        let file = byte_level(names.iter().copied(), |_| Some([true, false]));
        Text::new(tokenizer(&file), SpecialIds::default(), None).expect("byte-level")
    }

    fn prompt(text: &Text, of: InfillText<'_>, room: Option<usize>) -> (String, bool) {
        let prompt = text
            .infill(of, true, room)
            .expect("encodes")
            .expect("fills in");
        assert!(room.is_none_or(|room| prompt.ids.len() <= room.max(3)));
        (text.decode(&prompt.ids, false), prompt.truncated)
    }

    const QWEN: [&str; 5] = [
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ];

    #[test]
    fn other_files_come_first_in_the_form_of_the_model() {
        let of = InfillText {
            before: "ab",
            after: "yz",
            files: &[("one", "x"), ("two", "y")],
        };
        let (qwen, truncated) = prompt(&text(&QWEN), of, None);
        let expected = "<|repo_name|>repository\n<|file_sep|>one\nx\n<|file_sep|>two\ny\n<|file_sep|>filename\n<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>";
        assert_eq!((qwen.as_str(), truncated), (expected, false));
        let (plain, _) = prompt(&text(&QWEN[..3]), of, None);
        let expected =
            "\n--- one ---\nx\n\n--- two ---\ny\n<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>";
        assert_eq!(plain, expected);
        let of = InfillText { files: &[], ..of };
        let (codestral, _) = prompt(&text(&["[PREFIX]", "[SUFFIX]"]), of, None);
        assert_eq!(codestral, "[SUFFIX]yz[PREFIX]ab");
        let names = ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"];
        let (seed, _) = prompt(&text(&names), of, None);
        assert_eq!(seed, "<[fim-suffix]>yz<[fim-prefix]>ab<[fim-middle]>");
        assert_eq!(text(&[]).infill(of, true, None).expect("fine"), None);
    }

    /// Its tokens are those of StarCoder.
    #[test]
    fn mellum_reads_the_text_after_the_gap_first() {
        let names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<filename>"];
        let of = InfillText {
            before: "ab",
            after: "yz",
            files: &[("one", "x")],
        };
        let mellum = text(&names).with_infill_of("JetBrains/Mellum-4b-base");
        let (found, _) = prompt(&mellum, of, None);
        let expected =
            "<filename>one\nx\n<filename>filename\n<fim_suffix>yz<fim_prefix>ab<fim_middle>";
        assert_eq!(found, expected);
        assert_eq!(mellum.infill_ends(), [259]);
        let starcoder = text(&names).with_infill_of("bigcode/starcoder2-3b");
        let (starcoder, _) = prompt(&starcoder, InfillText { files: &[], ..of }, None);
        assert_eq!(starcoder, "<fim_prefix>ab<fim_suffix>yz<fim_middle>");
        // Without such tokens it is any other model.
        let other = text(&QWEN).with_infill_of("mellum-4b");
        let (found, _) = prompt(&other, InfillText { files: &[], ..of }, None);
        assert_eq!(found, "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>");
    }

    #[test]
    fn what_is_far_from_the_gap_is_left_out() {
        let text = text(&QWEN);
        let of = |before, after| InfillText {
            before,
            after,
            files: &[],
        };
        for (before, after, room, kept) in [
            ("abcd", "wxyz", 11, ["abcd", "wxyz"]),
            ("abcd", "wxyz", 10, ["abcd", "wxy"]),
            ("abcdefgh", "wxyz", 11, ["cdefgh", "wx"]),
            ("abcdefgh", "w", 11, ["bcdefgh", "w"]),
            ("abc", "", 3, ["", ""]),
        ] {
            let (found, truncated) = prompt(&text, of(before, after), Some(room));
            let [before_gap, after_gap] = kept;
            let expected =
                format!("<|fim_prefix|>{before_gap}<|fim_suffix|>{after_gap}<|fim_middle|>");
            assert_eq!(found, expected);
            assert_eq!(truncated, room < before.len() + after.len() + 3);
        }
        let of = InfillText {
            files: &[("a", "xyz")],
            ..of("b", "c")
        };
        let (found, truncated) = prompt(&text, of, Some(8));
        assert_eq!(found, "me\n<|fim_prefix|>b<|fim_suffix|>c<|fim_middle|>");
        assert!(truncated);
    }
}
