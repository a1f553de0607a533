use super::super::draft::DraftContext;
use super::super::verify::coupled;
use super::*;
use foretoken_core::sampling::{Sampler, SamplingParams};

/// A text that the target goes on with `next`, and what it cost.
struct Run {
    tokens: Vec<u32>,
    steps: usize,
    accepted: usize,
}

const ID: SeqId = 1;

fn propose(drafter: &mut Lookahead, tokens: &[u32], limits: (usize, usize, usize)) -> Draft {
    let (length, nodes, width) = limits;
    let mut sampler = Sampler::new(SamplingParams::default(), tokens);
    let context = DraftContext::default();
    let request = DraftRequest {
        model_length: 0,
        nodes,
        width,
        ..DraftRequest::chain(ID, tokens, length, &mut sampler, &context)
    };
    drafter.propose(&mut [request]).unwrap().remove(0)
}

/// Rows of `draft`, each with the target's choice by what it sees, which is the text and its ancestors.
fn rows(draft: &Draft, tokens: &[u32], next: &dyn Fn(&[u32]) -> u32) -> Vec<(u32, Vec<u32>)> {
    let mut rows = vec![(tokens[tokens.len() - 1], vec![next(tokens)])];
    for node in 0..draft.len() {
        let above = |&node: &usize| draft.parents[node].map(usize::from);
        let mut path: Vec<usize> = std::iter::successors(Some(node), above).collect();
        path.reverse();
        let path = path.iter().map(|&node| draft.tokens[node]);
        let seen: Vec<u32> = tokens.iter().copied().chain(path).collect();
        rows.push((draft.tokens[node], vec![next(&seen)]));
    }
    rows
}

fn step(
    drafter: &mut Lookahead,
    tokens: &mut Vec<u32>,
    draft: &Draft,
    next: &dyn Fn(&[u32]) -> u32,
) -> usize {
    let candidates = rows(draft, tokens, next);
    let verdict = coupled(draft, |path| {
        let row = path.last().map_or(0, |node| node + 1);
        Ok::<_, ()>(candidates[row].1[0])
    });
    let verdict = verdict.unwrap();
    let before = tokens.len();
    tokens.extend(verdict.path.iter().map(|&node| draft.tokens[node]));
    tokens.push(verdict.next);
    let (new, context) = (before - 1..tokens.len() - 1, DraftContext::default());
    drafter.observe(&[Committed {
        candidates: &candidates,
        parents: &draft.parents,
        ..Committed::new(ID, tokens, 1, new, &context)
    }]);
    drafter.check_invariants().unwrap();
    verdict.path.len()
}

fn run(
    prompt: &[u32],
    len: usize,
    limits: (usize, usize, usize),
    next: &dyn Fn(&[u32]) -> u32,
) -> Run {
    let mut drafter = Lookahead::default();
    let mut run = Run {
        tokens: prompt.to_vec(),
        steps: 0,
        accepted: 0,
    };
    while run.tokens.len() < len {
        let draft = propose(&mut drafter, &run.tokens, limits);
        assert!(draft.len() <= limits.1);
        for node in [None].into_iter().chain((0..draft.len()).map(Some)) {
            let children: Vec<u32> = draft.children(node).map(|i| draft.tokens[i]).collect();
            assert!(children.len() <= limits.2, "{draft:?}");
            let distinct: HashSet<_> = children.iter().collect();
            assert_eq!(distinct.len(), children.len());
        }
        let mut valid = draft.clone();
        valid.end_where_invalid(limits.1, limits.0, 1000);
        assert_eq!(valid, draft);
        run.accepted += step(&mut drafter, &mut run.tokens, &draft, next);
        run.steps += 1;
    }
    drafter.forget(ID);
    assert!(drafter.texts.is_empty());
    run
}

const LIMITS: (usize, usize, usize) = (16, 64, 8);

