//! `foretoken chat`: a conversation in the terminal, with a server of OpenAI's API.

mod client;
mod command;
mod input;
mod paint;
mod parameters;

use crate::error::{Error, Result, clipped};
use crate::parse::{at_least_one, temperature};
use crate::signals::{self, Interrupt};
use clap::Args;
use client::{AnswerPart, ChatClient, ChatTurn, SpeculationRound};
use command::{Action, HELP};
use input::{Input, TypedLine};
use paint::{Painter, Style};
use parameters::AnswerParameters;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

pub use client::Endpoint;
pub(crate) use client::is_loopback;
pub use paint::shows_colours;

/// The role of the message before a conversation.
const SYSTEM: &str = "system";

/// The flags of `foretoken chat`, without those of the engine.
#[derive(Debug, Clone, Default, PartialEq, Args)]
#[command(next_help_heading = "Chat")]
#[group(skip)]
pub struct ChatOptions {
    /// The message of role system before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Temperature of the answers [default: the server's].
    #[arg(long, value_name = "T", value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Maximum tokens of an answer [default: the server's].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
}

/// Talks to the server until the user, or the file that stdin is, ends. Only answers go to stdout, but on a
/// terminal colours and figures, too.
///
/// # Errors
/// `Setup`, if the server cannot be used, or if it fails where nobody types.
pub fn run(endpoint: &Endpoint, options: &ChatOptions) -> Result<()> {
    let client = Arc::new(ChatClient::connect(endpoint)?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))?;
    let mut input = Input::new()?;
    let result = TerminalChat::new(client, options.clone()).run(&mut input, &runtime);
    // A thread may still wait for a line.
    runtime.shutdown_background();
    result
}

/// A conversation.
struct TerminalChat {
    client: Arc<ChatClient>,
    /// The message of role system before the conversation.
    system: Option<String>,
    parameters: AnswerParameters,
    messages: Vec<ChatTurn>,
    painter: Painter,
    /// Whether stdout is a terminal.
    terminal: bool,
}

/// An answer so far.
#[derive(Default)]
struct StreamedAnswer {
    text: String,
    finish: Option<String>,
    /// Tokens by the server's count, or by that of the rounds.
    tokens: usize,
    drafted: usize,
    accepted: usize,
    /// When the first and the last part came, and the tokens of the first one.
    first: Option<(Instant, usize)>,
    last: Option<Instant>,
}

impl TerminalChat {
    fn new(client: Arc<ChatClient>, options: ChatOptions) -> Self {
        let terminal = io::stdout().is_terminal();
        let colours = terminal && shows_colours();
        let mut chat = Self {
            client,
            system: options.system,
            parameters: AnswerParameters::new(options.temperature, options.max_tokens),
            messages: Vec::new(),
            painter: Painter::new(terminal, colours),
            terminal,
        };
        chat.clear();
        chat
    }

    /// Begins the conversation anew.
    fn clear(&mut self) {
        self.messages.clear();
        self.begin_with_system();
    }

    /// Puts the system message before the conversation, in place of one that is there.
    fn begin_with_system(&mut self) {
        self.messages.retain(|turn| turn.role != SYSTEM);
        let system = self.system.iter().map(|text| ChatTurn {
            role: SYSTEM,
            content: text.clone(),
        });
        self.messages.splice(0..0, system);
    }

    /// Sets the system message; an empty one is none.
    fn set_system(&mut self, text: &str) {
        self.system = Some(text.to_owned()).filter(|text| !text.is_empty());
        self.begin_with_system();
    }

    /// The model, the system message and the parameters, for people.
    fn state(&self) -> String {
        let (model, url) = (clipped(self.client.model()), self.client.url());
        let system = self.system.as_deref().unwrap_or("none");
        let parameters = self.parameters.lines();
        let parameters = parameters.unwrap_or("the server's\n".into());
        format!("{model} at {url}\n\nsystem message: {system}\n\nparameters:\n{parameters}")
    }

    fn run(&mut self, input: &mut Input, runtime: &Runtime) -> Result<()> {
        // One listener for all, so that no signal is lost between a line and its answer.
        let mut interrupt = runtime.block_on(async { signals::interrupt() })?;
        if input.is_terminal() {
            eprintln!("{}", self.greeting());
        }
        loop {
            let line = match input.next(runtime, &mut interrupt)? {
                TypedLine::Line(line) => line,
                TypedLine::Interrupted => {
                    eprintln!("Ctrl-D or /exit ends the chat.");
                    continue;
                }
                TypedLine::End => return Ok(()),
            };
            match Action::of(&line) {
                Action::Nothing => {}
                Action::Exit => return Ok(()),
                Action::Clear => self.clear(),
                Action::Help => eprint!("{HELP}"),
                Action::Show => eprint!("{}", self.state()),
                Action::System(text) => self.set_system(text),
                Action::Parameter(name, value) => match self.parameters.set(name, value) {
                    Err(why) if !input.is_terminal() => return Err(Error::setup(why)),
                    Err(why) => eprintln!("{why}"),
                    Ok(()) => {}
                },
                Action::Wrong(usage) => eprintln!("It is written {usage}: see /help."),
                Action::Unknown(name) => eprintln!("There is no command {name}: see /help."),
                Action::Ask(question) => match runtime.block_on(self.ask(question, &mut interrupt))
                {
                    // Somebody who types can try again.
                    Err(Stop::Failed(why)) if input.is_terminal() => eprintln!("error: {why}"),
                    Err(Stop::Failed(why)) => return Err(Error::setup(why)),
                    Err(Stop::Output(e)) if e.kind() == ErrorKind::BrokenPipe => return Ok(()),
                    Err(Stop::Output(e)) => {
                        return Err(Error::setup(format!("cannot write to stdout: {e}")));
                    }
                    Ok(()) => {}
                },
            }
        }
    }

