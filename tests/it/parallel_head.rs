//! Parallel heads in the published layout (DFlash): their logits, and what is refused.

use crate::bench::{Models, TINY};
use crate::common::plain_parallel::PlainHead;
use crate::common::refusals::{change, rows};
use crate::common::rig::{argmax, distance};
use crate::common::tiny::{self, HIDDEN, MLP, Tensors, VOCAB, llama_config, noise};
use crate::common::*;
use candle_core::quantized::gguf_file::{self, Value as Gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use foretoken::engine;
use foretoken::model::LoadedModel;
use foretoken::model::{
    Batch, Head, HeadKind, LoadFormat, LoadOptions, MaskedBlock, ModelSource, load_head,
};
use foretoken::sampling::Acceptance;
use foretoken::spec::{BlockDrafter, Drafter};
use serde_json::{Value as Json, json};
use std::path::Path;
use tempfile::TempDir;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const LAYERS: usize = 2;
const EPS: f64 = 1e-6;
const THETA: f64 = 1e6;
const MASK: u32 = 66;

pub fn head_config() -> Json {
    json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu",
        "auto_map": { "AutoModel": "dflash.DFlashDraftModel" },
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
        "rope_theta": THETA, "rope_scaling": null, "max_position_embeddings": 64,
        "attention_bias": false, "tie_word_embeddings": true, "use_sliding_window": false,
        "sliding_window": null, "max_window_layers": LAYERS,
        "layer_types": ["full_attention", "full_attention"], "torch_dtype": "float32",
        "block_size": 4, "num_target_layers": 2,
        "dflash_config": { "mask_token_id": MASK, "target_layer_ids": [0, 1] }
    })
}

pub fn head_tensors(with_head_norms: bool) -> Tensors {
    let mut all = Tensors::new();
    let mut add = |name: String, dims: &[usize]| {
        let name = format!("{name}.weight");
        all.insert(name.clone(), noise(&name, dims));
    };
    add("fc".into(), &[HIDDEN, 2 * HIDDEN]);
    add("hidden_norm".into(), &[HIDDEN]);
    add("norm".into(), &[HIDDEN]);
    for i in 0..LAYERS {
        let at = |part: &str| format!("layers.{i}.{part}");
        add(at("input_layernorm"), &[HIDDEN]);
        add(at("post_attention_layernorm"), &[HIDDEN]);
        add(at("self_attn.q_proj"), &[HEADS * HEAD_DIM, HIDDEN]);
        add(at("self_attn.k_proj"), &[KV_HEADS * HEAD_DIM, HIDDEN]);
        add(at("self_attn.v_proj"), &[KV_HEADS * HEAD_DIM, HIDDEN]);
        add(at("self_attn.o_proj"), &[HIDDEN, HEADS * HEAD_DIM]);
        if with_head_norms {
            add(at("self_attn.q_norm"), &[HEAD_DIM]);
            add(at("self_attn.k_norm"), &[HEAD_DIM]);
        }
        add(at("mlp.gate_proj"), &[MLP, HIDDEN]);
        add(at("mlp.up_proj"), &[MLP, HIDDEN]);
        add(at("mlp.down_proj"), &[HIDDEN, MLP]);
    }
    all
}

pub fn write(folder: &Path, config: &Json, tensors: &Tensors) {
    tiny::write_config(folder, config);
    candle_core::safetensors::save(tensors, folder.join("model.safetensors")).unwrap();
}

/// The target: a tiny Llama, whose tied embedding the head shares.
pub fn target() -> (Box<dyn LoadedModel>, Tensors) {
    let (folder, tensors) = (tempfile::tempdir().unwrap(), tiny::tensors(16, DType::F32));
    tiny::write_config(folder.path(), &llama_config(16));
    tiny::write_shards(folder.path(), &tensors);
    (tiny::open(folder.path()).unwrap(), tensors)
}

pub fn open_head(path: &Path, target: &dyn LoadedModel) -> Result<Box<dyn Head>, String> {
    let source = ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto).unwrap();
    let options = LoadOptions::of(DType::F32);
    let kind = HeadKind::of(&source).map_err(|e| e.to_string())?.unwrap();
    assert!(kind.is_parallel(), "{}: {kind:?}", path.display());
    load_head(&source, kind, &options, target).map_err(|e| e.to_string())
}

