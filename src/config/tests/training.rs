//! `distill` and `tokenizer`.

use super::*;

const DISTILL: &str = "distill --model m --draft-config c.json --out o --corpus a.jsonl";

#[test]
fn distill_has_separate_flags() {
    let line = format!("{DISTILL} --corpus b.txt --objective ce --steps 40 --device cpu");
    let Command::Distill(options) = command(&line) else {
        panic!("expected `distill`");
    };
    assert_eq!(options.corpus, [Path::new("a.jsonl"), Path::new("b.txt")]);
    assert_eq!(options.objective, train::Objective::CrossEntropy);
    assert_eq!((options.steps, options.warmup, options.seed), (40, None, 0));
    let Command::Distill(options) = command(DISTILL) else {
        panic!("expected `distill`");
    };
    assert_eq!(options.objective, train::Objective::Kl);
    assert_eq!((options.top_k, options.seq_len), (32, 256));
    // The device decides.
    assert_eq!(options.micro_batch, None);
    refused_with("distill --model m", "--corpus");
    refused_with(&format!("{DISTILL} --num-blocks 16"), "--num-blocks");
    let Command::Distill(options) = command(&format!("{DISTILL} --method parallel")) else {
        panic!("expected `distill`");
    };
    assert_eq!(options.method, train::Method::Parallel);
    assert_eq!((options.block_size, options.layers), (5, None));
    for flag in [
        "--holdout 0",
        "--clip -1",
        "--learning-rate nan",
        "--weight-decay 2",
        "--block-size 1",
        "--block-size 65",
    ] {
        let (name, value) = flag.split_once(' ').unwrap();
        refused_with(&format!("{DISTILL} {name}={value}"), name);
    }
    let flags = "--top-k --seq-len --steps --batch-size --micro-batch --stop-after";
    for flag in flags.split(' ') {
        refused_with(&format!("{DISTILL} {flag} 0"), flag);
    }
}

#[test]
fn tokenizer_has_separate_flags() {
    let line = "tokenizer --corpus a.jsonl --corpus b.txt --out o";
    let Command::Tokenizer(options) = command(line) else {
        panic!("expected `tokenizer`");
    };
    assert_eq!(options.corpus, [Path::new("a.jsonl"), Path::new("b.txt")]);
    assert_eq!((options.vocab_size, options.chat_template), (4096, None));
    refused_with(&format!("{line} --vocab-size 258"), "from 259 to");
    refused_with("tokenizer --out o", "--corpus");
}
