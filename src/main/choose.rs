//! The choice of a model for `foretoken chat`, where somebody types and has named none.

use foretoken::gguf::EMBEDDED;
use foretoken::model::hub::gguf::HubFile;
use foretoken::model::known::{self, KnownModel};
use std::io::{self, BufRead, Read, Write};
use std::path::Path;

/// Bytes that a model takes beside its file: its KV cache, buffers, this program.
const BESIDE: u64 = 512 << 20;
/// Maximum number of bytes of a line that is read.
const MAX_LINE: u64 = 4096;

/// What decides which models are offered, and what is said of them.
#[derive(Clone, Copy)]
pub struct Machine {
    /// Bytes that a model may take.
    pub memory: u64,
    /// Bytes of weights that are read in a second, if that is known.
    pub bandwidth: Option<f64>,
}

/// The answer of somebody who was asked for a model.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// The model that is part of the program, with its draft.
    Demonstration,
    /// The model with this name, of the list or not.
    Named(String),
    /// The end of the input.
    Nothing,
}

/// A model to choose.
struct Offer {
    name: String,
    size: String,
    speed: String,
    note: String,
    choice: Choice,
}

impl Offer {
    fn demonstration(name: &str) -> Self {
        Self {
            name: name.into(),
            size: String::new(),
            speed: String::new(),
            note: "part of this program: short stories, at once".into(),
            choice: Choice::Demonstration,
        }
    }

    /// A model of the list; it `is_here` if it need not be downloaded. Each token reads all of its weights.
    fn listed(model: &KnownModel, bandwidth: Option<f64>, is_here: bool) -> Self {
        let speed = bandwidth.map_or(String::new(), |bandwidth| {
            let speed = bandwidth / model.bytes as f64;
            format!("{speed:.*} tokens/s", usize::from(speed < 10.))
        });
        let here = if is_here { "; downloaded already" } else { "" };
        Self {
            name: model.name.clone(),
            size: format!("{:.1} GB", model.bytes as f64 / 1e9),
            speed,
            note: format!("{} ({}){here}", model.good_for, model.licence),
            choice: Choice::Named(model.name.clone()),
        }
    }
}

