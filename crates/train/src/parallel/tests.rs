//! The head against an implementation in plain f64 that computes one block at a time, and against the
//! head that is served.

use super::*;
use crate::head_weights::TargetEmbedding;
use crate::model::TrainModel;
use crate::plain::{self, Matrix};
use crate::plain_parallel::PlainHead;
use crate::reference::{self, assert_close, assert_gradients, tensor};
use crate::spec::{TrainSpec, Unrolling};
use crate::{Method, Products, student};
use candle_core::Device;
use foretoken_core::kv::{BlockAllocator, BlockTable};
use foretoken_core::model::{Batch as Rows, PathRows};
use foretoken_model::{HeadKind, LayerSpec, LoadOptions, LoadedModel, ModelConfig, ModelSource};
use foretoken_model::{RopeSpec, Weights, load, load_head};
use serde_json::{Value, json};
use std::path::Path;

const VOCAB: usize = 11;
const HIDDEN: usize = 16;
const HEAD_DIM: usize = 8;
const LAYERS: usize = 2;
const IDS: [u32; 4] = [1, 4, 7, 10];
const BLOCK: MaskedBlock = MaskedBlock {
    size: 3,
    mask: 9,
    from_anchor: false,
};
/// Tokens of a row.
const LEN: usize = 9;
/// Anchors of the blocks of each row. The last block of the first row ends after the row.
const ANCHORS: [[usize; 2]; 2] = [[2, 8], [1, 5]];

fn config_json(layers: usize) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 12,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "max_position_embeddings": 64, "tie_word_embeddings": false, "torch_dtype": "float32"
    })
}

fn layers(count: usize) -> Vec<LayerSpec> {
    let rope = RopeSpec::plain(HEAD_DIM, 100.0);
    vec![LayerSpec::llama(rope, HEAD_DIM); count]
}

fn config() -> ModelConfig {
    ModelConfig {
        architecture: "llama".into(),
        vocab_size: VOCAB,
        draft_vocab_size: Some(IDS.len()),
        hidden_size: HIDDEN,
        intermediate_size: 12,
        spec: layers(LAYERS).into(),
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 64,
        ..ModelConfig::default()
    }
}

/// Weights that are large enough for attention to prefer some positions.
fn large(seed: usize, dims: &[usize]) -> Tensor {
    (tensor(seed, dims) * 0.7).unwrap()
}

/// Rank of the Markov head.
const RANK: usize = 5;

fn spec(markov_rank: usize) -> TrainSpec {
    TrainSpec {
        method: Method::Parallel,
        config: config(),
        json: Value::Null,
        taps: vec![1, 3],
        unrolling: Unrolling {
            passes: 1,
            stride: 1,
        },
        block: BLOCK,
        markov_rank,
        seq_len: LEN,
        seed: 1,
        products: Products::F32,
    }
}

fn head(markov_rank: usize) -> TrainParallelHead {
    let spec = spec(markov_rank);
    let vars = spec
        .shapes()
        .into_iter()
        .enumerate()
        .map(|(seed, (name, dims))| {
            let var = Var::from_tensor(&large(seed, &dims)).unwrap();
            (name, var)
        });
    let (vars, embedding) = (vars.collect(), tensor(99, &[VOCAB, HIDDEN]));
    let embedding = TargetEmbedding::Dense(embedding);
    let positions = spec.positions();
    let weights = HeadWeights::of(spec.config, vars, embedding, IDS.to_vec(), positions).unwrap();
    TrainParallelHead::new(weights, BLOCK)
}

/// The logits of the masks of the block at `anchor`.
fn of_block(w: &plain::Weights, tokens: &[u32], states: &[Vec<f64>], anchor: usize) -> Matrix {
    let head = PlainHead {
        layers: LAYERS,
        head_dim: HEAD_DIM,
        group: 2,
        eps: 1e-5,
        theta: 100.0,
    };
    let mut block = [BLOCK.mask; BLOCK.size];
    block[0] = tokens[anchor];
    let mut logits = head.logits(w, &states[..anchor], &block);
    if let Some(of_token) = w.get(MARKOV[0]) {
        for (depth, row) in logits.iter_mut().enumerate() {
            let before = tokens[(anchor + depth).min(LEN)] as usize;
            *row = plain::add(row, &plain::linear(&w[MARKOV[1]], &of_token[before]));
        }
    }
    logits
}

