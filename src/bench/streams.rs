//! Runs many requests at a time.

use super::report::{Difference, StreamLoad, Throughput};
use super::{Bench, Scopes, WARM_UP_TOKENS};
use crate::console::say;
use crate::engine::{CollectedEvents, EngineHandle, Request};
use crate::error::{Error, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Requests of a group for each stream, so that streams are refilled as they end.
const REQUESTS_PER_STREAM: usize = 2;
/// The golden ratio. Its multiples modulo 1 are evenly spread, however many there are.
const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;
/// Minimum number of requests of a group.
const MIN_GROUP: usize = 8;

impl Bench<'_> {
    /// Runs the prompts at each number of streams, at each temperature and in every mode. The prompts
    /// are divided into groups, and the modes take turns on each group.
    pub(super) fn measure_streams(&self) -> Result<Vec<StreamLoad>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .map_err(|e| Error::setup(format!("cannot start the runtime: {e}")))?;
        let (mut loads, mut scopes) = (Vec::new(), self.scopes());
        for &temperature in &self.options.temperatures {
            for &streams in &self.options.streams {
                say(format_args!("temperature {temperature}, {streams} streams"));
                let groups = self.groups(streams)?;
                let mut order: Vec<usize> = (0..self.ways.len()).rev().collect();
                let speculative = self.ways.iter().skip(1);
                let mut of_ways: Vec<StreamLoad> = speculative
                    .map(|&way| StreamLoad::new(streams, temperature, way))
                    .collect();
                runtime.block_on(self.warm_up_streams(streams, temperature, &order))?;
                for _ in 0..self.options.repeat {
                    self.warm_tables(temperature, &mut scopes)?;
                    for group in &groups {
                        let runs = self.runs(streams, temperature, group, &order, &mut scopes);
                        let (plain, speculative) = runtime.block_on(runs)?;
                        for (load, run) in of_ways.iter_mut().zip(&speculative) {
                            self.add(load, group, &plain, run);
                        }
                        order.reverse();
                    }
                    if groups.len().is_multiple_of(2) {
                        order.reverse();
                    }
                }
                loads.extend(of_ways);
            }
        }
        Ok(loads)
    }

    /// The groups of requests for a number of streams. Every group has the full load, if need be with prompts that come
    /// again; warm tables would know these.
    ///
    /// # Errors
    /// `Setup`: there are too few prompts for warm tables.
    fn groups(&self, streams: usize) -> Result<Vec<Range<usize>>> {
        let size = (streams * REQUESTS_PER_STREAM).max(MIN_GROUP);
        let prompts = self.prompts.len();
        let count = if self.warm.is_empty() {
            prompts.div_ceil(size)
        } else {
            prompts / size
        };
        if count == 0 {
            return Err(Error::setup(format!(
                "--warm with --streams {streams} needs at least {size} prompts, not {prompts}: tables know prompts that come again"
            )));
        }
        if let Some(rest @ 1..) = prompts.checked_sub(count * size) {
            say(format_args!(
                "{rest} of {prompts} prompts do not fill a group of {size} and are skipped"
            ));
        }
        let groups = (0..count).map(|group| group * size..(group + 1) * size);
        Ok(groups.collect())
    }

    /// Runs each mode for a few tokens.
    async fn warm_up_streams(
        &self,
        streams: usize,
        temperature: f32,
        order: &[usize],
    ) -> Result<()> {
        let mut scopes = Self::unmeasured();
        for &way in order {
            let mut requests = self.group(0..streams, temperature, way, &mut scopes);
            (requests.iter_mut()).for_each(|request| request.max_tokens = Some(WARM_UP_TOKENS));
            self.run(way, streams, requests).await?;
        }
        Ok(())
    }

    /// Runs a group in the modes of `order`. Returns the run of plain decoding, and those of the speculative modes.
    async fn runs(
        &self,
        streams: usize,
        temperature: f32,
        group: &Range<usize>,
        order: &[usize],
        scopes: &mut Scopes,
    ) -> Result<(GroupRun, Vec<GroupRun>)> {
        let mut runs = BTreeMap::new();
        for &way in order {
            let requests = self.group(group.clone(), temperature, way, scopes);
            runs.insert(way, self.run(way, streams, requests).await?);
        }
        let mut runs = runs.into_values();
        let plain = runs.next();
        let plain = plain.ok_or_else(|| Error::internal("plain decoding is always a mode"))?;
        Ok((plain, runs.collect()))
    }

    /// Runs `requests` in the `way`-th mode.
    async fn run(&self, way: usize, streams: usize, requests: Vec<Request>) -> Result<GroupRun> {
        self.engine.use_drafter(self.ways[way].drafter)?;
        run(self.engine, streams, requests).await
    }

    /// The requests of a group in the `way`-th mode.
    fn group(
        &self,
        group: Range<usize>,
        temperature: f32,
        way: usize,
        scopes: &mut Scopes,
    ) -> Vec<Request> {
        let request = |number: usize| {
            let prompt = &self.prompts[number % self.prompts.len()];
            let (mode, scope) = (self.ways[way], scopes.of(way));
            let mut request = self
                .options
                .request(number, prompt, temperature, mode, scope);
            request.max_tokens = request.max_tokens.map(|most| unequal(most, number));
            request
        };
        group.map(request).collect()
    }

    fn add(
        &self,
        load: &mut StreamLoad,
        group: &Range<usize>,
        plain: &GroupRun,
        speculative: &GroupRun,
    ) {
        load.requests += group.len();
        // All groups have the same size.
        load.add(group.start / group.len(), plain.busy, speculative.busy);
        for completion in &speculative.completions {
            load.spec = load.spec + completion.spec;
        }
        if !load.way.is_comparable(load.temperature) {
            return;
        }
        let both = plain.completions.iter().zip(&speculative.completions);
        for (number, (plain, speculative)) in group.clone().zip(both) {
            let prompt = &self.prompts[number % self.prompts.len()];
            let (plain, speculative) = (plain.ids(), speculative.ids());
            load.differing
                .extend(Difference::of_texts(prompt, &plain, &speculative));
        }
    }
}

