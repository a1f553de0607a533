//! The examples, run as the programs that they are.

use crate::bench::Models;
use foretoken::engine::{EngineHandle, EngineThread, Series, Stats};
use foretoken::error::Error;
use foretoken::http::AppState;
use foretoken::model::Model;
use foretoken::text::Text;
use foretoken::{Foretoken, kernels};
use serde_json::Value;
use std::fmt::Debug;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[path = "../../examples/embed.rs"]
#[allow(dead_code, reason = "its main function")]
mod embed;
#[path = "../../examples/own_drafter.rs"]
#[allow(dead_code, reason = "its main function")]
mod own_drafter;
#[path = "../../examples/research/main.rs"]
#[allow(dead_code, reason = "its main function")]
mod research;
#[path = "../../examples/router.rs"]
#[allow(dead_code, reason = "its main function")]
mod router;

#[test]
fn an_engine_is_embedded() {
    let (text, _) = embed::complete("foretoken-demo", "Once upon a time").unwrap();
    assert!(text.split_whitespace().count() > 20, "{text}");
    let error = embed::complete("no-such-folder/model.gguf", "a").unwrap_err();
    assert!(
        error.to_string().contains("no-such-folder/model.gguf"),
        "{error}"
    );
}

/// Another program keeps them in types of its own, for all of its threads.
#[test]
fn what_is_embedded_fits_types_of_others() {
    fn is_kept<T: Debug + Send + Sync + 'static>() {}
    fn is_error<T: std::error::Error + Clone + Send + Sync + 'static>() {}
    is_kept::<EngineHandle>();
    is_kept::<EngineThread>();
    is_kept::<Series>();
    is_kept::<AppState>();
    is_kept::<Text>();
    is_error::<Error>();
    // Of the versions that the library has.
    let _: fn(AppState) -> foretoken::http::axum::Router = foretoken::http::router;
    let _: fn(&Stats) -> &foretoken::prometheus::Registry = |stats| &stats.registry;
    let _: fn(&dyn Model) -> &foretoken::candle_core::Device = |model| model.device();
}

/// The threads are those of the process, which has some by now.
#[test]
fn other_threads_than_those_of_the_process_are_refused() {
    let threads = kernels::threads() + 1;
    let model = Foretoken::load("foretoken-demo").flags(["--threads".into(), threads.to_string()]);
    let said = model.start().unwrap_err().to_string();
    assert!(said.contains(&format!("--threads {threads} ")), "{said}");
}

/// The text is the one that plain decoding gives.
#[test]
fn a_drafter_of_ones_own_changes_no_text() {
    let prompt = "Once upon a time";
    let (text, _) = own_drafter::complete(prompt).unwrap();
    let (plain, _) = embed::complete("foretoken-demo", prompt).unwrap();
    assert!(text.starts_with(&plain), "{text} is not {plain}");
    let (_, accepted) = own_drafter::complete("a b a b a b a b a b a b a b a b").unwrap();
    assert!(accepted > 0);
}

#[tokio::test]
async fn the_api_is_a_part_of_another_app() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let served = tokio::spawn(router::serve(listener, async {
        stopped.await.ok();
    }));
    let get = |path: &str| reqwest::get(format!("http://{address}{path}"));
    let own = get("/").await.unwrap().text().await.unwrap();
    assert_eq!(own, "an app of your own");
    let models = get("/llm/v1/models").await.unwrap().text().await.unwrap();
    assert!(models.contains("foretoken-demo"), "{models}");
    stop.send(()).unwrap();
    served.await.unwrap().unwrap();
}

/// The tables and the JSON report of the example `research`, with `flags` of `bench` after `own` ones.
#[track_caller]
fn study(own: &[&str], flags: &str) -> (String, Value) {
    let models = Models::one();
    let line = models.line(flags);
    let bench = line.split_whitespace().skip(1);
    let args = own.iter().copied().chain(bench).map(str::to_owned);
    let study = research::Study::measure(args).unwrap();
    (study.to_string(), study.json)
}