    /// The first line: with whom one talks, and what the colours mean.
    fn greeting(&self) -> String {
        let client = &self.client;
        let colours = if client.tells_rounds() && self.painter.has_colours() {
            format!(
                " Accepted draft tokens: {} of a draft model or head, {} of tables.",
                self.painter.styled(Style::Model, "those"),
                self.painter.styled(Style::Tables, "those"),
            )
        } else {
            String::new()
        };
        let model = clipped(client.model());
        let model = self.painter.styled(Style::Plain, &model);
        format!(
            "{model} at {}.{colours} /help lists commands.",
            client.url()
        )
    }

    /// Asks, shows the answer and adds both to the conversation. A question without an answer is forgotten.
    async fn ask(&mut self, question: &str, interrupt: &mut Interrupt) -> Result<(), Stop> {
        let asked = self.messages.len();
        self.messages.push(ChatTurn {
            role: "user",
            content: question.to_owned(),
        });
        let mut answer = StreamedAnswer::default();
        let result = self.show(&mut answer, interrupt).await;
        if result.is_err() || answer.text.is_empty() && answer.finish.is_none() {
            self.messages.truncate(asked);
            return result;
        }
        self.messages.push(ChatTurn {
            role: "assistant",
            content: answer.text,
        });
        result
    }

    /// Shows an answer as it comes, until its end or Ctrl-C.
    async fn show(
        &mut self,
        answer: &mut StreamedAnswer,
        interrupt: &mut Interrupt,
    ) -> Result<(), Stop> {
        let started = Instant::now();
        let mut parts = self.client.ask(&self.messages, &self.parameters);
        self.painter.begin();
        let mut result = Ok(());
        loop {
            let part = tokio::select! {
                _ = interrupt.recv() => {
                    self.client.cancel();
                    break;
                }
                part = parts.recv() => part,
            };
            match part {
                None => break,
                Some(Ok(part)) => {
                    answer.add(&part);
                    self.painter.expect(&part.rounds);
                    let mut shown = self.painter.reasoning(&part.reasoning);
                    shown.push_str(&self.painter.content(&part.content));
                    write(&shown)?;
                }
                Some(Err(why)) => {
                    result = Err(Stop::Failed(why));
                    break;
                }
            }
        }
        if result.is_ok() || answer.first.is_some() {
            write("\n")?;
        }
        if self.terminal && result.is_ok() {
            let figures = self.painter.styled(Style::Aside, &answer.figures(started));
            write(&format!("{figures}\n"))?;
        }
        result
    }
}

impl StreamedAnswer {
    fn add(&mut self, part: &AnswerPart) {
        let now = Instant::now();
        self.text.push_str(&part.content);
        self.finish = part.finish.clone().or(self.finish.take());
        let count =
            |tokens: fn(&SpeculationRound) -> usize| part.rounds.iter().map(tokens).sum::<usize>();
        let tokens = count(|round| round.tokens.len());
        self.drafted += count(|round| round.draft.len());
        self.accepted += count(|round| round.draft.iter().filter(|d| d.accepted).count());
        self.tokens = (part.completion_tokens).unwrap_or(self.tokens.saturating_add(tokens));
        if !part.content.is_empty() || !part.reasoning.is_empty() || tokens > 0 {
            // Servers that do not tell send a token at a time.
            self.first.get_or_insert((now, tokens.max(1)));
            self.last = Some(now);
        }
    }

    /// A line of figures.
    fn figures(&self, started: Instant) -> String {
        let mut parts = Vec::new();
        if self.tokens > 0 {
            parts.push(format!("{} tokens", self.tokens));
        }
        if let (Some((first, tokens)), Some(last)) = (self.first, self.last) {
            let wait = first.duration_since(started).as_secs_f64();
            parts.push(format!("the first after {wait:.2} s"));
            let (rest, time) = (self.tokens.saturating_sub(tokens), last - first);
            if rest > 0 && time > Duration::ZERO {
                let speed = rest as f64 / time.as_secs_f64();
                parts.push(format!("then {speed:.1} a second"));
            }
        }
        if self.drafted > 0 {
            let (accepted, drafted) = (self.accepted, self.drafted);
            parts.push(format!("{accepted} of {drafted} draft tokens accepted"));
        }
        match self.finish.as_deref() {
            None => parts.push("stopped".into()),
            Some("length") => parts.push("cut off at the maximum".into()),
            Some(_) => {}
        }
        format!("[{}]", parts.join(", "))
    }
}

/// The reason why there is no answer.
#[derive(Debug)]
enum Stop {
    /// The server, in one line.
    Failed(String),
    /// stdout.
    Output(io::Error),
}

fn write(text: &str) -> Result<(), Stop> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    written.and_then(|()| stdout.flush()).map_err(Stop::Output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_say_what_is_known() {
        let started = Instant::now();
        assert_eq!(StreamedAnswer::default().figures(started), "[stopped]");
        let first = started + Duration::from_millis(500);
        let answer = StreamedAnswer {
            tokens: 12,
            drafted: 8,
            accepted: 5,
            finish: Some("length".into()),
            first: Some((first, 2)),
            last: Some(first + Duration::from_secs(2)),
            ..StreamedAnswer::default()
        };
        assert_eq!(
            answer.figures(started),
            "[12 tokens, the first after 0.50 s, then 5.0 a second, 5 of 8 draft tokens accepted, cut off at the maximum]"
        );
    }
}
