//! Keys and values in blocks of 8 bits: `--kv-cache-dtype q8_0`. `paths.rs` has the promises on every instruction set.

use crate::common::process::Server;
use crate::common::rig::{Rig, Seq, distance};
use crate::common::tiny::{
    KV_HEADS, VOCAB, llama_config, short_prompt, tensors, write_config, write_shards,
};
use crate::common::*;
use crate::paths::model;
use crate::prefix::in_scope;
use crate::prefix_disk::answer;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use foretoken::engine::{self, EngineHandle, EngineOptions};
use foretoken::kv::KvCacheDtype;
use foretoken::model::{LoadFormat, LoadOptions, LoadedModel, ModelSource, load};
use foretoken::spec::DraftModel;
use std::path::Path;
use std::time::Duration;

const BLOCK_SIZE: usize = 4;
const LONG: Duration = Duration::from_secs(60);

fn opened(
    path: &Path,
    kv_cache_dtype: KvCacheDtype,
) -> foretoken::error::Result<Box<dyn LoadedModel>> {
    let source = ModelSource::resolve(path.to_str().unwrap(), None, LoadFormat::Auto)?;
    let options = LoadOptions {
        kv_cache_dtype,
        ..LoadOptions::default()
    };
    load(&source, &options)
}

/// The dtype says what a token takes, and so how many fit; weights stay as they are.
#[test]
fn a_token_takes_what_the_dtype_says() {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &llama_config(32));
    write_shards(folder.path(), &tensors(32, DType::BF16));
    let tokens = short_prompt(40);
    let last = |dtype| {
        let model = opened(folder.path(), dtype).unwrap();
        let bytes = model.kv_shape().bytes_per_token();
        let logits = Rig::new(model, 32, BLOCK_SIZE).feed(&mut Seq::default(), &tokens);
        (bytes, logits[39].clone())
    };
    let heads = 2 * 2 * KV_HEADS;
    let (bytes, exact) = last(KvCacheDtype::F32);
    assert_eq!(bytes, heads * 32 * 4);
    let size = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
    // A value is off by up to half of a 127th of the largest in its block. The scores of this random model are large, so
    // weights are off by a multiple of that. The auto pool is in f16.
    for (dtype, bytes, tolerance) in [
        (KvCacheDtype::Auto, 64, 0.02),
        (KvCacheDtype::F16, 64, 0.02),
        (KvCacheDtype::Bf16, 64, 0.2),
        (KvCacheDtype::Q8_0, 34, 0.4),
    ] {
        let (got, logits) = last(dtype);
        assert_eq!(got, heads * bytes, "{dtype:?}");
        let far = distance(&logits, &exact);
        assert!(
            0. < far && far < tolerance * size,
            "{dtype:?}: {far} of {size}"
        );
    }
}

#[test]
fn heads_that_are_no_whole_blocks_are_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &llama_config(16));
    write_shards(folder.path(), &tensors(16, DType::BF16));
    let latent = Path::new("tests/fixtures/architectures/deepseek_v2");
    for (path, found) in [
        (folder.path(), "heads of 16 values"),
        (latent, "latent vectors"),
    ] {
        let error = opened(path, KvCacheDtype::Q8_0).err().unwrap().to_string();
        for part in ["--kv-cache-dtype q8_0", found, "f16 are accepted"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
        opened(path, KvCacheDtype::F16).unwrap();
    }
}

/// An engine with a draft model, whose pool is in blocks, too.
fn start(num_blocks: usize) -> EngineHandle {
    let kind = (GgmlDType::Q4_1, KvCacheDtype::Q8_0);
    let draft = DraftModel::new(model(kind), num_blocks, BLOCK_SIZE, 40).unwrap();
    let options = EngineOptions {
        max_num_seqs: 6,
        max_num_batched_tokens: 40,
        ..fixed_budget(chains(3))
    };
    engine::spawn(
        model(kind),
        Some(Box::new(draft)),
        num_blocks,
        BLOCK_SIZE,
        options,
    )
    .unwrap()
}

/// Preempted sequences are computed again in other blocks and other chunks, beside others.
#[test]
fn texts_survive_preemption_and_prefix_hits() {
    let prompt = |i: u32| -> Vec<u32> {
        let own = (0..8).map(|at| (at * 13 + i * 7) % VOCAB as u32);
        short_prompt(30).into_iter().chain(own).collect()
    };
    let requests: Vec<_> = (0..6).map(|i| greedy(&prompt(i), 60)).collect();
    let roomy = start(256);
    let alone = requests.iter().map(|request| run(&roomy, request.clone()));
    let alone: Vec<_> = alone.collect();
    assert_eq!(alone[0].cached_tokens, 0);
    assert_eq!(alone[5].cached_tokens, 28);
    let tight = start(32);
    let receivers = tight.submit_all(requests).unwrap();
    for (receiver, alone) in receivers.into_iter().zip(&alone) {
        assert_eq!(collect(receiver).ids(), alone.ids());
    }
    assert_idle(&tight);
    assert!(tight.stats().preemptions.get() > 0);
}

/// Blocks on disk are found by a pool of the same kind alone.
#[test]
fn blocks_on_disk_are_those_of_one_dtype() {
    let (folder, weights) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_config(weights.path(), &llama_config(32));
    write_shards(weights.path(), &tensors(32, DType::BF16));
    let ask = |dtype| {
        let model = opened(weights.path(), dtype).unwrap();
        let options = EngineOptions {
            prefix_cache_disk: Some(folder.path().into()),
            ..EngineOptions::default()
        };
        let engine = engine::spawn(model, None, 64, BLOCK_SIZE, options).unwrap();
        let answer = run(&engine, in_scope(0, greedy(&short_prompt(61), 20)));
        assert_idle(&engine);
        assert!(engine.join(LONG));
        (answer.cached_tokens, answer.ids())
    };
    let (none, text) = ask(KvCacheDtype::Q8_0);
    assert_eq!(none, 0);
    assert_eq!(ask(KvCacheDtype::Q8_0), (60, text.clone()));
    assert_eq!(ask(KvCacheDtype::F32).0, 0);
    assert_eq!(ask(KvCacheDtype::F16).0, 0);
    assert_eq!(ask(KvCacheDtype::Q8_0), (60, text));
}

/// The program, with its own model and draft.
#[test]
fn a_restarted_server_finds_blocks_of_its_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let served = |dtype: &str| {
        let mut server = Server::start(&format!(
            "--api-key one --prefix-cache-disk {} {dtype}",
            folder.path().display()
        ));
        let answer = answer(&server, "one", None);
        assert_eq!(server.stop("TERM", LONG), Some(0));
        answer
    };
    let (none, text) = served("--kv-cache-dtype q8_0");
    assert_eq!(none, 0);
    let (known, again) = served("--kv-cache-dtype q8_0");
    assert!(known > 100, "{known}");
    assert_eq!(again, text);
    assert_eq!(served("").0, 0, "blocks of another dtype");
    assert_eq!(served("--kv-cache-dtype q8_0"), (known, text));
}
