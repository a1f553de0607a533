//! On a GPU: logits are those of the CPU, a row has the same bits alone and in a batch, and texts are the
//! same with and without speculation. `scripts/emulated-gpu.sh` runs the tests on an emulated GPU.

mod architectures;
mod block_drafts;
#[path = "../common/mod.rs"]
mod common;
mod disturbed;
mod draft_rounds;
mod draft_steps;
mod embeddings;
mod exits;
mod expert_models;
mod experts;
mod float8;
mod gated;
mod head_steps;
mod heads;
mod host_experts;
mod kv_cache_dtype;
mod kv_cache_fp8;
mod latent;
mod launches;
mod logits;
mod lora;
mod lora_http;
mod one_launch;
mod prefix_disk;
mod quantized;
mod recurrent;
mod rope_attention;
mod several_gpus;
mod texts;
mod training;

use candle_core::{DType, Device, Tensor};
use common::project::file;
use foretoken::error::Error;
use foretoken::kernels::{self, AttentionBatch, AttentionParams, Span, paged_attention};
use foretoken::model::{LoadFormat, LoadOptions, LoadedModel, Model, ModelSource, load};
use logits::{difference, logits, rounds, tokens, verified_as_plain};
use serde_json::Value;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const BLOCK_SIZE: usize = 16;
const BLOCKS: usize = 64;

/// The GPU; a real one is for one test at a time. A program has a single thread that uses a GPU; when several
/// of them recorded graphs, cuBLAS's own allocations conflicted with the recording.
struct Gpu {
    device: Device,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

fn gpu() -> Gpu {
    static ALONE: Mutex<()> = Mutex::new(());
    let is_emulated = std::env::var_os("FORETOKEN_EMULATED_GPU").is_some();
    // A test that failed does not fail the others.
    let alone = (!is_emulated).then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner));
    Gpu {
        device: kernels::device("cuda").expect("a GPU, or scripts/emulated-gpu.sh"),
        _alone: alone,
    }
}

/// The shape of a small model with heads that the kernels support; `more` is added to its config.
fn shape(folder: &Path, kind: &str, head_dim: usize, more: &[(&str, usize)]) -> ModelSource {
    let config = serde_json::json!({
        "model_type": kind, "vocab_size": 512, "hidden_size": 4 * head_dim,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": head_dim, "intermediate_size": 384, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16"
    });
    let more = more.iter().map(|&(key, value)| (key, value.into()));
    configured(&folder.join(format!("{kind}-{head_dim}")), config, more)
}

/// A folder with this config, in which `more` is set.
fn configured<'k>(
    folder: &Path,
    mut config: Value,
    more: impl IntoIterator<Item = (&'k str, Value)>,
) -> ModelSource {
    for (key, value) in more {
        config[key] = value;
    }
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    ModelSource::Folder(folder.to_owned())
}

/// The members of an object, for [`configured`].
fn members(object: &Value) -> impl Iterator<Item = (&str, Value)> {
    let members = object.as_object().unwrap().iter();
    members.map(|(key, value)| (key.as_str(), value.clone()))
}

fn model(
    source: &ModelSource,
    device: &Device,
    dtype: Option<DType>,
    seed: u64,
) -> Box<dyn LoadedModel> {
    let options = LoadOptions {
        dtype,
        device: device.clone(),
        seed,
        ..LoadOptions::default()
    };
    loaded(source, options)
}

fn loaded(source: &ModelSource, options: LoadOptions) -> Box<dyn LoadedModel> {
    model_by(source, &options).unwrap()
}

fn model_by(source: &ModelSource, options: &LoadOptions) -> Result<Box<dyn LoadedModel>, Error> {
    let format = match source {
        ModelSource::Folder(_) => LoadFormat::Dummy,
        ModelSource::Gguf(_) => LoadFormat::Auto,
    };
    let options = LoadOptions {
        format,
        ..options.clone()
    };
    load(source, &options)
}

const WITHIN: [(DType, f32); 3] = [(DType::F32, 1e-4), (DType::F16, 1e-2), (DType::BF16, 5e-2)];

#[test]
fn logits_are_those_of_the_cpu() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    // Qwen2 has biases, Qwen3 has head norms.
    let shapes = [
        shape(folder.path(), "llama", 64, &[]),
        shape(folder.path(), "qwen2", 64, &[("draft_vocab_size", 200)]),
        shape(folder.path(), "qwen3", 128, &[]),
        shape(folder.path(), "qwen3", 80, &[]),
        shape(folder.path(), "llama", 256, &[]),
    ];
    let tokens = tokens(200);
    let cuts = [150, 40, 1, 6, 1, 2];
    for source in &shapes {
        for (dtype, within) in WITHIN {
            let mut here = model(source, &Device::Cpu, Some(dtype), 1);
            let mut there = model(source, &gpu, Some(dtype), 1);
            let off = difference(
                &logits(&mut *here, &tokens, &cuts),
                &logits(&mut *there, &tokens, &cuts),
            );
            println!("{source:?}, {dtype:?}: off by {off:.1e}");
            assert!(off < within, "{source:?}, {dtype:?}: off by {off}");
        }
    }
}

