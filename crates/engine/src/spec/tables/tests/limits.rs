//! What a step may take, and what the memory is for.

use super::super::own::MAX_CONTEXT;
use super::*;
use std::collections::HashSet;

/// A step that computes the positions `new` of all `runs`.
fn step(tables: &mut Tables, runs: &[TableRun<'_>], new: Range<usize>) {
    let committed = runs.iter().map(|run| {
        Committed::new(
            run.id,
            &run.tokens,
            run.prompt_len,
            new.clone(),
            &run.context,
        )
    });
    tables.observe(&committed.collect::<Vec<_>>());
    tables.check_invariants().expect("within the memory");
}

fn runs(ids: Range<u64>, prompt: &[u32], prediction: &[u32]) -> Vec<TableRun<'static>> {
    let context = DraftContext {
        prediction: prediction.into(),
        ..scope(0)
    };
    let run = |id| TableRun::new(id, prompt, &[], context.clone());
    ids.map(run).collect()
}

/// Texts that the target need not read are indexed in many steps, however many requests have them, and a
/// short text beside them at once.
#[test]
fn a_step_indexes_a_bounded_number_of_tokens() {
    const LONG: u32 = 1 << 17;
    let mut tables = Tables::new(1 << 27);
    let prompt: Vec<u32> = (0..LONG).chain([5, 6]).collect();
    let predicted: Vec<u32> = (LONG..LONG + 9_000).collect();
    let mut all = runs(0..8, &prompt, &predicted);
    all.extend(runs(8..9, &[1, 2, 3, 1, 2], &[]));
    let (mut before, mut known) = (0, Vec::new());
    for count in 0..200 {
        step(&mut tables, &all, 0..2);
        let (_, calls) = tables.texts.index().counts();
        assert!(
            calls - before < 10_000,
            "{} in step {count}",
            calls - before
        );
        let short = propose(&mut tables, 8, &all[8].tokens, (1, 1, 1), &all[8].context);
        assert_eq!(short.tokens, [3], "step {count}");
        let long = propose(&mut tables, 5, &prompt, (1, 1, 1), &all[5].context);
        known.push(!long.is_empty());
        (_, before) = tables.texts.index().counts();
    }
    let first = known.iter().position(|known| *known).expect("in the end");
    // The prediction comes first.
    assert!((8..12).contains(&first), "{first} steps");
    let contexts: usize = [&prompt, &predicted]
        .map(|text| contexts(text))
        .iter()
        .sum();
    let (kept, _) = tables.texts.index().counts();
    assert!(
        kept.abs_diff(contexts) < contexts / 100,
        "{kept} of {contexts}"
    );
}

/// Number of different contexts in a text.
fn contexts(text: &[u32]) -> usize {
    let before_last = &text[..text.len() - 1];
    let all = (1..=MAX_CONTEXT).flat_map(|len| before_last.windows(len));
    all.collect::<HashSet<_>>().len()
}

/// The choices of a request have one index of its prompt and of its prediction.
#[test]
fn choices_share_an_index() {
    let prompt: Vec<u32> = (0..3_000).chain([5, 6]).collect();
    let predicted: Vec<u32> = (5_000..6_000).collect();
    let contexts = |choices: u64| {
        let mut tables = Tables::new(1 << 26);
        let all = runs(0..choices, &prompt, &predicted);
        (0..5).for_each(|_| step(&mut tables, &all, 0..prompt.len()));
        for run in &all {
            let draft = propose(&mut tables, run.id, &run.tokens, (3, 3, 1), &run.context);
            assert_eq!(draft.tokens[0], 7);
        }
        assert_eq!(tables.texts.num_shared(), 2);
        let other = TableRun::new(100, &prompt, &[], scope(1));
        step(&mut tables, &[other], 0..1);
        assert_eq!(tables.texts.num_shared(), 4, "another scope");
        let (contexts, _) = tables.texts.index().counts();
        (0..=100).for_each(|id| tables.forget(id));
        assert_eq!(tables.texts.num_shared(), 0);
        contexts
    };
    let alone = contexts(1);
    assert!(alone > MAX_CONTEXT * 3_900, "{alone}");
    // A few are forgotten, by chance.
    let shared = contexts(64);
    assert!(shared.abs_diff(alone) < 100, "{shared}, {alone}");
}

/// Texts of any length and number take the memory that is set, and the latest are known.
#[test]
fn texts_stay_within_the_memory() {
    let bytes = 300_000;
    let mut tables = Tables::new(bytes);
    let mut random = Random(3);
    for id in 0..40 {
        let prompt: Vec<u32> = (0..5_000).map(|_| random.below(1 << 30)).collect();
        let mut all = runs(id..id + 1, &prompt, &prompt[..99]);
        let (first, next) = (prompt[4_990], prompt[4_991]);
        all[0].tokens.push(first);
        for _ in 0..6 {
            step(&mut tables, &all, 0..5_000);
        }
        let draft = propose(&mut tables, id, &all[0].tokens, (1, 1, 1), &all[0].context);
        assert_eq!(draft.tokens, [next]);
    }
    assert!(tables.texts.index().counts().0 > bytes / 2 / 16 / 2);
}

/// A long answer goes into the pool in many steps, a short one that ends later after it, and answers for
/// which there is no memory end early.
#[test]
fn a_step_adds_a_bounded_number_of_tokens_to_the_pool() {
    let mut tables = tables();
    let answer: Vec<u32> = (10_000..15_000).collect();
    let mut long = runs(1..2, &[1, 2], &[]);
    long[0].tokens.extend(&answer);
    step(&mut tables, &long, 0..2);
    let mut short = runs(2..3, &[1, 2], &[]);
    short[0].tokens.extend([70, 71]);
    step(&mut tables, &short, 0..2);
    tables.end(1);
    tables.end(2);
    let known = |tables: &mut Tables, token: u32| !tables.pool.guesses(0, &[token]).is_empty();
    let mut steps = 0;
    while !known(&mut tables, 70) {
        let len = answer.iter().filter(|token| known(&mut tables, **token));
        assert!(len.count() <= (steps + 1) * 1_024);
        step(&mut tables, &[], 0..0);
        steps += 1;
    }
    assert_eq!(steps, 5_002 / 1_024);
    assert!(known(&mut tables, 14_998) && tables.answers.bytes() == 0);

    let mut small = Tables::new(32 * 800);
    step(&mut small, &long, 0..2);
    assert_eq!(small.answers.bytes(), 800);
    small.forget(1);
    assert_eq!(small.answers.bytes(), 0);
    step(&mut small, &long, 0..2);
    small.end(1);
    assert!(known(&mut small, 10_098) && !known(&mut small, 10_099));
}
