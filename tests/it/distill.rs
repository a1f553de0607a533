//! `foretoken distill`: tiny pairs that train in seconds, through the library and through the binary.

use crate::common::distill_workshop::{
    EOS, VOCAB, Workshop, assert_same_weights, config, load_f32, refused_with, served_logits,
    weights,
};
#[cfg(target_os = "linux")]
use crate::common::process::full_disk;
use crate::common::rig::distance;
use crate::common::tiny::convert;
use crate::common::{
    assert_idle, chains, fixed_budget, greedy, read_json, run as answered, sampled,
};
use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use foretoken::engine::{self, EngineOptions};
use foretoken::kernels;
use foretoken::model::ModelConfig;
use foretoken::spec::{DraftModel, Drafter};
use foretoken::text::{Text, check_same_tokens};
use foretoken::train::model::TrainModel;
use foretoken::train::report::DistillReport;
use foretoken::train::{DistillOptions, DraftSize, Objective, run};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn the_target_is_learnt_and_the_draft_serves() {
    let shop = Workshop::new();
    let options = shop.options("out");
    let report = run(&options).unwrap();
    let DistillReport {
        untrained, trained, ..
    } = &report;
    println!("{report}");
    assert!(trained.loss < 0.8 * untrained.loss, "{report}");
    let [least, most] = trained.overlap;
    assert!(
        least > untrained.overlap[0] + 0.1 && most >= least,
        "{report}"
    );
    assert!(most > untrained.overlap[1] + 0.1, "{report}");
    assert!(trained.agreement > untrained.agreement + 0.1, "{report}");
    assert!(report.costs.as_ref().is_some_and(|costs| costs.draft > 0.0));
    // Everyone who can read the config can read the weights.
    let permissions = |file: &str| {
        let file = options.out.join(file);
        file.metadata().unwrap().permissions()
    };
    assert_eq!(permissions("model.safetensors"), permissions("config.json"));

    // The output folder is a model with the target's tokenizer.
    let texts = [&shop.at("target"), &options.out].map(|f| Text::from_folder(f).unwrap());
    check_same_tokens(&texts[0], &texts[1]).unwrap();
    assert!(texts[1].has_chat_template());
    let tokens: Vec<u32> = (0..16).map(|i| i * 7 % 29).collect();
    let served = served_logits(&options.out, &tokens);

    let shape = ModelConfig::from_json(&options.out).unwrap();
    let model = TrainModel::new(shape, None, 99, 16, &Device::Cpu).unwrap();
    let saved = weights(&options.out);
    model.set(|name| saved.get(name).cloned()).unwrap();
    let input = Tensor::new(vec![tokens.clone()], &Device::Cpu).unwrap();
    let trained = model.forward(&input).unwrap().to_vec2::<f32>().unwrap();
    for (served, trained) in served.iter().zip(&trained) {
        assert!(distance(served, trained) < 1e-3, "{served:?} {trained:?}");
    }
}

#[test]
fn all_chat_templates_of_the_target_are_copied() {
    let shop = Workshop::new();
    let target = shop.at("target");
    let of_draft = |out: &str| {
        let mut options = shop.options(out);
        options.steps = 1;
        run(&options).unwrap();
        let text = Text::from_folder(&options.out).unwrap();
        let sources = [text.chat_template(), text.tool_template()];
        sources.map(|source| source.map(str::to_owned))
    };
    let named = |source: &str| Some(source.to_owned());
    // That of a processor of images.
    let config = json!({"eos_token": "<|end|>"}).to_string();
    fs::write(target.join("tokenizer_config.json"), config).unwrap();
    let of_processor = json!({"chat_template": "of a processor"}).to_string();
    fs::write(target.join("chat_template.json"), of_processor).unwrap();
    assert_eq!(of_draft("processor"), [named("of a processor"), None]);

    fs::write(target.join("chat_template.jinja"), "of chats").unwrap();
    let more = target.join("additional_chat_templates");
    fs::create_dir(&more).unwrap();
    fs::write(more.join("tool_use.jinja"), "of tools").unwrap();
    assert_eq!(of_draft("tools"), [named("of chats"), named("of tools")]);
}

