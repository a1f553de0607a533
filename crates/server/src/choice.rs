//! One choice of a reply: turns the engine's events into text, log-probabilities and a finish reason.
//! The conversion is the same for streamed and whole replies, and uses no sockets.

use super::choice_rules::{Rules, ToolRules};
use super::lines::Lines;
use super::piece::{
    CallHead, CallPiece, Finish, FinishKind, MessagePart, Piece, Scored, StopReason,
};
use super::speculation::Round;
use super::stop::StopMatcher;
use foretoken_core::error::{Error, Result};
use foretoken_engine::{Event, FinishReason, SpecUsage, TokenLogprobs, TokenOutput};
use foretoken_text::{Detokenizer, FreeformInput, HarmonyParser, MessageParser, Part, Text};
use rand::RngExt;
use rand::distr::Alphanumeric;
use std::sync::Arc;
use std::time::Instant;

/// A prompt that is repeated in the reply.
#[derive(Debug, Default)]
pub(super) struct Echo {
    pub text: String,
    pub ids: Vec<u32>,
    /// Whether the first id is a BOS that the tokenizer added: it is in `ids`, but not in `text`.
    pub added_bos: bool,
}

/// Assembles one choice.
pub(super) struct Choice {
    rules: Arc<Rules>,
    /// The prompt to repeat; taken by the first piece.
    echo: Option<Arc<Echo>>,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    lines: Lines,
    message: MessageParser,
    /// Number of calls that have begun.
    calls: usize,
    /// The input of the last call, if it is one of a custom tool.
    input: Option<FreeformInput>,
    /// Number of characters before the next token.
    chars: usize,
    completion_tokens: usize,
    reasoning_tokens: usize,
    cached_tokens: usize,
    /// When the first tokens came.
    first_at: Option<Instant>,
    /// Sum of the tokens' log-probabilities, if the engine computes them.
    logprob: f64,
    spec: SpecUsage,
    /// When its first token came.
    first_token: Option<Instant>,
}

impl Choice {
    pub fn new(rules: Arc<Rules>, echo: Option<Arc<Echo>>) -> Self {
        let message = &rules.message;
        let tools = message.tools.as_ref();
        let harmony = message.harmony.as_ref().map(|prompt| {
            let (names, max_calls) = tools.map_or_else(
                || (Arc::default(), usize::MAX),
                |tools| (tools.names(), tools.max_calls),
            );
            HarmonyParser::new(prompt, names, max_calls)
        });
        let tools = tools.filter(|_| harmony.is_none());
        let looks_in_thoughts = message.reasoning.is_some() && !message.has_grammar;
        Self {
            detokenizer: rules.detokenizer(),
            message: MessageParser {
                reasoning: message.reasoning_parser(),
                thought: tools
                    .filter(|_| looks_in_thoughts)
                    .map(ToolRules::thought_parser),
                tools: tools.and_then(|_| message.tool_parser()),
                harmony,
            },
            rules,
            chars: echo.as_ref().map_or(0, |echo| echo.text.chars().count()),
            echo,
            matcher: StopMatcher::default(),
            lines: Lines::default(),
            calls: 0,
            input: None,
            completion_tokens: 0,
            reasoning_tokens: 0,
            cached_tokens: 0,
            first_at: None,
            logprob: 0.0,
            spec: SpecUsage::default(),
            first_token: None,
        }
    }

    /// Number of tokens so far, including the one that ended the text.
    pub fn completion_tokens(&self) -> usize {
        self.completion_tokens
    }

    /// Whether the model marks what it thinks.
    pub fn marks_reasoning(&self) -> bool {
        let message = &self.rules.message;
        message.reasoning.is_some() || message.harmony.is_some()
    }

    /// Number of tokens so far that are reasoning, with its markers.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Tokens of its prompt that were in the prefix cache.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// When the first tokens came; `None` before them.
    pub fn first_at(&self) -> Option<Instant> {
        self.first_at
    }

    /// Whether the text ended at a line, by its [`LineRules`].
    pub fn ended_at_line(&self) -> bool {
        self.lines.have_ended()
    }

    /// Mean log-probability of its tokens, if the engine computes them.
    pub fn mean_logprob(&self) -> f64 {
        self.logprob / self.completion_tokens.max(1) as f64
    }