/// The length of the `number`-th text, half of `most` to `most`: texts of equal length keep the streams in step,
/// so that their prompts come together, which no real load does.
fn unequal(most: usize, number: usize) -> usize {
    let shorter = (number as f64 * GOLDEN_RATIO).fract() * 0.5 * most as f64;
    (most - shorter as usize).max(1)
}

/// One group in one mode.
struct GroupRun {
    /// The results of the requests, in the order of the requests.
    completions: Vec<CollectedEvents>,
    /// The throughput while all streams were busy.
    busy: Throughput,
}

/// Counts the tokens of all requests until a stream has nothing more to do: the end of a group, with fewer
/// and fewer streams, says nothing about their number.
struct Meter {
    started: Instant,
    /// Requests that were not submitted yet.
    waiting: Cell<usize>,
    tokens: Cell<usize>,
    busy: Cell<Option<Throughput>>,
}

impl Meter {
    fn new(requests: usize) -> Self {
        Self {
            started: Instant::now(),
            waiting: Cell::new(requests),
            tokens: Cell::new(0),
            busy: Cell::new(None),
        }
    }

    /// Submits a request and waits for its end.
    async fn run(&self, engine: &EngineHandle, request: Request) -> Result<CollectedEvents> {
        self.waiting.set(self.waiting.get() - 1);
        let mut events = engine.submit(request)?;
        let mut completion = CollectedEvents::default();
        while completion.finish.is_none()
            && let Some(event) = events.recv().await
        {
            let before = completion.tokens.len();
            completion.add(event)?;
            let new = completion.tokens.len() - before;
            self.tokens.set(self.tokens.get() + new);
        }
        if self.waiting.get() == 0 && self.busy.get().is_none() {
            self.busy.set(Some(self.so_far()));
        }
        Ok(completion)
    }

    fn so_far(&self) -> Throughput {
        Throughput {
            tokens: self.tokens.get(),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }
}

/// Runs `requests`, `streams` at a time.
async fn run(engine: &EngineHandle, streams: usize, requests: Vec<Request>) -> Result<GroupRun> {
    let context = engine.limits().max_model_len;
    let meter = Meter::new(requests.len());
    let answers = stream::iter(requests.into_iter().enumerate());
    let answers = answers.map(async |(number, mut request)| {
        let room = context - request.prompt.len();
        request.max_tokens = request.max_tokens.map(|wanted| wanted.min(room));
        Ok::<_, Error>((number, meter.run(engine, request).await?))
    });
    // In the order in which they end, so that a long text does not keep others from starting.
    let answers = answers.buffer_unordered(streams);
    let answers: BTreeMap<usize, CollectedEvents> = answers.try_collect().await?;
    Ok(GroupRun {
        completions: answers.into_values().collect(),
        busy: meter.busy.get().unwrap_or_else(|| meter.so_far()),
    })
}
