use super::*;
use crate::spec::draft::{Committed, DraftContext};
use foretoken_core::model::toy::ToyModel;
use foretoken_core::sampling::{Sampler, SamplingParams};

fn drafter(chunk: usize) -> DraftModel {
    DraftModel::new(Box::new(ToyModel::new(32, 256, 5, 0.0)), 64, 4, chunk).unwrap()
}

fn propose(drafter: &mut DraftModel, tokens: &[u32], prompt_len: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(SamplingParams::default(), &tokens[..prompt_len]);
    tokens[prompt_len..].iter().for_each(|&id| sampler.push(id));
    let context = DraftContext::default();
    let request = DraftRequest::chain(1, tokens, 4, &mut sampler, &context);
    drafter.propose(&mut [request]).unwrap().remove(0).tokens
}

#[test]
fn calibration_measures_the_model_and_leaves_nothing() {
    let mut drafter = drafter(16);
    let measured = drafter.pool.calibrate(16).unwrap().forwards;
    let rows: Vec<usize> = measured.iter().map(|one| one.rows).collect();
    assert_eq!(rows, [1, 2, 4, 6, 8, 16]);
    assert!(measured.iter().all(|one| one.seconds > 0.0));
    assert_eq!(drafter.pool.usage(), 0.0);
    drafter.check_invariants().unwrap();
}

/// After any outcome of a round, the next draft equals that of a drafter that sees the sequence
/// for the first time.
#[test]
fn rolls_back_to_the_common_prefix() {
    for observed in [false, true] {
        for kept in 0..=4 {
            let mut tokens = vec![3, 1, 4, 1, 5];
            let mut used = drafter(64);
            let draft = propose(&mut used, &tokens, 4);
            tokens.extend(&draft[..kept]);
            tokens.push(31 - draft.get(kept).copied().unwrap_or(0) % 2);
            if observed {
                let context = DraftContext::default();
                used.observe(&[Committed::new(1, &tokens, 4, 4..5 + kept, &context)]);
                assert!(used.pool.network.blocks.num_free() >= 64 - tokens.len().div_ceil(4));
            }
            let fresh = propose(&mut drafter(64), &tokens, 4);
            assert_eq!(propose(&mut used, &tokens, 4), fresh, "{kept} kept");
            assert_eq!(used.check_invariants(), Ok(()));
            used.forget(1);
            assert_eq!((used.check_invariants(), used.pool.usage()), (Ok(()), 0.0));
        }
    }
}

/// A staged draft is the draft without stages, whatever the chain below it has right, in fewer forwards.
#[test]
fn a_staged_draft_is_the_same_draft() {
    const LENGTH: usize = 6;
    let run = |drafter: &mut DraftModel, temperature: f32, tokens: &[u32], staged: Vec<u32>| {
        let params = SamplingParams {
            temperature,
            frequency_penalty: 0.4,
            seed: 3,
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(params, &tokens[..4]);
        tokens[4..].iter().for_each(|&id| sampler.push(id));
        let context = DraftContext::default();
        let request = DraftRequest {
            staged,
            ..DraftRequest::chain(1, tokens, LENGTH, &mut sampler, &context)
        };
        let draft = drafter.propose(&mut [request]).unwrap().remove(0);
        (draft, drafter.pool.network.forwards.len())
    };
    for temperature in [0.0, 1.0] {
        let (mut staged, mut plain) = (drafter(64), drafter(64));
        let mut tokens = vec![3, 1, 4, 1, 5];
        for round in 0..40 {
            let (want, forwards) = run(&mut plain, temperature, &tokens, Vec::new());
            assert_eq!(forwards, LENGTH);
            // Right down to some token, then wrong, and sometimes longer than the draft.
            let right = round % (LENGTH + 1);
            let mut below = want.tokens[..right].to_vec();
            below.extend([want.tokens.get(right).map_or(0, |id| (id + 1) % 32), 9, 9]);
            let (draft, forwards) = run(&mut staged, temperature, &tokens, below);
            assert_eq!(draft, want, "{round}, {temperature}");
            assert_eq!(forwards, LENGTH - right.min(LENGTH - 1), "{round}");
            // A token of each round is the target's own.
            tokens.extend(&want.tokens[..round % 4]);
            tokens.push((tokens.len() * 7 % 32) as u32);
            staged.check_invariants().unwrap();
        }
        staged.forget(1);
        assert_eq!(staged.pool.usage(), 0.0);
    }
}

/// A long prompt is fed by chunks, one per round; after that the drafts are those of a drafter
/// that sees everything at once.
#[test]
fn a_long_prompt_is_prefilled_by_chunks() {
    let mut tokens: Vec<u32> = (0..50).map(|i| i % 32).collect();
    let mut used = drafter(20);
    for round in 1..8 {
        tokens.push(round);
        let draft = propose(&mut used, &tokens, 50);
        assert_eq!(draft.is_empty(), round < 3, "round {round}");
        let at_once = propose(&mut drafter(64), &tokens, 50);
        assert!(round < 3 || draft == at_once, "round {round}");
    }
}

/// However many long prompts there are, a round reads one chunk, and all get their drafts, the shortest first.
#[test]
fn a_round_reads_one_chunk_of_all_prompts() {
    const CHUNK: usize = 20;
    let mut drafter = drafter(CHUNK);
    let text = |(first, len): (u32, u32)| (0..len).map(move |i| (first + 7 * i) % 32);
    let texts = [(0, 50), (1, 50), (2, 30)].map(|text_of| text(text_of).collect::<Vec<u32>>());
    let mut drafted_in = [0; 3];
    for round in 1..=8 {
        let params = SamplingParams::default();
        let mut samplers = vec![Sampler::new(params, &[]); texts.len()];
        let context = DraftContext::default();
        let each = (1..).zip(&texts).zip(&mut samplers);
        let requests = each
            .map(|((id, tokens), sampler)| DraftRequest::chain(id, tokens, 4, sampler, &context));
        let mut requests: Vec<DraftRequest<'_>> = requests.collect();
        let drafts = drafter.propose(&mut requests).unwrap();
        let drafted: usize = drafts.iter().map(Draft::len).sum();
        let forwards = drafter.pool.network.forwards.iter();
        let rows: usize = forwards.map(|(rows, _)| rows).sum();
        assert!(rows <= CHUNK + drafted, "{rows} rows, round {round}");
        for (first, draft) in drafted_in.iter_mut().zip(&drafts) {
            if *first == 0 && !draft.is_empty() {
                *first = round;
            }
        }
    }
    assert_eq!(drafted_in, [5, 8, 2]);
    (1..=3).for_each(|id| drafter.forget(id));
    assert_eq!(drafter.pool.usage(), 0.0);
}

#[test]
fn no_room_is_an_empty_draft() {
    let model = Box::new(ToyModel::new(32, 256, 5, 0.0));
    let mut small = DraftModel::new(model, 2, 4, 64).unwrap();
    assert!(propose(&mut small, &[1; 6], 5).is_empty());
    assert_eq!(propose(&mut small, &[1; 5], 4).len(), 4);
}