/// A head in a folder of its own.
fn head(config: &Json, tensors: &Tensors) -> (TempDir, Result<Box<dyn Head>, String>) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), config, tensors);
    let head = open_head(folder.path(), &*target().0);
    (folder, head)
}

/// The logits of the masks after `context` states, which `cuts` forwards read: the last one with the block.
pub fn masked_logits(
    head: &mut dyn Head,
    states: &Tensor,
    last: u32,
    cuts: &[usize],
) -> Vec<Vec<f32>> {
    let mut store = head.new_kv(8, 4).unwrap();
    let mut blocks = foretoken::kv::BlockAllocator::new(8, 4);
    let mut table = foretoken::kv::BlockTable::default();
    let len = states.dim(0).unwrap();
    blocks.reserve(&mut table, len + 4).unwrap();
    let mut read = 0;
    for &end in cuts {
        let mut batch = Batch::default();
        batch.push_span(&vec![0; end - read], &[], read, &table, 4);
        let new = states.narrow(0, read, end - read).unwrap();
        batch.context_features = Some(head.fuse(&new).unwrap());
        if end == len {
            batch.push_block(&[last, MASK, MASK, MASK], len, &table, 4);
            let rows = (len - read) as u32;
            batch.logits = (rows + 1..rows + 4).collect();
        }
        read = end;
        let output = head.forward(&batch, &mut store).unwrap();
        if end == len {
            return output.logits.to_vec2().unwrap();
        }
        assert_eq!(output.logits.dims(), [0, VOCAB]);
    }
    unreachable!("the last forward has the block")
}

const PLAIN: PlainHead = PlainHead {
    layers: LAYERS,
    head_dim: HEAD_DIM,
    group: HEADS / KV_HEADS,
    eps: EPS,
    theta: THETA,
};

/// The head in plain f64: its logits with the target's embedding, which is the output layer, too, if it has
/// none.
fn plain_logits(tensors: &Tensors, states: &Tensor, block: &[u32]) -> Vec<Vec<f32>> {
    let named = tensors.iter().filter_map(|(name, tensor)| {
        let name = name.strip_suffix(".weight")?;
        Some((name.to_owned(), plain::matrix(tensor)))
    });
    let mut weights: plain::Weights = named.collect();
    let embedding = plain::matrix(&target().1["model.embed_tokens.weight"]);
    let output = weights.entry("lm_head".into());
    output.or_insert_with(|| embedding.clone());
    weights.insert("embedding".into(), embedding);
    let logits = PLAIN.logits(&weights, &plain::matrix(states), block);
    let narrow = |row: Vec<f64>| row.into_iter().map(|logit| logit as f32).collect();
    logits.into_iter().map(narrow).collect()
}

fn states(rows: usize) -> Tensor {
    noise("the target's hidden states", &[rows, 2 * HIDDEN])
}

pub fn close(got: &[Vec<f32>], want: &[Vec<f32>]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        let scale = want.iter().fold(0f32, |max, x| max.max(x.abs()));
        let off = distance(got, want) / scale;
        assert!(off < 1e-3, "off by {off} of {scale}");
    }
}

#[test]
fn logits_are_those_of_the_paper() {
    for with_head_norms in [true, false] {
        let tensors = head_tensors(with_head_norms);
        let (_folder, opened) = head(&head_config(), &tensors);
        let mut opened = opened.unwrap();
        assert_eq!(opened.reads(), [1, 2]);
        let block = MaskedBlock {
            size: 4,
            mask: MASK,
            from_anchor: false,
        };
        assert_eq!(opened.masked_block(), Some(block));
        let states = states(7);
        let got = masked_logits(&mut *opened, &states, 5, &[7]);
        let want = plain_logits(&tensors, &states, &[5, MASK, MASK, MASK]);
        close(&got, &want);
        // The rows differ, though all their embeddings are the same.
        assert_ne!(argmax(&want[0]), argmax(&want[2]));
        for cuts in [&[3, 7][..], &[1, 2, 6, 7]] {
            assert_eq!(
                masked_logits(&mut *opened, &states, 5, cuts),
                got,
                "{cuts:?}"
            );
        }
    }
}

