//! `foretoken distill --method eagle3` and `parallel`: heads on a tiny target, through the library.

use crate::common::distill_workshop::{
    VOCAB, Workshop, assert_same_weights, load_f32, refused_with, weights,
};
use crate::common::tiny::convert;
use crate::common::{assert_has, assert_idle, chains, fixed_budget, greedy, read_json, sampled};
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::engine::{self, EngineHandle};
use foretoken::model::{Head, HeadKind, LoadOptions, MaskedBlock, ModelSource, load_head};
use foretoken::spec::{BlockDrafter, Drafter};
use foretoken::train::features::Precision;
use foretoken::train::{DistillOptions, Method, Objective, Products, run};
use serde_json::json;
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::symlink;

pub const OUTPUTS: usize = 20;

pub fn options(shop: &Workshop, out: &str) -> DistillOptions {
    DistillOptions {
        method: Method::Eagle3,
        draft_config: None,
        draft_vocab_size: OUTPUTS,
        taps: vec![0, 1, 2],
        ..shop.options(out)
    }
}

#[test]
fn a_head_is_learnt_and_written_in_the_published_layout() {
    let shop = Workshop::new();
    let options = options(&shop, "head");
    let report = run(&options).unwrap();
    println!("{report}");
    assert!(
        report.trained.loss < 0.7 * report.untrained.loss,
        "{report}"
    );
    assert!(
        report.trained.agreement > report.untrained.agreement,
        "{report}"
    );
    assert_eq!(report.depths.len(), 3);
    assert_eq!(report.depths[0], report.trained);
    assert!(report.to_string().contains("token 3"), "{report}");

    let config = read_json(options.out.join("config.json"));
    let wanted = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0, "vocab_size": VOCAB,
        "draft_vocab_size": OUTPUTS, "max_position_embeddings": 64,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "torch_dtype": "float32"
    });
    for (key, value) in wanted.as_object().unwrap() {
        assert_eq!(config[key], *value, "{key}");
    }
    assert!(options.out.join("tokenizer.json").exists());

    let weights = weights(&options.out);
    let dims = |name: &str| weights[name].dims().to_vec();
    assert_eq!(dims("fc.weight"), [32, 96]);
    assert_eq!(dims("midlayer.self_attn.q_proj.weight"), [32, 64]);
    assert_eq!(dims("midlayer.self_attn.k_proj.weight"), [16, 64]);
    assert_eq!(dims("midlayer.hidden_norm.weight"), [32]);
    assert_eq!(dims("lm_head.weight"), [OUTPUTS, 32]);
    assert_eq!(weights.len(), 15);
    // `d2t` and `t2d` are two views of the same ids.
    let offsets = weights["d2t"].to_vec1::<i64>().unwrap();
    let ids: Vec<usize> = (0..).zip(offsets).map(|(i, o)| (i + o) as usize).collect();
    let kept = weights["t2d"].to_vec1::<u8>().unwrap();
    assert_eq!(kept.len(), VOCAB);
    let known: Vec<usize> = (0..VOCAB).filter(|&id| kept[id] == 1).collect();
    assert_eq!(ids, known);
}

pub fn parallel(shop: &Workshop, out: &str) -> DistillOptions {
    DistillOptions {
        method: Method::Parallel,
        taps: vec![1, 2],
        block_size: 4,
        steps: 150,
        ..options(shop, out)
    }
}

/// The head in `out`, on the target of `shop`.
fn served(shop: &Workshop, out: &str) -> Box<dyn Head> {
    let source = if out.ends_with(".gguf") {
        ModelSource::Gguf(shop.at(out).into())
    } else {
        ModelSource::Folder(shop.at(out))
    };
    let kind = HeadKind::of(&source).unwrap().expect("a head");
    let options = LoadOptions::of(DType::F32);
    load_head(&source, kind, &options, &*load_f32(&shop.at("target"))).unwrap()
}

