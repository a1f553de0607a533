//! The threads on which grammars are compiled. They do nothing else, so that only requests with grammars wait for large
//! grammars.

use super::compiled::lock;
use foretoken_core::error::caught_here;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Maximum number of jobs that run at once, of one client and of all clients.
const MAX_RUNNING_OF_CLIENT: usize = 2;
const MAX_RUNNING: usize = 4;
/// Maximum number of jobs that wait, of one client and of all.
const MAX_WAITING_OF_CLIENT: usize = 32;
const MAX_WAITING: usize = 256;
/// Maximum number of requests that wait for jobs, of one client and of all: each holds a thread.
const MAX_PLACES_OF_CLIENT: usize = 64;
const MAX_PLACES: usize = 256;
/// Stack of a job: what a source can nest is bounded, and a frame of a parser takes up to some KiB.
const STACK_BYTES: usize = 64 << 20;

/// The client that asks for a compilation. Clients take turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientId(pub u64);

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs on threads of their own: few at a time of each client, and clients in turns.
#[derive(Default)]
pub(super) struct Lane(Mutex<Queues>);

#[derive(Default)]
struct Queues {
    /// The clients whose jobs wait, the next one first, and the oldest job of each first.
    waiting: VecDeque<(ClientId, VecDeque<Job>)>,
    /// The client of each job that runs.
    running: Vec<ClientId>,
}

impl Lane {
    /// Runs `job` when it is its turn. It is dropped if too many wait, or if there is no thread for it.
    pub fn submit(self: &Arc<Self>, client: ClientId, job: impl FnOnce() + Send + 'static) {
        let mut queues = lock(&self.0);
        if !queues.push(client, Box::new(job)) {
            return;
        }
        let Some((client, job)) = queues.next() else {
            return;
        };
        drop(queues);
        let lane = self.clone();
        let thread = std::thread::Builder::new()
            .name("grammar".into())
            .stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(move || lane.run(client, job)) {
            tracing::warn!("no thread to compile a grammar: {error}");
            // Without a thread, the jobs that wait would wait for ever. They are dropped.
            let mut next = self.ended(client);
            while let Some((client, _)) = next {
                next = self.ended(client);
            }
        }
    }

    /// Runs `job`, and then those that wait.
    fn run(&self, mut client: ClientId, mut job: Job) {
        loop {
            // A job that panics is dropped, which tells those who wait for it.
            let _ = caught_here(job);
            match self.ended(client) {
                Some(next) => (client, job) = next,
                None => return,
            }
        }
    }

    /// A job of `client` has ended. Returns the next one.
    fn ended(&self, client: ClientId) -> Option<(ClientId, Job)> {
        let mut queues = lock(&self.0);
        let ended = queues.running.iter().position(|&running| running == client);
        ended.map(|place| queues.running.swap_remove(place));
        queues.next()
    }
}

impl Queues {
    /// Adds a job. Returns whether it was taken: not if too many wait.
    fn push(&mut self, client: ClientId, job: Job) -> bool {
        let all: usize = self.waiting.iter().map(|(_, jobs)| jobs.len()).sum();
        let known = self.waiting.iter_mut().find(|(of, _)| *of == client);
        let own = known.as_ref().map_or(0, |(_, jobs)| jobs.len());
        if all >= MAX_WAITING || own >= MAX_WAITING_OF_CLIENT {
            return false;
        }
        match known {
            Some((_, jobs)) => jobs.push_back(job),
            None => self.waiting.push_back((client, VecDeque::from([job]))),
        }
        true
    }

    /// The next job, which counts as running from now on.
    fn next(&mut self) -> Option<(ClientId, Job)> {
        if self.running.len() >= MAX_RUNNING {
            return None;
        }
        let count = |client: &ClientId| self.running.iter().filter(|&of| of == client).count();
        let is_next = |(client, _): &(ClientId, _)| count(client) < MAX_RUNNING_OF_CLIENT;
        let place = self.waiting.iter().position(is_next)?;
        let (client, mut jobs) = self.waiting.remove(place)?;
        let job = jobs.pop_front()?;
        if !jobs.is_empty() {
            self.waiting.push_back((client, jobs));
        }
        self.running.push(client);
        Some((client, job))
    }
}

/// The clients of requests that wait.
#[derive(Default)]
pub(super) struct Places(Mutex<Vec<ClientId>>);

/// The right to wait.
pub(super) struct Place<'a> {
    places: &'a Places,
    client: ClientId,
}

impl Places {
    /// A place for a request of `client`, until it is dropped; `None` if too many wait.
    pub fn enter(&self, client: ClientId) -> Option<Place<'_>> {
        let mut taken = lock(&self.0);
        let own = taken.iter().filter(|&&of| of == client).count();
        if taken.len() >= MAX_PLACES || own >= MAX_PLACES_OF_CLIENT {
            return None;
        }
        taken.push(client);
        Some(Place {
            places: self,
            client,
        })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut taken = lock(&self.places.0);
        let place = taken.iter().position(|&of| of == self.client);
        place.map(|place| taken.swap_remove(place));
    }
}
