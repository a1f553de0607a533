//! What the estimates learn.

use super::*;

/// A score is what it says: of the nodes with a score around p, p stand.
#[test]
fn scores_are_calibrated() {
    let mut random = Random(3);
    let mut tables = tables();
    let mut buckets = [(0.0, 0.0, 0); 5];
    for id in 0..150 {
        let rare = [2, 5, 30][id as usize % 3];
        let answer = text(&mut random, 60, rare, 120);
        let prompt = text(&mut random, 60, 5, 40);
        let mut run = TableRun::new(id, &prompt, &answer, scope(0));
        run.prefill(&mut tables);
        while !run.is_done() {
            let at = run.tokens.len() - prompt.len();
            let (draft, _) = run.step(&mut tables);
            let mut stands = vec![false; draft.len()];
            let mut depths = vec![0; draft.len()];
            for node in 0..draft.len() {
                let parent = draft.parents[node].map(usize::from);
                depths[node] = parent.map_or(0, |parent| depths[parent] + 1);
                stands[node] = parent.is_none_or(|parent| stands[parent])
                    && answer.get(at + depths[node]) == Some(&draft.tokens[node]);
                if id >= 50 && at + depths[node] < answer.len() {
                    let score = draft.scores[node];
                    let (sum, hits, n) = &mut buckets[((score * 5.0) as usize).min(4)];
                    *sum += f64::from(score);
                    *hits += f64::from(u8::from(stands[node]));
                    *n += 1;
                }
            }
        }
        tables.end(id);
    }
    for (sum, hits, n) in buckets {
        assert!(n > 300, "every bucket is used: {buckets:?}");
        let error = (sum - hits) / f64::from(n);
        assert!(error.abs() < 0.1, "{error}: {buckets:?}");
    }
}

#[test]
fn a_request_that_ignores_the_tables_ends_at_low_scores_and_one_that_repeats_rises() {
    let mut random = Random(5);
    let mut tables = tables();
    for id in 0..30 {
        let answer = text(&mut random, 50, 4, 200);
        TableRun::new(id, &[1, 2], &answer, scope(0)).finish(&mut tables);
    }
    let best_score = |tables: &mut Tables, rare: u32, random: &mut Random| {
        let answer = text(random, 50, rare, 400);
        let mut run = TableRun::new(100, &[1, 2], &answer, scope(0));
        run.prefill(tables);
        let (mut first, mut last) = (0.0, 0.0);
        while !run.is_done() {
            let (draft, _) = run.step(tables);
            last = draft.scores.first().copied().unwrap_or_default();
            if first == 0.0 {
                first = last;
            }
        }
        tables.end(100);
        (first, last)
    };
    let (first, last) = best_score(&mut tables, 1, &mut random);
    assert!(
        first > 0.3 && last < 0.1,
        "nothing comes true: {first}, then {last}"
    );
    let (first, last) = best_score(&mut tables, 1000, &mut random);
    assert!(last > first + 0.05, "all comes true: {first}, then {last}");
}

/// Candidates beyond what was verified teach: nothing needs to be verified to be learned.
#[test]
fn learns_from_what_the_budget_pruned() {
    let mut tables = tables();
    let repeated: Vec<u32> = [7, 8, 9].repeat(60);
    let mut run = TableRun::new(1, &repeated[..6], &repeated[6..], scope(0));
    run.prefill(&mut tables);
    let score = |tables: &mut Tables, run: &TableRun<'_>| {
        propose(tables, 1, &run.tokens, (1, 1, 8), &run.context).scores[0]
    };
    let before = score(&mut tables, &run);
    for _ in 0..100 {
        score(&mut tables, &run);
        let pending = run.tokens.len() - 1;
        run.tokens.push(repeated[run.tokens.len()]);
        run.observe(&mut tables, pending..pending + 1, &[]);
    }
    let after = score(&mut tables, &run);
    assert!(before < 0.3 && after > 0.8, "{before}, then {after}");
}

/// However often a request is observed, each token teaches once.
#[test]
fn a_draft_teaches_once() {
    let text: Vec<u32> = [7, 8, 9].repeat(20);
    let scores = |times: usize| {
        let mut tables = tables();
        let mut run = TableRun::new(1, &text[..6], &text[6..], scope(0));
        run.prefill(&mut tables);
        run.step(&mut tables);
        let end = run.tokens.len();
        for _ in 0..times {
            run.observe(&mut tables, end - 1..end - 1, &[]);
        }
        propose(&mut tables, 2, &[1, 2, 3, 1, 2], (4, 4, 1), &scope(1)).scores
    };
    assert_eq!(scores(0), scores(50));
}

#[test]
fn a_prediction_and_the_own_text_have_estimates_of_their_own() {
    let mut tables = tables();
    for id in 0..20 {
        let text: Vec<u32> = (100..130).collect();
        let mut run = TableRun::new(id, &[1, 2], &text, scope(id));
        run.context.prediction = text.clone().into();
        run.finish(&mut tables);
    }
    let mut context = scope(100);
    let own = [5, 6, 7, 8, 5, 6];
    let unknown = propose(&mut tables, 100, &own, (1, 1, 1), &context).scores[0];
    context.prediction = [5, 6, 7, 8].into();
    let predicted = propose(&mut tables, 101, &[5, 6], (1, 1, 1), &context).scores[0];
    assert!(unknown < 0.3 && predicted > 0.7, "{unknown}, {predicted}");
}

#[test]
fn a_chain_takes_the_most_probable_guess() {
    let mut tables = tables();
    // The own text is always wrong about the answer, and the target's candidates are right.
    let prompt: Vec<u32> = (100..120).flat_map(|token| [token, 900]).collect();
    let answer: Vec<u32> = (100..120).collect();
    for id in 0..20 {
        let mut run = TableRun::new(id, &prompt, &answer, scope(id));
        run.best = |fed| vec![fed + 1];
        run.finish(&mut tables);
    }
    let tokens: Vec<u32> = prompt.iter().chain(&[105]).copied().collect();
    tables.pool.recycle(100, 105, &[106]);
    let draft = propose(&mut tables, 100, &tokens, (1, 4, 1), &scope(100));
    assert_eq!(draft.tokens, [106]);
    let draft = propose(&mut tables, 100, &tokens, (1, 4, 2), &scope(100));
    assert_eq!(draft.tokens, [106, 900]);
}
