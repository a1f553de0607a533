use super::*;
use crate::spec::step::StepOutput;
use foretoken_core::sampling::{NoToken, SamplingParams};

const BLOCK: usize = 4;

fn state(id: SeqId, prompt: &[u32]) -> SequenceState {
    SequenceState::new(id, prompt.to_vec(), SamplingParams::default())
}

/// A step of `rows` rows without drafts.
fn input(state: &mut SequenceState, rows: usize) -> StepInput<'_> {
    StepInput {
        rows,
        sample: state.kv_len + rows == state.tokens.len(),
        nodes: 0,
        length: 0,
        width: 1,
        may_draft: false,
        prompt_scores: 0..0,
        pooled: 0..0,
        state,
    }
}

/// A step of `rows` rows, which accepts the nodes of `path`, ascending, and adds one more token each time that it samples.
fn step(
    slots: &mut StateSlots,
    state: &mut SequenceState,
    rows: usize,
    path: &[usize],
) -> KeptState {
    let inputs = [input(state, rows)];
    let mut kept = slots.plan(&inputs, false).unwrap();
    let output = StepOutput {
        path: path.to_vec(),
        ..StepOutput::default()
    };
    slots.check_invariants().unwrap();
    slots.finish(&inputs, &[Ok(output)]);
    slots.check_invariants().unwrap();
    state.kv_len += rows + path.len();
    let sample = state.kv_len == state.tokens.len() + path.len();
    let new = if sample { path.len() + 1 } else { 0 };
    state.tokens.extend((0..new).map(|i| 100 + i as u32));
    kept.pop().unwrap()
}

/// After how many tokens copies are made.
fn copied(kept: &KeptState) -> Vec<usize> {
    kept.copies.iter().map(|(at, _)| *at).collect()
}

#[test]
fn a_state_takes_in_what_is_certain() {
    let mut slots = StateSlots::new(BLOCK, 8);
    let mut one = state(1, &[1, 2, 3, 4, 5, 6]);
    let first = step(&mut slots, &mut one, 3, &[]);
    assert_eq!((first.start, copied(&first)), (StateStart::Empty, vec![]));
    // The prompt's end: a copy after its whole block.
    let second = step(&mut slots, &mut one, 3, &[]);
    assert_eq!((second.start, copied(&second)), (StateStart::Kept, vec![1]));
    // Row 6 is certain; of its draft two nodes are accepted, which the next step takes in, with a copy after 8 tokens.
    let third = step(&mut slots, &mut one, 1, &[1, 3]);
    assert_eq!((third.accepted.len(), copied(&third)), (0, vec![]));
    let fourth = step(&mut slots, &mut one, 1, &[]);
    assert_eq!(
        (&fourth.accepted[..], copied(&fourth)),
        (&[1, 3][..], vec![1])
    );
    assert_eq!(slots.num_sequences(), 1);
    slots.release(1);
    assert_eq!(slots.num_sequences(), 0);
    // The copies after 4 and after 8 tokens are known.
    let again = state(2, &one.tokens);
    assert_eq!(slots.resume(&again, 8), 8);
    assert_eq!(slots.resume(&again, 4), 4);
    let mut other = state(3, &[1, 2, 3, 5, 6, 7, 8, 9]);
    assert_eq!(slots.resume(&other, 4), 0);
    other.draft_context.scope = crate::spec::draft::CacheScope(9);
    other.tokens = one.tokens.clone();
    assert_eq!(slots.resume(&other, 8), 0, "of another scope");
}

/// All but its last token can be cached, however long it is and in however many chunks it is read.
#[test]
fn a_repeated_prompt_has_its_state() {
    for len in 1..=3 * BLOCK {
        let prompt: Vec<u32> = (0..len as u32).collect();
        let cached = (len - 1) / BLOCK * BLOCK;
        for chunk in 1..=len {
            let mut slots = StateSlots::new(BLOCK, 8);
            let mut one = state(1, &prompt);
            while one.kv_len < len {
                let rows = chunk.min(len - one.kv_len);
                step(&mut slots, &mut one, rows, &[]);
            }
            let again = state(2, &prompt);
            let found = slots.resume(&again, cached);
            assert_eq!(found, cached, "{len} in chunks of {chunk}");
            // Also when the first one has gone on, and has ended.
            slots.release(2);
            for _ in 0..2 * BLOCK {
                step(&mut slots, &mut one, 1, &[]);
            }
            assert_eq!(slots.resume(&again, cached), cached);
            slots.release(1);
            assert_eq!(slots.resume(&again, cached), cached);
        }
    }
}

