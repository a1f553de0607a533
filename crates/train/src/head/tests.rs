//! The head against an implementation in plain f64 that computes one position at a time.

use super::*;
use crate::Method;
use crate::head_weights::TargetEmbedding;
use crate::plain::{Matrix, Weights as Plain, add, attend, linear as times};
use crate::plain::{matrix, mlp, rms_norm, rope};
use crate::reference::{assert_close, assert_gradients, plain, tensor};
use crate::spec::shapes;
use foretoken_model::{LayerSpec, ModelConfig, RopeSpec};

const VOCAB: usize = 11;
const HIDDEN: usize = 8;
const TAPS: usize = 3;
const IDS: [u32; 4] = [1, 4, 7, 10];
const PASSES: usize = 3;
const HEAD_DIM: usize = 4;
const EPS: f64 = 1e-5;
const THETA: f64 = 100.0;
/// Tokens of a row, and those at which the head predicts something.
const LEN: usize = 6;
const POSITIONS: usize = LEN - 1;

fn config() -> ModelConfig {
    let rope = RopeSpec::plain(HEAD_DIM, THETA as f32);
    ModelConfig {
        architecture: "llama".into(),
        vocab_size: VOCAB,
        draft_vocab_size: Some(IDS.len()),
        hidden_size: HIDDEN,
        intermediate_size: 10,
        spec: vec![LayerSpec::llama(rope, HEAD_DIM)].into(),
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: HEAD_DIM,
        rms_norm_eps: EPS,
        max_position_embeddings: 64,
        ..ModelConfig::default()
    }
}

fn head() -> TrainHead {
    let config = config();
    let vars = shapes(Method::Eagle3, &config, TAPS, 0);
    let vars = vars.into_iter().enumerate().map(|(seed, (name, dims))| {
        // Large enough for attention to prefer some positions.
        let var = (tensor(seed, &dims) * 0.9).unwrap();
        (name, Var::from_tensor(&var).unwrap())
    });
    let (vars, embedding) = (vars.collect(), tensor(99, &[VOCAB, HIDDEN]));
    let embedding = TargetEmbedding::Dense(embedding);
    TrainHead {
        weights: HeadWeights::of(config, vars, embedding, IDS.to_vec(), LEN + PASSES).unwrap(),
        unrolling: Unrolling {
            passes: PASSES,
            stride: 1,
        },
    }
}

