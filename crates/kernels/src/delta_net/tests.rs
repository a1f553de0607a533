use super::*;
use crate::recurrent::testing::{Case, random, tests_of};

const SHAPE: DeltaShape = DeltaShape {
    key_heads: 2,
    value_heads: 4,
    key_dim: 6,
    value_dim: 5,
    taps: 4,
    is_tiled: false,
};

fn weights() -> DeltaWeights {
    DeltaWeights {
        shape: SHAPE,
        conv: random(SHAPE.taps * SHAPE.channels(), 0.6),
        decay: random(SHAPE.value_heads, 0.5)
            .iter()
            .map(|x| -x.abs())
            .collect(),
        dt_bias: random(SHAPE.value_heads, 1.),
        norm: random(SHAPE.value_dim, 1.),
        eps: 1e-6,
        on_device: None,
    }
}

/// The rows of a text, and what the definition makes of them, in f64, one token after another.
fn defined(weights: &DeltaWeights, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let (values, keys, channels) = (SHAPE.values(), SHAPE.keys(), SHAPE.channels());
    let sigmoid = |x: f64| 1. / (1. + (-x).exp());
    let mut states = vec![vec![vec![0f64; SHAPE.key_dim]; SHAPE.value_dim]; SHAPE.value_heads];
    let mut out = Vec::new();
    for t in 0..rows.len() {
        let mixed = |channel: usize| {
            let taps = 0..SHAPE.taps.min(t + 1);
            let sum: f64 = taps
                .map(|back| {
                    let weight = f64::from(weights.conv[back * channels + channel]);
                    weight * f64::from(rows[t - back][values + channel])
                })
                .sum();
            sum * sigmoid(sum)
        };
        let unit = |at: usize| {
            let x: Vec<f64> = (at..at + SHAPE.key_dim).map(mixed).collect();
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let mut row = Vec::new();
        for (head, state) in states.iter_mut().enumerate() {
            let key_head = head * SHAPE.key_heads / SHAPE.value_heads;
            let (q, k) = (
                unit(key_head * SHAPE.key_dim),
                unit(keys + key_head * SHAPE.key_dim),
            );
            let of = |i: usize| f64::from(rows[t][values + channels + i]);
            let (beta, a) = (sigmoid(of(head)), of(SHAPE.value_heads + head));
            let softplus = (1. + (a + f64::from(weights.dt_bias[head])).exp()).ln();
            let decay = (f64::from(weights.decay[head]) * softplus).exp();
            let mut read = Vec::new();
            for (j, state) in state.iter_mut().enumerate() {
                let v = mixed(2 * keys + head * SHAPE.value_dim + j);
                let known: f64 = (0..SHAPE.key_dim).map(|i| k[i] * state[i] * decay).sum();
                for i in 0..SHAPE.key_dim {
                    state[i] = state[i] * decay + k[i] * (v - known) * beta;
                }
                let sum: f64 = (0..SHAPE.key_dim).map(|i| q[i] * state[i]).sum();
                read.push(sum / (SHAPE.key_dim as f64).sqrt());
            }
            let mean = read.iter().map(|x| x * x).sum::<f64>() / SHAPE.value_dim as f64;
            for (j, x) in read.iter().enumerate() {
                let z = f64::from(rows[t][head * SHAPE.value_dim + j]);
                let norm = f64::from(weights.norm[j]);
                row.push(x / (mean + 1e-6).sqrt() * norm * z * sigmoid(z));
            }
        }
        out.push(row);
    }
    out
}

tests_of!(delta_net);
