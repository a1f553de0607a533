//! What coding agents have sent: `scripts/agents.sh --record` has recorded it, and `scripts/agent_fixtures.py` has cut it
//! to its shape. A request that is refused here breaks an agent.

use crate::common::scripted::{CHAT, saying, saying_as, tool};
use crate::common::server::{Server, events, joined, named};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use std::path::Path;

/// Shows the names of tools alone, because those of agents have long schemas.
const NAMES: &str = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>\n{% endfor %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n\
    {% endfor %}<|im_start|>assistant\n";

const ANSWER: &str = "It adds now.";

/// The agents, and how many requests each has sent.
const AGENTS: [(&str, usize); 5] = [
    ("aider", 2),
    ("claude", 3),
    ("codex", 2),
    ("opencode", 4),
    ("qwen", 3),
];

/// A request, and what the model says to it.
struct Turn {
    method: Method,
    path: String,
    headers: Vec<(String, String)>,
    body: Option<Value>,
    /// The tool that it calls, or else it says [`ANSWER`].
    tool: Option<String>,
}

impl Turn {
    /// All turns but the last one call the first function, if there are any.
    fn new(fixture: &Value, turn: &Value, is_last: bool) -> Self {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let headers = turn["headers"].as_object().expect("headers");
        let mut body = turn.get("body").cloned();
        let mut tool = None;
        if let Some(body) = &mut body {
            if body["tools"] == "shared" {
                body["tools"] = fixture["tools"].clone();
            }
            body["model"] = "toy".into();
            let mut tools = body["tools"].as_array().into_iter().flatten();
            let name = tools.find_map(|tool| {
                let is_function = tool.get("type").is_none_or(|kind| kind == "function");
                let function = tool.get("function").unwrap_or(tool);
                function["name"].as_str().filter(|_| is_function)
            });
            tool = name.filter(|_| !is_last).map(str::to_owned);
        }
        Self {
            method: text(&turn["method"]).parse().expect("a method"),
            path: text(&turn["path"]),
            headers: headers
                .iter()
                .map(|(name, value)| (name.clone(), text(value)))
                .collect(),
            body,
            tool,
        }
    }

    /// Whether it has tools that other servers run.
    fn asks_for_more(&self) -> bool {
        let tools = self.body.iter().filter_map(|body| body["tools"].as_array());
        let mut kinds = tools.flatten().filter_map(|tool| tool["type"].as_str());
        kinds.any(|kind| !["function", "custom", "namespace"].contains(&kind))
    }

    fn says(&self) -> String {
        match &self.tool {
            Some(name) => called(name, &arguments()),
            None => ANSWER.to_owned(),
        }
    }

    async fn send(&self, server: &Server) -> Response {
        let mut request = server
            .client
            .request(self.method.clone(), server.url.clone() + &self.path);
        if let Some(body) = &self.body {
            request = request.json(body);
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.send().await.expect("an answer")
    }

    /// Checks a stream in the form of the API that was asked.
    fn check(&self, stream: &str) {
        let api = self.path.split('?').next().unwrap_or_default();
        match api {
            "/v1/chat/completions" => self.check_chat(stream),
            "/v1/responses" => self.check_response(&named(stream)),
            "/v1/messages" => self.check_message(&named(stream)),
            other => panic!("{other} is no API of agents"),
        }
    }

    fn check_chat(&self, stream: &str) {
        let mut events = events(stream);
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        let read = |event: &String| serde_json::from_str(event).expect("JSON");
        let chunks: Vec<Value> = events.iter().map(read).collect();
        let mut each = chunks.iter();
        assert!(each.all(|chunk| chunk["object"] == "chat.completion.chunk"));
        let (content, finish) = joined(&chunks, 0);
        let deltas = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0]);
        let calls: Vec<&Value> = deltas.filter(|call| call.is_object()).collect();
        let texts = |key: &str| -> String {
            let parts = calls
                .iter()
                .filter_map(|call| call["function"][key].as_str());
            parts.collect()
        };
        match &self.tool {
            Some(name) => {
                assert_eq!((finish, texts("name")), (json!("tool_calls"), name.clone()));
                assert!(calls[0]["id"].is_string() && calls[0]["type"] == "function");
                assert_arguments(&texts("arguments"));
            }
            None => assert_eq!((finish, content.as_str()), (json!("stop"), ANSWER)),
        }
        let usage = &chunks.last().expect("chunks")["usage"];
        let asked = self.body.as_ref().expect("a body");
        let is_asked = asked["stream_options"]["include_usage"] == true;
        assert_eq!(
            usage["prompt_tokens"].as_u64() > Some(0),
            is_asked,
            "{usage}"
        );
    }

    fn check_response(&self, events: &[(String, Value)]) {
        let (first, _) = events.first().expect("events");
        let (last, data) = events.last().expect("events");
        let ends = (first.as_str(), last.as_str());
        assert_eq!(ends, ("response.created", "response.completed"));
        let response = &data["response"];
        assert!(
            response["usage"]["input_tokens"].as_u64() > Some(0),
            "{response}"
        );
        let item = &response["output"][0];
        match &self.tool {
            Some(name) => {
                assert_eq!(item["type"], "function_call");
                assert_eq!(item["name"], json!(name));
                assert!(item["call_id"].is_string(), "{item}");
                assert_arguments(item["arguments"].as_str().expect("arguments"));
            }
            None => assert_eq!(item["content"][0]["text"], ANSWER),
        }
    }

    fn check_message(&self, events: &[(String, Value)]) {
        let (first, start) = events.first().expect("events");
        let (last, _) = events.last().expect("events");
        assert_eq!(first.as_str(), "message_start");
        assert_eq!(last.as_str(), "message_stop");
        assert!(
            start["message"]["usage"]["input_tokens"].is_u64(),
            "{start}"
        );
        let all = |key: &str| -> Vec<&Value> {
            let found = events.iter().filter_map(|(_, data)| data.get(key));
            found.collect()
        };
        let texts = |key: &str| -> String {
            all("delta")
                .iter()
                .filter_map(|delta| delta[key].as_str())
                .collect()
        };
        let block = all("content_block")[0];
        match &self.tool {
            Some(name) => {
                assert_eq!(block["type"], "tool_use");
                assert_eq!(block["name"], json!(name));
                assert_arguments(&texts("partial_json"));
            }
            None => assert_eq!(texts("text"), ANSWER),
        }
        let reason = if self.tool.is_some() {
            "tool_use"
        } else {
            "end_turn"
        };
        assert_eq!(texts("stop_reason"), reason);
    }
}

