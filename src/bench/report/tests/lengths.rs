//! Several draft lengths, and synthetic acceptance.

use super::*;

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
    assert_has(
        &table,
        &[
            "K = 1, 3",
            "temperature 0, SYNTHETIC acceptance A = 0.5\n",
            "\nK = 3 ",
            "\nbest K for A = 0.5: 3 (speed-up 2.50), SYNTHETIC\n",
            "\nbest K for A = 0.9: 1 (speed-up 3.00), SYNTHETIC\n",
            "not compared",
        ],
    );
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
    assert_has(
        &table,
        &[
            "temperature 0, K = 1\ncategory",
            "temperature 1, K = 2\ncategory",
            "\nbest K: 2 (speed-up 3.00)\n",
        ],
    );
    assert!(!table.contains("SYNTHETIC"), "{table}");
}

#[test]
fn one_verified_length_has_neither_best_nor_synthetic_lines() {
    let report = BenchReport::new(subject(), &[twice_as_fast("qa", 0.0)]);
    let table = report.to_string();
    assert_has(&table, &["temperature 0\ncategory"]);
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
