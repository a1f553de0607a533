//! Flags and environment variables with absurd numbers: one line and exit code 2, or the number is used;
//! never a panic, an abort or a hang.

use crate::common::process::foretoken;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const HUGE: [&str; 3] = ["1000000000", "18446744073709551615", "99999999999999999999"];

/// Runs `command` until it ends or has lived for longer than a start takes; then it is killed, and `None`.
fn fate(mut command: Command) -> Option<(Option<i32>, String)> {
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(8) {
        if let Some(status) = child.try_wait().unwrap() {
            let output = child.wait_with_output().unwrap();
            return Some((status.code(), String::from_utf8(output.stderr).unwrap()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// What is said if `line` is refused; `None` if it is accepted.
#[track_caller]
fn refusal(line: &str, variable: Option<(&str, &str)>) -> Option<String> {
    let mut command = foretoken();
    command.args(line.split_whitespace()).envs(variable);
    let (code, said) = fate(command)?;
    let shown = format!("{variable:?} `{line}`: {code:?} {said}");
    match code {
        Some(0) => None,
        Some(2) => {
            let lines = said
                .lines()
                .filter(|l| !l.contains(" INFO ") && !l.contains(" WARN "));
            let lines: Vec<_> = lines.collect();
            assert_eq!(lines.len(), 1, "{shown}");
            assert!(
                lines[0].starts_with("error: ") && lines[0].len() < 1_500,
                "{shown}"
            );
            Some(lines[0].to_owned())
        }
        _ => panic!("{shown}"),
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags() {
    let serve = [
        "num-blocks",
        "block-size",
        "kv-cache-memory",
        "threads",
        "max-num-batched-tokens",
        "max-num-seqs",
        "max-waiting",
        "max-model-len",
        "max-body-bytes",
        "shutdown-timeout",
        "spec-length",
        "tables-memory",
        "gpu-memory-utilization",
        "port",
        "seed",
    ];
    // `generate` of nothing loads all that `serve` does, and ends.
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"Hi\"}\n").unwrap();
    for flag in serve {
        for number in HUGE {
            // A port that cannot be bound ends what starts well.
            let host = if flag == "port" {
                ""
            } else {
                "--host 203.0.113.7"
            };
            let line = format!("--{flag} {number} {host}");
            let refused = refusal(&line, None);
            assert!(refused.is_some(), "{line}");
        }
    }
    for line in [
        "--num-blocks 1000000000 --block-size 1000000000",
        "--kv-cache-memory 16EiB",
        "--kv-cache-memory 1",
        "--num-blocks 0",
        "--block-size 0",
        "--block-size 100000000 --num-blocks 1",
        "--threads 0",
        "--max-waiting 0",
        "--gpu-memory-utilization nan",
        "--gpu-memory-utilization -1",
    ] {
        assert!(
            refusal(&format!("{line} --host 203.0.113.7"), None).is_some(),
            "{line}"
        );
    }
    // Small, but what was asked for.
    refusal("--max-body-bytes 1 --host 203.0.113.7", None);
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_bench() {
    for flag in [
        "random-prompts 1 --prompt-tokens",
        "random-prompts 1 --max-tokens",
        "random-prompts 1 --limit-per-category",
        "random-prompts 1 --streams",
        "random-prompts 1 --spec-lengths",
        "random-prompts",
        "random-prompts 1 --max-tokens 1 --repeat",
        "random-prompts 1 --row-penalty",
    ] {
        refusal(&format!("bench --{flag} {}", HUGE[1]), None);
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn environment() {
    for (name, value) in [
        ("TOKIO_WORKER_THREADS", "0"),
        ("TOKIO_WORKER_THREADS", "many"),
        ("TOKIO_WORKER_THREADS", "1000000000"),
        ("RAYON_NUM_THREADS", "1000000000"),
        ("RAYON_NUM_THREADS", "-1"),
        ("CANDLE_NUM_THREADS", "1000000000"),
        ("CANDLE_NUM_THREADS", "many"),
        ("RUST_LOG", "foretoken=loud=very"),
    ] {
        let said = refusal("--host 203.0.113.7", Some((name, value)));
        let said = said.unwrap_or_default();
        assert!(said.contains(name), "{name}={value}: {said}");
    }
}
