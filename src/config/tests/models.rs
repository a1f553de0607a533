//! The model, its name, and commands that need none.

use super::*;

#[test]
fn the_serve_subcommand_is_optional() {
    assert_eq!(accepted("serve --model m --port 7").http.listen.port, 7);
    refused_with("--model m serve", "serve");
}

#[test]
fn the_model_needs_no_flag() {
    for line in ["o/m", "serve o/m", "-m o/m", "serve -m o/m", "--port 7 o/m"] {
        assert_eq!(accepted(line).model.name, "o/m", "{line}");
    }
    match command("bench o/m --random-prompts 1") {
        Command::Bench(config, _) => assert_eq!(config.model.name, "o/m"),
        other => panic!("{other:?}"),
    }
    refused_with("o/m --model o/n", "named twice, as o/m and as --model o/n");
    let named = "model = 'a'\nserved-model-name = ['x', 'y']";
    let config = with_file(named, "o/m").expect("the command line wins");
    assert_eq!(config.model.name.as_str(), "o/m");
    assert_eq!(config.served_model_name.as_str(), "x");
    assert_eq!(config.served_model_aliases, ["y"]);
    refused_with("run o/m", "`foretoken serve MODEL`");
    refused_with("run", "there is no command run");
    let first = "a command comes first: foretoken";
    refused_with("--port 1 check", &format!("{first} check"));
    refused_with("--port 1 serve m", &format!("{first} serve"));
    refused_with("-m m bench --random-prompts 3", &format!("{first} bench"));
    assert_eq!(accepted("--served-model-name chat -m m").model.name, "m");
    refused_with(
        "service",
        "a command is missing: foretoken service <COMMAND>",
    );
    refused_with("pull o/m", "`foretoken check MODEL`");
}

