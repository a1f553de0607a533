//! What a head's checkpoint says of how often its guesses are right.

use candle_core::quantized::gguf_file::Value as GgufValue;
use foretoken_core::model::DepthRates;
use serde_json::Value;

/// The key of a `config.json`, with lists for greedy and for sampled texts.
pub const RATES: &str = "foretoken_acceptance";
const GREEDY: &str = "greedy";
const SAMPLED: &str = "sampled";
/// The beginning of the keys of a GGUF file. They are no keys of an architecture: they say nothing of layers.
const GGUF_RATES: &str = "foretoken.acceptance";
/// Most depths that have a rate.
const MAX_DEPTHS: usize = 64;

/// The rates in a `config.json`; `None` = it has none.
///
/// # Errors
/// A message that says what the key must have.
pub fn of_json(json: &Value) -> Result<Option<DepthRates>, String> {
    let rates = &json[RATES];
    if rates.is_null() {
        return Ok(None);
    }
    let list = |name: &str| serde_json::from_value::<Vec<f32>>(rates[name].clone()).ok();
    checked(list(GREEDY), list(SAMPLED)).map(Some)
}

/// The rates in the metadata of a GGUF file, whose values `get` finds; `None` = there are none.
///
/// # Errors
/// A message that says what the keys must have.
pub fn of_gguf<'a>(
    get: impl Fn(&str) -> Option<&'a GgufValue>,
) -> Result<Option<DepthRates>, String> {
    let list = |name: &str| match get(&format!("{GGUF_RATES}.{name}"))? {
        GgufValue::Array(list) => list.iter().map(|value| value.to_f32().ok()).collect(),
        _ => None,
    };
    let is_there = |name: &str| get(&format!("{GGUF_RATES}.{name}")).is_some();
    if !is_there(GREEDY) && !is_there(SAMPLED) {
        return Ok(None);
    }
    checked(list(GREEDY), list(SAMPLED)).map(Some)
}

/// The metadata of a GGUF file with these rates.
pub fn to_gguf(rates: &DepthRates) -> [(String, GgufValue); 2] {
    let both = [(GREEDY, &rates.greedy), (SAMPLED, &rates.sampled)];
    both.map(|(name, rates)| {
        let rates = rates.iter().map(|&rate| GgufValue::F32(rate)).collect();
        (format!("{GGUF_RATES}.{name}"), GgufValue::Array(rates))
    })
}

/// The value of [`RATES`] in a `config.json`.
pub fn to_json(rates: &DepthRates) -> Value {
    // Four digits are more than the texts of an evaluation tell.
    let rounded = |rates: &[f32]| -> Vec<f64> {
        let rates = rates.iter().map(|&rate| f64::from(rate));
        rates.map(|rate| (1e4 * rate).round() / 1e4).collect()
    };
    serde_json::json!({ GREEDY: rounded(&rates.greedy), SAMPLED: rounded(&rates.sampled) })
}

fn checked(greedy: Option<Vec<f32>>, sampled: Option<Vec<f32>>) -> Result<DepthRates, String> {
    let is_valid = |list: &Vec<f32>| {
        (1..=MAX_DEPTHS).contains(&list.len()) && list.iter().all(|rate| (0.0..=1.0).contains(rate))
    };
    let (greedy, sampled) = (greedy.filter(is_valid), sampled.filter(is_valid));
    let (Some(greedy), Some(sampled)) = (greedy, sampled) else {
        return Err(format!(
            "{RATES} must have two lists, {GREEDY} and {SAMPLED}, of 1 to {MAX_DEPTHS} rates from 0 to 1"
        ));
    };
    Ok(DepthRates { greedy, sampled })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rates_survive_both_formats() {
        let rates = DepthRates {
            greedy: vec![0.53, 0.48, 0.459],
            sampled: vec![0.495, 0.452],
        };
        let json = json!({ RATES: to_json(&rates) });
        assert_eq!(of_json(&json), Ok(Some(rates.clone())));
        let gguf = to_gguf(&rates);
        let get = |wanted: &str| gguf.iter().find(|(key, _)| key == wanted).map(|(_, v)| v);
        assert_eq!(of_gguf(get), Ok(Some(rates)));
        assert_eq!(of_json(&json!({})), Ok(None));
        assert_eq!(of_gguf(|_| None), Ok(None));
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        let long = vec![0.5; MAX_DEPTHS + 1];
        for wrong in [
            json!(0.5),
            json!({ GREEDY: [0.5] }),
            json!({ GREEDY: [], SAMPLED: [0.5] }),
            json!({ GREEDY: [1.5], SAMPLED: [0.5] }),
            json!({ GREEDY: ["0.5"], SAMPLED: [0.5] }),
            json!({ GREEDY: long, SAMPLED: [0.5] }),
        ] {
            let error = of_json(&json!({ RATES: wrong })).unwrap_err();
            assert!(error.contains("must have two lists"), "{error}");
        }
        let half = GgufValue::Array(vec![GgufValue::F32(0.5)]);
        let get = |key: &str| key.ends_with(GREEDY).then_some(&half);
        assert!(of_gguf(get).is_err());
    }
}
