//! The head against an implementation in plain f64 that computes one position at a time.

use super::*;
use crate::train::reference::{
    Plain, add, assert_close, assert_gradients, mlp, norm, plain, tensor, times, turned,
};

const VOCAB: usize = 11;
const HIDDEN: usize = 8;
const TAPS: usize = 3;
const IDS: [u32; 4] = [1, 4, 7, 10];
const PASSES: usize = 3;
/// Tokens of a row, and those at which the head predicts something.
const LEN: usize = 6;
const POSITIONS: usize = LEN - 1;

fn config() -> ModelConfig {
    ModelConfig {
        architecture: "llama".into(),
        vocab_size: VOCAB,
        draft_vocab_size: Some(IDS.len()),
        hidden_size: HIDDEN,
        intermediate_size: 10,
        num_layers: 1,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        rms_norm_eps: 1e-5,
        rope_theta: 100.0,
        max_position_embeddings: 64,
        ..ModelConfig::default()
    }
}

fn head() -> Head {
    let config = config();
    let vars = shapes(&config, TAPS, IDS.len());
    let vars = vars.into_iter().enumerate().map(|(seed, (name, dims))| {
        // Large enough for attention to prefer some positions.
        let var = (tensor(seed, &dims) * 0.9).unwrap();
        (name, Var::from_tensor(&var).unwrap())
    });
    let (vars, embedding) = (vars.collect(), tensor(99, &[VOCAB, HIDDEN]));
    Head {
        weights: HeadWeights::of(config, vars, embedding, IDS.to_vec(), LEN + PASSES),
        passes: PASSES,
    }
}

type KeyAndValue = (Vec<f64>, Vec<f64>);

/// The logits of one row at [pass][position].
fn reference(w: &Plain, tokens: &[u32], features: &[Vec<f64>]) -> Vec<Vec<Vec<f64>>> {
    let d = 4;
    let mut carried: Vec<Vec<f64>> = features.iter().map(|f| times(&w["fc"], f)).collect();
    // Of [pass][position][head of K].
    let mut cache: Vec<Vec<Vec<KeyAndValue>>> = Vec::new();
    let mut logits = Vec::new();
    for pass in 0..PASSES {
        let mut queries = Vec::new();
        let mut written = Vec::new();
        for i in 0..POSITIONS {
            // After the end of the row the last token is repeated.
            let token = tokens[(i + 1 + pass).min(LEN)] as usize;
            let embedded = &w["embedding"][token * HIDDEN..(token + 1) * HIDDEN];
            let mut x = norm(embedded, &w["midlayer.input_layernorm"]);
            x.extend(norm(&carried[i], &w["midlayer.hidden_norm"]));
            let of = |part: &str| times(&w[&format!("midlayer.self_attn.{part}_proj")], &x);
            let turn = |x: Vec<f64>| -> Vec<Vec<f64>> {
                x.chunks(d).map(|head| turned(head, i + pass)).collect()
            };
            queries.push(turn(of("q")));
            let v: Vec<Vec<f64>> = of("v").chunks(d).map(<[f64]>::to_vec).collect();
            written.push(turn(of("k")).into_iter().zip(v).collect());
        }
        cache.push(written);
        let mut of_pass = Vec::new();
        for i in 0..POSITIONS {
            let mut attended = Vec::new();
            for (head, query) in queries[i].iter().enumerate() {
                let group = head / 2;
                let text = (0..=i).map(|j| &cache[0][j][group]);
                let draft = (1..=pass).map(|p| &cache[p][i][group]);
                let seen: Vec<_> = text.chain(draft).collect();
                let weight = |(k, _): &&KeyAndValue| (times(k, query)[0] / (d as f64).sqrt()).exp();
                let sum: f64 = seen.iter().map(weight).sum();
                let mut y = vec![0.0; d];
                for entry in &seen {
                    let share = weight(entry) / sum;
                    y = add(&y, &entry.1.iter().map(|v| v * share).collect::<Vec<_>>());
                }
                attended.extend(y);
            }
            let residual = add(
                &carried[i],
                &times(&w["midlayer.self_attn.o_proj"], &attended),
            );
            carried[i] = mlp(w, "midlayer", &residual);
            of_pass.push(times(&w["lm_head"], &norm(&carried[i], &w["norm"])));
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

/// The logits of both rows in the order of [`Student::logits`].
fn all_logits(w: &Plain, tokens: &[Vec<u32>; 2], features: &Tensor) -> Vec<f64> {
    let features = features.to_vec2::<f32>().unwrap();
    let features: Vec<Vec<f64>> = features
        .into_iter()
        .map(|row| row.into_iter().map(f64::from).collect())
        .collect();
    let rows = [0, 1].map(|row| {
        let features = &features[row * POSITIONS..(row + 1) * POSITIONS];
        reference(w, &tokens[row], features)
    });
    let of_pass = |pass: usize| [&rows[0], &rows[1]].map(|row| row[pass].concat()).concat();
    (0..PASSES).flat_map(of_pass).collect()
}

#[test]
fn the_head_and_its_gradients_are_those_of_an_f64_reference() {
    let head = head();
    let (tokens, features) = rows();
    let batch = Batch {
        tokens: tokens.iter().map(Vec::as_slice).collect(),
        features: Some(features.clone()),
        positions: Vec::new(),
    };
    let logits = head.logits(&batch).unwrap();
    assert_eq!(logits.dims(), [PASSES * 2 * POSITIONS, IDS.len()]);
    let w = plain(&head.weights);
    assert_close(&logits, &all_logits(&w, &tokens, &features));
    assert_gradients(&head.weights, &logits, |w| {
        all_logits(w, &tokens, &features)
    });
}

/// What a position predicts does not depend on the tokens and hidden states after it, except on those
/// tokens that a deeper pass reads.
#[test]
fn no_position_sees_the_future() {
    let head = head();
    let (tokens, features) = rows();
    let logits = |tokens: &[Vec<u32>; 2], features: &Tensor| {
        let batch = Batch {
            tokens: tokens.iter().map(Vec::as_slice).collect(),
            features: Some(features.clone()),
            positions: Vec::new(),
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
