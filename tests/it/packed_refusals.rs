//! Checkpoints with a `quantization_config` that are not what they should be, or that ask for what is not supported.

use crate::common::process::foretoken;
use crate::common::safetensors::Stored;
use crate::common::tiny::open;
use crate::common::tiny_folder::{byte_level, write_tokenizer};
use crate::packed::folder;
use serde_json::{Value as Json, json};

/// A copy of a fixture with another configuration or other tensors.
struct Copied {
    folder: tempfile::TempDir,
    config: Json,
    stored: Stored,
}

impl Copied {
    fn of(name: &str) -> Self {
        let from = folder().join(name);
        let config = std::fs::read_to_string(from.join("config.json")).unwrap();
        Self {
            folder: tempfile::tempdir().unwrap(),
            config: serde_json::from_str(&config).unwrap(),
            stored: Stored::read(&from.join("model.safetensors")),
        }
    }

    /// Why it is not loaded.
    #[track_caller]
    fn error(&self) -> String {
        let path = self.folder.path();
        std::fs::write(path.join("config.json"), self.config.to_string()).unwrap();
        self.stored.write(&path.join("model.safetensors"));
        let error = open(path).map(drop).expect_err("it is loaded").to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    }
}

const AT: &str = "model.layers.1.mlp.down_proj";

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let shape =
        |dims: &'static [usize]| move |stored: &mut Stored, name: &str| stored.reshape(name, dims);
    let missing = |stored: &mut Stored, name: &str| {
        stored.tensors.remove(name).unwrap();
    };
    let starts =
        |bytes: &'static [u8]| move |stored: &mut Stored, name: &str| stored.start(name, bytes);
    let dtype = |to: &'static str| move |stored: &mut Stored, name: &str| stored.retype(name, to);
    type Change = Box<dyn Fn(&mut Stored, &str)>;
    let cases: Vec<(&str, &str, Change, &str)> = vec![
        ("gptq", "scales", Box::new(missing), "is missing"),
        ("gptq", "qweight", Box::new(missing), "qweight is missing"),
        (
            "gptq",
            "qweight",
            Box::new(shape(&[32, 12])),
            "has shape [32, 12], the config asks for [12, 32]",
        ),
        ("gptq", "qzeros", Box::new(shape(&[12])), "has shape [12]"),
        (
            "gptq",
            "g_idx",
            Box::new(starts(&[3, 0, 0, 0])),
            "names group 3 of 3",
        ),
        (
            "gptq",
            "g_idx",
            Box::new(starts(&[0xfb, 0xff, 0xff, 0xff])),
            "names group -5 of 3",
        ),
        (
            "gptq",
            "scales",
            Box::new(starts(&[0, 0x7c])),
            "contains NaN or infinity",
        ),
        ("gptq", "scales", Box::new(dtype("I16")), "has dtype I16"),
        ("awq", "qzeros", Box::new(missing), "is missing"),
        ("awq", "qweight", Box::new(dtype("F32")), "has dtype F32"),
        (
            "awq",
            "scales",
            Box::new(shape(&[32, 3])),
            "has shape [32, 3]",
        ),
        (
            "fp8_blocks",
            "weight_scale_inv",
            Box::new(missing),
            "is missing",
        ),
        (
            "fp8_blocks",
            "weight_scale_inv",
            Box::new(shape(&[5, 2])),
            "has shape [5, 2]",
        ),
        (
            "fp8_blocks",
            "weight",
            Box::new(starts(&[0xff])),
            "contains NaN",
        ),
        (
            "fp8_blocks",
            "weight_scale_inv",
            Box::new(starts(&[0, 0, 0x80, 0x7e])),
            "has a scale above",
        ),
        (
            "w4a16",
            "weight_shape",
            Box::new(starts(&[31])),
            "says [31, 96], the config asks for [32, 96]",
        ),
        ("w4a16", "weight_scale", Box::new(missing), "is missing"),
        (
            "w4a16_asymmetric",
            "weight_zero_point",
            Box::new(missing),
            "is missing",
        ),
        (
            "w4a16_ordered",
            "weight_g_idx",
            Box::new(starts(&[9])),
            "names group 9 of 3",
        ),
        (
            "w8a8",
            "weight_scale",
            Box::new(shape(&[4, 8])),
            "has shape [4, 8]",
        ),
        (
            "nvfp4",
            "weight_global_scale",
            Box::new(starts(&[0, 0, 0, 0])),
            "is no divisor",
        ),
        (
            "nvfp4",
            "weight_scale",
            Box::new(starts(&[0x7f])),
            "contains NaN",
        ),
        (
            "mxfp4",
            "weight_scale",
            Box::new(starts(&[255])),
            "contains NaN",
        ),
        ("nf4", "weight.absmax", Box::new(missing), "is missing"),
        (
            "nf4_plain",
            "weight.absmax",
            Box::new(shape(&[47])),
            "its matrix needs 48 values",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            Box::new(starts(b"[")),
            "is not supported",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            Box::new(starts(br#"{"quant_type": "fp4""#)),
            "quant_type \"fp4\" is not supported",
        ),
    ];
    for (name, end, change, want) in cases {
        let mut copied = Copied::of(name);
        let tensor = format!("{AT}.{end}");
        change(&mut copied.stored, &tensor);
        let error = copied.error();
        assert!(
            error.contains(want) && error.contains(&tensor),
            "{name} {end}: {error}"
        );
    }
    // Factors that are finite, and products that are not.
    let mut tiny = Copied::of("nvfp4");
    let name = format!("{AT}.weight_global_scale");
    tiny.stored.start(&name, &f32::MIN_POSITIVE.to_le_bytes());
    let error = tiny.error();
    let want = format!("tensor {AT}.weight contains NaN or infinity");
    assert!(error.contains(&want), "{error}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let group = |change: Json| {
        let mut group = json!({
            "targets": ["Linear"],
            "weights": { "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 }
        });
        for (key, value) in change.as_object().unwrap() {
            if value.is_object() && group[key].is_object() {
                for (key2, value) in value.as_object().unwrap() {
                    group[key][key2] = value.clone();
                }
            } else {
                group[key] = value.clone();
            }
        }
        json!({ "config_groups": { "group_0": group } })
    };
    let cases = [
        (
            "gptq",
            json!({ "quant_method": "quip" }),
            "only a quant_method of auto-round, awq, bitsandbytes, compressed-tensors",
        ),
        (
            "gptq",
            json!({ "quant_method": null }),
            "only a quant_method of",
        ),
        (
            "gptq",
            json!({ "bits": 3 }),
            "bits 3 is not supported: only 4 and 8 are",
        ),
        (
            "gptq",
            json!({ "checkpoint_format": "marlin" }),
            "checkpoint_format \"marlin\"",
        ),
        (
            "gptq",
            json!({ "dynamic": { "x": { "bits": 3 } } }),
            "dynamic: bits 3 is not supported: only 4 and 8 are",
        ),
        ("gptq", json!({ "dynamic": ["x"] }), "dynamic [\"x\"]"),
        (
            "gptq",
            json!({ "dynamic": { "(?!x)": {} } }),
            "dynamic: a name after re: is not supported",
        ),
        (
            "gptq",
            json!({ "dynamic": { "x": 4 } }),
            "its entries must be objects",
        ),
        (
            "gptq",
            json!({ "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor" }),
            "only auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq are",
        ),
        (
            "gptq",
            json!({ "quant_method": "auto-round", "extra_config": { "x": { "data_type": "mx_fp" } } }),
            "extra_config: data_type \"mx_fp\" is not supported: only \"int\" is",
        ),
        (
            "fp8_tensor",
            json!({ "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" }),
            "quantized_layers is missing",
        ),
        (
            "fp8_tensor",
            json!({
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": { "x": { "quant_algo": "W4A16_AWQ" } }
            }),
            "quantized_layers: quant_algo \"W4A16_AWQ\"",
        ),
        ("gptq", json!({ "group_size": 0 }), "group_size 0"),
        (
            "gptq",
            json!({ "is_marlin_format": true }),
            "is_marlin_format true",
        ),
        (
            "awq",
            json!({ "version": "gemv" }),
            "version \"gemv\" is not supported: only gemm is",
        ),
        ("awq", json!({ "zero_point": false }), "zero_point false"),
        ("awq", json!({ "bits": 8 }), "bits 8"),
        ("awq", json!({ "group_size": "all" }), "group_size \"all\""),
        (
            "fp8_blocks",
            json!({ "fmt": "e5m2" }),
            "fmt \"e5m2\" is not supported: only e4m3 is",
        ),
        (
            "fp8_blocks",
            json!({ "weight_block_size": [0, 128] }),
            "weight_block_size [0,128]",
        ),
        (
            "fp8_blocks",
            json!({ "kv_cache_scheme": { "num_bits": 8 } }),
            "kv_cache_scheme {\"num_bits\":8}",
        ),
        (
            "w4a16",
            json!({ "kv_cache_scheme": { "num_bits": 8 } }),
            "kv_cache_scheme {\"num_bits\":8}",
        ),
        (
            "w4a16",
            json!({ "sparsity_config": { "format": "sparse-24-bitmask" } }),
            "sparsity_config",
        ),
        (
            "w4a16",
            json!({ "transform_config": { "R1": {} } }),
            "transform_config",
        ),
        (
            "w4a16",
            json!({ "format": "marlin-24" }),
            "num_bits 4 is not supported: not with type int and format marlin-24",
        ),
        (
            "w4a16",
            json!({ "ignore": ["re:(?!x)"] }),
            "a name after re: is not supported",
        ),
        ("w4a16", json!({ "config_groups": {} }), "config_groups {}"),
        (
            "w4a16",
            group(json!({ "output_activations": { "num_bits": 8 } })),
            "group_0: output_activations",
        ),
        (
            "w4a16",
            group(json!({ "weights": { "num_bits": 3 } })),
            "num_bits 3",
        ),
        (
            "w4a16",
            group(json!({ "weights": { "strategy": "odd" } })),
            "strategy \"odd\"",
        ),
        (
            "w4a16",
            group(json!({ "weights": { "dynamic": true } })),
            "dynamic true",
        ),
        ("nf4", json!({ "load_in_8bit": true }), "load_in_8bit true"),
        (
            "nf4",
            json!({ "bnb_4bit_quant_type": "fp4" }),
            "bnb_4bit_quant_type \"fp4\"",
        ),
    ];
    for (name, change, want) in cases {
        let mut copied = Copied::of(name);
        for (key, value) in change.as_object().unwrap() {
            copied.config["quantization_config"][key] = value.clone();
        }
        let error = copied.error();
        assert!(
            error.contains(want) && error.contains("quantization_config"),
            "{want}: {error}"
        );
    }
    // Only some matrices are named.
    let mut copied = Copied::of("w4a16");
    let named = group(json!({ "targets": ["re:.*self_attn.*"] }));
    copied.config["quantization_config"]["config_groups"] = named["config_groups"].clone();
    let error = copied.error();
    assert!(error.contains("mlp.gate_proj.weight"), "{error}");
}

#[test]
fn checkpoints_of_mlx_are_named_as_such() {
    let mut copied = Copied::of("gptq");
    let mlx = json!({ "group_size": 64, "bits": 4 });
    for key in ["quantization", "quantization_config"] {
        copied.config[key] = mlx.clone();
    }
    let error = copied.error();
    assert!(error.contains("quantization {"), "{error}");
    assert!(error.contains("is not supported: it is MLX's"), "{error}");
}

#[test]
fn commands_say_in_one_line_what_they_do_not_support() {
    let mut copied = Copied::of("awq");
    copied.config["quantization_config"]["quant_method"] = json!("quip");
    copied.error();
    write_tokenizer(copied.folder.path(), byte_level());
    let changed = copied.folder.path().to_str().unwrap().to_owned();
    let run = |args: &[&str]| {
        let output = foretoken().args(args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    for args in [&["check", &changed][..], &["serve", "--model", &changed]] {
        let (code, said) = run(args);
        assert_eq!(code, Some(2), "{said}");
        let last = said.lines().last().unwrap();
        assert!(
            last.starts_with("error: ") && last.contains("quip"),
            "{said}"
        );
    }
    let awq = folder().join("awq").display().to_string();
    let out = copied.folder.path().join("x.gguf").display().to_string();
    let (code, said) = run(&["convert", "--model", &awq, "--out", &out]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("quantization_config cannot be converted"),
        "{said}"
    );
}
