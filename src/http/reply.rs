//! Builds OpenAI's reply objects from pieces of choices.

use super::choice::{Choice, Finish, Piece, Scored};
use crate::engine::SpecUsage;
use crate::text::Text;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The API of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Completion,
    Chat,
}

/// The fields that all objects of one reply share.
#[derive(Debug, Clone)]
pub(super) struct Header {
    pub api: Api,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    pub fingerprint: Option<Arc<str>>,
    /// Whether `usage` reports speculation.
    pub speculates: bool,
    pub prompt_tokens: usize,
    /// Number of choices of each prompt, which come one after the other.
    pub choices_per_prompt: usize,
    /// Number of choices of each prompt that are shown: the best ones.
    pub shown_per_prompt: usize,
    /// The ids of each prompt, if requested.
    pub prompt_ids: Option<Arc<[Vec<u32>]>>,
    /// Number of alternatives per token in a chat's reply; `None` = no log-probabilities.
    pub logprobs: Option<usize>,
}

/// The smallest log-probability that clients get, as with vLLM, because JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Header {
    pub fn new(api: Api, model: String, fingerprint: Option<&Arc<str>>) -> Self {
        let prefix = match api {
            Api::Completion => "cmpl",
            Api::Chat => "chatcmpl",
        };
        Self {
            api,
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: now(),
            model,
            fingerprint: fingerprint.cloned(),
            speculates: false,
            prompt_tokens: 0,
            choices_per_prompt: 1,
            shown_per_prompt: 1,
            prompt_ids: None,
            logprobs: None,
        }
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint.as_deref(),
            "choices": choices,
        })
    }

    /// The JSON text of the reply, not streamed: its beginning, each choice, and its end, made one after the
    /// other.
    pub fn reply(
        self,
        text: Arc<Text>,
        pieces: Vec<Piece>,
        usage: &Value,
    ) -> impl Iterator<Item = Vec<u8>> + use<> {
        let object = match self.api {
            Api::Completion => "text_completion",
            Api::Chat => "chat.completion",
        };
        let mut start = self.object(object, Vec::new()).to_string();
        let end = start.split_off(start.len() - "]}".len());
        let ids = (self.prompt_ids.as_ref()).filter(|_| self.api == Api::Chat);
        let ids = ids.map_or_else(String::new, |ids| {
            format!(",\"prompt_token_ids\":{}", json!(ids.first()))
        });
        let end = end.replace('}', &format!(",\"usage\":{usage}{ids}}}"));
        let choices = pieces
            .into_iter()
            .enumerate()
            .map(move |(index, mut piece)| {
                let (key, value) = match self.api {
                    Api::Completion => ("text", std::mem::take(&mut piece.text).into()),
                    Api::Chat => ("message", message(&mut piece)),
                };
                let finish = piece.finish.take();
                let mut choice = self.choice(&text, index, key, value, &piece.logprobs, finish);
                choice.token_ids = self.prompt_ids.is_some().then_some(&piece.token_ids);
                choice.prompt_ids = self.prompt_ids_of(index);
                let mut json = if index > 0 { vec![b','] } else { Vec::new() };
                // Strings and numbers can always be written.
                let _ = serde_json::to_writer(&mut json, &choice);
                json
            });
        let start = std::iter::once(start.into_bytes());
        start
            .chain(choices)
            .chain(std::iter::once(end.into_bytes()))
    }

    /// The first chunk of a choice in a streamed chat; `None` for completions.
    pub fn opening(&self, index: usize) -> Option<Value> {
        let with_ids = |mut chunk: Value| {
            if let Some(ids) = &self.prompt_ids {
                chunk["prompt_token_ids"] = json!(ids.first());
            }
            chunk
        };
        let delta = json!({"role": "assistant", "content": ""});
        (self.api == Api::Chat).then(|| {
            let choice =
                json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            with_ids(self.object("chat.completion.chunk", vec![choice]))
        })
    }

    /// The chunks of a stream that show a piece, the first one of its choice or not. A chat's chunk has one
    /// kind of delta; the last one says how the choice ended.
    pub fn chunks(&self, text: &Text, index: usize, mut piece: Piece, first: bool) -> Vec<Value> {
        let (object, key, values) = match self.api {
            Api::Completion => {
                let text = std::mem::take(&mut piece.text);
                ("text_completion", "text", vec![text.into()])
            }
            Api::Chat => ("chat.completion.chunk", "delta", deltas(&mut piece)),
        };
        let mut logprobs = piece.logprobs.as_slice();
        let mut token_ids = piece.token_ids.as_slice();
        let mut rounds = piece.rounds.as_slice();
        let last = values.len() - 1;
        let chunk = |(i, value)| {
            let logprobs = std::mem::take(&mut logprobs);
            let finish = piece.finish.take_if(|_| i == last);
            let mut choice = self.choice(text, index, key, value, logprobs, finish);
            let token_ids = std::mem::take(&mut token_ids);
            choice.token_ids = self.prompt_ids.is_some().then_some(token_ids);
            choice.prompt_ids = self.prompt_ids_of(index).filter(|_| first && i == 0);
            let mut choice = json!(choice);
            let rounds = std::mem::take(&mut rounds);
            if !rounds.is_empty() {
                choice["speculation"] = rounds.iter().map(|round| round.json(text)).collect();
            }
            self.object(object, vec![choice])
        };
        values.into_iter().enumerate().map(chunk).collect()
    }

    /// The last chunk of a stream with `include_usage`.
    pub fn usage_chunk(&self, choices: &[Choice]) -> Value {
        let object = match self.api {
            Api::Completion => "text_completion",
            Api::Chat => "chat.completion.chunk",
        };
        let mut chunk = self.object(object, Vec::new());
        chunk["usage"] = self.usage(choices);
        chunk
    }

    fn choice<'a>(
        &self,
        text: &'a Text,
        index: usize,
        key: &'static str,
        value: Value,
        tokens: &'a [Scored],
        finish: Option<Finish>,
    ) -> ChoiceJson<'a> {
        let logprobs = self.logprobs.filter(|_| !tokens.is_empty());
        let logprobs = logprobs.map(|top| Logprobs {
            api: self.api,
            top,
            text,
            tokens,
        });
        ChoiceJson {
            index,
            content: (key, value),
            logprobs,
            finish,
            token_ids: None,
            prompt_ids: None,
        }
    }

    /// The ids of the prompt of a completion's choice, if requested. A chat has them outside its choices.
    fn prompt_ids_of(&self, index: usize) -> Option<&[u32]> {
        let ids = self.prompt_ids.as_ref()?;
        let ids = ids.get(index / self.shown_per_prompt)?;
        (self.api == Api::Completion).then_some(ids)
    }

    /// The pieces that are shown: of each prompt those whose tokens have the highest mean log-probability,
    /// the best one first.
    pub fn best(&self, pieces: Vec<Piece>, choices: &[Choice]) -> Vec<Piece> {
        if self.shown_per_prompt == self.choices_per_prompt {
            return pieces;
        }
        let mut pieces = pieces.into_iter();
        let of_prompt = choices.chunks(self.choices_per_prompt);
        let best = of_prompt.flat_map(|choices| {
            let scores = choices.iter().map(Choice::mean_logprob);
            let mut all: Vec<(f64, Piece)> = scores.zip(pieces.by_ref()).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0));
            all.truncate(self.shown_per_prompt);
            all.into_iter().map(|(_, piece)| piece)
        });
        best.collect()
    }

    /// Tokens of all prompts that were in the prefix cache before the first choice.
    pub fn cached_tokens(&self, choices: &[Choice]) -> usize {
        let of_prompt = |choices: &[Choice]| choices.iter().map(Choice::cached_tokens).min();
        let prompts = choices.chunks(self.choices_per_prompt);
        prompts.filter_map(of_prompt).sum()
    }

    /// What the reply cost.
    pub fn usage(&self, choices: &[Choice]) -> Value {
        let completion_tokens: usize = choices.iter().map(Choice::completion_tokens).sum();
        let mut usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens(choices)},
        });
        if self.speculates {
            let spec = choices
                .iter()
                .map(Choice::spec)
                .fold(SpecUsage::default(), |sum, of_choice| sum + of_choice);
            usage["completion_tokens_details"] = json!({
                "accepted_prediction_tokens": spec.predicted_accepted,
                "rejected_prediction_tokens": spec.predicted - spec.predicted_accepted,
            });
            usage["speculative_decoding"] = json!({
                "num_drafts": spec.rounds,
                "num_draft_tokens": spec.drafted,
                "num_accepted_tokens": spec.accepted,
                "acceptance_rate": spec.acceptance_rate(),
                "mean_acceptance_length": spec.mean_accepted_length(),
            });
        }
        usage
    }
}

