//! Flags and environment variables with numbers that the parser of flags takes, but that may be out of any range: one
//! line and exit code 2, or the number is used; never a panic, an abort or a hang. What the parser refuses is in the
//! tests of `config`.

use crate::common::process::foretoken;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const HUGE: [&str; 2] = ["1000000000", "18446744073709551615"];

/// Longer than a start takes.
const START: Duration = Duration::from_secs(8);
/// Longer than a text of one token takes, start included, on a busy machine, too.
const RUN: Duration = Duration::from_secs(120);

/// Runs `command` until it ends or has lived for `patience`; then it is killed, and `None`.
fn fate(mut command: Command, patience: Duration) -> Option<(Option<i32>, String)> {
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while start.elapsed() < patience {
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

/// What is said if `line` is refused; `None` if it has done what it was asked for, or does so after [`START`].
#[track_caller]
fn refusal(line: &str) -> Option<String> {
    let mut command = foretoken();
    command.args(line.split_whitespace());
    refused_with(line, fate(command, START)?)
}

/// The same of a command that ends: if it does not, the test fails.
#[track_caller]
fn refusal_in_time(line: &str, variable: Option<(&str, &str)>) -> Option<String> {
    let mut command = foretoken();
    command.args(line.split_whitespace()).envs(variable);
    let fate = fate(command, RUN);
    refused_with(line, fate.unwrap_or_else(|| panic!("`{line}` hangs")))
}

#[track_caller]
fn refused_with(line: &str, (code, said): (Option<i32>, String)) -> Option<String> {
    let shown = format!("`{line}`: {code:?} {said}");
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

/// `generate` loads all that `serve` does, and ends.
#[cfg(feature = "embedded-model")]
#[test]
fn flags() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("prompts.jsonl"), "{\"prompt\": \"Hi\"}\n").unwrap();
    let generate = |flags: &str| {
        let (prompts, out) = (at("prompts.jsonl"), at("out.jsonl"));
        // It would go on where it has stopped.
        if Path::new(&out).exists() {
            std::fs::remove_file(&out).unwrap();
        }
        let line = format!("generate --prompts {prompts} --out {out} --max-tokens 1 {flags}");
        refusal_in_time(&line, None)
    };
    let flags = "num-blocks block-size kv-cache-memory max-num-batched-tokens max-num-seqs max-model-len spec-length \
        tables-memory seed limit-per-category";
    for flag in flags.split_whitespace() {
        for number in HUGE {
            generate(&format!("--{flag} {number}"));
        }
    }
    for line in [
        "--num-blocks 1000000000",
        "--num-blocks 1000000000 --block-size 1000000000",
        "--kv-cache-memory 16EiB",
        "--kv-cache-memory 1",
        "--block-size 100000000 --num-blocks 1",
    ] {
        let said = generate(line).expect(line);
        let mut named = line.split(' ').filter(|word| word.starts_with("--"));
        assert!(named.any(|flag| said.contains(flag)), "{line}: {said}");
    }
}

/// Of what `serve` alone has: a host that is not this machine's ends what is accepted, before a model is read.
#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_serve() {
    const HOST: &str = "203.0.113.7";
    for (flag, number) in [
        ("max-waiting", HUGE[1]),
        ("max-body-bytes", "1"),
        ("max-body-bytes", HUGE[1]),
        ("shutdown-timeout", HUGE[0]),
    ] {
        let line = format!("--{flag} {number} --host {HOST}");
        let said = refusal_in_time(&line, None).expect(flag);
        assert!(
            said.contains(HOST) && !said.contains(flag),
            "{flag} {number}: {said}"
        );
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_bench() {
    refusal(&format!(
        "bench --random-prompts 1 --limit-per-category {}",
        HUGE[1]
    ));
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_distill() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let text = "The cat sat on the mat, and the dog ran away from the very big house. ".repeat(20);
    std::fs::write(at("corpus.txt"), [&text[..]; 8].join("\n\n")).unwrap();
    let base = format!(
        "distill --model foretoken-demo --corpus {} --out {} --method parallel --layers 1 --draft-vocab-size 64 \
         --steps 1 --seq-len 16 --batch-size 1",
        at("corpus.txt"),
        at("out")
    );
    for flag in [
        format!("--mask-token-id 5 --taps {}", HUGE[0]),
        format!("--mask-token-id 5 --taps {}", HUGE[1]),
        format!("--mask-token-id {}", HUGE[0]),
    ] {
        let line = format!("{base} {flag}");
        assert!(refusal_in_time(&line, None).is_some(), "{line}");
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
        let said = refusal_in_time("--host 203.0.113.7", Some((name, value)));
        let said = said.unwrap_or_default();
        assert!(said.contains(name), "{name}={value}: {said}");
    }
}
