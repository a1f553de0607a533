use super::pairs::{first_difference, median};
use super::*;
use crate::bench::measure::{Cost, Sample};
use crate::engine::SpecUsage;
use crate::prompts::Prompt;
use crate::spec::expected_speed_up;
use proptest::prelude::*;

fn sample(tokens: &[u32], seconds: f64, spec: SpecUsage, cost: Cost) -> Sample {
    Sample {
        tokens: tokens.to_vec(),
        decoded: tokens.len() - 1,
        decode_seconds: seconds,
        total_seconds: seconds + 1.0,
        spec,
        cost,
    }
}

/// K = 2, verified.
const MODE: BenchMode = BenchMode {
    spec_length: 2,
    ..BenchMode::PLAIN
};

const REJECTION: BenchMode = BenchMode {
    acceptance: Acceptance::Rejection,
    ..MODE
};

fn pair(
    category: &str,
    temperature: f32,
    plain: Vec<Sample>,
    speculative: Vec<Sample>,
) -> MeasuredPair {
    pair_of(MODE, category, temperature, plain, speculative)
}

fn pair_of(
    way: BenchMode,
    category: &str,
    temperature: f32,
    plain: Vec<Sample>,
    speculative: Vec<Sample>,
) -> MeasuredPair {
    MeasuredPair::new(&prompt(category), temperature, way, &plain, &speculative)
}

fn prompt(category: &str) -> Prompt {
    Prompt {
        id: "1".into(),
        category: category.into(),
        text: String::new(),
        tokens: vec![1],
        ends: Vec::new(),
        prediction: Vec::new(),
    }
}

/// Four decoded tokens, 2 s plain and 1 s speculative; c = 0.25 / 2 / 0.5 = 0.25.
fn twice_as_fast(category: &str, temperature: f32) -> MeasuredPair {
    let tokens = [1, 2, 3, 4, 5];
    let plain = Cost {
        target_seconds: 2.0,
        target_steps: 4.0,
        ..Cost::default()
    };
    let spec = Cost {
        target_seconds: 1.2,
        target_steps: 2.0,
        draft_seconds: 0.25,
        draft_steps: 2.0,
    };
    let usage = SpecUsage {
        rounds: 2,
        drafted: 4,
        tested: 3,
        accepted: 2,
        ..SpecUsage::default()
    };
    pair(
        category,
        temperature,
        vec![sample(&tokens, 2.0, SpecUsage::default(), plain)],
        vec![sample(&tokens, 1.0, usage, spec)],
    )
}

fn subject() -> Subject {
    Subject {
        version: "1.2.3",
        commit: None,
        date: "2026-11-28T03:00:00Z".into(),
        flags: vec!["-m".into(), "m".into()],
        model: "m".into(),
        files: Vec::new(),
        drafters: vec!["d".into()],
        spec_length: 2,
        warm: false,
        max_tokens: 5,
        repeat: 1,
        device: "cpu".into(),
        draft_operations: vec![0.1],
        cpu: "some CPU".into(),
        threads: 2,
    }
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * b.abs().max(1.0), "{a} is not {b}");
}