/// A call as the model writes it.
fn called(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

fn arguments() -> Value {
    json!({"path": "calc.py"})
}

fn assert_arguments(text: &str) {
    let parsed: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(parsed, arguments());
}

#[tokio::test]
async fn requests_of_agents_are_answered_in_the_form_that_they_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/agents");
    let files = std::fs::read_dir(&folder).expect("fixtures");
    assert_eq!(files.count(), AGENTS.len());
    for (agent, count) in AGENTS {
        let text = std::fs::read_to_string(folder.join(format!("{agent}.json"))).expect(agent);
        let fixture: Value = serde_json::from_str(&text).expect(agent);
        let turns = fixture["turns"].as_array().expect("turns");
        assert_eq!(turns.len(), count, "{agent}");
        for (i, turn) in turns.iter().enumerate() {
            let turn = Turn::new(&fixture, turn, i + 1 == count);
            let server = saying_as(&turn.says(), NAMES, |state| state).await;
            let response = turn.send(&server).await;
            let status = response.status();
            let is_told = response.headers().contains_key("x-foretoken-warning");
            assert_eq!(is_told, turn.asks_for_more(), "{agent}, request {i}");
            let is_stream = response.headers()["content-type"] == "text/event-stream";
            let answer = response.text().await.expect("a whole answer");
            assert_eq!(status, 200, "{agent}, request {i}: {answer}");
            assert_eq!(is_stream, turn.body.is_some(), "{agent}, request {i}");
            if is_stream {
                turn.check(&answer);
            }
            server.done().await;
        }
    }
}

/// As opencode sends it, by the AI SDK's provider for compatible servers.
#[tokio::test]
async fn opencodes_requests_are_accepted() {
    let server = saying(&called("edit", &json!({"filePath": "calc.py"}))).await;
    let edit = tool("edit", json!({"filePath": {"type": "string"}}));
    let body = json!({
        "model": "toy",
        "max_tokens": 64,
        "messages": [
            {"role": "system", "content": "You are opencode."},
            {"role": "user", "content": [{"type": "text", "text": "Fix it."}, {"type": "text", "text": "Please."}]},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "edit", "arguments": "{\"filePath\":\"a\"}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "[{\"type\":\"text\",\"text\":\"done\"}]"},
        ],
        "tools": [edit],
        "tool_choice": "auto",
        "stream_options": {"include_usage": true},
        "reasoning_effort": "high",
        "verbosity": "low",
        "user": "me",
        "temperature": 0,
    });
    let chunks = server.stream(CHAT, body).await;
    let calls = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0));
    let names: Vec<&Value> = calls
        .filter_map(|call| call["function"].get("name"))
        .collect();
    assert_eq!(names, ["edit"]);
    server.done().await;
}
