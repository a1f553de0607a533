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
    let counts = "--seq-len --top-k --ttt-steps --draft-vocab-size --batch-size --micro-batch --steps \
        --eval-every --checkpoint-every --threads --block-size --layers --holdout";
    numbers_refused(DISTILL, counts, &ABSURD);
    numbers_refused(DISTILL, "--block-size", &["1", "65"]);
    numbers_refused(DISTILL, "--mask-token-id", &[U64_MAX]);
    numbers_refused(DISTILL, "--stop-after --warmup --taps", &["-1", BEYOND_U64]);
    numbers_refused(DISTILL, "--seed", &["-2"]);
    numbers_refused(DISTILL, "--stop-after", &["0"]);
    numbers_refused(
        DISTILL,
        "--clip --learning-rate",
        &["0", "-1", "nan", "inf"],
    );
    let shares = "--weight-decay --overlap-share";
    numbers_refused(DISTILL, shares, &["2", "nan", "1e300"]);
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
    numbers_refused(line, "--vocab-size", &["1000000000", U64_MAX, BEYOND_U64]);
    refused_with("tokenizer --out o", "--corpus");
}
