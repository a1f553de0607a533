//! The program with several GPUs: what it says, and what it refuses.

use super::super::shape;
use super::{four, gpus};
use crate::common::process::foretoken;
use crate::common::tiny_folder::{byte_level, tiny_folder};
use foretoken::model::ModelSource;

/// A run of a few random prompts.
fn bench(model: &ModelSource, flags: &str) -> std::process::Command {
    let ModelSource::Folder(path) = model else {
        panic!("{model:?}");
    };
    let mut command = foretoken();
    let own = "--load-format dummy --num-blocks 64 --spec-budget fixed --drafter ngram --max-tokens 8 --temperatures 0 --random-prompts 2 --prompt-tokens 4";
    command.arg("bench").arg("--model").arg(path);
    command.args(own.split(' ')).args(flags.split(' '));
    command
}

/// The whole program, which says what is where.
#[test]
fn a_program_uses_three_gpus() {
    let Some(_own) = gpus() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = "--pipeline-parallel-size 3 --tensor-split 3,1,2";
    let mut command = bench(&four(folder.path()), flags);
    let output = command.env("RUST_LOG", "info").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for part in [
        "GPU 0 has the layers 0 to ",
        " to 3 of 4",
        "GPU 0 memory in GiB",
        "GPU 2 memory in GiB",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
}

/// From headers, before anything is loaded.
#[test]
fn check_tells_how_layers_and_memory_are_divided() {
    let Some(_own) = gpus() else { return };
    let folder = tiny_folder(byte_level());
    let mut command = foretoken();
    command.arg("check").arg(folder.path());
    let flags = "--device cuda --pipeline-parallel-size 2 --num-blocks 64";
    let output = command.args(flags.split(' ')).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{said}");
    for gpu in 0..2 {
        let row = said
            .lines()
            .find_map(|line| line.strip_prefix(&format!("GPU {gpu} ")));
        let row = row
            .unwrap_or_else(|| panic!("no GPU {gpu} in {said}"))
            .trim();
        assert!(
            row.starts_with(&format!("layers {gpu} to {gpu}; fits: ")),
            "{row}"
        );
        assert!(
            row.contains(" target weights ") && row.contains("; KV cache "),
            "{row}"
        );
    }
    assert!(said.contains("weights (cuda)"), "{said}");
}

#[test]
fn what_several_gpus_cannot_do_is_told_in_one_line() {
    let Some(_own) = gpus() else { return };
    if std::env::var_os("FORETOKEN_EMULATED_GPU").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = four(folder.path());
    let of = |source: &ModelSource, flags: &str, others: &str, needle: &str| {
        let mut command = bench(source, flags);
        let command = command.env("FORETOKEN_EMULATED_OTHERS", others);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags}: {said}");
        let lines = said
            .lines()
            .filter(|line| !line.starts_with("emulated GPU: "));
        let lines: Vec<&str> = lines.collect();
        assert!(
            lines.len() == 1 && lines[0].contains(needle),
            "{needle} in {said}"
        );
    };
    let refused = |flags: &str, needle: &str| of(&source, flags, "9", needle);
    refused(
        "--pipeline-parallel-size 4",
        "--pipeline-parallel-size 4: 4 GPUs are asked for, and from cuda:0 on there are 3: ask for 3",
    );
    refused(
        "--pipeline-parallel-size 2 --device cuda:2",
        "from cuda:2 on there is 1",
    );
    refused(
        "--pipeline-parallel-size 2 --device cpu",
        "--device cpu is none: cuda, cuda:N and auto are accepted",
    );
    refused(
        "--pipeline-parallel-size 2 --tensor-split 1,2,3",
        "--tensor-split has 3 shares and --pipeline-parallel-size is 2",
    );
    refused(
        "--pipeline-parallel-size 2 --one-launch",
        "leave it out with --pipeline-parallel-size",
    );
    of(
        &source,
        "--pipeline-parallel-size 2",
        "8",
        "cuda:0 has compute capability 9.0 and cuda:1 8.0",
    );
    let two = shape(folder.path(), "llama", 64, &[("num_hidden_layers", 2)]);
    of(
        &two,
        "--pipeline-parallel-size 3",
        "9",
        "3 GPUs are too many for this model, whose 2 layers can be on up to 2",
    );
}
