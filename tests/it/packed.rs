//! Checkpoints with a `quantization_config`: tiny random ones of every format, made by scripts/make-packed-fixtures.py,
//! against transformers with the weights that they mean. That these have exactly their values is a test beside the code.

use crate::architectures::{Fixture, TOLERANCE, fixtures_in};
use crate::common::read_json;
use crate::common::refusals::{parsed, rows};
use crate::common::rig::distance;
use crate::common::safetensors::{Stored, StoredTensor};
use crate::common::tiny::{dummy, logits, open, open_as, write_config};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::model::{Inventory, LoadOptions, ModelSource, inspect, load};
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

/// Maximum difference of a log-probability where activations are rounded to 8 bits.
const ROUNDED: f32 = 1.;

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packed")
}

fn fixture(name: &str) -> Fixture {
    Fixture::read(&folder().join(name))
}

fn options(dtype: Option<DType>) -> LoadOptions {
    LoadOptions {
        dtype,
        ..LoadOptions::default()
    }
}

fn inventory(fixture: &Fixture, options: &LoadOptions) -> Inventory {
    let source = ModelSource::Folder(fixture.folder.clone());
    inspect(&source, options).unwrap().1
}

/// Whether some matrices are blocks, by their headers.
fn has_blocks(fixture: &Fixture) -> bool {
    let found = inventory(fixture, &options(Some(DType::F32)));
    found.entries.iter().any(|entry| entry.loaded != "f32")
}

#[test]
fn log_probabilities_and_greedy_texts_are_those_of_transformers() {
    let mut wrong = Vec::new();
    let mut dense = 0;
    for fixture in fixtures_in(&folder()) {
        let tolerance = if has_blocks(&fixture) {
            ROUNDED
        } else {
            dense += 1;
            TOLERANCE
        };
        let model = open(&fixture.folder).map_err(|e| e.to_string());
        if let Err(what) = model.and_then(|model| fixture.compare(model, tolerance)) {
            wrong.push(format!("{}: {what}", fixture.name()));
        }
    }
    assert!(wrong.is_empty() && dense > 4, "{wrong:#?}");
}

/// In their NVFP4 the scale of a matrix is a factor, where that of compressed-tensors is a divisor.
#[test]
fn files_of_model_optimizer_compute_the_same() {
    for (name, algorithm) in [
        ("nvfp4", "NVFP4"),
        ("nvfp4", "W4A16_NVFP4"),
        ("fp8_tensor", "FP8"),
    ] {
        let fixture = fixture(name);
        let folder = tempfile::tempdir().unwrap();
        let quantization = json!({
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers.*.mlp.gate"],
            "config_groups": { "group_0": { "targets": ["Linear"] } },
            "kv_cache_scheme": { "dynamic": false, "num_bits": 8, "type": "float" },
            "producer": { "name": "modelopt", "version": "0.33.0" }
        });
        let mut config = config_with(&fixture, quantization);
        write_config(folder.path(), &config);
        let mut stored = Stored::read(&fixture.folder.join("model.safetensors"));
        rename_as_model_optimizer(&mut stored);
        for part in ["k_proj.k_scale", "v_proj.v_scale"] {
            let scale = StoredTensor {
                dtype: "F32".into(),
                dims: vec![1],
                data: 1f32.to_le_bytes().to_vec(),
            };
            let name = format!("model.layers.0.self_attn.{part}");
            stored.tensors.insert(name, scale);
        }
        stored.write(&folder.path().join("model.safetensors"));
        let model = open(folder.path()).unwrap();
        fixture.compare(model, ROUNDED).unwrap();

        config["quantization_config"]["quant_algo"] = json!("W4A8_AWQ");
        write_config(folder.path(), &config);
        let error = open(folder.path()).map(drop).unwrap_err().to_string();
        let expected = "quant_algo \"W4A8_AWQ\" is not supported: only FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4 and MIXED_PRECISION are";
        assert!(error.contains(expected), "{error}");
    }
}

