use super::*;
use crate::handle::Submission;
use crate::options::SpecLimits;
use crate::request::{Request, queue_cost};
use crate::spec::StepOutput;
use foretoken_core::sampling::{Acceptance, TokenLogprobs, mix};
use std::collections::HashSet;
use std::time::{Duration, Instant};

mod admission;

const DRAFT: usize = 5;

/// Sequences begin after all that is in the prefix cache, for which something is held.
struct AllCached<'a>(&'a mut HashSet<SeqId>);

impl Beginnings for AllCached<'_> {
    fn resume(&mut self, sequence: &Sequence, cached: usize) -> usize {
        self.0.insert(sequence.state.id);
        cached
    }

    fn release(&mut self, sequence: &Sequence) {
        assert!(self.0.remove(&sequence.state.id), "nothing is held");
    }
}

/// A scheduler, and steps that only count.
struct Schedule {
    scheduler: Scheduler,
    /// The sequences for which something is held since they began, or were looked at.
    held: HashSet<SeqId>,
    /// Number of steps so far.
    steps: usize,
    /// Number of rows so far.
    rows: usize,
    /// Number of requests so far.
    requests: u32,
    /// Number of steps in which each sequence received rows.
    turns: Vec<usize>,
    /// The step in which each sequence received its first token.
    first: Vec<Option<usize>>,
    /// The step in which each sequence ended.
    ended: Vec<Option<usize>>,
}

impl Schedule {
    /// With enough blocks for everything.
    fn new(max_num_batched_tokens: usize) -> Self {
        Self::over(BlockAllocator::new(4096, 16), max_num_batched_tokens)
    }

    /// With a prefix cache over `num_blocks` blocks of 4 tokens.
    fn caching(num_blocks: usize, max_num_batched_tokens: usize) -> Self {
        let blocks = BlockAllocator::new(num_blocks, 4).with_prefix_cache(true);
        Self::over(blocks, max_num_batched_tokens)
    }

    fn over(blocks: BlockAllocator, max_num_batched_tokens: usize) -> Self {
        let chunk = PromptChunk::new(Duration::from_secs(1));
        Self {
            scheduler: Scheduler::new(
                blocks,
                64,
                max_num_batched_tokens,
                chunk,
                StepLimits::default(),
            ),
            held: HashSet::new(),
            steps: 0,
            rows: 0,
            requests: 0,
            turns: Vec::new(),
            first: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Adds a request of one sequence that goes on for a long time.
    fn add(&mut self, prompt_len: usize) {
        self.request(1, prompt_len, 10_000);
    }

    /// Adds a request of `n` sequences; returns the id of the first.
    fn request(&mut self, n: usize, prompt_len: usize, max_tokens: usize) -> usize {
        self.submit(n, prompt_len, max_tokens, None)
    }

    /// Adds a request for the scores of a prompt; returns its id.
    fn score(&mut self, prompt_len: usize) -> usize {
        self.submit(1, prompt_len, 0, Some(1))
    }

    fn submit(
        &mut self,
        n: usize,
        prompt_len: usize,
        max_tokens: usize,
        prompt_logprobs: Option<usize>,
    ) -> usize {
        let first = self.turns.len();
        self.requests += 1;
        for i in 0..n {
            let request = Request {
                prompt: vec![self.requests; prompt_len],
                max_tokens: Some(max_tokens),
                prompt_logprobs,
                ..Request::default()
            };
            let submission = Submission {
                text_tokens: Default::default(),
                request,
                events: tokio::sync::mpsc::unbounded_channel().0,
                arrived: Instant::now(),
                permit: None,
                group: u64::from(self.requests),
                tokens_before: (i * queue_cost(prompt_len, max_tokens)) as u64,
            };
            let spec = SpecLimits {
                length: DRAFT,
                nodes: 2 * DRAFT,
                topk: 1,
            };
            let id = (first + i) as SeqId;
            let sequence = Sequence::new(id, submission, 20_000, spec, Acceptance::Coupled, &[]);
            self.scheduler.waiting.push(sequence);
        }
        self.turns.resize(first + n, 0);
        self.first.resize(first + n, None);
        self.ended.resize(first + n, None);
        first
    }

    /// One step, in which no draft token is accepted. Tokens differ, so that texts share only prompts.
    fn step(&mut self) -> Vec<ScheduledSequence> {
        let (plan, preempted) = self.scheduler.schedule(AllCached(&mut self.held));
        // The engine frees what preempted ones have.
        for id in &preempted {
            self.held.remove(id);
        }
        for sequence in self.scheduler.waiting.sequences.values() {
            let id = sequence.state.id;
            assert!(!self.held.contains(&id), "{id} waits");
        }
        assert!(!plan.is_empty(), "a step without rows");
        let rows: usize = plan.iter().map(|turn| turn.rows + turn.nodes).sum();
        assert!(rows <= self.scheduler.max_num_batched_tokens, "{plan:?}");
        let drafts: usize = plan.iter().map(|turn| turn.nodes).sum();
        assert!(drafts <= self.scheduler.limits.draft_rows, "{plan:?}");
        let mut scored = 0;
        for turn in &plan {
            let sequence = &mut self.scheduler.running[turn.index];
            let scores = sequence.unscored(turn.rows).len();
            scored += scores;
            let id = sequence.state.id as usize;
            assert!(!preempted.contains(&sequence.state.id));
            self.turns[id] += 1;
            self.rows += turn.rows;
            let tokens = if turn.rows == sequence.pending() && sequence.wants_tokens() {
                vec![1_000_000 + id as u32]
            } else {
                Vec::new()
            };
            let is_first = !tokens.is_empty() && sequence.output_len() == 0;
            self.first[id] = self.first[id].or(is_first.then_some(self.steps));
            let score = TokenLogprobs {
                logprob: 0.0,
                top: Vec::new(),
            };
            let output = StepOutput {
                tokens,
                prompt_scores: vec![score; scores],
                ..StepOutput::default()
            };
            let (_, end) = sequence.advance(turn.rows, output);
            self.ended[id] = end.map(|_| self.steps);
            self.scheduler.settle(turn.index);
        }
        assert!(scored <= self.scheduler.limits.scored_rows, "{plan:?}");
        self.scheduler.check_invariants().unwrap();
        let ended = &self.ended;
        let has_ended = |s: &Sequence| ended[s.state.id as usize].is_some();
        self.scheduler.remove(has_ended);
        self.steps += 1;
        plan
    }

    /// At most `count` steps, until nobody is left.
    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            if !self.scheduler.is_idle() {
                self.step();
            }
        }
    }

