//! Builds OpenAI's reply objects from pieces of choices.

use super::choice::Choice;
use super::conversation::CallKind;
use super::piece::{CallHead, CallPiece, MessagePart, Piece, Scored};
use super::reply_objects::{
    AssistantMessage, CallDelta, CalledTool, ChatChoice, ChatLogprobs, ChunkChoice, ChunkUsage,
    CompletionChoice, CompletionLogprobs, CompletionTokens, CustomCall, CustomDelta, Delta,
    FunctionCall, FunctionDelta, ObjectName, PredictedTokens, PromptDetails, Reply, Speculation,
    ToolCall, Usage,
};
use super::speculation::RoundText;
use axum::response::sse::Event;
use foretoken_engine::SpecUsage;
use foretoken_text::Text;
use serde::Serialize;
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
pub(super) struct ReplyHeader {
    pub api: Api,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    pub fingerprint: Option<Arc<str>>,
    /// Whether `usage` reports speculation.
    pub speculates: bool,
    /// The name of the request's lossy rule.
    pub lossy: Option<&'static str>,
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

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// A new id that begins with `prefix`.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}

impl ReplyHeader {
    /// The header of a chat's reply that fails before its prompt is known.
    pub fn without_prompt(model: String) -> Self {
        Self {
            api: Api::Chat,
            id: String::new(),
            created: now(),
            model,
            fingerprint: None,
            speculates: false,
            lossy: None,
            prompt_tokens: 0,
            choices_per_prompt: 1,
            shown_per_prompt: 1,
            prompt_ids: None,
            logprobs: None,
        }
    }

    fn reply<C>(&self, object: ObjectName, choices: Vec<C>) -> Reply<'_, C> {
        Reply {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: self.fingerprint.as_deref(),
            choices,
            usage: None,
            prompt_token_ids: None,
        }
    }

    /// The ids of a chat's prompt, if requested.
    fn chat_ids(&self) -> Option<&[u32]> {
        let ids = self.prompt_ids.as_ref().and_then(|ids| ids.first())?;
        (self.api == Api::Chat).then_some(ids)
    }

    /// The JSON text of the reply, not streamed: its beginning, each choice, and its end, made one after the
    /// other. serde writes a value at once, and the text of log-probabilities takes six times their memory: 16
    /// choices of 2,000 tokens with 20 alternatives are 6.7 MB, their text 39 MB, and one choice of it 2.5 MB.
    pub fn whole(
        self,
        text: Arc<Text>,
        pieces: Vec<Piece>,
        usage: Usage,
    ) -> impl Iterator<Item = Vec<u8>> + use<> {
        const CHOICES: &str = "\"choices\":[";
        let object = match self.api {
            Api::Completion => ObjectName::Completion,
            Api::Chat => ObjectName::Chat,
        };
        let mut start = json_text(&Reply {
            usage: Some(Some(usage)),
            prompt_token_ids: self.chat_ids(),
            ..self.reply::<()>(object, Vec::new())
        });
        // In a string the quotes would be escaped.
        let at = start.find(CHOICES).map_or(0, |at| at + CHOICES.len());
        let end = start.split_off(at);
        let pieces = pieces.into_iter().enumerate();
        let choices = pieces.map(move |(index, piece)| {
            let choice = match self.api {
                Api::Completion => {
                    json_text(&self.completion_choice(&text, index, &piece, true, None))
                }
                Api::Chat => json_text(&self.chat_choice(&text, index, &piece)),
            };
            match index {
                0 => choice,
                _ => format!(",{choice}"),
            }
        });
        let start = std::iter::once(start);
        let parts = start.chain(choices).chain(std::iter::once(end));
        parts.map(String::into_bytes)
    }

    /// The first chunk of a choice in a streamed chat; `None` for completions.
    pub fn opening(&self, index: usize, usage: ChunkUsage) -> Option<Event> {
        let delta = Delta {
            role: Some("assistant"),
            content: Some(""),
            ..Delta::default()
        };
        let choice = ChunkChoice {
            index,
            delta,
            ..ChunkChoice::default()
        };
        (self.api == Api::Chat).then(|| {
            event(&Reply {
                usage,
                prompt_token_ids: self.chat_ids(),
                ..self.reply(ObjectName::Chunk, vec![choice])
            })
        })
    }

