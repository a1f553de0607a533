//! The parts that a format of tool calls is described with.

use super::ToolFormat;

/// How a format writes calls. Parser, grammar, writer and recognizer read it.
#[derive(Debug)]
pub struct Syntax {
    /// The format.
    pub format: ToolFormat,
    /// The name on the command line.
    pub name: &'static str,
    /// Further names for it.
    #[cfg_attr(
        not(feature = "clap"),
        expect(dead_code, reason = "for the command line")
    )]
    pub aliases: &'static [&'static str],
    /// How the models write it, and which do: a line of help.
    #[cfg_attr(
        not(feature = "clap"),
        expect(dead_code, reason = "for the command line")
    )]
    pub help: &'static str,
    /// Whether a chat template that knows tools teaches it, if it teaches none of the formats before.
    pub is_taught: fn(&str) -> bool,
    /// The texts after which calls follow.
    pub begin: &'static [&'static str],
    /// The text after the calls, if there is one.
    pub end: &'static str,
    /// The text that begins a call, also where `begin` is left out; empty if there is none.
    pub call: &'static str,
    /// Characters that may stand around calls, besides space.
    pub around: &'static str,
    /// Texts after a call that mean nothing.
    pub skipped: &'static [&'static str],
    /// An answer that begins with this character may begin with a call.
    pub bare: Option<char>,
    /// Whether an answer that begins with the name of a tool, a line break and a brace is a call.
    pub is_named_first: bool,
    /// Whether a turn has one call.
    pub single: bool,
    /// Number of letters and digits of which templates expect that ids of calls consist, if they expect it.
    pub id_len: Option<usize>,
    /// The text that is written before calls, and after them.
    pub written: [&'static str; 2],
    /// Whether `written` stands around each call, not around all of them.
    pub each: bool,
    /// The text between calls.
    pub separator: &'static str,
    /// The call itself.
    pub body: Body,
    /// How the name is found in the text before arguments that follow it.
    pub head: Option<Head>,
    /// The texts that have a meaning and may be special tokens.
    pub markers: &'static [&'static str],
}

impl Syntax {
    /// A row with what most formats have in common.
    pub const COMMON: Self = Self {
        format: ToolFormat::Hermes,
        name: "",
        aliases: &[],
        help: "",
        is_taught: |_| false,
        begin: &[],
        end: "",
        call: "",
        around: "[,]",
        skipped: &[],
        bare: None,
        is_named_first: false,
        single: false,
        id_len: None,
        written: ["", ""],
        each: false,
        separator: ", ",
        body: Body::Object(Keys::COMMON),
        head: None,
        markers: &[],
    };
}

/// How a call is written.
#[derive(Debug)]
pub enum Body {
    /// A JSON object with the name and the arguments.
    Object(Keys),
    /// The name, and then the arguments as JSON.
    Named(Named),
    /// Tags around the name and each argument.
    Tags(Tags),
    /// A call in Python, with named arguments.
    Python,
    /// The name and arguments between braces, with this mark around texts.
    Braces(&'static str),
    /// Messages in channels, which have a parser and a grammar of their own.
    Harmony,
}

/// The keys of a call that is an object.
#[derive(Debug)]
pub struct Keys {
    /// The key of the call's number, which comes first, if there is one.
    pub number: Option<&'static str>,
    pub name: &'static str,
    pub arguments: &'static str,
}

impl Keys {
    /// The keys of most formats.
    pub const COMMON: Self = Self {
        number: None,
        name: "name",
        arguments: "arguments",
    };
}

/// The texts around a name and the arguments after it.
#[derive(Debug)]
pub struct Named {
    pub before: &'static str,
    /// Whether the name is followed by a colon and the call's number.
    pub numbered: bool,
    pub between: &'static str,
    pub after: &'static str,
}

impl Named {
    /// The texts around a name without a number.
    pub const fn new(before: &'static str, between: &'static str, after: &'static str) -> Self {
        Self {
            before,
            numbered: false,
            between,
            after,
        }
    }
}

/// How a name is found.
#[derive(Debug)]
pub struct Head {
    /// Texts that may stand before the name, in this order.
    pub before: &'static [&'static str],
    /// The name ends before any of these.
    pub ends: &'static [&'static str],
}

impl Head {
    /// A name after all of `before` and before any of `ends`.
    pub const fn new(before: &'static [&'static str], ends: &'static [&'static str]) -> Self {
        Self { before, ends }
    }

    /// The name in `head`, the text before the arguments.
    pub fn name<'h>(&self, head: &'h str) -> &'h str {
        let without =
            |text: &'h str, before: &&str| text.strip_prefix(before).unwrap_or(text).trim_start();
        let name = self.before.iter().fold(head.trim_start(), without);
        let ends = self.ends.iter().filter_map(|end| name.find(end));
        name[..ends.min().unwrap_or(name.len())].trim()
    }
}

/// The tags of calls whose arguments have tags.
#[derive(Debug)]
pub struct Tags {
    /// The text before the function's name.
    pub function: &'static str,
    /// The text after it; empty if the name ends with its line or before a tag.
    pub after_name: &'static str,
    pub end_function: &'static str,
    /// The texts around the name of a parameter.
    pub parameter: [&'static str; 2],
    /// The texts after the name of a parameter whose value is a text, and of one whose value is JSON, where the format
    /// tells them apart.
    pub typed: Option<[&'static str; 2]>,
    /// The text before a value, after the name; empty if it follows at once.
    pub value: &'static str,
    pub end_parameter: &'static str,
    /// Whether a value is on lines of its own.
    pub lines: bool,
    /// Further texts that end a value: models leave out ends. What follows then is on a line of its own.
    pub ends_of_values: &'static [&'static str],
}

impl Tags {
    /// The line break around a value.
    pub fn line(&self) -> &'static str {
        if self.lines { "\n" } else { "" }
    }

    /// The text between the name of a function and its parameters.
    pub fn before_parameters(&self) -> String {
        format!("{}\n", self.after_name)
    }

    /// The text before the value of the parameter `key`, which is a text or JSON.
    pub fn before_value(&self, key: &str, is_text: bool) -> String {
        let [before, after] = self.parameter;
        let after = self
            .typed
            .map_or(after, |[text, json]| if is_text { text } else { json });
        let line = if self.value.is_empty() { "" } else { "\n" };
        format!("{before}{key}{after}{line}{}{}", self.value, self.line())
    }
}
