//! The prefix cache on disk: a prompt is computed once, also across restarts, and no text depends on what is there.

use crate::architectures::fixtures;
use crate::common::process::{Server, foretoken, json_of, refusal};
use crate::common::refusals::rows;
use crate::common::*;
use crate::prefix::{converse, in_scope, text};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request};
use foretoken::spec::BudgetMode;
use serde_json::json;
use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longer than an engine takes to end.
const LONG: Duration = Duration::from_secs(60);

/// `toy` with its prefix cache in `folder`, too.
fn kept(toy: &Toy, folder: &Path) -> Toy {
    let mut toy = toy.clone();
    toy.options.prefix_cache_disk = Some(folder.into());
    toy
}

/// What `work` returns with an engine that has ended afterwards, and that engine.
fn session<R>(toy: &Toy, work: impl FnOnce(&EngineHandle) -> R) -> (R, EngineHandle) {
    let engine = toy.start();
    let result = work(&engine);
    assert_idle(&engine);
    assert!(engine.join(LONG));
    (result, engine)
}

/// Number of cached tokens of `request`, whose text must be that of the reference.
fn cached(engine: &EngineHandle, request: &Request) -> usize {
    let answer = run(engine, request.clone());
    assert_eq!(answer.ids(), reference(&mut toy_model(0.0), request));
    answer.cached_tokens
}

/// The files of blocks below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if path.is_dir() {
            all.extend(files(&path));
        } else if path.extension().is_some_and(|end| end == "kv") {
            all.push(path);
        }
    }
    all
}

/// Promises 1 and 6 over random schedules with shared prefixes, small pools, preemption and resets, in a first process
/// and in a second one that finds what the first one kept.
#[test]
fn random_conversations_go_on_after_a_restart() {
    let mut hits = [0; 2];
    for case in 0..30 {
        let folder = tempfile::tempdir().unwrap();
        for hits in &mut hits {
            let started = OnceCell::new();
            converse(8_000_000 + case, |toy| {
                let engine = kept(toy, folder.path()).start();
                started.set(engine.clone()).ok();
                engine
            });
            let engine = started.get().unwrap();
            assert!(engine.join(LONG));
            *hits += engine.stats().prefix_cache_disk_hits.get();
        }
    }
    let [first, second] = hits;
    assert!(second > 500 && second > first, "{first}, {second} tokens");
}

/// A head, whose own blocks are kept, too, has its whole context after a restart.
#[test]
fn a_head_is_never_blind_after_a_restart() {
    let (mut hits, mut drafted) = (0, 0);
    for case in 0..30 {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let started = OnceCell::new();
            converse(9_000_000 + case, |toy| {
                let mut toy = kept(toy, folder.path());
                // Otherwise it skips what does not pay.
                toy.options.spec_budget = BudgetMode::Fixed;
                let (engine, seen) = crate::parallel::start(&toy, 0.3, 5, 512);
                started.set((engine.clone(), seen)).ok();
                engine
            });
            let (engine, seen) = started.get().unwrap();
            assert!(engine.join(LONG));
            assert_eq!(seen.unknown.load(Ordering::Relaxed), 0, "case {case}");
            drafted += seen.blocks.load(Ordering::Relaxed);
            hits += engine.stats().prefix_cache_disk_hits.get();
        }
    }
    assert!(hits > 500 && drafted > 500, "{hits} tokens, {drafted}");
}