#[test]
fn a_chat_is_with_a_model_or_a_server() {
    let server = |line: &str| match command(line) {
        Command::Chat(Partner::Server(endpoint), _) => endpoint,
        other => panic!("{other:?}"),
    };
    let endpoint = server("chat http://h:1 --model m --api-key k --system s --max-tokens 3");
    assert_eq!(endpoint.url.as_str(), "http://h:1");
    assert_eq!(endpoint.model.as_deref(), Some("m"));
    assert_eq!(endpoint.api_key.as_deref(), Some("k"));
    match command("chat o/m --draft-model o/d --temperature 0.5") {
        Command::Chat(Partner::Model(config), options) => {
            assert_eq!(config.model.name, "o/m");
            assert_eq!(config.http.listen.host.as_str(), "127.0.0.1");
            assert_eq!(config.http.listen.port, 0);
            assert!(config.drafter.is_some());
            assert_eq!(options.temperature, Some(0.5));
        }
        other => panic!("{other:?}"),
    }
    refused_with("chat o/m --host 0.0.0.0", "--host is not for chat");
    refused_with("chat o/m --tls-cert c.pem", "--tls-cert is not for chat");
    refused_with("chat https://h --dtype f32", "--dtype is for a model");
    // The port of a file is for serving.
    let file = file("port = 8000");
    match command(&format!("chat --config {} o/m", file.path().display())) {
        Command::Chat(Partner::Model(config), _) => assert_eq!(config.http.listen.port, 0),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_chat_without_a_model_takes_one_later() {
    let Command::Chat(Partner::Unnamed(unnamed), options) =
        command("chat --temperature 0.5 --max-model-len 64")
    else {
        panic!("a model was named");
    };
    assert_eq!(options.temperature, Some(0.5));
    let config = unnamed.named(Some("qwen3:4b".into())).unwrap();
    assert_eq!(config.model.name.as_str(), "qwen3:4b");
    assert_eq!(config.http.listen.port, 0);
    assert_eq!(config.served_model_name, "qwen3:4b");
    assert_eq!(config.engine.max_model_len, Some(64));
    match unnamed.named(None) {
        Ok(config) => assert_eq!(config.model.name, EMBEDDED[0].name),
        Err(e) => assert!(EMBEDDED.is_empty() && e.to_string().contains("--model is missing")),
    }
    // A file can name it, too.
    let file = file("model = \"o/m\"");
    let named = command(&format!("chat --config {}", file.path().display()));
    assert!(matches!(named, Command::Chat(Partner::Model(_), _)));
    #[cfg(all(feature = "embedded-model", feature = "train"))]
    refused_with("chat --learn folder", "--learn");
}

#[test]
fn the_only_gguf_file_of_a_folder_gives_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let name = || accepted(&format!("--model {}", folder.path().display())).served_model_name;
    assert_eq!(name(), folder.path().to_str().unwrap());
    std::fs::write(folder.path().join("tiny-Q4_0.gguf"), "").unwrap();
    assert_eq!(name(), "tiny-Q4_0");
    std::fs::write(folder.path().join("other.gguf"), "").unwrap();
    assert_eq!(name(), folder.path().to_str().unwrap());
}

#[test]
fn a_model_can_have_several_names() {
    let names =
        |config: Config| [vec![config.served_model_name], config.served_model_aliases].concat();
    let config = accepted("--model m --served-model-name a b c --port 1");
    assert_eq!(names(config), ["a", "b", "c"]);
    assert_eq!(names(accepted("--model m --served-model-name=a")), ["a"]);
    let file = "model = 'm'\nserved-model-name = ['a', 'b']";
    assert_eq!(names(with_file(file, "--port 1").unwrap()), ["a", "b"]);
    assert_eq!(
        names(with_file(file, "--served-model-name c").unwrap()),
        ["c"]
    );
    let one = "model = 'm'\nserved-model-name = 'a'";
    assert_eq!(names(with_file(one, "").unwrap()), ["a"]);
    for wrong in [
        "served-model-name = []",
        "served-model-name = [[1]]",
        "model = ['a']",
    ] {
        file_refused_with(wrong, "must be a string");
    }
    refused_with(
        "--served-model-name a Cargo.toml",
        "give the model first, or as --model Cargo.toml",
    );
    for missing in ["", "="] {
        let line = format!("--model m --served-model-name{missing}");
        refused_with(&line, "--served-model-name");
    }
}

#[test]
fn a_gguf_file_is_served_by_its_stem() {
    let config = accepted("--model models/Some.Q4_1.gguf");
    assert_eq!(config.served_model_name, "Some.Q4_1");
    let config = accepted("--model a.gguf --served-model-name mine");
    assert_eq!(
        (config.served_model_name, config.engine.model_name),
        ("mine".into(), "mine".into())
    );
}

#[cfg(feature = "embedded-model")]
#[test]
fn without_a_model_the_embedded_pair_is_served() {
    let [target, draft] = EMBEDDED else {
        panic!("a pair is embedded");
    };
    let draft = ModelChoice {
        name: draft.name.into(),
        revision: None,
    };
    let config = accepted("");
    assert_eq!(config.model.name, target.name);
    assert_eq!(config.served_model_name, target.name);
    assert_eq!(config.drafter, Some(DrafterChoice::Model(draft.clone())));
    assert_eq!(config.engine.spec.length, 8);
    let config = accepted("--spec-length 4 --port 3");
    assert_eq!(config.drafter, Some(DrafterChoice::Model(draft)));
    assert_eq!((config.engine.spec.length, config.http.listen.port), (4, 3));
    assert_eq!(accepted(OFF).drafter, None);
    assert_eq!(
        accepted("--drafter tables").drafter,
        Some(DrafterChoice::Tables)
    );
    // A model that the user names has no draft of its own.
    for line in ["--model m".to_owned(), format!("--model {}", target.name)] {
        assert_eq!(accepted(&line).drafter, Some(DrafterChoice::Tables));
    }
}

#[test]
fn each_of_several_gpus_has_a_share() {
    let load = accepted("o/m --pipeline-parallel-size 3 --tensor-split 2,3.5,1").load;
    assert_eq!(load.pipeline_parallel_size, 3);
    assert_eq!(load.tensor_split, [2., 3.5, 1.]);
    assert_eq!(accepted("o/m").load.pipeline_parallel_size, 1);
    let wrong = "
--pipeline-parallel-size 0 | a whole number from 1 to 64
--pipeline-parallel-size 2 --tensor-split 1,-3 | must be a number above 0
--tensor-split 1,3 | --tensor-split has 2 shares and --pipeline-parallel-size is 1
--pipeline-parallel-size 2 --one-launch | leave it out with --pipeline-parallel-size
";
    all_refused("o/m", wrong);
    // A file and the command line together, of which the latter wins.
    let two = "pipeline-parallel-size = 2";
    let load = with_file(two, "o/m --tensor-split 1,2").unwrap().load;
    assert_eq!(load.tensor_split, [1., 2.]);
    let split = format!("{two}\ntensor-split = '3,4'");
    let load = with_file(&split, "o/m").unwrap().load;
    assert_eq!(load.tensor_split, [3., 4.]);
    let load = with_file(&split, "o/m --tensor-split 1,2").unwrap().load;
    assert_eq!(load.tensor_split, [1., 2.]);
    let three = "--pipeline-parallel-size 3";
    for (text, needle) in [
        (
            &*split,
            "--tensor-split has 2 shares and --pipeline-parallel-size is 3",
        ),
        (
            "one-launch = true",
            "leave it out with --pipeline-parallel-size",
        ),
    ] {
        let file = file(text);
        refused_with(
            &format!("--config {} o/m {three}", file.path().display()),
            needle,
        );
    }
}
