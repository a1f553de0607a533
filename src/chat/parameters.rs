//! The parameters of answers, as a request has them, and as they are named in a chat.

use serde::Serialize;
use serde_json::{Map, Number, Value};

/// Fields of a request for an answer. Those that were not set are left to the server.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct AnswerParameters(Map<String, Value>);

/// What a parameter may be.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A number from the first to the second.
    Number(f64, f64),
    /// A whole number from this one on.
    Whole(i64),
    /// A list of texts, one of which is added at a time.
    Texts,
}

/// The field of a request, the name that Ollama gives it, and what it may be.
const PARAMETERS: [(&str, &str, Kind); 10] = [
    ("temperature", "temperature", Kind::Number(0., 2.)),
    ("max_tokens", "num_predict", Kind::Whole(1)),
    ("top_p", "top_p", Kind::Number(0., 1.)),
    ("top_k", "top_k", Kind::Whole(0)),
    ("min_p", "min_p", Kind::Number(0., 1.)),
    ("seed", "seed", Kind::Whole(0)),
    ("stop", "stop", Kind::Texts),
    (
        "repetition_penalty",
        "repeat_penalty",
        Kind::Number(0.01, 10.),
    ),
    (
        "presence_penalty",
        "presence_penalty",
        Kind::Number(-2., 2.),
    ),
    (
        "frequency_penalty",
        "frequency_penalty",
        Kind::Number(-2., 2.),
    ),
];

/// Maximum number of texts that end an answer.
const MAX_STOPS: usize = 16;

impl AnswerParameters {
    /// The parameters of the flags.
    pub fn new(temperature: Option<f32>, max_tokens: Option<usize>) -> Self {
        let mut fields = Map::new();
        // The number that was typed, not the nearest f32.
        let temperature = temperature.and_then(|value| value.to_string().parse().ok());
        if let Some(value) = temperature.and_then(Number::from_f64) {
            fields.insert("temperature".into(), value.into());
        }
        if let Some(tokens) = max_tokens {
            fields.insert("max_tokens".into(), tokens.into());
        }
        Self(fields)
    }

    /// Sets the parameter `name`, by the name of the field or Ollama's, to the value that `text` is.
    ///
    /// # Errors
    /// What would be accepted.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        let known = PARAMETERS
            .iter()
            .find(|(field, other, _)| [*field, *other].contains(&name));
        let Some((field, _, kind)) = known else {
            let names: Vec<&str> = PARAMETERS.iter().map(|(field, ..)| *field).collect();
            return Err(format!(
                "there is no parameter {name}; there are {}",
                names.join(", ")
            ));
        };
        let value = match *kind {
            Kind::Number(min, max) => {
                let number: Option<f64> = text.parse().ok();
                let number = number.filter(|number| (min..=max).contains(number));
                number
                    .and_then(Number::from_f64)
                    .map(Value::from)
                    .ok_or_else(|| {
                        format!("{field} must be a number between {min} and {max}, not {text}")
                    })?
            }
            Kind::Whole(min) => {
                let number: Option<i64> = text.parse().ok();
                let number = number.filter(|number| *number >= min);
                number.map(Value::from).ok_or_else(|| {
                    format!("{field} must be a whole number of at least {min}, not {text}")
                })?
            }
            Kind::Texts => self.with_stop(field, text)?,
        };
        self.0.insert((*field).to_owned(), value);
        Ok(())
    }

    /// The list `field` with one more text.
    fn with_stop(&self, field: &str, text: &str) -> Result<Value, String> {
        let stops = self.0.get(field).and_then(Value::as_array);
        let mut stops = stops.cloned().unwrap_or_default();
        if text.is_empty() || stops.len() == MAX_STOPS {
            return Err(format!(
                "{field} takes texts that are not empty, at most {MAX_STOPS}"
            ));
        }
        stops.push(text.into());
        Ok(stops.into())
    }

    /// A line for each parameter that was set; `None` = none was.
    pub fn lines(&self) -> Option<String> {
        let lines = self
            .0
            .iter()
            .map(|(name, value)| format!("{name} {value}\n"));
        (!self.0.is_empty()).then(|| lines.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parameters_have_the_names_of_requests_and_of_ollama() {
        let mut parameters = AnswerParameters::new(Some(0.7), None);
        assert_eq!(json!(parameters), json!({"temperature": 0.7}));
        for (name, text) in [
            ("temperature", "0.2"),
            ("num_predict", "64"),
            ("repeat_penalty", "1.1"),
            ("top_k", "0"),
            ("seed", "42"),
            ("stop", "END"),
            ("stop", "\"\""),
        ] {
            parameters.set(name, text).unwrap();
        }
        let wanted = json!({
            "temperature": 0.2, "max_tokens": 64, "repetition_penalty": 1.1, "top_k": 0, "seed": 42,
            "stop": ["END", "\"\""],
        });
        assert_eq!(json!(parameters), wanted);
        let lines = parameters.lines().unwrap();
        assert!(lines.contains("max_tokens 64\n"), "{lines}");
        assert_eq!(AnswerParameters::default().lines(), None);
    }

    #[test]
    fn what_no_server_takes_is_refused() {
        let mut parameters = AnswerParameters::default();
        for (name, text, needle) in [
            ("temperature", "3", "between 0 and 2"),
            ("temperature", "NaN", "between 0 and 2"),
            ("top_p", "much", "a number between 0 and 1"),
            ("max_tokens", "0", "at least 1"),
            ("seed", "-1", "at least 0"),
            ("seed", "1.5", "a whole number"),
            ("stop", "", "not empty"),
            (
                "num_ctx",
                "4096",
                "there is no parameter num_ctx; there are temperature,",
            ),
        ] {
            let error = parameters.set(name, text).unwrap_err();
            assert!(error.contains(needle), "{name}: {error}");
        }
        for _ in 0..MAX_STOPS {
            parameters.set("stop", "x").unwrap();
        }
        assert!(parameters.set("stop", "x").is_err());
    }
}
