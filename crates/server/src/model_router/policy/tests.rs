use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A request by its number; one in the set is gone.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Request(u32);

const GONE: Request = Request(99);

impl Waiter for Request {
    fn is_gone(&self) -> bool {
        *self == GONE
    }
}

const IDLE: Duration = Duration::from_secs(600);

/// A policy and its clock.
struct Fleet {
    policy: Policy<Request>,
    now: Instant,
}

impl Fleet {
    fn new(models: usize, max_loaded: usize) -> Self {
        let now = Instant::now();
        let policy = Policy::new(models, max_loaded, Some(IDLE), now);
        Self { policy, now }
    }

    fn after(&mut self, seconds: u64) -> Vec<Action<Request>> {
        self.now += Duration::from_secs(seconds);
        self.policy.actions(self.now)
    }

    /// Says of each model whether it is gone.
    fn models(&mut self, is_gone: &[bool]) -> Vec<Action<Request>> {
        self.policy.set_models(is_gone, self.now);
        self.after(1)
    }

    fn request(&mut self, model: usize, number: u32) -> Vec<Action<Request>> {
        self.policy.request(model, Request(number), self.now);
        self.after(1)
    }

    fn release(&mut self, model: usize) -> Vec<Action<Request>> {
        let generation = self.policy.generation(model);
        self.policy.release(model, generation, self.now);
        self.after(1)
    }

    fn ready(&mut self, model: usize) -> Vec<Action<Request>> {
        self.policy.ready(model, self.now);
        self.after(1)
    }

    fn ended(&mut self, model: usize) -> Vec<Action<Request>> {
        self.policy.ended(model, self.now);
        self.after(1)
    }

    /// Loads a model for a request, which ends.
    fn load(&mut self, model: usize) {
        assert_eq!(self.request(model, 50), [start(model)]);
        assert_eq!(self.ready(model), [grant(model, 50)]);
        assert_eq!(self.release(model), []);
    }
}

fn start(model: usize) -> Action<Request> {
    Action::Start(model)
}

fn stop(model: usize, reason: StopReason) -> Action<Request> {
    Action::Stop(model, reason)
}

fn grant(model: usize, number: u32) -> Action<Request> {
    Action::Grant(model, Request(number))
}

fn refuse(model: usize, number: u32, by: RefusedBy) -> Action<Request> {
    Action::Refuse(model, Request(number), by)
}

#[test]
fn requests_wait_until_their_model_is_loaded_and_then_run_at_once() {
    let mut fleet = Fleet::new(2, 1);
    assert_eq!(fleet.request(0, 1), [start(0)]);
    assert_eq!(fleet.request(0, 2), []);
    assert_eq!(fleet.policy.requests(), (0, 2));
    assert_eq!(fleet.ready(0), [grant(0, 1), grant(0, 2)]);
    assert_eq!(fleet.request(0, 3), [grant(0, 3)]);
    assert_eq!(fleet.policy.requests(), (3, 0));
    assert_eq!(fleet.policy.state(0), (Phase::Loaded, false));
    assert_eq!(fleet.policy.state(1), (Phase::Unloaded, false));
}

#[test]
fn processes_of_models_that_are_gone_end_when_no_request_uses_them() {
    let mut fleet = Fleet::new(2, 2);
    fleet.policy.idle = None;
    fleet.load(0);
    fleet.load(1);
    assert_eq!(fleet.request(1, 1), [grant(1, 1)]);
    let stopped = [stop(0, StopReason::Idle)];
    assert_eq!(fleet.models(&[true, true, false]), stopped);
    // One that has come waits for the room.
    assert_eq!(fleet.request(2, 2), []);
    assert_eq!(fleet.ended(0), [start(2)]);
    assert_eq!(fleet.release(1), [stop(1, StopReason::Idle)]);
    assert_eq!(fleet.ended(1), []);
    // One that is there again.
    assert_eq!(fleet.models(&[false; 3]), []);
    fleet.load(1);
    assert_eq!(fleet.policy.state(1), (Phase::Loaded, false));
}

#[test]
fn another_model_takes_the_place_of_the_least_recently_used_one() {
    let mut fleet = Fleet::new(3, 2);
    fleet.load(0);
    fleet.load(1);
    assert_eq!(fleet.request(0, 1), [grant(0, 1)]);
    fleet.release(0);
    assert_eq!(fleet.request(2, 2), [stop(1, StopReason::Evicted)]);
    // Its memory is free only when it has ended.
    assert_eq!(fleet.after(5), []);
    assert_eq!(fleet.ended(1), [start(2)]);
    assert_eq!(fleet.ready(2), [grant(2, 2)]);
    assert_eq!(fleet.policy.state(1), (Phase::Unloaded, false));
}

