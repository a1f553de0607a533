//! Defaults of sampling, seeds, and limits of thoughts.

use super::*;

#[test]
fn thoughts_are_not_limited_unless_asked_for() {
    let budget = |flags: &str| {
        accepted(&format!("--model m {flags}"))
            .http
            .reasoning_budget
    };
    assert_eq!(budget(""), -1);
    assert_eq!(budget("--reasoning-budget -1"), -1);
    assert_eq!(budget("--reasoning-budget 0"), 0);
    assert_eq!(budget("--reasoning-budget=512"), 512);
    refused_with("--model m --reasoning-budget -2", "-2");
}

#[test]
fn sampling_defaults_have_a_source() {
    let flags = |line: &str| accepted(&format!("--model m {line}")).generation;
    assert_eq!(flags("").generation_config, GenerationConfig::Auto);
    let ignored = flags("--generation-config vllm").generation_config;
    assert_eq!(ignored, GenerationConfig::Ignored);
    let path = flags("--generation-config some/folder").generation_config;
    assert_eq!(path, GenerationConfig::Path("some/folder".into()));
    let json = r#"{"temperature":0.6,"top_k":20.0}"#;
    let overridden = flags(&format!("--override-generation-config {json}"));
    let shown = overridden.override_generation_config.map(|d| d.to_string());
    assert_eq!(shown.as_deref(), Some("temperature 0.6, top_k 20"));
    for (json, needle) in [
        (
            r#"{"temprature":1}"#,
            r#"unknown name "temprature": expected a JSON object with temperature, top_p"#,
        ),
        (
            r#"{"temperature":3}"#,
            "temperature must be between 0 and 2",
        ),
        ("[1]", "expected a JSON object"),
        ("0.5", "expected a JSON object"),
    ] {
        refused_with(
            &format!("--model m --override-generation-config {json}"),
            needle,
        );
    }
    let file =
        "override-generation-config = '{\"temperature\": 0.6}'\ngeneration_config = 'vllm'\n";
    let config = with_file(file, "--model m").expect("accepted").generation;
    assert_eq!(config.generation_config, GenerationConfig::Ignored);
}

#[test]
fn a_seed_of_minus_one_is_random() {
    let seed = |line: &str| accepted(line).load.seed;
    assert_eq!((seed(""), seed("--seed 7")), (0, 7));
    assert_eq!(seed("--seed 18446744073709551615"), u64::MAX);
    for line in ["--seed -1", "--seed=-1"] {
        assert_ne!(seed(line), seed(line), "{line}");
    }
    let said = "--seed <SEED>': must be a whole number from 0 to 2^64 - 1, or -1 for a random seed";
    for line in ["--seed -2", "--seed x", "--seed=1.5"] {
        refused_with(line, said);
    }
}