#[test]
fn a_run_can_begin_with_the_weights_of_another() {
    let shop = Workshop::new();
    let first = run(&shop.options("first")).unwrap();
    let mut options = shop.options("second");
    options.init_from = Some(shop.at("first"));
    options.steps = 5;
    let second = run(&options).unwrap();
    assert_eq!(second.untrained, first.trained);
    assert_ne!(second.trained, second.untrained);

    // A draft with twice the layers starts with those of the first one, stacked.
    let deep = |layers| {
        fs::write(
            shop.at("draft.json"),
            config(VOCAB, layers, true).to_string(),
        )
    };
    deep(2).unwrap();
    options.out = shop.at("third");
    options.steps = 1;
    options.learning_rate = 1e-12;
    options.weight_decay = 0.;
    run(&options).unwrap();
    let (one, two) = (weights(&shop.at("first")), weights(&shop.at("third")));
    for (name, stacked) in &two {
        let below = name.replace("layers.1.", "layers.0.");
        let difference = (stacked - &one[&below]).unwrap().abs().unwrap();
        let largest: f32 = difference.max_all().unwrap().to_scalar().unwrap();
        assert!(largest < 1e-9, "{name} is {largest} from {below}");
    }

    // Weights of another shape are refused, and those of more layers, of which some would get lost.
    deep(3).unwrap();
    options.out = shop.at("fourth");
    refused_with(&options, "model.layers.1");
    deep(1).unwrap();
    options.init_from = Some(shop.at("third"));
    refused_with(&options, "it has 2 layers");
}

/// A draft whose vocabulary is only some ids: it is served as it was trained, from a folder and from a
/// GGUF file, and greedy texts are the target's.
#[test]
fn a_draft_of_few_ids_is_learnt_and_serves() {
    const SAID: usize = 14;
    let shop = Workshop::new();
    let mut shape = config(VOCAB, 1, true);
    shape["draft_vocab_size"] = SAID.into();
    fs::write(shop.at("draft.json"), shape.to_string()).unwrap();
    let options = shop.options("out");
    let report = run(&options).unwrap();
    let (untrained, trained) = (report.untrained, report.trained);
    assert!(trained.loss < untrained.loss - 0.1, "{report}");
    assert!(trained.overlap[0] > untrained.overlap[0] + 0.05, "{report}");

    let tokens: Vec<u32> = (0..16).map(|i| i * 7 % 29).collect();
    let served = served_logits(&options.out, &tokens);
    let offsets = weights(&options.out)["d2t"].to_vec1::<i64>().unwrap();
    let ids: Vec<i64> = (0..).zip(offsets).map(|(i, offset)| i + offset).collect();
    assert!(ids.is_sorted() && ids.len() == SAID && ids.contains(&i64::from(EOS)));
    for row in &served {
        assert_eq!(row.len(), VOCAB);
        for (id, logit) in (0..).zip(row) {
            assert_eq!(logit.is_finite(), ids.contains(&id), "{id}: {logit}");
        }
    }
    let file = convert(&options.out, shop.at("draft.gguf"), GgmlDType::F32).unwrap();
    assert_eq!(served_logits(&file, &tokens), served);

    let start = |draft: Option<&Path>| {
        let drafter = draft.map(|path| {
            let model = DraftModel::new(load_f32(path), 32, 4, 64).unwrap();
            Box::new(model) as Box<dyn Drafter>
        });
        let options = EngineOptions {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            ..fixed_budget(chains(if drafter.is_some() { 3 } else { 0 }))
        };
        engine::spawn(load_f32(&shop.at("target")), drafter, 32, 4, options).unwrap()
    };
    let (plain, fast) = (start(None), start(Some(&file)));
    let (mut accepted, mut accepted_sampled, mut beyond_draft) = (0, 0, 0);
    for first in 0..8 {
        let request = || greedy(&[first, first + 3, 1], 24);
        let answer = answered(&fast, request());
        assert_eq!(answer.ids(), answered(&plain, request()).ids());
        accepted += answer.spec.accepted;
        // Sampled texts also contain ids outside the draft's vocabulary, and are drafted nevertheless.
        let seed = u64::from(first);
        let sampled = answered(&fast, sampled(&[first, 2], 24, seed));
        accepted_sampled += sampled.spec.accepted;
        let mut said = sampled.ids().into_iter().map(i64::from);
        beyond_draft += usize::from(said.any(|id| !ids.contains(&id)));
    }
    assert!(accepted > 0 && accepted_sampled > 0);
    assert!(beyond_draft > 0, "all texts are of ids that the draft has");
    assert_idle(&fast);
}