    /// Number of steps until `id` has its first token.
    fn steps_to_first(&mut self, id: usize) -> usize {
        let from = self.steps;
        while self.first[id].is_none() {
            self.step();
            assert!(self.steps - from < 100_000, "{id} starves");
        }
        self.steps - from
    }

    /// Steps until nobody is left.
    fn finish(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
            assert!(self.steps < 1_000_000, "no end");
        }
        assert!(self.ended.iter().all(Option::is_some));
        assert_eq!(self.scheduler.kv_usage(), 0.0);
    }
}

/// Six rows are six of twenty sequences; drafts wait.
#[test]
fn who_finds_no_room_is_next() {
    for rows in [1, DRAFT + 1, 19] {
        let mut schedule = Schedule::new(rows);
        (0..20).for_each(|_| schedule.add(1));
        for _ in 0..400 {
            schedule.step();
            let (least, most) = (schedule.turns.iter().min(), schedule.turns.iter().max());
            assert!(
                most <= least.map(|n| n + 1).as_ref(),
                "{:?}",
                schedule.turns
            );
        }
    }
}

/// Decoding sequences fill every step, and a prompt is still read.
#[test]
fn prompts_have_their_turn() {
    for (rows, decoding) in [(DRAFT + 1, 10), (2 * DRAFT + 2, 4), (17, 9)] {
        let mut schedule = Schedule::new(rows);
        for _ in 0..decoding {
            schedule.add(1);
        }
        (0..2 * decoding).for_each(|_| drop(schedule.step()));
        schedule.add(50);
        // Between two turns of a sequence, every other sequence has one.
        let enough = 50 * (decoding + 1);
        let read = (0..enough).position(|_| {
            schedule.step();
            let newest = schedule.scheduler.running.last();
            newest.is_some_and(|s| s.state.prompt_len == 50 && s.output_len() > 0)
        });
        assert!(read.is_some(), "{rows} rows: not read in {enough} steps");
    }
}

/// With enough rows, all sequences decode in every step beside a chunk within the time limit; a
/// prompt alone takes half of it.
#[test]
fn prompts_keep_nobody_waiting() {
    let mut schedule = Schedule::new(500);
    schedule.add(2000);
    let alone = schedule.scheduler.prompt_chunk.rows_alone();
    assert_eq!(schedule.step()[0].rows, alone);
    (0..10).for_each(|_| schedule.add(1));
    schedule.step();
    let plan = schedule.step();
    let rows: Vec<usize> = plan.iter().map(|turn| turn.rows).collect();
    let mut want = vec![1; 11];
    want[10] = schedule.scheduler.prompt_chunk.rows();
    assert_eq!(rows, want);
    assert!(want[10] < 100);
    assert!(
        plan[..10].iter().all(|turn| turn.nodes == DRAFT),
        "{plan:?}"
    );
}

/// Texts that must not be divided: those that fit are read together, the oldest among them, and nobody starves.
#[test]
fn whole_texts_are_not_divided() {
    let mut schedule = Schedule::new(100);
    schedule.scheduler.reads_whole_texts = true;
    for len in [60, 50, 100, 40, 1, 60] {
        schedule.request(1, len, 0);
    }
    for want in [&[60, 40][..], &[50, 1], &[100], &[60]] {
        let plan = schedule.step();
        let rows: Vec<usize> = plan.iter().map(|turn| turn.rows).collect();
        assert_eq!(rows, want);
        assert!(!schedule.scheduler.may_be_interrupted);
    }
    schedule.finish();
}

