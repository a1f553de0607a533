//! Drafts by a model with a mask token.

use super::BlockDrafter;
use crate::spec::draft::{Draft, DraftContext, DraftRequest};
use crate::spec::drafter::Drafter;
use foretoken_core::kv::{BlockAllocator, BlockTable};
use foretoken_core::model::toy::ToyModel;
use foretoken_core::model::{Batch, Model};
use foretoken_core::sampling::{Acceptance, Sampler, SamplingParams};

const VOCAB: usize = 32;
const MASK: u32 = 31;
const LENGTH: usize = 4;

fn model() -> ToyModel {
    ToyModel::new(VOCAB, 256, 5, 0.0).with_mask_token(MASK)
}

fn drafter(chunk: usize) -> BlockDrafter {
    BlockDrafter::of_model(Box::new(model()), 64, 4, chunk).unwrap()
}

fn propose(drafter: &mut BlockDrafter, tokens: &[u32], acceptance: Acceptance) -> Draft {
    let temperature = match acceptance {
        Acceptance::Coupled => 0.0,
        Acceptance::Rejection => 1.0,
    };
    let params = SamplingParams::at(temperature);
    let (mut sampler, context) = (Sampler::new(params, tokens), DraftContext::default());
    let request = DraftRequest {
        acceptance,
        ..DraftRequest::chain(1, tokens, LENGTH, &mut sampler, &context)
    };
    let draft = drafter.propose(&mut [request]).unwrap().remove(0);
    drafter.check_invariants().unwrap();
    draft
}

/// The logits after `tokens` and each of the masks after them, of a plain forward of the model.
fn logits(tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut model = model();
    let masks = [MASK; LENGTH - 1];
    let rows = [tokens, &masks].concat();
    let (mut blocks, mut table) = (BlockAllocator::new(64, 4), BlockTable::default());
    blocks.reserve(&mut table, rows.len()).unwrap();
    let mut store = model.new_kv(64, 4).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&rows, &[], 0, &table, 4);
    batch.logits = (tokens.len() as u32 - 1..rows.len() as u32).collect();
    let output = model.forward(&batch, &mut store).unwrap();
    output.logits.to_vec2().unwrap()
}

fn greatest(row: &[f32]) -> u32 {
    let all = (0..).zip(row);
    all.max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

/// PARD, arXiv 2504.18583, section 3.1: the rows of the last token and of the masks after it predict the block.
#[test]
fn a_block_is_what_the_model_predicts_at_masks_after_the_text() {
    let mut drafter = drafter(64);
    let mut tokens = vec![3, 1, 4, 1, 5];
    for round in 0..30 {
        let want: Vec<u32> = logits(&tokens).iter().map(|row| greatest(row)).collect();
        let draft = propose(&mut drafter, &tokens, Acceptance::Coupled);
        assert_eq!(draft.tokens, want, "round {round}");
        assert!(draft.is_chain());
        // Some of the block stands, then comes another token.
        tokens.extend(&want[..round % (LENGTH + 1)]);
        tokens.push((7 * tokens.len() % 31) as u32);
    }
    drafter.forget(1);
    assert_eq!(drafter.pool.usage(), 0.0);
}

/// The rejection rule needs the distribution of each row.
#[test]
fn tokens_are_drawn_from_the_distributions_of_their_rows() {
    let tokens = [3, 1, 4, 1, 5];
    let draft = propose(&mut drafter(64), &tokens, Acceptance::Rejection);
    assert_eq!((draft.len(), draft.dists.len()), (LENGTH, LENGTH));
    for (node, row) in logits(&tokens).iter().enumerate() {
        let params = SamplingParams::default();
        let want = foretoken_core::sampling::distribution(row, &Sampler::new(params, &tokens));
        let found = draft.dist(node);
        for id in 0..VOCAB as u32 {
            let gap = found.on_host().prob(id) - want.as_ref().unwrap().prob(id);
            assert!(gap.abs() < 1e-6, "node {node}, id {id}");
        }
    }
}

/// A long prompt is read by chunks, one a round; after that the drafts are those of a drafter that sees all at once.
#[test]
fn a_long_prompt_is_read_by_chunks() {
    let mut tokens: Vec<u32> = (0..50).map(|i| i % 31).collect();
    let mut used = drafter(20);
    for round in 1..8 {
        tokens.push(round);
        let draft = propose(&mut used, &tokens, Acceptance::Coupled);
        assert_eq!(draft.is_empty(), round < 3, "round {round}");
        let at_once = propose(&mut drafter(64), &tokens, Acceptance::Coupled);
        assert!(round < 3 || draft.tokens == at_once.tokens, "round {round}");
    }
}

#[test]
fn without_room_there_is_no_draft() {
    let mut small = BlockDrafter::of_model(Box::new(model()), 2, 4, 64).unwrap();
    assert!(propose(&mut small, &[1; 6], Acceptance::Coupled).is_empty());
    assert_eq!(
        propose(&mut small, &[1; 5], Acceptance::Coupled).len(),
        LENGTH
    );
}
