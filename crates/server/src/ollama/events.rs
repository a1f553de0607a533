//! Builds the answer, whole or as lines.

use super::error::OllamaError;
use crate::blocks::{Blocks, Change, OutputBlock};
use crate::choice::Choice;
use crate::piece::{FinishKind, Piece, Scored};
use crate::reply::{ReplyHeader, json_text};
use crate::reply_objects::{List, Speculation, TokenLogprob};
use crate::stream::Shape;
use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat, Utc};
use foretoken_core::error::Error;
use foretoken_text::Text;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_stream::{Stream, StreamExt};

/// The media type of lines of JSON.
pub(super) const LINES: &str = "application/x-ndjson";

/// The route, which says how an answer has its text.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form {
    Chat,
    Generate,
}

/// An answer, or a line of one.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaAnswer")]
pub(crate) struct Answer<'a> {
    model: Cow<'a, str>,
    created_at: String,
    #[serde(flatten)]
    said: Said<'a>,
    /// One for each token since the last line, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<List<'a, TokenLogprob<'a>>>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<DoneReason>,
    #[serde(flatten)]
    cost: Option<Cost>,
}

#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "OllamaText")]
enum Said<'a> {
    Chat {
        message: Message<'a>,
    },
    Generate {
        response: Cow<'a, str>,
        #[serde(skip_serializing_if = "str::is_empty")]
        #[schemars(with = "Option<String>")]
        thinking: Cow<'a, str>,
    },
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaAssistantMessage")]
struct Message<'a> {
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    content: Cow<'a, str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    #[schemars(with = "Option<String>")]
    thinking: Cow<'a, str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Option<Vec<Call<'a>>>")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaCall")]
struct Call<'a> {
    id: &'a str,
    function: CalledFunction<'a>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OllamaFunction")]
struct CalledFunction<'a> {
    index: usize,
    name: &'a str,
    arguments: Map<String, Value>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "OllamaDoneReason")]
enum DoneReason {
    Stop,
    Length,
    Load,
    Unload,
}

/// What an answer took: numbers of tokens, and nanoseconds.
#[derive(Serialize, JsonSchema)]
struct Cost {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    /// Those of the prompt that were cached.
    prompt_eval_cached_count: usize,
    /// Until the first token came.
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculative_decoding: Option<Speculation>,
}

/// The parts of an answer.
#[derive(Default)]
struct Parts<'a> {
    text: Cow<'a, str>,
    thinking: Cow<'a, str>,
    calls: Vec<Call<'a>>,
}

/// A time as this API writes it.
pub(super) fn written(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// As many nanoseconds as have passed.
pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl<'a> Answer<'a> {
    fn new(form: Form, model: impl Into<Cow<'a, str>>, parts: Parts<'a>) -> Self {
        let Parts {
            text,
            thinking,
            calls,
        } = parts;
        Self {
            model: model.into(),
            created_at: written(Utc::now()),
            said: match form {
                Form::Chat => Said::Chat {
                    message: Message {
                        role: "assistant",
                        content: text,
                        thinking,
                        tool_calls: calls,
                    },
                },
                Form::Generate => Said::Generate {
                    response: text,
                    thinking,
                },
            },
            logprobs: None,
            done: false,
            done_reason: None,
            cost: None,
        }
    }

    /// The answer to a request that only loads the model, or unloads it.
    pub(super) fn load(form: Form, model: String, unloads: bool) -> Self {
        Self {
            done: true,
            done_reason: Some(if unloads {
                DoneReason::Unload
            } else {
                DoneReason::Load
            }),
            ..Self::new(form, model, Parts::default())
        }
    }
}

/// The state of a reply.
pub(crate) struct OllamaReply {
    form: Form,
    /// The model's name as the client has it.
    model: String,
    header: ReplyHeader,
    /// When the request was read.
    started: Instant,
    blocks: Blocks,
    /// The tokens since the last line, if log-probabilities were requested.
    scored: Vec<Scored>,
}

impl OllamaReply {
    pub(super) fn new(form: Form, model: String, header: &ReplyHeader, started: Instant) -> Self {
        Self {
            form,
            model,
            header: header.clone(),
            started,
            blocks: Blocks::joined(),
            scored: Vec::new(),
        }
    }

    fn logprobs<'a>(
        &self,
        text: &'a Text,
        tokens: &'a [Scored],
    ) -> Option<List<'a, TokenLogprob<'a>>> {
        let logprobs = self.header.chat_logprobs(text, tokens)?;
        Some(logprobs.content)
    }

    fn answer<'a>(&'a self, parts: Parts<'a>) -> Answer<'a> {
        Answer::new(self.form, &*self.model, parts)
    }

    /// The answer, or its last line.
    fn ended<'a>(&'a self, parts: Parts<'a>, choices: &[Choice]) -> Answer<'a> {
        let finish = self.blocks.finish.as_ref().map(|finish| finish.reason);
        Answer {
            done: true,
            done_reason: Some(match finish {
                Some(FinishKind::Length) => DoneReason::Length,
                _ => DoneReason::Stop,
            }),
            cost: Some(self.cost(choices)),
            ..self.answer(parts)
        }
    }

    fn cost(&self, choices: &[Choice]) -> Cost {
        let total = self.started.elapsed();
        let first = choices.first().and_then(Choice::first_token);
        let prompt = first.map_or(total, |first| first.duration_since(self.started));
        let usage = self.header.usage(choices);
        Cost {
            total_duration: nanoseconds(total),
            load_duration: 0,
            prompt_eval_count: usage.prompt_tokens,
            prompt_eval_cached_count: usage.prompt_tokens_details.cached_tokens,
            prompt_eval_duration: nanoseconds(prompt),
            eval_count: usage.completion_tokens,
            eval_duration: nanoseconds(total.saturating_sub(prompt)),
            speculative_decoding: usage.speculative_decoding,
        }
    }

    /// The call that the block with this index is; `None` if it is none.
    fn call(&self, index: usize) -> Option<Call<'_>> {
        let blocks = self.blocks.list();
        let OutputBlock::Call {
            head, arguments, ..
        } = &blocks[index]
        else {
            return None;
        };
        let is_call = |block: &&OutputBlock| matches!(block, OutputBlock::Call { .. });
        Some(Call {
            id: &head.id,
            function: CalledFunction {
                index: blocks[..index].iter().filter(is_call).count(),
                name: &head.name,
                // Those of a call that was cut off may be no JSON.
                arguments: serde_json::from_str(arguments).unwrap_or_default(),
            },
        })
    }

    /// What the line for a change of a block has; `None` = there is no line. Calls have one when they are complete.
    fn change(&self, index: usize, change: Change) -> Option<Parts<'_>> {
        match (change, &self.blocks.list()[index]) {
            (Change::Extend(text), OutputBlock::Text(_)) => Some(Parts {
                text: text.into(),
                ..Parts::default()
            }),
            (Change::Extend(text), OutputBlock::Reasoning(_)) => Some(Parts {
                thinking: text.into(),
                ..Parts::default()
            }),
            (Change::End, OutputBlock::Call { .. }) => Some(Parts {
                calls: self.call(index).into_iter().collect(),
                ..Parts::default()
            }),
            _ => None,
        }
    }

    fn all(&self) -> Parts<'_> {
        let blocks = self.blocks.list();
        let mut parts = Parts {
            calls: (0..blocks.len()).filter_map(|i| self.call(i)).collect(),
            ..Parts::default()
        };
        for block in blocks {
            match block {
                OutputBlock::Text(text) => parts.text += text.as_str(),
                OutputBlock::Reasoning(text) => parts.thinking += text.as_str(),
                OutputBlock::Call { .. } => {}
            }
        }
        parts
    }
}

