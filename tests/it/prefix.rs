//! The prefix cache: what is cached is not computed again, and changes no text.

use crate::architectures::fixtures;
use crate::common::hooked::watched;
use crate::common::refusals::merge;
use crate::common::server::{Server, until};
use crate::common::*;
use crate::engine::{Dice, is_lossless};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request};
use foretoken::model::Model;
use foretoken::model::toy::ToyModel;
use foretoken::spec::{BudgetMode, CacheScope, DraftContext, DraftModel};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A toy that adds the number of its rows to `rows`.
fn counted_model(toy: ToyModel, rows: Arc<AtomicUsize>) -> Box<dyn Model> {
    watched(toy, move |batch| {
        rows.fetch_add(batch.tokens.len(), Ordering::Relaxed);
        Ok(())
    })
}

/// An engine without drafts, and the number of rows that its target has computed.
pub fn counted(toy: &Toy) -> (EngineHandle, Arc<AtomicUsize>) {
    let rows = Arc::<AtomicUsize>::default();
    let target = counted_model(toy_model(0.0), rows.clone());
    let options = toy.options.clone();
    let engine = engine::spawn(target, None, toy.num_blocks, toy.block_size, options).unwrap();
    (engine, rows)
}

fn plain(toy: &Toy) -> Toy {
    let mut plain = toy.clone();
    plain.options.no_prefix_caching = true;
    plain
}

/// Forgets the cached prefixes.
pub fn reset(engine: &EngineHandle) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let done = runtime.unwrap().block_on(engine.reset_prefix_cache());
    done.unwrap();
}

pub fn text(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i * i * 7 + i + salt) % 31)
        .collect()
}

pub fn in_scope(scope: u64, request: Request) -> Request {
    let draft_context = DraftContext {
        scope: CacheScope(scope),
        may_persist: true,
        ..DraftContext::default()
    };
    Request {
        draft_context,
        ..request
    }
}

/// Conversations over a few common starts, in two scopes: each prompt continues a start or an earlier
/// conversation. `start` gives the engine; texts are compared with the reference, and scores with those of an
/// engine without the cache. Returns the tokens that were found and the preemptions.
pub fn converse(case: u64, start: impl Fn(&Toy) -> EngineHandle) -> (u64, u64) {
    let mut dice = Dice(case);
    let toy = dice.toy();
    let engine = start(&toy);
    let roomy = Toy {
        num_blocks: 512,
        ..plain(&toy)
    };
    let roomy = roomy.start();
    let mut texts: Vec<Vec<u32>> = (0..3).map(|salt| text(10 + dice.roll(30), salt)).collect();
    for _ in 0..4 {
        let requests: Vec<Request> = (0..6)
            .map(|_| {
                let start = dice.of(&texts);
                let kept = start.len().min(40) - dice.roll(5).min(start.len() - 1);
                let prompt = [&start[..kept], &dice.prompt(4)].concat();
                let request = dice.request(toy.options.spec.length);
                in_scope(dice.of(&[0, 0, 0, 1]), Request { prompt, ..request })
            })
            .collect();
        let receivers: Vec<_> = (requests.iter())
            .map(|request| {
                let receiver = engine.submit(request.clone()).unwrap();
                // Some clients disconnect at once.
                (dice.roll(6) > 0).then_some(receiver)
            })
            .collect();
        if dice.roll(5) == 0 {
            reset(&engine);
        }
        for (request, receiver) in requests.into_iter().zip(receivers) {
            let Some(receiver) = receiver else { continue };
            let answer = collect(receiver);
            assert!(answer.cached_tokens < request.prompt.len());
            assert_eq!(answer.cached_tokens % toy.block_size, 0);
            let is_scored = request.prompt_logprobs.is_some();
            assert!(!is_scored || answer.cached_tokens == 0);
            if is_scored || is_lossless(&request) {
                let alone = run(&roomy, request.clone());
                assert_eq!(alone.cached_tokens, 0);
                assert_eq!(answer.prompt, alone.prompt, "case {case}");
            }
            if is_lossless(&request) {
                let mut model = toy_model(0.0).with_eos(&toy.eos);
                let want = reference(&mut model, &request);
                assert_eq!(answer.ids(), want, "case {case}: {request:?} on {toy:?}");
            }
            texts.push([request.prompt, answer.ids()].concat());
        }
    }
    assert_idle(&engine);
    assert_idle(&roomy);
    let stats = engine.stats();
    assert!(stats.prefix_cache_hits.get() < stats.prefix_cache_queries.get());
    assert_eq!(roomy.stats().prefix_cache_queries.get(), 0);
    (stats.prefix_cache_hits.get(), stats.preemptions.get())
}