/// While nothing decodes, prompts that fit a chunk are read in one step; a longer one among them is not.
#[test]
fn short_prompts_alone_are_read_together() {
    for (longest, together) in [(30, true), (2000, false)] {
        let mut schedule = Schedule::new(500);
        (0..10).for_each(|_| schedule.add(30));
        schedule.add(longest);
        let rows: usize = schedule.step().iter().map(|turn| turn.rows).sum();
        let want = if together {
            11 * 30
        } else {
            schedule.scheduler.prompt_chunk.rows_alone()
        };
        assert_eq!(rows, want);
    }
}

/// The prompts of a request that is alone are read in growing chunks, which are to be interrupted, until another one
/// arrives; those with scores are not.
#[test]
fn the_prompts_of_one_request_alone_are_read_in_large_chunks() {
    let rows = |plan: Vec<ScheduledSequence>| plan.iter().map(|turn| turn.rows).sum::<usize>();
    for max_interruptible in [0, 1, 2] {
        let mut schedule = Schedule::new(500);
        schedule.scheduler.max_interruptible = max_interruptible;
        schedule.request(2, 1500, 100);
        let is_large = max_interruptible == 2;
        for want in [16, 32, 64, 128, 256, 256] {
            assert_eq!(rows(schedule.step()), if is_large { want } else { 16 });
            let may_be_interrupted = schedule.scheduler.may_be_interrupted;
            assert_eq!(may_be_interrupted, is_large && want > 16);
        }
        schedule.add(5);
        assert_eq!(rows(schedule.step()), 16);
        assert!(!schedule.scheduler.may_be_interrupted);
        schedule.finish();
    }
    let mut schedule = Schedule::new(500);
    schedule.scheduler.max_interruptible = 1;
    schedule.score(1500);
    for _ in 0..5 {
        assert_eq!(rows(schedule.step()), 16);
        assert!(!schedule.scheduler.may_be_interrupted);
    }
}

/// Prompts with scores that end in a step: their last rows score nothing, and are no reason for more rows that
/// do.
#[test]
fn no_step_scores_more_than_it_may() {
    for scored_rows in [1, 2, 28, 29, 30, 31, 256] {
        let mut schedule = Schedule::new(2048);
        schedule.scheduler.limits.scored_rows = scored_rows;
        for _ in 0..64 {
            schedule.score(30);
        }
        schedule.finish();
        // No row is left for later that could score now.
        let steps = (64 * 29_usize).div_ceil(scored_rows);
        assert!((steps..=steps + 1).contains(&schedule.steps), "{steps}");
    }
}

/// Prompts with scores that never end coming leave half of the rows with scores to the oldest, which is large.
#[test]
fn prompts_with_scores_do_not_starve() {
    for scored_rows in [1, 4, 7] {
        let mut schedule = Schedule::new(512);
        schedule.scheduler.limits.scored_rows = scored_rows;
        let large = schedule.score(200);
        while schedule.ended[large].is_none() {
            for _ in 0..4 {
                schedule.score(1 + scored_rows);
            }
            schedule.step();
            let bound = 200_usize.div_ceil(scored_rows.div_ceil(2));
            assert!(schedule.steps <= bound, "not in {bound} steps");
        }
        schedule.finish();
    }
}

/// Random requests under random limits, all of which are crossed: none is passed in any step, and everybody
/// comes to an end.
#[test]
fn random_schedules_keep_their_limits() {
    let mut crossed = [0; 2];
    for case in 0..200 {
        let mut seed = case;
        let mut roll = |below: usize| {
            seed = mix(seed);
            (seed % below as u64) as usize
        };
        let mut schedule = Schedule::caching(40 + roll(60), 1 + roll(60));
        schedule.scheduler.limits = StepLimits {
            scored_rows: 1 + roll(8),
            draft_rows: 1 + roll(8),
            looks: 1 + roll(4),
        };
        let limits = schedule.scheduler.limits;
        for _ in 0..30 {
            let (n, prompt_len, max_tokens) = (1 + roll(3), 1 + roll(60), roll(30));
            let prompt_logprobs = (roll(2) == 0).then_some(1);
            // A request for no tokens is one for scores.
            let max_tokens = max_tokens.max(usize::from(prompt_logprobs.is_none()));
            schedule.submit(n, prompt_len, max_tokens, prompt_logprobs);
            schedule.steps(roll(4));
            let running = &schedule.scheduler.running;
            let wanted: usize = (running.iter())
                .map(|sequence| sequence.unscored(sequence.pending()).len())
                .sum();
            let drafts: usize = running.iter().map(Sequence::draft_nodes).sum();
            crossed[0] += usize::from(wanted > limits.scored_rows);
            crossed[1] += usize::from(drafts > limits.draft_rows);
        }
        schedule.finish();
    }
    assert!(crossed.iter().all(|&n| n > 1000), "{crossed:?}");
}
