//! `foretoken generate --input-file`: answers the requests of a file in the format of OpenAI's Batch API
//! (<https://platform.openai.com/docs/guides/batch>), without a server.
//!
//! Each line goes through the router as a request over HTTP does. What is wrong with a line is its answer. Few lines are
//! in memory at a time, and a line for which the queue has no place waits. An interrupted run resumes where it stopped.

use super::output::Output;
use crate::console::{Progress, say};
use crate::engine::EngineHandle;
use crate::error::{Error, Result};
use crate::http::InProcess;
use futures_util::stream::{self, StreamExt};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

/// The routes of requests.
const URLS: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
];

/// Bytes of a line beside its body.
const MAX_LINE_HEAD: usize = 64 << 10;

/// Time after which a request is sent again for which there was no place.
const RETRY: Duration = Duration::from_millis(20);

/// The files of a batch, and how it is answered.
#[derive(Debug, Clone, Copy)]
pub struct BatchFiles<'a> {
    /// Lines with requests.
    pub input: &'a Path,
    /// The file to which answers are appended.
    pub out: &'a Path,
    /// Maximum bytes of a body.
    pub max_body_bytes: usize,
    /// Maximum number of lines that are answered at once.
    pub concurrency: usize,
}

/// A line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestLine<'a> {
    custom_id: String,
    method: String,
    url: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// The id of a line whose other keys may be wrong.
#[derive(Deserialize)]
struct Identified {
    custom_id: Option<String>,
}

/// A line that the output has. One of the input has no `id`.
#[derive(Deserialize)]
struct Answered {
    #[serde(rename = "id")]
    _id: String,
    custom_id: Option<String>,
    error: Option<AnsweredError>,
}

#[derive(Deserialize)]
struct AnsweredError {
    message: String,
}

impl Answered {
    /// What tells by which line of the input this was asked: the id of its request, or the message about a line that is
    /// none, which has the line's number.
    fn key(self) -> Option<String> {
        match self.error {
            Some(error) => Some(key_of_error(&error.message)),
            None => self.custom_id,
        }
    }
}

/// No id of a request.
fn key_of_error(message: &str) -> String {
    format!("\0{message}")
}

/// A line of the output.
#[derive(Serialize)]
struct AnswerLine {
    id: String,
    /// `None` if the line that is answered has none.
    custom_id: Option<String>,
    /// `None` if no request could be made of the line.
    response: Option<LineResponse>,
    error: Option<LineError>,
}

#[derive(Serialize)]
struct LineResponse {
    status_code: u16,
    request_id: String,
    body: Box<RawValue>,
}

/// What is wrong with a line.
#[derive(Debug, Serialize)]
struct LineError {
    code: &'static str,
    message: String,
}

/// A request, or what is wrong with its line.
struct Asked {
    number: usize,
    custom_id: Option<String>,
    request: Result<LineRequest, LineError>,
}

struct LineRequest {
    url: &'static str,
    body: String,
}

/// Answers the lines that `out` has no answers to, and appends each answer when it is complete.
///
/// # Errors
/// `Setup`: a file cannot be read or written, or `out` has other lines. `Internal`: the engine failed. Answers written
/// before the error stay.
pub fn run(engine: &EngineHandle, api: &InProcess, files: BatchFiles<'_>) -> Result<()> {
    let all = Lines::open(files)?.try_fold(0, |all, (_, line)| line.map(|_| all + 1))?;
    if all == 0 {
        return Err(Error::in_file(
            files.input,
            "there are no requests to answer",
        ));
    }
    let (mut answers, done) = Output::open(files.out, "answer of a batch", |line| {
        serde_json::from_slice::<Answered>(line).map(Answered::key)
    })?;
    if !done.is_empty() {
        say(format_args!(
            "{} holds {} answers already; their requests are left out",
            files.out.display(),
            done.len()
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))?;
    runtime.block_on(answer_all(engine, api, files, all, &done, &mut answers))
}

async fn answer_all(
    engine: &EngineHandle,
    api: &InProcess,
    files: BatchFiles<'_>,
    all: usize,
    done: &HashSet<String>,
    answers: &mut Output,
) -> Result<()> {
    let mut progress = Progress::new("answering", "requests", all as u64);
    let ids = RandomState::new();
    let mut seen = HashSet::new();
    let asked = Lines::open(files)?.filter_map(|(number, line)| match line {
        Err(e) => Some(Err(e)),
        Ok(line) => asked(number, &line, files.max_body_bytes, &mut seen, done).map(Ok),
    });
    let width = files.concurrency.min(engine.limits().max_waiting);
    let mut lines = stream::iter(asked)
        .map(|asked| {
            let ids = &ids;
            async move { answer(engine, api, asked?, ids).await }
        })
        .buffer_unordered(width);
    let (mut answered, mut failed) = (0, 0);
    while let Some(line) = lines.next().await {
        let line = line?;
        answers.add(&line)?;
        answered += 1;
        let is_fine = |response: &LineResponse| response.status_code < 300;
        failed += usize::from(!line.response.as_ref().is_some_and(is_fine));
        progress.step("");
    }
    progress.end();
    say(format_args!(
        "{answered} requests are answered, {failed} of them with an error"
    ));
    Ok(())
}

/// The lines of the input that are not blank, with their numbers.
struct Lines<'a> {
    files: BatchFiles<'a>,
    reader: BufReader<File>,
    number: usize,
}

