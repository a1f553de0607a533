//! What fits into memory, and what is said of it.

use super::*;
use crate::config::Command;
use crate::engine::StepLimits;
use crate::model::ModelConfig;
use std::path::Path;

/// Bytes of the weights in bf16, without norms.
fn weights(model: &ModelConfig) -> u64 {
    let heads = 2 * model.num_heads + 2 * model.num_kv_heads;
    let layer = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size);
    let embedding = model.hidden_size * model.vocab_size;
    2 * (model.num_layers() * layer + embedding) as u64
}

/// Bytes of K and V in bf16.
fn kv(model: &ModelConfig, tokens: usize) -> u64 {
    (2 * 2 * model.num_layers() * model.num_kv_heads * model.head_dim * tokens) as u64
}

fn config(flags: &str) -> Config {
    let flags = format!("foretoken --model m {flags}");
    match Command::from_args(flags.split_whitespace()) {
        Ok(Command::Serve(config)) => config,
        other => panic!("{flags}: {other:?}"),
    }
}

fn shape(name: &str) -> ModelConfig {
    ModelConfig::from_json(Path::new(&format!("configs/{name}/config.json"))).unwrap()
}

/// A unit of systemd has its limit in a group that is not the root: `systemd-run --scope -p MemoryMax=4G cargo test`.
#[test]
#[cfg(target_os = "linux")]
fn no_group_of_this_process_has_less_memory() {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap(), fields.next().unwrap());
        let (root, limit, used) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            "memory" => (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            ),
            _ => continue,
        };
        let group = Path::new(root).join(path.trim_start_matches('/'));
        // A container may see another name than its own.
        if !group.join(used).exists() {
            continue;
        }
        for group in group.ancestors().take_while(|one| one.starts_with(root)) {
            let limit = std::fs::read_to_string(group.join(limit)).unwrap_or_default();
            let limit = limit.trim().parse().unwrap_or(u64::MAX);
            assert!(total_memory() <= limit, "{}: {limit}", group.display());
        }
    }
}

#[test]
fn a_cache_that_does_not_fit_beside_the_weights_is_refused() {
    let memory = total_memory();
    let blocks = (memory / (2 << 20)) as usize;
    let config = config("--block-size 16");
    let check = |weights| check_cache(blocks, &config, &[1 << 16], weights);
    assert_eq!(check(Some(0)).unwrap(), 16 * blocks);
    assert_eq!(check(None).unwrap(), 16 * blocks);
    let error = check(Some(memory * 3 / 4)).unwrap_err().to_string();
    assert!(error.contains("beside weights of"), "{error}");
    assert_eq!(error.lines().count(), 1);
}

/// A cache that fits the machine, but not beside what else runs on it.
#[test]
fn a_cache_that_will_not_fit_is_told_of() {
    assert_eq!(cache_warning(8, 0, 8), None);
    assert_eq!(cache_warning(5, 3, 8), None);
    for (cache, states, parts, lower) in [
        (
            9,
            0,
            "takes 9 bytes, and only 8 are free",
            "lower --num-blocks",
        ),
        (
            5,
            4,
            "takes 5 bytes and recurrent states 4, and only 8 are free",
            "lower --max-num-seqs, --num-blocks",
        ),
    ] {
        let warning = cache_warning(cache, states, 8).unwrap();
        assert!(warning.contains(parts), "{warning}");
        assert!(warning.contains(lower), "{warning}");
        assert_eq!(warning.lines().count(), 1);
    }
}

#[test]
fn copies_of_states_are_told_of_where_they_are_made() {
    let told = |flags| told_of_states(&config(flags), 3 << 19);
    let each = "recurrent states: 1.5 MiB a sequence";
    assert_eq!(told("--no-prefix-caching"), each);
    assert_eq!(
        told(""),
        format!("{each}, and up to 256 copies for prefixes")
    );
}