#[test]
fn a_sequence_begins_with_the_copy_that_it_has_chosen() {
    let mut slots = StateSlots::new(BLOCK, 1);
    let mut one = state(1, &[1, 2, 3, 4, 5]);
    let made = step(&mut slots, &mut one, 5, &[]);
    let (_, copy) = made.copies[0];
    let mut two = state(2, &[1, 2, 3, 4, 9, 9, 9, 9, 9]);
    assert_eq!(slots.resume(&two, 4), 4);
    // While it waits, nothing takes its copy away: not another prompt, nor a reset.
    let mut three = state(3, &[7; 5]);
    step(&mut slots, &mut three, 5, &[]);
    slots.reset_prefix_cache();
    two.kv_len = 4;
    let began = step(&mut slots, &mut two, 5, &[]);
    assert_eq!(
        (began.start, copied(&began)),
        (StateStart::CopyOf(copy), vec![4])
    );
    // Now its prompt's copy has taken the place of the older one.
    assert_eq!(slots.resume(&state(4, &two.tokens), 8), 8);
    assert_eq!(slots.resume(&state(4, &two.tokens), 4), 0);
    slots.release(4);
    for id in 1..4 {
        slots.release(id);
    }
    slots.check_invariants().unwrap();
    // Without the state of its first tokens a sequence does not begin.
    let mut five = state(5, &[8; 9]);
    five.kv_len = 4;
    let input = input(&mut five, 5);
    slots.plan(&[input], false).unwrap_err();
    slots.check_invariants().unwrap();
}

/// Two texts with the same system prompt: the third one begins after it.
#[test]
fn where_texts_part_a_copy_is_made() {
    let mut slots = StateSlots::new(BLOCK, 8);
    let prompt = |end: u32| [&[5; 9][..], &[end; 8]].concat();
    let mut one = state(1, &prompt(1));
    step(&mut slots, &mut one, 17, &[]);
    // The blocks of 8 tokens are cached, but no state.
    let mut two = state(2, &prompt(2));
    assert_eq!(slots.resume(&two, 8), 0);
    let kept = step(&mut slots, &mut two, 17, &[]);
    let mut at = copied(&kept);
    at.sort_unstable();
    assert_eq!(at, [8, 16]);
    assert_eq!(slots.resume(&state(3, &prompt(3)), 8), 8);
    // A step that fails loses no slot.
    let mut four = state(4, &prompt(4));
    slots.resume(&four, 0);
    let input = input(&mut four, 17);
    slots.plan(&[input], false).unwrap();
    slots.release(4);
    slots.check_invariants().unwrap();
    slots.share_nothing();
    let mut five = state(5, &prompt(5));
    slots.resume(&five, 0);
    assert!(copied(&step(&mut slots, &mut five, 17, &[])).is_empty());
}

/// The memory plan has two slots for each sequence, and those of the known copies, however many prompts come at once.
#[test]
fn a_burst_of_prompts_takes_no_more_slots_than_planned() {
    const SEQUENCES: u64 = 8;
    const LEN: usize = 17;
    let prompt = |end: u32| [&[5; 9][..], &[end; 8]].concat();
    // In one chunk or two, where the blocks before the texts part are cached, or not.
    for (chunk, is_cached) in [(LEN, true), (LEN, false), (9, false)] {
        for max_copies in [1, 4, 64] {
            let mut slots = StateSlots::new(BLOCK, max_copies);
            let mut all: Vec<SequenceState> = (0..SEQUENCES)
                .map(|id| state(id, &prompt(10 + id as u32)))
                .collect();
            for one in all.iter().filter(|_| is_cached) {
                assert_eq!(slots.resume(one, 8), 0);
            }
            let mut copies = Vec::new();
            while all[0].kv_len < LEN {
                let rows = chunk.min(LEN - all[0].kv_len);
                let inputs: Vec<_> = all.iter_mut().map(|one| input(one, rows)).collect();
                let kept = slots.plan(&inputs, false).unwrap();
                slots.check_invariants().unwrap();
                copies.extend(kept.iter().flat_map(copied));
                let outputs: Vec<StepResult> =
                    inputs.iter().map(|_| Ok(StepOutput::default())).collect();
                slots.finish(&inputs, &outputs);
                slots.check_invariants().unwrap();
                all.iter_mut().for_each(|one| one.kv_len += rows);
            }
            let planned = 2 * SEQUENCES as usize + max_copies;
            let used = slots.num_slots as usize;
            assert!(
                used <= planned,
                "{used} of {planned}, chunks of {chunk}, {is_cached}"
            );
            // The copy where they part is made once, and found.
            if is_cached {
                assert_eq!(copies.iter().filter(|at| **at == 8).count(), 1);
                assert_eq!(slots.resume(&state(99, &prompt(99)), 8), 8);
            }
        }
    }
}

