//! Numbers in schemas that llguidance would not keep. It computes with 64-bit integers and floating-point
//! numbers, and with 32-bit integers for `multipleOf`.

use super::schema::{Parts, meets, resolve};
use foretoken_core::error::clipped;
use serde_json::{Number, Value};

/// The bounds: the keyword, what is added to its value to get into the range, and the flag of draft 4 that excludes the
/// value.
const BOUNDS: [(&str, f64, &str); 4] = [
    ("minimum", 1.0, "exclusiveMinimum"),
    ("maximum", -1.0, "exclusiveMaximum"),
    ("exclusiveMinimum", 1.0, ""),
    ("exclusiveMaximum", -1.0, ""),
];
/// Below this number, floating-point numbers hold all integers.
const EXACT: f64 = (1_u64 << 53) as f64;
/// The integers that are kept lie between the negative of this number and the number itself, both excluded.
const END: i128 = 1 << 63;

/// Checks the numbers of `schema`.
///
/// # Errors
/// A text that says what is wrong, and where, in words that follow the name of the field.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut parts = Parts::of(schema);
    let (mut steps, mut may_meet) = (Vec::new(), false);
    while let Some((index, part)) = parts.next() {
        let wrong = wrong_bound(part)
            .or_else(|| wrong_data(part))
            .or_else(|| wrong_step(part, schema));
        if let Some((keyword, what)) = wrong {
            let place = clipped(&format!("{}/{keyword}", parts.pointer(index)));
            return Err(format!("is not supported at `#{place}`: {what}"));
        }
        steps.extend(Decimal::of(part));
        may_meet |= meets(part);
    }
    // The parser finds where steps meet, and divides texts by their least common multiple.
    if may_meet && !have_multiple(&steps) {
        return Err(
            "is not supported: the least common multiple of its `multipleOf` is too large".into(),
        );
    }
    Ok(())
}

