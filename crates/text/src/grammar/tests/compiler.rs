//! Tests of what the compiler keeps, and of who waits for whom.

use super::super::place::describe;
use super::super::toy::ToyTokens;
use super::super::*;
use super::{compiler, vocabulary};
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::Grammar;
use serde_json::json;
use std::cell::Cell;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

#[test]
fn compiled_grammars_are_kept() {
    let compiler = compiler();
    let of = |n: usize| {
        let source = GrammarSource::Regex(format!("a{{{n}}}"));
        compiler.compile("field", &source).expect("a good grammar")
    };
    let first = of(1);
    assert_eq!(of(1), first);
    assert_ne!(of(2), first);
    (0..70).for_each(|n| drop(of(n + 3)));
    assert_ne!(of(1), first, "the oldest make room");
}

/// Maximum time of something that nothing but other work of the machine delays.
const LIMIT: Duration = Duration::from_secs(60);

/// The vocabulary, whose tokenizer waits at "slow" until it may go on, and counts what it encodes.
struct Gated {
    tokens: ToyTokens,
    asked: mpsc::Sender<String>,
    may_go_on: Mutex<mpsc::Receiver<()>>,
}

impl GrammarTokens for Gated {
    fn count(&self) -> usize {
        self.tokens.count()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokens.is_special(id)
    }

    fn eos(&self) -> &[u32] {
        self.tokens.eos()
    }

    fn encode_part(&self, text: &str) -> Vec<u32> {
        self.asked.send(text.into()).expect("the test listens");
        if text.starts_with("slow") {
            // No more is sent, and no gate is left, where all may go on.
            let _ = self.may_go_on.lock().unwrap().recv();
        }
        self.tokens.encode_part(text)
    }
}

/// A compiler of these tokens, the texts that are encoded, and the gate: texts go on one by one when something is
/// sent, and all when it is dropped.
fn gated() -> (Compiler, mpsc::Receiver<String>, mpsc::Sender<()>) {
    let (asked, texts) = mpsc::channel();
    let (gate, may_go_on) = mpsc::channel();
    let compiler = Compiler::new(Arc::new(Gated {
        tokens: vocabulary(),
        asked,
        may_go_on: Mutex::new(may_go_on),
    }));
    (compiler, texts, gate)
}

/// A source that takes long to compile delays equal ones, which are not compiled again, and no others.
#[test]
fn a_slow_source_delays_only_equal_ones() {
    let (compiler, texts, gate) = gated();
    let choice = |text: &str| GrammarSource::Choice(vec![text.into()]);
    std::thread::scope(|scope| {
        let slow = || compiler.compile("field", &choice("slow")).expect("good");
        let first = scope.spawn(slow);
        assert_eq!(texts.recv_timeout(LIMIT).as_deref(), Ok("slow"));
        let second = scope.spawn(slow);
        let (done, is_done) = mpsc::channel();
        let (compiler, fast) = (&compiler, choice("fast"));
        scope.spawn(move || {
            let grammar = compiler.compile("field", &fast).expect("good");
            // The test has failed if nobody listens.
            let _ = done.send(grammar);
        });
        let other = is_done.recv_timeout(LIMIT);
        gate.send(()).expect("the tokenizer waits");
        // One that is compiled twice waits twice.
        drop(gate);
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        assert_ne!(other.expect("another source waits for the slow one"), first);
        assert_eq!(first, second);
    });
    let texts: Vec<String> = texts.try_iter().collect();
    assert!(texts.iter().all(|text| text == "fast"), "{texts:?}");
}

/// The error of a source is found once, and told for every field that has the source.
#[test]
fn what_is_wrong_is_kept() {
    let (compiler, texts, _) = gated();
    let refused = |field: &str, text: &str| {
        let source = GrammarSource::Choice(vec![text.into()]);
        match compiler.compile(field, &source) {
            Err(error @ Error::Request { .. }) => (error.param().unwrap(), error.to_string()),
            other => panic!("{other:?}"),
        }
    };
    // No token has these bytes.
    let (param, message) = refused("a", "\u{e9}");
    assert!(param == "a" && message.starts_with("a "), "{message}");
    assert!(texts.try_iter().count() > 0);
    let again = ("b".to_owned(), message.replacen('a', "b", 1));
    assert_eq!(refused("b", "\u{e9}"), again);
    assert_eq!(texts.try_iter().count(), 0, "it is not compiled again");
    (0..70).for_each(|n| drop(refused("c", &"\u{e9}".repeat(n + 2))));
    assert!(texts.try_iter().count() >= 70);
    assert_eq!(refused("b", "\u{e9}"), again);
    assert!(texts.try_iter().count() > 0, "the oldest make room");
}