#[test]
fn if_all_are_busy_one_takes_no_further_requests() {
    let mut fleet = Fleet::new(3, 2);
    fleet.load(0);
    fleet.load(1);
    assert_eq!(fleet.request(0, 1), [grant(0, 1)]);
    assert_eq!(fleet.request(1, 2), [grant(1, 2)]);
    assert_eq!(fleet.request(2, 3), []);
    // 0 was used longer ago.
    assert_eq!(fleet.request(0, 4), []);
    assert_eq!(fleet.request(1, 5), [grant(1, 5)]);
    assert_eq!(fleet.release(0), [stop(0, StopReason::Evicted)]);
    assert_eq!(fleet.ended(0), [start(2)]);
    assert_eq!(fleet.ready(2), [grant(2, 3)]);
    // Now 0 waits for its turn.
    assert_eq!(fleet.request(1, 6), []);
    fleet.release(1);
    // 1 need not end any more.
    assert_eq!(
        fleet.release(2),
        [stop(2, StopReason::Evicted), grant(1, 6)]
    );
}

#[test]
fn a_place_that_becomes_free_earlier_is_taken() {
    let mut fleet = Fleet::new(3, 2);
    fleet.load(0);
    fleet.load(1);
    fleet.request(0, 1);
    fleet.request(1, 2);
    assert_eq!(fleet.request(2, 3), []);
    assert_eq!(fleet.request(0, 4), []);
    // 1 ends first, so that 0 goes on.
    assert_eq!(
        fleet.release(1),
        [stop(1, StopReason::Evicted), grant(0, 4)]
    );
}

#[test]
fn who_waits_for_a_loading_model_gets_it_before_others_take_its_place() {
    let mut fleet = Fleet::new(2, 1);
    assert_eq!(fleet.request(0, 1), [start(0)]);
    assert_eq!(fleet.request(1, 2), []);
    assert_eq!(fleet.request(0, 3), []);
    assert_eq!(fleet.ready(0), [grant(0, 1), grant(0, 3)]);
    assert_eq!(fleet.request(0, 4), []);
    fleet.release(0);
    assert_eq!(fleet.release(0), [stop(0, StopReason::Evicted)]);
    assert_eq!(fleet.ended(0), [start(1)]);
    assert_eq!(fleet.ready(1), [grant(1, 2)]);
    assert_eq!(fleet.release(1), [stop(1, StopReason::Evicted)]);
    assert_eq!(fleet.ended(1), [start(0)]);
    assert_eq!(fleet.ready(0), [grant(0, 4)]);
}

#[test]
fn a_request_whose_client_is_gone_takes_no_place() {
    let mut fleet = Fleet::new(2, 1);
    fleet.load(0);
    assert_eq!(fleet.request(1, GONE.0), []);
    assert_eq!(fleet.request(0, 1), [grant(0, 1)]);
}

#[test]
fn a_process_that_nobody_uses_ends() {
    let mut fleet = Fleet::new(1, 1);
    fleet.load(0);
    assert_eq!(fleet.request(0, 1), [grant(0, 1)]);
    assert_eq!(fleet.policy.next_change(), None);
    assert_eq!(fleet.after(2 * IDLE.as_secs()), []);
    assert_eq!(fleet.release(0), []);
    let at = fleet.policy.next_change().unwrap();
    assert_eq!(fleet.after(IDLE.as_secs() - 2), []);
    fleet.now = at;
    assert_eq!(fleet.after(0), [stop(0, StopReason::Idle)]);
    assert_eq!(fleet.request(0, 2), []);
    assert_eq!(fleet.ended(0), [start(0)]);
    let mut ever = Policy::<Request>::new(1, 1, None, fleet.now);
    ever.request(0, Request(1), fleet.now);
    ever.actions(fleet.now);
    assert_eq!(ever.next_change(), None);
}

#[test]
fn failures_cost_only_their_own_requests_and_are_repeated_less_and_less() {
    let mut fleet = Fleet::new(2, 2);
    fleet.load(1);
    fleet.load(0);
    fleet.request(0, 1);
    let generation = fleet.policy.generation(0);
    assert_eq!(fleet.ended(0), []);
    assert_eq!(fleet.policy.state(0), (Phase::Unloaded, true));
    assert_eq!(fleet.request(1, 2), [grant(1, 2)]);
    // The next request starts it again; the end of an old one is not one of the new process.
    assert_eq!(fleet.request(0, 3), [start(0)]);
    assert_eq!(fleet.ready(0), [grant(0, 3)]);
    fleet.policy.release(0, generation, fleet.now);
    assert_eq!(fleet.policy.requests(), (2, 0));
    // Again, and while it starts.
    assert_eq!(fleet.ended(0), []);
    assert_eq!(fleet.request(0, 4), [start(0)]);
    fleet.request(0, 5);
    let by = RefusedBy::Failure;
    assert_eq!(fleet.ended(0), [refuse(0, 4, by), refuse(0, 5, by)]);
    assert_eq!(fleet.request(0, 6), [refuse(0, 6, by)]);
    assert_eq!(fleet.request(0, 7), [start(0)]);
    fleet.ready(0);
    // A minute without a failure, and it is the first one again.
    fleet.after(STABLE.as_secs());
    assert_eq!(fleet.ended(0), []);
    assert_eq!(fleet.request(0, 8), [start(0)]);
}

