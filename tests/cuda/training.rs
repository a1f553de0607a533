//! `distill` on a GPU: the target runs there, and the draft becomes what the CPU makes of it.

use super::gpu;
use crate::common::distill_workshop::{Workshop, config, weights, write_target_of};
use candle_core::Tensor;
use foretoken::train::report::DistillReport;
use foretoken::train::{DistillOptions, Method, run};
use half::f16;
use std::fs;
use std::path::Path;

const VOCAB: usize = 32;

fn number(tensor: candle_core::Result<Tensor>) -> f64 {
    f64::from(tensor.unwrap().to_scalar::<f32>().unwrap())
}

/// How far the weights of `a` are from those of `b`, relative to how far these are from those of `start`.
fn distance(a: &Path, b: &Path, start: &Path) -> f64 {
    let [a, b, start] = [a, b, start].map(weights);
    let (mut apart, mut moved) = (0., 0.);
    for (name, b) in &b {
        if !b.dtype().is_float() {
            continue;
        }
        let squares = |other: &Tensor| number((other - b).unwrap().sqr().unwrap().sum_all());
        apart += squares(&a[name]);
        moved += squares(&start[name]);
    }
    assert!(moved > 0.);
    (apart / moved).sqrt()
}

/// The number of stored log-probabilities of two runs that differ by more than rounding, or belong to other ids, and the
/// number of all.
fn stored_apart(a: &DistillOptions, b: &DistillOptions) -> (usize, usize) {
    let k = a.top_k;
    let [a, b] = [a, b].map(|run| fs::read(run.out.join("targets.bin")).unwrap());
    assert_eq!(a.len(), b.len());
    let positions = a.chunks_exact(6 * k + 4).zip(b.chunks_exact(6 * k + 4));
    let apart = positions.map(|(a, b)| {
        let ids = a[..4 * k].chunks(4).zip(b[..4 * k].chunks(4));
        let logs = a[4 * k..6 * k].chunks(2).zip(b[4 * k..6 * k].chunks(2));
        let value = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let differ = |(a, b): (&[u8], &[u8])| (value(a) - value(b)).abs() > 0.02;
        let wrong = ids
            .zip(logs)
            .filter(|&((a, b), logs)| a != b || differ(logs));
        wrong.count()
    });
    (apart.sum(), a.len() / (6 * k + 4) * k)
}

#[test]
fn drafts_and_heads_are_trained_as_on_the_cpu() {
    let _gpu = gpu();
    let shop = Workshop::new();
    // A GPU has kernels for heads of 64 values.
    let with_heads = |mut config: serde_json::Value| {
        config["head_dim"] = 64.into();
        config
    };
    write_target_of(&shop.at("target"), &with_heads(config(VOCAB, 2, false)));
    for method in [Method::Draft, Method::Eagle3, Method::Parallel] {
        let train = |device: &str, steps: usize| -> (DistillOptions, DistillReport) {
            let own = shop.options(&format!("{method:?}-{device}-{steps}"));
            let options = DistillOptions {
                method,
                device: device.into(),
                draft_config: own.draft_config.filter(|_| method == Method::Draft),
                draft_vocab_size: 20,
                taps: if method == Method::Draft {
                    Vec::new()
                } else {
                    vec![1, 2]
                },
                steps,
                micro_batch: None,
                learning_rate: 1e-3,
                overlap_share: 0.3,
                ..shop.options(&format!("{method:?}-{device}-{steps}"))
            };
            let report = run(&options).unwrap();
            (options, report)
        };
        let (start, _) = train("cpu", 1);
        let (here, on_cpu) = train("cpu", 6);
        let (there, on_gpu) = train("cuda", 6);
        let off = distance(&there.out, &here.out, &start.out);
        println!("{method:?}: {off:.1e} of the way apart");
        assert!(off < 0.02, "{method:?}: {off}");
        for (ours, theirs) in [
            (on_gpu.untrained.loss, on_cpu.untrained.loss),
            (on_gpu.trained.loss, on_cpu.trained.loss),
        ] {
            assert!((ours - theirs).abs() < 1e-3, "{method:?}: {ours} {theirs}");
        }
        assert!(on_gpu.trained.loss < on_gpu.untrained.loss);
        let (apart, all) = stored_apart(&there, &here);
        println!("{method:?}: {apart} of {all} stored numbers apart");
        assert!(apart <= all / 100, "{method:?}: {apart} of {all}");
        // What is written can be trained on, on either device.
        let resumed = DistillOptions {
            device: "cpu".into(),
            resume: true,
            ..there
        };
        run(&resumed).unwrap();
    }
}
