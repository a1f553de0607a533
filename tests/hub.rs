//! Downloads from a Hub, which is a server of our own. A single test, because it sets the environment of
//! the process.

#[path = "common/hub.rs"]
mod stub;

use foretoken::gguf::GgufSource;
use foretoken::model::{LoadFormat, ModelSource};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use stub::{COMMIT, Hub};

fn resolve(id: &str, revision: Option<&str>) -> Result<PathBuf, String> {
    match ModelSource::resolve(id, revision, LoadFormat::Auto) {
        Ok(ModelSource::Folder(folder)) => Ok(folder),
        Ok(other) => panic!("{id} became {other:?}"),
        Err(error) => {
            assert!(
                matches!(error, foretoken::error::Error::Setup(_)),
                "{error}"
            );
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            let shown: String = error.to_string().chars().take(300).collect();
            assert!(error.to_string().len() < 2_000, "{shown}");
            Err(error.to_string())
        }
    }
}

/// The file that `spec` names in the cache, below the snapshot.
fn resolve_gguf(spec: &str) -> Result<PathBuf, String> {
    match ModelSource::resolve(spec, None, LoadFormat::Auto) {
        Ok(ModelSource::Gguf(GgufSource::File(path))) => Ok(path),
        Ok(other) => panic!("{spec} became {other:?}"),
        Err(error) => {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            Err(error.to_string())
        }
    }
}

fn set(name: &str, value: &str) {
    // SAFETY: this file has only one test, and no other thread reads the environment meanwhile.
    unsafe { std::env::set_var(name, value) };
}

/// A file that no repository may overwrite.
struct Victim(PathBuf);

impl Victim {
    fn assert_untouched(&self) {
        assert!(!self.0.is_symlink());
        assert_eq!(std::fs::read_to_string(&self.0).unwrap(), "mine");
    }
}