#[test]
fn pauses_double_up_to_a_minute() {
    let seconds = |failures| pause(failures).map(|pause| pause.as_secs());
    let pauses = [0, 1, 2, 3, 4, 7, 8, 9, 1000, u32::MAX].map(seconds);
    let longest = Some(MAX_PAUSE.as_secs());
    let expected = [
        None,
        None,
        Some(1),
        Some(2),
        Some(4),
        Some(32),
        longest,
        longest,
        longest,
        longest,
    ];
    assert_eq!(pauses, expected);
}

#[test]
fn models_are_unloaded_and_all_end_at_shutdown() {
    let mut fleet = Fleet::new(3, 2);
    assert!(!fleet.policy.unload(0));
    fleet.load(0);
    fleet.request(0, 1);
    assert!(fleet.policy.unload(0));
    assert_eq!(fleet.after(1), [stop(0, StopReason::Unloaded)]);
    assert!(!fleet.policy.unload(0));
    assert_eq!(fleet.request(1, 2), [start(1)]);
    assert!(fleet.policy.unload(1));
    let refused = refuse(1, 2, RefusedBy::Unload);
    assert_eq!(fleet.after(1), [stop(1, StopReason::Unloaded), refused]);
    fleet.ended(0);
    fleet.ended(1);
    assert_eq!(fleet.policy.state(1), (Phase::Unloaded, false));
    assert!(!fleet.policy.is_closing());
    fleet.load(2);
    fleet.policy.request(0, Request(3), fleet.now);
    fleet.policy.shut_down();
    let by = RefusedBy::Shutdown;
    let stops = [refuse(0, 3, by), stop(2, StopReason::Unloaded)];
    assert_eq!(fleet.after(1), stops);
    assert_eq!(fleet.request(0, 4), [refuse(0, 4, by)]);
    assert!(!fleet.policy.request_loaded(2, Request(5), fleet.now));
    assert!(fleet.policy.is_closing());
    fleet.ended(2);
    assert_eq!(fleet.policy.processes(), 0);
}

#[test]
fn who_waits_for_a_model_that_is_unloaded_is_refused_before_it_is_loaded() {
    let mut fleet = Fleet::new(2, 1);
    let refused = |number| refuse(1, number, RefusedBy::Unload);
    fleet.load(0);
    assert_eq!(fleet.request(0, 1), [grant(0, 1)]);
    // It is queued behind another model, which then need not make room for it.
    assert_eq!(fleet.request(1, 2), []);
    assert_eq!(fleet.request(0, 3), []);
    assert!(!fleet.policy.unload(1));
    assert_eq!(fleet.after(1), [refused(2), grant(0, 3)]);
    fleet.release(0);
    fleet.release(0);
    assert_eq!(fleet.request(1, 4), [stop(0, StopReason::Evicted)]);
    assert_eq!(fleet.ended(0), [start(1)]);
    assert_eq!(fleet.ready(1), [grant(1, 4)]);
    assert!(fleet.policy.unload(1));
    assert_eq!(fleet.after(1), [stop(1, StopReason::Unloaded)]);
    // It waits until that one has ended.
    assert_eq!(fleet.request(1, 5), []);
    assert!(!fleet.policy.unload(1));
    assert_eq!(fleet.after(1), [refused(5)]);
    assert_eq!(fleet.ended(1), []);
}

#[test]
fn some_requests_get_only_what_is_loaded() {
    let mut fleet = Fleet::new(2, 1);
    let get = |fleet: &mut Fleet, model, number| {
        let now = fleet.now;
        let granted = fleet.policy.request_loaded(model, Request(number), now);
        (granted, fleet.after(1))
    };
    assert_eq!(get(&mut fleet, 0, 1), (false, vec![]));
    assert!(!fleet.policy.is_coming(0));
    assert_eq!(fleet.request(0, 2), [start(0)]);
    assert_eq!(get(&mut fleet, 0, 3), (false, vec![]));
    assert!(fleet.policy.is_coming(0));
    assert_eq!(fleet.ready(0), [grant(0, 2)]);
    assert_eq!(get(&mut fleet, 0, 4), (true, vec![grant(0, 4)]));
    assert!(fleet.policy.is_coming(0) && !fleet.policy.is_coming(1));
    // It makes room for another, and takes none any more.
    assert_eq!(fleet.request(1, 5), []);
    assert_eq!(get(&mut fleet, 0, 6), (false, vec![]));
    assert!(!fleet.policy.is_coming(0) && fleet.policy.is_coming(1));
    fleet.release(0);
    assert_eq!(fleet.release(0), [stop(0, StopReason::Evicted)]);
    assert_eq!(get(&mut fleet, 0, 7), (false, vec![]));
    // Who is gone waits for nothing.
    fleet.policy.request(0, GONE, fleet.now);
    assert!(!fleet.policy.is_coming(0));
}

