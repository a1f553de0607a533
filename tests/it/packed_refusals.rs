//! Checkpoints with a `quantization_config` that are not what they should be, or that ask for what is not supported.

use crate::common::process::{foretoken, refusal};
use crate::common::refusals::{change, merge, parsed, rows};
use crate::common::safetensors::Stored;
use crate::common::tiny::open;
use crate::common::tiny_folder::{byte_level, write_tokenizer};
use crate::common::{assert_has, read_json};
use crate::packed::folder;
use serde::de::DeserializeOwned;
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
        Self {
            folder: tempfile::tempdir().unwrap(),
            config: read_json(from.join("config.json")),
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

/// Fixtures, tensors of them, what is done to these, and what an error says.
const TENSORS: &str = r#"
gptq | scales | missing | is missing
gptq | qweight | missing | qweight is missing
gptq | qweight | shape [32, 12] | has shape [32, 12], the config asks for [12, 32]
gptq | qzeros | shape [12] | has shape [12]
gptq | g_idx | bytes [3, 0, 0, 0] | names group 3 of 3
gptq | g_idx | bytes [251, 255, 255, 255] | names group -5 of 3
gptq | scales | bytes [0, 124] | contains NaN or infinity
gptq | scales | dtype I16 | has dtype I16
awq | qzeros | missing | is missing
awq | qweight | dtype F32 | has dtype F32
awq | scales | shape [32, 3] | has shape [32, 3]
fp8_blocks | weight_scale_inv | missing | is missing
fp8_blocks | weight_scale_inv | shape [5, 2] | has shape [5, 2]
fp8_blocks | weight | bytes [255] | contains NaN
fp8_blocks | weight_scale_inv | bytes [0, 0, 128, 126] | has a scale above
w4a16 | weight_shape | bytes [31] | says [31, 96], the config asks for [32, 96]
w4a16 | weight_scale | missing | is missing
w4a16_asymmetric | weight_zero_point | missing | is missing
w4a16_ordered | weight_g_idx | bytes [9] | names group 9 of 3
w8a8 | weight_scale | shape [4, 8] | has shape [4, 8]
nvfp4 | weight_global_scale | bytes [0, 0, 0, 0] | is no divisor
nvfp4 | weight_scale | bytes [127] | contains NaN
mxfp4 | weight_scale | bytes [255] | contains NaN
nf4 | weight.absmax | missing | is missing
nf4_plain | weight.absmax | shape [47] | its matrix needs 48 values
nf4 | weight.quant_state.bitsandbytes__nf4 | text [ | is not supported
nf4 | weight.quant_state.bitsandbytes__nf4 | text {"quant_type": "fp4" | quant_type "fp4" is not supported
"#;

fn list<T: DeserializeOwned>(text: &str) -> Vec<T> {
    serde_json::from_str(text).unwrap()
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    for [name, end, how, want] in rows::<4>(TENSORS) {
        let mut copied = Copied::of(name);
        let (stored, tensor) = (&mut copied.stored, format!("{AT}.{end}"));
        let (how, with) = how.split_once(' ').unwrap_or((how, ""));
        match how {
            "missing" => drop(stored.tensors.remove(&tensor).unwrap()),
            "shape" => stored.reshape(&tensor, &list::<usize>(with)),
            "bytes" => stored.start(&tensor, &list::<u8>(with)),
            "text" => stored.start(&tensor, with.as_bytes()),
            "dtype" => stored.retype(&tensor, with),
            _ => panic!("{how}"),
        }
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

/// Fixtures, keys of their `quantization_config`, and what an error says.
const UNSUPPORTED: &str = r#"
gptq | {"quant_method": "quip"} | only a quant_method of auto-round, awq, bitsandbytes, compressed-tensors
gptq | {"quant_method": null} | only a quant_method of
gptq | {"bits": 3} | bits 3 is not supported: only 4 and 8 are
gptq | {"checkpoint_format": "marlin"} | checkpoint_format "marlin"
gptq | {"dynamic": {"x": {"bits": 3}}} | dynamic: bits 3 is not supported: only 4 and 8 are
gptq | {"dynamic": ["x"]} | dynamic ["x"]
gptq | {"dynamic": {"(?!x)": {}}} | dynamic: a name after re: is not supported
gptq | {"dynamic": {"x": 4}} | its entries must be objects
gptq | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"} | only auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq are
gptq | {"quant_method": "auto-round", "extra_config": {"x": {"data_type": "mx_fp"}}} | extra_config: data_type "mx_fp" is not supported: only "int" is
fp8_tensor | {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"} | quantized_layers is missing
fp8_tensor | {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "W4A16_AWQ"}}} | quantized_layers: quant_algo "W4A16_AWQ"
gptq | {"group_size": 0} | group_size 0
gptq | {"is_marlin_format": true} | is_marlin_format true
awq | {"version": "gemv"} | version "gemv" is not supported: only gemm is
awq | {"zero_point": false} | zero_point false
awq | {"bits": 8} | bits 8
awq | {"group_size": "all"} | group_size "all"
fp8_blocks | {"fmt": "e5m2"} | fmt "e5m2" is not supported: only e4m3 is
fp8_blocks | {"weight_block_size": [0, 128]} | weight_block_size [0,128]
fp8_blocks | {"kv_cache_scheme": {"num_bits": 8}} | kv_cache_scheme {"num_bits":8}
w4a16 | {"kv_cache_scheme": {"num_bits": 8}} | kv_cache_scheme {"num_bits":8}
w4a16 | {"sparsity_config": {"format": "sparse-24-bitmask"}} | sparsity_config
w4a16 | {"transform_config": {"R1": {}}} | transform_config
w4a16 | {"format": "marlin-24"} | num_bits 4 is not supported: not with type int and format marlin-24
w4a16 | {"ignore": ["re:(?!x)"]} | a name after re: is not supported
w4a16 | {"config_groups": {}} | config_groups {}
nf4 | {"load_in_8bit": true} | load_in_8bit true
nf4 | {"bnb_4bit_quant_type": "fp4"} | bnb_4bit_quant_type "fp4"
"#;

/// Values of a group of matrices of compressed-tensors, and what an error says.
const UNSUPPORTED_GROUPS: &str = r#"
output_activations = {"num_bits": 8} | group_0: output_activations
weights.num_bits = 3 | num_bits 3
weights.strategy = "odd" | strategy "odd"
weights.dynamic = true | dynamic true
"#;

/// Keys that have a group of matrices, of which one value is changed.
fn group(how: &str) -> Json {
    let mut group = json!({
        "targets": ["Linear"],
        "weights": { "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 }
    });
    change(&mut group, how);
    json!({ "config_groups": { "group_0": group } })
}

/// Why a fixture with other keys in its `quantization_config` is not loaded.
#[track_caller]
fn error_with(name: &str, keys: &Json) -> String {
    let mut copied = Copied::of(name);
    merge(&mut copied.config["quantization_config"], keys);
    copied.error()
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refused = |name: &str, keys: Json, want: &str| {
        let error = error_with(name, &keys);
        assert!(
            error.contains(want) && error.contains("quantization_config"),
            "{want}: {error}"
        );
    };
    for [name, keys, want] in rows::<3>(UNSUPPORTED) {
        refused(name, parsed(keys), want);
    }
    for [how, want] in rows::<2>(UNSUPPORTED_GROUPS) {
        refused("w4a16", group(how), want);
    }
    // Only some matrices are named.
    let error = error_with("w4a16", &group(r#"targets = ["re:.*self_attn.*"]"#));
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
    let refused = |args: &[&str]| refusal(&foretoken().args(args).output().unwrap());
    for args in [&["check", &changed][..], &["serve", "--model", &changed]] {
        let said = refused(args);
        let last = said.lines().last().unwrap();
        assert!(
            last.starts_with("error: ") && last.contains("quip"),
            "{said}"
        );
    }
    let awq = folder().join("awq").display().to_string();
    let out = copied.folder.path().join("x.gguf").display().to_string();
    let said = refused(&["convert", "--model", &awq, "--out", &out]);
    assert_has(&said, &["quantization_config cannot be converted"]);
}