#[test]
fn a_parallel_head_is_learnt_and_serves() {
    let shop = Workshop::new();
    let options = parallel(&shop, "head");
    let report = run(&options).unwrap();
    println!("{report}");
    let (untrained, trained) = (report.untrained, report.trained);
    assert!(trained.loss < 0.8 * untrained.loss, "{report}");
    assert!(trained.agreement > untrained.agreement, "{report}");
    assert_eq!(report.depths.len(), 3);
    assert_eq!(report.depths[0], trained);
    let shown = report.to_string();
    assert!(!shown.contains("were independent"), "{report}");
    // A chain is no longer than what one forward guesses.
    let chain = |k: usize| shown.lines().any(|l| l.starts_with(&format!("{k}    ")));
    assert!(chain(3) && !chain(4), "{report}");

    let config = read_json(options.out.join("config.json"));
    let wanted = json!({
        "architectures": ["DFlashDraftModel"], "hidden_size": 32, "num_hidden_layers": 2,
        "head_dim": 8, "vocab_size": VOCAB, "draft_vocab_size": OUTPUTS,
        "block_size": 4, "num_target_layers": 2, "markov_rank": 64,
        "dflash_config": { "target_layer_ids": [0, 1], "mask_token_id": 31 }
    });
    for (key, value) in wanted.as_object().unwrap() {
        assert_eq!(config[key], *value, "{key}");
    }
    let weights = weights(&options.out);
    assert_eq!(weights["fc.weight"].dims(), [32, 64]);
    assert_eq!(weights["layers.1.self_attn.k_proj.weight"].dims(), [16, 32]);
    assert_eq!(weights["lm_head.weight"].dims(), [OUTPUTS, 32]);
    assert_eq!(weights["markov_head.markov_w1.weight"].dims(), [VOCAB, 64]);
    let expected = [OUTPUTS, 64];
    assert_eq!(weights["markov_head.markov_w2.weight"].dims(), expected);
    assert_eq!(weights.len(), 5 + 2 * 9 + 2);

    let head = served(&shop, "head");
    assert_eq!(head.reads(), [1, 2]);
    let block = MaskedBlock {
        size: 4,
        mask: 31,
        from_anchor: false,
    };
    assert_eq!(head.masked_block(), Some(block));
    let start = |drafter: Option<Box<dyn Drafter>>| {
        let options = fixed_budget(chains(if drafter.is_some() { 3 } else { 0 }));
        let target = load_f32(&shop.at("target"));
        engine::spawn(target, drafter, 32, 4, options).unwrap()
    };
    let plain = start(None);
    let accepted = |head: Box<dyn Head>| {
        let drafter = BlockDrafter::new(head, 32, 4, 64).unwrap();
        accepted_tokens(&plain, &start(Some(Box::new(drafter))))
    };
    let of_folder = accepted(head);
    assert!(of_folder[0] > 0 && of_folder[1] > 0, "{of_folder:?}");

    convert(&options.out, shop.at("head/f32.gguf"), GgmlDType::F32).unwrap();
    assert_eq!(accepted(served(&shop, "head/f32.gguf")), of_folder);

    // What the evaluation measured goes with the head into both formats.
    for out in ["head", "head/f32.gguf"] {
        let head = served(&shop, out);
        let rates = head.rates().expect("the rates of the evaluation");
        let measured: Vec<f64> = report.depths.iter().map(|depth| depth.agreement).collect();
        let differs = |(rate, measured): (&f32, &f64)| (f64::from(*rate) - measured).abs() > 1e-4;
        let mut both = rates.greedy.iter().zip(&measured);
        assert!(
            both.len() == 3 && !both.any(differs),
            "{rates:?}, {measured:?}"
        );
        assert_eq!(rates.sampled.len(), 3);
    }
}

/// How many draft tokens of greedy and of sampled requests `fast` accepts, whose texts are those of `plain`.
fn accepted_tokens(plain: &EngineHandle, fast: &EngineHandle) -> [usize; 2] {
    let mut accepted = [0, 0];
    for first in 0..8 {
        let requests = [
            greedy(&[first, first + 3, 1], 24),
            sampled(&[first, 2], 24, u64::from(first)),
        ];
        for (request, accepted) in requests.into_iter().zip(&mut accepted) {
            let answer = crate::common::run(fast, request.clone());
            assert_eq!(answer.ids(), crate::common::run(plain, request).ids());
            *accepted += answer.spec.accepted;
        }
    }
    assert_idle(fast);
    accepted
}

/// Without a Markov head it is DFlash's layout alone.
#[test]
fn a_parallel_head_may_do_without_a_markov_head() {
    let shop = Workshop::new();
    let options = DistillOptions {
        markov_rank: Some(0),
        steps: 2,
        ..parallel(&shop, "head")
    };
    let report = run(&options).unwrap().to_string();
    assert_has(&report, &["guesses of a block were independent"]);
    assert_eq!(weights(&options.out).len(), 5 + 2 * 9);
    let config = fs::read_to_string(options.out.join("config.json")).unwrap();
    assert!(!config.contains("markov"), "{config}");
    // What it begins with decides, if no flag does.
    let next = DistillOptions {
        init_from: Some(options.out),
        markov_rank: None,
        ..parallel(&shop, "next")
    };
    run(&DistillOptions { steps: 1, ..next }).unwrap();
    assert_eq!(weights(&shop.at("next")).len(), 5 + 2 * 9);
}

