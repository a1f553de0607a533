//! A client of `/v1/chat/completions`, streamed, of any server that speaks OpenAI's API.

use super::parameters::AnswerParameters;
use crate::error::{Error, Result, clipped};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{self, Receiver, Sender};
use ureq::http::{Response, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, RequestBuilder};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a server to list its models.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a list of models, of an error, or of one line of a stream.
const MAX_BYTES: u64 = 16 << 20;
/// Chunks of an answer that wait to be shown.
const QUEUE: usize = 64;

/// A server of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Such as `http://127.0.0.1:8000` or `https://host/v1`.
    pub url: String,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// The model to ask; `None` = the first one that the server lists.
    pub model: Option<String>,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatTurn {
    pub role: &'static str,
    pub content: String,
}

/// A request for the next message of a conversation.
#[derive(Debug, Serialize)]
struct Question<'a> {
    model: &'a str,
    messages: &'a [ChatTurn],
    #[serde(flatten)]
    parameters: &'a AnswerParameters,
    stream: bool,
    stream_options: AskedOptions,
}

#[derive(Debug, Serialize)]
struct AskedOptions {
    include_usage: bool,
    /// Only foretoken knows it, and others may refuse it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    include_speculation: bool,
}

#[derive(Debug, Deserialize)]
struct Models {
    data: Vec<ListedModel>,
}

#[derive(Debug, Deserialize)]
struct ListedModel {
    id: String,
    owned_by: Option<String>,
}