/// Promises 1 and 6 over random schedules with shared prefixes, eviction, preemption and resets.
#[test]
fn random_conversations_are_lossless_and_leak_nothing() {
    let (mut hits, mut preemptions) = (0, 0);
    for case in 0..150 {
        let found = converse(6_000_000 + case, Toy::start);
        hits += found.0;
        preemptions += found.1;
    }
    let found = format!("{hits} hits, {preemptions} preemptions");
    assert!(hits > 10_000 && preemptions > 50, "{found}");
}

/// The same with a head, whose own pool must have what the target does not compute: it can tell from the
/// pool whether it has the whole context.
#[test]
fn a_head_is_never_blind_after_a_hit() {
    let (mut hits, mut blocks) = (0, 0);
    for case in 0..100 {
        let seen = std::cell::OnceCell::new();
        let found = converse(7_000_000 + case, |toy| {
            // Otherwise it skips what does not pay.
            let mut toy = toy.clone();
            toy.options.spec_budget = BudgetMode::Fixed;
            let (engine, of_head) = crate::parallel::start(&toy, 0.3, 5, 512);
            seen.set(of_head).ok();
            engine
        });
        hits += found.0;
        let seen = seen.get().unwrap();
        assert_eq!(seen.unknown.load(Ordering::Relaxed), 0, "case {case}");
        blocks += seen.blocks.load(Ordering::Relaxed);
    }
    assert!(
        hits > 4_000 && blocks > 3_000,
        "{hits} hits, {blocks} blocks"
    );
}

/// All full blocks of a prompt are found, but for its last token; those of another scope are not.
#[test]
fn a_prompt_is_computed_once() {
    for len in 41..=45 {
        let (engine, rows) = counted(&Toy::default());
        let request = greedy(&text(len, 0), 10);
        let ask = |request: &Request| {
            let answer = run(&engine, request.clone());
            assert_eq!(answer.ids(), reference(&mut toy_model(0.0), request));
            (answer.cached_tokens, rows.swap(0, Ordering::Relaxed))
        };
        let full = (len - 1) / 4 * 4;
        assert_eq!(ask(&request), (0, len + 9));
        assert_eq!(ask(&request), (full, len - full + 9));
        assert_eq!(ask(&in_scope(1, request.clone())), (0, len + 9));
        assert_eq!(ask(&in_scope(1, request.clone())), (full, len - full + 9));
        let stats = engine.stats();
        assert_eq!(stats.prefix_cache_queries.get(), 4 * len as u64);
        assert_eq!(stats.prefix_cache_hits.get(), 2 * full as u64);
        // The second turn: all of the first one but the end of its answer.
        let mut turn = request.clone();
        turn.prompt.extend(reference(&mut toy_model(0.0), &request));
        turn.prompt.extend([1, 2, 3]);
        let known = (len + 9) / 4 * 4;
        assert_eq!(ask(&turn), (known, len + 13 - known + 9));
        reset(&engine);
        assert_eq!(ask(&request), (0, len + 9));
        assert_idle(&engine);
    }
    let (engine, rows) = counted(&plain(&Toy::default()));
    let request = greedy(&text(41, 0), 10);
    let all = [0; 2].map(|_| run(&engine, request.clone()));
    assert_eq!(all[0], all[1]);
    assert_eq!(all[1].cached_tokens, 0);
    assert_eq!(rows.load(Ordering::Relaxed), 100);
}

/// Where scores of the prompt are wanted, it is computed, and others find it in the cache.
#[test]
fn scored_prompts_are_computed() {
    let (engine, rows) = counted(&Toy::default());
    let prompt = text(50, 0);
    let scored = Request {
        prompt_logprobs: Some(2),
        logprobs: Some(2),
        ..greedy(&prompt, 5)
    };
    let first = run(&engine, scored.clone());
    assert_eq!(first.cached_tokens, 0);
    assert_eq!(run(&engine, greedy(&prompt, 5)).cached_tokens, 48);
    rows.store(0, Ordering::Relaxed);
    assert_eq!(run(&engine, scored.clone()), first);
    assert_eq!(rows.load(Ordering::Relaxed), 54);
    for (at, score) in first.prompt.iter().enumerate().skip(1) {
        let logits = last_logits(&mut toy_model(0.0), &prompt[..at]);
        let want = foretoken::sampling::logprobs(&logits, prompt[at], 2).unwrap();
        assert_eq!(score.as_ref(), Some(&want), "position {at}");
    }
    let only_scores = Request {
        max_tokens: Some(0),
        ..scored
    };
    assert_eq!(run(&engine, only_scores).prompt, first.prompt);
    let nothing = run(&engine, greedy(&prompt, 0));
    assert_eq!((nothing.tokens.len(), nothing.cached_tokens), (0, 48));
    assert_idle(&engine);
}

