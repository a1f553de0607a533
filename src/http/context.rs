//! What requests are read against.

use crate::engine::Limits;
use crate::error::{Error, RequestErrorKind, Result};
use crate::text::Text;

/// The model's text side, the engine's limits and the names we serve.
pub(super) struct Context<'a> {
    pub text: &'a Text,
    pub limits: &'a Limits,
    pub model_names: &'a [String],
}

impl Context<'_> {
    /// The served name that `wanted` means.
    ///
    /// # Errors
    /// `NotFound`, if we do not serve it.
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