/// Asks on `output` which of the models that fit into the memory of `machine` is meant, and reads answers from `input` until
/// one can be understood.
///
/// # Errors
/// What `input` and `output` fail with.
pub fn model(
    machine: Machine,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<Choice> {
    let is_here = |model: &KnownModel| {
        HubFile::of(&model.file).is_some_and(|file| file.cached(None).is_some())
    };
    let demonstration = EMBEDDED.first();
    let mut offers: Vec<Offer> = (demonstration.iter())
        .map(|model| Offer::demonstration(model.name))
        .collect();
    let fitting = known::all()
        .iter()
        .filter(|model| fits(model, machine.memory));
    offers.extend(fitting.map(|model| Offer::listed(model, machine.bandwidth, is_here(model))));
    ask(offers, input, output)
}

/// Whether the model can be served in `memory` bytes.
fn fits(model: &KnownModel, memory: u64) -> bool {
    model.bytes + model.bytes / 10 + BESIDE <= memory
}

fn ask(
    mut offers: Vec<Offer>,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<Choice> {
    let width = offers.iter().map(|offer| offer.name.len()).max();
    let width = width.unwrap_or(0);
    let speeds = offers.iter().map(|offer| offer.speed.len()).max();
    let speeds = speeds.unwrap_or(0);
    let estimated = if speeds == 0 {
        ""
    } else {
        ", and about how fast they decode without drafts"
    };
    writeln!(output, "Models that fit this machine{estimated}:\n")?;
    for (i, offer) in offers.iter().enumerate() {
        let (
            number,
            Offer {
                name,
                size,
                speed,
                note,
                ..
            },
        ) = (i + 1, offer);
        write!(output, "{number:>4}  {name:<width$}  {size:>7}  ")?;
        if speeds > 0 {
            write!(output, "{speed:>speeds$}  ")?;
        }
        writeln!(output, "{note}")?;
    }
    writeln!(
        output,
        "\nA number chooses one of them, a name any model (qwen3:4b, OWNER/NAME, a file); Enter is 1."
    )?;
    loop {
        write!(output, "Model: ")?;
        output.flush()?;
        let mut line = String::new();
        if input.by_ref().take(MAX_LINE).read_line(&mut line)? == 0 {
            writeln!(output)?;
            return Ok(Choice::Nothing);
        }
        let number = match line.trim() {
            "" => 1,
            answer => match answer.parse::<usize>() {
                Ok(number) => number,
                // A sentence is no name, but the path of a file may have spaces.
                Err(_) if answer.contains(char::is_whitespace) && !Path::new(answer).exists() => 0,
                Err(_) => return Ok(Choice::Named(answer.to_owned())),
            },
        };
        if (1..=offers.len()).contains(&number) {
            return Ok(offers.swap_remove(number - 1).choice);
        }
        let last = offers.len();
        writeln!(output, "Give a number from 1 to {last}, or a name.")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The choice of `typed` with so much `memory`, and what was shown.
    fn choose(memory: u64, typed: &str) -> (Choice, String) {
        let mut shown = Vec::new();
        let machine = Machine {
            memory,
            bandwidth: None,
        };
        let choice = model(machine, &mut typed.as_bytes(), &mut shown).unwrap();
        (choice, String::from_utf8(shown).unwrap())
    }

    #[test]
    fn a_known_bandwidth_gives_the_speed_of_each() {
        let (_, shown) = choose(8 << 30, "1\n");
        assert!(!shown.contains("tokens/s"), "{shown}");
        let machine = Machine {
            memory: 8 << 30,
            bandwidth: Some(20e9),
        };
        let mut shown = Vec::new();
        model(machine, &mut &b"1\n"[..], &mut shown).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let line = |name: &str| shown.lines().find(|line| line.contains(name)).unwrap();
        assert!(line("qwen3:8b").contains(" 4.0 tokens/s "), "{shown}");
        assert!(line("smollm2:135m").contains(" 138 tokens/s "), "{shown}");
        // Columns are as wide as their widest entry.
        let notes = ["llama3.1:8b", "smollm2:360m"].map(|name| line(name).find("tokens/s"));
        assert_eq!(notes[0], notes[1], "{shown}");
    }

    #[test]
    fn only_models_that_fit_are_offered() {
        let (_, shown) = choose(1 << 30, "1\n");
        assert!(
            shown.contains("smollm2:135m") && shown.contains("0.1 GB"),
            "{shown}"
        );
        assert!(!shown.contains("qwen3:8b"), "{shown}");
        let (_, shown) = choose(8 << 30, "1\n");
        assert!(
            shown.contains("qwen3:8b") && shown.contains("Apache-2.0"),
            "{shown}"
        );
        // Beside the file, a model takes memory.
        let smallest = &known::all()[0];
        assert!(!fits(smallest, smallest.bytes) && fits(smallest, 1 << 30));
    }

    #[test]
    fn an_answer_is_a_number_a_name_or_nothing() {
        let listed = |place: usize| Choice::Named(known::all()[place].name.clone());
        let first_listed = EMBEDDED.iter().take(1).count();
        let at = |place: usize| (place + 1 + first_listed).to_string();
        assert_eq!(choose(8 << 30, &at(1)).0, listed(1));
        let (choice, shown) = choose(8 << 30, &format!("99\n0\nthe second\n{}\n", at(0)));
        assert_eq!(choice, listed(0));
        assert_eq!(
            shown.matches("Give a number from 1 to").count(),
            3,
            "{shown}"
        );
        let named = Choice::Named("o/m:Q4_K_M".into());
        assert_eq!(choose(0, " o/m:Q4_K_M \n").0, named);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a model.gguf");
        std::fs::write(&file, "").unwrap();
        let path = file.display().to_string();
        assert_eq!(choose(0, &format!("{path}\n")).0, Choice::Named(path));
        assert_eq!(choose(8 << 30, "").0, Choice::Nothing);
        assert_eq!(choose(8 << 30, "99").0, Choice::Nothing);
    }

    #[cfg(feature = "embedded-model")]
    #[test]
    fn the_demonstration_model_is_the_first() {
        let (choice, shown) = choose(0, "\n");
        assert_eq!(choice, Choice::Demonstration);
        let first = shown
            .lines()
            .find(|line| line.trim_start().starts_with('1'));
        assert!(first.unwrap().contains("foretoken-demo"), "{shown}");
        assert_eq!(choose(8 << 30, "1\n").0, Choice::Demonstration);
    }
}
