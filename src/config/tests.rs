mod file;
mod measuring;
mod models;
mod router;
mod sampling;
mod speculation;
#[cfg(feature = "train")]
mod training;

use super::*;
use crate::http::HttpLimits;
use crate::kv::KvCacheDtype;
use crate::sampling::Acceptance;
use crate::spec::BudgetMode;
use crate::text::{ReasoningFormat, ToolFormat};
use clap::ValueEnum;
use std::time::Duration;

/// Plain decoding.
const OFF: &str = "--speculative-decoding=false";

fn parse(line: &str) -> Result<Command, Exit> {
    Command::from_args(std::iter::once("foretoken").chain(line.split_whitespace()))
}

#[track_caller]
fn command(line: &str) -> Command {
    parse(line).unwrap_or_else(|e| panic!("`{line}` was refused: {e:?}"))
}

/// The configuration that `line` serves.
#[track_caller]
fn accepted(line: &str) -> Config {
    served(command(line))
}

#[track_caller]
fn served(command: Command) -> Config {
    match command {
        Command::Serve(config) => config,
        other => panic!("expected `serve`, got {other:?}"),
    }
}

/// The error for `line`, which must be one line.
#[track_caller]
fn refused(line: &str) -> String {
    match parse(line) {
        Err(Exit::Wrong(e)) => {
            let text = e.to_string();
            assert_eq!(text.lines().count(), 1, "{text}");
            text
        }
        other => panic!("`{line}` gave {other:?}"),
    }
}

#[track_caller]
fn refused_with(line: &str, needle: &str) {
    let text = refused(line);
    assert!(text.contains(needle), "`{line}`: {text}");
}

/// Asserts that the line of each row, after `first`, is refused with an error that has the text in its second column.
#[track_caller]
fn all_refused(first: &str, table: &str) {
    for row in table.trim().lines() {
        let (line, needle) = row.split_once(" | ").expect("two columns");
        refused_with(&format!("{first} {line}"), needle);
    }
}

/// A library that serves without a command line serves as the program does without flags.
#[test]
fn defaults_of_flags_are_those_of_the_libraries() {
    let config = accepted("m");
    let limits = HttpLimits::default();
    assert_eq!(
        format!("{:?}", config.http.listen.limits),
        format!("{limits:?}")
    );
    let cli = Cli::try_parse_from(["foretoken", "m"]).unwrap();
    let engine = EngineOptions::default();
    assert_eq!(format!("{:?}", cli.options.engine), format!("{engine:?}"));
}

