//! Runs of `foretoken distill` that end before their last step, and what is kept of them.

use crate::common::assert_has;
use crate::common::distill_workshop::{
    VOCAB, Workshop, assert_same_weights, config, refused, refused_with,
};
use crate::distill::binary;
use foretoken::train::{DistillOptions, Method, run};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

#[test]
fn a_run_in_three_sessions_equals_an_uninterrupted_run() {
    let shop = Workshop::new();
    let mut whole = shop.options("whole");
    whole.steps = 25;
    let at_once = run(&whole).unwrap();

    let mut parts = whole.clone();
    parts.out = shop.at("parts");
    parts.stop_after = Some(7);
    run(&parts).unwrap();
    parts.resume = true;
    run(&parts).unwrap();
    let report = run(&DistillOptions {
        stop_after: None,
        ..parts.clone()
    })
    .unwrap();
    assert_eq!(report.steps, 25);
    // The first figures were read from a file.
    let far = report.untrained.loss - at_once.untrained.loss;
    assert!(far.abs() < 1e-12, "{far}");
    assert_eq!(report.trained, at_once.trained);
    assert_same_weights(&whole.out, &parts.out);

    // Other settings cannot continue the run, and an earlier run is not overwritten.
    let other = DistillOptions {
        seed: 4,
        ..parts.clone()
    };
    refused_with(&other, "seed was 3");
    refused_with(&whole, "add --resume");
    assert_same_weights(&whole.out, &parts.out);
}

/// The files of a folder, and what is in them.
fn contents(folder: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(Result::unwrap);
    files
        .map(|file| (file.file_name(), fs::read(file.path()).unwrap()))
        .collect()
}

/// A run is refused before it writes: what the target computed may have taken hours.
#[test]
fn a_run_that_cannot_be_resumed_changes_no_file() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.steps = 6;
    options.stop_after = Some(2);
    run(&options).unwrap();
    options.resume = true;
    let before = contents(&options.out);
    let unchanged = |change: &dyn Fn(&mut DistillOptions), needle: &str| {
        let mut other = options.clone();
        change(&mut other);
        refused_with(&other, needle);
        assert!(contents(&options.out) == before, "{needle}");
    };
    unchanged(&|o| o.top_k = 4, "top-k was 8 in the checkpoint's run");
    unchanged(&|o| o.micro_batch = Some(2), "micro-batch was 3");
    unchanged(&|o| o.revision = Some("v2".into()), "revision was null");
    fs::write(shop.at("deep.json"), config(VOCAB, 2, true).to_string()).unwrap();
    let deep = |o: &mut DistillOptions| o.draft_config = Some(shop.at("deep.json"));
    unchanged(&deep, "draft-config was");
    run(&options).unwrap();
}

/// It would begin at the first step, and end with another draft in place of the finished one.
#[test]
fn a_draft_without_a_checkpoint_is_not_overwritten() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.steps = 2;
    run(&options).unwrap();
    fs::remove_file(options.out.join("checkpoint.safetensors")).unwrap();
    let before = contents(&options.out);
    options.resume = true;
    refused_with(&options, "no checkpoint.safetensors to resume from");
    assert!(contents(&options.out) == before);
}

/// As above, while there is no checkpoint yet.
#[test]
fn what_the_target_computed_for_other_settings_is_kept() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.steps = 1;
    run(&options).unwrap();
    for file in ["checkpoint.safetensors", "model.safetensors"] {
        fs::remove_file(options.out.join(file)).unwrap();
    }
    let before = contents(&options.out);
    options.resume = true;
    options.top_k = 4;
    refused_with(&options, "targets.json, but is 4 now");
    // Not even the hidden states that another method wants are begun.
    let parallel = DistillOptions {
        method: Method::Parallel,
        draft_config: None,
        taps: vec![1, 2],
        block_size: 4,
        ..options.clone()
    };
    refused_with(&parallel, "targets.json, but is 4 now");
    assert!(contents(&options.out) == before);
    fs::write(options.out.join("targets.json"), "{").unwrap();
    refused_with(&options, "targets.json: ");
    fs::write(
        options.out.join("targets.json"),
        &before[&OsString::from("targets.json")],
    )
    .unwrap();
    assert!(contents(&options.out) == before);
}

