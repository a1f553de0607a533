//! Hidden states for drafters: each committed position once, bit for bit as in a plain forward.

use crate::common::hooked::watched;
use crate::common::rig::{Rig, Seq};
use crate::common::tiny::{self, HIDDEN, llama_config, short_prompt, tensors, write_shards};
use crate::common::*;
use crate::engine::Dice;
use crate::trees::RandomTrees;
use candle_core::{DType, Device, Tensor};
use foretoken::engine::{self, EngineOptions, Request};
use foretoken::error::Result;
use foretoken::model::{Batch, Model, Taps};
use foretoken::spec::{Committed, Draft, DraftRequest, Drafter, SeqId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Everything observed of one sequence until it was forgotten.
#[derive(Default)]
struct Record {
    tokens: Vec<u32>,
    /// One row per position.
    hidden: Vec<Vec<f32>>,
    /// Number of requested drafts, and of those for which all hidden states were known.
    asked: usize,
    complete: usize,
}

/// Collects hidden states while another drafter does the drafting.
struct Recorder {
    drafter: RandomTrees,
    layers: Vec<usize>,
    open: HashMap<SeqId, Record>,
    forgotten: Arc<Mutex<Vec<Record>>>,
}

fn recorder(drafter: RandomTrees, layers: &[usize]) -> Recorder {
    Recorder {
        drafter,
        layers: layers.to_vec(),
        open: HashMap::new(),
        forgotten: Arc::default(),
    }
}

impl Drafter for Recorder {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        for request in requests.iter() {
            if let Some(record) = self.open.get_mut(&request.id) {
                let known = record.hidden.len();
                // All but the last are known, unless a step recomputes the end of a preempted sequence.
                assert!(known < request.tokens.len());
                record.complete += usize::from(known + 1 == request.tokens.len());
                record.asked += 1;
            }
        }
        self.drafter.propose(requests)
    }

    fn taps(&mut self) -> &[usize] {
        &self.layers
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            let record = self.open.entry(committed.id).or_default();
            assert_eq!(committed.new.start, record.hidden.len());
            assert!(committed.new.end <= committed.tokens.len());
            let hidden = committed.hidden.as_ref().expect("it was asked for");
            assert_eq!(hidden.dim(0).unwrap(), committed.new.len());
            record.hidden.extend(hidden.to_vec2::<f32>().unwrap());
            record.tokens = committed.tokens.to_vec();
        }
    }

    fn forget(&mut self, id: SeqId) {
        let record = self.open.remove(&id);
        self.forgotten.lock().unwrap().extend(record);
    }
}

/// Hidden states at taps `layers` for all `tokens`, and the logits, by one forward.
pub fn plain(
    model: Box<dyn Model>,
    tokens: &[u32],
    layers: &[usize],
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let mut rig = Rig::new(model, 64, 4);
    let mut seq = Seq::default();
    rig.blocks.reserve(&mut seq.table, tokens.len()).unwrap();
    let mut batch = Batch::default();
    batch.push_span(tokens, &[], 0, &seq.table, 4);
    batch.logits = (0..tokens.len() as u32).collect();
    batch.taps = Some(Taps {
        layers: layers.to_vec(),
        rows: batch.logits.clone(),
    });
    let output = rig.model.forward(&batch, &mut rig.kv).unwrap();
    let hidden = output.tapped.expect("it was asked for");
    (hidden.to_vec2().unwrap(), output.logits.to_vec2().unwrap())
}

/// Runs `requests` together; returns their records and the number of preemptions.
fn observe(
    model: &dyn Fn() -> Box<dyn Model>,
    layers: &[usize],
    toy: &Toy,
    requests: &[Request],
) -> (Vec<Record>, u64) {
    let drafter = recorder(RandomTrees::new(model(), model()), layers);
    let forgotten = drafter.forgotten.clone();
    let (blocks, options) = (toy.num_blocks, toy.options.clone());
    let drafter = Some(Box::new(drafter) as Box<dyn Drafter>);
    let engine = engine::spawn(model(), drafter, blocks, toy.block_size, options).unwrap();
    for receiver in engine.submit_all(requests.to_vec()).unwrap() {
        collect(receiver);
    }
    assert_idle(&engine);
    let records = std::mem::take(&mut *forgotten.lock().unwrap());
    (records, engine.stats().preemptions.get())
}

fn check(model: &dyn Fn() -> Box<dyn Model>, layers: &[usize], record: &Record) {
    let tokens = &record.tokens[..record.hidden.len()];
    let (want, _) = plain(model(), tokens, layers);
    for (position, (got, want)) in record.hidden.iter().zip(&want).enumerate() {
        assert!(got == want, "position {position} of {tokens:?}");
    }
}