#[test]
fn a_prompt_is_computed_once_by_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let toy = kept(&Toy::default(), folder.path());
    let request = in_scope(0, greedy(&text(201, 0), 10));
    let ask = |engine: &EngineHandle| cached(engine, &request);
    let (tokens, first) = session(&toy, |engine| [ask(engine), ask(engine)]);
    assert_eq!(tokens, [0, 200]);
    let stats = first.stats();
    assert_eq!(stats.prefix_cache_disk_hits.get(), 0);
    assert_eq!(stats.prefix_cache_disk_dropped.get(), 0);
    assert!(stats.prefix_cache_disk_written_bytes.get() > 0);
    let (tokens, second) = session(&toy, |engine| [ask(engine), ask(engine)]);
    assert_eq!(tokens, [200, 200]);
    let stats = second.stats();
    assert_eq!(stats.prefix_cache_disk_hits.get(), 200);
    assert!(stats.prefix_cache_disk_read_bytes.get() >= 200 * 8);
    // Those of the blocks of the draft model that reads the whole text.
    assert!(stats.prefix_cache_disk_bytes.get() >= 100 * 4096);
    // All choices of a request wait for the same blocks.
    let (all, _) = session(&toy, |engine| {
        let requests = (0..4).map(|seed| in_scope(0, sampled(&text(201, 0), 6, seed)));
        let receivers = engine.submit_all(requests.collect()).unwrap();
        let cached = receivers.into_iter().map(|one| collect(one).cached_tokens);
        cached.collect::<Vec<_>>()
    });
    assert_eq!(all, [200; 4]);
    let mut other = toy;
    other.options.model_identity = "another model".into();
    assert_eq!(session(&other, ask).0, 0);
}

/// A request whose text nobody may keep, and one of another scope, find nothing and leave nothing.
#[test]
fn scopes_are_apart_and_private_texts_are_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let toy = kept(&Toy::default(), folder.path());
    let public = in_scope(0, greedy(&text(81, 0), 10));
    let mut private = in_scope(1, public.clone());
    private.draft_context.may_persist = false;
    let (tokens, _) = session(&toy, |engine| {
        [cached(engine, &private), cached(engine, &private)]
    });
    assert_eq!(tokens, [0, 80], "in memory it is cached");
    assert!(files(folder.path()).is_empty());
    session(&toy, |engine| cached(engine, &public));
    assert!(!files(folder.path()).is_empty());
    let other = in_scope(2, public.clone());
    let ask = |request: &Request| session(&toy, |engine| cached(engine, request)).0;
    assert_eq!([&private, &other, &public].map(ask), [0, 0, 80]);
    assert_eq!([&private, &other, &public].map(ask), [0, 80, 80]);
}

#[test]
fn damaged_files_cost_only_time() {
    let folder = tempfile::tempdir().unwrap();
    let toy = kept(&Toy::default(), folder.path());
    let request = in_scope(0, greedy(&text(121, 0), 10));
    let ask = || session(&toy, |engine| cached(engine, &request)).0;
    let damages: [fn(&Path); 3] = [
        |path| fs::write(path, b"").unwrap(),
        |path| {
            let mut bytes = fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        },
        |path| fs::remove_file(path).unwrap(),
    ];
    assert_eq!(ask(), 0);
    for damage in damages {
        assert_eq!(ask(), 120);
        files(folder.path()).iter().for_each(|path| damage(path));
        assert_eq!(ask(), 0);
    }
    assert_eq!(ask(), 120);
}

/// Engines at the same folder at the same time, whose files are evicted all the time.
#[test]
fn servers_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut toy = kept(&Toy::default(), folder.path());
    toy.options.prefix_cache_disk_size = 100 * 4096;
    toy.num_blocks = 64;
    let threads = [0, 1].map(|salt| {
        let toy = toy.clone();
        std::thread::spawn(move || {
            let work = |engine: &EngineHandle| {
                for round in 0..30 {
                    let prompt = text(60 + round as usize % 40, (round + salt) % 5);
                    cached(engine, &in_scope(0, greedy(&prompt, 10)));
                }
            };
            let (_, engine) = session(&toy, work);
            engine.stats().prefix_cache_disk_hits.get()
        })
    });
    let hits = threads.map(|thread| thread.join().unwrap());
    println!("{hits:?} tokens");
    let bytes: usize = files(folder.path()).len() * 4096;
    assert!(bytes <= 100 * 4096 * 9 / 8, "{bytes} bytes");
    let sum = session(&toy, |_| ()).1;
    assert!(sum.stats().prefix_cache_disk_bytes.get() <= 100 * 4096);
}