/// A mask token is one that the corpus does not contain, at best a special one.
#[test]
fn the_mask_token_is_an_id_that_means_nothing_else() {
    let shop = Workshop::new();
    let mask = |options: &DistillOptions| {
        let options = DistillOptions {
            steps: 1,
            ..options.clone()
        };
        run(&options).unwrap();
        let name = options.out.file_name().unwrap().to_str().unwrap();
        served(&shop, name).masked_block().unwrap().mask
    };
    let mut first = parallel(&shop, "first");
    first.mask_token_id = Some(27);
    assert_eq!(mask(&first), 27);
    // A head that begins with another keeps its mask token.
    let mut second = parallel(&shop, "second");
    second.init_from = Some(shop.at("first"));
    assert_eq!(mask(&second), 27);
    // The special tokens are in the corpus: the last id that is not.
    let corpus = fs::read_to_string(shop.at("corpus.jsonl")).unwrap();
    let corpus = corpus.replace("\"prompt_ids\":[", "\"prompt_ids\":[31,");
    fs::write(shop.at("corpus.jsonl"), corpus).unwrap();
    assert_eq!(mask(&parallel(&shop, "third")), 29);
}

#[test]
fn a_parallel_head_trained_in_sessions_equals_one_trained_at_once() {
    let shop = Workshop::new();
    let mut whole = parallel(&shop, "whole");
    whole.steps = 12;
    let at_once = run(&whole).unwrap();
    let mut parts = whole.clone();
    parts.out = shop.at("parts");
    parts.stop_after = Some(5);
    run(&parts).unwrap();
    parts.resume = true;
    parts.stop_after = None;
    let report = run(&parts).unwrap();
    assert_eq!(report.depths, at_once.depths);
    assert_same_weights(&whole.out, &parts.out);
    let with = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = parts.clone();
        change(&mut options);
        options
    };
    refused_with(&with(&|o| o.block_size = 3), "block-size was 4");
    refused_with(&with(&|o| o.mask_token_id = Some(28)), "mask_token_id");
    refused_with(
        &with(&|o| (o.method, o.taps) = (Method::Eagle3, vec![1, 2])),
        "method was",
    );
}

#[test]
fn a_head_trained_in_sessions_equals_one_trained_at_once() {
    for features in [Precision::F16, Precision::Int8] {
        let shop = Workshop::new();
        let mut whole = options(&shop, "whole");
        (whole.steps, whole.features) = (12, features);
        let at_once = run(&whole).unwrap();
        let mut parts = whole.clone();
        parts.out = shop.at("parts");
        parts.stop_after = Some(5);
        run(&parts).unwrap();
        // The rest of the hidden states is computed again.
        let file = shop.at("parts").join("features-00000.bin");
        let bytes = file.metadata().unwrap().len();
        let stored = fs::OpenOptions::new().write(true).open(&file).unwrap();
        stored.set_len(bytes / 2).unwrap();
        parts.resume = true;
        parts.stop_after = None;
        let report = run(&parts).unwrap();
        assert_eq!(file.metadata().unwrap().len(), bytes);
        assert_eq!(report.depths, at_once.depths);
        assert_same_weights(&whole.out, &parts.out);

        let other = DistillOptions {
            ttt_steps: 2,
            ..parts
        };
        refused_with(&other, "ttt-steps was 3");
    }
}

