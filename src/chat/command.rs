//! The lines of a chat: questions, and commands that begin with a slash.

/// The commands, for people.
pub const HELP: &str = "\
/set parameter NAME VALUE   sets temperature, max_tokens, top_p, top_k, min_p, seed, stop, ...
/set system TEXT            sets the message before the conversation
/show                       shows the model, the system message and the parameters
/clear                      forgets the conversation
/exit, /bye                 ends the chat, as Ctrl-D does
/help                       says this
Ctrl-C                      stops an answer; what came of it stays in the conversation
";

/// The action that a line asks for.
#[derive(Debug, PartialEq)]
pub enum Action<'a> {
    Ask(&'a str),
    Clear,
    Help,
    Exit,
    /// A parameter's name and its value.
    Parameter(&'a str, &'a str),
    System(&'a str),
    Show,
    /// A command that lacks something, and how it is written.
    Wrong(&'static str),
    Unknown(&'a str),
    Nothing,
}

impl<'a> Action<'a> {
    pub fn of(line: &'a str) -> Self {
        let line = line.trim();
        match line {
            "" => Self::Nothing,
            "/clear" => Self::Clear,
            "/help" | "/?" => Self::Help,
            "/exit" | "/bye" | "/quit" => Self::Exit,
            "/show" => Self::Show,
            _ => match words(line) {
                ("/set", rest) => Self::set(rest),
                // Ollama shows each of them alone; all of it is short.
                ("/show", "info" | "parameters" | "system") => Self::Show,
                ("/show", _) => Self::Wrong("/show"),
                // A path, for example, is no command.
                _ if is_command(line) => Self::Unknown(line),
                _ => Self::Ask(line),
            },
        }
    }

    /// What `/set` sets.
    fn set(rest: &'a str) -> Self {
        match words(rest) {
            ("parameter", pair) => match words(pair) {
                ("", _) | (_, "") => Self::Wrong("/set parameter NAME VALUE"),
                (name, value) => Self::Parameter(name, unquoted(value)),
            },
            ("system", text) => Self::System(unquoted(text)),
            _ => Self::Wrong("/set parameter NAME VALUE, or /set system TEXT"),
        }
    }
}

/// The first word and the rest.
fn words(line: &str) -> (&str, &str) {
    let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    (first, rest.trim())
}

/// The text without the quotes around it.
fn unquoted(text: &str) -> &str {
    let within = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'));
    within.unwrap_or(text)
}

fn is_command(line: &str) -> bool {
    let name = line.strip_prefix('/');
    name.is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_and_a_word_are_a_command() {
        assert_eq!(Action::of(" /bye\n"), Action::Exit);
        assert_eq!(Action::of("/clear"), Action::Clear);
        assert_eq!(Action::of("/load"), Action::Unknown("/load"));
        assert_eq!(Action::of("  \n"), Action::Nothing);
        for question in [
            "hi",
            "/etc/hosts: what is it?",
            "/help me",
            "a /bye",
            "/settings?",
        ] {
            assert_eq!(Action::of(question), Action::Ask(question));
        }
    }

    #[test]
    fn settings_are_those_of_ollama() {
        let parameter = Action::Parameter("temperature", "0.2");
        assert_eq!(Action::of("/set parameter temperature 0.2"), parameter);
        assert_eq!(
            Action::of("/set  parameter\ttemperature  0.2 \n"),
            parameter
        );
        let stop = Action::Parameter("stop", "the end");
        assert_eq!(Action::of("/set parameter stop \"the end\""), stop);
        assert_eq!(
            Action::of("/set system Be brief."),
            Action::System("Be brief.")
        );
        assert_eq!(Action::of("/set system \"\""), Action::System(""));
        assert_eq!(Action::of("/set system \""), Action::System("\""));
        for show in ["/show", "/show parameters", "/show system"] {
            assert_eq!(Action::of(show), Action::Show);
        }
        for wrong in [
            "/set",
            "/set parameter",
            "/set parameter seed",
            "/set verbose",
            "/show me",
        ] {
            assert!(matches!(Action::of(wrong), Action::Wrong(_)), "{wrong}");
        }
    }
}