impl<'a> Lines<'a> {
    fn open(files: BatchFiles<'a>) -> Result<Self> {
        let unreadable = |e| Error::in_file(files.input, e);
        let file = File::open(files.input).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            // It is read twice.
            return Err(Error::in_file(files.input, "is no file"));
        }
        Ok(Self {
            files,
            reader: BufReader::new(file),
            number: 0,
        })
    }

    /// The next line; of a longer one than may be, the beginning. `None` = the file has ended.
    fn read(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let max = self.files.max_body_bytes.saturating_add(MAX_LINE_HEAD) as u64;
        let mut line = Vec::new();
        let mut start = Read::by_ref(&mut self.reader).take(max.saturating_add(1));
        if start.read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        if !line.ends_with(b"\n") {
            self.reader.skip_until(b'\n')?;
        }
        Ok(Some(line))
    }
}

impl Iterator for Lines<'_> {
    type Item = (usize, Result<Vec<u8>>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.read() {
                Ok(Some(line)) if line.trim_ascii().is_empty() => {}
                Ok(line) => return Some((self.number, Ok(line?))),
                Err(e) => return Some((self.number, Err(Error::in_file(self.files.input, e)))),
            }
        }
    }
}

/// What a line asks for; `None` = it was answered in an earlier run.
fn asked(
    number: usize,
    line: &[u8],
    max_body_bytes: usize,
    seen: &mut HashSet<String>,
    done: &HashSet<String>,
) -> Option<Asked> {
    let is_answered = |id: &Option<String>| id.as_ref().is_some_and(|id| done.contains(id));
    let named = |custom_id, request: Result<LineRequest, LineError>| {
        let is_done = match &request {
            Ok(_) => is_answered(&custom_id),
            Err(error) => done.contains(&key_of_error(&error.message)),
        };
        (!is_done).then_some(Asked {
            number,
            custom_id,
            request,
        })
    };
    let wrong = |code, message: String| LineError {
        code,
        message: format!("line {number}: {message}"),
    };
    // What some editors of Windows begin a file with.
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    let max = max_body_bytes.saturating_add(MAX_LINE_HEAD);
    if line.len() > max {
        let what = format!("has more than {max} bytes: raise --max-body-bytes, or make it shorter");
        return named(None, Err(wrong("line_too_long", what)));
    }
    let parsed: RequestLine<'_> = match serde_json::from_slice(line) {
        Ok(parsed) => parsed,
        Err(e) => {
            let id = serde_json::from_slice(line).ok();
            let id = id.and_then(|Identified { custom_id }| custom_id);
            let what = format!("{e}; expected a JSON object with custom_id, method, url and body");
            return named(id, Err(wrong("invalid_json_line", what)));
        }
    };
    let id = parsed.custom_id.clone();
    if !seen.insert(id.clone()) {
        let what = format!("custom_id must be that of one line, and {id:?} is not");
        return named(Some(id), Err(wrong("duplicate_custom_id", what)));
    }
    named(
        Some(id),
        parsed.request().map_err(|e| wrong(e.code, e.message)),
    )
}

impl RequestLine<'_> {
    /// The request.
    fn request(&self) -> Result<LineRequest, LineError> {
        let wrong = |code, message: String| Err(LineError { code, message });
        if !self.method.eq_ignore_ascii_case("post") {
            return wrong("invalid_method", "method must be POST".into());
        }
        let Some(url) = URLS.into_iter().find(|url| *url == self.url) else {
            let known = URLS.join(", ");
            return wrong("invalid_url", format!("url must be one of {known}"));
        };
        let body = self.body.get();
        // Of a key that is there twice, the last counts, as in the API.
        let fields = serde_json::from_str::<HashMap<String, &RawValue>>(body).unwrap_or_default();
        let stream = fields.get("stream").map(|value| value.get());
        if stream == Some("true") {
            let what = "body.stream is not possible in a batch: leave it out or set it to false";
            return wrong("stream_not_supported", what.into());
        }
        Ok(LineRequest {
            url,
            body: body.to_owned(),
        })
    }
}

/// Answers one line. A request for which there is no place waits.
async fn answer(
    engine: &EngineHandle,
    api: &InProcess,
    asked: Asked,
    ids: &RandomState,
) -> Result<AnswerLine> {
    let (response, error) = match asked.request {
        Ok(request) => (Some(respond(engine, api, request).await?), None),
        Err(error) => (None, Some(error)),
    };
    Ok(AnswerLine {
        id: format!("batch_req_{:016x}", ids.hash_one(asked.number)),
        custom_id: asked.custom_id,
        response,
        error,
    })
}