/// A line of a stream.
pub(super) fn line(value: &impl Serialize) -> String {
    let mut line = json_text(value);
    line.push('\n');
    line
}

/// The response that sends `lines`.
pub(super) fn sent(lines: impl Stream<Item = String> + Send + 'static) -> Response {
    let body = Body::from_stream(lines.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, LINES)], body).into_response()
}

impl Shape for OllamaReply {
    type Event = String;

    fn id(&self) -> &str {
        &self.header.id
    }

    fn whole(mut self, text: Arc<Text>, pieces: Vec<Piece>, choices: &[Choice]) -> Response {
        for mut piece in pieces {
            self.scored.append(&mut piece.logprobs);
            self.blocks.push(piece);
        }
        Json(Answer {
            logprobs: self.logprobs(&text, &self.scored),
            ..self.ended(self.all(), choices)
        })
        .into_response()
    }

    fn piece(&mut self, text: &Text, _: usize, mut piece: Piece, _: &[Choice]) -> Vec<String> {
        let mut scored = std::mem::take(&mut self.scored);
        scored.append(&mut piece.logprobs);
        let ends = piece.finish.is_some();
        let changes = self.blocks.push(piece).into_iter();
        let parts = changes.filter_map(|(index, change)| self.change(index, change));
        let mut parts: Vec<Parts<'_>> = parts.collect();
        // The token that ended the text.
        if parts.is_empty() && ends && !scored.is_empty() {
            parts.push(Parts::default());
        }
        let mut tokens = &scored[..];
        let lines = parts.into_iter().map(|parts| {
            let tokens = std::mem::take(&mut tokens);
            line(&Answer {
                logprobs: self.logprobs(text, tokens),
                ..self.answer(parts)
            })
        });
        let lines: Vec<String> = lines.collect();
        if lines.is_empty() {
            self.scored = scored;
        }
        lines
    }

    fn end(&mut self, choices: &[Choice]) -> Vec<String> {
        vec![line(&self.ended(Parts::default(), choices))]
    }

    fn failed(&mut self, error: &Error) -> Vec<String> {
        vec![line(&OllamaError::of(error))]
    }

    fn sent(lines: impl Stream<Item = String> + Send + 'static) -> Response {
        sent(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::MessagePart;
    use crate::reply::Api;

    #[test]
    fn messages_of_a_kind_stay_on_lines_of_their_own() {
        let header = ReplyHeader {
            api: Api::Chat,
            id: String::new(),
            created: 0,
            model: String::new(),
            fingerprint: None,
            speculates: false,
            lossy: None,
            prompt_tokens: 1,
            choices_per_prompt: 1,
            shown_per_prompt: 1,
            prompt_ids: None,
            logprobs: None,
        };
        let mut reply = OllamaReply::new(Form::Chat, "m".into(), &header, Instant::now());
        reply.blocks.push(Piece {
            parts: vec![
                MessagePart::Reasoning("Hm.".into()),
                MessagePart::Text("Let me check.".into()),
                MessagePart::Reasoning("\n5?".into()),
                MessagePart::Text("\nIt is 5".into()),
            ],
            ..Piece::default()
        });
        let all = reply.all();
        assert_eq!(all.text, "Let me check.\nIt is 5");
        assert_eq!(all.thinking, "Hm.\n5?");
    }
}
