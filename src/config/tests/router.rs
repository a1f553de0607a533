//! `foretoken router`: its flags, its file and its folder.

use super::*;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[track_caller]
fn router(line: &str) -> RouterConfig {
    match command(&format!("router {line}")) {
        Command::Router(config) => config,
        other => panic!("expected `router`, got {other:?}"),
    }
}

/// The names of a router's models, and what is behind `--model`. As paths, which are equal with any separators.
fn models(config: &RouterConfig) -> Vec<(&str, &Path)> {
    let models = config.models.iter().map(|spec| {
        let model = spec.args[1].to_str().unwrap();
        let model = model.strip_prefix("--model=").unwrap();
        (spec.name.as_str(), Path::new(model))
    });
    models.collect()
}

/// A folder with empty files of these names.
fn folder(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let file = folder.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }
    folder
}

fn file_of(folder: &TempDir, text: &str) -> PathBuf {
    let file = folder.path().join("router.toml");
    std::fs::write(&file, text).unwrap();
    file
}

#[test]
fn a_folder_has_a_model_for_each_file_and_folder() {
    let folder = folder(&[
        "a.gguf",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
        "mmproj-a.gguf",
        ".hidden.gguf",
        "notes.txt",
        "safe/config.json",
        "one/x-Q4-00001-of-00002.gguf",
        "one/x-Q4-00002-of-00002.gguf",
        "two/x.gguf",
        "two/y.gguf",
        "adapter/adapter_config.json",
    ]);
    let config = router(&format!("--models-dir {}", folder.path().display()));
    let at = |name: &str| folder.path().join(name);
    let found = [
        ("a", at("a.gguf")),
        ("big", at("big-00001-of-00002.gguf")),
        ("one", at("one/x-Q4-00001-of-00002.gguf")),
        ("safe", at("safe")),
        ("two/x", at("two/x.gguf")),
        ("two/y", at("two/y.gguf")),
    ];
    let expected: Vec<_> = found
        .iter()
        .map(|(name, path)| (*name, path.as_path()))
        .collect();
    assert_eq!(models(&config), expected);
    assert_eq!(config.max_loaded, 1);
    assert_eq!(config.idle, Some(Duration::from_secs(600)));
    assert_eq!(config.listen.port, 8000);
}

#[test]
fn a_file_names_models_and_flags() {
    let folder = folder(&["dir/a.gguf", "dir/b.gguf"]);
    let text = "models-dir = 'dir'\nmax-loaded = 3\nidle = 0\nport = 1\napi-key = ['x', 'y']\n\
        timeout-write = 90.5\nmax-connections = 2000\nargs = ['--max-num-seqs', '4']\n\
        [[model]]\nname = 'b'\nmodel = './other.gguf'\nargs = ['--max-num-seqs=5', '--timeout-write', '5']\n\
        [[model]]\nname = 'hub'\nmodel = 'org/name:Q4_K_M'\n";
    let file = file_of(&folder, text);
    let config = router(&format!(
        "--config {} --port 2 -- --block-size 32",
        file.display()
    ));
    let at = |name: &str| folder.path().join(name);
    let (other, a) = (at("./other.gguf"), at("dir/a.gguf"));
    let expected = [
        ("b", other.as_path()),
        ("hub", Path::new("org/name:Q4_K_M")),
        ("a", a.as_path()),
    ];
    assert_eq!(models(&config), expected);
    assert_eq!((config.max_loaded, config.idle), (3, None));
    assert_eq!(config.listen.port, 2);
    assert_eq!(config.listen.api_keys().count(), 2);
    let of_model = |model: usize| {
        let args = config.models[model].args.clone();
        let program = std::iter::once(OsString::from("foretoken"));
        served(Command::from_args(program.chain(args)).unwrap())
    };
    let (first, second) = (of_model(0), of_model(1));
    // A model's own flags come after those for all.
    assert_eq!(first.engine.max_num_seqs, 5);
    assert_eq!((second.engine.max_num_seqs, second.block_size), (4, 32));
    assert_eq!(first.served_model_name, "b");
    // The limits of the router, which passes answers on as slowly as its clients read them.
    let limits = |config: &Config| {
        let limits = &config.http.listen.limits;
        (limits.timeout_write.as_secs_f64(), limits.max_connections)
    };
    assert_eq!(limits(&first), (5., 2000));
    assert_eq!(limits(&second), (90.5, 2000));
    assert_eq!(
        (first.http.listen.port, first.http.exit_on_stdin_end),
        (0, true)
    );
}

