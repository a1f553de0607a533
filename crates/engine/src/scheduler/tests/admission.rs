//! What requests can rely on when they wait: the rules of `admission.rs`.

use super::*;

/// The other choices of a request do not keep a request waiting that came after them, whether they have all
/// places of the batch or all blocks.
#[test]
fn a_request_of_many_choices_makes_way() {
    for num_blocks in [4096, 300] {
        let mut schedule = Schedule::caching(num_blocks, 512);
        let many = schedule.request(128, 30, 300);
        schedule.steps(100);
        assert!(schedule.first[many..].iter().flatten().count() < 128);
        for _ in 0..20 {
            let small = schedule.request(1, 20, 10);
            let waited = schedule.steps_to_first(small);
            assert!(waited <= 3, "{waited} steps, {num_blocks} blocks");
            schedule.steps(3);
        }
        // Two such requests share the batch.
        let other = schedule.request(128, 30, 300);
        assert!(schedule.steps_to_first(other) <= 3);
        schedule.finish();
        let last = |of: usize| schedule.ended[of..of + 128].iter().max().unwrap().unwrap();
        assert!(last(other) > last(many));
        assert!(last(many) + 300 > schedule.ended[other].unwrap());
    }
}

/// A request as large as the pool makes way for small ones, while it reads its prompt and later; what it
/// computes twice is about what they hold, and it gets on.
#[test]
fn a_prompt_as_large_as_the_pool_makes_way() {
    const TOKENS: usize = 4 * 1000;
    const SMALL: usize = 20;
    for before in [1, 3, 60] {
        let mut schedule = Schedule::caching(1000, 128);
        let (prompt, answer) = (TOKENS - 40, 36);
        schedule.request(1, prompt, answer);
        schedule.steps(before);
        // The large one keeps half of the rows.
        let share = schedule.scheduler.prompt_chunk.rows_alone() / 2;
        let smalls: Vec<usize> = (0..12)
            .map(|_| {
                let small = schedule.request(1, SMALL, 10);
                let waited = schedule.steps_to_first(small);
                assert!(
                    waited <= SMALL.div_ceil(share),
                    "{waited} steps after {before}"
                );
                schedule.steps(15);
                small
            })
            .collect();
        schedule.finish();
        let rows = prompt + answer + smalls.len() * (SMALL + 10);
        assert!(schedule.rows < rows + rows / 4, "{} rows", schedule.rows);
    }
}

/// A request for which there is no room lets small ones past.
#[test]
fn small_requests_fill_the_room_that_a_large_one_cannot_use() {
    let mut schedule = Schedule::caching(100, 128);
    schedule.request(1, 200, 150);
    schedule.steps(4);
    let large = schedule.request(1, 300, 10);
    // Together they may be as large as it is.
    for _ in 0..310 / 20 {
        let small = schedule.request(1, 10, 10);
        assert!(schedule.steps_to_first(small) <= 2);
        assert_eq!(schedule.first[large], None);
    }
    schedule.finish();
}

/// Small requests that never end coming keep a large one waiting no longer than for its own size in tokens,
/// before it has begun and after it has made way.
#[test]
fn small_requests_do_not_starve_a_large_one() {
    let mut schedule = Schedule::caching(100, 64);
    let mut small = 0;
    let mut arrive = |schedule: &mut Schedule| {
        small += 1;
        if small % 2 == 1 {
            schedule.request(1, 16, 30);
        }
        schedule.step();
    };
    (0..100).for_each(|_| arrive(&mut schedule));
    let (large, from) = (schedule.request(1, 300, 60), schedule.steps);
    while schedule.ended[large].is_none() {
        arrive(&mut schedule);
        assert!(schedule.steps < from + 2_000, "it starves");
    }
    schedule.finish();
}

