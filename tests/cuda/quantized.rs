//! Quantized weights on a GPU: products by our own kernels, and texts.

use super::texts::start;
use super::{WITHIN, difference, gpu, logits, model_by, shape, tokens, verified_as_plain};
use crate::common::project::file;
use crate::common::{greedy, run, tiny, tiny_gguf};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::EXACT_ROWS;
use foretoken::kernels::quant::{BlockType, DeviceQuantMatrix, QuantMatrix, matmul_quantized};
use foretoken::model::{LoadOptions, Model, ModelSource, inspect, load};
use std::path::Path;

/// The types for which there are kernels.
pub(super) fn kinds() -> impl Iterator<Item = BlockType> {
    BlockType::all().filter(|kind| DeviceQuantMatrix::keeps(*kind, DType::F16))
}

/// Outputs that are no whole strip, inputs that are no whole unit, and as many as all warps have work for.
pub(super) fn shapes(kind: BlockType) -> &'static [(usize, usize)] {
    match kind.block_size() {
        32 => &[(48, 64), (37, 288), (16, 1024), (3, 32)],
        _ => &[(48, 256), (37, 768), (16, 2048)],
    }
}

/// The blocks of `floats` in a type, or random ones where candle cannot write the type.
pub(super) fn blocks(kind: BlockType, floats: &Tensor) -> Vec<u8> {
    match kind.candles() {
        Some(candles) => {
            let blocks = QTensor::quantize(floats, candles).unwrap();
            blocks.data().unwrap().into_owned()
        }
        None => tiny_gguf::blocks_of(kind, floats.elem_count() / kind.block_size()),
    }
}

/// A random weight on the GPU, and its values.
pub(super) fn weight(
    kind: BlockType,
    (outputs, inputs): (usize, usize),
    gpu: &Device,
) -> (DeviceQuantMatrix, Tensor) {
    let floats = Tensor::randn(0.2f32, 1., (outputs, inputs), &Device::Cpu).unwrap();
    of_blocks(kind, &blocks(kind, &floats), (outputs, inputs), gpu)
}

/// The weight of these blocks on the GPU, and its values.
fn of_blocks(
    kind: BlockType,
    data: &[u8],
    (outputs, inputs): (usize, usize),
    gpu: &Device,
) -> (DeviceQuantMatrix, Tensor) {
    let tiles = QuantMatrix::from_blocks(kind, data, outputs, inputs).unwrap();
    let values = Tensor::from_vec(tiles.dequantize(), (outputs, inputs), &Device::Cpu).unwrap();
    let weight = DeviceQuantMatrix::from_blocks(kind, data, (outputs, inputs), gpu).unwrap();
    (weight, values)
}

pub(super) fn noise(rows: usize, inputs: usize, dtype: DType, gpu: &Device) -> Tensor {
    let x = Tensor::randn(0f32, 1., (rows, inputs), &Device::Cpu).unwrap();
    x.to_dtype(dtype).unwrap().to_device(gpu).unwrap()
}

pub(super) fn values(tensor: &Tensor) -> Vec<Vec<f32>> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

/// The largest difference of `y` from `x @ weight^T`, relative to the size of a product's terms.
pub(super) fn error(y: &Tensor, x: &Tensor, weight: &Tensor) -> f64 {
    let f64s = |t: &Tensor| {
        let t = t.to_device(&Device::Cpu).unwrap();
        t.to_dtype(DType::F64).unwrap()
    };
    let (x, weight) = (f64s(x), f64s(weight));
    let want = x.matmul(&weight.t().unwrap()).unwrap();
    let size = x.sqr().unwrap().matmul(&weight.sqr().unwrap().t().unwrap());
    let size = size.unwrap().sqrt().unwrap();
    let off = (f64s(y) - want).unwrap().abs().unwrap();
    let off = off.broadcast_div(&(size + 1e-9).unwrap()).unwrap();
    off.max_all().unwrap().to_scalar().unwrap()
}

/// Half a unit in the last place of a result, which is a few times larger than a term.
pub(super) fn precision(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 3e-3,
        _ => 2e-2,
    }
}

#[test]
fn weights_are_kept_without_loss() {
    let gpu = gpu();
    for kind in kinds() {
        for &shape in shapes(kind) {
            let (weight, want) = weight(kind, shape, &gpu);
            let got = weight.dequantize(DType::F32).unwrap();
            assert_eq!(values(&got), values(&want), "{kind} {shape:?}");
            let ids = [0, shape.0 as u32 - 1, 1, 1, shape.0 as u32 / 2];
            let want = want.index_select(&Tensor::new(&ids, &Device::Cpu).unwrap(), 0);
            let (want, ids) = (want.unwrap(), Tensor::new(&ids, &gpu).unwrap());
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let rows = weight.rows(&ids, dtype).unwrap();
                let want = want.to_dtype(dtype).unwrap();
                assert_eq!(rows.dtype(), dtype);
                assert_eq!(values(&rows), values(&want), "{kind} {shape:?} {dtype:?}");
            }
        }
    }
}