/// Gives the tensors of compressed-tensors the names of Model Optimizer, and its factors in place of divisors.
fn rename_as_model_optimizer(stored: &mut Stored) {
    let tensors = std::mem::take(&mut stored.tensors).into_iter();
    let renamed = tensors.map(|(name, mut tensor)| {
        if name.ends_with("weight_global_scale") {
            let divisor = f32::from_le_bytes(tensor.data[..4].try_into().unwrap());
            tensor.data = divisor.recip().to_le_bytes().to_vec();
        }
        let name = name.replace("weight_global_scale", "weight_scale_2");
        (name.replace("weight_packed", "weight"), tensor)
    });
    stored.tensors = renamed.collect();
}

/// The `config.json` of a fixture with another `quantization_config`.
fn config_with(fixture: &Fixture, quantization: Json) -> Json {
    let mut config = read_json(fixture.folder.join("config.json"));
    config["quantization_config"] = quantization;
    config
}

#[test]
fn files_of_model_optimizer_may_mix_formats() {
    let stored = |name: &str| {
        let mut stored = Stored::read(&folder().join(name).join("model.safetensors"));
        rename_as_model_optimizer(&mut stored);
        stored
    };
    let in_attention = |name: &str| name.contains("self_attn");
    let (fp8, mut mixed) = (stored("fp8_tensor"), stored("nvfp4"));
    mixed.tensors.retain(|name, _| !in_attention(name));
    let attention = fp8
        .tensors
        .into_iter()
        .filter(|(name, _)| in_attention(name));
    mixed.tensors.extend(attention);
    let config = json!({
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
        "quantized_layers": {
            "model.layers.0.self_attn": { "quant_algo": "FP8" },
            "model.layers.1.self_attn": { "quant_algo": "FP8" },
            "model.layers.0.mlp": { "quant_algo": "NVFP4", "group_size": 16 },
            "model.layers.1.mlp": { "quant_algo": "NVFP4", "group_size": 16 }
        }
    });
    let fixture = fixture("nvfp4");
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &config_with(&fixture, config));
    mixed.write(&folder.path().join("model.safetensors"));
    let source = ModelSource::Folder(folder.path().to_owned());
    let found = inspect(&source, &LoadOptions::default()).unwrap().1;
    for (part, format) in [("self_attn.o_proj", "FP8"), ("mlp.up_proj", "NVFP4")] {
        let of_part = format!("{part}.weight");
        let mut entries = found.entries.iter();
        let entry = entries.find(|entry| entry.name.ends_with(&of_part));
        assert_eq!(entry.unwrap().stored, format);
    }
    let rows = logits(open(folder.path()).unwrap(), &fixture.prompt);
    assert!(rows.iter().flatten().all(|x| x.is_finite()));
}

/// Tensors with the experts of a layer have scales of all of them, too; those of Qwen3-VL have inputs before outputs.
#[test]
fn experts_of_fp8_may_be_in_one_tensor() {
    let fixture = fixture("fp8_experts");
    let quantization = json!({
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]
    });
    let config = config_with(&fixture, quantization);
    let each = Stored::read(&fixture.folder.join("model.safetensors"));
    let folder = tempfile::tempdir().unwrap();
    let open_as = |config: &Json, stored: &Stored| {
        write_config(folder.path(), config);
        stored.write(&folder.path().join("model.safetensors"));
        open(folder.path()).unwrap()
    };
    let want = logits(open_as(&config, &each), &fixture.prompt);

    let together = stacked(&each, false);
    let near = |model| {
        let rows = logits(model, &fixture.prompt);
        assert_eq!(rows.len(), want.len());
        for (row, want) in rows.iter().zip(&want) {
            assert!(distance(row, want) < 1e-5);
        }
    };
    near(open_as(&config, &together));
    let source = ModelSource::Folder(folder.path().to_owned());
    let found = inspect(&source, &LoadOptions::default()).unwrap().1;
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    let entry = found.entries.iter().find(|entry| entry.name == name);
    let entry = entry.unwrap();
    assert_eq!((&*entry.stored, &*entry.loaded), ("FP8", "f8e4m3"));

    let mut text = config.clone();
    let keys = text.as_object_mut().unwrap();
    keys.remove("architectures");
    keys.remove("norm_topk_prob");
    keys.remove("quantization_config");
    text["model_type"] = json!("qwen3_vl_moe_text");
    let outer = json!({
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 120,
        "text_config": text, "tie_word_embeddings": true, "video_token_id": 121, "vision_config": { "depth": 1 },
        "vision_end_token_id": 122, "vision_start_token_id": 123,
        "quantization_config": config["quantization_config"]
    });
    let mut transposed = stacked(&each, true);
    let tensors = std::mem::take(&mut transposed.tensors).into_iter();
    let inside = |name: &str| name.replace("model.", "model.language_model.");
    transposed.tensors = tensors
        .map(|(name, tensor)| (inside(&name), tensor))
        .collect();
    near(open_as(&outer, &transposed));

    // One expert too few.
    let mut wrong = stacked(&each, false);
    wrong.reshape(&format!("{name}_scale_inv"), &[2, 2, 1]);
    write_config(folder.path(), &config);
    wrong.write(&folder.path().join("model.safetensors"));
    let error = open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(
        error.contains(&format!("{name}_scale_inv has shape [2, 2, 1]")),
        "{error}"
    );
}

