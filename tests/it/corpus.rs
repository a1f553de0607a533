//! Replays the fuzzers' corpus, and changes of each file. `FORETOKEN_FUZZ_SECONDS=60` makes changes for so long for
//! each target, or for those of `FORETOKEN_FUZZ_TARGETS=config,folder`: where there is no libFuzzer.

use crate::common::memory::peak_of;
use foretoken::fuzzing::{self, TARGETS};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long an input may take: far above what any does, on a machine that does much else, too.
pub const LONGEST: Duration = Duration::from_secs(60);
/// What one input may take on the thread that reads it: far above what any of this size needs.
const MAX_MEMORY: usize = 256 << 20;
/// Changes of each file, if no time is given.
const CHANGES: u64 = 12;

/// The files of a target, and what they have.
pub fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
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
    for (name, _) in TARGETS {
        for (file, bytes) in corpus(name) {
            let start = Instant::now();
            let memory = peak_of(|| {
                fuzzing::run(name, &bytes);
                fuzzing::run(name, &bytes[..bytes.len() / 2]);
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
