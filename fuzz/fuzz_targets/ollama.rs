#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| foretoken::fuzzing::run("ollama", bytes));