#[test]
fn medians() {
    close(median(vec![3.0, 1.0, 2.0]), 2.0);
    close(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    close(median(vec![7.0]), 7.0);
    assert!(median(vec![]).is_nan());
}

#[test]
fn the_theorem_at_its_edges() {
    // The paper's table 1: alpha 0.8 with 5 drafts at no cost, and its limits.
    close(expected_speed_up(0.8, 5, 0.0), (1.0 - 0.8f64.powi(6)) / 0.2);
    close(expected_speed_up(1.0, 5, 0.1), 6.0 / 1.5);
    close(expected_speed_up(0.0, 5, 0.1), 1.0 / 1.5);
    close(expected_speed_up(0.5, 0, 0.1), 1.0);
}

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
    assert!(
        table.contains("take careful: 1.34 x, and 1.01 x where it gains least"),
        "{table}"
    );
    let table = compared(&[("careful", [1.0, 1.9]), slow], 2).to_string();
    assert!(table.contains("take careful: 1.38 x"), "{table}");
    // Half of the prompts are five times slower, and half are four times faster: who knows?
    let table = compared(&[bold, slow], 2).to_string();
    assert!(table.contains("take none yet: undecided"), "{table}");
    let table = compared_of([20, 1], &[bold, slow], 2).to_string();
    assert!(
        table.contains("take bold with care: 3.36 x, but 0.80 x"),
        "{table}"
    );
    let table = compared(&[slow, ("slower", [4.0, 4.0])], 2).to_string();
    assert!(table.contains("take none: no drafter gains"), "{table}");
    // Which of two equal drafters is faster, a run does not decide.
    let table = compared(&[("one", [1.0, 1.0]), ("other", [1.0, 1.0])], 2).to_string();
    assert!(
        table.contains("as good, as far as this run tells: one"),
        "{table}"
    );
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
    assert!(table.contains("take none: no drafter gains"), "{table}");
    assert!(
        table.contains("temperature 0: no draft token was accepted: "),
        "{table}"
    );
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
    for needle in [
        "temperature 0: undecided: 1.03 x [",
        "an idle machine",
        "95% intervals",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    // Of five prompts, nothing is decided.
    let table = BenchReport::new(subject(), &pairs[..5]).to_string();
    assert!(
        table.contains("fewer than 6 prompts have no interval"),
        "{table}"
    );
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
    assert!(table.contains("for all 8 modes together"), "{table}");
}

#[test]
fn prompts_have_a_row_each_and_a_line_of_csv() {
    let runs = |times: [f64; 3]| {
        let run = |t| sample(&[1, 2, 3], t, SpecUsage::default(), Cost::default());
        times.map(run).to_vec()
    };
    let both = [pair(
        "a, \"b\"",
        0.0,
        runs([2.0, 1.0, 9.0]),
        runs([0.5, 1.0, 0.7]),
    )];
    let report = BenchReport::new(subject(), &both);
    let json = serde_json::to_value(&report).unwrap();
    let row = &json["temperatures"][0]["prompts"][0];
    assert_eq!(
        (&row["id"], &row["prompt_tokens"]),
        (&"1".into(), &1.into())
    );
    assert_eq!(
        (&row["plain_seconds"], &row["spec_seconds"]),
        (&2.0.into(), &0.7.into())
    );
    assert_eq!(row["plain_seconds_range"]["high"], 9.0);
    assert_eq!(row["spec_seconds_range"]["low"], 0.5);
    assert_eq!(json["subject"]["flags"][1], "m");
    assert_eq!(
        json["temperatures"][0]["overall"]["verdict"],
        "nothing_accepted"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    report.write_csv(&path).unwrap();
    let csv = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 2, "{csv}");
    let columns = lines[0].split(',').count();
    assert!(
        lines[1].starts_with("0,d,2,1,coupled,,1,\"a, \"\"b\"\"\",1,2,2,1,9,0.7,0.5,1,"),
        "{csv}"
    );
    assert_eq!(lines[1].split(',').count(), columns + 1, "{csv}");
}

proptest! {
    #[test]
    fn the_sum_is_the_quotient(alpha in 0.0..0.999f64, k in 1usize..12, c in 0.0..2.0f64) {
        let quotient = (1.0 - alpha.powi(k as i32 + 1)) / ((1.0 - alpha) * (c * k as f64 + 1.0));
        prop_assert!((expected_speed_up(alpha, k, c) - quotient).abs() < 1e-9);
    }
}

#[test]
fn the_first_difference_is_found() {
    assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
    assert_eq!(first_difference(&[1, 2, 3], &[1, 9, 3]), Some(1));
    assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
    assert_eq!(first_difference(&[1], &[]), Some(0));
}

#[test]
fn figures_of_two_prompts() {
    let pairs = [twice_as_fast("qa", 0.0), twice_as_fast("qa", 0.0)];
    let figures = GroupFigures::of("qa", 2, ERROR, &pairs);
    assert_eq!((figures.prompts, figures.tokens), (2, 8));
    close(figures.plain_tokens_per_second, 2.0);
    close(figures.spec_tokens_per_second, 4.0);
    close(figures.speed_up, 2.0);
    close(figures.total_speed_up, 3.0 / 2.0);
    close(figures.tokens_per_step, 2.0);
    close(figures.alpha, 2.0 / 3.0);
    close(figures.mean_accepted_length, 2.0);
    close(figures.mean_draft_length, 2.0);
    close(figures.c, 0.25);
    close(figures.verify_cost, 1.2);
    assert_eq!(figures.drafted, 8);
    let expected = (1.0 + 2.0 / 3.0 + 4.0 / 9.0) / 1.5;
    close(figures.expected_speed_up, expected);
    close(figures.measured_over_expected, 2.0 / expected);
}

#[test]
fn without_a_draft_model_each_draft_token_is_a_step() {
    let mut pair = twice_as_fast("qa", 0.0);
    pair.speculative.cost.draft_steps = 0.0;
    close(
        GroupFigures::of("qa", 2, ERROR, [&pair]).c,
        0.25 / 4.0 / 0.5,
    );
}

#[test]
fn the_median_of_repeats_is_used() {
    let tokens = [1, 2, 3];
    let runs = |times: &[f64]| {
        let run = |&t: &f64| sample(&tokens, t, SpecUsage::default(), Cost::default());
        times.iter().map(run).collect::<Vec<_>>()
    };
    let mut plain = runs(&[9.0, 2.0, 1.0]);
    (plain[0].cost.target_seconds, plain[0].cost.target_steps) = (6.0, 3.0);
    let mut speculative = runs(&[1.0, 0.5, 7.0]);
    for run in &mut speculative {
        run.cost.target_steps = 1.0;
    }
    let figures = GroupFigures::of("qa", 2, ERROR, [&pair("qa", 0.0, plain, speculative)]);
    close(figures.speed_up, 2.0);
    // Counts are those of one run.
    close(figures.tokens_per_step, 2.0);
}

#[test]
fn a_report_groups_in_order_and_adds_up() {
    let pairs = [
        twice_as_fast("qa", 0.0),
        twice_as_fast("math", 0.0),
        twice_as_fast("qa", 0.0),
        twice_as_fast("qa", 1.0),
    ];
    let report = BenchReport::new(subject(), &pairs);
    assert_eq!(report.temperatures.len(), 2);
    let at = &report.temperatures[0];
    let names: Vec<_> = at
        .categories
        .iter()
        .map(|c| (c.category.as_str(), c.prompts))
        .collect();
    assert_eq!(names, [("qa", 2), ("math", 1)]);
    assert_eq!((at.overall.prompts, at.overall.tokens), (3, 12));
    let table = report.to_string();
    for needle in ["some CPU", "temperature 1", "overall", "math", "2.00"] {
        assert!(table.contains(needle), "{table}");
    }
}

#[test]
fn a_changed_text_is_an_error_unless_it_is_sampled_under_the_rejection_rule() {
    let run = |tokens: &[u32]| vec![sample(tokens, 1.0, SpecUsage::default(), Cost::default())];
    let changed = |way, temperature| {
        let (plain, speculative) = (run(&[1, 2, 3]), run(&[1, 2, 4]));
        let pair = pair_of(way, "qa", temperature, plain, speculative);
        BenchReport::new(subject(), &[pair, twice_as_fast("qa", 0.0)]).check_equal()
    };
    for (way, temperature) in [(MODE, 0.0), (MODE, 1.0), (REJECTION, 0.0)] {
        let error = changed(way, temperature).unwrap_err();
        assert!(
            error.to_string().contains("prompt 1 (qa) at token 2"),
            "{error}"
        );
    }
    changed(REJECTION, 1.0).unwrap();
}

#[test]
fn both_rules_and_tree_shapes_are_compared() {
    let pair = |way, accepted| {
        let mut pair = twice_as_fast("qa", 1.0);
        (pair.way, pair.speculative.spec.accepted) = (way, accepted);
        pair
    };
    let tree = BenchMode {
        spec_topk: 4,
        ..MODE
    };
    let pairs = [pair(MODE, 1), pair(tree, 3), pair(REJECTION, 2)];
    let report = BenchReport::new(subject(), &pairs);
    assert_eq!(report.rules.len(), 1, "the tree has no counterpart");
    close(report.rules[0].coupled_over_rejection, 0.5);
    let table = report.to_string();
    for needle in [
        "temperature 1, coupled, tree 4\ncategory",
        "temperature 1, all modes\nmode",
        "\nrejection, chain ",
        "K = 2, siblings = 1: coupled 0.333, rejection 0.667, ratio 0.500",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["temperatures"][2]["acceptance"], "rejection");
    assert_eq!(json["temperatures"][1]["spec_topk"], 4);
}

#[test]
fn loads_have_a_line_each() {
    let load = |streams, seconds| {
        let mut load = StreamLoad::new(streams, 0.0, MODE);
        load.requests = 2;
        let run = |seconds| Throughput {
            tokens: 50,
            seconds,
        };
        for group in [0, 0, 1] {
            load.add(group, run(2.0), run(seconds));
        }
        // The repeats of a group are one pair.
        assert_eq!(load.pairs.len(), 2);
        close(load.pairs[0].plain.seconds, 4.0);
        close(load.pairs[0].speculative.tokens, 100.0);
        close(load.pairs[1].plain.seconds, 2.0);
        load
    };
    let mut report = BenchReport::of_loads(subject(), vec![load(1, 1.0), load(16, 2.0)]);
    report.check_equal().unwrap();
    close(report.loads[0].plain_tokens_per_second, 25.0);
    close(report.loads[0].speed_up, 2.0);
    close(report.loads[1].speed_up, 1.0);
    let table = report.to_string();
    for needle in [
        "temperature 0\nstreams",
        "\n      1 ",
        "\n     16 ",
        "prompts included",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    let differs = Difference::of_texts(&prompt("qa"), &[1, 2], &[1, 3]);
    report.loads[1].differing.extend(differs);
    assert!(report.check_equal().is_err());
}

#[test]
fn ratios_without_measurements_are_null() {
    let run = || vec![sample(&[1], 0.0, SpecUsage::default(), Cost::default())];
    let report = BenchReport::new(subject(), &[pair("qa", 0.0, run(), run())]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.json");
    report.write(&path).unwrap();
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let overall = &json["temperatures"][0]["overall"];
    assert!(overall["speed_up"].is_null());
    assert_eq!(overall["prompts"], 1);
}

/// [`twice_as_fast`] with another K, and faster by `factor`.
fn faster(
    temperature: f32,
    synthetic_acceptance: Option<f64>,
    k: usize,
    factor: f64,
) -> MeasuredPair {
    let mut pair = twice_as_fast("qa", temperature);
    pair.way = BenchMode {
        spec_length: k,
        synthetic_acceptance,
        ..MODE
    };
    pair.speculative.decode_seconds /= factor;
    pair
}

#[test]
fn each_acceptance_and_length_has_its_figures() {
    // In the order of measurement: by prompt, then by mode.
    let of_prompt = |factor| {
        [(0.5, 1, 1.0), (0.5, 3, 1.25), (0.9, 1, 1.5), (0.9, 3, 1.0)]
            .map(|(rate, k, f)| faster(0.0, Some(rate), k, f * factor))
    };
    let pairs = [of_prompt(1.0), of_prompt(1.0)].concat();
    let report = BenchReport::new(subject(), &pairs);
    let ways: Vec<_> = report
        .temperatures
        .iter()
        .map(|at| (at.way.synthetic_acceptance, at.way.spec_length))
        .collect();
    let want = [(0.5, 1), (0.5, 3), (0.9, 1), (0.9, 3)].map(|(rate, k)| (Some(rate), k));
    assert_eq!(ways, want);
    for at in &report.temperatures {
        assert_eq!((at.overall.prompts, at.categories.len()), (2, 1));
        let expected = expected_speed_up(at.overall.alpha, at.way.spec_length, at.overall.c);
        close(at.overall.expected_speed_up, expected);
    }
    let table = report.to_string();
    for needle in [
        "K = 1, 3",
        "temperature 0, SYNTHETIC acceptance A = 0.5\n",
        "\nK = 3 ",
        "\nbest K for A = 0.5: 3 (speed-up 2.50), SYNTHETIC\n",
        "\nbest K for A = 0.9: 1 (speed-up 3.00), SYNTHETIC\n",
        "not compared",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["temperatures"][1]["synthetic_acceptance"], 0.5);
    assert_eq!(json["temperatures"][1]["spec_length"], 3);
    let best = serde_json::json!({
        "temperature": 0.0, "drafter": 0, "synthetic_acceptance": 0.9, "spec_length": 1, "spec_topk": 1,
        "acceptance": "coupled", "speed_up": 3.0
    });
    assert_eq!(json["best"][1], best);
}

#[test]
fn several_lengths_have_a_table_each() {
    let pairs = [0.0, 1.0].map(|t| [faster(t, None, 1, 1.0), faster(t, None, 2, 1.5)]);
    let table = BenchReport::new(subject(), &pairs.concat()).to_string();
    for needle in [
        "temperature 0, K = 1\ncategory",
        "temperature 1, K = 2\ncategory",
        "\nbest K: 2 (speed-up 3.00)\n",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    assert!(!table.contains("SYNTHETIC"), "{table}");
}

#[test]
fn one_verified_length_has_neither_best_nor_synthetic_lines() {
    let report = BenchReport::new(subject(), &[twice_as_fast("qa", 0.0)]);
    let table = report.to_string();
    assert!(table.contains("temperature 0\ncategory"), "{table}");
    assert!(
        !table.contains("best K") && !table.contains("SYNTHETIC"),
        "{table}"
    );
    let json = serde_json::to_value(&report).unwrap();
    assert!(json.get("best").is_none(), "{json}");
    let at = &json["temperatures"][0];
    assert!(at.get("synthetic_acceptance").is_none(), "{json}");
}

#[test]
fn synthetic_texts_are_not_compared() {
    let run = |tokens: &[u32]| vec![sample(tokens, 1.0, SpecUsage::default(), Cost::default())];
    let way = BenchMode {
        synthetic_acceptance: Some(0.5),
        ..MODE
    };
    let changed = pair_of(way, "qa", 0.0, run(&[1, 2, 3]), run(&[1, 2, 4]));
    BenchReport::new(subject(), &[changed])
        .check_equal()
        .unwrap();
}
