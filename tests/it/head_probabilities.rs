//! The heads of [`crate::head_fixtures`] compute the probabilities that the libraries of their classes compute.

use crate::architectures::log_softmax;
use crate::common::rig::distance;
use crate::head_fixtures::{Fixture, all, changed, fixtures, load};
use candle_core::{Device, Tensor};
use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, Head, PathRows};
use serde_json::{Value as Json, json};
use std::collections::HashMap;

/// Maximum difference of a log-probability and of a confidence.
const TOLERANCE: f32 = 1e-4;

impl Fixture {
    /// Compares the log-probabilities before the `step`-th token.
    fn compare(&self, step: usize, logits: &[f32]) {
        let found = log_softmax(logits);
        let wanted = &self.logprobs[step];
        let finite = |row: &[f32]| row.iter().map(|x| x.is_finite()).collect::<Vec<bool>>();
        assert_eq!(finite(&found), finite(wanted), "{}", self.name);
        let of = |row: &[f32]| row.iter().map(|x| x.max(-1e3)).collect::<Vec<f32>>();
        let far = distance(&of(&found), &of(wanted));
        assert!(far < TOLERANCE, "{}, token {step}: {far}", self.name);
    }
}

/// A pool for a head, and a table for one sequence in it.
fn pool(head: &dyn Head) -> (KvStore, BlockTable) {
    let mut table = BlockTable::default();
    BlockAllocator::new(16, 4).reserve(&mut table, 64).unwrap();
    (head.new_kv(16, 4).unwrap(), table)
}

/// Token by token; a row has its own outputs of the row before. It follows that row, or is in the place of the last row
/// of the prompt.
fn compare_chain(fixture: &Fixture, head: &mut dyn Head) {
    let (mut kv, table) = pool(head);
    let mut features = head.fuse(&fixture.states(head)).unwrap();
    let (mut context, mut new) = (0, fixture.prompt[1..].to_vec());
    for (step, &next) in fixture.drafted.iter().enumerate() {
        let mut batch = Batch::default();
        if step > 0 && head.drafts_in_place() {
            context = fixture.prompt.len() - 2;
            batch.written = vec![0];
        }
        batch.push_span(&new, &[], context, &table, 4);
        batch.features = Some(features);
        batch.logits = vec![new.len() as u32 - 1];
        let output = head.forward(&batch, &mut kv).unwrap();
        fixture.compare(step, &output.logits.to_vec2::<f32>().unwrap()[0]);
        features = output.features.unwrap();
        context += new.len();
        new = vec![next];
    }
}

/// All at once: the rows of the prompt, and then masks.
fn compare_masked_chain(fixture: &Fixture, head: &mut dyn Head, mask: &Tensor) {
    let (mut kv, table) = pool(head);
    let (depth, block) = (fixture.drafted.len(), head.masked_block().unwrap());
    let known = head.fuse(&fixture.states(head)).unwrap();
    let mut rows = fixture.prompt[1..].to_vec();
    rows.resize(rows.len() + depth - 1, block.mask);
    let mut batch = Batch::default();
    batch.push_span(&rows, &[], 0, &table, 4);
    let masks = mask.repeat((depth - 1, 1)).unwrap();
    batch.features = Some(Tensor::cat(&[known, masks], 0).unwrap());
    batch.logits = ((rows.len() - depth) as u32..rows.len() as u32).collect();
    let output = head.forward(&batch, &mut kv).unwrap();
    for (step, row) in (output.logits.to_vec2().unwrap()).iter().enumerate() {
        fixture.compare(step, row);
    }
}

/// A block after the context, and along the most probable path if the head follows paths.
fn compare_block(fixture: &Fixture, head: &mut dyn Head) {
    let (mut kv, table) = pool(head);
    let (depth, block) = (fixture.drafted.len(), head.masked_block().unwrap());
    assert_eq!(depth, block.max_depth());
    let states = fixture.states(head);
    let (known, rows) = (states.dim(0).unwrap(), block.rows(depth));
    let mut batch = Batch::default();
    batch.push_span(&fixture.prompt[..known], &[], 0, &table, 4);
    batch.context_features = Some(head.fuse(&states).unwrap());
    let mut tokens = vec![block.mask; rows];
    tokens[0] = fixture.prompt[known];
    batch.push_block(&tokens, known, &table, 4);
    let end = (known + rows) as u32;
    batch.logits = (end - depth as u32..end).collect();
    let output = head.forward(&batch, &mut kv).unwrap();
    let (mut before, mut states) = (tokens[0], None);
    for (step, &next) in fixture.drafted.iter().enumerate() {
        let logits = output.logits.narrow(0, step, 1).unwrap();
        if !head.follows_paths() {
            fixture.compare(step, &logits.to_vec2::<f32>().unwrap()[0]);
            continue;
        }
        let hidden = output.path_hidden.as_ref().unwrap();
        let hidden = hidden.narrow(0, step, 1).unwrap();
        let rows = PathRows {
            logits: &logits,
            hidden: &hidden,
            tokens: &[before],
            level: step,
            states: states.as_ref(),
        };
        let found = head.follow(&rows).unwrap();
        fixture.compare(step, &found.logits.to_vec2::<f32>().unwrap()[0]);
        let both = (found.confidence, &fixture.confidence);
        match both {
            (Some(found), Some(wanted)) => {
                let far = (found[0] - wanted[step]).abs();
                assert!(far < TOLERANCE, "{}: confidence {far}", fixture.name);
            }
            (found, wanted) => assert_eq!(found.is_some(), wanted.is_some(), "{}", fixture.name),
        }
        (before, states) = (next, found.states);
    }
}

