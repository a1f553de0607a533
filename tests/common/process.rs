//! Runs the binary as a process.

use super::project::{program, root};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `foretoken`, run in the project's folder and without the user's settings.
pub fn foretoken() -> Command {
    let mut command = Command::new(program());
    command
        .current_dir(root())
        .env_remove("FORETOKEN_API_KEY")
        .env_remove("RUST_LOG")
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null());
    command
}

/// The same with at most `bytes` of address space, where it can be limited: on Linux.
pub fn foretoken_within(bytes: u64) -> Command {
    let whole = foretoken();
    if cfg!(not(target_os = "linux")) {
        return whole;
    }
    let mut command = Command::new("prlimit");
    command
        .arg(format!("--as={bytes}"))
        .arg(whole.get_program());
    for (name, value) in whole.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// What the program wrote to stdout. It ended well.
#[track_caller]
pub fn stdout_of(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {stderr}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What the program wrote to stderr. Its exit code says that it was asked for what cannot be done.
#[track_caller]
pub fn refusal(output: &Output) -> String {
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    said
}

/// The same, which is one line.
#[track_caller]
pub fn refusal_line(output: &Output) -> String {
    let said = refusal(output);
    let is_line = said.starts_with("error: ") && said.lines().count() == 1;
    assert!(is_line, "{said}");
    said
}

/// A file to which no byte can be written. Only Linux has one.
#[cfg(target_os = "linux")]
pub fn full_disk() -> std::fs::File {
    std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap()
}

/// A running server; killed if a test fails.
pub struct Server {
    child: Child,
    address: String,
    /// The lines that it prints at start-up; the last one is a command to paste.
    pub said: Vec<String>,
}

/// The JSON of a whole response without an error.
pub fn json_of(answer: &str) -> Value {
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"))
}

impl Server {
    /// Starts `foretoken FLAGS --port 0` and waits until it listens.
    pub fn start(flags: &str) -> Self {
        Self::start_logging(flags, "warn", Stdio::inherit())
    }

    /// The same, with a log of `level` written to `log`.
    pub fn start_logging(flags: &str, level: &str, log: impl Into<Stdio>) -> Self {
        let mut command = foretoken();
        command.env("RUST_LOG", level).stderr(log);
        Self::spawn(command, flags)
    }

    /// The same, with the environment and the log of `command`.
    pub fn spawn(mut command: Command, flags: &str) -> Self {
        let child = command
            .args(flags.split_whitespace())
            .args(["--port", "0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut server = Self {
            child,
            address: String::new(),
            said: Vec::new(),
        };
        for line in BufReader::new(server.child.stdout.as_mut().unwrap()).lines() {
            let line = line.unwrap();
            if let Some((_, at)) = line.split_once("http://") {
                server.address = at.split(' ').next().unwrap().to_owned();
            }
            server.said.push(line);
            if !server.address.is_empty() {
                break;
            }
        }
        assert!(!server.address.is_empty(), "{:?}", server.said);
        server
    }

    /// The command to paste.
    pub fn startup_line(&self) -> &str {
        self.said.last().unwrap()
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The id of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Lets the running process have at most `count` files open. Only Linux can be asked this from outside.
    #[cfg(target_os = "linux")]
    pub fn limit_files(&self, count: usize) {
        let (pid, limit) = (self.child.id(), format!("--nofile={count}:{count}"));
        let mut prlimit = Command::new("prlimit");
        let status = prlimit.args(["--pid", &pid.to_string(), &limit]).status();
        assert!(status.unwrap().success());
    }

    /// The most memory that it has had so far, in bytes.
    #[cfg(target_os = "linux")]
    pub fn peak_memory(&self) -> usize {
        peak_memory(&self.child.id().to_string())
    }

    /// The whole response to `body`, headers included.
    pub fn post(&self, path: &str, body: &str) -> String {
        self.ask(&post_head(path, body), body)
    }

    /// The JSON that answers a body.
    pub fn json(&self, path: &str, body: &Value) -> Value {
        json_of(&self.post(path, &body.to_string()))
    }

    /// The same with an API key.
    pub fn post_as(&self, key: &str, path: &str, body: &str) -> String {
        let head = post_head(path, body);
        self.ask(&format!("{head}\r\nAuthorization: Bearer {key}"), body)
    }

    /// The whole response of `path`, headers included.
    pub fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1"), "")
    }

    fn ask(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let host = &self.address;
        write!(
            stream,
            "{head}\r\nHost: {host}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends `signal`.
    pub fn signal(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.unwrap().success());
    }

    /// Sends `signal` and waits for the exit code.
    pub fn stop(&mut self, signal: &str, patience: Duration) -> Option<i32> {
        self.signal(signal);
        let started = Instant::now();
        while started.elapsed() < patience {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("still running {patience:?} after SIG{signal}");
    }
}

/// The request line and the headers of a request with a JSON body.
fn post_head(path: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {length}")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The most memory that the process `pid` (or "self") has had, in bytes.
#[cfg(target_os = "linux")]
pub fn peak_memory(pid: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.unwrap().parse::<usize>().unwrap() * 1024
}
