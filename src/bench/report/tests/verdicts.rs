//! What a run decides, and which drafter is recommended.

use super::*;

/// So many prompts of category `a` and of `b`, each 2 s plain and so many seconds with each drafter; `accepted` tokens
/// of its drafts are accepted.
fn compared_of(sizes: [usize; 2], drafters: &[(&str, [f64; 2])], accepted: usize) -> BenchReport {
    let tokens = [1, 2, 3, 4, 5];
    let run = |seconds, accepted, steps| {
        let usage = SpecUsage {
            rounds: 2,
            drafted: 4,
            tested: 4,
            accepted,
            ..SpecUsage::default()
        };
        let cost = Cost {
            target_steps: steps,
            ..Cost::default()
        };
        vec![sample(&tokens, seconds, usage, cost)]
    };
    let mut pairs = Vec::new();
    for prompt in 0..sizes[0] + sizes[1] {
        let (category, index) = if prompt < sizes[0] {
            ("a", 0)
        } else {
            ("b", 1)
        };
        for (drafter, (_, seconds)) in drafters.iter().enumerate() {
            let way = BenchMode { drafter, ..MODE };
            let steps = (tokens.len() - 1 - accepted) as f64;
            let (plain, speculative) = (run(2.0, 0, 4.0), run(seconds[index], accepted, steps));
            pairs.push(pair_of(way, category, 0.0, plain, speculative));
        }
    }
    let names = drafters.iter().map(|(name, _)| (*name).to_owned());
    let subject = Subject {
        drafters: names.collect(),
        ..subject()
    };
    BenchReport::new(subject, &pairs)
}

fn compared(drafters: &[(&str, [f64; 2])], accepted: usize) -> BenchReport {
    compared_of([4, 4], drafters, accepted)
}

/// The fastest is not recommended if it slows a category down.
#[test]
fn a_drafter_that_harms_nothing_is_recommended() {
    let (bold, careful, slow) = (
        ("bold", [0.5, 2.5]),
        ("careful", [1.0, 1.98]),
        ("slow", [3.0, 3.0]),
    );
    let report = compared(&[bold, careful, slow], 2);
    let [first, second, third] = &report.drafters[..] else {
        panic!("{:?}", report.drafters);
    };
    close(first.overall, 4.0 / 3.0);
    close(first.worst, 0.8);
    close(second.worst, 2.0 / 1.98);
    assert_eq!(third.verdict, Verdict::Costs);
    assert!(second.is_recommended && !first.is_recommended && !third.is_recommended);
    let table = report.to_string();
    assert_has(
        &table,
        &["take careful: 1.34 x, and 1.01 x where it gains least"],
    );
    let table = compared(&[("careful", [1.0, 1.9]), slow], 2).to_string();
    assert_has(&table, &["take careful: 1.38 x"]);
    // Half of the prompts are five times slower, and half are four times faster: who knows?
    let table = compared(&[bold, slow], 2).to_string();
    assert_has(&table, &["take none yet: undecided"]);
    let table = compared_of([20, 1], &[bold, slow], 2).to_string();
    assert_has(&table, &["take bold with care: 3.36 x, but 0.80 x"]);
    let table = compared(&[slow, ("slower", [4.0, 4.0])], 2).to_string();
    assert_has(&table, &["take none: no drafter gains"]);
    // Which of two equal drafters is faster, a run does not decide.
    let table = compared(&[("one", [1.0, 1.0]), ("other", [1.0, 1.0])], 2).to_string();
    assert_has(&table, &["as good, as far as this run tells: one"]);
}

/// Whatever the clock says, as many steps as plain decoding has are no gain.
#[test]
fn where_nothing_is_accepted_nothing_is_recommended() {
    let report = compared(&[("one", [1.0, 1.5]), ("other", [1.2, 1.2])], 0);
    for at in &report.temperatures {
        close(at.overall.tokens_per_step, 1.0);
        assert!(at.overall.interval.unwrap().low > 1.0);
        assert_eq!(at.overall.verdict, Verdict::NothingAccepted);
    }
    assert!(report.drafters.iter().all(|one| !one.is_recommended));
    let table = report.to_string();
    assert_has(&table, &["take none: no drafter gains"]);
    assert_has(&table, &["temperature 0: no draft token was accepted: "]);
    assert!(!table.contains("helps: "), "{table}");
}

/// Times that vary as on a busy machine, with a mean that is in favour: the verdict is that there is none.
#[test]
fn noise_is_told_as_such() {
    let tokens = [1, 2, 3, 4, 5];
    let usage = SpecUsage {
        accepted: 2,
        ..SpecUsage::default()
    };
    let cost = Cost {
        target_steps: 2.0,
        ..Cost::default()
    };
    let times = [0.4, 2.2, 1.1, 0.7, 1.9, 0.8, 0.9, 1.3];
    let pairs = times.map(|seconds| {
        let plain = vec![sample(&tokens, 1.2, SpecUsage::default(), Cost::default())];
        pair(
            "qa",
            0.0,
            plain,
            vec![sample(&tokens, seconds, usage, cost)],
        )
    });
    let report = BenchReport::new(subject(), &pairs);
    let overall = &report.temperatures[0].overall;
    assert!(overall.speed_up > 1.03, "{overall:?}");
    assert_eq!(overall.verdict, Verdict::Undecided);
    let (interval, spread) = (overall.interval.unwrap(), overall.spread.unwrap());
    assert!(interval.includes(1.0) && spread.low <= interval.low && interval.high <= spread.high);
    close(spread.high, 3.0);
    let table = report.to_string();
    assert_has(
        &table,
        &[
            "temperature 0: undecided: 1.03 x [",
            "an idle machine",
            "95% intervals",
        ],
    );
    // Of five prompts, nothing is decided.
    let table = BenchReport::new(subject(), &pairs[..5]).to_string();
    assert_has(&table, &["fewer than 6 prompts have no interval"]);
}

/// Several modes share the error, so that the best of many does not help by luck.
#[test]
fn the_best_of_many_modes_needs_more() {
    let alone = compared_of([20, 1], &[("one", [1.0, 1.9])], 2);
    let among = compared_of([20, 1], &[("one", [1.0, 1.9]); 8], 2);
    let interval = |report: &BenchReport| report.temperatures[0].overall.interval.unwrap();
    assert_eq!((alone.intervals.modes, among.intervals.modes), (1, 8));
    assert!(interval(&among).low < interval(&alone).low);
    let table = among.to_string();
    assert_has(&table, &["for all 8 modes together"]);
}
