//! Self-drafting: the target with layers left out drafts for itself, over the same weights.

use crate::common::assert_has;
use crate::common::process::{foretoken, refusal};
use crate::common::rig::smollm2_path;
use crate::common::tiny::{self, llama_config, logits, open, short_prompt, tensors};
use crate::translate::serve;
use candle_core::DType;

/// A subset of the layers computes what a checkpoint of only these layers computes, bit for bit, with
/// a pool of only these layers.
#[test]
fn a_subset_is_the_model_of_these_layers() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = |layers: &[usize]| {
        let mut config = llama_config(16);
        config["num_hidden_layers"] = layers.len().into();
        let all = tensors(16, DType::F32);
        let rename = |name: &String| -> Option<String> {
            let Some(rest) = name.strip_prefix("model.layers.") else {
                return Some(name.clone());
            };
            let (layer, part) = rest.split_once('.')?;
            let place = layers.iter().position(|at| at.to_string() == layer)?;
            Some(format!("model.layers.{place}.{part}"))
        };
        let kept = all
            .iter()
            .filter_map(|(name, w)| Some((rename(name)?, w.clone())));
        let path = folder.path().join(format!("{layers:?}"));
        std::fs::create_dir(&path).unwrap();
        tiny::write_config(&path, &config);
        tiny::write_shards(&path, &kept.collect());
        open(&path).unwrap()
    };
    let prompt = short_prompt(40);
    let model = checkpoint(&[0, 1]);
    let bytes = model.kv_shape().bytes_per_token();
    let subset = |layers: &[usize]| model.subset(layers).unwrap();
    assert_eq!(subset(&[1]).kv_shape().bytes_per_token(), bytes / 2);
    assert_eq!(subset(&[1]).config().num_layers(), 1);
    let first = logits(subset(&[0]), &prompt);
    let last = logits(subset(&[1]), &prompt);
    assert_eq!(first, logits(checkpoint(&[0]), &prompt));
    assert_eq!(last, logits(checkpoint(&[1]), &prompt));
    assert_ne!(first, last);
    let both = logits(subset(&[0, 1]), &prompt);
    for wrong in [&[][..], &[2], &[1, 0], &[1, 1]] {
        assert!(model.subset(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(both, logits(model, &prompt));
}

/// As a user runs it: no text changes.
#[test]
fn smollm2_drafts_for_itself() {
    let model = smollm2_path();
    let flags = format!("--model {} --drafter self", model.display());
    let (log, rates) = serve(&format!("{flags} --draft-layers 0-14,20-29"));
    assert!(
        log.contains("layers 0-14,20-29 of the target's 30"),
        "{log}"
    );
    assert!(rates[0] > 0.1 && rates[1] > 0.05, "{rates:?}");
    let output = foretoken()
        .args(flags.split_whitespace())
        .args(["--draft-layers", "0-3,28-30"])
        .output();
    let error = refusal(&output.unwrap());
    assert_has(
        &error,
        &["--draft-layers 0-3,28-30: the model has the layers 0-29"],
    );
}
