//! Weights of FP8 and NVFP4 on a GPU: products by our own kernels, models, and texts.

use super::quantized::{error, noise, precision, values};
use super::texts::start;
use super::{
    Log, WITHIN, batch_invariant, configured, difference, gpu, loaded, logits, members, model_by,
    shape, tokens, verified_as_plain,
};
use crate::common::project::file;
use crate::common::{greedy, run};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::EXACT_ROWS;
use foretoken::kernels::dense::{DenseMatrix, Float8};
use foretoken::kernels::matmul::CpuMatrix;
use foretoken::kernels::quant::{BlockType, DeviceQuantMatrix, Nvfp4, matmul_quantized};
use foretoken::model::{LoadFormat, LoadOptions, ModelSource, inspect, load};
use serde_json::{Value, json};
use std::path::Path;

/// A random weight on the GPU, of all finite numbers and with a scale for each block, and its values.
pub(super) fn weight(
    shape: (usize, usize),
    block: (usize, usize),
    gpu: &Device,
) -> (DeviceQuantMatrix, Tensor) {
    let bytes = |count: usize| -> Vec<u8> {
        let values = Tensor::randn(0f32, 1., count, &Device::Cpu).unwrap();
        let values = values.to_vec1::<f32>().unwrap().into_iter();
        // The last bits of a fraction are uniform.
        values.map(|x| (x.to_bits() >> 3) as u8).collect()
    };
    let mut numbers = bytes(shape.0 * shape.1);
    for number in &mut numbers {
        *number -= u8::from(*number & 0x7f == 0x7f);
    }
    let scales = bytes(shape.0.div_ceil(block.0) * shape.1.div_ceil(block.1)).into_iter();
    let scales: Vec<f32> = scales.map(|x| (f32::from(x) + 99.1) / 2e5).collect();
    let float8 = Float8 {
        shape,
        numbers: &numbers,
        scales: &scales,
        block,
    };
    let exact = DenseMatrix::of_float8(&float8).unwrap();
    let mut rows = vec![0f32; shape.0 * shape.1];
    for (output, row) in rows.chunks_exact_mut(shape.1).enumerate() {
        exact.read_row(output, row);
    }
    let exact = Tensor::from_vec(rows, shape, &Device::Cpu).unwrap();
    (DeviceQuantMatrix::from_float8(&float8, gpu).unwrap(), exact)
}