/// What happens next, with a number that chooses among what is possible.
#[derive(Debug, Clone, Copy)]
enum Step {
    Request(usize),
    RequestLoaded(usize),
    Release(usize),
    Ready(usize),
    Ended(usize),
    Crash(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let models = 0..4usize;
    prop_oneof![
        models.clone().prop_map(Step::Request),
        models.clone().prop_map(Step::RequestLoaded),
        models.clone().prop_map(Step::Release),
        models.clone().prop_map(Step::Ready),
        models.clone().prop_map(Step::Ended),
        models.prop_map(Step::Crash),
        (0..2 * IDLE.as_secs()).prop_map(Step::Wait),
    ]
}

/// The requests that are alive, and those that were answered.
#[derive(Default)]
struct Seen {
    running: Vec<(usize, u64)>,
    answered: BTreeSet<u32>,
}

impl Seen {
    fn note(&mut self, fleet: &Fleet, actions: Vec<Action<Request>>) {
        for action in actions {
            match action {
                Action::Grant(model, Request(number)) => {
                    assert_eq!(fleet.policy.state(model).0, Phase::Loaded);
                    self.running.push((model, fleet.policy.generation(model)));
                    assert!(self.answered.insert(number), "{number} twice");
                }
                Action::Refuse(_, Request(number), _) => {
                    assert!(self.answered.insert(number), "{number} twice");
                }
                Action::Start(model) => {
                    assert_eq!(fleet.policy.state(model).0, Phase::Loading);
                }
                Action::Stop(model, reason) => {
                    assert_eq!(fleet.policy.state(model).0, Phase::Stopping);
                    let generation = fleet.policy.generation(model);
                    let is_used = self.running.contains(&(model, generation));
                    assert!(!is_used, "{model} is stopped in use: {reason:?}");
                }
            }
        }
    }
}

proptest! {
    /// There are never too many processes, none is stopped in use, and everybody who waits gets an answer.
    #[test]
    fn nobody_starves(max_loaded in 1..4usize, steps in prop::collection::vec(step(), 0..200)) {
        let mut fleet = Fleet::new(4, max_loaded);
        let (mut seen, mut number) = (Seen::default(), 0);
        for step in steps {
            let phase = |model: usize| fleet.policy.state(model).0;
            let actions = match step {
                Step::Request(model) => {
                    number += 1;
                    fleet.request(model, 100 + number)
                }
                Step::RequestLoaded(model) => {
                    let (request, now) = (Request(101 + number), fleet.now);
                    number += u32::from(fleet.policy.request_loaded(model, request, now));
                    fleet.after(1)
                }
                Step::Release(model) => {
                    let found = seen.running.iter().position(|(of, _)| *of == model);
                    let Some(place) = found else { continue };
                    let (_, generation) = seen.running.remove(place);
                    fleet.policy.release(model, generation, fleet.now);
                    fleet.after(1)
                }
                Step::Ready(model) if phase(model) == Phase::Loading => fleet.ready(model),
                Step::Ended(model) if phase(model) == Phase::Stopping => fleet.ended(model),
                Step::Crash(model) if phase(model) != Phase::Unloaded => fleet.ended(model),
                Step::Ready(_) | Step::Ended(_) | Step::Crash(_) => continue,
                Step::Wait(seconds) => fleet.after(seconds),
            };
            seen.note(&fleet, actions);
            prop_assert!(fleet.policy.processes() <= max_loaded);
        }
        // From now on all goes well.
        for _ in 0..40 {
            for (model, generation) in std::mem::take(&mut seen.running) {
                fleet.policy.release(model, generation, fleet.now);
            }
            for model in 0..4 {
                match fleet.policy.state(model).0 {
                    Phase::Loading => fleet.policy.ready(model, fleet.now),
                    Phase::Stopping => fleet.policy.ended(model, fleet.now),
                    Phase::Unloaded | Phase::Loaded => {}
                }
            }
            let actions = fleet.after(1);
            seen.note(&fleet, actions);
            prop_assert!(fleet.policy.processes() <= max_loaded);
        }
        prop_assert_eq!(fleet.policy.requests().1, 0);
        prop_assert_eq!(seen.answered.len(), number as usize);
    }
}
