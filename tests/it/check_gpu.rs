//! `check --gpu`: what it says of GPUs that are not here.

use super::check::{check, refused, report, row, table};
use crate::common::read_json;
use crate::common::tiny::*;
use crate::common::tiny_folder::{byte_level, tiny_folder, write_tokenizer};
use candle_core::{DType, Tensor};
use serde_json::{Value, json};

/// The bytes of the use `name` of the GPU's memory.
#[track_caller]
fn bytes(report: &Value, name: &str) -> u64 {
    let uses = report["gpu"]["uses"].as_array().unwrap();
    let found = uses.iter().find(|one| one["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {uses:?}"));
    found["bytes"].as_u64().unwrap()
}

#[test]
fn a_gpu_that_is_not_here_is_planned_for() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let stored = tensors(16, DType::F32);
    let parameters: usize = stored.values().map(Tensor::elem_count).sum();
    let found = report(&[path, "--gpu", "h100"], None);
    let token = 2 * 2 * KV_HEADS * 16 * 2;
    // The contexts of --max-num-seqs sequences, of which the GPU has room for more.
    let wanted = json!({
        "device": "cuda", "weights_bytes": 2 * parameters, "weights_types": {"bf16": stored.len()},
        "kv_bytes_per_token": token, "kv_cache_tokens": 64 * 256, "kv_cache_bytes": 64 * 256 * token,
        "command": format!("foretoken serve {path}")
    });
    for (key, wanted) in wanted.as_object().unwrap() {
        assert_eq!(&found[key], wanted, "{key}");
    }
    let gpu = &found["gpu"];
    assert_eq!(gpu["name"], "H100");
    assert_eq!(gpu["compute_capability"], "9.0");
    assert_eq!(bytes(&found, "target weights"), 2 * parameters as u64);
    assert_eq!(bytes(&found, "KV cache"), (64 * 256 * token) as u64);
    assert!(bytes(&found, "workspace") > 512 << 20);
    // Reading the weights takes little time beside that of two layers.
    let speed = found["decode"]["tokens_per_second"].as_f64().unwrap();
    assert!(speed > 27_000. && speed < 1. / 34e-6, "{speed}");
    assert!(found["decode"]["memory_bandwidth"] == 3350e9, "{found}");

    let text = table(&[path, "--gpu", "NVIDIA L4", "--kv-cache-dtype", "bf16"]);
    assert!(row(&text, "weights (cuda)").contains("bf16"), "{text}");
    assert!(row(&text, "GPU memory").starts_with("fits: "), "{text}");
    assert!(
        row(&text, "GPU ").starts_with("L4 with 24.15 GB and 300 GB/s"),
        "{text}"
    );
    assert!(row(&text, "decode").starts_with("about "), "{text}");
    assert!(!text.contains("memory here"), "{text}");
}

/// A GPU keeps `Q4_1`, and makes f32 of norms f16. Blocks that it has no kernels for become dense.
#[test]
fn weights_have_the_form_that_they_have_on_a_gpu() {
    let model = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let found = report(&[model, "--gpu", "4090"], None);
    let wanted = json!({"Q4_1": 210, "Q8_0": 1, "f16": 61});
    assert_eq!(found["weights_types"], wanted);
    let dense = report(&[model, "--gpu", "4090", "--dtype", "f32"], None);
    assert_eq!(dense["weights_types"], json!({"f32": 272}));
    assert_eq!(
        dense["weights_bytes"].as_u64(),
        dense["parameters"].as_u64().map(|n| 4 * n)
    );
}

#[test]
fn a_draft_is_part_of_the_plan() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let alone = report(&[path, "--gpu", "h100"], None);
    let pair = report(&[path, "--gpu", "h100", "--draft-model", path], None);
    let weights = bytes(&pair, "target weights");
    assert_eq!(bytes(&pair, "draft weights"), weights);
    assert_eq!(bytes(&pair, "KV cache"), 2 * bytes(&alone, "KV cache"));
    assert_eq!(pair["kv_cache_tokens"], alone["kv_cache_tokens"]);
}

