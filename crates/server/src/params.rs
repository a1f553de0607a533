//! Checks the fields that say how tokens are chosen and where a text ends.

use super::content::TextOr;
use super::context::Context;
use super::numbers::numbers;
use super::stop::Stops;
use super::wire::{Common, wrong};
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::Mask;
use foretoken_core::sampling::SamplingParams;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Every byte of a text is compared with each. Chats of many characters stop at the name of each of them.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;
/// Every token is compared with each word.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_BYTES: usize = 256;

impl Context<'_> {
    /// The parameters of requests, without seed and grammar.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn sampling(&self, common: &Common) -> Result<SamplingParams> {
        let params = SamplingParams {
            logit_bias: logit_bias(common.logit_bias.as_ref())?,
            min_tokens: common.min_tokens.unwrap_or(0),
            ignore_eos: common.ignore_eos.unwrap_or(false),
            stop_token_ids: common.stop_token_ids.clone().unwrap_or_default(),
            allowed: self.allowed(common.allowed_token_ids.as_deref())?,
            bad_words: self.bad_words(common.bad_words.as_ref())?,
            ..numbers(common)?
        };
        self.limits.check_params(&params)?;
        Ok(params)
    }

    /// The stop strings of a request, and whether they are a part of the text that they end. Those that are names of
    /// special tokens also end it by their ids, because texts are without such names; but EOS, which ends it anyway,
    /// is no stop string of the request.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn stops(&self, common: &Common) -> Result<Stops> {
        let stops = common.stop.as_ref().map_or(&[][..], TextOr::list);
        let fits = |stop: &String| (1..=MAX_STOP_BYTES).contains(&stop.len());
        if stops.len() > MAX_STOPS || !stops.iter().all(fits) {
            return wrong(
                "stop",
                format!(
                    "must be a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_BYTES} bytes"
                ),
            );
        }
        let eos: &[u32] = match common.ignore_eos {
            Some(true) => &[],
            _ => &self.text.special_ids().eos,
        };
        let token = |stop: &String| {
            let id = self.text.special_id(stop)?;
            let may_come = (id as usize) < self.limits.vocab_size && !eos.contains(&id);
            may_come.then(|| (id, stop.clone()))
        };
        let shown = common.include_stop_str_in_output.unwrap_or(false);
        let stops = stops.iter();
        Ok(Stops::new(stops.clone().cloned())
            .with_tokens(stops.filter_map(token))
            .shown(shown))
    }

    fn allowed(&self, ids: Option<&[u32]>) -> Result<Option<Arc<Mask>>> {
        const FIELD: &str = "allowed_token_ids";
        let Some(ids) = ids else { return Ok(None) };
        if ids.is_empty() {
            return wrong(
                FIELD,
                "must have at least one id: leave it out to allow all",
            );
        }
        let size = self.limits.vocab_size;
        match ids.iter().find(|&&id| id as usize >= size) {
            Some(&id) => Err(Error::unknown_token(FIELD, id, size)),
            None => Ok(Some(Arc::new(Mask::of(ids)))),
        }
    }

    /// The tokens of each word, as it is at the beginning of a text and after a space.
    fn bad_words(&self, words: Option<&TextOr<String>>) -> Result<Arc<[Vec<u32>]>> {
        let words = words.map_or(&[][..], TextOr::list);
        let fits = |word: &String| {
            let is_blank = word.trim().is_empty();
            !is_blank && word.len() <= MAX_BAD_WORD_BYTES
        };
        if words.len() > MAX_BAD_WORDS || !words.iter().all(fits) {
            return wrong(
                "bad_words",
                format!(
                    "must be a list of at most {MAX_BAD_WORDS} words, each of 1 to {MAX_BAD_WORD_BYTES} bytes and not only spaces"
                ),
            );
        }
        let mut all = Vec::with_capacity(2 * words.len());
        for word in words {
            let word = word.trim_start();
            for text in [word.to_owned(), format!(" {word}")] {
                let ids = self.text.encode(&text, false)?;
                if !ids.is_empty() && !all.contains(&ids) {
                    all.push(ids);
                }
            }
        }
        Ok(all.into())
    }
}

fn logit_bias(map: Option<&Map<String, Value>>) -> Result<Vec<(u32, f32)>> {
    map.into_iter()
        .flatten()
        .map(|(id, bias)| {
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            id.parse().ok().zip(bias.map(|bias| bias as f32)).ok_or_else(|| {
                Error::invalid(
                    "logit_bias",
                    format!("logit_bias must map token ids to numbers between -100 and 100, not {id:?} to {}", map.map_or(&Value::Null, |m| &m[id])),
                )
            })
        })
        .collect()
}
