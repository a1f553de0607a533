//! What ends a text on toy models, and log-probabilities of prompts and texts.

use crate::common::*;
use foretoken::engine::{FinishReason, Request};
use foretoken::error::{Error, RequestErrorKind};

/// A stop id inside a round: tokens accepted after it are discarded.
#[test]
fn stops_inside_a_round() {
    let engine = Toy::guessing(Guess::Toy(0.0)).start();
    let free = run(&engine, greedy(&[9, 8, 7], 30)).ids();
    for at in [1, 2, 3, 4, 11] {
        let first = free.iter().position(|id| *id == free[at]).unwrap();
        let mut request = greedy(&[9, 8, 7], 30);
        request.params.stop_token_ids = vec![free[at]];
        let answer = run(&engine, request);
        assert_eq!(answer.ids(), free[..=first]);
        assert_eq!(answer.finish, Some(FinishReason::Stop { token: free[at] }));
        // The draft model is the target itself: each round but the first gives five tokens, the
        // fifth from the target.
        assert_eq!(answer.spec.accepted, first - first / 5);
        assert_eq!(answer.spec.tested, answer.spec.accepted);
    }
    for max_tokens in 1..10 {
        let answer = run(&engine, greedy(&[9, 8, 7], max_tokens));
        assert_eq!(answer.ids(), free[..max_tokens]);
        assert_eq!(answer.finish, Some(FinishReason::Length));
    }
    assert_idle(&engine);
}

#[test]
fn the_context_limit_ends_the_text_and_is_checked() {
    let engine = Toy::guessing(Guess::Toy(0.0)).start();
    let prompt: Vec<u32> = (0..MAX_LEN as u32 - 7).map(|i| i % 7).collect();
    let answer = run(
        &engine,
        Request {
            max_tokens: None,
            ..greedy(&prompt, 0)
        },
    );
    assert_eq!(
        answer.ids(),
        reference(&mut toy_model(0.0), &greedy(&prompt, 7))
    );
    let refused = |request: Request| match engine.submit(request) {
        Err(Error::Request {
            kind: RequestErrorKind::Invalid | RequestErrorKind::ContextLengthExceeded,
            param,
            message,
            ..
        }) => (param.unwrap().to_string(), message),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(greedy(&prompt, 8)).0, "max_tokens");
    assert_eq!(refused(greedy(&[0; MAX_LEN + 1], 0)).0, "prompt");
    assert_eq!(refused(greedy(&[], 1)).0, "prompt");
    assert_eq!(refused(greedy(&[VOCAB as u32], 1)).0, "prompt");
    assert_idle(&engine);
}

#[test]
fn prompt_scores_do_not_depend_on_chunks() {
    let prompt: Vec<u32> = (0..100).map(|i| i * i % 31).collect();
    let request = |max_tokens| Request {
        prompt_logprobs: Some(3),
        logprobs: Some(3),
        ..greedy(&prompt, max_tokens)
    };
    let whole = run(&Toy::default().start(), request(5));
    assert_eq!(whole.prompt.len(), 100);
    assert!(whole.prompt[0].is_none());
    for at in 1..100 {
        let logits = last_logits(&mut toy_model(0.0), &prompt[..at]);
        let want = foretoken::sampling::logprobs(&logits, prompt[at], 3).unwrap();
        assert_eq!(whole.prompt[at], Some(want), "position {at}");
    }
    let mut toy = Toy::default();
    toy.options.max_num_seqs = 2;
    toy.options.max_num_batched_tokens = 11;
    let engine = toy.start();
    assert_eq!(run(&engine, request(5)).prompt, whole.prompt);
    let none = run(&engine, request(0));
    assert_eq!((none.prompt, none.tokens.len()), (whole.prompt.clone(), 0));
    assert_eq!(none.finish, Some(FinishReason::Length));
    assert_idle(&engine);
}

/// Log-probabilities of generated tokens are the target's, bit for bit, with any draft.
#[test]
fn logprobs_do_not_depend_on_speculation() {
    let request = Request {
        logprobs: Some(2),
        ..greedy(&[4, 5], 30)
    };
    let plain = run(&Toy::guessing(Guess::Nothing).start(), request.clone());
    for guess in [Guess::Ngram, Guess::Toy(0.0), Guess::Toy(0.5)] {
        let answer = run(&Toy::guessing(guess).start(), request.clone());
        assert_eq!(answer.tokens, plain.tokens, "{guess:?}");
    }
}
