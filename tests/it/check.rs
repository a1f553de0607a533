//! `check`: what it says of models, and of those that cannot be served.

use crate::common::process::{foretoken, refusal, refusal_line, stdout_of};
use crate::common::tiny::*;
use crate::common::tiny_folder::{byte_level, tiny_folder, write_tokenizer};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// Runs `check` with an empty cache, or with the one in `home`.
pub fn check(args: &[&str], home: Option<&Path>) -> Output {
    let empty = tempfile::tempdir().unwrap();
    let mut command = foretoken();
    command.env("HF_HOME", home.unwrap_or(empty.path()));
    command.env("HF_HUB_OFFLINE", "1");
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"] {
        command.env_remove(name);
    }
    command.arg("check").args(args).output().unwrap()
}

#[track_caller]
pub fn table(args: &[&str]) -> String {
    stdout_of(&check(args, None))
}

#[track_caller]
pub fn report(args: &[&str], home: Option<&Path>) -> Value {
    let said = stdout_of(&check(&[args, &["--json"]].concat(), home));
    serde_json::from_str(&said).unwrap()
}

/// The value of a row of a table.
#[track_caller]
pub fn row<'t>(table: &'t str, name: &str) -> &'t str {
    let row = table.lines().find_map(|line| line.strip_prefix(name));
    row.unwrap_or_else(|| panic!("no {name} in {table}")).trim()
}

#[test]
fn a_folder_is_described_without_reading_its_weights() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let stored = tensors(16, DType::F32);
    let parameters: usize = stored.values().map(Tensor::elem_count).sum();
    let found = report(&[path, "--num-blocks", "20"], None);
    let wanted = json!({
        "model": path, "servable": true, "architecture": "llama", "layers": 2,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "heads": HEADS, "kv_heads": KV_HEADS,
        "head_dim": 16, "vocabulary": VOCAB, "context": 256, "parameters": parameters,
        "generates": true, "embeddings": null, "file_bytes": 4 * parameters, "file_types": {"F32": stored.len()},
        "tokenizer": "byte-level BPE", "tokens": 49, "chat_template": true,
        "knows_tools": false, "keeps_system": true, "tool_call_format": "hermes", "reasoning_format": null,
        "weights_bytes": 4 * parameters, "weights_types": {"f32": stored.len()},
        "kv_bytes_per_token": 2 * 2 * KV_HEADS * 16 * 2,
        "kv_bytes_of_context": 256 * 2 * 2 * KV_HEADS * 16 * 2,
        "kv_cache_tokens": 320, "draft": null, "drafts": [],
    });
    for (key, wanted) in wanted.as_object().unwrap() {
        assert_eq!(&found[key], wanted, "{key}");
    }
    let speed = found["decode"]["tokens_per_second"].as_f64().unwrap();
    let read = found["decode"]["weights_bytes_per_token"].as_u64();
    assert!(speed > 1. && read == Some(4 * parameters as u64), "{found}");

    // Values do not matter, because they are not read; flags do.
    let broken = tensors(16, DType::F32).into_iter().map(|(name, tensor)| {
        let nan = Tensor::full(f32::NAN, tensor.dims(), &Device::Cpu).unwrap();
        (name, nan)
    });
    write_shards(folder.path(), &broken.collect());
    let text = table(&[path, "--dtype", "bf16", "--reasoning-parser", "qwen3"]);
    assert_eq!(row(&text, "context"), "256 tokens");
    assert_eq!(row(&text, "parameters"), "1.1 M");
    assert!(row(&text, "file").ends_with("20 F32"), "{text}");
    assert!(row(&text, "weights (cpu)").contains("bf16"), "{text}");
    assert!(row(&text, "reasoning").starts_with("qwen3"), "{text}");
    assert!(row(&text, "decode").contains("an estimate"), "{text}");
    assert_eq!(row(&text, "drafts that fit"), "none in the cache");
}

