//! Replays the fuzzers' corpus, and changes of each file. `FORETOKEN_FUZZ_SECONDS=60` makes changes for so long for
//! each target, or for those of `FORETOKEN_FUZZ_TARGETS=config,folder`: where there is no libFuzzer.

use crate::common::memory::peak_of;
use foretoken::fuzzing::{self, TARGETS};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LONGEST: Duration = Duration::from_secs(20);
/// What one input may take on the thread that reads it: far above what any of this size needs.
const MAX_MEMORY: usize = 256 << 20;
/// Changes of each file, if no time is given.
const CHANGES: u64 = 12;

fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(name);
    let files = std::fs::read_dir(&folder).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    let read = |file: PathBuf| (file.clone(), std::fs::read(&file).unwrap());
    files.into_iter().map(read).collect()
}

/// Random numbers of a seed (xorshift64*, Vigna 2016).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        number as usize % end.max(1)
    }
}

/// A few changes of `bytes`, into which a part of `other` may come.
fn changed(bytes: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let len = random.below(9).min(bytes.len() - at);
        match random.below(7) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..at + len)),
            2 => bytes[at..at + len].fill([0, 1, 0x7f, 0xff][random.below(4)]),
            3 => bytes[at..at + len]
                .iter_mut()
                .for_each(|byte| *byte ^= 1 << random.below(8)),
            // Numbers in texts.
            4 => drop(bytes.splice(at..at + len, *b"18446744073709551615")),
            5 => {
                let from = random.below(other.len());
                let part = &other[from..other.len().min(from + random.below(300))];
                drop(bytes.splice(at..at + len, part.iter().copied()));
            }
            _ => {
                let again = bytes[at..at + len].to_vec();
                drop(bytes.splice(at..at, again));
            }
        }
    }
    bytes
}

#[test]
fn every_file_is_survived() {
    for (name, target) in TARGETS {
        for (file, bytes) in corpus(name) {
            let start = Instant::now();
            let memory = peak_of(|| {
                target(&bytes);
                target(&bytes[..bytes.len() / 2]);
            });
            let took = start.elapsed();
            assert!(took < LONGEST, "{}: {took:?}", file.display());
            assert!(memory < MAX_MEMORY, "{}: {memory} bytes", file.display());
        }
    }
}

