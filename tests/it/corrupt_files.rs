//! Corrupt model files: flipped bytes, numbers out of any range, ends that are missing. Each is refused in one line
//! or serves a small request; none panics, hangs or takes the process with it.
//!
//! `FORETOKEN_LIES` sets the number of cases of each test; the seeds of the cases are their numbers.

use crate::common::read_json;
use crate::common::rig::{Rig, Seq};
use crate::common::tiny::{self, VOCAB, llama_config, tensors, write_config};
use crate::common::tiny_gguf::write_gguf;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::error::Error;
use foretoken::model::{LoadFormat, LoadOptions, ModelSource, load};
use foretoken::text::Text;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

const NUMBERS: [u64; 9] = [
    0,
    1,
    2,
    u32::MAX as u64,
    1 << 31,
    1 << 32,
    1 << 59,
    1 << 63,
    u64::MAX,
];
/// Far above what a load takes, on a busy machine, too.
const LONGEST: Duration = Duration::from_secs(60);

pub fn cases(default: u64) -> std::ops::Range<u64> {
    let number = std::env::var("FORETOKEN_LIES").map(|n| n.parse().unwrap());
    0..number.unwrap_or(default)
}

/// Addressed random numbers (splitmix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 31)) >> 11) as usize % below.max(1)
    }

    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.roll(list.len())]
    }
}

/// Changes `bytes` in one place of the first `header` bytes, or cuts them.
pub fn corrupt(bytes: &mut Vec<u8>, header: usize, dice: &mut Dice) {
    let at = dice.roll(header);
    match dice.roll(8) {
        0 => bytes.truncate(at),
        1..=3 => bytes[at] ^= 1 << dice.roll(8),
        kind => {
            let width = [1, 4, 8, 8][kind - 4].min(bytes.len() - at);
            let number = dice.pick(&NUMBERS).to_le_bytes();
            bytes[at..at + width].copy_from_slice(&number[..width]);
        }
    }
}

/// Runs `work`, counting a panic as a failure of `case`.
#[track_caller]
pub fn survives<T>(case: u64, work: impl FnOnce() -> Result<T, Error>) -> Option<T> {
    let start = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(work));
    assert!(
        start.elapsed() < LONGEST,
        "case {case} took {:?}",
        start.elapsed()
    );
    match result {
        Err(_) => panic!("case {case} panics"),
        Ok(Ok(value)) => Some(value),
        Ok(Err(Error::Setup(line))) => {
            let shown: String = line.chars().take(200).collect();
            let is_short = line.len() < 3_000 && !line.contains('\n');
            assert!(is_short, "case {case}: {shown}");
            None
        }
        Ok(Err(e)) => panic!("case {case}: not the operator's: {e}"),
    }
}

/// Loads the model at `path` and, if it can be, asks it for logits.
fn serve(case: u64, path: &Path) -> bool {
    let source = ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto);
    let options = LoadOptions::default();
    let Some(model) = survives(case, || load(&source?, &options)) else {
        return false;
    };
    let vocabulary = model.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..5).map(|i| i * 13 % vocabulary).collect();
    survives(case, || {
        let logits = Rig::new(model, 4, 4).feed(&mut Seq::default(), &tokens);
        assert_eq!(logits.len(), tokens.len());
        Ok(())
    });
    true
}

/// Reads the tokenizer at `path` and, if it can be, uses it.
fn speak(case: u64, path: &Path) -> bool {
    let Some(text) = survives(case, || match path.is_dir() {
        true => Text::from_folder(path),
        false => Text::from_gguf(path),
    }) else {
        return false;
    };
    survives(case, || {
        // What it cannot do is told to who asks for it, and is no fault of ours.
        let refused = |e: &Error| assert!(matches!(e, Error::Request { .. }), "case {case}: {e}");
        let ids = text.encode("Hello, 42 wörlds\n", true);
        let ids = ids.inspect_err(refused).unwrap_or_default();
        text.decode(&ids, true);
        let message = json!({"role": "user", "content": "Hi"});
        let prompt = text.render_chat(&[message], true, &serde_json::Map::new());
        prompt.inspect_err(refused).ok();
        Ok(())
    });
    true
}

#[test]
fn gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write_gguf(&file, &tensors(16, DType::F32), GgmlDType::Q8_0, &[1.; 8]);
    let whole = std::fs::read(&file).unwrap();
    // The tensors' values are checked for NaN elsewhere.
    let header = 3_000;
    let mut served = 0;
    for case in cases(400) {
        let mut bytes = whole.clone();
        corrupt(&mut bytes, header, &mut Dice(case));
        std::fs::write(&file, bytes).unwrap();
        served += u64::from(serve(case, &file));
    }
    assert!(served < cases(400).end);
}

#[cfg(feature = "embedded-model")]
#[test]
fn tokenizers_of_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let demo =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models/default/foretoken-demo-draft.Q8_0.gguf");
    let whole = std::fs::read(demo).unwrap();
    for case in cases(60) {
        let mut bytes = whole.clone();
        let mut dice = Dice(case);
        // Half of the corruption is in the first keys, half in the vocabulary.
        let header = dice.pick(&[1_000, 200_000]);
        corrupt(&mut bytes, header, &mut dice);
        std::fs::write(&file, bytes).unwrap();
        speak(case, &file);
    }
}