#[test]
fn models_come_from_the_hub_once() {
    let home = tempfile::tempdir().unwrap();
    let victim = Victim(home.path().join("victim.safetensors"));
    std::fs::write(&victim.0, "mine").unwrap();
    let index = |first: &str, second: &str| {
        serde_json::json!({ "weight_map": { "a": first, "b": second } }).to_string()
    };
    // A path outside the folder is left to whoever serves the model.
    let dense = |path: &str| serde_json::json!({ "path": path, "type": "models.Dense" });
    let modules = serde_json::json!([dense("2_Dense"), dense("../victim")]).to_string();
    let files = [
        ("config.json", "{}".to_owned()),
        ("tokenizer.json", "{ }".to_owned()),
        ("modules.json", modules),
        ("1_LogitScore/config.json", "{     }".to_owned()),
        ("1_Pooling/config.json", "{   }".to_owned()),
        ("2_Dense/config.json", "{      }".to_owned()),
        ("2_Dense/model.safetensors", "a dense layer".to_owned()),
        (
            "additional_chat_templates/tool_use.jinja",
            "tools".to_owned(),
        ),
        (
            "model.safetensors.index.json",
            index("one.safetensors", "part/two.safetensors"),
        ),
        ("one.safetensors", "first".to_owned()),
        ("part/two.safetensors", "second".to_owned()),
    ];
    let mut all: HashMap<String, Vec<u8>> = HashMap::new();
    for (name, text) in &files {
        all.insert(format!("org/model/{name}"), text.clone().into());
    }
    for id in ["org/evil", "org/evil-commit", "org/evil-etag", "org/stored"] {
        all.insert(format!("{id}/config.json"), "{}".into());
        all.insert(format!("{id}/model.safetensors"), "tensors".into());
    }
    // Its dense layer has no safetensors.
    let pickled = serde_json::json!([dense("2_Dense")]).to_string();
    for (name, text) in [
        ("config.json", "{}"),
        ("modules.json", pickled.as_str()),
        ("2_Dense/config.json", "{}"),
        ("model.safetensors", "tensors"),
    ] {
        all.insert(format!("org/pickled/{name}"), text.into());
    }
    let ggufs = [
        ("m-Q8_0.gguf", "eight"),
        ("mmproj-m-Q8_0.gguf", "images"),
        ("Q4/m-Q4_K_M-00001-of-00002.gguf", "one of two"),
        ("Q4/m-Q4_K_M-00002-of-00002.gguf", "two of two"),
        ("m-BF16-00001-of-00002.gguf", "lonely"),
        ("../../../../victim-Q2_K.gguf", "evil"),
    ];
    for (name, text) in ggufs {
        all.insert(format!("org/gguf/{name}"), text.into());
    }
    let listed = "bartowski/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct-Q8_0.gguf";
    all.insert(listed.into(), "of the list".into());
    all.insert(
        "org/huge/config.json".into(),
        " ".repeat((4 << 20) + 1).into(),
    );
    let store = HashMap::from([("org/stored/model.safetensors".to_owned(), "tensors".into())]);
    let (store, elsewhere) = Hub::of(store).start();
    let evil_names = [
        victim.0.to_str().unwrap().to_owned(),
        "../../../../victim.safetensors".to_owned(),
        "part/../../../../../victim.safetensors".to_owned(),
        "..\\..\\victim.safetensors".to_owned(),
        "a\0victim.safetensors".to_owned(),
        format!("../{}victim.safetensors", "x".repeat(1_000_000)),
        "../\u{1b}[2J\nvictim.safetensors".to_owned(),
    ];
    // One hub per name that leads out of the cache, with that name in a model's index.
    let evil_hubs = evil_names.map(|name| {
        let mut files = all.clone();
        let index = index(&name, "model.safetensors");
        files.insert("org/evil/model.safetensors.index.json".into(), index.into());
        let hub = Hub::of(files);
        hub.start().1
    });
    let (hub, address) = Hub {
        files: all,
        names: HashMap::from([
            ("org/evil-commit", "../../../victim.safetensors"),
            ("org/evil-etag", "../../../victim.safetensors"),
        ]),
        store: Some(elsewhere),
        ..Hub::default()
    }
    .start();
    set("HF_HOME", home.path().to_str().unwrap());
    set("HF_ENDPOINT", &address);
    set("HF_TOKEN", "hf_test");
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"] {
        // SAFETY: as above.
        unsafe { std::env::remove_var(name) };
    }

    // Errors about gated and unknown models say what to do.
    let error = resolve("org/gated", None).unwrap_err();
    assert!(
        error.contains("org/gated") && error.contains("HF_TOKEN"),
        "{error}"
    );
    let tokens = hub.tokens.lock().unwrap().clone();
    assert_eq!(tokens[0], Some("Bearer hf_test".to_owned()));
    let error = resolve("org/unknown", None).unwrap_err();
    assert!(error.contains("Hub has no such model"), "{error}");
    let error = resolve("org/model", Some("v2")).unwrap_err();
    assert!(error.contains("at revision 'v2'"), "{error}");
    let error = resolve("org/pickled", None).unwrap_err();
    let lacked = "org/pickled: modules.json needs 2_Dense/model.safetensors, which it lacks";
    assert!(error.contains(lacked), "{error}");

    // Offline, no request is sent.
    set("HF_HUB_OFFLINE", "1");
    let asked = hub.asked.load(Ordering::SeqCst);
    let error = resolve("org/model", None).unwrap_err();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(hub.asked.load(Ordering::SeqCst), asked);
    set("HF_HUB_OFFLINE", "0");

    // All files are stored in the usual place. Partial files, from a lost connection or an earlier run, are
    // completed; those that are too long are not used.
    let repo = home.path().join("hub/models--org--model");
    std::fs::create_dir_all(repo.join("blobs")).unwrap();
    let part = |etag: &str| repo.join(format!("blobs/{etag}.incomplete"));
    std::fs::write(part("5-one.safetensors"), "firs").unwrap();
    std::fs::write(part("3-tokenizer.json"), "far too long").unwrap();
    hub.cuts.store(1, Ordering::SeqCst);
    let folder = resolve("org/model", None).unwrap();
    assert_eq!(folder, repo.join("snapshots").join(COMMIT));
    let ranges = hub.ranges.lock().unwrap().clone();
    assert!(ranges.contains(&"bytes=4-".to_owned()), "{ranges:?}");
    assert!(ranges.contains(&"bytes=2-".to_owned()), "{ranges:?}");
    for (name, text) in &files {
        assert_eq!(
            std::fs::read_to_string(folder.join(name)).unwrap(),
            *text,
            "{name}"
        );
    }
    assert!(!folder.join("chat_template.jinja").exists());
    assert!(folder.join("part/two.safetensors").is_symlink());

    // A branch with a slash, a commit, and a revision that is not a name.
    let error = resolve("org/model", Some("refs/pr/1")).unwrap_err();
    assert!(error.contains("at revision 'refs/pr/1'"), "{error}");
    assert_eq!(resolve("org/model", Some(COMMIT)).unwrap(), folder);
    let error = resolve("org/model", Some("../../x")).unwrap_err();
    assert!(error.contains("a branch, tag or commit"), "{error}");

    // The token is sent to the Hub, but not to the target of its redirects.
    let stored = resolve("org/stored", None).unwrap();
    let text = std::fs::read_to_string(stored.join("model.safetensors"));
    assert_eq!(text.unwrap(), "tensors");
    let shown = store.tokens.lock().unwrap().clone();
    assert!(!shown.is_empty() && shown.iter().all(Option::is_none));

    // GGUF files are found by their names or quantizations, with all their parts.
    let snapshot = home
        .path()
        .join("hub/models--org--gguf/snapshots")
        .join(COMMIT);
    let text = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    assert_eq!(text(resolve_gguf("org/gguf/m-Q8_0.gguf").unwrap()), "eight");
    assert!(!snapshot.join("Q4").exists());
    let parts = ggufs.map(|(name, _)| snapshot.join(name));
    for spec in ["org/gguf:q4_k_m", "hf.co/org/gguf:Q4_K_M"] {
        assert_eq!(resolve_gguf(spec).unwrap(), parts[2]);
    }
    assert_eq!(text(parts[3].clone()), "two of two");
    let named = resolve_gguf("org/gguf/Q4/m-Q4_K_M-00001-of-00002.gguf");
    assert_eq!(named.unwrap(), parts[2]);
    // A name without an owner is one of the list of models, or none.
    for name in ["smollm2:135m", "SmolLM2:135M"] {
        assert_eq!(text(resolve_gguf(name).unwrap()), "of the list");
    }
    let error = resolve_gguf("smollm2:136m").unwrap_err();
    assert!(error.contains("near it are smollm2:135m"), "{error}");
    for (spec, needle) in [
        ("org/gguf:Q5_0", "no GGUF file of it ends with Q5_0: it has"),
        ("org/gguf:Q2_K", "no GGUF file of it ends with Q2_K"),
        (
            "org/gguf:BF16",
            "its part m-BF16-00002-of-00002.gguf is missing",
        ),
        (
            "org/gguf/none.gguf",
            "neither a local path nor a file that the Hub has",
        ),
        ("org/model:Q8_0", "it has no GGUF file"),
        ("org/unknown:Q8_0", "neither a local path"),
        (
            "org/gguf/Q4/m-Q4_K_M-00002-of-00002.gguf",
            "name the first, Q4/m-Q4_K_M-00001-of-00002.gguf",
        ),
    ] {
        let error = resolve_gguf(spec).unwrap_err();
        assert!(error.contains(needle), "{spec}: {error}");
    }
    // Without a name, it is the first by the convention; of other repositories there is no such file.
    assert_eq!(resolve_gguf("org/gguf").unwrap(), parts[2]);
    hub.gone.store(true, Ordering::SeqCst);
    assert_eq!(resolve_gguf("org/gguf").unwrap(), parts[2]);
    hub.gone.store(false, Ordering::SeqCst);
    victim.assert_untouched();

    // Names of a repository that lead out of the cache are refused, and so are files that are too large.
    for evil in evil_hubs {
        set("HF_ENDPOINT", &evil);
        let error = resolve("org/evil", None).unwrap_err();
        assert!(error.contains("is refused"), "{error}");
        victim.assert_untouched();
    }
    // Names that no file can have, and more files than any model: what is asked for, or refused, in one
    // line. A name is also not a folder of another one.
    let long = [
        "n".repeat(300),
        "d/".repeat(3_000) + "n",
        "config.json/x".to_owned(),
    ];
    let many: serde_json::Map<String, serde_json::Value> = (0..20_000)
        .map(|i| (format!("t{i}"), format!("f{i}.safetensors").into()))
        .collect();
    let many = serde_json::json!({ "weight_map": many }).to_string();
    let lists = long.map(|name| index(&name, "model.safetensors"));
    for list in lists.into_iter().chain([many]) {
        let names: String = list.chars().take(60).collect();
        let files = [
            ("config.json", "{}".to_owned()),
            ("model.safetensors.index.json", list),
        ];
        let files = files.map(|(name, text)| (format!("org/evil/{name}"), text.into()));
        let hub = Hub::of(files.into());
        let (hub, address) = hub.start();
        set("HF_ENDPOINT", &address);
        let _ = std::fs::remove_dir_all(home.path().join("hub/models--org--evil"));
        resolve("org/evil", None).expect_err(&names);
        assert!(hub.asked.load(Ordering::SeqCst) < 100, "{names}");
    }
    assert_eq!(
        std::fs::read_dir(home.path()).unwrap().count(),
        2,
        "the victim and the cache"
    );
    set("HF_ENDPOINT", &address);
    for id in ["org/evil-commit", "org/evil-etag"] {
        let error = resolve(id, None).unwrap_err();
        assert!(error.contains("is refused"), "{error}");
        victim.assert_untouched();
    }
    let error = resolve("org/huge", None).unwrap_err();
    assert!(error.contains("over the limit of 4194304 bytes"), "{error}");
    // The same if it seems to have been downloaded before, as another file with these bytes.
    let blobs = home.path().join("hub/models--org--huge/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}-config.json.incomplete", (4 << 20) + 1));
    std::fs::write(part, " ".repeat((4 << 20) + 2)).unwrap();
    let error = resolve("org/huge", None).unwrap_err();
    assert!(error.contains("over the limit"), "{error}");

    // The same for what an earlier program left in the cache.
    let refs = home.path().join("hub/models--org--evil-commit/refs");
    std::fs::create_dir_all(&refs).unwrap();
    std::fs::write(refs.join("main"), "../../..").unwrap();
    set("HF_HUB_OFFLINE", "1");
    let error = resolve("org/evil-commit", None).unwrap_err();
    assert!(error.contains("revision 'main' is not cached"), "{error}");
    set("HF_HUB_OFFLINE", "0");

    // From then on the network is neither needed nor used.
    let asked = hub.asked.load(Ordering::SeqCst);
    assert!(asked > files.len());
    hub.gone.store(true, Ordering::SeqCst);
    assert_eq!(resolve("org/model", None).unwrap(), folder);
    for spec in ["org/gguf:Q8_0", "org/gguf/m-Q8_0.gguf"] {
        assert_eq!(resolve_gguf(spec).unwrap(), parts[0]);
    }
    assert_eq!(resolve_gguf("org/gguf:Q4_K_M").unwrap(), parts[2]);
    set("HF_HUB_OFFLINE", "1");
    let error = resolve_gguf("org/gguf:Q5_0").unwrap_err();
    assert!(error.contains("HF_HUB_OFFLINE is set"), "{error}");
    assert_eq!(resolve("org/model", None).unwrap(), folder);
    assert_eq!(hub.asked.load(Ordering::SeqCst), asked);
    set("HF_HUB_OFFLINE", "0");

    // A cache without all shards counts as incomplete, and without a network the error says so.
    std::fs::remove_file(folder.join("part/two.safetensors")).unwrap();
    set("HF_ENDPOINT", "http://127.0.0.1:9");
    let error = resolve("org/model", None).unwrap_err();
    assert!(error.contains("cannot be reached"), "{error}");

    // The program prints that in one line, and logs no other error.
    let program = std::process::Command::new(env!("CARGO_BIN_EXE_foretoken"))
        .args(["--model", "org/model", "--port", "0"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&program.stderr).into_owned();
    assert_eq!(program.status.code(), Some(2), "{said}");
    let about = |line: &&str| line.contains("ERROR") || line.contains("cannot be reached");
    assert_eq!(said.lines().filter(about).count(), 1, "{said}");
}