/// The paper's property: fewer steps than tokens without any model or repetition, because n-grams of the
/// trajectories are what the target writes; and more of them with more rows (its scaling law). The text is the
/// target's. Here each token depends on the one before, in a cycle that is longer than the text.
#[test]
fn texts_that_never_repeat_take_fewer_steps_with_more_rows() {
    let next = |tokens: &[u32]| (tokens[tokens.len() - 1] * 7 + 3) % 997;
    let prompt: Vec<u32> = (0..200).map(|i| i * 37 % 997).collect();
    let steps = |limits| {
        let run = run(&prompt, 600, limits, &next);
        for at in prompt.len()..run.tokens.len() {
            assert_eq!(run.tokens[at], next(&run.tokens[..at]));
        }
        assert_eq!(run.accepted + run.steps, run.tokens.len() - prompt.len());
        run.steps
    };
    let (few, many) = (steps((8, 15, 4)), steps(LIMITS));
    assert!(many < 400 - 40 && many < few && few < 400, "{few}, {many}");
}

/// Jacobi iteration: a trajectory's n-gram is what the target writes after the tokens that the window's mask shows it,
/// which are the oldest guesses before it and its own.
#[test]
fn the_window_sees_the_oldest_guesses_and_its_own_trajectory() {
    // A target that sees everything.
    let next = |tokens: &[u32]| {
        let seen = tokens
            .iter()
            .fold(1, |hash, &token| mix(hash ^ u64::from(token)));
        (seen % 50) as u32
    };
    let mut drafter = Lookahead::default();
    let mut tokens = vec![1, 2, 3, 4, 5, 6, 7];
    for _ in 0..40 {
        let draft = propose(&mut drafter, &tokens, LIMITS);
        let text = &drafter.texts[&ID];
        let columns = text.proposal.as_ref().unwrap().columns;
        assert!(columns > 5);
        let window = text.window.clone();
        let before = tokens.clone();
        step(&mut drafter, &mut tokens, &draft, &next);
        let text = &drafter.texts[&ID];
        for column in 0..columns {
            let oldest = window[..=column].iter().map(|column| column[0]);
            let own = window[column][1..].iter().copied();
            let seen: Vec<u32> = before.iter().copied().chain(oldest).chain(own).collect();
            let ngram = text.ngrams[text.ngrams.len() - columns + column];
            assert_eq!(ngram[..LEVELS], window[column]);
            assert_eq!(ngram[LEVELS], next(&seen), "column {column}");
            assert_eq!(text.window[column], ngram[1..]);
        }
        // Columns without a row stay.
        assert_eq!(text.window[columns..], window[columns..]);
    }
}

/// A row of the window is worth what rows of it have won: nothing where n-grams never come, so that the budget prunes
/// it, and more where they do.
#[test]
fn the_score_of_the_window_is_what_it_wins() {
    let worth = |next: &dyn Fn(&[u32]) -> u32| {
        let mut drafter = Lookahead::default();
        let mut tokens = (0..100).collect::<Vec<u32>>();
        for _ in 0..400 {
            let draft = propose(&mut drafter, &tokens, LIMITS);
            step(&mut drafter, &mut tokens, &draft, next);
        }
        drafter.worth()
    };
    let chaotic = worth(&|tokens: &[u32]| {
        (tokens
            .iter()
            .fold(1, |hash, &token| mix(hash ^ u64::from(token)))
            % 900) as u32
    });
    let regular = worth(&|tokens: &[u32]| (tokens[tokens.len() - 1] * 7 + 3) % 97);
    assert!(chaotic < 0.005 && regular > 0.03, "{chaotic}, {regular}");
}

#[test]
fn chains_have_no_room_for_a_window() {
    let mut drafter = Lookahead::default();
    assert!(propose(&mut drafter, &[1, 2], (8, 15, 1)).is_empty());
    // Neither have drafts that are too short for a trajectory.
    let small = propose(&mut drafter, &[1, 2], (2, 15, 4));
    assert!(small.is_empty());
}
