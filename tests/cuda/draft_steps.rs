//! A draft model's chain on a GPU: its steps run without the host, which waits once a round, and the drafts are those of
//! single steps.

use super::disturbed::{Disturbed, Mischief};
use super::texts::{seeded, start_with};
use super::{BLOCK_SIZE, BLOCKS, gpu, model, shape, tokens};
use crate::common::{assert_idle, chains, run};
use candle_core::{DType, Tensor};
use foretoken::error::{Error, Result};
use foretoken::model::{Draw, ForwardOutput, Model};
use foretoken::sampling::{Acceptance, Sampler, SamplingParams};
use foretoken::spec::{BudgetMode, Draft, DraftContext, DraftModel, DraftRequest, Drafter};
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::{Arc, Mutex};

pub(super) const CHUNK: usize = 64;

/// What this thread has asked the emulated GPU for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) waits: c_long,
    pub(super) copies: c_long,
    pub(super) kernels: c_long,
    pub(super) graphs: c_long,
}

impl Counts {
    /// The counts so far; `None` on a real GPU.
    fn now() -> Option<[c_long; 4]> {
        unsafe extern "C" {
            fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
            fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
        }
        const RTLD_NOW: c_int = 2;
        let (library, name): (&CStr, &CStr) = (c"libcuda.so.1", c"emulated_gpu_counts");
        // SAFETY: the library is loaded already, and the emulator's function of this name writes four numbers.
        unsafe {
            let library = dlopen(library.as_ptr(), RTLD_NOW);
            let function = dlsym(library, name.as_ptr());
            if function.is_null() {
                return None;
            }
            let function: extern "C" fn(*mut c_long) = std::mem::transmute(function);
            let mut counts = [0; 4];
            function(counts.as_mut_ptr());
            Some(counts)
        }
    }

    /// What `work` asks for; `None` on a real GPU.
    pub(super) fn of<R>(work: impl FnOnce() -> R) -> (R, Option<Self>) {
        let before = Self::now();
        let result = work();
        let counts = before.zip(Self::now()).map(|(before, after)| {
            let [waits, copies, kernels, graphs] = std::array::from_fn(|i| after[i] - before[i]);
            Self {
                waits,
                copies,
                kernels,
                graphs,
            }
        });
        (result, counts)
    }
}

/// A sequence that is drafted for.
pub(super) struct Text {
    pub(super) id: u64,
    pub(super) tokens: Vec<u32>,
    pub(super) sampler: Sampler,
    pub(super) length: usize,
}

impl Text {
    pub(super) fn new(id: u64, params: SamplingParams, prompt: usize, length: usize) -> Self {
        // Of those that begin alike, one would wait for what another reads.
        let tokens = tokens(prompt + 7 * id as usize).split_off(7 * id as usize);
        Self {
            id,
            sampler: Sampler::new(params, &tokens),
            tokens,
            length,
        }
    }

    fn request<'a>(&'a mut self, length: usize, context: &'a DraftContext) -> DraftRequest<'a> {
        DraftRequest {
            id: self.id,
            tokens: &self.tokens,
            length,
            model_length: length,
            nodes: length,
            width: 1,
            min_score: 0.0,
            is_fixed: false,
            staged: Vec::new(),
            position: self.tokens.len(),
            sampler: &mut self.sampler,
            acceptance: Acceptance::Coupled,
            context,
        }
    }

    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.sampler.push(token);
    }

    fn truncate(&mut self, len: usize) {
        let dropped = self.tokens.len() - len;
        self.sampler.truncate(self.sampler.output_len() - dropped);
        self.tokens.truncate(len);
    }
}

/// Drafts for all texts in one round.
pub(super) fn propose(drafter: &mut DraftModel, texts: &mut [Text]) -> Result<Vec<Draft>> {
    let context = DraftContext::default();
    let lens: Vec<usize> = texts.iter().map(|text| text.sampler.output_len()).collect();
    let mut requests: Vec<_> = (texts.iter_mut())
        .map(|text| text.request(text.length, &context))
        .collect();
    let drafts = drafter.propose(&mut requests);
    drop(requests);
    let all = texts.iter_mut().zip(lens);
    all.for_each(|(text, len)| text.sampler.truncate(len));
    drafts
}