/// Two rows and their hidden states.
fn rows() -> ([Vec<u32>; 2], Tensor) {
    let tokens = |seed: u32| {
        (0..=LEN as u32)
            .map(|i| (i * i + seed * 3 + 1) % 11)
            .collect()
    };
    let features = tensor(7, &[2 * LEN, 2 * HIDDEN]);
    ([tokens(1), tokens(2)], features)
}

fn logits(head: &TrainParallelHead, tokens: &[Vec<u32>; 2], features: &Tensor) -> Tensor {
    let batch = TrainBatch {
        tokens: tokens.iter().map(Vec::as_slice).collect(),
        features: Some(features.clone()),
        positions: ANCHORS.map(|anchors| anchors.to_vec()).to_vec(),
        later: None,
    };
    head.logits(&batch).unwrap()
}

/// The logits of all blocks in the order of [`Student::logits`].
fn all_logits(w: &plain::Weights, tokens: &[Vec<u32>; 2], features: &Tensor) -> Vec<f64> {
    let features = plain::matrix(features);
    let blocks: Vec<Matrix> = (0..2)
        .flat_map(|row| ANCHORS[row].map(|anchor| (row, anchor)))
        .map(|(row, anchor)| of_block(w, &tokens[row], &features[row * LEN..], anchor))
        .collect();
    let of_depth = |depth: usize| blocks.iter().flat_map(move |block| block[depth].clone());
    (0..BLOCK.size - 1).flat_map(of_depth).collect()
}

#[test]
fn the_head_and_its_gradients_are_those_of_an_f64_reference() {
    let (tokens, features) = rows();
    for rank in [0, RANK] {
        let head = head(rank);
        let got = logits(&head, &tokens, &features);
        assert_eq!(got.dims(), [(BLOCK.size - 1) * 4, IDS.len()]);
        let w = reference::plain(&head.weights);
        assert_eq!(w.contains_key(MARKOV[0]), rank > 0);
        assert_close(&got, &all_logits(&w, &tokens, &features));
        assert_gradients(&head.weights, &got, |w| all_logits(w, &tokens, &features));
    }
}

/// A block depends on the token at its anchor, and on the hidden states before it; with a Markov head each
/// depth besides on the token before it.
#[test]
fn no_block_sees_what_is_not_known_when_it_is_drafted() {
    for rank in [0, RANK] {
        sees_only_what_is_known(rank);
    }
}

fn sees_only_what_is_known(markov_rank: usize) {
    let head = head(markov_rank);
    let (tokens, features) = rows();
    let read = |tokens: &[Vec<u32>; 2], features: &Tensor| {
        let logits = logits(&head, tokens, features);
        logits.to_vec2::<f32>().unwrap()
    };
    let before = read(&tokens, &features);
    for changed in 0..LEN {
        let mut other = tokens.clone();
        other[1][changed] = (other[1][changed] + 1) % VOCAB as u32;
        let of_token = read(&other, &features);
        let mut states = features.to_vec2::<f32>().unwrap();
        states[LEN + changed][3] += 1.0;
        let of_state = read(&tokens, &Tensor::new(states, &Device::Cpu).unwrap());
        let blocks = ANCHORS.iter().enumerate();
        let blocks = blocks.flat_map(|(row, anchors)| anchors.map(|anchor| (row, anchor)));
        for (block, (row, anchor)) in blocks.enumerate() {
            for depth in 0..BLOCK.size - 1 {
                let at = depth * 4 + block;
                let own = row == 1;
                let place = format!("{changed}: {row} {anchor} {depth}");
                let is_before = markov_rank > 0 && (anchor + depth).min(LEN) == changed;
                assert_eq!(
                    before[at] != of_token[at],
                    own && (anchor == changed || is_before),
                    "{place}"
                );
                assert_eq!(
                    before[at] != of_state[at],
                    own && anchor > changed,
                    "{place}"
                );
            }
        }
    }
}

#[test]
fn anchors_differ_from_step_to_step_but_not_in_their_number() {
    let head = head(0);
    let mut firsts = [false; ANCHOR_STRIDE];
    for random in 0..20 {
        let anchors = head.positions(LEN, random);
        assert_eq!(anchors.len(), 2);
        assert!(anchors[0] >= 1 && anchors[1] < LEN, "{anchors:?}");
        firsts[anchors[0] - 1] = true;
    }
    assert_eq!(firsts, [true; ANCHOR_STRIDE]);
}

fn write(folder: &Path, config: &Value, tensors: &HashMap<String, Tensor>) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    candle_core::safetensors::save(tensors, folder.join("model.safetensors")).unwrap();
}

