//! Drafting with EAGLE heads: drafts that the reference would make, and texts that do not change.

use crate::common::tiny::{VOCAB, short_prompt};
use crate::common::*;
use crate::eagle_head::{Head, LAYOUTS, Layout, argmax, hidden_states, target};
use candle_core::{Device, Tensor};
use foretoken::engine::{self, EngineHandle, Request, SpecLimits};
use foretoken::sampling::{Sampler, SamplingParams};
use foretoken::spec::{
    CacheScope, Committed, Draft, DraftContext, DraftModel, DraftRequest, Drafter,
};
use std::ops::Range;

fn drafter(head: &Head, chunk: usize) -> DraftModel {
    DraftModel::of_head(head.load(), 64, 4, chunk).unwrap()
}

/// A draft of up to 4 tokens in depth.
fn propose(drafter: &mut DraftModel, tokens: &[u32], width: usize, temperature: f32) -> Draft {
    let params = SamplingParams {
        temperature,
        seed: 5,
        ..SamplingParams::default()
    };
    let (mut sampler, context) = (Sampler::new(params, tokens), DraftContext::default());
    let request = DraftRequest {
        nodes: if width == 1 { 4 } else { 10 },
        width,
        ..DraftRequest::chain(1, tokens, 4, &mut sampler, &context)
    };
    drafter.propose(&mut [request]).unwrap().remove(0)
}

/// Tells the drafter that the target computed the positions `new` of `tokens`.
fn observe(drafter: &mut DraftModel, head: &Head, tokens: &[u32], new: Range<usize>) {
    let states = hidden_states(head, &tokens[..new.end]);
    let hidden = Tensor::new(states[new.clone()].to_vec(), &Device::Cpu).unwrap();
    drafter.observe(&[Committed {
        hidden: Some(hidden),
        ..Committed::new(1, tokens, 3, new, &DraftContext::default())
    }]);
    assert_eq!(drafter.check_invariants(), Ok(()));
}

#[test]
fn a_draft_is_what_the_reference_would_say() {
    for layout in LAYOUTS {
        let head = Head::new(layout);
        let tokens = short_prompt(12);
        let mut drafter = drafter(&head, 64);
        observe(&mut drafter, &head, &tokens, 0..11);
        let found = propose(&mut drafter, &tokens, 1, 0.0).tokens;

        let hidden = hidden_states(&head, &tokens);
        let mut rows = head.rows(&tokens, &hidden);
        let mut wanted = Vec::new();
        for _ in 0..4 {
            let (logits, outputs) = head.forward(&rows);
            let (logits, output) = (logits.last().unwrap(), outputs.last().unwrap());
            wanted.push(argmax(logits));
            rows.push((argmax(logits), output.clone()));
        }
        assert_eq!(found, wanted, "{layout:?}");
    }
}

/// Whether two drafts have the same guesses after every path that both have, as far as both go on: how
/// many they keep depends on what a drafter learned.
fn assert_same_guesses(a: &Draft, b: &Draft, context: &str) {
    let mut pairs = vec![(None, None)];
    let mut compared = 0;
    while let Some((at, other)) = pairs.pop() {
        for (child, match_of) in a.children(at).zip(b.children(other)) {
            assert_eq!(a.tokens[child], b.tokens[match_of], "{context}");
            pairs.push((Some(child), Some(match_of)));
            compared += 1;
        }
    }
    assert!(compared >= 4, "{context}: {compared} compared");
}

/// However its text was observed and whatever it drafted before, a drafter drafts what a fresh one does:
/// chains and trees, greedy and sampled.
#[test]
fn a_draft_depends_on_the_committed_text_alone() {
    let head = Head::new(Layout::Eagle3);
    for (width, temperature, chunk) in [(1, 0.0, 4), (3, 0.0, 64), (1, 1.0, 64), (2, 1.0, 4)] {
        let mut tokens = short_prompt(11);
        let mut used = drafter(&head, chunk);
        // The prompt in two chunks.
        observe(&mut used, &head, &tokens, 0..6);
        observe(&mut used, &head, &tokens, 6..10);
        for round in 0..6 {
            let known = tokens.len() - 1;
            let draft = propose(&mut used, &tokens, width, temperature);
            let mut fresh = drafter(&head, 64);
            observe(&mut fresh, &head, &tokens, 0..known);
            let wanted = propose(&mut fresh, &tokens, width, temperature);
            assert!(!draft.is_empty());
            let context = format!("{width} {temperature} {round}");
            assert_same_guesses(&draft, &wanted, &context);
            // Some of its first branch is accepted, then the target says something else.
            let mut branch = vec![0];
            while let Some(child) = draft.children(branch.last().copied()).next() {
                branch.push(child);
            }
            let accepted = branch
                .iter()
                .take(round % 4)
                .map(|&node| draft.tokens[node]);
            tokens.extend(accepted);
            tokens.push((tokens.len() as u32 * 7) % VOCAB as u32);
            let new = known..tokens.len() - 1;
            observe(&mut used, &head, &tokens, new);
        }
        used.end(1);
        assert_eq!(used.check_invariants(), Ok(()));
        assert_eq!(used.pool().unwrap().usage(), 0.0);
    }
}