/// A chunk of an answer, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Vec<AnswerChoice>,
    usage: Option<AnswerUsage>,
    error: Option<serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AnswerChoice {
    delta: AnswerDelta,
    finish_reason: Option<String>,
    speculation: Option<Vec<SpeculationRound>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AnswerDelta {
    content: Option<String>,
    reasoning_content: Option<String>,
    /// Newer versions of vLLM call it so.
    reasoning: Option<String>,
}

#[derive(Debug, Deserialize)]
struct AnswerUsage {
    completion_tokens: usize,
}

/// A round of speculation: what was drafted, and what it added.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct SpeculationRound {
    pub draft: Vec<DraftedToken>,
    pub tokens: Vec<AnswerToken>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct DraftedToken {
    pub accepted: bool,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct AnswerToken {
    /// What it adds to the text.
    pub text: String,
    /// Where it came from, as docs/api.md lists it.
    pub source: String,
}

/// The addition of a part of a stream to an answer.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct AnswerPart {
    pub reasoning: String,
    pub content: String,
    pub rounds: Vec<SpeculationRound>,
    /// Why the answer ends here.
    pub finish: Option<String>,
    /// Tokens of the whole answer.
    pub completion_tokens: Option<usize>,
}

/// A connection to a server.
#[derive(Debug)]
pub struct ChatClient {
    /// Replaced when its connections are closed.
    agent: Mutex<Agent>,
    base: String,
    api_key: Option<String>,
    model: String,
    /// Whether the server is foretoken, which can say what it drafted.
    tells_rounds: bool,
}

impl ChatClient {
    /// Asks the server for its models.
    ///
    /// # Errors
    /// `Setup`, if it cannot be reached, refuses the key or names no model.
    pub fn connect(endpoint: &Endpoint) -> Result<Self> {
        let base = base(&endpoint.url);
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(tls.build())
            .user_agent(concat!("foretoken/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT));
        if is_loopback(&base) {
            config = config.proxy(None);
        }
        let mut client = Self {
            agent: Mutex::new(config.build().into()),
            base,
            api_key: endpoint.api_key.clone(),
            model: endpoint.model.clone().unwrap_or_default(),
            tells_rounds: false,
        };
        let models = client.models(endpoint.model.is_some())?;
        let ours = |model: &ListedModel| model.owned_by.as_deref() == Some("foretoken");
        client.tells_rounds = models.iter().any(ours);
        if endpoint.model.is_none() {
            let first = models.into_iter().next();
            let first = first.ok_or_else(|| {
                Error::setup(format!("{} lists no model: set --model", client.base))
            })?;
            client.model = first.id;
        }
        Ok(client)
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// Whether the server says where each token came from.
    pub fn tells_rounds(&self) -> bool {
        self.tells_rounds
    }

    /// The server's models. Not every server lists them, which does not matter if the model is `known`.
    fn models(&self, known: bool) -> Result<Vec<ListedModel>> {
        let url = format!("{}/models", self.base);
        let unreachable = |e| Error::setup(format!("cannot reach {}: {}", self.base, line(&e)));
        let request = self.signed(self.agent().get(&url));
        let request = request
            .config()
            .timeout_global(Some(LIST_TIMEOUT))
            .build()
            .call();
        let mut answer = request.map_err(unreachable)?;
        let status = answer.status();
        let text = body(&mut answer);
        let refused = |hint: &str| {
            let detail = detail(status.as_u16(), &text);
            Err(Error::setup(format!("{url}: {detail}{hint}")))
        };
        if matches!(status.as_u16(), 401 | 403) {
            return refused("; set --api-key, OPENAI_API_KEY or FORETOKEN_API_KEY");
        }
        match serde_json::from_str::<Models>(&text) {
            Ok(models) if status.is_success() => Ok(models.data),
            _ if known => Ok(Vec::new()),
            Ok(_) => refused("; set --model"),
            Err(_) if status.is_success() => Err(Error::setup(format!(
                "{url} is no list of models: is this the address of a server of OpenAI's API?"
            ))),
            Err(_) => refused(""),
        }
    }

    /// Asks for the next message after `messages`. Its parts, or why there are no more, come as they arrive;
    /// the stream is whole if the last one has `finish` or is followed by nothing. Whoever drops the receiver
    /// ends the request with the next part, and [`Self::cancel`] at once.
    pub fn ask(
        self: &Arc<Self>,
        messages: &[ChatTurn],
        parameters: &AnswerParameters,
    ) -> Receiver<Result<AnswerPart, String>> {
        let question = Question {
            model: &self.model,
            messages,
            parameters,
            stream: true,
            stream_options: AskedOptions {
                include_usage: true,
                include_speculation: self.tells_rounds,
            },
        };
        let question = serde_json::to_vec(&question).unwrap_or_default();
        let (sender, parts) = mpsc::channel(QUEUE);
        // Not on the thread, which may come to it after it was cancelled.
        let (client, agent) = (self.clone(), self.agent());
        // The client blocks, while the chat also waits for Ctrl-C.
        std::thread::spawn(move || {
            if let Err(why) = client.stream(&agent, &question, &sender) {
                let _ = sender.blocking_send(Err(why));
            }
        });
        parts
    }

    /// Ends all requests: the server sees that their connections are closed, also before it has sent anything.
    pub fn cancel(&self) {
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Agent::from(agent.config().clone());
        let old = std::mem::replace(&mut *agent, next);
        drop(agent);
        old.shutdown();
    }

    fn agent(&self) -> Agent {
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        agent.clone()
    }

    fn stream(
        &self,
        agent: &Agent,
        question: &[u8],
        parts: &Sender<Result<AnswerPart, String>>,
    ) -> Result<(), String> {
        let url = format!("{}/chat/completions", self.base);
        let request = self.signed(agent.post(&url));
        let request = request.header("content-type", "application/json");
        let mut answer = request.send(question).map_err(|e| line(&e))?;
        if !answer.status().is_success() {
            return Err(detail(answer.status().as_u16(), &body(&mut answer)));
        }
        let mut lines = BufReader::new(answer.body_mut().as_reader());
        let mut finished = false;
        while let Some(data) = next_data(&mut lines)? {
            if data == "[DONE]" {
                return Ok(());
            }
            let part = part(&data)?;
            finished |= part.finish.is_some();
            if parts.blocking_send(Ok(part)).is_err() {
                return Ok(());
            }
        }
        // Some servers do not say [DONE].
        if finished {
            Ok(())
        } else {
            Err("the connection ended before the answer did".into())
        }
    }

    fn signed<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.api_key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }
}

/// The part of the URL before `/models`: an address alone means its `/v1`.
fn base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    let url = url.strip_suffix("/chat/completions").unwrap_or(url);
    let host = url.split_once("://").map_or(url, |(_, host)| host);
    if host.contains('/') {
        url.to_owned()
    } else {
        format!("{url}/v1")
    }
}

/// Whether the URL leads to this machine, where no proxy can be meant, nor OpenAI.
pub fn is_loopback(url: &str) -> bool {
    let uri: Option<Uri> = url.parse().ok();
    let host = uri.as_ref().and_then(Uri::host).unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// The data of the next event of a stream; `None` = it has ended.
fn next_data(lines: &mut impl BufRead) -> Result<Option<String>, String> {
    loop {
        let mut line = Vec::new();
        let read = lines.take(MAX_BYTES).read_until(b'\n', &mut line);
        let read =
            read.map_err(|e| format!("the connection broke: {}", clipped(&e.to_string())))?;
        if read == 0 {
            return Ok(None);
        }
        if line.len() as u64 == MAX_BYTES {
            return Err("an event of the stream is too long".into());
        }
        let line = String::from_utf8_lossy(&line);
        if let Some(data) = line.trim_end().strip_prefix("data:") {
            return Ok(Some(data.trim_start().to_owned()));
        }
    }
}

/// The part of an answer that an event's `data` is.
fn part(data: &str) -> Result<AnswerPart, String> {
    let chunk: Chunk = serde_json::from_str(data)
        .map_err(|e| format!("the server sent something else than chunks: {e}"))?;
    if let Some(error) = chunk.error {
        return Err(message(&error).unwrap_or_else(|| clipped(data)));
    }
    let mut part = AnswerPart {
        completion_tokens: chunk.usage.map(|usage| usage.completion_tokens),
        ..AnswerPart::default()
    };
    for choice in chunk.choices {
        let AnswerDelta {
            content,
            reasoning_content,
            reasoning,
        } = choice.delta;
        part.content.push_str(&content.unwrap_or_default());
        let reasoning = reasoning_content.or(reasoning);
        part.reasoning.push_str(&reasoning.unwrap_or_default());
        part.rounds.extend(choice.speculation.unwrap_or_default());
        part.finish = choice.finish_reason.or(part.finish);
    }
    Ok(part)
}

/// The text of an answer that is no stream, as far as it arrives.
fn body(answer: &mut Response<Body>) -> String {
    let mut text = Vec::new();
    let reader = answer.body_mut().as_reader();
    let _ = reader.take(MAX_BYTES).read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// Returns a server's description of an error: its message, or else the beginning of its text.
fn detail(status: u16, text: &str) -> String {
    let json: Option<serde_json::Value> = serde_json::from_str(text).ok();
    let told = json.as_ref().and_then(|json| message(&json["error"]));
    let told = told.unwrap_or_else(|| clipped(text.lines().next().unwrap_or_default().trim()));
    let separator = if told.is_empty() { "" } else { ": " };
    format!("status {status}{separator}{told}")
}

/// The message of an error object of OpenAI's API.
fn message(error: &serde_json::Value) -> Option<String> {
    let text = error.as_str().or(error["message"].as_str());
    text.map(clipped)
}

fn line(error: &ureq::Error) -> String {
    let text = error.to_string();
    clipped(text.trim_start_matches("io: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_alone_means_its_v1() {
        for (url, wanted) in [
            ("http://h:1", "http://h:1/v1"),
            ("http://h:1/", "http://h:1/v1"),
            ("https://h/v1/", "https://h/v1"),
            ("https://h/api/v1", "https://h/api/v1"),
            ("http://h/v1/chat/completions", "http://h/v1"),
        ] {
            assert_eq!(base(url), wanted);
        }
    }

    #[test]
    fn no_proxy_leads_to_this_machine() {
        for url in [
            "http://127.0.0.1:8000/v1",
            "http://localhost/v1",
            "http://[::1]:1/v1",
        ] {
            assert!(is_loopback(url), "{url}");
        }
        assert!(!is_loopback("http://10.0.0.1/v1") && !is_loopback("https://localhost.net/v1"));
    }

    #[test]
    fn events_of_many_servers_are_read() {
        let stream = ": ping\r\n\r\nevent: x\ndata: {\"choices\":[]}\r\n\ndata:[DONE]\n";
        let mut lines = BufReader::new(stream.as_bytes());
        let mut next = || next_data(&mut lines).unwrap();
        assert_eq!(next().as_deref(), Some("{\"choices\":[]}"));
        assert_eq!(next().as_deref(), Some("[DONE]"));
        assert_eq!(next(), None);
    }

    #[test]
    fn chunks_of_many_servers_are_read() {
        let foreign = r#"{"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":null}],"usage":null}"#;
        assert_eq!(part(foreign).unwrap().content, "a");
        let thinks = r#"{"choices":[{"delta":{"content":null,"reasoning":"hm"}}]}"#;
        assert_eq!(part(thinks).unwrap().reasoning, "hm");
        let last = r#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":7}}"#;
        assert_eq!(part(last).unwrap().completion_tokens, Some(7));
        let failed = r#"{"error":{"message":"no room","type":"x"}}"#;
        assert_eq!(part(failed).unwrap_err(), "no room");
        let ours = r#"{"choices":[{"delta":{"content":" a"},"finish_reason":"stop","speculation":[{"draft":[{"token":" a","parent":null,"source":"own","accepted":true}],"tokens":[{"token":" a","text":" a","source":"own"}]}]}]}"#;
        let part = part(ours).unwrap();
        assert_eq!(part.finish.as_deref(), Some("stop"));
        assert_eq!(part.rounds[0].tokens[0].source, "own");
        assert!(part.rounds[0].draft[0].accepted);
    }

    #[test]
    fn errors_are_one_line() {
        assert_eq!(
            detail(400, r#"{"error":{"message":"a\nb"}}"#),
            "status 400: a b"
        );
        assert_eq!(detail(502, "<html>\nBad gateway"), "status 502: <html>");
        assert_eq!(detail(500, ""), "status 500");
    }
}
