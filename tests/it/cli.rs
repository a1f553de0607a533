//! The binary: one readable line for every user error, and one run from flags to SIGTERM.

use crate::common::process::{Server, foretoken, refusal, stdout_of};
#[cfg(target_os = "linux")]
use crate::common::process::{full_disk, refusal_line};
use crate::common::rig::smollm2_path;
use crate::common::tiny_folder::{byte_level, tiny_folder};
use crate::common::{assert_has, sample};
use std::io::{BufRead, BufReader, PipeReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;
use std::time::Duration;
use tempfile::TempDir;

fn run(line: &str) -> Output {
    foretoken().args(line.split_whitespace()).output().unwrap()
}

/// Runs `line`, which must be refused, and returns its one line on stderr.
#[track_caller]
fn refused(line: &str) -> String {
    let stderr = refusal(&run(line));
    // Loading may have been logged before; the error is one line.
    let errors: Vec<_> = stderr.lines().filter(|l| !l.contains(" INFO ")).collect();
    assert_eq!(errors.len(), 1, "`{line}`: {stderr}");
    assert!(errors[0].starts_with("error: "), "`{line}`: {stderr}");
    assert!(!stderr.contains(".rs:"), "no backtrace, please: {stderr}");
    errors[0].to_owned()
}

#[track_caller]
fn refused_with(line: &str, needle: &str) {
    let error = refused(line);
    assert!(error.contains(needle), "`{line}`: {error}");
}

#[test]
fn help_and_version_are_no_errors() {
    let help = stdout_of(&run("--help"));
    assert!(help.contains("--speculative-decoding"), "{help}");
    let version = stdout_of(&run("--version"));
    let wanted = concat!("foretoken ", env!("FORETOKEN_VERSION"));
    assert_eq!(version.trim_end(), wanted);
    let help = stdout_of(&run("bench --help"));
    assert!(help.contains("--temperatures"), "{help}");
}

/// The few flags of a chat come before those of serving.
#[test]
fn the_help_of_chat_begins_with_its_own_flags() {
    let text = String::from_utf8(run("chat -h").stdout).unwrap();
    let at = |flag: &str| text.find(flag).unwrap_or_else(|| panic!("{flag}: {text}"));
    for own in ["--system", "--temperature", "--max-tokens"] {
        assert!(at(own) < at("-m, --model"), "{text}");
    }
    let own = text.split_once("\nChat:\n").unwrap().1;
    let own = own.split("\n\n").next().unwrap();
    assert_eq!(own.lines().count(), 3, "{text}");
    for common in ["[MODEL]", "--config"] {
        assert!(at(common) < at("\nChat:"), "{text}");
    }
}

/// Only Linux has systemd.
#[cfg(target_os = "linux")]
#[test]
fn a_service_of_the_user_is_written_and_started_only_if_asked() {
    let folder = tempfile::tempdir().unwrap();
    // A systemctl that tells what it is asked.
    let (bin, asked) = (folder.path().join("bin"), folder.path().join("asked"));
    std::fs::create_dir(&bin).unwrap();
    let script = format!("#!/bin/sh\necho \"$@\" >> '{}'\n", asked.display());
    std::fs::write(bin.join("systemctl"), script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(bin.join("systemctl"), mode).unwrap();
    let install = |args: &str| {
        let path = format!("{}:/usr/bin:/bin", bin.display());
        let output = foretoken()
            .args(["service", "install"])
            .args(args.split_whitespace())
            .env("XDG_CONFIG_HOME", folder.path())
            .env("PATH", path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let said = install("o/m");
    assert!(said.contains("systemctl --user enable foretoken"), "{said}");
    assert!(!asked.exists());
    let unit = folder.path().join("systemd/user/foretoken.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let config = folder.path().join("foretoken/foretoken.toml");
    assert!(
        unit.contains(&format!("serve --config \"{}\"", config.display())),
        "{unit}"
    );
    assert!(
        std::fs::read_to_string(config)
            .unwrap()
            .contains("model = \"o/m\"")
    );
    install("--now");
    let asked = std::fs::read_to_string(asked).unwrap();
    let expected = "--user daemon-reload\n--user enable foretoken\n--user restart foretoken\n";
    assert_eq!(asked, expected);
    // Another file is written, too, if it is missing.
    let own = folder.path().join("own/f.toml");
    let said = install(&format!("o/other --config {}", own.display()));
    assert_has(&said, &["own/f.toml, with the model o/other"]);
    let own = std::fs::read_to_string(own).unwrap();
    assert!(own.contains("model = \"o/other\""), "{own}");
}

/// Further ones are those of the configuration's own tests.
#[test]
fn wrong_flags() {
    if cfg!(not(feature = "otel")) {
        let error = refused("--otlp-traces-endpoint http://localhost:4318");
        let names = |name| error.contains(name);
        assert!(
            names("--otlp-traces-endpoint") && names("--features otel"),
            "{error}"
        );
    }
    if cfg!(not(feature = "train")) {
        refused_with("distill --model x", "--features train");
    }
    refused_with("--model x --device gpu", "gpu");
    refused_with("--config no/such/file.toml", "no/such/file.toml");
    refused_with("convert --model ./none --out x.gguf", "none");
    // Told before the model is looked for.
    refused_with(
        "convert --model ./none --out no/folder/x.gguf",
        "no/folder/x.gguf: ",
    );
    refused_with(
        "convert --model ./none --out tests",
        "tests: it is a folder",
    );
}

#[test]
fn wrong_models() {
    refused_with("--model ./no/such/model.gguf", "no/such/model.gguf");
    refused_with("--model tests/no/model.gguf", "does not exist");
    refused_with("--model ./no-such-folder", "no-such-folder");
    // Names of the list have no owner.
    refused_with("--model qwen3:5b", "near it are qwen3:");
    refused_with("check lama3.2", "llama3.2:3b");
    refused_with("chat zzzzz", "the list of models has no such name");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.gguf");
    std::fs::write(&path, "no GGUF").unwrap();
    refused_with(&format!("--model {}", path.display()), "broken.gguf");
    let empty = tempfile::tempdir().unwrap();
    let name = empty.path().display().to_string();
    refused_with(&format!("--model {name}"), &name);
    // The architecture is told first, then the tokenizer.
    let config = empty.path().join("config.json");
    let unknown = r#"{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}"#;
    std::fs::write(&config, unknown).unwrap();
    refused_with(&format!("--model {name}"), "NoSuchForCausalLM");
    std::fs::copy("configs/llama-3.2-1b/config.json", &config).unwrap();
    refused_with(&format!("--model {name}"), "there is no tokenizer.json");
}

#[test]
fn what_is_wrong_beside_the_model_is_told_before_a_long_load() {
    let model = smollm2_path();
    for (flags, needle) in [
        ("--draft-model no-such-draft", "'no-such-draft' is neither"),
        ("--draft-model README.md", "'README.md' is neither"),
        (
            "--generation-config no/such",
            "--generation-config no/such: ",
        ),
        ("--lora-modules a=no/such", "a: no/such is no folder"),
        ("--max-model-len 8193", "which is 8192 tokens"),
    ] {
        let output = run(&format!("--model {} --port 0 {flags}", model.display()));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(needle), "`{flags}`: {said}");
        assert!(!said.contains("loaded in"), "`{flags}`: {said}");
    }
    for line in [
        "bench --model ./none --prompts no/file",
        "bench --model ./none --warm no/file",
        "generate --model ./none --prompts no/file --out out",
        "run-batch --model ./none -i no/file -o out",
    ] {
        refused_with(line, "error: no/file: ");
    }
    let line = "generate --model ./none --prompts README.md --out no/folder/out";
    refused_with(line, "error: no/folder: ");
}

/// The file is at fault for its logits.
#[test]
fn a_model_whose_rope_has_no_angles() {
    let mut bytes = std::fs::read(smollm2_path()).unwrap();
    let key = b"rope.freq_base";
    let at = bytes.windows(key.len()).position(|found| found == key);
    // After the key come its type, of 4 bytes, and the value.
    let value = at.unwrap() + key.len() + 4;
    bytes[value..value + 4].copy_from_slice(&1e-44_f32.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    let (model, prompts) = (folder.path().join("m.gguf"), folder.path().join("p.jsonl"));
    std::fs::write(&model, bytes).unwrap();
    std::fs::write(&prompts, r#"{"prompt": "Hello"}"#).unwrap();
    let (model, prompts) = (model.display(), prompts.display());
    let error = refused(&format!(
        "generate --model {model} --prompts {prompts} --out {prompts}.out"
    ));
    assert_has(&error, &["m.gguf", "rope_theta"]);
}

#[test]
fn too_little_memory_and_a_taken_port() {
    let (_folder, model) = tiny();
    refused_with(
        &format!("{model} --kv-cache-memory 1KiB"),
        "raise --kv-cache-memory",
    );
    refused_with(
        &format!("{model} --num-blocks 4 --max-model-len 100"),
        "64 tokens and --max-model-len is 100",
    );
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    refused_with(&format!("{model} --port {port}"), "choose one with --port");
    // Before a model is loaded, or its file looked at.
    refused_with(
        &format!("--model no/such.gguf --port {port}"),
        "choose one with --port",
    );
}

/// The lines of a corpus, in the order of prompts and samples.
fn corpus(file: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(file).unwrap();
    let mut lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    lines.sort_by_key(|line| (line["id"].to_string(), line["sample"].as_u64()));
    lines
}

#[test]
fn generate_goes_on_where_it_stopped() {
    let model = smollm2_path();
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    let lines = [
        r#"{"id": 1, "prompt": "Name a colour."}"#,
        r#"{"id": 2, "category": "sums", "turns": ["What is 2 + 2?", "And 3 + 3?"]}"#,
        r#"{"prompt": "Say hello."}"#,
    ];
    std::fs::write(&prompts, lines.join("\n")).unwrap();
    let generate = |out: &Path, flags: &str| {
        run(&format!(
            "generate --model {} --prompts {} --out {} --max-tokens 10 {flags}",
            model.display(),
            prompts.display(),
            out.display()
        ))
    };
    let (fast, plain) = ("--drafter ngram", "--speculative-decoding=false");
    let out = folder.path().join("corpus.jsonl");
    stdout_of(&generate(&out, &format!("--samples 2 --seed 5 {fast}")));
    let whole = corpus(&out);
    assert_eq!(whole.len(), 6);
    assert_eq!(whole[2]["category"], "sums");
    assert_eq!(whole[2]["prompt"], "What is 2 + 2?");
    for line in &whole {
        let ids = line["ids"].as_array().unwrap();
        assert!((1..=10).contains(&ids.len()), "{line}");
        assert!(line["prompt_ids"].as_array().unwrap().len() > 5, "{line}");
        let cut = line["finish_reason"] == "length";
        assert_eq!(cut, ids.len() == 10, "{line}");
    }
    assert_ne!(whole[0]["ids"], whole[1]["ids"], "samples differ");

    // Killed in the middle of a line, and continued with another batch size.
    let text = std::fs::read_to_string(&out).unwrap();
    let kept = text.match_indices('\n').nth(1).unwrap().0 + 30;
    std::fs::write(&out, &text[..kept]).unwrap();
    let output = generate(
        &out,
        &format!("--samples 2 --seed 5 --max-num-seqs 2 {plain}"),
    );
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("holds 2 texts already; 4 are"), "{said}");
    assert_eq!(corpus(&out), whole);

    let [fast, plain] = [(fast, "fast"), (plain, "plain")].map(|(flags, name)| {
        let out = folder.path().join(name);
        stdout_of(&generate(&out, &format!("--temperature 0 {flags}")));
        corpus(&out)
    });
    assert_eq!(fast, plain);

    // A file that is not a corpus is not overwritten.
    let file = prompts.display();
    refused_with(
        &format!(
            "generate --model {} --prompts {file} --out {file}",
            model.display()
        ),
        "line 1 is no text of a corpus",
    );
}

/// A tiny model, which starts at once, and the flag that names it.
fn tiny() -> (TempDir, String) {
    let folder = tiny_folder(byte_level());
    let flag = format!("--model {}", folder.path().display());
    (folder, flag)
}

#[test]
fn serves_speculatively_until_a_signal() {
    // The adaptive budget may find on a busy machine that no draft pays.
    let model = smollm2_path();
    let flags = "--shutdown-timeout 20 --spec-budget fixed";
    let mut server = Server::start(&format!("--model {} {flags}", model.display()));
    let (_, body) = server.startup_line().split_once(" -d '").unwrap();
    let body = body.trim_end().trim_end_matches('\'');
    let path = "/v1/chat/completions";
    assert!(
        server.startup_line().contains(path),
        "{}",
        server.startup_line()
    );

    // The request that the start-up message suggests.
    let answer = server.post(path, body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\"assistant\""), "{answer}");

    let mut request: serde_json::Value = serde_json::from_str(body).unwrap();
    request["stream"] = true.into();
    request["temperature"] = 0.into();
    request["max_tokens"] = 12.into();
    let answer = server.post(path, &request.to_string());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("text/event-stream"), "{answer}");
    let events: Vec<_> = answer
        .lines()
        .filter_map(|l| l.strip_prefix("data: "))
        .collect();
    assert_eq!(events.last(), Some(&"[DONE]"), "{answer}");
    assert!(events.len() > 2, "{answer}");

    // A repetitive text gets drafts, and some of them are accepted.
    let list =
        r#"{"prompt": "one, two, one, two, one, two, one,", "max_tokens": 24, "temperature": 0}"#;
    let answer = server.post("/v1/completions", list);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let drafted = metric(&server, "spec_decode_num_draft_tokens_total");
    let accepted = metric(&server, "spec_decode_num_accepted_tokens_total");
    assert!(
        0.0 < accepted && accepted <= drafted,
        "{accepted} of {drafted}"
    );

    assert_eq!(server.stop("TERM", Duration::from_secs(25)), Some(0));
}

#[test]
fn ctrl_c_ends_an_idle_server_at_once() {
    let (_folder, model) = tiny();
    let mut server = Server::start(&format!("{model} --api-key secret"));
    let line = server.startup_line();
    let names_the_key = line.contains("Authorization") && !line.contains("secret");
    assert!(names_the_key, "{line}");
    let answer = server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#);
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    assert_eq!(server.stop("INT", Duration::from_secs(25)), Some(0));
}

/// Checks that the server answers a request and ends at a signal.
#[track_caller]
fn works(mut server: Server) {
    let answer = server.post("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(server.stop("TERM", Duration::from_secs(20)), Some(0));
}

#[cfg(target_os = "linux")]
#[test]
fn serves_while_the_disk_of_the_log_is_full() {
    let (_folder, model) = tiny();
    works(Server::start_logging(&model, "info", full_disk()));

    // The error message cannot be written, but the exit code is right.
    let status = foretoken().arg("--modle").stderr(full_disk()).status();
    assert_eq!(status.unwrap().code(), Some(2));
}

#[cfg(target_os = "linux")]
#[test]
fn help_that_cannot_be_written_is_an_error() {
    let output = foretoken().arg("--help").stdout(full_disk()).output();
    let said = refusal_line(&output.unwrap());
    assert!(said.starts_with("error: cannot write to stdout"), "{said}");
}

#[test]
fn serves_when_the_reader_of_the_log_has_left() {
    let (reader, log) = std::io::pipe().unwrap();
    let head = std::thread::spawn(move || first_line(reader));
    let (_folder, model) = tiny();
    let server = Server::start_logging(&model, "info", log);
    assert!(head.join().unwrap().contains(" INFO "));
    works(server);
}

/// Reads what `head -1` would read.
fn first_line(reader: PipeReader) -> String {
    let mut line = String::new();
    BufReader::new(reader).read_line(&mut line).unwrap();
    line
}

/// A counter of `server`, without its prefix.
#[track_caller]
fn metric(server: &Server, name: &str) -> f64 {
    sample(&server.get("/metrics"), &format!("foretoken:{name}{{"))
}

/// A pipe holds 64 KiB, and a line of the log has more than 200 bytes.
#[test]
fn serves_when_nobody_reads_the_log() {
    let (reader, log) = std::io::pipe().unwrap();
    let (_folder, model) = tiny();
    let server = Server::start_logging(&model, "info", log);
    let many = serde_json::json!({"prompt": vec!["a"; 400], "max_tokens": 1});
    for _ in 0..10 {
        let answer = server.post("/v1/completions", &many.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        if metric(&server, "log_lines_dropped_total") > 0.0 {
            break;
        }
    }
    let dropped = metric(&server, "log_lines_dropped_total");
    assert!(dropped > 0.0, "the pipe was never full");
    works(server);
    drop(reader);
}