/// What a chat template cannot do is told before a chat is refused.
#[test]
fn a_template_that_fails_is_named_with_its_reason() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let template = "{% if tools %}{{ raise_exception('one tool too many') }}{% endif %}\
        {% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let found = report(&[path], None);
    let why = found["tools_refused"].as_str().unwrap();
    assert!(why.ends_with("one tool too many"), "{why}");
    assert_eq!(found["keeps_system"], false);
    assert_eq!(found["knows_tools"], false);
    let text = table(&[path]);
    let said = row(&text, "chat template");
    let wanted =
        format!("yes; it fails with tools: {why}; system messages become part of the user's");
    assert_eq!(said, wanted);
}

/// Names what is wrong in one line, with exit code 2.
#[track_caller]
pub fn refused(args: &[&str], needle: &str) {
    let output = check(args, None);
    let said = refusal_line(&output);
    assert!(said.contains(needle) && output.stdout.is_empty(), "{said}");

    let output = check(&[args, &["--json"]].concat(), None);
    assert_eq!(output.status.code(), Some(2));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["servable"], false);
    assert!(json["error"].as_str().unwrap().contains(needle), "{json}");
}

/// Loading them would end with no memory left, and no word why.
#[test]
fn weights_that_do_not_fit_the_memory_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let json = std::fs::read("configs/llama-3.2-3b/config.json").unwrap();
    let mut config: Value = serde_json::from_slice(&json).unwrap();
    for (key, size) in [
        ("hidden_size", 16_384),
        ("intermediate_size", 65_536),
        ("num_attention_heads", 128),
        ("num_hidden_layers", 1_000),
    ] {
        config[key] = size.into();
    }
    let file = folder.path().join("config.json");
    std::fs::write(file, config.to_string()).unwrap();
    let args = [folder.path().to_str().unwrap(), "--load-format", "dummy"];
    refused(&args, "the weights take");
    // The server says it, too, before it loads them.
    let served = foretoken().arg("serve").args(args).output().unwrap();
    let said = refusal(&served);
    assert!(said.contains("it needs --quantize"), "{said}");
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    refused(
        &[path, "--kv-cache-memory", "1KiB"],
        "raise --kv-cache-memory",
    );
    // vLLM refuses it, too; 256 is what the model takes.
    refused(
        &[path, "--max-model-len", "257"],
        "--max-model-len 257 is more than the model takes, which is 256 tokens",
    );
    assert_eq!(
        report(&[path, "--max-model-len", "256"], None)["servable"],
        true
    );
    refused(
        &[path, "--draft-model", path, "--drafter", "eagle3"],
        "no such head",
    );
    let other = tiny_folder(byte_level());
    std::fs::remove_file(other.path().join("config.json")).unwrap();
    refused(
        &[path, "--draft-model", other.path().to_str().unwrap()],
        "no config.json",
    );

    // Tensors that the config asks for, or does not know, and a dtype that needs scales.
    let all = tensors(16, DType::F32);
    let name = "model.layers.1.mlp.up_proj.weight";
    let with = |change: fn(&mut Tensors, &str)| {
        let mut tensors = all.clone();
        change(&mut tensors, name);
        write_shards(folder.path(), &tensors);
        refused(&[path], "up_proj");
    };
    with(|tensors, name| drop(tensors.remove(name)));
    with(|tensors, name| {
        drop(tensors.insert(name.replace(".weight", ".scale"), noise(name, &[4])))
    });
    with(|tensors, name| drop(tensors.insert(name.into(), noise(name, &[MLP, 32]))));
    with(|tensors, name| {
        let bytes = tensors[name].to_dtype(DType::U8).unwrap();
        tensors.insert(name.into(), bytes);
    });
    write_shards(folder.path(), &all);

    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    refused(&[path], "tokenizer.json");
    let mut config = llama_config(16);
    config["architectures"] = json!(["MambaForCausalLM"]);
    write_config(folder.path(), &config);
    write_tokenizer(folder.path(), byte_level());
    refused(&[path], "architecture 'MambaForCausalLM' is not supported");
    refused(&["./none.gguf"], "does not exist");
    refused(&["org/none"], "HF_HUB_OFFLINE");
    refused(
        &["models/heads/smollm2-135m-eagle3.Q4_1.gguf"],
        "draft head",
    );
}

