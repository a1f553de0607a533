mod cuts;

use super::*;
use crate::choice_rules::MessageRules;
use crate::stop::Stops;
use foretoken_core::error::Error;
use foretoken_text::SpecialIds;
use foretoken_text::{ReasoningFormat, Signature};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::LazyLock;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Token names in GPT-2's alphabet; the last token is special.
const NAMES: [&str; 10] = ["a", "b", "ab", "Ġ", "END", "ðŁ", "¦", "Ģ", "bEN", "<|end|>"];
const END: u32 = 9;

fn text() -> &'static Text {
    static TEXT: LazyLock<Text> = LazyLock::new(|| {
        let vocab: HashMap<String, u32> = (0..).zip(NAMES).map(|(id, n)| (n.into(), id)).collect();
        let vocab = vocab
            .into_iter()
            .collect::<tokenizers::models::bpe::Vocab>();
        let bpe = BPE::builder().vocab_and_merges(vocab, Vec::new());
        let mut tokenizer = Tokenizer::new(bpe.build().expect("a valid vocabulary"));
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
        tokenizer
            .add_special_tokens([AddedToken::from("<|end|>", true)])
            .expect("added");
        Text::new(tokenizer, SpecialIds::default(), None).expect("byte-level")
    });
    &TEXT
}

fn ids(names: &[&str]) -> Vec<u32> {
    let id = |name| NAMES.iter().position(|n| n == name).expect("a token") as u32;
    names.iter().map(id).collect()
}

fn rules(stops: &[&str]) -> Rules {
    Rules {
        stops: Stops::new(stops.iter().map(|&stop| stop.into())),
        ..Rules::default()
    }
}

fn tokens(ids: &[u32], finish: Option<FinishReason>) -> Event {
    let output = |&id| TokenOutput {
        id,
        logprobs: Some(TokenLogprobs {
            logprob: -1.0,
            top: vec![(id, -1.0)],
        }),
    };
    Event::Tokens {
        tokens: ids.iter().map(output).collect(),
        round: None,
        finish,
        spec: SpecUsage::default(),
        cached_tokens: 0,
    }
}

/// Feeds `ids` in steps of the given sizes, as an engine would; stops when the choice ends.
fn run(rules: Rules, ids: &[u32], rounds: &[usize], finish: FinishReason) -> (Choice, Vec<Piece>) {
    let mut choice = Choice::new(Arc::new(rules), None);
    let mut pieces = Vec::new();
    let (mut rest, mut sizes) = (ids, rounds.iter().cycle());
    loop {
        let size = (*sizes.next().expect("cycles"))
            .clamp(1, rest.len().max(1))
            .min(rest.len());
        let (now, later) = rest.split_at(size);
        rest = later;
        let last = rest.is_empty().then_some(finish);
        let piece = choice
            .on_event(text(), tokens(now, last))
            .expect("no failure");
        let ended = piece.finish.is_some();
        pieces.push(piece);
        if ended {
            return (choice, pieces);
        }
    }
}

fn joined(pieces: Vec<Piece>) -> Piece {
    pieces.into_iter().fold(Piece::default(), |mut all, piece| {
        all.append(piece);
        all
    })
}

#[test]
fn a_stop_string_may_span_tokens_and_begin_inside_one() {
    for rounds in [&[1][..], &[4], &[2, 1]] {
        let tokens = ids(&["a", "ab", "END", "a", "a"]);
        let (choice, pieces) = run(rules(&["bEN"]), &tokens, rounds, FinishReason::Length);
        let piece = joined(pieces);
        assert_eq!(piece.text(), "aa");
        assert_eq!(
            piece.finish,
            Some(Finish {
                reason: FinishKind::Stop,
                stop: Some(StopReason::Text("bEN".into()))
            })
        );
        assert_eq!(
            choice.completion_tokens(),
            3,
            "tokens after the match do not count"
        );
    }
}

#[test]
fn a_possible_stop_string_is_held_back_until_it_cannot_match() {
    let tokens = ids(&["a", "b", "a", "Ġ"]);
    let (_, pieces) = run(
        rules(&["ab b", "b END"]),
        &tokens,
        &[1],
        FinishReason::Length,
    );
    let texts: Vec<_> = pieces.iter().map(Piece::text).collect();
    assert_eq!(texts, ["", "", "ab", "a "]);
}

#[test]
fn held_back_text_is_shown_at_the_end() {
    let (_, pieces) = run(
        rules(&["abc"]),
        &ids(&["a", "b"]),
        &[1],
        FinishReason::Length,
    );
    let piece = joined(pieces);
    assert_eq!(&*piece.text(), "ab");
    assert_eq!(piece.finish.as_ref().unwrap().reason.name(), "length");
}

/// A step accepts four tokens, but only those that are part of the text count.
#[test]
fn usage_does_not_count_what_was_accepted_after_a_stop_string() {
    for (stop, kept) in [("b", 2), ("END", 4), ("never", 5)] {
        let mut choice = Choice::new(Arc::new(rules(&[stop])), None);
        let spec = |rounds, tested, accepted| SpecUsage {
            rounds,
            drafted: 6 * rounds,
            tested,
            accepted,
            lossy: accepted,
            predicted: 4 * rounds,
            predicted_accepted: accepted,
            ..SpecUsage::default()
        };
        let round = |names: &[&str], usage| match tokens(&ids(names), None) {
            Event::Tokens { tokens, finish, .. } => Event::Tokens {
                tokens,
                round: None,
                finish,
                spec: usage,
                cached_tokens: 0,
            },
            other => other,
        };
        let first = round(&["a", "a"], spec(1, 2, 1));
        choice.on_event(text(), first).unwrap();
        let second = round(&["a", "b", "a", "END", "a"], spec(2, 7, 5));
        choice.on_event(text(), second).unwrap();
        assert_eq!(choice.completion_tokens(), 2 + kept);
        assert_eq!(choice.spec(), spec(2, 2 + kept, 1 + kept.min(4)), "{stop}");
    }
}