async fn respond(
    engine: &EngineHandle,
    api: &InProcess,
    request: LineRequest,
) -> Result<LineResponse> {
    let answer = loop {
        let answer = api.post(request.url, request.body.clone()).await?;
        // It is not the line's fault.
        if engine.has_ended() {
            engine.ended().await?;
            return Err(Error::internal("the engine has ended"));
        }
        if !answer.is_busy {
            break answer;
        }
        tokio::time::sleep(RETRY).await;
    };
    let body = RawValue::from_string(answer.body);
    Ok(LineResponse {
        status_code: answer.status,
        request_id: answer.request_id,
        body: body.map_err(|e| Error::internal(format!("an answer is not JSON: {e}")))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(line: &str) -> Option<(&'static str, Option<String>)> {
        let asked = asked(
            3,
            line.as_bytes(),
            100,
            &mut HashSet::new(),
            &HashSet::new(),
        )?;
        let error = asked.request.err()?;
        assert!(error.message.starts_with("line 3: "), "{error:?}");
        let names = error.message.ends_with("custom_id, method, url and body");
        assert_eq!(names, error.code == "invalid_json_line", "{error:?}");
        Some((error.code, asked.custom_id))
    }

    #[test]
    fn what_is_wrong_with_a_line_is_named() {
        let line = |more: &str| format!(r#"{{"custom_id": "a", "method": "POST", {more}}}"#);
        let fine = line(r#""url": "/v1/completions", "body": {"prompt": "x"}"#);
        assert_eq!(error_of(&fine), None);
        assert_eq!(error_of(&format!("\u{feff}{fine}")), None);
        for (line, code, id) in [
            ("{", "invalid_json_line", None),
            ("7", "invalid_json_line", None),
            (
                &line(r#""url": "/v1/completions""#),
                "invalid_json_line",
                Some("a"),
            ),
            (
                &line(r#""url": "/v1/completions", "body": {}, "more": 1"#),
                "invalid_json_line",
                Some("a"),
            ),
            (
                &line(r#""url": "/v1/files", "body": {}"#),
                "invalid_url",
                Some("a"),
            ),
            (
                &line(r#""url": "/v1/responses", "body": {"stream": false, "stream": true}"#),
                "stream_not_supported",
                Some("a"),
            ),
            (
                &line(r#""url": "/v1/responses", "body": {"stream": true}"#),
                "stream_not_supported",
                Some("a"),
            ),
            (&fine.replace("POST", "GET"), "invalid_method", Some("a")),
            (&" ".repeat(100 + MAX_LINE_HEAD + 1), "line_too_long", None),
        ] {
            let wanted = (code, id.map(str::to_owned));
            assert_eq!(error_of(line), Some(wanted), "{line}");
        }
    }

    #[test]
    fn ids_are_of_one_line_each() {
        let line = br#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}"#;
        let mut seen = HashSet::new();
        let asked = |seen: &mut HashSet<String>, done| asked(1, line, 100, seen, done);
        let done = HashSet::new();
        assert!(asked(&mut seen, &done).is_some_and(|line| line.request.is_ok()));
        let again = asked(&mut seen, &done).and_then(|line| line.request.err());
        assert!(again.is_some_and(|error| error.code == "duplicate_custom_id"));
        let done = HashSet::from(["a".to_owned()]);
        assert!(asked(&mut HashSet::new(), &done).is_none());
        // The error of the line with the same id is no answer to the request.
        let done = HashSet::from([key_of_error(&again_message(line))]);
        assert!(asked(&mut HashSet::new(), &done).is_some());
        assert!(asked(&mut HashSet::from(["a".to_owned()]), &done).is_none());
    }

    fn again_message(line: &[u8]) -> String {
        let mut seen = HashSet::from(["a".to_owned()]);
        let again = asked(1, line, 100, &mut seen, &HashSet::new());
        let error = again.and_then(|line| line.request.err());
        error.expect("a second line of the id").message
    }

    /// A line that is too long is read no further, and the next one is whole.
    #[test]
    fn long_lines_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in.jsonl");
        let long = "x".repeat(MAX_LINE_HEAD + 100);
        std::fs::write(&input, format!("{long}\n\nabc\n  \nd")).unwrap();
        let lines = Lines::open(BatchFiles {
            input: &input,
            out: &input,
            max_body_bytes: 10,
            concurrency: 1,
        });
        let lines: Vec<_> = lines.unwrap().map(|(i, line)| (i, line.unwrap())).collect();
        assert_eq!(lines[0].1.len(), MAX_LINE_HEAD + 11);
        assert_eq!(lines[1..], [(3, b"abc\n".to_vec()), (5, b"d".to_vec())]);
    }
}