/// Whatever tentative steps are taken back, the steps that stand are those of a text without them, and no slot is lost.
#[test]
fn a_step_that_is_taken_back_changes_nothing() {
    let prompt: Vec<u32> = (0..22).collect();
    let text = |tries: usize| {
        let mut slots = StateSlots::new(BLOCK, 2);
        let mut first = state(1, &prompt[..9]);
        step(&mut slots, &mut first, 9, &[]);
        slots.release(1);
        // It begins with the copy of the first one.
        let mut one = state(2, &prompt);
        one.kv_len = slots.resume(&one, 8);
        assert_eq!(one.kv_len, 8);
        let mut starts = Vec::new();
        for _ in 0..2 {
            for _ in 0..tries {
                let inputs = [input(&mut one, 7)];
                let kept = slots.plan(&inputs, true).unwrap();
                slots.check_invariants().unwrap();
                let StateStart::CopyOf(from) = kept[0].start else {
                    panic!("{kept:?}")
                };
                let written = kept[0].copies.iter().map(|(_, slot)| *slot);
                assert!(!written.chain([kept[0].slot]).any(|slot| slot == from));
                slots.take_back();
                slots.check_invariants().unwrap();
            }
            let kept = step(&mut slots, &mut one, 7, &[]);
            starts.push((kept.start == StateStart::Kept, copied(&kept)));
        }
        slots.release(2);
        slots.check_invariants().unwrap();
        let again = state(3, &prompt);
        (starts, slots.resume(&again, 20))
    };
    let plain = text(0);
    assert_eq!(plain.1, 20);
    assert_eq!(text(3), plain);
}

/// The copies of a step that failed are for nobody.
#[test]
fn a_step_that_failed_leaves_no_copy() {
    let prompt = [3; 3 * BLOCK + 1];
    for fails in [false, true] {
        let mut slots = StateSlots::new(BLOCK, 8);
        let mut one = state(1, &prompt);
        let inputs = [input(&mut one, prompt.len())];
        let kept = slots.plan(&inputs, false).unwrap();
        assert!(!copied(&kept[0]).is_empty());
        let output = match fails {
            true => Err(NoToken::NotFinite),
            false => Ok(StepOutput::default()),
        };
        slots.finish(&inputs, &[output]);
        slots.release(1);
        slots.check_invariants().unwrap();
        let found = slots.resume(&state(2, &prompt), 3 * BLOCK);
        assert_eq!(found > 0, !fails, "{found}");
    }
}

/// A tentative step that stands gives its slot back, and so does one that failed; where there were drafts there is none.
#[test]
fn a_tentative_step_that_stands_loses_no_slot() {
    let mut slots = StateSlots::new(BLOCK, 8);
    let mut one = state(1, &[3; 40]);
    let tentative = |slots: &mut StateSlots, one: &mut SequenceState| {
        let inputs = [input(one, 10)];
        let kept = slots.plan(&inputs, true).unwrap();
        slots.finish(&inputs, &[Ok(StepOutput::default())]);
        slots.check_invariants().unwrap();
        one.kv_len += 10;
        (kept[0].start, kept[0].slot)
    };
    let (start, mut slot) = tentative(&mut slots, &mut one);
    assert_eq!(start, StateStart::Empty);
    for _ in 0..2 {
        let (start, next) = tentative(&mut slots, &mut one);
        assert_eq!(start, StateStart::CopyOf(slot));
        slot = next;
    }
    assert!(slots.num_slots < 6, "{slots:?}");
    slots.plan(&[input(&mut one, 10)], true).unwrap();
    slots.release(1);
    slots.check_invariants().unwrap();
    let mut two = state(2, &[4; 5]);
    step(&mut slots, &mut two, 5, &[]);
    step(&mut slots, &mut two, 1, &[0]);
    slots.plan(&[input(&mut two, 1)], true).unwrap_err();
    slots.check_invariants().unwrap();
}