#[test]
fn what_a_gpu_does_not_take_is_refused_in_one_line() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let on = |gpu: &str, more: &[&str], needle: &str| {
        refused(&[&[path, "--gpu", gpu], more].concat(), needle);
    };
    on("t4", &[], "T4 has compute capability 7.5");
    on(
        "l4",
        &["--gpu-memory-utilization", "0.05"],
        "nothing is left for the KV cache",
    );
    on(
        "l4",
        &["--kv-cache-memory", "23GiB"],
        "the GPU has no room for a KV cache",
    );
    on(
        "l4",
        &["--kv-cache-dtype", "f16"],
        "auto, bf16, q8_0 and fp8",
    );
    on(
        "l4",
        &["--batch-invariant", "--dtype", "f32"],
        "bf16 or f16",
    );

    let wrong = |args: &[&str], needles: [&str; 2]| {
        let output = check(&[&[path], args].concat(), None);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1));
        assert!(needles.iter().all(|needle| said.contains(needle)), "{said}");
    };
    wrong(
        &["--gpu", "h1000"],
        ["unknown GPU: known are H100, ", "H200"],
    );
    let both = ["--gpu", "h100", "--device", "cpu"];
    wrong(&both, ["--device cpu", "leave one out"]);
}

/// A folder with this fixture's config, changed, and a tokenizer; without weights.
fn shape(fixture: &str, change: impl Fn(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("tests/fixtures/architectures/{fixture}/config.json");
    let mut config = read_json(file);
    change(&mut config);
    write_config(folder.path(), &config);
    write_tokenizer(folder.path(), byte_level());
    folder
}

/// Two layers of 8 experts of 3 matrices, and a token that has 3 of them.
#[test]
fn experts_in_the_hosts_memory_take_none_of_a_gpus() {
    let folder = shape("qwen3_moe", |_| ());
    let path = folder.path().to_str().unwrap();
    let dummy = [path, "--load-format", "dummy"];
    let on = |flags: &[&str]| report(&[&dummy[..], &["--gpu", "l4"], flags].concat(), None);
    let (all, one, none) = (on(&[]), on(&["--n-cpu-moe", "1"]), on(&["--cpu-moe"]));
    let layer = 8 * 3 * 32 * 16 * 2;
    for (found, host) in [(&all, 0), (&one, layer), (&none, 2 * layer)] {
        let weights = found["weights_bytes"].as_u64().unwrap();
        assert_eq!(weights, all["weights_bytes"].as_u64().unwrap());
        assert_eq!(found["host_experts_bytes"], host);
        assert_eq!(bytes(found, "target weights"), weights - host);
        let decode = &found["decode"];
        assert_eq!(decode["host_bytes_per_token"], host * 3 / 8);
        let read = &all["decode"]["weights_bytes_per_token"];
        assert_eq!(&decode["weights_bytes_per_token"], read);
    }
    let speed = |report: &Value| report["decode"]["tokens_per_second"].as_f64().unwrap();
    assert!(speed(&all) > speed(&one) && speed(&one) > speed(&none));
    let text = table(&[&dummy[..], &["--gpu", "l4", "--cpu-moe"]].concat());
    assert_eq!(row(&text, "host memory"), "49.2 kB of them, experts");
    assert!(
        row(&text, "decode").contains(" from the host, and"),
        "{text}"
    );
    // On the CPU they are where they always are.
    let here = report(
        &[&dummy[..], &["--cpu-moe", "--device", "cpu"]].concat(),
        None,
    );
    assert_eq!(here["host_experts_bytes"], 0);
}

/// A folder with the shape of Qwen3-30B-A3B, whose blocks take 17 GB.
fn large() -> tempfile::TempDir {
    shape("qwen3_moe", |config| {
        for (key, value) in [
            ("num_hidden_layers", 48),
            ("hidden_size", 2048),
            ("num_local_experts", 128),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 768),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 4),
            ("head_dim", 128),
            ("max_position_embeddings", 32768),
        ] {
            config[key] = value.into();
        }
        config.as_object_mut().unwrap().remove("layer_types");
    })
}