#[test]
fn theory_stands_beside_what_was_measured() {
    let (table, report) = study(
        &[],
        "--draft-model @target --spec-length 3 --spec-budget fixed --repeat 3 \
         --random-prompts 2 --prompt-tokens 20 --max-tokens 200",
    );
    let greedy = &report["temperatures"][0]["overall"];
    // The draft has the target's operations, and each of its three tokens stands.
    assert_eq!(greedy["draft_operations"], 1.0, "{report}");
    let theorem = greedy["expected_operations"].as_f64().unwrap();
    assert!((theorem - 7.0 / 4.0).abs() < 1e-9, "{report}");
    let measured = greedy["operations"].as_f64().unwrap();
    assert!((1.6..1.9).contains(&measured), "{report}");
    assert_eq!(greedy["sequoia"]["levels"], serde_json::json!([1, 1, 1]));
    assert_eq!(greedy["sequoia"]["tokens"], 4.0);
    assert!(table.contains("1.75 by Theorem 3.11") && table.contains("levels of 1, 1, 1"));
    let one = &report["temperatures"][0]["categories"][0];
    assert_eq!(one["sequoia"], greedy["sequoia"], "{report}");
}

#[test]
fn both_files_of_a_study_are_written_or_refused_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let models = Models::one();
    let measure = |json: &str, csv: &str| {
        let flags = format!("--json {json} --csv {csv} --temperatures 0");
        let line = models.line(&format!(
            "{flags} --random-prompts 2 --prompt-tokens 8 --max-tokens 4"
        ));
        let args = line.split_whitespace().skip(1).map(str::to_owned);
        research::Study::measure(args)
    };
    let (json, csv) = (at("a.json"), at("a.csv"));
    measure(&json, &csv).unwrap().publish().unwrap();
    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(report["subject"]["row_penalty"], 0.0, "{report}");
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert!(rows.lines().count() > 2, "{rows}");
    let error = measure(&at("none/a.json"), &csv).err().unwrap().to_string();
    assert!(error.contains("a.json: "), "{error}");
}

#[test]
fn a_cost_of_rows_that_is_none_is_refused() {
    for number in ["-1", "nan", "1e300", "11"] {
        let args = [
            format!("--row-penalty={number}"),
            "--random-prompts".into(),
            "1".into(),
        ];
        let refused = research::Study::measure(args).err().map(|e| e.to_string());
        let said = refused.unwrap_or_default();
        assert!(said.contains("a number between 0 and 10"), "{said}");
    }
}

/// With the target itself as draft, both rules accept every token, and the fourth of a chain costs as
/// many rows as a tree of two siblings on two levels.
#[test]
fn rules_trees_and_dear_rows_are_compared() {
    let (table, report) = study(
        &["--row-penalty", "8"],
        "--draft-model @target --spec-length 4 --spec-nodes 4 --spec-topk 2 --spec-budget fixed \
         --acceptances coupled,rejection --spec-topks 1,2 \
         --random-prompts 2 --prompt-tokens 20 --max-tokens 24",
    );
    for needle in [
        "each further row costs 8 one-row steps more",
        "temperature 1, rejection, tree 2",
        "temperature 0, all modes",
        "coupled, chain",
    ] {
        assert!(table.contains(needle), "{needle} is missing in {table}");
    }
    let rules = report["rules"].as_array().unwrap();
    assert_eq!(rules.len(), 4, "two temperatures, two shapes: {report}");
    let chains = rules.iter().filter(|rules| rules["spec_topk"] == 1);
    for rules in chains {
        assert_eq!(rules["coupled_over_rejection"], 1.0, "{rules}");
    }
    // A step of five rows costs 32 one-row steps more, however busy the machine is.
    let chain = &report["temperatures"][0]["overall"];
    assert!(chain["verify_cost"].as_f64() > Some(8.0), "{chain}");
}