/// What the target computed for one run serves others by links, and none of them empties it.
#[cfg(unix)]
#[test]
fn linked_files_of_another_run_stay_as_they_are() {
    const NOTES: [&str; 2] = ["features.json", "targets.json"];
    const VALUES: [&str; 2] = ["features-00000.bin", "targets.bin"];
    let shop = Workshop::new();
    let first = DistillOptions {
        steps: 2,
        ..options(&shop, "first")
    };
    run(&first).unwrap();
    let stored =
        || [NOTES, VALUES].map(|two| two.map(|file| fs::read(first.out.join(file)).unwrap()));
    let before = stored();
    for kind in ["hard", "symbolic"] {
        let linked = |name: &str, files: &[&str]| {
            let out = shop.at(&format!("{name}-{kind}"));
            fs::create_dir(&out).unwrap();
            for file in files {
                let (from, to) = (first.out.join(file), out.join(file));
                let linked = match kind {
                    "hard" => fs::hard_link(from, to),
                    _ => symlink(from, to),
                };
                linked.unwrap();
            }
            DistillOptions {
                out,
                resume: true,
                ..first.clone()
            }
        };
        let all = [NOTES, VALUES].concat();
        let same = DistillOptions {
            steps: 3,
            ..linked("same", &all)
        };
        run(&same).unwrap();
        assert!(stored() == before, "{kind}: the same");
        let other = DistillOptions {
            features: Precision::Int8,
            ..linked("other", &all)
        };
        refused_with(&other, "features.json, but is");
        assert!(stored() == before, "{kind}: another format");
        // Without a note nobody knows what the values belong to.
        let afresh = DistillOptions {
            features: Precision::Int8,
            top_k: 4,
            ..linked("afresh", &VALUES)
        };
        run(&afresh).unwrap();
        assert!(stored() == before, "{kind}: afresh");
    }
}

/// Fewer drafts a step and rounded products teach about the same, in sessions, too.
#[test]
fn a_head_is_learnt_from_some_drafts_and_rounded_products() {
    let shop = Workshop::new();
    let plain = run(&options(&shop, "plain")).unwrap();
    let cheap = DistillOptions {
        ttt_stride: 3,
        products: Products::Bf16,
        ..options(&shop, "cheap")
    };
    let report = run(&cheap).unwrap();
    for (depth, of_plain) in report.depths.iter().zip(&plain.depths) {
        let off = (depth.loss - of_plain.loss).abs();
        assert!(off > 0.0 && off < 0.1 * of_plain.loss, "{report}\n{plain}");
    }
    let sessions = DistillOptions {
        out: shop.at("sessions"),
        stop_after: Some(7),
        ..cheap.clone()
    };
    run(&sessions).unwrap();
    let rest = DistillOptions {
        resume: true,
        stop_after: None,
        ..sessions
    };
    run(&rest).unwrap();
    assert_same_weights(&cheap.out, &rest.out);
    let other = DistillOptions {
        ttt_stride: 2,
        ..rest
    };
    refused_with(&other, "ttt-stride was 3");
}

#[test]
fn what_a_head_cannot_be_is_refused_in_one_line() {
    let shop = Workshop::new();
    let with = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = options(&shop, "out");
        change(&mut options);
        options
    };
    refused_with(
        &with(&|o| o.objective = Objective::CrossEntropy),
        "--objective must be kl",
    );
    refused_with(&with(&|o| o.taps = vec![0, 3]), "--taps must be layers");
    refused_with(&with(&|o| o.taps = vec![1, 1]), "--taps must be layers");
    refused_with(
        &with(&|o| o.ttt_steps = 15),
        "--seq-len must be at least 17",
    );
    refused_with(&with(&|o| o.device = "cuda".into()), "cuda");
    refused_with(&with(&|o| o.layers = Some(2)), "--layers belongs to");
    let of_draft = |o: &mut DistillOptions| {
        (o.method, o.products) = (Method::Draft, Products::Bf16);
    };
    refused_with(&with(&of_draft), "--products bf16 belongs to");
    let of_draft = |o: &mut DistillOptions| (o.method, o.ttt_stride) = (Method::Draft, 2);
    refused_with(&with(&of_draft), "--ttt-stride belongs to");
    refused_with(&with(&|o| o.mask_token_id = Some(2)), "--mask-token-id");
    let of_blocks = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = parallel(&shop, "out");
        change(&mut options);
        options
    };
    refused_with(
        &of_blocks(&|o| o.taps = vec![0, 1]),
        "--taps must be from 1",
    );
    refused_with(
        &of_blocks(&|o| o.block_size = 16),
        "--seq-len must be at least 17",
    );
    refused_with(
        &of_blocks(&|o| o.mask_token_id = Some(VOCAB as u32)),
        "--mask-token-id must be below 32",
    );
    refused_with(
        &of_blocks(&|o| o.objective = Objective::CrossEntropy),
        "--method parallel learns",
    );
    let mut narrow = read_json(shop.at("draft.json"));
    narrow["hidden_size"] = 16.into();
    fs::write(shop.at("narrow.json"), narrow.to_string()).unwrap();
    let narrow = shop.at("narrow.json");
    refused_with(
        &with(&|o| o.draft_config = Some(narrow.clone())),
        "has hidden_size 16",
    );
    refused_with(
        &with(&|o| {
            o.method = Method::Draft;
        }),
        "needs --draft-size tiny or small, or --draft-config",
    );
}
