//! The process that serves a model, its log, and its end.

use super::system::{how, without_ctrl_c};
use foretoken_core::error::{Result, clipped};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The beginning of the line with which `serve` says where it listens; the address follows.
pub const SERVES: &str = "foretoken serves http://";

/// The environment variable with the API keys, one a line.
pub const API_KEY_VARIABLE: &str = "FORETOKEN_API_KEY";

/// Number of log lines that an error about a process has.
const LAST_LINES: usize = 5;

/// Maximum time until the last lines of a process that has ended are read.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(3);

/// Takes a log line of a model's process.
pub type ModelLog = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// How a model is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSpec {
    /// The name that requests have.
    pub name: String,
    /// The names of the adapters that its process has besides.
    pub adapters: Vec<String>,
    /// The command line of the program that serves it on a port of its choice, and ends when its stdin does.
    pub args: Vec<OsString>,
}

impl ModelSpec {
    /// All names that requests for its process have.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let adapters = self.adapters.iter().map(String::as_str);
        std::iter::once(self.name.as_str()).chain(adapters)
    }
}

/// Reads which models there are, for a router whose models may change.
pub type ModelSource = Arc<dyn Fn() -> Result<Vec<ModelSpec>> + Send + Sync>;

/// What all processes have.
#[derive(Clone)]
pub(super) struct Launcher {
    pub program: PathBuf,
    /// The keys of clients, which the processes accept.
    pub api_keys: Arc<[String]>,
    pub log: ModelLog,
}

/// The last lines of a log.
#[derive(Debug, Clone, Default)]
pub(super) struct LastLines(Arc<Mutex<VecDeque<String>>>);

impl LastLines {
    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LAST_LINES {
            lines.pop_front();
        }
        lines.push_back(clipped(line));
    }

    /// The lines as one.
    pub fn joined(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        lines.join("; ")
    }
}

/// A running process. Dropping it kills it.
pub(super) struct Process {
    child: Child,
    /// It ends when this is closed, so that it does not outlive the router, either.
    stdin: Option<ChildStdin>,
    address: Option<oneshot::Receiver<SocketAddr>>,
    readers: [JoinHandle<()>; 2],
}

impl Process {
    /// Starts the process of `spec`, whose last log lines go to `last`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(spec: &ModelSpec, launcher: &Launcher, last: LastLines) -> io::Result<Self> {
        let mut command = Command::new(&launcher.program);
        without_ctrl_c(&mut command)
            .args(&spec.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if launcher.api_keys.is_empty() {
            command.env_remove(API_KEY_VARIABLE);
        } else {
            command.env(API_KEY_VARIABLE, launcher.api_keys.join("\n"));
        }
        let mut child = command.spawn()?;
        let (found, address) = oneshot::channel();
        let mut found = Some(found);
        let stdout = each_line(child.stdout.take(), move |line| {
            if let Some(address) = address_in(line)
                && let Some(found) = found.take()
            {
                // Nobody waits for it if the process is to end already.
                let _ = found.send(address);
            }
        });
        let (log, name) = (launcher.log.clone(), spec.name.clone());
        let stderr = each_line(child.stderr.take(), move |line| {
            last.push(line);
            log(&name, line);
        });
        Ok(Self {
            stdin: child.stdin.take(),
            child,
            address: Some(address),
            readers: [stdout, stderr],
        })
    }

    /// Waits until the process listens; `None` if it ends without.
    pub async fn ready(&mut self) -> Option<SocketAddr> {
        self.address.take()?.await.ok()
    }

    /// Waits until the process ends, and says how.
    pub async fn ended(&mut self) -> String {
        let status = self.child.wait().await;
        for reader in &mut self.readers {
            // Whoever has inherited the pipe may keep it open.
            let _ = timeout(LAST_LINES_TIMEOUT, reader).await;
        }
        match status {
            Ok(status) => how(status),
            Err(e) => e.to_string(),
        }
    }