/// The tensors with the experts of a layer, and what they have of each.
const STACKED: [(&str, &[&str]); 2] = [
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("down_proj", &["down_proj"]),
];

/// `each`, with the matrices of 32 outputs and inputs of the experts of a layer in tensors of all of them.
fn stacked(each: &Stored, is_transposed: bool) -> Stored {
    let mut all = Stored {
        tensors: Default::default(),
    };
    let is_expert = |name: &str| name.contains(".experts.");
    for (name, tensor) in each.tensors.iter().filter(|(name, _)| !is_expert(name)) {
        let copy = StoredTensor {
            dtype: tensor.dtype.clone(),
            dims: tensor.dims.clone(),
            data: tensor.data.clone(),
        };
        all.tensors.insert(name.clone(), copy);
    }
    let all_parts = (0..2).flat_map(|layer| STACKED.map(|(name, parts)| (layer, name, parts)));
    for (layer, name, parts) in all_parts {
        let experts = format!("model.layers.{layer}.mlp.experts");
        let joined = |end: &str| -> Vec<u8> {
            let data = |expert: usize, part: &str| {
                &each.tensors[&format!("{experts}.{expert}.{part}.{end}")].data
            };
            let of_expert = |expert: usize| {
                let rows: Vec<u8> = parts
                    .iter()
                    .flat_map(|part| data(expert, part).clone())
                    .collect();
                // Weights are bytes. A transposed column of scales has the same bytes.
                if is_transposed && end == "weight" {
                    let columns = (0..32).flat_map(|at| rows.iter().skip(at).step_by(32).copied());
                    columns.collect()
                } else {
                    rows
                }
            };
            (0..3).flat_map(of_expert).collect()
        };
        let mut add = |end: &str, of_each: &str, dtype: &str, [rows, columns]: [usize; 2]| {
            let mut dims = vec![3, rows, columns];
            if is_transposed {
                dims.swap(1, 2);
            }
            let tensor = StoredTensor {
                dtype: dtype.into(),
                dims,
                data: joined(of_each),
            };
            all.tensors.insert(format!("{experts}.{name}{end}"), tensor);
        };
        let count = parts.len();
        add("", "weight", "F8_E4M3", [32 * count, 32]);
        add("_scale_inv", "weight_scale_inv", "F32", [count, 1]);
    }
    all
}