/// A grid has fewer blocks in its other dimensions.
#[test]
fn a_lookup_takes_more_rows_than_65535() {
    let gpu = gpu();
    let (weight, want) = weight(BlockType::Q8_0, (3, 32), &gpu);
    let ids: Vec<u32> = (0..1 << 16).map(|row| row % 3).collect();
    let rows = weight.rows(&Tensor::new(ids.as_slice(), &gpu).unwrap(), DType::F32);
    let (rows, want) = (values(&rows.unwrap()), values(&want));
    assert!(
        rows.iter()
            .zip(&ids)
            .all(|(row, &id)| *row == want[id as usize])
    );
    assert_eq!(rows.len(), ids.len());
}

/// Each value with each scale with which all of them are finite.
#[test]
fn all_powers_of_two_are_scales() {
    const LARGEST: u8 = 252;
    let gpu = gpu();
    let kind = BlockType::Mxfp4;
    let numbers: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    let blocks = (0..=LARGEST).flat_map(|exponent| [&[exponent][..], &numbers[..]].concat());
    let blocks: Vec<u8> = blocks.collect();
    let (weight, want) = of_blocks(kind, &blocks, (usize::from(LARGEST) + 1, 32), &gpu);
    let got = values(&weight.dequantize(DType::F32).unwrap());
    assert_eq!(got, values(&want));
    assert_eq!(got[0][7], 6. * 2f32.powi(-127));
}

/// A row of a product has the same bits alone and in any batch of up to 256 rows, and of more with
/// `batch_invariant`; all are right.
#[test]
fn a_row_has_the_same_bits_in_any_number_of_rows() {
    let gpu = gpu();
    for kind in kinds() {
        for (i, &shape) in shapes(kind).iter().enumerate() {
            let (weight, dense) = weight(kind, shape, &gpu);
            for dtype in [DType::F16, DType::BF16] {
                let all = noise(64, shape.1, dtype, &gpu);
                let product = |x: &Tensor, invariant| {
                    matmul_quantized(&[&weight], &x.contiguous().unwrap(), invariant).unwrap()
                };
                let whole = product(&all, false);
                let off = error(&whole, &all, &dense);
                assert!(off < precision(dtype), "{kind} {shape:?} {dtype:?}: {off}");
                let whole = values(&whole);
                // The first shape in all numbers of rows that differ in their kernels or tiles.
                let parts: &[(usize, usize)] = match i {
                    0 => &[
                        (0, 1),
                        (7, 1),
                        (50, 1),
                        (3, 8),
                        (8, 9),
                        (5, 16),
                        (40, 17),
                        (9, 40),
                    ],
                    _ => &[(1, 1), (30, 11), (20, 30)],
                };
                for &(first, rows) in parts {
                    let part = product(&all.narrow(0, first, rows).unwrap(), false);
                    let same = values(&part) == whole[first..first + rows];
                    assert!(same, "{kind} {shape:?} {dtype:?}: {rows} rows from {first}");
                }
                if i > 0 {
                    continue;
                }
                // More rows than share a pass, and more than have the promise.
                let after = |before| {
                    let before = noise(before, shape.1, dtype, &gpu);
                    Tensor::cat(&[&before, &all], 0).unwrap()
                };
                let more = values(&product(&after(9), false));
                assert!(more[9..] == whole, "{kind} {dtype:?}: 73 rows");
                let many = after(EXACT_ROWS);
                let invariant = values(&product(&many, true));
                assert!(
                    invariant[EXACT_ROWS..] == whole,
                    "{kind} {dtype:?}: 320 rows"
                );
                let off = error(&product(&many, false), &many, &dense);
                assert!(off < precision(dtype), "{kind} {dtype:?} dense: {off}");
            }
        }
    }
}

/// Of a weight with so many outputs that fewer warps share its inputs.
#[test]
fn rows_of_a_large_weight_have_the_same_bits_in_any_number() {
    let gpu = gpu();
    for kind in [
        BlockType::Q2K,
        BlockType::Q4K,
        BlockType::Q6K,
        BlockType::Q8_0,
    ] {
        let (weight, dense) = weight(kind, (4230, 512), &gpu);
        let all = noise(70, 512, DType::BF16, &gpu);
        let product = |x: &Tensor| {
            let x = x.contiguous().unwrap();
            matmul_quantized(&[&weight], &x, false).unwrap()
        };
        let whole = product(&all);
        let off = error(&whole, &all, &dense);
        assert!(off < precision(DType::BF16), "{kind}: {off}");
        let whole = values(&whole);
        for (first, rows) in [(3, 1), (60, 10), (1, 20)] {
            let part = values(&product(&all.narrow(0, first, rows).unwrap()));
            assert!(part == whole[first..first + rows], "{kind}: {rows} rows");
        }
    }
}