/// Small requests that never end coming need not wait for a large one that waits: they make way for it as soon
/// as it has room without them.
#[test]
fn backfills_do_not_delay_the_head_of_the_queue() {
    let run = |smalls: Option<(usize, usize, usize)>| {
        let mut schedule = Schedule::caching(100, 128);
        // The large one has room when the first of these has ended.
        schedule.request(1, 200, 60);
        schedule.request(1, 8, 300);
        schedule.steps(30);
        let large = schedule.request(1, 300, 10);
        let mut waits = Vec::new();
        while schedule.first[large].is_none() {
            assert!(schedule.steps < 1_000, "it starves");
            if let Some((n, prompt_len, max_tokens)) = smalls {
                let small = schedule.request(n, prompt_len, max_tokens);
                waits.extend((n == 1).then_some((small, schedule.steps)));
            }
            schedule.step();
        }
        let admitted = schedule.steps - 300 / 16;
        schedule.finish();
        for (small, arrived) in waits {
            let waited = schedule.first[small].unwrap() - arrived;
            let is_last = arrived + 20 > admitted;
            assert!(waited <= 3 || is_last, "{waited} steps at {arrived}");
        }
        schedule.first[large].unwrap()
    };
    let alone = run(None);
    // The choices of a request share the blocks of its prompt.
    for smalls in [(1, 10, 5), (2, 68, 4)] {
        let together = run(Some(smalls));
        // They have a share of the rows in which its prompt is read.
        assert!(
            together <= alone + 20,
            "{together} steps with {smalls:?}, {alone} without"
        );
    }
}

/// A small request waits neither for a large one that has the whole pool nor for another one that waits for it,
/// until it would overtake them by more than they cost.
#[test]
fn small_requests_wait_for_no_large_one() {
    let mut schedule = Schedule::caching(100, 128);
    schedule.request(1, 360, 30);
    schedule.steps(10);
    let head = schedule.request(1, 300, 10);
    for _ in 0..310 / 30 {
        let small = schedule.request(1, 24, 6);
        let waited = schedule.steps_to_first(small);
        assert!(waited <= 3, "{waited} steps");
        assert_eq!(schedule.first[head], None);
        schedule.steps(8);
    }
    schedule.finish();
}

/// A request that is not much smaller than the one before it waits its turn, although it fits.
#[test]
fn a_request_of_similar_size_is_no_backfill() {
    for (prompt, is_backfill) in [(60, true), (110, false)] {
        let mut schedule = Schedule::caching(100, 128);
        schedule.request(1, 200, 60);
        schedule.steps(10);
        let head = schedule.request(1, 300, 10);
        let other = schedule.request(1, prompt, 10);
        schedule.steps_to_first(other);
        assert_eq!(schedule.first[head].is_none(), is_backfill, "{prompt}");
        schedule.finish();
    }
}

/// Without a prefix cache, who makes way computes everything again: it does so only while that is less than
/// the request itself.
#[test]
fn without_a_prefix_cache_a_large_request_makes_way_rarely() {
    for (before, makes_way) in [(4, true), (30, false)] {
        let mut schedule = Schedule::over(BlockAllocator::new(94, 4), 64);
        let large = schedule.request(1, 350, 20);
        schedule.steps(before);
        let small = schedule.request(1, 24, 6);
        schedule.step();
        let made_way = schedule.scheduler.running[0].state.id != large as SeqId;
        assert_eq!(made_way, makes_way, "after {before} steps");
        schedule.steps_to_first(small);
        schedule.finish();
    }
}

/// Many long requests over a small pool: each has its first token when those before it had time for all
/// of theirs, and what was overtaken by others was no more than its own size.
#[test]
fn the_wait_depends_on_the_place_in_the_queue() {
    for (blocks, prompt, answer) in [(40, 40, 80), (40, 8, 120), (64, 100, 20), (40, 150, 5)] {
        let mut schedule = Schedule::caching(blocks, 64);
        let all: Vec<usize> = (0..48)
            .map(|i| schedule.request(1, prompt + i % 7, answer))
            .collect();
        schedule.finish();
        // Alone, a request takes a step a token, and one for each chunk of its prompt.
        let chunk = schedule.scheduler.prompt_chunk.rows_alone();
        let alone = answer + (prompt + 7).div_ceil(chunk);
        let overtaken = queue_cost(prompt + 7 + answer, answer);
        for (place, &id) in all.iter().enumerate() {
            let first = schedule.first[id].unwrap();
            let bound = (place + 1) * alone + overtaken;
            assert!(
                first <= bound,
                "place {place}: {first} steps, at most {bound}"
            );
        }
    }
}

/// The room of one that has made way is for the small one that it made way for, not for another.
#[test]
fn nobody_else_takes_the_room_of_one_that_made_way() {
    let mut schedule = Schedule::caching(100, 128);
    let large = schedule.request(1, 372, 26);
    schedule.steps(40);
    assert!(schedule.first[large].is_some());
    let small = schedule.request(1, 10, 4);
    let other = schedule.request(1, 330, 10);
    schedule.steps(2);
    assert!(schedule.first[small].is_some());
    assert!(schedule.ended[large].is_none() && schedule.first[other].is_none());
    schedule.finish();
    assert!(schedule.ended[large] < schedule.first[other]);
}