/// What settings of single matrices leave out is dense in random weights, too.
#[test]
fn random_weights_are_packed_as_the_settings_say() {
    let fixture = fixture("gptq");
    let folder = tempfile::tempdir().unwrap();
    let source = ModelSource::Folder(folder.path().to_owned());
    let random = dummy();
    let settings = r#"
        gptq | dynamic | {"-:.*mlp.*": {}}
        gptq | dynamic | {"-:model\\.language_model\\.layers\\.\\d+\\.mlp": {}}
        gptq | dynamic | {".*attn.*": {}, "-:.*layers.*": {}, ".*mlp.*": {}}
        auto-round | extra_config | {".*mlp.*": {"bits": 16}}
    "#;
    for [method, key, entry] in rows::<3>(settings) {
        let mut quantization =
            json!({ "quant_method": method, "bits": 4, "group_size": 32, "sym": true });
        quantization[key] = parsed(entry);
        write_config(folder.path(), &config_with(&fixture, quantization));
        let found = inspect(&source, &random).unwrap().1;
        let form = |part: &str| {
            let mut entries = found.entries.iter();
            let entry = entries.find(|entry| entry.name.ends_with(part));
            entry.unwrap().loaded.clone()
        };
        assert_eq!(form("layers.0.self_attn.q_proj.weight"), "Q4_0", "{method}");
        assert_ne!(form("layers.0.mlp.up_proj.weight"), "Q4_0", "{method}");
    }
}

/// Files have other tensors for matrices that are not packed; random weights do not.
#[test]
fn random_weights_need_expressions_that_can_be_read() {
    let fixture = fixture("gptq");
    let folder = tempfile::tempdir().unwrap();
    let quantization = json!({
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "dynamic": { "-:(?!x)": {} }
    });
    write_config(folder.path(), &config_with(&fixture, quantization));
    let random = dummy();
    let source = ModelSource::Folder(folder.path().to_owned());
    let error = inspect(&source, &random).map(drop).unwrap_err().to_string();
    let expected = "dynamic \"-:(?!x)\" is not supported: random weights need an expression without look-around";
    assert!(error.contains(expected), "{error}");
}