/// Whatever its class, a head is known by its tensors; it may have an output layer of some ids.
#[test]
fn a_reduced_vocabulary_has_its_own_output_layer() {
    let (mut config, mut tensors) = (head_config(), head_tensors(true));
    config["architectures"] = json!(["LlamaForCausalLM"]);
    let few = 20;
    config["draft_vocab_size"] = few.into();
    let own = noise("lm_head.weight", &[few, HIDDEN]);
    let offsets: Vec<i64> = (0..few as i64).map(|row| 2 * row).collect();
    tensors.insert("lm_head.weight".into(), own);
    tensors.insert("d2t".into(), Tensor::new(offsets, &Device::Cpu).unwrap());
    let (_folder, opened) = head(&config, &tensors);
    let states = states(5);
    let got = masked_logits(&mut *opened.unwrap(), &states, 9, &[5]);
    // The embedding is the target's, the output layer is not.
    let want = plain_logits(&tensors, &states, &[9, MASK, MASK, MASK]);
    for (got, want) in got.iter().zip(&want) {
        let scale = want.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (id, logit) in got.iter().enumerate() {
            match id % 3 == 0 && id < 3 * few {
                false => assert_eq!(*logit, f32::NEG_INFINITY),
                true => assert!((logit - want[id / 3]).abs() < 1e-3 * scale),
            }
        }
    }
}

/// The same head in a GGUF file has the same logits.
#[test]
fn a_gguf_file_has_the_same_head() {
    let (folder, tensors) = (tempfile::tempdir().unwrap(), head_tensors(true));
    let (_other, opened) = head(&head_config(), &tensors);
    let names = [
        ("layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let named = tensors.iter().map(|(name, tensor)| {
        let name = match name.as_str() {
            "norm.weight" => "output_norm.weight".to_owned(),
            name => (names.iter()).fold(name.to_owned(), |name, (from, to)| name.replace(from, to)),
        };
        (name, QTensor::quantize(tensor, GgmlDType::F32).unwrap())
    });
    let named: Vec<(String, QTensor)> = named.collect();
    let layers = [1, 2].map(Gguf::U32).to_vec();
    let number = |n: usize| Gguf::U32(n as u32);
    let metadata = [
        ("general.architecture", Gguf::String("dflash".into())),
        ("dflash.vocab_size", number(VOCAB)),
        ("dflash.embedding_length", number(HIDDEN)),
        ("dflash.feed_forward_length", number(MLP)),
        ("dflash.block_count", number(LAYERS)),
        ("dflash.attention.head_count", number(HEADS)),
        ("dflash.attention.head_count_kv", number(KV_HEADS)),
        ("dflash.attention.key_length", number(HEAD_DIM)),
        (
            "dflash.attention.layer_norm_rms_epsilon",
            Gguf::F32(EPS as f32),
        ),
        ("dflash.rope.freq_base", Gguf::F32(THETA as f32)),
        ("dflash.block_size", number(4)),
        ("dflash.mask_token_id", Gguf::U32(MASK)),
        ("dflash.extract_layers", Gguf::Array(layers)),
    ];
    let file = folder.path().join("head.gguf");
    let write = |without: &str| {
        let metadata = metadata.iter().filter(|(key, _)| *key != without);
        let metadata: Vec<(&str, &Gguf)> = metadata.map(|(key, value)| (*key, value)).collect();
        let tensors: Vec<(&str, &QTensor)> = named.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let mut out = std::fs::File::create(&file).unwrap();
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
    };
    let target = target().0;
    write("");
    let mut from_gguf = open_head(&file, &*target).unwrap();
    let states = states(6);
    let want = masked_logits(&mut *opened.unwrap(), &states, 3, &[6]);
    let got = masked_logits(&mut *from_gguf, &states, 3, &[6]);
    assert_eq!(got, want);
    for key in [
        "dflash.block_size",
        "dflash.mask_token_id",
        "dflash.extract_layers",
    ] {
        write(key);
        let error = open_head(&file, &*target).err().unwrap();
        assert!(error.contains(key) && !error.contains('\n'), "{error}");
    }
    let error = tiny::open(&file).err().unwrap().to_string();
    assert!(error.contains("give it as --draft-model"), "{error}");
}