/// The draft for one text, token by token: each in a round of its own.
fn by_single_steps(drafter: &mut DraftModel, text: &mut Text) -> Vec<u32> {
    let (context, len, length) = (DraftContext::default(), text.tokens.len(), text.length);
    for _ in 0..length {
        let output = text.sampler.output_len();
        let draft = drafter.propose(&mut [text.request(1, &context)]).unwrap();
        text.sampler.truncate(output);
        text.push(draft[0].tokens[0]);
    }
    let draft = text.tokens[len..].to_vec();
    text.truncate(len);
    draft
}

/// A round of the first drafter, whose drafts are those of the second one by single steps. Returns them, and what the round
/// asked for.
fn round_as_single_steps(
    [all, single]: [&mut DraftModel; 2],
    texts: &mut [Text],
) -> (Vec<Vec<u32>>, Option<Counts>) {
    let want: Vec<_> = (texts.iter_mut())
        .map(|text| by_single_steps(single, text))
        .collect();
    let (drafts, counts) = Counts::of(|| propose(all, texts).unwrap());
    let drafts: Vec<_> = drafts.into_iter().map(|draft| draft.tokens).collect();
    assert_eq!(drafts, want);
    (drafts, counts)
}

/// Texts of different lengths, with drafts of different lengths: greedy, sampled with and without filters, with a bias.
pub(super) fn texts() -> Vec<Text> {
    let params = |seed, temperature| SamplingParams {
        seed,
        temperature,
        ..SamplingParams::default()
    };
    let kinds = [
        (params(1, 0.0), 3, 2),
        (params(2, 0.9), 40, 5),
        (
            SamplingParams {
                top_k: 20,
                min_p: 0.01,
                ..params(3, 1.0)
            },
            21,
            3,
        ),
        (
            SamplingParams {
                top_p: 0.8,
                logit_bias: vec![(7, 3.0), (9, -100.0)],
                ..params(4, 1.2)
            },
            12,
            5,
        ),
        (params(5, 0.0), 30, 1),
    ];
    let numbered = (0..).zip(kinds);
    let texts =
        numbered.map(|(id, (params, prompt, length))| Text::new(id, params, prompt, length));
    texts.collect()
}

fn drafter(model: Box<dyn Model>) -> DraftModel {
    DraftModel::new(model, BLOCKS, BLOCK_SIZE, CHUNK).unwrap()
}

/// Ends a drafter that must hold nothing.
pub(super) fn assert_empty(drafter: &mut DraftModel, texts: &[Text]) {
    texts.iter().for_each(|text| drafter.forget(text.id));
    assert_eq!(drafter.check_invariants(), Ok(()));
    let pool = drafter.pool().unwrap();
    assert_eq!(pool.usage(), 0.0);
}

/// A round of one text is a copy of all inputs, one of all parameters, and for each token a launch that puts its inputs into
/// their places, a graph, and the two launches that draw it; then the host waits once.
#[test]
fn the_host_waits_once_a_round() {
    const LENGTH: usize = 5;
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let mut drafter = drafter(model(&source, &gpu, Some(DType::BF16), 3));
    for temperature in [0.0, 1.0] {
        let params = SamplingParams {
            temperature,
            ..SamplingParams::default()
        };
        let mut texts = [Text::new(0, params, 9, LENGTH)];
        for round in 0..6 {
            let (drafts, counts) = Counts::of(|| propose(&mut drafter, &mut texts).unwrap());
            assert_eq!(drafts[0].tokens.len(), LENGTH);
            // The first rounds load kernels and record graphs.
            let length = LENGTH as c_long;
            let want = Counts {
                waits: 1,
                copies: 3,
                kernels: 3 * length,
                graphs: length,
            };
            if let Some(counts) = counts.filter(|_| round >= 3) {
                assert_eq!(counts, want, "round {round}");
            }
            texts[0].push(round);
        }
        assert_empty(&mut drafter, &texts);
    }
}

