//! Value parsers of flags. clap's error names the flag; the parser's message says what it accepts.

use bytesize::ByteSize;
use foretoken_kernels as kernels;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// A parser of numbers that satisfy `holds`; `accepted` describes them in the error.
pub fn number<T: FromStr + 'static>(
    accepted: impl Display + Clone + Send + Sync + 'static,
    holds: fn(&T) -> bool,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse() {
        Ok(number) if holds(&number) => Ok(number),
        _ => Err(format!("must be {accepted}")),
    }
}

/// Parses a count of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    number("a whole number, at least 1", |&n: &usize| n > 0)(text)
}

/// Parses a count from 1 to `MAX`: what memory is allocated for.
pub fn up_to<const MAX: usize>(text: &str) -> Result<usize, String> {
    let accepted = format!("a whole number from 1 to {MAX}");
    number(accepted, |n: &usize| (1..=MAX).contains(n))(text)
}

/// Parses a number of threads that this machine can run.
pub fn threads(text: &str) -> Result<usize, String> {
    let max = kernels::max_threads();
    match number("a whole number", |_: &usize| true)(text) {
        Ok(threads) if (1..=max).contains(&threads) => Ok(threads),
        _ => Err(format!(
            "must be a whole number, at least 1 and on this machine at most {max}"
        )),
    }
}

/// Parses a number of seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let whole: u32 = number(
        format!("a whole number of seconds, at most {}", u32::MAX),
        |_| true,
    )(text)?;
    Ok(Duration::from_secs(whole.into()))
}

/// Parses a time limit: a fraction of a second to a year.
pub fn time_limit(text: &str) -> Result<Duration, String> {
    const YEAR: f64 = 365. * 24. * 3600.;
    let accepted = "a number of seconds, above 0 and at most a year";
    number(accepted, |&n: &f64| n > 0. && n <= YEAR)(text).map(Duration::from_secs_f64)
}

/// Parses a size in bytes, at least 1.
pub fn bytes(text: &str) -> Result<usize, String> {
    match text.parse::<ByteSize>().map(|size| size.as_u64()) {
        Ok(bytes) if bytes > 0 => Ok(usize::try_from(bytes).unwrap_or(usize::MAX)),
        _ => Err("must be a size such as 2GiB, 512MiB, 1.5GB or 4096, at least 1 byte".into()),
    }
}

/// Parses a seed; -1 is a random one, as in requests.
pub fn seed(text: &str) -> Result<u64, String> {
    match text {
        "-1" => Ok(rand::random()),
        _ => number(
            "a whole number from 0 to 2^64 - 1, or -1 for a random seed",
            |_| true,
        )(text),
    }
}

/// Parses a temperature in OpenAI's range, 0 to 2.
pub fn temperature(text: &str) -> Result<f32, String> {
    number("a number between 0 and 2", |t: &f32| {
        (0.0..=2.0).contains(t)
    })(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_are_checked() {
        assert_eq!(time_limit("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "1e99", "nan", "x"] {
            assert!(time_limit(wrong).is_err(), "{wrong}");
        }
    }
}
