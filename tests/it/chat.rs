//! `foretoken chat`, driven through its stdin, with its own model and with other servers.

use crate::common::process::{foretoken, refusal_line, stdout_of};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// `foretoken chat ARGS`, without the user's settings.
fn chat(args: &str) -> Command {
    let mut command = foretoken();
    command
        .env_remove("OPENAI_API_KEY")
        .args(["chat"])
        .args(args.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs `command` with `typed` as its stdin.
fn run(mut command: Command, typed: &str) -> Output {
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(typed.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

/// A server of another kind: it lists one model, and answers to questions as it is told.
struct Foreign {
    url: String,
    requests: Receiver<Request>,
}

/// What a client sent.
struct Request {
    head: String,
    body: Value,
}

/// What [`Foreign`] answers.
#[derive(Clone)]
enum Reply {
    Text(&'static str),
    /// A text that does not go on.
    Endless(&'static str),
    /// Nothing; whether the client closes the connection is told.
    Silent(Sender<bool>),
    Error(u16, &'static str),
}

impl Foreign {
    fn start(replies: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = channel();
        std::thread::spawn(move || {
            let mut replies = replies.into_iter();
            for stream in listener.incoming() {
                Self::answer(stream.unwrap(), &mut replies, &sender);
            }
        });
        Self { url, requests }
    }

    fn answer(
        stream: TcpStream,
        replies: &mut impl Iterator<Item = Reply>,
        requests: &Sender<Request>,
    ) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if lines.read_line(&mut head).unwrap() == 0 {
                return;
            }
        }
        head = head.to_ascii_lowercase();
        let length = head.split("content-length: ").nth(1);
        let length = length.map_or(0, |rest| rest.lines().next().unwrap().parse().unwrap());
        let mut body = vec![0; length];
        lines.read_exact(&mut body).unwrap();
        let mut stream = stream;
        let close = "Connection: close\r\n\r\n";
        if head.starts_with("get /v1/models ") {
            let models = json!({"data": [{"id": "other", "owned_by": "somebody"}]});
            write!(stream, "HTTP/1.1 200 OK\r\n{close}{models}").unwrap();
            return;
        }
        assert!(head.starts_with("post /v1/chat/completions "), "{head}");
        let body = serde_json::from_slice(&body).unwrap();
        let _ = requests.send(Request { head, body });
        let stream_of = |text: &str| {
            let chunk = json!({"choices": [{"delta": {"content": text}}]});
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
            format!("{head}{close}data: {chunk}\n\n")
        };
        match replies.next().expect("no more requests") {
            Reply::Text(text) => {
                let end = json!({"choices": [{"delta": {}, "finish_reason": "stop"}]});
                let text = stream_of(text);
                write!(stream, "{text}data: {end}\n\ndata: [DONE]\n\n").unwrap();
            }
            Reply::Endless(text) => {
                stream.write_all(stream_of(text).as_bytes()).unwrap();
                // Open until the client's process ends.
                std::thread::spawn(move || stream.read_to_end(&mut Vec::new()));
            }
            Reply::Silent(closed) => {
                let end = stream.read_to_end(&mut Vec::new());
                let _ = closed.send(end.is_ok());
            }
            Reply::Error(status, message) => {
                let error = json!({"error": {"message": message}});
                write!(stream, "HTTP/1.1 {status} No\r\n{close}{error}").unwrap();
            }
        }
    }

    fn request(&self) -> Request {
        self.requests.recv().unwrap()
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The answers are those of the API for the same conversation, whoever serves the model.
#[cfg(feature = "embedded-model")]
#[test]
fn two_turns_are_those_of_the_api() {
    let server = crate::common::process::Server::start("");
    let questions = ["Tell me a story about a cat.", "What is the cat called?"];
    let mut messages = vec![message("system", "Be short.")];
    let mut answers = Vec::new();
    for question in questions {
        messages.push(message("user", question));
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 24});
        let reply = server.post("/v1/chat/completions", &body.to_string());
        let reply = reply.split_once("\r\n\r\n").unwrap().1;
        let reply: Value = serde_json::from_str(reply).unwrap();
        let answer = reply["choices"][0]["message"]["content"].as_str().unwrap();
        messages.push(message("assistant", answer));
        answers.push(answer.to_owned());
    }
    let [first, second] = [&answers[0], &answers[1]];
    // Forgotten, the first question has its first answer again.
    let typed = format!(
        "{}\n\n{}\n/clear\n{0}\n/bye\nno\n",
        questions[0], questions[1]
    );
    let wanted = format!("{first}\n{second}\n{first}\n");
    let address = format!("http://{}", server.address());
    for partner in ["", &address] {
        let mut command = chat(&format!("{partner} --temperature 0 --max-tokens 24"));
        command.args(["--system", "Be short."]);
        let output = run(command, &typed);
        assert_eq!(stdout_of(&output), wanted, "{partner:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn other_servers_are_asked_for_nothing_but_the_api() {
    let server = Foreign::start(vec![Reply::Text("Hi"), Reply::Text("Yes")]);
    let mut command = chat(&format!("{}/ --temperature 0.7", server.url));
    command.env("OPENAI_API_KEY", "other");
    // As a server takes several.
    command.env("FORETOKEN_API_KEY", "secret\nsecond");
    let output = run(command, "Hello?\nSure?\n/exit\n");
    assert_eq!(stdout_of(&output), "Hi\nYes\n");
    let request = server.request();
    assert!(request.head.contains("authorization: bearer secret\r\n"));
    assert_eq!(
        request.body,
        json!({
            "model": "other",
            "messages": [message("user", "Hello?")],
            "temperature": 0.7,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    );
    let next = server.request().body;
    let [q, a] = [message("user", "Hello?"), message("assistant", "Hi")];
    assert_eq!(next["messages"], json!([q, a, message("user", "Sure?")]));
}

#[test]
fn settings_of_a_chat_go_into_its_requests() {
    let server = Foreign::start(vec![
        Reply::Text("Hi"),
        Reply::Text("Yes"),
        Reply::Text("No"),
    ]);
    let typed = "/set parameter temperature 0.2\n/set parameter num_predict 8\n/set system Be brief.\n\
        Hello?\n/set system \"Be long.\"\nSure?\n/show\n/clear\n/set system\nWhat?\n/set parameter top_p 3\nNever.\n";
    let output = run(chat(&server.url), typed);
    // A program that sets what cannot be set ends, as with a wrong flag.
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "Hi\nYes\nNo\n");
    let said = String::from_utf8_lossy(&output.stderr);
    for part in [
        "system message: Be long.",
        "temperature 0.2",
        "max_tokens 8",
        "error: top_p must be a number between 0 and 1, not 3",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let first = server.request().body;
    assert_eq!(first["temperature"], json!(0.2));
    assert_eq!(first["max_tokens"], 8);
    let brief = message("system", "Be brief.");
    assert_eq!(first["messages"], json!([brief, message("user", "Hello?")]));
    let second = server.request().body;
    assert_eq!(second["messages"][0], message("system", "Be long."));
    assert_eq!(second["messages"].as_array().unwrap().len(), 4);
    let third = server.request().body;
    assert_eq!(third["messages"], json!([message("user", "What?")]));
}

#[test]
fn ctrl_c_stops_an_answer_but_not_the_chat() {
    let server = Foreign::start(vec![Reply::Endless("Once"), Reply::Text("Yes")]);
    let mut child = chat(&format!("{} --model m", server.url)).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    stdin.write_all(b"A story!\n").unwrap();
    let mut begin = [0; 4];
    out.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"Once");
    interrupt(&child);
    stdin.write_all(b"Sure?\n").unwrap();
    let mut rest = String::new();
    out.read_line(&mut rest).unwrap();
    out.read_line(&mut rest).unwrap();
    assert_eq!(rest, "\nYes\n");
    assert_eq!(server.request().body["model"], "m");
    assert_eq!(
        server.request().body["messages"][1],
        message("assistant", "Once")
    );
    // Where nothing is answered, it ends the chat.
    interrupt(&child);
    assert!(child.wait().unwrap().success());
}

#[test]
fn ctrl_c_before_an_answer_closes_its_connection() {
    let (sender, closed) = channel();
    let server = Foreign::start(vec![Reply::Silent(sender), Reply::Text("Yes")]);
    let mut child = chat(&format!("{} --model m", server.url)).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    stdin.write_all(b"A story!\n").unwrap();
    assert_eq!(server.request().body["model"], "m");
    interrupt(&child);
    // The program lives on, so it is not its end that closes the connection.
    assert!(closed.recv_timeout(Duration::from_secs(60)).unwrap());
    stdin.write_all(b"Sure?\n").unwrap();
    let mut said = String::new();
    out.read_line(&mut said).unwrap();
    out.read_line(&mut said).unwrap();
    assert_eq!(said, "\nYes\n");
    // The question without an answer is forgotten.
    let expected = json!([message("user", "Sure?")]);
    assert_eq!(server.request().body["messages"], expected);
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

fn interrupt(child: &Child) {
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
}

#[test]
fn errors_are_one_line() {
    // A port that nothing listens on.
    let closed = "127.0.0.1:9";
    let error = refusal_line(&run(chat(&format!("http://{closed}")), ""));
    assert!(
        error.contains(&format!("cannot reach http://{closed}/v1: ")),
        "{error}"
    );

    let server = Foreign::start(vec![Reply::Error(400, "too\nlong")]);
    let error = refusal_line(&run(chat(&server.url), "Hello?\nSure?\n"));
    assert_eq!(error, "error: status 400: too long\n");

    for (args, needle) in [
        (
            "http://h --threads 1",
            "--threads is for a model that chat loads",
        ),
        ("http://h --config f.toml", "f.toml"),
        ("http://h --api-key a --api-key b", "a chat sends one key"),
        ("--port 8001", "--port is not for chat"),
        ("--temperature 3", "between 0 and 2"),
        ("./no-such-folder", "no-such-folder"),
        ("m --model n", "named twice"),
        ("http://h:1:2", "cannot reach"),
    ] {
        let error = refusal_line(&run(chat(args), ""));
        assert!(error.contains(needle), "`{args}`: {error}");
    }
}
