//! What the tests of heads share: weights that look random, and plain arithmetic in f64.

use super::head_weights::HeadWeights;
use super::ops::with_slope;
use super::optimizer::{Named, accumulate};
use candle_core::{Device, Tensor};

/// Values between -1 and 1 that look random.
fn values(seed: usize, count: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 12_989 + seed * 78_233 + 7) as f64).sin() * 43_758.545_3;
    (0..count)
        .map(|i| (value(i).fract() * 1.5) as f32)
        .collect()
}

pub fn tensor(seed: usize, dims: &[usize]) -> Tensor {
    Tensor::from_vec(values(seed, dims.iter().product()), dims, &Device::Cpu).unwrap()
}

/// Weights in f64, without `.weight` in their names, and the embedding.
pub type Plain = std::collections::BTreeMap<String, Vec<f64>>;

pub fn plain(weights: &HeadWeights) -> Plain {
    let wide = |tensor: &Tensor| -> Vec<f64> {
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f64::from).collect()
    };
    let vars = weights.vars.iter();
    let mut all: Plain = vars
        .map(|(name, var)| {
            let name = name.trim_end_matches(".weight").to_owned();
            (name, wide(var.as_tensor()))
        })
        .collect();
    all.insert("embedding".into(), wide(&weights.embedding));
    all
}

pub fn times(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
    weight.chunks(x.len()).map(row).collect()
}

pub fn norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (square + 1e-5).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

pub fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// RoPE of one head at `position`: element `j` is paired with element `j + d / 2`.
pub fn turned(x: &[f64], position: usize) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = x.to_vec();
    for j in 0..half {
        let angle = position as f64 * 100f64.powf(-2.0 * j as f64 / x.len() as f64);
        y[j] = x[j] * angle.cos() - x[j + half] * angle.sin();
        y[j + half] = x[j] * angle.sin() + x[j + half] * angle.cos();
    }
    y
}

/// The residual stream after the MLP of `layer`.
pub fn mlp(w: &Plain, layer: &str, residual: &[f64]) -> Vec<f64> {
    let normed = norm(residual, &w[&format!("{layer}.post_attention_layernorm")]);
    let of = |part: &str, x: &[f64]| times(&w[&format!("{layer}.mlp.{part}_proj")], x);
    let wide: Vec<f64> = (of("gate", &normed).iter().zip(&of("up", &normed)))
        .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
        .collect();
    add(residual, &of("down", &wide))
}

#[track_caller]
pub fn assert_close(logits: &Tensor, wanted: &[f64]) {
    let got = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(got.len(), wanted.len());
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(
            (f64::from(*got) - wanted).abs() < 1e-4,
            "{at}: {got} {wanted}"
        );
    }
}

/// Compares the gradients of a weighted sum of `logits` with differences of what `reference` computes.
#[track_caller]
pub fn assert_gradients(
    weights: &HeadWeights,
    logits: &Tensor,
    reference: impl Fn(&Plain) -> Vec<f64>,
) {
    let slope = tensor(5, logits.dims());
    let shares = slope.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let sum = |w: &Plain| -> f64 {
        let logits = reference(w);
        let parts = logits.iter().zip(&shares);
        parts.map(|(z, s)| z * f64::from(*s)).sum()
    };
    let graph = with_slope(logits, slope).unwrap();
    let mut gradients = Named::new();
    accumulate(&mut gradients, &weights.vars, graph.backward().unwrap()).unwrap();
    assert_eq!(gradients.len(), weights.vars.len());
    let mut w = plain(weights);
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
