//! The parts of a decoder in plain f64, one row at a time, to compare models with.

use candle_core::{DType, Tensor};
use std::collections::BTreeMap;

/// Rows.
pub type Matrix = Vec<Vec<f64>>;

/// The weights of a checkpoint without `.weight` in their names; a vector is one row.
pub type Weights = BTreeMap<String, Matrix>;

/// The rows of a matrix; a vector is one row.
pub fn matrix(tensor: &Tensor) -> Matrix {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    match wide.rank() {
        1 => vec![wide.to_vec1().unwrap()],
        _ => wide.to_vec2().unwrap(),
    }
}

pub fn linear(weight: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    let dot = |row: &Vec<f64>| row.iter().zip(x).map(|(w, x)| w * x).sum();
    weight.iter().map(dot).collect()
}

pub fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1. / (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

pub fn swiglu(gate: &[f64], up: &[f64]) -> Vec<f64> {
    let both = gate.iter().zip(up);
    both.map(|(g, u)| g / (1. + (-g).exp()) * u).collect()
}

/// The residual stream after the MLP of `layer`.
pub fn mlp(weights: &Weights, layer: &str, stream: &[f64], eps: f64) -> Vec<f64> {
    let at = |part: &str| &weights[&format!("{layer}.{part}")];
    let normed = rms_norm(stream, &at("post_attention_layernorm")[0], eps);
    let gate = linear(at("mlp.gate_proj"), &normed);
    let wide = swiglu(&gate, &linear(at("mlp.up_proj"), &normed));
    add(stream, &linear(at("mlp.down_proj"), &wide))
}

/// All heads of a row, rotated to `position`.
pub fn rope(x: &[f64], head_dim: usize, theta: f64, position: usize) -> Vec<f64> {
    let half = head_dim / 2;
    let mut out = x.to_vec();
    for head in out.chunks_mut(head_dim) {
        for i in 0..half {
            let angle = position as f64 * theta.powf(-(i as f64) / half as f64);
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + half] = b * angle.cos() + a * angle.sin();
        }
    }
    out
}

/// The attention of a row that sees all of `keys`; `group` heads of `q` share a head of K and V.
pub fn attend(
    q: &[f64],
    head_dim: usize,
    group: usize,
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
) -> Vec<f64> {
    let heads = q.chunks(head_dim).enumerate();
    heads
        .flat_map(|(head, q)| {
            let at = head / group * head_dim..(head / group + 1) * head_dim;
            let score = |k: &Vec<f64>| {
                let dot: f64 = q.iter().zip(&k[at.clone()]).map(|(q, k)| q * k).sum();
                dot / (head_dim as f64).sqrt()
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut out = vec![0.; head_dim];
            for (weight, value) in weights.iter().zip(values) {
                for (out, v) in out.iter_mut().zip(&value[at.clone()]) {
                    *out += weight / sum * v;
                }
            }
            out
        })
        .collect()
}
