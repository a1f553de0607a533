//! Replays the fuzzers' corpus, and a few changes of each file.

use foretoken::fuzzing::TARGETS;
use std::path::Path;
use std::time::{Duration, Instant};

const LONGEST: Duration = Duration::from_secs(20);

#[test]
fn every_file_is_survived() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let mut files = 0;
        for file in std::fs::read_dir(&folder).unwrap() {
            let file = file.unwrap().path();
            let bytes = std::fs::read(&file).unwrap();
            let start = Instant::now();
            target(&bytes);
            target(&bytes[..bytes.len() / 2]);
            let mut flipped = bytes.clone();
            if let Some(byte) = flipped.get_mut(bytes.len() / 3) {
                *byte ^= 1;
            }
            target(&flipped);
            let took = start.elapsed();
            assert!(took < LONGEST, "{}: {took:?}", file.display());
            files += 1;
        }
        assert!(files > 0, "{} is empty", folder.display());
    }
}
