//! The beam search that a request asks for.

pub(super) mod search;

use super::content::TextOr;
use super::numbers::{asked, within};
use super::structured::Structured;
use super::wire::{Common, EarlyStoppingField, NeverWord, wrong};
use foretoken_core::error::Result;
use search::{BeamOptions, EarlyStopping};

/// Beyond, the power of a length is no number that one can compare.
const MAX_LENGTH_PENALTY: f64 = 10.0;

/// The fields that ask for one.
#[derive(Debug, Clone, Copy)]
pub(super) struct BeamFields {
    pub use_beam_search: Option<bool>,
    pub length_penalty: Option<f64>,
    pub early_stopping: Option<EarlyStoppingField>,
}

impl BeamFields {
    /// The beam search that a body asks for; `None` if it asks for none. `common` and `structured` have what the body
    /// names itself, and `others` has fields of its API that do not go along, with whether they ask for something.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn read(
        self,
        common: &Common,
        structured: &Structured,
        others: &[(&'static str, bool)],
    ) -> Result<Option<BeamOptions>> {
        const REFUSED: &str = "is not possible with use_beam_search: leave it out";
        if self.use_beam_search != Some(true) {
            let is_set = self.length_penalty.is_some_and(|penalty| penalty != 1.0);
            let stops_early = self.early_stopping.map(EarlyStopping::from);
            let stops_early = stops_early.is_some_and(|stop| stop != EarlyStopping::default());
            let fields = [("length_penalty", is_set), ("early_stopping", stops_early)];
            if let Some((field, _)) = fields.iter().find(|(_, is_set)| *is_set) {
                return wrong(*field, "is only possible with use_beam_search: true");
            }
            return Ok(None);
        }
        if let Some((field, _)) = structured.asked()? {
            return wrong(field, REFUSED);
        }
        let mut fields = conflicts(common).chain(others.iter().copied());
        if let Some((field, _)) = fields.find(|(_, asks)| *asks) {
            return wrong(field, REFUSED);
        }
        let range = -MAX_LENGTH_PENALTY..=MAX_LENGTH_PENALTY;
        let penalty = within("length_penalty", self.length_penalty, range)?;
        Ok(Some(BeamOptions {
            width: 1,
            length_penalty: penalty.unwrap_or(1.0),
            early_stopping: self.early_stopping.map(Into::into).unwrap_or_default(),
        }))
    }
}

/// The fields of all APIs that would change or constrain what is searched for, with whether they ask for something.
fn conflicts(common: &Common) -> impl Iterator<Item = (&'static str, bool)> {
    let has_texts =
        |texts: Option<&TextOr<String>>| texts.is_some_and(|all| !all.list().is_empty());
    let stop_ids = common.stop_token_ids.as_ref();
    let biases = common.logit_bias.as_ref();
    let stream = [("stream", common.stream == Some(true))];
    let rest = [
        ("logit_bias", biases.is_some_and(|map| !map.is_empty())),
        ("stop", has_texts(common.stop.as_ref())),
        (
            "stop_token_ids",
            stop_ids.is_some_and(|ids| !ids.is_empty()),
        ),
        ("min_tokens", common.min_tokens.is_some_and(|min| min > 0)),
        ("allowed_token_ids", common.allowed_token_ids.is_some()),
        ("bad_words", has_texts(common.bad_words.as_ref())),
        ("acceptance", common.acceptance.is_some()),
    ];
    stream.into_iter().chain(asked(common)).chain(rest)
}

impl From<EarlyStoppingField> for EarlyStopping {
    fn from(field: EarlyStoppingField) -> Self {
        match field {
            EarlyStoppingField::Flag(true) => Self::Yes,
            EarlyStoppingField::Flag(false) => Self::No,
            EarlyStoppingField::Never(NeverWord::Never) => Self::Never,
        }
    }
}
