//! The drafters that a server has by default, over random schedules: tables alone, and behind a draft model, one
//! with another tokenizer, a parallel head and an EAGLE head. Whatever they guess, no text changes.

use crate::common::grammar::spelled;
use crate::common::*;
use crate::eagle_head::{self, Head, LAYOUTS};
use crate::engine::Dice;
use crate::parallel;
use crate::prefix::reset;
use foretoken::engine::{self, Event, Events, FinishReason, Request};
use foretoken::model::Model;
use foretoken::sampling::SamplingParams;
use foretoken::spec::{
    CacheScope, Cascade, DraftContext, DraftModel, Drafter, JointModel, JointVocabulary, Lookahead,
    Tables, Tokenizer, Translator,
};
use std::collections::HashMap;

/// The tokens of a request, and how it ended.
type Outcome = (Vec<u32>, Result<FinishReason, String>);

fn outcome(mut events: Events) -> Outcome {
    let mut ids = Vec::new();
    loop {
        match events.blocking_recv().expect("an end") {
            Event::Prompt(_) => {}
            Event::Tokens { tokens, finish, .. } => {
                ids.extend(tokens.iter().map(|token| token.id));
                if let Some(finish) = finish {
                    return (ids, Ok(finish));
                }
            }
            Event::Embedding { .. } => panic!("an embedding is no text"),
            Event::Failed(error) => return (ids, Err(error.to_string())),
        }
    }
}

/// A request of a conversation that begins as one of `starts`.
fn request(dice: &mut Dice, toy: &Toy, starts: &[Vec<u32>], with_grammars: bool) -> Request {
    let start = dice.of(starts);
    let kept = start.len().min(40) - dice.roll(5).min(start.len() - 1);
    let mut params = dice.params();
    params.grammar = dice.grammar().filter(|_| with_grammars);
    params.thought = dice.thought();
    Request {
        prompt: [&start[..kept], &dice.prompt(4)].concat(),
        params,
        synthetic_acceptance: None,
        acceptance: None,
        draft_context: DraftContext {
            scope: CacheScope(dice.of(&[0, 0, 0, 1])),
            ..DraftContext::default()
        },
        ..dice.request(toy.options.spec.length)
    }
}

/// A prediction of an answer, often with a mistake.
fn prediction(dice: &mut Dice, answer: &[u32]) -> Vec<u32> {
    let mut predicted = answer.to_vec();
    if dice.roll(3) > 0 && !predicted.is_empty() {
        let at = dice.roll(predicted.len());
        predicted[at] = dice.roll(32) as u32;
    }
    predicted
}

/// What happened in the schedules.
#[derive(Debug, Default)]
struct Seen {
    preemptions: u64,
    interrupted: u64,
    cached: u64,
    /// Accepted draft tokens by their source.
    accepted: HashMap<&'static str, u64>,
    /// Texts that followed a grammar, and had words or ids forbidden besides.
    restricted: usize,
    failed: usize,
    /// Texts whose thought was closed for them.
    closed: usize,
}

impl Seen {
    /// Conversations of several turns, each of requests with one to three choices. Each text is compared with
    /// that of an engine that decodes plainly, one request at a time, without a prefix cache.
    fn converse(
        &mut self,
        case: u64,
        dice: &mut Dice,
        toy: &Toy,
        target: &dyn Fn() -> Box<dyn Model>,
        drafter: Box<dyn Drafter>,
    ) {
        let (blocks, size) = (toy.num_blocks, toy.block_size);
        let options = toy.options.clone();
        let model = toy.interrupting(target());
        let engine = engine::spawn(model, Some(drafter), blocks, size, options).unwrap();
        let mut options = Toy::default().options;
        options.no_prefix_caching = true;
        let plain = engine::spawn(target(), None, 512, size, options).unwrap();
        let has_grammars = target().info().vocab_size == VOCAB;
        let mut starts: Vec<Vec<u32>> = (0..2).map(|_| dice.prompt(40)).collect();
        for _ in 0..3 {
            let mut wanted = Vec::new();
            for _ in 0..4 {
                let mut request = request(dice, toy, &starts, has_grammars);
                let alone = outcome(plain.submit(request.clone()).unwrap());
                if dice.roll(2) == 0 {
                    let predicted = prediction(dice, &alone.0);
                    request.draft_context.prediction = predicted.into();
                }
                starts.push([&request.prompt[..], &alone.0].concat());
                wanted.push((request, alone));
            }
            let mut submitted = Vec::new();
            for (request, alone) in &wanted {
                let choices = vec![request.clone(); 1 + dice.roll(3)];
                for events in engine.submit_all(choices).unwrap() {
                    // Some clients disconnect at once.
                    if dice.roll(6) > 0 {
                        submitted.push((request, alone, events));
                    }
                }
                if dice.roll(6) == 0 {
                    reset(&engine);
                }
            }
            for (request, alone, events) in submitted {
                let found = outcome(events);
                self.compare(case, request, alone, &found);
            }
            if toy.interruptions.is_some() {
                // Alone, so that it is interrupted however fast the others were.
                assert_idle(&engine);
                reset(&engine);
                let (request, alone) = &wanted[0];
                let found = outcome(engine.submit(request.clone()).unwrap());
                self.compare(case, request, alone, &found);
            }
        }
        assert_idle(&engine);
        assert_idle(&plain);
        let stats = engine.stats();
        self.preemptions += stats.preemptions.get();
        self.interrupted += stats.interrupted_tokens.get();
        self.cached += stats.prefix_cache_hits.get();
        let sources = "model own prediction pool recycled lookahead grammar";
        for source in sources.split(' ') {
            let accepted = stats.spec_accepted_by_source.with_label_values(&[source]);
            *self.accepted.entry(source).or_default() += accepted.get();
        }
    }