#[test]
fn more_states_than_a_gpu_takes_are_refused_by_the_flag() {
    for (flags, most) in [("", 8062), ("--no-prefix-caching", 16_383)] {
        let check = |sequences: usize, per_state| {
            let flags = format!("{flags} --max-num-seqs {sequences}");
            check_count_of_states(&config(&flags), per_state).map_err(|e| e.to_string())
        };
        assert_eq!(check(most, 3 << 19), Ok(()));
        let error = check(most + 1, 3 << 19).unwrap_err();
        let (start, end) = (
            format!("--max-num-seqs {} needs 16385 recurrent states", most + 1),
            format!("a GPU takes 16384: at most {most} is accepted"),
        );
        assert!(
            error.starts_with(&start) && error.ends_with(&end),
            "{error}"
        );
        assert_eq!(check(most + 1, 0), Ok(()), "a model without states");
    }
}

/// Sequences beyond the rows of a step add no sampled rows.
#[test]
fn no_more_rows_are_sampled_than_a_step_has() {
    let model = shape("llama-3.2-1b");
    let bytes = |seqs| {
        let flags = format!("--max-num-batched-tokens 300 --spec-length 5 --max-num-seqs {seqs}");
        workspace(&model.info(), &config(&flags))
    };
    let full = 300 - StepLimits::default().draft_rows;
    assert!(bytes(full - 1) < bytes(full));
    assert_eq!(bytes(full), bytes(1000));
}

/// A GPU with 16 GB holds the pair with 8 sequences of 4,096 tokens.
#[test]
fn the_pair_fits_in_16_gigabytes() {
    let config = config("--max-num-seqs 8 --spec-length 5");
    let mut budget = DeviceMemory::of(16_000_000_000);
    for (name, whose) in [("llama-3.2-3b", "target"), ("llama-3.2-1b", "draft")] {
        let model = shape(name);
        budget.add(format!("{whose} weights"), weights(&model));
        budget.add(format!("KV cache, {whose}"), kv(&model, 8 * 4096));
    }
    let needs = workspace(&shape("llama-3.2-3b").info(), &config);
    budget.add("workspace", LIBRARY_BYTES + needs);
    assert!(budget.sum() <= budget.total(), "{budget}");
    assert!(budget.sum() > budget.total() * 3 / 4, "{budget}");
    let table = budget.to_string();
    assert!(
        table.starts_with("GPU memory in GiB\n  target weights"),
        "{table}"
    );
    assert!(table.ends_with("total                   14.90"), "{table}");
}

/// Bytes of this process in memory.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.unwrap().parse::<usize>().unwrap() << 10
}

/// The test runs with the allocator of the program: a pool's pages are the system's own zeros until they are
/// written.
#[test]
#[cfg(target_os = "linux")]
fn a_kv_pool_takes_no_memory_before_it_is_used() {
    use crate::kernels::quant::BlockType;
    use crate::kv::{KvForm, KvHeads, KvShape, KvStore};
    use candle_core::{DType, Device};

    // Kept: what another pool has left is no longer the system's.
    let mut pools = Vec::new();
    let floats = [DType::F16, DType::BF16, DType::F32].map(|dtype| (dtype, None, 128));
    let blocks = (DType::F16, Some(BlockType::Q8_0), 136);
    for (dtype, blocks, elements) in floats.into_iter().chain([blocks]) {
        let heads = KvHeads {
            form: blocks.map(KvForm::Blocks),
            ..KvHeads::new(8, 128)
        };
        let shape = KvShape::new(vec![heads; 4], dtype);
        let blocks = (3 << 29) / 16 / shape.bytes_per_token();
        let before = resident_bytes();
        let store = KvStore::new(shape, blocks, 16, &Device::Cpu).unwrap();
        let grown = resident_bytes().saturating_sub(before) >> 20;
        let (k, _) = &store.layers[3];
        assert_eq!(k.dims(), [16 * blocks, 8, elements]);
        let last = k.get(16 * blocks - 1).unwrap().to_dtype(DType::F32);
        let last = last.unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(last, vec![vec![0.; elements]; 8]);
        assert!(grown < 256, "{:?}: {grown} MiB of 1536", k.dtype());
        pools.push(store);
    }
}
