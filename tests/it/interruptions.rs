//! Prompts that nobody else waits for are read in large chunks, which are given up for those who arrive.

use crate::common::{SEED, VOCAB, assert_idle, collect, greedy, reference};
use candle_core::Device;
use foretoken::engine::{self, EngineHandle, EngineOptions, Events, Request};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::toy::ToyModel;
use foretoken::model::{Batch, ForwardOutput, GiveUp, Model, ModelInfo};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LAYERS: u32 = 8;
/// Time of a row in all layers.
const ROW: Duration = Duration::from_micros(400);
/// Rows of a chunk that is as long as a text may wait, of a prompt alone, and of the largest one.
const CHUNK: usize = 40;
const LARGEST: usize = 256;

/// A forward: its rows, and whether it was given up.
type Forward = (usize, bool);

fn toy() -> ToyModel {
    ToyModel::new(VOCAB, 4096, SEED, 0.0)
}

/// A toy whose layers take time. It calls `between` with the number of rows and of layers that are done.
struct Layered<F> {
    toy: ToyModel,
    between: F,
    forwards: Arc<Mutex<Vec<Forward>>>,
}

impl<F: FnMut(usize, u32) + Send> Model for Layered<F> {
    fn info(&self) -> &ModelInfo {
        self.toy.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.toy.kv_shape()
    }

    fn device(&self) -> &Device {
        self.toy.device()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        Ok(self.forward_unless(batch, kv, &|_| false)?.unwrap())
    }

    fn is_interruptible(&self) -> bool {
        true
    }

    fn forward_unless(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        gives_up: &GiveUp<'_>,
    ) -> Result<Option<ForwardOutput>> {
        let rows = batch.tokens.len();
        let output = self.toy.forward(batch, kv)?;
        for layer in 1..=LAYERS {
            std::thread::sleep(ROW * rows as u32 / LAYERS);
            (self.between)(rows, layer);
            if layer < LAYERS && gives_up(f64::from(layer) / f64::from(LAYERS)) {
                self.forwards.lock().unwrap().push((rows, true));
                return Ok(None);
            }
        }
        self.forwards.lock().unwrap().push((rows, false));
        Ok(Some(output))
    }
}

/// What a test does while the engine computes.
type Act = Box<dyn FnOnce() + Send>;

/// An engine, its forwards, and what is to be done once after two layers of a largest chunk.
struct Scene {
    engine: EngineHandle,
    forwards: Arc<Mutex<Vec<Forward>>>,
    act: Arc<Mutex<Option<Act>>>,
}

impl Scene {
    fn new() -> Self {
        let (forwards, act) = (Arc::default(), Arc::<Mutex<Option<Act>>>::default());
        let planned = act.clone();
        let target = Layered {
            toy: toy(),
            between: move |rows, layer| {
                if rows == LARGEST && layer == 2 {
                    let act = planned.lock().unwrap().take();
                    if let Some(act) = act {
                        act();
                    }
                }
            },
            forwards: Arc::clone(&forwards),
        };
        let options = EngineOptions {
            max_prompt_wait: ROW * CHUNK as u32,
            no_prefix_caching: true,
            ..EngineOptions::default()
        };
        let engine = engine::spawn(Box::new(target), None, 1024, 4, options).unwrap();
        Self {
            engine,
            forwards,
            act,
        }
    }

    fn interrupted(&self) -> u64 {
        self.engine.stats().interrupted_tokens.get()
    }

    fn forwards(&self) -> Vec<Forward> {
        std::mem::take(&mut self.forwards.lock().unwrap())
    }
}

fn long(len: usize) -> Request {
    let prompt: Vec<u32> = (0..len as u32).map(|at| at * at % 31).collect();
    greedy(&prompt, 3)
}

#[test]
fn a_prompt_alone_takes_few_steps() {
    let scene = Scene::new();
    let request = long(1500);
    let answer = collect(scene.engine.submit(request.clone()).unwrap());
    assert_eq!(answer.ids(), reference(&mut toy(), &request));
    let forwards = scene.forwards();
    assert!(forwards.len() < 20, "{forwards:?}");
    let most = forwards.iter().map(|&(rows, _)| rows).max();
    assert_eq!((most, scene.interrupted()), (Some(LARGEST), 0));
    // What reads scores, and so computes for long after its layers, does not.
    let scored = Request {
        prompt_logprobs: Some(1),
        max_tokens: Some(0),
        ..request
    };
    assert_eq!(
        collect(scene.engine.submit(scored).unwrap()).prompt.len(),
        1500
    );
    let most = scene
        .forwards()
        .iter()
        .map(|&(rows, _)| rows)
        .max()
        .unwrap();
    assert!(most <= CHUNK, "{most}");
    assert_idle(&scene.engine);
}