/// With grouped heads, several rows, a separate output layer and Llama 3's frequencies.
#[test]
fn training_computes_what_serving_computes() {
    let folder = tempfile::tempdir().unwrap();
    let mut shape = config(VOCAB, 2, false);
    shape["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16
    });
    fs::write(folder.path().join("config.json"), shape.to_string()).unwrap();
    let shape = ModelConfig::from_json(folder.path()).unwrap();
    let model = TrainModel::new(shape, None, 1, 40, &Device::Cpu).unwrap();
    let larger = |name: &str| {
        model
            .vars()
            .get(name)
            .map(|v| (v.as_tensor() * 9.0).unwrap())
    };
    model.set(larger).unwrap();
    let tensors = model
        .vars()
        .iter()
        .map(|(n, v)| (n.clone(), v.as_tensor().clone()));
    let file = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors.collect(), file).unwrap();

    let rows: Vec<Vec<u32>> = (0..2u32)
        .map(|r| (0..40).map(|i| (i * i + 3 * r) % VOCAB as u32).collect())
        .collect();
    let input = Tensor::new(rows.clone(), &Device::Cpu).unwrap();
    let trained = model.forward(&input).unwrap().to_vec2::<f32>().unwrap();
    let served = rows
        .iter()
        .flat_map(|row| served_logits(folder.path(), row));
    let mut largest = 0f32;
    for (served, trained) in served.zip(&trained) {
        largest = served.iter().fold(largest, |l, z| l.max(z.abs()));
        assert!(distance(&served, trained) < 1e-3);
    }
    assert!(largest > 0.5, "logits that say something: {largest}");
}

#[test]
fn a_size_is_a_shape() {
    let shop = Workshop::new();
    let options = DistillOptions {
        draft_config: None,
        draft_size: Some(DraftSize::Tiny),
        steps: 2,
        ..shop.options("sized")
    };
    run(&options).unwrap();
    let json = read_json(options.out.join("config.json"));
    assert_eq!(json["hidden_size"], 256);
    assert_eq!(json["num_hidden_layers"], 2);
    let neither = DistillOptions {
        draft_size: None,
        out: shop.at("neither"),
        ..options
    };
    refused_with(
        &neither,
        "needs --draft-size tiny or small, or --draft-config",
    );
}

#[test]
fn plain_text_is_learnt_with_a_tokenizer_alone() {
    let shop = Workshop::new();
    for file in ["model.safetensors", "config.json"] {
        fs::remove_file(shop.at("target").join(file)).unwrap();
    }
    let mut options = shop.options("out");
    options.objective = Objective::CrossEntropy;
    // Two files, one of each kind; the texts of the first one go through the chat template.
    options.corpus.push(shop.at("corpus.txt"));
    options.retokenize = true;
    let report = run(&options).unwrap();
    println!("{report}");
    assert!(report.untrained.loss > 3.0, "about ln 32: {report}");
    assert!(
        report.trained.loss < 0.6 * report.untrained.loss,
        "{report}"
    );
    assert!(report.costs.is_none());
    assert!(report.to_string().contains("perplexity"));
    served_logits(&options.out, &[1, 2, 3]);
}

#[test]
fn invalid_options_are_refused_in_one_line() {
    let shop = Workshop::new();
    let options = shop.options("out");
    let with = |change: &dyn Fn(&mut DistillOptions)| {
        let mut options = options.clone();
        change(&mut options);
        options
    };
    let write = |name: &str, text: &str| {
        fs::write(shop.at(name), text).unwrap();
        shop.at(name)
    };
    let wide = write("wide.json", &config(VOCAB + 1, 1, true).to_string());
    refused_with(
        &with(&|o| o.draft_config = Some(wide.clone())),
        "vocab_size is 33",
    );
    let mut qwen = config(VOCAB, 1, true);
    qwen["architectures"] = json!(["Qwen2ForCausalLM"]);
    let qwen = write("qwen.json", &qwen.to_string());
    refused_with(
        &with(&|o| o.draft_config = Some(qwen.clone())),
        "only llama",
    );
    refused_with(
        &with(&|o| o.draft_config = Some(shop.at("no.json"))),
        "no.json",
    );
    refused_with(&with(&|o| o.seq_len = 65), "lower --seq-len");
    refused_with(&with(&|o| o.top_k = 33), "--top-k");
    let empty = write("empty.txt", " \n\n");
    refused_with(&with(&|o| o.corpus = vec![empty.clone()]), "fills 0 rows");
    refused_with(&with(&|o| o.corpus = vec![shop.at("no.txt")]), "no.txt");
    let broken = write("broken.jsonl", "\n{\"id\": 1}");
    refused_with(&with(&|o| o.corpus = vec![broken.clone()]), "line 2");
    let line = json!({"prompt": "", "prompt_ids": [1], "text": "", "ids": [99], "finish_reason": "length"});
    let foreign = write("foreign.jsonl", &line.to_string());
    refused_with(&with(&|o| o.corpus = vec![foreign.clone()]), "token id 99");
    refused_with(&with(&|o| o.out = shop.at("draft.json")), "draft.json");
    refused_with(
        &with(&|o| o.model = shop.at("nothing").display().to_string()),
        "nothing",
    );
}

