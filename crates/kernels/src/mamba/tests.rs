use super::*;
use crate::recurrent::testing::{Case, random, tests_of};

const SHAPE: MambaShape = MambaShape {
    heads: 6,
    head_dim: 5,
    groups: 2,
    state_dim: 7,
    taps: 4,
};
/// Most steps are within them.
const LIMITS: (f32, f32) = (0.3, 1.5);

fn weights() -> MambaWeights {
    let decay = random(SHAPE.heads, 0.5);
    MambaWeights {
        shape: SHAPE,
        conv: random(SHAPE.taps * SHAPE.channels(), 0.6),
        conv_bias: Some(random(SHAPE.channels(), 0.3)),
        decay: decay.iter().map(|x| -x.abs()).collect(),
        dt_bias: random(SHAPE.heads, 1.),
        skip: random(SHAPE.heads, 1.),
        step_limits: LIMITS,
        norm: Some(random(SHAPE.values(), 1.)),
        eps: 1e-6,
        on_device: None,
    }
}

/// What the definition makes of the rows of a text, in f64, one token after another.
fn defined(weights: &MambaWeights, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let (values, channels, dim) = (SHAPE.values(), SHAPE.channels(), SHAPE.head_dim);
    let sigmoid = |x: f64| 1. / (1. + (-x).exp());
    let mut states = vec![vec![vec![0f64; SHAPE.state_dim]; dim]; SHAPE.heads];
    let mut out = Vec::new();
    for t in 0..rows.len() {
        let mixed = |channel: usize| {
            let taps = 0..SHAPE.taps.min(t + 1);
            let products = taps.map(|back| {
                let weight = f64::from(weights.conv[back * channels + channel]);
                weight * f64::from(rows[t - back][values + channel])
            });
            let bias = f64::from(weights.conv_bias.as_ref().unwrap()[channel]);
            let sum = bias + products.sum::<f64>();
            sum * sigmoid(sum)
        };
        let mut row = Vec::new();
        for (head, state) in states.iter_mut().enumerate() {
            let group = head * SHAPE.groups / SHAPE.heads;
            let dt = rows[t][values + channels + head] + weights.dt_bias[head];
            let step = (1. + f64::from(dt).exp()).ln();
            let step = step.clamp(f64::from(LIMITS.0), f64::from(LIMITS.1));
            let decay = (f64::from(weights.decay[head]) * step).exp();
            for (j, state) in state.iter_mut().enumerate() {
                let x = mixed(head * dim + j);
                let mut read = f64::from(weights.skip[head]) * x;
                for (n, s) in state.iter_mut().enumerate() {
                    let b = mixed(values + group * SHAPE.state_dim + n);
                    let c = mixed(values + (SHAPE.groups + group) * SHAPE.state_dim + n);
                    *s = *s * decay + b * x * step;
                    read += *s * c;
                }
                let z = f64::from(rows[t][head * dim + j]);
                row.push(read * z * sigmoid(z));
            }
        }
        let width = values / SHAPE.groups;
        let norm = weights.norm.as_ref().unwrap();
        for (i, group) in row.chunks_mut(width).enumerate() {
            let mean = group.iter().map(|x| x * x).sum::<f64>() / width as f64;
            for (j, x) in group.iter_mut().enumerate() {
                *x *= f64::from(norm[i * width + j]) / (mean + 1e-6).sqrt();
            }
        }
        out.push(row);
    }
    out
}

tests_of!(mamba);