    /// Asks the process to end, and kills it if it has not when `patience` ends.
    pub async fn stop(mut self, patience: impl Future<Output = ()>) {
        self.stdin = None;
        let in_time = tokio::select! {
            _ = self.child.wait() => true,
            () = patience => false,
        };
        if !in_time {
            tracing::warn!("killing a process that did not end in time");
            if let Err(e) = self.child.kill().await {
                tracing::warn!("cannot kill it: {e}");
            }
        }
    }
}

/// The address in the line of a process that listens.
fn address_in(line: &str) -> Option<SocketAddr> {
    let rest = line.strip_prefix(SERVES)?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Calls `take` with each line of `pipe` until it ends.
fn each_line(
    pipe: Option<impl AsyncRead + Unpin + Send + 'static>,
    mut take: impl FnMut(&str) + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let Some(pipe) = pipe else { return };
        let mut lines = BufReader::new(pipe).split(b'\n');
        while let Ok(Some(line)) = lines.next_segment().await {
            take(String::from_utf8_lossy(&line).trim_end());
        }
    })
}

// The processes of the tests are shells.
#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> ModelSpec {
        ModelSpec {
            name: "m".into(),
            adapters: Vec::new(),
            args: vec!["-c".into(), script.into()],
        }
    }

    fn launcher(keys: &[&str]) -> (Launcher, Arc<Mutex<Vec<String>>>) {
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = seen.clone();
        let keys: Vec<String> = keys.iter().copied().map(str::to_owned).collect();
        let launcher = Launcher {
            program: "/bin/sh".into(),
            api_keys: keys.into(),
            log: Arc::new(move |name, line| log.lock().unwrap().push(format!("{name}: {line}"))),
        };
        (launcher, seen)
    }

    #[test]
    fn the_address_is_read_from_its_line_alone() {
        let at = |line: &str| address_in(line).map(|address| address.port());
        assert_eq!(
            at("foretoken serves http://127.0.0.1:81 - try: curl http://x"),
            Some(81)
        );
        assert_eq!(at("defaults of http://127.0.0.1:81"), None);
        assert_eq!(at("foretoken serves http://there"), None);
    }

    #[tokio::test]
    async fn a_process_says_where_it_listens_and_ends_with_its_stdin() {
        let (launcher, seen) = launcher(&["a", "b"]);
        let script = "echo \"$FORETOKEN_API_KEY\" >&2; echo one; echo 'foretoken serves http://127.0.0.1:9 -'; cat; echo end >&2";
        let last = LastLines::default();
        let mut process = Process::start(&shell(script), &launcher, last.clone()).unwrap();
        assert_eq!(process.ready().await.map(|address| address.port()), Some(9));
        process.stop(std::future::pending()).await;
        while last.joined() != "a; b; end" {
            tokio::task::yield_now().await;
        }
        assert_eq!(*seen.lock().unwrap(), ["m: a", "m: b", "m: end"]);
    }

    #[tokio::test]
    async fn a_process_that_fails_leaves_its_last_lines() {
        let (launcher, _) = launcher(&[]);
        let script = "echo ${FORETOKEN_API_KEY-none}; seq 8 >&2; exit 3";
        let last = LastLines::default();
        let mut process = Process::start(&shell(script), &launcher, last.clone()).unwrap();
        assert_eq!(process.ready().await, None);
        assert_eq!(process.ended().await, "exit code 3");
        assert_eq!(last.joined(), "4; 5; 6; 7; 8");
        let mut process = Process::start(&shell("kill -9 $$"), &launcher, last).unwrap();
        assert_eq!(process.ended().await, "signal 9");
    }

    #[tokio::test]
    async fn a_process_that_does_not_end_is_killed() {
        let (launcher, _) = launcher(&[]);
        let script = "echo 'foretoken serves http://127.0.0.1:9'; exec sleep 1000";
        let mut process = Process::start(&shell(script), &launcher, LastLines::default()).unwrap();
        assert!(process.ready().await.is_some());
        process.stop(std::future::ready(())).await;
    }
}