#[test]
fn adapters_are_names_of_their_models() {
    let folder = folder(&["a.gguf"]);
    let text = "models-dir = '.'\n[[model]]\nname = 'a'\nmodel = './a.gguf'\n\
        lora-modules = ['x=adapters/x', '{\"name\": \"y\", \"path\": \"/y\", \"base_model_name\": \"a\"}']\n\
        [[model]]\nname = 'b'\nmodel = 'o/m'\nargs = ['--lora-modules', 'z=/z', '--max-loras', '2']\n";
    let file = file_of(&folder, text);
    let config = router(&format!("--config {}", file.display()));
    let names: Vec<Vec<&str>> = config.models.iter().map(|m| m.names().collect()).collect();
    assert_eq!(names, [vec!["a", "x", "y"], vec!["b", "z"]]);
    let program = std::iter::once(OsString::from("foretoken"));
    let served = served(Command::from_args(program.chain(config.models[0].args.clone())).unwrap());
    let lora = served.lora.expect("adapters");
    let paths: Vec<PathBuf> = lora
        .modules
        .iter()
        .map(|module| module.path.clone())
        .collect();
    assert_eq!(
        paths,
        ["adapters/x", "/y"].map(|path| folder.path().join(path))
    );
}

#[test]
fn a_folder_is_read_again() {
    let folder = folder(&["a.gguf"]);
    let config = router(&format!("--models-dir {}", folder.path().display()));
    let names = || -> Result<Vec<String>, String> {
        let models = config.list.read().map_err(|e| e.to_string())?;
        Ok(models.into_iter().map(|model| model.name).collect())
    };
    assert!(config.list.can_change());
    std::fs::write(folder.path().join("b.gguf"), "").unwrap();
    assert_eq!(names(), Ok(vec!["a".into(), "b".into()]));
    for name in ["a.gguf", "b.gguf"] {
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    // As at start, but this is no error any more.
    assert_eq!(names(), Ok(Vec::new()));
    drop(folder);
    assert!(names().is_err());
    let file = tempfile::tempdir().unwrap();
    let file = file_of(&file, "[[model]]\nname = 'a'\nmodel = 'o/m'");
    let config = command(&format!("router --config {}", file.display()));
    assert!(matches!(config, Command::Router(config) if !config.list.can_change()));
}

/// Lines of a file with `; ` between them, and what is said of them.
const WRONG: &str = "
[[model]]; name = 'a' | missing field `model`
[[model]]; name = 'a'; model = 'o/m'; port = 3 | unknown field `port`
[[model]]; name = 'a'; model = 'o/m'; args = ['--prot', '3'] | the model a: unexpected argument '--prot'
[[model]]; name = 'a'; model = 'o/m'; args = ['--port', '3'] | the model a: --port is set by the router
[[model]]; name = 'a'; model = 'o/m'; args = ['x'] | the model a: the model is named twice
[[model]]; name = ''; model = 'o/m' | an empty name
[[model]]; name = 'a'; model = 'o/m'; lora-modules = ['b'] | the model a: invalid value 'b' for '--lora-modules
[[model]]; name = 'a'; model = 'o/m'; lora-modules = ['b=x']; [[model]]; name = 'b'; model = 'o/m' | two models have the name b
[[model]]; name = 'a'; model = 'o/m'; args = ['--no-ui'] | the model a: --no-ui is set by the router
max-loded = 1 | did you mean `max-loaded`?
model = 'o/m' | `model`: invalid type
max-loaded = 0 | at least 1
";

#[test]
fn wrong_routers_are_refused() {
    let folder = folder(&["a.gguf", "a/config.json"]);
    let dir = folder.path().display();
    refused_with("router", "there are no models: give --models-dir DIR");
    refused_with("router --models-dir ./none", "./none");
    refused_with(
        &format!("router --models-dir {dir}"),
        "two models have the name a",
    );
    refused_with("router --models-dir . --idel 3", "--idle");
    let empty = tempfile::tempdir().unwrap();
    let dir = empty.path().display();
    refused_with(&format!("router --models-dir {dir}"), "has no models");
    for row in WRONG.trim().lines() {
        let (lines, needle) = row.split_once(" | ").expect("two columns");
        let file = file_of(&empty, &lines.replace("; ", "\n"));
        refused_with(&format!("router --config {}", file.display()), needle);
    }
}

#[test]
fn keys_of_the_environment_may_be_several_lines() {
    let keys = |text: &str| -> Vec<String> {
        let args = ["foretoken", "m", "--api-key", text];
        let config = served(Command::from_args(args).unwrap());
        let keys = config.http.listen.api_keys();
        keys.map(str::to_owned).collect()
    };
    assert_eq!(keys("a\\nb"), ["a\\nb"]);
    assert_eq!(keys("a\nb"), ["a", "b"]);
    // As a file has them.
    assert_eq!(keys("a\n"), ["a"]);
    assert_eq!(keys("a\r\n\r\nb\r\n"), ["a", "b"]);
    let args = ["foretoken", "m", "--api-key", "a", "--api-key", " \n"];
    let error = Command::from_args(args).unwrap_err();
    assert!(matches!(error, Exit::Wrong(e) if e.to_string().contains("API key is empty")));
}