/// The logits of one row at [pass][position].
fn reference(w: &Plain, tokens: &[u32], features: &[Vec<f64>]) -> Vec<Matrix> {
    let norm = |name: &str, x: &[f64]| rms_norm(x, &w[name][0], EPS);
    let mut carried: Matrix = features.iter().map(|f| times(&w["fc"], f)).collect();
    // Of [pass][position].
    let (mut keys, mut values) = (Vec::<Matrix>::new(), Vec::<Matrix>::new());
    let mut logits = Vec::new();
    for pass in 0..PASSES {
        let inputs = carried.iter().enumerate().map(|(i, carried)| {
            // After the end of the row the last token is repeated.
            let token = tokens[(i + 1 + pass).min(LEN)] as usize;
            let mut x = norm("midlayer.input_layernorm", &w["embedding"][token]);
            x.extend(norm("midlayer.hidden_norm", carried));
            x
        });
        let inputs: Matrix = inputs.collect();
        let of = |part: &str, x: &[f64]| times(&w[&format!("midlayer.self_attn.{part}_proj")], x);
        let turned = |part: &str| -> Matrix {
            let rows = inputs.iter().enumerate();
            rows.map(|(i, x)| rope(&of(part, x), HEAD_DIM, THETA, i + pass))
                .collect()
        };
        keys.push(turned("k"));
        values.push(inputs.iter().map(|x| of("v", x)).collect());
        let mut of_pass = Vec::new();
        for (i, query) in turned("q").iter().enumerate() {
            // The text up to here, and what the passes before drafted from here.
            let seen = |all: &[Matrix]| -> Matrix {
                let drafted = all[1..].iter().map(|of_pass| of_pass[i].clone());
                all[0][..=i].iter().cloned().chain(drafted).collect()
            };
            let y = attend(query, HEAD_DIM, 2, &seen(&keys), &seen(&values));
            let stream = add(&carried[i], &of("o", &y));
            carried[i] = mlp(w, "midlayer", &stream, EPS);
            of_pass.push(times(&w["lm_head"], &norm("norm", &carried[i])));
        }
        logits.push(of_pass);
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
    let features = tensor(7, &[2 * POSITIONS, TAPS * HIDDEN]);
    ([tokens(1), tokens(2)], features)
}

/// The logits of both rows in the order of [`Student::logits`]; the passes after the first are at `later` positions
/// of each row.
fn all_logits(
    w: &Plain,
    tokens: &[Vec<u32>; 2],
    features: &Tensor,
    later: &[Vec<usize>],
) -> Vec<f64> {
    let features = matrix(features);
    let rows = [0, 1].map(|row| {
        let features = &features[row * POSITIONS..(row + 1) * POSITIONS];
        reference(w, &tokens[row], features)
    });
    let all: Vec<usize> = (0..POSITIONS).collect();
    let mut logits = Vec::new();
    for pass in 0..PASSES {
        for (row, later) in rows.iter().zip(later) {
            let positions = if pass == 0 { &all } else { later };
            for &position in positions {
                logits.extend_from_slice(&row[pass][position]);
            }
        }
    }
    logits
}

#[test]
fn the_head_and_its_gradients_are_those_of_an_f64_reference() {
    let head = head();
    let (tokens, features) = rows();
    let all: Vec<usize> = (0..POSITIONS).collect();
    for (later, positions) in [
        (None, vec![all.clone(), all]),
        (Some(()), vec![vec![1, 3], vec![0, 4]]),
    ] {
        let batch = TrainBatch {
            tokens: tokens.iter().map(Vec::as_slice).collect(),
            features: Some(features.clone()),
            positions: Vec::new(),
            later: later.map(|()| positions.clone()),
        };
        let logits = head.logits(&batch).unwrap();
        let count = 2 * POSITIONS + (PASSES - 1) * positions.concat().len();
        assert_eq!(logits.dims(), [count, IDS.len()]);
        let w = plain(&head.weights);
        assert_close(&logits, &all_logits(&w, &tokens, &features, &positions));
        assert_gradients(&head.weights, &logits, |w| {
            all_logits(w, &tokens, &features, &positions)
        });
    }
}

#[test]
fn later_passes_move_through_all_positions() {
    let mut head = head();
    let positions: Vec<usize> = (0..11).collect();
    assert_eq!(head.later_positions(&positions, 5), None);
    head.unrolling.stride = 4;
    let mut seen: Vec<usize> = (0..7)
        .flat_map(|random| {
            let some = head.later_positions(&positions, random).unwrap();
            assert_eq!(some.len(), 2);
            some
        })
        .collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, positions);
}

/// The predictions of a position do not depend on the tokens and hidden states after it, except on those tokens that
/// a deeper pass reads.
#[test]
fn no_position_sees_the_future() {
    let head = head();
    let (tokens, features) = rows();
    let logits = |tokens: &[Vec<u32>; 2], features: &Tensor| {
        let batch = TrainBatch {
            tokens: tokens.iter().map(Vec::as_slice).collect(),
            features: Some(features.clone()),
            positions: Vec::new(),
            later: None,
        };
        let logits = head.logits(&batch).unwrap();
        logits.to_vec2::<f32>().unwrap()
    };
    let before = logits(&tokens, &features);
    let changed = 4;
    let mut other = tokens.clone();
    other[1][changed] = (other[1][changed] + 1) % VOCAB as u32;
    let after = logits(&other, &features);
    for pass in 0..PASSES {
        for row in 0..2 {
            for i in 0..POSITIONS {
                let at = (pass * 2 + row) * POSITIONS + i;
                let reads = row == 1 && i + 1 + pass >= changed;
                assert_eq!(before[at] != after[at], reads, "{pass} {row} {i}");
            }
        }
    }
}
