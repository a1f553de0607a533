//! The context in which requests are validated.

use crate::engine::Limits;
use crate::error::{Error, RequestErrorKind, Result};
use crate::text::Text;

/// The tokenizer and template, the engine's limits and the served model names.
pub(super) struct Context<'a> {
    pub text: &'a Text,
    pub limits: &'a Limits,
    pub model_names: &'a [String],
}

impl Context<'_> {
    /// The served name for `wanted`; the first one if it is `None`.
    ///
    /// # Errors
    /// `NotFound`, if `wanted` is not served.
    pub fn model(&self, wanted: Option<&str>) -> Result<String> {
        match wanted {
            None => Ok(self.model_names.first().cloned().unwrap_or_default()),
            Some(name) if self.model_names.iter().any(|served| served == name) => Ok(name.into()),
            Some(name) => Err(Error::request(
                RequestErrorKind::NotFound,
                Some("model"),
                format!(
                    "the model `{name}` does not exist; served: {}",
                    self.model_names.join(", ")
                ),
            )),
        }
    }
}
