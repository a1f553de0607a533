//! Value parsers of flags: clap names the flag, these say what it accepts.

use std::fmt::Display;
use std::str::FromStr;

/// A parser of numbers for which `holds`, which `accepted` says in words.
pub fn number<T: FromStr + 'static>(
    accepted: impl Display + Clone + Send + Sync + 'static,
    holds: fn(&T) -> bool,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(number) if holds(&number) => Ok(number),
        _ => Err(format!("must be {accepted}")),
    }
}

/// A count of something of which there must be one.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    number("a whole number, at least 1", |&n: &usize| n > 0)(text)
}

/// A temperature as OpenAI has it.
pub fn temperature(text: &str) -> Result<f32, String> {
    number("a number between 0 and 2", |t: &f32| {
        (0.0..=2.0).contains(t)
    })(text)
}
