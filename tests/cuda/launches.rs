//! How many kernels a layer of a recorded step launches.

use super::quantized::{noise, values, weight};
use super::{Log, gpu, logits, model_by, shape, tokens};
use candle_core::{DType, Device, Error, Tensor};
use foretoken::kernels::graph::Recorder;
use foretoken::kernels::quant::{BlockType, matmul_quantized};
use foretoken::kernels::{add_layer_norm, add_norm, layer_norm, pick_rows, rms_norm, spread};
use foretoken::kv::KvCacheDtype;
use foretoken::model::{LoadOptions, ModelSource};
use std::path::Path;

/// Nodes of the graph of a step of `rows` rows.
fn nodes_of_a_step(
    gpu: &Device,
    source: &ModelSource,
    (quantize, kv_cache_dtype): (Option<BlockType>, KvCacheDtype),
    rows: usize,
) -> usize {
    let options = LoadOptions {
        dtype: Some(DType::BF16),
        device: gpu.clone(),
        quantize,
        kv_cache_dtype,
        ..LoadOptions::default()
    };
    let mut model = model_by(source, &options).unwrap();
    let before = Log::of_this_thread().len();
    // The second step of a size is recorded.
    let cuts = [20, rows, rows];
    logits(&mut *model, &tokens(20 + 2 * rows), &cuts);
    let log = Log::of_this_thread().split_off(before).join("\n");
    assert!(log.matches("is recorded").count() == 1, "{log}");
    // The line ends with the number of nodes.
    let last = log.rsplit(|c: char| !c.is_ascii_digit()).next();
    last.unwrap().parse().unwrap()
}

/// Launches of a layer of a model of class `kind` whose steps have so many `rows`: what a graph of three layers has more
/// than one of two.
fn launches_of_a_layer(
    folder: &Path,
    (kind, head_dim): (&str, usize),
    width: usize,
    forms: (Option<BlockType>, KvCacheDtype),
    rows: usize,
) -> usize {
    let gpu = gpu();
    let nodes = [2, 3].map(|layers| {
        let more = [("num_hidden_layers", layers), ("intermediate_size", width)];
        let source = shape(&folder.join(layers.to_string()), kind, head_dim, &more);
        nodes_of_a_step(&gpu, &source, forms, rows)
    });
    nodes[1] - nodes[0]
}

#[test]
fn a_layer_of_a_few_rows_has_seven_launches() {
    let folder = tempfile::tempdir().unwrap();
    let of =
        |width, forms, rows| launches_of_a_layer(folder.path(), ("llama", 64), width, forms, rows);
    for forms in [
        (None, KvCacheDtype::Auto),
        (Some(BlockType::Q4K), KvCacheDtype::Auto),
        (Some(BlockType::Q8_0), KvCacheDtype::Auto),
        (None, KvCacheDtype::Q8_0),
        (Some(BlockType::Q4K), KvCacheDtype::Fp8),
    ] {
        for rows in [1, 9] {
            let count = of(512, forms, rows);
            assert_eq!(count, 7, "{forms:?}, {rows} rows");
        }
    }
}

/// The embedding, zeros that are added to it, and are allocated, set and freed, the last norm, the product with the output layer,
/// and the widening of logits to the memory that graphs share.
#[test]
fn a_step_has_seven_nodes_beside_its_layers() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let more = [("num_hidden_layers", 2), ("intermediate_size", 512)];
    let source = shape(folder.path(), "llama", 64, &more);
    for quantize in [None, Some(BlockType::Q8_0)] {
        for rows in [1, 9] {
            let nodes = nodes_of_a_step(&gpu, &source, (quantize, KvCacheDtype::Auto), rows);
            assert_eq!(nodes - 2 * 7, 7, "{quantize:?}, {rows} rows");
        }
    }
}

/// Layers with a window may have an embedding of their own.
#[test]
fn a_position_embedding_has_no_launch() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let nodes = [10_000, 500].map(|base| {
        let more = [
            ("sliding_window", 32),
            ("sliding_window_pattern", 2),
            ("rope_local_base_freq", base),
        ];
        let folder = folder.path().join(base.to_string());
        let source = shape(&folder, "gemma3_text", 64, &more);
        nodes_of_a_step(&gpu, &source, (None, KvCacheDtype::Auto), 1)
    });
    assert_eq!(nodes[0], nodes[1], "with one embedding, and with two");
}

