//! The head against an implementation in plain f64 that computes one position at a time.

use super::*;
use crate::train::ops::with_slope;
use crate::train::optimizer::accumulate;

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

/// Values between -1 and 1 that look random.
fn values(seed: usize, count: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 12_989 + seed * 78_233 + 7) as f64).sin() * 43_758.545_3;
    (0..count)
        .map(|i| (value(i).fract() * 1.5) as f32)
        .collect()
}

fn tensor(seed: usize, dims: &[usize]) -> Tensor {
    Tensor::from_vec(values(seed, dims.iter().product()), dims, &Device::Cpu).unwrap()
}

fn head() -> Head {
    let config = config();
    let vars = shapes(&config, TAPS, IDS.len());
    let vars = vars.into_iter().enumerate().map(|(seed, (name, dims))| {
        // Large enough for attention to prefer some positions.
        let var = (tensor(seed, &dims) * 0.9).unwrap();
        (name, Var::from_tensor(&var).unwrap())
    });
    let frequencies = config.inverse_frequencies();
    let table = |turn: fn(f32) -> f32| -> Arc<Vec<f32>> {
        let angles = (0..LEN + PASSES).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        Arc::new(angles.map(turn).collect())
    };
    Head {
        vars: vars.collect(),
        heads: Heads {
            queries: config.num_heads,
            keys: config.num_kv_heads,
            head_dim: config.head_dim,
            cos: table(f32::cos),
            sin: table(f32::sin),
        },
        embedding: tensor(99, &[VOCAB, HIDDEN]),
        ids: IDS.to_vec(),
        passes: PASSES,
        config,
    }
}

/// Weights in f64.
type Plain = std::collections::BTreeMap<String, Vec<f64>>;

fn plain(head: &Head) -> Plain {
    let wide = |tensor: &Tensor| -> Vec<f64> {
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f64::from).collect()
    };
    let mut all: Plain = head
        .vars
        .iter()
        .map(|(name, var)| {
            (
                name.trim_end_matches(".weight").to_owned(),
                wide(var.as_tensor()),
            )
        })
        .collect();
    all.insert("embedding".into(), wide(&head.embedding));
    all
}

fn times(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
    weight.chunks(x.len()).map(row).collect()
}

fn norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (square + 1e-5).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// RoPE of one head at `position`: element `j` is paired with element `j + d / 2`.
fn turned(x: &[f64], position: usize) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = x.to_vec();
    for j in 0..half {
        let angle = position as f64 * 100f64.powf(-2.0 * j as f64 / x.len() as f64);
        y[j] = x[j] * angle.cos() - x[j + half] * angle.sin();
        y[j + half] = x[j] * angle.sin() + x[j + half] * angle.cos();
    }
    y
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
            let normed = norm(&residual, &w["midlayer.post_attention_layernorm"]);
            let gate = times(&w["midlayer.mlp.gate_proj"], &normed);
            let up = times(&w["midlayer.mlp.up_proj"], &normed);
            let wide: Vec<f64> = (gate.iter().zip(&up))
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            carried[i] = add(&residual, &times(&w["midlayer.mlp.down_proj"], &wide));
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
    };
    let logits = head.logits(&batch).unwrap();
    assert_eq!(logits.dims(), [PASSES * 2 * POSITIONS, IDS.len()]);
    let mut w = plain(&head);
    let wanted = all_logits(&w, &tokens, &features);
    let got = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        assert!(
            (f64::from(*got) - wanted).abs() < 1e-4,
            "{at}: {got} {wanted}"
        );
    }

    // The gradient of a weighted sum of all logits.
    let slope = tensor(5, logits.dims());
    let shares = slope.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let sum = |w: &Plain| -> f64 {
        let logits = all_logits(w, &tokens, &features);
        logits
            .iter()
            .zip(&shares)
            .map(|(z, s)| z * f64::from(*s))
            .sum()
    };
    let graph = with_slope(&logits, slope).unwrap();
    let mut gradients = Named::new();
    accumulate(&mut gradients, &head.vars, graph.backward().unwrap()).unwrap();
    assert_eq!(gradients.len(), head.vars.len());
    for (name, gradient) in &gradients {
        let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let name = name.trim_end_matches(".weight");
        let last = gradient.len() - 1;
        for at in [0, 1, last / 3, last / 2, last / 3 * 2 + 1, last] {
            let before = w[name][at];
            let mut nudged = |by: f64| {
                w.get_mut(name).unwrap()[at] = before + by;
                sum(&w)
            };
            let step = 1e-5;
            let wanted = (nudged(step) - nudged(-step)) / (2.0 * step);
            nudged(0.0);
            let got = f64::from(gradient[at]);
            let error = (got - wanted).abs() / (1.0 + wanted.abs());
            assert!(error < 2e-4, "{name} {at}: {got} {wanted}");
        }
    }
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