/// Attention of sequences of various lengths in a batch, one of them with a tree; of prompts only; and of whole texts whose
/// rows see later ones.
#[test]
fn attention_is_that_of_the_cpu() {
    let gpu = gpu();
    let table: Vec<u32> = (0..BLOCKS as u32).map(|i| i * 29 % BLOCKS as u32).collect();
    // The parent of node i is node (i - 1) / 2; a node sees itself and its ancestors.
    let mut tree = vec![1u64];
    for node in 1..7 {
        tree.push(tree[(node - 1) / 2] | 1 << node);
    }
    type Part<'a> = (usize, usize, Option<&'a [u64]>);
    let short: &[Part] = &[(1, 37, None), (40, 3, None), (7, 20, Some(&tree))];
    let long: &[Part] = &[
        (1, 200, None),
        (6, 60, None),
        (30, 90, None),
        (7, 64, Some(&tree)),
    ];
    let prompts: &[Part] = &[(17, 0, None), (70, 20, None)];
    let texts: &[Part] = &[(1, 0, None), (130, 0, None), (33, 0, None), (64, 0, None)];
    let causal = AttentionParams::scaled(0.1);
    let of_causal = [
        (short, 6, 64),
        (long, 6, 128),
        (long, 2, 64),
        (prompts, 6, 64),
        (short, 6, 80),
        (prompts, 4, 96),
        (long, 2, 112),
        (prompts, 6, 192),
        (short, 6, 256),
        (prompts, 2, 256),
        (long, 4, 512),
        (prompts, 4, 512),
    ]
    .map(|(parts, heads, d)| (parts, heads, d, causal));
    let whole = AttentionParams {
        bidirectional: true,
        ..causal
    };
    let near = AttentionParams {
        window: Some(9),
        ..whole
    };
    let of_whole = [
        (texts, 6, 64, whole),
        (texts, 2, 128, near),
        (texts, 6, 256, near),
        (short, 6, 80, whole),
    ];
    for (parts, heads, d, params) in of_causal.into_iter().chain(of_whole) {
        let (mut spans, mut rows, mut used) = (Vec::new(), 0, 0);
        for &(count, context, tree) in parts {
            let blocks = (count + context).div_ceil(BLOCK_SIZE);
            spans.push(Span {
                rows: rows..rows + count,
                context,
                blocks: table[used..used + blocks].to_vec(),
                tree: tree.map(<[u64]>::to_vec),
            });
            rows += count;
            used += blocks;
        }
        let noise = |dims| Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap();
        let q = noise((rows, heads, d));
        let pool = (BLOCKS * BLOCK_SIZE, 2, d);
        let (k, v) = (noise(pool), noise(pool));
        for (dtype, within) in WITHIN {
            let attend = |device: &Device| {
                let put = |t: &Tensor| t.to_dtype(dtype).unwrap().to_device(device).unwrap();
                let batch = AttentionBatch::new(&spans, BLOCK_SIZE, BLOCKS * BLOCK_SIZE).unwrap();
                let [q, k, v] = [&q, &k, &v].map(put);
                let out = paged_attention(&q, &k, &v, &batch, params).unwrap();
                let out = out.to_dtype(DType::F32).unwrap().flatten_from(1).unwrap();
                out.to_vec2::<f32>().unwrap()
            };
            let off = difference(&attend(&Device::Cpu), &attend(&gpu));
            assert!(
                off < within,
                "{heads} heads of {d}, {params:?}, {dtype:?}: off by {off}"
            );
        }
    }
}

/// Verification has the same bits as plain decoding, for any number of rows up to that of a long span.
#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(290);
    for dtype in [DType::F16, DType::BF16] {
        let source = shape(folder.path(), "llama", 64, &[]);
        let mut model = model(&source, &gpu, Some(dtype), 2);
        let rows = [2, 4, 5, 8, 10, 20, 40];
        verified_as_plain(&mut *model, &tokens, 250, &rows, &format!("{dtype:?}"));
    }
}

/// Steps of up to 256 rows, each kind of them launched, recorded and replayed. What a graph computes besides, to fill
/// up its rows, changes nothing.
#[test]
fn many_sequences_have_the_bits_of_each_alone() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let mut model = model(&source, &gpu, Some(DType::BF16), 2);
    let cases = [(20, 1), (19, 2), (40, 3), (70, 2), (51, 5)];
    for (sequences, most) in cases {
        // The number of rows stays in the same graph.
        let round = |round: usize| -> Vec<usize> {
            let rows = |i: usize| if i == round { 1 } else { most };
            (0..sequences).map(rows).collect()
        };
        let rounds_of = |model: &mut dyn Model, together| {
            let rows: Vec<Vec<usize>> = (0..4).map(round).collect();
            rounds(model, &rows, together)
        };
        let before = Log::of_this_thread().len();
        let together = rounds_of(&mut *model, true);
        let log = Log::of_this_thread().split_off(before).join("\n");
        assert!(log.matches("is recorded").count() == 1, "{log}");
        assert!(
            rounds_of(&mut *model, false) == together,
            "{sequences} sequences, {most} rows"
        );
    }
}

