//! Hints for somebody who knows the flags of vLLM, llama-server or ollama.

/// A line for each kind of flags of others, and what there is here instead.
const FOREIGN: &str = include_str!("hints.txt");

/// Returns what there is instead of the flag `name` of another server; `None` = no such flag is known.
pub fn instead_of(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches('-').replace('_', "-");
    let lines = FOREIGN.lines().filter(|line| !line.starts_with('#'));
    let mut known = lines.filter_map(|line| line.split_once(": "));
    let (_, hint) = known.find(|(names, _)| names.split(' ').any(|known| known == name))?;
    Some(hint)
}

/// The first argument that is another server's short flag of several letters, such as `-ngl`, and what there
/// is instead: our parser would read its letters one by one.
pub fn long_short_flag<'a>(
    mut args: impl Iterator<Item = &'a str>,
) -> Option<(&'a str, &'static str)> {
    args.find_map(|arg| {
        let name = arg.split('=').next()?;
        let letters = name.strip_prefix('-')?;
        let is_long = letters.len() > 1 && !letters.starts_with('-');
        Some((name, instead_of(name).filter(|_| is_long)?))
    })
}

/// Returns the commands that somebody may have meant who names `word` as a model.
pub fn instead_of_command(word: &str) -> Option<&'static str> {
    match word {
        "run" | "start" => {
            Some("`foretoken serve MODEL` serves a model, and `foretoken chat MODEL` talks to it")
        }
        "pull" | "download" => Some(
            "`foretoken check MODEL` looks at a model, and `foretoken serve MODEL` downloads it",
        ),
        "list" | "ls" | "ps" => Some("`foretoken check MODEL` looks at a model"),
        "quantize" => Some("`foretoken convert` does that"),
        _ => None,
    }
}

/// The one of `known` that `name` is nearly, if any is.
pub fn near<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(score, _)| *score > 0.85)
        .map(|(_, known)| known)
}