    fn compare(&mut self, case: u64, request: &Request, alone: &Outcome, found: &Outcome) {
        let params = &request.params;
        assert_eq!(found, alone, "case {case}: {request:?}");
        let is_restricted = params.allowed.is_some() || !params.bad_words.is_empty();
        if alone.1.is_err() {
            // No token is left.
            assert!(params.grammar.is_some() && is_restricted, "case {case}");
            self.failed += 1;
        } else {
            self.restricted += usize::from(params.grammar.is_some() && is_restricted);
        }
        self.closed += usize::from(closes_in_time(params, &found.0));
    }

    fn assert_all_happened(&self, sources: &[&str]) {
        println!("{self:?}");
        assert!(self.preemptions > 20 && self.cached > 200, "{self:?}");
        assert!(self.interrupted > 20, "{self:?}");
        assert!(self.closed > 50, "{self:?}");
        let accepted = |source: &&str| self.accepted[source];
        assert!(sources.iter().map(accepted).all(|n| n > 10), "{self:?}");
    }
}

/// Checks that a thought that the prompt has opened is closed at its limit, if not before. Returns whether it was closed
/// there. A grammar may not allow it.
fn closes_in_time(params: &SamplingParams, output: &[u32]) -> bool {
    let Some(limit) = params.thought.as_ref().filter(|limit| limit.is_open) else {
        return false;
    };
    let closing = limit.marks.closing();
    let end = limit.max_tokens + closing.len();
    if params.grammar.is_some() || output.len() < end {
        return false;
    }
    // One that ended earlier has its mark earlier.
    let thought = spelled(&output[..end]);
    assert!(thought.contains(&spelled(closing)), "{thought} {limit:?}");
    output[limit.max_tokens..end] == *closing
}

fn target_of(toy: &Toy) -> impl Fn() -> Box<dyn Model> {
    let eos = toy.eos.clone();
    move || Box::new(toy_model(0.0).with_eos(&eos))
}

fn draft_model(model: Box<dyn Model>, toy: &Toy, chunk: usize) -> DraftModel {
    DraftModel::new(model, toy.num_blocks, toy.block_size, chunk).unwrap()
}

/// Tables that may be too small for what they see.
fn tables(dice: &mut Dice) -> Tables {
    Tables::new(dice.of(&[1 << 20, 1 << 20, 40_000, 3_000]))
}

/// A toy with room for little more than one of the longest requests.
fn tight(dice: &mut Dice) -> Toy {
    let mut toy = dice.toy();
    if dice.0.is_multiple_of(2) {
        toy.interrupt(dice.0);
    }
    Toy {
        num_blocks: (70 + dice.roll(20)).div_ceil(toy.block_size),
        ..toy
    }
}

/// Runs schedules with the drafters that `drafter` makes.
fn schedules(
    first: u64,
    count: u64,
    drafter: impl Fn(&mut Dice, &Toy) -> Box<dyn Drafter>,
) -> Seen {
    let mut seen = Seen::default();
    for case in first..first + count {
        let mut dice = Dice(case);
        let toy = tight(&mut dice);
        let drafter = drafter(&mut dice, &toy);
        seen.converse(case, &mut dice, &toy, &target_of(&toy), drafter);
    }
    assert!(seen.restricted > 20 && seen.failed > 5, "{seen:?}");
    seen
}