#[test]
fn probabilities_are_those_of_the_library() {
    for fixture in all() {
        let mut head = fixture.load();
        let mask = head.mask_hidden().map(|hidden| head.fuse(hidden).unwrap());
        match mask {
            Some(mask) => compare_masked_chain(&fixture, &mut *head, &mask),
            None if head.masked_block().is_some() => compare_block(&fixture, &mut *head),
            None => compare_chain(&fixture, &mut *head),
        }
    }
}

/// The same heads with the flat configurations of DFlash's authors and of DeepSpec, which number the outputs of
/// the target's layers.
#[test]
fn flat_configurations_describe_the_same_heads() {
    // Layers with a window are causal unless a flag says otherwise.
    let dflash = |c: &mut Json| {
        c["dflash_config"] = json!({"mask_token_id": 255, "target_layer_ids": [0, 1]});
        c["num_target_layers"] = 2.into();
        "DFlashDraftModel"
    };
    let non_causal = |c: &mut Json| {
        c["is_causal"] = false.into();
        dflash(c)
    };
    let told_vllm = |c: &mut Json| {
        let class = dflash(c);
        c["dflash_config"]["causal"] = false.into();
        class
    };
    let dspark = |c: &mut Json| {
        c["target_layer_ids"] = json!([0, 1]);
        c["mask_token_id"] = 255.into();
        c["num_anchors"] = 512.into();
        "Qwen3DSparkModel"
    };
    let specforge = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "projector_type": "dspark",
            "attention_mode": "gqa", "confidence_head_alpha": 1.0
        });
        for key in [
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ] {
            c["dflash_config"][key] = c[key].take();
        }
        "DSparkDraftModel"
    };
    let dflash2 = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "conv_kernel_size": 3,
            "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6
        });
        "DFlash2DraftModel"
    };
    let domino = |c: &mut Json| {
        c["dflash_config"] = json!({
            "mask_token_id": 255, "target_layer_ids": [0, 1], "projector_type": "domino",
            "emb_dim": 10, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": true
        });
        "DFlashDraftModel"
    };
    type Change<'a> = &'a dyn Fn(&mut Json) -> &'static str;
    let cases: [(&str, Change<'_>); 10] = [
        ("dflash", &dflash),
        ("dflash_windows", &non_causal),
        ("dflash_windows", &told_vllm),
        ("dspark", &specforge),
        ("dspark_gated", &specforge),
        ("dflash2", &dflash2),
        ("domino", &domino),
        ("dspark", &dspark),
        ("dspark_gated", &dspark),
        ("dspark_rnn", &dspark),
    ];
    for (name, change) in cases {
        let to = changed(name, &|c| {
            let mut flat = c["transformer_layer_config"].clone();
            for key in [
                "block_size",
                "confidence_head_with_markov",
                "draft_vocab_size",
                "enable_confidence_head",
                "markov_head_type",
                "markov_rank",
            ] {
                flat[key] = c[key].clone();
            }
            let class = change(&mut flat);
            flat["architectures"] = json!([class]);
            *c = flat;
        });
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        let mut head = load(to.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        compare_block(&fixture, &mut *head);
    }
}

/// Early checkpoints of SpecForge have all that is not DFlash in a container.
#[test]
fn parts_may_be_in_a_container() {
    for (name, parts) in [
        ("domino_specforge", ["prefix_gru.", "embed_proj."]),
        ("dspark", ["markov_head.", "confidence_head."]),
    ] {
        let to = changed(name, &|_| {});
        let file = to.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let moved = stored.into_iter().map(|(name, tensor)| {
            if parts.iter().any(|part| name.starts_with(part)) {
                (format!("logit_head.{name}"), tensor)
            } else {
                (name, tensor)
            }
        });
        let moved: HashMap<String, Tensor> = moved.collect();
        candle_core::safetensors::save(&moved, &file).unwrap();
        let fixture = Fixture::read(fixtures().join("heads").join(name));
        let mut head = load(to.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        compare_block(&fixture, &mut *head);
    }
}