/// Fixtures, and other settings of the same weights. The first expression is that of a matrix, also if others have its
/// settings, or if it has those of all; names come before expressions.
const OTHER_NAMES: &str = r#"
float8_channel | {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
float8_channel | {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
gptq | {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": true, "desc_act": false, "lm_head": false, "dynamic": {"-:.*lm_head": {}, "model.embed_tokens": {}, "+:model\\.layers\\.0\\.": {"bits": 4, "group_size": 32}, "model.layers.1": {"bits": 4, "group_size": 32}}}
gptq | {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": true, "dynamic": {"lm_head": {"bits": 8, "group_size": -1}, "-:(?!model\\.layers).*": {}, ".*layers": {"bits": 4, "group_size": 32}, ".*mlp": {"bits": 8, "group_size": -1}}}
gptq | {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "dynamic": {".*mlp": {}, ".*up_proj": {"bits": 8, "group_size": -1}}}
gptq | {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": true, "extra_config": {".*mlp.*": {"bits": 8, "group_size": -1}, "model.layers.0": {"bits": 4}, "model.layers.1": {"bits": 4}}}
gptq_asymmetric | {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": false, "data_type": "int", "packing_format": "auto_round:auto_gptq", "autoround_version": "0.14.2", "iters": 0, "block_name_to_quantize": "model.layers", "model_free": true}
gptq_8_bits | {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": true, "packing_format": "auto_round:gptqmodel", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0": {"bits": 8, "group_size": -1}, ".*layers\\.1\\..*": {"bits": 8, "group_size": -1}}}
awq | {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": false, "packing_format": "auto_round:auto_awq"}
"#;

/// Programs have different names for the same tensors, and give single matrices settings of their own.
#[test]
fn other_names_of_a_format_compute_the_same() {
    for [name, quantization] in rows::<2>(OTHER_NAMES) {
        let quantization = parsed(quantization);
        let fixture = fixture(name);
        let folder = tempfile::tempdir().unwrap();
        write_config(folder.path(), &config_with(&fixture, quantization));
        let file = "model.safetensors";
        std::fs::copy(fixture.folder.join(file), folder.path().join(file)).unwrap();
        let model = open(folder.path()).unwrap();
        fixture.compare(model, ROUNDED).unwrap();
    }
}

#[test]
fn the_engine_changes_no_text() {
    for fixture in fixtures_in(&folder()) {
        fixture.drive_engine();
    }
}

/// What the server does if nothing is asked for: dense matrices are bf16, and FP8 stays as it is.
#[test]
fn the_servers_defaults_load_every_format() {
    for fixture in fixtures_in(&folder()) {
        let exact = logits(open(&fixture.folder).unwrap(), &fixture.prompt);
        let usual = logits(open_as(&fixture.folder, None).unwrap(), &fixture.prompt);
        let pairs = exact.iter().flatten().zip(usual.iter().flatten());
        let far = pairs.map(|(a, b)| (a - b).abs()).fold(0., |far, d| {
            assert!(d.is_finite(), "{}", fixture.name());
            f32::max(far, d)
        });
        // A router may choose another expert.
        let limit = if fixture.name().contains("experts") {
            10.
        } else {
            0.6
        };
        assert!(far < limit, "{}: {far}", fixture.name());
    }
}

#[test]
fn headers_tell_what_is_stored_and_loaded() {
    for name in [
        "awq",
        "fp8_blocks",
        "gptq_ordered",
        "w4a16_asymmetric",
        "nf4",
    ] {
        let fixture = fixture(name);
        let found = inventory(&fixture, &LoadOptions::default());
        let stored = Stored::read(&fixture.folder.join("model.safetensors"));
        let bytes: usize = stored
            .tensors
            .values()
            .map(|tensor| tensor.data.len())
            .sum();
        assert_eq!(
            found.sum(|entry| entry.stored_bytes),
            bytes as u64,
            "{name}"
        );
    }
    let of = |name: &str, options: &LoadOptions| {
        let found = inventory(&fixture(name), options);
        let mut entries = found.entries.into_iter();
        let entry = entries.find(|entry| entry.name.ends_with("layers.1.mlp.up_proj.weight"));
        let entry = entry.unwrap();
        (entry.stored, entry.loaded, entry.elements)
    };
    let texts = |stored: &str, loaded: &str| (stored.to_owned(), loaded.to_owned(), 96 * 32);
    let usual = LoadOptions::default();
    assert_eq!(of("awq", &usual), texts("AWQ", "Q5_0"));
    assert_eq!(of("gptq", &usual), texts("GPTQ4", "Q4_0"));
    assert_eq!(of("w8a8", &usual), texts("INT8", "Q8_0"));
    assert_eq!(of("fp8_tensor", &usual), texts("FP8", "f8e4m3"));
    // What is dense becomes what --quantize says, and blocks stay.
    let quantized = LoadOptions {
        quantize: Some(GgmlDType::Q4_1.into()),
        ..LoadOptions::default()
    };
    assert_eq!(of("fp8_tensor", &quantized), texts("FP8", "Q4_1"));
    assert_eq!(of("awq", &quantized), texts("AWQ", "Q5_0"));
    for name in ["awq", "fp8_tensor"] {
        load(&ModelSource::Folder(folder().join(name)), &quantized).unwrap();
    }
}

#[test]
fn random_weights_have_the_same_forms() {
    let mut compared = 0;
    for fixture in fixtures_in(&folder()) {
        let random = dummy();
        let source = ModelSource::Folder(fixture.folder.clone());
        let forms = |options: &LoadOptions| -> Vec<(String, String)> {
            let found = inspect(&source, options).unwrap().1.entries.into_iter();
            let packed = found.filter(|entry| entry.name.contains("_proj.weight"));
            packed.map(|entry| (entry.name, entry.loaded)).collect()
        };
        // Random weights do not know groups.
        let has_usual_groups = !fixture.name().contains("16") || fixture.name().starts_with('w');
        if has_usual_groups {
            compared += 1;
            assert_eq!(
                forms(&random),
                forms(&LoadOptions::default()),
                "{}",
                fixture.name()
            );
        }
        let rows = logits(load(&source, &random).unwrap(), &fixture.prompt);
        assert!(
            rows.iter().flatten().all(|x| x.is_finite()),
            "{}",
            fixture.name()
        );
    }
    assert!(compared > 20, "{compared}");
}