    /// When its first token came; `None` = there is none yet.
    pub fn first_token(&self) -> Option<Instant> {
        self.first_token
    }

    /// Speculation figures so far.
    pub fn spec(&self) -> SpecUsage {
        self.spec
    }

    /// Processes one event. Must not be called again after it returned a piece with `finish`.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn on_event(&mut self, text: &Text, event: Event) -> Result<Piece> {
        match event {
            Event::Prompt(logprobs) => Ok(self.on_prompt(text, logprobs)),
            Event::Tokens {
                tokens,
                round,
                finish,
                spec,
                cached_tokens,
            } => {
                self.first_token.get_or_insert_with(Instant::now);
                self.cached_tokens = cached_tokens;
                self.first_at.get_or_insert_with(Instant::now);
                let before = std::mem::replace(&mut self.spec, spec);
                let known = self.completion_tokens;
                let round = round.map(Round::new);
                let piece = self.on_tokens(text, tokens, round, finish);
                // If a stop string ended the text within a step, draft tokens accepted after it do not
                // count.
                let kept = self.completion_tokens - known;
                let spec = &mut self.spec;
                spec.tested = spec.tested.min(before.tested + kept);
                spec.accepted = spec.accepted.min(before.accepted + kept);
                spec.lossy = spec.lossy.min(before.lossy + kept);
                spec.predicted_accepted =
                    (spec.predicted_accepted).min(before.predicted_accepted + kept);
                Ok(piece)
            }
            Event::Embedding { .. } => Err(Error::internal("an embedding is no text")),
            Event::Failed(error) => Err(error),
        }
    }

    fn on_prompt(&mut self, text: &Text, logprobs: Vec<Option<TokenLogprobs>>) -> Piece {
        let mut piece = Piece::default();
        let Some(echo) = self.echo.take() else {
            return piece;
        };
        piece.push(MessagePart::Text(echo.text.clone()));
        let mut detokenizer = Detokenizer::with_special();
        let mut offset = 0;
        for (i, (&id, logprobs)) in echo.ids.iter().zip(logprobs).enumerate() {
            piece.logprobs.push(Scored {
                id,
                offset,
                logprobs,
            });
            if !(i == 0 && echo.added_bos) {
                offset += detokenizer.push(text, id).chars().count();
            }
        }
        piece
    }

    fn on_tokens(
        &mut self,
        text: &Text,
        tokens: Vec<TokenOutput>,
        round: Option<Round>,
        finish: Option<FinishReason>,
    ) -> Piece {
        let mut piece = Piece {
            rounds: Vec::from_iter(round),
            ..Piece::default()
        };
        if let Some(echo) = self.echo.take() {
            piece.push(MessagePart::Text(echo.text.clone()));
        }
        let stop_token = match finish {
            Some(FinishReason::Stop { .. }) => tokens.len().checked_sub(1),
            _ => None,
        };
        for (i, token) in tokens.into_iter().enumerate() {
            self.completion_tokens += 1;
            if let Some(logprobs) = &token.logprobs {
                self.logprob += f64::from(logprobs.logprob);
            }
            if self.rules.token_ids {
                piece.token_ids.push(token.id);
            }
            if self.rules.logprobs {
                piece.logprobs.push(Scored {
                    id: token.id,
                    offset: self.chars,
                    logprobs: token.logprobs,
                });
            }
            let ends = stop_token == Some(i);
            let shown = !ends || self.rules.stops.are_shown();
            let new = if shown {
                self.detokenizer.push(text, token.id)
            } else {
                String::new()
            };
            if let Some(round) = piece.rounds.last_mut() {
                round.push(token.id, &new);
            }
            if !shown {
                break;
            }
            let reasons = self.message.is_reasoning();
            let ends = self.show(new, &mut piece);
            self.reasoning_tokens += usize::from(reasons || self.message.is_reasoning());
            if ends {
                return piece;
            }
        }
        if let Some(finish) = finish {
            let rest = self.detokenizer.finish();
            if !self.show(rest, &mut piece) {
                let rest = self.matcher.finish();
                let rest = self.lines.push(&self.rules.lines, rest) + &self.lines.finish();
                let parts = self.message.push(rest);
                self.add(parts, &mut piece);
                self.end(self.ending(finish), &mut piece);
            }
        }
        piece
    }

    /// Adds decoded text; returns whether it completed a stop string, or the message.
    fn show(&mut self, new: String, piece: &mut Piece) -> bool {
        self.chars += new.chars().count();
        let may_stop = self.completion_tokens >= self.rules.min_tokens;
        let (shown, stop) = self.matcher.push(&self.rules.stops, new, may_stop);
        let mut stop = stop.map(|stop| StopReason::Text(stop.into()));
        let mut shown = self.lines.push(&self.rules.lines, shown);
        if self.lines.have_ended() {
            // The line came before the stop string.
            stop = None;
        } else if stop.is_some() {
            shown.push_str(&self.lines.finish());
        }
        let parts = self.message.push(shown);
        self.add(parts, piece);
        let ends = stop.is_some() || self.lines.have_ended() || self.message.is_complete();
        if ends {
            let reason = FinishKind::Stop;
            self.end(Finish { reason, stop }, piece);
        }
        ends
    }

    fn tools(&self) -> Option<&ToolRules> {
        self.rules.message.tools.as_ref()
    }

    fn add(&mut self, parts: Vec<Part>, piece: &mut Piece) {
        let forced = self.tools().is_some_and(|tools| tools.forced);
        for part in parts {
            if !matches!(part, Part::Arguments(_)) {
                self.end_input(piece);
            }
            piece.push(match part {
                Part::Content(_) if forced => continue,
                Part::Reasoning(_) if self.rules.message.hide_reasoning => continue,
                Part::Content(text) => MessagePart::Text(text),
                Part::Reasoning(text) => MessagePart::Reasoning(text),
                Part::CallStart(name) => {
                    self.calls += 1;
                    let custom = self.tools().map_or(&[][..], |tools| &tools.custom[..]);
                    self.input = custom.contains(&name).then(FreeformInput::default);
                    self.call_piece(Some(name), String::new())
                }
                Part::Arguments(arguments) => {
                    let arguments = match &mut self.input {
                        Some(input) => input.push(&arguments),
                        None => arguments,
                    };
                    if arguments.is_empty() {
                        continue;
                    }
                    self.call_piece(None, arguments)
                }
            });
        }
    }

    /// Shows the rest of a custom tool's input.
    fn end_input(&mut self, piece: &mut Piece) {
        let rest = self.input.as_mut().map(FreeformInput::finish);
        if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
            let rest = self.call_piece(None, rest);
            piece.push(rest);
        }
        self.input = None;
    }

    /// More of the last call, or, with its name, its beginning.
    fn call_piece(&self, name: Option<String>, arguments: String) -> MessagePart {
        let head = |name| CallHead {
            id: self.call_id(),
            name,
        };
        MessagePart::Call(CallPiece {
            index: self.calls.saturating_sub(1),
            head: name.map(head),
            is_custom: self.input.is_some(),
            arguments,
        })
    }

    /// A new id for a call, in the form that the model's template expects of it.
    fn call_id(&self) -> String {
        let len = self.tools().and_then(|tools| tools.format.id_len());
        let (prefix, len) = len.map_or(("call_", 24), |len| ("", len));
        let letters = rand::rng().sample_iter(Alphanumeric).take(len);
        let id: String = letters.map(char::from).collect();
        format!("{prefix}{id}")
    }

    /// Ends the text: what the parser holds is shown.
    fn end(&mut self, mut finish: Finish, piece: &mut Piece) {
        let parts = self.message.finish();
        self.add(parts, piece);
        self.end_input(piece);
        let named = self.tools().is_some_and(|tools| tools.named);
        if finish.reason == FinishKind::Stop && self.calls > 0 && !named {
            finish.reason = FinishKind::ToolCalls;
        }
        piece.finish = Some(finish);
    }

    fn ending(&self, finish: FinishReason) -> Finish {
        match finish {
            FinishReason::Length => Finish {
                reason: FinishKind::Length,
                stop: None,
            },
            FinishReason::Stop { token } => {
                let is_stop_id = self.rules.stop_token_ids.contains(&token);
                let name = self.rules.stops.named(token);
                Finish {
                    reason: FinishKind::Stop,
                    stop: is_stop_id
                        .then_some(StopReason::Token(token))
                        .or_else(|| name.map(|name| StopReason::Text(name.to_owned()))),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