/// The message of a whole reply. There is no content where there are only calls or reasoning.
fn message(piece: &mut Piece) -> Value {
    let content = match std::mem::take(&mut piece.text) + &piece.late {
        text if text.is_empty() && !(piece.calls.is_empty() && piece.reasoning.is_empty()) => {
            Value::Null
        }
        text => text.into(),
    };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !piece.reasoning.is_empty() {
        message["reasoning_content"] = std::mem::take(&mut piece.reasoning).into();
    }
    if !piece.calls.is_empty() {
        message["tool_calls"] = piece
            .calls
            .drain(..)
            .map(|call| {
                let head = call.head.unwrap_or_default();
                json!({
                    "id": head.id,
                    "type": "function",
                    "function": {"name": head.name, "arguments": call.arguments},
                })
            })
            .collect();
    }
    message
}

/// The deltas of a piece of a chat: at least one, and an empty one if it has nothing to add or ends after
/// a call.
fn deltas(piece: &mut Piece) -> Vec<Value> {
    let mut deltas = Vec::new();
    if !piece.reasoning.is_empty() {
        deltas.push(json!({"reasoning_content": std::mem::take(&mut piece.reasoning)}));
    }
    if !piece.text.is_empty() {
        deltas.push(json!({"content": std::mem::take(&mut piece.text)}));
    }
    let ends_in_call = !piece.calls.is_empty() && piece.finish.is_some();
    for call in piece.calls.drain(..) {
        let delta = |call: Value| json!({"tool_calls": [call]});
        if let Some(head) = call.head {
            deltas.push(delta(json!({
                "index": call.index,
                "id": head.id,
                "type": "function",
                "function": {"name": head.name, "arguments": ""},
            })));
        }
        if !call.arguments.is_empty() {
            let function = json!({"arguments": call.arguments});
            deltas.push(delta(json!({"index": call.index, "function": function})));
        }
    }
    if !piece.late.is_empty() {
        deltas.push(json!({"content": std::mem::take(&mut piece.late)}));
    }
    if deltas.is_empty() || ends_in_call {
        deltas.push(json!({}));
    }
    deltas
}