#[test]
fn changes_of_every_file_are_survived() {
    let seconds = std::env::var("FORETOKEN_FUZZ_SECONDS").ok();
    let time = seconds.map(|seconds| Duration::from_secs(seconds.parse().unwrap()));
    let chosen = std::env::var("FORETOKEN_FUZZ_TARGETS").ok();
    let is_chosen = |name: &str| {
        let chosen = chosen.as_deref();
        chosen.is_none_or(|chosen| chosen.split(',').any(|chosen| chosen == name))
    };
    for (name, _) in TARGETS.iter().filter(|(name, _)| is_chosen(name)) {
        let files = corpus(name);
        let (begin, mut count) = (Instant::now(), 0);
        let goes_on = |count| match time {
            Some(time) => begin.elapsed() < time,
            None => count < CHANGES * files.len() as u64,
        };
        while goes_on(count) {
            count += 1;
            let mut random = Random(count.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let (file, bytes) = &files[random.below(files.len())];
            let other = &files[random.below(files.len())].1;
            let bytes = changed(bytes, other, &mut random);
            // What is found can be run again.
            let input = std::env::temp_dir().join(format!("foretoken-{name}.input"));
            let start = Instant::now();
            let mut done = Ok(());
            let memory = peak_of(|| {
                done = std::panic::catch_unwind(|| fuzzing::run(name, &bytes));
            });
            let took = start.elapsed();
            if done.is_err() || took > LONGEST || memory > MAX_MEMORY {
                std::fs::write(&input, &bytes).unwrap();
                let (file, input) = (file.display(), input.display());
                panic!(
                    "{name}: change {count}, of {file}, took {took:?} and {memory} bytes, or panics: {input}"
                );
            }
        }
        println!("{name}: {count} changes");
    }
}

/// Set in a process that does nothing else, so that its memory is that of the targets: grammars are compiled on
/// threads of their own.
const ALONE: &str = "FORETOKEN_FUZZ_ALONE";
/// Maximum bytes that all inputs together may take at once.
const MAX_PROCESS_MEMORY: usize = 400 << 20;
/// Where a process ends that takes far more, before the machine does.
const MAX_ADDRESSES: usize = 6 << 30;

/// Schemas, grammars and tools of the corpus, and those of strangers that repeat much.
#[test]
#[cfg(target_os = "linux")]
fn grammars_take_bounded_memory() {
    if std::env::var_os(ALONE).is_some() {
        return replay_alone();
    }
    let mut child = Command::new("prlimit");
    child.arg(format!("--as={MAX_ADDRESSES}"));
    child.arg(std::env::current_exe().unwrap());
    child.args([
        "corpus::grammars_take_bounded_memory",
        "--exact",
        "--nocapture",
    ]);
    let done = child.env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    assert!(said.contains("1 passed"), "it has run");
}

fn replay_alone() {
    let mut inputs = repetitive();
    for name in ["schema", "grammar", "tools"] {
        let files = corpus(name).into_iter();
        inputs.extend(files.map(|(file, bytes)| (name, file.display().to_string(), bytes)));
    }
    let before = peak_memory();
    for (name, what, bytes) in inputs {
        let start = Instant::now();
        fuzzing::run(name, &bytes);
        let (took, more) = (start.elapsed(), peak_memory() - before);
        println!("{name}, {what}: {took:?}, {} MiB", more >> 20);
        assert!(
            more < MAX_PROCESS_MEMORY,
            "{name}, {what}: {} MiB",
            more >> 20
        );
        assert!(took < LONGEST, "{name}, {what}: {took:?}");
    }
}

/// Inputs by their targets, with what they repeat.
fn repetitive() -> Vec<(&'static str, String, Vec<u8>)> {
    let numbered = |count: usize, schema: &Value| -> Map<String, Value> {
        let entry = |i: usize| (format!("p{i}"), schema.clone());
        (0..count).map(entry).collect()
    };
    let tool = |parameters: Value| json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let large = json!({"enum": ["x".repeat(125_000), 1]});
    let reference = json!({"$ref": "#/$defs/large"});
    let beside = json!({"$ref": "#/$defs/large", "minLength": 1});
    let twice = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/p{}", i + 1)});
        (format!("p{i}"), json!({"allOf": [next, next]}))
    };
    let mut doubled: Map<String, Value> = (0..30).map(twice).collect();
    doubled.insert("p30".into(), json!({"type": "string", "pattern": "x"}));
    let inputs = [
        (
            "schema",
            "definitions that double",
            json!({"$ref": "#/$defs/p0", "$defs": doubled}),
        ),
        (
            "schema",
            "names in pointers",
            json!({"properties": {"/".repeat(110_000): {"anyOf": vec![json!({}); 30_000]}}}),
        ),
        (
            "tools",
            "definitions that are not used",
            tool(
                json!({"properties": numbered(7000, &json!({"type": "integer"})), "$defs": {"large": large}}),
            ),
        ),
        (
            "tools",
            "definitions",
            tool(
                json!({"properties": numbered(300, &json!({"items": reference})), "$defs": {"large": large}}),
            ),
        ),
        (
            "schema",
            "definitions for errors",
            json!({"allOf": numbered(290, &reference).values().chain([&json!({"not": {}})]).collect::<Vec<_>>(),
                "$defs": {"large": large}}),
        ),
        (
            "schema",
            "definitions beside keywords",
            json!({"properties": numbered(2500, &beside), "$defs": {"large": {"const": "x".repeat(100_000)}}}),
        ),
        (
            "schema",
            "schemas of patterns",
            json!({"properties": numbered(5000, &json!({})), "patternProperties": {"^p": {"const": "x".repeat(100_000)}}}),
        ),
    ];
    let bytes = |(name, what, value): (&'static str, &str, Value)| {
        (name, what.to_owned(), value.to_string().into_bytes())
    };
    inputs.into_iter().map(bytes).collect()
}

/// The most memory that this process has had, in bytes.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.unwrap().parse::<usize>().unwrap() * 1024
}