/// Weights of different formats, as those of q, k and v in `Q4_K_M` files.
#[test]
fn outputs_of_several_weights_are_side_by_side() {
    let gpu = gpu();
    let parts = [
        // Weights of one format share a launch, up to three.
        weight(BlockType::Q4K, (40, 256), &gpu),
        weight(BlockType::Q4K, (70, 256), &gpu),
        weight(BlockType::Q4K, (5, 256), &gpu),
        weight(BlockType::Q4K, (33, 256), &gpu),
        // So do some of two formats.
        weight(BlockType::Q6K, (16, 256), &gpu),
        weight(BlockType::Q8_0, (7, 256), &gpu),
        weight(BlockType::Q5K, (30, 256), &gpu),
        weight(BlockType::Q6K, (48, 256), &gpu),
        weight(BlockType::Q6K, (20, 256), &gpu),
    ];
    let weights: Vec<_> = parts.iter().map(|(weight, _)| weight).collect();
    for rows in [3, 12, 70, 300] {
        let x = noise(rows, 256, DType::BF16, &gpu);
        let joined = values(&matmul_quantized(&weights, &x, false).unwrap());
        let mut first = 0;
        for weight in &weights {
            let alone = values(&matmul_quantized(&[weight], &x, false).unwrap());
            let outputs = first..first + weight.shape().0;
            first = outputs.end;
            for (joined, alone) in joined.iter().zip(&alone) {
                assert_eq!(joined[outputs.clone()], alone[..], "{rows} rows");
            }
        }
        assert_eq!(joined[0].len(), first);
    }
    let wrong = noise(2, 128, DType::BF16, &gpu);
    assert!(matmul_quantized(&weights, &wrong, false).is_err());
}

fn quantized(source: &ModelSource, device: &Device, kind: Option<BlockType>) -> Box<dyn Model> {
    let options = LoadOptions {
        dtype: device.is_cuda().then_some(DType::BF16),
        device: device.clone(),
        quantize: kind,
        ..LoadOptions::default()
    };
    model_by(source, &options).unwrap()
}

/// A checkpoint that is quantized while it is loaded. Rows of its MLP are not whole blocks of 256, so they
/// become `Q8_0`.
#[test]
fn quantized_models_compute_what_the_cpu_does_and_texts_do_not_depend_on_drafts() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let prompt = tokens(40);
    for kind in [BlockType::Q4K, BlockType::Q4_1, BlockType::Q6K] {
        let mut cpu = quantized(&source, &Device::Cpu, Some(kind));
        let here = logits(&mut *cpu, &prompt, &[40]);
        let mut target = quantized(&source, &gpu, Some(kind));
        let there = logits(&mut *target, &prompt, &[40]);
        // The CPU quantizes activations.
        let off = difference(&here, &there);
        assert!(off < 0.1, "{kind}: off by {off}");
        let cut = logits(&mut *target, &prompt, &[8, 1, 8, 5, 8, 10]);
        assert!(difference(&there, &cut) < 0.03, "{kind}");

        let plain = start(quantized(&source, &gpu, Some(kind)), None, 0);
        let want = run(&plain, greedy(&prompt, 40));
        // A draft that is often right and one that hardly ever is.
        for draft in [Some(kind), Some(BlockType::Q4_0)] {
            let draft = quantized(&source, &gpu, draft);
            let drafted = start(quantized(&source, &gpu, Some(kind)), Some(draft), 5);
            let got = run(&drafted, greedy(&prompt, 40));
            assert_eq!(got.ids(), want.ids(), "{kind}");
            assert!(got.spec.accepted > 0);
        }
    }
}

/// Files and checkpoints in formats that candle does not have, and what their matrices are in memory.
fn of_four_bits(folder: &Path) -> Vec<(ModelSource, &'static str)> {
    let kinds = [BlockType::Iq4Nl, BlockType::Iq4Xs, BlockType::Mxfp4];
    let files = kinds.map(|kind| {
        let config = tiny::llama_config(16);
        let file = folder.join(format!("{kind}.gguf"));
        let tensors = tiny::tensors(16, DType::F32);
        let factors = tiny_gguf::llama3_factors(&config);
        tiny_gguf::write_gguf(&file, &tensors, GgmlDType::Q4_0, &factors);
        tiny_gguf::with_blocks(&file, kind, &tensors);
        (ModelSource::Gguf(file.into()), kind.name())
    });
    let stored = [
        ("packed/mxfp4", "MXFP4"),
        ("packed/nvfp4", "NVFP4"),
        ("architectures/gpt_oss_mxfp4", "MXFP4"),
    ];
    let folders = stored.into_iter().filter_map(|(name, form)| {
        let folder = file(&format!("tests/fixtures/{name}"))?;
        Some((ModelSource::Folder(folder), form))
    });
    files.into_iter().chain(folders).collect()
}

