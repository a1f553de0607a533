//! Forwards of models in one launch, quantized and not: the logits are those of single kernels, bit for bit.

use super::float8::in_float8;
use super::{BLOCK_SIZE, BLOCKS, Log, gpu, logits, model_by, shape, tokens};
use candle_core::{DType, Device};
use foretoken::kernels::quant::BlockType;
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{Batch, LoadOptions, LoadedModel, ModelSource};

fn load(
    source: &ModelSource,
    gpu: &Device,
    kind: Option<BlockType>,
    is_eager: bool,
) -> Box<dyn LoadedModel> {
    let options = LoadOptions {
        dtype: Some(match kind {
            Some(BlockType::Q8_0) => DType::F16,
            _ => DType::BF16,
        }),
        device: gpu.clone(),
        seed: 3,
        enforce_eager: is_eager,
        one_launch: true,
        quantize: kind,
        ..LoadOptions::default()
    };
    model_by(source, &options).unwrap()
}

/// Runs `work` with the model that launches every kernel, and with the one that does not; returns what both give, and
/// the log of the second.
fn both<T>(
    source: &ModelSource,
    kind: Option<BlockType>,
    work: impl Fn(&mut dyn LoadedModel) -> T,
) -> (T, T, String) {
    let gpu = gpu();
    let want = work(&mut *load(source, &gpu, kind, true));
    let before = Log::of_this_thread().len();
    let got = work(&mut *load(source, &gpu, kind, false));
    (
        want,
        got,
        Log::of_this_thread().split_off(before).join("\n"),
    )
}

/// Steps of several sizes, across boundaries of chunks, of models with biases of q, k and v, and with norms of heads;
/// rows of the MLP's down projection are not whole blocks of 256, so they are in `Q8_0`. The last model is in FP8.
#[test]
fn steps_have_the_bits_of_single_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(180);
    let cuts = [
        vec![56],
        vec![1; 12],
        vec![5; 6],
        vec![16; 4],
        vec![8; 2],
        vec![1, 1],
    ]
    .concat();
    for (source, kind) in [
        (shape(folder.path(), "llama", 64, &[]), Some(BlockType::Q4K)),
        (
            shape(folder.path(), "llama", 64, &[]),
            Some(BlockType::Q8_0),
        ),
        (shape(folder.path(), "llama", 64, &[]), None),
        (
            shape(folder.path(), "qwen2", 64, &[("draft_vocab_size", 200)]),
            Some(BlockType::Q6K),
        ),
        (
            shape(folder.path(), "qwen3", 128, &[]),
            Some(BlockType::Q4_0),
        ),
        (shape(folder.path(), "qwen3", 128, &[]), None),
        (in_float8(&shape(folder.path(), "llama", 64, &[])), None),
    ] {
        let (want, got, log) = both(&source, kind, |model| logits(model, &tokens, &cuts));
        assert!(log.contains("are in one launch"), "{source:?}: {log}");
        // Graphs of 1, 5 and 16 rows.
        assert!(
            log.matches("in_one: true").count() >= 3,
            "{source:?}: {log}"
        );
        assert!(!log.contains("not"), "{source:?}: {log}");
        assert!(got == want, "{source:?} in {kind:?}");
    }
}

/// Several sequences in a step, one of them with a tree after a chain.
#[test]
fn batches_with_trees_have_the_bits_of_single_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let all = tokens(100);
    let work = |model: &mut dyn LoadedModel| {
        let mut kv = model.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
        let mut blocks = BlockAllocator::new(BLOCKS, BLOCK_SIZE);
        let mut tables = [BlockTable::default(), BlockTable::default()];
        let mut out = Vec::new();
        // Prompts, then the same step thrice: launched, recorded and replayed.
        for step in 0..4 {
            let mut batch = Batch::default();
            for (i, table) in tables.iter_mut().enumerate() {
                let (context, rows) = match step {
                    0 => (0, 60 + i),
                    _ => (60 + i + 3 * (step - 1), 9 - 4 * i),
                };
                blocks.reserve(table, context + rows).unwrap();
                let parents: &[_] = match (step, i) {
                    (0, _) | (_, 1) => &[],
                    _ => &[None, None, Some(0), Some(0), Some(1), Some(2)],
                };
                let tokens = &all[context..context + rows];
                batch.push_span(tokens, parents, context, table, BLOCK_SIZE);
            }
            let rows = batch.tokens.len() as u32;
            batch.logits = (0..rows).filter(|row| row % 3 != 1).collect();
            let output = model.forward(&batch, &mut kv).unwrap();
            out.extend(output.read(<[f32]>::to_vec).unwrap());
        }
        out
    };
    let (want, got, log) = both(&source, Some(BlockType::Q4K), work);
    assert!(log.contains("in_one: true"), "{log}");
    assert!(got == want);
}

/// A model of another shape keeps its kernels, and the log says why.
#[test]
fn other_models_are_launched_kernel_by_kernel() {
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "olmo2", 64, &[]);
    let tokens = tokens(30);
    let cuts = [20, 1, 1, 1, 1, 1];
    let (want, got, log) = both(&source, Some(BlockType::Q8_0), |model| {
        logits(model, &tokens, &cuts)
    });
    assert!(
        log.contains("in_one: false") && !log.contains("are in one launch"),
        "{log}"
    );
    assert!(
        log.contains("not in one launch: layers have other parts"),
        "{log}"
    );
    assert!(got == want);
}