/// Of models with recurrent states, too: a repeated prompt of any length is computed from its last block on, and its
/// text is the same.
#[test]
fn a_repeated_prompt_is_cached_whatever_its_length() {
    let fixtures = fixtures().into_iter();
    let with_states = fixtures.filter(|fixture| fixture.open().config().spec.is_recurrent());
    let mut count = 0;
    for fixture in with_states {
        count += 1;
        let name = fixture.name();
        let engine = |no_prefix_caching| {
            let options = EngineOptions {
                no_prefix_caching,
                max_num_batched_tokens: 7,
                ..EngineOptions::default()
            };
            engine::spawn(fixture.open(), None, 64, 4, options).unwrap()
        };
        let (cached, plain) = (engine(false), engine(true));
        for len in 7..=12 {
            // Prompts that share nothing.
            let mut prompt = fixture.prompt[..12].to_vec();
            prompt.rotate_left(len - 7);
            prompt.truncate(len);
            let want = run(&plain, greedy(&prompt, 9));
            for (number, tokens) in [(0, 0), (1, (len - 1) / 4 * 4)] {
                let found = run(&cached, greedy(&prompt, 9));
                let what = format!("{name}: {len} tokens, {number}");
                assert_eq!(found.cached_tokens, tokens, "{what}");
                assert_eq!(found.ids(), want.ids(), "{what}");
            }
        }
        assert_idle(&cached);
    }
    assert!(count >= 5, "{count}");
}

/// The choices of a request arrive together. One computes the prompt, and the others wait for its blocks,
/// also if that one goes away; whoever has another prompt does not wait for them.
#[test]
fn choices_share_their_prompt() {
    let mut toy = Toy::default();
    toy.options.max_num_batched_tokens = 30;
    let (len, choices) = (102, 5);
    for leaves in [false, true] {
        let (engine, rows) = counted(&toy);
        let requests = (0..choices).map(|seed| sampled(&text(len, 0), 6, seed));
        let requests: Vec<Request> = requests.collect();
        let mut receivers = engine.submit_all(requests.clone()).unwrap();
        let other = engine.submit(greedy(&text(90, 5), 6)).unwrap();
        if leaves {
            drop(receivers.remove(0));
        }
        let mut cached = Vec::new();
        for (receiver, request) in receivers.into_iter().zip(&requests[usize::from(leaves)..]) {
            let answer = collect(receiver);
            assert_eq!(answer.ids(), reference(&mut toy_model(0.0), request));
            cached.push(answer.cached_tokens);
        }
        assert_eq!(collect(other).cached_tokens, 0);
        assert_idle(&engine);
        cached.sort_unstable();
        assert_eq!(cached[1..], vec![100; cached.len() - 1]);
        let own = (choices as usize - 1) * (len - 100 + 5) + 95;
        let most = own + len + 5 + 30;
        let rows = rows.load(Ordering::Relaxed);
        assert!((own + 5..=most).contains(&rows), "{rows} rows, {own}");
    }
}

/// A preempted request finds what it had computed, unless others needed the blocks.
#[test]
fn a_preempted_request_comes_back_through_the_cache() {
    let mut toy = Toy {
        num_blocks: 34,
        guess: Guess::Nothing,
        ..Toy::default()
    };
    toy.options.max_num_seqs = 3;
    toy.options.max_prompt_wait = PROMPT_WAIT;
    let work = |toy: &Toy| {
        let rows = Arc::<AtomicUsize>::default();
        let model = toy_model(0.0);
        let gate = model.gate.clone();
        let (target, options) = (counted_model(model, rows.clone()), toy.options.clone());
        let engine = engine::spawn(target, None, toy.num_blocks, toy.block_size, options).unwrap();
        // The second one leaves soon.
        let requests = [(0, 50), (1, 20), (2, 50)];
        let requests = requests.map(|(salt, max_tokens)| greedy(&text(30, salt), max_tokens));
        // All requests are queued before the first step ends.
        let closed = gate.lock().unwrap();
        let receivers = engine.submit_all(requests.to_vec()).unwrap();
        drop(closed);
        for (request, receiver) in requests.iter().zip(receivers) {
            let want = reference(&mut toy_model(0.0), request);
            assert_eq!(collect(receiver).ids(), want);
        }
        assert_idle(&engine);
        let preemptions = engine.stats().preemptions.get();
        (rows.load(Ordering::Relaxed), preemptions)
    };
    let ((with, preempted), (without, also)) = (work(&toy), work(&plain(&toy)));
    assert!(preempted > 0 && also > 0, "{preempted}, {also}");
    assert!(with < without, "{with} rows, {without} without the cache");
}

