//! Separates what a model thinks from what it answers.

use super::part::{Part, push_reasoning, until_marker};
use crate::named_formats::named_formats;

/// How a model marks what it thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>...</think>`. A text begins with reasoning, whether `<think>` was in the prompt, is in the text, or is
    /// missing, unless the prompt ends with `</think>`.
    DeepseekR1,
    /// `<think>...</think>`. A text begins with reasoning only after a `<think>`, in the prompt or the text.
    Qwen3,
    /// `<seed:think>...</seed:think>`, as Seed-OSS.
    SeedOss,
    /// `<|START_THINKING|>...<|END_THINKING|>`, as Cohere's Command A and R7B.
    Command,
    /// `[THINK]...[/THINK]`, as Magistral.
    Mistral,
    /// `<|channel>thought ... <channel|>`, as Gemma 4.
    Gemma4,
    /// `◁think▷...◁/think▷`, as Kimi's vision models.
    Kimi,
    /// `<thought>...</thought>`, as EXAONE Deep.
    Exaone,
    /// `<|inner_prefix|>...<|inner_suffix|>`, as Apertus.
    Apertus,
    /// `Here is my thought process: ... Here is my response:`, as Granite 3.
    Granite,
    /// `<think>...</think>` and `<answer>...</answer>`, as Hunyuan.
    Hunyuan,
    /// `<think>...</think>` and `<response>...</response>`, as ERNIE 4.5.
    Ernie45,
    /// Messages in channels, as gpt-oss: calls, too.
    Harmony,
}

/// How a format marks reasoning.
#[derive(Debug)]
struct Marks {
    /// The format.
    format: ReasoningFormat,
    /// The name on the command line, and further ones.
    name: &'static str,
    #[cfg_attr(
        not(feature = "clap"),
        expect(dead_code, reason = "for the command line")
    )]
    aliases: &'static [&'static str],
    /// A line of help.
    #[cfg_attr(
        not(feature = "clap"),
        expect(dead_code, reason = "for the command line")
    )]
    help: &'static str,
    /// The texts that begin and end reasoning; the first of each is written.
    begin: &'static [&'static str],
    end: &'static [&'static str],
    /// Whether a text begins with reasoning without saying so, unless the prompt ends it.
    is_implicit: bool,
    /// The texts around the answer, which are dropped.
    answer: Option<[&'static str; 2]>,
    /// All of them.
    markers: &'static [&'static str],
}

const THINK: Marks = Marks {
    format: ReasoningFormat::Qwen3,
    name: "",
    aliases: &[],
    help: "",
    begin: &["<think>"],
    end: &["</think>"],
    is_implicit: false,
    answer: None,
    markers: &["<think>", "</think>"],
};