/// A target in `folder`, as it is served.
fn target(folder: &Path) -> Box<dyn LoadedModel> {
    let of_target = ModelConfig {
        spec: layers(3).into(),
        draft_vocab_size: None,
        ..config()
    };
    let model = TrainModel::new(of_target, None, 5, LEN, &Device::Cpu).unwrap();
    write(folder, &config_json(3), &model.weights().unwrap());
    load(&ModelSource::Folder(folder.to_owned()), &in_f32()).unwrap()
}

fn in_f32() -> LoadOptions {
    LoadOptions::of(candle_core::DType::F32)
}

/// A head begins with the target's last layers, and the folder that it writes is served with the logits
/// of the code that trains it.
#[test]
fn the_served_head_computes_what_the_trained_one_computes() {
    let (of_target, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let target = target(of_target.path());
    let mut weights = Weights::open(&ModelSource::Folder(of_target.path().to_owned())).unwrap();
    let of_target = (target.config(), &mut weights);
    let head = HeadWeights::new(&spec(RANK), of_target, IDS.to_vec(), &Device::Cpu).unwrap();
    let head = TrainParallelHead::new(head, BLOCK);
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (own, of_target) in [
        (
            "layers.1.self_attn.q_proj",
            "model.layers.2.self_attn.q_proj",
        ),
        ("layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("norm", "model.norm"),
    ] {
        let of_target = weights.dense(&format!("{of_target}.weight")).unwrap();
        assert_eq!(values(head.weights.var(own)), values(&of_target), "{own}");
    }
    let mut seed = 0;
    let vars = head.vars().clone();
    let random = |name: &str| {
        seed += 1;
        Some(large(seed, vars[name].dims()))
    };
    student::set(head.vars(), random).unwrap();

    let mut config = config_json(LAYERS);
    for (key, value) in [
        ("architectures", json!(["DFlashDraftModel"])),
        ("draft_vocab_size", IDS.len().into()),
        ("block_size", BLOCK.size.into()),
        ("num_target_layers", 3.into()),
        ("markov_rank", RANK.into()),
        (
            "dflash_config",
            json!({ "mask_token_id": BLOCK.mask, "target_layer_ids": [0, 2] }),
        ),
    ] {
        config[key] = value;
    }
    write(folder.path(), &config, &head.weights().unwrap());
    let source = ModelSource::Folder(folder.path().to_owned());
    assert_eq!(HeadKind::of(&source).unwrap(), Some(HeadKind::Parallel));
    let mut served = load_head(&source, HeadKind::Parallel, &in_f32(), &*target).unwrap();
    assert_eq!(served.reads(), [1, 3]);
    assert_eq!(served.masked_block(), Some(BLOCK));

    let (tokens, features) = rows();
    let trained = logits(&head, &tokens, &features).to_vec2::<f32>().unwrap();
    let anchor = ANCHORS[1][1];
    let (mut store, mut table) = (served.new_kv(8, 4).unwrap(), BlockTable::default());
    let mut blocks = BlockAllocator::new(8, 4);
    blocks.reserve(&mut table, anchor + BLOCK.size).unwrap();
    let mut batch = Rows::default();
    batch.push_span(&vec![0; anchor], &[], 0, &table, 4);
    let states = features.narrow(0, LEN, anchor).unwrap();
    batch.context_features = Some(served.fuse(&states).unwrap());
    let last = tokens[1][anchor];
    batch.push_block(&[last, BLOCK.mask, BLOCK.mask], anchor, &table, 4);
    batch.logits = vec![anchor as u32 + 1, anchor as u32 + 2];
    let output = served.forward(&batch, &mut store).unwrap();
    let before = [last, tokens[1][(anchor + 1).min(LEN)]];
    let output = served.follow(&PathRows {
        logits: &output.logits,
        hidden: output.path_hidden.as_ref().unwrap(),
        tokens: &before,
        level: 0,
        states: None,
    });
    let output = output.unwrap();
    for (depth, row) in output.logits.to_vec2::<f32>().unwrap().iter().enumerate() {
        // The second block of the second row.
        let wanted = &trained[depth * 4 + 3];
        for (&id, wanted) in IDS.iter().zip(wanted) {
            let got = row[id as usize];
            assert!((got - wanted).abs() < 1e-3, "{depth} {id}: {got} {wanted}");
        }
        assert_eq!(row[0], f32::NEG_INFINITY);
    }
}
