//! Products with quantized weights: they are candle's, and need what `nvcc` compiles.

use super::texts::start;
use super::{gpu, logits, model, model_by, tokens};
use crate::common::rig::smollm2_path;
use crate::common::{greedy, run};
use candle_core::{DType, Device};
use foretoken::model::{LoadFormat, LoadOptions, ModelSource};

/// The root mean square of the differences, relative to that of the logits.
fn mean_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = || a.iter().flatten().zip(b.iter().flatten());
    let differences: f32 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    let squares: f32 = pairs().map(|(a, _)| a * a).sum();
    (differences / squares).sqrt()
}

/// Real quantized weights. A draft keeps them and uses candle's own kernels, whose bits depend on the number
/// of rows; the target's become dense.
#[test]
fn smollm2_has_the_same_text_with_and_without_a_draft() {
    let gpu = gpu();
    let file = smollm2_path();
    let source = ModelSource::resolve(&file.display().to_string(), None, LoadFormat::Auto).unwrap();
    let model_of = |keep_quantized| {
        let options = LoadOptions {
            dtype: Some(DType::BF16),
            device: gpu.clone(),
            keep_quantized,
            ..LoadOptions::default()
        };
        model_by(&source, &options).unwrap()
    };
    let prompt = tokens(40);
    // The CPU quantizes activations, and candle in another way, which depends on the number of rows. Random
    // tokens make the difference large, so single logits cannot be compared.
    let mut cpu = model(&source, &Device::Cpu, None, 0);
    let here = logits(&mut *cpu, &prompt, &[40]);
    for keep_quantized in [false, true] {
        for cuts in [&[40][..], &[8, 1, 8, 5, 8, 10]] {
            let there = logits(&mut *model_of(keep_quantized), &prompt, cuts);
            let off = mean_difference(&here, &there);
            println!("SmolLM2 by {cuts:?}, quantized: {keep_quantized}: off by {off:.1e}");
            assert!(off < 0.15, "by {cuts:?}: off by {off}");
        }
    }
    let plain = run(&start(model_of(false), None, 0), greedy(&prompt, 48));
    let drafted = start(model_of(false), Some(model_of(true)), 5);
    let drafted = run(&drafted, greedy(&prompt, 48));
    assert_eq!(drafted.ids(), plain.ids());
    assert!(drafted.spec.accepted > 0);
}
