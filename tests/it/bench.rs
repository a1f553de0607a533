//! `foretoken bench` over models with dummy weights.

#[cfg(target_os = "linux")]
use crate::common::process::full_disk;
use crate::common::process::{foretoken, refusal, stdout_of};
use crate::common::{assert_has, read_json};
use serde_json::Value;
use std::process::Stdio;
use tempfile::TempDir;

/// The config of a model that is small enough for dummy weights, without a tokenizer.
pub const TINY: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false
}"#;

/// The flags of the engine.
const SERVE: &str = "--model @target --load-format dummy --num-blocks 64";

/// A folder with configs of models.
pub struct Models(TempDir);

impl Models {
    pub fn new(configs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, config) in configs {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("config.json"), config).unwrap();
        }
        Self(folder)
    }

    pub fn one() -> Self {
        Self::new(&[("target", TINY)])
    }

    /// The command line of `bench FLAGS` over the model `target`; `@name` is a file of the folder.
    pub fn line(&self, flags: &str) -> String {
        let folder = format!("{}/", self.0.path().display());
        let line = format!("bench {SERVE} {flags}");
        line.replace('@', &folder)
    }

    /// The tables and the JSON report of that command.
    #[track_caller]
    pub fn bench(&self, flags: &str) -> (String, Value) {
        let line = self.line(&format!("{flags} --json @out.json"));
        let output = foretoken().args(line.split_whitespace()).output().unwrap();
        (
            stdout_of(&output),
            read_json(self.0.path().join("out.json")),
        )
    }

    /// The error of that command, which must be refused.
    #[track_caller]
    pub fn refused(&self, flags: &str) -> String {
        refused(&self.line(flags))
    }
}

/// The error of a command that must be refused.
#[track_caller]
fn refused(line: &str) -> String {
    refusal(&foretoken().args(line.split_whitespace()).output().unwrap())
}

#[test]
fn dummy_weights_are_measured() {
    let models = Models::one();
    // Long enough for a step to be seen after the first token on a busy machine.
    let (table, report) = models.bench(
        "--draft-model @target --spec-length 3 --spec-budget fixed --repeat 3 \
         --random-prompts 2 --prompt-tokens 20 --max-tokens 200",
    );
    assert_has(&table, &["temperature 1", "overall"]);
    let greedy = &report["temperatures"][0]["overall"];
    assert_eq!(greedy["prompts"], 2, "{report}");
    // Target and draft model are the same, so every greedy draft is right.
    assert_eq!(greedy["alpha"], 1.0, "{report}");
    assert!(greedy["c"].as_f64().is_some_and(|c| c > 0.0), "{report}");
    let verdict = |line: &&str| line.starts_with("temperature 0: ") && line.ends_with("K up to 3");
    let verdict = table.lines().find(verdict).expect("a verdict in words");
    let rate = format!(": {:.2} x with ", greedy["speed_up"].as_f64().unwrap());
    assert!(verdict.contains(&rate), "{verdict}");

    let served = refused(&models.line("").replace("bench ", "serve "));
    assert!(served.contains("tokenizer.json"), "{served}");
}