/// Who arrives during a large chunk does not wait for it, and the prompt goes on beside it as usual.
#[test]
fn a_large_chunk_is_given_up_for_who_arrives() {
    let scene = Scene::new();
    let (first, second) = (long(1500), greedy(&[1, 2, 3], 2));
    let arrived = Arc::<Mutex<Option<Events>>>::default();
    let (handle, arrives, request) = (scene.engine.clone(), arrived.clone(), second.clone());
    let act: Act = Box::new(move || {
        *arrives.lock().unwrap() = Some(handle.submit(request).unwrap());
    });
    *scene.act.lock().unwrap() = Some(act);
    let answer = collect(scene.engine.submit(first.clone()).unwrap());
    assert_eq!(answer.ids(), reference(&mut toy(), &first));
    let events = arrived.lock().unwrap().take().unwrap();
    assert_eq!(collect(events).ids(), reference(&mut toy(), &second));
    let forwards = scene.forwards();
    let given_up: Vec<usize> = (0..forwards.len()).filter(|&i| forwards[i].1).collect();
    let [at] = given_up[..] else {
        panic!("{forwards:?}")
    };
    assert_eq!(forwards[at].0, LARGEST);
    assert_eq!(scene.interrupted(), LARGEST as u64);
    // The step of its prompt, and that of its second token. The slowest machine has longer chunks of few rows.
    for (rows, _) in &forwards[at + 1..at + 3] {
        assert!(*rows <= 2 * CHUNK, "{forwards:?}");
    }
    // Alone again, the prompt is read in large chunks.
    let (largest, _) = forwards[at + 3..].iter().max().unwrap();
    assert!(*largest > 2 * CHUNK, "{forwards:?}");
    assert_idle(&scene.engine);
}

/// A chunk for which nobody waits any more ends early, too.
#[test]
fn a_large_chunk_ends_with_its_request() {
    let scene = Scene::new();
    let events = Arc::<Mutex<Option<Events>>>::default();
    let reader = events.clone();
    let act: Act = Box::new(move || drop(reader.lock().unwrap().take()));
    *scene.act.lock().unwrap() = Some(act);
    let mut own = events.lock().unwrap();
    *own = Some(scene.engine.submit(long(1500)).unwrap());
    drop(own);
    let second = greedy(&[1, 2, 3], 2);
    while events.lock().unwrap().is_some() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let answer = collect(scene.engine.submit(second.clone()).unwrap());
    assert_eq!(answer.ids(), reference(&mut toy(), &second));
    assert_idle(&scene.engine);
    assert_eq!(scene.interrupted(), LARGEST as u64);
    let forwards = scene.forwards();
    // After it come the prompt and the second token of the other request.
    let last = &forwards[forwards.len() - 3..];
    assert_eq!(last, [(LARGEST, true), (3, false), (1, false)]);
}

/// Requests that come again and again and are gone at once do not keep a prompt from being read.
#[test]
fn interruptions_do_not_starve_a_prompt() {
    let scene = Scene::new();
    let request = long(1000);
    let events = scene.engine.submit(request.clone()).unwrap();
    let (handle, done) = (scene.engine.clone(), Arc::new(Mutex::new(false)));
    let is_done = done.clone();
    let others = std::thread::spawn(move || {
        while !*is_done.lock().unwrap() {
            drop(handle.submit(greedy(&[1, 2], 1)).unwrap());
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    assert_eq!(collect(events).ids(), reference(&mut toy(), &request));
    *done.lock().unwrap() = true;
    others.join().unwrap();
    assert_idle(&scene.engine);
    let forwards = scene.forwards();
    let sum = |lost| -> usize {
        let these = forwards.iter().filter(|&&(_, given_up)| given_up == lost);
        these.map(|&(rows, _)| rows).sum()
    };
    assert!(sum(true) <= 2 * sum(false), "{forwards:?}");
}