/// All formats, in the order of [`ReasoningFormat`].
static FORMATS: [Marks; ReasoningFormat::COUNT] = [
    Marks {
        format: ReasoningFormat::DeepseekR1,
        name: "deepseek_r1",
        aliases: &["minimax_m2", "step3", "nemotron_v3"],
        help: "<think>...</think>; <think> may be missing",
        is_implicit: true,
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Qwen3,
        name: "qwen3",
        aliases: &["glm45", "glm47", "deepseek_v3", "kimi_k2", "olmo3", "mimo"],
        help: "<think>...</think>",
        ..THINK
    },
    Marks {
        format: ReasoningFormat::SeedOss,
        name: "seed_oss",
        help: "<seed:think>...</seed:think>, as Seed-OSS",
        begin: &["<seed:think>"],
        end: &["</seed:think>"],
        markers: &["<seed:think>", "</seed:think>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Command,
        name: "cohere_command3",
        help: "<|START_THINKING|>...<|END_THINKING|>, as Command A and R7B",
        begin: &["<|START_THINKING|>"],
        end: &["<|END_THINKING|>"],
        markers: &["<|START_THINKING|>", "<|END_THINKING|>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Mistral,
        name: "mistral",
        help: "[THINK]...[/THINK], as Magistral",
        begin: &["[THINK]"],
        end: &["[/THINK]"],
        markers: &["[THINK]", "[/THINK]"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Gemma4,
        name: "gemma4",
        help: "<|channel>thought ... <channel|>, as Gemma 4",
        begin: &["<|channel>thought"],
        end: &["<channel|>"],
        markers: &["<|channel>", "<channel|>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Kimi,
        name: "kimi",
        help: "◁think▷...◁/think▷, as Kimi-VL",
        begin: &["◁think▷"],
        end: &["◁/think▷"],
        markers: &["◁think▷", "◁/think▷"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Exaone,
        name: "exaone",
        help: "<thought>...</thought>, as EXAONE Deep",
        begin: &["<thought>"],
        end: &["</thought>"],
        markers: &["<thought>", "</thought>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Apertus,
        name: "apertus",
        help: "<|inner_prefix|>...<|inner_suffix|>, as Apertus",
        begin: &["<|inner_prefix|>"],
        end: &["<|inner_suffix|>"],
        markers: &["<|inner_prefix|>", "<|inner_suffix|>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Granite,
        name: "granite",
        help: "Here is my thought process: ... Here is my response: as Granite 3",
        begin: &["Here is my thought process:", "Here's my thought process:"],
        end: &["Here is my response:", "Here's my response:"],
        markers: &[],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Hunyuan,
        name: "hunyuan_a13b",
        help: "<think>...</think><answer>...</answer>, as Hunyuan",
        answer: Some(["<answer>", "</answer>"]),
        markers: &["<think>", "</think>", "<answer>", "</answer>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Ernie45,
        name: "ernie45",
        help: "<think>...</think><response>...</response>, as ERNIE 4.5",
        answer: Some(["<response>", "</response>"]),
        markers: &["<think>", "</think>", "<response>", "</response>"],
        ..THINK
    },
    Marks {
        format: ReasoningFormat::Harmony,
        name: "openai_gptoss",
        help: "Messages in channels, as gpt-oss: calls, too",
        begin: &[],
        end: &[],
        markers: &[],
        ..THINK
    },
];

impl ReasoningFormat {
    fn marks(self) -> &'static Marks {
        &FORMATS[self as usize]
    }

    /// The texts that have a meaning, but for Harmony. Those that are special tokens must be part of the text that
    /// a [`ReasoningParser`] reads.
    pub fn markers(self) -> &'static [&'static str] {
        self.marks().markers
    }

    /// The texts of which any begins, and those of which any ends reasoning. The first of each is written. There are
    /// none for Harmony, where messages end.
    pub fn marks_of_thoughts(self) -> (&'static [&'static str], &'static [&'static str]) {
        (self.marks().begin, self.marks().end)
    }

    /// Whether the answer to `prompt` begins with reasoning even if it does not say so.
    pub fn begins_with_reasoning(self, prompt: &str) -> bool {
        let (prompt, marks) = (prompt.trim_end(), self.marks());
        let ends_with = |texts: &[&str]| texts.iter().any(|text| prompt.ends_with(text));
        if marks.is_implicit {
            !ends_with(marks.end)
        } else {
            ends_with(marks.begin)
        }
    }

    /// The format whose marks a chat template has, of which `<think>` is the most common; `None` if it has none.
    /// Harmony has other ones.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        let is_marked = |marks: &&Marks| {
            let ends = marks.begin.iter().chain(marks.end);
            let answer = marks
                .answer
                .is_none_or(|answer| answer.into_iter().all(has));
            ends.copied().any(has) && answer
        };
        let found = FORMATS.iter().rev().find(is_marked);
        found.map(|marks| marks.format)
    }
}

named_formats!(
    /// All formats.
    ReasoningFormat, 13 from Qwen3 by marks
);

/// Whether a message that begins with `text` goes on with reasoning, in any format.
pub(super) fn ends_in_thought(text: &str) -> bool {
    let text = text.trim_start();
    let is_open = |marks: &Marks| {
        let has_begun = marks.begin.iter().any(|begin| text.starts_with(begin));
        has_begun && !marks.end.iter().any(|end| text.contains(end))
    };
    FORMATS.iter().any(is_open)
}

/// Splits a model's text into reasoning and the rest, however it is cut into pieces. Space around the
/// reasoning is dropped.
#[derive(Debug)]
pub struct ReasoningParser {
    marks: &'static Marks,
    state: ReasoningState,
    /// Text that is not certain yet: part of a marker, or space.
    held: String,
}

#[derive(Debug)]
enum ReasoningState {
    /// Before anything but space. `reasons`: what is not marked is reasoning.
    Start {
        reasons: bool,
    },
    /// `blank`: nothing but space so far.
    Reasoning {
        blank: bool,
    },
    /// After the reasoning, before anything but space.
    Answer,
    /// In the answer between marks. `blank`: nothing but space so far.
    Marked {
        end: &'static str,
        blank: bool,
    },
    Content,
}

impl ReasoningParser {
    /// `reasons`: see [`ReasoningFormat::begins_with_reasoning`].
    pub fn new(format: ReasoningFormat, reasons: bool) -> Self {
        Self {
            marks: format.marks(),
            state: ReasoningState::Start { reasons },
            held: String::new(),
        }
    }

    /// Reads a text that goes on with what the model thinks.
    pub fn within_reasoning(format: ReasoningFormat) -> Self {
        Self {
            marks: format.marks(),
            state: ReasoningState::Reasoning { blank: false },
            held: String::new(),
        }
    }

    /// Adds text. Appends reasoning that is certain to `parts`, and returns the content that is.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) -> String {
        if matches!(self.state, ReasoningState::Content) {
            return text.to_owned();
        }
        self.held.push_str(text);
        if let ReasoningState::Start { reasons } = self.state {
            let text = self.held.trim_start();
            let begin = self.marks.begin;
            if let Some(rest) = begin.iter().find_map(|begin| text.strip_prefix(begin)) {
                self.held = rest.to_owned();
                self.state = ReasoningState::Reasoning { blank: true };
            } else if begin.iter().any(|begin| begin.starts_with(text)) {
                return String::new();
            } else if reasons {
                self.held = text.to_owned();
                self.state = ReasoningState::Reasoning { blank: true };
            } else {
                // The prompt may have ended the reasoning.
                let answer = self.marks.answer.map(|[begin, _]| begin);
                if answer.is_some_and(|begin| begin.len() > text.len() && begin.starts_with(text)) {
                    return String::new();
                }
                if !answer.is_some_and(|begin| text.starts_with(begin)) {
                    self.state = ReasoningState::Content;
                    return std::mem::take(&mut self.held);
                }
                self.state = ReasoningState::Answer;
            }
        }
        if let ReasoningState::Reasoning { blank } = self.state {
            self.reasoning(blank, parts);
        }
        if matches!(self.state, ReasoningState::Reasoning { .. }) {
            return String::new();
        }
        let mut content = String::new();
        loop {
            self.answer();
            match self.state {
                ReasoningState::Marked { end, blank } => {
                    if !self.marked(end, blank, &mut content) {
                        return content;
                    }
                }
                ReasoningState::Content => return content + &std::mem::take(&mut self.held),
                _ => return content,
            }
        }
    }

    /// Whether what comes next is reasoning, or ends it.
    pub fn is_reasoning(&self) -> bool {
        matches!(
            self.state,
            ReasoningState::Start { reasons: true } | ReasoningState::Reasoning { .. }
        )
    }

    /// Ends the text; as [`ReasoningParser::push`].
    pub fn finish(&mut self, parts: &mut Vec<Part>) -> String {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            ReasoningState::Start { reasons: true } | ReasoningState::Reasoning { blank: true } => {
                push_reasoning(parts, rest.trim());
                String::new()
            }
            ReasoningState::Reasoning { blank: false } => {
                push_reasoning(parts, rest.trim_end());
                String::new()
            }
            _ => rest,
        }
    }

    fn reasoning(&mut self, blank: bool, parts: &mut Vec<Part>) {
        if blank {
            self.held = self.held.trim_start().to_owned();
        }
        let (end, marker) = until_marker(&self.held, self.marks.end);
        let shown = self.held[..end].trim_end();
        push_reasoning(parts, shown);
        let blank = blank && shown.is_empty();
        let (read, state) = match marker {
            Some(marker) => (end + marker.len(), ReasoningState::Answer),
            None => (shown.len(), ReasoningState::Reasoning { blank }),
        };
        self.held.drain(..read);
        self.state = state;
    }

    /// Drops what stands before an answer.
    fn answer(&mut self) {
        if !matches!(self.state, ReasoningState::Answer) {
            return;
        }
        let text = self.held.trim_start();
        let (rest, state) = match self.marks.answer {
            _ if text.is_empty() => ("", ReasoningState::Answer),
            Some([begin, end]) if text.starts_with(begin) => (
                &text[begin.len()..],
                ReasoningState::Marked { end, blank: true },
            ),
            Some([begin, _]) if begin.starts_with(text) => (text, ReasoningState::Answer),
            _ => (text, ReasoningState::Content),
        };
        self.held = rest.to_owned();
        self.state = state;
    }

    /// Adds the certain text of an answer that ends before `end`, without space around it, to `content`. Returns whether
    /// it has ended.
    fn marked(&mut self, end: &'static str, blank: bool, content: &mut String) -> bool {
        if blank {
            self.held = self.held.trim_start().to_owned();
        }
        let (certain, found) = until_marker(&self.held, &[end]);
        let shown = self.held[..certain].trim_end();
        content.push_str(shown);
        let blank = blank && shown.is_empty();
        let (read, state) = match found {
            Some(_) => (certain + end.len(), ReasoningState::Answer),
            None => (shown.len(), ReasoningState::Marked { end, blank }),
        };
        self.held.drain(..read);
        self.state = state;
        found.is_some()
    }
}

#[cfg(test)]
mod tests;