/// A keyword, and what is wrong with it.
type Wrong = (&'static str, String);

fn wrong_bound(part: &Value) -> Option<Wrong> {
    let is_integer = match part.get("type") {
        Some(Value::String(name)) => name == "integer",
        Some(Value::Array(names)) => !names.iter().any(|name| name == "number"),
        _ => false,
    };
    BOUNDS.into_iter().find_map(|(keyword, inward, flag)| {
        let Some(Value::Number(bound)) = part.get(keyword) else {
            return None;
        };
        let excludes = flag.is_empty() || part.get(flag) == Some(&Value::Bool(true));
        let inexact = || {
            let bound = bound.as_f64().filter(|bound| bound.abs() >= EXACT)?;
            (excludes && bound + inward - bound != inward)
                .then(|| format!("the integer beside {bound} would be rounded"))
        };
        let what = rounded(bound, is_integer).or_else(inexact);
        what.map(|what| (keyword, what))
    })
}

/// Returns what happens to `number`, if it is not kept. Integers are read as integers, others as decimal numbers.
fn rounded(number: &Number, is_integer: bool) -> Option<String> {
    let float = number.as_f64()?;
    let exact = match (number.as_i64(), number.as_u64()) {
        (Some(integer), _) => integer.into(),
        (_, Some(integer)) => integer.into(),
        _ if float.abs() < EXACT => return None,
        // A conversion makes the greatest or the least integer of a number that is too far from 0.
        _ => float as i128,
    };
    if exact <= -END || exact >= END {
        return Some(format!("{number} is beyond the integers of 64 bits"));
    }
    let kept = if is_integer {
        (float as i64).into()
    } else {
        float.to_string().parse().unwrap_or(i128::MAX)
    };
    (kept != exact).then(|| format!("{number} would be rounded to {kept}"))
}

/// Numbers of values that are given. Floating-point ones are written such that they are read as what they are.
fn wrong_data(part: &Value) -> Option<Wrong> {
    ["const", "enum"].into_iter().find_map(|keyword| {
        let mut values = vec![part.get(keyword)?];
        while let Some(value) = values.pop() {
            match value {
                Value::Number(number) if !number.is_f64() => {
                    if let Some(what) = rounded(number, number.is_i64()) {
                        return Some((keyword, what));
                    }
                }
                Value::Array(list) => values.extend(list),
                Value::Object(map) => values.extend(map.values()),
                _ => {}
            }
        }
        None
    })
}

/// A `multipleOf`, as `coefficient / 10^exponent`.
#[derive(Debug, Clone, Copy)]
struct Decimal {
    coefficient: u128,
    exponent: u32,
}

impl Decimal {
    /// The `multipleOf` of `part`, as llguidance reads it. llguidance refuses 0 itself.
    fn of(part: &Value) -> Option<Self> {
        let mut value = part.get("multipleOf")?.as_f64()?.abs();
        let mut exponent = 0;
        while value.fract() != 0.0 {
            value *= 10.0;
            exponent += 1;
        }
        // A larger coefficient divides no text.
        let mut coefficient = value.min(1e18) as u128;
        if coefficient == 0 {
            return None;
        }
        while exponent > 0 && coefficient.is_multiple_of(10) {
            coefficient /= 10;
            exponent -= 1;
        }
        Some(Self {
            coefficient,
            exponent,
        })
    }

    /// Whether 32-bit integers are enough to divide a text by this number, digit after digit.
    fn divides(self) -> bool {
        self.exponent <= 9
            && 10 * self.coefficient + 9 * 10_u128.pow(self.exponent) <= u32::MAX.into()
    }

    /// The coefficients of both numbers for a common exponent, and this exponent.
    fn alike(self, other: Self) -> (u128, u128, u32) {
        let exponent = self.exponent.max(other.exponent);
        let scaled = |it: Self| it.coefficient * 10_u128.pow(exponent - it.exponent);
        (scaled(self), scaled(other), exponent)
    }

    /// The least common multiple.
    fn lcm(self, other: Self) -> Self {
        let (a, b, exponent) = self.alike(other);
        let (mut divisor, mut rest) = (a, b);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self {
            coefficient: a / divisor * b,
            exponent,
        }
    }
}

/// Whether texts can be divided by the least common multiple of `steps`, each of which divides texts.
fn have_multiple(steps: &[Decimal]) -> bool {
    let Some((first, others)) = steps.split_first() else {
        return true;
    };
    let lcm = |all: Decimal, step: &Decimal| Some(all.lcm(*step)).filter(|all| all.divides());
    others.iter().try_fold(*first, lcm).is_some()
}

/// Returns what is wrong with the `multipleOf` of `part`, also together with those of parts that it joins directly.
fn wrong_step(part: &Value, root: &Value) -> Option<Wrong> {
    let too_large = |what| Some(("multipleOf", what));
    if Decimal::of(part).is_some_and(|step| !step.divides()) {
        return too_large(format!("{} has too many digits", part["multipleOf"]));
    }
    let joined = part.get("allOf").and_then(Value::as_array);
    let joined = std::iter::once(part).chain(joined.into_iter().flatten());
    let joined = joined.flat_map(|part| {
        let reference = part.get("$ref").and_then(Value::as_str);
        let target = reference.and_then(|reference| resolve(root, reference));
        std::iter::once(part).chain(target)
    });
    let mut all: Option<Decimal> = None;
    // A step that divides no text is refused at its own part.
    for step in joined.filter_map(Decimal::of).filter(|step| step.divides()) {
        // The parser multiplies before it divides.
        if let Some(all) = all {
            let (a, b, _) = all.alike(step);
            if a.checked_mul(b)
                .is_none_or(|product| product > u32::MAX.into())
            {
                return too_large("the product of those that must hold is too large".into());
            }
        }
        all = Some(all.map_or(step, |all| all.lcm(step)));
    }
    None
}
