//! What is generated from the flags: completions for shells, and manual pages.

use super::flags::Cli;
use crate::error::{Error, Result, clipped};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

/// The script with which `shell` completes subcommands, flags and values.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "foretoken", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The manual page of the program, or of the subcommand `name`, in roff.
///
/// # Errors
/// `Setup`, if there is no such subcommand.
pub fn manual(name: Option<&str>) -> Result<String> {
    let mut whole = Cli::command();
    // Subcommands then know how they are called.
    whole.build();
    let command = match name {
        None => whole,
        Some(name) => match whole.find_subcommand(name) {
            Some(command) => command.clone(),
            None => {
                let known = whole.get_subcommands().map(clap::Command::get_name);
                let known = known.collect::<Vec<_>>().join(", ");
                return Err(Error::setup(format!(
                    "there is no command {}: there are {known}",
                    clipped(name)
                )));
            }
        },
    };
    let mut page = Vec::new();
    // Subcommands have no version.
    let page_of = Man::new(command).source(concat!("foretoken ", env!("CARGO_PKG_VERSION")));
    let rendered = page_of.render(&mut page);
    rendered.map_err(|e| Error::internal(format!("the manual page: {e}")))?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_complete_all_commands_and_flags() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            for word in ["chat", "router", "draft-model", "max-num-seqs"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn each_command_has_a_manual_page() {
        let page = manual(None).unwrap();
        assert!(page.contains(".TH foretoken 1"), "{page}");
        assert!(page.contains("max\\-num\\-seqs"), "{page}");
        let page = manual(Some("chat")).unwrap();
        assert!(
            page.contains("foretoken\\-chat") && page.contains("system"),
            "{page}"
        );
        let error = manual(Some("chta")).unwrap_err().to_string();
        assert!(
            error.contains("there is no command chta: there are serve,"),
            "{error}"
        );
    }
}