/// A random weight of NVFP4 on the GPU, and its values.
pub(super) fn nvfp4(shape: (usize, usize), gpu: &Device) -> (DeviceQuantMatrix, Tensor) {
    let count = shape.0 * shape.1;
    let bytes = |count: usize, below: u32| -> Vec<u8> {
        let values = Tensor::randn(0f32, 1., count, &Device::Cpu).unwrap();
        let values = values.to_vec1::<f32>().unwrap().into_iter();
        values.map(|x| (x.to_bits() % below) as u8).collect()
    };
    let (numbers, scales) = (bytes(count / 2, 256), bytes(count / 16, 127));
    let nvfp4 = Nvfp4 {
        shape,
        numbers: &numbers,
        scales: &scales,
        factor: 1.1e-3,
    };
    let float8 = Float8 {
        shape: (1, scales.len()),
        numbers: &scales,
        scales: &[nvfp4.factor],
        block: (1, scales.len()),
    };
    let mut of_groups = vec![0f32; scales.len()];
    DenseMatrix::of_float8(&float8)
        .unwrap()
        .read_row(0, &mut of_groups);
    let sizes = [0f32, 0.5, 1., 1.5, 2., 3., 4., 6.];
    let exact = (0..count).map(|i| {
        let number = numbers[i / 2] >> (i % 2 * 4);
        let size = of_groups[i / 16] * sizes[usize::from(number & 7)];
        if number & 8 == 0 { size } else { -size }
    });
    let exact = Tensor::from_vec(exact.collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap();
    (DeviceQuantMatrix::from_nvfp4(&nvfp4, gpu).unwrap(), exact)
}

/// FP8 with a scale for each block, or NVFP4.
fn of_form(
    shape: (usize, usize),
    block: Option<(usize, usize)>,
    gpu: &Device,
) -> (DeviceQuantMatrix, Tensor) {
    match block {
        Some(block) => weight(shape, block, gpu),
        None => nvfp4(shape, gpu),
    }
}

/// A scale for the matrix, each output, each 128 inputs of some outputs, and each 64; strips and units that are not whole.
#[test]
fn floats_are_kept_without_loss() {
    let gpu = gpu();
    for (shape, block) in [
        ((48, 64), Some((48, 64))),
        ((37, 288), Some((1, 288))),
        ((50, 1024), Some((24, 128))),
        ((3, 32), Some((128, 128))),
        ((20, 416), Some((5, 64))),
        ((37, 288), None),
        ((20, 416), None),
    ] {
        let (weight, want) = of_form(shape, block, &gpu);
        let got = weight.dequantize(DType::F32).unwrap();
        assert_eq!(values(&got), values(&want), "{shape:?} {block:?}");
        let ids = [0, shape.0 as u32 - 1, 1, 1, shape.0 as u32 / 2];
        let there = Tensor::new(&ids, &gpu).unwrap();
        let rows = weight.rows(&there, DType::F32).unwrap();
        let want = want.index_select(&Tensor::new(&ids, &Device::Cpu).unwrap(), 0);
        assert_eq!(values(&rows), values(&want.unwrap()), "{shape:?} {block:?}");
    }
}

/// In all numbers of rows that differ in their kernels or tiles; of the last shape, fewer warps share the inputs.
#[test]
fn a_row_of_floats_has_the_same_bits_in_any_number_of_rows() {
    let gpu = gpu();
    for (shape, block, dtypes) in [
        ((48, 64), Some((128, 128)), &[DType::F16, DType::BF16][..]),
        ((37, 288), Some((1, 288)), &[DType::F16, DType::BF16]),
        ((16, 1024), Some((16, 128)), &[DType::BF16]),
        ((4230, 512), Some((128, 128)), &[DType::BF16]),
        ((37, 288), None, &[DType::F16, DType::BF16]),
        ((16, 1024), None, &[DType::BF16]),
    ] {
        let (weight, exact) = of_form(shape, block, &gpu);
        for &dtype in dtypes {
            let all = noise(70, shape.1, dtype, &gpu);
            let product = |x: &Tensor, invariant| {
                matmul_quantized(&[&weight], &x.contiguous().unwrap(), invariant).unwrap()
            };
            let whole = product(&all, false);
            let off = error(&whole, &all, &exact);
            assert!(off < precision(dtype), "{shape:?} {dtype:?}: {off}");
            let whole = values(&whole);
            for (first, rows) in [
                (0, 1),
                (7, 1),
                (69, 1),
                (3, 8),
                (8, 9),
                (5, 16),
                (40, 17),
                (9, 40),
            ] {
                let part = product(&all.narrow(0, first, rows).unwrap(), false);
                let same = values(&part) == whole[first..first + rows];
                assert!(same, "{shape:?} {dtype:?}: {rows} rows from {first}");
            }
            if shape.0 > 48 {
                continue;
            }
            // More rows than have the promise: with it, and by the device's library.
            let before = noise(EXACT_ROWS, shape.1, dtype, &gpu);
            let many = Tensor::cat(&[&before, &all], 0).unwrap();
            let invariant = values(&product(&many, true));
            assert!(
                invariant[EXACT_ROWS..] == whole,
                "{shape:?} {dtype:?}: many rows"
            );
            let off = error(&product(&many, false), &many, &exact);
            assert!(off < precision(dtype), "{shape:?} {dtype:?} dense: {off}");
        }
    }
}

/// FP8 is beside blocks where a checkpoint has some matrices in each.
#[test]
fn outputs_of_float8_are_beside_those_of_blocks() {
    let gpu = gpu();
    let (first, second) = (
        weight((40, 256), (40, 256), &gpu).0,
        weight((33, 256), (1, 256), &gpu).0,
    );
    let blocks = super::quantized::weight(BlockType::Q8_0, (16, 256), &gpu).0;
    let x = noise(3, 256, DType::BF16, &gpu);
    let weights = [&first, &second, &blocks, &first];
    let joined = values(&matmul_quantized(&weights, &x, false).unwrap());
    let alone = weights.map(|weight| values(&matmul_quantized(&[weight], &x, false).unwrap()));
    for (row, joined) in joined.iter().enumerate() {
        let alone: Vec<f32> = alone.iter().flat_map(|alone| alone[row].clone()).collect();
        assert_eq!(*joined, alone);
    }
}

/// `quantization_config` as published checkpoints have it.
fn packed() -> Value {
    json!({ "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128] })
}

/// The model of `source` in FP8, in a folder beside it.
pub(super) fn in_float8(source: &ModelSource) -> ModelSource {
    let ModelSource::Folder(folder) = source else {
        panic!("{source:?} is no folder");
    };
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let config = serde_json::from_str(&text).unwrap();
    let packed = packed();
    configured(
        &folder.join("float8"),
        config,
        [("quantization_config", packed)],
    )
}

fn options(device: &Device, dtype: DType) -> LoadOptions {
    LoadOptions {
        dtype: Some(dtype),
        device: device.clone(),
        seed: 2,
        ..LoadOptions::default()
    }
}

/// What matrices of layers become, and the bytes of all tensors.
fn forecast(source: &ModelSource, options: &LoadOptions) -> (Vec<String>, u64) {
    let (_, inventory) = inspect(source, options).unwrap();
    let entries = inventory.entries.iter();
    let entries = entries.filter(|entry| entry.name.ends_with("_proj.weight"));
    let mut forms: Vec<String> = entries.map(|entry| entry.loaded.clone()).collect();
    forms.sort();
    forms.dedup();
    (forms, inventory.sum(|entry| entry.loaded_bytes))
}

/// Checkpoints with one scale, one for each output and one for each block, and with experts, as the CPU reads them.
#[test]
fn checkpoints_in_float8_stay_so_and_have_the_logits_of_the_cpu() {
    let gpu = gpu();
    let tokens: Vec<u32> = tokens(40).iter().map(|id| id % 128).collect();
    for (name, form) in [
        ("fp8_tensor", "f8e4m3"),
        ("fp8_experts", "f8e4m3"),
        ("float8_channel", "f8e4m3"),
        ("float8_tensor", "f8e4m3"),
        // With a scale for each 20 inputs.
        ("fp8_blocks", "bf16"),
    ] {
        let Some(folder) = file(&format!("tests/fixtures/packed/{name}")) else {
            return;
        };
        let source = ModelSource::Folder(folder);
        let on = |device: &Device, dtype| {
            let options = options(device, dtype);
            logits(
                &mut *load(&source, &options).unwrap(),
                &tokens,
                &[17, 1, 5, 16, 1],
            )
        };
        let there = options(&gpu, DType::BF16);
        assert_eq!(forecast(&source, &there).0, [form], "{name}");
        let dense = forecast(&source, &options(&gpu, DType::F32)).0;
        assert_eq!(dense, ["f32"], "{name}");
        for (dtype, within) in WITHIN {
            // A router may choose another expert where activations are rounded.
            if name == "fp8_experts" && dtype != DType::F32 {
                continue;
            }
            let off = difference(&on(&Device::Cpu, dtype), &on(&gpu, dtype));
            assert!(off < within, "{name}, {dtype:?}: off by {off}");
        }
    }
}

/// Products of many rows round weights to f16, which ends at 65504.
#[test]
fn a_weight_that_f16_cannot_hold_is_refused_by_name() {
    let gpu = gpu();
    let Some(from) = file("tests/fixtures/packed/float8_tensor") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    let stored = from.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(stored, &Device::Cpu).unwrap();
    let scale = "model.layers.1.mlp.up_proj.weight_scale";
    let larger = (tensors[scale].to_dtype(DType::F32).unwrap() * 1e6).unwrap();
    tensors.insert(scale.into(), larger);
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let source = ModelSource::Folder(folder.path().to_owned());
    assert!(load(&source, &options(&gpu, DType::BF16)).is_ok());
    let error = load(&source, &options(&gpu, DType::F16)).err().unwrap();
    let want = "tensor model.layers.1.mlp.up_proj.weight contains NaN or infinity as f16";
    assert_eq!(error.to_string(), want);
}

/// A block of 16 outputs and 64 inputs takes 1024 bytes and 64 of scales; `check` says so.
#[test]
fn the_bytes_of_float8_are_forecast() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let dense = shape(folder.path(), "llama", 64, &[]);
    let of = |source| {
        let options = LoadOptions {
            format: LoadFormat::Dummy,
            ..options(&gpu, DType::BF16)
        };
        forecast(source, &options)
    };
    let ((before, dense_bytes), (after, bytes)) = (of(&dense), of(&in_float8(&dense)));
    assert_eq!(
        (before, after),
        (vec!["bf16".into()], vec!["f8e4m3".into()])
    );
    // q, k, v and o, gate, up and down of two layers.
    let elements = 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 384 * 256);
    assert_eq!(dense_bytes - bytes, 2 * elements - elements * 17 / 16);
}

/// Also of prompts in chunks, with batch invariance.
#[test]
fn models_in_float8_compute_what_the_cpu_does_and_texts_do_not_depend_on_drafts() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = in_float8(&shape(folder.path(), "llama", 64, &[]));
    let prompt = tokens(60);
    for (dtype, within) in &WITHIN[1..] {
        let on = |device| model_by(&source, &options(device, *dtype)).unwrap();
        let here = logits(&mut *on(&Device::Cpu), &prompt, &[60]);
        let mut target = on(&gpu);
        let there = logits(&mut *target, &prompt, &[60]);
        let off = difference(&here, &there);
        assert!(off < *within, "{dtype:?}: off by {off}");
        let (rows, name) = ([2, 5, 8, 20, 40], format!("{dtype:?}"));
        verified_as_plain(&mut *target, &prompt, 20, &rows, &name);
    }
    let mut model = batch_invariant(&source, &gpu, 2);
    let whole = logits(&mut *model, &prompt, &[60]);
    let parts = logits(&mut *model, &prompt, &[17, 1, 8, 34]);
    assert!(parts == whole);

    let one = |seed, source: &ModelSource| {
        let options = LoadOptions {
            seed,
            ..options(&gpu, DType::BF16)
        };
        model_by(source, &options).unwrap()
    };
    let want = run(&start(one(2, &source), None, 0), greedy(&prompt, 40));
    let blocks = || {
        let quantize = Some(BlockType::Q4_0);
        loaded(
            &source,
            LoadOptions {
                quantize,
                ..options(&gpu, DType::BF16)
            },
        )
    };
    // A draft that is right, one that is often right and one that hardly ever is.
    for (draft, is_like) in [
        (one(2, &source), true),
        (blocks(), true),
        (one(3, &source), false),
    ] {
        let drafted = start(one(2, &source), Some(draft), 5);
        let got = run(&drafted, greedy(&prompt, 40));
        assert_eq!(got.ids(), want.ids());
        assert!(!is_like || got.spec.accepted > 0);
    }
}