/// All places of a JSON document.
fn places(value: &Value, at: String, all: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            let key = key.replace('~', "~0").replace('/', "~1");
            places(value, format!("{at}/{key}"), all);
        }),
        Value::Array(list) => (list.iter().enumerate().take(20))
            .for_each(|(i, value)| places(value, format!("{at}/{i}"), all)),
        _ => {}
    }
    all.push(at);
}

/// Puts another value into one place of `text`, or changes a byte.
pub fn corrupt_json(text: &str, dice: &mut Dice) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    if dice.roll(3) == 0 {
        let header = bytes.len();
        corrupt(&mut bytes, header, dice);
        return bytes;
    }
    let mut value: Value = serde_json::from_str(text).unwrap();
    let mut all = Vec::new();
    places(&value, String::new(), &mut all);
    let place = &all[dice.roll(all.len())];
    let number = dice.pick(&NUMBERS);
    *value.pointer_mut(place).unwrap() = match dice.roll(10) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!("x".repeat(100_000)),
        3 => json!([]),
        4 => json!({}),
        5 => json!(-1),
        6 => json!(1e300),
        7 => json!([number, number]),
        _ => json!(number),
    };
    value.to_string().into_bytes()
}

#[test]
fn folders() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write_config(path, &llama_config(16));
    tiny::write_shards(path, &tensors(16, DType::F32));
    let names = [
        "config.json",
        "config.json",
        "model.safetensors.index.json",
        "model-0.safetensors",
    ];
    for case in cases(300) {
        let mut dice = Dice(case);
        let file = path.join(dice.pick(&names));
        let whole = std::fs::read(&file).unwrap();
        let changed = match std::str::from_utf8(&whole) {
            Ok(text) => corrupt_json(text, &mut dice),
            Err(_) => {
                let mut bytes = whole.clone();
                corrupt(&mut bytes, 1_500, &mut dice);
                bytes
            }
        };
        std::fs::write(&file, changed).unwrap();
        serve(case, path);
        std::fs::write(&file, whole).unwrap();
    }
    assert!(VOCAB > 5 && serve(u64::MAX, path), "the files as they were");
}

/// The configuration of every architecture.
#[test]
fn configurations() {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    for (number, fixture) in std::fs::read_dir(all).unwrap().enumerate() {
        let fixture = fixture.unwrap().path();
        let weights = "model.safetensors";
        std::fs::copy(fixture.join(weights), folder.path().join(weights)).unwrap();
        let whole = std::fs::read_to_string(fixture.join("config.json")).unwrap();
        for case in cases(40) {
            let case = 1000 * number as u64 + case;
            std::fs::write(&file, corrupt_json(&whole, &mut Dice(case))).unwrap();
            serve(case, folder.path());
        }
        std::fs::write(&file, whole).unwrap();
        assert!(serve(u64::MAX, folder.path()), "the files as they were");
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn tokenizers_of_folders() {
    use foretoken::gguf::GgufSource;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let demo = Text::from_gguf(GgufSource::embedded("foretoken-demo").unwrap()).unwrap();
    demo.save(path).unwrap();
    std::fs::write(
        path.join("generation_config.json"),
        r#"{"eos_token_id": [1, 2]}"#,
    )
    .unwrap();
    // The vocabulary is long and of one kind: most corruption is in what is around it.
    let mut tokenizer = read_json(path.join("tokenizer.json"));
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap().clone();
    let short = vocabulary
        .into_iter()
        .filter(|(_, id)| id.as_u64() < Some(300));
    tokenizer["model"]["vocab"] = Value::Object(short.collect());
    tokenizer["model"]["merges"] = json!([]);
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let names = [
        "tokenizer.json",
        "tokenizer.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ];
    for case in cases(400) {
        let mut dice = Dice(case);
        let file = path.join(dice.pick(&names));
        let whole = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, corrupt_json(&whole, &mut dice)).unwrap();
        speak(case, path);
        std::fs::write(&file, whole).unwrap();
    }
    assert!(speak(u64::MAX, path), "the files as they were");
}

/// What was found by hand.
#[cfg(feature = "embedded-model")]
#[test]
fn tokenizers_that_grow() {
    use foretoken::gguf::GgufSource;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let demo = Text::from_gguf(GgufSource::embedded("foretoken-demo").unwrap()).unwrap();
    demo.save(path).unwrap();
    let file = path.join("tokenizer.json");
    let honest = read_json(&file);
    let doubling = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let regex = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "a".repeat(9999)});
    let normalizers = json!({"type": "Sequence", "normalizers": vec![doubling; 60]});
    let mut cases = Vec::new();
    for normalizer in [normalizers, regex] {
        let mut corrupted = honest.clone();
        corrupted["normalizer"] = normalizer;
        cases.push(("times as long", corrupted));
    }
    let mut corrupted = honest.clone();
    corrupted["model"]["vocab"]["new"] = json!(u32::MAX);
    cases.push(("ids below 16777216", corrupted));
    for (needle, corrupted) in cases {
        std::fs::write(&file, corrupted.to_string()).unwrap();
        let Err(e) = Text::from_folder(path) else {
            panic!("{needle}");
        };
        assert!(e.to_string().contains(needle), "{e}");
    }
}