/// Also after rounds of which parts were rejected.
#[test]
fn drafts_of_a_batch_are_those_of_single_steps() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 3);
    let (mut all, mut single) = (drafter(one()), drafter(one()));
    let mut texts = texts();
    let (longest, mut by_graphs) = (5, 0);
    for round in 0..12 {
        let (drafts, counts) = round_as_single_steps([&mut all, &mut single], &mut texts);
        if let Some(counts) = counts {
            assert_eq!(counts.waits, 1, "round {round}: {counts:?}");
            // The first forward has more rows after a draft that was right to its end, and no graph at first. A bias costs
            // two copies and a launch a token, a filter a launch, and after each of three drafts that end, a launch copies
            // the tokens of the others.
            if counts.graphs == longest {
                by_graphs += 1;
                let copies = 3 + 2 * longest;
                assert!(counts.copies <= copies, "round {round}: {counts:?}");
                assert!(
                    counts.kernels <= 5 * longest + 3,
                    "round {round}: {counts:?}"
                );
            }
            assert!(round < 11 || by_graphs >= 3, "{by_graphs}");
        }
        for (i, (text, draft)) in texts.iter_mut().zip(drafts).enumerate() {
            let kept = (round + i) % (draft.len() + 1);
            draft[..kept].iter().for_each(|&token| text.push(token));
            text.push((round * 7 + i) as u32);
        }
    }
    assert_empty(&mut all, &texts);
}

/// Penalties depend on the tokens, so the host reads each of them while such a draft goes on, and the others' with its last.
#[test]
fn only_penalties_wait_for_each_token() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 3);
    let (mut all, mut single) = (drafter(one()), drafter(one()));
    let penalty = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 1.3,
        ..SamplingParams::default()
    };
    let mut texts = [
        Text::new(0, SamplingParams::default(), 9, 5),
        Text::new(1, penalty, 14, 3),
    ];
    for round in 0..6 {
        let (drafts, counts) = round_as_single_steps([&mut all, &mut single], &mut texts);
        if let Some(counts) = counts {
            assert_eq!(counts.waits, 3, "round {round}: {counts:?}");
        }
        for (text, draft) in texts.iter_mut().zip(drafts) {
            text.push(draft[0]);
        }
    }
    assert_empty(&mut all, &texts);
}

/// Draws fail now and then.
struct Failing {
    draws: usize,
}

/// Every so many draws.
const FAILS: usize = 7;

impl Mischief for Failing {
    fn draw(
        &mut self,
        draw: &mut Draw<'_>,
        output: &ForwardOutput,
        place: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.draws += 1;
        match self.draws.is_multiple_of(FAILS) {
            true => Err(Error::internal("a draw failed")),
            false => draw(output, place),
        }
    }
}

/// A failure in the middle of a round costs the drafts of the round, and nothing else.
#[test]
fn a_round_that_fails_leaves_nothing() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = || model(&source, &gpu, Some(DType::BF16), 5);
    let mischief = Arc::new(Mutex::new(Failing { draws: 0 }));
    let failing = || {
        Box::new(Disturbed {
            mischief: mischief.clone(),
            model: one(),
        })
    };
    let (mut all, mut single) = (drafter(failing()), drafter(one()));
    let mut texts = texts();
    let mut failures = 0;
    for round in 0..12 {
        let want = by_single_steps(&mut single, &mut texts[1]);
        match propose(&mut all, &mut texts) {
            Ok(drafts) => assert_eq!(drafts[1].tokens, want, "round {round}"),
            Err(error) => {
                assert!(error.to_string().contains("a draw failed"), "{error}");
                failures += 1;
                assert_empty(&mut all, &texts);
            }
        }
        texts[1].push(want[0]);
    }
    assert!((2..12).contains(&failures), "{failures}");

    // The engine goes on, and its texts are those without drafts.
    let plain = start_with(one(), None, chains(0), BudgetMode::Fixed);
    let spec = chains(4);
    let drafting: Box<dyn Drafter> = Box::new(drafter(failing()));
    let engine = start_with(one(), Some(drafting), spec, BudgetMode::Fixed);
    let before = mischief.lock().unwrap().draws;
    for request in seeded() {
        let (want, got) = (run(&plain, request.clone()), run(&engine, request));
        assert_eq!(got.ids(), want.ids());
        assert!(got.spec.accepted > 0, "{:?}", got.spec);
    }
    assert!(mischief.lock().unwrap().draws - before > 2 * FAILS);
    assert_idle(&plain);
    assert_idle(&engine);
}
