//! The file of `--config`.

use super::*;

#[test]
fn paths_are_those_beside_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("serve.toml");
    std::fs::create_dir(folder.path().join("there")).unwrap();
    let config = |text: &str| {
        std::fs::write(&file, text).unwrap();
        accepted(&format!("--config {}", file.display()))
    };
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["there", "./x", "../y", "m.gguf", "there/m.gguf"] {
        assert_eq!(config(&format!("model = '{name}'")).model.name, at(name));
    }
    for name in ["/a/b", "org/name", "org/name/m.gguf", "org/name:Q4_K_M"] {
        assert_eq!(config(&format!("model = '{name}'")).model.name, name);
    }
    let text = "model = 'o/m'\ndraft-model = 'o/d'\ndraft-vocab = 'ids'\ntables-corpus = 'c.txt'\ngeneration-config = 'g.json'\nprefix-cache-disk = 'p'";
    let read = config(text);
    assert_eq!(read.tables.corpus, Some(at("c.txt").into()));
    assert_eq!(read.draft_vocab, Some(DraftVocab::File(at("ids").into())));
    assert_eq!(read.engine.prefix_cache_disk, Some(at("p").into()));
    assert_eq!(read.engine.prefix_cache_disk_size, 10 << 30);
    let expected = GenerationConfig::Path(at("g.json").into());
    assert_eq!(read.generation.generation_config, expected);
    let read = config("model = 'o/m'\ngeneration-config = 'vllm'");
    assert_eq!(read.generation.generation_config, GenerationConfig::Ignored);
}

#[test]
fn flags_win_over_the_file_and_the_file_over_the_defaults() {
    let text = "model = 'm'\nport = 1\nmax_num_seqs = 3\nblock-size = 32";
    let config = with_file(text, "--port 2").unwrap();
    assert_eq!(config.http.listen.port, 2);
    assert_eq!(config.engine.max_num_seqs, 3);
    assert_eq!(config.block_size, 32);
    assert_eq!(config.engine.max_waiting, 512);
}

/// A list of the command line is not added to that of the file, which may allow more.
#[test]
fn a_list_of_the_command_line_replaces_that_of_the_file() {
    let text = "model = 'm'\nallowed-hosts = ['a', 'b']\nallowed-origins = '*'";
    let lists = |flags: &str| {
        let origins = with_file(text, flags).unwrap().http.listen.origins;
        [origins.allowed_hosts, origins.allowed_origins]
    };
    assert_eq!(lists(""), [vec!["a", "b"], vec!["*"]]);
    let flags = "--allowed-hosts c --allowed-origins https://d";
    assert_eq!(lists(flags), [["c"], ["https://d"]]);
}

#[test]
fn numbers_are_written_as_toml_has_them() {
    let text = "model = 'm'\ngpu-memory-utilization = 0.85\ntimeout-headers = 2.5\ntimeout-body = 1e2\n\
        pipeline-parallel-size = 2\ntensor-split = [3, 0.5]";
    let config = with_file(text, "").unwrap();
    assert_eq!(config.gpu_memory_utilization, 0.85);
    let limits = &config.http.listen.limits;
    assert_eq!(limits.timeout_headers, Duration::from_millis(2500));
    assert_eq!(limits.timeout_body, Duration::from_secs(100));
    assert_eq!(config.load.tensor_split, [3., 0.5]);
    file_refused_with("port = 80.0", "--port");
    file_refused_with("gpu-memory-utilization = inf", "at most 1");
    file_refused_with("port = 1979-05-27", "`port` must be a string, a number");
    file_refused_with("tensor-split = [[1]]", "`tensor-split` must be");
}

#[test]
fn the_file_serves_subcommands_too() {
    let file = file("model = 'm'\ndrafter = 'ngram'");
    let line = format!(
        "bench --config {} --random-prompts 2",
        file.path().display()
    );
    let Command::Bench(_, bench) = command(&line) else {
        panic!("expected `bench`");
    };
    assert_eq!((bench.prompts, bench.random_prompts), (None, Some(2)));
    assert_eq!((bench.prompt_tokens, bench.seed), (64, 0));
    assert_eq!(bench.temperatures, [0.0, 1.0]);
    assert_eq!(bench.spec_lengths, [8]);
    assert!(bench.synthetic_acceptance.is_empty());
}

#[test]
fn a_flag_replaces_a_conflicting_key_of_the_file() {
    let text = "model = 'm'\ndraft-model = 'd'\ndraft-revision = 'r'\nnum-blocks = 9";
    let config = with_file(text, "--drafter ngram --kv-cache-memory 1KiB").unwrap();
    assert_eq!(
        config.drafter,
        Some(DrafterChoice::Ngram { min: 2, max: 4 })
    );
    assert_eq!(config.kv, KvBudget::Bytes(1024));

    let text = "model = 'm'\ndrafter = 'ngram'\nprompt-lookup-max = 3";
    let config = with_file(text, "--draft-model d --draft-revision r").unwrap();
    let draft = ModelChoice {
        name: "d".into(),
        revision: Some("r".into()),
    };
    assert_eq!(config.drafter, Some(DrafterChoice::Model(draft)));
    let config = with_file(text, "--prompt-lookup-min 3").unwrap();
    assert_eq!(
        config.drafter,
        Some(DrafterChoice::Ngram { min: 3, max: 3 })
    );
    let config = with_file(text, OFF).unwrap();
    assert_eq!((config.drafter, config.engine.spec.length), (None, 0));
    let off = "model = 'm'\nspeculative-decoding = false";
    assert_eq!(with_file(off, "").unwrap().drafter, None);
    let config = with_file(off, "--drafter tables").unwrap();
    assert_eq!(config.drafter, Some(DrafterChoice::Tables));
}

#[test]
fn bad_files_are_refused() {
    file_refused_with("modle = 'm'", "unknown key `modle` (did you mean `model`?)");
    file_refused_with(
        "modle = 'm'\nport = 1\nctx-size = 4\nxyz = 1\nkv_cache_memry = 1",
        "unknown keys `ctx-size` (use --max-model-len), `kv_cache_memry` (did you mean \
         `kv-cache-memory`?), `modle` (did you mean `model`?), `xyz`: keys are",
    );
    file_refused_with("config = 'm'", "unknown key `config`");
    file_refused_with("model = 'm'\nport = = 3", "line 2");
    file_refused_with("model = 'm'\nport = 'x'", "--port");
    file_refused_with("model = 'm'\nport = [1]", "`port` must be");
    file_refused_with("model = 'm'\nport = 1\nport = 2", "duplicate key");
    file_refused_with("model = 'm'\ndtype = 'f8'", "f8");
    file_refused_with("num-blocks = 1\nkv-cache-memory = 1", "--num-blocks");
    refused_with("--config no/such.toml", "no/such.toml");
}

#[test]
fn shipped_files_parse() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path());
    let files: Vec<_> = files
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .collect();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        accepted(&format!("--config {}", file.display()));
    }
}