#[test]
fn names_of_formats_are_values_of_their_flags() {
    fn names<T: ValueEnum>() -> Vec<String> {
        let values = T::value_variants().iter();
        let values = values.filter_map(ValueEnum::to_possible_value);
        values.map(|value| value.get_name().to_owned()).collect()
    }
    assert_eq!(names::<ToolFormat>(), ToolFormat::ALL.map(ToolFormat::name));
    assert_eq!(
        names::<ReasoningFormat>(),
        ReasoningFormat::ALL.map(ReasoningFormat::name)
    );
    let known = "deepseek_v3 glm47 ernie45 kimi_k2 llama4_pythonic qwen3_xml";
    for name in known.split(' ') {
        assert!(ToolFormat::from_str(name, false).is_ok(), "{name}");
    }
    let known = "deepseek_r1 glm45 granite kimi_k2 minimax_m2 seed_oss";
    for name in known.split(' ') {
        assert!(ReasoningFormat::from_str(name, false).is_ok(), "{name}");
    }
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

fn with_file(text: &str, flags: &str) -> Result<Config, Exit> {
    let file = file(text);
    parse(&format!("--config {} {flags}", file.path().display())).map(served)
}

#[track_caller]
fn file_refused_with(text: &str, needle: &str) {
    match with_file(text, "") {
        Err(Exit::Wrong(e)) => {
            let line = e.to_string();
            assert!(line.contains(needle) && line.contains(".toml"), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
        other => panic!("{text} gave {other:?}"),
    }
}

#[test]
fn defaults() {
    let config = accepted("--model org/name");
    assert_eq!(config.served_model_name, "org/name");
    assert_eq!(config.load.dtype, Dtype::Auto);
    assert_eq!(config.load.device.as_str(), "auto");
    assert_eq!(config.load.threads, None);
    assert_eq!(accepted("--model m --threads 3").load.threads, Some(3));
    assert_eq!(config.drafter, Some(DrafterChoice::Tables));
    assert_eq!(config.engine.spec.length, 8);
    let tables = TablesOptions {
        memory: 64 << 20,
        corpus: None,
    };
    assert_eq!(config.tables, tables);
    assert_eq!((config.kv, config.block_size), (KvBudget::Default, 16));
    assert_eq!(config.engine.max_num_seqs, 64);
    assert_eq!(config.engine.max_num_batched_tokens, 2048);
    assert_eq!(config.http.listen.host, "127.0.0.1");
    assert_eq!(config.http.listen.port, 8000);
    assert_eq!(config.http.listen.shutdown_timeout, Duration::from_secs(30));
}

/// Lines with flags of other servers, and the hints.
const FOREIGN: &str = "
o/m --ctx-size 4096 | --ctx-size is no flag here: use --max-model-len
o/m -c 4096 | use --max-model-len
o/m --n-gpu-layers 99 | runs as a whole on --device
o/m -ngl 99 | -ngl is no flag here
serve o/m --tensor-parallel-size 2 | use --pipeline-parallel-size N
serve o/m -tp=2 | use --pipeline-parallel-size N
serve o/m -dp 2 | behind a router
o/m -md d.gguf | use --draft-model
o/m --enable-prefix-caching | always on
o/m --temp 0.7 | --override-generation-config
bench o/m --random-prompts 1 --trust-remote-code | never run
";

#[test]
fn flags_of_other_servers_have_a_hint() {
    all_refused("", FOREIGN);
    // Where they mean something else they are read, and what is near one of ours is told as before.
    #[cfg(feature = "train")]
    refused_with("distill --ctx-size 3", "unexpected argument '--ctx-size'");
    refused_with("o/m --max-model-length 3", "--max-model-len");
}

#[test]
fn there_may_be_several_keys() {
    let keys = |config: Config| -> Vec<String> {
        let keys = config.http.listen.api_keys();
        keys.map(str::to_owned).collect()
    };
    assert_eq!(
        keys(accepted("o/m --api-key a --api-key b,c")),
        ["a", "b,c"]
    );
    let file = "model = 'm'\napi-key = ['a', 'b']";
    assert_eq!(keys(with_file(file, "").unwrap()), ["a", "b"]);
    assert_eq!(keys(with_file(file, "--api-key c").unwrap()), ["c"]);
    assert_eq!(
        keys(with_file("model = 'm'\napi-key = 'a'", "").unwrap()),
        ["a"]
    );
    file_refused_with("api-key = ['a', '']", "API key is empty");
}

#[test]
fn types_have_long_names() {
    for (name, dtype) in [
        ("f32", Dtype::F32),
        ("float32", Dtype::F32),
        ("bfloat16", Dtype::Bf16),
        ("float16", Dtype::F16),
    ] {
        assert_eq!(
            accepted(&format!("--model m --dtype {name}")).load.dtype,
            dtype
        );
    }
    refused_with("--model m --dtype f8", "f8");
}

#[test]
fn the_kv_cache_has_a_type_of_its_own() {
    for (flags, dtype) in [
        ("", KvCacheDtype::Auto),
        ("--dtype bf16", KvCacheDtype::Auto),
        ("--kv-cache-dtype auto", KvCacheDtype::Auto),
        ("--kv-cache-dtype q8_0", KvCacheDtype::Q8_0),
        ("--kv-cache-dtype fp8", KvCacheDtype::Fp8),
        ("--kv-cache-dtype f16", KvCacheDtype::F16),
        ("--kv-cache-dtype bfloat16", KvCacheDtype::Bf16),
        ("--kv-cache-dtype float32", KvCacheDtype::F32),
    ] {
        let config = accepted(&format!("--model m {flags}"));
        assert_eq!(config.load.kv_cache_dtype, dtype, "{flags}");
    }
    let config = with_file("model = 'm'\nkv-cache-dtype = 'q8_0'", "").unwrap();
    assert_eq!(config.load.kv_cache_dtype, KvCacheDtype::Q8_0);
    for other in ["fp8_e5m2", "q4_0"] {
        refused_with(&format!("--model m --kv-cache-dtype {other}"), "q8_0");
        file_refused_with(&format!("model = 'm'\nkv-cache-dtype = '{other}'"), other);
    }
    // The flags of llama.cpp.
    refused_with("--model m -ctk q8_0", "--kv-cache-dtype");
    refused_with("--model m --cache-type-v q8_0", "--kv-cache-dtype");
}

#[test]
fn sizes() {
    for (size, bytes) in [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
    ] {
        let config = accepted(&format!("--model m --kv-cache-memory {size}"));
        assert_eq!(config.kv, KvBudget::Bytes(bytes));
    }
    for wrong in ["lots", "2XB", "0"] {
        refused_with(
            &format!("--model m --kv-cache-memory {wrong}"),
            &format!("'{wrong}' for '--kv-cache-memory <SIZE>': must be a size such as 2GiB"),
        );
    }
    refused_with(
        "--model m --kv-cache-memory 1GiB --num-blocks 3",
        "leave one out",
    );
}

#[test]
fn a_step_may_be_small_and_wait_long() {
    let rows = |rows: &str| {
        let line = format!("--model m --spec-length 4 --max-num-batched-tokens {rows}");
        accepted(&line).engine.max_num_batched_tokens
    };
    // Drafts are cut to the rows that are free.
    assert_eq!((rows("1"), rows("4")), (1, 4));
    refused_with("--model m --max-num-batched-tokens 0", "at least 1");
    let wait = |line: &str| accepted(line).engine.max_prompt_wait.as_millis();
    assert_eq!(wait("--model m"), 100);
    assert_eq!(wait("--model m --max-prompt-wait 250"), 250);
}

/// Numbers that no flag of a count within limits, a share or a rate takes.
const ABSURD: [&str; 6] = ["0", "-1", "nan", "1e300", U64_MAX, BEYOND_U64];
const U64_MAX: &str = "18446744073709551615";
const BEYOND_U64: &str = "99999999999999999999";

/// Asserts that each of `flags`, after `first`, is refused by its name with each of `numbers`.
#[track_caller]
fn numbers_refused(first: &str, flags: &str, numbers: &[&str]) {
    for flag in flags.split_whitespace() {
        for number in numbers {
            refused_with(&format!("{first} {flag}={number}"), flag);
        }
    }
}

#[test]
fn absurd_numbers_are_refused() {
    let counts = "--max-num-seqs --max-waiting --max-model-len --num-blocks --block-size \
        --max-num-batched-tokens";
    // The machine and the model limit these: they may be U64_MAX here.
    let never = ["0", "-1", "nan", "1e300", BEYOND_U64];
    numbers_refused("--model m", counts, &never);
    let limited = "--threads --gpu-memory-utilization --spec-nodes --spec-topk";
    numbers_refused("--model m", limited, &ABSURD);
    let sizes = "--kv-cache-memory --max-body-bytes --tables-memory";
    numbers_refused("--model m", sizes, &["0", BEYOND_U64]);
    let whole = "--spec-length --seed --shutdown-timeout --port";
    numbers_refused("--model m", whole, &["nan", "1e300", BEYOND_U64]);
    numbers_refused("--model m", "--shutdown-timeout --port", &["-1", U64_MAX]);
    refused_with("--model m --threads two", "a whole number, at least 1");
}

#[test]
fn other_errors_are_one_line() {
    if EMBEDDED.is_empty() {
        refused_with("", "--model is missing");
    }
    refused_with("--modle m", "--modle");
    for (line, command) in [("chek m.gguf", "check"), ("sevre", "serve")] {
        refused_with(line, &format!("did you mean {command}?"));
    }
    let text = refused("--model m -p 8001");
    assert_eq!(text, "unexpected argument '-p' found");
    refused_with("--model m --port 70000", "--port");
    refused_with("generate --model m --prompts p", "--out");
    let hot = "generate --model m --prompts p --out o --temperature 3";
    refused_with(hot, "between 0 and 2");
    refused_with("convert --model m --out m.gguf --type q9", "q9");
    for flag in ["--port", "--spec-length", "--n-cpu-moe"] {
        refused_with(&format!("--model m {flag} many"), "must be a whole number");
    }
    refused_with(
        "generate --model m",
        "not provided: --out <FILE>; --prompts <FILE>",
    );
    refused_with("--model m --api-key=", "API key is empty");
    refused_with(
        &format!("bench --model m {OFF} --random-prompts 1"),
        "leave out --speculative-decoding=false",
    );
    refused_with(
        "bench --model m --random-prompts 1 --prompts f",
        "'--random-prompts <N>' cannot be used with '--prompts <FILE>'",
    );
    refused_with(
        "bench --model m --random-prompts 1 --temperatures 0,3",
        "between 0 and 2",
    );
}

#[test]
fn the_page_can_be_switched_off() {
    assert!(!accepted("--model m").http.no_parse_special);
    assert!(
        accepted("--model m --no-parse-special")
            .http
            .no_parse_special
    );
    assert!(!accepted("--model m").http.listen.no_ui);
    assert!(accepted("--model m --no-ui").http.listen.no_ui);
    assert!(
        with_file("no-ui = true", "--model m")
            .unwrap()
            .http
            .listen
            .no_ui
    );
}

#[test]
fn few_or_no_responses_may_be_stored() {
    let stored = |config: Config| config.http.max_stored_responses;
    assert_eq!(stored(accepted("--model m")), 1000);
    let none = accepted("--model m --max-stored-responses 0");
    assert_eq!(stored(none), 0);
    let few = with_file("max-stored-responses = 5", "--model m");
    assert_eq!(stored(few.unwrap()), 5);
    let wrong = "--model m --max-stored-responses some";
    refused_with(wrong, "must be a whole number");
}

#[test]
fn names_of_metrics_begin_as_told() {
    assert_eq!(accepted("--model m").http.metrics_prefix, "foretoken");
    let vllm = accepted("--model m --metrics-prefix vllm");
    assert_eq!(vllm.http.metrics_prefix, "vllm");
    for wrong in ["vllm:", "1a", "a-b"] {
        let line = format!("--model m --metrics-prefix {wrong}");
        refused_with(&line, "no digit first");
    }
}

#[test]
fn help_is_not_an_error() {
    assert!(matches!(parse("--help"), Err(Exit::Text(text)) if text.contains("--spec-length")));
    let number = env!("CARGO_PKG_VERSION");
    let text = |flag: &str| match parse(flag) {
        Err(Exit::Text(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(text("-V").trim(), format!("foretoken {number}"));
    let version = text("--version");
    assert!(
        version.starts_with(&format!("foretoken {number} (")),
        "{version}"
    );
    for (feature, is_on) in [
        ("embedded-model", cfg!(feature = "embedded-model")),
        ("otel", cfg!(feature = "otel")),
        ("train", cfg!(feature = "train")),
    ] {
        assert_eq!(version.contains(feature), is_on, "{version}");
    }
    assert_eq!(version.lines().count(), 1, "{version}");
    let script = text("completions zsh");
    assert!(script.contains("#compdef foretoken"), "{script}");
    let page = text("man router");
    assert!(page.contains("models\\-dir"), "{page}");
    refused_with("completions cmd", "cmd");
    refused_with("man no-such", "there is no command no-such");
}

/// `bench` runs its prompts again and again, and computes them each time.
#[test]
fn prefixes_are_cached_unless_a_flag_or_a_key_says_no() {
    let off = |config: Config| config.engine.no_prefix_caching;
    assert!(!off(accepted("--model m")));
    assert!(off(accepted("--model m --no-prefix-caching")));
    let file = |line: &str| off(with_file(line, "--model m").unwrap());
    assert!(file("no-prefix-caching = true") && !file("no_prefix_caching = false"));
    assert!(!accepted("--model m").engine.no_cost_cache);
    assert!(accepted("--model m --no-cost-cache").engine.no_cost_cache);
    match command("bench --model m --random-prompts 1") {
        Command::Bench(config, _) => assert!(off(config)),
        other => panic!("{other:?}"),
    }
    match command("generate --model m --prompts p --out o") {
        Command::Generate(config, _) => assert!(!off(config)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn enforce_eager_is_a_flag_and_a_key() {
    assert!(!accepted("--model m").load.enforce_eager);
    assert!(accepted("--model m --enforce-eager").load.enforce_eager);
    let file = |line: &str| with_file(line, "--model m").unwrap().load.enforce_eager;
    assert!(file("enforce-eager = true"));
    assert!(!file("enforce-eager = false"));
}

#[test]
fn gpu_memory_utilization_is_a_fraction() {
    let config = accepted("--model m --gpu-memory-utilization 0.5");
    assert_eq!(config.gpu_memory_utilization, 0.5);
    numbers_refused("--model m", "--gpu-memory-utilization", &["1.5", "inf"]);
}

#[test]
fn both_pools_share_the_memory() {
    let blocks = |budget: KvBudget, room| budget.blocks(16, &[96, 32], 1000, room);
    assert_eq!(blocks(KvBudget::Bytes(3 * 2048 + 2047), 0).unwrap(), 3);
    assert_eq!(blocks(KvBudget::Blocks(7), 0).unwrap(), 7);
    assert!(blocks(KvBudget::Bytes(2047), u64::MAX).is_err());
    // Limited by the wanted tokens, then by the available bytes.
    assert_eq!(blocks(KvBudget::Default, u64::MAX).unwrap(), 63);
    assert_eq!(blocks(KvBudget::Default, 5 * 2048 + 1).unwrap(), 5);
    assert!(blocks(KvBudget::Default, 2047).is_err());
}