/// A model in the place in which the Hub's tools store it.
fn cached(home: &Path, id: &str) -> std::path::PathBuf {
    let repo = home
        .join("hub")
        .join(format!("models--{}", id.replace('/', "--")));
    let folder = repo.join("snapshots/0123abcd");
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(repo.join("refs/main"), "0123abcd").unwrap();
    folder
}

#[test]
fn drafts_of_the_cache_are_listed_if_they_fit() {
    let target = tiny_folder(byte_level());
    let home = tempfile::tempdir().unwrap();
    let mut config = llama_config(16);
    config["num_hidden_layers"] = 1.into();
    config["intermediate_size"] = 32.into();
    let small: Tensors = tensors(16, DType::F32)
        .into_iter()
        .filter(|(name, _)| !name.contains("layers.1."))
        .map(|(name, tensor)| match &name {
            up if up.contains("gate_proj") || up.contains("up_proj") => {
                (name, tensor.narrow(0, 0, 32).unwrap().contiguous().unwrap())
            }
            down if down.contains("down_proj") => {
                (name, tensor.narrow(1, 0, 32).unwrap().contiguous().unwrap())
            }
            _ => (name, tensor),
        })
        .collect();
    let draft = cached(home.path(), "org/draft");
    let stranger = cached(home.path(), "org/stranger");
    for folder in [&draft, &stranger] {
        write_config(folder, &config);
        write_shards(folder, &small);
        write_tokenizer(folder, byte_level());
    }
    // Another tokenizer, an incomplete model, and one that is as large as the target.
    let file = stranger.join("tokenizer.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(file, text.replace("\"W\"", "\"X\"")).unwrap();
    write_config(&cached(home.path(), "org/incomplete"), &config);
    let twin = cached(home.path(), "org/twin");
    write_config(&twin, &llama_config(16));
    write_shards(&twin, &tensors(16, DType::F32));
    write_tokenizer(&twin, byte_level());

    let path = target.path().to_str().unwrap();
    let found = report(&[path], Some(home.path()));
    let parameters: usize = small.values().map(Tensor::elem_count).sum();
    let wanted = json!([{
        "name": "org/draft", "kind": "model", "parameters": parameters, "bytes": 4 * parameters
    }]);
    assert_eq!(found["drafts"], wanted);
    // One that is named may also be another's.
    let named = report(&[path, "--draft-model", "org/stranger"], Some(home.path()));
    assert_eq!(named["draft"]["name"], "org/stranger");
    // A model of the cache is found by its id.
    let found = report(&["org/draft"], Some(home.path()));
    assert_eq!(found["layers"], 1);
    assert_eq!(found["drafts"], json!([]));
    assert_eq!(found["file_bytes"], 4 * parameters);
}

#[test]
fn smollm2_and_its_head() {
    let text = table(&["models/SmolLM2-135M-Instruct.Q4_1.gguf"]);
    assert_eq!(row(&text, "architecture"), "llama");
    assert_eq!(row(&text, "vocabulary"), "49152 ids");
    assert_eq!(row(&text, "parameters"), "134.5 M");
    assert!(row(&text, "file").contains("210 Q4_1"), "{text}");
    assert_eq!(row(&text, "tokenizer"), "byte-level BPE, 49152 tokens");
    assert_eq!(row(&text, "chat template"), "yes; it knows no tools");
    assert!(
        row(&text, "KV cache").starts_with("23.0 kB a token"),
        "{text}"
    );
    let head = "models/heads/smollm2-135m-eagle3.Q4_1.gguf (Eagle3, 9.4 M, 5.9 MB)";
    assert_eq!(row(&text, "drafts that fit"), head);
}