/// With chunks, accepted and rejected drafts, chains and trees, and preemption, the observed hidden
/// states are those of the committed text.
#[test]
fn what_is_observed_are_the_hidden_states_of_the_text() {
    let model = || -> Box<dyn Model> { Box::new(toy_model(0.0).with_eos(&[5])) };
    let (mut preemptions, mut positions) = (0, 0);
    let (mut asked, mut complete) = (0, 0);
    for case in 0..60 {
        let mut dice = Dice(2_000_000 + case);
        let toy = dice.toy();
        let requests: Vec<Request> = (0..12)
            .map(|_| dice.request(toy.options.spec.length))
            .collect();
        let (records, preempted) = observe(&model, &[0, 1], &toy, &requests);
        for record in &records {
            check(&model, &[0, 1], record);
            positions += record.hidden.len();
            asked += record.asked;
            complete += record.complete;
        }
        let may_draft = |r: &&Request| r.spec_length != Some(0) && r.max_tokens != Some(1);
        assert!(records.len() >= requests.iter().filter(may_draft).count());
        preemptions += preempted;
    }
    let seen = format!("{preemptions} preemptions, {positions} positions");
    assert!(preemptions > 10 && positions > 10_000, "{seen}");
    assert!(
        asked > 1000 && complete * 10 > asked * 9,
        "{complete} of {asked}"
    );
}

/// A Llama with `layers` layers and the weights of [`tensors`].
fn llama(layers: usize) -> Box<dyn Model> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config(16);
    config["num_hidden_layers"] = layers.into();
    tiny::write_config(folder.path(), &config);
    let mut tensors = tensors(16, DType::F32);
    tensors.retain(|name, _| layers > 1 || !name.contains("layers.1."));
    write_shards(folder.path(), &tensors);
    tiny::open(folder.path()).unwrap()
}

#[test]
fn a_decoders_hidden_states_are_observed_bit_for_bit() {
    let model = || llama(2);
    let toy = Toy {
        num_blocks: 30,
        options: EngineOptions {
            max_num_batched_tokens: 24,
            max_num_seqs: 4,
            spec: chains(6),
            max_prompt_wait: PROMPT_WAIT,
            ..EngineOptions::default()
        },
        ..Toy::default()
    };
    let prompts = [3, 30, 50, 11, 20, 40];
    let requests = prompts.map(|len| {
        let mut request = greedy(&short_prompt(len), 25);
        request.params.ignore_eos = true;
        request.params.temperature = if len % 4 == 0 { 1.0 } else { 0.0 };
        request
    });
    let (records, preemptions) = observe(&model, &[0, 1, 2], &toy, &requests);
    assert!(preemptions > 0, "there was no pressure");
    assert!(records.len() > requests.len());
    records.iter().for_each(|r| check(&model, &[0, 1, 2], r));
}

/// Tap 0 gives the embeddings, a tap between layers the final state of a model that ends there, and
/// the last tap the state from which the logits are computed.
#[test]
fn taps_count_from_the_embedding_to_what_the_norm_is_given() {
    let tokens = short_prompt(9);
    let (hidden, logits) = plain(llama(2), &tokens, &[0, 1, 2]);
    let (of_one, _) = plain(llama(1), &tokens, &[1]);
    let weights = tensors(16, DType::F32);
    let embedding = &weights["model.embed_tokens.weight"];
    let rows = embedding.to_vec2::<f32>().unwrap();
    let last: Vec<f32> = hidden
        .iter()
        .flat_map(|row| row[2 * HIDDEN..].to_vec())
        .collect();
    for ((hidden, one), &token) in hidden.iter().zip(&of_one).zip(&tokens) {
        assert_eq!(hidden.len(), 3 * HIDDEN);
        assert_eq!(hidden[..HIDDEN], rows[token as usize]);
        assert_eq!(&hidden[HIDDEN..2 * HIDDEN], one);
    }
    let last = Tensor::from_vec(last, (tokens.len(), HIDDEN), &Device::Cpu).unwrap();
    let norm = &weights["model.norm.weight"];
    let normed = candle_nn::ops::rms_norm(&last, norm, 1e-5).unwrap();
    let want = normed.matmul(&embedding.t().unwrap()).unwrap();
    let want = want.to_vec2::<f32>().unwrap();
    for (got, want) in logits.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() < 1e-3, "{got} and {want}");
    }
}

#[test]
fn nobody_pays_for_hidden_states_that_nobody_wants() {
    let toy = Toy::default();
    let tapped = |layers: &[usize], spec_length| {
        let rows = Arc::new(AtomicUsize::new(0));
        let trees = RandomTrees::new(Box::new(toy_model(0.0)), Box::new(toy_model(0.5)));
        let drafter: Box<dyn Drafter> = match layers {
            [] => Box::new(trees),
            _ => Box::new(recorder(trees, layers)),
        };
        let tapped = rows.clone();
        let target = watched(toy_model(0.0), move |batch| {
            let rows = batch.taps.as_ref().map(|taps| taps.rows.len());
            assert_ne!(rows, Some(0));
            tapped.fetch_add(rows.unwrap_or(0), Ordering::Relaxed);
            Ok(())
        });
        let options = toy.options.clone();
        let engine = engine::spawn(target, Some(drafter), 256, 4, options).unwrap();
        let request = Request {
            spec_length,
            ..greedy(&[1, 2, 3], 20)
        };
        assert_eq!(run(&engine, request).ids().len(), 20);
        assert_idle(&engine);
        rows.load(Ordering::Relaxed)
    };
    assert!(tapped(&[1], None) >= 3 + 19);
    assert_eq!(tapped(&[1], Some(0)), 0);
    assert_eq!(tapped(&[], None), 0);
}