/// q, k and v of files in `Q4_K_M` and `Q5_K_M`, whose v is in `Q6_K` in half of the layers.
#[test]
fn products_of_weights_of_two_formats_have_one_launch() {
    let gpu = gpu();
    for kind in [BlockType::Q4K, BlockType::Q5K] {
        let parts = [(kind, 64), (kind, 32), (BlockType::Q6K, 32)];
        let parts = parts.map(|(kind, outputs)| weight(kind, (outputs, 256), &gpu).0);
        let weights: Vec<_> = parts.iter().collect();
        for rows in [1, 8, 16] {
            let x = noise(rows, 256, DType::BF16, &gpu);
            let work = || matmul_quantized(&weights, &x, false).map(drop);
            // SAFETY: it is not replayed.
            let graph = unsafe { Recorder::default().record::<Error>(&gpu, work) };
            assert_eq!(graph.unwrap().nodes().unwrap(), 1, "{kind}, {rows} rows");
        }
    }
}

/// It has the bits of a norm to which zeros are added, which somebody would have to make.
#[test]
fn a_norm_to_which_nothing_is_added_has_one_launch() {
    let gpu = gpu();
    for (width, dtype) in [
        (256, DType::BF16),
        (300, DType::F16),
        (75, DType::F32),
        (10_000, DType::F32),
    ] {
        let x = noise(3, width, dtype, &gpu);
        let [weight, bias] = [(); 2].map(|()| noise(1, width, dtype, &gpu).get(0).unwrap());
        let work = || {
            rms_norm(&x, &weight, 1e-5)?;
            layer_norm(&x, &weight, Some(&bias), 1e-5).map(drop)
        };
        // SAFETY: it is not replayed.
        let graph = unsafe { Recorder::default().record::<Error>(&gpu, work) };
        assert_eq!(graph.unwrap().nodes().unwrap(), 2, "{width} of {dtype:?}");
        let zeros = x.zeros_like().unwrap();
        let (_, rms) = add_norm(&x, &zeros, &weight, 1e-5).unwrap();
        let (_, layer) = add_layer_norm(&x, &zeros, &weight, Some(&bias), 1e-5).unwrap();
        assert_eq!(values(&rms_norm(&x, &weight, 1e-5).unwrap()), values(&rms));
        let normed = layer_norm(&x, &weight, Some(&bias), 1e-5).unwrap();
        assert_eq!(values(&normed), values(&layer));
    }
}

/// Also of rows that are not whole packs of 16 bytes.
#[test]
fn a_lookup_of_rows_has_one_launch() {
    let gpu = gpu();
    for (width, dtype) in [(256, DType::BF16), (75, DType::F16), (10, DType::F32)] {
        let all = noise(9, width, dtype, &gpu);
        let ids = Tensor::new(&[8u32, 0, 8, 3], &gpu).unwrap();
        let work = || pick_rows(&all, &ids).map(drop);
        // SAFETY: it is not replayed.
        let graph = unsafe { Recorder::default().record::<Error>(&gpu, work) };
        assert_eq!(graph.unwrap().nodes().unwrap(), 1, "{width} of {dtype:?}");
        let want = all.index_select(&ids, 0).unwrap();
        assert_eq!(values(&pick_rows(&all, &ids).unwrap()), values(&want));
    }
}

/// In which each id has a thread.
#[test]
fn logits_of_some_ids_are_spread_in_one_launch() {
    const VOCAB: u32 = 700;
    let gpu = gpu();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let x = noise(3, 5, dtype, &gpu);
        let places: Vec<u32> = (0..VOCAB).map(|id| (id * 7 % 11).min(5)).collect();
        let there = Tensor::new(places.as_slice(), &gpu).unwrap();
        let to = Tensor::zeros((4, VOCAB as usize), DType::F32, &gpu).unwrap();
        let work = || spread(&x, &there, Some(&to)).map(drop);
        // SAFETY: it is not replayed.
        let graph = unsafe { Recorder::default().record::<Error>(&gpu, work) };
        assert_eq!(graph.unwrap().nodes().unwrap(), 1, "{dtype:?}");
        let here = Tensor::new(places.as_slice(), &Device::Cpu).unwrap();
        let want = spread(&x.to_device(&Device::Cpu).unwrap(), &here, None);
        let want = values(&want.unwrap());
        assert_eq!(values(&spread(&x, &there, None).unwrap()), want);
        assert_eq!(values(&to)[..3], want);
    }
}
