//! The ranges of numbers.

use super::wire::{Common, wrong};
use foretoken_core::error::Result;
use foretoken_core::sampling::SamplingParams;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// The parameters that are numbers.
///
/// # Errors
/// `Invalid`, naming the field.
pub(super) fn numbers(common: &Common) -> Result<SamplingParams> {
    let number = |field, value, range| -> Result<f32> {
        Ok(within(field, value, range)?.map_or(0.0, |x| x as f32))
    };
    let temperature = within("temperature", common.temperature, 0.0..=2.0)?.unwrap_or(1.0);
    // 0 keeps the most probable token, as any number does that is small enough.
    let top_p = within("top_p", common.top_p, 0.0..=1.0)?;
    let top_p = top_p.map_or(1.0, |p| (p as f32).max(f32::MIN_POSITIVE));
    let top_k = match common.top_k {
        Some(k) if k < -1 => {
            return wrong("top_k", format!("must be -1 or 0 (off) or more, not {k}"));
        }
        k => k.unwrap_or(0).max(0) as usize,
    };
    let repetition_penalty = match common.repetition_penalty {
        Some(x) if !(x > 0.0 && x <= 2.0) => {
            return wrong(
                "repetition_penalty",
                format!("must be greater than 0 and at most 2, not {x}"),
            );
        }
        penalty => penalty.map_or(1.0, |x| (x as f32).max(f32::MIN_POSITIVE)),
    };
    Ok(SamplingParams {
        temperature: temperature as f32,
        top_p,
        top_k,
        min_p: number("min_p", common.min_p, 0.0..=1.0)?,
        repetition_penalty,
        presence_penalty: number("presence_penalty", common.presence_penalty, -2.0..=2.0)?,
        frequency_penalty: number("frequency_penalty", common.frequency_penalty, -2.0..=2.0)?,
        ..SamplingParams::default()
    })
}

/// The same parameters, with whether they ask for something else than the model's own distribution or, at temperature
/// 0, its most probable token.
pub(super) fn asked(common: &Common) -> [(&'static str, bool); 7] {
    let is_not =
        |value: Option<f64>, nothing: &[f64]| value.is_some_and(|value| !nothing.contains(&value));
    let (repetition, frequency) = (common.repetition_penalty, common.frequency_penalty);
    [
        ("temperature", is_not(common.temperature, &[0.0, 1.0])),
        ("top_p", is_not(common.top_p, &[1.0])),
        ("top_k", common.top_k.is_some_and(|k| k > 0)),
        ("min_p", is_not(common.min_p, &[0.0])),
        ("repetition_penalty", is_not(repetition, &[1.0])),
        ("presence_penalty", is_not(common.presence_penalty, &[0.0])),
        ("frequency_penalty", is_not(frequency, &[0.0])),
    ]
}

/// Checks that a value is in its range.
///
/// # Errors
/// `Invalid`, naming the field.
pub(super) fn within<T: PartialOrd + Display>(
    field: &str,
    value: Option<T>,
    range: RangeInclusive<T>,
) -> Result<Option<T>> {
    match value {
        Some(x) if !range.contains(&x) => wrong(
            field,
            format!(
                "must be between {} and {}, not {x}",
                range.start(),
                range.end()
            ),
        ),
        other => Ok(other),
    }
}