#[test]
fn a_head_that_does_not_fit_is_refused_in_one_line() {
    let refused = |change: &dyn Fn(&mut Json), tensors: Tensors, needle: &str| {
        let mut config = head_config();
        change(&mut config);
        let (_folder, opened) = head(&config, &tensors);
        let error = opened.err().expect(needle);
        assert!(error.contains(needle) && !error.contains('\n'), "{error}");
    };
    let tensors = || head_tensors(true);
    let table = r#"
        block_size = null | block_size null must be a number
        block_size = 1 | block_size 1 is not supported: only 2 to 64 are
        block_size = 65 | block_size 65 is not supported
        dflash_config.mask_token_id = 67 | mask_token_id 67 must be below
        dflash_config.mask_token_id = null | mask_token_id null must be
        dflash_config.target_layer_ids = null | target_layer_ids null
        dflash_config.target_layer_ids = [0, 2] | the target has 2
        dflash_config.target_layer_ids = [1, 0] | the layers [2, 1]
        layer_types = ["full_attention", "sliding_attention"] | layer_types
        num_target_layers = 3 | num_target_layers is 3, but 2 in the target
        hidden_size = 128 | hidden_size is 128, but 256 in the target
        vocab_size = 99 | vocab_size is 99, but 67 in the target
    "#;
    for [keys, needle] in rows::<2>(table) {
        refused(&|config| change(config, keys), tensors(), needle);
    }
    let mut missing = tensors();
    missing.remove("layers.1.mlp.up_proj.weight");
    refused(&|_| (), missing, "layers.1.mlp.up_proj.weight");
    let mut odd = tensors();
    odd.insert("layers.2.mlp.up_proj.weight".into(), noise("x", &[2, 2]));
    refused(&|_| (), odd, "layers.2.mlp.up_proj.weight");
}

/// With a real target and a real head, whose guesses are hardly ever right, texts do not change.
#[test]
fn texts_are_the_same_with_and_without_the_head() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &head_config(), &head_tensors(true));
    assert_lossless(folder.path());
}

/// Under pressure, with batches and trees, texts are the same with and without the head in `folder`.
pub fn assert_lossless(folder: &Path) {
    let requests: Vec<_> = [3usize, 30, 50, 11, 20, 40]
        .into_iter()
        .flat_map(|len| {
            let prompt = tiny::short_prompt(len);
            let mut rejected = greedy(&prompt, 20);
            rejected.acceptance = Some(Acceptance::Rejection);
            [sampled(&prompt, 20, len as u64), rejected]
        })
        .map(|mut request| {
            request.params.ignore_eos = true;
            request
        })
        .collect();
    let texts = |drafts: bool| {
        let target = target().0;
        let drafter = drafts.then(|| {
            let head = open_head(folder, &*target).unwrap();
            Box::new(BlockDrafter::new(head, 30, 4, 7).unwrap()) as Box<dyn Drafter>
        });
        let options = crowded(tree_limits(3, 8, 3), 24);
        let engine = engine::spawn(target, drafter, 30, 4, options).unwrap();
        let events = engine.submit_all(requests.clone()).unwrap();
        let texts: Vec<_> = events.into_iter().map(|e| collect(e).ids()).collect();
        assert_idle(&engine);
        let stats = engine.stats();
        (
            texts,
            stats.spec_draft_tokens.get(),
            stats.preemptions.get(),
        )
    };
    let (plain, none, _) = texts(false);
    let (drafted, drafts, preemptions) = texts(true);
    assert_eq!(drafted, plain);
    assert!(none == 0 && drafts > 200, "{drafts} draft tokens");
    assert!(preemptions > 0, "there was no pressure");
}

/// As a user runs it, recognized by its class. The bench fails if a text changes.
#[test]
fn the_command_line_takes_a_parallel_head() {
    let config = TINY.replace("LlamaForCausalLM", "DFlashDraftModel");
    let config = config.replacen(
        '{',
        r#"{ "block_size": 8, "mask_token_id": 3, "target_layer_ids": [0, 1],"#,
        1,
    );
    let models = Models::new(&[("target", TINY), ("head", &config)]);
    let flags = "--random-prompts 2 --prompt-tokens 20 --max-tokens 60 --spec-budget fixed";
    for drafter in ["", "--drafter parallel"] {
        let (_, report) = models.bench(&format!("{flags} --draft-model @head {drafter}"));
        let greedy = &report["temperatures"][0]["overall"];
        assert!(greedy["alpha"].as_f64().is_some(), "{report}");
        assert!(greedy["c"].as_f64().is_some_and(|c| c > 0.0), "{report}");
    }
    for (drafter, model) in [("eagle3", "head"), ("parallel", "target")] {
        let said = models.refused(&format!(
            "{flags} --drafter {drafter} --draft-model @{model}"
        ));
        let named = said.contains(&format!("--drafter {drafter}: "));
        assert!(named && said.contains("is no such head"), "{said}");
    }
}