/// A choice as JSON.
struct ChoiceJson<'a> {
    index: usize,
    /// The key and the value of what was generated.
    content: (&'static str, Value),
    logprobs: Option<Logprobs<'a>>,
    finish: Option<Finish>,
    /// Present if requested.
    token_ids: Option<&'a [u32]>,
    prompt_ids: Option<&'a [u32]>,
}

impl Serialize for ChoiceJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let finish = self.finish.as_ref();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry(self.content.0, &self.content.1)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &finish.map(|f| f.reason))?;
        map.serialize_entry("stop_reason", &finish.map(|f| &f.stop))?;
        if let Some(ids) = self.prompt_ids {
            map.serialize_entry("prompt_token_ids", ids)?;
        }
        if let Some(ids) = self.token_ids {
            map.serialize_entry("token_ids", ids)?;
        }
        map.end()
    }
}

/// The log-probabilities of tokens as JSON. Written token by token: a tree of all takes much more memory.
struct Logprobs<'a> {
    api: Api,
    /// Number of alternatives in a chat's reply.
    top: usize,
    text: &'a Text,
    tokens: &'a [Scored],
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self.api {
            Api::Chat => {
                map.serialize_entry("content", &List(|t: &Scored| self.chat_entry(t), self))?;
                map.serialize_entry("refusal", &())?;
            }
            // Parallel lists.
            Api::Completion => {
                let name = |token: &Scored| Some(self.text.token_text(token.id).into());
                let logprob = |token: &Scored| {
                    let logprobs = token.logprobs.as_ref();
                    Some(logprobs.map_or(Value::Null, |l| finite(l.logprob)))
                };
                let offset = |token: &Scored| Some(token.offset.into());
                map.serialize_entry("tokens", &List(name, self))?;
                map.serialize_entry("token_logprobs", &List(logprob, self))?;
                map.serialize_entry(
                    "top_logprobs",
                    &List(|t: &Scored| Some(self.alternatives(t)), self),
                )?;
                map.serialize_entry("text_offset", &List(offset, self))?;
            }
        }
        map.end()
    }
}

impl Logprobs<'_> {
    /// A completion's alternatives of a token. The token itself is always among them, so that clients can
    /// see whether it was the most probable one.
    fn alternatives(&self, token: &Scored) -> Value {
        let Some(logprobs) = &token.logprobs else {
            return Value::Null;
        };
        let mut top = Map::new();
        for &(id, logprob) in logprobs.top.iter().chain([&(token.id, logprobs.logprob)]) {
            // Best first: of two ids with the same text, the more probable one stays.
            top.entry(self.text.token_text(id))
                .or_insert(finite(logprob));
        }
        top.into()
    }

    fn chat_entry(&self, token: &Scored) -> Option<Value> {
        let text = self.text;
        let entry = |id: u32, logprob: f32| json!({"token": text.token_text(id), "logprob": finite(logprob), "bytes": text.token_bytes(id)});
        let logprobs = token.logprobs.as_ref()?;
        let alternatives = logprobs.top.iter().take(self.top);
        let mut content = entry(token.id, logprobs.logprob);
        content["top_logprobs"] = alternatives.map(|&(id, l)| entry(id, l)).collect();
        Some(content)
    }
}

/// What a function makes of each token that it makes something of, as a list.
struct List<'a, F>(F, &'a Logprobs<'a>);

impl<F: Fn(&Scored) -> Option<Value>> Serialize for List<'_, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.1.tokens.iter().filter_map(&self.0))
    }
}

fn finite(logprob: f32) -> Value {
    logprob.max(MIN_LOGPROB).into()
}