/// Tables that are warm do not learn an answer in one repeat for the next.
#[cfg(feature = "embedded-model")]
#[test]
fn warm_tables_do_not_know_the_repeats() {
    let folder = tempfile::tempdir().unwrap();
    let [json, warm] = ["report.json", "warm.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&warm, r#"{"prompt": "Why is the sky blue?"}"#).unwrap();
    let flags = "bench foretoken-demo --temperatures 0 --max-tokens 40 --limit-per-category 1 --num-blocks 64 \
                 --drafters tables --spec-budget fixed";
    let bench = |more: &str| {
        let mut bench = foretoken();
        bench.args(flags.split_whitespace().chain(more.split_whitespace()));
        bench.arg("--warm").arg(&warm).arg("--json").arg(&json);
        bench.output().unwrap()
    };
    let tokens_per_step = |repeat: &str| {
        stdout_of(&bench(&format!("--repeat {repeat}")));
        let report = read_json(&json);
        let overall = &report["temperatures"][0]["overall"];
        overall["tokens_per_step"].as_f64().unwrap()
    };
    let (once, thrice) = (tokens_per_step("1"), tokens_per_step("3"));
    assert!(thrice < 1.2 * once, "{once} {thrice}");

    // Seven prompts do not fill a group, and would come again.
    let said = refusal(&bench("--streams 1 --repeat 2"));
    assert!(said.contains("needs at least 8 prompts, not 7"), "{said}");
}

/// With a tokenizer, `bench` needs no prompts: the built-in ones are measured, and each has a row in the JSON report and
/// in the CSV file, which the script draws.
#[cfg(feature = "embedded-model")]
#[test]
fn built_in_prompts_are_measured_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let [json, csv] = ["report.json", "report.csv"].map(|name| folder.path().join(name));
    let flags = "bench foretoken-demo --temperatures 0 --max-tokens 12 --limit-per-category 1 --num-blocks 64 \
                 --drafters auto,ngram,none --api-key=secret";
    let mut bench = foretoken();
    bench.args(flags.split_whitespace());
    bench.arg("--json").arg(&json).arg("--csv").arg(&csv);
    let table = stdout_of(&bench.output().unwrap());
    assert!(table.contains("95% intervals over prompts"), "{table}");
    let report = read_json(&json);
    let subject = &report["subject"];
    assert_eq!(subject["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(subject["flags"][0], "foretoken-demo");
    assert!(!report.to_string().contains("secret"), "{subject}");
    let file = &subject["files"][0];
    let size = std::fs::metadata("models/default/foretoken-demo.Q5_1.gguf").unwrap();
    assert_eq!(file["bytes"], size.len());
    assert_eq!(file["sha256"].as_str().map(str::len), Some(64), "{file}");
    let modes = report["temperatures"].as_array().unwrap();
    assert_eq!(modes.len(), 3, "{report}");
    for mode in modes {
        let prompts = mode["prompts"].as_array().unwrap();
        assert_eq!(prompts.len(), 7);
        assert_eq!(mode["categories"].as_array().unwrap().len(), 7);
        let interval = &mode["overall"]["interval"];
        let speed_up = mode["overall"]["speed_up"].as_f64().unwrap();
        let [low, high] = ["low", "high"].map(|end| interval[end].as_f64().unwrap());
        assert!(low <= speed_up && speed_up <= high, "{mode}");
        let mut each = prompts.iter();
        assert!(each.all(|prompt| prompt["prompt_tokens"].as_u64() > Some(20)));
    }
    // Plain decoding again accepts nothing, and so is no gain, whatever the clock says.
    let control = &modes[2]["overall"];
    assert_eq!(
        (&modes[2]["spec_length"], &control["drafted"]),
        (&0.into(), &0.into())
    );
    let verdict = control["verdict"].as_str().unwrap();
    assert!(
        ["nothing_accepted", "costs"].contains(&verdict),
        "{control}"
    );
    assert_eq!(report["drafters"][2]["is_recommended"], false);
    let rows = std::fs::read_to_string(&csv).unwrap();
    assert_eq!(rows.lines().count(), 1 + 3 * 7, "{rows}");
    assert!(rows.contains("0,none,0,1,coupled,,"), "{rows}");

    let drawn = std::process::Command::new("python3")
        .arg("scripts/plot.py")
        .args([&json, &json])
        .output()
        .expect("python3, which the gate needs, too");
    stdout_of(&drawn);
    let read = |end: &str| std::fs::read_to_string(json.with_extension(end)).unwrap();
    let (svg, tex) = (read("svg"), read("tex"));
    // Two reports of three modes over seven categories and all prompts.
    let bars = svg.matches("class=\"bar\"").count();
    assert!((2 * 3..=2 * 3 * 8).contains(&bars), "{svg}");
    assert_has(&svg, &["class=\"interval\"", "summarization"]);
    assert_has(&tex, &["\\begin{tabular}", "overall"]);
}

/// Drafts follow what a line says that the answer is expected to be.
#[cfg(feature = "embedded-model")]
#[test]
fn an_answer_that_was_predicted_is_drafted() {
    let folder = tempfile::tempdir().unwrap();
    let [prompts, corpus, json] =
        ["prompts", "corpus", "report"].map(|name| folder.path().join(name));
    let mut line =
        serde_json::json!({"prompt": "Write a short story about a lonely owl in the snow."});
    let run = |line: &Value, flags: &str, to: &std::path::Path| {
        std::fs::write(&prompts, line.to_string()).unwrap();
        let mut command = foretoken();
        command.args(flags.split_whitespace()).arg(to);
        stdout_of(&command.arg("--prompts").arg(&prompts).output().unwrap());
        read_json(to)
    };
    let generate =
        "generate --model foretoken-demo --num-blocks 64 --temperature 0 --max-tokens 40 --out";
    let answer = run(&line, generate, &corpus)["text"].clone();
    let bench = "bench foretoken-demo --drafters tables --spec-budget fixed --temperatures 0 --max-tokens 40 \
                 --num-blocks 64 --json";
    let tokens_a_step = |line: &Value| {
        let report = run(line, bench, &json);
        report["temperatures"][0]["overall"]["tokens_per_step"]
            .as_f64()
            .unwrap()
    };
    let without = tokens_a_step(&line);
    line["prediction"] = answer;
    let with = tokens_a_step(&line);
    assert!(
        with > 3.0 && with > 1.5 * without,
        "{with}, without a prediction {without}"
    );
}

/// A line of a prompts file that is none says what a line must hold.
#[cfg(feature = "embedded-model")]
#[test]
fn a_line_of_prompts_says_what_it_must_hold() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    for (line, needle) in [
        ("Why is the sky blue?", "line 2: expected value"),
        (r#"{"text": "Why?"}"#, "line 2: it has no text to answer"),
    ] {
        std::fs::write(&file, format!("{{\"prompt\": \"a\"}}\n{line}\n")).unwrap();
        let error = refused(&format!("bench --prompts {}", file.display()));
        assert!(error.contains(needle), "{error}");
        assert!(
            error.contains(r#"{"id": "1", "category": "qa", "prompt": "#),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let error = Models::one().refused("");
    assert_has(&error, &["built-in prompts need a tokenizer"]);
}

/// A draft model of PARD guesses a block in one forward. As its weights are the target's, the first token of each block
/// is right; those at masks are not.
#[test]
fn a_draft_model_with_a_mask_token_drafts_blocks() {
    let pard = r#""pard_token": 95, "spd_type": "pard", "rope_theta""#;
    let pard = TINY.replace(r#""rope_theta""#, pard);
    let models = Models::new(&[("target", TINY), ("draft", &pard)]);
    let (_, report) = models.bench(
        "--draft-model @draft --spec-length 3 --spec-budget fixed --temperatures 0 \
         --random-prompts 2 --prompt-tokens 20 --max-tokens 60",
    );
    let greedy = &report["temperatures"][0]["overall"];
    let alpha = greedy["alpha"].as_f64().unwrap();
    assert!((0.45..0.9).contains(&alpha), "{report}");
    for (key, value, needle) in [
        (
            "pard_token",
            "96",
            "pard_token 96 must be an id below vocab_size 96",
        ),
        ("spd_type", r#""pard2""#, "only pard is"),
    ] {
        let wrong = format!(r#""{key}": {value}, "rope_theta""#);
        let wrong = TINY.replace(r#""rope_theta""#, &wrong);
        let models = Models::new(&[("target", TINY), ("draft", &wrong)]);
        let refused = models.refused("--draft-model @draft --random-prompts 1");
        assert!(refused.contains(needle), "{refused}");
    }
}

/// A table that cannot be written is an error, and the report is written all the same; a reader that has
/// gone is none.
#[test]
fn a_table_that_cannot_be_written() {
    let models = Models::one();
    let json = models.0.path().join("report.json");
    let line = models.line("--random-prompts 1 --max-tokens 2 --json");
    let run = |stdout: Stdio| {
        let mut bench = foretoken();
        bench.args(line.split_whitespace()).arg(&json);
        let output = bench.stdout(stdout).stderr(Stdio::piped()).output();
        let output = output.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let report = read_json(&json);
        assert!(report["temperatures"].is_array(), "{report}");
        std::fs::remove_file(&json).unwrap();
        (output.status.code(), said)
    };
    #[cfg(target_os = "linux")]
    {
        let (code, said) = run(full_disk().into());
        assert_eq!(code, Some(2), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with("error: cannot write to stdout"), "{said}");
    }
    let (reader, table) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(run(table.into()), (Some(0), String::new()));
}

/// A run of hours is not lost to a folder that does not exist, and its table not to a disk that is full by then.
#[test]
fn files_of_a_report_are_opened_before_it_is_measured() {
    let models = Models::one();
    let run = |flags: &str| {
        let line = models.line(&format!("--random-prompts 1 --max-tokens 2 {flags}"));
        let output = foretoken().args(line.split_whitespace()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}");
        [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap())
    };
    for flag in ["--json", "--csv"] {
        let [measured, error] = run(&format!("{flag} @none/report"));
        assert!(error.contains("none/report: "), "{error}");
        assert_eq!(measured, "");
    }
    #[cfg(target_os = "linux")]
    {
        let [tables, error] = run("--json /dev/full");
        assert!(error.contains("/dev/full: No space left"), "{error}");
        assert!(tables.contains("speed-up"), "{tables}");
    }
}

/// The target itself as a draft model is always right, and tables are not: each is measured with its own
/// estimates.
#[test]
fn drafters_are_compared_in_one_run() {
    let models = Models::one();
    let names = "tables,ngram,model,model+tables,self,@target+tables";
    let flags = "--draft-model @target --spec-length 3 --spec-budget fixed --temperatures 0 \
                 --random-prompts 2 --prompt-tokens 20 --max-tokens 60";
    let (table, report) = models.bench(&format!("{flags} --drafters {names}"));
    let modes = report["temperatures"].as_array().unwrap();
    let alpha = |index: usize| modes[index]["overall"]["alpha"].as_f64().unwrap_or(0.0);
    assert_eq!(modes.len(), 6, "{report}");
    for (index, mode) in modes.iter().enumerate() {
        assert_eq!(mode["drafter"], index);
        assert_eq!(mode["differing"].as_array().unwrap().len(), 0);
    }
    assert_eq!(alpha(2), 1.0, "{report}");
    assert!(alpha(3) > 0.9 && alpha(5) > 0.9, "{report}");
    assert!(alpha(0) < 0.9 && alpha(1) < 0.9, "{report}");
    let drafters = report["drafters"].as_array().unwrap();
    let found = drafters.iter().map(|one| one["drafter"].as_str().unwrap());
    let found: Vec<&str> = found.collect();
    let expected = ["tables", "ngram", "model", "model+tables", "self"];
    assert_eq!(found[..5], expected);
    assert_has(&table, &["temperature 0, speed-up by drafter", "\ntake "]);
    // With many requests at a time, too.
    let (table, report) = models.bench(&format!("{flags} --drafters tables,model --streams 2"));
    let loads = report["loads"].as_array().unwrap();
    assert_eq!(loads.len(), 2, "{report}");
    assert_eq!(loads[1]["alpha"], 1.0, "{report}");
    assert!(table.contains("with model, K up to 3"), "{table}");
    for (names, what) in [
        ("tables,tables", "tables twice"),
        ("ngram+tables", "only the drafts of a model"),
        ("head", "add --draft-model"),
        ("tables,", "an empty name"),
    ] {
        let error = models.refused(&format!("--random-prompts 1 --drafters {names}"));
        assert!(
            error.contains("--drafters") && error.contains(what),
            "{error}"
        );
    }
}

#[test]
fn many_requests_at_a_time_are_measured() {
    let models = Models::one();
    let (table, report) = models.bench(
        "--streams 1,3 --random-prompts 4 --prompt-tokens 20 --max-tokens 12 --max-num-seqs 4",
    );
    assert!(
        table.contains("streams") && !table.contains("overall"),
        "{table}"
    );
    let loads = report["loads"].as_array().unwrap();
    let ran = loads
        .iter()
        .map(|load| (load["temperature"].as_f64(), load["streams"].as_u64()));
    let expected = [(0.0, 1), (0.0, 3), (1.0, 1), (1.0, 3)].map(|(t, n)| (Some(t), Some(n)));
    assert!(ran.eq(expected), "{report}");
    for load in loads {
        // A group has at least eight requests, of 7 to 12 tokens.
        assert_eq!(load["requests"], 8, "{load}");
        let tokens = load["tokens"].as_u64().unwrap();
        let counted = match load["streams"].as_u64() {
            Some(1) => 80..=80,
            // Without what comes when a stream has nothing more to do, unless all end together.
            _ => 50..=80,
        };
        assert!(counted.contains(&tokens), "{load}");
        assert!(load["speed_up"].as_f64() > Some(0.0), "{load}");
    }
    let too_many = models.refused("--streams 1,5 --random-prompts 4 --max-num-seqs 4");
    assert_has(
        &too_many,
        &["--streams must be between 1 and --max-num-seqs, which is 4: one is 5"],
    );
    let warm = models.refused("--random-prompts 4 --warm @target/config.json");
    assert!(warm.contains("--warm need a tokenizer"), "{warm}");
}

/// Unrelated weights, measured at the acceptance rate of a related pair.
#[test]
fn acceptance_by_chance() {
    let shallow = TINY.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    let models = Models::new(&[("target", TINY), ("draft", &shallow)]);
    let (table, report) = models.bench(
        "--draft-model @draft --spec-length 4 --spec-lengths 1,4 --synthetic-acceptance 0.3,0.9 \
         --spec-budget fixed --spec-topk 1 \
         --random-prompts 4 --prompt-tokens 20 --max-tokens 200 --temperatures 0",
    );
    for needle in [
        "SYNTHETIC acceptance A = 0.3",
        "best K for A = 0.9: ",
        "not compared",
    ] {
        assert!(table.contains(needle), "{table}");
    }
    let mut rows = report["temperatures"].as_array().unwrap().iter();
    for (rate, k) in [(0.3, 1), (0.3, 4), (0.9, 1), (0.9, 4)] {
        let row = rows.next().unwrap();
        assert_eq!(row["synthetic_acceptance"], rate);
        assert_eq!(row["spec_length"], k);
        let figure = |name: &str| row["overall"][name].as_f64().unwrap();
        assert!((figure("alpha") - rate).abs() < 0.06, "{row}");
        let expected: f64 = (0..=k).map(|i| rate.powi(i)).sum();
        let mean = figure("mean_accepted_length");
        assert!((mean / expected - 1.0).abs() < 0.1, "{row}");
        // Texts have their full length; the first token counts toward the prompt.
        assert_eq!(row["overall"]["tokens"], 4 * 199, "{row}");
    }
}