#[test]
fn lookahead_is_lossless() {
    let seen = schedules(9_000_000, 100, |_, _| Box::new(Lookahead::default()));
    seen.assert_all_happened(&["lookahead", "grammar"]);
}

#[test]
fn tables_are_lossless() {
    let seen = schedules(8_000_000, 100, |dice, _| Box::new(tables(dice)));
    seen.assert_all_happened(&["own", "prediction", "pool", "recycled", "grammar"]);
}

#[test]
fn a_draft_model_and_tables_are_lossless() {
    let seen = schedules(8_100_000, 100, |dice, toy| {
        let model = Box::new(toy_model(dice.of(&[0.0, 0.4, 1.0])));
        let model = draft_model(model, toy, 2 + dice.roll(30));
        Box::new(Cascade::new(Box::new(model), tables(dice)))
    });
    seen.assert_all_happened(&["model", "prediction", "grammar"]);
}

#[test]
fn a_parallel_head_and_tables_are_lossless() {
    let seen = schedules(8_200_000, 100, |dice, toy| {
        let (noise, size) = (dice.of(&[0.0, 0.3, 1.0]), 2 + dice.roll(6));
        let (head, _) = parallel::drafter(noise, size, toy.num_blocks, toy.block_size);
        Box::new(Cascade::new(Box::new(head), tables(dice)))
    });
    seen.assert_all_happened(&["model", "prediction", "grammar"]);
}

/// Letters, of which the last few are capitals, and one that ends a text.
struct Letters {
    pieces: Vec<Vec<u8>>,
}

const END: u32 = 5;

impl Letters {
    /// The last token is `last`.
    fn new(last: &str) -> Self {
        let letters = (b'a'..=b'z').chain(b'A'..=b'E');
        let mut pieces: Vec<_> = letters.map(|letter| vec![letter]).collect();
        pieces[END as usize] = b"</s>".to_vec();
        pieces.push(last.into());
        assert_eq!(pieces.len(), VOCAB);
        Self { pieces }
    }
}

impl Tokenizer for Letters {
    fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).map_or(&[], |piece| piece)
    }

    fn is_special(&self, id: u32) -> bool {
        id == END
    }

    fn bos(&self) -> Option<u32> {
        None
    }

    fn eos(&self) -> Option<u32> {
        Some(END)
    }

    fn encode(&self, text: &str, _: bool) -> Vec<u32> {
        let (mut rest, mut ids) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let all = (0..VOCAB as u32).filter(|&id| !self.is_special(id));
            let fits = all.filter(|&id| rest.starts_with(self.bytes(id)));
            let longest = fits.max_by_key(|&id| self.bytes(id).len());
            ids.extend(longest);
            rest = &rest[longest.map_or(1, |id| self.bytes(id).len())..];
        }
        ids
    }
}

/// The draft model has no `F`, and one token for `ab`, with which most prompts have something.
#[test]
fn a_draft_model_with_another_tokenizer_and_tables_are_lossless() {
    let seen = schedules(8_300_000, 100, |dice, toy| {
        let last = dice.of(&["ab", "xq"]);
        let (target, draft) = (Letters::new("F"), Letters::new(last));
        let vocabulary = JointVocabulary::new(Box::new(target), Box::new(draft), VOCAB, VOCAB);
        let model = Box::new(toy_model(dice.of(&[0.0, 0.4])));
        let model = Box::new(JointModel::new(model, &vocabulary));
        let inner = draft_model(model, toy, 2 + dice.roll(30));
        let translator = Translator::new(inner, vocabulary);
        Box::new(Cascade::new(Box::new(translator), tables(dice)))
    });
    seen.assert_all_happened(&["model", "prediction", "grammar"]);
}

#[test]
fn eagle_heads_and_tables_are_lossless() {
    let mut seen = Seen::default();
    for case in 8_400_000..8_400_040 {
        let mut dice = Dice(case);
        let toy = tight(&mut dice);
        let head = Head::new(dice.of(&LAYOUTS));
        let model = draft_model(head.load(), &toy, 2 + dice.roll(30));
        let drafter = Box::new(Cascade::new(Box::new(model), tables(&mut dice)));
        seen.converse(case, &mut dice, &toy, &|| eagle_head::target(), drafter);
    }
    seen.assert_all_happened(&["model", "prediction"]);
}