/// A checkpoint without an output layer is served if it is known how it embeds texts.
#[test]
fn a_model_for_embeddings_generates_nothing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embeddings");
    let path = folder.to_str().unwrap();
    let found = table(&[path]);
    let how = row(&found, "embeddings");
    assert_eq!(how, "the last hidden state, normalized");
    assert!(row(&found, "texts").starts_with("none"), "{found}");
    let found = report(&[path], None);
    assert_eq!(found["generates"], false);
    assert_eq!(found["drafts"], json!([]));

    let bare = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(folder.join(name), bare.path().join(name)).unwrap();
    }
    let path = bare.path().to_str().unwrap();
    refused(&[path], "no output layer");
    let how = table(&[path, "--pooling", "mean"]);
    assert!(row(&how, "embeddings").starts_with("the mean"), "{how}");
}

/// Gemma 4's layers with a window have narrower heads than those without.
#[test]
fn heads_of_layers_that_differ_are_all_told() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures/gemma4");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
    }
    write_tokenizer(folder.path(), byte_level());
    let path = folder.path().to_str().unwrap();
    let found = report(&[path], None);
    let wanted = json!([
        {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8},
        {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16},
    ]);
    assert_eq!(found["attention"], wanted);
    let text = table(&[path]);
    let heads =
        "3 with 4 heads of 8 (2 of keys and values), 3 with 4 heads of 16 (2 of keys and values)";
    assert!(row(&text, "layers").ends_with(heads), "{text}");
}

/// 24 values of a latent vector, and a rotated key of 8.
#[test]
fn of_latent_attention_one_row_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures");
    for name in ["config.json", "model.safetensors"] {
        let fixture = fixtures.join("deepseek_v3").join(name);
        std::fs::copy(fixture, folder.path().join(name)).unwrap();
    }
    write_tokenizer(folder.path(), byte_level());
    let text = table(&[folder.path().to_str().unwrap()]);
    let heads = "4 heads over one latent row of 32";
    assert!(row(&text, "layers").ends_with(heads), "{text}");
}

/// A token reads one row of an embedding, whatever its name is: Gemma 4's of each layer, beside one that is the output
/// layer, too, and Nemotron-H's.
#[test]
fn decoding_reads_one_row_of_embeddings() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures");
    for (model, embedding) in [
        ("gemma4", "model.embed_tokens_per_layer.weight"),
        ("nemotron_h_plain", "backbone.embeddings.weight"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            let fixture = fixtures.join(model).join(name);
            std::fs::copy(fixture, folder.path().join(name)).unwrap();
        }
        write_tokenizer(folder.path(), byte_level());
        let stored = folder.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
        let found = report(&[folder.path().to_str().unwrap()], None);
        let read = found["decode"]["weights_bytes_per_token"].as_u64().unwrap();
        let all = found["weights_bytes"].as_u64().unwrap();
        let wanted = 2 * stored[embedding].elem_count() as u64;
        assert_eq!(all - read, wanted, "{model}");
    }
}

/// A token reads 3 of 8 or 2 of 6 experts of each layer, and one row of the embedding.
#[test]
fn decoding_reads_the_experts_in_use() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/architectures");
    for (model, unused, width) in [("qwen3_moe", 5, 16), ("granite_moe", 4, 48)] {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            let fixture = fixtures.join(model).join(name);
            std::fs::copy(fixture, folder.path().join(name)).unwrap();
        }
        write_tokenizer(folder.path(), byte_level());
        let found = report(&[folder.path().to_str().unwrap()], None);
        let read = found["decode"]["weights_bytes_per_token"].as_u64().unwrap();
        let all = found["weights_bytes"].as_u64().unwrap();
        let (hidden, bf16) = (32, 2);
        let expert = 3 * hidden * width * bf16;
        let wanted = 2 * unused * expert + 256 * hidden * bf16;
        assert_eq!(all - read, wanted, "{model}");
    }
}
