//! Gemma 4's assistants: what is refused of them, and the commands that take them. What they draft is compared in
//! [`crate::head_fixtures`].

use crate::common::process;
use crate::common::refusals::{change, rows};
use crate::common::tiny::open;
use crate::common::tiny_folder::{byte_level, write_tokenizer};
use crate::head_fixtures::{changed_in, fixtures, load_beside};
use foretoken::model::LoadedModel;

fn target(name: &str) -> Box<dyn LoadedModel> {
    open(&fixtures().join("architectures").join(name)).unwrap()
}

#[test]
fn what_an_assistant_lacks_is_refused_by_name() {
    let target = target("gemma4");
    let from = fixtures().join("assistants/gemma4");
    let table = r#"
        new_norm = true | new_norm
        text_config.logit_scale = 3 | logit_scale
        backbone_hidden_size = null | backbone_hidden_size is missing
        backbone_hidden_size = 48 | backbone_hidden_size is 48, but 32 in the target
        num_centroids = 33 | num_centroids 33 is not supported: only a divisor of vocab_size 256
        num_centroids = 64 | masked_embedding.centroids.weight
        centroid_intermediate_top_k = 33 | centroid_intermediate_top_k 33
        use_ordered_embeddings = false | tensor masked_embedding.
        text_config.final_logit_softcapping = 30 | final_logit_softcapping
        text_config.hidden_size_per_layer_input = 8 | hidden_size_per_layer_input
        text_config.num_kv_shared_layers = 2 | num_kv_shared_layers
        text_config.num_key_value_heads = 1 | its layer 0 reads 1 heads of 8 values, but layer 2 of the target has 2 of 8
        text_config.vocab_size = 512 | vocab_size is 512, but 256 in the target
    "#;
    for [keys, needle] in rows::<2>(table) {
        let changed = changed_in(&from, &|config| change(config, keys));
        let error = load_beside(changed.path(), &*target).err();
        let error = error.unwrap_or_else(|| panic!("{needle}: it was loaded"));
        assert!(error.contains(needle) && !error.contains('\n'), "{error}");
    }
    let other = load_beside(&from, &*self::target("qwen3")).err().unwrap();
    assert!(other.contains("does not fit the target"), "{other}");
}

#[test]
fn check_takes_an_assistant_and_convert_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = fixtures().join("architectures/gemma4");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
    }
    write_tokenizer(folder.path(), byte_level());
    let head = fixtures().join("assistants/gemma4");
    let run = |command: &str, flags: &[&str]| {
        let mut process = process::foretoken();
        let done = process.arg(command).args(flags).output().unwrap();
        let said = [done.stdout, done.stderr].concat();
        (done.status.success(), String::from_utf8(said).unwrap())
    };
    let (target, head) = (folder.path().to_str().unwrap(), head.to_str().unwrap());
    let (is_fine, said) = run("check", &[target, "--draft-model", head]);
    assert!(is_fine && said.contains("Assistant"), "{said}");
    let (is_fine, said) = run(
        "check",
        &[target, "--draft-model", head, "--drafter", "parallel"],
    );
    assert!(!is_fine && said.contains("parallel"), "{said}");
    // Its layers read those that the target has on the second GPU.
    let spread = ["--gpu", "h100", "--pipeline-parallel-size", "2"];
    let flags = [&[target, "--draft-model", head], &spread[..]].concat();
    let (is_fine, said) = run("check", &flags);
    let why = "an assistant of Gemma 4 is not supported with several GPUs";
    assert!(
        !is_fine && said.contains(why) && said.lines().count() == 1,
        "{said}"
    );
    let out = folder.path().join("head.gguf");
    let out = out.to_str().unwrap();
    let (is_fine, said) = run("convert", &["--model", head, "--out", out]);
    assert!(!is_fine && said.contains("kind Assistant"), "{said}");
}