/// Of models with recurrent states, too.
#[test]
fn states_are_found_after_a_restart() {
    let fixtures = fixtures().into_iter();
    let with_states = fixtures.filter(|fixture| fixture.open().config().spec.is_recurrent());
    let mut count = 0;
    for fixture in with_states {
        count += 1;
        let (name, folder) = (fixture.name(), tempfile::tempdir().unwrap());
        let ask = |folder: Option<&Path>, len: usize| {
            let options = EngineOptions {
                prefix_cache_disk: folder.map(Path::to_owned),
                max_num_batched_tokens: 7,
                ..EngineOptions::default()
            };
            let engine = engine::spawn(fixture.open(), None, 64, 4, options).unwrap();
            let request = in_scope(0, greedy(&fixture.prompt[..len], 9));
            let answer = run(&engine, request);
            assert_idle(&engine);
            assert!(engine.join(LONG));
            (answer.cached_tokens, answer.ids())
        };
        let wanted = ask(None, 11);
        assert_eq!(ask(Some(folder.path()), 11), wanted, "{name}");
        let (tokens, ids) = ask(Some(folder.path()), 11);
        assert_eq!((tokens, ids), (8, wanted.1), "{name}");
        let (tokens, ids) = ask(Some(folder.path()), 12);
        assert_eq!((tokens, ids), (8, ask(None, 12).1), "{name}");
    }
    assert!(count >= 5, "{count}");
}

/// The number of cached tokens, and the text.
pub fn answer(server: &Server, key: &str, salt: Option<&str>) -> (u64, String) {
    let prompt = "A long story of a fox, an owl and a rabbit in the garden. ".repeat(12);
    let mut body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    let json = json_of(&server.post_as(key, "/v1/completions", &body.to_string()));
    let cached = &json["usage"]["prompt_tokens_details"]["cached_tokens"];
    let text = json["choices"][0]["text"].as_str().unwrap();
    (cached.as_u64().unwrap(), text.to_owned())
}

/// The program, with its model and draft, over three starts. Its keys and salts stay apart.
#[test]
fn a_restarted_server_has_read_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("prefixes");
    let flags = format!(
        "--api-key one --api-key two --prefix-cache-disk {} --prefix-cache-disk-size 1GiB",
        root.display()
    );
    let mut first = Server::start(&flags);
    let (none, text) = answer(&first, "one", None);
    let (known, again) = answer(&first, "one", None);
    assert!(none == 0 && known > 100, "{none}, {known}");
    assert_eq!(again, text);
    assert_eq!(answer(&first, "one", Some("mine")), (0, text.clone()));
    assert_eq!(first.stop("TERM", LONG), Some(0));
    let mut second = Server::start(&flags);
    assert_eq!(answer(&second, "two", None), (0, text.clone()));
    assert_eq!(answer(&second, "one", Some("mine")), (0, text.clone()));
    assert_eq!(answer(&second, "one", None), (known, text.clone()));
    let metrics = second.get("/metrics");
    let hits = "foretoken:prefix_cache_disk_hits_total{";
    let line = metrics.lines().find(|line| line.starts_with(hits));
    assert!(line.unwrap().ends_with(&format!(" {known}")), "{line:?}");
    assert_eq!(second.stop("TERM", LONG), Some(0));
    for file in files(&root) {
        fs::write(file, b"damaged").unwrap();
    }
    let mut third = Server::start(&flags);
    assert_eq!(answer(&third, "one", None), (0, text.clone()));
    assert_eq!(answer(&third, "one", None), (known, text));
    assert_eq!(third.stop("TERM", LONG), Some(0));
}

#[test]
fn what_cannot_be_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().display();
    let wrong = format!(
        "--prefix-cache-disk /dev/null/x | /dev/null/x
        --prefix-cache-disk {root} --no-prefix-caching | --no-prefix-caching
        --prefix-cache-disk {root} --prefix-cache-disk-size 1KiB | --prefix-cache-disk-size
        --prefix-cache-disk-size 1GiB | --prefix-cache-disk
        bench --random-prompts 1 --prefix-cache-disk {root} | bench never caches"
    );
    for [flags, needle] in rows::<2>(&wrong) {
        let command = foretoken().args(flags.split_whitespace()).output();
        let said = refusal(&command.unwrap());
        let errors: Vec<&str> = said.lines().filter(|line| line.contains(needle)).collect();
        assert_eq!(errors.len(), 1, "{flags}: {said}");
    }
}