/// The target's pass may have taken hours: a rerun must not begin it anew.
#[test]
fn an_unfinished_pass_of_the_target_is_not_overwritten() {
    let shop = Workshop::new();
    let mut options = shop.options("whole");
    options.steps = 2;
    run(&options).unwrap();
    for file in ["checkpoint.safetensors", "model.safetensors"] {
        fs::remove_file(options.out.join(file)).unwrap();
    }
    let targets = options.out.join("targets.bin");
    let half = fs::read(&targets).unwrap().len() as u64 / 2;
    (fs::File::options().write(true).open(&targets))
        .and_then(|file| file.set_len(half))
        .unwrap();
    refused_with(&options, "targets.bin of an earlier run: add --resume");
    assert_eq!(fs::metadata(&targets).unwrap().len(), half);
    options.resume = true;
    run(&options).unwrap();
    assert!(fs::metadata(&targets).unwrap().len() > half);
}

#[test]
fn a_killed_run_resumes_from_its_checkpoint() {
    let shop = Workshop::new();
    let mut options = shop.options("whole");
    options.steps = 150;
    options.checkpoint_every = 1;
    options.warmup = Some(7);
    run(&options).unwrap();

    let out = shop.at("killed");
    let command = || {
        let mut command = binary(&shop, "killed");
        let flags = "--seq-len 16 --top-k 8 --holdout 0.1 --batch-size 4 --micro-batch 3 --steps 150 --warmup 7 \
            --learning-rate 0.01 --weight-decay 0.01 --checkpoint-every 1 --seed 3 --resume --corpus";
        command
            .args(flags.split_whitespace())
            .arg(shop.at("corpus.jsonl"));
        command
    };
    // Again, where it had ended before it was killed because this thread had to wait.
    for tries in 1.. {
        let mut child = command().spawn().unwrap();
        while !out.join("checkpoint.safetensors").exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if !out.join("model.safetensors").exists() {
            break;
        }
        assert!(tries < 10, "killed before the end");
        fs::remove_dir_all(&out).unwrap();
    }
    let output = command().output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(stdout.contains("resuming after step"), "{stdout}");
    assert!(stdout.contains("temperature"), "{stdout}");
    assert_same_weights(&options.out, &out);
}

#[test]
fn a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.learning_rate = 1e30;
    options.warmup = Some(0);
    options.checkpoint_every = 1;
    let line = refused(&options);
    assert_has(&line, &["step 2", "--learning-rate"]);
    assert!(line.contains("the last checkpoint is kept"), "{line}");
    assert!(options.out.join("checkpoint.safetensors").exists());
}

#[test]
fn a_failed_write_keeps_the_checkpoint() {
    let shop = Workshop::new();
    let mut options = shop.options("out");
    options.steps = 8;
    options.stop_after = Some(4);
    run(&options).unwrap();
    let checkpoint = options.out.join("checkpoint.safetensors");
    let before = fs::read(&checkpoint).unwrap();
    // The temporary file that is written first cannot be created.
    let part = options.out.join("checkpoint.safetensors.part");
    fs::create_dir(&part).unwrap();
    options.resume = true;
    refused_with(&options, "checkpoint.safetensors: ");
    assert_eq!(fs::read(&checkpoint).unwrap(), before);
    fs::remove_dir(&part).unwrap();
    run(&options).unwrap();
    options.out = shop.at("whole");
    (options.resume, options.stop_after) = (false, None);
    run(&options).unwrap();
    assert_same_weights(&shop.at("out"), &options.out);
}
