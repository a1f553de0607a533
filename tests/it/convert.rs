//! `convert`: the file that it writes is the model of the folder, and reads texts as it does.

use crate::common::read_json;
use crate::common::tiny::{
    self, HEADS, HIDDEN, KV_HEADS, llama_config, logits, noise, open, short_prompt, tensors,
    write_config, write_shards,
};
use crate::common::tiny_folder::{byte_level, tiny_folder as folder};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::text::Text;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn digits() -> Value {
    let each = json!({"type": "Digits", "individual_digits": true});
    json!({"type": "Sequence", "pretokenizers": [each, byte_level()]})
}

/// Converts the model of `folder` to a file within it.
pub fn convert(folder: &Path, kind: GgmlDType) -> Result<PathBuf, foretoken::error::Error> {
    tiny::convert(folder, folder.join(format!("{kind:?}.gguf")), kind)
}

fn logits_of(path: &Path) -> Vec<Vec<f32>> {
    logits(open(path).unwrap(), &short_prompt(40))
}

#[test]
fn the_model_is_the_same() {
    let folder = folder(byte_level());
    let want = logits_of(folder.path());
    let f32_file = convert(folder.path(), GgmlDType::F32).unwrap();
    assert_eq!(logits_of(&f32_file), want);
    let size = |file: &Path| file.metadata().unwrap().len();
    for (kind, near) in [
        (GgmlDType::Q8_0, 0.15),
        (GgmlDType::Q6K, 0.25),
        (GgmlDType::Q4K, 0.7),
    ] {
        let file = convert(folder.path(), kind).unwrap();
        assert!(2 * size(&file) < size(&f32_file), "{kind:?}");
        let got = logits_of(&file);
        let pairs = || got.iter().flatten().zip(want.iter().flatten());
        let error = pairs().map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
        let norm = want.iter().flatten().map(|b| b * b).sum::<f32>().sqrt();
        assert!(error < near * norm, "{kind:?}: {error} of {norm}");
        assert!(error > 0.0, "{kind:?} is not exact");
    }
}

/// Those of q and k are in the order of their rows.
#[test]
fn biases_of_attention_are_the_same() {
    let folder = folder(byte_level());
    let mut config = llama_config(16);
    config["attention_bias"] = true.into();
    write_config(folder.path(), &config);
    let mut all = tensors(16, DType::F32);
    for i in 0..2 {
        for (part, rows) in [
            ("q_proj", HEADS * 16),
            ("k_proj", KV_HEADS * 16),
            ("v_proj", KV_HEADS * 16),
            ("o_proj", HIDDEN),
        ] {
            let name = format!("model.layers.{i}.self_attn.{part}.bias");
            let bias = noise(&name, &[rows]);
            all.insert(name, bias);
        }
    }
    write_shards(folder.path(), &all);
    let want = logits_of(folder.path());
    let file = convert(folder.path(), GgmlDType::F32).unwrap();
    assert_eq!(logits_of(&file), want);
}

#[test]
fn texts_are_read_the_same() {
    for (pre, first) in [(byte_level(), "12"), (digits(), "1")] {
        let folder = folder(pre);
        let file = convert(folder.path(), GgmlDType::Q8_0).unwrap();
        let [ours, theirs] = [Text::from_folder(folder.path()), Text::from_gguf(&file)];
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let ids = theirs.encode("12 hello\n<|start|>x<|end|>", true).unwrap();
        assert_eq!(
            ids,
            ours.encode("12 hello\n<|start|>x<|end|>", true).unwrap()
        );
        assert_eq!(theirs.token_text(ids[0]), first);
        assert_eq!(theirs.decode(&ids, true), "12 hello\n<|start|>x");
        // The config names a second EOS.
        assert_eq!(theirs.special_ids(), ours.special_ids());
        assert_eq!(theirs.special_ids().eos, [2, 3]);
        let messages = [json!({"role": "user", "content": "hi"})];
        let chat = theirs.render_chat(&messages, true, &Map::new()).unwrap();
        assert_eq!(chat, "<|start|>hi<|end|>");
    }
}

#[test]
fn what_would_change_is_refused_and_nothing_is_left() {
    let unknown = json!({"type": "Whitespace"});
    let folder = folder(json!({"type": "Sequence", "pretokenizers": [unknown, byte_level()]}));
    let before = std::fs::read_dir(folder.path()).unwrap().count();
    let error = convert(folder.path(), GgmlDType::Q8_0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("only byte-level BPE"), "{error}");

    // Known by name, but with a normalizer that GGUF does not have.
    let file = folder.path().join("tokenizer.json");
    let mut json = read_json(&file);
    json["pre_tokenizer"] = byte_level();
    json["normalizer"] = json!({"type": "Lowercase"});
    std::fs::write(&file, json.to_string()).unwrap();
    let error = convert(folder.path(), GgmlDType::Q8_0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("split texts differently"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), before);

    let missing = folder.path().join("none.gguf");
    assert!(tiny::convert(&missing, missing.clone(), GgmlDType::Q8_0).is_err());
}