    /// The chunks of a stream that show a piece, the first one of its choice or not. A chat's chunk has one
    /// kind of delta; the last one says how the choice ended.
    pub fn chunks(
        &self,
        text: &Text,
        index: usize,
        piece: &Piece,
        first: bool,
        usage: ChunkUsage,
    ) -> Vec<Event> {
        let rounds: Vec<_> = piece.rounds.iter().map(|round| round.shown(text)).collect();
        let mut rounds = Some(rounds).filter(|rounds| !rounds.is_empty());
        if self.api == Api::Completion {
            let choice = self.completion_choice(text, index, piece, first, rounds);
            return vec![event(&Reply {
                usage,
                ..self.reply(ObjectName::Completion, vec![choice])
            })];
        }
        let deltas = deltas(piece);
        let last = deltas.len() - 1;
        let chunk = |(i, delta)| {
            let finish = piece.finish.as_ref().filter(|_| i == last);
            let (tokens, ids) = if i == 0 {
                (&piece.logprobs[..], &piece.token_ids[..])
            } else {
                Default::default()
            };
            let choice = ChunkChoice {
                index,
                delta,
                logprobs: self.chat_logprobs(text, tokens),
                finish_reason: finish.map(|finish| finish.reason),
                stop_reason: finish.and_then(|finish| finish.stop.as_ref()),
                token_ids: self.prompt_ids.is_some().then_some(ids),
                speculation: rounds.take(),
            };
            event(&Reply {
                usage,
                ..self.reply(ObjectName::Chunk, vec![choice])
            })
        };
        deltas.into_iter().enumerate().map(chunk).collect()
    }

    /// The last chunk of a stream with `include_usage`.
    pub fn usage_chunk(&self, choices: &[Choice]) -> Event {
        let object = match self.api {
            Api::Completion => ObjectName::Completion,
            Api::Chat => ObjectName::Chunk,
        };
        event(&Reply {
            usage: Some(Some(self.usage(choices))),
            ..self.reply::<()>(object, Vec::new())
        })
    }

    fn completion_choice<'a>(
        &'a self,
        text: &'a Text,
        index: usize,
        piece: &'a Piece,
        first: bool,
        speculation: Option<Vec<RoundText<'a>>>,
    ) -> CompletionChoice<'a> {
        let finish = piece.finish.as_ref();
        let tokens = self.logprobs.and(Some(&piece.logprobs[..]));
        let tokens = tokens.filter(|tokens| !tokens.is_empty());
        CompletionChoice {
            index,
            text: piece.text(),
            logprobs: tokens.map(|tokens| CompletionLogprobs::new(text, tokens)),
            finish_reason: finish.map(|finish| finish.reason),
            stop_reason: finish.and_then(|finish| finish.stop.as_ref()),
            prompt_token_ids: self.prompt_ids_of(index).filter(|_| first),
            token_ids: self.prompt_ids.is_some().then_some(&piece.token_ids),
            speculation,
        }
    }

    fn chat_choice<'a>(&self, text: &'a Text, index: usize, piece: &'a Piece) -> ChatChoice<'a> {
        let finish = piece.finish.as_ref();
        ChatChoice {
            index,
            message: message(piece),
            logprobs: self.chat_logprobs(text, &piece.logprobs),
            finish_reason: finish.map(|finish| finish.reason),
            stop_reason: finish.and_then(|finish| finish.stop.as_ref()),
            token_ids: self.prompt_ids.is_some().then_some(&piece.token_ids),
        }
    }

    /// The log-probabilities of `tokens`, if requested and there are any.
    pub fn chat_logprobs<'a>(
        &self,
        text: &'a Text,
        tokens: &'a [Scored],
    ) -> Option<ChatLogprobs<'a>> {
        let top = self.logprobs.filter(|_| !tokens.is_empty())?;
        Some(ChatLogprobs::new(text, tokens, top))
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

    /// Returns the cost of the reply.
    pub fn usage(&self, choices: &[Choice]) -> Usage {
        let completion_tokens: usize = choices.iter().map(Choice::completion_tokens).sum();
        let spec = choices
            .iter()
            .map(Choice::spec)
            .fold(SpecUsage::default(), |sum, of_choice| sum + of_choice);
        let marks_reasoning = choices.iter().any(Choice::marks_reasoning);
        let of_reasoning = || choices.iter().map(Choice::reasoning_tokens).sum();
        let reasoning_tokens = marks_reasoning.then(of_reasoning);
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens,
            total_tokens: self.prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails {
                cached_tokens: self.cached_tokens(choices),
                audio_tokens: 0,
            },
            completion_tokens_details: (self.speculates || reasoning_tokens.is_some()).then(|| {
                CompletionTokens {
                    reasoning_tokens,
                    predicted: self.speculates.then_some(PredictedTokens {
                        accepted_prediction_tokens: spec.predicted_accepted,
                        rejected_prediction_tokens: spec.predicted - spec.predicted_accepted,
                    }),
                }
            }),
            speculative_decoding: self.speculates.then(|| Speculation {
                num_drafts: spec.rounds,
                num_draft_tokens: spec.drafted,
                num_accepted_tokens: spec.accepted,
                acceptance_rate: spec.acceptance_rate(),
                mean_acceptance_length: spec.mean_accepted_length(),
                lossy_acceptance: self.lossy,
                num_lossy_tokens: self.lossy.map(|_| spec.lossy),
            }),
        }
    }
}