#[test]
fn the_last_token_counts_but_has_no_text() {
    for (stop_token_ids, reason) in [(vec![], None), (vec![0], Some(StopReason::Token(0)))] {
        let rules = Rules {
            stop_token_ids,
            logprobs: true,
            ..Rules::default()
        };
        let finish = FinishReason::Stop { token: 0 };
        let (choice, pieces) = run(rules, &ids(&["b", "a", "a"]), &[3], finish);
        let piece = joined(pieces);
        assert_eq!(piece.text(), "ba");
        assert_eq!(
            piece.finish,
            Some(Finish {
                reason: FinishKind::Stop,
                stop: reason
            })
        );
        assert_eq!((choice.completion_tokens(), piece.logprobs.len()), (3, 3));
    }
}

#[test]
fn special_tokens_have_no_text_and_characters_are_not_split() {
    let mut tokens = ids(&["a", "ðŁ", "¦", "Ģ", "b", "ðŁ"]);
    tokens.insert(1, END);
    let rules = Rules {
        logprobs: true,
        ..Rules::default()
    };
    let (_, pieces) = run(rules, &tokens, &[1], FinishReason::Length);
    let texts: Vec<_> = pieces.iter().map(Piece::text).collect();
    assert_eq!(texts, ["a", "", "", "", "🦀", "b", "\u{FFFD}"]);
    let offsets: Vec<usize> = joined(pieces).logprobs.iter().map(|l| l.offset).collect();
    assert_eq!(offsets, [0, 1, 1, 1, 1, 2, 3]);
}

#[test]
fn stop_strings_wait_for_min_tokens() {
    let rules = Rules {
        min_tokens: 3,
        ..rules(&["b"])
    };
    let (choice, pieces) = run(
        rules,
        &ids(&["a", "b", "a", "b", "a"]),
        &[2],
        FinishReason::Length,
    );
    assert_eq!(joined(pieces).text(), "aba");
    assert_eq!(choice.completion_tokens(), 4);
}

#[test]
fn an_echo_comes_first_and_its_first_token_has_no_logprob() {
    let echo = Echo {
        text: "ab".into(),
        ids: vec![END, 0, 1],
        added_bos: true,
    };
    let rules = Rules {
        logprobs: true,
        ..rules(&["b"])
    };
    let mut choice = Choice::new(Arc::new(rules), Some(Arc::new(echo)));
    let score = TokenLogprobs {
        logprob: -2.0,
        top: vec![],
    };
    let prompt = vec![None, Some(score.clone()), Some(score)];
    let mut piece = choice.on_event(text(), Event::Prompt(prompt)).unwrap();
    assert_eq!(
        piece.text(),
        "ab",
        "stop strings are not looked for in the prompt"
    );
    let end = tokens(&ids(&["a"]), Some(FinishReason::Length));
    piece.append(choice.on_event(text(), end).unwrap());
    assert_eq!(piece.text(), "aba");
    let offsets: Vec<usize> = piece.logprobs.iter().map(|l| l.offset).collect();
    assert_eq!(offsets, [0, 0, 1, 2]);
    assert_eq!(piece.logprobs[0].logprobs, None);
    assert_eq!(choice.completion_tokens(), 1);
}

#[test]
fn an_echo_without_logprobs_comes_with_the_tokens() {
    let echo = Echo {
        text: "ab".into(),
        ids: vec![0, 1],
        added_bos: false,
    };
    let mut choice = Choice::new(Arc::default(), Some(Arc::new(echo)));
    let end = tokens(&[], Some(FinishReason::Length));
    let piece = choice.on_event(text(), end).unwrap();
    assert_eq!(piece.text(), "ab");
    assert!(piece.logprobs.is_empty() && piece.finish.is_some());
}

#[test]
fn a_failure_is_passed_on() {
    let mut choice = Choice::new(Arc::default(), None);
    let failed = Event::Failed(Error::internal("bug"));
    assert_eq!(
        choice.on_event(text(), failed).unwrap_err().to_string(),
        "bug"
    );
}

proptest! {
    #[test]
    fn neither_rounds_nor_streaming_change_a_choice(
        ids in prop::collection::vec(0u32..10, 1..40),
        stops in prop::collection::vec("[abEN ]{1,4}", 0..3),
        rounds in prop::collection::vec(1usize..6, 1..5),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (one, at_once) = run(rules(&stops), &ids, &[ids.len()], FinishReason::Length);
        let (many, in_rounds) = run(rules(&stops), &ids, &rounds, FinishReason::Length);
        prop_assert_eq!(one.completion_tokens(), many.completion_tokens());
        let shown = joined(at_once);
        prop_assert_eq!(&shown, &joined(in_rounds));

        // The reference: decode everything, and cut at the first complete stop string.
        let full = text().decode(&ids, true);
        let first = stops.iter().filter_map(|s| full.find(s).map(|at| (at + s.len(), at))).min();
        let expected = first.map_or(full.as_str(), |(_, at)| &full[..at]);
        prop_assert_eq!(shown.text(), expected);
        prop_assert_eq!(shown.finish.as_ref().unwrap().reason.name(), if first.is_some() { "stop" } else { "length" });
        prop_assert!(stops.iter().all(|stop| !shown.text().contains(stop)));
    }
}
