mod lengths;
mod verdicts;

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

#[track_caller]
fn assert_has(table: &str, needles: &[&str]) {
    for needle in needles {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
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
    assert_has(
        &table,
        &["some CPU", "temperature 1", "overall", "math", "2.00"],
    );
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
    assert_has(
        &table,
        &[
            "temperature 1, coupled, tree 4\ncategory",
            "temperature 1, all modes\nmode",
            "\nrejection, chain ",
            "K = 2, siblings = 1: coupled 0.333, rejection 0.667, ratio 0.500",
        ],
    );
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
    assert_has(
        &table,
        &[
            "temperature 0\nstreams",
            "\n      1 ",
            "\n     16 ",
            "prompts included",
        ],
    );
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