/// A draft model reads as little of a known prompt as the target does, and the choices of a request share
/// what one of them reads. The text and, with a fixed draft, what is accepted are as before.
#[test]
fn a_draft_model_has_its_own_cache() {
    let rows = Arc::<AtomicUsize>::default();
    let model = counted_model(toy_model(0.2), rows.clone());
    let drafter = DraftModel::new(model, 256, 4, 64).unwrap();
    let (target, options) = (Box::new(toy_model(0.0)), Toy::default().options);
    let engine = engine::spawn(target, Some(Box::new(drafter)), 256, 4, options).unwrap();
    let request = greedy(&text(121, 0), 30);
    let ask = || {
        let answer = run(&engine, request.clone());
        assert_idle(&engine);
        (answer, rows.swap(0, Ordering::Relaxed))
    };
    let (first, read) = ask();
    let (second, read_again) = ask();
    assert_eq!(second.ids(), first.ids());
    assert!(
        read > 121 + 30 && read_again + 100 < read,
        "{read}, {read_again}"
    );
    assert!(second.spec.alpha() + 0.05 > first.spec.alpha());
    assert!(second.spec.rounds <= first.spec.rounds);

    let requests = (0..4)
        .map(|seed| sampled(&text(121, 7), 30, seed))
        .collect();
    let receivers = engine.submit_all(requests).unwrap();
    receivers.into_iter().for_each(|one| drop(collect(one)));
    assert_idle(&engine);
    let read = rows.load(Ordering::Relaxed);
    assert!(
        read < 2 * 121 + 4 * 30 * 5,
        "{read} rows of one prompt and four answers"
    );
}

fn body(extra: &Value) -> Value {
    let mut body =
        json!({"prompt": "abcdefghijklmnopqrstuvwxyz", "max_tokens": 4, "temperature": 0});
    merge(&mut body, extra);
    body
}

/// Over HTTP: the count in `usage`, the metrics, `cache_salt` and the reset.
#[tokio::test]
async fn clients_see_what_was_cached() {
    let server = Server::start().await;
    let cached = async |extra: Value| {
        let reply = server.json("/v1/completions", &body(&extra)).await;
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached(json!({})).await, 0);
    assert_eq!(cached(json!({})).await, 24);
    assert_eq!(cached(json!({"cache_salt": "mine"})).await, 0);
    assert_eq!(cached(json!({"cache_salt": "mine"})).await, 24);
    assert_eq!(cached(json!({"echo": true, "logprobs": 1})).await, 0);
    assert_eq!(cached(json!({"echo": true})).await, 24);
    // Of each prompt once, before its first choice; no salt is an empty string.
    let two = json!({"prompt": ["abcdefghijklmnop", "zyxwvutsrqponmlkj"], "n": 3});
    assert_eq!(cached(two.clone()).await, 12);
    assert_eq!(cached(two).await, 12 + 16);
    let refused = server
        .post("/v1/completions", &body(&json!({"cache_salt": ""})))
        .await;
    assert_eq!(refused.status(), 400);
    let options = json!({"stream_options": {"include_usage": true}});
    let chunks = server.stream("/v1/completions", body(&options)).await;
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 24);

    let metrics = server.get("/metrics").await.text().await.unwrap();
    let value = |name: &str| sample(&metrics, name) as usize;
    assert_eq!(
        value("foretoken:prefix_cache_queries_total"),
        26 * 7 + 6 * 33
    );
    assert!(value("foretoken:prefix_cache_hits_total") >= 4 * 24 + 12 + 28);

    let done = server.post("/reset_prefix_cache", &json!(null)).await;
    assert_eq!(done.status(), 200);
    assert_eq!(done.text().await.unwrap(), "");
    assert_eq!(cached(json!({})).await, 0);
    assert_eq!(server.get("/reset_prefix_cache").await.status(), 405);
    server.done().await;
}

/// A reset while requests run: they go on, and nobody shares what they computed before. It needs the key.
#[tokio::test]
async fn a_reset_spares_the_running_requests() {
    let engine = server::slow(Toy::default().options, None);
    let with_key = |state: foretoken::http::AppState| state.with_api_keys(vec!["k".into()]);
    let server = Server::over(engine.clone(), with_key).await;
    let url = format!("{}/reset_prefix_cache", server.url);
    let request = greedy(&text(60, 0), 40);
    let running = engine.submit(request.clone()).unwrap();
    until("it runs", || engine.stats().generation_tokens.get() > 0).await;
    assert_eq!(server.client.post(&url).send().await.unwrap().status(), 401);
    let reset = server.client.post(&url).bearer_auth("k").send().await;
    assert_eq!(reset.unwrap().status(), 200);
    let second = engine.submit(request.clone()).unwrap();
    let (first, second) = (running.collect().await, second.collect().await);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.ids(), reference(&mut toy_model(0.0), &request));
    assert_eq!((second.ids(), second.cached_tokens), (first.ids(), 0));
    let third = engine.submit(request).unwrap().collect().await.unwrap();
    assert_eq!((third.ids(), third.cached_tokens), (first.ids(), 56));
    server.done().await;
}
