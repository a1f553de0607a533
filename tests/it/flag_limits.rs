//! Flags and environment variables with numbers out of any range: one line and exit code 2, or the number is used;
//! never a panic, an abort or a hang.

use crate::common::process::foretoken;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const HUGE: [&str; 3] = ["1000000000", "18446744073709551615", "99999999999999999999"];

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
    let flags = "num-blocks block-size kv-cache-memory threads max-num-batched-tokens max-num-seqs \
        max-model-len spec-length tables-memory gpu-memory-utilization seed";
    for flag in flags.split(' ') {
        let said = HUGE.map(|number| generate(&format!("--{flag} {number}")));
        assert!(
            said[2].as_ref().is_some_and(|said| said.contains(flag)),
            "{flag}: {said:?}"
        );
    }
    for line in [
        "--num-blocks 1000000000",
        "--num-blocks 1000000000 --block-size 1000000000",
        "--kv-cache-memory 16EiB",
        "--kv-cache-memory 1",
        "--num-blocks 0",
        "--block-size 0",
        "--block-size 100000000 --num-blocks 1",
        "--threads 0",
        "--gpu-memory-utilization nan",
        "--gpu-memory-utilization=-1",
    ] {
        let said = generate(line).expect(line);
        let named = line.split(['=', ' ']).filter(|word| word.starts_with("--"));
        assert!(
            named.clone().any(|flag| said.contains(flag)),
            "{line}: {said}"
        );
    }
}

/// Of what `serve` alone has: a host that is not this machine's ends what is accepted, before a model is read.
#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_serve() {
    const HOST: &str = "203.0.113.7";
    for (flag, number, is_taken) in [
        ("max-waiting", "0", false),
        ("max-waiting", HUGE[1], true),
        ("max-waiting", HUGE[2], false),
        ("max-body-bytes", "1", true),
        ("max-body-bytes", HUGE[1], true),
        ("max-body-bytes", HUGE[2], false),
        ("shutdown-timeout", HUGE[0], true),
        ("shutdown-timeout", HUGE[1], false),
        ("shutdown-timeout", HUGE[2], false),
        ("port", HUGE[0], false),
        ("port", HUGE[1], false),
        ("port", HUGE[2], false),
    ] {
        let line = format!("--{flag} {number} --host {HOST}");
        let said = refusal_in_time(&line, None).expect(flag);
        assert_eq!(said.contains(HOST), is_taken, "{flag} {number}: {said}");
        assert_ne!(said.contains(flag), is_taken, "{flag} {number}: {said}");
    }
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
    ] {
        refusal(&format!("bench --{flag} {}", HUGE[1]));
    }
    let base = "bench --random-prompts 1 --num-blocks 64";
    let flags = [
        "prompt-tokens",
        "max-tokens",
        "streams",
        "spec-topks",
        "repeat",
    ];
    assert_eq!(refused(base, &flags), flags.len() * ABSURD.len());
    for flag in ["synthetic-acceptance", "temperatures"] {
        for number in ABSURD.iter().skip(1) {
            let line = format!("{base} --{flag}={number}");
            assert!(refusal_in_time(&line, None).is_some(), "{line}");
        }
    }
}

/// Numbers that no flag of a count, a share or a rate takes, or that it takes for what they are.
const ABSURD: [&str; 6] = ["0", "-1", "nan", "1e300", HUGE[1], HUGE[2]];

/// Runs `base` with each of `flags` and each of [`ABSURD`]. Returns how many were refused.
#[cfg(feature = "embedded-model")]
fn refused(base: &str, flags: &[&str]) -> usize {
    let numbers = || ABSURD.iter();
    let lines = flags
        .iter()
        .flat_map(|flag| numbers().map(move |n| (flag, n)));
    let lines = lines.map(|(flag, number)| format!("{base} --{flag}={number}"));
    let refused = lines.filter(|line| refusal_in_time(line, None).is_some());
    refused.count()
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_generate() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("prompts.jsonl"), "{\"prompt\": \"Hi\"}\n").unwrap();
    let base = format!(
        "generate --num-blocks 64 --prompts {} --out {}",
        at("prompts.jsonl"),
        at("out.jsonl")
    );
    let flags = ["samples", "max-tokens", "top-p", "spec-nodes", "spec-topk"];
    assert_eq!(refused(&base, &flags), flags.len() * ABSURD.len());
    // Few or many: the first of these, and a low temperature, are what was asked for.
    let base = format!("{base} --max-tokens 1");
    assert_eq!(refused(&base, &["limit-per-category"]), ABSURD.len() - 1);
    assert_eq!(refused(&base, &["temperature"]), ABSURD.len() - 1);
    // A context that takes all memory there is.
    for flag in ["max-model-len", "num-blocks", "max-num-seqs"] {
        let line = base.replace("--num-blocks 64", "") + &format!(" --{flag} {}", HUGE[1]);
        refusal(&line);
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn flags_of_distill() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let text = "The cat sat on the mat, and the dog ran away from the very big house. ".repeat(20);
    std::fs::write(at("corpus.txt"), [&text[..]; 8].join("\n\n")).unwrap();
    let base = format!(
        "distill --model foretoken-demo --corpus {} --out {}",
        at("corpus.txt"),
        at("out")
    );
    let counts = [
        "seq-len",
        "top-k",
        "ttt-steps",
        "draft-vocab-size",
        "batch-size",
        "micro-batch",
        "steps",
        "eval-every",
        "checkpoint-every",
        "threads",
        "block-size",
        "layers",
    ];
    assert_eq!(refused(&base, &counts), counts.len() * ABSURD.len());
    // 0 is a share.
    assert_eq!(refused(&base, &["holdout"]), ABSURD.len());
    // What is refused, and what is not, with a run of one step.
    let base = format!(
        "{base} --method parallel --layers 1 --mask-token-id 5 --draft-vocab-size 64 --steps 1 --seq-len 16 --batch-size 1"
    );
    for (flag, number) in [
        ("taps", HUGE[0]),
        ("taps", HUGE[1]),
        ("mask-token-id", HUGE[0]),
        ("mask-token-id", HUGE[1]),
        ("stop-after", "0"),
        ("warmup", "-1"),
        ("seed", "-2"),
        ("clip", "nan"),
        ("clip", "0"),
        ("learning-rate", "inf"),
        ("weight-decay", "1e300"),
        ("overlap-share", "nan"),
    ] {
        let base = base.replace(
            "--mask-token-id 5",
            if flag == "mask-token-id" {
                ""
            } else {
                "--mask-token-id 5"
            },
        );
        let line = format!("{base} --{flag}={number}");
        assert!(refusal_in_time(&line, None).is_some(), "{line}");
    }
    for number in HUGE {
        let line = format!(
            "tokenizer --corpus {} --out {} --vocab-size {number}",
            at("corpus.txt"),
            at("tokens")
        );
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
