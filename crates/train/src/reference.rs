//! Parts that the tests of heads share: weights that look random, and their comparison with an implementation in f64.

use super::head_weights::HeadWeights;
use super::ops::with_slope;
use super::optimizer::{ByName, accumulate};
use super::plain::{Weights, matrix};
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

/// The weights in f64, and the embedding.
pub fn plain(weights: &HeadWeights) -> Weights {
    let vars = weights.vars.iter();
    let mut all: Weights = vars
        .map(|(name, var)| {
            let name = name.trim_end_matches(".weight").to_owned();
            (name, matrix(var.as_tensor()))
        })
        .collect();
    let ids = (0..weights.config.vocab_size as u32).collect();
    all.insert("embedding".into(), matrix(&weights.embed(ids).unwrap()));
    all
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
    reference: impl Fn(&Weights) -> Vec<f64>,
) {
    let slope = tensor(5, logits.dims());
    let shares = slope.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let sum = |w: &Weights| -> f64 {
        let logits = reference(w);
        let parts = logits.iter().zip(&shares);
        parts.map(|(z, s)| z * f64::from(*s)).sum()
    };
    let graph = with_slope(logits, slope).unwrap();
    let mut gradients = ByName::new();
    accumulate(&mut gradients, &weights.vars, graph.backward().unwrap()).unwrap();
    assert_eq!(gradients.len(), weights.vars.len());
    let mut w = plain(weights);
    for (name, gradient) in &gradients {
        let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let name = name.trim_end_matches(".weight");
        let last = gradient.len() - 1;
        for at in [0, 1, last / 3, last / 2, last / 3 * 2 + 1, last] {
            let width = w[name][0].len();
            let before = w[name][at / width][at % width];
            let mut nudged = |by: f64| {
                w.get_mut(name).unwrap()[at / width][at % width] = before + by;
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