/// A text that is not read for a while is read again from the states that come next.
#[test]
fn a_head_goes_on_with_the_states_that_come() {
    let head = Head::new(Layout::Eagle3);
    let tokens = short_prompt(24);
    for read_first in [false, true] {
        let mut used = drafter(&head, 64);
        if read_first {
            observe(&mut used, &head, &tokens, 0..9);
        }
        let context = DraftContext::default();
        used.observe(&[Committed::new(1, &tokens, 3, 9..15, &context)]);
        assert!(propose(&mut used, &tokens[..16], 1, 0.0).is_empty());
        let mut fresh = drafter(&head, 64);
        for drafter in [&mut used, &mut fresh] {
            observe(drafter, &head, &tokens, 15..20);
            observe(drafter, &head, &tokens, 20..23);
        }
        let draft = propose(&mut used, &tokens, 1, 0.0);
        assert_same_guesses(&draft, &propose(&mut fresh, &tokens, 1, 0.0), "from 15 on");
        used.end(1);
        assert_eq!(used.check_invariants(), Ok(()));
        assert_eq!(used.pool().unwrap().usage(), 0.0);
    }
}

/// After a hit a head drafts what it would draft if it had seen the whole text, also where the target has more
/// of it than the head, or the head more than the target.
#[test]
fn a_draft_after_a_hit_is_that_of_a_fresh_head() {
    let head = Head::new(Layout::Eagle3);
    let scope = CacheScope::default();
    let text = short_prompt(30);
    for (cached, len) in [(28, 30), (28, 29), (24, 30), (8, 25), (3, 30), (28, 20)] {
        let mut used = drafter(&head, 64);
        // Another request read the first tokens.
        assert_eq!(used.resume(1, &text[..cached + 2], scope, 0), 0);
        observe(&mut used, &head, &text[..cached + 2], 0..cached + 1);
        propose(&mut used, &text[..cached + 2], 1, 0.0);
        let longer = [&text[..cached + 2], &[7]].concat();
        observe(&mut used, &head, &longer, cached + 1..cached + 2);
        used.end(1);

        let prompt = &text[..len];
        let rows = used.resume(1, prompt, scope, len - 1);
        // Full blocks of rows; the last row of a text is computed again.
        assert_eq!(rows, (cached + 1).min(len - 2) / 4 * 4, "{cached} {len}");
        assert_eq!(used.resume(1, prompt, scope, len - 1), rows, "asked again");
        assert_eq!(
            used.resume(2, prompt, CacheScope(1), len - 1),
            0,
            "another scope"
        );
        used.end(2);
        // The target has perhaps less.
        let first = rows.saturating_sub(len % 3);
        let known = len - 1;
        observe(&mut used, &head, prompt, first..known);
        let draft = propose(&mut used, prompt, 1, 0.0);
        let mut fresh = drafter(&head, 64);
        observe(&mut fresh, &head, prompt, 0..known);
        assert_same_guesses(&draft, &propose(&mut fresh, prompt, 1, 0.0), "after a hit");
        used.end(1);
        assert_eq!(used.check_invariants(), Ok(()));
        assert_eq!(used.pool().unwrap().usage(), 0.0);
        used.pool().unwrap().reset_prefix_cache();
        assert_eq!(used.resume(1, prompt, scope, len - 1), 0);
    }
}

/// The second request with a prompt has the same text and the same drafts, with and without a hit; so has a
/// second turn.
#[test]
fn acceptance_is_the_same_after_a_hit() {
    for layout in LAYOUTS {
        let head = Head::new(layout);
        let engine = start(Some(&head), 256, chains(4));
        let (mut prompt, mut hits) = (short_prompt(50), 0);
        for turn in 0..3 {
            let request = greedy(&prompt, 25);
            let cold = run(&start(Some(&head), 256, chains(4)), request.clone());
            let warm = [0; 2].map(|_| run(&engine, request.clone()));
            assert_eq!(cold.cached_tokens, 0);
            for answer in &warm {
                assert_eq!((answer.ids(), answer.spec), (cold.ids(), cold.spec));
                hits += answer.cached_tokens;
            }
            assert!(warm[1].cached_tokens + 8 > prompt.len(), "{turn}");
            prompt.extend(cold.ids());
            prompt.extend([3, 1]);
        }
        assert!(hits > 300, "{hits}");
        assert_idle(&engine);
    }
}

fn start(head: Option<&Head>, num_blocks: usize, spec: SpecLimits) -> EngineHandle {
    let drafter = head.map(|head| {
        let drafter = DraftModel::of_head(head.load(), num_blocks, 4, 16).unwrap();
        Box::new(drafter) as Box<dyn Drafter>
    });
    let options = crowded(spec, 24);
    engine::spawn(target(), drafter, num_blocks, 4, options).unwrap()
}

/// With chunked prompts, batches, chains and trees, and preemption.
#[test]
fn texts_do_not_change() {
    let requests: Vec<Request> = [3, 30, 50, 11, 20, 40]
        .into_iter()
        .flat_map(|len| {
            let prompt = short_prompt(len);
            [greedy(&prompt, 25), sampled(&prompt, 25, len as u64)]
        })
        .collect();
    let texts = |head: Option<&Head>, blocks: usize, spec: SpecLimits| {
        let engine = start(head, blocks, spec);
        let all = engine.submit_all(requests.clone()).unwrap();
        let texts: Vec<Vec<u32>> = all
            .into_iter()
            .map(|events| collect(events).ids())
            .collect();
        assert_idle(&engine);
        let stats = engine.stats();
        (
            texts,
            stats.spec_draft_tokens.get(),
            stats.preemptions.get(),
        )
    };
    let (wanted, drafted, _) = texts(None, 256, chains(4));
    assert_eq!(drafted, 0);
    let tree = tree_limits(3, 9, 3);
    for layout in LAYOUTS {
        let head = Head::new(layout);
        for (blocks, spec) in [(256, chains(4)), (22, chains(4)), (256, tree)] {
            let (found, drafted, preempted) = texts(Some(&head), blocks, spec);
            assert_eq!(found, wanted, "{layout:?} {blocks}");
            assert!(drafted > 100, "{drafted}");
            assert_eq!(preempted > 0, blocks == 22);
        }
    }
}