/// The search for the place of an error ends when it has taken long.
#[test]
fn the_place_of_an_error_is_not_searched_for_long() {
    let property = |i: usize| (format!("p{i}"), json!({"type": "integer"}));
    let properties: serde_json::Map<_, _> = (0..300).map(property).collect();
    let source = GrammarSource::JsonSchema(json!({"properties": properties}));
    let tries = Cell::new(0);
    // None of them is at fault.
    let check = |_| {
        tries.set(tries.get() + 1);
        std::thread::sleep(Duration::from_millis(20));
        None
    };
    let message = describe(&source, &anyhow::anyhow!("as the test wants"), check);
    assert!(message.contains("at the schema, "), "{message}");
    // Half a second, or less of them where the machine does something else.
    assert!((1..30).contains(&tries.get()), "{}", tries.get());
}

/// Asks `compiler` for the grammar of `text` in the name of `client`. `begins` is called if the client waits.
fn ask(compiler: &Compiler, client: u64, text: &str, begins: &dyn Fn()) -> Result<Grammar> {
    let client = ClientId(client);
    let source = GrammarSource::Choice(vec![text.into()]);
    compiler.compile_for(&Waiter { client, begins }, "field", &source)
}

/// Asks on a thread of its own, and returns when that thread waits.
fn wait<'scope>(
    scope: &'scope Scope<'scope, '_>,
    compiler: &'scope Compiler,
    client: u64,
    text: &str,
) -> ScopedJoinHandle<'scope, Result<Grammar>> {
    let (waits, is_waiting) = mpsc::channel();
    let text = text.to_owned();
    let thread = scope.spawn(move || {
        let begins = || waits.send(()).expect("the test listens");
        ask(compiler, client, &text, &begins)
    });
    is_waiting.recv_timeout(LIMIT).expect("it waits");
    thread
}

#[track_caller]
fn is_refused(result: Result<Grammar>) {
    let refused = result.expect_err("too many wait").to_string();
    assert!(refused.contains("try again later"), "{refused}");
}

/// Many sources of one client delay no other client, and few of them run or wait at once.
#[test]
fn clients_take_turns() {
    let (compiler, texts, gate) = gated();
    let compile = |client: u64, text: &str| ask(&compiler, client, text, &|| ());
    std::thread::scope(|scope| {
        // Two of them run, the other 32 wait.
        let sources = (0..33).map(|n| format!("slow{n}"));
        let sources = sources.chain(["of both".into()]);
        let slow: Vec<_> = sources
            .map(|text| wait(scope, &compiler, 1, &text))
            .collect();
        let running = [(); 2].map(|()| texts.recv_timeout(LIMIT).expect("it is compiled"));
        is_refused(compile(1, "one more"));
        let fast = compile(2, "fast").expect("another client does not wait");
        assert_eq!(compile(1, "fast").expect("it is known"), fast);
        compile(2, "of both").expect("nor for what the first one waits for");
        let third = wait(scope, &compiler, 2, "slow of another");
        let mut others = std::iter::from_fn(|| texts.recv_timeout(LIMIT).ok());
        let next = others.find(|text| !["fast", "of both"].contains(&text.as_str()));
        assert_eq!(next.as_deref(), Some("slow of another"), "{running:?} run");
        drop(gate);
        for thread in slow.into_iter().chain([third]) {
            thread.join().unwrap().expect("a good grammar");
        }
    });
    compile(1, "one more").expect("there is room again");
}

/// Each request that waits holds a thread, also if another one has asked for its source.
#[test]
fn few_requests_wait() {
    let (compiler, _texts, gate) = gated();
    let compile = |client: u64| ask(&compiler, client, "slow", &|| ());
    std::thread::scope(|scope| {
        let of_client = |client| (0..64).map(move |_| client);
        let waiting: Vec<_> = of_client(1)
            .chain(of_client(2))
            .chain(of_client(3))
            .chain(of_client(4))
            .map(|client| wait(scope, &compiler, client, "slow"))
            .collect();
        is_refused(compile(1));
        is_refused(compile(5));
        drop(gate);
        for thread in waiting {
            thread.join().unwrap().expect("a good grammar");
        }
    });
    compile(5).expect("it is known");
}