/// The message of a whole reply. There is no content where there are only calls or reasoning.
fn message(piece: &Piece) -> AssistantMessage<'_> {
    let (content, reasoning) = (piece.text(), piece.reasoning());
    let is_content = |part: &MessagePart| matches!(part, MessagePart::Text(_));
    let others = !piece.parts.iter().all(is_content);
    let calls = piece.calls().map(|call| {
        let head = call.head.as_ref();
        let name = head.map_or("", |head| &head.name);
        let written = call.arguments.as_str();
        ToolCall {
            id: head.map_or("", |head| &head.id),
            call: if call.is_custom {
                let custom = CustomCall {
                    name,
                    input: written,
                };
                CalledTool::Custom { custom }
            } else {
                let function = FunctionCall {
                    name,
                    arguments: written,
                };
                CalledTool::Function { function }
            },
        }
    });
    let calls: Vec<_> = calls.collect();
    AssistantMessage {
        role: "assistant",
        content: Some(content).filter(|content| !(content.is_empty() && others)),
        refusal: None,
        reasoning_content: Some(reasoning).filter(|text| !text.is_empty()),
        tool_calls: Some(calls).filter(|calls| !calls.is_empty()),
    }
}

/// The deltas of a piece of a chat: at least one, and an empty one if it has nothing to add or ends after
/// a call.
fn deltas(piece: &Piece) -> Vec<Delta<'_>> {
    let mut deltas = Vec::new();
    for part in &piece.parts {
        match part {
            MessagePart::Reasoning(text) => deltas.push(Delta {
                reasoning_content: Some(text),
                ..Delta::default()
            }),
            MessagePart::Text(text) => deltas.push(Delta {
                content: Some(text),
                ..Delta::default()
            }),
            MessagePart::Call(call) => call_deltas(call, &mut deltas),
        }
    }
    if deltas.is_empty() || piece.calls().next().is_some() && piece.finish.is_some() {
        deltas.push(Delta::default());
    }
    deltas
}

/// Appends the deltas of a tool call to `deltas`: its id and name, if the call begins, and then what its arguments
/// gain.
fn call_deltas<'a>(call: &'a CallPiece, deltas: &mut Vec<Delta<'a>>) {
    let kind = if call.is_custom {
        CallKind::Custom
    } else {
        CallKind::Function
    };
    let delta = |id, is_head: bool, name, written| {
        let function = FunctionDelta {
            name,
            arguments: written,
        };
        let custom = CustomDelta {
            name,
            input: written,
        };
        Delta {
            tool_calls: Some([CallDelta {
                index: call.index,
                id,
                kind: is_head.then_some(kind),
                function: (!call.is_custom).then_some(function),
                custom: call.is_custom.then_some(custom),
            }]),
            ..Delta::default()
        }
    };
    if let Some(CallHead { id, name }) = &call.head {
        deltas.push(delta(Some(id.as_str()), true, Some(name.as_str()), ""));
    }
    deltas.extend(some(&call.arguments).map(|text| delta(None, false, None, text)));
}

/// A text, if there is any.
fn some(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// JSON of an answer: strings and numbers can always be written.
pub(super) fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// An event without a name.
pub(super) fn event(value: &impl Serialize) -> Event {
    Event::default().data(json_text(value))
}

/// An event whose name is the `type` of its data; `data` has the other fields.
pub(super) fn typed_event(name: &str, data: impl Serialize) -> Event {
    #[derive(Serialize)]
    struct Typed<'a, T> {
        #[serde(rename = "type")]
        name: &'a str,
        #[serde(flatten)]
        data: T,
    }

    Event::default()
        .event(name)
        .data(json_text(&Typed { name, data }))
}