/// Uses `/dev/full`, which only Linux has.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_line() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.steps = 1;
    run(&options).unwrap();
    for file in ["checkpoint.safetensors", "model.safetensors", "targets.bin"] {
        fs::remove_file(options.out.join(file)).unwrap();
    }
    std::os::unix::fs::symlink("/dev/full", options.out.join("targets.bin")).unwrap();
    options.resume = true;
    refused_with(&options, "No space left");

    fs::create_dir(shop.at("other")).unwrap();
    let part = shop.at("other/config.json.part");
    std::os::unix::fs::symlink("/dev/full", part).unwrap();
    refused_with(&shop.options("other"), "cannot write");
}

pub fn binary(shop: &Workshop, out: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foretoken"));
    command
        .arg("distill")
        .arg("--model")
        .arg(shop.at("target"))
        .arg("--draft-config")
        .arg(shop.at("draft.json"))
        .arg("--out")
        .arg(shop.at(out))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The model is written although nothing can be said about it, and then it is said that nothing could be.
#[cfg(target_os = "linux")]
#[test]
fn a_full_stdout_loses_no_model() {
    let shop = Workshop::new();
    let corpus = shop.at("corpus.jsonl").display().to_string();
    let flags = format!("--corpus {corpus} --objective ce --seq-len 16 --batch-size 4 --steps 2");
    let mut command = binary(&shop, "out");
    command.args(flags.split_whitespace());
    let (code, stderr) = exit(command.stdout(full_disk()));
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("cannot write to stdout"), "{stderr}");
    assert!(shop.at("out/model.safetensors").is_file());
}

fn exit(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn the_binary_refuses_with_one_line_and_exit_code_2() {
    let shop = Workshop::new();
    let corpus = shop.at("corpus.jsonl").display().to_string();
    for (flags, needle) in [
        (format!("--corpus {corpus} --holdout 1"), "--holdout"),
        (
            format!("--corpus {corpus} --learning-rate 0"),
            "--learning-rate",
        ),
        (format!("--corpus {corpus} --steps 0"), "--steps"),
        (format!("--corpus {corpus} --objective mse"), "mse"),
        (format!("--corpus {corpus} --seq-len 100"), "--seq-len"),
        (String::new(), "--corpus"),
    ] {
        let (code, stderr) = exit(binary(&shop, "out").args(flags.split_whitespace()));
        assert_eq!(code, Some(2), "{flags}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{flags}: {stderr}");
        assert!(stderr.contains(needle), "{flags}: {stderr}");
    }
}

/// The threads are those of the process, which has some by now.
#[test]
fn other_threads_than_those_of_the_process_are_refused() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    let threads = kernels::threads() + 1;
    options.threads = Some(threads);
    refused_with(&options, &format!("--threads {threads} is not possible"));
    assert!(!options.out.exists());
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let shop = Workshop::new();
    let corpus = shop.at("corpus.jsonl").display().to_string();
    let flags = format!(
        "--corpus {corpus} --top-k 8 --seq-len 16 --batch-size 4 --steps 12 --learning-rate 1e-2 --threads"
    );
    for threads in ["1", "3"] {
        let mut command = binary(&shop, threads);
        let (code, stderr) = exit(command.args(flags.split_whitespace()).arg(threads));
        assert_eq!(code, Some(0), "{stderr}");
    }
    assert_same_weights(&shop.at("1"), &shop.at("3"));
}