/// Products of many rows round weights to the dtype of activations.
#[test]
fn a_file_with_values_that_f16_does_not_have_is_refused_by_name() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let (config, tensors) = (tiny::llama_config(16), tiny::tensors(16, DType::F32));
    let factors = tiny_gguf::llama3_factors(&config);
    tiny_gguf::write_gguf(&file, &tensors, GgmlDType::Q4_0, &factors);
    let mut bytes = std::fs::read(&file).unwrap();
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(&bytes)).unwrap();
    let (name, kind) = ("blk.0.ffn_up.weight", BlockType::Mxfp4);
    let values = content.tensor_infos[name].shape.elem_count();
    let mut blocks = tiny_gguf::blocks_of(kind, values / kind.block_size());
    // 6 times 2 to the power of 14.
    blocks[..2].copy_from_slice(&[141, 0x77]);
    tiny_gguf::put_blocks(&mut bytes, &content, name, kind, &blocks);
    std::fs::write(&file, bytes).unwrap();
    let source = ModelSource::Gguf(file.into());
    for (dtype, is_taken) in [(DType::F16, false), (DType::BF16, true)] {
        let options = LoadOptions {
            dtype: Some(dtype),
            device: gpu.clone(),
            ..LoadOptions::default()
        };
        let error = load(&source, &options).err().map(|e| e.to_string());
        let want = format!(
            "tensor {name} has values above 65504, which f16 does not have: --dtype bf16 takes them"
        );
        let is_refused = error.as_ref().is_some_and(|error| error.contains(&want));
        assert_eq!(
            (error.is_none(), is_refused),
            (is_taken, !is_taken),
            "{dtype:?}: {error:?}"
        );
    }
}

/// They stay so, and have the logits of the same values in f32, which are dense.
#[test]
fn models_in_four_bits_compute_what_dense_ones_do_and_texts_do_not_depend_on_drafts() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = tokens(30).iter().map(|id| id % 67).collect();
    for (source, form) in of_four_bits(folder.path()) {
        let on = |dtype| LoadOptions {
            dtype: Some(dtype),
            device: gpu.clone(),
            ..LoadOptions::default()
        };
        let packed = |dtype| {
            let (_, inventory) = inspect(&source, &on(dtype)).unwrap();
            let entries = inventory.entries.into_iter();
            let packed = entries.filter(|entry| entry.stored == form);
            packed.collect::<Vec<_>>()
        };
        for entry in packed(DType::BF16) {
            assert_eq!(entry.loaded, form, "{source:?}: {}", entry.name);
            // Units of 64 inputs, of which small matrices fill a half.
            let bits = 8 * entry.loaded_bytes / entry.elements;
            assert!((4..10).contains(&bits), "{}: {bits} bits", entry.name);
        }
        let dense = packed(DType::F32);
        assert!(dense.len() >= 4 && dense.iter().all(|entry| entry.loaded == "f32"));
        let exact = logits(
            &mut *load(&source, &on(DType::F32)).unwrap(),
            &tokens,
            &[30],
        );
        for (dtype, within) in &WITHIN[1..] {
            let mut model = load(&source, &on(*dtype)).unwrap();
            let found = verified_as_plain(&mut *model, &tokens, 20, &[2, 10], form);
            let off = difference(&exact, &found);
            println!("{source:?}, {dtype:?}: off by {off:.1e}");
            assert!(off < 2. * within, "{source:?}, {dtype:?}: off by {off}");
        }
        if matches!(source, ModelSource::Gguf(_)) {
            continue;
        }
        let model = || load(&source, &on(DType::BF16)).unwrap();
        let want = run(&start(model(), None, 0), greedy(&tokens, 30));
        let got = run(&start(model(), Some(model()), 4), greedy(&tokens, 30));
        assert_eq!(got.ids(), want.ids(), "{source:?}");
        assert!(got.spec.accepted > 0, "{source:?}");
    }
}

/// A GGUF file takes the memory of its blocks.
#[test]
fn a_quantized_file_stays_quantized() {
    let Some(file) = file("models/default/foretoken-demo.Q5_1.gguf") else {
        return;
    };
    let gpu = gpu();
    let source = ModelSource::Gguf(file.into());
    let options = LoadOptions {
        device: gpu.clone(),
        ..LoadOptions::default()
    };
    let (_, inventory) = inspect(&source, &options).unwrap();
    let loaded = inventory.sum(|entry| entry.loaded_bytes);
    let stored = inventory.sum(|entry| entry.stored_bytes);
    assert!(loaded <= stored + stored / 20, "{loaded} of {stored} bytes");
}
