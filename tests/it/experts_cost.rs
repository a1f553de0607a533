//! What steps are said to read of a model with experts.

use crate::architectures::{Fixture, fixtures};
use crate::common::server::Server;
use crate::common::tiny::open;
use crate::common::{assert_idle, chains, greedy, run};
use foretoken::engine::{EngineOptions, spawn};
use foretoken::model::{MixerSpec, ModelConfig, ModelSpec};
use foretoken::spec::{BudgetMode, NgramDrafter, SpeculativeRunner};
use serde_json::json;

/// The fixtures with experts, and what they compute.
fn with_experts() -> Vec<(Fixture, ModelSpec)> {
    let spec = |fixture: Fixture| {
        let spec = ModelConfig::from_json(&fixture.folder).unwrap().spec;
        Some((fixture, spec)).filter(|(_, spec)| per_row(spec) > 0)
    };
    fixtures().into_iter().filter_map(spec).collect()
}

/// The number of experts that a row reads.
fn per_row(spec: &ModelSpec) -> usize {
    let layers = spec.layers.iter().filter_map(|layer| layer.experts());
    layers.map(|experts| experts.per_token).sum()
}

#[test]
fn forwards_before_the_first_request_read_few_and_many_experts() {
    let (mut only_attention, mut more) = (0, 0);
    for (fixture, spec) in with_experts() {
        let target = open(&fixture.folder).unwrap();
        let drafter = Box::new(NgramDrafter::new(1, 3));
        let mode = BudgetMode::Adaptive;
        let mut runner = SpeculativeRunner::new(target, vec![drafter], mode, 16, 4).unwrap();
        let forwards = runner.calibrate(16).unwrap();
        assert_eq!(forwards[0].experts_read, per_row(&spec));
        let rows: Vec<usize> = forwards.iter().map(|one| one.rows).collect();
        assert_eq!(rows, [1, 2, 2, 4, 4, 6, 6, 8, 8, 16, 16]);
        let is_attention = |mixer| matches!(mixer, MixerSpec::Attention | MixerSpec::Latent(_));
        let layers = &spec.layers;
        let has_one_kind = layers
            .iter()
            .all(|layer| is_attention(layer.mixer) && !layer.sinks);
        for both in forwards[1..].chunks(2) {
            let [differ, alike] = [both[0].experts_read, both[1].experts_read];
            if has_one_kind {
                assert_eq!(alike, per_row(&spec), "{}", fixture.folder.display());
            }
            more += usize::from(differ > alike);
        }
        only_attention += usize::from(has_one_kind);
    }
    assert!(only_attention > 3 && more > 30, "{only_attention}, {more}");
}

/// And what it has read does not change a text.
#[test]
fn engines_count_the_experts_that_steps_read() {
    for (fixture, spec) in with_experts() {
        let tokens = fixture.greedy.len();
        let run = |spec_length| {
            let drafter = Box::new(NgramDrafter::new(1, 3));
            let options = EngineOptions {
                spec: chains(spec_length),
                calibrate: true,
                ..EngineOptions::default()
            };
            let target = open(&fixture.folder).unwrap();
            let engine = spawn(target, Some(drafter), 64, 4, options).unwrap();
            let text = run(&engine, greedy(&fixture.prompt, tokens)).tokens;
            assert_idle(&engine);
            (text, engine.stats().experts_read.get())
        };
        let (plain, read) = run(0);
        // A step reads as many for each token, and more for a prompt.
        assert!(read as usize >= plain.len() * per_row(&spec), "{read}");
        let (drafted, read) = run(4);
        assert!(read > 0);
        assert_eq!(plain, drafted, "{}", fixture.folder.display());
    }
}

#[tokio::test]
async fn metrics_have_the_experts_that_were_read() {
    let (fixture, spec) = with_experts().remove(0);
    let target = open(&fixture.folder).unwrap();
    let engine = spawn(target, None, 64, 4, EngineOptions::default()).unwrap();
    let server = Server::of(engine).await;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    server.json("/v1/completions", &body).await;
    server.idle().await;
    let metrics = server.get("/metrics").await.text().await.unwrap();
    let name = "foretoken:experts_read_total";
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {metrics}"));
    let (_, count) = line.rsplit_once(' ').unwrap();
    assert!(
        count.parse::<usize>().unwrap() >= 4 * per_row(&spec),
        "{line}"
    );
    server.stop().await.unwrap();
}