/// Steps across a boundary of chunks and of blocks, with several tiles.
#[test]
fn replayed_steps_have_the_bits_of_launched_ones() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let tokens = tokens(300);
    let cuts = [
        vec![100],
        vec![1; 30],
        vec![5; 10],
        vec![2, 16, 1, 5, 16, 16, 17, 24, 20],
    ]
    .concat();
    for dtype in [DType::F32, DType::BF16] {
        let logits_by = |eager| {
            let options = LoadOptions {
                dtype: Some(dtype),
                device: gpu.clone(),
                seed: 6,
                enforce_eager: eager,
                ..LoadOptions::default()
            };
            let mut model = model_by(&source, &options).unwrap();
            let before = Log::of_this_thread().len();
            let logits = logits(&mut *model, &tokens, &cuts);
            (logits, Log::of_this_thread().split_off(before).join("\n"))
        };
        let ((launched, quiet), (replayed, log)) = (logits_by(true), logits_by(false));
        assert_eq!(quiet, "");
        // Graphs of 1, 5 and 16 rows.
        assert!(log.matches("is recorded").count() >= 3, "{log}");
        assert!(!log.contains("not recorded"), "{log}");
        assert!(replayed == launched, "{dtype:?}");
    }
}

/// The log of all tests of this program, because a log of a single thread sometimes misses lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// The lines about graphs and launches so far, from this thread.
    fn of_this_thread() -> Vec<String> {
        static LOG: OnceLock<Log> = OnceLock::new();
        let log = LOG.get_or_init(|| {
            let log = Log::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::DEBUG)
                .with_thread_ids(true)
                .with_writer(move || writer.clone())
                .init();
            log
        });
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        // In tracing's format.
        let thread = format!("{:0>2?}", std::thread::current().id());
        let ours = |line: &&str| {
            line.contains(&thread)
                && ["CUDA graph", "one launch"]
                    .iter()
                    .any(|part| line.contains(part))
        };
        text.lines().filter(ours).map(str::to_owned).collect()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn batch_invariant(source: &ModelSource, gpu: &Device, seed: u64) -> Box<dyn LoadedModel> {
    let options = LoadOptions {
        dtype: Some(DType::BF16),
        device: gpu.clone(),
        seed,
        batch_invariant: true,
        ..LoadOptions::default()
    };
    model_by(source, &options).unwrap()
}

/// With `--batch-invariant`, a prompt's rows have the same bits for any division into chunks, of more rows
/// than one product takes and of fewer.
#[test]
fn a_batch_invariant_row_does_not_depend_on_prompt_chunks() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(130);
    // Qwen2 has biases, Qwen3 has head norms.
    for source in [
        shape(folder.path(), "llama", 64, &[]),
        shape(folder.path(), "qwen2", 64, &[("draft_vocab_size", 200)]),
        shape(folder.path(), "qwen3", 128, &[]),
    ] {
        let mut model = batch_invariant(&source, &gpu, 2);
        let whole = logits(&mut *model, &tokens, &[130]);
        for cuts in [
            vec![40, 17, 16, 15, 33, 9],
            [vec![64], vec![1; 20], vec![6; 7], vec![4]].concat(),
        ] {
            let parts = logits(&mut *model, &tokens, &cuts);
            assert!(parts == whole, "{source:?} by {cuts:?}");
        }
    }
}

/// Quantized weights, prompts included.
#[test]
fn batch_invariant_quantized_weights_give_a_row_the_same_bits_in_any_batch() {
    let Some(file) = file("models/default/foretoken-demo-draft.Q8_0.gguf") else {
        return;
    };
    let gpu = gpu();
    let source = ModelSource::Gguf(file.into());
    let mut model = batch_invariant(&source, &gpu, 0);
    let tokens = tokens(60);
    let whole = logits(&mut *model, &tokens, &[60]);
    let mut cpu = self::model(&source, &Device::Cpu, None, 0);
    let off = difference(&logits(&mut *cpu, &tokens, &[60]), &whole);
    assert!(off < 0.1, "off by {off}");
    let parts = logits(&mut *model, &tokens, &[17, 1, 8, 34]);
    assert!(parts == whole);
}

#[test]
fn batch_invariance_is_refused_without_a_kernel_for_it() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let options = LoadOptions {
        dtype: Some(DType::F32),
        device: gpu.clone(),
        batch_invariant: true,
        ..LoadOptions::default()
    };
    let error = model_by(&source, &options).err().unwrap().to_string();
    assert!(error.contains("--batch-invariant"), "{error}");
    assert!(error.contains("bf16 or f16"), "{error}");
}