/// With graphs, kernel by kernel.
#[test]
fn models_with_experts_in_float8_verify_with_the_bits_of_plain_decoding() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = of_experts(folder.path());
    let tokens = tokens(60);
    let load = |source: &ModelSource| loaded(source, options(&gpu, DType::BF16));
    let before = Log::of_this_thread().len();
    let mut model = load(&source);
    verified_as_plain(&mut *model, &tokens, 30, &[2, 5, 15, 30], "experts");
    let log = Log::of_this_thread().split_off(before).join("\n");
    assert!(log.matches("is recorded").count() >= 3, "{log}");
    assert!(!log.contains("not recorded"), "{log}");

    let prompt = &tokens[..20];
    let want = run(&start(load(&source), None, 0), greedy(prompt, 20));
    let drafted = start(load(&source), Some(load(&source)), 4);
    let got = run(&drafted, greedy(prompt, 20));
    assert_eq!(got.ids(), want.ids());
    assert!(got.spec.accepted > 0);
}

/// A model of Qwen3's class with experts.
fn of_experts(folder: &Path) -> ModelSource {
    let ModelSource::Folder(like) = shape(folder, "qwen3", 64, &[]) else {
        panic!("no folder");
    };
    let text = std::fs::read_to_string(like.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().remove("model_type");
    let own = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": true, "moe_intermediate_size": 128, "hidden_act": "silu",
        "quantization_config": packed()
    });
    configured(&folder.join("experts"), config, members(&own))
}