#[test]
fn the_number_of_layers_whose_experts_must_leave_a_gpu_is_told() {
    let folder = large();
    let path = folder.path().to_str().unwrap();
    let args = [
        path,
        "--load-format",
        "dummy",
        "--quantize",
        "q4_k",
        "--gpu",
        "rtx 3060",
    ];
    let output = check(&args, None);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), said.lines().count()),
        (Some(2), 1),
        "{said}"
    );
    let (_, hint) = said.split_once("; --n-cpu-moe ").expect(&said);
    assert!(
        hint.ends_with(" leaves room for a whole context\n"),
        "{said}"
    );
    let layers: usize = hint.split(' ').next().unwrap().parse().unwrap();
    assert!((16..40).contains(&layers), "{said}");
    let tokens = |layers: usize| {
        let layers = layers.to_string();
        let args = [&args[..], &["--n-cpu-moe", &layers]].concat();
        report(&args, None)["kv_cache_tokens"].as_u64().unwrap()
    };
    assert!(tokens(layers) >= 32768 && tokens(layers - 1) < 32768);
}

/// GPUs of 12 GB each, of which one is too small.
#[test]
fn a_model_that_does_not_fit_one_gpu_fits_two() {
    let folder = large();
    let path = folder.path().to_str().unwrap();
    let args = |gpus: &'static str| {
        let shape = [path, "--load-format", "dummy", "--quantize", "q4_k"];
        let flags = ["--gpu", "rtx 3060", "--max-num-seqs", "2"];
        [&shape[..], &flags, &["--pipeline-parallel-size", gpus]].concat()
    };
    refused(&args("1"), "nothing is left for the KV cache");
    let found = report(&args("2"), None);
    let (first, second) = (&found["gpu"], &found["more_gpus"][0]);
    let bytes = |gpu: &Value, name: &str| {
        let mut uses = gpu["uses"].as_array().unwrap().iter();
        let found = uses.find(|one| one["name"] == name).expect(name);
        found["bytes"].as_u64().unwrap()
    };
    let weights = [first, second].map(|gpu| bytes(gpu, "target weights"));
    let all = found["weights_bytes"].as_u64().unwrap();
    assert_eq!(weights.iter().sum::<u64>(), all);
    // As equal as layers allow, which have 1/48 of them each.
    assert!(weights[0].abs_diff(weights[1]) <= all / 40, "{weights:?}");
    let cache = [first, second].map(|gpu| bytes(gpu, "KV cache"));
    assert_eq!(
        cache.iter().sum::<u64>(),
        found["kv_cache_bytes"].as_u64().unwrap()
    );
    for gpu in 0..2 {
        assert!(
            weights[gpu] + cache[gpu] < 12 << 30,
            "{weights:?} {cache:?}"
        );
    }
    let text = table(&args("2"));
    assert!(
        row(&text, "GPUs").starts_with("2 of RTX 3060 with "),
        "{text}"
    );
    // The layers of a GPU follow those of the one before.
    let own = row(&text, "GPU 0").split_once("; fits: ").expect(&text).0;
    let last: usize = own.strip_prefix("layers 0 to ").unwrap().parse().unwrap();
    let own = row(&text, "GPU 1").split_once("; fits: ").expect(&text).0;
    assert_eq!(own, format!("layers {} to 47", last + 1));
    assert_eq!(second["layers"], json!({"start": last + 1, "end": 48}));
    assert!(row(&text, "serve it").contains("--pipeline-parallel-size 2"));

    // A smaller share of the first leaves room for a draft there.
    let shared = report(
        &[&args("2")[..], &["--tensor-split", "12,13"]].concat(),
        None,
    );
    assert!(bytes(&shared["gpu"], "target weights") < weights[0]);
    let crowded = [&args("2")[..], &["--tensor-split", "1,9"]].concat();
    refused(&crowded, "give it a smaller share in --tensor-split");
    refused(
        &args("64"),
        "64 GPUs are too many for this model, whose 48 layers",
    );
}

/// A draft is on the first GPU.
#[test]
fn a_draft_is_on_the_first_of_several_gpus() {
    let folder = tiny_folder(byte_level());
    let path = folder.path().to_str().unwrap();
    let flags = ["--gpu", "h100", "--pipeline-parallel-size", "2"];
    let pair = report(&[&[path, "--draft-model", path], &flags[..]].concat(), None);
    let first = bytes(&pair, "draft weights");
    assert!(first > bytes(&pair, "target weights"), "{first}");
    let second = pair["more_gpus"][0]["uses"].to_string();
    assert!(
        second.contains("target weights") && !second.contains("draft"),
        "{second}"
    );
}
